"""Hold a fusion in place, in your own test suite.

    from fx_fuser.testing import assert_equivalent, assert_fused

    assert_fused(model, (x,), {"linear_sigmoid_mul_mul": 32})
    assert_equivalent(model, (x,), train=True)

Both work on copies: the model, the inputs, the random state and the counters of fx_fuser stay as
they were. Both reset Dynamo, since code that is compiled already would not be counted.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves, tree_map

from fx_fuser.explain import explain

_COUNTERS = ("fx_fuser", "fx_fuser_left")
_EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class Bound:
    """error ≤ max(factor · eager's error, floor · size of the exact value), in each of the norms.

    factor, floor: by the dtype of the value. norms: orders of `torch.linalg.vector_norm`.
    strides: they must be eager's.
    """

    factor: Mapping[torch.dtype, float]
    floor: Mapping[torch.dtype, float]
    norms: tuple[float, ...] = (2,)
    strides: bool = True


# What README promises under Accuracy. The floors of the 16-bit dtypes are one rounding of the
# result, which eager may have been spared by luck; in float64 nothing more exact is there to
# compare with, and the floor is for sums taken in another order.
PROMISED = Bound(
    factor={torch.float32: 1.5, torch.float64: 2, torch.bfloat16: 2, torch.float16: 2},
    floor={torch.float32: 4e-7, torch.float64: 1e-12, **{d: e / 4 for d, e in _EPS.items()}},
)


def assert_fused(
    model: Callable[..., Any],
    inputs: Any,
    expected: Mapping[str, int],
    train: bool = False,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Compile the model, run it once, and compare the fused sites with `expected`, exactly.

    inputs: a tuple of arguments, or `(args, kwargs)`. expected: pattern → number of sites; a
    pattern that is not named must not be fused at all.
    train: in training mode, forward and backward; else in eval mode, under `no_grad`.
    options: as for the backend. `strict` is on unless they say otherwise, so that a fault of
    fx_fuser raises here instead of leaving the model unfused.
    Raises AssertionError with the table of `fx_fuser.explain`.
    """
    with _own_counters():
        observe(model, inputs, train, lambda m: _compiled(m, options))
        found, left = ({k: v for k, v in counters[c].items() if v} for c in _COUNTERS)
    wanted = {name: count for name, count in expected.items() if count}
    if found == wanted:
        return
    lines = []
    for name in sorted({*found, *wanted, *left}):
        line = f"{name}: {found.get(name, 0)} fused, {wanted.get(name, 0)} expected"
        if name in left:
            line += (
                f"; {left[name]} left to the inner compiler, as fusing gains nothing on this GPU "
                "(options={'plan': 'always'} fuses all the same)"
            )
        lines.append(line)
    raise AssertionError("\n".join([*lines, "", _explained(model, inputs, train, options)]))


def assert_equivalent(
    model: Callable[..., Any],
    inputs: Any,
    train: bool = False,
    options: Mapping[str, Any] | None = None,
    bound: Bound = PROMISED,
) -> None:
    """Compiled, the model is as near to float64 as it is in eager mode: every output and buffer,
    every input that it writes to, and in training every gradient.

    inputs, train and options are those of `assert_fused`. The model runs three times: compiled,
    eagerly, and eagerly in float64. On a CPU, where Inductor compiles the plain operations, an
    error of Inductor's own is as good a bound as eager's.
    A model that draws random numbers cannot be compared: set its dropout to 0.
    Raises AssertionError with every value that is out of bounds and the table of `explain`.
    """
    eager = observe(model, inputs, train)
    exact = observe(model, inputs, train, dtype=torch.float64, like=eager)
    with _own_counters():
        found = observe(model, inputs, train, lambda m: _compiled(m, options), like=eager)
        faults = compare(found, eager, exact, bound)
        inner = (options or {}).get("inner", "inductor")
        if faults and inner == "inductor" and not _on_cuda(eager):
            torch._dynamo.reset()
            peer = observe(model, inputs, train, torch.compile, like=eager)
            faults = compare(found, eager, exact, bound, [peer])
    if faults:
        table = _explained(model, inputs, train, options)
        raise AssertionError("\n".join([*faults, "", table]))


# ---- one run ---------------------------------------------------------------------------------


@dataclass
class Observed:
    """What one run left behind, by name.

    grads: of parameters and inputs, those that there are. state: buffers, and inputs afterwards.
    differentiable: for each output, whether it has a gradient.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    differentiable: list[bool] = field(default_factory=list)

    def everything(self) -> dict[str, Tensor]:
        parts = (("output", self.outputs), ("gradient of", self.grads), ("state of", self.state))
        return {f"{kind} {name}": v for kind, part in parts for name, v in part.items()}


def observe(
    model: Callable[..., Any],
    inputs: Any,
    train: bool,
    call: Callable[[Any], Callable[..., Any]] = lambda m: m,
    dtype: torch.dtype | None = None,
    like: Observed | None = None,
    grad: bool | None = None,
) -> Observed:
    """Run a copy of the model on copies of the inputs, backward from random gradients.

    call: model → what to call, such as `torch.compile`. dtype: of all floating-point values.
    like: an earlier run, in whose dtypes the random gradients must be numbers.
    grad: whether to run backward, if not as `train` says.
    """
    grad = train if grad is None else grad
    twin = copy.deepcopy(model)
    if isinstance(twin, nn.Module):
        twin = twin.train(train) if dtype is None else twin.train(train).to(dtype)
    args, kwargs = tree_map(_Copier(dtype), _split(inputs))
    with _same_random_state(), torch.set_grad_enabled(grad):
        result = call(twin)(*args, **kwargs)
        outputs = [o for o in tree_leaves(result) if isinstance(o, Tensor)]
        seen = Observed({str(i): _kept(o) for i, o in enumerate(outputs)})
        seen.differentiable = [o.requires_grad for o in outputs]
        if grad and any(seen.differentiable):
            wanted = [(str(i), o) for i, o in enumerate(outputs) if o.requires_grad]
            narrow = seen if like is None else like
            grads = [_random(narrow.outputs.get(i, o), o) for i, o in wanted]
            torch.autograd.backward([o for _, o in wanted], grads)
    module = twin if isinstance(twin, nn.Module) else nn.Module()
    given = {
        f"input {i}": t for i, t in enumerate(tree_leaves((args, kwargs))) if isinstance(t, Tensor)
    }
    leaves = {**dict(module.named_parameters()), **given}
    seen.grads = {n: t.grad for n, t in leaves.items() if t.is_leaf and t.grad is not None}
    seen.state = {n: _kept(t) for n, t in (*module.named_buffers(), *given.items())}
    return seen


def _split(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tuple of arguments, or `(args, kwargs)`, or one argument."""
    if not isinstance(inputs, (tuple, list)):
        return (inputs,), {}
    if len(inputs) == 2 and isinstance(inputs[0], (tuple, list)) and isinstance(inputs[1], dict):
        return tuple(inputs[0]), inputs[1]
    return tuple(inputs), {}


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


class _Copier:
    """Copies a tensor, with its strides; one that is given twice is one copy."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.copies: dict[int, Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.copies:
            self.copies[id(value)] = self._copy(value)
        return self.copies[id(value)]

    def _copy(self, tensor: Tensor) -> Tensor:
        copied = tensor.detach().clone()  # keeps the strides of dense tensors
        if self.dtype is not None and (tensor.is_floating_point() or tensor.is_complex()):
            copied = copied.to(_as_wide(copied, self.dtype))
        if copied.stride() != tensor.stride():
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            whole = tensor.detach().as_strided((elements,), (1,), 0).clone().to(copied.dtype)
            copied = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return copied.requires_grad_(tensor.requires_grad)


def _as_wide(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype.to_complex() if tensor.is_complex() else dtype


def _random(narrow: Tensor, output: Tensor) -> Tensor:
    """A gradient for the output: random, and of numbers that the narrow tensor's dtype holds."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return drawn.to(narrow.dtype).to(output.device, output.dtype)


# ---- the comparison --------------------------------------------------------------------------


def compare(
    found: Observed,
    eager: Observed,
    exact: Observed,
    bound: Bound = PROMISED,
    peers: Sequence[Observed] = (),
) -> list[str]:
    """What is wrong with `found`: empty if every value is as near to `exact` as `eager` is.

    peers: other runs whose errors are as good a bound as eager's.
    """
    faults = []
    for part in ("outputs", "grads", "state"):
        mine, theirs = getattr(found, part).keys(), getattr(eager, part).keys()
        if mine != theirs:
            faults.append(f"{part}: {', '.join(mine) or 'none'}; eager {', '.join(theirs)}")
    if found.differentiable != eager.differentiable:
        faults.append(f"requires_grad of the outputs: {found.differentiable}, not as in eager")
    if faults:
        return faults
    whole = sum(_size(g, 2) ** 2 for g in exact.grads.values()) ** 0.5
    truth, others = exact.everything(), [p.everything() for p in (eager, *peers)]
    for name, value in found.everything().items():
        zero_up_to = 1e-9 * whole if name.startswith("gradient") else 0.0
        fault = _fault(value, [o[name] for o in others], truth[name], bound, zero_up_to)
        faults += [f"{name}: {fault}"] if fault else []
    return faults


def _fault(
    value: Tensor, others: Sequence[Tensor], exact: Tensor, bound: Bound, zero_up_to: float
) -> str:
    eager = others[0]
    if (value.dtype, value.shape) != (eager.dtype, eager.shape):
        return f"{value.dtype} {tuple(value.shape)}, in eager {eager.dtype} {tuple(eager.shape)}"
    if bound.strides and value.stride() != eager.stride():
        return f"strides {value.stride()}, in eager {eager.stride()}"
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return "" if torch.equal(value, eager) else "other integers than in eager"
    # Where eager overflows or divides by zero there is nothing to hold anyone to, unless the exact
    # value is no number either.
    odd, usable = ~torch.isfinite(exact), torch.isfinite(exact) & torch.isfinite(eager)
    if not torch.equal(value[odd].nan_to_num(nan=0.5), eager[odd].nan_to_num(nan=0.5)):
        return "other infinities or NaNs than in eager"
    value, exact, others = value[usable], exact[usable], [o[usable] for o in others]
    real = torch.empty((), dtype=value.dtype).real.dtype
    for norm in bound.norms:
        size = _size(exact, norm)
        if size < zero_up_to:  # zero in exact arithmetic: a bias under a training BatchNorm
            size = zero_up_to * 1e9
        own = max(_size(_wide(o) - exact, norm) for o in others)
        error = _size(_wide(value) - exact, norm)
        allowed = max(bound.factor[real] * own, bound.floor[real] * size)
        if not error <= allowed:
            of = f" of {size:.3g} in norm {norm}"
            return f"error {error:.3g}{of}, allowed {allowed:.3g} (eager's {own:.3g})"
    return ""


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(_as_wide(tensor, torch.float64))


def _size(tensor: Tensor, norm: float) -> float:
    return float(torch.linalg.vector_norm(_wide(tensor), norm)) if tensor.numel() else 0.0


# ---- around a run ----------------------------------------------------------------------------


def _compiled(model: Callable[..., Any], options: Mapping[str, Any] | None) -> Callable[..., Any]:
    return torch.compile(model, backend="fx_fuser", options={"strict": True, **(options or {})})


@contextlib.contextmanager
def _own_counters() -> Iterator[None]:
    """Nothing compiled and nothing counted, before; afterwards the counts of before."""
    before = {name: counters.pop(name) for name in _COUNTERS if name in counters}
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
        for name in _COUNTERS:
            counters.pop(name, None)
        counters.update(before)


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Puts the random state back, so that every run draws the same numbers."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


def _on_cuda(seen: Observed) -> bool:
    return any(t.is_cuda for t in seen.everything().values())


def _explained(
    model: Callable[..., Any], inputs: Any, train: bool, options: Mapping[str, Any] | None
) -> str:
    """The table of `explain`, of the model as it was run."""
    twin = copy.deepcopy(model)
    if isinstance(twin, nn.Module):
        twin.train(train)
    args, kwargs = _split(inputs)
    torch._dynamo.reset()
    try:
        with torch.set_grad_enabled(train):
            return str(explain(twin, *args, options=dict(options or {}), **kwargs))
    finally:
        torch._dynamo.reset()
