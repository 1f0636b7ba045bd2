"""The implicit gemm: which convolutions it takes, how it divides them, and on a GPU that it is
right. On the CPU emulator: test_emulated_implicit.py."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import implicit_checks
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from checks import passes
from plan_cases import CONV, decide
from sm90 import gpu_from_sm80 as gpu
from test_depthwise import made
from toolchains import needs_compilers
from torch._subclasses import FakeTensorMode
from torch.fx import Graph

from benchmarks import implicit
from benchmarks.conv_layers import NETS
from benchmarks.conv_sm90 import HALVES
from benchmarks.sm90 import relative
from fx_fuser import kernels
from fx_fuser.graph.match.pattern import Refusal
from fx_fuser.kernels import families
from fx_fuser.kernels.implicit import implicit as family
from fx_fuser.kernels.implicit import implicit_columns, implicit_cut
from fx_fuser.native import limits
from fx_fuser.ops import run
from fx_fuser.options import Options
from fx_fuser.passes import folding
from fx_fuser.planning import layout
from fx_fuser.planning.case import MatchCase
from fx_fuser.planning.plan import Plan

IMPLICIT = {**CONV, "product": "implicit"}
LAST = torch.channels_last
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_120": 99 << 10}  # bytes a block may have


# ---- without a GPU -------------------------------------------------------------------------------


def test_columns_waste_little() -> None:
    for outputs in range(1, 2100):
        columns = implicit_columns(outputs)
        assert columns in (32, 64, 96, 128)
        parts = -(-outputs // columns)
        assert columns * parts < outputs + columns
        if outputs > 64:
            assert columns * parts <= outputs * 1.5
    wanted = {24: 32, 40: 64, 64: 64, 144: 96, 240: 128, 320: 128, 672: 96, 1152: 128}
    assert {outputs: implicit_columns(outputs) for outputs in wanted} == wanted


@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize("shared_bytes", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("leaves", [0, 5, 15])
@pytest.mark.parametrize("held", [0, 1, 6])
def test_every_size_fits_into_a_multiprocessor(shared_bytes, leaves, held) -> None:
    sizes = itertools.product((8, 64, 520, 4096), (1, 3), (32, 64, 96, 128))
    for channels, kernel, columns in sizes:
        cut = implicit_cut(
            *((4, channels, 30, 30), (200, channels, kernel, kernel)),
            *((1, 1), (1,) * 4, (1, 1)),
            leaves=leaves,
            held=held,
            columns=columns,
            shared_bytes=shared_bytes,
        )
        if not cut:
            assert held == 6 or leaves == 15
            continue
        stages, keeps, resident, parts, blocks, shared = cut
        assert max(3, held + 2) <= stages <= 8
        assert resident in (1, 2)
        assert resident * (shared + 1024) <= shared_bytes + 1024
        assert parts == -(-200 // columns)
        assert blocks % parts == 0
        steps = -(-channels * kernel**2 // 64)
        assert shared > (steps * columns if keeps else 0) * 128 + stages * 128 * 128


@pytest.mark.slow
@pytest.mark.each_once
@needs_compilers
@pytest.mark.parametrize(
    ("x", "weight", "gpu", "cut"),
    [
        # stages, keeps its weights, blocks a multiprocessor, parts
        ((128, 64, 56, 56), (256, 64, 1, 1), "sm_90", [5, 1, 2, 2]),
        ((128, 16, 112, 112), (96, 16, 1, 1), "sm_90", [6, 1, 2, 1]),
        ((128, 64, 56, 56), (64, 64, 3, 3), "sm_90", [4, 0, 2, 1]),
        ((128, 512, 7, 7), (2048, 512, 1, 1), "sm_90", [3, 0, 2, 16]),
        ((128, 64, 56, 56), (256, 64, 1, 1), "sm_80", [3, 1, 2, 2]),
        ((128, 64, 56, 56), (256, 64, 1, 1), "sm_120", [5, 1, 1, 2]),
    ],
)
def test_cut(x, weight, gpu, cut) -> None:
    padding = (weight[2] // 2,) * 4
    found = implicit_cut(
        x, weight, (1, 1), padding, (1, 1), leaves=4, held=1, shared_bytes=SHARED[gpu]
    )
    assert found[:4] == cut


@needs_compilers
@pytest.mark.parametrize("channels", [768, 1024])
def test_weights_beyond_2_31_bytes_are_not_kept(channels: int) -> None:
    """A product of 32 bits would be negative, or 0."""
    x, weight = (1, channels, 128, 128), (128, channels, 128, 128)
    _, keeps, *_, shared_bytes = implicit_cut(x, weight, (1, 1), (0,) * 4, (1, 1))
    assert not keeps and 0 < shared_bytes <= 227 << 10


USUAL = {
    "x": (2, 16, 9, 9),
    "weight": (24, 16, 3, 3),
    "stride": (1, 1),
    "padding": (0, 0, 0, 0),
    "dilation": (1, 1),
}


@needs_compilers
@pytest.mark.parametrize(
    "other",
    [
        {"x": (2, 12, 9, 9), "weight": (24, 12, 3, 3)},  # channels do not fill vectors
        {"x": (0, 16, 9, 9)},
        {"x": (2, 16, 9, 2)},  # no output
        {"x": (2, 16, 2**15, 9)},
        {"x": (2**31, 16, 3, 3)},
        {"x": (2**20, 16, 99, 99)},
        {"padding": (-1, 0, 0, 0)},
        {"padding": (0, 2**15, 0, 0)},
        {"stride": (0, 1)},
        {"dilation": (1, 2**14), "padding": (2**14,) * 4},
        {"leaves": 16},
        {"leaves": 4, "operands": 12},
    ],
)
def test_refused(other) -> None:
    assert implicit_cut(**USUAL)
    assert implicit_cut(**{**USUAL, **other}) == []


@needs_compilers
@pytest.mark.parametrize("net", NETS)
def test_the_nets_layers_are_taken(net) -> None:
    for layer in {*NETS[net]()}:
        pad = layer.kernel // 2
        assert implicit_cut(
            (128, layer.channels, layer.side, layer.side),
            (layer.outputs, layer.channels, layer.kernel, layer.kernel),
            *((layer.stride,) * 2, (pad,) * 4, (1, 1)),
            leaves=4,
            held=1 if layer.tail.startswith("add") else 0,
        )
        *_, spec = implicit.Timed(layer, torch.device("meta")).specs()
        columns, is_window, leaves = spec.family.sizes
        assert (columns, is_window, leaves) == (implicit_columns(layer.outputs), int(pad > 0), 4)


def test_the_nets_have_all_of_their_layers() -> None:
    """Except first layers, depthwise ones and those of squeeze-and-excitation."""
    counts = {net: sum(1 for _ in layers()) for net, layers in NETS.items()}
    assert counts == {"ResNet-50": 52, "EfficientNet-B0": 32, "MobileNetV3-L": 30}


def scaled_norm(stride: Any = 1, training: bool = False, **geometry: Any) -> Any:
    def f(x, weight, mean, var):
        z = F.conv2d(x, weight, stride=stride, **geometry)
        return F.batch_norm(z, mean, var, training=training) * 2.0

    return f


def tensors(
    dtype: torch.dtype = torch.bfloat16,
    channels: int = 16,
    kernel: int = 1,
    x: torch.memory_format = LAST,
    weight: torch.memory_format = LAST,
) -> list[torch.Tensor]:
    image = torch.randn(2, channels, 14, 14).to(memory_format=x)
    filters = torch.randn(8, channels, kernel, kernel).to(memory_format=weight)
    return [v.to(dtype) for v in (image, filters, torch.zeros(8), torch.ones(8))]


def candidates(match: Any, **options: Any) -> list[dict[str, Any]]:
    case = MatchCase(match, Options(**options))
    found = kernels.candidates(case)
    return [choices for choices in found if choices["product"] == "implicit"]


@pytest.mark.one_in(3)
@needs_compilers
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("fp32", ["follow", "split", "ieee", "tf32"])
@pytest.mark.parametrize(
    ("form", "kernel"),
    [
        (scaled_norm(), 1),
        (scaled_norm((2, 1)), 1),
        (scaled_norm(2, padding=(1, 2), dilation=(1, 2)), 3),
    ],
)
def test_offered(match_of, on_gpu, dtype, fp32, form, kernel) -> None:
    match = match_of(form, *tensors(dtype, kernel=kernel))
    assert candidates(match, fp32=fp32) == [IMPLICIT]


@needs_compilers
@pytest.mark.parametrize(
    ("form", "given"),
    [
        (scaled_norm(), tensors(torch.float32)),
        (scaled_norm(), tensors(torch.float64)),
        (scaled_norm(), tensors(channels=12)),
        (scaled_norm(), tensors(x=torch.contiguous_format)),
        (scaled_norm(padding=1), tensors(kernel=3, weight=torch.contiguous_format)),
        (scaled_norm(groups=2), [tensors()[0].repeat(1, 2, 1, 1), *tensors()[1:]]),
        (scaled_norm(training=True), tensors()),
    ],
)
def test_not_offered(match_of, on_gpu, monkeypatch, form, given) -> None:
    monkeypatch.setattr(layout, "is_converted", lambda *_: False)
    assert not candidates(match_of(form, *given))


@needs_compilers
@pytest.mark.parametrize("plan", ["measure", "always"])
def test_not_offered_where_products_bound_it(match_of, on_gpu, plan) -> None:
    """256 input channels and nine taps: 119 multiplications a byte; with one tap 59."""
    for kernel, wanted in ((3, []), (1, [IMPLICIT])):
        x = torch.randn(2, 256, 14, 14).bfloat16().to(memory_format=LAST)
        weight = torch.randn(512, 256, kernel, kernel).bfloat16().to(memory_format=LAST)
        match = match_of(scaled_norm(), x, weight, torch.zeros(512), torch.ones(512))
        assert candidates(match, plan=plan) == wanted


@needs_compilers
@pytest.mark.parametrize(("balance", "wanted"), [(1.0, []), (1.75, [IMPLICIT])])
def test_what_products_bound_follows_the_gpus_balance(
    match_of, on_gpu, monkeypatch, balance, wanted
) -> None:
    """The same 119, on a GPU with slower memory, relative to its tensor cores."""
    x = torch.randn(2, 256, 14, 14).bfloat16().to(memory_format=LAST)
    weight = torch.randn(512, 256, 3, 3).bfloat16().to(memory_format=LAST)
    match = match_of(scaled_norm(), x, weight, torch.zeros(512), torch.ones(512))
    monkeypatch.setattr(limits, "of", lambda _: replace(limits.H200, balance=balance))
    assert candidates(match) == wanted


@needs_compilers
@pytest.mark.parametrize("kernel", [1, 3])
def test_offered_where_the_graph_is_converted(match_of, on_gpu, monkeypatch, kernel) -> None:
    """Weights, too."""
    given = tensors(kernel=kernel, x=torch.contiguous_format, weight=torch.contiguous_format)
    match = match_of(scaled_norm(), *given)
    monkeypatch.setattr(layout, "is_converted", lambda *_: True)
    assert candidates(match) == [IMPLICIT]


@needs_compilers
def test_not_offered_without_cudnn(match_of, on_gpu, monkeypatch) -> None:
    match = match_of(scaled_norm(), *tensors())
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert not candidates(match)


@needs_compilers
@pytest.mark.parametrize(("ms", "choices"), [(0.9, IMPLICIT), (0.99, None)])
def test_taken_where_it_is_faster(match_of, on_gpu, ms, choices) -> None:
    match = match_of(scaled_norm(), *tensors())
    on_gpu(1.0, ms)
    decision = decide(match)
    assert getattr(decision, "choices", None) == choices
    assert isinstance(decision, Plan if choices else Refusal)
    assert f"implicit {ms:g} ms" in str(decision)
    assert decide(match, plan="always").choices == IMPLICIT  # type: ignore[union-attr]


@needs_compilers
@pytest.mark.parametrize(("folded", "ours", "best"), [(0.6, 0.5, "implicit"), (0.5, 0.6, "folded")])
def test_beside_the_librarys_fused_call(match_of, on_gpu, folded, ours, best) -> None:
    def relu_norm(x, weight, mean, var):
        return F.relu(F.batch_norm(F.conv2d(x, weight), mean, var))

    match = match_of(relu_norm, *tensors())
    on_gpu(1.0, folded, ours)
    assert decide(match).choices["product"] == best  # type: ignore[union-attr]


def test_a_kernel_is_of_the_columns_and_leaves() -> None:
    config = {"stride": [1, 1], "padding": [0] * 4, **IMPLICIT}
    weight, vector = torch.randn(200, 16, 1, 1), torch.randn(200)
    operands = {"x": weight, "weight": weight, "bias": vector}
    assert families(operands, config)[1] is family(200, False, 1)
    padded = {**config, "padding": [0, 1, 0, 0]}
    assert families(operands, padded)[1] is family(200, True, 1)
    wide = {"x": weight, "weight": torch.randn(7, 16, 1, 3), "bias": None}
    assert families(wide, config)[1] is family(7, True, 0)
    assert family(200, False, 1).sizes == (128, 0, 1)
    of_other_outputs = family(250, False, 1)
    assert of_other_outputs == family(200, False, 1)  # and so is the kernel


@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize(("product", "kernel"), [("implicit", 1), ("implicit", 3), ("stem", 3)])
def test_a_converted_graph_gives_images_in_channels_last(product, kernel, is_converted) -> None:
    """And, of the weights, those with windows, for the implicit gemm."""
    graph, args = Graph(), []
    with FakeTensorMode():
        for shape in ((2, 16, 14, 14), (8, 16, kernel, kernel)):
            args.append(graph.placeholder(f"p{len(args)}"))
            args[-1].meta["val"] = torch.empty(shape)
        result = torch.empty(2, 8, 15 - kernel, 15 - kernel)
    geometry = ([1, 1], [0] * 4, [1, 1], 1)
    choices = (False, product, "library", False)
    tail = ("", [], [], [], torch.float32, False)
    images = [node.meta["val"] for node in args]
    _, program = run.arguments("conv2d", (*images, None, *geometry, *choices, *tail))
    node = graph.call_function(run.MANY, (args, program))
    node.meta["val"] = [result]
    graph.output(node)
    folding.Folding(None, lambda: is_converted)(graph)
    (node,) = graph.find_nodes(op="call_function", target=run.MANY)
    if not is_converted:
        assert "eager_input_vals" not in node.meta
        return
    x, weight = node.meta["eager_input_vals"][0][0]
    assert x.is_contiguous(memory_format=LAST)
    asks = kernel > 1 and product == "implicit"
    assert weight.is_contiguous(memory_format=LAST) == (asks or kernel == 1)
    assert weight.is_contiguous() == (not asks)


# ---- on a GPU: the checks ---------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("seed", range(3))
def test_random_sizes_and_operands(seed) -> None:
    passes(implicit_checks.sweep, 80, seed)


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_special_values(dtype) -> None:
    passes(implicit_checks.special_values, dtype)


@gpu
@pytest.mark.parametrize("check", [implicit_checks.repeats, implicit_checks.refusals])
def test_checks(check) -> None:
    passes(check)


@gpu
@pytest.mark.parametrize("kernel", [1, 3])
def test_more_than_2_to_the_31_elements(kernel) -> None:
    """The last images must equal those of a small tensor."""
    one = implicit_checks.ALONE[torch.bfloat16, kernel > 1]
    images = torch.randn(2, 64, 128, 128, device="cuda").bfloat16().to(memory_format=LAST)
    x = torch.zeros(2100, 128, 128, 64, device="cuda", dtype=images.dtype).permute(0, 3, 1, 2)
    assert x.numel() > 2**31
    x[-2:] = images
    weight = torch.randn(64, 64, kernel, kernel, device="cuda").bfloat16().to(memory_format=LAST)
    pad = kernel // 2
    window = implicit.Window(padding=(pad, pad, pad, pad))
    wanted, found = torch.empty_like(images), torch.full_like(x, float("nan"))
    for given, out in ((images, wanted), (x, found)):
        implicit.run(one, given, weight, window, out)
    assert torch.equal(found[-2:], wanted)


# ---- on a GPU: through the backend ---------------------------------------------------------------


class Block(nn.Module):
    """A convolution, BatchNorm or a bias, and what follows."""

    def __init__(self, kernel: int, stride: int, norm: bool, tail: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(24, 40, kernel, stride, kernel // 2, bias=not norm)
        self.norm = nn.BatchNorm2d(40) if norm else nn.Identity()
        for vector in self.norm.state_dict().values():
            if vector.is_floating_point():
                nn.init.uniform_(vector, 0.5, 1.5)
        self.tail = tail

    def forward(self, x, residual, gate):
        return self.tail(self.norm(self.conv(x)), residual, gate)


BLOCKS = [
    (1, 1, True, lambda z, r, g: F.relu(z + r)),
    (1, 2, True, lambda z, r, g: F.silu(z)),
    (3, 1, True, lambda z, r, g: F.hardswish(z) * g + r),
    (3, 2, False, lambda z, r, g: F.gelu(z) * torch.sigmoid(g)),
]


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks(block, dtype) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Block(*block).cuda().to(dtype, memory_format=LAST).eval()
    exact = copy.deepcopy(eager).double()
    options = {"strict": True, "plan": "always", "inner": "aot_eager"}
    compiled = torch.compile(copy.deepcopy(eager), backend="fx_fuser", options=options)
    stride = block[1]
    shapes = (3, 24, 19, 23), (3, 40, -(-19 // stride), -(-23 // stride)), (3, 40, 1, 1)
    given = [torch.randn(shape, device="cuda").to(dtype, memory_format=LAST) for shape in shapes]
    with torch.no_grad():
        y, other = made(compiled, *given), eager(*given)
        truth = exact(*(v.double() for v in given))
    assert y.stride() == other.stride()
    assert relative(y, truth) <= 2 * relative(other, truth)


@gpu
def test_a_converted_graph() -> None:
    """From contiguous tensors, which Inductor converts, and back."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Conv2d(c, 64, k, 1, k // 2), nn.SiLU()) for c, k in ((32, 3), (64, 1))
    ]
    eager = nn.Sequential(*layers).cuda().bfloat16().eval()
    options = {"plan": "always", "force_layout_optimization": True}
    compiled = torch.compile(copy.deepcopy(eager), backend="fx_fuser", options=options)
    x = torch.randn(4, 32, 20, 20, device="cuda").bfloat16()
    with torch.no_grad():
        y, other = made(compiled, x), eager(x)
    assert y.stride() == other.stride()
    torch.testing.assert_close(y, other, atol=3e-2, rtol=3e-2)


