"""What must not fuse, does not: no fused site, unchanged results and gradients, and a reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ADD,
    CONV,
    MUL,
    Body,
    Program,
    cases,
    check,
    compiled,
    conv_program,
    fused,
    gate,
    leaf,
    linear_program,
    refused,
)
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fx_fuser

# ---- an inner value is needed ---------------------------------------------------------------


def _mul_parts(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z = m.lin(x)
    s = torch.sigmoid(z)
    r = z * s
    return z, s, r, r * 2.0


def _add_parts(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z = m.lin(x)
    s = torch.sigmoid(z)
    r = s * 2.0
    return z, s, r, r + z


def _conv_parts(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    c = m.conv(x)
    z = m.bn(c)
    return c, z, z * 2.0


LINEAR_PARTS = {"mul": _mul_parts, "add": _add_parts}


@pytest.mark.each_pair
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("used", [False, True], ids=["returned", "used"])
@pytest.mark.parametrize("inner", [0, 1, 2])
@pytest.mark.parametrize("parts", LINEAR_PARTS.values(), ids=LINEAR_PARTS.keys())
def test_inner_value_of_linear(parts: Body, inner: int, used: bool, train: bool) -> None:
    def body(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values = parts(m, x)
        return values[-1], torch.cos(values[inner]) if used else values[inner]

    reason = "is also used by cos" if used else "is also returned"
    refused(linear_program(body), leaf(4, 8), reason=reason, train=train)


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("used", [False, True], ids=["returned", "used"])
@pytest.mark.parametrize("inner", [0, 1])
def test_inner_value_of_conv(inner: int, used: bool, train: bool) -> None:
    def body(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values = _conv_parts(m, x)
        return values[-1], torch.cos(values[inner]) if used else values[inner]

    reason = "is also used by cos" if used else "is also returned"
    model = conv_program(body, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    refused(model, leaf(3, 4, 8, 9), reason=reason, train=train)


def test_product_without_its_bias_is_used() -> None:
    def body(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ m.w.t()
        z = product + m.b
        return z * torch.sigmoid(z) * 2.0, product

    check(linear_program(body), leaf(4, 8), fuses={})


def test_sigmoid_only_feeds_shape() -> None:
    """A view of an inner value keeps it alive too."""
    model = linear_program(lambda m, x: (lambda z: (z * z.sigmoid() * 2.0, z[0]))(m.lin(x)))
    refused(model, leaf(4, 8), reason="is also used by getitem")


# ---- tensors that no kernel takes -----------------------------------------------------------


@pytest.mark.parametrize("inner", ["aot_eager", "eager"])
def test_tensor_subclass(inner: str) -> None:
    model = linear_program(lambda m, x, y: torch.sigmoid(m.lin(x)) * 2.0 * y).eval()
    x, y = torch.randn(4, 8), TwoTensor(torch.randn(4, 6), torch.randn(4, 6))
    with torch.no_grad():
        expected, got = model(x, y), compiled(model, inner=inner)(x, y)
        torch.testing.assert_close(got.a, expected.a)
        torch.testing.assert_close(got.b, expected.b)
        assert fused() == {}
        reasons = [s.reason for s in fx_fuser.explain(model, x, y).refused]
    assert any("TwoTensor" in r for r in reasons), reasons


def exactly_refused(model: nn.Module, *inputs: Any, reason: str) -> None:
    """As `refused`, for tensors without a float64 twin: the results are eager's, bit for bit."""
    model.eval()
    with torch.no_grad():
        expected, got = model(*inputs), compiled(model)(*inputs)
        assert fused() == {}
        assert torch.equal(got, expected)
        reasons = [s.reason for s in fx_fuser.explain(model, *inputs).refused]
    assert any(reason in r for r in reasons), reasons


def test_complex_operand() -> None:
    model = linear_program(lambda m, x, y: torch.sigmoid(m.lin(x)) * 2.0 * y)
    y = torch.randn(6, dtype=torch.complex64)
    exactly_refused(model, torch.randn(4, 8), y, reason="complex64")


