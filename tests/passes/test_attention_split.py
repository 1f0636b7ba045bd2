"""fp32 attention of Inductor's graphs by fp16 halves: what is replaced, what is left, and that
values stay right. On a CPU our functions run in torch (`cpu_ops`); on a GPU:
test_attention_split_gpu.py. The kernels themselves: tests/kernels/attention_checks.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_graphs import AsOnCuda, backward_graph, forward_graph, heads, targets
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from fx_fuser.errors import BuildError
from fx_fuser.kernels import attention
from fx_fuser.native import load
from fx_fuser.ops import run
from fx_fuser.options import JOINT_PASS, LAST_PASS, Options
from fx_fuser.passes import attention_split, graph_pass, products, provenance
from fx_fuser.passes.attention_split import ATTENTION, ATTENTION_BACKWARD, COUNTERS, AttentionSplit
from fx_fuser.planning import contest, plan
from fx_fuser.planning.timing import Timing
from tests.helpers import assert_close
from tests.helpers import run as run_model

NAME = "_scaled_dot_product_efficient_attention"
GPU = torch.device("cuda:0")
# Sums of 100 products at most, of values near 1: what fp32 may lose in them, and some more.
NEAR = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def no_counts() -> Iterator[None]:
    counters.clear()
    yield


def replaced(gm: GraphModule) -> GraphModule:
    AttentionSplit(strict=True, on_cpu=True)(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


def formula(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """In float64, and the logarithm of each row's sum."""
    scores = q.double() @ k.double().mT * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


