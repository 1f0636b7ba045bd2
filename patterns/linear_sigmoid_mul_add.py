"""y = σ(x·Wᵀ + b) · a + c        a, c: the pre-activation itself, a tensor or a number.

With c = z a scaled residual gate; with a = z it is SiLU plus a residual.
"""

import torch
import torch.nn.functional as F


def source(x, weight, bias, a, b):  # type: ignore[no-untyped-def]
    z = F.linear(x, weight, bias)
    return torch.sigmoid(z) * a + b
