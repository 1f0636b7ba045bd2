"""fuse_exported(program): an exported program with fx_fuser's ops in its graph, for inference.

The backend gets a graph from Dynamo, and hands what it rewrites to Inductor at once. An exported
program is kept: `torch.export.save` writes its graph to a file, and AOTInductor calls an op of
another library by its name and arguments, in a process that has compiled nothing. So the graph is
rewritten as for the backend, and then each call becomes one that a file can hold: `run.EXPORTED`
at each site, and ATen's operations for everything else that was inserted.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, OutputSpec, TensorArgument
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from fx_fuser import backend, fallback
from fx_fuser.anchors import ANCHORS
from fx_fuser.arguments import refuses_unfit_calls, shown
from fx_fuser.errors import OptionError
from fx_fuser.graph.prepare.bodies import bodies, twin
from fx_fuser.graph.read.nodes import writes_of
from fx_fuser.graph.read.view import EXPORTED
from fx_fuser.native import eviction
from fx_fuser.ops import exported, run
from fx_fuser.ops.attention import OPS as ATTENTION_OPS
from fx_fuser.options import Options
from fx_fuser.outcome import Outcome
from fx_fuser.registry import registered_patterns

_DEFAULTS = Options()


@refuses_unfit_calls(
    OptionError, "call it as fuse_exported(program, options={…}), with the options in one dict"
)
def fuse_exported(
    program: ExportedProgram, *, options: Mapping[str, Any] | None = None
) -> ExportedProgram:
    """Return the program with fused ops at the sites where they are faster, for inference.

    Pass the result to `torch._inductor.aoti_compile_and_package` or `torch.export.save`. A process
    that loads the file must `import fx_fuser`, which defines the ops. Kernels are compiled once on
    the machine that runs them, and kept in its cache folder.

    program: is not changed; the result shares its parameters and buffers. It must be on the GPU on
    which it will run, because sites are timed there. options: as for the backend, except "inner",
    "mode", "verify" and those of Inductor.

    Returns the program itself if nothing is fused. If fx_fuser fails, one warning says why;
    `options={"strict": True}` raises instead. Raises OptionError for a bad option, and for
    anything that is not an exported program.
    """
    if not isinstance(program, ExportedProgram):
        raise OptionError(
            f"fuse_exported: the program is {shown(program)}, not a torch.export.ExportedProgram; "
            "torch.export.export(model, args) makes one, torch.export.load(file) loads one"
        )
    chosen = _parsed(options)
    gm = twin(program.graph_module)

    def attempt() -> tuple[ExportedProgram, Outcome]:
        modules = list(dict.fromkeys(bodies(gm)))
        meanings = _Meanings(modules)
        for module in modules:
            module.meta[EXPORTED] = chosen.cpu_ops
        outcome = backend.fuse(gm, chosen, inputs=_lifted(program))
        outcome.tell(chosen.strict)
        if not outcome.matches and not outcome.is_edited:
            return program, outcome
        for module in modules:
            del module.meta[EXPORTED]
            _make_storable(module, meanings, program.dialect)
        return _rebuilt(program, gm), outcome

    with fallback.compiling(), torch.no_grad():
        fused, outcome = fallback.result_or_none(gm, chosen.strict, attempt) or (program, None)
        eviction.keep_below(chosen.cache_size)
    if outcome is not None:
        outcome.count()
    return fused


def _parsed(options: Mapping[str, Any] | None) -> Options:
    parsed = Options.parse(None, options, [p.name for p in registered_patterns()])
    chosen = replace(parsed, exported=True)
    names = [n for n in ("inner", "mode") if getattr(chosen, n) != getattr(_DEFAULTS, n)]
    if names or chosen.inductor:
        raise OptionError(
            f"option {[*names, *chosen.inductor][0]!r} is for the compiler, which runs "
            "after the export; pass it there, say as inductor_configs of aoti_compile_and_package"
        )
    if chosen.verify != "never":
        raise OptionError(
            f"option 'verify' is {chosen.verify!r}, but an exported program has no calls to verify "
            "yet; leave it out, and compare the two programs' results"
        )
    return chosen


def _lifted(program: ExportedProgram) -> list[Any]:
    """The values of the graph's inputs; None for the user's inputs."""
    values = {**program.constants, **program.state_dict}
    return [values.get(spec.target) for spec in program.graph_signature.input_specs]


# ---- fake values -------------------------------------------------------------------------------


class _Meanings:
    """Gives each node the `example_value` that the matcher reads, and knows its `val`.
    targets: what the program calls.

    Fake tensors of a program loaded from a file share no memory. If something writes to memory,
    they must, so the graph is evaluated again to get the views.
    """

    def __init__(self, modules: Sequence[GraphModule]) -> None:
        self._vals: dict[int, tuple[Any, Any]] = {}  # id of an example_value → it, and the val
        self.targets = {node.target for module in modules for node in module.graph.nodes}
        for module in modules:
            lacks = _lacks_memory(module)
            if lacks and module is not modules[0]:
                continue  # arguments of a body may alias: skip it
            values = dict(_computed(module)) if lacks else {}
            for node in module.graph.nodes:
                val = node.meta.get("val")
                value = values.get(node, val)
                if isinstance(value, Tensor) and value.requires_grad:
                    value = value.detach()
                if value is not None:
                    node.meta["example_value"] = value
                    self._vals[id(value)] = value, val

    def val_of(self, node: Node) -> Any:
        value = node.meta.get("example_value")
        known = self._vals.get(id(value))
        return value if known is None else known[1]


def _lacks_memory(gm: GraphModule) -> bool:
    """Does it write to memory, while no two fake tensors share any?

    In a program traced in this process they do: an in-place operation returns what it wrote to.
    """
    vals = [n.meta["val"] for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    alone = len({val.untyped_storage()._cdata for val in vals}) == len(vals)
    return alone and any(map(writes_of, gm.graph.nodes))


def _may_alias(node: Node) -> bool:
    """May its value alias an argument?"""
    if not isinstance(node.target, OpOverload):
        return True
    return any(argument.alias_info for argument in node.target._schema.arguments)


def _computed(gm: GraphModule) -> Iterator[tuple[Node, Any]]:
    """Every node's fake value, which aliases others as when the program runs."""
    found: dict[Node, Any] = {}

    class Recorder(Interpreter):
        def run_node(self, n: Node) -> Any:
            known = n.op == "call_function" and "val" in n.meta and not _may_alias(n)
            found[n] = n.meta["val"] if known else super().run_node(n)
            return found[n]

    inputs = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
    mode = next((v.fake_mode for v in inputs if isinstance(v, FakeTensor)), None)
    if mode is None:
        return
    shapes = mode.shape_env
    ignored = shapes.ignore_fresh_unbacked_symbols() if shapes else nullcontext()
    with mode, ignored, enable_python_dispatcher():  # for symbolic sizes
        Recorder(gm).run(*(v.detach() if isinstance(v, Tensor) else v for v in inputs))
    for node, value in found.items():
        if node.op != "output":
            yield node, value


