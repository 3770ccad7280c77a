"""Chapter 16's drawings show what ZeRO's stages hold, and when FSDP's weights are whole."""


from svg import read


RANKS = range(4)


def all_of(root, kind):
    return [element for element in root.iter() if element.get("class") == kind]


def test_stage_s_divides_the_last_s_kinds():
    """Bytes that a rank holds, by the formulas of the chapter's summary: of 16 bytes for Adam."""
    size = {"weights": 4, "gradients": 4, "state": 8}
    held = {(stage, rank): 0 for stage in RANKS for rank in RANKS}
    quarters = {}
    for holding in all_of(read("who_holds_what"), "holding"):
        stage, rank = int(holding.get("data-stage")), int(holding.get("data-rank"))
        mine = [int(q.get("data-quarter")) for q in all_of(holding, "quarter")]
        assert mine == sorted(set(mine))
        held[stage, rank] += size[holding.get("data-kind")] * len(mine) / 4
        quarters.setdefault((stage, holding.get("data-kind")), []).extend(mine)
    for rank in RANKS:
        assert [held[stage, rank] for stage in RANKS] == [16, 8 + 8 / 4, 4 + 12 / 4, 16 / 4]
    assert len(quarters) == 12
    for mine in quarters.values():
        assert set(mine) == set(RANKS), "together the ranks hold the whole"


def test_a_weight_is_whole_once_in_each_pass_and_never_two_at_once():
    spans = []
    for whole in all_of(read("gathered_weight"), "whole"):
        begin = float(whole.get("x"))
        spans.append((begin, begin + float(whole.get("width")), whole.get("data-layer"),
                      whole.get("data-pass")))
    spans.sort()
    assert [span[2:] for span in spans] == [("layer 2", "forward"), ("layer 3", "forward"),
                                            ("layer 3", "backward"), ("layer 2", "backward")]
    for one, other in zip(spans, spans[1:]):
        assert one[1] < other[0], "freed before the next is gathered"
    gradients = all_of(read("gathered_weight"), "gradient")
    assert len(gradients) == 2
