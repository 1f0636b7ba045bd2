"""explain(model, *inputs): what fx_fuser would fuse in this model, and why it would not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from fx_fuser.backend import fuse, registered_patterns
from fx_fuser.errors import OptionError
from fx_fuser.graph.subclasses import is_user_class
from fx_fuser.options import Options
from fx_fuser.report.report import Report


def explain(
    model: Callable[..., Any] | ExportedProgram,
    *inputs: Any,
    train: bool | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Report:
    """Trace `model(*inputs, **kwargs)` and report every site that is fused, or nearly.

    The model runs once, unfused, on copies of the inputs. Its buffers, its modes and the random
    state are restored afterwards.

    train: True traces it in training mode with gradients, False in eval mode without; by default
    modes are as they are. options: as for the backend ("patterns" and "verify" matter here).
    model: a `torch.export.ExportedProgram` too, in the mode in which it was exported.

    Returns a `Report`: `.fused` and `.refused` list `SiteReport`s, `str()` is a table.
    """
    if isinstance(model, ExportedProgram):
        model = model.module()
    model = getattr(model, "_orig_mod", model)  # already compiled: look at what was
    chosen = Options.parse(None, options, [p.name for p in registered_patterns()])
    report = Report()

    def look(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        fuse(gm, chosen, report, example_inputs)
        return gm.forward

    grad = torch.is_grad_enabled() if train is None else train
    with _unchanged(model, train), torch.set_grad_enabled(grad):
        args, named = tree_map_only(torch.Tensor, _copy, (inputs, kwargs))
        torch.compile(model, backend=look)(*args, **named)
    return report


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    if is_user_class(tensor) and type(copied) is not type(tensor):  # the class makes plain tensors
        copied = copied.as_subclass(type(tensor))
        vars(copied).update(vars(tensor))
    return copied.requires_grad_(tensor.requires_grad)


def _set_mode(model: torch.nn.Module, train: bool) -> None:
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
                _set_mode(model, train)
            yield
        finally:
            if train is not None:
                for module, mode in zip(modules, modes):
                    module.training = mode
            with torch.no_grad():
                for buffer, value in zip(buffers, saved):
                    buffer.copy_(value)
