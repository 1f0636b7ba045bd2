"""Einsums that are products of batches: sites of the anchor bmm, with permuted operands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Program, calls, check, leaf
from test_bmm import PATHS, batch, gated_batch, paths, scores, train_eval
from torch import Tensor, nn

import fx_fuser
from fx_fuser import PatternError, registry
from fx_fuser.testing import assert_equivalent


@pytest.fixture(autouse=True)
def patterns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_patterns", list(registry._patterns))
    for source in (gated_batch, scores, batch):
        fx_fuser.register_pattern(source)
    yield


FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "bik,bkj->bij": ((3, 4, 8), (3, 8, 6)),
    "bik, bjk -> bij": ((3, 4, 8), (3, 6, 8)),
    "bki,bkj->bij": ((3, 8, 4), (3, 8, 6)),
    "ibk,jbk->bij": ((4, 3, 8), (6, 3, 8)),
    "bhqd,bhkd->bhqk": ((2, 3, 4, 8), (2, 3, 6, 8)),
    "bqhd,bkhd->bhqk": ((2, 4, 3, 8), (2, 6, 3, 8)),
    "...qd,...kd->...qk": ((2, 3, 4, 8), (2, 3, 6, 8)),
    "abcik,abckj->abcij": ((2, 1, 3, 4, 8), (2, 1, 3, 8, 6)),
}


@pytest.mark.each_once
@paths
@train_eval
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, train: bool, path: str) -> None:
    model = Program(lambda m, x, w: torch.sigmoid(torch.einsum(form, x, w)) * 2.0)
    inputs = [leaf(*shape) for shape in FORMS[form]]
    graphs = check(model, *inputs, fuses={"gated_batch": 1}, train=train, **PATHS[path])
    assert not calls(graphs).keys() & {"einsum", "matmul", "sigmoid"}


PERMUTED = {
    "bhqk,bkhd->bqhd": ((2, 3, 4, 6), (2, 6, 3, 8)),
    "bik,bkj->ibj": ((3, 4, 8), (3, 8, 6)),
}


@pytest.mark.each_once
@paths
@train_eval
@pytest.mark.parametrize("form", PERMUTED)
def test_a_permuted_result(form: str, train: bool, path: str) -> None:
    """It is a view of the product."""
    model = Program(lambda m, x, w: torch.einsum(form, [x, w]).reshape(-1) * 1.0)
    inputs = [leaf(*shape) for shape in PERMUTED[form]]
    graphs = check(model, *inputs, fuses={"batch": 1}, train=train, **PATHS[path])
    assert "einsum" not in calls(graphs)


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, width = x.shape
        q, k, v = (f(x).view(b, s, self.heads, -1) for f in (self.q, self.k, self.v))
        weights = F.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * self.scale + mask, -1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, s, width)


@pytest.mark.slow
@pytest.mark.each_pair
@paths
@train_eval
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_attention(dynamic: bool, train: bool, path: str) -> None:
    torch.manual_seed(1)
    inputs = leaf(2, 5, 16), torch.randn(5, 5)
    expected = {"scores": 1, "batch": 1}
    graphs = check(
        Attention(), *inputs, fuses=expected, train=train, dynamic=dynamic, **PATHS[path]
    )
    assert "einsum" not in calls(graphs)


@pytest.mark.slow
def test_attention_is_verified() -> None:
    torch.manual_seed(2)
    inputs = torch.randn(2, 5, 16), torch.randn(5, 5)
    assert_equivalent(Attention(), inputs, train=True)
    check(Attention(), *inputs, fuses={"scores": 1, "batch": 1}, verify="always")


LEFT: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "an inner size of one": ("bik,bkj->bij", (3, 4, 1), (3, 8, 6)),
    "a batch of one beside three": ("bik,bkj->bij", (1, 4, 8), (3, 8, 6)),
    "a result in another layout": ("bik,bjk->bji", (3, 4, 8), (3, 6, 8)),
    "two inner sizes": ("bikl,bklj->bij", (3, 4, 2, 5), (3, 2, 5, 6)),
    "an outer product": ("bi,bj->bij", (3, 4), (3, 6)),
}


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_fused_stays_as_it_was_written(case: str) -> None:
    equation, *shapes = LEFT[case]
    model = Program(
        lambda m, x, w, a, b: (
            torch.sigmoid(torch.einsum(equation, x, w)) * 2.0,
            torch.sigmoid(a @ b) * 2.0,
        )
    )
    inputs = [leaf(*s) for s in (*shapes, (2, 3, 4), (2, 4, 5))]
    graphs = check(model, *inputs, fuses={"gated_batch": 1})
    (node,) = (n for n in graphs[0].graph.nodes if n.target is torch.einsum)
    assert node.args[0] == equation
    assert not calls(graphs).keys() & {"permute", "matmul"}


@pytest.mark.slow
@pytest.mark.parametrize("equation", ["bqhd,bkhd->bhqk", "bhqd,bkhd->bqhk"])
def test_beside_a_site_an_einsum_reads_its_result(equation: str) -> None:
    """Where no pattern takes it: its operands are the fused result, in the user's own form."""

    def body(m: Any, x: Tensor, w: Tensor) -> Tensor:
        z = torch.sigmoid(torch.matmul(x, w)) * 2.0
        return torch.tanh(torch.einsum(equation, z, z))

    inputs = leaf(2, 4, 4, 8), leaf(2, 4, 8, 8)
    graphs = check(Program(body), *inputs, fuses={"gated_batch": 1}, patterns=["gated_batch"])
    (node,) = (n for n in graphs[0].graph.nodes if n.target is torch.einsum)
    assert node.args[0] == equation and [str(a) for a in node.args[1:]] == ["getitem"] * 2
    assert not calls(graphs).keys() & {"permute", "matmul"}


def test_in_a_pattern() -> None:
    def cosines(x, weight, a):  # type: ignore[no-untyped-def]
        return torch.tanh(torch.einsum("bik,bjk->bij", x, weight)) * a

    assert fx_fuser.register_pattern(cosines).kind == "bmm"
    model = Program(lambda m, x, w: torch.tanh(x @ w) * 2.0)
    check(model, leaf(3, 4, 8), leaf(3, 8, 6), fuses={"cosines": 1})

    def permuted(x, weight, a):  # type: ignore[no-untyped-def]
        return torch.tanh(torch.einsum("bik,bkj->jib", x, weight)) * a

    with pytest.raises(PatternError, match="0 anchors"):
        fx_fuser.register_pattern(permuted)


def test_what_explain_calls_it() -> None:
    model = Program(lambda m, q, k: torch.sigmoid(torch.einsum("bqhd,bkhd->bhqk", q, k)) * 2.0)
    (site,) = fx_fuser.explain(model, torch.randn(2, 4, 3, 8), torch.randn(2, 6, 3, 8)).fused
    assert site.shapes == {"x": "[2, 3, 4, 8]", "weight": "[2, 3, 8, 6]"}
    assert site.operands["x"] == site.operands["weight"] == "permute"
