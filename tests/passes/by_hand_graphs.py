"""What the tests of attention written by hand share: a function's graph, rewritten and run beside
eager mode and float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fx_fuser.graph.prepare.bodies import bodies
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.options import Options
from fx_fuser.passes import masks
from fx_fuser.passes.by_hand.rewrite import Rewritten, rewrite

Attend = Callable[..., Any]
B, H, L, D = 2, 3, 12, 8
ON_CPU = Options(cpu_ops=True, strict=True)
ASKED = frozenset({torch.float32, torch.bfloat16, torch.float16})


@dataclass
class Seen:
    """A graph with those of its regions, and what became of their attentions."""

    graphs: list[Graph] = field(default_factory=list)
    found: list[Rewritten] = field(default_factory=list)
    is_as_written: bool = True

    @property
    def calls(self) -> list[Node]:
        """Of torch's fused attention."""
        nodes = (node for graph in self.graphs for node in graph.nodes)
        return [node for node in nodes if node.target is F.scaled_dot_product_attention]

    @property
    def softmaxes(self) -> list[Node]:
        nodes = (node for graph in self.graphs for node in graph.nodes)
        return [node for node in nodes if "softmax" in str(node.target)]

    @property
    def reasons(self) -> list[str]:
        """Why attentions stay, or why a softmax is none."""
        of_hand = (one for found in self.found for one in found.by_hand if not one.is_edit)
        return [one.stays or getattr(one.found, "reason", "") for one in of_hand]


def qkv(*shape: int, keys: tuple[int, ...] = (), trains: bool = False) -> list[Tensor]:
    shape = shape or (B, H, L, D)
    torch.manual_seed(0)
    return [torch.randn(s, requires_grad=trains) for s in (shape, keys or shape, keys or shape)]


def rewritten(module: GraphModule, options: Options = ON_CPU) -> Seen:
    """The module's graphs, in which attentions are rewritten as the backend does it."""
    known = [meta_tensor(n) for n in module.graph.nodes if meta_tensor(n) is not None]
    guards = known[0].fake_mode.shape_env.guards  # type: ignore[union-attr]
    before, reader, seen = len(guards), masks.Reader(), Seen()
    for one in bodies(module):
        written = str(one.graph)
        reader.simplify(one, one.graph, options.cpu_ops)
        seen.found.append(rewrite(one.graph, reader.scope(one, one.graph), options, ASKED))
        seen.graphs.append(one.graph)
        seen.is_as_written &= str(one.graph) == written
        one.graph.lint()
        one.recompile()
    assert len(guards) == before  # one on a size would compile anew for another
    return seen


def run(
    attend: Attend, *inputs: Any, options: Options = ON_CPU, **compile: Any
) -> tuple[Seen, Any]:
    """What becomes of its first graph, and what it returns then."""
    graphs: list[Seen] = []

    def backend(module: GraphModule, _: Sequence[Any]) -> Any:
        graphs.append(rewritten(module, options))
        return module.forward

    torch._dynamo.reset()
    made = torch.compile(attend, backend=backend, **compile)(*inputs)
    return graphs[0], made


def check(attend: Attend, inputs: Sequence[Any], **compile: Any) -> Seen:
    """Results have eager's dtypes, strides and NaN, and with gradients they are at most 4 times as
    far from float64's as eager's, or 1e-6. What runs here is torch's attention of CPUs, whose error
    the processor decides: on one EPYC 2.6 times eager's, within the contract's 1.5 on others."""
    seen, made = run(attend, *inputs, **compile)
    mine = with_gradients(made, inputs)
    theirs = with_gradients(attend(*inputs), inputs)
    wide = [_wide(value) for value in inputs]
    exact = with_gradients(attend(*wide), wide)
    count = len(results(made))
    for i, (a, b, c) in enumerate(zip(mine, theirs, exact, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert i >= count or a.stride() == b.stride()
        assert torch.equal(a.isnan(), b.isnan())
        error, own = (float((x.double() - c).nan_to_num().norm()) for x in (a, b))
        assert error <= max(4 * own, 1e-6 * float(c.double().nan_to_num().norm()))
    return seen


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def results(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else [*made]


def with_gradients(made: Any, inputs: Sequence[Any]) -> list[Tensor]:
    found = results(made)
    trained = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    roots = [y for y in found if y.requires_grad]
    if not trained or not roots:
        return found
    torch.manual_seed(1)
    gradients = [torch.randn(y.shape).to(y.dtype) for y in roots]
    grads = torch.autograd.grad(roots, trained, gradients, materialize_grads=True)
    return [y.detach() for y in found] + list(grads)
