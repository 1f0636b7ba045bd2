"""The anchor bmm: products of two batches of matrices, by torch.bmm, matmul, @ and baddbmm."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Program, calls, check, compiled, fused, leaf, recorded, refused, slow_but
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fx_fuser
from fx_fuser import PatternError, registry
from fx_fuser.anchors import ANCHORS
from fx_fuser.testing import assert_equivalent, assert_fused

PATHS = {
    "cpu_ops": {"inner": "aot_eager", "cpu_ops": True},
    "eager": {"inner": "eager", "cpu_ops": True},
    "default": {"inner": "inductor", "cpu_ops": False},
}
# Through Inductor a form takes seconds: test_attention_within_what_is_promised stands for them.
paths = pytest.mark.parametrize("path", slow_but(["cpu_ops", "eager"], PATHS))
train_eval = pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])


def gated_batch(x, weight, a):  # type: ignore[no-untyped-def]
    return torch.sigmoid(torch.bmm(x, weight)) * a


def scores(x, weight, scale, mask):  # type: ignore[no-untyped-def]
    return torch.bmm(x, weight) * scale + mask


def summed_batch(x, weight, a):  # type: ignore[no-untyped-def]
    return torch.bmm(x, weight) + a


def batch(x, weight):  # type: ignore[no-untyped-def]
    return torch.bmm(x, weight)


@pytest.fixture(autouse=True)
def patterns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_patterns", list(registry._patterns))
    for source in (gated_batch, scores, summed_batch):
        fx_fuser.register_pattern(source)
    yield


def _program(product: Callable[..., Tensor]) -> Program:
    return Program(lambda m, x, w: torch.sigmoid(product(x, w)) * 2.0)


# ---- its forms -----------------------------------------------------------------------------------

A, B = (3, 4, 8), (3, 8, 6)
FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "bmm": (torch.bmm, A, B),
    "bmm by keyword": (lambda x, w: torch.bmm(mat2=w, input=x), A, B),
    "bmm method": (lambda x, w: x.bmm(w), A, B),
    "@": (lambda x, w: x @ w, A, B),
    "matmul": (torch.matmul, A, B),
    "matmul by keyword": (lambda x, w: torch.matmul(x, other=w), A, B),
    "matmul method": (lambda x, w: x.matmul(w), A, B),
    "rank 4": (lambda x, w: x @ w, (2, 3, 4, 8), (2, 3, 8, 6)),
    "rank 5": (lambda x, w: x @ w, (2, 1, 3, 4, 8), (2, 1, 3, 8, 6)),
    "a batch of one": (lambda x, w: x @ w, (1, 4, 8), (1, 8, 6)),
    "vectors": (lambda x, w: x @ w, (3, 1, 8), (3, 8, 6)),
    "columns": (lambda x, w: x @ w, (3, 4, 8), (3, 8, 1)),
    "transpose": (lambda x, w: x @ w.transpose(-2, -1), (2, 3, 4, 8), (2, 3, 6, 8)),
    "mT": (lambda x, w: torch.bmm(x, w.mT), A, (3, 6, 8)),
    "the first transposed": (lambda x, w: x.mT @ w, (3, 8, 4), B),
    "both transposed": (lambda x, w: x.mT @ w.mT, (3, 8, 4), (3, 6, 8)),
    "heads": (
        lambda x, w: x.transpose(1, 2) @ w.permute(0, 2, 3, 1), (2, 4, 3, 8), (2, 6, 3, 8)
    ),
    "batch last": (lambda x, w: x.permute(2, 0, 1) @ w.permute(2, 1, 0), (4, 8, 3), (6, 8, 3)),
    "expanded": (lambda x, w: torch.bmm(x, w.expand(3, 8, 6)), A, (8, 6)),
    "a slice": (lambda x, w: x[..., ::2] @ w[:, 1::2], (3, 4, 16), (3, 16, 6)),
    "by itself": (lambda x, w: x @ w, (3, 8, 8), (3, 8, 8)),
}  # fmt: skip


@pytest.mark.each_once
@paths
@train_eval
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, train: bool, path: str) -> None:
    product, *shapes = FORMS[form]
    inputs = [leaf(*shape) for shape in shapes]
    if form == "by itself":
        product, inputs = (lambda x, w: x @ x), inputs[:1] * 2
    graphs = check(_program(product), *inputs, fuses={"gated_batch": 1}, train=train, **PATHS[path])
    assert not calls(graphs).keys() & {"matmul", "bmm", "sigmoid"}


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_and_sizes(dtype: torch.dtype, dynamic: bool) -> None:
    model = Program(lambda m, x, w, y: torch.sigmoid(x @ w) * y)
    inputs = [leaf(*s, dtype=dtype) for s in ((2, 3, 4, 8), (2, 3, 8, 6), (2, 3, 4, 6))]
    check(model, *inputs, fuses={"gated_batch": 1}, dynamic=dynamic)


@pytest.mark.slow
def test_one_graph_for_all_sizes() -> None:
    call = compiled(_program(lambda x, w: x @ w.mT), dynamic=True)
    with recorded() as graphs:
        for b, h, m, n in ((2, 3, 4, 6), (5, 3, 7, 6), (4, 2, 9, 5)):
            x, w = torch.randn(b, h, m, 8), torch.randn(b, h, n, 8)
            torch.testing.assert_close(call(x, w), torch.sigmoid(x @ w.mT) * 2.0)
    assert len(graphs) == 1 and fused() == {"gated_batch": 1}


@train_eval
def test_autocast(train: bool) -> None:
    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            # In float64 there is no autocast to compare with.
            enabled = args[0].dtype == torch.float32
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                return f(*args)

        return run

    model = _program(torch.bmm)
    check(model, leaf(*A), leaf(*B), fuses={"gated_batch": 1}, train=train, wrap=wrap)


def test_a_vector_after_it_is_no_bias() -> None:
    """Nor where the weight's second size is the vector's."""
    model = Program(lambda m, x, w, b: x @ w + b)
    (site,) = fx_fuser.explain(model, torch.randn(*A), torch.randn(3, 8, 8), torch.randn(8)).fused
    assert site.pattern == "summed_batch"
    assert site.shapes == {"x": "[3, 4, 8]", "weight": "[3, 8, 8]", "a": "[8]"}
    fx_fuser.register_pattern(batch)
    torch._dynamo.reset()
    inputs = leaf(*A), leaf(3, 8, 8), leaf(8)
    assert calls(check(model, *inputs, fuses={"batch": 1}, patterns=["batch"]))["add"] == 1


# ---- patterns ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pattern_of_a_matmul_reaches_no_batch() -> None:
    """Its trace has no shapes."""

    def product(x, weight, a):  # type: ignore[no-untyped-def]
        return torch.tanh(x @ weight) * a

    assert fx_fuser.register_pattern(product).kind == "matmul"
    model = Program(lambda m, x, w: torch.tanh(x @ w) * 2.0)
    check(model, leaf(*A), leaf(*B), fuses={})
    torch._dynamo.reset()
    check(model, leaf(*A), leaf(8, 6), fuses={"product": 1})


def test_nor_one_of_a_batch_a_matrix() -> None:
    check(_program(torch.matmul), leaf(*A), leaf(8, 6), fuses={})


@pytest.mark.slow
def test_a_pattern_may_say_baddbmm() -> None:
    def added(a, x, weight, b):  # type: ignore[no-untyped-def]
        return torch.relu(torch.baddbmm(a, x, weight)) * b

    pattern = fx_fuser.register_pattern(added)
    assert (pattern.kind, pattern.wildcards) == ("bmm", ("a", "b"))
    model = Program(lambda m, r, x, w: torch.relu(r + torch.bmm(x, w)) * 2.0)
    check(model, leaf(6), leaf(*A), leaf(*B), fuses={"added": 1})

    def scaled(a, x, weight):  # type: ignore[no-untyped-def]
        return torch.baddbmm(a, x, weight, alpha=2)

    torch._dynamo.reset()
    counters.clear()
    fx_fuser.register_pattern(scaled)
    model = Program(lambda m, r, x, w: torch.bmm(x, w) * 2.0 + r)
    check(model, leaf(6), leaf(*A), leaf(*B), fuses={"scaled": 1}, patterns=["scaled"])

    def nothing(a, x, weight):  # type: ignore[no-untyped-def]
        return torch.baddbmm(a, x, weight, alpha=0)

    with pytest.raises(PatternError, match=r"0 anchors.*torch\.bmm"):
        fx_fuser.register_pattern(nothing)


# ---- baddbmm -------------------------------------------------------------------------------------

BADDBMM: dict[str, Callable[..., Tensor]] = {
    "function": torch.baddbmm,
    "keywords": lambda r, x, w: torch.baddbmm(batch2=w, input=r, batch1=x, beta=1, alpha=1.0),
    "method": lambda r, x, w: r.baddbmm(x, w),
}


@pytest.mark.each_once
@paths
@train_eval
@pytest.mark.parametrize("form", BADDBMM)
def test_baddbmm(form: str, train: bool, path: str) -> None:
    model = Program(lambda m, r, x, w: BADDBMM[form](r, x, w))
    inputs = leaf(3, 4, 6), leaf(*A), leaf(*B)
    graphs = check(model, *inputs, fuses={"summed_batch": 1}, train=train, **PATHS[path])
    assert not calls(graphs).keys() & {"baddbmm", "bmm", "add"}


@pytest.mark.parametrize("shape", [(6,), (1, 4, 1), (3, 1, 6), (4, 1), (1,), ()], ids=str)
def test_its_addend_may_be_spread(shape: tuple[int, ...]) -> None:
    model = Program(lambda m, r, x, w: torch.baddbmm(r, x, w))
    addend = torch.randn(shape).requires_grad_()
    check(model, addend, leaf(*A), leaf(*B), fuses={"summed_batch": 1})


@pytest.mark.each_once
@pytest.mark.parametrize("learns", [*itertools.product([False, True], repeat=3)], ids=str)
def test_gradients_of_a_baddbmm(learns: tuple[bool, ...]) -> None:
    model = Program(lambda m, r, x, w: torch.baddbmm(r, x, w))
    inputs = [leaf(*s).detach().requires_grad_(g) for s, g in zip(((4, 6), A, B), learns)]
    check(model, *inputs, fuses={"summed_batch": 1}, train=any(learns))


def test_what_is_not_fused_stays_as_it_was_written() -> None:
    """Beside a site that is: its operand is the fused result, and its arguments keep their form."""

    def body(m: Any, r: Tensor, x: Tensor, w: Tensor) -> Tensor:
        z = torch.sigmoid(torch.bmm(x, w)) * 2.0
        return torch.tanh(torch.baddbmm(r, batch2=w.mT, batch1=z, beta=1.0)) * r

    inputs = leaf(3, 4, 8), leaf(*A), leaf(*B)
    graphs = check(Program(body), *inputs, fuses={"gated_batch": 1}, patterns=["gated_batch"])
    (node,) = (n for n in graphs[0].graph.nodes if n.target is torch.baddbmm)
    assert len(node.args) == 1 and [*node.kwargs] == ["batch2", "batch1", "beta"]
    assert node.kwargs["beta"] == 1.0 and "getitem" in str(node.kwargs["batch1"])
    assert not calls(graphs).keys() & {"bmm", "add"}
    assert not any("decomposed" in key for n in graphs[0].graph.nodes for key in n.meta)


def test_a_product_may_be_fused_without_its_sum() -> None:
    fx_fuser.register_pattern(batch)
    model = Program(lambda m, r, x, w: torch.baddbmm(r, x, w))
    graphs = check(model, leaf(6), leaf(*A), leaf(*B), fuses={"batch": 1}, patterns=["batch"])
    assert calls(graphs)["add"] == 1 and calls(graphs)["baddbmm"] == 0


def test_its_product_saves_no_traffic() -> None:
    """The user's own baddbmm does not write it either."""

    def of(body: Callable[..., Tensor]) -> Any:
        torch._dynamo.reset()
        inputs = torch.randn(3, 4, 6), torch.randn(*A), torch.randn(*B)
        options = {"cpu_ops": True, "auto": False}
        (site,) = fx_fuser.explain(Program(body), *inputs, options=options).fused
        return site.bytes_saved, site.launches_saved

    z = 3 * 4 * 6 * 4

    def added(x, weight, a):  # type: ignore[no-untyped-def]
        return torch.relu(torch.bmm(x, weight) + a)

    fx_fuser.register_pattern(added)
    apart = of(lambda m, r, x, w: torch.relu(torch.bmm(x, w) + r))
    together = of(lambda m, r, x, w: torch.relu(torch.baddbmm(r, x, w)))
    assert (apart[0] - together[0], apart[1] - together[1]) == (2 * z, 1)


