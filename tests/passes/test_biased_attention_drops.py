"""16-bit attention with a bias that drops weights: forward and backward are replaced together, and
drop the same. On a CPU our functions run in torch; the kernels:
tests/kernels/attention_bias_dropout_checks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_graphs import heads, targets
from test_attention_drops import RECOMPUTES, P, factors_of, replaced, traced
from test_biased_attention import SUM
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import inductor_prims
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from fx_fuser.kernels import attention
from fx_fuser.kernels.attention import bias as attention_bias
from fx_fuser.native import load
from fx_fuser.ops import run
from fx_fuser.options import JOINT_PASS, LAST_PASS
from fx_fuser.passes.attention_split import ATTENTION, ATTENTION_BACKWARD, COUNTERS, biased
from fx_fuser.passes.attention_split import dropout as drops
from fx_fuser.passes.attention_split.biased import Site
from fx_fuser.passes.attention_split.dropout import AttentionDropout
from fx_fuser.planning import contest

NAME = "_scaled_dot_product_efficient_attention"
BOTH = {f"{NAME} with a bias": 1, f"{NAME}_backward with a bias": 1}
BATCH, HEADS, ROWS, KEYS, D = 2, 3, 40, 24, 64
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def no_counts() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    counters.clear()
    yield


def step(
    q: Tensor, k: Tensor, v: Tensor, few: Tensor, d_out: Tensor, dropout: float = P,
    other: bool = False, kept: tuple[int, ...] = (0,), wants: bool = True,
) -> Any:  # fmt: skip
    """A training step's operations. other: backward has another bias. kept: results of the first
    that are returned. wants: the bias's gradient."""
    bias = few.expand(q.shape[0], -1, -1, -1)
    made = ATTENTION(q, k, v, bias, True, dropout, False, scale=0.3)
    tensors = d_out, q, k, v, bias * 2 if other else bias, *made
    *of_heads, of_bias = ATTENTION_BACKWARD(
        *tensors, dropout, [True, True, True, wants], False, scale=0.3
    )
    of_all = [of_bias.sum([0], True)] if wants else []
    return *(made[i] for i in kept), *of_heads, *of_all


def given(d: int = D, dtype: torch.dtype = BF16) -> list[Tensor]:
    q, k, v, d_out = (heads(BATCH, HEADS, n, d, dtype=dtype) for n in (ROWS, KEYS, KEYS, ROWS))
    return [q, k, v, torch.randn(1, HEADS, ROWS, KEYS, dtype=dtype), d_out]


def exact(inputs: list[Tensor], kept: Tensor, scale: float = 0.3) -> list[Tensor]:
    """In float64. kept: what each weight is multiplied by."""
    *tensors, d_out = inputs
    leaves = [t.detach().double().requires_grad_() for t in tensors]
    q, k, v, bias = leaves
    out = ((q @ k.mT * scale + bias).softmax(-1) * kept.double()) @ v
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.double())]


def near(found: Any, wanted: list[Tensor]) -> None:
    for ours, right in zip(found, wanted, strict=True):
        assert ours.shape == right.shape
        assert (ours.double() - right).norm() <= 0.01 * right.norm()


def test_both_drop_the_same() -> None:
    inputs = given()
    gm = replaced(traced(step, *inputs))
    assert counters[COUNTERS] == BOTH
    assert not {ATTENTION, ATTENTION_BACKWARD, SUM} & {*targets(gm)}
    assert targets(gm).count(run.MANY) == 2
    torch.manual_seed(5)
    found = gm(*inputs)
    torch.manual_seed(5)
    seed = inductor_prims.seeds(1, torch.device("cpu"))
    near(found, exact(inputs, factors_of(seed, *inputs[:2])))
    assert not torch.equal(gm(*inputs)[0], found[0])  # another seed each time


