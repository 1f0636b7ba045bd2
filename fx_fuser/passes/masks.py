"""Attention: causal and all-true masks are removed, and what no kernel takes gets another form.

A mask is removed if the graph makes it itself (below); forms are `fx_fuser.passes.attention`'s.

transformers gives a causal language model `is_causal=True` in eager mode, and builds a mask out of
`arange`s when it is traced. torch's kernels then read the mask, and compute what it hides: on an
H200 (2026-11-23, torch 2.11.0+cu130, Inductor), GPT-2's training step at 4 × 1024 in fp32 spends
20.7 ms in attention, in eager mode 13.4; and in 16 bits FlashAttention takes no mask at all. Such a
mask reads none of the model's inputs, so it is the same in every call: it is evaluated once, here.

`is_causal`: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch import predispatch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node

from fx_fuser.graph.attention.calls import ATTENTIONS
from fx_fuser.graph.read.naming import called, statement
from fx_fuser.graph.read.nodes import (
    argument_of,
    body_of,
    is_torchs,
    meta_tensor,
    nodes_in,
    storages,
    writes_of,
)
from fx_fuser.graph.read.view import Region
from fx_fuser.passes import attention, strides
from fx_fuser.passes.bounds import Known, name_of_call

# The operations that masks are made of: none is random, waits for another process, or returns
# memory with undefined values. In place too (`masked_fill_`), and as operators (`__and__`).
_RUN_AHEAD = frozenset(
    """
    arange ones zeros full tensor scalar_tensor ones_like zeros_like full_like new_ones new_zeros
    new_full new_tensor eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and
    bitwise_or bitwise_not bitwise_xor and or xor not invert iand ior ixor where masked_fill fill
    zero tril triu add sub mul iadd isub imul rsub radd rmul neg abs minimum maximum clamp cumsum
    diff getitem setitem index index_select expand expand_as unsqueeze squeeze view reshape flatten
    permute transpose swapaxes t repeat cat concat stack to type type_as bool int long float half
    bfloat16 double contiguous clone detach size dim numel getattr numpy_T mT add_batch_dim
    remove_batch_dim
    """.split()  # noqa: SIM905
)
_MODULES = {"builtins", "_operator", "torch", "torch.functional", "torch._ops.aten"}
_MODULES |= {predispatch.__name__}
# They read the shape, dtype and device of their first argument, not its values.
_LIKE = {f"{what}_like" for what in ("ones", "zeros", "full")}
_LIKE |= {f"new_{what}" for what in ("ones", "zeros", "full", "tensor")}
_NESTING = {predispatch._vmap_increment_nesting: 1, predispatch._vmap_decrement_nesting: -1}
FORM, FORMULA, GATHER = "form", "formula", "gather"
_LARGEST = 1 << 29  # elements of a tensor that is evaluated
# Arguments of an attention.
_MASK, _CAUSAL = (3, "attn_mask"), (5, "is_causal")


@dataclass(frozen=True)
class Mask:
    """What became of an attention or of its mask.

    done: "causal" or "open": the mask was removed. FORM: the attention was rewritten; reason is
    what was in the way. FORMULA: torch computes it by its formula, and reason says why. GATHER: no
    attention but the gather of what is added to its scores is one of fx_fuser's, and reason says
    what it gains. "": the mask stays, and reason says why.
    """

    node: Node
    done: str = ""
    reason: str = ""

    @property
    def is_edit(self) -> bool:
        return self.done not in ("", FORMULA)


class Stays(Exception):
    """Why a mask, or an attention as it is written, is kept."""


# What a mask is made of and how it is seen → "causal" or "open", or the reason why it is neither.
Proofs = dict[tuple[Any, ...], tuple[str, str]]


@dataclass
class Scope:
    """The nodes of a graph before one of them.

    writes: node that writes → what it writes to. If the graph is the body of a region that is
    called once: outer, the nodes before the call; given, placeholder → argument of the call.
    """

    nodes: Sequence[Node]
    writes: Mapping[Node, Sequence[Node]]
    outer: Scope | None = None
    given: Mapping[Node, Node] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, outer: Scope | None, call: Node | None) -> Scope:
        nodes = list(graph.nodes)
        writes = {node: written for node in nodes if (written := writes_of(node))}
        if outer is None or call is None:
            return cls(nodes, writes)
        inputs = graph.find_nodes(op="placeholder")
        arguments = call.args[len(call.args) - len(inputs) :]
        given = {p: a for p, a in zip(inputs, arguments) if isinstance(a, Node)}
        return cls(nodes, writes, outer, given)

    def before(self, at: int) -> Scope:
        return replace(self, nodes=self.nodes[:at])

    def written(self) -> set[Any]:
        """The memory that something writes to."""
        outer = set() if self.outer is None else self.outer.written()
        return outer | storages(n for nodes in self.writes.values() for n in nodes)

    def all_given(self) -> dict[Node, Node]:
        outer = {} if self.outer is None else self.outer.all_given()
        return {**outer, **self.given}


class Reader:
    """Reads the graphs of one module; a region's graph comes after the graph that calls it."""

    def __init__(self) -> None:
        self._calls: dict[GraphModule, list[tuple[Scope, Node]]] = {}

    def simplify(self, module: GraphModule, graph: Graph, on_cpu: bool = False) -> list[Mask]:
        """Remove masks that are proven causal or open from the attentions of a graph, in place, and
        give an attention a form that a fused kernel takes.

        graph: the module's, or a copy. on_cpu: give it that form on a CPU, too.
        """
        scope = self.scope(module, graph)
        known: Proofs = {}
        found: list[Mask] = []
        forms: attention.Forms = {}
        region = Region()
        for at, node in enumerate(scope.nodes):
            region = region.after(node)
            body = body_of(node)
            # An `invoke_subgraph` may share its body with others, in other graphs.
            if body is not None and getattr(node.target, "__name__", "") != "invoke_subgraph":
                self._calls.setdefault(body, []).append((scope.before(at), node))
            if node.op != "call_function" or node.target not in ATTENTIONS:
                continue
            mask, mask_removed = _mask_of(node), False
            if _needs_formula(node, scope):
                if mask is not None:
                    reason = "its result is written to, and a kernel's backward reads it"
                    found.append(Mask(node, reason=reason))
                continue
            if mask is not None:
                found.append(_without_mask(node, mask, scope.before(at), region, known))
                mask_removed = found[-1].is_edit
            tells = functools.partial(_known, scope.before(at))
            fitted = attention.fit(node, region, on_cpu, tells, forms, mask_removed)
            if fitted is not None:
                why, stays = fitted
                found.append(Mask(node, FORM if why else FORMULA, why or stays))
        return found

    def scope(self, module: GraphModule, graph: Graph) -> Scope:
        """All nodes of a graph as it is now, after those that its caller has before the call."""
        calls = self._calls.get(module, [])
        return Scope.of(graph, *(calls[0] if len(calls) == 1 else (None, None)))


