"""In which precision torch multiplies fp32: its own settings, read each time while compiling.

Only the new settings are read: older getters (before torch 2.9) raise once those were used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fx_fuser.options import Options

SPLIT = "split"  # of option "fp32", next to "ieee" and "tf32"


def matmul_tf32_requested() -> bool:
    """Did the user ask for TF32 gemms?  `high` and `medium` matmul precision do."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def asked_precision(options: Options) -> str:
    """What option "fp32" asks of an fp32 gemm: "split", "ieee" or "tf32"."""
    if options.fp32 != "follow":
        return options.fp32
    return "tf32" if matmul_tf32_requested() else SPLIT


def conv_tf32_allowed() -> bool:
    """May cuDNN's convolutions take TF32? By default they may."""
    setting: str = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return setting == "tf32"


def conv_tf32_requested() -> bool:
    """May a fused convolution take TF32? cuDNN's setting does by default, so matmul's must, too."""
    return matmul_tf32_requested() and conv_tf32_allowed()


def may_be_tf32(c: Tensor) -> bool:
    """May the inner compiler's convolution with this result take TF32?"""
    return c.dtype == torch.float32 and conv_tf32_allowed()
