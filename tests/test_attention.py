"""Attention by split products: what its ops give on a CPU, and which calls of ATen's they replace.

ATen's memory-efficient attention runs on CUDA alone, so graphs with it are written by hand here;
tests/test_attention_gpu.py has both on a GPU.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sm90 import needs_nvcc
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fx_fuser import attention, native, products
from fx_fuser.attention_pass import BACKWARD, FORWARD
from fx_fuser.epilogue import evaluate, parse
from fx_fuser.kernel_spec import KernelSpec

INF = math.inf
_ops = torch.ops.fx_fuser


def heads(b: int, h: int, m: int, d: int) -> Tensor:
    """As attention code makes them: [B, M, H, D] seen as [B, H, M, D]."""
    return torch.randn(b, m, h, d, dtype=torch.float64).transpose(1, 2)


def hidden_rows(b: int, h: int, m: int, n: int) -> Tensor:
    """A mask with a row that sees nothing, and keys that nobody sees."""
    mask = torch.zeros(b, 1, m, n, dtype=torch.float64)
    mask[..., -1] = -INF
    mask[0, :, m // 2] = -INF
    return mask


# name → B, H, M, N, D, Dv, causal, bias of those sizes
CASES: dict[str, tuple[tuple[int, ...], bool, Any]] = {
    "plain": ((2, 3, 8, 8, 4, 4), False, None),
    "causal": ((2, 3, 9, 9, 4, 4), True, None),
    "causal, fewer keys": ((1, 2, 9, 5, 4, 4), True, None),
    "causal, more keys": ((1, 2, 5, 9, 4, 4), True, None),
    "one head": ((1, 1, 33, 7, 3, 5), False, None),
    "v of other columns": ((2, 2, 5, 6, 4, 7), False, None),
    "bias of all heads": ((2, 3, 5, 6, 4, 4), False, lambda b, h, m, n: torch.randn(1, 1, m, n)),
    "bias of keys": ((2, 3, 5, 6, 4, 4), False, lambda b, h, m, n: torch.randn(b, 1, 1, n)),
    "expanded bias": (
        (2, 3, 5, 6, 4, 4), False, lambda b, h, m, n: torch.randn(1, 1, m, n).expand(b, h, m, n)
    ),
    "bias and causal": ((2, 3, 6, 6, 4, 4), True, lambda b, h, m, n: torch.randn(b, h, m, n)),
    "hidden rows": ((2, 3, 6, 6, 4, 4), False, hidden_rows),
    "one row": ((2, 3, 1, 40, 4, 4), False, None),
}  # fmt: skip


def case_of(name: str) -> tuple[list[Tensor], Tensor | None, bool, float]:
    torch.manual_seed(0)
    (b, h, m, n, d, dv), causal, make_bias = CASES[name]
    bias = None if make_bias is None else make_bias(b, h, m, n).double()
    return [heads(b, h, m, d), heads(b, h, n, d), heads(b, h, n, dv)], bias, causal, 0.3


def by_math(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """out and the logarithm of each row's sum; of rows that see nothing 0 and 0."""
    scores = q @ k.mT * scale + (0 if bias is None else bias)
    if causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        scores = scores.where(seen, -INF)
    blind = (scores == -INF).all(-1, keepdim=True)
    p = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    lse = scores.masked_fill(blind, 0).logsumexp(-1).masked_fill(blind[..., 0], 0)
    return p @ v, lse


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_forward_is_attention(name: str, with_lse: bool) -> None:
    tensors, bias, causal, scale = case_of(name)
    out, lse = _ops.attention(*tensors, bias, causal, scale, with_lse, [])
    expected, sums = by_math(*tensors, bias, causal, scale)
    torch.testing.assert_close(out, expected)
    assert out.transpose(1, 2).is_contiguous()
    rows = out.shape[2]
    if not with_lse:
        assert lse.shape == (*out.shape[:2], 0)
        return
    assert lse.shape == (*out.shape[:2], (rows + 31) // 32 * 32)
    torch.testing.assert_close(lse[..., :rows], sums)
    assert (lse[..., rows:] == INF).all()


@pytest.mark.parametrize("wanted", [[0, 1, 2], [0], [1], [2], [0, 2]], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_backward_is_autograds(name: str, wanted: list[int]) -> None:
    tensors, bias, causal, scale = case_of(name)
    leaves = [t.detach().requires_grad_() for t in tensors]
    expected, _ = by_math(*leaves, bias, causal, scale)
    dout = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, dout)
    out, lse = _ops.attention(*tensors, bias, causal, scale, True, [])
    found = _ops.attention_backward(dout, *tensors, bias, out, lse, causal, scale, wanted, [])
    for place, gradient in zip(wanted, found, strict=True):
        torch.testing.assert_close(gradient, gradients[place])
        assert gradient.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", CASES)
def test_the_ops_keep_their_contract(name: str) -> None:
    (q, k, v), bias, causal, scale = case_of(name)
    opcheck = torch.library.opcheck
    for with_lse in (False, True):
        opcheck(_ops.attention.default, (q, k, v, bias, causal, scale, with_lse, []))
    out, lse = _ops.attention(q, k, v, bias, causal, scale, True, [])
    args = (torch.randn_like(out), q, k, v, bias, out, lse, causal, scale, [0, 2], [])
    opcheck(_ops.attention_backward.default, args)


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_epilogues(name: str) -> None:
    """The steps that CUDA computes, in torch: scores, P and dS from the bare products."""
    (q, k, v), bias, causal, scale = case_of(name)
    front = [] if bias is None else [bias]
    scores_spec, _ = attention.forward_specs(bias is not None)
    of_p, of_ds, _ = attention.backward_specs(bias is not None, causal)

    def result(spec: KernelSpec, z: Tensor, t: list[Tensor], s: list[float]) -> Tensor:
        epilogue = parse(spec.definition.splitlines()[0].removeprefix("// "))
        assert len(spec.inputs) == 1 + len(t) and spec.scalars == len(s)
        tensors = {f"t{i}": value for i, value in enumerate(t)}
        numbers = {f"s{i}": torch.tensor(value, dtype=z.dtype) for i, value in enumerate(s)}
        made: Tensor = evaluate(epilogue, {"z": z, **tensors, **numbers})
        return made

    z = q @ k.mT
    scores = z * scale + (0 if bias is None else bias)
    torch.testing.assert_close(result(scores_spec, z, front, [scale]), scores)
    out, lse = _ops.attention(q, k, v, bias, causal, scale, True, [])
    numbers = torch.arange(1.0 + max(z.shape[2:]), dtype=z.dtype)
    rows, keys = numbers[1 : 1 + z.shape[2], None], numbers[: z.shape[3]]
    masks, zero = ([rows, keys], [0.0]) if causal else ([], [])
    column = lse[..., : z.shape[2], None]
    p = result(of_p, z, [*front, column, *masks], [scale, *zero])
    torch.testing.assert_close(p @ v, out)
    dots = torch.randn_like(column)
    ds = result(of_ds, z, [p, dots], [scale])
    torch.testing.assert_close(ds, p * (z - dots) * scale)


# ---- the pass -----------------------------------------------------------------------------------


def placeholder(graph: Graph, name: str, value: Tensor) -> Node:
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    node = graph.call_function(target, args, kwargs)
    values = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    node.meta["val"] = target(*values[0], **values[1])
    return node


def real_tensor(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    with unset_fake_temporarily():
        return torch.empty(size, dtype=dtype)


def written(
    *,
    causal: bool = False,
    with_bias: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    mask: tuple[bool, ...] = (True, True, True, False),
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, ...] = (2, 3, 5, 6, 4, 7),
    dynamic: bool = False,
) -> GraphModule:
    """A forward and a backward of ATen's, with the four results and the gradients as outputs."""
    b, h, m, n, d, dv = sizes
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        graph = Graph()
        shapes = {"q": (b, h, m, d), "k": (b, h, n, d), "v": (b, h, n, dv)}
        shapes |= {"dout": (b, h, m, dv), **({"bias": (b, h, m, n)} if with_bias else {})}
        inputs = {
            name: placeholder(graph, name, mode.from_tensor(real, static_shapes=not dynamic))
            for name, real in ((n, real_tensor(s, dtype)) for n, s in shapes.items())
        }
        q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
        bias = inputs.get("bias")
        named = {} if scale is None else {"scale": scale}
        ahead = call(graph, FORWARD, q, k, v, bias, True, dropout, causal, **named)
        out, lse, seed, offset = (call(graph, operator.getitem, ahead, i) for i in range(4))
        rest = (out, lse, seed, offset, dropout, [*mask], causal)
        back = call(graph, BACKWARD, dout, q, k, v, bias, *rest, **named)
        wanted = [i for i in range(4) if mask[i]]
        grads = [call(graph, operator.getitem, back, i) for i in wanted]
        graph.output((out, lse, seed, offset, *grads))
    return GraphModule({}, graph)


def passed(gm: GraphModule) -> dict[str, int]:
    counters.clear()
    products.Products(strict=True, on_cpu=True)(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return dict(counters[products.COUNTERS])


BOTH = {"attention": 1, "attention_backward": 1}


@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_graph_of_atens_attention(causal: bool, with_bias: bool, scale: float | None) -> None:
    gm = written(causal=causal, with_bias=with_bias, scale=scale)
    before = [node.meta["val"] for node in gm.graph.find_nodes(op="output")[0].args[0]]
    assert passed(gm) == BOTH
    after = [node.meta["val"] for node in gm.graph.find_nodes(op="output")[0].args[0]]
    for one, other in zip(before[:2] + before[4:], after[:2] + after[4:], strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 7)
    bias = [torch.randn(2, 3, 5, 6)] if with_bias else []
    dout = torch.randn(2, 3, 5, 7)
    out, lse, seed, offset, *grads = gm(q, k, v, dout, *bias)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    mask = bias[0].double() if bias else None
    exact = by_math(*leaves, mask, causal, 0.5 if scale is None else scale)
    torch.testing.assert_close(out.double(), exact[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse[..., :5].double(), exact[1], rtol=1e-5, atol=1e-6)
    assert seed == 0 and offset == 0 and seed.dtype == offset.dtype == torch.int64
    expected = torch.autograd.grad(exact[0], leaves, dout.double())
    for found, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(found.double(), other, rtol=1e-5, atol=1e-6)


def test_sizes_that_are_not_known() -> None:
    gm = written(dynamic=True, scale=0.2, with_bias=True)
    ahead = gm.graph.find_nodes(op="placeholder")[0].meta["val"]
    assert all(isinstance(size, torch.SymInt) for size in ahead.shape)
    env = ahead.shape[0].node.shape_env
    guards = len(env.guards)
    assert passed(gm) == BOTH
    assert len(env.guards) == guards
    # Without a scale it is the columns', which must be known then.
    assert passed(written(dynamic=True)) == {}


def test_gradients_that_nobody_wants() -> None:
    gm = written(mask=(True, False, True, False))
    assert passed(gm) == BOTH
    (back,) = gm.graph.find_nodes(op="call_function", target=_ops.attention_backward.default)
    assert back.args[9] == [0, 2]


@pytest.mark.parametrize(
    "what",
    [{"dropout": 0.1}, {"dtype": torch.float16}, {"sizes": (2, 3, 5, 0, 4, 7)}],
    ids=str,
)
def test_calls_that_are_left(what: dict[str, Any]) -> None:
    gm = written(**what)
    assert passed(gm) == {}
    assert len(gm.graph.find_nodes(op="call_function", target=FORWARD)) == 1


def test_a_bias_with_a_gradient_keeps_the_librarys_backward() -> None:
    gm = written(with_bias=True, mask=(True, True, True, True))
    assert passed(gm) == {"attention": 1}
    assert len(gm.graph.find_nodes(op="call_function", target=BACKWARD)) == 1


def test_without_the_cpu_ops_nothing_is_replaced() -> None:
    gm = written()
    counters.clear()
    products.Products(strict=True)(gm.graph)
    assert not counters[products.COUNTERS]


def test_the_reference_is_torchs_own() -> None:
    """by_math against F.scaled_dot_product_attention, rows that see nothing among them."""
    for name in CASES:
        tensors, bias, causal, scale = case_of(name)
        if bias is not None and causal:
            continue  # which it takes one of
        mask = None if bias is None else bias.expand(*tensors[0].shape[:3], tensors[1].shape[2])
        sdpa = F.scaled_dot_product_attention
        other = sdpa(*tensors, attn_mask=mask, is_causal=causal, scale=scale)
        torch.testing.assert_close(by_math(*tensors, bias, causal, scale)[0], other)


@needs_nvcc
def test_the_cuda_ops_take_what_their_schemas_say() -> None:
    native._load_shim()
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    (q, k, v), bias, causal, scale = case_of("bias of keys")
    out, lse = _ops.attention(q, k, v, bias, causal, scale, True, [])
    with pytest.raises(RuntimeError, match="q is not a CUDA tensor"):
        _ops.attention.default.redispatch(
            cuda, q, k, v, bias, causal, scale, True, ["a kernel"] * 2
        )
    args = (out, q, k, v, bias, out, lse, causal, scale, [0, 1, 2], ["a kernel"] * 2)
    with pytest.raises(RuntimeError, match="q is not a CUDA tensor"):
        _ops.attention_backward.default.redispatch(cuda, *args)
