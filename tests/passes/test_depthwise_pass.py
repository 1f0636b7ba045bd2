"""16-bit depthwise convolutions of Inductor's graphs: what is replaced and what is left, and values
and strides stay right. On a CPU our functions run in torch (`cpu_ops`); the kernels themselves:
tests/kernels/depthwise_gradient_checks.py."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_conv1d_pass import near, targets, trained
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fx_fuser.native import load
from fx_fuser.ops import run
from fx_fuser.passes import convolution
from fx_fuser.passes.convolution.site import CONVOLUTION, CONVOLUTION_BACKWARD
from fx_fuser.passes.depthwise import COUNTERS, Depthwise
from fx_fuser.passes.depthwise.site import DepthwiseSite
from fx_fuser.planning import contest
from fx_fuser.planning.timing import Timing

BF16 = torch.bfloat16
OPTIONS = {"cpu_ops": True, "strict": True}
LAST = torch.channels_last
CHANNELS = 12


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Where Inductor's cache has a graph, from an earlier run, no pass runs."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    with torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())):
        yield


def x_of(side: int = 14, dtype: torch.dtype = BF16, channels: int = CHANNELS) -> Tensor:
    return torch.randn(2, channels, side, side + 1).to(dtype, memory_format=LAST)


def weight_of(window: int = 7, dtype: torch.dtype = BF16, channels: int = CHANNELS) -> Tensor:
    return (torch.randn(channels, 1, window, window) / window).to(dtype)


def numbers_of(padding: int, stride: int = 1, **named: Any) -> list[Any]:
    usual = {
        "strides": [stride, stride],
        "padding": [padding, padding],
        "dilation": [1, 1],
        "transposed": False,
        "output_padding": [0, 0],
        "groups": CHANNELS,
    }
    return [*(usual | named).values()]


def forward_graph(*given: Tensor, padding: int = 3, **named: Any) -> GraphModule:
    numbers = numbers_of(padding, **named)

    def f(*tensors: Tensor) -> Tensor:
        x, weight, *bias = tensors
        return CONVOLUTION(x, weight, *(bias or [None]), *numbers)

    return make_fx(f, tracing_mode="fake")(*given)


def backward_graph(
    *given: Tensor, asked: Sequence[bool], padding: int = 3, stride: int = 1
) -> GraphModule:
    def f(dz: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        numbers = *numbers_of(padding, stride), [*asked]
        made = CONVOLUTION_BACKWARD(dz, x, weight, [CHANNELS], *numbers)
        return [made[i] for i in range(3) if asked[i]]

    return make_fx(f, tracing_mode="fake")(*given)


def results_of(gm: GraphModule) -> list[Tensor]:
    """Fake: with the strides that torch says they have."""
    (made,) = gm.graph.output_node().args
    nodes = made if isinstance(made, (list, tuple)) else [made]
    return [node.meta["val"] for node in nodes]  # type: ignore[union-attr]


def replaced(gm: GraphModule, **named: Any) -> GraphModule:
    gm.graph.eliminate_dead_code()
    Depthwise(**({"strict": True, "on_cpu": True} | named))(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


SIZES = [(3, 1, 1), (3, 1, 2), (7, 3, 1), (7, 0, 1), (5, 2, 2), (11, 10, 1), (9, 1, 2)]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("window, padding, stride", SIZES)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_forward(dtype: torch.dtype, window: int, padding: int, stride: int, biased: bool) -> None:
    x, weight = x_of(dtype=dtype), weight_of(window, dtype)
    bias = [torch.randn(CHANNELS, dtype=dtype)] if biased else []
    gm = forward_graph(x, weight, *bias, padding=padding, stride=stride)
    (like,) = results_of(gm)
    gm = replaced(gm)
    assert CONVOLUTION not in targets(gm) and run.ONE in targets(gm)
    assert torch.ops.aten.clone.default not in targets(gm)
    found = gm(x, weight, *bias)
    doubled = [t.double() for t in (x, weight, *bias)]
    near(found, F.conv2d(*doubled, stride=stride, padding=padding, groups=CHANNELS))
    assert found.stride() == like.stride() and found.is_contiguous(memory_format=LAST)
    assert counters[COUNTERS] == {"convolution": 1}


ASKED = [(True, True, True), (True, False, False), (False, True, False), (False, True, True)]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("window, padding, stride", SIZES)
def test_backward(window: int, padding: int, stride: int, asked: tuple[bool, ...]) -> None:
    x, weight = x_of(), weight_of(window)
    leaves = [t.double().requires_grad_() for t in (x, weight, torch.zeros(CHANNELS))]
    z = F.conv2d(*leaves, stride=stride, padding=padding, groups=CHANNELS)
    dz = torch.randn(z.shape).to(BF16, memory_format=LAST)
    exact = torch.autograd.grad(z, leaves, dz.double())
    gm = backward_graph(dz, x, weight, asked=asked, padding=padding, stride=stride)
    likes = results_of(gm)
    gm = replaced(gm)
    assert CONVOLUTION_BACKWARD not in targets(gm)
    assert targets(gm).count(run.ONE) == sum(asked[:2])
    found = gm(dz, x, weight)
    wanted = [e for e, is_asked in zip(exact, asked) if is_asked]
    assert len(found) == len(wanted) == sum(asked)
    for ours, one, like in zip(found, wanted, likes):
        near(ours, one)
        assert ours.stride() == like.stride() and ours.shape == like.shape
    assert counters[COUNTERS] == {"convolution_backward": 1}


@pytest.mark.parametrize("last", [True, False])
def test_operands_in_other_layouts_are_copied(last: bool) -> None:
    """A gradient that is one number everywhere; x that begins in the middle of a vector."""
    x, weight = x_of(), weight_of()
    dz = torch.ones((), dtype=BF16).expand(x.shape)
    if not last:
        memory = torch.randn(x.numel() + 1).to(BF16)
        x = memory[1:].as_strided(x.shape, x.stride())
    gm = replaced(backward_graph(dz, x, weight, asked=(True, True, True)))
    assert targets(gm).count(torch.ops.aten.clone.default) == (1 if last else 2)
    given = dz.double(), x.double(), weight.double()
    exact = backward_graph(*given, asked=(True, True, True))(*given)
    for ours, wanted in zip(gm(dz, x, weight), exact):
        near(ours, wanted)


@pytest.mark.parametrize("asked", ASKED)
def test_one_number_stands_for_both_dimensions(asked: tuple[bool, ...]) -> None:
    """As torch has the padding of "valid", in both directions."""
    x, weight, numbers = x_of(), weight_of(), ([1], [0], [1], False, [0], CHANNELS)

    def f(dz: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        made = CONVOLUTION_BACKWARD(dz, x, weight, [CHANNELS], *numbers, [*asked])
        return [CONVOLUTION(x, weight, None, *numbers), *(made[i] for i in range(3) if asked[i])]

    given = F.conv2d(x, weight, padding="valid", groups=CHANNELS), x, weight
    gm = replaced(make_fx(f, tracing_mode="fake")(*given))
    assert not {CONVOLUTION, CONVOLUTION_BACKWARD} & {*targets(gm)}
    for ours, exact in zip(gm(*given), f(*(t.double() for t in given)), strict=True):
        near(ours, exact)


def left(reason: str, *given: Tensor, device: str = "cpu", **named: Any) -> None:
    gm = forward_graph(*given, **named)
    (node,) = (n for n in gm.graph.nodes if n.target is CONVOLUTION)
    fault = DepthwiseSite.of(node, device)
    assert isinstance(fault, str) and reason in fault, fault
    if device == "cpu":
        assert CONVOLUTION in targets(replaced(gm))


def test_refusals() -> None:
    x, weight = x_of(), weight_of()
    left("stride is [3, 3]", x, weight, stride=3)
    left("dilation is [2, 2]", x, weight, dilation=[2, 2])
    left("window is [4, 4]", x, weight_of(4))
    left("window is [13, 13]", x, weight_of(13))
    left("window is [7, 5]", x, weight[..., :5].contiguous())
    left("padding is [7, 7]", x, weight, padding=7)
    left("not depthwise", x, torch.randn(2 * CHANNELS, 1, 7, 7).to(BF16))
    left("not depthwise", x, torch.randn(CHANNELS, 2, 7, 7).to(BF16), groups=CHANNELS // 2)
    left("window is", x_of(channels=9), weight_of(channels=9), groups=9)
    left("one 16-bit dtype", x.float(), weight.float())
    left("not on cuda", x, weight, device="cuda")
    left("empty", x[:0], weight)
    left("weight is not contiguous", x, weight.mT)
    left("not in channels_last", x.contiguous(), weight)
    assert not counters[COUNTERS]


def test_other_convolutions_are_left() -> None:
    x, weight = x_of(), torch.randn(CHANNELS, 1, 7, 7).to(BF16)
    left("stride is [2, 1]", x, weight, strides=[2, 1])
    left("transposed", x, weight, transposed=True)
    line, of_line = torch.randn(2, CHANNELS, 20).to(BF16), torch.randn(CHANNELS, 1, 7).to(BF16)

    def f(x: Tensor, weight: Tensor) -> Tensor:
        return CONVOLUTION(x, weight, None, [1], [3], [1], False, [0], CHANNELS)

    gm = replaced(make_fx(f, tracing_mode="fake")(line, of_line))
    assert CONVOLUTION in targets(gm) and not counters[COUNTERS]


@pytest.mark.parametrize("ours, is_taken", [(1.0, True), (1.99, False), (3.0, False)])
def test_the_clock_decides(ours: float, is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the GPU's time of the library's, and of ours with all copies; values are compared."""
    monkeypatch.setattr(load, "runs_on", lambda spec, device: True)
    monkeypatch.setattr(convolution, "loaded", lambda specs, *rest: {*specs})
    made: list[list[Any]] = []

    def times(key: Any, make: Callable[[], Any], device: Any) -> list[Timing]:
        made.append([candidate.run() for candidate in make()])
        return [Timing(2.0), Timing(ours)]

    monkeypatch.setattr(contest, "times", times)
    real = DepthwiseSite.of
    monkeypatch.setattr(DepthwiseSite, "of", lambda node, device: real(node, "cpu"))
    for gm in (
        forward_graph(x_of(), weight_of(), torch.randn(CHANNELS).to(BF16)),
        backward_graph(x_of(), x_of(), weight_of(), asked=(True, True, True)),
    ):
        gm = replaced(gm, on_cpu=False)
        assert (run.ONE in targets(gm)) == is_taken
    assert [len(results) for of_site in made for results in of_site] == [1, 1, 3, 3]
    for library, found in made:
        for wanted, value in zip(library, found):
            near(value, wanted)


