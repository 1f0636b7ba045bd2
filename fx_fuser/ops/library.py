"""The torch.library side: one composite op per anchor, one autograd rule, and what they run.

The graph calls `torch.ops.fx_fuser.<anchor>`, say `linear`. It is CompositeImplicitAutograd:
AOTAutograd looks through it and sees, on CUDA, `fx_fuser::run` (`fx_fuser.ops.run`), which has no
autograd key, with the function `linear`. If gradients are needed it is inside an
autograd.Function, whose backward is plain torch ops. For convolutions of few channels backward is a
function of its own (`conv2d_backward`), which recomputes the convolution instead of reading it.
`<anchor>_recompute` recomputes c if option "save" is "memory". On CPU AOTAutograd sees plain torch
ops, for the inner compiler to fuse.

All are defined on import. The epilogue is one of their arguments, so nothing here knows a pattern,
and no cache by name or number can be stale:

    epilogue      the text of `fx_fuser.graph.epilogue`
    t, s          the tensors and numbers that it calls t0… and s0…
    compute       dtype of c (under autocast not that of x)
    out           dtype of the result
    native        `run` and autograd.Function, or plain torch ops

The function also takes `kernels`, on CUDA the names of `apply.forward_specs`, which
`fx_fuser.native.load` has loaded; and `save`: return c, too. Its results are y, c if it is saved,
and in training the batch's mean and variance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fx_fuser.anchors import ANCHORS, Anchor
from fx_fuser.anchors.base import LIBRARY
from fx_fuser.anchors.conv2d import Conv2d
from fx_fuser.graph.epilogue import Epilogue, parse, read_by_derivative, wanted_leaves
from fx_fuser.kernels import KERNELS, attention, pixels
from fx_fuser.kernels.attention import bias as attention_bias
from fx_fuser.kernels.attention import gathered
from fx_fuser.kernels.attention import window as attention_window
from fx_fuser.kernels.folded import FOLDED
from fx_fuser.kernels.unaligned import COMB_TILES, TILES, comb_takes
from fx_fuser.native import limits, load
from fx_fuser.native.kernel_spec import MAX_NUMBERS, MAX_TENSORS, KernelSpec
from fx_fuser.ops import apply, folded, plain, run  # noqa: F401  (plain defines ops)
from fx_fuser.ops.once import differentiable_once
from fx_fuser.ops.run import Arguments

_LIBRARY = torch.library.Library("fx_fuser", "DEF")
_EPILOGUE_SCHEMA = "str epilogue, Tensor[] t, float[] s"


# ---- functions of programs --------------------------------------------------------------------


@functools.cache
def argument_names(kind: str) -> tuple[str, ...]:
    return tuple(a.split()[-1] for a in ANCHORS[kind].schema.split(", "))


def split_arguments(
    anchor: Anchor, args: Sequence[Any]
) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Positional op arguments → operands, configuration, the rest."""
    names = argument_names(anchor.kind)
    count = len(anchor.operands)
    operands = dict(zip(names[:count], args))
    config = dict(zip(names[count:], args[count:]))
    return operands, config, list(args[len(names) :])


def cast(anchor: Anchor, operands: dict[str, Any], compute: torch.dtype) -> None:
    """Casts the operands that autocast casts."""
    for name in anchor.cast:
        if operands[name] is not None:
            operands[name] = operands[name].to(compute)


def forward_in_torch(anchor: Anchor, fake: bool, *args: Any) -> list[Tensor]:
    """The results of an anchor's function, or fake ones.

    On CUDA: kernels_cu/host/linear.h and conv.h. In Python a call took 100 us.
    """
    operands, config, (text, t, s, _, out_dtype, save) = split_arguments(anchor, args)
    outputs = (anchor.forward_like if fake else anchor.forward)(operands, config)
    c = outputs[0]
    shape = c.shape
    if anchor.may_be_gate and shape[-1:] == (1,):
        shape = torch.broadcast_shapes(shape, *(v.shape for v in t))
    in_place = not save and c.dtype == out_dtype and shape == c.shape
    out = c if in_place else anchor.empty_output(c, shape, out_dtype)
    if not fake:
        apply.finish(parse(text), anchor, operands, outputs, config, t, s, out)
    statistics = outputs[1:] if config.get("training") else ()
    return [out, *([c] if save else []), *statistics]


