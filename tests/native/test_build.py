"""What is compiled and loaded, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from toolchains import ARCH, SPILLING, faked_loader, needs_compilers

from fx_fuser import build, kernels
from fx_fuser.errors import BuildError
from fx_fuser.kernels import base, split
from fx_fuser.kernels.dense import LINEAR_DENSE
from fx_fuser.kernels.split import LINEAR_SPLIT, LINEAR_SPLIT_AUTO, LINEAR_SPLIT_MMA
from fx_fuser.native import binaries, compilers, launch, limits, load, store
from fx_fuser.native.jobs import SOURCE, TARGET, Job
from fx_fuser.native.kernel_spec import MAX_NUMBERS, MAX_TENSORS, POINTWISE, texts_of

# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says", "calls"),
    [
        ("// BROKEN", "no such thing", 1),
        ("// SPILLS ALWAYS", "spills registers", 2),
        ("// SERIAL", "serialises its wgmma", 1),
    ],
)
def test_a_bad_source_fails_and_stays_out_of_the_cache(fake, text, says, calls):
    for attempt in (1, 2):
        with pytest.raises(BuildError, match=says):
            binaries.cubin(text, ARCH)
        assert fake.calls == calls * attempt


def test_what_spills_is_compiled_again_with_few_registers(fake):
    paths = binaries.cubins(["// SPILLS", "// fine"], ARCH)
    assert [path.read_text() for path in paths] == ["// SPILLS", "// fine"]
    assert fake.calls == 3
    assert binaries.cubins(["// SPILLS", "// fine"], ARCH) == paths
    assert fake.calls == 3


def test_every_bad_source_of_a_run_is_named(fake):
    with pytest.raises(BuildError) as caught:
        binaries.cubins(["// BROKEN", "// fine", "// SPILLS ALWAYS"], ARCH)
    assert "no such thing" in str(caught.value)
    assert "spills" in str(caught.value)


def test_what_builds_beside_a_bad_source_is_kept(fake):
    with pytest.raises(BuildError):
        binaries.cubins(["// BROKEN", "// fine"], ARCH)
    calls = fake.calls
    assert binaries.cubin("// fine", ARCH).read_text() == "// fine"
    assert fake.calls == calls


def test_arch_of(monkeypatch):
    names = {(8, 0): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100a"}
    names |= {(10, 3): "sm_103a", (12, 0): "sm_120"}
    for capability, name in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert binaries.arch_of(0) == name


def test_a_spec_is_its_text_and_its_name():
    types = (torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64)
    spec = base.example(POINTWISE, "Gate", 0, *types)
    arguments = "fx_fuser::examples::Gate, 0, float, __nv_bfloat16, __half, bool, int64_t"
    assert spec.text.splitlines()[-1] == f"FX_FUSER_POINTWISE({arguments})"
    assert ", ".join(spec.signature) == arguments
    assert len(spec.inputs) == 3
    others = [
        base.example(POINTWISE, "Gate", 1, *types),
        base.example(POINTWISE, "Gate", 0, *types[::-1]),
        base.example(LINEAR_SPLIT, "Gate", 0, *types),
    ]
    assert len({spec.name, *(other.name for other in others)}) == 4


def _split(functor, scalars, x=torch.float32, out=torch.float32, family=LINEAR_SPLIT_AUTO):
    return base.example(family, functor, scalars, torch.float32, out, x)


def test_tails_share_the_kernels_that_have_no_tail():
    """Of one family and type of x; whatever else the tails are of."""
    swish = _split("Swish", 1)
    own, common = swish.texts
    assert own == swish.text and "Swish" not in common
    assert common.splitlines()[-1] == "FX_FUSER_LINEAR_SPLIT_COMMON(float)"
    for other in (_split("Sigmoid", 0), _split("Swish", 1, out=torch.float16)):
        assert other.texts[0] != own and other.texts[1] == common
        assert texts_of([swish, other]) == [own, common, other.text]
    narrow, forced = _split("Swish", 1, torch.bfloat16), _split("Swish", 1, family=LINEAR_SPLIT_MMA)
    assert len({common, narrow.texts[1], forced.texts[1]}) == 3
    pointwise = base.example(POINTWISE, "Swish", 1, *[torch.float32] * 3)
    assert pointwise.texts == (pointwise.text,)


def test_the_name_is_of_all_that_is_loaded():
    family = dataclasses.replace(LINEAR_SPLIT_AUTO, common="ANOTHER_MACRO")
    one, other = _split("Swish", 1), _split("Swish", 1, family=family)
    assert one.text == other.text and one.name != other.name


def test_a_family_says_where_it_runs(monkeypatch):
    f32 = torch.float32
    everywhere, hopper = (
        base.example(f, "Swish", 1, f32, f32, f32) for f in (LINEAR_SPLIT, LINEAR_DENSE)
    )
    for capability, runs in (((9, 0), True), ((10, 0), False), ((8, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert load.runs_on(everywhere, "cuda:0")
        assert load.runs_on(hopper, "cuda:0") == runs


@pytest.mark.parametrize(
    "constant, limit", [("kMaxInputs", MAX_TENSORS), ("kMaxScalars", MAX_NUMBERS)]
)
def test_the_limits_are_those_of_the_kernels(constant, limit):
    assert (
        f"constexpr int {constant} = {limit};"
        in (binaries.KERNELS / "common/operands.h").read_text()
    )


def test_available_says_why_not():
    assert load.available("cpu") == "cpu is not a CUDA device"
    if not torch.cuda.is_available():
        assert "is_available() is False" in (load.available("cuda") or "")


@pytest.fixture
def with_gpu(fake, monkeypatch):
    """As if a GPU were here; nvcc is a stand-in."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_available_says_which_folder_the_compiler_cannot_name(with_gpu, tmp_path, monkeypatch):
    assert load.available("cuda") is None
    monkeypatch.setattr(binaries, "KERNELS", tmp_path / "Bob's")
    said = load.available("cuda") or ""
    assert f"nvcc takes no ' in a path, and there is one in {tmp_path / 'Bob'}'s; rename" in said
    assert said.endswith("rename the folder or let NVRTC compile")


