"""16-bit convolutions along one dimension of Inductor's graphs: what is replaced and what is left,
and values and strides stay right. On a CPU our functions run in torch (`cpu_ops`); the kernels
themselves: tests/kernels/conv1d_checks.py."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fx_fuser
from fx_fuser.native import load
from fx_fuser.ops import run
from fx_fuser.passes import convolution
from fx_fuser.passes.conv1d import COUNTERS, Conv1d
from fx_fuser.passes.conv1d.site import Conv1dSite
from fx_fuser.passes.convolution.site import CONVOLUTION, CONVOLUTION_BACKWARD
from fx_fuser.planning import contest
from fx_fuser.planning.timing import Timing

BF16 = torch.bfloat16
OPTIONS = {"cpu_ops": True, "strict": True}
CHANNELS, GROUPS, TAPS = 32, 2, 19


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Where Inductor's cache has a graph, from an earlier run, no pass runs."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    with torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())):
        yield


def x_of(length: int = 40, last: bool = True, dtype: torch.dtype = BF16) -> Tensor:
    """last: are channels adjacent in memory?"""
    rows = torch.randn(2, length, CHANNELS, dtype=dtype)
    return rows.mT if last else rows.mT.contiguous()


def weight_of(taps: int = TAPS, dtype: torch.dtype = BF16, into: int = 16) -> Tensor:
    return (torch.randn(CHANNELS, into, taps) * (into * taps) ** -0.5).to(dtype)


def near(found: Tensor, exact: Tensor) -> None:
    """As near as its dtype, twice rounded on the way."""
    size = exact.double().norm()
    assert (found.double() - exact).norm() <= 2 * torch.finfo(found.dtype).eps * size


def forward_graph(*given: Any, **named: Any) -> GraphModule:
    numbers = {"padding": [9], "stride": [1], "dilation": [1], "groups": GROUPS} | named

    def f(*tensors: Any) -> Tensor:
        x, weight, *bias = tensors
        order = numbers["stride"], numbers["padding"], numbers["dilation"], False, [0]
        return CONVOLUTION(x, weight, *(bias or [None]), *order, numbers["groups"])

    return make_fx(f, tracing_mode="fake")(*given)


def backward_graph(*given: Tensor, asked: Sequence[bool], padding: int = 9) -> GraphModule:
    def f(dz: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        numbers = [1], [padding], [1], False, [0], GROUPS, [*asked]
        made = CONVOLUTION_BACKWARD(dz, x, weight, [CHANNELS], *numbers)
        return [made[i] for i in range(3) if asked[i]]

    return make_fx(f, tracing_mode="fake")(*given)


def targets(gm: GraphModule) -> list[Any]:
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


def replaced(gm: GraphModule, **named: Any) -> GraphModule:
    gm.graph.eliminate_dead_code()
    Conv1d(**({"strict": True, "on_cpu": True} | named))(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


def exact_of(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    doubled = None if bias is None else bias.double()
    return F.conv1d(x.double(), weight.double(), doubled, padding=padding, groups=GROUPS)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("taps, padding", [(19, 9), (16, 0), (16, 8), (35, 34)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_forward(dtype: torch.dtype, taps: int, padding: int, biased: bool, last: bool) -> None:
    x, weight = x_of(last=last, dtype=dtype), weight_of(taps, dtype)
    bias = [torch.randn(CHANNELS, dtype=dtype)] if biased else []
    gm = replaced(forward_graph(x, weight, *bias, padding=[padding]))
    assert CONVOLUTION not in targets(gm) and run.ONE in targets(gm)
    # Of x a copy where channels are not adjacent; and one of the weight, and of the result.
    assert targets(gm).count(torch.ops.aten.clone.default) == (2 if last else 3)
    found = gm(x, weight, *bias)
    near(found, exact_of(x, weight, bias[0] if bias else None, padding))
    assert found.is_contiguous()
    assert counters[COUNTERS] == {"convolution": 1}


ASKED = [(True, True, True), (True, False, False), (False, True, False), (False, True, True)]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("taps, padding", [(19, 9), (16, 0), (16, 8), (35, 34)])
@pytest.mark.parametrize("last", [True, False])
def test_backward(last: bool, taps: int, padding: int, asked: tuple[bool, ...]) -> None:
    x, weight = x_of(last=last), weight_of(taps)
    bias = torch.zeros(CHANNELS, dtype=BF16)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    z = F.conv1d(*leaves, padding=padding, groups=GROUPS)
    dz = torch.randn(z.shape).to(BF16)
    exact = torch.autograd.grad(z, leaves, dz.double())
    gm = replaced(backward_graph(dz, x, weight, asked=asked, padding=padding))
    assert CONVOLUTION_BACKWARD not in targets(gm)
    assert targets(gm).count(run.ONE) == sum(asked[:2])
    found = gm(dz, x, weight)
    assert len(found) == sum(asked)
    for ours, wanted in zip(found, [e for e, is_asked in zip(exact, asked) if is_asked]):
        near(ours, wanted)
        assert ours.is_contiguous() and ours.shape == wanted.shape
    assert counters[COUNTERS] == {"convolution_backward": 1}


def test_a_gradient_that_is_one_number_everywhere() -> None:
    x, weight = x_of(), weight_of()
    dz = torch.ones((), dtype=BF16).expand(2, CHANNELS, 40)
    gm = replaced(backward_graph(dz, x, weight, asked=(True, True, True)))
    given = dz.double(), x.double(), weight.double()
    exact = backward_graph(*given, asked=(True, True, True))(*given)
    for ours, wanted in zip(gm(dz, x, weight), exact):
        near(ours, wanted)


def left(reason: str, *given: Tensor, device: str = "cpu", **named: Any) -> None:
    gm = forward_graph(*given, **named)
    (node,) = (n for n in gm.graph.nodes if n.target is CONVOLUTION)
    fault = Conv1dSite.of(node, device)
    assert isinstance(fault, str) and reason in fault, fault
    if device == "cpu":
        assert CONVOLUTION in targets(replaced(gm))


def test_refusals() -> None:
    x, weight = x_of(), weight_of()
    left("stride is [2]", x, weight, stride=[2])
    left("dilation is [2]", x, weight, dilation=[2], padding=[18])
    left("one group", x_of()[:, :16], weight, groups=1)
    left("15 taps", x, weight_of(15))
    left("padding is 19", x, weight, padding=[19])
    left("groups have 4 and 4 channels", x[:, :32], weight_of(into=4), groups=8)
    left("one 16-bit dtype", x.float(), weight.float())
    left("not on cuda", x, weight, device="cuda")
    left("empty", x[:0], weight)
    left("weight is not contiguous", x, weight.mT.contiguous().mT)
    images = torch.randn(2, CHANNELS, 20, 20, dtype=BF16)
    kernel = torch.randn(CHANNELS, 16, 3, 3, dtype=BF16)
    left("dimensions", images, kernel, stride=[1, 1], padding=[1, 1], dilation=[1, 1])
    assert not counters[COUNTERS]


def test_transposed_convolutions_are_left() -> None:
    x, weight = x_of(), torch.randn(CHANNELS, 16, TAPS, dtype=BF16)

    def f(x: Tensor, weight: Tensor) -> Tensor:
        return CONVOLUTION(x, weight, None, [1], [9], [1], True, [0], GROUPS)

    gm = replaced(make_fx(f, tracing_mode="fake")(x, weight))
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
    real = Conv1dSite.of
    monkeypatch.setattr(Conv1dSite, "of", lambda node, device: real(node, "cpu"))
    for gm in (
        forward_graph(x_of(), weight_of()),
        backward_graph(x_of(), x_of(), weight_of(), asked=(True, True, True)),
    ):
        gm = replaced(gm, on_cpu=False)
        assert (run.ONE in targets(gm)) == is_taken
    assert [len(results) for of_site in made for results in of_site] == [1, 1, 3, 3]
    for library, found in made:
        for wanted, value in zip(library, found):
            near(value, wanted)
            assert value.stride() == wanted.stride()


def test_a_kernel_that_does_not_build_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "runs_on", lambda spec, device: True)
    monkeypatch.setattr(convolution, "loaded", lambda *rest: set())
    real = Conv1dSite.of
    monkeypatch.setattr(Conv1dSite, "of", lambda node, device: real(node, "cpu"))
    gm = replaced(forward_graph(x_of(), weight_of()), on_cpu=False)
    assert CONVOLUTION in targets(gm)


# ---- whole models --------------------------------------------------------------------------------


class Positional(nn.Module):
    """As Wav2Vec2 has it: SamePad cuts the last frame where taps are even."""

    def __init__(self, taps: int = 16, bias: bool = True) -> None:
        super().__init__()
        conv = nn.Conv1d(CHANNELS, CHANNELS, taps, padding=taps // 2, groups=GROUPS, bias=bias)
        self.conv = nn.utils.parametrizations.weight_norm(conv, name="weight", dim=2)
        self.cut = 1 - taps % 2

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x.transpose(1, 2))
        z = F.gelu(z[:, :, : -self.cut] if self.cut else z)
        return x + z.transpose(1, 2)


def trained(model: nn.Module, x: Tensor, f: Callable[..., Tensor]) -> list[Tensor]:
    model.zero_grad()
    given = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", BF16):
        y = f(given)
    y.float().square().sum().backward()
    assert given.grad is not None
    return [
        y.detach(),
        given.grad,
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
    ]


def check(model: nn.Module, x: Tensor, f: Callable[..., Tensor]) -> None:
    eager, found = trained(model, x, model), trained(model, x, f)
    exact = trained(model.double(), x.double(), model)  # which autocast leaves as it is
    model.float()
    for ours, usual, wanted in zip(found, eager, exact):
        error, theirs = (float((v.double() - wanted).norm()) for v in (ours, usual))
        assert error <= 1.5 * theirs + 1e-6 * float(wanted.norm())
        assert ours.stride() == usual.stride()


ODD = pytest.param(17, False, marks=pytest.mark.slow)


@pytest.mark.parametrize("taps, bias", [(16, True), ODD])
def test_a_positional_convolution_in_training(taps: int, bias: bool) -> None:
    model = Positional(taps, bias)
    f = torch.compile(model, backend="fx_fuser", options=OPTIONS)
    x = torch.randn(2, 40, CHANNELS)
    check(model, x, f)
    assert counters[COUNTERS] == {"convolution": 1, "convolution_backward": 1}
    with torch.no_grad():  # a second step with other weights
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    check(model, x, f)


@pytest.mark.slow
def test_gradients_of_the_weight_alone() -> None:
    model = Positional()
    f = torch.compile(model, backend="fx_fuser", options=OPTIONS)
    x = torch.randn(2, 40, CHANNELS)
    with torch.autocast("cpu", BF16):
        f(x).float().sum().backward()
    assert counters[COUNTERS] == {"convolution": 1, "convolution_backward": 1}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
def test_inference_in_16_bits_with_other_batches() -> None:
    model = Positional().to(BF16).eval()
    f = torch.compile(model, backend="fx_fuser", options=OPTIONS, dynamic=True)
    for batch, length in ((2, 40), (3, 40), (5, 57)):
        x = torch.randn(batch, length, CHANNELS, dtype=BF16)
        with torch.no_grad():
            near(f(x), model(x))
    assert counters[COUNTERS]["convolution"] >= 1


class _Counting(CustomGraphPass):
    def __init__(self) -> None:
        self.ran = 0

    def __call__(self, graph: Graph) -> None:
        self.ran += 1

    def uuid(self) -> Any:
        return str(uuid.uuid4())


@pytest.mark.slow
def test_a_pass_of_the_users_runs_first() -> None:
    counting = _Counting()
    options = {**OPTIONS, "post_grad_custom_post_pass": counting}
    model = Positional().to(BF16).eval()
    f = torch.compile(model, backend="fx_fuser", options=options)
    with torch.no_grad():
        f(torch.randn(2, 40, CHANNELS, dtype=BF16))
    assert counting.ran and counters[COUNTERS] == {"convolution": 1}


@pytest.mark.slow
def test_inside_plain_torch_compile() -> None:
    model = Positional().to(BF16).eval()
    x = torch.randn(2, 40, CHANNELS, dtype=BF16)
    with fx_fuser.installed(OPTIONS), torch.no_grad():
        near(torch.compile(model)(x), model(x))
    assert counters[COUNTERS] == {"convolution": 1}


def test_a_failure_leaves_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(Conv1dSite, "replace", fails)
    gm = forward_graph(x_of(), weight_of())
    with pytest.warns(UserWarning, match="leaves a convolution.*planted"):
        Conv1d(on_cpu=True)(gm.graph)
    assert CONVOLUTION in targets(gm)
    with pytest.raises(ValueError, match="planted"):
        Conv1d(on_cpu=True, strict=True)(gm.graph)
