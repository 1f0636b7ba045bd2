"""What `compare` found, as values, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from fx_fuser.compare.column import Column
from fx_fuser.compare.verdict import Verdict, judge
from fx_fuser.report.header import Header


@dataclass
class Contents:
    """model: its class. step: "training step" or "forward". inputs: sizes and dtypes. device:
    "cuda" or "cpu". columns: by name, in order. notes: what else must be known to read the figures.
    """

    model: str
    step: str
    inputs: list[str]
    device: str
    header: Header
    columns: dict[str, Column] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def judged(self) -> Verdict:
        """The verdict in its parts."""
        return judge(self.columns, self.device)

    @property
    def verdict(self) -> str:
        """As text: a word, and sentences."""
        return str(self.judged)

    @property
    def use(self) -> bool:
        """Is fx_fuser faster here in wall time, beyond the rounds' spread, and right?"""
        return self.judged.use

    @property
    def launch_bound(self) -> bool:
        """Does the GPU wait for the host, in fx_fuser's column?"""
        return self.judged.launch_bound

    @property
    def title(self) -> str:
        return f"{self.model}, {self.step}, {', '.join(self.inputs) or 'no tensors given'}"

    @property
    def kinds(self) -> list[str]:
        """The kinds of kernels in any column, by their total time, longest first."""
        total: dict[str, float] = {}
        for column in self.columns.values():
            for kind, ms in column.kinds.items():
                total[kind] = total.get(kind, 0.0) + ms
        return sorted(total, key=lambda kind: -total[kind])
