"""What GitHub reads: workflows, the container for codespaces, how to cite. GitHub is not asked."""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from check_jsonschema import main as check_jsonschema

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / ".devcontainer"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("schema, paths", [
    ("vendor.github-workflows", WORKFLOWS),
    ("vendor.dependabot", [ROOT / ".github/dependabot.yml"]),
    ("vendor.citation-file-format", [ROOT / "CITATION.cff"]),
])
def test_files_fit_their_published_schema(schema, paths, capsys):
    failed = check_jsonschema(["--builtin-schema", schema, *map(str, paths)],
                              standalone_mode=False)
    assert not failed, capsys.readouterr().out


def test_a_workflow_may_read_and_each_job_ends():
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] <= 360, "GitHub's own limit"


@pytest.mark.parametrize("name", ["tests", "nightly"])
def test_a_job_may_ask_git_of_a_checkout_that_belongs_to_another_user(name, tmp_path):
    """As in a container, where root runs the tests, and git would refuse to say anything."""
    workflow = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    checkout = tmp_path / "checkout"
    subprocess.run(["git", "init", "-q", checkout], check=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path),
                   "GITHUB_WORKSPACE": str(checkout), "GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"}
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            if "git config" in step.get("run", ""):
                subprocess.run(["sh", "-ec", step["run"]], env=environment, check=True)
    subprocess.run(["git", "ls-files"], cwd=checkout, env=environment, check=True)


def test_the_make_targets_that_are_run_exist():
    texts = [path.read_text() for path in [*WORKFLOWS, CONTAINER / "devcontainer.json"]]
    named = re.findall(r"\bmake((?: [a-z-]+)+)", "\n".join(re.findall(
        r'(?:run: |^ +|Command": ")(.*make .*)', "\n".join(texts), re.MULTILINE)))
    found = {target for targets in named for target in targets.split()}
    assert {"setup", "test", "book"} <= found
    assert found - {"python"} <= TARGETS


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
    (OTHER, OTHER, 403, 403), (LOCAL, f"{HERE}.evil.example", 403, 403)])
def test_a_codespace_has_its_own_address_and_no_other(server, host, origin, in_a_codespace,
                                                      elsewhere):
    codespace, port = server
    assert open_socket(port, host, origin) == (in_a_codespace if codespace else elsewhere)


def test_a_codespace_asks_for_the_token(server):
    assert ask(server[1], "/api/contents", Host="localhost:8888")[0] == 403
