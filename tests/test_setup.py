"""`make setup`, interrupted, doubled and in every kind of trouble; what Make hands to the tools.

All of it in a folder whose name has what a shell and Make could stumble over.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUP = ROOT / "requirements/setup.sh"
BASE_PYTHON = sys._base_executable
FOLDER = """it's a "té$t" $HOME"""


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / FOLDER
    path.mkdir()
    return path


def as_anybody():
    """Take from root what lets it write where permissions forbid it; nothing for anybody else."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(24, 1)   # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE


# --- Which Python -------------------------------------------------------------------------------

WORKS = f'exec "{BASE_PYTHON}" "$@"'
FAILS = "echo 'python3.11: command not found' >&2; exit 127"
# Runs what it is given, as a Python of another version would.
OTHER_VERSION = f"""exec "{BASE_PYTHON}" -c '
import sys
sys.version_info = (3, 12, 1)
exec(sys.argv[2])' "$@"
"""


def write_script(path, text):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    path.chmod(0o755)


def find_python(folder, launchers, **environment):
    """Run `setup.sh --find-python` where the PATH holds `launchers` {name: script} only."""
    for name, script in launchers.items():
        write_script(folder / name, f"#!/bin/sh\n{script}\n")
    folders = dict.fromkeys(str((folder / name).parent) for name in launchers)
    return subprocess.run(
        ["/bin/sh", str(SETUP), "--find-python"], capture_output=True, text=True,
        env={"PATH": ":".join(folders), "HOME": str(folder), **environment})


@pytest.mark.parametrize("launchers", [
    {"a/python3.11": WORKS},
    {"a/python3.11": FAILS, "a/python3": WORKS},
    {"a/python3.11": FAILS, "b/python3.11": WORKS},
    {"a/python3.11": FAILS, "a/python3": OTHER_VERSION, "b/python": WORKS},
])
def test_setup_passes_over_pythons_that_do_not_run(folder, launchers):
    result = find_python(folder, launchers)
    assert (result.returncode, result.stdout.strip()) == (0, BASE_PYTHON), result.stderr


def test_setup_takes_the_python_it_is_given(folder):
    given = folder / "mine"
    given.symlink_to(BASE_PYTHON)
    launchers = {"a/python3.11": FAILS}
    assert find_python(folder, launchers).returncode == 1
    result = find_python(folder, launchers, PYTHON=str(given))
    assert result.returncode == 0
    assert os.path.realpath(result.stdout.strip()) == os.path.realpath(BASE_PYTHON)


@pytest.mark.parametrize("given", ["/no/such", OTHER_VERSION])
def test_setup_takes_no_other_python_than_the_one_it_is_given(folder, given):
    if given == OTHER_VERSION:
        write_script(folder / "mine", f"#!/bin/sh\n{given}")
        given = str(folder / "mine")
    result = find_python(folder, {"a/python3.11": WORKS}, PYTHON=given)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"setup: PYTHON={given}: must be a Python 3.11 that runs, or not be set.\n")


def test_setup_finds_the_pythons_of_a_version_manager(folder):
    python = folder / ".pyenv/versions/3.11.7/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(BASE_PYTHON)
    result = find_python(folder, {"shims/python3.11": FAILS})
    assert result.returncode == 0


def test_setup_finds_none_where_there_is_none(folder):
    result = find_python(folder, {"a/python3.11": FAILS, "a/python3": OTHER_VERSION})
    assert (result.returncode, result.stdout) == (1, "")


# --- setup.sh with a stand-in for uv, pip and the commands by which it writes --------------------

# Each thing that one of them does is a step, noted in the file `steps`. At step number DIE_AT all
# processes are killed; at step FAIL_AT it ends badly, saying what SAYS holds.
STEP = """\
#!/bin/sh
step() {
    echo $1 >>steps
    number=$(wc -l <steps)
    [ $number != "${DIE_AT:-0}" ] || kill -9 0
    [ $number != "${FAIL_AT:-0}" ] || { echo "${SAYS:-no answer}" >&2; exit 1; }
    [ -z "${SLOW:-}" ] || sleep $SLOW
}
"""
UV = STEP + f"""
install() {{ for name; do step $name; echo "whole = True" >$site/$name.py; done; }}
site=.venv/lib/python3.11/site-packages
case "$*" in
    --version) ;;
    "cache dir") echo "$UV_CACHE_DIR" ;;
    "python dir") echo "$UV_PYTHON_INSTALL_DIR" ;;
    venv*)
        step venv
        {shutil.which("mkdir")} -p $site .venv/bin
        echo "home = {os.path.dirname(BASE_PYTHON)}" >.venv/pyvenv.cfg
        step python
        ln -s "{BASE_PYTHON}" .venv/bin/python ;;
    "pip install"*" pip")
        step pip
        echo "import os; os.execv('bin/uv', ['uv', 'torch'])" >$site/pip.py ;;
    "pip install"*)
        [ -z "${{UV_NO_CACHE:-}}" ] || echo "not used" >"$UV_CACHE_DIR"
        install numpy mxnet d2l ;;
    torch) install torch_first torch ;;
