"""benchmarks/coverage.py: which anchors of whole models are fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import coverage, coverage_gpu


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdaLN (as Boltz's)", "triangle multiplication (as Boltz's)"])
def test_every_anchor_is_fused(name: str) -> None:
    row = coverage.examined(name)
    assert coverage.is_right(row) and row.left == {}
    assert row.named + row.grown == row.anchors > 1


@pytest.mark.each_once
@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, m in coverage.MODELS.items() if m.package != "torch"])
def test_every_anchor_of_a_real_model_is_fused(name: str) -> None:
    pytest.importorskip(coverage.MODELS[name].package, reason="an optional package")
    row = coverage.examined(name)
    assert coverage.is_right(row), row
    assert row.left == {} and row.named + row.grown == row.anchors


@pytest.mark.slow
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


def _gpu_row(**changes: Any) -> coverage_gpu.Row:
    good: dict[str, Any] = {
        "compile_s": {"inductor": 10.0, "fx_fuser": 12.9},
        "gpu_ms": {"inductor": 2.0, "fx_fuser": 1.0},
        "error": 1.4e-6,
        "eager": 1e-6,
    }
    row: dict[str, Any] = {"model": "m", "package": "torch", "phase": "training", "date": "d"}
    row["machine"] = {"gpu": "g", "driver": "d", "torch": "t"}
    return coverage_gpu.Row(**{**row, "commit": "c", **good, **changes})


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, []),
        ({"compile_s": {"inductor": 40.0, "fx_fuser": 43.9}}, []),
        ({"error": 2e-6, "inductor": 2e-6}, []),
        ({"failed": "it raised"}, ["it raised"]),
        ({"error": 2e-6}, ["error 2.0e-06, Inductor's 0.0e+00"]),
        (
            {"compile_s": {"inductor": 10.0, "fx_fuser": 13.1}},
            ["compiles in 13.1 s, Inductor in 10.0"],
        ),
        ({"gpu_ms": {"inductor": 1.0, "fx_fuser": 1.03}}, ["1.030 of Inductor's time"]),
    ],
)
def test_what_falls_short_on_a_gpu_is_said(changes: dict[str, Any], said: list[str]) -> None:
    row = _gpu_row(**changes)
    assert coverage_gpu.faults(row) == said
    assert "; ".join(said) in coverage_gpu.table([row])


def test_the_committed_rows_of_a_gpu_are_accurate_and_as_fast() -> None:
    rows = coverage_gpu.read()
    assert len(rows) >= 36
    assert [f for row in rows for f in coverage_gpu.faults(row) if "compiles in" not in f] == []
