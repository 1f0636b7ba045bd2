"""Replaces a loss after a Linear by an op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fx_fuser.graph.read.heads import MOVES, Head, Step, is_log_sum_exp, is_pick, value_of
from fx_fuser.graph.read.nodes import argument_of
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View
from fx_fuser.ops.head_kept import (
    HEAD_LOSS_KEPT,
    HEAD_LOSS_PARTS,
    HEAD_LOSS_REDUCED,
    Returned,
)
from fx_fuser.ops.head_loss import HEAD_LOSS
from fx_fuser.ops.head_wide import HEAD_LOSS_WIDE, HEAD_LOSS_WIDE_PARTS
from fx_fuser.passes.head_loss.parts import Parts
from fx_fuser.passes.head_loss.wide import Wide
from fx_fuser.planning.surroundings import VIEWS


def rewrite(
    view: View, heads: dict[Node, Head], parts: Parts, stay: bool, wide: Wide | None = None
) -> tuple[Returned, ...]:
    """Make the loss an op, of x with the rows that the loss reads. Returns what the graph returns
    of the logits, if they stay."""
    head, node, given = heads[parts.loss], parts.loss, parts.given
    site, out, tail = head.head, value_of(node).dtype, [*parts.tail]
    x, weight, bias = (site.operands[name] for name in ("x", "weight", "bias"))
    assert x is not None and weight is not None, "a Linear has both"
    if wide is not None:
        x, weight = wide.x, wide.weight
    make = _maker(parts.at, node)
    if site.kind == "matmul":
        weight = make("t", weight)
    moved, how = _moved(make, x, parts.steps), (out, given.ignored, given.reduction, tail)
    returned: list[Returned] = []
    if wide is not None:
        given_wide = moved[-1], weight, bias, parts.labels, wide.narrow, wide.by_library
        if len(heads) == 1:
            _call(node, HEAD_LOSS_WIDE, *given_wide, *how)
        else:
            _call_parts(
                view, heads, parts, HEAD_LOSS_WIDE_PARTS, *given_wide, given.ignored, tail, x=x
            )
    elif not stay:
        _call(node, HEAD_LOSS, moved[-1], weight, bias, given.labels, head.kind, *how)
    else:
        logits = _moved(make, head.logits[0], parts.steps)[-1]
        operands = moved[-1], weight, bias, logits, parts.labels
        if len(heads) == 1:
            _call(node, HEAD_LOSS_KEPT, *operands, *how)
        else:
            _call_parts(view, heads, parts, HEAD_LOSS_PARTS, *operands, given.ignored, tail)
        for one in filter(functools.partial(_is_returned, view), heads.values()):
            at_end = _maker(view.nodes[-1], node)
            of_x = moved if len(heads) == 1 else _moved(at_end, x, one.steps)
            returned += _return_operands(view, one, of_x, weight, bias)
    _erase_dead(heads, () if wide is None else wide.casts)
    return tuple(returned)


def _is_returned(view: View, head: Head) -> bool:
    return any(value in view.nodes[-1].all_input_nodes for value in head.logits)


def _erase_dead(heads: dict[Node, Head], casts: Sequence[Node]) -> None:
    """Erase what nothing reads any more between the Linear and its losses, and casts before it."""
    erased = set[Node]()
    for head in heads.values():
        for dead in head.nodes[1:]:
            if dead not in erased and not dead.users:
                dead.graph.erase_node(dead)
                erased.add(dead)
    for cast in dict.fromkeys(casts):
        for reader in [*cast.users]:
            if not reader.users and reader.op != "output" and called_name(reader) in VIEWS:
                reader.graph.erase_node(reader)
        if not cast.users:
            cast.graph.erase_node(cast)


def _call_parts(
    view: View, heads: dict[Node, Head], parts: Parts, op: Any, *arguments: Any,
    x: Node | None = None,
) -> None:  # fmt: skip
    """Put the results of one op in place of the loss and of each log-sum-exp. x: the Linear's, if
    its logits are not to stay."""
    value = value_of(parts.loss)
    with value.fake_mode, torch.set_grad_enabled(value.requires_grad):
        fake = value_of(next(filter(is_log_sum_exp, heads))).float().flatten()

    def add(target: Any, *given: Any, method: bool = False) -> Node:
        graph = parts.at.graph
        with graph.inserting_before(parts.at):
            made = (graph.call_method if method else graph.call_function)(target, given)
        made.meta = {**parts.at.meta, "example_value": fake}
        return made

    made = add(op, *arguments)
    made.meta["example_value"] = (fake, fake, fake)
    losses, lse, picked = (add(MOVES["getitem"], made, i) for i in range(3))
    for node in heads:
        dtype = value_of(node).dtype
        if is_log_sum_exp(node):
            end = slice(0, 1) if _keeps_dim(node) else 0
            if x is None:
                logits = argument_of(node, 0, "input")
            else:  # as many rows
                logits = _moved(_maker(node, node), x, heads[node].steps)[-1]
            index: Any = (Ellipsis, end)
            with node.graph.inserting_before(node):
                like = node.graph.call_function(MOVES["getitem"], (logits, index))
            like.meta = {**node.meta}
            _become_view(node, add("to", lse, dtype, method=True), like)
        elif is_pick(node):
            _become_view(node, add("to", picked, dtype, method=True), argument_of(node, 2, "index"))
        elif called_name(node) == "gather":
            negative = add(torch.neg, add("to", losses, dtype, method=True))
            _become_view(node, negative, argument_of(node, 2, "index"))
        else:
            given = parts.given
            how = losses, given.labels, dtype, given.ignored, given.reduction
            node.op, node.target, node.args, node.kwargs = (
                "call_function", HEAD_LOSS_REDUCED, how, {},
            )  # fmt: skip
        if view.order[node] < view.order[parts.at]:
            parts.at.prepend(node)


def _keeps_dim(node: Node) -> bool:
    return value_of(node).ndim == value_of(argument_of(node, 0, "input")).ndim


def _become_view(node: Node, of: Node, like: Node) -> None:
    node.op, node.target, node.args, node.kwargs = "call_method", "view_as", (of, like), {}


def _call(node: Node, op: Any, *arguments: Any) -> None:
    """Make the node a call of the op; a gather, the negative losses of rows in its shape."""
    if called_name(node) != "gather":
        node.op, node.target, node.args, node.kwargs = "call_function", op, arguments, {}
        return
    value, index = value_of(node), argument_of(node, 2, "index")
    with node.graph.inserting_before(node):
        losses = node.graph.call_function(op, arguments)
        negative = node.graph.call_function(torch.neg, (losses,))
    with value.fake_mode, torch.set_grad_enabled(value.requires_grad):
        fake = value.flatten()
    losses.meta = negative.meta = {**node.meta, "example_value": fake}
    _become_view(node, negative, index)


def _moved(make: Callable[..., Node], of: Node, steps: Sequence[Step]) -> list[Node]:
    """Rows of x or of logits before the steps and after each."""
    found, width = [of], value_of(of).shape[-1]
    for step in steps:
        if step is not None:
            name, arguments = step
            of = make(name, of, *(((*arguments, width),) if name == "reshape" else arguments))
        found.append(of)
    return found


def _return_operands(
    view: View, head: Head, moved: Sequence[Node], weight: Node, bias: Node | None
) -> list[Returned]:
    """Let the graph return its logits without a gradient, and also what they are made of.

    moved: x before the steps and after each."""
    output = view.nodes[-1]
    results: list[Any] = [*output.args[0]]

    def place(operand: Node | None) -> int | None:
        if operand is None:
            return None
        if operand not in results:
            results.append(operand)
        return results.index(operand)

    found = []
    for at, value in enumerate(results[:]):
        if value not in head.logits:
            continue
        operands = tuple(map(place, (moved[head.logits.index(value)], weight, bias)))
        found.append(Returned(at, operands, head.kind, head.tails[head.logits.index(value)]))
        with output.graph.inserting_before(output):
            results[at] = output.graph.call_method("detach", (value,))
        results[at].meta = {**value.meta, "example_value": value_of(value).detach()}
    output.args = (tuple(results),)
    return found


def _maker(at: Node, node: Node) -> Callable[..., Node]:
    """A function that makes calls of `MOVES` before a node, under the grad mode of a loss."""
    value = value_of(node)

    def make(name: str, of: Node, *arguments: Any) -> Node:
        known = torch.fx.map_arg(arguments, lambda n: n.meta["example_value"])
        with value.fake_mode, torch.set_grad_enabled(value.requires_grad):
            fake = MOVES[name](value_of(of), *known)
        with at.graph.inserting_before(at):
            made = at.graph.call_function(MOVES[name], (of, *arguments))
        made.meta = {**at.meta, "example_value": fake}
        return made

    return make
