"""Which kernel each match runs on, measured, or why it is left to the inner compiler.

A Linear on CUDA is fused where one kernel, gemm with epilogue, beats the library's gemm followed by
the pointwise kernel. Both are timed on random tensors (`planning.timing`). The latter stands for
Inductor's code of the region: the same within 3 % (benchmarks/results).

A convolution is fused where a kernel beats the library's convolution (`planning.convolutions`): the
direct one against either layout and, in fp32, TF32 as well, if torch's settings let the library use
it, as they do by default; the others, which are for inference, in the layout that the graph has.
Without a kernel it is fused only if option "fp32" asks for exactness while those settings would let
the library use TF32.

A Linear is left where its training step is launch-bound, and BatchNorms are not folded in a graph
whose convolutions are (`planning.launches`).

With option "save" as "memory", every match that has a backward is fused.

`fx_fuser.kernels` knows the choices at a site, `planning.contest` which one wins. A failure of
fx_fuser at one site affects only that site.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fx_fuser import kernels
from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.base import LIBRARY
from fx_fuser.anchors.conv2d import Conv2d
from fx_fuser.errors import BuildError, OptionError
from fx_fuser.graph.match.pattern import Fault, Match, Refusal
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.kernels import KERNELS
from fx_fuser.kernels.base import odd_rows
from fx_fuser.kernels.folded import FOLDED, addend_of_relu
from fx_fuser.kernels.precision import asked_precision, may_be_tf32
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec, texts_of
from fx_fuser.ops import calls
from fx_fuser.options import Options
from fx_fuser.planning import bench_ops, contest, convolutions, launches, surroundings
from fx_fuser.planning.case import MatchCase, device_of, timing_key
from fx_fuser.planning.timing import STEP_CALLS, Timing

log = logging.getLogger("fx_fuser.planning.plan")


@dataclass(frozen=True)
class Plan:
    """How one match runs.

    native: kernel op and its autograd rule, rather than plain torch ops.
    choices: configuration arguments of the anchor's op: `product` and `backward` (the backends),
        `again` (`fx_fuser.anchors.base`), a convolution's `tf32`.
    note: what runs, and what was measured. match: what is fused, if not the whole match: of a grown
    one perhaps z alone (`fx_fuser.planning.gate`).
    """

    native: bool
    choices: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    match: Match | None = None


def unavailable(device: torch.device) -> str | None:
    """Why fused kernels cannot run on this device, or None; a missing toolchain warns once."""
    if device.type == "cpu":
        return None
    reason = kernels.unavailable(device)
    if reason is not None:
        warnings.warn(f"fx_fuser fuses nothing on {device}: {reason}", stacklevel=2)
    return reason


ON_CPU = "on a CPU Inductor does as well by itself"


def runs_native(match: Match, options: Options) -> bool:
    """Does it run the kernel op and its autograd rule, rather than plain torch ops?

    On CPU the inner compiler fuses plain ops better than it can call an opaque reference op.
    """
    return device_of(match).type == "cuda" or options.cpu_ops


def no_gain(match: Match, options: Options) -> str:
    """Why no fused kernel can gain at a grown match, so that none is timed; empty if one can.

    One can for an fp32 gemm that is not small, and for a convolution that a kernel supports. In 16
    bits and TF32 the library's gemm of many rows is as fast as the dense kernel
    (kernels_cu/NOTES.md).
    """
    if device_of(match).type != "cuda":
        return "" if options.cpu_ops else ON_CPU
    case = MatchCase(match, options)
    *_, best = kernels.candidates(case)
    kernel = KERNELS[best["product"]]
    if options.plan == "measure" and kernel.is_too_small(case):
        return "the library takes about 10 us for it, as long as a kernel takes to start"
    if kernel.grows:
        return ""
    if isinstance(ANCHORS[match.site.kind], Conv2d):
        return "fx_fuser has no kernel for this convolution (docs/kernels.md lists those it has)"
    dtype = meta_tensor(match.site.nodes[0]).dtype  # type: ignore[union-attr]
    asked = asked_precision(options)
    if dtype != torch.float32 or asked == "tf32":
        if dtype != torch.float32 and (rows := _odd_rows(match, dtype)):
            slow = f"the library has no fast kernel for rows of {rows} elements"
            # The condition of `passes.padding.settings`.
            if options.inner != "inductor" or not options.users_pass("shape_padding"):
                return slow
            return f"{slow}; a later pass may pad it or use a kernel for unaligned rows"
        precision = "TF32" if dtype == torch.float32 else str(dtype).removeprefix("torch.")
        return f"in {precision} the library's gemm is as fast"
    if asked == "ieee":
        return "option 'fp32' is 'ieee': the library's gemm is the only one"
    return "fx_fuser's fp32 gemms need a result that is row-major"


def _odd_rows(match: Match, dtype: torch.dtype) -> str:
    site = match.site
    operands = (site.operands[name] for name in ANCHORS[site.kind].operands if name != "bias")
    held = (meta_tensor(node) for node in (site.nodes[0], *operands) if node is not None)
    return " and ".join(map(str, odd_rows([t for t in held if t is not None], dtype)))


def needs_inference(match: Match, options: Options) -> str:
    """Why a convolution without a kernel is left, if there is one for inference, or for a frozen
    BatchNorm; else empty."""
    site = match.site
    if not isinstance(ANCHORS[site.kind], Conv2d):
        return ""
    frozen = MatchCase(match, options, without=("gamma",))
    if frozen.gradients() != calls.gradients_of(match) and len(kernels.candidates(frozen)) > 1:
        return (
            "fx_fuser's kernel for it has no gradient of a BatchNorm's weight: it needs "
            "requires_grad_(False) there, or torch.no_grad()"
        )
    trains = bool(site.attrs.get("training")) and site.operands["running_mean"] is not None
    needs = ["model.eval()"] * trains + ["torch.no_grad()"] * calls.saves(match)
    if trains:
        match = replace(match, site=replace(site, attrs={**site.attrs, "training": False}))
    case = MatchCase(match, options, in_inference=True)
    if not needs or len(kernels.candidates(case)) == 1:
        return ""
    return f"fx_fuser's kernels for it are for inference: it needs {' and '.join(needs)}"


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

    candidates = at_each(lambda i, m: kernels.candidates(MatchCase(m, options)))
    _build_kernels(matches, candidates, options, failed)
    picked = at_each(lambda i, match: _pick(match, candidates[i], options))
    folded = {i for i, chosen in enumerate(picked) if _product(chosen) == FOLDED}
    if folded and launches.counts(matches, options):
        times = at_each(
            lambda i, m: launches.times_of(m, candidates[i], _product(picked[i]), options)
        )
        if waits := launches.bound(times, folded):
            picked = at_each(
                lambda i, match: (
                    _pick(match, candidates[i], options, waits) if i in folded else picked[i]
                )
            )
    plans = [failed.get(i, plan) for i, plan in enumerate(picked)]
    _add_branches(matches, candidates, plans)
    return plans


def guarded(
    match: Match,
    options: Options,
    step: Callable[[int, Match], Any],
    i: int,
    failed: dict[int, Refusal],
) -> Any:
    """The step's value; if it raises, None, and a Refusal in `failed`."""
    try:
        return step(i, match)
    except Exception as error:
        if options.strict or isinstance(error, OptionError):
            raise
        log.info("a site is left to the model's own ops", exc_info=True)
        failed[i] = Refusal.of(match, Fault(match.root, f"{type(error).__name__}: {error}"))
        failed[i] = replace(failed[i], failed=True)
        return None


