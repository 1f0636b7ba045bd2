"""Gemms from planes in Inductor's graphs: which tensors have one plane for several gemms, what is
computed. On a CPU the ops round to fp16 as the kernels do."""

from __future__ import annotations

import random
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.high_accuracy import ALLOWED, to_tf32
from benchmarks.sm90 import relative, worst_row
from fx_fuser.kernels import planes as of_kernels
from fx_fuser.passes.planes import COUNTERS, PlaneProducts
from fx_fuser.planning import plan

_PLANE = torch.ops.fx_fuser.plane.default
_PRODUCT = torch.ops.fx_fuser.planes_product.default
_aten = torch.ops.aten


def passed(function: Callable[..., object], *given: Tensor, mode: str = "fake") -> GraphModule:
    gm = make_fx(function, tracing_mode=mode)(*given)
    PlaneProducts(strict=True, on_cpu=True)(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


def counts(gm: GraphModule) -> tuple[int, int]:
    """Planes and products."""
    targets = [node.target for node in gm.graph.nodes]
    return targets.count(_PLANE), targets.count(_PRODUCT)


class Judge(Interpreter):
    """Runs a graph and holds each product to the contract: at most ALLOWED times the error of TF32
    by round-to-nearest, over the result and in its worst row."""

    def run_node(self, n: Node) -> Any:
        made = super().run_node(n)
        if n.target == _PRODUCT:
            (a, b, *_), _ = self.fetch_args_kwargs_from_env(n)
            sums, factors = made
            found, exact = sums * factors[0] * factors[1], a.double() @ b.double()
            near = to_tf32(a).double() @ to_tf32(b).double()
            for of in (relative, worst_row):
                errors = (of(v.flatten(0, -2), exact.flatten(0, -2)) for v in (found, near))
                ours, allowed = errors
                assert ours <= ALLOWED * allowed + 1e-7, (of.__name__, n, ours, allowed)
        return made


def agrees(gm: GraphModule, function: Callable[..., Any], *given: Tensor) -> None:
    for found, exact in zip(Judge(gm).run(*given), function(*(v.double() for v in given))):
        assert relative(found, exact) < 2e-3


# ---- which share a plane -------------------------------------------------------------------------


def test_forward_and_both_gradients_read_three_planes() -> None:
    x, weight, dz = torch.randn(6, 8), torch.randn(5, 8), torch.randn(6, 5)

    def step(x: Tensor, weight: Tensor, dz: Tensor) -> list[Tensor]:
        return [x @ weight.t(), dz @ weight, dz.t() @ x, (x.t() @ dz).t()]

    gm = passed(step, x, weight, dz)
    assert counts(gm) == (3, 4)
    agrees(gm, step, x, weight, dz)


def test_batches_share_planes() -> None:
    """Attention as written, with the gradients of its products."""
    q, k, v, do = (torch.randn(4, 6, 8) for _ in range(4))

    def step(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
        p = torch.softmax(q @ k.mT, -1)
        ds = do @ v.mT
        return [p @ v, p.mT @ do, ds @ k, ds.mT @ q]

    gm = passed(step, q, k, v, do)
    assert counts(gm) == (6, 6)
    agrees(gm, step, q, k, v, do)


def test_views_of_one_memory_share_a_plane() -> None:
    x, w, v = torch.randn(2, 3, 8), torch.randn(8, 6), torch.randn(8, 4)

    def projections(x: Tensor, w: Tensor, v: Tensor) -> list[Tensor]:
        return [x.view(6, 8) @ w, x.view(6, 8) @ v, x.view(3, 16).view(6, 8).t() @ x.view(6, 8)]

    gm = passed(projections, x, w, v)
    assert counts(gm) == (3, 3)
    agrees(gm, projections, x, w, v)


def test_parts_of_one_memory_have_planes_of_their_own() -> None:
    x, w = torch.randn(12, 8), torch.randn(8, 6)

    def halves(x: Tensor, w: Tensor) -> list[Tensor]:
        return [x[:6] @ w, x[6:] @ w, x[:, 1:7] @ w[:6]]

    gm = passed(halves, x, w)
    assert counts(gm) == (5, 3)
    agrees(gm, halves, x, w)


def test_an_addend_is_added() -> None:
    bias, x, weight = torch.randn(5), torch.randn(6, 8), torch.randn(5, 8)

    def linear(b: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        return [torch.addmm(b, x, w.t())]

    gm = passed(linear, bias, x, weight)
    assert counts(gm) == (2, 1)
    agrees(gm, linear, bias, x, weight)


def test_an_addend_of_a_batch_is_added() -> None:
    c, a, b = torch.randn(2, 6, 5), torch.randn(2, 6, 8), torch.randn(2, 8, 5)

    def function(c: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        return [torch.baddbmm(c, a, b)]

    gm = passed(function, c, a, b)
    assert counts(gm) == (2, 1)
    agrees(gm, function, c, a, b)


@pytest.mark.parametrize(
    ("why", "a", "b"),
    [
        ("16 bits", torch.randn(6, 8).half(), torch.randn(8, 5).half()),
        ("float64", torch.randn(6, 8).double(), torch.randn(8, 5).double()),
        ("neither adjacent", torch.randn(6, 16)[:, ::2], torch.randn(8, 5)),
        ("one row", torch.randn(1, 8), torch.randn(8, 5)),
        ("one column", torch.randn(6, 8), torch.randn(8, 1)),
        ("expanded", torch.randn(1, 8).expand(6, 8), torch.randn(8, 5)),
    ],
)
def test_stays(why: str, a: Tensor, b: Tensor) -> None:
    assert counts(passed(torch.mm, a, b)) == (0, 0), why


def test_a_batch_that_shares_a_matrix_stays() -> None:
    a, b = torch.randn(3, 6, 8), torch.randn(8, 5)
    assert counts(passed(lambda a, b: torch.bmm(a, b.expand(3, 8, 5)), a, b)) == (0, 0)


def test_a_factor_of_addmm_stays() -> None:
    given = torch.randn(6, 5), torch.randn(6, 8), torch.randn(8, 5)
    gm = passed(lambda c, a, b: torch.addmm(c, a, b, beta=0.5), *given)
    assert counts(gm) == (0, 0)


def test_fp16_sums_stay() -> None:
    """torch then has no fp32 result of 16-bit factors."""
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        assert counts(passed(torch.mm, torch.randn(6, 8), torch.randn(8, 5))) == (0, 0)
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False


# ---- the largest value ---------------------------------------------------------------------------


def largest_of(gm: GraphModule) -> list[bool]:
    """Of each plane, is the largest value known?"""
    return [node.args[1] is not None for node in gm.graph.nodes if node.target == _PLANE]


def test_what_makes_a_tensor_finds_its_largest_value() -> None:
    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        return [F.relu(x * 3) @ w, F.relu(x * 3).t() @ x]

    given = torch.randn(6, 8), torch.randn(8, 5)
    gm = passed(function, *given)
    assert sorted(largest_of(gm)) == [False, False, True, True]  # no CSE: relu is made twice
    agrees(gm, function, *given)


def test_a_part_of_what_is_made_is_looked_at_by_itself() -> None:
    gm = passed(lambda x, w: (x * 3)[:6] @ w, torch.randn(12, 8), torch.randn(8, 5))
    assert largest_of(gm) == [False, False]


def test_infinities_have_no_part_in_the_largest_value() -> None:
    x, w = torch.randn(6, 8), torch.randn(8, 5)
    x[2, 3], x[4, 1], x[1, 1] = float("inf"), float("nan"), 1e6
    gm = passed(lambda x, w: (x * 2) @ w, x, w)
    assert largest_of(gm) == [True, False]
    torch.testing.assert_close(gm(x, w), (x * 2) @ w, equal_nan=True, rtol=1e-2, atol=1e3)
    rows = [0, 1, 3, 5]
    assert relative(gm(x, w)[rows], ((x * 2).double() @ w.double())[rows]) < 1e-3


# ---- values --------------------------------------------------------------------------------------


class Program:
    """A random graph of gemms and what stands between them, and its operands."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.batch = self.draw.choice([(), (), (3,)])
        self.size = [self.draw.randint(2, 40) for _ in range(4)]
        self.given = [self.tensor() for _ in range(self.draw.randint(2, 4))]
        self.steps = [self.draw.random() for _ in range(40)]

    def tensor(self) -> Tensor:
        m, n = self.draw.choice(self.size), self.draw.choice(self.size)
        made = torch.randn(*self.batch, m, n) * 2.0 ** self.draw.randint(-30, 30)
        data = self.draw.choice(["normal", "normal", "positive", "columns", "row", "zeros"])
        if data == "positive":
            made = made.abs()
        elif data == "columns":
            made = made * torch.logspace(-6, 6, n)
        elif data == "row":
            made[..., self.draw.randrange(m), :] *= 1e-12
        elif data == "zeros":
            made[..., self.draw.randrange(m), :] = 0
        return made.mT.contiguous().mT if self.draw.random() < 0.4 else made

    def __call__(self, *given: Tensor) -> list[Tensor]:
        values, steps, made = list(given), iter(self.steps), []
        for _ in range(4):
            a = values[int(next(steps) * len(values))]
            a = a.mT if next(steps) < 0.4 else a
            fitting = [v for v in values if v.shape[-2] == a.shape[-1]]
            fitting += [v.mT for v in values if v.shape[-1] == a.shape[-1]]
            b = fitting[int(next(steps) * len(fitting))]
            made.append(a @ b if not self.batch else torch.bmm(a, b))
            scale = made[-1].abs().amax().clamp_min(1e-30)
            kind = next(steps)
            values.append(torch.tanh(made[-1] / scale) if kind < 0.5 else made[-1] / scale)
        return made


def judged(seeds: range) -> int:
    """How many products were held to the contract."""
    found = 0
    for seed in seeds:
        program = Program(seed)
        gm = passed(program, *program.given)
        with torch.no_grad():
            Judge(gm).run(*program.given)
        found += counts(gm)[1]
    return found


def test_generated_programs_keep_the_contract() -> None:
    assert judged(range(16)) > 40


@pytest.mark.slow
def test_many_generated_programs_keep_the_contract() -> None:
    assert judged(range(1000, 1800)) > 2000


def test_planes_are_gone_behind_their_last_reader() -> None:
    """Of a chain of layers never more than the planes of one gemm are there at once."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    class Watch(Interpreter):
        def run_node(self, n: Node) -> Any:
            nonlocal most
            made = super().run_node(n)
            if n.target == _PLANE:
                alive.append(weakref.ref(made[0]))
            most = max(most, sum(plane() is not None for plane in alive))
            return made

    def layers(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x

    given = [torch.randn(8, 8) for _ in range(6)]
    gm = passed(layers, *given)
    assert counts(gm) == (10, 5)
    Watch(gm).run(*given)
    assert most == 2


# ---- through Inductor ----------------------------------------------------------------------------

OPTIONS = {"cpu_ops": True, "strict": True, "patterns": [], "auto": True}


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(of_kernels, "OFFERED", True)
    # As on a GPU under TF32, where a Linear with what follows is left to Inductor.
    monkeypatch.setattr(plan, "no_gain", lambda *_: "in TF32 the library's gemm is as fast")
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch._dynamo.reset()
    counters.clear()
    of_graphs = torch._inductor.config.patch(fx_graph_cache=False)  # where one is, no pass runs
    with of_graphs, torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch.backends.cuda.matmul.fp32_precision = before


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 24), torch.nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))


def trained(net: torch.nn.Module, x: Tensor) -> list[Tensor]:
    y = net(x)
    y.square().sum().backward()
    made = [y.detach(), *(p.grad for p in net.parameters())]
    net.zero_grad(set_to_none=True)
    return [v.clone() for v in made]


def replaced() -> int:
    return sum(counters[COUNTERS].values())


def _in_double(net: Net, x: Tensor) -> list[Tensor]:
    twin = Net().double()
    twin.load_state_dict(net.state_dict())
    return trained(twin, x.double())


def errors(net: Net, compiled: Any, x: Tensor) -> list[float]:
    return [relative(a, b) for a, b in zip(trained(compiled, x), _in_double(net, x))]


@pytest.mark.usefixtures("offered")
def test_a_training_step() -> None:
    """Forward's gemms, and of backward those of the weights and of the second layer's input."""
    torch.manual_seed(0)
    net = Net()
    compiled = torch.compile(net, backend="fx_fuser", options=OPTIONS)
    found = errors(net, compiled, torch.randn(32, 16))
    assert replaced() == 5
    assert all(1e-5 < error < 1e-3 for error in found[:1]) and max(found) < 2e-3


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = torch.nn.LayerNorm(16), Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x)) * 2


