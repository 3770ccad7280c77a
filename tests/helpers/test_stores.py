"""What `helpers.stores` counts: arrays of known size."""

import gc

import helpers  # noqa: F401 - its settings come before MXNet
import mxnet as mx
import pytest
from helpers.device import cores
from helpers.stores import kilobytes
from mxnet import nd

pytestmark = pytest.mark.skipif(cores() < 2, reason="the profiler has a counter for each core")


def test_an_owner_has_as_many_arrays_of_a_key_as_were_pushed_and_a_local_store_none():
    assert sorted(kilobytes([1000], arrays_a_key=2)) == [0, 8]
    assert sorted(kilobytes([1000], arrays_a_key=4)) == [0, 16]
    assert kilobytes([1000, 500], "local") == [0, 0]


@pytest.mark.parametrize(("size", "ranks"), [(500, [0, 1]), (100_000, [1])])
def test_arrays_that_others_drop_while_we_count_are_not_subtracted(size, ranks):
    others = [nd.ones(size, ctx=mx.cpu(rank)) for rank in ranks]
    nd.waitall()
    calls = []

    def drop(store):
        assert store.type == "device"
        calls.append(len(others))
        others.clear()
        nd.waitall()

    assert sorted(kilobytes([1000, 2000, 5000], prepare=drop)) == [24, 40]
    assert calls == [len(ranks), 0], "the first count should be given up, the second kept"


def test_a_count_that_never_comes_out_even_raises_and_the_next_is_right():
    others = []

    def keep(store):
        others.extend(nd.ones(250, ctx=device) for device in (mx.cpu(0), mx.cpu(1)))

    with pytest.raises(RuntimeError, match="in each of three counts"):
        kilobytes([1000], prepare=keep)
    assert gc.isenabled() and sorted(kilobytes([1000])) == [0, 8]
