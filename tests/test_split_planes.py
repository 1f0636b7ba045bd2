"""The fp32 linear kernel on batches, chunks of K and any strides: on a Hopper GPU it is right."""

from __future__ import annotations

import pytest
import torch
from sm90 import gpu

from benchmarks import split_planes_sm90
from fx_fuser.anchors.linear import split_product

# ---- without a GPU -------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("shared", [False, True])
def test_the_op_takes_batches_or_one_matrix_for_all(lead, shared) -> None:
    a, b = torch.randn(*lead, 5, 7), torch.randn(*(() if shared else lead), 4, 7)
    torch.testing.assert_close(split_product(a, b), a @ b.mT)


# ---- on a GPU: the checks of the benchmark -------------------------------------------------------


@gpu
@pytest.mark.parametrize("seed", range(4))
def test_random_batches_chunks_strides_and_operands(seed) -> None:
    failures: list[str] = []
    split_planes_sm90.sweep(60, seed, failures)
    assert not failures


@gpu
@pytest.mark.parametrize("check", split_planes_sm90.CHECKS)
def test_checks(check) -> None:
    failures: list[str] = []
    check(failures)
    assert not failures


@gpu
def test_accuracy_contract() -> None:
    failures: list[str] = []
    split_planes_sm90.accuracy(failures)
    assert not failures
