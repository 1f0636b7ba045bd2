"""(matches, options) → how each op will run, or why it is left to the inner compiler.

A Linear on CUDA is fused where one kernel of ours, product and epilogue, beats the library's
product with the pointwise kernel; both are timed on tensors of our own (`planning.timing`). The
latter stands for what Inductor makes of the region: the same within 3 % (benchmarks/results).

A convolution of few channels is fused where a direct kernel is faster than the library's
convolution in either layout and, in fp32, in TF32 where torch's settings let the library take it,
as they do by default; what is left alone follows them. Any other is fused only where option "fp32"
asks for exactness and those settings would let the library take TF32.

The host calls an op while the GPU runs the one before. A kernel that takes the host longer than the
GPU counts as much as the host's time, and must still beat the GPU's time of what it replaces. A
Linear's training step that takes the GPU less than the host is left.

With option "save" as "memory", what has a backward is fused in any case.

Which choices are right at a site its anchor knows (`Anchor.candidates`); a fault of fx_fuser at one
site costs that site alone.
"""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch

from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.base import LIBRARY
from fx_fuser.anchors.conv2d import DIRECT, Conv2d, may_be_tf32
from fx_fuser.anchors.linear import SPLIT, matmul_tf32_requested
from fx_fuser.errors import BuildError, OptionError
from fx_fuser.graph.match import Fault, Match, Refusal
from fx_fuser.graph.nodes import meta_tensor
from fx_fuser.graph.sites import Site
from fx_fuser.native import limits, load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import apply, calls
from fx_fuser.options import Options
from fx_fuser.planning import rehearse, timing
from fx_fuser.planning.timing import Timing

log = logging.getLogger("fx_fuser.planning.plan")

# What a kernel of ours must stay below to be taken: this much of the library's time and, since
# events are 0.5 us apart, this many ms less.
_GAIN = 0.98
_SAVED = 1e-3
# What the host needs for a Linear's training step (autograd, AOTAutograd's wrappers, launches), in
# calls of our op: beside an H200 0.66 ms for the three of a Llama MLP, one call 24 us (2026-11-22,
# kernels_cu/NOTES.md). A step that takes the GPU less is as long as the host's, which our op only
# adds to.
_STEP_CALLS = 10


@dataclass(frozen=True)
class Plan:
    """How one match runs.

    native: kernel op and our autograd rule, rather than plain torch ops.
    choices: the configuration of the anchor's op that is ours to choose: `product` and `backward`
        (who makes them), `again` (`fx_fuser.anchors.base`), a convolution's `tf32`.
    note: what runs, and what was measured. match: what is fused, where that is not the whole match:
    of one that was grown perhaps z alone (`fx_fuser.planning.gate`).
    """

    native: bool
    choices: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    match: Match | None = None


def unavailable(device: torch.device) -> str | None:
    """Why fused kernels cannot run on this device, or None; a missing toolchain warns once."""
    if device.type == "cpu":
        return None
    reason = load.available(device)
    if reason is not None:
        warnings.warn(f"fx_fuser fuses nothing on {device}: {reason}", stacklevel=2)
    return reason


def runs_native(match: Match, options: Options) -> bool:
    """Kernel op and our autograd rule, rather than plain torch ops.

    On CPU the inner compiler fuses plain ops better than it can call an opaque reference op.
    """
    return device_of(match).type == "cuda" or options.cpu_ops


def has_own_product(match: Match, options: Options) -> bool:
    """May a product of ours gain at a match that was grown?

    One in fp32, or a convolution of few channels. In 16 bits and in TF32 the library's product of
    many rows is as fast as ours (kernels_cu/NOTES.md), and no time is spent to find that out; nor
    of small ones.
    """
    if device_of(match).type != "cuda":
        return options.cpu_ops
    *_, best = ANCHORS[match.site.kind].candidates(MatchCase(match, options))
    if best["product"] == SPLIT and options.plan == "measure":
        x = rehearse.form_of(match.site.operands["x"])  # type: ignore[arg-type]
        c = rehearse.form_of(match.site.nodes[0])
        return x is None or c is None or not is_small(x.size, c.size)
    return best["product"] in (SPLIT, DIRECT)


