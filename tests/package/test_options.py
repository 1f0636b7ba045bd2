"""Every option: what it does, and what is said when its name or value is wrong."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from helpers import MUL, OPTIONS, compiled, fused, leaf, linear_program
from torch import Tensor

import fx_fuser
from fx_fuser.errors import OptionError
from fx_fuser.options import Options
from fx_fuser.testing import assert_fused

KNOWN = ["one", "two"]


def _gate(m: Any, x: Tensor) -> Tensor:
    z = m.lin(x)
    return z * torch.sigmoid(z) * 2.0


ERRORS: dict[str, tuple[dict[Any, Any], str]] = {
    "misspelt": ({"stric": True}, "unknown option 'stric'; did you mean 'strict'?"),
    "misspelt inner": ({"iner": "eager"}, "did you mean 'inner'?"),
    "misspelt plural": ({"pattern": ["one"]}, "did you mean 'patterns'?"),
    "misspelt cpu_ops": ({"cpu_op": True}, "did you mean 'cpu_ops'?"),
    "misspelt Inductor": ({"max_autotun": True}, "did you mean 'max_autotune'?"),
    "unlike any": ({"precision": "tf32"}, "unknown option 'precision'; fx_fuser's are auto, "),
    "like nothing": ({"qqqqqqqq": 1}, "fx_fuser's are auto, cache_size, cpu_ops, fp32, inner,"),
    "inner": ({"inner": "tvm"}, "option 'inner' is 'tvm'; give one of inductor, aot_eager, eager"),
    "fp32": ({"fp32": "fp64"}, "'fp64'; give one of follow, split, ieee, tf32"),
    "plan": ({"plan": "never"}, "option 'plan' is 'never'; give one of measure, always"),
    "verify": ({"verify": True}, "'verify' is True; give one of never, first_call, always"),
    "verify when": ({"verify": "once"}, "'once'; give one of never, first_call, always"),
    "inner type": ({"inner": 3}, "option 'inner' is 3; give one of inductor"),
    "strict type": ({"strict": "yes"}, "option 'strict' is 'yes'; give True or False"),
    "strict int": ({"strict": 1}, "option 'strict' is 1; give True or False"),
    "cpu_ops type": ({"cpu_ops": None}, "option 'cpu_ops' is None; give True or False"),
    "auto type": ({"auto": "yes"}, "option 'auto' is 'yes'; give True or False"),
    "auto int": ({"auto": 1}, "option 'auto' is 1; give True or False"),
    "max_structures type": ({"max_structures": "8"}, "'max_structures' is '8'; give a number"),
    "max_structures bool": ({"max_structures": True}, "'max_structures' is True; give a number"),
    "max_structures sign": ({"max_structures": -1}, "'max_structures' is -1; give 0 or more"),
    "cache_size type": ({"cache_size": 0.5}, "'cache_size' is 0.5; give a number of megabytes"),
    "cache_size sign": ({"cache_size": -5}, "'cache_size' is -5; give 0 or more"),
    "mode type": ({"mode": 7}, "option 'mode' is 7; give the name of an Inductor mode"),
    "mode": ({"mode": "fastest"}, "mode is 'fastest'; give one of"),
    "mode without Inductor": (
        {"mode": "max-autotune", "inner": "eager"},
        "mode 'max-autotune' is Inductor's, but 'inner' is 'eager'",
    ),
    "patterns type": ({"patterns": "one"}, "option 'patterns' is 'one'; give a list"),
    "patterns name": ({"patterns": ["three"]}, "names 'three'; there are one, two"),
    "patterns disabled name": ({"patterns": ["-three"]}, "names '-three'; there are one, two"),
    "patterns entry": ({"patterns": [1]}, "names 1; there are one, two"),
    "Inductor option with aot_eager": (
        {"inner": "aot_eager", "max_autotune": True},
        "option 'max_autotune' is Inductor's, but 'inner' is 'aot_eager'; leave one of the two out",
    ),
    "Inductor option with eager": (
        {"inner": "eager", "max-autotune": True},
        "option 'max-autotune' is Inductor's, but 'inner' is 'eager'; leave one of the two out",
    ),
    "near one that is Inductor's": (
        {"inner": "eager", "max_autotun": True},
        "unknown option 'max_autotun'; fx_fuser's are auto, cache_size, cpu_ops,",
    ),
    "number": ({1: 2}, "unknown option 1; fx_fuser's are auto, cache_size, cpu_ops,"),
    "number with eager": ({"inner": "eager", None: 2}, "unknown option None; fx_fuser's are"),
    "inductor is no option": ({"inductor": {}}, "unknown option 'inductor'"),
}


@pytest.mark.parametrize("options, message", ERRORS.values(), ids=ERRORS.keys())
def test_errors(options: dict[Any, Any], message: str) -> None:
    with pytest.raises(OptionError) as failure:
        Options.parse(None, options, KNOWN)
    assert message in str(failure.value)
    assert isinstance(failure.value, ValueError)


@pytest.mark.parametrize("strict", [False, True])
def test_errors_reach_the_user(strict: bool) -> None:
    """A wrong option is never one of the failures that leave the graph unfused."""
    call = torch.compile(
        linear_program(_gate), backend="fx_fuser", options={"inner": "tvm", "strict": strict}
    )
    with pytest.raises(Exception, match="option 'inner' is 'tvm'"):
        call(leaf(4, 8))


def test_defaults() -> None:
    options = Options.parse(None, None, KNOWN)
    assert options == Options()
    assert (options.inner, options.strict, options.cpu_ops, options.mode) == (
        "inductor", False, False, None,
    )  # fmt: skip
    assert all(map(options.selects, KNOWN))


def test_options_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Options().inner = "eager"  # type: ignore[misc]


SELECTIONS: dict[str, tuple[Any, list[str]]] = {
    "none given": (None, ["one", "two"]),
    "empty": ([], []),
    "empty tuple": ((), []),
    "positive": (["one"], ["one"]),
    "negative": (["-one"], ["two"]),
    "both": (["one", "two", "-two"], ["one"]),
    "tuple": (("two",), ["two"]),
}


@pytest.mark.parametrize("given, selected", SELECTIONS.values(), ids=SELECTIONS.keys())
def test_selects(given: Any, selected: list[str]) -> None:
    options = Options.parse(None, {"patterns": given}, KNOWN)
    assert [n for n in KNOWN if options.selects(n)] == selected


GROWTH: dict[str, tuple[dict[str, Any], bool]] = {
    "by default": ({}, True),
    "turned off": ({"auto": False}, False),
    "patterns turned off": ({"patterns": ["-one"]}, True),
    "patterns chosen": ({"patterns": ["one"]}, False),
    "patterns chosen, some turned off": ({"patterns": ["one", "-two"]}, False),
    "no patterns": ({"patterns": []}, False),
    "no patterns, asked for": ({"patterns": [], "auto": True}, True),
    "patterns chosen, asked for": ({"patterns": ["one"], "auto": True}, True),
    "through AOTAutograd": ({"inner": "aot_eager"}, True),
    "where it may be differentiated twice": ({"inner": "eager"}, False),
    "there, asked for": ({"inner": "eager", "auto": True}, True),
    "there, patterns turned off": ({"inner": "eager", "patterns": ["-one"]}, False),
}


@pytest.mark.parametrize("given, grows", GROWTH.values(), ids=GROWTH.keys())
def test_grows(given: dict[str, Any], grows: bool) -> None:
    assert Options.parse(None, given, KNOWN).grows is grows


def test_no_patterns() -> None:
    """`[]` is not `None`: nothing is fused, and nothing is explained as if it could be."""
    model, x = linear_program(_gate), leaf(4, 8)
    torch.testing.assert_close(compiled(model, patterns=[])(x), model(x))
    assert fused() == {}
    torch._dynamo.reset()
    report = fx_fuser.explain(model, x, options={"patterns": []})
    assert str(report).endswith("\n\nNothing found that fx_fuser could fuse.")
    assert_fused(model, (x,), {}, options={**OPTIONS, "patterns": []})
    with pytest.raises(AssertionError, match=f"{MUL}: 0 fused, 1 expected"):
        assert_fused(model, (x,), {MUL: 1}, options={**OPTIONS, "patterns": []})


@pytest.mark.parametrize("name", ["default", "reduce-overhead", "max-autotune"])
def test_mode_from_either_place(name: str) -> None:
    assert Options.parse(name, None, KNOWN).mode == name
    assert Options.parse(None, {"mode": name}, KNOWN).mode == name


@pytest.mark.parametrize("name", [None, "max-autotune-no-cudagraphs"])
def test_inductor_options_pass_through(name: str | None) -> None:
    options = Options.parse(name, {"epilogue_fusion": False, "max-autotune": True}, KNOWN)
    assert dict(options.inductor) == {"epilogue_fusion": False, "max_autotune": True}
    config = options.inner_compiler().config  # type: ignore[attr-defined]
    assert config["epilogue_fusion"] is False and config["max_autotune"] is True


def test_mode_becomes_inductors_config() -> None:
    config = Options.parse("max-autotune-no-cudagraphs", None, KNOWN).inner_compiler().config  # type: ignore[attr-defined]
    assert config["max_autotune"] is True


def test_torch_compile_hands_both_over() -> None:
    seen: list[Options] = []
    parse = Options.parse

    def spy(mode: Any, options: Any, known: Any) -> Options:
        seen.append(parse(mode, options, known))
        return Options(inner="eager", strict=True)

    with mock.patch.object(Options, "parse", spy):
        torch.compile(linear_program(_gate), backend="fx_fuser", mode="max-autotune")(leaf(4, 8))
        torch._dynamo.reset()
        torch.compile(
            linear_program(_gate),
            backend="fx_fuser",
            options={"mode": "max-autotune", "epilogue_fusion": True, "strict": True},
        )(leaf(4, 8))
    assert seen[0] == Options(mode="max-autotune")
    assert seen[1] == Options(mode="max-autotune", strict=True, inductor={"epilogue_fusion": True})


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("cpu_ops", [False, True])
def test_inner_and_cpu_ops(inner: str, cpu_ops: bool) -> None:
    model, x = linear_program(_gate), leaf(4, 8)
    torch.testing.assert_close(compiled(model, inner=inner, cpu_ops=cpu_ops)(x), model(x))
    assert fused() == {MUL: 1}


def test_cpu_ops_decides_what_runs() -> None:
    """The kernel op with it, the pattern's plain torch ops without."""
    for cpu_ops in (True, False):
        torch._dynamo.reset()
        call = compiled(linear_program(_gate), inner="eager", cpu_ops=cpu_ops)
        with torch.no_grad(), torch.profiler.profile() as profile:
            call(torch.randn(4, 8))
        names = {e.key for e in profile.key_averages()}
        assert ("fx_fuser::run linear" in names) == cpu_ops
        assert "aten::sigmoid" in names


def test_strict_raises_and_default_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    from fx_fuser import backend

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(backend, "fuse", broken)
    model, x = linear_program(_gate), leaf(4, 8)
    with pytest.warns(UserWarning, match="leaves a graph unfused: RuntimeError: broken on purpose"):
        torch.testing.assert_close(compiled(model, strict=False)(x), model(x))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="broken on purpose"):
        compiled(model, strict=True)(x)
