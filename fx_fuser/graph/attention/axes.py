"""Which axis does a dimension run over?  Followed through views, by name and never by size.

A product gives each dimension of its result an axis. A view moves, joins and splits dimensions, and
the axes with them: `view(B·H, L, L) → (B, H, L, L)` splits an axis in two, wherever else that axis
occurs. So [16, 16, 16, 16] still has one dimension of heads, one of queries and one of keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fx_fuser.graph.prepare.reindex import Permutation, Size, Step, is_same

# The axes that a dimension runs over, the outermost first. () is a dimension of one element, over
# which a tensor may broadcast.
Dim = tuple[int, ...]


class Axes:
    """The axes of one site, as split so far."""

    def __init__(self) -> None:
        self._sizes: list[Size] = []
        self._parts: dict[int, Dim] = {}

    def new(self, size: Size) -> Dim:
        self._sizes.append(size)
        return (len(self._sizes) - 1,)

    def size(self, axis: int) -> Size:
        return self._sizes[axis]

    def leaves(self, dims: Iterable[int]) -> Dim:
        """The same axes, each split one replaced by its parts."""
        found: list[int] = []
        for axis in dims:
            found += self.leaves(self._parts[axis]) if axis in self._parts else (axis,)
        return tuple(found)

    def flat(self, dims: Iterable[Dim]) -> Dim:
        return self.leaves(axis for dim in dims for axis in dim)

    def spread(
        self, sizes: Sequence[Size], dims: Sequence[Dim], over: Sequence[Size]
    ) -> list[Dim] | None:
        """The dimensions of a tensor of `sizes` that broadcasts to one of `over`, which has `dims`;
        None if it is not known to."""
        if len(sizes) > len(dims):
            return None
        found: list[Dim] = []
        for size, dim, whole in zip(sizes, dims[len(dims) - len(sizes) :], over[-len(sizes) :]):
            if is_same(size, whole):
                found.append(dim)
            elif is_same(size, 1):
                found.append(())
            else:
                return None
        return found

    def seen(self, dims: Sequence[Dim], step: Step) -> list[Dim] | None:
        """The dimensions of a view of a tensor that has these; None if it mixes axes."""
        if isinstance(step, Permutation):
            return [dims[i] for i in step.order]
        return self._regrouped(dims, [(before, after) for before, after in step.groups])

    def unseen(self, dims: Sequence[Dim], step: Step) -> list[Dim] | None:
        """The dimensions of a tensor whose view has these; None if it mixes axes."""
        if isinstance(step, Permutation):
            return [dims[step.order.index(i)] for i in range(len(step.order))]
        return self._regrouped(dims, [(after, before) for before, after in step.groups])

    def _regrouped(
        self, dims: Sequence[Dim], groups: Sequence[tuple[Sequence[Size], Sequence[Size]]]
    ) -> list[Dim] | None:
        found: list[Dim] = []
        start = 0
        for sizes, wanted in groups:
            mine = dims[start : start + len(sizes)]
            start += len(sizes)
            if len(sizes) == len(wanted) == 1:
                found += mine
                continue
            arranged = self.arrange(self.flat(mine), wanted)
            if arranged is None:
                return None
            found += arranged
        return found

    def arrange(self, axes: Dim, sizes: Sequence[Size]) -> list[Dim] | None:
        """The axes as dimensions of these sizes, which have the same product. Splits axes where
        needed; those of size 1 are dropped. None if no split does it."""
        queue = [axis for axis in self.leaves(axes) if not is_same(self._sizes[axis], 1)]
        large = [i for i, size in enumerate(sizes) if not is_same(size, 1)]
        found: list[Dim] = [()] * len(sizes)
        if len(large) == 1:
            found[large[0]] = tuple(queue)
            return found
        for place, i in enumerate(large):
            if len(queue) == 1 and place < len(large) - 1:
                parts = self._split(queue.pop(), [sizes[j] for j in large[place:]])
                for j, part in zip(large[place:], parts):
                    found[j] = (part,)
                return found
            taken = self._take(queue, sizes[i])
            if taken is None:
                return None
            found[i] = taken
        return None if queue else found

    def _take(self, queue: list[int], size: Size) -> Dim | None:
        """Axes from the front of the queue whose sizes multiply to this one."""
        taken: list[int] = []
        left = size
        while not is_same(left, 1):
            if not queue:
                return None
            mine = self._sizes[queue[0]]
            if is_same(mine, left):
                return (*taken, queue.pop(0))
            if not isinstance(mine, int) or not isinstance(left, int) or 0 in (mine, left):
                return None
            if left % mine == 0:
                taken.append(queue.pop(0))
                left //= mine
            elif mine % left == 0:
                first, rest = self._split(queue.pop(0), [left, mine // left])
                queue.insert(0, rest)
                return (*taken, first)
            else:
                return None
        return tuple(taken)

    def _split(self, axis: int, sizes: Sequence[Size]) -> Dim:
        parts = tuple(self.new(size)[0] for size in sizes)
        self._parts[axis] = parts
        return parts
