"""beta · r + alpha · x · w in one call: baddbmm and addmm, and what is left of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import GROWTH, MUL, Program, calls, check, compiled, epilogues, fused, leaf
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fx_fuser
from fx_fuser import registry
from fx_fuser.graph.match.trace import trace

aten = torch.ops.aten
SUMS = ("baddbmm", "addmm")
both = pytest.mark.parametrize("name", SUMS)


def operands(name: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    batch = (3,) if name == "baddbmm" else ()
    return [leaf(*batch, *shape, dtype=dtype) for shape in ((4, 6), (4, 8), (8, 6))]


def kind(name: str) -> str:
    return "auto_bmm" if name == "baddbmm" else "auto_matmul"


def fuse(name: str, body: Callable[..., Any], *inputs: Tensor, **options: Any) -> list[str]:
    """The epilogues of the one site; values and gradients are compared."""
    model = Program(lambda m, *tensors: body(*tensors))
    wanted = {kind(name): 1}
    graphs = check(model, *(inputs or operands(name)), fuses=wanted, **GROWTH, **options)
    left = {"baddbmm", "baddbmm_", "addmm", "bmm", "mm", "mul", "add"}
    assert not calls(graphs).keys() & left
    return epilogues(graphs)


# ---- what is fused -------------------------------------------------------------------------------

FACTORS: dict[str, tuple[dict[str, float], str]] = {
    "none": ({}, "v0 = add(z, t0)"),
    "alpha": ({"alpha": 0.125}, "v0 = mul(z, s0); v1 = add(v0, t0)"),
    "beta": ({"beta": -0.5}, "v0 = add(z, t0, s0)"),
    "both": ({"beta": 0.5, "alpha": 3.0}, "v0 = mul(z, s0); v1 = add(v0, t0, s1)"),
    "integers": ({"beta": 2, "alpha": -1}, "v0 = mul(z, s0); v1 = add(v0, t0, s1)"),
}


@both
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", FACTORS)
def test_factors(case: str, train: bool, name: str) -> None:
    factors, expected = FACTORS[case]
    call = getattr(torch, name)
    assert fuse(name, lambda r, x, w: call(r, x, w, **factors), train=train) == [expected]


FORMS: dict[str, Callable[..., Tensor]] = {
    "method": lambda r, x, w: r.baddbmm(x, w, alpha=0.5),
    "keywords": lambda r, x, w: torch.baddbmm(alpha=0.5, batch2=w, input=r, batch1=x),
    "overload": lambda r, x, w: aten.baddbmm.default(r, x, w, alpha=0.5),
    "addmm method": lambda r, x, w: r.addmm(x, w, alpha=0.5),
    "addmm keywords": lambda r, x, w: torch.addmm(alpha=0.5, mat2=w, input=r, mat1=x),
    "addmm overload": lambda r, x, w: aten.addmm.default(r, x, w, alpha=0.5),
}


@pytest.mark.parametrize("form", FORMS)
def test_its_forms(form: str) -> None:
    name = "addmm" if "addmm" in form else "baddbmm"
    assert fuse(name, FORMS[form]) == ["v0 = mul(z, s0); v1 = add(v0, t0)"]


def test_scores_with_a_bias() -> None:
    """As attention is written with ALiBi, over k as it lies."""
    inputs = leaf(2, 1, 6), leaf(2, 4, 8), leaf(2, 6, 8)
    body = lambda a, q, k: torch.baddbmm(a, q, k.mT, beta=1.0, alpha=0.125)  # noqa: E731
    model = Program(lambda m, *tensors: body(*tensors))
    graphs = check(model, *inputs, fuses={"auto_bmm": 1}, **GROWTH)
    assert epilogues(graphs) == ["v0 = mul(z, s0); v1 = add(v0, t0)"]


def test_over_a_linears_weight() -> None:
    model = Program(lambda m, r, x, w: torch.addmm(r, x, w.t(), beta=0.5))
    check(model, leaf(4, 6), leaf(4, 8), leaf(6, 8), fuses={"auto_linear": 1}, **GROWTH)


@pytest.mark.slow
def test_an_addmm_of_a_vector_has_a_bias() -> None:
    """Without factors: then the gemm adds it. With one it is an addend."""
    vector, (_, x, w) = leaf(6), operands("addmm")
    assert fuse("addmm", torch.addmm, vector, x, w) == [""]
    torch._dynamo.reset()
    counters.clear()
    scaled = fuse("addmm", lambda b, x, w: torch.addmm(b, x, w, beta=2), vector, x, w)
    assert scaled == ["v0 = add(z, t0, s0)"]


def test_a_patterns_addmm_has_a_bias() -> None:
    """Its trace has no shapes."""

    def conv1d(x, weight, bias):  # type: ignore[no-untyped-def]
        return torch.addmm(bias, x, weight)

    assert trace(conv1d).wildcards == ()


@both
@pytest.mark.parametrize("shape", [(6,), (4, 1), (1, 6), (1,), ()], ids=str)
def test_an_addend_that_is_spread(shape: tuple[int, ...], name: str) -> None:
    call = getattr(torch, name)
    addend = torch.randn(shape).requires_grad_()
    fuse(name, lambda r, x, w: call(r, x, w, beta=2, alpha=0.5), addend, *operands(name)[1:])


@both
def test_an_addend_in_columns(name: str) -> None:
    """The result is in rows all the same, as the library's."""
    _, x, w = operands(name)
    addend = torch.randn(*x.shape[:-2], 6, 4).mT.requires_grad_()
    call = getattr(torch, name)
    fuse(name, lambda r, x, w: call(r, x, w, beta=2, alpha=0.5), addend, x, w)


