"""`python -m fx_fuser`: bad states are named with what to do, and a wrong kernel is noticed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doctors_machines import A100, H100, T4, diagnosed, machine
from toolchains import needs_compilers
from torch import nn

import fx_fuser
from fx_fuser import __main__ as command
from fx_fuser import versions
from fx_fuser.anchors.linear import Linear
from fx_fuser.doctor import diagnosis, facts, findings, loops, selftest
from fx_fuser.doctor.cases import CASES, Case, GatedLinear
from fx_fuser.doctor.facts import Facts
from fx_fuser.doctor.selftest import Result, Times
from fx_fuser.kernels import KERNELS, split
from fx_fuser.native import load, store
from fx_fuser.options import Options
from fx_fuser.planning import plan, timing

CPU = torch.device("cpu")
(SPLIT,) = (case for case in CASES if case.loop == "split")


def bad_lines(found: Facts) -> list[str]:
    return [str(f) for f in findings.judged(found) if f.level in (findings.WARN, findings.FAIL)]


# ---- findings ------------------------------------------------------------------------------------


def test_a_fit_machine_has_no_bad_line() -> None:
    assert bad_lines(machine()) == []
    lines = "\n".join(map(str, findings.judged(machine())))
    for said in ("580.159.04", "capability 9.0 (sm_90a)", "prebuilt", "writable by you alone"):
        assert said in lines


FAULT = "NVRTC of CUDA 13 was not found next to torch …; pip install 'nvidia-cuda-nvrtc'"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "capability": (
        {"gpus": (T4,)},
        "FAIL  GPU 0: Tesla T4, capability 7.5; kernels need 8.0: everything is left to Inductor",
    ),
    "capability beside a fit GPU": ({"gpus": (T4, A100)}, "warn  GPU 0: Tesla T4, capability 7.5"),
    "ROCm": (
        {"hip": "6.4", "cuda": None, "gpus": (), "torch": "2.15.0+rocm6.4"},
        "FAIL  torch 2.15.0+rocm6.4 is for ROCm 6.4, and kernels are for CUDA",
    ),
    "no CUDA in torch": (
        {"cuda": None, "gpus": (), "torch": "2.15.0+cpu"},
        "FAIL  torch 2.15.0+cpu has no CUDA, though there is an NVIDIA driver 580.159.04",
    ),
    "no GPU seen": ({"gpus": ()}, "FAIL  torch for CUDA 13.2 sees no GPU, though there is an"),
    "no compiler": (
        {"compiler": "", "compiler_fault": FAULT},
        f"FAIL  no kernel compiler: {FAULT}",
    ),
    "no g++": (
        {"launcher": "", "launcher_fault": "g++ was not found on PATH; install it"},
        "FAIL  the kernel launcher cannot be built: g++ was not found on PATH",
    ),
    "another fault": (
        {"gpus": (dataclasses.replace(H100, unfit='NVRTC takes no " in a path'),)},
        "FAIL  GPU 0: no kernel can be built: NVRTC takes no",
    ),
    "old torch": ({"torch": "2.10.1"}, "FAIL  torch 2.10.1 is too old: pip install 'torch>=2.11'"),
    "new torch": ({"torch": "2.16.0"}, "warn  torch 2.16.0 is untested (tested: 2.11 to 2.15)"),
    "no version": ({"torch": "mine"}, "warn  torch mine: not understood as a version"),
    "not registered": ({"is_registered": False}, 'FAIL  backend "fx_fuser" is not registered'),
    "switched off": ({"switch": "off"}, "warn  FX_FUSER is 'off': nothing is fused until it is"),
    "a wrong switch": (
        {"switch": "0", "switch_fault": "FX_FUSER is '0'; set it to off or install"},
        "FAIL  FX_FUSER is '0'; set it to off or install",
    ),
    "a wrong loop": (
        {"split_loop": "x", "split_loop_fault": "FX_FUSER_SPLIT_LOOP is 'x'; give 'mma', or"},
        "FAIL  FX_FUSER_SPLIT_LOOP is 'x'; give 'mma'",
    ),
    "a forced loop": ({"split_loop": "mma"}, "warn  FX_FUSER_SPLIT_LOOP is 'mma': a switch for"),
    "Windows": ({"system": "Windows AMD64"}, "warn  Windows AMD64, Python 3.11.7: kernels need"),
}


@pytest.mark.parametrize(("changes", "said"), BAD.values(), ids=BAD)
def test_a_bad_state_is_named_with_its_remedy(changes: dict[str, Any], said: str) -> None:
    (line,) = bad_lines(machine(**changes))
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"untrusted": "everybody may write to it"}, "is not used, everybody may write to it"),
        ({"unwritable": "/ro is not writable"}, "keeps nothing, /ro is not writable"),
    ],
)
def test_a_cache_that_cannot_be_used_is_named(changes: dict[str, str], said: str) -> None:
    (line,) = bad_lines(machine(cache=dataclasses.replace(machine().cache, **changes)))
    assert line.startswith("warn") and said in line and "FX_FUSER_CACHE_DIR" in line


def test_without_a_gpu_nothing_that_kernels_need_is_missed() -> None:
    found = machine(gpus=(), driver="", compiler_fault=FAULT, launcher_fault="g++ was not found")
    assert bad_lines(found) == []
    said = "\n".join(map(str, findings.judged(found)))
    assert "kernels run; they need an NVIDIA GPU of compute capability 8.0 or above" in said


def test_kernels_that_came_with_the_package_are_counted() -> None:
    def said(**changes: Any) -> str:
        return "\n".join(map(str, findings.judged(machine(**changes))))

    assert "ok    kernels that came with the package: 45 for sm_90a, 32 for sm_80" in said()
    assert "note  none of the package's kernels are used" in said(brought={})
    assert "of the package's" not in said(brought={}, is_checkout=True)


# ---- facts ---------------------------------------------------------------------------------------


def test_what_is_here_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / "new"))
    found = facts.gather()
    assert found.torch == torch.__version__ and found.fx_fuser == versions.PACKAGE
    assert found.is_registered and not found.is_installed
    assert found.cache.folder == str(tmp_path / "new" / store.OWN) and not found.cache.unwritable


def test_missing_compilers_are_found(bare: Path) -> None:
    found = facts.gather()
    assert "NVRTC of CUDA 13" in found.compiler_fault and "; or nvcc" in found.compiler_fault
    assert "g++ was not found" in found.launcher_fault


def test_wrong_variables_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX_FUSER", "no")
    monkeypatch.setattr(split, "_SPLIT_LOOP", "wgmma")
    found = facts.gather()
    assert found.switch_fault.startswith("FX_FUSER is 'no'")
    assert found.split_loop_fault.startswith("FX_FUSER_SPLIT_LOOP is 'wgmma'")


def test_a_cache_of_others_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / store.OWN
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(folder.parent))
    assert facts.gather().cache.untrusted == "everybody may write to it"


def test_a_cache_that_cannot_be_written_to_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / "file"))
    assert facts.gather().cache.unwritable == f"{tmp_path / 'file'} is not a folder"
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / 'with"quote'))
    assert 'compilers take no "' in facts.gather().cache.unwritable
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert facts.gather().cache.unwritable == f"{tmp_path} is not writable"


@pytest.mark.parametrize("kind", ["Module ", "Open Kernel Module for x86_64 "])
def test_the_drivers_version_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "version"
    path.write_text(f"NVRM version: NVIDIA UNIX {kind} 580.159.04  Release Build  (root)\nGCC 12")
    monkeypatch.setattr(facts, "_OF_DRIVER", path)
    assert facts._driver() == "580.159.04"


def test_gpus_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [SimpleNamespace(name="A", multi_processor_count=108, total_memory=85e9)] * 2
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    monkeypatch.setattr(load, "available", lambda device: "no" if device.index else None)
    first, second = facts._gpus()
    assert (first.arch, first.split_loop, first.memory_gib) == ("sm_86", "mma.sync", 79.2)
    assert (first.unfit, second.unfit, second.index) == ("", "no", 1)


def test_a_home_is_shown_as_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert facts.without_home("in /home/me/x, /home/me") == "in ~/x, ~"
    assert facts.without_home("/home/metoo/x") == "/home/metoo/x"
    monkeypatch.setenv("HOME", "/")
    assert facts.without_home("/a/b") == "/a/b"


# ---- what a GPU gets -----------------------------------------------------------------------------


def test_a_hopper_gets_every_loop() -> None:
    found = loops.loops_of(H100)
    assert all(access.gets for access in found)
    assert found[0].note == "split by wgmma; timed on H200 or H100"


def test_of_another_gpu_no_time_is_claimed() -> None:
    found = {access.loop: access for access in loops.loops_of(A100)}
    assert found["split"].note == "split by mma.sync; not timed on such a GPU"
    assert not any("timed on H" in access.note for access in found.values())
    missing = {name for name, access in found.items() if not access.gets}
    assert missing == {"dense", "exact", "direct"}
    assert found["dense"].note == "needs sm_90a, this is sm_80: left to the library"


def test_each_loop_has_a_case() -> None:
    assert sorted(KERNELS) == sorted(case.loop for case in CASES)


@needs_compilers  # the launcher says which convolutions kernels take
@pytest.mark.parametrize("case", [c for c in CASES if not c.is_chosen], ids=lambda c: c.loop)
def test_a_case_reaches_its_loop_on_hopper(match_of: Any, on_gpu: Any, case: Case) -> None:
    model, x = selftest.made_on(case, CPU, 1)
    with torch.set_grad_enabled(case.train):
        match = match_of(model, x, options={"plan": "always", "cpu_ops": True})
        options = Options.parse(None, selftest.options_for(case, torch.device("cuda")), [])
        (decision,) = plan.decide([match], options)
    assert decision.choices["product"] == case.loop  # type: ignore[union-attr]


def test_cases_of_loops_that_a_gpu_has_not_are_left_out() -> None:
    gets = {gpu.arch: loops.loops_of(gpu) for gpu in (A100, H100)}
    found = diagnosis.cases_of([H100, A100], gets)
    of_a100 = {case.loop for case, device in found if device.index == 1}
    assert of_a100 == {c.loop for c in CASES} - {"dense", "exact", "direct"}
    assert len([1 for _, device in found if device.index == 0]) == len(CASES)


def test_of_equal_gpus_one_is_tested() -> None:
    second = dataclasses.replace(H100, index=1)
    assert diagnosis.usable(machine(gpus=(H100, second, A100, T4))) == [H100, A100]


# ---- the self-test -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_case_is_right_on_a_cpu() -> None:
    found = selftest.run(SPLIT, CPU)
    assert found.level == findings.OK and set(found.errors) == {"output", "gradient"}
    own, eagers = found.errors["output"]
    assert 0 < own < 1e-6 and 0 < eagers < 1e-6
    assert str(found).startswith("ok    cpu: fp32 Linear + SiLU + mul: ")


def test_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Linear.forward

    def wrong(self: Any, operands: Any, config: Any) -> Any:
        return tuple(value * 1.001 for value in right(self, operands, config))

    monkeypatch.setattr(Linear, "forward", wrong)
    small = Case("small", "split", lambda scale: (GatedLinear(8, 8), torch.randn(4, 8)))
    found = selftest.run(small, CPU)
    assert found.level == findings.FAIL
    assert "beyond the bound" in found.detail and "allowed" in found.detail


@pytest.mark.slow
def test_a_site_that_is_not_fused_fails_with_the_reason() -> None:
    case = dataclasses.replace(SPLIT, options={"patterns": [], "auto": False})
    found = selftest.run(case, CPU)
    assert found.level == findings.FAIL and "not fused: " in found.detail


def test_what_raises_fails_in_one_line() -> None:
    def make(scale: int) -> Any:
        raise RuntimeError("first\nsecond")

    found = selftest.run(Case("a case", "split", make), CPU)
    assert (found.level, found.detail) == (findings.FAIL, "RuntimeError: first")


def test_another_kernel_than_the_cases_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a GPU, where `explain` names it."""
    monkeypatch.setattr(selftest, "options_for", lambda case, _: dict(selftest.ON_CPU))
    monkeypatch.setattr(selftest, "kernel_of", lambda *_: "library")
    monkeypatch.setattr(selftest, "made_on", lambda *_: (GatedLinear(8, 8), torch.randn(2, 8)))
    case = dataclasses.replace(SPLIT, train=False)
    level, said = selftest._run(case, torch.device("meta"))
    assert level == findings.NOTE and said["detail"] == "split does not accept it here"


