"""The loss of a Linear whose logits the graph returns, or reads for something else: nobody can
tell, and a gradient that nobody sends through the logits is not made."""

from __future__ import annotations

import math
from collections.abc import Callable
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
)
from helpers import Program, calls, compiled, recorded
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fx_fuser
from fx_fuser.ops import head_kept, head_loss

SLOW = pytest.mark.slow


def returned(m: Program, x: Tensor, y: Tensor) -> Any:
    logits = m.biased(x)
    return F.cross_entropy(logits.float().view(-1, V), y.view(-1)), logits


def as_causal_models(m: Program, x: Tensor, y: Tensor) -> Any:
    """transformers' models, of a batch whose size somebody else has counted."""
    logits = m.head(x[:, slice(0, None), :])
    moved = F.pad(y, (0, 1), value=IGNORED)[..., 1:].contiguous()
    given = logits.float().view(-1, V), moved.view(-1)
    total = F.cross_entropy(*given, ignore_index=IGNORED, reduction="sum")
    return {"loss": total / torch.tensor(9), "logits": logits}


def in_fp32_and_as_rows(m: Program, x: Tensor, y: Tensor) -> Any:
    """What is returned is a copy in fp32, and a view of it."""
    logits = m.head(x).float()
    flat = logits.view(-1, V)
    return F.cross_entropy(flat, y.view(-1)), logits, flat


def by_matmul(m: Program, x: Tensor, y: Tensor) -> Any:
    logits = (x @ m.w).flatten(0, 1)
    return logits, F.cross_entropy(logits, y.flatten())


def of_hidden_states(m: Program, x: Tensor, y: Tensor) -> Any:
    """The graph returns what the Linear multiplies, too."""
    h = x.tanh()
    logits = m.biased(h)
    return F.cross_entropy(logits.view(-1, V), y.view(-1)), logits, h


def also_an_accuracy(m: Program, x: Tensor, y: Tensor) -> Any:
    logits = m.head(x).float().view(-1, V)
    hits = (logits.argmax(-1) == y.view(-1)).float().mean()
    return F.cross_entropy(logits, y.view(-1)) + hits, hits


def of_log_softmax(m: Program, x: Tensor, y: Tensor) -> Any:
    logits = m.head(x)
    likely = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    return F.nll_loss(likely.view(-1, V), y.view(-1)), logits


def of_each_row(m: Program, x: Tensor, y: Tensor) -> Any:
    """Forward does not know what their gradients are multiples of."""
    losses = F.cross_entropy(m.biased(x)[:, 1:].flatten(0, 1), y[:, 1:].flatten(), reduction="none")
    return losses.square().mean(), losses


def of_each_row_and_returned(m: Program, x: Tensor, y: Tensor) -> Any:
    logits = m.biased(x).view(-1, V)
    return F.cross_entropy(logits, y.view(-1), reduction="none"), logits


def likely_tokens(m: Program, x: Tensor, y: Tensor) -> Any:
    """Log-probabilities of a sequence, as in reinforcement learning."""
    y = y.clamp(min=0)
    likely = m.biased(x).float().log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return (likely.exp() * (y > 3)).sum(-1), likely


def likely_tokens_and_logits(m: Program, x: Tensor, y: Tensor) -> Any:
    logits = m.head(x)
    likely = F.log_softmax(logits, dim=2)
    return torch.gather(input=likely, dim=2, index=y.clamp(min=0)[..., None]), logits


def with_a_penalty(m: Program, x: Tensor, y: Tensor) -> Any:
    """A z-loss, of labels that do not count as well."""
    logits = m.biased(x).float().view(-1, V)
    return F.cross_entropy(logits, y.view(-1)) + 1e-2 * logits.logsumexp(-1).square().mean()


def penalty_first(m: Program, x: Tensor, y: Tensor) -> Any:
    """Read before the loss, of other views of the logits, which are returned."""
    logits = m.head(x)
    lse = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    penalty = (lse.squeeze(-1) * (y != IGNORED)).square().mean()
    how = {"reduction": "sum", "label_smoothing": 0.1}
    return F.cross_entropy(logits.float().view(-1, V), y.view(-1), **how) + penalty, logits


def also_a_log_sum_exp(m: Program, x: Tensor, y: Tensor) -> Any:
    """To be shown."""
    logits = m.head(x).float().view(-1, V)
    with torch.no_grad():
        shown = logits.logsumexp(-1).mean()
    return F.cross_entropy(logits, y.view(-1)), shown


def by_hand(m: Program, x: Tensor, y: Tensor) -> Any:
    logits = m.biased(x).float()
    y = y.clamp(min=0)
    return (logits.logsumexp(-1) - logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)).mean()


