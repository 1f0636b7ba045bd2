"""16-bit gemms of Inductor's graph by the kernel for unaligned operands.

`fx_fuser.passes.padding` looks at each of them, pads it, gives it to this kernel or leaves it,
whichever is faster. Kernels are for forms of operands, which only the graph tells, and if
Inductor's cache has the graph, no pass sees it: then the op asks for its kernel when it first runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fx_fuser.kernels.base import SIXTEEN_BITS
from fx_fuser.kernels.unaligned import family_for, form_of, gemm_of, is_bandwidth_bound, unaligned
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.passes.graph_pass import GEMMS, call, loaded
from fx_fuser.planning.bench_ops import TensorForm

KIND = "16-bit gemms"
SUFFIX = "_unaligned"  # of the operation's name in the counters
_aten = torch.ops.aten
PRODUCT = torch.ops.fx_fuser.unaligned_product.default


def spec_for(node: Node, left: TensorForm, right: TensorForm) -> KernelSpec | None:
    """The kernel of left [*, M, K] @ right [*, K, N]; None where it does not take the gemm,
    or the library is faster behind copies that pad."""
    if left.dtype not in SIXTEEN_BITS or node.kwargs or not _adds_bias(node, right):
        return None
    if len(left.size) != len(right.size) or len(left.size) > 3:
        return None
    (m, k), n = left.size[-2:], right.size[-1]
    if not is_bandwidth_bound(m, n, k):
        return None
    factors = left, _transposed(right)
    rows = [form_of(form.size, form.stride, form.offset) for form in factors]
    if None in rows:
        return None
    return gemm_of(family_for(m, n, k, *rows), left.dtype)  # type: ignore[arg-type]


def _transposed(form: TensorForm) -> TensorForm:
    size, stride = ((*v[:-2], v[-1], v[-2]) for v in (form.size, form.stride))
    return TensorForm(size, stride, form.dtype, form.device, form.offset)


def _adds_bias(node: Node, right: TensorForm) -> bool:
    """Does it add nothing, or a vector of a matrix's columns?"""
    if not GEMMS[node.target][0]:
        return True
    if len(right.size) > 2:
        return False
    bias = node.args[0]
    value = bias.meta.get("val") if isinstance(bias, Node) else None
    if not isinstance(value, Tensor) or value.dtype != right.dtype:
        return False
    return tuple(value.shape) == (right.size[-1],) and value.stride() == (1,)


def put(graph: Graph, node: Node, spec: KernelSpec) -> None:
    """Replace the gemm by the kernel."""
    left, right = (node.args[i] for i in GEMMS[node.target])
    assert isinstance(right, Node)
    bias = node.args[0] if GEMMS[node.target][0] else None
    with graph.inserting_before(node):
        rank = right.meta["val"].ndim
        order = [*range(rank - 2), rank - 1, rank - 2]
        rows = call(graph, node, _aten.permute.default, right, order)
        sizes = list(spec.family.sizes)
        made = call(graph, node, PRODUCT, left, rows, bias, spec.name, sizes)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def candidate(spec: KernelSpec, left: Tensor, right: Tensor) -> Callable[[], Sequence[Tensor]]:
    sizes = list(spec.family.sizes)
    return lambda: (PRODUCT(left, right.mT, None, spec.name, sizes),)


# What the op calls whose kernel nobody has loaded. It returns nothing: if the kernel does not
# build, the op finds none again, and takes the library from then on.
_LIBRARY = torch.library.Library("fx_fuser", "FRAGMENT")
_LIBRARY.define("load_unaligned(Tensor a, int[] sizes) -> ()")


def _load(a: Tensor, sizes: Sequence[int]) -> None:
    try:
        loaded([gemm_of(unaligned(*sizes), a.dtype)], a.device, KIND)
    except Exception as error:
        warnings.warn(
            f"fx_fuser leaves a 16-bit gemm to the library: {type(error).__name__}: {error}; "
            "please report it",
            stacklevel=2,
        )


_LIBRARY.impl("load_unaligned", _load, "CompositeExplicitAutograd")
