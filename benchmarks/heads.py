"""Heads with their loss, in turns with Inductor's: a training step's time and peak memory.

    python -m benchmarks.heads            # only heads, then GPT-2 and a Llama
    python -m benchmarks.heads gpt2       # those whose name contains "gpt2"
    python -m benchmarks.heads --out benchmarks/results/heads/gpu.json

Values of the bare heads are compared with float64 as well. Each row is in the file as soon as it is
measured.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fx_fuser
from benchmarks import measure, results
from benchmarks.run import commit_here
from benchmarks.sm90 import CUDA

COLUMNS = ["inductor", "fx_fuser"]
BF16 = torch.bfloat16


class Head(nn.Module):
    """cast: the dtype of an autocast; None: bf16 weights. returns: the logits, too."""

    def __init__(
        self, width: int, columns: int, cast: torch.dtype | None, returns: bool = False
    ) -> None:
        super().__init__()
        self.cast, self.returns = cast, returns
        self.head = nn.Linear(width, columns, bias=False, device="cuda")
        if cast is None:
            self.head.to(BF16)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        with torch.autocast("cuda", self.cast or BF16, enabled=self.cast is not None):
            logits = self.head(x)
        loss = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))
        return (loss, logits) if self.returns else loss


class LossOf(nn.Module):
    """A transformers model's loss. returns: the logits, too; otherwise nothing reads them."""

    def __init__(self, model: Any, casts: bool, returns: bool) -> None:
        super().__init__()
        self.model, self.casts, self.returns = model.cuda(), casts, returns

    def forward(self, tokens: Tensor) -> Any:
        with torch.autocast("cuda", BF16, enabled=self.casts):
            made = self.model(tokens, labels=tokens)
        return (made.loss, made.logits) if self.returns else made.loss


def loss_alone(made: Any) -> Tensor:
    """The result from which a trainer runs backward."""
    loss: Tensor = made[0] if isinstance(made, tuple) else made
    return loss


def head(
    rows: int, width: int, columns: int, cast: torch.dtype | None, returns: bool = False,
    kind: type[Head] = Head,
) -> Callable[[], Any]:  # fmt: skip
    def compared() -> Any:
        x = torch.randn(1, rows, width, device="cuda", dtype=torch.float32 if cast else BF16)
        labels = torch.randint(0, columns, (1, rows), device="cuda")
        given = kind(width, columns, cast, returns), x.requires_grad_(), labels
        return fx_fuser.compare(*given, train=True, columns=COLUMNS, loss=loss_alone)

    return compared


def net(model: Any, casts: bool, batch: int, columns: int, returns: bool) -> Any:
    given = LossOf(model, casts, returns), torch.randint(0, columns, (batch, 1024), device="cuda")
    how: dict[str, Any] = {"train": True, "columns": COLUMNS, "loss": loss_alone}
    return fx_fuser.compare(*given, reference=False, **how)


def gpt2(returns: bool = False) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=6))
    model.loss_type = "ForCausalLM"  # otherwise transformers warns, which breaks Dynamo's graph
    return net(model, True, 8, 50257, returns)


def llama(returns: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=5632, num_hidden_layers=4,
        num_attention_heads=16, use_cache=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return net(model.to(BF16), False, 4, 128256, returns)


class Gemma(Head):
    """Gemma's head: a soft cap, and more columns."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = torch.tanh(self.head(x) / 30.0) * 30.0
        loss = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))
        return (loss, logits) if self.returns else loss


class Penalized(Head):
    """With a z-loss, and smoothed labels."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cuda", self.cast or BF16, enabled=self.cast is not None):
            logits = self.head(x)
        logits = logits.float().view(-1, logits.shape[-1])
        loss = F.cross_entropy(logits, labels.view(-1), label_smoothing=0.1)
        return loss + 1e-4 * logits.logsumexp(-1).square().mean()


class LikelyTokens(Head):
    """Of reinforcement learning: log-probabilities in fp32 of a 16-bit body."""

    def logits_of(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)  # float64 stays it
        return F.linear(x.to(wide), self.head.weight.to(wide))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        likely = self.logits_of(x).log_softmax(-1).gather(-1, labels[..., None])
        ratio = (likely - likely.detach()).exp()
        return -ratio.mean()


