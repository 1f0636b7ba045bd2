"""The fp32 linear kernel on batches, chunks of K and any strides: on a Hopper GPU it is right."""

from __future__ import annotations

from math import ceil

import pytest
import split_planes_checks
import torch
from checks import passes
from sm90 import gpu
from toolchains import needs_compilers

from benchmarks import kernels
from fx_fuser.kernels.split import split_gemm

# ---- without a GPU -------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("shared", [False, True])
def test_the_op_takes_batches_or_one_matrix_for_all(lead, shared) -> None:
    a, b = torch.randn(*lead, 5, 7), torch.randn(*(() if shared else lead), 4, 7)
    torch.testing.assert_close(split_gemm(a, b), a @ b.mT)


TILE = 128
STAGE = 64  # of K
SMS = 132


def stages(batches: int, m: int, n: int, k: int, chunks: int) -> int:
    """That the busiest of the multiprocessors goes through."""
    tiles = batches * ceil(m / TILE) * ceil(n / TILE) * chunks
    return ceil(tiles / SMS) * ceil(ceil(k / STAGE) / chunks)


@pytest.mark.slow
@pytest.mark.each_once
@needs_compilers
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 768, 768, 6304),  # the gradient of a weight: 36 and 144 tiles
        (1, 3072, 768, 6304),
        (1, 16, 8192, 8192),  # few rows, a large weight
        (1, 128, 4096, 14336),
        (1, 256, 256, 524288),
        (12, 256, 256, 16384),
    ],
)
def test_few_tiles_of_a_long_k_fill_the_gpu(sizes) -> None:
    *_, k = sizes
    chunks = kernels.linear_split_choice(*sizes).chunks
    ideal = sizes[0] * ceil(sizes[1] / TILE) * ceil(sizes[2] / TILE) * (k / STAGE) / SMS
    assert chunks > 1 and k / STAGE / chunks >= 3
    assert stages(*sizes, chunks) <= 1.3 * ideal < stages(*sizes, 1)


@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1024, 8192, 8192),  # tiles for four rounds
        (1, 128, 32768, 32768),
        (96, 512, 512, 64),
        (1, 32768, 32768, 128),
        (1, 128, 128, 448),  # too short to be divided
    ],
)
def test_one_chunk_where_more_gain_nothing(sizes) -> None:
    assert kernels.linear_split_choice(*sizes).chunks == 1


@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize(
    ("sizes", "weight_first"),
    [
        ((1, 12608, 768, 3072), True),  # of a ViT
        ((1, 3072, 768, 6304), True),  # the gradient of a weight, dz being larger than x
        ((1, 768, 3072, 6304), False),
        ((1, 1024, 1024, 8192), False),  # as large: x is scaled exactly
        ((1, 1000, 1020, 8192), False),  # nearly so
        ((96, 2048, 64, 512), True),
    ],
)
def test_the_smaller_operand_is_split_first(sizes, weight_first) -> None:
    assert kernels.linear_split_choice(*sizes).weight_first == weight_first


# ---- on a GPU: the checks ---------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("seed", range(4))
def test_random_batches_chunks_strides_and_operands(seed) -> None:
    passes(split_planes_checks.sweep, 60, seed)


@gpu
@pytest.mark.parametrize("check", split_planes_checks.CHECKS)
def test_checks(check) -> None:
    passes(check)


@gpu
def test_accuracy_contract() -> None:
    passes(split_planes_checks.accuracy)
