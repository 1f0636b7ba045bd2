"""fp32 attention of Inductor's graphs by fp16 halves: when, by which kernels, in which pass.
What is replaced: test_attention_split.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_graphs import backward_graph, forward_graph, qkv, replaced, targets
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from fx_fuser.errors import BuildError
from fx_fuser.kernels import attention
from fx_fuser.kernels.split import SPLIT_GEMM
from fx_fuser.native import load
from fx_fuser.options import JOINT_PASS, LAST_PASS, Options
from fx_fuser.passes import attention_split, products, provenance
from fx_fuser.passes.attention_split import (
    ATTENTION,
    ATTENTION_BACKWARD,
    COUNTERS,
    AttentionSplit,
    results,
)
from fx_fuser.passes.attention_split.biased import AttentionBias
from fx_fuser.passes.attention_split.dropout import AttentionDropout
from fx_fuser.planning import contest, plan
from fx_fuser.planning.timing import Timing

NAME = "_scaled_dot_product_efficient_attention"
GPU = torch.device("cuda:0")
SMALL = qkv(1, 2, 8, 8, 64)


@pytest.fixture(autouse=True)
def no_counts() -> Iterator[None]:
    counters.clear()
    yield


class Clock:
    """In place of `contest.times`. ms: of torch's, and of ours."""

    def __init__(self, *ms: float) -> None:
        self.ms = ms
        self.keys: list[Any] = []

    def __call__(self, key: Any, make: Any, device: torch.device) -> list[Timing] | str:
        self.keys.append(key)
        return [Timing(one) for one in self.ms] or "not enough memory to time it"


def large(causal: bool = False, d: int = 64, trains: bool = False) -> GraphModule:
    q, k, v = (torch.empty(8, 4, 1024, d, device="meta") for _ in range(3))
    items = (0, 1) if trains else (0,)
    return forward_graph(q, k, v, items, save=trains, causal=causal, device="cuda")


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
    gm = forward_graph(*qkv(2, 4, 64, 64, 64), (0,), save=False, device="cuda")
    AttentionSplit(strict=True)(gm.graph)
    assert not clock.keys and not built and ATTENTION in targets(gm)


@pytest.mark.parametrize("ours", [0.5, 1.0])
def test_a_training_steps_backward_is_timed_too(
    ours: float, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "times", Clock(1.0, ours))
    q = torch.empty(8, 4, 1024, 64, device="meta")
    lse = torch.empty(8, 4, 1024, device="meta")
    names = ("d_out", "q", "k", "v", "out", "lse")
    back = backward_graph(dict(zip(names, (q, q, q, q, q, lse))), device="cuda")
    for graph, target in ((large(trains=True), ATTENTION), (back, ATTENTION_BACKWARD)):
        AttentionSplit(strict=True)(graph.graph)
        assert (target in targets(graph)) == (ours == 1.0)
    assert len(built) == 2


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

    monkeypatch.setattr(results, "call", fail)
    gm = forward_graph(*SMALL)
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
    out, lse = replaced(forward_graph(q, k, v, causal=True))(q, k, v)
    given = {"d_out": q, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    for gm in (forward_graph(q, k, v, causal=True), backward_graph(given, causal=True)):
        (node,) = [n for n in gm.graph.nodes if n.target in AttentionSplit.TARGETS]
        site = attention_split.Site.of(node, on_cpu=True)
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
        assert found == {
            JOINT_PASS: AttentionDropout(options.strict),
            LAST_PASS: AttentionBias(
                options.strict, before=AttentionSplit(options.strict, before=last)
            ),
        }
    both = provenance.Passes(Options(), [x], (torch.bfloat16,), {GPU: []}).load()
    assert both.keys() == {JOINT_PASS, LAST_PASS}
    assert isinstance(both[JOINT_PASS].before, provenance.Provenance)


# ---- in Dynamo's graph --------------------------------------------------------------------------


def sdpa(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, k, mask)


def dropping(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)


def multi_head(x: Tensor) -> Tensor:
    made: Tensor = F.multi_head_attention_forward(
        x, x, x, x.shape[-1], 2, x.new_empty(3 * x.shape[-1], x.shape[-1]), None, None, None,
        False, 0.0, x.new_empty(x.shape[-1], x.shape[-1]), None, need_weights=False,
    )[0]  # fmt: skip
    return made


def row(*size: int, dtype: torch.dtype = torch.float32, trains: bool = False) -> Tensor:
    """One number in memory: nothing here runs."""
    return torch.zeros((), dtype=dtype).requires_grad_(trains).expand(size)


LONG = (8, 4, 1024, 64)
FORESEEN: dict[str, tuple[Any, list[Tensor], list[int]]] = {
    "inference": (sdpa, [row(*LONG)] * 2, [64]),
    "training": (sdpa, [row(*LONG, trains=True)] * 2, [64]),
    "d of 128": (sdpa, [row(*LONG[:3], 120)] * 2, [128]),
    "multi-head": (multi_head, [row(2048, 8, 160)], [128]),
    "16 bits": (sdpa, [row(*LONG, dtype=torch.bfloat16)] * 2, []),
    "small": (sdpa, [row(2, 4, 16, 64)] * 2, []),
    "dropout in training": (dropping, [row(*LONG, trains=True)], [64]),
    "dropout without a backward": (dropping, [row(*LONG)], []),
    "a mask": (sdpa, [*[row(*LONG)] * 2, row(1024, 1024)], []),
    "d of 136": (sdpa, [row(*LONG[:3], 136)] * 2, []),
    "none": (torch.mul, [row(*LONG)] * 2, []),
}


@pytest.mark.parametrize("name", FORESEEN)
def test_kernels_that_are_compiled_beside_others(name: str, built: list[str]) -> None:
    call, inputs, wanted = FORESEEN[name]
    seen: list[GraphModule] = []

    def look(gm: GraphModule, _: Any) -> Callable[..., Any]:
        seen.append(gm)
        return lambda *_: (None,)

    torch._dynamo.reset()
    torch.compile(call, backend=look)(*inputs)
    cpu = torch.device("cpu")
    expected = [
        attention.spec_for(d, backward, 0.1 if "dropout" in name else 0.0)
        for d in wanted
        for backward in ((False, True) if "training" in name else (False,))
    ]
    assert attention_split.foreseen(seen[0], cpu) == expected
    with torch.autocast("cpu"):
        assert attention_split.foreseen(seen[0], cpu) == []
    assert attention_split.foreseen(seen[0], GPU) == [] and not built


def test_they_are_given_to_who_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "kernels_for", lambda *_: {GPU: [SPLIT_GEMM]})
    spec = attention.spec_for(64)
    monkeypatch.setattr(attention_split, "foreseen", lambda *_: [spec])
    gm = forward_graph(*SMALL)
    assert provenance.Passes.over(gm, Options(), []).kernels == {GPU: [SPLIT_GEMM, spec]}
    monkeypatch.setattr(products, "kernels_for", lambda *_: None)
    assert provenance.Passes.over(gm, Options(), []).kernels is None
