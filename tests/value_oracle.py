"""What a fused program must compute, and by how much it may be off.

The oracle is the tail's own source, run by torch on z and the operands in the accumulation dtype,
with its autograd; what it casts explicitly is rounded there, and its result once at the end. z is
the anchor's own, run as the user wrote it; a fused BatchNorm has another formula with other
roundings, so there z is taken from that formula, which is held to F.batch_norm loosely.

On a CPU what is fused runs the same torch ops in the same order: then the result and the gradients
of the tail's operands are the oracle's to the bit, but for the signs of zeros. Elsewhere each
operation may be off by some roundings. By how much that shows is found by trying: the tail is run
again with one operation's result, and the gradient through it, moved by that much. Where that makes
an infinity or NaN of a number, or the other way round, either is right.

Gradients of the anchor's operands are sums of products with dz, taken in any order: they are
compared with those sums in float64, within the roundings of all partial sums.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from value_programs import Program
from value_seen import Seen, is_plain, told, unfused_faults
from value_totals import convolution_totals, norm_totals, product_totals, same, spread_sum

from fx_fuser.anchors import ANCHORS
from fx_fuser.graph.epilogue import accumulation_dtype
from fx_fuser.ops import apply

_ROUNDINGS = {  # of a CUDA function, at most; arithmetic is exact but for a contraction
    **dict.fromkeys(("sigmoid", "silu", "tanh", "exp", "log", "erf", "rsqrt", "expit"), 6),
    **dict.fromkeys(("exp2", "expm1", "log1p", "log2", "sin", "cos", "erfc"), 6),
    **dict.fromkeys(("gelu", "softplus", "pow", "__pow__", "__rpow__", "square"), 10),
    **dict.fromkeys(("mish", "elu", "log_sigmoid", "hardswish", "hardsigmoid"), 10),
}
# Functions whose derivative is a difference: off by roundings of 1, not of its own size.
_SATURATING = ("sigmoid", "silu", "tanh", "erf", "expit", "gelu", "softplus",
               "mish", "log_sigmoid", "hardswish")  # fmt: skip
# torch on CUDA multiplies by 1.0f / 6.0f, in float64 too (aten ActivationHardswishKernel.cu): there
# the oracle is the one that is off.
_OF_A_FLOAT_SIXTH = ("hardswish", "hardsigmoid")
_SUMS = ("add", "sub", "rsub", "addcmul", "addcdiv", "lerp", "add_", "subtract")


@dataclass
class Oracle:
    """y, dz and the operands' gradients in the accumulation dtype, each with what it may be off by
    beside its last rounding; infinite where it may be anything."""

    y: Tensor
    dz: Tensor | None
    grads: dict[str, Tensor]
    slack: dict[str, Tensor] = field(default_factory=dict)


# ---- the tail in the accumulation dtype ----------------------------------------------------------


class _Nudged(torch.autograd.Function):
    """A result and the gradient through it, moved; x is what it was made of."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, x: Tensor, delta: float, saturating: bool) -> Tensor:
        ctx.delta, ctx.saturating, ctx.shape = delta, saturating, x.shape
        return made + made * delta + delta * torch.finfo(made.dtype).tiny  # and subnormal steps

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (g,) = grads
        extra = (g * ctx.delta).sum_to_size(ctx.shape) if ctx.saturating else None
        return g + g * ctx.delta, extra, None, None


