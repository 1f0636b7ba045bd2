"""Gathers along rows by an index that batches share become fx_fuser's: values, gradients and
refusals beside eager mode and float64."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from by_hand_graphs import with_gradients
from torch import Tensor, nn
from torch.fx import Graph

from benchmarks.sm90 import relative
from fx_fuser import explain
from fx_fuser.kernels.attention import gathered
from fx_fuser.ops.attention_bias.gathered import GATHER_ROWS
from fx_fuser.options import Options
from fx_fuser.passes.by_hand import clock, gathers
from fx_fuser.planning.bench_ops import form_of_value

B, L, PLACES, KEYS = 3, 12, 20, 7
MOST = 2  # times eager's error, the contract in 16 bits
Call = Callable[..., Tensor]
ON_CPU = Options(cpu_ops=True, strict=True)


def inputs(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(B, L, PLACES).to(dtype).requires_grad_()
    return [x, torch.randint(PLACES, (L, KEYS))]


def plain(x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x * 2, -1, index.expand(x.shape[0], -1, -1)) * 3


def named(x: Tensor, index: Tensor) -> Tensor:
    whole = index.unsqueeze(0).broadcast_to(*x.shape[:-1], index.shape[-1])
    return torch.gather(x, index=whole, dim=2)


def of_heads(x: Tensor, index: Tensor) -> Tensor:
    """Of four dimensions, two of batches."""
    heads = x.unflatten(2, (2, -1)).transpose(1, 2)
    index = index.clamp(max=heads.shape[-1] - 1)
    return heads.contiguous().gather(-1, index.expand(*heads.shape[:2], -1, -1))


def relative_positions(x: Tensor, index: Tensor) -> Tensor:
    """DeBERTa's, of keys: transposed, and added in place."""
    ids = torch.arange(L)
    at = (ids[:, None] - ids + PLACES // 2).clamp(0, PLACES - 1).unsqueeze(0)
    score = 0 + x[..., :L] * 2
    score += torch.gather(x, -1, at.expand(x.shape[0], L, L)).transpose(-1, -2) / 3
    return score


def turned(x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x, -1, index.expand(x.shape[0], -1, -1)).mT


def all_of_one_place(x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x, -1, (index * 0 + 1).expand(x.shape[0], -1, -1)) * 1.5


FORMS = [plain, named, of_heads, relative_positions, turned, all_of_one_place]


def check(call: Call, given: Sequence[Any], options: Options = ON_CPU) -> Graph:
    """Out is eager's, bit for bit and in its strides; gradients are at most twice as far from
    float64's as eager's."""
    graphs: list[Graph] = []

    def backend(module: Any, example: Sequence[Any]) -> Any:
        gathers.rewrite(module.graph, options, frozenset({torch.bfloat16, torch.float16}))
        module.graph.lint()
        module.recompile()
        graphs.append(module.graph)
        return torch._dynamo.lookup_backend("aot_eager")(module, example)

    torch._dynamo.reset()
    mine = with_gradients(torch.compile(call, backend=backend)(*given), given)
    theirs = with_gradients(call(*given), given)
    wide = [
        t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for t in given
    ]
    exact = with_gradients(call(*wide), wide)
    assert torch.equal(mine[0], theirs[0]) and mine[0].stride() == theirs[0].stride()
    for a, b, c in zip(mine[1:], theirs[1:], exact[1:], strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert relative(a.double(), c) <= MOST * max(relative(b.double(), c), 1e-4)
    return graphs[0]


def taken(graph: Graph) -> list[bool]:
    """Of those that are taken: is the result transposed?"""
    return [n.args[2] for n in graph.nodes if n.target is GATHER_ROWS]  # type: ignore[misc]


@pytest.mark.parametrize("call", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forms(call: Call, dtype: torch.dtype) -> None:
    graph = check(call, inputs(dtype))
    assert taken(graph) == [call is relative_positions]
    assert not any("gather" in str(n.target) for n in graph.nodes if n.target is not GATHER_ROWS)


def test_inference_takes_none() -> None:
    """On an H200 softmax with both gathers was faster than softmax behind one."""
    x, index = inputs()
    for call in (relative_positions, plain):
        assert taken(check(call, [x.detach(), index])) == []


def test_a_sum_of_many_is_as_exact_as_fp32() -> None:
    """Of 16 bits each, as eager mode adds them, 300 ones are 256."""
    x = torch.zeros(1, 1, 4, dtype=torch.bfloat16, requires_grad=True)
    out = GATHER_ROWS(x, torch.ones(1, 300, dtype=torch.int64))
    out.backward(torch.ones_like(out))
    assert x.grad is not None and x.grad.tolist() == [[[0, 300, 0, 0]]]


def test_the_order_of_dimensions_shows_in_what_is_returned() -> None:
    """A transposed result has eager mode's strides, so it is not made anew."""

    def call(x: Tensor, index: Tensor) -> Tensor:
        return torch.gather(x, -1, index.expand(x.shape[0], -1, -1)).transpose(1, 2) * 2

    assert taken(check(call, inputs())) == [False]


def test_a_view_of_the_transposed_one() -> None:
    def call(x: Tensor, index: Tensor) -> Tensor:
        out = torch.gather(x, -1, index.expand(x.shape[0], -1, -1)).transpose(1, 2)
        return out.reshape(-1, L) + torch.zeros(B * KEYS, L)

    assert taken(check(call, inputs())) == [False]


# ---- what stays ---------------------------------------------------------------------------------


def of_each_batch(x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x, -1, torch.stack([index, index.flip(0), index.flip(1)]))


def of_rows(x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x, 1, (index[:, :1] % L).expand(x.shape[0], L, PLACES))


def of_some_rows(x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x, -1, index[:5].expand(x.shape[0], -1, -1))


def of_two_dimensions(x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x[0], -1, index) * 1.0


def written_to(x: Tensor, index: Tensor) -> Tensor:
    out = torch.gather(x, -1, index.expand(x.shape[0], -1, -1))
    return out.mul_(2)


def view_written_to(x: Tensor, index: Tensor) -> Tensor:
    out = torch.gather(x, -1, index.expand(x.shape[0], -1, -1)).transpose(-1, -2)
    out /= 2
    return out * 1.0


def of_no_gradient(x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x.detach(), -1, index.expand(x.shape[0], -1, -1)).sum() + x


def wide(x: Tensor, index: Tensor) -> Tensor:
    return torch.gather(x.float(), -1, index.expand(x.shape[0], -1, -1))


def apart(x: Tensor, index: Tensor) -> Tensor:
    """Places that are not adjacent."""
    return torch.gather(x.mT, -1, index.T.repeat(3, 1)[:PLACES].expand(x.shape[0], -1, -1) % L)


STAY = [
    of_each_batch, of_rows, of_some_rows, of_two_dimensions, written_to, view_written_to,
    of_no_gradient, wide, apart,
]  # fmt: skip


@pytest.mark.parametrize("call", STAY)
def test_what_stays(call: Call) -> None:
    assert taken(check(call, inputs())) == []


def test_what_is_under_vmap_stays() -> None:
    def call(x: Tensor, index: Tensor) -> Tensor:
        one = lambda x: torch.gather(x[None], -1, index[None])[0]  # noqa: E731
        return torch.vmap(one)(x)

    assert taken(check(call, inputs())) == []


def test_rows_that_no_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "PLACES", PLACES - 1)
    assert taken(check(plain, inputs())) == []
    monkeypatch.setattr(gathered, "PLACES", PLACES)
    monkeypatch.setattr(gathered, "COLUMNS", KEYS - 1)
    assert taken(check(plain, inputs())) == []


def test_small_ones_stay_on_a_gpu() -> None:
    one = raced(True)
    one.check(on_cpu=True, strict=True)
    with pytest.raises(Exception, match="it is small"):
        one.check(on_cpu=False, strict=True)


def raced(transposed: bool) -> clock.Gather:
    return clock.Gather(*map(form_of_value, inputs()), transposed)  # type: ignore[arg-type]


@pytest.mark.parametrize("transposed", [False, True])
def test_the_contest_runs_both(transposed: bool) -> None:
    """On a CPU by torch's operations, which are compared with themselves."""
    torchs, ours = (one.run() for one in raced(transposed).candidates())
    assert len(torchs) == len(ours) == 2  # type: ignore[arg-type]
    shapes = [[t.shape for t in made] for made in (torchs, ours)]  # type: ignore[attr-defined]
    assert shapes[0] == shapes[1]


def test_a_report_says_it() -> None:
    def call(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        return plain(x @ weight, index)

    x, index = inputs()
    weight = torch.eye(PLACES, dtype=x.dtype)
    torch._dynamo.reset()
    said = str(explain(call, x, weight, index, options={"cpu_ops": True}))
    assert "The gather at" in said and "runs as fx_fuser's" in said


# ---- nets ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("buckets, tokens", [(-1, 24), (-1, 80), (8, 40)])
@pytest.mark.parametrize("masked", [False, True])
def test_deberta(buckets: int, tokens: int, masked: bool) -> None:
    """80: more than it has positions, so that those at the ends are read often; buckets: many
    positions far away are one."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=64,
        vocab_size=50, relative_attention=True, pos_att_type=["p2c", "c2p"],
        position_buckets=buckets, max_position_embeddings=96, max_relative_positions=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    net = transformers.DebertaV2Model(config).train()
    given = {"input_ids": torch.randint(50, (3, tokens))}
    if masked:
        given["attention_mask"] = torch.ones(3, tokens, dtype=torch.int64)
        given["attention_mask"][1, tokens // 2 :] = 0
    graphs: list[Graph] = []

    def backend(module: Any, example: Sequence[Any]) -> Any:
        gathers.rewrite(module.graph, ON_CPU, frozenset({torch.bfloat16}))
        module.recompile()
        graphs.append(module.graph)
        return torch._dynamo.lookup_backend("aot_eager")(module, example)

    def trained(of: nn.Module, call: Callable[..., Any], amp: bool) -> list[Tensor]:
        of.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if amp else contextlib.nullcontext():
            y = call(**given).last_hidden_state
        y.double().pow(3).mean().backward()
        return [y.detach(), *(p.grad for p in of.parameters() if p.grad is not None)]

    torch._dynamo.reset()
    mine = trained(net, torch.compile(net, backend=backend), amp=True)
    theirs = trained(net, net, amp=True)
    wider = copy.deepcopy(net).double()
    exact = trained(wider, wider, amp=False)
    assert [one for graph in graphs for one in taken(graph)] == [False, True] * 2
    for a, b, c in zip(mine, theirs, exact, strict=True):
        if c.norm() > 1e-9:  # a bias of keys alone has no gradient
            assert relative(a.double(), c) <= MOST * max(relative(b.double(), c), 1e-4)
