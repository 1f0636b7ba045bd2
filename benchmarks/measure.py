"""How a problem is run, checked against float64 and timed, for the demo and the benchmark."""

from __future__ import annotations

import copy
import gc
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor, nn

from benchmarks.problems import Problem, Size
from fx_fuser.compare import turns
from fx_fuser.compare.counting import Sites, counted
from fx_fuser.compare.turns import interleaved_rounds
from fx_fuser.planning import timing

__all__ = ["Sites", "counted", "interleaved_rounds"]  # re-exported for others

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
MODES = ("eval-fwd", "train-fwd", "fwd+bwd")

Call = Callable[[Tensor], Tensor]


@contextmanager
def float32_settings(precision: str, cudnn_tf32: bool = True) -> Iterator[None]:
    """torch's defaults (TF32 in cuDNN, not in gemms), or TF32 in both for "tf32".

    Set through the older switches: after a write through `fp32_precision`, torch's own reads of
    the older ones raise, while these keep both in step.
    """
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = cudnn_tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn


@dataclass
class Case:
    """A problem in one precision and mode: every system gets this model, input and gradient.

    eval-fwd and train-fwd run without gradients; in fwd+bwd the model trains, and x and all
    parameters require gradients.
    """

    model: nn.Module
    x: Tensor
    grad: Tensor | None  # of the output; None in the forward modes

    @classmethod
    def make(
        cls, problem: Problem, size: Size, precision: str, mode: str, device: torch.device
    ) -> Case:
        model, x = problem.make(size, device)
        model, x = model.to(DTYPES[precision]).train(mode != "eval-fwd"), x.to(DTYPES[precision])
        case = cls(model, x, None)
        if mode == "fwd+bwd":
            case.grad = torch.randn_like(case.values(model)["output"])
            x.requires_grad_()
        return case

    def in_float64(self) -> Case:
        """The same numbers, rounded to this case's dtype, in float64."""
        model = copy.deepcopy(self.model).double()
        x = self.x.detach().double().requires_grad_(self.x.requires_grad)
        return Case(model, x, None if self.grad is None else self.grad.double())

    def leaves(self) -> list[Tensor]:
        """The tensors that receive a gradient."""
        return [] if self.grad is None else [self.x, *self.model.parameters()]

    def step(self, call: Call) -> Tensor:
        """What is timed: the forward pass, and the backward pass in fwd+bwd."""
        if self.grad is None:
            with torch.no_grad():
                return call(self.x)
        output = call(self.x)
        output.backward(self.grad)
        return output.detach()

    def values(self, call: Call) -> dict[str, Tensor]:
        """All values that one step leaves; the model is restored afterwards."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        for leaf in self.leaves():
            leaf.grad = None
        values = {"output": self.step(call)}
        if self.grad is not None:
            for name, leaf in [("x", self.x), *self.model.named_parameters()]:
                assert leaf.grad is not None, f"{name} received no gradient"
                values[f"grad {name}"], leaf.grad = leaf.grad, None
        for name, buffer in self.model.named_buffers():
            if self.model.training:
                values[name] = buffer.clone()
            buffer.copy_(before[name])
        return values


def scales(reference: Mapping[str, Tensor]) -> dict[str, float]:
    """What errors are relative to: the Frobenius norms of the float64 values, by name.

    A gradient that exact arithmetic makes zero (that of a convolution's bias ahead of a training
    BatchNorm) has no relative error; its scale is the largest parameter gradient.
    """
    norms = {name: float(tensor.double().norm()) for name, tensor in reference.items()}
    gradients = [name for name in norms if name.startswith("grad ") and name != "grad x"]
    largest = max((norms[name] for name in gradients), default=0.0)
    vanishing = {name: largest for name in gradients if norms[name] < 1e-9 * largest}
    return norms | vanishing


def errors(
    values: Mapping[str, Tensor], against: Mapping[str, Tensor], scale: Mapping[str, float]
) -> dict[str, float]:
    """Relative Frobenius errors by name; absolute if the scale is zero."""
    found = {}
    for name, expected in against.items():
        difference = float((values[name].double() - expected.double()).norm())
        found[name] = difference / (scale[name] or 1.0)
        if not math.isfinite(found[name]):
            raise ArithmeticError(f"{name} is not finite")
    return found


def bounds(
    precision: str, device: torch.device, errors_of: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """The largest error that passes, by tensor, from the errors of "eager" (README, Accuracy).

    On a CPU from the larger of the errors of "eager" and "inductor": there Inductor computes fused
    sites as plain torch operations, and its sums are less exact than eager's (those of BatchNorm's
    gradients in #73 by a factor of 3).
    """
    factor = 2.0 if precision in ("bf16", "fp16") else 1.5
    peers = [errors_of["eager"]]
    if device.type == "cpu" and "inductor" in errors_of:
        peers.append(errors_of["inductor"])
    return {name: max(factor * max(p[name] for p in peers), 4e-7) for name in errors_of["eager"]}


def median_ms(
    step: Callable[[], object], leaves: list[Tensor], device: torch.device, warmup: int, rep: int
) -> float:
    """The median time of a step in ms; on a GPU with the L2 cache cleared before each.

    `warmup` and `rep` are in ms. The leaves' gradients are dropped before each step, so that no
    step pays for adding to the last one's.
    """
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(
            do_bench(step, warmup=warmup, rep=rep, grad_to_none=leaves, return_mode="median")
        )
    samples: list[float] = []
    end = time.perf_counter() + (warmup + rep) / 1e3
    while time.perf_counter() < end or len(samples) < 5:
        for leaf in leaves:
            leaf.grad = None
        start = time.perf_counter()
        step()
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples[len(samples) * warmup // (warmup + rep) :])


def interleaved(timers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Medians of `interleaved_rounds`."""
    samples = interleaved_rounds(timers, rounds)
    return {name: statistics.median(times) for name, times in samples.items()}


