"""The map: its numbers are what `notebooks/src/map_numbers.py` computes, and what is counted.

Its drawings are in tests/test_drawings_map.py.
"""

import re
from importlib import import_module
from inspect import getsource, signature
from pathlib import Path

import numpy as np
import pytest
from map_numbers import (
    CARD,
    NVLINK,
    PEAK,
    activations,
    bubble,
    bytes_held,
    bytes_of_experts,
    bytes_of_two_matrices,
    bytes_sent,
    idle,
    kept,
    seconds_computing,
    simulate,
)
from map_page import COUNTS, PAGE, PROSE, assert_says, bullets, evaluate, rows, shown, stated

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
PIPELINES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 7, 8, 16)]
EXAMPLE = {"k": 8, "m": 8, "b": 1, "s": 4096, "h": 4096, "L": 32, "e": 2}


# --- pipelines ---------------------------------------------------------------------------------

@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("p, m", PIPELINES)
def test_idle_time_is_the_formulas(schedule, p, m):
    for backward in (1, 2, 3):
        events = simulate(schedule, p, m, backward)
        assert len(events) == 2 * p * m
        assert idle(events) == pytest.approx(bubble(p, m))
        assert max(end for *_, end in events) == (m + p - 1) * (1 + backward)


@pytest.mark.parametrize("p, m", PIPELINES)
def test_gpipe_keeps_all_micro_batches_and_1f1b_at_most_as_many_as_stages(p, m):
    assert kept(simulate("GPipe", p, m)) == [m] * p
    assert kept(simulate("1F1B", p, m)) == [min(p - stage, m) for stage in range(p)]


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


def interleave(p, m, v):
    """When 1F1B ends with `v` stages on each of `p` devices, device d's being d, d + p, ...

    The unit is a forward pass of one stage.
    """
    turns = [(i, turn) for group in range(0, m, p) for turn in range(v)
             for i in range(group, group + p)]
    todo = []
    for d in range(p):
        forward = [("F", i, d + p * turn) for i, turn in turns]
        backward = [("B", i, d + p * (v - 1 - turn)) for i, turn in turns]
        ahead = min(2 * (p - 1 - d) + (v - 1) * p, m * v)
        steady = [each for pair in zip(forward[ahead:], backward) for each in pair]
        todo.append(forward[:ahead] + steady + backward[m * v - ahead :])
    free, ended = [0] * p, {}
    while any(todo):
        before = len(ended)
        for d in range(p):
            if todo[d]:
                kind, i, stage = todo[d][0]
                needs = [("F", i, stage - 1)] * (stage > 0)
                if kind == "B":
                    needs = [("F", i, stage)] + [("B", i, stage + 1)] * (stage < p * v - 1)
                if set(needs) <= set(ended):
                    start = max([free[d], *(ended[need] for need in needs)])
                    free[d] = ended[todo[d].pop(0)] = start + (2 if kind == "B" else 1)
        assert len(ended) > before, "no stage can go on"
    return max(ended.values())


@pytest.mark.parametrize("p, m, v", [(2, 4, 2), (4, 8, 2), (4, 16, 3), (8, 16, 2)])
def test_interleaving_shrinks_the_bubble(p, m, v):
    shorter = evaluate(stated(r"the quotient \$\(k-1\)/m\$ shrinks to (\S+)\."), k=p, m=m, v=v)
    assert interleave(p, m, v) / (3 * m * v) - 1 == pytest.approx(shorter)


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
        assert sent == sum(all_reduce(2, size[name]) for name in sums)
        assert held == 2 * width**2 * e / (2 if way == "tensor" else 1)


