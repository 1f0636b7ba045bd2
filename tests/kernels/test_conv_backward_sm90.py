"""The backward of sm_90a's direct convolution: its pieces cover the input's gradient, it compiles
as meant and, on a Hopper GPU, is right."""

from __future__ import annotations

import copy

import conv_backward_checks
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from checks import passes
from sm90 import check_compiles, gpu
from test_conv_sm90 import CUTS, Cut
from test_ops import conv_args
from toolchains import needs_compilers
from torch import Tensor
from torch.utils._pytree import tree_map_only

import fx_fuser
from benchmarks import conv_backward_sm90, kernels
from benchmarks.conv_cases import NONE
from benchmarks.conv_sm90 import DTYPES, HALVES
from benchmarks.measure import float32_settings
from benchmarks.sm90 import relative
from fx_fuser import registry
from fx_fuser.anchors.conv2d import Conv2d
from fx_fuser.errors import BuildError
from fx_fuser.graph.epilogue import linear_backward, parse
from fx_fuser.kernels.direct import CONV_DIRECT_BACKWARD, conv_direct_backward_cut
from fx_fuser.native import load
from fx_fuser.ops import library, run

RING = 1024

# ---- without a GPU -------------------------------------------------------------------------------


@needs_compilers
@pytest.mark.parametrize("x_bytes", [4, 2])
@pytest.mark.parametrize("multiprocessors", [1, 78, 132])
@pytest.mark.parametrize(("x", "weight", "padding"), CUTS)
def test_pieces_cover_the_input(x, weight, padding, multiprocessors, x_bytes) -> None:
    cut = Cut(x, weight, padding, 0, x_bytes)
    found = conv_direct_backward_cut(x, weight, padding, True, multiprocessors, x_bytes)
    if cut.strips > 1:
        assert not found
        assert conv_direct_backward_cut(x, weight, padding, False, x_bytes=x_bytes)
        return
    units, sample_units, pieces, piece_units, ahead, slots, shared, halo = found
    assert (units, sample_units) == (cut.units, cut.units_per_strip)
    assert sample_units <= pieces * piece_units < sample_units + piece_units
    assert 2 <= slots <= 4
    assert shared <= 232_448
    assert halo == (weight[2] - 1) * cut.pitch + cut.gap
    assert 256 + halo <= RING
    for piece in range(1, pieces):
        # What lies before the units ahead gives nothing to the piece's first position.
        own = cut.position(piece * piece_units * cut.advance)
        first = max(piece * piece_units - ahead, 0)
        assert first == 0 or own - cut.position(first * cut.advance) >= halo
    for unit in range(sample_units):
        # Complete, and stored, is nothing that the block does not have in its ring.
        begin = cut.position(unit * cut.advance)
        end = (cut.out_h + weight[2] - 1) * cut.pitch
        if unit + 1 < sample_units:
            end = cut.position((unit + 1) * cut.advance)
        assert begin < end <= begin + 256 + halo


@needs_compilers
@pytest.mark.parametrize("with_input", [False, True])
@pytest.mark.parametrize(
    ("x", "weight"),
    [
        ((2, 9, 16, 16), (64, 9, 3, 3)),  # channels
        ((2, 8, 16, 16), (64, 8, 5, 5)),  # too many taps
        ((2, 8, 2, 16), (64, 8, 3, 3)),  # no output
    ],
)
def test_refused(x, weight, with_input) -> None:
    assert conv_direct_backward_cut(x, weight, NONE, with_input) == []


