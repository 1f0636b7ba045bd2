"""What the tests of attention share: tensors, a compiled function, eager and float64 beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import Graph, GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from fx_fuser.ops.attention import MASK
from fx_fuser.passes.masks import Reader

BF16 = torch.bfloat16
B, H, S, D = 2, 3, 6, 8
Attend = Callable[..., Tensor]
OPTIONS = {"inner": "aot_eager", "strict": True, "cpu_ops": True, "patterns": []}
sdpa = F.scaled_dot_product_attention


def tensors(
    *shapes: tuple[int, ...], dtype: torch.dtype = BF16, device: str = "cpu"
) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(s).to(device, dtype).requires_grad_() for s in shapes]


def compiled(attend: Attend, **options: Any) -> Attend:
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(attend, backend="fx_fuser", options={**OPTIONS, **options})


def formed_masks(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """Those that are formed from now on."""
    found, simplify = list[Node](), Reader.simplify

    def seen(self: Reader, module: GraphModule, graph: Graph, on_cpu: bool = False) -> Any:
        masks = simplify(self, module, graph, on_cpu)
        found.extend(n for n in graph.nodes if n.target is MASK)
        return masks

    monkeypatch.setattr(Reader, "simplify", seen)
    return found


def by_formula(attend: Attend) -> Attend:
    """A kernel makes something else of some masks."""

    def run(*inputs: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attend(*inputs)

    return run


def observed(run: Attend, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The result and the gradients, of those that are to have one."""
    y = run(*inputs)
    trained = [v for v in inputs if v.requires_grad]
    if not y.requires_grad:
        return [y]
    torch.manual_seed(1)
    dy = torch.randn(y.shape).to(y.device, y.dtype)
    return [y, *torch.autograd.grad(y, trained, dy, materialize_grads=True)]


def check(
    attend: Attend, inputs: Sequence[Tensor], run: Attend, strides: bool = True, factor: float = 2.0
) -> None:
    """factor: of eager's error. What is NaN for eager is NaN."""
    wide = [v.detach().double().requires_grad_(v.requires_grad) for v in inputs]
    mine, theirs = observed(run, inputs), observed(attend, inputs)
    for a, b, exact in zip(mine, theirs, observed(attend, wide), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.isnan(), b.isnan()) and not a.isinf().any()
        off, allowed = ((x.double() - exact).nan_to_num().norm() for x in (a, b))
        assert off <= max(
            factor * allowed, torch.finfo(a.dtype).eps / 4 * exact.nan_to_num().norm()
        )
    assert not strides or mine[0].stride() == theirs[0].stride()
