"""The ops whose call is a text: `fx_fuser.ops.run`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch.fx import Graph, Node

import fx_fuser  # noqa: F401  (defines the ops)
from fx_fuser.ops import run

_ops = torch.ops.fx_fuser
X, WEIGHT, VECTOR = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.rand(4)
GEOMETRY = ([2, 1], [1, 0, -1, 2], [1, 1], 1)
TAIL = ("v0 = relu(z)", [X, VECTOR], [0.5, math.pi, -math.inf], ["a b", ""], torch.bfloat16)
FOLDED = (X, WEIGHT, VECTOR, None, [1, 1], [0, 0], [1, 1], 1, True)
CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("linear", (X, WEIGHT, None, "split", "", False, *TAIL, False)),
    ("matmul", (X, WEIGHT, VECTOR, "library", "", True, *TAIL, True)),
    ("bmm", (X, WEIGHT, "split", "", False, "", [], [], [], torch.float64, False)),
    ("conv2d", (X, WEIGHT, None, *GEOMETRY, True, "", "", False, *TAIL, False)),
    (
        "conv2d_batchnorm",
        (
            *(X, WEIGHT, None, VECTOR, VECTOR, None, VECTOR, *GEOMETRY, False, "stem", "", False),
            *(False, 0.1, 1e-5, *TAIL, False),
        ),
    ),
    ("conv2d_folded", FOLDED),
]


def same(found: Any, given: Any) -> bool:
    if isinstance(given, torch.Tensor):
        return found is given
    if isinstance(given, (list, tuple)):
        return len(found) == len(given) and all(same(f, g) for f, g in zip(found, given))
    return type(found) is type(given) and found == given


def read(t: list[torch.Tensor], program: str, *sizes: list[Any]) -> tuple[str, list[Any]]:
    name, filled = run.read(program)
    return name, filled(t, *sizes)


@pytest.mark.parametrize("name, args", CALLS, ids=[name for name, _ in CALLS])
def test_a_call_is_read_as_it_was_written(name: str, args: tuple[Any, ...]) -> None:
    found, filled = read(*run.arguments(name, args))
    assert found == name
    assert same(filled, args)


@pytest.mark.parametrize("number", [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, 2.0**53])
def test_a_float_keeps_its_bits(number: float) -> None:
    _, (found,) = read(*run.arguments("f", (number,)))
    assert math.copysign(1, found) == math.copysign(1, number) and found == number
    assert type(found) is float


@pytest.mark.parametrize("text", ["", " ", "a  b", "s3:x t", "é · ∞", "t - #2 i-1"])
def test_any_string_passes(text: str) -> None:
    args = (X, text, False, text, [X], [], [text, "", text], torch.float16, True)
    assert same(read(*run.arguments("f", args))[1], args)


def test_a_number_that_changes_is_a_size() -> None:
    """One program serves all of them."""
    seen: list[Any] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(value for value in inputs if isinstance(value, torch.SymInt))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + x.shape[0], backend=keep, dynamic=True)(torch.randn(5))
    symbol = seen[0]
    t, program, sizes = run.arguments("f", (X, symbol, 3, [1, symbol, 0], VECTOR))
    assert program == "f t n i3 #3 i1 n i0 t" and len(sizes) == 2
    assert same(read(t, program, [7, 8])[1], [X, 7, 3, [1, 8, 0], VECTOR])


def test_a_dtype_that_no_kernel_makes_is_refused() -> None:
    with pytest.raises(KeyError, match="complex64"):
        run.arguments("f", (torch.complex64,))


def test_nodes_stand_for_tensors() -> None:
    graph = Graph()
    x, weight, size = (graph.placeholder(name) for name in ("x", "weight", "size"))
    node = graph.call_function(run.MANY, ([x, weight], "f t - #2 i1 n t", [size]))
    name, found = run.called(node)
    assert name == "f" and list(found) == [x, None, [1, size], weight]
    for operand, value in ((x, X), (weight, WEIGHT), (size, 7)):
        operand.meta["val"] = value
    assert run.arguments("f", (x, [size, weight], x)) == ([x, weight, x], "f t #2 i7 t t")
    other: Node = graph.call_function(torch.relu, (x,))
    assert run.called(other) == (torch.relu, (x,))


def test_the_op_keeps_its_contract() -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = X.contiguous(memory_format=layout)
        args = (x, WEIGHT, VECTOR, None, [1, 1], [1, 1], [1, 1], 1, True)
        given = run.arguments("conv2d_folded", args)
        torch.library.opcheck(run.ONE, given, test_utils=("test_schema", "test_faketensor"))
        y = run.ONE(*given)
        assert torch.equal(y, F.conv2d(x, WEIGHT, VECTOR, padding=1).relu())
        assert y.stride() == F.conv2d(x, WEIGHT, VECTOR, padding=1).stride()


def test_y_alone_of_a_call_with_a_size() -> None:
    """The op for y alone has no argument for sizes, which cost the host even where absent."""
    assert [a.name for a in run.ONE._schema.arguments] == ["t", "program"]
    t, program = run.arguments("conv2d_folded", (*FOLDED[:5], [1, 0], *FOLDED[6:]))
    y = run.one(t, program.replace("#2 i1 i0", "#2 n i0"), [1])()
    assert torch.equal(y, run.one(t, program)()) and y.shape[2:] == (5, 3)


def test_no_two_overloads_have_the_same_types() -> None:
    """torch takes these for one another when it frees them, which aborts a process at its end."""
    schemas = [
        getattr(torch.ops.fx_fuser.run, o)._schema for o in torch.ops.fx_fuser.run.overloads()
    ]
    types = [str([v.type for v in (*s.arguments, *s.returns)]) for s in schemas]
    assert len(types) == len(set(types)) == 4


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x)) * 2.0
        z = self.linear(y.mean((2, 3)))
        return z * torch.sigmoid(z) * 2.0


@pytest.mark.slow
@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_graphs_call(trains: bool) -> None:
    """In inference all are for y alone; where gradients or statistics are wanted, none is."""
    called: list[Node] = []

    def seen(graph: Graph) -> None:
        called.extend(n for n in graph.nodes if str(n.target).startswith("fx_fuser"))

    options = {"strict": True, "plan": "always", "cpu_ops": True}
    model = Gated().train(trains)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="fx_fuser", options=options)
    place = "joint_custom_post_pass" if trains else "post_grad_custom_pre_pass"
    with torch.set_grad_enabled(trains), fresh_cache(), config.patch({place: seen}):
        y = compiled(X)
    model.eval()
    if not trains:
        torch.testing.assert_close(y, model(X))
    names = ["conv2d_batchnorm", "linear"]
    assert [run.called(n)[0] for n in called] == names
    assert {n.target for n in called} == {run.MANY if trains else run.ONE}
