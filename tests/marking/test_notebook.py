"""Which cells of a notebook are read, whatever an editor has made of it, and what its author is
told of the others."""

import json

import pytest
from hand_in import find_cell, make_source, plain, strip
from marking import assignment, notebook

EVEN = "def split_even(batch, devices):\n    return [batch]\n"
READ = assignment.read_assignment("ps1")
CODE = {exercise.name: exercise.answer for exercise in READ.exercises}


def read(content, name="ps1"):
    text = content if isinstance(content, str) else json.dumps(content)
    return notebook.read_notebook(assignment.read_assignment(name), text)


def insert(content, below, source, **more):
    """A code cell without a name below another."""
    place = content["cells"].index(find_cell(content, below)) + 1
    content["cells"].insert(place, {"cell_type": "code", "metadata": {}, "source": source,
                                    "outputs": [], "execution_count": None, **more})
    return content


@pytest.mark.parametrize("metadata", [None, [], "x", 3, {"nbgrader": []}, {"nbgrader": None},
                                      {"nbgrader": {"grade_id": []}}, {"nbgrader": {}}])
def test_metadata_of_another_cell_may_be_anything(metadata):
    content = plain(make_source(why="so"))
    insert(content, "even", "1 + 1", metadata=metadata)
    content["cells"][0]["metadata"] = metadata
    content["cells"].append("no cell at all")
    found = read(content)
    assert found.answers == {key: [source] for key, source in CODE.items()} | {"why": ["so"]}
    assert not found.faults and not found.notes


def test_a_cell_without_metadata_or_source():
    content = plain(make_source())
    content["cells"].append({"cell_type": "code"})
    assert not read(content).faults


def test_where_names_are_lost_cells_are_found_by_what_they_define():
    found = read(strip(make_source(why="so")))
    assert found.answers == {key: [source] for key, source in CODE.items()} | {"why": ["so"]}
    assert not found.faults
    (note,) = found.notes
    assert "lost its cells' names" in note and note.count("even, uneven, pairs") == 1


@pytest.mark.parametrize("name", assignment.list_names())
def test_so_they_are_in_all_assignments(name):
    source = make_source(name)
    due = {key: value for key, value in read(source, name).answers.items()}
    found = read(strip(source), name)
    assert found.answers == due and not found.faults and found.notes


@pytest.mark.parametrize("more, count", [([EVEN], "2 cells define split_even"),
                                         ([EVEN, EVEN, "%time\nsplit_even = 1"], "3 cells define")])
def test_not_if_several_define_it(more, count):
    content = strip(make_source())
    content["cells"] += [{"cell_type": "code", "metadata": {}, "source": source} for source in more]
    found = read(content)
    assert set(found.faults) == {"even"} and found.answers["even"] == []
    for words in ("has lost its cells' names", count, "fresh ps1.ipynb of the hand-out"):
        assert words in found.faults["even"]
    assert found.notes[0].count("uneven, pairs") == 1 and "even, uneven" not in found.notes[0]


def test_not_if_none_defines_it():
    content = strip(make_source(even="x = 1"))
    assert "no cell defines split_even" in read(content).faults["even"]


def test_one_cell_that_is_gone():
    content = plain(make_source())
    content["cells"].remove(find_cell(content, "even"))
    found = read(content)
    assert "the solution cell 'even' is missing" in found.faults["even"]
    assert "fresh ps1.ipynb" in found.faults["even"] and "lost" not in found.faults["even"]
    found = read(insert(content, "uneven", EVEN))   # and written anew
    assert found.answers["even"] == [EVEN] and not found.faults and "even" in found.notes[0]


@pytest.mark.parametrize("first, second", [
    ("size = 2", EVEN), (EVEN, "size = 2"), ("def split_even(batch, devices):\n    n = 1",
                                             "    return n")])
