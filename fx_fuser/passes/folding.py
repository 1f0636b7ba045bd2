"""Inductor's graph → the same, with fewer calls for folded convolutions, in channels_last.

`fx_fuser.ops.folded` leaves a call of `fold` at each site. Here

- the shift of a branch that a site adds, `convolution + shift` with no other reader, moves into
  that site's bias, so nothing but the convolution is left of the branch;
- neighbouring calls of `fold` become one, a launch for many layers, as long as what it makes takes
  little memory: it lives until the last of these layers has run.

In the graph each convolution has eager's strides. The lowering here asks for its operands in
channels_last, and says that its result is, as Inductor's lowering of a convolution does where it
converts a graph. So a result is converted where something needs other strides, such as the end of
the graph, and nowhere else.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from fx_fuser.native import binaries
from fx_fuser.options import LAST_PASS, Options
from fx_fuser.passes.products import OF_VALUE, call, each_pass, joint_uuid
from fx_fuser.planning.layout import FORCED

_aten = torch.ops.aten
_FOLD = torch.ops.fx_fuser.fold.default
_CONVOLUTION = torch.ops.fx_fuser.conv2d_folded.default
_BIAS, _ADDEND, _RELU = 2, 3, 8  # places of its arguments
_RESHAPES = {_aten.view.default, _aten.reshape.default, _aten.unsqueeze.default}
_MOST_BYTES = 4 << 20  # of the folded weights of one call: 1 % of an activation of a large batch


@dataclass(frozen=True)
class Folding(CustomGraphPass):
    """The pass. before: another pass, which runs first."""

    before: Any = None

    def __call__(self, graph: Graph) -> None:
        for other in each_pass(self.before):
            other(graph)
        register_lowering()
        for node in graph.find_nodes(op="call_function", target=_CONVOLUTION):
            _move_shift(graph, node)
        folds = graph.find_nodes(op="call_function", target=_FOLD)
        for group in _groups(graph, folds):
            _join(graph, group)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        return joint_uuid(("folding", binaries.fingerprint()), self.before)


def settings(passes: Mapping[str, Any], options: Options, is_converted: bool) -> dict[str, Any]:
    """Inductor's settings for a graph with folded sites. passes: other passes of fx_fuser's.

    is_converted: would Inductor convert the graph, as the user wrote it, to channels_last?
    """
    before = passes.get(LAST_PASS) or options.users_pass(LAST_PASS)
    made = {**passes, LAST_PASS: Folding(before)}
    return {**made, FORCED: True} if is_converted else made


# ---- shifts --------------------------------------------------------------------------------------


def _move_shift(graph: Graph, node: Node) -> None:
    """relu(conv + bias + (branch + shift)) → relu(conv + (bias + shift) + branch)."""
    bias, addend = node.args[_BIAS], node.args[_ADDEND]
    if not isinstance(addend, Node) or addend.target != _aten.add.Tensor or addend.kwargs:
        return
    branch, reshaped = addend.args
    if len(addend.users) > 1 or not isinstance(branch, Node) or not isinstance(reshaped, Node):
        return
    shift = reshaped
    while shift.target in _RESHAPES:
        shift = shift.args[0]  # type: ignore[assignment]
    is_ours = branch.target == _CONVOLUTION and not branch.args[_RELU]
    if not is_ours or shift.meta["val"].ndim != 1 or not isinstance(bias, Node):
        return
    with graph.inserting_before(node):
        both = call(graph, bias, _aten.add.Tensor, bias, shift)
    node.update_arg(_BIAS, both)
    node.update_arg(_ADDEND, branch)


# ---- folds ---------------------------------------------------------------------------------------


def _groups(graph: Graph, folds: Sequence[Node]) -> Iterator[list[Node]]:
    """Neighbouring calls that one call can replace, at the place of the first."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    group: list[Node] = []
    held = 0
    for node in folds:
        size = _bytes_of(node)
        if group and not (
            held + size <= _MOST_BYTES
            and node.args[4:6] == group[0].args[4:6]
            and all(order[n] < order[group[0]] for n in (*node.args[0], *node.args[1]))
        ):
            yield group
            group, held = [], 0
        group.append(node)
        held += size
    if group:
        yield group


def _bytes_of(node: Node) -> int:
    return sum(math.prod(map(int, v.shape)) * v.dtype.itemsize for v in node.meta["val"])


def _join(graph: Graph, group: Sequence[Node]) -> None:
    if len(group) == 1:
        return
    first = group[0]
    lists = [list(itertools.chain(*parts)) for parts in zip(*(node.args[:4] for node in group))]
    with graph.inserting_before(first):
        joined = graph.call_function(_FOLD, (*lists, *first.args[4:]))
    joined.meta = {k: v for k, v in first.meta.items() if k not in OF_VALUE}
    joined.meta["val"] = [value for node in group for value in node.meta["val"]]
    start = 0
    for node in group:
        for item in list(node.users):
            place = start + item.args[1]  # type: ignore[operator]
            with graph.inserting_after(joined):
                moved = graph.call_function(operator.getitem, (joined, place))
            moved.meta = dict(item.meta)
            item.replace_all_uses_with(moved)
            graph.erase_node(item)
        graph.erase_node(node)
        start += len(node.meta["val"])


# ---- Inductor's lowering -------------------------------------------------------------------------


@functools.cache
def register_lowering() -> None:
    """Tells Inductor how to lower the op. Not on import: that of Inductor takes a second."""
    from torch._inductor import lowering

    lower = _in_channels_last(lowering.fallback_handler(_CONVOLUTION, add_to_fallback_set=False))
    lowering.register_lowering(_CONVOLUTION, type_promotion_kind=None)(lower)


def _in_channels_last(fallback: Callable[..., Any]) -> Callable[..., Any]:
    def lower(*args: Any) -> Any:
        from torch._inductor.ir import ExternKernel

        return fallback(*(_laid(ExternKernel.require_channels_last, v) for v in args))

    return lower


def _laid(require: Callable[[Any], Any], value: Any) -> Any:
    is_image = hasattr(value, "get_size") and len(value.get_size()) == 4
    return require(value) if is_image else value
