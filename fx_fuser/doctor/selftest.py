"""Each main loop against float64, in seconds; and on a GPU, if asked, timed against the library."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from fx_fuser.doctor.cases import Case
from fx_fuser.doctor.findings import FAIL, NOTE, OK
from fx_fuser.explain import explain
from fx_fuser.options import SWITCH
from fx_fuser.passes import padding, products
from fx_fuser.planning import timing
from fx_fuser.testing import assert_equivalent, observe
from fx_fuser.verify.accuracy import Observed, compare, errors_of

FORCED: Mapping[str, Any] = {"plan": "always", "strict": True}
# Without a GPU the ops are plain torch, and need no C++ compiler.
ON_CPU: Mapping[str, Any] = {"cpu_ops": True, "inner": "aot_eager"}
_LARGE = 8  # scale of the models that are timed
_PARTS = {"output": "", "gradient": "backward "}


@dataclass(frozen=True)
class Result:
    """A case on a device. ran: what `explain` calls the kernel. errors: the largest of outputs and
    of gradients, relative to float64's norm, and eager's of the same tensor."""

    title: str
    loop: str
    device: str
    level: str
    ran: str = ""
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    detail: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = ", ".join(
            f"{_PARTS[part]}{own:.1e} ({eagers:.1e})" for part, (own, eagers) in self.errors.items()
        )
        said = "; ".join(filter(None, (parts, self.detail)))
        title = f"{self.title}{f' ({self.ran})' if self.ran else ''}"
        return f"{self.level:5} {self.device}: {title}: {said}"


@dataclass(frozen=True)
class Times:
    """Medians of GPU time in ms, measured in turns, of the case at a larger size. left: why there
    are none."""

    title: str
    loop: str
    device: str
    input: str
    ran: str = ""
    eager: float | None = None
    inductor: float | None = None
    fx_fuser: float | None = None
    left: str = ""

    def __str__(self) -> str:
        title = f"{self.device}: {self.title} {self.input}{f' ({self.ran})' if self.ran else ''}"
        if self.left or self.inductor is None or self.fx_fuser is None:
            return f"{NOTE:5} {title}: not timed, {self.left}"
        times = f"Inductor {self.inductor:.3f} ms, fx_fuser {self.fx_fuser:.3f} ms"
        return f"{OK:5} {title}: eager {self.eager:.3f} ms, {times}"


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Run as if fx_fuser were neither off nor installed, and without Inductor's caches, whose
    graphs no pass sees again. Restores the random state."""
    with (
        warnings.catch_warnings(),
        mock.patch.dict(os.environ),
        inductor_config.patch(force_disable_caches=True),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
    ):
        warnings.simplefilter("ignore")
        os.environ.pop(SWITCH, None)
        try:
            yield
        finally:
            torch._dynamo.reset()


# ---- right ---------------------------------------------------------------------------------------


def run(case: Case, device: torch.device) -> Result:
    """Raises nothing: a failure is the result."""
    started = time.perf_counter()
    made = functools.partial(Result, case.title, case.loop, str(device))
    try:
        with undisturbed(device):
            level, said = _run(case, device)
    except Exception as error:
        level, said = FAIL, {"detail": _first_line(error)}
    return made(level, seconds=round(time.perf_counter() - started, 1), **said)


def _run(case: Case, device: torch.device) -> tuple[str, dict[str, Any]]:
    model, x = made_on(case, device, 1)
    options = options_for(case, device)
    eager = observe(model, (x,), case.train)
    exact = observe(model, (x,), case.train, dtype=torch.float64, like=eager)
    torch._dynamo.reset()
    before = _fused_by(case)
    found = observe(model, (x,), case.train, _compiler_with(options), like=eager)
    said: dict[str, Any] = {"errors": errors_by_part(found, eager, exact)}
    if compare(found, eager, exact):
        try:  # its neighbours show if eager's error is small by luck
            assert_equivalent(model, (x,), case.train, options)
        except AssertionError as error:
            return FAIL, {**said, "detail": f"beyond the bound: {_first_line(error)}"}
    if _fused_by(case) == before:
        if case.is_chosen:
            return NOTE, {**said, "detail": "not faster at this size, so the library's ran"}
        return FAIL, {**said, "detail": f"not fused: {why_not(case, model, x, options)}"}
    ran = "" if case.is_chosen or device.type == "cpu" else kernel_of(case, model, x, options)
    if ran and ran.split()[0] != case.loop:
        return NOTE, {**said, "ran": ran, "detail": f"{case.loop} does not accept it here"}
    return OK, {**said, "ran": ran}


