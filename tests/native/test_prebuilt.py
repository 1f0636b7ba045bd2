"""Cubins that a wheel brings: when they are used, and when NVRTC compiles. NVRTC is a stand-in, and
so is the driver."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toolchains import ARCH, faked_loader

from fx_fuser import wheel
from fx_fuser.doctor import facts
from fx_fuser.errors import BuildError
from fx_fuser.kernels import base
from fx_fuser.kernels.split import LINEAR_SPLIT
from fx_fuser.native import binaries, jobs, load, store
from fx_fuser.native.kernel_spec import POINTWISE, KernelSpec
from fx_fuser.ops import usual

CUDA = torch.device("cuda", 0)
F32 = torch.float32
SWISH = base.example(POINTWISE, "Swish", 1, F32, F32, F32)
GEMM = base.example(LINEAR_SPLIT, "Swish", 1, F32, F32, F32)
Put = Callable[..., Path]


@pytest.fixture
def put(fake_nvrtc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts a source's cubin where a wheel has it. Sources are a copy that may be edited."""
    shutil.copytree(binaries.KERNELS, tmp_path / "kernels_cu")
    monkeypatch.setattr(binaries, "KERNELS", tmp_path / "kernels_cu")
    monkeypatch.setattr(binaries, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(binaries, "_refused", set())

    def put_one(text: str, arch: str = ARCH) -> Path:
        path = tmp_path / "prebuilt" / binaries.prebuilt_names([text], arch)[text]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("the wheel's")
        return path

    return put_one


def is_compiled(text: str, arch: str = ARCH) -> bool:
    path = binaries.cubin(text, arch)
    assert path.read_text() == ("the wheel's" if binaries.PREBUILT in path.parents else text)
    return path.parent == store.cache_dir()


# ---- when they are used --------------------------------------------------------------------------


def test_what_the_wheel_has_is_not_compiled(put: Put) -> None:
    path = put("// a")
    assert binaries.cubin("// a", ARCH) == path and not store.cache_dir().exists()
    assert binaries.are_built(["// a", "// b"], ARCH) == [True, False]


def test_beside_it_the_rest_is_compiled(put: Put) -> None:
    path, texts = put("// b"), ["// a", "// b", "// a", "// c"]
    made = binaries.cubins(texts, ARCH)
    assert made[1] == path and made[0] == made[2] and len({*made}) == 3
    assert [p.read_text() for p in (made[0], made[3])] == ["// a", "// c"]


@pytest.mark.parametrize(
    "name",
    ["pointwise/pointwise.cuh", "linear/linear_split_args.h", "host/run.h", "nvrtc/prelude.h"],
    ids=["kernel", "arguments", "launcher", "NVRTC"],
)
def test_an_edited_source_is_compiled(put: Put, name: str) -> None:
    """Also one of the host's half, which fills the kernels' arguments, and one for NVRTC alone."""
    put("// a")
    assert not is_compiled("// a")
    with (binaries.KERNELS / name).open("a") as source:
        source.write("// edited\n")
    assert is_compiled("// a")


def test_another_text_and_another_architecture_are_compiled(put: Put) -> None:
    put("// a")
    put("// other", "sm_80")
    assert not is_compiled("// a")
    assert is_compiled("// a ") and is_compiled("// a", "sm_80")


def test_who_names_a_compiler_gets_its_kernels(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    put("// a")
    monkeypatch.setenv("FX_FUSER_COMPILER", "nvrtc")
    assert binaries.are_built(["// a"], ARCH) == [False] and is_compiled("// a")


def test_a_checkout_has_none(fake_nvrtc: Path) -> None:
    assert facts._brought() == {} or "site-packages" in str(binaries.PREBUILT)


def test_the_doctor_counts_those_that_are_used(put: Put) -> None:
    put(SWISH.text)  # for which no model asks
    assert facts._brought() == {}
    for spec in usual.specs("sm_80")[:3]:
        put(spec.text, "sm_80")
    assert facts._brought() == {"sm_80": 3}
    with (binaries.KERNELS / "common/operands.h").open("a") as source:
        source.write("// edited\n")
    assert facts._brought() == {}


# ---- what the driver refuses ---------------------------------------------------------------------


@pytest.fixture
def loader(put: Put, monkeypatch: pytest.MonkeyPatch) -> Any:
    return faked_loader(monkeypatch)


def texts_loaded(call: Any) -> tuple[str, ...]:
    return tuple(Path(path).read_text() for path in call[2])


REFUSAL = RuntimeError(
    "cannot load it: the provided PTX was compiled with an unsupported toolchain"
)


def test_what_the_driver_refuses_is_compiled(
    put: Put, loader: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for text in (*SWISH.texts, *GEMM.texts):
        put(text)
    loader.answers += [7, REFUSAL, 8, 9]
    with caplog.at_level(logging.INFO, "fx_fuser.native.binaries"):
        load.prepare([SWISH, GEMM], CUDA)
        assert load._kernels == {(SWISH.name, 0): 7, (GEMM.name, 0): 8}
        assert texts_loaded(loader.calls[1]) == ("the wheel's",) * 2
        assert texts_loaded(loader.calls[2]) == GEMM.texts
        load._kernels.clear()
        assert load.not_built([SWISH], CUDA) == {
            SWISH: [SWISH.text]
        }  # that it was loaded is enough
        load.prepare([SWISH], CUDA)  # no other is tried
    assert texts_loaded(loader.calls[3]) == SWISH.texts
    (said,) = caplog.messages
    assert "compiling kernels for sm_90a instead of using the wheel's: cannot load it" in said


def test_one_that_was_compiled_and_does_not_load_refuses_no_other(put: Put, loader: Any) -> None:
    put(SWISH.text)
    loader.answers += [RuntimeError("out of memory"), 7]
    with pytest.raises(BuildError, match="out of memory"):
        load.prepare([GEMM], CUDA)
    load.prepare([SWISH], CUDA)
    assert texts_loaded(loader.calls[1]) == ("the wheel's",)


def test_one_that_does_not_compile_refuses_none(put: Put, loader: Any) -> None:
    put(SWISH.text)
    broken = KernelSpec(POINTWISE, "F", "// BROKEN", 0, F32, F32, (F32,))
    with pytest.raises(BuildError, match="no such thing"):
        load.prepare([SWISH, broken], CUDA)
    loader.answers.append(7)
    load.prepare([SWISH], CUDA)
    assert texts_loaded(loader.calls[0]) == ("the wheel's",)


def test_an_error_of_both_is_raised(put: Put, loader: Any) -> None:
    put(SWISH.text)
    loader.answers += [REFUSAL, RuntimeError("out of memory")]
    with pytest.raises(BuildError, match="out of memory"):
        load.prepare([SWISH], CUDA)
    assert load._kernels == {}


# ---- how they are made ---------------------------------------------------------------------------


def test_the_wheels_kernels_are_found(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not compile for one architecture is left out there, and said."""
    broken = KernelSpec(POINTWISE, "F", "// v0 = spills(z)\n// SPILLS ALWAYS", 0, F32, F32, (F32,))
    monkeypatch.setattr(usual, "specs", lambda arch: [GEMM, broken][: 1 + (arch == "sm_80")])
    (said,) = wheel.usual_cubins(binaries.PREBUILT, (ARCH, "sm_80"))
    assert re.match(r"sm_80/\w{32}\.cubin, v0 = spills\(z\): ", said) and "spills registers" in said
    for arch in (ARCH, "sm_80"):
        for text in GEMM.texts:
            assert binaries.prebuilt_cubins([text], arch)[text].read_text() == text
    assert binaries.prebuilt_cubins([broken.text], "sm_80") == {}
    assert len(list(binaries.PREBUILT.rglob("*.*"))) == 4 and not store.cache_dir().exists()


def test_a_wheel_without_kernels_is_none(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = KernelSpec(POINTWISE, "F", "// BROKEN", 0, F32, F32, (F32,))
    monkeypatch.setattr(usual, "specs", lambda arch: [SWISH, broken][arch != ARCH :])
    with pytest.raises(BuildError, match=r"no kernel compiles for sm_80: [^\0]*no such thing"):
        wheel.usual_cubins(binaries.PREBUILT, (ARCH, "sm_80"))


def test_they_hold_nothing_of_the_machine_that_made_them(put: Put) -> None:
    command = wheel._cubin_job("// a", "a.cubin", ARCH).command
    assert not {"-lineinfo", jobs.IN_PARALLEL} & {*command}
    assert f"--gpu-architecture={ARCH}" in command
