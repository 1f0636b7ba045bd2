"""The ops of the anchor bmm: values, gradients, fakes; and who makes its products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from plan_cases import LIBRARY, SPLIT, decide
from test_bmm import gated_batch
from torch import Tensor
from torch.library import opcheck

import fx_fuser
from fx_fuser import registry
from fx_fuser.ops import run
from fx_fuser.planning import bench_ops
from fx_fuser.planning.plan import Plan


@pytest.fixture(autouse=True)
def pattern(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_patterns", [])
    fx_fuser.register_pattern(gated_batch)
    yield


# ---- the ops -------------------------------------------------------------------------------------

TEXT = "v0 = silu(z); v1 = mul(v0, t0); v2 = mul(v1, s0)"


def _tensors(lead: tuple[int, ...], dtype: torch.dtype, layout: str) -> tuple[Tensor, ...]:
    """x, weight and an operand of the epilogue; the first two permuted as in attention's code."""

    def made(m: int, n: int) -> Tensor:
        if layout == "rows":
            return torch.randn(*lead, m, n, dtype=dtype)
        if layout == "columns":
            return torch.randn(*lead, n, m, dtype=dtype).mT
        *front, last = lead  # heads: [B, S, H, D] as [B, H, S, D]
        return torch.randn(*front, m, last, n, dtype=dtype).transpose(-3, -2)

    x, w, r = made(4, 3), made(3, 5), torch.randn(*lead, 4, 5, dtype=dtype)
    return tuple(t.requires_grad_() for t in (x, w, r))


LEADS = [(2,), (2, 3), (2, 1, 3)]
leads = pytest.mark.parametrize("lead", LEADS, ids=str)
layouts = pytest.mark.parametrize("layout", ["rows", "columns", "heads"])


