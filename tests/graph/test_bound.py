"""What runs at a match is the user's own expression: its values, its limits, its numbers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ADD,
    MUL,
    Program,
    calls,
    check,
    compiled,
    fused,
    leaf,
    linear_program,
    recorded,
    slow_but,
)
from torch import Tensor, nn

import fx_fuser
from fx_fuser import registry
from fx_fuser.graph.epilogue import MAX_STEPS
from fx_fuser.native.kernel_spec import MAX_NUMBERS, MAX_TENSORS

PATHS = {
    "cpu_ops": {"inner": "aot_eager", "cpu_ops": True, "auto": False},
    "default": {"inner": "inductor"},
}
# What Inductor makes of the numbers is the same for all patterns: tests/package/test_inductor.py.
paths = pytest.mark.parametrize("path", slow_but(["cpu_ops"], PATHS))


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Patterns registered by a test are gone after it."""
    monkeypatch.setattr(registry, "_patterns", list(registry._patterns))
    yield


def compiled_by(path: str, model: Callable[..., Any]) -> Callable[..., Any]:
    options = {"strict": True, **PATHS[path]}
    return torch.compile(model, backend="fx_fuser", fullgraph=True, options=options)


# ---- floating point has no algebra -------------------------------------------------------------

ROWS: dict[str, tuple[str, Callable[[Any, Tensor], Tensor]]] = {
    "to integers": (ADD, lambda m, x: torch.sigmoid(m.lin(x)) * 255 + 12582912.0 - 12582912.0),
    "large and back": (ADD, lambda m, x: torch.sigmoid(m.lin(x)) * 255 + 1e10 - 1e10),
    "beyond and back": (ADD, lambda m, x: torch.sigmoid(m.lin(x)) * 2 + 3e38 + 3e38 - 3e38),
    "infinite": (MUL, lambda m, x: F.silu(m.lin(x)) * float("inf")),
}


@pytest.mark.slow
def test_a_number_in_float64_is_made_in_float64() -> None:
    """Inside, it would be computed in float32, where exp(100) is infinite."""

    def scaled(x, weight, bias, a):  # type: ignore[no-untyped-def]
        return torch.tanh(F.linear(x, weight, bias)) * torch.log(torch.exp(a))

    fx_fuser.register_pattern(scaled)

    def body(m: Any, x: Tensor, a: Tensor) -> Tensor:
        return torch.tanh(m.lin(x)) * torch.log(torch.exp(a))

    model, x = Program(body, lin=nn.Linear(8, 6)), leaf(4, 8)
    check(model, x, torch.tensor(100.0, dtype=torch.float64), fuses={})
    torch._dynamo.reset()
    check(model, x, torch.tensor(1.5), fuses={"scaled": 1})


@paths
@pytest.mark.parametrize("name", ROWS)
def test_steps_are_in_the_users_order(name: str, path: str) -> None:
    """Numbers that follow each other were put together, and 255 + 12582912 − 12582912 was 255."""
    pattern, body = ROWS[name]
    model, x = linear_program(body).eval(), torch.randn(64, 8)
    with torch.no_grad():
        found, expected = compiled_by(path, model)(x), model(x)
    assert fused() == {pattern: 1}
    assert torch.equal(found, expected) or name == "infinite"
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


