"""`make bench`: its arithmetic, which rounds it keeps, its workers, and a run of tiny sizes."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "notebooks/src/bench"))

import bench  # noqa: E402  before NumPy, as in the bench
import models  # noqa: E402
import numpy as np  # noqa: E402
import worker  # noqa: E402


@pytest.fixture
def data(tmp_path):
    """What the conductor hands to its workers."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", images=rng.random((64, 1, 28, 28), dtype="float32"),
             labels=rng.integers(0, 10, 64).astype("int32"))
    return tmp_path / "data.npz"


def rounds(*found, others=0.0, product=2.0, copy=1.4):
    return [{"others": others, "product": product, "copy": copy,
             "found": [{"found": f, "gib": 1.0} for f in each]} for each in found]


# --- which rounds count -----------------------------------------------------------------------


@pytest.mark.parametrize("fault", [{"others": 0.03}, {"product": 1.7}, {"copy": 1.0}])
def test_a_round_in_which_the_machine_was_not_ours_is_discarded(fault):
    quiet = rounds((1, 2), (1, 2), (1, 2))
    assert bench.kept(quiet) == [True] * 3
    assert bench.kept([*quiet, *rounds((1, 9), **fault)]) == [True] * 3 + [False]


def test_figures_are_of_kept_rounds_where_there_are_enough():
    part = {"jobs": ["a", "b"],  # anything that can be compared
            "rounds": [*rounds((1, 2), (2, 4), (3, 7)), *rounds((9, 9), others=0.5)]}
    assert bench.column(part, "b") == [2, 4, 7]
    part["rounds"] = part["rounds"][1:]
    assert bench.column(part, "b") == [4, 7, 9]
    assert "prove little" in bench.quiet(part)


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    assert bench.ratios([150, 180, 100], [100, 100, 50]) == (1.8, 1.5, 2.0)


# --- what is set against what -----------------------------------------------------------------


def test_each_job_is_set_against_the_same_on_one_device():
    part = "lenet"
    chosen = [job for job in bench.PARTS[part] if job != bench.LIMITS]
    assert len(set(map(str, chosen))) == len(chosen)
    for job in chosen:
        one = replace(job, k=1, processes=1, batch=job.batch * job.processes)
        if job.work != "PyTorch":
            one = replace(one, threads=0)
        assert bench.single(job, bench.PARTS[part]) == (None if one == job else one)
    assert bench.single(bench.LIMITS, bench.PARTS[part]) is None


