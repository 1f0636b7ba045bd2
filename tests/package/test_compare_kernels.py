"""Kernels' names as profilers have recorded them: their kinds, and the cliffs among them."""

from __future__ import annotations

import pytest

from fx_fuser.compare import turns
from fx_fuser.compare.kernels import KINDS, SHARE, by_kind, cliffs, kind

MATH_PATH = (
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4"
    "_alignc4_execute_kernel__5x_cublas"
)
ODD = "void cutlass::Kernel2<cutlass_75_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align1>"
SIMT = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_tn_align1>(Params)"
TRANSFORM = "void cudnn::ops::tensorTransformGeneric<__half, __half, float>"
TENSOR_CORES = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fx_fuser_linear_split", "fx_fuser"),
        ("triton_poi_fused_convolution_gelu_0", "Triton"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::P)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        (SIMT, "gemm"),
        (MATH_PATH, "gemm"),
        (TENSOR_CORES, "gemm"),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32", "convolution"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        (TRANSFORM, "copies"),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>",
            "copies",
        ),
        ("void at::native::vectorized_elementwise_kernel<4>", "torch's own"),
        ("something_else", "other"),
    ],
)
def test_kinds(name: str, expected: str) -> None:
    assert kind(name) == expected and expected in KINDS


def test_time_by_kind_has_what_took_some() -> None:
    assert by_kind([(SIMT, 1.0), (TENSOR_CORES, 2.0), ("Memset (Device)", 0.0)]) == {"gemm": 3.0}


@pytest.mark.parametrize(
    ("name", "narrow", "said"),
    [
        (ODD, True, "not multiples of 8"),
        (MATH_PATH, True, "attention as matmul and softmax"),
        (SIMT, True, "fp32 gemms without tensor cores"),
        (TRANSFORM, True, "channels_last"),
        (TRANSFORM, False, "channels_last"),
        ("void dgrad2d_grouped_direct_kernel<__nv_bfloat16, float>", True, "depthwise"),
        ("triton_per_fused__softmax__to_copy_add_5", True, "a separate softmax"),
        ("triton_red_fused__native_batch_norm_legit_functional_3", True, "BatchNorm's"),
    ],
)
def test_cliffs(name: str, narrow: bool, said: str) -> None:
    (cliff,) = cliffs([(name, 1.0), (name, 0.5), (TENSOR_CORES, 3.0)], narrow)
    assert said in cliff.says and cliff.ms == 1.5 and cliff.kernel == name


@pytest.mark.parametrize(
    ("name", "narrow"),
    [
        (SIMT, False),  # what fp32 without TF32 runs on; `align1` there says nothing
        (MATH_PATH, False),
        (TENSOR_CORES, True),
        ("fx_fuser_linear_split", False),
        ("triton_per_fused__log_softmax_nll_loss_forward_7", True),
        ("triton_poi_fused__to_copy_gelu_1", True),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", True),
    ],
)
def test_no_cliff(name: str, narrow: bool) -> None:
    assert cliffs([(name, 1.0)], narrow) == []


def test_cliffs_are_worth_a_line_and_the_dearest_is_first() -> None:
    of = [(ODD, 1.0), (TRANSFORM, 2.0), (TENSOR_CORES, 10.0)]
    assert [cliff.ms for cliff in cliffs(of, True)] == [2.0, 1.0]
    assert cliffs([(ODD, SHARE / 2), (TENSOR_CORES, 1.0)], True) == []
    assert cliffs([], True) == []


def test_busy_time_counts_overlap_once() -> None:
    events = [
        {"cat": "kernel", "name": "b", "ts": 100.0, "dur": 2900.0},
        {"cat": "kernel", "name": "a", "ts": 0.0, "dur": 1000.0},
        {"cat": "gpu_memset", "name": "c", "ts": 4000.0, "dur": 500.0},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 9000.0},
        {"name": "no category"},
    ]
    assert list(turns.busy(events)) == [("a", 1.0), ("b", 2.0), ("c", 0.5)]
