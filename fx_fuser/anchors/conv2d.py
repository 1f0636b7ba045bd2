"""z = conv2d(x, weight) + bias        x: [N, C, H, W], weight: [O, C/groups, kh, kw], bias: [O].

The library's convolution runs without its bias, which the pointwise pass adds at no cost; with it,
cuDNN's result would be read and written once more. Each backend below is one kernel with that pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.anchors.base import LIBRARY, Anchor, Case, Config, Operands
from fx_fuser.anchors.linear import matmul_tf32_requested
from fx_fuser.graph.epilogue import Epilogue, Step
from fx_fuser.graph.read.canonical import is_number
from fx_fuser.graph.read.nodes import hint_of, meta_tensor
from fx_fuser.graph.read.sites import Site
from fx_fuser.native import launch, limits, load
from fx_fuser.native.kernel_spec import (
    CONV_DIRECT,
    CONV_DIRECT_BACKWARD,
    POINTWISE,
    Family,
    depthwise,
    implicit,
    stem,
)

# The backends beside LIBRARY. A direct convolution, for few channels: it splits fp32 into fp16,
# whatever `tf32` says; 16 bits it multiplies as they are.
DIRECT = "direct"
# The library's own fused call, relu(convolution + bias + addend), with BatchNorm folded into the
# weight: `fx_fuser.ops.folded`. It has no backward.
FOLDED = "folded"
# A kernel for each window. It computes in fp32, whatever `tf32` says. The library makes gradients.
DEPTHWISE = "depthwise"
# A first layer's convolution, of few channels and with a stride, in 16 bits and TF32.
STEM = "stem"
# A convolution of channels_last 16-bit tensors as a gemm over pixels. The library makes gradients.
IMPLICIT = "implicit"
# Products that take channels_last as well as contiguous tensors, and return what they get.
ANY_LAYOUT = frozenset({DEPTHWISE, STEM, IMPLICIT})
HALVES = (torch.bfloat16, torch.float16)
DIRECT_DTYPES = (torch.float32, *HALVES)
LEAST_SHARED = 99 << 10  # bytes that a block may have on each GPU from sm_80 on
# Multiplications for each byte of x, weight and result. Beyond, what the library takes with a pass
# behind it was less than IMPLICIT's time at nearly all layers of three nets, on an H200
# (conv/NOTES.md). Where a GPU multiplies more while it reads a byte, bytes bound more layers.
MOST_PER_BYTE = 90
FAMILIES = {DIRECT: CONV_DIRECT}
BACKWARD = CONV_DIRECT_BACKWARD


def conv_tf32_allowed() -> bool:
    """May cuDNN's convolutions take TF32? By default they may."""
    setting: str = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    return setting == "tf32"


def conv_tf32_requested() -> bool:
    """cuDNN's convolutions allow TF32 by default, without the user asking: a fused one uses it only
    if matmul precision allows it, too.
    """
    return matmul_tf32_requested() and conv_tf32_allowed()


def may_be_tf32(c: Tensor) -> bool:
    """May the inner compiler's convolution with this result take TF32?"""
    return c.dtype == torch.float32 and conv_tf32_allowed()


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
    """channels_last, or contiguous_format of any other layout and where it is both."""
    is_last = image.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last and not image.is_contiguous() else torch.contiguous_format


def is_window(weight: Tensor) -> bool:
    """Has a filter more than one tap?"""
    return any(int(size) != 1 for size in weight.shape[2:])


