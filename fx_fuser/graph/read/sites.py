"""Find the anchors of a graph: the main operations that an epilogue can be fused to.

| kind               | the value z of the site                                   |
|--------------------|-----------------------------------------------------------|
| `linear`           | x · weightᵀ + bias: F.linear, addmm, `x @ w.t() + b`       |
| `matmul`           | x · weight + bias: `x @ w + b`, addmm, with a 2-D weight    |
| `bmm`              | x · weight of batches: torch.bmm, `x @ y` of rank 3 or more |
| `conv2d`           | F.conv2d(x, weight, bias)                                 |
| `conv2d_batchnorm` | F.batch_norm(F.conv2d(x, weight, bias), …)                |

A pattern's trace has no shapes: there `x @ w` is a `matmul`, and a pattern for batched gemms says
torch.bmm. `graph.prepare.decompose` runs before, so that the gemm of a baddbmm, of an addmm with
factors or another addend than a bias, and of an einsum is a node.

The names of a site's operands are those of the anchor's op schema in `fx_fuser.anchors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fx_fuser.graph.read.canonical import Expr, Operand
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.graph.read.source import called_name
from fx_fuser.graph.read.view import View

# Names of functions that multiply and sum.
GEMMS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"})
CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d", "convolution"})
ATTENTION_NAMES = frozenset(
    {"scaled_dot_product_attention", "attention"}
)  # the second: fx_fuser's op
_TRANSPOSED = {f"conv_transpose{d}d" for d in (1, 2, 3)}
_OTHERS = "mv dot vdot inner addmv addbmm tensordot bilinear multi_dot lstm gru"
_BY_GROUP = {"grouped_mm", "_grouped_mm", "_scaled_mm"}
# Where `site_at` finds no anchor in one of these, only Inductor has a kernel for it.
_PRODUCTS = GEMMS | CONVOLUTIONS | ATTENTION_NAMES | _TRANSPOSED | {*_OTHERS.split()} | _BY_GROUP

# Names of anchors' operands, leaves and results. Values are looked up by name, so a pattern's
# wildcards must not have these (`graph.match.trace` renames those that do).
ANCHOR_NAMES = frozenset(
    "x weight bias running_mean running_var gamma beta c mean var eps out".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Site:
    """One anchor in one graph.

    kind: a name of the table above. node: the node whose value is z. nodes: every node the anchor
    consists of. operands: name → node or None. attrs: name → constant of the call.
    """

    kind: str
    node: Node
    nodes: tuple[Node, ...]
    operands: dict[str, Node | None]
    attrs: dict[str, Any]


def site_at(view: View, node: Node) -> Site | None:
    """The anchor whose value `node` is, or None."""
    expr = view.canonical(node)
    if expr is None:
        return None
    if expr.op == "linear":
        return _linear("linear", node, (node,), expr.args)
    if expr.op == "conv2d":
        return _conv2d(node, expr)
    if expr.op == "batch_norm":
        return _conv2d_batchnorm(view, node, expr)
    if expr.op == "matmul":
        return _matmul(view, node, expr)
    if expr.op == "bmm":
        return _batched(node, expr)
    if expr.op == "add":
        return _matmul_with_bias(view, node, expr)
    return None


def outermost(view: View) -> list[Site]:
    """Every anchor of the graph, once: a convolution under a batch_norm is part of that anchor."""
    sites = [s for s in (site_at(view, n) for n in view.nodes) if s is not None]
    inner = {n for s in sites for n in s.nodes if n is not s.node}
    return [s for s in sites if s.node not in inner]


def products_without_anchor(view: View, sites: Sequence[Site]) -> list[Node]:
    """The products of a graph that are part of none of its sites."""
    anchored = {node for site in sites for node in site.nodes}
    return [n for n in view.nodes if called_name(n) in _PRODUCTS and n not in anchored]


def _nodes_or_none(operands: tuple[Operand, ...]) -> bool:
    return all(o is None or isinstance(o, Node) for o in operands)


def _linear(
    kind: str, node: Node, nodes: tuple[Node, ...], operands: tuple[Operand, ...]
) -> Site | None:
    if not _nodes_or_none(operands):
        return None
    return Site(kind, node, nodes, dict(zip(("x", "weight", "bias"), operands)), {})  # type: ignore[arg-type]


def _conv2d(node: Node, expr: Expr) -> Site | None:
    if not _nodes_or_none(expr.args):
        return None
    operands = dict(zip(("x", "weight", "bias"), expr.args))
    return Site("conv2d", node, (node,), operands, dict(expr.attrs))  # type: ignore[arg-type]


def _conv2d_batchnorm(view: View, node: Node, expr: Expr) -> Site | None:
    conv_node = expr.args[0]
    conv_expr = view.canonical(conv_node) if isinstance(conv_node, Node) else None
    if conv_expr is None or conv_expr.op != "conv2d":
        return None
    assert isinstance(conv_node, Node)
    conv = _conv2d(conv_node, conv_expr)
    if conv is None or not _nodes_or_none(expr.args):
        return None
    norm = dict(zip(("running_mean", "running_var", "gamma", "beta"), expr.args[1:]))
    operands = {**conv.operands, **norm}
    attrs = {**conv.attrs, **dict(expr.attrs)}
    return Site("conv2d_batchnorm", node, (conv_node, node), operands, attrs)  # type: ignore[arg-type]


def _transposed(view: View, operand: Operand) -> Node | None:
    """w, if the operand is the transpose of a 2-D w."""
    expr = view.canonical(operand) if isinstance(operand, Node) else None
    if expr is None or expr.op != "t" or not isinstance(expr.args[0], Node):
        return None
    tensor = meta_tensor(expr.args[0])
    return expr.args[0] if tensor is not None and tensor.ndim == 2 else None


def _matmul(view: View, node: Node, expr: Expr) -> Site | None:
    x, right = expr.args
    if not isinstance(x, Node) or not isinstance(right, Node):
        return None
    weight = _transposed(view, right)
    if weight is not None:
        return _linear("linear", node, (node,), (x, weight, None))
    tensor = meta_tensor(right)  # None in a pattern's trace
    if tensor is not None and tensor.ndim > 2:
        return _batched(node, expr)
    if tensor is not None and tensor.ndim != 2:
        return None
    return _linear("matmul", node, (node,), (x, right, None))


def _batched(node: Node, expr: Expr) -> Site | None:
    if not all(isinstance(operand, Node) for operand in expr.args):
        return None
    return Site("bmm", node, (node,), dict(zip(("x", "weight"), expr.args)), {})  # type: ignore[arg-type]


def _matmul_with_bias(view: View, node: Node, expr: Expr) -> Site | None:
    """`x @ w.t() + b` in either order, and addmm, where b is a vector of N."""
    for gemm, bias in (expr.args, expr.args[::-1]):
        inner = view.canonical(gemm) if isinstance(gemm, Node) else gemm
        if not isinstance(inner, Expr) or inner.op != "matmul" or not isinstance(bias, Node):
            continue
        if isinstance(gemm, Node) and view.readers[gemm] != [node]:
            continue
        site = _matmul(view, node, inner)
        if site is None or not _is_bias(site, bias, isinstance(gemm, Node)):
            continue
        if isinstance(gemm, Node) and _dtype(gemm) != _dtype(node):
            continue  # under autocast the sum is wider than the gemm: b is an addend, not a bias
        nodes = (gemm, node) if isinstance(gemm, Node) else (node,)
        operands = (site.operands["x"], site.operands["weight"], bias)
        return _linear(site.kind, node, nodes, operands)
    return None


def _is_bias(site: Site, bias: Node, added: bool) -> bool:
    """Is it a vector of N?  In a pattern's trace, which has no shapes, an addmm's input is one.

    added: by another node than the gemm's.
    """
    if site.kind == "bmm":
        return False  # a bmm has no bias
    vector, weight = meta_tensor(bias), meta_tensor(site.operands["weight"])  # type: ignore[arg-type]
    if vector is None or weight is None:
        return not added and vector is weight
    n = weight.shape[0 if site.kind == "linear" else 1]
    return vector.ndim == 1 and _same_int(vector.shape[0], n)


def _dtype(node: Node) -> Any:
    tensor = meta_tensor(node)
    return None if tensor is None else tensor.dtype


def _same_int(a: Any, b: Any) -> bool:
    """Equal ints. A SymInt counts as unequal: comparing it would add a guard, and recompiles."""
    return isinstance(a, int) and isinstance(b, int) and a == b
