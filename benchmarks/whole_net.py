"""One net in one phase and precision: compared with float64, timed and profiled, in every mode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import gpu_kinds, harness, measure
from benchmarks.big_nets import Batch, BigNet
from benchmarks.measure import Machine
from benchmarks.run import System
from fx_fuser.compare.step import Float64
from fx_fuser.verify.accuracy import Copier, Observed, compare, errors_of

PRECISIONS = {"highest": "fp32", "high": "tf32"}  # of `set_float32_matmul_precision`


class Result(measure.Sites, total=False):
    """What one mode did; missing keys were not reached or not asked for."""

    wall_ms: float  # median, from an idle GPU until it is idle
    gpu_ms: float  # median of the GPU's busy time
    kinds: dict[str, float]
    first_s: float  # the first step of the measuring process, caches as they were
    cold_s: float  # the first step in a process of its own, with empty caches
    warm_s: float  # the same once more, with what the first left in them
    peak_mib: float
    err: float  # relative Frobenius error of the logits against float64
    worst_grad: float  # the largest of all parameters' gradients, likewise
    worst_name: str
    median_grad: float
    accurate: bool  # by fx_fuser.verify.accuracy
    as_inductor: bool  # where they are not accurate: are they by Inductor's errors?
    faults: list[str]  # what is not accurate, the first few
    error: str  # what was raised


class Row(Machine, total=False):
    net: str
    phase: str
    precision: str
    batch: str
    modes: dict[str, Result]
    error: str
    date: str
    commit: str


@dataclass
class Case:
    """autocast: forward runs in bf16 autocast."""

    net: BigNet
    phase: str
    model: nn.Module
    batch: Batch
    autocast: bool = False

    @classmethod
    def make(
        cls, net: BigNet, phase: str, device: torch.device, small: bool, dropout: bool
    ) -> Case:
        model = net.model(device, small, dropout).train(phase == "train")
        return cls(net, phase, model, net.batch(phase, device, small))

    def leaves(self) -> list[Tensor]:
        return list(self.model.parameters()) if self.phase == "train" else []

    def step(self, call: Callable[..., Any]) -> dict[str, Tensor]:
        """What is timed: forward, and in training loss and backward. Returns the outputs."""
        device = next(iter(self.batch.values())).device.type
        with (
            torch.set_grad_enabled(self.phase == "train"),
            torch.autocast(device, torch.bfloat16, enabled=self.autocast),
        ):
            outputs, loss = self.net.forward(call, self.batch)
        if loss is not None:
            loss.backward()
        return {name: tensor.detach() for name, tensor in outputs.items()}

    def observe(self, call: Callable[..., Any]) -> Observed:
        """All values of one step, which leaves no gradients and restores the running statistics."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        for leaf in self.leaves():
            leaf.grad = None
        copied = Copier()
        seen = Observed({name: copied(tensor) for name, tensor in self.step(call).items()})
        if self.phase == "train":
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    seen.grads[name], parameter.grad = parameter.grad, None
        for name, buffer in self.model.named_buffers():
            # In training also what a step did not change: statistics may have settled.
            may_settle = self.phase == "train" and buffer.is_floating_point()
            if may_settle or not torch.equal(buffer, before[name]):
                seen.state[name] = buffer.clone()
                buffer.copy_(before[name])
        return seen

    def exact(self) -> Observed:
        """All values in float64, from the same weights and inputs."""
        batch = {k: v.double() if v.is_floating_point() else v for k, v in self.batch.items()}
        twin = Case(self.net, self.phase, self.net.in_float64(self.model), batch)
        with Float64():
            return twin.observe(twin.model)


def judge(
    result: Result, found: Observed, exact: Observed, eager: Observed, inductor: Observed | None
) -> None:
    """inductor: its values. fx_fuser's net has Inductor's operations except for the fused ones."""

    def named(seen: Observed) -> dict[str, Tensor]:
        return {"output": seen.outputs["logits"]} | {f"grad {n}": g for n, g in seen.grads.items()}

    reference = named(exact)
    errors = measure.errors(named(found), reference, measure.scales(reference))
    result["err"] = errors.pop("output")
    if errors:
        result["worst_name"] = max(errors, key=lambda name: errors[name])
        result["worst_grad"] = errors[result["worst_name"]]
        result["median_grad"] = statistics.median(errors.values())
    faults = compare(found, eager, exact)
    result["accurate"] = not faults
    if faults:
        result["faults"] = [f"{len(faults)} in all", *faults[:5]]
        if inductor is not None:
            peers = [errors_of(inductor, exact)]
            result["as_inductor"] = not compare(found, eager, exact, peers=peers)


