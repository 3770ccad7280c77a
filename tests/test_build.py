"""notebooks/src/build.py and run.py, on small notebooks made here."""

import json
import os
import re
import subprocess
import sys

import build
import course
import nbformat
import pytest
import run
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

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
# ### Answer 1
#
# As chapter 02 says, and not chapter 01; see `chapter 02` and chapters 01 and
# 02. Reading takes {reading time}.

# %% tags=["solution"]
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
    path.parent.mkdir(exist_ok=True, parents=True)
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
    write_source(folder, "02_next", "# %% [markdown]\n# # 02 · Another\n")
    target = folder / "01_tiny.ipynb"
    copies = []
    for _ in range(2):
        assert build.main(["01", "--notebooks", str(folder)]) == 0
        copies.append(target.read_bytes())
    return *copies, nbformat.read(target, as_version=4)


def test_two_builds_are_byte_for_byte_the_same(built):
    first, second, _ = built
    assert first == second


def test_metadata_is_reduced_to_kernel_and_language(built):
    notebook = built[2]
    assert notebook.metadata == build.METADATA
    links = {"tags": ["navigation", "remove-cell"]}
    assert [cell.metadata for cell in notebook.cells] == [
        links,
        {},
        {"tags": ["measured", "nbval-ignore-output"]},
        {"jp-MarkdownHeadingCollapsed": True},
        {},
        {"tags": ["solution"]},
        {},
        links,
    ]


def test_chapters_are_linked_with_each_other(built):
    first, _, _, heading, prose, *_, last = (cell.source for cell in built[2].cells)
    links, _, how = first.partition("\n\n")
    assert links == "[Start](start.md) · [02 Another →](02_next.ipynb)"
    assert how == course.how_to_run("01_tiny", course.repository())
    assert last == f"## Next\n\n{links}"
    assert heading == "### Answer 1", "what stands in its cell would not be folded"
    assert prose == (
        "As [chapter 02](02_next.ipynb) says, and not chapter 01; see `chapter 02` "
        "and chapters 01 and\n[02](02_next.ipynb). Reading takes about 5 minutes.")


def test_a_paper_is_linked_but_not_in_code():
    text = "K. He et al., arXiv:1512.03385; `arXiv:1512.03385`, arXiv:1512.0338599"
    assert course.link_mentions(text, "01_a", {"01_a": "01 A"}) == (
        "K. He et al., [arXiv:1512.03385](https://arxiv.org/abs/1512.03385); `arXiv:1512.03385`, "
        "arXiv:1512.0338599")


@pytest.mark.parametrize(("name", "links"), [
    ("01_a", "[Start](start.md) · [02 B →](02_b.ipynb)"),
    ("02_b", "[← 01 A](01_a.ipynb) · [Start](start.md) · [03 C →](03_c.ipynb)"),
    ("03_c", "[← 02 B](02_b.ipynb) · [Start](start.md) · [The map →](map.md)"),
])
def test_each_chapter_leads_to_its_neighbours(name, links):
    titles = {"01_a": "01 A", "02_b": "02 B", "03_c": "03 C"}
    assert course.navigation(name, titles) == links


@pytest.mark.parametrize(("text", "linked"), [
    ("In chapter 02", "In [chapter 02](02_b.ipynb)"),
    ("Chapters 02\nand 03", "Chapters [02](02_b.ipynb)\nand [03](03_c.ipynb)"),
    ("chapters 01, 02 and 03", "chapters 01, [02](02_b.ipynb) and [03](03_c.ipynb)"),
    ("chapter 01, which is this", "chapter 01, which is this"),
    ("[chapter 02](elsewhere.md) and `chapter 03`", "[chapter 02](elsewhere.md) and `chapter 03`"),
    ("chapter 2 of a book, chapter 020", "chapter 2 of a book, chapter 020"),
])
def test_other_chapters_become_links_where_they_are_named(text, linked):
    assert course.link_mentions(text, "01_a", {"01_a": "A", "02_b": "B", "03_c": "C"}) == linked


@pytest.mark.parametrize(("name", "page"), [
    ("01_a", "(running.md)"), ("deeper/01_a", "(../running.md)")])
def test_without_an_address_a_notebook_says_what_to_type_and_leads_nowhere_else(name, page):
    line = course.how_to_run(name, "")
    assert "make lab" in line and page in line
    assert "http" not in line and "git clone" not in line


@pytest.mark.parametrize(("name", "page"), [
    ("09_a", "(running.md)"), ("deeper/01_a", "(../running.md)")])
