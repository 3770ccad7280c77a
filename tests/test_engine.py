"""`import helpers`: settings in place before MXNet, MXNet itself only when something is used."""

import ctypes
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest

import helpers
from helpers import engine

ROOT = Path(helpers.__file__).parents[1]
SETTINGS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MXNET_CPU_TEMP_COPY": "64"}
# mallopt's calls, by the variable that keeps a user's choice: M_MMAP_MAX, M_TRIM_THRESHOLD,
# M_TOP_PAD as malloc.h numbers them.
CALLS = {
    "MALLOC_MMAP_MAX_": (-4, 0),
    "MALLOC_TRIM_THRESHOLD_": (-1, 2147483647),
    "MALLOC_TOP_PAD_": (-2, 268435456),
}
USERS = [*SETTINGS, *CALLS, "GLIBC_TUNABLES"]


def python(*args, **variables):
    """What a new Python prints, started without any of the settings but `variables`."""
    env = {name: value for name, value in os.environ.items() if name not in USERS}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    done = subprocess.run(
        [sys.executable, *args], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


class Library:
    """A C library whose mallopt takes notes."""

    def __init__(self):
        self.calls = []

    def mallopt(self, option, value):
        self.calls.append((option, value))
        return 1


@pytest.fixture
def fresh(monkeypatch):
    """This process as if MXNet were not loaded and no setting made; returns the C library."""
    for name in USERS:
        monkeypatch.setenv(name, "")  # so that it is put back even if the test makes it
        monkeypatch.delenv(name)
    for name in ("mxnet", "mxnet.base"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *rest: library)
    return library


def settings_now():
    return {name: os.environ[name] for name in USERS if name in os.environ}


def test_import_makes_the_settings_and_loads_nothing_heavy():
    out = python(
        "-c",
        "import os, sys, helpers\n"
        "print([m for m in ('mxnet', 'numpy', 'joblib', 'torch') if m in sys.modules])\n"
        f"print({{n: os.environ.get(n) for n in {list(SETTINGS)}}})",
    )
    assert out == f"[]\n{SETTINGS}\n"


def test_cores_are_counted_without_mxnet():
    out = python("-c", "import sys\nfrom helpers.engine import cores\n"
                 "print(cores() > 0, 'mxnet' in sys.modules)")
    assert out == "True False\n"


def test_import_works_where_mxnet_is_broken(tmp_path):
    (tmp_path / "mxnet.py").write_text("raise OSError('libcuda.so.1: cannot open')")
    out = python(
        "-c",
        "import helpers\n"
        "try:\n    helpers.devices\nexcept OSError as e:\n    print('only now:', e)",
        PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]),
    )
    assert out == "only now: libcuda.so.1: cannot open\n"


def test_mxnet_sees_the_settings():
    code = (
        "import ctypes, helpers\nimport mxnet as mx\n"
        f"print({{n: mx.util.getenv(n) for n in {list(SETTINGS)}}})\n"
        "lib = ctypes.CDLL(mx.libinfo.find_lib_path()[0])\n"
        "print(lib.omp_get_max_threads())"
    )
    assert python("-c", code) == f"{SETTINGS}\n1\n"


def test_mxnet_sees_the_users_values():
    users = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1", "MXNET_CPU_TEMP_COPY": "7"}
    code = (
        "import ctypes, helpers\nimport mxnet as mx\n"
        f"print({{n: mx.util.getenv(n) for n in {list(SETTINGS)}}})\n"
        "lib = ctypes.CDLL(mx.libinfo.find_lib_path()[0])\n"
        "print(lib.omp_get_max_threads())"
    )
    out = python("-c", code, OMP_NUM_THREADS="2", MXNET_CPU_TEMP_COPY="7")
    assert out == f"{users}\n2\n"


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallopt"),
    reason="the allocator is not glibc's",
)
def test_freed_memory_stays_with_the_process():
    """A large block comes from the heap, and the heap keeps its size when it is freed."""
    code = """
import ctypes, sys
if sys.argv[1] == "with":
    import helpers
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def heap():
    line = next(line for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]"))
    return [int(end, 16) for end in line.split()[0].split("-")]

block = libc.malloc(64 * 2**20)
start, end = heap()
inside = start <= block < end
libc.free(block)
start, end = heap()
print(inside, end - start >= 64 * 2**20)
"""
    assert python("-c", code, "without") == "False False\n"
    assert python("-c", code, "with") == "True True\n"


def test_prepare_makes_every_setting(fresh):
    engine.prepare()
    assert settings_now() == SETTINGS
    assert sorted(fresh.calls) == sorted(CALLS.values())


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("value", ["3", "", "1"])
def test_prepare_keeps_a_users_setting(fresh, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    engine.prepare()
    assert settings_now() == SETTINGS | {name: value}


@pytest.mark.parametrize("name", CALLS)
def test_prepare_keeps_a_users_allocator_setting(fresh, monkeypatch, name):
    monkeypatch.setenv(name, "12345")
    engine.prepare()
    assert sorted(fresh.calls) == sorted(CALLS[other] for other in CALLS if other != name)
    assert settings_now() == SETTINGS | {name: "12345"}


def test_prepare_keeps_a_users_tunables(fresh, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    engine.prepare()
    assert fresh.calls == []


def test_prepare_goes_on_without_mallopt(fresh, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *rest: object())
    engine.prepare()
    assert settings_now() == SETTINGS


def test_prepare_twice_changes_nothing_more(fresh):
    engine.prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.prepare()
    assert settings_now() == SETTINGS


@pytest.mark.parametrize("users", [{}, {"OMP_NUM_THREADS": "4"}])
def test_too_late_is_said_and_nothing_changed(fresh, monkeypatch, users):
    monkeypatch.setitem(sys.modules, "mxnet", types.ModuleType("mxnet"))
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning) as caught:
        engine.prepare()
    message = str(caught[0].message)
    assert len(caught) == 1
    assert "mxnet was imported before helpers" in message
    assert "speed-ups" in message
    assert "restart the kernel" in message.lower()
    assert settings_now() == users
    assert fresh.calls == []


def test_nothing_is_too_late_where_the_user_made_all_settings(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "mxnet", types.ModuleType("mxnet"))
    for name in SETTINGS:
        monkeypatch.setenv(name, "4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.prepare()
    assert settings_now() == dict.fromkeys(SETTINGS, "4")
    assert fresh.calls == []


def test_the_warning_points_at_the_readers_line(tmp_path):
    script = tmp_path / "readers.py"
    script.write_text(
        "import sys, types, os\n"
        "sys.modules['mxnet'] = types.ModuleType('mxnet')\n"
        "before = dict(os.environ)\n"
        "import helpers\n"
        "assert dict(os.environ) == before\n"
    )
    out = python(str(script))
    assert f"{script}:4: UserWarning: mxnet was imported before helpers" in out
    assert "import helpers\n" in out


@pytest.mark.parametrize("name", helpers.__all__)
def test_each_shared_name_resolves(name):
    value = getattr(helpers, name)
    assert callable(value) and value.__name__ == name
    assert name in dir(helpers)


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(AttributeError, match="no 'all_reduce'.*devices.*allreduce"):
        _ = helpers.all_reduce
    assert not hasattr(helpers, "all_reduce")
    with pytest.raises(ImportError, match="all_reduce"):
        from helpers import all_reduce  # noqa: F401
