"""A reading of one graph, in which in-place operations are values.

`z.mul_(2)` makes a new value; a node that names `z` afterwards reads that value. `View` resolves
every argument to the node that made the value. Whether an in-place operation may disappear is
decided in `ops.checks`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fx_fuser.graph.read.canonical import Expr, Unsupported, meaning, rule_of
from fx_fuser.graph.read.nodes import called_in_place, input_of, inputs_of, storages, writes_of
from fx_fuser.graph.read.operations import OPS
from fx_fuser.graph.read.source import End, op_of

# In the meta of a module that `fuse_exported` rewrites: may a fused op run on a CPU?
EXPORTED = "fx_fuser_exported"


# In-place operations that leave the elements as they are: torch tags them inplace_view;
# 2.11 has `rename_` among them.
_SEEN_OTHERWISE = frozenset(
    "t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ set_ resize_ "  # noqa: SIM905
    "resize_as_ rename_".split()
)


@dataclass(frozen=True)
class Region:
    """The modes a node runs under: grad mode, autocast, functorch levels and the like."""

    settings: tuple[tuple[str, Any], ...] = ()
    entered: tuple[Node, ...] = ()

    def after(self, node: Node) -> Region:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if "_increment_nesting" in name or name.startswith(("_enter_", "_push_")):
            return Region(self.settings, (*self.entered, node))
        if "_decrement_nesting" in name or name.startswith(("_exit_", "_pop_")):
            return Region(self.settings, self.entered[:-1])
        if name.startswith(("_set_", "set_")) and not inputs_of(node):
            kept = tuple(s for s in self.settings if s[0] != name)
            return Region((*kept, (name, node.args)), self.entered)
        return self

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Enter the autocast that the graph itself has entered; one around the graph is already
        active."""
        with ExitStack() as entered:
            for node in self.entered:
                if getattr(node.target, "__name__", "") == "_enter_autocast":
                    entered.enter_context(torch.autocast(*node.args))  # type: ignore[arg-type]
            yield

    def beside_autocast(self, has_grad: bool) -> Region:
        """All modes except autocast, which the dtypes of values show. has_grad: the values require
        a gradient, which shows grad mode, so it is left out, too."""
        kept = (n for n in self.entered if getattr(n.target, "__name__", "") != "_enter_autocast")
        grad = "_set_grad_enabled" if has_grad else None
        return Region(tuple(s for s in self.settings if s[0] != grad), tuple(kept))

    def functional_level(self) -> Node | None:
        """The node that opened a functorch or forward-AD level around here, if one did."""
        marks = ("_increment_nesting", "dual_level")
        for node in self.entered:
            if any(m in getattr(node.target, "__name__", "") for m in marks):
                return node
        return None


