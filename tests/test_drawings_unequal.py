"""The drawing of chapter 12: its times are right."""

import draw_unequal
import pytest
from svg import read, with_class


def test_an_image_takes_the_slow_device_three_times_as_long():
    root = read("shares_by_speed")
    ends = {}
    for way in with_class(root, "way"):
        images = [int(way.get("data-fast")), int(way.get("data-slow"))]
        assert sum(images) == 256
        drawn = with_class(way, "shard")
        assert [int(shard.get("data-images")) for shard in drawn] == [n for n in images if n]
        for shard, times_as_long in zip(drawn, [1, 3]):
            expected = draw_unequal.UNIT * times_as_long * int(shard.get("data-images"))
            assert float(shard.get("width")) == pytest.approx(expected, abs=0.01)
        [done] = with_class(way, "done")
        last = max(float(shard.get("x")) + float(shard.get("width")) for shard in drawn)
        assert float(done.get("x1")) == pytest.approx(last, abs=0.02), "done when all are"
        ends[tuple(images)] = last
    assert ends[192, 64] < ends[256, 0] < ends[128, 128]
