"""A Linear with the cross entropy of its rows, on a GPU: values, gradients and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads import BF16, F16, IGNORED, Body, check, found
from helpers import Program, recorded
from torch import Tensor, nn

import fx_fuser

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs sm_80 or later",
    ),
]
ON_GPU: dict[str, Any] = {"cpu_ops": False, "inner": "inductor"}
K, V = 256, 50257  # the rows of a vocabulary that nothing pads


def on_gpu(body: Body, dtype: torch.dtype | None, bias: bool = False) -> Program:
    """dtype: of autocast, or else of weights."""

    def cast(*given: Any) -> Tensor:
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            return body(*given)

    return Program(cast, head=nn.Linear(K, V, bias=bias)).cuda()


def data(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(1, rows, K, device="cuda").to(dtype).requires_grad_()
    labels = torch.randint(0, V, (1, rows), device="cuda")
    labels[0, :4] = torch.tensor([0, V - 1, IGNORED, V // 2])
    return x, labels


def causal(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    labels = F.pad(y, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, V), labels.view(-1))


def summed(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x)[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1), reduction="sum")


def capped(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = (m.head(x) / 30).tanh() * 30
    return F.cross_entropy(logits.float().view(-1, V), y.view(-1), label_smoothing=0.1)


def penalized(m: Program, x: Tensor, y: Tensor) -> Tensor:
    """A z-loss of scaled logits."""
    logits = (m.head(x) * 0.5).float().view(-1, V)
    return F.cross_entropy(logits, y.view(-1)) + 1e-3 * logits.logsumexp(-1).square().mean()


def by_hand(m: Program, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x).float()
    return logits.logsumexp(-1) - logits.gather(-1, y.clamp(min=0)[..., None]).squeeze(-1)


def returned(m: Program, x: Tensor, y: Tensor) -> Any:
    logits = m.head(x)
    return F.cross_entropy(logits.float().view(-1, V), y.view(-1)), logits


@pytest.mark.parametrize("rows", [900, 4600])  # one piece, and three
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("body", [causal, summed, capped, penalized, by_hand])
def test_under_autocast(body: Body, dtype: torch.dtype, rows: int) -> None:
    check(on_gpu(body, dtype, bias=body is summed), *data(rows), **ON_GPU)


@pytest.mark.parametrize("rows", [900, 4600])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_weights_of_16_bits(dtype: torch.dtype, rows: int) -> None:
    check(on_gpu(causal, None).to(dtype), *data(rows, dtype), **ON_GPU)


@pytest.mark.parametrize("rows", [900, 4600])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("counts", [True, False], ids=["both", "loss"])
@pytest.mark.each_pair
def test_logits_that_are_returned(rows: int, dtype: torch.dtype, bias: bool, counts: bool) -> None:
    """A gradient comes for both, or for the loss alone."""
    made = on_gpu(returned, dtype, bias)
    check(made, *data(rows), taken=lambda found: found if counts else found[0], **ON_GPU)


def likely_tokens(m: Program, x: Tensor, y: Tensor) -> Tensor:
    likely = m.head(x).float().log_softmax(-1)
    return likely.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("body", [returned, likely_tokens])
def test_logits_of_16_bit_weights_that_stay(body: Body, dtype: torch.dtype) -> None:
    check(on_gpu(body, None).to(dtype), *data(4600, dtype), **ON_GPU)


def test_small_logits_stay() -> None:
    check(on_gpu(causal, BF16), *data(300), heads=0, **ON_GPU)


@pytest.mark.parametrize("body", [causal, returned])
def test_replayed_graphs(body: Body) -> None:
    check(on_gpu(body, BF16), *data(900), mode="reduce-overhead", **ON_GPU)


def test_a_grad_scaler() -> None:
    """Its scale brings nothing to overflow that eager keeps, and loses nothing."""
    made, (x, y) = on_gpu(causal, F16), data(4096)
    fast = torch.compile(made, backend="fx_fuser", options={"strict": True})
    weights = []
    for call in (made, fast):
        torch.manual_seed(0)
        nn.init.normal_(made.head.weight, std=0.02)
        optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(call(x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**16
        weights.append(made.head.weight.detach().clone())
    assert found() == 1
    before, after = weights
    torch.manual_seed(0)
    moved = float((before - nn.init.normal_(made.head.weight, std=0.02)).norm())
    # Each step's gradient is of 16 bits in eager, of 2^-11 relative error, which three steps add.
    assert float((before - after).norm()) < 3 * 2.0**-10 * moved


def _peak(step: Callable[[], Any]) -> int:
    """Bytes above what was there before, of a second step."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = transformers.GPT2LMHeadModel(config).cuda()
    model.loss_type = "ForCausalLM"  # else transformers warns, where Dynamo ends the graph
    return model


@pytest.mark.parametrize("returns", [False, True], ids=["loss", "logits"])
def test_gpt2_takes_less_memory(returns: bool) -> None:
    model = _gpt2()
    tokens = torch.randint(0, V, (8, 1024), device="cuda")
    results = []
    for backend in ("inductor", "fx_fuser"):
        torch._dynamo.reset()
        model.zero_grad()

        def made() -> Any:
            with torch.autocast("cuda", BF16):
                found = model(tokens, labels=tokens)
            return (found.loss, found.logits) if returns else (found.loss,)

        run = torch.compile(made, backend=backend)

        def step(run: Callable[[], Any] = run) -> Tensor:
            model.zero_grad(set_to_none=False)
            loss, *_logits = run()
            loss.backward()
            return loss.detach()

        peak = _peak(step)
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        results.append((peak, step(), grads))
    assert found() == 1
    (theirs, loss_of, grads_of), (ours, own, own_grads) = results
    torch.testing.assert_close(own, loss_of, rtol=1e-4, atol=0)
    for name, grad in grads_of.items():
        # Both round each gradient of a logit and of an activation to bf16, 2^-9 of it.
        assert float((own_grads[name] - grad).norm()) < 2.0**-5 * float(grad.norm()), name
    # Inductor holds the logits and their gradient, 2 x 823 MB, and where they are returned one of
    # zeros as well; a piece takes 206, the weight's padded copy 77 and its gradient 154, which
    # Inductor has later.
    assert ours < theirs - (1 << 30)


def test_explain_says_what_is_saved() -> None:
    x, y = data(4096)
    with recorded():
        report = fx_fuser.explain(on_gpu(causal, BF16), x, y)
    (head,) = report.heads
    logits = 4096 * V * 2
    assert not head.reason and head.bytes is not None and logits < head.bytes < 2 * logits
