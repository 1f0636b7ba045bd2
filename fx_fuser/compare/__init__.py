"""compare(model, *inputs): eager, Inductor and fx_fuser on the user's own model, and a verdict."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from fx_fuser.arguments import (
    check_flag,
    check_model,
    fault_of_call,
    for_kwargs,
    hint_of_packed,
    named_inputs,
    near_names,
    refuses_unfit_calls,
    shown,
)
from fx_fuser.compare.comparison import Comparison
from fx_fuser.compare.race import Race, free_memory
from fx_fuser.compare.step import Step
from fx_fuser.compare.untouched import kept, modules_of
from fx_fuser.compare.values import judge_values, names_of
from fx_fuser.compare.variants import NAMES, variants_of
from fx_fuser.errors import OptionError
from fx_fuser.explain import parsed_options
from fx_fuser.installation import suspended
from fx_fuser.kernels.base import SIXTEEN_BITS
from fx_fuser.report.header import header_of, mode_of
from fx_fuser.verify.accuracy import Copier

_USAGE = "compare(model, *inputs)"
_OWN = (
    "train", "options", "loss", "columns", "reduce_overhead", "reference", "cold", "seconds",
    "progress", "kwargs",
)  # fmt: skip


@refuses_unfit_calls(OptionError, f"call it as {_USAGE}")
def compare(
    model: Callable[..., Any],
    *inputs: Any,
    train: bool | None = None,
    options: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    columns: Sequence[str] | None = None,
    reduce_overhead: bool = False,
    reference: bool = True,
    cold: bool | None = None,
    seconds: float = 10.0,
    progress: bool = True,
    kwargs: Mapping[str, Any] | None = None,
    **named: Any,
) -> Comparison:
    """Is fx_fuser worth it for this model?

    Measures `model(*inputs, **named)` in eager mode, with Inductor (`torch.compile(model)`), with
    fx_fuser and, if it computes in fp32, with Inductor and TF32. They take turns in this process.
    On a CPU, where none of fx_fuser's kernels run, only eager mode and Inductor are measured by
    default.

    train: True measures training steps (training mode, forward and backward), False forward passes
        in eval mode under `no_grad`. By default modes stay as they are, and backward is measured
        if the model is in training mode and gradients are on. A step has no optimizer.
    options: as for the backend. Options of Inductor also apply to the Inductor row.
    loss: a function of the model's result that returns one number, from which backward starts,
        say `lambda y: F.cross_entropy(y, labels)`. By default backward starts from all
        floating-point outputs that require gradients, with normally distributed random
        gradients, the same for each row.
    columns: a list of "eager", "inductor", "fx_fuser", "inductor_tf32",
        "inductor_reduce_overhead", "fx_fuser_reduce_overhead".
    reduce_overhead: also measure Inductor and fx_fuser with `mode="reduce-overhead"`, which helps
        if the GPU waits for the host.
    reference: compare outputs and gradients with float64, on a copy of the model.
    cold: time first calls with empty, temporary caches on disk instead of the existing ones. By
        default True on a GPU.
    seconds: how long to measure wall time; compilation is extra.
    progress: print progress on stderr.
    kwargs: named inputs of the model that have the name of an argument here.

    Afterwards the model is as it was, even if this raises: parameters, buffers, gradients, modes
    and attributes. So are the random states of torch, Python and numpy, torch's settings, and
    what is installed. Inputs are copied. Dynamo is reset before and after, so anything that was
    compiled is compiled again at its next call.

    A row that runs out of memory or fails says so, and the others are still measured. Returns a
    `Comparison`: `str()` is a table, and `.verdict`, `.use` and `.launch_bound` are the
    conclusion. Raises OptionError for a bad argument, and any error of the model in eager mode.
    """
    model = getattr(model, "_orig_mod", model)  # already compiled: measure what was
    given = named_inputs(model, kwargs, named)
    _check(model, inputs, given, train, loss, seconds)
    flags = {"reduce_overhead": reduce_overhead, "reference": reference}
    flags |= {"progress": progress} | ({} if cold is None else {"cold": cold})
    for name, value in flags.items():
        check_flag(name, value, for_kwargs(model, name))
    chosen = parsed_options(model, options)
    modules = modules_of(model)
    tensors = _tensors(modules, (inputs, given))
    device = _device(tensors)
    names = _columns(columns, reduce_overhead, chosen.mode, tensors, device)
    say = _progress() if progress else lambda what: None
    with suspended(), kept(modules) as held, _own_compilations(len(names)):
        if train is not None:
            for module in modules:
                held.set_mode(module, train)
        grad = torch.is_grad_enabled() if train is None else train
        wanted = grad and (train is True or not modules or modules[0].training)
        args, of_model = tree_map(Copier(), (tuple(inputs), dict(given)))
        step = Step(args, of_model, grad, wanted, loss)
        race = Race(model, step, held, device, variants_of(names, chosen, options), say)
        with torch.set_grad_enabled(grad):
            header = replace(header_of(tensors, mode_of(model), chosen), note="")
        try:
            _first_step(race, wanted)
        except (TypeError, ValueError, AttributeError) as error:
            if hint := hint_of_packed(model, inputs, given, _USAGE):
                raise OptionError(f"{hint} ({type(error).__name__}: {error})") from error
            raise
        with ExitStack() as caches:
            race.compile_all(device.type == "cuda" if cold is None else cold, caches)
            race.measure(seconds, _is_narrow(tensors))
            if reference:
                judge_values(race)
        race.calls.clear()
        found = Comparison(
            model=getattr(model, "__name__", type(model).__name__),
            step="training step" if step.backward else "forward",
            inputs=_described(args, of_model),
            device=device.type,
            header=header,
            columns=race.columns,
            notes=race.notes,
        )
    return found


# ---- arguments ----------------------------------------------------------------------------------


def _check(
    model: Any, inputs: Sequence[Any], given: Mapping[str, Any], train: Any, loss: Any, seconds: Any
) -> None:
    if isinstance(model, ExportedProgram):
        raise OptionError(f"the model is {shown(model)}; give program.module()")
    check_model(model, _USAGE)
    if train is not None:
        check_flag("train", train, for_kwargs(model, "train"))
    if loss is not None and not callable(loss):
        raise OptionError(
            f"loss is {shown(loss)}; give a function of the model's result"
            f"{for_kwargs(model, 'loss')}"
        )
    if loss is not None and (fault := fault_of_call(loss, [None], {})):
        raise OptionError(
            f"loss does not take the model's result alone: {fault}; give one that does, say "
            "loss=lambda result: F.cross_entropy(result, labels)"
        )
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds < float("inf"):
        raise OptionError(
            f"seconds is {shown(seconds)}; give a number above 0{for_kwargs(model, 'seconds')}"
        )
    if fault := fault_of_call(model, inputs, given):
        own = "".join(for_kwargs(model, name) for name in _OWN) + near_names(model, given, _OWN)
        raise OptionError(f"the model does not take these inputs: {fault}; use {_USAGE}{own}")


def _tensors(modules: Sequence[nn.Module], inputs: Any) -> list[Tensor]:
    tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
    for module in modules:
        tensors += [*module.parameters(), *module.buffers()]
    if any(is_lazy(t) for t in tensors):
        raise OptionError("the model has parameters without a size; call it once first")
    return tensors


def _device(tensors: Sequence[Tensor]) -> torch.device:
    """The device that is measured."""
    found = {t.device for t in tensors}
    kinds = {device.type for device in found}
    gpus = sorted(str(device) for device in found if device.type == "cuda")
    if others := sorted(kinds - {"cpu", "cuda"}):
        raise OptionError(f"there are tensors on {others[0]}; compare measures on CUDA or a CPU")
    if len(gpus) > 1:
        raise OptionError(f"there are tensors on {' and '.join(gpus)}; compare measures one GPU")
    return torch.device(gpus[0] if gpus else "cpu")


def _columns(
    columns: Any, reduce_overhead: bool, mode: str | None, tensors: Sequence[Tensor],
    device: torch.device,
) -> list[str]:  # fmt: skip
    on_gpu = device.type == "cuda"
    if columns is None:
        names = ["eager", "inductor", *(["fx_fuser"] if on_gpu else [])]
        is_fp32 = any(t.dtype == torch.float32 for t in tensors) and not _is_narrow(tensors)
        if on_gpu and is_fp32 and torch.backends.cuda.matmul.fp32_precision != "tf32":
            names.append("inductor_tf32")
    else:
        if isinstance(columns, str) or not isinstance(columns, Sequence) or not columns:
            raise OptionError(f"columns is {shown(columns)}; give a list of {', '.join(NAMES)}")
        if unknown := [name for name in columns if name not in NAMES]:
            raise OptionError(f"columns has {shown(unknown[0])}; give some of {', '.join(NAMES)}")
        names = list(columns)
    if reduce_overhead:
        if mode not in (None, "default"):
            raise OptionError(
                f"option 'mode' is {mode!r} and reduce_overhead is True; leave one out"
            )
        names += ["inductor_reduce_overhead", "fx_fuser_reduce_overhead"]
    return names


def _is_narrow(tensors: Sequence[Tensor]) -> bool:
    """Does the model compute in 16 bits?"""
    kinds = {t.device.type for t in tensors}
    casts = any(torch.amp.is_autocast_available(k) and torch.is_autocast_enabled(k) for k in kinds)
    return casts or any(t.dtype in SIXTEEN_BITS for t in tensors)


# ---- around the steps ---------------------------------------------------------------------------


def _first_step(race: Race, wanted: bool) -> None:
    """In eager mode, whatever the columns are. It tells what receives a gradient, and makes the
    libraries load their kernels, which must not count for any column."""
    step, known = race.step, names_of(race.model, (race.step.args, race.step.kwargs))
    race.say("a first step in eager mode")
    try:
        step.first(race.model, known, race.held)
    except Exception as error:
        if not race.ran_out(error):
            raise
        if "eager" in race.columns:
            race.fail("eager", error)
        step.leaves = _known_leaves(race.model, (step.args, step.kwargs), known) if wanted else {}
        step.backward = bool(step.leaves)
    if wanted and not step.backward:
        race.notes.append("No output requires a gradient: a step is a forward pass.")
    free_memory()


def _known_leaves(model: Any, inputs: Any, known: Mapping[int, str]) -> dict[str, Tensor]:
    tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
    tensors += [p for module in modules_of(model) for p in module.parameters()]
    return {known.get(id(t), f"leaf {i}"): t for i, t in enumerate(tensors) if t.requires_grad}


@contextmanager
def _own_compilations(columns: int) -> Iterator[None]:
    """Compile everything anew, drop it afterwards, and leave room for all columns at once. Counters
    are restored."""
    limits = {
        name: getattr(torch._dynamo.config, name) * columns
        for name in ("recompile_limit", "accumulated_recompile_limit")
    }
    before = {name: Counter(counts) for name, counts in counters.items()}
    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch(**limits):
            yield
    finally:
        torch._dynamo.reset()
        counters.clear()
        counters.update(before)
        free_memory()


def _progress() -> Callable[[str], None]:
    start = time.perf_counter()

    def say(what: str) -> None:
        print(f"fx_fuser.compare {time.perf_counter() - start:6.1f} s  {what}", file=sys.stderr)

    return say


def _described(args: Any, kwargs: Mapping[str, Any]) -> list[str]:
    """Sizes and dtype of each tensor, after its name if it has one."""
    parts = [("", args), *((f"{name} ", value) for name, value in kwargs.items())]
    return [
        f"{name}{list(tensor.shape)} {str(tensor.dtype)[6:]}"
        for name, value in parts
        for tensor in tree_leaves(value)
        if isinstance(tensor, Tensor)
    ]
