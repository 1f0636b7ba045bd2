"""Gemms from planes in Inductor's graphs: which matrices have one plane for several gemms, which
gemms pay for theirs. On a CPU the ops are torch's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Mapping

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fx_fuser.kernels.planes import MAKE_PLANE, PLANES_GEMMS, plane_elements
from fx_fuser.passes.planes import PlaneProducts
from fx_fuser.passes.planes.choice import Offer, chosen

_PLANE = torch.ops.fx_fuser.plane.default
_PRODUCT = torch.ops.fx_fuser.planes_product.default


def passed(function: Callable[..., object], *given: Tensor) -> GraphModule:
    gm = make_fx(function, tracing_mode="fake")(*given)
    PlaneProducts(strict=True, on_cpu=True)(gm.graph)
    gm.recompile()
    return gm


def counts(gm: GraphModule) -> tuple[int, int]:
    """Planes and products."""
    targets = [node.target for node in gm.graph.nodes]
    return targets.count(_PLANE), targets.count(_PRODUCT)


def test_forward_and_both_gradients_read_three_planes() -> None:
    x, weight, dz = torch.randn(6, 8), torch.randn(5, 8), torch.randn(6, 5)

    def step(x: Tensor, weight: Tensor, dz: Tensor) -> list[Tensor]:
        return [x @ weight.t(), dz @ weight, dz.t() @ x, (x.t() @ dz).t()]

    gm = passed(step, x, weight, dz)
    assert counts(gm) == (3, 4)
    for found, wanted in zip(gm(x, weight, dz), step(x, weight, dz)):
        torch.testing.assert_close(found, wanted)
    kernels = [node.args[-1] for node in gm.graph.nodes if node.target == _PRODUCT]
    forms = (True, True), (True, False), (False, False), (False, False)
    assert kernels == [PLANES_GEMMS[form].name for form in forms]


def test_an_addend_is_added() -> None:
    bias, x, weight = torch.randn(5), torch.randn(6, 8), torch.randn(5, 8)
    gm = passed(lambda b, x, w: torch.addmm(b, x, w.t()), bias, x, weight)
    assert counts(gm) == (2, 1)
    torch.testing.assert_close(gm(bias, x, weight), torch.addmm(bias, x, weight.t()))


@pytest.mark.parametrize(
    ("why", "a", "b"),
    [
        ("16 bits", torch.randn(6, 8).half(), torch.randn(8, 5).half()),
        ("float64", torch.randn(6, 8).double(), torch.randn(8, 5).double()),
        ("neither adjacent", torch.randn(6, 16)[:, ::2], torch.randn(8, 5)),
        ("one row", torch.randn(1, 8), torch.randn(8, 5)),
        ("one column", torch.randn(6, 8), torch.randn(8, 1)),
    ],
)
def test_stays(why: str, a: Tensor, b: Tensor) -> None:
    assert counts(passed(torch.mm, a, b)) == (0, 0), why


def test_a_factor_of_addmm_stays() -> None:
    given = torch.randn(6, 5), torch.randn(6, 8), torch.randn(8, 5)
    gm = passed(lambda c, a, b: torch.addmm(c, a, b, beta=0.5), *given)
    assert counts(gm) == (0, 0)


def test_a_plane_has_room_for_its_facts() -> None:
    for matrix in (torch.randn(6, 9), torch.randn(9, 6).t(), torch.randn(6, 16)[:, :9]):
        gm = passed(torch.mm, matrix, torch.randn(9, 4))
        plane = next(node for node in gm.graph.nodes if node.target == _PLANE)
        assert plane.meta["val"].shape == (plane_elements(matrix),)
        assert plane.args[1] == MAKE_PLANE.name


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
