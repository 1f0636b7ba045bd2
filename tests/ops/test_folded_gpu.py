"""Folded convolutions on a CUDA device: cuDNN's call, the kernel that folds, whole nets."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from folded_nets import FORCED, check, frozen, net, random_norm, relative, replaced, step
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fx_fuser.kernels.implicit import Implicit
from fx_fuser.native import load
from fx_fuser.ops import folded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FORMS = [torch.contiguous_format, torch.channels_last]
SITES = 8  # of `net`


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def no_tf32() -> Iterator[None]:
    conv = torch.backends.cudnn.conv
    setting, conv.fp32_precision = conv.fp32_precision, "ieee"
    yield
    conv.fp32_precision = setting


@pytest.fixture
def no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan "always" takes the implicit gemm where it can, and in 16 bits it can."""
    monkeypatch.setattr(Implicit, "takes", lambda *_: False)


folds = pytest.mark.usefixtures("no_other")


def taken() -> int:
    return counters["fx_fuser"]["auto_conv2d_batchnorm"]


def on_gpu(form: torch.memory_format, dtype: torch.dtype, **norm: Any) -> nn.Module:
    return net(**norm).cuda().to(dtype).to(memory_format=form)


def images(*shape: int, form: torch.memory_format, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=form)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("bfloat16",) * 2, ("float32", "bfloat16")])
def test_the_kernel_that_folds(dtypes: tuple[str, str], missing: bool) -> None:
    """More layers than one launch takes, of all layouts, some not aligned."""
    of_weight, out = (getattr(torch, name) for name in dtypes)
    spec = folded.fold_spec(of_weight, out)
    load.prepare([spec], torch.device("cuda"))
    weights = []
    for i in range(45):
        shape = ((5, 3, 3, 2), (16, 8, 1, 1), (9, 24, 3, 3), (4, 1, 5, 5))[i % 4]
        weight = torch.randn(shape, device="cuda", dtype=of_weight)
        if i % 3 == 1:
            weight = weight.contiguous(memory_format=torch.channels_last)
        if i % 3 == 2:
            weight = torch.randn(weight.numel() + 1, device="cuda").to(of_weight)[1:].view(shape)
        weights.append(weight)
    given = [0 if missing and i % 2 else 7 for i in range(len(weights))]
    vectors = []
    for weight, mask in zip(weights, given):
        for i in range(5 if mask else 2):
            dtype = torch.bfloat16 if i == 1 else torch.float32
            vector = (torch.rand(2, weight.shape[0], device="cuda") + 0.2).to(dtype)
            vectors.append(vector[0] if i % 2 else vector.t().contiguous()[:, 0])
    eps = [1e-5 * (i + 1) for i in range(len(weights))]
    torch.full((2**22,), torch.nan, device="cuda")  # what the results' memory may hold
    places = folded.places_of(weights, out)
    made = torch.ops.fx_fuser.fold(weights, vectors, given, eps, places, spec.name, out, weights[0])
    found = folded.parts_of(made, weights, places)
    exact = folded.fold_in_torch([w.double() for w in weights], vectors, given, eps, torch.float64)
    for one, right in zip(found, exact, strict=True):
        assert relative(one, right) < 4 * torch.finfo(out).eps
        assert one.dtype == out