def _build_kernels(
    matches: Sequence[Match],
    candidates: Sequence[list[dict[str, Any]] | None],
    options: Options,
    failed: dict[int, Refusal],
) -> None:
    """Compile what may be launched. Candidates whose fused kernel does not compile are dropped."""
    pairs = [(m, c) for m, c in zip(matches, candidates) if c is not None]
    try:
        prepare(pairs)
        return
    except BuildError as error:
        if options.strict:
            raise
        cause = error
    # Translation units that make no kernel. A failing compile takes seconds, so none is repeated.
    known: dict[frozenset[str], BuildError] = {}

    def prepare_one(match: Match, choice: dict[str, Any]) -> None:
        specs = calls.kernel_specs(match, choice)
        texts = frozenset(texts_of(specs))
        for failed, error in known.items():
            if failed <= texts:
                raise error
        try:
            prepare([(match, [choice])])
        except BuildError as error:
            # Each one that does not compile; if all do and the kernel does not load, all together.
            missing = load.not_built(specs, device_of(match)).values()
            alone = [frozenset([text]) for of_spec in missing for text in of_spec]
            known.update(dict.fromkeys(alone or [texts], error))
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
            f"fx_fuser uses the library where a fused kernel does not compile: {cause}; "
            "please report it",
            stacklevel=2,
        )


def prepare(pairs: Sequence[tuple[Match, Sequence[Mapping[str, Any]]]]) -> None:
    """Build and load the kernels of all choices, in one run of ninja."""
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


def _title(choices: Mapping[str, Any], match: Match) -> str:
    """What makes the product, as `explain` names it."""
    return KERNELS[choices["product"]].title(device_of(match))


