"""Passes over the cells that need PyTorch where it isn't installed, and says so."""

from importlib.util import find_spec

import pytest
from build import needs_torch


def pytest_collection_modifyitems(items):
    if find_spec("torch"):
        return
    for item in items:
        if hasattr(item, "cell") and item.cell in needs_torch(item.parent.nb):
            item.add_marker(pytest.mark.skip(
                reason="PyTorch is not installed: make setup TORCH=1"))
