"""Near misses: each is found, with its line, the first thing in its way, and an edit that helps."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import CONV, MUL_ADD, MUL_MUL, fresh, images  # noqa: F401
from helpers import conv_program, linear_program
from torch import Tensor, nn

import fx_fuser
from fx_fuser import Report, SiteReport
from fx_fuser.graph.match import near_misses


class TwoAndSix(nn.Module):
    """Two sites that fuse, six that nearly do, and two Linears that nothing follows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e, self.f, self.g = (nn.Linear(6, 6) for _ in range(7))
        self.conv, self.bn = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.head = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

    def forward(self, x: Tensor, y: Tensor, image: Tensor) -> Any:
        z = self.a(x)
        swish = z * torch.sigmoid(z) * 2.0  # fused 1
        r = self.b(x)
        gated = r + 0.5 * torch.sigmoid(r)  # fused 2
        pre = self.c(x)  # returned
        kept = F.silu(pre) * y
        h = self.d(x)
        squashed = h * torch.tanh(h) * 2.0  # tanh
        features = torch.relu(self.bn(self.conv(image)))  # relu between
        scaled = features * 0.5
        u = self.e(x)
        x.add_(1)  # written
        late = u * torch.sigmoid(u) * y  # the end of the match that is written to
        with torch.no_grad():
            v = self.f(x)  # no grad
        mixed = F.silu(v) * 3.0
        gate = torch.sigmoid(self.g(x))  # begun
        return swish, gated, kept, squashed, scaled, late, mixed, gate.sum(), self.head(x), pre


def line_of(text: str) -> str:
    lines, start = inspect.getsourcelines(TwoAndSix)
    return f"{__file__}:{start + next(i for i, line in enumerate(lines) if text in line)}"


@pytest.fixture(scope="module")
def report() -> Report:
    torch._dynamo.reset()
    return fx_fuser.explain(
        TwoAndSix(), torch.randn(4, 6), torch.randn(4, 6), torch.randn(2, 3, 8, 8)
    )


def test_what_fuses_is_named(report: Report) -> None:
    assert [(s.pattern, s.where) for s in report.fused] == [
        (MUL_MUL, line_of("fused 1")),
        (MUL_ADD, line_of("fused 2")),
    ]


def place(mark: str) -> str:
    return line_of(mark).rpartition("/")[2]


MISSES = {
    "# returned": (MUL_MUL, "the pre-activation `pre` is also returned, ", "leave `pre`"),
    "# written": (MUL_MUL, "may change `x` before the fused op would read it", "move it below"),
    "# no grad": (MUL_MUL, "grad mode, autocast or another mode changes between `v`", "`with`"),
    "# tanh": (MUL_MUL, "is tanh; with sigmoid in its place, ", "pattern with tanh"),
    "# relu between": (CONV, "`features`, test_near.py:", "pattern with relu"),
    "# begun": (MUL_ADD, "of sigmoid(z) * a + b, only sigmoid(z) is there: ", ""),
}  # fmt: skip


@pytest.mark.parametrize("mark", MISSES)
def test_what_nearly_fuses_is_named(report: Report, mark: str) -> None:
    pattern, reason, help = MISSES[mark]
    (site,) = [s for s in report.refused if s.where == line_of(mark)]
    assert site.pattern == pattern
    assert reason in site.reason
    assert help in site.help and bool(help) == bool(site.help)


def test_lines_in_reasons_are_those_of_the_source(report: Report) -> None:
    said = {s.where: f"{s.reason} {s.help}" for s in report.refused}
    assert place("return swish") in said[line_of("# returned")]
    assert place("the end of the match") in said[line_of("# written")]
    assert place("mixed = ") in said[line_of("# no grad")]
    assert place("return swish") in said[line_of("# begun")]


def test_near_misses_are_ranked_and_the_rest_is_one_line(report: Report) -> None:
    assert [s.where for s in report.refused] == [line_of(mark) for mark in MISSES]
    assert [s.missing for s in report.refused] == [0, 0, 0, 1, 1, 2]
    assert report.others == {"Linear": 2}
    assert report.summary == (
        "2 sites match a named pattern; not matched: 3 refused, 3 near misses, 2 Linear"
    )
    assert f"\n\n{report.summary}\n\n" in str(report)


