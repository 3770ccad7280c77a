"""The map: its drawings are what the code draws now, its numbers what the code computes."""

import re
from pathlib import Path

import draw_map
import pytest
from draw_map import bubble, bytes_sent, held, idle, kept, seconds_computing, simulate
from helpers import plotting

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
PAGE = (NOTEBOOKS / "map.md").read_text(encoding="utf-8")
PROSE = " ".join(PAGE.split())
EXAMPLE = {"k": 8, "b": 1, "s": 4096, "h": 4096, "L": 32, "e": 2}
PIPELINES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 7, 8, 16)]


def rows(first):
    """The cells of the table whose head has the cell `first`, row by row."""
    lines = PAGE.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("|") and first in line)
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[start + 2 : end]]


def evaluate(formula, **values):
    """A formula of the page, in which what stands side by side is multiplied."""
    parts = re.findall(r"N_0|\d+|[a-zA-Z]|[-+*/()]", formula.strip("$").replace(r"\cdot", "*"))
    text = " ".join(parts)
    text = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", text)
    return eval(text, {"__builtins__": {}}, values)


def shown(text, value):
    """Is the number in `text` this value, rounded to as many places as it shows?"""
    number = re.search(r"[\d.]+", text)[0]
    return float(number) == round(value, len(number.partition(".")[2]))


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


# --- bytes: messages counted one by one ----------------------------------------------------------

def all_reduce(k, size):
    return sum(size / k for half in range(2) for hop in range(k - 1))


def ring_attention(k, block):
    """What one of `k` devices sends for a layer: blocks go round until all have met all."""
    sent, at, met = 0, list(range(k)), [{device} for device in range(k)]
    while any(len(each) < k for each in met):  # forward
        at = [(device + 1) % k for device in at]
        sent += 2 * block  # keys and values
        for origin, device in enumerate(at):
            met[device].add(origin)
    at, into = list(range(k)), [{origin} for origin in range(k)]  # backward
    for hop in range(k - 1):
        at = [(device + 1) % k for device in at]
        sent += 2 * block * (1 + (hop > 0))  # the gradients' own sum begins at the second device
        for origin, device in enumerate(at):
            into[origin].add(device)
    sent += 2 * block  # and the sums go home
    assert all(len(each) == k for each in into)
    assert all((device + 1) % k == origin for origin, device in enumerate(at))
    return sent


@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_formulas_count_the_messages(k):
    b, s, h, L, e = 2, 24, 16, 3, 4
    numbers, sequences = sum([4 * h * h, 8 * h * h] * L), range(k * b)  # attention, MLP
    gradients = all_reduce(k, numbers * e)
    tensor = sum(all_reduce(k, s * h * e) for _ in sequences for layer in range(L) for _ in "FfBb")
    gathers = sum(s * h * e / k * (k - 1) for _ in sequences for layer in range(L) for _ in "Bb")
    context = sum(ring_attention(k, s / k * h * e) for _ in sequences for layer in range(L))
    run = simulate("1F1B", 3, k)
    pipeline = sum(b * s * h * e for stage, *_ in run if stage == 1)  # each result goes on
    tokens = [(token + layer) % k != 0 for layer in range(L) for token in range(b * s * k)]
    shared = all_reduce(k, 4 * h * h * L * e)
    counted = {
        "data": gradients, "sharded data": 1.5 * gradients, "tensor": tensor,
        "sequence": tensor + gathers, "context": context + gradients, "pipeline": pipeline,
        "expert": sum(tokens) / k * 4 * h * e + shared,
    }
    assert bytes_sent(k, b, s, h, L, e) == pytest.approx(counted)


# --- the page ----------------------------------------------------------------------------------

def test_the_tables_bytes_are_the_codes():
    table = {row[0]: row[1:] for row in rows("bytes sent by a device")}
    assert list(table) == list(bytes_sent()) == list(draw_map.WAYS)
    assert [row[0].split(" (")[0] for row in rows("what is cut")] == list(table)
    for way, sent in bytes_sent(**EXAMPLE).items():
        _, example, inside, between = table[way]
        assert shown(example, sent / 1e9), (way, sent)
        assert shown(inside, sent / 300e9), (way, sent)
        assert shown(between, sent / 25e9), (way, sent)
    assert bytes_sent() == bytes_sent(**EXAMPLE)
    for name, value in EXAMPLE.items():
        assert re.search(rf"{name}( = s)? = {value}\b", PROSE) or (name, value) == ("h", 4096)


