"""GitHub's workflows run what .ci/run runs, on every Python and torch, with few permissions; and
the forms and hooks beside them are valid."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_versions import pythons

from fx_fuser import versions

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: transformers brings it")

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}
OTHERS = (*(ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"), ROOT / ".pre-commit-config.yaml")
# Commands that only a workflow needs, and why.
ONLY_THERE = {
    ".venv/bin/python -m pytest -q -n 2 -m slow tests/package/test_readme.py": (
        "the slow tests that a change of a page needs, without waiting for all"
    ),
    'ls "$scratch"/dist/fx_fuser-"${GITHUB_REF_NAME#v}"-*.whl '
    '"$scratch"/dist/fx_fuser-"${GITHUB_REF_NAME#v}".tar.gz': "only a release has a tag",
}
# Variables that .ci/run sets otherwise.
SYNTAX = re.compile(r"\w+=(\(.*\)|\$\(\(.*\)\)\S*|\S+)$")
Workflow = dict[Any, Any]


def commands(text: str) -> list[str]:
    """A script's lines, those that go on joined. The checkout of .ci/run is a copy."""
    joined = re.sub(r"(\\|(?<=\|))\n\s*", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    lines = (" ".join(line.split()) for line in joined.splitlines())
    return [line.replace('"$scratch/copy/.venv/bin/python"', ".venv/bin/python") for line in lines]


def known() -> set[str]:
    readme = (ROOT / "README.md").read_text()
    shown = re.findall(r"^```sh\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    return {*commands((ROOT / ".ci/run").read_text()), *commands("\n".join(shown)), *ONLY_THERE}


def steps(workflow: Workflow) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def drifted(workflow: Workflow) -> list[str]:
    """Commands that neither .ci/run nor README has."""
    run = [line for step in steps(workflow) for line in commands(step.get("run", "")) if line]
    return [line for line in run if line not in known() and not SYNTAX.match(line)]


def unpinned(workflow: Workflow) -> list[str]:
    """Actions without a major version."""
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    return [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", name)]


def permitted(workflow: Workflow) -> list[str]:
    """What may be done beyond reading; and jobs that have what the repository grants by default."""
    found = [] if "permissions" in workflow else ["all: nothing is said"]
    for name, job in {"all": workflow, **workflow["jobs"]}.items():
        granted = job.get("permissions", {})
        if isinstance(granted, str):
            found.append(f"{name}: {granted}")
        else:
            found += [f"{name}: {what}: {how}" for what, how in granted.items() if how != "read"]
    return found


@pytest.fixture(params=sorted(WORKFLOWS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def workflow(name: str) -> Workflow:
    loaded: Workflow = yaml.safe_load(WORKFLOWS[name])
    return loaded


def test_there_are_two() -> None:
    assert sorted(WORKFLOWS) == ["ci.yml", "release.yml"]


def test_commands_are_those_of_ci(workflow: Workflow) -> None:
    assert drifted(workflow) == []


def test_what_only_a_workflow_runs_is_run() -> None:
    run = {c for text in WORKFLOWS.values() for s in steps(yaml.safe_load(text))
           for c in commands(s.get("run", ""))}  # fmt: skip
    assert set(ONLY_THERE) <= run


@pytest.mark.parametrize(
    "line",
    [
        ".venv/bin/ruff check --fix .",
        ".venv/bin/python -m benchmarks.report",
        "FX_FUSER_COMPILER=nvcc .venv/bin/python -m fx_fuser.build",
        "curl https://example.org | sh",
    ],
)
def test_a_command_of_its_own_is_found(workflow: Workflow, line: str) -> None:
    job = next(iter(workflow["jobs"].values()))
    job["steps"].append({"run": f".ci/test_wheel .venv/bin/python\n{line}\n"})
    assert drifted(workflow) == [line]


def test_actions_are_pinned(workflow: Workflow) -> None:
    assert unpinned(workflow) == []
    job = next(iter(workflow["jobs"].values()))
    loose = ["actions/checkout", "actions/checkout@main", "pypa/gh-action-pypi-publish@release"]
    job["steps"] += [{"uses": name} for name in loose]
    assert unpinned(workflow) == loose


def test_permissions_are_few(name: str, workflow: Workflow) -> None:
    allowed = ["publish: id-token: write"] if name == "release.yml" else []
    assert permitted(workflow) == allowed
    wide = copy.deepcopy(workflow)
    next(iter(wide["jobs"].values()))["permissions"] = "write-all"
    wide["permissions"] = {"contents": "write"}
    first = next(iter(workflow["jobs"]))
    assert permitted(wide) == ["all: contents: write", f"{first}: write-all", *allowed]
    del wide["permissions"]
    assert "all: nothing is said" in permitted(wide)


def test_pythons_are_those_that_are_supported(workflow: Workflow) -> None:
    jobs = workflow["jobs"].values()
    rows = [job["strategy"]["matrix"]["python"] for job in jobs if "strategy" in job]
    assert rows and all(row == pythons() for row in rows)
    alone = [s["with"]["python-version"] for s in steps(workflow) if "setup-python" in str(s)]
    assert set(alone) <= {*pythons(), "${{ matrix.python }}"}


def test_torches_are_the_oldest_and_the_newest() -> None:
    oldest, newest = versions.OLDEST_TORCH, versions.NEWEST_TESTED_TORCH
    for text in WORKFLOWS.values():
        assert set(re.findall(r"torch==([\d.]+)", text)) == {f"{oldest[0]}.{oldest[1]}.0"}
    pinned = re.search(r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned and (int(pinned[1]), int(pinned[2])) == newest


def test_only_a_tag_is_published() -> None:
    release = yaml.safe_load(WORKFLOWS["release.yml"])
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1: `on` is true
    jobs = release["jobs"]
    assert (jobs["publish"]["needs"], jobs["test"]["needs"]) == ("test", "build")
    assert "password" not in WORKFLOWS["release.yml"]  # by trusted publishing


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_other_files_are_yaml(path: Path) -> None:
    assert yaml.safe_load(path.read_text())


def test_the_form_of_a_bug_asks_for_what_is_needed() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    asked = {field["id"]: field for field in form["body"] if "id" in field}
    assert "python -m fx_fuser" in asked["doctor"]["attributes"]["label"]
    required = {name for name, field in asked.items() if field.get("validations")}
    assert {"what", "model", "doctor"} <= required
    assert "versions" in asked


def test_hooks_have_the_versions_of_ci() -> None:
    text = (ROOT / "constraints.txt").read_text()
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    found = {hook["id"]: repo.get("rev") for repo in repos for hook in repo["hooks"]}
    for hook, package in (("ruff-check", "ruff"), ("ruff-format", "ruff"), ("clang-format",) * 2):
        pinned = re.search(rf"^{package}==(\S+)", text, re.MULTILINE)
        assert pinned and found[hook] == f"v{pinned[1]}"
