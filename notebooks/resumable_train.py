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


def new_training(seed):
    torch.manual_seed(0)  # the same first weights in every run
    model = DistributedDataParallel(dropout_lenet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(100 * seed + dist.get_rank())  # own dropout masks for each rank
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


def save(state, path):
    with open(f"{path}.new", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # onto the disk, against a power failure
    os.replace(f"{path}.new", path)  # the rename


def checkpoint(model, optimizer, step, path):
    state = snapshot(model, optimizer, step)  # all ranks take part
    if dist.get_rank() == 0:  # one writes for all
        save(state, path)


def batch_rows(step):
    epoch = step // 16
    place = step % 16  # in the epoch
    generator = torch.Generator().manual_seed(epoch)  # the same order on every rank
    order = torch.randperm(512, generator=generator)
    return order[32 * place : 32 * place + 32]


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
    saved = torch.load(path)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    rank = dist.get_rank()
    if rank < len(saved["random"]):
        torch.set_rng_state(saved["random"][rank])
    return saved["step"]


# define: the accident, by `--kill-at` or `--leave-at`, at the first start only
def accident(step, kill_at, leave_at):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    if step == kill_at and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == leave_at:
        os.kill(os.getppid(), signal.SIGTERM)  # its torchrun: the whole machine leaves
        time.sleep(60)


LAST = 48


def train_or_resume(folder, name, seed, kill_at, leave_at):
    path = f"{folder}/{name}.pt"
    images, labels = torch.load(f"{folder}/data.pt")
    model, optimizer = new_training(seed)
    begin = 0
    if os.path.exists(path):
        begin = restore(path, model, optimizer)
    print(f"{name} begins at step {begin}; ranks: {dist.get_world_size()}")

    losses = {}  # by step
    weights = {}
    for step in range(begin, LAST):
        if step % 4 == 0:
            checkpoint(model, optimizer, step, path)
        accident(step, kill_at, leave_at)
        losses[step] = train_step(step, model, optimizer, images, labels)
        weights[step] = nn.utils.parameters_to_vector(model.parameters()).detach()
    checkpoint(model, optimizer, LAST, path)

    results = {"losses": losses, "weights": weights}
    torch.save(results, f"{folder}/{name}.rank{dist.get_rank()}")


# define: the command line, where this is a file (a notebook is `__main__` too, but no file)
if __name__ == "__main__" and "__file__" in globals():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="where data.pt is, and checkpoints go")
    parser.add_argument("names", nargs="+", help="of the trainings, done one after the other")
    parser.add_argument("--seed", type=int, default=0, help="of the dropout masks")
    parser.add_argument("--kill-at", type=int, help="step before which rank 1 is killed")
    parser.add_argument("--leave-at", type=int, help="step before which this machine leaves")
    options = parser.parse_args()
    try:
        dist.init_process_group("gloo")
        for name in options.names:
            train_or_resume(options.folder, name, options.seed, options.kill_at,
                            options.leave_at)
        dist.destroy_process_group()
    except RuntimeError:  # the other process is gone
        time.sleep(2)  # torchrun names the first that it finds dead: let that be the other one
        raise
