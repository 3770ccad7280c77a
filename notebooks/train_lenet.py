import helpers  # first: it prepares simulated devices

import mxnet as mx
from helpers.networks import lenet
from mxnet import autograd, gluon
from mxnet.gluon.data import ArrayDataset, DataLoader
from mxnet.gluon.utils import split_and_load

k = 2  # how many devices
data = helpers.load_data("mnist", limit=12_800)
loader = DataLoader(ArrayDataset(data.train_images, data.train_labels), 64, shuffle=True)
test_loader = DataLoader(ArrayDataset(data.test_images, data.test_labels), 500)

devices = helpers.devices(k)
net = lenet()
net.initialize(mx.init.Xavier(), ctx=devices)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.3})
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

for epoch in [1, 2]:
    metric = mx.metric.Accuracy()
    for x, y in loader:
        x_shards = split_and_load(x, devices, even_split=False)
        y_shards = split_and_load(y, devices, even_split=False)
        with autograd.record():
            outputs = [net(x_shard) for x_shard in x_shards]
            losses = [cross_entropy(output, y_shard) for output, y_shard in zip(outputs, y_shards)]
        autograd.backward(losses)
        trainer.step(len(x))
        metric.update(y_shards, outputs)
    print(f"k = {k}, epoch {epoch}: training accuracy {metric.get()[1]:.3f}")
    metric.reset()
    for x, y in test_loader:  # NEW: test images
        x_shards = split_and_load(x, devices, even_split=False)
        y_shards = split_and_load(y, devices, even_split=False)
        metric.update(y_shards, [net(x_shard) for x_shard in x_shards])
    print(f"k = {k}, epoch {epoch}: test accuracy {metric.get()[1]:.3f}")