esac
"""
COMMANDS = ["sh", "cat", "cksum", "cp", "grep", "sed", "df", "awk", "ls", "ln", "sleep", "tail",
            "uname", "wc", *filter(shutil.which, ["flock"])]   # Macs have no flock
FRESH = ["mkdir", "tee", "venv", "python", "numpy", "mxnet", "d2l", "tee", "tee"]
AND_TORCH = ["pip", "torch_first", "torch", "tee", "tee"]
WHOLE = {"numpy.py", "mxnet.py", "d2l.py", "many_devices.pth"}
TORCH = WHOLE | {"pip.py", "torch_first.py", "torch.py"}


@pytest.fixture
def clone(folder):
    """What setup.sh needs of the repository, with the stand-ins on the PATH."""
    write_script(folder / "bin/uv", UV)
    for name in ("mkdir", "rm", "tee"):
        write_script(folder / "bin" / name,
                     f'{STEP}step {name}\nexec {shutil.which(name)} "$@"\n')
    for name in COMMANDS:
        (folder / "bin" / name).symlink_to(shutil.which(name))
    for name in ("requirements/setup.sh", "requirements/cpu.txt", "requirements/gpu.txt",
                 "helpers/gpu.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def begin(folder, *options, **environment):
    settings = {"TORCH": "0", "GPU": "0", "PYTHON": BASE_PYTHON, "UV_CACHE_DIR": "/cache",
                "PATH": f"{folder}/bin", "HOME": str(folder), **environment}
    return subprocess.Popen(["/bin/sh", "requirements/setup.sh", *options], cwd=folder, text=True,
                            env={**os.environ, **settings}, start_new_session=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            preexec_fn=as_anybody)


def set_up(folder, *options, **environment):
    """(exit status, what it said)"""
    process = begin(folder, *options, **environment)
    said = "".join(process.communicate(timeout=60))
    return process.returncode, said


def steps(folder):
    return (folder / "steps").read_text().split() if (folder / "steps").exists() else []


def installed(folder):
    return {path.name for path in folder.glob(".venv/lib/python3.11/site-packages/*.p*")}


def snapshot(folder):
    """All that is below a folder: {path: content, where a link leads, or None for a folder}."""
    return {path: os.readlink(path) if path.is_symlink() else
            path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_setup_makes_the_environment_once(clone):
    assert "Ready" in set_up(clone, TORCH="1")[1]
    assert steps(clone) == FRESH + AND_TORCH
    assert installed(clone) == TORCH
    assert (clone / ".venv/lib/python3.11/site-packages/many_devices.pth").read_text() == (
        f"{clone.resolve()}\n")
    assert set_up(clone, TORCH="1") == (0, "")
    assert steps(clone) == FRESH + AND_TORCH, "nothing is done twice"


@pytest.mark.parametrize("number", range(1, len(FRESH + AND_TORCH) + 1))
def test_setup_killed_at_any_step_and_run_again_ends_well(clone, number):
    torch = str(number % 2)
    status, _ = set_up(clone, TORCH="1", DIE_AT=str(number))
    assert status == -signal.SIGKILL and len(steps(clone)) == number
    assert set_up(clone, TORCH=torch)[0] == 0
    done = number == len(FRESH + AND_TORCH)   # and it is known that PyTorch is there
    assert installed(clone) == (TORCH if torch == "1" or done else WHOLE)
    assert set_up(clone, TORCH=torch) == (0, "")


def test_a_mark_that_was_not_written_any_more_is_a_mark(clone):
    (clone / ".venv").mkdir()
    (clone / ".venv/.many-devices").touch()
    (clone / ".venv/bin").mkdir()
    status, said = set_up(clone)
    assert status == 0 and "not finished the last time" in said


def test_setup_killed_while_it_makes_the_environment_anew_ends_well_and_with_pytorch(clone):
    assert set_up(clone, TORCH="1")[0] == 0
    before = len(steps(clone))
    assert set_up(clone, GPU="1")[0] == 0
    anew, gpu = steps(clone)[before:], "1"
    assert anew.count("rm") > 3 and anew[0] == "tee"
    # One step of each kind, and each that writes a mark.
    for number in sorted({*map(anew.index, anew), *(
            number for number, step in enumerate(anew) if step == "tee")}):
        gpu = "1" if gpu == "0" else "0"
        status, _ = set_up(clone, GPU=gpu, DIE_AT=str(len(steps(clone)) + 1 + number))
        assert status == -signal.SIGKILL, number
        assert set_up(clone, GPU=gpu)[0] == 0
        assert installed(clone) == TORCH, number


def test_two_setups_at_once_do_the_work_once(clone):
    both = [begin(clone, SLOW="0.1") for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert steps(clone) == FRESH
    assert sorted("waiting" in text for text in said) == [False, True]
    assert sorted("Ready" in text for text in said) == [False, True]
    assert installed(clone) == WHOLE


def test_another_lock_makes_it_anew_says_so_and_keeps_pytorch(clone):
    assert set_up(clone, TORCH="1")[0] == 0
    (clone / ".venv/lib/python3.11/site-packages/mine.py").touch()
    status, said = set_up(clone, GPU="1")
    assert status == 0 and said.splitlines()[0] == (
        "setup: .venv was made from another list of packages, so it is made anew, without what "
        "you may have installed into it")
    assert installed(clone) == TORCH


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_an_environment_that_came_with_its_folder_is_made_anew(clone, how):
    assert set_up(clone)[0] == 0
    moved = clone.with_name("moved")
    if how == "moved":
        clone.rename(moved)
    else:
        subprocess.run(["cp", "-r", clone, moved], check=True)
    before = snapshot(clone)
    status, said = set_up(moved)
    assert status == 0 and "made when this folder had another path, so it is made anew" in said
    assert (moved / ".venv/lib/python3.11/site-packages/many_devices.pth").read_text().strip() == (
        str(moved))
    assert snapshot(clone) == before


def test_an_environment_whose_python_is_gone_is_made_anew(clone):
    assert set_up(clone)[0] == 0
    (clone / ".venv/bin/python").unlink()
    status, said = set_up(clone)
    assert status == 0 and "doesn't run any more, so it is made anew" in said


def environment_by_hand(folder):
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    (folder / ".venv/notes.txt").write_text("mine")


def half_an_environment(folder):
    (folder / ".venv/bin").mkdir(parents=True)


def link_to_another(folder):
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/.many-devices").write_text("/elsewhere 1 2\n")
    (folder / ".venv").symlink_to("elsewhere")


def link_to_nothing(folder):
    (folder / ".venv").symlink_to("nowhere")


def plain_file(folder):
    (folder / ".venv").write_text("the-name-of-an-environment\n")


@pytest.mark.parametrize("make, sentence", [
    (environment_by_hand, ".venv does not have set-up's mark, so it may be somebody's own, "
     "and is left alone: move it away or delete it, then try again."),
    (half_an_environment, ".venv does not have set-up's mark"),
    (link_to_another, ".venv is a symbolic link, which set-up never makes, and is left alone: "
     "remove the link, then try again."),
    (link_to_nothing, ".venv is a symbolic link"),
    (plain_file, ".venv is a file, which set-up never makes, and is left alone: move it away or "
     "delete it, then try again."),
])
@pytest.mark.parametrize("torch", ["0", "1"])
def test_setup_leaves_alone_what_it_did_not_make(clone, make, sentence, torch):
    make(clone)
    before = snapshot(clone)
    status, said = set_up(clone, TORCH=torch)
    assert status == 1 and said.startswith(f"setup: {sentence}") and said.count("\n") == 1
    assert snapshot(clone) == before


def test_an_empty_folder_is_nobodys(clone):
    """A disk may be mounted there, so it is not removed either."""
    (clone / ".venv").mkdir()
    number = (clone / ".venv").stat().st_ino
    assert set_up(clone)[0] == 0
    assert installed(clone) == WHOLE and (clone / ".venv").stat().st_ino == number


# --- Reasons ------------------------------------------------------------------------------------

# What uv 0.13 and pip 23 to 26 said when they were brought into these situations.
DNS = """\
error: Request failed after 3 retries in 4.3s
  cause: Failed to fetch: https://index.example/simple/numpy/
  cause: error sending request for url (https://index.example/simple/numpy/)
  cause: client error (Connect)
  cause: dns error
  cause: error resolving DNS
  cause: failed to lookup address information: Temporary failure in name resolution"""
REFUSED = """\
error: Request failed after 3 retries in 9.7s
  cause: error sending request for url (http://127.0.0.1:9/simple/foo/)
  cause: client error (Connect)
  cause: tcp connect error
  cause: Connection refused (os error 111)"""
GITHUB = DNS.replace("Failed to fetch: https://index.example/simple/numpy/", "Failed to download "
                     "`https://github.com/astral-sh/python-build-standalone/releases/…`")
PIP_DNS = """\
WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) after \
connection broken by 'NewConnectionError('<pip._vendor.urllib3.connection.HTTPSConnection object \
at 0x7fa780118750>: Failed to establish a new connection: [Errno -3] Temporary failure in name \
resolution')': /simple/uv/
ERROR: Could not find a version that satisfies the requirement uv==0.13.8 (from versions: none)
ERROR: No matching distribution found for uv==0.13.8"""
PIP_26_DNS = """\
WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) after \
connection broken by 'NameResolutionError("HTTPSConnection(host='index.example', port=443): Failed \
to resolve 'index.example' ([Errno -3] Temporary failure in name resolution)")': /simple/torch/
ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)
ERROR: No matching distribution found for torch==2.13.0"""
PIP_26_DISK = """\
  WARNING: Connection interrupted while downloading.
  WARNING: Attempting to resume incomplete download (15.7 MB/526.6 MB, attempt 5)
  WARNING: Connection interrupted while downloading.
