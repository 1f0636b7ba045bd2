"""The torch.library side: one composite op a pattern, one kernel op an anchor, one autograd rule.

The graph calls `torch.ops.fx_fuser.<pattern>`. It is CompositeImplicitAutograd: AOTAutograd looks
through it and sees, on CUDA, the *kernel op* of the anchor (`fx_fuser::linear_kernel`), which has
no autograd key; when gradients are needed, inside an autograd.Function whose backward is plain
torch ops or, for convolutions of few channels, an op of its own (`fx_fuser::conv2d_backward`),
which makes the convolution again instead of reading it. `fx_fuser::<anchor>_again` makes the
product once more where option "save" is "memory". On CPU it sees the pattern's plain torch
ops, for the inner compiler to fuse.

Arguments, after those of the anchor's own schema:

    t, s, kinds   the wildcards. kinds has a letter for each: z the pre-activation itself (nothing
                  is passed), t the tensor t[i], s the number s[i]; in a backward that is an op, -
                  what it does not read.
    compute       dtype of the anchor's product (under autocast not that of x)
    out           dtype of the result
    native        kernel op and autograd.Function, or plain torch ops

and of the kernel op, pattern (its name), kernels (on CUDA the names of those of `Anchor.kernels`,
which `fx_fuser.native` has loaded), and save: return c too, else an empty tensor in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser import apply, native
from fx_fuser.anchors import ANCHORS, Anchor
from fx_fuser.anchors.conv2d import DIRECT, DIRECT_DTYPES, Conv2d, library_convolution
from fx_fuser.epilogue import Z, accumulation_dtype
from fx_fuser.epilogue import leaves as leaf_names
from fx_fuser.errors import PatternError
from fx_fuser.match import Match
from fx_fuser.pattern import Pattern
from fx_fuser.rewrite import Call
from fx_fuser.spell import Expr, Operand, is_number, meta_tensor

_LIBRARY = torch.library.Library("fx_fuser", "DEF")
_PATTERNS: dict[str, Pattern] = {}
_WILDCARD_SCHEMA = "Tensor?[] t, float[] s, str kinds"


# ---- kernel ops: one an anchor, no autograd key ---------------------------------------------


@functools.cache
def argument_names(kind: str) -> tuple[str, ...]:
    return tuple(a.split()[-1] for a in ANCHORS[kind].schema.split(", "))


def _split(anchor: Anchor, args: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Positional op arguments → operands, configuration, the rest."""
    names = argument_names(anchor.kind)
    count = len(anchor.operands)
    operands = dict(zip(names[:count], args))
    config = dict(zip(names[count:], args[count:]))
    return operands, config, list(args[len(names) :])


def _kernel(anchor: Anchor, fake: bool, *args: Any) -> tuple[Tensor, ...]:
    operands, config, (t, s, kinds, name, _, out_dtype, save) = _split(anchor, args)
    pattern = _PATTERNS[name]
    wildcards = apply.wildcard_values(pattern, t, s, kinds)
    products = (anchor.product_like if fake else anchor.product)(operands, config)
    c = products[0]
    shape = c.shape
    if anchor.kind == "linear" and shape[-1:] == (1,):  # a gate may be spread along its last dim
        shape = torch.broadcast_shapes(shape, *(v.shape for v in t if v is not None))
    in_place = not save and c.dtype == out_dtype and shape == c.shape
    out = c if in_place else anchor.empty_output(c, shape, out_dtype)
    if not fake:
        apply.finish(pattern, kinds, anchor, operands, products, config, wildcards, out)
    kept = c if save else c.new_empty(0)
    return (out, kept, *products[1:])


def _define_kernel(anchor: Anchor) -> None:
    name = f"{anchor.kind}_kernel"
    returns = ", ".join(f"Tensor {p}" for p in ("y", *anchor.products))
    _LIBRARY.define(
        f"{name}({anchor.schema}, {_WILDCARD_SCHEMA}, str pattern, str[] kernels, ScalarType out, "
        f"bool save) -> ({returns})"
    )
    # Those on CUDA are in kernels_cu/shim_linear.h and shim_conv.h: in Python a call took 100 us.
    _LIBRARY.impl(name, functools.partial(_kernel, anchor, False), "CPU")
    fake = functools.partial(_kernel, anchor, True)
    torch.library.register_fake(f"fx_fuser::{name}", fake, lib=_LIBRARY)


