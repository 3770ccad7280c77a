"""Measures speed, everything side by side: devices, settings, PyTorch and the machine's limits.

    make bench                             all of it; about half an hour on two cores
    make bench ARGS="--quick"              one round of tiny batches, to see that it works
    make bench ARGS="--only lenet limits"  some of the parts

A part of the bench has several workers, each a process of its own that waits until it is told to
measure, so that its peak memory is its own; PyTorch's know nothing of MXNet and of the course's
settings. They take turns, A B A B, round after round; beside
them run two controls that don't know MXNet: two one-thread matrix products at once against one,
and the same for copies of memory. A round in which a control or other programs' CPU time says that
the machine was not ours is discarded, and counted. The table is printed and written to
build/bench.md, all rounds to build/bench.json, the speed-ups to build/bench.png.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from helpers import load_data
from helpers.engine import ALLOCATOR, SETTINGS, cores
from helpers.plotting import BLUE, figure
from helpers.timing import Others, Team

import numpy as np
from models import count_operations, lenet_of
from report import check_memory, machine, write
from tqdm import tqdm
from worker import CHANNELS, seconds, side_by_side

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build"
COURSE = ("threads", "scratch space", "allocator")  # what helpers.engine sets
ROUNDS = 9  # kept ones
LEAST_PRODUCT, LEAST_COPY = 0.9, 0.8  # of the best round's, and of the median round's
OTHERS = 0.02


@dataclass(frozen=True)
class Job:
    """What one worker measures: `work` is a key of worker.py's `WORK`, the rest is its choice."""

    work: str
    model: str = ""  # a key of worker.py's `CHANNELS` or `RESNETS`; PyTorch has one "ResNet-18"
    k: int = 1
    batch: int = 1
    settings: tuple = COURSE
    processes: int = 1  # so many workers at once, their figures added up
    layout: str = "contiguous"  # of PyTorch's arrays, or "channels last"
    threads: int = 0  # of an operator; 0: of MXNet what the settings say, of PyTorch all cores
    compiled: bool = False  # by torch.compile
    gib: float = field(default=0.7, compare=False)  # memory that it takes

    def __str__(self):
        text = f"{self.model} by {self.work}" if self.model else self.work
        if self.work == "PyTorch":
            text += ", channels last" * (self.layout == "channels last")
            text += ", compiled" * self.compiled
            text += f", {self.threads} thread" * (self.threads == 1)
        elif self.processes > 1:
            text += f", {self.processes} processes that share nothing"
        elif self.model:
            text += f", {self.k} device{'s' * (self.k > 1)}"
            text += f" of {self.threads} threads" * (self.threads > 1)
        if self.settings != COURSE and self.work not in ("PyTorch", "limits"):
            text += f", {' and '.join(self.settings) or 'MXNet as it comes'}"
            text += " alone" * (len(self.settings) == 1)
        return text + f", batch {self.batch}" * (self.batch > 1)


def jobs(work, model, ks, **options):
    return [Job(work, model, k, **options) for k in ks]


def torch_jobs(model, batch, **options):
    """As a user of PyTorch would try: both layouts, fewer threads, and its compiler."""
    # In a folder with a space in its path the compiler's linker doesn't find PyTorch (2.13).
    compiles = (False, True) if shutil.which("g++") and " " not in sys.prefix else (False,)
    return [*(Job("PyTorch", model, 1, batch, (), layout=layout, compiled=compiled, **options)
              for layout in ("contiguous", "channels last") for compiled in compiles),
            Job("PyTorch", model, 1, batch, (), threads=1, **options)]


