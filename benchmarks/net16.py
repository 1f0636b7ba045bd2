"""One net in one step in 16 bits: Inductor and fx_fuser in turns in this process, and their values
against float64. A row of `benchmarks.nets16`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from benchmarks import conv_nets, coverage, gpu_kinds, harness, lowered, measure
from benchmarks.nets16_models import Net16, without_dropout
from benchmarks.run import SYSTEMS, System
from benchmarks.turnstile import Turnstile
from benchmarks.whole_net import Case
from fx_fuser.compare.untouched import cold_caches
from fx_fuser.native import load
from fx_fuser.verify.accuracy import Observed, compare, errors_of

ROUNDS = 7  # of GPU time
RIVALS = tuple(s for s in SYSTEMS if s.name in ("inductor", "fx_fuser"))


def again(system: System) -> System:
    """The same, compiled again: Dynamo finds compiled code by its backend."""

    def backend(gm: Any, inputs: Any) -> Any:
        return torch._dynamo.lookup_backend("inductor")(gm, inputs)

    return replace(
        system, name="again", compile=lambda model: torch.compile(model, backend=backend)
    )


class Row(TypedDict):
    """Medians. None: not measured, as GPU time and memory are not on a CPU.

    spread: half the range of the ratio of GPU times over the rounds, over the ratio's median; on a
    CPU of wall times. error, eager_error: relative Frobenius errors against float64, fx_fuser's
    and eager's, of all outputs as one vector or of all gradients, whichever is the larger; error is
    a text if something raised, or a value is not within the contract. sites: what became of
    them, by counter. same_graphs: did Inductor lower the same graphs for both? again: Inductor once
    more, if a second compilation was asked for: how the two differ is its own scatter.
    """

    net: str
    step: str
    precision: str
    config: str
    inductor_ms: float | None
    fx_fuser_ms: float | None
    spread: float | None
    inductor_wall_ms: float | None
    fx_fuser_wall_ms: float | None
    inductor_compile_s: float | None
    fx_fuser_compile_s: float | None
    inductor_peak_mib: float | None
    fx_fuser_peak_mib: float | None
    error: float | str | None
    eager_error: float | None
    sites: dict[str, Any]
    same_graphs: bool | None
    again_ms: float | None
    again_wall_ms: float | None
    gpu: str
    torch: str
    date: str
    commit: str


# ---- a case -------------------------------------------------------------------------------------


def case_of(net: Net16, step: str, device: torch.device, small: bool) -> Case:
    model = net.model(device, small, dropout=True)
    batch = net.batch(step, device, small)
    train = step == "train" and not small  # what BatchNorms do: see coverage.set_mode
    if not train and any(isinstance(m, nn.BatchNorm2d) for m in model.modules()):
        conv_nets.settle(model, batch["x"][:32])
    dtype = torch.bfloat16 if net.precisions[step] == "bf16" else torch.float32
    batch = {n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.items()}
    model = model.to(dtype)
    if net.channels_last:
        form = torch.channels_last
        model = model.to(memory_format=form)
        batch["x"] = batch["x"].to(memory_format=form)
    if small:
        coverage.set_mode(model, step == "train")
    else:
        model.train(step == "train")
    return Case(net, step, model, batch, autocast=net.precisions[step] == "amp")


# ---- times --------------------------------------------------------------------------------------


def warm_up(device: torch.device) -> None:
    """Do what only a process's first compilation does, and build the shim, which a wheel brings."""
    conv_nets.warm_up(device)
    if device.type == "cuda":
        load.load_shim()


