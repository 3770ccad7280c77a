"""A kernel that isn't the course's: a NumPy that MXNet doesn't know, MXNet broken or not there."""

import os
import re
import subprocess
import sys
import types
import warnings
from importlib import metadata, util
from pathlib import Path

import numpy
import pytest

import helpers
from helpers import engine, newer_numpy

ROOT = Path(helpers.__file__).parents[1]
# What NumPy 2.5.5 lacks of the names that MXNet 1.9.1 reads while it loads, and 1.24 to 1.26.
SINCE_2 = set("PZERO NZERO NINF PINF NAN NaN Inf alltrue sometrue msort product round_ in1d trapz "
              "mirr npv pmt ppmt pv rate".split())
SINCE_1_24 = {"bool"}
MXNET = "import numpy, mxnet as mx; print(mx.np.ones(2) + 1)"


def python(*args, **variables):
    """(exit status, what it prints, what it complains) of a new Python that finds `helpers`."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    done = subprocess.run(
        [sys.executable, *args], env=env, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def fake(monkeypatch):
    """A NumPy without those names, in the place of the real one."""
    fake = types.ModuleType("numpy")
    there = {name: value for name, value in vars(numpy).items() if not name.startswith("__")}
    for name in set(there) - SINCE_2 - SINCE_1_24:
        setattr(fake, name, there[name])
    fake.trapezoid = getattr(numpy, "trapezoid", None) or numpy.trapz   # its name since 2.0
    fake.__version__ = "0.0.0, a fake"
    fake.asked = []
    fake.set_printoptions = lambda **options: fake.asked.append(options)
    monkeypatch.setitem(sys.modules, "numpy", fake)
    monkeypatch.setenv("PYTHON_COLORS", "")
    monkeypatch.delenv("PYTHON_COLORS")
    return fake


def version_is(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: {"numpy": version}[name])


def prepare():
    """What is said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        newer_numpy.prepare()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("version", ["1.23.5", "1.9.3", "0.9"])
def test_nothing_happens_with_a_numpy_that_mxnet_knows(fake, monkeypatch, version):
    before = dict(vars(fake))
    version_is(monkeypatch, version)
    assert prepare() == []
    assert vars(fake) == before and fake.asked == []
    assert "PYTHON_COLORS" not in os.environ


def test_nothing_happens_without_numpy(fake, monkeypatch):
    before = dict(vars(fake))
    monkeypatch.setattr(metadata, "version", lambda name: metadata.distribution("no-such-package"))
    assert prepare() == []
    assert vars(fake) == before


@pytest.mark.parametrize("version, asked", [
    ("1.24.0", []), ("1.26.4", []), ("2.0.0rc1", [{"legacy": "1.25"}]),
    ("2.1.3", [{"legacy": "1.25"}]), ("10.0.0", [{"legacy": "1.25"}])])
def test_a_newer_numpy_is_mended(fake, monkeypatch, version, asked):
    version_is(monkeypatch, version)
    (said,) = prepare()
    assert SINCE_2 | SINCE_1_24 <= set(vars(fake))
    assert fake.asked == asked, "NumPy before 2.0 has no such way of printing, and needs none"
    assert os.environ["PYTHON_COLORS"] == "0"
    assert said.startswith("Experimental: "), "by which .ci/newer knows it"
    assert f"NumPy {fake.__version__} on Python {sys.version.split()[0]}" in said
    assert "make lab" in said


def test_a_users_colours_stay(fake, monkeypatch):
    version_is(monkeypatch, "2.1.3")
    monkeypatch.setenv("PYTHON_COLORS", "1")
    prepare()
    assert os.environ["PYTHON_COLORS"] == "1"


def test_what_is_put_back_does_what_it_did(fake):
    newer_numpy.put_back(fake)
    a = numpy.array([[3.0, 0.0, 1.26], [1.0, 2.0, 2.0]])
    assert fake.alltrue(a) is numpy.False_ and fake.sometrue(a) is numpy.True_
    assert fake.alltrue(a, axis=0).tolist() == [True, False, True]
    assert fake.product(a[1]) == 4 and fake.round_(a, 1)[0, 2] == 1.3
    assert fake.msort(a).tolist() == [[1.0, 0.0, 1.26], [3.0, 2.0, 2.0]]
    assert fake.in1d(a, [0, 2]).tolist() == [False, True, False, False, True, True]
    assert fake.in1d(a[0], [3], invert=True).tolist() == [False, True, True]
    assert fake.trapz(a[1]) == 3.5 and fake.trapz(a, axis=0, dx=2).tolist() == [4, 2, 3.26]
    assert (fake.PINF, fake.NINF, fake.Inf) == (numpy.inf, -numpy.inf, numpy.inf)
    assert numpy.isnan([fake.NaN, fake.NAN]).all()
    assert numpy.signbit([fake.PZERO, fake.NZERO]).tolist() == [False, True]
    assert fake.bool is bool
    with pytest.raises(RuntimeError, match="financial"):
        fake.pv(0.05, 10, 100)