@pytest.mark.parametrize("named", [True, False])
def test_a_cell_that_was_split(first, second, named):
    content = plain(make_source(even=first))
    insert(content, "even", second, **({"metadata": find_cell(content, "even")["metadata"]}
                                       if named else {}))
    faults = read(content).faults
    if not named and second == "size = 2":   # nobody can know; see test_class
        assert not faults
        return
    assert set(faults) == {"even"}
    assert "join them into one (select them, then Shift+M)" in faults["even"]
    assert "leave one" not in faults["even"]


def test_two_versions_of_one_function():
    content = plain(make_source())
    insert(content, "even", EVEN, metadata=find_cell(content, "even")["metadata"])
    fault = read(content).faults["even"]
    assert "2 different solution cells 'even'" in fault
    assert "join them into one, with one split_even in it" in fault


def test_a_cell_twice_is_one():
    content = plain(make_source())
    insert(content, "even", CODE["even"], metadata=find_cell(content, "even")["metadata"])
    assert not read(content).faults


def test_a_solution_beside_its_cell():
    """Written below what was handed out, which is as it was."""
    stub = ('def split_even(batch, devices):\n    # Your code goes here.\n    '
            f'{assignment.UNWRITTEN}\n')
    content = insert(plain(make_source(even=stub)), "even", EVEN)
    assert "split_even is in another cell than the solution cell 'even'" in read(
        content).faults["even"]
    assert not read(make_source(even=stub)).faults
    # A draft in another cell takes nothing from a solution where it belongs.
    assert not read(insert(plain(make_source()), "even", EVEN)).faults


def test_what_was_handed_out_is_left_out_beside_what_was_written():
    stub = assignment.make_stub(CODE["even"])
    for change in (plain, strip):
        content = plain(make_source())
        content = change(insert(content, "even", f"# to do\n{stub}",
                                metadata=find_cell(content, "even")["metadata"]))
        found = read(content)
        assert found.answers["even"] == [CODE["even"]] and not found.faults
        assert found.notes[-1] == ("There is another solution cell 'even', as it was handed out. "
                                   "It was left out.")
    assert read(make_source(even=stub)).faults == {"even": "'even' is not written yet"}


def test_a_solution_that_was_turned_to_markdown():
    content = plain(make_source())
    find_cell(content, "even")["cell_type"] = "markdown"
    found = read(content)
    assert found.answers["even"] == [CODE["even"]] and not found.faults
    assert found.notes == ["The solution cell 'even' is no code cell (turned to Markdown?). It was "
                           "read as code all the same."]
    assert ("only a text cell defines split_even (turned to Markdown?)"
            in read(strip(content)).faults["even"])


@pytest.mark.parametrize("words, answers", [
    ("", []), ("  \n", []), (assignment.PLACEHOLDER, []), (f"{assignment.PLACEHOLDER}\n", []),
    (f"{assignment.PLACEHOLDER}\nNone.", [f"{assignment.PLACEHOLDER}\nNone."]),
    ("None.", ["None."])])
@pytest.mark.parametrize("change", [plain, strip])
def test_what_was_handed_out_is_no_answer(words, answers, change):
    assert read(change(make_source(why=words))).answers["why"] == answers


@pytest.mark.parametrize("text, why", [
    ("", "the file is empty"), (" \n", "the file is empty"), ("%PDF-1.7", "not a notebook"),
    ("[]", "not a notebook"), ("{}", "not a notebook"), ('{"cells": 3}', "not a notebook")])
def test_what_is_no_notebook(text, why):
    with pytest.raises(notebook.Refused, match=why):
        read(text)


@pytest.mark.parametrize("source, there", [
    ("def f(): pass", True), ("async def f(): pass", True), ("class f(x): pass", True),
    ("f = 1", True), ("f: int = 1", True), ("x = 1\ndef f():\n    !ls", True), ("import f", True),
    ("from m import g, f", True), ("def ff(): pass", False), ("f()", False), ("f == 1", False),
    ("    def f(): pass", False), ("# def f()", False), ("g = f", False)])
def test_what_defines_a_name(source, there):
    assert notebook.defines(source, "f") == there
