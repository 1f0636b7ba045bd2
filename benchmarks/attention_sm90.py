"""Attention in fp32 by split products: checks against float64, and times.

    python -m benchmarks.attention_sm90 [--skip-checks] [--skip-timing] [--cases 60] [--seed 0]

Exits with 1 where a check failed. `library` is ATen's memory-efficient attention, `math` its plain
one. Times are of the GPU, as fx_fuser.timing takes them; `host` is what our call takes the host.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import harness
from benchmarks.linear_sm90 import CUDA, relative
from benchmarks.measure import float32_settings
from fx_fuser import attention, timing
from fx_fuser.attention_pass import BACKWARD, FORWARD

FLOOR = 4e-7  # of the accuracy contract
_ops = torch.ops.fx_fuser


@dataclass(frozen=True)
class Case:
    """q, k and v, a gradient of the result, and what else an attention has."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    bias: Tensor | None = None
    causal: bool = False

    @classmethod
    def of(cls, sizes: Sequence[int], bias: Tensor | None = None, causal: bool = False) -> Case:
        """sizes: B, H, M, N, D, Dv; in memory [B, M, H, D], as attention code has them."""
        b, h, m, n, d, dv = sizes

        def normal(rows: int, columns: int) -> Tensor:
            return torch.randn(b, rows, h, columns, device=CUDA).transpose(1, 2)

        return cls(normal(m, d), normal(n, d), normal(n, dv), normal(m, dv), bias, causal)

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    @property
    def front(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.bias

    def names(self, backward: bool) -> list[str]:
        with_bias = self.bias is not None
        if backward:
            return [s.name for s in attention.backward_specs(with_bias, self.causal)]
        return [s.name for s in attention.forward_specs(with_bias)]

    def ours(self) -> tuple[Tensor, Tensor]:
        rest = (self.causal, self.scale, True, self.names(False))
        out, lse = _ops.attention.default(*self.front, *rest)
        return out, lse

    def backward(self, out: Tensor, lse: Tensor, wanted: Sequence[int] = (0, 1, 2)) -> list[Tensor]:
        rest = (out, lse, self.causal, self.scale, list(wanted), self.names(True))
        found: list[Tensor] = _ops.attention_backward.default(self.dout, *self.front, *rest)
        return found

    def library(self) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = FORWARD(*self.front, True, 0.0, self.causal, scale=self.scale)
        return found

    def library_backward(self, forward: Sequence[Tensor]) -> list[Tensor]:
        mask = [True, True, True, False]
        rest = (*forward, 0.0, mask, self.causal)
        return list(BACKWARD(self.dout, *self.front, *rest, scale=self.scale)[:3])

    def exact(self) -> list[Tensor]:
        """out, dq, dk, dv and the logarithms of the rows' sums, in float64."""
        with torch.enable_grad():
            leaves = [t.detach().double().requires_grad_() for t in (self.q, self.k, self.v)]
            q, k, v = leaves
            scores = q @ k.mT * self.scale
            if self.bias is not None:
                scores = scores + self.bias.double()
            if self.causal:
                seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=CUDA).tril()
                scores = scores.where(seen, -torch.inf)
            blind = (scores == -torch.inf).all(-1, keepdim=True)
            scores = scores.masked_fill(blind, 0)
            out = scores.softmax(-1).masked_fill(blind, 0) @ v
            lse = scores.logsumexp(-1).masked_fill(blind[..., 0], 0)
            gradients = torch.autograd.grad(out, leaves, self.dout.double())
        return [out.detach(), *gradients, lse.detach()]

    def first_planes(self) -> Case:
        """Two heads of the first batch."""

        def of(t: Tensor) -> Tensor:
            return t[:1, :2]

        bias = None if self.bias is None else of(self.bias)
        return Case(of(self.q), of(self.k), of(self.v), of(self.dout), bias, self.causal)


# ---- checks --------------------------------------------------------------------------------------


def _random_bias(sizes: Sequence[int], choose: random.Random) -> Tensor | None:
    b, h, m, n = sizes
    if choose.random() < 0.5:
        return None
    kept = [size if choose.random() < 0.5 else 1 for size in (b, h, m, n)]
    bias = torch.randn(kept, device=CUDA)
    if choose.random() < 0.5:
        bias[bias > 0.5] = -torch.inf
    return bias.expand(b, h, m, n) if choose.random() < 0.5 else bias


