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

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests/bench"))

import bench  # noqa: E402
import worker  # noqa: E402


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("COURSE_OFFLINE", "1")


def rounds(*found, others=0.0, product=2.0, copy=1.4):
    return [{"others": others, "product": product, "copy": copy,
             "found": [{"found": f, "gib": 1.0} for f in each]} for each in found]


# --- which rounds count -----------------------------------------------------------------------


@pytest.mark.parametrize("fault", [{"others": 0.03}, {"product": 1.7}, {"copy": 1.0}])
def test_a_round_in_which_the_machine_was_not_ours_is_discarded(fault):
    quiet = rounds((1, 2), (1, 2), (1, 2))
    assert bench.kept(quiet) == [True] * 3
    assert bench.kept([*quiet, *rounds((1, 9), **fault)]) == [True] * 3 + [False]


def test_one_round_that_is_too_good_to_be_true_does_not_discard_the_others(monkeypatch):
    monkeypatch.setattr(bench, "cores", lambda: 2)
    quiet = rounds((1, 2), (1, 2), (1, 2))
    assert bench.kept([*quiet, *rounds((1, 2), product=2.5)]) == [True] * 4


def test_figures_are_of_kept_rounds_where_there_are_enough():
    part = {"jobs": ["a", "b"],
            "rounds": [*rounds((1, 2), (2, 4), (3, 7)), *rounds((9, 9), others=0.5)]}
    assert bench.column(part, "b") == [2, 4, 7]
    part["rounds"] = part["rounds"][1:]
    assert bench.column(part, "b") == [4, 7, 9]
    assert "prove little" in bench.quiet(part)


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    assert bench.ratios([150, 180, 100], [100, 100, 50]) == (1.8, 1.5, 2.0)


# --- what is set against what -----------------------------------------------------------------


@pytest.mark.parametrize("part", ["lenet", "settings", "resnet", "blocks", "large"])
def test_each_job_is_set_against_the_same_on_one_device(part):
    chosen = [job for job in bench.PARTS[part] if job != bench.LIMITS]
    names = [str(job) for job in chosen]
    assert len(set(names)) == len(names)
    for job in chosen:
        one = replace(job, k=1)
        expected = None if job.k == 1 and job.processes == 1 else str(one)
        if job.processes > 1:
            expected = str(replace(one, processes=1, batch=one.batch * job.processes))
        assert bench.single(str(job), names) == expected


def test_every_job_has_work_that_a_worker_knows():
    assert {job.name for part in bench.PARTS.values() for job in part} == set(worker.WORK)


def test_the_share_of_the_limit_is_taken_round_by_round():
    def measured(rate, most):
        return {"others": 0.0, "product": 2.0, "copy": 1.4, "found": [
            {"found": rate, "gib": 1.0}, {"found": {"NumPy, GFLOP/s": most, "PyTorch, GFLOP/s": 0,
                                                    "copy, GB/s": 1e6}, "gib": 1.0}]}

    limit = bench.operations("lenet") / 1e9  # GFLOP/s, for an image a second
    part = {"jobs": ["lenet-trainer, 1 device", str(bench.LIMITS)],
            "rounds": [measured(50, 100 * limit), measured(10, 20 * limit),
                       measured(9, 10 * limit)]}
    row = bench.row(part, part["jobs"][0], None, "lenet").split("|")
    assert row[5].strip() == "50%", "the median of 50, 50 and 90"


# --- operations -------------------------------------------------------------------------------


def test_operations_are_counted_by_hand():
    # Multiply and add for each weight and output place; three products a training step.
    forward = 2 * (20 * 9 * 26 * 26 + 50 * 20 * 25 * 9 * 9 + 128 * 800 + 10 * 128)
    assert bench.operations("lenet") == 3 * forward


@pytest.mark.skipif(not find_spec("torch"), reason="PyTorch is not installed: make setup TORCH=1")
@pytest.mark.parametrize(("model", "parameters"), [("lenet", 129_068), ("resnet", 11_175_818)])
def test_pytorch_trains_the_same_network(model, parameters):
    net = worker.torch_network(model)
    assert sum(p.numel() for p in net.parameters()) == parameters


# --- workers ----------------------------------------------------------------------------------

TINY = bench.Job("lenet-trainer", batch=8)


def test_a_worker_gets_the_settings_of_its_job_and_no_others(monkeypatch):
    asked = []
    monkeypatch.setattr(bench.subprocess, "Popen", lambda *_, env, **__: asked.append(env))
    for settings in (bench.COURSE, (), ("threads",), ("scratch space",), ("allocator",)):
        bench.Worker(replace(TINY, settings=settings), quick=True)
    names = ("OMP_NUM_THREADS", "MXNET_CPU_TEMP_COPY", "MALLOC_MMAP_MAX_")
    # helpers.engine makes the settings of a worker that has all of them
    assert [[name in env for name in names] for env in asked] == [
        [False] * 3, [False] * 3, [True, False, False], [False, True, False], [False, False, True]]


def test_a_worker_that_fails_says_why():
    one = bench.Worker(replace(TINY, name="no-such"), quick=True)
    with pytest.raises(RuntimeError, match="(?s)no-such.*KeyError"):
        bench.ask([one])
    one.end()


def test_no_worker_outlives_the_bench(tmp_path):
    code = ("import bench, sys; one = bench.Worker(bench.Job('lenet-trainer', batch=8), True); "
            "bench.ask([one]); print(one.process.pid, flush=True); sys.stdin.read()")
    parent = subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE,
                              stdin=subprocess.PIPE, env=os.environ | {
                                  "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/bench'}"})
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/status").exists():
        if "(zombie)" in Path(f"/proc/{pid}/status").read_text():
            break
        assert time.monotonic() < deadline, "it should have ended with its parent"
        time.sleep(0.1)


# --- the command ------------------------------------------------------------------------------


def test_a_run_of_tiny_sizes(tmp_path, monkeypatch, capsys):
    small = {"lenet": [*bench.jobs("lenet-trainer", (1, 2)), bench.Job("lenet-scratch", 2),
                       bench.LIMITS],
             "resnet": [bench.Job("resnet-hybrid", settings=())],
             "limits": bench.PARTS["limits"], "loaders": bench.PARTS["loaders"]}
    if find_spec("torch"):
        small["resnet"].append(bench.Job("torch last-resnet"))
    monkeypatch.setattr(bench, "PARTS", small)
    assert bench.main(["--quick", "--build", str(tmp_path), "--only", *small]) == 0
    seen = json.loads((tmp_path / "bench-quick.json").read_text())
    assert list(seen["parts"]) == list(small)
    text = (tmp_path / "bench-quick.md").read_text()
    assert text in capsys.readouterr().out
    assert "| lenet-trainer, 2 devices, batch 8 |" in text and "ring_allreduce, ms" in text
    need, batches = "| lenet-trainer, 2 devices, batch 8, images/s |", "| Batches, images/s |"
    assert text.index(need) < text.index(batches), "what loaders give, beside what training needs"
    assert all(answer["gib"] > 0.05 for part in seen["parts"].values()
               for each in part["rounds"] for answer in each["found"])
    assert (tmp_path / "bench-quick.png").stat().st_size > 10_000
