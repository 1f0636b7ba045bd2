"""Inductor's graph of ATen operations → the same, with fp32 attention by fp16 halves if faster.

On CUDA, torch's attention of fp32 tensors without a mask is
`aten._scaled_dot_product_efficient_attention` in this graph, F.multi_head_attention_forward's too.
It and its backward are replaced separately, by functions of `fx_fuser.ops.attention_split` that
read and save the same tensors as torch's. Each is timed once against torch's for each combination
of sizes and strides. The pass runs after that over gemms (`fx_fuser.passes.products`), on the same
conditions.

Kernels depend on the size of heads, which only the graph tells. If Inductor's cache has the graph,
no pass sees it: then the op asks for its kernel when it first runs.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.graph.attention.calls import ATTENTIONS
from fx_fuser.graph.read.nodes import argument_of, inputs_of, meta_tensor
from fx_fuser.kernels import attention
from fx_fuser.kernels.base import known_sizes
from fx_fuser.native import limits, load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import run
from fx_fuser.ops.attention_split import (
    BACKWARD,
    FORWARD,
    LSE_ROWS,
    NO_DROPOUT,
    of_each_head,
)
from fx_fuser.passes.attention_split.results import results_by
from fx_fuser.passes.graph_pass import GraphPass, call, loaded
from fx_fuser.passes.products import Products
from fx_fuser.planning import bench_ops, contest
from fx_fuser.planning.bench_ops import TensorForm
from fx_fuser.planning.timing import Candidate

log = logging.getLogger("fx_fuser.passes.attention_split")

COUNTERS = "fx_fuser_attention"  # in `torch._dynamo.utils.counters`: operation → how many replaced
_aten = torch.ops.aten
ATTENTION = _aten._scaled_dot_product_efficient_attention.default
ATTENTION_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward.default
# Function → the operation's arguments that it reads.
_TENSORS = {
    FORWARD: ("query", "key", "value"),
    BACKWARD: ("grad_out_", "query", "key", "value", "out", "logsumexp"),
}
_OF_KEYS = ("key", "value")
# The operations that repeat a head, from the last to the first.
_REPEAT = (
    {_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default},
    {_aten.clone.default},
    {_aten.expand.default},
    {_aten.unsqueeze.default},
)
_MULTI_HEAD = F.multi_head_attention_forward  # of [L, N, E]
_LSE = 1  # index of the logarithms of sums among the results


@dataclass(frozen=True)
class AttentionSplit(GraphPass):
    """fp32 attention by fp16 halves."""

    COUNTERS = COUNTERS
    TARGETS: ClassVar[Collection[Any]] = (ATTENTION, ATTENTION_BACKWARD)
    KIND = "an attention"

    def settings(self) -> tuple[Any, ...]:
        return *super().settings(), *(spec.name for spec in attention.offered())

    def replacing(self, graph: Graph) -> Callable[[Node], str | None]:
        return self._replace

    def _replace(self, node: Node) -> str | None:
        site = Site.of(node, self.on_cpu)
        if site is None or not (self.on_cpu or self._gains(site)):
            return None
        site.replace()
        return ""

    def _gains(self, site: Site) -> bool:
        if not load.runs_on(site.spec, site.device) or site.is_small():
            return False
        return bool(loaded([site.spec], site.device, "attention", self.strict)) and site.gains()


def behind(last: Products) -> AttentionSplit:
    """The pass, which runs that over gemms first."""
    return AttentionSplit(last.strict, last.on_cpu, last)


# ---- in Dynamo's graph -------------------------------------------------------------------------


def foreseen(gm: GraphModule, device: torch.device) -> list[KernelSpec]:
    """The kernels that the pass may ask for, to be compiled with others before it does."""
    if torch.is_autocast_enabled(device.type):
        return []
    nodes = (n for m in gm.modules() if isinstance(m, GraphModule) for n in m.graph.nodes)
    found = dict.fromkeys(spec for node in nodes for spec in _foreseen_at(node, device))
    return [spec for spec in found if load.runs_on(spec, device)]


def _foreseen_at(node: Node, device: torch.device) -> Iterator[KernelSpec]:
    if node.op != "call_function" or node.target not in (*ATTENTIONS, _MULTI_HEAD):
        return
    q, k = (argument_of(node, i, name) for i, name in enumerate(("query", "key")))
    query, key = (meta_tensor(n) if isinstance(n, Node) else None for n in (q, k))
    if query is None or key is None or query.dtype != torch.float32 or query.device != device:
        return
    if node.target is _MULTI_HEAD:
        heads, mask, rows = argument_of(node, 4, "num_heads"), node.kwargs.get("attn_mask"), 0
        drops = argument_of(node, 10, "dropout_p") or 0.0
        if node.kwargs.get("training") is False:
            drops = 0.0
    else:
        heads, mask, rows = 1, argument_of(node, 3, "attn_mask"), -2
        drops = argument_of(node, 4, "dropout_p") or 0.0
    d = query.shape[-1]
    sizes = known_sizes(query, key)
    trains = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in map(meta_tensor, inputs_of(node))
    )
    if mask is not None or not sizes or not isinstance(drops, (int, float)):
        return
    if drops and not trains:  # without a backward torch's operation stays
        return
    if not isinstance(d, int) or not isinstance(heads, int):
        return
    if _is_small(sizes[0], sizes[1][rows], device):
        return
    for backward in (False, True) if trains else (False,):
        spec = attention.spec_for(d // heads, backward, float(drops))
        if spec is not None:
            yield spec


def _is_small(queries: Sequence[int], keys: int, device: torch.device) -> bool:
    """Does torch's finish within some 10 us?  The kernel needs as long to start. queries: the whole
    size."""
    return 4 * math.prod(queries) * keys / limits.of(device).fp32 < 10e-6


def why_left(operands: Sequence[Any], on_cpu: bool) -> str:
    """Why the pass would leave torch's attention of these fake tensors alone, apart from timing;
    empty if it would not.

    operands: query, key and value. Several query heads may share a head of keys and values.
    """
    forms = _forms(dict(zip(_TENSORS[FORWARD], operands)), "cpu" if on_cpu else "cuda")
    if forms is None:
        return "its operands are not all fp32, on one GPU and of constant sizes"
    sizes = [form.size for form in forms.values()]
    spec = attention.spec_for(sizes[0][-1])
    if not _fit(forms) or spec is None:
        return f"no kernel supports sizes of {', '.join(map(str, sizes))}"
    for name, form in forms.items():
        if not _is_aligned(form):
            return f"its {name} does not have rows of whole 16-byte vectors"
    if on_cpu:
        return ""
    device = forms["query"].device
    if not load.runs_on(spec, device):
        return "this GPU has no kernel for it"
    if _is_small(sizes[0], sizes[1][2], device):
        return "it is small: its operations take about 10 us at most"
    return ""


# ---- one attention -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A node that a function of `fx_fuser.ops.attention_split` can compute.

    forms: name → form of what it reads; of keys and values that are repeated for several query
    heads, the form before that. one_head: all heads of keys and values are the same memory. items:
    index of a result → the node that takes it.
    """

    node: Node
    function: str
    forms: Mapping[str, TensorForm]
    one_head: bool
    scale: float
    causal: bool
    dropout: float
    items: Mapping[int, Node]
    spec: KernelSpec

    @classmethod
    def of(cls, node: Node, on_cpu: bool, drops: bool = False) -> Site | None:
        """The site of this node, with dropout or without; None where torch's operation stays."""
        function = FORWARD if node.target is ATTENTION else BACKWARD
        given, items = arguments_of(node), items_of(node)
        if items is None or not _is_plain(given, drops) or not _makes(items, given):
            return None
        tensors = {name: given[name] for name in _TENSORS[function]}
        forms = _forms(_values(tensors), "cpu" if on_cpu else "cuda")
        if forms is None or not _fit(forms):
            return None
        dropout = float(given["dropout_p"])
        spec = attention.spec_for(forms["query"].size[-1], function == BACKWARD, dropout)
        one_head = all(_is_one_head(forms[name]) for name in _OF_KEYS)
        if one_head:
            forms.update((name, _first_head(forms[name])) for name in _OF_KEYS)
        elif repeated := _before_repeats([tensors[name] for name in _OF_KEYS], node):
            sources = _forms(_values(dict(zip(_OF_KEYS, repeated))), forms["query"].device.type)
            if sources is None:
                return None
            forms.update(sources)
        if spec is None or not all(_is_aligned(f) for n, f in forms.items() if n != "logsumexp"):
            return None
        scale = forms["query"].size[-1] ** -0.5 if given["scale"] is None else given["scale"]
        causal = given["is_causal"]
        return cls(node, function, forms, one_head, float(scale), causal, dropout, items, spec)

    @property
    def device(self) -> torch.device:
        return self.forms["query"].device

    def is_small(self) -> bool:
        return _is_small(self.forms["query"].size, self.forms["key"].size[2], self.device)

    def gains(self) -> bool:
        """Is it faster than torch's, at these sizes and strides?"""
        found = self.times()
        return found is not None and contest.gains(found[1], found[0])

    def times(self) -> tuple[float, float] | None:
        """The GPU's times for torch's and ours, in ms; None if there are none."""
        forms = (f"{name} {form}" for name, form in self.forms.items())
        saves = _LSE in self.items
        key = (self.function, *forms, self.scale, self.causal, self.dropout, saves)
        found = contest.times(key, self._candidates, self.device)
        if isinstance(found, str):
            return None
        torchs, fused = (took.gpu for took in found)
        log.info("%s of %s: torch's %.4g ms, by halves %.4g", self.function,
                 self.forms["query"].size, torchs, fused)  # fmt: skip
        return torchs, fused

    def _candidates(self) -> list[Candidate]:
        """Torch's, and ours by halves."""
        generator = torch.Generator(self.device).manual_seed(0)
        values = {name: form.random(generator) for name, form in self.forms.items()}
        values["query"] /= self.scale * self.forms["query"].size[-1] ** 0.5  # logits near 1
        if self.function == BACKWARD:
            operands = [values[name] for name in _TENSORS[FORWARD]]
            made = run.IN_TORCH(*self._call(FORWARD, operands, True))
            for name, saved in zip(("out", "logsumexp"), made):
                values[name].copy_(saved)
        saves = _LSE in self.items
        seed = torch.zeros((), dtype=torch.int64, device=self.device) if self.dropout else None
        # In torch our dropout mask takes much memory: one sample is enough.
        some = [t[:1] if self.dropout else t for t in values.values()]
        checked = self._call(self.function, some, saves, seed)
        runs = [functools.partial(op, *checked) for op in (run.IN_TORCH, run.MANY)]
        bench_ops.compare(runs, "attention by halves", torch.float32)
        ours = functools.partial(
            run.MANY, *self._call(self.function, [*values.values()], saves, seed)
        )
        return [
            Candidate(self._torchs_dropping(values) if self.dropout else runs[0]),
            Candidate(ours),
        ]

    def _torchs_dropping(self, values: Mapping[str, Tensor]) -> Callable[[], object]:
        """Torch's operation, which drops different weights than ours."""
        of_each = {n: of_each_head(values["query"], values[n]) for n in _OF_KEYS}
        given = [{**values, **of_each}[name] for name in _TENSORS[self.function]]
        *_, q, k, v = given[: 4 if self.function == BACKWARD else 3]
        named = {"scale": self.scale}
        forward = functools.partial(
            ATTENTION, q, k, v, None, True, self.dropout, self.causal, **named
        )
        if self.function == FORWARD:
            return forward
        d_out, *_, out, lse = given
        saved = out, lse, *forward()[2:]
        asked = [True, True, True, False]
        tensors = d_out, q, k, v, None, *saved
        return functools.partial(
            ATTENTION_BACKWARD, *tensors, self.dropout, asked, self.causal, **named
        )

    def _call(
        self, function: str, tensors: Sequence[Any], save: bool, seed: Any = None
    ) -> run.Arguments:
        saved = [save] if function == FORWARD else []
        drops = NO_DROPOUT if seed is None else (seed, self.dropout)
        given = self.spec.name, self.scale, self.causal, *saved, *drops
        return run.arguments(function, (*tensors, *given))

    def replace(self) -> None:
        self.put(self.made())

    def made(self, seed: Node | None = None) -> dict[int, Node]:
        """Index of a result → the node that is to replace it. seed: the dropout's."""
        saves = _LSE in self.items
        with self.node.graph.inserting_before(self.node):
            arguments = self._call(self.function, self._read(), saves, seed)
        is_one = self.function == FORWARD and not saves
        return results_by(arguments, is_one, self.node, self.items)

    def put(self, new: Mapping[int, Node]) -> None:
        """Put these in place of torch's results."""
        graph, node = self.node.graph, self.node
        for i, item in self.items.items():
            item.replace_all_uses_with(new[i])
        for item in list(node.users):
            graph.erase_node(item)
        repeats = [arguments_of(node)[name] for name in _OF_KEYS]
        graph.erase_node(node)
        for repeat in repeats:
            _erase_unread(repeat)

    def _read(self) -> list[Node]:
        """The operands as they are now: an attention that was replaced may have made one."""
        given = arguments_of(self.node)
        keys = [given[name] for name in _OF_KEYS]
        if self.one_head:
            keys = [call(n.graph, n, _aten.slice.Tensor, n, 1, 0, 1) for n in keys]
        else:
            keys = _before_repeats(keys, self.node) or keys
        given.update(zip(_OF_KEYS, keys))
        return [given[name] for name in _TENSORS[self.function]]