def test_without_the_biass_gradient() -> None:
    inputs = given()
    gm = replaced(traced(lambda *t: step(*t, wants=False), *inputs))
    assert counters[COUNTERS] == BOTH
    torch.manual_seed(5)
    found = gm(*inputs)
    torch.manual_seed(5)
    seed = inductor_prims.seeds(1, torch.device("cpu"))
    near(found, exact(inputs, factors_of(seed, *inputs[:2]))[:4])


def graph(**named: Any) -> Callable[[], GraphModule]:
    return lambda: traced(lambda *t: step(*t, **named), *given())


LEFT: dict[str, Callable[[], GraphModule]] = {
    "no dropout": graph(dropout=0.0),
    "all dropped": graph(dropout=1.0),
    "a share that rounds to none": graph(dropout=1e-6),
    "another bias in backward": graph(other=True),
    "logarithms that are returned": graph(kept=(0, 1)),
    "a seed that is returned": graph(kept=(0, 2)),
    "d of 128": lambda: traced(step, *given(128)),
    "fp32": lambda: traced(step, *given(dtype=torch.float32)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_torch(name: str) -> None:
    gm = LEFT[name]()
    before = str(gm.graph)
    AttentionDropout(strict=True, on_cpu=True)(gm.graph)
    assert str(gm.graph) == before and not counters[COUNTERS]


@pytest.mark.parametrize("function", ["attention_bias", "attention_bias_backward"])
def test_if_one_cannot_be_made_neither_is_replaced(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else backward would drop others than forward did."""
    made = Site.made

    def failing(site: Site, *given: Any) -> Any:
        if site.function == function:
            raise RuntimeError("no")
        return made(site, *given)

    monkeypatch.setattr(Site, "made", failing)
    gm = traced(step, *given())
    with pytest.warns(UserWarning, match="leaves an attention to the library"):
        AttentionDropout(on_cpu=True)(gm.graph)
    gm.graph.eliminate_dead_code()
    assert {ATTENTION, ATTENTION_BACKWARD} <= {*targets(gm)} and run.MANY not in targets(gm)


@pytest.mark.parametrize("ours, is_replaced", [(0.9, True), (1.1, False)])
def test_both_are_timed_together(
    ours: float, is_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def times(site: Site) -> tuple[float, float]:
        asked.append(site.function)
        return 1.0, ours

    monkeypatch.setattr(load, "runs_on", lambda *_: True)
    monkeypatch.setattr(drops, "loaded", lambda specs, *_: {*specs})
    monkeypatch.setattr(Site, "is_small", lambda _: False)
    monkeypatch.setattr(Site, "times", times)
    of = Site.of
    monkeypatch.setattr(Site, "of", lambda node, on_cpu, drops: of(node, True, drops))
    gm = traced(step, *given())
    AttentionDropout(strict=True)(gm.graph)
    assert (ATTENTION not in targets(gm)) == is_replaced and len(asked) == 2


def test_what_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and torch's formula drop the same, of one sample."""
    checked: list[Any] = []
    monkeypatch.setattr(contest, "times", lambda key, make, device: make() and "nothing")
    monkeypatch.setattr(biased.bench_ops, "compare", lambda runs, *_: checked.extend(runs))
    monkeypatch.setattr(Site, "_torchs_dropping", lambda *_: list)  # no operation of a CPU
    gm = traced(step, *given())
    for node in gm.graph.nodes:
        if node.target in (ATTENTION, ATTENTION_BACKWARD):
            site = Site.of(node, on_cpu=True, drops=True)
            assert site is not None and site.times() is None
    for torchs, ours in (checked[:2], checked[2:]):
        found = torchs(), ours()
        assert all(map(torch.equal, *found)) and found[0][0].shape[0] == 1


def test_kernels_are_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "runs_on", lambda spec, device: True)
    seen: list[GraphModule] = []

    def look(gm: GraphModule, _: Any) -> Any:
        seen.append(gm)
        return gm.forward

    def attend(q: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, bias, 0.1)

    bias = torch.zeros(ROWS, ROWS, dtype=BF16, requires_grad=True)
    torch.compile(attend, backend=look)(heads(BATCH, HEADS, ROWS, D, dtype=BF16), bias)
    wanted = [attention_bias.spec_for(D, BF16, backward, 0.1) for backward in (False, True)]
    assert biased.foreseen(seen[0], torch.device("cpu")) == wanted


# ---- through Inductor ---------------------------------------------------------------------------


class Attending(nn.Module):
    """Its values are rows of the identity, so that weights, and what is dropped, can be read."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.bias = nn.Parameter(torch.randn(1, HEADS, ROWS, ROWS))
        self.register_buffer("one", torch.eye(D, dtype=BF16))  # a gemm: else no pass runs

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self.bias.to(q.dtype).expand(BATCH, -1, -1, -1)
        made: Tensor = ATTENTION(q @ self.one, k, v, bias, True, P, False)[0]
        return made * 1.0

    def forward(self, *qkv: Tensor) -> Tensor:
        if not self.checkpoints:
            return self.attend(*qkv)
        made: Tensor = checkpoint(self.attend, *qkv, use_reentrant=False)
        return made


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", RECOMPUTES)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_step_drops_the_same_in_forward_and_backward(checkpoints: bool, recomputes: str) -> None:
    with functorch_config.patch(**RECOMPUTES[recomputes]):
        _check_step(checkpoints)


def _check_step(checkpoints: bool) -> None:
    q, k = (heads(BATCH, HEADS, ROWS, D, dtype=BF16) for _ in range(2))
    v = torch.eye(ROWS, D, dtype=BF16).repeat(BATCH, HEADS, 1, 1)
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    attending = Attending(checkpoints)
    model = torch.compile(attending, backend="fx_fuser", options={"cpu_ops": True, "strict": True})
    torch.manual_seed(3)
    out = model(*leaves)
    d_out = torch.randn_like(out)
    out.backward(d_out)
    assert counters[COUNTERS] == BOTH
    steps = attention.steps_of(P)
    share = attention.DROPOUT_STEPS / (attention.DROPOUT_STEPS - steps)
    kept = torch.where(out.detach()[..., :ROWS] == 0, 0.0, share)
    assert 0 < (kept == 0).double().mean() < 0.5
    bias = attending.bias.detach().to(BF16)
    wanted = exact([q, k, v, bias, d_out], kept, D**-0.5)
    near((out.detach(), *(t.grad for t in leaves), attending.bias.grad), wanted)
    torch.manual_seed(3)
    assert torch.equal(model(*leaves), out)  # the user's seed is the seeds'
    assert not torch.equal(model(*leaves), out)


@pytest.mark.slow
@pytest.mark.parametrize("amp, length", [(False, 24), (True, 21)])
def test_t5_in_training(amp: bool, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' encoder with its own dropout, with torch's operation of CUDA in it: every
    attention, in forward and backward."""
    transformers = pytest.importorskip("transformers")

    def as_on_cuda(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, dropout_p: float, scale: float,
        is_causal: bool, **_: Any,
    ) -> Tensor:  # fmt: skip
        keys = k.shape[2]
        bias = F.pad(attn_mask.to(q.dtype).contiguous(), (0, -keys % 8))[..., :keys]
        bias = bias.expand(*q.shape[:3], keys)
        made: Tensor = ATTENTION(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]
        return made

    monkeypatch.setattr(F, "scaled_dot_product_attention", as_on_cuda)
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 3, "num_heads": 2}
    config = transformers.T5Config(vocab_size=50, dropout_rate=0.1, **sizes)
    model = transformers.T5EncoderModel(config).train()
    model = model if amp else model.bfloat16()
    passes = {
        JOINT_PASS: AttentionDropout(True, True, halves=False),
        LAST_PASS: biased.AttentionBias(True, True),
    }
    call = torch.compile(model, options=passes)
    tokens = torch.randint(0, 50, (4, length))
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        out = call(tokens)[0]
    out.float().square().sum().backward()
    assert counters[COUNTERS] == dict.fromkeys(BOTH, 3)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
