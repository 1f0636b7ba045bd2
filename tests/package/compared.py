"""What the tests of `compare` share."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import compile_fx

import fx_fuser
from fx_fuser import Comparison

MODULE = sys.modules["fx_fuser.compare"]  # the package; as an attribute it is the function
ALL = ("eager", "inductor", "fx_fuser")
EAGER = {"inner": "eager"}


def compared(model: Any, *inputs: Any, **given: Any) -> Comparison:
    given = {"options": EAGER, "columns": ALL, "seconds": 0.01, "progress": False, **given}
    return fx_fuser.compare(model, *inputs, **given)


@dataclasses.dataclass
class Result:
    logits: Tensor
    hidden: Any = None


def settings() -> tuple[Any, ...]:
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    newer = (cuda.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
    try:
        older = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:
        older = ("raises", True)
    return (
        *newer, *older, torch.is_grad_enabled(), torch.get_default_dtype(),
        torch._dynamo.config.recompile_limit, compile_fx.compile_fx,
    )  # fmt: skip


def break_column(
    monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException, after: int | None = None
) -> None:
    """The column's compilation, or its calls from the n-th on, raise."""

    def compile_with(model: Any) -> Any:
        if after is None:
            raise error
        calls = iter(range(10**6))

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) >= after:
                raise error
            return model(*args, **kwargs)

        return call

    replace_column(monkeypatch, name, compile_with)


def replace_column(
    monkeypatch: pytest.MonkeyPatch, name: str, compile_with: Callable[[Any], Any]
) -> None:
    variants_of = MODULE.variants_of

    def other_variants(*args: Any) -> Any:
        variants = variants_of(*args)
        if name in variants:
            variants[name] = dataclasses.replace(variants[name], compile=compile_with)
        return variants

    monkeypatch.setattr(MODULE, "variants_of", other_variants)
