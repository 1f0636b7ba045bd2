"""z = conv2d(x, weight) + bias        x: [N, C, H, W], weight: [O, C/groups, kh, kw], bias: [O].

The library's convolution runs without its bias, which the pointwise pass adds for nothing; with
it, cuDNN's result would be read and written once more. A direct one, for few channels, is one
kernel with that pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.anchors.base import LIBRARY, Anchor, Config, Operands
from fx_fuser.epilogue import POINTWISE, Kernel
from fx_fuser.sites import Site
from fx_fuser.spell import Arg, Expr, Operand, meta_tensor

# Beside LIBRARY: of fp32, products of split fp16, whatever `tf32` says; of 16 bits, plain ones.
DIRECT = "direct"
DIRECT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PRODUCTS = {DIRECT: Kernel("conv_direct_sm90.cuh", "FX_FUSER_CONV_DIRECT")}
BACKWARD = Kernel("conv_direct_backward_sm90.cuh", "FX_FUSER_CONV_DIRECT_BACKWARD")


def conv_tf32_allowed() -> bool:
    """May cuDNN's convolutions take TF32? By default they may."""
    setting: str = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return setting == "tf32"


def _pair(value: Any) -> list[int]:
    return list(value) * (2 // len(value)) if isinstance(value, (tuple, list)) else [value] * 2


def _padding(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """[left, right, top, bottom], as F.pad takes them."""
    if padding == "valid":
        return [0, 0, 0, 0]
    if padding == "same":  # torch puts the odd one at the end
        total_h, total_w = (d * (k - 1) for d, k in zip(dilation, kernel))
        return [total_w // 2, total_w - total_w // 2, total_h // 2, total_h - total_h // 2]
    high, wide = _pair(padding)
    return [wide, wide, high, high]


def padded(x: Tensor, config: Config) -> tuple[Tensor, list[int]]:
    """x and the symmetric padding that is left for the convolution to do."""
    left, right, top, bottom = config["padding"]
    if left == right and top == bottom:
        return x, [top, left]
    return F.pad(x, config["padding"]), [0, 0]


def convolve(operands: Operands, config: Config) -> Tensor:
    """The convolution without its bias, as a user would write it; differentiable."""
    x, padding = padded(operands["x"], config)
    geometry = (config["stride"], padding, config["dilation"], config["groups"])
    return F.conv2d(x, operands["weight"], None, *geometry)


def library_convolution(
    tf32: bool,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    cudnn = torch.backends.cudnn
    # aten._convolution is the one entry that takes TF32 as an argument: cuDNN's own default allows
    # it, and fp32 here means fp32-accurate.
    flags = (cudnn.benchmark, cudnn.deterministic, cudnn.enabled, tf32)
    geometry = (stride, padding, dilation, False, [0, 0], groups)
    c: Tensor = torch.ops.aten._convolution.default(x, weight, None, *geometry, *flags)
    return c


def per_channel(vector: Tensor) -> Tensor:
    """[C], shaped to broadcast against [N, C, H, W]."""
    return vector.view(-1, 1, 1)


class Conv2d(Anchor):
    kind = "conv2d"
    schema = (
        "Tensor x, Tensor weight, Tensor? bias, "
        "int[] stride, int[] padding, int[] dilation, int groups, "
        "bool tf32, str product, str backward, bool again"
    )

    def config(self, site: Site) -> dict[str, Any]:
        weight = meta_tensor(site.operands["weight"])  # type: ignore[arg-type]
        assert weight is not None
        dilation = _pair(site.attrs["dilation"])
        return {
            "stride": _pair(site.attrs["stride"]),
            "padding": _padding(site.attrs["padding"], weight.shape[2:], dilation),
            "dilation": dilation,
            "groups": site.attrs["groups"],
        }

    def kernels(self, config: Config) -> tuple[Kernel, ...]:
        product = config["product"]
        return (POINTWISE,) if product == LIBRARY else (POINTWISE, PRODUCTS[product])

    def product(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        x, padding = padded(operands["x"], config)
        geometry = (config["stride"], padding, config["dilation"], config["groups"])
        return (library_convolution(config["tf32"], x, operands["weight"], *geometry),)

    def product_like(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        return (convolve(operands, config),)

    def product_again(self, operands: Operands, config: Config) -> Tensor:
        (c,) = Conv2d.product(self, operands, config)
        return c

    def empty_output(self, c: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_like(c, dtype=dtype)

    def z(self, operands: Operands, config: Config) -> Operand:
        return Arg("c") if operands["bias"] is None else Expr("add", (Arg("c"), Arg("bias")))

    def leaves(
        self, operands: Operands, products: Sequence[Tensor], config: Config
    ) -> dict[str, Tensor | float]:
        found: dict[str, Tensor | float] = {"c": products[0]}
        if operands["bias"] is not None:
            found["bias"] = per_channel(operands["bias"])
        return found

    def reference(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        c, bias = convolve(operands, config), operands["bias"]
        return (c if bias is None else c + per_channel(bias),)

    def backward(
        self,
        operands: Operands,
        products: Sequence[Tensor],
        config: Config,
        dz: Tensor,
        needs: Mapping[str, bool],
    ) -> dict[str, Tensor]:
        """Also for a convolution under a BatchNorm, whose dz is then the gradient of c + bias."""
        x, weight, bias = (operands[n] for n in ("x", "weight", "bias"))
        grads: dict[str, Tensor] = {}
        if needs["bias"] and bias is not None:
            grads["bias"] = dz.sum((0, 2, 3)).to(bias.dtype)
        wide, padding = padded(x, config)
        dx, dweight, _ = torch.ops.aten.convolution_backward(
            dz.to(x.dtype),
            wide,
            weight,
            None,
            config["stride"],
            padding,
            config["dilation"],
            False,
            [0, 0],
            config["groups"],
            [needs["x"], needs["weight"], False],
        )
        if needs["x"]:
            left, right, top, bottom = config["padding"] if wide is not x else (0, 0, 0, 0)
            grads["x"] = F.pad(dx, [-left, -right, -top, -bottom]) if wide is not x else dx
        if needs["weight"]:
            grads["weight"] = dweight
        return grads
