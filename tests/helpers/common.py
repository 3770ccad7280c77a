"""What several files of tests need: simulated devices, and errors by the parts of their words."""

import helpers  # noqa: F401  first, so that MXNet finds its settings

# isort: split
import mxnet as mx
import pytest


def cpus(k):
    """The first `k` simulated devices, a list."""
    return [mx.cpu(i) for i in range(k)]


def raises(error, *parts):
    """The error, with a message that has every one of these parts."""
    return pytest.raises(error, match="".join(f"(?=.*{part})" for part in parts))
