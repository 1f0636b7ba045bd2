"""The nets of the training benchmarks: what fuses in them, and the benchmarks at a CPU's size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fx_fuser
from benchmarks import training, two_gpus
from benchmarks.nets import Net, small_nets
from benchmarks.training import Curves

NETS = small_nets(scale=4)


@pytest.mark.parametrize("net", NETS, ids=lambda net: net.name)
def test_their_sites_are_found(net: Net) -> None:
    x, _ = net.batch(torch.Generator().manual_seed(0))
    report = fx_fuser.explain(net.make(), x, train=True)
    assert [site.pattern for site in report.fused] == [net.pattern] * net.sites


@pytest.mark.parametrize("net", NETS, ids=lambda net: net.name)
def test_a_batch_is_the_same_for_a_seed(net: Net) -> None:
    one, same, other = (net.batch(torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    for a, b, c in zip(one, same, other):
        assert torch.equal(a, b) and not torch.equal(a, c)


def test_a_curve_beyond_the_spread_is_a_failure() -> None:
    curves = Curves("resnet", "fp32", [[2.0, 1.0], [2.2, 1.1]], [2.1, 1.0], 10)
    assert curves.spread() == pytest.approx([0.2, 0.1])
    assert curves.distance() == pytest.approx(0.5)
    curves.fx_fuser[1] = float("nan")
    assert curves.distance() == float("inf")


@pytest.mark.slow
def test_curves_are_recorded_and_judged(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--size", "small", "--net", "llama", "--precision", "fp32"]
    arguments += ["--steps", "25", "--seeds", "2", "--results", str(tmp_path), "--commit", "abc"]
    assert training.main(arguments) == 0
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert found["commit"] == "abc" and len(found["curves"][0]["fx_fuser"]) == 1
    assert path.with_suffix(".svg").exists()


@pytest.mark.slow
def test_two_devices_are_as_one(tmp_path: Path) -> None:
    arguments = ["--size", "small", "--results", str(tmp_path), "--commit", "abc"]
    assert two_gpus.main(arguments) == 0
    (path,) = tmp_path.glob("*.json")
    assert len(json.loads(path.read_text())["rows"]) == 2 * len(two_gpus.WAYS)
