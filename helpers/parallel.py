"""What chapters 02 and 03 build and chapters after them import.

Each function here is the one that its chapter teaches, with a docstring and a line that checks
its arguments; the chapter runs both on the same input. All of them work on `mx.nd` arrays.
"""

import mxnet as mx
import numpy as np


def split_and_load(data, devices, even=True):
    """Cut a batch along its first axis into one shard a device, each on its device, in order.

    data: an NDArray `[n, ...]`; devices: k different contexts. Returns a list of k NDArrays.
    Shards differ by at most one example, the longer ones first: 10 over 3 gives [4, 3, 3].
    With `even=True` they must not differ at all.

    A shard that is already where it should be may alias `data`: writing to one may change the
    other. Copy it first where that matters.

    Raises TypeError for anything but an NDArray; ValueError for an empty or repeated device
    list, a batch with fewer examples than devices (an empty one too), or an uneven batch with
    `even=True`. Taught in chapter 02.
    """
    check_batch(data, devices, even)
    n = len(data)
    k = len(devices)
    size = n // k
    longer = n % k
    shards = []
    begin = 0
    for rank, device in enumerate(devices):
        end = begin + size
        if rank < longer:
            end += 1
        shards.append(data[begin:end].as_in_context(device))
        begin = end
    return shards


def allreduce(arrays):
    """Replace each of k arrays, one a device, by the sum of all, in place.

    Sum on the first device, then broadcast: it receives and sends (k-1)·S bytes for arrays of S
    bytes, each of the others S. Raises as `check_replicas`. Taught in chapter 03.
    """
    check_replicas(arrays)
    total = arrays[0]
    for rank in range(1, len(arrays)):
        total += arrays[rank].copyto(total.context)
    for rank in range(1, len(arrays)):
        total.copyto(arrays[rank])


def assert_replicas_equal(arrays, tolerance=0.0):
    """Assert that k arrays, one a device, hold the same values.

    tolerance: the largest difference allowed, as a share of the first array's largest entry.
    Raises AssertionError that names the first device too far away and by how much; NaN and
    infinity are equal to nothing.
    """
    check_replicas(arrays)
    first = arrays[0].asnumpy().astype("float64")
    scale = np.abs(first).max(initial=0.0)
    for array in arrays[1:]:
        apart = np.abs(array.asnumpy().astype("float64") - first).max(initial=0.0)
        assert apart <= tolerance * scale < np.inf, (
            f"the replicas on {arrays[0].context} and {array.context} differ by up to {apart:.3g} "
            f"where the largest entry is {scale:.3g}: was the sum broadcast to every device?"
        )


def check_devices(call, devices):
    """The devices' names; ValueError that begins with `call` where there is none, or one twice."""
    names = [str(d) for d in devices]
    if not names:
        raise ValueError(f"{call}(devices=[]): needs at least one device")
    if len(set(names)) < len(names):
        raise ValueError(f"{call}(devices={names}): a device appears twice; a replica would be "
                         "overwritten, so each must be different")
    return names


def check_batch(data, devices, even):
    """Raise what `split_and_load` promises."""
    if not isinstance(data, mx.nd.NDArray):
        raise TypeError(f"split_and_load(data): needs an NDArray, not {type(data).__name__}; "
                        "mx.nd.array(data) makes one")
    if data.ndim == 0:
        raise TypeError("split_and_load(data): a single number has no first axis to cut along")
    k = len(check_devices("split_and_load", devices))
    if len(data) < k:
        raise ValueError(f"split_and_load(data): {len(data)} examples are too few for {k} devices; "
                         "each needs at least one")
    if even and len(data) % k:
        raise ValueError(f"split_and_load(even=True): {len(data)} examples don't divide by {k} "
                         "devices; pass even=False for shards that differ by one")


def check_replicas(arrays):
    """Raise TypeError unless all are `mx.nd` arrays; ValueError unless there is at least one, all
    have one shape and dtype, and each is on a device of its own."""
    if not len(arrays):
        raise ValueError("arrays=[]: needs at least one array")
    for a in arrays:
        if not isinstance(a, mx.nd.NDArray):
            raise TypeError(f"arrays: needs NDArrays, not {type(a).__name__}")
        if isinstance(a, mx.np.ndarray):  # whose reshape copies, so writes would be lost
            raise TypeError("arrays: needs mx.nd arrays, not mx.np ones; "
                            "array.as_nd_ndarray() gives one that shares the memory")
    for what, values in (("shape", [a.shape for a in arrays]),
                         ("dtype", [np.dtype(a.dtype).name for a in arrays])):
        if len(set(values)) > 1:
            raise ValueError(f"arrays: each must have the same {what}, got {values}")
    check_devices("arrays ", [a.context for a in arrays])
