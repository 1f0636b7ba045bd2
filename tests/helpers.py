"""Run a program eagerly, in float64 and compiled; prove the graph and the numbers.

The bound: fx_fuser's error against float64 is at most twice eager's own, in the Euclidean and in
the maximum norm, or at most `FLOOR` times the size of the exact value. The floor is there because
eager's error may be zero by luck. It counts roundings: sums of the few terms these tests have may
be taken in another order (4 eps in float32 and float64); in bfloat16 and float16 the arithmetic is
float32's, and the result is rounded once and a gradient once more on its way (2 · eps / 2).
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule

import fx_fuser
from fx_fuser.graph.match.grow import AUTO
from fx_fuser.options import Options
from fx_fuser.verify.accuracy import Copier

Body = Callable[..., Any]  # of a model: (model, *inputs) to outputs

MUL = "linear_sigmoid_mul_mul"
ADD = "linear_sigmoid_mul_add"
CONV = "conv2d_batchnorm_mul"

# Named patterns alone: a grown tail would take what a test says is refused (graph/test_grow.py).
OPTIONS = {"inner": "aot_eager", "cpu_ops": True, "strict": True, "auto": False}
FLOOR = {torch.float64: 4, torch.float32: 4, torch.bfloat16: 1, torch.float16: 1}  # eps

# What each pattern replaces, by any of its names; a trailing underscore is cut off first.
_MUL_NAMES = "mul multiply imul truediv itruediv div divide true_divide neg"
_ADD_NAMES = "add iadd sub isub rsub subtract addcmul"
_LINEAR_NAMES = "linear matmul mm addmm t transpose permute swapaxes getattr"
_SIGMOID_NAMES = "sigmoid silu special_expit expit"
_CONV_NAMES = "conv2d batch_norm"
OLD_OPS = {
    MUL: set(f"{_LINEAR_NAMES} {_SIGMOID_NAMES} {_MUL_NAMES}".split()),
    ADD: set(f"{_LINEAR_NAMES} {_SIGMOID_NAMES} {_MUL_NAMES} {_ADD_NAMES}".split()),
    CONV: set(f"{_CONV_NAMES} {_MUL_NAMES}".split()),
    "auto_linear": {"linear", "matmul", "mm", "addmm"},
    "auto_matmul": {"matmul", "mm", "addmm"},
    "auto_conv2d": {"conv2d"},
    "auto_conv2d_batchnorm": {"conv2d", "batch_norm"},
}
# Growth alone: no named pattern takes what is looked at.
GROWTH = {"patterns": [], "auto": True}


class Program(nn.Module):
    """A model from a function `body(self, *inputs)`; members become submodules, buffers and so on.

    A Parameter stays one, a plain tensor becomes a buffer, anything else an attribute.
    """

    def __init__(self, body: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.body = body
        for name, value in members.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: Any) -> Any:
        return self.body(self, *inputs)


def leaf(*shape: int, **kwargs: Any) -> Tensor:
    """Random, and with a gradient."""
    return torch.randn(*shape, **kwargs).requires_grad_()


def linear_program(body: Callable[..., Any]) -> Program:
    """Members for programs with a Linear from 8 to 6 features."""
    return Program(
        body,
        lin=nn.Linear(8, 6),
        bare=nn.Linear(8, 6, bias=False),
        w=nn.Parameter(torch.randn(6, 8)),
        b=nn.Parameter(torch.randn(6)),
        p=nn.Parameter(torch.tensor(1.5)),
        s=torch.tensor(0.75),
        sigmoid=nn.Sigmoid(),
        silu=nn.SiLU(),
        silu_in_place=nn.SiLU(inplace=True),
    )


def conv_program(body: Callable[..., Any], conv: nn.Module, norm: nn.Module) -> Program:
    """Members for programs with a convolution from 4 to 6 channels."""
    channels = 6
    if isinstance(norm, nn.BatchNorm2d) and norm.track_running_stats:
        norm.running_mean.copy_(torch.randn(channels))
        norm.running_var.copy_(torch.rand(channels) + 0.5)
    return Program(
        body,
        conv=conv,
        bn=norm,
        w=nn.Parameter(torch.randn(channels, 4, 3, 3)),
        b=nn.Parameter(torch.randn(channels)),
        gamma=nn.Parameter(torch.randn(channels)),
        beta=nn.Parameter(torch.randn(channels)),
        mean=torch.randn(channels),
        var=torch.rand(channels) + 0.5,
        p=nn.Parameter(torch.tensor(1.5)),
    )


@dataclass
class Run:
    """What one run left behind, by name."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)

    def everything(self) -> dict[str, Tensor]:
        parts = (("output", self.outputs), ("gradient of", self.grads), ("state of", self.state))
        return {f"{kind} {name}": v for kind, part in parts for name, v in part.items()}


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [t for v in value or () for t in _flat(v)]


