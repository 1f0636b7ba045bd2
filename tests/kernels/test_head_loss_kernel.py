"""The kernel of a head's loss on a GPU."""

from __future__ import annotations

import head_loss_checks
import pytest
import torch
from checks import passes
from sm90 import gpu_from_sm80 as gpu

from fx_fuser.kernels.head_loss import spec_of
from fx_fuser.native import launch

BF16 = torch.bfloat16


@gpu
@pytest.mark.parametrize("seed", range(4))
def test_random_sizes_and_labels(seed: int) -> None:
    passes(head_loss_checks.sweep, 100, seed, (300, 60_000))


@gpu
@pytest.mark.parametrize("columns", [51, 50257, 128256])
def test_special_values(columns: int) -> None:
    passes(head_loss_checks.special_values, columns)


@gpu
def test_refusals() -> None:
    passes(head_loss_checks.refusals)


@gpu
def test_the_same_bits_from_run_to_run_and_in_a_graph() -> None:
    columns = 50257
    logits = head_loss_checks.logits_of(700, columns, BF16)
    labels = torch.randint(0, columns, (700,), device="cuda")
    scale = torch.ones((), device="cuda")

    def made() -> list[torch.Tensor]:
        found, losses = logits.clone(), torch.empty(700, device="cuda")
        launch.head_loss(spec_of(BF16), found, labels, losses, scale, columns, -100)
        return [found[:, :columns], losses]

    first, again = made(), made()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = made()
    graph.replay()
    for others in (again, replayed):
        assert all(torch.equal(a, b) for a, b in zip(first, others))


@gpu
@pytest.mark.slow
def test_more_than_two_billion_logits() -> None:
    rows, columns = 16400, 131080
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("not enough memory")
    logits = torch.zeros(rows, columns, dtype=BF16, device="cuda")
    labels = torch.full((rows,), columns - 1, device="cuda")
    losses, scale = torch.empty(rows, device="cuda"), torch.ones((), device="cuda")
    launch.head_loss(spec_of(BF16), logits, labels, losses, scale, columns, -100)
    expected = torch.full_like(losses, columns).log()
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    assert (logits[:, -1] < -0.99).all()
    share = torch.full((), 1 / columns, dtype=BF16, device="cuda")
    assert (logits[-1, :-1] == share).all()
