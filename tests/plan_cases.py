"""What the tests of plans share: matches, and a GPU of made-up times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.graph.match.pattern import Match, Refusal
from fx_fuser.native import load
from fx_fuser.options import Options
from fx_fuser.planning import ahead, case, convolutions, gate, plan, surroundings, timing
from fx_fuser.planning.plan import Plan
from fx_fuser.planning.timing import Timing

GPU = torch.device("cuda", 0)
LIBRARY = {"product": "library", "backward": "library", "again": False}
SPLIT = {"product": "split", "backward": "split", "again": False}
DENSE = {"product": "dense", "backward": "library", "again": False}
CONV = {"tf32": False, "product": "library", "backward": "library", "again": False}
DIRECT = {**CONV, "product": "direct"}
BOTH_WAYS = {**DIRECT, "backward": "direct"}
# Which `on_gpu` replaces.
BUILD_KERNELS = plan._build_kernels
BUILD = load.build


def swish(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    z = F.linear(x, weight, bias)
    return z * torch.sigmoid(z) * 2.0


def scaled_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = F.batch_norm(F.conv2d(x, weight), None, None, training=True)
    return y * 2.0


@pytest.fixture
def match_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Match]:
    def find(f: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Match:
        found: list[Match] = []

        def decide(matches: Sequence[Match], _: Options) -> list[Plan]:
            found.extend(matches)
            return [Plan(False, LIBRARY if m.site.kind == "linear" else CONV) for m in matches]

        torch._dynamo.reset()
        with monkeypatch.context() as patch:
            patch.setattr(plan, "decide", decide)
            # What Inductor would make of the graph, in seconds of g++, says nothing of the match.
            patch.setattr(Options, "inner_compiler", lambda self: lambda gm, inputs: gm.forward)
            torch.compile(f, backend="fx_fuser", **options)(*inputs)
        (match,) = found
        return match

    return find


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """As if the matches were on a Hopper GPU whose times are given."""
    times: list[list[Timing] | None] = [[Timing(1.0), Timing(0.5)]]
    for module in (ahead, case, convolutions, gate, plan, surroundings):
        monkeypatch.setattr(module, "device_of", lambda match: GPU)
    monkeypatch.setattr(plan, "_build_kernels", lambda *_: None)
    # Nor is anything compiled ahead: here no kernel runs, and one takes NVRTC some seconds.
    monkeypatch.setattr(load, "build", lambda *_: None)
    monkeypatch.setattr(load, "runs_on", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(timing, "medians", lambda *_: times[0])
    precision = torch.backends.cuda.matmul.fp32_precision

    def give(*found: float | Timing | None) -> None:
        """Milliseconds of the GPU; None: it had no memory."""
        made = [took if isinstance(took, Timing) else Timing(took) for took in found if took]
        times[0] = made or None

    yield give
    torch.backends.cuda.matmul.fp32_precision = precision


def linear_tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def decide(match: Match, **options: Any) -> Plan | Refusal:
    (decision,) = plan.decide([match], Options(**options))
    return decision


def half_norm(match_of: Any, channels: int = 9, dtype: torch.dtype = torch.bfloat16) -> Match:
    """By default of more channels than the direct kernel takes."""
    x, weight = torch.randn(2, channels, 8, 8), torch.randn(4, channels, 3, 3)
    found: Match = match_of(scaled_norm, x.to(dtype), weight.to(dtype))
    return found
