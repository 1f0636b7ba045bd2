"""NVRTC and nvcc: which compiles, what it is given, what it says."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import slow_but
from toolchains import ARCH, FAKE_NVCC, SPILLING, FakeNvcc, needs_nvcc, needs_nvrtc, put_nvrtc

from fx_fuser import build
from fx_fuser.errors import BuildError
from fx_fuser.kernels import base
from fx_fuser.native import binaries, compilers, store
from fx_fuser.native.kernel_spec import POINTWISE

# ---- which compiles ------------------------------------------------------------------------------

LAYOUTS = {
    "pip, CUDA 13": (13, "nvidia/cu13/lib", "nvidia/cu13/include"),
    "pip, CUDA 12": (12, "nvidia/cuda_nvrtc/lib", "nvidia/cuda_runtime/include"),
    "toolkit": (13, "empty/lib64", "empty/include"),
}


@pytest.mark.parametrize("for_cpu", [False, True], ids=["torch for it", "torch for CPU"])
@pytest.mark.parametrize("major, libraries, include", LAYOUTS.values(), ids=LAYOUTS)
def test_nvrtc_is_found(
    bare, fake_libnvrtc, tmp_path, monkeypatch, major, libraries, include, for_cpu
):
    monkeypatch.setattr(torch.version, "cuda", None if for_cpu else f"{major}.4")
    put_nvrtc(fake_libnvrtc, tmp_path / libraries, tmp_path / include, major)
    assert binaries.cubin("// a", ARCH).read_text() == "// a"


def test_nvrtc_of_cuda_home_is_found(bare, fake_libnvrtc, tmp_path, monkeypatch):
    home = tmp_path / "home"
    found = put_nvrtc(fake_libnvrtc, home / "lib64", home / "include")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert compilers.nvrtc().library == found


def test_nvrtc_beside_torch_comes_before_a_toolkits(fake_nvrtc, fake_libnvrtc, tmp_path):
    put_nvrtc(fake_libnvrtc, tmp_path / "empty/lib64", tmp_path / "empty/include")
    assert compilers.nvrtc().library == fake_nvrtc


def test_packages_of_pip_are_searched_wherever_python_imports_from(tmp_path, monkeypatch):
    (tmp_path / "nvidia").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    beside_torch = Path(torch.__file__).parents[1] / "nvidia"
    folders = compilers._pip_folders()
    assert folders[0] == beside_torch and tmp_path / "nvidia" in folders


def with_nvcc(monkeypatch, fake: FakeNvcc) -> None:
    gxx = fake.nvcc.parent / "g++"
    gxx.write_text("#!/bin/sh\necho fake g++\n")
    gxx.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.nvcc.parent}:/usr/bin:/bin")


@pytest.mark.parametrize("chosen", ["", "nvrtc", "nvcc"])
def test_the_variable_chooses_and_nvrtc_is_the_default(fake, fake_nvrtc, monkeypatch, chosen):
    with_nvcc(monkeypatch, fake)
    monkeypatch.setenv("FX_FUSER_COMPILER", chosen)
    binaries.cubin("// a", ARCH)
    assert fake.calls == (chosen == "nvcc")


def test_an_unknown_compiler_is_refused(fake_nvrtc, monkeypatch):
    monkeypatch.setenv("FX_FUSER_COMPILER", "clang")
    with pytest.raises(BuildError, match="FX_FUSER_COMPILER is 'clang'; set it to nvrtc or nvcc"):
        binaries.cubin("// a", ARCH)


@pytest.mark.parametrize("other", [None, 12], ids=["missing", "of another version"])
def test_nvcc_stands_in_for_nvrtc(fake, bare, fake_libnvrtc, monkeypatch, caplog, other):
    with_nvcc(monkeypatch, fake)
    if other is not None:
        put_nvrtc(fake_libnvrtc, bare / "cu13/lib", bare / "cu13/include", other)
    with caplog.at_level(logging.INFO, "fx_fuser.native.compilers"):
        binaries.cubin("// a", ARCH)
    assert fake.calls == 1
    assert "nvcc compiles the kernels: NVRTC of CUDA 13" in caplog.text


def test_nvrtc_of_another_version_is_named(bare, fake_libnvrtc, tmp_path, monkeypatch):
    """Its cubins might not load: the driver may be as old as torch's CUDA allows."""
    home = tmp_path / "home"
    other = put_nvrtc(fake_libnvrtc, home / "lib64", home / "include", 12)
    (home / "lib").symlink_to(home / "lib64")
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("FX_FUSER_COMPILER", "nvrtc")
    with pytest.raises(BuildError) as caught:
        binaries.cubin("// a", ARCH)
    text = str(caught.value)
    assert "NVRTC of CUDA 13, for which this torch was built, was not found" in text
    assert f"only {other}; pip install 'nvidia-cuda-nvrtc==13.*'" in text


