"""All kernels that a graph may come to need are compiled in one run, as far as cores are idle."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_fuser.graph.match.grow import Grown
from fx_fuser.graph.match.pattern import Match
from fx_fuser.kernels import candidates
from fx_fuser.kernels.split import LINEAR_SPLIT, MIXED_GEMMS, SPLIT_GEMM
from fx_fuser.native import binaries, load, store
from fx_fuser.native.jobs import Job
from fx_fuser.native.kernel_spec import KernelSpec, texts_of
from fx_fuser.options import Options
from fx_fuser.passes import products, provenance
from fx_fuser.planning import ahead, gate
from fx_fuser.planning.case import MatchCase
from tests.plan_cases import BUILD, GPU, linear_tensors


def tail(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, weight)) * 2.0


@pytest.fixture
def grown(match_of: Callable[..., Match]) -> Grown:
    found = match_of(
        tail, torch.randn(4, 16), torch.randn(8, 16), options={"cpu_ops": True, "verify": "never"}
    )
    assert isinstance(found, Grown) and found.alone is not None
    return found


@pytest.fixture
def built(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The specs' names of each run."""
    runs: list[list[str]] = []
    monkeypatch.setattr(load, "build", lambda specs, *_: runs.append([s.name for s in specs]))
    monkeypatch.setattr(load, "_index_of", lambda _: 0)
    monkeypatch.setattr(store, "holds", lambda _: False)
    return runs


def _texts_of(names: Sequence[str], grown: Grown) -> set[str]:
    return set(texts_of(map(_spec_of(grown), names)))


def _on(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))


def _build(grown: Grown, beside: Sequence[KernelSpec] = (), most: int = 64) -> None:
    ahead.build([grown.alone], [grown], {GPU: beside}, Options(), most)  # type: ignore[list-item]