def options_for(case: Case, device: torch.device) -> dict[str, Any]:
    return {**FORCED, **(ON_CPU if device.type == "cpu" else {}), **(case.options or {})}


def made_on(case: Case, device: torch.device, scale: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = case.make(scale)
    return model.to(device).train(case.train), x.to(device).requires_grad_(case.train)


def _compiler_with(options: Mapping[str, Any]) -> Callable[[Any], Callable[..., Any]]:
    def compiled(model: Any) -> Callable[..., Any]:
        made: Callable[..., Any] = torch.compile(model, backend="fx_fuser", options=dict(options))
        return made

    return compiled


def _fused_by(case: Case) -> int:
    names = (products.COUNTERS, padding.COUNTERS) if case.is_chosen else ("fx_fuser",)
    return sum(sum(counters[name].values()) for name in names)


def kernel_of(case: Case, model: nn.Module, x: Tensor, options: Mapping[str, Any]) -> str:
    torch._dynamo.reset()
    sites = explain(model, x, train=case.train, options=options).fused
    return sites[0].kernel if sites else ""


def why_not(case: Case, model: nn.Module, x: Tensor, options: Mapping[str, Any]) -> str:
    torch._dynamo.reset()
    report = explain(model, x, train=case.train, options=options)
    reasons = [site.reason for site in report.refused] + [site.reason for site in report.left]
    return next(filter(None, reasons), "no reason is known")


def errors_by_part(
    found: Observed, eager: Observed, exact: Observed
) -> dict[str, tuple[float, float]]:
    """output, gradient → the largest relative error, and eager's of the same tensor."""
    own, eagers, truth = errors_of(found, exact), errors_of(eager, exact), exact.everything()
    largest: dict[str, tuple[float, float]] = {}
    for name, error in own.items():
        size = float(torch.linalg.vector_norm(truth[name].double()))
        part = name.split()[0]
        if size and part in _PARTS and name in eagers:
            pair = error.whole / size, eagers[name].whole / size
            largest[part] = max(largest.get(part, (0.0, 0.0)), pair)
    return largest


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


# ---- fast ----------------------------------------------------------------------------------------


def timed(case: Case, device: torch.device) -> Times:
    """On a CUDA device. Raises nothing: a failure is why nothing was timed."""
    made = functools.partial(Times, case.title, case.loop, str(device))
    shown = ""
    try:
        with undisturbed(device), torch.cuda.device(device):
            model, x = made_on(case, device, _LARGE)
            shown = "×".join(map(str, x.shape))
            return made(shown, **_times(case, model, x))
    except Exception as error:
        return made(shown, left=_first_line(error))
    finally:
        torch.cuda.empty_cache()


def _times(case: Case, model: nn.Module, x: Tensor) -> dict[str, Any]:
    options = options_for(case, x.device)
    calls: list[Callable[..., Any]] = [model, torch.compile(model), _compiler_with(options)(model)]
    with torch.set_grad_enabled(case.train):
        gradient = torch.randn_like(model(x)) if case.train else None
        before = _fused_by(case)
        steps = [functools.partial(step, call, model, x, gradient) for call in calls]
        found = timing.times_of([timing.Candidate(one) for one in steps], x.device)
        fused = _fused_by(case) > before
    if not fused:
        return {"left": "nothing was fused" if not case.is_chosen else "the library is as fast"}
    ran = case.loop if case.is_chosen else kernel_of(case, model, x, options)
    eager, inductor, ours = (took.gpu for took in found)
    return {"ran": ran, "eager": eager, "inductor": inductor, "fx_fuser": ours}


def step(call: Callable[..., Any], model: nn.Module, x: Tensor, gradient: Tensor | None) -> None:
    """What is timed: forward, and backward if there is a gradient to begin with."""
    for leaf in (x, *model.parameters()):
        leaf.grad = None
    output = call(x)
    if gradient is not None:
        output.backward(gradient)
