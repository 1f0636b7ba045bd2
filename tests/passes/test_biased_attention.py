"""16-bit attention with a bias of Inductor's graphs: what is replaced and what is left, and values
stay right. On a CPU our functions run in torch (`cpu_ops`); on a GPU: test_biased_attention_gpu.py.
The kernels themselves: tests/kernels/attention_bias_checks.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_graphs import backward_graph, forward_graph, heads, targets
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fx_fuser.kernels.attention import bias as attention_bias
from fx_fuser.native import load
from fx_fuser.ops import run
from fx_fuser.ops.attention_bias import BACKWARD, FORWARD, NO_GRADIENT, SUMMED, WHOLE
from fx_fuser.options import LAST_PASS
from fx_fuser.passes.attention_split import ATTENTION, ATTENTION_BACKWARD, COUNTERS, biased
from fx_fuser.passes.attention_split.biased import AttentionBias, Site
from fx_fuser.passes.graph_pass import call
from fx_fuser.planning import contest
from fx_fuser.planning.timing import Timing

NAME = "_scaled_dot_product_efficient_attention"
SUM = torch.ops.aten.sum.dim_IntList
BATCH, HEADS, D = 2, 3, 16
ROWS, KEYS = 20, 24


@pytest.fixture(autouse=True)
def no_counts() -> Iterator[None]:
    torch.manual_seed(0)
    counters.clear()
    yield


def qkv(dtype: torch.dtype = torch.bfloat16, rows: int = ROWS, keys: int = KEYS) -> list[Tensor]:
    return [heads(BATCH, HEADS, n, D, dtype=dtype) for n in (rows, keys, keys)]


def bias_of(
    shared: Sequence[int] = (0,), dtype: torch.dtype = torch.bfloat16, keys: int = KEYS
) -> Tensor:
    """Expanded in these dimensions; rows apart by a multiple of 8, as torch brings them."""
    outer = [1 if i in shared else n for i, n in enumerate((BATCH, HEADS))]
    rows = torch.randn(*outer, ROWS, -(-keys // 8) * 8, dtype=dtype)
    return rows[..., :keys].expand(BATCH, HEADS, -1, -1)


def replaced(gm: GraphModule, **named: Any) -> GraphModule:
    AttentionBias(**({"strict": True, "on_cpu": True} | named))(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, causal: bool) -> Tensor:
    scores = q @ k.mT * scale + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v


def near(found: Tensor, exact: Tensor) -> None:
    """As near as its dtype, twice rounded on the way."""
    size = exact.double().norm()
    assert (found.double() - exact).norm() <= 2 * torch.finfo(found.dtype).eps * size


@pytest.mark.parametrize("shared", [(0,), (0, 1), (1,), ()])
@pytest.mark.parametrize("dtype", attention_bias.DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_forward(dtype: torch.dtype, shared: tuple[int, ...], causal: bool) -> None:
    q, k, v = qkv(dtype)
    bias = bias_of(shared, dtype)
    gm = replaced(forward_graph(q, k, v, bias=bias, causal=causal, scale=0.3))
    assert ATTENTION not in targets(gm) and run.MANY in targets(gm)
    out, lse = gm(q, k, v, bias)
    near(out, formula(*(t.double() for t in (q, k, v, bias)), 0.3, causal))
    assert lse.shape[-1] == 32 and bool((lse[..., ROWS:] == torch.inf).all())
    assert counters[COUNTERS] == {f"{NAME} with a bias": 1}


def gradient_graph(
    of_bias: Sequence[int] | None, keep: bool = True, more: bool = False, **named: Any
) -> tuple[GraphModule, list[Tensor]]:
    """of_bias: what its gradient is summed over; None: it is wanted whole. more: as well."""
    bias = named.pop("bias", None)
    bias = bias_of() if bias is None else bias
    q, k, v = qkv(bias.dtype, keys=bias.shape[-1])
    d_out = heads(BATCH, HEADS, ROWS, D, dtype=bias.dtype)
    given = q, k, v, bias, "", 0.3, False
    out, lse = run.IN_TORCH(*run.arguments(FORWARD, (*given, True)))
    tensors = dict(zip(("d_out", "q", "k", "v", "out", "lse"), (d_out, q, k, v, out, lse)))
    gm = backward_graph(tensors, (0, 1, 2, 3), bias, **({"mask": [True] * 4, "scale": 0.3} | named))
    *_, output = gm.graph.nodes
    *of_heads, whole = output.args[0]  # type: ignore[misc]
    if of_bias is not None:
        with gm.graph.inserting_before(output):
            found = call(gm.graph, whole, SUM, whole, [*of_bias], keep)
        output.args = ((*of_heads, found, *([whole] if more else [])),)
        gm.recompile()
    seed = torch.zeros((), dtype=torch.int64)
    return gm, [d_out, q, k, v, bias, out, lse, seed, seed]


@pytest.mark.parametrize("shared", [(0,), (0, 1), (1,)], ids=str)
def test_a_gradient_that_is_summed(shared: tuple[int, ...]) -> None:
    gm, given = gradient_graph(shared, bias=bias_of(shared))
    before = [*gm.graph.nodes][-1].args[0][3].meta["val"]
    replaced(gm)
    assert ATTENTION_BACKWARD not in targets(gm) and SUM not in targets(gm)
    full = (BATCH, HEADS, ROWS, KEYS)
    values = (n.meta["val"] for n in gm.graph.nodes if n.op == "call_function")
    made = [v for v in values if isinstance(v, Tensor)]
    assert not any(v.shape == full for v in made)
    check_gradients(gm, given, shared)
    found = gm(*given)[3]
    assert (found.shape, found.stride()) == (before.shape, before.stride())
    assert counters[COUNTERS] == {f"{NAME}_backward with a bias": 1}


def check_gradients(gm: GraphModule, given: list[Tensor], shared: Sequence[int]) -> None:
    d_out, q, k, v, bias, *_ = given
    few = bias[tuple(slice(0, 1) if i in shared else slice(None) for i in range(2))]
    leaves = [t.double().requires_grad_() for t in (q, k, v, few)]
    exact = torch.autograd.grad(formula(*leaves, 0.3, False), leaves, d_out.double())
    for value, right in zip(gm(*given), exact):
        near(value.sum_to_size(right.shape), right)


@pytest.mark.parametrize(
    "of_bias, keep, more",
    [(None, True, False), ((1,), True, False), ((0,), False, False), ((0,), True, True)],
    ids=["whole", "over what does not share it", "without that dimension", "read otherwise too"],
)
@pytest.mark.parametrize("keys", [24, 21])
def test_a_gradient_that_is_whole(
    of_bias: Sequence[int] | None, keep: bool, more: bool, keys: int
) -> None:
    gm, given = gradient_graph(of_bias, keep, more, bias=bias_of(keys=keys))
    replaced(gm)
    assert ATTENTION_BACKWARD not in targets(gm)
    assert (SUM in targets(gm)) == (of_bias is not None)
    if of_bias in (None, (0,)) and keep:
        check_gradients(gm, given, (0,))


def test_no_gradient_of_a_bias() -> None:
    q, k, v = qkv()
    bias, d_out = bias_of(), heads(BATCH, HEADS, ROWS, D, dtype=torch.bfloat16)
    out, lse = run.IN_TORCH(*run.arguments(FORWARD, (q, k, v, bias, "", 0.3, False, True)))
    tensors = dict(zip(("d_out", "q", "k", "v", "out", "lse"), (d_out, q, k, v, out, lse)))
    gm = replaced(backward_graph(tensors, (0, 1, 2), bias, scale=0.3))
    assert ATTENTION_BACKWARD not in targets(gm)


def test_both_in_one_graph() -> None:
    """As where forward is computed again for backward, which reads what was replaced before it."""

    def both(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, d_out: Tensor) -> Any:
        out, lse, seed, offset = ATTENTION(q, k, v, bias, True, 0.0, False, scale=0.3)
        tensors = d_out, q, k, v, bias, out, lse, seed, offset
        *made, of_bias = ATTENTION_BACKWARD(*tensors, 0.0, [True] * 4, False, scale=0.3)
        return *made, of_bias.sum([0], True)

    q, k, v = qkv()
    bias, d_out = bias_of(), heads(BATCH, HEADS, ROWS, D, dtype=torch.bfloat16)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (q, k, v, bias, d_out)]
        gm = make_fx(both)(*fake)
    replaced(gm)
    assert not {ATTENTION, ATTENTION_BACKWARD} & {*targets(gm)}
    found = gm(q, k, v, bias, d_out)
    leaves = [t.double().requires_grad_() for t in (q, k, v, bias[:1])]
    exact = torch.autograd.grad(formula(*leaves, 0.3, False), leaves, d_out.double())
    for value, right in zip(found, exact, strict=True):
        near(value, right)


LEFT: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.1},
    "a scale that is not known": {"scale": float("nan")},
    "one row for all queries": {"bias": bias_of()[:, :, :1].expand(-1, -1, ROWS, -1)},
    "rows that are not aligned": {"bias": torch.zeros(BATCH, HEADS, ROWS, 28).bfloat16()[..., :24]},
    "no bias": {"bias": None},
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_to_torch(what: str) -> None:
    q, k, v = qkv()
    gm = replaced(forward_graph(q, k, v, **({"bias": bias_of()} | LEFT[what])))
    assert ATTENTION in targets(gm) and not counters[COUNTERS]


def test_other_dtypes_are_left_to_torch() -> None:
    for dtype, of_bias in ((torch.float32, torch.float32), (torch.bfloat16, torch.float16)):
        q, k, v = qkv(dtype)
        gm = replaced(forward_graph(q, k, v, bias=bias_of(dtype=of_bias)))
        assert ATTENTION in targets(gm)


def test_what_is_left_to_torch_in_backward() -> None:
    gm, _ = gradient_graph((0,), dropout=0.1)
    assert ATTENTION_BACKWARD in targets(replaced(gm))


def test_the_functions() -> None:
    """Their fakes fit what they make, and they write to nothing else."""
    q, k, v = qkv()
    lse = torch.zeros(BATCH, HEADS, 32)
    for bias in (bias_of()[:1], bias_of((0, 1))[:1, :1], bias_of(())):
        cases: list[tuple[str, tuple[Any, ...]]] = [
            (FORWARD, (q, k, v, bias, "", 0.25, True, save)) for save in (True, False)
        ]
        cases += [
            (BACKWARD, (q, q, k, v, bias, q, lse, "", 0.25, True, of_bias))
            for of_bias in (NO_GRADIENT, SUMMED, WHOLE)
        ]
        for function, given in cases:
            arguments = run.arguments(function, given)
            torch.library.opcheck(
                run.MANY, arguments, test_utils=("test_schema", "test_faketensor")
            )


def test_where_torchs_is_faster_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []
    monkeypatch.setattr(load, "runs_on", lambda spec, device: True)
    monkeypatch.setattr(biased, "loaded", lambda specs, *_: {*specs})
    for ms, is_replaced in ((0.9, True), (0.99, False)):

        def times(key: Any, make: Any, device: torch.device, ms: float = ms) -> list[Timing]:
            keys.append(key)
            return [Timing(1.0), Timing(ms)]

        monkeypatch.setattr(contest, "times", times)
        q, k, v = (torch.empty(8, 4, 1024, 64, device="meta").bfloat16() for _ in range(3))
        bias = torch.empty(1, 4, 1024, 1024, device="meta").bfloat16().expand(8, -1, -1, -1)
        gm = replaced(forward_graph(q, k, v, (0,), bias=bias, device="cuda"), on_cpu=False)
        assert (ATTENTION not in targets(gm)) == is_replaced
    assert keys[0] == keys[1] and FORWARD in keys[0]


def test_small_ones_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "runs_on", lambda spec, device: True)
    q, k, v = qkv()
    gm = forward_graph(q, k, v, (0,), bias=bias_of(), device="cuda")
    assert ATTENTION in targets(replaced(gm, on_cpu=False))


def test_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both compute the same, of one random draw."""
    timed: list[Any] = []

    def times(key: Any, make: Any, device: torch.device) -> str:
        timed.extend(candidate.run() for candidate in make())
        return "nothing"

    monkeypatch.setattr(contest, "times", times)
    q, k, v = qkv()
    for gm in (forward_graph(q, k, v, bias=bias_of(), scale=0.3), gradient_graph((0,))[0]):
        (node,) = (n for n in gm.graph.nodes if n.target in AttentionBias.TARGETS)
        site = Site.of(node, on_cpu=True)
        assert site is not None and not site.gains()
    for torchs, ours in (timed[:2], timed[2:]):
        assert all(map(torch.equal, torchs, ours))
    assert [len(one) for one in timed] == [2, 2, 4, 4]


