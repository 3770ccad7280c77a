"""Trains a transformer on a mesh of processes, by PyTorch's own parts.

    torchrun --standalone --nproc-per-node=4 train_transformer.py --data 2 --tensor 2

It learns the text of the course's licence, letter by letter: the file LICENSE, which it looks for
beside itself and one folder up. On every mesh it does the same training: the same first weights and
the same batches, each of all processes together. So with --float64 all meshes end with the same
weights, but for the last digits. It needs transformer.py beside it, and PyTorch 2.13.
"""

import argparse
import hashlib
import logging
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from transformer import Transformer

WIDTH = 64
HEADS = 4
LAYERS = 4
TOKENS = 64  # letters that the network sees at a time
BATCH = 32  # examples in a step, of all processes together
MICRO_BATCHES = 4  # into which a pipeline cuts its part of a batch
RATE = 0.003
LARGEST_NORM = 0.5  # of the whole gradient; a longer one is scaled down

# On GPUs: "nccl", and torch.device("cuda", int(os.environ["LOCAL_RANK"])).
BACKEND = "gloo"
DEVICE = torch.device("cpu")


# --- Options, and what is refused: by all processes, also where one alone sees it -----------------


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=int, default=1, metavar="D",
                        help="number of data-parallel ranks; weights are sharded over them")
    parser.add_argument("--tensor", type=int, default=1, metavar="T",
                        help="into how many parts the matrices of a block are cut")
    parser.add_argument("--pipeline", type=int, default=1, metavar="P",
                        help="into how many stages; D * T * P is the number of processes")
    parser.add_argument("--steps", type=int, default=100, metavar="N",
                        help="counted from the beginning, also with --resume (default: 100)")
    parser.add_argument("--float64", action="store_true", help="instead of float32")
    parser.add_argument("--save", metavar="FILE",
                        help="rank 0 writes the whole network's weights after the last step")
    parser.add_argument("--checkpoint", metavar="FOLDER",
                        help="all write what --resume needs after the last step")
    parser.add_argument("--resume", metavar="FOLDER",
                        help="go on from a checkpoint, which may be another mesh's; all processes "
                             "must see its folder")
    options = parser.parse_args()
    reason = why_not(options)
    if reason:
        parser.error(reason)
    return options


def why_not(options):
    """What is wrong with the options, or None."""
    data, tensor, pipeline = options.data, options.tensor, options.pipeline
    if "WORLD_SIZE" not in os.environ:
        return "it runs under torchrun: torchrun --standalone --nproc-per-node=1 " + sys.argv[0]
    processes = int(os.environ["WORLD_SIZE"])
    if min(data, tensor, pipeline, options.steps) < 1:
        return (f"--data {data}, --tensor {tensor}, --pipeline {pipeline} and "
                f"--steps {options.steps} must all be at least 1")
    if data * tensor * pipeline != processes:
        return (f"--data {data} * --tensor {tensor} * --pipeline {pipeline} is "
                f"{data * tensor * pipeline}, but the number of processes is {processes}")
    if HEADS % tensor:
        return f"--tensor {tensor} doesn't divide the {HEADS} heads"
    if LAYERS % pipeline:
        return f"--pipeline {pipeline} doesn't divide the {LAYERS} layers"
    if BATCH % (data * micro_batches(pipeline)):
        return (f"--data {data} * {micro_batches(pipeline)} micro-batches don't divide the {BATCH} "
                "examples of a batch")
    return None


def why_not_here(options):
    """What is wrong with the files that this process sees, or None."""
    if options.save and not Path(options.save).absolute().parent.is_dir():
        return f"--save {options.save}: there is no such folder"
    if options.save and Path(options.save).is_dir():
        return f"--save {options.save} is a folder"
    if options.checkpoint and Path(options.checkpoint).is_file():
        return f"--checkpoint {options.checkpoint} is a file"
    if options.resume and not Path(options.resume, ".metadata").is_file():
        return f"--resume {options.resume}: there is no checkpoint"
    if not any(path.is_file() for path in text_paths()):
        return "there is no text: neither " + " nor ".join(map(str, text_paths()))
    return None


def refuse(reason):
    """All processes call it, with a reason or None: where any has one, all say it and end."""
    reasons = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    for rank, reason in enumerate(reasons):
        if reason:
            print(f"{sys.argv[0]}: error: rank {rank}: {reason}", file=sys.stderr, flush=True)
            sys.exit(2)


def micro_batches(pipeline):
    return MICRO_BATCHES if pipeline > 1 else 1  # one stage waits for nobody


# --- What is learned ------------------------------------------------------------------------------


def text_paths():
    here = Path(__file__).resolve().parent
    return [here / "LICENSE", here.parent / "LICENSE"]


