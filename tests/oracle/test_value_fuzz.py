"""A bounded run of the value fuzz, and that it finds faults.

`python tests/oracle/value_fuzz.py` is the longer one.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import operator
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import value_fuzz
import value_oracle
from helpers import slow_but
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from value_fuzz import Run, Tally, fuzz, merged, runnable, too_little
from value_oracle import _in_another_order
from value_patterns import registered
from value_programs import Program, generate
from value_seen import Seen
from value_tail import _ROUNDINGS, left_range, met_zero, of_linear_tail
from value_writer import NothingToWrite

from fx_fuser.errors import BuildError
from fx_fuser.graph.epilogue import Epilogue, Step
from fx_fuser.graph.match import bind, pattern
from fx_fuser.graph.read.operations import OPS

PROGRAMS = 200  # of a test: as many on a busy machine as on a quiet one
SECONDS = 60  # it is given up after
FOUND_WITHIN = 800  # seeds, of a fault


# A run of .ci/run draws other programs for each commit.
FIRST = int(os.environ.get("FX_FUSER_FUZZ_SEED", 100_000))


def _checked(run: Run, count: int = PROGRAMS) -> Tally:
    """Of programs from the seed of this run on, none of which may fail."""
    print(f"value_fuzz: {run}, seeds from {FIRST} (FX_FUSER_FUZZ_SEED)")

    def report(seed: int, program: Program, message: str) -> None:
        pytest.fail(runnable(program, seed, "cpu", message))

    tally = fuzz(run, range(FIRST, FIRST + count), report)
    assert tally.programs > 20
    assert not too_little(run, tally)
    return tally


@pytest.mark.parametrize(
    "train", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eval", "train"]
)
def test_programs(train: bool) -> None:
    tally = _checked(Run(train=train, seconds=SECONDS, compiled=0.01))
    assert tally.sites > 0.8 * tally.programs


@pytest.mark.slow
@pytest.mark.parametrize(
    "train", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eval", "train"]
)
def test_programs_that_are_grown(train: bool) -> None:
    tally = _checked(Run(train=train, seconds=SECONDS, compiled=0.01, auto=True))
    assert tally.sites > 0.95 * tally.programs
    assert tally.whole > 0.8 * tally.programs


@pytest.mark.slow
def test_within_the_bound_of_a_gpu() -> None:
    """On a CPU to the bit means within that bound, too."""
    _checked(Run(train=True, seconds=SECONDS, bounded=True))


@pytest.mark.slow
def test_few_structures_with_many_values() -> None:
    """As on a GPU, where each takes a kernel; only numbers, values and layouts are new."""
    with registered() as patterns:
        for structure in range(40):
            try:
                made = [generate(structure, seed, patterns, True) for seed in range(4)]
            except NothingToWrite:
                continue
            shapes = {_without_numbers(p.source) for p in made}
            dtypes = {tuple(v.dtype for v in p.inputs.values()) for p in made}
            assert len(dtypes) == 1
            assert len(shapes) <= 2, "an alpha of 1, or a bound of NaN, is another structure"


def _without_numbers(source: str) -> str:
    class Blank(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> Any:
            return ast.Name("number")

        def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
            inner = self.visit(node.operand)
            return inner if isinstance(inner, ast.Name) and inner.id == "number" else node

        def visit_Name(self, node: ast.Name) -> Any:
            return ast.Name("number") if node.id in ("inf", "nan") else node

    tail = source.partition("def tail")[2].partition("\n\n\n")[0]
    return ast.dump(Blank().visit(ast.parse(f"def tail{tail}")))


def test_a_failure_is_a_script() -> None:
    with registered() as patterns:
        program = generate(3, 3, patterns, True)
    space: dict[str, Any] = {"__name__": "script"}
    exec(compile(runnable(program, 3, "cpu", "why"), "<script>", "exec"), space)
    assert space["inputs"].keys() == program.inputs.keys()
    for name, value in program.inputs.items():
        again = space["inputs"][name]
        assert again.stride() == value.stride() and again.requires_grad == value.requires_grad
        assert torch.equal(again.nan_to_num(7.0), value.nan_to_num(7.0))


@pytest.mark.slow
def test_every_op_is_fused() -> None:
    ops: set[str] = set()
    original = bind._Binder.step

    def step(self: Any, expr: Any) -> str:
        ops.add(expr.op)
        return original(self, expr)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bind._Binder, "step", step)
        tally = fuzz(Run(), range(500))
    assert ops == OPS.keys()
    with registered() as patterns:
        assert {name for name, sites in tally.reached.items() if sites} == {
            p.name for p in patterns
        }
    assert {"sigmoid", "gelu", "pow"} <= _ROUNDINGS.keys()


# ---- faults --------------------------------------------------------------------------------------

Rewrite = Callable[[list[Step], list[float]], None]


def _rewritten(patch: pytest.MonkeyPatch, change: Rewrite) -> None:
    """With the steps of what is bound changed, in place."""

    def bound(*args: Any) -> bind.Bound:
        found = bind.bind(*args)
        steps, numbers = list(found.epilogue.steps), list(found.numbers)
        change(steps, numbers)
        return dataclasses.replace(found, epilogue=Epilogue(tuple(steps)), numbers=tuple(numbers))

    patch.setattr(pattern, "bind", bound)


def _inner(steps: list[Step], i: int, op: str) -> tuple[int, Step] | None:
    """A step of the same two-operand op whose value this one alone reads, as its first."""
    step = steps[i]
    if step.op != op or len(step.args) != 2 or not str(step.args[0]).startswith("v"):
        return None
    at = int(str(step.args[0])[1:])
    readers = sum(s.args.count(f"v{at}") for s in steps)
    return (at, steps[at]) if readers == 1 and steps[at].op == op else None


def _fold(steps: list[Step], numbers: list[float]) -> None:
    """z * 2 * 3 → z * 6"""
    for op, of in (("mul", operator.mul), ("add", operator.add)):
        for i, step in enumerate(steps):
            found = _inner(steps, i, op)
            if found is None or step.args[1] is None or len(found[1].args) != 2:
                continue
            first, second = found[1].args[1], step.args[1]
            if first and first[0] == second[0] == "s":
                place = int(second[1:])
                numbers[place] = of(numbers[int(first[1:])], numbers[place])
                steps[i] = Step(op, (found[1].args[0], second))


def _associate(steps: list[Step], numbers: list[float]) -> None:
    """(z * a) * b → (z * b) * a"""
    for op in ("mul", "add"):
        for i, step in enumerate(steps):
            found = _inner(steps, i, op)
            made = [f"v{j}" for j in range(len(steps))]
            if found is None or step.args[1] in made or len(found[1].args) != 2:
                continue
            at, inner = found
            steps[at] = Step(op, (inner.args[0], step.args[1]))
            steps[i] = Step(op, (f"v{at}", inner.args[1]))


def _reversed_numbers(steps: list[Step], numbers: list[float]) -> None:
    if not any(step.op == "hardtanh" for step in steps):  # which raises, and nothing differs
        numbers.reverse()


def _op(name: str, **changed: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def inject(patch: pytest.MonkeyPatch) -> None:
        patch.setitem(OPS, name, dataclasses.replace(OPS[name], **changed))

    return inject


def _steps(change: Rewrite) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: _rewritten(patch, change)


def _flushed(x: Any, y: Any) -> Any:
    made = x * y
    return torch.where(made.abs() < torch.finfo(made.dtype).tiny, 0 * made, made)


def _silu_apart(z: Tensor) -> Tensor:
    return z * torch.sigmoid(z)


class _OtherSlope(torch.autograd.Function):
    """silu, whose gradient is that of z · σ(z)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return nn.functional.silu(z)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            z = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(_silu_apart(z), z, grads[0])


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], bool]] = {
    "numbers folded": (_steps(_fold), False),
    "associated otherwise": (_steps(_associate), False),
    "silu as a product": (_op("silu", torch=_silu_apart), False),
    "silu differentiated as a product": (_op("silu", torch=_OtherSlope.apply), True),
    "a clamp dropped": (_op("clamp", torch=lambda x, low=None, high=None: x * 1), False),
    "a cast dropped": (_op("cast", torch=lambda x, dtype: x * 1), False),
    "operands of sub swapped": (_op("sub", torch=lambda x, y, *a: torch.sub(y, x) if isinstance(
        y, Tensor) else y - x), False),
    "operands of div swapped": (_op("div", torch=lambda x, y: y / x), False),
    "subnormals flushed": (_op("mul", torch=_flushed), False),
    "numbers in another order": (_steps(_reversed_numbers), False),
}  # fmt: skip
# On a CPU, where sigmoid(-100) is 0, these are a matter of roundings, which a GPU is allowed.
ONLY_TO_THE_BIT = {"silu as a product", "silu differentiated as a product"}


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize(
    "bounded, auto",
    [(False, False), (True, False), (False, True)],
    ids=["to the bit", "bounded", "grown"],
)
@pytest.mark.parametrize(
    "name", slow_but(FAULTS.keys() - {"associated otherwise", "a cast dropped"}, FAULTS)
)
def test_a_fault_is_found(
    name: str, bounded: bool, auto: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject, train = FAULTS[name]
    if bounded and name in ONLY_TO_THE_BIT:
        pytest.skip("it is within the bound")
    inject(monkeypatch)
    found: list[str] = []

    class Enough(Exception):
        pass

    def report(seed: int, program: Program, message: str) -> None:
        found.append(message)
        raise Enough

    only = ("linear_sigmoid_mul_mul", "value_silu") if "silu" in name else ()
    run = Run(train=train, bounded=bounded, only=only, auto=auto)
    with pytest.raises(Enough):
        fuzz(run, range(FOUND_WITHIN), report)
    assert "differs" in found[0], found


def test_infinite_terms_excuse_no_other_infinity() -> None:
    inf = torch.tensor([torch.inf], dtype=torch.bfloat16)
    assert not _in_another_order(-inf, inf, inf.double())
    assert not _in_another_order(inf * 0, inf, inf.double())


@pytest.mark.slow
def test_a_missed_site_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from fx_fuser.ops import checks

    never = (lambda m: pattern.Fault(m.root, "never"),)
    monkeypatch.setattr(checks, "CHECKS", never)
    for auto, told in ((False, "fused"), (True, "nothing is grown")):
        tally = fuzz(Run(auto=auto), range(3))
        assert tally.failures
        assert all(told in message for message in tally.failures.values())


SPILLS = ("fx_fuser_conv spills registers (ptxas warning : 8 bytes spill stores); compile fewer "
          "operands or operations into one kernel")  # fmt: skip


@pytest.mark.parametrize("through", [None, BackendCompilerFailed], ids=["read", "compiled"])
@pytest.mark.parametrize(
    "said, counted",
    [(SPILLS, True), ("nvcc x.cu failed:\nerror: expected a ;", False),
     (f"nvcc x.cu failed:\nerror: expected a ;\n{SPILLS}", False)],
    ids=["spills", "no C++", "both"],
)  # fmt: skip
def test_a_kernel_that_would_spill_is_counted_apart(
    said: str, counted: bool, through: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> str:
        error = BuildError(said)
        raise error if through is None else through(lambda: None, error, None)

    monkeypatch.setattr(value_fuzz, "check", refuse)
    tally = fuzz(Run(), range(3))
    assert tally.programs == 3 and bool(tally.failures) is not counted
    assert sum(tally.unbuilt.values()) == (3 if counted else 0)
    assert "do not compile" in too_little(Run(), tally) or not counted
    few = Tally(programs=100, unbuilt=tally.unbuilt)
    assert not too_little(Run(), merged([few]))


@pytest.mark.parametrize(
    "tail, dy, left, zero",
    [
        (lambda z: 1e-30 * (1e-30 * z), 3e38, False, False),  # autograd's order keeps it
        (lambda z: 1e30 * (1e-30 * (1e-30 * z)), 3e38, True, False),
        (lambda z: 1e38 * (0.0 * z), 3e38, False, True),
        (lambda z: 0.0 * z, 3e38, False, False),
        (lambda z: z * 2.0, 1.0, False, False),
        (lambda z: torch.tanh(z), 1.0, False, False),  # saturated
    ],
)
def test_what_leaves_the_range_is_excused_and_a_zero_is_asked_for(
    tail: Callable[[Tensor], Tensor], dy: float, left: bool, zero: bool
) -> None:
    z = torch.linspace(-20, 20, 9).requires_grad_()
    ones = torch.full_like(z, dy)
    (dz,) = torch.autograd.grad(tail(z), z, ones)
    exact = of_linear_tail(tail, z.detach(), {}, ones, dz)
    for found, wanted in ((left_range(exact, dz), left), (met_zero(exact, dz), zero)):
        assert bool(found.all()) == bool(found.any()) == wanted


@pytest.mark.parametrize(
    "factors, dy, found, right",
    [
        # the fuzzer's 9350 on an H100: an infinity met a zero, and zero or eager's NaN are right
        ((0.0, 1e38), (3e38, 3e38), 0.0, True),
        ((0.0, 1e38), (3e38, 3e38), math.nan, True),
        ((0.0, 1e38), (3e38, 3e38), 7.0, False),
        # its 12077: infinities of both signs, of which the exact sum has one, and eager NaN
        ((1e30, 1e30), (3.0, -1.0), math.inf, True),
        ((1e30, 1e30), (1.0, -3.0), -math.inf, True),
        ((1e30, 1e30), (3.0, -1.0), math.nan, True),
        ((1e30, 1e30), (3.0, -1.0), -math.inf, False),
        ((1e30, 1e30), (3.0, -1.0), 7.0, False),
    ],
)
def test_what_a_gradient_may_be_where_autograd_leaves_the_range(
    monkeypatch: pytest.MonkeyPatch, factors: tuple[float, float], dy: tuple[float, float],
    found: float, right: bool,
) -> None:  # fmt: skip
    """Of such programs, as if they ran on a GPU."""
    monkeypatch.setattr(value_oracle, "_multiplies_first", lambda p, z: True)
    first, last = factors
    spaces: dict[str, Any] = {
        "anchor": lambda x, weight, bias: F.conv2d(x, weight, bias),
        "tail": lambda z: last * (first * z),
    }
    x = torch.randn(2, 1, 3, 3)
    weight, bias = torch.randn(1, 1, 2, 2), torch.randn(1, requires_grad=True)
    program = SimpleNamespace(
        operands=(), train=True, acc=None, autocast=False, auto=False, apart=frozenset(),
        source="", geometry=(1, 0), pattern=SimpleNamespace(kind="conv2d"), stays=(),
        folded=False, bias=None, part=None, training_norm=False,
    )  # fmt: skip
    y = spaces["tail"](spaces["anchor"](x, weight, bias))
    of_y = torch.tensor(dy).view(2, 1, 1, 1).expand_as(y)  # of a sample each
    (eager,) = torch.autograd.grad(y, [bias], of_y)
    assert eager.isnan().all()
    grads = (eager, torch.tensor([found]))
    seen = [Seen(y.detach(), y.detach(), grads={"bias": g}) for g in grads]
    inputs = {"x": x, "weight": weight, "bias": bias}
    fault = value_oracle.faults_of(program, spaces, inputs, of_y, *seen, exact=False)  # type: ignore[arg-type]
    assert (fault == "") == right, fault
