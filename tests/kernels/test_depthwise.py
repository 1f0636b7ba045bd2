"""The depthwise convolution: which sites it takes, how it divides them, and on a GPU that it is
right."""

from __future__ import annotations

import copy
from typing import Any

import depthwise_checks
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from checks import passes
from plan_cases import CONV, decide
from sm90 import gpu_from_sm80 as gpu
from toolchains import needs_compilers

from benchmarks import conv_sm90, depthwise
from benchmarks.conv_cases import FORMATS
from benchmarks.measure import float32_settings
from benchmarks.sm90 import relative
from fx_fuser.anchors import ANCHORS
from fx_fuser.graph.match.pattern import Refusal
from fx_fuser.kernels import candidates
from fx_fuser.kernels.depthwise import depthwise as family
from fx_fuser.kernels.depthwise import depthwise_cut
from fx_fuser.ops import exported
from fx_fuser.options import Options
from fx_fuser.planning.case import MatchCase
from fx_fuser.planning.plan import Plan

DEPTHWISE = {**CONV, "product": "depthwise"}
LAST = torch.channels_last


# ---- without a GPU -------------------------------------------------------------------------------

CUTS = [
    # x, window, stride, [left, right, top, bottom]
    ((128, 240, 28, 28), (5, 5), 1, (2, 2, 2, 2)),
    ((128, 32, 112, 112), (3, 3), 1, (1, 1, 1, 1)),
    ((1, 1152, 7, 7), (5, 5), 1, (2, 2, 2, 2)),
    ((128, 144, 56, 56), (5, 5), 2, (2, 2, 2, 2)),
    ((3, 2, 300, 5), (3, 7), 1, (3, 3, 1, 1)),
    ((2, 66, 1, 1), (4, 6), 2, (9, 0, 0, 12)),
    ((2, 6, 4000, 3000), (7, 7), 2, (0, 0, 0, 0)),
    ((4096, 34, 9, 9), (3, 3), 1, (0, 0, 0, 0)),
]


