"""y = σ(x·Wᵀ + b) · a · c        a, c: the pre-activation itself, a tensor or a number.

With a = z this is swish or SiLU times a scale, and with a = z and a tensor c the SwiGLU gate.
"""

import torch
import torch.nn.functional as F


def source(x, weight, bias, a, b):  # type: ignore[no-untyped-def]
    z = F.linear(x, weight, bias)
    return torch.sigmoid(z) * a * b