def _backward_from_dy(anchor: Conv2d, fake: bool, *args: Any) -> list[Tensor]:
    """Gradients of the operands that are `wanted`, from dy and the batch's statistics.

    epilogue: computes dz from dy, which it calls z (`fx_fuser.graph.epilogue.linear_backward`).
    """
    operands, config, (slope, t, s, _, dy, statistics, wanted) = split_arguments(anchor, args)
    like = {name: operands[name] for name in wanted}
    if fake:
        return [torch.empty_like(v, memory_format=torch.contiguous_format) for v in like.values()]
    outputs = _filled_up(anchor, [anchor.recompute(operands, config), *statistics])
    dz = apply.derivative_in_torch(parse(slope), dy, t, s)
    needs = {n: n in like for n in anchor.operands}
    grads = anchor.backward(operands, outputs, config, dz, needs)
    return [grads[n].to(v.dtype).contiguous() for n, v in like.items()]


def _filled_up(anchor: Anchor, outputs: Sequence[Any]) -> list[Any]:
    """The anchor's outputs; None for missing statistics."""
    return [*outputs, *[None] * (len(anchor.outputs) - len(outputs))]


def _recompute(anchor: Anchor, fake: bool, *args: Any) -> list[Tensor]:
    """c, recomputed. The last argument is not read. It keeps the call in backward: AOTAutograd
    moves an op to forward, and saves its result, if all of its inputs exist there.
    """
    operands, config, _ = split_arguments(anchor, args)
    if fake:
        return [anchor.forward_like(operands, config)[0]]
    return [anchor.recompute(operands, config, KERNELS[config["product"]].multiply)]


def define(name: str, function: Callable[..., list[Tensor]], anchor: Anchor) -> None:
    run.define(name, *(functools.partial(function, anchor, fake) for fake in (False, True)))


for _anchor in ANCHORS.values():
    define(_anchor.kind, forward_in_torch, _anchor)
    define(f"{_anchor.kind}_recompute", _recompute, _anchor)
    if isinstance(_anchor, Conv2d):
        define(f"{_anchor.kind}_backward", _backward_from_dy, _anchor)


# ---- autograd -------------------------------------------------------------------------------


