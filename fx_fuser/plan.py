"""(matches, options) → how each op will run, or why it is left to the inner compiler.

A Linear on CUDA is fused where one kernel of ours, product and epilogue, beats the library's
product with the pointwise kernel; both are timed on tensors of our own (`fx_fuser.timing`). The
latter stands for what Inductor makes of the region: the same within 3 % (benchmarks/results).

A convolution of few channels is fused where a direct kernel is faster than the library's
convolution in either layout and, in fp32, in TF32 where torch's settings let the library take it,
as they do by default; what is left alone follows them. Any other is fused only where option "fp32"
asks for exactness and those settings would let the library take TF32.

The host calls an op while the GPU runs the one before. A kernel that takes the host longer than the
GPU counts as much as the host's time, and must still beat the GPU's time of what it replaces. A
Linear's training step that takes the GPU less than the host is left.

With option "save" as "memory", what has a backward is fused in any case.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch

from fx_fuser import native, ops, rehearse, timing
from fx_fuser.anchors.base import LIBRARY
from fx_fuser.anchors.conv2d import DIRECT, DIRECT_DTYPES, conv_tf32_allowed
from fx_fuser.anchors.linear import DENSE, SPLIT, matmul_tf32_requested
from fx_fuser.epilogue import CUDA_TYPES
from fx_fuser.errors import BuildError, OptionError
from fx_fuser.match import Fault, Match, Refusal
from fx_fuser.options import Options
from fx_fuser.spell import hint_of, meta_tensor
from fx_fuser.timing import Took

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

    native: kernel op and our autograd rule, rather than the pattern's plain torch ops.
    choices: the configuration of the anchor's op that is ours to choose: `product` and `backward`
        (who makes them), `again` (`fx_fuser.anchors.base`), a convolution's `tf32`.
    note: what runs, and what was measured.
    """

    native: bool
    choices: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


def conv_tf32_requested() -> bool:
    """cuDNN's convolutions allow TF32 by default, which nobody asked for: a fused one takes it only
    if matmul precision says so too.
    """
    return matmul_tf32_requested() and conv_tf32_allowed()


def unavailable(device: torch.device) -> str | None:
    """Why fused kernels cannot run on this device, or None; a missing toolchain warns once."""
    if device.type == "cpu":
        return None
    reason = native.available(device)
    if reason is not None:
        warnings.warn(f"fx_fuser fuses nothing on {device}: {reason}", stacklevel=2)
    return reason


def runs_native(match: Match, options: Options) -> bool:
    """Kernel op and our autograd rule, rather than the pattern's plain torch ops.

    On CPU the inner compiler fuses plain ops better than it can call an opaque reference op.
    """
    return _device(match).type == "cuda" or options.cpu_ops


def decide(matches: Sequence[Match], options: Options) -> list[Plan | Refusal]:
    """For each match how it runs, with all its kernels built and loaded; a Refusal leaves it alone.

    Raises:
        OptionError: option "fp32" asks for what torch's own setting forbids.
        BuildError: a kernel does not compile or load, and there is no other, or options.strict.
    """
    candidates = [_candidates(match, options) for match in matches]
    _build_kernels(matches, candidates, options)
    return [_pick(m, c, options) for m, c in zip(matches, candidates)]


def _device(match: Match) -> torch.device:
    return meta_tensor(match.site.node).device  # type: ignore[union-attr]


def _candidates(match: Match, options: Options) -> list[dict[str, Any]]:
    """The choices that are right for this match, the library's product first."""
    again = options.save == "memory"
    if match.site.kind != "linear":
        asked = conv_tf32_requested() if options.fp32 == "follow" else options.fp32 == "tf32"
        tf32 = asked and _may_be_tf32(match)
        ways = [(LIBRARY, LIBRARY)]
        if _takes_direct(match, options):
            ways.append((DIRECT, LIBRARY))
            if _takes_direct_backward(match):
                ways.append((DIRECT, DIRECT))
        return [{"tf32": tf32, "product": p, "backward": b, "again": again} for p, b in ways]
    found: list[dict[str, Any]] = [{"product": LIBRARY, "backward": LIBRARY, "again": again}]
    product = _own_product(match, options)
    if product is not None and _device(match).type == "cuda":
        backward = SPLIT if product == SPLIT else LIBRARY
        own = {"product": product, "backward": backward, "again": again}
        sources = ops.kernel_sources(match, own)
        if all(native.runs_on(source, _device(match)) for source in sources):
            found.append(own)
    return found