class _Wide(TorchFunctionMode):
    """Every floating result in the accumulation dtype; the result of operation `at` moved.

    apart: but for what is made of operands alone, which no grown tail takes in.
    """

    def __init__(
        self, acc: torch.dtype, at: int = -1, sign: int = 0, *, apart: bool = False
    ) -> None:
        super().__init__()
        self.acc, self.at, self.sign, self.count = acc, at, sign, 0
        self.apart, self.of_z = apart, dict[int, Tensor]()
        self.widened: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.terms: dict[int, Tensor] = {}  # of an operand's gradient, without signs

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.apart:
            if not any(id(t) in self.of_z for t in tree_leaves((args, kwargs))):
                return func(*tree_map_only(Tensor, self._read, args), **kwargs)
            args, kwargs = tree_map_only(Tensor, self._widened, (args, kwargs))
        made = func(*args, **kwargs)
        if not isinstance(made, Tensor) or not made.is_floating_point():
            return made
        made = made.to(self.acc)
        if self.count == self.at:
            made = self._moved(made, func.__name__, args)
        self.count += 1
        self.of_z[id(made)] = made
        return made

    def _widened(self, tensor: Tensor) -> Tensor:
        """One for all readers, so that its gradients add up before they are rounded."""
        if id(tensor) in self.of_z or not tensor.is_floating_point():
            return tensor
        known = self.widened.get((id(tensor), tensor._version))
        if known is None:
            known = tensor, self._read(tensor).to(self.acc)
            self.widened[id(tensor), tensor._version] = known
        return known[1]

    def _read(self, tensor: Tensor) -> Tensor:
        """One reader's own, where an operand has several, and what it adds to the gradient."""
        if id(tensor) not in self.terms:
            return tensor
        own = tensor.view_as(tensor)

        def add(grad: Tensor) -> None:
            self.terms[id(tensor)] += grad.double().abs()

        if own.requires_grad:
            own.register_hook(add)
        return own

    def _moved(self, made: Tensor, name: str, args: Sequence[Any]) -> Tensor:
        delta = self.sign * _ROUNDINGS.get(name, 1) * torch.finfo(self.acc).eps
        if made.is_cuda and name in _OF_A_FLOAT_SIXTH:
            delta = self.sign * max(abs(delta), torch.finfo(torch.float32).eps / 2)
        x = next(a for a in args if isinstance(a, Tensor) and a.is_floating_point())
        moved: Tensor = _Nudged.apply(made, x, delta, name in _SATURATING)
        if name == "gelu":
            moved = moved + (delta * x).detach()
        if name in _SUMS and len(args) > 1:  # with a factor it may be an fma
            other = (made - x).detach()
            moved = moved + torch.where(other.isfinite(), delta * other, 0.0)
        return moved


def _evaluated(
    tail: Callable[..., Tensor],
    z: Tensor,
    operands: dict[str, Tensor],
    dy: Tensor | None,
    mode: _Wide,
) -> Oracle:
    z = z.detach().to(mode.acc).requires_grad_(dy is not None)
    mode.of_z[id(z)] = z
    own = {n: v.detach() for n, v in operands.items()}
    if mode.apart:
        own = {n: v.clone() if v.is_floating_point() else v for n, v in own.items()}
    else:
        own = {n: v.to(mode.acc) if v.is_floating_point() else v for n, v in own.items()}
    wanted = [n for n, v in operands.items() if v.requires_grad and dy is not None]
    for name in wanted:
        own[name].requires_grad_()
        if mode.apart:
            mode.terms[id(own[name])] = torch.zeros_like(own[name], dtype=torch.float64)
    with torch.set_grad_enabled(dy is not None), mode:
        y = tail(z, *own.values())
    if dy is None:
        return Oracle(y, None, {})
    leaves = [z, *(own[n] for n in wanted)]
    dz, *grads = torch.autograd.grad(y, leaves, dy.to(mode.acc), materialize_grads=True)
    terms = {n: mode.terms[id(own[n])] for n in wanted if mode.apart}
    return Oracle(y.detach(), dz, dict(zip(wanted, grads)), terms)


def _moves(exact: Tensor, moved: Tensor) -> Tensor:
    """How far; infinite where one is an infinity or NaN and the other is not, or another."""
    far = (moved.double() - exact.double()).abs()
    far = torch.where(exact.isfinite() & moved.isfinite(), far, torch.inf)
    return torch.where(same(exact, moved), 0.0, far)