@dataclass(frozen=True)
class FusedCall:
    """What a fused call is, apart from its tensors."""

    anchor: Anchor
    config: dict[str, Any]
    epilogue: Epilogue
    s: list[float]
    out: torch.dtype

    @property
    def has_statistics(self) -> bool:
        """Are a batch's statistics among the results?"""
        return bool(self.config.get("training"))

    def run(
        self, operands: Sequence[Tensor | None], t: Sequence[Tensor], save: bool
    ) -> tuple[Tensor, list[Any]]:
        """y and the anchor's outputs, None for missing ones. save: c is one of them."""
        y, *outputs = self.bound(operands, t, save)()
        return y, _filled_up(self.anchor, outputs if save else [None, *outputs])

    def bound(
        self, operands: Sequence[Tensor | None], t: Sequence[Tensor], save: bool
    ) -> Callable[[], list[Tensor]]:
        """The op with all of its arguments, as a compiled graph calls it in training."""
        return functools.partial(run.MANY, *self.arguments(operands, t, save))

    def evaluation(
        self, operands: Sequence[Tensor | None], t: Sequence[Tensor]
    ) -> Callable[[], Tensor]:
        """The op with y as its only result, as a compiled graph calls it in inference."""
        return run.one(*self.arguments(operands, t, save=False))

    def arguments(
        self, operands: Sequence[Tensor | None], t: Sequence[Tensor], save: bool
    ) -> Arguments:
        tail = (self.epilogue.text, t, self.s, self._kernels(operands, t), self.out, save)
        return run.arguments(self.anchor.kind, (*operands, *self.config.values(), *tail))

    def _kernels(self, operands: Sequence[Tensor | None], t: Sequence[Tensor]) -> list[str]:
        """Names of the CUDA kernels. Loads them, unless the tensors are fake: then `plan` did."""
        x: Any = operands[self.anchor.operands.index("x")]
        if x.device.type != "cuda":
            return []
        if self.has_statistics and _is_real(x):
            load.prepare_batch_stats(x.device)
        return _prepared(self.specs(operands, t), x)

    def specs(self, operands: Sequence[Tensor | None], t: Sequence[Tensor]) -> list[KernelSpec]:
        """The CUDA kernels that the kernel op launches."""
        named: dict[str, Any] = dict(zip(self.anchor.operands, operands))
        wanted = (self.anchor, self.config, self.epilogue, named, t, self.s)
        return apply.forward_specs(*wanted, named["x"].dtype, self.out)

    def reads(self, needs: Mapping[str, bool], needs_t: Sequence[bool]) -> frozenset[str]:
        """The operands and leaves of the epilogue, z among them, whose values backward reads."""
        by_epilogue = read_by_derivative(self.epilogue, wanted_leaves(needs, needs_t))
        if self.anchor.reads_c(needs, self.config):
            by_epilogue |= {"z"}
        return by_epilogue | frozenset(self.anchor.read_by_backward(needs, self.config))

    def saves(
        self, fused_backward: bool, needs: Mapping[str, bool], needs_t: Sequence[bool]
    ) -> bool:
        """Is c saved for backward?"""
        wanted = not fused_backward and not self.config["again"]
        return wanted and "z" in self.reads(needs, needs_t)

    def has_fused_backward(
        self,
        operands: Sequence[Tensor | None],
        t: Sequence[Tensor],
        needs_t: Sequence[bool],
    ) -> bool:
        """Does a fused kernel make the gradients from dy, without c?

        operands: after autocast's casts.
        """
        kernel = KERNELS[self.config.get("backward", LIBRARY)]
        family = kernel.backward_family
        if family is None or any(needs_t):
            return False
        dtypes = {n: v.dtype for n, v in zip(self.anchor.operands, operands) if v is not None}
        cast = {dtype for name, dtype in dtypes.items() if name in self.anchor.cast}
        if cast != {self.out} or self.out not in kernel.dtypes:
            return False
        # The kernels read a BatchNorm's vectors in float32.
        if not {self.out, torch.float32}.issuperset(dtypes.values()):
            return False
        return apply.backward_spec(family, self.epilogue, t, self.s, self.out) is not None

    def bound_backward(
        self,
        operands: Mapping[str, Tensor | None],
        t: Sequence[Tensor],
        statistics: Sequence[Tensor | None],
        dy: Tensor,
        needs: Mapping[str, bool],
    ) -> tuple[list[str], Callable[[], list[Tensor]]]:
        """The operands whose gradients a kernel makes, and the op with all its arguments."""
        family = KERNELS[self.config["backward"]].backward_family
        assert family is not None, "has_fused_backward was not asked"
        spec = apply.backward_spec(family, self.epilogue, t, self.s, self.out)
        found = apply.backward_of(self.epilogue, t, self.s)
        assert found is not None
        slope, factors, numbers = found
        kernels = _prepared([spec], dy) if spec and dy.device.type == "cuda" else []
        wanted = [n for n, v in operands.items() if needs[n] and v is not None]
        made = [v for v in statistics if v is not None]
        tail = (slope.text, factors, numbers, kernels, dy, made, wanted)
        arguments = (*operands.values(), *self.config.values(), *tail)
        return wanted, functools.partial(
            run.MANY, *run.arguments(f"{self.anchor.kind}_backward", arguments)
        )


def _is_real(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter)


def _prepared(specs: Sequence[KernelSpec], like: Tensor) -> list[str]:
    """The kernels' names. Loads them, unless the tensor is fake: then `plan` did."""
    if _is_real(like):
        load.prepare(specs, like.device)
    return [spec.name for spec in specs]


