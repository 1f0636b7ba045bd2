"""What does this node say?  Node → canonical expression; the graph is read, never edited.

Dynamo records what the user typed: `operator.mul`, `torch.multiply`, `Tensor.mul_`,
`F.silu(inplace=True)`, `x @ w.t() + b`. There are two readings, each an `Expr` whose leaves are
nodes and numbers:

`View.written`  what is computed: the user's own op under one name. `F.silu(z)` is `silu(z)`,
                `torch.sub(x, y)` is `sub(x, y)`. `fx_fuser.bind` makes epilogues of these.
`View.spell`    what it means as sums and products, for matching alone: `silu(z)` is
                `mul(z, sigmoid(z))`, `sub(x, y)` is `add(x, mul(y, -1))`. Nothing is computed from
                it: floating point has no such algebra.

In-place operations are read as values. `z.mul_(2)` makes a new value of `z`, and whoever names `z`
afterwards reads that value; `View` resolves every argument to the node that made the value read.
Whether an in-place operation may disappear is for the matcher's alias check.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

if TYPE_CHECKING:
    from fx_fuser.words import End

Operand = Union["Expr", "Arg", Node, float, int, bool, None]


@dataclass(frozen=True)
class Arg:
    """A leaf of an epilogue: a value known by name, not yet by node."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Expr:
    """A canonical operation: `args` are values (expressions, nodes, numbers), `attrs` constants."""

    op: str
    args: tuple[Operand, ...]
    attrs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        parts = [str(a) for a in self.args] + [f"{k}={v}" for k, v in self.attrs]
        return f"{self.op}({', '.join(parts)})"


class Unspellable(Exception):
    """The call has a form that has no canonical spelling; the node stays opaque."""


