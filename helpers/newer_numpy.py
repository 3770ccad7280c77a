"""Experimental: MXNet 1.9.1 with a newer NumPy than the course's, as on Colab.

The course runs on Python 3.11 with NumPy 1.23.5, and there nothing here happens. Newer Pythons
have no NumPy with which MXNet can be imported: Python 3.12 has wheels from 1.26 on, and MXNet reads
names while it loads that went with NumPy 1.24 and 2.0. `prepare` puts them back, before MXNet
loads. So mended, chapters 01 to 08 print what they print on the course's own Python, which a job
in .github/workflows/nightly.yml checks. What is mended, and why:

- *Names that MXNet reads while it loads* (mxnet/numpy/utils.py, numpy/fallback.py and
  numpy_dispatch_protocol.py). `np.bool` is missing from 1.24 to 1.26 (NumPy 1.24's release notes);
  since 2.0 it is NumPy's own type, and stays. Constants and second names of functions went with
  2.0 (its release notes, "NumPy 2.0 Python API removals"); 2.5 lacks `in1d` and `trapz` too. The
  financial functions went with 1.20 (NEP 32); what stood in their place raised, as it does here.
- *Numbers as text.* Since 2.0, `repr` of a NumPy number names its type (NEP 51). MXNet hands its
  operators their parameters as text, and Gluon's `split_and_load` of `mx.np` arrays fails on
  `[0, np.int64(2)]`. NumPy is asked for the way of 1.25.
- *distutils*, which MXNet imports, left Python with 3.12 (PEP 632). setuptools brings a copy. Where
  that is missing, a warning says so.
- *Colours.* Since 3.13, Python colours tracebacks where FORCE_COLOR is set, and newer ipykernels
  set it. Chapter 01 reads the traceback of a program that it starts, so these stay plain.

What doesn't hold. In a thread of your own, NumPy from 2.1 on writes numbers its new way (its
options belong to a context), so `split_and_load` of `mx.np` arrays fails there. `mx.np.pad`, and
from NumPy 2.3 on `mx.recordio.pack`, use other names that are gone; no chapter calls them. And
NumPy 2 keeps the precision of its numbers (NEP 50): `np.float32(3) + 3.0` is a float32. A program
that imports MXNet without helpers gets nothing mended unless it calls `prepare` itself.
"""

import os
import platform
import warnings
from importlib import metadata, util

COURSE = "NumPy 1.23.5 on Python 3.11"


def prepare():
    """Mend what MXNet misses in a newer NumPy, and warn that it is experimental.

    Call it before MXNet loads, and after the settings that NumPy reads: this imports NumPy, unless
    it is one of those that MXNet knows.
    """
    version = _numpy_version()
    if version < (1, 24):
        return
    import numpy as np

    put_back(np)
    if version >= (2, 0):
        np.set_printoptions(legacy="1.25")
    os.environ.setdefault("PYTHON_COLORS", "0")
    here = f"NumPy {np.__version__} on Python {platform.python_version()}"
    if util.find_spec("distutils") is None:
        message = f"This kernel has {here}, where MXNet 1.9.1 needs setuptools: install that first."
    else:
        message = (f"Experimental: this kernel has {here}, and the course is made for {COURSE}. "
                   "Chapters 01 to 08 run here as well; `make lab` opens the course's own kernel.")
    warnings.warn(message, stacklevel=4)  # at the reader's `import helpers`


def put_back(np):
    """Give NumPy, the module `np`, those names that MXNet reads and it has no more."""

    def financial(*args, **kwargs):
        raise RuntimeError("NumPy has no financial functions since 1.20: see numpy-financial")

    def msort(a):
        return np.sort(a, axis=0)

    def in1d(ar1, ar2, assume_unique=False, invert=False):
        return np.isin(np.ravel(ar1), ar2, assume_unique=assume_unique, invert=invert)

    def trapz(y, x=None, dx=1.0, axis=-1):
        return np.trapezoid(y, x, dx, axis)

    names = {
        "bool": bool,
        "PZERO": 0.0, "NZERO": -0.0,
        "Inf": np.inf, "PINF": np.inf, "NINF": -np.inf,
        "NaN": np.nan, "NAN": np.nan,
        "alltrue": np.all, "sometrue": np.any, "product": np.prod, "round_": np.round,
        "msort": msort, "in1d": in1d, "trapz": trapz,
        **dict.fromkeys(["mirr", "npv", "pmt", "ppmt", "pv", "rate"], financial),
    }
    for name, value in names.items():
        if name not in vars(np):  # not hasattr: NumPy would warn
            setattr(np, name, value)


def _numpy_version():
    """(major, minor), without importing NumPy; (0, 0) where there is none."""
    try:
        major, minor = metadata.version("numpy").split(".")[:2]
    except metadata.PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)
