"""What `helpers.stores` counts: arrays of known size."""

import gc

import helpers  # noqa: F401 - its settings come before MXNet
import mxnet as mx
import pytest
from helpers.device import cores
from helpers.stores import kilobytes
from mxnet import nd

needs_two_cores = pytest.mark.skipif(cores() < 2, reason="the profiler has a counter for each core")


@needs_two_cores
@pytest.mark.parametrize("arrays", [2, 3, 4])
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


class Cycle:
    """Garbage that only the collector finds, with an array on each device."""

    def __init__(self):
        self.itself = self
        self.arrays = [nd.ones(1000, ctx=device) for device in (mx.cpu(0), mx.cpu(1))]


class Collects(mx.optimizer.Optimizer):
    """Changes no weight. Has the garbage collected at each push."""

    def update(self, index, weight, grad, state):
        nd.waitall()
        gc.collect()
        nd.waitall()


@needs_two_cores
def test_garbage_of_others_is_not_subtracted():
    for _ in range(10):
        Cycle()
    found = kilobytes([1000, 2000, 5000], prepare=lambda store: store.set_optimizer(Collects()))
    assert sorted(found) == [24, 40]


@needs_two_cores
@pytest.mark.parametrize("size", [500, 100_000])
def test_arrays_that_others_drop_while_we_count_are_not_subtracted(size):
    others = [nd.ones(size, ctx=device) for device in (mx.cpu(0), mx.cpu(1))]
    nd.waitall()
    calls = []

    def drop(store):
        calls.append(len(others))
        others.clear()
        nd.waitall()

    assert sorted(kilobytes([1000, 2000, 5000], prepare=drop)) == [24, 40]
    assert calls == [2, 0], "the first count should be given up, the second kept"


@needs_two_cores
def test_a_count_that_never_comes_out_even_raises():
    others = []

    def keep(store):
        others.append(nd.ones(250, ctx=mx.cpu(0)))
        others.append(nd.ones(250, ctx=mx.cpu(1)))

    with pytest.raises(RuntimeError, match="in each of three counts"):
        kilobytes([1000], prepare=keep)


@needs_two_cores
def test_after_an_error_the_next_count_is_right():
    def fail(store):
        raise ValueError(store.type)

    with pytest.raises(ValueError, match="device"):
        kilobytes([1000], prepare=fail)
    assert gc.isenabled() and sorted(kilobytes([1000])) == [0, 8]
