"""Masks of attention that a graph makes itself: which are taken away, and which stay."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fx_fuser
from benchmarks.big_nets import NETS
from benchmarks.whole_net import Case
from fx_fuser.passes import masks
from fx_fuser.report.report import Report

S = 6  # positions


def qkv(queries: int = S, keys: int = S) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, n, 8, requires_grad=True) for n in (queries, keys, keys)]


def read(attend: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> list[masks.Mask]:
    """What `simplify` says of the graph, which then computes what it computed before."""
    found: list[masks.Mask] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        found.extend(masks.Reader().simplify(gm, gm.graph))
        gm.graph.lint()
        gm.recompile()
        return gm

    torch._dynamo.reset()
    expected = attend(*inputs)
    made = torch.compile(attend, backend=backend, dynamic=dynamic)(*inputs)
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-6)
    return found


def positions() -> Tensor:
    return torch.arange(S)


def compared() -> Tensor:
    return positions()[None, :] <= positions()[:, None]


def whole() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool)


def samples(*of: Tensor) -> Tensor:
    return torch.stack(of)[:, None]


def heads(first: Tensor, rest: Tensor) -> Tensor:
    """For all samples alike: only the outer dimension is expanded."""
    return torch.stack((first, rest, rest)).expand(2, -1, -1, -1)


def least() -> Tensor:
    mask = torch.full((S, S), torch.finfo(torch.float32).min)
    return torch.triu(mask, diagonal=1)[None, None].expand(2, 1, -1, -1)


def filled_in_place() -> Tensor:
    mask = torch.zeros(S, S)
    mask.masked_fill_(positions()[None, :] > positions()[:, None], -math.inf)
    return mask


def written_by_index() -> Tensor:
    mask = torch.zeros(S, S, dtype=torch.bool)
    for i in range(S):
        mask[i, : i + 1] = True
    return mask


def mapped() -> Tensor:
    """As transformers 4.53 to 4.57 do."""

    def row(q: Tensor) -> Tensor:
        return torch.vmap(lambda k: (k <= q) & k.new_ones((), dtype=torch.bool))(positions())

    return torch.vmap(row)(positions())[None, None]


CAUSAL = (
    lambda: torch.ones(S, S, dtype=torch.bool).tril(),
    lambda: torch.triu(torch.full((S, S), -math.inf), diagonal=1),
    compared,
    lambda: ~(compared().logical_not())[None, None],
    least,
    filled_in_place,
    written_by_index,
    mapped,
)
OPEN = (
    lambda: torch.ones(2, 1, 1, S, dtype=torch.bool),
    lambda: torch.zeros(S, S),
    lambda: (1 - torch.ones(2, 1, 1, S)) * torch.finfo(torch.float32).min,
)


@pytest.mark.parametrize(
    ("kind", "make"), [("causal", m) for m in CAUSAL] + [("open", m) for m in OPEN]
)
def test_a_mask_that_the_graph_makes_is_taken_away(kind: str, make: Callable[[], Tensor]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, make())

    (mask,) = read(attend, *qkv())
    assert (mask.done, mask.reason) == (kind, "")
    graph = mask.node.graph
    assert mask.node.args[3:] in ((None,), (None, 0.0, kind == "causal"))
    assert mask.node.kwargs.get("is_causal", kind == "causal") is (kind == "causal")
    if make not in (filled_in_place, written_by_index, mapped):  # which do more than make a value
        assert not graph.find_nodes(op="call_function", target=torch.arange)
        assert len(graph.nodes) == 5


STAYS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "given": (lambda m: m, "its mask depends on `m`"),
    "of what is given": (lambda m: m.tril() > 0, "its mask depends on `m`"),
    "written to": (lambda m: torch.zeros(S, S).add_(m), "its mask depends on `m`"),
    "random": (lambda m: torch.rand(S, S) < 2, "which cannot be evaluated here"),
    "empty": (lambda m: torch.empty(S, S) == 0, "which cannot be evaluated here"),
    "a layer": (lambda m: F.relu(torch.zeros(S, S)), "which cannot be evaluated here"),
    "one more": (lambda m: torch.ones(S, S, dtype=torch.bool).tril(1), "its mask is not causal"),
    # of two samples, which expand does not make of one
    "causal for the first": (lambda m: samples(compared(), whole()), "its mask is not causal"),
    "open for the first": (lambda m: samples(whole(), compared()), "its mask is not causal"),
    "causal for the first head": (lambda m: heads(compared(), whole()), "its mask is not causal"),
    "a window": (lambda m: compared() & ~compared().tril(-3), "its mask is not causal"),
    "small": (lambda m: torch.where(compared(), 0.0, -1e4), "values than zero and the lowest"),
    "sloped": (lambda m: (positions() - positions()[:, None]).float(), "other values"),
}


@pytest.mark.parametrize("what", STAYS)
def test_a_mask_that_is_not_surely_so_stays(what: str) -> None:
    make, reason = STAYS[what]

    def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, make(m))

    torch.manual_seed(0)
    given = torch.zeros(S, S)
    found: list[masks.Mask] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        before = str(gm.graph)
        found.extend(masks.Reader().simplify(gm, gm.graph))
        assert str(gm.graph) == before
        return gm

    torch._dynamo.reset()
    torch.compile(attend, backend=backend)(*qkv(), given)
    (mask,) = found
    assert mask.done == "" and reason in mask.reason


def test_lengths_that_differ() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, mask)

    def last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, compared()[-1:])

    assert [m.reason for m in read(attend, *qkv(2, S))] == ["its mask has 2 queries and 6 keys"]
    assert [m.done for m in read(last, *qkv(1, S))] == ["open"]


def test_a_mask_of_dynamic_sizes_stays() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, mask)

    (mask,) = read(attend, *qkv(), dynamic=True)
    assert mask.reason == "its lengths are dynamic"


def test_a_mask_that_is_changed_between_two_attentions() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = compared()
        once = F.scaled_dot_product_attention(q, k, v, mask)
        mask[:] = True
        return F.scaled_dot_product_attention(once, k, v, attn_mask=mask)

    assert [m.done for m in read(attend, *qkv())] == ["causal", "open"]


def test_a_mask_that_is_changed_by_what_is_given() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        mask = compared()
        once = F.scaled_dot_product_attention(q, k, v, mask)
        mask.view(-1).logical_or_(seen)
        return once + F.scaled_dot_product_attention(q, k, v, mask)

    first, second = read(attend, *qkv(), torch.ones(S * S, dtype=torch.bool))
    assert first.done == "causal" and second.reason == "its mask depends on `seen`"


def test_a_mask_that_others_read_too_is_still_made() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        mask = compared()
        return F.scaled_dot_product_attention(q, k, v, mask), mask.sum(0)

    assert [m.done for m in read(attend, *qkv())] == ["causal"]


def test_tensors_of_the_same_kind_are_no_data() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q[0, 0] @ k[0, 0].t()
        mask = torch.zeros_like(scores).masked_fill(~compared(), -math.inf)
        open = v.new_ones((S, S), dtype=torch.bool)
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return F.scaled_dot_product_attention(y, k, v, open), scores

    assert [m.done for m in read(attend, *qkv())] == ["causal", "open"]


def written_by_numpy(m: Tensor) -> Tensor:
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    mask.numpy()[2, 5] = True
    return mask


def added_by_numpy(m: Tensor) -> Tensor:
    mask = torch.zeros(S, S)
    array = mask.numpy()
    array += 1.0
    return mask


def written_in_other_strides(m: Tensor) -> Tensor:
    mask = torch.zeros_like(m)
    mask.t().reshape(-1)[5] = -5.0  # a view there, and of another layout a copy
    return mask


@pytest.mark.parametrize("make", [written_by_numpy, added_by_numpy, written_in_other_strides])
def test_a_mask_that_something_writes_to_unseen(make: Callable[[Tensor], Tensor]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, make(m))

    with torch.no_grad():
        (mask,) = read(attend, *qkv(), torch.randn(S, S).t())
    assert mask.done == ""


def test_what_is_random_is_still_drawn() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros_like(torch.rand(S, S))
        return F.scaled_dot_product_attention(q, k, v, mask) + torch.rand(8)

    torch._dynamo.reset()
    counters.clear()
    drawn = []
    options = {"inner": "aot_eager", "strict": True}
    for run in (attend, torch.compile(attend, backend="fx_fuser", options=options)):
        inputs = qkv()
        torch.manual_seed(1)
        drawn.append((run(*inputs), torch.get_rng_state()))
    torch.testing.assert_close(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
    (mask,) = fx_fuser.explain(attend, *qkv()).masks
    assert mask.reason.endswith("which nothing else reads")


@pytest.mark.slow
def test_a_probability_of_dropout_that_is_no_constant() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, compared(), p)

    torch._dynamo.reset()
    counters.clear()
    options = {"inner": "aot_eager", "strict": True}
    run = torch.compile(attend, backend="fx_fuser", options=options)
    for p in (0.1, 0.2):
        run(*qkv(), p)
    assert counters["fx_fuser_masks"] == {"causal": 2}


def test_a_mask_for_a_device_that_is_not_here() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(S, S, dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, k, v, mask)

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "strict": True}
    with FakeTensorMode():
        inputs = [torch.randn(2, 3, S, 8, device="cuda") for _ in range(3)]
        made = torch.compile(attend, backend="fx_fuser", options=options)(*inputs)
    assert made.shape == (2, 3, S, 8)


def test_an_expanded_mask_is_looked_at_once() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = compared().expand(2, 3, S, S)
        return F.scaled_dot_product_attention(q, k, v, seen)

    with mock.patch.object(masks, "_LARGEST", S * S):
        assert [m.done for m in read(attend, *qkv())] == ["causal"]


def test_under_an_autocast_of_the_graphs_own() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v, compared())

    assert [m.done for m in read(attend, *qkv())] == ["causal"]


def test_a_function_of_the_users_by_a_known_name_is_not_run() -> None:
    calls = []

    def tril(x: Tensor) -> Tensor:
        calls.append(x)
        return torch.tril(x)

    torch._dynamo.allow_in_graph(tril)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, tril(torch.ones(S, S, dtype=torch.bool)))

    (mask,) = read(attend, *qkv())
    assert "which cannot be evaluated here" in mask.reason


def test_what_fails_within_a_vmap_leaves_none_open() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mapped())

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        (node,) = gm.graph.find_nodes(op="call_function", target=operator.and_)
        node.args = (node.args[0], "no tensor")
        (mask,) = masks.Reader().simplify(gm, gm.graph)
        assert mask.reason.startswith("its mask cannot be evaluated: ")
        assert torch._C._functorch.peek_interpreter_stack() is None
        raise RuntimeError("seen")

    torch._dynamo.reset()
    with pytest.raises(Exception, match="seen"):
        torch.compile(attend, backend=backend)(*qkv())


@pytest.mark.parametrize("inner", [pytest.param("inductor", marks=pytest.mark.slow), "aot_eager"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_that_is_given_to_checkpointed_layers(causal: bool, inner: str) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.sin(F.scaled_dot_product_attention(q, k, v, mask[:, :, :, :S]))

    def again(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        made: Tensor = checkpoint(layer, q, k, v, mask[:1], use_reentrant=False)
        return made.cos()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = (compared() if causal else compared().t())[None, None].expand(2, 1, S, S)
        for within in (layer, again):
            q = checkpoint(within, q, k, v, mask, use_reentrant=False)
        return q

    torch._dynamo.reset()
    counters.clear()
    inputs = qkv()
    options = {"inner": inner, "strict": True}
    results = attend(*inputs), torch.compile(attend, backend="fx_fuser", options=options)(*inputs)
    for mine, theirs in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in results)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert counters["fx_fuser_masks"] == ({"causal": 2} if causal else {})


# ---- by the backend ------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, v, compared())
        y = F.scaled_dot_product_attention(y, k, v, bias)
        out: Tensor = torch.sigmoid(self.proj(y)) * 2.0 * q
        return out


@pytest.mark.each_once
@pytest.mark.parametrize("inner", [pytest.param("inductor", marks=pytest.mark.slow), "aot_eager"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_backend_takes_masks_away_with_and_without_sites(inner: str, fused: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    model, inputs, bias = Attention(), qkv(), torch.zeros(S, S)
    options = {"inner": inner, "strict": True, "cpu_ops": True, "auto": False, "plan": "always"}
    compiled = torch.compile(
        model, backend="fx_fuser", options={**options, "patterns": None if fused else []}
    )
    found, expected = compiled(*inputs, bias), model(*inputs, bias)
    torch.testing.assert_close(found, expected)
    wanted = [*inputs, *model.parameters()]
    for mine, theirs in zip(*(torch.autograd.grad(y.sum(), wanted) for y in (found, expected))):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert counters["fx_fuser_masks"] == {"causal": 1}
    assert sum(counters["fx_fuser"].values()) == fused


@pytest.mark.parametrize("options", [{"inner": "aot_eager", "masks": False}, {"inner": "eager"}])
def test_masks_stay_where_that_is_asked_for(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.compile(Attention(), backend="fx_fuser", options=options)(*qkv(), torch.zeros(S, S))
    assert not counters["fx_fuser_masks"]
    with pytest.raises(BackendCompilerFailed, match="option 'masks' is 1; give True or False"):
        torch.compile(Attention(), backend="fx_fuser", options={"masks": 1})(
            *qkv(), torch.zeros(S, S)
        )


def test_explain_says_what_becomes_of_masks() -> None:
    report = fx_fuser.explain(Attention(), *qkv(), torch.zeros(S, S))
    causal, other = report.attention.splitlines()
    assert causal.startswith("The attention mask at ") and "is causal, so it is no" in causal
    assert other.endswith("stays: its mask depends on `bias`")
    assert Report.from_json(report.to_json()) == report


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_language_models_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    counters.clear()
    case = Case.make(NETS[name], "train", torch.device("cpu"), small=True, dropout=False)
    options = {"inner": "aot_eager", "strict": True}
    compiled = torch.compile(case.model, backend="fx_fuser", options=options)
    expected, found = case.observe(case.model), case.observe(compiled)
    assert counters["fx_fuser_masks"] == {"causal": 1}
    for key, grad in expected.grads.items():
        torch.testing.assert_close(found.grads[key], grad, rtol=1e-5, atol=1e-5)
