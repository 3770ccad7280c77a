"""`devices(k)`: k devices that differ, GPUs where there are enough, else simulated ones."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import helpers  # first, so that MXNet finds its settings

# isort: split
import mxnet as mx
import numpy as np
import pytest
from common import cpus

from helpers import device
from helpers.device import devices
from helpers.engine import cores
from helpers.gpu import Card

ROOT = Path(helpers.__file__).parents[1]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with 64 cores and no GPU until a test says otherwise."""

    def has(gpus=0, cores=64):
        cards = [Card("a card", (8, 0), 2**34)] * gpus  # whatever driver is really here
        monkeypatch.setattr(mx.context, "num_gpus", lambda: gpus)
        monkeypatch.setattr(device.gpu, "cards", lambda: cards)
        monkeypatch.setattr(device, "cores", lambda: cores)

    monkeypatch.delenv("COURSE_SIMULATE", raising=False)
    has()
    return has


def gpus(k):
    return [mx.gpu(i) for i in range(k)]


@pytest.mark.parametrize("k", [1, 2, 3, 8, 64])
def test_simulated_without_gpus(k):
    chosen = devices(k)
    assert chosen == cpus(k)
    assert len(set(map(str, chosen))) == k


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_gpus_where_there_are_enough(machine, count, k):
    machine(gpus=count)
    assert devices(k) == (gpus(k) if count >= k else cpus(k))


@pytest.mark.parametrize(
    "count, expected", [(0, cpus(2)), (1, gpus(1)), (2, gpus(2)), (4, gpus(4))]
)
def test_without_k(machine, count, expected):
    machine(gpus=count)
    assert devices() == expected
    assert devices(None) == expected


@pytest.mark.parametrize("k, expected", [(None, cpus(2)), (1, cpus(1)), (4, cpus(4))])
def test_simulated_on_request(machine, monkeypatch, k, expected):
    machine(gpus=4)
    monkeypatch.setenv("COURSE_SIMULATE", "1")
    assert devices(k) == expected


@pytest.mark.parametrize("value", ["0", ""])
def test_simulated_only_on_request(machine, monkeypatch, value):
    machine(gpus=4)
    monkeypatch.setenv("COURSE_SIMULATE", value)
    assert devices(2) == gpus(2)


@pytest.mark.parametrize("value", ["true", "yes", "2"])
def test_a_request_is_1_or_0(machine, monkeypatch, value):
    machine(gpus=4)
    monkeypatch.setenv("COURSE_SIMULATE", value)
    with pytest.raises(ValueError, match=f"COURSE_SIMULATE={value}: must be 1 or 0"):
        devices(2)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, int])
def test_any_whole_number(kind):
    assert devices(kind(3)) == cpus(3)


@pytest.mark.parametrize("k", [0, -1, 65, 10**6, np.int64(-2)])
@pytest.mark.parametrize("count", [0, 4])
def test_a_number_out_of_range(machine, k, count):
    machine(gpus=count)
    with pytest.raises(ValueError) as caught:
        devices(k)
    assert f"k={k}" in str(caught.value)
    assert "from 1 to 64" in str(caught.value)


@pytest.mark.parametrize("k", [2.5, 2.0, True, False, "2", [2], np.float32(2), float("nan")])
def test_no_whole_number(k):
    with pytest.raises(TypeError) as caught:
        devices(k)
    assert f"k={k!r}" in str(caught.value)
    assert "whole number" in str(caught.value)


def test_arrays_live_where_they_were_put():
    chosen = devices(5)
    arrays = [mx.nd.full((3,), i, ctx=d) for i, d in enumerate(chosen)]
    assert [a.context for a in arrays] == chosen
    assert [a.asnumpy().tolist() for a in arrays] == [[i] * 3 for i in range(5)]
    moved = [arrays[0].as_in_context(d) for d in chosen]
    assert [a.context for a in moved] == chosen


@pytest.mark.parametrize(
    "gpu_count, core_count, k, line",
    [
        (0, 8, 1, "1 simulated device: cpu(0), one core each"),
        (0, 2, 2, "2 simulated devices: cpu(0), cpu(1), one core each"),
        (0, 64, 5, "5 simulated devices: cpu(0), cpu(1), cpu(2), cpu(3), cpu(4), one core each"),
        (4, 2, 1, "1 GPU: gpu(0)"),
        (4, 2, 4, "4 GPUs: gpu(0), gpu(1), gpu(2), gpu(3)"),
    ],
)
def test_says_at_each_call_which(machine, capsys, gpu_count, core_count, k, line):
    """A cell that is run again shows what it showed."""
    machine(gpus=gpu_count, cores=core_count)
    for _ in range(3):
        devices(k)
        assert capsys.readouterr().out == line + "\n"


@pytest.mark.parametrize("core_count, named", [(2, "2 cores"), (1, "1 core,")])
def test_warns_where_cores_are_shared(machine, capsys, core_count, named):
    machine(cores=core_count)
    with pytest.warns(UserWarning) as caught:
        assert devices(3) == cpus(3)
    assert len(caught) == 1
    assert "devices(k=3)" in str(caught[0].message) and named in str(caught[0].message)
    assert caught[0].filename == __file__  # the reader's line, not ours
    assert capsys.readouterr().out.endswith(f"sharing {named.rstrip(',')}\n")


def test_does_not_warn_where_nothing_is_shared(machine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        machine(cores=3)
        devices(3)
        machine(gpus=4, cores=1)
        devices(4)


def cores_seen(code="", **variables):
    """What a new process says of its cores, and of two devices, after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nfrom helpers.device import cores, devices\n"
         "print(cores())\ndevices(2)"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "COURSE_SIMULATE": "1"} | variables,
        capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


ONE = "1\n2 simulated devices: cpu(0), cpu(1), sharing 1 core\n"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_cores_follow_affinity_and_so_does_the_warning():
    out, err = cores_seen("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})")
    assert out == ONE
    assert "devices(k=2): this process may use 1 core," in err


def test_cores_can_be_limited_by_a_variable():
    assert cores_seen(LOKY_MAX_CPU_COUNT="1")[0] == ONE


def test_cores_of_this_machine():
    assert 1 <= cores() <= os.cpu_count()
