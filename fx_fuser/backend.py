"""The backend: find → check → plan → (verify) → rewrite → inner compiler.

`torch.compile(model, backend="fx_fuser")` calls `fx_fuser` with each graph Dynamo recorded.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule

from fx_fuser import fallback
from fx_fuser.graph.match import rewrite
from fx_fuser.graph.match.pattern import Fault, Match, Refusal
from fx_fuser.graph.prepare.bodies import bodies, copy_of, twin
from fx_fuser.graph.prepare.prepare import Prepared
from fx_fuser.graph.read import subclasses
from fx_fuser.graph.read.source import end_of, op_of
from fx_fuser.graph.read.view import View
from fx_fuser.native import binaries, eviction
from fx_fuser.ops import calls, head_kept
from fx_fuser.options import Options, is_off
from fx_fuser.outcome import Outcome, Planned, replaced
from fx_fuser.passes import (
    contractions,
    folding,
    head_loss,
    masks,
    padding,
    provenance,
)
from fx_fuser.passes.by_hand import gathers
from fx_fuser.passes.by_hand import rewrite as by_hand
from fx_fuser.passes.convolution import every
from fx_fuser.planning import gate, plan, reads
from fx_fuser.planning.ahead import Kernels
from fx_fuser.planning.layout import FORCED
from fx_fuser.reading import Reading, add_what_is_left, attentions_by_hand, read_graph
from fx_fuser.registry import registered_patterns
from fx_fuser.report.report import Report
from fx_fuser.report.traffic import kept, saved
from fx_fuser.verify import verification

Compiled = Callable[..., Any]
CompileInner = Callable[[Options], Compiled]  # one graph, with these options for Inductor
# (graph module, its inputs, options, compile_inner) → what was compiled, and what was fused
Attempt = Callable[
    [GraphModule, Sequence[Any], Options, CompileInner], "tuple[Compiled | None, Outcome]"
]


def fx_fuser(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile one Dynamo graph; the backend function of `torch.compile`.

    Raises OptionError for a bad option. If fx_fuser itself fails, the user's own graph is compiled
    and one warning says why; `options={"strict": True}` raises instead.
    """
    chosen = Options.parse(mode, options, [p.name for p in registered_patterns()])
    chosen.inner_compiler()  # raises here if one of Inductor's options has the wrong type

    def compile_inner(options: Options) -> Compiled:
        made: Compiled = options.inner_compiler()(gm, example_inputs)
        return made

    if is_off("the inner compiler gets a graph as the user wrote it"):
        return compile_inner(chosen)
    return compile_graph(gm, example_inputs, chosen, compile_inner)


def compile_graph(
    gm: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    compile_inner: CompileInner,
    attempt: Attempt | None = None,
) -> Compiled:
    """Compile the graph with `attempt`, by default `fuse_and_compile`.

    If that fails or finds nothing to fuse, `compile_inner` compiles the user's own graph.
    """
    make = attempt or fuse_and_compile
    at_calls = options.verify == "always" or not verification.is_verifiable(inputs)
    as_written: GraphModule | None = None

    def fused() -> tuple[Compiled | None, Outcome]:
        nonlocal as_written
        as_written = twin(gm) if options.verify != "never" and at_calls else None
        return make(gm, inputs, options, compile_inner)

    before = replaced()
    with fallback.compiling():
        result = fallback.result_or_none(gm, options.strict, fused)
        eviction.keep_below(options.cache_size)
        compiled, outcome = result or (None, None)
        if compiled is None:
            compiled = compile_inner(options)
    if outcome is None:  # a warning has said why
        return compiled
    outcome.count()
    outcome.hint(options, inputs, replaced() - before)
    if as_written is None or not outcome.matches:
        return compiled
    is_wrong = functools.partial(_is_wrong, options)
    return verification.watched(compiled, as_written, is_wrong, options.verify == "always")


def fuse_and_compile(
    gm: GraphModule, inputs: Sequence[Any], options: Options, compile_inner: CompileInner
) -> tuple[Compiled | None, Outcome]:
    """Fuse, then compile: Inductor and its caches see the rewritten graph."""
    coming, padded = provenance.Passes.over(gm, options, inputs), padding.settings(gm, options)
    of_convolutions = every.foreseen(gm, options, inputs)
    results: Any = gm.graph.output_node().args[0]
    outcome = fuse(gm, options, inputs=inputs, beside=coming.kernels or {})
    passes = every.behind({**coming.load(), **padded}, of_convolutions, options)
    if outcome.folds:
        converted = outcome.is_converted
        passes = folding.settings(passes, options, lambda: converted)
        passes = {**passes, FORCED: True} if converted else passes
    passes = {**passes, **reads.settings(outcome.matches, options)}
    outcome.tell(options.strict)
    fused = bool(outcome.matches or outcome.heads)
    if fused or passes:
        compiled = compile_tagged(compile_inner, options.with_passes(passes, fused))
        returned = [one for head in outcome.heads for one in head.returned]
        return head_kept.attached(compiled, returned, results) if returned else compiled, outcome
    return compile_tagged(compile_inner, options) if outcome.is_edited else None, outcome


