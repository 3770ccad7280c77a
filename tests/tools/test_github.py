"""What GitHub reads: workflows and how to cite. GitHub is not asked."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from check_jsonschema import main as check_jsonschema

ROOT = Path(__file__).resolve().parents[2]
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
    texts = [path.read_text() for path in WORKFLOWS]
    named = re.findall(r"\bmake((?: [a-z-]+)+)", "\n".join(re.findall(
        r"(?:run: |^ +)(.*make .*)", "\n".join(texts), re.MULTILINE)))
    found = {target for targets in named for target in targets.split()}
    assert {"setup", "test", "book"} <= found
    assert found - {"python"} <= TARGETS
