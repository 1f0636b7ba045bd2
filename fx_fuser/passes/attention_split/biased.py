"""Inductor's graph of ATen operations → the same, with 16-bit attention with a bias by fx_fuser's
kernels if faster.

With a trained bias, torch has only its memory-efficient kernel, whose backward writes the bias's
gradient of each batch and head; a sum over what shares the bias follows. Both are replaced,
separately as in `fx_fuser.passes.attention_split`, by functions of `fx_fuser.ops.attention_bias`:
the backward with the sum, where nothing else reads what is summed. In inference torch may use
cuDNN's, whose bias may be shared by all batches or heads: it is replaced, too. Each is timed once
against torch's for each combination of sizes and strides.

No other pass runs over Inductor's graphs of a model that is wholly in 16 bits, or whose fp32 gemms
stay with the library; there this one runs alone.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fx_fuser.graph.attention.calls import ATTENTIONS
from fx_fuser.graph.read.nodes import argument_of, meta_tensor
from fx_fuser.kernels.attention import bias as attention_bias
from fx_fuser.native import limits, load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import run
from fx_fuser.ops.attention_bias import BACKWARD, FORWARD, NO_GRADIENT, SUMMED, WHOLE
from fx_fuser.ops.attention_split import LSE_ROWS, NO_DROPOUT, heads_like
from fx_fuser.options import Options
from fx_fuser.passes.attention_split import (
    ATTENTION,
    ATTENTION_BACKWARD,
    COUNTERS,
    arguments_of,
    items_of,
)
from fx_fuser.passes.attention_split.results import results_by
from fx_fuser.passes.graph_pass import GraphPass, call, loaded
from fx_fuser.planning import bench_ops, contest, plan
from fx_fuser.planning.bench_ops import TensorForm
from fx_fuser.planning.timing import Candidate

log = logging.getLogger("fx_fuser.passes.attention_bias")

_aten = torch.ops.aten
CUDNN = _aten._scaled_dot_product_cudnn_attention.default
# Function → the operation's arguments that it reads.
_OPERANDS = "query", "key", "value", "attn_bias"
_TENSORS = {FORWARD: _OPERANDS, BACKWARD: ("grad_out_", *_OPERANDS, "out", "logsumexp")}
_LSE, _OF_BIAS = 1, 3  # indices of results, of forward and backward
_LANES = 8  # of 16 bits in a vector of 16 bytes


@dataclass(frozen=True)
class AttentionBias(GraphPass):
    """16-bit attention with a bias."""

    COUNTERS = COUNTERS
    TARGETS: ClassVar[Sequence[Any]] = (ATTENTION, ATTENTION_BACKWARD, CUDNN)
    KIND = "an attention with a bias"

    def settings(self) -> tuple[Any, ...]:
        names = (spec.name for spec in attention_bias.offered())
        return *super().settings(), "bias", *names

    def replacing(self, graph: Graph) -> Callable[[Node], str | None]:
        return self._replace

    def _replace(self, node: Node) -> str | None:
        site = Site.of(node, self.on_cpu)
        if site is None or not (self.on_cpu or self._gains(site)):
            return None
        site.replace()
        return " with a bias"

    def _gains(self, site: Site) -> bool:
        if not load.runs_on(site.spec, site.device) or site.is_small():
            return False
        return bool(loaded([site.spec], site.device, self.KIND, self.strict)) and site.gains()


def behind(last: GraphPass) -> AttentionBias:
    """The pass, which runs that over other attentions first."""
    return AttentionBias(last.strict, last.on_cpu, last)


def kernels_for(
    gm: GraphModule, options: Options, inputs: Sequence[Any]
) -> dict[torch.device, list[KernelSpec]] | None:
    """GPU → the kernels that this pass and that of `fx_fuser.passes.attention_split.dropout` may
    ask for in a graph without other passes; None if no attention of it has a bias, so that no pass
    runs. gm: the untouched graph. inputs: its own."""
    if options.inner != "inductor" or not options.grows or not any(map(_has_bias, _nodes_of(gm))):
        return None
    dtypes = {*attention_bias.DTYPES}
    if any(map(torch.is_autocast_enabled, ("cuda", "cpu"))):
        dtypes.add(torch.float32)
    tensors = [v for v in inputs if isinstance(v, Tensor) and v.dtype in dtypes]
    used = {value.device for value in tensors if value.device.type == "cuda"}
    if any(plan.unavailable(device) is not None for device in used):
        return None
    some = attention_bias.offered()[0]
    on_cuda = {device for device in used if load.runs_on(some, device)}
    if not on_cuda and (used or not (tensors and options.cpu_ops)):
        return None
    return {device: foreseen(gm, device) for device in on_cuda}


def _nodes_of(gm: GraphModule) -> Iterator[Node]:
    return (n for m in gm.modules() if isinstance(m, GraphModule) for n in m.graph.nodes)


def _has_bias(node: Node) -> bool:
    """May this attention run on a kernel with a bias?"""
    if node.op != "call_function" or node.target not in ATTENTIONS:
        return False
    return isinstance(argument_of(node, 3, "attn_mask"), Node)


def foreseen(gm: GraphModule, device: torch.device) -> list[KernelSpec]:
    """The kernels that the pass may ask for, to be compiled with others before it does."""
    found = dict.fromkeys(spec for node in _nodes_of(gm) for spec in _foreseen_at(node, device))
    return [spec for spec in found if load.runs_on(spec, device)]


def _foreseen_at(node: Node, device: torch.device) -> Iterator[KernelSpec]:
    """Those for a learned bias: for others, masks, torch's cuDNN may be as fast, and a kernel that
    gains is compiled when it is timed."""
    if not _has_bias(node):
        return
    given = (argument_of(node, i, name) for i, name in ((0, "query"), (3, "attn_mask")))
    query, mask = (meta_tensor(n) if isinstance(n, Node) else None for n in given)
    if query is None or mask is None or query.device != device or not mask.requires_grad:
        return
    d, kind, drops = query.shape[-1], device.type, argument_of(node, 4, "dropout_p") or 0.0
    if not isinstance(d, int) or not isinstance(drops, (int, float)) or not torch.is_grad_enabled():
        return
    within = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if within else query.dtype
    for backward in (False, True):
        spec = attention_bias.spec_for(d, dtype, backward, float(drops))
        if spec is not None:
            yield spec


@dataclass(frozen=True)
class Site:
    """A node that a function of `fx_fuser.ops.attention_bias` can compute.

    forms: name → form of what it reads; of the bias without what is expanded: `shared` of the first
    two dimensions. of_bias: which gradient of the bias it makes. items: index of a result → the
    node that takes it; for a gradient that is summed, the sum.
    """

    node: Node
    function: str
    forms: Mapping[str, TensorForm]
    shared: tuple[int, ...]
    scale: float
    causal: bool
    dropout: float
    of_bias: int
    items: Mapping[int, Node]
    spec: KernelSpec

    @classmethod
    def of(cls, node: Node, on_cpu: bool, drops: bool = False) -> Site | None:
        """The site of this node, with dropout or without; None where torch's operation stays."""
        function = BACKWARD if node.target is ATTENTION_BACKWARD else FORWARD
        given, items = arguments_of(node), items_of(node)
        if items is None or not _is_plain(given, drops) or not _makes(items, given):
            return None
        tensors = {name: given[name] for name in _TENSORS[function]}
        forms = _forms(tensors, "cpu" if on_cpu else "cuda")
        if forms is None or not _fit(forms, node.target is CUDNN):
            return None
        if node.target is CUDNN and not _is_inference(items, node):
            return None
        bias, d = forms["attn_bias"], forms["query"].size[-1]
        shared = tuple(i for i in (0, 1) if bias.size[i] > 1 and bias.stride[i] == 0)
        sizes = tuple(1 if i in shared else n for i, n in enumerate(bias.size))
        forms["attn_bias"] = replace(bias, size=sizes)
        dropout = float(given["dropout_p"])
        spec = attention_bias.spec_for(d, bias.dtype, function == BACKWARD, dropout)
        if spec is None or not all(is_aligned(f) for n, f in forms.items() if n != "logsumexp"):
            return None
        of_bias = NO_GRADIENT
        if function == BACKWARD and _OF_BIAS in items:
            of_bias = WHOLE
            summed = _sum_of(items[_OF_BIAS], shared)
            if summed is not None:
                of_bias, items = SUMMED, {**items, _OF_BIAS: summed}
        scale = d**-0.5 if given["scale"] is None else float(given["scale"])
        causal = given["is_causal"]
        return cls(node, function, forms, shared, scale, causal, dropout, of_bias, items, spec)

    @property
    def device(self) -> torch.device:
        return self.forms["query"].device

    def is_small(self) -> bool:
        """Does torch's finish within some 10 us?  The kernel needs as long to start."""
        operations = 4 * math.prod(self.forms["query"].size) * self.forms["key"].size[2]
        return operations / (4 * limits.of(self.device).fp32) < 10e-6

    def gains(self) -> bool:
        """Is it faster than torch's, at these sizes and strides?"""
        found = self.times()
        return found is not None and contest.gains(found[1], found[0])

    def times(self) -> tuple[float, float] | None:
        """The GPU's times for torch's and ours, in ms; None if there are none."""
        forms = (f"{name} {form}" for name, form in self.forms.items())
        key = (
            self.function,
            str(self.node.target),
            *forms,
            self.scale,
            self.causal,
            self.dropout,
            self.of_bias,
            _LSE in self.items,
        )
        found = contest.times(key, self._candidates, self.device)
        if isinstance(found, str):
            return None
        torchs, ours = (took.gpu for took in found)
        log.info("%s of %s: torch's %.4g ms, ours %.4g", self.function, self.forms["query"].size,
                 torchs, ours)  # fmt: skip
        return torchs, ours

    def _candidates(self) -> list[Candidate]:
        """Torch's, and ours."""
        generator = torch.Generator(self.device).manual_seed(0)
        values = {name: form.random(generator) for name, form in self.forms.items()}
        values["query"] /= self.scale * self.forms["query"].size[-1] ** 0.5  # logits near 1
        if self.function == BACKWARD:
            operands = [values[name] for name in _OPERANDS]
            forward = self._call(FORWARD, operands, save=True)
            for name, saved in zip(("out", "logsumexp"), run.IN_TORCH(*forward)):
                values[name].copy_(saved)
        saves = _LSE in self.items
        seed = torch.zeros((), dtype=torch.int64, device=self.device) if self.dropout else None
        # In torch our dropout mask takes much memory: one sample is enough.
        some = [t[:1] if self.dropout else t for t in values.values()]
        checked = self._call(self.function, some, saves, seed)
        runs: list[Callable[[], Any]] = [
            functools.partial(op, *checked) for op in (run.IN_TORCH, run.MANY)
        ]
        if self.node.target is CUDNN and self.device.type == "cuda":
            few = [values[name] for name in _OPERANDS]
            runs[0] = functools.partial(CUDNN, *few, False, 0.0, self.causal, scale=self.scale)
        bench_ops.compare(runs, self.function, self.forms["query"].dtype)
        if self.dropout:
            whole = self._call(self.function, [*values.values()], saves, seed)
            runs = [self._torchs_dropping(values), functools.partial(run.MANY, *whole)]
        return [*map(Candidate, runs)]

    def _torchs_dropping(self, values: Mapping[str, Tensor]) -> Callable[[], object]:
        """Torch's operation, which drops different weights than ours, followed by the sum."""
        q, k, v, few = (values[name] for name in _OPERANDS)
        bias = few.expand(*q.shape[:2], -1, -1)
        named = {"scale": self.scale}
        forward = functools.partial(
            ATTENTION, q, k, v, bias, True, self.dropout, self.causal, **named
        )
        if self.function == FORWARD:
            return forward
        saved = values["out"], values["logsumexp"], *forward()[2:]
        asked = [True, True, True, self.of_bias != NO_GRADIENT]
        given = values["grad_out_"], q, k, v, bias, *saved, self.dropout, asked, self.causal

        def backward() -> object:
            *made, d_bias = ATTENTION_BACKWARD(*given, **named)
            return *made, d_bias.sum_to_size(few.shape) if self.of_bias == SUMMED else d_bias

        return backward

    def _call(
        self, function: str, tensors: Sequence[Any], save: bool, seed: Any = None
    ) -> run.Arguments:
        last = save if function == FORWARD else self.of_bias
        drops = NO_DROPOUT if seed is None else (seed, self.dropout)
        given = self.spec.name, self.scale, self.causal, last, *drops
        return run.arguments(function, (*tensors, *given))

    def _read(self) -> list[Node]:
        """Arguments as they are now: an attention that was replaced may have made one."""
        given = arguments_of(self.node)
        bias = given["attn_bias"]
        for i in self.shared:
            bias = call(bias.graph, bias, _aten.slice.Tensor, bias, i, 0, 1)
        given["attn_bias"] = bias
        return [given[name] for name in _TENSORS[self.function]]

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
        if self.of_bias == SUMMED:
            graph.erase_node(self.items[_OF_BIAS])
        for item in list(node.users):
            graph.erase_node(item)
        graph.erase_node(node)


