"""The drawings of chapter 01: they tell the truth."""

import re

import draw_devices
import numpy as np
from svg import SVG, read, with_class


def test_the_gradients_are_those_of_the_model():
    """By finite differences of the sum of (w x - 3 x)² at w = 0."""
    root = read("one_weight")
    found, examples = [], []
    for device in with_class(root, "device"):
        text = "|".join(device.itertext())
        x = np.array([float(n) for n in re.search(r"x: (\d) and (\d)", text).groups()])
        slope = (((1e-6 * x - 3 * x) ** 2).sum() - ((-1e-6 * x - 3 * x) ** 2).sum()) / 2e-6
        assert int(device.get("data-gradient")) == round(slope)
        assert f"gradient −{-round(slope)}" in text
        found.append(round(slope))
        examples += x.tolist()
    assert examples == [1, 2, 3, 4]
    total, = with_class(root, "sum")
    assert total.text == f"sum −{-sum(found)}"
    after = [text.text for text in root.iter(SVG + "text") if (text.text or "").startswith("w: ")]
    assert after == [f"w: {-0.01 * sum(found):.1f}"] * 2


def test_a_device_works_on_its_first_product_and_the_second_waits():
    moments = with_class(read("two_queues"), "moment")
    assert [int(moment.get("data-called")) for moment in moments] == [2, 4]
    for moment in moments:
        called = int(moment.get("data-called"))
        for rank in (0, 1):
            mine = [work for work in with_class(moment, "work")
                    if int(work.get("data-device")) == rank]
            places = {work.get("data-name"): float(work.find(SVG + "rect").get("x"))
                      for work in mine}
            expected = [f"p{number + 1}" for number in range(called) if number % 2 == rank]
            in_order = sorted(places, key=places.get, reverse=True)  # the device is on the right
            assert in_order == expected
            assert places[expected[0]] > 524, "the first is on its device"
            assert all(places[name] < 478 for name in expected[1:]), "the others wait"
        lines = {text.text: text.get("fill") for text in moment.iter(SVG + "text")}
        grey = [name for name in lines if lines[name] == draw_devices.GREY]
        assert len(grey) == called, "what has been called is grey"


def test_each_part_of_the_work_is_cut_as_its_name_says():
    cuts = {cut.get("data-name"): cut for cut in with_class(read("three_cuts"), "cut")}
    assert list(cuts) == ["by layer", "inside layers", "by data"]
    colors = {0: draw_devices.BLUE, 1: draw_devices.ORANGE}
    for name, cut in cuts.items():
        owners = {}
        for part in with_class(cut, "part"):
            rank = int(part.get("data-device"))
            assert part.get("fill") == colors[rank]
            place = int(part.get("data-layer")), int(part.get("data-example"))
            owners.setdefault(place, []).append((rank, float(part.get("height"))))
        assert len(owners) == 4 * 8
        for (layer, example), parts in owners.items():
            expected = {"by layer": [(int(layer > 0), 40)],
                        "inside layers": [(0, 20), (1, 20)],
                        "by data": [(int(example >= 4), 40)]}[name]
            assert parts == expected, (name, layer, example)
