"""Verification of models of many forms, and at their calls."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from compare import ALL_THREE, CONV, MUL_ADD, MUL_MUL, ThreePatterns, fused_compile, images, sites
from helpers import linear_program, slow_but
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from verify_cases import ALWAYS, FIRST, _break_gradients, _break_values, _same, _step, _told

import fx_fuser
from fx_fuser import backend, registry
from fx_fuser.errors import VerifyError
from fx_fuser.ops import apply, library
from fx_fuser.verify import rivals, verification

# ---- forms of models ----------------------------------------------------------------------------


@pytest.mark.slow
def test_dynamic_sizes_are_verified_and_compiled_once(verified: list[str]) -> None:
    model = ThreePatterns()
    run = fused_compile(model, dynamic=True, **FIRST)
    counts = []
    for count in (4, 3, 7):
        reference = copy.deepcopy(model)
        x = images(count)
        torch.testing.assert_close(run(x), reference(x), rtol=1e-5, atol=1e-5)
        counts.append(len(verified))
    assert set(verified) == set(ALL_THREE) and len(set(counts)) == 1
    assert sites() == ALL_THREE and counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["checkpoint"], ["checkpoint", "nested_compile_region"]))
def test_bodies_are_verified(
    kind: str, monkeypatch: pytest.MonkeyPatch, verified: list[str]
) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if kind == "checkpoint":
                h = checkpoint(inner, self.lin, x, use_reentrant=False)
            else:
                h = torch.compiler.nested_compile_region(inner)(self.lin, x)
            return F.silu(self.last(h)) * 2.0

    def inner(lin: nn.Module, x: Tensor) -> Tensor:
        z = lin(x)
        return z + 2.0 * torch.sigmoid(z)

    _break_values(monkeypatch, MUL_ADD)
    model, x = Outer(), torch.randn(4, 8)
    reference = copy.deepcopy(model)
    with _told() as told:
        found = _step(model, fused_compile(model, strict=False, **FIRST), x, True)
    _same(found, _step(reference, reference, x, True), rtol=1e-5, atol=1e-5)
    assert sites() == {MUL_MUL: 1} and len(told) == 1
    assert sorted(verified) == [MUL_ADD, MUL_MUL]


@pytest.mark.slow
@pytest.mark.parametrize("where", slow_but(["inside"], ["around", "inside"]))
def test_under_autocast(where: str, monkeypatch: pytest.MonkeyPatch, verified: list[str]) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "inside"):
            return F.silu(m.lin(x)) * 2.0

    def twice(m: Any, x: Tensor) -> Tensor:
        return F.silu(m.lin(x)) * 2.0

    x = torch.randn(4, 8)
    for broken in (False, True):
        torch._dynamo.reset()
        counters.clear()
        if broken:
            right = apply.finish
            monkeypatch.setattr(
                apply, "finish", lambda *a, right=right: (right(*a), a[-1].mul_(1.05))
            )
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"), _told() as told:
            model = linear_program(body if where == "inside" else twice)
            value = fused_compile(model, strict=False, **FIRST)(x)
            expected = model(x)
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value, expected, rtol=2e-2, atol=2e-2)
        assert sites() == ({} if broken else {MUL_MUL: 1})
        assert len(told) == broken and len(verified) == broken + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "around", ["checkpoint", pytest.param("compiled autograd", marks=pytest.mark.slow)]
)
def test_with_other_things_around(around: str, verified: list[str]) -> None:
    """What they set for backward passes is not for ours."""
    model, x = ThreePatterns(conv_bias=False), images().requires_grad_()
    reference = copy.deepcopy(model)
    run = fused_compile(model, **FIRST)
    if around == "checkpoint":
        found = _step(model, lambda x: checkpoint(run, x, use_reentrant=False), x, True)
        expected = _step(
            reference, lambda x: checkpoint(reference, x, use_reentrant=False), x, True
        )
    else:
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            found = _step(model, run, x, True)
        expected = _step(reference, reference, x, True)
    _same(found, expected, rtol=1e-5, atol=1e-5)
    assert sites() == ALL_THREE and set(verified) == set(ALL_THREE)


@pytest.mark.slow
def test_wrong_running_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    anchor = library.ANCHORS["conv2d_batchnorm"]
    right = anchor.results

    def results(*args: Any) -> list[Tensor]:
        y, mean, var = right(*args)
        return [y, mean, var * 1.0001]

    monkeypatch.setattr(anchor, "results", results)
    with _told() as told:
        fused_compile(ThreePatterns(), strict=False, **FIRST)(images())
    assert sites() == {MUL_MUL: 1, MUL_ADD: 1}
    assert len(told) == 1 and "on these inputs: state of running_var: error" in told[0]


@pytest.mark.slow
def test_each_graph_is_verified_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = F.silu(m.lin(x)) * 2.0
        torch._dynamo.graph_break()
        z = m.bare(x)
        return y + (z + 2.0 * torch.sigmoid(z))

    _break_values(monkeypatch, MUL_ADD)
    model, x = linear_program(body), torch.randn(4, 8)
    with _told() as told:
        value = fused_compile(model, strict=False, **FIRST)(x)
    torch.testing.assert_close(value, model(x), rtol=1e-5, atol=1e-5)
    assert sites() == {MUL_MUL: 1} and counters["fx_fuser_wrong"] == {MUL_ADD: 1}
    assert len(told) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = linear_program(lambda m, x: F.silu(m.lin(x)) * m.p).to(dtype)
    x = torch.randn(4, 8, dtype=dtype)
    fused_compile(model, **FIRST)(x).sum().backward()
    assert sites() == {MUL_MUL: 1}


@pytest.mark.slow
def test_transposed_weights_and_views_of_operands_get_their_gradients(
    verified: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(m: Any, x: Tensor, scale: Tensor) -> Tensor:
        z = x @ m.w.t() + m.b
        return z.sigmoid_() * (scale * 2.0).relu_() * m.s

    seen: list[set[str]] = []
    right = rivals.remaining_faults
    monkeypatch.setattr(
        rivals, "remaining_faults", lambda f, *a: (seen.append(set(f.grads)), right(f, *a))[1]
    )
    scale = torch.randn(4, 6, requires_grad=True)
    fused_compile(linear_program(body), **FIRST)(torch.randn(4, 8, requires_grad=True), scale * 1.0)
    assert seen == [{"x", "weight", "bias", "a"}] and verified == [MUL_MUL]


@pytest.mark.parametrize(
    "narrow", [lambda z: z.to(torch.bfloat16), lambda z: z.bfloat16()], ids=["to", "bfloat16"]
)
def test_float64_does_not_follow_a_cast(
    narrow: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def linear_narrowed_mul(x: Tensor, weight: Tensor, bias: Tensor, a: Tensor) -> Tensor:
        return narrow(F.linear(x, weight, bias)) * a

    monkeypatch.setattr(registry, "_patterns", list(registry._patterns))
    fx_fuser.register_pattern(linear_narrowed_mul, name="narrowed")
    seen: list[Tensor] = []
    right = rivals.remaining_faults
    monkeypatch.setattr(
        rivals, "remaining_faults", lambda *a: (seen.append(a[2].outputs["value"]), right(*a))[1]
    )
    run = fused_compile(linear_program(lambda m, x: narrow(m.lin(x)) * m.s.bfloat16()), **FIRST)
    run(torch.randn(4, 8))
    (exact,) = seen
    assert exact.dtype == torch.float64 and not torch.equal(exact, exact.bfloat16().double())


def test_a_graph_with_nothing_to_fuse_is_not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "Verification", lambda *a: 1 / 0)
    fused_compile(nn.Linear(3, 3), **FIRST)(torch.ones(2, 3))


@pytest.mark.parametrize("node", ["collective", "module", "subclass"])
def test_what_cannot_be_verified_is_not_fused_and_says_why(node: str) -> None:
    graph = torch.fx.Graph()
    inputs: list[Any] = [torch.ones(2)]
    graph.output(x := graph.placeholder("x"))
    if node == "collective":
        graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    elif node == "module":
        graph.call_module("norm", (x,))
    else:
        inputs = [torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)]
    module = torch.fx.GraphModule({"norm": nn.Identity()}, graph)
    said = {"collective": "all_reduce", "module": "norm", "subclass": "NestedTensor"}[node]
    with pytest.raises(VerifyError, match=f"{said}.*leave option 'verify' out"):
        verification.Verification({module: graph}, {}).run(module, inputs)


def test_an_address_is_no_collective() -> None:
    class Double:
        __name__ = "double"

        def __call__(self, x: Tensor) -> Tensor:
            return x * 2

        def __repr__(self) -> str:
            return "<function double at 0x7fca0c10da80>"

    graph = torch.fx.Graph()
    graph.output(graph.call_function(Double(), (graph.placeholder("x"),)))
    module = torch.fx.GraphModule({}, graph)
    assert verification.Verification({module: graph}, {}).run(module, [torch.ones(2)]) == {}


def test_tf32_is_compared_with_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by option alone, it would be further from float64 than eager's own."""
    seen: list[tuple[bool, str]] = []
    right = rivals._replay

    def replay(match: Any, leaves: Any, wide: bool) -> Tensor:
        seen.append((wide, torch.backends.cuda.matmul.fp32_precision))
        return right(match, leaves, wide)

    monkeypatch.setattr(rivals, "_replay", replay)
    before = torch.backends.cuda.matmul.fp32_precision
    for precision in ("tf32", "follow"):
        torch._dynamo.reset()
        model = linear_program(lambda m, x: F.silu(m.lin(x)) * 2.0)
        fused_compile(model, fp32=precision, **FIRST)(torch.randn(4, 8))
    assert seen == [(False, "tf32"), (True, before), (False, before), (True, before)]
    assert torch.backends.cuda.matmul.fp32_precision == before


