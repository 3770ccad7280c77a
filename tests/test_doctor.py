"""The doctor finds out what is broken, before set-up and after it, and says what to do.

It runs in a copy of the files that it looks at; what stands in for the environment's Python is this
one, which can be tampered with.
"""

import ast
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import standin
from test_setup import as_anybody, environment_by_hand, snapshot, write_script

ROOT = Path(__file__).resolve().parents[1]
DOCTOR = ROOT / "requirements/doctor.py"
BASE_PYTHON = sys._base_executable


@pytest.fixture(scope="module")
def index():
    """The address of a package index that has everything."""
    class Index(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/simple/" else 401)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/simple/"
    server.shutdown()


@pytest.fixture
def copy(tmp_path):
    """The repository as it is cloned, as far as the doctor looks at it, and a uv on the PATH."""
    folder = tmp_path / "a course"
    for name in ("requirements", "helpers", "notebooks/assignments/marking"):
        (folder / name).mkdir(parents=True)
        for path in (ROOT / name).iterdir():
            if path.is_file():
                (folder / name / path.name).write_bytes(path.read_bytes())
    write_script(folder / "bin/uv", "#!/bin/sh\n[ $1 = --version ]\n")
    return folder


# In place of the environment's Python: runs `before` first.
PYTHON = """\
#!/bin/sh
exec "{python}" {flags} -c 'import sys
sys.path.insert(0, "helpers/..")
exec(open(".venv/before").read())
exec(sys.argv[-1])' "$@"
"""


def set_up(folder, before="", python=sys.executable, flags=""):
    """As `make setup` leaves it."""
    write_script(folder / ".venv/bin/python", PYTHON.format(python=python, flags=flags))
    (folder / ".venv/before").write_text(before)
    lock = folder / "requirements/cpu.txt"
    sum_ = subprocess.run(["cksum"], stdin=open(lock), capture_output=True, text=True).stdout
    (folder / ".venv/.many-devices").write_text(f"{folder.resolve()} {sum_}")


def doctor(folder, *, before="", python=BASE_PYTHON, **environment):
    """Run it after the code `before`; (exit status, {name: (mark, finding, remedy)}, last line)."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith((
        "COURSE", "PYTHON", "UV_", "XDG"))}
    environment = {"GPU": "0", "PYTHON": BASE_PYTHON, "UV_CACHE_DIR": str(folder),
                   "PATH": f"{folder}/bin:{os.environ['PATH']}", **environment}
    done = subprocess.run(
        [python, "-c", f"import runpy\n{before}\n"
         "runpy.run_path('requirements/doctor.py', run_name='__main__')"],
        cwd=folder, capture_output=True, text=True, timeout=200, preexec_fn=as_anybody,
        env={**kept, **environment})
    *lines, last = done.stdout.splitlines() or [done.stderr]
    rows, name = {}, None
    for line in lines:
        if line.startswith(" "):
            rows[name] = (*rows[name][:2], line.strip(" →"))
        else:
            mark, name, found = line[0], line[2:13].strip(), line[14:]
            rows[name] = (mark, found, "")
    return done.returncode, rows, last


# --- Before set-up ------------------------------------------------------------------------------


def test_before_set_up_it_says_that_nothing_is_in_the_way_and_changes_nothing(copy, index):
    before = snapshot(copy)
    status, rows, last = doctor(copy, UV_DEFAULT_INDEX=index)
    assert (status, last) == (0, "The course is not set up yet: `make setup`, or `make lab` at "
                                 "once.")
    assert rows["set-up"][:2] == ("–", "not made yet")
    assert rows["Python"] == ("✓", f"3.11, {BASE_PYTHON}", "")
    assert rows["uv"] == ("✓", f"{copy}/bin/uv", "")
    assert rows["index"] == ("✓", f"{index.split('/')[2]} answers", "")
    assert {name: mark for name, (mark, *_) in rows.items() if mark == "✗"} == {}
    assert "GiB free" in rows["memory"][1] and "NumPy" not in rows
    assert snapshot(copy) == before


def without(*names):
    """Code after which programs of these names are not found by the doctor or by set-up."""
    return f"""
import os, pathlib, shutil
kept = pathlib.Path("kept")
kept.mkdir()
for name in ("sh", "cat", "cksum", "grep", "ls", "df", "awk", "sed", "uname", "uv"):
    if shutil.which(name) and name not in {names}:
        (kept / name).symlink_to(shutil.which(name))
os.environ["PATH"] = str(kept.absolute())
"""


def test_no_python_but_a_uv(copy, index):
    status, rows, _ = doctor(copy, before=without(), PYTHON="", HOME=str(copy),
                             UV_DEFAULT_INDEX=index)
    assert status == 0
    assert rows["Python"] == ("–", "no 3.11", "uv tries to fetch one, from GitHub; or install it")


def test_neither_python_nor_uv(copy, index):
    status, rows, last = doctor(copy, before=without("uv"), PYTHON="", HOME=str(copy),
                                UV_DEFAULT_INDEX=index)
    assert status == 1 and "✗" in last
    assert rows["Python"] == ("✗", "no 3.11", "install it, or uv, which fetches Python")
    assert rows["uv"] == ("✗", "none, and no Python with a venv module to fetch it", (
        "install uv, or python3.11 with that module (Debian and Ubuntu: python3-venv)"))


def test_a_python_without_its_venv_module(copy, index):
    write_script(copy / "python", f"""#!/bin/sh
case "$*" in *ensurepip*) exit 1 ;; esac
exec "{BASE_PYTHON}" "$@"
""")
    status, rows, _ = doctor(copy, before=without("uv"), PYTHON=f"{copy}/python", HOME=str(copy),
                             UV_DEFAULT_INDEX=index)
    assert status == 1
    assert rows["Python"][0] == "✓" and rows["uv"][0] == "✗" and "python3-venv" in rows["uv"][2]


def test_a_python_that_was_named_and_is_none(copy, index):
    status, rows, _ = doctor(copy, PYTHON="/no $uch", UV_DEFAULT_INDEX=index)
    assert status == 1
    assert rows["Python"][:2] == ("✗", "PYTHON=/no $uch is no 3.11 that runs")


@pytest.mark.parametrize("missing", ["libgomp.so.1", "libquadmath.so.0"])
def test_a_system_library_is_missing(copy, index, missing):
    status, rows, _ = doctor(copy, UV_DEFAULT_INDEX=index, before=f"""
