"""z = x · weight + bias        x: [*, K], weight: [K, N], bias: [N] or None, z: [*, N].

`x @ w`, addmm and transformers' Conv1D. A Linear whose weight has the other layout.
"""

from __future__ import annotations

from torch import Tensor

from fx_fuser.anchors.base import Multiply
from fx_fuser.anchors.linear import Linear, matrix


class MatMul(Linear):
    kind = "matmul"
    title = "matmul"
    role_of_z = "product"

    def rows(self, weight: Tensor) -> Tensor:
        return weight.mT

    def weight_gradient(self, multiply: Multiply, dz: Tensor, x: Tensor) -> Tensor:
        return multiply(matrix(x).t(), matrix(dz).t())
