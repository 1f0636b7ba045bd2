"""The ops that graphs call, through the shim's host code, on the CPU emulator: which kernel runs,
its results, and the library's where no kernel takes the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import emulator
import pytest
import torch
from emulator.device import EmulatedGpu, emulated, in_place_of_cuda
from torch import Tensor

from benchmarks.sm90 import relative
from fx_fuser.anchors import ANCHORS
from fx_fuser.graph.epilogue import Epilogue, parse
from fx_fuser.ops import apply, run
from fx_fuser.ops.library import FusedCall

EMULATED = torch._C.DispatchKey.PrivateUse1  # the shim's host code of the emulated device
pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
LAST = torch.channels_last
TAIL = "v0 = sigmoid(z); v1 = mul(v0, z); v2 = add(v1, t0)"
NEAR = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
Sizes = tuple[int, ...]


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    made = EmulatedGpu(90, multiprocessors=2)
    in_place_of_cuda(made, monkeypatch, ())
    return made


def _made(sizes: Sizes, dtype: torch.dtype, last: bool) -> Tensor:
    tensor = torch.randn(sizes).to(dtype)
    return tensor.contiguous(memory_format=LAST) if last and len(sizes) == 4 else tensor


class Called:
    """A call of an anchor's function, with tensors of the emulated GPU."""

    def __init__(
        self,
        gpu: EmulatedGpu,
        kind: str,
        operands: Mapping[str, Tensor | None],
        config: Mapping[str, Any],
        t: Sequence[Tensor] = (),
        epilogue: Epilogue | None = None,
        out: torch.dtype | None = None,
    ) -> None:
        anchor = ANCHORS[kind]
        x = operands["x"]
        assert x is not None
        epilogue = parse(TAIL) if epilogue is None else epilogue
        self.call = FusedCall(anchor, dict(config), epilogue, [], out or x.dtype)
        self.given = anchor.kernel_operands(operands, config), list(t)
        self.operands, self.gpu = operands, gpu
        self.specs = self.call.specs(*self.given)
        for spec in self.specs:
            gpu.handle_of(spec)
        if self.call.has_statistics:
            gpu.prepare_batch_stats(torch.device("cuda"))

    def arguments(self, save: bool) -> run.Arguments:
        names = [emulated(spec).name for spec in self.specs]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FusedCall, "_kernels", lambda *_: names)
            return self.call.arguments(*self.given, save)

    def run(self, save: bool = False) -> tuple[list[Tensor], int]:
        """All results, and how many kernels were launched."""
        arguments = self.arguments(save)
        before = emulator.ops.launches.default()
        with emulator.memory():
            found = [one.clone() for one in run.MANY._op_dk(EMULATED, *arguments)]
        return found, emulator.ops.launches.default() - before

    def evaluated(self) -> Tensor:
        """y alone, by the op of inference."""
        arguments = self.arguments(save=False)
        with emulator.memory():
            y: Tensor = run.ONE._op_dk(EMULATED, *arguments).clone()
        return y

    def exact(self) -> list[Tensor]:
        """In float64, from the same values."""
        wide = {n: v if v is None else v.double() for n, v in self.operands.items()}
        config = {**self.call.config, "tf32": False}
        z, *statistics = self.call.anchor.reference(wide, config)
        t = [v.double() for v in self.given[1]]
        return [apply.in_torch(self.call.epilogue, z, t, [], torch.float64), *statistics]


CONV = {"stride": [1, 1], "padding": [1, 1, 1, 1], "dilation": [1, 1], "groups": 1, "tf32": True}
PLAN = {"product": "library", "backward": "library", "again": False}
NORM = {"training": False, "momentum": 0.1, "eps": 1e-5}


def _normed(channels: int) -> dict[str, Tensor | None]:
    vectors = {n: torch.randn(channels) for n in ("running_mean", "gamma", "beta")}
    return {
        "bias": None,
        "running_mean": vectors["running_mean"],
        "running_var": torch.rand(channels) + 0.5,
        "gamma": vectors["gamma"],
        "beta": vectors["beta"],
    }


def _conv(
    gpu: EmulatedGpu,
    kernel: str,
    x: Sizes,
    weight: Sizes,
    dtype: torch.dtype,
    last: bool,
    **of: Any,
) -> Called:
    config = {**CONV, **PLAN, "product": kernel, **of}
    operands = {"x": _made(x, dtype, last), "weight": _made(weight, dtype, last), "bias": None}
    operands["bias"] = torch.randn(weight[0]).to(dtype)
    y = torch.nn.functional.conv2d(
        operands["x"].float(), operands["weight"].float(), None, config["stride"], 1, 1,
        config["groups"],
    )  # fmt: skip
    return Called(gpu, "conv2d", operands, config, [_made(tuple(y.shape), dtype, last)])


def depthwise(gpu: EmulatedGpu) -> Called:
    return _conv(gpu, "depthwise", (2, 6, 9, 7), (6, 1, 3, 3), torch.float32, True, groups=6)


def stem(gpu: EmulatedGpu) -> Called:
    return _conv(gpu, "stem", (1, 3, 9, 10), (8, 3, 3, 3), torch.bfloat16, True, stride=[2, 2])


def implicit(gpu: EmulatedGpu) -> Called:
    return _conv(gpu, "implicit", (2, 8, 6, 5), (24, 8, 3, 3), torch.bfloat16, True)


