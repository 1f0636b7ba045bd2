"""`compare` on a CPU: what it measures, what it leaves as it was, and what a failure costs."""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx

import fx_fuser
from fx_fuser import Comparison, OptionError
from fx_fuser.compare import race as race_module
from fx_fuser.compare import turns, values
from fx_fuser.compare.race import Race
from fx_fuser.compare.step import leaves_of, named_tensors
from fx_fuser.compare.untouched import kept, modules_of, tf32_allowed
from fx_fuser.compare.ways import ways_of
from fx_fuser.installation import suspended
from fx_fuser.options import Options
from fx_fuser.verify.accuracy import Observed

MODULE = sys.modules["fx_fuser.compare"]  # the package; as an attribute it is the function
ALL = ("eager", "inductor", "fx_fuser")
EAGER = {"inner": "eager"}


def compared(model: Any, *inputs: Any, **given: Any) -> Comparison:
    given = {"options": EAGER, "columns": ALL, "seconds": 0.01, "progress": False, **given}
    return fx_fuser.compare(model, *inputs, **given)


@dataclasses.dataclass
class Result:
    logits: Tensor
    hidden: Any = None


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
        self.random = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
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


def settings() -> tuple[Any, ...]:
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    newer = (cuda.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)  # type: ignore[attr-defined]
    try:
        older = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:
        older = ("raises", True)
    return (
        *newer, *older, torch.is_grad_enabled(), torch.get_default_dtype(),
        torch._dynamo.config.recompile_limit, compile_fx.compile_fx,
    )  # fmt: skip


