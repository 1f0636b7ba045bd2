"""Heads in fp32 of operands that were cast up from 16 bits: found, exact, without the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    widened,
)
from helpers import Program, compiled, recorded
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fx_fuser.ops import head_wide as op
from fx_fuser.ops import run


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of columns; those of rows have 128 at least."""
    monkeypatch.setattr(op, "height_of", lambda count, most: max(min(count, 13), 1))


def logits_of(m: Program, x: Tensor) -> Tensor:
    return F.linear(widened(x), widened(m.head.weight))


# ---- what is one op ------------------------------------------------------------------------------


def likely_tokens(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """As trl's and NeMo-RL's."""
    likely = logits_of(m, x).log_softmax(-1)
    return likely.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def written_result(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """Nothing reads what is written."""
    likely = likely_tokens(m, x, y)
    likely *= 0.5
    return likely.sin()


def by_hand(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = widened(x) @ widened(m.head.weight).t()
    picked = logits.gather(-1, y.clamp(min=0)[..., None]).squeeze(-1)
    return picked - logits.logsumexp(dim=-1)


def of_a_temperature(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = logits_of(m, x)[:, :-1] / 0.7
    return torch.gather(logits.log_softmax(-1), 2, y[:, 1:].clamp(min=0).unsqueeze(2))


def crossed(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(m, x).view(-1, V), y.view(-1))


def summed(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = logits_of(m, x[:, 1:]).flatten(0, 1)
    labels = y[:, 1:].clamp(min=0).flatten()
    return F.cross_entropy(logits, labels, ignore_index=V - 1, reduction="sum")


def of_each_row(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(m, x).view(-1, V), y.view(-1), reduction="none")


def biased(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(widened(x), widened(m.biased.weight), widened(m.biased.bias))
    return F.nll_loss(logits.view(-1, V).log_softmax(-1), y.view(-1))


def by_addmm(m: Program, x: Tensor, y: Tensor) -> Tensor:
    bias = widened(m.biased.bias) * 2
    logits = torch.addmm(bias, widened(x.view(-1, K)), widened(m.w))
    return F.cross_entropy(logits, y.view(-1))


def capped(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = torch.tanh(logits_of(m, x) / 3.0) * 3.0
    return F.cross_entropy(logits.view(-1, V), y.view(-1), label_smoothing=0.2)


def smoothed(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(m, x).view(-1, V), y.view(-1), label_smoothing=0.45)


def penalized(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = logits_of(m, x).view(-1, V)
    penalty = logits.logsumexp(-1, keepdim=True).square().mean()
    return F.cross_entropy(logits, y.view(-1), label_smoothing=0.1) + 0.1 * penalty


def behind_views(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """Of the casts' results, of which the weight's lies the other way."""
    wide = widened(x)[:, 1:].reshape(-1, K)
    return F.cross_entropy(wide @ widened(m.w.t()).t().contiguous(), y[:, 1:].flatten())


def of_a_hidden_state(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return crossed(m, x.tanh(), y)


def in_a_checkpoint(m: Program, x: Tensor, y: Tensor) -> Tensor:
    def both(x: Tensor, y: Tensor) -> Tensor:
        return likely_tokens(m, x, y)

    return checkpoint(both, x, y, use_reentrant=False)


def tied(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return crossed(m, F.embedding(y.clamp(min=0), m.head.weight) * x, y)


def shared_hidden_state(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """Whose gradients autograd adds in fp32, as those of a value head."""
    wide = widened(x)
    logits = wide @ widened(m.head.weight).t()
    loss = F.cross_entropy(logits.view(-1, V), y.view(-1))
    return loss + (wide * wide).sum(-1).sin().mean()


def shared_weight(m: Program, x: Tensor, y: Tensor) -> Tensor:
    wide = widened(m.head.weight)
    logits = F.linear(widened(x), wide)
    return F.cross_entropy(logits.view(-1, V), y.view(-1)) + wide.square().mean()


def without_autocast(m: Program, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        logits = logits_of(m, x)
    return F.cross_entropy(logits.view(-1, V), y.view(-1))


FORMS = [
    likely_tokens, written_result, by_hand, of_a_temperature, crossed, summed, of_each_row, biased,
    by_addmm, capped, smoothed, penalized, behind_views, of_a_hidden_state, in_a_checkpoint, tied,
    shared_hidden_state, shared_weight, without_autocast,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("body", FORMS, ids=lambda body: body.__name__)
@pytest.mark.each_once
def test_forms(body: Body, dtype: torch.dtype) -> None:
    check(model(body, dtype), rows(B, T, dtype=dtype), labels(B, T))


def test_of_fp32_weights_under_autocast_around_it() -> None:
    """Where the casts are of what a 16-bit Linear has made."""

    def body(m: Program, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.linear(x, m.w.t()[:K])
        with torch.autocast("cpu", enabled=False):
            logits = F.linear(widened(hidden), widened(m.head.weight.to(hidden.dtype)))
        return F.cross_entropy(logits.view(-1, V), y.view(-1))

    check(model(autocast(body)), rows(B, T), labels(B, T))


def test_under_autocast_it_is_a_head_of_16_bits() -> None:
    """There a Linear of fp32 values has a result of 16 bits."""
    made = model(autocast(crossed), BF16)
    with recorded() as graphs:
        compiled(made, auto=True)(rows(B, T, dtype=BF16), labels(B, T))
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert "fx_fuser.head_loss.default" in called and found() == 1


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_some_gradients_alone(frozen: str) -> None:
    made, x = model(biased, BF16), rows(B, T, dtype=BF16)
    of = {"x": x, "weight": made.biased.weight, "bias": made.biased.bias}
    of[frozen].requires_grad_(False)
    check(made, x, labels(B, T))


def test_a_cast_without_a_gradient_keeps_it_out() -> None:
    def body(m: Program, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            weight = widened(m.head.weight)
        logits = F.linear(widened(x), weight)
        return F.cross_entropy(logits.view(-1, V), y.view(-1))

    check(model(body, BF16), rows(B, T, dtype=BF16), labels(B, T))


def test_without_gradients() -> None:
    made, x, y = model(likely_tokens, BF16), rows(B, T, dtype=BF16), labels(B, T)
    with torch.no_grad():
        expected, ours = made(x, y), compiled(made, auto=True)(x, y)
    assert found() == 1
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("body", [crossed, likely_tokens, penalized])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.each_once
def test_rows_that_are_not_finite(body: Body, wrong: float) -> None:
    made, y, x = model(body, BF16), labels(B, T), rows(B, T, dtype=BF16)
    with torch.no_grad():
        x[0, 2] = x[1, 3] = wrong  # the first has no label that counts
    results = []
    for call in (made, compiled(made, auto=True)):
        leaf = x.detach().clone().requires_grad_()
        made.zero_grad()
        loss = call(leaf, y)
        loss.sum().backward()
        results.append([loss, leaf.grad, made.head.weight.grad])
    for ours, expected in zip(*results):
        assert torch.equal(ours.isnan(), expected.isnan())
    assert found() == 1


@pytest.mark.parametrize("count", [0, 1, 300])
@pytest.mark.parametrize("body", [crossed, likely_tokens])
@pytest.mark.each_once
def test_any_number_of_rows(body: Body, count: int) -> None:
    check(model(body, BF16), rows(1, count, dtype=BF16), labels(1, count))


def test_where_no_label_counts() -> None:
    check(model(crossed, BF16), rows(B, T, dtype=BF16), torch.full((B, T), IGNORED))


def test_a_label_that_is_no_column_raises() -> None:
    made, y = compiled(model(crossed, BF16), auto=True), labels(B, T)
    y[1, 1] = V
    with pytest.raises(IndexError):
        made(rows(B, T, dtype=BF16), y)


@pytest.mark.slow
def test_a_length_that_changes_is_one_graph() -> None:
    made = model(of_a_temperature, BF16)
    fast = compiled(made, auto=True)
    for length in (5, 9, 6):
        x, y = rows(B, length, dtype=BF16), labels(B, length)
        torch._dynamo.mark_dynamic(x, 1)
        torch._dynamo.mark_dynamic(y, 1)
        grads = []
        for call in (made, fast):
            loss = call(x, y)
            (grad,) = torch.autograd.grad(loss.sum(), x)
            grads += [loss, grad]
        torch.testing.assert_close(grads[:2], grads[2:], rtol=2**-7, atol=1e-4)
    assert found() == 1 and counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("body", [likely_tokens, crossed, penalized, tied])
def test_by_inductor(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which must not make the losses again in backward."""
    made, logits = [], op._logits
    monkeypatch.setattr(op, "_logits", lambda *given: made.append(logits(*given)) or made[-1])
    check(model(body, BF16), rows(B, T, dtype=BF16), labels(B, T), inner="inductor")
    assert len(made) == 2 + 4  # of 14 rows, and of 51 columns


def test_a_second_backward_raises() -> None:
    x = rows(B, T, dtype=BF16)
    loss = compiled(model(crossed, BF16), auto=True, inner="eager")(x, labels(B, T))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="head_loss has no double backward"):
        grad.sum().backward()


@pytest.fixture
def asks_for_tf32() -> Iterator[None]:
    gemms = torch.backends.cuda.matmul
    before, gemms.fp32_precision = gemms.fp32_precision, "tf32"
    yield
    gemms.fp32_precision = before


@pytest.mark.usefixtures("asks_for_tf32")
@pytest.mark.parametrize("fp32", ["follow", "split"])
@pytest.mark.parametrize("body", [likely_tokens, capped])
def test_where_torch_is_asked_for_tf32_the_library_multiplies(
    body: Body, fp32: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for who asks fx_fuser for more."""
    seen, logits = [], op._logits

    def noted(*given: Any) -> Tensor:
        seen.append(given[-1])
        return logits(*given)

    monkeypatch.setattr(op, "_logits", noted)
    check(model(body, BF16), rows(B, T, dtype=BF16), labels(B, T), fp32=fp32)
    assert seen and set(seen) == {fp32 == "follow"}


# ---- how exact, and what memory ------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_gradients_in_fp32(smoothing: float) -> None:
    """Before the casts round them: eager's error at most 1.5 times."""
    count, columns, k = 96, 400, 256
    x, weight = torch.randn(count, k).to(BF16), (torch.randn(columns, k) / 8).to(BF16)
    y = torch.randint(0, columns, (count,))

    def grads_of(dtype: torch.dtype, call: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [v.to(dtype).requires_grad_() for v in (x, weight)]
        loss = call(*leaves)
        return [loss, *torch.autograd.grad(loss, leaves)]

    def as_written(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), y, label_smoothing=smoothing)

    def as_one_op(x: Tensor, weight: Tensor) -> Tensor:
        how = BF16, False, torch.float32, IGNORED, "mean", [1.0, 0.0, smoothing]
        return op.HEAD_LOSS_WIDE(x, weight, None, y, *how)

    exact = grads_of(torch.float64, as_written)
    eager = grads_of(torch.float32, as_written)
    for ours, own, truth in zip(grads_of(torch.float32, as_one_op), eager, exact):
        error, bound = (float((v.detach().double() - truth.detach()).norm()) for v in (ours, own))
        assert error <= max(1.5 * bound, 2.0**-23 * float(truth.detach().norm()))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            with self:
                return function(*given)

        return call

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Else Dynamo compiles nothing."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, Tensor):
                self.most = max(self.most, one.numel())
        return made


@pytest.mark.parametrize("body", [crossed, likely_tokens, by_hand, penalized, in_a_checkpoint])
def test_no_tensor_has_all_logits(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    count, most = 128, []
    made, x, y = model(body, BF16), rows(1, count, dtype=BF16), labels(1, count)
    fast = compiled(made, auto=True)
    fast(x, y).sum().backward()  # compiles
    functions = {name: run._functions[name] for name in ("head_wide_losses", "head_wide_grads")}
    for call in (made, fast):
        seen = Largest()
        for name, function in functions.items():  # a mode does not see what is within an op
            inside = seen.over(function.in_torch)
            monkeypatch.setitem(run._functions, name, run._Function(inside, function.like))
        with seen:
            call(x, y).sum().backward()
        most.append(seen.most)
    assert found() == 1
    assert most == [count * V, count * 16]  # of a block of 13 columns, padded


@pytest.mark.parametrize("rows, columns, height, width", [
    (4096, 128256, 512, 16128),
    (16384, 128256, 512, 4096),
    (700, 50257, 700, 50257),
    (1 << 20, 128256, 512, 128),
    (0, 50257, 1, 50257),
])  # fmt: skip
def test_sizes_of_pieces(
    rows: int, columns: int, height: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert (op.piece_of(rows, columns), op.piece_of(columns, rows)) == (height, width)