@pytest.mark.slow
@pytest.mark.usefixtures("offered")
def test_inductor_fuses_the_largest_values_and_the_scales() -> None:
    """The norm and GELU find their results' largest values; biases, GELU and the last product take
    the scales away: three kernels, as there are without planes."""
    block, x = Block(), torch.randn(4, 8, 16)
    compiled = torch.compile(block, backend="fx_fuser", options=OPTIONS)
    with torch.no_grad():
        y, (code, *_) = run_and_get_code(compiled, x)
        assert relative(y, block(x).double()) < 2e-3
    calls = [line for line in code.splitlines() if "fx_fuser.plane.default(" in line]
    assert len(calls) == 4 and sum(", None," in line for line in calls) == 2  # of the weights
    assert len(re.findall(r"^ +cpp_fused\w*\(", code, re.MULTILINE)) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("offered")
def test_sizes_that_change_are_compiled_once() -> None:
    torch.manual_seed(0)
    net = Net()
    compiled = torch.compile(net, backend="fx_fuser", options=OPTIONS, dynamic=True)
    for rows in (32, 5, 77):
        assert max(errors(net, compiled, torch.randn(rows, 16))) < 2e-3
    assert counters["stats"]["unique_graphs"] == 1
    assert replaced() == 5


@pytest.mark.slow
@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize("fp32", ["split", "ieee", "tf32-library"])
def test_options_that_ask_for_something_else(fp32: str) -> None:
    if fp32 == "ieee":  # by torch's setting, which this option wants
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    net = Net()
    torch.compile(net, backend="fx_fuser", options={**OPTIONS, "fp32": fp32})(torch.randn(32, 16))
    assert replaced() == 0


@pytest.mark.slow
@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_torchs_setting_and_the_option(precision: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = precision
    net, x = Net(), torch.randn(32, 16)
    with torch.no_grad():
        torch.compile(net, backend="fx_fuser", options=OPTIONS)(x)
        assert (replaced() > 0) == (precision == "tf32")
        torch._dynamo.reset()
        torch.compile(net, backend="fx_fuser", options={**OPTIONS, "fp32": "tf32"})(x)
    assert replaced() >= 2


@pytest.mark.slow
@pytest.mark.usefixtures("offered")
def test_autocast_is_left() -> None:
    net = Net()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.compile(net, backend="fx_fuser", options=OPTIONS)(torch.randn(32, 16))
    assert replaced() == 0


def test_nothing_is_offered_yet() -> None:
    """Issue 44: a GPU decides. Then the test of what is offered by default stands here."""
    assert not of_kernels.OFFERED
    torch._dynamo.reset()
    counters.clear()
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with torch.no_grad():
        torch.compile(Net(), backend="fx_fuser", options=OPTIONS)(torch.randn(32, 16))
    torch.backends.cuda.matmul.fp32_precision = before
    assert replaced() == 0
