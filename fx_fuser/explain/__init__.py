"""explain(model, *inputs): what fx_fuser would fuse in this model, and why it would not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from fx_fuser.arguments import (
    check_flag,
    check_model,
    fault_of_call,
    for_kwargs,
    hint_of_packed,
    named_inputs,
    near_names,
    refuses_unfit_calls,
)
from fx_fuser.backend import fuse
from fx_fuser.errors import OptionError
from fx_fuser.graph.read.subclasses import is_user_class
from fx_fuser.options import Options
from fx_fuser.registry import registered_patterns
from fx_fuser.report.header import header_of, mode_of
from fx_fuser.report.report import Report

_USAGE = "explain(model, *inputs)"
# What a model raises if it cannot use its inputs.
_OF_INPUTS = (TypeError, ValueError, AttributeError, TorchDynamoException)


@refuses_unfit_calls(OptionError, f"call it as {_USAGE}")
def explain(
    model: Callable[..., Any] | ExportedProgram,
    *inputs: Any,
    train: bool | None = None,
    options: Mapping[str, Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **named: Any,
) -> Report:
    """Trace `model(*inputs, **named)` and report which sites are fused, and why the rest is not.

    The model runs once, unfused, on copies of the inputs. Its buffers, its modes and the random
    state are restored afterwards.

    model: may be a `torch.export.ExportedProgram`, in the mode in which it was exported.
    train: True traces it in training mode with gradients, False in eval mode without; by default
    modes stay as they are. options: as for the backend; on a CPU, {"cpu_ops": True} reports every
    site that could be fused.
    kwargs: named inputs of the model that are called `train`, `options`, `kwargs` or `model`.

    Returns a `Report`: `.fused` and `.refused` list `SiteReport`s, `str()` is a table. Raises
    OptionError for a bad argument.
    """
    program = model if isinstance(model, ExportedProgram) else None
    model = model.module() if isinstance(model, ExportedProgram) else model
    model = getattr(model, "_orig_mod", model)  # already compiled: look at what was
    check_model(model, _USAGE)
    given = named_inputs(model, kwargs, named)
    if train is not None:
        check_flag("train", train, for_kwargs(model, "train"))
    chosen = parsed_options(model, options)
    if fault := fault_of_call(model, inputs, given):
        names = ("train", "options", "kwargs")
        own = "".join(for_kwargs(model, name) for name in names) + near_names(model, given, names)
        raise OptionError(f"the model does not take these inputs: {fault}; use {_USAGE}{own}")
    report = Report()
    seen = [t for t in tree_leaves((inputs, given)) if isinstance(t, torch.Tensor)]
    if isinstance(model, torch.nn.Module):
        seen += model.parameters()

    def look(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        fuse(gm, chosen, report, example_inputs)
        seen.extend(t for t in example_inputs if isinstance(t, torch.Tensor))
        return gm.forward

    grad = torch.is_grad_enabled() if train is None else train
    with _unchanged(model, train), torch.set_grad_enabled(grad):
        args, of_model = tree_map_only(torch.Tensor, _copy, (inputs, given))
        try:
            torch.compile(model, backend=look)(*args, **of_model)
        except _OF_INPUTS as error:
            if hint := _hint(model, program, inputs, given):
                raise OptionError(f"{hint} ({type(error).__name__}: {error})") from error
            raise
        mode = mode_of(model) if program is None else "as exported"
        report.header = header_of(seen, mode, chosen)
    return report


def parsed_options(model: Any, options: Any) -> Options:
    """Checked; the error says where the model's own input of that name goes."""
    try:
        return Options.parse(None, options, [p.name for p in registered_patterns()])
    except OptionError as error:
        raise OptionError(f"{error}{for_kwargs(model, 'options')}") from None


def _hint(
    model: Any, program: ExportedProgram | None, inputs: Sequence[Any], given: Mapping[str, Any]
) -> str:
    """What may be wrong with the inputs that the model failed on; empty if that is unknown."""
    if hint := hint_of_packed(None if program else model, inputs, given, _USAGE):
        return hint
    spec = program.call_spec.in_spec if program else None
    if spec is not None and tree_flatten((tuple(inputs), dict(given)))[1] != spec:
        return f"the program was exported with other inputs; use {_USAGE}"
    return ""


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    if is_user_class(tensor) and type(copied) is not type(tensor):  # clone made a plain tensor
        copied = copied.as_subclass(type(tensor))
        vars(copied).update(vars(tensor))
    return copied.requires_grad_(tensor.requires_grad)


def set_mode(model: torch.nn.Module, train: bool) -> None:
    """Raises OptionError for an exported program, which has no modes."""
    try:
        model.train(train)
    except NotImplementedError as error:
        raise OptionError(
            f"train={train}: an exported program stays in the mode in which it was exported; "
            "leave `train` out, or export the model in that mode"
        ) from error


@contextmanager
def _unchanged(model: Any, train: bool | None) -> Iterator[None]:
    """Sets the mode; restores it, and the buffers and random state that a forward pass changes."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    modes = [m.training for m in modules]
    buffers = list(model.buffers()) if modules else []
    saved = [b.detach().clone() for b in buffers]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            if modules and train is not None:
                set_mode(model, train)
            yield
        finally:
            if train is not None:
                for module, mode in zip(modules, modes):
                    module.training = mode
            with torch.no_grad():
                for buffer, value in zip(buffers, saved):
                    buffer.copy_(value)
