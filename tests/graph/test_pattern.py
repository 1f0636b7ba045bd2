"""A pattern is one function: what is wrong with it is said, and what is right fuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ADD,
    CONV,
    MUL,
    Program,
    calls,
    check,
    compiled,
    fused,
    leaf,
    linear_program,
    slow_but,
)
from kernel_text import epilogue_of, steps_in, text_of
from toolchains import needs_compilers
from torch import Tensor, nn

import fx_fuser
from fx_fuser import PatternError, registry
from fx_fuser.anchors import ANCHORS
from fx_fuser.graph.match.trace import trace
from fx_fuser.graph.read.sites import ANCHOR_NAMES
from fx_fuser.native import binaries

train_eval = pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Patterns registered by a test are gone after it."""
    monkeypatch.setattr(registry, "_patterns", list(registry._patterns))
    yield


# ---- errors ---------------------------------------------------------------------------------


def no_anchor(x, a):  # type: ignore[no-untyped-def]
    return torch.sigmoid(x) * a


def two_anchors(x, w, v):  # type: ignore[no-untyped-def]
    return torch.sigmoid(F.linear(x, w)) * F.linear(x, v)


def nothing_pointwise(x, w):  # type: ignore[no-untyped-def]
    return F.linear(x, w)


def without_z(x, w, a):  # type: ignore[no-untyped-def]
    F.linear(x, w)
    return a * 2.0


def unused_parameter(x, w, a, b):  # type: ignore[no-untyped-def]
    return torch.sigmoid(F.linear(x, w)) * a


def named_z(x, w, z):  # type: ignore[no-untyped-def]
    return torch.sigmoid(F.linear(x, w)) * z


def computed_operand(x, w):  # type: ignore[no-untyped-def]
    return torch.sigmoid(F.linear(x * 2.0, w)) * 3.0


def unknown_op(x, w):  # type: ignore[no-untyped-def]
    return torch.softmax(F.linear(x, w), -1) * 2.0


def unknown_method(x, w):  # type: ignore[no-untyped-def]
    return F.linear(x, w).cumsum(0) * 2.0


def data_dependent(x, w, a):  # type: ignore[no-untyped-def]
    z = F.linear(x, w)
    return z * 2.0 if z.sum() > 0 else z * a


def variadic(x, w, *rest):  # type: ignore[no-untyped-def]
    return torch.sigmoid(F.linear(x, w)) * rest[0]


def keyword_only(x, w, *, a):  # type: ignore[no-untyped-def]
    return torch.sigmoid(F.linear(x, w)) * a


ERRORS: dict[Callable[..., Any], str] = {
    no_anchor: "has 0 anchors",
    two_anchors: r"has 2 anchors \(linear, linear\)",
    without_z: "its result does not depend on the linear",
    unused_parameter: "its parameter 'b' is not used",
    named_z: "'z' names the anchor's value; rename the parameter",
    computed_operand: "the anchor's operand mul is computed",
    unknown_op: "softmax is not an epilogue op. Known: abs, add,",
    unknown_method: "cumsum is not an epilogue op",
    data_dependent: r"could not trace its source \(TraceError",
    variadic: r"parameter \*rest is not a plain positional one",
    keyword_only: "parameter a is not a plain positional one",
}


@pytest.mark.parametrize("source", ERRORS, ids=lambda f: f.__name__)
def test_errors(source: Callable[..., Any]) -> None:
    with pytest.raises(PatternError, match=ERRORS[source]) as failure:
        fx_fuser.register_pattern(source)
    assert source.__name__ in str(failure.value)
    assert source.__name__ not in [p.name for p in fx_fuser.registered_patterns()]


@train_eval
def test_the_anchor_alone_is_a_pattern(train: bool) -> None:
    fx_fuser.register_pattern(nothing_pointwise)
    assert trace(nothing_pointwise).size == 0
    model = linear_program(lambda m, x: F.linear(x, m.w))
    graphs = check(model, leaf(4, 8), fuses={"nothing_pointwise": 1}, train=train)
    assert "linear" not in calls(graphs)


