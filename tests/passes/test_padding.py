"""16-bit gemms of odd sizes: padded on a CPU wherever they may be (`cpu_ops`), and right.

Whether a padded gemm is faster only a GPU can tell: `benchmarks.nets16` times nets that have such.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from fx_fuser import reading
from fx_fuser.passes import padding
from fx_fuser.planning.bench_ops import TensorForm

BF16 = torch.bfloat16
OPTIONS = {"cpu_ops": True, "strict": True, "patterns": [], "auto": True}


@pytest.fixture(autouse=True)
def own_caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where Inductor's cache has a graph, from an earlier run, no pass runs. And no gemm is fused:
    on a GPU those of 16 bits are mostly left, with `cpu_ops` none is."""
    monkeypatch.setattr(reading, "_add_grown", lambda *args: None)
    with torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())):
        yield


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(f, backend="fx_fuser", options={**OPTIONS, **options})


def leaf(*size: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(size) * scale).to(dtype).requires_grad_()


def wide(value: Any) -> Any:
    return value.detach().double().requires_grad_(value.requires_grad)


def check(f: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Callable[..., Any]:
    """As near to float64 as eager mode, and with its strides."""
    run = compiled(f, **options)

    def observed(call: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
        y = call(*given)
        wanted = [v for v in given if v.requires_grad]
        return [y, *(torch.autograd.grad(y.float().square().sum(), wanted) if wanted else [])]

    mine, theirs = observed(run, list(inputs)), observed(f, list(inputs))
    exact = observed(f, [wide(v) for v in inputs])
    for a, b, e in zip(mine, theirs, exact, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        bound = max(2 * (b.double() - e).norm(), torch.finfo(a.dtype).eps / 4 * e.norm())
        assert (a.double() - e).norm() <= bound
    return run


def head(x: Tensor, w: Tensor) -> Tensor:
    """A language model's, with its loss."""
    logits = F.linear(x, w)
    return torch.log_softmax(logits.float(), -1).to(x.dtype)


def with_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b).relu()


def added(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.addmm(r, x, w.t(), beta=0.5, alpha=2.0).sin()


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((q * 2) @ (k * 0.5).mT * 0.25, -1) @ (v * 2)


def summed(a: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.baddbmm(a, x * 2, w * 2).sin()


def chained(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """What one gemm makes another reads, as it is and transposed."""
    y = (x * 2) @ (w * 2)
    return (y @ (u * 2)) + (y.mT @ y).sum()


def merged(x: Tensor, w: Tensor) -> Tensor:
    y = (x * 2) @ (w * 2)
    return y.reshape(-1) + (y * 2).mT.reshape(-1)


@pytest.mark.each_once
@pytest.mark.slow
@pytest.mark.parametrize(
    "f, sizes, expected",
    [
        (head, ((16, 24), (41, 24)), 3),  # forward, and both gradients
        pytest.param(with_bias, ((16, 24), (41, 24), (41,)), 3, marks=pytest.mark.slow),
        pytest.param(added, ((16, 24), (41, 24), (16, 41)), 3, marks=pytest.mark.slow),
        pytest.param(added, ((16, 24), (41, 24), (16, 1)), 3, marks=pytest.mark.slow),
        pytest.param(attention, ((3, 27, 16),) * 3, 6, marks=pytest.mark.slow),
        pytest.param(
            attention, ((2, 3, 9, 16), (2, 3, 11, 16), (2, 3, 11, 24)), 6, marks=pytest.mark.slow
        ),
        pytest.param(summed, ((3, 16, 5), (3, 16, 7), (3, 7, 5)), 3, marks=pytest.mark.slow),
        pytest.param(merged, ((15, 13), (13, 11)), 3, marks=pytest.mark.slow),
        pytest.param(chained, ((15, 13), (13, 11), (11, 7)), 9, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_values_gradients_and_strides(
    f: Callable[..., Tensor], sizes: Any, expected: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    scale = 0.5 if dtype == BF16 else 0.1  # fp16 overflows
    check(f, *(leaf(*size, dtype=dtype, scale=scale) for size in sizes))
    assert sum(counters[padding.COUNTERS].values()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("rows, k, left", [(2, 24, False), (64, 512, True)])
def test_a_result_that_is_returned_is_not_padded(rows: int, k: int, left: bool) -> None:
    """A slice has not eager's strides. The kernel for unaligned operands makes it, or
    Inductor pads it, if it is worth it: the larger one is compute-bound."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w)
        return y.view(rows, 8, 401), F.linear(w, x)[:, :8].sin()

    x, w = torch.randn(rows * 8, k, dtype=BF16), torch.randn(401, k, dtype=BF16)
    with torch.no_grad():
        made, expected = compiled(f)(x, w), f(x, w)
    assert made[0].is_contiguous()
    torch.testing.assert_close(made, expected, rtol=2e-2, atol=2e-1)
    assert counters[padding.COUNTERS] == ({} if left else {"mm_unaligned": 1})


@pytest.mark.parametrize(
    "view", [lambda y: y[:, 1:], lambda y: y.split(5, 1)[1], lambda y: y[3], lambda y: y.mT[2:]]
)
def test_nor_is_one_of_which_a_view_is_returned(view: Callable[[Tensor], Tensor]) -> None:
    def part(x: Tensor, w: Tensor) -> Tensor:
        return view(x @ w)

    x, w = leaf(8, 24), leaf(24, 41)
    gm = make_fx(part, tracing_mode="fake")(x, w)
    padding.Padding(strict=True, on_cpu=True)(gm.graph)
    gm.recompile()
    assert gm(x, w).stride() == part(x, w).stride()
    assert (
        gm.graph.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default) == []
    )


@pytest.mark.slow
def test_without_gradients() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        x, w = torch.randn(16, 24, dtype=BF16), torch.randn(41, 24, dtype=BF16)
        run = compiled(head)
        torch.testing.assert_close(run(x, w), head(x, w), rtol=2e-2, atol=2e-2)
    assert counters[padding.COUNTERS] == {"mm": 1}


@pytest.mark.slow
def test_zeros_meet_no_infinity() -> None:
    """Zeros behind K are in both operands."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin()

    x, w = torch.randn(16, 13, dtype=BF16), torch.randn(13, 8, dtype=BF16)
    x[3, 12], w[0, 1] = torch.inf, torch.nan
    with torch.no_grad():
        made, expected = compiled(f)(x, w), f(x, w)
    assert counters[padding.COUNTERS] == {"mm": 1}
    assert torch.equal(made.isnan(), expected.isnan()) and not expected.isnan().all()
    torch.testing.assert_close(made, expected, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.slow
def test_under_autocast() -> None:
    net = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 41))
    x = torch.randn(16, 24)

    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return net(x).sin()

    run = compiled(f)
    torch.testing.assert_close(run(x), f(x), rtol=2e-2, atol=2e-2)
    assert counters[padding.COUNTERS]["addmm"] == 1
    run(x).float().square().sum().backward()
    assert net[2].weight.grad is not None and net[2].weight.grad.is_contiguous()


@pytest.mark.slow
def test_one_twin_serves_all_readers_and_no_copy_is_made() -> None:
    """The gradient of the logits is written once, at the padded size."""
    passes: list[Graph] = []

    class Look(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            passes.append(graph)

        def uuid(self) -> Any:
            return "look"

    run = compiled(head, joint_custom_post_pass=Look())
    x, w = leaf(16, 24), leaf(41, 24)
    run(x, w).float().square().sum().backward()
    (graph,) = passes
    pads = graph.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default)
    assert len(pads) == 2, "one of the weight, one of the logits' gradient"


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize(
    "options",
    [{"auto": False}, {"shape_padding": False}, {"inner": "aot_eager"}, {"cpu_ops": False}],
    ids=str,
)
def test_options_that_leave_gemms_alone(options: dict[str, Any]) -> None:
    with torch.no_grad():
        compiled(head, **options)(torch.randn(16, 24, dtype=BF16), torch.randn(41, 24, dtype=BF16))
    assert not counters[padding.COUNTERS]


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("dtype, columns", [(torch.float32, 41), (BF16, 40), (BF16, 1)])
def test_what_is_no_odd_gemm_of_16_bits_stays(dtype: torch.dtype, columns: int) -> None:
    with torch.no_grad():
        compiled(head)(torch.randn(16, 24, dtype=dtype), torch.randn(columns, 24, dtype=dtype))
    assert not counters[padding.COUNTERS]


def test_dynamic_sizes_stay() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(f, backend="fx_fuser", options=OPTIONS, dynamic=True)
    with torch.no_grad():
        run(torch.randn(15, 13, dtype=BF16), torch.randn(13, 11, dtype=BF16))
    assert not counters[padding.COUNTERS]


def test_padding_alone_leaves_inductors_own_padding_on() -> None:
    seen: list[bool] = []

    class Look(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            seen.append(torch._inductor.config.comprehensive_padding)

        def uuid(self) -> Any:
            return "look"

    with torch.no_grad():
        run = compiled(head, joint_custom_post_pass=Look())
        run(torch.randn(16, 24, dtype=BF16), torch.randn(41, 24, dtype=BF16))
    assert seen == [True] and counters[padding.COUNTERS]


@pytest.mark.parametrize(
    "left, right, zeros",
    [
        ((13, 1), (5, 1), (0, 3, 3)),  # [11, 13] @ [13, 5]
        ((1, 11), (5, 1), (5, 0, 3)),  # the left one transposed: its rows are adjacent
        ((13, 1), (1, 13), (0, 3, 3)),
        ((1, 11), (1, 13), (5, 3, 3)),
    ],
)
def test_what_is_adjacent_in_memory_is_padded(left: Any, right: Any, zeros: Any) -> None:
    forms = [
        TensorForm(size, stride, BF16, torch.device("cpu"))
        for size, stride in (((11, 13), left), ((13, 5), right))
    ]
    assert padding._zeros_of(*forms) == zeros


@pytest.mark.slow
def test_what_a_copy_costs_counts_where_others_read_the_operand() -> None:
    """Inductor writes an operand padded if gemms alone read it; else it is written twice."""
    free: list[bool] = []

    class Look(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            gemms = set(graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))
            free.extend(padding._is_free(f, gemms) for g in gemms for f in g.args)  # type: ignore[arg-type]

        def uuid(self) -> Any:
            return "look"

    def alone(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(x.sin().t(), w)

    def also_summed(x: Tensor, w: Tensor) -> Tensor:
        y = x.sin()
        return torch.mm(y.t(), w) + y.sum()

    x, w = torch.randn(16, 13, dtype=BF16), torch.randn(16, 8, dtype=BF16)
    with torch.no_grad():
        for f in (alone, also_summed):
            compiled(f, cpu_ops=False, joint_custom_pre_pass=Look())(x, w)
    assert free == [True, False, False, False]


def test_a_failure_leaves_the_gemm() -> None:
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(padding._Twins, "of", None)
        x, w = torch.randn(16, 24, dtype=BF16), torch.randn(41, 24, dtype=BF16)
        run = compiled(head, strict=False)
        with pytest.warns(UserWarning, match="leaves a gemm to the library"):
            made = run(x, w)
    torch.testing.assert_close(made, head(x, w), rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_the_code_reads_no_padded_copy_of_what_a_pointwise_operation_makes() -> None:
    """Inductor writes the operand at the padded size in the kernel that makes it."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(x.sin(), w)

    with torch.no_grad():
        run = compiled(f)
        _, (code,) = run_and_get_code(
            run, torch.randn(16, 13, dtype=BF16), torch.randn(13, 8, dtype=BF16)
        )
    assert code.count("extern_kernels.mm(") == 1
    made = re.findall(r"buf\d+ = empty_strided_cpu\((.*?\)), ", code)
    assert made == ["(16, 16)", "(16, 8)", "(16, 8)"]  # sin(x) and w with zeros, and the result
