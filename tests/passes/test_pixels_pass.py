"""1 x 1 convolutions in front of a BatchNorm in training: which of Inductor's graph take their
statistics along, which are left, and values, gradients and running statistics stay right. On a CPU
the function runs in torch (`cpu_ops`); the kernel itself: tests/kernels/pixels_checks.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import convolutions
import pytest
import torch
from arriving import tensors_of
from convolutions import BF16, LAST, fresh_graphs, targets, trained
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fx_fuser
from fx_fuser import reading
from fx_fuser.native import load
from fx_fuser.ops import run
from fx_fuser.ops.pixels import MOMENTS
from fx_fuser.passes import pixels
from fx_fuser.passes.pixels import COUNTERS, Pixels
from fx_fuser.passes.pixels.site import CONVOLUTION, Site
from fx_fuser.planning import contest
from fx_fuser.planning.timing import Timing

OPTIONS = {**convolutions.OPTIONS, "patterns": [], "auto": True}
VAR_MEAN = torch.ops.aten.var_mean.correction
_CAST = torch.ops.prims.convert_element_type.default


@pytest.fixture(autouse=True)
def unfused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No convolution is fused with its tail: on a GPU those of 16 bits in training are left, with
    `cpu_ops` none is."""
    monkeypatch.setattr(reading, "_add_grown", lambda *args: None)
    with fresh_graphs():
        yield


def x_of(dtype: torch.dtype = BF16, k: int = 16, last: bool = True) -> Tensor:
    x = torch.randn(3, k, 5, 7).to(dtype)
    return x.contiguous(memory_format=LAST) if last else x


def weight_of(dtype: torch.dtype = BF16, k: int = 16, channels: int = 24) -> Tensor:
    return (torch.randn(channels, k, 1, 1) * k**-0.5).to(dtype)


