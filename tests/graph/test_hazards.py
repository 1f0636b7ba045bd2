"""Each guard is load-bearing: without it a program comes out wrong, or raises.

`UNGUARDED` has at least one adversarial program for every function of `checks.CHECKS`. With the
check it is refused and right; with the check taken out, the same program must fail.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ADD,
    CONV,
    MUL,
    Program,
    assert_close,
    check,
    compiled,
    conv_program,
    fused,
    gate,
    leaf,
    linear_program,
    recorded,
    refused,
    run,
)
from kernel_text import specs_of
from test_refused_regions import no_grad_sigmoid
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fx_fuser
from fx_fuser import backend, registry
from fx_fuser.graph.read import view
from fx_fuser.native import kernel_spec
from fx_fuser.ops import calls, checks


@dataclass
class Trap:
    """A program that only one check keeps right."""

    check: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    train: bool = False
    grad: bool | None = None
    dynamic: bool | None = None
    inner: str = "aot_eager"


def _x_written(m: Any, x: Tensor) -> Any:
    x = x * 1.0
    z = m.lin(x)
    x.add_(1)
    return z * torch.sigmoid(z) * 2.0


def _x_written_through_a_view(m: Any, x: Tensor) -> Any:
    x = x * 1.0
    row = x[0]
    z = m.lin(x)
    row.zero_()
    return z * torch.sigmoid(z) * 2.0


def _multiplier_written(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.lin(x)
    r = torch.sigmoid(z) * y
    y[0] = 7.0
    return r * z


def _multiplier_made_and_written(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.lin(x)
    g = y.clone()
    r = torch.sigmoid(z) * g
    g.mul_(2.0)
    return r * z


def _statistics_read(m: Any, x: Tensor) -> Any:
    z = m.bn(m.conv(x))
    seen = m.bn.running_mean.clone()
    return z * 2.0, seen


def _statistics_viewed(m: Any, x: Tensor) -> Any:
    z = m.bn(m.conv(x))
    seen = m.bn.running_var[:3] * 1.0
    return z * 2.0, seen


def _operand_lives_on(m: Any, x: Tensor, y: Tensor) -> Any:
    y.add_(2.0 * torch.sigmoid(m.lin(x)))
    return y * 1.0


def _norm_twice(m: Any, x: Tensor) -> Any:
    return torch.relu(m.bn(m.conv(x))) + m.bn(m.conv(x * 0.5)) * 2.0


def _statistics_in_one(m: Any, x: Tensor) -> Any:
    return F.batch_norm(m.conv(x), m.mean, m.mean, m.gamma, m.beta, True) * 2.0


def _columns_flattened(m: Any, x: Tensor, y: Tensor) -> Any:
    return (y * torch.sigmoid(m.lin(x)) * 2.0).t().view(-1)


def _transposed_in_place(m: Any, x: Tensor) -> Tensor:
    w = torch.cat([m.lin.weight, m.lin.weight])[:8] * 2  # square
    w.t_()
    z = x @ w
    return z * torch.sigmoid(z) * 2.0


def _factor_source_written(m: Any, x: Tensor, y: Tensor) -> Any:
    q = y * 0.5
    r = torch.sigmoid(m.lin(x)) * q
    y.add_(1.0)
    return r


def _gated(m: Any, x: Tensor, w: Tensor) -> Tensor:
    z = F.linear(x, w)
    return z * torch.sigmoid(z) * 2.0


def _bn_mul(m: Any, x: Tensor, *y: Tensor) -> Tensor:
    return m.bn(m.conv(x)) * (y[0] if y else 2.0)


def _conv(body: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: conv_program(body, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))


def _linear(body: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: linear_program(body)


def _rows() -> tuple[Tensor]:
    return (torch.randn(4, 8),)


def _rows_and_operand() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8), torch.randn(4, 6)


def _leaf_rows() -> tuple[Tensor]:
    return (leaf(4, 8),)


def _images() -> tuple[Tensor]:
    return (torch.randn(3, 4, 8, 9),)


TRAPS: dict[str, Trap] = {
    "a size as the scale": Trap(
        "plain_tensors",
        _linear(lambda m, x: (lambda z: z * torch.sigmoid(z) * x.shape[0])(m.lin(x))),
        _rows,
        dynamic=True,
    ),
    "no_grad inside": Trap("one_region", _linear(no_grad_sigmoid), _leaf_rows, train=True),
    "inside vmap": Trap(
        "one_region", _linear(lambda m, x: torch.func.vmap(lambda v: gate(m, v))(x)), _rows
    ),
    "inside jvp": Trap(
        "one_region",
        _linear(
            lambda m, x: torch.func.jvp(lambda v: gate(m, v), (x,), (torch.ones_like(x),))[1]
        ),
        _rows,
    ),
    "z is returned too": Trap(
        "inner_values_unused",
        _linear(lambda m, x: (lambda z: (z * torch.sigmoid(z) * 2.0, z))(m.lin(x))),
        _leaf_rows,
        train=True,
    ),
    "the conv is used too": Trap(
        "inner_values_unused",
        _conv(lambda m, x: (lambda c: (m.bn(c) * 2.0, c.cos()))(m.conv(x))),
        _images,
    ),
    "the addend is written": Trap(
        "in_place_writes_stay_inside", _linear(_operand_lives_on), _rows_and_operand
    ),
    "x is written": Trap("operands_unchanged", _linear(_x_written), _rows),
    "x is written through a view": Trap(
        "operands_unchanged", _linear(_x_written_through_a_view), _rows
    ),
    "a multiplier is written": Trap(
        "operands_unchanged", _linear(_multiplier_written), _rows_and_operand
    ),
    "a multiplier made on the way is written": Trap(
        "operands_unchanged", _linear(_multiplier_made_and_written), _rows_and_operand
    ),
    "running_mean is read": Trap(
        "statistics_unseen", _conv(_statistics_read), _images, train=True, grad=False
    ),
    "running_var is viewed": Trap(
        "statistics_unseen", _conv(_statistics_viewed), _images, train=True, grad=False
    ),
    "the norm is used twice": Trap(
        "statistics_alone", _conv(_norm_twice), _images, train=True, inner="eager"
    ),
    "mean and variance are one tensor": Trap(
        "statistics_alone", _conv(_statistics_in_one), _images, train=True, inner="eager"
    ),
    "the operand's layout wins": Trap(
        "layout_kept", _linear(_columns_flattened), lambda: (leaf(4, 8), torch.randn(6, 4).t())
    ),
    "a weight is transposed in place": Trap("seen_as_made", _linear(_transposed_in_place), _rows),
    "a factor's source is written": Trap(
        "saved_operands_stay",
        _linear(_factor_source_written),
        lambda: (leaf(4, 8), torch.randn(4, 6)),
        train=True,
        inner="eager",
    ),
    "a complex operand": Trap(
        "known_dtypes",
        _linear(lambda m, x, y: torch.sigmoid(m.lin(x)) * 2.0 * y),
        lambda: (torch.randn(4, 8), torch.randn(6, dtype=torch.complex64)),
    ),
    "no batch dimension": Trap(
        "anchor_form",
        lambda: Program(
            lambda m, x: F.batch_norm(m.conv(x), None, None, training=True) * 2.0,
            conv=nn.Conv2d(4, 6, 3),
        ),
        lambda: (torch.randn(4, 8, 9),),
    ),
    "a weight vector": Trap("anchor_form", lambda: Program(_gated), lambda: (leaf(4, 8), leaf(8)),
                            train=True),
    "the result is larger": Trap(
        "shape_kept", _conv(_bn_mul), lambda: (torch.randn(1, 4, 8, 9), torch.randn(3, 6, 6, 7))
    ),
}  # fmt: skip

# What no program on a CPU can show, and the test that stands in for it.
ELSEWHERE = {
    "one_device": "test_other_device",
    "pattern_check": "test_pattern_check",
    "fits_a_kernel": "test_more_than_a_kernel_takes",
    "runs_in_an_export": "test_norm_in_training_in_an_exported_program",
}


def attempt(trap: Trap, **options: Any) -> None:
    """Raises unless all numbers are right; says nothing about what fuses."""
    torch.manual_seed(0)
    model, inputs = trap.model(), trap.inputs()
    eager, outputs = run(model, inputs, trap.train, grad=trap.grad)
    exact, _ = run(model, inputs, trap.train, lambda m: m, torch.float64, outputs, trap.grad)
    compile_it = functools.partial(compiled, dynamic=trap.dynamic, inner=trap.inner, **options)
    ours, _ = run(model, inputs, trap.train, compile_it, None, outputs, trap.grad)
    assert_close(ours, eager, exact)


traps = pytest.mark.parametrize("trap", TRAPS.values(), ids=TRAPS.keys())


@traps
def test_trap_is_refused(trap: Trap) -> None:
    """These are the tests that tests/mutants/mutate.py expects to fail where the check is gone."""
    attempt(trap)
    assert fused() == {}


@pytest.fixture
def forward_ad_closed() -> Iterator[None]:
    """Without its guard a jvp breaks off half way, and its level would stay open."""
    yield
    with contextlib.suppress(RuntimeError):  # it is open
        torch._C._enter_dual_level()
    torch._C._exit_dual_level(level=0)
    torch.autograd.forward_ad._current_level = -1


@traps
@pytest.mark.usefixtures("forward_ad_closed")
def test_guard_is_load_bearing(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tuple(c for c in checks.CHECKS if c.__name__ != trap.check)
    monkeypatch.setattr(checks, "CHECKS", kept)
    with pytest.raises(Exception) as failure:
        attempt(trap)
    wrong_numbers = isinstance(failure.value, AssertionError)
    assert fused() or not wrong_numbers, "wrong numbers come from fusing"


def test_every_check_has_a_trap() -> None:
    shown = {t.check for t in TRAPS.values()} | ELSEWHERE.keys()
    assert shown == {c.__name__ for c in checks.CHECKS}
    assert all(test in globals() for test in ELSEWHERE.values())


def test_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On "meta" no kernel op runs; without the check one is asked to."""
    asked: list[torch.device] = []
    monkeypatch.setattr(backend.plan, "unavailable", lambda device: asked.append(device))
    model, x = linear_program(gate).to("meta"), torch.randn(4, 8, device="meta")
    assert compiled(model)(x).shape == (4, 6)
    assert fused() == {} and asked == []
    torch._dynamo.reset()
    without = tuple(c for c in checks.CHECKS if c is not checks.one_device)
    monkeypatch.setattr(checks, "CHECKS", without)
    with pytest.raises(Exception, match=r"While executing .*fx_fuser\.linear"):
        compiled(model)(x)
    assert asked == [torch.device("meta")]