class TokenByToken(LikelyTokens):
    """The log-probabilities as trl's `selective_log_softmax` computes them: sequence by sequence,
    with logits that a temperature has divided in place."""

    SEQUENCES = 8

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x).view(self.SEQUENCES, -1, self.head.out_features)
        logits.div_(0.9)
        of_rows = zip(logits, labels.view(self.SEQUENCES, -1, 1))
        picked = [row.log_softmax(-1).gather(-1, label) for row, label in of_rows]
        likely = torch.stack(picked).float()
        return -(likely - likely.detach()).exp().mean()


class WideTokenByToken(TokenByToken):
    """Likewise, of an fp32 head: logsumexp by sequence."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits_of(x).view(self.SEQUENCES, -1, self.head.out_features)
        picked = logits.gather(-1, labels.view(self.SEQUENCES, -1, 1)).squeeze(-1)
        likely = picked - torch.stack([row.logsumexp(-1) for row in logits])
        return -(likely - likely.detach()).exp().mean()


class WideLoss(LikelyTokens):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits_of(x).flatten(0, 1), labels.flatten())


def in_tf32(compared: Callable[[], Any]) -> Any:
    gemms: Any = torch.backends.cuda.matmul
    before, gemms.fp32_precision = gemms.fp32_precision, "tf32"
    try:
        return compared()
    finally:
        gemms.fp32_precision = before


IN_FP32 = (4096, 4096, 128256, None, False)
CASES: dict[str, Callable[[], Any]] = {
    "head of 700 rows": head(700, 768, 50257, BF16),
    "head of GPT-2, 8192 rows": head(8192, 768, 50257, BF16),
    "head of GPT-2, 8192 rows, fp16": head(8192, 768, 50257, torch.float16),
    "head of a Llama, 4096 rows, weights of bf16": head(4096, 2048, 128256, None),
    "head of a Llama, 16384 rows, weights of bf16": head(16384, 2048, 128256, None),
    "head of 8192 columns": head(8192, 512, 8192, BF16),
    "head of GPT-2, 8192 rows, with logits": head(8192, 768, 50257, BF16, returns=True),
    "head of a Llama, 4096 rows, with logits": head(4096, 2048, 128256, None, returns=True),
    "head of Gemma, 4096 rows": head(4096, 2304, 256000, None, kind=Gemma),
    "head of Gemma, 4096 rows, with logits": head(4096, 2304, 256000, None, True, Gemma),
    "head of GPT-2, 8192 rows, with a z-loss": head(8192, 768, 50257, BF16, kind=Penalized),
    "head in fp32, likely tokens": head(*IN_FP32, LikelyTokens),
    "head in fp32, cross entropy": head(*IN_FP32, WideLoss),
    "head in fp32, likely tokens, TF32": functools.partial(in_tf32, head(*IN_FP32, LikelyTokens)),
    "head of GPT-2, 8192 rows, sequence by sequence": head(
        8192, 768, 50257, None, kind=TokenByToken
    ),
    "head in fp32, sequence by sequence": head(*IN_FP32, WideTokenByToken),
    "gpt2": gpt2,
    "gpt2 with logits": functools.partial(gpt2, returns=True),
    "llama": llama,
    "llama with logits": functools.partial(llama, returns=True),
}


def row_of(case: str, made: fx_fuser.Comparison) -> dict[str, Any]:
    """A row of the file: ms, MiB, and seconds of the first call."""
    row: dict[str, Any] = {"case": case}
    for name, column in made.columns.items():
        row[f"{name}_wall_ms"], row[f"{name}_ms"] = column.wall_ms, column.gpu_ms
        row[f"{name}_peak_mib"], row[f"{name}_first_s"] = column.peak_mib, column.first_s
    date = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    commit = os.environ.get("FX_FUSER_COMMIT") or commit_here()
    return {**row, **measure.machine(CUDA), "date": date, "commit": commit}


def _case(row: dict[str, Any]) -> str:
    return str(row["case"])


def _place(row: dict[str, Any]) -> int:
    return [*CASES].index(_case(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="of the names of the cases; all by default")
    parser.add_argument("--out", type=Path, help="a file of rows, of which these are replaced")
    options = parser.parse_args()
    for name, compared in CASES.items():
        if not options.parts or any(part in name for part in options.parts):
            torch.manual_seed(0)
            made = compared()
            print(f"{name}\n{made}\n", flush=True)
            if options.out:
                results.replace_rows(options.out, [row_of(name, made)], _case, _place)


if __name__ == "__main__":
    main()
