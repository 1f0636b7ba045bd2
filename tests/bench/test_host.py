"""`benchmarks.host` without a GPU: what it measures, and that each row has a process of its own."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from benchmarks import host


def test_a_case_is_a_net_of_that_many_items() -> None:
    net = host.net_of("bert 8 × 128", "fp32")
    assert net.sizes("eval", small=False) == net.sizes("train", small=False) == (8, 128)
    assert set(net.precisions.values()) == {"fp32"}
    assert host.net_of("resnet18 × 1", None).sizes("eval", small=False) == (1, 3, 224, 224)
    assert host.net_of("resnet18 × 1", None).precisions["train"] == "amp"


def test_each_row_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the profiler has run in one, its launches take longer."""
    seen: list[list[str]] = []

    def run(command: list[str], check: bool) -> SimpleNamespace:
        seen.append(command[3:])
        return SimpleNamespace(returncode=int("train" in command))

    monkeypatch.setattr(subprocess, "run", run)
    arguments = ["--only", "resnet18 × 1", "bert 8 × 128", "--precision", "bf16"]
    assert host.main(arguments) == 1
    assert len(seen) == 4 and all(command[-2:] == ["--precision", "bf16"] for command in seen)
    assert [(c[1], c[3]) for c in seen[:2]] == [("resnet18 × 1", "eval"), ("resnet18 × 1", "train")]
