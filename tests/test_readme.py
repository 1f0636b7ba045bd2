"""README's code runs, its commands are the ones CI runs, and what it names exists."""

from __future__ import annotations

import dataclasses
import re
import socket
from pathlib import Path

import pytest
from forked import run_script

from fx_fuser.options import Options

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.split("\n\n")[1][:30])
def test_python_block_runs_by_itself(code: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(code)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {**torchrun, "MASTER_PORT": port}
    status, said = run_script(script, environment, as_tests="\ndef test_" in code)
    assert status == 0, said


def test_set_up_commands_are_those_of_ci() -> None:
    set_up = README.partition("\n## Set up\n")[2].partition("\n## ")[0]
    shown = [line for block in blocks("sh", set_up) for line in block.splitlines()]
    script = (ROOT / ".ci/run").read_text().splitlines()
    assert shown == [script[i + 1] for i, line in enumerate(script) if line == "# README"]
    assert len(shown) == 2


def test_option_table_lists_every_option() -> None:
    table = README.partition("\n## Options\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    own = {option.name for option in dataclasses.fields(Options)} - {"inductor"}  # all other keys
    assert sorted(listed) == sorted(own)


def test_files_it_names_exist() -> None:
    paths = re.findall(r"`((?:fx_fuser|patterns|kernels_cu|benchmarks)/[\w./]*)`", README)
    paths += re.findall(r"\]\(([\w./-]+)\)", README)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
