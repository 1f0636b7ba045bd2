"""`torch.gather` along 16-bit rows, by an index that batches share → `fx_fuser::gather_rows`
(`fx_fuser.ops.attention_bias.gathered`), in training.

DeBERTa's attention reads scores of relative positions so, twice a layer: of the queries by a
position of each key, and of the keys by a position of each query, transposed. In the backward
Inductor adds all scores' gradients to memory one by one, by 16-bit atomic operations, in the
order in which softmax's backward finds them: a millisecond per layer of 16 x 384 tokens, where the
bytes take a tenth. In inference softmax gathers as fast itself.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from fx_fuser.graph.attention.read_through import is_written, moved
from fx_fuser.graph.prepare.reindex import Permutation
from fx_fuser.graph.read.nodes import (
    argument_of,
    called_in_place,
    inputs_of,
    is_torchs,
    meta_tensor,
)
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View
from fx_fuser.kernels.attention import gathered
from fx_fuser.kernels.attention.bias import DTYPES
from fx_fuser.ops.attention_bias.gathered import GATHER_ROWS
from fx_fuser.options import Options
from fx_fuser.passes.by_hand import clock
from fx_fuser.passes.by_hand.layout import Calls
from fx_fuser.passes.masks import GATHER, Mask, Stays
from fx_fuser.planning.bench_ops import form_of_value

log = logging.getLogger("fx_fuser.passes.by_hand")
_SHARED = "its gradient adds up what was read from each place"
# The strides of their results follow those of their operands.
_ELEMENTWISE = frozenset({"add", "sub", "mul", "div", "truediv", "neg", "to"})


def rewrite(graph: Graph, options: Options, dtypes: frozenset[torch.dtype]) -> list[Mask]:
    """Rewrite the gathers of a graph that gain: those on CUDA, or with "cpu_ops" those on a CPU,
    which are not timed. dtypes: those that have kernels."""
    found = [n for n in graph.nodes if called_name(n) == "gather" and is_torchs(n)]
    if not found:
        return []
    view, made = View(graph), list[Mask]()
    for node in found:
        try:
            made.append(Mask(_rewritten(view, node, options, dtypes), GATHER, _SHARED))
        except Stays as stays:
            log.info("the gather %s stays: %s", node, stays)
        except Exception as error:
            if options.strict:
                raise
            log.info("the gather %s is left as it is", node, exc_info=error)
    return made


def _rewritten(view: View, node: Node, options: Options, dtypes: frozenset[torch.dtype]) -> Node:
    """The node that stands in its place. Raises Stays, before it changes anything."""
    x, index = argument_of(node, 0, "input"), argument_of(node, 2, "index")
    if not isinstance(x, Node) or not isinstance(index, Node):
        raise Stays("its operands are not tensors")
    _check(node, (x, index, node), options, dtypes)
    region = view.region[node]
    if region.functional_level() is not None:
        raise Stays("it is inside a functorch transform or a forward-mode AD level")
    turned, strides = _turned(view, node)
    kept = {node, turned or node, index}
    if any(is_written(view, one, one, view.nodes[-1]) for one in kept):
        raise Stays("its result or its index is written to")
    calls = Calls(node, region)
    lead: Any = meta_tensor(index).ndim - 2  # type: ignore[union-attr]
    try:
        shared = calls.function(operator.getitem, index, (0,) * lead)
        made = calls.function(GATHER_ROWS, x, shared, turned is not None)
        end = turned or node
        _check_value(made.meta["example_value"], meta_tensor(end))
        forms = [form_of_value(n.meta["example_value"]) for n in (x, shared)]
        assert forms[0] is not None and forms[1] is not None, "its sizes are known"
        gather = clock.Gather(forms[0], forms[1], turned is not None)
        gather.check(options.cpu_ops, options.strict)
    except Exception:
        calls.undo()
        raise
    for reader, value in strides.items():
        reader.meta["example_value"] = value
    end.replace_all_uses_with(made)
    for one in dict.fromkeys((end, node)):
        one.graph.erase_node(one)
    return made


def _check(
    node: Node, tensors: Sequence[Node], options: Options, dtypes: frozenset[torch.dtype]
) -> None:
    x, index, was = cast(list[torch.Tensor], [*map(meta_tensor, tensors)])
    if any(type(t) is not FakeTensor or t.layout is not torch.strided for t in (x, index, was)):
        raise Stays("it is not of plain tensors")
    if x.dtype not in DTYPES or x.dtype not in dtypes or index.dtype != torch.int64:
        raise Stays(f"it reads {x.dtype} at an index of {index.dtype}")
    if any(t.device.type != ("cpu" if options.cpu_ops else "cuda") for t in (x, index)):
        raise Stays("it is on another device")
    if not was.requires_grad:
        raise Stays("it has no gradient, and whatever reads it gathers as fast")
    if argument_of(node, 3, "sparse_grad") or node.kwargs.get("out") is not None:
        raise Stays("its gradient is sparse, or it has an out")
    if not all(isinstance(n, int) for t in (x, index) for n in (*t.shape, *t.stride())):
        raise Stays("its sizes are dynamic")
    dim = argument_of(node, 1, "dim")
    if x.ndim < 3 or dim not in (-1, x.ndim - 1) or index.shape[:-1] != x.shape[:-1]:
        raise Stays("it is not along whole rows")
    if any(step and n > 1 for n, step in zip(index.shape[:-2], index.stride())):
        raise Stays("each batch has its own index")
    if 0 in (*x.shape, *index.shape) or x.stride(-1) != 1:
        raise Stays("it is empty, or the elements of a row are not adjacent")
    if x.shape[-1] > gathered.PLACES or index.shape[-1] > gathered.COLUMNS:
        raise Stays("its rows or its index are longer than a kernel accepts")


def _check_value(made: Any, was: Any) -> None:
    if (made.dtype, made.shape, made.requires_grad) != (was.dtype, was.shape, was.requires_grad):
        raise Stays(f"its result would be {made.dtype} {tuple(made.shape)}")


def _turned(view: View, node: Node) -> tuple[Node | None, dict[Node, torch.Tensor]]:
    """The only reader, if it exchanges the last two dimensions, and if nobody can tell that its
    result is dense: in eager mode it is not. And new values of what reads it."""
    readers = view.readers[node]
    found = moved(view, readers[0]) if len(readers) == len(node.users) == 1 else None
    if found is None or not isinstance(found[1], Permutation):
        return None, {}
    (reader,) = readers
    order, value = [*found[1].order], meta_tensor(reader)
    *lead, row, column = range(len(order))
    if order != [*lead, column, row] or view.region[reader] != view.region[node]:
        return None, {}
    values = None if value is None else _hidden(view, reader, value)
    return (None, {}) if values is None else (reader, values)


def _hidden(view: View, node: Node, was: torch.Tensor) -> dict[Node, torch.Tensor] | None:
    """Values of other strides, if all that read these make one of the strides that they made
    before; else None."""
    with was.fake_mode:  # type: ignore[attr-defined]
        values = {node: was.contiguous()}
    for reader in view.nodes[view.order[node] + 1 :]:
        read = [n for n in inputs_of(reader) if n in values]
        if not read:
            continue
        traced = meta_tensor(reader)
        if traced is None or not is_torchs(reader):
            return None
        if called_in_place(reader):  # what it writes to has the strides that it had
            if reader.args[0] in values:
                return None
            continue
        if called_name(reader) not in _ELEMENTWISE:
            return None
        now = _evaluated(reader, values, traced.requires_grad)
        if now is None or (now.dtype, now.shape) != (traced.dtype, traced.shape):
            return None
        if now.stride() != traced.stride():
            values[reader] = now
    del values[node]
    return values


def _evaluated(
    reader: Node, values: dict[Node, torch.Tensor], has_grad: bool
) -> torch.Tensor | None:
    def value(node: Node) -> Any:
        return values[node] if node in values else node.meta["example_value"]

    args, named = torch.fx.map_arg((reader.args, reader.kwargs), value)
    mode = next(iter(values.values())).fake_mode  # type: ignore[attr-defined]
    with mode, torch.set_grad_enabled(has_grad):
        if reader.op == "call_method":
            made = getattr(args[0], str(reader.target))(*args[1:], **named)
        else:
            made = reader.target(*args, **named)  # type: ignore[operator]
    return made if isinstance(made, torch.Tensor) else None