def arguments_of(node: Node) -> dict[str, Any]:
    """Arguments by name, with defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    names = [argument.name for argument in schema]
    defaults = {argument.name: argument.default_value for argument in schema}
    return {**defaults, **dict(zip(names, node.args)), **node.kwargs}


def items_of(node: Node) -> dict[int, Node] | None:
    """Index of a result → the node that takes it, if something reads that; None if a result is used
    in another way."""
    found: dict[int, Node] = {}
    for user in node.users:
        if user.target is not operator.getitem or user.args[1] in found:
            return None
        if user.users:
            found[user.args[1]] = user  # type: ignore[index]
    return found


def _is_plain(given: Mapping[str, Any], drops: bool) -> bool:
    """Is it attention without a bias, with dropout or without, whose numbers are constant?"""
    scale = given["scale"]
    if given["attn_bias"] is not None or type(given["is_causal"]) is not bool:
        return False
    if scale is not None and not (isinstance(scale, (int, float)) and 0 < scale < math.inf):
        return False
    dropout = given["dropout_p"]
    return isinstance(dropout, (int, float)) and (0 < dropout < 1 if drops else dropout == 0)


def _makes(items: Mapping[int, Node], given: Mapping[str, Any]) -> bool:
    """Does the function make all results that are used?"""
    if any(not isinstance(item.meta.get("val"), Tensor) for item in items.values()):
        return False
    if "grad_input_mask" in given:
        return not given["grad_input_mask"][3] and 3 not in items
    return given["compute_log_sumexp"] is True or _LSE not in items


def _values(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: node.meta.get("val") if isinstance(node, Node) else None
        for name, node in tensors.items()
    }


def _forms(values: Mapping[str, Any], device: str) -> dict[str, TensorForm] | None:
    """Forms of fp32 tensors on one such device, at their sizes in this trace; else None."""
    for value in values.values():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return None
        if value.dtype != torch.float32 or value.device.type != device:
            return None
        if not isinstance(value.shape[-1], int) and value.ndim == 4:
            return None
    forms = {name: bench_ops.form_of_value(value) for name, value in values.items()}
    if None in forms.values() or len({value.device for value in values.values()}) > 1:
        return None
    return forms  # type: ignore[return-value]


def _fit(forms: Mapping[str, TensorForm]) -> bool:
    """Do these fit one attention, none of them empty?  Several query heads may share a head of
    keys."""
    q, k, v = (forms[name].size for name in _TENSORS[FORWARD])
    if len(q) != 4 or k != v or (k[0], *k[3:]) != (q[0], q[3]) or 0 in (*q, *k) or q[1] % k[1]:
        return False
    if "out" not in forms:
        return True
    lse = forms["logsumexp"]
    rows = -(-q[2] // LSE_ROWS) * LSE_ROWS
    is_lse = (lse.size, lse.stride) == ((*q[:2], rows), (q[1] * rows, rows, 1))
    return is_lse and forms["out"].size == forms["grad_out_"].size == q


def _is_one_head(form: TensorForm) -> bool:
    return form.size[1] > 1 and form.stride[1] == 0


def _first_head(form: TensorForm) -> TensorForm:
    size = (form.size[0], 1, *form.size[2:])
    return dataclasses.replace(form, size=size)


def _before_repeats(tensors: Sequence[Node], reader: Node) -> list[Node] | None:
    """Keys and values before a copy repeated each of their heads for several query heads; None if
    one is not such a copy, or something else reads it as well."""
    found = [_before_repeat(tensor, reader) for tensor in tensors]
    sources = [source for source in found if source is not None]
    if len(sources) < len(tensors):
        return None
    first, *rest = (source.meta["val"].shape[1] for source in sources)
    return sources if all(statically_known_true(heads == first) for heads in rest) else None


def _before_repeat(node: Node, reader: Node) -> Node | None:
    repeats: list[Node] = []
    for targets in _REPEAT:
        if node.op != "call_function" or node.target not in targets or {*node.users} != {reader}:
            return None
        repeats.append(node)
        reader, node = node, node.args[0]  # type: ignore[assignment]
    whole, _, spread, between = repeats
    source = node.meta["val"]
    if source.ndim != 4 or between.args[1] != 2:
        return None
    batch, heads, times, *rest = spread.meta["val"].shape
    same = [(source.shape, (batch, heads, *rest)),
            (whole.meta["val"].shape, (batch, heads * times, *rest))]  # fmt: skip
    pairs = (pair for sizes in same for pair in zip(*sizes, strict=True))
    return node if all(statically_known_true(a == b) for a, b in pairs) else None


def _erase_unread(node: Node) -> None:
    """Erase it if nothing reads it, then what only it read."""
    while not node._erased and not node.users and node.op == "call_function":
        above = node.args[0]
        node.graph.erase_node(node)
        node = above  # type: ignore[assignment]


def _is_aligned(form: TensorForm) -> bool:
    """Can the kernel read its rows, of adjacent elements, in 16-byte vectors?"""
    steps = [step for n, step in zip(form.size[:3], form.stride) if n > 1]
    return not form.offset and form.stride[3] == 1 and all(s > 0 and s % 4 == 0 for s in steps)