def _is_plain(given: Mapping[str, Any], drops: bool) -> bool:
    """Is it attention with a bias, with dropout or without, whose numbers are constant?"""
    scale = given["scale"]
    if not isinstance(given["attn_bias"], Node) or type(given["is_causal"]) is not bool:
        return False
    if scale is not None and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        return False
    dropout = given["dropout_p"]
    if scale == 0 or not isinstance(dropout, (int, float)):
        return False
    return 0 < dropout < 1 if drops else dropout == 0


def _makes(items: Mapping[int, Node], given: Mapping[str, Any]) -> bool:
    """Does the function make all results that are used?"""
    if any(not isinstance(item.meta.get("val"), Tensor) for item in items.values()):
        return False
    if "grad_input_mask" in given:
        return given["grad_input_mask"][_OF_BIAS] or _OF_BIAS not in items
    return given["compute_log_sumexp"] is True or _LSE not in items


def _forms(tensors: Mapping[str, Any], device: str) -> dict[str, TensorForm] | None:
    """Forms of tensors of one 16-bit dtype on one such device, except fp32 logarithms; None if they
    are not, or their sizes are not known."""
    found: dict[str, TensorForm] = {}
    for name, node in tensors.items():
        value = node.meta.get("val") if isinstance(node, Node) else None
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return None
        form = bench_ops.form_of_value(value)
        if form is None or form.device.type != device:
            return None
        if not all(isinstance(n, int) for n in (*value.shape[-1:], *value.stride())):
            return None
        found[name] = form
    dtypes = {form.dtype for name, form in found.items() if name != "logsumexp"}
    is_one = len(dtypes) == 1 and len({form.device for form in found.values()}) == 1
    return found if is_one and dtypes <= {*attention_bias.DTYPES} else None


