"""The networks of `helpers.networks` in PyTorch, with the same parameters in the same order.

Each is the one that its chapter teaches; a test holds the two equal.
"""

import torch
from torch import nn

WIDTHS = 64, 128, 256, 512


def lenet():
    """LeNet with ReLU and max pooling for `[n, 1, 28, 28]`, 10 scores. Taught in chapter 13."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(50 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))


class Residual(nn.Module):
    """Two convolutions and a way past them, from `before` to `after` channels. Chapter 13."""

    def __init__(self, before, after, stride=1, activate=torch.relu):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(after)
        self.project = nn.Conv2d(before, after, 1, stride) if stride > 1 else None
        self.activate = activate

    def forward(self, x):
        change = self.norm2(self.conv2(self.activate(self.norm1(self.conv1(x)))))
        return self.activate(change + (x if self.project is None else self.project(x)))


def resnet18(first=nn.ReLU, activate=torch.relu):
    """d2l's ResNet-18 for `[n, 1, 28, 28]`, 10 scores. Taught in chapter 13."""
    layers = [nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), first()]
    for before, after, stride in zip((64, *WIDTHS), WIDTHS, (1, 2, 2, 2)):
        layers += [Residual(before, after, stride, activate), Residual(after, after, 1, activate)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
