"""`import helpers`: settings in place before MXNet, MXNet itself only when something is used."""

import ctypes
import os
import subprocess
import sys
import types
import warnings
from importlib import util
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
    """What a new Python prints and complains of, started without settings but `variables`."""
    env = {name: value for name, value in os.environ.items() if name not in USERS}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    done = subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def fresh(monkeypatch):
    """This process as if MXNet were not loaded and no setting made; the list of mallopt's calls."""
    for name in USERS:
        monkeypatch.setenv(name, "")  # so that it is put back even if the test makes it
        monkeypatch.delenv(name)
    for name in ("mxnet", "mxnet.base"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    calls = []
    library = types.SimpleNamespace(mallopt=lambda *call: calls.append(call))
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *rest: library)
    return calls


def settings_now():
    return {name: os.environ[name] for name in USERS if name in os.environ}


def test_settings_are_made_before_mxnet_which_sees_them_and_is_loaded_last():
    out = python("-c", f"""
import sys, helpers
print([m for m in ("mxnet", "numpy", "joblib", "torch") if m in sys.modules])
import helpers.cluster, helpers.data, helpers.plotting, helpers.timing
print(helpers.engine.cores() > 0, "mxnet" in sys.modules)
import ctypes, mxnet as mx
print({{n: mx.util.getenv(n) for n in {list(SETTINGS)}}})
print(ctypes.CDLL(mx.libinfo.find_lib_path()[0]).omp_get_max_threads())
""")
    assert out == f"[]\nTrue False\n{SETTINGS}\n1\n"


def test_import_works_where_mxnet_is_broken(tmp_path):
    (tmp_path / "mxnet.py").write_text("raise OSError('libcuda.so.1: cannot open')")
    out = python("-c", "import helpers\n"
                 "try:\n    helpers.devices\nexcept OSError as e:\n    print('only now:', e)",
                 PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert out == "only now: libcuda.so.1: cannot open\n"


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


def test_every_setting_is_made_and_twice_changes_nothing_more(fresh):
    engine.prepare()
    assert settings_now() == SETTINGS and sorted(fresh) == sorted(CALLS.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.prepare()
    assert settings_now() == SETTINGS


def test_what_a_user_has_set_is_kept(fresh, monkeypatch):
    users = {"OMP_NUM_THREADS": "3", "MXNET_CPU_TEMP_COPY": "", "MALLOC_TOP_PAD_": "12345"}
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    engine.prepare()
    assert settings_now() == SETTINGS | users
    assert sorted(fresh) == sorted(CALLS[name] for name in CALLS if name not in users)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    fresh.clear()
    engine.prepare()
    assert fresh == []


@pytest.mark.parametrize("module", ["mxnet", "mxnet.base"])  # the second is left by a failed import
def test_too_late_is_said_and_nothing_changed(fresh, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    with pytest.warns(UserWarning, match="mxnet was imported before helpers.*Restart the kernel"):
        engine.prepare()
    assert settings_now() == {} and fresh == []
    if module == "mxnet":
        for name in SETTINGS:
            monkeypatch.setenv(name, "4")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is too late: the user made all settings
            engine.prepare()


def test_a_kernel_without_mxnet_is_told_which_it_is(fresh, monkeypatch):
    monkeypatch.setattr(util, "find_spec", {"mxnet": None}.get)
    with pytest.warns(UserWarning, match="not the course's kernel.*has no MXNet") as caught:
        engine.prepare()
    assert sys.executable in str(caught[0].message)


def test_the_warning_points_at_the_readers_line(tmp_path):
    script = tmp_path / "readers.py"
    script.write_text("import sys, types\nsys.modules['mxnet'] = types.ModuleType('mxnet')\n"
                      "import helpers\n")
    assert f"{script}:3: UserWarning: mxnet was imported before helpers" in python(str(script))