# In each part that has shares of the limit, so that both are measured in the same rounds.
LIMITS = Job("limits", settings=("allocator",))
PARTS = {
    "lenet": [
        *jobs("Trainer", "LeNet", (1, 2, 4), batch=256),
        *jobs("chapter 04", "LeNet", (1, 2, 4), batch=256),
        Job("Trainer", "LeNet", batch=128, processes=2),
        Job("Trainer", "LeNet", batch=256, threads=2),
        Job("Trainer", "LeNet", batch=256, settings=()),
        *torch_jobs("LeNet", 256), LIMITS],
    "sizes": [
        *jobs("Trainer", "LeNet of 16 and 48", (1, 2), batch=256),
        Job("Trainer", "LeNet of 16 and 48", batch=128, processes=2),
        Job("Trainer", "LeNet of 16 and 48", batch=256, threads=2),
        Job("Trainer", "LeNet of 16 and 48", batch=256, settings=()),
        *torch_jobs("LeNet of 16 and 48", 256), LIMITS],
    "settings": [
        *(Job("Trainer", "LeNet", k, 256, settings=chosen)
          for chosen in (COURSE, (), *((one,) for one in COURSE)) for k in (1, 2))],
    "resnet": [
        *jobs("Trainer", "ResNet-18, hybridised", (1, 2, 4), batch=64, gib=1.8),
        Job("Trainer", "ResNet-18, hybridised", batch=32, processes=2, gib=1.2),
        Job("Trainer", "ResNet-18, hybridised", batch=64, threads=2, gib=1.8),
        Job("Trainer", "ResNet-18, hybridised", batch=64, settings=(), gib=1.8),
        *torch_jobs("ResNet-18", 64, gib=1.1), LIMITS],
    "blocks": [
        *jobs("Trainer", "ResNet-18 of blocks", (1, 2, 4), batch=64, gib=2.8),
        *jobs("Trainer", "ResNet-18, hybridised", (1, 2), batch=64, settings=(), gib=1.8), LIMITS],
    "large": [*jobs("Trainer", "ResNet-18, hybridised", (1, 2), batch=128, gib=3), LIMITS],
    "limits": [LIMITS, Job("all-reduce", k=2)],
    "loaders": [*jobs("Trainer", "LeNet", (2,), batch=128), Job("loaders", batch=128)],
}


# --- the conductor ----------------------------------------------------------------------------


def environment_of(job):
    """The variables of a worker. Ours has the course's settings already; it gets its job's."""
    env = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    env |= {"PYTHONPATH": str(ROOT)}
    if job.settings != COURSE:
        for setting in job.settings:
            env |= {"threads": {n: v for n, v in SETTINGS.items() if "THREADS" in n},
                    "scratch space": {n: v for n, v in SETTINGS.items() if "COPY" in n},
                    "allocator": {name: str(value) for _, value, name in ALLOCATOR}}[setting]
    if job.work in ("PyTorch", "limits"):  # MXNet's own default may be one for two cores
        env["OMP_NUM_THREADS"] = str(job.threads or cores())
    elif job.threads:
        env["OMP_NUM_THREADS"] = str(job.threads)
    return env


def start(job, quick, data):
    """The `Team` of a job's workers, each of them ready to measure."""
    course = job.settings == COURSE
    wish = json.dumps(asdict(job) | {"course": course, "quick": quick, "data": str(data)})
    command = [sys.executable, str(Path(__file__).with_name("worker.py")), wish]
    try:
        return Team([command] * job.processes, "measure", environment_of(job))
    except RuntimeError as error:
        raise RuntimeError(f"{job}: {error}") from error


def ask(team):
    """What the workers of one job found, all at the same time, added up."""
    answers = [json.loads(line) for line in team()]
    if len(answers) == 1:
        return answers[0]
    return {**answers[0], "found": sum(a["found"] for a in answers),
            "gib": sum(a["gib"] for a in answers)}


class Controls:
    """How far two one-thread programs, one that computes and one that copies, get side by side.

    They share no lock and know nothing of MXNet, so that a low figure is the machine's fault.
    """

    def __init__(self, k, quick):
        size, self.times = (64, 1) if quick else (768, 8)
        self.products = [lambda a=a: a @ a for a in np.ones((k, size, size), "float32")]
        blocks = [np.ones((2, size * size * 16), "uint8") for _ in range(k)]
        self.copies = [lambda b=b: np.copyto(b[0], b[1]) for b in blocks]

    def measure(self):
        """(products, copies): k at once against one, as a ratio of what is done a second.

        Medians of five pairs of runs: a pause of the machine during a single run of *one* would
        make a ratio above k.
        """
        return tuple(statistics.median(
            len(jobs) * side_by_side(jobs[:1], self.times) / side_by_side(jobs, self.times)
            for _ in range(5)) for jobs in (self.products, self.copies))


