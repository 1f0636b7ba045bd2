"""On a GPU: Swin's attention of windows runs by fx_fuser's kernels in compiled nets, and right."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sm90 import CAPABILITY
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.sm90 import relative
from fx_fuser.native import load
from fx_fuser.passes.by_hand import clock, rewrite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("own_caches"),
    pytest.mark.skipif(CAPABILITY != (9, 0), reason="needs a Hopper GPU"),
]
MOST = 2  # times eager's error, the contract in 16 bits


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the kernels take is rewritten, untimed, at every size."""
    monkeypatch.setattr(clock, "_FEW_SCORES", 0)
    monkeypatch.setattr(clock.Windows, "_why_lost", lambda *_: "")


def torchvisions() -> tuple[nn.Module, Tensor]:
    models = pytest.importorskip("torchvision.models")
    made = models.SwinTransformer(
        [4, 4], 32, [2, 2], [1, 2], [7, 7], stochastic_depth_prob=0.0, num_classes=8
    )
    return made, torch.randn(4, 3, 112, 112)


def timms() -> tuple[nn.Module, Tensor]:
    timm = pytest.importorskip("timm")
    timm.layers.set_fused_attn(False)
    made = timm.models.SwinTransformer(
        img_size=112, embed_dim=32, depths=(2, 2), num_heads=(1, 2), drop_path_rate=0.0
    )
    return made, torch.randn(4, 3, 112, 112)


def transformers_swin(of_name: str) -> tuple[nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, of_name)
    sizes = {"embed_dim": 32, "depths": [2, 2], "num_heads": [1, 2], "window_size": 7}
    config = kind.config_class(image_size=112, drop_path_rate=0.0, num_labels=8, **sizes)
    return kind(config), torch.randn(4, 3, 112, 112)


def trained(net: nn.Module, call: Callable[..., Any], x: Tensor, amp: bool) -> list[Tensor]:
    net.zero_grad()
    with torch.autocast("cuda", torch.bfloat16) if amp else contextlib.nullcontext():
        y = call(x)
        y = getattr(y, "logits", y)
    generator = torch.Generator("cuda").manual_seed(1)
    y.backward(torch.randn(y.shape, device="cuda", generator=generator).to(y.dtype))
    named = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return [y.detach(), *named]


transformers_swin_v1 = functools.partial(transformers_swin, "SwinForImageClassification")
transformers_swin_v2 = functools.partial(transformers_swin, "Swinv2ForImageClassification")


@pytest.mark.parametrize(
    "make", [torchvisions, timms, transformers_swin_v1, transformers_swin_v2],
    ids=["torchvision", "timm", "transformers", "transformers v2"],
)  # fmt: skip
def test_nets(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    torch.manual_seed(0)
    net, x = make()
    net, x = net.cuda().train(), x.cuda()
    counters.clear()
    compiled = torch.compile(net, backend="fx_fuser", options={"strict": True})
    mine = trained(net, compiled, x, amp=True)
    # Some versions of transformers' Swin write it by hand, others call torch's.
    assert counters[rewrite.COUNTER]["attention"] + counters["fx_fuser_masks"]["form"] == 4
    theirs = trained(net, net, x, amp=True)
    wide = copy.deepcopy(net).double()
    exact = trained(wide, wide, x.double(), amp=False)
    for a, b, c in zip(mine, theirs, exact, strict=True):
        assert relative(a, c) <= MOST * max(relative(b, c), 1e-4)


@pytest.mark.parametrize("trains", [False, True])
def test_the_clock_runs_torchs_call_beside_ours(trains: bool) -> None:
    """All 64 windows of two of Swin-T's images, in heads of 32."""
    q, k, v = torch.randn(3, 128, 49, 3, 32, device="cuda").bfloat16().transpose(2, 3)
    bias = torch.randn(64, 3, 49, 49, device="cuda")
    one = clock.Windows.of((q, k, v), bias, q.dtype, 0.2, True, trains)
    assert load.prepare([spec for spec in one._specs if spec is not None], q.device) is None
    torchs, ours = (candidate.run() for candidate in one.candidates())
    assert len(torchs) == len(ours) == (5 if trains else 1)  # type: ignore[arg-type]
