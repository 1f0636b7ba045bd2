"""The direct convolution of sm_90a: it is divided into units correctly, compiles without spills
and, on a Hopper GPU, is right."""

from __future__ import annotations

import copy

import conv_checks
import conv_direct_checks
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from checks import passes
from sm90 import check_compiles, gpu
from toolchains import needs_compilers

from benchmarks import conv_sm90, kernels
from benchmarks.measure import float32_settings
from benchmarks.sm90 import relative
from fx_fuser.errors import BuildError
from fx_fuser.kernels.direct import CONV_DIRECT, conv_direct_cut

CUTS = [
    # x, weight, [left, right, top, bottom]
    ((128, 8, 128, 128), (64, 8, 3, 3), (0, 0, 0, 0)),
    ((2, 3, 224, 224), (64, 3, 3, 3), (1, 1, 1, 1)),
    ((2, 4, 37, 29), (5, 4, 3, 3), (1, 1, 1, 1)),
    ((1, 8, 6, 700), (130, 8, 3, 3), (0, 2, 1, 0)),
    ((3, 1, 9, 2000), (64, 1, 3, 3), (1, 1, 1, 1)),
    ((2, 8, 14, 14), (64, 8, 1, 1), (0, 0, 0, 0)),
    ((2, 8, 14, 3000), (64, 8, 1, 3), (1, 1, 0, 0)),
    ((2, 8, 300, 5), (64, 8, 5, 1), (0, 0, 2, 2)),
    ((2, 6, 40, 300), (64, 6, 4, 5), (2, 2, 2, 1)),
    ((2, 6, 40, 41), (64, 6, 4, 2), (3, 1, 0, 5)),
    ((5, 2, 3, 3), (7, 2, 3, 3), (0, 0, 0, 0)),
    ((4, 8, 112, 112), (64, 8, 3, 3), (1, 1, 1, 1)),
]

MULTIPROCESSORS = 2**20  # more than there are units


