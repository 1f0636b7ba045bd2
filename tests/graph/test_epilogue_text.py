"""An epilogue and its text are the same, and the text is that of what the user computes."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from epilogues import Maker, values_of
from helpers import compiled, leaf, linear_program, recorded
from kernel_text import epilogue_of
from torch import Tensor

import fx_fuser
from fx_fuser import registry
from fx_fuser.graph.epilogue import (
    Epilogue,
    Step,
    evaluate,
    kernel_spec,
    linear_backward,
    parse,
    read_by_derivative,
)
from fx_fuser.graph.read.operations import OPS

# ---- text ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(300))
def test_parsed_text_is_the_epilogue(seed: int) -> None:
    epilogue = Maker(seed).epilogue(steps=seed % 9)
    assert parse(epilogue.text) == epilogue
    assert parse(epilogue.text).text == epilogue.text


def test_every_op_occurs_in_them() -> None:
    made = (Maker(seed).epilogue(steps=seed % 9) for seed in range(300))
    assert {step.op for epilogue in made for step in epilogue.steps} == OPS.keys()


@pytest.mark.parametrize(
    "text",
    [
        "sigmoid(z)",
        "v0 = nothing(z)",
        "v1 = sigmoid(z)",
        "v0 = sigmoid(z); v2 = tanh(v0)",
        "v0 = sigmoid(z); ",
        "v0 = sigmoid(z)\nv1 = tanh(v0)",
        "v0 = sigmoid(z",
        "v0 = mul(z, v1); v1 = tanh(z)",
        "v0 = tanh(v0)",
        "v0 = mul(z, os.system)",
        "v0 = mul(z, 2.0)",
        "v0 = sigmoid()",
        "v0 = cast(z, dtype=nothing)",
        "v0 = cast(z, dtype=Tensor)",
        "v0 = pow(z, exponent=two)",
        "v0 = pow(z, of=2)",
    ],
)
def test_what_is_no_epilogue_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


@pytest.mark.parametrize(
    "text, says",
    [
        ("v0 = mul(z)", "mul takes 2 values, but 'mul(z)' gives it 1"),
        ("v0 = sigmoid(z, t0)", "sigmoid takes 1 values, but 'sigmoid(z, t0)' gives it 2"),
        ("v0 = add(z, t0, s0, s1)", "add takes 2 or 3 values"),
        ("v0 = clamp(z, s0)", "clamp takes 3 values"),
        ("v0 = leaky_relu(z)", "leaky_relu has the attributes negative_slope, but"),
        ("v0 = relu(z, beta=1.0)", "relu has the attributes none, but"),
        ("v0 = softplus(z, threshold=1.0, beta=1.0)", "the attributes beta, threshold, but"),
        ("v0 = cast(z, dtype=nothing)", "'nothing' is not a torch dtype"),
    ],
)
def test_the_arguments_of_a_step_are_those_of_its_op(text: str, says: str) -> None:
    """A step of too few would fail when a kernel is compiled, or be a sum of other things."""
    with pytest.raises(ValueError, match=re.escape(says)):
        parse(text)


# ---- what the user computes --------------------------------------------------------------------


@pytest.fixture
def text_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The epilogue of a model's only site; `source` is searched for beside the three patterns."""
    monkeypatch.setattr(registry, "_patterns", list(registry._patterns))

    def find(body: Callable[..., Any], *operands: Tensor, source: Any = None) -> str:
        if source is not None:
            fx_fuser.register_pattern(source, name="searched_for")
        torch._dynamo.reset()
        with recorded() as graphs:
            compiled(linear_program(body))(leaf(4, 8), *operands)
        (node,) = [n for n in graphs[0].graph.nodes if "fx_fuser" in str(n.target)]
        names = [a.name for a in node.target._schema.arguments]
        found: str = node.args[names.index("epilogue")]
        return found

    return find


def _in_place(m: Any, x: Tensor, y: Tensor) -> Tensor:
    gate = m.silu_in_place(m.lin(x))
    gate *= y
    return gate


def _renamed(m: Any, x: Tensor, up: Tensor) -> Tensor:
    hidden = x @ m.w.t() + m.b
    return torch.multiply(up, torch.nn.functional.silu(hidden))


