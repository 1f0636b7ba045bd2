"""Gradients of nets in 16 bits, whose relus and poolings choose which elements have one: the signs
and maxima that decide may turn with any rounding, also with eager's.

Each run is compared with float64 that chooses as this run did. Where float64 itself would choose
otherwise, its values are as near to each other as eager's rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from folded_nets import relative, step
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Interpreter, Node
from torch.overrides import TorchFunctionMode

from fx_fuser.ops import run

_MOST = 1.5  # of eager's error
_MAY_END_IN_RELU = (torch.ops.aten.relu.default, "conv2d", "conv2d_folded")


# ---- what a compiled net chooses -----------------------------------------------------------------


class _Recorded(Interpreter):
    """Runs a graph and notes the choices: of a relu, or a site that ends in one, where it is not
    zero; of a pooling, indices."""

    def __init__(self, gm: GraphModule, chosen: list[Tensor]) -> None:
        super().__init__(gm)
        self.chosen = chosen

    def run_node(self, n: Node) -> Any:
        made = super().run_node(n)
        target = run.called(n)[0] if n.op == "call_function" else None
        if target is torch.ops.aten.max_pool2d_with_indices.default:
            self.chosen.append(made[1])
        elif target in _MAY_END_IN_RELU:
            y = made if isinstance(made, Tensor) else made[0]
            if y.min() == 0:  # a site without a relu has negative values
                self.chosen.append(y > 0)
        return made


def recording(chosen: list[Tensor]) -> Callable[..., Any]:
    """A backend like "aot_eager", which notes the choices of each call."""

    def forward(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            chosen.clear()
            return _Recorded(gm, chosen).run(*given)

        return make_boxed_func(call)

    def backward(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(gm.forward)

    return aot_autograd(fw_compiler=forward, bw_compiler=backward)


# ---- what eager mode chooses ---------------------------------------------------------------------


class _Choosing(TorchFunctionMode):
    """Notes what each relu and pooling reads, and chooses. told: has them choose so."""

    def __init__(self, told: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.told: Iterator[Tensor] | None = None if told is None else iter(told)
        self.read: list[Tensor] = []
        self.chosen: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_relu, is_pool = func is F.relu, "max_pool2d" in getattr(func, "__name__", "")
        if not (is_relu or is_pool):
            return func(*args, **kwargs)
        x, *rest = args
        self.read.append(x.detach().clone())
        if is_relu:
            self.chosen.append(self.read[-1] > 0)
            return func(*args, **kwargs) if self.told is None else x * next(self.told)
        named = {**kwargs, "return_indices": True}
        y, indices = F.max_pool2d_with_indices(x, *rest, **named)
        self.chosen.append(indices)
        return y if self.told is None else _at(x, next(self.told))


def _at(x: Tensor, indices: Tensor) -> Tensor:
    return x.flatten(2).gather(2, indices.flatten(2)).view(indices.shape)


# ---- the check -----------------------------------------------------------------------------------


def check_step(
    model: nn.Module, x: Tensor, compiled: Callable[..., Tensor], chosen: list[Tensor]
) -> None:
    """A training step under autocast to bf16. Result and gradients have eager's strides and dtypes,
    and errors like eager's, each run's beside float64 with its choices.

    chosen: where the compiled net's backend, `recording`, notes the choices.
    """

    def cast(call: Callable[..., Tensor], x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(x)

    def told(choices: Sequence[Tensor]) -> tuple[dict[str, Tensor], _Choosing]:
        mode, wide = _Choosing(choices), copy.deepcopy(model).double()
        return _results(wide, x.double(), wide, mode), mode

    ours = _results(model, x, lambda x: cast(compiled, x))
    of_eager = _Choosing()
    eager = _results(model, x, lambda x: cast(model, x), of_eager)
    exact, its = told(chosen)
    exact_of_eager, beside = told(of_eager.chosen)

    assert len(chosen) == len(of_eager.chosen) > 0
    errors = [
        float((found.double() - x).abs().max()) for found, x in zip(of_eager.read, beside.read)
    ]
    for x, own, made, error in zip(its.read, its.chosen, chosen, errors, strict=True):
        _check_choices(x, own, made, _MOST * error)

    assert ours.keys() == eager.keys()
    off, usual = (
        {name: relative(found, wanted[name]) for name, found in of.items()}
        for of, wanted in ((ours, exact), (eager, exact_of_eager))
    )
    assert _root_mean_square(off) <= _MOST * _root_mean_square(usual)
    for name, found in ours.items():
        assert (found.dtype, found.stride()) == (eager[name].dtype, eager[name].stride()), name
        assert off[name] <= 2 * max(usual[name], _root_mean_square(usual)), name


def _check_choices(x: Tensor, own: Tensor, made: Tensor, error: float) -> None:
    """x: what float64 reads; own: what it would choose. Where that is another choice, the two
    values are within the error of each."""
    assert own.shape == made.shape
    if made.dtype == torch.bool:  # a sign
        assert (x[own != made].abs() <= error).all()
    else:
        assert (_at(x, own) - _at(x, made) <= 2 * error).all()


def _results(
    model: nn.Module, x: Tensor, call: Callable[..., Tensor], mode: _Choosing | None = None
) -> dict[str, Tensor]:
    def run(x: Tensor) -> Tensor:
        if mode is None:
            return call(x)
        with mode:
            return call(x)

    y, gradients = step(model, x, run)
    return {"y": y, **gradients}


def _root_mean_square(errors: dict[str, float]) -> float:
    return (sum(e * e for e in errors.values()) / len(errors)) ** 0.5
