"""What `compare` leaves as it was, whether it returns or raises."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from compared import Result, break_column, compared, replace_column, settings
from helpers import slow_but
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx

import fx_fuser
from fx_fuser.compare.untouched import kept, tf32_allowed
from fx_fuser.installation import suspended


class Net(nn.Module):
    """Has what a step may change: running statistics, a weight that is renormalised in place, an
    attribute, a cache, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, max_norm=0.5)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(8, 6)
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("scale", torch.ones(6))
        self.calls = 0
        self.cache: dict[str, Tensor] = {}

    def forward(self, ids: Tensor) -> Result:
        x = self.dropout(self.norm(self.embedding(ids)))
        with torch.no_grad():
            self.frozen.mul_(0.5)
        self.scale = self.scale * 2.0
        self.calls = len(ids)
        self.late = True
        self.cache["x"] = x.detach()
        if not torch.compiler.is_compiling():
            random.random(), np.random.rand()
        z = self.linear(x)
        return Result(z * torch.sigmoid(z) * 2.0, {"x": x, "ids": [ids]})


IDS = torch.randint(0, 20, (16,), generator=torch.Generator().manual_seed(0))


class State:
    """All that must be as before, of a model and of the process."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = {n: t.detach().clone() for n, t in (*tensors(model).items(),)}
        self.identities = {n: id(t) for n, t in tensors(model).items()}
        self.grads = {n: (p.grad, p.grad.clone()) for n, p in model.named_parameters() if _has(p)}
        self.flags = [m.training for m in model.modules()]
        self.wanted = [p.requires_grad for p in model.parameters()]
        self.attributes = [sorted(vars(m)) for m in model.modules()]
        self.random = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        self.settings = settings()
        self.counts = copy.deepcopy(dict(counters))

    def check(self) -> None:
        now = State(self.model)
        assert all(torch.equal(now.values[n], value) for n, value in self.values.items())
        assert now.identities == self.identities
        assert all(now.grads[n][0] is grad for n, (grad, _) in self.grads.items())
        assert all(torch.equal(grad, was) for grad, was in self.grads.values())
        assert now.grads.keys() == self.grads.keys()
        assert (now.flags, now.wanted) == (self.flags, self.wanted)
        assert now.attributes == self.attributes
        assert torch.equal(now.random[0], self.random[0]) and now.random[1:] == self.random[1:]
        assert now.settings == self.settings
        assert now.counts == self.counts


def _has(parameter: Tensor) -> bool:
    return parameter.grad is not None


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.fixture
def net() -> Net:
    """In a mode of its own making, with gradients and a graph that waits."""
    torch.manual_seed(0)
    model = Net().train()
    model(IDS).logits.sum().backward()
    model.calls, model.cache = 7, {}
    model.norm.eval()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("train", slow_but([True], [None, True, False]))
def test_model_gradients_random_states_and_settings_are_untouched(
    net: Net, train: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(counters, "fx_fuser", Counter(mine=3))
    before = State(net)
    found = compared(net, IDS, train=train)
    before.check()
    assert (net.calls, net.cache) == (7, {}) and not hasattr(net.norm, "late")
    assert all(column.ran for column in found.columns.values())
    assert found.step == ("forward" if train is False else "training step")


@pytest.mark.slow
def test_a_graph_that_waits_for_its_backward_still_has_it() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), torch.ones(3, 4)
    waiting = model.eval()(x).sum()
    compared(model, x)  # gradients are on
    waiting.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt("stop")])
def test_untouched_where_the_model_raises(net: Net, error: BaseException) -> None:
    calls = iter(range(100))

    def raises(result: Result) -> Tensor:
        if next(calls) == 1:
            raise error
        return result.logits.sum()

    before = State(net)
    with pytest.raises(type(error), match=str(error)):
        compared(net, IDS, train=True, loss=raises)
    before.check()


@pytest.mark.slow
def test_untouched_where_a_column_is_interrupted(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    before = State(net)
    break_column(monkeypatch, "fx_fuser", KeyboardInterrupt(), after=3)
    with pytest.raises(KeyboardInterrupt):
        compared(net, IDS, train=True)
    before.check()


@pytest.mark.slow
def test_a_write_that_no_version_tells_of_is_undone_in_the_end() -> None:
    class Hidden(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.mul_(0.5)
            return super().forward(x)

    model = Hidden(4, 4)
    before = model.weight.detach().clone()
    compared(model, torch.ones(2, 4), train=False, columns=["eager"])
    assert torch.equal(model.weight, before)


@pytest.mark.slow
def test_leaves_that_only_a_function_holds_keep_their_gradients() -> None:
    weight, linear = torch.ones(4, 4, requires_grad=True), nn.Linear(4, 4)
    weight.grad = given = torch.full((4, 4), 3.0)

    def function(x: Tensor) -> Tensor:
        return linear(x) @ weight

    found = compared(function, torch.ones(2, 4))
    assert weight.grad is given and bool((given == 3.0).all())
    assert linear.weight.grad is None
    assert (found.model, found.step) == ("function", "training step")


@pytest.mark.slow
def test_inputs_are_copied_and_their_gradients_compared() -> None:
    x = torch.ones(3, 4, requires_grad=True)

    def writes(x: Tensor, y: Tensor) -> Tensor:
        return x * y.add_(1.0)

    y = torch.ones(3, 4)
    found = compared(writes, x, y=y)
    assert x.grad is None and torch.equal(y, torch.ones(3, 4))
    assert found.step == "training step"
    assert found.inputs == ["[3, 4] float32", "y [3, 4] float32"]


@pytest.mark.slow
def test_what_is_installed_stays_and_does_not_reach_inductors_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fx_fuser.installed({"fp32": "ieee"}):
        around = compile_fx.compile_fx
        with suspended():
            assert not getattr(compile_fx.compile_fx, "is_fx_fusers", False)
        assert getattr(compile_fx.compile_fx, "is_fx_fusers", False)
        seen = []

        def compile_with(model: Any) -> Any:
            seen.append(getattr(compile_fx.compile_fx, "is_fx_fusers", False))
            return model

        replace_column(monkeypatch, "inductor", compile_with)
        compared(nn.Linear(4, 4), torch.ones(2, 4))
        assert seen == [False]
        assert getattr(compile_fx.compile_fx, "is_fx_fusers", False) and around
    assert not getattr(compile_fx.compile_fx, "is_fx_fusers", False)


class Gate(nn.Module):
    """Not one of torch's own, which `compile` of torch 2.11 passes over."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * x