def test_with_an_address_a_notebook_leads_to_it(name, page):
    line = course.how_to_run(name, "https://github.com/an-owner/a.name")
    assert "`git clone https://github.com/an-owner/a.name`" in line and page in line
    assert set(re.findall(r"https://[^)`]+", line)) == {
        "https://github.com/an-owner/a.name", "https://codespaces.new/an-owner/a.name"}


def test_with_an_address_chapters_that_ran_with_colabs_versions_say_what_to_run_there():
    """What is to be run is run here, but for the clone: it must find the chapter's imports."""
    line = course.how_to_run("08_a", "https://github.com/an-owner/a.name")
    assert ("https://colab.research.google.com/github/an-owner/a.name/blob/main/notebooks/08_a.ipynb"
            in line)
    code = re.search(r"```\n(.*?)```", line, re.DOTALL)[1]
    clone, install, folder, *rest = code.splitlines()
    assert clone == "!git clone -q --depth 1 https://github.com/an-owner/a.name many-devices"
    locked = (course.NOTEBOOKS.parent / "requirements/cpu.txt").read_text()
    for package in re.findall(r"\S+==\S+", install):
        assert re.search(rf"^{re.escape(package)}\b", locked, re.MULTILINE), "the course's version"
    assert folder == "%cd many-devices/notebooks"
    root = str(course.NOTEBOOKS.parent)
    program = "\n".join(rest).replace("/content/many-devices", root)
    # -S: without the environment's own way to helpers. The second import is that of a program which
    # a chapter starts.
    program += ("\nimport helpers, subprocess\n"
                "subprocess.run([sys.executable, '-S', '-c', 'import helpers'], check=True)")
    subprocess.run([sys.executable, "-S", "-c", program], cwd="/", check=True)


@pytest.mark.parametrize("address", [
    "github.com/a/b", "https://github.com/a", "https://github.com/a/b/", "https://github.com/a/b/c",
    "https://example.org/a/b", "git@github.com:a/b"])
def test_an_address_that_leads_nowhere_is_refused(address):
    with pytest.raises(ValueError, match=r"course\.toml: repository = .* must be like"):
        course.repository(address)


def test_an_address_may_be_missing():
    assert course.repository("") == ""
    assert course.repository("https://github.com/an-owner/a.name") != ""


def test_a_chapter_that_there_is_not_can_not_be_named(tmp_path):
    source = write_source(tmp_path, "01_a", "# %% [markdown]\n# As in chapter 17.\n")
    with pytest.raises(ValueError, match="01_a speaks of chapter 17, which there is not"):
        build.read_source(source)


@pytest.mark.parametrize(("cells", "minutes"), [
    ([], 5),
    ([new_markdown_cell("word " * 1300)], 20),
    ([new_markdown_cell("[word](elsewhere/or/there.ipynb) " * 1300)], 20),
    ([new_markdown_cell("```\n" + "word " * 1300 + "\n```")], 5),
    ([new_code_cell("x = 1\n\n" * 120)], 20),
    ([new_code_cell("x = 1\n" * 120, metadata={"tags": ["fold"]})], 5),
    ([new_code_cell(f"show(fig{n})", metadata={"tags": ["fold"]}) for n in range(20)], 20),
    ([new_markdown_cell("![many words that nobody reads](a.svg)\n\n" * 20)], 20),
    ([new_markdown_cell("word " * 1300), new_markdown_cell("### Answer 1"),
      new_code_cell("x = 1\n" * 120)], 20),
])
def test_reading_time_is_words_open_lines_and_pictures_without_the_answers(cells, minutes):
    assert course.minutes(new_notebook(cells=cells)) == minutes


@pytest.mark.parametrize(("number", "text"), [
    (0, "0 min"), (45, "45 min"), (60, "1 h"), (225, "3 h 45 min")])
def test_hours(number, text):
    assert course.as_hours(number) == text


def test_ids_come_from_the_source_and_differ_where_it_repeats(built):
    ids = [cell.id for cell in built[2].cells]
    assert ids[6] == f"{ids[5]}-2"
    assert len(set(ids)) == 8


def test_cells_are_executed_and_counted_from_one(built):
    counts = [cell.execution_count for cell in built[2].cells if cell.cell_type == "code"]
    assert counts == [1, 2, 3]


def test_a_progress_bar_keeps_only_its_last_state(built):
    (output,) = built[2].cells[2].outputs
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


