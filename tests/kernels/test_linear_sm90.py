"""The split fp32 gemm: sm_90a's compiles without spills, and on a GPU its own form is right."""

from __future__ import annotations

import linear_split_checks
import pytest
import torch
from checks import passes
from sm90 import check_compiles
from sm90 import gpu_from_sm80 as gpu
from toolchains import needs_compilers

from benchmarks import kernels, linear_sm90
from fx_fuser.errors import BuildError
from fx_fuser.kernels.split import LINEAR_SPLIT

# ---- without a GPU -------------------------------------------------------------------------------


# By default only linear_dense's kernel is compiled; CI compiles every kernel.
@pytest.mark.slow
@pytest.mark.combination
@needs_compilers
@pytest.mark.parametrize("operands", [0, 3, 12])
def test_compiles_without_spills_or_serialised_products(tmp_path, monkeypatch, operands) -> None:
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    check_compiles(LINEAR_SPLIT, operands)


@needs_compilers
def test_a_cpu_tensor_is_an_error() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(BuildError, match="CUDA devices"):
        kernels.linear_split(linear_sm90.IDENTITY.spec, x, x, None, torch.empty(4, 4), None, [], [])


# ---- on a GPU: the checks ---------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("seed", range(4))
def test_random_shapes_strides_and_operands(seed) -> None:
    passes(linear_split_checks.sweep, 60, seed)


@gpu
@pytest.mark.parametrize("check", [*linear_split_checks.CHECKS, linear_split_checks.long_soak])
def test_checks(check) -> None:
    passes(check)


@gpu
def test_accuracy_contract() -> None:
    passes(linear_split_checks.accuracy)
