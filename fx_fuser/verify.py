"""Are the fused sites right on the user's own values?  `options={"verify": "first_call"}`.

The untouched graph is interpreted once on copies of its inputs. Where a site ends, its fused op,
the user's own operations and the same in float64 run side by side on the values of that moment, in
training with a backward from a random gradient, and are held to the bound of `fx_fuser.accuracy`.
What the copies were made of, the random state and all modes are as before afterwards, and nothing
of it is kept.

While compiling, Dynamo gives a backend the inputs of the call that is to follow, so that is where
the first call is verified. Only DDPOptimizer gives fake ones: then, as with "always", `watched`
verifies when called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from fx_fuser.accuracy import PROMISED, Bound, Copier, Observed, compare, same_random_state
from fx_fuser.errors import VerifyError
from fx_fuser.match import Match
from fx_fuser.rewrite import Call
from fx_fuser.spell import hint_of, meta_tensor

# A gradient that is a sum of terms that cancel may miss the bound by bad luck. It has failed if it
# does so for each of several gradients of the result; a value has no second chance.
_DRAWS = 4
_STATISTICS = ("running_mean", "running_var")
_NARROWING = ("float", "half", "bfloat16")  # methods


@dataclass
class Verification:
    """What is verified in one graph and its bodies.

    graphs: module → its untouched graph. calls: last node of a match → the match and the call that
    is to replace it. tf32: TF32 is asked of fused products, so the user's own may take it as well.
    faults: last node → what is wrong there.
    """

    graphs: Mapping[GraphModule, Graph]
    calls: Mapping[Node, tuple[Match, Call]]
    tf32: bool = False
    faults: dict[Node, str] = field(default_factory=dict)

    def run(self, module: GraphModule, inputs: Sequence[Any]) -> dict[Node, str]:
        """Interpret the graph on copies of the inputs; returns the faults.

        Raises:
            VerifyError: a second run of this graph would not be without consequences.
            Exception: what the graph itself raises on these inputs.
        """
        _refuse(self.graphs, inputs)
        copied = Copier()
        entered: list[Any] = []
        with same_random_state(), torch.no_grad(), _disable_current_modes():
            values = [copied(v).detach() if isinstance(v, Tensor) else _number(v) for v in inputs]
            try:
                _Interpreter(module, self, entered).run(*values)
            finally:
                for mode in reversed(entered):  # the graph raised within autocast
                    _exit_autocast(mode)
        return self.faults


def is_verifiable(inputs: Sequence[Any]) -> bool:
    """Are these values, and may work be done on them now?"""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return False
    tensors = [v for v in inputs if isinstance(v, Tensor)]
    return not any(isinstance(t, FakeTensor) or t.is_meta for t in tensors)


def _number(value: Any) -> Any:
    """A size of this trace; asking the SymInt itself would add a guard."""
    return hint_of(value) if isinstance(value, torch.SymInt) else value


def _refuse(graphs: Mapping[GraphModule, Graph], inputs: Sequence[Any]) -> None:
    """Other ranks may not be verifying and would not answer; a module has buffers of its own."""
    remedy = "leave option 'verify' out"
    for node in (n for graph in graphs.values() for n in graph.nodes):
        module = getattr(node.target, "__module__", None) or ""
        if "c10d" in str(node.target) or module.startswith("torch.distributed"):
            raise VerifyError(f"the graph has a collective operation, {node.target}; {remedy}")
        if node.op == "call_module":
            raise VerifyError(f"the graph calls a module, {node.target}; {remedy}")
    for value in inputs:
        if is_traceable_wrapper_subclass(value):
            raise VerifyError(f"an input is a {type(value).__name__}; {remedy}")


class _Interpreter(Interpreter):
    """Runs the user's graph, and each site's rivals where the site ends."""

    def __init__(self, module: GraphModule, what: Verification, entered: list[Any]) -> None:
        super().__init__(module, graph=what.graphs.get(module, module.graph))
        self.what, self.entered = what, entered
        # Kept until the site ends: the interpreter drops a value after its last reader.
        self.held: dict[Node, dict[Node, Any]] = {}
        self.holders: dict[Node, list[Node]] = {}
        for root, (match, _) in what.calls.items():
            for operand in match.operands:
                self.holders.setdefault(operand, []).append(root)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        for root in self.holders.get(n, ()):
            self.held.setdefault(root, {})[n] = value
        if n in self.what.calls and n not in self.what.faults:
            match, call = self.what.calls[n]
            fault = _fault(match, call, self.held.pop(n), self.what.tf32)
            if fault:
                self.what.faults[n] = fault
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return value.detach().clone() if isinstance(value, Tensor) else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        body = args[0] if args else None
        if isinstance(body, GraphModule) and body in self.what.graphs:
            given = [a for a in args[1:] if not isinstance(a, str)]  # invoke_subgraph's own name
            return _Interpreter(body, self.what, self.entered).run(*given)
        value = super().call_function(target, args, kwargs)
        if target is _enter_autocast:
            self.entered.append(value)
        elif target is _exit_autocast:
            self.entered.remove(args[0])
        return value


# ---- one site -----------------------------------------------------------------------------------

Leaves = Mapping[Node, Tensor]


def _fault(match: Match, call: Call, values: Mapping[Node, Any], tf32: bool) -> str:
    """What is wrong with the fused op on these values of its operands, or nothing."""

    def as_written(leaves: Leaves) -> list[Tensor]:
        y = _replay(match, leaves, wide=False)
        return [y, *(leaves[n] for n in call.results)]

    def in_float64(leaves: Leaves) -> list[Tensor]:
        with torch.autocast(match_device, enabled=False):
            y = _replay(match, leaves, wide=True)
        return [y, *(leaves[n] for n in call.results)]

    def fused(leaves: Leaves) -> list[Tensor]:
        args = torch.fx.node.map_arg(call.args, leaves.__getitem__)
        return call.target(*args)

    match_device = meta_tensor(match.root).device.type  # type: ignore[union-attr]
    faults: list[str] = []
    for draw in range(_DRAWS):
        with _precision(tf32):
            eager = _observe(match, values, draw, as_written)
        exact = _observe(match, values, draw, in_float64, wide=True)
        try:
            found = _observe(match, values, draw, fused)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        faults = compare(found, eager, exact, _bound(match))
        if not faults or not all(fault.startswith("gradient of") for fault in faults):
            break
    return "; ".join(faults)


def _bound(match: Match) -> Bound:
    """What is promised of the dtype of the product: under autocast, results may be wider.

    Nothing is promised of a gradient's layout.
    """
    c = meta_tensor(match.site.nodes[0]).dtype  # type: ignore[union-attr]
    wider = [d for d in PROMISED.floor if PROMISED.floor[d] < PROMISED.floor[c]]
    factor, floor = (
        {**of, **dict.fromkeys(wider, of[c])} for of in (PROMISED.factor, PROMISED.floor)
    )
    return replace(PROMISED, factor=factor, floor=floor, strides=False)


def _observe(
    match: Match,
    values: Mapping[Node, Any],
    draw: int,
    run: Callable[[Leaves], list[Tensor]],
    wide: bool = False,
) -> Observed:
    """One of the rivals: its values, and the gradients of the operands that ask for one.

    draw: which random gradient of the result. wide: operands in float64.
    """
    root: Any = meta_tensor(match.root)
    leaves = {node: _leaf(match, node, values[node], wide) for node in match.operands}
    with _by_itself(), torch.set_grad_enabled(root.requires_grad):
        y, *statistics = run(leaves)
        seen = Observed({"value": y.detach()}, differentiable=[y.requires_grad])
        seen.state = dict(zip(_STATISTICS, statistics))
        if root.requires_grad:
            generator = torch.Generator(y.device).manual_seed(draw)
            dy = torch.randn(y.shape, generator=generator, dtype=root.dtype, device=y.device)
            with torch.autocast(y.device.type, enabled=False):
                torch.autograd.backward(y, dy.to(y.dtype))
    roles = {**match.site.operands, **match.wildcards}
    grads = {n: leaves[o].grad for n, o in roles.items() if isinstance(o, Node)}
    seen.grads = {name: grad for name, grad in grads.items() if grad is not None}
    return seen


def _leaf(match: Match, node: Node, value: Tensor, wide: bool) -> Tensor:
    """An operand on its own: what is computed from it reaches nothing else."""
    leaf = value.detach()
    if node in [match.site.operands.get(name) for name in _STATISTICS]:
        leaf = leaf.clone()  # the only operands that a matched node writes to
    if wide and leaf.is_floating_point():
        leaf = leaf.double()
    return leaf.requires_grad_(meta_tensor(node).requires_grad)  # type: ignore[union-attr]


def _replay(match: Match, leaves: Leaves, wide: bool) -> Tensor:
    """The matched nodes, from the operands; wide: whatever they cast to is float64 instead."""
    view, known = match.view, dict[Node, Any]()

    def value_of(reader: Node, node: Node) -> Any:
        if node not in known:
            read = view.value(reader, node)
            # Between an operand and the match: a weight's transpose, a 0-d tensor's item().
            known[node] = leaves[read] if read in leaves else run(node)
        return known[node]

    def run(node: Node) -> Any:
        def argument(a: Any) -> Any:
            if isinstance(a, Node):
                return value_of(node, a)
            cast = wide and isinstance(a, torch.dtype) and a.is_floating_point
            return torch.float64 if cast else a

        args, kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), argument)
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        method = "double" if wide and node.target in _NARROWING else str(node.target)
        return getattr(args[0], method)(*args[1:], **kwargs)

    for node in sorted(match.nodes, key=view.order.__getitem__):
        known[node] = run(node)
    return known[match.root]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _by_itself() -> Iterator[None]:
    """Autograd without what the user has set around the model.

    That is the hooks by which a checkpoint ends its recomputation, compiled autograd, and the cache
    in which autocast keeps the casts of leaves until its region ends.
    """
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with saved_tensors_hooks(_itself, _itself), compiled_autograd._disable():
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)


@contextmanager
def _precision(tf32: bool) -> Iterator[None]:
    """The user's own products may take TF32 as well, where the fused one was told to."""
    settings: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]  # type: ignore[attr-defined]
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings if tf32 else ():
            setting.fp32_precision = "tf32"
        yield
    finally:
        for setting, value in zip(settings, before):
            setting.fp32_precision = value


# ---- at a call ----------------------------------------------------------------------------------


def watched(
    compiled: Callable[..., Any],
    as_written: GraphModule,
    is_wrong: Callable[[GraphModule, Sequence[Any]], bool],
    every: bool,
) -> Callable[..., Any]:
    """`compiled`, verified at the first call with real inputs, or at every one.

    as_written: the untouched graph, which takes over for good once `is_wrong`: uncompiled, since
    the guards of whatever is compiled now would be too late.
    """
    lock = threading.Lock()
    pending: list[GraphModule] = [as_written]
    del as_written

    def call(*inputs: Any) -> Any:
        nonlocal compiled
        with lock:
            if pending and is_verifiable(inputs):
                wrong = is_wrong(pending[0], inputs)
                if wrong:
                    compiled = pending[0].forward
                if wrong or not every:
                    pending.clear()
            run = compiled
        return run(*inputs)

    return call