def _random_like(outputs: Sequence[Tensor], narrow: Sequence[Tensor]) -> list[Tensor]:
    """One gradient an output: random, and a number that the narrow dtype holds."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(n.shape, generator=generator, dtype=torch.float64).to(n.dtype).to(o)
        for o, n in zip(outputs, narrow)
    ]


def run(
    model: nn.Module,
    inputs: Sequence[Any],
    train: bool,
    call: Callable[[nn.Module], Callable[..., Any]] = lambda m: m,
    dtype: torch.dtype | None = None,
    narrow: Sequence[Tensor] | None = None,
    grad: bool | None = None,
) -> tuple[Run, list[Tensor]]:
    """Run a copy of the model forward, and in training backward from random gradients.

    call: model → what to call. dtype: run in this dtype. narrow: outputs of an earlier run, whose
    dtypes the gradients must fit in. grad: whether to run backward, if not as `train`.
    """
    grad = train if grad is None else grad
    model = copy.deepcopy(model).train(train)
    if dtype is not None:
        model = model.to(dtype)
    copies = [*map(Copier(dtype), inputs)]
    with torch.set_grad_enabled(grad):
        outputs = _flat(call(model)(*copies))
    made = Run({str(i): o.detach().clone() for i, o in enumerate(outputs)})
    if grad:
        wanted = [i for i, o in enumerate(outputs) if o.requires_grad]
        narrow_outputs = [(narrow or outputs)[i] for i in wanted]
        grads = _random_like([outputs[i] for i in wanted], narrow_outputs)
        if wanted:
            torch.autograd.backward([outputs[i] for i in wanted], grads)
        leaves = dict(model.named_parameters())
        leaves |= {f"input {i}": c for i, c in enumerate(copies) if isinstance(c, Tensor)}
        made.grads = {n: p.grad for n, p in leaves.items() if p.is_leaf and p.grad is not None}
    made.state = {n: b.detach().clone() for n, b in model.named_buffers()}
    made.state |= {
        f"input {i}": c.detach().clone() for i, c in enumerate(copies) if isinstance(c, Tensor)
    }
    return made, outputs


def assert_close(ours: Run, eager: Run, exact: Run, factor: float = 2.0) -> None:
    """`ours` is as near to `exact` as `eager` is; see the docstring of this file."""
    for part in ("outputs", "grads", "state"):
        assert getattr(ours, part).keys() == getattr(eager, part).keys(), part
    whole = sum(float(g.double().norm()) ** 2 for g in exact.grads.values()) ** 0.5
    mine, theirs, truth = ours.everything(), eager.everything(), exact.everything()
    for name, value in mine.items():
        assert value.dtype == theirs[name].dtype, f"{name}: dtype"
        assert value.shape == theirs[name].shape, f"{name}: shape"
        if not value.dtype.is_floating_point:
            assert torch.equal(value, theirs[name]), name
            continue
        for norm in (2, float("inf")):

            def size(t: Tensor, norm: float = norm) -> float:
                return float(torch.linalg.vector_norm(t.double(), norm)) if t.numel() else 0.0

            scale = size(truth[name])
            if name.startswith("gradient") and scale < 1e-9 * whole:
                scale = whole  # zero in exact arithmetic: a bias under a training BatchNorm
            error, own = size(value.double() - truth[name]), size(theirs[name] - truth[name])
            bound = max(factor * own, FLOOR[value.dtype] * torch.finfo(value.dtype).eps * scale)
            assert error <= bound, f"{name}: error {error:.3g}, bound {bound:.3g}, norm {norm}"


@contextlib.contextmanager
def recorded() -> Iterator[list[GraphModule]]:
    """The graph modules that the inner compiler is given, in the state in which it gets them.

    Those it raises on are left out: Dynamo starts over, say to make an `eps` a constant.
    """
    graphs: list[GraphModule] = []
    original = Options.inner_compiler

    def inner_compiler(self: Options) -> Callable[..., Any]:
        compile_inner = original(self)

        def record(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            given = copy.deepcopy(gm)
            result = compile_inner(gm, inputs, **kwargs)
            graphs.append(given)
            return result

        return record

    with mock.patch.object(Options, "inner_compiler", inner_compiler):
        yield graphs


def calls(graphs: Sequence[GraphModule]) -> Counter[str]:
    """Names of all functions and methods called, also in the bodies of higher-order ops."""
    found: Counter[str] = Counter()
    for graph in graphs:
        for module in graph.modules():
            if not isinstance(module, GraphModule):
                continue
            for node in module.graph.nodes:
                if node.op in ("call_function", "call_method"):
                    found[name_of(node.target)] += 1
    return found


def epilogues(graphs: Sequence[GraphModule]) -> list[str]:
    """Of every fused op, in the graphs' order; "" is z alone."""
    found: list[str] = []
    for graph in graphs:
        for module in (m for m in graph.modules() if isinstance(m, GraphModule)):
            fused_ops = (n for n in module.graph.nodes if str(n.target).startswith("fx_fuser."))
            found += [node.args[-6] for node in fused_ops]
    return found


