"""Generated graphs of odd 16-bit gemms: a few at each run, and that they find faults.

`python tests/oracle/odd_gemms.py` is the longer run.
"""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import odd_gemms
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fx_fuser.passes import padding

FIRST = int(os.environ.get("FX_FUSER_FUZZ_SEED", 100_000))


@pytest.mark.parametrize("count", [8, pytest.param(150, marks=pytest.mark.slow)])
def test_programs(count: int) -> None:
    print(f"odd_gemms: seeds from {FIRST} (FX_FUSER_FUZZ_SEED)")
    failed, replaced = odd_gemms.fuzz(range(FIRST, FIRST + count))
    assert not failed
    assert sum(replaced.values()) > count
    assert {"mm", "mm_unaligned"} <= replaced.keys()


def _pads_with_ones(graph: Any, node: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    if target is torch.ops.aten.constant_pad_nd.default:
        args = (*args[:-1], 1.0)
    return CALL(graph, node, target, *args, **kwargs)


CALL = padding.call


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("call", _pads_with_ones),
        ("_is_view", lambda node: node.target in padding._VIEWS),  # as it was: no slice
    ],
)
def test_faults_are_found(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted:
        planted.setattr(padding, name, fault)
        found = next(seed for seed in range(12) if odd_gemms.attempt(seed))
    assert not odd_gemms.attempt(found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_programs_on_a_gpu() -> None:
    failed, replaced = odd_gemms.fuzz(range(FIRST, FIRST + 60), "cuda")
    assert not failed and any("unaligned" in name for name in replaced)


def test_a_relu_may_be_on_the_other_side_within_rounding_alone() -> None:
    """Seed 700877: a relu whose argument is near 0, as sums in another order showed on an H200."""
    program = odd_gemms.generate(700877)
    run = odd_gemms.Run(make_fx(program.joint, tracing_mode="fake")(*program.inputs))
    results = run.run(*program.inputs)
    (argument,), (side,) = run.arguments(), run.sides()
    nearest, farthest = (f(argument.abs()) for f in (torch.argmin, torch.argmax))
    for at, is_fault in ((nearest, False), (farthest, True)):
        other = odd_gemms.Run(run.module)
        other.run(*program.inputs)
        changed = side.clone()
        changed.view(-1)[at] ^= True
        with patch.object(other, "sides", lambda changed=changed: [changed]):
            faults: list[str] = []
            (exact, _) = odd_gemms._exact(program, run, (other, run), faults)
        assert bool(faults) == is_fault
        assert not torch.allclose(exact[-1], results[-1].double(), atol=0.1)