def test_name_must_be_an_identifier() -> None:
    with pytest.raises(PatternError, match="'two words' is not a Python identifier"):
        fx_fuser.register_pattern(nothing_pointwise, name="two words")
    with pytest.raises(PatternError, match="'<lambda>' is not a Python identifier"):
        fx_fuser.register_pattern(lambda x, w: torch.tanh(F.linear(x, w)))


# ---- three patterns with other ops ----------------------------------------------------------


def tanh_mul(x, weight, bias, a):  # type: ignore[no-untyped-def]
    return torch.tanh(F.linear(x, weight, bias)) * a


def gelu_add(x, weight, bias, r):  # type: ignore[no-untyped-def]
    return F.gelu(F.linear(x, weight, bias)) + r


def norm_clamp(x, weight, bias, mean, var, gamma, beta):  # type: ignore[no-untyped-def]
    z = F.batch_norm(F.conv2d(x, weight, bias), mean, var, gamma, beta)
    return torch.clamp(z, -0.5, 0.5)


def program(pattern: Callable[..., Any]) -> tuple[Program, tuple[Any, ...]]:
    if pattern is tanh_mul:
        return Program(lambda m, x, y: y * m.lin(x).tanh(), lin=nn.Linear(8, 6)), (
            leaf(4, 8),
            leaf(4, 6),
        )
    if pattern is gelu_add:
        return Program(lambda m, x, y: y + F.gelu(m.lin(x)), lin=nn.Linear(8, 6)), (
            leaf(4, 8),
            leaf(6),
        )
    return Program(
        lambda m, x: m.bn(m.conv(x)).clamp(min=-0.5, max=0.5),
        conv=nn.Conv2d(4, 6, 3),
        bn=nn.BatchNorm2d(6),
    ), (leaf(3, 4, 8, 9),)


NEW = [tanh_mul, gelu_add, norm_clamp]
new_patterns = pytest.mark.parametrize("pattern", NEW, ids=lambda f: f.__name__)


@pytest.mark.slow
@pytest.mark.each_pair
@train_eval
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@new_patterns
def test_new_pattern(pattern: Callable[..., Any], train: bool, dynamic: bool) -> None:
    model, inputs = program(pattern)
    check(model, *inputs, fuses={}, train=train)
    torch._dynamo.reset()
    fx_fuser.register_pattern(pattern)
    graphs = check(
        model, *inputs, fuses={pattern.__name__: 1}, train=train, dynamic=dynamic, cpu_ops=True
    )
    assert not calls(graphs).keys() & {"tanh", "gelu", "clamp", "linear", "conv2d", "batch_norm"}


@new_patterns
def test_new_pattern_needs_its_own_constants(pattern: Callable[..., Any]) -> None:
    fx_fuser.register_pattern(pattern)
    near = {
        tanh_mul: Program(lambda m, x, y: y * m.lin(x).relu(), lin=nn.Linear(8, 6)),
        gelu_add: Program(
            lambda m, x, y: y + F.gelu(m.lin(x), approximate="tanh"), lin=nn.Linear(8, 6)
        ),
        norm_clamp: Program(
            lambda m, x: m.bn(m.conv(x)).clamp(min=-0.5, max=0.75),
            conv=nn.Conv2d(4, 6, 3),
            bn=nn.BatchNorm2d(6),
        ),
    }[pattern]
    check(near, *program(pattern)[1], fuses={})


