"""A match's kernel op on random tensors, called as the compiled model will call it: for timing."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fx_fuser.anchors import ANCHORS
from fx_fuser.anchors.conv2d import Conv2d
from fx_fuser.graph.match.grow import Grown
from fx_fuser.graph.match.pattern import Match
from fx_fuser.graph.read.nodes import hint_of, meta_tensor
from fx_fuser.kernels import KERNELS, reset_fallback
from fx_fuser.kernels.folded import FOLDED
from fx_fuser.kernels.precision import conv_tf32_allowed, matmul_tf32_requested
from fx_fuser.native import launch
from fx_fuser.ops import folded as ops_folded
from fx_fuser.ops.apply import is_host_scalar
from fx_fuser.ops.calls import (
    fused_call,
    gradients_of,
    gradients_of_tensors,
    kernel_specs,
    saves,
)
from fx_fuser.ops.library import FusedCall, gradients
from fx_fuser.planning.timing import Candidate


@dataclass(frozen=True)
class TensorForm:
    """A tensor without its values. offset: of its first element from a multiple of 16 bytes, in
    elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0

    @property
    def bytes(self) -> int:
        """In memory: a broadcast dimension is read once."""
        held = (n for n, step in zip(self.size, self.stride) if step)
        return math.prod(held) * self.dtype.itemsize

    def random(self, generator: torch.Generator, deviation: float = 1.0) -> Tensor:
        """Normal values around 0; zeros and ones if the dtype is not a float."""
        extent = 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride))
        extent = max(extent, 0) + self.offset
        memory = torch.empty(extent, dtype=self.dtype, device=self.device)
        if self.device != generator.device:
            memory.fill_(1)
        elif self.dtype.is_floating_point:
            memory.normal_(0, deviation, generator=generator)
        else:
            memory.random_(0, 2, generator=generator)
        return memory.as_strided(self.size, self.stride, self.offset)


def form_of(node: Node, dtype: torch.dtype | None = None) -> TensorForm | None:
    """The node's form at the sizes of this trace; None if a size is not known when compiling.

    dtype: by default the node's.
    """
    return form_of_value(meta_tensor(node), dtype)


