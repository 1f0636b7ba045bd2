"""fp32 products of operands that were cast up from 16 bits: the kernels compile without spills
and, on a Hopper GPU, they and the graphs that call them are right."""

from __future__ import annotations

from collections.abc import Callable

import narrow_checks
import pytest
import torch
import torch.nn.functional as F
from checks import passes
from sm90 import gpu
from toolchains import needs_compilers
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks import narrow_sm90
from benchmarks.measure import float32_settings
from benchmarks.sm90 import relative
from fx_fuser.kernels.exact import EXACT_GEMMS
from fx_fuser.kernels.split import MIXED_GEMMS
from fx_fuser.native import binaries
from fx_fuser.passes import products

# ---- without a GPU -------------------------------------------------------------------------------


@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize(
    "specs",
    [EXACT_GEMMS, pytest.param(MIXED_GEMMS, marks=pytest.mark.slow)],
    ids=["exact", "mixed"],
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
def test_compiles_without_spills_or_serialised_products(
    tmp_path, monkeypatch, specs, dtype
) -> None:
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    assert all(path.stat().st_size > 0 for path in binaries.cubins(specs[dtype].texts, "sm_90a"))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("way, dtype", list(narrow_checks.every_way()))
def test_the_ops_in_torch(way, dtype, lead) -> None:
    """On a CPU, and for fake tensors."""
    x, weight = narrow_sm90.cast(way, dtype, torch.randn(*lead, 5, 7), torch.randn(4, 7))
    found = narrow_sm90.by_op(way, dtype, x, weight)
    assert torch.equal(found, F.linear(x.float(), weight.float()))


# ---- on a GPU: the checks, and the whole path -------------------------------------------------


@gpu
@pytest.mark.parametrize("seed", range(4))
def test_random_sizes_strides_and_alignments(seed) -> None:
    passes(narrow_checks.sweep, 60, seed)


@gpu
@pytest.mark.parametrize("check", [*narrow_checks.CHECKS, narrow_checks.accuracy])
def test_checks(check) -> None:
    with float32_settings("fp32"):
        passes(check)


class _Widest(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] if func is Tensor.float else func(*args, **(kwargs or {}))


def body_in_float64(body, x: Tensor, w: Tensor) -> Tensor:
    """The body, with its casts to fp32 left out."""
    with _Widest():
        return body(x, w)


# Also the number of products, of three in forward and backward, with an operand that was cast.
BODIES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "both": (lambda x, w: F.linear(x.float(), w.float()), 3),
    "both, adjacent columns": (lambda x, w: x.float() @ w.float(), 3),
    "one": (lambda x, w: F.linear(x.float() * 1.5, w.float()), 2),
}


@gpu
@pytest.mark.parametrize("dtype", narrow_sm90.DTYPES, ids=str)
@pytest.mark.parametrize("body, cast", BODIES.values(), ids=BODIES.keys())
def test_through_the_compiler(body, cast, dtype) -> None:
    """Values and gradients against float64, within the accuracy contract."""
    x = torch.randn(2, 2048, 2048, device="cuda", dtype=dtype)
    w = torch.randn(2048, 2048, device="cuda", dtype=dtype).mul_(2048**-0.5)
    dy = torch.randn(2, 2048, 2048, device="cuda")

    def step(run: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        leaves = [v.clone().requires_grad_() for v in (x, w)]
        y = run(*leaves)
        y.backward(dy)
        return [y.detach(), *(v.grad for v in leaves)]  # type: ignore[list-item]

    torch._dynamo.reset()
    counters.clear()
    of_graphs = torch._inductor.config.patch(fx_graph_cache=False)
    with of_graphs, torch._functorch.config.patch(enable_autograd_cache=False):
        ours = step(torch.compile(body, backend="fx_fuser", options={"strict": True}))
    names = counters[products.COUNTERS]
    assert sum(n for name, n in names.items() if " of " in name) == cast
    leaves = [v.double().requires_grad_() for v in (x, w)]
    y = body_in_float64(body, *leaves)
    y.backward(dy.double())
    exact = [y.detach(), *(v.grad for v in leaves)]
    floor = {0: 4e-7, 1: 2e-3, 2: 2e-3}  # the gradients are rounded to 16 bits
    for i, (found, eager, true) in enumerate(zip(ours, step(body), exact)):
        assert found.dtype == eager.dtype
        assert relative(found, true) <= max(1.5 * relative(eager, true), floor[i])
