"""`compare` on models of all kinds: their results, values against float64, and bad arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compared import Result, compared, replace_column
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fx_fuser
from fx_fuser import OptionError
from fx_fuser.compare import values
from fx_fuser.compare.step import leaves_of, named_tensors
from fx_fuser.compare.untouched import modules_of
from fx_fuser.verify.accuracy import Observed


class Integers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 9)

    def forward(self, x: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            return {"tokens": self.linear(x).argmax(-1), "count": 3, "none": None}


@pytest.mark.slow
def test_a_model_that_returns_integers_has_no_backward() -> None:
    found = compared(Integers(), torch.randn(5, 4), train=True)
    assert found.step == "forward"
    assert "No output requires a gradient: a step is a forward pass." in found.notes
    assert found.columns["fx_fuser"].faults == []
    assert found.columns["fx_fuser"].error is None


@pytest.mark.slow
def test_a_model_without_parameters() -> None:
    found = compared(nn.ReLU(), torch.randn(4, 4))
    assert found.step == "forward" and all(column.ran for column in found.columns.values())


@pytest.mark.slow
def test_keyword_inputs_also_those_that_are_called_as_arguments_here() -> None:
    class Configured(nn.Module):
        def forward(self, x: Tensor, seconds: Tensor, loss: float = 1.0) -> Tensor:
            return x * seconds * loss

    given = {"seconds": torch.ones(3), "loss": 2.0}
    found = compared(Configured(), x=torch.ones(3), kwargs=given, train=False)
    assert found.inputs == ["seconds [3] float32", "x [3] float32"]


def test_named_tensors_of_all_kinds_of_results() -> None:
    t = torch.ones(2)
    result = Result(t, {"a": (t, [t, None, "text"]), "b": {}})
    assert [name for name, _ in named_tensors(result)] == ["logits", "hidden.a.0", "hidden.a.1.0"]
    assert [name for name, _ in named_tensors(t)] == ["0"]
    assert list(named_tensors(3)) == []


def test_leaves_are_found_behind_a_graph() -> None:
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    assert {id(t) for t in leaves_of([(a * 2).exp() + a, b])} == {id(a), id(b)}
    assert leaves_of([c.detach()]) == []


def test_modules_of_functions() -> None:
    linear = nn.Linear(2, 2)
    assert modules_of(linear) == [linear]
    assert modules_of(linear.forward) == [linear]
    assert modules_of(lambda x: linear(x)) == [linear]
    assert modules_of(len) == []


@pytest.mark.slow
def test_a_loss_of_the_result_is_taken() -> None:
    model = nn.Linear(4, 1)
    seen = []

    def loss(result: Tensor) -> Tensor:
        seen.append(result.shape)
        return result.square().mean()

    found = compared(model, torch.randn(3, 4), train=True, loss=loss)
    assert seen and found.columns["fx_fuser"].grad_error is not None


@pytest.mark.slow
def test_default_loss_gives_every_output_a_gradient() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return {"a": self.a(x), "b": [self.b(x)]}

    found = compared(Two(), torch.randn(3, 4), train=True)
    assert found.columns["fx_fuser"].faults == []
    assert 0 < (found.columns["fx_fuser"].grad_error or 0) < 1e-6


# ---- values -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_wrong_result_is_not_to_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_column(monkeypatch, "fx_fuser", lambda model: lambda x: model(x) * 1.001)
    found = compared(nn.Linear(64, 64), torch.randn(8, 64), train=True)
    assert found.judged.word == "DO NOT USE"
    faults = found.columns["fx_fuser"].faults or []
    assert [fault.partition(":")[0] for fault in faults] == [
        "output 0", "gradient of weight", "gradient of bias",
    ]  # fmt: skip
    assert 1e-4 < (found.columns["fx_fuser"].output_error or 0) < 1e-2


@pytest.mark.slow
def test_neighbours_leave_buffers_alone_and_a_failing_one_leaves_the_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = [
        part for width in (3, 5, 9) for part in (nn.Linear(width, width), nn.BatchNorm1d(width))
    ]
    model = nn.Sequential(*parts[:2], nn.Linear(3, 5), *parts[2:4], nn.Linear(5, 9), *parts[4:])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    replace_column(monkeypatch, "fx_fuser", lambda model: lambda x: model(x) * 1.001)
    found = compared(model, torch.randn(16, 3), train=True)
    assert found.judged.word == "DO NOT USE" and not any("fewer runs" in n for n in found.notes)
    assert all(torch.equal(before[name], b) for name, b in model.named_buffers())

    def fails(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(values, "_neighbour", fails)
    found = compared(model, torch.randn(16, 3), train=True)
    assert found.judged.word == "DO NOT USE" and any("fewer runs" in n for n in found.notes)


@pytest.mark.slow
def test_dropout_is_set_aside_for_values() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    found = compared(model, torch.randn(16, 8), train=True)
    assert "Values were compared without dropout." in found.notes
    assert found.columns["fx_fuser"].faults == [] and model[1].p == 0.5


@pytest.mark.slow
def test_a_model_that_draws_otherwise_has_no_errors() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    found = compared(noisy, torch.ones(3))
    assert found.columns["fx_fuser"].error is None and found.columns["fx_fuser"].faults is None
    assert any("draws random numbers" in note for note in found.notes)


@pytest.mark.slow
def test_a_model_that_cannot_be_copied_has_no_errors() -> None:
    model = nn.Linear(4, 4)
    model.lock = threading.Lock()
    found = compared(model, torch.ones(2, 4))
    assert found.columns["eager"].ran and found.columns["eager"].error is None
    assert "cannot pickle" in found.notes[-1]


@pytest.mark.slow
def test_float64_also_where_a_model_names_a_dtype() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x.float()) @ torch.eye(64) + torch.ones(64, dtype=torch.float32)
            return F.softmax(y, -1, dtype=torch.float32).to(torch.float32)

    model, x = Named(), torch.randn(8, 64)
    found = compared(model, x, train=False)
    exact = F.softmax(F.linear(x.double(), model.linear.weight.double()) +
                      model.linear.bias.double() + 1.0, -1)  # fmt: skip
    error = float(((model(x).double() - exact).norm() / exact.norm()).detach())
    assert found.columns["eager"].output_error == pytest.approx(error)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [None, torch.sum])
def test_float64_also_where_a_checkpoint_recomputes(loss: Any) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.named, x, use_reentrant=False)

        def named(self, x: Tensor) -> Tensor:
            return (self.linear(x).float() * 2.0).sigmoid().to(torch.float32)

    found = compared(Checkpointed(), torch.randn(4, 8), train=True, loss=loss)
    assert found.columns["fx_fuser"].faults == []
    assert 0 < (found.columns["eager"].grad_error or 0) < 1e-6


def test_integers_that_some_run_has_are_right() -> None:
    def seen(*numbers: int) -> Observed:
        return Observed({"0": torch.tensor(numbers)})

    def runs() -> Iterator[Observed]:
        yield seen(1, 3, 3)

    def wrong(found: Observed) -> list[str]:
        return list(values._wrong_integers(found, seen(1, 2, 3), seen(1, 2, 4), (runs,)))

    assert wrong(seen(1, 2, 3)) == wrong(seen(1, 2, 4)) == wrong(seen(1, 3, 4)) == []
    assert wrong(seen(2, 3, 4)) == [
        "output 0: 1 of 3 integers are neither eager's nor those of a run that differs by a "
        "rounding"
    ]


@pytest.mark.slow
def test_no_reference_no_errors() -> None:
    found = compared(nn.Linear(4, 4), torch.ones(2, 4), reference=False)
    assert all(c.error is None and c.faults is None for c in found.columns.values())


# ---- arguments ----------------------------------------------------------------------------------

LINEAR, X = nn.Linear(4, 4), torch.ones(2, 4)
FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (lambda: compared(), "missing|positional"),
    "model": (lambda: compared(3), "the model is 3, an int; give an nn.Module or a function first"),
    "class": (lambda: compared(nn.Linear, X), "the class Linear; give an instance: Linear"),
    "a misspelt argument": (
        lambda: compared(LINEAR, torch.randn(2, 4), tain=False),
        "unexpected keyword argument 'tain'.*; is 'tain' meant to be 'train'\\?",
    ),
    "no inputs": (lambda: compared(LINEAR), "does not take these inputs: missing .* 'input'.*use"),
    "train": (lambda: compared(LINEAR, X, train="eval"), "train is 'eval', a str; give True or F"),
    "loss": (lambda: compared(LINEAR, X, loss="mse"), "loss is 'mse', a str; give a function of"),
    "loss with labels": (
        lambda: compared(LINEAR, X, train=True, loss=nn.CrossEntropyLoss()),
        "loss does not take the model's result alone: missing a required argument: 'target'",
    ),
    "columns": (lambda: compared(LINEAR, X, columns="eager"), "columns is 'eager', .*give a list"),
    "column": (lambda: compared(LINEAR, X, columns=["egaer"]), "columns has 'egaer', .*; give som"),
    "seconds": (lambda: compared(LINEAR, X, seconds=0), "seconds is 0, an int; give a number abov"),
    "cold": (lambda: compared(LINEAR, X, cold=1), "cold is 1, an int; give True or False"),
    "options": (lambda: compared(LINEAR, X, options={"fp23": 1}), "unknown option 'fp23'; did you"),
    "kwargs": (lambda: compared(LINEAR, X, kwargs=3), "kwargs is 3, an int; give a dict"),
    "twice": (lambda: compared(LINEAR, X, input=X, kwargs={"input": X}), "leave one out"),
    "mode": (
        lambda: compared(
            LINEAR, X, options={"mode": "reduce-overhead"}, reduce_overhead=True, columns=None
        ),
        "option 'mode' is 'reduce-overhead' and reduce_overhead is True; leave one out",
    ),
    "a loss of many": (
        lambda: compared(LINEAR, X, train=True, loss=lambda y: y),
        r"loss returned \(2, 4\), requires_grad=True; return one number",
    ),
    "lazy": (lambda: compared(nn.LazyLinear(3), X), "parameters without a size; call it once fir"),
    "device": (lambda: compared(LINEAR, X.to("meta")), "on meta; compare measures on CUDA or a CP"),
    "program": (
        lambda: compared(torch.export.export(LINEAR, (X,)), X),
        "the model is an ExportedProgram; give program.module",
    ),
    "program's mode": (
        lambda: compared(torch.export.export(LINEAR, (X,)).module(), X, train=True),
        "an exported program stays in the mode",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_bad_arguments_name_fact_and_remedy(name: str) -> None:
    call, said = FAULTS[name]
    with pytest.raises((OptionError, TypeError) if name == "no model" else OptionError, match=said):
        call()


def test_the_users_own_model_error_is_raised() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError("the model's own")

    with pytest.raises(ZeroDivisionError, match="the model's own"):
        compared(Wrong(), X)


def test_compare_stays_a_function_and_as_a_command_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from fx_fuser import compare
    from fx_fuser.compare.__main__ import main

    assert callable(compare) and compare is fx_fuser.compare
    assert main() == 2
    assert "fx_fuser.compare is a function, not a command" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("train", [True, False])
def test_odd_models(train: bool) -> None:
    """Sparse gradients, masks of -inf, complex numbers, 0-d and empty results, one tensor twice."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4, sparse=True)

        def forward(self, ids: Tensor) -> dict[str, Tensor]:
            x = self.words(ids)
            masked = x.masked_fill(torch.arange(4) > 2, float("-inf"))
            wave = torch.view_as_complex(x.reshape(-1, 2, 2))
            return {"a": masked, "b": wave * wave, "c": x.sum(), "d": x[:0], "e": x, "f": x}

    found = compared(Odd(), torch.arange(9), train=train)
    mine = found.columns["fx_fuser"]
    assert mine.faults == [] and 0 <= (mine.output_error or 0) < 1e-6
    assert (mine.grad_error is not None) is train


@pytest.mark.slow
def test_under_inference_mode_and_autocast() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1)), torch.randn(8, 64)
    with torch.inference_mode():
        found = compared(model, x)
        made_there = compared(nn.Linear(4, 4), x[:, :4])
    assert found.step == made_there.step == "forward"
    assert found.columns["fx_fuser"].faults == made_there.columns["fx_fuser"].faults == []
    with torch.autocast("cpu", torch.bfloat16):
        found = compared(model, x, train=True)
    assert found.columns["fx_fuser"].faults == []
    assert 1e-4 < (found.columns["eager"].output_error or 0) < 1e-2
