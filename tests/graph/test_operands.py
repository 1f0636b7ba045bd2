"""What may stand beside the anchor: operand kinds, shapes, dtypes, layouts and modes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from helpers import ADD, CONV, MUL, Program, check, compiled, conv_program, fused, leaf, run
from torch import Tensor, nn
from torch._dynamo.utils import counters

train_eval = pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])


def cases(table: dict[str, Any], fast: Collection[str] | None = None) -> Any:
    """Those of the table, slow but for the fast ones."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(
                case, id=name, marks=[pytest.mark.slow] if fast and name not in fast else []
            )
            for name, case in table.items()
        ],
    )


# ---- operand kinds --------------------------------------------------------------------------

LINEAR_OPERANDS: dict[str, Callable[[], Any]] = {  # beside z of [4, 6]
    "int": lambda: 3,
    "float": lambda: -0.75,
    "zero": lambda: 0.0,
    "True": lambda: True,
    "infinity": lambda: float("inf"),
    "0-d buffer": lambda: torch.tensor(0.75),
    "0-d Parameter": lambda: nn.Parameter(torch.tensor(1.5)),
    "0-d float64 buffer": lambda: torch.tensor(0.75, dtype=torch.float64),
    "0-d float64 Parameter": lambda: nn.Parameter(torch.tensor(1.5, dtype=torch.float64)),
    "0-d int buffer": lambda: torch.tensor(3),
    "[1]": lambda: leaf(1),
    "[N]": lambda: leaf(6),
    "[N] Parameter": lambda: nn.Parameter(torch.randn(6)),
    "[1, N]": lambda: leaf(1, 6),
    "[M, 1]": lambda: leaf(4, 1),
    "[1, 1]": lambda: leaf(1, 1),
    "[M, N]": lambda: leaf(4, 6),
    "[M, N] Parameter": lambda: nn.Parameter(torch.randn(4, 6)),
    "[M, N] without gradient": lambda: torch.randn(4, 6),
    "[M, N] expanded": lambda: torch.randn(4, 1).expand(4, 6),
    "[M, N] sliced": lambda: torch.randn(8, 12)[::2, 1::2],
    "int64": lambda: torch.randint(-3, 4, (4, 6)),
    "int8 [N]": lambda: torch.randint(-3, 4, (6,), dtype=torch.int8),
    "uint8": lambda: torch.randint(0, 4, (4, 6), dtype=torch.uint8),
    "bool": lambda: torch.rand(4, 6) > 0.5,
    "bool [M, 1]": lambda: torch.rand(4, 1) > 0.5,
    "float64 [N]": lambda: torch.randn(6, dtype=torch.float64, requires_grad=True),
    "bfloat16 [N]": lambda: torch.randn(6, dtype=torch.bfloat16).requires_grad_(),
}


def program(form: Callable[..., Tensor], operand: Any) -> tuple[Program, list[Any]]:
    """A Parameter or a buffer is the model's, a leaf is an input, a number a constant."""
    own = isinstance(operand, nn.Parameter) or (isinstance(operand, Tensor) and operand.ndim == 0)
    members = {"o": operand} if own or not isinstance(operand, Tensor) else {}
    body = (lambda m, x: form(m.lin(x), m.o)) if members else (lambda m, x, o: form(m.lin(x), o))
    return Program(body, lin=nn.Linear(8, 6), **members), [] if members else [operand]


FORMS: dict[str, tuple[str, Callable[[Tensor, Any], Tensor]]] = {
    "σ·z·o": (MUL, lambda z, o: z * torch.sigmoid(z) * o),
    "o·σ·2": (MUL, lambda z, o: o * torch.sigmoid(z) * 2.0),
    "z + o·σ": (ADD, lambda z, o: z + o * torch.sigmoid(z)),
    "2·σ + o": (ADD, lambda z, o: 2.0 * torch.sigmoid(z) + o),
}