@pytest.mark.slow
def test_a_compiled_model_is_measured_uncompiled_and_stays_compiled() -> None:
    model, x, seen = Gate(), torch.ones(2, 4), list[int]()

    def backend(gm: Any, inputs: Any) -> Any:
        seen.append(1)
        return gm.forward

    model.compile(backend=backend)
    compared(model, x)
    assert not seen
    model(x)
    assert seen
    compared(torch.compile(model, backend=backend), x)
    assert len(seen) == 1


@pytest.mark.parametrize("how", ["defaults", "older", "newer"])
def test_tf32_is_allowed_in_its_column_alone(how: str) -> None:
    matmul: Any = torch.backends.cuda.matmul
    was = matmul.fp32_precision
    try:
        if how == "older":
            torch.set_float32_matmul_precision("medium")
        elif how == "newer":
            matmul.fp32_precision = "tf32"  # beside the older "highest": torch's own reads raise
            assert settings()[3] == "raises"
        before = settings()
        with pytest.raises(KeyError), tf32_allowed():
            assert matmul.fp32_precision == "tf32" and torch.backends.cudnn.allow_tf32
            raise KeyError
        assert settings() == before
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = was


def test_kept_restores_containers_in_place() -> None:
    model = nn.Linear(2, 2)
    model.seen, model.names = [1, 2], {"a"}
    seen = model.seen
    with kept([model]):
        model.seen.append(3)
        model.names.clear()
        model.extra = 1
        model.bias.requires_grad_(False)
        model.seen = []
    assert model.seen is seen and seen == [1, 2] and model.names == {"a"}
    assert not hasattr(model, "extra") and model.bias.requires_grad