def test_the_tables_formulas_are_the_codes():
    for other in ({}, {"k": 3}, {"b": 5, "s": 17}, {"h": 64, "L": 3}, {"e": 4}):
        values = EXAMPLE | other
        N = 12 * values["L"] * values["h"] ** 2
        for way, formula, *_ in rows("bytes sent by a device"):
            found = evaluate(formula, **values, N=N, N_0=N / 3)
            assert found == pytest.approx(bytes_sent(**values)[way]), way


def test_the_drawing_and_the_table_agree_on_what_a_device_holds():
    values = {"N": 1, "A": 1, "k": 4}
    for name, _, *cells, _ in rows("what is cut"):
        way = name.split(" (")[0]
        weights, activations = (re.search(r"\$(.*?)\$", cell)[1] for cell in cells)
        if way == "expert":
            assert cells[0] == "shared ones and $1/k$ of the others"
            assert held(way, True) == pytest.approx(1 / 4 + 3 / 4 / 4)  # as wide as it is drawn
        else:
            assert held(way, True) == evaluate(weights, **values), way
        if way == "tensor":
            assert 1 / 4 < held(way, False) < 1 and 1 / 4 < evaluate(activations, **values) < 1
        else:  # one of four micro-batches is A, and so is a quarter of as many as there are stages
            times = 1 if way in ("sequence", "context") else 4
            assert times * held(way, False) == evaluate(activations, **values), way


def test_the_numbers_in_the_text_are_computed():
    L, h, s, k = (EXAMPLE[name] for name in "Lhsk")
    tensor, data = (bytes_sent(**EXAMPLE | {"s": 3 * h // k})[way] for way in ("tensor", "data"))
    assert tensor == data
    for text in (
        f"{12 * L * h**2 / 1e9:.1f} billion", f"Computing takes {seconds_computing():.1f} s",
        f"{312e12 / 300e9:,.0f} tokens of a sequence on NVLink, {312e12 / 25e9:,.0f} between",
        f"Here it has {s // k}:", f"$3h/k = {3 * h // k:,}$".replace(",", "{,}"),
        f"here {100 * bubble(4, 8):.0f} %", f"$(p-1)/m$, here {100 * 3 / 8} %",
        f"$m = p = 8$, as in the table, it takes {100 * bubble(8, 8):.0f} % of the time",
        f"Both end after {max(end for *_, end in simulate('1F1B', 4, 8))} units",
        f"that is {1536 // 96} replicas of 96 GPUs each",
    ):
        assert text in PROSE, text
    assert 3 / 8 / (1 + 3 / 8) == bubble(4, 8)
    sent, computing = bytes_sent(), seconds_computing()
    assert all(sent[way] / 25e9 > computing > sent[way] / 300e9 for way in ("tensor", "sequence"))
    assert min(sent, key=sent.get) == "pipeline"


def test_the_published_days_fit_their_throughput():
    """Days = 8 T P / (n X), the paper's equation 4, to 7 % (it leaves out two small terms)."""
    speeds = {"384": (144, 153), "768": (88, 149), "1,536": (44, 141)}  # TFLOP/s, table 2
    for gpus, *days in rows("ZeRO-3 alone"):
        for text, speed in zip(days, speeds[gpus]):
            days = 8 * 300e9 * 174.6e9 / (int(gpus.replace(",", "")) * speed * 1e12) / 86_400
            assert int(text.removesuffix(" days")) == pytest.approx(days, rel=0.07)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]*)\)", PAGE):
        assert target.startswith("https://") or (NOTEBOOKS / target).is_file(), target


def test_the_drawings_are_what_the_code_draws(tmp_path):
    assert (draw_map.BLUE, draw_map.ORANGE) == (plotting.BLUE, plotting.ORANGE)
    draw_map.main(tmp_path)
    for name in ("cuts.svg", "pipeline.svg"):
        committed = (NOTEBOOKS / "src/drawings" / name).read_bytes()
        assert (tmp_path / name).read_bytes() == committed, f"run draw_map.py: {name} is another"
        assert f"(src/drawings/{name})" in PAGE