def test_the_examples_numbers_are_the_codes():
    (data, all_weights), (tensor, half) = bytes_of_two_matrices().values()
    more = bytes_of_two_matrices(sequences=80)
    assert (more["data"][0], more["tensor"][0]) == (data, 10 * tensor)
    assert data == all_weights == tensor / 8 and data / 2 == 4096 * 4096 * 2
    sizes = signature(bytes_of_two_matrices).parameters
    sizes = {name: size.default for name, size in sizes.items()}
    assert sizes == {"k": 2, "sequences": 8, "tokens": 4096, "width": 4096, "e": 2}
    all_reduces = re.findall(r"all-reduce of ([\d.]+) MB", PROSE)
    assert all_reduces == [f"{data / 2e6:.1f}"] * 2
    assert_says(
        "4,096 × 4,096 weights", "eight sequences of 4,096 *tokens*",
        "a row of 4,096 numbers: 4,096 is the *width*", "A number takes 2 bytes",
        f"a matrix takes {data / 2e6:.1f} MB, and so does a sequence",
        f"both matrices are summed, {data / 1e6:.1f} MB", f"each sends {data / 1e6:.1f} MB a step",
        "Two devices, eight sequences, two matrices", "has four sequences and both matrices",
        "all eight sequences, half of the first", "half of the second", "a sum of two",
        "takes four sequences", "a ring of two",
        "All eight sequences go through half of the columns", "half of the numbers in the middle",
        "halves of the middle $X_1$, $X_2$", "$B_1$, $B_2$", "= X_1B_1 + X_2B_2$$",
        "one of these two", f"sends {tensor / 8e6:.1f} MB for each sequence",
        f"For all eight it is {tensor / 1e6:.1f} MB a step",
        f"{tensor / data:.0f} times as much as with data parallelism", "With ten times as many",
        "data parallelism sends no more, and tensor parallelism ten times as much",
        f"holds {half / 1e6:.1f} MB of weights in place of {all_weights / 1e6:.1f}",
    )


# --- bytes: messages counted one by one ----------------------------------------------------------

def gather(k, size):
    """What one of `k` devices sends in a ring's all-gather, or reduce-scatter."""
    return sum(size / k for hop in range(k - 1))


def all_reduce(k, size):
    return gather(k, size) + gather(k, size)


def ring_attention(k, block):
    """What one of `k` devices sends for a layer: blocks go round until all have met all.

    A `block` is the keys and values of one device.
    """
    sent, at, met = 0, list(range(k)), [{device} for device in range(k)]
    while any(len(each) < k for each in met):  # forward
        at = [(device + 1) % k for device in at]
        sent += block
        for origin, device in enumerate(at):
            met[device].add(origin)
    at, into = list(range(k)), [{origin} for origin in range(k)]  # backward
    for hop in range(k - 1):
        at = [(device + 1) % k for device in at]
        sent += block * (1 + (hop > 0))  # the gradients' own sum begins at the second device
        for origin, device in enumerate(at):
            into[origin].add(device)
    sent += block  # and the sums go home
    assert all(len(each) == k for each in into)
    assert all((device + 1) % k == origin for origin, device in enumerate(at))
    return sent


def count_of(messages, cell):
    """How many of these a cell of the page names; "two all-gathers" are 2."""
    return COUNTS[re.search(rf"(\w+) {messages}", cell)[1]]


