"""Runs checks that were written for a CUDA GPU on the emulated one.

A call's tensors are copied to guarded memory, between forbidden pages, and the results are copied
back. Each call is made with several schedules, whose results must be bit for bit the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import emulator
from benchmarks import kernels
from emulator import Settings
from fx_fuser.kernels import split
from fx_fuser.kernels.split import LINEAR_SPLIT_AUTO, LINEAR_SPLIT_MMA
from fx_fuser.native import launch, load
from fx_fuser.native.kernel_spec import KernelSpec

SCHEDULES = (
    Settings("forward", "late"),
    Settings("reverse", "at once", guard_ahead=True),
    Settings("random", "random", seed=7),
    Settings("reverse", "late"),
    Settings("random", "late", seed=8, guard_ahead=True),
)
AT_ONCE = 2  # schedules per call; each call takes the next ones


class EmulatedGpu:
    """Loads and launches kernels. `capability` is 80, 90, ..."""

    def __init__(self, capability: int, multiprocessors: int) -> None:
        self.capability = capability
        self.multiprocessors = multiprocessors
        self.calls = 0
        self._handles: dict[KernelSpec, int] = {}
        self._batch_stats: int | None = None
        emulator.load_shim()

    def handle_of(self, spec: KernelSpec, _tensor: Tensor | None = None) -> int:
        spec = emulated(spec)
        if spec not in self._handles:
            made = emulator.load(spec, self.capability, self.multiprocessors)
            self._handles[spec] = made
        return self._handles[spec]

    def prepare_batch_stats(self, _device: torch.device) -> int:
        if self._batch_stats is None:
            self._batch_stats = emulator.load_batch_stats(self.capability, self.multiprocessors)
        return self._batch_stats

    def prepare(self, specs: Sequence[KernelSpec], _device: object = None) -> None:
        emulator.build([(emulated(spec), self.capability) for spec in specs])

    def __getattr__(self, name: str) -> Any:
        """An op; callers use its `default`."""
        return _Op(self, getattr(emulator.ops, name).default)

    def schedules(self) -> list[Settings]:
        first = self.calls * AT_ONCE
        self.calls += 1
        return [SCHEDULES[(first + i) % len(SCHEDULES)] for i in range(AT_ONCE)]


def emulated(spec: KernelSpec) -> KernelSpec:
    """On all GPUs the split product is that of mma.sync: wgmma's has fp32 tensor maps, which are
    not emulated."""
    is_best = spec.family is LINEAR_SPLIT_AUTO
    return dataclasses.replace(spec, family=LINEAR_SPLIT_MMA) if is_best else spec


class _Op:
    def __init__(self, gpu: EmulatedGpu, op: Callable[..., Any]) -> None:
        self.gpu = gpu
        self.op = op

    def default(self, *arguments: Any) -> Any:
        wanted: list[Tensor] | None = None
        returned: Any = None
        given: dict[tuple[Any, ...], Tensor] = {}
        for settings in self.gpu.schedules():
            settings.use()
            with emulator.memory():
                copies: dict[tuple[Any, ...], Tensor] = {}
                guarded = [_guarded(one, given, copies) for one in arguments]
                returned = _taken_out(self.op(*guarded))
                found = [_span(copy).clone() for copy in copies.values()]
                found += _tensors_of(returned)
                del guarded, copies
            if wanted is not None:
                same = all(map(_same_bits, wanted, found))
                assert same, f"{settings} gives other bits than the previous schedule"
            wanted = found
        for tensor, values in zip(given.values(), wanted or ()):
            _span(tensor).copy_(values)
        return returned


def _span(tensor: Tensor) -> Tensor:
    """All memory from the first element to the last."""
    if tensor.numel() == 0:
        return tensor.flatten()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return tensor.as_strided((last + 1,), (1,))


def _guarded(value: Any, given: dict[Any, Tensor], copies: dict[Any, Tensor]) -> Any:
    """Copies each tensor once, so that arguments which share memory still do."""
    if isinstance(value, (list, tuple)) and any(isinstance(one, Tensor) for one in value):
        return [_guarded(one, given, copies) for one in value]
    if not isinstance(value, Tensor):
        return value
    key = value.data_ptr(), value.dtype, tuple(value.shape), value.stride()
    if key not in copies:
        given.setdefault(key, value)
        copies[key] = emulator.guarded(_span(value)).as_strided(value.shape, value.stride())
    return copies[key]


def _taken_out(returned: Any) -> Any:
    """Copies results out of guarded memory."""
    if isinstance(returned, Tensor):
        return returned.clone()
    if _tensors_of(returned):
        return [one.clone() for one in returned]
    return returned


def _tensors_of(returned: Any) -> list[Tensor]:
    if isinstance(returned, Tensor):
        return [returned]
    is_list = isinstance(returned, (list, tuple))
    return [one for one in returned if isinstance(one, Tensor)] if is_list else []


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(values.flatten().view(torch.uint8) for values in (a, b)))


def in_place_of_cuda(
    gpu: EmulatedGpu, patch: pytest.MonkeyPatch, modules: Sequence[ModuleType]
) -> None:
    """Makes these modules' kernels run on the emulated GPU from now on."""
    for name in ("handle_of", "prepare", "prepare_batch_stats"):
        patch.setattr(load, name, getattr(gpu, name))
    patch.setattr(kernels, "_ops", lambda: gpu)
    for module in (launch, split):
        patch.setattr(module, "_ops", gpu)
    for module in modules:
        for name in ("CUDA", "DEVICE"):
            if hasattr(module, name):
                patch.setattr(module, name, torch.device("cpu"))
