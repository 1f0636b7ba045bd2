"""What a fused program must compute, and by how much it may be off.

The oracle is the tail's own source, run by torch on z and the operands in the accumulation dtype,
with its autograd; what it casts explicitly is rounded there, and its result once at the end. z is
the anchor's own, run as the user wrote it; a fused BatchNorm has another formula with other
roundings, so there z is taken from that formula, which is held to F.batch_norm loosely (`value_z`).

On a CPU what is fused runs the same torch ops in the same order: then the result and the gradients
of the tail's operands are the oracle's to the bit. Elsewhere each operation may be off by some
roundings (`value_tail`).

Gradients of the anchor's operands are sums of products with dz, taken in any order: each of their
elements is compared with its own sum in float64 (`value_totals`). What an infinity, a NaN or a
rounding leaves open is a set of values for each element (`value_sets`): there is no tensor that is
not compared. `value_shares` counts the elements whose set is so wide that it says nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
import value_totals
from torch import Tensor
from value_programs import Program
from value_seen import Seen, is_plain, lost_signs, told, unfused_faults
from value_sets import Possible, same
from value_shares import Shares
from value_tail import (
    Wide,
    bounded,
    evaluated,
    in_other_layouts,
    left_range,
    met_zero,
    of_linear_tail,
)
from value_totals import convolution_totals, norm_totals, product_totals, spread_sum
from value_z import Z, z_of

from fx_fuser.graph.epilogue import accumulation_dtype

TAIL, ANCHOR = "gradients of the tail's operands", "gradients of the anchor's operands"


def _multiplies_first(p: Program, z: Tensor) -> bool:
    """Does the direct convolution's backward make dz, which multiplies a tail's factors first?"""
    return z.is_cuda and p.pattern.kind in ("conv2d", "conv2d_batchnorm")


def accumulation_of(p: Program, z: Tensor, operands: dict[str, Tensor], out: torch.dtype) -> Any:
    dtypes = [z.dtype, out, *(v.dtype for v in operands.values() if v.ndim > 0)]
    if re.search(r"double|float64", p.source.partition("def tail")[2].partition("\n\n\n")[0]):
        dtypes.append(torch.float64)
    return accumulation_dtype(dtypes)


def faults_of(
    p: Program,
    space: dict[str, Any],
    inputs: dict[str, Tensor],
    dy: Tensor | None,
    eager: Seen,
    fused: Seen,
    exact: bool,
    shares: Shares | None = None,
) -> str:
    """What is wrong with the values of a run, or nothing. exact: they are to agree to the bit."""
    if (fused.y.dtype, fused.y.shape) != (eager.y.dtype, eager.y.shape):
        return f"{fused.y.dtype} {tuple(fused.y.shape)}, eager {eager.y.dtype} {eager.y.shape}"
    if fused.grads.keys() != eager.grads.keys():
        return f"gradients of {sorted(fused.grads)}, eager of {sorted(eager.grads)}"
    shares = Shares() if shares is None else shares
    exact = exact and not p.folded and p.bias is None
    operands = {n: inputs[n] for n in p.operands}
    dy = dy if p.train and eager.grads else None
    acc = p.acc or accumulation_of(p, inputs["x"], operands, eager.y.dtype)
    z = z_of(p, space, inputs, acc)
    if z.fault:
        return z.fault
    faults = _exact_faults if exact else _bounded_faults
    fault, dz, of_bias = faults(p, space, z, operands, dy, acc, eager, fused, shares)
    if not fault and dz is not None:
        fault = _anchor_faults(p, inputs, dz, of_bias or dz, eager, fused, shares)
    norm = p.pattern.kind == "conv2d_batchnorm"
    if not fault and exact and not norm and is_plain(p, inputs):
        fault = unfused_faults(eager, fused, p.apart | p.varied)
    if not fault and exact:
        with torch.no_grad():
            later = space["after"](fused.y)
        if (bad := ~same(fused.after, later)).any():
            fault = told("what is made of the result", bad, fused.after, later, None)
    return fault


Found = tuple[str, Possible | None, Possible | None]  # the fault; dz; dz as biases sum it up


def _exact_faults(
    p: Program, space: Any, z: Z, operands: dict[str, Tensor], dy: Tensor | None,
    acc: torch.dtype, eager: Seen, fused: Seen, shares: Shares
) -> Found:  # fmt: skip
    mode = functools.partial(Wide, acc, apart=p.auto, part=p.part)
    ran = evaluated(space["tail"], z.value, operands, dy, mode())
    others = [*in_other_layouts(space["tail"], z.value, operands, dy, eager.y, mode)]
    if z.turned is not None:
        others.append(evaluated(space["tail"], z.turned, operands, dy, mode()))
    results = [each.y.to(eager.y.dtype).expand(eager.y.shape) for each in (ran, *others)]
    shares.add(p, "y", eager.y.numel())
    bad = _unlike_all(fused.y, results, eager.y)
    if bad.any():
        return told("the result", bad, fused.y, results[0], eager.y), None, None
    has_turned = z.turned is not None and bool(lost_signs(results[-1], results[0], eager.y).any())
    varied = {"y"} if _differ(results) or has_turned else set()
    for name in ran.grads:
        if name not in fused.grads:
            continue
        found, theirs = fused.grads[name], eager.grads[name]
        wanted = [each.grads[name].to(operands[name].dtype) for each in (ran, *others)]
        bad = _unlike_all(found, wanted, theirs if found.shape == eager.y.shape else None)
        if name in p.apart:
            bad &= ~_in_another_order(found, wanted[0], ran.terms[name])
        shares.add(p, TAIL, found.numel())
        if bad.any():
            return told(f"the gradient of {name}", bad, found, wanted[0], theirs), None, None
        varied |= {name} if _differ(wanted) else set()
    p.varied = frozenset(varied)
    if ran.dz is None:
        return "", None, None
    dz = Possible.exactly(ran.dz)
    for each in others:
        assert each.dz is not None
        dz = dz.joined(Possible.exactly(each.dz))
    return "", dz, None


def _differ(results: Sequence[Tensor]) -> bool:
    return not all(same(each, results[0]).all() for each in results)


def _unlike_all(found: Tensor, results: Sequence[Tensor], signs_as: Tensor | None) -> Tensor:
    """Where it is none of the oracle's results. signs_as: zeros have their sign where this has."""
    bad = torch.ones_like(found, dtype=torch.bool)
    for wanted in results:
        lost = lost_signs(found, wanted, signs_as) if signs_as is not None else False
        bad = bad & (~same(found, wanted) | lost)
    return bad