@pytest.mark.parametrize("k, m", [(2, 2), (2, 6), (3, 6), (4, 4), (8, 16)])
def test_formulas_count_the_messages(k, m):
    """How many messages, and how large, is read off the page; their bytes are the code's."""
    b, s, h, L, e = 2, 24, 16, 3, 4
    values = {"b": b, "s": s, "h": h, "L": L, "k": k, "m": m}
    attention = evaluate(stated(r"\$N_0 = (\S+)\$ of them are attention's"), **values)
    numbers, batches = attention + 8 * h * h * L, range(m)  # and the MLPs'
    gradients, activations = all_reduce(k, numbers * e), b * s * h * e

    words = {row[0].split(" (")[0]: row[1:] for row in rows("forward")}
    sums = [count_of("all-reduces", cell) for cell in words["tensor"][:2]]
    assert sums == [2, 2] and stated(r"A layer has (\w+), hence the 8") == sum(sums)
    tensor = sum(all_reduce(k, activations)
                 for _ in batches for layer in range(L) for each in range(sum(sums)))
    forward, backward, _ = words["sequence"]
    assert backward.startswith("the same of their gradients; two more all-gathers")
    assert stated(r"Sequence sends these eight, and (\w+) all-gathers more: ten halves,") == 2
    halves = sum(count_of(name, forward) for name in ("all-gathers", "reduce-scatters"))
    halves = 2 * halves + count_of("more all-gathers", backward)
    assert stated(r"A layer has (\w+) of them: eight for tensor's four all-reduces,") == halves
    sequence = sum(gather(k, activations)
                   for _ in batches for layer in range(L) for each in range(halves))
    size = evaluate(stated(r"a ring all-reduce of (\S+) numbers"), **values)
    sends = evaluate(stated(r"numbers sends (\$[^$]*\$)\. A layer"), **values)
    assert_says("sends half as much as an all-reduce")
    assert (size * e, sends) == (activations, all_reduce(k, size)) and sends == 2 * gather(k, size)

    block = evaluate(stated(r"a device has a block of (\S+) keys and values"), **values) * e
    assert block == 2 * (b * s / k) * h * e
    forward = evaluate(stated(r"Forward, they make (\S+) hops round"), **values)
    backward = stated(r"Backward, they and their gradients make (\S+) each, at least")
    backward = evaluate(backward, **values)
    assert ring_attention(k, 1) == forward + 2 * backward == 3 * (k - 1)
    assert_says("three times, hence the 6")  # of 2bsh/k
    context = sum(ring_attention(k, block) for _ in batches for layer in range(L))

    result = evaluate(stated(r"a middle stage sends (\S+) numbers each way"), **values) * e
    pipeline = sum(result for stage, *_ in simulate("1F1B", 3, m) if stage == 1)

    turns = [count_of("all-to-alls", cell) for cell in words["expert"][:2]]
    assert turns == [2, 2]
    taken = stated(r"In data, sharded and expert parallelism each device takes (\S+) of them,")
    taken = evaluate(taken, **values)
    assert taken * k == len(batches)
    assert stated(r"Here a router sends each token to (\w+) expert\.") == 1
    visits = [token % k != layer % k for layer in range(L) for token in range(m * b * s)]
    leaving = stated(r"evenly spread, (\S+) leave their device, twice forward and twice backward")
    leaving = evaluate(leaving, **values)
    assert sum(visits) / len(visits) == pytest.approx(leaving)
    expert = sum(visits) / k * sum(turns) * h * e + all_reduce(k, attention * e)

    factors = {way: re.match(r"\$(\d+)", sent)[1] for way, _, _, sent in rows("weights held")}
    assert re.findall(r"[Hh]ence the (\d+)", PROSE) == [
        factors[way] for way in ("tensor", "sequence", "context", "expert")]
    used = range(int(taken))
    assert words["sharded data"][:2] == [
        "weights: all-gather", "weights: all-gather; their gradients: reduce-scatter"]
    assert words["data"][:2] == ["nothing", "once a step, gradients of weights: all-reduce"]
    counted = {
        "data": gradients,
        "sharded data": sum(gather(k, numbers * e)
                            for _ in used for message in ("forward", "backward", "sums")),
        "tensor": tensor, "sequence": sequence, "context": context + gradients,
        "pipeline": pipeline, "expert": expert,
    }
    assert sequence == pytest.approx(tensor * 5 / 4), "a quarter more"
    assert bytes_sent(k, m, b, s, h, L, e) == pytest.approx(counted)


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
    assert bytes_sent() == bytes_sent(**EXAMPLE) and bytes_held() == memory
    k, m, b, s, h, L, e = (EXAMPLE[name] for name in "kmbshLe")
    assert h == s and k == m
    billion = f"{12 * L * h**2 / 1e9:.1f} billion"
    experts = f"{12 * L * h**2 * (1 + 2 * k) / 3 / 1e9:.1f} billion"
    assert 4 * h * h + 2 * h * 4 * h == 12 * h**2  # four of h x h, then h x 4h and 4h x h
    assert_says(
        f"$h = s = {s}$, $L = {L}$, $b = {b}$, $k = m = {k}$, $e = {e}$", "$N = 12Lh^2$ [3, eq. 2",
        f"{k} devices take {m * b} sequences of {s:,} tokens", f"{e} bytes a number",
        f"{L} layers of width {h:,} have {billion} weights",
        f"12 matrices of {h:,} × {h:,} in each layer: the 4 of attention, and 8 in the MLP",
        "four times as wide", f"With {k} experts in each layer it is {experts} weights",
        f"uses {billion} of them",
    )
    assert [row[0] for row in rows("on NVLink") if "(" in row[0]] == [f"expert ({experts})"]


