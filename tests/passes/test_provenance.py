"""fp32 products of what was cast up from 16 bits: which read the 16-bit tensors, and that values,
gradients and the user's memory stay right.

On a CPU every one is replaced (`cpu_ops`), by the same in torch; the kernels, and what is timed,
are for tests/kernels/test_narrow_sm90.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from fx_fuser.passes import products

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OPTIONS = {"cpu_ops": True, "strict": True}
NAME = {BF16: "bfloat16", F16: "float16"}
Body = Callable[..., Tensor]


class Noted(CustomGraphPass):
    """What the graphs of forward and backward call of ours when the last pass comes to them, as
    (operation, dtypes of the factors); and what else they call."""

    def __init__(self) -> None:
        self.ours: list[tuple[str, tuple[torch.dtype, ...]]] = []
        self.others: list[str] = []

    def __call__(self, graph: Graph) -> None:
        for node in graph.nodes:
            name = str(node.target)
            if name.startswith("fx_fuser."):
                dtypes = tuple(n.meta["val"].dtype for n in node.all_input_nodes)
                self.ours.append((name.split(".")[1], dtypes))
            elif node.op == "call_function":
                self.others.append(name)

    def uuid(self) -> Any:
        return "noted", id(self)


@pytest.fixture(autouse=True)
def without_caches() -> Iterator[None]:
    """Where one has a graph no pass runs."""
    of_graphs = torch._inductor.config.patch(fx_graph_cache=False)
    with of_graphs, torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def found() -> dict[str, int]:
    return dict(counters[products.COUNTERS])


def compiled(body: Body, noted: Noted | None = None, **options: Any) -> Body:
    torch._dynamo.reset()
    counters.clear()
    own = {"post_grad_custom_post_pass": noted} if noted else {}
    made: Body = torch.compile(body, backend="fx_fuser", options={**OPTIONS, **own, **options})
    return made


def check(body: Body, *inputs: Tensor, **options: Any) -> Noted:
    """Values are eager's."""
    noted = Noted()
    with torch.no_grad():
        expected = body(*[v.clone() for v in inputs])
        y = compiled(body, noted, **options)(*[v.clone() for v in inputs])
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, equal_nan=True)
    return noted


def pair(dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 5, 16).to(dtype), torch.randn(8, 16).to(dtype)


BOTH: dict[str, Body] = {
    "linear": lambda x, w: F.linear(x.float(), w.float()),
    "to": lambda x, w: F.linear(x.to(torch.float32), w.to(dtype=torch.float32)),
    "type": lambda x, w: F.linear(x.type(torch.float32), w.type(torch.float32)),
    "type_as": lambda x, w: F.linear(x.float(), w.type_as(x.float())),
    "bias": lambda x, w: F.linear(x.float(), w.float(), w.float()[:, 0]),
    "two dimensions": lambda x, w: x[0].float() @ w.float().t(),
    "three dimensions": lambda x, w: x.float() @ w.float().t(),
    "views between": lambda x, w: x.float().view(10, 16) @ w.float().view(8, 4, 4).flatten(1).mT,
    "views before": lambda x, w: F.linear(x.transpose(0, 1).float(), w.flip(0).float()),
    "rows left out": lambda x, w: F.linear(x[:, 1:].float(), w.float()),
    "rows left out after": lambda x, w: x.float()[:, 1:] @ w.float().t(),
    "turned": lambda x, w: w.float() @ x[0].float().t(),
    "adjacent columns": lambda x, w: x[0].float() @ w.view(16, 8).float(),
    "with itself": lambda x, w: w.float() @ w.float().t(),
    "one cast twice": lambda x, w: (lambda v: v @ v.t())(w.float()),
    "einsum": lambda x, w: torch.einsum("bik,nk->bni", x.float(), w.float()),
    "made in the graph": lambda x, w: F.linear((x * 2).float(), w.sin().float()),
}
FAST = {"bias", "views between", "adjacent columns", "one cast twice"}