def sweep(cases: int, seed: int, failures: list[str]) -> float:
    """Random sizes, masks and wanted gradients; returns the largest error seen."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    largest = 0.0
    for i in range(cases):
        lead = choose.randint(1, 3), choose.randint(1, 4)
        m, n = choose.choice((1, choose.randint(1, 700))), choose.randint(1, 700)
        n = choose.choice((n, m))
        # Of widths that the library has kernels for, to which strained data goes.
        sizes = (*lead, m, n, 8 * choose.randint(1, 17), 8 * choose.randint(1, 17))
        case = Case.of(sizes, _random_bias(sizes[:4], choose), choose.random() < 0.5)
        what = f"case {i}: {sizes}, {'causal' if case.causal else 'full'}, bias "
        what += str(None if case.bias is None else tuple(case.bias.shape))
        out, lse = case.ours()
        wanted = choose.choice(([0, 1, 2], [0], [1], [2], [1, 2]))
        found = [out, *case.backward(out, lse, wanted), lse[..., :m]]
        *exact, sums = case.exact()
        truth = [exact[0], *(exact[1 + place] for place in wanted), sums]
        names = ("out", *(f"d{'qkv'[place]}" for place in wanted), "lse")
        # Of a row that sees one key the gradients of q and k are what rounding leaves of zero.
        few = (min(m, n) if case.causal else n) < 16
        rounded = case.scale * sizes[5] ** 0.5 if few else 1e-3
        least = {"dq": rounded, "dk": rounded, "lse": 1.0}
        for name, one, other in zip(names, found, truth, strict=True):
            size = float(other.norm()) + least.get(name, 1e-3) * other.numel() ** 0.5
            error = float((one.double() - other).norm()) / size
            largest = max(largest, error)
            if not error <= 3e-6:
                failures.append(f"{what}: {name} is {error:.1e} away")
        if not bool((lse[..., m:] == torch.inf).all()):
            failures.append(f"{what}: lse has no inf behind its rows")
    return largest


# ---- time ----------------------------------------------------------------------------------------


def problems() -> list[tuple[str, Case]]:
    llama = (4, 16, 1024, 1024, 128, 128)
    mask = torch.full((1, 1, 1024, 1024), -torch.inf, device=CUDA).triu(1)
    return [
        ("Llama, causal", Case.of(llama, causal=True)),
        ("Llama, mask", Case.of(llama, mask.expand(4, 16, 1024, 1024))),
        ("GPT-2, causal", Case.of((8, 12, 1024, 1024, 64, 64), causal=True)),
        ("ViT", Case.of((64, 12, 197, 197, 64, 64))),
        ("BERT", Case.of((16, 12, 512, 512, 64, 64))),
        ("long", Case.of((1, 16, 4096, 4096, 128, 128))),
        ("long, causal", Case.of((1, 16, 4096, 4096, 128, 128), causal=True)),
    ]


@dataclass(frozen=True)
class Row:
    problem: str
    ours: float
    host: float
    library: float
    math: float
    error: float  # the largest of the results'
    library_error: float


def _math(case: Case) -> tuple[Callable[[], object], Callable[[], object]]:
    leaves = [t.detach().requires_grad_() for t in (case.q, case.k, case.v)]
    q, k, v = leaves

    def forward() -> Tensor:
        with sdpa_kernel([SDPBackend.MATH]):
            return scaled_dot_product_attention(
                q, k, v, attn_mask=case.bias, is_causal=case.causal, scale=case.scale
            )

    with torch.enable_grad():
        out = forward()
    return forward, lambda: torch.autograd.grad(out, leaves, case.dout, retain_graph=True)


def _error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest of the first planes' errors."""
    pairs = zip(found, exact, strict=True)
    return max(relative(one[:1, :2], other) for one, other in pairs)


def _row(
    name: str,
    ways: Sequence[Callable[[], object]],
    found: Sequence[Sequence[Tensor]],
    exact: Sequence[Tensor],
    failures: list[str],
) -> Row:
    error, beside = (_error(tensors, exact) for tensors in found)
    if not error <= max(1.5 * beside, FLOOR):
        failures.append(f"{name}: error {error:.1e}, the library's {beside:.1e}")
    own, *others = ways
    made = [timing.Way(own, own), *map(timing.Way, others)]
    mine, library, plain = timing.times_of(made, CUDA)
    return Row(name, mine.gpu, mine.host, library.gpu, plain.gpu, error, beside)


def times(failures: list[str]) -> list[Row]:
    rows: list[Row] = []
    for name, case in problems():
        out, lse = case.ours()
        aten = case.library()
        exact = case.first_planes().exact()
        forward, backward = _math(case)
        rows.append(
            _row(
                f"{name}, forward",
                (case.ours, case.library, forward),
                ([out], [aten[0]]),
                exact[:1],
                failures,
            )
        )
        own = functools.partial(case.backward, out, lse)
        library = functools.partial(case.library_backward, aten)
        found = own(), library()
        ways = own, library, backward
        rows.append(_row(f"{name}, backward", ways, found, exact[1:4], failures))
        del forward, backward, ways, found
        torch.cuda.empty_cache()
    return rows


def prepare() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    attention.prepare(attention.all_specs(), device)


def main() -> int:
    chosen = harness.parser("attention_sm90", cases=60).parse_args()
    done = harness.progress()
    prepare()
    done("built")
    failures: list[str] = []
    tables = []
    with float32_settings("fp32"):
        if not chosen.skip_checks:
            largest = sweep(chosen.cases, chosen.seed, failures)
            done(f"{chosen.cases} random cases, largest error {largest:.1e}")
        if not chosen.skip_timing:
            with torch.no_grad():
                rows = times(failures)
            heads = ["", "ours ms", "host", "library", "math", "error", "library's"]
            formats = ["", ".3f", ".3f", ".3f", ".3f", ".1e", ".1e"]
            tables.append(tabulate(map(astuple, rows), heads, floatfmt=formats))
            done("timing")
    return harness.report(tables, failures)


if __name__ == "__main__":
    sys.exit(main())