def _needs_formula(node: Node, scope: Scope) -> bool:
    """In training a kernel's backward reads the result. torch's formula lets a user write to it."""
    was = meta_tensor(node)
    if was is None or not was.requires_grad:
        return False
    sure = (ns for n, ns in scope.writes.items() if is_torchs(n))
    return not storages([node]).isdisjoint(storages(n for ns in sure for n in ns))


def _known(scope: Scope) -> Known:
    """What a graph tells about a node's numbers."""

    def value(node: Node) -> Tensor | None:
        try:
            made = _evaluated(node, _makers([node], scope), scope.all_given())
            return None if torch._C._functorch.is_functorch_wrapped_tensor(made) else made
        except Exception:  # the user's program may raise anything
            return None

    return Known(functools.cache(value), scope.all_given(), frozenset(scope.written()))


def _without_mask(node: Node, mask: Node, scope: Scope, region: Region, known: Proofs) -> Mask:
    try:
        kind = proven(scope, known, mask, _length(node))
        _take_away(node, kind, region)
    except Stays as stays:
        return Mask(node, reason=str(stays))
    erase_unread([mask])
    return Mask(node, kind)


def _mask_of(node: Node) -> Node | None:
    """The mask of an attention; None if it has no mask, or is causal as well."""
    mask = argument_of(node, *_MASK)
    causal = argument_of(node, *_CAUSAL) not in (None, False)
    return mask if isinstance(mask, Node) and not causal else None


def as_it_is(mask: Tensor) -> Tensor:
    return mask


def proven(
    scope: Scope, known: Proofs, mask: Node, length: tuple[int, int],
    seen: Callable[[Tensor], Tensor] = as_it_is,
) -> str:  # fmt: skip
    """ "causal" or "open"; raises Stays if it is not proven either.

    seen: the mask's value as an attention reads it: a bool tensor of the keys that it shows, or
    numbers that it adds. It is hashable, and equal to functions that do the same.
    """
    makers = _makers([mask], scope)
    key = (mask, length, seen, *makers)
    if key not in known:
        known[key] = _what_it_is(mask, makers, scope, length, seen)
    kind, reason = known[key]
    if reason:
        raise Stays(reason)
    return kind


