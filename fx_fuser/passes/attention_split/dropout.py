"""Inductor's graph of forward and backward → the same, with attention that drops weights by our
kernels if faster: of fp32 by fp16 halves, of 16 bits with a bias.

`fx_fuser.passes.attention_split` and its `biased` have the rest. Which weights are dropped depends
on whose operation it is, so forward and backward are replaced together, before they are
partitioned, or not at all. A graph's seeds are drawn at once, by the operation that Inductor uses
for its own dropout: so CUDA graphs, recomputation and `torch.manual_seed` behave as they do there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config, inductor_prims
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fx_fuser.kernels.attention import bias as attention_bias
from fx_fuser.native import load
from fx_fuser.passes.attention_split import (
    ATTENTION,
    ATTENTION_BACKWARD,
    COUNTERS,
    AttentionSplit,
    Site,
    arguments_of,
    biased,
    items_of,
)
from fx_fuser.passes.graph_pass import OF_VALUE, call, loaded
from fx_fuser.planning import contest

_OUT, _LSE, _SEED, _OFFSET = range(4)  # results of torch's operation
# Arguments that both operations share.
_SHARED = ("query", "key", "value", "attn_bias", "dropout_p", "is_causal", "scale")
Pair = tuple[Site, Site] | tuple[biased.Site, biased.Site]


@dataclass(frozen=True)
class AttentionDropout(AttentionSplit):
    """Attention that drops weights. halves: fp32 attention, too."""

    TARGETS = (ATTENTION,)
    halves: bool = True

    def settings(self) -> tuple[Any, ...]:
        of_bias = (spec.name for spec in attention_bias.offered())
        return *super().settings(), "dropout", self.halves, *of_bias

    def replacing(self, graph: Graph) -> Callable[[Node], str | None]:
        seeds: list[Node] = []
        stays = config.fallback_random or _recomputes_all(graph)

        def replace(node: Node) -> str | None:
            pair = None if stays else _pair_of(node, self.on_cpu, self.halves)
            if pair is None or not (self.on_cpu or _gains(pair, self.strict)):
                return None
            forward, backward = pair
            suffix = " with a bias" if isinstance(forward, biased.Site) else ""
            seed = _new_seed(graph, node, seeds)
            # Make both first: if one cannot be made, neither is put in place.
            made = [site.made(seed) for site in pair]
            name = backward.node.target._schema.name  # type: ignore[union-attr]
            counters[COUNTERS][name.removeprefix("aten::") + suffix] += 1
            backward.put(made[1])
            forward.put(made[0])
            return suffix

        return replace


def _recomputes_all(graph: Graph) -> bool:
    """Will backward recompute all of forward?  Then torch draws new seeds there, even for those
    that must be saved."""
    budgets: list[Any] = [functorch_config.activation_memory_budget]
    for node in graph.nodes:
        of_region = (node.meta.get("custom") or {}).get("_region_activation_memory_budget")
        budgets += [node.meta.get("memory_budget"), of_region]
    return 0 in budgets


def _pair_of(node: Node, on_cpu: bool, halves: bool) -> Pair | None:
    """An attention that drops weights and its backward, if only that reads what it has saved."""
    items = items_of(node)
    if items is None or not {_LSE, _SEED, _OFFSET} <= items.keys():
        return None
    readers = {user for i in (_LSE, _SEED, _OFFSET) for user in items[i].users}
    backs = [user for user in items[_LSE].users if user.target is ATTENTION_BACKWARD]
    if len(backs) != 1 or readers != {*backs}:
        return None
    (back,) = backs
    here, there = arguments_of(node), arguments_of(back)
    saved = {"out": _OUT, "logsumexp": _LSE, "philox_seed": _SEED, "philox_offset": _OFFSET}
    if any(here[name] != there[name] for name in _SHARED):
        return None
    if any(there[name] is not items.get(i) for name, i in saved.items()):
        return None
    for kind in (Site, biased.Site) if halves else (biased.Site,):
        sites = [kind.of(one, on_cpu, drops=True) for one in (node, back)]
        if None not in sites:
            return tuple(sites)  # type: ignore[return-value]
    return None


def _gains(pair: Pair, strict: bool) -> bool:
    device = pair[0].device
    specs = [site.spec for site in pair]
    if not all(load.runs_on(spec, device) for spec in specs) or pair[0].is_small():
        return False
    if len(loaded(specs, device, "attention", strict)) < len(specs):
        return False
    times = [site.times() for site in pair]
    if None in times:
        return False
    torchs, ours = map(sum, zip(*times))
    return contest.gains(ours, torchs)


def _new_seed(graph: Graph, like: Node, seeds: list[Node]) -> Node:
    """One more of the graph's seeds: one node draws them all, and each is a view of it.

    like: an attention. Neither a checkpoint nor a partitioner that saves memory may recompute
    seeds: backward reads those that forward has drawn.
    """
    device = like.meta["val"][_OUT].device
    of_device = [node for node in seeds if node.args[1] == device]
    if not of_device:
        first = next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(first):
            made = graph.call_function(inductor_prims.seeds, (0, device))
        made.meta = {k: v for k, v in like.meta.items() if k not in OF_VALUE}
        made.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        seeds.append(made)
        of_device = [made]
    (drawn,) = of_device
    place: Any = drawn.args[0]
    drawn.update_arg(0, place + 1)
    with like.meta["val"][_OUT].fake_mode:
        drawn.meta["val"] = torch.empty(place + 1, dtype=torch.int64, device=device)
    with graph.inserting_before(like):
        return call(graph, like, torch.ops.aten.select.int, drawn, 0, place)
