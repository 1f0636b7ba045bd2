"""No cache and no registry knows a pattern: what is computed is among an op's arguments."""

from __future__ import annotations

import operator
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled, fused, gate, leaf, linear_program, recorded

import fx_fuser
from fx_fuser import backend, options, registry
from fx_fuser.anchors import ANCHORS
from fx_fuser.graph.match.trace import trace
from fx_fuser.native import binaries


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_patterns", list(registry._patterns))


def _source_with(tail: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, weight, bias, a: tail(torch.tanh(F.linear(x, weight, bias)), a)


@pytest.mark.slow
def test_what_is_computed_is_in_the_graph_and_not_in_the_tag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor's cache keys have the graph's constants: no two epilogues share an entry."""
    before = backend._cache_tag()
    said = []
    for tail in (operator.add, operator.sub):
        monkeypatch.setattr(registry, "_patterns", [trace(_source_with(tail), name="same_name")])
        with recorded() as graphs:
            model = linear_program(lambda m, x, y, tail=tail: tail(torch.tanh(m.lin(x)), y))
            compiled(model)(leaf(4, 8), leaf(4, 6))
        (node,) = [n for n in graphs[0].graph.nodes if "fx_fuser" in str(n.target)]
        said.append([a for a in node.args if isinstance(a, str) and "tanh" in a])
        assert backend._cache_tag() == before
        torch._dynamo.reset()
    assert said == [["v0 = tanh(z); v1 = add(v0, t0)"], ["v0 = tanh(z); v1 = sub(v0, t0)"]]


def _our_ops() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {n.removeprefix("fx_fuser::") for n in names if n.startswith("fx_fuser::")}


def test_the_ops_are_the_same_whatever_is_registered() -> None:
    before = _our_ops()
    assert before >= {*ANCHORS, "run", "run.many"}
    assert not {p.name for p in fx_fuser.registered_patterns()} & before

    def caches_test_swish(x, weight, a):  # type: ignore[no-untyped-def]
        return torch.tanh(F.linear(x, weight)) * a

    fx_fuser.register_pattern(caches_test_swish)
    model = linear_program(lambda m, x, y: torch.tanh(m.bare(x)) * y)
    compiled(model)(leaf(4, 8), leaf(4, 6)).sum().backward()
    assert fused() == {"caches_test_swish": 1}
    assert _our_ops() == before


_PROCESS = """
import operator
import sys
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
import fx_fuser

torch.set_num_threads(1)

def product(x, weight, bias, a):
    return torch.tanh(F.linear(x, weight, bias)) * a

def difference(x, weight, bias, a):
    return torch.tanh(F.linear(x, weight, bias)) - a

names = sys.argv[1:3]  # of the two, which also say in what order they are registered
tails = {"product": operator.mul, "difference": operator.sub}
sources = {"product": product, "difference": difference}
for place, name in enumerate(names):
    fx_fuser.register_pattern(sources[name], name=f"pattern_{place}")
torch.manual_seed(0)
lin = nn.Linear(8, 6)
x, y = torch.randn(4, 8), torch.randn(4, 6)
for name in sorted(names):
    tail, seen = tails[name], []
    def body(x, y):
        return tail(torch.tanh(lin(x)), y)
    options = {"cpu_ops": True, "strict": True}
    for f in (body, torch.compile(body, backend="fx_fuser", options=options)):
        inputs = [t.clone().requires_grad_() for t in (x, y)]
        lin.zero_grad()
        value = f(*inputs)
        value.square().sum().backward()
        seen.append([value, *(t.grad for t in (*inputs, *lin.parameters()))])
    for eager, ours in zip(*seen):
        torch.testing.assert_close(ours, eager)
    torch._dynamo.reset()
hits = counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]
print(dict(counters["fx_fuser"]), sum(hits) > 0)
"""


def _run(*names: str, cache: Path) -> str:
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    command = [sys.executable, "-c", _PROCESS, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow  # two processes and eight kernels by g++; what the key is of is tested above
def test_processes_that_share_inductors_cache(tmp_path: Path) -> None:
    """Patterns registered in opposite order, and under each other's names: forward and backward
    are right, and what is the same is taken from the cache."""
    # `difference` first, whatever its name
    assert _run("product", "difference", cache=tmp_path) == (
        "{'pattern_1': 1, 'pattern_0': 1} False"
    )
    assert _run("difference", "product", cache=tmp_path) == (
        "{'pattern_0': 1, 'pattern_1': 1} True"
    )


@pytest.mark.parametrize(
    "edited", ["ops/library.py", "patterns/conv2d_batchnorm_mul.py", "kernels_cu"]
)
def test_editing_a_source_changes_the_cache_tag(
    edited: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fx_fuser"
    shutil.copytree(binaries.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(binaries, "PACKAGE", package)
    monkeypatch.setattr(binaries, "KERNELS", package / "kernels_cu")
    before = backend._cache_tag()
    file = package / edited
    if file.is_dir():
        file = sorted(file.rglob("*.cu*"))[0]
    file.write_text(file.read_text() + "\n// edited\n")
    assert backend._cache_tag() != before


def test_the_tag_is_set_while_the_inner_compiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        options.Options,
        "inner_compiler",
        lambda self: (
            lambda gm, inputs: seen.append(torch.compiler.config.cache_key_tag) or gm.forward
        ),
    )
    compiled(linear_program(gate))(leaf(4, 8))
    assert seen == [backend._cache_tag()]
    assert torch.compiler.config.cache_key_tag == ""
    torch._dynamo.reset()
    compiled(linear_program(lambda m, x: m.lin(x)))(leaf(4, 8))
    assert seen[1] == "", "an unfused graph may share stock's cache entries"