@needs_compilers
@pytest.mark.parametrize("multiprocessors", [1, 20, 132])
@pytest.mark.parametrize(("channels_last", "x_bytes"), [(True, 2), (True, 4), (False, 4)])
@pytest.mark.parametrize(("x", "window", "stride", "padding"), CUTS)
def test_items_cover_every_output_once(
    x, window, stride, padding, channels_last, x_bytes, multiprocessors
) -> None:
    weight = (x[1], 1, *window)
    columns, rows, strips, chunks, items, lanes, groups, blocks = depthwise_cut(
        x, weight, padding, stride, 5, x_bytes, channels_last, multiprocessors
    )
    left, right, top, bottom = padding
    out_h, out_w = (
        (n - k) // stride + 1 for n, k in zip((x[2] + top + bottom, x[3] + left + right), window)
    )
    assert columns * (strips - 1) < out_w <= columns * strips
    assert rows * (chunks - 1) < out_h <= rows * chunks
    assert items == x[0] * strips * chunks
    vector = 2 if channels_last else 1
    assert vector * lanes * (groups - 1) < x[1] <= vector * lanes * groups
    assert 64 % lanes == 0 and (channels_last or lanes == 1)
    assert blocks % groups == 0 and (blocks // groups - 1) * (64 // lanes) < items


@needs_compilers
def test_few_images_are_divided_further() -> None:
    sizes = ((240, 1, 5, 5), (2, 2, 2, 2), 1)
    many, one = (depthwise_cut((n, 240, 28, 28), *sizes, x_bytes=2) for n in (128, 1))
    assert many[1] == 28 and one[1] < 7


@needs_compilers
@pytest.mark.parametrize(
    ("x", "weight", "stride", "padding", "channels_last"),
    [
        ((2, 9, 16, 16), (9, 1, 3, 3), 1, (0, 0, 0, 0), True),  # two channels a thread
        ((2, 8, 16, 16), (16, 1, 3, 3), 1, (0, 0, 0, 0), True),
        ((2, 8, 16, 16), (8, 1, 12, 3), 1, (0, 0, 0, 0), True),
        ((2, 8, 16, 16), (8, 1, 3, 2), 1, (0, 0, 0, 0), True),
        ((2, 8, 16, 16), (8, 1, 3, 3), 3, (0, 0, 0, 0), True),
        ((2, 8, 16, 16), (8, 1, 3, 3), 1, (-1, 0, 0, 0), True),
        ((2, 8, 2, 16), (8, 1, 3, 3), 1, (0, 0, 0, 0), True),  # no output
        ((0, 8, 16, 16), (8, 1, 3, 3), 1, (0, 0, 0, 0), True),
        ((2, 1, 16, 16), (1, 1, 3, 3), 1, (0, 0, 0, 0), False),
    ],
)
def test_refused(x, weight, stride, padding, channels_last) -> None:
    assert depthwise_cut(x, weight, padding, stride, channels_last=channels_last) == []


@needs_compilers
def test_refused_for_its_operands() -> None:
    sizes = ((2, 8, 16, 16), (8, 1, 3, 3), (0, 0, 0, 0), 1)
    assert depthwise_cut(*sizes, operands=7)
    assert depthwise_cut(*sizes, operands=8) == []


def test_each_window_has_a_kernel_of_its_own() -> None:
    example = depthwise_checks.EXAMPLES[0][0]
    specs = [depthwise.spec_of(example, window) for window in depthwise.WINDOWS]
    assert len({spec.name for spec in specs}) == len(specs)
    assert "FX_FUSER_DEPTHWISE(4, 6, 2, " in depthwise.spec_of(example, (4, 6, 2)).text
    assert family(3, 3, 1) is family(3, 3, 1)


def scaled(stride: Any = 1, dilation: int = 1, groups: int = 8, training: bool = False):
    """BatchNorm of a convolution, times a number."""

    def f(x, weight, mean, var):
        c = F.conv2d(x, weight, None, stride, 1, dilation, groups)
        return F.batch_norm(c, mean, var, training=training) * 2.0

    return f


def tensors(
    dtype: torch.dtype = torch.float32, channels: int = 8, weight: tuple[int, ...] = (8, 1, 3, 3)
) -> list[torch.Tensor]:
    vectors = torch.zeros(weight[0]), torch.ones(weight[0])
    return [v.to(dtype) for v in (torch.randn(2, channels, 12, 12), torch.randn(weight), *vectors)]


def products(match: Any, **options: Any) -> list[str]:
    case = MatchCase(match, Options(**options))
    return [choices["product"] for choices in candidates(case)]


@pytest.mark.one_in(4)
@needs_compilers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stride", [1, 2, (2, 2)])
@pytest.mark.parametrize("fp32", ["follow", "split", "ieee", "tf32"])
def test_offered(match_of, on_gpu, dtype, stride, fp32) -> None:
    match = match_of(scaled(stride), *tensors(dtype))
    assert products(match, fp32=fp32) == ["library", "depthwise"]


@needs_compilers
@pytest.mark.parametrize(
    ("form", "given"),
    [
        (scaled(3), tensors()),
        (scaled((1, 2)), tensors()),
        (scaled(dilation=2), tensors()),
        (scaled(groups=4), tensors(weight=(8, 2, 3, 3))),
        (scaled(), tensors(weight=(16, 1, 3, 3))),
        (scaled(), tensors(weight=(8, 1, 1, 3))),
        (scaled(), tensors(torch.float64)),
        (scaled(training=True), tensors()),
        (scaled(groups=9), [v.to(memory_format=LAST) if v.ndim == 4 else v
                            for v in tensors(channels=9, weight=(9, 1, 3, 3))]),
    ],
)  # fmt: skip
def test_not_offered(match_of, on_gpu, form, given) -> None:
    assert "depthwise" not in products(match_of(form, *given))


@needs_compilers
@pytest.mark.parametrize(("ms", "choices"), [(0.9, DEPTHWISE), (0.99, None)])
def test_taken_where_it_is_faster(match_of, on_gpu, ms, choices) -> None:
    match = match_of(scaled(), *tensors(torch.bfloat16))
    on_gpu(1.0, ms)
    decision = decide(match)
    assert getattr(decision, "choices", None) == choices
    assert isinstance(decision, Plan if choices else Refusal)
    assert f"depthwise {ms:g} ms" in str(decision)
    assert decide(match, plan="always").choices == DEPTHWISE  # type: ignore[union-attr]


def test_exported_sites_of_two_windows_have_two_kernels(monkeypatch) -> None:
    """Although all else is the same, including the padding."""
    made: list[int] = []
    monkeypatch.setattr(exported, "_kernels", {})
    monkeypatch.setattr(
        exported, "_prepared", lambda call, operands, t: made.append(operands[1].shape[-1])
    )
    config = {"stride": [1, 1], "padding": [1] * 4, "dilation": [1, 1], "groups": 8, **DEPTHWISE}
    for size in (3, 5, 3):
        weight = torch.randn(8, 1, size, size)
        operands = {"x": torch.randn(1, 8, 9, 9), "weight": weight, "bias": None}
        exported._kernel(ANCHORS["conv2d"], operands, config, "", [], [], torch.float32)
    assert made == [3, 5]


@needs_compilers
def test_exactness_asked_for_is_kept_where_the_kernel_gains_nothing(match_of, on_gpu) -> None:
    """The inner compiler's convolution may use TF32."""
    match = match_of(scaled(), *tensors())
    on_gpu(1.0, 2.0)
    assert decide(match, fp32="split").choices == CONV  # type: ignore[union-attr]
    assert isinstance(decide(match), Refusal)


# ---- on a GPU: the checks ---------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("seed", range(3))
def test_random_sizes_and_operands(seed) -> None:
    with float32_settings("fp32", cudnn_tf32=False):
        passes(depthwise_checks.sweep, 80, seed)


@gpu
@pytest.mark.parametrize("dtype", conv_sm90.DTYPES, ids=str)
def test_special_values(dtype) -> None:
    passes(depthwise_checks.special_values, dtype)


@gpu
@pytest.mark.parametrize("check", [depthwise_checks.repeats, depthwise_checks.refusals])
def test_checks(check) -> None:
    passes(check)


@gpu
def test_more_than_2_to_the_31_elements() -> None:
    """The last images must equal those of a small tensor."""
    example, window = depthwise_checks.ALONE[1]
    images = torch.randn(2, 64, 128, 128, device="cuda").bfloat16().to(memory_format=LAST)
    x = torch.empty(
        (2100, *images.shape[1:]), device="cuda", dtype=images.dtype, memory_format=LAST
    )
    assert x.numel() > 2**31
    x[-2:] = images
    weight = torch.randn(64, 1, 3, 3, device="cuda").bfloat16()
    wanted, found = torch.empty_like(images), torch.full_like(x, float("nan"))
    for given, out in ((images, wanted), (x, found)):
        depthwise.run(example, window, given, weight, (1, 1, 1, 1), out)
    assert torch.equal(found[-2:], wanted)


# ---- on a GPU: through the backend ---------------------------------------------------------------


class Block(nn.Module):
    def __init__(
        self, window: Any, stride: int, activation: Any, norm: bool, channels: int
    ) -> None:
        super().__init__()
        padding = tuple(k // 2 for k in window)
        self.conv = nn.Conv2d(
            channels, channels, window, stride, padding, groups=channels, bias=not norm
        )
        self.norm = nn.BatchNorm2d(channels) if norm else nn.Identity()
        for vector in self.norm.state_dict().values():
            if vector.is_floating_point():
                nn.init.uniform_(vector, 0.5, 1.5)
        self.activation = activation

    def forward(self, x):
        return self.activation(self.norm(self.conv(x)))


def made(call, *arguments):
    """What a compiled call returns; checks that its convolution is not the library's."""
    call(*arguments)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = call(*arguments)
    names = {event.name for event in profile.events()}
    assert "fx_fuser::run" in names
    assert not names & {"aten::convolution", "aten::_convolution", "aten::cudnn_convolution"}
    return result


BLOCKS = [
    ((3, 3), 1, F.silu, True, 24),
    ((5, 5), 2, F.hardswish, True, 40),
    ((7, 7), 1, F.gelu, False, 16),
    ((3, 5), 2, lambda z: F.relu(z) + z, True, 6),
]


@gpu
@pytest.mark.parametrize("layout", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", conv_sm90.DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks(block, dtype, layout) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Block(*block).cuda().to(dtype).eval()
    exact = copy.deepcopy(eager).double()
    options = {"strict": True, "plan": "always", "inner": "aot_eager"}
    compiled = torch.compile(copy.deepcopy(eager), backend="fx_fuser", options=options)
    x = torch.randn(3, block[-1], 19, 23, device="cuda").to(dtype, memory_format=layout)
    with float32_settings("fp32", cudnn_tf32=False), torch.no_grad():
        y, other = made(compiled, x), eager(x)
        truth = exact(x.double())
    assert y.stride() == other.stride()
    assert relative(y, truth) <= max(2 * relative(other, truth), 4e-7)


@gpu
@pytest.mark.parametrize("layout", FORMATS, ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_training_has_its_gradients(layout, autocast) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Block((5, 5), 1, F.silu, False, 32).cuda()
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    options = {"strict": True, "plan": "always"}
    compiled = torch.compile(ours, backend="fx_fuser", options=options)
    results = []
    with float32_settings("fp32", cudnn_tf32=False):
        for model, call in ((ours, compiled), (eager, eager), (exact, exact)):
            x = torch.randn(4, 32, 17, 15, generator=torch.Generator().manual_seed(1)).cuda()
            x = x.to(memory_format=layout).to(model.conv.weight.dtype).requires_grad_()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast and model is not exact):
                y = call(x)
            y.double().square().mean().backward()
            results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    # In sums over all pixels few digits are wrong; in eager's, by luck, even fewer.
    least = torch.finfo(torch.bfloat16).eps / 8 if autocast else 1e-6
    for value, other, truth in zip(*results, strict=True):
        assert relative(value, truth) <= max(2 * relative(other, truth), least)


@gpu
def test_an_odd_number_of_channels_in_any_layout() -> None:
    """The kernel takes only the contiguous one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Block((3, 3), 1, F.silu, True, 9).cuda().eval()
    options = {"plan": "always", "inner": "aot_eager"}
    compiled = torch.compile(copy.deepcopy(eager), backend="fx_fuser", options=options)
    x = torch.randn(3, 9, 19, 23, device="cuda")
    with float32_settings("fp32", cudnn_tf32=False), torch.no_grad():
        for given in (x, x.to(memory_format=LAST), torch.cat([x, x], 3)[..., ::2]):
            y = compiled(given)
            torch.testing.assert_close(y, eager(given), atol=1e-5, rtol=1e-5)
            assert y.stride() == eager(given).stride()
