"""Grown tails: where no named pattern fits, the largest pointwise region after an anchor is taken.

What is taken is given as the epilogue's text, "" for z alone; `helpers.check` proves the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ADD,
    GROWTH,
    MUL,
    Body,
    Program,
    check,
    compiled,
    conv_program,
    epilogues,
    fused,
    leaf,
    linear_program,
    recorded,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

train_eval = pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
GATE = "v0 = sigmoid(z); v1 = mul(v0, z)"
GELU = "v0 = gelu(z, approximate=none)"


def _grows(
    model: nn.Module, *inputs: Any, takes: list[str], kind: str = "linear", **settings: Any
) -> None:
    counts = {f"auto_{kind}": len(takes)} if takes else {}
    graphs = check(model, *inputs, fuses=counts, **{**GROWTH, **settings})
    assert epilogues(graphs) == takes


# ---- what a tail is --------------------------------------------------------------------------


def _diamond(m: Any, z: Tensor, y: Tensor) -> Tensor:
    a, b = torch.exp(-z.abs()), torch.tanh(z)
    return a * b + z


def _two_diamonds(m: Any, z: Tensor, y: Tensor) -> Tensor:
    u = torch.sigmoid(z) * torch.tanh(z)
    return torch.relu(u) - torch.exp(u) * y


def _bottleneck(m: Any, z: Tensor, y: Tensor) -> Any:
    """All of u meets once more, and what is made of it does not."""
    u = torch.sigmoid(z) * z
    return torch.tanh(u), torch.exp(u)


def _root_read_twice(m: Any, z: Tensor, y: Tensor) -> Any:
    u = torch.tanh(z) * y
    return u.sum(), u.mean(0)


def _in_place(m: Any, z: Tensor, y: Tensor) -> Tensor:
    z = z * 0.5
    z += y
    z.mul_(2.0).tanh_()
    return z


def _branch_of_no_tensor(m: Any, z: Tensor, y: Tensor) -> Tensor:
    return torch.where(y > 0, z, z * 0.1)


TAILS: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], str]] = {
    "nothing": (lambda m, z, y: z, ""),
    "one operation": (lambda m, z, y: F.gelu(z), GELU),
    "one operand": (lambda m, z, y: z + y, "v0 = add(z, t0)"),
    "a parameter": (lambda m, z, y: z * m.p, "v0 = mul(z, t0)"),
    "many": (
        lambda m, z, y: F.silu(torch.clamp(z * 2.0 + y, -3, 3)) / 1.5,
        "v0 = mul(z, s0); v1 = add(v0, t0); v2 = clamp(v1, s1, s2); v3 = silu(v2); "
        "v4 = div(v3, s3)",
    ),
    "z twice": (lambda m, z, y: z * torch.sigmoid(z), GATE),
    "an operand twice": (
        lambda m, z, y: (z + y) * torch.tanh(y),  # which is no part of it
        "v0 = add(z, t0); v1 = mul(v0, t1)",
    ),
    "a diamond": (
        _diamond,
        "v0 = abs(z); v1 = neg(v0); v2 = exp(v1); v3 = tanh(z); v4 = mul(v3, v2); v5 = add(v4, z)",
    ),
    "two diamonds": (
        _two_diamonds,
        "v0 = sigmoid(z); v1 = tanh(z); v2 = mul(v1, v0); v3 = relu(v2); v4 = exp(v2); "
        "v5 = mul(v4, t0); v6 = sub(v3, v5)",
    ),
    "up to a fork": (_bottleneck, GATE),
    "up to two reductions": (_root_read_twice, "v0 = tanh(z); v1 = mul(v0, t0)"),
    "in place": (
        _in_place,
        "v0 = mul(z, s0); v1 = add(v0, t0); v2 = mul(v1, s1); v3 = tanh(v2)",
    ),
    "where": (_branch_of_no_tensor, "v0 = mul(z, s0); v1 = where(t0, z, v0)"),
    "casts": (
        lambda m, z, y: (z.double() * 2.0).float() + y,
        "v0 = cast(z, dtype=float64); v1 = mul(v0, s0); v2 = cast(v1, dtype=float32); "
        "v3 = add(v2, t0)",
    ),
    "a reshape that copies": (
        lambda m, z, y: torch.exp(torch.tanh(z).t().reshape(-1)),
        "v0 = tanh(z)",
    ),
    "an item": (lambda m, z, y: torch.tanh(z)[0] * 2.0, "v0 = tanh(z)"),
    "a reduction": (lambda m, z, y: torch.tanh(z).sum(-1) * 2.0, "v0 = tanh(z)"),
    "a softmax": (lambda m, z, y: (z * 0.125).softmax(-1), "v0 = mul(z, s0)"),
    "no epilogue's operation": (lambda m, z, y: torch.atan(torch.tanh(z)) + y, "v0 = tanh(z)"),
    "a power of two tensors": (lambda m, z, y: torch.exp(z) ** y, "v0 = exp(z)"),
    "a larger result": (lambda m, z, y: torch.tanh(z) + y[None], "v0 = tanh(z)"),
    "another layout": (lambda m, z, y: y.t().contiguous().t() * torch.tanh(z), "v0 = tanh(z)"),
    "z and its tail returned": (lambda m, z, y: (z, torch.tanh(z)), ""),
    "an inner value returned": (
        lambda m, z, y: (lambda u: (u, u * y))(torch.tanh(z)), "v0 = tanh(z)"
    ),
    "an inner value viewed": (
        lambda m, z, y: (lambda u: u * y + u.mean())(torch.tanh(z)), "v0 = tanh(z)"
    ),
    "two tails": (lambda m, z, y: (torch.tanh(z), torch.exp(z)), ""),
}  # fmt: skip


@pytest.mark.each_once
@train_eval
@pytest.mark.parametrize("name", TAILS)
def test_tails(name: str, train: bool) -> None:
    tail, text = TAILS[name]
    model = linear_program(lambda m, x, y: tail(m, m.lin(x), y))
    _grows(model, leaf(4, 8), leaf(4, 6), takes=[text], train=train)


def test_a_gate_may_be_larger() -> None:
    model = Program(lambda m, x, y: torch.sigmoid(m.lin(x)) * y, lin=nn.Linear(8, 1))
    _grows(model, leaf(4, 8), leaf(4, 6), takes=["v0 = sigmoid(z); v1 = mul(v0, t0)"])


ANCHORS: dict[str, tuple[Body, str]] = {
    "no bias": (lambda m, x: m.bare(x), "linear"),
    "a transposed weight": (lambda m, x: x @ m.w.t() + m.b, "linear"),
    "addmm": (lambda m, x: torch.addmm(m.b, x, m.w.t()), "linear"),
    "a product": (lambda m, x: x @ m.w.t().contiguous(), "matmul"),
    "a product and a bias": (lambda m, x: x @ m.w.t().contiguous() + m.b, "matmul"),
}


@pytest.mark.each_once
@train_eval
@pytest.mark.parametrize("name", ANCHORS)
def test_anchors(name: str, train: bool) -> None:
    anchor, kind = ANCHORS[name]
    model = linear_program(lambda m, x: F.gelu(anchor(m, x)))
    left = ("t", "transpose")
    _grows(model, leaf(4, 8), takes=[GELU], kind=kind, train=train, leaves=left)


def _conv(body: Body) -> Program:
    return conv_program(body, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))


CONVS: dict[str, tuple[Body, str, str]] = {
    "conv": (lambda m, x, y: m.conv(x), "conv2d", ""),
    "conv, relu": (lambda m, x, y: F.relu(m.conv(x)), "conv2d", "v0 = relu(z)"),
    "conv, residual": (
        lambda m, x, y: F.relu(m.conv(x) * m.p + y), "conv2d",
        "v0 = mul(z, t0); v1 = add(v0, t1); v2 = relu(v1)",
    ),
    "conv, pool": (
        lambda m, x, y: F.max_pool2d(torch.tanh(m.conv(x)), 2), "conv2d", "v0 = tanh(z)"
    ),
    "norm": (lambda m, x, y: m.bn(m.conv(x)), "conv2d_batchnorm", ""),
    "norm, relu": (lambda m, x, y: F.relu(m.bn(m.conv(x))), "conv2d_batchnorm", "v0 = relu(z)"),
    "norm, residual": (
        lambda m, x, y: F.silu(m.bn(m.conv(x)) + y), "conv2d_batchnorm",
        "v0 = add(z, t0); v1 = silu(v0)",
    ),
    "norm after an activation": (
        lambda m, x, y: m.bn(F.relu(m.conv(x))), "conv2d", "v0 = relu(z)",
    ),
}  # fmt: skip


@pytest.mark.each_once
@train_eval
@pytest.mark.parametrize("name", CONVS)
def test_convolutions(name: str, train: bool) -> None:
    body, kind, text = CONVS[name]
    left = ("batch_norm",) if name == "norm after an activation" else ()
    inputs = leaf(3, 4, 8, 9), leaf(3, 6, 6, 7)
    _grows(_conv(body), *inputs, takes=[text], kind=kind, train=train, leaves=left)


# ---- several anchors -------------------------------------------------------------------------


def _swiglu(m: Any, x: Tensor) -> Tensor:
    return m.down(F.silu(m.gate(x)) * m.up(x))


def _gate_last(m: Any, x: Tensor) -> Tensor:
    return m.down(m.up(x) * F.silu(m.gate(x)))


def _residual(m: Any, x: Tensor) -> Tensor:
    for lin in (m.first, m.second, m.third):
        x = x + F.gelu(lin(x))
    return x


def _running_sum(m: Any, x: Tensor) -> Tensor:
    return m.first(x) + m.second(x) + m.third(x)


def _tails_far_away(m: Any, x: Tensor) -> Tensor:
    a, b = m.first(x), m.second(x)
    return torch.tanh(b) - torch.exp(a)


TIMES, PLUS = "v0 = mul(z, t0)", "v0 = add(z, t0)"
SEVERAL: dict[str, tuple[Body, list[str]]] = {
    # The anchor that comes first takes where they meet; the other one what comes before.
    "product": (lambda m, x: m.first(x) * F.silu(m.second(x)), ["v0 = silu(z)", TIMES]),
    "product, the other way": (
        lambda m, x: F.silu(m.first(x)) * m.second(x), ["", "v0 = silu(z); v1 = mul(v0, t0)"]
    ),
    "sum": (lambda m, x: m.first(x) + m.second(x), ["", PLUS]),
    "sum, the other way": (lambda m, x: m.second(x) + m.first(x), ["", PLUS]),
    "three": (_running_sum, ["", "", "v0 = add(z, t0); v1 = add(v0, t1)"]),
    "SwiGLU": (_swiglu, ["", "v0 = silu(z); v1 = mul(v0, t0)", ""]),
    "SwiGLU, the other way": (_gate_last, ["v0 = silu(z)", TIMES, ""]),
    "residual": (_residual, [f"{GELU}; v1 = add(v0, t0)"] * 3),
    "far away": (_tails_far_away, ["v0 = tanh(z)", "v0 = exp(z); v1 = sub(t0, v0)"]),
    "one after the other": (
        lambda m, x: m.third(torch.tanh(m.second(torch.tanh(m.first(x))))),
        ["v0 = tanh(z)", "v0 = tanh(z)", ""],
    ),
}  # fmt: skip


@pytest.mark.each_once
@train_eval
@pytest.mark.parametrize("name", SEVERAL)
def test_several_anchors(name: str, train: bool) -> None:
    body, texts = SEVERAL[name]
    names = ("first", "second", "third", "gate", "up", "down")
    model = Program(body, **{n: nn.Linear(8, 8) for n in names})
    _grows(model, leaf(4, 8), takes=texts, train=train)


@pytest.mark.slow
@train_eval
def test_named_patterns_go_first(train: bool) -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        z = m.lin(x)
        return z * torch.sigmoid(z) * 2.0 + torch.tanh(m.bare(x)), y + 3.0 * torch.sigmoid(
            F.linear(x, m.w)
        )

    settings = {"train": train, "auto": None, "leaves": ("add", "mul", "sigmoid")}
    counts = {MUL: 1, ADD: 1, "auto_linear": 1}
    graphs = check(linear_program(body), leaf(4, 8), leaf(4, 6), fuses=counts, **settings)
    assert "v0 = tanh(z); v1 = add(v0, t0)" in epilogues(graphs)


# ---- what a kernel takes ---------------------------------------------------------------------


def _many_tensors(m: Any, x: Tensor, *t: Tensor) -> Tensor:
    z = m.lin(x)
    for y in t:
        z = torch.tanh(z + y)
    return z


def _many_numbers(m: Any, x: Tensor) -> Tensor:
    z = m.lin(x)
    for i in range(12):
        z = torch.tanh(z * (1 + i / 10))
    return z


def _many_operations(m: Any, x: Tensor) -> Tensor:
    z = m.lin(x)
    for _ in range(70):
        z = torch.sigmoid(z)
    return z


def _steps(text: str) -> int:
    return text.count("=")


@pytest.mark.parametrize(
    "body, count, steps",
    [
        (_many_tensors, 20, 2 * 15),  # z and 15 others
        (_many_numbers, 0, 2 * 8),
        (_many_operations, 0, 64),
    ],
    ids=["tensors", "numbers", "operations"],
)
def test_as_much_as_a_kernel_takes(body: Body, count: int, steps: int) -> None:
    operands = [torch.randn(4, 6) for _ in range(count)]
    graphs = check(
        linear_program(lambda m, *given: body(m, *given)),
        torch.randn(4, 8),
        *operands,
        fuses={"auto_linear": 1},
        train=False,
        **GROWTH,
    )
    (text,) = epilogues(graphs)
    assert steps - 2 <= _steps(text) <= steps


# ---- modes -----------------------------------------------------------------------------------


def _no_grad_around_the_end(m: Any, x: Tensor) -> Any:
    z = torch.tanh(m.lin(x))
    with torch.no_grad():
        seen = z * 2.0
    return z, seen


def _no_grad_within(m: Any, x: Tensor) -> Any:
    z = torch.tanh(m.lin(x))
    with torch.no_grad():
        z = torch.sigmoid(z)
    return z * 2.0 + m.bare(x)


def _no_grad_all(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        z = torch.tanh(m.lin(x))
    return z + m.bare(x)


@pytest.mark.slow
def test_grad_mode_ends_the_growth() -> None:
    x = leaf(4, 8)
    _grows(linear_program(_no_grad_around_the_end), x, takes=["v0 = tanh(z)"])
    torch._dynamo.reset()
    counters.clear()
    _grows(linear_program(_no_grad_within), x, takes=["v0 = tanh(z)", PLUS])
    torch._dynamo.reset()
    counters.clear()
    _grows(linear_program(_no_grad_all), x, takes=["v0 = tanh(z)", PLUS])


def _in_autocast(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        # In float64 there is no autocast to compare with.
        with torch.autocast("cpu", torch.bfloat16, enabled=args[0].dtype == torch.float32):
            return f(*args)

    return run


@train_eval
def test_autocast_around(train: bool) -> None:
    model = linear_program(lambda m, x: F.gelu(m.lin(x)) * 2.0)
    text = f"{GELU}; v1 = mul(v0, s0)"
    _grows(model, leaf(4, 8), takes=[text], train=train, wrap=_in_autocast)


@pytest.mark.slow
def test_autocast_that_ends_ends_the_growth() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            z = torch.tanh(m.lin(x))
        return torch.exp(z) * 2.0

    model, x = linear_program(body), leaf(4, 8)
    with recorded() as graphs:
        value = compiled(model, **GROWTH)(x)
    assert epilogues(graphs) == ["v0 = tanh(z)"]
    torch.testing.assert_close(value, model(x), rtol=2e-2, atol=2e-2)


@pytest.mark.each_once
@train_eval
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype, train: bool) -> None:
    model = linear_program(lambda m, x, y: F.gelu(m.lin(x)) * y).to(dtype)
    inputs = leaf(4, 8, dtype=dtype), leaf(4, 6, dtype=dtype)
    _grows(model, *inputs, takes=[f"{GELU}; v1 = mul(v0, t0)"], train=train)


@pytest.mark.slow
@train_eval
def test_a_checkpointed_body_is_grown(train: bool) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        inner = checkpoint(lambda v: F.gelu(m.lin(v)) * 2.0, x, use_reentrant=False)
        return torch.tanh(m.bare(x)) + inner

    texts = ["v0 = tanh(z); v1 = add(v0, t0)", f"{GELU}; v1 = mul(v0, s0)"]
    _grows(linear_program(body), leaf(4, 8), takes=texts, train=train)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dynamic", "by itself"])
def test_one_compile_for_all_batch_sizes(how: str) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return F.gelu(m.lin(x)) * m.s + torch.tanh(m.bare(x))

    model = linear_program(body)
    run = compiled(model, dynamic=True if how == "dynamic" else None, **GROWTH)
    for count in (4, 7, 3, 9, 5, 16):
        x = leaf(count, 8)
        y = run(x)
        torch.testing.assert_close(y, model(x))
        y.sum().backward()
    compiles = 1 if how == "dynamic" else 2  # the first size, then any size
    assert counters["stats"]["unique_graphs"] == compiles
    assert fused() == {"auto_linear": 2 * compiles}


@pytest.mark.slow
def test_a_changing_number_does_not_recompile() -> None:
    model = linear_program(lambda m, x: torch.tanh(m.lin(x)) * m.scale)
    model.scale = 0.5
    run = compiled(model, **GROWTH)
    for model.scale in (0.5, 0.25, 3.5, 1.75):
        x = torch.randn(4, 8)
        torch.testing.assert_close(run(x), model(x))
    assert counters["stats"]["unique_graphs"] == 2 and fused() == {"auto_linear": 2}


@pytest.mark.slow
def test_a_nested_tensor_beside_it_costs_nothing() -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    lin = torch.nn.Linear(8, 8)

    def body(nested: Any, x: Tensor) -> Any:
        return F.gelu(lin(x)), nested.contiguous() * 2

    with torch.no_grad():
        y, _ = compiled(body, **GROWTH)(nested, torch.randn(4, 8))
    assert fused() == {"auto_linear": 1} and y.shape == (4, 8)