def _bounded(
    tail: Callable[..., Tensor],
    z: Tensor,
    noise: Tensor | None,
    operands: dict[str, Tensor],
    dy: Tensor | None,
    acc: torch.dtype,
    shape: torch.Size,
    apart: bool,
) -> Oracle:
    """With slack; operands are spread over the result first, so that what is summed is seen.

    Not where a column is spread to a larger result: some operations then come before that.
    """
    z, spread = z.to(acc), dict(operands)
    for name, v in operands.items() if z.shape == shape else ():
        if v.ndim == 0 and not v.requires_grad:
            continue  # with a dimension its dtype would count in promotions
        wide = v.detach().to(z.device).expand(shape)
        spread[name] = wide.requires_grad_(v.requires_grad) if v.requires_grad else wide
    wide_mode = functools.partial(_Wide, acc, apart=apart)
    mode = wide_mode()
    found = _evaluated(tail, z, spread, dy, mode)
    parts = {"y": found.y, "dz": found.dz, **found.grads}
    slack = {n: torch.zeros_like(v, dtype=torch.float64) for n, v in parts.items() if v is not None}
    moved = [
        _evaluated(tail, z, spread, dy, wide_mode(at, sign))
        for at in range(mode.count)
        for sign in (1, -1)
    ]
    pairs = list(zip(moved[::2], moved[1::2]))
    turned = torch.where(z == 0, -z, z)  # signs of zeros need not agree
    pairs.append((_evaluated(tail, turned, spread, dy, wide_mode()),) * 2)
    if noise is not None:
        pairs.append(
            tuple(  # type: ignore[arg-type]
                _evaluated(tail, z.to(acc) + s * noise, spread, dy, wide_mode()) for s in (1, -1)
            )
        )
    for up, down in pairs:
        for name in slack:
            values = [{"y": o.y, "dz": o.dz, **o.grads}[name] for o in (up, down)]
            slack[name] += torch.maximum(*(_moves(parts[name], v) for v in values))  # type: ignore[arg-type]
    _excuse(slack, noise)
    found.slack = slack
    return found


def _excuse(slack: dict[str, Tensor], noise: Tensor | None) -> None:
    """Anything is right where z may overflow (`_norm_z`), and in sums that such an element is in.

    Not on a CPU, where torch's formula is ours.
    """
    if noise is None or not noise.is_cuda or not noise.isinf().any():
        return
    for of_one in slack.values():
        if torch.broadcast_shapes(noise.shape, of_one.shape) == of_one.shape:
            of_one.masked_fill_(noise.isinf(), torch.inf)
        else:
            of_one.fill_(torch.inf)


def _multiplies_first(p: Program, z: Tensor) -> bool:
    """Does the direct convolution's backward make dz, which multiplies a tail's factors first?"""
    return z.is_cuda and p.pattern.kind in ("conv2d", "conv2d_batchnorm")


def _of_linear_tail(
    tail: Callable[..., Tensor], z: Tensor, operands: dict[str, Tensor], dy: Tensor | None,
    dz: Tensor, apart: bool
) -> Tensor | None:  # fmt: skip
    """dz in float64, of a tail that is linear in z; of others None."""

    def of(z: Tensor, acc: torch.dtype) -> Tensor:
        found = _evaluated(tail, z, operands, dy, _Wide(acc, apart=apart)).dz
        assert found is not None
        return found

    is_linear = same(of(z, dz.dtype), of(1 - z, dz.dtype)).all()
    return of(z, torch.float64) if is_linear else None


def left_range(exact: Tensor | None, dz: Tensor) -> Tensor:
    """Where factors one after the other leave dz's range, and their product times dy does not."""
    if exact is None:
        return torch.zeros_like(dz, dtype=torch.bool)
    ends = torch.finfo(dz.dtype)
    held = (exact.abs() >= ends.tiny) & (exact.abs() <= ends.max)
    return held & ~((dz.abs() >= ends.tiny) & (dz.abs() <= ends.max))


