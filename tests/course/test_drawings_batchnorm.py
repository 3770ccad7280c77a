"""The drawings of chapter 09: means, sums and statistics are those of the numbers."""

import draw_batchnorm
import numpy as np
from svg import SVG, read, with_class


def test_means_and_shifts_are_those_of_the_values():
    root = read("shards_and_means")
    rows = with_class(root, "batch")
    batches = []
    for row in rows:
        values = [int(text.text) for text in with_class(row, "value")]
        (mark,) = with_class(row, "mean")
        assert float(mark.get("data-mean")) == np.mean(values)
        assert f"mean {np.mean(values):g}" in "".join(row.itertext())
        assert float(mark.get("x1")) == draw_batchnorm.place(np.mean(values))
        batches.append(values)
    whole, first, second = batches
    assert whole == first + second
    shifts = with_class(root, "shift")
    assert len(shifts) == 2
    for shift, shard in zip(shifts, (first, second)):
        delta = np.mean(shard) - np.mean(whole)
        assert float(shift.get("data-shift")) == delta
        assert shift.findtext(SVG + "text").replace("−", "-") == f"{delta:+g}"
    assert sum(float(shift.get("data-shift")) for shift in shifts) == 0


def test_sums_totals_and_statistics_are_those_of_the_shards():
    root = read("sums_of_all")
    shards = [np.array(text.text.split(", "), float) for text in with_class(root, "shard")]
    own, total, statistic = ([text.text for text in with_class(root, kind)]
                             for kind in ("own", "total", "statistic"))
    whole = np.concatenate(shards)
    for shard in shards:
        assert own[:2] == [f"Σx = {shard.sum():g}", f"Σx² = {(shard ** 2).sum():g}"]
        assert total[:2] == [f"Σx = {whole.sum():g}", f"Σx² = {(whole ** 2).sum():g}"]
        assert statistic[:2] == [f"mean {whole.mean():g}", f"variance {whole.var():g}"]
        own, total, statistic = own[2:], total[2:], statistic[2:]
    assert own == total == statistic == []
