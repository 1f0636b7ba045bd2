"""Which gemm is this einsum?  An equation of two operands → `matmul`, `linear`, `bmm`, `bmm_nt`.

classify("...k,nk->...n")            linear: the second operand is a weight [N, K]
classify("bik,kn->bin")              matmul: it is [K, N]
classify("bhqd,bhkd->bhqk", 4, 4)    bmm_nt: both have the batch; the second is [..., N, K]
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_OPERAND = r"([a-zA-Z]*(?:\.\.\.)?[a-zA-Z]*)"
_EQUATION = re.compile(rf"{_OPERAND},{_OPERAND}(?:->{_OPERAND})?")


@dataclass(frozen=True)
class Gemm:
    """The gemm that an equation is. Sizes of 1 are not checked: einsum broadcasts them, a gemm
    does not.

    op: `matmul` (left [*M, K], right [K, N]), `linear` (right [N, K]), `bmm` (left [*B, M, K],
    right [*B, K, N]) or `bmm_nt` (right [*B, N, K]).
    left, right: permutations of the operands into these orders; for `matmul` and `linear` the
    identity. contracted: the dimension of K in each operand as it is.
    """

    op: str
    left: tuple[int, ...]
    right: tuple[int, ...]
    contracted: tuple[int, int]


def classify(
    equation: str, left_rank: int | None = None, right_rank: int | None = None
) -> Gemm | None:
    """The gemm that the equation is, if its result has the gemm's order of dimensions; else None.

    The ranks are needed if there is an ellipsis.
    """
    found = labels(equation, left_rank, right_rank)
    if found is None:
        return None
    a, b, out = found
    batch = [label for label in a if label in b and label in out]
    summed = [label for label in a if label in b and label not in out]
    rows = [label for label in a if label not in b]
    columns = [label for label in b if label not in a]
    if len(summed) != 1 or len(columns) != 1 or out != batch + rows + columns:
        return None
    contracted = a.index(summed[0]), b.index(summed[0])
    if not batch:
        if a[-1:] != summed or "..." in b:
            return None
        op = "matmul" if b == summed + columns else "linear"
        return Gemm(op, tuple(range(len(a))), (0, 1), contracted)
    if len(rows) != 1 or "..." in batch:
        return None
    transposed = contracted[1] > b.index(columns[0])
    right = batch + (columns + summed if transposed else summed + columns)
    return Gemm(
        "bmm_nt" if transposed else "bmm",
        tuple(map(a.index, batch + rows + summed)),
        tuple(map(b.index, right)),
        contracted,
    )


def labels(
    equation: str, left_rank: int | None = None, right_rank: int | None = None
) -> tuple[list[str], list[str], list[str]] | None:
    """The labels of the dimensions of both operands and of the result; None if it takes a diagonal
    or does not have two operands. Those of an ellipsis are `.1`, `.2`, from its end.
    """
    found = _EQUATION.fullmatch(equation.replace(" ", ""))
    if found is None:
        return None
    a, b = _labels(found[1], left_rank), _labels(found[2], right_rank)
    if a is None or b is None or len({*a}) < len(a) or len({*b}) < len(b):  # a diagonal
        return None
    return a, b, _implicit(a, b) if found[3] is None else _result(found[3], a, b)


def _labels(text: str, rank: int | None) -> list[str] | None:
    """One label per dimension. Those of an ellipsis are counted from its end, as it broadcasts.

    Without a rank, one label stands for the whole ellipsis.
    """
    before, dots, after = text.partition("...")
    if rank is None:
        return [*before, dots, *after] if dots else [*before]
    spread = rank - len(before) - len(after)
    if spread < 0 or (spread and not dots):
        return None
    return [*before, *(f".{i}" for i in range(spread, 0, -1)), *after]


def _implicit(a: list[str], b: list[str]) -> list[str]:
    """The labels of an unwritten result: the ellipsis, then what occurs once, alphabetically."""
    counts = Counter(a + b)
    return _spread(a, b) + sorted(c for c, n in counts.items() if n == 1 and c.isalpha())


def _result(text: str, a: list[str], b: list[str]) -> list[str]:
    before, dots, after = text.partition("...")
    return [*before, *(_spread(a, b) if dots else ()), *after]


def _spread(a: list[str], b: list[str]) -> list[str]:
    return max(([c for c in labels if not c.isalpha()] for labels in (a, b)), key=len)