error: incomplete-download

× Download failed after 6 attempts because not enough bytes were received (15.7 MB/526.6 MB)

note: This is an issue with network connectivity, not pip."""
CERTIFICATE = """\
error: Failed to fetch: https://localhost:18778/simple/foo/
  cause: error sending request for url (https://localhost:18778/simple/foo/)
  cause: client error (Connect)
  cause: invalid peer certificate: UnknownIssuer"""
PIP_CERTIFICATE = """\
WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) after \
connection broken by 'SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] \
certificate verify failed: self-signed certificate (_ssl.c:992)'))': /simple/torch/
ERROR: No matching distribution found for torch==2.13.0"""
DISK = """\
error: Failed to write to the client cache
  cause: failed to write to file `/c/wheels-v7/pypi/jupyterlab-pygments/.tmpb6wHFV`: No space left \
on device (os error 28)"""
PIP_DISK = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
QUOTA = "error: failed to write to file `.venv/.gitignore`: Disk quota exceeded (os error 122)"
PERMISSION = """\
error: Failed to initialize cache at `/home/ada/.cache/uv`
  cause: failed to create directory `/home/ada/.cache/uv`: Permission denied (os error 13)"""
READ_ONLY = "error: failed to create directory `/c`: Read-only file system (os error 30)"
PLATFORM = """\
error: No solution found when resolving dependencies
  cause: Because mxnet==1.9.1 has no wheels with a matching platform tag (e.g., \
`macosx_13_0_arm64`) and you require mxnet==1.9.1, we can conclude that your requirements are \
unsatisfiable."""
UNAVAILABLE = """\
error: Request failed after 3 retries in 6.6s
  cause: Failed to fetch: http://127.0.0.1:18777/503/simple/foo/
  cause: HTTP status server error (503 Service Unavailable) for url (http://127.0.0.1:18777/foo/)"""
NOT_FOUND = """\
error: No solution found when resolving dependencies
  cause: Because foo was not found in the package registry and you require foo==1, we can conclude \
that your requirements are unsatisfiable."""
NEVER = """\
error: No interpreter found for Python 3.11 in managed installations or search path

hint: A managed Python download is available for Python 3.11, but Python downloads are set to \
'never'"""

NO_NETWORK = "there is no network, or none that leads there: check it, then try again."
NO_SPACE = r"no space is left \(free: \d+ MB in /.*, \d+ MB in /.*, \d+ MB in /.*\); "
REASONS = [
    (DNS, re.escape(NO_NETWORK)),
    (REFUSED, re.escape(NO_NETWORK)),
    (PIP_DNS, re.escape(NO_NETWORK)),
    (PIP_26_DNS, re.escape(NO_NETWORK)),
    (PIP_26_DISK, r"the download broke off, by the network or for want of space \(free: \d+ .*"),
    (CERTIFICATE, ".* certificate that is not trusted here: SSL_CERT_FILE can name .*"),
    (PIP_CERTIFICATE, ".* certificate that is not trusted here.*"),
    (DISK, NO_SPACE + ".*GB.*"),
    (PIP_DISK, NO_SPACE + ".*GB.*"),
    (QUOTA, NO_SPACE + ".*GB.*"),
    (PERMISSION, "you may not write to a file or a folder, or not run a program."),
    (READ_ONLY, "you may not write to a file or a folder, or not run a program."),
    (PLATFORM, r"there is a package of which this kind of machine \(.*\) has no build\."),
    (UNAVAILABLE, "the package index answers, but does not hand out what is asked of it."),
    (NOT_FOUND, "the package index answers, but does not hand out what is asked of it."),
    ("\n".join(["ERROR: Exception:", *["  File ..."] * 60, PIP_DISK]), NO_SPACE + ".*GB.*"),
    ("thread 'main' panicked at src/main.rs", "set-up can't tell why; what (uv|pip) says may."),
]


def assert_told(said, what, reason, tool, words):
    """One sentence with the reason, and after it the tool's words: before it, what was done."""
    lines = said.splitlines()
    (sentence,) = [line for line in lines if line.startswith("setup: ") and "anew" not in line]
    assert re.fullmatch(re.escape(f"setup: {what}: ") + reason, sentence), sentence
    before, after = lines[:lines.index(sentence)], lines[lines.index(sentence) + 1:]
    assert not set(map(str.strip, before)) & set(map(str.strip, words.splitlines()))
    assert after == ([f"{tool} says:"] + [f"    {line}" for line in words.splitlines()[-12:]]
                     if words else [])


STEPS = [
    ("venv", ".venv could not be made", "uv"),
    ("mxnet", "the packages could not be installed", "uv"),
    ("pip", "PyTorch could not be installed (all but chapters 13 to 16 works without)", "uv"),
    ("torch", "PyTorch could not be installed (all but chapters 13 to 16 works without)", "pip"),
]


# Each reason at one of the steps, and the first at all of them.
@pytest.mark.parametrize("number, which", [
    (number, which) for number in range(len(REASONS)) for which in range(len(STEPS))
    if number == 0 or number % len(STEPS) == which])
def test_a_failure_is_told_by_its_reason_then_in_the_tools_words(clone, number, which):
    (words, reason), (step, what, tool) = REASONS[number], STEPS[which]
    number = (FRESH + AND_TORCH).index(step) + 1
    status, said = set_up(clone, TORCH="1", FAIL_AT=str(number), SAYS=words)
    assert status == 1
    assert_told(said, what, reason, tool, words)


@pytest.mark.parametrize("number", range(1, len(FRESH + AND_TORCH) + 1))
def test_setup_that_failed_at_any_step_and_is_run_again_ends_well(clone, number):
    status, said = set_up(clone, TORCH="1", FAIL_AT=str(number))
    assert status == 1 and "could not be " in said and "says:\n    no answer" in said
    assert set_up(clone, TORCH="1")[0] == 0
    assert installed(clone) == TORCH


OTHER_WAYS = (" uv fetches it from GitHub. Other ways: .*apt install python3.11-venv.*conda.*"
              "UV_PYTHON_INSTALL_MIRROR .*")


@pytest.mark.parametrize("words, reason", [
    (GITHUB, re.escape(NO_NETWORK) + OTHER_WAYS), (DISK, NO_SPACE + ".*GB.*"),
    (NEVER, "uv's settings forbid it: change them." + OTHER_WAYS)])
def test_without_a_python_it_is_uv_that_cannot_fetch_one(clone, words, reason):
    status, said = set_up(clone, FAIL_AT="3", SAYS=words, PYTHON="")
    assert status == 1
    assert_told(said, "no Python 3.11 was found, and uv could not fetch one", reason, "uv", words)


def test_a_tool_that_dies_without_a_word_is_told_with_its_status(clone):
    uv = clone / "bin/uv"
    uv.write_text(UV.replace("install numpy", "kill -9 $$; install numpy"))
    status, said = set_up(clone)
    assert status == 1 and said.splitlines()[-1] == (
        "setup: the packages could not be installed: uv ended with status 137 and without a word.")


def test_what_is_fetched_is_said_while_it_comes_and_what_else_is_said_is_not(clone):
    said = "Resolved 3 packages\nDownloading mxnet (46.8MiB)\n   Building yattag==1.16.1\n + mxnet"
    uv = clone / "bin/uv"
    uv.write_text(UV.replace("install numpy", f'echo "{said}" >&2; read line <go; install numpy'))
    os.mkfifo(clone / "go")
    process = begin(clone)
    seen = [process.stderr.readline() for _ in range(3)]    # and uv has not ended yet
    (clone / "go").write_text("on\n")
    rest = "".join(process.communicate(timeout=60))
    assert seen == ["Installing the packages: up to 400 MB to fetch\n",
                    "  Downloading mxnet (46.8MiB)\n", "  Building yattag==1.16.1\n"]
    assert rest.startswith("Ready: ") and process.returncode == 0


# In place of df: FREE kilobytes are free everywhere, and the cache is on the disk CACHE_DISK.
DF = """#!/bin/sh
case "$2" in */cache) disk=$CACHE_DISK ;; *) disk=one ;; esac
echo "Filesystem 1024-blocks Used Available Capacity Mounted on"
echo "$disk 1 1 $FREE 1% /"
"""


@pytest.mark.parametrize("gpu, megabytes, enough", [
    ("0", 1399, False), ("0", 1400, True), ("1", 5399, False), ("1", 5400, True)])
def test_a_disk_that_is_too_small_is_told_before_anything_is_written(clone, gpu, megabytes, enough):
    (clone / "bin/df").unlink()
    write_script(clone / "bin/df", DF)
    status, said = set_up(clone, GPU=gpu, FREE=str(-(-megabytes * 10**6 // 1024)), CACHE_DISK="one")
    if enough:
        assert status == 0 and "are free" not in said
        return
    assert status == 1 and said.startswith(f"setup: {megabytes} MB are free in {clone}, and the "
                                           "environment takes 1.4 GB"), said
    assert said.endswith("free some, or put the course elsewhere. Nothing was changed.\n")
    assert not steps(clone) and not (clone / ".venv").exists()


@pytest.mark.parametrize("gpu, megabytes", [("0", 1400), ("1", 5400)])
def test_the_room_that_it_needs_can_be_asked_for(clone, gpu, megabytes):
    assert set_up(clone, "--find-room", GPU=gpu) == (0, f"{megabytes}\n")


@pytest.mark.parametrize("disk, goes_on", [("one", True), ("another", False)])
def test_a_cache_on_the_same_disk_may_have_it_all(clone, disk, goes_on):
    (clone / "bin/df").unlink()
    write_script(clone / "bin/df", DF)
    (clone / "cache").mkdir()
    status, said = set_up(clone, FREE="1000", CACHE_DISK=disk, UV_CACHE_DIR=f"{clone}/cache")
    assert (status == 0) == goes_on and "1 MB are free" in said
    assert ("has the packages already" in said) == goes_on


@pytest.mark.parametrize("which, told", [
    ("../cache", "you may not write to uv's {parent}/cache: let UV_CACHE_DIR name another folder."),
    ("pythons", "you may not write to uv's {clone}/pythons: let UV_PYTHON_INSTALL_DIR name another "
     "folder."),
    (".", "you may not write to {clone}: change its owner or permissions, or put the course "
     "elsewhere."),
    ("build", "you may not write to {clone}/build: change its owner or permissions, or put the "
     "course elsewhere."),
])
def test_a_folder_that_may_not_be_written_is_named(clone, which, told):
    (clone / which).mkdir(exist_ok=True)
    (clone / "steps").touch()
    (clone / which).chmod(0o555)
    try:
        status, said = set_up(clone, SAYS=PERMISSION,
                              UV_CACHE_DIR=f"{clone.parent}/cache",
                              UV_PYTHON_INSTALL_DIR=f"{clone}/pythons",
                              FAIL_AT="0" if which == "." else "3")
    finally:
        (clone / which).chmod(0o755)
    what, tool, words = ".venv could not be made", "uv", PERMISSION
    if which == ".":   # the system's own words
        tool, words = "The system", said.split("    ", 1)[1].strip()
        assert "ermission denied" in words
    assert status == 1
    assert_told(said, what, re.escape(told.format(clone=clone, parent=clone.parent)), tool, words)


def test_a_cache_in_which_a_package_cannot_be_built_is_not_used(clone):
    cache = clone / "ca$he"
    status, said = set_up(clone, UV_CACHE_DIR=str(cache))
    assert status == 0 and cache.read_text() == "not used\n"
    assert said.startswith(f"setup: uv's cache, {cache}, has a $ in its path, where not all "
                           "packages can be built, so it is not used\n")


def test_what_worked_before_pytorch_could_not_be_fetched_still_works(clone):
    assert set_up(clone)[0] == 0
    for step in ("pip", "torch_first"):
        done = len(steps(clone))
        number = done + 1 + AND_TORCH.index(step)
        assert set_up(clone, TORCH="1", FAIL_AT=str(number), SAYS=PIP_DNS)[0] == 1
        assert set_up(clone) == (0, ""), "nothing had changed, so nothing is made anew"


# In place of a Python that fetches uv: its venv module and its pip.
FETCHER = f"""\
#!/bin/sh
case "$*" in
    *ensurepip*) [ "$KIND" != no-venv ] && echo "$0" ;;
    "-m venv"*) [ "$KIND" != venv ] || {{ echo "$SAYS" >&2; exit 1; }}
        mkdir -p build/uv/bin; cp "$0" build/uv/bin/python ;;
    "-m pip"*) [ "$KIND" != pip ] || {{ echo "$SAYS" >&2; exit 1; }}
        cp stand-in build/uv/bin/uv ;;
    *) exec "{BASE_PYTHON}" "$@" ;;
esac
"""


@pytest.fixture
def without_uv(clone):
    (clone / "bin/uv").rename(clone / "stand-in")
    write_script(clone / "bin/python3", FETCHER)
    return clone


@pytest.mark.parametrize("kind, words, told", [
    ("pip", PIP_DNS, ("uv could not be fetched", re.escape(NO_NETWORK), "pip")),
    ("pip", PIP_DISK, ("uv could not be fetched", NO_SPACE + ".*", "pip")),
    ("pip", "ERROR: No matching distribution found for uv==0.13.8",
     ("uv could not be fetched", "the package index answers.*", "pip")),
    ("venv", "Error: [Errno 28] No space left on device",
     ("build/uv could not be made", NO_SPACE + ".*", "Python")),
    ("no-venv", "", None),
])
def test_a_uv_that_cannot_be_fetched_is_told_by_its_reason(without_uv, kind, words, told):
    status, said = set_up(without_uv, KIND=kind, SAYS=words, PYTHON="")
    assert status == 1
    if told:
        assert_told(said, *told, words)
    else:
        assert said == (f"setup: uv could not be fetched: {BASE_PYTHON} has no venv module (Debian "
                        "and Ubuntu: apt install python3-venv). Install that, or uv, then try "
                        "again.\n")
    status, said = set_up(without_uv, KIND="", PYTHON="")
    assert status == 0 and "Fetching uv" in said
    assert installed(without_uv) == WHOLE


def test_with_neither_python_nor_uv_one_of_them_is_asked_for(without_uv):
    (without_uv / "bin/python3").unlink()
    status, said = set_up(without_uv, PYTHON="")
    assert (status, said) == (1, "setup: there is no Python 3.11 here and no uv to fetch one: "
                                 "install one of them, then try again.\n")


def test_a_colon_in_the_path_is_named(clone):
    moved = clone.rename(clone.with_name("a:b"))
    status, said = set_up(moved, PATH=os.environ["PATH"])
    assert status == 1 and said == (
        f"setup: the path {moved} has a colon, which the PATH to programs in it can't hold: move "
        "the course to a folder without one.\n")


def test_an_option_that_is_none_is_named(clone):
    status, said = set_up(clone, "--find-pyhton")
    assert status == 1 and said.startswith("setup: there is no option --find-pyhton")
    assert steps(clone) == []


# --- What Make hands on -------------------------------------------------------------------------

# In place of the environment's Python: notes how it was called.
RECORDER = f"""\
#!{BASE_PYTHON} -S
import json, os, sys
with open("calls", "a") as calls:
    calls.write(json.dumps([sys.argv, dict(os.environ)]) + "\\n")
"""
VALUE = """it's "$x" $(y) `z` \\ é"""


@pytest.fixture
def made(folder):
    """The Makefile, beside stand-ins for set-up and for the environment's Python."""
    (folder / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    write_script(folder / ".venv/bin/python", RECORDER)
    for name in ("LICENSE", "notebooks/01_a.ipynb", "notebooks/deeper/01_a.ipynb",
                 "notebooks/ddp_train.py", "notebooks/map.md", "notebooks/src/book/index.md",
                 "notebooks/src/drawings/a.svg", "notebooks/src/figures/a.png"):  # make book's
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).touch()
    write_script(folder / "requirements/setup.sh", """\
echo "$@" >>asked
case $1 in --find-any) echo .venv/bin/python ;; --get-uv) echo .venv/bin/python ;; esac
""")
    return folder


def from_a_shell():
    """The environment without what a `make test` around this one has put there."""
    return {name: value for name, value in os.environ.items() if not name.startswith((
        "MAKE", "MFLAGS", "ARGS", "CH", "COURSE", "PYTHON", "JUPYTER", "IPYTHON", "MPL", "UV"))}


def make(folder, *arguments, **environment):
    """(arguments of the last call of Python, its environment), what was said."""
    done = subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True,
                          env={**from_a_shell(), **environment}, preexec_fn=as_anybody)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = (folder / "calls").read_text().splitlines()
    return *json.loads(calls[-1]), done.stderr


# Those that run a program, of all that `make help` lists.
LISTED = re.findall("^([a-z-]+):.* ## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
TARGETS = [target for target in LISTED if target not in ("help", "setup", "clean")]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("typed", [True, False], ids=["typed", "exported"])
def test_every_target_hands_on_what_it_is_given(made, target, typed):
    given = {"SUBMISSIONS": VALUE, "OUT": VALUE, "COURSE_DATA": VALUE, "UV_CACHE_DIR": VALUE,
             "PYTHON": VALUE, "CH": "01 * $x"}
    words = [f"{name}={value}" for name, value in given.items()] if typed else []
    arguments, environment, _ = make(made, target, *words, **({} if typed else given))
    assert environment["PATH"].split(":")[0] == f"{made}/.venv/bin"
    assert environment["COURSE_DATA"] == f"{made}/{VALUE}"
    assert environment["UV_CACHE_DIR"] == environment["PYTHON"] == VALUE
    asked = (made / "asked").read_text().split("\n")[:-1]
    assert asked == {"doctor": ["--find-any"], "lock": ["--get-uv"]}.get(target, [""])
    if target == "grade":
        assert arguments[1:] == ["-m", "marking", "grade", VALUE, VALUE]
    if target in ("run", "notebooks"):
        assert arguments[2:] == ["01", "*", "$x"]
    if target in ("bench", "reproduce"):
        assert environment["PYTHONPATH"] == str(made)
    if target in ("assignments", "grade"):
        assert environment["PYTHONPATH"] == f"{made}/notebooks/assignments"


@pytest.mark.parametrize("target, given, wanted", [
    ("test", {}, "few"), ("test", {"COURSE_ROUNDS": "all"}, "all"),
    ("run", {}, None), ("notebooks", {}, None), ("lab", {}, None)])
def test_only_the_tests_take_few_rounds_and_only_if_nobody_asks_for_all(
        made, target, given, wanted):
    _, environment, _ = make(made, target, **given)
    assert environment.get("COURSE_ROUNDS") == wanted


@pytest.mark.parametrize("target", ["lab", "test", "test-grading", "bench", "lint"])
def test_args_are_read_by_a_shell(made, target):
    given = """-k 'a b' "$WORD" '$x'"""
    for words, environment in ([f"ARGS={given}"], {}), ([], {"ARGS": given}):
        arguments, _, _ = make(made, target, *words, **environment, WORD="one word")
        assert arguments[-4:] == ["-k", "a b", "one word", "$x"]


@pytest.mark.parametrize("given, wanted", [
    ("data", "{}/data"), ("/data", "/data"), ("~/data", "~/data"), ("a b", "{}/a b"),
    ("/a b", "/a b")])
def test_course_data_is_as_seen_from_here(made, given, wanted):
    for words, environment in ([f"COURSE_DATA={given}"], {}), ([], {"COURSE_DATA": given}):
        _, found, _ = make(made, "run", *words, **environment)
        assert found["COURSE_DATA"] == wanted.format(made)


HOMES = ["UV_CACHE_DIR", "UV_PYTHON_INSTALL_DIR", "PIP_CACHE_DIR", "JUPYTER_CONFIG_DIR",
         "JUPYTER_DATA_DIR", "IPYTHONDIR", "MPLCONFIGDIR"]


@pytest.mark.parametrize("home", ["read-only", "missing", "none"])
def test_a_home_that_cannot_be_written_is_replaced_in_a_word(made, home):
    place = made / home
    if home == "read-only":
        place.mkdir(mode=0o555)
    _, environment, said = make(made, "run", HOME="" if home == "none" else str(place),
                                MPLCONFIGDIR="/mine")
    for name in HOMES[:-1]:
        assert environment[name].startswith(f"{made}/build/home/"), name
    assert environment["MPLCONFIGDIR"] == "/mine", "what a reader has set stays"
    assert len({environment[name] for name in HOMES}) == len(HOMES)
    assert said.splitlines() == [f"The home, HOME={environment['HOME']}, can't be written to: "
                                 "caches and settings go to build/home"]


def test_a_home_that_can_be_written_is_used(made):
    (made / "home").mkdir()
    _, environment, said = make(made, "run", HOME=str(made / "home"))
    assert not set(HOMES) & set(environment) and said == ""


def test_lab_gets_the_courses_settings_before_the_readers(made):
    """What they make of JupyterLab is for tests/browser."""
    for theirs in ("", VALUE):
        arguments, environment, _ = make(made, "lab", "ARGS=--port 9000",
                                         JUPYTER_CONFIG_PATH=theirs)
        assert arguments[1:3] == ["-m", "jupyterlab"] and arguments[-2:] == ["--port", "9000"]
        ours = f"{made}/notebooks/src/lab"
        assert environment["JUPYTER_CONFIG_PATH"] == (f"{ours}:{theirs}" if theirs else ours)


def test_grade_asks_for_the_folder(made):
    done = subprocess.run(["make", "grade", "SUBMISSIONS="], cwd=made, capture_output=True,
                          text=True)
    assert done.returncode and "make grade SUBMISSIONS=folder" in done.stderr
    assert not (made / "calls").exists()


def test_make_alone_lists_the_targets_in_columns(made):
    lines = subprocess.run(["make"], cwd=made, capture_output=True, text=True, check=True,
                           env=from_a_shell()).stdout.splitlines()
    listed = [re.fullmatch(r"(  make ([a-z-]+) +)\S.*", line) for line in lines]
    assert {match[2] for match in listed} == {*TARGETS, "help", "setup", "clean"}
    assert len({len(match[1]) for match in listed}) == 1
    assert not (made / "asked").exists()
