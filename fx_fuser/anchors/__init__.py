"""The anchors: what a pattern's epilogue is fused to.

An anchor owns everything about its main operation that is not pointwise: the schema of its
operands, the gemm or convolution itself, how z is computed from it, and the non-pointwise backward.
It knows no pattern. `fx_fuser.ops.library` makes operators from it.

Vocabulary: *outputs* are what the main operation leaves in memory: `c` first (for a linear, the
pre-activation; for a convolution, the result without its bias), then statistics. z is a pointwise
function of the outputs and of per-channel operands (together the *leaves*). So the kernel that
applies the epilogue applies bias and BatchNorm as well.
"""

from fx_fuser.anchors.base import Anchor
from fx_fuser.anchors.bmm import BatchMatMul
from fx_fuser.anchors.conv2d import Conv2d
from fx_fuser.anchors.conv2d_batchnorm import Conv2dBatchNorm
from fx_fuser.anchors.linear import Linear
from fx_fuser.anchors.matmul import MatMul

_ALL = (Linear(), MatMul(), BatchMatMul(), Conv2d(), Conv2dBatchNorm())
ANCHORS: dict[str, Anchor] = {a.kind: a for a in _ALL}

__all__ = ["ANCHORS", "Anchor"]
