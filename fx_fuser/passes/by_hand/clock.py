"""Can attention be one call, and is that faster than as written?

In fp32 the call is torch's fused one, by fp16 halves. As written it is two gemms, each by the
library or by the split kernel, and a softmax between them. Scale and mask are not timed: Inductor
fuses them with the softmax. In training the backward counts, too. `passes.attention_split` then
chooses between our kernel and torch's fused one, which it keeps only where that is faster than ours
or nearly so: either is faster than what was written.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.kernels import attention
from fx_fuser.kernels.attention import gathered, window
from fx_fuser.kernels.split import SPLIT_GEMM, reset_fallback, split_gemm
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import run
from fx_fuser.ops.attention_bias import gathered as gathered_op
from fx_fuser.ops.attention_bias import window as window_op
from fx_fuser.ops.attention_split import BACKWARD, FORWARD, NO_DROPOUT
from fx_fuser.passes import attention_split
from fx_fuser.passes.attention_split import ATTENTION, ATTENTION_BACKWARD, biased
from fx_fuser.passes.by_hand.plain import Plain
from fx_fuser.passes.graph_pass import loaded
from fx_fuser.passes.masks import Stays
from fx_fuser.planning import contest
from fx_fuser.planning.bench_ops import TensorForm, compare, form_of_value
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
        return f"{min(by_hand):.3g} ms as written, {fused:.3g} fused"

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


# ---- of windows --------------------------------------------------------------------------------

_LANES = 16  # of a row of torch's mask, at most, in whole vectors
# With fewer scores, launching the model's own operations takes longer than running them.
_FEW_SCORES = 2**20


@dataclass(frozen=True)
class Windows:
    """`fx_fuser.ops.attention_bias.window` beside two gemms of the library with a softmax between
    them, or, if it is safe, beside torch's call. What is added to the scores is not timed, nor its
    gradient behind torch's backward: Inductor fuses the one, and the other costs what is written
    more than the op."""

    forms: Mapping[str, TensorForm]
    scale: float
    is_safe: bool
    trains: bool

    @classmethod
    def of(
        cls, operands: Sequence[Tensor], bias: Tensor, dtype: torch.dtype, scale: float,
        is_safe: bool, trains: bool,
    ) -> Windows:  # fmt: skip
        """Of fake tensors. dtype: that operands are cast to."""
        forms = {n: form_of_value(t, dtype) for n, t in zip(("query", "key", "value"), operands)}
        forms["bias"] = form_of_value(bias)
        return cls(forms, scale, is_safe, trains)  # type: ignore[arg-type]

    @property
    def _specs(self) -> list[KernelSpec | None]:
        q, k = self.forms["query"], self.forms["key"]
        lengths = q.size[2], k.size[2]
        some = (False, True)[: 1 + self.trains]
        return [window.spec_for(q.size[3], q.dtype, lengths, which) for which in some]

    def check(self, on_cpu: bool, strict: bool) -> None:
        """Raises Stays where the attention is better left as it is written."""
        q, k, v, bias = self.forms.values()
        if None in self._specs or (q.size[:2], k.size) != (k.size[:2], v.size):
            raise Stays(f"no kernel takes sizes of {q.size}, {k.size} and {v.size}")
        if 0 in q.size or 2 * bias.size[0] > q.size[0]:
            raise Stays("too few of its batches share a bias")
        for name, form in self.forms.items():
            if name != "bias" and not biased.is_aligned(form):
                raise Stays(f"its {name} does not have rows of whole 16-byte vectors")
        if on_cpu:
            return
        if math.prod((*q.size[:3], k.size[2])) < _FEW_SCORES:
            raise Stays("it is small: its launches take as long")
        if lost := self._why_lost(strict):
            raise Stays(lost)

    def _why_lost(self, strict: bool) -> str:
        """Empty if ours is faster."""
        query = self.forms["query"]
        needed = [spec for spec in self._specs if spec is not None]
        if loaded(needed, query.device, "attention", strict) != {*needed}:
            return "its kernel does not build"
        key = "attention of windows", *self.forms.items(), self.scale, self.is_safe, self.trains
        times = contest.times(key, self.candidates, query.device)
        if isinstance(times, str):
            return times
        written, fused = (took.gpu for took in times)
        log.info("windows %s: as written %.4g ms, fused %.4g", query.size, written, fused)
        if contest.gains(fused, written):
            return ""
        return f"{written:.3g} ms as written, {fused:.3g} fused"

    def candidates(self) -> list[Candidate]:
        """As it is written, by the library or torch; fused."""
        query, bias = self.forms["query"], self.forms["bias"]
        generator = torch.Generator(query.device).manual_seed(0)
        tensors = [form.random(generator) for form in self.forms.values()]
        tensors[0] /= self.scale * query.size[-1] ** 0.5  # logits near 1
        d_out = query.random(generator) if self.trains else None
        some = min(query.size[0], 8 * bias.size[0])
        few = [*(t[:some] for t in tensors[:3]), tensors[3]]
        of_few = None if d_out is None else d_out[:some]
        runs = [functools.partial(self._fused, op, few, of_few) for op in (run.IN_TORCH, run.MANY)]
        compare(runs, "attention of windows", query.dtype)
        fused = functools.partial(self._fused, run.MANY, tensors, d_out)
        if self.is_safe:
            return [Candidate(self._torchs(tensors, d_out)), Candidate(fused)]
        q, k, v = (t.flatten(0, 1).contiguous() for t in tensors[:3])
        d_rows = None if d_out is None else d_out.flatten(0, 1).contiguous()
        by_hand = functools.partial(_by_hand, torch.matmul, torch.matmul, q, k, v, d_rows)
        return [Candidate(by_hand), Candidate(fused)]

    def _torchs(
        self, tensors: Sequence[Tensor], d_out: Tensor | None
    ) -> Callable[[], Sequence[Tensor]]:
        """Its call, which reads the bias in 16 bits, of all batches, with rows of whole vectors."""
        q, k, v, bias = tensors
        rows = F.pad(bias.to(q.dtype), (0, -bias.shape[3] % _LANES))
        whole = rows.repeat(q.shape[0] // bias.shape[0], 1, 1, 1)[..., : bias.shape[3]]
        if d_out is None:
            forward = functools.partial(F.scaled_dot_product_attention, scale=self.scale)
            return lambda: [forward(q, k, v, whole)]

        def both() -> Sequence[Tensor]:
            out, lse, *drawn = ATTENTION(q, k, v, whole, True, scale=self.scale)
            given = d_out, q, k, v, whole, out, lse, *drawn, 0.0, [True] * 4
            return [out, *ATTENTION_BACKWARD(*given, scale=self.scale)]

        return both

    def _fused(
        self, op: Callable[..., list[Tensor]], tensors: Sequence[Tensor], d_out: Tensor | None
    ) -> Sequence[Tensor]:
        forward, *backward = (spec.name for spec in self._specs if spec is not None)
        numbers = self.scale, self.is_safe
        made = op(*run.arguments(window_op.FORWARD, (*tensors, forward, *numbers)))
        if d_out is None:
            return made
        given = d_out, *tensors, *backward, *numbers, True
        return [*made, *op(*run.arguments(window_op.BACKWARD, given))]


# ---- gathers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gather:
    """`fx_fuser.ops.attention_bias.gathered` beside torch's operations, whose gradient adds by
    atomic operations, as Inductor's code does."""

    x: TensorForm
    index: TensorForm  # [rows, columns]
    transposed: bool

    def check(self, on_cpu: bool, strict: bool) -> None:
        """Raises Stays where it is better left as it is written."""
        if on_cpu:
            return
        if math.prod((*self.x.size[:-2], *self.index.size)) < _FEW_SCORES:
            raise Stays("it is small: its launches take as long")
        spec, device = gathered.spec_of(self.x.dtype), self.x.device
        if loaded([spec], device, "gathers", strict) != {spec}:
            raise Stays("its kernel does not build")
        times = contest.times(("gather", self), self.candidates, device)
        if isinstance(times, str):
            raise Stays(times)
        torchs, ours = (took.gpu for took in times)
        log.info("gather of %s: torch's %.4g ms, ours %.4g", self.x.size, torchs, ours)
        if not contest.gains(ours, torchs):
            raise Stays(f"{torchs:.3g} ms by torch, {ours:.3g} by its kernels")

    def candidates(self) -> list[Candidate]:
        """Torch's, ours. The index is as DeBERTa's: neighbours read neighbouring places."""
        device, (rows, columns) = self.x.device, self.index.size
        x = self.x.random(torch.Generator(device).manual_seed(0)).flatten(0, -3)
        places = x.shape[2]
        at = torch.arange(rows, device=device)[:, None] - torch.arange(columns, device=device)
        index = (at + places // 2).clamp(0, places - 1)
        sizes = (columns, rows) if self.transposed else (rows, columns)
        d_out = x.new_empty(x.shape[0], *sizes).normal_()

        def torchs() -> Sequence[Tensor]:
            whole = index.expand(x.shape[0], -1, -1)
            out = x.gather(-1, whole)
            out = out.mT.contiguous() if self.transposed else out
            of_rows = d_out.mT if self.transposed else d_out
            return out, torch.zeros_like(x).scatter_add_(-1, whole, of_rows)

        runs = [functools.partial(self._by, op, x, index, d_out) for op in (run.IN_TORCH, run.MANY)]
        compare(runs, "gather", x.dtype)
        return [Candidate(torchs), Candidate(runs[1])]

    def _by(
        self, op: Callable[..., list[Tensor]], x: Tensor, index: Tensor, d_out: Tensor
    ) -> list[Tensor]:
        name, places = gathered.spec_of(x.dtype).name, x.shape[2]
        made = op(*run.arguments(gathered_op.FORWARD, (x, index, name, self.transposed)))
        if self.transposed:
            (d_out,) = op(*gathered_op.turning(d_out, name))
        order = op(*run.arguments(gathered_op.ORDER, (index, name, places)))
        given = d_out, index, *order, name, places
        return [*made, *op(*run.arguments(gathered_op.BACKWARD, given))]


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
