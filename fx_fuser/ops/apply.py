"""Apply an epilogue to an anchor's outputs: as a main loop's kernel, or in torch ops.

Names are bound to values here. The *leaves* of a fused computation are those of the anchor's z
(`Anchor.leaves`), then the epilogue's tensors t0… and numbers s0….
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fx_fuser.anchors import Anchor
from fx_fuser.graph.epilogue import (
    Epilogue,
    Step,
    accumulation_dtype,
    casts_of,
    evaluate,
    kernel_spec,
    linear_backward,
)
from fx_fuser.kernels import families
from fx_fuser.native.kernel_spec import POINTWISE, Family, KernelSpec


def named(t: Sequence[Any], s: Sequence[Any]) -> dict[str, Any]:
    """Name in the epilogue → tensor or number."""
    return {**{f"t{i}": v for i, v in enumerate(t)}, **{f"s{i}": v for i, v in enumerate(s)}}


def wide_dtypes(values: Iterable[Any]) -> list[torch.dtype]:
    """Dtypes of the tensors that count in type promotion: a 0-d float64 does not widen float32."""
    return [v.dtype for v in values if isinstance(v, Tensor) and v.ndim > 0]


def accumulator_of(epilogue: Epilogue, tensors: Iterable[Any], out: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic of an epilogue with these tensors and this result."""
    return accumulation_dtype([*wide_dtypes(tensors), out, *casts_of(epilogue)])