def _own_product(match: Match, options: Options) -> str | None:
    """The product that our kernels can make in the precision that is asked for, or None."""
    tensors = [meta_tensor(node) for node in (match.site.nodes[0], *match.operands)]
    c = tensors[0]
    assert c is not None
    if c.dtype == torch.float64 or not c.is_contiguous():
        return None
    # Computed in double, where the epilogue is; its kernels' accumulators are float.
    if any(CUDA_TYPES[t.dtype] == "double" for t in tensors if t is not None):
        return None
    if c.dtype != torch.float32:
        return DENSE
    precision = options.fp32
    if precision == "follow":
        precision = "tf32" if matmul_tf32_requested() else "split"
    elif precision == "ieee" and _device(match).type == "cuda" and matmul_tf32_requested():
        raise OptionError(
            "option 'fp32' is 'ieee', but torch.backends.cuda.matmul.fp32_precision is 'tf32', "
            "which cuBLAS follows; set it to 'ieee', or give 'split' or 'follow'"
        )
    return {"split": SPLIT, "tf32": DENSE}.get(precision)


def _takes_direct(match: Match, options: Options) -> bool:
    """Is the match's convolution one of those that the direct kernel makes?"""
    site = match.site
    named = {name: site.operands[name] for name in ("x", "weight")}
    c, x, weight = (meta_tensor(node) for node in (site.nodes[0], *named.values()))  # type: ignore[arg-type]
    assert c is not None and x is not None and weight is not None
    operands = [meta_tensor(node) for node in match.operands]
    if any(CUDA_TYPES[t.dtype] == "double" for t in operands if t is not None):
        return False
    if c.dtype not in DIRECT_DTYPES or not all(t.is_contiguous() for t in (c, x, weight)):
        return False
    if c.dtype == torch.float32 and options.fp32 == "ieee":
        return False
    config = rehearse.config_of(match, {})
    if {*config["stride"], *config["dilation"], config["groups"]} != {1}:
        return False
    x_size, weight_size = ([hint_of(n) for n in t.shape] for t in (x, weight))
    if None in (*x_size, *weight_size) or _device(match).type != "cuda":
        return False
    source = ops.kernel_sources(match, {"tf32": False, "product": DIRECT})[-1]
    if not native.runs_on(source, _device(match)):
        return False
    out = meta_tensor(match.root).dtype.itemsize  # type: ignore[union-attr]
    count = native.operands_of(source)
    cut = native.conv_direct_cut(
        x_size,  # type: ignore[arg-type]
        weight_size,  # type: ignore[arg-type]
        config["padding"],
        out,
        operands=count,
        x_bytes=c.dtype.itemsize,
    )
    return bool(cut)


def _takes_direct_backward(match: Match) -> bool:
    """Do the kernels beside the direct one make the gradients that are asked for?"""
    needs = rehearse.gradients_of(match)
    if not any(needs.values()) or not ops.may_have_own_backward(match):
        return False
    tensors = (meta_tensor(match.site.operands[name]) for name in ("x", "weight"))  # type: ignore[arg-type]
    x, weight = ([hint_of(n) for n in tensor.shape] for tensor in tensors)  # type: ignore[union-attr]
    padding = rehearse.config_of(match, {})["padding"]
    x_bytes = meta_tensor(match.site.nodes[0]).dtype.itemsize  # type: ignore[union-attr]
    cut = native.conv_direct_backward_cut(
        x,  # type: ignore[arg-type]
        weight,  # type: ignore[arg-type]
        padding,
        needs["x"],
        x_bytes=x_bytes,
    )
    return bool(cut)


def _build_kernels(
    matches: Sequence[Match], candidates: Sequence[list[dict[str, Any]]], options: Options
) -> None:
    """Compile what may be launched. A product of ours that does not compile is no candidate."""
    try:
        _prepare(matches, candidates)
    except BuildError as error:
        if options.strict:
            raise
        failed = set()
        for match, choices in zip(matches, candidates):
            for choice in choices[1:]:
                sources = tuple(ops.kernel_sources(match, choice))
                if sources not in failed:
                    try:
                        _prepare([match], [[choice]])
                        continue
                    except BuildError:
                        failed.add(sources)  # which takes a while to find out
                choices.remove(choice)
        _prepare(matches, candidates)
        warnings.warn(
            f"fx_fuser: the library's product is taken where ours does not compile: {error}; "
            "please report it",
            stacklevel=2,
        )


