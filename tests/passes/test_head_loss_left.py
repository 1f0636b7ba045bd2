"""Losses after a Linear that stay as they are written, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads import BF16, F16, B, Body, T, V, autocast, check, labels, model, rows, viewed
from helpers import Program
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fx_fuser
from fx_fuser.errors import BuildError
from fx_fuser.graph.read.heads import PLAIN, Head
from fx_fuser.graph.read.sites import Site
from fx_fuser.kernels.head_loss import spec_of
from fx_fuser.native import load
from fx_fuser.options import Options
from fx_fuser.passes import head_loss


def also_a_penalty(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float().view(-1, V)
    return F.cross_entropy(logits, y.view(-1)) + logits.square().mean()


def likely_returned(m: Program, x: Tensor, y: Tensor) -> Any:
    likely = m.head(x).view(-1, V).log_softmax(-1)
    return F.nll_loss(likely, y.view(-1)), likely


def returned_and_written(m: Program, x: Tensor, y: Tensor) -> Any:
    logits = m.head(x)
    loss = F.cross_entropy(logits.float().view(-1, V), y.view(-1))
    with torch.no_grad():
        logits.mul_(2)
    return loss, logits


def written_behind(m: Program, x: Tensor, y: Tensor) -> Any:
    logits = m.head(x)
    loss = F.cross_entropy(logits.float().view(-1, V), y.view(-1))
    logits.detach().view(-1)[0] = 1.0
    return loss, logits


def some_rows_of_what_is_returned(m: Program, x: Tensor, y: Tensor) -> Any:
    logits = m.head(x)
    moved = logits[..., :-1, :].contiguous().view(-1, V)
    return F.cross_entropy(moved, y[..., 1:].reshape(-1)), logits


def returned_without_training(m: Program, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        logits = m.head(x)
        loss = F.cross_entropy(logits.view(-1, V), y.view(-1))
    return loss * x.sum(), logits


def class_weights(m: Program, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 1.5, V, dtype=x.dtype)
    return F.cross_entropy(m.head(x).float().view(-1, V), y.view(-1), weight.float())


def soft_labels(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).view(-1, V)
    return F.cross_entropy(logits, F.one_hot(y.clamp(0).view(-1), V).to(logits.dtype))


def one_row(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x)[0, 0], y[0, 0])


def of_some_columns(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x)[..., :40].flatten(0, 1), y.view(-1).clamp(max=39))


def columns_turned_to_rows(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).view(V, -1), y.view(-1)[:1].clamp(0, T).expand(V))


def rounded_again(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).to(F16).float().view(-1, V), y.view(-1))


def without_its_gradient(m: Program, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        logits = m.head(x)
    return F.cross_entropy(logits.view(-1, V), y.view(-1)) * x.sum()


def written_in_between(m: Program, x: Tensor, y: Tensor) -> Tensor:
    h = x * 1.0
    with torch.no_grad():
        logits = m.head(h)
        h.zero_()
        loss = F.cross_entropy(logits.view(-1, V), y.view(-1))
    return loss * x.sum()


def of_log_softmax_twice(m: Program, x: Tensor, y: Tensor) -> Tensor:
    likely = m.head(x).view(-1, V).log_softmax(-1).log_softmax(-1)
    return F.nll_loss(likely, y.view(-1))


def of_softmax_over_rows(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(m.head(x).view(-1, V).log_softmax(0), y.view(-1))


def not_normalised(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(m.head(x).view(-1, V), y.view(-1))


def normalised_and_normalised(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).view(-1, V).log_softmax(-1), y.view(-1))


def two_of_a_row(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return m.head(x).log_softmax(-1).gather(-1, y.clamp(0)[..., None].expand(B, T, 2)).sum()


def of_a_few_rows(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """A gather drops rows that the index does not have."""
    return m.head(x).log_softmax(-1).gather(-1, y.clamp(0)[:, 1:, None]).sum()


def over_rows(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return m.head(x)[:, :1].log_softmax(-1).gather(1, y.clamp(0, 0)[:, :1, None]).sum()


def picked_and_an_entropy(m: Program, x: Tensor, y: Tensor) -> Tensor:
    likely = m.head(x).log_softmax(-1)
    return likely.gather(-1, y.clamp(0)[..., None]).sum() + (likely.exp() * likely).sum()


def two_losses_and_a_penalty(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float().view(-1, V)
    both = F.cross_entropy(logits, y.view(-1)) + F.cross_entropy(logits, y.view(-1).clamp(0))
    return both + logits.logsumexp(-1).mean()


def penalty_of_another_multiple(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float().view(-1, V)
    return F.cross_entropy(logits / 2, y.view(-1)) + logits.logsumexp(-1).mean()


def penalty_of_other_rows(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    loss = F.cross_entropy(logits[:, 1:].flatten(0, 1), y[:, 1:].flatten())
    return loss + logits.logsumexp(-1).mean()


def labels_of_a_log_sum_exp(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float().view(-1, V)
    lse = logits.logsumexp(-1)
    y = torch.where(lse > lse.mean(), y.view(-1), 0)
    return F.cross_entropy(logits, y) + lse.mean()


def labels_written_in_between(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits, y = m.head(x).float().view(-1, V), y.clone().view(-1)
    penalty = logits.logsumexp(-1).mean()
    y.masked_fill_(penalty.detach() > -1e9, 1)
    return F.cross_entropy(logits, y.view(-1)) + penalty


def penalty_without_training(m: Program, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        logits = m.head(x).float().view(-1, V)
        loss = F.cross_entropy(logits, y.view(-1)) + logits.logsumexp(-1).mean()
    return loss * x.sum()


def penalty_and_a_write(m: Program, x: Tensor, y: Tensor) -> Tensor:
    h = x.detach() * 1.0
    logits = m.head(h).float().view(-1, V)
    loss = F.cross_entropy(logits, y.view(-1)) + logits.logsumexp(-1).mean()
    with torch.no_grad():
        h.zero_()
    return loss


def log_sum_exp_alone(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return m.head(x).logsumexp(-1).sum()


def log_sum_exp_of_columns(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float().view(-1, V)
    return F.cross_entropy(logits, y.view(-1)) + logits.logsumexp((1, 0))


def log_sum_exp_over_rows(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float().view(-1, V)
    return F.cross_entropy(logits, y.view(-1)) + logits.logsumexp(0).sum()


def picked_alone(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return m.head(x).gather(-1, y.clamp(0)[..., None]).sum()


def smoothed_away(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).view(-1, V), y.view(-1), label_smoothing=1.0)


def of_a_learnt_scale(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).view(-1, V) * m.biased.bias[:1], y.view(-1))


def capped_twice(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).tanh().tanh().view(-1, V), y.view(-1))


def of_nothing(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).view(-1, V) * 0.0, y.view(-1))


def scaled_likelihoods(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(m.head(x).view(-1, V).log_softmax(-1) * 2, y.view(-1))


def reshaped_in_place(m: Program, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        h = x * 1.0
        loss = F.cross_entropy(m.head(h).view(-1, V), y.view(-1))
        h.unsqueeze_(0)
    return loss * x.sum()


@torch.compiler.allow_in_graph
def flatten(x: Tensor, first: int, last: int) -> Tensor:
    """The user's own, by a name of torch's."""
    return x.flatten(first, last) * 2


def by_the_users_flatten(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(flatten(m.head(x), 0, 1), y.view(-1))


def out_of_a_checkpoint(m: Program, x: Tensor, y: Tensor) -> Tensor:
    def both(x: Tensor, y: Tensor) -> Any:
        logits = m.head(x)
        return F.cross_entropy(logits.view(-1, V), y.view(-1)), logits

    return checkpoint(both, x, y, use_reentrant=False)


def in_a_transform(m: Program, x: Tensor, y: Tensor) -> Tensor:
    def loss(x: Tensor) -> Tensor:
        return viewed(m, x, y)

    with torch.no_grad():
        made = torch.func.grad(loss)(x)
    return made.sum() * x.sum()


LEFT = {
    also_a_penalty: "also read by",
    likely_returned: "also read by the caller",
    returned_and_written: "also read by",
    written_behind: "something is written after",
    some_rows_of_what_is_returned: "reads some rows",
    returned_without_training: "nothing requires a gradient",
    class_weights: "class weights",
    soft_labels: "not a tensor of indices",
    two_of_a_row: "one value per row",
    of_a_few_rows: "one value per row",
    over_rows: "one value per row",
    picked_and_an_entropy: "also read by",
    two_losses_and_a_penalty: "several losses",
    penalty_of_another_multiple: "other multiples",
    penalty_of_other_rows: "other rows",
    labels_of_a_log_sum_exp: "before its labels are made",
    labels_written_in_between: "labels are written",
    penalty_without_training: "nothing requires a gradient",
    penalty_and_a_write: "something is written",
    log_sum_exp_alone: "",
    log_sum_exp_of_columns: "also read by",
    log_sum_exp_over_rows: "also read by",
    picked_alone: "",
    smoothed_away: "not a number from 0 to below 1",
    of_a_learnt_scale: "",
    capped_twice: "",
    of_nothing: "",
    scaled_likelihoods: "",
    one_row: "is not [rows, classes]",
    of_some_columns: "",
    columns_turned_to_rows: "",
    of_log_softmax_twice: "",
    of_softmax_over_rows: "",
    not_normalised: "",
    normalised_and_normalised: "",
    reshaped_in_place: "reshaped in place",
    by_the_users_flatten: "",
    rounded_again: "cast to torch.float16",
    without_its_gradient: "another grad mode",
    written_in_between: "something is written",
    out_of_a_checkpoint: "leave a checkpoint",
    in_a_transform: "",
}


@pytest.mark.parametrize("body", LEFT, ids=lambda body: body.__name__)
def test_a_loss_that_stays(body: Body) -> None:
    given = model(autocast(body)), rows(B, T), labels(B, T)
    heads = fx_fuser.explain(*given, options={"cpu_ops": True, "strict": True}).heads
    assert all(head.reason and LEFT[body] in head.reason for head in heads)
    assert bool(heads) is bool(LEFT[body])


def test_one_column_of_as_many_rows() -> None:
    """An index may take the columns away, and leave as many rows in their place."""

    def body(m: Program, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.head(x)[..., 3], y)

    check(model(autocast(body)), rows(B, V), labels(B), heads=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_weights_without_autocast_stay(dtype: torch.dtype) -> None:
    check(model(viewed, dtype), rows(B, T, dtype=dtype), labels(B, T), heads=0)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_where_gemms_may_add_in_fp16_it_stays(dtype: torch.dtype) -> None:
    gemms = torch.backends.cuda.matmul
    before, gemms.allow_fp16_accumulation = gemms.allow_fp16_accumulation, True
    try:
        check(model(autocast(viewed, dtype)), rows(B, T), labels(B, T), heads=int(dtype is BF16))
    finally:
        gemms.allow_fp16_accumulation = before


@pytest.mark.parametrize(
    "rows, columns, said",
    [
        (2048, 16384, ""),
        (2047, 16384, "its logits take 63 MiB, less than 64"),
        (4096, 8192, ""),
        (4096, 8191, "less than 64"),
        (65536, 8191, "it has 8191 classes, fewer than 8192"),
        (None, 50257, "is not known when compiling"),
    ],
)
def test_which_sizes_a_gpu_takes(rows: int | None, columns: int, said: str) -> None:
    """By rule."""
    try:
        head_loss._check_size(rows and 2 * rows * columns, columns)
    except head_loss.Stays as stays:
        assert said and said in str(stays)
    else:
        assert not said


def head_on_a_gpu() -> Head:
    """Of a graph of fake tensors."""
    graph = torch.fx.Graph()
    with FakeTensorMode():
        logits = torch.empty(4, V, dtype=BF16, device="cuda")
    node = graph.placeholder("logits")
    node.meta["example_value"] = logits
    site = Site("linear", node, (node,), {}, {})
    return Head(site, (), (node,), (node,), (PLAIN,))


def test_a_kernel_that_does_not_compile_costs_the_head_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise BuildError("no compiler")

    monkeypatch.setattr(load, "available", lambda _: None)
    monkeypatch.setattr(load, "prepare", fails)
    warns = pytest.warns(UserWarning, match="leaves a loss as written: no compiler")
    with warns, pytest.raises(head_loss.Stays, match="no compiler"):
        head_loss._check_kernel(head_on_a_gpu(), [spec_of(BF16)], Options())
    with pytest.raises(BuildError):
        head_loss._check_kernel(head_on_a_gpu(), [spec_of(BF16)], Options(strict=True))


def test_where_no_kernel_runs_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "available", lambda _: "it is too old")
    with pytest.raises(head_loss.Stays, match="it is too old"):
        head_loss._check_kernel(head_on_a_gpu(), [spec_of(BF16)], Options(strict=True))
