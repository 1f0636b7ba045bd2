"""Compiler calls, run in parallel by ninja, and their logs: does a kernel spill registers?"""

from __future__ import annotations

import errno
import logging
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fx_fuser.errors import BuildError

log = logging.getLogger("fx_fuser.native.jobs")

FEW_REGISTERS = "-DFX_FUSER_FEW_REGISTERS"  # for kernels that spill; a header may use it
# NVRTC's threads for one source. With them a kernel's registers differ from run to run (NVRTC 13.0
# and 13.2, sm_120): a kernel counts as spilling only if it also spills when compiled without.
IN_PARALLEL = "--split-compile=4"
_PROGRESS_S = 5.0  # between lines of the log
# Arguments of a command that stand for the job's files. They are whole arguments: a path that
# contains them, or other braces, is left as it is.
SOURCE, TARGET = "{source}", "{target}"


@dataclass(frozen=True)
class Job:
    """One compiler call: `text`, saved as `<key><source_suffix>`, becomes `<key><suffix>`."""

    key: str
    text: str
    source_suffix: str
    suffix: str
    command: tuple[str, ...]  # with SOURCE and TARGET; flags may be added

    def binary(self, folder: Path) -> Path:
        return folder / f"{self.key}{self.suffix}"


def filled(command: Sequence[str], source: str, target: str) -> list[str]:
    """The command with these files in place of SOURCE and TARGET."""
    files = {SOURCE: source, TARGET: target}
    return [files.get(part, part) for part in command]


def run(work: Path, jobs: Sequence[Job]) -> dict[Job, str]:
    """Writes each job's binary into the folder `work`; returns the jobs that failed, or whose
    binary would be slow, with the reason.

    Raises:
        BuildError: ninja is missing, or cannot pass an argument on.
        OSError: the disk is full.
    """
    _run_ninja(work, jobs)
    logs = {job: _read_log(work, job) for job in jobs}
    if spilled := [job for job in jobs if _SPILL.search(logs[job])]:
        log.info("compiling %d kernels again with %s", len(spilled), FEW_REGISTERS)
        logs |= _compiled_again(work, spilled)
    return {job: reason for job in jobs if (reason := _failure(work, job, logs[job]))}


def check_folder(folder: Path) -> None:
    """Raises OSError if compilers cannot work below this folder.

    -lineinfo writes its path into PTX in quotes, without escapes, and nvcc into a shell's command.
    """
    if found := next((c for c in '"`' if c in str(folder)), None):
        raise OSError(f"compilers take no {found} in the path {folder}")


def _compiled_again(work: Path, jobs: Sequence[Job]) -> dict[Job, str]:
    """Returns logs. Binaries are without IN_PARALLEL or, if they spill, with FEW_REGISTERS."""
    retries: list[Job] = []
    alone: dict[Job, Job] = {}
    for job in jobs:
        command = tuple(part for part in job.command if part != IN_PARALLEL)
        retries.append(replace(job, command=(*command, FEW_REGISTERS)))
        if command != job.command:
            alone[job] = replace(job, key=f"{job.key}-alone", command=command)
    _run_ninja(work, [*retries, *alone.values()])  # at once: usually there are idle processors
    logs = {job: _read_log(work, job) for job in jobs}
    for job, again in alone.items():
        text = _read_log(work, again)
        if again.binary(work).exists() and not _SPILL.search(text):
            os.replace(again.binary(work), job.binary(work))
            logs[job] = text
    return logs


def _run_ninja(work: Path, jobs: Sequence[Job]) -> None:
    try:
        from ninja import BIN_DIR
    except ImportError as error:
        raise BuildError("the Python package ninja is missing; pip install ninja") from error

    lines = ["rule run", "  command = $cmd > $out.log 2>&1", ""]
    for job in jobs:
        source = f"{job.key}{job.source_suffix}"
        target = f"{job.key}{job.suffix}"
        (work / source).write_text(job.text)
        command = " ".join(map(_quote, filled(job.command, source, target)))
        lines += [f"build {target}: run {source}", f"  cmd = {command}", ""]
    (work / "build.ninja").write_bytes(os.fsencode("\n".join(lines)))  # names of files, in bytes
    # -k 0: one broken source should not hide what is wrong with the others.
    ninja = [os.path.join(BIN_DIR, "ninja"), "-k", "0", "-C", str(work)]
    with subprocess.Popen(ninja, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            _wait_for(running, [job.binary(work) for job in jobs])
        except BaseException:  # as in subprocess.run: no compiler outlives an interrupt
            running.kill()
            raise


def _wait_for(running: subprocess.Popen[bytes], targets: Sequence[Path]) -> None:
    """Wait for ninja; log the progress of a long run."""
    while True:
        try:
            running.wait(_PROGRESS_S)
            return
        except subprocess.TimeoutExpired:
            done = sum(target.exists() for target in targets)
            log.info("compiled %d of %d kernels", done, len(targets))


def _quote(part: str) -> str:
    if "\n" in part or "\r" in part:
        raise BuildError(
            f"a command has the argument {part!r}, and ninja takes no line break; rename the folder"
        )
    return shlex.quote(part).replace("$", "$$")  # once for the shell, once for ninja


def _read_log(work: Path, job: Job) -> str:
    try:
        return (work / f"{job.key}{job.suffix}.log").read_text(errors="replace")
    except FileNotFoundError:
        return "(the compiler was not started)"


# ptxas only warns of these. Results stay right, but the kernel is then several times slower than
# the one that was measured.
_SPILL = re.compile(r"\b[1-9]\d* bytes spill|Registers are spilled")
_SERIALISED = re.compile(r"C75[01]\d|[Pp]otential [Pp]erformance [Ll]oss: wgmma")


def _failure(work: Path, job: Job, text: str) -> str | None:
    if "No space left on device" in text:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if not job.binary(work).exists():
        return f"{' '.join(job.command)} failed:\n{text[:4000]}"
    for pattern, meaning in ((_SPILL, "spills registers"), (_SERIALISED, "serialises its wgmma")):
        if found := pattern.search(text):
            before, line = text[: found.start()].rpartition("\n")[::2]
            line = (line + text[found.start() :].partition("\n")[0]).strip()
            kernel = re.findall(r"function '(\w+)'", f"{before}\n{line}")
            return (
                f"{kernel[-1] if kernel else job.key} {meaning} ({line}); "
                "compile fewer operands or operations into one kernel"
            )
    return None
