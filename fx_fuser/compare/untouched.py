"""What a comparison leaves as it was: a model with all that it holds, random states, settings."""

from __future__ import annotations

import functools
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from fx_fuser.explain import set_mode
from fx_fuser.verify.accuracy import same_random_state

_CACHE_FOLDER = "FX_FUSER_CACHE_DIR"


def modules_of(model: Any) -> list[nn.Module]:
    """The module itself; for a function, the modules that it is bound to or names."""
    if isinstance(model, nn.Module):
        return [model]
    if isinstance(model, functools.partial):
        values = [model.func, *model.args, *model.keywords.values()]
        return [m for value in values for m in modules_of(value)]
    bound = getattr(model, "__self__", None)
    code = getattr(model, "__code__", None)
    if code is None:
        return [bound] if isinstance(bound, nn.Module) else []
    named = getattr(model, "__globals__", {})
    held = [bound, *(named.get(name) for name in code.co_names)]
    for cell in getattr(model, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return [value for value in held if isinstance(value, nn.Module)]


class _Attributes:
    """A module's attributes, and what the dicts, lists and sets among them hold."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.values = dict(vars(module))
        self.contents = {
            name: _items(value)
            for name, value in self.values.items()
            if isinstance(value, (dict, list, set))
        }

    def put_back(self) -> None:
        now = vars(self.module)
        for name in now.keys() - self.values.keys():
            del now[name]
        now.update(self.values)
        for name, before in self.contents.items():
            value, held = self.values[name], _items(self.values[name])
            if len(held) == len(before) and all(map(_is_same, held, before)):
                continue
            value.clear()
            value.extend(before) if isinstance(value, list) else value.update(before)


def _items(value: Any) -> list[Any]:
    return list(value.items()) if isinstance(value, dict) else list(value)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):  # an item of a dict, a new tuple
        return len(one) == len(other) and all(a is b for a, b in zip(one, other))
    return one is other


class _Value:
    """A tensor, and a copy of its values in host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, _version_of(tensor)
        self.before = tensor.detach().to("cpu", copy=True)

    @property
    def is_written(self) -> bool:
        return self.version is None or _version_of(self.tensor) != self.version

    def put_back(self) -> None:
        before = self.before.to(self.tensor.device)
        if not torch.equal(self.tensor, before):
            with torch.no_grad():
                self.tensor.copy_(before)
        self.version = _version_of(self.tensor)


def _version_of(tensor: Tensor) -> int | None:
    """Counts writes; None for a tensor that was made in inference mode."""
    return None if tensor.is_inference() else tensor._version


class Kept:
    """Modules' attributes, flags, gradients and the values of their parameters and buffers.

    Gradients are taken away until `close`. Values are kept in host memory, so that all of the GPU's
    is the model's, and written back only where they differ: a write would spoil a graph of the
    user's that still waits for its backward.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        every = {id(m): m for root in modules for m in root.modules()}.values()
        self.modules = list(every)
        self._original = list(map(_Attributes, every))
        self._attributes = {id(m): _Attributes(m) for m in every}
        parameters = {id(p): p for m in every for p in m._parameters.values() if p is not None}
        buffers = {id(b): b for m in every for b in m._buffers.values() if b is not None}
        self._flags = [(p, p.requires_grad) for p in parameters.values()]
        self._grads: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._parameters = [_Value(parameter) for parameter in parameters.values()]
        self._buffers = [_Value(buffer) for buffer in buffers.values()]
        for parameter in parameters.values():
            self.take_grad(parameter)
        for module in every:
            if module._compiled_call_impl is not None:  # `model.compile()`: its calls are compiled
                self.override(module, "_compiled_call_impl", None)

    def take_grad(self, leaf: Tensor) -> None:
        """Takes its gradient away, until `close`."""
        if id(leaf) not in self._grads:
            self._grads[id(leaf)] = leaf, leaf.grad
            leaf.grad = None

    def override(self, module: nn.Module, name: str, value: Any) -> None:
        """Sets an attribute, until `close`."""
        setattr(module, name, value)
        self._attributes[id(module)] = _Attributes(module)

    def set_mode(self, root: nn.Module, train: bool) -> None:
        """Sets the mode, until `close`; a module may do more there than set the flag."""
        set_mode(root, train)
        self._attributes = {id(m): _Attributes(m) for m in self.modules}

    def rewind(self) -> None:
        """Restores values and attributes, except what is overridden. Parameters are large, so only
        those whose version shows a write are looked at.
        """
        for attributes in self._attributes.values():
            attributes.put_back()
        for parameter in self._parameters:
            if parameter.is_written:
                parameter.put_back()
        for buffer in self._buffers:
            buffer.put_back()

    def close(self) -> None:
        """Restores everything."""
        for attributes in self._original:
            attributes.put_back()
        for value in (*self._parameters, *self._buffers):
            value.put_back()
        for parameter, flag in self._flags:
            parameter.requires_grad_(flag)
        for leaf, grad in self._grads.values():
            leaf.grad = grad


@contextmanager
def kept(modules: Sequence[nn.Module]) -> Iterator[Kept]:
    """Restores the modules, and the random states of torch, Python and numpy, also if it raises."""
    states = random.getstate(), np.random.get_state()
    held = Kept(modules)
    try:
        with same_random_state():
            yield held
    finally:
        held.close()
        random.setstate(states[0])
        np.random.set_state(states[1])


def random_state() -> list[Tensor]:
    """The CPU's and each GPU's; if it differs afterwards, numbers were drawn."""
    state = [torch.get_rng_state()]
    return state + (torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])


@contextmanager
def tf32_allowed() -> Iterator[None]:
    """TF32 in gemms and convolutions.

    Set through the older switches: after a write through `fp32_precision`, torch's own reads of
    the older ones raise. If the user has made that write, set through the newer one: there is no
    older setting to restore.
    """
    cudnn: Any = torch.backends.cudnn
    parts: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    newer = [(part, part.fp32_precision) for part in parts]
    older = _older_settings()
    if older is None:
        for part in parts:
            part.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision("high")
        cudnn.allow_tf32 = True
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            cudnn.allow_tf32 = older[1]
        for part, precision in newer:
            part.fp32_precision = precision


def _older_settings() -> tuple[str, bool] | None:
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:  # raised for a mix of both
        return None


@contextmanager
def cold_caches() -> Iterator[None]:
    """Empty caches for Inductor and fx_fuser, except what this process has loaded."""
    before = os.environ.get(_CACHE_FOLDER)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, fresh_cache():
        os.environ[_CACHE_FOLDER] = folder
        try:
            yield
        finally:
            os.environ.pop(_CACHE_FOLDER)
            if before is not None:
                os.environ[_CACHE_FOLDER] = before