def run(part, quick):
    """A part's jobs, and its rounds: {"product", "copy", "others", "found": [one a job]} each."""
    chosen = [job for job in PARTS[part] if find_spec("torch") or job.work != "PyTorch"]
    if quick:
        chosen = [replace(job, batch=min(job.batch, 8), processes=1) for job in chosen]
    check_memory(part, sum(job.gib * job.processes for job in chosen))
    rounds, controls, teams = [], Controls(min(2, cores()), quick), []
    with tqdm(total=1 if quick else ROUNDS, desc=part, file=sys.stdout, ncols=79) as bar, \
            tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        data, images = Path(folder) / "data.npz", load_data("mnist", limit=10_000)
        np.savez(data, images=images.train_images, labels=images.train_labels)
        for job in chosen:  # one after another: each has the machine to itself to make ready
            teams.append(opened.enter_context(start(job, quick, data)))
            ask(teams[-1])
        while sum(kept(rounds)) < bar.total and len(rounds) < 2 * bar.total:
            with Others() as others:
                product, copy = controls.measure()
                found = [ask(team) for team in teams]
            rounds.append({"product": product, "copy": copy, "others": others.share,
                           "found": found})
            bar.update(sum(kept(rounds)) - bar.n)
    return {"jobs": chosen, "rounds": rounds, "data": images.name}


def kept(rounds):
    """For each round whether the machine was ours."""
    usual = statistics.median(r["copy"] for r in rounds) if rounds else 0
    # Cores that share their arithmetic get less than their number out of it, and none gets more.
    best = min(max((r["product"] for r in rounds), default=0), cores(), 2)
    return [r["others"] <= OTHERS and r["product"] >= LEAST_PRODUCT * best
            and r["copy"] >= LEAST_COPY * usual for r in rounds]


def chapters(quick):
    """Seconds of set-up from nothing, no cache either, and of each notebook; once each."""
    with tempfile.TemporaryDirectory() as folder:
        for needed in ("requirements", "helpers"):  # set-up asks helpers whether there is a GPU
            shutil.copytree(ROOT / needed, Path(folder) / needed)
        env = {**os.environ, "UV_CACHE_DIR": f"{folder}/uv", "PIP_CACHE_DIR": f"{folder}/pip"}
        found = {"set-up, s": None if quick else seconds(lambda: subprocess.run(
            ["sh", f"{folder}/requirements/setup.sh"], check=True, stdout=subprocess.DEVNULL,
            env=env), 1)}
        table = Path(folder) / "run.json"
        subprocess.run([sys.executable, ROOT / "notebooks/src/run.py", "--json", table]
                       + ["02"] * quick, check=True, cwd=ROOT)
        rows = json.loads(table.read_text())["chapters"]
    found |= {f"{row['chapter']}, s": row["seconds"] for row in rows}
    deeper = [row["seconds"] for row in rows if row["chapter"].startswith("deeper/")]
    everything = sum(row["seconds"] for row in rows)
    return found | {"all chapters, s": everything - sum(deeper),
                    "all deeper notebooks, s": sum(deeper)}


# --- the table --------------------------------------------------------------------------------


def column(part, job, value=lambda answer: answer["found"]):
    """A job's values over the kept rounds, or over all where too few were kept."""
    rounds, good = part["rounds"], kept(part["rounds"])
    chosen = [r for r, ok in zip(rounds, good) if ok] if sum(good) > 2 else rounds
    return [value(r["found"][part["jobs"].index(job)]) for r in chosen]


def ratios(above, below):
    """Median, smallest and largest of a / b, round by round."""
    each = [a / b for a, b in zip(above, below)]
    return statistics.median(each), min(each), max(each)


def single(job, jobs):
    """The one of `jobs` that `job` is set against: the same in one process, on a device of a core.
    """
    one = replace(job, k=1, processes=1, batch=job.batch * job.processes)
    if job.work != "PyTorch":
        one = replace(one, threads=0)
    return one if one in jobs and one != job else None


def table(parts):
    """Markdown: for each part a row a job, then what discarded rounds there were."""
    lines = []
    for name, part in parts.items():
        if name == "chapters":
            lines += ["", *rows(part, "chapters")]
        elif name in ("limits", "loaders"):
            lines += ["", *rows(values(part), name), "", quiet(part)]
        else:
            lines += ["", f"| {name} | images/s | over one device (from, to) | over PyTorch's best "
                      "(from, to) | share of the matrix product (from, to) | peak memory, GiB |",
                      "| --- " * 6 + "|"]
            peers = [job for job in part["jobs"] if job.work == "PyTorch"]
            best = max(peers, key=lambda j: statistics.median(column(part, j)), default=None)
            lines += [row(part, job, best) for job in part["jobs"] if job != LIMITS]
            lines += ["", quiet(part)]
    return "\n".join([f"Machine: {machine()}.", *lines, ""])