def _is_inference(items: Mapping[int, Node], node: Node) -> bool:
    """Is only cuDNN's result read, and laid out like ours?  Its logarithms are laid out
    differently."""
    if items.keys() != {0}:
        return False
    made, q = items[0].meta["val"], arguments_of(node)["query"].meta["val"]
    with q.fake_mode:
        like = heads_like(q, q.shape[2])
    return bench_ops.form_of_value(made) == bench_ops.form_of_value(like)


def _fit(forms: Mapping[str, TensorForm], shares: bool = False) -> bool:
    """Do these fit one attention, none of them empty?  shares: a bias may have one for all batches
    or heads."""
    q, k, v, bias = (forms[name].size for name in _OPERANDS)
    if len(q) != 4 or k != v or (*k[:2], k[3]) != (*q[:2], q[3]) or 0 in (*q, *k):
        return False
    if len(bias) != 4 or bias[2:] != (q[2], k[2]):
        return False
    if any(n != of_q and not (shares and n == 1) for n, of_q in zip(bias, q[:2])):
        return False
    if "out" not in forms:
        return True
    lse = forms["logsumexp"]
    rows = -(-q[2] // LSE_ROWS) * LSE_ROWS
    is_lse = (lse.size, lse.stride) == ((*q[:2], rows), (q[1] * rows, rows, 1))
    is_fp32 = lse.dtype == torch.float32
    return is_lse and is_fp32 and forms["out"].size == forms["grad_out_"].size == q


def is_aligned(form: TensorForm) -> bool:
    """Can TMA load it, with adjacent elements, in 16-byte vectors?"""
    steps = [step for n, step in zip(form.size[:3], form.stride) if n > 1]
    return not form.offset and form.stride[3] == 1 and all(s > 0 and s % _LANES == 0 for s in steps)


def _sum_of(gradient: Node, shared: Sequence[int]) -> Node | None:
    """The sum over what shares the bias, if nothing else reads its gradient."""
    if len(gradient.users) != 1 or not shared:
        return None
    (user,) = gradient.users
    if user.target is not _aten.sum.dim_IntList:
        return None
    given = arguments_of(user)
    dims, keeps = given["dim"], given["keepdim"]
    if dims is None or sorted(d % 4 for d in dims) != [*shared] or keeps is not True:
        return None
    return user if user.meta["val"].dtype == gradient.meta["val"].dtype else None
