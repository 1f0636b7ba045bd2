"""One of KernelBench's problems: loaded, compared with float64 and timed, in every mode."""

from __future__ import annotations

import copy
import importlib.util
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks import harness, measure
from benchmarks.measure import Machine
from benchmarks.run import System

SEED = 42
TOLERANCE = 1e-4  # absolute and relative
EXACT_BYTES = 60 * 2**30  # that float64 may take
EXACT_SECONDS = 5.0
_SLOWDOWN = 50  # of float64 compared with TF32, a guess, to decide how many rows are compared
_CHUNK = 2**26  # elements compared at a time


class Result(measure.Sites, total=False):
    """What one mode did with one problem; missing keys were not reached."""

    gpu_ms: float  # median, L2 cleared, all of a call queued before the GPU starts it
    wall_ms: float  # median, L2 cleared, from an idle GPU until it is idle
    compile_s: float  # the first call
    peak_mib: float  # peak device memory of one call, weights and inputs included
    err_fro: float  # relative Frobenius error against float64, the largest over trials
    err_max: float  # the largest error over the largest magnitude, likewise
    matches: bool  # torch.allclose with eager's result, by KernelBench's tolerance
    error: str  # what was raised


class Row(Machine, total=False):
    level: int
    problem: int
    name: str
    linear: bool  # the module tree has an nn.Linear
    on_device: bool  # weights and inputs were drawn there: not KernelBench's numbers
    trials: int
    modes: dict[str, Result]
    notes: list[str]
    error: str  # what kept all modes from going on
    date: str
    commit: str


