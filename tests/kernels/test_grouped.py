"""The grouped convolution: which convolutions it takes, how it divides them, and on a GPU that it
is right. On the CPU emulator: test_emulated_grouped.py."""

from __future__ import annotations

import copy
import uuid
from typing import Any

import grouped_checks
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from arriving import tensors_of
from checks import passes
from plan_cases import CONV, decide
from sm90 import gpu_from_sm80 as gpu
from test_depthwise import made
from toolchains import needs_compilers
from torch._dynamo.utils import counters

from benchmarks import grouped as bench
from benchmarks.conv_sm90 import HALVES
from benchmarks.grouped import Form
from benchmarks.sm90 import relative
from fx_fuser import kernels
from fx_fuser.graph.match.pattern import Refusal
from fx_fuser.kernels import families
from fx_fuser.kernels.grouped import grouped as family
from fx_fuser.kernels.grouped import grouped_cut, grouped_tiles, unit_of
from fx_fuser.ops.grouped import FORWARD, OF_INPUT, OF_WEIGHT
from fx_fuser.options import Options
from fx_fuser.passes import grouped as of_pass
from fx_fuser.passes.grouped.site import GroupedSite
from fx_fuser.planning import layout
from fx_fuser.planning.case import MatchCase
from fx_fuser.planning.plan import Plan

GROUPED = {**CONV, "product": "grouped"}
LAST = torch.channels_last
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_120": 99 << 10}  # bytes a block may have


# ---- without a GPU -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "outputs", "groups", "tiles"),
    [(4, 4, 2, 1), (8, 8, 1, 1), (16, 16, 1, 2), (24, 24, 1, 3), (32, 32, 1, 4), (12, 12, 2, 3),
     (5, 5, 8, 3), (40, 40, 1, 3), (48, 48, 1, 3), (56, 56, 1, 4), (64, 64, 1, 4), (8, 4, 2, 1)],
)  # fmt: skip
def test_units(inputs: int, outputs: int, groups: int, tiles: int) -> None:
    """The fewest groups whose channels fill vectors; products side by side waste little."""
    assert unit_of(inputs, outputs) == groups
    assert grouped_tiles(groups * outputs) == tiles