def text_path():
    return next(path for path in text_paths() if path.is_file())


def text_hash():
    return hashlib.sha256(text_path().read_bytes()).hexdigest()[:16]


def read_text():
    """The numbers of all letters, `[letters of the text]`, and how many different letters."""
    text = text_path().read_text(encoding="utf-8")
    letters = sorted(set(text))
    number_of = {letter: number for number, letter in enumerate(letters)}
    return torch.tensor([number_of[letter] for letter in text]), len(letters)


def whole_batch(text, step):
    """Letters `[BATCH, TOKENS]`, and the letter after each; the same on all ranks."""
    generator = torch.Generator().manual_seed(step)  # so that a resumed training goes on with it
    starts = torch.randint(len(text) - TOKENS, (BATCH,), generator=generator)
    x = torch.stack([text[start : start + TOKENS] for start in starts])
    y = torch.stack([text[start + 1 : start + TOKENS + 1] for start in starts])
    return x.to(DEVICE), y.to(DEVICE)


def my_part(batch, mesh):
    return batch.chunk(mesh["data"].size())[mesh.get_local_rank("data")]


def loss_function(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


# --- The network, divided -------------------------------------------------------------------------


class Stage(nn.Module):
    """Some of a Transformer's blocks; on the first stage what comes before them, on the last after.

    Its parameters have the names that they have in the whole network, on every mesh.
    """

    def __init__(self, net, stage, stages):
        super().__init__()
        count = len(net.blocks) // stages
        self.blocks = nn.ModuleDict()
        for i in range(stage * count, (stage + 1) * count):
            self.blocks[str(i)] = net.blocks[i]
        self.token = net.token if stage == 0 else None
        self.place = net.place if stage == 0 else None
        self.norm = net.norm if stage == stages - 1 else None
        self.output = net.output if stage == stages - 1 else None

    def forward(self, x):
        if self.token is not None:
            places = torch.arange(x.shape[1], device=x.device)
            x = self.token(x) + self.place(places)
        for block in self.blocks.values():
            x = block(x)
        if self.output is not None:
            x = self.output(self.norm(x))
        return x


def divide(net, mesh):
    """First this rank's stage, then its part of each matrix, then its shard of each parameter."""
    stage = Stage(net, mesh.get_local_rank("pipeline"), mesh["pipeline"].size())
    for block in stage.blocks.values():
        parallelize_module(block, mesh["tensor"], {
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.join": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        })
        # Gathered once in a step, and not anew for each micro-batch; freed after the last.
        fully_shard(block, mesh=mesh["data"], reshard_after_forward=False)
    fully_shard(stage, mesh=mesh["data"], reshard_after_forward=False)  # what is in no block
    return stage


# --- A step ---------------------------------------------------------------------------------------


def clip(parameters, mesh):
    """Scale the whole gradient down to LARGEST_NORM, if its norm is more; returns that norm.

    A DTensor knows along which dimensions of its mesh it is sharded and along which replicated, so
    PyTorch counts each of its numbers once. But it can't mix the two kinds that are here: blocks'
    matrices, on a mesh of data and tensor, and what is on data alone. And no DTensor knows that
    other stages have parameters of their own.
    """
    on_mesh = {}
    for p in parameters:
        if p.device_mesh not in on_mesh:
            on_mesh[p.device_mesh] = []
        on_mesh[p.device_mesh].append(p)
    square = 0
    for alike in on_mesh.values():
        square += nn.utils.get_total_norm([p.grad for p in alike]).full_tensor() ** 2
    dist.all_reduce(square, group=mesh.get_group("pipeline"))
    norm = square.sqrt()
    for alike in on_mesh.values():
        nn.utils.clip_grads_with_norm_(alike, LARGEST_NORM, norm)
    return norm.item()


def whole_loss(losses, mesh):
    """The mean over all micro-batches and data ranks; only last stages have any `losses`."""
    loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
    if losses:
        loss += torch.stack(losses).mean()
    dist.all_reduce(loss, group=mesh.get_group("pipeline"))
    dist.all_reduce(loss, group=mesh.get_group("data"))
    return loss.item() / mesh["data"].size()


def train_step(schedule, optimizer, x, y, mesh):
    """Returns the loss of the whole batch, and the whole gradient's norm."""
    optimizer.zero_grad()
    losses = []
    if mesh.get_local_rank("pipeline") == 0:
        schedule.step(x, target=y, losses=losses, return_outputs=False)
    else:
        schedule.step(target=y, losses=losses, return_outputs=False)
    norm = clip(optimizer.param_groups[0]["params"], mesh)
    optimizer.step()
    return whole_loss(losses, mesh), norm


# --- What is kept ---------------------------------------------------------------------------------

# The optimizer's state by parameters' names, which are the same on every mesh, not by numbers.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def settings(options):
    """What must be the same where a training goes on."""
    return {
        "WIDTH": WIDTH,
        "HEADS": HEADS,
        "LAYERS": LAYERS,
        "TOKENS": TOKENS,
        "BATCH": BATCH,
        "RATE": RATE,
        "LARGEST_NORM": LARGEST_NORM,
        "dtype": "float64" if options.float64 else "float32",
        "hash of the text": text_hash(),
    }


def save_checkpoint(options, stage, optimizer):
    """Best into a new folder: one that has a checkpoint is overwritten, file by file."""
    weights, state = get_state_dict(stage, optimizer, options=BY_NAME)
    checkpoint.save({"weights": weights, "state": state, "step": options.steps,
                     "settings": settings(options)}, checkpoint_id=options.checkpoint)


def why_not_resumed(options):
    """In what the checkpoint's training differs from this one, or None."""
    here = settings(options)
    saved = {"step": 0, "settings": dict(here)}
    checkpoint.load(saved, checkpoint_id=options.resume)
    for name, value in saved["settings"].items():
        if value != here[name]:
            return f"--resume {options.resume}: {name} was {value}, and is {here[name]} now"
    if saved["step"] > options.steps:
        return f"--steps {options.steps}: the checkpoint has done {saved['step']} already"
    return None


def load_checkpoint(folder, stage, optimizer):
    """Returns how many steps are done."""
    weights, state = get_state_dict(stage, optimizer, options=BY_NAME)
    saved = {"weights": weights, "state": state, "step": 0}
    checkpoint.load(saved, checkpoint_id=folder)  # fills in this rank's parts
    set_state_dict(stage, optimizer, model_state_dict=saved["weights"],
                   optim_state_dict=saved["state"], options=BY_NAME)
    return saved["step"]


def save_weights(path, stage, mesh):
    """All ranks call it; rank 0 writes what `Transformer(...).load_state_dict` takes."""
    weights = {name: p.full_tensor().cpu() for name, p in stage.state_dict().items()}
    stages = None
    if mesh.get_local_rank("pipeline") == 0:
        stages = [None] * mesh["pipeline"].size()  # to be filled
    dist.gather_object(weights, stages, group=mesh.get_group("pipeline"), group_dst=0)
    if dist.get_rank() == 0:
        whole = {}
        for weights in stages:
            whole.update(weights)
        torch.save(whole, path)


# --- All of it ------------------------------------------------------------------------------------


def train(options):
    # From the outermost to the innermost: neighbours in rank are of one tensor group.
    mesh = init_device_mesh(DEVICE.type, (options.data, options.pipeline, options.tensor),
                            mesh_dim_names=("data", "pipeline", "tensor"))
    text, vocabulary = read_text()
    torch.manual_seed(0)
    net = Transformer(vocabulary, WIDTH, HEADS, LAYERS, TOKENS)
    net.to(torch.float64 if options.float64 else torch.float32)
    stage = divide(net, mesh)  # which moves what this rank keeps to its device
    optimizer = torch.optim.Adam(stage.parameters(), lr=RATE)
    schedule = Schedule1F1B(
        PipelineStage(stage, mesh.get_local_rank("pipeline"), options.pipeline, DEVICE,
                      group=mesh.get_group("pipeline")),
        micro_batches(options.pipeline), loss_function)

    done = 0
    if options.resume:
        done = load_checkpoint(options.resume, stage, optimizer)
    if done == options.steps and dist.get_rank() == 0:
        print(f"no step to do: the checkpoint has done {done}", flush=True)
    for step in range(done, options.steps):
        x, y = whole_batch(text, step)
        loss, norm = train_step(schedule, optimizer, my_part(x, mesh), my_part(y, mesh), mesh)
        if dist.get_rank() == 0 and (step in (done, options.steps - 1) or step % 10 == 9):
            print(f"step {step + 1}: loss {loss:.3f}, norm {norm:.3f}", flush=True)

    if options.checkpoint:
        save_checkpoint(options, stage, optimizer)
    if options.save:
        save_weights(options.save, stage, mesh)


def main():
    options = parse()
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    # What has waited so long waits for a process that never came, or has ended.
    dist.init_process_group(BACKEND, timeout=timedelta(minutes=5))
    refuse(why_not_here(options))
    first = [text_hash()]
    dist.broadcast_object_list(first)
    refuse(None if text_hash() == first[0] else f"{text_path()} is not the text of rank 0")
    if options.resume:
        refuse(why_not_resumed(options))
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