def test_what_is_there_is_left_alone(fake):
    fake.bool, fake.in1d = numpy.bool_, len   # as in 2.0
    newer_numpy.put_back(fake)
    assert fake.bool is numpy.bool_ and fake.in1d is len


def test_setuptools_is_asked_for_where_there_is_no_distutils(fake, monkeypatch):
    version_is(monkeypatch, "2.1.3")
    monkeypatch.setattr(util, "find_spec", {"distutils": None}.get)
    (said,) = prepare()
    assert "needs setuptools" in said and "NumPy 0.0.0" in said


# This process's NumPy without the names, and its age disguised. "1.26.4" since the course's own
# NumPy, where these tests mostly run, has no way of 1.25 to print.
WITHOUT = f"""
import numpy
from importlib import metadata
for name in {SINCE_2 | SINCE_1_24}:
    if name in vars(numpy) and not (name == "bool" and numpy.__version__ >= "2"):
        delattr(numpy, name)
version = metadata.version
metadata.version = lambda name: "1.26.4" if name == "numpy" else version(name)
"""


def test_mxnet_loads_with_what_is_put_back():
    status, _, said = python("-c", WITHOUT + MXNET)
    assert status == 1 and re.search(r"AttributeError: .*numpy|`np\.", said), "it does need them"
    status, out, said = python("-c", WITHOUT + "import helpers\n" + MXNET)
    assert (status, out) == (0, "[2. 2.]\n"), said
    assert said.count("Experimental: this kernel has NumPy") == 1


@pytest.mark.skipif(newer_numpy._numpy_version() >= (1, 24), reason="NumPy is newer here")
def test_the_courses_own_kernel_is_told_nothing():
    code = "import helpers, sys; print('numpy' in sys.modules)\n" + MXNET
    assert python("-c", code) == (0, "False\n[2. 2.]\n", "")


def test_the_course_is_made_for_what_is_locked():
    direct = (ROOT / "requirements/common.in").read_text()
    (version,) = re.findall(r"^numpy==(\S+)", direct, re.MULTILINE)
    assert newer_numpy.COURSE == f"NumPy {version} on Python 3.11"


def test_the_warning_points_at_the_readers_line(tmp_path):
    script = tmp_path / "readers.py"
    script.write_text(f"exec({WITHOUT!r})\nimport helpers\n")
    status, _, said = python(str(script))
    assert status == 0 and f"{script}:2: UserWarning: Experimental" in said


@pytest.fixture
def no_settings(monkeypatch):
    """As if MXNet were not loaded, and no setting is made."""
    for name in ("mxnet", "mxnet.base"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in engine.SETTINGS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(engine, "_keep_memory", lambda: None)


def test_a_kernel_without_mxnet_is_told_which_it_is(no_settings, monkeypatch):
    monkeypatch.setattr(util, "find_spec", {"mxnet": None}.get)
    with pytest.warns(UserWarning) as caught:
        engine.prepare()
    (said,) = [str(each.message) for each in caught]
    assert "not the course's kernel" in said and "has no MXNet" in said and "`make lab`" in said
    assert sys.executable in said and sys.version.split()[0] in said


def test_a_kernel_without_mxnet_can_still_be_looked_at():
    code = ("import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
            "import helpers; from helpers import gpu; print('on')\nfrom helpers import devices")
    status, out, said = python("-W", "always", "-c", code)
    assert (status, out) == (1, "on\n")
    assert "This is not the course's kernel" in said
    assert said.splitlines()[-1] == "ModuleNotFoundError: No module named 'mxnet'"


def test_an_import_of_mxnet_that_failed_before_is_told(no_settings, monkeypatch):
    """Its library is loaded then, without the settings."""
    monkeypatch.setitem(sys.modules, "mxnet.base", types.ModuleType("mxnet.base"))
    with pytest.warns(UserWarning, match="mxnet was imported before helpers, and that failed"):
        engine.prepare()
    assert not set(engine.SETTINGS) & set(os.environ), "nothing is changed any more"


def test_which_modules_a_failed_import_of_mxnet_leaves_behind():
    code = WITHOUT + "try:\n    import mxnet\nexcept AttributeError:\n    import helpers"
    status, _, said = python("-c", code)
    assert status == 0 and "and that failed. Restart the kernel" in said
