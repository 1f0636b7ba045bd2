"""Views and pointwise operations after a Linear, in random order: values, gradients and layout."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import GROWTH, linear_program
from torch import Tensor
from torch._dynamo.utils import counters


def _shapes_after(rng: random.Random, sizes: list[int]) -> tuple[str, list[int]]:
    """A random view of a tensor of these sizes, as code, and its sizes."""
    rank = len(sizes)
    kind = rng.choice(("transpose", "flatten", "unflatten", "view", "unsqueeze", "squeeze"))
    if kind == "transpose" and rank > 1:
        i, j = rng.sample(range(rank), 2)
        sizes = list(sizes)
        sizes[i], sizes[j] = sizes[j], sizes[i]
        return f".transpose({i}, {j - rank})", sizes
    if kind == "flatten" and rank > 2:
        i = rng.randrange(rank - 1)
        return f".reshape({[*sizes[:i], sizes[i] * sizes[i + 1], *sizes[i + 2 :]]})", [
            *sizes[:i], sizes[i] * sizes[i + 1], *sizes[i + 2 :]
        ]  # fmt: skip
    if kind == "unflatten":
        i = rng.randrange(rank)
        for factor in (2, 3, 5):
            if sizes[i] % factor == 0 and sizes[i] > factor:
                split = (factor, sizes[i] // factor)
                return f".unflatten({i}, {split})", [*sizes[:i], *split, *sizes[i + 1 :]]
    if kind == "unsqueeze" and rank < 5:
        i = rng.randrange(rank + 1)
        index = ", ".join([*[":"] * i, "None", "..."])
        said = rng.choice((f".unsqueeze({i})", f"[{index}]"))
        return said, [*sizes[:i], 1, *sizes[i:]]
    if kind == "squeeze" and 1 in sizes:
        i = sizes.index(1)
        return f".squeeze({i})", [*sizes[:i], *sizes[i + 1 :]]
    return "", sizes


def _program(seed: int) -> tuple[str, list[Tensor]]:
    """Views and pointwise operations in random order, with operands that broadcast."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sizes, operands = [2, 4, 6], list[Tensor]()
    lines = ["def body(m, x, *t):", "    h = z = m.lin(x)"]
    for _ in range(rng.randrange(2, 8)):
        if rng.randrange(2):
            code, sizes = _shapes_after(rng, sizes)
            lines.append(f"    h = h{code}")
            continue
        kind = rng.choice(("sigmoid", "tanh", "mul", "add", "where", "silu", "gate", "again"))
        if kind in ("mul", "add", "where"):
            rank = rng.randrange(len(sizes) + 1)
            own = [n if rng.randrange(2) else 1 for n in sizes[len(sizes) - rank :]]
            if rng.randrange(3) == 0:
                own = list(sizes)
            t = torch.randn(own)
            if len(own) > 1 and rng.randrange(3) == 0:  # another layout
                t = t.transpose(0, -1).contiguous().transpose(0, -1)
            operands.append(t)
            name = f"t[{len(operands) - 1}]"
            code = {
                "mul": f"h * {name}",
                "add": f"{name} + h",
                "where": f"torch.where({name} > 0, h, 0.5)",
            }
            lines.append(f"    h = {code[kind]}")
        elif kind == "gate":
            lines.append("    h = h * torch.sigmoid(h)")
        elif kind == "again":
            lines.append(f"    h = h * z.reshape({sizes})" if rng.randrange(2) else "    h = h * 2")
        else:
            lines.append(f"    h = {'F' if kind == 'silu' else 'torch'}.{kind}(h)")
    lines.append(f"    return h{rng.choice(('', '.sum(-1)', ', z.mean()', ''))}")
    return "\n".join(lines), operands


def _agrees(seed: int) -> int:
    source, operands = _program(seed)
    return agrees(source, [torch.randn(2, 4, 8), *operands])


def agrees(source: str, inputs: list[Tensor]) -> int:
    """How many sites of `body` in the source are fused; values and gradients are eager's."""
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(source, names)
    torch._dynamo.reset()
    counters.clear()
    model = linear_program(names["body"]).double()
    leaves = [t.double().requires_grad_() for t in inputs]
    run = torch.compile(
        model,
        backend="fx_fuser",
        options={"inner": "eager", "cpu_ops": True, "strict": True, **GROWTH},
    )
    results = []
    for call in (model, run):
        y = call(*leaves)
        y = y if isinstance(y, tuple) else (y,)
        total = sum((v * torch.linspace(1, 2, v.numel()).view(v.shape)).sum() for v in y)
        wanted = [*leaves, model.lin.weight, model.lin.bias]
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
        lie = [[s for n, s in zip(v.shape, v.stride()) if n > 1] for v in y]  # of 1: any stride
        results.append((y, lie, grads))
    (eager, strides, wanted), (ours, got, grads) = results
    torch.testing.assert_close(ours, eager, rtol=1e-12, atol=1e-12, msg=source)
    assert got == strides, source
    for a, b in zip(grads, wanted):
        assert (a is None) == (b is None), source
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=source)
    return sum(counters["fx_fuser"].values())


@pytest.mark.slow
def test_generated_programs() -> None:
    assert sum(_agrees(seed) for seed in range(40)) == 40


@pytest.mark.each_once
@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 250))
def test_more_generated_programs(first: int) -> None:
    assert sum(_agrees(seed) for seed in range(first, first + 250)) == 250
