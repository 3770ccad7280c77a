"""Trains the published experiments at full size and sets our figures beside theirs.

    make reproduce                            all of it; about five hours on two cores
    make reproduce ARGS="--quick"             a few batches of each, to see that it works
    make reproduce ARGS="--only trainer speed"  rows whose name begins so
    make reproduce ARGS="--resnet-epochs 10"  the full length of the ResNet-18 rows
    make reproduce ARGS="--only lenet --store"     what two optional notebooks read
    make reproduce ARGS="--only resnet18 --store"  what chapter 08 reads; about an hour
    make reproduce ARGS="--only norm --store"      what chapter 09 reads; about an hour

Each run (a row and a seed) has a process of its own and a file in build/reproduce/, which grows
by an epoch at a time; the weights are kept beside it. So an interrupted `make reproduce` goes on
where it stopped, and what is finished is not done again. The table so far is printed at each end,
and written to build/reproduce.json and build/reproduce.md.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from helpers import by_hand, load_data, networks
from helpers.timing import Others
from helpers.training import Batches, accuracy, fit

import models
import mxnet as mx
import numpy as np
from d2l import mxnet as d2l
from mxnet import gluon, init
from report import check_memory, machine, write
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build"
RESULTS = ROOT / "notebooks/src/results"
EVERY = 1_536  # images over which stored losses are averaged: three batches of 512, six of 256
STATIC = {"static_alloc": True, "static_shape": True}  # as chapter 08 hybridises


STORED = {"lenet": ("losses", "accuracies"),  # of each epoch, for notebooks to read
          "trainer": ("accuracy", "padded_accuracy", "loss"),
          "resnet18": ("losses", "accuracy", "seconds", "others"),
          "norm": ("loss", "accuracy")}


@dataclass(frozen=True)
class Row:
    """One published experiment: what is trained and how, and what was reported of it."""

    name: str
    source: str
    model: str
    k: int
    batch: int
    rate: float
    epochs: int
    seeds: int
    gib: float  # memory that it takes
    published: tuple = ()  # test accuracy after each epoch
    seconds: float | None = None  # a published epoch
    note: str = "none"
    warm: bool = False  # let the rate rise over the first epoch
    tail: str = "actual"  # a smaller last batch: step by its "actual" size, "nominal", or "dropped"
    images: int | None = None  # of the training set, or all
    norm: str = "batch"  # or "group"
    chapter: str = ""  # whose stored results it is part of


GLUON = "The Straight Dope, multiple GPUs with Gluon"
SCRATCH = "The Straight Dope, multiple GPUs from scratch"
TUTORIAL = "MXNet tutorial, multiple GPUs with Gluon"
D2L = "Dive into Deep Learning, multiple GPUs"
CHAPTER = "Chapter 04's network"
FASHION = "published for Fashion-MNIST, figures not in the text"
ROWS = [
    # For deeper: Batch, rate and warm-up. Devices, batch, rate and warm-up, one change at a time.
    # Nine seeds, since at the highest rate some never leave the start's plateau.
    Row("trainer-1x64", GLUON, "cnn", 1, 64, 0.3, 5, 9, 2,
        (0.9764, 0.9839, 0.9836, 0.9861, 0.9862), 4.7, chapter="trainer"),
    Row("trainer-2x64", GLUON, "cnn", 2, 64, 0.3, 5, 9, 2, chapter="trainer"),
    Row("trainer-2x128-0.3", GLUON, "cnn", 2, 128, 0.3, 5, 9, 2, chapter="trainer"),
    Row("trainer-2x128-0.6", GLUON, "cnn", 2, 128, 0.6, 5, 9, 2,
        (0.8951, 0.9687, 0.9759, 0.9785, 0.9813), 2.8, chapter="trainer"),
    Row("trainer-2x128-0.6-warm", f"{GLUON}, rate warmed up over the first epoch", "cnn", 2, 128,
        0.6, 5, 9, 2, warm=True, chapter="trainer"),
    Row("trainer-2x128-0.6-xavier", f"{GLUON}, from chapter 06's start", "xavier", 2, 128, 0.6, 5,
        9, 2, chapter="trainer"),
    Row("tutorial-2x128", TUTORIAL, "tutorial", 2, 128, 0.04, 10, 1, 2),
    Row("scratch-1x256", SCRATCH, "scratch", 1, 256, 0.3, 5, 5, 2, note=FASHION),
    Row("scratch-2x512", SCRATCH, "scratch", 2, 512, 0.6, 5, 5, 2, note=FASHION),
    Row("ours-1x256", f"{SCRATCH}, from chapter 04's start", "ours", 1, 256, 0.3, 5, 5, 2),
    Row("ours-2x512", f"{SCRATCH}, from chapter 04's start", "ours", 2, 512, 0.6, 5, 5, 2),
    # For deeper: Why float32 jumps, and Batch, rate and warm-up.
    *[Row(f"lenet-{batch}-{rate}", CHAPTER, "ours", 2, batch, rate, 3, 5, 2, chapter="lenet")
      for batch in (128, 256) for rate in (0.2, 0.4)],
    Row("lenet-one-device", CHAPTER, "ours", 1, 128, 0.2, 3, 5, 2, chapter="lenet"),
    Row("resnet18-1x256", D2L, "resnet", 1, 256, 0.1, 2, 1, 8, note=FASHION, tail="nominal",
        chapter="resnet18"),
    Row("resnet18-2x512", D2L, "resnet", 2, 512, 0.2, 2, 1, 9, note=FASHION, tail="nominal",
        chapter="resnet18"),
    # What chapter 06 says of a smaller last batch: a quarter of the width, 10,000 images,
    # which make 156 batches of 64 and one of 16.
    *[Row(f"tail-{tail}", f"ResNet-18 of a quarter of the width, last batch {tail}", "thin", 2, 64,
          0.1, 3, 9, 2, tail=tail, images=10_000)
      for tail in ("actual", "nominal", "dropped")],
    # Chapter 09's: the same batch of 64, normalised in shards of 64, 32, 4 and 2 images. One device
    # with all of it is what synchronised devices compute.
    *[Row(f"norm-batch-{k}x{64 // k}", f"Chapter 09, BatchNorm of {64 // k} images", "thin", k, 64,
          0.1, 2, 5, 3, images=20_480, chapter="norm") for k in (1, 2, 16, 32)],
    Row("norm-group-1x64", "Chapter 09, GroupNorm", "thin", 1, 64, 0.1, 2, 3, 3, images=20_480,
        norm="group", chapter="norm"),
]


# --- what is trained --------------------------------------------------------------------------


class PaddedIter:
    """`NDArrayIter` as published: never shuffled, its last batch filled up from the start."""

    def __init__(self, images, labels, size):
        self.iter = mx.io.NDArrayIter(images, labels, size)
        self.padding = -len(labels) % size

    def __len__(self):
        return -(-self.iter.num_data // self.iter.batch_size)

    def __iter__(self):
        self.iter.reset()
        return ((batch.data[0], batch.label[0]) for batch in self.iter)


class NominalSteps:
    """A Trainer that divides by the same size in each step, as *Dive into Deep Learning* has it."""

    def __init__(self, trainer, size):
        self.trainer, self.size = trainer, size

    def step(self, _):
        self.trainer.step(self.size)


class WithGluon:
    """A Gluon network, its Trainer and the published way of reading the data."""

    def __init__(self, row, seed, data):
        self.row, self.devices = row, [mx.cpu(r) for r in range(row.k)]
        # The page of "cnn" calls `initialize` without a start, so Gluon's default (its notebook of
        # September 2017, at f21be23, which has the published figures).
        start = {"cnn": init.Uniform(0.07), "resnet": init.Normal(0.01),
                 "thin": init.Normal(0.01)}.get(row.model, init.Xavier())
        mx.random.seed(seed)
        self.net = network(row.model, row.norm)
        self.net.initialize(start, ctx=self.devices)
        train, test = data
        train = [a[: row.images] for a in train]
        if row.tail == "dropped":
            train = [a[: len(a) // row.batch * row.batch] for a in train]
        if row.model in ("cnn", "xavier"):
            self.train, self.test = (PaddedIter(*part, row.batch) for part in data)
            self.filler = Batches(*(a[: self.test.padding] for a in test), row.batch)
        else:
            self.train = Batches(*train, row.batch, seed=seed)
            self.test = Batches(*test, row.batch, shuffle=False)
        accuracy(self.net, Batches(*(a[: row.k] for a in test), row.k), self.devices)  # shapes

    def arrays(self):
        return [a for p in self.net.collect_params().values() for a in p.list_data()]

    def epoch(self, number, title):
        self.train.epoch = number
        options = {"learning_rate": self.row.rate}
        if self.row.warm and number == 0:
            options["lr_scheduler"] = models.warm_up(self.row.rate, len(self.train))
        # A new one each epoch, since plain SGD has nothing else to remember.
        self.trainer = gluon.Trainer(self.net.collect_params(), "sgd", options)
        if self.row.tail == "nominal":
            self.trainer = NominalSteps(self.trainer, self.row.batch)
        seen = fit(self.net, self.trainer, self.train, self.devices, title=title)
        return {"seconds": seen.seconds[0], "train_accuracy": seen.train_accuracy[0],
                "loss": float(np.mean(seen.losses)),
                "losses": means(seen.losses, self.row.batch)}

    def judge(self):
        if self.row.chapter == "norm":
            models.share_statistics(self.net)
        share = accuracy(self.net, self.test, self.devices)
        if not getattr(self.test, "padding", 0):
            return {"accuracy": share}
        rows = len(self.test) * self.test.iter.batch_size
        extra = accuracy(self.net, self.filler, self.devices) * self.test.padding
        true = (share * rows - extra) / (rows - self.test.padding)
        return {"accuracy": true, "padded_accuracy": share}


class FromScratch:
    """Chapter 04's network and loop, from the published start or from that chapter's own."""

    def __init__(self, row, seed, data):
        self.row = row
        self.devices = [mx.cpu(r) for r in range(row.k)]
        mean = data[0][0].mean() if row.model == "ours" else 0.0
        (images, labels), (test_images, test_labels) = data
        self.batches = Batches(images - mean, labels, row.batch, seed=seed)
        self.test = mx.nd.array(test_images - mean), mx.nd.array(test_labels)
        if row.model == "ours":
            params = by_hand.init_params(seed)
        else:  # normal numbers of size 0.01, and biases of 0
            rng = np.random.default_rng(seed)
            shapes = [param.shape for param in by_hand.init_params()]
            params = [mx.nd.array(0.01 * rng.standard_normal(shape) * (len(shape) > 1))
                      for shape in shapes]
        self.replicas = [by_hand.get_params(params, d) for d in self.devices]

    def arrays(self):
        return [p for replica in self.replicas for p in replica]

    def epoch(self, number, title):
        self.batches.epoch = number
        with tqdm(self.batches, title, file=sys.stdout, ncols=79, leave=False) as bar:
            losses = models.train(self.replicas, self.devices, bar, self.row.rate)
            return {"seconds": bar.format_dict["elapsed"], "loss": float(np.mean(losses)),
                    "losses": means(losses, self.row.batch)}

    def judge(self):
        each = [models.accuracy([replica], [device], self.test)
                for replica, device in zip(self.replicas, self.devices)]
        return {"accuracy": each[0], "accuracies": each}


def means(losses, size):
    """The mean loss of each EVERY images, of the losses of batches of `size`."""
    every = max(1, EVERY // size)
    return [round(float(np.mean(losses[i : i + every])), 4) for i in range(0, len(losses), every)]


def network(model, norm="batch"):
    if model in ("cnn", "xavier"):
        return networks.lenet()
    if model == "tutorial":
        return models.lenet_tutorial()
    mx.npx.set_np()
    if model == "resnet-plain":
        return d2l.resnet18(10)
    channels = (16, 32, 64, 128) if model == "thin" else (64, 128, 256, 512)
    kind = {} if norm != "group" else {
        "norm": partial(models.GroupNorm, num_groups=8)}
    net = networks.hybrid_resnet18(10, channels, **kind)
    net.hybridize(**STATIC)
    return net


# --- running it -------------------------------------------------------------------------------


def read_data(quick):
    data = load_data("mnist")
    print(data)
    sizes = (2_560, 1_000) if quick else (None, None)
    return data.name, [(images[:n], labels[:n]) for images, labels, n in zip(
        (data.train_images, data.test_images), (data.train_labels, data.test_labels), sizes)]


def run(row, seed, folder, quick):
    """Train a row from one seed, or go on with it; a line in its file for each epoch."""
    check_memory(row.name, row.gib)
    name, data = read_data(quick)
    if name != "mnist" and not quick:
        raise SystemExit(f"{row.name}: was published for MNIST, and {name} isn't that; let "
                         "COURSE_DATA name the folder that mnist/ is in, or use --quick")
    if quick and row.model in ("resnet", "thin"):
        data = [(images[:128], labels[:128]) for images, labels in data]
    folder.mkdir(parents=True, exist_ok=True)
    job = (FromScratch if row.model in ("scratch", "ours") else WithGluon)(row, seed, data)
    path = folder / f"{row.name}-{seed}.json"
    seen = json.loads(path.read_text()) if path.exists() else {
        "data": name, "commit": commit(), "date": f"{datetime.date.today()}",
        "machine": machine(), "epochs": []}
    if commit() not in seen["commit"]:
        seen["commit"] += f" and {commit()}"
    done = len(seen["epochs"])
    if done:
        for array, kept in zip(job.arrays(), mx.nd.load(str(weights(path, done)))):
            array[:] = kept.as_np_ndarray() if isinstance(array, mx.np.ndarray) else kept
    for epoch in range(done, row.epochs):
        with Others() as others:
            result = job.epoch(epoch, f"{row.name}, seed {seed}, epoch {epoch + 1}/{row.epochs}")
        result |= job.judge() | {"others": others.share}
        seen["epochs"].append(result)
        keep = [a.as_nd_ndarray() if isinstance(a, mx.np.ndarray) else a for a in job.arrays()]
        mx.nd.save(str(weights(path, epoch + 1)), keep)
        write(path, seen)
        weights(path, epoch).unlink(missing_ok=True)
        print(f"{row.name}, seed {seed}, epoch {epoch + 1}/{row.epochs}: accuracy "
              f"{result['accuracy']:.4f} ({name}), {result['seconds']:.1f} s", flush=True)


def weights(path, epochs):
    return path.with_name(f"{path.stem}-after-{epochs}.params")


# --- speed ------------------------------------------------------------------------------------

# Model, whole batch. One and two devices take the same batches, so devices are all that differs.
SPEED = {"speed-cnn-64": ("cnn", 64, 3_200), "speed-cnn-128": ("cnn", 128, 3_200),
         "speed-resnet-plain-64": ("resnet-plain", 64, 128),
         "speed-resnet-hybrid-64": ("resnet", 64, 128)}


def measure(name, folder, quick):
    """Nine rounds of one device, two devices, one, two...: images/s of each."""
    model, batch, images = SPEED[name]
    check_memory(name, 6 if "resnet" in model else 2)
    data_name, ((x, y), _) = read_data(quick)
    trainings = []
    for k in (1, 2):
        devices = [mx.cpu(r) for r in range(k)]
        net = network(model)
        net.initialize(init.Xavier(), ctx=devices)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
        batches = list(Batches(x[:images], y[:images], batch))
        fit(net, trainer, batches[:1], devices, progress=False)  # shapes
        trainings.append((net, trainer, batches, devices))
    kept, discarded = [], []
    with tqdm(total=9, desc=name, file=sys.stdout, ncols=79, leave=False) as bar:
        while len(kept) < 9 and len(discarded) < 9 and not (quick and kept + discarded):
            with Others() as others:
                rates = [fit(*training, progress=False).rate[0] for training in trainings]
            (kept if others.share <= 0.02 else discarded).append(rates)
            bar.update(others.share <= 0.02)
    write(folder / f"{name}.json", {"data": data_name, "kept": kept, "discarded": discarded})


def summary(rounds):
    """Medians of images/s and of the ratio, and the ratio's spread."""
    rounds = np.array(rounds["kept"] if len(rounds["kept"]) > 2
                      else rounds["kept"] + rounds["discarded"])
    ratios = rounds[:, 1] / rounds[:, 0]
    return *np.median(rounds, axis=0), np.median(ratios), ratios.min(), ratios.max()