def met_zero(exact: Tensor | None, dz: Tensor) -> Tensor:
    """Where dz is 0, and autograd has NaN of it: an infinity met a factor of 0."""
    if exact is None:
        return torch.zeros_like(dz, dtype=torch.bool)
    return (exact == 0) & ~dz.isfinite()


# ---- comparisons -------------------------------------------------------------------------------


def _rounded_bad(found: Tensor, wide: Tensor, slack: Tensor) -> Tensor:
    """Where a value is off by more than the slack and one rounding of its dtype."""
    lower, upper = (wide.double() + s * slack for s in (-1, 1))
    ends = torch.finfo(found.dtype)
    room = 0.51 * ends.eps * wide.double().abs() + ends.tiny * ends.eps
    right = same(found, wide.to(found.dtype)) | slack.isinf()
    for bound in (lower, upper):  # also where it rounds to an infinity
        right |= same(found, bound.to(wide.dtype).to(found.dtype))
    near = (found.double() - wide.double()).abs() <= slack + room
    return ~(right | (near & found.isfinite()))


# ---- z -----------------------------------------------------------------------------------------


def _norm_z(p: Program, inputs: dict[str, Tensor], acc: torch.dtype) -> tuple[Tensor, Tensor]:
    """z by the anchor's formula, and what other roundings of it may change.

    Infinite where gamma (c - mean) may overflow: torch's CUDA kernel makes that product, ours the
    scale gamma / sqrt(var + eps) and then one fma. Both have subnormal numbers' roundings.
    """
    anchor = ANCHORS["conv2d_batchnorm"]
    operands = {n: inputs[n].detach() if n in inputs else None for n in anchor.operands}
    stride, padding = p.geometry
    config = {"stride": [stride] * 2, "padding": [padding] * 4, "dilation": [1, 1], "groups": 1,
              "tf32": False, "training": p.training_norm, "eps": 1e-5}  # fmt: skip
    products = anchor.forward(operands, config)
    z = apply.z_in_torch(anchor, operands, products, config, acc)
    leaves = {n: v for n, v in anchor.leaves(operands, products, config).items() if n != "eps"}
    wide = {n: v.to(acc) for n, v in leaves.items() if isinstance(v, Tensor)}
    rstd = (wide["var"] + 1e-5).rsqrt()
    reach = (wide["c"].abs() + wide["mean"].abs() + wide.get("bias", rstd * 0).abs()) * rstd
    if p.training_norm:  # c's mean may be zero, and off by roundings of c
        reach = reach + wide["c"].abs().mean((0, 2, 3), True) * rstd
    size = reach * wide["gamma"].abs() + torch.where(z.isinf(), 0, z.abs())
    subnormal = 1.5e-45 * (1 + reach / rstd)
    return z, 8 * torch.finfo(torch.float32).eps * size + subnormal


def _z(p: Program, space: dict[str, Any], inputs: dict[str, Tensor]) -> Tensor:
    of_anchor = [v for n, v in inputs.items() if n not in p.operands]
    with torch.no_grad():
        if p.autocast:
            with torch.autocast(inputs["x"].device.type, torch.bfloat16):
                return space["anchor"](*of_anchor)
        if p.pattern.kind == "conv2d":  # oneDNN makes zeros of subnormal biases in 16 bits
            c = F.conv2d(inputs["x"], inputs["weight"], None, *p.geometry)
            acc = accumulation_dtype((c.dtype,))
            return c.to(acc) + inputs["bias"].to(acc).view(-1, 1, 1)
        return space["anchor"](*(v.clone() for v in of_anchor))


