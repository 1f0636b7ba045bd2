"""What `torch.export` makes fuses as the module itself does, on every spelling of the patterns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exported import exporting
from helpers import (
    ADD,
    CONV,
    GROWTH,
    MUL,
    OPTIONS,
    Program,
    check,
    conv_program,
    epilogues,
    fused,
    leaf,
    linear_program,
    slow_but,
)
from test_epilogue_ops import CASES, SPELLINGS
from test_grow import SEVERAL, TAILS, train_eval
from test_spellings import LINEARS, ONLY_INFERENCE, PRODUCTS, SUMS, cases, static_dynamic
from test_spellings_conv import (
    CONVOLUTIONS,
    FUNCTIONAL_CONVOLUTIONS,
    FUNCTIONAL_NORMS,
    NORMS,
    SCALES,
)
from torch import Tensor, nn

import fx_fuser
from fx_fuser import registry

MODES = {
    "eval-static": (False, False),
    "train-static": (True, False),
    "eval-dynamic": (False, True),
    "train-dynamic": (True, True),
}
modes = pytest.mark.parametrize("train, dynamic", MODES.values(), ids=MODES.keys())
# One of each kind of attribute: Dynamo's graphs have them all (tests/graph/test_spellings_conv.py).
FEW_CONVOLUTIONS = ("padding (2, 1)", "padding same, even kernel", "depthwise-like", "circular")
# torch.export takes these away, or makes views of them.
GONE = {"v0 = identity(z); v1 = relu(v0)": (7, 12, 13), "v0 = sigmoid(z); v1 = identity(v0)": (1,)}
EPILOGUES = [(text, place) for text, place in CASES if place not in GONE.get(text, ())]


@pytest.fixture(autouse=True)
def through_export(request: pytest.FixtureRequest) -> Iterator[None]:
    with exporting(decomposed=request.node.originalname.startswith("test_decomposed")):
        yield


@pytest.mark.slow
@pytest.mark.each_once
@modes
@cases(PRODUCTS)
def test_products(spelled: Callable[..., Tensor], train: bool, dynamic: bool) -> None:
    model = linear_program(lambda m, x, y: spelled(m, m.lin(x), y))
    check(model, leaf(4, 8), leaf(4, 6), fuses={MUL: 1}, train=train, dynamic=dynamic)


@pytest.mark.slow
@pytest.mark.each_once
@modes
@cases(SUMS)
def test_sums(spelled: Callable[..., Tensor], train: bool, dynamic: bool) -> None:
    model = linear_program(lambda m, x, y: spelled(m, m.lin(x), y))
    check(model, leaf(4, 8), leaf(4, 6), fuses={ADD: 1}, train=train, dynamic=dynamic)


@pytest.mark.slow
@pytest.mark.each_once
@modes
@cases(LINEARS)
def test_linears(spelled: Callable[..., Tensor], train: bool, dynamic: bool) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        z = spelled(m, x)
        return z * torch.sigmoid(z) * 2.0

    check(linear_program(body), leaf(4, 8), fuses={MUL: 1}, train=train, dynamic=dynamic)


@pytest.mark.slow
@static_dynamic
@cases(ONLY_INFERENCE)
def test_products_only_inference(spelled: Callable[..., Tensor], dynamic: bool) -> None:
    model = linear_program(lambda m, x, y: spelled(m, m.lin(x), y))
    check(model, leaf(4, 8), leaf(4, 6), fuses={MUL: 1}, train=False, dynamic=dynamic)


def _conv(settings: dict[str, Any], norm: nn.Module) -> Program:
    conv = nn.Conv2d(4, 6, **{"kernel_size": 3, **settings})
    return conv_program(lambda m, x: m.bn(m.conv(x)) * 2.0, conv, norm)


@pytest.mark.slow
@pytest.mark.each_once
@modes
@pytest.mark.parametrize(
    "settings",
    slow_but([CONVOLUTIONS[k] for k in FEW_CONVOLUTIONS], CONVOLUTIONS.values()),
    ids=CONVOLUTIONS.keys(),
)
def test_convolutions(settings: dict[str, Any], train: bool, dynamic: bool) -> None:
    model = _conv(settings, nn.BatchNorm2d(6))
    check(model, leaf(3, 4, 8, 9), fuses={CONV: 1}, train=train, dynamic=dynamic)


@pytest.mark.slow
@pytest.mark.each_once
@modes
@pytest.mark.parametrize("settings", NORMS.values(), ids=NORMS.keys())
def test_norms(settings: dict[str, Any], train: bool, dynamic: bool) -> None:
    model = _conv({}, nn.BatchNorm2d(6, **settings))
    check(model, leaf(3, 4, 8, 9), fuses={CONV: 1}, train=train, dynamic=dynamic)


@pytest.mark.slow
@pytest.mark.each_once
@modes
@cases(FUNCTIONAL_CONVOLUTIONS)
def test_functional_convolutions(
    spelled: Callable[..., Tensor], train: bool, dynamic: bool
) -> None:
    model = conv_program(lambda m, x: m.bn(spelled(m, x)) * 2.0, nn.Identity(), nn.BatchNorm2d(6))
    check(model, leaf(3, 4, 8, 9), fuses={CONV: 1}, train=train, dynamic=dynamic)


@pytest.mark.slow
@pytest.mark.each_once
@modes
@cases(FUNCTIONAL_NORMS)
def test_functional_norms(spelled: Callable[..., Tensor], train: bool, dynamic: bool) -> None:
    model = conv_program(
        lambda m, x: spelled(m, m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.Identity()
    )
    check(model, leaf(3, 4, 8, 9), fuses={CONV: 1}, train=train, dynamic=dynamic)


@pytest.mark.slow
@pytest.mark.each_once
@modes
@cases(SCALES)
def test_scales(spelled: Callable[..., Tensor], train: bool, dynamic: bool) -> None:
    model = conv_program(
        lambda m, x: spelled(m, m.bn(m.conv(x))), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)
    )
    check(model, leaf(3, 4, 8, 9), fuses={CONV: 1}, train=train, dynamic=dynamic)


@pytest.mark.slow
@pytest.mark.each_once
@train_eval
@pytest.mark.parametrize("text, place", EPILOGUES)
def test_epilogue_operations(
    text: str, place: int, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_patterns", list(registry._patterns))
    first, tail = SPELLINGS[text][0], SPELLINGS[text][place]
    fx_fuser.register_pattern(lambda x, w, b: first(F.linear(x, w, b)), name="searched_for")
    model = linear_program(lambda m, x: tail(m.lin(x)))
    check(model, leaf(4, 8), fuses={"searched_for": 1}, train=train)


@pytest.mark.slow
@pytest.mark.each_once
@train_eval
@pytest.mark.parametrize("name", TAILS)
def test_grown_tails(name: str, train: bool) -> None:
    tail, text = TAILS[name]
    model = linear_program(lambda m, x, y: tail(m, m.lin(x), y))
    inputs = leaf(4, 8), leaf(4, 6)
    graphs = check(model, *inputs, fuses={"auto_linear": 1}, train=train, **GROWTH)
    assert epilogues(graphs) == [text]


@pytest.mark.slow
@pytest.mark.each_once
@train_eval
@pytest.mark.parametrize("name", SEVERAL)
def test_several_anchors(name: str, train: bool) -> None:
    body, texts = SEVERAL[name]
    names = ("first", "second", "third", "gate", "up", "down")
    model = Program(body, **{n: nn.Linear(8, 8) for n in names})
    graphs = check(model, leaf(4, 8), fuses={"auto_linear": len(texts)}, train=train, **GROWTH)
    assert epilogues(graphs) == texts


# ---- after run_decompositions ------------------------------------------------------------------

# Without gradients: core ATen's BatchNorm has none. A factor of 1 is a product there.


@pytest.mark.slow
@pytest.mark.each_once
@static_dynamic
@cases(PRODUCTS)
def test_decomposed_products(spelled: Callable[..., Tensor], dynamic: bool) -> None:
    model = linear_program(lambda m, x, y: spelled(m, m.lin(x), y))
    check(model, leaf(4, 8), leaf(4, 6), fuses={MUL: 1}, train=False, dynamic=dynamic)


# torch decomposes an addcmul whose first factor is the sigmoid to z + (σ · 1) · y.
BY_ONE = {"torch.addcmul", "torch.addcmul keywords", "addcmul_"}


@pytest.mark.each_once
@pytest.mark.slow
@cases(SUMS)
def test_decomposed_sums(spelled: Callable[..., Tensor], request: pytest.FixtureRequest) -> None:
    """A named pattern has no factor of 1; grown tails have."""
    model = linear_program(lambda m, x, y: spelled(m, m.lin(x), y))
    inputs = leaf(4, 8), leaf(4, 6)
    if request.node.callspec.id in BY_ONE:
        check(model, *inputs, fuses={}, train=False)
        check(model, *inputs, fuses={"auto_linear": 1}, train=False, **GROWTH)
    else:
        check(model, *inputs, fuses={ADD: 1}, train=False, leaves=("mul",))


@pytest.mark.slow
@pytest.mark.each_once
@train_eval
@cases(LINEARS)
def test_decomposed_linears(spelled: Callable[..., Tensor], train: bool) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        z = spelled(m, x)
        return z * torch.sigmoid(z) * 2.0

    check(linear_program(body), leaf(4, 8), fuses={MUL: 1}, train=train)


@pytest.mark.slow
@pytest.mark.each_once
@static_dynamic
@pytest.mark.parametrize("settings", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_decomposed_convolutions(settings: dict[str, Any], dynamic: bool) -> None:
    model = _conv(settings, nn.BatchNorm2d(6))
    leaves = ("mul",)
    check(model, leaf(3, 4, 8, 9), fuses={CONV: 1}, train=False, dynamic=dynamic, leaves=leaves)


@pytest.mark.slow
def test_decomposed_norm_without_a_convolution_stays() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        z = m.lin(x)
        return z * torch.sigmoid(z) * 2.0, m.bn(y) * 2.0

    model = Program(body, lin=nn.Linear(8, 6), bn=nn.BatchNorm2d(6))
    inputs = leaf(4, 8), leaf(2, 6, 3, 3)
    (graph,) = check(model, *inputs, fuses={MUL: 1}, train=False, leaves=("mul",))
    targets = {node.target for node in graph.graph.nodes}
    assert torch.ops.aten._native_batch_norm_legit_no_training.default in targets
    assert torch.ops.aten.batch_norm.default not in targets


@pytest.mark.slow
def test_decomposed_norm_in_training_is_refused() -> None:
    check(_conv({}, nn.BatchNorm2d(6)), leaf(3, 4, 8, 9), fuses={}, train=True, grad=False)


@pytest.mark.slow
def test_decomposed_norm_whose_statistics_are_read_is_refused() -> None:
    def body(m: Any, x: Tensor) -> Any:
        y, mean, _ = torch.ops.aten._native_batch_norm_legit_no_training(
            m.conv(x), m.gamma, m.beta, m.mean, m.var, 0.1, 1e-5
        )
        return y * 2.0, mean

    model = conv_program(body, nn.Conv2d(4, 6, 3), nn.Identity())
    check(model, leaf(3, 4, 8, 9), fuses={}, train=False)


def test_decomposed_convolution_under_autocast() -> None:
    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*inputs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return call(*inputs)

        return inner

    model = conv_program(lambda m, x: F.relu(m.conv(x)), nn.Conv2d(4, 6, 3), nn.Identity())
    program = torch.export.export(model.eval(), (torch.randn(3, 4, 8, 9),)).run_decompositions()
    module, x = program.module(), torch.randn(3, 4, 8, 9)
    with torch.no_grad():
        expected = wrap(module)(x)
        got = wrap(torch.compile(module, backend="fx_fuser", options={**OPTIONS, **GROWTH}))(x)
    assert fused() == {"auto_conv2d": 1}
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected)
