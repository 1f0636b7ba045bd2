"""Inductor's graph → the same, with fewer calls for folded convolutions, in channels_last.

`fx_fuser.ops.folded` leaves a call of `fold` at each site. Here

- the shift of a branch that a site adds, `convolution + shift` with no other reader, moves into
  that site's bias, so nothing but the convolution is left of the branch;
- neighbouring calls of `fold` become one, a launch for many layers, where the graph's peak of
  memory stays as it is: what the call makes lives until the last of these layers has run;
- what a convolution adds is computed where it keeps less memory alive (`passes.shortcuts`).

In the graph each convolution has eager's strides. Its node asks for operands in channels_last, and
the op returns what it gets. So a result is converted where something needs other strides, such as
the end of the graph, and nowhere else, as where Inductor itself converts a graph.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_fuser.anchors.conv2d import is_window
from fx_fuser.kernels import KERNELS
from fx_fuser.native import binaries
from fx_fuser.ops import run
from fx_fuser.options import LAST_PASS, Options
from fx_fuser.passes import shortcuts
from fx_fuser.passes.graph_pass import call, each_pass, joint_uuid
from fx_fuser.passes.memory import Memory

_aten = torch.ops.aten
_FOLD = torch.ops.fx_fuser.fold.default
_VIEW = _aten.as_strided.default
_CONVOLUTION = "conv2d_folded"
_WEIGHT, _BIAS, _ADDEND, _RELU = 1, 2, 3, 8  # places of its arguments
_OF_KERNELS = {"conv2d", "conv2d_batchnorm"}
_RESHAPES = {_aten.view.default, _aten.reshape.default, _aten.unsqueeze.default}


@dataclass(frozen=True)
class Folding(CustomGraphPass):
    """The pass. before: another pass, which runs first. is_converted: would Inductor convert the
    graph, as the user wrote it, to channels_last? strict: raise what fails and may be left out."""

    before: Any = None
    is_converted: Callable[[], bool] | None = None
    strict: bool = False

    def __call__(self, graph: Graph) -> None:
        for other in each_pass(self.before):
            other(graph)
        calls = graph.find_nodes(op="call_function", target=run.ONE)
        folded = [node for node in calls if run.called(node)[0] == _CONVOLUTION]
        for node in folded:
            _move_shift(graph, node)
        if self.is_converted is not None and self.is_converted():
            for node in graph.nodes:
                _follow_layout(node)
        for node in folded:
            _ask_for_channels_last(node)
        for node in graph.find_nodes(op="call_function", target=_FOLD):
            # It reads no element of the layer's input: any layout will do.
            node.meta.pop("eager_input_vals", None)
        graph.eliminate_dead_code()
        _place_addends(graph, self.strict)  # each with its own `fold`, which moves along
        for group in list(_groups(graph)):
            _join(graph, group)

    def uuid(self) -> Any:
        return joint_uuid(("folding", binaries.fingerprint(), self.strict), self.before)


def settings(
    passes: Mapping[str, Any], options: Options, is_converted: Callable[[], bool]
) -> dict[str, Any]:
    """Inductor's settings for a graph with folded sites. passes: fx_fuser's other passes."""
    before = passes.get(LAST_PASS) or options.users_pass(LAST_PASS)
    return {**passes, LAST_PASS: Folding(before, is_converted, options.strict)}


# ---- shifts --------------------------------------------------------------------------------------


def _move_shift(graph: Graph, node: Node) -> None:
    """relu(conv + bias + (branch + shift)) → relu(conv + (bias + shift) + branch)."""
    _, args = run.called(node)
    bias, addend = args[_BIAS], args[_ADDEND]
    if not isinstance(addend, Node) or addend.target != _aten.add.Tensor or addend.kwargs:
        return
    branch, reshaped = addend.args
    if len(addend.users) > 1 or not isinstance(branch, Node) or not isinstance(reshaped, Node):
        return
    shift = reshaped
    while shift.target in _RESHAPES:
        shift = shift.args[0]  # type: ignore[assignment]
    function, of_branch = run.called(branch)
    is_ours = function == _CONVOLUTION and not of_branch[_RELU]
    if not is_ours or shift.meta["val"].ndim != 1 or not isinstance(bias, Node):
        return
    with graph.inserting_before(node):
        both = call(graph, bias, _aten.add.Tensor, bias, shift)
    x, weight, *_ = args
    node.update_arg(0, [x, weight, both, branch])


# ---- folds ---------------------------------------------------------------------------------------


def _groups(graph: Graph) -> Iterator[list[Node]]:
    """Neighbouring calls that one call can replace, at the place of the first."""
    memory = Memory(graph)
    order = memory.order
    group: list[Node] = []
    for node in graph.find_nodes(op="call_function", target=_FOLD):
        if not all(_is_part(user) for user in node.users):
            continue
        if group and not (
            node.args[5:7] == group[0].args[5:7]
            and node.meta["val"].device == group[0].meta["val"].device
            and all(order[n] < order[group[0]] for n in _read_by(node))
            and memory.has_room_for([*group, node])
        ):
            memory.join(group)
            yield group
            group = []
        group.append(node)
    if group:
        yield group


def _is_part(node: Node) -> bool:
    """Is it a view of what `fold` makes?"""
    return node.target == _VIEW and len(node.args) == 4 and not node.kwargs


def _read_by(fold: Node) -> Iterator[Node]:
    weights, vectors = fold.args[:2]
    yield from weights  # type: ignore[misc]
    yield from vectors  # type: ignore[misc]


def _join(graph: Graph, group: Sequence[Node]) -> None:
    if len(group) == 1:
        return
    first = group[0]
    lists = [list(itertools.chain(*parts)) for parts in zip(*(node.args[:4] for node in group))]
    each: list[Any] = [node.args[4] for node in group]  # places, the last one being its size
    begins = list(itertools.accumulate((places[-1] for places in each), initial=0))
    places = [at + begin for places, begin in zip(each, begins) for at in places[:-1]]
    with graph.inserting_before(first):
        joined = call(graph, first, _FOLD, *lists, [*places, begins[-1]], *first.args[5:])
    for node, begin in zip(group, begins):
        for part in list(node.users):
            at: Any = part.args[3]
            with graph.inserting_before(part):
                moved = call(graph, part, _VIEW, joined, *part.args[1:3], at + begin)
            part.replace_all_uses_with(moved)
            graph.erase_node(part)
        graph.erase_node(node)


# ---- order ---------------------------------------------------------------------------------------


def _place_addends(graph: Graph, strict: bool) -> None:
    try:
        if addends := _addends(graph):
            places = shortcuts.Places(graph, prepares=_FOLD)
            for reader, addend in addends:
                places.improve(reader, addend)
    except Exception as error:  # the graph also runs in its present order
        if strict:
            raise
        warnings.warn(
            f"fx_fuser leaves the order of a graph to Inductor: {type(error).__name__}: {error}; "
            "please report it",
            stacklevel=2,
        )


def _addends(graph: Graph) -> list[tuple[Node, Node]]:
    """Fused convolutions, each with an image that it reads besides its own."""
    found = []
    for node in graph.nodes:
        op, args = run.called(node)
        if op == _CONVOLUTION or op in _OF_KERNELS:
            others = (n for n in node.all_input_nodes if n not in (args[0], args[_WEIGHT]))
            found += [(node, n) for n in others if _is_image(n)]
    return found


def _is_image(node: Node) -> bool:
    value = node.meta.get("val")  # which a user's pass may leave to Inductor
    return isinstance(value, Tensor) and value.ndim == 4


# ---- layout --------------------------------------------------------------------------------------


def _follow_layout(node: Node) -> None:
    """A kernel that takes any layout takes the one of the graph around it."""
    op, args = run.called(node)
    named = (KERNELS[name] for name in args if isinstance(name, str) and name in KERNELS)
    kernel = next((kernel for kernel in named if kernel.any_layout), None)
    if op not in _OF_KERNELS or kernel is None:
        return
    weight = args[_WEIGHT]
    asks = kernel.weight_follows and is_window(weight.meta["val"])
    _ask_for_channels_last(node, but=[] if asks else [weight])


def _ask_for_channels_last(node: Node, but: Sequence[Node] = ()) -> None:
    """Inductor gives an op its operands with the strides that this entry of its node says, and asks
    the op's fake what it returns for these. but: operands that stay as they are."""

    def laid(operand: Node) -> Any:
        value = operand.meta["val"]
        is_image = isinstance(value, Tensor) and value.ndim == 4 and operand not in but
        return value.contiguous(memory_format=torch.channels_last) if is_image else value

    with _mode_of(node.meta["val"]):
        node.meta["eager_input_vals"] = (tuple(map_arg(node.args, laid)), {})


def _mode_of(value: Any) -> Any:
    """The mode of the fake tensors of a node's value."""
    return (value[0] if isinstance(value, (list, tuple)) else value).fake_mode
