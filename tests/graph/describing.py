"""What the tests of attention's descriptions share: a traced graph, its sites, and their reference
against eager mode, values and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fx_fuser.graph.attention.find import find
from fx_fuser.graph.attention.reference import reference
from fx_fuser.graph.attention.site import AttentionSite, Refused
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.graph.read.view import View

Attend = Callable[..., Any]


@dataclass
class Traced:
    """A graph of Dynamo's, what it was called with, and what is found in it."""

    module: GraphModule
    inputs: Sequence[Any]
    found: list[AttentionSite | Refused]

    @property
    def sites(self) -> list[AttentionSite]:
        return [one for one in self.found if isinstance(one, AttentionSite)]

    @property
    def reasons(self) -> list[str]:
        return [one.reason for one in self.found if isinstance(one, Refused)]


def traced(attend: Attend, *inputs: Any, autocast: bool = False, **options: Any) -> Traced:
    """The first graph of a function. options: of torch.compile."""
    graphs: list[Traced] = []

    def backend(module: GraphModule, given: Sequence[Any]) -> Any:
        known = next(
            n.meta["example_value"] for n in module.graph.nodes if meta_tensor(n) is not None
        )
        guards = known.fake_mode.shape_env.guards
        before = len(guards)
        graphs.append(Traced(module, given, find(View(module.graph))))
        assert len(guards) == before  # a guard on a size would compile anew for another
        return module.forward

    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        torch.compile(attend, backend=backend, **options)(*inputs)
    return graphs[0]


class _Recorder(Interpreter):
    """Runs a graph and keeps the values; those of the sites are by the reference.

    replaced: result of a site → site.
    """

    def __init__(self, module: GraphModule, replaced: Mapping[Node, AttentionSite]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.replaced = replaced
        self.gone = {n for site in replaced.values() for n in (*site.nodes, *site.views)}

    def run_node(self, n: Node) -> Any:
        site = self.replaced.get(n)
        if site is None:
            return None if n in self.gone else super().run_node(n)
        with torch.autocast("cpu", enabled=False):
            return reference(site, {o.node: self.env[o.node] for o in site.operands})


def outcome(one: Traced, by_reference: bool, autocast: bool = False) -> list[Tensor]:
    """Results and gradients of the graph. by_reference: each site by its description alone."""
    sites = {site.result.node: site for site in one.sites} if by_reference else {}
    inputs = [
        value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor)
        else value
        for value in one.inputs
    ]  # fmt: skip
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        made = _Recorder(one.module, sites).run(*inputs)
    results = [y for y in made if isinstance(y, Tensor)]
    trained = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    roots = [y for y in results if y.requires_grad]
    torch.manual_seed(2)
    gradients = [torch.randn(y.shape).to(y.dtype) for y in roots]  # of the same strides
    if not roots or not trained:
        return results
    grads = torch.autograd.grad(roots, trained, gradients, materialize_grads=True)
    return [*results, *grads]


def assert_described(one: Traced, autocast: bool = False) -> None:
    """The reference of each site computes what eager mode does, to the last roundings."""
    assert one.sites
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        mine, theirs = (outcome(one, by, autocast) for by in (True, False))
    # A sum of a few terms in another order; in bf16 what is rounded after it differs by a bit.
    eps = 2.0**-8 if autocast or mine[0].itemsize == 2 else 2.0**-23
    largest = max(b.double().nan_to_num().norm() for b in theirs)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.isnan(), b.isnan())
        a, b = a.double().nan_to_num(), b.double().nan_to_num()
        # A gradient may be what is left of larger terms: of a bias that all keys have, nothing.
        bound = 8 * eps * b.norm() + 2 * eps * largest
        if (a - b).norm() > bound:  # where terms cancel, an input's last bit tells as much
            nudged = outcome(_nudged(one, eps), False, autocast)[i].double().nan_to_num()
            bound += 4 * (nudged - b).norm()
        assert (a - b).norm() <= bound, f"{i}: {(a - b).norm() / b.norm()}"


def _nudged(one: Traced, eps: float) -> Traced:
    """The same graph, for inputs of 1 + eps times theirs."""
    inputs = [
        (value.detach() * (1 + eps)).requires_grad_(value.requires_grad)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for value in one.inputs
    ]
    return Traced(one.module, inputs, one.found)