@pytest.mark.slow
def test_more_than_a_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU op computes it all the same; the CUDA kernels have no room for it."""

    def hazard_test_many(x, weight, bias, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q):  # type: ignore[no-untyped-def]  # noqa: E741
        z = F.linear(x, weight, bias)
        return z * a * b * c * d * e * f * g * h * i * j * k * l * m * n * o * p * q

    monkeypatch.setattr(registry, "_patterns", list(registry._patterns))
    fx_fuser.register_pattern(hazard_test_many)
    model = linear_program(lambda m, x, *t: functools.reduce(operator.mul, t, m.lin(x)))
    inputs = (torch.randn(4, 8), *(torch.rand(4, 6) + 0.5 for _ in range(17)))
    refused(model, *inputs, reason="its 18 tensors exceed a kernel's limit of 16", train=False)
    torch._dynamo.reset()
    without = tuple(c for c in checks.CHECKS if c is not checks.fits_a_kernel)
    monkeypatch.setattr(checks, "CHECKS", without)
    counters.clear()
    compiled(model)(*inputs)
    assert fused() == {"hazard_test_many": 1}
    dtypes = dict.fromkeys(inspect.signature(hazard_test_many).parameters, torch.float32)
    assert len(specs_of(hazard_test_many, dtypes)[0].inputs) > kernel_spec.MAX_TENSORS


@pytest.mark.slow
def test_pattern_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def hazard_test_rounds(x, weight, bias):  # type: ignore[no-untyped-def]
        return torch.tanh(torch.tanh(F.linear(x, weight, bias)))

    known = list(registry._patterns)
    monkeypatch.setattr(registry, "_patterns", known)
    fx_fuser.register_pattern(hazard_test_rounds, check=lambda match: "never on a Tuesday")
    model = linear_program(lambda m, x: torch.tanh(torch.tanh(m.lin(x))))
    check(model, leaf(4, 8), fuses={})
    report = fx_fuser.explain(copy.deepcopy(model), torch.randn(4, 8))
    assert [s.reason for s in report.refused] == ["never on a Tuesday"]
    torch._dynamo.reset()
    without = tuple(c for c in checks.CHECKS if c is not checks.pattern_check)
    monkeypatch.setattr(checks, "CHECKS", without)
    check(model, leaf(4, 8), fuses={"hazard_test_rounds": 1})


# ---- B: see test_refusals.test_changing_scale_does_not_recompile ----------------------------


@pytest.mark.slow
def test_without_the_product_a_changing_scale_recompiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of hazard B is `Bound.items`: a 0-d tensor alone made the number a constant."""

    def compiles() -> int:
        torch._dynamo.reset()
        counters.clear()
        model = linear_program(lambda m, x: (lambda z: z * torch.sigmoid(z) * m.scale)(m.lin(x)))
        model.scale = 0.5
        call = compiled(model.eval())
        with torch.no_grad():
            for model.scale in (0.5, 0.25, 3.5, 1.75):
                call(torch.ones(4, 8))
        return counters["stats"]["unique_graphs"]

    assert compiles() == 2
    replace_all = backend.rewrite.replace_all

    removed = []

    def without_items(graph: Any, replacements: Any) -> None:
        for _, call in replacements:
            removed.extend(call.items)
            call.items.clear()
        replace_all(graph, replacements)

    monkeypatch.setattr(backend.rewrite, "replace_all", without_items)
    assert compiles() > 2 and removed


