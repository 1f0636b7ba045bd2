"""The problems: models as their users write them, knowing nothing of fx_fuser, and their sizes.

The first three are KernelBench level 2 #59, #70 and #73; the fourth is the MLP of the Llama family.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MatmulSwishScaling(nn.Module):
    def __init__(self, in_features: int, out_features: int, scaling_factor: float):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.scaling_factor = scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        x = self.matmul(x)
        x = x * torch.sigmoid(x)  # Swish
        x = x * self.scaling_factor
        return x


class GemmSigmoidScalingResidualAdd(nn.Module):
    def __init__(self, input_size: int, hidden_size: int, scaling_factor: float):
        super().__init__()
        self.gemm = nn.Linear(input_size, hidden_size)
        self.scaling_factor = scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        x = self.gemm(x)
        original_x = x
        x = torch.sigmoid(x)
        x = x * self.scaling_factor
        x = x + original_x
        return x


class Conv2dBatchNormScaling(nn.Module):
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, scaling_factor: float
    ):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.bn = nn.BatchNorm2d(out_channels)
        self.scaling_factor = scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.bn(x)
        x = x * self.scaling_factor
        return x


class LlamaMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class Size:
    model: tuple[float, ...]  # the model's constructor arguments
    x: tuple[int, ...]  # the input's shape


@dataclass(frozen=True)
class Problem:
    name: str
    title: str
    model: type[nn.Module]
    pattern: str  # the one that must match, once
    full: Size  # what is measured on a GPU
    small: Size  # what a CPU does in well under a second
    precisions: tuple[str, ...] = ("fp32", "tf32", "bf16", "fp16")
    modes: tuple[str, ...] = ("eval-fwd", "fwd+bwd")

    def size(self, device: torch.device) -> Size:
        return self.full if device.type == "cuda" else self.small

    def make(self, size: Size, device: torch.device) -> tuple[nn.Module, Tensor]:
        """The model and its input, in float32, the same at every call on one device."""
        torch.manual_seed(0)
        with device:
            model = self.model(*size.model)
            x = torch.randn(size.x)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    randomise(module)
        return model, x


def randomise(bn: nn.BatchNorm2d) -> None:
    """As if after some training: a fresh BatchNorm is nearly the identity and would hide errors."""
    for tensor in (bn.running_mean, bn.bias):
        assert tensor is not None
        tensor.normal_()
    for tensor in (bn.running_var, bn.weight):
        assert tensor is not None
        tensor.uniform_(0.5, 1.5)


def llama_mlp(rows: int) -> Problem:
    return Problem(
        name=f"llama_mlp_M{rows}",
        title="LlamaMLP",
        model=LlamaMLP,
        pattern="linear_sigmoid_mul_mul",
        full=Size((4096, 14336), (1, rows, 4096)),
        small=Size((256, 896), (1, min(rows, 64), 256)),
        precisions=("bf16",),
    )


PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        Problem(
            name="59",
            title="Matmul_Swish_Scaling",
            model=MatmulSwishScaling,
            pattern="linear_sigmoid_mul_mul",
            full=Size((32768, 32768, 2.0), (128, 32768)),
            small=Size((1024, 1024, 2.0), (32, 1024)),
        ),
        Problem(
            name="70",
            title="Gemm_Sigmoid_Scaling_ResidualAdd",
            model=GemmSigmoidScalingResidualAdd,
            pattern="linear_sigmoid_mul_add",
            full=Size((8192, 8192, 2.0), (1024, 8192)),
            small=Size((512, 512, 2.0), (128, 512)),
        ),
        Problem(
            name="73",
            title="Conv2d_BatchNorm_Scaling",
            model=Conv2dBatchNormScaling,
            pattern="conv2d_batchnorm_mul",
            full=Size((8, 64, 3, 2.0), (128, 8, 128, 128)),
            small=Size((8, 64, 3, 2.0), (4, 8, 64, 64)),
            modes=("eval-fwd", "train-fwd", "fwd+bwd"),
        ),
        *(llama_mlp(rows) for rows in (1, 16, 512, 4096)),
    )
}