# ---- at calls -----------------------------------------------------------------------------------


def _with_fake_inputs(**options: Any) -> Callable[..., Any]:
    """As DDPOptimizer calls a backend: with fake tensors."""

    def compile_graph(gm: Any, example_inputs: Any) -> Any:
        fakes = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
        given = {"cpu_ops": True, "inner": "aot_eager", "auto": False, **options}
        return fx_fuser.backend.fx_fuser(gm, fakes, options=given)

    return compile_graph


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fake_inputs_are_verified_at_the_first_call(
    broken: bool, monkeypatch: pytest.MonkeyPatch, verified: list[str]
) -> None:
    twins: list[weakref.ref[Any]] = []
    right = backend.twin
    monkeypatch.setattr(
        backend, "twin", lambda gm: (made := right(gm), twins.append(weakref.ref(made)))[0]
    )
    model, x = ThreePatterns(), images()
    reference = copy.deepcopy(model)
    run = torch.compile(model, backend=_with_fake_inputs(**FIRST))
    if broken:
        _break_values(monkeypatch, MUL_MUL)
    for call in (1, 2):
        with _told() as told:
            found = _step(model, run, x, True)
        _same(found, _step(reference, reference, x, True), rtol=1e-5, atol=1e-5)
        assert len(told) == (broken and call == 1)
        assert sorted(verified) == sorted(ALL_THREE)
    gc.collect()
    assert (twins[0]() is not None) == broken  # it is what runs