# --- the table --------------------------------------------------------------------------------


def table(rows, folder):
    """Markdown: accuracies of each row, epoch by epoch, then times and ratios."""
    runs = {row.name: [json.loads(p.read_text()) for p in sorted(folder.glob(f"{row.name}-?.json"))]
            for row in rows}
    lines = ["| experiment | data | runs | published, each epoch | ours, median | "
             "ours, last epoch of each run | s/epoch |", "| --- " * 7 + "|"]
    for row in rows:
        seen = [r for r in runs[row.name] if r["epochs"]]
        if not seen:
            continue
        key = "padded_accuracy" if "padded_accuracy" in seen[0]["epochs"][0] else "accuracy"
        full = [r for r in seen if len(r["epochs"]) == max(len(r["epochs"]) for r in seen)]
        median = [statistics.median(r["epochs"][e][key] for r in full)
                  for e in range(len(full[0]["epochs"]))]
        seconds = statistics.median(e["seconds"] for r in seen for e in r["epochs"])
        data = " and ".join(sorted({r["data"] for r in seen}))
        published = digits(row.published) or row.note
        lines.append(f"| {row.source}: {row.k} device{'s' * (row.k > 1)}, batch {row.batch}, rate "
                     f"{row.rate:g} | {data} | {len(full)} | {published} | "
                     f"{digits(median)} | {digits(r['epochs'][-1][key] for r in full)} | "
                     f"{seconds:.1f}{f' (published {row.seconds})' if row.seconds else ''} |")
        if key != "accuracy":
            true = [statistics.median(r["epochs"][e]["accuracy"] for r in full)
                    for e in range(len(median))]
            lines.append(f"| the same, without the rows that fill up the last batch | {data} | "
                         f"{len(full)} | | {digits(true)} | | |")
    lines += ["", "| speed at equal batch | data | 1 device, images/s | 2 devices | ratio | "
              "smallest, largest | rounds discarded |", "| --- " * 7 + "|"]
    for name in SPEED:
        if (path := folder / f"{name}.json").exists():
            rounds = json.loads(path.read_text())
            one, two, ratio, least, most = summary(rounds)
            lines.append(f"| {name.removeprefix('speed-')} | {rounds['data']} | {one:,.0f} | "
                         f"{two:,.0f} | **{ratio:.2f}** | {least:.2f}, {most:.2f} | "
                         f"{len(rounds['discarded'])} |")
    return "\n".join(["", f"Machine: {machine()}.", "", *lines, ""])