def _in_another_order(found: Tensor, wanted: Tensor, terms: Tensor) -> Tensor:
    """Where a gradient is off by no more than its terms' sum is, each rounded to its dtype."""
    off = (found.double() - wanted.double()).abs()
    # Of infinite terms anything would be within the bound, an infinity of the other sign, too.
    return off.isfinite() & (off <= 2 * torch.finfo(wanted.dtype).eps * terms)


def _bounded_faults(
    p: Program, space: Any, z: Z, operands: dict[str, Tensor], dy: Tensor | None,
    acc: torch.dtype, eager: Seen, fused: Seen, shares: Shares
) -> Found:  # fmt: skip
    mode = functools.partial(Wide, acc, apart=p.auto, part=p.part)
    oracle = bounded(space["tail"], z.value, z.others, operands, dy, eager.y.shape, mode, z.first)
    # Where an operand is spread by an operation, torch sums before it goes on: a sum that overflows
    # there is none of the finite terms that come of spreading first.
    plain = evaluated(space["tail"], z.value, operands, dy, mode())
    y = oracle.y.map(lambda t: t.expand(eager.y.shape))
    bad = ~y.accepts(fused.y)
    turned = torch.where(z.value == 0, -z.value, z.value)  # a zero of z may have either sign
    other = evaluated(space["tail"], turned, operands, None, mode()).y
    step = 64 * torch.finfo(acc).tiny * torch.finfo(acc).eps  # each operation is nudged by one
    certain = y.number & (y.reach <= step) & (plain.y.signbit() == other.signbit())
    bad |= certain & lost_signs(fused.y, plain.y.to(eager.y.dtype).expand(y.lo.shape), eager.y)
    shares.open(p, "y", "unstable", y.is_open())
    if bad.any():
        return told("the result", bad, fused.y, y.value, eager.y), None, None
    for name, grad in oracle.grads.items():
        if name not in fused.grads:
            continue
        total = spread_sum(grad, operands[name].shape, acc)
        bad = ~total.accepts(fused.grads[name])
        wanted = plain.grads[name].to(fused.grads[name].dtype)
        bad &= ~same(fused.grads[name], wanted)
        if name in p.apart:
            bad &= ~_in_another_order(fused.grads[name], wanted, plain.terms[name])
        shares.open(p, TAIL, "unstable", total.is_open())
        if bad.any():
            said = told(f"the gradient of {name}", bad, fused.grads[name], total.value,
                         eager.grads[name])  # fmt: skip
            return said, None, None
    if oracle.dz is None:
        return "", None, None
    assert plain.dz is not None
    dz = spread_sum(oracle.dz, z.value.shape, acc)
    dz = dz.joined(Possible.exactly(plain.dz), ~plain.dz.isfinite() | ~dz.number)
    if not _multiplies_first(p, z.value):
        return "", dz, None
    exact = of_linear_tail(space["tail"], z.value, operands, dy, plain.dz, p.auto, p.part)
    if exact is None:
        return "", dz, None
    # Either is right: what the product of all factors is, and what autograd's is, which left the
    # range or met a zero. In a bias's sum what is beyond the range is a number.
    wide = Possible.exactly(exact)
    dz = dz.joined(wide, left_range(exact, plain.dz) | met_zero(exact, plain.dz))
    beyond = exact.isfinite() & (exact.abs() > torch.finfo(acc).max)
    if not beyond.any():
        return "", dz, None
    pairs = zip(wide.parts(), dz.parts())
    return "", dz, Possible(*(torch.where(beyond, a, b) for a, b in pairs))