def test_a_device_of_two_threads_gets_them():
    job = bench.Job("Trainer", "LeNet", threads=2)
    assert bench.environment_of(job)["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in bench.environment_of(replace(job, threads=0))


def test_the_share_of_the_limit_is_taken_round_by_round():
    def measured(rate, most):
        return {"others": 0.0, "product": 2.0, "copy": 1.4, "found": [
            {"found": rate, "gib": 1.0}, {"found": {"NumPy, GFLOP/s": most, "PyTorch, GFLOP/s": 0,
                                                    "copy, GB/s": 1e6}, "gib": 1.0}]}

    limit = bench.operations("LeNet") / 1e9  # GFLOP/s, for an image a second
    part = {"jobs": [bench.Job("Trainer", "LeNet"), bench.LIMITS],
            "rounds": [measured(50, 100 * limit), measured(10, 20 * limit),
                       measured(9, 10 * limit)]}
    row = bench.row(part, part["jobs"][0], None).split("|")
    assert row[5].strip() == "50% (50%, 90%)", "the median of 50, 50 and 90"


# --- operations -------------------------------------------------------------------------------


def test_operations_are_counted_by_hand():
    # Multiply and add for each weight and output place; three products a training step.
    forward = 2 * (20 * 9 * 26 * 26 + 50 * 20 * 25 * 9 * 9 + 128 * 800 + 10 * 128)
    assert bench.operations("LeNet") == 3 * forward
    fits = 2 * (16 * 9 * 26 * 26 + 48 * 16 * 25 * 9 * 9 + 128 * 768 + 10 * 128)
    assert bench.operations("LeNet of 16 and 48") == 3 * fits
    assert bench.operations("ResNet-18") == bench.operations("ResNet-18, hybridised")


def compare(model):
    """Prints how far PyTorch's and MXNet's outputs and gradients are apart, as shares of the
    largest entry, with equal weights and in float64."""
    import mxnet as mx
    import reproduce
    import torch

    rng = np.random.default_rng(0)
    x, y = rng.random((8, 1, 28, 28)), rng.integers(0, 10, 8)
    net = models.lenet_of(*worker.CHANNELS[model]) if model in worker.CHANNELS else (
        reproduce.network("resnet"))
    array = mx.np.array if mx.util.is_np_array() else mx.nd.array
    net.initialize(mx.init.Xavier())
    net(array(x.astype("float32")))  # makes the shapes known
    net.cast("float64")
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    with mx.autograd.record():
        out = net(array(x, dtype="float64"))
        loss(out, array(y)).mean().backward()
    theirs = worker.torch_network(model).double()
    ours = [p for p in net.collect_params().values() if p.grad_req != "null"]
    with torch.no_grad():
        for p, q in zip(ours, theirs.parameters(), strict=True):
            q.copy_(torch.from_numpy(p.data().asnumpy()))
    answer = theirs(torch.from_numpy(x))
    torch.nn.functional.cross_entropy(answer, torch.from_numpy(y)).backward()
    pairs = [(out.asnumpy(), answer.detach().numpy()),
             *((p.grad().asnumpy(), q.grad.numpy())
               for p, q in zip(ours, theirs.parameters(), strict=True))]
    most = max(np.abs(b).max() for _, b in pairs[1:])
    print(json.dumps([np.abs(a - b).max() / (most if i else np.abs(b).max())
                      for i, (a, b) in enumerate(pairs)]))


@pytest.mark.skipif(not find_spec("torch"), reason="PyTorch is not installed: make setup TORCH=1")
@pytest.mark.parametrize(("model", "arrays"), [
    ("LeNet", 8), ("ResNet-18", 76)])
def test_pytorch_trains_the_same_network(model, arrays):
    done = subprocess.run(
        [sys.executable, "-c", f"import helpers, test_bench; test_bench.compare({model!r})"],
        text=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'notebooks/src/bench'}:{HERE}"})
    assert done.returncode == 0, done.stderr
    apart = json.loads(done.stdout)
    assert len(apart) == 1 + arrays and max(apart) < 1e-10


# --- workers ----------------------------------------------------------------------------------

TINY = bench.Job("Trainer", "LeNet", batch=8)


def test_a_worker_that_fails_says_which_and_why(data):
    with pytest.raises(RuntimeError, match="(?s)^LeNet by no-such.*KeyError: 'no-such'"):
        bench.start(replace(TINY, work="no-such"), quick=True, data=data)


def test_no_worker_outlives_the_bench(data):
    code = ("import bench, sys; "
            "team = bench.start(bench.Job('Trainer', 'LeNet', batch=8), True, sys.argv[1]); "
            "print(team._programs[0][0].pid, flush=True); sys.stdin.read()")
    parent = subprocess.Popen([sys.executable, "-c", code, data], text=True,
                              stdout=subprocess.PIPE, stdin=subprocess.PIPE, env=os.environ | {
                                  "PYTHONPATH": f"{ROOT}:{ROOT / 'notebooks/src/bench'}"})
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/status").exists():
        if "(zombie)" in Path(f"/proc/{pid}/status").read_text():
            break
        assert time.monotonic() < deadline, "it should have ended with its parent"
        time.sleep(0.1)



def test_a_run_of_tiny_sizes(tmp_path, monkeypatch, capsys):
    small = {"lenet": [*bench.jobs("Trainer", "LeNet", (1, 2), batch=256),
                       bench.Job("chapter 04", "LeNet", 2, 256), bench.LIMITS],
             "resnet": [bench.Job("Trainer", "ResNet-18, hybridised", batch=64, settings=())],
             "limits": [bench.Job("all-reduce", k=2)], "loaders": bench.PARTS["loaders"]}
    if find_spec("torch"):
        small["resnet"].append(bench.Job("PyTorch", "ResNet-18", batch=64, layout="channels last"))
    monkeypatch.setattr(bench, "PARTS", small)
    assert bench.main(["--quick", "--build", str(tmp_path), "--only", *small]) == 0
    seen = json.loads((tmp_path / "bench-quick.json").read_text())
    assert list(seen["parts"]) == list(small)
    text = (tmp_path / "bench-quick.md").read_text()
    assert text in capsys.readouterr().out
    assert "| LeNet by Trainer, 2 devices, batch 8 |" in text and "ring_allreduce, ms" in text
    need, batches = "| LeNet by Trainer, 2 devices, batch 8, images/s |", "| Batches, images/s |"
    assert text.index(need) < text.index(batches), "what loaders give, beside what training needs"
    assert all(answer["gib"] > 0.05 for part in seen["parts"].values()
               for each in part["rounds"] for answer in each["found"])
    assert (tmp_path / "bench-quick.png").stat().st_size > 10_000
