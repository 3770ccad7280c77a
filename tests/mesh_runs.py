"""notebooks/train_transformer.py, several times in one start of processes: that is what takes time.

    torchrun mesh_runs.py NOTEBOOKS RUNS

RUNS is JSON: a list of command lines, each a list. NAME=3 in one sets a constant of the program for
this run, READS2=FILE what rank 2 takes for the text. ["one process", STEPS, FILE] is the training
that all others are compared with. Each rank prints "run", then what the run prints and how it ends,
if not well.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
sys.stderr = sys.stdout  # where refusals are printed

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import train_transformer as program  # noqa: E402
from torch import nn  # noqa: E402

CONSTANTS = {name: value for name, value in vars(program).items() if name.isupper()}
text_paths = program.text_paths

# All runs share one meeting of the processes, since DTensors' caches know groups by name.
init_process_group = dist.init_process_group
destroy_process_group = dist.destroy_process_group


def meet_once(*args, **kwargs):
    if not dist.is_initialized():
        init_process_group(*args, **kwargs)


def stay():
    pass


dist.init_process_group = meet_once
dist.destroy_process_group = stay


def one_process(steps):
    """A loop without a mesh, by an optimizer that gets the whole batch's gradient."""
    text, vocabulary = program.read_text()
    torch.manual_seed(0)
    net = program.Transformer(vocabulary, program.WIDTH, program.HEADS, program.LAYERS,
                              program.TOKENS).double()
    adam = torch.optim.Adam(net.parameters(), lr=program.RATE)
    for step in range(steps):
        x, y = program.whole_batch(text, step)
        adam.zero_grad()
        nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), program.LARGEST_NORM)
        assert norm > program.LARGEST_NORM  # so that clipping is tested
        adam.step()
    return net.state_dict()


for options in json.loads(sys.argv[2]):
    print("run", flush=True)
    vars(program).update(CONSTANTS, text_paths=text_paths)
    if options[0] == "one process":
        if os.environ["RANK"] == "0":
            torch.save(one_process(options[1]), options[2])
        continue
    while "=" in options[0]:
        name, value = options.pop(0).split("=")
        if name == "READS" + os.environ["RANK"]:
            program.text_paths = lambda path=Path(value): [path]
        elif not name.startswith("READS"):
            setattr(program, name, int(value))
    sys.argv = ["train_transformer.py", *options]
    try:
        program.main()
    except SystemExit as end:
        print("status", end.code)

if dist.is_initialized():
    destroy_process_group()
