"""The library's fused convolution, with BatchNorm folded into the weight: `fx_fuser.ops.folded`."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folded_nets import FORCED, check, net, random_norm, relative
from helpers import slow_but
from plan_cases import CONV, decide
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.fx import Graph

import fx_fuser
from fx_fuser.graph.epilogue import parse
from fx_fuser.graph.match.pattern import Refusal
from fx_fuser.kernels.folded import addend_of_relu
from fx_fuser.ops import folded, run
from fx_fuser.options import Options
from fx_fuser.passes import folding, memory
from fx_fuser.planning import bench_ops, layout, timing
from fx_fuser.planning.plan import Plan
from fx_fuser.planning.timing import Timing

_ops = torch.ops.fx_fuser


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Counter[str]]]:
    """What is called in each of Inductor's graphs after the pass."""
    seen: list[Counter[str]] = []
    inner = folding.Folding.__call__

    def watched(self: folding.Folding, graph: Graph) -> None:
        inner(self, graph)
        called = (run.called(n)[0] for n in graph.nodes if n.op == "call_function")
        seen.append(Counter(str(op) for op in called))

    monkeypatch.setattr(folding.Folding, "__call__", watched)
    torch._dynamo.reset()
    counters.clear()
    with fresh_cache():  # on a hit no pass runs
        yield seen
    torch._dynamo.reset()


# ---- the ops -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, addend",
    [
        ("v0 = relu(z)", ""),
        ("v0 = add(z, t0); v1 = relu(v0)", "t0"),
        ("v0 = add(t1, z); v1 = identity(v0); v2 = relu(v1)", "t1"),
        ("", None),
        ("v0 = add(z, t0)", None),
        ("v0 = add(z, s0); v1 = relu(v0)", None),
        ("v0 = add(z, z); v1 = relu(v0)", None),
        ("v0 = add(z, t0, s0); v1 = relu(v0)", None),
        ("v0 = relu(z); v1 = add(v0, t0)", None),
        ("v0 = relu(t0); v1 = add(z, v0); v2 = relu(v1)", None),
        ("v0 = add(z, t0); v1 = add(v0, t1); v2 = relu(v1)", None),
        ("v0 = sub(z, t0); v1 = relu(v0)", None),
        ("v0 = silu(z)", None),
    ],
)
def test_which_tails_the_call_computes(text: str, addend: str | None) -> None:
    assert addend_of_relu(parse(text)) == addend


@pytest.mark.parametrize("missing", [(), ("bias",), ("gamma", "beta"), ("bias", "gamma", "beta")])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 3, 3, 2), (4, 8, 1, 1), (7, 16, 3, 3)])
def test_fold(shape: tuple[int, ...], out: torch.dtype, missing: tuple[str, ...]) -> None:
    """Of two layers in one call, of which the second lacks some vectors."""
    weights = [torch.randn(shape), torch.randn(6, 4, 1, 1)]
    names = ("bias", "running_mean", "running_var", "gamma", "beta")
    layers = [{n: torch.rand(w.shape[0]) + 0.1 for n in names} for w in weights]
    for name in missing:
        del layers[1][name]
    given = [sum(b for n, b in folded._OPTIONAL.items() if n in layer) for layer in layers]
    vectors = [v for layer in layers for v in layer.values()]
    places = folded.places_of(weights, out)
    whole = _ops.fold(weights, vectors, given, [1e-5, 1e-3], places, "", out, weights[0])
    made = folded.parts_of(whole, weights, places)
    for i, (weight, layer, eps) in enumerate(zip(weights, layers, (1e-5, 1e-3))):
        wide = {n: v.double() for n, v in layer.items()}
        scale = wide.get("gamma", 1.0) / (wide["running_var"] + eps).sqrt()
        shift = (wide.get("bias", 0.0) - wide["running_mean"]) * scale + wide.get("beta", 0.0)
        bound = torch.finfo(out).eps
        assert relative(made[2 * i], weight.double() * scale.view(-1, 1, 1, 1)) < bound
        assert relative(made[2 * i + 1], shift) < 4 * bound  # of a difference
        assert made[2 * i].is_contiguous(memory_format=torch.channels_last)
        assert all(part.data_ptr() % 64 == whole.data_ptr() % 64 for part in made)


