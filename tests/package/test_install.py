"""`fx_fuser.install()`: plain `torch.compile(model)` fuses, and Inductor's caches know of it.

In torch 2.11 and 2.12 a graph is fused before Inductor gets it, so the caches have fused graphs.
From 2.13 on Inductor looks into its caches first.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import ADD, MUL, fused, linear_program
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fx_fuser
from fx_fuser import backend, installation, registry
from fx_fuser.errors import OptionError
from fx_fuser.graph.match import rewrite
from fx_fuser.kernels.split import LINEAR_SPLIT_MMA
from fx_fuser.native import binaries
from fx_fuser.ops import calls

OPTIONS = {"cpu_ops": True, "strict": True, "auto": False}
ROOT = Path(__file__).parents[2]
INDUCTOR = compile_fx.compile_fx


@pytest.fixture(autouse=True)
def own_installation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # What an earlier run has left in Inductor's caches would be taken, and nothing counted.
    monkeypatch.setattr(registry, "_patterns", list(registry._patterns))
    with inductor_config.patch(force_disable_caches=True):
        yield
    fx_fuser.uninstall()
    assert compile_fx.compile_fx is INDUCTOR


def gate(m: Any, x: Tensor) -> Tensor:
    z = m.lin(x)
    return z * torch.sigmoid(z) * 2.0


def gated() -> nn.Module:
    return linear_program(gate)


def linear_graph() -> torch.fx.GraphModule:
    weight = torch.randn(6, 8)
    return torch.fx.symbolic_trace(lambda x: F.linear(x, weight))


def step(model: nn.Module, run: Callable[..., Any], x: Tensor) -> list[Tensor]:
    """The value and all gradients of one training step."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    value = run(x)
    value.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [value.detach(), x.grad, *grads]


@pytest.mark.slow
@pytest.mark.parametrize(
    "named",
    [{}, {"backend": "inductor"}, pytest.param({"mode": "default"}, marks=pytest.mark.slow)],
)
def test_plain_compile_fuses(named: dict[str, Any]) -> None:
    model, x = gated(), torch.randn(4, 8)
    fx_fuser.install(OPTIONS)
    found = step(model, torch.compile(model, **named), x)
    assert fused() == {MUL: 1}
    torch.testing.assert_close(found, step(model, model, x))


def test_inference_fuses() -> None:
    model, x = gated().eval(), torch.randn(4, 8)
    with fx_fuser.installed(OPTIONS), torch.no_grad():
        torch.testing.assert_close(torch.compile(model)(x), model(x))
    assert fused() == {MUL: 1}


def test_dynamic_sizes_compile_once() -> None:
    model = gated()
    with fx_fuser.installed(OPTIONS), torch.no_grad():
        run = torch.compile(model, dynamic=True)
        for rows in (4, 7, 5):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(run(x), model(x))
    assert fused() == {MUL: 1}


def _unfused_after(end: Callable[[], Any]) -> None:
    end()
    torch._dynamo.reset()
    model, x = gated(), torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(model)(x), model(x))
    assert fused() == {}


@pytest.mark.slow
def test_uninstall() -> None:
    fx_fuser.install(OPTIONS)
    fx_fuser.install(OPTIONS)
    assert compile_fx.compile_fx is not INDUCTOR
    _unfused_after(fx_fuser.uninstall)
    fx_fuser.uninstall()  # nothing is installed


def test_blocks_nest_and_end_in_any_order() -> None:
    outer, inner = fx_fuser.installed({"patterns": []}), fx_fuser.installed(OPTIONS)
    outer.__enter__()
    inner.__enter__()
    assert installation._current() == installation._parsed(OPTIONS)
    outer.__exit__(None, None, None)
    assert compile_fx.compile_fx is not INDUCTOR
    fx_fuser.install({"patterns": []})
    assert installation._current() == installation._parsed(OPTIONS)
    inner.__exit__(None, None, None)
    assert installation._current() == installation._parsed({"patterns": []})
    fx_fuser.uninstall()
    assert compile_fx.compile_fx is INDUCTOR


@pytest.mark.slow
def test_another_library_around_inductor_stays() -> None:
    fx_fuser.install(OPTIONS)
    ours = compile_fx.compile_fx
    compile_fx.compile_fx = lambda *args, **kwargs: ours(*args, **kwargs)
    theirs = compile_fx.compile_fx
    try:
        _unfused_after(fx_fuser.uninstall)
        assert compile_fx.compile_fx is theirs
    finally:
        compile_fx.compile_fx = INDUCTOR


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inner": "eager"}, "name the backend instead"),
        ({"mode": "max-autotune"}, "give it to torch.compile"),
        ({"max_autotune": True}, "give it to torch.compile"),
        ({"stritc": True}, "did you mean 'strict'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fx_fuser.install(options)
    with pytest.raises(OptionError, match=message), fx_fuser.installed(options):
        pass
    assert compile_fx.compile_fx is INDUCTOR


@pytest.mark.slow
def test_options_count() -> None:
    fx_fuser.install({**OPTIONS, "patterns": [f"-{MUL}"]})
    torch.compile(gated())(torch.randn(4, 8))
    assert fused() == {}


@pytest.mark.slow
def test_the_backend_fuses_once_while_installed() -> None:
    """Its inner compiler is Inductor: that must not be given the fused graph once more."""
    seen = []
    fx_fuser.install(OPTIONS)
    model, x = gated(), torch.randn(4, 8)
    fuse = backend.fuse
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "fuse", lambda *a, **k: seen.append(a) or fuse(*a, **k))
        run = torch.compile(model, backend="fx_fuser", options=OPTIONS)
        torch.testing.assert_close(step(model, run, x), step(model, model, x))
    assert len(seen) == 1 and fused() == {MUL: 1}


