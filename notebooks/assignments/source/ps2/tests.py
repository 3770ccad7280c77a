"""What solutions of assignment 2 are judged by. See `marking.cases`."""

import numpy as np
from marking.cases import Case, Whole, Wrong, compare, cpu, describe, mx, near
from marking.channel import Array, Device


def place(k):
    """k devices in no order, with gaps, and for most k without number 0."""
    return [cpu((7 * r + 5) % (19 if k < 20 else 61)) for r in range(k)]


def name(arrays):
    k = len(arrays)
    return f"{k} device{'s' * (k > 1)}, arrays of shape {arrays[0].shape}, {arrays[0].dtype}"


class Post:
    """The judge's end of `send`: looks at each message and says what arrives.

    arrays: what the devices have at first, in the order of their ranks.
    """

    def __init__(self, arrays, there):
        self.arrays, self.there, self.silent = arrays, there, set(there)

    def note(self, array, end):
        self.read(array, end)
        self.silent.discard(end)
        return Array(array.values, end)

    def read(self, array, end):
        """(rank from, rank to, entries) of a message."""
        if not isinstance(array, Array) or array.device is None:
            raise Wrong(f"send: {describe(array)} is not an mx.nd array")
        for one in (array.device, end):
            if type(one) is not Device or one not in self.there:
                raise Wrong(f"send: from {array.device} to {describe(end)}, but {describe(one)} is "
                            f"not one of {', '.join(map(str, self.there))}")
        if not array.values.size:
            raise Wrong(f"send: an array without entries, from {array.device} to {end}")
        return self.there.index(array.device), self.there.index(end), array.values.ravel()


class Watch(Post):
    """Follows the sums from message to message, and checks that each is due.

    most: how large marks may be, which are added to what is on its way; 0: there are none. holds:
    what each device should have, by what has arrived there.
    """

    def __init__(self, arrays, there, most=0):
        super().__init__(arrays, there)
        self.most, self.rng = most, np.random.default_rng(4)
        self.k, self.n, self.kind = len(arrays), arrays[0].size, arrays[0].dtype
        self.holds = [a.ravel().copy() for a in arrays]
        self.messages = []   # (rank from, rank to, places of the entries, entries, if added)

    def note(self, array, end):
        a, b, values = self.read(array, end)
        if values.dtype != self.kind:
            raise Wrong(f"a message in {values.dtype}, where arrays are in {self.kind}")
        if len(self.messages) == self.due:
            raise Wrong(f"more than {self.due} messages")
        marked = values
        if self.most:
            marked = values + self.rng.integers(1, self.most, values.size).astype(self.kind)
        where, adds = self.follow(a, b, values)
        self.holds[b][where] = marked + (self.holds[b][where] if adds else 0)
        self.messages.append((a, b, where, values, adds))
        return Array(marked.reshape(array.values.shape), end)

    def finish(self, after):
        if len(self.messages) != self.due:
            raise Wrong(f"{len(self.messages)} messages, not {self.due}")
        self.count()
        if not self.most:
            return
        for r, due in enumerate(self.holds):   # whole numbers: nothing is rounded
            if not np.array_equal(after[r].values.ravel(), due):
                raise Wrong(f"device {r} has something else than what has arrived there: it was "
                            "not sent")


class Tree(Watch):
    def __init__(self, *args):
        super().__init__(*args)
        self.due = 2 * (self.k - 1)
        self.has = [{r} for r in range(self.k)]   # whose arrays are in it
        self.busy = [0] * self.k                  # the round of its last message

    def follow(self, a, b, values):
        """(places of the entries, whether they are to be added) of a message that is due."""
        if values.size != self.n:
            raise Wrong(f"a message of {values.size} entries, where arrays have {self.n}")
        if not np.array_equal(values, self.holds[a]):
            raise Wrong(f"device {a} sends to {b} what isn't the sum of its own and all that has "
                        "come to it")
        up = len(self.has[a]) < self.k
        if up and self.has[a] & self.has[b]:
            raise Wrong(f"device {a} sends to {b} a sum with arrays that {b} has added already")
        self.has[b] |= self.has[a]
        self.busy[a] = self.busy[b] = 1 + max(self.busy[a], self.busy[b])
        return slice(None), up

    def count(self):
        if not all(len(has) == self.k for has in self.has):
            raise Wrong("the messages don't bring the sum to every device")
        most = 2 * (self.k - 1).bit_length()
        if max(self.busy) > most:
            raise Wrong(f"{max(self.busy)} rounds, where a tree takes {most}")


