"""The pages' code runs, their commands are the ones CI runs, and what they name exists."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import run_script

from fx_fuser import versions
from fx_fuser.options import Options

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in PAGES}
LOGS = {str(p.relative_to(ROOT)): p.read_text() for p in ROOT.glob("kernels_cu/**/NOTES.md")}
README = TEXTS["README.md"]
OPTIONS = TEXTS["docs/options.md"]
LONGEST_README = 150  # lines
WIDTH = 100  # of a line


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


PYTHON = [
    pytest.param(
        code,
        id=f"{name}-{number}",
        marks=[] if name == "README.md" else [pytest.mark.slow],  # a process each
    )
    for name, text in TEXTS.items()
    for number, code in enumerate(blocks("python", text))
]


# Packages that users of a page's program have, and that the extra `models` installs.
OPTIONAL = ("transformers", "accelerate", "torchvision", "timm", "diffusers")


def absent(code: str, there: Callable[[str], object] = importlib.util.find_spec) -> list[str]:
    """Which of them a program needs that are not installed. transformers' Trainer needs accelerate,
    which no program imports."""
    found = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    needed = {*found, *(["accelerate"] if "Trainer(" in code else [])}
    return [name for name in OPTIONAL if name in needed and not there(name)]


def test_a_package_that_is_not_installed_is_noticed() -> None:
    assert absent("import torch\nimport timm\n", lambda name: None) == ["timm"]
    code = "from transformers import Trainer\nTrainer(model)"
    assert absent(code, lambda name: name == "transformers" or None) == ["accelerate"]
    assert absent("import torch\n", lambda name: None) == []


@pytest.mark.parametrize("code", PYTHON)
def test_python_block_runs_by_itself(code: str, tmp_path: Path) -> None:
    if names := absent(code):
        pytest.skip(f"not installed: {', '.join(names)}")
    script = tmp_path / "block.py"
    script.write_text(code)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    # As after `pip install`: no other folder of the checkout can be imported.
    (tmp_path / "fx_fuser").symlink_to(ROOT / "fx_fuser")
    environment = {**torchrun, "MASTER_PORT": port, "PYTHONPATH": str(tmp_path)}
    status, said = run_script(script, environment, as_tests="\ndef test_" in code)
    assert status == 0, said


def only_in_a_checkout(text: str) -> list[str]:
    """What a page's code, run or not, imports of what no wheel has."""
    code = "\n".join(re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    folders = "benchmarks|tests|demo|patterns|kernels_cu"
    return re.findall(rf"^\s*(?:from|import)\s+((?:{folders})\b[\w.]*)", code, re.MULTILINE)


@pytest.mark.parametrize("name", [n for n in TEXTS if n != "CONTRIBUTING.md"])
def test_code_for_users_imports_what_a_wheel_has(name: str) -> None:
    assert only_in_a_checkout(TEXTS[name]) == []


def test_what_no_wheel_has_is_found() -> None:
    page = (
        "```py\nimport fx_fuser\nfrom benchmarks.nets import A\n\nimport demo\n```\nimport tests\n"
    )
    assert only_in_a_checkout(page) == ["benchmarks.nets", "demo"]


def test_set_up_commands_are_those_of_ci() -> None:
    set_up = README.partition("\n## Set up\n")[2].partition("\n## ")[0]
    shown = [line for block in blocks("sh", set_up) for line in block.splitlines()]
    script = (ROOT / ".ci/run").read_text().splitlines()
    assert shown == [script[i + 1] for i, line in enumerate(script) if line == "# README"]
    assert len(shown) == 2


def option_table(page: str) -> dict[str, str]:
    """Option → its default, of the table under the page's heading Options."""
    table = page.partition("# Options\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))


def test_option_table_lists_every_option() -> None:
    native = {option.name for option in dataclasses.fields(Options)} - {
        "inductor",
        "exported",
    }  # other keys, and none of the user's
    assert sorted(option_table(OPTIONS)) == sorted(native)


def test_readme_lists_options_with_their_defaults() -> None:
    shown = option_table(README)
    assert shown
    assert shown.items() <= option_table(OPTIONS).items()


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= LONGEST_README


def test_its_first_figures_are_those_of_its_table() -> None:
    row = r"^\| fp32 +\| transformers .*? ([\d.]+)–([\d.]+) \|"
    rows = re.findall(row, README, re.MULTILINE)
    ends = [float(end) for row in rows for end in row]
    said = re.search(r"fp32 transformers ([\d.]+) to ([\d.]+) times as\s+fast", README)
    assert said and [float(n) for n in said.groups()] == [round(min(ends), 1), round(max(ends), 1)]


def test_versions_of_torch_are_those_of_the_code() -> None:
    oldest, newest = versions.OLDEST_TORCH, versions.NEWEST_TESTED_TORCH
    said = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    assert said in README and said in TEXTS["docs/no_gain.md"]


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def links(text: str) -> list[str]:
    """Targets within the repository; brackets in code are no links."""
    prose = re.sub(r"`[^`]*`", "", without_blocks(text))
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose)
    return [target for target in targets if not re.match(r"\w+:", target)]


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings: one that occurs again has a number behind it."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        again = (f"{slug}-{number}" for number in itertools.count(1))
        found.add(slug if slug not in found else next(a for a in again if a not in found))
    return found


def broken_links(name: str, text: str) -> list[str]:
    """name: of the page that the targets are relative to."""
    broken = []
    for target in links(text):
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(target)
    return broken


@pytest.mark.parametrize("name", [*TEXTS, *LOGS])
def test_links_lead_somewhere(name: str) -> None:
    assert broken_links(name, {**TEXTS, **LOGS}[name]) == []


def test_broken_links_are_found() -> None:
    text = "[a](README.md) [b](docs/none.md) [c](README.md#none) [d](#none) [e](https://x.org)"
    assert broken_links("README.md", text) == ["docs/none.md", "README.md#none", "#none"]
    assert anchors("# A `b`, c\n## A\n## A\n```\n# no\n```\n") == {"a-b-c", "a", "a-1"}


@pytest.mark.parametrize("name", TEXTS)
def test_every_page_is_reached(name: str) -> None:
    """From README by one link."""
    assert name == "README.md" or name in {target.partition("#")[0] for target in links(README)}


@pytest.mark.parametrize("name", TEXTS)
def test_lines_are_short(name: str) -> None:
    lines = without_blocks(TEXTS[name]).splitlines()
    assert [line for line in lines if len(line) > WIDTH and not line.startswith("|")] == []


@pytest.mark.parametrize("name", [*TEXTS, *LOGS])
def test_files_it_names_exist(name: str) -> None:
    folders = "fx_fuser|patterns|kernels_cu|benchmarks|tests"
    paths = re.findall(rf"`((?:{folders})/[\w./]*)`", {**TEXTS, **LOGS}[name])
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_there_are_five_examples() -> None:
    """Each with the package that it is for."""
    programs = blocks("python", TEXTS["docs/examples.md"])
    named = ("transformers", "torchvision", "timm", "diffusers", "fuse_exported")
    assert [name for name, code in zip(named, programs) if name in code] == list(named)
    assert len(programs) == len(named)