def graph_of(
    x: Tensor, weight: Tensor, norm: dict[str, Any] | None = None, **named: Any
) -> GraphModule:
    """As BatchNorm is decomposed: statistics of what the convolution stores, cast up."""
    norm = {"dim": [0, 2, 3], "correction": 0, "keepdim": True, "cast": torch.float32} | (
        norm or {}
    )
    numbers: dict[str, Any] = {"stride": [1, 1], "padding": [0, 0], "groups": 1}
    numbers |= named

    def f(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        order = numbers["stride"], numbers["padding"], [1, 1], False, [0, 0], numbers["groups"]
        z = CONVOLUTION(x, weight, None, *order)
        wide = _CAST(z, norm["cast"])
        kept = {"correction": norm["correction"], "keepdim": norm["keepdim"]}
        variance, mean = VAR_MEAN(wide, norm["dim"], **kept)
        return z, variance, mean, wide - mean

    gm = make_fx(f, tracing_mode="fake")(x, weight)
    gm.graph.eliminate_dead_code()
    return gm


def replaced(gm: GraphModule, **named: Any) -> GraphModule:
    Pixels(**({"strict": True, "on_cpu": True} | named))(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_convolution_and_its_statistics(dtype: torch.dtype) -> None:
    x, weight = x_of(dtype), weight_of(dtype)
    before = graph_of(x, weight)(x, weight)
    gm = replaced(graph_of(x, weight))
    assert CONVOLUTION not in targets(gm) and VAR_MEAN not in targets(gm)
    assert targets(gm).count(run.MANY) == 1
    for found, wanted in zip(gm(x, weight), before, strict=True):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        torch.testing.assert_close(found, wanted)
    assert gm(x, weight)[0].is_contiguous(memory_format=LAST)
    assert counters[COUNTERS] == {"convolution": 1}


@pytest.mark.parametrize("read", [0, 1])
def test_only_the_mean_or_only_the_variance_is_read(read: int) -> None:
    def f(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        z = CONVOLUTION(x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        wide = _CAST(z, torch.float32)
        return z, VAR_MEAN(wide, [0, 2, 3], correction=0, keepdim=True)[read]

    x, weight = x_of(), weight_of()
    gm = make_fx(f, tracing_mode="fake")(x, weight)
    gm.graph.eliminate_dead_code()
    wanted = gm(x, weight)
    gm = replaced(gm)
    assert VAR_MEAN not in targets(gm)
    for one, exact in zip(gm(x, weight), wanted):
        torch.testing.assert_close(one, exact)


def left(reason: str, gm: GraphModule, device: str = "cpu") -> None:
    (node,) = (n for n in gm.graph.nodes if n.target is CONVOLUTION)
    fault = Site.of(node, device)
    assert isinstance(fault, str) and reason in fault, fault
    if device == "cpu":
        assert CONVOLUTION in targets(replaced(gm))


def test_refusals() -> None:
    x, weight = x_of(), weight_of()
    left("stride is [2, 2]", graph_of(x, weight, stride=[2, 2]))
    left("padding is [1, 1]", graph_of(x, weight, padding=[1, 1]))
    left("it has groups", graph_of(x, weight_of(k=8), groups=2))
    left("it has a bias", _with_bias(x, weight, torch.randn(24, dtype=BF16)))
    wide = torch.randn(24, 16, 3, 3).to(BF16).contiguous(memory_format=LAST)
    left("more than one pixel", graph_of(x, wide))
    left("one 16-bit dtype", graph_of(x.float(), weight.float(), {"cast": torch.float64}))
    left("not multiples of 8", graph_of(x_of(k=12), weight_of(k=12)))
    left("not multiples of 8", graph_of(x, weight_of(channels=20)))
    left("not in channels_last", graph_of(x_of(last=False), weight))
    left("not on cuda", graph_of(x, weight), "cuda")
    left("empty", graph_of(x[:0], weight))
    turned = weight.transpose(0, 1).contiguous().transpose(0, 1)
    left("weight is not dense", graph_of(x, turned))
    for norm in ({"correction": 1}, {"keepdim": False}, {"dim": [0, 2]}, {"cast": torch.float64}):
        keeps = norm.get("keepdim", True)
        gm = graph_of(x, weight, norm) if keeps else _without_keepdim(x, weight)
        left("nothing asks for its statistics", gm)
    assert not counters[COUNTERS]


def _with_bias(x: Tensor, weight: Tensor, bias: Tensor) -> GraphModule:
    def f(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        z = CONVOLUTION(x, weight, bias, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        return z, *VAR_MEAN(_CAST(z, torch.float32), [0, 2, 3], correction=0, keepdim=True)

    return make_fx(f, tracing_mode="fake")(x, weight, bias)


def _without_keepdim(x: Tensor, weight: Tensor) -> GraphModule:
    def f(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        z = CONVOLUTION(x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        return z, *VAR_MEAN(_CAST(z, torch.float32), [0, 2, 3], correction=0, keepdim=False)

    return make_fx(f, tracing_mode="fake")(x, weight)


def test_a_depth_of_groups_is_no_1x1() -> None:
    """Statistics over a reshaped result, as GroupNorm's, are not those of its channels."""

    def f(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        z = CONVOLUTION(x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        wide = _CAST(z, torch.float32).reshape(3, 4, 6, 35)
        return z, *VAR_MEAN(wide, [2, 3], correction=0, keepdim=True)

    x, weight = x_of(), weight_of()
    left("nothing asks for its statistics", make_fx(f, tracing_mode="fake")(x, weight))


@pytest.mark.parametrize("ours, shape", [([1.0, 3.0, 0.9, 2.0], 2), ([1.99] * 4, None)])
def test_the_clock_decides(
    ours: list[float], shape: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the GPU's time of the library's with a pass over its result; values are compared."""
    monkeypatch.setattr(load, "runs_on", lambda spec, device: True)
    monkeypatch.setattr(pixels, "loaded", lambda specs, *rest: {*specs})
    ran: list[int] = []

    def times(key: Any, make: Callable[[], Any], device: Any) -> list[Timing]:
        ran.append(len([candidate.run() for candidate in make()]))
        return [Timing(2.0), *map(Timing, ours)]

    monkeypatch.setattr(contest, "times", times)
    real = Site.of
    monkeypatch.setattr(Site, "of", lambda node, device: real(node, "cpu"))
    gm = replaced(graph_of(x_of(), weight_of()), on_cpu=False)
    calls = [n for n in gm.graph.nodes if n.target is run.MANY]
    assert ran == [5]
    assert [run.called(n)[1][3] for n in calls] == ([] if shape is None else [shape])


def test_a_kernel_that_does_not_build_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "runs_on", lambda spec, device: True)
    monkeypatch.setattr(pixels, "loaded", lambda *rest: set())
    real = Site.of
    monkeypatch.setattr(Site, "of", lambda node, device: real(node, "cpu"))
    assert CONVOLUTION in targets(replaced(graph_of(x_of(), weight_of()), on_cpu=False))


# ---- whole models --------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """As ResNet-50 has it."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(32, 16, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(16, momentum=momentum)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(16, momentum=momentum)
        self.conv3 = nn.Conv2d(16, 32, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(32, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.norm2(self.conv2(y)))
        return torch.relu(self.norm3(self.conv3(y)) + x)


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 32, 6, 7, dtype=dtype).contiguous(memory_format=LAST)


def step(model: nn.Module, x: Tensor, f: Callable[..., Tensor]) -> dict[str, Tensor]:
    """What `trained` returns, and the running statistics."""
    names = ["y", "x", *(name for name, _ in model.named_parameters())]
    found = dict(zip(names, trained(model, x, f), strict=True))
    return found | {n: b.detach().clone() for n, b in model.named_buffers()}


class Beside:
    """A model, and copies of it that eager mode, Inductor and fx_fuser run: each has its own
    running statistics."""

    def __init__(self, model: nn.Module) -> None:
        self.models = {who: copy.deepcopy(model) for who in ("exact", "eager", "inductor", "ours")}
        self.models["exact"].double()
        named = {"ours": {"backend": "fx_fuser", "options": OPTIONS}, "inductor": {}}
        self.run: dict[str, Any] = {
            who: torch.compile(one, **named[who]) if who in named else one  # type: ignore[call-overload]
            for who, one in self.models.items()
        }

    def check(self, x: Tensor) -> None:
        """A step: ours is as near to float64 as the further of eager mode and Inductor."""
        of = {
            who: step(model, x.double() if who == "exact" else x, self.run[who])
            for who, model in self.models.items()
        }
        for name, wanted in of["exact"].items():
            off = {who: float((v[name].double() - wanted).norm()) for who, v in of.items()}
            usual = max(off["eager"], off["inductor"])
            assert off["ours"] <= 1.5 * usual + 1e-6 * float(wanted.double().norm()), (name, off)
            assert of["ours"][name].stride() == of["eager"][name].stride(), name

    def train(self, mode: bool) -> None:
        for model in self.models.values():
            model.train(mode)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_bottleneck_in_training(momentum: float | None) -> None:
    """Both of its 1 x 1 convolutions; three steps of running statistics, then evaluation, then
    training again."""
    beside = Beside(Bottleneck(momentum).to(memory_format=LAST))
    for _ in range(3):
        beside.check(images())
    if momentum is not None:  # else torch.compile parts the graph at a BatchNorm
        assert counters[COUNTERS] == {"convolution": 2}
    for mode in (False, True):
        beside.train(mode)
        beside.check(images())


@pytest.mark.slow
def test_one_pixel_a_channel_raises_as_torch_does() -> None:
    model = Bottleneck().to(memory_format=LAST)
    x = torch.randn(1, 32, 1, 1)
    with torch.autocast("cpu", BF16):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            model(x)
        with pytest.raises(Exception, match="more than 1 value per channel"):
            torch.compile(model, backend="fx_fuser", options=OPTIONS)(x)


@pytest.mark.slow
def test_inside_plain_torch_compile() -> None:
    model = Bottleneck().to(memory_format=LAST)
    with fx_fuser.installed(OPTIONS), torch.autocast("cpu", BF16):
        torch.compile(model)(images()).float().sum().backward()
    assert counters[COUNTERS] == {"convolution": 2}


def test_strides_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images arrive in channels_last, as the kernel takes them, where the graph makes them so of
    contiguous ones: by itself Inductor would copy them in the layout that they have."""
    calls = tensors_of(monkeypatch, MOMENTS)[MOMENTS]
    model = Bottleneck().to(memory_format=LAST)

    @torch.compile(backend="fx_fuser", options=OPTIONS)
    def f(x: Tensor) -> Tensor:
        made: Tensor = model(x.to(BF16).contiguous(memory_format=LAST))
        return made

    with torch.no_grad(), torch.autocast("cpu", BF16):  # what backward reads keeps its layout
        f(images().contiguous())
    assert len(calls) == 2
    assert all(x.is_contiguous(memory_format=LAST) for x, *_ in calls)


def test_a_failure_leaves_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(Site, "replace", fails)
    gm = graph_of(x_of(), weight_of())
    with pytest.warns(UserWarning, match="leaves a 1 x 1 convolution.*planted"):
        Pixels(on_cpu=True)(gm.graph)
    assert CONVOLUTION in targets(gm)
    with pytest.raises(ValueError, match="planted"):
        Pixels(on_cpu=True, strict=True)(gm.graph)
