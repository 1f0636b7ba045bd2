"""relu(batch_norm(conv2d(x, weight)) + addend) by the library's one call for convolution, addition
and relu, with BatchNorm (evaluation) folded into the weight.

    fold            of each layer: weight · scale, channels_last; (bias − mean) · scale + beta
    conv2d_folded   relu(conv2d(x, weight) + bias + addend), or the convolution alone

with scale = gamma / √(var + eps). The graph calls `fold` on the live parameters at each call, so no
update is missed. `fx_fuser.passes.folding` joins the calls of several layers into one. A call
returns one tensor, of which the graph takes views: two tensors per layer were most of a call's host
time (kernels_cu/NOTES.md).

In training the BatchNorm is frozen: it is in evaluation, and its gamma needs no gradient. The
forward is the same. Backward keeps x, the folded weight and y, and calls the library's convolution
backward on dz = dy · (y > 0); the gradient of weight is that of the folded weight times the scale.
That of beta is Σ dz, that of bias Σ dz times the scale. A gradient of gamma would need
Σ dz · (c − mean), and c is not kept. As Σ weight · (gradient of the folded weight) − mean · Σ dz it
cancels: with a dy whose mean is one standard deviation it was 2 to 47 times as far from float64 as
eager's in fp32, 15 to 56 times in bf16 (three convolutions, on a CPU).

cuDNN reads the bias in the dtype of x. Its call is `aten::cudnn_convolution_relu` or
`_add_relu`, which follow torch's cuDNN settings (TF32, benchmark), as eager's convolution does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import make_channels_last_strides_for, suggest_memory_format

from fx_fuser.anchors.base import Config, Operands
from fx_fuser.anchors.conv2d import memory_format_of, padded, per_channel
from fx_fuser.graph.epilogue import Epilogue, accumulation_dtype
from fx_fuser.kernels.folded import addend_of_relu, fold_spec
from fx_fuser.native import load
from fx_fuser.ops import run
from fx_fuser.ops.once import differentiable_once

_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")
_CHANNELS_LAST = torch.channels_last
# Bits of `given`: which of a layer's vectors there are besides mean and variance.
_OPTIONAL = {"bias": 1, "gamma": 2, "beta": 4}
_VECTORS = ("bias", "running_mean", "running_var", "gamma", "beta")


# ---- fold ---------------------------------------------------------------------------------------


_LIBRARY.define(
    "fold(Tensor[] weights, Tensor[] vectors, int[] given, float[] eps, int[] places, str kernel, "
    "ScalarType out, Tensor after) -> Tensor"
)
_ALIGNMENT = 128  # bytes of each part, more than any kernel of the library needs


def places_of(weights: Sequence[Tensor], out: torch.dtype) -> list[int]:
    """Where each layer's weight and shift begin in the result of `fold`, and its size."""
    unit = _ALIGNMENT // out.itemsize
    sizes = [size for w in weights for size in (w.numel(), w.shape[0])]
    return list(itertools.accumulate((-(-size // unit) * unit for size in sizes), initial=0))


def parts_of(made: Tensor, weights: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Views of the result of `fold`: each layer's weight and shift."""
    found = []
    for i, weight in enumerate(weights):
        strides = make_channels_last_strides_for(weight.shape)
        found.append(made.as_strided(weight.shape, strides, places[2 * i]))
        found.append(made.as_strided(weight.shape[:1], (1,), places[2 * i + 1]))
    return found


def _layers(
    weights: Sequence[Tensor], vectors: Sequence[Tensor], given: Sequence[int]
) -> list[dict[str, Tensor]]:
    """The vectors of each layer, by name."""
    rest = iter(vectors)
    return [
        {n: next(rest) for n in _VECTORS if _OPTIONAL.get(n, mask) & mask or n not in _OPTIONAL}
        for mask in given
    ]


def _scale(var: Tensor, gamma: Tensor | None, eps: float, acc: torch.dtype) -> Tensor:
    scale = (var.to(acc) + eps).rsqrt()
    return scale if gamma is None else scale * gamma.to(acc)


def fold_in_torch(
    weights: Sequence[Tensor],
    vectors: Sequence[Tensor],
    given: Sequence[int],
    eps: Sequence[float],
    out: torch.dtype,
) -> list[Tensor]:
    """The folded weight and the shift of each layer."""
    results = []
    for weight, layer, epsilon in zip(weights, _layers(weights, vectors, given), eps):
        acc = accumulation_dtype((weight.dtype, out))
        wide = {name: vector.to(acc) for name, vector in layer.items()}
        scale = _scale(wide["running_var"], wide.get("gamma"), epsilon, acc)
        shift = (wide.get("bias", 0.0) - wide["running_mean"]) * scale + wide.get("beta", 0.0)
        folded = (weight.to(acc) * scale.view(-1, 1, 1, 1)).to(out)
        results += [folded.contiguous(memory_format=_CHANNELS_LAST), shift.to(out)]
    return results


def _fold(
    weights: Sequence[Tensor],
    vectors: Sequence[Tensor],
    given: Sequence[int],
    eps: Sequence[float],
    places: Sequence[int],
    kernel: str,
    out: torch.dtype,
    after: Tensor,
) -> Tensor:
    """after: not read. It orders the call: without it a scheduler folds the weights of all layers
    first, and holds them all."""
    made = weights[0].new_empty(places[-1], dtype=out)
    values = fold_in_torch(weights, vectors, given, eps, out)
    for part, value in zip(parts_of(made, weights, places), values, strict=True):
        part.copy_(value)
    return made


def _fold_like(weights: Sequence[Tensor], *args: Any) -> Tensor:
    places, _, out, _ = args[3:]
    return weights[0].new_empty(places[-1], dtype=out)


_LIBRARY.impl("fold", _fold, "CPU")  # on CUDA: kernels_cu/host/fold.h
torch.library.register_fake("fx_fuser::fold", _fold_like, lib=_LIBRARY)


# ---- the convolution ----------------------------------------------------------------------------


def _conv2d_folded_in_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    relu: bool,
) -> list[Tensor]:
    z = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    z = z if addend is None else z + addend
    return [(z.relu() if relu else z).contiguous(memory_format=memory_format_of(x))]


def _conv2d_folded_like(x: Tensor, weight: Tensor, *args: Any) -> list[Tensor]:
    stride, padding, dilation, groups = args[2:6]
    geometry = (stride, padding, dilation, False, [0, 0], groups)
    z = torch.ops.aten.convolution.default(x, weight, None, *geometry)
    return [torch.empty_like(z, memory_format=memory_format_of(x))]


# On CUDA kernels_cu/host/folded.h calls cuDNN.
run.define("conv2d_folded", _conv2d_folded_in_torch, _conv2d_folded_like)


# ---- a site, in these ops -----------------------------------------------------------------------


def call(
    operands: Operands,
    config: Config,
    epilogue: Epilogue,
    t: Sequence[Tensor],
    compute: torch.dtype,
) -> Tensor:
    """The result of a site whose product is FOLDED. operands: before autocast's casts.

    Without a relu, for only BatchNorm(convolution), the shift is added by an operation that the
    inner compiler sees; `fx_fuser.passes.folding` moves it to where a site adds the result.
    """
    fold = functools.partial(_fold_by_op, operands["x"])
    tracked = *operands.values(), *t
    if torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in tracked):
        return _trained(operands, config, epilogue, t, compute)
    return bound(operands, config, epilogue, t, compute, fold)()


def bound(
    operands: Operands,
    config: Config,
    epilogue: Epilogue,
    t: Sequence[Tensor],
    compute: torch.dtype,
    fold: Callable[..., list[Tensor]],
) -> Callable[[], Tensor]:
    """What `call` runs once `fold` has folded the weight. fold: called like `fold_in_torch`."""
    weight, bias = operands["weight"], operands["bias"]
    if "running_mean" in operands:
        weight, bias = fold([weight], *_normed(operands, config), compute)
    else:
        weight, bias = (v if v is None else v.to(compute) for v in (weight, bias))
    x, padding = _laid(operands, config, compute)
    geometry = (config["stride"], padding, config["dilation"], config["groups"])

    def convolution(*args: Any) -> Callable[[], Tensor]:
        return run.one(*run.arguments("conv2d_folded", (x, weight, *args)))

    if epilogue.steps:
        found = addend_of_relu(epilogue)
        return convolution(bias, t[int(found[1:])] if found else None, *geometry, True)
    bare = convolution(None, None, *geometry, False)

    def alone() -> Tensor:
        y = bare()
        return y if bias is None else y + per_channel(bias)

    return alone


def _normed(operands: Operands, config: Config) -> tuple[list[Tensor], list[int], list[float]]:
    """A layer's vectors, which of them there are, and eps, as `fold` takes them."""
    present = {n: operands[n] for n in _VECTORS if operands[n] is not None}
    given = sum(bit for name, bit in _OPTIONAL.items() if name in present)
    return [*present.values()], [given], [config["eps"]]


def _laid(operands: Operands, config: Config, compute: torch.dtype) -> tuple[Tensor, list[int]]:
    """x as the convolution reads it, and the padding that is left."""
    x, padding = padded(operands["x"].to(compute), config)
    if suggest_memory_format(operands["weight"]) == _CHANNELS_LAST:
        # As x was when the site was planned. Inductor's decompositions may make another layout,
        # of `cat([a, a], 1)` say, and torch's convolution would go by the weight.
        x = x.contiguous(memory_format=_CHANNELS_LAST)
    return x, padding


def _fold_by_op(
    after: Tensor, weights: Sequence[Tensor], vectors: Sequence[Tensor], given: Sequence[int],
    eps: Sequence[float], out: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    spec, weight = fold_spec(weights[0].dtype, out), weights[0]
    if weight.device.type == "cuda" and type(weight) in (Tensor, torch.nn.Parameter):
        load.prepare([spec], weight.device)
    places = places_of(weights, out)
    args = weights, vectors, given, eps, places, spec.name, out, after
    return parts_of(torch.ops.fx_fuser.fold.default(*args), weights, places)


# ---- training -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """What a call is given besides tensors."""

    geometry: tuple[Any, ...]  # stride, padding, dilation, groups
    relu: bool


class _Folded(torch.autograd.Function):
    """relu(conv2d(x, folded) + shift + addend), or the convolution alone. folded: weight · scale,
    and shift, of which no gradient is asked for. bias and beta: for their gradients alone."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: _Layer,
        x: Tensor,
        weight: Tensor,
        addend: Tensor | None,
        folded: Tensor,
        shift: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        beta: Tensor | None,
    ) -> Tensor:
        others = (shift, addend) if layer.relu else (None, None)
        args = x, folded, *others, *layer.geometry, layer.relu
        y = run.one(*run.arguments("conv2d_folded", args))()
        ctx.layer, ctx.dtypes = layer, [v if v is None else v.dtype for v in (weight, bias, beta)]
        ctx.save_for_backward(x, folded, scale, *([y] if layer.relu else []))
        return y

    @staticmethod
    @differentiable_once(lambda ctx: "conv2d_folded")
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, folded, scale, *y = ctx.saved_tensors
        dz = torch.ops.aten.threshold_backward(dy, *y, 0) if y else dy
        stride, padding, dilation, groups = ctx.layer.geometry
        geometry = stride, padding, dilation, False, [0, 0], groups
        _, of_x, of_weight, of_addend, _, _, _, of_bias, of_beta = ctx.needs_input_grad
        dx, dw, _ = torch.ops.aten.convolution_backward(
            dz, x, folded, None, *geometry, [of_x, of_weight, False]
        )
        if of_weight:
            dw = (dw.to(scale.dtype) * scale.view(-1, 1, 1, 1)).to(ctx.dtypes[0])
        db = dz.sum((0, 2, 3), dtype=scale.dtype) if of_bias or of_beta else None
        of_vectors = (
            db * scale if of_bias else None,
            db if of_beta else None,
        )
        db, dbeta = (v if v is None else v.to(d) for v, d in zip(of_vectors, ctx.dtypes[1:]))
        return None, dx, dw, dz if of_addend else None, None, None, None, db, dbeta


def _trained(
    operands: Operands,
    config: Config,
    epilogue: Epilogue,
    t: Sequence[Tensor],
    compute: torch.dtype,
) -> Tensor:
    """As `call`, with gradients of all but gamma and the running statistics."""
    x, padding = _laid(operands, config, compute)
    weight, (vectors, given, eps) = operands["weight"], _normed(operands, config)
    with torch.no_grad():
        of_layer = [v.detach() for v in vectors], given, eps, compute
        folded, shift = _fold_by_op(operands["x"], [weight.detach()], *of_layer)
        acc = accumulation_dtype((weight.dtype, compute))
        scale = _scale(operands["running_var"], operands["gamma"], config["eps"], acc)
    layer = _Layer(
        (config["stride"], padding, config["dilation"], config["groups"]), bool(epilogue.steps)
    )
    found = addend_of_relu(epilogue) if layer.relu else None
    addend = t[int(found[1:])] if found else None
    made = folded, shift, scale
    y: Tensor = _Folded.apply(layer, x, weight, addend, *made, operands["bias"], operands["beta"])
    return y if layer.relu else y + per_channel(shift)
