"""The bf16, fp16 and TF32 linear kernels of sm_90a: they compile without spills and, on a
Hopper GPU, are right."""

from __future__ import annotations

import linear_dense_checks
import pytest
import torch
from checks import passes
from sm90 import check_compiles, gpu
from toolchains import needs_compilers

from benchmarks import kernels, linear_dense_sm90
from benchmarks.measure import float32_settings
from fx_fuser.errors import BuildError
from fx_fuser.kernels.dense import LINEAR_DENSE

# ---- without a GPU -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.each_once
@needs_compilers
@pytest.mark.parametrize(
    "value", [pytest.param(torch.bfloat16, marks=pytest.mark.slow), torch.float32], ids=str
)
@pytest.mark.parametrize("operands", [pytest.param(0, marks=pytest.mark.slow), 12])
def test_compiles_without_spills_or_serialised_products(
    tmp_path, monkeypatch, value, operands
) -> None:
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    check_compiles(LINEAR_DENSE, operands, value)


@needs_compilers
def test_a_cpu_tensor_is_an_error() -> None:
    x = torch.randn(4, 8)
    spec = linear_dense_sm90.IDENTITY.spec(x.dtype)
    with pytest.raises(BuildError, match="CUDA devices"):
        kernels.linear_dense(spec, x, x, None, torch.empty(4, 4), None, [], [])


# ---- on a GPU: the checks ---------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("seed", range(4))
def test_random_sizes_strides_and_operands(seed) -> None:
    with float32_settings("tf32"):
        passes(linear_dense_checks.sweep, 60, seed)


@gpu
@pytest.mark.parametrize(
    "check",
    [
        linear_dense_checks.special_values,
        linear_dense_checks.graphs_and_repeats,
        linear_dense_checks.refusals,
    ],
)
def test_checks(check) -> None:
    passes(check)
