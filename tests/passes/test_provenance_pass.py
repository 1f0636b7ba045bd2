"""Operands cast up from 16 bits: which pass finds them, and what it leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_provenance import BF16, BOTH, F16, F32, OPTIONS, Body, Noted, check, compiled, found, pair
from test_provenance import without_caches as without_caches
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import fx_fuser
from fx_fuser.native import load
from fx_fuser.options import JOINT_PASS, Options
from fx_fuser.passes import products, provenance
from fx_fuser.planning import plan


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [{"auto": False}, {"patterns": []}, {"fp32": "ieee"}, {"cpu_ops": False}],
    ids=str,
)
def test_options_that_leave_products_alone(options: dict[str, Any]) -> None:
    noted = check(BOTH["linear"], *pair(), **options)
    assert not any(BF16 in dtypes for _, dtypes in noted.ours) and found() == {}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("plan", ["measure", "always"])
@pytest.mark.parametrize("tail", [False, True], ids=["alone", "tail"])
@pytest.mark.parametrize("casts", ["both", "x"])
def test_where_a_site_is_left_to_the_pass(casts: str, tail: bool, plan: str) -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x.float(), w.float() if casts == "both" else w)
        return F.gelu(y) if tail else y

    x, w = pair()
    with torch.no_grad():
        compiled(body, plan=plan)(x, w if casts == "both" else w.float())
    left = plan == "measure" and (casts == "both" or not tail)
    assert (counters["fx_fuser"] == {"auto_linear": 1}) is not left
    assert (sum(found().values()) == 1) is left


def test_explain_says_why_a_site_is_left() -> None:
    class Router(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return F.linear(x.float(), w.float()).sigmoid()

    report = fx_fuser.explain(Router(), *pair(), options={"cpu_ops": True})
    assert not report.fused
    assert [r.reason for r in report.refused] == [
        "an operand is cast up from 16 bits, and a pass over Inductor's graph reads those"
    ]


@pytest.mark.slow
def test_a_convolution_of_what_was_cast_is_no_product() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(F.conv2d(x.float(), w.float()))

    with torch.no_grad():
        compiled(body)(torch.randn(1, 3, 8, 8).bfloat16(), torch.randn(4, 3, 3, 3).bfloat16())
    assert counters["fx_fuser"] == {"auto_conv2d": 1}


@pytest.mark.slow
def test_dynamic_sizes_are_compiled_once() -> None:
    torch._dynamo.reset()
    counters.clear()
    model = torch.compile(BOTH["linear"], backend="fx_fuser", dynamic=True, options=OPTIONS)
    with torch.no_grad():
        for n in (3, 5, 9):
            x, w = torch.randn(2, n, 16).bfloat16(), torch.randn(8, 16).bfloat16()
            torch.testing.assert_close(model(x, w), BOTH["linear"](x, w))
    assert counters["stats"]["unique_graphs"] == 1
    assert found() == {"mm of bfloat16": 1}


def test_the_users_pass_runs_first() -> None:
    noted = Noted()
    check(BOTH["linear"], *pair(), **{JOINT_PASS: noted})
    assert noted.others and not noted.ours
    assert found() == {"mm of bfloat16": 1}


def test_the_kernels_are_loaded_for_the_dtypes_that_are_cast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor's cache may have the graph; the pass does not run then."""
    loaded: list[Any] = []
    monkeypatch.setattr(products, "prepare", lambda *what: loaded.append(what))
    monkeypatch.setattr(plan, "unavailable", lambda device: None)
    monkeypatch.setattr(load, "runs_on", lambda spec, device: True)
    with FakeTensorMode():
        inputs = [torch.empty(4, 4, device="cuda:0", dtype=BF16)]
    last = products.pass_for(Options(), inputs, (BF16,))
    joint = provenance.pass_for(Options(), last, (BF16,))
    assert loaded == [(torch.device("cuda:0"), BF16)]
    assert joint is not None and joint.narrow == (BF16,)
    assert joint.uuid() != provenance.Provenance(narrow=(F16,)).uuid()
    assert provenance.pass_for(Options(), last, ()) is None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("body", BOTH.values(), ids=BOTH.keys())
def test_the_dtypes_that_dynamos_graph_casts(body: Body) -> None:
    seen: list[Any] = []

    def note(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(provenance.narrow_dtypes(gm))
        return gm

    for dtype in (BF16, F16, F32):
        torch._dynamo.reset()
        torch.compile(body, backend=note)(*pair(dtype))
    assert seen == [(BF16,), (F16,), ()]
