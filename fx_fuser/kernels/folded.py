"""The library's own fused call, relu(convolution + bias + addend), with BatchNorm folded into the
weight: `fx_fuser.ops.folded`, in inference, and in training with a frozen BatchNorm. The kernel
that folds is kernels_cu/conv/fold.cuh.
"""

from __future__ import annotations

import functools

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fx_fuser.anchors.conv2d import memory_format_of
from fx_fuser.graph.epilogue import Epilogue, kernel_spec
from fx_fuser.kernels.base import CONVOLUTION_KINDS, Case, Kernel, example
from fx_fuser.kernels.precision import may_be_tf32
from fx_fuser.native.kernel_spec import Family, KernelSpec

FOLDED = "folded"
FOLD = Family("conv/fold.cuh", "FX_FUSER_FOLD", "fold")


@functools.cache
def fold_spec(weight: torch.dtype, out: torch.dtype) -> KernelSpec:
    """The kernel that folds weights of one dtype into weights of another."""
    return kernel_spec(Epilogue(), {"z": weight}, (), out, FOLD)


def addend_of_relu(epilogue: Epilogue) -> str | None:
    """The tensor t… of relu(z + t…), or "" for relu(z); None for any other epilogue."""
    alias = {"z": "z"}
    addend, is_added = "", False
    for i, step in enumerate(epilogue.steps):
        value = f"v{i}"
        args = [alias.get(a, a) for a in step.args if a is not None]
        if step.op == "identity":
            alias[value] = args[0]
        elif step.op == "add" and not is_added and len(args) == 2 and args.count("z") == 1:
            (addend,) = (a for a in args if a != "z")
            is_added = True
            if not addend.startswith("t"):
                return None
            alias[value] = "z"
        elif step.op == "relu" and args == ["z"] and i == len(epilogue.steps) - 1:
            return addend
        else:
            return None
    return None


class Folded(Kernel):
    """Not in fp16: a weight times BatchNorm's scale may over- or underflow."""

    name = FOLDED
    sites = "Conv2d + BatchNorm + ReLU by cuDNN, in inference or with a frozen BatchNorm"
    kinds = CONVOLUTION_KINDS
    grows = True
    needs_cuda = False
    any_layout = True
    dtypes = (torch.float32, torch.bfloat16)

    def takes(self, case: Case) -> bool:
        c = case.tensors[0]
        if c.dtype not in self.dtypes or (case.has_backward() and not _is_frozen(case)):
            return False
        if case.options.exported:  # exported files hold only ops that load their own kernels
            return False
        if not all(isinstance(size, int) for size in case.operand("weight").shape):
            return False  # `fold` needs constant offsets of the layers' weights
        may_be = {torch.float32, c.dtype}
        if case.out != c.dtype or not may_be.issuperset(t.dtype for t in case.tensors):
            return False
        # For eager a weight in channels_last is enough; the op goes by x's format.
        if memory_format_of(c) != memory_format_of(case.operand("x")):
            return False
        # It follows torch's setting, which by default allows TF32.
        if case.options.fp32 in ("split", "ieee") and may_be_tf32(c):
            return False
        if case.device.type == "cpu":
            # For tests, which allow 16-bit results on a CPU one rounding.
            forced = case.options.cpu_ops and case.options.plan == "always"
            if not forced or c.dtype != torch.float32:
                return False
        elif not (case.is_channels_last and torch.backends.cudnn.enabled):
            return False
        return _has_shift(case) and _is_relu(case)

    def examples(self, arch: str) -> list[KernelSpec]:
        f32, bf16 = torch.float32, torch.bfloat16
        dtypes = ((f32, f32), (bf16, bf16), (bf16, f32))
        return [example(FOLD, "Identity", 0, f32, out, weight) for out, weight in dtypes]


def _is_normed(case: Case) -> bool:
    return "running_mean" in case.site.operands


def _is_frozen(case: Case) -> bool:
    """May it be trained: is there a BatchNorm in evaluation whose gamma needs no gradient, and does
    x come in channels_last, so that backward reads it with eager's strides?"""
    if not _is_normed(case) or case.site.attrs["training"]:
        return False
    is_trained = case.gradients().get("gamma")
    return not is_trained and memory_format_of(case.operand("x")) == torch.channels_last


def _has_shift(case: Case) -> bool:
    """Is there a vector that the library's fused call can take as its bias?"""
    if _is_normed(case):
        return not case.site.attrs["training"]
    return case.site.operands["bias"] is not None


def _is_relu(case: Case) -> bool:
    """Is the epilogue relu(z) or relu(z + t)? Or is it only BatchNorm: `planning.plan` says where
    its shift goes."""
    if _is_normed(case) and not case.epilogue.steps:
        return True
    addend = addend_of_relu(case.epilogue)
    if not addend:
        return addend is not None
    c, added = case.tensors[0], case.t[int(addend[1:])]
    same = added.dtype == c.dtype and added.ndim == c.ndim and added.device == c.device
    return same and all(statically_known_true(a == b) for a, b in zip(added.shape, c.shape))
