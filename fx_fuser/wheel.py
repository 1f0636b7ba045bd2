"""The wheel, with the shim and usual kernels in it, and the source distribution:
python -m fx_fuser.wheel OUT

Needs a checkout, g++, NVRTC and the packages of the extra "wheel", and no GPU. One wheel serves
every Python and every torch from 2.11 on, with CUDA 12 and 13: the shim uses LibTorch's stable ABI
and links no CUDA library. Its tag is manylinux_2_28, like torch's. The shim needs older symbols of
glibc and libstdc++ only (glibc 2.17, GLIBCXX_3.4.21 as of gcc 12); `check` makes sure. If a driver
is older than the NVRTC that compiled the kernels, they are compiled on the user's machine.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from fx_fuser.errors import BuildError
from fx_fuser.native import binaries, compilers, jobs
from fx_fuser.native.jobs import Job
from fx_fuser.native.kernel_spec import texts_of
from fx_fuser.ops import usual

ROOT = binaries.PACKAGE.parent
# Of manylinux_2_28: https://github.com/pypa/auditwheel, manylinux-policy.json
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
_SETUP = """\
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class Binary(Distribution):
    def has_ext_modules(self):
        return True


class AnyPython(bdist_wheel):
    def get_tag(self):
        return "py3", "none", "manylinux_2_28_{machine}"


setup(distclass=Binary, cmdclass={{"bdist_wheel": AnyPython}})
"""


def portable_shim(target: Path) -> None:
    """Build the shim at `target`, for machines with an older glibc and libstdc++ than this one's.

    Raises:
        BuildError: it does not compile, or needs newer symbols than its tag promises.
    """
    portable = binaries.KERNELS / "host/portable"
    command = binaries.shim_command(compilers.of_shim(), ("-s", "-I", str(portable)))
    filled = jobs.filled(command, str(portable / "shim.cpp"), str(target))
    done = subprocess.run(filled, check=False, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"the shim does not compile:\n{done.stderr[-4000:]}")
    check(target)


def check(library: Path) -> None:
    """Raises BuildError if a library needs newer symbols than the wheel's tag promises."""
    listed = subprocess.run(
        ["objdump", "-T", str(library)], check=True, capture_output=True, text=True
    ).stdout
    if newer := newer_symbols(listed.splitlines()):
        raise BuildError(f"{library} needs what manylinux_2_28 lacks: {', '.join(newer)}")


def newer_symbols(listed: Iterable[str]) -> list[str]:
    """The symbols that are too new, from the output of `objdump -T`."""
    found = []
    for line in listed:
        version = re.search(r"\((GLIBCXX|GLIBC|CXXABI|GCC)_([\d.]+)\)\s+(\S+)", line)
        if version and tuple(map(int, version[2].split("."))) > NEWEST[version[1]]:
            found.append(f"{version[3]} of {version[1]}_{version[2]}")
    return found


def usual_cubins(target: Path, archs: Sequence[str] = usual.ARCHS) -> list[str]:
    """Compile the usual kernels into the folder `target`, as `binaries.prebuilt_cubin` finds them.

    Returns a line for each kernel that does not compile: the architecture, and why. A user's
    compiler will try it again.

    Raises:
        BuildError: there is no NVRTC, or nothing compiles for an architecture.
    """
    wanted: dict[Job, str] = {}
    for arch in archs:
        names = binaries.prebuilt_names(texts_of(usual.specs(arch)), arch)
        wanted |= {_cubin_job(text, name, arch): name for text, name in names.items()}
    with tempfile.TemporaryDirectory() as work:
        failed = jobs.run(Path(work), list(wanted))
        for job in wanted.keys() - failed.keys():
            made = target / wanted[job]
            made.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(job.binary(Path(work)), made)
    if empty := [arch for arch in archs if not (target / arch).is_dir()]:
        raise BuildError(f"no kernel compiles for {empty[0]}: {next(iter(failed.values()))}")
    return [f"{wanted[job]}, {_title(job.text)}: {reason}" for job, reason in failed.items()]


def _cubin_job(text: str, name: str, arch: str) -> Job:
    """A job for NVRTC. It leaves out line information, which names files of this machine and is
    four fifths of the bytes. It uses one thread: there are kernels enough for all cores, and the
    registers are then the same in each run."""
    left_out = ("-lineinfo", jobs.IN_PARALLEL)
    command = compilers.nvrtc().command(arch, binaries.KERNELS.resolve())
    kept = tuple(part for part in command if part not in left_out)
    return Job(Path(name).stem, text, ".cu", ".cubin", kept)


def _title(text: str) -> str:
    """The epilogue of a translation unit, from its first comment."""
    lines = text.splitlines()
    return next((line[3:] for line in lines if line.startswith("// ")), lines[-1])


def build_all(out: Path) -> list[Path]:
    """The source distribution and the wheel of this checkout, in `out`."""
    if not (ROOT / "pyproject.toml").exists():
        raise BuildError(f"{ROOT} has no pyproject.toml; run this in a checkout of fx_fuser")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise BuildError(f"{out} is not a folder; give another OUT") from error
    before = set(out.iterdir())
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "fx_fuser"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        _run("--sdist", copy, out)
        prebuilt = copy / "fx_fuser" / binaries.PREBUILT.name
        prebuilt.mkdir(exist_ok=True)
        portable_shim(prebuilt / "shim.so")
        (prebuilt / "shim.sources").write_text(binaries.shim_sources())
        started = time.perf_counter()
        print("Compiling kernels, which takes minutes …", flush=True)
        for line in usual_cubins(prebuilt):
            print(f"left out: {line}")
        cubins = [path.stat().st_size for path in prebuilt.rglob("*.cubin")]
        took = time.perf_counter() - started
        print(f"{len(cubins)} kernels, {sum(cubins) / 1e6:.1f} MB, compiled in {took:.0f} s")
        (copy / "setup.py").write_text(_SETUP.format(machine=platform.machine()))
        _run("--wheel", copy, out)
    return sorted(set(out.iterdir()) - before)


def _run(what: str, source: Path, out: Path) -> None:
    command = [sys.executable, "-m", "build", what, "--outdir", str(out.resolve()), str(source)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fx_fuser.wheel")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to put them into")
    try:
        made = build_all(parser.parse_args(arguments).out)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(*made, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