def gradients(
    call: FusedCall,
    operands: Mapping[str, Tensor | None],
    t: Sequence[Tensor],
    outputs: Sequence[Any],
    dy: Tensor,
    needs: Mapping[str, bool],
    needs_t: Sequence[bool],
) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """Gradients of the operands and of t. outputs: as saved; c is None if it was not."""
    anchor = call.anchor
    dt: list[Tensor | None] = [None] * len(t)
    with torch.autocast(dy.device.type, enabled=False):
        if call.has_fused_backward([*operands.values()], t, needs_t):
            names, backward = call.bound_backward(operands, t, outputs[1:], dy, needs)
            return dict(zip(names, backward())), dt
        if "z" not in call.reads(needs, needs_t):
            # Only the shape of c is read.
            zero = dy.new_zeros((), dtype=operands["x"].dtype)  # type: ignore[union-attr]
            outputs = (zero.expand(anchor.shape_of_z(dy, operands)), *outputs[1:])
        elif call.config["again"]:
            after = dy[(slice(0, 1),) * dy.ndim]  # for all of dy, Inductor would write dy to memory
            arguments = (*operands.values(), *call.config.values(), after)
            (c,) = run.IN_TORCH(*run.arguments(f"{anchor.kind}_recompute", arguments))
            outputs = (c, *outputs[1:])
        acc = apply.accumulator_of(call.epilogue, (*outputs, *t), call.out)
        z = apply.z_in_torch(anchor, operands, outputs, call.config, acc)
        wanted = [i for i, need in enumerate(needs_t) if need]

        dz, *dfree = _pull_back(call, z, t, wanted, dy.to(acc))
        grads: dict[str, Tensor] = {}
        if any(needs.values()):
            multiply = KERNELS[call.config["backward"]].multiply
            grads = anchor.backward(operands, outputs, call.config, dz, needs, multiply)
        for i, grad in zip(wanted, dfree):
            dt[i] = grad.to(t[i].dtype).to(t[i].device)
    return grads, dt


