"""`F.multi_head_attention_forward` that makes weights which nothing reads → the same without.

nn.MultiheadAttention asks for them by default, and torch then computes attention by its formula.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.graph.read.view import View
from fx_fuser.options import Options
from fx_fuser.passes.by_hand import clock
from fx_fuser.passes.by_hand.plain import Plain, Prove
from fx_fuser.passes.masks import Stays

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
# Arguments that add columns to the scores, or stand in for the projected keys.
_ADDS_KEYS = ("bias_k", "bias_v", "add_zero_attn", "static_k", "static_v")


def why_formula(node: Node) -> str:
    """Why torch computes this call by the formula though it need not; empty for any other node."""
    given = _given(node) if node.target is F.multi_head_attention_forward else {}
    if not given.get("need_weights") or not all(map(_is_result, node.users)):
        return ""
    return "it returns weights that nothing reads"


def _given(node: Node) -> dict[str, Any]:
    try:
        bound = _SIGNATURE.bind(*node.args, **node.kwargs)
    except TypeError:
        return {}
    bound.apply_defaults()
    return bound.arguments


def _is_result(reader: Node) -> bool:
    """Does it take the first of the two results, or one that nothing reads?"""
    return reader.target is operator.getitem and (bool(reader.args[1] == 0) or not reader.users)


def rewrite(view: View, node: Node, options: Options, prove: Prove) -> None:
    """Raises Stays, before it changes anything."""
    given = _given(node)
    was = node.meta["example_value"][0]
    operands = [given[name] for name in ("query", "key", "value")]
    tensors = [meta_tensor(n) if isinstance(n, Node) else None for n in operands]
    if any(type(t) is not FakeTensor or t.dtype != torch.float32 for t in (was, *tensors)):
        raise Stays("it is not fp32")
    if not all(isinstance(n, int) for t in tensors for n in (*t.shape, *t.stride())):  # type: ignore[union-attr]
        raise Stays("its sizes are dynamic")
    if any(given[name] is not None and given[name] is not False for name in _ADDS_KEYS):
        raise Stays("it has keys of its own")
    if given["key_padding_mask"] is not None:
        raise Stays("it has a key padding mask")
    if given["dropout_p"] != 0 and given["training"] is not False:
        raise Stays("it has dropout")
    region = view.region[node]
    if region.functional_level() is not None:
        raise Stays("it is inside a functorch transform or a forward-mode AD level")
    heads = [_heads(t, was.shape[-1], given["num_heads"]) for t in tensors]  # type: ignore[arg-type]
    kind = _kind(given["attn_mask"], heads[0].shape[2], heads[1].shape[2], prove)
    plain = Plain(heads[0].shape[-1] ** -0.5, kind == "causal")
    clock.check(heads, plain, was.requires_grad, options.cpu_ops, options.strict)
    # torch looks at the mask's shape, not at its values.
    edits: dict[str, Any] = {"need_weights": False, "is_causal": plain.causal}
    edits |= {} if plain.causal else {"attn_mask": None}
    args, kwargs = _edited(node, edits)
    fakes: Any = torch.fx.map_arg((args, kwargs), lambda n: n.meta["example_value"])
    with was.fake_mode, torch.set_grad_enabled(was.requires_grad), region.autocast():
        now = F.multi_head_attention_forward(*fakes[0], **fakes[1])
    if (now[0].dtype, now[0].shape, now[0].stride()) != (was.dtype, was.shape, was.stride()):
        raise Stays("its result would be laid out differently")
    for reader in list(node.users):
        if reader.args[1] == 1:
            node.graph.erase_node(reader)
    node.args, node.kwargs = args, kwargs
    node.meta["example_value"] = (was, None)


def _heads(tensor: Tensor, width: int, count: int) -> Tensor:
    """[N, heads, L, D] of what torch projects from [L, N, *]; N is 1 if it is missing."""
    samples = tensor.shape[1] if tensor.ndim == 3 else 1
    with tensor.fake_mode:  # type: ignore[attr-defined]
        projected = tensor.new_empty(tensor.shape[0], samples, width)
        return projected.unflatten(-1, (count, -1)).permute(1, 2, 0, 3)


def _kind(mask: Any, queries: int, keys: int, prove: Prove) -> str:
    if mask is None:
        return "open"
    if not isinstance(mask, Node):
        raise Stays("its mask is not a tensor of the graph")
    return prove(mask, (queries, keys), _shown)


def _shown(mask: Tensor) -> Tensor:
    """In this call, unlike others, a bool mask hides where it is true."""
    return ~mask if mask.dtype is torch.bool else mask.float()


def _edited(node: Node, edits: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = list(node.args), dict(node.kwargs)
    for name, value in edits.items():
        place = list(_SIGNATURE.parameters).index(name)
        if place < len(args):
            args[place] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs
