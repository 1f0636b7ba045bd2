"""Broadcast products that are summed at once: which are gemms, and that nobody can tell."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from helpers import Program, compiled, leaf, recorded, run
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fx_fuser
from fx_fuser.passes import contractions
from fx_fuser.verify.accuracy import Observed, compare

B, M, N, K = 2, 33, 35, 39
Body = Callable[..., Tensor]


def found() -> dict[str, int]:
    return dict(counters[contractions.COUNTER])


def check(body: Body, *inputs: Tensor, **options: object) -> None:
    """Values, gradients and strides of results are as eager's."""
    model = Program(lambda self, *given: body(*given))
    eager, outputs = run(model, inputs, train=True)
    exact, _ = run(model, inputs, True, dtype=torch.float64, narrow=outputs)
    chosen = {"auto": True, **options}
    ours, got = run(model, inputs, True, lambda m: compiled(m, **chosen), narrow=outputs)
    seen, own, truth = (Observed(r.outputs, r.grads) for r in (ours, eager, exact))
    assert not compare(seen, own, truth)
    assert [g.stride() for g in got] == [o.stride() for o in outputs]


# ---- what is a gemm ------------------------------------------------------------------------------


def rows_times_columns(a: Tensor, b: Tensor) -> Tensor:  # [B, M, K], [B, K, N]
    return (a[..., None] * b[:, None]).sum(2)


def keywords(a: Tensor, b: Tensor) -> Tensor:
    return torch.sum(torch.mul(a[..., None], b[:, None]), dim=-2)