SILU = "v0 = silu(z); v1 = mul(v0, t0)"
SAME = {
    "product": (SILU, lambda m, x, y: F.silu(m.lin(x)) * y),
    "turned": (SILU, lambda m, x, y: y * F.silu(m.lin(x))),
    "method": (SILU, lambda m, x, y: m.silu(m.lin(x)).mul(y)),
    "in place": (SILU, _in_place),
    "renamed": (SILU, _renamed),
    "a sigmoid is none": (
        "v0 = sigmoid(z); v1 = mul(v0, z); v2 = mul(v1, t0)",
        lambda m, x, y: (lambda z: y * (z * torch.sigmoid(z)))(m.lin(x)),
    ),
    "factors apart": (
        "v0 = mul(t0, s0); v1 = sigmoid(z); v2 = mul(v1, v0)",
        lambda m, x, y: (y * 2.0) * torch.sigmoid(m.lin(x)),
    ),
    "factors in turn": (
        "v0 = sigmoid(z); v1 = mul(v0, t0); v2 = mul(v1, s0)",
        lambda m, x, y: torch.sigmoid(m.lin(x)) * y * 2.0,
    ),
    "a number twice": (
        "v0 = sigmoid(z); v1 = mul(v0, t0); v2 = add(v1, s0); v3 = sub(v2, s1)",
        lambda m, x, y: torch.sigmoid(m.lin(x)) * y + 1e10 - 1e10,
    ),
    "a difference": (
        "v0 = sigmoid(z); v1 = mul(v0, s0); v2 = sub(t0, v1)",
        lambda m, x, y: y - torch.sigmoid(m.lin(x)) * 2.0,
    ),
    "a quotient": (
        "v0 = sigmoid(z); v1 = mul(v0, t0); v2 = div(v1, s0)",
        lambda m, x, y: torch.sigmoid(m.lin(x)) * y / 3.0,
    ),
    "negative": (
        "v0 = sigmoid(z); v1 = neg(v0); v2 = mul(v1, t0)",
        lambda m, x, y: -torch.sigmoid(m.lin(x)) * y,
    ),
    "addcmul": (
        "v0 = sigmoid(z); v1 = addcmul(t0, v0, t1)",
        lambda m, x, y: torch.addcmul(y, torch.sigmoid(m.lin(x)), y.cos()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("text, body", SAME.values(), ids=SAME.keys())
def test_the_text_is_what_is_written(text_in: Any, text: str, body: Any) -> None:
    assert text_in(body, leaf(4, 6)) == text


@pytest.mark.parametrize("op", [operator.sub, operator.truediv], ids=lambda op: op.__name__)
def test_only_sums_and_products_are_turned(text_in: Any, op: Any) -> None:
    def either_way(x, weight, bias, a):  # type: ignore[no-untyped-def]
        return op(a, torch.tanh(F.linear(x, weight, bias)))

    said = {operator.sub: "sub", operator.truediv: "div"}[op]
    text = text_in(lambda m, x, y: op(y, torch.tanh(m.lin(x))), leaf(4, 6), source=either_way)
    assert text == f"v0 = tanh(z); v1 = {said}(t0, v0)"


@pytest.mark.parametrize(
    "tail, said",
    [(lambda z: z**2, "pow(z, exponent=2.0)"), (torch.square, "pow(z, exponent=2.0)"),
     (F.softplus, "softplus(z, beta=1.0, threshold=20.0)")],
    ids=["power", "square", "softplus"],
)  # fmt: skip
def test_an_integer_attribute_is_a_float(tail: Any, said: str) -> None:
    """A kernel has its name of the text. The op read it back as `2.0` and asked for a kernel that
    was never loaded."""

    def source(x, weight):  # type: ignore[no-untyped-def]
        return tail(F.linear(x, weight))

    epilogue = epilogue_of(source)
    assert epilogue.text == f"v0 = {said}" == parse(epilogue.text).text
    names = (
        kernel_spec(e, {"z": torch.float32}, (), torch.float32).name
        for e in (epilogue, parse(epilogue.text))
    )
    assert len(set(names)) == 1


def test_a_sum_with_a_factor_is_not_turned() -> None:
    """torch.add(r, z, alpha=2) is r + 2 z."""

    def source(x, weight, r):  # type: ignore[no-untyped-def]
        return torch.add(r, F.linear(x, weight), alpha=2)

    assert epilogue_of(source).text == "v0 = add(t0, z, s0)"


# ---- derivatives -------------------------------------------------------------------------------


def _gradients(epilogue: Epilogue, values: dict[str, Any], wanted: list[str]) -> Any:
    with torch.enable_grad():
        y = evaluate(epilogue, values)
        dy = torch.linspace(-1, 1, y.numel()).view(y.shape)
        leaves = [values[name] for name in wanted]
        if not y.requires_grad:  # nothing but a condition
            return [torch.zeros_like(leaf) for leaf in leaves]
        return torch.autograd.grad(y, leaves, dy, materialize_grads=True)


def _holds_for(epilogue: Epilogue, seed: int) -> int:
    """Asserts that gradients are the same with other values in what is said not to be read.

    Returns how many of those there were, over all choices of what is wanted.
    """
    generator = torch.Generator().manual_seed(seed)
    values = values_of(epilogue, generator)
    tensors = sorted(n for n in epilogue.leaves if n[0] != "s")
    choices = [[n] for n in tensors] + ([tensors] if len(tensors) > 1 else [])
    unread = 0
    for wanted in choices:
        read = read_by_derivative(epilogue, frozenset(wanted))
        assert read <= epilogue.leaves
        others = values_of(epilogue, generator)
        changed = {n: values[n] if n in read else other for n, other in others.items()}
        unread += len(epilogue.leaves - read)
        right = _gradients(epilogue, values, wanted)
        for mine, its in zip(_gradients(epilogue, changed, wanted), right, strict=True):
            assert torch.equal(mine.nan_to_num(7), its.nan_to_num(7)), (epilogue.text, wanted)
    return unread


@pytest.mark.parametrize("op", OPS)
def test_gradients_need_no_more_than_is_said_of_an_op(op: str) -> None:
    for seed in range(40):
        maker = Maker(seed)
        _holds_for(Epilogue((maker.step(["z"], op, holding="z"),)), seed)


@pytest.mark.parametrize("seed", range(100))
def test_gradients_need_no_more_than_is_said_of_several(seed: int) -> None:
    _holds_for(Maker(seed).epilogue(steps=2 + seed % 5), seed)


READ = {
    "": "",
    "v0 = add(z, t0)": "",
    "v0 = sub(t0, z)": "",
    "v0 = neg(z)": "",
    "v0 = mul(z, t0)": "t0",
    "v0 = div(z, t0)": "t0",
    "v0 = div(t0, z)": "t0 z",
    "v0 = add(t0, z, s0)": "s0",
    "v0 = add(z, t0); v1 = mul(v0, t1)": "t1",
    "v0 = sigmoid(z); v1 = add(v0, t0)": "z",
    "v0 = sigmoid(t0); v1 = add(v0, z)": "",
    "v0 = sigmoid(t0); v1 = mul(v0, z)": "t0",
    "v0 = where(t0, z, t1)": "t0",
    "v0 = cast(z, dtype=bfloat16)": "",
    "v0 = addcmul(z, t0, t1)": "",
    "v0 = addcmul(t0, z, t1, s0)": "s0 t1",
    "v0 = identity(z); v1 = add(v0, t0)": "",
    "v0 = identity(t0); v1 = mul(z, v0)": "t0",
    "v0 = addcdiv(z, t0, t1, s0)": "",
    "v0 = addcdiv(t0, z, t1)": "t1",
    "v0 = addcdiv(t0, t1, z)": "t1 z",
    "v0 = lerp(z, t0, t1)": "t1",
    "v0 = lerp(t0, t1, z)": "t0 t1",
    "v0 = sign(z); v1 = mul(v0, t0)": "t0",
}


@pytest.mark.parametrize("text", READ)
def test_no_more_is_kept_than_is_needed_of_z(text: str) -> None:
    """Too much would be right too, and would keep a tensor of z's size."""
    assert read_by_derivative(parse(text), frozenset({"z"})) == {*READ[text].split()}


# ---- what a kernel computes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "computed"),
    [
        ("v0 = identity(z)", ""),
        ("v0 = identity(z); v1 = add(v0, t0)", "v0 = add(z, t0)"),
        ("v0 = add(z, t0); v1 = cast(v0, dtype=float32)", "v0 = add(z, t0)"),
        (
            "v0 = mul(z, t0); v1 = identity(v0); v2 = mul(v1, v0)",
            "v0 = mul(z, t0); v1 = mul(v0, v0)",
        ),
        ("v0 = cast(z, dtype=bfloat16); v1 = mul(v0, z)", None),
        ("v0 = mul(z, t0); v1 = identity(z)", None),
        ("", None),
    ],
)
def test_steps_that_compute_nothing_make_no_kernel_of_their_own(
    text: str, computed: str | None
) -> None:
    """Dropout in eval mode and casts to the accumulator's dtype are such."""
    kept = text if computed is None else computed
    assert parse(text).as_computed(torch.float32).text == kept
    of_text, of_kept = (
        kernel_spec(parse(t), {"z": torch.float32, "t0": torch.float32}, (), torch.float32)
        for t in (text, kept)
    )
    assert of_text.texts == of_kept.texts


def test_a_cast_below_the_accumulators_dtype_is_kept() -> None:
    text = "v0 = cast(z, dtype=float32)"
    assert parse(text).as_computed(torch.float64).text == text


@pytest.mark.parametrize("seed", range(200))
def test_what_is_computed_has_the_same_value(seed: int) -> None:
    epilogue = Maker(seed, (*LINEAR, "tanh", "where")).epilogue(steps=1 + seed % 8)
    values = values_of(epilogue, torch.Generator().manual_seed(seed))
    computed = epilogue.as_computed(torch.float32)
    assert len(computed.steps) <= len(epilogue.steps)
    torch.testing.assert_close(
        evaluate(computed, values), evaluate(epilogue, values), rtol=0, atol=0, equal_nan=True
    )


LINEAR = ("mul", "div", "neg", "add", "sub", "addcmul", "cast", "identity")


def _chain(seed: int) -> Epilogue:
    """One chain from z to the result through linear ops, whose other operands are leaves."""
    maker = Maker(seed, LINEAR)
    steps: list[Step] = []
    for i in range(1 + seed % 6):
        holding = f"v{i - 1}" if i else "z"
        step = maker.step(["t0"], holding=holding)
        args = list(step.args)
        if step.op in ("add", "sub", "mul", "addcmul") and maker.draw.random() < 0.5:
            args[0], args[1] = args[1], args[0]  # z's place
            if args[0] is not None and args[0][0] == "s":
                args[0] = maker.leaf("t") if step.op == "addcmul" else args[0]
        steps.append(Step(step.op, tuple(args), step.attrs))
    return Epilogue(tuple(steps))


@pytest.mark.parametrize("seed", range(200))
def test_dz_of_a_chain_is_autograds_bit_for_bit(seed: int) -> None:
    epilogue = _chain(seed)
    generator = torch.Generator().manual_seed(seed)
    values = values_of(epilogue, generator)
    slope = linear_backward(epilogue)
    assert slope is not None
    (expected,) = _gradients(epilogue, values, ["z"])
    dy = torch.linspace(-1, 1, expected.numel()).view(expected.shape)
    found = evaluate(slope, {**values, "z": dy})
    assert torch.equal(found.expand(expected.shape), expected), (epilogue.text, slope.text)
    assert slope.leaves - {"z"} <= read_by_derivative(epilogue, frozenset({"z"}))


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("how", ["twice", "not linear", "below a fraction"])
def test_dz_of_no_chain_is_not_told(seed: int, how: str) -> None:
    first = _chain(seed)
    last = {
        "twice": Step("add", ("z", first.result)),
        "not linear": Step("tanh", (first.result,)),
        "below a fraction": Step("div", ("t0", first.result)),
    }[how]
    assert linear_backward(Epilogue((*first.steps, last))) is None


def test_every_linear_op_occurs_in_the_chains() -> None:
    steps = [step for seed in range(200) for step in _chain(seed).steps]
    assert {step.op for step in steps} == set(LINEAR)
    places = {(s.op, i) for s in steps for i, a in enumerate(s.args) if a and re.match("z|v", a)}
    assert places >= {("sub", 1), ("addcmul", 0), ("addcmul", 1), ("mul", 1), ("add", 1)}