def direct(gpu: EmulatedGpu) -> Called:
    return _conv(gpu, "direct", (2, 3, 8, 8), (8, 3, 3, 3), torch.float32, False)


# Kernel → launches. A stem whose operands are not per channel gives only c; a pass does the rest.
KERNELS = {depthwise: 1, stem: 2, implicit: 1, direct: 1}


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("save", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_convolution_is_made_by_its_kernel(gpu: EmulatedGpu, kernel: Any, save: bool) -> None:
    called = kernel(gpu)
    (y, *saved), launches = called.run(save)
    (exact,) = called.exact()
    assert launches == KERNELS[kernel]
    assert relative(y, exact) <= NEAR[y.dtype]
    assert [c.shape for c in saved] == [y.shape] * save
    assert torch.equal(called.evaluated(), y)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_a_kernel_does_not_take_is_the_librarys(gpu: EmulatedGpu, kernel: Any) -> None:
    """Each refuses a dilated window; the library's convolution and one pass give the result."""
    called = kernel(gpu)
    called.call.config.update(dilation=[2, 2], padding=[2, 2, 2, 2])
    if kernel is implicit:  # which takes it; but not an image in planes
        called.given[0][0] = called.operands["x"].contiguous()
        called.given[0][1] = called.operands["weight"].contiguous()
    (y,), launches = called.run()
    assert launches == 1
    assert relative(y, called.exact()[0]) <= NEAR[y.dtype]


@pytest.mark.slow
def test_a_batchs_statistics_are_made_ahead(gpu: EmulatedGpu) -> None:
    """By the direct kernel, without storing c; a second launch of it applies them."""
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(8, 3, 3, 3)
    operands = {"x": x, "weight": weight, **_normed(8)}
    config = {**CONV, **PLAN, "product": "direct", **NORM, "training": True}
    called = Called(gpu, "conv2d_batchnorm", operands, config, [torch.randn(8, 1, 1)])
    (y, c, mean, variance), launches = called.run(save=True)
    exact, *statistics = called.exact()
    assert launches == 3 and c.shape == y.shape
    for found, right in zip((y, mean, variance), (exact, *statistics), strict=True):
        assert relative(found, right) <= 1e-5


def test_the_librarys_statistics(gpu: EmulatedGpu) -> None:
    operands = {"x": torch.randn(2, 9, 6, 6), "weight": torch.randn(4, 9, 3, 3), **_normed(4)}
    config = {**CONV, **PLAN, **NORM, "training": True}
    called = Called(gpu, "conv2d_batchnorm", operands, config, [torch.randn(4, 1, 1)])
    (y, mean, variance), launches = called.run()
    exact, *statistics = called.exact()
    assert launches == 3  # the statistics take two
    for found, right in zip((y, mean, variance), (exact, *statistics), strict=True):
        assert relative(found, right) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("product", ["library", "split"])
def test_a_small_linear_is_the_librarys(gpu: EmulatedGpu, product: str) -> None:
    """Too few tiles for the split kernel; one pass applies the tail."""
    operands = {"x": torch.randn(3, 5, 16), "weight": torch.randn(8, 16), "bias": torch.randn(8)}
    called = Called(gpu, "linear", operands, {**PLAN, "product": product}, [torch.randn(8)])
    (y, c), launches = called.run(save=True)
    assert launches == 1 and c.shape == y.shape == (3, 5, 8)
    assert relative(y, called.exact()[0]) <= NEAR[y.dtype]
    assert torch.equal(called.evaluated(), y)


def test_without_a_kernel_the_librarys_gemm_is_the_result(gpu: EmulatedGpu) -> None:
    operands = {"x": torch.randn(3, 4, 16), "weight": torch.randn(3, 16, 8)}
    called = Called(gpu, "bmm", operands, PLAN, epilogue=Epilogue())
    (y,), launches = called.run()
    assert called.specs == [] and launches == 0
    assert torch.equal(y, operands["x"] @ operands["weight"])


def test_what_the_shim_does_not_take_is_made_in_torch(gpu: EmulatedGpu) -> None:
    """Here an image in planes, and one that is padded by a size of the call."""
    x, weight = torch.randn(2, 3, 9, 8), torch.randn(4, 3, 3, 3)
    given = run.arguments("conv2d_folded", (x, weight, None, None, [1, 1], [1, 0], [1, 1], 1, True))
    by_size = given[0], given[1].replace("#2 i1 i0", "#2 n i0"), [1]
    assert by_size[1] != given[1]
    for arguments in (given, by_size):
        with emulator.memory():
            (y,) = run.MANY._op_dk(EMULATED, *arguments)
        assert torch.equal(y, torch.nn.functional.conv2d(x, weight, padding=(1, 0)).relu())
    with emulator.memory(), pytest.raises(RuntimeError, match="2 tensors and 0 sizes, not 2 and 1"):
        run.ONE._op_dk(EMULATED, *by_size[:2])


def test_a_kernel_that_is_not_loaded_is_named(gpu: EmulatedGpu) -> None:
    called = depthwise(gpu)
    t, program = called.arguments(save=False)
    name = called.specs[1].name
    program = program.replace(f"s{len(name)}:{name}", "s14:no such kernel")
    with (
        emulator.memory(),
        pytest.raises(RuntimeError, match="kernel no such kernel is not loaded on cuda:-1"),
    ):
        run.ONE._op_dk(EMULATED, t, program)
