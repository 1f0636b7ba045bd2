"""Graphs as Inductor's passes see them, with torch's attention of CUDA in them, on any device."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from fx_fuser.passes.attention_split import ATTENTION, ATTENTION_BACKWARD
from fx_fuser.passes.graph_pass import call

_aten = torch.ops.aten
_ON_CPU = _aten._scaled_dot_product_flash_attention_for_cpu


def heads(batch: int, count: int, rows: int, d: int, **like: Any) -> Tensor:
    """[B, H, L, D], rows before heads in memory, as a projection leaves them."""
    return torch.randn(batch, rows, count, d, **like).transpose(1, 2)


def graph_of(
    target: Any, inputs: Sequence[Any], items: Sequence[int], device: str = "cpu", **named: Any
) -> GraphModule:
    """One call of torch's attention, or of its backward; the graph returns these of its results.

    inputs: its positional arguments, those that are tensors by their layouts alone.
    """
    graph, mode = Graph(), FakeTensorMode()
    args = list(inputs)
    for i, given in enumerate(inputs):
        if isinstance(given, Tensor):
            args[i] = graph.placeholder(f"input{i}")
            with mode:
                at = given.storage_offset()
                extent = at + 1 + sum((n - 1) * s for n, s in zip(given.shape, given.stride()))
                memory = torch.empty(max(extent, 0), dtype=given.dtype, device=device)
                args[i].meta["val"] = memory.as_strided(given.shape, given.stride(), at)
    like = next(arg for arg in args if isinstance(arg, Node))
    made = call(graph, like, target, *args, **named)
    graph.output(tuple(call(graph, like, operator.getitem, made, i) for i in items))
    return GraphModule(torch.nn.Module(), graph)


def forward_graph(
    q: Tensor, k: Tensor, v: Tensor, items: Sequence[int] = (0, 1), bias: Tensor | None = None,
    save: bool = True, dropout: Any = 0.0, causal: Any = False, device: str = "cpu", **named: Any,
) -> GraphModule:  # fmt: skip
    inputs = (q, k, v, bias, save, dropout, causal)
    return graph_of(ATTENTION, inputs, items, device, **named)


def backward_graph(
    tensors: Mapping[str, Tensor], items: Sequence[int] = (0, 1, 2), bias: Tensor | None = None,
    mask: Sequence[bool] = (True, True, True, False), dropout: Any = 0.0, causal: Any = False,
    device: str = "cpu", **named: Any,
) -> GraphModule:  # fmt: skip
    """tensors: d_out, q, k, v, out, lse."""
    d_out, q, k, v, out, lse = tensors.values()
    seed = torch.zeros((), dtype=torch.int64)
    inputs = (d_out, q, k, v, bias, out, lse, seed, seed.clone(), dropout, list(mask), causal)
    return graph_of(ATTENTION_BACKWARD, inputs, items, device, **named)


def targets(gm: GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


class AsOnCuda(CustomGraphPass):
    """A pass over the graph of forward and backward that a CPU's attention is in, and a GPU's is
    then."""

    def __call__(self, graph: Graph) -> None:
        saved: dict[Node, list[Node]] = {}  # out → all results
        for node in list(graph.nodes):
            if node.target is _ON_CPU.default:
                q, k, v, *rest = node.args
                dropout, causal = (*rest, *(0.0, False)[len(rest) :])
                args = (q, k, v, None, True, dropout, causal)
                found = _replaced(node, ATTENTION, args, 4)
                saved[found[0]] = found
            elif (
                node.target
                is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            ):
                d_out, q, k, v, out, lse, dropout, causal = node.args
                of_out = out
                while of_out not in saved:
                    of_out = of_out.args[0]  # type: ignore[union-attr, assignment]
                seed = saved[of_out][2:]  # type: ignore[index]
                mask = [True, True, True, False]
                args = (d_out, q, k, v, None, out, lse, *seed, dropout, mask, causal)
                _replaced(node, ATTENTION_BACKWARD, args, 3)

    def uuid(self) -> Any:
        return None


def _replaced(node: Node, target: Any, args: Sequence[Any], count: int) -> list[Node]:
    graph = node.graph
    with graph.inserting_before(node):
        named = {name: value for name, value in node.kwargs.items() if name == "scale"}
        made = call(graph, node, target, *args, **named)
        found = [call(graph, node, operator.getitem, made, i) for i in range(count)]
    for user in list(node.users):
        user.replace_all_uses_with(found[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)
    return found