def _length(node: Node) -> tuple[int, int]:
    """The numbers of queries and of keys."""
    tensors = [meta_tensor(a) for a in node.args[:3] if isinstance(a, Node)]
    named = (node.kwargs.get(n) for n in ("query", "key", "value"))
    tensors += [meta_tensor(a) for a in named if isinstance(a, Node)]
    if len(tensors) != 3 or any(type(t) is not FakeTensor for t in tensors):
        raise Stays("its operands are not plain tensors")
    lengths = tuple(t.shape[-2] for t in tensors[:2])  # type: ignore[union-attr]
    if not all(isinstance(n, int) for n in lengths):
        raise Stays("its lengths are dynamic")
    return lengths  # type: ignore[return-value]


def _what_it_is(
    mask: Node, makers: Sequence[Node], scope: Scope, length: tuple[int, int],
    seen: Callable[[Tensor], Tensor],
) -> tuple[str, str]:  # fmt: skip
    """("causal" or "open", ""), or ("", the reason why it is neither)."""
    try:
        return _kind_of(seen(_evaluated(mask, makers, scope.all_given())), length), ""
    except Stays as stays:
        return "", str(stays)
    except Exception as error:  # the user's program may raise anything
        return "", f"its mask cannot be evaluated: {type(error).__name__}: {error}"


def _makers(masks: Sequence[Node], scope: Scope) -> list[Node]:
    """All nodes that make the masks or write to memory of such nodes, in order."""
    makers: set[Node] = set()
    todo = list(masks)
    while todo:
        while todo:
            node = todo.pop()
            if node not in makers:
                if node not in scope.given:
                    _check(node)
                makers.add(node)
                todo += _values_read(node)
        memory = storages(makers)
        for node in scope.nodes:
            written = scope.writes.get(node, ()) if node not in makers else ()
            if not makers.isdisjoint(written) or not memory.isdisjoint(storages(written)):
                todo.append(node)
    if any(name_of_call(n) == "add_batch_dim" for n in makers):
        makers.update(n for n in scope.nodes if n.target in _NESTING)
    for node in makers:
        like = _like(node)
        # Without the mask `like` would be dead code; if it is random it must still draw its
        # numbers.
        if like is None or like in makers or like.op in ("placeholder", "get_attr"):
            continue
        if makers.issuperset(like.users):
            raise Stays(f"its mask takes its shape from {called(like)}, which nothing else reads")
    given = [scope.given[n] for n in makers if n in scope.given]
    outer = _makers(given, scope.outer) if given and scope.outer is not None else []
    return outer + [n for n in scope.nodes if n in makers]


def _like(node: Node) -> Node | None:
    """The argument of which the node reads only shape, dtype and device, no values."""
    first = node.args[0] if name_of_call(node) in _LIKE and node.args else None
    return first if isinstance(first, Node) else None


def _values_read(node: Node) -> tuple[Node, ...]:
    rest = node.args[1:] if name_of_call(node) in _LIKE else node.args
    return tuple(dict.fromkeys(nodes_in((rest, node.kwargs))))


def _check(node: Node) -> None:
    """Raises Stays if the node cannot be evaluated here."""
    if node.op in ("placeholder", "get_attr"):
        raise Stays(f"its mask depends on {called(node)}")
    if not _is_run_ahead(node):
        raise Stays(f"its mask is made by {statement(node)}, which cannot be evaluated here")
    value = node.meta.get("example_value")
    if isinstance(value, Tensor):
        if not all(isinstance(n, int) for n in value.shape):
            raise Stays("its mask has dynamic sizes")
        if _elements(value) > _LARGEST:
            raise Stays(f"its mask is made of {_elements(value)} elements, too many to look at")


def _is_run_ahead(node: Node) -> bool:
    is_call = node.op in ("call_function", "call_method")
    if node.op == "call_function":  # a user's function may have any name
        module = getattr(node.target, "__module__", None) or "builtins"
        is_call = module in _MODULES
    return is_call and name_of_call(node) in _RUN_AHEAD