def test_a_mistake_in_a_source_is_told_in_a_line_and_the_others_are_built(tmp_path, capsys):
    write_source(tmp_path, "01_bad", "# %% [markdown]\n# As in chapter 17.\n")
    write_source(tmp_path, "02_good", "# %%\n1 + 1\n")
    write_source(tmp_path, "deeper/07_alone", "# %% [markdown]\n# # Deeper · Alone\n")
    assert build.main(["--notebooks", str(tmp_path)]) == 1
    bad, good, alone = capsys.readouterr().out.splitlines()
    assert bad == "01_bad: not built; 01_bad speaks of chapter 17, which there is not"
    assert good.startswith("02_good: built in ")
    assert alone == ("deeper/07_alone: not built; deeper/07_alone belongs to chapter 07, of which "
                     "there are 0 sources, 07_*.py, and must be one")


@pytest.mark.parametrize("error", [
    course.Mistake("what is wrong"), FileNotFoundError(2, "what is wrong", "01_a.ipynb")])
def test_tables_that_can_not_be_made_are_told_in_a_line(tmp_path, monkeypatch, capsys, error):
    def fail():
        raise error

    write_source(tmp_path, "01_a", "# %%\n1 + 1\n")
    monkeypatch.setattr(build, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(course, "write_contents", fail)
    assert build.main(["--notebooks", str(tmp_path)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"README.md, start.md and CITATION.cff: not made anew; {error}"


ENTRY = {"file": "01_a", "able": "do it", "running": "1 s"}


def test_a_chapter_is_off_the_short_path_unless_it_says_so_and_parts_have_roman_numbers(
        tmp_path, monkeypatch):
    write_notebook(tmp_path, "01_a", "1 + 1")
    parts = [{"name": "Part", "chapter": [ENTRY, ENTRY | {"short": True}]} for _ in range(14)]
    monkeypatch.setattr(course, "PARTS", parts)
    found = course.chapters(tmp_path)
    assert [name.partition(".")[0] for name, _ in found] == (
        "I II III IV V VI VII VIII IX X XI XII XIII XIV".split())
    assert [row["short"] for row in found[4][1]] == [False, True]


@pytest.mark.parametrize(("key", "entry"), [
    ("able", ENTRY), ("running", ENTRY),
    ("able", ENTRY | {"deeper": [{"file": "01_more", "running": "1 s"}]})])
def test_an_entry_that_lacks_something_is_named(tmp_path, monkeypatch, key, entry):
    entry = dict(entry)
    file = "deeper/01_more" if "deeper" in entry else "01_a"
    if file == "01_a":
        del entry[key]
    write_notebook(tmp_path, "01_a", "1 + 1")
    monkeypatch.setattr(course, "PARTS", [{"name": "Part", "chapter": [entry]}])
    with pytest.raises(course.Mistake, match=rf"course\.toml: the entry of {file} lacks {key}$"):
        course.chapters(tmp_path)


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
    with pytest.raises(SystemExit, match="no notebook 09; there are 01_a, 02_b, 03_c"):
        build.choose(files, ["01", "09"])
    with pytest.raises(SystemExit, match="no chapters"):
        build.choose([], [])


@pytest.mark.parametrize(("asked", "chosen"), [
    ([], ["01_a", "02_b", "deeper/01_more", "deeper/02_less", "deeper/02_more"]),
    (["02"], ["02_b"]),
    (["deeper/02"], ["deeper/02_less", "deeper/02_more"]),
    (["deeper/02_more", "1"], ["01_a", "deeper/02_more"]),
    (["02_b.ipynb"], ["02_b"]),
    (["deeper/2"], ["deeper/02_less", "deeper/02_more"]),
])
def test_deeper_notebooks_are_asked_for_by_folder(tmp_path, asked, chosen):
    for name in ("02_b", "01_a", "deeper/02_more", "deeper/02_less", "deeper/01_more"):
        write_source(tmp_path, name, "")
    files = build.sources(tmp_path)
    assert [course.key(file) for file in build.choose(files, asked)] == chosen
    for unknown in ("deeper/03", "more", "0", "02_", "deeper/02_mo"):
        with pytest.raises(SystemExit, match=f"no notebook {unknown};"):
            build.choose(files, [unknown])


DEEPER = """\
# %% [markdown]
# # Deeper · More of it
#
# As in chapter 01, and in deeper: Something else. See deeper: More of
# it, which is this one.

# %% tags=["file:kept.py"]
# kept.py
print("kept")

# %%
import pathlib
import subprocess
import sys

print(pathlib.Path.cwd().name)
print(subprocess.check_output([sys.executable, "kept.py"], text=True))

# %% tags=["fold", "measured"]
# check: one and one are two
assert 1 + 1 == 2
"""


@pytest.fixture(scope="module")
def deeper(tmp_path_factory):
    """The folder in which a chapter and two deeper notebooks were built."""
    folder = tmp_path_factory.mktemp("notebooks")
    write_source(folder, "01_tiny", "# %% [markdown]\n# # 01 · Tiny\n#\n# As in deeper: More of\n"
                 "# it says, and deeper: Something else.\n")
    write_source(folder, "deeper/01_more", DEEPER)
    write_source(folder, "deeper/01_else", "# %% [markdown]\n# # Deeper · Something else\n")
    write_source(folder, "deeper/01_list", "# %% [markdown]\n# # Deeper · One, two and more\n#\n"
                 "# In deeper: One, two and more, deeper: Something else, and chapter 01, too.\n"
                 "#\n# deeper: More of it, deeper: Something else, and chapter 01, too.\n")
    assert build.main(["--notebooks", str(folder)]) == 0
    return folder


def test_a_deeper_notebook_is_built_in_its_folder_and_linked_both_ways(deeper):
    chapter = nbformat.read(deeper / "01_tiny.ipynb", as_version=4)
    assert chapter.cells[1].source == (
        "# 01 · Tiny\n\nAs in [deeper: More of\nit](deeper/01_more.ipynb) says, and "
        "[deeper: Something else](deeper/01_else.ipynb).")
    notebook = nbformat.read(deeper / "deeper/01_more.ipynb", as_version=4)
    links, _, how = notebook.cells[0].source.partition("\n\n")
    assert links == ("*Optional: no chapter needs this.* "
                     "[← 01 Tiny](../01_tiny.ipynb) · [Start](../start.md)")
    assert how.startswith("*To run this notebook")
    assert notebook.cells[1].source == (
        "# Deeper · More of it\n\nAs in [chapter 01](../01_tiny.ipynb), and in "
        "[deeper: Something else](../deeper/01_else.ipynb). See deeper: More of\nit, which is "
        "this one.")


def test_a_title_may_have_a_comma_and_a_mention_be_followed_by_one(deeper):
    notebook = nbformat.read(deeper / "deeper/01_list.ipynb", as_version=4)
    assert notebook.cells[1].source == (
        "# Deeper · One, two and more\n\nIn deeper: One, two and more, "
        "[deeper: Something else](../deeper/01_else.ipynb), and [chapter 01](../01_tiny.ipynb), "
        "too.\n\n[deeper: More of it](../deeper/01_more.ipynb), "
        "[deeper: Something else](../deeper/01_else.ipynb), and [chapter 01](../01_tiny.ipynb), "
        "too.")


def test_a_program_is_there_when_the_cells_that_start_it_run(deeper):
    notebook = nbformat.read(deeper / "deeper/01_more.ipynb", as_version=4)
    assert notebook.cells[3].outputs[0].text == "deeper\nkept\n\n"
    assert (deeper / "deeper/kept.py").read_text() == 'print("kept")\n'


def test_a_folded_cell_is_folded_everywhere_and_labelled(deeper):
    cell = nbformat.read(deeper / "deeper/01_more.ipynb", as_version=4).cells[4]
    label = "check: one and one are two"
    assert cell.metadata == {
        "tags": ["fold", "measured", "nbval-ignore-output", "hide-input"],
        "jupyter": {"source_hidden": True}, "cellView": "form",
        "mystnb": {"code_prompt_show": label, "code_prompt_hide": label}}


@pytest.mark.parametrize("first", [
    "1 + 1", "# one and one", "# check:", "#check: one", "", "# draw "])
def test_a_folded_cell_without_a_label_is_refused(tmp_path, capsys, first):
    write_source(tmp_path, "01_a", f'# %% tags=["fold"]\n{first}\nassert 1 + 1 == 2\n')
    assert build.main(["--notebooks", str(tmp_path)]) == 1
    assert "01_a: not built; a folded cell begins with a label" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["deeper: Nothing of it", "deeper: More\n# of"])
def test_a_deeper_notebook_that_there_is_not_can_not_be_named(tmp_path, words):
    write_source(tmp_path, "deeper/01_more", DEEPER)
    source = write_source(tmp_path, "01_a", f"# %% [markdown]\n# As in {words}.\n")
    with pytest.raises(ValueError, match="01_a speaks of the deeper notebook '"):
        build.read_source(source)


@pytest.mark.parametrize(("tags", "source", "found"), [
    (["measured"], "ROUNDS = 15", "ROUNDS = 15"),
    (["few:ROUNDS = 15=>ROUNDS = 3"], "ROUNDS = 15\nx = 1", "ROUNDS = 3\nx = 1"),
    (["few:range(9)=>range(2)", "few:1_000=>10"], "range(9), 1_000", "range(2), 10"),
    (["few:x >= 15=>x >= 3"], "x >= 15", "x >= 3"),
])
def test_few_rounds(tags, source, found):
    assert build.with_few(new_code_cell(source, metadata={"tags": tags})) == found


@pytest.mark.parametrize(("tag", "message"), [
    ("few:ROUNDS = 15=>ROUNDS = 3", "'ROUNDS = 15' is 0 times"),
    ("few:x=>x", "'x' is 2 times"),
    ("few:x = 1=>y = 1", "differ in their numbers only"),
    ("few:x = 1", "differ in their numbers only"),
])
def test_few_rounds_that_can_not_be_taken(tag, message):
    with pytest.raises(ValueError, match=message):
        build.with_few(new_code_cell("x = 1 + x", metadata={"tags": [tag]}))


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
    report = tmp_path.with_suffix(".json")

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
    assert run.main(["--notebooks", str(tmp_path)]) == 0
    assert ("make setup TORCH=1" in capsys.readouterr().out) == (len(left) < len(tags))


def test_run_succeeds_where_no_cell_fails(tmp_path):
    write_notebook(tmp_path, "01_good", "x = 1")
    assert run.main(["--notebooks", str(tmp_path)]) == 0


@pytest.mark.parametrize("shown, told", [("mnist", True), ("-", False)])
def test_run_says_at_the_end_why_course_data_was_not_used(
        tmp_path, monkeypatch, capsys, shown, told):
    write_notebook(tmp_path, "01_good", f"print('Data: {shown}, 3 images')" * (shown != "-"))
    monkeypatch.setenv("COURSE_DATA", "/not/there")
    monkeypatch.setenv("COURSE_OFFLINE", "1")
    assert run.main(["--notebooks", str(tmp_path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert ("COURSE_DATA=/not/there does not exist" in last) == told


# --- what a chapter shows isn't replaced by something else unasked ------------------------------


DATA = """\
# %%
from helpers import load_data

print(load_data("mnist", limit=1))
"""


@pytest.fixture
def no_mnist(tmp_path, monkeypatch):
    """No place has MNIST, so every chapter goes on with digits."""
    monkeypatch.setenv("COURSE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COURSE_OFFLINE", "1")


def shows(target, data):
    """Make the notebook show that it was built with another data set."""
    notebook = nbformat.read(target, as_version=4)
    (output,) = (output for cell in notebook.cells for output in cell.get("outputs", []))
    output.text = f"Data: {data}, 1 training and 1 test images, from somewhere"
    nbformat.write(notebook, target)


def test_other_data_than_the_outputs_show_are_refused_unless_asked_for(tmp_path, no_mnist, capsys):
    write_source(tmp_path, "01_data", DATA)
    target = tmp_path / "01_data.ipynb"
    there = ["--notebooks", str(tmp_path)]
    assert build.main(there) == 0, "a first build shows what there is"
    assert build.data_used(nbformat.read(target, as_version=4)) == "digits"
    assert build.main(there) == 0

    shows(target, "mnist")
    before = target.read_bytes()
    capsys.readouterr()
    assert build.main(there) == 1
    said = capsys.readouterr().out
    assert "01_data: not built; its outputs show mnist, and a run here would show digits" in said
    assert "--data digits" in said and "COURSE_DATA" in said
    assert build.main([*there, "--data", "mnist"]) == 1
    assert "asked for mnist, and a run here would show digits" in capsys.readouterr().out
    assert target.read_bytes() == before

    assert build.main([*there, "--data", "digits"]) == 0
    assert build.data_used(nbformat.read(target, as_version=4)) == "digits"


def test_prose_alone_is_built_without_running_anything(tmp_path, capsys):
    source = write_source(tmp_path, "01_a", "# %% [markdown]\n# Old.\n\n# %%\nimport time\n\n"
                                            "time.time_ns()\n")
    target = tmp_path / "01_a.ipynb"
    prose = ["--prose", "--notebooks", str(tmp_path)]
    assert build.main(prose) == 1, "nothing to take outputs from"
    assert build.main(prose[1:]) == 0
    old = nbformat.read(target, as_version=4)
    source.write_text(source.read_text().replace("Old", "New"))
    assert build.main(prose) == 0
    new = nbformat.read(target, as_version=4)
    assert new.cells[1].source == "New." and new.cells[2] == old.cells[2]

    source.write_text(source.read_text().replace("time_ns()", "time()"))
    capsys.readouterr()
    assert build.main(prose) == 1
    assert "01_a: not built; not only its prose has changed" in capsys.readouterr().out
    assert nbformat.read(target, as_version=4) == new