def digits(numbers):
    return " ".join(f"{n:.4f}".lstrip("0") for n in numbers)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few batches of each, one seed")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names or their beginnings: "
                        + ", ".join([*(row.name for row in ROWS), *SPEED]))
    parser.add_argument("--resnet-epochs", type=int, metavar="N",
                        help="for both ResNet-18 rows; published: 10")
    parser.add_argument("--store", action="store_true",
                        help="write what notebooks read to notebooks/src/results")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    folder = BUILD / ("reproduce-quick" if options.quick else "reproduce")
    rows = [replace(row, epochs=options.resnet_epochs)
            if row.model == "resnet" and options.resnet_epochs is not None else row for row in ROWS]
    if options.quick:
        rows = [replace(row, epochs=1, seeds=1) for row in rows]

    if options.one:
        name, seed = options.one
        if name in SPEED:
            measure(name, folder, options.quick)
        else:
            run(next(row for row in rows if row.name == name), int(seed), folder, options.quick)
        return 0

    jobs = [(row.name, seed) for row in rows for seed in range(row.seeds)]
    jobs += [(name, 0) for name in SPEED if not (folder / f"{name}.json").exists()]
    chosen = [job for job in jobs if job[0].startswith(tuple(options.only or ("",)))]
    if not chosen:
        parser.error(f"--only {options.only}: no row's name begins so")
    try:
        for name, seed in chosen:
            again = [sys.executable, __file__, "--one", name, str(seed)]
            if options.resnet_epochs is not None:
                again += ["--resnet-epochs", str(options.resnet_epochs)]
            again += ["--quick"] * options.quick
            if not finished(rows, name, seed, folder):
                subprocess.run(again, check=True)
    except (KeyboardInterrupt, subprocess.CalledProcessError) as error:
        print(f"\nstopped ({error or 'interrupted'}); `make reproduce` goes on from here")
        return 1
    finally:
        text = table(rows, folder)
        print(text)
        folder.with_suffix(".md").write_text(text)
        write(folder.with_suffix(".json"), {
            "machine": machine(),
            "runs": {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))}})
    if options.store:
        for chapter in sorted({row.chapter for row in rows if row.chapter}):
            store(chapter, [row for row in rows if row.chapter == chapter], folder, RESULTS)
    return 0