def by_hand_of_a_temperature(m: Program, x: Tensor, y: Tensor) -> Any:
    """Both before the labels' turn."""
    logits = (m.head(x) / 1.5)[:, :-1]
    lse, y = torch.logsumexp(logits, -1), y[:, 1:].clamp(min=0)[..., None]
    picked = torch.gather(logits, 2, y)[..., 0]
    return (picked - lse).exp().mean(), lse


def likely_with_a_penalty(m: Program, x: Tensor, y: Tensor) -> Any:
    logits = 4 * (m.head(x).float() / 4).tanh()
    likely = logits.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])
    return likely.sum() + logits.logsumexp(dim=2).square().sum()


def capped_and_returned(m: Program, x: Tensor, y: Tensor) -> Any:
    """As Gemma's."""
    logits = m.head(x) / 5.0
    logits = torch.tanh(logits) * 5.0
    return F.cross_entropy(logits.float().view(-1, V), y.view(-1)), logits


def steps_returned(m: Program, x: Tensor, y: Tensor) -> Any:
    """Raw, scaled, capped."""
    logits = m.biased(x)
    scaled = logits.float() * 0.3
    capped = scaled.tanh()
    return F.cross_entropy((capped * 8).view(-1, V), y.view(-1)), logits, scaled, capped


def of_each_row_capped(m: Program, x: Tensor, y: Tensor) -> Any:
    logits = (m.head(x).view(-1, V) / 3).tanh() * 6
    how = {"reduction": "none", "label_smoothing": 0.3}
    return F.cross_entropy(logits, y.view(-1), **how).square().mean()


def twice(m: Program, x: Tensor, y: Tensor) -> Any:
    loss, logits = returned(m, x, y)
    other, others = returned(m, x * 0.5, y)
    return loss + other, logits, others


FORMS = {
    returned: 1, as_causal_models: 1, in_fp32_and_as_rows: 1, by_matmul: 1, of_hidden_states: 1,
    also_an_accuracy: 1, of_log_softmax: 1, of_each_row: 1, of_each_row_and_returned: 1,
    likely_tokens: 1, likely_tokens_and_logits: 1, twice: 2, with_a_penalty: 1, penalty_first: 1,
    also_a_log_sum_exp: 1,
    by_hand: 1, by_hand_of_a_temperature: 1, likely_with_a_penalty: 1, capped_and_returned: 1,
    steps_returned: 1, of_each_row_capped: 1,
}  # fmt: skip


def first(made: Any) -> Any:
    """Without the logits."""
    return next(iter(made.values() if isinstance(made, dict) else made))


@pytest.mark.parametrize("body", FORMS, ids=lambda body: body.__name__)
@pytest.mark.slow
def test_under_autocast(body: Body) -> None:
    graphs = check(model(autocast(body)), rows(B, T), labels(B, T), heads=FORMS[body])
    assert calls(graphs)["fx_fuser::head_loss"] == FORMS[body]


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("body", FORMS, ids=lambda body: body.__name__)
@pytest.mark.each_once
def test_weights_of_16_bits(body: Body, dtype: torch.dtype) -> None:
    given = model(body, dtype), rows(B, T, dtype=dtype), labels(B, T)
    check(*given, heads=FORMS[body])


@pytest.mark.parametrize("body", [returned, as_causal_models], ids=lambda body: body.__name__)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.each_once
def test_a_gradient_of_the_loss_alone(body: Body, dtype: torch.dtype) -> None:
    check(model(autocast(body, dtype)), rows(B, T), labels(B, T), taken=first)


def test_a_gradient_of_the_logits_alone() -> None:
    check(model(autocast(returned)), rows(B, T), labels(B, T), taken=lambda made: made[1])


def test_a_tied_weight() -> None:
    """Its gradients add: of the embedding, of the loss, of the logits."""

    def body(m: Program, ids: Tensor) -> Any:
        logits = m.head(F.embedding(ids, m.head.weight).tanh())
        moved = F.pad(ids, (0, 1), value=IGNORED)[..., 1:].reshape(-1)
        return F.cross_entropy(logits.view(-1, V), moved), logits

    check(model(autocast(body)), torch.randint(0, V, (B, T)))


def test_losses_of_rows_without_gradients() -> None:
    """There the logits of all rows do not exist."""
    made, x, y = model(autocast(of_each_row)), rows(B, T), labels(B, T)
    with torch.no_grad(), recorded() as graphs:
        ours, expected = compiled(made, auto=True)(x, y), made(x, y)
    for one, other in zip(ours, expected):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0)
    assert found() == 1 and not calls(graphs)["fx_fuser::linear"]


@pytest.mark.parametrize("frozen", ["x", "head", "bias"])
def test_some_gradients_alone(frozen: str) -> None:
    made, x = model(autocast(returned)), rows(B, T)
    if frozen == "x":
        x.requires_grad_(False)
    else:
        of = {"head": made.biased.weight, "bias": made.biased.bias}
        of[frozen].requires_grad_(False)
    check(made, x, labels(B, T))


