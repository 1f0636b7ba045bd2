"""torchvision's FrozenBatchNorm2d, plain operations, is folded as a BatchNorm in evaluation is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import choices
import folded_nets
import pytest
import torch
from compare import fresh  # noqa: F401 a fixture
from folded_nets import Detectron2, Frozen, net, random_norm, relative, replaced, step
from helpers import Program
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from fx_fuser.anchors.conv2d import memory_format_of
from fx_fuser.kernels.folded import Folded
from fx_fuser.ops import folded

FORCED = {**folded_nets.FORCED, "auto": True, "inner": "aot_eager"}
SITES = 8  # of `net`
FORMS = [torch.channels_last, torch.contiguous_format]
Taken = list[torch.dtype]


def layer(kind: type[Frozen] = Frozen, **members: Any) -> nn.Module:
    def body(m: Any, x: Tensor) -> Tensor:
        return m.last(m.norm(m.conv(x)).relu())

    conv, last = nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.Conv2d(6, 3, 1)
    return Program(body, conv=conv, last=last, norm=kind(random_norm(6)), **members)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, fresh: None) -> Taken:  # noqa: F811
    """The dtypes of the folded sites that were run or traced, with a backward or without."""
    seen: Taken = []
    inner = folded.call

    def watched(*args: Any) -> Tensor:
        y = inner(*args)
        seen.append(y.dtype)
        return y

    monkeypatch.setattr(folded, "call", watched)
    return seen


class OnGpu:
    """A case, as if it were on a GPU: there bf16 is folded, too."""

    def __init__(self, case: Any) -> None:
        self.case, self.device = case, torch.device("cuda")
        self.is_channels_last = memory_format_of(case.tensors[0]) == torch.channels_last

    def __getattr__(self, name: str) -> Any:
        return getattr(self.case, name)


@pytest.fixture
def in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Folded.takes
    monkeypatch.setattr(Folded, "takes", lambda self, case: inner(self, OnGpu(case)))


def image(form: torch.memory_format = torch.channels_last, *size: int) -> Tensor:
    return torch.randn(size or (2, 4, 9, 8)).contiguous(memory_format=form)


def check(
    model: nn.Module,
    x: Tensor,
    train: bool = True,
    cast: bool = False,
    **options: Any,
) -> None:
    """Values and gradients are at most twice as far from float64 as eager's, in its strides.

    cast: under autocast to bf16."""
    compiled = torch.compile(model, backend="fx_fuser", options={**FORCED, **options})

    def run(call: Callable[..., Tensor], x: Tensor, cast: bool = cast) -> dict[str, Tensor]:
        def under(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                return call(x)

        if train:
            y, grads = step(wide if call is wide else model, x, under)
            return {"y": y, **grads}
        with torch.no_grad():
            return {"y": under(x)}

    wide = copy.deepcopy(model).double()
    ours, eager, exact = run(compiled, x), run(model, x), run(wide, x.double(), cast=False)
    assert ours.keys() == eager.keys() == exact.keys()
    floor = torch.finfo(torch.bfloat16).eps / 4 if cast else 6e-7
    for name, found in ours.items():
        assert (found.dtype, found.stride()) == (eager[name].dtype, eager[name].stride()), name
        bound = max(2 * relative(eager[name], exact[name]), floor)
        assert relative(found, exact[name]) <= bound, name


# ---- in fp32 -------------------------------------------------------------------------------------


@pytest.mark.each_once
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("form", FORMS)
def test_a_net(form: torch.memory_format, train: bool, taken: Taken) -> None:
    """As of BatchNorms in evaluation: in training those in channels_last."""
    model = replaced(net()).to(memory_format=form)
    check(model, image(form, 2, 3, 25, 25), train)
    is_folded = form == torch.channels_last or not train
    assert counters["fx_fuser"]["auto_conv2d_batchnorm"] == SITES
    assert len(taken) % SITES == 0 and bool(taken) == is_folded


@pytest.mark.slow
def test_a_net_by_inductor(taken: Taken) -> None:
    """In graphs of its passes nothing reads the user's scale and shift any more."""
    model = replaced(net()).to(memory_format=torch.channels_last)
    with fresh_cache():
        check(model, image(torch.channels_last, 2, 3, 25, 25), inner="inductor")
    assert taken


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_torchvision(train: bool, taken: Taken) -> None:
    torchvision = pytest.importorskip("torchvision")
    norm, block = torchvision.ops.FrozenBatchNorm2d, torchvision.models.resnet.Bottleneck
    down = nn.Sequential(nn.Conv2d(16, 32, 1, 2, bias=False), norm(32))
    model = block(16, 8, 2, down, norm_layer=norm).to(memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, norm):
            random = random_norm(module.weight.numel())
            for name in ("weight", "bias", "running_mean", "running_var"):
                getattr(module, name).copy_(getattr(random, name).detach())
    check(model, image(torch.channels_last, 2, 16, 10, 10), train)
    assert counters["fx_fuser"]["auto_conv2d_batchnorm"] == 4
    assert taken