def test_operand_of_a_dtype_without_a_cuda_type() -> None:
    """Eager casts it; on CUDA the kernel has no type to read it by."""
    model = linear_program(lambda m, x, y: torch.sigmoid(m.lin(x)) * 2.0 * y)
    y = torch.ones(6, dtype=torch.uint16)
    exactly_refused(model, torch.randn(4, 8), y, reason="dtype torch.uint16")


def test_complex_linear() -> None:
    model = Program(lambda m, x, w: (lambda z: z * torch.sigmoid(z) * 2.0)(F.linear(x, w)))
    x, w = (torch.randn(*s, dtype=torch.complex64) for s in ((4, 8), (6, 8)))
    exactly_refused(model, x, w, reason="complex64")


def test_integer_linear() -> None:
    model = Program(lambda m, x, w: (lambda z: z * torch.sigmoid(z) * 2.0)(x @ w.t()))
    x, w = torch.randint(-3, 3, (4, 8)), torch.randint(-3, 3, (6, 8))
    exactly_refused(model, x, w, reason="dtype torch.int64")


def test_meta_device() -> None:
    """A device without kernels: nothing is fused, and nothing else is attempted."""
    model = linear_program(gate).to("meta")
    x = torch.randn(4, 8, device="meta")
    assert compiled(model)(x).shape == (4, 6)
    assert fused() == {}
    reasons = [s.reason for s in fx_fuser.explain(model, x).refused]
    assert any("device meta" in r for r in reasons), reasons


def test_operand_on_another_device() -> None:
    """A 0-d CPU number beside meta tensors is legal in eager."""
    model = linear_program(lambda m, x, y: torch.sigmoid(m.lin(x)) * 2.0 * y).to("meta")
    x, y = torch.randn(4, 8, device="meta"), torch.tensor(2.0)
    assert compiled(model)(x, y).shape == (4, 6)
    assert fused() == {}


# ---- shapes ---------------------------------------------------------------------------------

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {  # x, y, features
    "more dimensions": ((4, 8), (3, 4, 6), 6),
    "rows of one": ((1, 8), (4, 6), 6),
    "batch of one": ((1, 4, 8), (3, 4, 6), 6),
    "vector": ((8,), (4, 6), 6),
    "a gate that also grows rows": ((1, 8), (4, 5), 1),
    "a gate that also grows rank": ((4, 8), (3, 4, 5), 1),
}


@pytest.mark.each_once
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("pattern", [MUL, ADD])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_growth(shapes: Any, pattern: str, train: bool) -> None:
    x, y, features = shapes

    def body(m: Any, x: Tensor, y: Tensor) -> Tensor:
        s = torch.sigmoid(m.lin(x)) * 2.0
        return s * y if pattern == MUL else s + y

    model = Program(body, lin=nn.Linear(8, features))
    refused(model, leaf(*x), leaf(*y), reason="the result has shape", train=train)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("shape", [(3, 6, 6, 7), (2, 1, 6, 6, 7)], ids=["batch", "rank"])
