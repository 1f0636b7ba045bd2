"""Which of attention's weights dropout drops: a function of seed, head, query and key alone.

The same as kernels_cu/attention/attention_dropout.cuh, number by number, on any device: so forward
and backward agree, and so do kernels and torch's operations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fx_fuser.kernels import attention

_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 7  # as kernels_cu/common/philox.cuh says
_BLOCK = 16  # queries or keys: a kernel's calls cover parts of them


def factors(
    seed: Tensor, heads: int, queries: int, keys: int, dropout: float, dtype: torch.dtype
) -> Tensor:
    """[heads, queries, keys]: 0 for dropped weights, otherwise 1 / (the share that is kept)."""
    steps = attention.steps_of(dropout)
    numbers = _numbers(seed, heads, -(-queries // _BLOCK), -(-keys // _BLOCK))
    kept = numbers[:, :queries, :keys] >= steps
    # If all are dropped, no weight needs a factor.
    return kept.to(dtype) * (attention.DROPOUT_STEPS / max(attention.DROPOUT_STEPS - steps, 1))


def _numbers(seed: Tensor, heads: int, row_blocks: int, column_blocks: int) -> Tensor:
    """Numbers below DROPOUT_STEPS for all heads' blocks of queries and keys."""
    seed = seed.reshape(())
    to = functools.partial(torch.arange, device=seed.device)
    query = to(row_blocks)[:, None] * _BLOCK + to(8)
    key = to(column_blocks)[:, None] * _BLOCK + to(0, 8, 2)
    counter = [
        query[None, :, :, None, None],
        key[None, None, None],
        to(heads)[:, None, None, None, None],
        torch.zeros_like(seed),
    ]
    words = philox((seed & _WORD, seed >> 32 & _WORD), counter)
    # [head, block, 8 queries, block, 4 pairs of keys]: for queries 8i and keys 8j further on.
    halves = [torch.stack((word, word >> 16), -1) for word in words]
    numbers = torch.stack((torch.stack(halves[:2], 4), torch.stack(halves[2:], 4)), 2)
    whole = numbers.reshape(heads, row_blocks * _BLOCK, column_blocks * _BLOCK)
    return whole & (attention.DROPOUT_STEPS - 1)


def philox(
    key: tuple[Tensor, Tensor], counter: Sequence[Tensor], rounds: int = _ROUNDS
) -> list[Tensor]:
    """Philox4x32: four words of 32 bits, as int64."""
    a, b, c, d = counter
    for i in range(rounds):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # 64 bits, whatever their sign
        left, right = ((k + i * step) & _WORD for k, step in zip(key, _KEY_STEPS))
        a, b = (second >> 32 & _WORD) ^ b ^ left, second & _WORD
        c, d = (first >> 32 & _WORD) ^ d ^ right, first & _WORD
    return [a, b, c, d]