def _split_product(a: Tensor, b: Tensor, kernel: str) -> Tensor:
    return F.linear(a, b)


# a bᵀ in fp32; kernel: the name of that of `anchors.linear.PRODUCT_ALONE`.
_LIBRARY.define("split_product(Tensor a, Tensor b, str kernel) -> Tensor")
_LIBRARY.impl("split_product", _split_product, "CPU")
torch.library.register_fake("fx_fuser::split_product", _split_product, lib=_LIBRARY)


# In fp32 without TF32, whatever cuDNN's own setting says, which allows it by default.
_LIBRARY.define(
    "exact_convolution(Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation, "
    "int groups) -> Tensor"
)
_LIBRARY.impl("exact_convolution", functools.partial(library_convolution, False), "CUDA")


def _backward_from_dy(anchor: Conv2d, fake: bool, *args: Any) -> list[Tensor]:
    operands, config, (t, s, kinds, name, _, dy, products, wanted) = _split(anchor, args)
    like = {anchor.operands[i]: operands[anchor.operands[i]] for i in wanted}
    if fake:
        return [torch.empty_like(v, memory_format=torch.contiguous_format) for v in like.values()]
    pattern = _PATTERNS[name]
    wildcards = apply.wildcard_values(pattern, t, s, kinds)
    c = anchor.product_again(operands, config)
    dz = apply.derivative_in_torch(pattern, kinds, dy, wildcards)
    needs = {n: n in like for n in anchor.operands}
    grads = anchor.backward(operands, (c, *products), config, dz, needs)
    return [grads[n].to(v.dtype).contiguous() for n, v in like.items()]


def _define_backward_from_dy(anchor: Conv2d) -> None:
    """Gradients of the operands at the places `wanted`, from dy and the products that follow c.

    On CUDA it is in kernels_cu/shim_conv_backward.h, and the one in torch for what that refuses.
    """
    name = f"{anchor.kind}_backward"
    schema = (
        f"({anchor.schema}, {_WILDCARD_SCHEMA}, str pattern, str[] kernels, Tensor dy, "
        "Tensor[] products, int[] wanted) -> Tensor[]"
    )
    in_torch = functools.partial(_backward_from_dy, anchor, False)
    for op, device in ((name, "CPU"), (f"{name}_in_torch", "CUDA")):
        _LIBRARY.define(f"{op}{schema}")
        _LIBRARY.impl(op, in_torch, device)
    fake = functools.partial(_backward_from_dy, anchor, True)
    torch.library.register_fake(f"fx_fuser::{name}", fake, lib=_LIBRARY)


def _again(anchor: Anchor, fake: bool, *args: Any) -> Tensor:
    operands, config, _ = _split(anchor, args)
    if fake:
        return anchor.product_like(operands, config)[0]
    return anchor.product_again(operands, config)


def _define_again(anchor: Anchor) -> None:
    """c once more. `after` is not read: where all inputs of an operation are there in the forward,
    AOTAutograd moves it there and saves what it makes.
    """
    name = f"{anchor.kind}_again"
    _LIBRARY.define(f"{name}({anchor.schema}, Tensor after) -> Tensor")
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, functools.partial(_again, anchor, False), device)
    fake = functools.partial(_again, anchor, True)
    torch.library.register_fake(f"fx_fuser::{name}", fake, lib=_LIBRARY)


# ---- autograd -------------------------------------------------------------------------------