def test_growth_of_conv(shape: tuple[int, ...], train: bool) -> None:
    model = conv_program(lambda m, x, y: m.bn(m.conv(x)) * y, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    refused(model, leaf(1, 4, 8, 9), leaf(*shape), reason="the result has shape", train=train)


def test_growth_of_the_last_dimension_of_conv() -> None:
    model = conv_program(lambda m, x, y: m.bn(m.conv(x)) * y, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    refused(model, leaf(3, 4, 8, 3), leaf(3, 6, 6, 5), reason="the result has shape")


def test_growth_unknown_when_compiling() -> None:
    """Two batch sizes that are equal in this call need not be in the next."""
    model = linear_program(lambda m, x, y: torch.sigmoid(m.lin(x)) * 2.0 * y)
    refused(model, leaf(1, 8), leaf(4, 6), reason="the result has shape", dynamic=True)


def test_convolution_without_batch_dimension() -> None:
    model = conv_program(
        lambda m, x: F.batch_norm(m.conv(x), None, None, training=True) * 2.0,
        nn.Conv2d(4, 6, 3),
        nn.Identity(),
    )
    refused(model, leaf(4, 8, 9), reason="rank 3, which is not 4")


def test_batchnorm_vector_of_another_rank() -> None:
    """Of which aten's own check counts the elements alone; its kernels for a CPU raise."""

    def norm(x: Tensor, weight: Tensor, gamma: Tensor) -> Tensor:
        return F.batch_norm(F.conv2d(x, weight), None, None, gamma, None, training=True) * 2.0

    tensors = leaf(2, 3, 8, 8), leaf(4, 3, 3, 3), leaf(1, 4, 1, 1)
    (site,) = fx_fuser.explain(norm, *tensors).refused
    assert "gamma has 4 dimensions, not one" in site.reason


def test_weight_vector() -> None:
    model = Program(lambda m, x, w: (lambda z: z * torch.sigmoid(z) * 2.0)(F.linear(x, w)))
    refused(model, leaf(4, 8), leaf(8), reason="the weight 1")


def test_batched_matrix_product() -> None:
    """w is 3-D: `w.mT` is no transposed matrix of a Linear."""
    model = Program(lambda m, x, w: (lambda z: z * torch.sigmoid(z) * 2.0)(x @ w.mT))
    check(model, leaf(3, 4, 8), leaf(3, 6, 8), fuses={})


def test_permuted_weight_is_no_transpose() -> None:
    model = Program(
        lambda m, x, w: (lambda z: z * torch.sigmoid(z) * 2.0)(x @ w.permute(0, 1)),
    )
    check(model, leaf(4, 8), leaf(8, 6), fuses={})


def test_plain_matrix_product() -> None:
    model = Program(lambda m, x, w: (lambda z: z * torch.sigmoid(z) * 2.0)(x @ w))
    check(model, leaf(4, 8), leaf(8, 6), fuses={})


# ---- not the pattern ------------------------------------------------------------------------

OTHER_LINEAR: dict[str, Body] = {
    "nothing": lambda m, x, y: m.lin(x),
    "relu": lambda m, x, y: torch.relu(m.lin(x)) * 2.0,
    "tanh": lambda m, x, y: (lambda z: z * torch.tanh(z) * 2.0)(m.lin(x)),
    "gelu": lambda m, x, y: F.gelu(m.lin(x)) * 2.0,
    "sigmoid alone": lambda m, x, y: torch.sigmoid(m.lin(x)),
    "one multiplication": lambda m, x, y: (lambda z: z * torch.sigmoid(z))(m.lin(x)),
    "silu alone": lambda m, x, y: F.silu(m.lin(x)),
    "addition alone": lambda m, x, y: torch.sigmoid(m.lin(x)) + y,
    "sigmoid of another tensor": lambda m, x, y: m.lin(x) * torch.sigmoid(y) * 2.0,
    "sigmoid of a scaled z": lambda m, x, y: (lambda z: z * torch.sigmoid(2.0 * z) * y)(m.lin(x)),
    "sigmoid of a sum": lambda m, x, y: torch.sigmoid(m.lin(x) + y) * 2.0 * y,
    "hardsigmoid": lambda m, x, y: (lambda z: z * F.hardsigmoid(z) * 2.0)(m.lin(x)),
    "logsigmoid": lambda m, x, y: (lambda z: z * F.logsigmoid(z) * 2.0)(m.lin(x)),
    "sigmoid of sigmoid": lambda m, x, y: torch.sigmoid(torch.sigmoid(m.lin(x))) * y * 2.0,
    "divided by a tensor": lambda m, x, y: torch.sigmoid(m.lin(x)) / (y * y + 1.0),
    "rounding division": lambda m, x, y: torch.div(
        torch.sigmoid(m.lin(x)) * 3.0, 2, rounding_mode="floor"
    ),
    "matmul of the product": lambda m, x, y: (torch.sigmoid(m.lin(x)) * 2.0) @ y.t(),
    "power": lambda m, x, y: torch.sigmoid(m.lin(x)) ** 2,
    "a view in between": lambda m, x, y: (lambda z: z * torch.sigmoid(z.view(24)).view(4, 6) * 2.0)(
        m.lin(x)
    ),
    "a reshape in between": lambda m, x, y: (lambda z: torch.sigmoid(z.t().reshape(-1)) * 2.0)(
        m.lin(x)
    ),
    "a sum over it": lambda m, x, y: torch.sigmoid(m.lin(x)).sum() * 2.0 + y,
    "dropout in between": lambda m, x, y: F.dropout(torch.sigmoid(m.lin(x)), 0.0) * 2.0,
    "addmm with beta": lambda m, x, y: (lambda z: z * torch.sigmoid(z) * 2.0)(
        torch.addmm(m.b, x, m.w.t(), beta=2)
    ),
    "addmm with alpha": lambda m, x, y: (lambda z: z + torch.sigmoid(z) * 2.0)(
        torch.addmm(m.b, x, m.w.t(), alpha=0.5)
    ),
    "LayerNorm in between": lambda m, x, y: torch.sigmoid(F.layer_norm(m.lin(x), (6,))) * 2.0 + y,
}


@pytest.mark.each_once
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("body", OTHER_LINEAR.values(), ids=OTHER_LINEAR.keys())
def test_other_epilogues_of_linear(body: Body, train: bool) -> None:
    check(linear_program(body), leaf(4, 8), leaf(4, 6), fuses={}, train=train)


NEAR_MISSES: dict[str, tuple[Body, str]] = {
    "silu alone": (lambda m, x: F.silu(m.lin(x)), ", only sigmoid(z) * a is there: "),
    "sigmoid alone": (lambda m, x: m.lin(x).sigmoid().sum(), "only sigmoid(z) is there: "),
    "sigmoid, add": (lambda m, x: m.lin(x).sigmoid() + 1.0, "only sigmoid(z) is there: "),
}


@cases(NEAR_MISSES)
def test_near_misses_have_a_reason(body: Body, reason: str) -> None:
    refused(linear_program(body), leaf(4, 8), reason=reason)


def _bn_then(tail: Callable[[Any, Tensor], Tensor]) -> tuple[Body, nn.Module, nn.Module, int]:
    return (lambda m, x: tail(m, m.bn(m.conv(x)))), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), 2


OTHER_CONV: dict[str, tuple[Body, nn.Module, nn.Module, int]] = {
    "no multiplication": _bn_then(lambda m, z: z),
    "relu": _bn_then(lambda m, z: torch.relu(z)),
    "addition": _bn_then(lambda m, z: z + 1.0),
    "relu, then mul": _bn_then(lambda m, z: torch.relu(z) * 2.0),
    "matmul": _bn_then(lambda m, z: z @ z.mT),
    "Conv1d": (lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), 1),
    "Conv3d": (lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv3d(4, 6, 2), nn.BatchNorm3d(6), 3),
    "ConvTranspose2d": (
        lambda m, x: m.bn(m.conv(x)) * 2.0, nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6), 2
    ),
    "InstanceNorm2d": (
        lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.InstanceNorm2d(6), 2
    ),
    "GroupNorm": (lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), 2),
    "relu before the norm": (
        lambda m, x: m.bn(torch.relu(m.conv(x))) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), 2
    ),
    "mul before the norm": (
        lambda m, x: m.bn(m.conv(x) * 2.0), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), 2
    ),
    "norm of a copied conv": (
        lambda m, x: m.bn(m.conv(x).clone()) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), 2
    ),
    "norm alone": (lambda m, x: m.bn(x) * 2.0, nn.Identity(), nn.BatchNorm2d(4), 2),
    "conv alone": (lambda m, x: m.conv(x) * 2.0, nn.Conv2d(4, 6, 3), nn.Identity(), 2),
    "Linear, BatchNorm1d": (
        lambda m, x: m.bn(m.conv(x).mT.contiguous()) * 2.0, nn.Linear(7, 6), nn.BatchNorm1d(6), 1
    ),
}  # fmt: skip