@gpu
@pytest.mark.parametrize("norm", [False, True])
def test_training_has_its_gradients(norm) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Block(3, 1, norm, lambda z, r, g: F.silu(z) + r).cuda().bfloat16()
    eager = eager.to(memory_format=LAST)
    eager.norm.eval()
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    options = {"strict": True, "plan": "always"}
    compiled = torch.compile(ours, backend="fx_fuser", options=options)
    results = []
    for model, call in ((ours, compiled), (eager, eager), (exact, exact)):
        generator = torch.Generator().manual_seed(1)
        shapes = (4, 24, 17, 15), (4, 40, 17, 15), (4, 40, 1, 1)
        x, residual, gate = (
            torch.randn(shape, generator=generator).bfloat16().cuda().to(memory_format=LAST)
            for shape in shapes
        )
        dtype = model.conv.weight.dtype
        x, residual = (v.to(dtype).requires_grad_() for v in (x, residual))
        y = call(x, residual, gate)
        y.double().square().mean().backward()
        grads = [x.grad, residual.grad, *(p.grad for p in model.parameters())]
        results.append([y.detach(), *grads])
    for value, other, truth in zip(*results, strict=True):
        least = torch.finfo(torch.bfloat16).eps
        assert relative(value, truth) <= max(2 * relative(other, truth), least)


@gpu
def test_other_sizes_and_strides_of_x() -> None:
    """A graph for any batch, image and layout has one kernel; the library takes other layouts."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Block(3, 2, True, lambda z, r, g: F.relu(z) * g).cuda().bfloat16().eval()
    eager = eager.to(memory_format=LAST)
    options = {"plan": "always", "inner": "aot_eager"}
    compiled = torch.compile(
        copy.deepcopy(eager), backend="fx_fuser", options=options, dynamic=True
    )
    with torch.no_grad():
        for samples, height, width in ((2, 32, 48), (5, 33, 47), (1, 224, 224)):
            x = torch.randn(samples, 24, height, width, device="cuda").bfloat16()
            gate = torch.rand(samples, 40, 1, 1, device="cuda").bfloat16()
            for given in (x.to(memory_format=LAST), x, torch.cat([x, x], 3)[..., ::2]):
                y = compiled(given, None, gate)
                torch.testing.assert_close(y, eager(given, None, gate), atol=3e-2, rtol=3e-2)
                assert y.stride() == eager(given, None, gate).stride()
