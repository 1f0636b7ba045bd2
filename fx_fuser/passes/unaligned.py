"""16-bit gemms of Inductor's graph by the kernels for unaligned operands.

`fx_fuser.passes.padding` looks at each of them, pads it, gives it to a kernel or leaves it,
whichever is faster. Kernels depend on the operands' forms, which only the graph tells, and if
Inductor's cache has the graph, no pass sees it: then the op asks for its kernel when it first runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fx_fuser.kernels.base import SIXTEEN_BITS
from fx_fuser.kernels.unaligned import (
    COMBS,
    UNALIGNED,
    comb_family,
    family_for,
    family_of_sizes,
    form_of,
    gemm_of,
    is_bandwidth_bound,
    is_by_combs,
)
from fx_fuser.native import limits
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.passes.graph_pass import GEMMS, call, loaded
from fx_fuser.planning.bench_ops import TensorForm

KIND = "16-bit gemms"
_aten = torch.ops.aten
PRODUCT = torch.ops.fx_fuser.unaligned_product.default


def name_of(spec: KernelSpec) -> str:
    """The name of its kernel in counters and messages."""
    return COMBS if is_by_combs(spec.family) else UNALIGNED


def spec_for(node: Node, left: TensorForm, right: TensorForm) -> KernelSpec | None:
    """The kernel of left [*, M, K] @ right [*, K, N]; None if no kernel supports the gemm, or the
    library is faster."""
    if left.dtype not in SIXTEEN_BITS or node.kwargs or not _adds_bias(node, right):
        return None
    if len(left.size) != len(right.size) or len(left.size) > 3:
        return None
    (m, k), n = left.size[-2:], right.size[-1]
    forms = [form_of(f.size, f.stride, f.offset) for f in (left, _transposed(right))]
    if None in forms:
        return None
    sizes: tuple[Any, ...] = (m, n, k, *forms)
    if is_bandwidth_bound(m, n, k):
        return gemm_of(family_for(*sizes), left.dtype)
    if len(left.size) > 2:
        return None
    # A CPU (`cpu_ops`) stands for the GPU that has the kernel.
    gpu = limits.of(left.device) if left.device.type == "cuda" else limits.H200
    family = comb_family(gpu.multiprocessors, *sizes)
    return gemm_of(family, left.dtype) if family else None


def _transposed(form: TensorForm) -> TensorForm:
    size, stride = ((*v[:-2], v[-1], v[-2]) for v in (form.size, form.stride))
    return TensorForm(size, stride, form.dtype, form.device, form.offset)


def adds(node: Node) -> bool:
    return GEMMS[node.target][0] > 0


def _adds_bias(node: Node, right: TensorForm) -> bool:
    """Does it add nothing, or a vector over a matrix's columns?"""
    if not adds(node):
        return True
    if len(right.size) > 2:
        return False
    bias = node.args[0]
    value = bias.meta.get("val") if isinstance(bias, Node) else None
    if not isinstance(value, Tensor) or value.dtype != right.dtype:
        return False
    return tuple(value.shape) == (right.size[-1],) and value.stride() == (1,)


def put(graph: Graph, node: Node, spec: KernelSpec) -> None:
    """Replace the gemm by the kernel. The one by combs adds no bias: that is added to the rounded
    product, as Inductor does where it fuses what reads an `addmm`."""
    left, right = (node.args[i] for i in GEMMS[node.target])
    assert isinstance(right, Node)
    bias = node.args[0] if adds(node) else None
    is_apart = bias is not None and is_by_combs(spec.family)
    with graph.inserting_before(node):
        rank = right.meta["val"].ndim
        order = [*range(rank - 2), rank - 1, rank - 2]
        rows = call(graph, node, _aten.permute.default, right, order)
        sizes = list(spec.family.sizes)
        fused = None if is_apart else bias
        made = call(graph, node, PRODUCT, left, rows, fused, spec.name, sizes)
        if is_apart:
            made = call(graph, node, _aten.add.Tensor, made, bias)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def candidate(
    spec: KernelSpec, adds: bool, left: Tensor, right: Tensor
) -> Callable[[], Sequence[Tensor]]:
    """adds: a bias, for which combs need a separate pass where nothing is fused with it."""
    sizes = list(spec.family.sizes)
    apart = right.new_zeros(right.shape[-1]) if adds and is_by_combs(spec.family) else None

    def run() -> Sequence[Tensor]:
        made = PRODUCT(left, right.mT, None, spec.name, sizes)
        return (made if apart is None else made.add_(apart),)

    return run


# The op calls this if its kernel is not loaded. It returns nothing: if the kernel does not build,
# the op finds none again, and uses the library from then on.
_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")
_LIBRARY.define("load_unaligned(Tensor a, int[] sizes) -> ()")


def _load(a: Tensor, sizes: Sequence[int]) -> None:
    try:
        loaded([gemm_of(family_of_sizes(sizes), a.dtype)], a.device, KIND)
    except Exception as error:
        warnings.warn(
            f"fx_fuser leaves a 16-bit gemm to the library: {type(error).__name__}: {error}; "
            "please report it",
            stacklevel=2,
        )


_LIBRARY.impl("load_unaligned", _load, "CompositeExplicitAutograd")
