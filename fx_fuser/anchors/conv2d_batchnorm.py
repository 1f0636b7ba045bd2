"""z = batch_norm(conv2d(x, weight) + bias)        operands and shapes as in conv2d, vectors [O].

z = (c + bias − mean) / √(var + eps) · gamma + beta

In training, mean and (biased) variance are those of c over N, H and W. The bias only shifts the
mean, so it drops out of z. In evaluation they are the running statistics, read at every call:
nothing is folded into the weight, so no update is missed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_fuser.anchors.base import Config, Multiply, Operands, library_gemm
from fx_fuser.anchors.conv2d import Conv2d, convolve, per_channel
from fx_fuser.graph.epilogue import Epilogue, Step, accumulation_dtype
from fx_fuser.graph.read.canonical import is_number
from fx_fuser.graph.read.nodes import meta_tensor
from fx_fuser.graph.read.sites import Site
from fx_fuser.native import launch

_ALL_BUT_CHANNELS = (0, 2, 3)


def batch_stats(c: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance [C] of c [N, C, H, W], in the accumulation dtype."""
    if c.device.type == "cuda":
        return launch.batch_stats(c)
    wide = c.to(accumulation_dtype((c.dtype,)))
    var, mean = torch.var_mean(wide, _ALL_BUT_CHANNELS, correction=0)
    return mean, var


def _is_normal(value: Tensor) -> Tensor:
    """Has it neither overflowed nor lost bits to underflow?"""
    return value.isfinite() & (value.abs() >= torch.finfo(value.dtype).tiny)


def _scaled_sum(dz: Tensor, deviation: Tensor, rstd: Tensor) -> Tensor:
    """Σ dz · deviation · rstd of each channel, if that is finite.

    The running statistics know nothing of c, so deviation · rstd may overflow at a dead unit, whose
    dz of 0 makes it NaN. So rstd comes last, as in torch. Where that sum is beyond the range, or
    below it, rstd comes first.
    """
    total = (dz * deviation).sum(_ALL_BUT_CHANNELS, keepdim=True)
    other = (dz * (deviation * rstd)).sum(_ALL_BUT_CHANNELS, keepdim=True)
    return torch.where(_is_normal(total) | other.isnan(), total * rstd, other)


def _scaled(dz: Tensor, rstd: Tensor, gamma: Tensor) -> Tensor:
    """dz · rstd · gamma, finite if that is; rstd and gamma: one number per channel.

    As torch does, both vectors are multiplied first: a large dz · rstd may overflow, and times a
    gamma of 0 become NaN. Where their product is out of range, the smaller comes first: then dz
    times it overflows only if the result does, and a 0 meets no infinity.
    """
    both = rstd * gamma
    is_whole, is_larger = _is_normal(both), rstd.abs() > gamma.abs()
    first = torch.where(is_whole, both, torch.where(is_larger, gamma, rstd))
    rest = torch.where(is_larger, rstd, gamma).masked_fill(is_whole, 1.0)
    return dz * first * rest


