"""Views between an anchor and its tail, and inside the tail: they move below what is fused.

`x` is [2, 5, 8], the Linear has 6 features; h is z seen as [2, 5, 3, 2] or so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    GROWTH,
    MUL,
    check,
    compiled,
    conv_program,
    epilogues,
    leaf,
    linear_program,
    recorded,
    slow_but,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fx_fuser
from fx_fuser import reading
from fx_fuser.graph.match import grow
from fx_fuser.graph.prepare import reindex

Body = Callable[[Any, Tensor, Tensor], Any]
SIGMOID = "v0 = sigmoid(z)"
SCALED = "v0 = sigmoid(z); v1 = mul(v0, t0)"
TWICE = "v0 = sigmoid(z); v1 = mul(v0, s0)"


def x() -> Tensor:
    return leaf(2, 5, 8)


def grows(body: Body, t: Tensor | None = None, *, takes: list[str], **settings: Any) -> None:
    counts = {"auto_linear": len(takes)} if takes else {}
    graphs = check(
        linear_program(body),
        x(),
        leaf(3, 2) if t is None else t,
        fuses=counts,
        **{**GROWTH, **settings},
    )
    assert epilogues(graphs) == takes


# ---- what moves -----------------------------------------------------------------------------


MOVES: dict[str, tuple[Body, Tensor, str]] = {
    "view": (lambda m, x, t: torch.sigmoid(m.lin(x).view(2, 5, 3, 2)) * 2, leaf(1), TWICE),
    "view, -1": (lambda m, x, t: torch.sigmoid(m.lin(x).view(2, -1, 3, 2)) * 2, leaf(1), TWICE),
    "unflatten": (lambda m, x, t: torch.sigmoid(m.lin(x).unflatten(2, (3, 2))) * 2, leaf(1), TWICE),
    "flatten": (lambda m, x, t: torch.sigmoid(m.lin(x).flatten(0, 1)) * 2, leaf(1), TWICE),
    "reshape": (lambda m, x, t: torch.sigmoid(m.lin(x).reshape(10, 2, 3)) * 2, leaf(1), TWICE),
    "ravel": (lambda m, x, t: torch.sigmoid(m.lin(x).ravel()) * 2, leaf(1), TWICE),
    "squeeze": (lambda m, x, t: torch.sigmoid(m.lin(x[:1]).squeeze(0)) * 2, leaf(1), TWICE),
    "unsqueeze": (lambda m, x, t: torch.sigmoid(m.lin(x)[:, None]) * 2, leaf(1), TWICE),
    "unsqueeze at the end": (
        lambda m, x, t: torch.sigmoid(m.lin(x)[..., None]) * t,
        leaf(5, 6, 1),
        SCALED,
    ),
    "unsqueeze at both ends": (
        lambda m, x, t: torch.sigmoid(m.lin(x)[None, ..., None, :]) * t,
        leaf(1, 2, 1, 1, 6),
        SCALED,
    ),
    "an index of rows": (lambda m, x, t: torch.sigmoid(m.lin(x)[:1, None]) * 2, leaf(1), ""),
    "unsqueeze, named": (lambda m, x, t: torch.sigmoid(m.lin(x).unsqueeze(1)) * 2, leaf(1), TWICE),
    "same sizes": (lambda m, x, t: torch.sigmoid(m.lin(x).view(2, 5, 6)) * 2, leaf(1), TWICE),
    "transpose": (lambda m, x, t: torch.sigmoid(m.lin(x).transpose(1, 2)) * 2, leaf(1), TWICE),
    "swapaxes": (lambda m, x, t: torch.sigmoid(m.lin(x).swapaxes(0, -1)) * 2, leaf(1), TWICE),
    "permute": (lambda m, x, t: torch.sigmoid(m.lin(x).permute(2, 0, 1)) * 2, leaf(1), TWICE),
    "movedim": (lambda m, x, t: torch.sigmoid(torch.movedim(m.lin(x), 2, 0)) * 2, leaf(1), TWICE),
    "mT": (lambda m, x, t: torch.sigmoid(m.lin(x).mT) * 2, leaf(1), TWICE),
    "heads": (
        lambda m, x, t: torch.sigmoid(m.lin(x).view(2, 5, 3, 2).transpose(1, 2)) * t,
        leaf(2, 3, 5, 2).transpose(1, 2).contiguous().transpose(1, 2),
        SCALED,
    ),
    "a scale of each head": (
        lambda m, x, t: torch.sigmoid(m.lin(x).view(2, 5, 3, 2)) * t,
        leaf(3, 1),
        SCALED,
    ),
    "a scale of each element": (
        lambda m, x, t: torch.sigmoid(m.lin(x).view(2, 5, 3, 2)) * t,
        leaf(2),
        SCALED,
    ),
    "a scale of each feature": (
        lambda m, x, t: torch.sigmoid(m.lin(x).view(2, 5, 3, 2)) * t,
        leaf(3, 2),
        SCALED,
    ),
    "a scale of each row": (
        lambda m, x, t: torch.sigmoid(m.lin(x).view(2, 5, 3, 2).transpose(1, 2)) * t,
        leaf(2, 1, 5, 1),
        SCALED,
    ),
    "a scale of each column": (
        lambda m, x, t: torch.sigmoid(m.lin(x).transpose(1, 2)) * t,
        leaf(6, 1),
        SCALED,
    ),
    "a full operand": (
        lambda m, x, t: torch.sigmoid(m.lin(x).view(10, 6)) * t,
        leaf(10, 6),
        SCALED,
    ),
    "a scalar": (lambda m, x, t: torch.sigmoid(m.lin(x).ravel()) * t, leaf(1)[0].detach(), SCALED),
    "inside the tail": (
        lambda m, x, t: (torch.sigmoid(m.lin(x)).view(2, 5, 3, 2) * t).flatten(2) * 0.5,
        leaf(3, 2),
        "v0 = sigmoid(z); v1 = mul(v0, t0); v2 = mul(v1, s0)",
    ),
    "read twice": (
        lambda m, x, t: (lambda h: h * torch.sigmoid(h))(m.lin(x).view(2, 5, 3, 2)),
        leaf(1),
        "v0 = sigmoid(z); v1 = mul(v0, z)",
    ),
    "viewed twice": (
        lambda m, x, t: (lambda z: z.view(10, 6) * torch.sigmoid(z.flatten(0, 1)))(m.lin(x)),
        leaf(1),
        "v0 = sigmoid(z); v1 = mul(v0, z)",
    ),
    "back and forth": (
        lambda m, x, t: torch.tanh(torch.sigmoid(m.lin(x).mT).mT.view(10, 6)),
        leaf(1),
        "v0 = sigmoid(z); v1 = tanh(v0)",
    ),
    "a cast behind it": (
        lambda m, x, t: torch.sigmoid(m.lin(x).view(10, 6).double()).float(),
        leaf(1),
        "v0 = cast(z, dtype=float64); v1 = sigmoid(v0); v2 = cast(v1, dtype=float32)",
    ),
    "a view of the result, too": (
        lambda m, x, t: torch.sigmoid(m.lin(x).view(10, 6)).view(2, 5, 6).sum(1),
        leaf(1),
        SIGMOID,
    ),
    "a condition": (
        lambda m, x, t: torch.where(t > 0, m.lin(x).view(2, 5, 3, 2), 0.5),
        leaf(3, 2),
        "v0 = where(t0, z, s0)",
    ),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.each_once
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", MOVES)
def test_views_move_below_the_tail(case: str, train: bool) -> None:
    body, t, text = MOVES[case]
    grows(body, t, takes=[text], train=train)


@pytest.mark.slow
def test_named_patterns_match_through_views() -> None:
    def body(m: Any, x: Tensor, t: Tensor) -> Tensor:
        h = m.lin(x).view(2, 5, 3, 2).transpose(1, 2)
        return h * torch.sigmoid(h) * 2.0

    check(linear_program(body), x(), leaf(1), fuses={MUL: 1}, leaves=("transpose",))


def test_a_named_pattern_behind_a_transpose() -> None:
    model = linear_program(lambda m, x, y: torch.sigmoid(m.lin(x).t()) * 2.0 * y.t())
    check(model, leaf(4, 8), leaf(4, 6), fuses={MUL: 1}, leaves=("t", "permute"))


@pytest.mark.slow
def test_two_anchors_in_one_view() -> None:
    """The gate of heads: both are read before their views."""

    def body(m: Any, x: Tensor, t: Tensor) -> Tensor:
        h, gate = m.lin(x).view(2, 5, 3, 2), m.bare(x).view(2, 5, 3, 2)
        return h.transpose(1, 2) * torch.sigmoid(gate.transpose(1, 2))

    grows(body, takes=[SIGMOID, "v0 = mul(z, t0)"])


@pytest.mark.slow
def test_a_convolution_seen_as_rows() -> None:
    model = conv_program(
        lambda m, x: torch.relu(m.bn(m.conv(x)).flatten(2).transpose(1, 2)) * m.gamma,
        nn.Conv2d(4, 6, 3, padding=1),
        nn.BatchNorm2d(6),
    )
    graphs = check(model, leaf(2, 4, 7, 5), fuses={"auto_conv2d_batchnorm": 1}, **GROWTH)
    assert epilogues(graphs) == ["v0 = relu(z); v1 = mul(v0, t0)"]


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("body", [
    lambda m, x, t: torch.sigmoid(m.lin(x).unflatten(-1, (3, 2)).transpose(1, 2)) * t,
    lambda m, x, t: torch.sigmoid(m.lin(x).view(x.shape[0], x.shape[1], 3, 2)) * t,
    lambda m, x, t: torch.sigmoid(m.lin(x).view(x.shape[0] * x.shape[1], 3, 2)) * t,
    lambda m, x, t: torch.sigmoid(m.lin(x).flatten(0, 1)).view(x.shape[0], -1, 6) * t[0],
])  # fmt: skip
def test_dynamic_sizes_are_compiled_once(body: Body) -> None:
    model = linear_program(body)
    torch._dynamo.reset()
    run = compiled(model, True, **GROWTH)
    for rows, length in ((3, 5), (4, 7), (6, 9)):
        value, t = torch.randn(rows, length, 8), torch.randn(2)
        torch.testing.assert_close(run(value, t), model(value, t))
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["fx_fuser"] == {"auto_linear": 1}
    assert counters["fx_fuser_left"] == {}


# ---- what stays -----------------------------------------------------------------------------


def _in_place(m: Any, x: Tensor, t: Tensor) -> Tensor:
    return torch.tanh(m.lin(x).view(10, 6).mul_(2.0))


def _written_later(m: Any, x: Tensor, t: Tensor) -> Tensor:
    z = m.lin(x)
    h = torch.exp(z.view(10, 6))
    z.add_(1.0)
    return h * z.view(10, 6)


def _detached(m: Any, x: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.lin(x).view(10, 6)
    return torch.sigmoid(h) * m.p


def _detached_view(m: Any, x: Tensor, t: Tensor) -> Tensor:
    z = m.lin(x)
    with torch.no_grad():
        h = z.view(10, 6)
    return torch.sigmoid(h) * m.p


def _grown_shape(m: Any, x: Tensor, t: Tensor) -> Tensor:
    return m.lin(x).unsqueeze(0) * t[:, :1, None, None]


def _rotary(m: Any, x: Tensor, t: Tensor) -> Tensor:
    """An operand of rows and half the columns would be copied as often as there are heads."""
    return m.lin(x).view(2, 5, 3, 2) * torch.stack((m.s.expand(5), m.s.expand(5)), -1)[:, None]


def _viewed_and_returned(m: Any, x: Tensor, t: Tensor) -> Any:
    h = m.lin(x).view(2, 5, 3, 2)
    return torch.sigmoid(h), h.sum(-1)


def _copied(m: Any, x: Tensor, t: Tensor) -> Tensor:
    return torch.sigmoid(m.lin(x).transpose(1, 2).reshape(10, 6))


def _of_another_layout(m: Any, x: Tensor, t: Tensor) -> Tensor:
    """The operand's memory decides where the result lies."""
    return m.p * torch.ones(2, 6, 5) * m.lin(x).transpose(1, 2)


