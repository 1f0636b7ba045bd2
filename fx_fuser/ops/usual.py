"""The kernels that nearly every model asks for: wheels bring their cubins (`fx_fuser.wheel`).

It is what models asked for on 2026-11-27, in fp32 and bf16, inference and training: BERT, GPT-2,
Llama, Mistral, Qwen 2, Gemma 2, Phi, GPT-NeoX, OPT, T5, DistilBERT, CLIP's text model and ViT of
transformers 5.23; ViT and ResNet-50 of torchvision; timm's ViT; `nn.TransformerEncoder`. NVRTC
compiles what is not here. tests/package/test_usual.py checks the list against three of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.base import LIBRARY
from fx_fuser.graph.epilogue import parse
from fx_fuser.kernels import attention
from fx_fuser.kernels.folded import fold_spec
from fx_fuser.kernels.unaligned import family_of, gemm_of
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import apply

HOPPER = "sm_90a"
ARCHS = (HOPPER, "sm_80", "sm_100a", "sm_120")
_F32, _BF16, _F16 = torch.float32, torch.bfloat16, torch.float16

_NEW_GELU = (
    "v0 = mul(z, s0); v1 = pow(z, exponent=3.0); v2 = mul(v1, s1); v3 = add(v2, z); "
    "v4 = mul(v3, s2); v5 = tanh(v4); v6 = add(v5, s3); v7 = mul(v6, v0)"
)
_GATED_SILU = "v0 = silu(z); v1 = mul(v0, t0)"
# What follows an fp32 Linear with its bias, or another gemm of two tensors. The kernel without a
# tail is also that of all gemms of backward and of attention.
AFTER_SPLIT = (
    "",
    "v0 = add(z, t0)",  # residual
    "v0 = gelu(z, approximate=none)",  # BERT, GPT-NeoX, ViT
    _NEW_GELU,  # GPT-2, Phi
    _GATED_SILU,  # Llama, Mistral, Qwen 2
    "v0 = relu(z)",  # T5, OPT, DistilBERT, nn.TransformerEncoder
)
# With these for all architectures the wheel would take twice as long to build.
AFTER_SPLIT_ON_HOPPER = (
    "v0 = tanh(z)",  # BERT's pooler
    "v0 = gelu(z, approximate=tanh)",
    "v0 = gelu(z, approximate=tanh); v1 = mul(v0, t0)",  # Gemma 2
    "v0 = mul(z, s0)",  # OPT
    "v0 = mul(z, s0); v1 = sigmoid(v0); v2 = mul(v1, z)",  # CLIP
    "v0 = add(z, t0); v1 = add(v0, t1)",  # attention and MLP side by side: Phi, GPT-NeoX
)
# In 16 bits and in TF32 only named patterns are fused.
AFTER_DENSE = (_GATED_SILU,)
DENSE = (_BF16, _F16, _F32)
# ResNet's Conv2d + BatchNorm in inference: what follows, and the kernels of the first layer and of
# memory-bound ones, only on Hopper (tail and sizes of the weight).
AFTER_NORM = ("", "v0 = relu(z)", "v0 = add(z, t0); v1 = relu(v0)")
RESNET = (_F32, _BF16)
_FIRST = (64, 3, 7, 7)
IMPLICIT = (
    ("", (128, 64, 1, 1)),
    ("v0 = relu(z)", (64, 64, 1, 1)),
    ("v0 = relu(z)", (128, 64, 1, 1)),
    ("v0 = relu(z)", (128, 64, 3, 3)),
    ("v0 = add(z, t0); v1 = relu(v0)", (128, 64, 1, 1)),
)
# Batches of odd matrices in bf16, only on Hopper: rows, and columns of a head. DLRM's interactions,
# Swin's windows, the tokens of a ViT with attention written out.
ODD = ((27, 64), (49, 32), (197, 64))


def specs(arch: str) -> list[KernelSpec]:
    """The kernels for an architecture, each once."""
    return [s for s in dict.fromkeys(_all(arch)) if s.family.arch in (None, arch)]


def _all(arch: str) -> Iterator[KernelSpec]:
    for tail in AFTER_SPLIT + (AFTER_SPLIT_ON_HOPPER if arch == HOPPER else ()):
        yield from _linear("split", tail, _F32)
    for dtype in DENSE:
        for tail in AFTER_DENSE:
            yield from _linear("dense", tail, dtype)
    for dtype in RESNET:
        yield fold_spec(dtype, dtype)
        for tail in AFTER_NORM:
            yield from _convolution(LIBRARY, tail, dtype, _FIRST)
    if arch == HOPPER:
        for dtype in RESNET:
            yield from _convolution("stem", "v0 = relu(z)", dtype, _FIRST, stride=2)
        for tail, weight in IMPLICIT:
            yield from _convolution("implicit", tail, _BF16, weight)
        for rows, width in ODD:
            yield from _attention_of(rows, width)
        yield from attention.offered()


def _linear(product: str, tail: str, dtype: torch.dtype) -> list[KernelSpec]:
    operands = {"x": _like(dtype), "weight": _like(dtype), "bias": None}
    return _forward("linear", product, {}, operands, tail, dtype)


def _convolution(
    product: str, tail: str, dtype: torch.dtype, weight: tuple[int, ...], stride: int = 1
) -> list[KernelSpec]:
    vectors = dict.fromkeys(("running_mean", "running_var", "gamma", "beta"), _like(dtype))
    operands = {"x": _like(dtype), "weight": _like(dtype, *weight), "bias": None, **vectors}
    padding = [weight[-1] // 2] * 2
    config = {"stride": [stride] * 2, "padding": padding, "training": False, "eps": 1e-5}
    return _forward("conv2d_batchnorm", product, config, operands, tail, dtype)


def _attention_of(rows: int, width: int) -> Iterator[KernelSpec]:
    """p = q kᵀ, p v, and the gradient pᵀ dy of v; the other gradients have the forms of these."""
    q = k = v = torch.empty(2, rows, width, dtype=_BF16, device="meta")
    p = torch.empty(2, rows, rows, dtype=_BF16, device="meta")
    for a, b in ((q, k), (p, v.mT), (p.mT, v.mT)):
        family = family_of(a, b)
        assert family is not None
        yield gemm_of(family, _BF16)


def _forward(
    kind: str,
    product: str,
    config: dict[str, Any],
    operands: dict[str, Tensor | None],
    tail: str,
    dtype: torch.dtype,
) -> list[KernelSpec]:
    """Also the kernels of the library's candidate."""
    epilogue = parse(tail)
    tensors, numbers = ([n for n in epilogue.leaves if n[0] == letter] for letter in "ts")
    t, s = [_like(dtype) for _ in tensors], [1.0 for _ in numbers]
    chosen = {**config, "product": product, "backward": LIBRARY, "again": False}
    return apply.forward_specs(ANCHORS[kind], chosen, epilogue, operands, t, s, dtype, dtype)


def _like(dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.empty(sizes or 1, dtype=dtype, device="meta")