def _anchor_faults(
    p: Program, inputs: dict[str, Tensor], dz: Possible, of_bias: Possible, eager: Seen,
    fused: Seen, shares: Shares
) -> str:  # fmt: skip
    totals: Any = {
        "conv2d": convolution_totals,
        "conv2d_batchnorm": norm_totals,
    }.get(p.pattern.kind, product_totals)
    # Sums over x's dtype are taken in float32 at least, whatever the epilogue is computed in.
    sums = torch.float64 if inputs["x"].dtype == torch.float64 else torch.float32
    by_name = totals(p, inputs, dz, of_bias, sums)
    if value_totals.has_lost(p, inputs):
        wide = totals(p, inputs, dz, of_bias, sums, value_totals.TILES)
        shown = [n for n in ("x", "weight") if n in fused.grads]
        lost = [n for n in shown if not by_name[n].accepts(eager.grads[n]).all()]
        by_name |= {n: wide[n] for n in lost}  # by what eager itself is off
    for name, total in by_name.items():
        if name not in fused.grads:
            continue
        found, theirs = fused.grads[name], eager.grads[name]
        if p.pattern.kind.startswith("conv") and name in ("x", "weight"):
            total = _sums_of_halves(p, total, theirs)
        right = total.accepts(found)
        beyond = _beyond_the_reference(total, dz)
        overflowed = _eager_overflows(p, total, theirs, found) & ~right
        as_eager = same(found, theirs) & ~(right | beyond | overflowed)
        shares.open(p, ANCHOR, "unstable", total.is_open() & ~beyond)
        shares.also_open(p, ANCHOR, "beyond the reference", beyond)
        shares.note(p, ANCHOR, "not finite, as eager, where float64 is", overflowed)
        shares.note(p, ANCHOR, "as eager, which is not as float64", as_eager)
        if (bad := ~(right | as_eager | beyond | overflowed)).any():
            return told(f"the gradient of {name}", bad, found, total.value, theirs)
    return ""


def _beyond_the_reference(total: Possible, dz: Possible) -> Tensor:
    """Where float64 sums are not finite, or nearly so, and dz has numbers beyond float32's."""
    wide = (dz.reach > 1e100).any()
    return wide & (~total.number | (total.size > 1e290))


def _eager_overflows(p: Program, total: Possible, theirs: Tensor, found: Tensor) -> Tensor:
    """Where eager's is not finite and the sum is a number, of what came through a BatchNorm:
    eager's own intermediates left the range. Of both signs, another order may leave an infinity of
    either; in training, where the batch's sums are taken off, any order may leave another."""
    most = torch.finfo(theirs.dtype).max
    inside = total.number & (total.lo >= -most) & (total.hi <= most)
    either = theirs.isnan() & ~found.isfinite()
    if p.training_norm:
        either = ~theirs.isfinite() & ~found.isfinite()
    return inside & either & (p.pattern.kind == "conv2d_batchnorm")


def _sums_of_halves(p: Program, total: Possible, theirs: Tensor) -> Possible:
    """On some CPUs oneDNN takes the sums of fp16 convolutions in fp16: where eager's own are."""
    if theirs.dtype != torch.float16 or theirs.is_cuda:
        return total
    # Ahead of a BatchNorm eager's dz has more roundings than its sums.
    shown = p.pattern.kind == "conv2d_batchnorm" and library_sums_halves_in_halves()
    if not shown and total.accepts(theirs).all():
        return total
    ends = torch.finfo(torch.float16)
    wider = total.widened(64 * ends.eps * total.size)
    over = total.size > 0.99 * ends.max  # a partial sum may overflow
    flags = (total.pinf | over, total.ninf | over, total.nan | over)
    return Possible(wider.lo, wider.hi, *flags, total.size)


@functools.cache
def library_sums_halves_in_halves() -> bool:
    generator = torch.Generator().manual_seed(0)
    dz = torch.randn(2, 6, 5, 5, generator=generator).half()
    weight = torch.randn(6, 2, 3, 3, generator=generator).half()
    made = torch.nn.grad.conv2d_input((2, 2, 5, 5), weight, dz, 1, 1)
    exact = torch.nn.grad.conv2d_input((2, 2, 5, 5), weight.double(), dz.double(), 1, 1)
    return not torch.equal(made, exact.half())
