"""z = conv2d(x, weight) + bias        x: [N, C, H, W], weight: [O, C/groups, kh, kw], bias: [O].

The library's convolution runs without its bias, which the pointwise pass adds at no cost; with it,
cuDNN's result would be read and written once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.anchors.base import Anchor, Config, Multiply, Operands, library_gemm
from fx_fuser.graph.epilogue import Epilogue, Step
from fx_fuser.graph.read.canonical import is_number
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.graph.read.sites import Site


def _pair(value: Any) -> list[int]:
    return list(value) * (2 // len(value)) if isinstance(value, (tuple, list)) else [value] * 2


def _padding(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """[left, right, top, bottom], as F.pad takes them."""
    if padding == "valid":
        return [0, 0, 0, 0]
    if padding == "same":  # torch puts an odd pixel at the end
        total_h, total_w = (d * (k - 1) for d, k in zip(dilation, kernel))
        return [total_w // 2, total_w - total_w // 2, total_h // 2, total_h - total_h // 2]
    high, wide = _pair(padding)
    return [wide, wide, high, high]


def padded(x: Tensor, config: Config) -> tuple[Tensor, list[int]]:
    """x, padded if the padding is asymmetric, and the padding left for the convolution."""
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
    # aten._convolution is the one entry that takes TF32 as an argument. cuDNN's default allows it;
    # fp32 here means fp32-accurate.
    flags = (cudnn.benchmark, cudnn.deterministic, cudnn.enabled, tf32)
    geometry = (stride, padding, dilation, False, [0, 0], groups)
    c: Tensor = torch.ops.aten._convolution.default(x, weight, None, *geometry, *flags)
    return c


def memory_format_of(image: Tensor) -> torch.memory_format:
    """channels_last; contiguous_format for any other layout, and if it is both."""
    is_last = image.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last and not image.is_contiguous() else torch.contiguous_format


def is_window(weight: Tensor) -> bool:
    """Does a filter have more than one tap?"""
    return any(int(size) != 1 for size in weight.shape[2:])


def per_channel(vector: Tensor) -> Tensor:
    """[C], shaped to broadcast against [N, C, H, W]."""
    return vector.view(-1, 1, 1)


class Conv2d(Anchor):
    kind = "conv2d"
    title = "Conv2d"
    schema = (
        "Tensor x, Tensor weight, Tensor? bias, "
        "int[] stride, int[] padding, int[] dilation, int groups, "
        "bool tf32, str product, str backward, bool again"
    )

    def form_fault(self, site: Site) -> str:
        x, weight = (meta_tensor(site.operands[n]) for n in ("x", "weight"))  # type: ignore[arg-type]
        assert x is not None and weight is not None
        if x.ndim != 4 or weight.ndim != 4:
            return f"x has rank {x.ndim}, which is not 4: [N, C, H, W]"
        if any(statically_known_true(size == 0) for size in x.shape):
            # No statistics to take: PyTorch leaves the running ones alone, the fused op made NaN.
            return "x is empty"
        for name in ("stride", "padding", "dilation", "groups"):
            value = site.attrs[name]
            parts = value if isinstance(value, (tuple, list)) else (value,)
            words = value in ("same", "valid") if isinstance(value, str) else False
            if not words and not all(map(is_number, parts)):
                return f"{name}={value} is not known when compiling"
        return ""

    def shape_of_z(self, y: Tensor, operands: Operands) -> Sequence[int]:
        return y.shape

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

    def forward(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        x, padding = padded(operands["x"], config)
        geometry = (config["stride"], padding, config["dilation"], config["groups"])
        return (library_convolution(config["tf32"], x, operands["weight"], *geometry),)

    def forward_like(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        return (convolve(operands, config),)

    def recompute(
        self, operands: Operands, config: Config, multiply: Multiply = library_gemm
    ) -> Tensor:
        (c,) = Conv2d.forward(self, operands, config)
        return c

    def empty_output(self, c: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_like(c, dtype=dtype)

    def z(self, operands: Operands, config: Config) -> Epilogue:
        if operands["bias"] is None:
            return Epilogue(start="c")
        return Epilogue((Step("add", ("c", "bias")),), "c")

    def leaves(
        self, operands: Operands, outputs: Sequence[Tensor], config: Config
    ) -> dict[str, Tensor | float]:
        found: dict[str, Tensor | float] = {"c": outputs[0]}
        if operands["bias"] is not None:
            found["bias"] = per_channel(operands["bias"])
        return found

    def reference(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        c, bias = convolve(operands, config), operands["bias"]
        return (c if bias is None else c + per_channel(bias),)

    def backward(
        self,
        operands: Operands,
        outputs: Sequence[Tensor],
        config: Config,
        dz: Tensor,
        needs: Mapping[str, bool],
        multiply: Multiply = library_gemm,
    ) -> dict[str, Tensor]:
        """A convolution under a BatchNorm calls this, too, with the gradient of c + bias as dz."""
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
