"""fp32 attention of Inductor's graphs by fp16 halves: what is replaced, what is left, and that
values stay right. On a CPU our functions run in torch (`cpu_ops`); on a GPU:
test_attention_split_gpu.py. The kernels themselves: tests/kernels/attention_checks.py."""

from __future__ import annotations

import functools
import itertools
import math
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from arriving import tensors_of
from attention_graphs import AsOnCuda, backward_graph, forward_graph, heads, qkv, replaced, targets
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fx_fuser.ops import run
from fx_fuser.ops.attention_split import BACKWARD, FORWARD
from fx_fuser.passes.attention_split import ATTENTION, ATTENTION_BACKWARD, COUNTERS
from tests.helpers import assert_close
from tests.helpers import run as run_model

NAME = "_scaled_dot_product_efficient_attention"
# Sums of 100 products at most, of values near 1: what fp32 may lose in them, and some more.
NEAR = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def no_counts() -> Iterator[None]:
    counters.clear()
    yield


def formula(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """In float64, and the logarithm of each row's sum."""
    scores = q.double() @ k.double().mT * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


SIZES = [(2, 3, 40, 40, 64), (1, 2, 33, 7, 8), (2, 1, 5, 96, 128)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_forward(sizes: tuple[int, ...], scale: float | None, causal: bool) -> None:
    """Queries beyond the keys too: causal is from the top left."""
    q, k, v = qkv(*sizes)
    gm = replaced(forward_graph(q, k, v, causal=causal, scale=scale))
    assert ATTENTION not in targets(gm) and run.MANY in targets(gm)
    out, lse = gm(q, k, v)
    exact, sums = formula(q, k, v, sizes[-1] ** -0.5 if scale is None else scale, causal)
    torch.testing.assert_close(out.double(), exact, **NEAR)
    rows = sizes[2]
    torch.testing.assert_close(lse[..., :rows].double(), sums, **NEAR)
    assert lse.shape[-1] == -(-rows // 32) * 32 and bool((lse[..., rows:] == math.inf).all())
    assert counters[COUNTERS] == {NAME: 1}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_backward(sizes: tuple[int, ...], causal: bool) -> None:
    q, k, v = qkv(*sizes)
    d_out, scale = heads(*sizes[:3], sizes[-1]), 0.2
    out, lse = forward_graph_of_ours(q, k, v, causal, scale)
    given = dict(zip(("d_out", "q", "k", "v", "out", "lse"), (d_out, q, k, v, out, lse)))
    gm = replaced(backward_graph(given, causal=causal, scale=scale))
    assert ATTENTION_BACKWARD not in targets(gm) and run.MANY in targets(gm)
    seed = torch.zeros((), dtype=torch.int64)
    found = gm(d_out, q, k, v, out, lse, seed, seed)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    exact = torch.autograd.grad(formula(*leaves, scale, causal)[0], leaves, d_out.double())
    for value, right in zip(found, exact, strict=True):
        torch.testing.assert_close(value.double(), right, **NEAR)
    assert counters[COUNTERS] == {f"{NAME}_backward": 1}


def forward_graph_of_ours(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = replaced(forward_graph(q, k, v, causal=causal, scale=scale))(q, k, v)
    counters.clear()
    return out, lse


@pytest.mark.parametrize("d", [8, 128])
@pytest.mark.parametrize("layout", ["rows first", "heads first"])
def test_results_have_torchs_layouts(layout: str, d: int) -> None:
    """At any length, since torch's backward may read ours, and ours torch's: the pass compares
    each, and raises where they differ."""
    for rows, keys in itertools.product((1, 32, 33), (1, 40)):
        q, k, v = qkv(2, 3, rows, keys, d)
        if layout == "heads first":
            q, k, v = (t.contiguous() for t in (q, k, v))
        for items, save in (((0, 1), True), ((0,), True), ((0,), False)):
            gm = forward_graph(q, k, v, items, save=save)
            before = outputs(gm)
            assert outputs(replaced(gm)) == before, (rows, keys)
            real = [(t.shape, t.stride()) for t in gm(q, k, v)]
            assert real == before
    assert counters[COUNTERS][NAME] == 18


def outputs(gm: GraphModule) -> list[Any]:
    *_, output = gm.graph.nodes
    return [(n.meta["val"].shape, n.meta["val"].stride()) for n in output.args[0]]


def test_the_functions() -> None:
    """Their fakes fit what they make, and they write to nothing else."""
    q, k, v = qkv(2, 3, 9, 12, 16)
    scale, lse = 0.25, torch.zeros(2, 3, 32)
    dropout = torch.tensor([5]), 0.1
    for function, tensors, more in (
        (FORWARD, (q, k, v), [True]),
        (FORWARD, (q, k[:, :1], v[:, :1]), [False]),
        (FORWARD, (q, k, v), [True, *dropout]),
        (BACKWARD, (q, q, k, v, q, lse), []),
        (BACKWARD, (q, q, k, v, q, lse), dropout),
    ):
        arguments = run.arguments(function, (*tensors, "", scale, True, *more))
        torch.library.opcheck(run.MANY, arguments, test_utils=("test_schema", "test_faketensor"))


def test_both_in_one_graph() -> None:
    """As where forward is computed again for backward, which reads what was replaced before it."""

    def both(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> Any:
        out, lse, seed, offset = ATTENTION(q, k, v, None, True, 0.0, True)
        tensors = d_out, q, k, v, None, out, lse, seed, offset
        return ATTENTION_BACKWARD(*tensors, 0.0, [True, True, True, False], True)[:3]

    q, k, v = qkv(1, 2, 9, 12, 16)
    d_out = heads(1, 2, 9, 16)
    gm = replaced(make_fx(both, tracing_mode="fake")(q, k, v, d_out))
    assert counters[COUNTERS] == {NAME: 1, f"{NAME}_backward": 1}
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    exact = torch.autograd.grad(formula(*leaves, 0.25, True)[0], leaves, d_out.double())
    for value, right in zip(gm(q, k, v, d_out), exact, strict=True):
        torch.testing.assert_close(value.double(), right, **NEAR)


def test_no_logarithms_are_made_that_nothing_reads() -> None:
    q, k, v = qkv(1, 2, 8, 8, 8)
    for save in (False, True):
        gm = replaced(forward_graph(q, k, v, (0,), save=save))
        assert targets(gm) == [run.ONE]


def test_seed_and_offset_are_there_for_those_who_save_them() -> None:
    q, k, v = qkv(1, 2, 8, 8, 8)
    gm = replaced(forward_graph(q, k, v, (0, 1, 2, 3)))
    for made in gm(q, k, v)[2:]:
        assert made.shape == () and made.dtype is torch.int64
    empty = torch.ops.aten.empty_strided.default
    assert targets(gm).count(empty) == 2


def test_one_head_for_all_queries_is_read_once() -> None:
    q, k, v = qkv(2, 1, 9, 12, 16)
    q = heads(2, 4, 9, 16)
    k, v = (t.expand(2, 4, 12, 16) for t in (k, v))
    gm = replaced(forward_graph(q, k, v))
    (fused,) = [node for node in gm.graph.nodes if node.target is run.MANY]
    assert [n.meta["val"].shape[1] for n in fused.args[0]] == [4, 1, 1]
    out, lse = gm(q, k, v)
    torch.testing.assert_close(out.double(), formula(q, k, v, 0.25, False)[0], **NEAR)
    given = {"d_out": heads(2, 4, 9, 16), "q": q, "k": k, "v": v, "out": out, "lse": lse}
    back = replaced(backward_graph(given))
    assert run.MANY in targets(back)
    seed = torch.zeros((), dtype=torch.int64)
    _, d_k, _ = back(*given.values(), seed, seed)
    assert d_k.shape == (2, 4, 12, 16)  # of each head of queries, as torch's


def repeated(q: Tensor, k: Tensor, v: Tensor, kept: bool = False, swaps: bool = False) -> Any:
    """As models do for grouped queries. kept: of the repeated keys. swaps: heads come in turns."""

    def of_each(t: Tensor) -> Tensor:
        batch, heads, rows, d = t.shape
        spread = t[:, None] if swaps else t[:, :, None]
        sizes = (batch, 3, heads, rows, d) if swaps else (batch, heads, 3, rows, d)
        return spread.expand(sizes).reshape(batch, 3 * heads, rows, d)

    keys = of_each(k)
    out, *_ = ATTENTION(q, keys, of_each(v), None, False)
    return (out, keys) if kept else out


@pytest.mark.parametrize(
    "given, heads_read",
    [({}, [6, 2, 2]), ({"kept": True}, [6, 6, 6]), ({"swaps": True}, [6, 6, 6])],
    ids=str,
)
def test_heads_that_are_repeated_are_read_once(
    given: dict[str, bool], heads_read: list[int]
) -> None:
    """Where no copy of them is needed for something else."""
    _, k, v = qkv(2, 2, 9, 12, 16)
    q = heads(2, 6, 9, 16)
    gm = make_fx(functools.partial(repeated, **given), tracing_mode="fake")(q, k, v)
    gm = replaced(gm)
    (fused,) = [node for node in gm.graph.nodes if node.target is run.ONE]
    assert [n.meta["val"].shape[1] for n in fused.args[0]] == heads_read
    copies = targets(gm).count(torch.ops.aten.clone.default)
    assert copies == (0 if heads_read == [6, 2, 2] else 2)
    out = gm(q, k, v)
    swaps, times = given.get("swaps"), 3
    k, v = (t.repeat(1, times, 1, 1) if swaps else t.repeat_interleave(times, 1) for t in (k, v))
    exact = formula(q, k, v, 0.25, False)[0]
    torch.testing.assert_close((out[0] if given.get("kept") else out).double(), exact, **NEAR)


BIAS = torch.zeros(1, 2, 8, 8)
_Q = heads(1, 2, 8, 64)


def odd_rows(step: int) -> Tensor:
    return torch.randn(1, 8, 2, 64 + step)[..., :64].transpose(1, 2)


LEFT: dict[str, Callable[[], GraphModule]] = {
    "a bias": lambda: forward_graph(_Q, _Q, _Q, bias=BIAS),
    "dropout": lambda: forward_graph(_Q, _Q, _Q, dropout=0.1),
    "d of 136": lambda: forward_graph(*qkv(1, 2, 8, 8, 136)),
    "d of 4": lambda: forward_graph(*qkv(1, 2, 8, 8, 4)),
    "d of 12": lambda: forward_graph(*qkv(1, 2, 8, 8, 12)),
    "values of another d": lambda: forward_graph(_Q, _Q, heads(1, 2, 8, 32)),
    "16 bits": lambda: forward_graph(*(t.bfloat16() for t in qkv(1, 2, 8, 8, 64))),
    "float64": lambda: forward_graph(*(t.double() for t in qkv(1, 2, 8, 8, 64))),
    "rows of q apart by no vector": lambda: forward_graph(odd_rows(1), _Q, _Q),
    "rows of v apart by no vector": lambda: forward_graph(_Q, _Q, odd_rows(2)),
    "k begins between two vectors": lambda: forward_graph(
        _Q, torch.randn(1, 8, 2, 68)[..., 1:65].transpose(1, 2), _Q
    ),
    "elements that are not adjacent": lambda: forward_graph(_Q, _Q, _Q.mT.contiguous().mT),
    "one row for all": lambda: forward_graph(_Q, _Q[:, :, :1].expand(1, 2, 8, 64), _Q),
    "one head of k, several of v": lambda: forward_graph(_Q, _Q[:, :1].expand(1, 2, 8, 64), _Q),
    "no keys": lambda: forward_graph(*qkv(1, 2, 8, 0, 64)),
    "a negative scale": lambda: forward_graph(_Q, _Q, _Q, scale=-1.0),
    "a scale of 0": lambda: forward_graph(_Q, _Q, _Q, scale=0.0),
    "an infinite scale": lambda: forward_graph(_Q, _Q, _Q, scale=math.inf),
    "logarithms that torch does not make": lambda: forward_graph(_Q, _Q, _Q, save=False),
    "on a GPU, which a CPU's pass is not for": lambda: forward_graph(_Q, _Q, _Q, device="cuda"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_torch(name: str) -> None:
    gm = LEFT[name]()
    before = str(gm.graph)
    assert str(replaced(gm).graph) == before and not counters[COUNTERS]


def saved(**other: Tensor) -> dict[str, Tensor]:
    lse = torch.zeros(1, 2, 32)
    return {"d_out": _Q, "q": _Q, "k": _Q, "v": _Q, "out": _Q, "lse": lse, **other}


LEFT_IN_BACKWARD: dict[str, Callable[[], GraphModule]] = {
    "a bias": lambda: backward_graph(saved(), bias=BIAS),
    "dropout": lambda: backward_graph(saved(), dropout=0.1),
    "the bias's gradient is asked for": lambda: backward_graph(saved(), mask=(True,) * 4),
    "a gradient of one row for all": lambda: backward_graph(
        saved(d_out=torch.ones(()).expand(1, 2, 8, 64))
    ),
    "logarithms without padding": lambda: backward_graph(saved(lse=torch.zeros(1, 2, 8))),
    "logarithms with gaps": lambda: backward_graph(saved(lse=torch.zeros(1, 2, 64)[..., :32])),
    "a result of 16 bits": lambda: backward_graph(saved(out=_Q.half())),
    "d of 136": lambda: backward_graph(
        dict(zip(("d_out", "q", "k", "v", "out", "lse"),
                 (*[heads(1, 2, 8, 136)] * 5, torch.zeros(1, 2, 32))))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_IN_BACKWARD)
def test_what_is_left_to_torch_in_backward(name: str) -> None:
    gm = LEFT_IN_BACKWARD[name]()
    before = str(gm.graph)
    assert str(replaced(gm).graph) == before and not counters[COUNTERS]


def test_the_backward_that_is_left_would_be_taken() -> None:
    assert ATTENTION_BACKWARD not in targets(replaced(backward_graph(saved())))


def test_numbers_that_change_are_left() -> None:
    """A node in place of a number."""
    for place, name in ((5, None), (None, "scale")):
        gm = forward_graph(_Q, _Q, _Q)
        (node,) = gm.graph.find_nodes(op="call_function", target=ATTENTION)
        with gm.graph.inserting_before(node):
            number = gm.graph.placeholder("number")
        if place is not None:
            node.update_arg(place, number)
        else:
            node.kwargs = {"scale": number}
        assert ATTENTION in targets(replaced(gm)), name


# ---- through Inductor ---------------------------------------------------------------------------


def attend(x: Tensor, w: Tensor) -> Tensor:
    batch, rows, _ = x.shape
    q, k, v = (x @ w).view(batch, rows, 3, 2, 8).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).reshape(batch, rows, 16).tanh()


class Attending(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(16, 48) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return attend(x, self.w)


def compiled(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    given = {"cpu_ops": True, "strict": True, "joint_custom_pre_pass": AsOnCuda(), **options}
    return torch.compile(model, backend="fx_fuser", options=given)


def test_heads_arrive_with_adjacent_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes no others. By itself Inductor would copy in the layout that they have."""

    def of_images(x: Tensor) -> Tensor:
        q, k, v = (t.sin().mT.contiguous() for t in x.view(3, 2, 2, 8, 12))
        return F.scaled_dot_product_attention(q, k, v)

    calls = tensors_of(monkeypatch, FORWARD)[FORWARD]
    with torch.no_grad(), torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())):
        compiled(of_images)(torch.randn(3 * 2 * 2 * 8 * 12))
    ((*heads_of_all,),) = calls
    assert len(heads_of_all) == 3 and all(t.is_contiguous() for t in heads_of_all)


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
def test_values_and_gradients(train: bool) -> None:
    """At a length that is not a multiple of 32: logarithms have rows that no query has."""
    torch.manual_seed(0)
    model, inputs = Attending(), (torch.randn(2, 41, 16),)
    eager, outputs = run_model(model, inputs, train)
    exact, _ = run_model(model, inputs, train, dtype=torch.float64, narrow=outputs)
    ours, _ = run_model(model, inputs, train, compiled, narrow=outputs)
    both = {NAME: 1, f"{NAME}_backward": 1}
    assert counters[COUNTERS] == (both if train else {NAME: 1})
    assert_close(ours, eager, exact)


@pytest.mark.slow
def test_dynamic_sizes_are_compiled_once() -> None:
    torch.manual_seed(0)
    model = Attending()
    fused = compiled(model)
    with torch.no_grad():
        for batch, rows in ((2, 41), (3, 32), (5, 7)):
            x = torch.randn(batch, rows, 16)
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 1)
            torch.testing.assert_close(fused(x), model(x))
    assert counters["stats"]["unique_graphs"] == 1 and counters[COUNTERS] == {NAME: 1}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"fp32": "ieee"}, {"auto": False}], ids=str)
def test_options_that_leave_attention_alone(options: dict[str, Any]) -> None:
    """Torch's own operation is then left, which a CPU has no kernel for."""
    with torch.no_grad(), pytest.raises(Exception, match="efficient_attention"):
        compiled(Attending(), **options)(torch.randn(2, 8, 16))
    assert not counters[COUNTERS]