def test_a_kernel_that_does_not_build_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "runs_on", lambda spec, device: True)
    monkeypatch.setattr(convolution, "loaded", lambda *rest: set())
    real = DepthwiseSite.of
    monkeypatch.setattr(DepthwiseSite, "of", lambda node, device: real(node, "cpu"))
    gm = replaced(forward_graph(x_of(), weight_of()), on_cpu=False)
    assert CONVOLUTION in targets(gm)


# ---- whole models --------------------------------------------------------------------------------


class Block(nn.Module):
    """As ConvNeXt has it. By `torch.convolution`, which is no site: with `cpu_ops` every `conv2d`
    is fused."""

    def __init__(self, window: int = 7, stride: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_of(window, torch.float32))
        self.numbers = numbers_of(window // 2, stride)
        self.norm = nn.LayerNorm(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x, weight = (t if t.dtype == torch.float64 else t.to(BF16) for t in (x, self.weight))
        z = torch.convolution(x, weight, None, *self.numbers)
        return F.gelu(self.norm(z.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def check(model: nn.Module, x: Tensor, f: Callable[..., Tensor]) -> None:
    eager, found = trained(model, x, model), trained(model, x, f)
    exact = trained(model.double(), x.double(), model)  # which autocast leaves as it is
    model.float()
    for ours, usual, wanted in zip(found, eager, exact):
        error, theirs = (float((v.double() - wanted).norm()) for v in (ours, usual))
        assert error <= 1.5 * theirs + 1e-6 * float(wanted.norm())
        assert ours.stride() == usual.stride()


STRIDED = pytest.param(5, 2, marks=pytest.mark.slow)


@pytest.mark.parametrize("window, stride", [(7, 1), STRIDED])
def test_a_block_in_training(window: int, stride: int) -> None:
    model = Block(window, stride)
    f = torch.compile(model, backend="fx_fuser", options=OPTIONS)
    x = x_of(dtype=torch.float32)
    check(model, x, f)
    assert counters[COUNTERS] == {"convolution": 1, "convolution_backward": 1}
    with torch.no_grad():  # a second step with other weights
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    check(model, x, f)


@pytest.mark.slow
def test_gradients_of_the_weight_alone() -> None:
    model = Block()
    f = torch.compile(model, backend="fx_fuser", options=OPTIONS)
    with torch.autocast("cpu", BF16):
        f(x_of(dtype=torch.float32)).float().sum().backward()
    assert counters[COUNTERS] == {"convolution": 1, "convolution_backward": 1}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_failure_leaves_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(DepthwiseSite, "replace", fails)
    gm = forward_graph(x_of(), weight_of())
    with pytest.warns(UserWarning, match="leaves a depthwise convolution.*planted"):
        Depthwise(on_cpu=True)(gm.graph)
    assert CONVOLUTION in targets(gm)
    with pytest.raises(ValueError, match="planted"):
        Depthwise(on_cpu=True, strict=True)(gm.graph)


def test_kernels_of_a_graph_are_built_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def loaded(specs: Sequence[Any], *rest: Any) -> set[Any]:
        asked.append(len(specs))
        return set()

    monkeypatch.setattr(load, "runs_on", lambda spec, device: True)
    monkeypatch.setattr(convolution, "loaded", loaded)
    real = DepthwiseSite.of
    monkeypatch.setattr(DepthwiseSite, "of", lambda node, device: real(node, "cpu"))

    def f(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        z = CONVOLUTION(x, weight, None, *numbers_of(3))
        return CONVOLUTION(z, other, None, *numbers_of(1, 2))

    gm = make_fx(f, tracing_mode="fake")(x_of(), weight_of(7), weight_of(3))
    replaced(gm, on_cpu=False)
    assert asked == [2, 1, 1]
