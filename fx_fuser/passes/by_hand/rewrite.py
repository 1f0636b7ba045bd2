"""Dynamo's graph → the same, with attention written by hand as one call: in fp32 of torch's fused
attention, in 16 bits with a bias of fx_fuser's (`windows`).

    (q @ k.mT * scale).masked_fill(hidden, -inf).softmax(-1) @ v

in all the forms that `fx_fuser.graph.attention` describes, where the tail is a scale and, at most,
masks that are proven causal or all true (`fx_fuser.passes.masks`). `scaled_dot_product_attention`
and `F.multi_head_attention_forward` too, where torch computes these by the formula: where several
query heads share a head of keys, with other than four dimensions, and for weights that nothing
reads. Inductor's graph then has the operation that `fx_fuser.passes.attention_split` replaces. So
it is done only where that pass would take it, and where our kernel is measured to be faster than
what is written (`clock`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from fx_fuser.graph.attention.find import find
from fx_fuser.graph.attention.site import AttentionSite, Refused
from fx_fuser.graph.prepare.reindex import is_same, same_sizes
from fx_fuser.graph.read.nodes import argument_of, as_written, meta_tensor, storages
from fx_fuser.graph.read.view import View
from fx_fuser.kernels.attention.bias import DTYPES
from fx_fuser.options import Options
from fx_fuser.passes import masks, products, strides
from fx_fuser.passes.by_hand import clock, multi_head, windows
from fx_fuser.passes.by_hand.layout import Calls, Layout
from fx_fuser.passes.by_hand.plain import Plain, Prove, plain_of
from fx_fuser.passes.masks import FORM, FORMULA, Mask, Proofs, Scope, Stays

log = logging.getLogger("fx_fuser.passes.by_hand")
_OF_WINDOWS = "its windows have a bias, for which fx_fuser has one"
COUNTER = "fx_fuser_by_hand"  # in `torch._dynamo.utils.counters`: "attention" → how many


@dataclass(frozen=True)
class ByHand:
    """An attention that is written by hand, or a softmax that looks like one. is_edit: is it one
    call now, torch's fused one or fx_fuser's?  stays: why not, if it was tried."""

    found: AttentionSite | Refused
    is_edit: bool = False
    stays: str = ""


@dataclass
class Rewritten:
    """What became of a graph's attentions. of_torch: calls that torch computes by the formula."""

    by_hand: list[ByHand] = field(default_factory=list)
    of_torch: list[Mask] = field(default_factory=list)


def asked(options: Options, inputs: Sequence[Any]) -> frozenset[torch.dtype]:
    """The dtypes of attentions to rewrite. fp32 is one if the pass will run that replaces torch's
    fused attention. inputs: of Dynamo's graph."""
    if not options.takes_masks or options.exported:
        return frozenset()
    of_fp32 = products.kernels_for(options, inputs) is not None
    return frozenset({torch.float32} if of_fp32 else ()) | windows.asked(options, inputs)


def attentions(view: View, strict: bool) -> list[AttentionSite | Refused]:
    """The attentions of a graph; none if looking for them fails, which raises if strict."""
    try:
        return find(view)
    except Exception:
        if strict:
            raise
        log.info("looking for attentions failed", exc_info=True)
        return []


def rewrite(
    graph: Graph, scope: Scope, options: Options, dtypes: frozenset[torch.dtype]
) -> Rewritten:
    """Rewrite the attentions of a graph that gain: those on CUDA, or with "cpu_ops" those on a CPU,
    which are not timed.

    scope: the nodes of the graph, after its caller's. dtypes: from `asked`; fp32 stands for all but
    those of 16 bits.
    """
    view, known, made = View(graph), Proofs(), Rewritten()
    for one in attentions(view, options.strict):
        is_by_hand = one.is_by_hand  # an edit changes the call
        why, edit = _edit_of(view, one, options, dtypes)
        if edit is None:
            made.by_hand += [ByHand(one)] if is_by_hand else []
            continue
        before = scope.before(view.order[one.node])
        prove = functools.partial(masks.proven, before, known)
        stays = _why_it_stays(edit, prove, options.strict)
        if why:
            made.of_torch.append(Mask(one.node, FORMULA if stays else FORM, stays or why))
        elif not is_by_hand:  # its kernel may be as good: nothing to report
            made.of_torch += [] if stays else [Mask(one.node, FORM, _OF_WINDOWS)]
        else:
            made.by_hand.append(ByHand(one, not stays, stays))
    return made


_Edit = Callable[[Prove], None]  # raises Stays, before it changes anything


