"""16-bit attention with a bias, of at most 64 queries and 64 keys, as one op.

    (q @ k.mT * scale + learned + mask).softmax(-1) @ v

as Swin has it in windows of 7 x 7, by hand or as torch's call with both in its mask:
`fx_fuser::attention_window` (`fx_fuser.ops.attention_bias.window`). The library is slow at rows of
49, and scores of all windows go through memory four times and more. What is added to the scores
becomes one bias in fp32, of one period of batches: a learned bias is one for all, with a mask of
windows one for each of these.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fx_fuser.graph.attention.read_through import is_written
from fx_fuser.graph.attention.site import SCORE, AttentionSite, Operand, Step
from fx_fuser.graph.prepare.reindex import same_sizes
from fx_fuser.graph.read.canonical import is_number
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.graph.read.view import View
from fx_fuser.kernels.attention.bias import DTYPES
from fx_fuser.kernels.attention.window import spec_of
from fx_fuser.native import load
from fx_fuser.ops.attention_bias.window import ATTENTION_WINDOW
from fx_fuser.options import Options
from fx_fuser.passes.by_hand import clock
from fx_fuser.passes.by_hand.layout import Calls, Layout
from fx_fuser.passes.by_hand.plain import LARGEST_SCALE, factor_of
from fx_fuser.passes.masks import Stays
from fx_fuser.planning import plan


def asked(options: Options, inputs: Sequence[Any]) -> frozenset[torch.dtype]:
    """The dtypes that have kernels on the GPUs of a graph's inputs, or with "cpu_ops" on a CPU."""
    if options.inner != "inductor" or not options.grows:
        return frozenset()
    tensors = [v for v in inputs if isinstance(v, Tensor)]
    used = {value.device for value in tensors if value.device.type == "cuda"}
    if any(plan.unavailable(device) is not None for device in used):
        return frozenset()
    has_kernels = used and all(load.runs_on(spec_of(0, DTYPES[0]), device) for device in used)
    return frozenset(DTYPES if has_kernels or (tensors and options.cpu_ops) else ())


def has_bias(site: AttentionSite) -> bool:
    """Is it of 16 bits, and has its score something added?"""
    return site.dtype in DTYPES and any(True for _ in _added(site))


def _added(site: AttentionSite) -> Iterator[Operand]:
    for step in site.tail:
        if step.op == "add":
            yield from (a for a in step.args if isinstance(a, Operand))


def _factors(site: AttentionSite) -> Iterator[Operand]:
    """Tensors that the score is multiplied by."""
    for step in site.tail:
        if step.op == "mul":
            yield from (a for a in step.args if isinstance(a, Operand))


def call(view: View, layout: Layout, calls: Calls, trains: bool, options: Options) -> Node:
    """Of the op. Raises Stays."""
    query, factor = _before_factor(view, layout.site)
    site = replace(layout.site, q=query)
    layout = replace(layout, site=site)
    scale = factor * _scale_of(site)
    if not torch.finfo(torch.float32).tiny <= abs(scale) <= LARGEST_SCALE:
        raise Stays(f"its scale is {scale:.4g}")
    if not all(isinstance(n, int) for n in site.sizes):
        raise Stays("its sizes are dynamic")
    rows = layout.query(calls)
    for of_heads in _factors(site):
        rows = calls.function(operator.mul, rows, layout.of_heads(calls, of_heads))
    (key, keys), (value, values) = layout.keys(calls), layout.values(calls)
    if key is not keys or value is not values:
        raise Stays("one key head serves several query heads")
    bias = layout.bias(calls, [*_added(site)])
    operands = [n.meta["example_value"] for n in (rows, key, value)]
    numbers = site.dtype, scale, site.is_safe
    check = clock.Windows.of(operands, bias.meta["example_value"], *numbers, trains)
    check.check(options.cpu_ops, options.strict)
    return calls.function(ATTENTION_WINDOW, rows, key, value, bias, scale, site.dtype, site.is_safe)


def _scale_of(site: AttentionSite) -> float:
    """What the product of q and k is multiplied by, ahead of all that is added to it."""
    _check_dtypes(site)
    scale, is_biased = 1.0, False
    for step in site.tail:
        if step.op in ("mul", "div"):
            if is_biased:
                raise Stays("its scores are scaled after its bias")
            is_number_alone = step.op == "div" or not any(isinstance(a, Operand) for a in step.args)
            scale *= factor_of(step) if is_number_alone else 1.0
        elif step.op == "add":
            _check_bias(step)
            is_biased = True
        elif step.op != "cast":
            raise Stays(f"{step.op} is applied to its scores")
    if any(step.op == "dropout" for step in site.post):
        raise Stays("it has dropout")
    return scale


def _before_factor(view: View, site: AttentionSite) -> tuple[Operand, float]:
    """What q was before it was multiplied by a number, and the number: so it is read where the
    projection left it, without a pass over it."""
    node = site.q.node
    written = view.written(node)
    if written is None or written.op not in ("mul", "div") or len(written.args) != 2:
        return site.q, 1.0
    first, second = written.args
    if written.op == "mul" and is_number(first):
        first, second = second, first
    if not isinstance(first, Node) or not is_number(second):
        return site.q, 1.0
    before, now = meta_tensor(first), meta_tensor(node)
    if before is None or now is None or before.dtype != now.dtype:
        return site.q, 1.0
    is_kept = same_sizes(before.shape, now.shape) and view.region[node] == view.region[site.node]
    factor = factor_of(Step(written.op, (SCORE, float(second)), now.dtype))  # type: ignore[arg-type]
    if not is_kept or not math.isfinite(factor) or is_written(view, first, first, view.nodes[-1]):
        return site.q, 1.0
    return replace(site.q, node=first), factor


def _check_bias(step: Step) -> None:
    rest = [a for a in step.args if a is not SCORE]
    if len(rest) != 1 or not isinstance(rest[0], Operand):
        raise Stays("something other than one tensor is added to its scores")
    tensor = meta_tensor(rest[0].node)
    if tensor is None or tensor.dtype not in (*DTYPES, torch.float32):
        raise Stays("what is added to its scores is wider than fp32 or not floating-point")


def _check_dtypes(site: AttentionSite) -> None:
    """16 bits in products, and up to fp32 between them; torch's call is fp32 by its formula alone,
    and in 16 bits its kernels multiply as ours does."""
    found = {"its scores": site.scores, "its weights and values": site.values}
    found = found if site.is_by_hand else {}
    for name, dtype in found.items():
        if dtype != site.dtype:
            raise Stays(f"{name} are of {dtype}, its result is of {site.dtype}")
    between = {step.dtype for step in (*site.tail, *site.post)} | {site.weights}
    if not between <= {site.dtype, torch.float32}:
        raise Stays("its scores are wider than fp32, or of another 16-bit dtype")
