"""Every way to write an op of an epilogue fuses to that op; what only may be one does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import ADD, MUL, Program, check, compiled, fused, leaf, linear_program
from kernel_text import epilogue_of
from torch import Tensor, nn
from torch.fx import Graph

import fx_fuser
from fx_fuser import registry
from fx_fuser.graph.read import canonical
from fx_fuser.graph.read.canonical import rule_of
from fx_fuser.graph.read.nodes import storages
from fx_fuser.graph.read.operations import OPS
from fx_fuser.graph.read.view import View

Tail = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Patterns registered by a test are gone after it."""
    monkeypatch.setattr(registry, "_patterns", list(registry._patterns))
    yield


NN: Any = torch._C._nn
ELU = "elu(z, alpha={}, scale={}, input_scale={})"
SELU = ELU.format(1.6732632423543772, 1.0507009873554805, 1.0)
# text of the steps → how they are written, the first in the pattern too
SPELLINGS: dict[str, list[Tail]] = {
    "v0 = hardswish(z)": [
        F.hardswish, lambda z: F.hardswish(z, inplace=True), nn.Hardswish(), nn.Hardswish(True),
        NN.hardswish, NN.hardswish_,
    ],
    "v0 = hardsigmoid(z)": [
        F.hardsigmoid, nn.Hardsigmoid(), nn.Hardsigmoid(True), NN.hardsigmoid, NN.hardsigmoid_,
    ],
    "v0 = mish(z)": [F.mish, nn.Mish(), nn.Mish(inplace=True), NN.mish, NN.mish_],
    "v0 = logsigmoid(z)": [F.logsigmoid, nn.LogSigmoid()],
    "v0 = leaky_relu(z, negative_slope=0.01)": [
        F.leaky_relu, nn.LeakyReLU(), nn.LeakyReLU(inplace=True), F.leaky_relu_, NN.leaky_relu,
        lambda z: F.leaky_relu(z, negative_slope=0.01), lambda z: F.rrelu(z, 0.01, 0.01),
    ],
    "v0 = leaky_relu(z, negative_slope=0.22916666666666666)": [
        F.rrelu, nn.RReLU().eval(), nn.RReLU(inplace=True).eval(), torch.rrelu, torch.rrelu_,
    ],
    f"v0 = {ELU.format(1.0, 1.0, 1.0)}": [F.elu, nn.ELU(), nn.ELU(inplace=True), F.elu_, NN.elu],
    f"v0 = {ELU.format(0.5, 1.0, 1.0)}": [lambda z: F.elu(z, 0.5), nn.ELU(0.5, True)],
    f"v0 = {ELU.format(0.5, 2.0, 3.0)}": [lambda z: NN.elu(z, 0.5, 2.0, 3.0)],
    f"v0 = {SELU}": [F.selu, nn.SELU(), nn.SELU(inplace=True), torch.selu, torch.selu_],
    f"v0 = {ELU.format(0.5, 1.0, 2.0)}": [
        lambda z: F.celu(z, 0.5), nn.CELU(0.5), nn.CELU(0.5, inplace=True),
        lambda z: torch.celu(z, 0.5), lambda z: torch.celu_(z, alpha=0.5),
    ],
    "v0 = threshold(z, threshold=0.1, value=20.0)": [
        lambda z: F.threshold(z, 0.1, 20), nn.Threshold(0.1, 20), nn.Threshold(0.1, 20.0, True),
        lambda z: torch.threshold(z, 0.1, 20), lambda z: torch.threshold_(z, 0.1, 20),
    ],
    "v0 = hardshrink(z, lambd=0.5)": [
        F.hardshrink, nn.Hardshrink(), torch.hardshrink, lambda z: z.hardshrink(0.5),
    ],
    "v0 = softshrink(z, lambd=0.5)": [F.softshrink, nn.Softshrink()],
    "v0 = tanh(z); v1 = sub(z, v0)": [F.tanhshrink, nn.Tanhshrink(), lambda z: z - z.tanh()],
    "v0 = abs(z); v1 = add(v0, s0); v2 = div(z, v1)": [
        F.softsign, nn.Softsign(), lambda z: z / (z.abs() + 1),
    ],
    "v0 = exp2(z)": [torch.exp2, torch.exp2_, torch.special.exp2, lambda z: z.exp2()],
    "v0 = expm1(z)": [torch.expm1, torch.expm1_, torch.special.expm1, lambda z: z.expm1_()],
    "v0 = abs(z); v1 = log1p(v0)": [
        lambda z: torch.log1p(z.abs()), lambda z: z.abs().log1p_(), lambda z: z.abs_().log1p(),
    ],
    "v0 = abs(z); v1 = log2(v0)": [lambda z: torch.log2(z.abs()), lambda z: z.abs().log2()],
    "v0 = sin(z)": [torch.sin, torch.sin_, lambda z: z.sin()],
    "v0 = cos(z)": [torch.cos, torch.cos_, lambda z: z.cos()],
    "v0 = erfc(z)": [torch.erfc, torch.erfc_, torch.special.erfc, lambda z: z.erfc()],
    "v0 = sign(z); v1 = mul(v0, z)": [lambda z: torch.sign(z) * z, lambda z: z.sign() * z],
    "v0 = exp(z); v1 = reciprocal(v0)": [
        lambda z: torch.reciprocal(z.exp()), lambda z: z.exp().reciprocal(),
    ],
    "v0 = exp(z); v1 = addcdiv(z, z, v0)": [
        lambda z: torch.addcdiv(z, z, z.exp()), lambda z: z.addcdiv(z, z.exp(), value=1),
    ],
    "v0 = exp(z); v1 = addcdiv(z, z, v0, s0)": [  # of the function Dynamo makes div, mul and add
        lambda z: z.addcdiv(z, z.exp(), value=0.5),
    ],
    "v0 = tanh(z); v1 = lerp(z, v0, s0)": [
        lambda z: torch.lerp(z, z.tanh(), 0.3), lambda z: z.lerp(torch.tanh(z), 0.3),
    ],
    "v0 = hardtanh(z, s0, s1)": [F.relu6, nn.ReLU6(), nn.ReLU6(inplace=True)],
    "v0 = identity(z); v1 = relu(v0)": [
        lambda z: F.relu(F.dropout(z, 0.1, False)),
        lambda z: F.relu(nn.Dropout(0.1).eval()(z)),
        lambda z: F.relu(nn.Dropout(0.0)(z)),
        lambda z: F.relu(nn.Dropout(0.1, inplace=True).eval()(z)),
        lambda z: F.relu(F.dropout(z, p=0, training=True, inplace=True)),
        lambda z: F.relu(torch.dropout(z, 0.1, False)),
        lambda z: F.relu(torch.dropout_(z, 0.1, train=False)),
        lambda z: F.relu(nn.Dropout1d().eval()(z)),
        lambda z: F.relu(nn.AlphaDropout().eval()(z)),
        lambda z: F.relu(F.alpha_dropout(z, 0.3)),
        lambda z: F.relu(nn.FeatureAlphaDropout().eval()(z)),
        lambda z: F.relu(torch.alpha_dropout(z, 0.3, False)),
        lambda z: F.relu(nn.Identity()(z).contiguous()),
        lambda z: F.relu(z.to(z.device)),
    ],
    "v0 = sigmoid(z); v1 = identity(v0)": [  # the last operation
        lambda z: F.dropout(torch.sigmoid(z), 0.1, False), lambda z: z.sigmoid().contiguous(),
    ],
    "v0 = tanh(z); v1 = cast(v0, dtype=bfloat16)": [
        lambda z: z.tanh().to(torch.bfloat16),
        lambda z: z.tanh().to("cpu", torch.bfloat16),
        lambda z: z.tanh().to(device="cpu", dtype=torch.bfloat16),
        lambda z: z.tanh().to(torch.device("cpu"), dtype=torch.bfloat16, non_blocking=True),
        lambda z: z.tanh().to(torch.bfloat16, True),
        lambda z: z.tanh().to(torch.ones(1, dtype=torch.bfloat16)),
        lambda z: z.tanh().type_as(torch.ones(1, dtype=torch.bfloat16)),
    ],
}  # fmt: skip
CASES = [(text, i) for text, tails in SPELLINGS.items() for i in range(len(tails))]
# Of each text the first spelling and one more, each text another: a rule is one for all texts.
FEW = [
    (text, place)
    for k, (text, tails) in enumerate(SPELLINGS.items())
    for place in {0, k % len(tails)}
]