def is_small(x: Sequence[int], product: Sequence[int]) -> bool:
    """Does an fp32 product of these sizes, [*, K] to [*, N], take a library some 10 us at most?

    Ours needs as much to begin.
    """
    rows, k, n = math.prod(x[:-1]), x[-1], product[-1]
    operations, elements = 2 * rows * n * k, rows * k + rows * n + n * k
    rates = limits.H200
    return max(operations / rates.fp32, 4 * elements / rates.copy) < 10e-6


@dataclass(frozen=True)
class MatchCase:
    """A match as `Anchor.candidates` sees it: see `fx_fuser.anchors.base.Case`."""

    match: Match
    options: Options

    @property
    def site(self) -> Site:
        return self.match.site

    @property
    def device(self) -> torch.device:
        return device_of(self.match)

    @property
    def out(self) -> torch.dtype:
        return meta_tensor(self.match.root).dtype  # type: ignore[union-attr]

    @property
    def acc(self) -> torch.dtype:
        return apply.accumulator_of(self.match.bound.epilogue, self.tensors, self.out)

    @property
    def tensors(self) -> list[torch.Tensor]:
        nodes = (self.site.nodes[0], *self.match.operands)
        return [meta_tensor(node) for node in nodes]  # type: ignore[misc]

    def operand(self, name: str) -> torch.Tensor:
        return meta_tensor(self.site.operands[name])  # type: ignore[arg-type, return-value]

    def specs(self, choices: Mapping[str, Any]) -> list[KernelSpec]:
        return calls.kernel_specs(self.match, choices)

    def gradients(self) -> dict[str, bool]:
        return rehearse.gradients_of(self.match)

    def may_have_own_backward(self) -> bool:
        return calls.may_have_own_backward(self.match)


def decide(matches: Sequence[Match], options: Options) -> list[Plan | Refusal]:
    """For each match how it runs, with all its kernels built and loaded; a Refusal leaves it alone.

    Raises:
        OptionError: option "fp32" asks for what torch's own setting forbids.
        Exception: with options.strict, what fx_fuser raises at a site.
    """
    failed: dict[int, Refusal] = {}

    def at_each(step: Callable[[int, Match], Any]) -> list[Any]:
        """The step's value for each match that has not failed yet, else None."""
        return [
            None if i in failed else guarded(match, options, step, i, failed)
            for i, match in enumerate(matches)
        ]

    candidates = at_each(lambda i, m: ANCHORS[m.site.kind].candidates(MatchCase(m, options)))
    _build_kernels(matches, candidates, options, failed)
    picked = at_each(lambda i, match: _pick(match, candidates[i], options))
    return [failed.get(i, plan) for i, plan in enumerate(picked)]


def guarded(
    match: Match,
    options: Options,
    step: Callable[[int, Match], Any],
    i: int,
    failed: dict[int, Refusal],
) -> Any:
    """The step's value, or None and a Refusal with `failure` among those that failed."""
    try:
        return step(i, match)
    except Exception as error:
        if options.strict or isinstance(error, OptionError):
            raise
        log.info("a site is left to the model's own ops", exc_info=True)
        failed[i] = Refusal.of(match, Fault(match.root, f"{type(error).__name__}: {error}"))
        failed[i] = replace(failed[i], failed=True)
        return None


def device_of(match: Match) -> torch.device:
    return meta_tensor(match.site.node).device  # type: ignore[union-attr]


