"""What GitHub reads: workflows, the container for codespaces, how to cite. GitHub is not asked."""

import contextlib
import http.client
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from check_jsonschema import main as check_jsonschema

ROOT = Path(__file__).resolve().parents[1]
CONTAINER = ROOT / ".devcontainer"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
JOBS = {f"{path.stem}: {name}": job for path in WORKFLOWS
        for name, job in yaml.safe_load(path.read_text())["jobs"].items()}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
jobs = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)


@pytest.mark.parametrize("schema, paths", [
    ("vendor.github-workflows", WORKFLOWS),
    ("vendor.dependabot", [ROOT / ".github/dependabot.yml"]),
    ("vendor.citation-file-format", [ROOT / "CITATION.cff"]),
])
def test_files_fit_their_published_schema(schema, paths, capsys):
    failed = check_jsonschema(["--builtin-schema", schema, *map(str, paths)],
                              standalone_mode=False)
    assert not failed, capsys.readouterr().out


def test_actions_are_pinned_by_commit_with_the_version_beside_it():
    uses = [line.split("uses:")[1].strip() for path in WORKFLOWS
            for line in path.read_text().splitlines() if "uses:" in line]
    assert len(uses) >= len(WORKFLOWS)
    for each in uses:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each), each
    assert len(set(uses)) == len({each.split("@")[0] for each in uses}), "two versions of one"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_and_no_more(path):
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}


@jobs
def test_a_job_has_a_limit_and_only_deploying_may_write(job):
    assert job["timeout-minutes"] <= 360, "GitHub's own limit"
    deploys = any("deploy-pages" in step.get("uses", "") for step in job["steps"])
    assert job.get("permissions") == ({"pages": "write", "id-token": "write"} if deploys else None)


@jobs
def test_a_checkout_finds_git_and_leaves_no_token(job):
    """A container of Debian's has no git, without which a checkout is no repository."""
    installed = ""
    for step in job["steps"]:
        installed += step.get("run", "")
        if step.get("uses", "").startswith("actions/checkout@"):
            assert re.search(r"apt-get install .*\bgit\b", installed)
            assert step["with"]["persist-credentials"] is False


def commands(job):
    """The lines of shell that a job runs, in each row of its matrix."""
    for row in job.get("strategy", {}).get("matrix", {}).get("include", [{}]):
        for step in job["steps"]:
            text = step.get("run", "").replace("\\\n", " ")
            for name, value in row.items():
                text = text.replace(f"${{{{ matrix.{name} }}}}", value)
            yield from text.splitlines()


def test_what_workflows_run_is_there():
    found = set()
    for line in (line for job in JOBS.values() for line in commands(job)):
        words = [word for word in shlex.split(line) if not re.match(r"COURSE_\w+=|TORCH=", word)]
        if words[0] == "make":
            found.add("make")
            assert words[1] in TARGETS, line
            for word in words[2:]:
                assert (ROOT / word.removeprefix("ARGS=")).exists(), line
        elif "/" in words[0] and not words[0].startswith(".venv/"):   # which make setup makes
            found.add("path")
            assert os.access(ROOT / words[0], os.X_OK), line
        elif not words[0].startswith(".venv/"):
            assert words[0] in ("apt-get", "bwrap", "git"), line
    assert found == {"make", "path"}, "both kinds are seen at all"


def test_what_workflows_upload_is_made_here():
    makers = {"build/book": "Makefile", "build/screenshots": "tests/browser/places.py"}
    uploaded = [step["with"]["path"] for job in JOBS.values() for step in job["steps"]
                if "/upload-" in step.get("uses", "")]
    assert sorted(uploaded) == sorted(makers)
    for folder, maker in makers.items():
        assert folder in (ROOT / maker).read_text()


def test_the_container_is_x86_64_debian_12_and_sets_itself_up():
    settings = json.loads((CONTAINER / "devcontainer.json").read_text())
    recipe = (CONTAINER / settings["build"]["dockerfile"]).read_text()
    platform = "--platform=linux/amd64"
    assert platform in settings["build"]["options"] and platform in settings["runArgs"]
    assert re.search(rf"^FROM {platform} \S+bookworm$", recipe, re.MULTILINE)
    make, target = settings["postCreateCommand"].split()
    assert make == "make" and target in TARGETS
    for name in re.findall(r"^COPY (\S+)", recipe, re.MULTILINE):
        assert (CONTAINER / name).is_file()
    assert settings["forwardPorts"] == [8888], "jupyter_server_config.py names this one"


# What `make lab` finds in a codespace. GitHub's proxy changes Host, or Origin, or both.

HERE = "https://blue-fox-8888.app.example"
OTHER = "https://red-fox-8888.app.example"
LOCAL = "http://localhost:8888"


@pytest.fixture(scope="module", params=[True, False], ids=["codespace", "elsewhere"])
def server(request, tmp_path_factory):
    """(whether in a codespace, the port of a server there, whose token is "secret")."""
    folder = tmp_path_factory.mktemp("server")
    environment = {name: value for name, value in os.environ.items() if "CODESPACE" not in name}
    environment |= {"JUPYTER_CONFIG_PATH": str(CONTAINER), "JUPYTER_RUNTIME_DIR": str(folder),
                    "JUPYTER_CONFIG_DIR": str(folder), "JUPYTER_TOKEN": "secret"}
    if request.param:
        environment |= {"CODESPACE_NAME": "Blue-fox",
                        "GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN": "app.example"}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_server", "--ip=127.0.0.1", "--port=0", "--no-browser",
             "--allow-root", f"--ServerApp.root_dir={folder}"],
            env=environment, stdout=log, stderr=log)
    try:
        yield request.param, wait_for_server(folder, process)
    finally:
        process.kill()
        process.wait()


def wait_for_server(folder, process):
    """The port, once there is an answer: its file comes earlier, and grows."""
    for _ in range(600):
        with contextlib.suppress(StopIteration, ValueError, ConnectionRefusedError):
            port = json.loads(next(folder.glob("jpserver-*.json")).read_text())["port"]
            ask(port, "/api", Host="localhost:8888")
            return port
        if process.poll() is not None:
            break
        time.sleep(0.1)
    pytest.fail(f"the server did not start: {(folder / 'log').read_text()}")


def ask(port, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Set-Cookie", "").split(";")[0]


def open_socket(port, host, origin):
    """The status that a page at `origin` gets for a web socket, once the token was shown."""
    host = host.split("//")[1]
    status, cookie = ask(port, "/login?token=secret", Host=host)
    if status == 403:
        return status
    assert cookie, "one who shows the token is let in"
    key = {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "c2l4dGVlbiBieXRlcyEhIQ=="}
    return ask(port, "/api/events/subscribe", Host=host, Origin=origin, Cookie=cookie,
               Connection="Upgrade", Upgrade="websocket", **key)[0]


@pytest.mark.parametrize("host, origin, in_a_codespace, elsewhere", [
    (LOCAL, LOCAL, 101, 101), (LOCAL, HERE, 101, 403), (HERE, LOCAL, 101, 403),
    (HERE, HERE, 101, 403), (LOCAL, OTHER, 403, 403), (OTHER, OTHER, 403, 403),
    (LOCAL, f"{HERE}.evil.example", 403, 403)])
def test_a_codespace_has_its_own_address_and_no_other(server, host, origin, in_a_codespace,
                                                      elsewhere):
    codespace, port = server
    assert open_socket(port, host, origin) == (in_a_codespace if codespace else elsewhere)


def test_a_codespace_asks_for_the_token(server):
    assert ask(server[1], "/api/contents", Host="localhost:8888")[0] == 403
