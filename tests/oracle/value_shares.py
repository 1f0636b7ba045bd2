"""How many elements a run compared, and of how many it said nothing, by excuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor
from value_programs import Program

Key = tuple[str, str]  # kind of anchor, part


@dataclass
class Shares:
    """elements: compared, of each anchor and part. opened: those of which any value would have been
    accepted, with the excuse. noted: those that were compared with something else, with what."""

    elements: Counter[Key] = field(default_factory=Counter)
    opened: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    noted: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def add(self, p: Program, part: str, elements: int) -> None:
        self.elements[p.pattern.kind, part] += elements

    def open(self, p: Program, part: str, excuse: str, where: Tensor) -> None:
        self.add(p, part, where.numel())
        self.opened[p.pattern.kind, part, excuse] += int(where.sum())

    def also_open(self, p: Program, part: str, excuse: str, where: Tensor) -> None:
        """Of elements that `open` has counted already."""
        self.opened[p.pattern.kind, part, excuse] += int(where.sum())

    def note(self, p: Program, part: str, what: str, where: Tensor) -> None:
        self.noted[p.pattern.kind, part, what] += int(where.sum())

    def update(self, other: Shares) -> None:
        for mine, theirs in zip(vars(self).values(), vars(other).values()):
            mine.update(theirs)

    def share(self, kind: str = "", part: str = "") -> float:
        """Of the elements of this kind of anchor and part, of all by default."""

        def count(counter: Counter[tuple[str, ...]]) -> int:
            fits = (n for k, n in counter.items() if kind in ("", k[0]) and part in ("", k[1]))
            return sum(fits)

        return count(self.opened) / max(count(self.elements), 1)  # type: ignore[arg-type]

    def of_parts(self, least: int) -> Iterator[tuple[str, float]]:
        """The share of each anchor's part with so many elements at least, and of all."""
        yield "all", self.share()
        for (kind, part), count in sorted(self.elements.items()):
            if count >= least:
                yield f"{kind}, {part}", self.share(kind, part)

    def lines(self) -> Iterator[str]:
        for (kind, part), count in sorted(self.elements.items()):
            said = [f"{self.share(kind, part):.2%} open"]
            for counter in (self.opened, self.noted):
                found = ((e, n) for (k, of, e), n in counter.items() if (k, of) == (kind, part))
                said += [f"{n} {excuse}" for excuse, n in found if n]
            yield f"  {kind}, {part}: {count} elements, {', '.join(said)}"
