"""fp32 attention that drops weights: forward and backward are replaced together, and drop the same.
On a CPU our functions run in torch; the kernels: tests/kernels/attention_dropout_checks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_graphs import heads, qkv, targets
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config, inductor_prims
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from fx_fuser.kernels import attention
from fx_fuser.ops import attention_dropout as masks
from fx_fuser.ops import run
from fx_fuser.passes.attention_split import ATTENTION, ATTENTION_BACKWARD, COUNTERS, Site
from fx_fuser.passes.attention_split.dropout import AttentionDropout

NAME = "_scaled_dot_product_efficient_attention"
BOTH = {NAME: 1, f"{NAME}_backward": 1}
P = 0.25
NEAR = {"rtol": 1e-4, "atol": 1e-5}


def step(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, dropout: float = P,
    kept: tuple[int, ...] = (0,), back: dict[str, Any] | None = None, causal: bool = True,
) -> Any:  # fmt: skip
    """A training step's two operations. kept: results of the first that are returned as well."""
    made = ATTENTION(q, k, v, None, True, dropout, causal)
    out, lse, seed, offset = made
    given = {"dropout": dropout, "causal": causal, "scale": None, **(back or {})}
    d_q, d_k, d_v, _ = ATTENTION_BACKWARD(
        d_out, q, k, v, None, out, lse, seed, offset, given["dropout"], [True, True, True, False],
        given["causal"], scale=given["scale"],
    )  # fmt: skip
    return *(made[i] for i in kept), d_q, d_k, d_v


