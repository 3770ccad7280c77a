import helpers  # first: it prepares simulated devices

import mxnet as mx
from helpers.networks import lenet
from mxnet import autograd, gluon
from mxnet.gluon.data import ArrayDataset, DataLoader

k = 2  # how many devices
data = helpers.load_data("mnist", limit=12_800)
dataset = ArrayDataset(data.train_images, data.train_labels)
loader = DataLoader(dataset, batch_size=64, shuffle=True)
test_dataset = ArrayDataset(data.test_images, data.test_labels)
test_loader = DataLoader(test_dataset, batch_size=500)

devices = helpers.devices(k)
net = lenet()
net.initialize(mx.init.Xavier(), ctx=devices)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.3})
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

for epoch in [1, 2]:
    metric = mx.metric.Accuracy()
    for x, y in loader:
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
        trainer.step(len(x))
        metric.update(y_shards, outputs)
    name, share_right = metric.get()
    print(f"k = {k}, epoch {epoch}: training accuracy {share_right:.3f}")

    metric = mx.metric.Accuracy()  # NEW: test images
    for x, y in test_loader:
        x_shards = gluon.utils.split_and_load(x, devices, even_split=False)
        y_shards = gluon.utils.split_and_load(y, devices, even_split=False)
        outputs = [net(x_shard) for x_shard in x_shards]
        metric.update(y_shards, outputs)
    name, share_right = metric.get()
    print(f"k = {k}, epoch {epoch}: test accuracy {share_right:.3f}")
