"""The drawing of strong and weak scaling has the milliseconds of chapter 11's first cell."""

import pytest
from svg import SVG, read, with_class


@pytest.mark.parametrize("scaling", ["strong", "weak"])
def test_the_bars_are_as_long_as_the_formula_says(scaling):
    bars = [bar for bar in with_class(read("strong_and_weak"), "bar")
            if bar.get("data-scaling") == scaling]
    assert [bar.get("data-devices") for bar in bars] == ["1", "2", "4", "8"]
    for bar in bars:
        k = int(bar.get("data-devices"))
        parts = [32 / k if scaling == "strong" else 32, 4 * 2 * (k - 1) / k]
        (total,) = with_class(bar, "total")
        assert total.text == f"{sum(parts):g} ms"
        widths = [float(part.get("width")) for part in bar.iter(SVG + "rect")]
        unit = widths[0] / parts[0]
        assert widths == pytest.approx([unit * part for part in parts if part], abs=0.02)
        assert unit == pytest.approx(9.4)
