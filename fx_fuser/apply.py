"""The epilogue, applied to an anchor's products: as the text of a CUDA kernel, or in torch ops.

Values meet names here. The *leaves* of a fused expression are what the anchor's z is made of
(`Anchor.leaves`) and the wildcards that are not z; each is a tensor or a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fx_fuser.anchors import ANCHORS, Anchor
from fx_fuser.anchors.conv2d import BACKWARD
from fx_fuser.epilogue import (
    POINTWISE,
    Kernel,
    Z,
    accumulation_dtype,
    cuda_source,
    evaluate,
    linear_part,
    substitute,
)
from fx_fuser.epilogue import leaves as leaf_names
from fx_fuser.pattern import Pattern
from fx_fuser.spell import Operand

# (pattern, kinds, dtype, factors) → text; a factor: its name, and its dtype if read from memory.
_derivatives: dict[tuple[Any, ...], str] = {}


def wildcard_values(
    pattern: Pattern, t: Sequence[Tensor | None], s: Sequence[float], kinds: str
) -> dict[str, Any]:
    """name → `Z`, tensor or number, of what is read."""
    return {
        name: Z if kind == "z" else tensor if kind == "t" else number
        for name, kind, tensor, number in zip(pattern.wildcards, kinds, t, s)
        if kind != "-"
    }


def epilogue_of(pattern: Pattern, kinds: str) -> Operand:
    """The pattern's epilogue with the wildcards that are z replaced by it."""
    return substitute(
        pattern.epilogue, {n: Z for n, kind in zip(pattern.wildcards, kinds) if kind == "z"}
    )


def wide_dtypes(values: Iterable[Any]) -> list[torch.dtype]:
    """Of the tensors that count in type promotion: a 0-d float64 scale does not widen float32."""
    return [v.dtype for v in values if isinstance(v, Tensor) and v.ndim > 0]


def in_torch(
    pattern: Pattern, kinds: str, z: Any, wildcards: Mapping[str, Any], dtype: torch.dtype
) -> Tensor:
    """The epilogue in plain torch ops: accumulation dtype inside, one rounding at the end."""
    acc = accumulation_dtype([*wide_dtypes((z, *wildcards.values())), dtype])
    values = {n: v.to(acc) if isinstance(v, Tensor) else v for n, v in wildcards.items()}
    return evaluate(epilogue_of(pattern, kinds), {**values, "z": z.to(acc)}).to(dtype)


def derivative_in_torch(
    pattern: Pattern, kinds: str, dy: Tensor, wildcards: Mapping[str, Any]
) -> Tensor:
    """dy times the derivative of an epilogue that is linear in z, in the accumulation dtype."""
    acc = accumulation_dtype([*wide_dtypes(wildcards.values()), dy.dtype])
    values = {n: v.to(acc) if isinstance(v, Tensor) else v for n, v in wildcards.items()}
    expr = linear_part(epilogue_of(pattern, kinds))
    dz: Tensor = evaluate(expr, {**values, "z": dy.to(acc)})
    return dz.expand(dy.shape)


def z_in_torch(
    anchor: Anchor,
    operands: Mapping[str, Any],
    products: Sequence[Tensor],
    config: Mapping[str, Any],
    acc: torch.dtype,
) -> Tensor:
    """z from the products, in plain torch ops, in the accumulation dtype `acc`."""
    leaves = anchor.leaves(operands, products, config)
    values = {n: v.to(acc) if isinstance(v, Tensor) else v for n, v in leaves.items()}
    return evaluate(anchor.z(operands, config), values)


def finish(
    pattern: Pattern,
    kinds: str,
    anchor: Anchor,
    operands: Mapping[str, Any],
    products: Sequence[Tensor],
    config: Mapping[str, Any],
    wildcards: Mapping[str, Any],
    out: Tensor,
) -> None:
    """out ← epilogue(z(products)), on a CPU; on CUDA it is kernels_cu/shim_pointwise.h."""
    acc = accumulation_dtype([*wide_dtypes((*products, *wildcards.values())), out.dtype])
    value = z_in_torch(anchor, operands, products, config, acc)
    out.copy_(in_torch(pattern, kinds, value, wildcards, out.dtype))


