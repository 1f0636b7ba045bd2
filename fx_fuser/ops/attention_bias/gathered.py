"""Gathers along rows, as graphs call them: one composite op, and three functions of
`fx_fuser::run`.

    fx_fuser::gather_rows(x, index, transposed)[..., i, j] = x[..., i, index[i, j]]

x is [..., rows, places] of 16 bits, the index [rows, columns] of int64, which all batches share.
`transposed`: the last two dimensions of the result are exchanged, in memory too.

torch's gradient of a gather adds to memory that others add to, in 16 bits. Here each place adds up
what has been read from it, in a fixed order, in fp32. That order is a function of the index alone:
where layers share an index, AOTAutograd merges its calls.

On CUDA kernels_cu/host/gather_rows.h runs the kernels. What these do not take runs by torch's
operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fx_fuser.kernels.attention import gathered
from fx_fuser.ops import run
from fx_fuser.ops.once import differentiable_once

FORWARD, ORDER, BACKWARD = "gather_rows", "gather_rows_order", "gather_rows_backward"
_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")


def _forward_like(x: Tensor, index: Tensor, kernel: str, transposed: bool) -> list[Tensor]:
    rows, columns = index.shape
    return [x.new_empty(x.shape[0], *((columns, rows) if transposed else (rows, columns)))]


def _forward(x: Tensor, index: Tensor, kernel: str, transposed: bool) -> list[Tensor]:
    made = x.gather(-1, index.expand(x.shape[0], -1, -1))
    return [made.mT.contiguous() if transposed else made]


def _order_like(index: Tensor, kernel: str, places: int) -> list[Tensor]:
    rows, columns = index.shape
    sizes = (rows, columns), (rows, places + 1)
    return [index.new_empty(size, dtype=torch.int16) for size in sizes]


def _order(index: Tensor, kernel: str, places: int) -> list[Tensor]:
    """Of each row the columns in the order of the places that they read, and where those of each
    place begin. Numbers of 16 bits without a sign."""
    found, order = index.sort(dim=-1, stable=True)
    each = torch.arange(places + 1, device=index.device).expand(index.shape[0], -1).contiguous()
    starts = torch.searchsorted(found.contiguous(), each)
    return [order.to(torch.int16), starts.to(torch.int16)]


def _backward_like(
    d_out: Tensor, index: Tensor, order: Tensor, starts: Tensor, kernel: str, places: int
) -> list[Tensor]:
    return [d_out.new_empty(*d_out.shape[:2], places)]


def _backward(
    d_out: Tensor, index: Tensor, order: Tensor, starts: Tensor, kernel: str, places: int
) -> list[Tensor]:
    sums = d_out.new_zeros(*d_out.shape[:2], places, dtype=torch.float32)
    whole = index.expand(d_out.shape[0], -1, -1)
    return [sums.scatter_add(-1, whole, d_out.float()).to(d_out.dtype)]


run.define(FORWARD, _forward, _forward_like)
run.define(ORDER, _order, _order_like)
run.define(BACKWARD, _backward, _backward_like)


def turning(d_out: Tensor, kernel: str) -> run.Arguments:
    """The call that exchanges rows and columns of a transposed result's gradient, by the forward's
    kernel: its index changes nothing."""
    same = torch.arange(d_out.shape[2], device=d_out.device).expand(d_out.shape[1], -1)
    return run.arguments(FORWARD, (d_out, same, kernel, True))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.numbers = x.shape[2], transposed
        return _called(x, index, transposed)

    @staticmethod
    @differentiable_once(lambda _: FORWARD)
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        (index,) = ctx.saved_tensors
        places, transposed = ctx.numbers
        d_out = d_out.contiguous()
        kernel = gathered.spec_of(d_out.dtype).name
        if transposed:
            d_out = run.ONE(*turning(d_out, kernel))
        order = run.MANY(*run.arguments(ORDER, (index, kernel, places)))
        given = d_out, index, *order, kernel, places
        made: Tensor = run.ONE(*run.arguments(BACKWARD, given))
        return made, None, None


def _called(x: Tensor, index: Tensor, transposed: bool) -> Tensor:
    kernel = gathered.spec_of(x.dtype).name
    made: Tensor = run.ONE(*run.arguments(FORWARD, (x, index, kernel, transposed)))
    return made


def _composite(x: Tensor, index: Tensor, transposed: bool = False) -> Tensor:
    batches = x.shape[:-2]
    x = x.reshape(-1, *x.shape[-2:])
    if torch.is_grad_enabled() and x.requires_grad:
        made: Tensor = _Gather.apply(x, index, transposed)
    else:
        made = _called(x, index, transposed)
    return made.reshape(*batches, *made.shape[-2:])


# AOTAutograd sees through it.
_LIBRARY.define("gather_rows(Tensor x, Tensor index, bool transposed=False) -> Tensor")
_LIBRARY.impl("gather_rows", _composite, "CompositeImplicitAutograd")
GATHER_ROWS = torch.ops.fx_fuser.gather_rows.default

run.define_loader("load_gather_rows", "a gather", lambda: gathered.offered())
