"""The tensors that reach functions of ours when a compiled graph runs on a CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import Tensor

from fx_fuser.ops import run


def tensors_of(patch: pytest.MonkeyPatch, *functions: str) -> dict[str, list[list[Tensor]]]:
    """Function → the tensors of each of its calls from now on. Inductor decides which strides they
    have; on a GPU a kernel that does not take these would leave the call to the library."""
    found: dict[str, list[list[Tensor]]] = {name: [] for name in functions}

    def watch(name: str) -> None:
        function = run._functions[name]

        def watched(*args: Any) -> Any:
            found[name].append([v for v in args if isinstance(v, Tensor)])
            return function.in_torch(*args)

        patch.setitem(run._functions, name, dataclasses.replace(function, in_torch=watched))

    for name in functions:
        watch(name)
    return found