SOURCES: dict[str, tuple[Any, dict[str, torch.dtype], dict[str, Any]]] = {
    "tanh_mul": (tanh_mul, dict.fromkeys(("x", "weight", "bias", "a"), torch.float32), {}),
    "gelu_add bf16": (
        gelu_add, dict.fromkeys(("x", "weight", "bias", "r"), torch.bfloat16), {}
    ),
    "norm_clamp training": (
        norm_clamp, dict.fromkeys(("x", "weight", "bias", "gamma", "beta"), torch.float32),
        {"training": True},
    ),
    "norm_clamp eval": (
        norm_clamp, dict.fromkeys(("x", "weight", "mean", "var", "gamma"), torch.float16), {},
    ),
}  # fmt: skip


@needs_compilers
@pytest.mark.parametrize("case", SOURCES.values(), ids=SOURCES.keys())
def test_cuda_source_compiles(case: Any) -> None:
    source, dtypes, config = case
    text = text_of(source, dtypes, **config)
    op = {"tanh_mul": "tanh", "gelu_add": "gelu", "norm_clamp": "minimum"}[source.__name__]
    assert f"math::{op}(" in text
    assert binaries.cubin(text, "sm_80").read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize("kinds", ["zs", "ts", "tt", "st", "zt", "tz", "zz", "ss"])
def test_cuda_source_reads_each_operand_once(kinds: str) -> None:
    """The text names exactly the operands that these kinds bring, and its steps the values."""

    def source(x, weight, bias, a, b):  # type: ignore[no-untyped-def]
        z = F.linear(x, weight, bias)
        first, second = (
            {"z": z, "t": t, "s": s}[k] for k, t, s in zip(kinds, (a, b), (0.75, -2.0))
        )
        return torch.sigmoid(z) * first + second

    dtypes = dict.fromkeys(("x", "weight", "bias", "a", "b"), torch.float32)
    text = text_of(source, dtypes)
    tensors, scalars = 1 + kinds.count("t"), kinds.count("s")
    body = text.split("operator()", 1)[1].split("const {", 1)[1]
    assert set(re.findall(r"\bin\[(\d)\]", body)) == {str(i) for i in range(tensors)}
    assert set(re.findall(r"\bscalar\[(\d)\]", body)) == {str(i) for i in range(scalars)}
    assert len(list(steps_in(text))) == 3  # sigmoid, product, sum: as it is written


# ---- the registry ---------------------------------------------------------------------------


def test_the_three_built_in_patterns() -> None:
    assert {p.name for p in fx_fuser.registered_patterns()} >= {MUL, ADD, CONV}


def test_same_pattern_twice_is_one() -> None:
    first = fx_fuser.register_pattern(tanh_mul)
    second = fx_fuser.register_pattern(tanh_mul)
    names = [p.name for p in fx_fuser.registered_patterns()]
    assert names.count("tanh_mul") == 1 and first == second


def test_name_taken_by_another_pattern() -> None:
    fx_fuser.register_pattern(tanh_mul)
    with pytest.raises(PatternError, match="a pattern named 'tanh_mul' exists and searches for"):
        fx_fuser.register_pattern(gelu_add, name="tanh_mul")
    with pytest.raises(PatternError, match=f"a pattern named '{MUL}' exists"):
        fx_fuser.register_pattern(gelu_add, name=MUL)


@pytest.mark.slow
def test_registering_again_replaces_the_check() -> None:
    model, inputs = program(tanh_mul)
    fx_fuser.register_pattern(tanh_mul, check=lambda match: "no")
    check(model, *inputs, fuses={})
    torch._dynamo.reset()
    fx_fuser.register_pattern(tanh_mul)
    check(model, *inputs, fuses={"tanh_mul": 1})


def test_check_sees_the_match() -> None:
    seen: list[Any] = []
    fx_fuser.register_pattern(tanh_mul, check=lambda match: seen.append(match))
    model, inputs = program(tanh_mul)
    check(model, *inputs, fuses={"tanh_mul": 1})
    assert seen[0].pattern.name == "tanh_mul" and seen[0].wildcards["a"].op == "placeholder"


