"""What a wheel has beside a checkout: a shim that is built already, for older systems too."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fx_fuser import wheel
from fx_fuser.errors import BuildError
from fx_fuser.native import binaries, compilers

LISTED = """\
0000000000000000      DF *UND*	0000000000000000 (GLIBC_2.2.5) memcpy
0000000000000000      DF *UND*	0000000000000000 (GLIBC_2.34) dlopen
0000000000000000      DF *UND*	0000000000000000 (GLIBCXX_3.4.21) _ZNSs
0000000000000000      DF *UND*	0000000000000000 (GLIBCXX_3.4.29) _ZSt28__throw
0000000000000000      DF *UND*	0000000000000000  Base        aoti_torch_get_dim
"""


@pytest.fixture
def prebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    (folder / "shim.so").touch()
    (folder / "shim.sources").write_text(binaries.shim_sources())
    monkeypatch.setattr(binaries, "PREBUILT", folder)
    return folder


def test_a_shim_that_is_there_needs_no_compiler(
    prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert binaries.shim() == prebuilt / "shim.so"


def test_a_shim_of_other_sources_is_not_taken(
    prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prebuilt / "shim.sources").write_text("of another version")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match=r"g\+\+ was not found"):
        binaries.shim()


def test_a_checkout_has_none() -> None:
    assert binaries.prebuilt_shim() is None or "site-packages" in str(binaries.PREBUILT)


def test_newer_symbols() -> None:
    assert wheel.newer_symbols(LISTED.splitlines()) == [
        "dlopen of GLIBC_2.34",
        "_ZSt28__throw of GLIBCXX_3.4.29",
    ]


# Slow: .ci/run makes a wheel, whose shim is compiled and checked so.
needs_gxx = pytest.mark.skipif(
    shutil.which("g++") is None or shutil.which("objdump") is None, reason="no g++, or no objdump"
)


@pytest.mark.slow
@needs_gxx
def test_the_shim_of_wheels_asks_for_nothing_new(tmp_path: Path) -> None:
    target = tmp_path / "shim.so"
    wheel.portable_shim(target)
    listed = subprocess.run(["objdump", "-p", str(target)], capture_output=True, text=True).stdout
    needed = {line.split()[1].split(".")[0] for line in listed.splitlines() if "NEEDED" in line}
    assert needed <= {"libtorch", "libtorch_cpu", "libstdc++", "libm", "libgcc_s", "libc"}


@pytest.mark.slow
@needs_gxx
def test_one_that_asks_for_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wheel.NEWEST, "GLIBC", (2, 2))
    with pytest.raises(BuildError, match=r"needs what manylinux_2_28 lacks: .* of GLIBC_2\.2"):
        wheel.portable_shim(tmp_path / "shim.so")


@pytest.mark.parametrize("name", ["w{x}", "w{{b}}", "w{source}"])
def test_a_checkout_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    gxx = tmp_path / name / "g++"
    gxx.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$(dirname "$0")/said"\n')
    gxx.chmod(0o755)
    monkeypatch.setattr(compilers, "of_shim", lambda: compilers.Host(gxx, "1"))
    monkeypatch.setattr(wheel, "check", lambda target: None)
    monkeypatch.setattr(binaries, "KERNELS", tmp_path / name / "kernels_cu")
    wheel.portable_shim(tmp_path / name / "shim.so")
    said = (tmp_path / name / "said").read_text().splitlines()
    portable = tmp_path / name / "kernels_cu/host/portable"
    assert {str(portable), str(portable / "shim.cpp"), str(tmp_path / name / "shim.so")} < set(said)


def test_only_a_checkout_makes_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "ROOT", tmp_path)
    with pytest.raises(BuildError, match="run this in a checkout"):
        wheel.build_all(tmp_path / "out")


def test_the_shim_asks_for_gxx_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gxx = shutil.which("g++")
    if gxx is None:
        pytest.skip("no g++")
    (tmp_path / "g++").symlink_to(gxx)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert compilers.of_shim().cxx == tmp_path / "g++"
