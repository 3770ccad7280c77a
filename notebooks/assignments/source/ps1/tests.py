"""What solutions of assignment 1 are judged by. See `marking.cases`."""

import numpy as np
from marking.cases import Case, cpu, mx, numpy

CUT = ("shard",)
BIG = 2**24 + 1   # float32 can't hold it


def name(there):
    """Devices, in words. More than nine of them are in order."""
    words = ", ".join(map(str, there)) if len(there) < 10 else f"{there[0]} to {there[-1]}"
    return f"devices {words}"


def in_turn(*ones):
    """A case of several, called one after the other."""
    return Case("one after the other: " + "; ".join(one.what for one in ones), "in_turn",
                [ones[0].function, [one.args for one in ones]], [one.returns for one in ones],
                names=("call", *ones[0].names))


def even(values, there, what="", home=0):
    """A case of split_even on a batch with these values, which is on cpu(home)."""
    parts = np.split(values, len(there))
    return Case(f"{len(values)} examples, {name(there)}{what}",
                "split_even", [mx(values, cpu(home)), list(there)],
                [mx(part, on=d) for part, d in zip(parts, there)], names=CUT)


def even_values():
    """Even shards: values, order and devices"""
    rng = np.random.default_rng(1)
    yield even(np.arange(12, dtype="float32").reshape(6, 2), [cpu(0), cpu(1)])
    for k in (1, 2, 3, 4, 9):
        yield even(rng.normal(size=(2 * k, 3, 2)).astype("float32"), [cpu(i + 1) for i in range(k)])
    for numbers in ([5], [3, 0], [7, 2, 4], [2, 9, 0, 5]):
        k = len(numbers)
        yield even(rng.normal(size=(3 * k, 2)).astype("float32"), [cpu(i) for i in numbers])
        yield even(rng.normal(size=k).astype("float32"), [cpu(i) for i in numbers],
                   ", batch of numbers")
    yield even(rng.normal(size=(4, 2, 3, 2)).astype("float32"), [cpu(1), cpu(0)])
    # 49 * (1 / 49) is below 1.
    yield even(np.arange(49, dtype="float32"), [cpu(i) for i in range(49)])


def even_care():
    """Even shards: memory of their own, types of numbers, errors"""
    for k, n in ((1, 3), (2, 4), (3, 6)):
        yield even(np.random.default_rng(n).normal(size=(n, 2)), [cpu(i) for i in range(k)],
                   ", float64")
    for kind in ("float64", "int32", "uint8", "int64"):
        yield even(np.array([[1], [2]], kind), [cpu(0), cpu(1)], f", {kind}")
    yield even(np.array([BIG, BIG + 2, 5, 6], "int32"), [cpu(0), cpu(1)], ", large int32")
    yield even(np.array([2**53 + 1, -(2**53) - 1], "int64"), [cpu(1), cpu(0)], ", large int64")
    yield even(np.array([[1.5], [2]], "float16"), [cpu(1), cpu(0)], ", float16")
    for home, numbers in ((1, [0, 1]), (1, [1]), (3, [2, 3, 0])):
        yield even(np.random.default_rng(home).normal(size=(6, 2)), [cpu(i) for i in numbers],
                   f", batch on {cpu(home)}", home)
    for n, k in ((7, 2), (2, 3), (10, 4), (1, 2)):
        yield Case(f"{n} examples, {k} devices", "split_even",
                   [mx(np.ones((n, 2))), [cpu(i) for i in range(k)]], raises=ValueError)
    batches = np.random.default_rng(5).normal(size=(3, 4, 2))
    yield in_turn(*(even(batch, [cpu(0), cpu(1)]) for batch in batches))


def uneven(values, there, what="", home=0):
    parts = np.array_split(values, len(there))
    return Case(f"{len(values)} examples, {name(there)}{what}", "split_uneven",
                [mx(values, cpu(home)), list(there)],
                [mx(part, on=d) for part, d in zip(parts, there)], names=CUT)


def uneven_values():
    """Uneven shards: values, lengths and devices"""
    rng = np.random.default_rng(2)
    yield uneven(np.arange(10, dtype="float32"), [cpu(0), cpu(1), cpu(2)])
    for n, k in ((1, 1), (5, 2), (8, 3), (11, 4), (7, 5), (6, 6), (23, 6), (19, 9)):
        there = [cpu(i) for i in range(k)][::-1]
        yield uneven(rng.normal(size=(n, 2)).astype("float32"), there)
    for n, numbers in ((5, [4, 1]), (7, [2, 8, 5]), (3, [6])):
        there = [cpu(i) for i in numbers]
        yield uneven(rng.normal(size=(n, 2, 3)).astype("float32"), there)
        yield uneven(rng.normal(size=n).astype("float32"), there, ", batch of numbers")


