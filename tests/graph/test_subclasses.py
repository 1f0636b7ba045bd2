"""Tensors of a class of the user's own, `class Image(torch.Tensor)`: refused, and as torch has it.

With the aliasing check of a first call, torch 2.13 refuses such classes itself: where aot_eager
raises, so does fx_fuser. Without that check both run, and can be compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from helpers import CONV, MUL, Program, cases, compiled, conv_program, fused, gate, linear_program
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fx_fuser


class Named(Tensor):
    """Its results are of this class too."""


class Unwrapped(Tensor):
    """Its results are plain tensors, as those of torchvision's `tv_tensors.Image`."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Shifted(Tensor):
    """Its products are off by one."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result + 1 if func in (torch.mul, Tensor.mul, Tensor.__mul__) else result


class Labelled(nn.Parameter):
    """A name and no more: it leaves `__torch_function__` alone."""


CLASSES = [Named, Unwrapped, Shifted]


def _conv(body: Callable[..., Any]) -> Program:
    return conv_program(body, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))


def _scaled(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(m.lin(x)) * 2.0 * y


def _normed(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.bn(m.conv(x)) * y


def _rows(*lead: int) -> list[Tensor]:
    return [torch.randn(*lead, 8), torch.randn(*lead, 6)]


def _images() -> list[Tensor]:
    return [torch.randn(2, 4, 8, 8), torch.randn(2, 6, 6, 6)]


# name → model, inputs, and which of them is of the class
CASES: dict[str, tuple[Callable[[], Program], Callable[[], list[Tensor]], int]] = {
    "x, 2-D": (lambda: linear_program(_scaled), lambda: _rows(4), 0),
    "x, 3-D": (lambda: linear_program(_scaled), lambda: _rows(2, 4), 0),
    "factor, 2-D": (lambda: linear_program(_scaled), lambda: _rows(4), 1),
    "factor, 3-D": (lambda: linear_program(_scaled), lambda: _rows(2, 4), 1),
    "x of a product": (
        lambda: linear_program(lambda m, x, y: _scaled(m, x @ m.w.t() @ m.w, y)),
        lambda: _rows(4),
        0,
    ),
    "a factor that is computed": (
        lambda: linear_program(lambda m, x, y: _scaled(m, x, torch.relu(y).contiguous())),
        lambda: _rows(4),
        1,
    ),
    "image": (lambda: _conv(_normed), _images, 0),
    "factor of an image": (lambda: _conv(_normed), _images, 1),
}
case = pytest.mark.parametrize("name", CASES)
kind = pytest.mark.parametrize("kind", CLASSES)
modes = pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])


def _seen(
    model: nn.Module,
    inputs: Sequence[Tensor],
    train: bool,
    call: Callable[[nn.Module], Callable[..., Any]],
) -> tuple[type, list[Tensor]]:
    """The class of the result, and all values: it, the gradients, the buffers."""
    torch._dynamo.reset()
    model = copy.deepcopy(model).train(train)
    given = [t.detach() if type(t) is Tensor else t for t in inputs]
    for tensor in inputs:
        tensor.grad = None
    with torch.set_grad_enabled(train):
        result = call(model)(*given)
        if train:
            result.sum().backward()
    grads = [p.grad for p in (*model.parameters(), *inputs) if p.grad is not None]
    values = [result.detach(), *grads, *model.buffers()]
    return type(result), [v.as_subclass(Tensor) for v in values]


def _stock(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="aot_eager")


def _same(ours: tuple[type, list[Tensor]], theirs: tuple[type, list[Tensor]]) -> None:
    assert ours[0] is theirs[0]
    assert len(ours[1]) == len(theirs[1])
    for mine, its in zip(ours[1], theirs[1]):
        assert torch.equal(mine, its)


@pytest.mark.slow
@pytest.mark.each_once
@modes
@kind
@case
def test_input(name: str, kind: Any, train: bool) -> None:
    make, draw, index = CASES[name]
    model, inputs = make(), draw()
    inputs[index] = inputs[index].as_subclass(kind).requires_grad_(train)
    with torch._functorch.config.patch(check_custom_op_aliasing=False):
        theirs = _seen(model, inputs, train, _stock)
        _same(_seen(model, inputs, train, compiled), theirs)
    assert fused() == {}


@pytest.mark.slow
@pytest.mark.each_once
@modes
@case
def test_first_call_is_as_aot_eagers(name: str, train: bool) -> None:
    """Also where torch itself raises."""
    make, draw, index = CASES[name]
    model, inputs = make(), draw()
    inputs[index] = inputs[index].as_subclass(Named)
    messages: list[str] = []
    for call in (_stock, compiled):
        try:
            found = _seen(model, inputs, train, call)
            messages.append(f"{found[0]}")
        except TypeError as error:
            messages.append(str(error).partition("\n")[0])
    assert messages[0] == messages[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "factor, 3-D",
        pytest.param("x, 3-D", marks=pytest.mark.slow),
        pytest.param("image", marks=pytest.mark.slow),
        pytest.param("factor of an image", marks=pytest.mark.slow),
    ],
)
def test_inductor_runs(name: str) -> None:
    """Its kernels are no ops, so the aliasing check sees none: stock torch.compile works."""
    make, draw, index = CASES[name]
    model, inputs = make(), draw()
    inputs[index] = inputs[index].as_subclass(Named)
    theirs = _seen(model, inputs, False, torch.compile)
    _same(_seen(model, inputs, False, lambda m: compiled(m, inner="inductor")), theirs)
    assert fused() == {}


@pytest.mark.each_once
@kind
@case
def test_eager(name: str, kind: Any) -> None:
    """In backward `__torch_function__` is on: our ops on a `Shifted` made wrong gradients."""
    make, draw, index = CASES[name]
    model, inputs = make(), draw()
    inputs[index] = inputs[index].as_subclass(kind).requires_grad_()
    theirs = _seen(model, inputs, True, lambda m: torch.compile(m, backend="eager"))
    _same(_seen(model, inputs, True, lambda m: compiled(m, inner="eager")), theirs)
    assert fused() == {}


@pytest.mark.slow
@pytest.mark.each_once
@modes
@pytest.mark.parametrize("path", ["lin.weight", "conv.weight", "bn.weight", "bn.running_mean"])
def test_parameter_and_buffer(path: str, train: bool) -> None:
    linear = path.startswith("lin")
    model, inputs = (linear_program(_scaled), _rows(4)) if linear else (_conv(_normed), _images())

    def changed(model: nn.Module) -> nn.Module:
        owner, _, name = path.rpartition(".")
        member = getattr(model.get_submodule(owner), name)
        value = member.detach().as_subclass(Named)
        is_parameter = isinstance(member, nn.Parameter)
        setattr(model.get_submodule(owner), name, nn.Parameter(value) if is_parameter else value)
        return model

    with torch._functorch.config.patch(check_custom_op_aliasing=False):
        theirs = _seen(model, inputs, train, lambda m: _stock(changed(m)))
        _same(_seen(model, inputs, train, lambda m: compiled(changed(m))), theirs)
    assert fused() == {}


def test_class_of_parameters_that_is_only_a_name() -> None:
    model = linear_program(gate)
    model.lin.weight = Labelled(model.lin.weight.detach())
    compiled(model)(torch.randn(4, 8))
    assert fused() == {MUL: 1}


@pytest.mark.slow
def test_other_sites_of_the_graph() -> None:
    """What no such tensor goes into is fused."""

    def body(m: Any, x: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        return gate(m, x), m.bare(image)

    model, x, image = linear_program(body), torch.randn(4, 8), torch.randn(2, 8).as_subclass(Named)
    expected = model(x, image)
    with torch._functorch.config.patch(check_custom_op_aliasing=False):
        got = compiled(model)(x, image)
    assert fused() == {MUL: 1}
    assert [type(o) for o in got] == [Tensor, Named]
    torch.testing.assert_close(got, expected)


@pytest.mark.slow
def test_body_of_a_checkpoint() -> None:
    model = linear_program(
        lambda m, x: checkpoint(lambda v: gate(m, v), torch.tanh(x), use_reentrant=False)
    )
    x = torch.randn(4, 8).as_subclass(Named)
    with torch._functorch.config.patch(check_custom_op_aliasing=False):
        _same(_seen(model, [x], True, compiled), _seen(model, [x], True, _stock))
    assert fused() == {}


REASONS = {
    "as it is": (_scaled, "`y` is of class {}, not a plain tensor"),
    "computed": (
        lambda m, x, y: _scaled(m, x, torch.tanh(y)),
        "is computed from another class: `y` is of class {}, not a plain tensor",
    ),
}


@kind
@cases(REASONS)
def test_explain(body: Callable[..., Any], reason: str, kind: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 6)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return body(self, x, y)

    x, y = _rows(4)
    y = y.as_subclass(kind)
    report = fx_fuser.explain(Model(), x, y)
    assert not report.fused
    assert [s.reason for s in report.refused] and reason.format(kind.__name__) in str(
        report.refused[0].reason
    )
    assert type(y) is kind


@pytest.mark.slow
def test_plain_again() -> None:
    """The edit that the reason names."""
    model, (x, y) = linear_program(_scaled), _rows(4)
    compiled(model)(x, y.as_subclass(Named).as_subclass(Tensor))
    assert fused() == {MUL: 1}
    torch._dynamo.reset()
    compiled(_conv(_normed))(*_images())
    assert fused() == {MUL: 1, CONV: 1}