class Bench:
    """A case under way; `row` has what is known about it."""

    def __init__(
        self, net: BigNet, phase: str, precision: str, device: torch.device, small: bool
    ) -> None:
        self.net, self.phase, self.device, self.small = net, phase, device, small
        self.calls: dict[str, Callable[..., Any]] = {}
        self.row = Row(
            net=net.name,
            phase=phase,
            precision=precision,
            batch=net.describe(phase, small),
            modes={},
        )

    def start(self, case: Case, system: System) -> Callable[..., Any] | None:
        """Compile, and time the first step; None if that raised."""
        result = self.row["modes"][system.name]
        try:
            with measure.counted(result):
                begin = time.perf_counter()
                call = system.compile(case.model)
                case.step(call)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                result["first_s"] = round(time.perf_counter() - begin, 4)
            self.calls[system.name] = call
            return call
        except Exception as error:
            result["error"] = harness.summary(error)
            return None

    def run(self, systems: Sequence[System], values: bool, seconds: float) -> None:
        for system in systems:
            self.row["modes"][system.name] = {}
        if values:
            case = Case.make(self.net, self.phase, self.device, self.small, dropout=False)
            self.check(case, systems)
        if not values or (self.net.has_dropout and self.phase == "train"):
            self.calls.clear()
            measure.free_memory()
            case = Case.make(self.net, self.phase, self.device, self.small, dropout=True)
            for system in systems:
                self.start(case, system)
        self.time(case, seconds)

    def check(self, case: Case, systems: Sequence[System]) -> None:
        """Values and gradients without dropout, which no two systems draw alike."""
        exact, eager = case.exact(), case.observe(case.model)
        inductor: Observed | None = None
        for system in systems:
            call = self.start(case, system)
            if call is None:
                continue
            result = self.row["modes"][system.name]
            try:
                seen = eager if system.name == "eager" else case.observe(call)
                judge(result, seen, exact, eager, inductor)
                if system.name == "inductor":
                    inductor = seen
            except Exception as error:
                result["error"] = harness.summary(error)

    def time(self, case: Case, seconds: float) -> None:
        """seconds: for the rounds of wall time."""
        leaves, modes = case.leaves(), self.row["modes"]
        steps: dict[str, Callable[[], object]] = {
            name: partial(case.step, call)
            for name, call in self.calls.items()
            if "error" not in modes[name]
        }
        for name, ms in measure.wall_medians(steps, leaves, self.device, seconds).items():
            modes[name]["wall_ms"] = round(ms, 4)
        if self.device.type == "cuda":
            for name, step in steps.items():
                modes[name]["peak_mib"] = measure.peak_mib(step, leaves, self.device)
            for name, kinds in gpu_kinds.medians(steps, leaves, self.device).items():
                modes[name]["gpu_ms"] = round(kinds.pop("all"), 4)
                modes[name]["kinds"] = {kind: round(ms, 4) for kind, ms in kinds.items()}


def measure_case(
    net: BigNet,
    phase: str,
    precision: str,
    systems: Sequence[System],
    device: torch.device,
    small: bool = False,
    values: bool = True,
    seconds: float = 4.0,
) -> Row:
    """One row. A mode that raises leaves its error there; the others continue.

    values: whether to compare with float64. seconds: for the rounds of wall time.
    """
    bench = Bench(net, phase, precision, device, small)
    with measure.float32_settings(PRECISIONS[precision]):
        bench.run(systems, values, seconds)
    return bench.row


def first_step(
    net: BigNet, phase: str, precision: str, system: System, device: torch.device, small: bool
) -> float:
    """Seconds from `torch.compile` to the end of the first step, in a process that did nothing
    else: cold or warm, as its caches are.
    """
    bench = Bench(net, phase, precision, device, small)
    result = bench.row["modes"][system.name] = {}
    with measure.float32_settings(PRECISIONS[precision]):
        bench.start(Case.make(net, phase, device, small, dropout=True), system)
    if "error" in result:
        raise RuntimeError(result["error"])
    return result["first_s"]
