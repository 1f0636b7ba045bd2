"""16-bit convolutions in groups of Inductor's graphs: what is replaced and what is left, and values
and strides stay right. On a CPU our functions run in torch (`cpu_ops`); the kernels themselves:
tests/kernels/grouped_checks.py."""

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
from fx_fuser.passes import convolution, grouped
from fx_fuser.passes.convolution.site import CONVOLUTION, CONVOLUTION_BACKWARD
from fx_fuser.passes.grouped import COUNTERS, Grouped
from fx_fuser.passes.grouped.site import GroupedSite
from fx_fuser.planning import contest
from fx_fuser.planning.timing import Timing

BF16 = torch.bfloat16
OPTIONS = {"cpu_ops": True, "strict": True}
LAST = torch.channels_last
CHANNELS, GROUPS = 48, 6


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where Inductor's cache has a graph, from an earlier run, no pass runs."""
    monkeypatch.setattr(grouped, "OFFERED", True)
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    with torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())):
        yield


def x_of(side: int = 14, dtype: torch.dtype = BF16, channels: int = CHANNELS) -> Tensor:
    return torch.randn(2, channels, side, side + 1).to(dtype, memory_format=LAST)


def weight_of(
    window: int = 3, dtype: torch.dtype = BF16, inputs: int = CHANNELS // GROUPS
) -> Tensor:
    return (torch.randn(CHANNELS, inputs, window, window) / window / inputs**0.5).to(dtype)


def numbers_of(padding: int, stride: int = 1, **named: Any) -> list[Any]:
    usual = {
        "strides": [stride, stride],
        "padding": [padding, padding],
        "dilation": [1, 1],
        "transposed": False,
        "output_padding": [0, 0],
        "groups": GROUPS,
    }
    return [*(usual | named).values()]


def forward_graph(*given: Tensor, padding: int = 1, **named: Any) -> GraphModule:
    numbers = numbers_of(padding, **named)

    def f(*tensors: Tensor) -> Tensor:
        x, weight, *bias = tensors
        return CONVOLUTION(x, weight, *(bias or [None]), *numbers)

    return make_fx(f, tracing_mode="fake")(*given)


