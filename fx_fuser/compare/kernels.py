"""What a GPU's kernels are for, and which of them are known to be slow, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# The first match counts: attention kernels of cuDNN and CUTLASS match later kinds, too.
_KINDS = (
    ("Triton", r"^triton_"),
    ("fx_fuser", r"fx_fuser"),
    ("attention", r"fmha|flash|sdpa|attention"),
    ("convolution", r"conv(?!ert)|fprop|dgrad|wgrad|winograd|nchwToNhwc|nhwcToNchw|implicit"),
    ("gemm", r"gemm|gemv|nvjet|splitKreduce|cublas|cutlass"),
    ("copies", r"memcpy|memset|copy_kernel|CatArray|tensorTransform|convertTensor"),
    ("torch's own", r"at::native|at_cuda_detail|cub::"),
)
KINDS = (*(name for name, _ in _KINDS), "other")

SHARE = 0.03  # of a step's GPU time; a cliff below it is not worth a line


def kind(name: str) -> str:
    """The kind of a kernel, a copy or a fill: one of KINDS."""
    found = (k for k, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE))
    return next(found, "other")


def by_kind(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Milliseconds by kind, without those that are 0."""
    found = dict.fromkeys(KINDS, 0.0)
    for name, ms in kernels:
        found[kind(name)] += ms
    return {name: ms for name, ms in found.items() if ms > 0}


@dataclass(frozen=True)
class Cliff:
    """Kernels that take far longer than the same work takes otherwise. kernel: the name of the one
    that takes longest."""

    says: str
    ms: float
    kernel: str


@dataclass(frozen=True)
class _Rule:
    """narrow: a cliff only in models that compute in 16 bits; fp32 has such kernels anyway."""

    pattern: str
    says: str
    narrow: bool = False


_RULES = (
    _Rule(
        r"cutlass_75|tensorop\w*align1\b",
        "16-bit gemms whose sizes are not multiples of 8, which the library computes by unaligned "
        "loads: pad the size (a vocabulary of 50257 to 50304, say)",
        narrow=True,
    ),
    _Rule(
        r"ffma|simt_sgemm|(ampere|volta|maxwell)_sgemm",
        "fp32 gemms without tensor cores in a 16-bit model: usually attention as matmul and "
        "softmax, because no fused kernel accepts its mask or bias. explain says why",
        narrow=True,
    ),
    _Rule(
        r"tensorTransform|convertTensor|nchwToNhwc|nhwcToNchw",
        "layout conversions around the library's convolutions: try "
        "model.to(memory_format=torch.channels_last), and the inputs likewise",
    ),
    _Rule(
        r"grouped_direct|depthwise|DepthWise",
        "the library's grouped or depthwise convolutions, which take far longer than their memory "
        "traffic needs",
    ),
    _Rule(
        r"triton_\w*__(safe_)?softmax|softmax_warp|cunn_SoftMax",
        "a separate softmax: usually attention as matmul and softmax instead of a fused kernel",
    ),
    _Rule(
        r"^triton_red_\w*batch_norm|batch_norm\w*(collect_statistics|backward_reduce)|bn_fw_tr|bn_bw",
        "BatchNorm's statistics in training: separate passes over each activation",
    ),
)


def cliffs(kernels: Iterable[tuple[str, float]], narrow: bool) -> list[Cliff]:
    """Those that take SHARE of the time or more, slowest first. narrow: the model computes in
    16 bits, by its dtype or by autocast."""
    kernels = list(kernels)
    whole = sum(ms for _, ms in kernels)
    rules = [rule for rule in _RULES if narrow or not rule.narrow]
    found: dict[_Rule, list[tuple[str, float]]] = {}
    for name, ms in kernels:
        rule = next((r for r in rules if re.search(r.pattern, name)), None)
        if rule is not None:
            found.setdefault(rule, []).append((name, ms))
    made = [
        Cliff(rule.says, sum(ms for _, ms in of), max(of, key=lambda one: one[1])[0][:160])
        for rule, of in found.items()
    ]
    worth = [cliff for cliff in made if cliff.ms >= SHARE * whole > 0]
    return sorted(worth, key=lambda cliff: -cliff.ms)