class Gated(nn.Module):
    """silu(gate) · up, where one gate is far below zero."""

    def __init__(self, bias: float, times: Any) -> None:
        super().__init__()
        self.gate, self.times = nn.Linear(8, 6), times
        with torch.no_grad():
            self.gate.bias[0] = bias

    def forward(self, x: Tensor, up: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * (up if self.times is None else self.times)


@paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "bias, times", [(-torch.finfo(torch.float32).max, 2.0), (-1e30, None)], ids=["lowest", "1e30"]
)
def test_what_is_finite_stays_so(bias: float, times: Any, dtype: torch.dtype, path: str) -> None:
    """z · up, or z · 2, is not: their product with sigmoid(z) = 0 was no number."""
    if bias < -1e30 and dtype == torch.bfloat16:
        bias = torch.finfo(dtype).min
    model = Gated(bias, times).to(dtype)
    x, up = torch.randn(4, 8, dtype=dtype), torch.full((4, 6), 1e9, dtype=dtype)
    seen = []
    for f in (model, compiled_by(path, model)):
        inputs = [t.detach().clone().requires_grad_() for t in (x, up)]
        model.zero_grad()
        y = f(*inputs)
        y.backward(torch.linspace(1, 2, y.numel()).view(y.shape).to(dtype))
        used = inputs if times is None else inputs[:1]
        grads = [t.grad for t in (*used, *model.parameters())]
        assert all(g.isfinite().all() for g in grads) and y.isfinite().all()
        seen.append([y, *grads])
    assert fused() == {MUL: 1}
    near = 1e-5 if dtype == torch.float32 else 0.05
    for eager, ours in zip(*seen):
        assert torch.dist(ours.double(), eager.double()) <= near * eager.double().norm()


# ---- what a kernel takes -------------------------------------------------------------------------


def _product_of(count: int) -> Callable[..., Tensor]:
    """A pattern's source: z times `count` operands."""
    names = [f"a{i}" for i in range(count)]
    text = f"lambda x, weight, bias, {', '.join(names)}: F.linear(x, weight, bias) * "
    source: Callable[..., Tensor] = eval(text + " * ".join(names), {"F": F})
    return source


def _two_sites(many: Callable[[Any, Tensor], Tensor]) -> Program:
    """One with many operands, and a gate."""

    def body(m: Any, x: Tensor, *t: Tensor) -> Tensor:
        z = m.bare(x)
        return many(m.lin(x), *t) + z * torch.sigmoid(z) * 2.0

    return linear_program(body)


def _reasons(model: nn.Module, *inputs: Tensor) -> list[str]:
    torch._dynamo.reset()
    return [site.reason for site in fx_fuser.explain(model, *inputs).refused]


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("bias", [False, True], ids=["bare", "bias"])
@pytest.mark.parametrize("count", [MAX_TENSORS - 1, MAX_TENSORS, MAX_TENSORS + 1])
def test_tensors_that_a_kernel_takes(count: int, bias: bool) -> None:
    """One place is the product's, with its bias. 17 operands were fused, and did not compile."""
    fx_fuser.register_pattern(_product_of(count), name="many")
    fits = count < MAX_TENSORS
    model = _two_sites(lambda z, *t: functools.reduce(operator.mul, t, z))
    if not bias:
        model.lin = nn.Linear(8, 6, bias=False)
    operands = [torch.rand(4, 6) + 0.5 for _ in range(count)]
    left = () if fits else ("linear", "mul")
    expected = {"many": 1, MUL: 1} if fits else {MUL: 1}
    check(model, leaf(4, 8), *operands, fuses=expected, leaves=left)
    reason = f"its {count + 1} tensors exceed a kernel's limit of {MAX_TENSORS}"
    assert fits or reason in _reasons(model, torch.randn(4, 8), *operands)


@pytest.mark.slow
@pytest.mark.parametrize("channels_norm", [False, True], ids=["conv", "norm"])
def test_what_z_is_made_of_takes_places_too(channels_norm: bool) -> None:
    """A convolution's bias, and a BatchNorm's vectors and eps, are read by the same kernel."""
    own = 6 if channels_norm else 2
    for count in (MAX_TENSORS - own, MAX_TENSORS - own + 1):
        names = ", ".join(f"a{i}" for i in range(count))
        z = "F.conv2d(x, w, b)"
        vectors = ""
        if channels_norm:
            z, vectors = f"F.batch_norm({z}, mean, var, gamma, beta)", "mean, var, gamma, beta, "
        tail = " * ".join(f"a{i}" for i in range(count))
        source = eval(f"lambda x, w, b, {vectors}{names}: {z} * {tail}", {"F": F})
        fx_fuser.register_pattern(source, name=f"of_{count}")

        def body(m: Any, x: Tensor, *t: Tensor) -> Tensor:
            return functools.reduce(operator.mul, t, m.norm(m.conv(x)))

        norm = nn.BatchNorm2d(6) if channels_norm else nn.Identity()
        model = Program(body, conv=nn.Conv2d(4, 6, 3), norm=norm)
        operands = [torch.rand(6, 1, 1) + 0.5 for _ in range(count)]
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled(model.eval(), patterns=[f"of_{count}"])(torch.randn(2, 4, 6, 6), *operands)
        assert fused() == ({f"of_{count}": 1} if count + own == MAX_TENSORS else {})