class Cut:
    """What `conv_direct_cut` says, by name."""

    def __init__(
        self, x, weight, padding, out_bytes, x_bytes=4, multiprocessors=MULTIPROCESSORS
    ) -> None:
        found = conv_direct_cut(
            x, weight, padding, out_bytes, x_bytes=x_bytes, multiprocessors=multiprocessors
        )
        assert found
        self.strip, self.strips, self.advance, self.overlap, self.lead = found[:5]
        self.units_per_strip, self.units, self.positions, self.chunks = found[5:9]
        self.paired, self.slots, self.shared_bytes, *steps = found[9:]
        self.steps = torch.tensor(steps).view(-1, 4)
        self.gap = weight[3] - 1
        self.pitch = self.strip + self.gap
        self.out_h = x[2] + padding[2] + padding[3] - weight[2] + 1
        self.out_w = x[3] + padding[0] + padding[1] - weight[3] + 1
        self.elements = self.out_h * self.strip

    def position(self, element: int) -> int:
        return element + self.gap * (element // self.strip)


# ---- without a GPU -------------------------------------------------------------------------------


@needs_compilers
@pytest.mark.parametrize("x_bytes", [4, 2])
@pytest.mark.parametrize(
    ("out_bytes", "multiprocessors"), [(0, MULTIPROCESSORS), (0, 1), (2, 132), (4, 132)]
)
@pytest.mark.parametrize(("x", "weight", "padding"), CUTS)
def test_units_cover_every_element_and_have_its_pixels(
    x, weight, padding, out_bytes, multiprocessors, x_bytes
) -> None:
    cut = Cut(x, weight, padding, out_bytes, x_bytes, multiprocessors)
    assert cut.strip * cut.strips >= cut.out_w > cut.strip * (cut.strips - 1)
    assert cut.units == x[0] * cut.strips * cut.units_per_strip
    assert cut.advance * cut.units_per_strip >= cut.elements
    assert cut.advance * (cut.units_per_strip - 1) < cut.elements
    assert cut.slots >= (2 if out_bytes else 3)
    assert cut.overlap <= cut.lead
    assert cut.lead % 2 == 0
    if cut.overlap:
        assert cut.advance % 2 == 0
    assert cut.shared_bytes <= 232_448  # of a block of sm_90
    assert cut.positions == 256 or (cut.positions == 512 and multiprocessors == 1)
    for unit in range(cut.units_per_strip):
        begin = unit * cut.advance
        first_element = max(begin - cut.lead, 0)
        # And three to align, or in 16 bits seven, of the 264 in the stage's row.
        assert begin + cut.advance - first_element <= cut.positions - 4
        first = cut.position(first_element)
        last = cut.position(min(begin + cut.advance, cut.elements) - 1)
        assert last - first < cut.positions
        of_pair = unit - unit % cut.paired
        pixels = cut.position(max(of_pair * cut.advance - cut.lead, 0))
        assert last + (weight[2] - 1) * cut.pitch + cut.gap - pixels < 128 * cut.chunks
        if out_bytes == 0:  # statistics use the first position's value as the pivot
            assert first == cut.position(begin)


@needs_compilers
@pytest.mark.parametrize(
    ("samples", "size", "paired"),
    [
        (128, 128, 2),
        (128, 126, 2),
        (1024, 7, 1),
        (128, 14, 1),
        (128, 24, 1),
        (1, 28, 1),
        (1, 112, 1),
        (4, 112, 2),
    ],
)
def test_units_of_16_bits_share_slots_where_blocks_then_load_less(samples, size, paired) -> None:
    sizes = (samples, 8, size, size), (64, 8, 3, 3), (1, 1, 1, 1)
    alone, cut = (Cut(*sizes, 2, 2, n) for n in (MULTIPROCESSORS, 132))
    assert alone.paired == 1
    assert cut.paired == paired
    if paired == 2:
        assert cut.units % 2 == 0
        assert (alone.chunks, cut.chunks) == (4, 6)  # so 8 for two units that share none
        assert cut.units <= 17 / 16 * alone.units
    assert sum(Cut(*cut, 2, 2, 132).paired == 2 for cut in CUTS) >= 2


@needs_compilers
def test_units_of_statistics_are_wide_where_that_loads_less() -> None:
    sizes = (128, 8, 128, 128), (64, 8, 3, 3), (0, 0, 0, 0)
    usual, wide = (Cut(*sizes, 0, 4, n) for n in (MULTIPROCESSORS, 132))
    assert (usual.positions, usual.advance, usual.chunks, usual.units) == (256, 252, 4, 8064)
    assert (wide.positions, wide.advance, wide.chunks, wide.units) == (512, 504, 6, 4096)
    # 252 units, or 128, by two loading warpgroups a block: of 64, 2 x 4 chunks or 1 x 6
    few = (4, *sizes[0][1:]), *sizes[1:]
    assert [Cut(*few, 0, 4, n).positions for n in (32, 64, 126)] == [512, 512, 256]
    assert sum(Cut(*cut, 0, 4, 1).positions == 512 for cut in CUTS) >= 3
    rows = (128, 3, 224, 224), (32, 3, 3, 3), (1, 1, 1, 1)  # too long: wide units are of half rows
    usual, wide = (Cut(*rows, 0, 4, n) for n in (MULTIPROCESSORS, 132))
    assert (usual.strips, usual.chunks, wide.strips, wide.chunks) == (1, 6, 2, 6)
    assert wide.units < 0.6 * usual.units


def sum_of_steps(cut: Cut, tiles: torch.Tensor, planes: torch.Tensor) -> torch.Tensor:
    """At 256 positions, each half of a step as the kernel's descriptors address it."""
    assert (cut.steps >= 0).all()
    assert (cut.steps < 2**14).all()
    assert (cut.steps[:, 0] % 64 == 0).all()
    assert (cut.steps[:, 1] % 64 == 0).all()
    sums = torch.zeros(256, dtype=torch.float64)
    for tile, next_tile, pixels, next_pixels in cut.steps.tolist():
        for weights, begin in (
            (tiles[tile // 64], pixels),
            (tiles[(tile + next_tile) // 64], pixels + next_pixels),
        ):
            sums += planes[begin : begin + 256] @ weights
    return sums


def assert_convolved(cut: Cut, sums: torch.Tensor, exact: torch.Tensor) -> None:
    rows, columns = exact.shape[2:]
    for position in range(256):
        row, column = divmod(position, cut.pitch)
        if row < rows and column < columns:
            torch.testing.assert_close(sums[position], exact[0, 0, row, column])


@needs_compilers
@pytest.mark.parametrize(("x", "weight", "padding"), CUTS)
def test_steps_of_16_bits_are_the_convolution(x, weight, padding) -> None:
    """One product; a lone tap is the second half of the last step, whose first has zeros."""
    cut = Cut(x, weight, padding, 2, 2)
    taps, plane = weight[2] * weight[3], 128 * cut.chunks
    assert len(cut.steps) == (taps + 1) // 2
    assert (cut.steps[:-1, 3] > 0).all()
    tile, _, _, next_pixels = cut.steps[-1].tolist()
    assert (tile == 0) == (next_pixels == 0) == (taps % 2 == 1)
    torch.manual_seed(0)
    weights = torch.randn(taps, 8, dtype=torch.float64)
    tiles = torch.cat([torch.zeros(1, 8, dtype=torch.float64), weights])
    image = torch.randn(1, 8, max(plane // cut.pitch, 1), min(cut.pitch, plane)).double()
    planes = torch.zeros(2 * plane + 256, 8, dtype=torch.float64)
    planes[: image[0, 0].numel()] = image.flatten(2)[0].T
    exact = F.conv2d(image, weights.T.reshape(1, 8, *weight[2:]))
    assert_convolved(cut, sum_of_steps(cut, tiles, planes), exact)


@needs_compilers
@pytest.mark.parametrize(("x", "weight", "padding"), CUTS)
def test_steps_are_the_convolution(x, weight, padding) -> None:
    """The three products."""
    cut = Cut(x, weight, padding, 4)
    taps, plane = weight[2] * weight[3], 128 * cut.chunks
    torch.manual_seed(0)
    hi, lo = torch.randn(2, taps, 8, dtype=torch.float64)
    tiles = torch.cat([torch.zeros(1, 8, dtype=torch.float64), lo, hi])
    size = (max(plane // cut.pitch, 1), min(cut.pitch, plane))  # of the image that fits
    image_hi, image_lo = torch.randn(2, 8, *size, dtype=torch.float64)
    planes = torch.zeros(2 * plane + 256 + plane, 8, dtype=torch.float64)
    for first, image in ((0, image_hi), (plane, image_lo)):
        planes[first : first + image[0].numel()] = image.flatten(1).T
    sums = sum_of_steps(cut, tiles, planes)
    kernel_hi, kernel_lo = (w.T.reshape(1, 8, *weight[2:]) for w in (hi, lo))
    exact = F.conv2d(image_hi[None], kernel_hi + kernel_lo) + F.conv2d(image_lo[None], kernel_hi)
    assert_convolved(cut, sums, exact)


@needs_compilers
@pytest.mark.parametrize(
    ("x", "weight", "padding"),
    [
        ((2, 9, 16, 16), (64, 9, 3, 3), (0, 0, 0, 0)),  # channels
        ((2, 8, 16, 16), (64, 8, 5, 5), (0, 0, 0, 0)),  # too many taps
        ((2, 8, 16, 16), (64, 8, 3, 3), (-1, 0, 0, 0)),
        ((2, 8, 2, 16), (64, 8, 3, 3), (0, 0, 0, 0)),  # no output
        ((0, 8, 16, 16), (64, 8, 3, 3), (0, 0, 0, 0)),
        ((1, 8, 2**15, 2**14), (64, 8, 3, 3), (0, 0, 0, 0)),  # 32-bit indices in an image
    ],
)
def test_refused(x, weight, padding) -> None:
    assert conv_direct_cut(x, weight, padding, 4) == []


@needs_compilers
def test_16_bits_may_have_more_taps() -> None:
    sizes = ((2, 8, 32, 32), (64, 8, 5, 5), (2, 2, 2, 2))
    assert conv_direct_cut(*sizes, 2, x_bytes=2)
    assert conv_direct_cut(*sizes, 4) == []
    larger = ((2, 8, 32, 32), (64, 8, 2, 13), (0, 0, 0, 0))
    assert conv_direct_cut(*larger, 2, x_bytes=2) == []


@needs_compilers
def test_refused_for_its_operands() -> None:
    sizes = ((2, 8, 16, 16), (64, 8, 3, 3), (0, 0, 0, 0))
    assert conv_direct_cut(*sizes, 4, operands=7)
    assert conv_direct_cut(*sizes, 4, operands=8) == []


# By default only linear_dense's kernel is compiled; CI compiles every kernel.
@pytest.mark.each_once
@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize("value", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operands", [0, 5, 6, 7])
def test_compiles_without_spills_or_serialised_products(
    tmp_path, monkeypatch, operands, value
) -> None:
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    check_compiles(CONV_DIRECT, operands, value)


@pytest.mark.each_once
@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("operands", [1, 5, 6, 7])
def test_divisions_compile(tmp_path, monkeypatch, operands) -> None:
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    check_compiles(CONV_DIRECT, operands, divides=True)


@needs_compilers
def test_a_cpu_tensor_is_an_error() -> None:
    x = torch.randn(1, 2, 8, 8)
    spec = conv_sm90.IDENTITY.spec
    with pytest.raises(BuildError, match="CUDA devices"):
        kernels.conv_direct(spec, x, x, (0, 0, 0, 0), torch.empty(1, 1, 1, 1), None, [], [])


# ---- on a GPU: the checks ---------------------------------------------------------------------


@gpu
@pytest.mark.parametrize(
    "examples", [conv_direct_checks.EXAMPLES, conv_direct_checks.HALF_EXAMPLES]
)
@pytest.mark.parametrize("seed", range(4))
def test_random_sizes_and_operands(seed, examples) -> None:
    passes(conv_direct_checks.sweep, 60, seed, examples=examples)
    passes(conv_direct_checks.sweep, 6, seed, conv_checks.wide_case, examples)


@gpu
@pytest.mark.parametrize("dtype", conv_sm90.DTYPES, ids=str)
@pytest.mark.parametrize(
    "check",
    [
        conv_direct_checks.special_values,
        conv_direct_checks.accuracy,
        conv_direct_checks.graphs_and_repeats,
    ],
)
def test_checks(check, dtype) -> None:
    with float32_settings("fp32", cudnn_tf32=False):
        passes(check, dtype)


@gpu
def test_refusals() -> None:
    passes(conv_direct_checks.refusals)


# ---- on a GPU: through the backend ---------------------------------------------------------------


class Scaled(nn.Module):
    """BatchNorm of a convolution, times a number or a tensor of this shape."""

    def __init__(self, scale: tuple[int, ...] | None, padding: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 16, 3, padding=padding)
        self.norm = nn.BatchNorm2d(16)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self.scale = 2.0 if scale is None else nn.Parameter(torch.randn(scale))

    def forward(self, x):
        return self.norm(self.conv(x)) * self.scale


def made_directly(call, *arguments):
    """What a compiled call returns; checks that its convolution is not the library's."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = call(*arguments)
    names = {event.name for event in profile.events()}
    assert "fx_fuser::run" in names
    assert not names & {"aten::convolution", "aten::_convolution", "aten::cudnn_convolution"}
    return result


@gpu
@pytest.mark.parametrize("mode", ["eval", "train without gradients", "train"])
@pytest.mark.parametrize(
    "scale", [None, (), (16, 1, 1), (3, 16, 1, 1), (3, 1, 1, 1), (3, 16, 11, 9), (11, 9)], ids=str
)
def test_every_multiplier_in_every_mode(mode, scale) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Scaled(scale).cuda().train(mode != "eval")
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    options = {"strict": True, "plan": "always", "inner": "aot_eager"}
    compiled = torch.compile(ours, backend="fx_fuser", options=options)
    with float32_settings("fp32", cudnn_tf32=False), torch.set_grad_enabled(mode == "train"):
        for step in range(10):  # for the running statistics
            x = torch.randn(3, 5, 13, 11, device="cuda") + 3
            first = made_directly(compiled, x) if step else compiled(x)
            found = [first, eager(x), exact(x.double())]
        if mode == "train":
            for y in found:
                y.square().sum().backward()
    results = []
    for model, y in zip((ours, eager, exact), found):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        buffers = [buffer.double() for buffer in model.buffers()]
        results.append([y.detach(), *buffers, *gradients])
    for value, other, truth in zip(*results, strict=True):
        if truth.norm() > 1e-4:  # the bias before a training BatchNorm has no gradient
            assert relative(value, truth) <= max(2 * relative(other, truth), 1e-6)


@gpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", conv_sm90.HALVES, ids=str)
@pytest.mark.parametrize("mode", ["eval", "train without gradients", "train"])
@pytest.mark.parametrize("scale", [None, (16, 1, 1), (3, 1, 1, 1), (3, 16, 11, 9)], ids=str)
def test_in_16_bits(mode, scale, dtype, autocast) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    narrow = torch.float32 if autocast else dtype
    eager = Scaled(scale, padding=1 if scale is None else 0).cuda().train(mode != "eval").to(narrow)
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    options = {"strict": True, "plan": "always", "inner": "aot_eager"}
    compiled = torch.compile(ours, backend="fx_fuser", options=options)
    with torch.set_grad_enabled(mode == "train"):
        for step in range(4):
            x = (torch.randn(3, 5, 13, 11, device="cuda") + 1).to(narrow)
            with torch.autocast("cuda", dtype, enabled=autocast):
                first = made_directly(compiled, x) if step else compiled(x)
                found = [first, eager(x)]
            found.append(exact(x.double()))
    if mode == "train":
        for y in found:
            y.double().square().mean().backward()
    results = []
    for model, y in zip((ours, eager, exact), found):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([y.detach(), *(b.double() for b in model.buffers()), *gradients])
    for value, other, truth in zip(*results, strict=True):
        if truth.norm() > 1e-4:  # the bias before a training BatchNorm has no gradient
            # In sums over all pixels few digits are wrong; in eager's, by luck, even fewer.
            least = torch.finfo(dtype).eps / 8
            assert relative(value, truth) <= max(2 * relative(other, truth), least)


@gpu
@pytest.mark.parametrize("dtype", conv_sm90.DTYPES, ids=str)
def test_forward_in_training_needs_memory_for_its_result_only(dtype) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(8, 64, 3), nn.BatchNorm2d(64)).cuda().to(dtype).train()
    compiled = torch.compile(
        lambda x: model(x) * 2.0, backend="fx_fuser", options={"plan": "always"}
    )
    x = torch.randn(16, 8, 128, 128, device="cuda", dtype=dtype)
    with torch.no_grad():
        compiled(x)
        made_directly(compiled, x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = compiled(x)
        peak = torch.cuda.max_memory_allocated() - before
    assert peak <= result.nbytes + 2**21