def _source(tail: Tail) -> Callable[..., Tensor]:
    return lambda x, weight, bias: tail(F.linear(x, weight, bias))


@pytest.mark.parametrize("text", SPELLINGS)
def test_the_text_of_the_op(text: str) -> None:
    """As a pattern's trace has it, which knows no dtypes."""
    assert epilogue_of(_source(SPELLINGS[text][0])).text == text


@pytest.mark.one_in(3)
@pytest.mark.each_once
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    "text, place",
    [pytest.param(*c, marks=[] if c in FEW else [pytest.mark.slow]) for c in CASES],
)
def test_a_spelling_fuses(text: str, place: int, train: bool) -> None:
    """Its value and gradients are those of eager mode, by the accuracy contract."""
    fx_fuser.register_pattern(_source(SPELLINGS[text][0]), name="searched_for")
    tail = SPELLINGS[text][place]
    model = linear_program(lambda m, x: tail(m.lin(x)))
    check(model, leaf(4, 8), fuses={"searched_for": 1}, train=train)


def test_every_new_op_is_there() -> None:
    said = " ".join(SPELLINGS)
    old = "add sub rsub mul div rdiv neg addcmul silu log sqrt rsqrt erf minimum maximum clamp pow"
    assert {op for op in OPS if f" {op}(" not in said} <= {
        *old.split(),
        "where",
        "gelu",
        "softplus",
    }


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("text", [t for t in SPELLINGS if "cast" not in t])
def test_an_op_in_another_dtype(text: str, dtype: torch.dtype) -> None:
    fx_fuser.register_pattern(_source(SPELLINGS[text][0]), name="searched_for")
    tail = SPELLINGS[text][0]
    model = linear_program(lambda m, x: tail(m.lin(x))).to(dtype)
    check(model, leaf(4, 8, dtype=dtype), fuses={"searched_for": 1})