def _build_kernels(
    matches: Sequence[Match],
    candidates: Sequence[list[dict[str, Any]] | None],
    options: Options,
    failed: dict[int, Refusal],
) -> None:
    """Compile what may be launched. A product of ours that does not compile is no candidate."""
    pairs = [(m, c) for m, c in zip(matches, candidates) if c is not None]
    try:
        prepare(pairs)
        return
    except BuildError as error:
        if options.strict:
            raise
        cause = error
    known: dict[tuple[KernelSpec, ...], BuildError] = {}  # which takes a while to find out

    def prepare_one(match: Match, choice: dict[str, Any]) -> None:
        specs = tuple(calls.kernel_specs(match, choice))
        if specs in known:
            raise known[specs]
        try:
            prepare([(match, [choice])])
        except BuildError as error:
            known[specs] = error
            raise

    removed = False
    for i, (match, choices) in enumerate(zip(matches, candidates)):
        for choice in list(choices or ())[1:]:
            try:
                prepare_one(match, choice)
            except BuildError:
                choices.remove(choice)  # type: ignore[union-attr]
                removed = True
        if choices:
            guarded(match, options, lambda i, m: prepare_one(m, choices[0]), i, failed)  # noqa: B023
    if removed:
        warnings.warn(
            f"fx_fuser: the library's product is taken where ours does not compile: {cause}; "
            "please report it",
            stacklevel=2,
        )


def prepare(pairs: Sequence[tuple[Match, Sequence[Mapping[str, Any]]]]) -> None:
    """All in one run of ninja."""
    by_device: dict[torch.device, list[KernelSpec]] = {}
    for match, choices in pairs:
        device = device_of(match)
        if device.type == "cuda":
            for choice in choices:
                by_device.setdefault(device, []).extend(calls.kernel_specs(match, choice))
            if match.site.attrs.get("training"):
                load.prepare_batch_stats(device)
    for device, specs in by_device.items():
        load.prepare(specs, device)


def _pick(
    match: Match, candidates: Sequence[Mapping[str, Any]], options: Options
) -> Plan | Refusal:
    on_kernels = runs_native(match, options)
    *_, preferred = candidates
    if device_of(match).type != "cuda":
        return Plan(on_kernels, preferred)
    if options.plan == "always":
        return Plan(on_kernels, preferred, preferred.get("product", ""))
    if isinstance(ANCHORS[match.site.kind], Conv2d):
        best, note = _compare_convolutions(match, candidates, options)
    else:
        best, note = _compare(match, candidates, options)
    if best is not None and (best["product"] != LIBRARY or not match.pattern.is_grown):
        return Plan(on_kernels, best, note)
    reason = f"nothing is gained ({note}): it is left to the inner compiler"
    if match.pattern.is_grown:
        return Refusal.of(match, Fault(match.root, reason))
    keeps_less = options.save == "memory" and rehearse.saves(match)
    if keeps_less or options.inner != "inductor":  # which would run the epilogue op by op
        return Plan(on_kernels, candidates[0], note)
    help = ""
    if not candidates[0].get("tf32", True) and may_be_tf32(_product_of(match)):
        help = "give options={'fp32': 'split'}, with which its forward stays fp32-accurate"
    return Refusal.of(match, Fault(match.root, reason, help))


def gains(own: float, library: float) -> bool:
    """Milliseconds. Is ours plainly less?"""
    return own <= min(_GAIN * library, library - _SAVED)