def _prepare(matches: Sequence[Match], candidates: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """All in one run of ninja."""
    by_device: dict[torch.device, list[str]] = {}
    for match, choices in zip(matches, candidates):
        device = _device(match)
        if device.type == "cuda":
            for choice in choices:
                by_device.setdefault(device, []).extend(ops.kernel_sources(match, choice))
            if match.site.attrs.get("training"):
                native.prepare_batch_stats(device)
    for device, sources in by_device.items():
        native.prepare(sources, device)


def _pick(
    match: Match, candidates: Sequence[Mapping[str, Any]], options: Options
) -> Plan | Refusal:
    on_kernels = runs_native(match, options)
    *_, preferred = candidates
    if _device(match).type != "cuda":
        return Plan(on_kernels, preferred)
    if options.plan == "always":
        return Plan(on_kernels, preferred, preferred.get("product", ""))
    if match.site.kind == "linear":
        best, note = _compare(match, candidates, options)
    else:
        best, note = _compare_convolutions(match, candidates, options)
    if best is not None:
        return Plan(on_kernels, best, note)
    keeps_less = options.save == "memory" and rehearse.saves(match)
    if keeps_less or options.inner != "inductor":  # which would run the epilogue op by op
        return Plan(on_kernels, candidates[0], note)
    reason = f"nothing is gained ({note}): it is left to the inner compiler"
    help = ""
    if match.site.kind != "linear" and _may_be_tf32(match) and not candidates[0]["tf32"]:
        help = "give options={'fp32': 'split'}, with which its forward stays fp32-accurate"
    return Refusal.of(match, Fault(match.root, reason, help))


def _gains(own: float, library: float) -> bool:
    return own <= min(_GAIN * library, library - _SAVED)


def _key(
    match: Match,
    candidates: Sequence[Mapping[str, Any]],
    tensors: Sequence[rehearse.TensorForm | None],
) -> tuple[object, ...]:
    """All that the times depend on, beside the machine and what `timing` adds."""
    return (
        match.site.kind,
        rehearse.config_of(match, {}),  # a convolution's stride, padding, dilation, groups
        [dict(choices) for choices in candidates],
        [ops.kernel_sources(match, choices) for choices in candidates],
        list(map(str, tensors)),
        rehearse.gradients_of(match),
        rehearse.gradients_of_wildcards(match),
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
    asked = options.fp32 in ("split", "ieee") and _may_be_tf32(match)
    otherwise = library if asked else None
    if not direct:
        return otherwise, "the library's convolution is the inner compiler's"
    tensors = rehearse.tensors_of(match)
    if tensors is None:
        return otherwise, "sizes unknown, so not timed"
    rivals = _rivals(match, {**library, "again": False}, options)
    key = (*_key(match, candidates, tensors), rivals)
    rehearsals = functools.partial(rehearse.convolutions, match, candidates, tensors, rivals)
    try:
        found = timing.medians(key, rehearsals, _device(match))
    except rehearse.DisagreementError as error:
        warnings.warn(f"fx_fuser: {error}; please report it", stacklevel=2)
        return otherwise, str(error)
    if found is None:
        return otherwise, "no memory to time it"
    if options.replays_cuda_graphs:
        found = [Took(took.gpu) for took in found]
    ours = [DIRECT, f"{DIRECT} in both directions"][: len(direct)]
    times = dict(zip([LIBRARY, *ours, *(rival.name for rival in rivals)], found))
    note = ", ".join(f"{name} {took}" for name, took in times.items())
    of_ours = [times.pop(name).ms for name in ours]
    fastest, choices = min(zip(of_ours, direct), key=itemgetter(0))
    *_, least_kept = direct
    if least_kept["backward"] == DIRECT and options.save == "memory":
        return least_kept, note
    gains = _gains(fastest, min(took.gpu for took in times.values()))
    if gains and options.save == "auto" and _GAIN * of_ours[-1] <= fastest:
        choices = least_kept
    return (choices if gains else otherwise), note


def _may_be_tf32(match: Match) -> bool:
    """May the inner compiler's convolution take TF32?"""
    c = meta_tensor(match.site.nodes[0])
    assert c is not None
    return c.dtype == torch.float32 and conv_tf32_allowed()


def _rivals(
    match: Match, library: Mapping[str, Any], options: Options
) -> tuple[rehearse.Rival, ...]:
    """What the inner compiler may make of the match's convolution, if it is left alone."""
    c = meta_tensor(match.site.nodes[0])
    assert c is not None
    if library["tf32"] or not _may_be_tf32(match):
        return (rehearse.Rival("in channels_last", library, turned=True),)
    if options.fp32 != "follow":
        return ()
    inexact = {**library, "tf32": True}
    return (
        rehearse.Rival("in TF32", inexact),
        rehearse.Rival("in TF32 and channels_last", inexact, turned=True),
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
    key = _key(match, candidates, tensors)
    rehearsals = functools.partial(rehearse.rehearsals, match, candidates, tensors)
    try:
        times = timing.medians(key, rehearsals, _device(match))
    except rehearse.DisagreementError as error:
        warnings.warn(f"fx_fuser: {error}; please report it", stacklevel=2)
        return None, str(error)
    if times is None:
        return None, "no memory to time it"
    if options.replays_cuda_graphs:
        times = [Took(took.gpu) for took in times]
    note = f"library {times[0]}, {own['product']} {times[1]}"
    ahead, back = times[:2], [took.gpu for took in times[2:]]
    backward = LIBRARY
    if back:
        note += f"; backward {back[0]:.4g} and {back[1]:.4g} ms"
        if _gains(back[1], back[0]):
            backward = own["backward"]
        needed = 0 if options.replays_cuda_graphs else _STEP_CALLS * ahead[1].host
        if ahead[0].gpu + back[0] < needed:
            return None, f"{note}; a training step takes the host some {needed:.2g} ms"
    gained = _gains(ahead[1].ms + min(back, default=0), ahead[0].gpu + sum(back[:1]))
    return ({**own, "backward": backward} if gained else None), note
