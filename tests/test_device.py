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

from helpers import device
from helpers.device import cores, devices

ROOT = Path(helpers.__file__).parents[1]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with 64 cores and no GPU until a test says otherwise."""

    def has(gpus=0, cores=64):
        monkeypatch.setattr(mx.context, "num_gpus", lambda: gpus)
        monkeypatch.setattr(device, "cores", lambda: cores)

    monkeypatch.delenv("COURSE_SIMULATE", raising=False)
    monkeypatch.setattr(device, "_said", set())
    has()
    return has


def cpus(k):
    return [mx.cpu(i) for i in range(k)]


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
        (0, 64, 9, "9 simulated devices: cpu(0), cpu(1), ..., cpu(8), one core each"),
        (4, 2, 1, "1 GPU: gpu(0)"),
        (4, 2, 4, "4 GPUs: gpu(0), gpu(1), gpu(2), gpu(3)"),
    ],
)
def test_says_once_which(machine, capsys, gpu_count, core_count, k, line):
    machine(gpus=gpu_count, cores=core_count)
    for _ in range(3):
        devices(k)
    assert capsys.readouterr().out == line + "\n"


def test_says_each_answer_once(machine, capsys):
    devices(2), devices(3), devices(2)
    machine(gpus=2)
    devices(2), devices(3), devices(2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "2 simulated devices",
        "3 simulated devices",
        "2 GPUs",
    ]


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


def write(root, **files):
    folder = root / "sys/fs/cgroup"
    (folder / "cpu").mkdir(parents=True, exist_ok=True)
    names = {
        "v2": "cpu.max",
        "quota": "cpu/cpu.cfs_quota_us",
        "period": "cpu/cpu.cfs_period_us",
    }
    for key, text in files.items():
        (folder / names[key]).write_text(text)


@pytest.fixture
def eight(monkeypatch):
    """Affinity with eight cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, 8),
        ({"v2": "max 100000\n"}, 8),
        ({"v2": "150000 100000\n"}, 1),
        ({"v2": "299999 100000\n"}, 2),
        ({"v2": "300000 100000\n"}, 3),
        ({"v2": "50000 100000\n"}, 1),
        ({"v2": "100000 50000\n"}, 2),
        ({"v2": "9000000 100000\n"}, 8),
        ({"quota": "300000\n", "period": "100000\n"}, 3),
        ({"quota": "350000\n", "period": "100000\n"}, 3),
        ({"quota": "20000\n", "period": "100000\n"}, 1),
        ({"quota": "-1\n", "period": "100000\n"}, 8),
        ({"v2": "400000 100000", "quota": "200000", "period": "100000"}, 2),
        ({"v2": "200000 100000", "quota": "400000", "period": "100000"}, 2),
    ],
)
def test_cores_by_quota(tmp_path, eight, files, expected):
    write(tmp_path, **files)
    assert cores(tmp_path) == expected


@pytest.mark.parametrize(
    "files",
    [
        {"v2": ""},
        {"v2": "200000"},
        {"v2": "two 100000"},
        {"v2": "200000 100000 7"},
        {"v2": "200000 0"},
        {"v2": "-1 100000"},
        {"quota": "200000"},
        {"period": "100000"},
        {"quota": "200000", "period": "0"},
        {"quota": "200000", "period": "-100000"},
        {"quota": "many", "period": "100000"},
        {"quota": "", "period": ""},
    ],
)
def test_cores_ignores_what_it_cannot_read(tmp_path, eight, files):
    write(tmp_path, **files)
    assert cores(tmp_path) == 8


def test_cores_without_affinity(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for count, expected in [(6, 6), (None, 1)]:
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert cores(tmp_path) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_cores_follows_affinity_and_so_does_the_warning():
    code = (
        "import os\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from helpers.device import cores, devices\n"
        "print(cores())\n"
        "devices(2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT), "COURSE_SIMULATE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "1\n2 simulated devices: cpu(0), cpu(1), sharing 1 core\n"
    assert "devices(k=2): this process may use 1 core," in done.stderr


def test_cores_of_this_machine():
    assert 1 <= cores() <= os.cpu_count()
