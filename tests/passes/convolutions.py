"""What the tests of passes that replace 16-bit convolutions share: graphs of `aten.convolution` and
its backward, and the checks that hold for each pass."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from arriving import tensors_of
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fx_fuser import reading
from fx_fuser.native import load
from fx_fuser.ops import run
from fx_fuser.passes import convolution
from fx_fuser.passes.convolution.site import CONVOLUTION, CONVOLUTION_BACKWARD
from fx_fuser.planning import contest
from fx_fuser.planning.timing import Timing

BF16 = torch.bfloat16
OPTIONS = {"cpu_ops": True, "strict": True}
LAST = torch.channels_last
# dx, dw and the bias's gradient: is each asked for?
ASKED = [(True, True, True), (True, False, False), (False, True, False), (False, True, True)]


@contextmanager
def fresh_graphs() -> Iterator[None]:
    """Where Inductor's cache has a graph, from an earlier run, no pass runs."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    with torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())):
        yield


def targets(gm: GraphModule) -> list[Any]:
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


def results_of(gm: GraphModule) -> list[Tensor]:
    """Fake: with the strides that torch says they have."""
    (made,) = gm.graph.output_node().args
    nodes = made if isinstance(made, (list, tuple)) else [made]
    return [node.meta["val"] for node in nodes]  # type: ignore[union-attr]


def near(found: Tensor, exact: Tensor) -> None:
    """As near as its dtype, twice rounded on the way."""
    size = exact.double().norm()
    assert (found.double() - exact).norm() <= 2 * torch.finfo(found.dtype).eps * size


def trained(model: nn.Module, x: Tensor, f: Callable[..., Tensor]) -> list[Tensor]:
    """The result under autocast, and the gradients of x and of the parameters."""
    model.zero_grad()
    given = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", BF16):
        y = f(given)
    y.float().square().sum().backward()
    assert given.grad is not None
    return [
        y.detach(),
        given.grad,
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
    ]


def check_a_step(model: nn.Module, x: Tensor, f: Callable[..., Tensor]) -> None:
    eager, found = trained(model, x, model), trained(model, x, f)
    exact = trained(model.double(), x.double(), model)  # which autocast leaves as it is
    model.float()
    for ours, usual, wanted in zip(found, eager, exact):
        error, theirs = (float((v.double() - wanted).norm()) for v in (ours, usual))
        assert error <= 1.5 * theirs + 1e-6 * float(wanted.norm())
        assert ours.stride() == usual.stride()


