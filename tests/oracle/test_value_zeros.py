"""Zeros of z: when the order of a sum decides their sign, and the oracle takes either."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from value_fuzz import Run, attempt
from value_patterns import registered
from value_z import _turned


@pytest.mark.parametrize("bias, turned", [(-0.0, [True, False, False]), (0.0, None), (1.0, None)])
def test_only_a_sum_of_negative_zeros_has_either_sign(
    bias: float, turned: list[bool] | None
) -> None:
    program: Any = SimpleNamespace(pattern=SimpleNamespace(kind="matmul"))
    x, weight = torch.tensor([[-1.0, -2.0], [1.0, -2.0], [-1.0, 0.0]]), torch.zeros(2, 1)
    inputs = {"x": x, "weight": weight, "bias": torch.tensor([bias])}
    z = x @ weight + inputs["bias"]
    found = _turned(program, inputs, z)
    if turned is None:
        assert found is None
    else:
        assert found is not None and (found.signbit() != z.signbit()).flatten().tolist() == turned


@pytest.mark.parametrize("train", [False, True])
def test_such_a_program_is_no_fault(train: bool) -> None:
    """(1 + erf(z t)) z, of a gemm of zeros whose bias is -0."""
    with registered() as patterns:
        _, fault = attempt(Run(train=train, auto=True), 1938142, patterns)
    assert fault == ""
