"""Programs that need an interpreter of their own, but not one more import of torch.

A server that has imported torch and fx_fuser, and has compiled nothing, forks for each of them.
Where there is a GPU each has a new interpreter: CUDA does not outlive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import torch

_CHECKOUT = Path(__file__).resolve().parent.parent
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["fx_fuser", "torch._inductor.compile_fx", "torch.distributed"])


def run_script(
    script: Path, environment: Mapping[str, str] | None = None, as_tests: bool = False
) -> tuple[int, str]:
    """In the script's folder, with variables added; its exit status and what it has printed.

    With a PYTHONPATH among them it cannot import what else is in the checkout.
    """
    (done,) = run_together([script], environment, as_tests)
    return done


def run_together(
    scripts: Sequence[Path], environment: Mapping[str, str] | None = None, as_tests: bool = False
) -> list[tuple[int, str]]:
    """As `run_script`, all at the same time."""
    if torch.cuda.is_available():
        return _run_in_interpreters(scripts, dict(environment or {}), as_tests)
    with mock.patch.dict(os.environ, PYTHONPATH=str(_CHECKOUT)):  # what it imports beforehand
        forkserver.ensure_running()
    said = [script.with_suffix(".out") for script in scripts]
    processes = [
        _SERVER.Process(target=_run, args=(script, dict(environment or {}), as_tests, out))
        for script, out in zip(scripts, said)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [(p.exitcode or 0, out.read_text()) for p, out in zip(processes, said)]


def _run_in_interpreters(
    scripts: Sequence[Path], environment: dict[str, str], as_tests: bool
) -> list[tuple[int, str]]:
    command = [sys.executable, *(["-m", "pytest", "-q"] if as_tests else [])]
    surroundings = {**os.environ, "PYTHONPATH": str(_CHECKOUT), **environment}
    # To files: of ranks that wait for each other, one that fills a pipe would never be read.
    said = [script.with_suffix(".out") for script in scripts]
    processes = []
    for script, out in zip(scripts, said):
        with open(out, "wb") as file:
            given = {"cwd": script.parent, "env": surroundings, "stdout": file}
            run = [*command, str(script)]
            processes.append(subprocess.Popen(run, stderr=subprocess.STDOUT, **given))
    return [(process.wait(), out.read_text()) for process, out in zip(processes, said)]


def _run(script: Path, environment: dict[str, str], as_tests: bool, said: Path) -> None:
    with open(said, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    # The server's are those of whoever was first to need it.
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
    os.environ.update(environment)
    if "PYTHONPATH" in environment:  # else the server's
        found = [(p, Path(p or ".").resolve()) for p in sys.path]
        tests = _CHECKOUT / "tests"
        sys.path[:] = [p for p, at in found if at != _CHECKOUT and not at.is_relative_to(tests)]
        sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    os.chdir(script.parent)
    sys.argv = [str(script)]
    if as_tests:
        import pytest

        sys.exit(pytest.main(["-q", str(script)]))
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