def first_call(case: Case, system: System) -> tuple[Callable[..., Any], float]:
    """The compiled net, and seconds until its first step is done."""
    device = next(iter(case.batch.values())).device
    _wait(device)
    begin = time.perf_counter()
    call = system.compile(case.model)
    case.step(call)
    _wait(device)
    return call, round(time.perf_counter() - begin, 2)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Half the range of the ratio over the rounds, over its median."""
    ratios = [a / b for a, b in zip(theirs, ours)]
    return round((max(ratios) - min(ratios)) / 2 / statistics.median(ratios), 4)


def time_steps(
    row: Row, steps: Mapping[str, Callable[[], object]], leaves: list[Tensor],
    device: torch.device, seconds: float,
) -> None:  # fmt: skip
    """Fills in times, their spread and memory. seconds: for the rounds of wall time."""
    rounds = measure.wall_rounds(steps, leaves, device, seconds)
    _fill(row, "wall_ms", {name: statistics.median(ms) for name, ms in rounds.items()})
    if device.type == "cuda":
        peaks = {name: measure.peak_mib(step, leaves, device) for name, step in steps.items()}
        _fill(row, "peak_mib", peaks)
        timers = {
            name: lambda step=step: sum(gpu_kinds.profiled(step, leaves, device).values())
            for name, step in steps.items()
        }
        rounds = measure.interleaved_rounds(timers, ROUNDS)
        _fill(row, "ms", {name: statistics.median(ms) for name, ms in rounds.items()})
    row["spread"] = spread(rounds["inductor"], rounds["fx_fuser"])


def _fill(row: Row, what: str, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        row[f"{name}_{what}"] = round(value, 4)  # type: ignore[literal-required]


# ---- values -------------------------------------------------------------------------------------


def exact_of(case: Case) -> tuple[Case, Observed]:
    """What it computes in float64; if memory runs out, for half the items or fewer."""
    while True:
        try:
            return case, case.exact()
        except torch.OutOfMemoryError:
            items = len(next(iter(case.batch.values())))
            if items == 1:
                raise
            batch = {name: tensor[: items // 2] for name, tensor in case.batch.items()}
        case = replace(case, batch=batch)
        torch.cuda.empty_cache()


def distance(found: Observed, exact: Observed) -> float:
    """The relative Frobenius error of all outputs as one vector or of all gradients, the larger."""

    def of_part(mine: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
        wrong = sum(float((mine[n].double() - t).square().sum()) for n, t in truth.items())
        whole = sum(float(t.square().sum()) for t in truth.values())
        return (wrong / (whole or 1.0)) ** 0.5

    parts = ((found.outputs, exact.outputs), (found.grads, exact.grads))
    largest = max(of_part(mine, truth) for mine, truth in parts)
    if not math.isfinite(largest):
        raise ArithmeticError("a value is not finite")
    return largest


def judge(
    row: Row, case: Case, calls: Mapping[str, Callable[..., Any]], rivals: Mapping[str, System]
) -> list[str]:
    """Fills in the errors; returns what is beyond the contract, strides of outputs included.

    calls: what was compiled and timed. It is compiled again for the case without dropout, or with
    fewer items.
    """
    drawn = case.phase == "train" and without_dropout(case.model) > 0
    whole = case
    case, exact = exact_of(case)
    if fewer := case is not whole:
        row["config"] += f"; errors of {len(next(iter(case.batch.values())))} items"
    if drawn or fewer:
        torch._dynamo.reset()

    def observed(name: str) -> Observed:
        again = rivals[name].compile(case.model) if drawn or fewer else calls[name]
        return case.observe(again)

    eager, found = case.observe(case.model), observed("fx_fuser")
    row["error"], row["eager_error"] = distance(found, exact), distance(eager, exact)
    faults = compare(found, eager, exact)
    if faults:
        # Most of fx_fuser's graph is Inductor's: its errors are as good a bound as eager's, and
        # where it returns other strides than eager, so may fx_fuser.
        inductors = observed("inductor")
        for name in as_inductors(found, eager, inductors):
            row["config"] += f"; strides of output {name} as Inductor's"
        faults = compare(found, eager, exact, peers=[errors_of(inductors, exact)])
    return faults


def as_inductors(found: Observed, eager: Observed, inductors: Observed) -> list[str]:
    """The outputs that have Inductor's strides and not eager's; they get eager's here."""
    named = []
    for name, value in found.outputs.items():
        theirs = eager.outputs[name]
        if theirs.stride() != value.stride() == inductors.outputs[name].stride():
            found.outputs[name] = torch.empty_like(theirs).copy_(value)
            inductors.outputs[name] = torch.empty_like(theirs).copy_(inductors.outputs[name])
            named.append(name)
    return named


# ---- a row --------------------------------------------------------------------------------------


def measured(
    net: Net16, step: str, device: torch.device, small: bool = False,
    rivals: Sequence[System] = RIVALS, seconds: float = 3.0,
    place: Turnstile | None = None, twice: bool = False, dropout: bool = True,
) -> Row:  # fmt: skip
    """One row, without its date and commit. What raises is in its `error`.

    place: of processes that compile at the same time, so compile times are left out. twice: is
    Inductor compiled once more? dropout: as the net has it; otherwise none, and a net with dropout
    needs no further compilation for its values.
    """
    here = measure.machine(device)
    row = Row(
        net=net.name, step=step, precision=net.precisions[step], config=net.config(step, small),
        inductor_ms=None, fx_fuser_ms=None, spread=None,
        inductor_wall_ms=None, fx_fuser_wall_ms=None,
        inductor_compile_s=None, fx_fuser_compile_s=None,
        inductor_peak_mib=None, fx_fuser_peak_mib=None,
        error=None, eager_error=None, sites={}, same_graphs=None,
        again_ms=None, again_wall_ms=None,
        gpu=here["gpu"], torch=here["torch"], date="", commit="",
    )  # fmt: skip
    measure.free_memory()
    try:
        with ExitStack() as caches:
            if place is not None:
                caches.enter_context(place.clocks())
            case = case_of(net, step, device, small)
            if not dropout and without_dropout(case.model):
                row["config"] += "; no dropout"
            faults = _measure(row, case, rivals, seconds, caches, place, twice)
        if faults:
            row["error"] = f"{len(faults)} beyond the contract: {'; '.join(faults[:3])}"
    except Exception as error:
        row["error"] = harness.summary(error)
    return row


def _measure(
    row: Row, case: Case, rivals: Sequence[System], seconds: float, caches: ExitStack,
    place: Turnstile | None, twice: bool,
) -> list[str]:  # fmt: skip
    device = next(iter(case.batch.values())).device
    alone = nullcontext if place is None else place.alone
    with alone():  # the libraries load their kernels, which must not count for any system
        case.step(case.model)
        _wait(device)
    calls: dict[str, Callable[..., Any]] = {}
    sites: measure.Sites = {}
    graphs: dict[str, list[str]] = {system.name: [] for system in rivals}
    for system in rivals:
        caches.enter_context(cold_caches())
        watched = measure.counted(sites if system.is_ours else {})
        with watched, lowered.seen(graphs[system.name]):
            calls[system.name], taken = first_call(case, system)
        if place is None:
            _fill(row, "compile_s", {system.name: taken})
    row["sites"] = {name: found for name, found in sites.items() if found}
    row["same_graphs"] = graphs.get("inductor", []) == graphs.get("fx_fuser") != []
    if twice:
        caches.enter_context(cold_caches())
        calls["again"], _ = first_call(case, again(rivals[0]))
    steps = {name: partial(case.step, call) for name, call in calls.items()}
    with alone():
        time_steps(row, steps, case.leaves(), device, seconds)
        steps.clear()
        # In float64 a step takes the GPU seconds, and others would be timed beside it.
        faults = judge(row, case, calls, {system.name: system for system in rivals})
    return [*faults, *sites.get("warnings", [])]