def test_no_name_of_fx_is_in_a_reason(report: Report) -> None:
    for site in report.refused:
        for name in site.nodes:
            if name.rpartition("_")[2].isdigit():
                assert name not in site.reason, site


# ---- the edit helps -----------------------------------------------------------------------------


def misses(model: Callable[..., Any], *inputs: Tensor, **kwargs: Any) -> list[SiteReport]:
    torch._dynamo.reset()
    return fx_fuser.explain(model, *inputs, **kwargs).refused


def _returned(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.lin(x)
    return F.silu(z) * y, z


def _not_returned(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.lin(x)
    return F.silu(z) * y


def _written(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.lin(x)
    x.add_(1)
    return F.silu(z) * y, x


def _written_below(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.lin(x)
    gated = F.silu(z) * y
    x.add_(1)
    return gated, x


def _written_and_read(m: Any, x: Tensor, y: Tensor) -> Any:
    x = x * 1.0
    z = m.lin(x)
    x.add_(1)
    return F.silu(z) * x[:, :6]


def _clone_written(m: Any, x: Tensor, y: Tensor) -> Any:
    x = x * 1.0
    z = m.lin(x)
    x = x.clone()
    x.add_(1)
    return F.silu(z) * x[:, :6]


def _in_place(m: Any, x: Tensor, y: Tensor) -> Any:
    r = y * 1.0
    r.add_(2.0 * torch.sigmoid(m.lin(x)))
    return r


def _not_in_place(m: Any, x: Tensor, y: Tensor) -> Any:
    r = y * 1.0
    r = r.add(2.0 * torch.sigmoid(m.lin(x)))
    return r


def _mode(m: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        z = m.lin(x)
    return F.silu(z) * y


def _one_mode(m: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        z = m.lin(x)
        return F.silu(z) * y


def _layout(m: Any, x: Tensor, y: Tensor) -> Any:
    columns = y.t().contiguous().t()
    return columns * torch.sigmoid(m.lin(x)) * 2.0


def _contiguous(m: Any, x: Tensor, y: Tensor) -> Any:
    columns = y.t().contiguous().t().contiguous()
    return columns * torch.sigmoid(m.lin(x)) * 2.0


def _copy_written_later(m: Any, x: Tensor, r: Tensor) -> Any:
    q = r * 1.5
    gated = torch.sigmoid(m.lin(x)) * q
    r.add_(1)
    return gated, r


def _copy_of_it_written(m: Any, x: Tensor, r: Tensor) -> Any:
    q = r * 1.5
    gated = torch.sigmoid(m.lin(x)) * q
    r = r.clone()
    r.add_(1)
    return gated, r


EDITS: dict[str, tuple[Callable[..., Any], str, Callable[..., Any]]] = {
    "leave it out": (_returned, "leave `z` out of what is returned", _not_returned),
    "move the write": (_written, "move it below test_near.py:", _written_below),
    "change a clone": (_written_and_read, "change a clone of `x`", _clone_written),
    "not in place": (_in_place, "use the operation that is not in place", _not_in_place),
    "one mode": (_mode, "have both inside the `with` block", _one_mode),
    "contiguous": (_layout, "call `.contiguous()` on `columns`", _contiguous),
    "clone the source": (
        _copy_written_later,
        "change a clone of `inputs[1]` instead",
        _copy_of_it_written,
    ),
}


@pytest.mark.parametrize("before, help, after", EDITS.values(), ids=EDITS.keys())
def test_the_edit_makes_it_fuse(
    before: Callable[..., Any], help: str, after: Callable[..., Any]
) -> None:
    inputs = torch.randn(4, 8), torch.randn(4, 6)
    (site,) = misses(linear_program(before), *inputs)
    assert help in site.help
    torch._dynamo.reset()
    report = fx_fuser.explain(linear_program(after), *inputs)
    assert (len(report.fused), report.refused) == (1, [])


def test_a_read_of_the_statistics_goes_below() -> None:
    def between(m: Any, x: Tensor) -> Any:
        z = m.bn(m.conv(x))
        seen = m.bn.running_mean.clone()
        return z * 2.0, seen

    def below(m: Any, x: Tensor) -> Any:
        z = m.bn(m.conv(x))
        scaled = z * 2.0
        return scaled, m.bn.running_mean.clone()

    model = conv_program(between, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    (site,) = misses(model, torch.randn(3, 4, 8, 9), train=True)
    assert "running statistics" in site.reason and site.help.startswith("move it below")
    model = conv_program(below, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    assert misses(model, torch.randn(3, 4, 8, 9), train=True) == []


def test_a_registered_pattern_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    def near_test_tanh_gate(x, weight, bias, a, b):  # type: ignore[no-untyped-def]
        return torch.tanh(F.linear(x, weight, bias)) * a * b

    model = linear_program(lambda m, x: (lambda z: z * torch.tanh(z) * 2.0)(m.lin(x)))
    x = torch.randn(4, 8)
    assert "register a pattern with tanh" in misses(model, x)[0].help
    monkeypatch.setattr(fx_fuser.registry, "_patterns", list(fx_fuser.registry._patterns))
    fx_fuser.register_pattern(near_test_tanh_gate)
    torch._dynamo.reset()
    assert [s.pattern for s in fx_fuser.explain(model, x).fused] == ["near_test_tanh_gate"]


# ---- graph breaks -------------------------------------------------------------------------------


def _print_between(m: Any, x: Tensor) -> Any:
    s = torch.sigmoid(m.lin(x))
    print("shape", s.shape)  # the print
    return s * 2.0 * 3.0 + 1.0


@pytest.mark.slow
def test_a_print_that_breaks_the_graph(capsys: Any) -> None:
    lines, start = inspect.getsourcelines(_print_between)
    line = start + next(i for i, text in enumerate(lines) if "# the print" in text)
    (site,) = misses(linear_program(_print_between), torch.randn(4, 8))
    assert f"needed after the graph breaks at test_near.py:{line}" in site.reason
    assert site.help == "put the print under `if not torch.compiler.is_compiling():`"

    def guarded(m: Any, x: Tensor) -> Any:
        s = torch.sigmoid(m.lin(x))
        if not torch.compiler.is_compiling():
            print("shape", s.shape)
        return s * 2.0 * 3.0 + 1.0

    torch._dynamo.reset()
    assert len(fx_fuser.explain(linear_program(guarded), torch.randn(4, 8)).fused) == 1


def test_a_print_of_an_inner_value(capsys: Any) -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        z = m.lin(x)
        gated = F.silu(z) * y
        print(z.mean())
        return gated

    (site,) = misses(linear_program(body), torch.randn(4, 8), torch.randn(4, 6))
    assert "the pre-activation `z` is also used by mean" in site.reason
    assert site.help == "put the print under `if not torch.compiler.is_compiling():`"


# ---- what is near, and what is not --------------------------------------------------------------

Body = Callable[..., Any]
WOULD_BE = "this would be sigmoid(z) * a * b"
BETWEEN = f"; without it, {WOULD_BE}"
ONE_OFF: dict[str, tuple[Body, str, str]] = {
    "gelu": (lambda m, x, y: F.gelu(m.lin(x)) * y, "gelu", f"; with silu in its place, {WOULD_BE}"),
    "hardsigmoid": (
        lambda m, x, y: (lambda z: z * F.hardsigmoid(z) * 2.0)(m.lin(x)),
        "hardsigmoid",
        f"; with sigmoid in its place, {WOULD_BE}",
    ),
    "division": (
        lambda m, x, y: F.silu(m.lin(x)) / y, "truediv", f"; with mul in its place, {WOULD_BE}"
    ),
    "dropout between": (lambda m, x, y: F.dropout(F.silu(m.lin(x)), 0.5) * y, "dropout", BETWEEN),
    "cast between": (lambda m, x, y: F.silu(m.lin(x)).to(torch.float64) * y, "to", BETWEEN),
    "clone between": (lambda m, x, y: F.silu(m.lin(x).clone()) * y, "clone", BETWEEN),
    "scale between": (lambda m, x, y: torch.sigmoid(m.lin(x) * 0.5) * y * 2.0, "mul", BETWEEN),
    "in place between": (lambda m, x, y: F.silu(torch.relu_(m.lin(x))) * y, "relu_", BETWEEN),
}  # fmt: skip


@pytest.mark.parametrize("body, op, reason", ONE_OFF.values(), ids=ONE_OFF.keys())
def test_one_operation_off(body: Body, op: str, reason: str) -> None:
    """Where a line of the table cannot be parsed, the operation stands for its expression."""
    (site,) = misses(linear_program(body), torch.randn(4, 8), torch.randn(4, 6), train=False)
    line = r", test_near.py:\d+"
    assert re.fullmatch(rf"({op}{line}|`.*`{line}, is {op}){re.escape(reason)}", site.reason)
    assert site.missing == 1


def test_a_factor_that_the_match_computes() -> None:
    """The pattern is there but for its factor: that was "only sigmoid(z) is there"."""

    def squared(m: Any, x: Tensor) -> Any:
        gate = torch.sigmoid(m.lin(x))
        return gate * gate * 2.0

    (site,) = misses(linear_program(squared), torch.randn(4, 8))
    assert site.reason.startswith("`gate`, test_near.py:")
    assert "is also one of its operands" in site.reason and "nothing" not in site.reason
    assert (site.pattern, site.missing, site.help) == (MUL_MUL, 0, "")


def test_a_proper_reason_comes_before_that_one() -> None:
    def body(m: Any, x: Tensor) -> Any:
        z = m.lin(x)
        s = torch.sigmoid(z)
        return s * s * 2.0, z * s * 3.0

    reasons = [s.reason for s in misses(linear_program(body), torch.randn(4, 8))]
    assert len(reasons) == 1 and "is also used by mul" in reasons[0]


def test_the_nearest_pattern_is_named() -> None:
    (site,) = misses(linear_program(lambda m, x: F.silu(m.lin(x))), torch.randn(4, 8))
    assert site.missing == 1 and "sigmoid(z) * a is there" in site.reason


def test_an_error_while_explaining_loses_no_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("our own")

    monkeypatch.setattr(fx_fuser.reading, "near_miss", broken)
    model = linear_program(lambda m, x, y: (F.silu(m.lin(x)) * y, m.bare(x)))
    inputs = torch.randn(4, 8), torch.randn(4, 6)
    report = fx_fuser.explain(model, *inputs)
    assert (len(report.fused), report.others) == (1, {"Linear": 1})
    with pytest.raises(Exception, match="our own"):
        torch._dynamo.reset()
        fx_fuser.explain(model, *inputs, options={"strict": True})


def test_supposing_leaves_the_reading_as_it_was() -> None:
    """The readers of the real graph are not those of the supposed ones."""
    seen: list[tuple[Any, ...]] = []
    original = near_misses.near_miss

    def spy(view: Any, *rest: Any) -> Any:
        before = {n: list(r) for n, r in view.readers.items()}, list(view.nodes), dict(view.order)
        miss = original(view, *rest)
        assert before == (view.readers, view.nodes, view.order)
        seen.append(before)
        return miss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fx_fuser.reading, "near_miss", spy)
        body, *_ = ONE_OFF["in place between"]
        misses(linear_program(body), torch.randn(4, 8), torch.randn(4, 6))
    assert len(seen) == 1


def test_names_of_parameters() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.scale = nn.ModuleList([nn.Linear(8, 6)]), nn.Buffer(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.layers[0](x)) * self.scale

    (site,) = fx_fuser.explain(Model(), torch.randn(4, 8)).fused
    assert site.operands["a"] in ("self.layers[0](x)", "linear")
    assert site.operands == {
        "x": "x",
        "weight": "self.layers[0].weight",
        "bias": "self.layers[0].bias",
        "a": site.operands["a"],
        "b": "self.scale",
    }