@pytest.mark.one_in(2)
# Evaluation of the first form by default: training computes the same values.
@pytest.mark.each_once
@pytest.mark.parametrize(
    "form, train",
    [
        pytest.param(form, train, id=f"{name}-{'train' if train else 'eval'}", marks=marks)
        for i, (name, form) in enumerate(FORMS.items())
        for train, marks in ((True, []), (False, [pytest.mark.slow] if i else []))
    ],
)
@cases(
    LINEAR_OPERANDS,
    # Of every shape, dtype and owner one, with a gradient if it can have one.
    fast=(
        *("float", "infinity", "0-d Parameter", "0-d float64 buffer", "0-d int buffer", "[1]"),
        *("[N] Parameter", "[M, 1]", "[M, N]", "[M, N] expanded", "uint8", "bool [M, 1]"),
        *("float64 [N]", "bfloat16 [N]"),
    ),
)
def test_linear(case: Callable[[], Any], form: Any, train: bool) -> None:
    pattern, tail = form
    operand = case()
    infinite = isinstance(operand, float) and operand == float("inf")
    model, extra = program(tail, operand)
    if infinite:  # no error bound for an infinite result: eager's very infinities and NaNs
        x = torch.randn(4, 8)
        torch.testing.assert_close(compiled(model)(x), model(x), equal_nan=True)
        assert fused() == {pattern: 1}
        return
    check(model, leaf(4, 8), *extra, fuses={pattern: 1}, train=train)


CONV_OPERANDS: dict[str, Callable[[], Any]] = {  # beside z of [3, 6, 6, 7]
    "int": lambda: 3,
    "float": lambda: -0.75,
    "0-d buffer": lambda: torch.tensor(0.75),
    "0-d Parameter": lambda: nn.Parameter(torch.tensor(1.5)),
    "[C, 1, 1]": lambda: leaf(6, 1, 1),
    "[C, 1, 1] Parameter": lambda: nn.Parameter(torch.randn(6, 1, 1)),
    "[1, C, 1, 1]": lambda: leaf(1, 6, 1, 1),
    "[N, C, 1, 1]": lambda: leaf(3, 6, 1, 1),
    "[N, 1, 1, 1]": lambda: leaf(3, 1, 1, 1),
    "[H, W]": lambda: leaf(6, 7),
    "[W]": lambda: leaf(7),
    "full": lambda: leaf(3, 6, 6, 7),
    "full bool": lambda: torch.rand(3, 6, 6, 7) > 0.5,
    "int64 [C, 1, 1]": lambda: torch.randint(-3, 4, (6, 1, 1)),
}


@pytest.mark.one_in(2)
@pytest.mark.each_once
@train_eval
@cases(
    CONV_OPERANDS,
    fast=(
        *("float", "0-d Parameter", "[C, 1, 1]", "[N, C, 1, 1]", "[N, 1, 1, 1]", "[H, W]"),
        *("full bool", "int64 [C, 1, 1]"),
    ),
)
def test_conv(case: Callable[[], Any], train: bool) -> None:
    operand = case()
    own = isinstance(operand, nn.Parameter) or not isinstance(operand, Tensor) or not operand.ndim
    members = {"o": operand} if own else {}
    model = Program(
        (lambda m, x: m.bn(m.conv(x)) * m.o) if own else (lambda m, x, o: o * m.bn(m.conv(x))),
        conv=nn.Conv2d(4, 6, 3),
        bn=nn.BatchNorm2d(6),
        **members,
    )
    check(model, leaf(3, 4, 8, 9), *([] if own else [operand]), fuses={CONV: 1}, train=train)


@train_eval
def test_two_tensors(train: bool) -> None:
    for pattern, tail in (
        (MUL, lambda m, x, a, b: a * torch.sigmoid(m.lin(x)) * b),
        (ADD, lambda m, x, a, b: a * torch.sigmoid(m.lin(x)) + b),
    ):
        torch._dynamo.reset()
        counters.clear()
        model = Program(tail, lin=nn.Linear(8, 6))
        check(model, leaf(4, 8), leaf(4, 1), leaf(6), fuses={pattern: 1}, train=train)


def test_one_tensor_twice() -> None:
    model = Program(lambda m, x, a: a * torch.sigmoid(m.lin(x)) * a, lin=nn.Linear(8, 6))
    check(model, leaf(4, 8), leaf(4, 6), fuses={MUL: 1})


def test_x_is_the_multiplier_too() -> None:
    model = Program(lambda m, x: x * torch.sigmoid(m.lin(x)) * 2.0, lin=nn.Linear(8, 8))
    check(model, leaf(4, 8), fuses={MUL: 1})


def test_operand_computed_before_and_in_between() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Tensor:
        before = y.cos()
        z = m.lin(x)
        return before * torch.sigmoid(z) + y.sin()

    check(Program(body, lin=nn.Linear(8, 6)), leaf(4, 8), leaf(4, 6), fuses={ADD: 1})


