"""The drawings of chapter 15 say what is so."""

import ast
from pathlib import Path

from svg import read, texts, with_class

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
PROGRAM = NOTEBOOKS / "resumable_train.py"


def test_ranks_go_on_over_machines_and_local_ranks_do_not():
    found = []
    for machine in with_class(read("torchrun"), "machine"):
        for process in with_class(machine, "process"):
            found.append((int(process.get("data-rank")), int(process.get("data-local-rank"))))
            assert texts(process) == [f"rank {found[-1][0]}", f"local rank {found[-1][1]}"]
    assert found == [(0, 0), (1, 1), (2, 0), (3, 1)]


def test_one_of_the_machines_keeps_the_rendezvous():
    machines = with_class(read("torchrun"), "machine")
    keepers = [len(list(with_class(machine, "rendezvous"))) for machine in machines]
    assert keepers == [1, 0]


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


def test_a_stale_gradient_is_as_old_as_the_updates_made_meanwhile():
    root = read("stale_gradient")
    (late,) = [work for work in with_class(root, "work") if work.get("data-worker") == "1"]
    meanwhile = []
    for update in with_class(root, "update"):
        inside = float(late.get("data-begin")) < float(update.get("data-time"))
        if inside and float(update.get("data-time")) < float(late.get("data-end")):
            assert update.get("data-worker") == "0"
            meanwhile.append(update)
    numbers = [texts(update)[0] for update in with_class(root, "update")]
    assert numbers == [str(number) for number in range(1, len(meanwhile) + 2)]
    assert f"a gradient of age {len(meanwhile)}" in texts(root)[0]