@pytest.mark.slow
def test_a_backward_after_the_block_has_its_settings() -> None:
    """Inductor compiles it when it first runs."""
    model, x = gated(), torch.randn(4, 8)
    with fx_fuser.installed(OPTIONS | {"auto": None}):
        value = torch.compile(model)(x)
    before = counters["fx_fuser_products"]["mm"]
    value.sum().backward()
    assert counters["fx_fuser_products"]["mm"] == before + 1


@pytest.mark.slow
def test_other_threads() -> None:
    model, x, found = gated(), torch.randn(4, 8), []
    fx_fuser.install(OPTIONS)
    expected = step(model, model, x)
    run = torch.compile(model)

    def work() -> None:
        with inductor_config.patch(force_disable_caches=True):  # settings are a thread's own
            found.extend(step(model, run, x))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.testing.assert_close(found, expected)
    assert fused() == {MUL: 1}


def test_exported_programs_are_left() -> None:
    """They run in C++, without fx_fuser's ops."""
    given: list[Any] = []

    def inductor(model_: Any, example_inputs_: Any, config_patches: Any = None) -> Any:
        given.append(config_patches)
        return model_

    compile_fx.compile_fx = inductor  # type: ignore[assignment]
    try:
        with fx_fuser.installed(OPTIONS):
            with V.set_aot_compilation(True):
                compile_fx.compile_fx(linear_graph(), [torch.randn(4, 8)])
            assert given == [None]
            compile_fx.compile_fx(linear_graph(), [torch.randn(4, 8)])
            assert len(given) == 2 and given[1] is not None
    finally:
        compile_fx.compile_fx = INDUCTOR


# ---- regions -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("policy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_checkpoint(policy: bool) -> None:
    """Inductor calls its pass for each region, too. One with a policy is not touched."""
    ops = [torch.ops.aten.addmm.default]
    how = {"context_fn": partial(create_selective_checkpoint_contexts, ops)} if policy else {}
    model = linear_program(
        lambda m, x: checkpoint(lambda t: gate(m, t), x, use_reentrant=False, **how)
    )
    x = torch.randn(4, 8)
    fx_fuser.install(OPTIONS)
    torch.testing.assert_close(step(model, torch.compile(model), x), step(model, model, x))
    assert fused() == ({} if policy else {MUL: 1})


# ---- the user's own pass -------------------------------------------------------------------------


@pytest.mark.slow
def test_the_users_own_pass_runs() -> None:
    seen: list[Any] = []
    model, x = gated(), torch.randn(4, 8)
    with inductor_config.patch(pre_grad_custom_pass=seen.append), fx_fuser.installed(OPTIONS):
        torch.testing.assert_close(torch.compile(model)(x), model(x))
        assert inductor_config.pre_grad_custom_pass is not None
    assert len(seen) == 1 and fused() == {MUL: 1}


def test_a_pass_given_to_torch_compile_runs() -> None:
    seen: list[Any] = []
    model, x = gated(), torch.randn(4, 8)
    with fx_fuser.installed(OPTIONS):
        run = torch.compile(model, options={"pre_grad_custom_pass": seen.append})
        torch.testing.assert_close(run(x), model(x))
    assert len(seen) == 1 and fused() == {MUL: 1}


# ---- failures ------------------------------------------------------------------------------------


class Boom(Exception):
    pass


