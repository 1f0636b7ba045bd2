"""Heads as trainers write them: in pieces, scaled in place, with the classes second. Each is one
op, or stays exactly as it is written."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads import BF16, F16, IGNORED, B, Body, T, V, autocast, check, labels, model, rows, widened
from helpers import Program, calls, compiled, recorded
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fx_fuser

# ---- in pieces -----------------------------------------------------------------------------------


def by_rows(logits: Tensor, index: Tensor) -> Tensor:
    """As trl's of fp32 logits."""
    picked = torch.gather(logits, dim=-1, index=index.unsqueeze(-1))
    lse = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    return (picked - lse.unsqueeze(-1)).squeeze(-1)


def by_rows_of_16_bits(logits: Tensor, index: Tensor) -> Tensor:
    """As trl's and verl's of bf16 logits."""
    found = []
    for row, of_row in zip(logits, index, strict=True):
        found.append(F.log_softmax(row, dim=-1).gather(dim=-1, index=of_row.unsqueeze(-1)))
    return torch.stack(found).squeeze(-1)


def by_chunks(logits: Tensor, index: Tensor, size: int = 4) -> Tensor:
    """As OpenRLHF's."""
    flat = logits.reshape(-1, V)
    lse = torch.zeros(len(flat), device=logits.device, dtype=logits.dtype)
    for first in range(0, len(flat), size):
        end = min(first + size, len(flat))
        lse[first:end] = torch.logsumexp(flat[first:end], dim=-1)
    picked = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return picked - lse.view(index.shape)