@dataclass(frozen=True)
class FusedCall:
    """What a fused call is, apart from its tensors."""

    pattern: Pattern
    config: dict[str, Any]
    s: list[float]
    kinds: str
    out: torch.dtype

    @property
    def anchor(self) -> Anchor:
        return ANCHORS[self.pattern.kind]

    def run(
        self, operands: Sequence[Tensor | None], t: Sequence[Tensor | None], save: bool
    ) -> tuple[Tensor, ...]:
        return self.bound(operands, t, save)()

    def bound(
        self, operands: Sequence[Tensor | None], t: Sequence[Tensor | None], save: bool
    ) -> Callable[[], tuple[Tensor, ...]]:
        """The kernel op with all of its arguments, as a compiled graph calls it."""
        op = getattr(torch.ops.fx_fuser, f"{self.pattern.kind}_kernel").default
        kernels = self._kernels(operands, t)
        tail = (list(t), self.s, self.kinds, self.pattern.name, kernels, self.out)
        return functools.partial(op, *operands, *self.config.values(), *tail, save)

    def _kernels(self, operands: Sequence[Tensor | None], t: Sequence[Tensor | None]) -> list[str]:
        """Names of the CUDA kernels. Loads them, unless the tensors are fake: `plan` then has."""
        named = dict(zip(self.anchor.operands, operands))
        x: Any = named["x"]
        if x.device.type != "cuda":
            return []
        training = self.config.get("training", False)
        wanted = (self.pattern, self.kinds, named, t, x.dtype, self.out, training)
        sources = [apply.kernel_source(*wanted, k) for k in self.anchor.kernels(self.config)]
        if training and _is_real(x):
            native.prepare_batch_stats(x.device)
        return _prepared(sources, x)

    def saves(self, own_backward: bool) -> bool:
        """Is c saved for backward?"""
        return not own_backward and not self.config["again"]

    def has_own_backward(
        self,
        operands: Sequence[Tensor | None],
        t: Sequence[Tensor | None],
        needs_t: Sequence[bool],
    ) -> bool:
        """Does a kernel of ours make the gradients from dy, without c?

        operands: after autocast's casts.
        """
        if self.config.get("backward") != DIRECT or any(needs_t):
            return False
        dtypes = {n: v.dtype for n, v in zip(self.anchor.operands, operands) if v is not None}
        of_product = {dtype for name, dtype in dtypes.items() if name in self.anchor.cast}
        if of_product != {self.out} or self.out not in DIRECT_DTYPES:
            return False
        # A BatchNorm's vectors, which the kernels read in float32.
        if not {self.out, torch.float32}.issuperset(dtypes.values()):
            return False
        return self._derivative_source(t) is not None

    def _derivative_source(self, t: Sequence[Tensor | None]) -> str | None:
        wildcards = apply.wildcard_values(self.pattern, t, self.s, self.kinds)
        return apply.derivative_source(self.pattern, self.kinds, wildcards, self.out)

    def bound_backward(
        self,
        operands: Mapping[str, Tensor | None],
        t: Sequence[Tensor | None],
        products: Sequence[Tensor],
        dy: Tensor,
        needs: Mapping[str, bool],
    ) -> tuple[list[str], Callable[[], list[Tensor]]]:
        """Whose gradients the backward's op makes, and it with all of its arguments."""
        op = getattr(torch.ops.fx_fuser, f"{self.pattern.kind}_backward").default
        source = self._derivative_source(t)
        kernels = _prepared([source], dy) if source and dy.device.type == "cuda" else []
        read = apply.read_by_derivative(self.pattern, self.kinds)
        reads = [n in read for n in self.pattern.wildcards]
        passed = [v if is_read else None for v, is_read in zip(t, reads)]
        kinds = "".join(k if is_read or k == "z" else "-" for k, is_read in zip(self.kinds, reads))
        places = {n: i for i, (n, v) in enumerate(operands.items()) if needs[n] and v is not None}
        tail = (passed, self.s, kinds, self.pattern.name, kernels, dy, list(products))
        config, wanted = self.config.values(), list(places.values())
        return [*places], functools.partial(op, *operands.values(), *config, *tail, wanted)


def _is_real(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter)