def _pick(
    match: Match,
    candidates: Sequence[Mapping[str, Any]],
    options: Options,
    waits: Timing | None = None,
) -> Plan | Refusal:
    """waits: the times of a launch-bound graph, in which nothing is folded."""
    on_kernels = runs_native(match, options)
    *_, preferred = candidates
    if device_of(match).type != "cuda":
        return Plan(on_kernels, preferred)
    if options.plan == "always":
        return Plan(on_kernels, preferred, _title(preferred, match))
    if isinstance(ANCHORS[match.site.kind], Conv2d):
        best, note = convolutions.compare(match, candidates, options, folds=waits is None)
        if waits is not None and best is None:
            note += launches.note(waits)
            remedy = contest.host_note(options)
            note += "" if remedy in note else remedy
    else:
        best, note = _compare(match, candidates, options)
    if best is not None and (best["product"] != LIBRARY or not match.pattern.is_grown):
        return Plan(on_kernels, best, note)
    reason = f"nothing is gained ({note}): it is left to the inner compiler"
    if match.pattern.is_grown:
        return Refusal.of(match, Fault(match.root, reason))
    keeps_less = candidates[0]["again"] and calls.saves(match)
    if keeps_less or options.inner != "inductor":  # which would run the epilogue op by op
        return Plan(on_kernels, candidates[0], note)
    if len(candidates) == 1 and (needed := needs_inference(match, options)):
        reason = f"{needed}; it is left to the inner compiler"
    help = ""
    if not candidates[0].get("tf32", True) and may_be_tf32(convolutions.output_of(match)):
        help = "give options={'fp32': 'split'}, which keeps its forward fp32-accurate"
    return Refusal.of(match, Fault(match.root, reason, help))


def _product(chosen: Any) -> str | None:
    return chosen.choices.get("product") if isinstance(chosen, Plan) else None


def _add_branches(
    matches: Sequence[Match],
    candidates: Sequence[list[dict[str, Any]] | None],
    plans: list[Any],
) -> None:
    """Fold BatchNorms without activation whose result one folded site adds, as in a downsampling
    branch: their scale goes into their weight, their shift into that site's bias. What is left of
    them is the convolution.
    """
    of_root = {match.root: i for i, match in enumerate(matches)}
    for match, chosen in zip(matches, plans):
        if _product(chosen) != FOLDED:
            continue
        addend = addend_of_relu(match.bound.epilogue)
        if not addend:
            continue
        i = of_root.get(match.bound.tensors[int(addend[1:])])
        if i is None or not isinstance(plans[i], Refusal) or plans[i].failed:
            continue
        branch = matches[i]
        offered = [c for c in candidates[i] or () if c["product"] == FOLDED]
        only_here = match.nodes.issuperset(branch.view.readers[branch.root])
        if offered and only_here and not branch.bound.epilogue.steps:
            plans[i] = Plan(True, offered[0], "its shift goes to the site that adds it")


def _compare(
    match: Match, candidates: Sequence[Mapping[str, Any]], options: Options
) -> tuple[dict[str, Any] | None, str]:
    """The choices that beat the library, with the figures; None if none do.

    In training, times are of forward and backward together.
    """
    if len(candidates) == 1:
        return None, "fx_fuser has no kernel for this gemm"
    tensors = bench_ops.tensors_of(match)
    if tensors is None:
        return None, "sizes unknown, so not timed"
    key = timing_key(match, candidates, tensors)
    benches = functools.partial(bench_ops.benches, match, candidates, tensors)
    times = contest.times(key, benches, device_of(match), options)
    if isinstance(times, str):
        return None, times
    count = len(candidates)
    ahead, back = times[:count], [took.gpu for took in times[count:]]
    of_fused = [f"{_title(c, match)} {took}" for c, took in zip(candidates[1:], ahead[1:])]
    note = ", ".join([f"library {ahead[0]}", *of_fused])
    if back:
        note += f"; backward {' and '.join(f'{ms:.4g}' for ms in back)} ms"
    of_library, *of_each = back or [0.0] * count
    # In training a fused forward may go with the library's backward.
    steps = [
        Timing(*(ms + min(of_library, own) for ms in took)) for took, own in zip(ahead[1:], of_each)
    ]
    library = ahead[0].gpu + of_library
    if back and not options.replays_cuda_graphs:
        # If the GPU takes less, the host's time decides, and a fused op adds to it.
        needed = [STEP_CALLS * took.host for took in ahead[1:]]
        if max(needed) > library:
            note += f"; the host needs about {max(needed):.2g} ms for a training step"
        steps = [Timing(step.gpu, ms) if ms > library else step for step, ms in zip(steps, needed)]
    copy = surroundings.ms_into_cat(match)
    won = contest.winner(steps, library, [copy] * len(steps), options)
    if won.place is None:
        return None, note + won.note
    chosen = dict(candidates[1 + won.place])
    if not back or not contest.gains(of_each[won.place], of_library):
        chosen["backward"] = LIBRARY
    return chosen, note