@folds
@pytest.mark.parametrize("size", [(1, 33, 47), (5, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_net(form: torch.memory_format, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    count, height, width = size
    x = images(count, 3, height, width, form=form, dtype=dtype)
    check(on_gpu(form, dtype), x)
    assert taken() == SITES


@folds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_over_four_decades(dtype: torch.dtype) -> None:
    form = torch.channels_last
    check(on_gpu(form, dtype, decades=4.0), images(4, 3, 48, 48, form=form, dtype=dtype))
    assert taken() == SITES


@pytest.mark.usefixtures("no_tf32")
def test_in_fp32_without_tf32() -> None:
    form, dtype = torch.channels_last, torch.float32
    check(on_gpu(form, dtype), images(4, 3, 48, 48, form=form, dtype=dtype))
    assert taken() == SITES


@folds
@pytest.mark.parametrize("form", FORMS)
def test_autocast(form: torch.memory_format) -> None:
    model = on_gpu(form, torch.float32)
    x = images(4, 3, 48, 48, form=form, dtype=torch.float32)
    compiled = torch.compile(model, backend="fx_fuser", options=FORCED)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        with torch.autocast("cuda", torch.bfloat16):
            found, eager = compiled(x), model(x)
    assert relative(found, exact) <= 2 * relative(eager, exact)
    assert found.stride() == eager.stride() and found.dtype == eager.dtype
    assert taken() == SITES


@folds
def test_a_dynamic_batch() -> None:
    form, dtype = torch.channels_last, torch.bfloat16
    model = on_gpu(form, dtype)
    compiled = torch.compile(model, backend="fx_fuser", options=FORCED)
    exact = copy.deepcopy(model).double()
    for count in (4, 7, 1, 12):
        x = images(count, 3, 40, 40, form=form, dtype=dtype)
        with torch.no_grad():
            right = exact(x.double())
            assert relative(compiled(x), right) <= 2 * relative(model(x), right)
    assert taken() >= SITES


@folds
@pytest.mark.parametrize(
    ("dtype", "plan"), [(torch.float32, "measure"), (torch.bfloat16, "always")]
)
def test_not_a_number(dtype: torch.dtype, plan: str) -> None:
    """It goes through both calls, as through eager's relu.

    In TF32 some of cuDNN's kernels lose it (docs/accuracy.md): who measures does not take these.
    """
    form = torch.channels_last
    model = on_gpu(form, dtype)
    x = images(4, 3, 40, 40, form=form, dtype=dtype)
    x[1, 0, 20, 20] = torch.nan
    options = {**FORCED, "plan": plan}
    compiled = torch.compile(model, backend="fx_fuser", options=options)
    with torch.no_grad():
        found, eager = compiled(x), model(x)
    assert torch.equal(found.isnan(), eager.isnan())
    assert eager.isnan().any() and (plan == "measure" or taken() == SITES)


def test_cuda_graphs_and_live_parameters() -> None:
    form, dtype = torch.channels_last, torch.float32
    model = on_gpu(form, dtype)
    options = {**FORCED, "mode": "reduce-overhead"}
    compiled = torch.compile(model, backend="fx_fuser", options=options)
    x = images(4, 3, 40, 40, form=form, dtype=dtype)
    for _ in range(3):
        with torch.no_grad():
            for _ in range(3):
                found = compiled(x).clone()
            exact = copy.deepcopy(model).double()(x.double())
            assert relative(found, exact) <= max(2 * relative(model(x), exact), 4e-7)
        model.train()
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        model.eval()
    assert taken() == SITES


@pytest.mark.parametrize("form", FORMS)
def test_as_measured(form: torch.memory_format) -> None:
    """Whatever is chosen."""
    x = images(16, 3, 112, 112, form=form, dtype=torch.bfloat16)
    check(on_gpu(form, torch.bfloat16), x, plan="measure")


@folds
def test_many_launches_are_the_same() -> None:
    form, dtype = torch.channels_last, torch.bfloat16
    model = on_gpu(form, dtype)
    compiled = torch.compile(model, backend="fx_fuser", options=FORCED)
    x = images(4, 3, 40, 40, form=form, dtype=dtype)
    with torch.no_grad():
        first = compiled(x)
        for _ in range(200):  # of 8 convolutions and folds each
            assert torch.equal(compiled(x), first)


@folds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.usefixtures("no_tf32")
def test_training_with_frozen_norms(dtype: torch.dtype, autocast: bool) -> None:
    """Without TF32, whose rounding turns the signs of a few of relu's 117,248 inputs, and with each
    a gradient: on a CPU, noise of 1e-4 turned 1 to 15, an error of dx of up to 7e-3."""
    model = frozen(on_gpu(torch.channels_last, dtype))
    x = images(4, 3, 65, 64, form=torch.channels_last, dtype=dtype)
    exact, wide = step(copy.deepcopy(model).double(), x.double())
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        y, eager = step(model, x)
        compiled = torch.compile(model, backend="fx_fuser", options=FORCED)
        found, ours = step(model, x, compiled)
    assert taken() == SITES
    floor = 4e-7 if y.dtype == torch.float32 else torch.finfo(y.dtype).eps / 4
    assert relative(found, exact) <= max(2 * relative(y, exact), floor)
    assert ours.keys() == eager.keys()
    for name, grad in ours.items():
        assert (grad.dtype, grad.stride()) == (eager[name].dtype, eager[name].stride()), name
        assert relative(grad, wide[name]) <= max(2 * relative(eager[name], wide[name]), floor), name


@folds
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.usefixtures("no_tf32")
def test_plain_frozen_norms(autocast: bool, train: bool) -> None:
    """torchvision's. Under autocast their results are of fp32, and those are folded that only a
    convolution reads; gradients are compared in fp32, as bf16 turns the signs of relus."""
    model = replaced(on_gpu(torch.channels_last, torch.float32))
    x = images(4, 3, 65, 64, form=torch.channels_last, dtype=torch.float32)
    compiled = torch.compile(model, backend="fx_fuser", options=FORCED)
    with torch.set_grad_enabled(train):
        call = step if train else lambda m, x, call=None: ((call or m)(x), {})
        exact, wide = call(copy.deepcopy(model).double(), x.double())
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            (y, eager), (found, ours) = call(model, x), call(model, x, compiled)
    assert taken() == ((4 if train else 5) if autocast else SITES)
    assert (found.dtype, found.stride()) == (y.dtype, y.stride())
    floor = torch.finfo(torch.bfloat16).eps / 4 if autocast else 4e-7
    assert relative(found, exact) <= max(2 * relative(y, exact), floor)
    assert ours.keys() == eager.keys()
    for name, grad in ours.items():
        assert (grad.dtype, grad.stride()) == (eager[name].dtype, eager[name].stride()), name
        bound = max(2 * relative(eager[name], wide[name]), floor)
        assert autocast or relative(grad, wide[name]) <= bound, name


@folds
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.usefixtures("no_tf32")
def test_trained_shifts(autocast: bool) -> None:
    """Of a frozen BatchNorm and of a convolution, behind which there is nothing."""
    norm = random_norm(32).requires_grad_(False)
    norm.bias.requires_grad_(True)
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), norm, nn.ReLU()).eval().cuda()
    model = model.to(memory_format=torch.channels_last)
    x = images(4, 16, 33, 32, form=torch.channels_last, dtype=torch.float32)
    exact, wide = step(copy.deepcopy(model).double(), x.double())
    compiled = torch.compile(model, backend="fx_fuser", options=FORCED)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        (y, eager), (found, ours) = step(model, x), step(model, x, compiled)
    assert taken() == 1
    floor = torch.finfo(torch.bfloat16).eps / 4 if autocast else 4e-7
    assert relative(found, exact) <= max(2 * relative(y, exact), floor)
    assert ours.keys() == eager.keys() == {"x", "0.weight", "0.bias", "1.bias"}
    for name, grad in ours.items():
        bound = max(2 * relative(eager[name], wide[name]), floor)
        assert relative(grad, wide[name]) <= bound, name