def _elements(value: Tensor) -> int:
    """The number of elements in memory: an expanded tensor has few."""
    try:
        return min(value.numel(), value.untyped_storage().nbytes() // value.element_size())
    except (NotImplementedError, RuntimeError):  # within a vmap
        return value.numel()


def _evaluated(mask: Node, makers: Sequence[Node], given: Mapping[Node, Node]) -> Tensor:
    """The mask's value, computed on the device on which the graph computes it."""
    last = {n: node for node in makers for n in _values_read(node)}
    kept = {mask, *given.values()}
    values: dict[Node, Any] = {}
    depth = 0

    with unset_fake_temporarily(), torch.no_grad():
        try:
            for node in makers:
                like = _like(node)
                known = values if like is None else {**values, like: _one_like(like)}
                args = torch.fx.map_arg(node.args, known.__getitem__)
                kwargs = torch.fx.map_arg(node.kwargs, known.__getitem__)
                if node in given:
                    values[node] = values[given[node]]
                elif node.op == "call_method":
                    values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
                    depth += _NESTING.get(node.target, 0)  # type: ignore[arg-type]
                if depth == 0:
                    _check_made(values[node], node)
                for n in _values_read(node):
                    if last[n] is node and n not in kept:
                        del values[n]
        finally:
            for _ in range(depth):
                predispatch._vmap_decrement_nesting()
    made: Tensor = values[mask]
    return made


def _check_made(made: Any, node: Node) -> None:
    """Raises Stays if dtype, shape or strides are not those that were traced."""
    traced = meta_tensor(node)
    if traced is None and not isinstance(made, Tensor):
        return
    if traced is not None and isinstance(made, Tensor):
        same = (made.dtype, made.shape) == (traced.dtype, traced.shape)
        sizes = zip(made.shape, made.stride(), traced.stride())
        if same and all(size < 2 or mine == its for size, mine, its in sizes):
            return
    raise Stays(f"its mask is made by {statement(node)}, which now differs from its trace")


def _one_like(node: Node) -> Tensor:
    """A tensor of this shape, dtype and device in the memory of one element."""
    kind = meta_tensor(node)
    if kind is None or not all(isinstance(n, int) for n in kind.shape):
        raise Stays("its mask has dynamic sizes")
    return torch.zeros((), dtype=kind.dtype, device=kind.device).expand(kind.shape)


def _kind_of(mask: Tensor, length: tuple[int, int]) -> str:
    """ "causal" or "open"; raises Stays if it is neither."""
    with torch.no_grad():
        while mask.dim() > 2 and mask.stride(0) == 0 and mask.shape[0] > 0:
            mask = mask[0]  # expanded: all are the same
        if mask.dtype is torch.bool:
            seen = mask
        else:
            seen = mask == 0
            # transformers writes the dtype's lowest number in place of -inf.
            hidden = mask <= torch.finfo(mask.dtype).min
            if not bool((seen | hidden).all()):
                raise Stays("its mask adds other values than zero and the lowest")
        if bool(seen.all()):
            return "open"
        if length[0] != length[1]:  # kernels align the diagonal differently
            raise Stays(f"its mask has {length[0]} queries and {length[1]} keys")
        causal = torch.ones(length, dtype=torch.bool, device=mask.device).tril()
        if not bool((seen == causal).all()):
            raise Stays("its mask is not causal")
        return "causal"


def _take_away(node: Node, kind: str, region: Region) -> None:
    """Remove the mask; raises Stays if a changed dtype or changed strides would show."""
    args, kwargs = list(node.args), dict(node.kwargs)
    for (place, name), value in ((_MASK, None), (_CAUSAL, kind == "causal")):
        if len(args) > place:
            args[place] = value
        else:
            kwargs[name] = value
    was = meta_tensor(node)
    if type(was) is not FakeTensor:
        raise Stays("its result is not a plain tensor")
    try:
        with was.fake_mode, torch.set_grad_enabled(was.requires_grad), region.autocast():
            fake: Any = torch.fx.map_arg((tuple(args), kwargs), lambda n: n.meta["example_value"])
            now = node.target(*fake[0], **fake[1])  # type: ignore[operator]
    except Exception as error:
        raise Stays(f"without its mask it fails: {type(error).__name__}: {error}") from error
    if now.dtype != was.dtype:
        raise Stays(f"its result would have dtype {now.dtype}, not {was.dtype}")
    if now.stride() != was.stride():
        try:
            strides.keep(node, now)
        except strides.StridesError as error:
            raise Stays(str(error)) from error
    node.args, node.kwargs = tuple(args), kwargs


def erase_unread(nodes: Sequence[Node]) -> None:
    """Erase these and what only they used; what writes in place, or may be random, stays."""
    todo = [*nodes]
    while todo:
        node = todo.pop()
        if _is_run_ahead(node) and not (node._erased or node.users or writes_of(node)):
            todo += node.all_input_nodes
            node.graph.erase_node(node)
