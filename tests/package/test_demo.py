"""The demo's verdict: green on what is right, non-zero on each way of being wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import demo
import fx_fuser.native.compilers
from benchmarks import measure
from benchmarks.problems import PROBLEMS, Size
from fx_fuser.errors import BuildError
from fx_fuser.native.compilers import Nvcc

TINY = {
    "59": Size((64, 48, 2.0), (8, 64)),
    "70": Size((64, 48, 2.0), (8, 64)),
    "73": Size((8, 16, 3, 2.0), (2, 8, 12, 12)),
    "llama_mlp_M512": Size((64, 96), (1, 8, 64)),
}


compilers, kernel_compiler = demo.compilers, demo.kernel_compiler


def systems(device: torch.device | None = None, backend: str = "fx_fuser") -> demo.Compilers:
    options = {"inner": "aot_eager", "strict": True} if backend == "fx_fuser" else None
    compile_ours = partial(torch.compile, backend=backend, options=options)
    return {"eager": lambda model: model, "fx_fuser": compile_ours}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in TINY.items():
        monkeypatch.setitem(PROBLEMS, name, replace(PROBLEMS[name], full=size, small=size))
    monkeypatch.setattr(demo, "compilers", systems)
    monkeypatch.setattr(measure, "median_ms", lambda step, leaves, device, warmup, rep: 1.0)


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("train", [pytest.param([], marks=pytest.mark.slow), ["--train"]])
def test_all_problems_pass(
    precision: str, train: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "demo.json"
    status = demo.main(["--precision", precision, "--json", str(file), *train])
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    outcomes = json.loads(file.read_text())
    assert [outcome["problem"] for outcome in outcomes] == list(TINY)
    for outcome in outcomes:
        pattern = PROBLEMS[outcome["problem"]].pattern
        assert [site["pattern"] for site in outcome["fused"]] == [pattern]
        assert "benchmarks/problems.py:" in outcome["fused"][0]["where"]
        assert ("grad x" in outcome["errors"]["fx_fuser"]) == bool(train)
        assert outcome["ms"] == {"eager": 1.0, "fx_fuser": 1.0}
        assert not outcome["failures"]
    assert "linear_sigmoid_mul_mul" in printed.out


@pytest.mark.slow
def test_training_checks_running_statistics() -> None:
    device = torch.device("cpu")
    outcome = demo.run(PROBLEMS["73"], "fp32", "fwd+bwd", device, systems())
    names = {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked", "grad bn.weight"}
    assert names <= set(outcome.errors["fx_fuser"])


@pytest.mark.slow
def test_fails_where_nothing_fuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "compilers", lambda device: systems(backend="aot_eager"))
    assert demo.main(["--problem", "70"]) == 1


@pytest.mark.slow
def test_fails_where_an_error_is_above_the_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "bounds", lambda precision, device, errors: {"output": -1.0})
    assert demo.main(["--problem", "70"]) == 1
    assert "output: error" in capsys.readouterr().err


@pytest.mark.slow
def test_fails_on_an_exception_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(model: torch.nn.Module) -> measure.Call:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(demo, "compilers", lambda device: systems() | {"fx_fuser": broken})
    file = tmp_path / "demo.json"
    assert demo.main(["--problem", "70", "73", "--json", str(file)]) == 1
    assert [outcome["failures"] for outcome in json.loads(file.read_text())] == [
        ["RuntimeError: no such kernel"],
        ["RuntimeError: no such kernel"],
    ]
    assert "no such kernel" in capsys.readouterr().err


def test_a_rival_that_does_not_work_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probed = []

    def fails(*_: object, **__: object) -> Any:
        def run(x: torch.Tensor) -> None:
            probed.append(x.device)
            raise RuntimeError("no C++ compiler")

        return run

    monkeypatch.setattr(torch, "compile", fails)
    found = compilers(torch.device("meta"))
    assert list(found) == ["eager", "fx_fuser"] and probed == [torch.device("meta")]
    said = "Inductor does not work on meta (RuntimeError): left out, inner='aot_eager'"
    assert capsys.readouterr().out.strip() == said


def test_it_says_who_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = Nvcc(Path("/usr/bin/nvcc"), Path("/usr/bin/g++"), "13")
    monkeypatch.setattr(fx_fuser.native.compilers, "of_kernels", lambda: nvcc)
    assert kernel_compiler() == "nvcc, /usr/bin/nvcc"

    def missing() -> Any:
        raise BuildError("nvcc was found nowhere")

    monkeypatch.setattr(fx_fuser.native.compilers, "of_kernels", missing)
    assert kernel_compiler() == "none: nvcc was found nowhere"