# ---- shapes of x ----------------------------------------------------------------------------


def _body(pattern: str) -> Callable[..., Tensor]:
    if pattern == MUL:
        return lambda m, x: (lambda z: z * torch.sigmoid(z) * 2.0)(m.lin(x))
    return lambda m, x: (lambda z: z + torch.sigmoid(z) * 2.0)(m.lin(x))


@pytest.mark.each_once
@train_eval
@pytest.mark.parametrize("pattern", [MUL, ADD])
@pytest.mark.parametrize("shape", [(8,), (4, 8), (1, 8), (0, 8), (2, 4, 8), (2, 3, 1, 8)], ids=str)
def test_rank_of_x(shape: tuple[int, ...], pattern: str, train: bool) -> None:
    model = Program(_body(pattern), lin=nn.Linear(8, 6))
    check(model, leaf(*shape), fuses={pattern: 1}, train=train)


@pytest.mark.each_pair
@train_eval
@pytest.mark.parametrize("pattern", [MUL, ADD])
@pytest.mark.parametrize("lead", [(4,), (2, 3)], ids=["2-D", "3-D"])
def test_gate_of_one_column(lead: tuple[int, ...], pattern: str, train: bool) -> None:
    """N = 1: the result broadcasts along the last dimension."""

    def body(m: Any, x: Tensor, y: Tensor) -> Tensor:
        s = torch.sigmoid(m.lin(x)) * 2.0
        return s * y if pattern == MUL else s + y

    model = Program(body, lin=nn.Linear(8, 1))
    check(model, leaf(*lead, 8), leaf(*lead, 5), fuses={pattern: 1}, train=train)


