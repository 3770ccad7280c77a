"""The tests' environment, whether `make test` starts them or a bare `pytest`."""

from importlib.util import find_spec

# Before PyTorch, which brings OpenMP: where that has two threads already, MXNet's OpenBLAS can wait
# for ever once two devices multiply at a time.
import helpers  # noqa: F401
from build import set_up_tests

set_up_tests()


def pytest_unconfigure(config):
    """Say last, in the process that was started, what could not be tested here."""
    if not hasattr(config, "workerinput") and not find_spec("torch"):
        print("NOT THE WHOLE: PyTorch is not installed, so nothing that needs it was tested: "
              "make setup TORCH=1")
