"""The anchor matmul: x @ w, mm, addmm and transformers' Conv1D, whose weight is [K, N]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import CONV, MUL, Program, calls, check, compiled, fused, leaf, recorded, slow_but
from torch import Tensor, nn

import fx_fuser
from fx_fuser import registry
from fx_fuser.testing import assert_equivalent, assert_fused

PATHS = {"cpu_ops": {"inner": "aot_eager", "cpu_ops": True, "auto": False}, "default": {}}
# Through Inductor a form takes seconds: one stands for them.
paths = pytest.mark.parametrize("path", slow_but(["cpu_ops"], PATHS))
train_eval = pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])


def conv1d(x, weight, bias):  # type: ignore[no-untyped-def]
    return torch.addmm(bias, x, weight)


def gated_product(x, weight, a):  # type: ignore[no-untyped-def]
    return torch.sigmoid(x @ weight) * a


@pytest.fixture(autouse=True)
def patterns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_patterns", list(registry._patterns))
    fx_fuser.register_pattern(conv1d)
    fx_fuser.register_pattern(gated_product)
    yield


# ---- GPT-2 ---------------------------------------------------------------------------------------


@pytest.fixture
def gpt2() -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(config)
    for parameter in model.parameters():  # its own biases are zero, and its weights small
        nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(0, 64, (2, 8))
    return model, ((), {"input_ids": tokens, "return_dict": False})


@pytest.mark.slow
@pytest.mark.each_once
@paths
@train_eval
def test_every_projection_of_gpt2_fuses(gpt2: Any, train: bool, path: str) -> None:
    """Four a layer, by a pattern that is the anchor alone; within the accuracy that is promised."""
    model, inputs = gpt2
    options = PATHS[path]
    assert_fused(model, inputs, {"conv1d": 8}, train=train, options=options)
    assert_equivalent(model, inputs, train=train, options=options)


@pytest.mark.slow
def test_they_are_calls_of_the_op(gpt2: Any) -> None:
    model, (_, kwargs) = gpt2
    with recorded() as graphs, torch.no_grad():
        compiled(model.eval(), fullgraph=False)(**kwargs)
    called = calls(graphs)
    assert called["fx_fuser::matmul"] == 8 and "addmm" not in called
    assert fused() == {"conv1d": 8}


# ---- its forms -----------------------------------------------------------------------------------


def _program(body: Callable[..., Any], k: int = 8, n: int = 6) -> Program:
    return Program(
        body,
        w=nn.Parameter(torch.randn(k, n)),
        b=nn.Parameter(torch.randn(n)),
        square=nn.Parameter(torch.randn(k, k)),
    )


FORMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "@": (lambda m, x: x @ m.w, (4, 8)),
    "@, + b": (lambda m, x: x @ m.w + m.b, (4, 8)),
    "b + @": (lambda m, x: m.b + x @ m.w, (4, 8)),
    "matmul": (lambda m, x: torch.matmul(x, m.w), (4, 8)),
    "mm": (lambda m, x: torch.mm(x, m.w) + m.b, (4, 8)),
    "method": (lambda m, x: x.mm(m.w).add(m.b), (4, 8)),
    "addmm": (lambda m, x: torch.addmm(m.b, x, m.w), (4, 8)),
    "addmm method": (lambda m, x: m.b.addmm(x, m.w), (4, 8)),
    "3-D": (lambda m, x: x @ m.w + m.b, (2, 3, 8)),
    "4-D": (lambda m, x: x @ m.w, (2, 1, 3, 8)),
    "vector": (lambda m, x: x @ m.w, (8,)),
    "a square weight": (lambda m, x: x @ m.square, (4, 8)),
}


@pytest.mark.each_once
@paths
@train_eval
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, train: bool, path: str) -> None:
    _check_form(form, train, path)


@pytest.mark.slow
@train_eval
def test_through_inductor(train: bool) -> None:
    _check_form("@, + b", train, "default")


def _check_form(form: str, train: bool, path: str) -> None:
    anchor, shape = FORMS[form]
    model = _program(lambda m, x: torch.sigmoid(anchor(m, x)) * 2.0)
    x = leaf(*shape)
    options = PATHS[path] or {"inner": "inductor", "cpu_ops": False}
    graphs = check(model, x, fuses={"gated_product": 1}, train=train, **options)
    assert not calls(graphs).keys() & {"matmul", "mm", "addmm", "sigmoid", "add"}


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_and_sizes(dtype: torch.dtype, dynamic: bool) -> None:
    model = _program(lambda m, x, y: torch.sigmoid(x @ m.w + m.b) * y).to(dtype)
    inputs = leaf(2, 3, 8, dtype=dtype), leaf(2, 3, 6, dtype=dtype)
    check(model, *inputs, fuses={"gated_product": 1}, dynamic=dynamic)


@train_eval
def test_autocast(train: bool) -> None:
    model = _program(lambda m, x: torch.sigmoid(x @ m.w) * 2.0)

    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            # In float64 there is no autocast to compare with.
            enabled = args[0].dtype == torch.float32
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                return f(*args)

        return run

    check(model, leaf(4, 8), fuses={"gated_product": 1}, train=train, wrap=wrap)


@pytest.mark.slow
def test_an_untransposed_weight_is_no_linear() -> None:
    """A Linear's pattern does not take it, though a square weight has the shape."""
    square = _program(lambda m, x: F.silu(x @ m.square) * 2.0)
    check(square, leaf(4, 8), fuses={}, patterns=[MUL])
    turned = _program(lambda m, x: F.silu(x @ m.square.t()) * 2.0)
    torch._dynamo.reset()
    check(turned, leaf(4, 8), fuses={MUL: 1}, patterns=[MUL])


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("kind", ["x @ w + b", "x @ w.t() + b", "batch_norm"])
def test_the_outer_anchor_comes_first(kind: str) -> None:
    """A pattern that is an anchor alone took what the larger anchor is made of."""

    def product(x, weight):  # type: ignore[no-untyped-def]
        return x @ weight

    def linear(x, weight):  # type: ignore[no-untyped-def]
        return F.linear(x, weight)

    def convolution(x, weight):  # type: ignore[no-untyped-def]
        return F.conv2d(x, weight)

    for source in (product, linear, convolution):
        fx_fuser.register_pattern(source)
    if kind == "batch_norm":
        norm = Program(
            lambda m, x: m.norm(m.conv(x)) * 2.0, conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6)
        )
        check(norm, leaf(2, 4, 6, 6), fuses={CONV: 1})
        return
    name = {"x @ w + b": "gated_product"}.get(kind, MUL)
    model = _program(
        lambda m, x: (
            (lambda z: torch.sigmoid(z) * m.b)(x @ m.w + m.b)
            if name == "gated_product"
            else F.silu(x @ m.square.t() + m.c) * 2.0
        )
    )
    model.c = nn.Parameter(torch.randn(8))
    check(model, leaf(4, 8), fuses={name: 1})