class Ring(Watch):
    """No device may ever hold two equal entries: it is by their values that they are found."""

    def __init__(self, *args):
        super().__init__(*args)
        self.due = 2 * (self.k - 1) * min(self.k, self.n)
        self.trails = {}   # chunk, as the places of its entries: the ranks that have sent it

    def follow(self, a, b, values):
        """(places of the entries, whether they are to be added) of a message that is due."""
        if b != (a + 1) % self.k:
            raise Wrong(f"device {a} sends to {b}, which isn't the next")
        short, long = self.n // self.k, -(-self.n // self.k)
        if not short <= values.size <= long:
            raise Wrong(f"a chunk of {values.size} entries is too "
                        f"{'short' if values.size < short else 'long'}")
        places = {value: i for i, value in enumerate(self.holds[a].tolist())}
        where = [places.get(value) for value in values.tolist()]
        if None in where or len(set(where)) < len(where):
            raise Wrong(f"device {a} sends to {b} what isn't the sum of its own and what has come "
                        "to it")
        chunk = frozenset(where)
        if any(chunk & other and chunk != other for other in self.trails):
            raise Wrong(f"device {a} sends to {b} a part of one chunk with a part of another")
        trail = self.trails.setdefault(chunk, [])
        if trail and a != (trail[-1] + 1) % self.k:
            raise Wrong(f"device {a} sends a chunk that has gone to {(trail[-1] + 1) % self.k} last")
        if len(trail) == 2 * (self.k - 1):
            raise Wrong(f"device {a} sends a sum to {b} that every device has")
        trail.append(a)
        return where, len(trail) < self.k

    def count(self):
        if len({trail[0] for trail in self.trails.values()}) < len(self.trails):
            raise Wrong("a device sends two chunks in one step, and another none")


def see_sums(arrays, there):
    """A function that raises Wrong unless every array has become the sum."""
    k, kind = len(arrays), arrays[0].dtype
    total, mean = np.sum(arrays, axis=0), np.mean(arrays, axis=0, dtype=kind)
    exact = 1e-12 if kind == "float64" else 1e-5
    scale = float(np.abs(arrays).sum(axis=0).max(where=np.isfinite(total), initial=0))

    def is_near(one, values, within):
        try:
            compare(one, near(values, within, one.device, scale))
        except Wrong:
            return False
        return True

    def look(after):
        for r, one in enumerate(after):
            try:
                compare(one, near(total, exact, there[r], scale), "its array")
            except Wrong as error:
                for values, within, words in (
                        (arrays[r], exact, "still has what it had"),
                        (mean, exact, "has the mean, not the sum"),
                        (total, 1e-5, "has lost digits on the way")):
                    if is_near(one, values, within):
                        raise Wrong(f"device {r} of {k} {words}") from None
                raise Wrong(f"device {r} of {k} does not have the sum: {error}") from None
            if one.gradient:
                raise Wrong(f"a gradient was attached to the array of device {r}")
    return look


def sums(run, arrays, there=None, what=""):
    """A case whose arrays must become the sum."""
    there = there or place(len(arrays))
    post, see = Post(arrays, there), see_sums(arrays, there)

    def check(after):
        see(after)
        if post.silent and len(arrays) > 1:
            raise Wrong(f"the sum is there, but nothing was sent to {min(post.silent)}")
    return Case(name(arrays) + what, run,
                [[mx(a, on=d) for a, d in zip(arrays, there)], post.note],
                returns=[], changes={"arrays": check})


def messages(run, watch, what):
    """A case that looks at what is sent."""
    return Case(name(watch.arrays) + what, run,
                [[mx(a, on=d) for a, d in zip(watch.arrays, watch.there)], watch.note],
                returns=[], changes={"arrays": watch.finish})


def make_replicas(k, n=12):
    """As in the notebook."""
    return [(r + 1) * np.arange(1, n + 1, dtype="float32") for r in range(k)]


def all_sums(run, shapes):
    """Cases for all sorts of arrays; shapes: of the arrays and how many there are."""
    rng = np.random.default_rng(1)
    for k in (1, 2, 3, 4):
        yield sums(run, make_replicas(k), [cpu(r) for r in range(k)])
    for k, shape in shapes:
        for kind in ("float32", "float64"):
            yield sums(run, list(rng.normal(size=(k, *shape)).astype(kind)))
    for k in (2, 3, 5):
        # Whole numbers that float32 can't hold, and entries of very different sizes.
        yield sums(run, list(rng.integers(2**24, 2**40, (k, 2 * k + 1)) * 2.0 + 1))
        yield sums(run, list(rng.normal(size=(k, 7)) * 10.0 ** np.arange(-9, 5, 2)))
        yield sums(run, [np.full((2, k), 0.5)] * k)
        far = rng.normal(size=(k, 3))
        far[0, 1] = far[-1, 2] = np.inf   # once there, nothing makes it finite
        yield sums(run, list(far), what=", with infinite entries")


def tree_values():
    """A tree: sums, in place, on every device"""
    yield sums("run_tree", [np.full(3, 10.0**r, "float32") for r in range(2)], [cpu(0), cpu(1)])
    yield from all_sums("run_tree", [
        (1, (3,)), (2, (2, 2)), (3, (5,)), (4, (1,)), (5, (2, 3)), (6, (4, 1, 2)), (7, (2,)),
        (8, (3,)), (9, (2, 2)), (10, (1,)), (12, (3,)), (16, (2,)), (17, (1, 3)), (5, (4,))])
    yield sums("run_tree", list(np.random.default_rng(5).normal(size=(33, 2))))


