"""`make setup`, interrupted, doubled and in trouble; what Make hands to the tools.

All of it in a folder with a space in its path. What stands in for uv and pip makes a few files.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE_PYTHON = sys._base_executable
SITE = ".venv/lib/python3.11/site-packages"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "a course"
    path.mkdir()
    return path


def write_script(path, text):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    path.chmod(0o755)


def snapshot(folder):
    """All that is below a folder: {path: content, where a link leads, or None for a folder}."""
    return {path: os.readlink(path) if path.is_symlink() else
            path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


# --- setup.sh with a stand-in for uv and pip ------------------------------------------------------

# Each thing that one of them does is a step, noted in the file `steps`. At the step AT it ends
# badly, or, with HOW=kill, all processes of this set-up are killed.
UV = f"""\
#!/bin/sh
step() {{
    echo $1 >>steps
    if [ $1 = "${{AT:-}}" ]; then
        [ $HOW = fail ] || kill -9 0
        echo "no answer" >&2
        exit 1
    fi
    sleep ${{SLOW:-0}}
}}
case "$*" in
    --version) ;;
    venv*)
        step venv
        mkdir -p {SITE} .venv/bin
        echo "home = {os.path.dirname(BASE_PYTHON)}" >.venv/pyvenv.cfg
        ln -s "{BASE_PYTHON}" .venv/bin/python ;;
    "pip install"*" -r "*)
        step numpy; touch {SITE}/numpy.py
        step mxnet; touch {SITE}/mxnet.py; echo "${{*##* -r }}" >{SITE}/lock ;;
    "pip install"*" pip")
        step pip; echo "import os; os.execv('bin/uv', ['uv', 'torch'])" >{SITE}/pip.py ;;
    torch)
        step sympy; touch {SITE}/sympy.py
        step torch; touch {SITE}/torch.py ;;
    *) echo "uv $*: no stand-in for that" >&2; exit 2 ;;
