"""Public functions and commands, called wrongly: what is said, and that nothing is half done."""

from __future__ import annotations

import functools
import re
import runpy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import MUL_MUL, fresh  # noqa: F401
from torch import Tensor, nn
from torch._inductor import compile_fx

import fx_fuser
from fx_fuser import (
    OptionError,
    PatternError,
    Report,
    backend,
    build,
    registry,
    wheel,
)
from fx_fuser.installation import _everywhere
from fx_fuser.testing import assert_equivalent, assert_fused

ROOT = Path(__file__).parents[2]
ONE_DICT = "the options go into one dict: install({'fp32': 'ieee'})"
A_FUNCTION = "give a Python function of the anchor's operands"


@pytest.fixture(autouse=True)
def nothing_changes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Patterns and Inductor's entry are afterwards what they were."""
    monkeypatch.setattr(registry, "_patterns", [*registry._patterns])
    before = fx_fuser.registered_patterns(), compile_fx.compile_fx
    yield
    assert (fx_fuser.registered_patterns(), compile_fx.compile_fx) == before
    assert not _everywhere


def tanh_gate(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, weight, bias))


def two_results(x: Tensor, weight: Tensor) -> Any:
    return F.linear(x, weight), x


class Source:
    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


class Configured(nn.Module):
    """A model with inputs that are called as arguments of `explain`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, options: Any, train: bool = False, kwargs: int = 1) -> Tensor:
        z = self.linear(x)
        return z * torch.sigmoid(z) * options["scale"] * kwargs if train else z


LINEAR, X = nn.Linear(4, 4), torch.randn(2, 4)


@functools.cache
def program() -> Any:
    return torch.export.export(LINEAR, (X,))


def registered(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: fx_fuser.register_pattern(*args, **kwargs)


PATTERNS: dict[str, tuple[Callable[[], Any], str]] = {
    "no source": (registered(), "register_pattern(): missing a required argument: 'source'; call"),
    "number": (registered(3), f"the source of a pattern is 3, an int; {A_FUNCTION}"),
    "name first": (registered("a", tanh_gate), f"of a pattern is 'a', a str; {A_FUNCTION}"),
    "built-in": (registered(F.linear, name="n"), f"is a builtin_function_or_method; {A_FUNCTION}"),
    "class": (registered(nn.Linear), f"is the class Linear; {A_FUNCTION}"),
    "module": (registered(LINEAR, name="n"), f"is a Linear; {A_FUNCTION}"),
    "partial": (registered(functools.partial(tanh_gate)), f"is a partial; {A_FUNCTION}"),
    "object": (registered(Source(), name="n"), f"is a Source; {A_FUNCTION}"),
    "empty name": (registered(tanh_gate, name=""), "pattern name '' is not a Python identifier"),
    "name": (registered(tanh_gate, name=3), "the name of a pattern is 3, an int; give a str"),
    "check": (registered(tanh_gate, check=3), "the check of a pattern is 3, an int; give a func"),
    "name second": (registered(tanh_gate, "a"), "is 'a', a str; give a function of the match"),
    "check of none": (
        registered(tanh_gate, check=lambda: None),
        "the check of a pattern gets the match alone: too many positional arguments; it takes ()",
    ),
    "check of two": (
        registered(tanh_gate, check=lambda a, b: None),
        "gets the match alone: missing a required argument: 'b'; it takes (a, b)",
    ),
    "two results": (registered(two_results), "pattern two_results: it returns a tuple; return the"),
    "misspelt": (registered(tanh_gate, nam="a"), "got an unexpected keyword argument 'nam'; call"),
    "too many": (registered(tanh_gate, None, "a", 4), "too many positional arguments; call it as"),
    "listed": (lambda: fx_fuser.registered_patterns(3), "registered_patterns(3): too many"),
}


@pytest.mark.parametrize("call, said", PATTERNS.values(), ids=PATTERNS.keys())
def test_what_is_no_pattern(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(PatternError, match=re.escape(said)):
        call()


def test_a_pattern_that_is_refused_takes_no_others_place() -> None:
    known = fx_fuser.register_pattern(tanh_gate)
    for wrong in ({"check": 3}, {"name": ""}):
        with pytest.raises(PatternError):
            fx_fuser.register_pattern(tanh_gate, **wrong)
    assert [p for p in fx_fuser.registered_patterns() if p.name == "tanh_gate"] == [known]
    registry._patterns.remove(known)


def test_a_check_that_returns_no_reason_is_named() -> None:
    known = fx_fuser.register_pattern(tanh_gate, check=lambda match: True)
    said = "pattern tanh_gate: its check returns True, a bool; return why"
    with pytest.warns(UserWarning, match=said):
        torch.compile(
            lambda x: torch.tanh(LINEAR(x)), backend="fx_fuser", options={"inner": "eager"}
        )(X)
    registry._patterns.remove(known)


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "install str": (lambda: fx_fuser.install("x"), "options is 'x', a str; give a dict, say"),
    "install list": (lambda: fx_fuser.install([]), "options is [], a list; give a dict, say"),
    "install pairs": (lambda: fx_fuser.install([("fp32", "ieee")]), "('fp32', 'ieee')], a list;"),
    "install keyword": (
        lambda: fx_fuser.install(fp32="ieee"),
        f"install(fp32='ieee'): got an unexpected keyword argument 'fp32'; {ONE_DICT}",
    ),
    "installed, not entered": (lambda: fx_fuser.installed("x"), "options is 'x', a str; give"),
    "installed keyword": (lambda: fx_fuser.installed(fp32="ieee"), ONE_DICT),
    "uninstall": (lambda: fx_fuser.uninstall(3), "uninstall(3): too many positional arguments"),
    "export module": (
        lambda: fx_fuser.fuse_exported(LINEAR),
        "the program is a Linear, not a torch.export.ExportedProgram; torch.export.export(model,",
    ),
    "export graph": (lambda: fx_fuser.fuse_exported(program().module()), "is a GraphModule, not"),
    "export file": (lambda: fx_fuser.fuse_exported("m.pt2"), "'m.pt2', a str, not a torch.export"),
    "export options": (
        lambda: fx_fuser.fuse_exported(program(), options=3),
        "options is 3, an int",
    ),
    "export keyword": (
        lambda: fx_fuser.fuse_exported(program(), fp32="ieee"),
        "options={…}), with",
    ),
    "no model": (lambda: fx_fuser.explain(), "missing a required argument: 'model'; call it as"),
    "model": (lambda: fx_fuser.explain(3), "the model is 3, an int; give an nn.Module or a func"),
    "inputs first": (
        lambda: fx_fuser.explain(X, LINEAR),
        "the model is a Tensor; give an nn.Module",
    ),
    "class": (lambda: fx_fuser.explain(nn.Linear, X), "is the class Linear; give an instance"),
    "tuple": (
        lambda: fx_fuser.explain(LINEAR, (X,)),
        "the model fails on its only input, a tuple; if that holds its inputs, give them "
        "one by one: explain(model, *inputs) (TypeError: linear()",
    ),
    "program's tuple": (
        lambda: fx_fuser.explain(program(), (X,)),
        "fails on its only input, a tuple; if",
    ),
    "program's inputs": (lambda: fx_fuser.explain(program(), X, X), "inputs"),
    "no inputs": (
        lambda: fx_fuser.explain(LINEAR),
        "missing a required argument: 'input'; it takes",
    ),
    "too many inputs": (
        lambda: fx_fuser.explain(LINEAR, X, X),
        "too many positional arguments; it",
    ),
    "unknown input": (
        lambda: fx_fuser.explain(LINEAR, X, y=X),
        "unexpected keyword argument 'y'; it",
    ),
    "train": (
        lambda: fx_fuser.explain(LINEAR, X, train="eval"),
        "train is 'eval', a str; give True",
    ),
    "train 1": (lambda: fx_fuser.explain(LINEAR, X, train=1), "train is 1, an int; give True"),
    "options": (
        lambda: fx_fuser.explain(LINEAR, X, options="x"),
        "options is 'x', a str; give a d",
    ),
    "kwargs": (lambda: fx_fuser.explain(LINEAR, X, kwargs=3), "kwargs is 3, an int; give a dict"),
    "twice": (
        lambda: fx_fuser.explain(LINEAR, input=X, kwargs={"input": X}),
        "'input' is given both by name",
    ),
    "model's options": (
        lambda: fx_fuser.explain(Configured(), X, options={"scale": 2.0}),
        "mean 'save'? (the model's own input `options` goes into kwargs={'options': …})",
    ),
    "model's options, not a dict": (
        lambda: fx_fuser.explain(Configured(), X, options=3),
        "give a dict, say {'fp32': 'ieee'} (the model's own input `options` goes into kwargs=",
    ),
    "model's options, missing": (
        lambda: fx_fuser.explain(Configured(), X, options={}),
        "missing a required argument: 'options'; it takes (x: 'Tensor', options: 'Any',",
    ),
    "from_json": (
        lambda: Report.from_json("{}"),
        "the JSON of a report is '{}', a str, which cannot",
    ),
    "from_json 3": (lambda: Report.from_json(3), "the JSON of a report is 3, an int, which cannot"),
    "fused: model": (
        lambda: assert_fused((X,), LINEAR, {}),
        "a tuple; give an nn.Module or a func",
    ),
    "fused: swapped": (lambda: assert_fused(LINEAR, (X,), (X,)), "expected is (tensor("),
    "fused: no pattern": (
        lambda: assert_fused(LINEAR, (X,), {"linear_silu_mul_mul": 0}),
        f"the pattern 'linear_silu_mul_mul', which is not known; did you mean {MUL_MUL!r}?",
    ),
    "fused: count": (lambda: assert_fused(LINEAR, (X,), {MUL_MUL: "1"}), "is '1', a str; give the"),
    "fused: below 0": (
        lambda: assert_fused(LINEAR, (X,), {MUL_MUL: -1}),
        "is -1, an int; give the",
    ),
    "fused: train": (
        lambda: assert_fused(LINEAR, (X,), {}, train="eval"),
        "train is 'eval', a str",
    ),
    "fused: options": (
        lambda: assert_fused(LINEAR, (X,), {}, options="x"),
        "options is 'x', a str",
    ),
    "fused: option": (lambda: assert_fused(LINEAR, (X,), {}, options={"iner": 1}), "mean 'inner'?"),
    "fused: inputs": (lambda: assert_fused(LINEAR, (), {}), "required argument: 'input'; it takes"),
    "equivalent: bound": (lambda: assert_equivalent(LINEAR, (X,), bound=3), "bound is 3, an int;"),
    "equivalent: model": (lambda: assert_equivalent((X,), LINEAR), "a tuple; give an nn.Module"),
    "equivalent: inputs": (lambda: assert_equivalent(LINEAR, (X, X)), "too many positional"),
}


@pytest.mark.parametrize("call, said", CALLS.values(), ids=CALLS.keys())
def test_what_no_function_takes(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        call()


OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "str": (None, "inner", "options is 'inner', a str; give a dict"),
    "number": (None, 3, "options is 3, an int; give a dict"),
    "pairs": (None, [("inner", "eager")], "a list; give a dict"),
    "twice": (
        None,
        {"max-autotune": True, "max_autotune": False},
        "'max-autotune' is also given as 'max",
    ),
    "two modes": (
        "max-autotune",
        {"mode": "default"},
        "mode is 'max-autotune', and option 'mode' is",
    ),
}


@pytest.mark.parametrize("mode, options, said", OPTIONS.values(), ids=OPTIONS.keys())
def test_what_the_backend_does_not_take(mode: Any, options: Any, said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        backend.fx_fuser(torch.fx.symbolic_trace(LINEAR), [X], mode=mode, options=options)


def test_a_models_own_inputs_are_given_in_kwargs() -> None:
    given = {"options": {"scale": 2.0}, "train": True}
    report = fx_fuser.explain(Configured(), X, kwargs=given, train=False)
    assert [s.pattern for s in report.fused] == [MUL_MUL]
    assert report.header is not None and report.header.mode == "eval"


def test_what_takes_a_tuple_gets_it() -> None:
    assert fx_fuser.explain(lambda pair: LINEAR(pair[0]) * pair[1], (X, X)).left
    with pytest.raises(ZeroDivisionError):  # the model's own
        fx_fuser.explain(lambda pair: pair[0] * (1 // 0), (X, X))


def test_a_hook_may_change_the_arguments() -> None:
    model = nn.Linear(4, 4)
    model.register_forward_pre_hook(lambda module, args: (args[0] + args[1],))
    assert fx_fuser.explain(model, X, X).others == {"Linear": 1}


def test_a_decorator_may_take_other_arguments() -> None:
    class Renamed(nn.Linear):
        forward = functools.wraps(nn.Linear.forward)(
            lambda self, **given: nn.Linear.forward(self, given["old_name"])
        )

    model = Renamed(4, 4)
    assert fx_fuser.explain(model, old_name=X).others == {"Linear": 1}
    assert_fused(model, ((), {"old_name": X}), {})


# ---- commands -----------------------------------------------------------------------------------


def test_explain_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(), pytest.raises(SystemExit) as end:
        warnings.simplefilter("error")  # runpy warns of a module that its package has imported
        runpy.run_module("fx_fuser.explain", run_name="__main__", alter_sys=True)
    assert end.value.code == 2
    said = capsys.readouterr()
    assert said.out == "" and "fx_fuser.explain(model, *inputs, train=False)" in said.err


@pytest.mark.parametrize("arch", ["h100", "", "90", "sm90", "sm_9"])
def test_build_refuses_what_is_no_architecture(
    arch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        build.main(["--no-shim", "--arch", arch])
    assert end.value.code == 2
    assert f"argument --arch: {arch!r} is not an architecture; give one" in capsys.readouterr().err


def test_wheel_says_in_a_line_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert wheel.main([str(file)]) == 1
    assert f"{file} is not a folder; give another OUT" in capsys.readouterr().err
    monkeypatch.setattr(wheel, "ROOT", tmp_path)  # as in an installed package
    assert wheel.main([str(tmp_path / "out")]) == 1
    assert "run this in a checkout of fx_fuser" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
