"""The op of inference, whose call is a text: `fx_fuser.ops.evaluate`."""

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
from fx_fuser.ops import evaluate

_ops = torch.ops.fx_fuser
X, WEIGHT, VECTOR = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.rand(4)
GEOMETRY = ([2, 1], [1, 0, -1, 2], [1, 1], 1)
TAIL = ("v0 = relu(z)", [X, VECTOR], [0.5, math.pi, -math.inf, 3], ["a b", ""], torch.bfloat16)
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (_ops.linear_kernel, (X, WEIGHT, None, "split", "", False, *TAIL, False)),
    (_ops.matmul_kernel, (X, WEIGHT, VECTOR, "library", "", True, *TAIL, True)),
    (_ops.bmm_kernel, (X, WEIGHT, "split", "", False, "", [], [], [], torch.float64, False)),
    (_ops.conv2d_kernel, (X, WEIGHT, None, *GEOMETRY, True, "", "", False, *TAIL, False)),
    (
        _ops.conv2d_batchnorm_kernel,
        (
            *(X, WEIGHT, None, VECTOR, VECTOR, None, VECTOR, *GEOMETRY, False, "stem", "", False),
            *(False, 0.1, 1e-5, *TAIL, False),
        ),
    ),
    (_ops.conv2d_folded, (X, WEIGHT, VECTOR, None, [1, 1], [0, 0], [1, 1], 1, True)),
]


def same(found: Any, given: Any) -> bool:
    if isinstance(given, torch.Tensor):
        return found is given
    if isinstance(given, (list, tuple)):
        return len(found) == len(given) and all(same(f, g) for f, g in zip(found, given))
    return type(found) in (type(given), float) and found == given


@pytest.mark.parametrize("packet, args", CALLS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_call_is_read_as_it_was_written(packet: Any, args: tuple[Any, ...]) -> None:
    brief = evaluate.arguments(packet.default, args)
    assert brief is not None
    tensors, text = brief
    op, filled = evaluate.read(text)
    assert op is packet.default
    assert same(filled(tensors), args)


@pytest.mark.parametrize("number", [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, 2**53])
def test_a_float_keeps_its_bits(number: float) -> None:
    args = (X, WEIGHT, "", "", False, "", [], [number], [], torch.float32, False)
    brief = evaluate.arguments(_ops.bmm_kernel.default, args)
    assert brief is not None
    *_, numbers, _, _, _ = evaluate.read(brief[1])[1](brief[0])
    assert math.copysign(1, numbers[0]) == math.copysign(1, number) and numbers[0] == number
    assert type(numbers[0]) is float


@pytest.mark.parametrize("text", ["", " ", "a  b", "s3:x t", "é · ∞", "t - #2 i-1"])
def test_any_string_passes(text: str) -> None:
    args = (X, WEIGHT, text, "", False, text, [X], [], [text, "", text], torch.float16, True)
    brief = evaluate.arguments(_ops.bmm_kernel.default, args)
    assert brief is not None
    assert same(evaluate.read(brief[1])[1](brief[0]), args)


def test_an_unknown_number_is_not_written() -> None:
    seen: list[Any] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(value for value in inputs if isinstance(value, torch.SymInt))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + x.shape[0], backend=keep, dynamic=True)(torch.randn(5))
    symbol = seen[0]
    args = (X, WEIGHT, VECTOR, None, [1, 1], [symbol, 0], [1, 1], 1, True)
    assert evaluate.arguments(_ops.conv2d_folded.default, args) is None


def test_nodes_stand_for_tensors() -> None:
    graph = Graph()
    x, weight, size = (graph.placeholder(name) for name in ("x", "weight", "size"))
    x.meta["val"], weight.meta["val"], size.meta["val"] = X, WEIGHT, 3
    args = (x, weight, None, None, [1, 1], [0, 0], [1, 1], 1, True)
    brief = evaluate.arguments(_ops.conv2d_folded.default, args)
    assert brief is not None and brief[0] == [x, weight]
    node = graph.call_function(evaluate.OP, brief)
    op, found = evaluate.called(node)
    assert op is _ops.conv2d_folded.default and list(found) == list(args)
    folded: Node = graph.call_function(_ops.conv2d_folded.default, args)
    assert evaluate.called(folded) == (_ops.conv2d_folded.default, args)
    with_size = (*args[:5], [size, 0], *args[6:])
    assert evaluate.arguments(_ops.conv2d_folded.default, with_size) is None


def test_the_op_keeps_its_contract() -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = X.contiguous(memory_format=layout)
        args = (x, WEIGHT, VECTOR, None, [1, 1], [1, 1], [1, 1], 1, True)
        brief = evaluate.arguments(_ops.conv2d_folded.default, args)
        assert brief is not None
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(evaluate.OP, brief, test_utils=tests)
        y = evaluate.OP(*brief)
        assert torch.equal(y, F.conv2d(x, WEIGHT, VECTOR, padding=1).relu())
        assert y.stride() == F.conv2d(x, WEIGHT, VECTOR, padding=1).stride()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x)) * 2.0
        z = self.linear(y.mean((2, 3)))
        return z * torch.sigmoid(z) * 2.0


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_graphs_call(trains: bool) -> None:
    """In inference all calls are of this op; where gradients or statistics are wanted, none is."""
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
    ops = [str(evaluate.called(n)[0]) for n in called]
    assert ops == ["fx_fuser.conv2d_batchnorm_kernel.default", "fx_fuser.linear_kernel.default"]
    assert {n.target is evaluate.OP for n in called} == {not trains}


def test_a_dtype_that_no_kernel_makes_is_not_written() -> None:
    args = (X, WEIGHT, "", "", False, "", [], [], [], torch.complex64, False)
    assert evaluate.arguments(_ops.bmm_kernel.default, args) is None
