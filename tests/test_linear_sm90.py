"""The fp32 linear kernel of sm_90a: it compiles as meant and, on a Hopper GPU, is right."""

from __future__ import annotations

import shutil

import pytest
import torch

from benchmarks import linear_sm90
from fx_fuser import build, native

needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None and not (build.DEFAULT_CUDA_HOME / "bin" / "nvcc").exists(),
    reason="needs nvcc",
)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")(test))


# ---- without a GPU -------------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.parametrize(
    "operands", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 3)), 12]
)
def test_compiles_without_spills_or_serialised_products(tmp_path, monkeypatch, operands) -> None:
    """`build.cubin` raises on either; more operands leave fewer registers."""
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    names = [f"in[{i}]" for i in range(operands + 1)]
    source = f"""
#include "linear_split_sm90.cuh"
struct Epilogue {{
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[{operands + 1}], const Acc (&scalar)[1]) const {{
    return fx_fuser::math::sigmoid(in[0]) * scalar[0] + {" * ".join(names)};
  }}
}};
FX_FUSER_LINEAR_SPLIT(Epilogue, 1, float, float, float{", float" * operands})
"""
    assert build.cubin(source, "sm_90a").stat().st_size > 0


def test_the_signature_names_the_kernel() -> None:
    source = build.linear_example_source("Swish", 1, "float", "__half", "float", "bool")
    assert native._loader_of(source) == "load_linear_split"
    assert native._signature_of(source) == [
        *("fx_fuser::examples::Swish", "1", "float", "__half", "float", "bool")
    ]


@needs_nvcc
def test_a_cpu_tensor_is_an_error() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(build.BuildError, match="CUDA devices"):
        native.linear_split(
            linear_sm90.IDENTITY.source, x, x, None, torch.empty(4, 4), None, [], []
        )


# ---- on a GPU: the checks of the benchmark -------------------------------------------------------


@gpu
@pytest.mark.parametrize("seed", range(4))
def test_random_shapes_strides_and_operands(seed) -> None:
    failures: list[str] = []
    linear_sm90.sweep(60, seed, failures)
    assert not failures


@gpu
@pytest.mark.parametrize("check", [*linear_sm90.CHECKS, linear_sm90.long_soak])
def test_checks(check) -> None:
    failures: list[str] = []
    check(failures)
    assert not failures


@gpu
def test_accuracy_contract() -> None:
    failures: list[str] = []
    linear_sm90.accuracy(failures)
    assert not failures