esac
"""
PACKAGES = {"numpy.py", "mxnet.py", "many_devices.pth"}
TORCH = PACKAGES | {"pip.py", "sympy.py", "torch.py"}


@pytest.fixture
def clone(folder):
    """What setup.sh needs of the repository, on a machine without a card, and the stand-in."""
    write_script(folder / "bin/uv", UV)
    for name in ("setup.sh", "cpu.txt", "gpu.txt"):
        (folder / "requirements").mkdir(exist_ok=True)
        shutil.copy(ROOT / "requirements" / name, folder / "requirements")
    put_card(folder, False)
    return folder


def put_card(folder, there):
    (folder / "helpers").mkdir(exist_ok=True)
    (folder / "helpers/gpu.py").write_text(f"import sys; sys.exit({int(not there)})\n")


def change_locks(folder):
    for build in ("cpu", "gpu"):
        with open(folder / f"requirements/{build}.txt", "a") as lock:
            lock.write("# another\n")


def begin(folder, **environment):
    settings = {"TORCH": "", "GPU": "", "PYTHON": BASE_PYTHON,
                "PATH": f"{folder}/.venv/bin:{folder}/bin:/usr/bin:/bin", **environment}
    return subprocess.Popen(["/bin/sh", "requirements/setup.sh"], cwd=folder, text=True,
                            env={**os.environ, **settings}, start_new_session=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def set_up(folder, **environment):
    """(exit status, what it said)"""
    process = begin(folder, **environment)
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


def steps(folder):
    return (folder / "steps").read_text().split()


def installed(folder):
    return {path.name for path in (folder / SITE).glob("*.p*")}


def test_set_up_makes_the_environment_once(clone):
    status, said = set_up(clone, TORCH="1")
    assert status == 0, said
    assert steps(clone) == ["venv", "numpy", "mxnet", "pip", "sympy", "torch"]
    assert installed(clone) == TORCH
    assert (clone / SITE / "many_devices.pth").read_text() == f"{clone.resolve()}\n"
    for torch in ("1", "", "0"):
        assert set_up(clone, TORCH=torch) == (0, "")
    assert len(steps(clone)) == 6, "nothing is done twice"


@pytest.mark.parametrize("step", ["venv", "mxnet", "torch"])
@pytest.mark.parametrize("how", ["kill", "fail"])
def test_set_up_that_was_interrupted_is_repaired_by_another(clone, step, how):
    status, said = set_up(clone, TORCH="1", AT=step, HOW=how)
    assert status and steps(clone)[-1] == step
    if how == "fail":   # in the tool's own words, then in a sentence
        assert re.search(r"no answer\nsetup: .* the network or the disk .* GB free", said), said
    assert set_up(clone, TORCH="1")[0] == 0
    assert installed(clone) == TORCH
    assert set_up(clone, TORCH="1") == (0, "")


def test_what_worked_before_pytorch_could_not_be_fetched_still_works(clone):
    assert set_up(clone)[0] == 0
    assert set_up(clone, TORCH="1", AT="sympy", HOW="fail")[0] == 1
    assert set_up(clone) == (0, ""), "nothing had changed, so nothing is made anew"


def test_half_a_pytorch_does_not_stay(clone):
    assert set_up(clone)[0] == 0
    assert set_up(clone, TORCH="1", AT="torch", HOW="kill")[0] == -signal.SIGKILL
    assert set_up(clone)[0] == 0
    assert installed(clone) == PACKAGES


def test_after_a_change_of_the_lock_all_is_made_anew_with_pytorch(clone):
    """Also where that is killed, and though a uv lies in what is made anew, first on the PATH."""
    assert set_up(clone, TORCH="1")[0] == 0
    (clone / SITE / "mine.py").touch()
    write_script(clone / ".venv/bin/uv", "#!/bin/sh\n[ $1 = --version ]\n")
    change_locks(clone)
    assert set_up(clone, AT="numpy", HOW="kill")[0] == -signal.SIGKILL
    assert set_up(clone)[0] == 0
    assert installed(clone) == TORCH


@pytest.mark.parametrize("chosen, card", [("0", True), ("1", False)])
def test_the_choice_of_build_stays_when_the_lock_changes(clone, chosen, card):
    wanted = ["requirements/cpu.txt", "requirements/gpu.txt"]
    put_card(clone, card)
    assert set_up(clone, GPU=chosen)[0] == 0
    change_locks(clone)
    assert set_up(clone, AT="mxnet", HOW="kill")[0] == -signal.SIGKILL
    assert set_up(clone)[0] == 0
    assert (clone / SITE / "lock").read_text().strip() == wanted[int(chosen)]
    assert set_up(clone, GPU="1" if chosen == "0" else "0")[0] == 0
    assert (clone / SITE / "lock").read_text().strip() != wanted[int(chosen)]


def test_two_at_once_do_the_work_once(clone):
    if not shutil.which("flock"):
        pytest.skip("no flock on this system, so two set-ups at once are not kept apart")
    both = [begin(clone, SLOW="0.1") for _ in range(2)]
    for process in both:
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert steps(clone) == ["venv", "numpy", "mxnet"]


def test_an_environment_that_came_with_its_folder_is_made_anew(clone):
    """Its scripts hold the old path."""
    assert set_up(clone)[0] == 0
    moved = clone.rename(clone.with_name("moved"))
    assert set_up(moved)[0] == 0
    assert (moved / SITE / "many_devices.pth").read_text() == f"{moved.resolve()}\n"
    assert steps(moved).count("venv") == 2


def test_an_environment_whose_python_is_gone_is_made_anew(clone):
    assert set_up(clone)[0] == 0
    (clone / ".venv/bin/python").unlink()
    assert set_up(clone)[0] == 0
    assert (clone / ".venv/bin/python").exists()


def environment_by_hand(folder):
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    (folder / ".venv/notes.txt").write_text("mine")


def link_to_another(folder):
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/.many-devices").write_text("cpu none /elsewhere 1 2\n")
    (folder / ".venv").symlink_to("elsewhere")


def plain_file(folder):
    (folder / ".venv").write_text("the-name-of-an-environment\n")


@pytest.mark.parametrize("make_one", [environment_by_hand, link_to_another, plain_file])
def test_set_up_leaves_alone_what_it_did_not_make(clone, make_one):
    make_one(clone)
    before = snapshot(clone)
    status, said = set_up(clone, TORCH="1")
    assert status == 1 and "move it away or delete it" in said
    assert snapshot(clone) == before


def test_an_empty_folder_is_nobodys(clone):
    """A disk may be mounted there, so it is not removed either."""
    (clone / ".venv").mkdir()
    kept = os.open(clone / ".venv", os.O_RDONLY)   # as long as it is open, no other has its number
    assert set_up(clone)[0] == 0
    assert installed(clone) == PACKAGES
    assert (clone / ".venv").stat().st_ino == os.fstat(kept).st_ino
    os.close(kept)


@pytest.mark.parametrize("name, value", [
    ("PYTHON", "/no/such"), ("PYTHON", "bin/python3.12"), ("TORCH", "yes"), ("GPU", "yes")])
def test_a_wrong_setting_is_named_before_anything_is_done(clone, name, value):
    write_script(clone / "bin/python3.12", f"""#!/bin/sh
exec "{BASE_PYTHON}" -c 'import sys; sys.version_info = (3, 12, 1); exec(sys.argv[2])' "$@"
""")
    before = snapshot(clone)
    status, said = set_up(clone, **{name: value})
    assert status == 1 and said.startswith(f"setup: {name}={value}: must be ")
    assert snapshot(clone) == before


# In place of a Python that fetches uv by its venv module and pip.
FETCHER = f"""\
#!/bin/sh
case "$*" in
    "-m venv"*) mkdir -p build/uv/bin; cp "$0" build/uv/bin/python ;;
    "-m pip"*) [ ! -e no-network ] || {{ echo "no answer" >&2; exit 1; }}
        cp stand-in build/uv/bin/uv ;;
    *) exec "{BASE_PYTHON}" "$@" ;;