def _boom(*args: Any, **kwargs: Any) -> Any:
    raise Boom("our own fault")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"),
    [
        (rewrite, "replace_all"),
        pytest.param(rewrite, "_erase", marks=pytest.mark.slow),
        pytest.param(binaries, "fingerprint", marks=pytest.mark.slow),
    ],
)
def test_a_failure_of_ours(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    model, x = gated(), torch.randn(4, 8)
    expected = step(model, model, x)
    monkeypatch.setattr(module, name, _boom)
    with fx_fuser.installed({"cpu_ops": True}), pytest.warns(UserWarning) as told:
        torch.testing.assert_close(step(model, torch.compile(model), x), expected)
    assert sum("leaves a graph unfused: Boom" in str(w.message) for w in told) == 1
    assert fused() == {}
    torch._dynamo.reset()
    with fx_fuser.installed(OPTIONS), pytest.raises(Exception, match="our own fault"):
        torch.compile(model)(x)


@pytest.mark.slow
def test_a_failure_at_one_site_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start may do better."""
    model, x, make = gated(), torch.randn(4, 8), calls.graph_call
    fx_fuser.install({**OPTIONS, "strict": False})
    caches = inductor_config.patch(force_disable_caches=False)
    with caches, fresh_cache(), torch.no_grad():
        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="own fault"):
            patch.setattr(calls, "graph_call", _boom)
            torch.testing.assert_close(torch.compile(model)(x), model(x))
        assert calls.graph_call is make and fused() == {}
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model)(x), model(x))
    assert fused() == {MUL: 1}


# ---- caches --------------------------------------------------------------------------------------


def _uuid(**options: Any) -> str:
    chosen = installation._parsed({**OPTIONS, **options})
    return installation.Fusion(linear_graph(), [torch.randn(4, 8)], chosen).uuid()


def _check(match: Any) -> None:
    return None


def test_the_uuid_has_all_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _uuid()
    assert _uuid() == first
    found = {first, _uuid(plan="always"), _uuid(patterns=[ADD])}

    def install_test_tanh(x, weight, a):  # type: ignore[no-untyped-def]
        return torch.tanh(F.linear(x, weight)) * a

    fx_fuser.register_pattern(install_test_tanh)
    found.add(_uuid())
    fx_fuser.register_pattern(install_test_tanh, check=_check)
    found.add(_uuid())
    monkeypatch.setattr(binaries, "fingerprint", lambda: "other sources")
    found.add(_uuid())
    monkeypatch.setattr(installation, "conv_tf32_allowed", lambda: "otherwise")
    found.add(_uuid())
    monkeypatch.setattr(installation, "LINEAR_SPLIT", LINEAR_SPLIT_MMA)
    found.add(_uuid())
    assert len(found) == 8
    x = torch.randn(4, 8)
    chosen = installation._parsed(OPTIONS)
    assert installation._uuid_of([x, x.T], chosen) != installation._uuid_of(
        [x, x.T.clone()], chosen
    )


def test_a_check_without_a_file_has_no_version() -> None:
    scope: dict[str, Any] = {}
    exec("def check(match): return None", scope)
    assert (
        installation._can_be_late(linear_graph(), installation._parsed(OPTIONS))
        == installation._HAS_LATE_PASSES
    )

    def install_test_tanh(x, weight, a):  # type: ignore[no-untyped-def]
        return torch.tanh(F.linear(x, weight)) * a

    fx_fuser.register_pattern(install_test_tanh, check=scope["check"])
    assert not installation._can_be_late(linear_graph(), installation._parsed(OPTIONS))


@pytest.mark.slow
def test_other_sources_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = gated(), torch.randn(4, 8)

    def hits() -> int:
        torch._dynamo.reset()
        before = counters["aot_autograd"]["autograd_cache_hit"]
        with fx_fuser.installed(OPTIONS), torch.no_grad():
            torch.testing.assert_close(torch.compile(model)(x), model(x))
        return counters["aot_autograd"]["autograd_cache_hit"] - before

    with inductor_config.patch(force_disable_caches=False), fresh_cache():
        assert [hits(), hits()] == [0, 1]
        monkeypatch.setattr(binaries, "fingerprint", lambda: "other sources")
        assert [hits(), hits()] == [0, 1]


_PROCESS = """
import torch
from torch._dynamo.utils import counters
import fx_fuser
from fx_fuser import backend

runs, fuse = [], backend.fuse
backend.fuse = lambda *args, **kwargs: runs.append(1) or fuse(*args, **kwargs)
torch.set_num_threads(1)
torch.manual_seed(0)
lin, x = torch.nn.Linear(8, 6), torch.randn(4, 8)

def body(x):
    z = lin(x)
    return z * torch.sigmoid(z) * 2.0

fx_fuser.install({"cpu_ops": True, "strict": True})
seen = []
for run in (body, torch.compile(body)):
    given = x.clone().requires_grad_()
    lin.zero_grad()
    value = run(given)
    value.square().sum().backward()
    seen.append([value, given.grad, *(p.grad for p in lin.parameters())])
torch.testing.assert_close(seen[1], seen[0])
print(len(runs), counters["aot_autograd"]["autograd_cache_hit"],
      counters["inductor"]["fxgraph_cache_hit"])
"""


def _process(cache: Path) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    command = [sys.executable, "-c", _PROCESS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow  # two processes and four kernels by g++; one process is tested above
def test_a_second_process_hits_the_cache(tmp_path: Path) -> None:
    """Forward and backward are taken from it, and are right; from torch 2.13 on no pass runs."""
    assert _process(tmp_path) == "1 0 0"
    assert _process(tmp_path) == ("0 1 2" if installation._HAS_LATE_PASSES else "1 1 2")