@pytest.mark.slow
@pytest.mark.parametrize("count", [MAX_NUMBERS, MAX_NUMBERS + 1])
def test_numbers_that_a_kernel_takes(count: int) -> None:
    names = [f"a{i}" for i in range(count)]
    tail = functools.reduce(lambda e, n: f"torch.tanh({e} * {n})", names, "F.linear(x, w, b)")
    source = eval(f"lambda x, w, b, {', '.join(names)}: {tail}", {"F": F, "torch": torch})
    fx_fuser.register_pattern(source, name="many")
    fits = count <= MAX_NUMBERS
    numbers = [1.5 + i for i in range(count)]
    model = _two_sites(lambda z: functools.reduce(lambda e, n: torch.tanh(e * n), numbers, z))
    left = () if fits else ("linear", "mul")
    check(model, leaf(4, 8), fuses={"many": 1, MUL: 1} if fits else {MUL: 1}, leaves=left)
    reason = f"its {count} numbers exceed a kernel's limit of {MAX_NUMBERS}"
    assert fits or reason in _reasons(model, torch.randn(4, 8))


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [1, 2])
def test_operations_that_a_kernel_takes(numbers: int) -> None:
    """Of what is computed beside z, too. Two numbers that stand for one are an operation more,
    which is then left where it is."""

    def tail(z: Any, a: Any, *factors: Any) -> Any:
        for _ in range(MAX_STEPS - 2):
            a = torch.tanh(a)
        return functools.reduce(operator.mul, factors, z * a)

    fx_fuser.register_pattern(lambda x, w, b, a, s: tail(F.linear(x, w, b), a, s), name="many")
    model = _two_sites(lambda z, a: tail(z, a, *[1.5] * numbers))
    x, y = leaf(4, 8), torch.randn(4, 6)
    graphs = check(model, x, y, fuses={"many": 1, MUL: 1}, leaves=("mul",))
    assert calls(graphs)["mul"] == numbers - 1


@pytest.mark.slow
def test_a_number_that_changes_takes_a_place() -> None:
    """It is given as a 0-d CPU tensor, which travels as a number: with eight others it is one too
    many, and then the numbers of later calls are right all the same."""
    names = [f"a{i}" for i in range(MAX_NUMBERS + 1)]
    tail = functools.reduce(lambda e, n: f"torch.tanh({e} * {n})", names, "F.linear(x, w, b)")
    source = eval(f"lambda x, w, b, {', '.join(names)}: {tail}", {"F": F, "torch": torch})
    fx_fuser.register_pattern(source, name="many")

    def body(m: Any, x: Tensor) -> Tensor:
        z = m.lin(x)
        for i in range(MAX_NUMBERS):
            z = torch.tanh(z * (1.5 + i))
        return torch.tanh(z * m.scale)

    model, x = linear_program(body).eval(), torch.randn(4, 8)
    model.scale = 0.5
    call = compiled(model)
    with torch.no_grad():
        for model.scale in (0.5, 0.25, 3.5):
            torch.testing.assert_close(call(x), model(x))
    assert fused() == {}