@pytest.mark.slow
def test_the_switch_in_the_environment_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FX_FUSER", "off")
    assert selftest.run(SPLIT, CPU).level == findings.OK
    assert os.environ["FX_FUSER"] == "off"


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's, as far as it is called: each candidate runs once, and takes what is made up."""

    def times_of(candidates: Sequence[timing.Candidate], device: Any) -> list[timing.Timing]:
        for candidate in candidates:
            candidate()
        return [timing.Timing(ms) for ms in (3.0, 2.0, 0.5)]

    monkeypatch.setattr(timing, "times_of", times_of)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(selftest, "_LARGE", 1)
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda m, **k: compiled(m, **k) if k else m)


def test_times_are_of_forward_and_backward(timer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "kernel_of", lambda *_: "split by wgmma")
    found = selftest.timed(SPLIT, CPU)
    assert (found.eager, found.inductor, found.fx_fuser) == (3.0, 2.0, 0.5)
    assert found.input == "512×256" and found.left == ""
    assert "Inductor 2.000 ms, fx_fuser 0.500 ms" in str(found)


def test_what_is_not_fused_is_not_timed(timer: None) -> None:
    case = dataclasses.replace(SPLIT, options={"patterns": [], "auto": False})
    assert selftest.timed(case, CPU).left == "nothing was fused"
    case = dataclasses.replace(SPLIT, make=lambda scale: 1 / 0)  # type: ignore[arg-type, return-value]
    assert "not timed, ZeroDivisionError" in str(selftest.timed(case, CPU))


