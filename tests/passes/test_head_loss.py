"""A Linear with the cross entropy of its rows: which are one op, and that nobody can tell."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads import (
    BF16,
    F16,
    IGNORED,
    B,
    Body,
    K,
    T,
    V,
    autocast,
    check,
    found,
    labels,
    model,
    rows,
    viewed,
)
from helpers import Program, calls, compiled, recorded
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fx_fuser
from fx_fuser.ops import head_loss as op

# ---- what is one op ------------------------------------------------------------------------------


def shifted(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.biased(x)[..., :-1, :].contiguous()
    return m.loss(logits.view(-1, V), y[..., 1:].contiguous().view(-1))


def as_causal_models(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """transformers' ForCausalLMLoss, of a batch whose size somebody else has counted."""
    logits = m.head(x[:, slice(0, None), :]).float()
    moved = F.pad(y, (0, 1), value=IGNORED)[..., 1:].contiguous()
    logits = logits.view(-1, V)
    total = F.cross_entropy(logits, moved.view(-1), ignore_index=IGNORED, reduction="sum")
    return total / torch.tensor(9)


def as_masked_models(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return m.loss(m.biased(x).view(-1, V), y.view(-1))


def by_matmul(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((x @ m.head.weight.T).flatten(0, 1), y.flatten())


def by_another_matmul(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((x @ m.w).reshape((-1, V)).to(torch.float32), y.reshape(-1))


def by_addmm(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = torch.addmm(m.biased.bias, x.view(-1, K), m.w)
    return F.cross_entropy(input=logits, target=y.view(-1), reduction="mean")


def of_a_few_rows(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x)[:, 1:].flatten(end_dim=-2)[2:-1]
    return F.cross_entropy(logits, y[:, 1:].flatten()[2:-1], ignore_index=0)


def of_one_sample(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x)[1, ..., 0:], y[1], reduction="sum")


def of_log_softmax(m: Program, x: Tensor, y: Tensor) -> Tensor:
    likely, y = F.log_softmax(m.head(x), dim=-1, dtype=torch.float32), y.clamp(min=0)
    return F.nll_loss(likely.view(-1, V), y.view(-1), ignore_index=V - 1, reduction="sum")


def by_modules(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return nn.NLLLoss()(m.biased(x).flatten(0, 1).log_softmax(1), y.view(-1))


def capped(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """As Gemma's."""
    logits = torch.tanh(m.head(x) / 5.0) * 5.0
    return F.cross_entropy(logits.float().view(-1, V), y.view(-1))


def capped_in_fp32(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = 7 * (m.biased(x).float().view(-1, V) * 0.25).tanh()
    return F.cross_entropy(logits / 0.5, y.view(-1), label_smoothing=0.2)


def of_a_temperature(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = (m.head(x) / 0.7)[:, :-1].flatten(0, 1)
    likely = F.log_softmax(-logits, dim=-1, dtype=torch.float32)
    return F.nll_loss(likely, y[:, 1:].flatten())


def smoothed(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.biased(x).float().view(-1, V)
    return nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")(logits, y.view(-1)) / 9


def twice(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return viewed(m, x, y) + 0.5 * shifted(m, x, y)


def linear_without_autocast(m: Program, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16, enabled=False):
        logits = m.biased(x.to(m.biased.weight.dtype))
    return F.cross_entropy(logits.float().view(-1, V), y.view(-1))


def loss_without_autocast(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """As who wants it in fp32 writes it."""
    logits = m.head(x)
    with torch.autocast("cpu", enabled=False):
        return F.cross_entropy(logits.float().view(-1, V), y.view(-1))


FORMS = {
    viewed: 1, shifted: 1, as_causal_models: 1, as_masked_models: 1, by_matmul: 1,
    by_another_matmul: 1, by_addmm: 1, of_a_few_rows: 1, of_one_sample: 1, of_log_softmax: 1,
    by_modules: 1, loss_without_autocast: 1, capped: 1, capped_in_fp32: 1, of_a_temperature: 1,
    smoothed: 1, twice: 2,
}  # fmt: skip


@pytest.mark.parametrize("body", FORMS, ids=lambda body: body.__name__)
def test_under_autocast(body: Body) -> None:
    check(model(autocast(body)), rows(B, T), labels(B, T), heads=FORMS[body])


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("body", FORMS, ids=lambda body: body.__name__)
@pytest.mark.each_once
@pytest.mark.one_in(5)
def test_weights_of_16_bits(body: Body, dtype: torch.dtype) -> None:
    """Without `float()` the loss has 16 bits, too."""
    check(model(body, dtype), rows(B, T, dtype=dtype), labels(B, T), heads=FORMS[body])


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_linear_without_autocast(inner: str) -> None:
    """Weights of bf16 are multiplied as they are, and the loss reads what it finds."""
    given = rows(B, T, dtype=BF16), labels(B, T)
    check(model(linear_without_autocast, BF16), *given, inner=inner)
    check(model(autocast(linear_without_autocast), BF16), *given, heads=2, inner=inner)


def test_autocast_of_the_linear_alone() -> None:
    def body(m: Program, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            logits = m.biased(x)
        return F.cross_entropy(logits.float().view(-1, V), y.view(-1))

    check(model(body), rows(B, T), labels(B, T))


def test_autocast_around_the_graph() -> None:
    made, x, y = model(viewed), rows(B, T), labels(B, T)
    with torch.autocast("cpu", BF16):
        expected = made(x, y)
        ours = compiled(made, auto=True)(x, y)
    assert found() == 1 and ours.dtype == expected.dtype
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)  # one sum of 14 terms in fp32
    ours.backward()


def test_a_tied_weight() -> None:
    """Its two gradients add."""

    def body(m: Program, ids: Tensor) -> Tensor:
        x = F.embedding(ids, m.head.weight).tanh()
        return F.cross_entropy(m.head(x[:, :-1]).view(-1, V), ids[:, 1:].reshape(-1))

    check(model(autocast(body)), torch.randint(0, V, (B, T)))


@pytest.mark.parametrize("frozen", ["x", "head", "bias"])
def test_some_gradients_alone(frozen: str) -> None:
    made, x = model(autocast(as_masked_models)), rows(B, T)
    if frozen == "x":
        x.requires_grad_(False)
    else:
        of = {"head": made.biased.weight, "bias": made.biased.bias}
        of[frozen].requires_grad_(False)
    check(made, x, labels(B, T))


def test_without_gradients_there_are_none() -> None:
    made, x, y = model(autocast(viewed)), rows(B, T), labels(B, T)
    with torch.no_grad(), recorded() as graphs:
        ours, expected = compiled(made, auto=True)(x, y), made(x, y)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)
    assert found() == 1 and calls(graphs)["fx_fuser::head_loss"] == 1


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_where_no_label_counts(reduction: str, dtype: torch.dtype) -> None:
    """A mean of nothing is NaN, and its gradients are 0."""

    def body(m: Program, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.biased(x).view(-1, V), y.view(-1), reduction=reduction)

    made, x = model(autocast(body, dtype)), rows(B, T)
    y = torch.full((B, T), IGNORED)
    loss = compiled(made, auto=True)(x, y)
    loss.backward()
    assert found() == 1 and loss.isnan() if reduction == "mean" else loss == 0
    grads = x.grad, made.biased.weight.grad, made.biased.bias.grad
    assert all(g is not None and not g.any() for g in grads)


@pytest.mark.parametrize("count", [0, 1])
def test_few_tokens(count: int) -> None:
    made, x, y = model(autocast(viewed)), rows(1, count), torch.full((1, count), V - 1)
    if count:
        check(made, x, y)
        return
    loss = compiled(made, auto=True)(x, y)
    loss.backward()
    assert found() == 1 and loss.isnan() and not made.head.weight.grad.any()


@pytest.mark.parametrize("size", [1e-3, 30.0, 3e3])
def test_small_and_large_logits(size: float) -> None:
    """To 1e4 in magnitude."""
    check(model(autocast(viewed)), rows(B, T, size=size), labels(B, T))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite(wrong: float) -> None:
    """The same elements are NaN as in eager: of a row that counts, and of one that does not."""
    made, y = model(autocast(as_masked_models)), labels(B, T)
    with torch.no_grad():
        made.biased.bias[5] = -math.inf  # a column that nobody may choose
    fast = compiled(made, auto=True)
    for row in ((0, 2), (1, 3)):  # the first is ignored
        x = torch.randn(B, T, K)
        x[row] = wrong
        results = []
        for call in (made, fast):
            leaf = x.clone().requires_grad_()
            made.zero_grad()
            loss = call(leaf, y)
            loss.backward()
            results.append([loss, leaf.grad, made.biased.weight.grad, made.biased.bias.grad])
        for ours, expected in zip(*results):
            assert torch.equal(ours.isnan(), expected.isnan())
    assert found() == 1


def test_a_label_that_is_no_column_raises() -> None:
    made, y = compiled(model(autocast(viewed)), auto=True), labels(B, T)
    y[1, 1] = V
    with pytest.raises(IndexError):
        made(rows(B, T), y)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_gradients_that_fp16_rounds_to_zero(scale: float) -> None:
    """Of a mean of many rows over many columns: eager's are lost unless a GradScaler scales them,
    these are not."""
    columns, count = 200_003, 64  # so that p is 84 times the least number of fp16
    made = Program(
        autocast(lambda m, x, y: F.cross_entropy(m.head(x), y), F16),
        head=nn.Linear(8, columns, bias=False),
    )
    nn.init.zeros_(made.head.weight)
    x, y = torch.randn(count, 8), torch.randint(0, 2, (count,))
    (compiled(made, auto=True)(x, y) * scale).backward()
    grad = made.head.weight.grad.double() / scale
    x, p = x.half().double(), torch.full((count, columns), 1 / columns, dtype=torch.double)
    exact = (p - F.one_hot(y, columns)).t() @ x / count
    # Each p is rounded once to fp16, 2^-11 of it at most, with signs that are x's.
    assert float((grad - exact).norm() / exact.norm()) < 2.0**-11
    rest = slice(2, None)  # the columns that no row has for a label
    assert float((grad[rest] - exact[rest]).norm() / exact[rest].norm()) < 2.0**-11


@pytest.mark.parametrize("temperature", [0.005, 300.0])
def test_gradients_of_fp16_behind_a_scale(temperature: float) -> None:
    """They neither overflow nor vanish: of a slope of 200, and of 1 / 300."""

    def body(m: Program, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.biased(x).float().view(-1, V) / temperature, y.view(-1))

    check(model(autocast(body, F16)), rows(B, T, size=temperature), labels(B, T))


def test_gradients_of_two_steps_add() -> None:
    made, y = model(autocast(viewed)), labels(B, T)
    x, sums = torch.randn(2, B, T, K), []
    for call in (made, compiled(made, auto=True)):
        made.zero_grad()
        for part in x:
            (call(part, y) / 2).backward()
        sums.append(made.head.weight.grad.clone())
    assert found() == 1
    eager, ours = sums
    # Eager rounds each step's gradient to bf16, of 2^-9 at most.
    assert float((ours - eager).norm() / eager.norm()) < 2.0**-8


# ---- sizes, regions, options ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_length_that_changes_is_one_graph() -> None:
    made = model(autocast(shifted))
    fast, eager = compiled(made, auto=True), made
    for length in (5, 9, 6):
        x, y = torch.randn(B, length, K), labels(B, length)
        torch._dynamo.mark_dynamic(x, 1)
        torch._dynamo.mark_dynamic(y, 1)
        torch.testing.assert_close(fast(x, y), eager(x, y), rtol=1e-5, atol=0)
    assert found() == 1 and counters["stats"]["unique_graphs"] == 1


def test_behind_a_checkpoint() -> None:
    def body(m: Program, x: Tensor, y: Tensor) -> Tensor:
        return viewed(m, checkpoint(torch.tanh, x, use_reentrant=False), y)

    check(model(autocast(body)), rows(B, T), labels(B, T))


@pytest.mark.slow
def test_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which must not compute it again in backward."""
    pieces = []
    multiply = op._linear
    monkeypatch.setattr(op, "_linear", lambda *given: pieces.append(multiply(*given)))
    check(model(autocast(shifted)), rows(B, T), labels(B, T), inner="inductor")
    assert len(pieces) == 1


def test_a_second_backward_raises() -> None:
    x = rows(B, T)
    loss = compiled(model(autocast(viewed)), auto=True, inner="eager")(x, labels(B, T))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="head_loss has no double backward"):
        grad.sum().backward()


@pytest.mark.parametrize(
    "options", [{"auto": False}, {"patterns": [], "auto": None}, {"cpu_ops": False}], ids=str
)
def test_options_that_leave_heads(options: dict[str, Any]) -> None:
    check(model(autocast(viewed)), rows(B, T), labels(B, T), heads=0, **options)


def test_explain_names_it() -> None:
    made = model(autocast(twice))
    options = {"cpu_ops": True}
    report = fx_fuser.explain(made, rows(B, T), labels(B, T), options=options)
    for said in (" ".join(str(report).split()), report.to_html()):
        assert "runs with its Linear, in chunks of rows, without the logits of all" in said
    assert type(report).from_json(report.to_json()) == report
    small = fx_fuser.explain(model(viewed), rows(B, T), labels(B, T), options=options)
    assert "its logits are torch.float32" in " ".join(str(small).split())


# ---- any -----------------------------------------------------------------------------------------

_CASTS = (lambda v: v.float(), lambda v: v.contiguous(), lambda v: v.to(torch.float32))


def _reshaped(sizes: Sequence[int], of: int) -> Callable[[Tensor], Tensor]:
    """of: how many dimensions that takes the place of."""
    return lambda v: v.reshape(*sizes, *v.shape[of:])


def random_moves(draw: random.Random, shape: tuple[int, ...]) -> list[Callable[[Tensor], Tensor]]:
    """What moves rows, or drops some, until there is one dimension of them. Each takes logits, or
    labels in their place."""
    moves: list[Callable[[Tensor], Tensor]] = []
    sizes = list(shape)
    for _ in range(draw.randint(0, 3)):
        dim = draw.randrange(len(sizes))
        kind = draw.choice(("slice", "index", "split", "join"))
        if kind == "slice" and sizes[dim] > 2:
            begin, end = draw.randint(0, 1), sizes[dim] - draw.randint(0, 1)
            index = (*[slice(None)] * dim, slice(begin, end))
            moves.append(lambda v, index=index: v[index])
            sizes[dim] = end - begin
        elif kind == "index" and len(sizes) > 1:
            index = (*[slice(None)] * dim, draw.randrange(sizes[dim]))
            moves.append(lambda v, index=index: v[index])
            del sizes[dim]
        elif kind == "split" and sizes[dim] % 2 == 0:
            sizes[dim : dim + 1] = [2, sizes[dim] // 2]
            moves.append(_reshaped(tuple(sizes), len(sizes) - 1))
        elif kind == "join" and len(sizes) > 1 and dim + 1 < len(sizes):
            sizes[dim : dim + 2] = [sizes[dim] * sizes[dim + 1]]
            moves.append(lambda v, dim=dim: v.flatten(dim, dim + 1))
    return [*moves, _reshaped([-1], len(sizes))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_moves(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(2, 6) for _ in range(draw.randint(1, 3)))
    moves = random_moves(draw, shape)
    casts = {i: draw.choice(_CASTS) for i in range(len(moves)) if draw.random() < 0.4}
    reduction, biased = draw.choice(("mean", "sum")), draw.random() < 0.5

    def body(m: Program, x: Tensor, y: Tensor) -> Tensor:
        logits = m.biased(x) if biased else m.head(x)
        for i, move in enumerate(moves):
            logits, y = casts.get(i, lambda v: v)(move(logits)), move(y)
        return F.cross_entropy(logits, y, reduction=reduction)

    y = torch.randint(0, V, shape)
    y[torch.rand(shape) < 0.2] = IGNORED
    y.view(-1)[-1] = V - 1
    check(model(autocast(body, draw.choice((BF16, F16)))), rows(*shape), y)