import ctypes
def load(name, *_):
    if name == "{missing}":
        raise OSError(name)
ctypes.CDLL = load""")
    assert status == 1
    assert rows["libraries"] == ("✗", f"no {missing}", "install libgomp1 and libquadmath0 "
                                                       "(Fedora: libgomp and libquadmath)")


def free(gigabytes):
    """Code after which this much is free on every disk that the doctor looks at."""
    return f"""
import shutil
from collections import namedtuple
shutil.disk_usage = lambda _: namedtuple("Usage", "free")({gigabytes} * 10**9)"""


@pytest.mark.parametrize("gpu, needs", [("0", 1.4), ("1", 5.4)])
def test_a_disk_that_is_too_small_for_set_up(copy, index, gpu, needs):
    status, rows, _ = doctor(copy, UV_DEFAULT_INDEX=index, GPU=gpu, before=free(needs - 0.1))
    assert status == 1
    found = f"{needs - 0.1:.1f} GB free"
    assert rows["disk"] == ("✗", found, f"the environment takes {needs} GB: free some")
    assert rows["uv's cache"] == ("✗", f"{found} for {copy}", f"set-up needs {needs}: free some")
    status, rows, _ = doctor(copy, UV_DEFAULT_INDEX=index, GPU=gpu, before=free(needs + 5.9))
    assert status == 0 and rows["uv's cache"][0] == "✓"
    assert rows["disk"][0] == "–" and rows["disk"][2] == "PyTorch would take up to 6 GB"
    _, rows, _ = doctor(copy, UV_DEFAULT_INDEX=index, GPU=gpu, before=free(needs + 6.1))
    assert rows["disk"] == ("✓", f"{needs + 6.1:.1f} GB free", "")


@pytest.mark.parametrize("gigabytes, torch, mark, remedy", [
    (0.05, "'2.13.0'", "✗", "notebooks could not be saved: free some"),
    (0.2, "'2.13.0'", "✓", ""), (5.9, "None", "–", "PyTorch would take up to 6 GB"),
    (6.1, "None", "✓", "")])
def test_a_disk_after_set_up_is_held_to_what_is_still_missing(copy, gigabytes, torch, mark, remedy):
    set_up(copy, f"{VERSIONS}{{'torch': {torch}}}")
    (copy / "mxnet.py").touch()   # this is about other things, and it takes its time
    status, rows, _ = doctor(copy, before=free(gigabytes))
    assert rows["disk"] == (mark, f"{gigabytes:.1f} GB free", remedy)
    assert status == 1 or mark != "✗"


@pytest.mark.parametrize("has_uv", [True, False])
def test_no_network(copy, has_uv):
    if not has_uv:
        (copy / "bin/uv").unlink()
    nowhere = "http://user:secret@127.0.0.1:9/simple"
    status, rows, last = doctor(copy, before="" if has_uv else without("uv"),
                                UV_DEFAULT_INDEX=nowhere)
    assert rows["index"][0] == ("–" if has_uv else "✗")
    assert rows["index"][1] == "127.0.0.1:9: [Errno 111] Connection refused", "no password"
    assert status == (not has_uv)


@pytest.mark.parametrize("has_uv", [True, False])
def test_the_index_is_the_one_that_the_tools_help_names(copy, index, has_uv):
    says = f"""#!/bin/sh
