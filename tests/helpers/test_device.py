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

from helpers import device, gpu
from helpers.device import devices
from helpers.engine import cores
from helpers.gpu import Card

ROOT = Path(helpers.__file__).parents[1]
A100, H200 = Card("NVIDIA A100", (8, 0), 2**35), Card("NVIDIA H200", (9, 0), 2**37)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with 64 cores and no GPU until a test says otherwise."""

    def has(*cards, cores=64):
        monkeypatch.setattr(mx.context, "num_gpus", lambda: len(cards))
        monkeypatch.setattr(device.gpu, "cards", lambda: list(cards))
        monkeypatch.setattr(device, "cores", lambda: cores)

    monkeypatch.delenv("COURSE_SIMULATE", raising=False)
    has()
    return has


def gpus(*numbers):
    return [mx.gpu(number) for number in numbers]


@pytest.mark.parametrize(("cards", "k", "expected", "said"), [
    ([], 5, cpus(5), "5 simulated devices: cpu(0), cpu(1), cpu(2), cpu(3), cpu(4), one core each"),
    ([], None, cpus(2), "2 simulated devices: cpu(0), cpu(1), one core each"),
    ([], np.int64(1), cpus(1), "1 simulated device: cpu(0), one core each"),
    ([A100], None, gpus(0), "1 GPU: gpu(0)"),
    ([A100] * 4, None, gpus(0, 1, 2, 3), "4 GPUs: gpu(0), gpu(1), gpu(2), gpu(3)"),
    ([A100] * 4, 2, gpus(0, 1), "2 GPUs: gpu(0), gpu(1)"),
    ([A100], 2, cpus(2), "2 simulated devices: cpu(0), cpu(1), one core each"),
    ([H200, A100], 1, gpus(1), "1 GPU: gpu(1)"),
    ([H200, A100], 2, cpus(2), "2 simulated devices: cpu(0), cpu(1), one core each")])
def test_which_are_chosen_is_said_at_each_call(machine, capsys, cards, k, expected, said):
    machine(*cards)
    for _ in range(2):
        assert devices(k) == expected
        *left_out, line = capsys.readouterr().out.splitlines()
        assert line == said
        assert left_out == ["gpu(0) is left out: MXNet 1.9.1 has no machine code for NVIDIA H200, "
                            "capability 9.0"] * (H200 in cards)


def test_without_a_driver_mxnets_count_is_believed(machine, monkeypatch):
    def none():
        raise gpu.NoDriver

    machine(A100, A100)
    monkeypatch.setattr(device.gpu, "cards", none)
    assert devices(2) == gpus(0, 1)


def test_simulated_on_request_which_is_1_or_0(machine, monkeypatch):
    machine(*[A100] * 4)
    for value, expected in [("1", cpus(2)), ("0", gpus(0, 1)), ("", gpus(0, 1))]:
        monkeypatch.setenv("COURSE_SIMULATE", value)
        assert devices(2) == expected
    monkeypatch.setenv("COURSE_SIMULATE", "yes")
    with pytest.raises(ValueError, match="COURSE_SIMULATE=yes: must be 1 or 0"):
        devices(2)


@pytest.mark.parametrize(("k", "error", "words"), [
    (0, ValueError, "k=0.*from 1 to 64"), (65, ValueError, "k=65.*from 1 to 64"),
    (2.0, TypeError, "k=2.0.*whole number"), (True, TypeError, "k=True.*whole number")])
def test_what_is_no_number_of_devices_is_refused(k, error, words):
    with pytest.raises(error, match=words):
        devices(k)


def test_warns_where_cores_are_shared_and_only_there(machine, capsys):
    machine(cores=2)
    with pytest.warns(UserWarning, match=r"devices\(k=3\): this process may use 2 cores") as caught:
        assert devices(3) == cpus(3)
    assert [each.filename for each in caught] == [__file__]  # the reader's line, not ours
    assert capsys.readouterr().out.endswith("sharing 2 cores\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        devices(2)
        machine(A100, A100, cores=1)
        devices(2)


def test_cores_follow_affinity_and_a_variable():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no affinity on this system")
    ours = min(os.sched_getaffinity(0))
    for code, variables in [(f"import os; os.sched_setaffinity(0, {{{ours}}})", {}),
                            ("", {"LOKY_MAX_CPU_COUNT": "1"})]:
        out = subprocess.check_output(
            [sys.executable, "-c", f"{code}\nfrom helpers.engine import cores; print(cores())"],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | variables, text=True)
        assert out == "1\n"
    assert 1 <= cores() <= os.cpu_count()
