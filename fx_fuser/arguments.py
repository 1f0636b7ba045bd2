"""Checks of public functions' arguments: an error names the one that does not fit, up front."""

from __future__ import annotations

import difflib
import functools
import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from torch import nn
from torch._guards import TracingContext
from torch.fx import GraphModule

from fx_fuser.errors import FxFuserError, OptionError

P = ParamSpec("P")
R = TypeVar("R")

_PLAIN = (str, bytes, bool, int, float, complex, list, tuple, set, frozenset, dict, type(None))


def shown(value: Any) -> str:
    """The value and its type in one line; for a tensor or a module, only the type."""
    kind = type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None:
        return "None"
    article = "an" if kind[0].lower() in "aeiou" else "a"
    if not isinstance(value, _PLAIN):
        return f"{article} {kind}"
    return f"{_text(value)}, {article} {kind}"


def refuses_unfit_calls(
    error: type[FxFuserError], remedy: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a public function: arguments that do not fit its signature raise `error`.

    remedy: how to call it instead.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if _is_call_of_dynamo(args):
                raise error(
                    f"fx_fuser.{function.__name__} is not a backend; use "
                    'torch.compile(model, backend="fx_fuser"), or call fx_fuser.install() once '
                    "and then torch.compile(model)"
                )
            try:
                signature.bind(*args, **kwargs)
            except TypeError as unfit:
                given = [*map(_brief, args), *(f"{n}={_brief(v)}" for n, v in kwargs.items())]
                called = f"{function.__name__}({', '.join(given)})"
                raise error(f"{called}: {unfit}; {remedy}") from None
            return function(*args, **kwargs)

        return checked

    return decorate


def _is_call_of_dynamo(args: Sequence[Any]) -> bool:
    """Is it called as Dynamo calls a backend, with a graph and its inputs?"""
    is_graph = len(args) == 2 and isinstance(args[0], GraphModule)
    return is_graph and TracingContext.try_get() is not None


def _brief(value: Any) -> str:
    return _text(value) if isinstance(value, _PLAIN) else f"<{shown(value)}>"


def _text(value: Any) -> str:
    return " ".join(reprlib.repr(value).split())


def check_flag(name: str, value: Any, remedy: str = "") -> None:
    """Raises OptionError unless it is True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {shown(value)}; give True or False{remedy}")


def check_mapping(name: str, value: Any, remedy: str) -> None:
    """Raises OptionError unless it is a mapping."""
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} is {shown(value)}; {remedy}")


def check_model(model: Any, usage: str) -> None:
    """Raises OptionError if this cannot be called with tensors."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise OptionError(f"the model is {shown(model)}; give an instance: {model.__name__}(…)")
    if not callable(model):
        raise OptionError(
            f"the model is {shown(model)}; give an nn.Module or a function first: {usage}"
        )


def fault_of_call(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why its signature rejects these arguments; empty if it accepts them, or if only the call can
    tell: a decorator may take other names than the function that it decorates."""
    signature = _signature(model, through_decorators=False)
    if signature is None:
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as unfit:
        return f"{unfit}; it takes ({', '.join(map(str, signature.parameters.values()))})"
    return ""


def hint_of_packed(model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any], usage: str) -> str:
    """What may be wrong if the model failed on one tuple or list; else empty.

    model: None for one whose signature says nothing.
    """
    if len(inputs) != 1 or not isinstance(inputs[0], (tuple, list)):
        return ""
    if model is not None and fault_of_call(model, inputs[0], kwargs):
        return ""
    return (
        f"the model fails on its only input, a {type(inputs[0]).__name__}; if that holds its "
        f"inputs, give them one by one: {usage}"
    )


def names_of(model: Any) -> frozenset[str]:
    """The names of the arguments that it takes, as far as its signature says."""
    signature = _signature(model, through_decorators=True)
    parameters = signature.parameters.values() if signature else ()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in named)


def near_names(model: Any, named: Mapping[str, Any], own: Sequence[str]) -> str:
    """A hint for names that the model lacks and that nearly match one of our arguments."""
    unknown = sorted(named.keys() - names_of(model))
    near = {name: difflib.get_close_matches(name, own, n=1) for name in unknown}
    said = [f"is {name!r} meant to be {found[0]!r}?" for name, found in near.items() if found]
    return "".join(f"; {hint}" for hint in said)


def named_inputs(model: Any, kwargs: Any, named: dict[str, Any]) -> dict[str, Any]:
    """A model's named inputs; `kwargs` has those whose names are also arguments of ours."""
    if kwargs is None:
        return named
    check_mapping(
        "kwargs", kwargs, f"give a dict of the model's named inputs{for_kwargs(model, 'kwargs')}"
    )
    if twice := sorted(named.keys() & kwargs.keys()):
        raise OptionError(f"{twice[0]!r} is given both by name and in kwargs; leave one out")
    return {**kwargs, **named}


def for_kwargs(model: Any, name: str) -> str:
    """What to do if the model has an input of this name; empty if it has none."""
    if name not in names_of(model):
        return ""
    return f" (the model's own input `{name}` goes into kwargs={{{name!r}: …}})"


def _signature(model: Any, through_decorators: bool) -> inspect.Signature | None:
    """None for a built-in function, and if a hook may change the arguments."""
    called = model
    if isinstance(model, nn.Module):
        if model._forward_pre_hooks or type(model).__call__ is not nn.Module.__call__:
            return None
        called = model.forward
    try:
        return inspect.signature(called, follow_wrapped=through_decorators)
    except (TypeError, ValueError):
        return None
