"""First layers' convolution: which sites its kernel takes, how it divides them, and on a GPU that
it is right."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import stem_checks
import torch
import torch.nn as nn
import torch.nn.functional as F
from checks import passes
from plan_cases import CONV, decide
from sm90 import gpu_from_sm80 as gpu
from test_depthwise import made
from test_plan_conv import cudnn_precision  # noqa: F401
from toolchains import needs_compilers

from benchmarks import conv_sm90, stem
from benchmarks.conv_cases import FORMATS
from benchmarks.measure import float32_settings
from benchmarks.sm90 import relative
from fx_fuser import kernels
from fx_fuser.anchors import ANCHORS
from fx_fuser.graph.match.pattern import Refusal
from fx_fuser.kernels import families
from fx_fuser.kernels.stem import stem as family
from fx_fuser.kernels.stem import stem_cut
from fx_fuser.ops import exported
from fx_fuser.options import Options
from fx_fuser.planning.case import MatchCase
from fx_fuser.planning.plan import Plan

STEM = {**CONV, "product": "stem"}
LAST = torch.channels_last
SHARED = 99 * 1024  # bytes that a block may have on every GPU from sm_80 on


# ---- without a GPU -------------------------------------------------------------------------------


@needs_compilers
@pytest.mark.parametrize("x_bytes", [2, 4])
@pytest.mark.parametrize("operands", [0, 4, 15])
def test_every_size_fits_into_a_block(x_bytes, operands) -> None:
    sizes = itertools.product(range(1, 5), (1, 3, 6, 7), (1, 4, 7), (2, 3, 4), (1, 24, 64, 96, 999))
    for channels, height, width, stride, outputs in sizes:
        cut = stem_cut((channels, height, width, stride, outputs), x_bytes, operands)
        assert bool(cut) == (channels * stride % 2 == 0)
        if cut:
            tiles, groups, parts, rows, shared = cut
            assert tiles in (2, 4, 6, 8)
            assert rows in (1, 2, 4)
            assert 8 * tiles * groups * parts >= outputs > 8 * tiles * groups * (parts - 1)
            assert shared <= SHARED


@needs_compilers
@pytest.mark.parametrize(
    ("sizes", "x_bytes", "cut"),
    [
        ((3, 7, 7, 2, 64), 2, [8, 1, 1, 4]),  # ResNet-50
        ((3, 7, 7, 2, 64), 4, [8, 1, 1, 2]),
        ((3, 3, 3, 2, 32), 2, [4, 1, 1, 4]),  # EfficientNet-B0
        ((3, 4, 4, 4, 96), 2, [6, 2, 1, 2]),  # ConvNeXt
        ((3, 7, 7, 2, 512), 2, [8, 3, 3, 4]),
    ],
)
def test_cut(sizes, x_bytes, cut) -> None:
    assert stem_cut(sizes, x_bytes, 4)[:4] == cut


@needs_compilers
@pytest.mark.parametrize(
    "sizes",
    [(5, 3, 3, 2, 8), (3, 8, 3, 2, 8), (3, 3, 8, 2, 8), (3, 3, 3, 1, 8), (4, 3, 3, 1, 8),
     (3, 3, 3, 3, 8), (4, 3, 3, 5, 8), (0, 3, 3, 2, 8)],
)  # fmt: skip
def test_refused(sizes) -> None:
    assert stem_cut(sizes, 2) == []


def form(stride: Any = 2, training: bool = False, **geometry: Any) -> Any:
    def scaled_norm(x, weight, mean, var):
        z = F.conv2d(x, weight, stride=stride, **geometry)
        return F.batch_norm(z, mean, var, training=training) * 2.0

    return scaled_norm


def tensors(
    dtype: torch.dtype = torch.bfloat16, channels: int = 3, kernel: int = 3
) -> list[torch.Tensor]:
    x, weight = torch.randn(2, channels, 14, 14), torch.randn(8, channels, kernel, kernel)
    return [v.to(dtype) for v in (x, weight, torch.zeros(8), torch.ones(8))]


def candidates(match: Any, **options: Any) -> list[dict[str, Any]]:
    case = MatchCase(match, Options(**options))
    found = kernels.candidates(case)
    return [choices for choices in found if choices["product"] == "stem"]


@pytest.mark.one_in(3)
@needs_compilers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fp32", ["follow", "split", "ieee", "tf32"])
@pytest.mark.parametrize("stride", [2, (4, 4)])
def test_offered_in_16_bits(match_of, on_gpu, dtype, fp32, stride) -> None:
    match = match_of(form(stride, padding=(1, 2)), *tensors(dtype))
    assert candidates(match, fp32=fp32) == [STEM]
    last = [v.to(memory_format=LAST) if v.ndim == 4 else v for v in tensors(dtype)]
    assert candidates(match_of(form(stride), *last), fp32=fp32) == [STEM]


@needs_compilers
@pytest.mark.parametrize("fp32", ["follow", "split", "ieee", "tf32"])
@pytest.mark.parametrize("torchs", ["tf32", "ieee"])
def test_offered_in_fp32_where_the_library_may_take_tf32(
    match_of,
    on_gpu,
    cudnn_precision,  # noqa: F811
    fp32,
    torchs,
) -> None:
    """Whether the library may use TF32 also sets how exact results must be in the bench."""
    cudnn_precision(torchs)
    match = match_of(form(), *tensors(torch.float32))
    offered = torchs == "tf32" and fp32 in ("follow", "tf32")
    found = [] if fp32 == "tf32" and torchs == "ieee" else candidates(match, fp32=fp32)
    assert found == [{**STEM, "tf32": True}] * offered


@needs_compilers
@pytest.mark.parametrize(
    ("form", "given"),
    [
        (form(1), tensors()),
        (form(1), tensors(channels=4)),
        (form(3), tensors()),
        (form((2, 4)), tensors()),
        (form(dilation=2), tensors()),
        (form(), tensors(channels=5)),
        (form(), tensors(kernel=8)),
        (form(), tensors(torch.float64)),
        (form(training=True), tensors()),
    ],
)
def test_not_offered(match_of, on_gpu, form, given) -> None:
    assert not candidates(match_of(form, *given))


@needs_compilers
def test_not_offered_without_cudnn(match_of, on_gpu, monkeypatch) -> None:
    match = match_of(form(), *tensors())
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert not candidates(match)


@needs_compilers
@pytest.mark.parametrize(("ms", "choices"), [(0.9, STEM), (0.99, None)])
def test_taken_where_it_is_faster(match_of, on_gpu, ms, choices) -> None:
    match = match_of(form(), *tensors())
    on_gpu(1.0, ms)
    decision = decide(match)
    assert getattr(decision, "choices", None) == choices
    assert isinstance(decision, Plan if choices else Refusal)
    assert f"stem {ms:g} ms" in str(decision)
    assert decide(match, plan="always").choices == STEM  # type: ignore[union-attr]


def test_a_kernel_is_of_the_weights_sizes() -> None:
    config = {"stride": [2, 2], **STEM}
    weight = torch.randn(64, 3, 7, 5)
    *_, found = families({"weight": weight}, config)
    assert found is family(3, 7, 5, 2, 64)
    assert stem.spec_of(stem_checks.ALONE[0][0], found.sizes).signature[:6] == [
        *("3", "7", "5", "2", "64"),
        "fx_fuser::examples::Identity",
    ]


def test_exported_sites_of_two_weights_have_two_kernels(monkeypatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(exported, "_kernels", {})
    monkeypatch.setattr(exported, "_prepared", lambda call, operands, t: found.append(1))
    config = {"stride": [2, 2], "padding": [1] * 4, "dilation": [1, 1], "groups": 1, **STEM}
    for outputs in (8, 16, 8):
        weight = torch.randn(outputs, 3, 3, 3)
        operands = {"x": torch.randn(1, 3, 9, 9), "weight": weight, "bias": None}
        exported._kernel(ANCHORS["conv2d"], operands, config, "", [], [], torch.float32)
    assert len(found) == 2


# ---- on a GPU: the checks ---------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("seed", range(3))
def test_random_sizes_and_operands(seed) -> None:
    with float32_settings("fp32"):
        passes(stem_checks.sweep, 80, seed)


@gpu
@pytest.mark.parametrize("dtype", conv_sm90.DTYPES, ids=str)
def test_special_values(dtype) -> None:
    passes(stem_checks.special_values, dtype)


@gpu
@pytest.mark.parametrize("check", [stem_checks.repeats, stem_checks.refusals])
def test_checks(check) -> None:
    passes(check)


@gpu
@pytest.mark.parametrize("layout", FORMATS, ids=str)
def test_more_than_2_to_the_31_elements(layout) -> None:
    """The last images must equal those of a small tensor."""
    example, sizes = stem_checks.ALONE[3]
    images = torch.randn(2, 3, 512, 512, device="cuda").bfloat16().to(memory_format=layout)
    weight = torch.randn(64, 3, 7, 7, device="cuda").bfloat16().to(memory_format=layout)
    x = torch.zeros((530, *images.shape[1:]), device="cuda", dtype=images.dtype)
    x = x.contiguous(memory_format=layout)
    x[-2:] = images
    wanted, found = (
        torch.full((len(v), 64, 256, 256), float("nan"), device="cuda").bfloat16()
        for v in (images, x)
    )
    assert found.numel() > 2**31
    results = []
    for given, out in ((images, wanted), (x, found)):
        out = out.contiguous(memory_format=layout)
        stem.run(example, sizes, given, weight, (3, 3, 3, 3), out)
        results.append(out[-2:])
    assert torch.equal(*results)


# ---- on a GPU: through the backend ---------------------------------------------------------------


class First(nn.Module):
    """A first layer, and what follows it."""

    def __init__(self, kernel: int, stride: int, norm: bool, tail: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 24, kernel, stride, kernel // 2, bias=not norm)
        self.norm = nn.BatchNorm2d(24) if norm else nn.Identity()
        for vector in self.norm.state_dict().values():
            if vector.is_floating_point():
                nn.init.uniform_(vector, 0.5, 1.5)
        self.tail = tail

    def forward(self, x):
        return self.tail(self.norm(self.conv(x)))


def add_rows(z):
    """An operand that is not per channel: the kernel gives only the convolution."""
    return F.relu(z) + torch.arange(z.shape[2], device=z.device, dtype=z.dtype).view(-1, 1)


FIRSTS = [
    (7, 2, True, F.relu),
    (3, 2, True, F.hardswish),
    (4, 4, False, F.gelu),
    (6, 2, True, add_rows),
]


def bound(dtype: torch.dtype, other: float) -> float:
    """In fp32 cuDNN need not use TF32, while the kernel does."""
    return max(2 * other, 1e-3 if dtype == torch.float32 else 0)


@gpu
@pytest.mark.parametrize("layout", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", conv_sm90.DTYPES, ids=str)
@pytest.mark.parametrize("first", FIRSTS)
def test_first_layers(first, dtype, layout) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = First(*first).cuda().to(dtype, memory_format=layout).eval()
    exact = copy.deepcopy(eager).double()
    options = {"strict": True, "plan": "always", "inner": "aot_eager"}
    compiled = torch.compile(copy.deepcopy(eager), backend="fx_fuser", options=options)
    x = torch.randn(3, 3, 61, 64, device="cuda").to(dtype, memory_format=layout)
    with float32_settings("fp32"), torch.no_grad():
        y, other = made(compiled, x), eager(x)
        truth = exact(x.double())
    assert y.stride() == other.stride()
    assert relative(y, truth) <= bound(dtype, relative(other, truth))


@gpu
@pytest.mark.parametrize("layout", FORMATS, ids=str)
@pytest.mark.parametrize("norm", [False, True])
def test_training_has_its_gradients(layout, norm) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = First(7, 2, norm, F.silu).cuda().to(memory_format=layout)
    eager.norm.eval()
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    compiled = torch.compile(ours, backend="fx_fuser", options={"strict": True, "plan": "always"})
    results = []
    with float32_settings("fp32"):
        for model, call in ((ours, compiled), (eager, eager), (exact, exact)):
            x = torch.randn(4, 3, 47, 64, generator=torch.Generator().manual_seed(1)).cuda()
            x = x.to(model.conv.weight.dtype, memory_format=layout).requires_grad_()
            y = call(x)
            y.double().square().mean().backward()
            results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    for value, other, truth in zip(*results, strict=True):
        assert relative(value, truth) <= bound(torch.float32, relative(other, truth))


@gpu
def test_other_sizes_and_strides_of_x() -> None:
    """A graph for any batch, image and layout has one kernel."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = First(3, 2, True, F.relu).cuda().bfloat16().eval()
    options = {"plan": "always", "inner": "aot_eager"}
    compiled = torch.compile(
        copy.deepcopy(eager), backend="fx_fuser", options=options, dynamic=True
    )
    with torch.no_grad():
        for samples, height, width in ((2, 32, 48), (5, 33, 47), (1, 224, 224)):
            x = torch.randn(samples, 3, height, width, device="cuda").bfloat16()
            for given in (x, x.to(memory_format=LAST), torch.cat([x, x], 3)[..., ::2]):
                y = compiled(given)
                torch.testing.assert_close(y, eager(given), atol=3e-2, rtol=3e-2)
                assert y.stride() == eager(given).stride()
