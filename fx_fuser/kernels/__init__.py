"""The kernels, one file each, and which of them take a site.

A kernel's file has all that Python knows about it: the sites that it takes (operands, device,
layout, options), how its work is divided, its family, which is the main loop to compile, and the
examples that CI compiles and tests. The CUDA C++ is in `kernels_cu/`, with the host's part. An op's
configuration names the kernel (`product`, `backward`), and a call names the compiled one by the
hash of its spec. tests/package/test_rooms.py lists who else names a kernel. What a new kernel
needs: CONTRIBUTING.md.

Anchors own operands, reference and the backward's gemms, and know no kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from fx_fuser.anchors.base import LIBRARY, Config, Operands
from fx_fuser.errors import OptionError
from fx_fuser.kernels import attention, conv1d, head_loss, pixels
from fx_fuser.kernels.attention import bias as attention_bias
from fx_fuser.kernels.attention import gathered
from fx_fuser.kernels.attention import window as attention_window
from fx_fuser.kernels.base import CONVOLUTION_KINDS, Case, Kernel
from fx_fuser.kernels.dense import Dense
from fx_fuser.kernels.depthwise import Depthwise
from fx_fuser.kernels.depthwise import training as depthwise_training
from fx_fuser.kernels.direct import Direct
from fx_fuser.kernels.exact import Exact
from fx_fuser.kernels.folded import Folded
from fx_fuser.kernels.grouped import Grouped
from fx_fuser.kernels.implicit import Implicit
from fx_fuser.kernels.pointwise import Library
from fx_fuser.kernels.precision import conv_tf32_requested, may_be_tf32
from fx_fuser.kernels.split import Split, check_split_loop, reset_fallback
from fx_fuser.kernels.stem import Stem
from fx_fuser.kernels.unaligned import Unaligned
from fx_fuser.native import binaries, load
from fx_fuser.native.kernel_spec import POINTWISE, Family, KernelSpec

# In the order in which they are offered; with plan="always" the last one that takes a site runs.
_ALL = (
    Split(),
    Dense(),
    Exact(),
    Unaligned(),
    Folded(),
    Stem(),
    Depthwise(),
    Grouped(),
    Implicit(),
    Direct(),
    Library(),
)
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _ALL}


def candidates(case: Case) -> list[dict[str, Any]]:
    """The configurations that the site's op may have, the library's first.

    Raises OptionError if an option contradicts torch's own setting.
    """
    found = [_choices(case, KERNELS[LIBRARY], LIBRARY)]
    for kernel in filter(lambda kernel: _is_taken(case, kernel), _ALL):
        found += [_choices(case, kernel, backward) for backward in kernel.backwards(case)]
    return found


def _is_taken(case: Case, kernel: Kernel) -> bool:
    if case.site.kind not in kernel.kinds or (kernel.needs_cuda and case.device.type != "cuda"):
        return False
    if kernel.arch is not None and kernel.arch != binaries.arch_of(case.device):
        return False
    if kernel.for_inference and case.has_backward() and case.options.plan == "measure":
        return False
    return kernel.takes(case)


def _choices(case: Case, kernel: Kernel, backward: str) -> dict[str, Any]:
    choices = {"product": kernel.name, "backward": backward, "again": case.recomputes}
    if case.site.kind not in CONVOLUTION_KINDS:
        return choices
    asked = case.options.fp32 == "tf32"
    if case.options.fp32 == "follow":
        asked = conv_tf32_requested()
    return {"tf32": (asked or kernel.in_tf32) and may_be_tf32(case.tensors[0]), **choices}


def families(operands: Operands, config: Config) -> tuple[Family, ...]:
    """The main loops of a call: the epilogue alone, then the gemm or convolution with epilogue.

    operands: the weight's shape may choose the kernel, and so may which operands there are.

    The first is launched if there is no second, if the second does not take the tensors, or after
    it if it makes only c.
    """
    own = KERNELS[config["product"]].family(operands, config)
    return (POINTWISE,) if own is None else (POINTWISE, own)


def examples(arch: str) -> list[KernelSpec]:
    """What CI compiles for an architecture; each kernel's representative comes first."""
    of_sites = [spec for kernel in _ALL for spec in kernel.examples(arch)]
    attentions = [*attention.examples(arch), *attention_bias.examples(arch)]
    attentions += [*attention_window.offered(), *gathered.offered()]
    others = [*head_loss.examples(), *conv1d.examples(arch), *pixels.examples(arch)]
    return [*of_sites, *attentions, *others, *depthwise_training.examples()]


def unavailable(device: torch.device | str | int) -> str | None:
    """Why no kernel can be built for and run on `device`; None if they can."""
    if (reason := load.available(device)) is not None:
        return reason
    try:
        check_split_loop()
    except OptionError as error:
        return str(error)
    return None


__all__ = [
    "KERNELS",
    "Case",
    "Kernel",
    "candidates",
    "examples",
    "families",
    "reset_fallback",
    "unavailable",
]