@both
def test_in_float64(name: str) -> None:
    call = getattr(torch, name)
    body = lambda r, x, w: call(r, x, w, alpha=1 / 3)  # noqa: E731
    fuse(name, body, *operands(name, torch.float64))


@pytest.mark.slow
@both
def test_sizes_that_change(name: str) -> None:
    call = getattr(torch, name)
    fuse(name, lambda r, x, w: call(r, x, w, alpha=0.5), dynamic=True)


@pytest.mark.each_once
@both
@pytest.mark.parametrize("learns", [*itertools.product([False, True], repeat=3)], ids=str)
def test_gradients(learns: tuple[bool, ...], name: str) -> None:
    inputs = [t.detach().requires_grad_(g) for t, g in zip(operands(name), learns)]
    call = getattr(torch, name)
    body = lambda r, x, w: call(r, x, w, beta=0.5, alpha=3)  # noqa: E731
    fuse(name, body, *inputs, train=any(learns))


@both
def test_an_exported_program(name: str) -> None:
    call = getattr(torch, name)
    model = Program(lambda m, r, x, w: call(r, x, w, beta=0.5, alpha=3).relu())
    inputs = [t.detach() for t in operands(name)]
    program = torch.export.export(model, tuple(inputs))
    options = {"cpu_ops": True, "strict": True, **GROWTH}
    rewritten = fx_fuser.fuse_exported(program, options=options)
    assert fused() == {kind(name): 1}
    torch.testing.assert_close(rewritten.module()(*inputs), model(*inputs))


