"""notebooks/src/build.py and run.py, on small notebooks made here."""

import json
import os

import build
import nbformat
import pytest
import run
from nbformat.v4 import new_code_cell, new_notebook

SOURCE = """\
# %% [markdown]
# # A tiny chapter

# %% tags=["measured"]
import sys

for step in range(3):
    print(f"\\rstep {step}", end="")
    sys.stdout.flush()
print()

# %% [markdown]
# The answer, folded away:

# %% tags=["solution"] jupyter={"source_hidden": true}
6 * 7

# %%
6 * 7
"""

FAILING = """\
# %%
print("so far, so good")

# %%
raise ValueError("planted")
"""


def write_source(folder, name, text):
    path = folder / "src" / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def write_notebook(folder, name, *cells):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, folder / f"{name}.ipynb")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The notebook built from SOURCE, as (bytes of a first build, bytes of a second, parsed)."""
    folder = tmp_path_factory.mktemp("notebooks")
    write_source(folder, "01_tiny", SOURCE)
    target = folder / "01_tiny.ipynb"
    copies = []
    for _ in range(2):
        assert build.main(["--notebooks", str(folder)]) == 0
        copies.append(target.read_bytes())
    return *copies, nbformat.read(target, as_version=4)


def test_two_builds_are_byte_for_byte_the_same(built):
    first, second, _ = built
    assert first == second


def test_metadata_is_reduced_to_kernel_and_language(built):
    notebook = built[2]
    assert notebook.metadata == build.METADATA
    assert [cell.metadata for cell in notebook.cells] == [
        {},
        {"tags": ["measured", "nbval-ignore-output"]},
        {},
        {"tags": ["solution"], "jupyter": {"source_hidden": True}},
        {},
    ]


def test_ids_come_from_the_source_and_differ_where_it_repeats(built):
    ids = [cell.id for cell in built[2].cells]
    assert ids[4] == f"{ids[3]}-2"
    assert len(set(ids)) == 5


def test_cells_are_executed_and_counted_from_one(built):
    counts = [cell.execution_count for cell in built[2].cells if cell.cell_type == "code"]
    assert counts == [1, 2, 3]


def test_a_progress_bar_keeps_only_its_last_state(built):
    (output,) = built[2].cells[1].outputs
    assert output.text == "step 2\n"


def test_streams_are_merged_up_to_the_next_other_output():
    def stream(text, name="stdout"):
        return nbformat.v4.new_output("stream", name=name, text=text)

    figure = nbformat.v4.new_output("display_data", {"text/plain": "a figure"})
    merged = build.merge_streams([
        stream("a\n"), stream("b\n"), stream("oh\n", "stderr"), figure, stream("c\n")])
    assert [output.get("text") for output in merged] == ["a\nb\n", "oh\n", None, "c\n"]


def test_widgets_leave_their_text_only():
    cell = nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output(
        "display_data", {build.WIDGET: {"model_id": "1"}, "text/plain": "0/3"})])
    build.normalise(nbformat.v4.new_notebook(cells=[cell]))
    assert cell.outputs[0].data == {"text/plain": "0/3"}


def test_a_failing_cell_leaves_the_old_notebook_and_the_others_are_built(tmp_path, capsys):
    write_source(tmp_path, "01_bad", FAILING)
    write_source(tmp_path, "02_good", "# %%\n1 + 1\n")
    old = tmp_path / "01_bad.ipynb"
    old.write_text("as it was")

    assert build.main(["--notebooks", str(tmp_path)]) == 1
    assert old.read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "01_bad.ipynb", "02_good.ipynb", "src"]
    printed = capsys.readouterr().out
    assert "01_bad: FAILED in code cell 2" in printed
    assert "ValueError: planted" in printed


def test_a_write_cut_short_leaves_the_old_notebook(tmp_path, monkeypatch):
    def full_disk(notebook, path):
        path.write_text("half a note")
        raise OSError("no space left")

    source = write_source(tmp_path, "01_a", "# %%\n1\n")
    target = tmp_path / "01_a.ipynb"
    target.write_text("as it was")
    monkeypatch.setattr(build.nbformat, "write", full_disk)
    with pytest.raises(OSError, match="no space left"):
        build.build(source, target)
    assert target.read_text() == "as it was"


def test_a_kernel_that_dies_is_a_failure(tmp_path, capsys):
    write_source(tmp_path, "01_dead", "# %%\nimport os\n\nos._exit(0)\n")
    assert build.main(["--notebooks", str(tmp_path)]) == 1
    assert "01_dead: FAILED in code cell 1" in capsys.readouterr().out
    assert not (tmp_path / "01_dead.ipynb").exists()


def test_stderr_gets_a_warning(tmp_path, capsys):
    write_source(tmp_path, "01_loud", "# %%\nimport sys\n\nprint('oops', file=sys.stderr)\n")
    assert build.main(["--notebooks", str(tmp_path)]) == 0
    assert "warning: cell 1 wrote to stderr: 'oops\\n'" in capsys.readouterr().out


def test_only_the_chapters_asked_for(tmp_path):
    for name in ("01_a", "02_b", "03_c"):
        write_source(tmp_path, name, "")
    files = list(tmp_path.glob("src/*.py"))
    assert [file.stem for file in build.choose(files, ["3", "01"])] == ["01_a", "03_c"]
    assert [file.stem for file in build.choose(files, [])] == ["01_a", "02_b", "03_c"]
    with pytest.raises(SystemExit, match="no chapter 09"):
        build.choose(files, ["01", "09"])
    with pytest.raises(SystemExit, match="no chapters"):
        build.choose([], [])


@pytest.mark.parametrize("given", ["some/where", "~/some/where", "{}/some/where"])
def test_course_data_is_made_absolute(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COURSE_DATA", given.format(tmp_path))
    build.absolute_course_data()
    assert os.environ["COURSE_DATA"] == str(tmp_path / "some" / "where")


@pytest.mark.parametrize("given", [None, ""])
def test_without_course_data_nothing_is_made_up(monkeypatch, given):
    monkeypatch.delenv("COURSE_DATA", raising=False)
    if given is not None:
        monkeypatch.setenv("COURSE_DATA", given)
    build.absolute_course_data()
    assert os.environ.get("COURSE_DATA") == given


def test_run_goes_on_after_a_failure_and_says_so(tmp_path, capsys):
    write_notebook(tmp_path, "01_bad", "x = 1", "1 / 0")
    write_notebook(tmp_path, "02_good", "print('Data: digits, 1,797 images')")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    report = tmp_path / "build" / "run.json"

    assert run.main(["--notebooks", str(tmp_path), "--json", str(report)]) == 1
    bad, good = json.loads(report.read_text())["chapters"]
    assert (bad["chapter"], bad["data"], bad["error"]["cell"]) == ("01_bad", "-", 2)
    assert "ZeroDivisionError" in bad["error"]["reason"]
    assert (good["chapter"], good["cells"], good["data"], good["error"]) == (
        "02_good", 1, "digits", None)
    printed = capsys.readouterr().out
    assert "FAILED in code cell 2" in printed and "ZeroDivisionError" in printed
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(("tags", "left"), [
    ([[], ["torch"], ["measured"]], [0, 2]),
    ([["torch"], [], ["torch"]], []),  # the first: so the whole chapter
    ([[], []], [0, 1]),
])
def test_run_passes_over_what_needs_pytorch_where_it_is_not_there(
        tmp_path, monkeypatch, capsys, tags, left):
    cells = [new_code_cell(f"print({n})", metadata={"tags": t}) for n, t in enumerate(tags)]
    nbformat.write(new_notebook(cells=cells), tmp_path / "01_some.ipynb")
    for there, expected in (True, list(range(len(tags)))), (False, left):
        monkeypatch.setattr(run, "find_spec", lambda name, there=there: there or None)
        row = run.run(tmp_path / "01_some.ipynb")
        assert (row["cells"], row["skipped"]) == (len(expected), len(tags) - len(expected))
        assert row["error"] is None
    report = tmp_path / "run.json"
    assert run.main(["--notebooks", str(tmp_path), "--json", str(report)]) == 0
    assert ("make setup TORCH=1" in capsys.readouterr().out) == (len(left) < len(tags))


def test_run_succeeds_where_no_cell_fails(tmp_path):
    write_notebook(tmp_path, "01_good", "x = 1")
    report = tmp_path / "run.json"
    assert run.main(["--notebooks", str(tmp_path), "--json", str(report)]) == 0
