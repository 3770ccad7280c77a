"""LeNet and its training step without Gluon: what chapter 04 builds and others train again.

Chapter 04 takes `init_params` from here; it builds the other functions in the open, and runs both
on the same input. A network's parameters are a list of eight arrays, a weight and a bias for each
of `layers`.
"""

import numpy as np
from mxnet import autograd, nd

from helpers.parallel import allreduce, split_and_load

# Of each layer: the shape of its weight, the number of biases, the size of the random numbers. It
# is a gain times sqrt(2 / inputs); gain 1 is that of K. He et al., arXiv:1502.01852.
layers = [
    ((20, 1, 3, 3), 20, 1.0 * np.sqrt(2 / 9)),  # convolution: 1 x 3 x 3 inputs
    ((50, 20, 5, 5), 50, 1.5 * np.sqrt(2 / 500)),  # convolution: 20 x 5 x 5 inputs
    ((800, 128), 128, 1.5 * np.sqrt(2 / 800)),  # dense: 50 x 4 x 4 inputs
    ((128, 10), 10, 0.5 * np.sqrt(2 / 128)),  # dense
]


def pool(h):
    """ReLU, then the mean of each 2 x 2 square."""
    return nd.Pooling(nd.relu(h), pool_type="avg", kernel=(2, 2), stride=(2, 2))


def lenet(x, replica):
    """The scores `[n, 10]` of images `[n, 1, 28, 28]`, by the parameters in `replica`."""
    w1, b1, w2, b2, w3, b3, w4, b4 = replica
    h = nd.Convolution(x, w1, b1, kernel=(3, 3), num_filter=20)  # [n, 20, 26, 26]
    h = pool(h)  # [n, 20, 13, 13]
    h = nd.Convolution(h, w2, b2, kernel=(5, 5), num_filter=50)  # [n, 50, 9, 9]
    h = pool(h)  # [n, 50, 4, 4]
    h = h.flatten()  # [n, 800]
    h = nd.relu(nd.dot(h, w3) + b3)  # [n, 128]
    return nd.dot(h, w4) + b4  # [n, 10]


def loss_sum(x, y, replica):
    """The cross-entropy, summed over the images."""
    log_probabilities = nd.log_softmax(lenet(x, replica))
    return -log_probabilities.pick(y).sum()


def init_params(seed=0):
    """A start: random weights and biases of 0, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    params = []
    for shape, biases, size in layers:
        params.append(size * rng.standard_normal(shape))
        params.append(np.zeros(biases))
    return params


def get_params(params, device, dtype="float32"):
    """A replica: copies of `params` on a device, each with room for its gradient."""
    replica = []
    for values in params:
        param = nd.array(values, ctx=device, dtype=dtype)
        param.attach_grad()
        replica.append(param)
    return replica


def train_batch(x, y, replicas, devices, lr, all_reduce=allreduce):
    """One step on all devices, in place. Returns the batch's mean loss, on the first of them."""
    x_shards = split_and_load(x, devices, even=False)
    y_shards = split_and_load(y, devices, even=False)

    losses = []
    with autograd.record():
        for x_shard, y_shard, replica in zip(x_shards, y_shards, replicas):
            losses.append(loss_sum(x_shard, y_shard, replica))
    for loss in losses:
        loss.backward()

    for number in range(len(replicas[0])):
        grads = [replica[number].grad for replica in replicas]
        all_reduce(grads)

    for replica in replicas:
        for param in replica:
            param -= lr / len(x) * param.grad

    total = 0
    for loss in losses:
        total = total + loss.as_in_context(devices[0])
    return total / len(x)