def _ddp_step(rank: int, store: str, out: str) -> None:
    """Two steps under DDP in two buckets, with one site that breaks after it was compiled."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=1)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 200
    torch.manual_seed(0)
    model, x = ThreePatterns(conv_bias=False), images()
    reference = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=200 / 2**20)
    with pytest.MonkeyPatch.context() as patch, _told() as told:
        _break_values(patch, MUL_ADD)
        run = fused_compile(wrapped, strict=False, **FIRST)
        pairs = [(run(x), reference(x)) for _ in range(2)]
    for pair in pairs:
        for value in pair:
            value.square().sum().backward()
    grads = [(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters())]
    torch.save((pairs[1], grads, len(told), dict(counters["fx_fuser_wrong"]), sites()), out)
    os._exit(0)  # see tests/package/test_compile.py


@pytest.mark.slow
def test_under_ddp_with_several_buckets(tmp_path: Path) -> None:
    out = tmp_path / "out"
    mp.spawn(_ddp_step, args=(str(tmp_path / "store"), str(out)), nprocs=1)
    values, grads, warned, wrong, fused = torch.load(out)
    for mine, its in (values, *grads):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)
    assert (warned, wrong, set(fused)) == (1, {MUL_ADD: 1}, {MUL_ADD, CONV})


@pytest.mark.slow
def test_always_notices_what_breaks_later(
    monkeypatch: pytest.MonkeyPatch, verified: list[str]
) -> None:
    model, x = ThreePatterns(), images()
    reference = copy.deepcopy(model)
    run = fused_compile(model, strict=False, **ALWAYS)
    for call in (1, 2, 3, 4):
        if call == 3:
            _break_gradients(monkeypatch, CONV)
        with _told() as told:
            found = _step(model, run, x, True)
        _same(found, _step(reference, reference, x, True), rtol=1e-5, atol=1e-5)
        assert len(told) == (call == 3)
        # Once while compiling, then at each call until one fails.
        assert len(verified) == 3 * min(call + 1, 4)
    assert counters["fx_fuser_wrong"] == {CONV: 1}


@pytest.mark.slow
def test_an_error_while_verifying_a_call_leaves_it_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = ThreePatterns().eval(), images()
    run = torch.compile(model, backend=_with_fake_inputs(**FIRST))
    monkeypatch.setattr(verification.Verification, "run", lambda *a: 1 / 0)
    with _told() as told:
        assert torch.allclose(run(x), model(x), atol=1e-6)
    assert len(told) == 1 and "runs a graph unfused: ZeroDivisionError" in told[0]


def test_two_threads_make_the_first_call(verified: list[str]) -> None:
    model, x = ThreePatterns().eval(), images()
    run = verification.watched(
        model.forward,
        torch.fx.symbolic_trace(model),
        lambda gm, inputs: bool(verified.append("")),
        False,
    )
    barrier, values = threading.Barrier(2), []

    def work() -> None:
        barrier.wait()
        values.append(run(x))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verified == [""] and torch.equal(*values)