def traced(call: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    return make_fx(lambda *t: call(*t), tracing_mode="fake")(*inputs)


def replaced(gm: GraphModule) -> GraphModule:
    AttentionDropout(strict=True, on_cpu=True)(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    return gm


def exact(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, factors: Tensor, causal: bool = True
) -> list[Tensor]:
    """out and gradients in float64. factors: what each weight is multiplied by."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    a, b, c = leaves
    scores = a @ b.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    out = (scores.softmax(-1) * factors.double()) @ c
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.double())]


def factors_of(seed: Tensor, q: Tensor, k: Tensor, dropout: float = P) -> Tensor:
    batch, count, rows, _ = q.shape
    made = masks.factors(seed, batch * count, rows, k.shape[2], dropout, torch.float64)
    return made.unflatten(0, (batch, count))


def test_both_drop_the_same() -> None:
    q, k, v = qkv(2, 3, 40, 33, 64)
    d_out = heads(2, 3, 40, 64)
    gm = replaced(traced(step, q, k, v, d_out))
    assert counters[COUNTERS] == BOTH and ATTENTION not in targets(gm)
    assert ATTENTION_BACKWARD not in targets(gm) and targets(gm).count(run.MANY) == 2
    torch.manual_seed(5)
    found = gm(q, k, v, d_out)
    torch.manual_seed(5)
    seed = inductor_prims.seeds(1, torch.device("cpu"))
    wanted = exact(q, k, v, d_out, factors_of(seed, q, k))
    for ours, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), right, **NEAR)
    assert not torch.equal(gm(q, k, v, d_out)[0], found[0])  # another seed each time


def test_attentions_of_a_graph_have_seeds_of_their_own() -> None:
    q, k, v = qkv(1, 2, 24, 24, 64)

    def twice(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Any:
        return *step(q, k, v, d_out), *step(q, k, v, d_out)

    gm = replaced(traced(twice, q, k, v, heads(1, 2, 24, 64)))
    assert targets(gm).count(inductor_prims.seeds) == 1
    assert counters[COUNTERS] == dict.fromkeys(BOTH, 2)
    made = gm(q, k, v, v)
    assert not torch.equal(made[0], made[4])


_Q, _K, _V = qkv(1, 2, 8, 8, 64)
LEFT: dict[str, Callable[[], GraphModule]] = {
    "no dropout": lambda: traced(lambda *t: step(*t, dropout=0.0), _Q, _K, _V, _Q),
    "all dropped": lambda: traced(lambda *t: step(*t, dropout=1.0), _Q, _K, _V, _Q),
    "a share that rounds to none": lambda: traced(
        lambda *t: step(*t, dropout=1e-6), _Q, _K, _V, _Q
    ),
    "d of 128": lambda: traced(step, *(heads(1, 2, 8, 128) for _ in range(4))),
    "logarithms that are returned": lambda: traced(
        lambda *t: step(*t, kept=(0, 1)), _Q, _K, _V, _Q
    ),
    "a seed that is returned": lambda: traced(lambda *t: step(*t, kept=(0, 2)), _Q, _K, _V, _Q),
    "another share in backward": lambda: traced(
        lambda *t: step(*t, back={"dropout": 0.5}), _Q, _K, _V, _Q
    ),
    "causal in forward alone": lambda: traced(
        lambda *t: step(*t, back={"causal": False}), _Q, _K, _V, _Q
    ),
    "another scale in backward": lambda: traced(
        lambda *t: step(*t, back={"scale": 0.5}), _Q, _K, _V, _Q
    ),
    "no backward": lambda: traced(lambda *t: ATTENTION(*t, None, False, P)[0], _Q, _K, _V),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_torch(name: str) -> None:
    gm = LEFT[name]()
    before = str(gm.graph)
    AttentionDropout(strict=True, on_cpu=True)(gm.graph)
    assert str(gm.graph) == before and not counters[COUNTERS]


def test_fp32_is_left_where_it_is_the_librarys() -> None:
    gm = traced(step, _Q, _K, _V, _Q)
    AttentionDropout(strict=True, on_cpu=True, halves=False)(gm.graph)
    assert ATTENTION in targets(gm) and not counters[COUNTERS]
    assert AttentionDropout().uuid() != AttentionDropout(halves=False).uuid()


def test_eagers_own_random_numbers_are_left() -> None:
    gm = traced(step, _Q, _K, _V, _Q)
    with config.patch(fallback_random=True):
        AttentionDropout(strict=True, on_cpu=True)(gm.graph)
    assert ATTENTION in targets(gm) and ATTENTION_BACKWARD in targets(gm)


@pytest.mark.parametrize("meta", [
    None, {"memory_budget": 0.0}, {"custom": {"_region_activation_memory_budget": 0.0}},
])  # fmt: skip
def test_where_backward_recomputes_all_seeds_are_torchs(meta: dict[str, Any] | None) -> None:
    gm = traced(step, _Q, _K, _V, _Q)
    next(iter(gm.graph.nodes)).meta.update(meta or {})
    with functorch_config.patch(activation_memory_budget=1.0 if meta else 0.0):
        AttentionDropout(strict=True, on_cpu=True)(gm.graph)
    assert ATTENTION in targets(gm) and ATTENTION_BACKWARD in targets(gm)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("function", ["attention", "attention_backward"])
def test_if_one_cannot_be_made_neither_is_replaced(
    function: str, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else backward would drop others than forward did."""
    made = Site.made

    def failing(site: Site, *given: Any) -> Any:
        if site.function == function:
            raise RuntimeError("no")
        return made(site, *given)

    monkeypatch.setattr(Site, "made", failing)
    gm = traced(step, _Q, _K, _V, _Q)
    if strict:
        with pytest.raises(RuntimeError, match="no"):
            AttentionDropout(strict=True, on_cpu=True)(gm.graph)
    else:
        with pytest.warns(UserWarning, match="leaves an attention to the library"):
            AttentionDropout(on_cpu=True)(gm.graph)
    gm.graph.eliminate_dead_code()
    assert [t for t in targets(gm) if t in (ATTENTION, ATTENTION_BACKWARD, run.MANY)] == [
        ATTENTION, ATTENTION_BACKWARD,
    ]  # fmt: skip


# ---- through Inductor ---------------------------------------------------------------------------


class Attending(nn.Module):
    """Its values are rows of the identity, so that weights, and what is dropped, can be read."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.register_buffer("one", torch.eye(64))  # a gemm: in a graph of none no pass runs

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made: Tensor = ATTENTION(q @ self.one, k, v, None, True, P, True)[0]
        return made * 1.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.checkpoints:
            return self.attend(q, k, v)
        made: Tensor = checkpoint(self.attend, q, k, v, use_reentrant=False)
        return made


RECOMPUTES: dict[str, dict[str, Any]] = {
    "as it chooses": {},
    "half": {"activation_memory_budget": 0.5},
    "much": {"aggressive_recomputation": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", RECOMPUTES)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_step_drops_the_same_in_forward_and_backward(checkpoints: bool, recomputes: str) -> None:
    with functorch_config.patch(**RECOMPUTES[recomputes]):
        _check_step(checkpoints)


def _check_step(checkpoints: bool) -> None:
    q, k = heads(2, 3, 40, 64), heads(2, 3, 40, 64)
    v = torch.eye(40, 64).repeat(2, 3, 1, 1)
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    options = {"cpu_ops": True, "strict": True}
    model = torch.compile(Attending(checkpoints), backend="fx_fuser", options=options)
    torch.manual_seed(3)
    out = model(*leaves)
    d_out = torch.randn_like(out)
    out.backward(d_out)
    assert counters[COUNTERS] == BOTH
    dropped = (out.detach()[..., :40] == 0) & torch.ones(40, 40).tril().bool()
    steps = attention.steps_of(P)
    share = attention.DROPOUT_STEPS / (attention.DROPOUT_STEPS - steps)
    wanted = exact(q, k, v, d_out, torch.where(dropped, 0.0, share))
    for ours, right in zip((out, *(t.grad for t in leaves)), wanted, strict=True):
        torch.testing.assert_close(ours.double(), right, **NEAR)
    torch.manual_seed(3)
    assert torch.equal(model(*leaves), out)  # the user's seed is the seeds'
    assert not torch.equal(model(*leaves), out)