@pytest.mark.each_once
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", OTHER_CONV.values(), ids=OTHER_CONV.keys())
def test_other_convolutions(case: Any, train: bool) -> None:
    body, conv, norm, dimensions = case
    model = Program(body, conv=copy.deepcopy(conv), bn=copy.deepcopy(norm))
    check(model, leaf(3, 4, *[7] * dimensions), fuses={}, train=train)


def test_conv_near_miss_has_a_reason() -> None:
    body, conv, norm, _ = OTHER_CONV["relu, then mul"]
    reason = "; without it, this would be z * a"
    refused(Program(body, conv=conv, bn=norm), leaf(3, 4, 7, 7), reason=reason)


# ---- hazard B: numbers that change ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("pattern", [MUL, ADD, CONV])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_changing_scale_does_not_recompile(pattern: str, train: bool) -> None:
    """The first value is a constant, the second makes it a 0-d tensor, and that is all."""

    def body(m: Any, x: Tensor) -> Tensor:
        if pattern == CONV:
            return m.bn(m.conv(x)) * m.scale
        z = m.lin(x)
        return z * torch.sigmoid(z) * m.scale if pattern == MUL else z + m.scale * torch.sigmoid(z)

    model = Program(
        body, lin=nn.Linear(8, 6), conv=nn.Conv2d(4, 6, 3), bn=nn.BatchNorm2d(6), scale=0.5
    ).train(train)
    x = leaf(3, 4, 8, 9) if pattern == CONV else leaf(4, 8)
    compiled_model = compiled(model)
    for scale in (0.5, 1.25, -3.0, 7.5, 0.1, 1e-3):
        model.scale = scale
        with torch.set_grad_enabled(train):
            expected, got = copy.deepcopy(model)(x), compiled_model(x)
        torch.testing.assert_close(got, expected)
        if train:
            wanted = torch.autograd.grad(expected.sum(), x)
            torch.testing.assert_close(torch.autograd.grad(got.sum(), x), wanted)
    assert fused() == {pattern: 2}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