def test_only_who_sends_a_gradient_through_the_logits_pays_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = []
    backward = head_kept._Logits.backward

    def noted(ctx: Any, d_logits: Tensor) -> Any:
        sent.append(ctx.needs_input_grad)
        return backward(ctx, d_logits)

    monkeypatch.setattr(head_kept._Logits, "backward", staticmethod(noted))
    fast = compiled(model(autocast(returned)), auto=True, inner="aot_eager")
    loss, _ = fast(rows(B, T), labels(B, T))
    loss.backward()
    assert not sent and found() == 1
    loss, logits = fast(rows(B, T), labels(B, T))
    (loss + logits.sum()).backward()
    assert sent == [(True, True, True, False, False, False)]  # the graph's own logits have none


def test_what_notices_a_write_holds_no_logits() -> None:
    fast = compiled(model(autocast(returned)), auto=True, inner="aot_eager")
    loss, logits = fast(rows(B, T), labels(B, T))
    memory = StorageWeakRef(logits.untyped_storage())
    del logits
    loss.backward()
    assert memory.expired() and loss.grad_fn is not None


@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=SLOW)])
@pytest.mark.parametrize("of_alias", [True, False])
def test_a_write_to_the_logits_is_noticed(inner: str, of_alias: bool) -> None:
    """The loss needs them. Inductor alone computes its gradient from what was written."""
    fast = compiled(model(autocast(returned)), auto=True, inner=inner)
    loss, logits = fast(rows(B, T), labels(B, T))
    with torch.no_grad():
        (logits.detach()[0] if of_alias else logits).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_before_it_may_see_the_logits_written() -> None:
    """Its backward does not read them."""
    before = torch.compile(torch.sin, backend="aot_eager")
    x = rows(B, T)
    h = before(x)
    _, logits = compiled(model(autocast(returned)), auto=True)(h, labels(B, T))
    with torch.no_grad():
        logits.mul_(2)
    h.sum().backward()
    assert found() == 1 and torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]


@SLOW
def test_compiled_autograd() -> None:
    made, x, y = model(autocast(returned)), rows(B, T), labels(B, T)
    grads = []
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        for call in (made, compiled(made, auto=True)):
            made.zero_grad()
            loss, logits = call(x, y)
            (loss + logits.float().mean()).backward()
            grads.append(made.biased.weight.grad.clone())
    eager, ours = grads
    # Eager rounds the sum of both gradients to bf16, we round one of them: 2^-9 of either.
    assert found() == 1 and float((ours - eager).norm() / eager.norm()) < 2.0**-7


def test_a_second_backward_raises() -> None:
    x = rows(B, T)
    for at in (0, 1):
        made = compiled(model(autocast(returned)), auto=True, inner="eager")(x, labels(B, T))
        (grad,) = torch.autograd.grad(made[at].float().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="head_loss has no double backward"):
            grad.sum().backward()


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-3, 30.0, 3e3])
def test_small_and_large_logits(size: float) -> None:
    """To 1e4 in magnitude."""
    check(model(autocast(returned)), rows(B, T, size=size), labels(B, T), taken=first)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite(wrong: float) -> None:
    """The same elements are NaN as in eager: of a row that counts, and of one that does not."""
    made, y = model(autocast(returned)), labels(B, T)
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
            loss, logits = call(leaf, y)
            loss.backward()
            results.append([loss, logits, leaf.grad, made.biased.weight.grad])
        for ours, expected in zip(*results):
            assert torch.equal(ours.isnan(), expected.isnan())
    assert found() == 1


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_log_sum_exp_of_rows_that_are_not_finite(wrong: float) -> None:
    def body(m: Program, logits: Tensor, y: Tensor) -> Any:
        logits = (logits @ m.eye).float()
        lse = logits.logsumexp(-1)
        return lse - logits.gather(-1, y[..., None]).squeeze(-1), lse

    made = Program(autocast(body), eye=nn.Parameter(torch.eye(1)))
    x, y = torch.full((3, 1), wrong), torch.zeros(3, dtype=torch.long)
    x[0] = 1.0
    ours, expected = compiled(made, auto=True)(x, y), made(x, y)
    assert found() == 1
    for one, other in zip(ours, expected):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(B, T), (1, 0)], ids=str)
def test_where_no_label_counts(reduction: str, shape: tuple[int, ...]) -> None:
    """A mean of nothing is NaN, and its gradients are 0."""

    def body(m: Program, x: Tensor, y: Tensor) -> Any:
        logits = m.biased(x)
        return F.cross_entropy(logits.view(-1, V), y.view(-1), reduction=reduction), logits

    made, x = model(autocast(body)), rows(*shape)
    loss, logits = compiled(made, auto=True)(x, torch.full(shape, IGNORED))
    loss.backward()
    assert logits.shape == (*shape, V) and found() == 1
    assert loss.isnan() if reduction == "mean" else loss == 0
    grads = x.grad, made.biased.weight.grad, made.biased.bias.grad
    assert all(g is not None and not g.any() for g in grads)