class Conv2dBatchNorm(Conv2d):
    kind = "conv2d_batchnorm"
    role_of_z = "BatchNorm's result"
    operands = (*Conv2d.operands, "running_mean", "running_var", "gamma", "beta")
    schema = (
        "Tensor x, Tensor weight, Tensor? bias, "
        "Tensor? running_mean, Tensor? running_var, Tensor? gamma, Tensor? beta, "
        "int[] stride, int[] padding, int[] dilation, int groups, "
        "bool tf32, str product, str backward, bool again, bool training, float momentum, float eps"
    )
    outputs = ("c", "mean", "var")

    def form_fault(self, site: Site) -> str:
        found = super().form_fault(site)
        if found:
            return found
        training, tracked = site.attrs["training"], site.operands["running_mean"] is not None
        if not isinstance(training, bool) or not is_number(site.attrs["eps"]):
            return "the batch_norm's mode or eps is not known when compiling"
        for name in ("running_mean", "running_var", "gamma", "beta"):
            node = site.operands[name]
            vector = None if node is None else meta_tensor(node)
            if vector is not None and vector.ndim != 1:
                return f"the batch_norm's {name} has {vector.ndim} dimensions, not one"
        if tracked != (site.operands["running_var"] is not None):
            return "only one of running_mean and running_var is given"
        if not training and not tracked:
            return "the batch_norm has neither batch nor running statistics"
        if training and tracked and not is_number(site.attrs["momentum"]):
            return f"momentum={site.attrs['momentum']} is not known when compiling"
        return ""

    def leaf_counts(self, site: Site) -> tuple[int, int]:
        return 6, 1  # c, bias, mean, var, gamma, beta; eps

    def config(self, site: Site) -> dict[str, Any]:
        training = site.attrs["training"]
        updates = training and site.operands["running_mean"] is not None
        return {
            **super().config(site),
            "training": training,
            "momentum": float(site.attrs["momentum"]) if updates else 0.0,
            "eps": float(site.attrs["eps"]),
        }

    def kernel_operands(self, operands: Operands, config: Config) -> list[Tensor | None]:
        """Training does not read the running statistics, which are updated before backward runs."""
        unread = ("running_mean", "running_var") if config["training"] else ()
        return [None if n in unread else v for n, v in operands.items()]

    def forward(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        (c,) = super().forward(operands, config)
        if config["training"]:
            return (c, *batch_stats(c))
        return (c, c.new_empty(0), c.new_empty(0))

    def forward_like(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        (c,) = super().forward_like(operands, config)
        if not config["training"]:
            return (c, c.new_empty(0), c.new_empty(0))
        vector = c.new_empty(c.shape[1], dtype=accumulation_dtype((c.dtype,)))
        return (c, vector, torch.empty_like(vector))

    def z(self, operands: Operands, config: Config) -> Epilogue:
        steps: list[Step] = []

        def then(op: str, *args: str) -> str:
            steps.append(Step(op, args))
            return f"v{len(steps) - 1}"

        c = "c"
        if operands["bias"] is not None and not config["training"]:
            c = then("add", "c", "bias")
        centred = then("sub", c, "mean")
        scale = then("rsqrt", then("add", "var", "eps"))
        if operands["gamma"] is not None:
            scale = then("mul", scale, "gamma")
        if operands["beta"] is None:
            then("mul", centred, scale)
        else:
            then("fma", centred, scale, "beta")
        return Epilogue(tuple(steps), "c")

    def leaves(
        self, operands: Operands, outputs: Sequence[Tensor], config: Config
    ) -> dict[str, Tensor | float]:
        c, mean, var = outputs
        training = config["training"]
        vectors = {
            "bias": None if training else operands["bias"],
            "mean": mean if training else operands["running_mean"],
            "var": var if training else operands["running_var"],
            "gamma": operands["gamma"],
            "beta": operands["beta"],
        }
        present = {n: per_channel(v) for n, v in vectors.items() if v is not None}
        return {"c": c, **present, "eps": config["eps"]}

    def reference(self, operands: Operands, config: Config) -> tuple[Tensor, ...]:
        c, bias = convolve(operands, config), operands["bias"]
        biased = c if bias is None else c + per_channel(bias)
        training, eps = config["training"], config["eps"]
        mean, var = (None if training else operands[n] for n in ("running_mean", "running_var"))
        gamma, beta = operands["gamma"], operands["beta"]
        z = F.batch_norm(biased, mean, var, gamma, beta, training, 0.0, eps)
        return (z, *batch_stats(biased.detach())) if training else (z,)

    def statistics_of_z(
        self, statistics: Sequence[Tensor], operands: Operands, config: Config
    ) -> Sequence[Tensor]:
        """c's mean lacks the bias."""
        bias = operands["bias"]
        if bias is None or not config["training"]:
            return statistics
        mean, var = statistics
        return mean + bias.detach(), var

    def results(
        self, y: Tensor, statistics: Sequence[Tensor], operands: Operands, config: Config
    ) -> list[Tensor]:
        """[y] or [y, new running_mean, new running_var], updated as PyTorch does: unbiased var."""
        running_mean, running_var = operands["running_mean"], operands["running_var"]
        if not config["training"] or running_mean is None or running_var is None:
            return [y]
        mean, var = (s.detach() for s in statistics)
        count = y.shape[0] * y.shape[2] * y.shape[3]
        # var · count may overflow; and a SymFloat would have to be a tensor for AOTAutograd.
        var = var + var / (count - 1)
        m = config["momentum"]
        pairs = ((running_mean, mean), (running_var, var))
        return [y, *(((1 - m) * o.to(now.dtype) + m * now).to(o.dtype) for o, now in pairs)]

    def reads_c(self, needs: Mapping[str, bool], config: Config) -> bool:
        return bool(config["training"] or needs["gamma"])

    def backward(
        self,
        operands: Operands,
        outputs: Sequence[Tensor],
        config: Config,
        dz: Tensor,
        needs: Mapping[str, bool],
        multiply: Multiply = library_gemm,
    ) -> dict[str, Tensor]:
        # In the accumulation dtype throughout; aten's own kernels need one dtype for c and gamma.
        leaves = self.leaves(operands, outputs, config)
        wide = {n: v.to(dz.dtype) for n, v in leaves.items() if isinstance(v, Tensor)}
        rstd = (wide["var"] + config["eps"]).rsqrt()
        deviation = wide["c"] + wide.get("bias", 0.0) - wide["mean"]
        dbeta = dz.sum(_ALL_BUT_CHANNELS, keepdim=True)
        dc = dz
        if config["training"]:  # mean and variance depend on c
            # At most √count, whatever c is.
            normalised = deviation * rstd
            dgamma = (dz * normalised).sum(_ALL_BUT_CHANNELS, keepdim=True)
            count = dz.shape[0] * dz.shape[2] * dz.shape[3]
            # Sums are divided first: their product may be beyond the range.
            dc = dz - (dbeta / count + normalised * (dgamma / count))
        elif needs["gamma"]:
            dgamma = _scaled_sum(dz, deviation, rstd)
        dc = _scaled(dc, rstd, wide["gamma"]) if "gamma" in wide else dc * rstd
        grads = super().backward(operands, outputs, config, dc, needs)
        if needs["gamma"]:
            grads["gamma"] = dgamma.flatten().to(operands["gamma"].dtype)
        if needs["beta"]:
            grads["beta"] = dbeta.flatten().to(operands["beta"].dtype)
        return grads