def test_the_tables_formulas_are_the_codes():
    others = {}, {"k": 3}, {"m": 24}, {"m": 3}, {"b": 5, "s": 17}, {"h": 64, "L": 3}, {"e": 4}
    for other in others:
        values = EXAMPLE | other
        N = 12 * values["L"] * values["h"] ** 2
        for way, _, _, formula in rows("weights held"):
            found = evaluate(formula, **values, N=N, N_0=N / 3)
            assert found == pytest.approx(bytes_sent(**values)[way]), way


def test_the_words_and_the_formulas_agree_on_what_a_device_holds():
    words = bullets()
    for way, weights, _, _ in rows("weights held"):
        formula = re.match(r"\$(.*?)\$", weights)
        whole = formula and formula[1] == "N"
        assert ("Each device has all weights" in words[way]) == bool(whole), way
        assert ("weights are gathered when it computes" in words[way]) == (
            "layers in use" in weights), way
        assert ("the *experts*, and each device has some" in words[way]) == (
            "shared ones" in weights), way


def test_memory_is_16_bytes_a_weight_and_the_activations_of_the_table():
    """With experts a device holds attention and one MLP of `k`, so N in all."""
    k, _, b, s, h, L, _ = EXAMPLE.values()
    N, attention, mlp = 12 * L * h**2, 4 * L * h**2, 8 * L * h**2
    kept = evaluate(stated(r"(\S+) in GPT with dropout"), b=b, s=s, h=h, L=L)
    kept *= stated(r"\$A\$ bytes: what the layers keep of (\w+) micro-batch for the backward pass")
    size = int(stated(r"\*Memory\* is (\d+) bytes a weight"))
    for way, weights, passed, _ in rows("weights held"):
        values = {"N": N, "A": kept, "k": k}
        share = evaluate(re.search(r"\$(.*?)\$", weights)[1], **values)
        if way == "expert":
            share = attention + share * k * mlp  # "shared ones and 1/k of the others"
        found = size * share + evaluate(re.search(r"\$(.*?)\$", passed)[1], **values)
        assert found == pytest.approx(bytes_held()[way]), way
    assert size == 2 + 2 + 12 == 2 + 2 + 3 * 4
    uncut = size * (attention + k * mlp) + kept
    assert bytes_of_experts() == uncut
    *first, last = (way for way, there in bytes_held().items() if there > 80e9)
    assert_says(
        f"one of each layer and attention, so {(attention + mlp) / 1e9:.1f} billion weights",
        f"For all weights it is {size * N / 1e9:.0f} GB",
        "2 for itself, 2 for its gradient, and 12 for Adam's two means and a copy",
        f"{kept / (b * s * h * L):.0f} bytes for each number of each token in each layer",
        f"[2, §4.1], {kept / 1e9:.0f} GB", "A100s have 80 GB [3, §5]",
        f"{', '.join(first).capitalize()} and {last} need more",
        f"it would need {uncut / 1e9:.0f} GB",
    )
    assert stated(r"With all (\w+) experts") == "eight" and k == 8


@pytest.mark.parametrize("k, m", [(4, 8), (8, 8), (8, 32)])
def test_a_pipelines_first_stage_keeps_of_k_micro_batches_a_part_of_k(k, m):
    first, *others = kept(simulate("1F1B", k, m))
    assert first / k == 1 and max(others) < first
    assert_says("keeps $1/k$ of the layers' activations, but of up to $k$ micro-batches: $A$",
                "of all $m$: $mA/k$")
    assert kept(simulate("GPipe", k, m))[0] == m


def test_activations_are_the_papers_and_recomputation_keeps_inputs():
    """[2]: 34 bsh and 5 a b s^2 bytes a layer; softmax's output, its dropout's and a mask."""
    _, _, b, s, h, L, e = EXAMPLE.values()
    found, heads, values = activations(), 32, {"a": 32, "b": b, "s": s, "h": h, "L": L}
    assert found["kept"] == evaluate(stated(r"(\S+) in GPT with dropout"), **values)
    scores = evaluate(stated(r"Keeping them would take (\S+) bytes \[2, §4.1\]"), **values)
    assert found["scores"] == scores == (e + e + 1) * heads * b * s * s * L
    inputs = evaluate(stated(r"keeps only what enters a layer, (\S+) bytes or"), **values)
    assert found["inputs"] == inputs == L * b * s * h * e
    operations = 2 + 4, 2 + 2 + 4  # forward, (again,) backward
    assert_says(
        f"$A$ is {found['kept'] / 1e9:.1f} GB", f"with {heads} heads {scores / 1e9:.0f} GB",
        f"$2bshL$ bytes or {inputs / 1e9:.1f} GB",
        "for each token and weight 2 operations forward and 4 backward",
        f"with recomputation {operations[1] - operations[0]} more",
    )
    uncut = stated(r"of the 34 bytes the (\d+) outside the matrices that are cut stay whole")
    assert f"({uncut} + {34 - int(uncut)}/k)A/34" in PAGE


