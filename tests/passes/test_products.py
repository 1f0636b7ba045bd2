"""Products that only Inductor's graph shows: which are replaced, and that values stay right.

On a CPU every one is (`cpu_ops`); what is timed is for tests/planning/test_gpu.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import slow_but
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from fx_fuser.errors import BuildError
from fx_fuser.kernels.split import is_small
from fx_fuser.native import load
from fx_fuser.options import Options
from fx_fuser.passes import products
from fx_fuser.planning import plan
from tests.helpers import assert_close, leaf, run

OPTIONS = {"cpu_ops": True, "strict": True}


@pytest.fixture(autouse=True)
def own_caches() -> Iterator[None]:
    """Where Inductor's cache has a graph, from an earlier run, no pass runs."""
    with torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())):
        yield


def found() -> dict[str, int]:
    return dict(counters[products.COUNTERS])


def through_inductor(model: nn.Module, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend="fx_fuser", options={**OPTIONS, **options})


class Attention(nn.Module):
    """As written in many a model: nothing of it but its projections is an anchor with a tail."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bil,kl,bi->bk", x, self.w, x[..., 0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 6)
        for i in range(3):
            h = self.cell(x[:, i], h)
        return h


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("train", slow_but([True], [False, True]), ids=["eval", "train"])
@pytest.mark.parametrize(
    "model, x",
    [
        (Attention(), (2, 5, 16)),
        pytest.param(Einsum(), (2, 5, 8), marks=pytest.mark.slow),
        pytest.param(Recurrent(), (2, 5, 8), marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients(model: nn.Module, x: tuple[int, ...], train: bool) -> None:
    counters.clear()
    torch.manual_seed(0)
    inputs = (leaf(*x),)
    eager, outputs = run(model, inputs, train)
    exact, _ = run(model, inputs, train, dtype=torch.float64, narrow=outputs)
    ours, _ = run(model, inputs, train, through_inductor, narrow=outputs)
    assert sum(found().values()) > 0
    assert_close(ours, eager, exact)


@pytest.mark.slow
def test_backward_products_are_found() -> None:
    """Of a product whose forward has two, backward has twice as many."""

    class Left(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return torch.mm(x, w).exp()

    counters.clear()
    x, w = leaf(4, 8), leaf(8, 6)
    through_inductor(Left(), auto=True, patterns=[])(x, w)
    forward = sum(found().values()) + sum(counters["fx_fuser"].values())
    assert forward == 1
    torch._dynamo.reset()
    counters.clear()
    run(Left(), (x, w), True, lambda m: through_inductor(m, auto=True, patterns=[]))
    assert counters["fx_fuser"] == {"auto_matmul": 1}
    assert sum(found().values()) == 2


LEAVING = [{"auto": False}, {"patterns": []}, {"fp32": "ieee"}, {"inner": "aot_eager"}]


@pytest.mark.slow
@pytest.mark.parametrize("options", slow_but(LEAVING[2:3], LEAVING), ids=str)
def test_options_that_leave_products_alone(options: dict[str, Any]) -> None:
    counters.clear()
    with torch.no_grad():
        through_inductor(Attention(), **options)(torch.randn(2, 5, 16))
    assert found() == {}


@pytest.mark.slow
def test_other_dtypes_are_left() -> None:
    counters.clear()
    with torch.no_grad():
        for dtype in (torch.float64, torch.bfloat16):
            through_inductor(Attention().to(dtype))(torch.randn(2, 5, 16, dtype=dtype))
    assert found() == {}


@pytest.mark.slow
def test_on_a_cpu_without_its_ops_the_graph_is_stock() -> None:
    counters.clear()
    with torch.no_grad():
        through_inductor(Attention(), cpu_ops=False)(torch.randn(2, 5, 16))
    assert found() == {}


class Noted(CustomGraphPass):
    """A pass of the user's own."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []

    def __call__(self, graph: Graph) -> None:
        self.seen.append([node.target for node in graph.nodes])

    def uuid(self) -> Any:
        return "noted", id(self)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    ["an option", pytest.param("one with hyphens", marks=pytest.mark.slow), "Inductor's config"],
)
def test_the_users_pass_runs_first(how: str) -> None:
    noted = Noted()
    counters.clear()
    key = "post_grad_custom_post_pass"
    given = {"an option": key, "one with hyphens": key.replace("_", "-")}
    options = {given[how]: noted} if how in given else {}
    config = {} if options else {key: noted}
    with torch.no_grad(), torch._inductor.config.patch(config):
        through_inductor(Attention(), **options)(torch.randn(2, 5, 16))
    assert noted.seen and sum(found().values()) > 0
    ours = torch.ops.fx_fuser.split_product.default
    assert not any(ours in targets for targets in noted.seen)


def test_the_tag_of_caches() -> None:
    noted = Noted()
    plain = products.Products()
    assert plain.uuid() == products.Products().uuid()
    assert products.Products(before=noted).uuid() != plain.uuid()
    assert products.Products(before=noted).uuid() == products.Products(before=noted).uuid()
    assert products.Products(before=lambda graph: None).uuid() is None
    both = products.Products(before=[noted, noted])
    assert both.uuid() not in (None, products.Products(before=noted).uuid())
    assert products.Products(before=[noted, lambda graph: None]).uuid() is None


