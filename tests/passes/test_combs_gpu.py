"""A language model's head with a vocabulary of 50257, on a Hopper GPU: the user's own weight, whose
rows nothing pads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from fx_fuser.passes import padding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("own_caches"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
BF16 = torch.bfloat16
VOCABULARY = 50257


def operands(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(tokens, width, device="cuda", dtype=dtype)
    w = torch.randn(VOCABULARY, width, device="cuda").mul_(width**-0.5).to(dtype)
    return x.requires_grad_(), w.requires_grad_()


def gradients(y: Tensor, x: Tensor, w: Tensor, dy: Tensor | None = None) -> Sequence[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, (x, w), dy)]


def compiled(f: Callable[..., Tensor], backend: str = "fx_fuser") -> Callable[..., Tensor]:
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(f, backend=backend)


def kernels_of(step: Callable[[], object]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return [event.key for event in profile.key_averages() for _ in range(event.count)]


def judge(made: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    for mine, theirs, right in zip(made, eager, exact, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        error, bound = ((v.double() - right).norm() for v in (mine, theirs))
        # A padded gemm, or another kernel of the library's, sums in another order.
        assert error <= max(2 * bound, torch.finfo(BF16).eps / 4 * right.norm())


def test_a_training_step_under_autocast() -> None:
    """Its logits and their gradient stay in the graph, where zeros behind them may be free. Not a
    cross entropy, which with its Linear becomes one op."""
    x, w = operands(2048, 768, torch.float32)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cuda", BF16):
            return F.linear(x, w).float().sigmoid().square().mean()

    run = compiled(loss)
    made = gradients(run(x, w), x, w)
    chosen = dict(counters[padding.COUNTERS])
    assert sum(chosen.values()) == 3 and set(chosen) <= {"mm", "mm_combs"}, chosen
    exact_x, exact_w = (v.detach().double().requires_grad_() for v in (x, w))
    exact = gradients((exact_x @ exact_w.T).sigmoid().square().mean(), exact_x, exact_w)
    judge(made, gradients(loss(x, w), x, w), exact)


def head(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def test_logits_that_are_returned() -> None:
    """Both gradients by combs: the logits' one is the user's, so that padding would copy it.
    Forward, too, where Inductor's own padding, which may return a slice, is no faster."""
    x, w = operands(8192, 768, BF16)
    dy = torch.randn(8192, VOCABULARY, device="cuda", dtype=BF16)
    run = compiled(head)
    made = gradients(run(x, w), x, w, dy)
    chosen = dict(counters[padding.COUNTERS])
    assert chosen in ({"mm_combs": 2}, {"mm_combs": 3})
    found = kernels_of(lambda: gradients(run(x, w), x, w, dy))
    assert found.count("fx_fuser_combs") == chosen["mm_combs"], found
    exact_x, exact_w = (v.detach().double().requires_grad_() for v in (x, w))
    exact = gradients(exact_x @ exact_w.T, exact_x, exact_w, dy.double())
    judge(made, gradients(head(x, w), x, w, dy), exact)


def test_it_takes_no_more_memory_than_inductor() -> None:
    x, w = operands(8192, 768, BF16)
    dy = torch.randn(8192, VOCABULARY, device="cuda", dtype=BF16)

    def peak(backend: str) -> int:
        run = compiled(head, backend)
        gradients(run(x, w), x, w, dy)  # compiles, and times candidates
        torch.cuda.reset_peak_memory_stats()
        gradients(run(x, w), x, w, dy)
        return torch.cuda.max_memory_allocated()

    assert peak("fx_fuser") <= 1.01 * peak("inductor")