# linear_dense's is compiled by default; CI also compiles every kernel by itself.
@pytest.mark.each_once
@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize("value", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("operands", [0, 7])
def test_compiles_without_spills_or_serialised_products(
    tmp_path, monkeypatch, operands, value
) -> None:
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    check_compiles(CONV_DIRECT_BACKWARD, operands, value)


@pytest.mark.parametrize(
    ("epilogue", "slope"),
    [
        ("", ""),
        ("v0 = add(z, t0)", ""),
        (
            "v0 = add(z, t0); v1 = mul(v0, t1); v2 = mul(v1, s0)",
            "v0 = mul(z, s0); v1 = mul(v0, t1)",
        ),
        ("v0 = add(z, t0); v1 = div(v0, t1)", "v0 = div(z, t1)"),
        ("v0 = mul(t0, z); v1 = add(v0, z)", None),  # a sum, which no step of autograd is
        ("v0 = add(z, t0); v1 = div(t1, v0)", None),
        ("v0 = add(z, t0); v1 = mul(z, v0)", None),
        ("v0 = sigmoid(z); v1 = mul(v0, t0)", None),
        ("v0 = sigmoid(z); v1 = add(v0, z)", None),
    ],
)
def test_dz_from_dy_alone(epilogue, slope) -> None:
    """tests/graph/test_bound.py shows that its steps are autograd's."""
    found = linear_backward(parse(epilogue))
    assert (None if found is None else found.text) == slope


@needs_compilers
def test_a_cpu_tensor_is_an_error() -> None:
    x = torch.randn(1, 2, 8, 8)
    vector = torch.empty(1)
    spec = conv_backward_sm90.IDENTITY[torch.float32]
    arguments = (x, x, x, NONE, None, None, None, vector, vector, [], [])
    with pytest.raises(BuildError, match="CUDA devices"):
        kernels.conv_direct_backward(spec, *arguments)


# ---- on a GPU: the checks ---------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("seed", range(3))
def test_random_sizes_and_factors(seed) -> None:
    with float32_settings("fp32", cudnn_tf32=False):
        passes(conv_backward_checks.sweep, 60, seed)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "check",
    [
        conv_backward_checks.special_values,
        conv_backward_checks.extreme_factors,
        conv_backward_checks.extreme_variances,
        conv_backward_checks.accuracy,
        conv_backward_checks.graphs_and_repeats,
    ],
)
def test_checks(check, dtype) -> None:
    with float32_settings("fp32", cudnn_tf32=False):
        passes(check, dtype)


@gpu
def test_refusals() -> None:
    passes(conv_backward_checks.refusals)


# ---- on a GPU: through the backend ---------------------------------------------------------------


class Scaled(nn.Module):
    """A convolution or its BatchNorm, times a number and, if asked for, one a channel."""

    def __init__(self, norm: bool = True, affine: bool = True, factor: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 70, 3, padding=1)
        self.norm = nn.BatchNorm2d(70, affine=affine) if norm else nn.Identity()
        if norm and affine:
            nn.init.normal_(self.norm.weight)
            nn.init.normal_(self.norm.bias)
        self.register_buffer("factor", torch.randn(70, 1, 1) if factor else None)

    def forward(self, x):
        y = self.norm(self.conv(x)) * 2.0
        return y if self.factor is None else y * self.factor


@pytest.fixture
def calls(monkeypatch):
    """Of each backward that was made: was it left to torch?"""
    found: list[bool] = []
    bound, forward = library.FusedCall.bound_backward, Conv2d.forward

    def traced(*arguments):
        found.append(False)
        return bound(*arguments)

    def in_torch(*arguments):
        found[-1] = True
        return forward(*arguments)

    monkeypatch.setattr(library.FusedCall, "bound_backward", traced)
    monkeypatch.setattr(Conv2d, "forward", in_torch)
    return found


@gpu
@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("mode", ["training", "evaluation"])
@pytest.mark.parametrize(
    "parts", [{}, {"affine": False}, {"norm": False}], ids=["affine", "bare", "convolution"]
)
def test_gradients_through_the_backend(mode, parts, needs_x, calls, monkeypatch) -> None:
    def backward_test_scaled(x, weight, bias, a):  # type: ignore[no-untyped-def]
        return F.conv2d(x, weight, bias) * a

    monkeypatch.setattr(registry, "_patterns", list(registry._patterns))
    fx_fuser.register_pattern(backward_test_scaled)
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Scaled(**parts).cuda().train(mode == "training")
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    options = {"strict": True, "plan": "always", "inner": "aot_eager"}
    compiled = torch.compile(ours, backend="fx_fuser", options=options)
    results = []
    with float32_settings("fp32", cudnn_tf32=False):
        for model, call in ((ours, compiled), (eager, eager), (exact, exact)):
            torch.manual_seed(1)
            dtype = next(model.parameters()).dtype
            x = torch.randn(3, 5, 33, 31, device="cuda").to(dtype).requires_grad_(needs_x)
            y = call(x)
            y.backward(torch.randn(y.shape, device="cuda").to(dtype))
            results.append([x.grad, *(p.grad for p in model.parameters())])
    assert calls and not any(calls)
    assert (results[0][0] is not None) == needs_x
    for value, other, truth in zip(*results, strict=True):
        if truth is not None and truth.norm() > 1e-4:
            assert value.dtype == torch.float32
            assert value.shape == truth.shape
            assert relative(value, truth) <= max(2 * relative(other, truth), 6e-7)


@gpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_gradients_in_16_bits(mode, dtype, autocast, calls) -> None:
    """Beside eager's, of the same rounded inputs; under autocast of float32 parameters."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    exact = Scaled().cuda().train(mode == "training").to(dtype).double()
    eager = copy.deepcopy(exact).to(torch.float32 if autocast else dtype)
    ours = copy.deepcopy(eager)
    options = {"strict": True, "plan": "always", "inner": "aot_eager"}
    compiled = torch.compile(ours, backend="fx_fuser", options=options)
    drawn = torch.randn(3, 5, 33, 31, device="cuda").to(dtype)
    dy = torch.randn(3, 70, 33, 31, device="cuda").to(dtype)
    results = []
    for model, call in ((ours, compiled), (eager, eager), (exact, exact)):
        x = drawn.detach().clone().to(next(model.parameters()).dtype).requires_grad_()
        with torch.autocast("cuda", dtype, enabled=autocast and model is not exact):
            y = call(x)
        y.backward(dy.to(y.dtype))
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert calls and not any(calls)
    for value, other, truth in zip(*results, strict=True):
        if truth.norm() > 1e-4:  # the bias before a training BatchNorm has no gradient
            assert value.dtype == other.dtype
            least = torch.finfo(dtype).eps / 4  # eager's sums have fewer digits wrong by luck
            assert relative(value, truth) <= max(1.5 * relative(other, truth), least)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_does_not_save_the_convolution(calls, dtype) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(8, 64, 3), nn.BatchNorm2d(64)).cuda().to(dtype).train()
    compiled = torch.compile(
        lambda x: model(x) * 2.0, backend="fx_fuser", options={"plan": "always"}
    )
    x = torch.randn(16, 8, 128, 128, device="cuda", dtype=dtype, requires_grad=True)
    for step in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = compiled(x)
        forward = torch.cuda.max_memory_allocated() - before
        if step == 1:
            assert forward <= y.nbytes + 2**21
        y.backward(torch.ones_like(y))
        torch.cuda.synchronize()
    assert calls and not any(calls)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_agree_bit_for_bit_on_streams_and_in_graphs(dtype) -> None:
    """The kernels of a step start before those ahead of them end."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 64, 3), nn.BatchNorm2d(64)).cuda().to(dtype).train()
    options = {"strict": True, "plan": "always", "inner": "aot_eager"}
    compiled = torch.compile(lambda x: model(x) * 2.0, backend="fx_fuser", options=options)
    x = torch.randn(16, 8, 64, 64, device="cuda", dtype=dtype, requires_grad=True)
    dy = torch.randn(16, 64, 62, 62, device="cuda", dtype=dtype)
    leaves = [x, *(p for n, p in model.named_parameters() if n != "0.bias")]

    def step():
        y = compiled(x)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    def same(found, expected):
        return all(map(torch.equal, found, expected))

    first = step()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for i in range(100):
        with torch.cuda.stream(streams[i % 2]):
            assert same(step(), first), i
    torch.cuda.synchronize()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        model[0].weight.mul_(-1.5)
        x.add_(0.25)
    for _ in range(50):
        graph.replay()
    expected = step()
    torch.cuda.synchronize()
    assert same(captured, expected) and not same(expected, first)


@gpu
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_what_the_kernels_do_not_take_goes_to_torch(training) -> None:
    load.prepare([conv_backward_sm90.IDENTITY[torch.float32]], "cuda")  # registers the op, too
    *front, _, _, _ = conv_args("s", torch.float32, training)
    statistics = [torch.rand(4) + 0.5 for _ in range(2)] if training else []
    dy, wanted = torch.randn(2, 4, 4, 6), ["x", "weight", "bias", "gamma", "beta"]
    args = (*front, [], dy, statistics, wanted)  # z · s0: dz is dy · s0
    found = []
    with float32_settings("fp32", cudnn_tf32=False):
        for to in (Tensor.cpu, Tensor.cuda):
            moved = tree_map_only(Tensor, to, tree_map_only(Tensor, Tensor.detach, args))
            found.append(run.MANY(*run.arguments("conv2d_batchnorm_backward", moved)))
    for ours, other in zip(*found, strict=True):
        torch.testing.assert_close(other.cpu(), ours, rtol=1e-4, atol=1e-4)
