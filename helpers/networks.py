"""The networks that several chapters train, in Gluon. In PyTorch: `helpers.torch_networks`.

Each is the one that its chapter teaches; a test holds the two equal. None is initialised.
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
    """Two convolutions and a way past them, in MXNet's NumPy mode. Taught in chapter 08.

    strides: of the first convolution; project: whether the way past is a 1 x 1 convolution, which
    it must be where strides or channels change; norm: makes a normalisation.
    """

    def __init__(self, channels, strides=1, project=False, norm=nn.BatchNorm, **kwargs):
        super().__init__(**kwargs)
        self.conv1 = nn.Conv2D(channels, kernel_size=3, strides=strides, padding=1)
        self.conv2 = nn.Conv2D(channels, kernel_size=3, padding=1)
        self.project = nn.Conv2D(channels, kernel_size=1, strides=strides) if project else None
        self.norm1, self.norm2 = norm(), norm()

    def hybrid_forward(self, F, x):
        change = F.npx.activation(self.norm1(self.conv1(x)), act_type="relu")
        change = self.norm2(self.conv2(change)) + (self.project(x) if self.project else x)
        return F.npx.activation(change, act_type="relu")


def hybrid_resnet18(num_classes, channels=(64, 128, 256, 512), norm=nn.BatchNorm):
    """d2l's ResNet-18 for small images, which can be hybridised. Taught in chapter 08.

    Takes `[n, c, h, w]` in MXNet's NumPy mode (`npx.set_np()`) and returns `num_classes` scores.
    """
    net = nn.HybridSequential()
    net.add(nn.Conv2D(channels[0], kernel_size=3, padding=1), norm(), nn.Activation("relu"))
    for width, stride in zip(channels, (1, 2, 2, 2)):
        net.add(HybridResidual(width, stride, project=stride > 1, norm=norm),
                HybridResidual(width, norm=norm))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(num_classes))
    return net
