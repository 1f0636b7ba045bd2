"""Which equations are products, held to torch.einsum; and that those of a weight fuse."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import MUL, check, compiled, fused, leaf, linear_program
from torch import Tensor

from fx_fuser.graph.read.einsum import Gemm, classify

PRODUCTS: dict[str, tuple[str, int, int]] = {
    "ik,kj->ij": ("matmul", 2, 2),
    "ik,kj": ("matmul", 2, 2),
    "bik,kn->bin": ("matmul", 3, 2),
    "b i k, k n -> b i n": ("matmul", 3, 2),
    "...k,kn->...n": ("matmul", 4, 2),
    "...a,ab": ("matmul", 3, 2),
    "k,kn->n": ("matmul", 1, 2),
    "Xk,kY->XY": ("matmul", 2, 2),
    "bik,nk->bin": ("linear", 3, 2),
    "...k,nk->...n": ("linear", 2, 2),
    "a...k,nk->a...n": ("linear", 4, 2),
    "ai,bi": ("linear", 2, 2),
    "bik,bkj->bij": ("bmm", 3, 3),
    "bki,bkj->bij": ("bmm", 3, 3),
    "...ik,...kj->...ij": ("bmm", 4, 4),
    "...ik,...kj": ("bmm", 3, 3),
    "bhqk,bhkd->bhqd": ("bmm", 4, 4),
    "bhqd,bhkd->bhqk": ("bmm_nt", 4, 4),
    "bqhd,bkhd->bhqk": ("bmm_nt", 4, 4),
    "kbi,bjk->bij": ("bmm_nt", 3, 3),
}  # fmt: skip
OTHERS: dict[str, tuple[int, int]] = {
    "ki,kj->ij": (2, 2),  # the first operand transposed, without a batch
    "nk,bk->bn": (2, 2),  # the second is the rows
    "ik,kj->ji": (2, 2),
    "jk,ki": (2, 2),  # implicit: ij
    "bhqk,bhkd->bqhd": (4, 4),
    "ij,ij->ij": (2, 2),
    "ij,ij->i": (2, 2),
    "ij,ij": (2, 2),
    "i,j->ij": (1, 1),
    "ikl,klj->ij": (3, 3),
    "bsd,dhk->bshk": (3, 3),
    "ii,ij->ij": (2, 2),
    "ik,kk->ik": (2, 2),
    "ikl,kj->ij": (3, 2),
    "ik,kj->i": (2, 2),
    "ik->ki": (2, 2),
    "ik,kj,jl->il": (2, 2),
    "ik,kj->...ij": (2, 3),
    "...k,...kn->...n": (3, 3),
    "k...,nk->...n": (3, 2),
    "bmik,bkj->bmij": (4, 3),
    "->": (0, 0),
    "ik,kj": (3, 2),
    "0,1": (2, 2),
}


def _by_gemm(found: Gemm, a: Tensor, b: Tensor) -> Tensor:
    a, b = a.permute(found.left), b.permute(found.right)
    return a @ (b.mT if found.op in ("linear", "bmm_nt") else b)


def _sizes(equation: str, ranks: tuple[int, int]) -> list[list[int]]:
    """Another size for each letter; those of an ellipsis are 2."""
    letters = sorted({c for c in equation if c.isalpha()})
    size = {c: 3 + i for i, c in enumerate(letters)}
    found = []
    for text, rank in zip(equation.replace(" ", "").partition("->")[0].split(","), ranks):
        before, _, after = text.partition("...")
        spread = rank - len(before) - len(after)
        found.append([size[c] for c in before] + [2] * spread + [size[c] for c in after])
    return found


@pytest.mark.parametrize("equation", PRODUCTS)
def test_an_einsum_is_that_product(equation: str) -> None:
    op, *ranks = PRODUCTS[equation]
    found = classify(equation, *ranks)
    assert found is not None and found.op == op
    a, b = (torch.randn(s, dtype=torch.float64) for s in _sizes(equation, (ranks[0], ranks[1])))
    expected = torch.einsum(equation, a, b)
    torch.testing.assert_close(_by_gemm(found, a, b), expected)
    assert expected.is_contiguous()  # a product's own layout
    assert a.shape[found.contracted[0]] == b.shape[found.contracted[1]]


@pytest.mark.parametrize("equation", OTHERS)
def test_another_sum_is_none(equation: str) -> None:
    assert classify(equation, *OTHERS[equation]) is None


def test_every_product_of_small_equations_is_right() -> None:
    """All equations of operands of two or three letters out of four."""
    operands = [p for n in (2, 3) for p in itertools.permutations("abcd", n)]
    ops, size = set(), dict(zip("abcd", (2, 3, 4, 5)))
    for a, b in itertools.product(operands, operands):
        for out in itertools.permutations(sorted({*a} ^ {*b} | ({*a} & {*b} - {"a"}))):
            equation = f"{''.join(a)},{''.join(b)}->{''.join(out)}"
            found = classify(equation, len(a), len(b))
            if found is None:
                continue
            ops.add(found.op)
            x, y = (torch.randn([size[c] for c in o], dtype=torch.float64) for o in (a, b))
            expected = torch.einsum(equation, x, y)
            torch.testing.assert_close(_by_gemm(found, x, y), expected, msg=equation)
    assert ops == {"matmul", "linear", "bmm", "bmm_nt"}


def test_without_ranks_only_a_weight_is_told() -> None:
    """A pattern's trace has none."""
    for equation, (op, *_) in PRODUCTS.items():
        found = classify(equation)
        if op in ("matmul", "linear"):
            assert found is not None and found.op == op
        elif "..." in equation:
            assert found is None


# ---- in a graph --------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    "product",
    [
        lambda m, x: torch.einsum("bik,nk->bin", x, m.w),
        lambda m, x: torch.einsum("...k,nk->...n", [x, m.w]),
        lambda m, x: torch.einsum("bik,nk", (x, m.w)),
    ],
    ids=["bik,nk->bin", "...k,nk->...n", "implicit"],
)
def test_an_einsum_of_a_weight_fuses(product: Any, train: bool) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        z = product(m, x)
        return z * torch.sigmoid(z) * 2.0

    check(linear_program(body), leaf(3, 4, 8), fuses={MUL: 1}, train=train)


def test_an_einsum_that_spreads_a_size_of_one_is_none() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        z = torch.einsum("ik,nk->in", x, m.w)
        return z * torch.sigmoid(z) * 2.0

    model = linear_program(body).eval()
    x = leaf(4, 1)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), model(x))
    assert fused() == {}
