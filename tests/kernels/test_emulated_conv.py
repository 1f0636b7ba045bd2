"""The depthwise, first layers' and folding kernels on the CPU emulator, by the checks that they
pass on a GPU."""

from __future__ import annotations

import checks
import conv_checks
import depthwise_checks
import emulator
import pytest
import stem_checks
import torch
from checks import passes
from emulator.device import EmulatedGpu, in_place_of_cuda
from torch import Tensor

from benchmarks import conv_sm90, depthwise, stem
from benchmarks.measure import float32_settings
from benchmarks.sm90 import relative
from fx_fuser.errors import is_out_of_memory
from fx_fuser.ops import folded

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
MODULES = (checks, conv_checks, conv_sm90, depthwise_checks, stem_checks)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    """Of any architecture: no kernel here depends on it."""
    made = EmulatedGpu(80, multiprocessors=3)
    in_place_of_cuda(made, monkeypatch, MODULES)
    return made


def check_depthwise(cases: int, seed: int) -> None:
    passes(depthwise_checks.sweep, cases, seed, side=20)


def check_stems(cases: int, seed: int) -> None:
    with float32_settings("fp32"):
        passes(stem_checks.sweep, cases, seed, side=40)


# One of each dtype; of two channels, and of more than fit into a thread's registers.
FEW_DEPTHWISE = [depthwise_checks.EXAMPLES[i] for i in (1, 9, 17)]
FEW_STEMS = [stem_checks.EXAMPLES[i] for i in (3, 16)]


@pytest.mark.slow
def test_depthwise(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depthwise_checks, "EXAMPLES", FEW_DEPTHWISE)
    gpu.prepare([depthwise.spec_of(*one) for one in FEW_DEPTHWISE])
    check_depthwise(24, 0)


@pytest.mark.slow
def test_stem(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stem_checks, "EXAMPLES", FEW_STEMS)
    gpu.prepare([stem.spec_of(*one) for one in FEW_STEMS])
    check_stems(8, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_every_depthwise(gpu: EmulatedGpu, seed: int) -> None:
    gpu.prepare([depthwise.spec_of(*one) for one in depthwise_checks.EXAMPLES])
    check_depthwise(80, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_every_stem(gpu: EmulatedGpu, seed: int) -> None:
    gpu.prepare([stem.spec_of(*one) for one in stem_checks.EXAMPLES])
    check_stems(60, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(t, marks=pytest.mark.slow) for t in (torch.float16, torch.float32)),
    ],
    ids=str,
)
def test_depthwise_of_special_values(gpu: EmulatedGpu, dtype: torch.dtype) -> None:
    passes(depthwise_checks.special_values, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", conv_sm90.DTYPES, ids=str)
def test_stem_of_special_values(gpu: EmulatedGpu, dtype: torch.dtype) -> None:
    passes(stem_checks.special_values, dtype)


@pytest.mark.slow
def test_refusals(gpu: EmulatedGpu) -> None:
    for check in (depthwise_checks.refusals, stem_checks.refusals):
        passes(check)


def weights(dtype: torch.dtype) -> list[Tensor]:
    """More than fit into one launch, in all layouts, some not aligned."""
    found = []
    for i in range(45):
        shape = ((5, 3, 3, 2), (16, 8, 1, 1), (9, 24, 3, 3), (4, 1, 5, 5))[i % 4]
        weight = torch.randn(shape).to(dtype)
        if i % 3 == 1:
            weight = weight.contiguous(memory_format=torch.channels_last)
        if i % 3 == 2:
            weight = torch.randn(weight.numel() + 1).to(dtype)[1:].view(shape)
        found.append(weight)
    return found


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(
    ("of_weight", "out"),
    [
        (torch.float32, torch.bfloat16),
        pytest.param(torch.float32, torch.float32, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_fold(gpu: EmulatedGpu, of_weight: torch.dtype, out: torch.dtype, missing: bool) -> None:
    given = weights(of_weight)
    masks = [0 if missing and i % 2 else 7 for i in range(len(given))]
    vectors = []
    for weight, mask in zip(given, masks):
        for i in range(5 if mask else 2):
            vector = (torch.rand(2, weight.shape[0]) + 0.2).to(
                (torch.float32, torch.bfloat16)[i == 1]
            )
            vectors.append(vector[0] if i % 2 else vector.t().contiguous()[:, 0])
    eps = [1e-5 * (i + 1) for i in range(len(given))]
    spec = folded.fold_spec(of_weight, out)
    gpu.handle_of(spec)
    places = folded.places_of(given, out)
    made = gpu.fold.default(given, vectors, masks, eps, places, spec.name, out, given[0])
    found = folded.parts_of(made, given, places)
    doubles = [weight.double() for weight in given]
    exact = folded.fold_in_torch(doubles, vectors, masks, eps, torch.float64)
    for one, right in zip(found, exact, strict=True):
        assert relative(one, right) < 4 * torch.finfo(out).eps
        assert one.dtype == out


def test_what_has_no_room_is_named(gpu: EmulatedGpu) -> None:
    """The stable ABI passes on only a status of torch's own error."""
    weight, ones = torch.randn(8, 4, 3, 3), torch.ones(8)
    spec = folded.fold_spec(torch.float32, torch.float32)
    gpu.handle_of(spec)
    layer = [weight], [ones, ones], [0], [1e-5], [0, 4096, 2**55]
    words = r"could not allocate \[36028797018963968\] of Float: API call failed"
    with pytest.raises(RuntimeError, match=words) as said:
        gpu.fold.default(*layer, spec.name, torch.float32, weight)
    assert not is_out_of_memory(said.value, torch.device("cuda"), 0)  # no GPU counted it
