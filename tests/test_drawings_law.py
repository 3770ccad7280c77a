"""The drawing of chapter 11: its bars follow its law."""

import pytest
from svg import SVG, read, with_class


def test_compute_halves_and_all_reduce_doubles():
    root = read("step_law")
    lengths = {}
    for bar in with_class(root, "bar"):
        k = int(bar.get("data-devices"))
        assert str(k) in bar.findtext(SVG + "text").split()
        for part in with_class(bar, "part"):
            lengths[part.get("data-part"), k] = float(part.get("width"))
    totals = {}
    for k in [1, 2, 4, 8, 16]:
        assert lengths["fixed", k] == lengths["fixed", 1]
        assert lengths["compute", k] == pytest.approx(lengths["compute", 1] / k)
        all_reduce = lengths.get(("all-reduce", k), 0)
        assert all_reduce == (0 if k == 1 else pytest.approx(lengths["all-reduce", 2] * k / 2))
        totals[k] = lengths["fixed", k] + lengths["compute", k] + all_reduce
    shortest = sorted(totals, key=totals.get)[:2]
    assert sorted(shortest) == [4, 8]
    assert totals[4] == totals[8], "as drawn: equal"