@dataclass
class Convolutions:
    """A pass under test, and the arguments of the convolutions that its tests write.

    rank: over how many dimensions they go; refused: what a warning calls one that is left.
    """

    replacing: Callable[..., Any]
    site: Any
    counters: str
    rank: int
    channels: int
    groups: int
    padding: int
    refused: str = "a convolution"
    usual: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.usual = {
            "stride": [1] * self.rank,
            "padding": [self.padding] * self.rank,
            "dilation": [1] * self.rank,
            "transposed": False,
            "output_padding": [0] * self.rank,
            "groups": self.groups,
        }

    def numbers(self, **named: Any) -> list[Any]:
        """What `aten.convolution` takes behind its tensors; a number counts for each dimension."""
        assert named.keys() <= self.usual.keys(), named
        given = {
            name: [value] * self.rank
            if isinstance(self.usual[name], list) and isinstance(value, int)
            else value
            for name, value in named.items()
        }
        return [*(self.usual | given).values()]

    def forward(self, *given: Tensor, **named: Any) -> GraphModule:
        """The graph of a convolution of x, weight and perhaps a bias."""

        def f(*tensors: Tensor) -> Tensor:
            x, weight, *bias = tensors
            return CONVOLUTION(x, weight, *(bias or [None]), *self.numbers(**named))

        return make_fx(f, tracing_mode="fake")(*given)

    def backward(self, *given: Tensor, asked: Sequence[bool], **named: Any) -> GraphModule:
        """The graph of those gradients that are asked for, from dz, x and weight."""

        def f(dz: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
            order = *self.numbers(**named), [*asked]
            made = CONVOLUTION_BACKWARD(dz, x, weight, [self.channels], *order)
            return [made[i] for i in range(3) if asked[i]]

        return make_fx(f, tracing_mode="fake")(*given)

    def replaced(self, gm: GraphModule, **named: Any) -> GraphModule:
        gm.graph.eliminate_dead_code()
        self.replacing(**({"strict": True, "on_cpu": True} | named))(gm.graph)
        gm.graph.lint()
        gm.recompile()
        return gm

    def left(self, reason: str, *given: Tensor, device: str = "cpu", **named: Any) -> None:
        """The convolution is no site on the device, and the reason says why."""
        gm = self.forward(*given, **named)
        (node,) = (n for n in gm.graph.nodes if n.target is CONVOLUTION)
        fault = self.site.of(node, device)
        assert isinstance(fault, str) and reason in fault, fault
        if device == "cpu":
            assert CONVOLUTION in targets(self.replaced(gm))

    def check_result(self, *given: Tensor, copies: int = 0, **named: Any) -> Tensor:
        """As near as its dtype, in torch's shape and strides; returns it.

        given: x, weight and perhaps a bias; copies: how many the graph makes of operands or of the
        result.
        """
        gm = self.forward(*given, **named)
        (like,) = results_of(gm)
        gm = self.replaced(gm)
        assert CONVOLUTION not in targets(gm) and run.ONE in targets(gm)
        assert targets(gm).count(torch.ops.aten.clone.default) == copies
        found: Tensor = gm(*given)
        doubled = [t.double() for t in given]
        near(found, self.forward(*doubled, **named)(*doubled))
        assert (found.shape, found.stride()) == (like.shape, like.stride())
        assert counters[self.counters] == {"convolution": 1}
        return found

    def check_gradients(
        self, asked: Sequence[bool], *given: Tensor, has_strides: bool = True, **named: Any
    ) -> list[Tensor]:
        """The gradients as near as their dtype, in torch's shapes and strides; returns them."""
        gm = self.backward(*given, asked=asked, **named)
        likes = results_of(gm)
        gm = self.replaced(gm)
        assert CONVOLUTION_BACKWARD not in targets(gm)
        assert targets(gm).count(run.ONE) == sum(asked[:2])
        found = gm(*given)
        doubled = [t.double() for t in given]
        exact = self.backward(*doubled, asked=asked, **named)(*doubled)
        assert len(found) == len(exact) == sum(asked)
        for ours, wanted, like in zip(found, exact, likes):
            near(ours, wanted)
            assert ours.shape == like.shape
            assert not has_strides or ours.stride() == like.stride()
        assert counters[self.counters] == {"convolution_backward": 1}
        return list(found)

    def check_one_number(self, x: Tensor, weight: Tensor) -> None:
        """As torch has the padding of "valid", in both directions."""
        named = {"stride": [1], "padding": [0], "dilation": [1], "output_padding": [0]}
        z = self.check_result(x, weight, **named)
        for asked in ASKED:
            counters.clear()
            self.check_gradients(asked, torch.randn_like(z), x, weight, **named)

    def on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The pass finds a GPU, and the sites there that it finds on a CPU."""
        real = self.site.of
        monkeypatch.setattr(load, "runs_on", lambda spec, device: True)
        monkeypatch.setattr(self.site, "of", lambda node, device: real(node, "cpu"))

    def check_the_clock_decides(
        self, ours: float, is_taken: bool, graphs: Sequence[GraphModule], patch: pytest.MonkeyPatch
    ) -> None:
        """By the GPU's time of the library's, 2, and of ours with all copies; values are compared.

        graphs: of a convolution and of all three gradients.
        """
        made: list[list[Any]] = []

        def times(key: Any, make: Callable[[], Any], device: Any) -> list[Timing]:
            made.append([candidate.run() for candidate in make()])
            return [Timing(2.0), Timing(ours)]

        self.on_a_gpu(patch)
        patch.setattr(convolution, "loaded", lambda specs, *rest: {*specs})
        patch.setattr(contest, "times", times)
        for gm in graphs:
            assert (run.ONE in targets(self.replaced(gm, on_cpu=False))) == is_taken
        assert [len(results) for of_site in made for results in of_site] == [1, 1, 3, 3]
        for library, found in made:
            for wanted, value in zip(library, found):
                near(value, wanted)
                assert value.stride() == wanted.stride()

    def check_that_no_kernel_builds(self, gm: GraphModule, patch: pytest.MonkeyPatch) -> None:
        self.on_a_gpu(patch)
        patch.setattr(convolution, "loaded", lambda *rest: set())
        assert CONVOLUTION in targets(self.replaced(gm, on_cpu=False))

    def check_a_failure(self, gm: GraphModule, patch: pytest.MonkeyPatch) -> None:
        """It leaves the convolution, with one warning; strict raises."""

        def fails(*given: Any) -> None:
            raise ValueError("planted")

        patch.setattr(self.site, "replace", fails)
        with pytest.warns(UserWarning, match=f"leaves {self.refused}.*planted"):
            self.replacing(on_cpu=True)(gm.graph)
        assert CONVOLUTION in targets(gm)
        with pytest.raises(ValueError, match="planted"):
            self.replacing(on_cpu=True, strict=True)(gm.graph)

    def check_two_steps(self, model: nn.Module, x: Tensor) -> None:
        f = torch.compile(model, backend="fx_fuser", options=OPTIONS)
        check_a_step(model, x, f)
        assert counters[self.counters] == {"convolution": 1, "convolution_backward": 1}
        with torch.no_grad():  # a second step with other weights
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
        check_a_step(model, x, f)

    def check_gradients_of_weights_alone(self, model: nn.Module, x: Tensor) -> None:
        f = torch.compile(model, backend="fx_fuser", options=OPTIONS)
        with torch.autocast("cpu", BF16):
            f(x).float().sum().backward()
        assert counters[self.counters] == {"convolution": 1, "convolution_backward": 1}
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    def check_strides_at_run_time(
        self, functions: Sequence[str], patch: pytest.MonkeyPatch, window: int
    ) -> None:
        """Images and gradients reach the functions in channels_last, as the kernels take them, if
        the graph makes them so of contiguous ones: by itself Inductor would copy them in the layout
        that they have. No convolution is fused with its tail: on a GPU those of 16 bits in training
        are left, with `cpu_ops` none is."""
        patch.setattr(reading, "_add_grown", lambda *args: None)
        reached = tensors_of(patch, *functions)
        padding, options = window // 2, {**OPTIONS, "patterns": [], "auto": True}
        conv = nn.Conv2d(self.channels, self.channels, window, 1, padding, 1, self.groups)

        @torch.compile(backend="fx_fuser", options=options)  # type: ignore[call-overload]
        def f(x: Tensor) -> Tensor:
            return conv(x.tanh().contiguous(memory_format=LAST)).contiguous().tanh()

        x = torch.randn(3, self.channels, 6, 7, requires_grad=True)
        with torch.autocast("cpu", BF16):
            f(x).float().square().mean().backward()
        assert counters[self.counters] == {"convolution": 1, "convolution_backward": 1}
        for name in functions:
            images = [t for tensors in reached[name] for t in tensors if t.shape[0] == len(x)]
            assert images, name
            assert all(t.is_contiguous(memory_format=LAST) for t in images), name
