"""Each cell *Your turn*: what is said of the stub, of the answer, and of a mistake in it.

What such a cell needs is in the chapter's first code cell or in cells with the same tag; so these
run by themselves here.
"""

import pytest
from build import choose, needs_torch, read_source, sources
from course import NOTEBOOKS, key

# By chapter: what is right in the answer, and a mistake that somebody could make there.
MISTAKES = {
    "01": ("total = first + second", "total = first"),
    "02": ("len(batch) % k", "0"),
    "03": ("(chunk + round_number) % k", "(chunk + round_number + 1) % k"),
    "04": ("lr / n", "lr / len(grads)"),
    "05": ("if len(images) > 0:", "if True:"),
    "06": ("step(len(images))", "step(len(devices))"),
    "07": ("nd.minimum(1, limit / squares.sqrt())", "limit / squares.sqrt()"),
    "08": ("images += size", "images += 1"),
    "09": ("        variance += size * (shard_mean - mean) ** 2 / n  # between\n", ""),
    "10": ("sending - busy", "sending & busy"),
    "11": ("seconds.mean() - b * counts.mean()", "seconds[0]"),
    "12": ("end - begin", "round(n * speed / sum(speeds))"),
    "13": ("        optimizer.zero_grad()\n", ""),
    "14": ("while next_bucket < len", "if next_bucket < len"),
    "15": ('torch.set_rng_state(kept["random"])', "pass"),
    "16": ("    p.grad = None", ""),
    "17": ("    output.backward(gradient)", "        output.sum().backward()"),
    "18": ("gradient.clone()", "gradient"),
    "19": ("min(micro_batches, stages - stage)", "stages - stage"),
    "20": ("for rank in [0, 1]", "for rank in [0, 1, 2, 3]"),
}
CELLS = {}
for path in choose(sources(), []):
    notebook = read_source(path)
    tagged = [cell for cell in notebook.cells if "your-turn" in cell.metadata.get("tags", [])]
    if tagged:
        CELLS[key(path)] = (notebook, tagged)


def said_of(chapter, capsys, monkeypatch, mistake=None):
    """What the stub's cell prints, and the answer's."""
    notebook, tagged = CELLS[chapter]
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    if needs_torch(notebook):
        pytest.importorskip("torch", reason="PyTorch is not installed: make setup TORCH=1")
    monkeypatch.chdir(NOTEBOOKS)
    variables, printed = {"__name__": "__main__"}, []
    for cell in [first, *tagged]:
        source = cell.source
        if mistake and "solution" in cell.metadata.get("tags", []):
            right, wrong = mistake
            assert right in source
            source = source.replace(right, wrong)
        exec(compile(source, f"{chapter}, {cell.id}", "exec"), variables)
        printed.append(capsys.readouterr().out)
    return [text for text, cell in zip(printed[1:], tagged, strict=True)
            if "your_turn(" in cell.source]


@pytest.mark.parametrize("chapter", CELLS)
def test_a_stub_is_not_written_yet_the_answer_is_right_and_a_mistake_is_named(
        chapter, capsys, monkeypatch):
    stub, answer = said_of(chapter, capsys, monkeypatch)
    assert stub.endswith(": not written yet\n") and stub.count("\n") == 1
    assert ": right on " in answer
    (_, wrong) = said_of(chapter, capsys, monkeypatch, MISTAKES[chapter[:2]])
    assert "expected " in wrong or " raised " in wrong