def _pull_back(
    call: FusedCall, z: Tensor, t: Sequence[Tensor], wanted: Sequence[int], dy: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of the epilogue with respect to z and the tensors with the wanted indices.

    By autograd, not `torch.func.vjp`, which raises under saved-tensor hooks, as in a model compiled
    inside `torch.utils.checkpoint` or `save_on_cpu`.
    """
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        free = [t[i].to(z.dtype).detach().requires_grad_() for i in wanted]
        tensors = list(t)
        for i, tensor in zip(wanted, free):
            tensors[i] = tensor
        y = apply.in_torch(call.epilogue, z, tensors, call.s, z.dtype)
        return torch.autograd.grad(y, [z, *free], dy, materialize_grads=True)


def _kept(
    call: FusedCall, tensors: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The tensors to save; without the memory if backward needs only the shape.

    As in eager mode, those may be written to before backward runs. If c is recomputed, its operands
    may not.
    """
    count = len(call.anchor.operands)
    names = (*call.anchor.operands, *(f"t{i}" for i in range(len(tensors) - count)))
    read = call.reads(dict(zip(names[:count], needs)), needs[count:])
    return [
        t if t is None or name in read else t.detach().new_zeros(()).expand(t.shape)
        for name, t in zip(names, tensors)
    ]


def _operands_first(call: FusedCall, of_tensors: Sequence[Any]) -> Sequence[Any]:
    count = len(call.anchor.operands)
    return (*of_tensors[-count:], *of_tensors[:-count])


class _Fused(torch.autograd.Function):
    """The fused op with gradients: saves its outputs, differentiates the epilogue by autograd.

    The epilogue's tensors come first. Autograd adds up a tensor's gradients in the order of the
    arguments, and an eager backward begins with the operations after the anchor.
    """

    @staticmethod
    def forward(ctx: Any, call: FusedCall, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        count = len(call.anchor.operands)
        t, operands = tensors[:-count], tensors[-count:]
        needs = _operands_first(call, ctx.needs_input_grad[1:])
        fused = call.has_fused_backward(operands, t, needs[count:])  # type: ignore[arg-type]
        of_name = dict(zip(call.anchor.operands, needs))
        save = call.saves(fused, of_name, needs[count:])
        y, outputs = call.run(operands, t, save=save)  # type: ignore[arg-type]
        ctx.call = call
        ctx.save_for_backward(*_kept(call, (*operands, *t), needs), *outputs)
        statistics = [v for v in outputs[1:] if v is not None]
        ctx.mark_non_differentiable(*statistics)
        return (y, *statistics)

    @staticmethod
    @differentiable_once(lambda ctx: ctx.call.anchor.kind)
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        call: FusedCall = ctx.call
        anchor = call.anchor
        saved = list(ctx.saved_tensors)
        outputs = [saved.pop() for _ in anchor.outputs][::-1]
        count = len(anchor.operands)
        operands = dict(zip(anchor.operands, saved[:count]))
        t = saved[count:]
        needs = _operands_first(call, ctx.needs_input_grad[1:])
        of_name = dict(zip(anchor.operands, needs))
        grads, dt = gradients(call, operands, t, outputs, dy, of_name, needs[count:])
        return (None, *dt, *(grads.get(n) for n in anchor.operands))


# ---- composite ops: what the graph calls ------------------------------------------------------


def _composite(anchor: Anchor, *args: Any) -> list[Tensor]:
    operands, config, (text, t, s, compute, out, native) = split_arguments(anchor, args)
    epilogue = parse(text)
    with torch.autocast(operands["x"].device.type, enabled=False):
        if config.get("product") == FOLDED:
            return [folded.call(operands, config, epilogue, t, compute)]
        cast(anchor, operands, compute)
        call = FusedCall(anchor, config, epilogue, list(s), out)
        tensors = [*anchor.kernel_operands(operands, config), *t]
        if not native:
            z, *statistics = anchor.reference(operands, config)
            y = apply.in_torch(epilogue, z, t, s, out)
        else:
            given = tensors[: len(operands)]
            if torch.is_grad_enabled() and any(v.requires_grad for v in tensors if v is not None):
                y, *statistics = _Fused.apply(call, *t, *given)
            elif call.has_statistics:
                y, *statistics = call.bound(given, t, save=False)()
            else:
                y, statistics = call.evaluation(given, t)(), []
            statistics = list(anchor.statistics_of_z(statistics, operands, config))
        return anchor.results(y, statistics, operands, config)


def _define_composite(anchor: Anchor) -> None:
    _LIBRARY.define(
        f"{anchor.kind}({anchor.schema}, {_EPILOGUE_SCHEMA}, ScalarType compute, ScalarType out, "
        "bool native) -> Tensor[]"
    )
    body = functools.partial(_composite, anchor)
    _LIBRARY.impl(anchor.kind, body, "CompositeImplicitAutograd")


for _anchor in ANCHORS.values():
    _define_composite(_anchor)


# ---- what the shim assumes --------------------------------------------------------------------


def _shapes_text(shapes: Sequence[tuple[int, int, int]]) -> str:
    return " ".join(f"{d}:{rows}x{tile}" for d, rows, tile in shapes)


def contract() -> list[str]:
    """What kernels_cu/host/ assumes of Python, a fact per line; compared when it is loaded."""
    norm = ANCHORS["conv2d_batchnorm"]
    like = dict.fromkeys(norm.operands, torch.empty(1, device="meta"))
    outputs = [torch.empty(1, device="meta")] * len(norm.outputs)
    _, *leaves = norm.leaves(like, outputs, {"training": False, "eps": 1e-5})
    return [
        f"limit tensors {MAX_TENSORS}",
        f"limit numbers {MAX_NUMBERS}",
        f"limit shared {limits.LEAST_SHARED}",
        f"leaves {' '.join(leaves)}",
        f"tiles {' '.join(f'{m}x{n}' for m, n in TILES)}",
        f"combs {' '.join(map(_comb, range(len(COMB_TILES))))}",
        f"attention {_shapes_text(attention.SHAPES)}",
        f"dropout {attention.MOST_DROPPED}/{attention.DROPOUT_STEPS}",
        f"backward {_shapes_text(attention.BACKWARD_SHAPES)}",
        f"biases {_shapes_text(attention_bias.SHAPES)}",
        f"windows {' '.join(f'{d}:{attention_window.ROWS}' for d in attention_window.SHAPES)}",
        f"gathers {gathered.PLACES}:{gathered.COLUMNS}",
        f"pixels {' '.join(pixels.SHAPES)}",
    ]


def _comb(shape: int) -> str:
    rows, columns = COMB_TILES[shape]
    along = {(1, 1): "both", (1, 0): "k", (0, 1): "lines"}
    return f"{rows}x{columns}:{along[comb_takes(shape, 1), comb_takes(shape, 0)]}"


load.expect(contract)
