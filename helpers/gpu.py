"""NVIDIA cards as their driver reports them, and the libraries that MXNet's CUDA build loads.

This must be known before MXNet is imported: without a driver the import fails, and on a card for
which MXNet 1.9.1 has no machine code the first operator does. Only Python's own library is used,
so that `make setup` can run this file with any Python: it succeeds where MXNet can use a card.

    python helpers/gpu.py
"""

import ctypes
import sys
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

# mxnet-cu112 1.9.1 holds machine code for 5.0, 6.0, 7.0, 8.0 and 8.6, and no PTX that a driver
# could compile for others; code for 8.0 runs on all of 8.x, but not on 9.0.
LEAST, BELOW = (5, 0), (9, 0)

# What libmxnet.so is linked against, each after what it needs itself, and what these load by
# name later on. Once they are loaded, nobody has to set LD_LIBRARY_PATH.
LIBRARIES = [
    "cuda_runtime/lib/libcudart.so.11.0", "cuda_nvrtc/lib/libnvrtc-builtins.so.11.8",
    "cuda_nvrtc/lib/libnvrtc.so.11.2", "nvtx/lib/libnvToolsExt.so.1",
    "cublas/lib/libcublasLt.so.11", "cublas/lib/libcublas.so.11", "cufft/lib/libcufft.so.10",
    "curand/lib/libcurand.so.10", "cusparse/lib/libcusparse.so.11",
    "cusolver/lib/libcusolver.so.11", "nccl/lib/libnccl.so.2",
    *(f"cudnn/lib/libcudnn{part}.so.8" for part in (
        "_ops_infer", "_ops_train", "_cnn_infer", "_cnn_train", "_adv_infer", "_adv_train", "")),
]  # fmt: skip

_NAME, _MAJOR, _MINOR = 100, 75, 76  # a name's length; attributes of cuda.h


class Card(NamedTuple):
    name: str
    capability: tuple    # (major, minor)
    memory: int          # bytes

    @property
    def usable(self):
        """Whether MXNet 1.9.1 has machine code for it."""
        return LEAST <= self.capability < BELOW

    def __str__(self):
        return f"{self.name}, capability {self.capability[0]}.{self.capability[1]}"


class NoDriver(OSError):
    """This machine has no NVIDIA driver, or one that doesn't answer."""


def cards():
    """The cards that this process may use, in the order of MXNet's gpu(0), gpu(1), ...

    Asks the driver's library, libcuda.so.1, which respects CUDA_VISIBLE_DEVICES. Raises NoDriver.
    """
    cuda = _driver()
    count = ctypes.c_int()
    if cuda.cuInit(0) == 100:  # CUDA_ERROR_NO_DEVICE
        return []
    _ask(cuda.cuDeviceGetCount, ctypes.byref(count))
    return [_card(cuda, number) for number in range(count.value)]


def _driver():
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoDriver("there is no NVIDIA driver here (libcuda.so.1)") from error


def _card(cuda, number):
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, memory = ctypes.create_string_buffer(_NAME), ctypes.c_size_t()
    _ask(cuda.cuDeviceGet, ctypes.byref(device), number)
    _ask(cuda.cuDeviceGetName, name, _NAME, device)
    _ask(cuda.cuDeviceGetAttribute, ctypes.byref(major), _MAJOR, device)
    _ask(cuda.cuDeviceGetAttribute, ctypes.byref(minor), _MINOR, device)
    _ask(cuda.cuDeviceTotalMem_v2, ctypes.byref(memory), device)
    return Card(name.value.decode(errors="replace"), (major.value, minor.value), memory.value)


def _ask(function, *arguments):
    status = function(*arguments)
    if status:
        raise NoDriver(f"the NVIDIA driver does not answer: {function.__name__} gives {status}")


def usable():
    """The numbers of the cards that MXNet 1.9.1 can use: [0, 1] for gpu(0) and gpu(1)."""
    try:
        return [number for number, card in enumerate(cards()) if card.usable]
    except NoDriver:
        return []


def is_cuda_build():
    """Whether the MXNet that is installed is the build for CUDA. Doesn't import it."""
    try:
        return bool(metadata.version("mxnet-cu112"))
    except metadata.PackageNotFoundError:
        return False


def preload():
    """Load the CUDA libraries from their wheels, then the driver's; NoDriver where that is missing.

    Libraries whose wheels aren't there are left to the system.
    """
    spec = util.find_spec("nvidia")
    for folder in map(Path, spec.submodule_search_locations if spec else []):
        for library in LIBRARIES:
            if (folder / library).exists():
                ctypes.CDLL(str(folder / library), ctypes.RTLD_GLOBAL)
    _driver()


if __name__ == "__main__":
    sys.exit(0 if usable() else 1)