# ---- what a file can hold ----------------------------------------------------------------------


def _make_storable(module: GraphModule, meanings: _Meanings, dialect: str) -> None:
    """Leave only ATen's operations and `run.EXPORTED`, each with its `val`; drop our own notes."""
    graph = module.graph
    composites = {getattr(torch.ops.fx_fuser, kind).default: kind for kind in ANCHORS}
    for node in list(graph.nodes):
        if "example_value" in node.meta:
            val = meanings.val_of(node)
            if val is not node.meta.get("val"):
                node.meta.pop("tensor_meta", None)
            node.meta["val"] = val
    for node in list(graph.nodes):
        if node.target in composites:
            _put_op(graph, node, composites[node.target])
        elif node.target not in meanings.targets and _is_of_torch(node):
            _put_aten(graph, node, pre_dispatch=dialect == "TRAINING")
    for node in graph.nodes:
        ours = [k for k in node.meta if k.startswith("fx_fuser_") or k == "example_value"]
        for key in ours:
            del node.meta[key]
    graph.lint()
    module.recompile()


def _put_op(graph: Graph, node: Node, kind: str) -> None:
    (item,) = node.users
    with graph.inserting_before(node):
        made = graph.call_function(run.EXPORTED, exported.arguments(node.args, kind))
    made.meta = item.meta
    item.replace_all_uses_with(made)
    graph.erase_node(item)
    graph.erase_node(node)


def _is_of_torch(node: Node) -> bool:
    """Is it a method, or a torch function other than an overload, or an op that only calls one?"""
    if node.op == "call_method" or node.target in ATTENTION_OPS:
        return True
    known = isinstance(node.target, (OpOverload, HigherOrderOperator))
    return node.op == "call_function" and not known and node.target is not operator.getitem


def _put_aten(graph: Graph, node: Node, pre_dispatch: bool) -> None:
    """Replace the call by ATen's operations."""
    inputs = node.all_input_nodes

    def call(*values: Any) -> Any:
        given = dict(zip(inputs, values))
        args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        # One of our ops would be traced unchanged.
        target: Any = ATTENTION_OPS.get(node.target, node.target)
        return target(*args, **kwargs)

    traced = make_fx(call, pre_dispatch=pre_dispatch)(*(n.meta["val"] for n in inputs))
    values = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs))
    with graph.inserting_before(node):
        result = graph.graph_copy(traced.graph, values)
    result.meta.update(node.meta)  # type: ignore[union-attr]
    node.replace_all_uses_with(result)  # type: ignore[arg-type]
    graph.erase_node(node)


# ---- the program -------------------------------------------------------------------------------


def _rebuilt(program: ExportedProgram, gm: GraphModule) -> ExportedProgram:
    """A program of this graph; torch checks it."""
    inputs = (graph.find_nodes(op="placeholder") for graph in (gm.graph, program.graph))
    for copied, written in zip(*inputs):  # copying renames Python's own names, say `input`
        copied.name, copied.target = written.name, written.target
    gm.recompile()
    results = gm.graph.output_node().args[0]
    outputs = [_named(spec, result) for spec, result in zip(_outputs(program), results)]  # type: ignore[arg-type]
    names = {node.name for node in gm.graph.nodes}
    calls = copy.deepcopy(program.module_call_graph)
    for call in calls:
        if call.fqn and call.signature is not None:
            given = (*call.signature.inputs, *call.signature.outputs)
            if not all(getattr(arg, "name", None) in {*names, None, ""} for arg in given):
                call.signature = None  # a fused op is part of two modules
    return ExportedProgram(
        root=gm,
        graph=gm.graph,
        graph_signature=ExportGraphSignature(list(program.graph_signature.input_specs), outputs),
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=calls,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _outputs(program: ExportedProgram) -> list[OutputSpec]:
    return program.graph_signature.output_specs


def _named(spec: OutputSpec, result: Any) -> OutputSpec:
    """A fused op has another name than the operation that it replaces: use the new one."""
    if isinstance(spec.arg, TensorArgument) and isinstance(result, Node):
        return OutputSpec(spec.kind, TensorArgument(result.name), spec.target)
    return spec
