"""Attention in 16 bits that torch would compute by its formula → in a form that a kernel takes.

`fx_fuser.ops.attention` has the forms, and what the formula costs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from fx_fuser.graph.read.nodes import argument_of, meta_tensor
from fx_fuser.graph.read.view import Region
from fx_fuser.kernels.base import SIXTEEN_BITS
from fx_fuser.ops.attention import ATTENTION, Attention, fitted, why_formula
from fx_fuser.passes import strides

ATTENTIONS = {F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default}
# The op's arguments, where they stand and what they are by default.
_ARGUMENTS: tuple[tuple[str, Any], ...] = (
    ("query", None), ("key", None), ("value", None), ("attn_mask", None), ("dropout_p", 0.0),
    ("is_causal", False), ("scale", None), ("enable_gqa", False),
)  # fmt: skip


def fit(node: Node, region: Region, on_cpu: bool) -> tuple[str, str] | None:
    """Call `fx_fuser::attention` where torch would take the formula, and need not.

    Returns (what was in the way, ""), or ("", why it stays the formula); None if a kernel takes it.
    """
    call, was = _call_of(node), meta_tensor(node)
    tensors = [call.query, call.key, call.value, *([] if call.mask is None else [call.mask])]
    if any(not isinstance(n, Node) or type(meta_tensor(n)) is not FakeTensor for n in tensors):
        return None
    if type(was) is not FakeTensor or was.dtype not in SIXTEEN_BITS:
        return None
    sizes = [n for node in tensors for t in [meta_tensor(node)] for n in (*t.shape, *t.stride())]  # type: ignore[union-attr]
    numbers = (call.dropout, call.causal, call.scale, call.gqa)
    if not all(isinstance(n, int) for n in sizes) or any(isinstance(n, Node) for n in numbers):
        return None  # to look at one would fix it, and compile anew for the next
    if was.device.type != ("cpu" if on_cpu else "cuda"):
        return None
    fakes = Attention(
        *(v.meta["example_value"] if isinstance(v, Node) else v for v in call.arguments())
    )
    why = why_formula(fakes)
    if not why:
        return None
    if fakes.mask is not None and fakes.mask.dtype is not torch.bool:
        return "", f"{why}; its mask adds numbers, of which a kernel may lose a hidden row"
    try:
        with was.fake_mode, torch.set_grad_enabled(was.requires_grad), region.autocast():
            left, now = why_formula(fitted(fakes)[0]), ATTENTION(*fakes.arguments())
    except (RuntimeError, TypeError, ValueError) as error:
        return "", f"{why}; another form fails: {type(error).__name__}: {error}"
    reason = left or _replace(node, call, was, now)
    return ("", f"{why}; {reason}") if reason else (why, "")


def _call_of(node: Node) -> Attention:
    given = [argument_of(node, i, name) for i, (name, _) in enumerate(_ARGUMENTS)]
    return Attention(*(d if g is None else g for g, (_, d) in zip(given, _ARGUMENTS)))


def _replace(node: Node, call: Attention, was: Tensor, now: Tensor) -> str:
    """Why it cannot be replaced; empty if it is."""
    if (now.dtype, now.shape) != (was.dtype, was.shape):
        return f"another form's result is {now.dtype} {tuple(now.shape)}"
    if now.stride() != was.stride():
        try:
            strides.keep(node, now)
        except strides.StridesError as error:
            return str(error)
    node.target, node.args, node.kwargs = ATTENTION, call.arguments(), {}
    return ""