esac
"""


def test_where_there_is_no_uv_pip_fetches_one(clone):
    (clone / "bin/uv").rename(clone / "stand-in")
    write_script(clone / "stand-in", UV.replace("bin/uv", "build/uv/bin/uv"))
    write_script(clone / "bin/uv", "#!/bin/sh\nexit 127\n")
    write_script(clone / "bin/python3", FETCHER)
    (clone / "no-network").touch()
    status, said = set_up(clone, PYTHON="")
    assert status == 1 and re.search("no answer\nsetup: uv .* the network", said), said
    assert not (clone / ".venv").exists()
    (clone / "no-network").unlink()
    assert set_up(clone, PYTHON="", TORCH="1")[0] == 0
    assert installed(clone) == TORCH


# --- What Make hands on -------------------------------------------------------------------------

# In place of the environment's Python: notes how it was called.
RECORDER = f"""\
#!{BASE_PYTHON} -S
import json, os, sys
with open("calls", "a") as calls:
    calls.write(json.dumps([sys.argv, dict(os.environ)]) + "\\n")
"""


@pytest.fixture
def made(folder):
    """The Makefile, beside stand-ins for set-up and for the environment's Python."""
    shutil.copy(ROOT / "Makefile", folder)
    write_script(folder / ".venv/bin/python", RECORDER)
    write_script(folder / "requirements/setup.sh", """\
echo "$@" >>asked
case $1 in --find-any | --get-uv) echo .venv/bin/python ;; esac
""")
    return folder


def make(folder, *arguments, **environment):
    """(arguments of the last call of Python, its environment), what was said.

    Without what a `make test` around this one has put into the environment.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith((
        "MAKE", "MFLAGS", "ARGS", "CH", "COURSE", "PYTHON", "JUPYTER"))}
    done = subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True,
                          env={**kept, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    calls = (folder / "calls").read_text().splitlines()
    return *json.loads(calls[-1]), done.stderr


@pytest.mark.parametrize("target, given, wanted", [
    ("lab", {"ARGS": "--port 9000"}, ["--port", "9000"]),
    ("test", {"ARGS": "-k 'a b'"}, ["-k", "a b"]),
    ("run", {"CH": "01 deeper/03"}, ["01", "deeper/03"]),
    ("grade", {"SUBMISSIONS": "a folder", "OUT": "its marks"}, ["a folder", "its marks"]),
])
def test_a_target_sets_up_and_hands_on_what_it_is_given(made, target, given, wanted):
    arguments, environment, _ = make(made, target, *(f"{name}={given[name]}" for name in given))
    assert arguments[-2:] == wanted
    assert environment["PATH"].startswith(f"{made}/.venv/bin:")
    assert (made / "asked").read_text() == "\n"


@pytest.mark.parametrize("target, option", [("doctor", "--find-any"), ("lock", "--get-uv")])
def test_doctor_and_lock_need_no_set_up(made, target, option):
    make(made, target)
    assert (made / "asked").read_text() == f"{option}\n"


@pytest.mark.parametrize("given, wanted", [
    ("data", "{}/data"), ("/data", "/data"), ("~/data", "~/data"), ("a b", "{}/a b"),
    ("/a b", "/a b")])
def test_course_data_is_as_seen_from_here(made, given, wanted):
    for typed, exported in (([f"COURSE_DATA={given}"], {}), ([], {"COURSE_DATA": given})):
        _, found, _ = make(made, "run", *typed, **exported)
        assert found["COURSE_DATA"] == wanted.format(made)


def test_a_home_that_cannot_be_written_is_replaced_in_a_word(made):
    home = str(made / "missing")
    _, environment, said = make(made, "run", HOME=home)
    assert environment["HOME"] == f"{made}/build/home" and home in said
    _, environment, said = make(made, "run", HOME=str(made))
    assert environment["HOME"] == str(made) and said == ""


def test_lab_gets_the_courses_settings_before_the_readers(made):
    """What they make of JupyterLab is for tests/browser."""
    ours = f"{made}/notebooks/src/lab"
    for theirs, wanted in (("", ours), ("/mine", f"{ours}:/mine")):
        _, environment, _ = make(made, "lab", JUPYTER_CONFIG_PATH=theirs)
        assert environment["JUPYTER_CONFIG_PATH"] == wanted


def test_grade_asks_for_the_folder(made):
    done = subprocess.run(["make", "grade", "SUBMISSIONS="], cwd=made, capture_output=True,
                          text=True)
    assert done.returncode and "make grade SUBMISSIONS=folder" in done.stderr
    assert not (made / "calls").exists()
