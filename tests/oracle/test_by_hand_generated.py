"""Generated attentions, many of them without more than a scale and a causal mask, rewritten as
torch's fused one: values, gradients, strides and NaN are eager's."""

from __future__ import annotations

import os
from collections import Counter

import attentions
import pytest
import torch
from by_hand_graphs import Seen, results, run, with_gradients
from torch import Tensor

from fx_fuser.kernels import attention
from fx_fuser.passes import attention_split

FIRST = int(os.environ.get("FX_FUSER_FUZZ_SEED", 100_000))
LOWEST = torch.finfo(torch.float32).min
# A bit of each of a few terms; of a gradient that is what is left of larger ones, of these: where
# there is one key, eager's is 0.
NEAR = 2e-6


class Writer(attentions.Writer):
    """Of fp32, with as many keys as queries in half of the programs, and simple tails."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.program.autocast = False
        self.dtype = torch.float32
        self.k = self.l if self.draw.random() < 0.5 else self.k
        self.e = self.d if self.draw.random() < 0.8 else self.e

    def step(self) -> None:
        kind = self.draw.random()
        if kind < 0.4:
            self.say(
                self.draw.choice((
                    "s = s * 0.7", "s = s / 1.3", "s = 2 * s", "s = s.float()", "s *= 0.5",
                    "s = s.contiguous()", "s = s.mul_(0.9)",
                ))
            )  # fmt: skip
        elif kind < 0.6:
            super().step()
        else:
            self.mask()

    def mask(self) -> None:
        """Causal, or nearly so, or all true."""
        rows, keys = self.place("L"), self.place("K")
        if len(self.dims[rows]) > 1 or len(self.dims[keys]) > 1:
            return
        sizes = [1] * len(self.dims)
        sizes[rows], sizes[keys] = self.l, self.k
        diagonal = self.draw.choice((0, 0, 0, 1, -1, 100))
        shown = f"torch.ones({self.l}, {self.k}, dtype=torch.bool).tril({diagonal})"
        shown = f"{f'({shown}).T' if rows > keys else shown}.reshape({sizes})"
        self.say(
            self.draw.choice((
                f"s = s.masked_fill(~{shown}, -inf)", f"s = torch.where({shown}, s, -inf)",
                f"s = s + torch.zeros(()).expand({sizes}).masked_fill(~{shown}, -inf)",
                f"s = s.masked_fill_(~{shown}, {LOWEST!r})",
                f"s += torch.zeros({sizes}).masked_fill_(~{shown}, -inf)",
            ))
        )  # fmt: skip


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs are smaller than what the kernels take."""
    monkeypatch.setattr(attention, "spec_for", lambda d, backward=False: attention.spec_of(0))
    monkeypatch.setattr(attention_split, "_is_aligned", lambda form: True)
    monkeypatch.setattr(attentions, "Writer", Writer)


def steps(tensor: Tensor) -> list[int]:
    """Its strides where they count: a fake tensor's are others where there is one element."""
    return [step for size, step in zip(tensor.shape, tensor.stride()) if size > 1]


def attempt(seed: int) -> Seen | None:
    """What became of a program; None of one that does not run, as some with a trap do not."""
    program = attentions.generate(seed)
    attend, given = program.compiled(), [*program.inputs.values()]

    def fresh() -> list[Tensor]:
        return [t.detach().clone().requires_grad_(t.requires_grad) for t in given]

    inputs = fresh()
    try:
        theirs = with_gradients(attend(*inputs), inputs)
    except (RuntimeError, IndexError):
        assert program.trap
        return None
    inputs = fresh()
    seen, made = run(attend, *inputs)
    mine = with_gradients(made, inputs)
    largest = max(float(t.nan_to_num().norm()) for t in theirs)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        is_result = i < len(results(made))
        assert not is_result or steps(a) == steps(b)
        assert torch.equal(a.isnan(), b.isnan())
        a, b = a.nan_to_num(), b.nan_to_num()
        norm = float(b.norm()) if is_result else largest
        assert float((a - b).norm()) <= NEAR * norm, program.text
    return seen


@pytest.mark.parametrize("at", range(4))
def test_a_program(at: int) -> None:
    attempt(FIRST + at)


@pytest.mark.slow
def test_programs() -> None:
    print(f"attentions: seeds from {FIRST} (FX_FUSER_FUZZ_SEED)")
    # Of 150, 29 to 54 are taken: enough of them that a fifth is not missed by chance.
    seeds = range(FIRST, FIRST + 450)
    found = Counter(bool(seen and seen.calls) for seen in map(attempt, seeds))
    assert found[True] > len(seeds) / 5