def test_several_passes_of_the_users() -> None:
    graph, seen = Graph(), []
    products.Products(before=(seen.append, seen.append))(graph)
    assert seen == [graph, graph]


@pytest.mark.slow
def test_what_fails_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("our own fault")

    monkeypatch.setattr(products, "put", fail)
    model, x = Attention(), torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = model(x)
        with pytest.warns(UserWarning, match="leaves a gemm to the library: RuntimeError"):
            y = through_inductor(model, strict=False)(x)
        torch.testing.assert_close(y, expected)
        with pytest.raises(Exception, match="our own fault"):
            through_inductor(model)(x)


def test_the_kernel_is_loaded_whatever_inductors_cache_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the cache has the graph the pass does not run, and the graph calls the kernel."""
    loaded: list[torch.device] = []
    monkeypatch.setattr(products, "prepare", loaded.append)
    monkeypatch.setattr(plan, "unavailable", lambda device: None)
    monkeypatch.setattr(load, "runs_on", lambda spec, device: True)
    with FakeTensorMode():
        inputs = [torch.empty(4, 4, device="cuda:0"), torch.empty(4, 4), 3]
    assert products.pass_for(Options(), inputs) == products.Products()
    assert loaded == [torch.device("cuda:0")]


@pytest.mark.slow
def test_dynamic_sizes_are_compiled_once() -> None:
    counters.clear()
    model = Attention()
    compiled = torch.compile(model, backend="fx_fuser", dynamic=True, options=OPTIONS)
    with torch.no_grad():
        for n in (3, 5, 9):
            x = torch.randn(2, n, 16)
            torch.testing.assert_close(compiled(x), model(x))
    assert counters["stats"]["unique_graphs"] == 1
    assert sum(found().values()) > 0


def test_an_addmm_keeps_its_sum() -> None:
    def body(b: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return F.relu(torch.addmm(b, x, w, beta=0.5))

    torch.manual_seed(0)
    args = torch.randn(4, 6), torch.randn(4, 8), torch.randn(8, 6)
    torch._dynamo.reset()
    compiled = torch.compile(body, backend="fx_fuser", options=OPTIONS)
    torch.testing.assert_close(compiled(*args), body(*args))


@pytest.mark.parametrize(
    "x, product, small",
    [
        ((64, 64), (64, 64), True),
        ((512, 768), (512, 768), False),
        ((16, 32, 768), (16, 32, 768), False),
        ((1, 4096), (1, 4096), False),  # its weight's bytes
        ((1, 1024), (1, 1024), True),
        ((1024, 1024), (1024, 8), True),
    ],
)
def test_what_is_too_small_to_be_timed(
    x: tuple[int, ...], product: tuple[int, ...], small: bool
) -> None:
    assert is_small(x, product, torch.device("cuda")) is small


def test_a_kernel_that_does_not_compile_costs_the_pass_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(device: torch.device) -> None:
        raise BuildError("no such thing")

    monkeypatch.setattr(products, "prepare", broken)
    monkeypatch.setattr(plan, "unavailable", lambda device: None)
    monkeypatch.setattr(load, "runs_on", lambda spec, device: True)
    with FakeTensorMode():
        x = torch.empty(4, 4, device="cuda")
    with pytest.warns(UserWarning, match="leaves the gemms of Inductor's graph to the library"):
        assert products.pass_for(Options(), [x]) is None
    with pytest.raises(BuildError):
        products.pass_for(Options(strict=True), [x])
    assert products.pass_for(Options(), [x.bfloat16()]) is None


def test_no_pass_where_no_device_has_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's own settings stay as they are there."""
    monkeypatch.setattr(plan, "unavailable", lambda device: None)
    monkeypatch.setattr(load, "runs_on", lambda spec, device: False)
    with FakeTensorMode():
        x = torch.empty(4, 4, device="cuda")
    assert products.pass_for(Options(), [x]) is None


@pytest.mark.slow
def test_a_pass_of_the_users_that_raises_costs_the_fusions_alone() -> None:
    """Inductor wraps it in an exception that stands among Dynamo's."""

    def picky(graph: Graph) -> None:
        if any("fx_fuser" in str(node.target) for node in graph.nodes):
            raise RuntimeError("not this graph")

    def body(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w))

    torch._dynamo.reset()
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    options = {"cpu_ops": True, "post_grad_custom_post_pass": picky}
    with torch.no_grad(), pytest.warns(UserWarning, match="leaves a graph unfused: InductorError"):
        y = torch.compile(body, backend="fx_fuser", options=options)(x, w)
    torch.testing.assert_close(y, body(x, w))


def test_the_split_product_takes_the_strides_that_inductor_holds() -> None:
    """Its kernel takes any: to ask for some would cost a copy."""
    gm = make_fx(torch.mm, tracing_mode="fake")(torch.randn(4, 8), torch.randn(8, 4))
    products.Products(strict=True, on_cpu=True)(gm.graph)
    (node,) = gm.graph.find_nodes(op="call_function", target=products.SPLIT_PRODUCT)
    assert "eager_input_vals" not in node.meta
