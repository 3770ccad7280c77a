"""Other readings of the exercises' texts: a rule, an order, a boundary, a time or a state is read
in another way. What is wrong by the text loses what it should, what is right by it loses nothing.

Each `readings/psN.py` makes READINGS, a list of (name, {grade_id: source of a solution cell},
"wrong", [tests that it must lose, of all those of its cells]) and (name, cells, "right", why).
"""

import runpy
from pathlib import Path

import book
import in_process
import pytest

READINGS = {(path.stem, name): (cells, kind, more)
            for path in sorted((Path(__file__).parent / "readings").glob("*.py"))
            for name, cells, kind, more in runpy.run_path(str(path))["READINGS"]}


@pytest.fixture(scope="session")
def marks(request):
    """{(assignment, name, grade_id): marks} of the readings that this run asks for."""
    chosen = {item.callspec.params["reading"] for item in request.session.items
              if "marks" in getattr(item, "fixturenames", ())}
    return in_process.judge_all({(*key, exercise): (key[0], exercise, source)
                           for key in READINGS if key in chosen
                           for exercise, source in READINGS[key][0].items()})


@pytest.mark.parametrize("reading", [pytest.param(key, marks=book.can_run(key[0]), id="-".join(key))
                                     for key in READINGS])
def test_a_reading_earns_what_the_text_says(reading, marks):
    cells, kind, more = READINGS[reading]
    assert more and kind in ("right", "wrong")
    found = [mark for exercise in cells for mark in marks[*reading, exercise]]
    lost = {mark.exercise: mark.why for mark in found if mark.points != mark.of}
    assert found and sorted(lost) == sorted(more if kind == "wrong" else []), lost
