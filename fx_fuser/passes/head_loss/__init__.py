"""Linear, then cross entropy of its rows → one op without the logits, or of logits that stay.

    F.cross_entropy(F.linear(x, weight, bias)[…, :-1, :].float().view(-1, V), labels)

Between the two there may be casts and operations that move or drop rows, which are applied to x
instead. The op itself scales the logits, as by a temperature, and applies a soft cap,
tanh(z / c) · c. The loss is any call that torch.compile records as `F.cross_entropy`, so also
nn.CrossEntropyLoss and the losses of transformers' models, or as `F.nll_loss` of a `log_softmax`,
or what a `gather` picks of one, the log-probabilities of reinforcement learning.
`fx_fuser.ops.head_loss` says what is computed, and what that saves.

The op without logits makes the gradients in forward. In some cases the Linear stays, and the loss
is an op that reads its logits (`fx_fuser.ops.head_kept`): where the graph returns logits, or reads
them without a gradient, as for an accuracy; where each row has a loss of its own; and in a
checkpoint, which runs forward twice. It also stays where a log-sum-exp of the same logits is read,
as for a penalty on it, perhaps with a gather of logits (`fx_fuser.passes.head_loss.parts`).

A head that multiplies in fp32 what was cast up from 16 bits is an op of its own, which computes the
logits again in backward (`fx_fuser.passes.head_loss.wide`). Nothing else may read its logits.

A loss stays as written where the logits are small: then the library's gemm and one pass are as
fast.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from fx_fuser.errors import BuildError
from fx_fuser.graph.read.heads import (
    Head,
    has_losses,
    is_log_sum_exp,
    is_loss,
    is_pick,
    read_head,
    value_of,
)
from fx_fuser.graph.read.naming import called, statement
from fx_fuser.graph.read.nodes import hint_of, is_torchs, meta_tensor, storages
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View
from fx_fuser.kernels.base import SIXTEEN_BITS
from fx_fuser.kernels.head_loss import spec_of
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops.head_kept import Returned
from fx_fuser.ops.head_loss import OPERANDS, pieces_of, width_of
from fx_fuser.ops.head_wide import piece_of
from fx_fuser.options import Options
from fx_fuser.passes.head_loss.edits import settle
from fx_fuser.passes.head_loss.parts import Stays, heads_of, parts_of, reads_all
from fx_fuser.passes.head_loss.rewrite import rewrite
from fx_fuser.passes.head_loss.spellings import respell
from fx_fuser.passes.head_loss.wide import Wide, kernels_of, wide_of
from fx_fuser.planning.surroundings import VIEWS

log = logging.getLogger("fx_fuser.passes.head_loss")
COUNTER = "fx_fuser_heads"
_VIEWS = VIEWS | {"getitem", "split", "chunk", "unbind", "tensor_split"}
# By rule, not by a contest, which would have to run the step's largest gemms with all their logits
# while compiling. Fewer bytes of logits may fit into L2, where softmax's passes cost little. A
# piece costs the host some 60 us, in which an H200 multiplies 2048 rows, 8192 columns, 512 wide.
_LEAST = 64 << 20
_LEAST_COLUMNS = 8192


@dataclass(frozen=True)
class HeadLoss:
    """A loss after a Linear. node: the loss. bytes: of logits and their gradient that a training
    step no longer holds at once; None where the sizes are unknown. reason: why it stays as written.
    stay: do others read the logits?  returned: those that the graph returns, whose gradient comes
    from outside."""

    node: Node
    bytes: int | None = None
    reason: str = ""
    stay: bool = False
    returned: tuple[Returned, ...] = ()

    @property
    def is_edit(self) -> bool:
        return not self.reason


def fuse_heads(graph: Graph, options: Options, is_body: bool) -> list[HeadLoss]:
    """Rewrite the losses of a graph, those on CUDA, or with "cpu_ops" those on a CPU.

    is_body: is it that of a region, such as a checkpoint?
    """
    if not has_losses(graph):
        return []
    kind = "cpu" if options.cpu_ops else "cuda"
    edits = respell(graph, kind, options.strict)
    found, taken = _fuse_all(graph, kind, options, is_body)
    undone = settle(edits, taken)
    return [replace(one, node=undone.get(one.node, one.node)) for one in found]


def _fuse_all(
    graph: Graph, kind: str, options: Options, is_body: bool
) -> tuple[list[HeadLoss], set[Node]]:
    """Also returns the nodes that became part of an op."""
    found: list[HeadLoss] = []
    view: View | None = None
    done, taken = set[Node](), set[Node]()
    for node in [n for n in graph.nodes if is_loss(n) or is_log_sum_exp(n)]:
        if node in done or (is_log_sum_exp(node) and not value_of(node).requires_grad):
            continue
        try:
            view = view or View(graph)
            head = read_head(view, node)
            if head is None or value_of(head.head.node).device.type != kind:
                continue
            heads = heads_of(view, node, head)
            if not any(is_loss(n) or is_pick(n) for n in heads):
                continue  # a log-sum-exp without a loss
            done |= heads.keys()
            fused = _fuse(view, node, heads, options, is_body)
        except Stays as stays:
            found.append(HeadLoss(node, reason=str(stays)))
        except Exception as error:
            if options.strict:
                raise
            log.info("a loss is left as it is", exc_info=error)
        else:
            found.append(fused)
            taken |= {n for one in heads.values() for n in one.nodes}
            view = None  # the graph has changed
    return found, taken


# ---- what stays ----------------------------------------------------------------------------------


def _fuse(
    view: View, node: Node, heads: dict[Node, Head], options: Options, is_body: bool
) -> HeadLoss:
    """Raises Stays, before it changes anything. heads: of all nodes that become one op with it."""
    parts = parts_of(view, heads)
    head, node = heads[parts.loss], parts.loss
    wide = wide_of(view, head, options)
    for one in heads.values():
        _check_head(view, one, wide)
    inner = {n for one in heads.values() for n in one.nodes}
    others = [(one, other) for one in heads.values() for other in _others(view, one, inner)]
    is_alone = len(heads) == 1
    # Forward does not know the gradient of a loss per row, and a checkpoint runs it twice.
    waits = parts.given.reduction == "none" or is_body
    stay = not is_alone or (waits and value_of(node).requires_grad)
    for one in heads.values():
        if own := [other for of, other in others if of is one]:
            _check_others(view, one, own, stay)
    is_returned = any(reader.op == "output" for _, (_, reader) in others)
    if is_body and is_returned:
        raise Stays("its logits leave a checkpoint or another region")
    if not is_alone:
        _check_unwritten(view, heads)
    stay |= bool(others)
    kernels = [spec_of(head.kind, parts.tail)]
    if wide is not None:
        _check_unread(others)
        stay, kernels = False, [*kernels, *kernels_of(wide)]
    saved = _gain(head, stay, is_returned, options, is_wide=wide is not None)
    _check_kernel(head, kernels, options)
    returned = rewrite(view, heads, parts, stay, wide)
    return HeadLoss(node, saved, stay=stay, returned=returned)


def _check_unread(others: Sequence[tuple[Head, tuple[Node, Node]]]) -> None:
    for _, (value, _) in others:
        raise Stays(f"others read its fp32 logits, {called(value)}, which its op does not keep")


def _check_unwritten(view: View, heads: dict[Node, Head]) -> None:
    if any(_is_written(view, head, view.nodes[-1]) for head in heads.values()):
        raise Stays("something is written after its Linear")


def _check_head(view: View, head: Head, wide: Wide | None) -> None:
    site, loss = head.head, head.nodes[0]
    region = view.region[loss]
    narrow = head.kind if wide is None else wide.narrow
    if narrow not in SIXTEEN_BITS:
        raise Stays(f"its logits are {head.kind}, not 16-bit, and nor are its operands")
    if narrow is torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        raise Stays("torch's setting lets gemms add in fp16")
    kinds = {value_of(n).dtype for n in head.nodes[1:]}
    if not kinds <= {head.kind, torch.float32}:
        raise Stays(f"its logits are cast to {', '.join(sorted(map(str, kinds - {head.kind})))}")
    operands = [n for n in site.operands.values() if n is not None]
    if any(type(meta_tensor(n)) is not FakeTensor for n in operands):
        raise Stays("an operand of its Linear is not a plain tensor")
    trains = all(value_of(n).requires_grad for n in head.nodes)
    regions = {view.region[n].beside_autocast(trains) for n in (*head.nodes, *site.nodes)}
    if region.functional_level() is not None or len(regions) > 1:
        raise Stays("its Linear runs under another grad mode, or within a transform")
    if not view.reshaped.keys().isdisjoint(storages((*operands, *head.nodes))):
        raise Stays("an operand is reshaped in place")
    if _is_written(view, head, loss):
        raise Stays("something is written between its Linear and the loss")


def _is_written(view: View, head: Head, end: Node) -> bool:
    """Are operands or logits written to between the Linear and the end, or may they be?"""
    operands = [n for n in head.head.operands.values() if n is not None]
    nodes = view.nodes[view.order[head.head.nodes[0]] + 1 : view.order[end]]
    written = storages(n for one in nodes for n in view.writers.get(one, ()))
    return not written.isdisjoint({None, *storages((*operands, *head.nodes))})


def _others(view: View, head: Head, inner: Collection[Node]) -> list[tuple[Node, Node]]:
    """Values between the Linear and the loss, with who else reads them."""
    found = [(value, n) for value in head.nodes[1:] for n in view.readers[value]]
    return [(value, reader) for value, reader in found if reader not in inner]


def _check_others(view: View, head: Head, others: Sequence[tuple[Node, Node]], stay: bool) -> None:
    """stay: would the logits stay without the others?"""
    loss, output = head.nodes[0], view.nodes[-1]
    for value, reader in others:
        by = "the caller" if reader is output else statement(reader)
        said = f"its logits {called(value)} are also read by {by}"
        if value not in head.logits or not (reader is output or _is_aside(view, reader)):
            raise Stays(said)
        if not value_of(loss).requires_grad:
            raise Stays(f"{said}, and nothing requires a gradient")
    results = output.args[0]  # a graph of DDPOptimizer may return a single value
    if not isinstance(results, (tuple, list)) or not all(isinstance(n, Node) for n in results):
        raise Stays("the graph's results are not a list of values")
    is_returned = any(reader is output for _, reader in others)
    if not reads_all(head) and (is_returned or not stay):  # the kernels need consecutive rows
        raise Stays("the loss reads some rows of logits that others read as well")
    if _is_written(view, head, output):
        raise Stays("something is written after its Linear")


def _is_aside(view: View, reader: Node) -> bool:
    """Does no gradient reach the logits through it?  Views that torch.no_grad makes claim one."""
    value = reader.meta.get("example_value")
    values = value if isinstance(value, (tuple, list)) else (value,)
    if any(type(one) is not FakeTensor for one in values):
        return False
    if not any(one.requires_grad for one in values):
        return True
    is_view = called_name(reader) in _VIEWS and is_torchs(reader)
    return is_view and all(_is_aside(view, one) for one in view.readers[reader])


def _gain(head: Head, stay: bool, is_returned: bool, options: Options, is_wide: bool) -> int | None:
    """Bytes of logits and their gradients that a step no longer holds at once: all but a piece.
    None where the number of rows depends on data."""
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
    rows = count // columns
    if is_wide:
        piece = piece_of(rows, columns) * columns * itemsize
    else:
        pieces = pieces_of(rows, value_of(weight), head.kind, wanted)
        piece = pieces.rows * width_of(columns) * itemsize
    # A graph that returns logits gets a gradient for them, of zeros.
    return max((1 + trains - stay + is_returned) * whole - piece, 0)


def _check_size(whole: int | None, columns: int) -> None:
    """whole: bytes of the logits."""
    if whole is None:
        raise Stays("its number of logits is not known when compiling")
    if whole < _LEAST:
        raise Stays(f"its logits take {whole >> 20} MiB, less than {_LEAST >> 20}")
    if columns < _LEAST_COLUMNS:
        raise Stays(f"it has {columns} classes, fewer than {_LEAST_COLUMNS}")


def _check_kernel(head: Head, kernels: Sequence[KernelSpec], options: Options) -> None:
    """Builds the kernels, and loads them."""
    device = value_of(head.head.node).device
    if device.type != "cuda":
        return
    reason = load.available(device)
    if reason is not None:
        raise Stays(reason)
    try:
        load.prepare(kernels, device)
    except BuildError as error:
        if options.strict:
            raise
        warnings.warn(f"fx_fuser leaves a loss as written: {error}", stacklevel=2)
        raise Stays(str(error)) from error
