"""ATen's memory-efficient attention in Inductor's graph → ours, where it is faster.

In fp32 that is what `F.scaled_dot_product_attention` becomes on CUDA: a kernel without tensor
cores. Forward and backward are replaced independently, since either takes what the other's twin
saved.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser import attention, native, rehearse, timing
from fx_fuser.errors import BuildError
from fx_fuser.kernel_spec import KernelSpec
from fx_fuser.plan import gains
from fx_fuser.rehearse import TensorForm
from fx_fuser.timing import Way

log = logging.getLogger("fx_fuser.products")

_aten = torch.ops.aten
FORWARD = _aten._scaled_dot_product_efficient_attention.default
BACKWARD = _aten._scaled_dot_product_efficient_attention_backward.default
TARGETS: dict[Any, str] = {
    FORWARD: "attention",
    BACKWARD: "attention_backward",
}  # and their counters
_LEAST_OPERATIONS = 2**28  # of what is timed: some 20 us of the library's


@dataclass(frozen=True)
class Call:
    """One call of the library's, with its arguments by name."""

    node: Node
    arguments: dict[str, Any]
    tensors: dict[str, Node]

    @classmethod
    def of(cls, node: Node) -> Call | None:
        """None where ours does not do what it does."""
        assert isinstance(node.target, torch._ops.OpOverload)
        declared = node.target._schema.arguments
        found = {a.name: a.default_value for a in declared if a.has_default_value()}
        found |= dict(zip((a.name for a in declared), node.args)) | dict(node.kwargs)
        named = {_SHORT[name]: v for name, v in found.items() if name in _SHORT}
        tensors = {name: v for name, v in named.items() if isinstance(v, Node)}
        absent = set(named) - set(tensors)
        if found["dropout_p"] != 0 or absent - {"bias"}:
            return None
        call = cls(node, found, tensors)
        return call if call._is_supported() else None

    def _is_supported(self) -> bool:
        for name, node in self.tensors.items():
            value: Any = node.meta.get("val")
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                return False
            if value.dtype != torch.float32 or value.ndim != _RANKS.get(name, 4):
                return False
        if any(user.target is not operator.getitem for user in self.node.users):
            return False
        if not self.is_backward:
            return isinstance(self.scale, float)
        # Of a bias no gradient is made; where none is asked for, nobody reads it.
        wanted = self.wanted
        places = {user.args[1] for user in self.node.users}
        return isinstance(self.scale, float) and places <= {*wanted}

    @property
    def name(self) -> str:
        return TARGETS[self.node.target]

    @property
    def is_backward(self) -> bool:
        return self.node.target is BACKWARD

    @property
    def device(self) -> torch.device:
        device: torch.device = self.tensors["q"].meta["val"].device
        return device

    @property
    def wanted(self) -> list[int]:
        mask = self.arguments["grad_input_mask"]
        return [i for i, asked in enumerate(mask[:3]) if asked]

    @property
    def causal(self) -> bool:
        return bool(self.arguments["is_causal"])

    @property
    def scale(self) -> Any:
        given = self.arguments["scale"]
        if given is not None:
            return given
        columns = self.tensors["q"].meta["val"].shape[-1]
        return columns**-0.5 if isinstance(columns, int) and columns else None

    @property
    def with_lse(self) -> bool:
        return bool(self.arguments["compute_log_sumexp"])

    def specs(self) -> list[KernelSpec]:
        with_bias = "bias" in self.tensors
        if self.is_backward:
            return attention.backward_specs(with_bias, self.causal)
        return attention.forward_specs(with_bias)

    def operations(self, forms: dict[str, TensorForm]) -> int:
        products = 5 if self.is_backward else 2
        return 2 * products * math.prod(forms["q"].size) * forms["k"].size[2]


_SHORT = {
    "grad_out_": "dout",
    "query": "q",
    "key": "k",
    "value": "v",
    "attn_bias": "bias",
    "out": "out",
    "logsumexp": "lse",
}
_RANKS = {"lse": 3}


def is_ours(call: Call, on_cpu: bool) -> bool:
    forms: dict[str, TensorForm] = {}
    for name, node in call.tensors.items():
        form = rehearse.form_of_value(node.meta["val"])
        if form is None or 0 in form.size:
            return False
        forms[name] = form
    if not _has_layouts(call):
        log.info("%s is left to the library, whose results are laid out otherwise", call.name)
        return False
    if call.device.type != "cuda":
        return on_cpu
    specs = call.specs()
    if not all(native.runs_on(spec, call.device) for spec in specs):
        return False
    if call.operations(forms) < _LEAST_OPERATIONS:
        return False
    try:
        attention.prepare(specs, call.device)
    except BuildError as error:
        log.info("an attention is left to the library: %s", error)
        return False
    said = [f"{name} {form}" for name, form in forms.items()]
    asked = call.wanted if call.is_backward else call.with_lse
    key = (call.name, call.causal, call.scale, said, asked)
    times = timing.medians(key, functools.partial(_ways, call, forms), call.device)
    if times is None:
        return False
    library, ours = times
    log.info("%s %s: library %s, ours %s", call.name, said, library, ours)
    return gains(ours.ms, library.gpu)