def test_the_numbers_in_the_text_are_computed():
    k, m, b, s, h, L, _ = EXAMPLE.values()
    sent, computing, N = bytes_sent(), seconds_computing(), 12 * L * h**2
    share, peak, operations = 1 / 2, PEAK / 1e12, 6  # 2 forward, 4 backward
    assert m == k and operations * N * b * s / (share * PEAK) == computing
    float32 = all_reduce(k, 4 * N), gather(k, 2 * N) + gather(k, 2 * N) + gather(k, 4 * N)
    assert float32[0] == float32[1]
    slow = [way for way in sent if sent[way] / CARD > computing]
    assert slow == ["sharded data", "tensor", "sequence", "context"]
    assert all(sent[way] / NVLINK < computing for way in sent)
    scores = 4 * b * s * s * h * L / (2 * N * b * s)  # two products of s x h and h x s
    assert scores == pytest.approx(evaluate(stated(r"would add (\S+) \[3"), s=s, h=h))
    assert sum(range(s)) / s**2 == pytest.approx(1 / 2, rel=1e-3)  # pairs with an earlier token
    # two products of c x h and h x c; keys and values of h numbers of 2 bytes, for c tokens
    assert_says("$4hc^2$ operations", "$2hc^2$ each", "$4hc$ bytes", "$2hc$ each")
    hidden_from = [share * PEAK / link for link in (NVLINK, CARD)]
    for link, c in zip((NVLINK, CARD), hidden_from):
        assert 4 * h * c**2 / (share * PEAK) == pytest.approx(4 * h * c / link)
    assert 0.95 < s // k / hidden_from[0] < 1 and s // k < hidden_from[1] / 10
    assert_says(
        f"with {NVLINK / 1e9:.0f} GB/s [4, table 2]",
        f"a network card of {CARD / 1e9:.0f} GB/s [3, §5]", "take twice the bytes",
        "three sendings", f"only gradients, so {float32[0] / 1e9:.1f} GB",
        f"again {float32[1] / 1e9:.1f} GB", f"half of an A100's {peak:.0f} TFLOP/s",
        f"computing takes {computing:.1f} s",
        f"{operations - 4} operations forward and 4 backward, shared by {k} GPUs",
        f"{ {4: 'four'}[len(slow)]} of the ways send for longer than they compute",
        f"{', '.join(slow[:-1])} and {slow[-1]}.",
        f"would add $s/(6h)$ [3, eq. 3], {100 * scores:.0f} %, or half of it",
        f"[4, §3]: at half of the peak {hidden_from[0]:,.0f} tokens on NVLink, "
        f"{hidden_from[1]:,.0f} between machines",
        f"Our {s // k} nearly hide it inside a machine, and not between",
        f"A {min(sent, key=sent.get)} sends least",
        f"the bubble takes {100 * bubble(k, m):.0f} % of the time", f"{computing:.1f} s of",
        f"a step of {computing / (1 - bubble(k, m)):.1f} s",
    )
    more_than = [way for way in sent if sent[way] > 1.5 * sent["sharded data"]]
    assert more_than == ["tensor", "sequence", "context"]  # "send most"
    size, number = ({way: bytes_sent(**more)[way] / sent[way] for way in sent}
                    for more in ({"s": 2 * s}, {"m": 2 * m}))
    assert seconds_computing(s=2 * s) == seconds_computing(m=2 * m) == 2 * computing
    assert size["data"] == number["data"] == 1
    assert (size["sharded data"], number["sharded data"]) == (1, 2)
    assert {each[way] for each in (size, number) for way in ("tensor", "sequence")} == {2}
    assert_says(
        "bytes don't grow with the tokens; computing does",
        "grow with the number of micro-batches, not their size",
        "bytes grow with the tokens as computing does", "inside a machine [3, §3.2]",
    )


