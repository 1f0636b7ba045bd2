"""The anchors: what a pattern's epilogue is fused to.

An anchor owns everything about its main operation that is not pointwise: the schema of its
operands, the product itself, how z comes out of the product, and the non-pointwise backward.
It knows no pattern. `fx_fuser.ops.library` makes operators from it.

Vocabulary: *products* are what the main operation leaves in memory, `c` first (for a linear, the
pre-activation; for a convolution, the result without its bias), then statistics. z is a pointwise
function of the products and of per-channel operands (*leaves*), so that the kernel which applies
the epilogue also applies bias and BatchNorm.
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