def addend_of_relu(epilogue: Epilogue) -> str | None:
    """The tensor t… of relu(z + t…), or "" of relu(z); None of any other epilogue."""
    alias = {"z": "z"}
    addend, is_added = "", False
    for i, step in enumerate(epilogue.steps):
        value = f"v{i}"
        args = [alias.get(a, a) for a in step.args if a is not None]
        if step.op == "identity":
            alias[value] = args[0]
        elif step.op == "add" and not is_added and len(args) == 2 and args.count("z") == 1:
            (addend,) = (a for a in args if a != "z")
            is_added = True
            if not addend.startswith("t"):
                return None
            alias[value] = "z"
        elif step.op == "relu" and args == ["z"] and i == len(epilogue.steps) - 1:
            return addend
        else:
            return None
    return None


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

    def candidates(self, case: Case) -> list[dict[str, Any]]:
        options, c = case.options, case.tensors[0]
        asked = conv_tf32_requested() if options.fp32 == "follow" else options.fp32 == "tf32"
        makers = [(LIBRARY, LIBRARY)]
        if self._takes_folded(case):
            makers.append((FOLDED, LIBRARY))
        # In training the inner compiler's passes are others: what is gained there is not measured.
        if not (case.has_backward() and options.plan == "measure"):
            if self._takes_stem(case):
                makers.append((STEM, LIBRARY))
            if self._takes_depthwise(case):
                makers.append((DEPTHWISE, LIBRARY))
            if self._takes_implicit(case):
                makers.append((IMPLICIT, LIBRARY))
        if self._takes_direct(case):
            makers.append((DIRECT, LIBRARY))
            if self._takes_direct_backward(case):
                makers.append((DIRECT, DIRECT))
        fixed = {"tf32": asked and may_be_tf32(c), "again": case.recomputes}
        names = ("tf32", "product", "backward", "again")  # in the order of the schema
        found: list[dict[str, Any]] = [{**fixed, "product": p, "backward": b} for p, b in makers]
        for choices in found:
            choices["tf32"] |= choices["product"] == STEM and may_be_tf32(c)
        return [{n: choices[n] for n in names} for choices in found]

    def _takes_folded(self, case: Case) -> bool:
        """May the library's fused call take the site?

        Not in fp16: a weight times BatchNorm's scale may be beyond its range, or below it.
        """
        c = case.tensors[0]
        dtypes = {torch.float32, c.dtype}
        if case.has_backward() or c.dtype not in (torch.float32, torch.bfloat16):
            return False
        if case.options.exported:  # whose files hold ops that load their own kernels
            return False
        if case.out != c.dtype or not dtypes.issuperset(t.dtype for t in case.tensors):
            return False
        # In eager a weight in channels_last is enough; the op goes by x.
        if memory_format_of(c) != memory_format_of(case.operand("x")):
            return False
        # It follows torch's setting, which by default allows TF32.
        if case.options.fp32 in ("split", "ieee") and may_be_tf32(c):
            return False
        if case.device.type == "cpu":
            # For tests, which hold 16-bit results on a CPU to one rounding.
            forced = case.options.cpu_ops and case.options.plan == "always"
            if not forced or c.dtype != torch.float32:
                return False
        elif not (case.is_channels_last and torch.backends.cudnn.enabled):
            return False
        return self._has_shift(case.site) and self._is_relu(case)

    def _has_shift(self, site: Site) -> bool:
        """Is there a vector for the bias of the library's fused call?"""
        return site.operands["bias"] is not None

    def _is_relu(self, case: Case) -> bool:
        addend = addend_of_relu(case.epilogue)
        if not addend:
            return addend is not None
        c, added = case.tensors[0], case.t[int(addend[1:])]
        same = added.dtype == c.dtype and added.ndim == c.ndim and added.device == c.device
        return same and all(statically_known_true(a == b) for a, b in zip(added.shape, c.shape))

    def _takes_stem(self, case: Case) -> bool:
        """Does the stems' kernel take the site's convolution?

        In fp32 it makes it in TF32, which it may where the library's may.
        """
        c, weight = case.tensors[0], case.operand("weight")
        wide = torch.float64 in (case.acc, *(t.dtype for t in case.tensors))
        if wide or c.dtype not in DIRECT_DTYPES or case.out not in DIRECT_DTYPES:
            return False
        may = may_be_tf32(c) and case.options.fp32 in ("follow", "tf32")
        may = may and not case.options.exported  # a file holds no setting of torch's
        if c.dtype == torch.float32 and not may:
            return False
        # Without cuDNN, results of channels_last are contiguous.
        if case.device.type != "cuda" or not torch.backends.cudnn.enabled:
            return False
        sizes = (*case.operand("x").shape, *weight.shape)
        if case.site.attrs.get("training") or None in map(hint_of, sizes):
            return False
        config = self.config(case.site)
        if {*config["dilation"], config["groups"]} != {1} or len({*config["stride"]}) != 1:
            return False
        *_, spec = case.specs({"tf32": False, "product": STEM, "again": False})
        return bool(launch.stem_cut(spec.family.sizes, c.dtype.itemsize, len(spec.inputs) - 1))

    def _takes_depthwise(self, case: Case) -> bool:
        """Does the depthwise kernel take the site's convolution?"""
        c, x, weight = case.tensors[0], case.operand("x"), case.operand("weight")
        wide = torch.float64 in (case.acc, *(t.dtype for t in case.tensors))
        if wide or c.dtype not in DIRECT_DTYPES or case.device.type != "cuda":
            return False
        config = self.config(case.site)
        stride, groups = config["stride"], config["groups"]
        if {*config["dilation"]} != {1} or stride[0] != stride[1] or config.get("training"):
            return False
        sizes = [[hint_of(n) for n in t.shape] for t in (x, weight)]
        if None in (*sizes[0], *sizes[1]) or sizes[1][1] != 1 or sizes[0][1] != groups:
            return False
        *_, spec = case.specs({"tf32": False, "product": DEPTHWISE, "again": False})
        cut = launch.depthwise_cut(
            sizes[0],  # type: ignore[arg-type]
            sizes[1],  # type: ignore[arg-type]
            config["padding"],
            stride[0],
            operands=len(spec.inputs) - 1,
            x_bytes=c.dtype.itemsize,
            channels_last=case.is_channels_last,
            multiprocessors=limits.of(case.device).multiprocessors,
        )
        return bool(cut)

    def _takes_implicit(self, case: Case) -> bool:
        """Does the implicit gemm take the site's convolution?"""
        c, x, weight = case.tensors[0], case.operand("x"), case.operand("weight")
        wide = torch.float64 in (case.acc, *(t.dtype for t in case.tensors))
        if wide or c.dtype not in HALVES or case.out not in DIRECT_DTYPES:
            return False
        # Without cuDNN, results of channels_last are contiguous.
        if case.device.type != "cuda" or not torch.backends.cudnn.enabled:
            return False
        config = self.config(case.site)
        if config["groups"] != 1 or config.get("training") or not case.is_channels_last:
            return False
        # Where the graph is converted, the weight is, too; else it is as the user has it.
        is_given = memory_format_of(x) == torch.channels_last
        if case.options.exported and not is_given:  # nobody converts it
            return False
        if memory_format_of(c) != memory_format_of(x):  # a torch without cuDNN
            return False
        if is_given and is_window(weight) and memory_format_of(weight) != torch.channels_last:
            return False
        sizes = [[hint_of(n) for n in t.shape] for t in (x, weight, c)]
        if any(None in size for size in sizes):
            return False
        of_x, of_weight, of_c = map(math.prod, sizes)  # type: ignore[arg-type]
        moved = (of_x + of_weight + of_c) * c.dtype.itemsize
        per_byte = of_c * of_weight / sizes[1][0] / moved  # type: ignore[operator]
        if per_byte > MOST_PER_BYTE * limits.of(case.device).balance:
            return False
        *_, spec = case.specs({"tf32": False, "product": IMPLICIT, "again": False})
        cut = launch.implicit_cut(
            sizes[0],  # type: ignore[arg-type]
            sizes[1],  # type: ignore[arg-type]
            config["stride"],
            config["padding"],
            config["dilation"],
            leaves=spec.family.sizes[-1],
            operands=len(spec.inputs) - 1,
            multiprocessors=limits.of(case.device).multiprocessors,
            shared_bytes=LEAST_SHARED,
        )
        return bool(cut)

    def _takes_direct(self, case: Case) -> bool:
        """Does the direct kernel take the site's convolution?"""
        c, x, weight = case.tensors[0], case.operand("x"), case.operand("weight")
        wide = torch.float64 in (case.acc, *(t.dtype for t in case.tensors))
        if wide or c.dtype not in DIRECT_DTYPES:
            return False
        if not all(t.is_contiguous() for t in (c, x, weight)):
            return False
        if c.dtype == torch.float32 and case.options.fp32 == "ieee":
            return False
        config = self.config(case.site)
        if {*config["stride"], *config["dilation"], config["groups"]} != {1}:
            return False
        sizes = [[hint_of(n) for n in t.shape] for t in (x, weight)]
        if None in (*sizes[0], *sizes[1]) or case.device.type != "cuda":
            return False
        *_, spec = case.specs({"tf32": False, "product": DIRECT, "again": False})
        if not load.runs_on(spec, case.device):
            return False
        cut = launch.conv_direct_cut(
            sizes[0],  # type: ignore[arg-type]
            sizes[1],  # type: ignore[arg-type]
            config["padding"],
            case.out.itemsize,
            operands=len(spec.inputs) - 1,
            x_bytes=c.dtype.itemsize,
            multiprocessors=limits.of(case.device).multiprocessors,
        )
        return bool(cut)

    def _takes_direct_backward(self, case: Case) -> bool:
        """Do the direct backward kernels make the gradients that are asked for?"""
        needs = case.gradients()
        if not any(needs.values()) or not case.may_have_fused_backward():
            return False
        x, weight = ([hint_of(n) for n in case.operand(name).shape] for name in ("x", "weight"))
        cut = launch.conv_direct_backward_cut(
            x,  # type: ignore[arg-type]
            weight,  # type: ignore[arg-type]
            self.config(case.site)["padding"],
            needs["x"],
            x_bytes=case.tensors[0].dtype.itemsize,
            multiprocessors=limits.of(case.device).multiprocessors,
        )
        return bool(cut)

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

    def kernels(self, operands: Operands, config: Config) -> tuple[Family, ...]:
        maker = config["product"]
        if maker == DEPTHWISE:
            window = (*operands["weight"].shape[2:], config["stride"][0])
            return (POINTWISE, depthwise(*map(int, window)))
        if maker == STEM:
            outputs, channels, *size = map(int, operands["weight"].shape)
            return (POINTWISE, stem(channels, *size, config["stride"][0], outputs))
        if maker == IMPLICIT:
            weight = operands["weight"]
            has_window = is_window(weight) or any(config["padding"])
            leaves = sum(v is not None for v in operands.values()) - 2  # x and weight are none
            return (POINTWISE, implicit(int(weight.shape[0]), has_window, leaves))
        return (POINTWISE, FAMILIES[maker]) if maker in FAMILIES else (POINTWISE,)

    def forward(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        x, padding = padded(operands["x"], config)
        geometry = (config["stride"], padding, config["dilation"], config["groups"])
        return (library_convolution(config["tf32"], x, operands["weight"], *geometry),)

    def forward_like(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        return (convolve(operands, config),)

    def recompute(self, operands: Operands, config: Config) -> Tensor:
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