def _prepared(sources: Sequence[str], like: Tensor) -> list[str]:
    """The kernels' names; loads them, unless the tensor is fake: `plan` then has."""
    if _is_real(like):
        native.prepare(sources, like.device)
    return [native.kernel_name(source) for source in sources]


def gradients(
    call: FusedCall,
    operands: Mapping[str, Tensor | None],
    t: Sequence[Tensor | None],
    products: Sequence[Tensor],
    dy: Tensor,
    needs: Mapping[str, bool],
    needs_t: Sequence[bool],
) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """Of the operands and of the tensor wildcards; products: as saved, without c as []."""
    anchor = call.anchor
    dt: list[Tensor | None] = [None] * len(t)
    with torch.autocast(dy.device.type, enabled=False):
        if call.has_own_backward([*operands.values()], t, needs_t):
            names, backward = call.bound_backward(operands, t, products[1:], dy, needs)
            return dict(zip(names, backward())), dt
        if call.config["again"]:
            again = getattr(torch.ops.fx_fuser, f"{anchor.kind}_again").default
            after = dy[(slice(0, 1),) * dy.ndim]  # all of dy would be written for it
            c = again(*operands.values(), *call.config.values(), after)
            products = (c, *products[1:])
        acc = accumulation_dtype([*apply.wide_dtypes((*products, *t)), call.out])
        z = apply.z_in_torch(anchor, operands, products, call.config, acc)
        wanted = [i for i, need in enumerate(needs_t) if need]

        dz, *dfree = _pull_back(call, z, t, wanted, dy.to(acc))
        grads: dict[str, Tensor] = {}
        if any(needs.values()):
            grads = anchor.backward(operands, products, call.config, dz, needs)
        for i, grad in zip(wanted, dfree):
            dt[i] = grad.to(t[i].dtype).to(t[i].device)  # type: ignore[union-attr]
    return grads, dt


def _differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward without a derivative of its own: to differentiate its results raises.

    torch's `once_differentiable` looks at dy alone. The gradient of `y.sum()` was then a constant,
    and a gradient penalty on it silently did nothing.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # no create_graph=True
            return found
        name = ctx.call.pattern.name
        message = (
            f"fx_fuser::{name} has no double backward; to differentiate twice, leave it unfused "
            f"with options={{'patterns': ['-{name}']}}"
        )
        present = [g.detach().requires_grad_() for g in found if g is not None]
        guards = torch._C._functions.DelayedError(message.encode(), len(present))(*present)
        results = iter(guards if isinstance(guards, tuple) else (guards,))
        return tuple(None if g is None else next(results) for g in found)

    return guarded