def name_of(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.removeprefix("aten::").rstrip("_")
    name = target if isinstance(target, str) else target.__name__
    return name.rstrip("_") if not name.startswith("__") else name


def compiled(
    model: Callable[..., Any],
    dynamic: bool | None = None,
    fullgraph: bool = True,
    **options: Any,
) -> Callable[..., Any]:
    """The model through fx_fuser; options are added to `OPTIONS`."""
    return torch.compile(
        model,
        backend="fx_fuser",
        dynamic=dynamic,
        fullgraph=fullgraph,
        options={**OPTIONS, **options},
    )


def fused() -> dict[str, int]:
    """Fused sites so far, by pattern."""
    return dict(counters["fx_fuser"])


def check(
    model: nn.Module,
    *inputs: Any,
    fuses: dict[str, int],
    train: bool = True,
    dynamic: bool | None = None,
    fullgraph: bool = True,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: f,
    leaves: tuple[str, ...] = (),
    grad: bool | None = None,
    **options: Any,
) -> list[GraphModule]:
    """Compile and run; assert which sites fuse, that the old ops are gone, and all numbers.

    fuses: pattern → sites; empty for a refusal. wrap: around the call, e.g. in autocast.
    leaves: old ops that rightly stay in the graph beside the fused one. grad: as in `run`.
    Returns the graphs given to the inner compiler.
    """
    eager, outputs = run(model, inputs, train, wrap, grad=grad)
    exact, _ = run(model, inputs, train, wrap, torch.float64, outputs, grad)
    with recorded() as graphs:
        ours, got = run(
            model,
            inputs,
            train,
            lambda m: wrap(compiled(m, dynamic, fullgraph, **options)),
            narrow=outputs,
            grad=grad,
        )
    assert fused() == fuses
    called = calls(graphs)
    kinds = {p.name: p.kind for p in fx_fuser.registered_patterns()}
    by_kind: Counter[str] = Counter()
    for pattern, count in fuses.items():
        by_kind[kinds.get(pattern, pattern.removeprefix(AUTO))] += count
    for kind, count in by_kind.items():
        assert called[f"fx_fuser::{kind}"] == count
    for pattern in fuses:
        stay = set(called) & OLD_OPS.get(pattern, set()) - set(leaves)
        assert not stay, f"old ops stay: {called}"
    if not fuses:
        assert not any(name.startswith("fx_fuser::") for name in called)
    assert_close(ours, eager, exact)
    assert [o.requires_grad for o in got] == [o.requires_grad for o in outputs]
    return graphs


def refused(
    model: nn.Module,
    *inputs: Any,
    reason: str,
    explain: bool = True,
    **settings: Any,
) -> None:
    """Nothing fuses, nothing changes, and `explain` says why: `reason` is in what it says."""
    check(model, *inputs, fuses={}, **settings)
    if explain:
        torch._dynamo.reset()
        report = fx_fuser.explain(copy.deepcopy(model), *map(Copier(), inputs))
        assert not report.fused
        reasons = [s.reason for s in report.refused]
        assert any(reason in r for r in reasons), reasons


def cases(table: Mapping[str, tuple[Body, str]]) -> Any:
    """Bodies of models, and why they are refused, by name."""
    return pytest.mark.parametrize("body, reason", table.values(), ids=table.keys())


def slow_but(fast: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """These values of a parameter: slow combinations, but for the fast ones, which stand for all of
    them."""
    left_out = [pytest.mark.slow, pytest.mark.combination]
    return [pytest.param(v, marks=[] if v in fast else left_out) for v in every]


def gate(m: Any, x: Tensor) -> Tensor:
    z = m.lin(x)
    return z * torch.sigmoid(z) * 2.0