def test_without_any_compiler_both_are_named(bare):
    with pytest.raises(BuildError, match=r"NVRTC .* pip install .*; or nvcc: nvcc was not fou"):
        compilers.of_kernels()


def test_missing_nvcc_names_the_remedy(bare):
    with pytest.raises(BuildError, match=r"nvcc was not found .* set CUDA_HOME"):
        compilers.nvcc()


@pytest.mark.parametrize("find", [compilers.nvcc, compilers.of_shim], ids=["nvcc", "the shim"])
def test_missing_gxx_names_the_remedy(fake, monkeypatch, find):
    monkeypatch.setenv("PATH", str(fake.nvcc.parent))
    with pytest.raises(BuildError, match=r"g\+\+ was not found on PATH"):
        find()


def test_cuda_home_is_searched(fake, tmp_path, monkeypatch):
    gxx_only = tmp_path / "gxx"
    gxx_only.mkdir()
    (gxx_only / "g++").symlink_to(shutil.which("g++"))
    monkeypatch.setenv("PATH", str(gxx_only))
    monkeypatch.setenv("CUDA_HOME", str(fake.nvcc.parent.parent))
    assert compilers.nvcc().nvcc == fake.nvcc


# ---- what it is given, and what it says ----------------------------------------------------------


def test_the_key_holds_nvccs_version(fake, tmp_path, monkeypatch):
    before = binaries.cubin("// a", ARCH)
    newer = tmp_path / "newer"
    newer.mkdir()
    text = FAKE_NVCC.format(calls=fake.calls_file)
    (newer / "nvcc").write_text(text.replace("fake 1.0", "fake 1.1"))
    (newer / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(newer), prepend=os.pathsep)
    assert binaries.cubin("// a", ARCH) != before


@pytest.mark.parametrize(
    "changed",
    [
        "nvidia/cu13/lib/libnvrtc.so.13",
        "nvidia/cu13/lib/libnvrtc-builtins.so.13.1",
        "nvidia/cu13/include/cuda_fp16.h",
        "kernels_cu/nvrtc/type_traits",
    ],
)
def test_the_key_holds_what_only_nvrtc_sees(fake_nvrtc, tmp_path, monkeypatch, changed):
    shutil.copytree(binaries.KERNELS, tmp_path / "kernels_cu")
    monkeypatch.setattr(binaries, "KERNELS", tmp_path / "kernels_cu")
    before, fingerprint = binaries.cubin("// a", ARCH), binaries.fingerprint()
    assert binaries.cubin("// a", ARCH) == before
    file = tmp_path / changed
    file.write_bytes((file if file.exists() else fake_nvrtc).read_bytes() + b"\n")
    assert binaries.cubin("// a", ARCH) != before
    assert (binaries.fingerprint() != fingerprint) == changed.startswith("kernels_cu")


@pytest.mark.parametrize(
    "text, says",
    [
        ("// BROKEN", r"error: no such thing\s*nvrtcCompileProgram: NVRTC_ERROR_COMPILATION"),
        ("// SPILLS ALWAYS", "spills registers"),
        ("// SERIAL", "serialises its wgmma"),
    ],
)
def test_a_bad_source_fails_and_stays_out_of_the_cache(fake_nvrtc, text, says):
    for _ in range(2):
        with pytest.raises(BuildError, match=says):
            binaries.cubin(text, ARCH)
    assert not list(store.cache_dir().glob("*.cubin"))


def test_what_spills_is_compiled_again_with_few_registers(fake_nvrtc):
    assert binaries.cubin("// SPILLS", ARCH).read_text() == "// SPILLS with few registers"


def test_what_spills_by_bad_luck_keeps_its_registers(fake_nvrtc):
    """NVRTC's threads make registers differ from run to run."""
    assert binaries.cubin("// UNLUCKY", ARCH).read_text() == "// UNLUCKY"
    assert [path.suffix for path in store.cache_dir().glob("*alone*")] == []


def test_an_nvrtc_that_does_not_load_is_named(fake_nvrtc):
    fake_nvrtc.write_text("no library")
    with pytest.raises(BuildError, match=r"libnvrtc\.so\.13 does not load .*; reinstall NVRTC"):
        binaries.cubin("// a", ARCH)


def test_a_cuda_home_that_is_no_folder_is_passed_over(bare, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "x" * 5000)  # which the system refuses to look up
    with pytest.raises(BuildError, match=r"NVRTC .* pip install .*; or nvcc: nvcc was not fou"):
        compilers.of_kernels()


# ---- odd names of folders ------------------------------------------------------------------------

# Of one or the other compiler: the path of fx_fuser's headers, which is also in its output.
REFUSED = {"nvcc": "\"'`,", "nvrtc": '"'}