class View:
    """A reading of one graph: order, regions, readers of each value, canonical expressions, and
    which nodes read and write which memory. Each is computed once, whatever the number of matches.
    """

    def __init__(self, graph: Graph, end: End | None = None) -> None:
        self.graph = graph
        self.end = end  # why Dynamo ended the graph, if it says
        self.nodes = list(graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.region: dict[Node, Region] = {}
        self.readers: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        self._reads: dict[Node, dict[Node, Node]] = {}
        self._written: MutableMapping[Node, Expr | None] = {}
        self._canonical: MutableMapping[Node, Expr | None] = {}
        self._read_through()

    def _read_through(self) -> None:
        origin: dict[Node, Node] = {}  # another name of a tensor → the node that first made it
        current: dict[Node, Node] = {}  # that first node → whose value its tensor holds now
        writes: dict[Node, int] = {}  # that first node → how often its tensor was changed so far
        written: dict[Node, int] = {}  # a name → how often that was when the name was given

        def value_of(name: Node) -> Node:
            first = origin.get(name, name)
            changed = written.get(name, 0) != writes.get(first, 0)
            return current[first] if changed else name

        region = Region()
        for node in self.nodes:
            self.region[node] = region
            region = region.after(node)
            self._reads[node] = {n: value_of(n) for n in inputs_of(node)}
            for value in dict.fromkeys(self._reads[node].values()):
                self.readers[value].append(node)
            changed = input_of(node) if called_in_place(node) else None
            named = changed if isinstance(changed, Node) else self._renamed_by(node)
            if named is None:
                continue
            origin[node] = first = origin.get(named, named)
            if changed is not None:
                writes[first] = writes.get(first, 0) + 1
                current[first] = node
            written[node] = writes.get(first, 0)

    def _renamed_by(self, node: Node) -> Node | None:
        """The argument that the node returns unchanged: `x.float()` of a float32, or dropout in
        eval mode. A write to one shows in the other."""
        try:
            expr = self.written(node) if rule_of(node) is not None else None
        except Exception:  # it raises again at its site, and only that site is lost
            expr = None
        if expr is None or expr.op not in OPS or not OPS[expr.op].returns_input:
            return None
        argument = input_of(node)
        if not isinstance(argument, Node) or not storages((node,)) & storages((argument,)) - {None}:
            return None
        return argument

    def value(self, reader: Node, argument: Node) -> Node:
        """The node whose value `reader` sees when it names `argument`."""
        return self._reads[reader].get(argument, argument)

    def resolve(self, reader: Node, argument: Any) -> Any:
        """`argument` with every node replaced by the node whose value `reader` sees."""
        return torch.fx.node.map_arg(argument, lambda n: self.value(reader, n))

    def written(self, node: Node) -> Expr | None:
        """The node's own op, or None for anything without a canonical name."""
        if node not in self._written:
            self._written[node] = self._read(node)
        return self._written[node]

    def canonical(self, node: Node) -> Expr | None:
        """What the node means as sums and products, or None as above. For matching alone."""
        if node not in self._canonical:
            written = self.written(node)
            self._canonical[node] = None if written is None else meaning(written)
        return self._canonical[node]

    @functools.cached_property
    def writers(self) -> dict[Node, tuple[Node, ...]]:
        """Node → the nodes whose memory it may write; only nodes that may, in the graph's order."""
        found = ((node, writes_of(node)) for node in self.nodes)
        return {node: written for node, written in found if written}

    @functools.cached_property
    def writer_places(self) -> list[int]:
        return [self.order[node] for node in self.writers]

    @functools.cached_property
    def written_at(self) -> dict[Any, list[int]]:
        """Storage → places in the order of the nodes that may write it."""
        return self._by_storage((n, storages(written)) for n, written in self.writers.items())

    @functools.cached_property
    def read_at(self) -> dict[Any, list[int]]:
        """Storage → places in the order of the nodes that take a tensor in it."""
        return self._by_storage((n, storages(inputs_of(n))) for n in self.nodes)

    @functools.cached_property
    def shown_at(self) -> dict[Any, list[int]]:
        """Storage → places in the order of the nodes whose value is in it."""
        return self._by_storage((n, storages((n,))) for n in self.nodes)

    @functools.cached_property
    def reshaped(self) -> dict[Any, Node]:
        """Storage → a call that changes, in place, how a tensor in it is seen: `v.t_()`."""
        calls = [node for node in self.nodes if op_of(node) in _SEEN_OTHERWISE]
        return {memory: node for node in calls for memory in storages((node, *inputs_of(node)))}

    @functools.cached_property
    def batch_norms_at(self) -> dict[Any, list[int]]:
        """Storage → places in the order of the batch_norms that take a tensor in it."""
        norms = (n for n in self.nodes if (e := self.canonical(n)) and e.op == "batch_norm")
        return self._by_storage((n, storages(inputs_of(n))) for n in norms)

    @functools.cached_property
    def graph_inputs(self) -> set[Any]:
        """Storages of the placeholders."""
        return storages(n for n in self.nodes if n.op == "placeholder")

    def _by_storage(self, found: Iterable[tuple[Node, set[Any]]]) -> dict[Any, list[int]]:
        places: dict[Any, list[int]] = {}
        for node, memory in found:
            for storage in memory:
                places.setdefault(storage, []).append(self.order[node])
        return places

    def _read(self, node: Node) -> Expr | None:
        rule = rule_of(node)
        if rule is None:
            return None
        try:
            args, kwargs = self.resolve(node, node.args), self.resolve(node, node.kwargs)
            return rule(*args, **kwargs)
        except (TypeError, Unsupported):  # a form we do not know: out=, dtype=, generator= …
            return None