def test_another_name() -> None:
    pattern = fx_fuser.register_pattern(tanh_mul, name="my_own_name")
    assert pattern.name == "my_own_name" and not hasattr(torch.ops.fx_fuser, "my_own_name")
    model, inputs = program(tanh_mul)
    check(model, *inputs, fuses={"my_own_name": 1})


def test_disabled_by_name() -> None:
    fx_fuser.register_pattern(tanh_mul)
    model, inputs = program(tanh_mul)
    compiled(model, patterns=["-tanh_mul"])(*inputs)
    assert fused() == {}


def largest(x, weight, bias, a, b, c):  # type: ignore[no-untyped-def]
    return torch.sigmoid(F.linear(x, weight, bias)) * a * b + c


def smallest(x, weight, bias):  # type: ignore[no-untyped-def]
    return torch.sigmoid(F.linear(x, weight, bias))


@pytest.mark.parametrize(
    "body",
    [lambda m, x: torch.tanh(m.lin(x)) - 2.0, lambda m, x: torch.tanh(m.lin(x)).add(-0.5)],
    ids=["- 2", "+ -0.5"],
)
def test_a_subtracted_wildcard_may_be_a_number(body: Callable[..., Tensor]) -> None:
    """The pattern's `- a` is `+ a · (−1)`, and the user's `- 2` is `+ (−2)`."""

    def pattern_test_minus(x, weight, bias, a):  # type: ignore[no-untyped-def]
        return torch.tanh(F.linear(x, weight, bias)) - a

    fx_fuser.register_pattern(pattern_test_minus)
    check(Program(body, lin=nn.Linear(8, 6)), leaf(4, 8), fuses={"pattern_test_minus": 1})


def test_largest_first() -> None:
    """Wherever several fit, the one that takes most in is used, whichever came first."""
    fx_fuser.register_pattern(smallest)
    fx_fuser.register_pattern(largest)
    sizes = [p.size for p in fx_fuser.registered_patterns()]
    assert sizes == sorted(sizes, reverse=True)
    y = leaf(4, 6)
    model = Program(lambda m, x, y: y + m.lin(x).sigmoid() * 2.0 * y, lin=nn.Linear(8, 6))
    check(model, leaf(4, 8), y, fuses={"largest": 1})


def test_smaller_pattern_where_the_larger_is_refused() -> None:
    fx_fuser.register_pattern(smallest)
    model = Program(
        lambda m, x: (lambda s: (s, s * m.s * 2.0))(m.lin(x).sigmoid()),
        lin=nn.Linear(8, 6),
        s=torch.ones(6),
    )
    check(model, leaf(4, 8), fuses={"smallest": 1}, leaves=("mul",))