def test_scale_that_is_a_size() -> None:
    """A SymInt is no operand; with static shapes it is a number like any other."""
    model = linear_program(lambda m, x: (lambda z: z * torch.sigmoid(z) * x.shape[0])(m.lin(x)))
    check(model, leaf(4, 8), fuses={MUL: 1}, dynamic=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    check(model, leaf(4, 8), fuses={}, dynamic=True)


def test_scale_from_item() -> None:
    """`item()` of a tensor with a gradient: a number, without the gradient."""

    def body(m: Any, x: Tensor) -> Tensor:
        z = m.lin(x)
        return z * torch.sigmoid(z) * m.p.item()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        model = linear_program(body)
        eager = model(leaf(4, 8))
        assert eager.shape == (4, 6)
        check(model, leaf(4, 8), fuses={})


@pytest.mark.parametrize("scales", [(1e30, 1e30), (1e-30, 1e-30), (2**53, 2.0**79)])
def test_product_of_numbers_beyond_float32(scales: tuple[float, float]) -> None:
    """Each step is an ordinary float32 number, the product of the scales is none: one stays out."""
    size = 1e-25 if scales[0] > 1 else 1e25
    model = Program(
        lambda m, x: (lambda z: torch.sigmoid(z) * z * scales[0] * scales[1])(m.lin(x)),
        lin=nn.Linear(8, 6, bias=False),
    )
    with torch.no_grad():
        model.lin.weight.mul_(size)
    check(model, leaf(4, 8), fuses={MUL: 1}, grad=False, leaves=("mul",))