def test_a_gemm_alone_may_be_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its multiple and the sum are then calls of their own."""

    def batch(x, weight):  # type: ignore[no-untyped-def]
        return torch.bmm(x, weight)

    monkeypatch.setattr(registry, "_patterns", list(registry._patterns))
    fx_fuser.register_pattern(batch)
    model = Program(lambda m, r, x, w: torch.baddbmm(r, x, w, beta=2, alpha=3))
    graphs = check(model, *operands("baddbmm"), fuses={"batch": 1}, patterns=["batch"])
    called = calls(graphs)
    assert (called["mul"], called["add"], called["baddbmm"]) == (1, 1, 0)


# ---- an addend times 0 ---------------------------------------------------------------------------


@both
@pytest.mark.parametrize("alpha", [1, 0.125])
def test_an_addend_of_no_values(alpha: float, name: str) -> None:
    """As attention gives an empty buffer for it."""
    _, x, w = operands(name)
    call = getattr(torch, name)

    def body(x: Tensor, w: Tensor) -> Tensor:
        empty = torch.empty(*x.shape[:-1], w.shape[-1], dtype=x.dtype)
        return call(empty, x, w, beta=0, alpha=alpha)

    assert fuse(name, body, x, w) == ["" if alpha == 1 else "v0 = mul(z, s0)"]


@both
def test_an_addend_times_0_is_not_read(name: str) -> None:
    addend, x, w = operands(name)
    addend = torch.full_like(addend, math.nan, requires_grad=False)
    call = getattr(torch, name)
    body = lambda r, x, w: call(r, x, w, beta=0, alpha=0.5)  # noqa: E731
    model = Program(lambda m, *tensors: body(*tensors))
    with torch.no_grad():
        got = compiled(model, **GROWTH)(addend, x, w)
    assert fused() == {kind(name): 1}
    torch.testing.assert_close(got, model(addend, x, w))
    assert bool(got.isfinite().all())


@both
def test_a_gradient_of_zeros_stays(name: str) -> None:
    call = getattr(torch, name)
    left(lambda r, x, w: call(r, x, w, beta=0, alpha=0.5), *operands(name))


# ---- what stays ----------------------------------------------------------------------------------


def left(body: Callable[..., Any], *inputs: Tensor, **options: Any) -> dict[str, int]:
    """Nothing is fused, and the numbers are right; the calls of the graph."""
    model = Program(lambda m, *tensors: body(*tensors))
    return calls(check(model, *inputs, fuses={}, **{**GROWTH, **options}))


STAYS: dict[str, Callable[..., Tensor]] = {
    "alpha 0": lambda call, r, x, w: call(r, x, w, alpha=0),
    "beta and alpha 0": lambda call, r, x, w: call(r.detach(), x, w, beta=0, alpha=0.0),
    "beta 0 of what is made": lambda call, r, x, w: call(r.detach().cos(), x, w, beta=0),
    "in bfloat16": lambda call, *t: call(*(u.bfloat16() for u in t), alpha=0.5),
    "in float16": lambda call, *t: call(*(u.half() for u in t), beta=2),
}


@both
@pytest.mark.parametrize("case", STAYS)
def test_what_stays(case: str, name: str) -> None:
    """In 16 bits it rounds once. Times 0, x and w are not read: a NaN of theirs does not spread."""
    call = getattr(torch, name)
    called = left(lambda r, x, w: STAYS[case](call, r, x, w), *operands(name))
    assert called[name] == 1 and not called.keys() & {"bmm", "mm", "mul", "add"}


@both
def test_integers_stay(name: str) -> None:
    inputs = [torch.randint(9, t.shape) for t in operands(name)]
    call = getattr(torch, name)
    left(lambda r, x, w: call(r, x, w, alpha=2), *inputs, train=False)


@both
def test_under_autocast_it_stays(name: str) -> None:
    """Its result is in 16 bits."""
    call = getattr(torch, name)
    model = Program(lambda m, r, x, w: call(r, x, w, alpha=0.5))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        got = compiled(model, **GROWTH)(*operands(name))
    assert fused() == {} and got.dtype == torch.bfloat16


@both
def test_in_place_it_stays(name: str) -> None:
    def body(r: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        r = r * 1.0
        y = getattr(r, f"{name}_")(x, w, alpha=0.5)
        return y * 2.0, r

    assert left(body, *operands(name))[name] == 1


@pytest.mark.parametrize("name", ["baddbmm_", "addmm_"])
def test_an_overload_that_writes_stays(name: str) -> None:
    """Its addend has the result afterwards, which came out as it was before."""
    overload = getattr(aten, name).default

    def body(r: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        r = r * 1.0
        y = overload(r, x, w)
        return y * 2.0, r

    left(body, *operands(name.rstrip("_")))


@both
def test_a_given_result_stays(name: str) -> None:
    call = getattr(torch, name)
    body = lambda r, x, w: call(r, x, w, alpha=2, out=torch.empty_like(r))  # noqa: E731
    left(body, *(t.detach() for t in operands(name)), train=False)


@both
def test_a_factor_that_changes_stays(name: str) -> None:
    """Its number is no constant of the graph. (AOTAutograd would have Dynamo make it one.)"""
    call = getattr(torch, name)
    model = Program(lambda m, r, x, w: call(r, x, w, alpha=m.scale))
    model.scale = 0.5
    compiled_model = compiled(model.eval(), inner="eager", **GROWTH)
    inputs = [t.detach() for t in operands(name)]
    with torch.no_grad():
        for model.scale in (0.5, 0.25, 3.5):
            torch.testing.assert_close(compiled_model(*inputs), model(*inputs))
    assert fused() == {kind(name): 1}  # the first graph's, of 0.5 as a constant


OTHERS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "addbmm": (torch.addbmm, ((4, 6), (3, 4, 8), (3, 8, 6))),
    "addmv": (torch.addmv, ((4,), (4, 8), (8,))),
    "addr": (torch.addr, ((4, 6), (4,), (6,))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_sums_of_other_products_stay(name: str) -> None:
    call, shapes = OTHERS[name]
    inputs = [leaf(*shape) for shape in shapes]
    assert left(lambda r, x, w: call(r, x, w, beta=2, alpha=0.5), *inputs)[name] == 1


@both
def test_what_is_not_fused_is_as_it_was_written(name: str) -> None:
    """Beside a site that is: it reads the fused result, and its factors keep their form."""
    batches = name == "baddbmm"
    call = getattr(torch, name)

    def body(m: Any, r: Tensor, x: Tensor, w: Tensor) -> Tensor:
        z = F.silu(m.lin(x)) * 2.0
        return torch.tanh(call(r, z, w, alpha=3, beta=0.5))

    model = Program(body, lin=nn.Linear(8, 8))
    graphs = check(model, *operands(name), fuses={MUL: 1}, leaves=(name,))
    (node,) = (n for n in graphs[0].graph.nodes if n.target is call)
    assert node.kwargs == {"alpha": 3, "beta": 0.5} and "getitem" in str(node.args[1])
    assert not calls(graphs).keys() & ({"bmm"} if batches else {"mm"})
