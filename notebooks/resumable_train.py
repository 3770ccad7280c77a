# define: the program's imports, and LeNet with dropout, so that random numbers matter
"""Trains LeNet so that it can be killed: torchrun --nproc-per-node=2 resumable_train.py --help"""

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def dropout_lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(50 * 4 * 4, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))


def new_training():
    torch.manual_seed(0)  # the same first weights in every run
    model = DistributedDataParallel(dropout_lenet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(dist.get_rank())  # from now on, each rank has its own dropout masks
    return model, optimizer


def snapshot(model, optimizer, step):
    random_states = [None] * dist.get_world_size()  # to be filled
    dist.all_gather_object(random_states, torch.get_rng_state())
    return {
        "model": model.module.state_dict(),  # `module` is the network within DDP
        "optimizer": optimizer.state_dict(),  # the momentum
        "step": step,  # steps that are done
        "random": random_states,  # one for each rank: the next dropout masks
    }


# define: `write` returns when the bytes are on the disk, so what is renamed later is complete
def write(state, path):
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def save(state, path):
    write(state, f"{path}.new")
    os.replace(f"{path}.new", path)  # the rename


def checkpoint(model, optimizer, step, path):
    state = snapshot(model, optimizer, step)  # all ranks take part
    if dist.get_rank() == 0:
        save(state, path)


def batch_rows(step):
    epoch = step // 16
    generator = torch.Generator().manual_seed(epoch)  # the same on every rank
    order = torch.randperm(512, generator=generator)
    first = 32 * (step % 16)  # the step's place in its epoch
    return order[first : first + 32]


def train_step(step, model, optimizer, images, labels):
    rank = dist.get_rank()
    k = dist.get_world_size()
    rows = batch_rows(step)[rank::k]
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images[rows]), labels[rows])
    loss.backward()
    optimizer.step()
    return loss.item()


def restore(path, model, optimizer):
    saved = torch.load(path)  # loads data only: code hidden in it isn't run
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    rank = dist.get_rank()
    if rank < len(saved["random"]):  # otherwise it has joined later
        torch.set_rng_state(saved["random"][rank])
    return saved["step"]


def begin_or_resume(name, path):
    model, optimizer = new_training()
    begin = 0
    if os.path.exists(path):
        begin = restore(path, model, optimizer)
    print(f'training "{name}" begins at step {begin}; ranks: {dist.get_world_size()}')
    return model, optimizer, begin


# define: `accident` (as the command line asks, at the first start only) and `flat_weights`
def accident(step, options):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    if step == options.kill_at and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == options.leave_at:
        os.kill(os.getppid(), signal.SIGTERM)  # its torchrun: the whole machine leaves
        time.sleep(60)


def flat_weights(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def train_or_resume(name, options):  # `options`: of the command line
    path = f"{options.folder}/{name}.pt"
    images, labels = torch.load(f"{options.folder}/data.pt")
    model, optimizer, begin = begin_or_resume(name, path)
    losses = {}
    weights = {}
    for step in range(begin, 48):
        if step % 4 == 0:
            checkpoint(model, optimizer, step, path)
        accident(step, options)
        losses[step] = train_step(step, model, optimizer, images, labels)
        weights[step] = flat_weights(model)
    checkpoint(model, optimizer, 48, path)
    torch.save([losses, weights], f"{options.folder}/{name}.rank{dist.get_rank()}")


# define: the command line, for the file only
if __name__ == "__main__" and "__file__" in globals():  # a notebook has no `__file__`
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="where data.pt is, and checkpoints go")
    parser.add_argument("names", nargs="+", help="of the trainings, done one after the other")
    parser.add_argument("--kill-at", type=int, help="step before which rank 1 is killed")
    parser.add_argument("--leave-at", type=int, help="step before which this machine leaves")
    options = parser.parse_args()
    try:
        dist.init_process_group("gloo")
        for name in options.names:
            train_or_resume(name, options)
        dist.destroy_process_group()
    except RuntimeError:  # the other process is gone
        time.sleep(2)  # torchrun names the first that it finds dead: let that be the other one
        raise
