"""Can attention be torch's fused one, and is it faster by fp16 halves than as written?

As written it is two gemms, each by the library or by the split kernel, and a softmax between them.
Scale and mask are not timed: Inductor fuses them with the softmax. In training the backward counts,
too. `passes.attention_split` then chooses between our kernel and torch's fused one, which it keeps
only where that is faster than ours or nearly so: either is faster than what was written.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fx_fuser.kernels import attention
from fx_fuser.kernels.split import SPLIT_GEMM, reset_fallback, split_gemm
from fx_fuser.ops import run
from fx_fuser.ops.attention_split import BACKWARD, FORWARD, NO_DROPOUT
from fx_fuser.passes import attention_split
from fx_fuser.passes.by_hand.plain import Plain
from fx_fuser.passes.graph_pass import loaded
from fx_fuser.passes.masks import Stays
from fx_fuser.planning import contest
from fx_fuser.planning.bench_ops import TensorForm, form_of_value
from fx_fuser.planning.timing import Candidate

log = logging.getLogger("fx_fuser.passes.by_hand")
# The fused backward recomputes weights from lse. When that was rounded three times, the summed dv
# of 8 x 1024 tokens was off by 1.7 times eager mode's error, where 1.5 is allowed (H200, issue 43):
# tests/passes/test_by_hand_gpu.py must confirm that one rounding is few enough.
_TAKES_TRAINING = True


def check(
    operands: Sequence[Tensor], plain: Plain, trains: bool, on_cpu: bool, strict: bool
) -> None:
    """Raises Stays where an attention of these fake tensors is better left as it is written.

    operands: query, key and value, [batch, heads, rows, elements]; several query heads may share a
    head of keys. on_cpu: there nothing is timed.
    """
    left = attention_split.why_left(operands, on_cpu)
    if left:
        raise Stays(left)
    if on_cpu:
        return
    if not torch.backends.cuda.mem_efficient_sdp_enabled():
        raise Stays("torch's memory-efficient attention is switched off")
    if trains and not _TAKES_TRAINING:
        raise Stays("in training it is less exact than matmul and softmax")
    if trains and torch.are_deterministic_algorithms_enabled():
        raise Stays("the backward of torch's fused attention is not deterministic")
    forms = dict(zip(("query", "key", "value"), map(form_of_value, operands)))
    lost = Race(forms, plain.scale, plain.causal, trains).why_lost(strict)  # type: ignore[arg-type]
    if lost:
        raise Stays(lost)


@dataclass(frozen=True)
class Race:
    """forms: of query, key and value, as in `check`. trains: is there a backward?"""

    forms: Mapping[str, TensorForm]
    scale: float
    causal: bool
    trains: bool

    def why_lost(self, strict: bool) -> str:
        """Empty if our kernel is faster."""
        query = self.forms["query"]
        d, device = query.size[-1], query.device
        specs = [attention.spec_for(d, backward) for backward in (False, True)[: 1 + self.trains]]
        needed = [spec for spec in specs if spec is not None]
        if loaded(needed, device, "attention", strict) != {*specs}:
            return "its kernel does not build"
        by_split = bool(loaded([SPLIT_GEMM], device, "gemms", strict))
        key = "attention by hand", *self.forms.items(), self.scale, self.causal, self.trains
        make = functools.partial(self.candidates, by_split)
        times = contest.times((*key, by_split), make, device)
        if isinstance(times, str):
            return times
        *by_hand, fused = (took.gpu for took in times)
        log.info("attention of %s: by hand %s ms, fused %.4g", query.size, by_hand, fused)
        if contest.gains(fused, min(by_hand)):
            return ""
        return f"{min(by_hand):.3g} ms as it is written, {fused:.3g} fused"

    def candidates(self, by_split: bool) -> list[Candidate]:
        """By the library's gemms and, if there are, split ones, in all combinations; then fused."""
        query = self.forms["query"]
        generator = torch.Generator(query.device).manual_seed(0)
        q, k, v = (form.random(generator) for form in self.forms.values())
        q /= self.scale * query.size[-1] ** 0.5  # logits near 1
        d_out = query.random(generator) if self.trains else None
        times = query.size[1] // k.shape[1]
        keys, values = (t.repeat_interleave(times, 1).flatten(0, 1) for t in (k, v))
        by_hand = q.flatten(0, 1), keys, values, None if d_out is None else d_out.flatten(0, 1)
        gemms: list[_Gemm] = [torch.matmul]
        if by_split:
            reset_fallback([SPLIT_GEMM], query.device)
            gemms.append(_by_halves)
        runs = [
            functools.partial(_by_hand, square, long, *by_hand)
            for square, long in itertools.product(gemms, repeat=2)
        ]
        return [*map(Candidate, (*runs, functools.partial(self._fused, q, k, v, d_out)))]

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor | None) -> Sequence[Tensor]:
        forward, backward = (attention.spec_for(q.shape[-1], which) for which in (False, True))
        assert forward is not None, "it has been loaded"
        save, numbers = d_out is not None, (self.scale, self.causal)
        given = q, k, v, forward.name, *numbers, save, *NO_DROPOUT
        made = run.MANY(*run.arguments(FORWARD, given))
        if d_out is None:
            return made
        assert backward is not None, "it has been loaded"
        given = d_out, q, k, v, *made, backward.name, *numbers, *NO_DROPOUT
        return [*made, *run.MANY(*run.arguments(BACKWARD, given))]


_Gemm = Callable[[Tensor, Tensor], Tensor]


def _by_halves(left: Tensor, right: Tensor) -> Tensor:
    return split_gemm(left, right.mT)


def _by_hand(
    square: _Gemm, long: _Gemm, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor | None
) -> Sequence[Tensor]:
    """[batch · heads, rows, elements]. square: makes [queries, keys]; long: sums over either."""
    weights = square(q, k.mT).softmax(-1)
    out = long(weights, v)
    if d_out is None:
        return (out,)
    d_weights = square(d_out, v.mT)
    d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
    return out, long(d_scores, k), long(d_scores.mT, q), long(weights.mT, d_out)
