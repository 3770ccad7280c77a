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

    MXNet tells four digits.

    `sizes` has each key's number of float32 entries. More arrays a key than two take turns on
    the two devices, since the profiler has one counter for each core: with fewer than two cores
    it can't tell `cpu(1)` from the host. `prepare` is called with the store before its keys are
    made.

    Arrays of others that are made or freed meanwhile would be counted: then we count once more.
    Raises RuntimeError where that happens, or the store's memory isn't freed, three times.
    """
    for _ in range(3):
        most = _count_once(sizes, kind, arrays_a_key, prepare)
        if most is not None:
            return most
    raise RuntimeError("in each of three counts others made or freed arrays, or the store did")


def _count_once(sizes, kind, arrays_a_key, prepare):
    """What `kilobytes` returns, or None where others disturbed the count."""
    places = [PAIR[rank % 2] for rank in range(arrays_a_key)]
    keys = list(range(len(sizes)))
    grads = []
    for size in sizes:
        grads.append([nd.ones(size, ctx=device) for device in places])
    gc.collect()  # what others leave to be freed should go before we count
    gc.disable()
    try:
        with tempfile.TemporaryDirectory() as folder:
            mx.profiler.set_config(profile_memory=True, aggregate_stats=True,
                                   filename=str(Path(folder) / "profile.json"))
            mx.profiler.set_state("run")
            # MXNet's counters keep their values from one count to the next, stop at zero, and are
            # told only when they change. So these arrays are the ground that we count from.
            first = _one_on_each()
            _counters(reset=True)
            second = _one_on_each()
            ground = _counters(reset=True)  # one change on each device, so least and most are one
            store = mx.kvstore.create(kind)
            if prepare is not None:
                prepare(store)
            store.init(keys, [arrays[0] for arrays in grads])
            store.push(keys, grads)
            nd.waitall()
            del store  # freed while the profiler counts: does the count return to its ground?
            counted = _after_freeing(ground)
            del first, second
    finally:
        mx.profiler.set_state("stop")
        _counters(reset=True)
        gc.enable()
    if counted is None:
        return None
    return [round(most - before) for (_, most), (_, before) in zip(counted, ground)]


def _one_on_each():
    """A small array on each device, made by now."""
    arrays = [nd.ones(1, ctx=device) for device in PAIR]  # MXNet tells four digits: not more
    nd.waitall()
    return arrays


def _after_freeing(ground):
    """The counters, once each is back at its ground; None if one isn't after 3 s, or is below."""
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        counted = _counters(unchanged=ground)
        above = [least - before for (least, _), (before, _) in zip(counted, ground)]
        if min(above) < 0:  # others freed something
            return None
        if max(above) == 0:
            return counted
        time.sleep(0.01)  # the engine frees arrays a little later
    return None


def _counters(reset=False, unchanged=((0, 0), (0, 0))):
    """The least and the most kB counted on each device since the last reset."""
    counted = json.loads(mx.profiler.dumps(reset, "json")).get("Memory", {})
    memory = counted.get("Device Storage", {})
    found = []
    for device, before in zip(PAIR, unchanged):
        counter = memory.get(f"Memory: {device.device_type}/{device.device_id}")
        found.append(before if counter is None else (counter["Min"], counter["Max"]))
    return found
