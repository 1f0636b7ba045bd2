"""Are the fused sites right on the user's own values?  `options={"verify": "first_call"}`.

The untouched graph is interpreted once on copies of its inputs. Where a site ends, its fused op,
the user's own operations and these in float64 run on the same values, in training with a backward
from a random gradient. The bound is that of `verify.accuracy`. Inputs, random state and modes are
restored afterwards, and nothing is kept.

While compiling, Dynamo gives a backend the inputs of the coming call, so the first call is verified
then. Only DDPOptimizer gives fake inputs: then, as with "always", `watched` verifies at the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from fx_fuser.errors import VerifyError
from fx_fuser.graph.match.pattern import Match
from fx_fuser.graph.match.rewrite import Call
from fx_fuser.graph.read.nodes import hint_of
from fx_fuser.verify import rivals
from fx_fuser.verify.accuracy import Copier, same_random_state


@dataclass
class Verification:
    """The sites to verify in one graph and its bodies.

    graphs: module → its untouched graph. calls: last node of a match → the match and the call that
    is to replace it. tf32: fused gemms use TF32, so the user's own may as well.
    faults: last node → what is wrong there.
    """

    graphs: Mapping[GraphModule, Graph]
    calls: Mapping[Node, tuple[Match, Call]]
    tf32: bool = False
    faults: dict[Node, str] = field(default_factory=dict)

    def run(self, module: GraphModule, inputs: Sequence[Any]) -> dict[Node, str]:
        """Interpret the graph on copies of the inputs; returns the faults.

        Raises:
            VerifyError: a second run of this graph would have side effects.
            Exception: what the graph itself raises on these inputs.
        """
        _refuse(module, inputs)
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
    """Are these real values, and may kernels run on them now?"""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return False
    tensors = [v for v in inputs if isinstance(v, Tensor)]
    return not any(isinstance(t, FakeTensor) or t.is_meta for t in tensors)


def _number(value: Any) -> Any:
    """A size in this trace; comparing the SymInt would add a guard."""
    return hint_of(value) if isinstance(value, torch.SymInt) else value


def _refuse(module: GraphModule, inputs: Sequence[Any]) -> None:
    """Other ranks may not be verifying and would not answer; a module has buffers of its own."""
    remedy = "leave option 'verify' out"
    graphs = [m.graph for m in module.modules() if isinstance(m, GraphModule)]
    for node in (n for graph in graphs for n in graph.nodes):
        defined_in = getattr(node.target, "__module__", None) or ""
        # Not by str(target): a function's has its address, which may be any hex digits.
        if defined_in.startswith(("torch.distributed", "torch._ops.c10d", "torch._ops._c10d")):
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
            fault = rivals.fault_of(match, call, self.held.pop(n), value, self.what.tf32)
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


# ---- at a call ----------------------------------------------------------------------------------


def watched(
    compiled: Callable[..., Any],
    as_written: GraphModule,
    is_wrong: Callable[[GraphModule, Sequence[Any]], bool],
    every: bool,
) -> Callable[..., Any]:
    """`compiled`, verified at the first call with real inputs, or at every one.

    as_written: the untouched graph. Once `is_wrong`, it runs in place of `compiled` for good,
    uncompiled: guards of something compiled now would come too late.
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