def test_what_is_said_of_pipelines_is_simulated():
    p, m = 4, 8
    runs = {name: simulate(name, p, m) for name in ("GPipe", "1F1B")}
    for name, run in runs.items():
        orders = ["".join(kind for each, kind, *_ in run if each == stage) for stage in range(p)]
        apart = [each == m * "F" + m * "B" for each in orders]
        assert apart == [name == "GPipe"] * p and ("FB" * m in orders) == (name == "1F1B")
        assert {end - start for _, kind, _, start, end in run if kind == "B"} == {2}
    (last,) = {max(end for *_, end in run) for run in runs.values()}
    for run in runs.values():
        of_stages = [[event for event in run if event[0] == stage] for stage in range(p)]
        busy = {sum(end - start for *_, start, end in events) for events in of_stages}
        early = min(start for *_, start, end in of_stages[3])
        late = max(end for *_, start, end in of_stages[3])
        (work,) = busy
        assert late - early == work, "stage 4 doesn't wait in between"
        assert last - work == early + last - late
    most = {name: {p: "$k$", m: "$m$"}[max(kept(run))] for name, run in runs.items()}
    whole = stated(r"micro-batches, it is (\S+) of the time")
    ideal = stated(r"some divide it by the time without it: (\S+) \[3, §2.2\]")
    shorter = stated(r"the quotient \$\(k-1\)/m\$ shrinks to (\S+)\.")
    for stages, micro in PIPELINES:
        values = {"k": stages, "m": micro, "v": 3}
        found = bubble(stages, micro) / (1 - bubble(stages, micro))
        assert evaluate(whole, **values) == pytest.approx(bubble(stages, micro))
        assert evaluate(ideal, **values) == pytest.approx(found)
        assert evaluate(shorter, **values) == pytest.approx(found / 3)
    assert_says(
        f"four stages and eight micro-batches, from 0 to {last} units of time",
        "$v$ shorter stages", "$v$ times as much is sent [3, §2.2]",
        "a backward pass takes twice as long as a forward pass",
        f"Look at stage 4. It starts {early} units late", "must pass three stages",
        f"ends {last - late} units early", "eight micro-batches are kept", "four are kept",
        f"idle for {early + last - late} of {last} units, {100 * bubble(p, m):.0f} %",
        "take 3 units together", f"{(early + last - late) // 3} times that, of {last // 3}",
        f"{early + last - late} units by {work}, {100 * (p - 1) / m} %",
        f"{EXAMPLE['m']} micro-batches pass {EXAMPLE['k']} stages",
        f"at most {most['1F1B']} micro-batches, in place of {most['GPipe']}",
        f"both are {EXAMPLE['k']}",
    )


