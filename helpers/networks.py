"""The networks that several chapters train, in Gluon. In PyTorch: `helpers.torch_networks`.

Each is the one that its chapter teaches; the chapter runs both on the same input. None is
initialised.
"""

from mxnet.gluon import nn


def lenet():
    """LeNet with ReLU and max pooling for `[n, 1, 28, 28]`, 10 scores. Taught in chapter 06."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(20, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(50, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(128, activation="relu"), nn.Dense(10))
    return net


class HybridResidual(nn.HybridBlock):
    """Two convolutions and a way past them. Taught in chapter 08.

    strides: of the first convolution; project: whether the way past is a 1 x 1 convolution, which
    it must be where strides or channels change; norm: makes a normalisation. It takes `mx.nd`
    arrays and, after `npx.set_np()`, `mx.np` ones: so ReLU is a layer, which knows both.
    """

    def __init__(self, channels, strides=1, project=False, norm=nn.BatchNorm):
        super().__init__()
        self.conv1 = nn.Conv2D(channels, kernel_size=3, strides=strides, padding=1)
        self.conv2 = nn.Conv2D(channels, kernel_size=3, padding=1)
        self.projection = None
        if project:
            self.projection = nn.Conv2D(channels, kernel_size=1, strides=strides)
        self.norm1 = norm()
        self.norm2 = norm()
        self.relu = nn.Activation("relu")

    def hybrid_forward(self, F, x):
        change = self.conv1(x)
        change = self.norm1(change)
        change = self.relu(change)
        change = self.conv2(change)
        change = self.norm2(change)
        if self.projection is not None:
            x = self.projection(x)
        return self.relu(x + change)


def hybrid_resnet18(num_classes, channels=(64, 128, 256, 512), norm=nn.BatchNorm):
    """d2l's ResNet-18 for small images, which can be hybridised. Taught in chapter 08.

    Takes `[n, c, h, w]` and returns `num_classes` scores.
    """
    net = nn.HybridSequential()
    net.add(nn.Conv2D(channels[0], kernel_size=3, padding=1))
    net.add(norm())
    net.add(nn.Activation("relu"))
    net.add(HybridResidual(channels[0], norm=norm))
    net.add(HybridResidual(channels[0], norm=norm))
    for width in channels[1:]:
        net.add(HybridResidual(width, strides=2, project=True, norm=norm))
        net.add(HybridResidual(width, norm=norm))
    net.add(nn.GlobalAvgPool2D())
    net.add(nn.Dense(num_classes))
    return net