@dataclass(frozen=True)
class Problem:
    """A KernelBench file, say `level2/59_Matmul_Swish_Scaling.py`."""

    path: Path
    level: int
    number: int

    @property
    def name(self) -> str:
        return self.path.stem.partition("_")[2].strip("_")

    def load(self) -> ModuleType:
        """Run as its own module, so that Dynamo finds its source."""
        name = f"kernelbench_{self.level}_{self.number}"
        spec = importlib.util.spec_from_file_location(name, self.path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{self.path} is not a Python file")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def find(folder: Path, levels: Sequence[int]) -> list[Problem]:
    """By level and number. folder: KernelBench's checkout, or the folder of its level1, level2."""
    inner = folder / "KernelBench"
    found = []
    for level in levels:
        place = (inner if inner.is_dir() else folder) / f"level{level}"
        if not place.is_dir():
            raise FileNotFoundError(f"{folder} has no level{level}")
        numbered = ((re.match(r"\d+", path.name), path) for path in place.glob("*.py"))
        found += [Problem(path, level, int(match[0])) for match, path in numbered if match]
    return sorted(found, key=lambda problem: (problem.level, problem.number))


def trial_seeds(trials: int) -> list[int]:
    """Drawn as its `run_and_check_correctness` does."""
    torch.manual_seed(SEED)
    return [int(torch.randint(0, 2**32 - 1, (1,)).item()) for _ in range(trials)]


def placed(values: Any, device: torch.device) -> list[Any]:
    """Like its `_process_input_tensor`: every tensor becomes fp32, labels and masks too."""
    return [v.to(device, torch.float32) if isinstance(v, Tensor) else v for v in values]


def tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def size_of(values: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors(values))


# ---- comparing --------------------------------------------------------------------------------


def chunks(*flat: Tensor) -> Iterator[tuple[Tensor, ...]]:
    yield from zip(*(tensor.reshape(-1).split(_CHUNK) for tensor in flat))


def matches(found: list[Tensor], expected: list[Tensor]) -> bool:
    """`torch.allclose` with KernelBench's tolerance; in parts, since it takes much memory."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return False
    return all(
        torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        for one, other in zip(found, expected)
        for a, b in chunks(other, one)
    )


def errors(found: list[Tensor], exact: list[Tensor]) -> tuple[float, float]:
    """Relative Frobenius error, and the largest over the largest magnitude, of all together.

    NaN or infinite if `found` is and `exact` is not; elements that are NaN in both do not count.
    """
    square = whole = largest = top = 0.0
    for one, other in zip(found, exact):
        rows = one if one.shape == other.shape else one[: other.shape[0]]
        for a, b in chunks(rows, other):
            counts = torch.isfinite(b)
            size = torch.where(counts, b, 0.0)
            difference = torch.where(counts, a.double() - b, 0.0)
            square += float(difference.square().sum())
            whole += float(size.square().sum())
            largest = max(largest, float(difference.abs().max()))
            top = max(top, float(size.abs().max()))
    return math.sqrt(square / (whole or 1.0)), largest / (top or 1.0)


def in_float64(model: nn.Module, inputs: Sequence[Any]) -> list[Tensor]:
    wide = [v.double() if isinstance(v, Tensor) else v for v in inputs]
    torch.manual_seed(SEED)
    return tensors(copy.deepcopy(model).double()(*wide))


def fewer_rows(inputs: Sequence[Any], rows: int) -> Iterator[list[Any]]:
    """Ways to take some rows of a batch: of only the first input, then of all with its length."""
    first = tensors(inputs)[0]
    for others in (False, True):
        yield [
            v[:rows]
            if isinstance(v, Tensor)
            and v.ndim
            and (v is first or (others and v.shape[0] == first.shape[0]))
            else v
            for v in inputs
        ]


def some_rows(model: nn.Module, inputs: Sequence[Any], rows: int) -> list[Tensor] | None:
    """The first rows of the result in float64, if they do not depend on the rows behind them.

    To find out, half as many rows are computed by themselves: they must come out the same.
    """
    for whole, half in zip(fewer_rows(inputs, rows), fewer_rows(inputs, rows // 2)):
        try:
            found, again = in_float64(model, whole), in_float64(model, half)
        except RuntimeError:  # incompatible shapes
            continue
        shapes = all(
            a.ndim and b.ndim and a.shape[0] == rows and b.shape[0] == rows // 2
            for a, b in zip(found, again)
        )
        if shapes and errors(found, again)[0] < 1e-12:
            return found
    return None


def reference(
    model: nn.Module, inputs: Sequence[Any], working: int, seconds: float
) -> tuple[list[Tensor] | None, str]:
    """The result in float64, for some rows if all take too much; and a note, if there is one.

    working, seconds: bytes in addition to weights and inputs, and time, of the call in eager mode.
    """
    needed = 2 * (size_of(list(model.parameters())) + size_of(list(inputs)) + working)
    part = min(1.0, EXACT_BYTES / max(needed, 1), EXACT_SECONDS / max(_SLOWDOWN * seconds, 1e-9))
    try:
        if part == 1.0:
            return in_float64(model, inputs), ""
        rows = int(part * tensors(inputs)[0].shape[0]) // 2 * 2 if tensors(inputs) else 0
        found = some_rows(model, inputs, rows) if rows else None
        if found is None:
            return None, f"not compared with float64, which takes {needed / 2**30:.0f} GiB"
        return found, f"compared with float64 in {rows} rows"
    except Exception as error:
        return None, f"not compared with float64: {harness.summary(error)}"


# ---- measuring --------------------------------------------------------------------------------


class Bench:
    """A problem under way; `row` has what is known about it, whenever it ends."""

    def __init__(self, problem: Problem, device: torch.device, on_device: bool, trials: int):
        self.device, self.on_device, self.trials = device, on_device, trials
        self.problem = problem
        self.calls: dict[str, Callable[..., Any]] = {}
        self.row = Row(
            level=problem.level,
            problem=problem.number,
            name=problem.name,
            on_device=on_device,
            trials=trials,
            modes={},
            notes=[],
        )

    def draw(self, seed: int, what: Callable[[], Any]) -> Any:
        torch.manual_seed(seed)
        with torch.device(self.device if self.on_device else "cpu"):
            return what()

    def make(self) -> tuple[nn.Module, Callable[[], Any]]:
        module = self.problem.load()
        arguments = placed(self.draw(SEED, module.get_init_inputs), self.device)
        model = self.draw(SEED, lambda: module.Model(*arguments)).to(self.device, torch.float32)
        self.row["linear"] = any(isinstance(m, nn.Linear) for m in model.modules())
        return model, module.get_inputs

    def run(self, systems: Sequence[System], seconds: float) -> None:
        end = time.monotonic() + seconds
        model, get_inputs = self.make()
        inputs: list[Any] = []
        for seed in trial_seeds(self.trials):
            del inputs[:]
            inputs = placed(self.draw(seed, get_inputs), self.device)
            self.check(model, inputs, systems)
        ready = {
            name: partial(call, *inputs)
            for name, call in self.calls.items()
            if "error" not in self.row["modes"][name]
        }
        self.time(ready, end)

    def check(self, model: nn.Module, inputs: list[Any], systems: Sequence[System]) -> None:
        """Compares every mode's result with eager's and with float64's."""
        torch.manual_seed(SEED)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        expected = tensors(model(*inputs))
        working = torch.cuda.max_memory_allocated(self.device) - before if on_gpu else 0
        begin = time.perf_counter()
        if not matches(tensors(model(*inputs)), expected):
            self.note("draws random numbers: two calls differ")
        seconds = time.perf_counter() - begin
        exact, said = reference(model, inputs, working, seconds)
        self.note(said)
        for system in systems:
            result = self.row["modes"].setdefault(system.name, {})
            if "error" not in result:
                self.check_mode(result, system, model, inputs, expected, exact)

    def note(self, said: str) -> None:
        if said and said not in self.row["notes"]:
            self.row["notes"].append(said)

    def check_mode(
        self,
        result: Result,
        system: System,
        model: nn.Module,
        inputs: list[Any],
        expected: list[Tensor],
        exact: list[Tensor] | None,
    ) -> None:
        try:
            if system.name in self.calls:
                torch.manual_seed(SEED)
                found = tensors(self.calls[system.name](*inputs))
            else:
                with measure.counted(result):
                    begin = time.perf_counter()
                    call = system.compile(model)
                    torch.manual_seed(SEED)
                    found = tensors(call(*inputs))
                    if self.device.type == "cuda":
                        torch.cuda.synchronize(self.device)
                    result["compile_s"] = round(time.perf_counter() - begin, 2)
                self.calls[system.name] = call
            result["matches"] = matches(found, expected) and result.get("matches", True)
            if exact is not None:
                fro, most = errors(found, exact)
                if math.isfinite(fro):
                    result["err_fro"] = max(fro, result.get("err_fro", 0.0))
                    result["err_max"] = max(most, result.get("err_max", 0.0))
                else:
                    self.note(f"{system.name}'s result is not finite where float64's is")
        except Exception as error:
            result["error"] = harness.summary(error)

    def time(self, calls: Mapping[str, Callable[[], object]], end: float) -> None:
        """Both times in rounds that take all modes in turn, then each mode's memory by itself."""
        modes, ready = self.row["modes"], dict(calls)
        if self.device.type == "cuda":
            for name, step in calls.items():
                try:
                    modes[name]["peak_mib"] = measure.peak_mib(step, [], self.device)
                except Exception as error:
                    modes[name]["error"] = harness.summary(error)
                    del ready[name]
            for name, ms in measure.gpu_ms(ready, [], self.device).items():
                modes[name]["gpu_ms"] = round(ms, 5)
        budget = min(2.0, 0.5 * (end - time.monotonic()))
        for name, ms in measure.wall_medians(ready, [], self.device, budget).items():
            modes[name]["wall_ms"] = round(ms, 5)


def measure_problem(
    problem: Problem,
    systems: Sequence[System],
    device: torch.device,
    seconds: float,
    trials: int = 1,
    on_device: bool = False,
) -> Row:
    """One row, whatever happens. A mode that raises leaves its error there; the others go on.

    seconds: for all of it.
    """
    bench = Bench(problem, device, on_device, trials)
    try:
        with harness.limit(seconds), torch.no_grad(), measure.float32_settings("fp32"):
            bench.run(systems, seconds)
    except (Exception, harness.Overtime) as error:
        bench.row["error"] = harness.summary(error)
    finally:
        sys.modules.pop(f"kernelbench_{problem.level}_{problem.number}", None)
    return bench.row