def test_the_tag_of_caches() -> None:
    last = AttentionBias()
    assert last.uuid() != AttentionBias(on_cpu=True).uuid()
    assert biased.behind(last).before is last


def test_kernels_are_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bias with a gradient, in 16 bits or under autocast."""
    monkeypatch.setattr(load, "runs_on", lambda spec, device: True)
    seen: list[GraphModule] = []

    def look(gm: GraphModule, _: Any) -> Any:
        seen.append(gm)
        return gm.forward

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias)

    cpu = torch.device("cpu")
    both = [
        attention_bias.spec_for(D, torch.bfloat16, backward=backward) for backward in (False, True)
    ]
    for trained, amp, dtype, wanted in (
        (True, False, torch.bfloat16, both),
        (True, True, torch.float32, both),
        (False, False, torch.bfloat16, []),
        (True, False, torch.float32, []),
    ):
        torch._dynamo.reset()
        bias = bias_of((), dtype).detach().requires_grad_(trained)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            torch.compile(attend, backend=look)(*qkv(dtype), bias)
            assert biased.foreseen(seen[-1], cpu) == wanted


# ---- in compiled nets ---------------------------------------------------------------------------


def as_on_cuda(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """What torch makes of `scaled_dot_product_attention` there."""
    keys = k.shape[2]
    if keys % 8:
        bias = F.pad(bias, (0, -keys % 8))[..., :keys]
    bias = bias.expand(*q.shape[:3], keys)
    trains = torch.is_grad_enabled()
    made: Tensor = ATTENTION(q, k, v, bias, trains, 0.0, False, scale=1.0)[0]
    return made


class Layers(nn.Module):
    """Two, which share a learned bias."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(HEADS * D, HEADS * D, bias=False) for _ in range(6))
        self.table = nn.Embedding(8, HEADS)
        steps = torch.arange(length)
        self.register_buffer("places", (steps[:, None] - steps).abs().clamp(max=7))

    def forward(self, x: Tensor, attend: Any = as_on_cuda) -> Tensor:
        bias = self.table(self.places).permute(2, 0, 1)[None].contiguous()
        for i in (0, 3):
            q, k, v = (
                part(x).unflatten(-1, (HEADS, D)).transpose(1, 2) for part in self.parts[i : i + 3]
            )
            x = x + attend(q, k, v, bias.to(q.dtype)).transpose(1, 2).flatten(2)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("length", [16, 21])
def test_a_training_step(length: int) -> None:
    torch._dynamo.reset()
    model = Layers(length)
    x = torch.randn(BATCH, length, HEADS * D)
    call = torch.compile(model, options={LAST_PASS: AttentionBias(True, True)})
    with torch.autocast("cpu", torch.bfloat16):
        y = call(x)
    weight = torch.sin(torch.arange(y.numel())).view_as(y)
    found = [y, *torch.autograd.grad(y, [*model.parameters()], weight)]
    assert counters[COUNTERS] == {f"{NAME} with a bias": 2, f"{NAME}_backward with a bias": 2}
    wide = model.double()
    exact_y = wide(x.double(), lambda *given: formula(*given, 1.0, False))
    exact = [exact_y, *torch.autograd.grad(exact_y, [*wide.parameters()], weight.double())]
    for value, right in zip(found, exact, strict=True):  # eager's errors under autocast: 0.2 to 1 %
        assert (value - right).norm() <= 0.02 * right.norm() + 1e-3