def is_number(value: object) -> bool:
    """A constant of the graph that is a float; SymInt and SymFloat change from call to call, and
    integers beyond 2^53 are no floats."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return False
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= 2**53)


# ---- rules: how a call becomes an expression ------------------------------------------------


def _div(input: Any, other: Any, rounding_mode: Any = None) -> Expr:
    if rounding_mode is not None:
        raise Unspellable
    return Expr("div", (input, other))


def _clamp(input: Any, min: Any = None, max: Any = None) -> Expr:
    return Expr("clamp", (input, min, max))


def _cast(x: Any, dtype: Any) -> Expr:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise Unspellable
    return Expr("cast", (x,), (("dtype", dtype),))


def _linear(input: Any, weight: Any, bias: Any = None) -> Expr:
    return Expr("linear", (input, weight, bias))


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Expr:
    if beta != 1 or alpha != 1:
        raise Unspellable
    return Expr("add", (Expr("matmul", (mat1, mat2)), input))


def _transpose(input: Any, dim0: Any, dim1: Any) -> Expr:
    if {dim0, dim1} not in ({0, 1}, {-1, -2}, {0, -1}, {-2, 1}):
        raise Unspellable
    return Expr("t", (input,))


def _permute(input: Any, *dims: Any) -> Expr:
    flat = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    if flat not in ((1, 0), (-1, 0), (-1, -2), (1, -2)):
        raise Unspellable
    return Expr("t", (input,))


def _getattr(input: Any, name: Any) -> Expr:
    if name not in ("T", "mT"):
        raise Unspellable
    return Expr("t", (input,))


def _conv2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Any = 1,
) -> Expr:
    attrs = ("stride", stride), ("padding", padding), ("dilation", dilation), ("groups", groups)
    return Expr("conv2d", (input, weight, bias), attrs)


def _batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: Any = False,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> Expr:
    attrs = ("training", training), ("momentum", momentum), ("eps", eps)
    return Expr("batch_norm", (input, running_mean, running_var, weight, bias), attrs)


def _torch_batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: Any,
    momentum: Any,
    eps: Any,
    cudnn_enabled: Any = True,
) -> Expr:
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _unary(op: str) -> Callable[..., Expr]:
    def rule(input: Any, inplace: Any = False) -> Expr:
        return Expr(op, (input,))

    return rule


def _binary(op: str) -> Callable[..., Expr]:
    def rule(input: Any, other: Any) -> Expr:
        return Expr(op, (input, other))

    return rule


def _scaled_by(op: str, x: Any, y: Any, factor: Any) -> Expr:
    """x ± factor · y, where the factor is not one."""
    return Expr(op, (x, y) if is_number(factor) and factor == 1 else (x, y, factor))


def _add(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    return _scaled_by("add", input, other, alpha)


def _sub(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    return _scaled_by("sub", input, other, alpha)


def _rsub(input: Any, other: Any, *, alpha: Any = 1) -> Expr:
    return _sub(other, input, alpha=alpha)


def _addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Expr:
    scale = () if is_number(value) and value == 1 else (value,)
    return Expr("addcmul", (input, tensor1, tensor2, *scale))


def _hardtanh(input: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: Any = False) -> Expr:
    return Expr("hardtanh", (input, min_val, max_val))


def _gelu(input: Any, approximate: Any = "none") -> Expr:
    return Expr("gelu", (input,), (("approximate", approximate),))


def _softplus(input: Any, beta: Any = 1, threshold: Any = 20) -> Expr:
    return Expr("softplus", (input,), (("beta", beta), ("threshold", threshold)))


def _pow(input: Any, exponent: Any) -> Expr:
    if not is_number(exponent):
        raise Unspellable
    return Expr("pow", (input,), (("exponent", exponent),))


def _where(condition: Any, input: Any, other: Any) -> Expr:
    return Expr("where", (condition, input, other))


def _method_where(input: Any, condition: Any, other: Any) -> Expr:
    return Expr("where", (condition, input, other))


# Method names are strings and stand for their in-place twins too ("mul" also for `mul_`).
_RULES: list[tuple[Callable[..., Expr], list[Any]]] = [
    (_binary("mul"), [operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "multiply"]),
    (_add, [operator.add, operator.iadd, torch.add, "add"]),
    (_sub, [operator.sub, operator.isub, torch.sub, torch.subtract, "sub", "subtract"]),
    (_rsub, [torch.rsub]),
    (_div, [operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide]),
    (_div, ["div", "divide", "true_divide"]),
    (_unary("neg"), [operator.neg, torch.neg, torch.negative, "neg", "negative"]),
    (_addcmul, [torch.addcmul, "addcmul"]),
    (_unary("sigmoid"), [torch.sigmoid, F.sigmoid, torch.special.expit, "sigmoid"]),
    (_unary("sigmoid"), [torch.sigmoid_]),
    (_unary("silu"), [F.silu, torch._C._nn.silu, torch._C._nn.silu_]),
    (_unary("tanh"), [torch.tanh, torch.tanh_, F.tanh, "tanh"]),
    (_unary("relu"), [torch.relu, torch.relu_, F.relu, F.relu_, "relu"]),
    (lambda input, inplace=False: _hardtanh(input, 0.0, 6.0), [F.relu6]),
    (_hardtanh, [F.hardtanh, F.hardtanh_]),
    (_clamp, [torch.clamp, torch.clamp_, torch.clip, torch.clip_, "clamp", "clip"]),
    (lambda input, min: _clamp(input, min), [torch.clamp_min, torch.clamp_min_, "clamp_min"]),
    (
        lambda input, max: _clamp(input, None, max),
        [torch.clamp_max, torch.clamp_max_, "clamp_max"],
    ),
    (_unary("exp"), [torch.exp, torch.exp_, "exp"]),
    (_unary("log"), [torch.log, torch.log_, "log"]),
    (_unary("sqrt"), [torch.sqrt, torch.sqrt_, "sqrt"]),
    (_unary("rsqrt"), [torch.rsqrt, torch.rsqrt_, "rsqrt"]),
    (_unary("abs"), [operator.abs, torch.abs, torch.abs_, torch.absolute, "abs", "absolute"]),
    (_unary("erf"), [torch.erf, torch.erf_, torch.special.erf, "erf"]),
    (_gelu, [F.gelu]),
    (_softplus, [F.softplus]),
    (_pow, [operator.pow, operator.ipow, torch.pow, "pow"]),
    (lambda input: _pow(input, 2), [torch.square, torch.square_, "square"]),
    (_binary("minimum"), [torch.minimum, "minimum"]),
    (_binary("maximum"), [torch.maximum, "maximum"]),
    (_where, [torch.where]),
    (_method_where, ["where"]),
    (_cast, ["to", "type"]),
    (lambda input: _cast(input, torch.float32), ["float"]),
    (lambda input: _cast(input, torch.float16), ["half"]),
    (lambda input: _cast(input, torch.bfloat16), ["bfloat16"]),
    (lambda input: _cast(input, torch.float64), ["double"]),
    (_linear, [F.linear]),
    (_binary("matmul"), [operator.matmul, torch.matmul, "matmul"]),
    (lambda input, mat2: Expr("matmul", (input, mat2)), [torch.mm, "mm"]),
    (_addmm, [torch.addmm, "addmm"]),
    (_unary("t"), [torch.t, "t"]),
    (_transpose, [torch.transpose, torch.swapdims, "transpose", "swapdims"]),
    (lambda input, axis0, axis1: _transpose(input, axis0, axis1), [torch.swapaxes, "swapaxes"]),
    (_permute, [torch.permute, "permute"]),
    (_getattr, [getattr]),
    (_conv2d, [torch.conv2d]),
    (_batch_norm, [F.batch_norm]),
    (_torch_batch_norm, [torch.batch_norm]),
]
_RULE_OF: dict[Any, Callable[..., Expr]] = {t: rule for rule, ts in _RULES for t in ts}
_IN_PLACE_OPERATORS = {
    f for n, f in vars(operator).items() if n.startswith("i") and hasattr(operator, f"__{n}__")
}


# ---- meanings: an op as sums and products, for matching ---------------------------------------


def _scaled(x: Any, factor: Any) -> Any:
    """x · factor; numbers are multiplied here, and a factor of one needs no multiplication."""
    if is_number(x) and is_number(factor):
        return x * factor
    return x if is_number(factor) and factor == 1 else Expr("mul", (x, factor))


def _divided(x: Any, divisor: Any) -> Expr:
    if not is_number(divisor) or is_number(x):
        return Expr("div", (x, divisor))
    reciprocal = 1.0 / divisor if divisor else math.copysign(math.inf, divisor)
    return Expr("mul", (x, reciprocal))


_MEANINGS: dict[str, Callable[..., Expr]] = {
    "add": lambda x, y, alpha=1: Expr("add", (x, _scaled(y, alpha))),
    "sub": lambda x, y, alpha=1: Expr("add", (x, _scaled(_scaled(y, -1), alpha))),
    "neg": lambda x: Expr("mul", (x, -1)),
    "div": _divided,
    "addcmul": lambda x, a, b, value=1: Expr("add", (x, _scaled(Expr("mul", (a, b)), value))),
    "silu": lambda x: Expr("mul", (x, Expr("sigmoid", (x,)))),
    "hardtanh": lambda x, low, high: _clamp(x, low, high),
}


def meaning(written: Expr) -> Expr:
    """The op as sums and products of others, where it is one."""
    rule = _MEANINGS.get(written.op)
    return written if rule is None else rule(*written.args)


def _in_place_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


# ---- who writes what ------------------------------------------------------------------------


def nodes_in(value: Any) -> Iterator[Node]:
    """The nodes anywhere inside an argument."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from nodes_in(item)
    elif isinstance(value, dict):
        yield from nodes_in(tuple(value.values()))
    elif isinstance(value, slice):
        yield from nodes_in((value.start, value.stop, value.step))


