"""The networks of `helpers.networks` in PyTorch, with the same parameters in the same order.

Each is the one that its chapter teaches; a test holds the two equal.
"""

from torch import nn


def lenet():
    """LeNet with ReLU and max pooling for `[n, 1, 28, 28]`, 10 scores. Taught in chapter 13."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 3),  # 28 x 28 pixels become 26 x 26
        nn.ReLU(),
        nn.MaxPool2d(2),  # 13 x 13
        nn.Conv2d(20, 50, 5),  # 9 x 9
        nn.ReLU(),
        nn.MaxPool2d(2),  # 4 x 4
        nn.Flatten(),
        nn.Linear(50 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10))


class Residual(nn.Module):
    """Two convolutions and a way past them, from `before` to `after` channels.

    Taught in chapter 13's deeper notebook ResNet twice.
    """

    def __init__(self, before, after, stride=1, activation=nn.ReLU):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(after)
        self.project = None
        if stride > 1:
            self.project = nn.Conv2d(before, after, 1, stride)
        self.activation = activation()

    def forward(self, x):
        change = self.activation(self.norm1(self.conv1(x)))
        change = self.norm2(self.conv2(change))
        if self.project is not None:
            x = self.project(x)
        return self.activation(change + x)


def resnet18(activation=nn.ReLU):
    """d2l's ResNet-18 for `[n, 1, 28, 28]`, 10 scores. Taught with `Residual`."""
    layers = [nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), activation()]
    before = 64
    for width, stride in [(64, 1), (128, 2), (256, 2), (512, 2)]:
        layers.append(Residual(before, width, stride, activation))
        layers.append(Residual(width, width, 1, activation))
        before = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)
