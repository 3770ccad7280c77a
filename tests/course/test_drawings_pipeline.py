"""The drawings of chapter 19: their rows are the lists that the module makes, and they add up."""

import pytest
from svg import read, texts, with_class

pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")

from pipeline import gpipe, one_f_one_b  # noqa: E402

KINDS = {"F": "forward", "B": "backward"}
DRAWN = {("pipeline_schedules", "GPipe"): gpipe(4, 8), ("pipeline_schedules", "1F1B"):
         one_f_one_b(4, 8), ("pipeline_fill", "parts"): gpipe(4, 4),
         ("pipeline_fill", "whole"): gpipe(4, 1)}


@pytest.mark.parametrize("name, timeline", DRAWN)
def test_a_row_is_a_stages_list_and_a_pass_waits_for_the_one_it_needs(name, timeline):
    (drawn,) = (each for each in with_class(read(name), "timeline")
                if each.get("data-name") == timeline)
    passes = {}
    for each in with_class(drawn, "pass"):
        stage, kind = int(each.get("data-stage")), KINDS[each.get("data-kind")]
        begin = float(each.get("x"))
        end = begin + float(each.get("width"))
        passes[kind, int(each.get("data-number")), stage] = begin, end
    for stage, steps in enumerate(DRAWN[name, timeline]):
        row = sorted((span, kind, i) for (kind, i, s), span in passes.items() if s == stage)
        assert [(kind, i) for _, kind, i in row] == steps
        for (_, end), (begin, _) in zip([span for span, *_ in row], [span for span, *_ in row[1:]]):
            assert begin > end - 0.1
    for (kind, i, stage), (begin, _) in passes.items():
        before = (kind, i, stage - 1) if kind == "forward" else (kind, i, stage + 1)
        assert before not in passes or begin > passes[before][1] - 0.1


def test_lengths_are_computed():
    assert f"ends after {3 * (4 + 3)} instead of {4 * 3 * 4}" in texts(read("pipeline_fill"))
    assert str(3 * (8 + 3)) in texts(read("pipeline_schedules"))