def trl(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return by_rows(m.biased(x).float(), y.clamp(min=0))


def trl_16_bits(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return by_rows_of_16_bits(m.head(x)[:, :-1], y.clamp(min=0)[:, 1:])


def preferred(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """As the loss of DPO in trl, which writes to the log-probabilities."""
    likely = by_rows(m.head(x).float()[..., :-1, :], y.clamp(min=0)[..., 1:])
    likely[y[..., 1:] == IGNORED] = 0.0
    chosen, rejected = likely.sum(1).chunk(2, 0)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def of_a_policy(m: Program, x: Tensor, y: Tensor) -> Any:
    """As GRPO in trl: a temperature in place, and an entropy without a gradient."""
    logits = m.head(x).float()[:, :-1, :]
    logits = logits[:, -5:, :]
    logits.div_(0.9)
    likely = by_rows(logits, y.clamp(min=0)[:, -5:])
    with torch.no_grad():
        found = []
        for chunk in logits.reshape(-1, V).split(4, dim=0):
            chunk = F.log_softmax(chunk, dim=-1)
            found.append(-(chunk.exp() * chunk).sum(-1))
        entropy = torch.cat(found)
    return likely.exp().mean() + 0.0 * entropy.mean()


def verl(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """What is picked is read before the log-sum-exp, of fewer rows than the logits have."""
    logits, y = (m.head(x).float() / 0.8)[:, :-1], y.clamp(min=0)[:, 1:]
    picked = torch.gather(logits, dim=-1, index=y.unsqueeze(-1)).squeeze(-1)
    return picked - torch.stack([logit.logsumexp(-1) for logit in logits])


def packed(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """verl's without padding: a token is a row."""
    logits, y = m.head(x).float().view(-1, V), y.clamp(min=0).view(-1)
    lse = torch.stack([torch.logsumexp(token, dim=0) for token in logits.unbind()])
    return logits.gather(1, y[:, None]).squeeze(1) - lse


def openrlhf(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    logits.div_(0.7)
    return by_chunks(logits, y.clamp(min=0))


def openrlhf_16_bits(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return by_chunks(m.biased(x), y.clamp(min=0), 5)


def nemo(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """Rows are taken after log_softmax."""
    likely = F.log_softmax(m.head(x).float() / 0.8, dim=-1)[:, :-1]
    return likely.gather(-1, y.clamp(min=0)[:, 1:].unsqueeze(-1)).squeeze(-1)


def nemo_by_chunks(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """Of the sequence, cast one by one."""
    logits, y, found = m.head(x), y.clamp(min=0), []
    for first in range(0, T, 3):
        likely = logits[:, first : first + 3].float().log_softmax(-1)
        index = y[:, first : first + 3].unsqueeze(-1)
        found.append(torch.gather(likely, -1, index).squeeze(-1))
    return torch.cat(found, dim=1)


def torchtune(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """Each sample is cast to the result's dtype."""
    logits, y = m.head(x), y.clamp(min=0)
    out = torch.empty_like(y, dtype=torch.float32)
    for i in range(B):
        likely = F.log_softmax(logits[i] / 0.7, dim=-1)
        out[i] = torch.gather(likely, 1, y[i].unsqueeze(-1)).squeeze(-1)
    return out


def litgpt(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits, y = m.head(x).reshape(-1, V), y.reshape(-1)
    losses = [
        F.cross_entropy(chunk, of_chunk, ignore_index=IGNORED, reduction="none")
        for chunk, of_chunk in zip(logits.split(4), y.split(4))
    ]
    count = (y != IGNORED).sum()
    return torch.cat(losses).sum() / count.maximum(torch.ones_like(count))


# ---- in place, and with the classes second -------------------------------------------------------


def scaled_in_place(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x)
    logits /= 1.7
    return F.cross_entropy(logits.float().view(-1, V), y.view(-1))


def capped_in_place(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float().view(-1, V)
    logits.div_(5.0)
    logits = logits.tanh()
    return F.cross_entropy(5.0 * logits, y.view(-1))


def scaled_view(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x)[:, :-1]
    logits *= 1.5
    likely = logits.float().log_softmax(-1)
    return likely.gather(-1, y[:, 1:].clamp(min=0).unsqueeze(-1))


def classes_second(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).float().transpose(1, 2), y, label_smoothing=0.1)


def classes_second_of_each_row(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.biased(x).permute(0, 2, 1)
    losses = F.cross_entropy(logits, target=y, reduction="none", ignore_index=0)
    return (losses * (y != 1)).sum()


def policy_gradient(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """Some labels count from the end."""
    likely = F.log_softmax(m.biased(x).float().view(-1, V), dim=-1)
    y = torch.where(y == IGNORED, -1, y).view(-1)
    return -(likely[torch.arange(len(y)), y] * 0.5).mean()


def by_an_index(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits, y = m.head(x).float().flatten(0, 1), y.clamp(min=0).flatten()
    return logits.logsumexp(-1) - logits[torch.arange(0, B * T, device=x.device), y]


FORMS = [
    trl, trl_16_bits, preferred, of_a_policy, verl, packed, openrlhf, openrlhf_16_bits, nemo,
    nemo_by_chunks, torchtune, litgpt, scaled_in_place, capped_in_place,
    scaled_view, classes_second, classes_second_of_each_row, policy_gradient, by_an_index,
]  # fmt: skip


@pytest.mark.parametrize("body", FORMS, ids=lambda body: body.__name__)
@pytest.mark.each_once
def test_under_autocast(body: Body) -> None:
    y = labels(B, T).clamp(min=0) if body is classes_second_of_each_row else labels(B, T)
    check(model(autocast(body)), rows(B, T), y)


@pytest.mark.parametrize("body", FORMS, ids=lambda body: body.__name__)
@pytest.mark.one_in(6)
def test_in_a_checkpoint_under_autocast(body: Body) -> None:
    """Whose body does not show the autocast: results are in fp32 all the same."""
    y = labels(B, T).clamp(min=0) if body is classes_second_of_each_row else labels(B, T)
    again = partial(checkpoint, body, use_reentrant=False)
    check(model(autocast(again)), rows(B, T), y)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("body", FORMS, ids=lambda body: body.__name__)
@pytest.mark.slow
def test_weights_of_16_bits(body: Body, dtype: torch.dtype) -> None:
    y = labels(B, T).clamp(min=0) if body is classes_second_of_each_row else labels(B, T)
    check(model(body, dtype), rows(B, T, dtype=dtype), y)


@pytest.mark.parametrize("method", [by_rows, by_chunks])
def test_of_a_head_in_fp32(method: Any) -> None:
    def body(m: Program, x: Tensor, y: Tensor) -> Tensor:
        logits = F.linear(widened(x), widened(m.head.weight))[:, :-1]
        logits.div_(0.9)
        return method(logits, y.clamp(min=0)[:, 1:])

    check(model(body, BF16), rows(B, T, dtype=BF16), labels(B, T))


# ---- what stays as it is written -----------------------------------------------------------------


def _picked(logits: Tensor, y: Tensor) -> Tensor:
    return logits.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def in_another_order(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float().flatten(0, 1)
    lse = [logits[a:b].logsumexp(-1) for a, b in ((2, 4), (0, 2), (4, B * T))]
    return torch.cat(lse) - _picked(logits, y.flatten())


def rows_from_the_second(m: Program, x: Tensor, y: Tensor) -> Tensor:
    likely = m.head(x).float().flatten(0, 1).log_softmax(-1)
    return likely[torch.arange(1, B * T), y.clamp(min=0).flatten()[1:]]


def rows_backwards(m: Program, x: Tensor, y: Tensor) -> Tensor:
    likely = m.head(x).float().flatten(0, 1).log_softmax(-1)
    return likely[torch.arange(B * T - 1, -1, -1), y.clamp(min=0).flatten()]


def every_row_for_each_label(m: Program, x: Tensor, y: Tensor) -> Tensor:
    likely = m.head(x).float().flatten(0, 1).log_softmax(-1)
    return likely[torch.arange(B * T).unsqueeze(1), y.clamp(min=0).flatten()]


def one_row_twice(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    return torch.stack([logits[i].logsumexp(-1) for i in (0, 0)]) - _picked(logits, y)


def one_row_of_all(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    return torch.stack([logits[0].logsumexp(-1)]) - _picked(logits, y)


def labels_in_another_order(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits, y = m.head(x), y.clamp(min=0).unsqueeze(-1)
    return torch.stack([logits[i].log_softmax(-1).gather(-1, y[1 - i]) for i in range(B)])


def one_row_scaled(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    lse = [logits[0].logsumexp(-1), (logits[1] * 2).logsumexp(-1)]
    return torch.stack(lse) - _picked(logits, y)


def put_together_otherwise(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    lse = torch.stack([row.logsumexp(-1) for row in logits], dim=1)
    return lse.square().sum() - _picked(logits, y).sum()


def of_columns(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """A log-sum-exp of each part of the classes."""
    logits = m.head(x).float()
    parts = [part.logsumexp(-1) for part in logits.split(17, dim=-1)]
    return torch.cat(parts, dim=-1).square().sum() - _picked(logits, y).sum()


def of_one_token_and_columns(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """Along the only dimension that a piece has, which is cut."""
    logits = m.head(x[0, 0]).float()
    parts = [part.logsumexp(-1, keepdim=True) for part in logits.split(17)]
    return torch.cat(parts).square().sum() - logits.gather(-1, y[0, :1])


def over_rows(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    lse = torch.stack([row.logsumexp(0) for row in logits])
    return lse.square().sum() - _picked(logits, y).sum()


def written_between_rows(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    first = logits[0].logsumexp(-1)
    logits.detach().mul_(0.5)
    return torch.stack([first, logits[1].logsumexp(-1)]) - _picked(logits, y)


def labels_written_between_rows(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits, y = m.head(x), y.clamp(min=0).unsqueeze(-1)
    first = logits[0].log_softmax(-1).gather(-1, y[0])
    y.zero_()
    return torch.stack([first, logits[1].log_softmax(-1).gather(-1, y[1])])


def one_row_without_a_gradient(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    with torch.no_grad():
        second = logits[1].logsumexp(-1)
    first = logits[0].logsumexp(-1)
    return torch.stack([first, second]) - _picked(logits, y)


def with_a_gap(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    lse = torch.zeros(B, T)
    lse[:, :2] = logits[:, :2].logsumexp(-1)
    lse[:, 3:] = logits[:, 3:].logsumexp(-1)
    return lse - _picked(logits, y)


def elsewhere(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """Rows are written to other places than they come from."""
    logits = m.head(x).float()
    lse = torch.zeros(B, T)
    lse[1] = logits[0].logsumexp(-1)
    lse[0] = logits[1].logsumexp(-1)
    return lse - _picked(logits, y)


def read_too_early(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    picked, lse = _picked(logits, y), torch.zeros(B, T)
    lse[0] = logits[0].logsumexp(-1)
    half = lse.sum()
    lse[1] = logits[1].logsumexp(-1)
    return lse - picked + half


def written_twice(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    picked, lse = _picked(logits, y), torch.zeros(B, T)
    lse[0] = logits[0].logsumexp(-1)
    lse[1] = logits[1].logsumexp(-1)
    lse.view(-1)[0] = 1.0
    return lse - picked


def a_row_is_read_too(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    lse = [row.logsumexp(-1) for row in logits]
    return torch.stack(lse) - _picked(logits, y) + lse[0].square().sum()


def scaled_after_it_is_read(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    largest = logits.detach().amax()
    logits.div_(2)
    return F.cross_entropy(logits.view(-1, V), y.view(-1)) + largest


def read_by_another_name(m: Program, x: Tensor, y: Tensor) -> Any:
    logits = m.head(x)
    rows = logits.view(-1, V)
    rows.mul_(2)
    return F.cross_entropy(rows.float(), y.flatten()), logits.detach().amax()


def soft_labels_second(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    return F.cross_entropy(logits.transpose(1, 2), F.one_hot(y.clamp(min=0), V).mT.float())


def classes_first(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """Of two classes: which of the samples."""
    return F.cross_entropy(m.head(x).float().transpose(0, 1), torch.zeros(T, V, dtype=torch.int64))


def a_view_is_read_too(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    return F.cross_entropy(logits.view(-1, V), y.view(-1)) + logits[0].square().mean()


STAY = [
    rows_from_the_second, rows_backwards, every_row_for_each_label,
    in_another_order, one_row_twice, one_row_of_all, labels_in_another_order, one_row_scaled,
    put_together_otherwise, of_columns, of_one_token_and_columns, over_rows, written_between_rows,
    labels_written_between_rows,
    one_row_without_a_gradient, with_a_gap, elsewhere, read_too_early, written_twice,
    a_row_is_read_too, scaled_after_it_is_read, read_by_another_name, soft_labels_second,
    classes_first, a_view_is_read_too,
]  # fmt: skip


@pytest.mark.parametrize("body", STAY, ids=lambda body: body.__name__)
@pytest.mark.each_once
def test_what_stays(body: Body) -> None:
    given = model(autocast(body)), rows(B, T), labels(B, T)
    report = fx_fuser.explain(*given, options={"cpu_ops": True, "strict": True})
    assert all(head.reason for head in report.heads)


def test_a_head_that_stays_is_as_written() -> None:
    """Although another part of its graph is fused."""

    def body(m: Program, x: Tensor, y: Tensor) -> Tensor:
        x = F.gelu(m.biased(x)) @ m.w.t()
        logits = m.head(x).float()
        logits.div_(0.9)
        likely = by_rows(logits, y.clamp(min=0)) + by_chunks(logits, y.clamp(min=0), 7)
        losses = F.cross_entropy(logits.transpose(1, 2), y, reduction="none")
        return likely.sum() + losses.sum() + logits.softmax(-1).square().sum()

    program = model(autocast(body))
    with recorded() as graphs:
        compiled(program, auto=True)(rows(B, T), labels(B, T))
    found = calls(graphs)
    assert found["stack"] == found["zeros"] == found["transpose"] == 1
    assert found["logsumexp"] == 2 * B and found["setitem"] == B
    assert any(name.startswith("fx_fuser") for name in found)