def _has_layouts(call: Call) -> bool:
    """Are our results laid out as the library's, for which the rest was compiled?"""
    op, args, places = _ours(call)
    with _fake_mode(call.node):
        results = op(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))

    def same(ours: Sequence[Any], library: Sequence[Any]) -> bool:
        pairs = zip(ours, library, strict=True)
        return all(statically_known_true(a == b) for a, b in pairs)

    for place, i in places.items():
        ours, library = results[i], call.node.meta["val"][place]
        if not same(ours.shape, library.shape) or not same(ours.stride(), library.stride()):
            return False
    return True


def _ours(call: Call) -> tuple[Any, tuple[Any, ...], dict[int, int]]:
    """The op and its arguments; place of a result of the library's → that of ours."""
    nodes = call.tensors
    kernels = [spec.name for spec in call.specs()] if call.device.type == "cuda" else []
    op = getattr(torch.ops.fx_fuser, call.name).default
    front = (nodes["q"], nodes["k"], nodes["v"], nodes.get("bias"))
    if not call.is_backward:
        return op, (*front, call.causal, call.scale, call.with_lse, kernels), {0: 0, 1: 1}
    args = (nodes["dout"], *front, nodes["out"], nodes["lse"])
    places = {place: i for i, place in enumerate(call.wanted)}
    return op, (*args, call.causal, call.scale, call.wanted, kernels), places


def replace(graph: Graph, call: Call) -> None:
    op, args, places = _ours(call)
    with graph.inserting_before(call.node):
        made = inserted(graph, call.node, op, *args)
    for user in list(call.node.users):
        place: Any = user.args[1]
        with graph.inserting_before(user):
            if place in places:
                result = inserted(graph, user, operator.getitem, made, places[place])
            else:  # seed and offset of a dropout that there is not
                zero = {"dtype": torch.int64, "device": call.device, "pin_memory": False}
                result = inserted(graph, user, _aten.full.default, [], 0, **zero)
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(call.node)


def _fake_mode(node: Node) -> AbstractContextManager[Any]:
    return detect_fake_mode(node.meta["val"]) or nullcontext()


def inserted(graph: Graph, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call with its fake value; what else is known of it, as of `like`."""
    made = graph.call_function(target, args, kwargs)
    made.meta = {k: v for k, v in like.meta.items() if k in ("stack_trace", "original_aten")}
    values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    with _fake_mode(like):
        made.meta["val"] = target(*values, **kwargs)
    return made


# ---- timing -------------------------------------------------------------------------------------


def _ways(call: Call, forms: dict[str, TensorForm]) -> list[Way]:
    generator = torch.Generator(call.device).manual_seed(0)
    t = {name: form.random(generator) for name, form in forms.items()}
    specs = call.specs()
    native.wake(specs, call.device)
    front = (t["q"], t["k"], t["v"], t.get("bias"))
    ours, library = (
        _backward_ways(call, t, front) if call.is_backward else _forward_ways(call, front)
    )
    rehearse.compare([library, ours], [{"product": call.name}], torch.float32)
    return [Way(library), Way(ours, ours)]


_Run = Callable[[], Sequence[Tensor]]


def _names(call: Call) -> list[str]:
    return [spec.name for spec in call.specs()]


def _forward_ways(call: Call, front: tuple[Any, ...]) -> tuple[_Run, _Run]:
    mine, names = torch.ops.fx_fuser.attention.default, _names(call)
    scale, with_lse, causal = call.scale, call.with_lse, call.causal

    def ours() -> Sequence[Tensor]:
        out, lse = mine(*front, causal, scale, with_lse, names)
        return (out, lse) if with_lse else (out,)

    def library() -> Sequence[Tensor]:
        out, lse, _, _ = FORWARD(*front, with_lse, 0.0, causal, scale=scale)
        return (out, lse) if with_lse else (out,)

    return ours, library


def _backward_ways(call: Call, t: dict[str, Tensor], front: tuple[Any, ...]) -> tuple[_Run, _Run]:
    mine, names = torch.ops.fx_fuser.attention_backward.default, _names(call)
    scale, wanted, causal, dout = call.scale, call.wanted, call.causal, t["dout"]
    # As the forward leaves them: random ones would make infinities.
    out, lse, seed, offset = FORWARD(*front, True, 0.0, causal, scale=scale)
    mask = [i in wanted for i in range(3)] + [False]

    def ours() -> Sequence[Tensor]:
        found: Sequence[Tensor] = mine(dout, *front, out, lse, causal, scale, wanted, names)
        return found

    def library() -> Sequence[Tensor]:
        rest = (out, lse, seed, offset, 0.0, mask, causal)
        found = BACKWARD(dout, *front, *rest, scale=scale)
        return [found[i] for i in wanted]

    return ours, library
