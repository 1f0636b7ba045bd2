"""What exported programs call: its arguments, and the kernels that it loads by itself."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fx_fuser.errors import BuildError, FxFuserError
from fx_fuser.native import load
from fx_fuser.ops import exported as ops
from fx_fuser.ops import run

TEXT = "v0 = sigmoid(z); v1 = mul(v0, s0)"
LIBRARY = ("library", "library", False)


def arguments(t: list[Tensor] | None = None) -> tuple[Any, ...]:
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    text = "v0 = mul(z, t0); v1 = add(v0, s0)" if t else TEXT
    tail = (text, t or [], [-math.inf], torch.float32, torch.float32, True)
    return ops.arguments((x, weight, None, *LIBRARY, *tail), "linear")


@pytest.mark.parametrize("t", [None, [torch.randn(6)]], ids=["no tensors", "a tensor"])
def test_opcheck(t: list[Tensor] | None) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(run.EXPORTED, arguments(t), test_utils=tests)


def test_arguments_are_of_kinds_that_aotinductor_passes_on() -> None:
    """torch 2.11 changes a dtype, and all torches an empty list and an infinite number."""
    types = [str(argument.type) for argument in run.EXPORTED._schema.arguments]
    assert types == ["List[Tensor]", "str", "Optional[List[int]]"]
    t, program = arguments()
    assert len(t) == 2 and isinstance(program, str)
    name, filled = run.read(program)
    assert name == "linear_exported"
    dtypes = [torch.float32, torch.float32]
    assert filled(t)[2:] == [None, *LIBRARY, TEXT, [], [-math.inf], *dtypes]


def test_a_number_of_the_program_is_a_float() -> None:
    """A graph may have an int, which the composite op's schema converts."""
    tail = ("v0 = mul(z, s0)", [], [2], torch.half, torch.half, True)
    t, program = ops.arguments(
        (torch.ones(2, 3), torch.ones(4, 3), None, *LIBRARY, *tail), "linear"
    )
    *_, (number,), _, _ = run.read(program)[1](t)
    assert type(number) is float and number == 2


def test_a_function_of_another_version_is_named() -> None:
    t, program = arguments()
    with pytest.raises(RuntimeError, match=r"the function lstm; if .* fuse the program again"):
        run.EXPORTED(t, program.replace("linear_exported", "lstm"))


def test_a_profiler_sees_the_function() -> None:
    with torch.profiler.profile() as profile:
        run.EXPORTED(*arguments())
    assert "fx_fuser::run linear_exported" in {event.name for event in profile.events()}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU in name: loads no kernel, and says what it was asked for."""
    found: dict[str, Any] = {"reason": None, "runs": True, "loaded": [], "shim": 0}

    def prepare(specs: Any, device: Any) -> None:
        found["loaded"].append([spec.family.header for spec in specs])

    def load_shim() -> None:
        found["shim"] += 1

    monkeypatch.setattr(ops, "_kernels", {})
    monkeypatch.setattr(load, "available", lambda device: found["reason"])
    monkeypatch.setattr(load, "runs_on", lambda spec, device: found["runs"] or not spec.family.arch)
    monkeypatch.setattr(load, "prepare", prepare)
    monkeypatch.setattr(load, "load_shim", load_shim)
    return found


def kernel(product: str, text: str = TEXT) -> Any:
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    config = {"product": product, "backward": "library", "again": False}
    operands = {"x": x, "weight": weight, "bias": None}
    found = ops._kernel(ops.ANCHORS["linear"], operands, config, text, [], [2.0], torch.float32)
    return found and found([*operands.values()], [])


def test_kernels_are_loaded_once(machine: dict[str, Any]) -> None:
    for _ in range(2):
        torch.testing.assert_close(kernel("split"), torch.full((2, 4), 2 / (1 + 2.718281828**-3)))
    headers = ["pointwise/pointwise.cuh", "linear/linear_split.cuh"]
    assert machine["loaded"] == [headers] and machine["shim"] == 1


def test_a_tensor_without_dimensions_has_a_kernel_of_its_own(machine: dict[str, Any]) -> None:
    """It does not widen the epilogue's arithmetic."""
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    config = dict(zip(("product", "backward", "again"), LIBRARY))
    operands = {"x": x, "weight": weight, "bias": None}
    for t in (torch.ones(4).double(), torch.ones(()).double()):
        text = "v0 = mul(z, t0)"
        ops._kernel(ops.ANCHORS["linear"], operands, config, text, [t], [], torch.float32)
    assert len(machine["loaded"]) == 2


def test_a_kernel_of_another_gpu_is_left_for_the_library(machine: dict[str, Any]) -> None:
    machine["runs"] = False
    kernel("dense")
    assert machine["loaded"] == [["pointwise/pointwise.cuh"]]


def test_without_kernels_torch_computes_and_one_warning_says_why(machine: dict[str, Any]) -> None:
    machine["reason"] = "NVRTC is missing; pip install nvidia-cuda-nvrtc"
    with pytest.warns(UserWarning, match=r"as torch's own operations.*NVRTC is missing; pip inst"):
        assert kernel("library") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel("library") is None


def test_a_kernel_that_does_not_build(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*_: Any) -> None:
        raise BuildError("no space")

    monkeypatch.setattr(load, "prepare", prepare)
    with pytest.warns(UserWarning, match="no space"):
        assert kernel("library") is None


def test_a_gradient_of_a_tensor_of_the_epilogue_raises() -> None:
    y = run.EXPORTED(*arguments([torch.randn(6, requires_grad=True)]))
    with pytest.raises(FxFuserError, match="is for inference"):
        y.sum().backward()
