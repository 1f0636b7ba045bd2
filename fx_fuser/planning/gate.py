"""(matches, options) → how each runs. A grown tail must gain by itself to be fused.

At a site that no named pattern fits, z alone is planned first. One kernel serves all such sites;
if it does not gain, nothing else is compiled. If it gains and a pointwise tail follows, a kernel of
both is compiled. It is timed against the anchor alone followed by a pointwise kernel, which stands
for the inner compiler's code of the tail.

The inner compiler may not need a kernel for the tail. If a norm or another reduction reads the
result, it computes the tail in that kernel, which then reads z. And it may compute a tensor that
the tail reads in the tail's kernel, while the fused kernel needs that tensor in memory. Both are
counted in bytes (`_Neighbours`).
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch.fx import Node

from fx_fuser import kernels
from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.conv2d import Conv2d
from fx_fuser.errors import BuildError
from fx_fuser.graph.match.grow import Grown
from fx_fuser.graph.match.pattern import Match, Refusal
from fx_fuser.graph.read.sites import ATTENTION_NAMES, CONVOLUTIONS, GEMMS
from fx_fuser.graph.read.source import called_name
from fx_fuser.native import limits
from fx_fuser.ops import calls
from fx_fuser.options import Options
from fx_fuser.planning import ahead, bench_ops, contest, plan, surroundings
from fx_fuser.planning.bench_ops import TensorForm
from fx_fuser.planning.case import MatchCase, device_of, timing_key
from fx_fuser.planning.plan import Plan
from fx_fuser.planning.surroundings import VIEWS
from fx_fuser.planning.timing import Timing

log = logging.getLogger("fx_fuser.planning.gate")

_structures: set[frozenset[str]] = set()  # names of the kernels of each tail compiled here


def decide(
    matches: Sequence[Match], options: Options, beside: ahead.Kernels = MappingProxyType({})
) -> list[Plan | Refusal]:
    """For each match how it runs, with all its kernels built and loaded; a Refusal leaves it alone.

    beside: kernels that others need, which compile with these.
    Raises: as `plan.decide`.
    """
    first = [_first(match, options) for match in matches]
    if matches:
        most = options.max_structures - len(_structures)
        ahead.build(first, matches, beside, options, most)
    plans = plan.decide(first, options)
    grown: dict[int, tuple[Grown, Plan]] = {}
    for i, (match, chosen) in enumerate(zip(matches, plans)):
        if first[i] is not match and isinstance(chosen, Plan):
            plans[i] = replace(chosen, match=first[i])
            grown[i] = (match, chosen)  # type: ignore[assignment]
    failed: dict[int, Refusal] = {}
    for i, note in _with_tails(grown, options, failed).items():
        plans[i] = replace(grown[i][1], note=note)
    return [failed.get(i, chosen) for i, chosen in enumerate(plans)]


def _first(match: Match, options: Options) -> Match:
    """What is planned first: z alone if the match has a tail, else the match.

    Fused convolutions are rare (few channels), so their tails are compiled at once.
    """
    on_cuda = device_of(match).type == "cuda" and options.plan == "measure"
    is_conv = isinstance(ANCHORS[match.site.kind], Conv2d)
    if isinstance(match, Grown) and match.alone is not None and on_cuda and not is_conv:
        return match.alone
    return match


def _with_tails(
    grown: Mapping[int, tuple[Grown, Plan]], options: Options, failed: dict[int, Refusal]
) -> dict[int, str]:
    """Index → what was measured, for the matches whose tail is worth a kernel.

    failed: receives those at which fx_fuser itself fails.
    """

    def measure(i: int, match: Match) -> str:
        assert isinstance(match, Grown)
        return _measured(match, grown[i][1], options)

    known = {i: (match, chosen.choices) for i, (match, chosen) in grown.items()}
    built = _built(known, options, failed)
    notes = {i: plan.guarded(m, options, measure, i, failed) for i, m in built.items()}
    return {i: note for i, note in notes.items() if note}


def _built(
    grown: Mapping[int, tuple[Grown, Mapping[str, Any]]],
    options: Options,
    failed: dict[int, Refusal],
) -> dict[int, Grown]:
    """Those whose kernels compile: all in one run, as many structures as the options allow."""

    def is_taken(i: int, match: Match) -> bool:
        if bench_ops.tensors_of(match) is None:
            return False
        # A tail may rule out what z alone allows: the kernels' accumulators are float.
        case = MatchCase(match, options)
        offered = kernels.candidates(case)
        if grown[i][1]["product"] not in [choices["product"] for choices in offered]:
            return False
        structure = frozenset(spec.name for spec in calls.kernel_specs(match, grown[i][1]))
        if structure not in _structures and len(_structures) >= options.max_structures:
            log.info(
                "no kernel for %s: %d structures are compiled",
                match.bound.epilogue.text,
                options.max_structures,
            )
            return False
        _structures.add(structure)
        return True

    taken = {i: m for i, (m, _) in grown.items() if plan.guarded(m, options, is_taken, i, failed)}
    try:
        plan.prepare([(m, [grown[i][1]]) for i, m in taken.items()])
    except BuildError as error:
        if options.strict:
            raise
        warnings.warn(
            f"fx_fuser: a gemm is fused alone where its tail does not compile: {error}; "
            "please report it",
            stacklevel=2,
        )
        taken = {i: m for i, m in taken.items() if _compiles(m, grown[i][1])}
    return taken


def _compiles(match: Match, choices: Mapping[str, Any]) -> bool:
    try:
        plan.prepare([(match, [choices])])
    except BuildError:
        return False
    return True


def _measured(match: Grown, alone: Plan, options: Options) -> str:
    """What was measured, if one kernel of anchor and tail gains; else empty."""
    tensors = bench_ops.tensors_of(match)
    assert tensors is not None and match.alone is not None
    choices = alone.choices
    key = ("tail", *timing_key(match, [choices], tensors))
    bench = functools.partial(bench_ops.tail, match, choices, tensors)
    times = contest.times(key, bench, device_of(match))
    if isinstance(times, str):
        return ""
    gemm, both, whole = (took.gpu for took in times)
    share, extra = _Neighbours(match).of_tail(tensors)
    apart = gemm + share * max(both - gemm, 0)
    written = 1e3 * extra / limits.of(device_of(match)).bandwidth
    around = written + surroundings.ms_into_cat(match)
    won = contest.winner([Timing(whole)], apart, [around])
    measured = f"with its tail {whole:.4g} ms, in two kernels {both:.4g}"
    log.info("%s: %s, of which %.0f %% counts", match.bound.epilogue.text, measured, 100 * share)
    return "" if won.place is None else f"{alone.note}; {measured}"


# The inner compiler never fuses these with other operations. Views are looked through.
_OPAQUE = GEMMS | CONVOLUTIONS | ATTENTION_NAMES | {"output"}
_OPAQUE |= {"redistribute", "prim_redistribute"}  # a collective; prim_: in torch 2.11


@dataclass(frozen=True)
class _Neighbours:
    """The graph around a tail."""

    match: Grown

    def of_tail(self, tensors: Sequence[TensorForm | None]) -> tuple[float, int]:
        """The share of the tail's bytes that the inner compiler would move in a kernel for the
        tail; and the bytes that only the fused kernel needs written."""
        match = self.match
        read = dict(zip(match.bound.tensors, tensors[-len(match.bound.tensors) :]))
        sizes = {n: form.bytes for n, form in read.items() if form is not None}
        made = {n for n in sizes if self._is_made_for_tail(n)}
        z, y = (_bytes_of_value(n) for n in (match.site.node, match.root))
        apart = sum(size for n, size in sizes.items() if n not in made)
        whole = sum(sizes.values()) + z + y
        if not self._is_read_by_fusible(match.root):
            apart += z + y
        return (apart / whole if whole else 1.0), sum(sizes[n] for n in made)

    def _is_made_for_tail(self, node: Node) -> bool:
        readers = self.match.view.readers[node]
        return _is_fusible(node) and all(reader in self.match.nodes for reader in readers)

    def _is_read_by_fusible(self, node: Node, depth: int = 8) -> bool:
        for reader in self.match.view.readers[node]:
            if called_name(reader) in VIEWS and depth:
                if self._is_read_by_fusible(reader, depth - 1):
                    return True
            elif _is_fusible(reader):
                return True
        return False


def _is_fusible(node: Node) -> bool:
    return node.op in ("call_function", "call_method") and not {called_name(node)} & (
        _OPAQUE | VIEWS
    )


def _bytes_of_value(node: Node) -> int:
    form = bench_ops.form_of(node)
    return form.bytes if form else 0
