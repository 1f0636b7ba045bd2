"""Runs pytest in one folder after the other, each time in a fork of an interpreter that has torch.

Its import takes longer than most tests that a mutant has. The server has nothing of a checkout's:
what a fork imports of fx_fuser and of the tests is its folder's.

`ForkingServer` is the client; the server, this file's text, reads lines of JSON and answers each
with the exit status.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


class ForkingServer:
    """For one thread at a time; it ends with the `with` statement."""

    def __init__(self) -> None:
        # Not by this file's path, whose folder would then stand before all others in sys.path.
        command = [sys.executable, "-c", Path(__file__).read_text()]
        self._temporary = tempfile.TemporaryDirectory()  # what forks leave: they end without ado
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": self._temporary.name},
        )

    def pytest(self, folder: Path, arguments: Sequence[str]) -> tuple[int, str]:
        """Pytest's exit status there, and what it printed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        said = folder / "said"
        self._process.stdin.write(json.dumps([str(folder), str(said), *arguments]) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        return status, said.read_text()

    def __enter__(self) -> ForkingServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._temporary.cleanup()


def _serve() -> None:
    import pytest
    import torch._inductor.compile_fx  # noqa: F401

    for line in sys.stdin:
        folder, said, *arguments = json.loads(line)
        fork = os.fork()
        if not fork:
            out = os.open(said, os.O_CREAT | os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(out, stream)
            os.chdir(folder)
            status = int(pytest.main(arguments))
            sys.stdout.flush()
            os._exit(status)
        _, ended = os.waitpid(fork, 0)
        print(os.waitstatus_to_exitcode(ended), flush=True)


if __name__ == "__main__":
    _serve()