@train_eval
@pytest.mark.parametrize("shape", [(1, 4, 3, 3), (2, 4, 3, 9)], ids=["one pixel", "one row"])
def test_small_images(shape: tuple[int, ...], train: bool) -> None:
    if train and shape[0] == 1:
        pytest.skip("eager refuses a single value per channel")
    model = conv_program(lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    check(model, leaf(*shape), fuses={CONV: 1}, train=train)


@train_eval
def test_empty_batch_of_images(train: bool) -> None:
    """Left alone: PyTorch leaves the running statistics as they are, and so do we."""
    model = conv_program(lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    check(model, leaf(0, 4, 8, 9), fuses={}, train=train)


@train_eval
def test_large_mean_does_not_cancel(train: bool) -> None:
    """Batch statistics of values around 1e3 with deviation 1: no sum of squares."""
    model = conv_program(lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    with torch.no_grad():
        model.conv.bias.add_(1e3)
    check(model, leaf(3, 4, 8, 9), fuses={CONV: 1}, train=train)


# ---- layouts --------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(8, 4).t(),
    "sliced": lambda: torch.randn(8, 16)[::2, ::2],
    "offset": lambda: torch.randn(4 * 8 + 1)[1:].view(4, 8),
    "expanded": lambda: torch.randn(1, 8).expand(4, 8),
}


@pytest.mark.each_once
@train_eval
@pytest.mark.parametrize("pattern", [MUL, ADD])
@cases(LAYOUTS)
def test_layout_of_x(case: Callable[[], Tensor], pattern: str, train: bool) -> None:
    check(Program(_body(pattern), lin=nn.Linear(8, 6)), case(), fuses={pattern: 1}, train=train)


@pytest.mark.slow
@pytest.mark.each_once
@train_eval
@pytest.mark.parametrize("weights", [False, True], ids=["x only", "weights too"])
def test_channels_last(weights: bool, train: bool) -> None:
    model = conv_program(lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    if weights:
        model.conv.to(memory_format=torch.channels_last)
    x = torch.randn(3, 4, 8, 9).to(memory_format=torch.channels_last).requires_grad_()
    check(model, x, fuses={CONV: 1}, train=train)
    torch._dynamo.reset()
    _, expected = run(model, [x], train)
    _, got = run(model, [x], train, compiled)
    assert got[0].stride() == expected[0].stride()


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("pattern", [MUL, ADD, CONV])
def test_strides_of_the_result(pattern: str) -> None:
    if pattern == CONV:
        model = conv_program(
            lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)
        )
        x = leaf(3, 4, 8, 9)
    else:
        model, x = Program(_body(pattern), lin=nn.Linear(8, 6)), torch.randn(2, 8, 4).mT
    _, expected = run(model, [x], True)
    _, got = run(model, [x], True, compiled)
    assert got[0].stride() == expected[0].stride() and got[0].is_contiguous()


# ---- dtypes ---------------------------------------------------------------------------------

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


@pytest.mark.each_once
@train_eval
@pytest.mark.parametrize("pattern", [MUL, ADD])
@dtypes
def test_dtype_of_linear(dtype: torch.dtype, pattern: str, train: bool) -> None:
    model = Program(_body(pattern), lin=nn.Linear(8, 6)).to(dtype)
    check(model, leaf(4, 8, dtype=dtype), fuses={pattern: 1}, train=train)


@pytest.mark.slow
@pytest.mark.each_once
@train_eval
@dtypes
def test_dtype_of_conv(dtype: torch.dtype, train: bool) -> None:
    model = conv_program(
        lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)
    ).to(dtype)
    check(model, leaf(3, 4, 8, 9, dtype=dtype), fuses={CONV: 1}, train=train)


@pytest.mark.each_pair
@train_eval
@pytest.mark.parametrize("other", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("form", ["mul", "add"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_mixed_dtypes(dtype: torch.dtype, other: torch.dtype, form: str, train: bool) -> None:
    """torch's promotion: bf16 z times fp32 [N] is fp32, but times a 0-d fp32 tensor it is bf16."""

    def body(m: Any, x: Tensor, o: Tensor) -> Tensor:
        s = torch.sigmoid(m.lin(x)) * 2.0
        return s * o if form == "mul" else s + o

    model = Program(body, lin=nn.Linear(8, 6).to(dtype))
    x, o = leaf(4, 8, dtype=dtype), leaf(6, dtype=other)
    check(model, x, o, fuses={MUL if form == "mul" else ADD: 1}, train=train)
    assert model(x, o).dtype == torch.promote_types(dtype, other)


@train_eval
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_0d_tensor_does_not_promote(dtype: torch.dtype, train: bool) -> None:
    model = Program(
        lambda m, x: (lambda z: z * torch.sigmoid(z) * m.p)(m.lin(x)),
        lin=nn.Linear(8, 6).to(dtype),
        p=nn.Parameter(torch.tensor(1.7, dtype=torch.float64)),
    )
    x = leaf(4, 8, dtype=dtype)
    check(model, x, fuses={MUL: 1}, train=train)
    assert model(x).dtype == dtype


# ---- autocast -------------------------------------------------------------------------------


def _around(dtype: torch.dtype) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with torch.autocast("cpu", dtype):
                return f(*args)

        return call

    return wrap


@pytest.mark.each_pair
@train_eval
@pytest.mark.parametrize("pattern", [MUL, ADD])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_around_linear(dtype: torch.dtype, pattern: str, train: bool) -> None:
    model = Program(_body(pattern), lin=nn.Linear(8, 6))
    check(model, leaf(4, 8), fuses={pattern: 1}, train=train, wrap=_around(dtype))


@train_eval
def test_autocast_around_conv(train: bool) -> None:
    model = conv_program(lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    check(model, leaf(3, 4, 8, 9), fuses={CONV: 1}, train=train, wrap=_around(torch.bfloat16))


@train_eval
@pytest.mark.parametrize("pattern", [MUL, ADD, CONV])
def test_autocast_inside(pattern: str, train: bool) -> None:
    if pattern == CONV:
        inside: Callable[..., Tensor] = lambda m, x: m.bn(m.conv(x)) * 2.0  # noqa: E731
        x = leaf(3, 4, 8, 9)
    else:
        inside, x = _body(pattern), leaf(4, 8)

    def body(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = inside(m, x)
        return y.float() + 1.0

    model = Program(body, lin=nn.Linear(8, 6), conv=nn.Conv2d(4, 6, 3), bn=nn.BatchNorm2d(6))
    check(model, x, fuses={pattern: 1}, train=train, leaves=("add",))


def test_autocast_linear_spelled_as_product() -> None:
    """Under autocast `x @ w.t() + b` adds in float32: b is an addend there and no bias."""
    model = Program(
        lambda m, x: (lambda z: z * torch.sigmoid(z) * 2.0)(x @ m.w.t() + m.b),
        w=nn.Parameter(torch.randn(6, 8)),
        b=nn.Parameter(torch.randn(6)),
    )
    check(model, leaf(4, 8), fuses={}, wrap=_around(torch.bfloat16))