@pytest.mark.parametrize("kind", [Frozen, Detectron2])
def test_live_statistics(kind: type[Frozen], taken: Taken) -> None:
    model = layer(kind).to(memory_format=torch.channels_last)
    compiled, x = torch.compile(model, backend="fx_fuser", options=FORCED), image()
    for _ in range(3):
        (y, ours), (z, eager) = step(model, x, compiled), step(model, x)
        torch.testing.assert_close(y, z)
        torch.testing.assert_close(ours, eager)
        with torch.no_grad():
            model.norm.running_var += 1
            model.norm.running_mean.mul_(2)
            model.conv.weight -= ours["conv.weight"]
    assert taken


@pytest.mark.parametrize("names", [("bias",), ("weight",), ("weight", "bias")])
def test_trained_vectors(names: tuple[str, ...], taken: Taken) -> None:
    """Folded with a shift that is trained, not with a scale."""
    model = layer()
    for name in names:
        vector = nn.Parameter(getattr(model.norm, name).clone())
        delattr(model.norm, name)
        setattr(model.norm, name, vector)
    check(model.to(memory_format=torch.channels_last), image())
    assert counters["fx_fuser"]["auto_conv2d_batchnorm"] == 1
    assert bool(taken) == ("weight" not in names)


@pytest.mark.parametrize("options", [{"verify": "always"}, {"save": "memory"}])
def test_options(options: dict[str, Any], taken: Taken) -> None:
    check(layer().to(memory_format=torch.channels_last), image(), **options)
    assert taken


# ---- under autocast ------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_16_bits")
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kind", [Frozen, Detectron2])
def test_a_layer_in_16_bits(kind: type[Frozen], train: bool, taken: Taken) -> None:
    model = layer(kind).to(memory_format=torch.channels_last)
    x = image(torch.channels_last, 8, 4, 33, 32)
    with torch.no_grad():
        c = model.conv(x)
        model.norm.running_mean.copy_(c.mean((0, 2, 3)))
        model.norm.running_var.copy_(c.var((0, 2, 3)))
    check(model, x, train, cast=True)
    assert set(taken) == {torch.bfloat16}


@pytest.mark.usefixtures("in_16_bits")
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_a_net_in_16_bits(train: bool, taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual stream is of fp32, and its sums are left."""
    model = replaced(net()).to(memory_format=torch.channels_last)
    x = image(torch.channels_last, 2, 3, 33, 33)
    if train:
        chosen: list[Tensor] = []
        backend = choices.recording(chosen)
        monkeypatch.setattr("fx_fuser.options.lookup_backend", lambda name: backend)
        compiled = torch.compile(model, backend="fx_fuser", options=FORCED)
        choices.check_step(model, x, compiled, chosen)
    else:
        check(model, x, train=False, cast=True)
    # Two of each block; the first layer is pooled, which with a gradient is done in fp32.
    assert counters["fx_fuser"]["auto_conv2d_batchnorm"] == (4 if train else 5)
    assert set(taken) == {torch.bfloat16}