def timing_key(
    match: Match,
    candidates: Sequence[Mapping[str, Any]],
    tensors: Sequence[rehearse.TensorForm | None],
) -> tuple[object, ...]:
    """All that the times depend on, beside the machine and what `timing` adds."""
    return (
        match.site.kind,
        calls.config_of(match, {}),  # a convolution's stride, padding, dilation, groups
        [dict(choices) for choices in candidates],
        [[spec.name for spec in calls.kernel_specs(match, c)] for c in candidates],
        list(map(str, tensors)),
        rehearse.gradients_of(match),
        rehearse.gradients_of_tensors(match),
        matmul_tf32_requested(),  # which the library's product follows
        torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]  # and its backward
        *(
            getattr(torch.backends.cudnn, flag)
            for flag in ("benchmark", "deterministic", "enabled")
        ),
        torch.backends.cudnn.version(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _compare_convolutions(
    match: Match, candidates: Sequence[Mapping[str, Any]], options: Options
) -> tuple[dict[str, Any] | None, str]:
    """What is fastest, and by what figures; None where it is not ours.

    Where gradients are asked for, the times are of forward and backward together.
    """
    library, *direct = map(dict, candidates)
    # The inner compiler calls the library's convolution, too, turns whole graphs to the layout that
    # suits it, and needs as few passes over its result. Only its precision may not be what is asked
    # for.
    asked = options.fp32 in ("split", "ieee") and may_be_tf32(_product_of(match))
    otherwise = library if asked else None
    if not direct:
        return otherwise, "the library's convolution is the inner compiler's"
    tensors = rehearse.tensors_of(match)
    if tensors is None:
        return otherwise, "sizes unknown, so not timed"
    rivals = _rivals(match, {**library, "again": False}, options)
    key = (*timing_key(match, candidates, tensors), rivals)
    rehearsals = functools.partial(rehearse.convolutions, match, candidates, tensors, rivals)
    try:
        found = timing.medians(key, rehearsals, device_of(match))
    except rehearse.DisagreementError as error:
        warnings.warn(f"fx_fuser: {error}; please report it", stacklevel=2)
        return otherwise, str(error)
    if found is None:
        return otherwise, "no memory to time it"
    if options.replays_cuda_graphs:
        found = [Timing(took.gpu) for took in found]
    ours = [DIRECT, f"{DIRECT} in both directions"][: len(direct)]
    times = dict(zip([LIBRARY, *ours, *(rival.name for rival in rivals)], found))
    note = ", ".join(f"{name} {took}" for name, took in times.items())
    of_ours = [times.pop(name).ms for name in ours]
    fastest, choices = min(zip(of_ours, direct), key=itemgetter(0))
    *_, least_kept = direct
    if least_kept["backward"] == DIRECT and options.save == "memory":
        return least_kept, note
    gained = gains(fastest, min(took.gpu for took in times.values()))
    if gained and options.save == "auto" and _GAIN * of_ours[-1] <= fastest:
        choices = least_kept
    return (choices if gained else otherwise), note


def _product_of(match: Match) -> torch.Tensor:
    return meta_tensor(match.site.nodes[0])  # type: ignore[return-value]


def _rivals(
    match: Match, library: Mapping[str, Any], options: Options
) -> tuple[rehearse.Rival, ...]:
    """What the inner compiler may make of the match's convolution, if it is left alone."""
    if library["tf32"] or not may_be_tf32(_product_of(match)):
        return (rehearse.Rival("in channels_last", library, channels_last=True),)
    if options.fp32 != "follow":
        return ()
    inexact = {**library, "tf32": True}
    return (
        rehearse.Rival("in TF32", inexact),
        rehearse.Rival("in TF32 and channels_last", inexact, channels_last=True),
    )


def _compare(
    match: Match, candidates: Sequence[Mapping[str, Any]], options: Options
) -> tuple[dict[str, Any] | None, str]:
    """What beats the library, forward and, in training, backward together, and by what figures.

    None if nothing does.
    """
    if len(candidates) == 1:
        return None, "no kernel of ours makes this product"
    own = candidates[1]
    tensors = rehearse.tensors_of(match)
    if tensors is None:
        return None, "sizes unknown, so not timed"
    key = timing_key(match, candidates, tensors)
    rehearsals = functools.partial(rehearse.rehearsals, match, candidates, tensors)
    try:
        times = timing.medians(key, rehearsals, device_of(match))
    except rehearse.DisagreementError as error:
        warnings.warn(f"fx_fuser: {error}; please report it", stacklevel=2)
        return None, str(error)
    if times is None:
        return None, "no memory to time it"
    if options.replays_cuda_graphs:
        times = [Timing(took.gpu) for took in times]
    note = f"library {times[0]}, {own['product']} {times[1]}"
    ahead, back = times[:2], [took.gpu for took in times[2:]]
    backward = LIBRARY
    if back:
        note += f"; backward {back[0]:.4g} and {back[1]:.4g} ms"
        if gains(back[1], back[0]):
            backward = own["backward"]
        needed = 0 if options.replays_cuda_graphs else _STEP_CALLS * ahead[1].host
        if ahead[0].gpu + back[0] < needed:
            return None, f"{note}; a training step takes the host some {needed:.2g} ms"
    gained = gains(ahead[1].ms + min(back, default=0), ahead[0].gpu + sum(back[:1]))
    return ({**own, "backward": backward} if gained else None), note
