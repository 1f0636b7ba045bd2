"""A pattern; a place where it fits; and why it is not fused where it nearly fits.

`graph.match.trace` makes a pattern of a function, `graph.match.match` finds where it fits.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.fx import Node

from fx_fuser.graph.match.bind import Bound, bind
from fx_fuser.graph.read.canonical import Expr, Operand
from fx_fuser.graph.read.nodes import storages
from fx_fuser.graph.read.operations import is_sum_or_product
from fx_fuser.graph.read.sites import Site
from fx_fuser.graph.read.view import View

Check = Callable[["Match"], "str | None"]


@dataclass(frozen=True)
class Pattern:
    """What is searched for.

    name: the name under which sites are counted, selected and reported.
    kind: the anchor's kind, a name of `fx_fuser.graph.read.sites`' table.
    epilogue: expression over `Z` and the wildcards, products and sums flattened; for matching.
    wildcards: names in the order of the source's signature.
    source: the function it was traced from; None if grown (`fx_fuser.graph.match.grow`).
    check: further conditions on a match; returns why it must not be fused, or None.
    """

    name: str
    kind: str
    epilogue: Operand
    wildcards: tuple[str, ...]
    source: Callable[..., Any] | None
    check: Check | None = None

    @property
    def is_grown(self) -> bool:
        return self.source is None

    @property
    def size(self) -> int:
        """Number of operations in the epilogue; larger patterns are tried first."""
        return size_of(self.epilogue)


def size_of(epilogue: Operand) -> int:
    """Number of operations; n factors or terms are n - 1."""
    if not isinstance(epilogue, Expr):
        return 0
    here = len(epilogue.args) - 1 if is_sum_or_product(epilogue.op) else 1
    return here + sum(map(size_of, epilogue.args))


@dataclass(frozen=True)
class Match:
    """One place where a pattern fits.

    root: the last matched node, whose value the fused op replaces. nodes: all matched nodes.
    wildcards: name → `Z`, a number, or the node of a tensor; several numbers matched to one are
    their sum or product. They tell the user what was found; what is computed is `bound`.
    view: the reading of its graph.
    """

    pattern: Pattern
    site: Site
    root: Node
    nodes: frozenset[Node]
    wildcards: dict[str, Operand]
    view: View = field(repr=False)

    @functools.cached_property
    def bound(self) -> Bound:
        """What is computed after the anchor. Raises Unsupported: see `graph.match.bind`."""
        return bind(self.view, self.site, self.nodes)

    @property
    def operands(self) -> tuple[Node, ...]:
        """Every tensor the fused op reads."""
        operands = [o for o in self.site.operands.values() if o is not None]
        return tuple(dict.fromkeys([*operands, *self.bound.tensors]))

    def written_after(self, operands: Sequence[Node] | None = None) -> tuple[Node, Node] | None:
        """The last node after the match that may write to memory of these operands, by default of
        any, and what it writes."""
        view = self.view
        memory = storages(self.operands if operands is None else operands)
        last = max((i for m in memory for i in view.written_at.get(m, ())[-1:]), default=0)
        if last <= view.order[self.root]:
            return None
        node = view.nodes[last]
        return node, next(w for w in view.writers[node] if storages((w,)) & memory)

    @property
    def first(self) -> Node:
        return min(self.nodes, key=self.view.order.__getitem__)

    def between(
        self, places: Sequence[int], start: Node | None = None, most: int | None = None
    ) -> list[Node]:
        """The unmatched nodes among these places that run between the first matched node (or
        `start`) and the last. Looks at no more than `most` places plus the matched nodes."""
        order, nodes = self.view.order, self.view.nodes
        begin = bisect.bisect_right(places, order[start or self.first])
        end = bisect.bisect_left(places, order[self.root])
        if most is not None:
            end = min(end, begin + most + len(self.nodes))
        return [n for n in map(nodes.__getitem__, places[begin:end]) if n not in self.nodes]


class Fault(NamedTuple):
    """Why a match must not be fused. help: an edit of the model that would allow it, if any."""

    node: Node
    reason: str
    help: str = ""


@dataclass(frozen=True)
class Refusal:
    """Why a pattern was not fused at a site. Falsy.

    node: the one at fault. nodes: those of the pattern that were found, with the anchor. missing:
    how many operations to add, change or drop until it fits; 0 if something else is in the way.
    failed: fx_fuser itself failed, with that reason. wrong: the fused op computes wrong values.
    """

    pattern: Pattern
    site: Site
    node: Node
    reason: str
    help: str = ""
    nodes: frozenset[Node] = frozenset()
    missing: int = 0
    failed: bool = False
    wrong: bool = False

    @classmethod
    def of(cls, match: Match, fault: Fault, missing: int = 0) -> Refusal:
        return cls(match.pattern, match.site, *fault, match.nodes, missing)

    def __bool__(self) -> bool:
        return False