@pytest.mark.each_once
@leads
@layouts
@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
def test_gradcheck(lead: tuple[int, ...], layout: str, native: bool) -> None:
    def run(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        config = ("library", "library", False)
        dtypes = (torch.float64, torch.float64)
        op = torch.ops.fx_fuser.bmm.default
        return op(x, w, *config, TEXT, [r], [0.75], *dtypes, native)[0]

    assert torch.autograd.gradcheck(run, _tensors(lead, torch.float64, layout))


@pytest.mark.each_once
@leads
@layouts
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recompute"])
def test_the_split_product_has_the_librarys_gradients(
    lead: tuple[int, ...], layout: str, recompute: bool
) -> None:
    tensors = _tensors(lead, torch.float32, layout)
    found = []
    for maker in ("library", "split"):
        op = torch.ops.fx_fuser.bmm.default
        dtypes = (torch.float32, torch.float32)
        (y,) = op(*tensors[:2], maker, maker, recompute, TEXT, [tensors[2]], [0.75], *dtypes, True)
        found.append((y, *torch.autograd.grad(y, tensors, torch.ones_like(y))))
    for own, library, operand in zip(found[1][1:], found[0][1:], tensors):
        assert own.shape == operand.shape and own.is_contiguous()
        torch.testing.assert_close(own, library)
    torch.testing.assert_close(found[0][0], found[1][0])


@pytest.mark.parametrize("learns", [(True, False), (False, True)], ids=str)
def test_of_one_operand_only_the_other_is_kept(learns: tuple[bool, bool]) -> None:
    x, w, _ = (t.detach() for t in _tensors((2,), torch.float32, "rows"))
    x, w = (t.requires_grad_(g) for t, g in zip((x, w), learns))
    op = torch.ops.fx_fuser.bmm.default
    dtypes = (torch.float32, torch.float32)
    (y,) = op(x, w, "library", "library", False, "v0 = mul(z, s0)", [], [2.0], *dtypes, True)
    saved = {
        t.data_ptr()
        for t in y.grad_fn.saved_tensors
        if t is not None and t.untyped_storage().nbytes() > 4
    }
    assert saved == {(w if learns[0] else x).data_ptr()}


def _args(dtype: torch.dtype, layout: str = "heads", lead: tuple[int, ...] = (2, 3)) -> Any:
    x, w, r = _tensors(lead, dtype, layout)
    return (x, w, "library", "library", False, TEXT, [r], [0.75], dtype, dtype, True)


@pytest.mark.slow
@pytest.mark.each_once
@layouts
@pytest.mark.parametrize("native", [True, False], ids=["native", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype, native: bool, layout: str) -> None:
    opcheck(torch.ops.fx_fuser.bmm.default, (*_args(dtype, layout)[:-1], native))


def _detached(values: Any) -> Any:
    if isinstance(values, (list, tuple)):
        return type(values)(map(_detached, values))
    return values.detach() if isinstance(values, Tensor) else values


@pytest.mark.slow
@pytest.mark.each_once
@leads
@layouts
@pytest.mark.parametrize("save", [False, True], ids=["inference", "saving"])
def test_opcheck_kernel_and_recompute(layout: str, lead: tuple[int, ...], save: bool) -> None:
    *front, _, out, _ = _detached(_args(torch.float32, layout, lead))
    opcheck(run.MANY, run.arguments("bmm", (*front, [], out, save)))
    opcheck(run.IN_TORCH, run.arguments("bmm_recompute", (*front[:5], torch.randn(1))))
    x, w, *_ = front
    opcheck(torch.ops.fx_fuser.split_product.default, (x, w.mT, "a kernel"))


@leads
@layouts
def test_fakes_have_the_strides_of_the_results(layout: str, lead: tuple[int, ...]) -> None:
    """Dense in every layout of the operands, as torch.matmul's."""
    *front, _, out, _ = _detached(_args(torch.float32, layout, lead))
    x, w, *_ = front
    ops = torch.ops.fx_fuser

    def of(function: str, *args: Any) -> Any:
        return run.MANY(*run.arguments(function, args))

    calls: list[Callable[[Any], Any]] = [
        lambda v: of("bmm", *v(front), [], out, True)[0],
        lambda v: of("bmm", *v(front), [], out, True)[1],
        lambda v: of("bmm_recompute", *v(front[:5]), v(torch.randn(1)))[0],
        lambda v: ops.split_product(v(x), v(w).mT, "a kernel"),
        lambda v: ops.split_product(v(x).mT, v(torch.randn(*lead, 5, 4)), "a kernel"),
    ]
    for call in calls:
        real = call(lambda value: value)
        with torch._subclasses.FakeTensorMode() as mode:

            def faked(value: Any, mode: Any = mode) -> Any:
                if isinstance(value, list):
                    return [faked(v) for v in value]
                return mode.from_tensor(value) if isinstance(value, Tensor) else value

            fake = call(faked)
        assert real.is_contiguous() and real.stride() == fake.stride()
        assert (real.shape, real.dtype) == (fake.shape, fake.dtype)


# ---- plan ----------------------------------------------------------------------------------------


A, B = (3, 4, 8), (3, 8, 6)


def _swish(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(x @ w) * 2.0


@pytest.mark.parametrize("dtype, product", [
    (torch.float32, SPLIT), (torch.float64, LIBRARY), (torch.bfloat16, LIBRARY),
    (torch.float16, LIBRARY),
], ids=str)  # fmt: skip
def test_who_makes_the_product(
    match_of: Any, on_gpu: Any, dtype: torch.dtype, product: Any
) -> None:
    match = match_of(_swish, torch.randn(*A, dtype=dtype), torch.randn(*B, dtype=dtype))
    decision = decide(match, plan="always")
    assert isinstance(decision, Plan) and decision.choices == product


@pytest.mark.parametrize("precision, option, product", [
    ("ieee", "follow", SPLIT), ("tf32", "follow", LIBRARY), ("tf32", "split", SPLIT),
    ("ieee", "tf32", LIBRARY), ("ieee", "ieee", LIBRARY),
])  # fmt: skip
def test_option_fp32(match_of: Any, on_gpu: Any, precision: str, option: str, product: Any) -> None:
    match = match_of(_swish, torch.randn(*A), torch.randn(*B))
    torch.backends.cuda.matmul.fp32_precision = precision
    decision = decide(match, fp32=option, plan="always")
    assert isinstance(decision, Plan) and decision.choices == product


@layouts
def test_the_bench_of_training(match_of: Any, layout: str) -> None:
    x, w, _ = _tensors((2, 3), torch.float32, layout)
    match = match_of(_swish, x, w)
    forms = bench_ops.tensors_of(match)
    assert forms is not None
    assert [(f.size, f.stride) for f in forms if f] == [(t.shape, t.stride()) for t in (x, w)]
    with torch.no_grad():
        *ahead, library, split = (
            way() for way in bench_ops.benches(match, [LIBRARY, SPLIT], forms)
        )
    assert all(saved.shape == (2, 3, 4, 5) for _, saved in ahead)  # type: ignore[misc]
    torch.testing.assert_close(library, split)
    assert [grad.shape for grad in library] == [x.shape, w.shape]  # type: ignore[union-attr]