def test_available_says_what_is_wrong_in_the_environment(with_gpu, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(split, "_SPLIT_LOOP", "foo")
        said = kernels.unavailable("cuda")
        assert said == "FX_FUSER_SPLIT_LOOP is 'foo'; give 'mma', or leave it unset"
    monkeypatch.setenv("FX_FUSER_COMPILER", "foo")
    assert kernels.unavailable("cuda") == "FX_FUSER_COMPILER is 'foo'; set it to nvrtc or nvcc"


def test_cpu_tensors_are_refused_by_name():
    with pytest.raises(BuildError, match="not on cpu"):
        launch.batch_stats(torch.ones(2, 3, 4, 4))


@pytest.mark.parametrize("arch", build.ARCHS + build.SPLIT_ARCHS)
def test_one_each_leaves_no_main_loop_out(arch):
    def loops(sources):
        """Header and macro of each."""
        asked = r'#include "(?:conv|linear|pointwise)/.*"|^FX_FUSER_\w+(?=\()'
        return [tuple(re.findall(asked, text, re.MULTILINE)) for text in sources]

    every, few = build._sources(arch, one_each=False), build._sources(arch, one_each=True)
    assert set(few) < set(every)
    assert sorted(loops(few)) == sorted(set(loops(every)))


def test_missing_ninja_names_the_remedy(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(BuildError, match="pip install ninja"):
        binaries.cubin("// a", ARCH)


def test_the_shims_key_holds_torchs_version(monkeypatch):
    host = compilers.Host(Path("/usr/bin/g++"), "g++ 12")
    before = binaries._shim_job(host).key
    assert binaries._shim_job(host).key == before
    assert binaries._shim_job(dataclasses.replace(host, version="g++ 13")).key != before
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert binaries._shim_job(host).key != before


# ---- odd names of folders ------------------------------------------------------------------------

# Whatever ninja, a shell, a format or a compiler may take for something else.
ODD = (
    *("w{x}", "w{{b}}", "w{source}", "{source}w", "{", "}", "{0}", "a b", "a:b", "a#b", "a\\b"),
    *("a$b", "a${HOME}b", "$$", "a%b", "a'b", 'a"b', "a`b", "a;b", "a&b", "a(b)", "a*b?[c]", "a!b"),
    *("a\\", "a<b>|c", "a,b", "a=b", "@ab", "-ab", "~ab", "a\tb", "ab ", "aé漢b", "a\udcffb"),
)


@pytest.mark.parametrize("name", ODD)
def test_an_argument_reaches_the_compiler_as_it_is(tmp_path, monkeypatch, name):
    """Through ninja and its shell."""
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    script = 'printf %s "$2" | cat - "$0" > "$1"'
    command = ("sh", "-c", script, SOURCE, TARGET, name)
    (made,) = store.ensure([Job("0a" * 16, " and its text", ".txt", ".so", command)])
    assert made.read_bytes() == os.fsencode(name) + b" and its text"


@pytest.mark.parametrize("line_break", ["\n", "\r"])
def test_an_argument_with_a_line_break_is_refused(tmp_path, monkeypatch, line_break):
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    job = Job("0a" * 16, "text", ".txt", ".so", ("cp", SOURCE, TARGET, f"a{line_break}b"))
    with pytest.raises(BuildError, match=r"'a\\[nr]b', and ninja takes no line break"):
        store.ensure([job])


# ---- loading -------------------------------------------------------------------------------------

SPEC = base.example(POINTWISE, "Swish", 1, torch.float32, torch.float32, torch.float32)


@pytest.fixture
def loader(fake, monkeypatch):
    return faked_loader(monkeypatch)


def test_a_kernel_that_does_not_load_is_no_kernel(loader):
    """And it is tried again: the next driver, or the next free memory, may take it."""
    loader.answers += [RuntimeError("no kernel image for the device"), 7]
    with pytest.raises(BuildError, match="no kernel image"):
        load.prepare([SPEC], "cuda:0")
    assert load._kernels == {}
    load.prepare([SPEC], "cuda:0")
    assert load._kernels == {(SPEC.name, 0): 7}
    family, name, (cubin,), signature, index, rates = loader.calls[-1]
    assert (family, name, signature, index) == ("pointwise", SPEC.name, SPEC.signature, 0)
    assert rates == limits.split_rates((9, 0), [132, 0, 0, 0])
    assert Path(cubin).read_text() == SPEC.text


def test_what_tails_share_is_compiled_once_and_loaded_with_each(loader, fake):
    loader.answers += [7, 8, 9]
    specs = [_split("Swish", 1), _split("Sigmoid", 0)]
    load.prepare(specs, "cuda:0")
    assert fake.calls == 3 and load._kernels == {(specs[0].name, 0): 7, (specs[1].name, 0): 8}
    for spec, (_, name, cubins, signature, index, _) in zip(specs, loader.calls, strict=True):
        assert (name, signature, index) == (spec.name, spec.signature, 0)
        assert tuple(Path(cubin).read_text() for cubin in cubins) == spec.texts
    later, cuda = _split("Identity", 0), torch.device("cuda:0")
    assert load.not_built([*specs, later], cuda) == {later: [later.text]}
    load.prepare([later], "cuda:0")
    assert fake.calls == 4 and load.not_built([later], cuda) == {}


def test_a_kernel_of_another_architecture_is_not_built(loader, fake):
    split = base.example(LINEAR_DENSE, "Swish", 1, torch.float32, torch.float32, torch.float32)
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device: (8, 0)):
        load.prepare([split], "cuda:0")
    assert load._kernels == {(split.name, 0): load.NO_KERNEL}
    assert fake.calls == 0 and not loader.calls


def test_two_threads_load_once(loader):
    loader.answers += [7]
    barrier = threading.Barrier(2)

    def work():
        barrier.wait()
        load.prepare([SPEC], "cuda:0")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loader.calls) == 1 and load._kernels == {(SPEC.name, 0): 7}