def test_a_linear_without_a_tail_is_compiled_with_the_passes_gemm(
    match_of: Any, on_gpu: Any
) -> None:
    """And loaded apart: what one remembers of data that splits badly is not the other's."""

    def alone(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    case = MatchCase(match_of(alone, *linear_tensors(), options={"plan": "always"}), Options())
    *_, chosen = candidates(case)
    own = [spec for spec in case.specs(chosen) if spec.family is LINEAR_SPLIT]
    assert len(own) == 2 and own[1] == SPLIT_GEMM
    assert own[0].texts == SPLIT_GEMM.texts and own[0].name != SPLIT_GEMM.name
    assert len(texts_of(own)) == len(SPLIT_GEMM.texts)


def test_z_alone_its_tail_and_what_passes_need_are_one_run(
    grown: Grown, built: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _on(16, monkeypatch)
    _build(grown, [SPLIT_GEMM])
    (names,) = built
    assert len(names) == len(set(names))
    assert SPLIT_GEMM.name in names
    for match, own in ((grown.alone, False), (grown, True)):
        assert match is not None
        case = MatchCase(match, Options())
        for choices in candidates(case)[own:]:
            assert {spec.name for spec in case.specs(choices)} <= set(names)


@pytest.mark.parametrize("cores, most", [(1, 64), (16, 0)], ids=["no core", "no structure"])
def test_a_tail_waits_where_nothing_is_idle(
    cores: int,
    most: int,
    grown: Grown,
    built: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _on(16, monkeypatch)
    _build(grown)
    _on(cores, monkeypatch)
    _build(grown, most=most)
    with_tail, alone = map(set, built)
    assert alone < with_tail and alone
    assert not any("tanh" in s.text for s in map(_spec_of(grown), alone))


@pytest.mark.parametrize("idle", [0, 1])
def test_each_text_takes_a_core(
    idle: int, grown: Grown, built: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tail is one text more: what else its kernel is made of is z alone's. The passes' gemm of
    mixed operands is two, and one kernel."""
    beside = MIXED_GEMMS[torch.bfloat16]
    _on(1, monkeypatch)
    _build(grown, [beside])
    own = [name for name in built[0] if name != beside.name]
    texts = {*_texts_of(own, grown), *beside.texts}
    # Of the epilogue alone, the gemm's own and what all gemms share, and the mixed gemm's.
    assert len(texts) == 3 + 2 != len(built[0])
    _on(len(texts) + idle, monkeypatch)
    _build(grown, [beside])
    assert len(built[1]) == len(built[0]) + idle
    own = [name for name in built[1] if name != beside.name]
    assert len({*_texts_of(own, grown), *beside.texts}) == len(texts) + idle


def _spec_of(grown: Grown) -> Callable[[str], KernelSpec]:
    specs = {
        spec.name: spec
        for match in (grown, grown.alone)
        if match is not None
        for choices in candidates(MatchCase(match, Options()))
        for spec in MatchCase(match, Options()).specs(choices)
    }
    return specs.__getitem__


def test_what_is_loaded_is_not_built(
    grown: Grown, built: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _on(16, monkeypatch)
    _build(grown)
    monkeypatch.setattr(load, "_kernels", {(name, 0): 1 for name in built[0]})
    _build(grown)
    assert built[1] == []


def test_tails_wait_where_nothing_else_is_compiled(
    grown: Grown, built: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A second process, say: what the first compiled is kept, and its tails were not all needed.
    _on(16, monkeypatch)
    kept: set[str] = set()
    monkeypatch.setattr(store, "holds", lambda job: job.key in kept)
    monkeypatch.setattr(binaries, "_cubin_job", lambda text, *_: Job(text, text, "", "", ()))
    _build(grown)
    texts = _texts_of(built[0], grown)
    tails = {text for text in texts if "tanh" in text}
    assert tails and texts > tails
    kept.update(texts - tails)
    _build(grown)
    assert built[1] == []
    for lost in texts - tails:  # now there is something to wait for
        kept.remove(lost)
        _build(grown)
        kept.add(lost)
        affected = {s.name for s in map(_spec_of(grown), built[0]) if {lost, *tails} & {*s.texts}}
        assert set(built[-1]) == affected


def test_what_fails_is_left_to_those_who_ask(
    grown: Grown, built: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such thing")

    for owner, name in ((load, "build"), (ahead.calls, "kernel_specs")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            _build(grown)


@pytest.mark.slow
def test_the_gate_gives_what_others_need(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(ahead, "build", lambda *arguments: given.append(arguments))
    monkeypatch.setattr(products, "kernels_for", lambda *_: {GPU: [SPLIT_GEMM]})
    monkeypatch.setattr(products, "pass_for", lambda *_: None)
    monkeypatch.setattr(gate, "_structures", {frozenset("a")})
    torch.compile(tail, backend="fx_fuser", options={"cpu_ops": True, "verify": "never"})(
        torch.randn(4, 16), torch.randn(8, 16)
    )
    ((first, whole, beside, _, most),) = given
    assert first == whole and len(whole) == 1
    assert beside == {GPU: [SPLIT_GEMM]} and most == 63


def test_build_compiles_what_is_missing(
    fake: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binaries, "arch_of", lambda _: "sm_90a")
    monkeypatch.setattr(load, "_index_of", lambda _: 0)
    BUILD([SPLIT_GEMM, SPLIT_GEMM], GPU, batch_stats=True)
    assert fake.calls == len(SPLIT_GEMM.texts) + 1
    BUILD([SPLIT_GEMM], GPU)
    assert fake.calls == len(SPLIT_GEMM.texts) + 1
    assert (SPLIT_GEMM.name, 0) not in load._kernels


def _cell(x: Tensor) -> Tensor:
    return nn.GRUCell(4, 4)(x)


PRODUCTS: dict[str, Callable[[Tensor], Any]] = {
    "matmul": lambda x: x @ x,
    "method": lambda x: x.mm(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "multi-head": lambda x: nn.MultiheadAttention(4, 1)(x, x, x)[0],
    "cell": _cell,
    "checkpointed": lambda x: torch.utils.checkpoint.checkpoint(
        lambda v: torch.sin(v @ v), x, use_reentrant=False
    ),
}
NONE: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": lambda x: torch.sin(x) * x,
    "convolution": lambda x: F.conv2d(x[None, None], x[None, None, :2, :2]),
    "norm and pooling": lambda x: F.max_pool2d(
        F.relu_(F.batch_norm(x[None, None], None, None, training=True)), 2
    ).flatten(1),
    "reduction": lambda x: F.layer_norm(x, (4,)).sum(),
}


@pytest.mark.parametrize("name", [*PRODUCTS, *NONE])
def test_no_kernel_is_compiled_for_a_graph_without_a_product(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(products, "kernels_for", lambda *_: asked.append(_))
    # They are asked for before Inductor has the graph, and it takes seconds.
    monkeypatch.setattr(Options, "inner_compiler", lambda self: lambda gm, inputs: gm.forward)
    torch._dynamo.reset()
    torch.compile({**PRODUCTS, **NONE}[name], backend="fx_fuser")(torch.randn(4, 4))
    assert bool(asked) == (name in PRODUCTS)


def test_the_passes_load_nothing_where_they_have_no_kernel() -> None:
    assert provenance.Passes(Options(), [], (), None).load() == {}