def backward_graph(
    *given: Tensor, asked: Sequence[bool], padding: int = 1, stride: int = 1
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
    Grouped(**({"strict": True, "on_cpu": True} | named))(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


SIZES = [(3, 1, 1), (3, 1, 2), (1, 0, 1), (7, 0, 1), (5, 4, 2)]


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
    near(found, F.conv2d(*doubled, stride=stride, padding=padding, groups=GROUPS))
    assert found.stride() == like.stride() and found.is_contiguous(memory_format=LAST)
    assert counters[COUNTERS] == {"convolution": 1}


ASKED = [(True, True, True), (True, False, False), (False, True, False), (False, True, True)]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("window, padding, stride", SIZES)
def test_backward(window: int, padding: int, stride: int, asked: tuple[bool, ...]) -> None:
    x, weight = x_of(), weight_of(window)
    leaves = [t.double().requires_grad_() for t in (x, weight, torch.zeros(CHANNELS))]
    z = F.conv2d(*leaves, stride=stride, padding=padding, groups=GROUPS)
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


def left(reason: str, *given: Tensor, device: str = "cpu", **named: Any) -> None:
    gm = forward_graph(*given, **named)
    (node,) = (n for n in gm.graph.nodes if n.target is CONVOLUTION)
    fault = GroupedSite.of(node, device)
    assert isinstance(fault, str) and reason in fault, fault
    if device == "cpu":
        assert CONVOLUTION in targets(replaced(gm))


def test_a_gradient_of_a_weight_in_channels_last() -> None:
    x, weight = x_of(), weight_of().to(memory_format=LAST)
    dz = torch.randn(x.shape).to(BF16, memory_format=LAST)
    gm = backward_graph(dz, x, weight, asked=(True, True, False))
    likes = results_of(gm)
    gm = replaced(gm)
    assert CONVOLUTION_BACKWARD not in targets(gm)
    given = dz.double(), x.double(), weight.double()
    exact = backward_graph(*given, asked=(True, True, False))(*given)
    for ours, wanted, like in zip(gm(dz, x, weight), exact, likes):
        near(ours, wanted)
        assert ours.stride() == like.stride()


def test_refusals() -> None:
    x, weight = x_of(), weight_of()
    left("its 1 groups", x, weight_of(inputs=CHANNELS), groups=1)
    left("groups have 1 and 1", x, weight_of(inputs=1), groups=CHANNELS)
    left("groups have 17 and 1", x_of(channels=17 * 48), weight_of(inputs=17), groups=48)
    left("padding is [3, 3]", x, weight, padding=3)
    left("one 16-bit dtype", x.float(), weight.float())
    left("not on cuda", x, weight, device="cuda")
    left("empty", x[:0], weight)
    left("transposed", x, weight, transposed=True)
    left("not in channels_last", x.contiguous(), weight)
    assert not counters[COUNTERS]


def test_a_stride_beyond_the_window_has_no_gradient_here() -> None:
    x, weight = x_of(), weight_of(1)
    dz = torch.randn(2, CHANNELS, 7, 8).to(BF16, memory_format=LAST)
    for asked, is_left in (((True, False, False), True), ((False, True, False), False)):
        gm = replaced(backward_graph(dz, x, weight, asked=asked, padding=0, stride=2))
        assert (CONVOLUTION_BACKWARD in targets(gm)) == is_left


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
    real = GroupedSite.of
    monkeypatch.setattr(GroupedSite, "of", lambda node, device: real(node, "cpu"))
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
    real = GroupedSite.of
    monkeypatch.setattr(GroupedSite, "of", lambda node, device: real(node, "cpu"))
    gm = replaced(forward_graph(x_of(), weight_of()), on_cpu=False)
    assert CONVOLUTION in targets(gm)


# ---- whole models --------------------------------------------------------------------------------


class Block(nn.Module):
    """As RegNet has it, with another norm. By `torch.convolution`, which is no site: with `cpu_ops`
    every `conv2d` is fused."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_of(3, torch.float32))
        self.numbers = numbers_of(1, stride)
        self.norm = nn.LayerNorm(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x, weight = (t if t.dtype == torch.float64 else t.to(BF16) for t in (x, self.weight))
        z = torch.convolution(x, weight, None, *self.numbers)
        return F.relu(self.norm(z.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def check(model: nn.Module, x: Tensor, f: Callable[..., Tensor]) -> None:
    eager, found = trained(model, x, model), trained(model, x, f)
    exact = trained(model.double(), x.double(), model)  # which autocast leaves as it is
    model.float()
    for ours, usual, wanted in zip(found, eager, exact):
        error, theirs = (float((v.double() - wanted).norm()) for v in (ours, usual))
        assert error <= 1.5 * theirs + 1e-6 * float(wanted.norm())
        assert ours.stride() == usual.stride()


@pytest.mark.parametrize("stride", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_block_in_training(stride: int) -> None:
    model = Block(stride)
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


def test_it_is_not_offered_without_its_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "OFFERED", False)
    model = Block().eval()
    f = torch.compile(model, backend="fx_fuser", options=OPTIONS)
    with torch.no_grad():
        f(x_of(dtype=torch.float32))
    assert not counters[COUNTERS]


def test_a_failure_leaves_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(GroupedSite, "replace", fails)
    gm = forward_graph(x_of(), weight_of())
    with pytest.warns(UserWarning, match="leaves a grouped convolution.*planted"):
        Grouped(on_cpu=True)(gm.graph)
    assert CONVOLUTION in targets(gm)
    with pytest.raises(ValueError, match="planted"):
        Grouped(on_cpu=True, strict=True)(gm.graph)
