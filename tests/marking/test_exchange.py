"""The judge carries messages between ranks, and finds those that can't be."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from marking.cases import Wrong
from marking.exchange import Exchange, Sent


def run(world, work):
    """(what `work(rank, say)` returned or raised on each rank, the exchange); `say` sends."""
    exchange = Exchange(world)

    def one(rank):
        def say(kind, *arrays, detail=""):
            return exchange.finish(rank, exchange.start(rank, kind, list(arrays), detail))
        try:
            return work(rank, say)
        except Wrong as error:
            return error
        finally:
            exchange.leave(rank)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world))), exchange


def values(rank):
    return np.arange(6.0) * (rank - 1) ** 3 + rank


@pytest.mark.parametrize("name, function", [
    ("SUM", np.sum), ("AVG", np.mean), ("PRODUCT", np.prod), ("MIN", np.min), ("MAX", np.max)])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_reductions_are_numpys(world, name, function):
    due = function([values(rank) for rank in range(world)], axis=0)
    found, exchange = run(world, lambda rank, say: say("all_reduce", values(rank), detail=name))
    assert all(np.array_equal(array, due) for (array,) in found)
    assert exchange.count() == [Sent("all_reduce", 6, 48)]
    found, _ = run(world, lambda rank, say: say(
        "reduce_scatter", *np.split(values(rank), world), detail=name))
    assert all(np.array_equal(array, part)
               for (array,), part in zip(found, np.split(due, world)))


def test_broadcast_and_gather():
    found, _ = run(3, lambda rank, say: say("broadcast", values(rank), detail="2"))
    assert all(np.array_equal(array, values(2)) for (array,) in found)
    found, _ = run(3, lambda rank, say: say("all_gather", values(rank)))
    assert all(np.array_equal(arrays, [values(0), values(1), values(2)]) for arrays in found)


def test_what_is_started_may_be_waited_for_in_another_order():
    def work(rank):
        numbers = [exchange.start(rank, "all_reduce", [np.array([n * 1.0])], "SUM")
                   for n in range(3)]
        return [exchange.finish(rank, n)[0].item() for n in reversed(numbers)]
    exchange = Exchange(2)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, range(2)))
    assert found == [[4, 2, 0]] * 2


@pytest.mark.parametrize("sends, why", [
    ({0: [("barrier", [])], 1: []}, "message 1, barrier, never comes from rank 1, which has ended"),
    ({0: [("all_reduce", [np.ones(2)], "SUM")], 1: [("all_reduce", [np.ones(3)], "SUM")]},
     r"message 1 is all_reduce of float64 \[2\] on rank 0 and all_reduce of float64 \[3\] on rank"),
    ({0: [("broadcast", [np.ones(2)], "0")], 1: [("broadcast", [np.ones(2)], "1")]},
     "from rank 0 on rank 0 and .* from rank 1 on rank 1"),
    ({0: [("broadcast", [np.ones(2)], "2")], 1: []}, "a broadcast from rank 2: there are ranks 0"),
    ({0: [("all_reduce", [np.ones(2)], "XOR")], 1: []}, "what it gave to all_reduce makes no"),
])
def test_what_never_comes_is_found_without_a_clock(sends, why):
    def work(rank, say):
        for kind, arrays, *detail in sends[rank]:
            say(kind, *arrays, detail=detail[0] if detail else "")
    found, exchange = run(2, work)
    assert isinstance(found[0], Wrong)
    with pytest.raises(Wrong, match=why):
        raise found[0]
    assert exchange.fault


def test_ranks_that_sent_different_numbers_of_messages():
    exchange = Exchange(2)
    exchange.start(0, "barrier", [], "")
    with pytest.raises(Wrong, match="1, 0"):
        exchange.count()
