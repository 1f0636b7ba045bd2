"""z, and what else it may be: of a BatchNorm, of a folded convolution, of a gemm whose bias is the
tail's first operand. For `value_oracle`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from value_programs import Program
from value_seen import told
from value_sets import same

from fx_fuser.anchors import ANCHORS
from fx_fuser.kernels.precision import conv_tf32_allowed
from fx_fuser.ops import apply

EPS = 1e-5  # of every BatchNorm here


@dataclass
class Z:
    """others: pairs of what else z may be. first: the dtype to which the tail's first result may be
    rounded. fault: torch's own is not this. turned: z with the other sign at zeros whose sign the
    order of a sum decides."""

    value: Tensor
    others: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    first: torch.dtype | None = None
    fault: str = ""
    turned: Tensor | None = None

    def may_be(self, room: Tensor, instead: tuple[Tensor, Tensor]) -> None:
        """Off by room; where that or one of `instead` is no number, one of `instead`."""
        z = self.value
        held = (z + room).isfinite() & (z - room).isfinite()
        self.others.append((torch.where(held, z + room, z), torch.where(held, z - room, z)))
        for other in instead:
            held = held & other.isfinite()
        if not held.all():
            first, second = (torch.where(held, z, v.to(z.dtype)) for v in instead)
            self.others.append((first, second))


def z_of(p: Program, space: dict[str, Any], inputs: dict[str, Tensor], acc: torch.dtype) -> Z:
    theirs = _eager(p, space, inputs, acc)
    if p.pattern.kind == "conv2d_batchnorm":
        return _folded(p, inputs, theirs) if p.folded else _norm(p, inputs, theirs, acc)
    z = Z(theirs.to(acc))
    z.turned = _turned(p, inputs, z.value)
    if p.bias is not None:  # a term of the gemm's sum, in any order, which is rounded to z's dtype
        x, weight = (inputs[n].detach().double().abs() for n in ("x", "weight"))
        weight = weight.t() if p.pattern.kind == "linear" else weight
        size = x @ weight
        size = size + torch.broadcast_to(p.bias.double().abs(), size.shape)
        eps = (x.shape[-1] + 2) * torch.finfo(acc).eps + torch.finfo(theirs.dtype).eps
        z.may_be((eps * size).to(acc), (theirs, theirs))
        z.first = theirs.dtype
    return z


def _turned(p: Program, inputs: dict[str, Tensor], z: Tensor) -> Tensor | None:
    """z where zeros that are sums of nothing but -0 have the other sign; None if there are none.

    Such a sum is -0, but +0 if it begins with +0, as a gemm's accumulator may.
    """
    if p.pattern.kind not in ("linear", "matmul", "bmm"):
        return None
    x, weight = inputs["x"].detach(), inputs["weight"].detach()
    weight = weight.mT if p.pattern.kind == "linear" else weight
    pairs = [(x != 0, weight != 0), (x.signbit(), weight.signbit())]
    pairs.append((~x.signbit(), ~weight.signbit()))
    others = sum(a.double() @ b.double() for a, b in pairs)  # how many terms are not -0
    mask = (z == 0) & (others == 0)
    if (bias := inputs.get("bias")) is not None:
        mask &= (bias == 0) & bias.signbit()
    return torch.where(mask, -z, z) if mask.any() else None


def _eager(
    p: Program, space: dict[str, Any], inputs: dict[str, Tensor], acc: torch.dtype
) -> Tensor:
    of_anchor = [v for n, v in inputs.items() if n not in p.operands]
    with torch.no_grad():
        if p.autocast:
            with torch.autocast(inputs["x"].device.type, torch.bfloat16):
                return space["anchor"](*of_anchor)  # type: ignore[no-any-return]
        if p.pattern.kind == "conv2d":  # oneDNN makes zeros of subnormal biases in 16 bits
            c = F.conv2d(inputs["x"], inputs["weight"], None, *p.geometry)
            return c.to(acc) + inputs["bias"].to(acc).view(-1, 1, 1)
        return space["anchor"](*(v.clone() for v in of_anchor))  # type: ignore[no-any-return]


def _norm(p: Program, inputs: dict[str, Tensor], theirs: Tensor, acc: torch.dtype) -> Z:
    """By the anchor's formula, and what other roundings of it may change.

    gamma (c - mean) may overflow: torch's CUDA kernel makes that product, ours the scale
    gamma / sqrt(var + eps) and then one fma. Both have subnormal numbers' roundings.
    """
    anchor = ANCHORS["conv2d_batchnorm"]
    operands = {n: inputs[n].detach() if n in inputs else None for n in anchor.operands}
    stride, padding = p.geometry
    config = {"stride": [stride] * 2, "padding": [padding] * 4, "dilation": [1, 1], "groups": 1,
              "tf32": False, "training": p.training_norm, "eps": EPS}  # fmt: skip
    products = anchor.forward(operands, config)
    z = apply.z_in_torch(anchor, operands, products, config, acc)
    leaves = {n: v for n, v in anchor.leaves(operands, products, config).items() if n != "eps"}
    wide = {n: v.to(acc) for n, v in leaves.items() if isinstance(v, Tensor)}
    rstd = (wide["var"] + EPS).rsqrt()
    # In float64: what z is the difference of may be beyond acc's range, and the noise is not.
    sizes = {n: v.double().abs() for n, v in wide.items()}
    reach = (sizes["c"] + sizes["mean"] + sizes.get("bias", 0.0)) * rstd
    if p.training_norm:  # c's mean may be zero, and off by roundings of c
        reach = reach + sizes["c"].mean((0, 2, 3), True) * rstd
    size = reach * sizes["gamma"] + torch.where(z.isinf(), 0, z.abs())
    noise = 8 * torch.finfo(torch.float32).eps * size + 1.5e-45 * (1 + reach / rstd)
    made = Z(z)
    made.may_be(noise.to(acc), (theirs, theirs))
    # In 16 bits torch's own has more roundings.
    room = noise * max(1.0, torch.finfo(theirs.dtype).eps / torch.finfo(acc).eps / 4)
    off = ~((theirs.double() - z.double()).abs() <= room + 1e-45)
    if (bad := off & ~same(theirs, z.to(theirs.dtype)) & (noise.abs() < 1e30)).any():
        made.fault = told("z of the BatchNorm", bad, z, theirs, theirs)
    return made


def _folded(p: Program, inputs: dict[str, Tensor], theirs: Tensor) -> Z:
    """(weight · scale) and (bias - mean) · scale + beta are rounded to x's dtype, and so is z."""
    acc, dtype = torch.float32, inputs["x"].dtype
    wide = {n: v.detach().double() for n, v in inputs.items() if n not in p.operands}
    scale = (wide["running_var"] + EPS).rsqrt() * wide["gamma"]
    weight = wide["weight"] * scale.view(-1, 1, 1, 1)
    shift = (wide.get("bias", 0.0) - wide["running_mean"]) * scale + wide["beta"]
    z = F.conv2d(wide["x"], weight, shift, *p.geometry)
    size = (wide.get("bias", scale * 0).abs() + wide["running_mean"].abs()) * scale.abs()
    size = F.conv2d(wide["x"].abs(), weight.abs(), size + wide["beta"].abs(), *p.geometry)
    eps = (weight[0].numel() + 8) * torch.finfo(acc).eps
    eps += 2 * torch.finfo(dtype).eps if dtype != acc else 0.0
    if z.is_cuda and dtype == acc and conv_tf32_allowed():  # of both factors
        eps += 2**-10
    made = Z(z.to(acc))
    folded = F.conv2d(inputs["x"].detach(), weight.to(dtype), shift.to(dtype), *p.geometry)
    made.may_be((eps * size).to(acc) + 64 * torch.finfo(acc).tiny, (theirs, folded))
    return made
