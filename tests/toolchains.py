"""Stand-ins for nvcc and NVRTC, and which of the real compilers are here.

Both stand-ins copy a source to its cubin, and words in the source say what else happens.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fx_fuser.errors import BuildError
from fx_fuser.native import compilers, load

ARCH = "sm_90a"

# One line into `calls` for each time it is run.
FAKE_NVCC = r"""#!/bin/sh
case "$1" in --version) echo fake 1.0; exit 0;; --dryrun) exit 0;; esac
while [ $# -gt 0 ]; do
  case "$1" in -o) target="$2"; shift;; *.cu) source="$1";; *FEW_REGISTERS) few=1;; esac
  shift
done
echo "$source" >> "{calls}"
grep -q SLOW "$source" && sleep 20
grep -q BROKEN "$source" && {{ echo "error: no such thing"; exit 1; }}
case "$PWD" in */full/*) echo "fatal: No space left on device"; exit 1;; esac
grep -q "SPILLS${{few:+ ALWAYS}}" "$source" && \
  echo "    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads"
grep -q SERIAL "$source" && \
  echo "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async is serialized"
cp "$source" "$target"
echo "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
"""

FAKE_NVRTC = r"""
#include <string>
struct Program { std::string text, log; };
extern "C" {
const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR_COMPILATION"; }
int nvrtcCreateProgram(Program** made, const char* text, const char*, int, void*, void*) {
  *made = new Program{text, "ptxas         .     0 bytes stack frame, 0 bytes spill stores\n"};
  return 0;
}
int nvrtcCompileProgram(Program* program, int count, const char* const* option) {
  const auto says = [&](const char* word) { return program->text.find(word) != std::string::npos; };
  bool few = false, together = true;
  for (int i = 0; i < count; ++i) {
    few |= std::string(option[i]) == "-DFX_FUSER_FEW_REGISTERS";
    together &= std::string(option[i]).find("--split-compile") != 0;
  }
  const bool spills = says(few && together ? "SPILLS ALWAYS" : "SPILLS");
  if (spills || (says("UNLUCKY") && !together)) program->log += "ptxas . 12 bytes spill stores\n";
  if (says("SERIAL")) program->log += "Potential Performance Loss: wgmma.mma_async is serialized\n";
  if (says("BROKEN")) program->log = "error: no such thing\n";
  const int status = says("BROKEN") ? 6 : 0;
  if (few) program->text += " with few registers";
  return status;
}
int nvrtcGetProgramLogSize(Program* p, size_t* size) { *size = p->log.size() + 1; return 0; }
int nvrtcGetProgramLog(Program* p, char* log) { p->log.copy(log, p->log.size()); return 0; }
int nvrtcGetCUBINSize(Program* p, size_t* size) { *size = p->text.size(); return 0; }
int nvrtcGetCUBIN(Program* p, char* cubin) { p->text.copy(cubin, p->text.size()); return 0; }
}
"""


# 64 live values in the 32 registers that two blocks of 1024 threads leave to each.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) crowded(float* x) {
  float value[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) value[i] = x[threadIdx.x + 1024 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[threadIdx.x + 1024 * (63 - i)] = value[i] * value[(i * 5) % 64];
}
"""


class FakeNvcc:
    def __init__(self, folder: Path) -> None:
        self.calls_file = folder / "calls"
        self.nvcc = folder / "bin" / "nvcc"
        self.nvcc.parent.mkdir()
        self.nvcc.write_text(FAKE_NVCC.format(calls=self.calls_file))
        self.nvcc.chmod(0o755)

    @property
    def calls(self) -> int:
        return len(self.calls_file.read_text().splitlines()) if self.calls_file.exists() else 0


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvcc:
    """nvcc compiles, and is that."""
    compiler = FakeNvcc(tmp_path)
    monkeypatch.setenv("PATH", str(compiler.nvcc.parent), prepend=os.pathsep)
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FX_FUSER_COMPILER", "nvcc")
    return compiler


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As far as fx_fuser can see, no CUDA is here; the folder is where pip would put some."""
    site = tmp_path / "nvidia"
    site.mkdir()
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(compilers, "_pip_folders", lambda: [site])
    monkeypatch.setattr(compilers, "DEFAULT_CUDA_HOME", tmp_path / "empty")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("FX_FUSER_COMPILER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / "cache"))
    return site


@pytest.fixture(scope="session")
def fake_libnvrtc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, gxx = tmp_path_factory.mktemp("nvrtc"), shutil.which("g++")
    if gxx is None:
        pytest.skip("needs g++, for a stand-in for NVRTC")
    source, library = folder / "nvrtc.cpp", folder / "libnvrtc.so"
    source.write_text(FAKE_NVRTC)
    command = [gxx, "-shared", "-fPIC", "-std=c++17", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def put_nvrtc(library: Path, libraries: Path, include: Path, major: int = 13) -> Path:
    """Where `compilers` may find it; returns its path."""
    for folder in (libraries, include):
        folder.mkdir(parents=True, exist_ok=True)
    (include / "cuda_fp16.h").touch()
    return Path(shutil.copy(library, libraries / f"libnvrtc.so.{major}"))


@pytest.fixture
def fake_nvrtc(fake_libnvrtc: Path, bare: Path) -> Path:
    """NVRTC compiles, and is that; there is no other compiler. Returns the library's path."""
    return put_nvrtc(fake_libnvrtc, bare / "cu13/lib", bare / "cu13/include")


def faked_loader(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """native on a machine with a GPU: the answers of its loading op, one for each call."""
    answers: list[int | Exception] = []
    calls: list[tuple[object, ...]] = []

    def loading(*arguments: object) -> int:
        calls.append(arguments)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    figures = SimpleNamespace(default=lambda index: [132, 0, 0, 0])
    ops = SimpleNamespace(load=SimpleNamespace(default=loading), gpu_figures=figures)
    monkeypatch.setattr(torch.ops, "fx_fuser_native", ops, raising=False)
    monkeypatch.setattr(load, "load_shim", lambda: None)
    monkeypatch.setattr(load, "_kernels", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return SimpleNamespace(answers=answers, calls=calls)


# ---- the real ones -------------------------------------------------------------------------------


def _needs(*found: Callable[[], object]) -> pytest.MarkDecorator:
    try:
        for find in found:
            find()
    except BuildError as error:
        return pytest.mark.skipif(True, reason=str(error))
    return pytest.mark.skipif(False, reason="")


needs_compilers = _needs(compilers.of_kernels, compilers.of_shim)
needs_nvrtc = _needs(compilers.nvrtc)
needs_nvcc = _needs(compilers.nvcc)
