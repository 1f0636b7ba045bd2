"""Which weights of attention dropout takes, and torch's formula with them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fx_fuser.kernels import attention
from fx_fuser.ops import attention_dropout, run
from fx_fuser.ops.attention_split import BACKWARD, FORWARD

ONES = 0xFFFFFFFF
PI = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0
# Random123's own known answers (its file kat_vectors): rounds, counter and key, words.
KNOWN = (
    (7, (0,) * 6, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, (ONES,) * 6, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, PI, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, (0,) * 6, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, (ONES,) * 6, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
)
HEADS, ROWS = 8, 256
COUNT = HEADS * ROWS * ROWS
SIGMAS = 5  # by chance one test in two million is further off


def words(given: tuple[int, ...], rounds: int) -> list[int]:
    *counter, left, right = (torch.tensor(word) for word in given)
    return [int(word) for word in attention_dropout.philox((left, right), counter, rounds)]


@pytest.mark.parametrize("rounds, given, wanted", KNOWN)
def test_philoxs_known_answers(rounds: int, given: tuple[int, ...], wanted: str) -> None:
    assert words(given, rounds) == [int(word, 16) for word in wanted.split()]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), -123456789012345])
def test_a_weights_number_is_of_seed_head_query_and_key(seed: int) -> None:
    """One by one, as kernels_cu/attention/attention_dropout.cuh says."""
    heads, queries, keys, share = 2, 19, 21, 0.25
    found = attention_dropout.factors(
        torch.tensor([seed]), heads, queries, keys, share, torch.float64
    )
    assert found.shape == (heads, queries, keys)
    key = seed & ONES, seed >> 32 & ONES
    for head, i, j in itertools.product(range(heads), (0, 1, 7, 8, 9, 15, 18), range(keys)):
        made = words((i & ~8, j & ~9, head, 0, *key), 7)
        number = made[2 * (i >> 3 & 1) + (j >> 3 & 1)] >> 16 * (j & 1) & 0x7FFF
        assert found[head, i, j] == (0 if number < 8192 else 4 / 3)


def test_no_length_changes_a_weight() -> None:
    made = [
        attention_dropout.factors(torch.tensor([3]), *sizes, 0.5, torch.float32)
        for sizes in ((3, 40, 50), (2, 17, 9))
    ]
    assert torch.equal(made[0][:2, :17, :9], made[1])


def dropped(seed: int, share: float) -> Tensor:
    made = attention_dropout.factors(torch.tensor([seed]), HEADS, ROWS, ROWS, share, torch.float32)
    return made == 0


def is_near(frequency: Tensor, share: float, count: int) -> bool:
    return abs(float(frequency) - share) <= SIGMAS * math.sqrt(share * (1 - share) / count)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_so_many_are_dropped(share: float) -> None:
    rounded = attention.steps_of(share) / attention.DROPOUT_STEPS
    found = dropped(5, share).double()
    assert is_near(found.mean(), rounded, COUNT)
    for dims in ((0, 1), (0, 2), (1, 2)):  # of a key, of a query, of a head
        means = found.mean(dims)
        worst = means[(means - rounded).abs().argmax()]
        assert is_near(worst, rounded, COUNT // len(means))


SHIFTS = [
    (head, i, j)
    for head, i, j in itertools.product((0, 1), (0, 1, 2, 8, 16, 64), (0, 1, 2, 8, 16, 64))
    if (head, i, j) != (0, 0, 0)
]


def test_weights_know_nothing_of_their_neighbours() -> None:
    share = attention.steps_of(0.3) / attention.DROPOUT_STEPS
    found = dropped(5, 0.3)
    for head, i, j in SHIFTS:
        both = found[head:, i:, j:] & found[: HEADS - head, : ROWS - i, : ROWS - j]
        assert is_near(both.double().mean(), share**2, both.numel()), (head, i, j)
    across = found & found.mT  # a query and a key are no pair
    off_diagonal = across.triu(1).double().sum() / (HEADS * ROWS * (ROWS - 1) / 2)
    assert is_near(off_diagonal, share**2, HEADS * ROWS * (ROWS - 1) // 2)


@pytest.mark.parametrize("other", [6, 4, 5 + 2**32, 5 - 2**63, -5])
def test_seeds_know_nothing_of_each_other(other: int) -> None:
    share = attention.steps_of(0.3) / attention.DROPOUT_STEPS
    both = dropped(5, 0.3) & dropped(other, 0.3)
    assert is_near(both.double().mean(), share**2, COUNT)


def test_all_values_of_a_number_are_as_frequent() -> None:
    classes = 256
    numbers = attention_dropout._numbers(torch.tensor(9), HEADS, ROWS // 16, ROWS // 16)
    counts = torch.bincount((numbers.flatten() * classes) // attention.DROPOUT_STEPS).double()
    expected = COUNT / classes
    square = float(((counts - expected) ** 2 / expected).sum())
    degrees = classes - 1
    assert len(counts) == classes
    assert abs(square - degrees) <= SIGMAS * math.sqrt(2 * degrees)


@pytest.mark.parametrize("share, left", [(1e-6, 1.0), (1.0, 0.0)])
def test_shares_that_round_to_none_or_to_all(share: float, left: float) -> None:
    found = attention_dropout.factors(torch.tensor([1]), 2, 8, 8, share, torch.float32)
    assert found.unique().tolist() == [left]


@pytest.mark.parametrize("d, share, is_made", [
    (64, 0.1, True), (40, 0.9, True), (72, 0.1, False), (64, 1e-6, False), (64, 0.97, False),
    (64, 1.0, False),
])  # fmt: skip
def test_kernels_that_drop(d: int, share: float, is_made: bool) -> None:
    for backward in (False, True):
        spec = attention.spec_for(d, backward, share)
        assert (spec is not None) == is_made
        if spec is not None:
            assert spec in attention.offered() and spec != attention.spec_for(d, backward)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("of_keys", [1, 4])
def test_formulas_are_autograds(causal: bool, of_keys: int) -> None:
    torch.manual_seed(0)
    q, d_out = (torch.randn(2, 4, 9, 16, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, of_keys, 12, 16, dtype=torch.float64) for _ in range(2))
    dropout = torch.tensor([2]), 0.4
    given = "", 0.25, causal
    out, lse = run.IN_TORCH(*run.arguments(FORWARD, (q, k, v, *given, True, *dropout)))
    leaves = [q, *(t.repeat_interleave(4 // of_keys, 1) for t in (k, v))]
    leaves = [t.clone().requires_grad_() for t in leaves]
    logits = leaves[0] @ leaves[1].mT * 0.25
    if causal:
        logits = logits + torch.full((9, 12), -torch.inf, dtype=torch.float64).triu(1)
    factors = attention_dropout.factors(dropout[0], 8, 9, 12, 0.4, torch.float64)
    assert 0.2 < float((factors == 0).double().mean()) < 0.6
    wanted = (logits.softmax(-1) * factors.view(2, 4, 9, 12)) @ leaves[2]
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse[..., :9], logits.logsumexp(-1))
    given = d_out, q, k, v, out, lse, *given, *dropout
    found = run.IN_TORCH(*run.arguments(BACKWARD, given))
    for value, right in zip(found, torch.autograd.grad(wanted, leaves, d_out)):
        torch.testing.assert_close(value, right)


def test_dropout_needs_a_seed() -> None:
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="has no seed"):
        run.IN_TORCH(*run.arguments(FORWARD, (q, q, q, "", 1.0, False, False, None, 0.1)))