def _edit_of(
    view: View, one: AttentionSite | Refused, options: Options, dtypes: frozenset[torch.dtype]
) -> tuple[str, _Edit | None]:
    """Why torch computes its own call by the formula, empty if written by hand; and what rewrites
    the attention, None if nothing is to be tried."""
    query = argument_of(one.node, 0, "query") if isinstance(one, Refused) else one.q.node
    value = meta_tensor(query) if isinstance(query, Node) else None
    if value is None or value.device.type != ("cpu" if options.cpu_ops else "cuda"):
        return "", None
    dtype = value.dtype if isinstance(one, Refused) else one.dtype
    if (dtype if dtype in DTYPES else torch.float32) not in dtypes:
        return "", None
    if isinstance(one, Refused):
        why = multi_head.why_formula(one.node)
        return why, functools.partial(multi_head.rewrite, view, one.node, options) if why else None
    why = "" if one.is_by_hand else _why_formula(one.node)
    is_tried = one.is_by_hand or why or windows.has_bias(one)
    return why, functools.partial(_rewrite, view, one, options) if is_tried else None


def _why_formula(node: Node) -> str:
    """Why torch computes this call in fp32 by the formula; empty if it does not."""
    query, key = (meta_tensor(argument_of(node, i, n)) for i, n in enumerate(("query", "key")))
    if query is None or key is None or query.dtype != torch.float32:
        return ""
    if query.ndim != 4:
        return f"its query has {query.ndim} dimensions"
    if is_same(query.shape[1], key.shape[1]):
        return ""
    return "several query heads share a head of keys"


def _why_it_stays(edit: _Edit, prove: Prove, strict: bool) -> str:
    """Rewrites an attention. Returns why not, or nothing."""
    try:
        edit(prove)
    except Stays as stays:
        return str(stays)
    except Exception as error:
        if strict:
            raise
        log.info("an attention is left as it is", exc_info=error)
        return f"{type(error).__name__}: {error}"
    return ""


def _rewrite(view: View, site: AttentionSite, options: Options, prove: Prove) -> None:
    """Raises Stays, before it changes anything."""
    end, region = site.result.node, view.region[site.node]
    was = meta_tensor(end)
    if type(was) is not FakeTensor:
        raise Stays("its result is not a plain tensor")
    _check_whole(site)
    is_window = windows.has_bias(site)
    plain = None if is_window else plain_of(site, prove)
    layout = Layout.of(site)
    if was.requires_grad and _is_written(view, site):
        raise Stays("its result is written to, and a kernel's backward reads it")
    calls = Calls(site.node, region)
    try:
        if plain is None:
            made = windows.call(view, layout, calls, was.requires_grad, options)
        else:
            made = _call(layout, calls, plain, was.requires_grad, options)
        last = layout.result(calls, made)
        if last is made and end is not site.node:  # `end` comes after what may write to operands
            last = calls.method("expand", made, *[-1] * was.ndim)
        _keep(end, last.meta["example_value"])
    except (Stays, strides.StridesError) as error:
        calls.undo()
        raise Stays(str(error)) from error
    except Exception:
        calls.undo()
        raise
    _put(site, last)


def _call(layout: Layout, calls: Calls, plain: Plain, trains: bool, options: Options) -> Node:
    """Of torch's fused attention."""
    query = layout.query(calls)
    (first_key, key), (first_value, value) = layout.keys(calls), layout.values(calls)
    operands = [n.meta["example_value"] for n in (query, first_key, first_value)]
    clock.check(operands, plain, trains, options.cpu_ops, options.strict)
    given = {"is_causal": plain.causal, "scale": plain.scale}
    return calls.function(F.scaled_dot_product_attention, query, key, value, **given)


def _check_whole(site: AttentionSite) -> None:
    """Raises Stays where an attention before it in the graph has taken a part of it."""
    known = (*site.nodes, *site.views, *(operand.node for operand in site.operands))
    if any(node._erased for node in known):
        raise Stays("a part of it belongs to another attention")


def _is_written(view: View, site: AttentionSite) -> bool:
    """May something write to the memory of its result?"""
    memory = storages((site.node, *site.views))
    places = (p for m in (*memory, None) for p in view.written_at.get(m, ()))
    return any(place > view.order[site.node] for place in places)


def _keep(end: Node, now: Any) -> None:
    """Raises Stays or StridesError where the node's value cannot become this one."""
    was: Any = meta_tensor(end)
    if now.dtype != was.dtype or not same_sizes(now.shape, was.shape):
        raise Stays(f"its result would be {now.dtype} {tuple(now.shape)}")
    if same_sizes(now.stride(), was.stride()):
        return
    if not all(isinstance(n, int) for t in (was, now) for n in (*t.shape, *t.stride())):
        raise Stays("its result would have other strides, and its sizes are dynamic")
    strides.keep(end, now)


def _put(site: AttentionSite, last: Node) -> None:
    """Make the site's result the last of the calls, and erase what made it before."""
    end = site.result.node
    read = dict.fromkeys(n for node in (*site.nodes, *site.views) for n in node.all_input_nodes)
    for name, value in as_written(last).items():
        setattr(end, name, value)
    end.graph.erase_node(last)
    for node in reversed((*site.nodes, *site.views)):
        if node is not end:
            end.graph.erase_node(node)
    masks.erase_unread([node for node in read if not node._erased])