def qkv(batch: int, count: int, rows: int, keys: int, d: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [heads(batch, count, n, d) for n in (rows, keys, keys)]


SIZES = [(2, 3, 40, 40, 64), (1, 2, 33, 7, 8), (2, 1, 5, 96, 128)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_forward(sizes: tuple[int, ...], scale: float | None, causal: bool) -> None:
    """Queries beyond the keys too: causal is from the top left."""
    q, k, v = qkv(*sizes)
    gm = replaced(forward_graph(q, k, v, causal=causal, scale=scale))
    assert ATTENTION not in targets(gm) and run.MANY in targets(gm)
    out, lse = gm(q, k, v)
    exact, sums = formula(q, k, v, sizes[-1] ** -0.5 if scale is None else scale, causal)
    torch.testing.assert_close(out.double(), exact, **NEAR)
    rows = sizes[2]
    torch.testing.assert_close(lse[..., :rows].double(), sums, **NEAR)
    assert lse.shape[-1] == -(-rows // 32) * 32 and bool((lse[..., rows:] == math.inf).all())
    assert counters[COUNTERS] == {NAME: 1}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_backward(sizes: tuple[int, ...], causal: bool) -> None:
    q, k, v = qkv(*sizes)
    d_out, scale = heads(*sizes[:3], sizes[-1]), 0.2
    out, lse = forward_graph_of_ours(q, k, v, causal, scale)
    given = dict(zip(("d_out", "q", "k", "v", "out", "lse"), (d_out, q, k, v, out, lse)))
    gm = replaced(backward_graph(given, causal=causal, scale=scale))
    assert ATTENTION_BACKWARD not in targets(gm) and run.MANY in targets(gm)
    seed = torch.zeros((), dtype=torch.int64)
    found = gm(d_out, q, k, v, out, lse, seed, seed)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    exact = torch.autograd.grad(formula(*leaves, scale, causal)[0], leaves, d_out.double())
    for value, right in zip(found, exact, strict=True):
        torch.testing.assert_close(value.double(), right, **NEAR)
    assert counters[COUNTERS] == {f"{NAME}_backward": 1}


def forward_graph_of_ours(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = replaced(forward_graph(q, k, v, causal=causal, scale=scale))(q, k, v)
    counters.clear()
    return out, lse


@pytest.mark.parametrize("layout", ["rows first", "heads first"])
def test_results_have_torchs_layouts(layout: str) -> None:
    """At any length, since torch's backward may read ours, and ours torch's: the pass compares
    each, and raises where they differ."""
    for rows, keys, d in itertools.product((1, 32, 33), (1, 40), (8, 128)):
        q, k, v = qkv(2, 3, rows, keys, d)
        if layout == "heads first":
            q, k, v = (t.contiguous() for t in (q, k, v))
        for items, save in (((0, 1), True), ((0,), True), ((0,), False)):
            gm = forward_graph(q, k, v, items, save=save)
            before = outputs(gm)
            assert outputs(replaced(gm)) == before, (rows, keys, d)
            real = [(t.shape, t.stride()) for t in gm(q, k, v)]
            assert real == before
    assert counters[COUNTERS][NAME] == 36


def outputs(gm: GraphModule) -> list[Any]:
    *_, output = gm.graph.nodes
    return [(n.meta["val"].shape, n.meta["val"].stride()) for n in output.args[0]]


def test_no_logarithms_are_made_that_nothing_reads() -> None:
    q, k, v = qkv(1, 2, 8, 8, 8)
    for save in (False, True):
        gm = replaced(forward_graph(q, k, v, (0,), save=save))
        assert targets(gm) == [run.ONE]


def test_seed_and_offset_are_there_for_those_who_save_them() -> None:
    q, k, v = qkv(1, 2, 8, 8, 8)
    gm = replaced(forward_graph(q, k, v, (0, 1, 2, 3)))
    for made in gm(q, k, v)[2:]:
        assert made.shape == () and made.dtype is torch.int64
    empty = torch.ops.aten.empty_strided.default
    assert targets(gm).count(empty) == 2


def test_one_head_for_all_queries_is_read_once() -> None:
    q, k, v = qkv(2, 1, 9, 12, 16)
    q = heads(2, 4, 9, 16)
    k, v = (t.expand(2, 4, 12, 16) for t in (k, v))
    gm = replaced(forward_graph(q, k, v))
    (fused,) = [node for node in gm.graph.nodes if node.target is run.MANY]
    assert [n.meta["val"].shape[1] for n in fused.args[0]] == [4, 1, 1]
    out, lse = gm(q, k, v)
    torch.testing.assert_close(out.double(), formula(q, k, v, 0.25, False)[0], **NEAR)
    given = {"d_out": heads(2, 4, 9, 16), "q": q, "k": k, "v": v, "out": out, "lse": lse}
    back = replaced(backward_graph(given))
    assert run.MANY in targets(back)
    seed = torch.zeros((), dtype=torch.int64)
    _, d_k, _ = back(*given.values(), seed, seed)
    assert d_k.shape == (2, 4, 12, 16)  # of each head of queries, as torch's


BIAS = torch.zeros(1, 2, 8, 8)
_Q = heads(1, 2, 8, 64)


def odd_rows(step: int) -> Tensor:
    return torch.randn(1, 8, 2, 64 + step)[..., :64].transpose(1, 2)


LEFT: dict[str, Callable[[], GraphModule]] = {
    "a bias": lambda: forward_graph(_Q, _Q, _Q, bias=BIAS),
    "dropout": lambda: forward_graph(_Q, _Q, _Q, dropout=0.1),
    "d of 136": lambda: forward_graph(*qkv(1, 2, 8, 8, 136)),
    "d of 4": lambda: forward_graph(*qkv(1, 2, 8, 8, 4)),
    "d of 12": lambda: forward_graph(*qkv(1, 2, 8, 8, 12)),
    "values of another d": lambda: forward_graph(_Q, _Q, heads(1, 2, 8, 32)),
    "16 bits": lambda: forward_graph(*(t.bfloat16() for t in qkv(1, 2, 8, 8, 64))),
    "float64": lambda: forward_graph(*(t.double() for t in qkv(1, 2, 8, 8, 64))),
    "rows of q apart by no vector": lambda: forward_graph(odd_rows(1), _Q, _Q),
    "rows of v apart by no vector": lambda: forward_graph(_Q, _Q, odd_rows(2)),
    "k begins between two vectors": lambda: forward_graph(
        _Q, torch.randn(1, 8, 2, 68)[..., 1:65].transpose(1, 2), _Q
    ),
    "elements that are not adjacent": lambda: forward_graph(_Q, _Q, _Q.mT.contiguous().mT),
    "one row for all": lambda: forward_graph(_Q, _Q[:, :, :1].expand(1, 2, 8, 64), _Q),
    "one head of k, several of v": lambda: forward_graph(_Q, _Q[:, :1].expand(1, 2, 8, 64), _Q),
    "no keys": lambda: forward_graph(*qkv(1, 2, 8, 0, 64)),
    "a negative scale": lambda: forward_graph(_Q, _Q, _Q, scale=-1.0),
    "a scale of 0": lambda: forward_graph(_Q, _Q, _Q, scale=0.0),
    "an infinite scale": lambda: forward_graph(_Q, _Q, _Q, scale=math.inf),
    "logarithms that torch does not make": lambda: forward_graph(_Q, _Q, _Q, save=False),
    "on a GPU, which a CPU's pass is not for": lambda: forward_graph(_Q, _Q, _Q, device="cuda"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_torch(name: str) -> None:
    gm = LEFT[name]()
    before = str(gm.graph)
    assert str(replaced(gm).graph) == before and not counters[COUNTERS]


def saved(**other: Tensor) -> dict[str, Tensor]:
    lse = torch.zeros(1, 2, 32)
    return {"d_out": _Q, "q": _Q, "k": _Q, "v": _Q, "out": _Q, "lse": lse, **other}


LEFT_IN_BACKWARD: dict[str, Callable[[], GraphModule]] = {
    "a bias": lambda: backward_graph(saved(), bias=BIAS),
    "dropout": lambda: backward_graph(saved(), dropout=0.1),
    "the bias's gradient is asked for": lambda: backward_graph(saved(), mask=(True,) * 4),
    "a gradient of one row for all": lambda: backward_graph(
        saved(d_out=torch.ones(()).expand(1, 2, 8, 64))
    ),
    "logarithms without padding": lambda: backward_graph(saved(lse=torch.zeros(1, 2, 8))),
    "logarithms with gaps": lambda: backward_graph(saved(lse=torch.zeros(1, 2, 64)[..., :32])),
    "a result of 16 bits": lambda: backward_graph(saved(out=_Q.half())),
    "d of 136": lambda: backward_graph(
        dict(zip(("d_out", "q", "k", "v", "out", "lse"),
                 (*[heads(1, 2, 8, 136)] * 5, torch.zeros(1, 2, 32))))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_IN_BACKWARD)
def test_what_is_left_to_torch_in_backward(name: str) -> None:
    gm = LEFT_IN_BACKWARD[name]()
    before = str(gm.graph)
    assert str(replaced(gm).graph) == before and not counters[COUNTERS]


def test_the_backward_that_is_left_would_be_taken() -> None:
    assert ATTENTION_BACKWARD not in targets(replaced(backward_graph(saved())))


def test_numbers_that_change_are_left() -> None:
    """A node in place of a number."""
    for place, name in ((5, None), (None, "scale")):
        gm = forward_graph(_Q, _Q, _Q)
        (node,) = gm.graph.find_nodes(op="call_function", target=ATTENTION)
        with gm.graph.inserting_before(node):
            number = gm.graph.placeholder("number")
        if place is not None:
            node.update_arg(place, number)
        else:
            node.kwargs = {"scale": number}
        assert ATTENTION in targets(replaced(gm)), name


# ---- on a GPU, without one ----------------------------------------------------------------------


class Clock:
    """In place of `contest.times`. ms: of torch's, and of ours."""

    def __init__(self, *ms: float) -> None:
        self.ms = ms
        self.keys: list[Any] = []

    def __call__(self, key: Any, make: Any, device: torch.device) -> list[Timing] | str:
        self.keys.append(key)
        return [Timing(one) for one in self.ms] or "no memory to time it"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are loaded on a GPU that is there for these tests."""
    names: list[str] = []
    monkeypatch.setattr(load, "prepare", lambda specs, _: names.extend(s.name for s in specs))
    monkeypatch.setattr(load, "runs_on", lambda *_: True)
    monkeypatch.setattr(graph_pass, "_failed", set())
    return names


def large(causal: bool = False, d: int = 64) -> GraphModule:
    q, k, v = (torch.empty(8, 4, 1024, d, device="meta") for _ in range(3))
    return forward_graph(q, k, v, causal=causal, device="cuda")


@pytest.mark.parametrize(
    "ms, gains", [((1.0, 0.3), True), ((1.0, 0.99), False), ((0.3, 1.0), False), ((), False)]
)
def test_the_clock_decides(
    ms: tuple[float, ...], gains: bool, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "times", Clock(*ms))
    gm = large()
    AttentionSplit(strict=True)(gm.graph)
    assert (ATTENTION not in targets(gm)) is gains
    assert counters[COUNTERS] == ({NAME: 1} if gains else {})
    assert built == [attention.spec_for(64).name]  # type: ignore[union-attr]


def test_what_times_depend_on(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1.0, 0.5)
    monkeypatch.setattr(contest, "times", clock)
    for gm in (large(), large(causal=True), large(d=128), large()):
        AttentionSplit(strict=True)(gm.graph)
    first, causal, wide, again = map(str, clock.keys)
    assert first == again and len({first, causal, wide}) == 3


def test_small_ones_are_not_timed_and_no_kernel_is_built(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(1.0, 0.5)
    monkeypatch.setattr(contest, "times", clock)
    gm = forward_graph(*qkv(2, 4, 64, 64, 64), device="cuda")
    AttentionSplit(strict=True)(gm.graph)
    assert not clock.keys and not built and ATTENTION in targets(gm)


def test_a_gpu_without_the_kernel(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "runs_on", lambda *_: False)
    gm = large()
    AttentionSplit(strict=True)(gm.graph)
    assert not built and ATTENTION in targets(gm)


def test_a_kernel_that_does_not_build(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(specs: Any, _: torch.device) -> None:
        if specs:
            raise BuildError("no such thing")

    monkeypatch.setattr(load, "prepare", broken)
    gm = large()
    with pytest.raises(BuildError):
        AttentionSplit(strict=True)(gm.graph)
    with pytest.warns(UserWarning, match="leaves attention to the library: no such thing") as told:
        AttentionSplit()(gm.graph)
        AttentionSplit()(gm.graph)
    assert len(told) == 1 and ATTENTION in targets(gm)


def test_what_fails_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Node:
        raise RuntimeError("our own fault")

    monkeypatch.setattr(attention_split, "call", fail)
    gm = forward_graph(_Q, _Q, _Q)
    with pytest.warns(UserWarning, match="leaves an attention to the library: RuntimeError"):
        AttentionSplit(on_cpu=True)(gm.graph)
    assert ATTENTION in targets(gm)
    with pytest.raises(RuntimeError, match="our own fault"):
        AttentionSplit(strict=True, on_cpu=True)(gm.graph)


def test_the_contest_is_of_torchs_and_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU both run in torch, which shows that the tensors made for it fit."""
    timed: list[list[Tensor]] = []

    def times(key: Any, make: Callable[[], Any], device: Any) -> str:
        timed.extend([*candidate()] for candidate in make())
        return "seen"

    monkeypatch.setattr(contest, "times", times)
    q, k, v = qkv(1, 2, 9, 12, 16)
    k, v = (t[:, :1].expand(1, 2, 12, 16) for t in (k, v))
    out, lse = forward_graph_of_ours(q, k, v, True, 0.25)
    given = {"d_out": q, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    for gm in (forward_graph(q, k, v, causal=True), backward_graph(given, causal=True)):
        (node,) = [n for n in gm.graph.nodes if n.target in AttentionSplit.TARGETS]
        site = attention_split._Site.of(node, on_cpu=True)
        assert site is not None and not site.gains()
    for torchs, ours in (timed[:2], timed[2:]):
        assert [t.shape for t in torchs] == [t.shape for t in ours]
        assert all(map(torch.equal, torchs, ours))
    assert [len(one) for one in timed] == [2, 2, 3, 3]


def test_the_tag_of_caches() -> None:
    last = products.Products()
    one, other = attention_split.behind(last), AttentionSplit(on_cpu=True, before=last)
    assert one.uuid() == attention_split.behind(products.Products()).uuid()
    assert len({str(p.uuid()) for p in (one, other, last, AttentionSplit())}) == 4
    unknown = products.Products(before=lambda graph: None)
    assert attention_split.behind(unknown).uuid() is None


def test_it_runs_behind_the_pass_over_gemms(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "unavailable", lambda device: None)
    with FakeTensorMode():
        x = torch.empty(4, 4, device="cuda:0")
    for options in (Options(), Options(strict=True)):
        found = provenance.Passes(options, [x], (), {GPU: []}).load()
        last = products.Products(options.strict)
        assert found == {LAST_PASS: AttentionSplit(options.strict, before=last)}
    both = provenance.Passes(Options(), [x], (torch.bfloat16,), {GPU: []}).load()
    assert both.keys() == {JOINT_PASS, LAST_PASS}


# ---- through Inductor ---------------------------------------------------------------------------


def attend(x: Tensor, w: Tensor) -> Tensor:
    batch, rows, _ = x.shape
    q, k, v = (x @ w).view(batch, rows, 3, 2, 8).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(batch, rows, 16).tanh()


class Attending(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(16, 48) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return attend(x, self.w)


def compiled(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    given = {"cpu_ops": True, "strict": True, "joint_custom_pre_pass": AsOnCuda(), **options}
    return torch.compile(model, backend="fx_fuser", options=given)


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
def test_values_and_gradients(train: bool) -> None:
    """At a length that is no multiple of 32: logarithms have rows that no query has."""
    torch.manual_seed(0)
    model, inputs = Attending(), (torch.randn(2, 41, 16),)
    eager, outputs = run_model(model, inputs, train)
    exact, _ = run_model(model, inputs, train, dtype=torch.float64, narrow=outputs)
    ours, _ = run_model(model, inputs, train, compiled, narrow=outputs)
    both = {NAME: 1, f"{NAME}_backward": 1}
    assert counters[COUNTERS] == (both if train else {NAME: 1})
    assert_close(ours, eager, exact)


@pytest.mark.slow
def test_dynamic_sizes_are_compiled_once() -> None:
    torch.manual_seed(0)
    model = Attending()
    fused = compiled(model)
    with torch.no_grad():
        for batch, rows in ((2, 41), (3, 32), (5, 7)):
            x = torch.randn(batch, rows, 16)
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 1)
            torch.testing.assert_close(fused(x), model(x))
    assert counters["stats"]["unique_graphs"] == 1 and counters[COUNTERS] == {NAME: 1}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"fp32": "ieee"}, {"auto": False}], ids=str)
def test_options_that_leave_attention_alone(options: dict[str, Any]) -> None:
    """Torch's own operation is then left, which a CPU has no kernel for."""
    with torch.no_grad(), pytest.raises(Exception, match="efficient_attention"):
        compiled(Attending(), **options)(torch.randn(2, 8, 16))
    assert not counters[COUNTERS]