@pytest.mark.parametrize("compiler", REFUSED)
def test_a_character_that_a_compiler_cannot_take_is_named(
    fake, fake_nvrtc, tmp_path, monkeypatch, compiler
):
    with_nvcc(monkeypatch, fake)
    monkeypatch.setenv("FX_FUSER_COMPILER", compiler)
    for character in REFUSED[compiler]:
        folder = tmp_path / f"a{character}b"
        shutil.copytree(binaries.KERNELS.resolve() / "nvrtc", folder / "nvrtc")
        monkeypatch.setattr(binaries, "KERNELS", folder)
        with pytest.raises(BuildError) as caught:
            binaries.cubin("// a", ARCH)
        assert f"takes no {character} in a path, and there is one in {folder}" in str(caught.value)
        assert "rename the folder" in str(caught.value)
    assert fake.calls == 0


# Each character that nothing stumbles over, for both compilers.
TAKEN = " :#\\%$;&(){}*?[]!<>|=@~\té漢\udcff"
PLACES = ("cache", "package")


def _compile_in(place: str, name: str, tmp_path: Path, monkeypatch) -> None:
    """A kernel, with its real headers, where one of the folders has this name."""
    types = (torch.float32, torch.float32, torch.float32)
    text = base.example(POINTWISE, "Swish", 1, *types).text
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / (name if place == "cache" else "c")))
    if place == "package":
        folder = tmp_path / name / "kernels_cu"
        shutil.copytree(binaries.KERNELS.resolve(), folder)
        monkeypatch.setattr(binaries, "KERNELS", folder)
    made = binaries.cubin(text, "sm_80")
    assert made.parent == store.cache_dir() and made.read_bytes()[:4] == b"\x7fELF"


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("place", PLACES)
def test_nvrtc_compiles_in_folders_of_odd_names(tmp_path, monkeypatch, place):
    monkeypatch.setenv("FX_FUSER_COMPILER", "nvrtc")
    of_package = "`" if place == "package" else ""
    _compile_in(
        place, f"a',{of_package}${{HOME}}{{{{b}}}}{{source}}{TAKEN} ", tmp_path, monkeypatch
    )


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("place", PLACES)
def test_nvcc_compiles_in_folders_of_odd_names(tmp_path, monkeypatch, place):
    monkeypatch.setenv("FX_FUSER_COMPILER", "nvcc")
    _compile_in(place, f"a${{HOME}}{{{{b}}}}{{source}}{TAKEN} ", tmp_path, monkeypatch)


# ---- the real NVRTC ------------------------------------------------------------------------------


@pytest.fixture
def real_nvrtc(tmp_path, monkeypatch):
    monkeypatch.setenv("FX_FUSER_COMPILER", "nvrtc")
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("arch", slow_but(["sm_80"], build.ARCHS))  # `fx_fuser.build` has all
def test_nvrtc_compiles_for_every_architecture(real_nvrtc, arch):
    types = (torch.float32, torch.float16, torch.float16, torch.float32)
    spec = base.example(POINTWISE, "EveryFunction", 2, *types)
    code = binaries.cubin(spec.text, arch).read_bytes()
    assert code[:4] == b"\x7fELF"
    assert b"fx_fuser_pointwise_u32" in code and b"fx_fuser_pointwise_u64" in code


@pytest.mark.slow
@needs_nvrtc
def test_nvrtcs_log_tells_of_spills(real_nvrtc):
    with pytest.raises(BuildError, match=r"crowded spills registers .*; compile fewer"):
        binaries.cubin(SPILLING, ARCH)


# The sums are read before the product is waited for.
SERIALISED = """
#include "common/ptx_sm90.cuh"
#include "common/wgmma_sm90.cuh"
extern "C" __global__ void __launch_bounds__(128, 1) hasty(float* out, uint64_t a, uint64_t b) {
  using fx_fuser::ptx::Wgmma;
  float sum[8] = {};
  fx_fuser::ptx::wgmma_fence();
  Wgmma<__half>::run(sum, a, b, true);
  fx_fuser::ptx::wgmma_commit();
  for (int i = 0; i < 8; ++i) out[i] = sum[i] += 1;
  fx_fuser::ptx::wgmma_fence();
  Wgmma<__half>::run(sum, a, b, true);
  fx_fuser::ptx::wgmma_commit();
  fx_fuser::ptx::wgmma_wait<0>();
  for (int i = 0; i < 8; ++i) out[8 + i] = sum[i];
}
"""


@needs_nvrtc
def test_nvrtcs_log_tells_of_serialised_products(real_nvrtc):
    with pytest.raises(BuildError, match="serialises its wgmma"):
        binaries.cubin(SERIALISED, ARCH)


@needs_nvrtc
def test_a_source_that_nvrtc_refuses_is_told_with_its_line(real_nvrtc):
    with pytest.raises(BuildError, match=r'\(2\): error: identifier "absent" is undefined'):
        binaries.cubin("__device__ int f() {\n  return absent; }", ARCH)