case "$*" in *"pip install --help") echo "[default: <{index.rstrip('/')}>]" ;;
    *ensurepip*) echo "$0" ;; esac
"""
    if has_uv:
        write_script(copy / "bin/uv", says)
    else:
        (copy / "bin/uv").unlink()
        write_script(copy / "bin/python3.12", says)
    _, rows, _ = doctor(copy, PYTHON="", PATH=f"{copy}/bin:/usr/bin:/bin")
    assert rows["index"] == ("✓", f"{index.split('/')[2]} answers", "")


def test_an_index_that_wants_a_password_answers(copy, index):
    _, rows, _ = doctor(copy, UV_DEFAULT_INDEX=index.replace("//", "//user:secret@") + "private/")
    assert rows["index"] == ("✓", f"{index.split('/')[2]} answers", "")


def test_a_cache_and_a_folder_that_may_not_be_written(copy, index):
    (copy / "cache").mkdir(mode=0o555)
    copy.chmod(0o555)
    try:
        status, rows, _ = doctor(copy, UV_DEFAULT_INDEX=index, UV_CACHE_DIR=f"{copy}/cache/uv")
    finally:
        copy.chmod(0o755)
    assert status == 1
    assert rows["uv's cache"] == ("✗", f"you may not write to {copy}/cache/uv",
                                  "let UV_CACHE_DIR name another folder")
    assert rows["folder"][:2] == ("✗", f"you may not write to {copy}")


def test_an_environment_that_set_up_did_not_make(copy, index):
    environment_by_hand(copy)
    before = snapshot(copy)
    status, rows, _ = doctor(copy, UV_DEFAULT_INDEX=index)
    assert status == 1 and rows["set-up"] == (
        "✗", ".venv does not have set-up's mark, so it may be somebody's own, and is left alone",
        "move it away or delete it, then try again.")
    assert snapshot(copy) == before


def test_an_environment_that_is_not_up_to_date(copy, index):
    set_up(copy)
    with open(copy / "requirements/cpu.txt", "a") as lock:
        lock.write("# newer\n")
    status, rows, _ = doctor(copy, UV_DEFAULT_INDEX=index)
    assert status == 0 and rows["set-up"] == (
        "–", ".venv was made from another list of packages",
        "`make setup`, or any target that needs it, makes it")


def test_a_colon_in_the_path(copy, index):
    moved = copy.rename(copy.with_name("a:b"))
    status, rows, _ = doctor(moved, UV_DEFAULT_INDEX=index, PATH=os.environ["PATH"])
    assert status == 1 and rows["folder"][:2] == ("✗", f"the path {moved} has a colon")


def test_a_wrong_choice_of_build(copy, index):
    status, rows, _ = doctor(copy, UV_DEFAULT_INDEX=index, GPU="yes")
    assert status == 1 and "GPU=yes: must be 1" in rows["set-up"][1]


def test_any_python_from_3_8_on_can_read_it():
    """Its syntax; set-up runs gpu.py with any Python too."""
    for path in (DOCTOR, ROOT / "helpers/gpu.py"):
        ast.parse(path.read_text(), feature_version=(3, 8))
    with pytest.raises(SyntaxError):
        ast.parse("with (open('a') as a, open('b') as b): pass", feature_version=(3, 8))


# --- Course data --------------------------------------------------------------------------------


def test_course_data_that_leads_nowhere_is_named(copy, index):
    status, rows, _ = doctor(copy, UV_DEFAULT_INDEX=index, COURSE_DATA="/no $uch folder")
    assert status == 0 and rows["COURSE_DATA"] == ("–", "/no $uch folder is no folder", (
        "name a folder with mnist/ and its four IDX files in it, or unset COURSE_DATA"))


@pytest.mark.parametrize("name, mark", [
    ("mnist/train-images-idx3-ubyte.gz", "✓"), ("train-images-idx3-ubyte", "✓"), ("readme", "–")])
def test_course_data_is_looked_at(copy, index, name, mark):
    (copy / "data/mnist").mkdir(parents=True)
    (copy / "data" / name).touch()
    _, rows, _ = doctor(copy, UV_DEFAULT_INDEX=index, COURSE_DATA="~/data", HOME=str(copy))
    assert rows["COURSE_DATA"][0] == mark and rows["COURSE_DATA"][1].startswith("~/data")


# --- After set-up -------------------------------------------------------------------------------

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
ANEW = "delete .venv, then `make setup`"


def test_here_the_course_can_run(copy):
    set_up(copy)
    before = snapshot(copy)
    status, rows, last = doctor(copy)
    assert (status, last) == (0, "The course can run here.")
    assert rows["set-up"] == ("✓", "up to date", "")
    assert rows["Python"][0] == rows["NumPy"][0] == rows["MXNet"][0] == "✓"
    assert rows["MXNet"][1].startswith("1.9.1 with")
    assert int(rows["cores"][1]) >= 1 and "GiB free" in rows["memory"][1]
    assert "index" not in rows, "no network is needed any more"
    assert snapshot(copy) == before


def test_a_newer_numpy_is_named(copy):
    set_up(copy, VERSIONS + "{'numpy': '1.26.4'}")
    status, rows, last = doctor(copy)
    assert status == 1 and "✗" in last
    assert rows["NumPy"] == ("✗", "1.26.4", f"MXNet 1.9.1 needs one below 1.24: {ANEW}")


@pytest.mark.parametrize("fault, told", [
    ("raise AttributeError('module numpy has no attribute bool')", "no attribute bool"),
    ("import os; os.kill(os.getpid(), 11)", "ended with -11")])
def test_an_mxnet_that_breaks_is_no_end_of_the_doctor(copy, fault, told):
    (copy / "mxnet.py").write_text(fault)
    set_up(copy)
    status, rows, _ = doctor(copy)
    assert status == 1
    assert rows["MXNet"][0] == "✗" and told in rows["MXNet"][1] and rows["MXNet"][2] == ANEW
    assert rows["grading"][0] in "✓–", "the lines after it are there"


def test_without_any_package_every_line_says_what_to_do(copy):
    # The Python below this environment, without its own packages either.
    set_up(copy, python=BASE_PYTHON, flags="-S")
    status, rows, _ = doctor(copy)
    assert status == 1
    for name in ("NumPy", "MXNet", "JupyterLab", "grading"):
        assert rows[name][0] == "✗" and rows[name][2] == ANEW, name
    assert rows["PyTorch"] == (
        "–", "not installed", "chapters 13 to 16 need it: `make setup TORCH=1`")
    assert rows["Python"][0] == "✓"


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("cards, mark, words", [
    (["NVIDIA H200|9|0|143771"], "–", "5.0 to 8.9 only"),
    (["NVIDIA A100|8|0|40960"], "–", "GPU=1"), ([], "–", "CPU cores")])
def test_cards_are_named_and_what_becomes_of_them(copy, index, tmp_path, cards, mark, words, ready):
    if ready:
        set_up(copy)
        (copy / "mxnet.py").touch()   # this is about other things, and it takes its time
    environment = standin.environment(standin.driver(tmp_path), *cards)
    _, rows, _ = doctor(copy, UV_DEFAULT_INDEX=index, CARDS=environment["CARDS"],
                        LD_LIBRARY_PATH=environment["LD_LIBRARY_PATH"])
    assert rows["GPUs"][0] == mark and words in rows["GPUs"][2]
    for card in cards:
        assert card.split("|")[0] in rows["GPUs"][1]
        assert "140 GiB" in rows["GPUs"][1] or "40 GiB" in rows["GPUs"][1]


def test_a_gpu_build_without_a_driver_is_explained(copy):
    (copy / "mxnet.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    set_up(copy, VERSIONS + "{'mxnet-cu112': '1.9.1'}")
    status, rows, _ = doctor(copy)
    assert status == 1
    assert "no NVIDIA driver" in rows["MXNet"][2] and "GPU=0" in rows["MXNet"][2]


def test_no_data_and_why_and_nothing_is_moved(copy):
    set_up(copy)
    (copy / "mxnet.py").touch()
    _, rows, _ = doctor(copy, HOME=str(copy), XDG_CACHE_HOME=str(copy))
    damaged = copy / "many-devices/mnist/train-images-idx3-ubyte.gz"
    assert rows["data"][:2] == (
        "–", f"no MNIST: COURSE_DATA is not set; the cache, {damaged}: No such file or directory")
    assert "digits" in rows["data"][2]
    damaged.parent.mkdir(parents=True)
    damaged.write_text("damaged")
    before = snapshot(copy)
    _, rows, _ = doctor(copy, HOME=str(copy), XDG_CACHE_HOME=str(copy), COURSE_DATA="/nowhere")
    assert rows["data"][0] == "–" and rows["data"][1].startswith(
        f"no MNIST: COURSE_DATA=/nowhere does not exist; the cache, {damaged}: train-images")
    assert snapshot(copy) == before


@pytest.mark.parametrize("variables, told", [
    ({}, ""), ({"COURSE_DATA": "/nowhere"}, "COURSE_DATA=/nowhere does not exist; ")])
def test_data_from_another_place_than_the_one_that_was_named(copy, variables, told):
    set_up(copy, f"""
from helpers import data
data.find_mnist = lambda: ("the cache", ["{told[:-2] or 'COURSE_DATA is not set'}"])
""")
    (copy / "mxnet.py").touch()
    _, rows, _ = doctor(copy, **variables)
    assert rows["data"] == ("✓", f"{told}mnist from the cache", "")


# In place of bubblewrap: refuses the option that is named, as some machines do.
BWRAP = """#!/bin/sh
case " $* " in *" {refused} "*) exit 1 ;; esac
"""


@pytest.mark.parametrize("refused, mark", [
    ("--disable-userns", "✓"), ("--proc", "–"), ("--unshare-all", "–")])
def test_bubblewrap_is_held_to_what_marking_asks_of_it(copy, refused, mark):
    set_up(copy)
    (copy / "mxnet.py").touch()
    write_script(copy / "bin/bwrap", BWRAP.format(refused=refused))
    _, rows, _ = doctor(copy)
    assert rows["grading"][0] == mark
    assert ("no bubblewrap that works" in rows["grading"][1]) == (mark == "–")
