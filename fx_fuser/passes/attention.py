"""16-bit attention that torch would compute by its formula → in a form that a kernel takes.

`fx_fuser.ops.attention` has the forms, and what the formula costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from fx_fuser.graph.attention.calls import ATTENTION_ARGUMENTS
from fx_fuser.graph.read.nodes import argument_of, is_torchs, meta_tensor, storages
from fx_fuser.graph.read.view import Region
from fx_fuser.kernels.base import SIXTEEN_BITS
from fx_fuser.ops.attention import (
    ATTENTION,
    MASK,
    ROWS,
    Attention,
    arguments_of_rows,
    fitted,
    form,
    why_formula,
)
from fx_fuser.passes import strides
from fx_fuser.passes.bounds import Held, Known, always_taken, held

# What a mask's form depends on → the nodes of `MASK` and of `ROWS`.
Forms = dict[Any, tuple[Node, Node]]


def fit(
    node: Node, region: Region, on_cpu: bool, known: Callable[[], Known], forms: Forms,
    mask_removed: bool = False,
) -> tuple[str, str] | None:  # fmt: skip
    """Call `fx_fuser::attention` where torch would use its formula and need not.

    forms: what was made of masks so far in this graph. mask_removed: a kernel may now compute it
    that could not with the mask, so in training our op calls it, too, to keep gradients' strides.

    Returns (what was in the way, ""), or ("", why it stays the formula); None if a kernel takes it.
    """
    call, was = _call_of(node), meta_tensor(node)
    tensors = [call.query, call.key, call.value, *([] if call.mask is None else [call.mask])]
    if any(not isinstance(n, Node) or type(meta_tensor(n)) is not FakeTensor for n in tensors):
        return None
    if type(was) is not FakeTensor or was.dtype not in SIXTEEN_BITS:
        return None
    sizes = [n for tensor in tensors for n in _sizes(tensor.meta["example_value"])]
    plain = (call.dropout, call.causal, call.scale, call.gqa)
    if not all(isinstance(n, int) for n in sizes) or any(isinstance(n, Node) for n in plain):
        return None  # looking at one would specialise on it, and recompile for the next
    if was.device.type != ("cpu" if on_cpu else "cuda"):
        return None
    fakes = _fakes_of(call)
    why = why_formula(fakes)
    if not why:
        if mask_removed and was.requires_grad:
            node.target, node.args, node.kwargs = ATTENTION, call.arguments(), {}
        return None
    mask = None if call.mask is None else always_taken(call.mask, known())
    if fakes.mask is not None and fakes.mask.dtype is not torch.bool:
        numbers = held(mask, known())
        if not _is_taken_as_it_is(fakes.mask, numbers, was, region):
            return "", f"{why}; its mask has dtype {fakes.mask.dtype}, which a kernel would round"
        call = replace(call, absorbs=_may_absorb(numbers, was.dtype))
        fakes = replace(fakes, absorbs=call.absorbs)
    try:
        with was.fake_mode, torch.set_grad_enabled(was.requires_grad), region.autocast():
            if mask is not None and mask is not call.mask:
                spread = mask.meta["example_value"].expand(fakes.mask.shape)
                fakes = replace(fakes, mask=spread if fakes.mask.requires_grad else spread.detach())
            now_fakes, given = fakes, arguments_of_rows(fakes)
            if fakes.mask is not None:
                formed, rows = form(fakes)
                now_fakes = replace(fakes, mask=formed, rows=rows)
            left, now = why_formula(fitted(now_fakes)[0]), ATTENTION(*now_fakes.arguments())
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        return "", f"{why}; another form fails: {type(error).__name__}: {error}"
    reason = left or _keeps_strides(node, was, now)
    if reason:
        return "", f"{why}; {reason}"
    if mask is not None and call.mask is not None:
        # A view that is taken under no_grad has no gradient.
        mask_key = mask.name if region.settings else _view_key(mask)
        form_key = (fakes.mask.shape, fakes.mask.requires_grad, given[1:], fakes.key.shape[-2])
        key = (mask_key, region, str(form_key))
        is_written = not storages([mask]).isdisjoint({None, *known().written})
        if is_written or key not in forms:
            whole = mask if mask is call.mask else _expanded(node, mask, fakes.mask)
            forms[key] = _with_form(node, (whole, *given[1:]), now_fakes)
        mask_node, rows_node = forms[key]
        call = replace(call, mask=mask_node, rows=rows_node)
    node.target, node.args, node.kwargs = ATTENTION, call.arguments(), {}
    return why, ""


def _sizes(tensor: Tensor) -> tuple[Any, ...]:
    return *tensor.shape, *tensor.stride(), tensor.storage_offset()


def _fakes_of(call: Attention) -> Attention:
    return Attention(
        *(v.meta["example_value"] if isinstance(v, Node) else v for v in call.arguments())
    )


def _is_taken_as_it_is(mask: Tensor, numbers: Held | None, was: Tensor, region: Region) -> bool:
    """Does a mask of the result's dtype add the same numbers as this one?  torch's formula adds an
    fp32 mask to fp32 scores, but autocast rounds it first."""
    if mask.dtype == was.dtype or (numbers is not None and numbers.is_exact(was.dtype)):
        return True
    with region.autocast():
        return torch.is_autocast_enabled(was.device.type)


def _may_absorb(numbers: Held | None, dtype: torch.dtype) -> bool:
    return numbers is None or not (numbers.rows or numbers.cast(dtype).is_near)


def _call_of(node: Node) -> Attention:
    given = [argument_of(node, i, name) for i, (name, _) in enumerate(ATTENTION_ARGUMENTS)]
    return Attention(*(d if g is None else g for g, (_, d) in zip(given, ATTENTION_ARGUMENTS)))


def _keeps_strides(node: Node, was: Tensor, now: Tensor) -> str:
    """Why its result cannot be replaced; empty if it can, with eager's strides where they show."""
    if (now.dtype, now.shape) != (was.dtype, was.shape):
        return f"another form's result is {now.dtype} {tuple(now.shape)}"
    if now.stride() != was.stride():
        try:
            strides.keep(node, now)
        except strides.StridesError as error:
            return str(error)
    return ""


def _view_key(mask: Node) -> str:
    """The same for equal views of one value: a model may slice its mask again in each layer."""
    of = mask.args[0] if mask.args else None
    is_known = is_torchs(mask)
    if not is_known or not isinstance(of, Node) or storages([mask]) != storages([of]):
        return mask.name
    return f"{_view_key(of)} {mask.target} {mask.args[1:]} {mask.kwargs}"


def _expanded(node: Node, mask: Node, fake: Tensor) -> Node:
    """The mask in the shape of `fake`, before the node."""
    with node.graph.inserting_before(node):
        of = mask if fake.requires_grad else node.graph.call_method("detach", (mask,))
        if of is not mask:
            of.meta = {**mask.meta, "example_value": mask.meta["example_value"].detach()}
        made = node.graph.call_method("expand", (of, *fake.shape))
    made.meta = {**node.meta, "example_value": fake}
    return made


def _with_form(node: Node, given: tuple[Any, ...], fakes: Attention) -> tuple[Node, Node]:
    """Nodes before this one that make its mask, and the mask's rows. given: the arguments of
    `ROWS`."""
    graph = node.graph
    with graph.inserting_before(node):
        rows = graph.call_function(ROWS, given)
        mask = graph.call_function(MASK, (*given, rows, fakes.key.shape[-2]))
    mask.meta = {**node.meta, "example_value": fakes.mask}
    rows.meta = {**node.meta, "example_value": fakes.rows}
    return mask, rows
