"""Which gemms pay for the planes that they share."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Hashable, Mapping
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fx_fuser.passes import planes as of_passes
from fx_fuser.passes.planes import PlaneProducts
from fx_fuser.passes.planes.choice import Offer, chosen


def timed(
    patch: pytest.MonkeyPatch, function: Callable[..., object], *given: Tensor, plane: float
) -> list[str]:
    """Which gemms are taken if the library takes 1 ms, and one from planes 0.5 ms and a plane so
    many, a third of it where the largest value is known. A pass over 2^20 elements takes 1 ms."""
    patch.setattr(of_passes, "prepare", lambda device: None)
    patch.setattr(of_passes, "_gemm_ms", lambda *_: (1.0, 0.5))
    patch.setattr(of_passes, "_plane_ms", lambda form, order, known: plane / (3 if known else 1))
    of_device = SimpleNamespace(bandwidth=1e3 * 8 * 2**20)
    patch.setattr(of_passes, "limits", SimpleNamespace(of=lambda device: of_device))
    gm = make_fx(function, tracing_mode="fake")(*given)
    one = PlaneProducts(on_cpu=True)
    found = {node: uses for node in gm.graph.nodes if (uses := one.uses(node)) is not None}
    taken = of_passes._faster(found)
    return [node.name for node in found if node in taken]


def test_planes_are_paid_for_by_all_that_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(x: Tensor, w: Tensor, dz: Tensor) -> list[Tensor]:
        return [(dz @ w.t()).tanh(), (dz.t() @ x).tanh()]

    given = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8)
    taken = functools.partial(timed, monkeypatch)
    assert taken(both, *given, plane=0.3) == ["mm", "mm_1"]  # three planes, 0.9 of 1
    assert taken(both, *given, plane=0.4) == []
    assert taken(lambda x, w, _: (x @ w).tanh(), *given, plane=0.3) == []
    assert taken(lambda x, w, _: (x.tanh() @ w).tanh(), *given, plane=0.3) == ["mm"]  # 0.1 + 0.3


def test_a_result_that_nothing_joins_costs_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(1024, 1024), torch.randn(1024, 1024)
    taken = functools.partial(timed, monkeypatch)
    assert taken(lambda x, w: (x @ w).tanh(), x, w, plane=0.2) == ["mm"]
    assert taken(lambda x, w: (x @ w).view(-1).tanh(), x, w, plane=0.2) == ["mm"]
    assert taken(lambda x, w: x @ w, x, w, plane=0.2) == []
    assert taken(lambda x, w: ((x @ w).tanh(), x @ w), x, w, plane=0.01) == ["mm"]


# ---- the choice ----------------------------------------------------------------------------------


def total(kept: set[str], offers: Mapping[str, Offer], costs: Mapping[Hashable, float]) -> float:
    """ms that the library takes more."""
    planes = {plane for gemm in kept for plane in offers[gemm].planes}
    return sum(offers[gemm].gain for gemm in kept) - sum(costs[plane] for plane in planes)


def test_gemms_share_the_cost_of_a_plane() -> None:
    costs = {"x": 0.6, "w": 0.1, "v": 0.1}
    offers = {
        "one": Offer(1.0, 0.5, frozenset({"x", "w"})),
        "other": Offer(1.0, 0.5, frozenset({"x", "v"})),
    }
    assert chosen(offers, costs) == {"one", "other"}
    assert chosen({"one": offers["one"]}, costs) == set()


def test_a_gemm_that_pays_for_nobody_goes() -> None:
    costs = {"x": 0.1, "w": 0.1, "v": 0.6}
    offers = {
        "pays": Offer(1.0, 0.5, frozenset({"x", "w"})),
        "does not": Offer(1.0, 0.5, frozenset({"x", "v"})),
        "is slower": Offer(0.4, 0.5, frozenset({"x", "w"})),
    }
    assert chosen(offers, costs) == {"pays"}


def test_the_choice_never_loses_and_is_seldom_far_from_the_best() -> None:
    draw = random.Random(0)
    shares = []
    for _ in range(300):
        costs: dict[Hashable, float] = {f"p{i}": draw.uniform(0, 0.5) for i in range(4)}
        offers = {
            f"g{i}": Offer(1.0, draw.uniform(0.3, 1.1), frozenset(draw.sample(sorted(costs), 2)))  # type: ignore[type-var]
            for i in range(5)
        }
        best = max(
            total(set(kept), offers, costs)
            for count in range(6)
            for kept in itertools.combinations(offers, count)
        )
        found = total(chosen(offers, costs), offers, costs)
        assert found >= 0
        shares.append((found, best))
    assert sum(found for found, _ in shares) >= 0.95 * sum(best for _, best in shares)
