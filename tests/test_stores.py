"""What `helpers.stores` counts: arrays of known size."""

import helpers  # noqa: F401 - its settings come before MXNet
import pytest
from helpers.device import cores
from helpers.stores import kilobytes
from mxnet import nd

needs_two_cores = pytest.mark.skipif(cores() < 2, reason="the profiler has a counter for each core")


@needs_two_cores
@pytest.mark.parametrize("arrays", [2, 3])
def test_an_owner_has_as_many_arrays_of_a_key_as_were_pushed(arrays):
    assert sorted(kilobytes([1000], arrays_a_key=arrays)) == [0, 4 * arrays]


@needs_two_cores
def test_a_local_store_takes_nothing_on_the_devices():
    assert kilobytes([1000, 500], "local") == [0, 0]


@needs_two_cores
def test_what_prepare_allocates_counts():
    held = []

    def prepare(store):
        assert store.type == "device"
        held.append(nd.zeros(250))
        held.pop()
    assert max(kilobytes([10], prepare=prepare)) >= 1
