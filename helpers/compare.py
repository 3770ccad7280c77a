"""How far results are from an oracle: one statistic for all chapters."""

import numpy as np


class Difference(float):
    """A distance: a number that also prints where it was found, the name of an array."""

    where = ""

    def __str__(self):
        return f"{self:.1e} (in {self.where})"

    __repr__ = __str__

    def __format__(self, form):
        return super().__format__(form) if form else str(self)


def largest_difference(found, expected):
    """How far the arrays of `found` are from those of `expected`, at most.

    For each array it is the largest |found - expected| as a share of the largest |expected|; where
    `expected` is all zeros, the largest |found - expected| itself. Of all arrays the worst counts.

    expected: arrays by name or in a list, `{name: array}` or `[array, ...]`, or one array.
    found: the same, or a list of replicas, each of that form; all replicas are looked at. Arrays
    may be NumPy's, MXNet's (nd or np) or PyTorch's.

    Returns a `Difference`. NaN and infinity, on either side, equal nothing: then it is infinite.
    Raises ValueError where there is nothing to compare, or where names, numbers of arrays or shapes
    differ; TypeError for what is no array of real numbers.
    """
    replicas = found if _is_replicas(found, expected) else [found]
    expected = _by_name(expected)
    worst = None
    for number, replica in enumerate(replicas):
        replica = _by_name(replica)
        if replica.keys() != expected.keys():
            raise ValueError(f"largest_difference: found has {', '.join(replica)}, "
                             f"expected {', '.join(expected)}")
        for name, array in expected.items():
            where = name if len(replicas) == 1 else f"{name} of replica {number}"
            difference = Difference(_share(replica[name], array, where))
            difference.where = where
            if worst is None or difference > worst:
                worst = difference
    if worst is None:
        raise ValueError("largest_difference: there is nothing to compare")
    return worst


def _is_replicas(found, expected):
    """Whether `found` is a list of replicas, each of the form that `expected` has."""
    if not isinstance(found, list | tuple) or not found:
        return False
    if isinstance(expected, dict | list | tuple):
        return isinstance(found[0], dict | list | tuple)
    return True


def _by_name(arrays):
    if isinstance(arrays, dict):
        return {str(name): _as_numpy(array) for name, array in arrays.items()}
    if isinstance(arrays, list | tuple):
        return {f"array {place}": _as_numpy(array) for place, array in enumerate(arrays)}
    return {"array 0": _as_numpy(arrays)}


def _as_numpy(array):
    if hasattr(array, "asnumpy"):  # MXNet
        array = array.asnumpy()
    elif hasattr(array, "detach"):  # PyTorch
        array = array.detach().cpu()
        array = array.double() if array.is_floating_point() else array
        array = array.numpy()
    return np.asarray(array).astype("float64", casting="same_kind")  # refuses complex numbers


def _share(found, expected, where):
    if found.shape != expected.shape:
        raise ValueError(f"largest_difference: {where} has the shape {found.shape}, expected "
                         f"{expected.shape}")
    if not np.isfinite(found).all() or not np.isfinite(expected).all():
        return float("inf")
    distance = np.abs(found - expected).max(initial=0.0)
    largest = np.abs(expected).max(initial=0.0)
    return float(distance / largest if largest > 0 else distance)
