"""Assertions for your own test suite: these sites stay fused, and stay right.

    from fx_fuser.testing import assert_equivalent, assert_fused

    assert_fused(model, (x,), {"linear_sigmoid_mul_mul": 32})
    assert_equivalent(model, (x,), train=True)

Both work on copies: the model, the inputs, the random state and fx_fuser's counters stay as they
were. Both reset Dynamo, since code that is already compiled would not be counted.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves, tree_map

from fx_fuser.anchors import ANCHORS
from fx_fuser.arguments import check_flag, check_mapping, check_model, fault_of_call, shown
from fx_fuser.errors import OptionError
from fx_fuser.explain import explain
from fx_fuser.graph.match.grow import AUTO
from fx_fuser.options import Options
from fx_fuser.passes import products
from fx_fuser.registry import registered_patterns
from fx_fuser.verify.accuracy import (
    NEIGHBOURS,
    PROMISED,
    Bound,
    Copier,
    Observed,
    has_roundings,
    neighbour_of,
    remaining_faults,
    same_random_state,
)

_COUNTERS = ("fx_fuser", "fx_fuser_left", "fx_fuser_wrong", products.COUNTERS)


def assert_fused(
    model: Callable[..., Any],
    inputs: Any,
    expected: Mapping[str, int],
    train: bool = False,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Compile the model, run it once, and compare the fused sites with `expected`, exactly.

    inputs: a tuple of arguments, or `(args, kwargs)`. expected: pattern → number of sites; a
    pattern that is not named must not be fused at all. Grown tails, `auto_<anchor>`, count only if
    one is named, since the GPU decides which are worth fusing.
    train: in training mode, forward and backward; otherwise in eval mode, under `no_grad`.
    options: as for the backend. `strict` is on by default, so that a failure of fx_fuser raises
    here instead of leaving the model unfused.
    Raises AssertionError with the table of `fx_fuser.explain`, OptionError for a bad argument.
    """
    _check_arguments(model, inputs, train, options)
    _check_expected(expected)
    with _fresh_counters():
        observe(model, inputs, train, lambda m: _compiled(m, options))
        found, left = ({k: v for k, v in counters[c].items() if v} for c in _COUNTERS[:2])
    if not any(name.startswith(AUTO) for name in expected):
        found = {k: v for k, v in found.items() if not k.startswith(AUTO)}
    wanted = {name: count for name, count in expected.items() if count}
    if found == wanted:
        return
    lines = []
    for name in sorted({*found, *wanted, *left}):
        line = f"{name}: {found.get(name, 0)} fused, {wanted.get(name, 0)} expected"
        if name in left:
            line += (
                f"; {left[name]} left to the inner compiler, as fusing gains nothing on this GPU "
                "(options={'plan': 'always'} fuses anyway)"
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
    """The compiled model is as near to float64 as eager mode: every output and buffer, every input
    that it writes to, and in training every gradient.

    inputs, train and options: as in `assert_fused`. The model runs three times: compiled, eagerly,
    and eagerly in float64. If a value is out of bounds, the errors of other runs count as eager's:
    Inductor's on a CPU, where it compiles the plain operations, and eager's on parameters and
    inputs that differ by a rounding.
    A model that draws random numbers cannot be compared: set its dropout to 0.
    Raises AssertionError with every value that is out of bounds and the table of `explain`,
    OptionError for a bad argument.
    """
    _check_arguments(model, inputs, train, options)
    if not isinstance(bound, Bound):
        raise OptionError(f"bound is {shown(bound)}; give a fx_fuser.verify.accuracy.Bound")
    eager = observe(model, inputs, train)
    exact = observe(model, inputs, train, dtype=torch.float64, like=eager)
    with _fresh_counters():
        found = observe(model, inputs, train, lambda m: _compiled(m, options), like=eager)
        inner = (options or {}).get("inner", "inductor")
        run = (model, inputs, train, eager)
        peers = _inductors(*run) if inner == "inductor" else ()
        faults = remaining_faults(found, eager, exact, bound, peers, _neighbours(*run))
    if faults:
        table = _explained(model, inputs, train, options)
        raise AssertionError("\n".join([*faults, "", table]))


# ---- arguments -------------------------------------------------------------------------------


def _check_arguments(model: Any, inputs: Any, train: Any, options: Any) -> None:
    check_model(model, "(model, inputs, …)")
    check_flag("train", train)
    Options.parse(None, options, [p.name for p in registered_patterns()])
    if fault := fault_of_call(model, *_split(inputs)):
        raise OptionError(
            f"the model does not take these inputs: {fault}; give a tuple of its arguments, or "
            "(args, kwargs)"
        )


def _check_expected(expected: Any) -> None:
    """Check the names: a name that nothing has would pass, whatever is fused."""
    example = "give a dict, say {'linear_sigmoid_mul_mul': 2}"
    check_mapping("expected", expected, example)
    known = [*(p.name for p in registered_patterns()), *(f"{AUTO}{kind}" for kind in ANCHORS)]
    for name, count in expected.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise OptionError(f"expected names the pattern {name!r}, which is not known; {hint}")
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise OptionError(f"expected[{name!r}] is {shown(count)}; give the number of sites")


# ---- one run ---------------------------------------------------------------------------------


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
    like: an earlier run; the random gradients are exact in its dtypes.
    grad: run backward?  By default as `train` says.
    """
    grad = train if grad is None else grad
    twin = copy.deepcopy(model)
    if isinstance(twin, nn.Module):
        twin = twin.train(train) if dtype is None else twin.train(train).to(dtype)
    args, kwargs = tree_map(Copier(dtype), _split(inputs))
    with same_random_state(), torch.set_grad_enabled(grad):
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


def neighbour(
    model: Callable[..., Any],
    inputs: Any,
    train: bool,
    like: Observed,
    generator: torch.Generator,
    eps: float = 0.0,
) -> Observed:
    """Eager on parameters, buffers and inputs that differ by at most a rounding of their dtype, or
    of one with that eps.

    A value's error comes not only from its own rounding: where a sum cancels, eager's own error
    may be zero by luck, and then bounds nothing.
    """

    def call(twin: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            held = [*twin.parameters(), *twin.buffers()] if isinstance(twin, nn.Module) else []
            for tensor in {id(t): t for t in (*held, *tree_leaves((args, kwargs)))}.values():
                is_written = isinstance(tensor, Tensor) and has_roundings(tensor)
                if is_written and torch._debug_has_internal_overlap(tensor) != 1:
                    tensor.detach().copy_(neighbour_of(tensor, generator, eps))
            return twin(*args, **kwargs)

        return run

    return observe(model, inputs, train, call, like=like)


def _inductors(
    model: Callable[..., Any], inputs: Any, train: bool, eager: Observed
) -> Iterator[Observed]:
    """Inductor's run, if its error is as good a bound as eager's."""
    if not _on_cuda(eager):
        torch._dynamo.reset()
        yield observe(model, inputs, train, torch.compile, like=eager)


def _neighbours(
    model: Callable[..., Any], inputs: Any, train: bool, eager: Observed
) -> Iterator[Observed]:
    seen = filter(has_roundings, eager.everything().values())
    eps = max((torch.finfo(t.dtype).eps for t in seen), default=0.0)  # perhaps autocast's
    generator = torch.Generator().manual_seed(0)
    for _ in range(NEIGHBOURS):
        yield neighbour(model, inputs, train, eager, generator, eps)


def _split(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tuple of arguments, or `(args, kwargs)`, or one argument."""
    if not isinstance(inputs, (tuple, list)):
        return (inputs,), {}
    if len(inputs) == 2 and isinstance(inputs[0], (tuple, list)) and isinstance(inputs[1], dict):
        return tuple(inputs[0]), inputs[1]
    return tuple(inputs), {}


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _random(narrow: Tensor, output: Tensor) -> Tensor:
    """A random gradient for the output, exact in the narrow tensor's dtype."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return drawn.to(narrow.dtype).to(output.device, output.dtype)


# ---- around a run ----------------------------------------------------------------------------


def _compiled(model: Callable[..., Any], options: Mapping[str, Any] | None) -> Callable[..., Any]:
    return torch.compile(model, backend="fx_fuser", options={"strict": True, **(options or {})})


@contextlib.contextmanager
def _fresh_counters() -> Iterator[None]:
    """Resets Dynamo and fx_fuser's counters; restores the counts afterwards."""
    before = {name: counters.pop(name) for name in _COUNTERS if name in counters}
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()
        for name in _COUNTERS:
            counters.pop(name, None)
        counters.update(before)


def _on_cuda(seen: Observed) -> bool:
    return any(t.is_cuda for t in seen.everything().values())


def _explained(
    model: Callable[..., Any], inputs: Any, train: bool, options: Mapping[str, Any] | None
) -> str:
    """The table of `explain` for the model as it was run."""
    twin = copy.deepcopy(model)
    if isinstance(twin, nn.Module):
        twin.train(train)
    args, kwargs = _split(inputs)
    torch._dynamo.reset()
    try:
        with torch.set_grad_enabled(train):
            return str(explain(twin, *args, options=options, kwargs=kwargs))
    finally:
        torch._dynamo.reset()
