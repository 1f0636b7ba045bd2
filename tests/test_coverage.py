"""benchmarks/coverage.py: which anchors of whole models are fused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks import coverage


@pytest.mark.parametrize("name", ["AdaLN (as Boltz's)", "triangle multiplication (as Boltz's)"])
def test_every_anchor_is_fused(name: str) -> None:
    row = coverage.examined(name)
    assert coverage.is_right(row) and row.left == {}
    assert row.named + row.grown == row.anchors > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, m in coverage.MODELS.items() if m.package != "torch"])
def test_every_anchor_of_a_real_model_is_fused(name: str) -> None:
    pytest.importorskip(coverage.MODELS[name].package, reason="an optional package")
    row = coverage.examined(name)
    assert coverage.is_right(row), row
    assert row.left == {} and row.named + row.grown == row.anchors


def test_what_is_in_the_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(self.lin)(x)

    model = coverage.Model("torch", lambda *_: (Alias(), {"x": torch.randn(4, 8)}))
    monkeypatch.setitem(coverage.MODELS, "alias", model)
    row = coverage.examined("alias")
    assert (row.named + row.grown, row.anchors) == (0, sum(row.left.values()))


def test_a_wrong_row_is_noticed() -> None:
    row = coverage.Row("m", "torch", "2.13", "2026-11-23", error=[1e-6, 1e-7], eager=[1e-7, 1e-7])
    assert not coverage.is_right(row)
    row.error = [1.4e-7, 1e-7]
    assert coverage.is_right(row)
    row.failed = "it raised"
    assert not coverage.is_right(row)


def test_the_committed_rows_are_right() -> None:
    rows = coverage.read()
    assert len(rows) >= 19 and all(map(coverage.is_right, rows))
