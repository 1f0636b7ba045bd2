"""Linear, then cross entropy of its rows → one op without the logits, or of those that stay.

    F.cross_entropy(F.linear(x, weight, bias)[…, :-1, :].float().view(-1, V), labels)

Between the two stand casts and what moves or drops rows: it is applied to x instead. The loss is
any call that torch.compile records as `F.cross_entropy`, so also nn.CrossEntropyLoss and the losses
of transformers' models, or as `F.nll_loss` of a `log_softmax`, or what a `gather` picks of one, the
log-probabilities of reinforcement learning. `fx_fuser.ops.head_loss` says what
is computed, and what that saves.

The op without logits makes the gradients in forward. Where the graph returns logits, or reads them
without a gradient, as for an accuracy, where each row has a loss of its own, and in a checkpoint,
which runs forward twice, the Linear stays, and the loss is an op that reads what it wrote
(`fx_fuser.ops.head_kept`).

A loss stays as written where the logits are small: then a library's one gemm and one pass are as
fast.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from fx_fuser.errors import BuildError
from fx_fuser.graph.read.heads import MOVES, Head, Step, is_loss, read_head, value_of
from fx_fuser.graph.read.naming import called, statement
from fx_fuser.graph.read.nodes import argument_of, hint_of, meta_tensor, storages
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View
from fx_fuser.kernels.base import SIXTEEN_BITS
from fx_fuser.kernels.head_loss import spec_of
from fx_fuser.native import load
from fx_fuser.ops.head_kept import HEAD_LOSS_KEPT, Returned
from fx_fuser.ops.head_loss import HEAD_LOSS, OPERANDS, pieces_of, width_of
from fx_fuser.options import Options

log = logging.getLogger("fx_fuser.passes.head_loss")
COUNTER = "fx_fuser_heads"
# By rule, not by a contest, which would have to run the step's largest gemms while it compiles,
# with all their logits. Fewer bytes of logits may lie in L2, where softmax's passes cost little. A
# piece costs the host some 60 us, in which an H200 multiplies 2048 rows, 8192 columns, 512 wide.
_LEAST = 64 << 20
_LEAST_COLUMNS = 8192
_NO_LABEL = -(1 << 63)  # which a gather ignores
# Their arguments behind input and target, and the defaults. The last one is of cross_entropy alone.
_ARGUMENTS = {
    "weight": None,
    "size_average": None,
    "ignore_index": -100,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}


@dataclass(frozen=True)
class HeadLoss:
    """A loss behind a Linear. node: of the loss. bytes: of logits and their gradient that a
    training step does not hold at once any more; None where the sizes are unknown. reason: why it
    stays as written. stay: do others read the logits? returned: those that the graph returns, whose
    gradient comes from outside."""

    node: Node
    bytes: int | None = None
    reason: str = ""
    stay: bool = False
    returned: tuple[Returned, ...] = ()

    @property
    def is_edit(self) -> bool:
        return not self.reason


class _Stays(Exception):
    """Why a loss behind a Linear stays as written."""


def fuse_heads(graph: Graph, options: Options, is_body: bool) -> list[HeadLoss]:
    """Rewrite the losses of a graph, those on CUDA, or with "cpu_ops" those on a CPU.

    is_body: is it that of a region, such as a checkpoint?
    """
    found: list[HeadLoss] = []
    view: View | None = None
    kind = "cpu" if options.cpu_ops else "cuda"
    for node in [n for n in graph.nodes if is_loss(n)]:
        try:
            view = view or View(graph)
            head = read_head(view, node)
            if head is None or value_of(head.head.node).device.type != kind:
                continue
            fused = _fuse(view, node, head, options, is_body)
        except _Stays as stays:
            found.append(HeadLoss(node, reason=str(stays)))
        except Exception as error:
            if options.strict:
                raise
            log.info("a loss is left as it is", exc_info=error)
        else:
            found.append(fused)
            view = None  # of the graph as it was
    return found


# ---- what stays ----------------------------------------------------------------------------------


def _fuse(view: View, node: Node, head: Head, options: Options, is_body: bool) -> HeadLoss:
    """Raises _Stays, before it changes anything."""
    given = _picked(node) if called_name(node) == "gather" else _reduced(node)
    _check_head(view, head)
    others = _others(view, head)
    if others:
        _check_others(view, head, others)
    is_returned = any(reader.op == "output" for _, reader in others)
    if is_body and is_returned:
        raise _Stays("its logits leave a checkpoint or another region")
    # Of a row's own loss forward does not know the gradient, and a checkpoint runs it twice.
    waits = given.reduction == "none" or is_body
    stay = bool(others) or (waits and value_of(node).requires_grad)
    saved = _gain(head, stay, is_returned, options)
    _check_kernel(head, options)
    returned = _rewrite(view, node, head, given, stay)
    return HeadLoss(node, saved, stay=stay, returned=returned)


@dataclass(frozen=True)
class _Given:
    """What a loss is given besides its logits."""

    labels: Node
    ignored: int
    reduction: str


def _reduced(node: Node) -> _Given:
    given: dict[str, Any] = {
        name: default if (found := argument_of(node, i, name)) is None else found
        for i, (name, default) in enumerate(_ARGUMENTS.items(), 2)
    }
    if given["weight"] is not None:
        raise _Stays("it has class weights")
    if given["label_smoothing"] != 0.0:
        raise _Stays("it has label smoothing")
    if given["size_average"] is not None or given["reduce"] is not None:
        raise _Stays("it has arguments that torch has deprecated")
    if type(given["ignore_index"]) is not int:
        raise _Stays("its ignore_index is no number")
    logits, labels = (argument_of(node, i, n) for i, n in enumerate(("input", "target")))
    if value_of(logits).ndim != 2 or _indices(labels).ndim != 1:
        raise _Stays("its input is not [rows, classes]")
    return _Given(labels, given["ignore_index"], given["reduction"])


def _indices(labels: Any) -> Any:
    target = meta_tensor(labels) if isinstance(labels, Node) else None
    if type(target) is not FakeTensor or target.dtype is not torch.int64:
        raise _Stays("its target is no tensor of indices")
    return target


def _picked(node: Node) -> _Given:
    """Of a gather."""
    likely, dim, index = (argument_of(node, i, n) for i, n in enumerate(("input", "dim", "index")))
    *rows, of_row = _indices(index).shape
    is_one_a_row = dim in (-1, len(rows)) and of_row == 1 and rows == [*value_of(likely).shape[:-1]]
    if not is_one_a_row or argument_of(node, 3, "sparse_grad"):
        raise _Stays("it does not pick one log-probability a row")
    return _Given(index, _NO_LABEL, "none")


def _check_head(view: View, head: Head) -> None:
    site, loss = head.head, head.nodes[0]
    region = view.region[loss]
    if head.kind not in SIXTEEN_BITS:
        raise _Stays(f"its logits are of {head.kind}, not of 16 bits")
    if head.kind is torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        raise _Stays("torch's setting lets gemms add in fp16")
    kinds = {value_of(n).dtype for n in head.nodes[1:]}
    if not kinds <= {head.kind, torch.float32}:
        raise _Stays(f"its logits are cast to {', '.join(sorted(map(str, kinds - {head.kind})))}")
    operands = [n for n in site.operands.values() if n is not None]
    if any(type(meta_tensor(n)) is not FakeTensor for n in operands):
        raise _Stays("an operand of its Linear is no plain tensor")
    regions = {view.region[n].beside_autocast() for n in (*head.nodes, *site.nodes)}
    if region.functional_level() is not None or len(regions) > 1:
        raise _Stays("its Linear runs under another grad mode, or within a transform")
    if not view.reshaped.keys().isdisjoint(storages((*operands, *head.nodes))):
        raise _Stays("an operand is reshaped in place")
    if _is_written(view, head, loss):
        raise _Stays("something is written between its Linear and the loss")


def _is_written(view: View, head: Head, end: Node) -> bool:
    """Are operands or logits written to between the Linear and the end, or may they be?"""
    operands = [n for n in head.head.operands.values() if n is not None]
    nodes = view.nodes[view.order[head.head.nodes[0]] + 1 : view.order[end]]
    written = storages(n for one in nodes for n in view.writers.get(one, ()))
    return not written.isdisjoint({None, *storages((*operands, *head.nodes))})


def _others(view: View, head: Head) -> list[tuple[Node, Node]]:
    """Values between the Linear and the loss, with who else reads them."""
    found = [(value, n) for value in head.nodes[1:] for n in view.readers[value]]
    return [(value, reader) for value, reader in found if reader not in head.nodes]


def _check_others(view: View, head: Head, others: Sequence[tuple[Node, Node]]) -> None:
    loss, output = head.nodes[0], view.nodes[-1]
    for value, reader in others:
        by = "the caller" if reader is output else statement(reader)
        said = f"its logits {called(value)} are also read by {by}"
        if value not in head.logits or not (reader is output or _is_aside(reader)):
            raise _Stays(said)
        if not value_of(loss).requires_grad:
            raise _Stays(f"{said}, and nothing wants a gradient")
    results = output.args[0]  # of DDPOptimizer's graphs perhaps one alone
    if not isinstance(results, (tuple, list)) or not all(isinstance(n, Node) for n in results):
        raise _Stays("the graph's results are not a list of values")
    made, used = (hint_of(value_of(n).numel()) for n in (head.logits[0], head.nodes[1]))
    if made != used:  # the kernels want rows one behind the other
        raise _Stays("the loss reads some rows of logits that others read as well")
    if _is_written(view, head, output):
        raise _Stays("something is written behind its Linear")


def _is_aside(reader: Node) -> bool:
    """Does no gradient reach the logits through it?"""
    value = value_of(reader)
    return type(value) is FakeTensor and not value.requires_grad


def _gain(head: Head, stay: bool, is_returned: bool, options: Options) -> int | None:
    """Bytes that a step does not hold at once any more: of the logits and their gradients, but for
    a piece. None where the number of rows depends on data."""
    logits = value_of(head.nodes[1])
    count, columns = hint_of(logits.numel()), hint_of(logits.shape[-1])
    itemsize, weight = head.kind.itemsize, head.head.operands["weight"]
    assert columns is not None and weight is not None, "a Linear has both"
    whole = None if count is None else count * itemsize
    if options.plan == "measure" and not options.cpu_ops:
        _check_size(whole, columns)
    if count is None or whole is None:
        return None
    trains = value_of(head.nodes[0]).requires_grad
    wanted = OPERANDS if trains else ()
    pieces = pieces_of(count // columns, value_of(weight), head.kind, wanted)
    piece = pieces.rows * width_of(columns) * itemsize
    # A graph that returns logits gets a gradient of theirs, of zeros.
    return max((1 + trains - stay + is_returned) * whole - piece, 0)


def _check_size(whole: int | None, columns: int) -> None:
    """whole: bytes of the logits."""
    if whole is None:
        raise _Stays("how many logits it has is not known when compiling")
    if whole < _LEAST:
        raise _Stays(f"its logits take {whole >> 20} MiB, less than {_LEAST >> 20}")
    if columns < _LEAST_COLUMNS:
        raise _Stays(f"it has {columns} classes, fewer than {_LEAST_COLUMNS}")


def _check_kernel(head: Head, options: Options) -> None:
    """Builds the kernel, and loads it."""
    device = value_of(head.head.node).device
    if device.type != "cuda":
        return
    reason = load.available(device)
    if reason is not None:
        raise _Stays(reason)
    try:
        load.prepare([spec_of(head.kind)], device)
    except BuildError as error:
        if options.strict:
            raise
        warnings.warn(f"fx_fuser leaves a loss as it is written: {error}", stacklevel=2)
        raise _Stays(str(error)) from error


# ---- rewriting -----------------------------------------------------------------------------------


def _rewrite(view: View, node: Node, head: Head, given: _Given, stay: bool) -> tuple[Returned, ...]:
    """Make the loss an op, of x with the rows that the loss reads. Returns what the graph returns
    of the logits, if they stay."""
    site, out = head.head, value_of(node).dtype
    x, weight, bias = (site.operands[name] for name in ("x", "weight", "bias"))
    assert x is not None and weight is not None, "a Linear has both"
    make = _maker(node)
    if site.kind == "matmul":
        weight = make("t", weight)
    moved, how = _moved(make, x, head.steps), (out, given.ignored, given.reduction)
    returned = []
    if not stay:
        _call(node, HEAD_LOSS, moved[-1], weight, bias, given.labels, head.kind, *how)
    else:
        logits = _moved(make, head.logits[0], head.steps)[-1]
        _call(node, HEAD_LOSS_KEPT, moved[-1], weight, bias, logits, given.labels, *how)
        returned = _return_operands(view, head, moved, weight, bias)
    for dead in head.nodes[1:]:
        if not dead.users:
            node.graph.erase_node(dead)
    return tuple(returned)


def _call(node: Node, op: Any, *arguments: Any) -> None:
    """Of a gather, the negative losses of rows in its form."""
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
    node.op, node.target, node.args, node.kwargs = "call_method", "view_as", (negative, index), {}


def _moved(make: Callable[..., Node], of: Node, steps: Sequence[Step]) -> list[Node]:
    """Rows of x or of logits before the steps and behind each."""
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
    """Let the graph return its logits without a gradient, and beside them what they are made of.

    moved: x, behind so many steps each."""
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
        found.append(Returned(at, operands, head.kind))
        with output.graph.inserting_before(output):
            results[at] = output.graph.call_method("detach", (value,))
        results[at].meta = {**value.meta, "example_value": value_of(value).detach()}
    output.args = (tuple(results),)
    return found


def _maker(node: Node) -> Callable[..., Node]:
    """Of calls of `MOVES` before the node, under its grad mode."""
    value = value_of(node)

    def make(name: str, of: Node, *arguments: Any) -> Node:
        known = torch.fx.map_arg(arguments, lambda n: n.meta["example_value"])
        with value.fake_mode, torch.set_grad_enabled(value.requires_grad):
            fake = MOVES[name](value_of(of), *known)
        with node.graph.inserting_before(node):
            made = node.graph.call_function(MOVES[name], (of, *arguments))
        made.meta = {**node.meta, "example_value": fake}
        return made

    return make