# ---- all of it -----------------------------------------------------------------------------------


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
) -> str:
    """What is wrong with the values of a run, or nothing. exact: they are to agree to the bit."""
    if (fused.y.dtype, fused.y.shape) != (eager.y.dtype, eager.y.shape):
        return f"{fused.y.dtype} {tuple(fused.y.shape)}, eager {eager.y.dtype} {eager.y.shape}"
    if fused.grads.keys() != eager.grads.keys():
        return f"gradients of {sorted(fused.grads)}, eager of {sorted(eager.grads)}"
    operands = {n: inputs[n] for n in p.operands}
    dy = dy if p.train and eager.grads else None
    z = _z(p, space, inputs)
    acc = p.acc or accumulation_of(p, z, operands, eager.y.dtype)
    norm, noise = p.pattern.kind == "conv2d_batchnorm", None
    if norm:
        theirs = z
        z, noise = _norm_z(p, inputs, acc)
        # In 16 bits torch's own has more roundings.
        room = noise.double() * max(1.0, torch.finfo(theirs.dtype).eps / torch.finfo(acc).eps / 4)
        off = ~((theirs.double() - z.double()).abs() <= room + 1e-45)
        if (bad := off & ~same(theirs, z.to(theirs.dtype)) & (noise.abs() < 1e30)).any():
            return told("z of the BatchNorm", bad, z, theirs, theirs)
    faults = _exact_faults if exact else _bounded_faults
    fault, dz, slack = faults(p, space, z, noise, operands, dy, acc, eager, fused)
    if not fault and dz is not None:
        fault = _anchor_faults(p, inputs, dz, slack, acc, eager, fused)
    if not fault and exact and not norm and is_plain(p, inputs):
        fault = unfused_faults(eager, fused, p.apart)
    if not fault and exact:
        with torch.no_grad():
            later = space["after"](fused.y)
        bad = ~same(fused.after, later)
        fault = (
            told("what is made of the result", bad, fused.after, later, None) if bad.any() else ""
        )
    return fault


def _exact_faults(
    p: Program, space: Any, z: Tensor, noise: Any, operands: dict[str, Tensor], dy: Tensor | None,
    acc: torch.dtype, eager: Seen, fused: Seen
) -> tuple[str, Tensor | None, Tensor | None]:  # fmt: skip
    oracle = _evaluated(space["tail"], z, operands, dy, _Wide(acc, apart=p.auto))
    y = oracle.y.to(eager.y.dtype).expand(eager.y.shape)
    parts = {"y": y, "dz": oracle.dz, **oracle.grads}
    slack = {n: torch.zeros_like(v, dtype=torch.float64) for n, v in parts.items() if v is not None}
    _excuse(slack, noise)
    if (bad := ~same(fused.y, y) & slack["y"].isfinite()).any():
        return told("the result", bad, fused.y, y, eager.y), None, None
    for name, grad in oracle.grads.items():
        if name not in fused.grads:
            continue
        wanted = grad.to(operands[name].dtype)
        bad = ~same(fused.grads[name], wanted) & slack[name].isfinite()
        if name in p.apart:
            bad &= ~_in_another_order(fused.grads[name], wanted, oracle.slack[name])
        if bad.any():
            what = f"the gradient of {name}"
            return told(what, bad, fused.grads[name], wanted, eager.grads[name]), None, None
    if oracle.dz is None:
        return "", None, None
    return "", oracle.dz, slack["dz"]


def _in_another_order(found: Tensor, wanted: Tensor, terms: Tensor) -> Tensor:
    """Where a gradient is off by no more than its terms' sum is, each rounded to its dtype."""
    off = (found.double() - wanted.double()).abs()
    # Of infinite terms anything would be within the bound, an infinity of the other sign, too.
    return off.isfinite() & (off <= 2 * torch.finfo(wanted.dtype).eps * terms)


