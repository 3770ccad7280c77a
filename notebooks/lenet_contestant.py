# measure: lenet_contestant.py, the program that each contestant runs
"""Trains LeNet on random images, for as many steps as each line that it reads says.

    echo 6 | python lenet_contestant.py --devices 0 1

It prints "ready" and the settings that it found, and after each line how many images it has trained
on, and where replicas have changed. It has MXNet's settings from its environment alone: MXNet is
imported first, so helpers comes too late to make its own.
"""

import argparse
import os
import runpy
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path


def prepare():
    """Do what helpers does before MXNet loads, all but its settings, without importing it."""
    folder = Path(find_spec("helpers").origin).parent
    gpu = runpy.run_path(folder / "gpu.py")
    if gpu["is_cuda_build"]():
        gpu["preload"]()
    runpy.run_path(folder / "newer_numpy.py")["prepare"]()


def contend(kind, numbers, images, apart):
    """Train on the devices `numbers` together, or each `apart` on its part of the images."""
    prepare()
    assert "helpers" not in sys.modules, "its settings would replace those of the environment"
    prefixes = ("OMP_", "OPENBLAS_", "MXNET_", "MALLOC_")
    settings = [f"{name}={os.environ[name]}" for name in os.environ if name.startswith(prefixes)]
    import mxnet as mx

    warnings.filterwarnings("ignore", "mxnet was imported before helpers")
    from helpers.by_hand import get_params, init_params, train_batch

    contexts = [mx.Context(kind, number) for number in numbers]
    groups = [[context] for context in contexts] if apart else [contexts]
    trainings = []
    for group in groups:
        x = mx.nd.random.uniform(shape=(images // len(groups), 1, 28, 28))
        y = mx.nd.zeros(len(x))
        replicas = [get_params(init_params(), context) for context in group]
        trainings.append((x, y, replicas, group))
    mx.nd.waitall()
    print("ready", *settings, flush=True)
    for line in sys.stdin:
        trained = 0
        for _ in range(int(line)):
            for x, y, replicas, group in trainings:
                train_batch(x, y, replicas, group, lr=0.01)
                trained += len(x)
        mx.nd.waitall()
        places = []
        for _, _, replicas, _ in trainings:
            for replica in replicas:
                changed = replica[-1].asnumpy().any()  # the last bias was 0 at the start
                places.append(str(replica[-1].context) if changed else "unchanged")
        print(trained, "images,", len(trainings), "trainings:", *places, flush=True)


if __name__ == "__main__" and "__file__" in globals():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", default="cpu", help="cpu or gpu")
    parser.add_argument("--devices", type=int, nargs="+", default=[0], help="their numbers")
    parser.add_argument("--images", type=int, default=256, help="a step, on all devices together")
    parser.add_argument("--apart", action="store_true", help="a training for each device")
    options = parser.parse_args()
    contend(options.kind, options.devices, options.images, options.apart)