def form_of_value(tensor: Any, dtype: torch.dtype | None = None) -> TensorForm | None:
    """As `form_of`, for a fake tensor."""
    size, stride = (tuple(map(hint_of, v)) for v in (tensor.shape, tensor.stride()))
    if None in size or None in stride:
        return None
    dtype = dtype or tensor.dtype
    offset = (hint_of(tensor.storage_offset()) or 0) % max(16 // dtype.itemsize, 1)
    return TensorForm(size, stride, dtype, tensor.device, offset)  # type: ignore[arg-type]


def tensors_of(match: Match) -> list[TensorForm | None] | None:
    """The kernel op's tensors, operands and the epilogue's, at the sizes of this trace.

    None if a size is not known when compiling.
    """
    site = match.site
    anchor = ANCHORS[site.kind]
    c = meta_tensor(site.nodes[0])
    forms: list[TensorForm | None] = []
    free = (("", node) for node in match.bound.tensors)
    for name, node in (*((n, site.operands[n]) for n in anchor.operands), *free):
        if node is None or meta_tensor(node) is None:
            forms.append(None)
            continue
        form = form_of(node, c.dtype if name in anchor.cast else None)  # type: ignore[union-attr]
        if form is None:
            return None
        forms.append(form)
    return forms


@dataclass(frozen=True)
class Baseline:
    """Stands for the inner compiler's code of a convolution: the kernel op with other choices.

    channels_last: x and weight are in channels_last already; converting them is not timed.
    """

    name: str
    choices: Mapping[str, Any]
    channels_last: bool = False


def convolutions(
    match: Match,
    candidates: Sequence[Mapping[str, Any]],
    tensors: Sequence[TensorForm | None],
    baselines: Sequence[Baseline],
) -> list[Candidate]:
    """A convolution's kernel op with each of plan's candidates, then the baselines.

    If gradients are asked for, each runs its backward, too. Of the library's backward only the
    convolutions run, since the inner compiler needs fewer passes for the rest than torch's ops.
    """
    run = _BenchOp(match, tensors)
    ahead = [run.forward(choices, run.operands) for choices in candidates]
    if len(candidates) > 1:
        compare_choices(ahead, candidates, run.c.dtype)
    dy = run.gradient_of_z() if run.saves else None
    if dy is not None and len(candidates) > 1:
        whole = [functools.partial(run.step, dy, c, run.operands) for c in candidates]
        in_tf32 = run.c.dtype == torch.float32 and conv_tf32_allowed()  # the library's backward
        compare_choices(whole, candidates, run.c.dtype, _FAR_IN_TF32 if in_tf32 else None)
    x, weight, *others = run.operands

    def step_of(choices: Mapping[str, Any], channels_last: bool = False) -> Callable[[], object]:
        def laid(tensor: Tensor) -> Any:
            return _channels_last(tensor) if channels_last else tensor

        operands = [laid(x), laid(weight), *others]
        if dy is None:
            return run.forward(choices, operands)
        return functools.partial(run.least_step, laid(dy), choices, operands)

    timed = [Candidate(step_of(library)) for library in candidates[:1]]
    timed += [Candidate(step_of(fused), run.calls(dy, fused)) for fused in candidates[1:]]
    return timed + [
        Candidate(step_of(baseline.choices, baseline.channels_last)) for baseline in baselines
    ]


def in_layout(
    match: Match,
    baseline: Mapping[str, Any],
    fused: Sequence[Mapping[str, Any]],
    tensors: Sequence[TensorForm | None],
    channels_last: bool,
) -> list[Candidate]:
    """The library's convolution and a pointwise kernel, which stand for the inner compiler's code;
    then each of the candidates. Weights are folded ahead.

    A candidate that is less exact than the library, or loses a NaN, is not timed.
    """
    run = _BenchOp(match, tensors)
    operands = list(run.operands)
    if channels_last:
        run.t = [_channels_last(t) for t in run.t]
        operands = [_channels_last(v) for v in run.operands]
    apart = run.forward(baseline, operands)
    far = _FAR_IN_TF32 if run.c.dtype == torch.float32 and conv_tf32_allowed() else None
    exact = run.forward({**baseline, "tf32": False}, operands)
    timed = [Candidate(apart)]
    for choices in fused:
        made: Callable[[], Sequence[Tensor]]
        if choices["product"] == FOLDED:
            made = run.folded(baseline, operands)
        else:
            made = run.forward(choices, operands)
        try:
            compare_choices([apart, made], [choices], run.c.dtype, far)
            is_exact = far is None or _is_as_exact(exact()[0], apart()[0], made()[0])
        except DisagreementError as error:  # only this candidate is dropped
            error.warn()
            is_exact = False
        if choices["product"] == FOLDED:
            is_exact = is_exact and run.hands_nan_on(baseline, operands)
        timed.append(Candidate(made, made, is_exact))
    return timed


def _channels_last(tensor: Any) -> Any:
    is_image = isinstance(tensor, Tensor) and tensor.ndim == 4
    return tensor.contiguous(memory_format=torch.channels_last) if is_image else tensor


def benches(
    match: Match, candidates: Sequence[Mapping[str, Any]], tensors: Sequence[TensorForm | None]
) -> list[Candidate]:
    """A Linear's kernel op with each of plan's candidates; in training, then the anchor's backward
    with each.
    """
    run = _BenchOp(match, tensors)
    if run.c.device.type == "cuda":
        # Earlier data may have made a kernel fall back: time it without that.
        specs = [spec for choices in candidates for spec in kernel_specs(match, choices)]
        reset_fallback(specs, run.c.device)
    ahead = [run.forward(choices, run.operands) for choices in candidates]
    _compare_each(ahead, candidates, run.c.dtype)
    # The library's op stands for the inner compiler's code, whose host time is unknown.
    timed = [Candidate(call, None if i == 0 else call) for i, call in enumerate(ahead)]
    if not run.needs:
        return timed
    dz = run.gradient_of_z()
    back = [functools.partial(run.backward, choices, dz) for choices in candidates]
    _compare_each(back, candidates, run.c.dtype)
    return [*timed, *map(Candidate, back)]


def _compare_each(
    runs: Sequence[Callable[[], Sequence[Tensor]]],
    candidates: Sequence[Mapping[str, Any]],
    dtype: torch.dtype,
) -> None:
    """Compare each run with the library's, which is the first."""
    for run, choices in zip(runs[1:], candidates[1:]):
        compare_choices([runs[0], run], [choices], dtype)


def tail(
    match: Grown, choices: Mapping[str, Any], tensors: Sequence[TensorForm | None]
) -> list[Candidate]:
    """A grown match with a fused gemm: z alone; z, then its tail in a pointwise kernel, which finds
    some of z in the L2 cache; both in one kernel."""
    assert match.alone is not None
    whole = _BenchOp(match, tensors)
    only_z = _BenchOp(match.alone, tensors[: len(whole.operands)])
    reset_fallback(kernel_specs(match, choices)[1:], whole.c.device)
    reset_fallback(kernel_specs(match.alone, choices)[1:], whole.c.device)
    alone = only_z.forward(choices, only_z.operands)
    fused = whole.forward(choices, whole.operands)
    pointwise = kernel_specs(match, choices)[0]
    held = [t for t in whole.t if not is_host_scalar(t)]
    numbers = [*match.bound.numbers, *(float(t) for t in whole.t if is_host_scalar(t))]
    y = torch.empty_like(fused()[0])

    def apart() -> tuple[Tensor]:
        launch.pointwise(pointwise, y, [alone()[0], *held], numbers)
        return (y,)

    compare_choices([apart, lambda: fused()[:1]], [choices], whole.c.dtype)
    return [Candidate(alone), Candidate(apart), Candidate(fused)]


class DisagreementError(RuntimeError):
    """A fused kernel is further from the library's result than rounding explains."""

    def warn(self) -> None:
        warnings.warn(f"fx_fuser: {self}; please report it", stacklevel=2)


# Relative Frobenius distance: far above the rounding errors of either kernel, far below the error
# of a wrong index or a lost tile.
_FAR = {torch.float32: 1e-5, torch.float16: 2**-7, torch.bfloat16: 2**-5}
_FAR_IN_TF32 = 1e-2
_NEAR = 1e-6  # of two fp32 results
_COMPARED = 2**22  # elements at most, in evenly spaced rows


def compare_choices(
    runs: Sequence[Callable[[], Sequence[Tensor]]],
    candidates: Sequence[Mapping[str, Any]],
    dtype: torch.dtype,
    far: float | None = None,
) -> None:
    """As `compare`, of runs with these choices of plan."""
    in_tf32 = any(c.get("tf32") or KERNELS[c["product"]].in_tf32 for c in candidates)
    compare(runs, candidates[-1]["product"], dtype, far, in_tf32)


def compare(
    runs: Sequence[Callable[[], Sequence[Tensor]]],
    name: str,
    dtype: torch.dtype,
    far: float | None = None,
    in_tf32: bool = False,
) -> None:
    """Raises DisagreementError if the last run's tensors are not the first one's.

    name: of the last run's kernel. far: how far from each other they may be.
    """
    far = far or _FAR[dtype]
    if dtype == torch.float32 and (in_tf32 or matmul_tf32_requested()):
        far = _FAR_IN_TF32
    for library, fused in zip(runs[0](), runs[-1]()):
        found, size = _distance(library, fused)
        if not found <= far * size:
            raise DisagreementError(
                f"the {name} kernel's {list(library.shape)} in {dtype} differs by "
                f"{found / max(size, 1e-30):.1g} from the library's"
            )


def _distance(library: Tensor, fused: Tensor) -> tuple[float, float]:
    """How far the two are from each other, and how far the first one is from 0."""
    # Odd, so that rows of each residue modulo 8 are compared: combs read these as separate tensors.
    step = (1 + library.numel() // _COMPARED) | 1
    exact, found = (v.flatten(0, -2)[::step] if v.ndim > 1 else v for v in (library, fused))
    usual = exact.isfinite()  # an epilogue may take a logarithm
    exact, found = (torch.where(usual, v.double(), 0.0) for v in (exact, found))
    size, distance = (torch.linalg.vector_norm(v).item() for v in (exact, found - exact))
    return distance, size


def _is_as_exact(exact: Tensor, library: Tensor, fused: Tensor) -> bool:
    """Is the fused result at most twice as far from the fp32 one as the library's?

    torch's setting lets the library use TF32. Its result shows whether it does so here.
    """
    theirs, size = _distance(exact, library)
    return _distance(exact, fused)[0] <= 2 * max(theirs, _NEAR * size)


class _BenchOp:
    """One match's op and its random tensors."""

    def __init__(self, match: Match, tensors: Sequence[TensorForm | None]) -> None:
        self.match, self.anchor = match, ANCHORS[match.site.kind]
        c = meta_tensor(match.site.nodes[0])
        assert c is not None
        self.c = c
        # A generator of its own leaves the user's random state alone.
        self.generator = torch.Generator(c.device).manual_seed(0)
        count = len(self.anchor.operands)
        names = (*self.anchor.operands, *[""] * (len(tensors) - count))
        values: list[Any] = []
        for name, form in zip(names, tensors):
            # A weight of deviation 1 would saturate the epilogue.
            deviation = math.prod(form.size[1:]) ** -0.5 if form and name == "weight" else 1.0
            value = form and form.random(self.generator, deviation)
            if name == "running_var" and isinstance(value, Tensor):
                value.abs_().add_(0.1)
            values.append(value)
        self.operands, self.t = values[:count], values[count:]
        self.needs = gradients_of(match)
        self.needs_t = gradients_of_tensors(match)
        self.saves = saves(match)

    def call(
        self, choices: Mapping[str, Any], operands: Sequence[Tensor | None]
    ) -> tuple[FusedCall, dict[str, Tensor | None], bool]:
        """The call, the operands that its op reads, and whether its backward is fused."""
        call = fused_call(self.match, choices)
        named = dict(zip(self.anchor.operands, operands))
        read = dict(zip(named, self.anchor.kernel_operands(named, call.config)))
        fused = self.saves and call.has_fused_backward([*read.values()], self.t, self.needs_t)
        return call, read, fused

    def forward(
        self, choices: Mapping[str, Any], operands: Sequence[Tensor | None]
    ) -> Callable[[], list[Tensor]]:
        """The op with all of its arguments."""
        call, read, _ = self.call(choices, operands)
        return call.bound([*read.values()], self.t, save=self._saves(call, False))

    def folded(
        self, library: Mapping[str, Any], operands: Sequence[Tensor | None]
    ) -> Callable[[], tuple[Tensor]]:
        """The library's fused call, with BatchNorm folded into the weight already."""
        call = fused_call(self.match, library)
        named = dict(zip(self.anchor.operands, operands))
        made = ops_folded.bound(
            named, call.config, call.epilogue, self.t, self.c.dtype, ops_folded.fold_in_torch
        )
        return lambda: (made(),)

    def hands_nan_on(self, library: Mapping[str, Any], operands: Sequence[Any]) -> bool:
        """Does a NaN in x reach the result of `folded`, as it does that of torch's operations?

        cuDNN's frontend asks for that by default, and torch leaves it so, but which kernel runs
        depends on the sizes: so each kind of site is tested. x's first sample is NaN meanwhile.
        """
        if operands[0].numel() == 0:
            return True
        sample = operands[0][0]
        held = sample.clone()
        sample.fill_(torch.nan)
        # Built again, since padding copies x.
        apart, folded = self.forward(library, operands), self.folded(library, operands)
        right, found = (made()[0][0].isnan().any() for made in (apart, folded))
        sample.copy_(held)
        return bool(found or not right)

    def _saves(self, call: FusedCall, fused_backward: bool) -> bool:
        needs = {name: self.needs.get(name, False) for name in self.anchor.operands}
        return self.saves and call.saves(fused_backward, needs, self.needs_t)

    def calls(self, dy: Tensor | None, choices: Mapping[str, Any]) -> Callable[[], object]:
        """The fused ops that a compiled graph calls: forward and, if it is fused, backward."""
        call, read, fused = self.call(choices, self.operands)
        if dy is None and not call.has_statistics:
            return call.evaluation([*read.values()], self.t)
        forward = [*read.values()], self.t, self._saves(call, fused)
        ahead = call.bound(*forward)
        if dy is None or not fused:
            return ahead
        _, (_, *statistics) = call.run(*forward)
        _, back = call.bound_backward(read, self.t, statistics, dy, self.needs)
        return lambda: (ahead(), back())

    def step(
        self, dy: Tensor, choices: Mapping[str, Any], operands: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The result and the gradients that are asked for."""
        call, read, fused = self.call(choices, operands)
        y, outputs = call.run([*read.values()], self.t, save=self._saves(call, fused))
        grads, dt = gradients(call, read, self.t, outputs, dy, self.needs, self.needs_t)
        if call.config.get("training"):
            grads.pop("bias", None)  # zero in exact arithmetic
        found = [*(grads.get(name) for name in self.anchor.operands), *dt]
        return [y, *(grad for grad in found if grad is not None)]

    def least_step(
        self, dy: Tensor, choices: Mapping[str, Any], operands: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """As `step`; of a backward that is not fused, only the convolutions."""
        call, read, fused = self.call(choices, operands)
        if fused:
            return self.step(dy, choices, operands)
        assert isinstance(self.anchor, Conv2d)
        y, outputs = call.run([*read.values()], self.t, save=self._saves(call, fused))
        if call.config["again"]:
            outputs[0] = self.anchor.recompute(read, call.config)
        needs = {name: self.needs.get(name, False) for name in read}
        grads = Conv2d.backward(self.anchor, read, outputs, call.config, dy, needs)
        return [y, *grads.values()]

    def gradient_of_z(self) -> Tensor:
        sizes: Any = tuple(map(hint_of, self.c.shape))
        return torch.empty(sizes, dtype=self.c.dtype, device=self.c.device).normal_(
            generator=self.generator
        )

    def backward(self, choices: Mapping[str, Any], dz: Tensor) -> list[Tensor]:
        named = dict(zip(self.anchor.operands, self.operands))
        config = fused_call(self.match, choices).config
        multiply = KERNELS[config["backward"]].multiply
        return [*self.anchor.backward(named, (), config, dz, self.needs, multiply).values()]