@pytest.mark.one_in(3)
@pytest.mark.each_once
@pytest.mark.parametrize(
    "body, dtype",
    [
        # That the casts of all are seen, test_provenance_pass.py tells without Inductor.
        *(
            pytest.param(body, BF16, id=name, marks=[] if name in FAST else [pytest.mark.slow])
            for name, body in BOTH.items()
        ),
        pytest.param(BOTH["linear"], F16, id="in fp16"),
    ],
)
def test_one_product_where_both_were_cast(body: Body, dtype: torch.dtype) -> None:
    noted = check(body, *pair(dtype))
    assert noted.ours == [("exact_product", (dtype, dtype))]
    assert [*found().values()] == [1] and next(iter(found())).endswith(f" of {NAME[dtype]}")


@pytest.mark.parametrize("made", [False, True])
def test_factors_arrive_with_adjacent_k(made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes no others. By itself Inductor would copy in the layout that they have."""
    exact, arrived = torch.ops.fx_fuser.exact_product.default, list[tuple[int, ...]]()
    real = exact._op

    def watched(*given: Any) -> Any:
        if type(given[0]) is Tensor:  # no fake one
            arrived.extend(t.stride() for t in given[:2])
        return real(*given)

    monkeypatch.setattr(exact, "_op", watched)
    x, w = torch.randn(16, 10).to(BF16), torch.randn(16, 8).to(BF16)
    check(lambda x, w: (x.sin() if made else x).float().mT @ w.float(), x, w)
    assert {*arrived} == {(16, 1)}


ONE: dict[str, Body] = {
    "x": lambda x, w, v: F.linear(x.float(), v),
    "the weight": lambda x, w, v: F.linear(v[:5], w.float()),
    "x turned": lambda x, w, v: v @ x[0].float().t(),
    "in a batch": lambda x, w, v: x.float() @ v.expand(2, 8, 16).mT,
}


@pytest.mark.parametrize("body", ONE.values(), ids=ONE.keys())
def test_two_products_where_one_was(body: Body) -> None:
    noted = check(body, *pair(), torch.randn(8, 16))
    ((op, dtypes),) = noted.ours
    assert op == "split_product" and set(dtypes) == {BF16, F32}
    assert not any("convert_element_type" in name for name in noted.others)


@pytest.mark.slow
def test_two_products_where_the_dtypes_differ() -> None:
    x, w = pair()
    noted = check(lambda x, w: F.linear(x.float(), w.float()), x, w.half())
    ((op, dtypes),) = noted.ours
    assert op == "split_product" and dtypes == (BF16, F32)


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.bool], ids=str)
def test_only_the_operand_that_was_cast_from_16_bits(dtype: torch.dtype) -> None:
    x, w = pair()
    noted = check(lambda x, w: F.linear(x.float(), w.float()), x, w.to(dtype))
    assert noted.ours == [("split_product", (BF16, F32))]


def test_a_batch_of_two_that_were_cast_reads_one_of_them() -> None:
    noted = check(lambda x, w: x.float() @ x.float().mT, *pair())
    assert noted.ours == [("split_product", (BF16, F32))]


LEFT: dict[str, Body] = {
    "computed with": lambda x, w: F.linear(x.float() * 1.5, w.float().sin()),
    "to float64": lambda x, w: F.linear(x.double(), w.double()),
    "in 16 bits": F.linear,
    "written to": lambda x, w: F.linear(x.float().mul_(2), w.float().add_(1)),
}


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("body", LEFT.values(), ids=LEFT.keys())
def test_what_is_no_cast_is_left(body: Body) -> None:
    check(body, *pair())
    assert not any(" of " in name for name in found())


@pytest.mark.slow
def test_a_cast_that_others_read_stays_for_them() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        return F.linear(wide, w.float()) + wide.sum(-1, keepdim=True)

    noted = check(body, *pair())
    assert noted.ours == [("exact_product", (BF16, BF16))]
    assert sum("convert_element_type" in name for name in noted.others) == 1


def test_under_autocast_the_product_is_not_in_fp32() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x.float(), w.float())

    assert check(body, *pair()).ours == []


def test_within_autocast_switched_off() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x.float(), w.float())
            with torch.autocast("cpu", enabled=False):
                return F.linear(y.float(), w[:, :8].float())

    noted = check(body, *pair())
    assert noted.ours == [("exact_product", (BF16, BF16))]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e-40])
def test_special_values(value: float) -> None:
    x, w = pair()
    x[0, 1, 3] = value
    check(BOTH["linear"], x, w)


# ---- gradients ---------------------------------------------------------------------------------


def gradients(body: Body, *inputs: Tensor, between: Callable[..., None] | None = None) -> Any:
    """Of copies of the inputs: results, their gradients, and what the inputs are then."""
    copies = [v.detach().clone().requires_grad_(v.requires_grad) for v in inputs]
    y = body(*copies)
    if between is not None:
        with torch.no_grad():
            between(*copies)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
    return y.detach(), [v.grad for v in copies], [v.detach() for v in copies]


def check_gradients(
    body: Body, *inputs: Tensor, between: Callable[..., None] | None = None
) -> None:
    expected = gradients(body, *inputs, between=between)
    got = gradients(compiled(body), *inputs, between=between)
    torch.testing.assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("needs", ["both", "x", "weight"])
@pytest.mark.parametrize(
    "tail", [lambda y: y, lambda y: torch.sigmoid(y) * y], ids=["alone", "tail"]
)
def test_backward_judges_each_product(needs: str, tail: Callable[[Tensor], Tensor]) -> None:
    """The gradient that comes to it is a true fp32: two products."""
    x, w = pair()
    x.requires_grad_(needs != "weight")
    w.requires_grad_(needs != "x")
    check_gradients(lambda x, w: tail(F.linear(x.float(), w.float())), x, w)
    mixed = sum(n for name, n in found().items() if "float32" in name)
    assert found()["mm of bfloat16"] == 1 and mixed == (2 if needs == "both" else 1)


@pytest.mark.slow
def test_a_gradient_that_is_cast_up_makes_one_product() -> None:
    """That of a result which was cast down."""
    x, w = (v.requires_grad_() for v in pair())
    noted = Noted()
    gradients(compiled(lambda x, w: F.linear(x.float(), w.float()).bfloat16(), noted), x, w)
    assert [made for made in noted.ours if made[0] != "kept"] == [
        ("exact_product", (BF16, BF16))
    ] * 3
    # Rows of K are to be adjacent: both operands and dz are turned, and none is copied beside that.
    assert sum("clone" in name for name in noted.others) == 3


def test_what_is_kept_for_backward_is_of_16_bits() -> None:
    x, w = (v.requires_grad_() for v in pair())
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda v: v):
        compiled(BOTH["linear"])(x, w)
    assert kept and {tensor.dtype for tensor in kept} == {BF16}


def write(x: Tensor, w: Tensor) -> None:
    x.mul_(2)
    w.add_(1)


def test_the_operands_may_be_written_to_before_backward() -> None:
    """In eager mode what is kept is what the cast made."""
    x, w = (v.requires_grad_() for v in pair())
    check_gradients(BOTH["linear"], x, w, between=write)
    assert sum(found().values()) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [pytest.param(False, marks=pytest.mark.slow), True],  # "a parameter" below is written to after
    ids=["after the product", "before"],
)
def test_an_input_that_the_graph_writes_to(first: bool) -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        if first:
            x.mul_(2)
        y = F.linear(wide, w.float())
        if not first:
            x.mul_(2)
        return y.exp()

    x, w = pair()
    check_gradients(body, x, w.requires_grad_())
    assert sum(found().values()) == 2
    noted = check(body, x, w.detach())
    assert noted.ours == [("exact_product", (BF16, BF16))]


@pytest.mark.slow
def test_a_weight_that_the_graph_writes_to() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        wide = w.float()
        with torch.no_grad():
            w.mul_(2)
        return F.linear(x.float(), wide)

    x, w = pair()
    check_gradients(body, x.requires_grad_(), w.requires_grad_())
    assert sum(found().values()) == 3


class Held(nn.Module):
    """A product with a parameter or buffer, which AOT keeps for backward at no cost."""

    def __init__(self, is_parameter: bool, writes: bool = False) -> None:
        super().__init__()
        made = torch.randn(16, 16).to(BF16)
        self.weight: Tensor
        if is_parameter:
            self.weight = nn.Parameter(made)
        else:
            self.register_buffer("weight", made)
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.float(), self.weight.float())
        if self.writes:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return y


def halve(tensor: Tensor) -> None:
    tensor.mul_(0.5)


def halve_data(tensor: Tensor) -> None:
    tensor.data.mul_(0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_parameter, writes, between",
    [
        pytest.param(False, True, None, marks=pytest.mark.slow),
        pytest.param(True, False, halve_data, marks=pytest.mark.slow),
        (True, False, halve),
        (False, False, halve),
    ],
    ids=["a buffer in forward", "a parameter's data", "a parameter", "a buffer"],
)
def test_what_a_module_holds_is_written_to_before_backward(
    is_parameter: bool, writes: bool, between: Callable[[Tensor], None] | None
) -> None:
    torch.manual_seed(0)
    module = Held(is_parameter, writes)
    x = torch.randn(2, 5, 16).to(BF16)

    def gradient(call: Callable[[Tensor], Tensor], own: Held) -> Tensor:
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        if between is not None:
            with torch.no_grad():
                between(own.weight)
        y.sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    ours, eager, stock = (copy.deepcopy(module) for _ in range(3))
    found_gradient = gradient(compiled(ours), ours)
    assert sum(found().values()) > 0
    # Eager keeps the cast, too, and so does Inductor.
    torch.testing.assert_close(found_gradient, gradient(eager, eager))
    torch.testing.assert_close(found_gradient, gradient(torch.compile(stock), stock))


@pytest.mark.slow
def test_views_of_what_is_written_to_before_backward() -> None:
    """A copy that costs more to keep than to make again."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        return x.float().expand(3, 2, 5, 16).reshape(-1, 16) @ w.float().t()

    x, w = (v.requires_grad_() for v in pair())
    y = compiled(body)(x, w)
    expected = torch.autograd.grad(body(x, w).sum(), (x, w))
    with torch.no_grad():
        x.mul_(2)
        w.mul_(2)
    found_grads = torch.autograd.grad(y.sum(), (x, w))
    for value, other in zip(found_grads, expected):
        torch.testing.assert_close(value, other)


@pytest.mark.slow
def test_a_gram_matrix_either_way_round() -> None:
    for body in (lambda x, w: w.float().t() @ w.float(), lambda x, w: gram(w.float())):
        check(body, *pair())
        assert sum(found().values()) == 1


def gram(v: Tensor) -> Tensor:
    return v.t() @ v


@pytest.mark.slow
def test_a_result_that_is_written_to_before_backward() -> None:
    """What the cast read is the graph's result, too."""

    def body(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        narrow = x.detach() * 2
        return F.linear(narrow.float(), w.float()), narrow

    x, w = pair()
    grads = []
    for run in (body, compiled(body)):  # type: ignore[arg-type]
        leaf = w.clone().requires_grad_()
        y, narrow = run(x, leaf)
        narrow.zero_()
        y.sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)
    assert sum(found().values()) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "whole",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["the product", "and what makes its operand"],
)
def test_within_a_checkpoint(whole: bool) -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        def inner(x: Tensor, w: Tensor) -> Tensor:
            return F.linear((x.sin() if whole else x).float(), w.float()).tanh()

        y: Tensor = checkpoint(inner, x, w, use_reentrant=False)
        return y * 2

    x, w = pair()
    check_gradients(body, x.requires_grad_(), w.requires_grad_())
    assert found()["mm of float32 and bfloat16"] == 2
