"""notebooks/src/build.py and run.py, on small notebooks made here."""

import os

import build
import course
import nbformat
import pytest
import run

CHAPTER = """\
# %% [markdown]
# # 01 · A tiny chapter
#
# As in deeper: More of
# it, in chapter 02, and not in chapter 01; see `chapter 02`, chapters 01 and
# 02, and arXiv:1512.03385. Reading takes {reading time}.

# %% tags=["measured"]
import sys

for step in range(3):
    print(f"\\rstep {step}", end="")
    sys.stdout.flush()
print()

# %% tags=["fold"]
# check: one and one are two
assert 1 + 1 == 2

# %% [markdown]
# ### Answer 1
#
# It is 42.

# %% tags=["solution"]
6 * 7
"""
DEEPER = "# %% [markdown]\n# # Deeper · More of it\n#\n# As in chapter 01, and more.\n"
FAILING = "# %%\nprint('so far, so good')\n\n# %%\nraise ValueError('planted')\n"


def write_source(folder, name, text):
    path = folder / "src" / f"{name}.py"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    return path


def test_a_chapter_is_built_twice_to_the_same_bytes_with_its_links_and_folds(tmp_path, monkeypatch):
    listed = {"file": "01_tiny", "reading": 5, "assignment": "ps9"}
    monkeypatch.setattr(course, "PARTS", [{"chapter": [listed]}])
    write_source(tmp_path, "01_tiny", CHAPTER)
    write_source(tmp_path, "02_next", "# %% [markdown]\n# # 02 · Another, longer\n")
    write_source(tmp_path, "deeper/01_more", DEEPER)
    target = tmp_path / "01_tiny.ipynb"
    copies = []
    for _ in range(2):
        assert build.main(["01", "--notebooks", str(tmp_path)]) == 0
        copies.append(target.read_bytes())
    assert copies[0] == copies[1]
    links, first, loop, check, heading, answer, solution, after = nbformat.read(target, 4).cells
    assert links.source.startswith("[Start](start.md) · [02 Another, longer →](02_next.ipynb)")
    assert first.source == (
        "# 01 · A tiny chapter\n\nAs in [deeper: More of\nit](deeper/01_more.ipynb), in [chapter "
        "02](02_next.ipynb), and not in chapter 01; see `chapter 02`, chapters 01 and\n"
        "[02](02_next.ipynb), and [arXiv:1512.03385](https://arxiv.org/abs/1512.03385). Reading "
        "takes about 5 minutes.")
    assert loop.outputs[0].text == "step 2\n", "a progress bar keeps its last state"
    assert "nbval-ignore-output" in loop.metadata.tags
    assert check.metadata.jupyter.source_hidden and check.metadata.cellView == "form"
    assert check.metadata.mystnb.code_prompt_show == "check: one and one are two"
    assert heading.source == "### Answer 1" and heading.metadata["jp-MarkdownHeadingCollapsed"]
    assert answer.source == "It is 42." and solution.outputs[0].data["text/plain"] == "42"
    assert after.source.startswith("## Next\n\n**Assignment:** ps9 goes with this chapter.")
    assert "[02 Another, longer →](02_next.ipynb)" in after.source

    assert build.main(["deeper/01", "--notebooks", str(tmp_path)]) == 0
    links, first, _ = nbformat.read(tmp_path / "deeper/01_more.ipynb", 4).cells
    assert "[← 01 A tiny chapter](../01_tiny.ipynb)" in links.source
    assert "As in [chapter 01](../01_tiny.ipynb), and more." in first.source


def test_prose_alone_is_built_without_running_anything(tmp_path, capsys):
    source = write_source(tmp_path, "01_a", "# %% [markdown]\n# # Old\n\n# %%\nimport time\n\n"
                                            "time.time_ns()\n")
    target = tmp_path / "01_a.ipynb"
    prose = ["--prose", "--notebooks", str(tmp_path)]
    assert build.main(prose) == 1, "nothing to take outputs from"
    assert build.main(prose[1:]) == 0
    old = nbformat.read(target, 4)
    source.write_text(source.read_text().replace("Old", "New"))
    assert build.main(prose) == 0
    new = nbformat.read(target, 4)
    assert new.cells[1].source == "# New" and new.cells[2] == old.cells[2]
    source.write_text(source.read_text().replace("time_ns()", "time()"))
    capsys.readouterr()
    assert build.main(prose) == 1
    assert "01_a: not built; not only its prose has changed" in capsys.readouterr().out
    assert nbformat.read(target, 4) == new