def commit():
    """What git calls the checkout that trains."""
    asked = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT,
                           capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


def store(chapter, rows, folder, to):
    """Write the runs of a chapter's rows to `to`, with where, when and how they were made.

    Nothing is written unless all of them are finished.
    """
    for row in rows:
        if missing := [s for s in range(row.seeds) if not finished(rows, row.name, s, folder)]:
            print(f"{chapter}: not stored, since {row.name} lacks the seeds {missing}")
            return
    runs = {row.name: [json.loads((folder / f"{row.name}-{seed}.json").read_text())
                       for seed in range(row.seeds)] for row in rows}
    write(to / f"{chapter}.json", {
        "command": f'make reproduce ARGS="--only {chapter} --store"',
        **{key: " and ".join(sorted({run[key] for some in runs.values() for run in some}))
           for key in ("machine", "date", "data", "commit")},
        "runs": {name: [[{key: epoch[key] for key in STORED[chapter]}
                         for epoch in run["epochs"]] for run in some]
                 for name, some in runs.items()}}, indent=None)
    print(f"{chapter}: stored in {to / chapter}.json")


def finished(rows, name, seed, folder):
    path = folder / f"{name}-{seed}.json"
    epochs = {row.name: row.epochs for row in rows}.get(name, 1)  # speed is not there, or done
    done = len(json.loads(path.read_text())["epochs"]) if path.exists() else 0
    return done >= epochs


if __name__ == "__main__":
    sys.exit(main())
