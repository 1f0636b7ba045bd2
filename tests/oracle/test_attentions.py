"""Generated attentions: a few at each run, and that they find faults.

`python tests/oracle/attentions.py` is the longer run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import attentions
import pytest
from torch.fx import Node

from fx_fuser.graph.attention import find, hazards, read_through
from fx_fuser.graph.attention.axes import Axes, Dim
from fx_fuser.graph.attention.site import Operand
from fx_fuser.graph.prepare.reindex import Permutation, Size
from fx_fuser.graph.read.view import View

FIRST = int(os.environ.get("FX_FUSER_FUZZ_SEED", 100_000))


@pytest.mark.parametrize("at", range(6))
def test_a_program(at: int) -> None:
    assert attentions.attempt(FIRST + at) == ""


@pytest.mark.slow
def test_programs() -> None:
    print(f"attentions: seeds from {FIRST} (FX_FUSER_FUZZ_SEED)")
    failed, seen = attentions.fuzz(range(FIRST, FIRST + 150))
    assert not failed
    assert seen["found"] > 75


# ---- faults --------------------------------------------------------------------------------------


def _splits_from_the_end(self: Axes, axes: Dim, sizes: Sequence[Size]) -> list[Dim] | None:
    parts = ARRANGE(self, axes, sizes)
    return parts if parts is None or len(parts) < 2 else [*parts[:-2], parts[-1], parts[-2]]


def _never_moves(self: Axes, dims: Sequence[Dim], step: Any) -> list[Dim] | None:
    return [*dims] if isinstance(step, Permutation) else SEEN(self, dims, step)


def _loses_an_operand(self: Any, node: Node, given: Node, dims: list[Dim]) -> Operand:
    made: Operand = OPERAND(self, node, given, dims)
    return Operand(made.node, (*made.dims[:-1], ())) if made.dims else made


def _takes_the_other_for_q(self: Any, first: Any, dims: list[Dim]) -> tuple[int, Dim]:
    query, keys = ORIENTATION(self, first, dims)
    return 1 - query, keys


def _repeats_the_other_way(*args: Any, inner: bool) -> Any:
    return REPEATED(*args, inner=not inner)


def _reads_alone(view: View, node: Node, nodes: tuple[Node, ...]) -> None:
    return None


ARRANGE, SEEN, OPERAND = Axes.arrange, Axes.seen, find._Finder._operand
ORIENTATION, REPEATED = find._Finder._orientation, read_through._repeated
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "views split in the wrong order": (Axes, "arrange", _splits_from_the_end),
    "views move nothing": (Axes, "seen", _never_moves),
    "an operand does not differ from key to key": (find._Finder, "_operand", _loses_an_operand),
    "q and k are exchanged": (find._Finder, "_orientation", _takes_the_other_for_q),
    "heads are repeated in another order": (read_through, "_repeated", _repeats_the_other_way),
    "others may read within": (hazards, "alone", _reads_alone),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, what, fault = FAULTS[name]
    monkeypatch.setattr(where, what, fault)
    seed = next(seed for seed in range(400) if _fault_at(seed))
    monkeypatch.undo()
    assert not _fault_at(seed)


def _fault_at(seed: int) -> str:
    try:
        return attentions.attempt(seed)
    except Exception as error:  # a description that fits no tensor
        return str(error)
