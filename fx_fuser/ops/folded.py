"""relu(batch_norm(conv2d(x, weight)) + addend) by the library's one call for convolution, addition
and relu, with BatchNorm (evaluation) folded into the weight.

    fold            of each layer: weight · scale, channels_last; (bias − mean) · scale + beta
    conv2d_folded   relu(conv2d(x, weight) + bias + addend), or the convolution alone

with scale = gamma / √(var + eps). The graph calls `fold` on the live parameters at each call, so no
update is missed. `fx_fuser.passes.folding` joins the calls of several layers into one. A call
returns one tensor, of which the graph takes views: two tensors per layer were most of a call's host
time (kernels_cu/NOTES.md).

cuDNN reads the bias in the dtype of x. Its call is `aten::cudnn_convolution_relu` or
`_add_relu`, which follow torch's cuDNN settings (TF32, benchmark), as eager's convolution does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
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
        scale = (wide["running_var"] + epsilon).rsqrt() * wide.get("gamma", 1.0)
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
        present = {n: operands[n] for n in _VECTORS if operands[n] is not None}
        given = sum(bit for name, bit in _OPTIONAL.items() if name in present)
        vectors, eps = [*present.values()], [config["eps"]]
        weight, bias = fold([weight], vectors, [given], eps, compute)
    else:
        weight, bias = (v if v is None else v.to(compute) for v in (weight, bias))
    x, padding = padded(operands["x"].to(compute), config)
    if suggest_memory_format(operands["weight"]) == _CHANNELS_LAST:
        # As x was when the site was planned. Inductor's decompositions may make another layout,
        # of `cat([a, a], 1)` say, and torch's convolution would go by the weight.
        x = x.contiguous(memory_format=_CHANNELS_LAST)
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
