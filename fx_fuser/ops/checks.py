"""Is fusing this match safe?  One function per hazard; each returns the node at fault and why.

The fused op stands in place of the last matched node, computes what all of them computed, and has
no other effect. Each check guards against one way in which that could be false; its docstring says
what goes wrong without it. Reasons use the user's names and lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.anchors import ANCHORS
from fx_fuser.arguments import shown
from fx_fuser.errors import PatternError
from fx_fuser.graph.epilogue import ANCHOR_DTYPES, MAX_STEPS
from fx_fuser.graph.match.pattern import Fault, Match
from fx_fuser.graph.prepare.sharding import reason_of
from fx_fuser.graph.read.canonical import Unsupported
from fx_fuser.graph.read.naming import (
    at,
    called,
    name_of,
    place_of,
    returned,
    statement,
    without_break,
)
from fx_fuser.graph.read.nodes import called_in_place, meta_tensor, storages
from fx_fuser.graph.read.source import op_of
from fx_fuser.graph.read.subclasses import origin_of
from fx_fuser.graph.read.view import EXPORTED
from fx_fuser.native.kernel_spec import CUDA_TYPES, MAX_NUMBERS, MAX_TENSORS
from fx_fuser.ops import calls

_MAX_WRITES = 256  # within one match


def fits_a_kernel(match: Match) -> Fault | None:
    """More operands, numbers or operations than one kernel takes.

    An epilogue of 17 operands passed, and did not compile.
    """
    try:
        bound = match.bound
    except Unsupported as error:
        return Fault(match.root, str(error))
    tensors, numbers = ANCHORS[match.site.kind].leaf_counts(match.site)
    for what, count, limit in (
        ("tensors", tensors + len(bound.tensors), MAX_TENSORS),
        ("numbers", numbers + len(bound.numbers) + len(bound.items), MAX_NUMBERS),
        ("operations", len(bound.epilogue.steps), MAX_STEPS),
    ):
        if count > limit:
            reason = f"its {count} {what} exceed a kernel's limit of {limit}"
            return Fault(match.root, reason, "compute some of them earlier")
    return None


def one_region(match: Match) -> Fault | None:
    """Grad mode or autocast changes inside the match, or a functorch level is open.

    Dropping an inner `no_grad` changed gradients; under `vmap` and `jvp` stock torch.compile works
    and a rewritten graph raised.
    """
    region = match.view.region[match.root]
    for node in sorted(match.nodes, key=match.view.order.__getitem__):
        if match.view.region[node] != region:
            return Fault(
                node,
                f"grad mode, autocast or another mode changes between {called(node)}{at(node)} "
                f"and {called(match.root)}{at(match.root)}",
                "have both inside the `with` block, or both outside",
            )
    level = region.functional_level()
    if level is not None:
        return Fault(level, "it is inside a functorch transform or a forward-mode AD level")
    return None


def inner_values_unused(match: Match) -> Fault | None:
    """An inner value is read elsewhere: it would no longer exist."""
    for node in sorted(match.nodes - {match.root}, key=match.view.order.__getitem__):
        reader = next((r for r in match.view.readers[node] if r not in match.nodes), None)
        if reader is None:
            continue
        anchor = ANCHORS[match.site.kind]
        role = anchor.role_of_z if node is match.site.node else "inner value"
        value = f"the {role} {called(node)}"
        if reader.op == "output":
            return Fault(node, f"{value} is also {returned(match.view)}", _unreturned(match, node))
        end = match.view.end
        help = without_break(match.view) if end and at(reader) == f", {end.place}" else ""
        return Fault(node, f"{value} is also used by {op_of(reader)}{at(reader)}", help)
    return None


def _unreturned(match: Match, node: Node) -> str:
    end, name = match.view.end, name_of(node)
    if end is None or not end.breaks:
        return f"leave {called(node)} out of what is returned, if nothing needs it"
    printed = name is not None and re.search(rf"\b{name}\b", end.code) is not None
    return without_break(match.view) if printed else ""


def in_place_writes_stay_inside(match: Match) -> Fault | None:
    """A matched in-place operation changes memory that something else can read.

    Readers after the match get the result, or an inner value, which `inner_values_unused` refuses.
    """
    for node in match.nodes:
        if not called_in_place(node):
            continue
        view, root = match.view, match.view.order[match.root]
        shown = (view.nodes[i] for m in storages((node,)) for i in view.shown_at[m] if i < root)
        other = next((n for n in shown if n not in match.nodes), None)
        if other is not None:
            return Fault(
                node,
                f"{statement(node)}, works in place on memory that {called(other)} shares",
                "use the operation that is not in place, if nothing else needs to see the change",
            )
    return None


def operands_unchanged(match: Match) -> Fault | None:
    """Something between the first and the last matched node may write what the fused op reads.

    `z = lin(x); x.add_(1); return z * sigmoid(z) * 2` came out wrong: the fused op runs last.
    A write to a graph input may reach an operand through an alias that only the caller knows, so
    it is refused too, unless it is an integer counter or BatchNorm's own statistics.
    A write before an operand is made does not change it: `noise.bernoulli_(p).div_(p)`.
    """
    order, matched = match.view.order, storages(match.nodes)
    writers = match.between(match.view.writer_places, most=_MAX_WRITES + 1)
    if len(writers) > _MAX_WRITES:
        return Fault(match.root, f"more than {_MAX_WRITES} operations within it write to memory")
    for node in writers:
        read = matched | storages(o for o in match.operands if order[o] < order[node])
        for written in match.view.writers[node]:
            memory = storages((written,))
            moved = _without_write(match, node, written)
            if memory & read or None in memory | read:
                reason = f"{statement(node)}, may change {called(written)} before the fused op"
                return Fault(node, f"{reason} would read it", moved)
            tensor = meta_tensor(written)
            counter = tensor is not None and not tensor.dtype.is_floating_point
            expr = match.view.canonical(node)
            allowed = counter or (expr is not None and expr.op == "batch_norm")
            if not allowed and memory & match.view.graph_inputs:
                reason = f"{statement(node)}, changes the graph input {called(written)}, which may "
                return Fault(node, f"{reason}share memory with an operand", moved)
    return None


def _without_write(match: Match, node: Node, written: Node) -> str:
    """The edit that moves a write below the match, if nothing in the match reads its result."""
    view, start, end = match.view, match.view.order[node], match.view.order[match.root]
    places = [i for m in storages((written,)) - {None} for i in view.read_at.get(m, ())]
    if not any(start < i <= end for i in places):
        return f"move it below {place_of(match.root)}"
    return f"change a clone of {called(written)}, if nothing else needs to see the change"


def seen_as_made(match: Match) -> Fault | None:
    """Something in the graph transposes or resizes a value of the match, or an operand, in place.

    `v.t_(); x @ v` came out as x @ v.t(): a node describes the tensor as it was then.
    """
    reshaped = match.view.reshaped
    memory = storages((*match.operands, *match.nodes)) if reshaped else set()
    node = next((reshaped[m] for m in memory if m in reshaped), None)
    if node is None:
        return None
    reason = f"{statement(node)}, changes the shape, strides or memory of a tensor in place"
    return Fault(node, reason, "use the operation that is not in place")


def saved_operands_stay(match: Match) -> Fault | None:
    """Something after the match writes to what a backward of the fused op reads and eager's does
    not: if both read it, both raise.

    `y = gelu(z + r); r.add_(1)`: eager mode saves z + r, the fused op r. Backward raised or, where
    no version counter sees the write (`.data`), had wrong gradients. The same with `z * (r * 0.5)`,
    where r is the operand, and with an x that eager's Linear saves as a contiguous copy.
    """
    found = match.written_after() and match.written_after(calls.saved_only_by_fused(match))
    if found is None:
        return None
    node, written = found
    return Fault(
        node,
        f"{statement(node)}, changes {called(written)}, which the fused op would need for backward",
        f"change a clone of {called(written)} instead",
    )


def statistics_unseen(match: Match) -> Fault | None:
    """Something between the batch_norm and the end of the match reads the running statistics.

    They are updated where the match ends: a `running_mean.clone()` in between was wrong.
    """
    if not match.site.attrs.get("training"):
        return None
    names = ("running_mean", "running_var")
    statistics = storages(o for n in names if (o := match.site.operands[n]) is not None)
    for memory in statistics:
        places = match.view.read_at.get(memory, ())
        for node in match.between(places, match.site.node, most=len(match.nodes) + 1):
            return Fault(
                node,
                f"{statement(node)}, uses the running statistics before the match ends",
                f"move it below {place_of(match.root)}",
            )
    return None


def statistics_alone(match: Match) -> Fault | None:
    """Another batch_norm in the graph, or another operand, shares the statistics being updated.

    An unfused batch_norm saves them for its backward and updates them without telling autograd; a
    fused one updates them with `copy_`, which does tell it. One BatchNorm2d called twice, with one
    of the results scaled, raised in backward.
    """
    site = match.site
    mean, var = site.operands.get("running_mean"), site.operands.get("running_var")
    if not site.attrs.get("training") or mean is None or var is None:
        return None
    statistics = storages((mean, var))
    if len(statistics) < 2:
        return Fault(site.node, "running_mean and running_var share memory")
    operands = (
        o for name, o in site.operands.items() if name not in ("running_mean", "running_var")
    )
    for operand in (*operands, *match.bound.tensors):
        if operand is not None and storages((operand,)) & statistics:
            reason = f"the operand {called(operand)} shares memory with the running statistics"
            return Fault(operand, reason)
    view = match.view
    for place in (i for memory in statistics for i in view.batch_norms_at.get(memory, ())):
        node = view.nodes[place]
        if node not in match.nodes:
            return Fault(site.node, f"{statement(node)}, updates the same running statistics")
    return None


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def plain_tensors(match: Match) -> Fault | None:
    """A tensor of another class, layout or unknown kind: DTensor, sparse, quantized.

    For DTensors that have a rule, `graph.prepare.localize` has put the plain local shards here.
    A user's own class without `__torch_dispatch__` raised TypeError at the first call.
    """
    for node in (*match.operands, *match.nodes):
        origin = origin_of(node)
        if origin is not None:
            reason = f"{called(origin.node)} is of class {origin.kind}, not a plain tensor"
            if node.name != origin.node.name:
                reason = f"{called(node)} is computed from another class: {reason}"
            help = "outside the compiled code, make it plain with `.as_subclass(torch.Tensor)`"
            return Fault(node, reason, help)
        tensor = meta_tensor(node)
        if isinstance(node.meta.get("example_value"), (torch.SymFloat, torch.SymInt)):
            return Fault(node, f"{called(node)} is a number that changes from call to call")
        if tensor is None:
            return Fault(node, f"{called(node)} is not a tensor that is known when compiling")
        if not isinstance(tensor, FakeTensor) and type(tensor) not in _PLAIN:
            rule = reason_of(match.site.node)
            why = f"not a plain tensor{f', and {rule}' if rule else ''}"
            return Fault(node, f"{called(node)} is a {type(tensor).__name__}, {why}")
        if tensor.layout is not torch.strided:
            return Fault(node, f"{called(node)} has layout {tensor.layout}")
    return None


def known_dtypes(match: Match) -> Fault | None:
    """A dtype that the kernels do not take, or would compute in a narrower one."""
    for node in match.nodes:
        tensor = meta_tensor(node)
        assert tensor is not None
        if tensor.dtype not in ANCHOR_DTYPES:
            return Fault(node, f"{called(node)} has dtype {tensor.dtype}")
        if node not in match.site.nodes and _is_wider_number(tensor, match):
            return Fault(node, f"{called(node)} is a 0-d float64, made within the match")
    for node in match.operands:
        dtype = meta_tensor(node).dtype  # type: ignore[union-attr]
        if dtype not in CUDA_TYPES:
            return Fault(node, f"the operand {called(node)} has dtype {dtype}")
    return None


def _is_wider_number(tensor: torch.Tensor, match: Match) -> bool:
    """Is it a 0-d float64 with a narrower anchor?  It does not widen an epilogue, in which
    log(exp(100.0)) would then be infinite."""
    z = meta_tensor(match.site.node)
    wide = tensor.ndim == 0 and tensor.dtype == torch.float64
    return wide and (z is None or z.dtype != torch.float64)


def one_device(match: Match) -> Fault | None:
    """Operands on several devices; a 0-d CPU tensor among CUDA tensors is legal."""
    device = meta_tensor(match.site.node).device  # type: ignore[union-attr]
    if device.type not in ("cpu", "cuda"):
        return Fault(match.site.node, f"device {device} has no kernels")
    for node in match.operands:
        tensor = meta_tensor(node)
        assert tensor is not None
        scalar = tensor.ndim == 0 and tensor.device.type == "cpu"
        if tensor.device != device and not scalar:
            reason = f"the operand {called(node)} is on {tensor.device}, the anchor on {device}"
            return Fault(node, reason, f"move it to {device} first")
    return None


def shape_kept(match: Match) -> Fault | None:
    """The result is larger than z, other than along the last dimension of a one-column Linear."""
    z, y = meta_tensor(match.site.node), meta_tensor(match.root)
    assert z is not None and y is not None
    same_rank = z.ndim == y.ndim
    if same_rank and all(statically_known_true(a == b) for a, b in zip(z.shape, y.shape)):
        return None
    gate = same_rank and ANCHORS[match.site.kind].may_be_gate and z.shape[-1:] == (1,)
    if gate and all(statically_known_true(a == b) for a, b in zip(z.shape[:-1], y.shape[:-1])):
        return None
    reason = f"the result has shape {tuple(y.shape)}, but {called(match.site.node)} has "
    return Fault(match.root, f"{reason}{tuple(z.shape)}")


def layout_kept(match: Match) -> Fault | None:
    """Another operand's memory layout wins over z's: `a * sigmoid(z) * 2` with a column-major a.

    The fused op writes in the layout of c; `.t().view(-1)` of the result then raised.
    """
    c, y = meta_tensor(match.site.nodes[0]), meta_tensor(match.root)
    assert c is not None and y is not None
    if any(statically_known_true(size <= 0) for size in y.shape):
        return None
    grown = ANCHORS[match.site.kind].may_be_gate and statically_known_true(c.shape[-1] == 1)
    wanted = torch.empty(y.shape, device="meta").stride() if grown else c.stride()
    for size, mine, its in zip(y.shape, wanted, y.stride()):
        if not statically_known_true(size == 1) and not statically_known_true(mine == its):
            reason = f"the result has strides {y.stride()}, but {called(match.site.node)} makes it "
            return Fault(match.root, f"{reason}{wanted}", _made_contiguous(match, c))
    return None


def _made_contiguous(match: Match, c: torch.Tensor) -> str:
    """The edit for an operand whose layout takes precedence over that of a row-major c."""

    def in_rows(tensor: torch.Tensor) -> bool:
        plain = torch.empty(tensor.shape, device="meta").stride()
        return all(statically_known_true(a == b) for a, b in zip(plain, tensor.stride()))

    for operand in match.bound.tensors:
        tensor = meta_tensor(operand)
        if tensor is not None and in_rows(c) and not in_rows(tensor):
            return f"call `.contiguous()` on {called(operand)}"
    return ""


def anchor_form(match: Match) -> Fault | None:
    """Ranks or attributes that the anchor's op does not take."""
    found = ANCHORS[match.site.kind].form_fault(match.site)
    return Fault(match.site.node, found) if found else None