# ---- the whole -----------------------------------------------------------------------------------


def test_the_verdict_is_one_line() -> None:
    fit = diagnosed()
    assert fit.verdict == "No fault was found (nothing was run)." and fit.status == 0
    fit.tests = [Result("a", "split", "cuda:0", "ok")]
    assert fit.verdict == "Everything works. Next: print(fx_fuser.compare(model, *inputs))"
    fit.tests.append(Result("b", "split", "cuda:0", "FAIL", detail="off"))
    assert fit.verdict.startswith("FAIL: 1 of the lines above") and fit.status == 1
    on_cpu = diagnosed(gpus=(), driver="", switch="off")
    on_cpu.tests = [Result("a", "split", "cpu", "ok")]
    said = "The backend works, with 1 warning, but none of fx_fuser's kernels run: this is a CPU."
    assert on_cpu.verdict == f"{said} Inductor compiles your models as they are."
    assert on_cpu.status == 0
    assert diagnosed(gpus=(T4,)).status == 1


def test_json_has_everything_but_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    found = diagnosed()
    found.gets = {H100.arch: loops.loops_of(H100)}
    found.tests = [Result("a", "split", "cuda:0", "ok", errors={"output": (1e-7, 2e-7)})]
    found.times = [Times("a", "split", "cuda:0", "4×4", "split", 3.0, 2.0, 0.5)]
    text = found.to_json()
    assert "/home/me" not in text
    data = json.loads(text)
    assert data["schema"] == diagnosis.SCHEMA and data["facts"]["gpus"][0]["arch"] == "sm_90a"
    assert data["self_test"][0]["errors"]["output"] == [1e-7, 2e-7]
    assert data["times"][0]["fx_fuser"] == 0.5 and len(data["loops"]["sm_90a"]) == len(CASES)