def an_axis(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(3).mul(b.unsqueeze(1)).sum(axis=2)


def kept(a: Tensor, b: Tensor) -> Tensor:
    return (a[..., None] * b[:, None]).sum((2,), keepdim=True)


def of_another_rank(a: Tensor, b: Tensor) -> Tensor:
    return (a[..., None] * b[0]).sum(2)


def transposed_afterwards(a: Tensor, b: Tensor) -> Tensor:
    return (a[..., None] * b[:, None]).sum(2).transpose(1, 2)


def by_aten(a: Tensor, b: Tensor) -> Tensor:
    product = torch.ops.aten.mul.Tensor(a[..., None], b[:, None])
    return torch.ops.aten.sum.dim_IntList(product, [2])


def other_way_round(a: Tensor, b: Tensor) -> Tensor:
    return (b[:, None] * a[..., None]).sum(2).tanh()


FORMS = {
    rows_times_columns: "abc,acd->abd",
    keywords: "abc,acd->abd",
    an_axis: "abc,acd->abd",
    kept: "abc,acd->abd",
    of_another_rank: "abc,cd->abd",
    transposed_afterwards: "abc,acd->abd",
    by_aten: "abc,acd->abd",
    other_way_round: "abc,acd->abd",
}


@pytest.mark.parametrize("body", FORMS, ids=lambda body: body.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.each_once
def test_a_gemm(body: Body, dtype: torch.dtype) -> None:
    check(body, leaf(B, M, K, dtype=dtype), leaf(B, K, N, dtype=dtype))
    assert found() == {FORMS[body]: 1}


def test_mambas_states() -> None:
    """transformers' Mamba-2 (5.17): [b, c, l, h, n] and [b, c, l, h, p] over l, then over n."""

    def states(b: Tensor, x: Tensor, c: Tensor) -> Tensor:
        held = (b[..., None, :] * x[..., None]).sum(dim=2)  # [b, c, h, p, n]
        return (c[..., None, :] * held[:, :, None, ...]).sum(-1)

    b, c, x = leaf(2, 3, 32, 4, 34), leaf(2, 3, 32, 4, 34), leaf(2, 3, 32, 4, 36)
    check(states, b, x, c)
    assert found() == {"abcde,abcdf->abdef": 1, "abcdf,abdef->abcde": 1}


@pytest.mark.parametrize("batch", [(1, 3, 4), (2, 1, 4), (2, 3, 1), (1, 1, 1)], ids=str)
def test_a_batch_of_one(batch: tuple[int, int, int]) -> None:
    def states(b: Tensor, x: Tensor) -> Tensor:
        return (b[..., None, :] * x[..., None]).sum(dim=2)

    samples, chunks, heads = batch
    check(states, leaf(samples, chunks, 32, heads, 34), leaf(samples, chunks, 32, heads, 36))
    assert sum(found().values()) == 1


def test_in_a_checkpoint() -> None:
    """Its body does not show the autocast that it is called under."""

    def body(a: Tensor, b: Tensor) -> Tensor:
        return checkpoint(rows_times_columns, a, b, use_reentrant=False)

    def cast(a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return body(a, b)

    check(cast, leaf(B, M, K), leaf(B, K, N))
    assert found() == {}
    check(body, leaf(B, M, K), leaf(B, K, N))
    assert found() == {"abc,acd->abd": 1}


def test_autocast_around_the_graph() -> None:
    """Backward runs under it, also that of a region without."""

    def body(a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return rows_times_columns(a, b)

    a, b = leaf(B, M, K), leaf(B, K, N)
    with torch.autocast("cpu", torch.bfloat16):
        compiled(body, auto=True)(a, b).sum().backward()
    assert found() == {}


def test_strides_that_a_gemm_has_not() -> None:
    """The caller sees how the sum lies. A gemm's batch is outermost."""

    def body(a: Tensor, b: Tensor) -> Tensor:
        return (a.permute(1, 0, 2)[..., None] * b[None]).sum(2)

    a, b = leaf(20, M, K), leaf(20, K, N)
    check(body, a, b)
    assert found() == {"abc,bcd->abd": 1}
    gemm = torch.einsum("abc,bcd->abd", a.permute(1, 0, 2), b)
    assert body(a, b).stride() != gemm.stride()


def test_its_site_is_fused() -> None:
    def body(a: Tensor, b: Tensor) -> Tensor:
        return torch.relu((a[..., None] * b[:, None]).sum(2)) * 2.0

    check(body, leaf(B, M, K), leaf(B, K, N))
    assert found() == {"abc,acd->abd": 1} and counters["fx_fuser"]


def test_explain_names_it() -> None:
    a, b = torch.randn(B, M, K), torch.randn(B, K, N)
    report = fx_fuser.explain(rows_times_columns, a, b, options={"cpu_ops": True})
    said = "runs as a gemm: einsum abc,acd-"
    assert said in " ".join(str(report).split()) and said in report.to_html()


# ---- what is left --------------------------------------------------------------------------------


def another_reader(a: Tensor, b: Tensor) -> Tensor:
    product = a[..., None] * b[:, None]
    return product.sum(2) + product.amax(2)


def a_wider_sum(a: Tensor, b: Tensor) -> Tensor:
    return (a[..., None] * b[:, None]).sum(2, dtype=torch.float64)


def into_a_tensor(a: Tensor, b: Tensor) -> Tensor:
    result = torch.zeros(B, M, N, dtype=a.dtype)
    with torch.no_grad():
        torch.sum(a[..., None] * b[:, None], 2, out=result)
    return result * a[..., :1]


def two_dimensions(a: Tensor, b: Tensor) -> Tensor:
    return (a[..., None] * b[:, None]).sum((0, 2))


def over_the_rows(a: Tensor, b: Tensor) -> Tensor:
    return (a[..., None] * b[:, None]).sum(1)


def of_few_columns(a: Tensor, b: Tensor) -> Tensor:
    return (a[..., None] * b[:, None, :, :31]).sum(2)


def of_few_terms(a: Tensor, b: Tensor) -> Tensor:
    return (a[..., :31, None] * b[:, None, :31]).sum(2)


def under_autocast(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (a[..., None] * b[:, None]).sum(2)


def written_in_between(a: Tensor, b: Tensor) -> Tensor:
    b = b * 1.0
    with torch.no_grad():
        product = a[..., None] * b[:, None]
        b.zero_()
        return product.sum(2)


def reshaped_afterwards(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        c = b[0] * 1.0
        result = (a[0, :, :, None] * c).sum(1)
        c.unsqueeze_(0)
    return result * a[0, :, :1]


def reshaped_itself(a: Tensor, b: Tensor) -> Tensor:
    return (a[0, :, :, None] * b[0]).sum(1).t_().tanh()


def of_two_dtypes(a: Tensor, b: Tensor) -> Tensor:
    return (a.double()[..., None] * b[:, None]).sum(2)


LEFT = [
    another_reader, a_wider_sum, into_a_tensor, two_dimensions, over_the_rows, of_few_columns,
    of_few_terms, under_autocast, written_in_between, reshaped_afterwards, reshaped_itself,
    of_two_dtypes,
]  # fmt: skip


@pytest.mark.parametrize("body", LEFT, ids=lambda body: body.__name__)
def test_no_gemm(body: Body) -> None:
    check(body, leaf(B, M, K), leaf(B, K, N))
    assert found() == {}


@pytest.mark.parametrize(
    "options", [{"auto": False}, {"patterns": [], "auto": None}, {"fp32": "tf32"}], ids=str
)
def test_options_that_leave_sums(options: dict[str, object]) -> None:
    check(rows_times_columns, leaf(B, M, K), leaf(B, K, N), **options)
    assert found() == {}


def test_on_a_cpu_inductor_keeps_its_kernel() -> None:
    check(rows_times_columns, leaf(B, M, K), leaf(B, K, N), cpu_ops=False)
    assert found() == {}


def test_a_sum_stays_exact_where_gemms_may_be_of_tf32() -> None:
    """The user's setting is for gemms, and wrote none. In 16 bits it says nothing."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        check(rows_times_columns, leaf(B, M, K), leaf(B, K, N))
        assert found() == {}
        bf16 = torch.bfloat16
        check(rows_times_columns, leaf(B, M, K, dtype=bf16), leaf(B, K, N, dtype=bf16))
        assert found() == {"abc,acd->abd": 1}
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("reduces", [False, True])
def test_a_sum_stays_exact_where_gemms_may_sum_in_fp16(accumulates: bool, reduces: bool) -> None:
    gemms = torch.backends.cuda.matmul
    before = gemms.allow_fp16_accumulation, gemms.allow_fp16_reduced_precision_reduction
    try:
        gemms.allow_fp16_accumulation = accumulates
        gemms.allow_fp16_reduced_precision_reduction = reduces
        f16 = torch.float16
        check(rows_times_columns, leaf(B, M, K, dtype=f16), leaf(B, K, N, dtype=f16))
        assert bool(found()) is not (accumulates or reduces)
    finally:
        gemms.allow_fp16_accumulation, gemms.allow_fp16_reduced_precision_reduction = before


@pytest.mark.parametrize("rows, is_gemm", [(1024, True), (1025, False)])
def test_gradients_of_long_sums_stay_exact(rows: int, is_gemm: bool) -> None:
    check(rows_times_columns, leaf(1, rows, K), leaf(1, K, N))
    assert bool(found()) is is_gemm
    with torch.no_grad():
        compiled(rows_times_columns, auto=True)(torch.randn(1, 1025, K), torch.randn(1, K, N))
    assert sum(found().values()) == is_gemm + 1


def test_dynamic_sizes_stay() -> None:
    check(rows_times_columns, leaf(B, M, K), leaf(B, K, N), dynamic=True)
    assert found() == {}


def test_an_infinite_factor_is_not_lost() -> None:
    a, b = leaf(B, M, K), leaf(B, K, N)
    with torch.no_grad():
        a[0, 0, 0], a[1, 2, 3], b[1, 3, 4] = float("inf"), float("nan"), 0.0
        expected = rows_times_columns(a, b)
        with recorded():
            ours = compiled(rows_times_columns, auto=True)(a, b)
    assert found() and torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours.isinf(), expected.isinf())


# ---- any -----------------------------------------------------------------------------------------


def random_sum(draw: random.Random) -> tuple[Body, list[Tensor], bool]:
    """A sum over a dimension of both factors, and whether it is a gemm. Each other dimension is one
    factor's or both's; a factor lies in any order, and may lack its first dimensions."""
    owners = ["x", "y", *draw.choices(["x", "y", "xy"], k=draw.randint(0, 1))]
    draw.shuffle(owners)
    dim = draw.randint(0, len(owners))
    owners.insert(dim, "xy")
    sizes = [draw.choice([1, 4, 32, 33, 34, 35]) for _ in owners]
    dtype = draw.choice([torch.float32, torch.bfloat16])
    tensors = []
    for factor in "xy":
        own = [n if factor in o else 1 for n, o in zip(sizes, owners)]
        order = draw.sample(range(len(own)), len(own))
        lies = torch.randn([own[i] for i in order], dtype=dtype)
        tensor = lies.permute([order.index(i) for i in range(len(own))])
        while tensor.ndim > 1 and tensor.shape[0] == 1 and draw.random() < 0.5:
            tensor = tensor[0]
        tensors.append(tensor.requires_grad_())
    given = dim - draw.choice([0, len(owners)])
    keepdim, ends = draw.random() < 0.3, draw.random() < 0.3
    of = {
        name: math.prod(n for i, (n, o) in enumerate(zip(sizes, owners)) if o == name and i != dim)
        for name in "xy"
    }

    def body(x: Tensor, y: Tensor) -> Tensor:
        result = (x * y).sum(given, keepdim=keepdim)
        return result if ends else result * 2.0

    whole = max(t.ndim for t in tensors) == len(owners)  # else `dim` is another
    counts = [of["x"], of["y"], sizes[dim]]
    few = dtype is torch.float32 and max(counts) > 1024
    return body, tensors, whole and min(counts) >= 32 and not few


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("seed", range(4))
def test_any_sum_of_products(seed: int) -> None:
    draw, gemms = random.Random(seed), 0
    for _ in range(20):
        body, tensors, is_gemm = random_sum(draw)
        try:
            body(*tensors)
        except (IndexError, RuntimeError):  # a factor lacks dimensions that the sum names
            continue
        counters.clear()
        torch._dynamo.reset()
        check(body, *tensors)
        assert not is_gemm or found()
        gemms += is_gemm
    assert gemms > 0
