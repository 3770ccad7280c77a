"""Trains LeNet so that it can be killed: started anew, it goes on from its last checkpoint.

    torchrun --nproc-per-node=2 --max-restarts=1 resumable_train.py FOLDER NAME

All machines must see FOLDER. Its `data.pt` has 512 images and their labels, as
`torch.save([images, labels], path)` writes them. NAME.pt will be the checkpoint. NAME.weights will
have all weights after each step since it last began.

On two ranks it ends with the weights that it would have had, bit for bit. On more their last digits
may differ: a new DDP fills its buckets in another order in its first pass.
"""

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 48  # three epochs of 512 images, 32 in a step
STEPS_PER_CHECKPOINT = 4


def dropout_lenet():
    """LeNet with dropout, so that random numbers matter. Takes images [n, 1, 28, 28]."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(50 * 4 * 4, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))


def new_training():
    """Model and optimizer as they are before the first step."""
    torch.manual_seed(0)  # the same first weights in every run
    model = DistributedDataParallel(dropout_lenet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(dist.get_rank())  # from now on, each rank has its own dropout masks
    return model, optimizer


def snapshot(model, optimizer, step):
    """All that a resumed training needs after `step` steps. All ranks call it."""
    random_states = [None] * dist.get_world_size()  # to be filled
    dist.all_gather_object(random_states, torch.get_rng_state())
    return {
        "model": model.module.state_dict(),  # `module` is the network within DDP
        "optimizer": optimizer.state_dict(),  # the momentum
        "step": step,  # steps that are done
        "random": random_states,  # one for each rank: the next dropout masks
    }


def write(state, path):
    """Returns when the bytes are on the disk, so that what is renamed later is complete."""
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def save(state, path):
    """Whenever it is killed, `path` has the old checkpoint or the new one, whole."""
    write(state, f"{path}.new")
    os.replace(f"{path}.new", path)  # the rename


def checkpoint(model, optimizer, step, path):
    """Writes what is the same on all ranks once. All ranks call it."""
    state = snapshot(model, optimizer, step)
    if dist.get_rank() == 0:
        save(state, path)


def restore(path, model, optimizer):
    """Brings back what `checkpoint` has written; returns how many steps are done."""
    saved = torch.load(path)  # loads data only: code hidden in it isn't run
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    rank = dist.get_rank()
    if rank < len(saved["random"]):  # otherwise it has joined later
        torch.set_rng_state(saved["random"][rank])
    return saved["step"]


def begin_or_resume(name, path):
    """Model, optimizer and first step of a training, from its checkpoint if it has one."""
    model, optimizer = new_training()
    begin = 0
    if os.path.exists(path):
        begin = restore(path, model, optimizer)
    print(f'training "{name}" begins at step {begin}; ranks: {dist.get_world_size()}')
    return model, optimizer, begin


def batch_rows(step):
    """The rows of this step's 32 images, of all ranks together; each epoch has its own order."""
    epoch = step // 16
    generator = torch.Generator().manual_seed(epoch)  # the same on every rank
    order = torch.randperm(512, generator=generator)
    first = 32 * (step % 16)  # the step's place in its epoch
    return order[first : first + 32]


def train_step(step, model, optimizer, images, labels):
    """Trains on this rank's share of the batch."""
    rank = dist.get_rank()
    k = dist.get_world_size()
    rows = batch_rows(step)[rank::k]
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images[rows]), labels[rows])
    loss.backward()
    optimizer.step()


def flat_weights(model):
    """All weights as one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def accident(step, options):
    """Has happen before `step` what the command line asks for, but not after a restart."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    if step == options.kill_at and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == options.leave_at:
        os.kill(os.getppid(), signal.SIGTERM)  # its torchrun: the whole machine leaves
        time.sleep(60)


def train_or_resume(name, options):
    """Does the steps that are left of the training `name`. `options` are those of `main`."""
    path = f"{options.folder}/{name}.pt"
    images, labels = torch.load(f"{options.folder}/data.pt")
    model, optimizer, begin = begin_or_resume(name, path)
    weights = {}
    for step in range(begin, STEPS):
        if step % STEPS_PER_CHECKPOINT == 0:
            checkpoint(model, optimizer, step, path)
        accident(step, options)
        train_step(step, model, optimizer, images, labels)
        weights[step] = flat_weights(model)
    checkpoint(model, optimizer, STEPS, path)
    if dist.get_rank() == 0:
        torch.save(weights, f"{options.folder}/{name}.weights")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
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


if __name__ == "__main__":
    main()
