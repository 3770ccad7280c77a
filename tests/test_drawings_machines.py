"""The drawings of chapter 15: files are what the program draws, and say what is so.

And `notebooks/resumable_train.py`, which readers keep: it imports nothing of the course.
"""

import ast
from pathlib import Path
from xml.etree import ElementTree

import draw_many_machines
import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
FOLDER = NOTEBOOKS / "src/drawings"
PROGRAM = NOTEBOOKS / "resumable_train.py"
SVG = "{http://www.w3.org/2000/svg}"


def read(name):
    """The root element of a drawing."""
    return ElementTree.parse(FOLDER / f"{name}.svg").getroot()


def with_class(root, name):
    """All elements below `root` that have a class."""
    return [element for element in root.iter() if name in element.get("class", "").split()]


def texts(element):
    return [text.text for text in element.iter(SVG + "text")]


def test_the_files_are_what_the_program_draws(tmp_path):
    draw_many_machines.main(tmp_path)
    drawn = sorted(tmp_path.glob("*.svg"))
    assert [path.stem for path in drawn] == sorted(draw_many_machines.DRAWINGS)
    for path in drawn:
        assert path.read_bytes() == (FOLDER / path.name).read_bytes(), path.name


@pytest.mark.parametrize("name", sorted(draw_many_machines.DRAWINGS))
def test_it_can_be_read_by_those_who_cannot_see_it_and_on_a_dark_page(name):
    root = read(name)
    assert [child.tag for child in root][:2] == [SVG + "title", SVG + "desc"]
    ground = root.find(SVG + "rect")
    assert (ground.get("fill"), ground.get("width")) == ("white", root.get("width"))
    width, height = float(root.get("width")), float(root.get("height"))
    for text in root.iter(SVG + "text"):
        assert 0 < float(text.get("x")) < width and 0 < float(text.get("y")) < height
        assert float(text.get("font-size")) * 390 / width > 10


def test_ranks_go_on_over_machines_and_local_ranks_do_not():
    found = []
    for machine in with_class(read("torchrun"), "machine"):
        for process in with_class(machine, "process"):
            found.append((int(process.get("data-rank")), int(process.get("data-local-rank"))))
            assert texts(process) == [f"rank {found[-1][0]}", f"local rank {found[-1][1]}"]
    assert found == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_the_checkpoint_has_the_parts_that_the_program_saves():
    code = ast.parse(PROGRAM.read_text())
    (snapshot,) = [node for node in code.body
                   if isinstance(node, ast.FunctionDef) and node.name == "snapshot"]
    (saved,) = [node.value for node in snapshot.body if isinstance(node, ast.Return)]
    keys = [key.value for key in saved.keys]
    drawn = [part.get("data-name") for part in with_class(read("checkpoint"), "part")]
    assert [name.split()[0] for name in drawn] == keys


def test_the_server_adds_what_the_workers_have():
    root = read("parameter_server")
    values = [int(worker.get("data-value")) for worker in with_class(root, "worker")]
    (server,) = with_class(root, "server")
    total = sum(values)
    assert texts(server)[1] == " + ".join(map(str, values)) + f" = {total}"
    for worker, value in zip(with_class(root, "worker"), values, strict=True):
        assert texts(worker)[1] == f"has {value}, gets {total}"


def test_the_program_stands_alone():
    imported = set()
    for node in ast.walk(ast.parse(PROGRAM.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported == {"argparse", "os", "signal", "time", "torch"}
