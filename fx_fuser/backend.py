"""The backend: find → check → plan → (verify) → rewrite → inner compiler.

`torch.compile(model, backend="fx_fuser")` calls `fx_fuser` with each graph Dynamo recorded.
"""

from __future__ import annotations

import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.fx import Graph, GraphModule, Node

from fx_fuser import fallback, patterns
from fx_fuser.anchors.conv2d import ANY_LAYOUT, FOLDED
from fx_fuser.arguments import refuses_unfit_calls
from fx_fuser.errors import PatternError, VerifyError
from fx_fuser.graph.match import rewrite
from fx_fuser.graph.match.grow import AUTO, Grown
from fx_fuser.graph.match.pattern import Check, Fault, Match, Pattern, Refusal
from fx_fuser.graph.match.trace import trace
from fx_fuser.graph.prepare.bodies import bodies, copy_of, twin
from fx_fuser.graph.prepare.prepare import Prepared
from fx_fuser.graph.read import subclasses
from fx_fuser.graph.read.naming import at
from fx_fuser.graph.read.source import end_of
from fx_fuser.graph.read.view import View
from fx_fuser.native import binaries, eviction
from fx_fuser.ops import calls
from fx_fuser.options import Options
from fx_fuser.passes import folding, masks, padding, provenance
from fx_fuser.passes.masks import Mask
from fx_fuser.planning import gate, layout, plan, reads
from fx_fuser.planning.ahead import Kernels
from fx_fuser.planning.layout import FORCED
from fx_fuser.reading import Reading, add_what_is_left, read_graph
from fx_fuser.report.report import Report
from fx_fuser.report.traffic import Saved, kept, saved
from fx_fuser.verify import verification

log = logging.getLogger("fx_fuser.backend")

Compiled = Callable[..., Any]
CompileInner = Callable[[Options], Compiled]  # one graph, with these options for Inductor
# (graph module, its inputs, options, compile_inner) → what was compiled, and what was fused
Attempt = Callable[
    [GraphModule, Sequence[Any], Options, CompileInner], "tuple[Compiled | None, Outcome]"
]

_registry: list[Pattern] = []


@refuses_unfit_calls(PatternError, "call it as register_pattern(source, check=None, name=None)")
def register_pattern(
    source: Callable[..., Any], check: Check | None = None, name: str | None = None
) -> Pattern:
    """Add a pattern, for every compilation from now on.

    source: an anchor followed by pointwise ops, see `graph.match.trace`; it is traced once.
    check: `check(match)` returns why a match must not be fused, or None.
    name: for counters, options and reports; default the function's name.

    Raises PatternError if the source is no pattern, or another pattern has the name; then all
    patterns stay as they were.
    """
    pattern = trace(source, check, name)
    if pattern.name.startswith(AUTO):
        raise PatternError(
            f"pattern {pattern.name}: names that begin with {AUTO!r} are those of grown tails; "
            "pass another `name=`"
        )
    for known in _registry:
        same = (known.kind, known.epilogue, known.wildcards)
        if known.name == pattern.name and same != (
            pattern.kind,
            pattern.epilogue,
            pattern.wildcards,
        ):
            raise PatternError(
                f"a pattern named {pattern.name!r} exists and searches for {known.epilogue}; "
                "give the new one another name"
            )
    _registry[:] = [p for p in _registry if p.name != pattern.name] + [pattern]
    _registry.sort(key=lambda p: (-p.size, p.name))
    return pattern


@refuses_unfit_calls(PatternError, "it takes no arguments")
def registered_patterns() -> list[Pattern]:
    """All patterns, in the order in which they are tried: largest first."""
    return list(_registry)


_registry += patterns.discover()