def _bounded_faults(
    p: Program, space: Any, z: Tensor, noise: Any, operands: dict[str, Tensor], dy: Tensor | None,
    acc: torch.dtype, eager: Seen, fused: Seen
) -> tuple[str, Tensor | None, Tensor | None]:  # fmt: skip
    shape = eager.y.shape
    oracle = _bounded(space["tail"], z, noise, operands, dy, acc, shape, p.auto)
    # Where an operand is spread by an operation, torch sums before it goes on: a sum that overflows
    # there is none of the finite terms that come of spreading first.
    plain = _evaluated(space["tail"], z, operands, dy, _Wide(acc, apart=p.auto))
    if (bad := _rounded_bad(fused.y, oracle.y, oracle.slack["y"])).any():
        return told("the result", bad, fused.y, oracle.y, eager.y), None, None
    for name, grad in oracle.grads.items():
        if name not in fused.grads:
            continue
        total = spread_sum(grad, oracle.slack[name], operands[name].shape)
        bad = total.bad(fused.grads[name], acc)
        wanted = plain.grads[name].to(fused.grads[name].dtype)
        bad &= ~same(fused.grads[name], wanted)
        if name in p.apart:
            bad &= ~_in_another_order(fused.grads[name], wanted, plain.slack[name])
        if bad.any():
            said = told(f"the gradient of {name}", bad, fused.grads[name], total.value,
                         eager.grads[name])  # fmt: skip
            return said, None, None
    if oracle.dz is None:
        return "", None, None
    total = spread_sum(oracle.dz, oracle.slack["dz"], z.shape)
    dz = total.value.to(acc)
    assert plain.dz is not None
    slack = torch.where(dz.isfinite() != plain.dz.isfinite(), torch.inf, total.slack)
    if _multiplies_first(p, z):
        exact = _of_linear_tail(space["tail"], z, operands, dy, plain.dz, p.auto)
        slack = slack.masked_fill(left_range(exact, plain.dz), torch.inf)
        zero = met_zero(exact, plain.dz)  # NaN, as eager's, is right too: `_anchor_faults`
        dz, slack = dz.masked_fill(zero, 0.0), slack.masked_fill(zero, 0.0)
        if exact is not None:
            dz = torch.where(exact.abs() > torch.finfo(acc).max, exact, dz.double())
    return "", dz, slack


def _anchor_faults(
    p: Program, inputs: dict[str, Tensor], dz: Tensor, slack: Any, acc: torch.dtype, eager: Seen,
    fused: Seen
) -> str:  # fmt: skip
    """dz: in float64 where the direct convolution's backward makes it, which sums it up for the
    biases before the last factor. What overflows is then an infinity of the exact sum's sign.
    """
    of_biases, dz = dz, dz.to(acc)
    if p.pattern.kind in ("linear", "matmul"):
        totals = product_totals(p, inputs, dz, slack)
    elif p.pattern.kind == "conv2d":
        totals = convolution_totals(p, inputs, dz, dz.double().abs(), slack)
    else:
        totals = norm_totals(p, inputs, dz, slack)
    # Sums over x's dtype are taken in float32 at least, whatever the epilogue is computed in.
    sums = torch.float64 if inputs["x"].dtype == torch.float64 else torch.float32
    for name, total in totals.items():
        if name not in fused.grads:
            continue
        found = fused.grads[name]
        # The library's own sums, as eager's: on some CPUs oneDNN takes those of fp16 in fp16. Where
        # eager's are in fp32, so are ours.
        by_onednn = p.pattern.kind.startswith("conv") and name in ("x", "weight")
        in_halves = by_onednn and found.dtype == torch.float16 and not found.is_cuda
        in_halves = in_halves and bool(total.bad(eager.grads[name], sums).any())
        bad = total.bad(found, torch.float16 if in_halves else sums)
        bad &= ~same(found, eager.grads[name])
        if name in ("beta", "bias") and of_biases.ndim == 4:
            bad &= ~same(found, of_biases.double().sum((0, 2, 3)).to(sums).to(found.dtype))
        if bad.any():
            return told(f"the gradient of {name}", bad, found, total.value, eager.grads[name])
    return ""