def compile_tagged(compile_inner: CompileInner, options: Options) -> Compiled:
    """Compile with fx_fuser's tag in the keys of Inductor's caches."""
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


def fuse(
    gm: GraphModule,
    options: Options,
    explained: Report | None = None,
    inputs: Sequence[Any] = (),
    beside: Kernels = MappingProxyType({}),
) -> Outcome:
    """Rewrite every match in the module's graph and in the bodies of its transparent regions.

    Graphs are replaced, not edited: the old ones stay as they were.
    explained: a report to fill in, with the graphs; then nothing is rewritten.
    inputs: the graph's, to verify the fused sites on, if the options say so.
    beside: kernels that the passes need, compiled together with those of the matches.
    """
    outcome = Outcome() if explained is None else Outcome(explained)
    report = outcome.report
    searched = _search(gm, inputs, options, explained is not None or report.is_read())
    # All at once, so that kernels compile in parallel.
    sites = _planned([match for one in searched for match in one.read.matches], options, beside)
    decided = iter(_verified(sites, gm, searched, options, inputs))
    for index, one in enumerate(searched, len(report.graphs)):
        of_graph = list(itertools.islice(decided, len(one.read.matches)))
        outcome.add(one.read, of_graph, index, options)
        if explained is None:
            one.rewrite(of_graph)
        else:
            report.add_graph(one.read.view)
    report.sort()
    return outcome


@dataclass(frozen=True)
class _Searched:
    """A module's graph: the copy that was edited for the search, and what was found in it."""

    module: GraphModule
    prepared: Prepared
    read: Reading

    def rewrite(self, sites: Sequence[Planned | Refusal]) -> None:
        """If anything changed, put the copy, with its sites' calls, in place of the graph."""
        calls = [(site.match, site.call) for site in sites if isinstance(site, Planned)]
        if calls or self.read.is_edited:
            self.prepared.restore(rewrite.replace_all(self.prepared.graph, calls))
            self.prepared.graph.lint()
            self.module.graph = self.prepared.graph


def _search(
    gm: GraphModule, inputs: Sequence[Any], options: Options, is_told: bool
) -> list[_Searched]:
    """Read the graphs of the module and of its bodies. is_told: also report what is left."""
    active = [p for p in registered_patterns() if options.selects(p.name)]
    subclasses.mark(gm, inputs)
    reader = masks.Reader()
    searched: list[_Searched] = []
    rewritten = by_hand.asked(options, inputs) if provenance.has_gemms(gm) else frozenset()
    is_cast = any("_enter_autocast" in op_of(n) for m in bodies(gm) for n in m.graph.nodes)
    for module in bodies(gm):
        graph = copy_of(module.graph)
        attended = reader.simplify(module, graph, options.cpu_ops) if options.takes_masks else []
        hidden = is_cast and module is not gm  # the autocast that a body is called under
        if rewritten and not hidden:
            of_graph = by_hand.rewrite(graph, reader.scope(module, graph), options, rewritten)
            attentions, attended = of_graph.by_hand, [*attended, *of_graph.of_torch]
            attended += gathers.rewrite(graph, options, rewritten)
        else:
            attentions = attentions_by_hand(graph, options.strict) if active and is_told else []
        sums = contractions.contract(graph, options) if options.contracts and not hidden else []
        is_body = module is not gm
        heads = head_loss.fuse_heads(graph, options, is_body) if options.takes_heads else []
        prepared = Prepared(graph)
        read = read_graph(View(graph, end_of(module)), active, options)
        read.masks, read.contractions, read.attentions = attended, sums, attentions
        read.heads = heads
        if active and is_told:
            add_what_is_left(read, active, options)
        searched.append(_Searched(module, prepared, read))
    return searched


def _planned(
    matches: Sequence[Match], options: Options, beside: Kernels
) -> list[Planned | Refusal]:
    """The call of each match, or why it has none. A failure affects only its own site."""
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


def _verified(
    sites: list[Planned | Refusal],
    gm: GraphModule,
    searched: Sequence[_Searched],
    options: Options,
    inputs: Sequence[Any],
) -> list[Planned | Refusal]:
    """The sites; those that are wrong on these inputs are refused, if they are verified now."""
    calls = {s.match.root: (s.match, s.call) for s in sites if isinstance(s, Planned)}
    if not calls or options.verify == "never" or not verification.is_verifiable(inputs):
        return sites
    graphs = {one.module: one.prepared.graph for one in searched}
    faults = verification.Verification(graphs, calls, options.fp32 == "tf32").run(gm, inputs)

    def judged(site: Planned | Refusal) -> Planned | Refusal:
        if isinstance(site, Refusal) or site.match.root not in faults:
            return site
        reason = f"the fused site is wrong on these inputs: {faults[site.match.root]}"
        return replace(Refusal.of(site.match, Fault(site.match.root, reason)), wrong=True)

    return [judged(site) for site in sites]


def _cache_tag() -> str:
    """fx_fuser's part of Inductor's cache keys, which hold ops' names and arguments, not code."""
    return f"{torch.compiler.config.cache_key_tag}fx_fuser:{binaries.fingerprint()}"