@pytest.mark.each_once
@pytest.mark.parametrize(
    "op",
    slow_but(  # the others' values and text: tests/kernels/test_epilogue_math.py
        ["sub", "div", "silu", "pow", "where", "cast"],
        ["sub", "neg", "div", "silu", "relu", "exp", "log", "sqrt", "rsqrt", "abs", "pow",
         "minimum", "maximum", "where", "erf", "softplus", "cast", "hardtanh", "relu6"],
    ),
)  # fmt: skip
@train_eval
def test_every_epilogue_op(op: str, train: bool) -> None:
    """One pattern an op: fuses, right forward and backward, and has CUDA text."""
    tails: dict[str, Callable[[Any, Any], Any]] = {
        "sub": lambda z, a: a - z,
        "neg": lambda z, a: -torch.tanh(z) + a,
        "div": lambda z, a: a / (torch.exp(z) + 1.0),
        "silu": lambda z, a: F.silu(z) * a * a,
        "relu": lambda z, a: torch.relu(z) * a,
        "exp": lambda z, a: torch.exp(z) * a,
        "log": lambda z, a: torch.log(torch.exp(z) + 1.0) * a,
        "sqrt": lambda z, a: torch.sqrt(torch.exp(z)) * a,
        "rsqrt": lambda z, a: torch.rsqrt(torch.exp(z)) * a,
        "abs": lambda z, a: torch.abs(z) * a,
        "pow": lambda z, a: z**3 * a,
        "minimum": lambda z, a: torch.minimum(z, a),
        "maximum": lambda z, a: torch.maximum(a, z),
        "where": lambda z, a: torch.where(a, z, 0.25),
        "erf": lambda z, a: torch.erf(z) * a,
        "softplus": lambda z, a: F.softplus(z) * a,
        "cast": lambda z, a: (z * a).to(torch.float64),
        "hardtanh": lambda z, a: F.hardtanh(z, -0.5, 0.25) * a,
        "relu6": lambda z, a: F.relu6(z * 9.0) * a,
    }
    tail = tails[op]

    def source(x, weight, bias, a):  # type: ignore[no-untyped-def]
        return tail(F.linear(x, weight, bias), a)

    pattern = fx_fuser.register_pattern(source, name=f"epilogue_{op}")
    a = torch.rand(4, 6) > 0.5 if op == "where" else leaf(4, 6)
    model = Program(lambda m, x, a: tail(m.lin(x), a), lin=nn.Linear(8, 6))
    check(model, leaf(4, 8), a, fuses={pattern.name: 1}, train=train)
    dtypes = {**dict.fromkeys(("x", "weight", "bias"), torch.float32), "a": a.dtype}
    steps = list(steps_in(text_of(source, dtypes)))
    used = {step.op for step in epilogue_of(source).steps}
    assert op.replace("relu6", "hardtanh") in used
    computed = epilogue_of(source).as_computed(torch.float64 if op == "cast" else torch.float32)
    assert len(steps) == len(computed.steps)


def test_trace_is_the_public_reading() -> None:
    pattern = trace(gelu_add)
    assert (pattern.name, pattern.kind, pattern.wildcards) == ("gelu_add", "linear", ("r",))
    assert str(pattern.epilogue) == "add(gelu(z, approximate=none), r)"


def test_wildcards_named_like_operands() -> None:
    """Values are looked up by name: a wildcard `weight` made the weight's gradient wrong."""

    def named_like_operands(x, w, b, weight, c):  # type: ignore[no-untyped-def]
        return torch.tanh(F.linear(x, w, b)) * weight + c

    pattern = trace(named_like_operands)
    assert pattern.wildcards == ("weight_", "c_")
    dtypes = dict.fromkeys(("x", "w", "weight", "c"), torch.float32)
    assert "// in: c, t0, t1\n" in text_of(named_like_operands, dtypes)

    fx_fuser.register_pattern(named_like_operands)
    lin, x, s, r = nn.Linear(4, 5), torch.randn(3, 4), torch.randn(3, 5), torch.randn(3, 5)

    def body(x: Tensor, s: Tensor, r: Tensor) -> Tensor:
        return torch.tanh(lin(x)) * s + r

    grads = []
    for f in (body, compiled(body)):
        lin.zero_grad()
        f(x, s, r).sum().backward()
        grads.append(lin.weight.grad.clone())
    assert fused() == {"named_like_operands": 1}
    torch.testing.assert_close(*grads)


def test_anchors_use_the_names_kept_for_them() -> None:
    for anchor in ANCHORS.values():
        like = {n: torch.empty(1, device="meta") for n in anchor.operands}
        outputs = [torch.empty(1, device="meta")] * len(anchor.outputs)
        config = {"training": False, "eps": 1e-5}
        names = {*anchor.operands, *anchor.leaves(like, outputs, config)}
        assert names <= ANCHOR_NAMES


def test_an_operand_used_after_the_anchor_is_an_error() -> None:
    def residual(x, w, b):  # type: ignore[no-untyped-def]
        return torch.tanh(F.linear(x, w, b)) * x

    with pytest.raises(PatternError, match="'x' is an operand of the linear and is used after it"):
        trace(residual)
