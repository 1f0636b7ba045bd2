"""explain(), the report, the log, the counters and the trace: what a user sees of fx_fuser."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import (
    ALL_THREE,
    CONV,
    MUL_ADD,
    MUL_MUL,
    ThreePatterns,
    fresh,  # noqa: F401
    fused_compile,
    images,
    sites,
)
from torch import Tensor, nn

import fx_fuser

CHECKOUT = Path(__file__).resolve().parents[2]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.up = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.linear(x)
        y = z * torch.sigmoid(z)
        fused = y * 2.0  # the line of the fused site
        w = self.up(x)
        gate = torch.sigmoid(w)  # the line of the refused one
        return fused, gate * residual + 1.0, gate.relu()


def _line_of(text: str) -> str:
    lines, start = inspect.getsourcelines(Gated)
    return f"{__file__}:{start + next(i for i, line in enumerate(lines) if text in line)}"


def _inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 6), torch.randn(3, 5)


# ---- the report ---------------------------------------------------------------------------------


def test_the_fields_of_a_fused_site() -> None:
    (site,) = fx_fuser.explain(Gated(), *_inputs()).fused
    assert (site.pattern, site.op) == (MUL_MUL, "fx_fuser::linear")
    assert site.where == _line_of("fused = y * 2.0")
    assert site.code.startswith("fused = y * 2.0")
    assert site.shapes == {"x": "[3, 6]", "weight": "[5, 6]", "bias": "[5]"}
    assert (site.dtype, site.reason) == ("float32", "")


def test_the_fields_of_a_refused_site() -> None:
    (site,) = fx_fuser.explain(Gated(), *_inputs()).refused
    assert (site.pattern, site.op) == (MUL_ADD, "fx_fuser::linear")
    assert site.where == _line_of("gate = torch.sigmoid(w)")
    assert site.code.startswith("gate = torch.sigmoid(w)")
    assert "gate" in site.reason and "used by" in site.reason
    assert site.shapes["x"] == "[3, 6]" and site.dtype == "float32"


def test_the_operands_of_a_pattern_are_in_the_report() -> None:
    def gate(x: Tensor, weight: Tensor, mask: Tensor, other: Tensor) -> Tensor:
        return mask * torch.sigmoid(F.linear(x, weight)) * other

    tensors = (torch.randn(2, 3, 6), torch.randn(5, 6), torch.ones(3, 1), torch.randn(2, 3, 5))
    (site,) = fx_fuser.explain(gate, *tensors).fused
    assert sorted(site.shapes.values()) == sorted(["[2, 3, 6]", "[5, 6]", "[3, 1]", "[2, 3, 5]"])


def test_the_table() -> None:
    text = str(fx_fuser.explain(Gated(), *_inputs()))
    _, summary, table, *_ = text.split("\n\n")
    assert summary == "1 site matches a named pattern; not matched: 1 refused"
    header, rule, *rows = table.splitlines()
    assert "pattern" in header and "where" in header and set(rule) <= set("- ")
    assert any(r.startswith("match") and MUL_MUL in r for r in rows)
    assert any(r.startswith("refused") and MUL_ADD in r for r in rows)
    assert "weight[5, 6]" in text and "used by" in text


def test_nothing_found_is_said() -> None:
    report = fx_fuser.explain(nn.Sequential(nn.Flatten(), nn.ReLU()), torch.ones(2, 3))
    assert (report.fused, report.refused, report.others) == ([], [], {})
    assert str(report).endswith("\n\nNothing found that fx_fuser could fuse.")


def test_several_graphs_make_one_report() -> None:
    def broken(x: Tensor, weight: Tensor) -> Tensor:
        z = F.linear(x, weight)
        x = z * torch.sigmoid(z) * 2.0
        torch._dynamo.graph_break()
        z = F.linear(x, weight)
        return z + torch.sigmoid(z) * 2.0

    report = fx_fuser.explain(broken, torch.randn(3, 6), torch.randn(6, 6))
    assert [s.pattern for s in report.fused] == [MUL_MUL, MUL_ADD]


def test_options_select_patterns() -> None:
    model, x = ThreePatterns().eval(), images()
    names = [s.pattern for s in fx_fuser.explain(model, x).fused]
    assert sorted(names) == sorted(ALL_THREE)
    only = fx_fuser.explain(model, x, options={"patterns": [CONV]}).fused
    assert [s.pattern for s in only] == [CONV]
    with pytest.raises(fx_fuser.OptionError, match="there are"):
        fx_fuser.explain(model, x, options={"patterns": ["conv"]})


def test_keyword_inputs() -> None:
    x, residual = _inputs()
    assert len(fx_fuser.explain(Gated(), x, residual=residual).fused) == 1


# ---- explain changes nothing --------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_explain_leaves_everything_as_it_was(training: bool) -> None:
    model = nn.Sequential(ThreePatterns(), nn.Dropout(0.5)).train(training)
    x = images().requires_grad_()
    model(x).sum().backward()
    kept = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters()]
    input_kept, input_gradient = x.detach().clone(), x.grad.clone()
    versions = [t._version for t in (*model.parameters(), x)]
    random = torch.get_rng_state()

    report = fx_fuser.explain(model, x)

    assert len(report.fused) == 3
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, kept[n]) for n, v in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients))
    assert torch.equal(x, input_kept) and torch.equal(x.grad, input_gradient)
    assert [t._version for t in (*model.parameters(), x)] == versions
    assert model.training is training
    assert sites() == {}  # the counters count what was compiled


def test_inputs_that_the_model_writes_are_copies() -> None:
    def step(x: Tensor, weight: Tensor, cache: Tensor) -> Tensor:
        z = F.linear(x, weight)
        cache.copy_(x)
        return z * torch.sigmoid(z) * 2.0

    cache = torch.zeros(3, 6)
    fx_fuser.explain(step, torch.ones(3, 6), torch.ones(5, 6), cache)
    assert torch.equal(cache, torch.zeros(3, 6))


@pytest.mark.slow
def test_a_compiled_model_stays_compiled() -> None:
    model = ThreePatterns().eval()
    x = images()
    compiled = fused_compile(model)
    value = compiled(x)
    assert sites() == ALL_THREE
    assert len(fx_fuser.explain(compiled, x).fused) == 3
    assert torch.equal(compiled(x), value)
    assert sites() == ALL_THREE  # it was not compiled again
    assert torch.equal(model(x), model(x)) and len(fx_fuser.explain(model, x).fused) == 3


def test_explain_reports_when_the_model_was_compiled_before_with_another_backend() -> None:
    model, x = ThreePatterns().eval(), images()
    torch.compile(model, backend="eager")(x)
    assert len(fx_fuser.explain(model, x).fused) == 3


def test_an_error_of_the_model_is_the_users_and_buffers_come_back() -> None:
    class Failing(ThreePatterns):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            torch._dynamo.graph_break()
            raise RuntimeError("the model's own")

    model = Failing()
    kept = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="the model's own"):
        fx_fuser.explain(model, images())
    assert all(torch.equal(v, kept[n]) for n, v in model.state_dict().items())


# ---- counters, log, trace -----------------------------------------------------------------------


@pytest.mark.slow
def test_counters_count_each_site_of_each_graph() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.silu(layer(x)) * 2.0
            return x

    compiled = fused_compile(Twice())
    compiled(torch.randn(3, 6))
    assert sites() == {MUL_MUL: 3}
    compiled(torch.randn(3, 6))
    assert sites() == {MUL_MUL: 3}  # the same compiled graph
    compiled(torch.randn(3, 6, dtype=torch.float32, requires_grad=True))
    assert sites() == {MUL_MUL: 6}  # another graph


def test_the_log(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="fx_fuser.report.report"):
        fused_compile(Gated())(*_inputs())
    lines = [r.getMessage() for r in caplog.records if r.name == "fx_fuser.report.report"]
    assert lines[0] == f"fused {MUL_MUL} at {_line_of('fused = y * 2.0')}"
    where = _line_of("gate = torch.sigmoid(w)")
    assert lines[1].startswith(f"refused {MUL_ADD} at {where}: ") and "used by" in lines[1]


@pytest.mark.slow
def test_the_log_is_silent_by_default(capfd: Any) -> None:
    fused_compile(Gated())(*_inputs())
    assert "fx_fuser" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_torchs_log_and_its_trace_have_the_report(tmp_path: Path) -> None:
    done = _run_gated({"TORCH_LOGS": "+fx_fuser", "TORCH_TRACE": str(tmp_path)})
    assert f"fused {MUL_MUL} at " in done.stderr
    text = "".join(f.read_text() for f in tmp_path.iterdir())
    _, found, rest = text.partition('"fx_fuser_report"')
    assert found
    # The payload follows its header, one tab in front of each line.
    payload = rest.split("\n", 1)[1]
    lines = []
    for line in payload.split("\n"):
        if not line.startswith("\t"):
            break
        lines.append(line[1:])
    report = json.loads("\n".join(lines))
    assert [s["pattern"] for s in report["fused"]] == [MUL_MUL]
    assert report["refused"] == []


def _run_gated(extra: dict[str, str]) -> subprocess.CompletedProcess[str]:
    program = (
        "import torch, fx_fuser\n"
        "linear = torch.nn.Linear(4, 4)\n"
        "f = lambda x: torch.nn.functional.silu(linear(x)) * 2.0\n"
        "options = {'inner': 'aot_eager', 'cpu_ops': True}\n"
        "torch.compile(f, backend='fx_fuser', options=options)(torch.ones(2, 4))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), **extra}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_inputs_that_have_a_history() -> None:
    """A tensor that is no leaf has no deepcopy; it is looked at all the same."""
    x = torch.randn(4, 8, requires_grad=True) * 2.0
    linear = nn.Linear(8, 6)
    report = fx_fuser.explain(lambda x: torch.sigmoid(linear(x)) * 2.0 * 3.0, x)
    assert len(report.fused) == 1 and x.grad_fn is not None
