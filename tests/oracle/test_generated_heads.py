"""Generated heads with their losses: a few at each run, and that they find faults.

`python tests/oracle/generated_heads.py` is the longer run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import generated_heads
import pytest
import torch

from fx_fuser.graph.read import heads
from fx_fuser.graph.read.heads import PLAIN, Tail
from fx_fuser.ops import head_kept, head_loss
from fx_fuser.passes.head_loss import parts

FIRST = int(os.environ.get("FX_FUSER_FUZZ_SEED", 100_000))


@pytest.mark.parametrize("at", range(6))
def test_a_program(at: int) -> None:
    assert generated_heads.attempt(FIRST + at) == ""


@pytest.mark.slow
def test_programs() -> None:
    print(f"generated_heads: seeds from {FIRST} (FX_FUSER_FUZZ_SEED)")
    failed, seen = generated_heads.fuzz(range(FIRST, FIRST + 100))
    assert not failed
    assert seen["found"] > 50


# ---- faults --------------------------------------------------------------------------------------


def _unsmoothed(*given: Any) -> Any:
    *most, tail = given
    return WRITE(*most, tail._replace(smoothing=0.0))


def _uncapped(*given: Any) -> Any:
    *most, tail = given
    return WRITE(*most, Tail(tail.before, 0.0, tail.smoothing))


def _without_scales(factors: Any) -> Any:
    return tuple(PLAIN for _ in range(len(factors) + 1))


def _at_the_first(view: Any, found: Any, labels: Any, are_whole: Any) -> Any:
    return min(found, key=view.order.__getitem__)


def _all_alike(view: Any, node: Any, head: Any) -> Any:
    return {node: head}


WRITE = head_loss.write_gradient
FAULTS: dict[str, tuple[tuple[Any, ...], str, Callable[..., Any]]] = {
    "gradients are not smoothed": ((head_loss, head_kept), "write_gradient", _unsmoothed),
    "gradients do not see the cap": ((head_loss, head_kept), "write_gradient", _uncapped),
    "scales are lost": ((heads,), "_tails", _without_scales),
    "an op is made before its labels": ((parts,), "_place", _at_the_first),
    "all rows are thought to be read": ((parts,), "_moves", lambda head: ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places, attribute, fault = FAULTS[name]
    for place in places:
        monkeypatch.setattr(place, attribute, fault)
    assert any(generated_heads.fuzz([seed])[0] for seed in range(150))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_programs_on_a_gpu() -> None:
    failed, seen = generated_heads.fuzz(range(FIRST, FIRST + 40), "cuda")
    assert not failed and seen["found"] > 20