def row(part, job, peer):
    rate = column(part, job)
    one = single(job, part["jobs"])
    over = "{:.2f} ({:.2f}, {:.2f})".format(*ratios(rate, column(part, one))) if one else ""
    than = ("{:.2f} ({:.2f}, {:.2f})".format(*ratios(rate, column(part, peer)))
            if peer and job != peer else "1" if peer else "")
    share = ""
    if LIMITS in part["jobs"]:
        each = ratios(rate, column(part, LIMITS, fastest_product))
        share = "{:.0%} ({:.0%}, {:.0%})".format(*(operations(job.model) * r for r in each))
    peak = max(column(part, job, lambda answer: answer["gib"]))
    return (f"| {job} | {statistics.median(rate):,.0f} | {over} | {than} | {share} | "
            f"{peak:.1f} |")


def fastest_product(answer):
    """Floating-point operations a second in large matrix products, by whichever library."""
    return 1e9 * max(value for name, value in answer["found"].items() if "GFLOP/s" in name)


def values(part):
    """Medians of all figures of a part, by name."""
    found = {}
    for job in part["jobs"]:
        each = column(part, job)
        if isinstance(each[0], dict):
            found |= {key: statistics.median(a[key] for a in each) for key in each[0]}
        else:
            found[f"{job}, images/s"] = statistics.median(each)
    return found


def rows(found, title):
    return [f"| {title} | median |", "| --- | --- |",
            *(f"| {key} | {value:,.{1 if value < 100 else 0}f} |" for key, value in found.items()
              if value is not None)]


def quiet(part):
    rounds, good = part["rounds"], sum(kept(part["rounds"]))
    others, product, copy = (statistics.median(r[key] for r in rounds)
                             for key in ("others", "product", "copy"))
    used = "" if good > 2 else " Too few: the figures are of all rounds, and prove little."
    return (f"{good} rounds kept, {len(rounds) - good} discarded; medians of all: other programs "
            f"{others:.1%}, two products at once {product:.2f} times one, two copies {copy:.2f}."
            f"{used}")


@lru_cache
def operations(model):
    """Floating-point operations of a training step, per image: three times a forward pass's."""
    from mxnet.util import np_array, np_shape

    from helpers.networks import hybrid_resnet18

    with np_shape(True), np_array(True):
        net = lenet_of(*CHANNELS[model]) if model in CHANNELS else hybrid_resnet18(10)
        net.initialize()
        return 3 * count_operations(net)


def draw(parts, path):
    """The speed-ups of the table as bars, each with the range over its rounds."""
    bars = [(job, *ratios(column(part, job), column(part, single(job, part["jobs"]))))
            for name, part in parts.items() if name not in ("limits", "loaders", "chapters")
            for job in part["jobs"] if single(job, part["jobs"])]
    if not bars:
        return
    jobs, middle, low, high = zip(*bars[::-1])
    best = max(bars, key=lambda bar: bar[1])
    fig, ax = figure(f"At best {best[1]:.2f} times one device: {best[0]}",
                     "images/s over those of one device", size=(9, 1 + 0.3 * len(bars)))
    gaps = [[m - a for m, a in zip(middle, low)], [b - m for m, b in zip(middle, high)]]
    ax.barh(list(map(str, jobs)), middle, xerr=gaps, color=BLUE, ecolor="black", capsize=3)
    ax.axvline(1, color="black", linewidth=1)
    fig.savefig(path, dpi=110)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of tiny batches")
    names = [*PARTS, "chapters"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART",
                        help=", ".join(names))
    parser.add_argument("--build", type=Path, default=BUILD, help="folder for what is written")
    options = parser.parse_args(arguments)
    os.environ.setdefault("COURSE_OFFLINE", "1")
    name = "bench-quick" if options.quick else "bench"
    parts = {}
    try:
        for part in options.only:
            parts[part] = chapters(options.quick) if part == "chapters" else run(
                part, options.quick)
    finally:  # also after an interrupt: what was measured is kept
        if parts:
            options.build.mkdir(parents=True, exist_ok=True)
            text = table(parts)
            print(text)
            (options.build / f"{name}.md").write_text(text)
            named = {part: found | {"jobs": list(map(str, found["jobs"]))} if "jobs" in found else
                     found for part, found in parts.items()}
            write(options.build / f"{name}.json", {"machine": machine(), "parts": named})
            draw(parts, options.build / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