OPAQUE: dict[str, Tail] = {
    "dropout": lambda z: F.dropout(z, 0.5, True),
    "dropout by default": F.dropout,
    "torch.dropout": lambda z: torch.dropout(z, 0.5, True),
    "alpha_dropout": lambda z: F.alpha_dropout(z, 0.5, True),
    "rrelu": lambda z: F.rrelu(z, training=True),
    "celu of zero": lambda z: F.celu(z, 0),
    "contiguous, of unknown strides": lambda z: z.contiguous(),
    "contiguous, channels last": lambda z: z.contiguous(memory_format=torch.channels_last),
    "to a device that is not known": lambda z: z.to("cpu"),
    "a copy": lambda z: z.to(torch.float16, copy=True),
    "a copy, by place": lambda z: z.to(torch.float16, False, True),
    "another layout": lambda z: z.to(torch.float16, memory_format=torch.channels_last),
    "integers": lambda z: z.to(torch.int64),
    "filled with a tensor": lambda z: z.masked_fill(z, z),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_what_only_may_be_an_op_is_none(name: str) -> None:
    graph = torch.fx.symbolic_trace(OPAQUE[name]).graph
    node = next(n for n in graph.nodes if n.op in ("call_function", "call_method"))
    rule = rule_of(node)
    assert rule is not None
    assert View(graph).written(node) is None


def test_no_function_stands_for_two_ops() -> None:
    for rule, targets in canonical._RULES:
        assert all(canonical._RULE_OF[target] is rule for target in targets)


# ---- what is dropped in training stays random ----------------------------------------------------


@pytest.mark.slow
def test_dropout_in_training_is_left() -> None:
    def dropped(x, weight, bias):  # type: ignore[no-untyped-def]
        return F.relu(F.dropout(F.linear(x, weight, bias), 0.5, False))

    fx_fuser.register_pattern(dropped)
    model = Program(lambda m, x: F.relu(m.drop(m.lin(x))), lin=nn.Linear(8, 6), drop=nn.Dropout())
    x = torch.randn(4, 8)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(model)(x), expected)
    assert fused() == {}
    torch._dynamo.reset()
    check(model.eval(), leaf(4, 8), fuses={"dropped": 1}, train=False)


@pytest.mark.slow
def test_a_weight_of_lerp_without_dimensions_is_refused() -> None:
    """In float64 torch takes 1 - weight in float64 for the gradient; fused it was in float32."""

    def between(x, weight, bias, t, w):  # type: ignore[no-untyped-def]
        return torch.lerp(t, F.linear(x, weight, bias), w)

    fx_fuser.register_pattern(between)
    model = linear_program(lambda m, x, t, w: torch.lerp(t, m.lin(x), w))
    x, t = leaf(4, 8), leaf(4, 6)
    check(model, x, t, torch.tensor(0.7, dtype=torch.float64), fuses={})
    torch._dynamo.reset()
    check(model, x, t, torch.rand(6), fuses={"between": 1})


# ---- masks ---------------------------------------------------------------------------------------


@pytest.mark.each_once
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    "fill",
    [
        lambda z, mask: z.masked_fill(mask, -1e9),
        lambda z, mask: torch.masked_fill(z, mask, value=-1e9),
        lambda z, mask: z.masked_fill_(mask, -1e9),
        lambda z, mask: torch.where(mask, -1e9, z),
    ],
    ids=["method", "function", "in place", "where"],
)
def test_a_masked_fill_is_a_where(fill: Any, train: bool) -> None:
    def filled(x, weight, bias, mask):  # type: ignore[no-untyped-def]
        return F.linear(x, weight, bias).masked_fill(mask, -1e9) * 2.0

    fx_fuser.register_pattern(filled)
    model = linear_program(lambda m, x, mask: fill(m.lin(x), mask) * 2.0)
    check(model, leaf(4, 8), torch.rand(4, 6) < 0.5, fuses={"filled": 1}, train=train)
    text = epilogue_of(filled).text
    assert text == "v0 = where(t0, s0, z); v1 = mul(v0, s1)"