def test_the_published_days_are_the_papers():
    """Table 2. Its throughputs give the days, by equation 3 with the sizes of that model.

    Its 96 = 8 * 12 operations are those of a step with recomputation.
    """
    L, h, s, vocabulary = 96, 12_288, 2_048, 51_200
    a_token = 96 * L * h**2 * (1 + s / (6 * h) + vocabulary / (16 * L * h))
    table = {384: (90, 84), 768: (74, 43), 1536: (74, 23)}
    speeds = {384: (144, 153), 768: (88, 149), 1536: (44, 141)}  # TFLOP/s
    assert rows("ZeRO-3 alone") == [
        [f"{gpus:,}", *(f"{each} days" for each in days)] for gpus, days in table.items()]
    for gpus, days in table.items():
        for each, speed in zip(days, speeds[gpus]):
            found = 300e9 * a_token / (gpus * speed * 1e12) / 86_400
            assert each == pytest.approx(found, abs=0.8)
    assert [1536 // gpus for gpus in table] == [4, 2, 1]
    fast = [round(100 * pair[1] * 1e12 / PEAK) for pair in speeds.values()]
    assert_says(
        f"{min(fast)} to {max(fast)} % of the peak",
        "four sequences of a step with 384 GPUs, two with 768, and one with 1,536",
        "174.6 billion weights on 300 billion tokens, with 1,536 sequences a step",
        f"1,536 GPUs are {1536 // 96} copies of the model, each on 96",
        f"8-way tensor parallelism [3, §4.1], {96 // 8} stages",
        "GPipe [6, §2.3] and the table of days [3, §5.1]",
    )


def test_pytorch_has_what_the_page_names():
    torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")
    from torch.distributed import fsdp, pipelining
    from torch.distributed.tensor import experimental, parallel

    assert_says(f"In PyTorch {'.'.join(torch.__version__.split('.')[:2])}, which has no")
    assert not [name for name in dir(parallel) if "expert" in name.lower()]
    line = PROSE[PROSE.index("In PyTorch 2") : PROSE.index("*Hybrid sharding*")]
    names = [name for name in re.findall(r"`(\w+)`", line) if name != "mesh"]
    assert len(names) == 10 and {"fully_shard", "Schedule1F1B"} <= set(names)
    places = torch.nn.parallel, parallel, experimental, pipelining, fsdp
    for name in names:
        assert any(hasattr(each, name) for each in places), name
    from torch.distributed.tensor.experimental import _attention as context

    rotate = context._RotateMethod
    assert "`context_parallel`, a prototype" in line
    assert "gathers all keys and values" in line
    assert "prototype feature" in context.context_parallel.__doc__
    assert context._cp_options.rotate_method == rotate.ALL_GATHER
    try:
        context.set_rotate_method(stated(r'`set_rotate_method\("(\w+)"\)` they go round a ring'))
        assert context._cp_options.rotate_method == rotate.ALL_TO_ALL  # to the next rank only
    finally:
        context.set_rotate_method("allgather")
    assert_says("Their gradients always do, in float32")
    assert context._cp_options.convert_to_f32
    backward = getsource(import_module(context._RotateMethod.__module__))
    assert "dkv_rotater = _create_rotater(group, 2, method=_RotateMethod.ALL_TO_ALL)" in backward
    text = " ".join(fsdp.fully_shard.__doc__.split())
    assert "sharded across the 1st dim and replicated across the 0th dim (HSDP)" in text
    assert_says("`fully_shard` with a `mesh` of machines by GPUs")


def test_chapter_01s_deeper_notebook_makes_two_other_cuts():
    text = (NOTEBOOKS / "src/deeper/01_three_ways_to_divide_a_network.py").read_text("utf-8")
    cuts = re.findall(r"\*\*(By layer|Inside layers)\*\*", text)
    named = stated(r"\[Three ways to divide a network\]\S+ cuts a network (.*?)\. Large models")
    assert named == " and ".join(dict.fromkeys(cuts)).lower()


def test_a_gpu_between_machines_has_an_adapter_of_its_own():
    text = (NOTEBOOKS / "src/deeper/16_when_sharding_pays.py").read_text(encoding="utf-8")
    text = " ".join(text.replace("\n#", "\n").split())
    assert "eight adapters of 200 Gbit/s" in text
    assert CARD == 200e9 / 8


def test_messages_at_full_bandwidth_explain_a_part_of_the_days():
    """A deeper notebook of chapter 16 expects less than half of the time of 1,536 GPUs."""
    text = (NOTEBOOKS / "src/deeper/16_when_sharding_pays.py").read_text(encoding="utf-8")
    text = " ".join(text.replace("\n#", "\n").split())
    measured, expected = re.search(r"(\d+) s in place of 82, .*? (\d+) should do", text).groups()
    assert int(expected) < int(measured) / 2
    assert_says("explains only a part ([When sharding pays]")


def test_sources_and_chapters_have_the_numbers_that_the_text_gives_them():
    papers = re.findall(r"(?m)^(\d)\. \*", PAGE)
    cited = re.findall(r"\[(\d[^]\[]*)\](?!\()", PAGE)
    numbers = {part.split(",")[0] for each in cited for part in each.split("; ")}
    assert papers == sorted(numbers) == [str(number + 1) for number in range(7)]
    for named, target in re.findall(r"\[chapter (\d\d)\]\((\d\d)_", PAGE):
        assert named == target
    for named, target in re.findall(r"\[arXiv:([\d.]+)\]\(https://arxiv.org/abs/([\d.]+)\)", PAGE):
        assert named == target
