"""LeNet of `helpers.networks` in PyTorch, with the same parameters in the same order."""

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