# ---- a second name of a tensor -------------------------------------------------------------------


def _changed_by(name: Tail) -> Any:
    def body(m: Any, x: Tensor) -> Tensor:
        z = m.lin(x)
        other = name(z)
        other.mul_(2.0)
        return z + other  # 4 z

    return body


ALIASES: dict[str, Tail] = {
    "dropout": lambda z: F.dropout(z, 0.1, False),
    "float": lambda z: z.float(),
    "contiguous": lambda z: z.contiguous(),
    "dropout of dropout": lambda z: F.dropout(F.dropout(z, 0.1, False).float(), 0.0),
}


@pytest.mark.parametrize("name", ALIASES)
def test_a_write_under_another_name_is_seen(name: str) -> None:
    """Dropout in eval mode returns its input: z would be read as it was before."""
    alias = ALIASES[name]

    def wrong(x, weight, bias):  # type: ignore[no-untyped-def]
        z = F.linear(x, weight, bias)
        return z + alias(z) * 2.0

    def right(x, weight, bias):  # type: ignore[no-untyped-def]
        z = alias(F.linear(x, weight, bias)) * 2.0
        return z + z

    if name != "contiguous":  # which needs strides
        for pattern in (wrong, right):
            fx_fuser.register_pattern(pattern)
    model = linear_program(_changed_by(alias)).eval()
    x = torch.randn(4, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), model(x))
    assert fused() == ({} if name == "contiguous" else {"right": 1})


@pytest.mark.parametrize(("training", "names"), [(False, 2), (True, 1)])
def test_dropout_in_eval_mode_is_in_its_inputs_memory(training: bool, names: int) -> None:
    """Whatever its fake tensor says: on torch 2.11 that is a copy, on 2.15 it is not."""
    graph = Graph()
    z = graph.placeholder("z")
    dropped = graph.call_function(F.dropout, (z, 0.1, training))
    for node in (z, dropped):
        node.meta["example_value"] = torch.empty(4)
    assert len(storages((dropped,))) == names


def test_a_name_given_after_a_write_is_of_what_was_written() -> None:
    def after(x, weight, bias):  # type: ignore[no-untyped-def]
        z = F.linear(x, weight, bias) * 2.0
        return torch.tanh(F.dropout(z, 0.1, False)) + z

    fx_fuser.register_pattern(after)

    def body(m: Any, x: Tensor) -> Tensor:
        z = m.lin(x)
        z.mul_(2.0)
        kept = F.dropout(z, 0.1, False)
        return torch.tanh(kept) + z

    check(linear_program(body), leaf(4, 8), fuses={"after": 1}, train=False)


def test_a_result_with_two_names_is_one_tensor() -> None:
    def body(m: Any, x: Tensor) -> Any:
        z = m.lin(x)
        y = z * torch.sigmoid(z) * 2.0
        return y, F.dropout(y, 0.1, False)

    check(linear_program(body), leaf(4, 8), fuses={MUL: 1})


def test_z_under_another_name_is_needed_elsewhere() -> None:
    def body(m: Any, x: Tensor) -> Any:
        z = m.lin(x)
        return z * torch.sigmoid(z) * 2.0, F.dropout(z, 0.1, False)

    check(linear_program(body), leaf(4, 8), fuses={})


def test_an_operand_under_another_name() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Tensor:
        z = m.lin(x)
        return F.dropout(y, 0.1, False) + z * torch.sigmoid(z)

    check(linear_program(body), leaf(4, 8), leaf(4, 6), fuses={ADD: 1})


@pytest.mark.each_once
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    "tail",
    [
        lambda z, c: torch.min(z, c) * 2.0,
        lambda z, c: z.max(c) * 2.0,
        lambda z, c: torch.max(input=z, other=c) * 2.0,
    ],
)
def test_min_and_max_of_two_tensors(tail: Any, train: bool) -> None:
    graphs = check(
        linear_program(lambda m, x, c: tail(m.lin(x), c)),
        leaf(5, 8),
        leaf(6),
        fuses={"auto_linear": 1},
        train=train,
        auto=True,
    )
    assert not {"min", "max", "mul"} & {
        getattr(n.target, "__name__", n.target) for g in graphs for n in g.graph.nodes
    }


def test_min_along_a_dimension_is_a_reduction() -> None:
    program = linear_program(lambda m, x: torch.min(m.lin(x), 1).values * 2.0)
    graphs = check(program, leaf(5, 8), fuses={"auto_linear": 1}, auto=True)
    assert any(n.target is torch.min for g in graphs for n in g.graph.nodes)
