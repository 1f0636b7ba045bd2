"""What a report holds for: the device, the precision and the mode that a model was looked at in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fx_fuser import versions
from fx_fuser.kernels.precision import conv_tf32_allowed, matmul_tf32_requested
from fx_fuser.options import Options

_ON_GPU = "Run explain on a GPU to see what is fused there, and why the rest is not."
ON_CPU = (
    "fx_fuser has no kernels for a CPU: Inductor compiles your model as it is. This report lists "
    f"what matches its patterns. {_ON_GPU} With options={{'cpu_ops': True}} it lists here every "
    "site that could be fused."
)
_CPU_OPS = (
    "fx_fuser has no kernels for a CPU: with option 'cpu_ops' its ops run as plain torch "
    f"operations, for tests. {_ON_GPU}"
)


@dataclass(frozen=True)
class Header:
    """devices: "cpu", or say "cuda:0, NVIDIA H200". dtypes: floating-point ones, of parameters and
    inputs. mode: "train", "eval", how many modules are in either, "as exported", or "" for a
    function. grad: are gradients on? autocast: the dtype on each device; "" if it is off.
    precision: how fp32 is computed. note: what else the reader of the report must know."""

    devices: list[str]
    dtypes: list[str]
    mode: str
    grad: bool
    autocast: str
    precision: str
    torch: str
    fx_fuser: str
    note: str = ""

    @property
    def lines(self) -> list[str]:
        """Sentences, one a line."""
        grad = f"gradients {'on' if self.grad else 'off'}"
        autocast = f"autocast to {self.autocast}" if self.autocast else ""
        seen = [", ".join(self.dtypes) or "no floating-point tensors", autocast, self.mode, grad]
        return [
            f"fx_fuser {self.fx_fuser}, torch {self.torch}, on {' and '.join(self.devices)}",
            "; ".join(filter(None, seen)),
            self.precision,
            *([self.note] if self.note else []),
        ]


def header_of(tensors: Iterable[Tensor], mode: str, options: Options) -> Header:
    """The header, as torch's settings are now. tensors: parameters and inputs."""
    tensors = list(tensors)
    devices = sorted({str(t.device) for t in tensors}) or ["cpu"]
    on_cpu = all(torch.device(d).type == "cpu" for d in devices)
    return Header(
        devices=list(map(_named, devices)),
        dtypes=sorted({str(t.dtype)[6:] for t in tensors if t.is_floating_point()}),
        mode=mode,
        grad=torch.is_grad_enabled(),
        autocast=", ".join(_autocast({torch.device(d).type for d in devices})),
        precision=_precision(options),
        torch=str(torch.__version__),
        fx_fuser=versions.PACKAGE,
        note=(_CPU_OPS if options.cpu_ops else ON_CPU) if on_cpu else "",
    )


def mode_of(model: Any) -> str:
    """The mode of a module and those in it; empty for a function."""
    modes = [m.training for m in model.modules()] if isinstance(model, nn.Module) else []
    if not modes:
        return ""
    if len(set(modes)) == 1:
        return "train" if modes[0] else "eval"
    return f"{sum(modes)} modules in train, {len(modes) - sum(modes)} in eval"


def _named(device: str) -> str:
    if torch.device(device).type != "cuda":
        return device
    return f"{device}, {torch.cuda.get_device_name(device)}"


def _autocast(kinds: Iterable[str]) -> Iterator[str]:
    for kind in sorted(kinds):
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            yield str(torch.get_autocast_dtype(kind))[6:]


def _precision(options: Options) -> str:
    allowed: Sequence[bool] = (matmul_tf32_requested(), conv_tf32_allowed())
    gemms, convolutions = ("on" if tf32 else "off" for tf32 in allowed)
    return (
        f"TF32 by torch's settings: matmul {gemms}, convolutions {convolutions}; "
        f"option fp32={options.fp32!r}"
    )