def ratio_text(others: list[float], ours: list[float]) -> str:
    """ "1.25×" of medians, or "same" if rounds do not agree on which of the two is faster."""
    ratios = [other / own for other, own in zip(others, ours)]
    if len(ratios) > 1 and min(ratios) <= 1 <= max(ratios):
        return "same"
    return f"{statistics.median(others) / statistics.median(ours):.2f}×"


def gpu_ms(
    steps: Mapping[str, Callable[[], object]], leaves: list[Tensor], device: torch.device
) -> dict[str, float]:
    """The GPU's part of each step in ms: all of a step is queued before the GPU starts it.

    Host time differs by 20 % between runs of the same code, and decides what `median_ms` finds for
    short steps.
    """

    def fresh(step: Callable[[], object]) -> object:
        for leaf in leaves:
            leaf.grad = None
        return step()

    ways = [timing.Candidate(partial(fresh, step)) for step in steps.values()]
    if not ways:
        return {}
    return {name: took.gpu for name, took in zip(steps, timing.times_of(ways, device))}


def wall_ms(step: Callable[[], object], leaves: list[Tensor], device: torch.device) -> float:
    """Wall time of one step, from an idle GPU with a cleared L2 cache until it is idle again."""
    for leaf in leaves:
        leaf.grad = None
    return turns.wall_ms(step, device)


def wall_medians(
    steps: Mapping[str, Callable[[], object]],
    leaves: list[Tensor],
    device: torch.device,
    budget_s: float,
    least: int = 3,
) -> dict[str, float]:
    """Medians of `wall_rounds`."""
    samples = wall_rounds(steps, leaves, device, budget_s, least)
    return {name: statistics.median(times) for name, times in samples.items()}


def wall_rounds(
    steps: Mapping[str, Callable[[], object]],
    leaves: list[Tensor],
    device: torch.device,
    budget_s: float,
    least: int = 3,
) -> dict[str, list[float]]:
    """`wall_ms` in interleaved rounds: as many as fit, from `least` to 100."""
    timers = {name: partial(wall_ms, step, leaves, device) for name, step in steps.items()}
    if not timers:
        return {}
    one_round = sum(timer() for timer in timers.values())
    rounds = max(least, min(100, int(1e3 * budget_s / one_round)))
    return interleaved_rounds(timers, rounds)


class Machine(TypedDict, total=False):
    gpu: str
    driver: str | None
    torch: str


def machine(device: torch.device) -> Machine:
    """What the figures were measured on."""
    if device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
        gpu = torch.cuda.get_device_name(device)
        return Machine(gpu=gpu, driver=driver, torch=torch.__version__)
    return Machine(gpu=f"CPU {platform.machine()}", driver=None, torch=torch.__version__)


def free_memory() -> None:
    """Free what the last case held: #59 in float64 needs most of a GPU."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_mib(step: Callable[[], object], leaves: list[Tensor], device: torch.device) -> float:
    """Peak device memory of one step, in MiB, including what was allocated before."""
    for leaf in leaves:
        leaf.grad = None
    return turns.peak_mib(step, device)
