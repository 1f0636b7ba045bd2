"""The bf16, fp16 and TF32 linear kernels of sm_90a: they compile as meant and, on a Hopper GPU, are
right."""

from __future__ import annotations

import pytest
import torch
from test_linear_sm90 import gpu, needs_nvcc

from benchmarks import linear_dense_sm90
from benchmarks.measure import float32_settings
from fx_fuser import build, native

# ---- without a GPU -------------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.parametrize("value", ["__nv_bfloat16", "float"])
@pytest.mark.parametrize("operands", [pytest.param(0, marks=pytest.mark.slow), 12])
def test_compiles_without_spills_or_serialised_products(
    tmp_path, monkeypatch, value, operands
) -> None:
    """`build.cubin` raises on either; more operands leave fewer registers."""
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    names = [f"in[{i}]" for i in range(operands + 1)]
    source = f"""
#include "linear_dense_sm90.cuh"
struct Epilogue {{
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[{operands + 1}], const Acc (&scalar)[1]) const {{
    return fx_fuser::math::sigmoid(in[0]) * scalar[0] + {" * ".join(names)};
  }}
}};
FX_FUSER_LINEAR(Epilogue, 1, float, {value}, {value}{", float" * operands})
"""
    assert build.cubin(source, "sm_90a").stat().st_size > 0


def test_the_signature_names_the_kernel() -> None:
    source = build.linear_dense_example_source("Swish", 1, "float", "float", "__half", "bool")
    assert native._loader_of(source) == "load_linear"
    assert native._signature_of(source) == [
        *("fx_fuser::examples::Swish", "1", "float", "float", "__half", "bool")
    ]


@needs_nvcc
def test_a_cpu_tensor_is_an_error() -> None:
    x = torch.randn(4, 8)
    source = linear_dense_sm90.IDENTITY.source(x.dtype)
    with pytest.raises(build.BuildError, match="CUDA devices"):
        native.linear_dense(source, x, x, None, torch.empty(4, 4), None, [], [])


# ---- on a GPU: the checks of the benchmark -------------------------------------------------------


@gpu
@pytest.mark.parametrize("seed", range(4))
def test_random_sizes_strides_and_operands(seed) -> None:
    failures: list[str] = []
    with float32_settings("tf32"):
        linear_dense_sm90.sweep(60, seed, failures)
    assert not failures


@gpu
@pytest.mark.parametrize(
    "check",
    [
        linear_dense_sm90.special_values,
        linear_dense_sm90.graphs_and_repeats,
        linear_dense_sm90.refusals,
    ],
)
def test_checks(check) -> None:
    failures: list[str] = []
    check(failures)
    assert not failures