@pytest.fixture
def one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("Linear", "split", lambda scale: (GatedLinear(4, 4), torch.randn(2, 4)))
    monkeypatch.setattr(diagnosis, "CASES", (case,))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
def test_on_a_cpu_the_backend_is_checked(
    one_case: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command.main(["--report", str(tmp_path / "report.json")]) == 0
    said = capsys.readouterr().out
    assert "On a CPU none of fx_fuser's kernels run" in said and "ok    cpu: Linear: " in said
    assert "The backend works" in said and "attach it to an issue" in said
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["times"] == [] and data["self_test"][0]["level"] == "ok"


def test_no_test_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "run", lambda *_: pytest.fail("it was to run nothing"))
    assert command.main(["--no-test", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["self_test"] is None and data["times"] is None
    with pytest.raises(SystemExit):
        command.main(["--no-test", "--report", "x.json"])


def test_a_report_that_cannot_be_written_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "diagnose", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit):
        command.main(["--report", str(tmp_path / "none/report.json")])
    assert "give a writable file" in capsys.readouterr().err


def test_a_failure_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(facts, "gather", lambda: machine(gpus=(T4,)))
    assert command.main(["--no-test"]) == 1
    assert "FAIL  GPU 0: Tesla T4" in capsys.readouterr().out


def test_what_a_gpu_gets_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(facts, "gather", lambda: machine(gpus=(A100,)))
    assert command.main(["--no-test"]) == 0
    said = capsys.readouterr().out
    assert "What NVIDIA A100-SXM4-80GB gets" in said and "no    16-bit and TF32 Linear" in said


def test_install_in_the_environment_is_undone_before_timing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import compile_fx

    fx_fuser.install()
    assert diagnosis.diagnose(False, False, lambda _: None).facts.is_installed
    assert not hasattr(compile_fx.compile_fx, "is_fx_fusers")


def test_commands_are_its_subcommands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / "cache"))
    assert command.main(["cache"]) == 0
    assert "nothing is there" in capsys.readouterr().out
    assert command.main(["build", "--no-shim"]) == 0
    monkeypatch.setattr(sys, "argv", ["cache"])
    with pytest.raises(SystemExit) as left:  # as `python -m fx_fuser.cache`
        runpy.run_module("fx_fuser.cache", run_name="__main__")
    assert left.value.code == 0 and "nothing is there" in capsys.readouterr().out


@pytest.mark.slow
def test_it_runs_as_a_module_and_an_import_installs() -> None:
    """In a process of its own, where fx_fuser is not imported yet."""
    root = Path(fx_fuser.__file__).parents[1]
    run = [sys.executable, "-m", "fx_fuser", "--no-test"]
    surroundings = {**os.environ, "PYTHONPATH": str(root), "FX_FUSER": "install"}
    done = subprocess.run(run, env=surroundings, check=False, capture_output=True, text=True)
    assert "note  FX_FUSER is 'install': torch.compile(model) fuses" in done.stdout, done.stderr


@pytest.mark.slow
def test_its_models_are_right_in_float64() -> None:
    """Nothing in them casts down what `observe` has cast up."""
    for case in CASES:
        model, x = case.make(1)
        assert isinstance(model, nn.Module)
        assert model.double().eval()(x.double()).dtype == torch.float64, case.title
