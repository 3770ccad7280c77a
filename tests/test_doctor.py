"""The doctor finds out what is broken, in environments that are, and says what to do."""

import subprocess
import sys
from pathlib import Path

import pytest
import standin

ROOT = Path(__file__).resolve().parents[1]


def doctor(*, before="", python=sys.executable, env=None, flags=()):
    """Run it after the code `before`; (exit status, {name: (mark, finding, remedy)}, last line)."""
    code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{before}\n" + (
        "from helpers.doctor import main\nsys.exit(main())")
    done = subprocess.run([python, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env=env, timeout=200)
    *lines, last = done.stdout.splitlines()
    rows, name = {}, None
    for line in lines:
        if line.startswith(" "):
            rows[name] = (*rows[name][:2], line.strip(" →"))
        else:
            mark, name, found = line.split(maxsplit=2)
            rows[name] = (mark, found.strip(), "")
    return done.returncode, rows, last


# As if a distribution had another version, or none.
VERSIONS = """
from importlib import metadata
real = metadata.version
def version(name):
    if name in fake and fake[name] is None:
        raise metadata.PackageNotFoundError(name)
    return fake.get(name) or real(name)
metadata.version = version
fake = """


def test_here_the_course_can_run():
    status, rows, last = doctor()
    assert (status, last) == (0, "The course can run here.")
    assert rows["Python"][0] == rows["NumPy"][0] == rows["MXNet"][0] == "✓"
    assert rows["MXNet"][1].startswith("1.9.1 with")
    assert int(rows["cores"][1]) >= 1 and "GiB free" in rows["memory"][1]


def test_a_newer_numpy_is_named():
    status, rows, last = doctor(before=VERSIONS + "{'numpy': '1.26.4'}")
    assert status == 1 and "✗" in last
    assert rows["NumPy"] == ("✗", "1.26.4", "MXNet 1.9.1 needs one below 1.24: `make setup`")


def test_an_mxnet_that_breaks_on_import_is_no_end_of_the_doctor(tmp_path):
    (tmp_path / "mxnet.py").write_text("raise AttributeError('module numpy has no attribute bool')")
    status, rows, _ = doctor(env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)})
    assert status == 1
    assert rows["MXNet"][0] == "✗" and "no attribute bool" in rows["MXNet"][1]
    assert rows["grading"][0] in "✓–", "the lines after it are there"


def test_an_mxnet_that_takes_its_process_along_is_no_end_of_the_doctor(tmp_path):
    (tmp_path / "mxnet.py").write_text("import os; os.kill(os.getpid(), 11)")
    status, rows, _ = doctor(env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)})
    assert status == 1 and rows["MXNet"][:2] == ("✗", "can't be imported: ended with -11")


def test_without_any_package_every_line_says_what_to_do():
    # The Python below this environment, without its own packages either.
    status, rows, _ = doctor(python=sys._base_executable, flags=("-S",))
    assert status == 1
    for name in ("NumPy", "MXNet", "JupyterLab", "grading"):
        assert rows[name][0] == "✗" and "make setup" in rows[name][2], name
    assert rows["PyTorch"] == ("–", "not installed", "chapter 12 needs it: `make setup TORCH=1`")
    assert rows["Python"][0] == "✓"


def test_another_python_is_named():
    status, rows, _ = doctor(before="sys.version_info = (3, 12, 1, 'final', 0)")
    assert status == 1 and rows["Python"][0] == "✗" and "must be 3.11" in rows["Python"][2]


@pytest.mark.parametrize("cards, mark, words", [
    (["NVIDIA H200|9|0|143771"], "–", "5.0 to 8.9 only"),
    (["NVIDIA A100|8|0|40960"], "–", "GPU=1"), ([], "–", "CPU cores")])
def test_cards_are_named_and_what_becomes_of_them(tmp_path, cards, mark, words):
    env = standin.environment(standin.driver(tmp_path), *cards)
    _, rows, _ = doctor(env=env)
    assert rows["GPUs"][0] == mark and words in rows["GPUs"][2]
    for card in cards:
        assert card.split("|")[0] in rows["GPUs"][1]
        assert "140 GiB" in rows["GPUs"][1] or "40 GiB" in rows["GPUs"][1]


def test_a_gpu_build_without_a_driver_is_explained():
    before = VERSIONS + "{'mxnet-cu112': '1.9.1'}\n" + (
        "from helpers import doctor\ndoctor.LOOK = "
        "\"raise OSError('libcuda.so.1: cannot open shared object file')\"")
    status, rows, _ = doctor(before=before)
    assert status == 1
    assert "no NVIDIA driver" in rows["MXNet"][2] and "GPU=0" in rows["MXNet"][2]


def test_no_data_and_data(tmp_path):
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    _, rows, _ = doctor(env=env)
    assert rows["data"][0] == "–" and "digits" in rows["data"][2]
