"""The map's tables have the numbers that `notebooks/src/map_numbers.py` computes."""

import numpy as np
import pytest
from map_numbers import (
    CARD,
    NVLINK,
    bubble,
    bytes_held,
    bytes_of_two_matrices,
    bytes_sent,
    idle,
    kept,
    simulate,
)
from map_page import bullets, evaluate, rows, shown

EXAMPLE = {"k": 8, "m": 8, "b": 1, "s": 4096, "h": 4096, "L": 32, "e": 2}


# --- pipelines ---------------------------------------------------------------------------------

@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_idle_time_and_what_is_kept_are_the_formulas(schedule):
    for p, m in [(1, 4), (2, 1), (3, 7), (4, 8), (8, 16)]:
        for backward in (1, 2, 3):
            events = simulate(schedule, p, m, backward)
            assert len(events) == 2 * p * m
            assert idle(events) == pytest.approx(bubble(p, m))
            assert max(end for *_, end in events) == (m + p - 1) * (1 + backward)
        most = [min(p - stage, m) for stage in range(p)] if schedule == "1F1B" else [m] * p
        assert kept(simulate(schedule, p, m)) == most


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_no_stage_starts_before_what_it_needs_or_does_two_things_at_once(schedule):
    p, m = 4, 8
    events = simulate(schedule, p, m)
    when = {(stage, kind, i): (start, end) for stage, kind, i, start, end in events}
    for (stage, kind, i), (start, end) in when.items():
        neighbour = stage - 1 if kind == "F" else stage + 1
        if 0 <= neighbour < p:
            assert start >= when[neighbour, kind, i][1]
        if kind == "B":
            assert start >= when[stage, "F", i][1] and end - start == 2
        others = [when[key] for key in when if key[0] == stage and key != (stage, kind, i)]
        assert all(start >= there[1] or end <= there[0] for there in others)


# --- two matrices, two devices ------------------------------------------------------------------


def test_two_matrices_cut_by_the_batch_or_by_their_width_give_the_same():
    """One sum of what belongs to the matrices, or two of what belongs to each sequence."""
    rng = np.random.default_rng(0)
    x, first, second = rng.normal(size=(8, 6)), rng.normal(size=(6, 4)), rng.normal(size=(4, 6))
    upward = rng.normal(size=(8, 6))  # the gradient of the result
    middle = np.tanh(x @ first)
    result = middle @ second
    inner = (upward @ second.T) * (1 - middle**2)
    truth = {"result": result, "x": inner @ first.T, "first": x.T @ inner,
             "second": middle.T @ upward}

    summed = {"data": {}, "tensor": {}}
    for device in range(2):
        mine = slice(4 * device, 4 * device + 4)
        of_mine = np.tanh(x[mine] @ first)
        backward = (upward[mine] @ second.T) * (1 - of_mine**2)
        assert of_mine @ second == pytest.approx(result[mine])  # no sequence needs another
        for name, part in (("first", x[mine].T @ backward), ("second", of_mine.T @ upward[mine])):
            summed["data"][name] = summed["data"].get(name, 0) + part

        half = slice(2 * device, 2 * device + 2)
        of_half = np.tanh(x @ first[:, half])
        backward = (upward @ second[half].T) * (1 - of_half**2)
        assert of_half == pytest.approx(middle[:, half])  # each number alone
        assert x.T @ backward == pytest.approx(truth["first"][:, half])
        assert of_half.T @ upward == pytest.approx(truth["second"][half])
        for name, part in (("result", of_half @ second[half]), ("x", backward @ first[:, half].T)):
            summed["tensor"][name] = summed["tensor"].get(name, 0) + part
    for sums in summed.values():
        for name, value in sums.items():
            assert value == pytest.approx(truth[name]), name

    sequences, width, e = 8, 4096, 2
    size = {"first": width**2 * e, "second": width**2 * e}
    size["result"] = size["x"] = sequences * 4096 * width * e
    for way, sums in summed.items():
        sent, held = bytes_of_two_matrices()[way]
        assert sent == sum(2 * (2 - 1) / 2 * size[name] for name in sums), "by a ring, k = 2"
        assert held == 2 * width**2 * e / (2 if way == "tensor" else 1)


# --- the page ----------------------------------------------------------------------------------

def test_the_tables_numbers_are_the_codes():
    table = {row[0]: row[1:] for row in rows("on NVLink")}
    table = {way.split(" (")[0]: row for way, row in table.items()}
    assert list(table) == list(bytes_sent()) == list(bytes_held())
    assert list(bullets()) == list(table)
    for other in ("forward", "weights held"):
        assert [row[0].split(" (")[0] for row in rows(other)] == list(table)
    memory = bytes_held(**{name: EXAMPLE[name] for name in "kbshL"})
    for way, sent in bytes_sent(**EXAMPLE).items():
        example, inside, between, holds = table[way]
        assert shown(example, sent / 1e9) and example.endswith(" GB"), (way, sent)
        assert shown(inside, sent / NVLINK) and inside.endswith(" s"), (way, sent)
        assert shown(between, sent / CARD) and between.endswith(" s"), (way, sent)
        weights = bytes_held(**{name: EXAMPLE[name] for name in "kshL"}, b=0)[way]
        assert holds == (f"{weights / 1e9:.0f} + {(memory[way] - weights) / 1e9:.0f} = "
                         f"{memory[way] / 1e9:.0f} GB"), way


def test_the_tables_formulas_are_the_codes():
    others = {}, {"k": 3}, {"m": 24}, {"m": 3}, {"b": 5, "s": 17}, {"h": 64, "L": 3}, {"e": 4}
    for other in others:
        values = EXAMPLE | other
        N = 12 * values["L"] * values["h"] ** 2
        for way, _, _, formula in rows("weights held"):
            found = evaluate(formula, **values, N=N, N_0=N / 3)
            assert found == pytest.approx(bytes_sent(**values)[way]), way