@pytest.fixture
def net() -> Net:
    """In a mode of its own making, with gradients and a graph that waits."""
    torch.manual_seed(0)
    model = Net().train()
    model(IDS).logits.sum().backward()
    model.calls, model.cache = 7, {}
    model.norm.eval()
    return model


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A column whose compilation, or whose calls from the n-th on, raise."""

    def breaks(name: str, error: BaseException, after: int | None = None) -> None:
        ways_of = MODULE.ways_of

        def broken_ways(*args: Any) -> Any:
            ways = ways_of(*args)
            if name in ways:
                ways[name] = dataclasses.replace(ways[name], compile=compile_with)
            return ways

        def compile_with(model: Any) -> Any:
            if after is None:
                raise error
            calls = iter(range(10**6))

            def call(*args: Any, **kwargs: Any) -> Any:
                if next(calls) >= after:
                    raise error
                return model(*args, **kwargs)

            return call

        monkeypatch.setattr(MODULE, "ways_of", broken_ways)

    return breaks


# ---- what is untouched --------------------------------------------------------------------------


@pytest.mark.parametrize("train", [None, True, False])
def test_model_gradients_random_states_and_settings_are_untouched(
    net: Net, train: bool | None
) -> None:
    before = State(net)
    found = compared(net, IDS, train=train)
    before.check()
    assert (net.calls, net.cache) == (7, {}) and not hasattr(net.norm, "late")
    assert all(column.ran for column in found.columns.values())
    assert found.step == ("forward" if train is False else "training step")


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


def test_untouched_where_a_column_is_interrupted(net: Net, broken: Callable[..., None]) -> None:
    before = State(net)
    broken("fx_fuser", KeyboardInterrupt(), after=3)
    with pytest.raises(KeyboardInterrupt):
        compared(net, IDS, train=True)
    before.check()


def test_a_write_that_no_version_tells_of_is_undone_in_the_end() -> None:
    class Hidden(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.mul_(0.5)
            return super().forward(x)

    model = Hidden(4, 4)
    before = model.weight.detach().clone()
    compared(model, torch.ones(2, 4), train=False, columns=["eager"])
    assert torch.equal(model.weight, before)


def test_leaves_that_only_a_function_holds_keep_their_gradients() -> None:
    weight, linear = torch.ones(4, 4, requires_grad=True), nn.Linear(4, 4)
    weight.grad = given = torch.full((4, 4), 3.0)

    def function(x: Tensor) -> Tensor:
        return linear(x) @ weight

    found = compared(function, torch.ones(2, 4))
    assert weight.grad is given and bool((given == 3.0).all())
    assert linear.weight.grad is None
    assert (found.model, found.step) == ("function", "training step")


def test_inputs_are_copied_and_their_gradients_compared() -> None:
    x = torch.ones(3, 4, requires_grad=True)

    def writes(x: Tensor, y: Tensor) -> Tensor:
        return x * y.add_(1.0)

    y = torch.ones(3, 4)
    found = compared(writes, x, y=y)
    assert x.grad is None and torch.equal(y, torch.ones(3, 4))
    assert found.step == "training step"
    assert found.inputs == ["[3, 4] float32", "[3, 4] float32"]


def test_what_is_installed_stays_and_does_not_reach_inductors_column() -> None:
    with fx_fuser.installed({"fp32": "ieee"}):
        around = compile_fx.compile_fx
        with suspended():
            assert not getattr(compile_fx.compile_fx, "is_fx_fusers", False)
        assert getattr(compile_fx.compile_fx, "is_fx_fusers", False)
        with fx_fuser.installed(), suspended():
            pass
        assert getattr(compile_fx.compile_fx, "is_fx_fusers", False) and around
    assert not getattr(compile_fx.compile_fx, "is_fx_fusers", False)


def test_a_compiled_model_is_measured_uncompiled_and_stays_compiled() -> None:
    model, x, seen = nn.Linear(4, 4), torch.ones(2, 4), list[int]()

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


# ---- models -------------------------------------------------------------------------------------


class Integers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 9)

    def forward(self, x: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            return {"tokens": self.linear(x).argmax(-1), "count": 3, "none": None}


def test_a_model_that_returns_integers_has_no_backward() -> None:
    found = compared(Integers(), torch.randn(5, 4), train=True)
    assert found.step == "forward"
    assert "No output requires a gradient: a step is a forward pass." in found.notes
    assert found.columns["fx_fuser"].faults == []
    assert found.columns["fx_fuser"].error is None


def test_a_model_without_parameters() -> None:
    found = compared(nn.ReLU(), torch.randn(4, 4))
    assert found.step == "forward" and all(column.ran for column in found.columns.values())


def test_keyword_inputs_also_those_that_are_called_as_arguments_here() -> None:
    class Configured(nn.Module):
        def forward(self, x: Tensor, seconds: Tensor, loss: float = 1.0) -> Tensor:
            return x * seconds * loss

    given = {"seconds": torch.ones(3), "loss": 2.0}
    found = compared(Configured(), x=torch.ones(3), kwargs=given, train=False)
    assert sorted(found.inputs) == ["[3] float32", "[3] float32"]


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


def test_a_loss_of_the_result_is_taken() -> None:
    model = nn.Linear(4, 1)
    seen = []

    def loss(result: Tensor) -> Tensor:
        seen.append(result.shape)
        return result.square().mean()

    found = compared(model, torch.randn(3, 4), train=True, loss=loss)
    assert seen and found.columns["fx_fuser"].grad_error is not None


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


# ---- columns ------------------------------------------------------------------------------------


def test_on_a_cpu_eager_and_inductor_are_shown_and_nothing_is_claimed() -> None:
    found = compared(nn.Linear(4, 4), torch.ones(2, 4), columns=None)
    assert list(found.columns) == ["eager", "inductor"]
    assert [c.title for c in found.columns.values()] == ["eager", "inner=eager"]
    assert found.verdict.startswith("NO GPU: no kernel of fx_fuser's runs on a CPU")
    assert not found.use and not found.launch_bound
    assert found.columns["inductor"].first_s is not None


def test_inductors_column_has_the_users_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda model, **given: seen.append(given))
    for given in ({}, {"mode": "max-autotune-no-cudagraphs", "fp32": "ieee", "max_fusion_size": 3}):
        ways = ways_of(ALL, Options.parse(None, given, []), given)
        ways["inductor"].compile(None)
        ways["fx_fuser"].compile(None)
    plain, _, tuned, own = seen
    assert plain == {}
    assert tuned["options"]["max_autotune"] is True and tuned["options"]["max_fusion_size"] == 3
    assert "fp32" not in tuned["options"] and own["options"] == given


@pytest.mark.parametrize("after", [None, 0, 1, 4])
def test_a_mode_that_raises_costs_its_column_alone(
    broken: Callable[..., None], after: int | None
) -> None:
    broken("inductor", ValueError("no such\nluck"), after)
    found = compared(nn.Linear(4, 4), torch.ones(2, 4), train=True)
    failed = found.columns.pop("inductor")
    assert failed.failed == "ValueError: no such" and not failed.wall and not failed.out_of_memory
    assert all(c.ran and c.error is not None for c in found.columns.values())
    assert "inner=eager failed: ValueError: no such" in str(
        dataclasses.replace(found, columns=found.columns | {"inductor": failed})
    )


@pytest.mark.parametrize("column", ["inductor", "fx_fuser"])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("ran out of memory")]
)
def test_out_of_memory_costs_its_column_alone(
    broken: Callable[..., None], column: str, error: Exception
) -> None:
    broken(column, error, after=0)
    found = compared(nn.Linear(4, 4), torch.ones(2, 4))
    assert found.columns[column].out_of_memory
    assert all(c.ran for name, c in found.columns.items() if name != column)
    assert re_has(found, "out of memory")
    assert found.judged.word == ("DO NOT USE" if column == "fx_fuser" else "NO GPU")


def re_has(found: Comparison, text: str) -> bool:
    return text in str(found) and text in found.to_html() and text in found.to_json()


def test_out_of_memory_in_eager_mode_costs_its_column_alone() -> None:
    class Hungry(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x)

    found = compared(Hungry(4, 4), torch.ones(2, 4), train=True)
    assert found.columns["eager"].out_of_memory and found.step == "training step"
    assert found.columns["inductor"].ran and found.columns["fx_fuser"].ran
    assert any("eager mode, which bounds them, did not run" in note for note in found.notes)


def test_progress_is_on_stderr_and_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    compared(nn.Linear(4, 4), torch.ones(2, 4), progress=True)
    said = capsys.readouterr()
    assert not said.out and "fx_fuser: compile and first step" in said.err
    compared(nn.Linear(4, 4), torch.ones(2, 4))
    assert capsys.readouterr() == ("", "")


# ---- values -------------------------------------------------------------------------------------


def test_a_wrong_result_is_not_to_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ways_of = MODULE.ways_of

    def wrong(*args: Any) -> Any:
        ways = ways_of(*args)
        ways["fx_fuser"] = dataclasses.replace(
            ways["fx_fuser"], compile=lambda model: lambda x: model(x) * 1.001
        )
        return ways

    monkeypatch.setattr(MODULE, "ways_of", wrong)
    found = compared(nn.Linear(64, 64), torch.randn(8, 64), train=True)
    assert found.judged.word == "DO NOT USE"
    faults = found.columns["fx_fuser"].faults or []
    assert [fault.partition(":")[0] for fault in faults] == [
        "output 0", "gradient of weight", "gradient of bias",
    ]  # fmt: skip
    assert 1e-4 < (found.columns["fx_fuser"].output_error or 0) < 1e-2


def test_dropout_is_set_aside_for_values() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    found = compared(model, torch.randn(16, 8), train=True)
    assert found.notes == ["Values were compared without dropout."]
    assert found.columns["fx_fuser"].faults == [] and model[1].p == 0.5


def test_a_model_that_draws_otherwise_has_no_errors() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    found = compared(noisy, torch.ones(3))
    assert found.columns["fx_fuser"].error is None and found.columns["fx_fuser"].faults is None
    assert any("draws random numbers" in note for note in found.notes)


def test_a_model_that_cannot_be_copied_has_no_errors() -> None:
    model = nn.Linear(4, 4)
    model.lock = threading.Lock()
    found = compared(model, torch.ones(2, 4))
    assert found.columns["eager"].ran and found.columns["eager"].error is None
    assert "cannot pickle" in found.notes[0]


def test_float64_also_where_a_model_names_a_dtype() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x.float()) + torch.zeros(64) + torch.ones(64, dtype=torch.float32)
            return F.softmax(y, -1, dtype=torch.float32).to(torch.float32)

    model, x = Named(), torch.randn(8, 64)
    found = compared(model, x, train=False)
    exact = F.softmax(F.linear(x.double(), model.linear.weight.double()) +
                      model.linear.bias.double() + 1.0, -1)  # fmt: skip
    error = float(((model(x).double() - exact).norm() / exact.norm()).detach())
    assert found.columns["eager"].output_error == pytest.approx(error)


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


def test_no_reference_no_errors() -> None:
    found = compared(nn.Linear(4, 4), torch.ones(2, 4), reference=False)
    assert all(c.error is None and c.faults is None for c in found.columns.values())


# ---- times, by made-up clocks -------------------------------------------------------------------


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """As if on a GPU: wall times by column, and a profile."""
    ms = {"eager": 3.0, "inductor": 2.0, "fx_fuser": 1.0, "inductor_tf32": 1.5}
    profile = [("fx_fuser_linear_split", 0.6), ("triton_poi_fused_gelu_0", 0.35)]
    monkeypatch.setattr(MODULE, "_device", lambda tensors: torch.device("cuda"))
    monkeypatch.setattr(Race, "_wall_ms", lambda race, name: ms[name])
    monkeypatch.setattr(Race, "_warm_up", lambda race: None)
    monkeypatch.setattr(Race, "_synchronize", lambda race: None)
    monkeypatch.setattr(turns, "peak_mib", lambda step, device: 100.0)
    monkeypatch.setattr(turns, "kernels_of", lambda step, device: profile)
    return ms


def test_on_a_gpu_all_columns_are_measured(clocks: dict[str, float]) -> None:
    found = compared(nn.Linear(4, 4), torch.ones(2, 4), columns=None, cold=False)
    assert list(found.columns) == ["eager", "inductor", "fx_fuser", "inductor_tf32"]
    assert {name: column.wall_ms for name, column in found.columns.items()} == clocks
    mine = found.columns["fx_fuser"]
    assert (mine.gpu_ms, mine.peak_mib) == (0.95, 100.0)
    assert mine.kinds == {"fx_fuser": 0.6, "Triton": 0.35} and mine.faults == []
    assert found.verdict.startswith("USE IT: 2.00 times as fast as inner=eager by the clock")


def test_no_tf32_column_for_16_bits_or_where_tf32_is_on_already(clocks: dict[str, float]) -> None:
    def columns(model: nn.Module, x: Tensor) -> list[str]:
        given = {"columns": None, "cold": False, "reference": False}
        return list(compared(model, x, **given).columns)

    assert columns(nn.Linear(4, 4).bfloat16(), torch.ones(2, 4).bfloat16()) == list(ALL)
    with tf32_allowed():
        assert columns(nn.Linear(4, 4), torch.ones(2, 4)) == list(ALL)


def test_a_launch_bound_net_is_told_so(clocks: dict[str, float]) -> None:
    clocks |= {"fx_fuser": 1.95, "inductor_reduce_overhead": 1.6, "fx_fuser_reduce_overhead": 0.9}
    found = compared(nn.Linear(4, 4), torch.ones(2, 4), cold=False)
    assert found.launch_bound and not found.use and "LAUNCH-BOUND" in found.verdict
    given = {"options": None, "reference": False, "reduce_overhead": True, "cold": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Race, "_first", lambda race, name, way: race.calls.update({name: race.model}))
        found = compared(nn.Linear(4, 4), torch.ones(2, 4), **given)
    assert "1.78 times as fast as Inductor, reduce-overhead" in found.verdict and found.use


def test_a_profiler_that_fails_costs_gpu_time_alone(
    clocks: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(step: Any, device: Any) -> Any:
        raise RuntimeError("CUPTI is missing")

    monkeypatch.setattr(turns, "kernels_of", fails)
    found = compared(nn.Linear(4, 4), torch.ones(2, 4), cold=False)
    assert all(c.ran and c.gpu_ms is None for c in found.columns.values())
    assert found.use and "GPU time is not known: RuntimeError: CUPTI is missing" in found.notes


def test_caches_are_cold_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    cold = race_module.cold_caches
    monkeypatch.setattr(race_module, "cold_caches", lambda: entered.append(1) or cold())
    compared(nn.Linear(4, 4), torch.ones(2, 4))
    assert not entered
    compared(nn.Linear(4, 4), torch.ones(2, 4), cold=True)
    assert len(entered) == 2  # not eager mode's


# ---- arguments ----------------------------------------------------------------------------------

LINEAR, X = nn.Linear(4, 4), torch.ones(2, 4)
FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "no model": (lambda: compared(), "missing|positional"),
    "model": (lambda: compared(3), "the model is 3, an int; give an nn.Module or a function first"),
    "class": (lambda: compared(nn.Linear, X), "the class Linear; give an instance: Linear"),
    "no inputs": (lambda: compared(LINEAR), "does not take these inputs: missing .* 'input'.*use"),
    "train": (lambda: compared(LINEAR, X, train="eval"), "train is 'eval', a str; give True or F"),
    "loss": (lambda: compared(LINEAR, X, loss="mse"), "loss is 'mse', a str; give a function of"),
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
        "option 'mode' is 'reduce-overhead' beside reduce_overhead=True; leave one out",
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


def test_kept_restores_containers_in_place() -> None:
    model = nn.Linear(2, 2)
    model.seen, model.names = [1, 2], {"a"}
    seen = model.seen
    with kept([model]):
        model.seen.append(3)
        model.names.clear()
        model.extra = 1
        model.seen = []
    assert model.seen is seen and seen == [1, 2] and model.names == {"a"}
    assert not hasattr(model, "extra")