def test_what_fails_leaves_the_old_notebook_and_the_others_are_built(tmp_path, capsys):
    write_source(tmp_path, "01_bad", FAILING)
    write_source(tmp_path, "02_dead", "# %%\nimport os\n\nos._exit(0)\n")
    write_source(tmp_path, "03_lost", "# %% [markdown]\n# As in chapter 17.\n")
    write_source(tmp_path, "04_open", '# %% tags=["fold"]\nassert 1 + 1 == 2\n')
    write_source(tmp_path, "05_good", "# %%\n1 + 1\n")
    write_source(tmp_path, "06_long", "# %% [markdown]\n# Takes {reading time}.\n")
    (tmp_path / "01_bad.ipynb").write_text("as it was")
    assert build.main(["--notebooks", str(tmp_path)]) == 1
    assert (tmp_path / "01_bad.ipynb").read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "01_bad.ipynb", "05_good.ipynb", "src"]
    said = capsys.readouterr().out
    assert "01_bad: FAILED in code cell 2" in said and "ValueError: planted" in said
    assert "02_dead: FAILED in code cell 1" in said
    assert "03_lost: not built; 03_lost speaks of chapter 17, which there is not" in said
    assert "04_open: not built; a folded cell begins with a label" in said
    assert "06_long: not built; 06_long says how long reading takes, and course.toml d" in said


def test_a_chapter_that_shows_mnist_is_not_rebuilt_with_digits_unasked(
        tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = write_source(tmp_path, "01_data", "# %%\nfrom helpers import load_data\n\n"
                                               "print(load_data('mnist', limit=1))\n")
    target = tmp_path / "01_data.ipynb"
    build.build(source, target)
    notebook = nbformat.read(target, 4)
    assert build.data_used(notebook) == "digits", "a first build shows what there is"
    notebook.cells[1].outputs[0].text = "Data: mnist, 1 training and 1 test images, from there"
    nbformat.write(notebook, target)
    there = ["--notebooks", str(tmp_path)]
    assert build.main(there) == 1
    assert "its outputs show mnist, and a run here would show digits" in capsys.readouterr().out
    assert build.data_used(nbformat.read(target, 4)) == "mnist"
    assert build.main([*there, "--data", "digits"]) == 0
    assert build.data_used(nbformat.read(target, 4)) == "digits"


@pytest.mark.parametrize("asked, chosen", [
    (["3"], ["03_a"]), (["deeper/01", "02"], ["02_b", "deeper/01_d", "deeper/01_e"]),
    (["notebooks/src/deeper/01_d.py", "03_a.ipynb"], ["03_a", "deeper/01_d"]),
    ([], ["02_b", "03_a", "deeper/01_d", "deeper/01_e"])])
def test_notebooks_are_chosen_by_number_name_or_path(tmp_path, asked, chosen):
    for name in ("03_a", "02_b", "deeper/01_d", "deeper/01_e"):
        write_source(tmp_path, name, "")
    found = build.choose(build.sources(tmp_path), asked)
    assert [course.key(path) for path in found] == chosen
    with pytest.raises(SystemExit, match="There is no notebook 07; there are 02_b, 03_a"):
        build.choose(build.sources(tmp_path), ["07"])


def test_run_goes_on_after_a_failure_and_changes_nothing(tmp_path, capsys):
    for name, code in [("01_bad", "1 / 0"), ("02_good", "print('Data: digits, 9 images')")]:
        cells = [nbformat.v4.new_code_cell(code)]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / f"{name}.ipynb")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert run.main(["--notebooks", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "FAILED in code cell 1" in said and "ZeroDivisionError" in said
    assert "digits" in said.splitlines()[-1]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_course_data_is_made_absolute(monkeypatch):
    monkeypatch.setenv("COURSE_DATA", "~/some/where")
    build.absolute_course_data()
    assert os.environ["COURSE_DATA"] == os.path.expanduser("~/some/where")