def test_a_shim_that_does_not_load_says_which(tmp_path, monkeypatch):
    shim = tmp_path / "shim.so"
    shim.write_text("no library")
    monkeypatch.setattr(binaries, "shim", lambda: shim)
    monkeypatch.setattr(torch.ops, "fx_fuser_native", SimpleNamespace(), raising=False)
    with pytest.raises(BuildError, match=r"cannot load .*shim\.so .* does it fit this torch"):
        load.load_shim()


# ---- the real compilers --------------------------------------------------------------------------


@pytest.mark.slow
@needs_compilers
def test_the_shim_loads_in_a_fresh_process():
    """Also into a torch without CUDA, where its weak CUDA symbol stays null.

    It is the one that the other tests have too, compiled where none has been.
    """
    code = """
import torch
from fx_fuser.native import load
load.load_shim()
load.load_shim()
try:
    torch.ops.fx_fuser_native.batch_stats(0, torch.ones(2, 3))
except RuntimeError as error:
    assert "x is not a CUDA tensor" in str(error), error
else:
    raise AssertionError("a CPU tensor was accepted")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@needs_compilers
def test_a_pointwise_source_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    types = (torch.float32, torch.float16, torch.float16, torch.float32)
    spec = base.example(POINTWISE, "EveryFunction", 2, *types)
    code = binaries.cubin(spec.text, ARCH).read_bytes()
    assert b"fx_fuser_pointwise_u32" in code
    assert b"fx_fuser_pointwise_u64" in code


@pytest.mark.slow
@needs_compilers
def test_ptxas_spills_fail_the_build(tmp_path, monkeypatch):
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    with pytest.raises(BuildError, match="spills registers"):
        binaries.cubin(SPILLING, ARCH)
