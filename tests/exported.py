"""Models through `torch.export`, for the checks of `helpers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import helpers
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram


def export(model: nn.Module, inputs: Sequence[Any], dynamic: bool = False) -> ExportedProgram:
    """Of a `helpers.Program`. dynamic: in every size that the model does not fix."""
    free = tuple(
        dict.fromkeys(range(x.ndim), Dim.AUTO) if isinstance(x, Tensor) else None for x in inputs
    )
    return torch.export.export(model, tuple(inputs), dynamic_shapes=(free,) if dynamic else None)


@contextmanager
def exporting(decomposed: bool = False) -> Iterator[None]:
    """`helpers.check` compiles the module of the exported program in place of the model."""
    plain = helpers.compiled

    def compiled(model: Any, dynamic: bool | None = None, *rest: Any, **options: Any) -> Any:
        def call(*inputs: Any) -> Any:
            program = export(model, inputs, bool(dynamic))
            if decomposed:
                program = program.run_decompositions()
            return plain(program.module(), dynamic, *rest, **options)(*inputs)

        return call

    with mock.patch.object(helpers, "compiled", compiled):
        yield