def test_a_label_that_is_no_column_raises() -> None:
    made, y = compiled(model(autocast(returned)), auto=True), labels(B, T)
    y[1, 1] = V
    with pytest.raises(IndexError):
        made(rows(B, T), y)


@pytest.mark.parametrize("count", [1, 129, 300])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.each_pair
def test_pieces_of_rows(
    count: int, dtype: torch.dtype, casts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradients add as in one gemm."""
    monkeypatch.setattr(head_loss, "_ROWS", 1)
    made = model(autocast(returned, dtype)) if casts else model(returned, dtype)
    assert head_loss.pieces_of(count, made.biased.weight, dtype).rows == min(count, 128)
    x = rows(1, count, dtype=torch.float32 if casts else dtype)
    check(made, x, labels(1, count), taken=first)


def test_gradients_of_two_steps_add() -> None:
    made, y = model(autocast(returned)), labels(B, T)
    x, sums = torch.randn(2, B, T, K), []
    for call in (made, compiled(made, auto=True)):
        made.zero_grad()
        for part in x:
            (call(part, y)[0] / 2).backward()
        sums.append(made.biased.weight.grad.clone())
    assert found() == 1
    eager, ours = sums
    # Eager rounds each step's gradient to bf16, of 2^-9 at most.
    assert float((ours - eager).norm() / eager.norm()) < 2.0**-8


# ---- sizes, regions ------------------------------------------------------------------------------


@SLOW
def test_a_length_that_changes_is_one_graph() -> None:
    made = model(autocast(as_causal_models))
    fast = compiled(made, auto=True)
    for length in (5, 9, 6):
        x, y = torch.randn(B, length, K), labels(B, length)
        torch._dynamo.mark_dynamic(x, 1)
        torch._dynamo.mark_dynamic(y, 1)
        ours, expected = fast(x, y), made(x, y)
        torch.testing.assert_close(ours["loss"], expected["loss"], rtol=1e-5, atol=0)
        torch.testing.assert_close(ours["logits"], expected["logits"], rtol=2.0**-7, atol=2.0**-7)
        (ours["loss"] + ours["logits"].sum()).backward()
    assert found() == 1 and counters["stats"]["unique_graphs"] == 1


def test_behind_a_checkpoint() -> None:
    def body(m: Program, x: Tensor, y: Tensor) -> Any:
        return returned(m, checkpoint(torch.tanh, x, use_reentrant=False), y)

    check(model(autocast(body)), rows(B, T), labels(B, T), taken=first)


def test_in_a_checkpoint() -> None:
    """Which runs forward twice, and makes no gradient there."""

    def body(m: Program, x: Tensor, y: Tensor) -> Any:
        return checkpoint(lambda x, y: returned(m, x, y)[0], x, y, use_reentrant=False)

    graphs = check(model(autocast(body)), rows(B, T), labels(B, T))
    assert calls(graphs)["fx_fuser::linear"] == 1


@SLOW
@pytest.mark.parametrize("taken", [first, lambda made: made], ids=["loss", "both"])
def test_by_inductor(taken: Callable[[Any], Any]) -> None:
    check(model(autocast(returned)), rows(B, T), labels(B, T), taken=taken, inner="inductor")


@SLOW
def test_inductor_calls_fx_fuser() -> None:
    """Its caches have the graph the second time, but not what restores the gradient outside."""
    made, x, y = model(autocast(returned)), rows(B, T), labels(B, T)
    for count in (1, 2):
        torch._dynamo.reset()
        with fx_fuser.installed({"auto": True, "cpu_ops": True, "strict": True}):
            loss, logits = torch.compile(made)(x, y)
        (loss + logits.sum()).backward()
        assert found() == count and logits.requires_grad


def test_explain_says_what_is_saved() -> None:
    """The gradient of the loss by the logits, and that of zeros, but for a piece."""
    made, given = model(autocast(returned)), (rows(1, 200), labels(1, 200))
    report = fx_fuser.explain(made, *given, options={"cpu_ops": True})
    assert "in chunks of rows, without a gradient of all logits: " in " ".join(str(report).split())
    (head,) = report.heads
    logits, piece = 200 * V * 2, 200 * head_loss.width_of(V) * 2
    assert head.bytes == 2 * logits - piece
    made = model(autocast(also_an_accuracy))
    (head,) = fx_fuser.explain(made, *given, options={"cpu_ops": True}).heads
    assert head.bytes == 0  # but for the copy in fp32, which Inductor need not make