# ---- work is bounded -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_graph_that_compares_in_many_ways_is_refused_soon() -> None:
    """Sums of sums, of which a pattern with many terms fits none."""
    names = [f"a{i}" for i in range(7)]
    tail = " + ".join(f"{n} * torch.tanh(z)" for n in names)
    fx_fuser.register_pattern(
        eval(f"lambda x, w, {', '.join(names)}: (lambda z: {tail} + torch.exp(z))(F.linear(x, w))",
             {"F": F, "torch": torch}),
        name="many",
    )  # fmt: skip

    def body(m: Any, x: Tensor, *t: Tensor) -> Tensor:
        z = m.bare(x)
        return functools.reduce(operator.add, (a * torch.tanh(z) for a in t)) + torch.sin(z)

    model = linear_program(lambda m, x, *t: body(m, x, *t) + F.silu(m.lin(x)) * 2.0)
    operands = [torch.randn(4, 6) for _ in range(7)]
    check(model, leaf(4, 8), *operands, fuses={MUL: 1}, leaves=("linear", "mul"), train=False)
    assert any("comparisons" in r for r in _reasons(model, torch.randn(4, 8), *operands))


# ---- factors that are computed apart -------------------------------------------------------------


APART: dict[str, tuple[Tensor, Tensor]] = {
    "integers that wrap around": (torch.tensor([100], dtype=torch.int8),) * 2,
    "numbers of float64": (
        torch.tensor(1e200, dtype=torch.float64), torch.tensor(1e-200, dtype=torch.float64)
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_a_product_that_float32_cannot_make_is_not_opened(name: str) -> None:
    """100 · 100 is 16 in int8, and 1e200 · 1e-200 is 1."""
    model = linear_program(lambda m, x, a, b: torch.sigmoid(m.lin(x)) * (a * b))
    check(model, leaf(4, 8), *APART[name], fuses={})
    # It is one operand, and no step that would have to be of that dtype.
    assert not any("dtype" in r for r in _reasons(model, torch.randn(4, 8), *APART[name]))


def test_other_products_are_opened() -> None:
    model = linear_program(lambda m, x, a, b: torch.sigmoid(m.lin(x)) * (a * b))
    check(model, leaf(4, 8), leaf(4, 6), leaf(6), fuses={MUL: 1})


# ---- divisions -----------------------------------------------------------------------------------


@paths
@pytest.mark.parametrize(
    "tail", [lambda z, y: z / 2.0, lambda z, y: z / y, lambda z, y: z.div(3)], ids=["2", "y", "3"]
)
def test_a_divisor_is_a_number_or_a_tensor(tail: Callable[..., Tensor], path: str) -> None:
    """`/ 2.0` means `· 0.5`, which hid the number from a pattern's `/ a`."""

    def tanh_div(x, weight, bias, a):  # type: ignore[no-untyped-def]
        return torch.tanh(F.linear(x, weight, bias)) / a

    fx_fuser.register_pattern(tanh_div)
    model = linear_program(lambda m, x, y: tail(torch.tanh(m.lin(x)), y))
    y = torch.rand(4, 6) + 0.5
    check(model, leaf(4, 8), y, fuses={"tanh_div": 1}, leaves=("tanh", "div"), **PATHS[path])


def test_a_quotient_in_the_epilogue_is_one() -> None:
    def tanh_div(x, weight, bias, a):  # type: ignore[no-untyped-def]
        return torch.tanh(F.linear(x, weight, bias)) / a

    fx_fuser.register_pattern(tanh_div)
    with recorded() as graphs:
        compiled(linear_program(lambda m, x: torch.tanh(m.lin(x)) / 3.0))(leaf(4, 8))
    (node,) = [n for n in graphs[0].graph.nodes if "fx_fuser" in str(n.target)]
    assert "v0 = tanh(z); v1 = div(v0, s0)" in node.args and [3.0] in node.args


@pytest.mark.slow
def test_an_integer_that_is_no_float_is_refused() -> None:
    """2^53 + 1 would be 2^53."""
    for number, fuses in ((2**53, {MUL: 1}), (2**53 + 1, {}), (-(2**60), {})):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = linear_program(lambda m, x, n=number: torch.sigmoid(m.lin(x)) * 0.5 * n)
        check(model.eval(), leaf(4, 8), fuses=fuses, train=False)
