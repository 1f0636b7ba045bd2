"""A match, as planning sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fx_fuser.anchors import ANCHORS
from fx_fuser.graph.epilogue import Epilogue
from fx_fuser.graph.match.pattern import Match
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.graph.read.sites import Site
from fx_fuser.kernels.precision import matmul_tf32_requested
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.ops import apply, calls
from fx_fuser.options import Options
from fx_fuser.planning import bench_ops, layout


@dataclass(frozen=True)
class MatchCase:
    """A match as kernels see it: see `fx_fuser.kernels.base.Case`."""

    match: Match
    options: Options
    in_inference: bool = False  # as if no gradient were asked for
    without: tuple[str, ...] = ()  # as if none were of these operands

    @property
    def site(self) -> Site:
        return self.match.site

    @property
    def config(self) -> dict[str, Any]:
        return ANCHORS[self.site.kind].config(self.site)

    @property
    def device(self) -> torch.device:
        return device_of(self.match)

    @property
    def out(self) -> torch.dtype:
        return meta_tensor(self.match.root).dtype  # type: ignore[union-attr]

    @property
    def acc(self) -> torch.dtype:
        return apply.accumulator_of(self.match.bound.epilogue, self.tensors, self.out)

    @property
    def tensors(self) -> list[torch.Tensor]:
        nodes = (self.site.nodes[0], *self.match.operands)
        return [meta_tensor(node) for node in nodes]  # type: ignore[misc]

    @property
    def epilogue(self) -> Epilogue:
        return self.match.bound.epilogue

    @property
    def t(self) -> list[torch.Tensor]:
        return calls.fake_tensors(self.match)

    @property
    def is_channels_last(self) -> bool:
        return layout.is_channels_last(self.match.view, self.site, self.options)

    def has_backward(self) -> bool:
        return not self.in_inference and calls.saves(self.match)

    @property
    def recomputes(self) -> bool:
        return self.options.save == "memory" and self.match.written_after() is None

    def operand(self, name: str) -> torch.Tensor:
        return meta_tensor(self.site.operands[name])  # type: ignore[arg-type, return-value]

    def specs(self, choices: Mapping[str, Any]) -> list[KernelSpec]:
        return calls.kernel_specs(self.match, choices)

    def gradients(self) -> dict[str, bool]:
        asked = calls.gradients_of(self.match)
        return {name: needed and name not in self.without for name, needed in asked.items()}

    def may_have_fused_backward(self, kernel: str) -> bool:
        return calls.may_have_fused_backward(self.match, kernel)


def device_of(match: Match) -> torch.device:
    return meta_tensor(match.site.node).device  # type: ignore[union-attr]


def timing_key(
    match: Match,
    candidates: Sequence[Mapping[str, Any]],
    tensors: Sequence[bench_ops.TensorForm | None],
) -> tuple[object, ...]:
    """Everything that the times depend on, except the machine and what `timing` adds."""
    return (
        match.site.kind,
        calls.config_of(match, {}),  # a convolution's stride, padding, dilation, groups
        [dict(choices) for choices in candidates],
        [[spec.name for spec in calls.kernel_specs(match, c)] for c in candidates],
        list(map(str, tensors)),
        calls.gradients_of(match),
        calls.gradients_of_tensors(match),
        matmul_tf32_requested(),  # the library's gemm follows it
        torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]  # and its backward
        *(
            getattr(torch.backends.cudnn, flag)
            for flag in ("benchmark", "deterministic", "enabled")
        ),
        torch.backends.cudnn.version(),
        torch.are_deterministic_algorithms_enabled(),
    )