def fx_fuser(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile one Dynamo graph; the backend function of `torch.compile`.

    Raises OptionError for a bad option. Where fx_fuser itself fails, the user's own graph is
    compiled and one warning says why; `options={"strict": True}` raises instead.
    """
    chosen = Options.parse(mode, options, [p.name for p in _registry])
    chosen.inner_compiler()  # raises here if an option of Inductor's has a wrong type

    def compile_inner(options: Options) -> Compiled:
        made: Compiled = options.inner_compiler()(gm, example_inputs)
        return made

    return compile_graph(gm, example_inputs, chosen, compile_inner)


def compile_graph(
    gm: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    compile_inner: CompileInner,
    attempt: Attempt | None = None,
) -> Compiled:
    """The graph, fused and compiled by `attempt`, which by default fuses first.

    Where that fails or finds nothing to fuse, `compile_inner` compiles the user's own graph.
    """
    make = attempt or fuse_and_compile
    at_calls = options.verify == "always" or not verification.is_verifiable(inputs)
    as_written: GraphModule | None = None

    def fused() -> tuple[Compiled | None, Outcome]:
        nonlocal as_written
        as_written = twin(gm) if options.verify != "never" and at_calls else None
        return make(gm, inputs, options, compile_inner)

    with fallback.compiling():
        compiled, outcome = fallback.result_or_none(gm, options.strict, fused) or (None, Outcome())
        eviction.keep_below(options.cache_size)
        if compiled is None:
            return compile_inner(options)
    outcome.count()
    if as_written is None or not outcome.matches:
        return compiled
    is_wrong = functools.partial(_is_wrong, options)
    return verification.watched(compiled, as_written, is_wrong, options.verify == "always")


def fuse_and_compile(
    gm: GraphModule, inputs: Sequence[Any], options: Options, compile_inner: CompileInner
) -> tuple[Compiled | None, Outcome]:
    """Inductor and its caches see the rewritten graph."""
    coming, padded = provenance.Passes.over(gm, options, inputs), padding.settings(gm, options)
    outcome = fuse(gm, options, inputs=inputs, beside=coming.kernels or {})
    passes = {**coming.load(), **padded}
    if outcome.folds:
        converted = outcome.is_converted
        passes = folding.settings(passes, options, lambda: converted)
        passes = {**passes, FORCED: True} if converted else passes
    passes = {**passes, **reads.settings(outcome.matches, options)}
    outcome.tell(options.strict)
    if outcome.matches or passes:
        chosen = options.with_passes(passes, fused=bool(outcome.matches))
        return compile_tagged(compile_inner, chosen), outcome
    return compile_inner(options) if outcome.masks else None, outcome


def compile_tagged(compile_inner: CompileInner, options: Options) -> Compiled:
    """Compile with fx_fuser's part in the keys of Inductor's caches."""
    with torch.compiler.config.patch(cache_key_tag=_cache_tag()):  # type: ignore[attr-defined]
        return compile_inner(options)


def _is_wrong(options: Options, gm: GraphModule, inputs: Sequence[Any]) -> bool:
    """Is any site of an untouched graph wrong on these inputs, or can it not be verified?"""
    try:
        outcome = fuse(gm, options, Report(), inputs)
        outcome.tell(options.strict)
        return bool(outcome.wrong)
    except Exception as error:
        if options.strict:
            raise
        warnings.warn(
            f"fx_fuser runs a graph unfused: {type(error).__name__}: {error}", stacklevel=2
        )
        return True


@dataclass
class Outcome:
    """What `fuse` did. matches: those rewritten. left: those that gain nothing. wrong: those that
    are wrong on these inputs. failed: those at which fx_fuser failed. masks: those removed.
    folds: is there a site that `passes.folding` is for? is_converted: of its graphs, would Inductor
    have converted one to channels_last?"""

    report: Report = field(default_factory=Report)
    matches: list[Match] = field(default_factory=list)
    left: list[Refusal] = field(default_factory=list)
    wrong: list[Refusal] = field(default_factory=list)
    failed: list[Refusal] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    folds: bool = False
    is_converted: bool = False

    def count(self) -> None:
        """Count what was fused, once it is compiled."""
        for match in self.matches:
            counters["fx_fuser"][match.pattern.name] += 1
        for mask in self.masks:
            counters["fx_fuser_masks"][mask.done] += 1

    def tell(self, strict: bool) -> None:
        """Log, count and warn; raises VerifyError instead of a warning if strict."""
        self.report.publish()
        for name, refusals in (("fx_fuser_left", self.left), ("fx_fuser_wrong", self.wrong)):
            for refusal in refusals:
                counters[name][refusal.pattern.name] += 1
        for refusals, what in ((self.failed, "fails at"), (self.wrong, "would compute wrongly")):
            if not refusals:
                continue
            sites = "\n".join(f"{r.pattern.name}{at(r.node)}: {r.reason}" for r in refusals)
            message = f"fx_fuser leaves what it {what} to the model's own ops:\n{sites}"
            if strict and refusals is self.wrong:
                raise VerifyError(message)
            warnings.warn(f"{message}\nPlease report it.", stacklevel=3)


def fuse(
    gm: GraphModule,
    options: Options,
    explained: Report | None = None,
    inputs: Sequence[Any] = (),
    beside: Kernels = MappingProxyType({}),
) -> Outcome:
    """Rewrite every match in the module's graph and in the bodies of its transparent regions.

    Graphs are replaced, not edited: the old ones stay as they were.
    explained: a report to add to, with the graphs; then nothing is rewritten.
    inputs: the graph's, on which to verify the fused sites, if the options say so.
    beside: kernels that the passes need, which compile beside those of the matches.
    """
    outcome = Outcome() if explained is None else Outcome(explained)
    report = outcome.report
    active = [p for p in _registry if options.selects(p.name)]
    found: list[tuple[GraphModule, Prepared, Reading]] = []
    subclasses.mark(gm, inputs)
    reader = masks.Reader()
    for module in bodies(gm):
        graph = copy_of(module.graph)
        attended = reader.simplify(module, graph, options.cpu_ops) if options.takes_masks else []
        prepared = Prepared(graph)
        read = read_graph(View(graph, end_of(module)), active, options)
        read.masks = attended
        if active and (explained is not None or report.is_read()):
            add_what_is_left(read, active, options)
        found.append((module, prepared, read))
    # All at once: kernels compile side by side.
    matches = [match for *_, read in found for match in read.matches]
    sites = _planned(matches, options, beside)
    graphs = {module: prepared.graph for module, prepared, _ in found}
    faults = _faults(gm, graphs, sites, options, inputs)
    decided = iter(sites)
    for index, (module, prepared, read) in enumerate(found, len(report.graphs)):
        for refusal in read.refusals:
            report.add_refusal(refusal, read.view, index)
        outcome.failed += [refusal for refusal in read.refusals if refusal.failed]
        for site in read.others:
            report.add_other(site, read.view, read.gainless.get(site.node, ""))
        for node in read.products:
            report.add_product(node, read.view)
        for mask in read.masks:
            report.add_mask(mask)
        outcome.masks += (taken := [mask for mask in read.masks if mask.is_edit])
        if explained is not None:
            report.add_graph(read.view)
        replacements: list[tuple[Match, rewrite.Call]] = []
        for chosen in itertools.islice(decided, len(read.matches)):
            if isinstance(chosen, Refusal):
                report.add_refusal(chosen, read.view, index)
                (outcome.failed if chosen.failed else outcome.left).append(chosen)
                continue
            if chosen.match.root in faults:
                root = chosen.match.root
                fault = f"what is fused is wrong on these inputs: {faults[root]}"
                outcome.wrong.append(Refusal.of(chosen.match, Fault(root, fault)))
                report.add_refusal(outcome.wrong[-1], read.view, index)
                continue
            fused = chosen.match
            stop = fused.stop if isinstance(fused, Grown) else ""
            how = chosen.how
            report.add_match(
                fused, chosen.saved, chosen.kept, index, how.note, stop, native=how.native
            )
            outcome.matches.append(fused)
            if chosen.how.choices.get("product") in (FOLDED, *ANY_LAYOUT):
                outcome.folds = True
                outcome.is_converted |= layout.is_converted(read.view, options)
            replacements.append((fused, chosen.call))
        if (replacements or taken) and explained is None:
            prepared.restore(rewrite.replace_all(prepared.graph, replacements))
            prepared.graph.lint()
            module.graph = prepared.graph
    report.sort()
    return outcome


@dataclass(frozen=True)
class Planned:
    """Everything that is known of a site before the graph is rewritten.

    match: what is fused; of a grown match perhaps z alone.
    """

    match: Match
    how: plan.Plan
    call: rewrite.Call
    saved: Saved
    kept: dict[str, int] | None


def _planned(
    matches: Sequence[Match], options: Options, beside: Kernels
) -> list[Planned | Refusal]:
    """For each match its call, or why there is none. A failure costs its site alone."""
    plans = gate.decide(matches, options, beside)
    failed: dict[int, Refusal] = {}

    def complete(i: int, match: Match) -> Planned | Refusal:
        chosen = plans[i]
        if isinstance(chosen, Refusal):
            return chosen
        fused = chosen.match or match
        call = calls.graph_call(fused, chosen.native, chosen.choices)
        return Planned(fused, chosen, call, saved(fused, chosen), kept(fused, chosen))

    found = [plan.guarded(m, options, complete, i, failed) for i, m in enumerate(matches)]
    return [failed.get(i, site) for i, site in enumerate(found)]


def _faults(
    gm: GraphModule,
    graphs: Mapping[GraphModule, Graph],
    planned: Sequence[Planned | Refusal],
    options: Options,
    inputs: Sequence[Any],
) -> dict[Node, str]:
    """Last node of a match → what is wrong on these inputs; empty if not to be verified now."""
    if options.verify == "never" or not verification.is_verifiable(inputs):
        return {}
    calls = {
        site.match.root: (site.match, site.call) for site in planned if isinstance(site, Planned)
    }
    if not calls:
        return {}
    return verification.Verification(graphs, calls, options.fp32 == "tf32").run(gm, inputs)


def _cache_tag() -> str:
    """fx_fuser's part of Inductor's cache keys: these have ops' names and arguments, not code."""
    return f"{torch.compiler.config.cache_key_tag}fx_fuser:{binaries.fingerprint()}"
