"""The drawings of chapter 14: they tell the truth."""

import re

from svg import SVG, classes, read, with_class


def edges(element):
    """Left and right edge of its first rectangle."""
    rect = next(element.iter(SVG + "rect"))
    left = float(rect.get("x"))
    return left, left + float(rect.get("width"))


def test_a_message_leaves_after_its_gradients_and_one_at_a_time():
    ends = {}
    for way in with_class(read("ddp_ways"), "way"):
        ready = {}
        for layer in with_class(way, "pass"):
            ready[layer.get("data-layer")] = edges(layer)[1]
        free = 0
        sent = []
        for message in with_class(way, "message"):
            layers = re.findall(r"g(\d)", message.get("data-layers"))
            begin, end = edges(message)
            assert begin >= max(ready[layer] for layer in layers)
            assert begin >= free
            free = end
            sent += layers
            early = begin < max(ready.values())
            assert not (early and way.get("data-name") in ("naive", "flat"))
        assert sorted(sent) == sorted(ready), "each gradient once"
        ends[way.get("data-name")] = free
    assert ends["buckets"] < ends["flat"] < ends["overlapped"] < ends["naive"]


def test_a_line_marks_where_each_way_ends_and_which_ends_first():
    ends = {}
    for way in with_class(read("ddp_ways"), "way"):
        (mark,) = with_class(way, "end")
        last = max(edges(message)[1] for message in with_class(way, "message"))
        assert float(mark.get("x1")) == float(mark.get("x2")) == last
        ends[way.get("data-name")] = last
    (first,) = with_class(read("ddp_ways"), "first")
    name = min(ends, key=ends.get)
    assert first.get("data-name") == name
    assert first.findtext(SVG + "text") == f"{name} ends first"
    assert float(first.find(SVG + "line").get("x1")) == ends[name]


def test_the_moving_buckets_leave_when_they_are_full():
    root = read("ddp_buckets")
    ready = {layer.get("data-layer"): edges(layer)[1] for layer in with_class(root, "pass")}
    first, second = with_class(root, "message")
    assert max(ready["4"], ready["3"]) <= edges(first)[0] < ready["2"]
    assert edges(second)[0] >= ready["1"]


def test_each_message_comes_from_its_own_bucket():
    root = read("ddp_buckets")
    gradients = {each.get("data-layer"): edges(each) for each in with_class(root, "gradient")}
    messages = {each.get("data-bucket"): edges(each) for each in with_class(root, "message")}
    arrows = {each.get("data-bucket"): each for each in with_class(root, "leaves")}
    inside = {"1": ["4", "3"], "2": ["2", "1"]}
    boxes = with_class(root, "bucket")
    assert [each.get("data-bucket") for each in boxes] == list(inside)
    for bucket in boxes:
        number = bucket.get("data-bucket")
        left, right = edges(bucket)
        assert bucket.findtext(SVG + "text") == f"bucket {number}"
        held = [layer for layer, (begin, end) in gradients.items() if left < begin < end < right]
        assert held == inside[number]
        shaft = next(arrows[number].iter(SVG + "line"))
        assert left < float(shaft.get("x1")) < right, "it begins below its own bucket"
        tip = next(arrows[number].iter(SVG + "polygon")).get("points").split(",")[0]
        begin, end = messages[number]
        assert begin < float(tip) < end


def test_the_dashed_line_says_what_it_is():
    (now,) = with_class(read("ddp_buckets"), "now")
    assert now.findtext(SVG + "text") == "now"
    assert now.find(SVG + "line").get("stroke-dasharray")
    assert now.get("opacity") == "0", "hidden where nothing moves"
    style = read("ddp_buckets").findtext(SVG + "style")
    (frames,) = re.findall(r"@keyframes now \{ (.*) \}", style)
    seen = [int(opacity) for opacity in re.findall(r"opacity: (\d)", frames)]
    assert seen == [0, 0, 1, 1, 1], "it appears when it begins to move"


def test_the_film_begins_complete_and_stops_for_those_who_ask():
    style = read("ddp_buckets").findtext(SVG + "style")
    rule = "@media (prefers-reduced-motion: reduce) { .moves { animation: none; } }"
    assert style.rstrip().endswith(rule)
    assert "later" not in style, "nothing is hidden where nothing moves"
    animated = set(re.findall(r"\.(\w+) \{ animation-name: (?:\w+); \}", style))
    frames = dict(re.findall(r"@keyframes (\w+) \{ (.*) \}", style))
    assert frames.keys() == animated and len(animated) == 11
    for text in frames.values():
        assert text.startswith(("0.00% { opacity: 1 }", "0.00% { transform: translate(0px, 0px)"))
        times = [float(time) for time in re.findall(r"([\d.]+)% \{", text)]
        assert times == sorted(times) and times[-1] == 100
    for element in read("ddp_buckets").iter():
        if animated & set(classes(element)):
            assert "moves" in classes(element)


def test_messages_are_added_up_by_their_place():
    gradients = [{"upper": 10, "lower": 1}, {"upper": 0, "lower": 2}]  # as in the notebook
    orders = with_class(read("ddp_crossed"), "orders")
    assert [each.get("data-name") for each in orders] == ["the same order", "another order"]
    mixed = []
    for each in orders:
        for total in with_class(each, "sum"):
            place = total.get("data-place")
            names = []
            expected = 0
            for message in with_class(each, "message"):
                if message.get("data-place") == place:
                    name = message.get("data-gradient")
                    value = gradients[int(message.get("data-rank"))][name]
                    assert message.findtext(SVG + "text") == f"{name}: {value}"
                    names.append(name)
                    expected += value
            assert len(names) == 2
            text = total.findtext(SVG + "text")
            if names[0] == names[1]:
                assert text == f"{names[0]}: {expected}"
            else:
                assert text == f"{expected}, mixed"
                mixed.append(expected)
    assert mixed == [12, 1]