def test_ops_keep_their_contracts() -> None:
    weight, vector = torch.randn(4, 3, 3, 3), torch.rand(4) + 0.5
    places = folded.places_of([weight], torch.float32)
    fold = ([weight], [vector, vector], [0], [1e-5], places, "", torch.float32, weight)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(_ops.fold.default, fold, test_utils=tests)
    for form in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 3, 7, 6).contiguous(memory_format=form)
        addend = torch.randn(2, 4, 4, 3)
        for arguments in ((vector, addend, True), (vector, None, True), (None, None, False)):
            *others, relu = arguments
            called = (x, weight, *others, [2, 2], [1, 1], [1, 1], 1, relu)
            given = run.arguments("conv2d_folded", called)
            torch.library.opcheck(run.ONE, given, test_utils=tests)


# ---- through the backend, on a CPU ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_a_net(form: torch.memory_format, graphs: list[Counter[str]]) -> None:
    """Where images are large, few folds for all layers; the shortcut's shift is in the bias of the
    layer that adds it."""
    model = net().to(memory_format=form)
    check(model, torch.randn(3, 3, 29, 34).contiguous(memory_format=form))
    (graph,) = graphs
    assert graph["fx_fuser.fold.default"] <= 2
    assert graph["conv2d_folded"] == 8
    assert graph["aten.convolution.default"] == graph["aten.relu.default"] == 0
    assert graph["aten.add.Tensor"] == 1  # of the two shifts, which are vectors
    assert counters["fx_fuser"]["auto_conv2d_batchnorm"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("inner", slow_but(["aot_eager"], ["inductor", "aot_eager"]))
def test_only_the_weights_are_in_channels_last(inner: str, graphs: list[Counter[str]]) -> None:
    """Then eager's results are, from the first layer on, which is left."""
    model = net().to(memory_format=torch.channels_last)
    check(model, torch.randn(3, 3, 29, 34), inner=inner)
    if inner == "inductor":
        assert graphs[0]["conv2d_folded"] == 7


@pytest.mark.slow
def test_a_fold_by_itself_pins_no_layout(
    graphs: list[Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the layer's input to keep its place, and reads nothing of it."""
    monkeypatch.setattr(memory.Memory, "has_room_for", lambda *_: False)
    inner = folding.Folding.__call__

    def watched(self: folding.Folding, graph: Graph) -> None:
        inner(self, graph)
        folds = graph.find_nodes(op="call_function", target=_ops.fold.default)
        assert len(folds) == 8 and not any("eager_input_vals" in n.meta for n in folds)

    monkeypatch.setattr(folding.Folding, "__call__", watched)
    check(net(), torch.randn(2, 3, 16, 16))


@pytest.mark.slow
def test_vectors_that_are_views(graphs: list[Counter[str]]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.one = nn.Conv2d(3, 4, 3), nn.Parameter(torch.tensor([1.5]))
            self.register_buffer("statistics", torch.rand(4, 2) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            mean, var = self.statistics.unbind(1)
            return F.batch_norm(self.conv(x), mean, var, self.one.expand(4)).relu()

    check(Model().eval(), torch.randn(2, 3, 8, 8))
    assert graphs[0]["conv2d_folded"] == 1


@pytest.mark.slow
def test_an_inner_compiler_without_the_pass(graphs: list[Counter[str]]) -> None:
    check(net(), torch.randn(2, 3, 17, 16), inner="aot_eager")
    assert graphs == []
    assert counters["fx_fuser"]["auto_conv2d_batchnorm"] == 8


@pytest.mark.slow
def test_no_batch_norm(graphs: list[Counter[str]]) -> None:
    """As in VGG and SqueezeNet."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding="same"), nn.ReLU(), nn.Conv2d(8, 4, 2), nn.ReLU()
    )
    check(model.eval(), torch.randn(2, 3, 9, 9))
    assert graphs[0]["conv2d_folded"] == 2
    assert graphs[0]["fx_fuser.fold.default"] == 0


@pytest.mark.slow
def test_live_parameters(graphs: list[Counter[str]]) -> None:
    """Evaluation, training, evaluation: nothing is folded once for all."""
    model = net()
    compiled = torch.compile(model, backend="fx_fuser", options=FORCED)
    x = torch.randn(4, 3, 21, 21)
    for _ in range(3):
        with torch.no_grad():
            assert relative(compiled(x), model(x).double()) < 1e-5
        model.train()
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        model.eval()
    assert graphs[0]["conv2d_folded"] == 8


@pytest.mark.slow
def test_16_bits_are_left_on_a_cpu(graphs: list[Counter[str]]) -> None:
    x = torch.randn(2, 3, 21, 21)
    check(net().bfloat16(), x.bfloat16())
    model = net()
    compiled = torch.compile(model, backend="fx_fuser", options=FORCED)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            found, eager = compiled(x), model(x)
    assert relative(found, exact) <= 2 * relative(eager, exact)
    assert found.dtype == eager.dtype == torch.bfloat16
    assert all(graph["conv2d_folded"] == 0 for graph in graphs)


def _tail(f: Callable[..., Tensor]) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), random_norm(4)

        def forward(self, x: Tensor) -> Tensor:
            return f(self.norm(self.conv(x)))

    return Model().eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "tail",
    [
        lambda z: F.silu(z),
        lambda z: torch.relu(z + torch.ones(4, 1, 1)),  # not of z's shape
        lambda z: torch.relu(z + z),
        pytest.param(
            lambda z: torch.relu(torch.add(z, torch.ones_like(z), alpha=0.5)),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda z: torch.relu(z + torch.ones_like(z, dtype=torch.float64)),
            marks=pytest.mark.slow,
        ),
        lambda z: torch.relu(z.half()),
    ],
)
def test_other_tails_are_others(tail: Callable[..., Tensor], graphs: list[Counter[str]]) -> None:
    check(_tail(tail), torch.randn(2, 3, 8, 8))
    assert sum(graph["conv2d_folded"] for graph in graphs) == 0


@pytest.mark.slow
def test_the_end_of_a_longer_tail_is_left(graphs: list[Counter[str]]) -> None:
    """On CUDA the match ends with relu (`plan.no_gain`); here any tail is taken, by the library."""
    check(_tail(lambda z: torch.relu(z) * 0.5), torch.randn(2, 3, 8, 8))
    assert sum(graph["conv2d_folded"] for graph in graphs) == 0
    assert counters["fx_fuser"]["auto_conv2d_batchnorm"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes_that_are_refused(dtype: torch.dtype, graphs: list[Counter[str]]) -> None:
    """A weight times BatchNorm's scale may be beyond the range of fp16."""
    check(_tail(torch.relu).to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype))
    assert sum(graph["conv2d_folded"] for graph in graphs) == 0


@pytest.mark.slow
def test_gradients_and_batch_statistics_are_refused(graphs: list[Counter[str]]) -> None:
    model = _tail(torch.relu)
    x = torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, backend="fx_fuser", options=FORCED)
    compiled(x).sum().backward()  # a frozen BatchNorm
    found = model.conv.weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(found, model.conv.weight.grad)
    model.train()
    with torch.no_grad():
        compiled(x)
    assert sum(graph["conv2d_folded"] for graph in graphs) == 0


def test_exactness_that_is_asked_for_is_kept(graphs: list[Counter[str]]) -> None:
    """The call follows torch's setting, by which convolutions may take TF32."""
    check(_tail(torch.relu), torch.randn(2, 3, 8, 8), fp32="split")
    assert sum(graph["conv2d_folded"] for graph in graphs) == 0


@pytest.mark.slow
def test_a_branch_with_another_reader_keeps_its_shift(graphs: list[Counter[str]]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = _tail(lambda z: z), _tail(lambda z: z)

        def forward(self, x: Tensor) -> Tensor:
            branch = self.b(x)
            return torch.relu(self.a(x) + branch) + branch

    check(Model().eval(), torch.randn(2, 3, 8, 8))


class Shortcut(nn.Module):
    """RegNet's block, whose shortcut is computed first."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Sequential(nn.Conv2d(8, 16, 1, 2, bias=False), random_norm(16))
        self.f = nn.Sequential(
            nn.Conv2d(8, 16, 1, bias=False), random_norm(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, 2, 1, groups=2, bias=False), random_norm(16), nn.ReLU(),
            nn.Conv2d(16, 16, 1, bias=False), random_norm(16),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.proj(x) + self.f(x))


@pytest.mark.slow
def test_the_end_of_the_longer_way_takes_the_addition(
    graphs: list[Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the block's input would live until its end."""
    seen: list[Graph] = []
    watched = folding.Folding.__call__

    def kept(self: folding.Folding, graph: Graph) -> None:
        watched(self, graph)
        seen.append(graph)

    monkeypatch.setattr(folding.Folding, "__call__", kept)
    check(Shortcut().eval(), torch.randn(2, 8, 9, 10))
    (graph,) = seen
    sites = [n for n in graph.nodes if "conv2d_folded" in str(run.called(n)[0])]
    assert len(sites) == 4
    (image,) = [
        n for n in graph.nodes if n.op == "placeholder" and n.meta["val"].shape[1:] == (8, 9, 10)
    ]
    reading = [site for site in sites if image in site.all_input_nodes]
    (last,) = [site for site in sites if not any(site in s.all_input_nodes for s in sites)]
    assert len(reading) == 2 and last not in reading


@pytest.mark.slow
def test_installed(graphs: list[Counter[str]]) -> None:
    model, x = net(), torch.randn(2, 3, 21, 21)
    with torch.no_grad(), fx_fuser.installed(FORCED):
        found = torch.compile(model)(x)
        assert relative(found, model(x).double()) < 1e-5
    assert graphs[-1]["conv2d_folded"] == 8


@pytest.mark.slow
def test_exported_programs_have_no_such_op() -> None:
    """Their files hold ops that load their own kernels."""
    program = torch.export.export(net(), (torch.randn(2, 3, 16, 16),))
    made = fx_fuser.fuse_exported(program, options=FORCED)
    called = [str(run.called(node)[0]) for node in made.graph.nodes]
    assert called.count("conv2d_batchnorm_exported") == 8
    assert not any("folded" in name or "fold" in name for name in called)


# ---- the plan, by made-up times ------------------------------------------------------------------


def _relu(x: Tensor, weight: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return torch.relu(F.batch_norm(F.conv2d(x, weight), mean, var))


def _images(form: torch.memory_format = torch.channels_last) -> tuple[Tensor, ...]:
    x = torch.randn(2, 16, 8, 8).contiguous(memory_format=form)
    return x.bfloat16(), torch.randn(8, 16, 3, 3).bfloat16(), torch.zeros(8), torch.ones(8)


@pytest.mark.parametrize("times, taken", [((1.0, 0.9), True), ((1.0, 0.99), False)])
def test_it_is_taken_where_it_gains(
    times: tuple[float, float], taken: bool, match_of: Any, on_gpu: Any
) -> None:
    on_gpu(*times)
    with torch.no_grad():
        decision = decide(match_of(_relu, *_images(), options={"cpu_ops": True}))
    if taken:
        assert isinstance(decision, Plan) and decision.choices["product"] == "folded"
        assert decision.note == "convolution and a pass 1 ms, folded 0.9 ms"
    else:
        assert isinstance(decision, Refusal) and "folded 0.99 ms" in decision.reason


@pytest.mark.parametrize("baseline, product", [(4.0, "direct"), (1.0, "folded")])
def test_beside_the_direct_kernel(
    baseline: float, product: str, match_of: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few channels. Where that kernel does not gain, this call is looked at."""
    on_gpu()
    in_layout = [Timing(2.0), Timing(1.5)]
    monkeypatch.setattr(
        timing,
        "medians",
        lambda key, *_: in_layout if key[0] == "in layout" else [*in_layout, Timing(baseline)],
    )
    x, weight = torch.randn(2, 3, 8, 8).bfloat16(), torch.randn(8, 3, 3, 3).bfloat16()
    with torch.no_grad():
        match = match_of(_relu, x, weight, *_images()[2:], options={"cpu_ops": True})
        decision = decide(match)
    assert isinstance(decision, Plan) and decision.choices["product"] == product


def test_a_contiguous_net_is_taken_where_inductor_converts_it(match_of: Any, on_gpu: Any) -> None:
    on_gpu(1.0, 0.5, 0.6)  # the last is the implicit gemm's, whose weight is converted, too
    images = _images(torch.contiguous_format)
    with torch.no_grad():
        match = match_of(_relu, *images, options={"cpu_ops": True})
        decision = decide(match)
        left = decide(match, inductor={"layout_optimization": False})
    assert isinstance(decision, Plan) and decision.choices["product"] == "folded"
    assert isinstance(left, Refusal)
    assert not layout.is_channels_last(match.view, match.site, Options(inner="aot_eager"))


@pytest.mark.parametrize(
    "theirs, ours, taken", [(0, 0, True), (1e-3, 1e-3, True), (0, 1e-3, False)]
)
def test_tf32_only_where_the_library_takes_it(
    theirs: float, ours: float, taken: bool, match_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """theirs, ours: errors put into the library's and the folded result."""
    x, weight, mean, var = (t.float() for t in _images())
    with torch.no_grad():
        match = match_of(_relu, x, weight, mean, var, options={"cpu_ops": True})
    forward, made = bench_ops._BenchOp.forward, bench_ops._BenchOp.folded
    error = torch.randn(2, 8, 6, 6)

    def in_tf32(self: Any, choices: Any, operands: Any) -> Callable[[], Any]:
        run = forward(self, choices, operands)
        return lambda: (run()[0] * (1 + theirs * error * choices["tf32"]),)

    def folded_in_tf32(self: Any, library: Any, operands: Any) -> Callable[[], Any]:
        run = made(self, library, operands)
        return lambda: (run()[0] * (1 + ours * error),)

    monkeypatch.setattr(bench_ops._BenchOp, "forward", in_tf32)
    monkeypatch.setattr(bench_ops._BenchOp, "folded", folded_in_tf32)
    baseline = {**CONV, "tf32": True}
    tensors = bench_ops.tensors_of(match)
    assert tensors is not None
    fused = [{**CONV, "product": "folded"}]
    _, folded = bench_ops.in_layout(match, baseline, fused, tensors, True)
    assert folded.is_exact == taken


def _disagree(*_: Any) -> None:
    raise bench_ops.DisagreementError("far off")


def test_not_where_cudnn_loses_a_nan(
    match_of: Any, on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        match = match_of(_relu, *(t.float() for t in _images()), options={"cpu_ops": True})
    tensors, fused = bench_ops.tensors_of(match), [{**CONV, "product": "folded"}]
    assert tensors is not None
    _, folded = bench_ops.in_layout(match, CONV, fused, tensors, True)
    assert folded.is_exact
    (y,) = folded.run()  # type: ignore[misc]
    assert not y.isnan().any()  # those that were put in are gone again
    made = bench_ops._BenchOp.folded

    def as_fmax(self: Any, library: Any, operands: Any) -> Callable[[], Any]:
        run = made(self, library, operands)
        return lambda: (run()[0].fmax(torch.zeros(())),)

    monkeypatch.setattr(bench_ops._BenchOp, "folded", as_fmax)
    _, folded = bench_ops.in_layout(match, CONV, fused, tensors, True)
    assert not folded.is_exact
    monkeypatch.setattr(bench_ops, "compare", _disagree)
    with pytest.warns(UserWarning, match="far off; please report"):
        _, folded = bench_ops.in_layout(match, CONV, fused, tensors, True)
    assert not folded.is_exact
    on_gpu(1.0, Timing(math.inf))
    decision = decide(match)
    assert isinstance(decision, Refusal) and "folded less exact than" in decision.reason
