"""The ops of exported programs: their arguments, and the kernels that they load by themselves."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fx_fuser.errors import BuildError, FxFuserError
from fx_fuser.native import load
from fx_fuser.ops import exported as ops

TEXT = "v0 = sigmoid(z); v1 = mul(v0, s0)"
LIBRARY = ("library", "library", False)


def arguments(t: list[Tensor] | None = None) -> tuple[Any, ...]:
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    text = TEXT if t is None else "v0 = mul(z, t0); v1 = add(v0, s0)"
    return (x, weight, None, *LIBRARY, text, t, "-inf", "float32", "float32")


@pytest.mark.parametrize("t", [None, [torch.randn(6)]], ids=["no tensors", "a tensor"])
def test_opcheck(t: list[Tensor] | None) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(ops.op_of("linear"), arguments(t), test_utils=tests)


def test_arguments_are_of_kinds_that_aotinductor_passes_on() -> None:
    """torch 2.11 changes a dtype, and all torches an empty list and an infinite number."""
    composite = (*range(6), TEXT, [], [2.0, float("-inf"), 1e-45], torch.half, torch.float, True)
    made = (*range(6), TEXT, None, "2.0,-inf,1e-45", "float16", "float32")
    assert ops.arguments(composite, "linear") == made
    assert ops._numbers("2.0,-inf,1e-45") == (2.0, float("-inf"), 1e-45)
    for kind in ops.ANCHORS:
        types = {str(argument.type) for argument in ops.op_of(kind)._schema.arguments}
        assert types <= {
            *("Tensor", "Optional[Tensor]", "Optional[List[Tensor]]"),
            *("str", "bool", "int", "float", "List[int]"),
        }


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
    y = ops.op_of("linear")(*arguments([torch.randn(6, requires_grad=True)]))
    with pytest.raises(FxFuserError, match="is for inference"):
        y.sum().backward()