@needs_compilers
@pytest.mark.parametrize("net", bench.NETS)
@pytest.mark.parametrize("shared_bytes", SHARED.values(), ids=SHARED)
def test_the_nets_layers_are_taken(net: str, shared_bytes: int) -> None:
    for layer in bench.NETS[net]():
        inputs = layer.channels // layer.groups
        cut = grouped_cut(
            (128, layer.channels, layer.side, layer.side),
            (layer.channels, inputs, 3, 3),
            *((layer.stride,) * 2, (1,) * 4, (1, 1), layer.groups),
            leaves=4,
            shared_bytes=shared_bytes,
        )
        units, unit_tiles, images, rows, columns, buffers, resident, slices, tiles, *_ = cut
        side = -(-layer.side // layer.stride)
        assert images * rows * columns <= 512 and buffers in (1, 2)
        assert tiles * images * rows * columns >= 128 * side**2
        of_unit = unit_of(inputs, inputs) * inputs
        assert slices * units * min(unit_tiles * 8, of_unit) >= layer.channels
        assert resident * (cut[-1] + 1024) <= shared_bytes + 1024


def test_the_nets_have_all_of_their_layers() -> None:
    counts = {net: sum(layers().values()) for net, layers in bench.NETS.items()}
    assert counts == {"RegNet-Y-1.6GF": 27, "ResNeXt-50": 16, "measured.md": 4}


USUAL: dict[str, Any] = {
    "x": (2, 48, 9, 9),
    "weight": (48, 24, 3, 3),
    "stride": (1, 1),
    "padding": (0, 0, 0, 0),
    "dilation": (1, 1),
    "groups": 2,
}


@needs_compilers
@pytest.mark.parametrize(
    "other",
    [
        {"weight": (48, 48, 3, 3), "groups": 1},
        {"x": (2, 12, 9, 9), "weight": (12, 6, 3, 3)},  # channels do not fill vectors
        {"weight": (20, 24, 3, 3)},  # nor those of the result
        {"x": (2, 34, 9, 9), "weight": (34, 17, 3, 3)},
        {"x": (2, 272, 9, 9), "weight": (272, 136, 3, 3)},  # too many of a group
        {"x": (2, 272, 9, 9), "weight": (272, 17, 3, 3), "groups": 16},  # too many of a unit
        {"x": (2, 128, 9, 9), "weight": (128, 64, 31, 31), "padding": (15,) * 4},
        {"x": (0, 48, 9, 9)},
        {"x": (2, 48, 9, 2)},  # no output
        {"x": (2, 48, 2**15, 9)},
        {"padding": (-1, 0, 0, 0)},
        {"stride": (0, 1)},
        {"x": (1, 48, 999, 999), "dilation": (300, 300)},
        {"leaves": 16},
        {"leaves": 4, "operands": 12},
    ],
)
def test_refused(other: dict[str, Any]) -> None:
    assert grouped_cut(**USUAL)
    assert grouped_cut(**{**USUAL, **other}) == []


def scaled_norm(groups: int, training: bool = False, **geometry: Any) -> Any:
    def f(x, weight, mean, var):
        z = F.conv2d(x, weight, groups=groups, **geometry)
        return F.batch_norm(z, mean, var, training=training) * 2.0

    return f


def tensors(
    dtype: torch.dtype = torch.bfloat16,
    inputs: int = 8,
    groups: int = 2,
    kernel: int = 3,
    x: torch.memory_format = LAST,
    weight: torch.memory_format = LAST,
) -> list[torch.Tensor]:
    channels = inputs * groups
    image = torch.randn(2, channels, 14, 14).to(memory_format=x)
    filters = torch.randn(channels, inputs, kernel, kernel).to(memory_format=weight)
    return [v.to(dtype) for v in (image, filters, torch.zeros(channels), torch.ones(channels))]


def candidates(match: Any, **options: Any) -> list[dict[str, Any]]:
    case = MatchCase(match, Options(**options))
    found = kernels.candidates(case)
    return [choices for choices in found if choices["product"] == "grouped"]


@pytest.mark.one_in(3)
@needs_compilers
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("weight", [LAST, torch.contiguous_format])
@pytest.mark.parametrize(
    ("form", "inputs", "groups", "kernel"),
    [
        (scaled_norm(2), 24, 2, 3),
        (scaled_norm(8, stride=2, padding=(1, 2), dilation=(1, 2)), 4, 8, 3),
        (scaled_norm(3), 16, 3, 1),
    ],
)
def test_taken(match_of, on_gpu, dtype, weight, form, inputs, groups, kernel) -> None:
    match = match_of(form, *tensors(dtype, inputs, groups, kernel, weight=weight))
    assert candidates(match) == [GROUPED]


@needs_compilers
@pytest.mark.parametrize(
    ("form", "given"),
    [
        (scaled_norm(1), tensors(groups=1)),
        (scaled_norm(16), tensors(inputs=1, groups=16)),  # depthwise
        (scaled_norm(2), tensors(torch.float32)),
        (scaled_norm(2), tensors(torch.float64)),
        (scaled_norm(3), tensors(inputs=4, groups=3)),
        (scaled_norm(2), tensors(x=torch.contiguous_format, weight=torch.contiguous_format)),
        (scaled_norm(2, training=True), tensors()),
    ],
)
def test_not_taken(match_of, on_gpu, monkeypatch, form, given) -> None:
    monkeypatch.setattr(layout, "is_converted", lambda *_: False)
    assert not candidates(match_of(form, *given))


@needs_compilers
def test_not_taken_without_cudnn(match_of, on_gpu, monkeypatch) -> None:
    match = match_of(scaled_norm(2), *tensors())
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert not candidates(match)


@needs_compilers
@pytest.mark.parametrize(("ms", "choices"), [(0.9, GROUPED), (0.99, None)])
def test_chosen_where_it_is_faster(match_of, on_gpu, ms, choices) -> None:
    match = match_of(scaled_norm(2), *tensors())
    on_gpu(1.0, ms)
    decision = decide(match)
    assert getattr(decision, "choices", None) == choices
    assert isinstance(decision, Plan if choices else Refusal)
    assert f"grouped {ms:g} ms" in str(decision)
    assert decide(match, plan="always").choices == GROUPED  # type: ignore[union-attr]


def test_a_kernel_is_of_the_groups_and_leaves() -> None:
    config = {"stride": [1, 1], "padding": [0] * 4, **GROUPED, "groups": 4}
    weight, vector = torch.randn(96, 24, 3, 3), torch.randn(96)
    operands = {"x": torch.randn(1, 96, 9, 9), "weight": weight, "bias": vector}
    assert families(operands, config)[1] is family(3, False, 1)
    few = {**operands, "weight": torch.randn(16, 4, 3, 3), "bias": None}
    assert families(few, config)[1] is family(1, True, 0)


# ---- on a GPU: the checks ---------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("seed", range(3))
def test_random_sizes_and_operands(seed) -> None:
    passes(grouped_checks.sweep, 80, seed)


@gpu
@pytest.mark.parametrize("channels", [192, 240, 336])
def test_groups_of_every_divisor(channels) -> None:
    passes(grouped_checks.divisors, channels)


@gpu
def test_tiles_do_not_matter() -> None:
    passes(grouped_checks.tiles, 12, 0)


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_special_values(dtype) -> None:
    passes(grouped_checks.special_values, dtype)


@gpu
@pytest.mark.parametrize("check", [grouped_checks.repeats, grouped_checks.refusals])
def test_checks(check) -> None:
    passes(check)


@gpu
@pytest.mark.parametrize("seed", range(2))
def test_gradients(seed) -> None:
    passes(grouped_checks.gradients, 40, seed)


@gpu
def test_more_than_2_to_the_31_elements() -> None:
    """The last images must equal those of a small tensor."""
    one = grouped_checks.ALONE[torch.bfloat16, Form.of(8, 8, 0)]
    images = torch.randn(2, 64, 128, 128, device="cuda").bfloat16().to(memory_format=LAST)
    x = torch.zeros(2100, 128, 128, 64, device="cuda", dtype=images.dtype).permute(0, 3, 1, 2)
    assert x.numel() > 2**31
    x[-2:] = images
    weight = torch.randn(64, 8, 3, 3, device="cuda").bfloat16().to(memory_format=LAST)
    window = bench.Window(padding=(1, 1, 1, 1))
    wanted, found = torch.empty_like(images), torch.full_like(x, float("nan"))
    for given, out in ((images, wanted), (x, found)):
        assert bench.run(one, given, weight, window, 8, out)
    assert torch.equal(found[-2:], wanted)


# ---- on a GPU: through the backend ---------------------------------------------------------------


class Block(nn.Module):
    """A convolution, BatchNorm or a bias, and what follows."""

    def __init__(self, groups: int, kernel: int, stride: int, norm: bool, tail: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(48, 96, kernel, stride, kernel // 2, groups=groups, bias=not norm)
        self.norm = nn.BatchNorm2d(96) if norm else nn.Identity()
        for vector in self.norm.state_dict().values():
            if vector.is_floating_point():
                nn.init.uniform_(vector, 0.5, 1.5)
        self.tail = tail

    def forward(self, x, residual, gate):
        return self.tail(self.norm(self.conv(x)), residual, gate)


BLOCKS = [
    (2, 3, 1, True, lambda z, r, g: F.relu(z + r)),
    (12, 3, 2, True, lambda z, r, g: F.silu(z)),
    (6, 1, 1, True, lambda z, r, g: F.hardswish(z) * g + r),
    (4, 5, 2, False, lambda z, r, g: F.gelu(z) * torch.sigmoid(g)),
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
    stride = block[2]
    shapes = (3, 48, 19, 23), (3, 96, -(-19 // stride), -(-23 // stride)), (3, 96, 1, 1)
    given = [torch.randn(shape, device="cuda").to(dtype, memory_format=LAST) for shape in shapes]
    with torch.no_grad():
        y, other = made(compiled, *given), eager(*given)
        truth = exact(*(v.double() for v in given))
    assert y.stride() == other.stride()
    assert relative(y, truth) <= 2 * relative(other, truth)


@gpu
@pytest.mark.parametrize("norm", [False, True])
def test_training_has_its_gradients(norm) -> None:
    """The library's, behind our forward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Block(4, 3, 1, norm, lambda z, r, g: F.silu(z) + r).cuda().bfloat16()
    eager = eager.to(memory_format=LAST)
    eager.norm.eval()
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    options = {"strict": True, "plan": "always"}
    compiled = torch.compile(ours, backend="fx_fuser", options=options)
    results = []
    for model, call in ((ours, compiled), (eager, eager), (exact, exact)):
        generator = torch.Generator().manual_seed(1)
        shapes = (4, 48, 17, 15), (4, 96, 17, 15), (4, 96, 1, 1)
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
    eager = Block(2, 3, 2, True, lambda z, r, g: F.relu(z) * g).cuda().bfloat16().eval()
    eager = eager.to(memory_format=LAST)
    options = {"plan": "always", "inner": "aot_eager"}
    compiled = torch.compile(
        copy.deepcopy(eager), backend="fx_fuser", options=options, dynamic=True
    )
    with torch.no_grad():
        for samples, height, width in ((2, 32, 48), (5, 33, 47), (1, 224, 224)):
            x = torch.randn(samples, 48, height, width, device="cuda").bfloat16()
            gate = torch.rand(samples, 96, 1, 1, device="cuda").bfloat16()
            for given in (x.to(memory_format=LAST), x, torch.cat([x, x], 3)[..., ::2]):
                y = compiled(given, None, gate)
                torch.testing.assert_close(y, eager(given, None, gate), atol=3e-2, rtol=3e-2)
                assert y.stride() == eager(given, None, gate).stride()


@gpu
@pytest.mark.parametrize("groups, stride", [(4, 1), (12, 2)])
def test_training_under_autocast(monkeypatch, groups, stride) -> None:
    """Forward and both gradients by the kernels, in Inductor's graphs: no call comes back to torch.
    A second step follows the weights."""
    # No pass runs where Inductor's cache has a graph of an earlier run.
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", str(uuid.uuid4()))
    monkeypatch.setattr(GroupedSite, "gains", lambda site: True)
    torch._dynamo.reset()
    torch.manual_seed(0)
    counters.clear()
    eager = nn.Sequential(
        nn.Conv2d(48, 96, 3, stride, 1, groups=groups, bias=False), nn.BatchNorm2d(96), nn.ReLU()
    )
    eager = eager.cuda().to(memory_format=LAST)
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    compiled = torch.compile(ours, backend="fx_fuser", options={"strict": True})
    declined = tensors_of(monkeypatch, FORWARD, OF_INPUT, OF_WEIGHT)
    for step in range(2):
        x = torch.randn(4, 48, 17, 15, device="cuda").to(memory_format=LAST)
        results = []
        for model, call in ((ours, compiled), (eager, eager), (exact, exact)):
            given = x.to(next(model.parameters()).dtype, copy=True).requires_grad_()
            with torch.autocast("cuda", torch.bfloat16, enabled=model is not exact):
                y = call(given)
            y.double().square().mean().backward()
            grads = [given.grad, *(p.grad for p in model.parameters())]
            results.append([y.detach(), *grads])
            model.zero_grad()
            with torch.no_grad():
                for i, p in enumerate(model.parameters()):
                    p.add_(0.01 * (i + step + 1))
        for value, other, truth in zip(*results, strict=True):
            least = torch.finfo(torch.bfloat16).eps
            assert relative(value, truth) <= max(2 * relative(other, truth), least)
            assert value.stride() == other.stride()
    assert counters[of_pass.COUNTERS] == {"convolution": 1, "convolution_backward": 1}
    assert not any(declined.values())