def derivative_source(
    pattern: Pattern, kinds: str, wildcards: Mapping[str, Any], dtype: torch.dtype
) -> str | None:
    """The text of the kernels that make a convolution's gradients from dy.

    dtype: of dy and the convolution.

    None where the epilogue's derivative depends on z, or is not a number a channel.
    """
    expr = linear_part(epilogue_of(pattern, kinds))
    if expr is None:
        return None
    read = read_by_derivative(pattern, kinds)
    factors = {n: v for n, v in wildcards.items() if n in read}
    tensors = {n: v for n, v in factors.items() if not _travels_as_number(v)}
    if not all(_is_per_channel(v) and v.dtype != torch.float64 for v in tensors.values()):
        return None
    leaves = {"z": torch.empty(1, dtype=dtype, device="meta"), **factors}
    dtypes = tuple((n, v.dtype if n in tensors else None) for n, v in factors.items())
    key = (pattern.name, kinds, dtype, dtypes)
    if key not in _derivatives:
        title = f"the backward of pattern {pattern.name}"
        _derivatives[key] = _text_of(expr, leaves, dtype, title, BACKWARD)
    return _derivatives[key]


def read_by_derivative(pattern: Pattern, kinds: str) -> set[str]:
    """Names of the wildcards that a derivative depends on, of an epilogue that is linear in z."""
    return set(leaf_names(linear_part(epilogue_of(pattern, kinds)))) - {Z.name}


def _is_per_channel(tensor: Tensor) -> bool:
    sizes = (1,) * (4 - tensor.ndim) + tuple(tensor.shape)
    return len(sizes) == 4 and sizes[0] == sizes[2] == sizes[3] == 1


def _travels_as_number(value: Any) -> bool:
    """Numbers, and 0-d CPU tensors beside CUDA ones."""
    return not isinstance(value, Tensor) or (value.ndim == 0 and value.device.type == "cpu")


def _text(
    pattern: Pattern,
    kinds: str,
    z: Operand,
    leaves: Mapping[str, Any],
    out: torch.dtype,
    kernel: Kernel = POINTWISE,
) -> str:
    expr = substitute(epilogue_of(pattern, kinds), {"z": z})
    return _text_of(expr, leaves, out, f"pattern {pattern.name}", kernel)


def _text_of(
    expr: Operand, leaves: Mapping[str, Any], out: torch.dtype, title: str, kernel: Kernel
) -> str:
    tensors = {n: v.dtype for n, v in leaves.items() if not _travels_as_number(v)}
    scalars = [n for n, v in leaves.items() if _travels_as_number(v)]
    return cuda_source(expr, tensors, scalars, out, title, kernel)


def kernel_source(
    pattern: Pattern,
    kinds: str,
    operands: Mapping[str, Any],
    t: Sequence[Tensor | None],
    c: torch.dtype,
    out: torch.dtype,
    training: bool = False,
    kernel: Kernel = POINTWISE,
) -> str:
    """`cuda_text` for tensors of these dtypes, ranks and devices; c: the dtype of the product."""
    cast = ANCHORS[pattern.kind].cast
    dtypes = {n: c if n in cast else v.dtype for n, v in operands.items() if v is not None}
    passed = ""
    for name, kind, tensor in zip(pattern.wildcards, kinds, t):
        if tensor is not None:
            dtypes[name] = tensor.dtype
        passed += "s" if tensor is not None and _travels_as_number(tensor) else kind
    return cuda_text(pattern, passed, {**dtypes, "c": c, "out": out}, training, kernel)


def cuda_text(
    pattern: Pattern,
    kinds: str,
    dtypes: Mapping[str, torch.dtype],
    training: bool = False,
    kernel: Kernel = POINTWISE,
) -> str:
    """The kernel that the pattern's op runs on CUDA: generated text, for reading and building.

    kinds: a letter for each wildcard, as in the op's arguments (`fx_fuser.ops`).
    dtypes: name → dtype of each operand of the anchor that is present and of each tensor wildcard;
    "c" is the product's (default x's), "out" the result's (default c's).
    training: of the BatchNorm, where the anchor has one.
    kernel: which of `Anchor.kernels`.
    """
    anchor = ANCHORS[pattern.kind]
    c = dtypes.get("c", dtypes["x"])
    config = {"training": training, "eps": 1e-5}  # z does not depend on the rest, nor on eps' value
    like = {n: torch.empty(1, dtype=d, device="meta") for n, d in dtypes.items()}
    operands = {n: like.get(n) for n in anchor.operands}
    statistic = torch.empty(1, dtype=accumulation_dtype((c,)), device="meta")
    products = [torch.empty(1, dtype=c, device="meta"), statistic, statistic]
    leaves = anchor.leaves(operands, products[: len(anchor.products)], config)
    for name, kind in zip(pattern.wildcards, kinds):
        if kind != "z":
            leaves[name] = 0.0 if kind == "s" else like[name]
    return _text(pattern, kinds, anchor.z(operands, config), leaves, dtypes.get("out", c), kernel)
