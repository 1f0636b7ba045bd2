"""ATen's overloads: what each means, what it writes, and which forms have no meaning for us."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exported import exporting
from helpers import (
    GROWTH,
    MUL,
    OPTIONS,
    Program,
    check,
    conv_program,
    epilogues,
    fused,
    gate,
    leaf,
    linear_program,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

import fx_fuser
from fx_fuser.errors import OptionError
from fx_fuser.graph.read.aten import drop_proven_checks
from fx_fuser.graph.read.nodes import called_in_place, writes_of
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View
from fx_fuser.planning.gate import VIEWS

aten = torch.ops.aten


def _call(target: Any, *args: Any, **kwargs: Any) -> Node:
    """The node of a call; a string among the arguments that names an input becomes that input."""
    graph, mode = Graph(), FakeTensorMode()
    sizes = {"x": (4, 6), "y": (4, 6), "image": (2, 4, 8, 8), "w": (6, 4, 3, 3), "v": (6,)}
    inputs = {name: graph.placeholder(name) for name in sizes}
    for name, size in sizes.items():
        with mode:
            inputs[name].meta["example_value"] = torch.empty(size)

    def given(value: Any) -> Any:
        return inputs.get(value, value) if isinstance(value, str) else value

    named = {name: given(value) for name, value in kwargs.items()}
    return graph.call_function(target, tuple(map(given, args)), named)


def _written(node: Node) -> str | None:
    found = View(node.graph).written(node)
    return None if found is None else str(found)


STRIDES = ([1, 1], [0, 0], [1, 1])
MEANINGS: dict[str, tuple[Node, str]] = {
    "a number": (_call(aten.mul.Tensor, "x", 2.0), "mul(x, 2.0)"),
    "a scalar": (_call(aten.mul.Scalar, "x", 2.0), "mul(x, 2.0)"),
    "self by name": (_call(aten.mul.Tensor, other="y", self="x"), "mul(x, y)"),
    "alpha": (_call(aten.add.Tensor, "x", "y", alpha=3), "add(x, y, 3)"),
    "alpha by place": (_call(aten.add.Scalar, "x", 2, 3), "add(x, 2, 3)"),
    "rsub": (_call(aten.rsub.Scalar, "x", 2.0), "rsub(x, 2.0)"),
    "rsub, alpha by place": (_call(aten.rsub.Scalar, "x", 2.0, 3), "rsub(x, 2.0, 3)"),
    "a number less x": (_call(aten.sub.Tensor, 1.0, "x"), "sub(1.0, x)"),
    "in place": (_call(aten.mul_.Tensor, "x", "y"), "mul(x, y)"),
    "divided": (_call(aten.div.Tensor, "x", 3), "div(x, 3)"),
    "no rounding": (_call(aten.div.Tensor_mode, "x", 3, rounding_mode=None), "div(x, 3)"),
    "where": (_call(aten.where.self, "x", "y", 2.0), "where(x, y, 2.0)"),
    "elu, as ATen calls it": (
        _call(aten.elu.default, "x", 2, 3, 4),
        "elu(x, alpha=2.0, scale=3.0, input_scale=4.0)",
    ),
    "hardtanh, which is F's alone": (
        _call(aten.hardtanh.default, "x", -2.0), "hardtanh(x, -2.0, 1.0)"
    ),
    "dropout": (_call(aten.dropout.default, "x", 0.5, False), "identity(x)"),
    "to": (
        _call(aten.to.dtype, "x", torch.float64, True), "cast(x, dtype=torch.float64)"
    ),
    "to, a layout": (
        _call(aten.to.dtype_layout, "x", dtype=torch.half, layout=torch.strided),
        "cast(x, dtype=torch.float16)",
    ),
    "a copy in core ATen": (
        _call(aten._to_copy.default, "x", dtype=torch.half), "cast(x, dtype=torch.float16)"
    ),
    "clone": (_call(aten.clone.default, "x"), "identity(x)"),
    "permute": (_call(aten.permute.default, "x", dims=[1, 0]), "t(x)"),
    "convolution": (
        _call(aten.convolution.default, "image", "w", None, *STRIDES, False, [0, 0], 1),
        "conv2d(image, w, None, stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1)",
    ),
}  # fmt: skip
OPAQUE: dict[str, Node] = {
    "rounding": _call(aten.div.Tensor_mode, "x", 3, rounding_mode="floor"),
    "a quotient of a number": _call(aten.div.Tensor, 1.0, "x"),  # 1.0 / x multiplies
    "out": _call(aten.add.out, "x", "y", out="y"),
    "a minimum along a dimension": _call(aten.min.dim, "x", 0),
    "a power of a number": _call(aten.pow.Scalar, 2.0, "x"),
    "a power of a tensor": _call(aten.pow.Tensor_Tensor, "x", "y"),
    "filled with a tensor": _call(aten.masked_fill.Tensor, "x", "y", "v"),
    "gelu of another kind": _call(aten.gelu.default, "x", approximate="other"),
    "dropout in training": _call(aten.dropout.default, "x", 0.5, True),
    "random": _call(aten.rrelu.default, "x", 0.1, 0.2, False, "v"),
    "a copy": _call(aten.to.dtype, "x", torch.half, False, True),
    "another memory format": _call(
        aten.to.dtype, "x", torch.half, False, False, torch.channels_last
    ),
    "a sparse layout": _call(aten.to.dtype_layout, "x", layout=torch.sparse_coo),
    "pinned": _call(aten._to_copy.default, "x", dtype=torch.half, pin_memory=True),
    "integers": _call(aten._to_copy.default, "x", dtype=torch.int64),
    "a clone in another memory format": _call(
        aten.clone.default, "x", memory_format=torch.contiguous_format
    ),
    "a transpose in place": _call(aten.t_.default, "x"),
    "a transposed convolution": _call(
        aten.convolution.default, "image", "w", None, *STRIDES, True, [0, 0], 1
    ),
    "a convolution without a batch": _call(
        aten.convolution.default, "x", "w", None, *STRIDES, False, [0, 0], 1
    ),
    "an einsum by a path": _call(aten.einsum.default, "ik,jk->ij", ["x", "y"], path=[0, 1]),
    "the sum of integers": _call(aten.add.int, 1, 2),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_what_an_overload_means(name: str) -> None:
    node, text = MEANINGS[name]
    assert _written(node) == text


@pytest.mark.parametrize("name", OPAQUE)
def test_a_form_that_is_not_known_is_opaque(name: str) -> None:
    assert _written(OPAQUE[name]) is None


def test_an_operation_of_another_library_is_opaque() -> None:
    with torch.library._scoped_library("fx_fuser_test", "DEF") as library:
        library.define("mul(Tensor self, Tensor other) -> Tensor")
        node = _call(torch.ops.fx_fuser_test.mul.default, "x", "y")
        assert _written(node) is None


def test_an_operation_in_place_is_known_by_its_schema() -> None:
    assert called_in_place(_call(aten.add_.Tensor, "x", 1))
    assert called_in_place(_call(aten.copy_.default, "x", "y"))
    assert not called_in_place(_call(aten.add.Tensor, "x", 1))
    assert not called_in_place(_call(aten.add.out, "x", "y", out="y"))


STATISTICS = ("x", "v", "v", "v", "v")


@pytest.mark.parametrize(
    "node, count",
    [
        (_call(aten.batch_norm.default, *STATISTICS, True, 0.1, 1e-5, False), 2),
        (_call(aten.batch_norm.default, *STATISTICS, False, 0.1, 1e-5, False), 0),
        (_call(aten.native_batch_norm.default, *STATISTICS, True, 0.1, 1e-5), 2),
        (_call(aten.native_batch_norm.default, *STATISTICS, training=False), 0),
        (_call(aten._native_batch_norm_legit.default, *STATISTICS, True, 0.1, 1e-5), 2),
        (_call(aten._native_batch_norm_legit_no_training.default, *STATISTICS, 0.1, 1e-5), 0),
        (_call(aten.instance_norm.default, *STATISTICS, True, 0.1, 1e-5, False), 2),
    ],
)
def test_running_statistics_that_are_written(node: Node, count: int) -> None:
    assert len(writes_of(node)) == count


def test_names_of_overloads_are_those_of_functions() -> None:
    assert called_name(_call(aten.add_.Tensor, "x", 1)) == "add"
    assert called_name(_call(aten.view.default, "x", [24])) in VIEWS
    assert called_name(_call(aten._unsafe_view.default, "x", [24])) in VIEWS


# ---- whole programs ------------------------------------------------------------------------------


def _exported(model: nn.Module, *inputs: Any) -> Any:
    return torch.export.export(model, inputs).module()


def _written_between(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = m.lin(x)
    y.add_(1.0)
    return z * torch.sigmoid(z) * y


def _old_value(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.lin(x)
    z.add_(1.0)
    return z * torch.sigmoid(z) * 2.0, z


def _inner_value(m: Any, x: Tensor, y: Tensor) -> Any:
    z = m.lin(x)
    s = torch.sigmoid(z)
    return z * s * 2.0, s


def _random(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = m.lin(x)
    return F.relu(z * torch.sigmoid(z)).div(2.0, rounding_mode="floor")


def _both(m: Any, x: Tensor) -> Any:
    z = m.lin(x)
    return z * torch.sigmoid(z) * 2.0, z


HAZARDS = {
    "an operand is written": _written_between,
    "z is needed elsewhere": _old_value,
    "an inner value is returned": _inner_value,
    "a quotient is rounded": _random,
}


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("name", HAZARDS)
def test_refused(name: str) -> None:
    model = linear_program(HAZARDS[name])
    with exporting():
        check(model, torch.randn(4, 8), torch.randn(4, 6), fuses={}, train=False)


IN_PLACE = {
    "by place": lambda r, y: aten.mul_.Tensor(r, y),
    "by name": lambda r, y: aten.mul_.Tensor(other=y, self=r),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_name_from_before_an_operation_in_place(name: str) -> None:
    """Which torch.export never writes, but a user may."""

    def body(m: Any, x: Tensor, y: Tensor) -> Tensor:
        r = torch.sigmoid(m.lin(x)) * 2.0
        IN_PLACE[name](r, y)
        return r

    check(linear_program(body), leaf(4, 8), leaf(4, 6), fuses={MUL: 1})


@pytest.mark.slow
def test_statistics_read_before_the_end_are_refused() -> None:
    def body(m: Any, x: Tensor) -> Any:
        c = F.batch_norm(m.conv(x), m.mean, m.var, m.gamma, m.beta, True)
        seen = m.mean.clone()
        return c * 2.0, seen

    with exporting():
        model = conv_program(body, nn.Conv2d(4, 6, 3), nn.Identity())
        check(model, leaf(3, 4, 8, 9), fuses={})


BATCHED = {
    "bmm": lambda m, x, y: F.relu(torch.bmm(x, y)),
    "baddbmm": lambda m, x, y: torch.baddbmm(x @ y, x, y),
    "einsum": lambda m, x, y: F.relu(torch.einsum("bij,bjk->bik", x, y)),
    "matmul": lambda m, x, y: F.relu(x @ y),
}


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("name", BATCHED)
def test_batched_gemms(name: str) -> None:
    with exporting():
        count = 2 if name == "baddbmm" else 1
        x, y = leaf(2, 3, 4), leaf(2, 4, 5)
        check(Program(BATCHED[name]), x, y, fuses={"auto_bmm": count}, **GROWTH)


@pytest.mark.slow
def test_a_check_that_is_proven_is_no_reader() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return torch.tanh(m.lin(x)).to(torch.float64) * 2.0

    with exporting():
        graphs = check(linear_program(body), leaf(4, 8), fuses={"auto_linear": 1}, **GROWTH)
    cast = "v0 = tanh(z); v1 = cast(v0, dtype=float64); v2 = mul(v1, s0)"
    assert epilogues(graphs) == [cast]


@pytest.mark.parametrize(
    "said, stays",
    [
        ({"dtype": torch.float32, "device": torch.device("cpu"), "layout": torch.strided}, False),
        ({"size": [4, 6], "stride": [6, 1]}, False),
        ({"dtype": torch.float64}, True),
        ({"device": torch.device("meta")}, True),
        ({"layout": torch.sparse_coo}, True),
        ({"size": [4]}, True),
        ({"size": [4, 7]}, True),
        ({"stride": [1, 4]}, True),
    ],
)
def test_a_check_that_may_fail_stays(said: dict[str, Any], stays: bool) -> None:
    node = _call(aten._assert_tensor_metadata.default, "x", **said)
    graph = node.graph
    drop_proven_checks(graph)
    assert any(n.op == "call_function" for n in graph.nodes) == stays


@pytest.mark.slow
def test_explain_takes_an_exported_program() -> None:
    model, x = linear_program(gate), torch.randn(4, 8)
    program = torch.export.export(model.eval(), (x,))
    for given in (program, program.module()):
        torch._dynamo.reset()
        report = fx_fuser.explain(given, x)
        (site,) = report.fused
        assert site.pattern == MUL
        assert "helpers.py" in str(report)


@pytest.mark.slow
def test_explain_names_lines_and_operations_of_the_source() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Any:
            z = self.lin(x)
            return z * torch.sigmoid(z) * 2.0, torch.atan(z)

    x = torch.randn(4, 8)
    (site,) = fx_fuser.explain(torch.export.export(Block(), (x,)), x).refused
    assert (site.code, site.missing) == ("z = self.lin(x)", 0)
    assert "used by atan, test_aten_rules.py" in site.reason
    returned = fx_fuser.explain(torch.export.export(linear_program(_both), (x,)), x)
    assert returned.refused[0].reason.endswith("is also returned")


def test_explain_says_that_the_mode_is_that_of_the_export() -> None:
    model, x = linear_program(gate), torch.randn(4, 8)
    program = torch.export.export(model, (x,))
    with pytest.raises(OptionError, match="in which it was exported"):
        fx_fuser.explain(program, x, train=True)


@pytest.mark.slow
def test_training_through_inductor() -> None:
    """The gradients of the parameters, which the program shares with the model."""
    model, x = linear_program(gate), torch.randn(4, 8)
    call = torch.compile(
        _exported(model, x), backend="fx_fuser", options={**OPTIONS, "inner": "inductor"}
    )
    call(x).sum().backward()
    got = model.lin.weight.grad
    model.lin.weight.grad = None
    gate(model, x).sum().backward()
    torch.testing.assert_close(got, model.lin.weight.grad)
    assert fused() == {MUL: 1}
