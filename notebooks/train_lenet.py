"""Trains LeNet on k devices, and tests it after each epoch: python train_lenet.py"""

import helpers  # first: it prepares simulated devices

import mxnet as mx
from helpers.networks import lenet
from mxnet import autograd, gluon
from mxnet.gluon.data import ArrayDataset, DataLoader

cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def train_one_epoch(net, trainer, batches, devices):
    metric = mx.metric.Accuracy()
    for x, y in batches:
        x_shards = gluon.utils.split_and_load(x, devices, even_split=False)
        y_shards = gluon.utils.split_and_load(y, devices, even_split=False)
        outputs = []
        losses = []
        with autograd.record():
            for x_shard, y_shard in zip(x_shards, y_shards):
                output = net(x_shard)
                outputs.append(output)
                losses.append(cross_entropy(output, y_shard))
        autograd.backward(losses)
        trainer.step(len(x))  # all images of this batch, on all devices
        metric.update(y_shards, outputs)
    name, accuracy = metric.get()
    return accuracy


def evaluate(net, batches, devices):
    metric = mx.metric.Accuracy()
    for x, y in batches:
        x_shards = gluon.utils.split_and_load(x, devices, even_split=False)
        y_shards = gluon.utils.split_and_load(y, devices, even_split=False)
        outputs = [net(x_shard) for x_shard in x_shards]
        metric.update(y_shards, outputs)
    name, accuracy = metric.get()
    return accuracy


def main(k):
    devices = helpers.devices(k)
    data = helpers.load_data("mnist", limit=13_000)
    train_set = ArrayDataset(data.train_images, data.train_labels)
    test_set = ArrayDataset(data.test_images, data.test_labels)
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True, last_batch="discard")
    test_loader = DataLoader(test_set, batch_size=500)

    net = lenet()
    net.initialize(mx.init.Xavier(), ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.3})
    for epoch in [1, 2]:
        accuracy = train_one_epoch(net, trainer, train_loader, devices)
        print(f"k = {k}, epoch {epoch}: training accuracy {accuracy:.3f}")
        accuracy = evaluate(net, test_loader, devices)
        print(f"k = {k}, epoch {epoch}: test accuracy {accuracy:.3f}")
    return net


if __name__ == "__main__":
    main(k=2)
