"""The nets of the training benchmarks: what fuses in them, and the benchmarks at a CPU's size."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import fx_fuser
from benchmarks import results, training, two_gpus
from benchmarks.nets import Net, small_nets
from benchmarks.training import Curves

NETS = small_nets(scale=4)


@pytest.mark.slow
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
def test_parts_of_one_run_are_joined(tmp_path: Path) -> None:
    parts = []
    for net in ("llama", "resnet"):
        curves = [asdict(Curves(net, "fp32", [[2.0], [1.0]], [2.0], 1))]
        record = {"gpu": "A GPU", "torch": "2", "date": "today", "commit": "abc", "curves": curves}
        parts.append(tmp_path / f"{net}.json")
        results.write(parts[-1], record)
    assert training.main(["--join", *map(str, parts), "--results", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "a-gpu.json").read_text())
    assert [curve["net"] for curve in found["curves"]] == ["llama", "resnet"]
    assert (found["date"], found["commit"]) == ("today", "abc")
    results.write(parts[0], {**json.loads(parts[0].read_text()), "commit": "def"})
    assert training.main(["--join", *map(str, parts), "--results", str(tmp_path)]) == 1
    assert json.loads((tmp_path / "a-gpu.json").read_text()) == found


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
