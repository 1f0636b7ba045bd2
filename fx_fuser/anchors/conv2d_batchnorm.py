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

from fx_fuser.anchors.base import Case, Config, Operands
from fx_fuser.anchors.conv2d import Conv2d, convolve, per_channel
from fx_fuser.graph.canonical import is_number
from fx_fuser.graph.epilogue import Epilogue, Step, accumulation_dtype
from fx_fuser.graph.nodes import meta_tensor
from fx_fuser.graph.sites import Site
from fx_fuser.native import launch


def batch_stats(c: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance [C] of c [N, C, H, W], in the accumulation dtype."""
    if c.device.type == "cuda":
        return launch.batch_stats(c)
    wide = c.to(accumulation_dtype((c.dtype,)))
    var, mean = torch.var_mean(wide, (0, 2, 3), correction=0)
    return mean, var


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

    def _has_shift(self, site: Site) -> bool:
        return not site.attrs["training"]

    def _is_relu(self, case: Case) -> bool:
        """Or BatchNorm alone: `fx_fuser.planning.plan` says where its shift goes."""
        return not case.epilogue.steps or super()._is_relu(case)

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
        var = var * count / (count - 1)  # no SymFloat: AOTAutograd would want it as a tensor
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
    ) -> dict[str, Tensor]:
        # In the accumulation dtype throughout; aten's own kernels want one dtype for c and gamma.
        leaves = self.leaves(operands, outputs, config)
        wide = {n: v.to(dz.dtype) for n, v in leaves.items() if isinstance(v, Tensor)}
        rstd = (wide["var"] + config["eps"]).rsqrt()
        normalised = (wide["c"] + wide.get("bias", 0.0) - wide["mean"]) * rstd
        dbeta = dz.sum((0, 2, 3), keepdim=True)
        dgamma = (dz * normalised).sum((0, 2, 3), keepdim=True)
        dc = dz
        if config["training"]:  # mean and variance depend on c
            count = dz.shape[0] * dz.shape[2] * dz.shape[3]
            # Sums are divided first: their product may be beyond the range.
            dc = dz - (dbeta / count + normalised * (dgamma / count))
        dc = dc * rstd * wide.get("gamma", 1.0)
        grads = super().backward(operands, outputs, config, dc, needs)
        if needs["gamma"]:
            grads["gamma"] = dgamma.flatten().to(operands["gamma"].dtype)
        if needs["beta"]:
            grads["beta"] = dbeta.flatten().to(operands["beta"].dtype)
        return grads