def runs_in_an_export(match: Match) -> Fault | None:
    """An exported program has one op for the site, which writes no statistics. And on a CPU its
    compiler would find that op instead of operations that it fuses itself."""
    on_cpu = getattr(match.view.graph.owning_module, "meta", {}).get(EXPORTED)
    if on_cpu is None:
        return None
    if match.site.attrs.get("training"):
        return Fault(match.root, "a BatchNorm in training is not fused in an exported program")
    if not on_cpu and meta_tensor(match.root).device.type == "cpu":  # type: ignore[union-attr]
        return Fault(match.root, "on a CPU the compiler of the program does as well by itself")
    return None


def pattern_check(match: Match) -> Fault | None:
    """The pattern's own condition."""
    reason = match.pattern.check(match) if match.pattern.check else None
    if not isinstance(reason, str | None):
        raise PatternError(
            f"pattern {match.pattern.name}: its check returns {shown(reason)}; return why the "
            "match must not be fused, as a str, or None"
        )
    return Fault(match.root, reason) if reason else None


CHECKS: tuple[Callable[[Match], Fault | None], ...] = (
    fits_a_kernel,
    plain_tensors,
    one_region,
    inner_values_unused,
    in_place_writes_stay_inside,
    operands_unchanged,
    seen_as_made,
    statistics_unseen,
    statistics_alone,
    known_dtypes,
    one_device,
    anchor_form,
    saved_operands_stay,
    shape_kept,
    layout_kept,
    runs_in_an_export,
    pattern_check,
)


def fault_of(match: Match) -> Fault | None:
    """The first fault any check finds, or None."""
    return next((f for check in CHECKS if (f := check(match)) is not None), None)