def _two_views(m: Any, x: Tensor, t: Tensor) -> Tensor:
    """Of one shape; each moves the elements elsewhere."""
    z = m.lin(x).flatten(0, 1)[:6]
    z = m.lin(torch.cat((z, z[:, :2]), 1))
    return torch.sigmoid(z.t()) * z.view(6, 6)


STAYS: dict[str, Body] = {
    name.removeprefix("_").replace("_", " "): body
    for name, body in globals().items()
    if name in {
        "_in_place", "_written_later", "_detached_view", "_grown_shape", "_rotary",
        "_viewed_and_returned", "_copied", "_of_another_layout", "_two_views",
    }
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", STAYS)
def test_views_that_stay(case: str, train: bool) -> None:
    """z alone is fused, and what follows is as it was written."""
    if case == "written later" and train:
        pytest.skip("eager raises too")
    if case == "detached view" and not train:
        pytest.skip("without gradients nothing is detached")
    takes = ["", ""] if case == "two views" else [""]
    grows(STAYS[case], leaf(2, 3), takes=takes, train=train)


def test_a_view_of_another_dtype_stays() -> None:
    lin, x = nn.Linear(8, 6), torch.randn(2, 5, 8)
    with recorded() as graphs, torch.no_grad():
        run = compiled(lambda x: lin(x).view(torch.int32).float() * 2, **GROWTH)
        torch.testing.assert_close(run(x), lin(x).view(torch.int32).float() * 2)
    assert epilogues(graphs) == [""]


def test_an_operation_behind_what_is_fused_reads_its_views() -> None:
    """Both were moved; the second one has a result of another layout."""

    def body(m: Any, x: Tensor, t: Tensor) -> Tensor:
        return m.p * torch.ones(2, 6, 5) * torch.sigmoid(m.lin(x).transpose(1, 2))

    grows(body, takes=[SIGMOID])


def test_no_grad_around_the_view_and_z() -> None:
    """The whole product lies within no_grad, and the rest has a gradient of its own."""
    grows(_detached, leaf(2, 3), takes=[""])


# ---- what is put back -----------------------------------------------------------------------


def code_of(graphs: list[torch.fx.GraphModule]) -> list[tuple[Any, ...]]:
    """What is called, in order, without names."""
    return [
        (n.op, n.target if n.op.startswith("call") else "", len(n.all_input_nodes))
        for gm in graphs
        for n in gm.graph.nodes
    ]


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("tail", ["none", "a part", "beside"])
def test_what_is_not_fused_is_put_back(tail: str) -> None:
    """Beside a site that is fused, operations behind views of one that is not."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.gate = nn.Linear(8, 6), nn.Linear(8, 6)

        def forward(self, x: Tensor, t: Tensor) -> Any:
            g = self.gate(x)
            g = g * torch.sigmoid(g) * 2.0  # a named pattern
            h = torch.tanh(self.lin(x).view(2, 5, 3, 2)).transpose(1, 2)
            return g, torch.exp(h * 0.5) * 3

    model, value = Model(), torch.randn(2, 5, 8)
    options = {"none": {"auto": False}, "a part": GROWTH, "beside": {"auto": True}}[tail]
    seen: list[torch.fx.GraphModule] = []
    torch.compile(model, backend=lambda gm, _: seen.append(gm) or gm)(value, torch.ones(1))
    torch._dynamo.reset()
    with recorded() as graphs:
        made = compiled(model, **options)
        for ours, its in zip(made(value, torch.ones(1)), model(value, torch.ones(1))):
            torch.testing.assert_close(ours, its)
    if tail == "none":
        behind = [
            c for c in code_of(graphs) if c[1] in (torch.tanh, torch.exp, "view", "transpose")
        ]
        assert behind == [
            c for c in code_of(seen) if c[1] in (torch.tanh, torch.exp, "view", "transpose")
        ]
        assert counters["fx_fuser"] == {MUL: 1}
        for node in graphs[0].graph.nodes:
            assert node.op == "output" or node.users, f"{node} is dead"
        nodes = [n for n in graphs[0].graph.nodes if n.target in (torch.tanh, torch.exp)]
        assert [n.meta["example_value"].shape for n in nodes] == [(2, 5, 3, 2), (2, 3, 5, 2)]
    else:
        assert sum(counters["fx_fuser"].values()) == 2


@pytest.mark.parametrize(
    "case", slow_but(["heads", "unsqueeze at both ends", "a scale of each element"], MOVES)
)
def test_z_alone_is_fused_where_its_tail_is_not(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """The tail was moved, and then the plan took z alone."""
    monkeypatch.setattr(
        reading,
        "grow",
        lambda view, site, check: grow.Grown(
            **{**vars(grow.alone(view, site)), "alone": None, "stop": ""}
        ),
    )
    body, t, _ = MOVES[case]
    grows(body, t, takes=[""])


def test_the_report_has_the_users_lines() -> None:
    model = linear_program(lambda m, x: torch.sigmoid(m.lin(x).view(10, 6)) * 2)
    report = fx_fuser.explain(model, torch.randn(2, 5, 8), options={"cpu_ops": True})
    assert len(report.fused) == 1 and "test_views.py" in str(report)


# ---- the reindexing -------------------------------------------------------------------------


@pytest.mark.parametrize("before, after, groups", [
    ((2, 6), (2, 3, 2), (((2,), (2,)), ((6,), (3, 2)))),
    ((2, 3, 4), (6, 4), (((2, 3), (6,)), ((4,), (4,)))),
    ((4, 6), (3, 8), (((4, 6), (3, 8)),)),
    ((1, 5), (5,), (((1,), ()), ((5,), (5,)))),
    ((5,), (1, 5, 1), (((), (1,)), ((5,), (5,)), ((), (1,)))),
    ((1, 1), (1,), (((1,), (1,)), ((1,), ()))),
])  # fmt: skip
def test_groups(before: Any, after: Any, groups: Any) -> None:
    assert reindex._groups(before, after) == groups
