"""Generated attentions before and after the pass that replaces torch's: a few at each run, and that
they find faults.

`python tests/oracle/split_attentions.py` is the longer run.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import split_attentions
import torch

from fx_fuser.passes import attention_split
from fx_fuser.passes.attention_split import Site

FIRST = int(os.environ.get("FX_FUSER_FUZZ_SEED", 100_000))
FORWARD = "_scaled_dot_product_efficient_attention"


@pytest.mark.parametrize("count", [40, pytest.param(150, marks=pytest.mark.slow)])
def test_programs(count: int) -> None:
    print(f"split_attentions: seeds from {FIRST} (FX_FUSER_FUZZ_SEED)")
    failed, replaced = split_attentions.fuzz(range(FIRST, FIRST + count))
    assert not failed
    assert replaced[FORWARD] > count / 2 and replaced[f"{FORWARD}_backward"] > count / 5


CALL = Site._call


def _with(**changed: Any) -> Any:
    return lambda self, *given: CALL(Site(**{**vars(self), **changed}), *given)


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (Site, "_call", _with(causal=False)),
        (Site, "_call", _with(scale=1.0)),
        (attention_split, "_is_one_head", lambda form: form.size[1] > 1),
    ],
    ids=["causal", "scale", "heads"],
)
def test_faults_are_found(
    owner: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as planted:
        planted.setattr(owner, name, fault)
        found = next(seed for seed in range(40) if split_attentions.fuzz([seed])[0])
    assert not split_attentions.attempt(found)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
def test_programs_on_a_gpu() -> None:
    failed, replaced = split_attentions.fuzz(range(FIRST, FIRST + 60), "cuda")
    assert not failed and replaced[FORWARD] > 30