def inputs_of(node: Node) -> tuple[Node, ...]:
    """Every node among the arguments, in order, each once."""
    return tuple(dict.fromkeys(nodes_in((node.args, node.kwargs))))


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def called_in_place(node: Node) -> bool:
    """Is this a call that returns its first argument, changed?"""
    target = node.target
    if node.op == "call_method":
        return _in_place_name(str(target))
    if node.op != "call_function":
        return False
    if target in _IN_PLACE_OPERATORS:
        return True
    if not _is_torch_function(target):
        return False
    if _in_place_name(getattr(target, "__name__", "")):
        return True
    try:  # F.silu(z, True) as well as F.silu(z, inplace=True)
        bound = inspect.signature(target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return node.kwargs.get("inplace") is True
    return bound.arguments.get("inplace") is True


def _is_torch_function(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    owner = getattr(target, "__self__", None)
    return (
        module.split(".")[0] == "torch"
        or getattr(owner, "__module__", "").startswith("torch")
        or getattr(owner, "__name__", "").startswith("torch")
        or (isinstance(owner, type) and owner.__name__.startswith("_VariableFunctions"))
    )


# Higher-order operators whose body is ordinary model code, run as often as the call.
TRANSPARENT = ("tag_activation_checkpoint", "invoke_subgraph", "wrap")


def body_of(node: Node) -> GraphModule | None:
    """What a transparent higher-order operator runs; None of any other node."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") not in TRANSPARENT:
        return None
    first = node.args[0] if node.args else None
    if not isinstance(first, Node) or first.op != "get_attr":
        return None
    body = getattr(node.graph.owning_module, str(first.target), None)
    return body if isinstance(body, GraphModule) else None


def writes_of(node: Node) -> tuple[Node, ...]:
    """The arguments whose memory this node may write; all of them when we cannot know."""
    if node.op in ("placeholder", "get_attr", "output"):
        return ()
    if node.op == "call_method":
        name = str(node.target)
        changes = _in_place_name(name) or name in ("__setitem__", "__delitem__")
        return tuple(nodes_in(node.args[:1])) if changes else ()
    target = node.target
    if node.op != "call_function":
        return inputs_of(node)
    if target is getattr or getattr(target, "__module__", None) in ("_operator", "math"):
        changes = target in _IN_PLACE_OPERATORS or target in (operator.setitem, operator.delitem)
        return tuple(nodes_in(node.args[:1])) if changes else ()
    if isinstance(target, torch._ops.OpOverload):
        names = [a.name for a in target._schema.arguments if a.is_write]
        positions = {a.name: i for i, a in enumerate(target._schema.arguments)}
        return tuple(n for a in names for n in nodes_in(_argument(node, positions[a], a)))
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = (getattr(target, o) for o in target.overloads())
        return inputs_of(node) if any(o._schema.is_mutable for o in overloads) else ()
    if isinstance(target, torch._ops.HigherOrderOperator):
        body = body_of(node)
        if body is not None and not any(map(writes_of, body.graph.nodes)):
            return ()
        return inputs_of(node)
    if not _is_torch_function(target):
        return inputs_of(node)
    written = list(nodes_in(node.kwargs.get("out")))
    if called_in_place(node):
        written += nodes_in(node.args[:1] or (node.kwargs.get("input"),))
    norms = (F.batch_norm, torch.batch_norm)
    reads = target in norms and _argument(node, 5, "training") in (None, False)
    if not reads and target in (*norms, F.instance_norm, torch.instance_norm):
        first = 1 if target in (F.batch_norm, F.instance_norm) else 3
        written += nodes_in(_argument(node, first, "running_mean"))
        written += nodes_in(_argument(node, first + 1, "running_var"))
    return tuple(written)


# ---- the view -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """The modes a node runs under: grad mode, autocast, functorch levels and the like."""

    settings: tuple[tuple[str, Any], ...] = ()
    entered: tuple[Node, ...] = ()

    def after(self, node: Node) -> Region:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if "_increment_nesting" in name or name.startswith(("_enter_", "_push_")):
            return Region(self.settings, (*self.entered, node))
        if "_decrement_nesting" in name or name.startswith(("_exit_", "_pop_")):
            return Region(self.settings, self.entered[:-1])
        if name.startswith(("_set_", "set_")) and not inputs_of(node):
            kept = tuple(s for s in self.settings if s[0] != name)
            return Region((*kept, (name, node.args)), self.entered)
        return self

    def functional_level(self) -> Node | None:
        """The node that opened a functorch or forward-AD level around here, if one did."""
        marks = ("_increment_nesting", "dual_level")
        for node in self.entered:
            if any(m in getattr(node.target, "__name__", "") for m in marks):
                return node
        return None


class View:
    """A reading of one graph: order, regions, who reads which value, canonical spellings, and who
    reads and writes which memory. Each is found out once, so that a match costs no look at others.
    """

    def __init__(self, graph: Graph, end: End | None = None) -> None:
        self.graph = graph
        self.end = end  # how Dynamo came to end the graph, where it says
        self.nodes = list(graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.region: dict[Node, Region] = {}
        self.readers: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        self._reads: dict[Node, dict[Node, Node]] = {}
        self._written: dict[Node, Expr | None] = {}
        self._spelled: dict[Node, Expr | None] = {}
        self._read_through()

    def _read_through(self) -> None:
        origin: dict[Node, Node] = {}  # in-place result → the node that first made the tensor
        current: dict[Node, Node] = {}  # that node → whose value the tensor holds now
        region = Region()
        for node in self.nodes:
            self.region[node] = region
            region = region.after(node)
            self._reads[node] = {
                n: current.get(origin.get(n, n), origin.get(n, n)) for n in inputs_of(node)
            }
            for value in dict.fromkeys(self._reads[node].values()):
                self.readers[value].append(node)
            changed = _argument(node, 0, "input") if called_in_place(node) else None
            if isinstance(changed, Node):
                first = origin.get(changed, changed)
                origin[node] = first
                current[first] = node

    def value(self, reader: Node, argument: Node) -> Node:
        """The node whose value `reader` sees when it names `argument`."""
        return self._reads[reader].get(argument, argument)

    def resolve(self, reader: Node, argument: Any) -> Any:
        """`argument` with every node replaced by the node whose value `reader` sees."""
        return torch.fx.node.map_arg(argument, lambda n: self.value(reader, n))

    def written(self, node: Node) -> Expr | None:
        """The node's own op, or None for anything without a canonical name."""
        if node not in self._written:
            self._written[node] = self._read(node)
        return self._written[node]

    def spell(self, node: Node) -> Expr | None:
        """What the node means as sums and products, or None as above. For matching alone."""
        if node not in self._spelled:
            written = self.written(node)
            self._spelled[node] = None if written is None else meaning(written)
        return self._spelled[node]

    @functools.cached_property
    def writers(self) -> dict[Node, tuple[Node, ...]]:
        """Node → what it may write, of those that may, in the graph's order."""
        found = ((node, writes_of(node)) for node in self.nodes)
        return {node: written for node, written in found if written}

    @functools.cached_property
    def writer_places(self) -> list[int]:
        return [self.order[node] for node in self.writers]

    @functools.cached_property
    def written_at(self) -> dict[Any, list[int]]:
        """Storage → places in the order of the nodes that may write it."""
        return self._by_storage((n, storages(written)) for n, written in self.writers.items())

    @functools.cached_property
    def read_at(self) -> dict[Any, list[int]]:
        """Storage → places in the order of the nodes that take a tensor in it."""
        return self._by_storage((n, storages(inputs_of(n))) for n in self.nodes)

    @functools.cached_property
    def shown_at(self) -> dict[Any, list[int]]:
        """Storage → places in the order of the nodes whose value lies in it."""
        return self._by_storage((n, storages((n,))) for n in self.nodes)

    @functools.cached_property
    def batch_norms_at(self) -> dict[Any, list[int]]:
        """Storage → places in the order of the batch_norms that take a tensor in it."""
        norms = (n for n in self.nodes if (e := self.spell(n)) and e.op == "batch_norm")
        return self._by_storage((n, storages(inputs_of(n))) for n in norms)

    @functools.cached_property
    def graph_inputs(self) -> set[Any]:
        """Storages of the placeholders."""
        return storages(n for n in self.nodes if n.op == "placeholder")

    def _by_storage(self, found: Iterable[tuple[Node, set[Any]]]) -> dict[Any, list[int]]:
        places: dict[Any, list[int]] = {}
        for node, memory in found:
            for storage in memory:
                places.setdefault(storage, []).append(self.order[node])
        return places

    def _read(self, node: Node) -> Expr | None:
        if node.op == "call_method":
            name = str(node.target)
            rule = _RULE_OF.get(name[:-1] if _in_place_name(name) else name)
        elif node.op == "call_function":
            rule = _RULE_OF.get(node.target)
        else:
            rule = None
        if rule is None:
            return None
        try:
            args, kwargs = self.resolve(node, node.args), self.resolve(node, node.kwargs)
            return rule(*args, **kwargs)
        except (TypeError, Unspellable):  # a form we do not know: out=, dtype=, generator= …
            return None


def meta_tensor(node: Node) -> torch.Tensor | None:
    """The fake tensor Dynamo computed for this node, or None."""
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None


def hint_of(size: int | torch.SymInt) -> int | None:
    """A size as it is in this trace, or None where data decides."""
    return size if isinstance(size, int) else size.node.hint


def storages(nodes: Iterable[Node]) -> set[Any]:
    """Identities of the memory behind the nodes' tensors; None stands for memory unknown.

    Fake tensors keep aliasing: a base, its views and its in-place results share one storage.
    """
    found: set[Any] = set()
    for node in nodes:
        value = node.meta.get("example_value")
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, torch.Tensor):
                try:
                    found.add(tensor.untyped_storage()._cdata)
                except (NotImplementedError, RuntimeError):  # wrapper subclasses, sparse tensors
                    found.add(None)
            elif tensor is None and node.op != "get_attr":
                found.add(None)
    return found
