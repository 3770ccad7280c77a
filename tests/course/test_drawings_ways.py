"""The drawings of *Seven ways, computed*: what is cut how, and the tokens of a cell."""

import re
from pathlib import Path

import nbformat
from svg import read, with_class

NOTEBOOK = Path(__file__).parents[2] / "notebooks/deeper/20_seven_ways_computed.ipynb"


def test_each_way_cuts_one_table_in_one_direction():
    found = {}
    for way in with_class(read("four_cuts"), "way"):
        for square in with_class(way, "square"):
            parts = with_class(square, "part")
            assert len(parts) == 4
            assert len({part.get("x") for part in parts}) in (1, len(parts))
            rows = len({part.get("x") for part in parts}) == 1
            found[way.get("data-way")] = square.get("data-of"), "rows" if rows else "columns"
    assert found == {"data": ("batch", "rows"), "context": ("batch", "columns"),
                     "pipeline": ("weights", "rows"), "tensor": ("weights", "columns")}


def test_all_queries_and_keys_are_there_once():
    for name in ("stays", "moves"):
        found = [int(number) for text in with_class(read("ring_attention"), name)
                 for number in re.findall(r"\d", text.text)]
        assert found == list(range(8))


def test_tokens_choose_the_experts_of_the_notebook():
    cells = nbformat.read(NOTEBOOK, 4).cells
    (said,) = (output.text for cell in cells for output in cell.get("outputs", [])
               if "chosen experts" in output.get("text", ""))
    drawn = [each.get("data-expert") for each in with_class(read("experts"), "token")]
    assert drawn == re.findall(r"\d", said)
