"""One site on given values: the fused op, the user's own operations, and these in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node

from fx_fuser.graph.match.pattern import Match
from fx_fuser.graph.match.rewrite import Call
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.kernels.folded import FOLDED
from fx_fuser.ops.library import argument_names
from fx_fuser.verify.accuracy import (
    NEIGHBOURS,
    PROMISED,
    Observed,
    neighbour_of,
    remaining_faults,
)

_BOUND = replace(PROMISED, grad_strides=False)  # nothing is promised about a gradient's layout
_STATISTICS = ("running_mean", "running_var")
_NARROWING = ("float", "half", "bfloat16")  # methods

Leaves = Mapping[Node, Tensor]


def fault_of(
    match: Match, call: Call, values: Mapping[Node, Any], value: Tensor, tf32: bool
) -> str:
    """What is wrong with the fused op on these values of its operands; empty if nothing is.

    value: the last matched node's, as the graph computes it.
    """
    root: Any = meta_tensor(match.root)
    c: Any = meta_tensor(match.site.nodes[0])  # under autocast narrower than operands
    generator = torch.Generator(root.device).manual_seed(0)
    channels_last = _runs_in_channels_last(match, call)

    def in_layout(tensor: Tensor) -> Tensor:
        is_image = channels_last and tensor.ndim == 4
        return tensor.contiguous(memory_format=torch.channels_last) if is_image else tensor

    def neighbour(tensor: Tensor) -> Tensor:
        eps = torch.finfo(c.dtype).eps
        return in_layout(neighbour_of(tensor, generator, eps))

    def as_written(leaves: Leaves) -> list[Tensor]:
        with _precision(tf32):
            return [_replay(match, leaves, wide=False), *(leaves[n] for n in call.results)]

    def in_float64(leaves: Leaves) -> list[Tensor]:
        return [_replay(match, leaves, wide=True), *(leaves[n] for n in call.results)]

    def fused(leaves: Leaves) -> list[Tensor]:
        return call.target(*torch.fx.node.map_arg(call.args, leaves.__getitem__))

    eager = _observe(match, values, as_written)
    exact = _observe(match, values, in_float64, Tensor.double)

    def faults_of(found: Observed, eager: Observed, exact: Observed) -> list[str]:
        changed = ([in_layout] * channels_last, [neighbour] * NEIGHBOURS)
        peers, neighbours = (
            (_observe(match, values, as_written, change) for change in changes)
            for changes in changed
        )
        return remaining_faults(found, eager, exact, _BOUND, peers, neighbours)

    # All rivals read these operands. Are they the ones that the graph reads?
    in_graph = Observed({"value": value.detach()})
    alone = eager.outputs["value"]
    same = (value.dtype, value.shape) == (alone.dtype, alone.shape)
    same = same and torch.allclose(value, alone, rtol=0, atol=0, equal_nan=True)
    if not same and faults_of(in_graph, Observed(eager.outputs), Observed(exact.outputs)):
        return "the matched operations by themselves give another result than in the graph"
    try:
        found = _observe(match, values, fused)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "; ".join(faults_of(found, eager, exact))


def _runs_in_channels_last(match: Match, call: Call) -> bool:
    """A folded convolution's weight is channels_last, whatever the user's is. Libraries convolve
    it by another algorithm, whose error may be several times as large on the same values (oneDNN:
    four times, of 512 channels), in the user's own operations as well.
    """
    given = dict(zip(argument_names(match.site.kind), call.args))
    return given.get("product") == FOLDED


def _observe(
    match: Match,
    values: Mapping[Node, Any],
    run: Callable[[Leaves], list[Tensor]],
    change: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Observed:
    """Run one rival: its values, and the gradients of the operands that require one.

    change: applied to floating-point operands.
    """
    root: Any = meta_tensor(match.root)
    leaves = {node: _leaf(match, node, values[node], change) for node in match.operands}
    with _by_itself(), torch.set_grad_enabled(root.requires_grad):
        y, *statistics = run(leaves)
        seen = Observed({"value": y.detach()}, differentiable=[y.requires_grad])
        seen.state = dict(zip(_STATISTICS, statistics))
        if root.requires_grad:
            generator = torch.Generator(y.device).manual_seed(1)
            dy = torch.randn(y.shape, generator=generator, dtype=root.dtype, device=y.device)
            with torch.autocast(y.device.type, enabled=False):
                torch.autograd.backward(y, dy.to(y.dtype))
    roles = {**match.site.operands, **match.wildcards}
    grads = {n: leaves[o].grad for n, o in roles.items() if isinstance(o, Node)}
    seen.grads = {name: grad for name, grad in grads.items() if grad is not None}
    return seen


def _leaf(match: Match, node: Node, value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A copy of an operand: what is computed from it reaches nothing else."""
    leaf = value.detach()
    if node in [match.site.operands.get(name) for name in _STATISTICS]:
        leaf = leaf.clone()  # the only operands that a matched node writes to
    if leaf.is_floating_point():
        leaf = change(leaf)
    return leaf.requires_grad_(meta_tensor(node).requires_grad)  # type: ignore[union-attr]


def _replay(match: Match, leaves: Leaves, wide: bool) -> Tensor:
    """Evaluate the matched nodes from the operands; wide: casts are to float64 instead."""
    view, known = match.view, dict[Node, Any]()

    def value_of(reader: Node, node: Node) -> Any:
        if node not in known:
            read = view.value(reader, node)
            # Between an operand and the match: a weight's transpose, a 0-d tensor's item().
            known[node] = leaves[read] if read in leaves else run(node)
        return known[node]

    def run(node: Node) -> Any:
        def argument(a: Any) -> Any:
            if isinstance(a, Node):
                return value_of(node, a)
            cast = wide and isinstance(a, torch.dtype) and a.is_floating_point
            return torch.float64 if cast else a

        args, kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), argument)
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        method = "double" if wide and node.target in _NARROWING else str(node.target)
        return getattr(args[0], method)(*args[1:], **kwargs)

    for node in sorted(match.nodes, key=view.order.__getitem__):
        known[node] = run(node)
    return known[match.root]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _by_itself() -> Iterator[None]:
    """Autograd without what the user has set around the model: the hooks with which a checkpoint
    stops recomputation, compiled autograd, and autocast's cache of casts of leaves.
    """
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with saved_tensors_hooks(_itself, _itself), compiled_autograd._disable():
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)


@contextmanager
def _precision(tf32: bool) -> Iterator[None]:
    """The user's own gemms may use TF32 as well, if the fused one does."""
    settings: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]  # type: ignore[attr-defined]
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings if tf32 else ():
            setting.fp32_precision = "tf32"
        yield
    finally:
        for setting, value in zip(settings, before):
            setting.fp32_precision = value