def _evaluated(
    epilogue: Epilogue, z: Tensor, t: Sequence[Tensor], s: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """The epilogue's result before rounding, in the accumulation dtype of all its tensors."""
    acc = accumulator_of(epilogue, (z, *t), dtype)
    wide: Tensor = evaluate(epilogue, {"z": z.to(acc), **named([v.to(acc) for v in t], s)})
    return wide


def in_torch(
    epilogue: Epilogue, z: Tensor, t: Sequence[Tensor], s: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """The epilogue in plain torch ops: accumulation dtype inside, one rounding at the end."""
    return _evaluated(epilogue, z, t, s, dtype).to(dtype) if epilogue.steps else z.to(dtype)


def derivative_in_torch(
    slope: Epilogue, dy: Tensor, t: Sequence[Tensor], s: Sequence[float]
) -> Tensor:
    """dz from dy in the accumulation dtype; slope: see `graph.epilogue.linear_backward`."""
    return _evaluated(slope, dy, t, s, dy.dtype).expand(dy.shape)


def z_in_torch(
    anchor: Anchor,
    operands: Mapping[str, Any],
    outputs: Sequence[Tensor],
    config: Mapping[str, Any],
    acc: torch.dtype,
) -> Tensor:
    """z from the outputs, in plain torch ops, in the accumulation dtype `acc`."""
    leaves = anchor.leaves(operands, outputs, config)
    values = {n: v.to(acc) if isinstance(v, Tensor) else v for n, v in leaves.items()}
    z: Tensor = evaluate(anchor.z(operands, config), values)
    return z


def finish(
    epilogue: Epilogue,
    anchor: Anchor,
    operands: Mapping[str, Any],
    outputs: Sequence[Tensor],
    config: Mapping[str, Any],
    t: Sequence[Tensor],
    s: Sequence[float],
    out: Tensor,
) -> None:
    """out ← epilogue(z(outputs)) on a CPU; on CUDA kernels_cu/host/pointwise.h does this."""
    acc = accumulator_of(epilogue, (*outputs, *t), out.dtype)
    z = z_in_torch(anchor, operands, outputs, config, acc)
    out.copy_(in_torch(epilogue, z, t, s, out.dtype))


# ---- kernels --------------------------------------------------------------------------------


def is_host_scalar(value: Any) -> bool:
    """Is it a kernel's number argument: a number, or a 0-d CPU tensor among CUDA tensors?"""
    return not isinstance(value, Tensor) or (value.ndim == 0 and value.device.type == "cpu")


def spec_of(
    epilogue: Epilogue,
    leaves: Mapping[str, Any],
    t: Sequence[Tensor],
    s: Sequence[float],
    out: torch.dtype,
    family: Family = POINTWISE,
) -> KernelSpec:
    """The kernel of this epilogue and family.

    Order of its tensors: leaves, t. Order of its numbers: those among the leaves, s, the 0-d CPU
    tensors of t. kernels_cu/host/linear.h and conv.h use the same order.
    """
    tensors = {n: v.dtype for n, v in leaves.items() if isinstance(v, Tensor)}
    numbers = [n for n, v in leaves.items() if not isinstance(v, Tensor)]
    numbers += [f"s{i}" for i in range(len(s))]
    for i, value in enumerate(t):
        if is_host_scalar(value):
            numbers.append(f"t{i}")
        else:
            tensors[f"t{i}"] = value.dtype
    acc = accumulator_of(epilogue, (*leaves.values(), *t), out)
    return kernel_spec(epilogue, tensors, numbers, out, family, acc)


def forward_specs(
    anchor: Anchor,
    config: Mapping[str, Any],
    epilogue: Epilogue,
    operands: Mapping[str, Any],
    t: Sequence[Tensor],
    s: Sequence[float],
    c: torch.dtype,
    out: torch.dtype,
) -> list[KernelSpec]:
    """The kernels that the anchor's op launches; none if the library's c is the result.

    operands, t: only dtypes, ranks and devices matter, and for `families` the shape of a
    convolution's weight. c: its dtype.
    """
    loops = families(operands, config)
    z = anchor.z(operands, config)
    if len(loops) == 1 and not (z.steps or epilogue.steps) and c == out:
        return []
    cast = {n: c if n in anchor.cast else v.dtype for n, v in operands.items() if v is not None}
    like = {n: torch.empty(1, dtype=d, device="meta") for n, d in cast.items()}
    statistic = torch.empty(1, dtype=accumulation_dtype((c,)), device="meta")
    outputs = [torch.empty(1, dtype=c, device="meta"), statistic, statistic]
    known = {n: like.get(n) for n in anchor.operands}
    leaves = anchor.leaves(known, outputs[: len(anchor.outputs)], config)
    return [spec_of(epilogue.after(z), leaves, t, s, out, family) for family in loops]


def backward_of(
    epilogue: Epilogue, t: Sequence[Tensor], s: Sequence[float]
) -> tuple[Epilogue, list[Tensor], list[float]] | None:
    """The epilogue that computes dz from dy, and the tensors and numbers that it reads, renamed to
    t0… and s0…. None if dz depends on z.
    """
    slope = linear_backward(epilogue)
    if slope is None:
        return None
    values = {n: v for n, v in named(t, s).items() if n in slope.leaves}
    tensors, numbers = ([n for n in values if n[0] == letter] for letter in "ts")
    names = {n: f"{n[0]}{i}" for part in (tensors, numbers) for i, n in enumerate(part)}
    steps = (Step(p.op, tuple(a and names.get(a, a) for a in p.args), p.attrs) for p in slope.steps)
    return Epilogue(tuple(steps)), [values[n] for n in tensors], [values[n] for n in numbers]


def backward_spec(
    family: Family,
    epilogue: Epilogue,
    t: Sequence[Tensor],
    s: Sequence[float],
    dtype: torch.dtype,
) -> KernelSpec | None:
    """The kernels of a convolution's backward. dtype: of dy and the convolution.

    None if the epilogue's derivative depends on z, or is not one number per channel.
    """
    found = backward_of(epilogue, t, s)
    if found is None:
        return None
    slope, factors, numbers = found
    for v in factors:
        if not is_host_scalar(v) and not (_is_per_channel(v) and v.dtype != torch.float64):
            return None
    dy = torch.empty(1, dtype=dtype, device="meta")
    return spec_of(slope, {"z": dy}, factors, numbers, dtype, family)


def _is_per_channel(tensor: Tensor) -> bool:
    sizes = (1,) * (4 - tensor.ndim) + tuple(tensor.shape)
    return len(sizes) == 4 and sizes[0] == sizes[2] == sizes[3] == 1
