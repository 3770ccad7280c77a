"""What a KVStore takes of each device's memory, counted by MXNet's profiler."""

import gc
import json
import tempfile
import time
from pathlib import Path

import mxnet as mx
from mxnet import nd

PAIR = [mx.cpu(0), mx.cpu(1)]


def kilobytes(sizes, kind="device", arrays_a_key=2, prepare=None):
    """The most kB that a store takes on `cpu(0)` and on `cpu(1)`, for one push of all keys.

    `sizes` has each key's number of float32 entries. More arrays a key than two take turns on
    the two devices, since the profiler has one counter for each core: with fewer than two cores
    it can't tell `cpu(1)` from the host. `prepare` is called with the store before its keys are
    made.

    Arrays of others that the engine frees meanwhile would be subtracted: then we count once more.
    Raises RuntimeError where that happens, or the store's memory isn't freed, ten times.
    """
    for _ in range(10):
        most = _count_once(sizes, kind, arrays_a_key, prepare)
        if most is not None:
            return most
    raise RuntimeError("arrays of others were freed, or the store's weren't, in each of ten counts")


def _count_once(sizes, kind, arrays_a_key, prepare):
    """What `kilobytes` returns, or None where others disturbed the count."""
    places = [PAIR[rank % 2] for rank in range(arrays_a_key)]
    keys = list(range(len(sizes)))
    grads = []
    for size in sizes:
        grads.append([nd.ones(size, ctx=device) for device in places])
    gc.collect()  # what others leave to be freed should go before we count
    nd.waitall()
    gc.disable()
    try:
        with tempfile.TemporaryDirectory() as folder:
            mx.profiler.set_config(profile_memory=True, aggregate_stats=True,
                                   filename=str(Path(folder) / "profile.json"))
            mx.profiler.set_state("run")
            store = mx.kvstore.create(kind)
            if prepare is not None:
                prepare(store)
            store.init(keys, [arrays[0] for arrays in grads])
            store.push(keys, grads)
            nd.waitall()
            del store  # freed while the profiler counts, so that the next count begins at zero
            undisturbed = _is_freed()
    finally:
        mx.profiler.set_state("stop")
        most = [device["Max"] for device in _counters(reset=True)]
        gc.enable()
    return most if undisturbed else None


def _is_freed():
    """Wait until each device's count is back at zero. False if it isn't after 3 s, or below."""
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        least = [device["Min"] for device in _counters()]
        if min(least) < 0:
            return False
        if max(least) == 0:
            return True
        time.sleep(0.01)  # the engine frees arrays a little later
    return False


def _counters(reset=False):
    """The least and the most kB that have been counted on each device of the pair."""
    counted = json.loads(mx.profiler.dumps(reset, "json")).get("Memory", {})
    memory = counted.get("Device Storage", {})
    found = []
    for device in PAIR:
        name = f"Memory: {device.device_type}/{device.device_id}"
        found.append(memory.get(name, {"Min": 0, "Max": 0}))
    return found
