"""What the tests of verification share: faults made on purpose, and what was verified."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fx_fuser.ops import apply, calls, library
from fx_fuser.verify import rivals

train_eval = pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
FIRST, ALWAYS = {"verify": "first_call"}, {"verify": "always"}


def _pattern_names(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], str]:
    """(anchor, epilogue's text) → pattern, of all sites that are fused from now on."""
    known: dict[tuple[str, str], str] = {}
    right = calls.graph_call

    def graph_call(match: Any, *args: Any) -> Any:
        known[match.site.kind, match.bound.epilogue.text] = match.pattern.name
        return right(match, *args)

    monkeypatch.setattr(calls, "graph_call", graph_call)
    return known


def _break_values(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The fused ops at sites of these patterns are off by one part in ten thousand."""
    right, known = apply.finish, _pattern_names(monkeypatch)

    def finish(epilogue: Any, anchor: Any, *args: Any) -> None:
        right(epilogue, anchor, *args)
        if known[anchor.kind, epilogue.text] in names:
            args[-1].mul_(1.0001)

    monkeypatch.setattr(apply, "finish", finish)


def _break_gradients(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    right, known = library._pull_back, _pattern_names(monkeypatch)

    def pull_back(call: Any, *args: Any) -> Any:
        grads = right(call, *args)
        wrong = known[call.anchor.kind, call.epilogue.text] in names
        return [g * 1.0001 for g in grads] if wrong else grads

    monkeypatch.setattr(library, "_pull_back", pull_back)


BREAKS = {"values": _break_values, "gradients": _break_gradients}


@contextmanager
def _told() -> Iterator[list[str]]:
    """What fx_fuser warns of."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(w.message) for w in caught if "fx_fuser" in str(w.message)]


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pattern of each site that is looked at, each time."""
    seen: list[str] = []
    right = rivals.fault_of

    def fault_of(match: Any, *args: Any) -> str:
        seen.append(match.pattern.name)
        return right(match, *args)

    monkeypatch.setattr(rivals, "fault_of", fault_of)
    return seen


def _step(model: nn.Module, run: Callable[..., Tensor], x: Tensor, train: bool) -> dict[str, Any]:
    """One call, in training with backward: all that it leaves behind."""
    torch.manual_seed(1)
    model.train(train)
    with torch.set_grad_enabled(train):
        value = run(x)
        if train:
            value.square().sum().backward()
    seen: dict[str, Any] = {"value": value.detach(), "random state": torch.get_rng_state()}
    seen |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    return seen | dict(model.named_buffers())


def _same(found: dict[str, Any], expected: dict[str, Any], **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], **tolerance, msg=name)