REFUSED: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "a batch of weights": (lambda m, x, w: torch.sigmoid(x @ w) * 2.0, ((2, 4, 8), (2, 8, 6))),
    "a vector": (lambda m, x, w: torch.sigmoid(x @ w) * 2.0, ((4, 8), (8,))),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_other_products_are_none(case: str) -> None:
    body, shapes = REFUSED[case]
    check(_program(body), *(leaf(*s) for s in shapes), fuses={})
    torch._dynamo.reset()
    report = fx_fuser.explain(_program(body), *(torch.randn(*s) for s in shapes))
    assert not report.refused  # it is no site at all


@pytest.mark.slow
def test_an_addend_that_is_no_vector_is_none_of_the_bias() -> None:
    """A matrix, a column, or a vector of one is a summand of the epilogue."""

    def summed(x, weight, a):  # type: ignore[no-untyped-def]
        return x @ weight + a

    fx_fuser.register_pattern(summed)
    for shape in ((4, 6), (4, 1), (1,)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = _program(lambda m, x, r: x @ m.w + r)
        check(model, leaf(4, 8), leaf(*shape), fuses={"summed": 1})


@pytest.mark.parametrize("layout", ["rows", "columns", "a slice"])
def test_layouts_of_the_weight(layout: str) -> None:
    makers = {
        "rows": lambda: torch.randn(8, 6),
        "columns": lambda: torch.randn(6, 8).t(),
        "a slice": lambda: torch.randn(8, 12)[:, ::2],
    }
    model = _program(lambda m, x, w: torch.sigmoid(x @ w) * 2.0)
    w = makers[layout]().requires_grad_()
    # `x @ w.t()` with the transpose outside the graph is a product with [K, N] all the same.
    check(model, leaf(4, 8), w, fuses={"gated_product": 1})


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.each_once
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 3), (3,)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["bare", "bias"])
@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
def test_gradcheck(shape: tuple[int, ...], bias: bool, native: bool) -> None:
    x, w = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in (shape, (3, 5)))
    b = torch.randn(5, dtype=torch.float64, requires_grad=True) if bias else None
    r = torch.randn(*shape[:-1], 5, dtype=torch.float64, requires_grad=True)
    text = "v0 = silu(z); v1 = mul(v0, t0); v2 = mul(v1, s0)"

    def run(*tensors: Tensor) -> Tensor:
        x, w, r, *b = tensors
        makers = ("library", "library", False)
        dtypes = (torch.float64, torch.float64)
        op = torch.ops.fx_fuser.matmul.default
        return op(x, w, b[0] if b else None, *makers, text, [r], [0.75], *dtypes, native)[0]

    assert torch.autograd.gradcheck(run, (x, w, r, *([b] if bias else [])))


def test_gradients_have_the_layout_of_their_tensors() -> None:
    """The weight's was the transpose of [N, K] in columns, which an optimizer's kernels are slower
    at and `.view` refuses."""
    model = _program(lambda m, x: torch.sigmoid(x @ m.w + m.b) * 2.0)
    x, tensors = leaf(2, 3, 8), (model.w, model.b)
    y = compiled(model, inner="eager")(x)  # AOTAutograd would copy a gradient in another layout
    assert fused() == {"gated_product": 1}
    grads = torch.autograd.grad(y.sum(), (x, *tensors))
    assert [g.shape for g in grads] == [x.shape, (8, 6), (6,)]
    assert all(g.is_contiguous() for g in grads)