def uneven_care():
    """Uneven shards: memory of their own, types of numbers, errors"""
    for n, k in ((2, 3), (1, 2), (3, 4), (5, 9)):
        yield Case(f"{n} examples, {k} devices", "split_uneven",
                   [mx(np.ones((n, 2))), [cpu(i) for i in range(k)]], raises=ValueError)
    for k in (1, 2, 3):
        yield uneven(np.random.default_rng(k).normal(size=(5, 2)), [cpu(i) for i in range(k)],
                     ", float64")
    yield uneven(np.array([BIG, 2, BIG + 2], "int32"), [cpu(1), cpu(0)], ", large int32")
    yield uneven(np.array([250, 2, 3], "uint8"), [cpu(1), cpu(0)], ", uint8")
    yield uneven(np.array([1.5, 2, 3], "float16"), [cpu(1), cpu(0)], ", float16")
    yield uneven(np.array([2**53 + 1, 2**31, -(2**40)], "int64"), [cpu(1), cpu(0)], ", large int64")
    for home, numbers in ((1, [0, 1]), (1, [1]), (3, [2, 3, 0])):
        yield uneven(np.random.default_rng(home).normal(size=(5, 2)), [cpu(i) for i in numbers],
                     f", batch on {cpu(home)}", home)
    yield uneven(np.arange(98.0), [cpu(i) for i in range(49)])   # 98 * (1 / 49) is below 2
    batches = np.random.default_rng(5).normal(size=(3, 5, 2))
    yield in_turn(*(uneven(batch, [cpu(0), cpu(1)]) for batch in batches))


def pairs(x, y, order, there, what="", home=0):
    parts = np.array_split(order, len(there))
    return Case(f"{len(order)} of {len(x)} examples, {name(there)}{what}",
                "split_pairs", [mx(x, cpu(home)), mx(y, cpu(home)), numpy(order), list(there)],
                [(mx(x[p], on=d), mx(y[p], on=d)) for p, d in zip(parts, there)],
                names=("pair", "array"))


def pairs_values():
    """Labels beside their images: values, order and devices"""
    labels = np.arange(10, dtype="float32")
    yield pairs(np.stack([10 * labels, 10 * labels + 1], axis=1), labels,
                np.array([3, 1, 4, 0, 5, 9, 2]), [cpu(0), cpu(1)])
    rng = np.random.default_rng(3)
    for n, m, k in ((9, 9, 2), (9, 7, 3), (6, 11, 4), (5, 3, 1), (12, 10, 8)):
        x, y = rng.normal(size=(n, 2, 2)).astype("float32"), rng.permutation(n).astype("float32")
        order = rng.permutation(n)[:m] if m <= n else rng.integers(0, n, m)
        yield pairs(x, y, order, [cpu(k - i) for i in range(k)])
    for numbers in ([4, 0], [1, 7, 3]):
        x, y = rng.normal(size=(8, 3)).astype("float32"), rng.normal(size=8).astype("float32")
        yield pairs(x, y, rng.permutation(8)[:7], [cpu(i) for i in numbers])


def pairs_care():
    """Labels beside their images: memory of their own, types of numbers"""
    x, y = np.arange(12, dtype="uint8").reshape(6, 2), np.arange(6, dtype="int32")
    for there in ([cpu(0), cpu(1)], [cpu(0)], [cpu(1)], [cpu(2), cpu(0)]):
        yield pairs(x, y, np.array([5, 0, 2, 1, 4]), there, ", uint8 and int32")
        yield pairs(x, y, np.arange(6), there, ", in order")
    rng = np.random.default_rng(4)
    yield pairs(rng.normal(size=(7, 2)), rng.normal(size=7), np.array([6, 1, 4, 1]), [cpu(0), cpu(1)], ", float64")
    yield pairs(np.array([[BIG], [BIG + 2], [7]], "int32"), np.array([2**53 + 1, 1, 2**31], "int64"),
                np.array([2, 0, 1]), [cpu(0), cpu(1)], ", large numbers")
    for there in ([cpu(2)], [cpu(0), cpu(2)]):
        yield pairs(x, y, np.arange(6), there, f", all on {cpu(2)}", 2)
    yield pairs(x, y, np.array([5, 1, 3]), [cpu(1), cpu(0), cpu(2)], ", one for each")
    yield pairs(x, y, np.array([4, 4, 1, 0, 1, 1, 4, 4, 4, 4, 4, 4, 2]), [cpu(0), cpu(1)],
                ", order 4 4 1 0 1 1 4 4 4 4 4 4 2")
    same = np.array([[1, 2], [1, 2], [3, 4], [1, 2]], "uint8")
    yield pairs(same, np.array([0, 1, 1, 2]), np.array([3, 1, 0, 2, 1]), [cpu(0), cpu(1)],
                ", equal images with other labels")
    for n, kind in ((300, "uint8"), (2100, "float16")):   # it doesn't hold all of their numbers
        x, y = rng.integers(0, 256, (n, 2)).astype(kind), rng.integers(0, 10, n).astype(kind)
        yield pairs(x, y, np.array([n - 1, 3, n - 49, n - 45, 0]), [cpu(0), cpu(1)], f", {kind}")
    x, y = rng.normal(size=(49, 1)), rng.normal(size=49)
    yield pairs(x, y, rng.permutation(49), [cpu(i) for i in range(49)])
    yield in_turn(*(pairs(x, y, rng.permutation(49)[:5], [cpu(0), cpu(1)]) for _ in range(3)))