def _pull_back(
    call: FusedCall, z: Tensor, t: Sequence[Tensor | None], wanted: Sequence[int], dy: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of the epilogue: of z, and of the tensor wildcards whose indices are wanted.

    By autograd and not `torch.func.vjp`, which raises where saved-tensor hooks are set, as in a
    model compiled inside `torch.utils.checkpoint` or `save_on_cpu`.
    """
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        free = [t[i].to(z.dtype).detach().requires_grad_() for i in wanted]  # type: ignore[union-attr]
        tensors = list(t)
        for i, tensor in zip(wanted, free):
            tensors[i] = tensor
        wildcards = apply.wildcard_values(call.pattern, tensors, call.s, call.kinds)
        y = apply.in_torch(call.pattern, call.kinds, z, wildcards, z.dtype)
        return torch.autograd.grad(y, [z, *free], dy, materialize_grads=True)


def _kept(
    call: FusedCall, tensors: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The tensors to save: those of which backward needs but the shape, without their memory.

    As in eager mode, they may be written to before backward runs; where c is made again, the
    operands it is made of may not.
    """
    names = (*call.anchor.operands, *call.pattern.wildcards)
    read = read_by_backward(call.pattern, call.kinds, call.config, dict(zip(names, needs)))
    return [
        t if t is None or name in read else t.detach().new_zeros(()).expand(t.shape)
        for name, t in zip(names, tensors)
    ]


def read_by_backward(
    pattern: Pattern, kinds: str, config: Mapping[str, Any], needs: Mapping[str, bool]
) -> set[str]:
    """Operands and wildcards of whose values backward makes use."""
    of_anchor = ANCHORS[pattern.kind].read_by_backward(needs, config)
    return {*of_anchor, *_read_by_derivative(apply.epilogue_of(pattern, kinds))}


def _read_by_derivative(epilogue: Operand) -> set[str]:
    """The leaves on which a derivative depends: all but the plain terms of an outermost sum."""
    terms: tuple[Operand, ...] = (epilogue,)
    if isinstance(epilogue, Expr) and epilogue.op == "add":
        terms = tuple(a for a in epilogue.args if isinstance(a, Expr))
    return set().union(*map(leaf_names, terms))


class _Fused(torch.autograd.Function):
    """The fused op with gradients: saves its products, derives the epilogue by autograd."""

    @staticmethod
    def forward(ctx: Any, call: FusedCall, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        count = len(call.anchor.operands)
        operands, t = tensors[:count], tensors[count:]
        own = call.has_own_backward(operands, t, ctx.needs_input_grad[1 + count :])
        y, *products = call.run(operands, t, save=call.saves(own))
        ctx.call = call
        ctx.save_for_backward(*_kept(call, tensors, ctx.needs_input_grad[1:]), *products)
        statistics = products[1:]
        ctx.mark_non_differentiable(*statistics)
        return (y, *statistics)

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        call: FusedCall = ctx.call
        anchor = call.anchor
        saved = list(ctx.saved_tensors)
        products = [saved.pop() for _ in anchor.products][::-1]
        count = len(anchor.operands)
        operands = dict(zip(anchor.operands, saved[:count]))
        t = saved[count:]
        needs = ctx.needs_input_grad[1:]
        of_name = dict(zip(anchor.operands, needs))
        grads, dt = gradients(call, operands, t, products, dy, of_name, needs[count:])
        return (None, *(grads.get(n) for n in anchor.operands), *dt)


# ---- composite ops: one a pattern, what the graph calls -------------------------------------


def _composite(pattern: Pattern, *args: Any) -> list[Tensor]:
    anchor = ANCHORS[pattern.kind]
    operands, config, (t, s, kinds, compute, out, native) = _split(anchor, args)
    with torch.autocast(operands["x"].device.type, enabled=False):
        for name in anchor.cast:
            if operands[name] is not None:
                operands[name] = operands[name].to(compute)
        call = FusedCall(pattern, config, list(s), kinds, out)
        tensors = [*anchor.kernel_operands(operands, config), *t]
        if not native:
            z, *statistics = anchor.reference(operands, config)
            y = apply.in_torch(pattern, kinds, z, apply.wildcard_values(pattern, t, s, kinds), out)
        else:
            if torch.is_grad_enabled() and any(v.requires_grad for v in tensors if v is not None):
                y, *statistics = _Fused.apply(call, *tensors)
            else:
                y, _, *statistics = call.run(tensors[: len(operands)], t, save=False)
            statistics = list(anchor.statistics_of_z(statistics, operands, config))
        return anchor.outputs(y, statistics, operands, config)


def define(pattern: Pattern) -> None:
    """Make `torch.ops.fx_fuser.<pattern.name>`. The same pattern twice is one; another raises."""
    known = _PATTERNS.get(pattern.name)
    if known is not None:
        if (known.kind, known.epilogue, known.wildcards) == (
            pattern.kind,
            pattern.epilogue,
            pattern.wildcards,
        ):
            _PATTERNS[pattern.name] = pattern
            return
        raise PatternError(
            f"a pattern named {pattern.name!r} exists and computes {known.epilogue}; "
            "give the new one another name"
        )
    schema = ANCHORS[pattern.kind].schema
    _LIBRARY.define(
        f"{pattern.name}({schema}, {_WILDCARD_SCHEMA}, ScalarType compute, ScalarType out, "
        "bool native) -> Tensor[]"
    )
    _LIBRARY.impl(pattern.name, functools.partial(_composite, pattern), "CompositeImplicitAutograd")
    _PATTERNS[pattern.name] = pattern


for _anchor in ANCHORS.values():
    _define_kernel(_anchor)
    _define_again(_anchor)
    if isinstance(_anchor, Conv2d):
        _define_backward_from_dy(_anchor)


# ---- from a match to a call -----------------------------------------------------------------


def graph_call(match: Match, native: bool, choices: Mapping[str, Any]) -> Call:
    """The composite op's arguments for this match; choices: the configuration that plan makes."""
    pattern, site = match.pattern, match.site
    anchor = ANCHORS[pattern.kind]
    config = {**anchor.config(site), **choices}
    order = argument_names(pattern.kind)
    values = {**site.operands, **config}
    t, s, kinds = wildcards_of(match)
    compute = meta_tensor(match.site.nodes[0]).dtype  # type: ignore[union-attr]
    out = meta_tensor(match.root).dtype  # type: ignore[union-attr]
    args = (*(values[n] for n in order), t, s, kinds, compute, out, native)
    tracked = config.get("training") and site.operands["running_mean"] is not None
    results = (site.operands["running_mean"], site.operands["running_var"]) if tracked else ()
    return Call(getattr(torch.ops.fx_fuser, pattern.name).default, args, results)


def wildcards_of(match: Match) -> tuple[list[Any], list[float], str]:
    values = [match.wildcards[n] for n in match.pattern.wildcards]
    kinds = "".join("z" if v == Z else "s" if is_number(v) else "t" for v in values)
    t = [v if kind == "t" else None for v, kind in zip(values, kinds)]
    s = [float(v) if kind == "s" else 0.0 for v, kind in zip(values, kinds)]  # type: ignore[arg-type]
    return t, s, kinds


def kernel_sources(match: Match, choices: Mapping[str, Any]) -> list[str]:
    """The generated CUDA translation units that this match needs with these choices of plan."""
    t, _, kinds = wildcards_of(match)
    tensors = [None if node is None else meta_tensor(node) for node in t]
    operands = {n: o and meta_tensor(o) for n, o in match.site.operands.items()}
    c = meta_tensor(match.site.nodes[0]).dtype  # type: ignore[union-attr]
    out = meta_tensor(match.root).dtype  # type: ignore[union-attr]
    training = match.site.attrs.get("training", False)
    wanted = (match.pattern, kinds, operands, tensors, c, out, training)
    anchor = ANCHORS[match.pattern.kind]
    sources = [apply.kernel_source(*wanted, kernel) for kernel in anchor.kernels(choices)]
    if choices.get("backward") == DIRECT:
        sources += filter(None, [derivative_source(match)])
    return sources + anchor.backward_sources(choices)


def derivative_source(match: Match) -> str | None:
    """Of the kernels that make a convolution's gradients from dy; None: they cannot."""
    t, s, kinds = wildcards_of(match)
    tensors = [None if node is None else meta_tensor(node) for node in t]
    wildcards = apply.wildcard_values(match.pattern, tensors, s, kinds)
    out = meta_tensor(match.root).dtype  # type: ignore[union-attr]
    return apply.derivative_source(match.pattern, kinds, wildcards, out)


def may_have_own_backward(match: Match) -> bool:
    """`FusedCall.has_own_backward` of the call that this match becomes."""
    t, s, kinds = wildcards_of(match)
    tensors = [None if node is None else meta_tensor(node) for node in t]
    site, anchor = match.site, ANCHORS[match.site.kind]
    c = meta_tensor(site.nodes[0])
    nodes = {name: site.operands[name] for name in anchor.operands}
    operands = [
        node and (c if name in anchor.cast else meta_tensor(node)) for name, node in nodes.items()
    ]
    out = meta_tensor(match.root).dtype  # type: ignore[union-attr]
    call = FusedCall(match.pattern, {"backward": DIRECT}, s, kinds, out)
    needs_t = [v is not None and v.requires_grad for v in tensors]
    return call.has_own_backward(operands, tensors, needs_t)  # type: ignore[arg-type]
