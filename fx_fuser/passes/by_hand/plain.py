"""Is an attention softmax(scale · q kᵀ) v, causal or not?  A fused kernel computes only that."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from fx_fuser.graph.attention.site import SCORE, AttentionSite, Operand, Step
from fx_fuser.graph.read.naming import called
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.passes.masks import Stays

# (mask, numbers of queries and of keys, how it is seen) → "causal" or "open", as `masks.proven`.
Prove = Callable[[Node, tuple[int, int], Callable[[Tensor], Tensor]], str]
_LOWEST = torch.finfo(torch.float32).min
LARGEST_SCALE = 2.0**100  # it is multiplied by log2(e) in fp32


@dataclass(frozen=True)
class Plain:
    """softmax(scale · q kᵀ) v; causal: of the keys up to the query's number."""

    scale: float
    causal: bool


@dataclass(frozen=True)
class _Shown:
    """A mask's value as the keys of each query: [*batch, rows, keys]. hides: true hides a key."""

    mask: Operand
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    hides: bool

    def __call__(self, value: Tensor) -> Tensor:
        seen = self.mask.seen(value, self.sizes, self.order)
        if value.dtype is not torch.bool:
            return seen.float()  # the dtype in which it is added
        return ~seen if self.hides else seen


def _is_least(value: Tensor) -> Tensor:
    return value.float() <= _LOWEST


def plain_of(site: AttentionSite, prove: Prove) -> Plain:
    """Raises Stays where it is more than that, or not fp32 throughout."""
    _check_dtypes(site)
    scale, causal, is_masked = 1.0, False, False
    for step in site.tail:
        if step.op in ("mul", "div"):
            if is_masked:
                raise Stays("its scores are scaled after its mask")
            scale *= factor_of(step)
        elif step.op == "causal":
            causal = True
        elif step.op in ("add", "where"):
            causal |= _kind(site, step, prove) == "causal"
            is_masked = True
        elif step.op != "cast":
            raise Stays(f"{step.op} is applied to its scores")
    if any(step.op == "dropout" for step in site.post):
        raise Stays("it has dropout")
    if not torch.finfo(torch.float32).tiny <= scale <= LARGEST_SCALE:
        raise Stays(f"its scale is {scale:.4g}")
    return Plain(scale, causal)


def _check_dtypes(site: AttentionSite) -> None:
    tensors = {
        f"its {name}": meta_tensor(operand.node)
        for name, operand in (("query", site.q), ("key", site.k), ("value", site.v))
    }
    found = {name: None if tensor is None else tensor.dtype for name, tensor in tensors.items()}
    steps = (*site.tail, *site.post)
    found |= {"its scores": site.scores, "its softmax": site.weights, "its result": site.dtype}
    found |= {f"its scores after {step.op}": step.dtype for step in steps}
    for name, dtype in found.items():
        if dtype is not torch.float32:
            raise Stays(f"{name} is {dtype}, not fp32")


def factor_of(step: Step) -> float:
    """Of a multiplication or division of the scores by a number."""
    numbers = [a for a in step.args if isinstance(a, float)]
    if len(step.args) != 2 or len(numbers) != 1:
        raise Stays(f"{step.op} of its scores is not by a number")
    (number,) = numbers
    if step.op == "mul":
        return number
    return 1 / number if number else math.inf


def _kind(site: AttentionSite, step: Step, prove: Prove) -> str:
    """ "causal" or "open", of a mask that a step adds or chooses by."""
    if step.op == "add":
        rest = [a for a in step.args if a is not SCORE]
        hides = False
    else:
        rest = [step.args[0]]
        hides = step.args[2] is SCORE
        _check_fill(step.args[1 if hides else 2], prove)
    mask = rest[0]
    if len(rest) != 1 or not isinstance(mask, Operand):
        raise Stays(f"{step.op} of its scores takes something other than one mask")
    order = (*site.batch, *site.rows, *site.keys)
    if not len(site.rows) == len(site.keys) == 1:
        raise Stays("its queries or its keys run over several dimensions")
    if not all(isinstance(n, int) for n in site.sizes):
        raise Stays("its sizes are dynamic")
    sizes: tuple[int, ...] = site.sizes  # type: ignore[assignment]
    lengths = sizes[site.rows[0]], sizes[site.keys[0]]
    shown = _Shown(mask, sizes, order, hides)
    return prove(mask.node, lengths, shown)


def _check_fill(fill: object, prove: Prove) -> None:
    """The score of hidden keys must leave them no weight at all."""
    if isinstance(fill, float) and fill <= _LOWEST:
        return
    if not isinstance(fill, Operand):
        raise Stays(f"its hidden keys have a score of {fill:.4g}")
    try:
        is_least = prove(fill.node, (1, 1), _is_least) == "open"
    except Stays:
        is_least = False
    if not is_least:
        raise Stays(f"its hidden keys have a score of {called(fill.node)}, not known to be lowest")
