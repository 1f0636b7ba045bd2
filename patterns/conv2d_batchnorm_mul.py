"""y = BN(conv(x)) · a        BN on batch or running statistics; a: a tensor or a number."""

import torch.nn.functional as F


def source(x, weight, bias, running_mean, running_var, gamma, beta, a):  # type: ignore[no-untyped-def]
    z = F.batch_norm(F.conv2d(x, weight, bias), running_mean, running_var, gamma, beta)
    return z * a
