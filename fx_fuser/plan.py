"""(match, options) → how its op will run: on our kernels, or as plain torch ops."""

from __future__ import annotations

import warnings

import torch

from fx_fuser import native
from fx_fuser.match import Match
from fx_fuser.options import Options
from fx_fuser.spell import meta_tensor


def tf32_requested() -> bool:
    """Did the user ask for TF32?  matmul precision "tf32" (`high` and `medium` set it).

    cuDNN's convolutions allow TF32 by default, which nobody asked for: a convolution takes it only
    if matmul precision says so and cuDNN's own setting does not forbid it. The getters of before
    torch 2.9 raise once the new settings were used, so only the new ones are read.
    """
    backends = torch.backends
    asked = backends.cuda.matmul.fp32_precision == "tf32"
    return asked and backends.cudnn.conv.fp32_precision != "ieee"  # type: ignore[attr-defined]


def unavailable(device: torch.device) -> str | None:
    """Why fused kernels cannot run on this device, or None; a missing toolchain warns once."""
    if device.type == "cpu":
        return None
    reason = native.available(device)
    if reason is not None:
        warnings.warn(f"fx_fuser fuses nothing on {device}: {reason}", stacklevel=2)
    return reason


def runs_native(match: Match, options: Options) -> bool:
    """Kernel op and our autograd rule, rather than the pattern's plain torch ops.

    On CPU the inner compiler fuses plain ops better than it can call an opaque reference op.
    """
    device = meta_tensor(match.site.node).device  # type: ignore[union-attr]
    return device.type == "cuda" or options.cpu_ops