# ---- D: double backward ---------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("pattern", [MUL, ADD, CONV])
def test_double_backward_raises(pattern: str, inner: str) -> None:
    if pattern == CONV:
        model, x = conv_program(_bn_mul, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), leaf(3, 4, 8, 9)
    else:
        sigmoid = torch.sigmoid
        tail = {MUL: lambda z: z * sigmoid(z) * 2.0, ADD: lambda z: z + sigmoid(z) * 2.0}[pattern]
        model, x = linear_program(lambda m, x: tail(m.lin(x))), leaf(4, 8)
    y = compiled(model, inner=inner)(x)
    assert fused() == {pattern: 1}
    with pytest.raises(RuntimeError, match="double backward"):
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        dx.square().sum().backward()


def test_gradients_with_create_graph_are_right_the_first_time() -> None:
    model, x = linear_program(gate), leaf(4, 8)
    expected = torch.autograd.grad(model(x).sum(), x)
    y = compiled(model, inner="eager")(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x, create_graph=True), expected)


# ---- E, with inner="eager": AOTAutograd's alias guards are missing ---------------------------


def test_input_write_is_load_bearing_with_inner_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """y is a view of x, which only the caller knows; without the check x is read too late."""

    def body(m: Any, x: Tensor, y: Tensor) -> Tensor:
        z = m.lin(x)
        y.add_(1)
        return z * torch.sigmoid(z) * 2.0

    def error() -> float:
        torch._dynamo.reset()
        model = linear_program(body).eval()
        call = compiled(model, inner="eager")
        with torch.no_grad():
            call(torch.ones(4, 8), torch.ones(2, 8))
            x, same = torch.ones(4, 8), torch.ones(4, 8)
            return float((call(x, x[:2]) - model(same, same[:2])).abs().max())

    assert error() == 0.0
    monkeypatch.setattr(view.View, "graph_inputs", frozenset())
    assert error() > 1e-3


# ---- rewriting: fresh meta, restored graphs -------------------------------------------------


def test_failure_of_ours_leaves_the_users_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = linear_program(gate), leaf(4, 8)
    monkeypatch.setattr(calls, "graph_call", lambda *a, **k: 1 / 0)
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        got = compiled(model, strict=False)(x)
    torch.testing.assert_close(got, model(x))
    assert fused() == {}
    torch._dynamo.reset()
    with pytest.raises(Exception, match="division by zero"):
        compiled(model, strict=True)(x)


def test_rewritten_nodes_have_fresh_meta() -> None:
    with recorded() as graphs:
        compiled(linear_program(gate))(leaf(4, 8))
    (node,) = [n for n in graphs[0].graph.nodes if "fx_fuser" in str(n.target)]
    allowed = {"example_value", "stack_trace", "nn_module_stack", "source_fn_stack"}
    assert set(node.meta) <= allowed


def test_norm_in_training_in_an_exported_program() -> None:
    """Its op returns no statistics, and a rewritten program would not be one."""
    model = conv_program(lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    program = torch.export.export(model.train(), (torch.randn(2, 4, 8, 9),))
    assert fx_fuser.fuse_exported(program, options={"cpu_ops": True, "strict": True}) is program