# ---- what stays ----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]] = {
    "broadcast": ((2, 4, 8), (1, 8, 6), r"leading sizes (2,) and (1,)"),
    "broadcast within": ((2, 1, 4, 8), (2, 3, 8, 6), r"leading sizes (2, 1) and (2, 3)"),
    "rank 4 by 3": ((2, 3, 4, 8), (3, 8, 6), "ranks 4 and 3"),
    "rank 2 by 3": ((4, 8), (3, 8, 6), "ranks 2 and 3"),
    "a vector by rank 3": ((8,), (3, 8, 6), "ranks 1 and 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    x, w, reason = REFUSED[case]
    refused(_program(torch.matmul), leaf(*x), leaf(*w), reason=reason)


def test_a_vector_on_the_right_is_no_site() -> None:
    model = _program(torch.matmul)
    check(model, leaf(*A), leaf(8), fuses={})
    torch._dynamo.reset()
    assert not fx_fuser.explain(model, torch.randn(*A), torch.randn(8)).refused


def test_integers() -> None:
    model = Program(lambda m, x, w, y: torch.bmm(x, w) + y)
    inputs = [torch.randint(9, shape) for shape in (A, B, (3, 4, 6))]
    refused(model, *inputs, reason="dtype torch.int64", train=False)


@pytest.mark.slow
def test_a_result_larger_than_the_product() -> None:
    """Nor is a product of one column spread as a Linear's is."""
    model = Program(lambda m, x, w, y: torch.sigmoid(x @ w) * y)
    shapes = ((1, 4, 8), (1, 8, 6), (3, 4, 6))
    refused(model, *(leaf(*s) for s in shapes), reason="the result has shape (3, 4, 6)")
    torch._dynamo.reset()
    counters.clear()
    shapes = ((3, 4, 8), (3, 8, 1), (3, 4, 6))
    refused(model, *(leaf(*s) for s in shapes), reason="the result has shape (3, 4, 6)")


def test_an_operand_whose_layout_wins() -> None:
    model = Program(lambda m, x, w, y: y * torch.sigmoid(x @ w))
    y = torch.randn(3, 6, 4).mT.requires_grad_()
    refused(model, leaf(*A), leaf(*B), y, reason="the result has strides (24, 1, 4)")


def test_the_weight_is_written_before_the_match_ends() -> None:
    def body(m: Any, x: Tensor, w: Tensor) -> Tensor:
        w = w * 1.0
        z = torch.sigmoid(torch.bmm(x, w))
        w.zero_()
        return z * 2.0

    refused(
        Program(body), leaf(*A), leaf(*B), reason="before the fused op would read it", train=False
    )


def test_the_product_is_needed_elsewhere() -> None:
    def body(m: Any, x: Tensor, w: Tensor) -> Any:
        z = torch.bmm(x, w)
        return torch.sigmoid(z) * 2.0, z

    refused(Program(body), leaf(*A), leaf(*B), reason="the product `z` is also returned")


def test_a_near_miss_and_a_site_of_nothing() -> None:
    model = Program(lambda m, x, w: (torch.tanh(torch.bmm(x, w)) * 2.0, torch.cos(x @ w)))
    report = fx_fuser.explain(model, torch.randn(*A), torch.randn(*B))
    (miss,) = report.refused
    assert "is tanh; with sigmoid in its place, this would be sigmoid(z) * a" in miss.reason
    assert report.others == {"batched matmul": 1}


# ---- operands of the epilogue --------------------------------------------------------------------


@pytest.mark.each_once
@pytest.mark.parametrize("shape", [
    (2, 3, 4, 6), (6,), (4, 6), (4, 1), (2, 1, 1, 6), (2, 1, 4, 6), (3, 1, 1), (1,), (),
], ids=str)  # fmt: skip
def test_operands_that_are_spread(shape: tuple[int, ...]) -> None:
    model = Program(lambda m, x, w, mask: x @ w.mT * 0.5 + mask)
    inputs = leaf(2, 3, 4, 8), leaf(2, 3, 6, 8), torch.randn(shape).requires_grad_()
    check(model, *inputs, fuses={"scores": 1})


def test_it_is_verified() -> None:
    model = Program(lambda m, r, x, w: torch.baddbmm(r, x, w))
    inputs = leaf(3, 4, 6), leaf(*A), leaf(*B)
    check(model, *inputs, fuses={"summed_batch": 1}, verify="always")


def test_gradients_have_the_layout_of_a_dense_tensor() -> None:
    """AOTAutograd would copy one in another layout; an optimizer's kernels are slower at it."""
    x, w = leaf(2, 3, 4, 8), leaf(2, 3, 8, 6)
    y = compiled(_program(torch.matmul), inner="eager")(x, w)
    assert fused() == {"gated_batch": 1}
    grads = torch.autograd.grad(y.sum(), (x, w))
    assert [g.shape for g in grads] == [x.shape, w.shape]
    assert all(g.is_contiguous() for g in grads)


@pytest.mark.parametrize("broken", [False, True], ids=["right", "wrong"])
def test_verify_finds_what_is_wrong(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ANCHORS["bmm"].weight_gradient  # type: ignore[attr-defined]
    factor = 1.0001 if broken else 1.0
    monkeypatch.setattr(
        type(ANCHORS["bmm"]), "weight_gradient", lambda self, *args: right(*args) * factor
    )
    model = _program(torch.bmm)
    call = compiled(model, verify="always", strict=False)
    if broken:
        with pytest.warns(UserWarning, match="gradient of weight"):
            call(leaf(*A), leaf(*B))
    else:
        call(leaf(*A), leaf(*B))
    assert fused() == ({} if broken else {"gated_batch": 1})


# ---- attention -----------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, width = x.shape
        qkv = self.qkv(x).view(b, s, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = q @ k.transpose(-2, -1) * self.scale + mask
        mixed = F.softmax(weights, -1) @ v
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(b, s, width))
        return y


@pytest.mark.slow
@pytest.mark.each_pair
@paths
@train_eval
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_attention(dynamic: bool, train: bool, path: str) -> None:
    """Both products of every layer, the second alone."""
    fx_fuser.register_pattern(batch)
    torch.manual_seed(1)
    inputs = leaf(2, 5, 16), torch.zeros(5, 5).masked_fill_(torch.ones(5, 5).triu(1) > 0, -1e4)
    expected = {"scores": 1, "batch": 1}
    graphs = check(
        Attention(), *inputs, fuses=expected, train=train, dynamic=dynamic, **PATHS[path]
    )
    assert not calls(graphs).keys() & {"matmul", "bmm"}


@pytest.mark.slow
@train_eval
def test_attention_within_what_is_promised(train: bool) -> None:
    fx_fuser.register_pattern(batch)
    torch.manual_seed(2)
    inputs = torch.randn(2, 5, 16), torch.randn(2, 1, 1, 5)
    assert_fused(Attention(), inputs, {"scores": 1, "batch": 1}, train=train)
    assert_equivalent(Attention(), inputs, train=train)
