"""Trains LeNet on random images, for as many steps as each line that it reads says.

    echo 6 | python lenet_contestant.py --devices 0 1

Network and step are chapter 04's, from helpers.by_hand. It prints "ready", and after each line how
many images it has trained on.
"""

import argparse
import os
import runpy
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path


def without_settings():
    """Import MXNet before helpers, which comes too late then to make its settings."""
    folder = Path(find_spec("helpers").origin).parent
    gpu = runpy.run_path(folder / "gpu.py")
    if gpu["is_cuda_build"]():
        gpu["preload"]()
    import mxnet  # noqa: F401

    warnings.filterwarnings("ignore", "mxnet was imported before helpers")


def contend(kind, numbers, images, apart):
    """Train on the devices `numbers` together, or each `apart` on its part of the images."""
    from helpers.by_hand import get_params, init_params, train_batch  # makes the settings

    import mxnet as mx

    contexts = [mx.Context(kind, number) for number in numbers]
    groups = [[context] for context in contexts] if apart else [contexts]
    trainings = []
    for group in groups:
        x = mx.nd.random.uniform(shape=(images // len(groups), 1, 28, 28))
        y = mx.nd.zeros(len(x))
        replicas = [get_params(init_params(), context) for context in group]
        trainings.append((x, y, replicas, group))
    mx.nd.waitall()
    print("ready", flush=True)
    for line in sys.stdin:
        trained = 0
        for _ in range(int(line)):
            for x, y, replicas, group in trainings:
                train_batch(x, y, replicas, group, lr=0.01)
                trained += len(x)
        mx.nd.waitall()
        print(trained, "images", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", default="cpu", help="cpu or gpu")
    parser.add_argument("--devices", type=int, nargs="+", default=[0], help="their numbers")
    parser.add_argument("--images", type=int, default=256, help="a step, on all devices together")
    parser.add_argument("--threads", help="cores that an operator may use; 1 by helpers' settings")
    parser.add_argument("--apart", action="store_true", help="a training for each device")
    parser.add_argument("--stock", action="store_true", help="without helpers' settings")
    options = parser.parse_args()
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = options.threads
    if options.stock:
        without_settings()
    contend(options.kind, options.devices, options.images, options.apart)
