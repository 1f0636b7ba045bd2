"""Can an attention be replaced as a whole?  Checks who else uses its values, regions and classes.

`fx_fuser.ops.checks` does the same for a tail, and has the cases that went wrong.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from fx_fuser.graph.attention.read_through import is_written
from fx_fuser.graph.attention.site import AttentionSite, RefusedError
from fx_fuser.graph.read.naming import at, called, returned, statement
from fx_fuser.graph.read.nodes import called_in_place, meta_tensor, storages
from fx_fuser.graph.read.source import called_name, op_of
from fx_fuser.graph.read.subclasses import origin_of
from fx_fuser.graph.read.view import View

_PLAIN = (FakeTensor, torch.Tensor, torch.nn.Parameter)
_LARGEST_OF_ROWS = frozenset({"amax", "max"})


def checked(view: View, site: AttentionSite) -> AttentionSite:
    """The site. Raises RefusedError if it cannot be replaced as a whole."""
    _plain_tensors(site)
    _one_region(view, site)
    for node in site.nodes:
        if node is not site.node:
            alone(view, node, site.nodes)
    _writes_stay_inside(view, site)
    _operands_unchanged(view, site)
    return site


def alone(view: View, node: Node, nodes: tuple[Node, ...]) -> None:
    """Raises RefusedError if nodes other than these read its value."""
    reader = next((r for r in view.readers[node] if r not in nodes), None)
    if reader is None:
        return
    if reader.op == "output":
        raise RefusedError(node, f"{called(node)} is also {returned(view)}")
    what = f"the largest of each row of {called(node)}" if _is_largest(reader) else called(node)
    raise RefusedError(node, f"{what} is also used by {op_of(reader)}{at(reader)}")


def _is_largest(reader: Node) -> bool:
    return called_name(reader) in _LARGEST_OF_ROWS


def _plain_tensors(site: AttentionSite) -> None:
    device = site.node.meta["example_value"].device
    for node in (*site.tensors, *site.nodes):
        origin, tensor = origin_of(node), meta_tensor(node)
        if origin is not None:
            reason = f"{called(origin.node)} is of class {origin.kind}, not a plain tensor"
            raise RefusedError(node, reason)
        if type(tensor) not in _PLAIN or tensor is None or tensor.layout is not torch.strided:
            raise RefusedError(node, f"{called(node)} is not a plain tensor")
        if tensor.device != device and tensor.ndim:
            raise RefusedError(
                node, f"{called(node)} is on {tensor.device}, others are on {device}"
            )


def _one_region(view: View, site: AttentionSite) -> None:
    region = view.region[site.node]
    for node in site.nodes:
        if view.region[node] != region:
            reason = (
                f"grad mode, autocast or another mode changes between {called(node)}{at(node)} "
            )
            raise RefusedError(node, f"{reason}and {called(site.node)}{at(site.node)}")
    level = region.functional_level()
    if level is not None:
        raise RefusedError(level, "it is inside a functorch transform or a forward-mode AD level")


def _writes_stay_inside(view: View, site: AttentionSite) -> None:
    """Nothing else sees what an in-place operation changes, and nothing else writes to the site's
    values."""
    memory = storages(site.nodes[:-1])
    end = view.order[site.node]
    inside = {*site.nodes}
    for node in site.nodes:
        for one in storages((node,)) if called_in_place(node) else ():
            shown = (view.nodes[i] for i in view.shown_at.get(one, ()) if i < end)
            other = next((n for n in shown if n not in inside), None)
            if other is not None:
                reason = f"{statement(node)}, works in place on memory that {called(other)} "
                raise RefusedError(node, f"{reason}shares")
    for one in memory:
        for place in view.written_at.get(one, ()):
            writer = view.nodes[place]
            if place < end and writer not in inside:
                raise RefusedError(writer, f"{statement(writer)}, may write to its values")
    tensors = storages((*site.nodes, *site.tensors))
    changed = next((view.reshaped[m] for m in tensors if m in view.reshaped), None)
    if changed is not None:
        reason = f"{statement(changed)}, changes the shape, strides or memory of a tensor in place"
        raise RefusedError(changed, reason)


def _operands_unchanged(view: View, site: AttentionSite) -> None:
    """The site reads an operand at one of its nodes; a call in place of the site reads it at the
    site's end, and its backward later, which recomputes S from operands that eager mode does not
    keep. Both see what is written before the site reads it (`k[..., :n] = …`).

    A write to an input of the graph may reach an operand through an alias that only the caller
    knows; an integer counter does not.
    """
    order, end, inside = view.order, site.node, {*site.nodes}
    first = min(order[node] for node in site.nodes)
    for node in site.tensors:
        # The site reads a view of some operands; nothing writes to these (`read_through.origin`).
        read = [order[reader] for reader in view.readers[node] if reader in inside]
        before = view.nodes[min(read) - 1] if read else node
        if is_written(view, node, before, end):
            reason = f"{called(node)} may be changed in place before the attention ends"
            raise RefusedError(node, reason)
        trained = end.meta["example_value"].requires_grad
        if trained and is_written(view, node, before, view.nodes[-1]):
            reason = f"{called(node)} may be changed in place before the backward reads it"
            raise RefusedError(node, reason)
    for place in view.writer_places:
        if not first <= place <= order[end]:
            continue
        for written in view.writers[view.nodes[place]]:
            tensor = meta_tensor(written)
            counter = tensor is not None and not tensor.dtype.is_floating_point
            if not counter and storages((written,)) & view.graph_inputs:
                reason = f"{statement(view.nodes[place])}, changes the graph input "
                reason += f"{called(written)}, which may share memory with an operand"
                raise RefusedError(written, reason)
