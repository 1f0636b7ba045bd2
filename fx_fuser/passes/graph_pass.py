"""What the passes over Inductor's graphs of ATen operations have in common: gemms, or attentions,
are looked at one by one, one that fails is left alone, and the user's own pass of the same setting
runs first."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from fx_fuser.errors import BuildError
from fx_fuser.native import binaries, load
from fx_fuser.native.kernel_spec import KernelSpec

_aten = torch.ops.aten
# Operation → places of its two factors. An argument before them is added.
GEMMS: dict[Any, tuple[int, int]] = {
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
}
# Ops that run on the same kernel whatever strides their tensors have: to ask for some would cost a
# copy where Inductor holds a tensor in others.
_ANY_STRIDES = {"fx_fuser::split_product", "fx_fuser::kept", "fx_fuser::fold"}
OF_VALUE = ("val", "tensor_meta", "eager_input_vals")  # entries of a node's meta about its value


@dataclass(frozen=True)
class GraphPass(CustomGraphPass):
    """A pass over the operations of TARGETS, by default gemms. strict: raise what fails. on_cpu:
    replace there, too, untimed. before: another pass, the user's, which runs first. COUNTERS: in
    `torch._dynamo.utils.counters`, operation → how many. KIND: what a warning calls one of them."""

    COUNTERS: ClassVar[str]
    TARGETS: ClassVar[Collection[Any]] = GEMMS
    KIND: ClassVar[str] = "a gemm"
    strict: bool = False
    on_cpu: bool = False
    before: Any = None

    def __call__(self, graph: Graph) -> None:
        for users in each_pass(self.before):
            users(graph)
        replace = self.replacing(graph)
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in self.TARGETS:
                continue
            try:
                replaced = replace(node)
                if replaced is not None:
                    name = node.target._schema.name.removeprefix("aten::")
                    counters[self.COUNTERS][name + replaced] += 1
            except Exception as error:
                leave(error, self.strict, self.KIND)

    @abstractmethod
    def replacing(self, graph: Graph) -> Callable[[Node], str | None]:
        """A function that replaces an operation, if that is faster. It returns a suffix of the
        operation's name, for the counter; None if the node stays."""

    def uuid(self) -> Any:
        """The key of the pass in Inductor's caches, which keep the graphs that it has edited."""
        return joint_uuid(self.settings(), self.before)

    def settings(self) -> tuple[Any, ...]:
        return binaries.fingerprint(), self.COUNTERS, self.strict, self.on_cpu


def leave(error: Exception, strict: bool, kind: str = GraphPass.KIND) -> None:
    """Warns that an operation that failed is left alone; strict: raises. kind: what it is."""
    if strict:
        raise error
    warnings.warn(
        f"fx_fuser leaves {kind} to the library: {type(error).__name__}: {error}; please report it",
        stacklevel=3,
    )


def each_pass(passes: Any) -> Sequence[Any]:
    """The passes of one of Inductor's settings: none, one or, since torch 2.13, several."""
    several = isinstance(passes, (list, tuple))
    return passes if several else [] if passes is None else [passes]


def joint_uuid(own: tuple[Any, ...], before: Any) -> Any:
    """The `uuid` of a pass that runs others first; None if one of them has none."""
    others = [p.uuid() if hasattr(p, "uuid") else None for p in each_pass(before)]
    return None if None in others else (*own, *others)


def call(graph: Graph, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node with the meta of `like`: of the same module, in forward or backward like it. An op
    of ours gets its tensors with the strides that they have here, for which it was chosen."""
    made = graph.call_function(target, args, kwargs)
    made.meta = {k: v for k, v in like.meta.items() if k not in OF_VALUE}
    values, named = map_arg((args, kwargs), lambda n: n.meta["val"])
    if _needs_strides(target):
        # Without this entry Inductor hands an op that a pass adds what it likes, whatever a `clone`
        # in front of it says (torch/_inductor/graph.py: "inserted by a custom pass").
        made.meta["eager_input_vals"] = (values, named)
    results = (v for v in tree_leaves(like.meta["val"]) if v is not None)  # some are not asked for
    with next(results).fake_mode:
        made.meta["val"] = target(*values, **named)
    return made


def _needs_strides(target: Any) -> bool:
    """Is it an op of ours with a kernel that may decline tensors of other strides?"""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "fx_fuser":
        return False
    return target._schema.name not in _ANY_STRIDES


_failed: set[tuple[KernelSpec, torch.device]] = set()  # that do not build


def loaded(
    specs: Sequence[KernelSpec], device: torch.device, kind: str, strict: bool = False
) -> set[KernelSpec]:
    """Builds and loads the kernels that run on the device, all at once; returns those that are
    loaded. One warning names what does not build; that is not tried again. kind: the operations
    that the kernels are for.

    Raises:
        BuildError: strict, and one does not build.
    """
    has = [spec for spec in specs if load.runs_on(spec, device)]
    wanted = [spec for spec in has if (spec, device) not in _failed]
    try:
        load.prepare(wanted, device)
        return set(wanted)
    except BuildError as error:
        if strict:
            raise
        warnings.warn(
            f"fx_fuser leaves {kind} to the library: {error}; please report it", stacklevel=2
        )
    for spec in wanted:
        try:
            load.prepare([spec], device)
        except BuildError:
            _failed.add((spec, device))
    return {spec for spec in wanted if (spec, device) not in _failed}