def tree_rounds():
    """A tree: messages and rounds"""
    rng = np.random.default_rng(2)
    yield messages("log_tree", Tree(make_replicas(4), [cpu(r) for r in range(4)]), "")
    for k in (*range(1, 10), 12, 16, 17):
        for kind, shape in (("float64", (2, 3)), ("float32", (5,))):
            arrays = list(rng.integers(1, 2**18, (k, *shape)).astype(kind))
            yield messages("log_tree", Tree(arrays, place(k)), "")
            yield messages("log_tree", Tree(arrays, place(k), 2**16),
                           ", messages changed on their way")
    for k in (2, 3, 8):
        yield messages("log_tree", Tree([np.zeros(3)] * k, place(k)), ", zeros")
    yield messages("log_tree", Tree([np.full(3, float(r)) for r in range(33)], place(33)), "")


def ring_values():
    """A ring: sums, in place, on every device"""
    yield sums("run_ring", make_replicas(3, 10), [cpu(0), cpu(1), cpu(2)])
    yield from all_sums("run_ring", [
        (1, (3,)), (2, (4,)), (2, (3, 3)), (2, (1,)), (3, (2, 3)), (3, (1,)), (4, (2, 1, 5)),
        (4, (3,)), (5, (3, 4)), (5, (2,)), (6, (6, 2)), (6, (4, 4)), (7, (3, 5)), (8, (19,)),
        (9, (2, 10)), (9, (4,)), (12, (5, 5)), (3, (7,))])
    for k, n in ((17, 3), (11, 15)):   # 11 * (15 / 11) is below 15
        yield sums("run_ring", list(np.random.default_rng(5).normal(size=(k, n))))


def make_distinct(rng, k, shape, kind):
    """(arrays, most): k arrays of integers that float32 can hold, and how large marks may be.

    Whichever of the arrays are added up, entries at different places have different sums.
    """
    n = int(np.prod(shape))
    step = 2**24 // (k * n * (k + 1))   # what is added to steps stays below one
    most = step // (4 * k)
    steps = np.broadcast_to(k * n + np.arange(n), (k, n))
    values = step * steps + rng.integers(0, most, (k, n))
    return list(values.reshape(k, *shape).astype(kind)), most


def ring_bytes():
    """A ring: chunks, and who sends which, to whom, in which step"""
    rng = np.random.default_rng(3)
    for k, shape in ((4, (12,)), (1, (4,)), (2, (6,)), (2, (5,)), (2, (1,)), (3, (2, 6)), (3, (7,)),
                     (4, (10,)), (5, (3,)), (5, (2, 7)), (4, (1, 8)), (6, (9,)), (7, (3, 2, 4)),
                     (8, (8,)), (9, (2, 10)), (9, (5,)), (12, (5, 5))):
        arrays, most = make_distinct(rng, k, shape, "float32")
        yield messages("log_ring", Ring(arrays, place(k)), "")
        arrays, most = make_distinct(rng, k, shape, "float64")
        yield messages("log_ring", Ring(arrays, place(k), most),
                       ", messages changed on their way")
    for k, n in ((17, 3), (7, 7)):   # 7 * (5 * (1 / 7)) is below 5
        arrays, most = make_distinct(rng, k, (n,), "float64")
        yield messages("log_ring", Ring(arrays, place(k), most),
                       ", messages changed on their way")
    for far in range(4):
        arrays, _ = make_distinct(rng, 4, (4,), "float64")
        for r, one in enumerate(arrays):
            one[(r + far) % 4] = 0
        yield messages("log_ring", Ring(arrays, place(4)), f", device r has 0 at place r + {far}")


def count_arrays(k):
    """How many arrays the busiest of k devices sends, times k so that it is whole."""
    rounds = next(n for n in range(k + 1) if 2**n >= k)
    return {"first": (k - 1) * k, "tree": rounds * k, "ring": 2 * (k - 1)}


def busiest_values():
    """The busiest device: powers of two"""
    for scheme, k, count in (("first", 2, 80), ("tree", 2, 80), ("tree", 4, 160), ("ring", 2, 80)):
        yield Case(f"{scheme}, k={k}, 80 bytes", "busiest", [scheme, k, 80], returns=count)
    for k in (2, 4, 8, 16, 64, 1024):
        for size in (1024 * k, 3 * 2**20):
            for scheme, count in count_arrays(k).items():
                yield Case(f"{scheme}, k={k}, {size} bytes", "busiest", [scheme, k, size],
                           returns=count * size // k)


def busiest_care():
    """The busiest device: any number of devices, an int, errors"""
    for k in (3, *range(1, 34), 49, 63, 65, 98, 100, 103, 1000, 1025):
        for size in (k, 12 * k, (2**24 + 1) * k, 10**7 * k):
            for scheme, count in count_arrays(k).items():
                yield Case(f"{scheme}, k={k}, {size} bytes", "busiest", [scheme, k, size],
                           returns=Whole(count * size // k))
    for scheme in ("star", "Ring", "", "treering", "firs", "f", "tree ", "TREE"):
        for k in (2, 1, 4):
            yield Case(f"scheme {scheme!r}, k={k}", "busiest", [scheme, k, 840],
                       raises=ValueError)
