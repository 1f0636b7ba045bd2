"""Every column's outputs and gradients against float64, and fx_fuser's against their bound."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fx_fuser.compare.race import Race, free_memory, summary
from fx_fuser.compare.step import Float64, Step
from fx_fuser.compare.untouched import Kept, random_state
from fx_fuser.verify.accuracy import (
    NEIGHBOURS,
    PROMISED,
    Copier,
    Observed,
    has_roundings,
    neighbour_of,
    remaining_faults,
    same_random_state,
)


def names_of(model: Any, inputs: Any) -> dict[int, str]:
    """The tensors that a caller knows by a name: parameters and inputs."""
    given = (t for t in tree_leaves(inputs) if isinstance(t, Tensor))
    named = {id(tensor): f"input {i}" for i, tensor in enumerate(given)}
    if isinstance(model, nn.Module):
        named |= {id(parameter): name for name, parameter in model.named_parameters()}
    return named


def judge_values(race: Race) -> None:
    """Fills in the errors and faults. If something prevents that, a note says so."""
    try:
        _judge(race)
    except Exception as error:
        if race.ran_out(error):
            race.notes.append("Values were not compared with float64: not enough memory.")
        else:
            race.notes.append(f"Values were not compared with float64: {summary(error)}")
    finally:
        free_memory()


def _judge(race: Race) -> None:
    if "eager" not in race.calls:
        race.notes.append("Values were not compared: eager mode, which bounds them, did not run.")
        return
    race.say("values, against float64")
    calls = dict(race.calls)
    if _draws(race.step, race.model, race.held):
        without_dropout(race.held)
        if _draws(race.step, race.model, race.held):
            race.notes.append(
                "Values were not compared: the model draws random numbers, which no two columns "
                "draw alike."
            )
            return
        race.notes.append("Values were compared without dropout.")
        race.say("values: compiling again without dropout")
        torch._dynamo.reset()  # what is compiled drops
        calls = {name: race.variants[name].compile(race.model) for name in race.calls}
    exact = exact_of(race.model, race.step, race.held)
    for name, call in calls.items():
        column = race.columns[name]
        try:
            with race.variants[name].settings():
                found = _seen(race, call, exact)
        except Exception as error:
            race.notes.append(f"Values of {column.title} were not compared: {summary(error)}")
            continue
        column.output_error = relative_error(found.outputs, exact.outputs)
        column.grad_error = relative_error(found.grads, exact.grads)
        del found
    if "fx_fuser" in calls:
        race.columns["fx_fuser"].faults = _faults(race, calls, exact)


def _seen(race: Race, call: Callable[..., Any], exact: Observed) -> Observed:
    """Those of its values that the float64 run has; the model is restored before and after."""
    race.held.rewind()
    seen = race.step.observe(call, race.model)
    race.held.rewind()
    seen.grads = {name: grad for name, grad in seen.grads.items() if name in exact.grads}
    return seen


def _draws(step: Step, model: Any, held: Kept) -> bool:
    """Does a step take random numbers?"""
    with same_random_state():
        before = random_state()
        step.fresh(model)
        drawn = any(not torch.equal(a, b) for a, b in zip(before, random_state()))
    held.rewind()
    return drawn


def without_dropout(held: Kept) -> None:
    """Sets the rates to 0, as modules of torch, torchvision, timm and transformers call them."""
    for module in held.modules:
        kind = type(module).__name__.lower()
        is_dropout = "drop" in kind or kind == "stochasticdepth"
        for name, value in list(vars(module).items()):
            is_rate = "drop" in name or (name == "p" and is_dropout)
            if isinstance(value, float) and is_rate and value > 0:
                held.override(module, name, 0.0)


# ---- float64 ------------------------------------------------------------------------------------


def exact_of(model: Any, step: Step, held: Kept) -> Observed:
    """One step in float64, from the same numbers: on a copy of a module, or by the function."""
    held.rewind()
    step.drop_grads()
    default = torch.get_default_dtype()
    inputs = tree_map(Copier(torch.float64), (step.args, step.kwargs))
    twin = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
    named = {name: tensor for tensor, name in _tensors(twin, inputs)}
    leaves = {name: named[name] for name in step.leaves if name in named}
    wide = replace(step, args=inputs[0], kwargs=inputs[1], leaves=leaves)
    device = next((t.device.type for t in named.values()), "cpu")
    try:
        torch.set_default_dtype(torch.float64)
        with torch.autocast(device, enabled=False), Float64():
            return wide.observe(twin, twin)
    finally:
        torch.set_default_dtype(default)


def _tensors(model: Any, inputs: Any) -> Iterator[tuple[Tensor, str]]:
    named = names_of(model, inputs)
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    for tensor in (*parameters, *tree_leaves(inputs)):
        if isinstance(tensor, Tensor):
            yield tensor, named[id(tensor)]


def relative_error(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float | None:
    """The relative Frobenius error of all floating-point tensors as one vector, without elements
    whose exact value is not finite (a mask's); None if there are no elements."""
    names = [name for name, tensor in exact.items() if has_roundings(tensor) and name in found]
    if not names:
        return None
    wrong = whole = 0.0
    for name in names:
        finite = torch.isfinite(exact[name])
        truth = exact[name][finite]
        wrong += float((found[name][finite].to(truth.dtype) - truth).abs().square().sum())
        whole += float(truth.abs().square().sum())
    return float((wrong / (whole or 1.0)) ** 0.5)


# ---- the bound ----------------------------------------------------------------------------------


def _faults(race: Race, calls: Mapping[str, Callable[..., Any]], exact: Observed) -> list[str]:
    """What is further from float64 than the contract allows. The bound is by eager's error, by
    Inductor's, which runs all operations but the fused ones, and by that of eager runs on numbers
    that differ by a rounding."""
    found, eager = (_seen(race, calls[name], exact) for name in ("fx_fuser", "eager"))

    def peers() -> Iterator[Observed]:
        if "inductor" in calls:
            yield from _possible(race, [partial(_seen, race, calls["inductor"], exact)])

    def neighbours() -> Iterator[Observed]:
        race.say(f"values: up to {NEIGHBOURS} runs on numbers that differ by a rounding")
        yield from _possible(race, _neighbours(race, eager, exact))

    wrong = list(_wrong_integers(found, eager, exact, (peers, neighbours)))
    for part in (found, eager, exact):
        part.outputs = {n: t for n, t in part.outputs.items() if has_roundings(t)}
    return wrong + remaining_faults(found, eager, exact, PROMISED, peers(), neighbours())


def _possible(race: Race, runs: Iterable[Callable[[], Observed]]) -> Iterator[Observed]:
    """As many as can be made. If one fails, the others still count."""
    for run in runs:
        try:
            made = run()
        except Exception as error:
            race.notes.append(f"The bound on errors uses fewer runs: {summary(error)}")
            free_memory()
            return
        yield made


def _wrong_integers(
    found: Observed,
    eager: Observed,
    exact: Observed,
    others: tuple[Callable[[], Iterator[Observed]], ...],
) -> Iterator[str]:
    """Integers, of an argmax say, that no run has: if two values differ only by a rounding, either
    is right."""
    names = [name for name, tensor in eager.outputs.items() if not has_roundings(tensor)]
    wrong = {
        name: (found.outputs[name] != eager.outputs[name])
        & (found.outputs[name] != exact.outputs[name])
        for name in names
        if name in found.outputs and found.outputs[name].shape == eager.outputs[name].shape
    }
    for runs in others:
        made = runs()
        while any(w.any() for w in wrong.values()) and (run := next(made, None)) is not None:
            for name, of in wrong.items():
                of &= found.outputs[name] != run.outputs[name]
    for name, of in wrong.items():
        if count := int(of.sum()):
            yield (
                f"output {name}: {count} of {of.numel()} integers are neither eager's nor those of "
                "a run that differs by a rounding"
            )


def _neighbours(race: Race, eager: Observed, exact: Observed) -> Iterator[Callable[[], Observed]]:
    """Eager runs on inputs, and parameters of a module, that differ by a rounding."""
    seen = filter(has_roundings, eager.everything().values())
    eps = max((torch.finfo(t.dtype).eps for t in seen), default=0.0)  # perhaps autocast's
    generator = torch.Generator().manual_seed(0)
    for _ in range(NEIGHBOURS):
        yield partial(_neighbour, race, exact, generator, eps)


def _neighbour(race: Race, exact: Observed, generator: torch.Generator, eps: float) -> Observed:
    step, model = race.step, race.model
    copies: dict[int, Tensor] = {}

    def near(value: Any) -> Any:
        if not isinstance(value, Tensor) or not has_roundings(value):
            return value
        if id(value) not in copies:
            made = neighbour_of(value, generator, eps)
            copies[id(value)] = made.requires_grad_(value.requires_grad)
        return copies[id(value)]

    race.held.rewind()
    args, kwargs = tree_map(near, (step.args, step.kwargs))
    call = model
    buffers: dict[str, Tensor] = {}
    if isinstance(model, nn.Module):
        buffers = {
            name: neighbour_of(t, generator, eps) if has_roundings(t) else t.clone()
            for name, t in model.named_buffers()
        }
        moved = {**{name: near(p) for name, p in model.named_parameters()}, **buffers}

        def call(*given: Any, **named: Any) -> Any:
            return torch.func.functional_call(model, moved, given, named)

    leaves = {name: copies.get(id(leaf), leaf) for name, leaf in step.leaves.items()}
    seen = replace(step, args=args, kwargs=kwargs, leaves=leaves).observe(call, None)
    race.held.rewind()
    seen.state = buffers
    seen.grads = {name: grad for name, grad in seen.grads.items() if name in exact.grads}
    return seen
