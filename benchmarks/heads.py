"""Heads with their loss beside Inductor's, by turns: a training step's time and peak memory.

    python -m benchmarks.heads            # heads alone, then GPT-2 and a Llama
    python -m benchmarks.heads gpt2       # those whose name contains "gpt2"

Values of heads alone are compared with float64 as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fx_fuser

COLUMNS = ["inductor", "fx_fuser"]
BF16 = torch.bfloat16


class Head(nn.Module):
    """cast: the dtype of an autocast; None: of weights of bf16."""

    def __init__(self, width: int, columns: int, cast: torch.dtype | None) -> None:
        super().__init__()
        self.cast = cast
        self.head = nn.Linear(width, columns, bias=False, device="cuda")
        if cast is None:
            self.head.to(BF16)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cuda", self.cast or BF16, enabled=self.cast is not None):
            logits = self.head(x).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


class LossOf(nn.Module):
    """Of a model of transformers: nobody reads the logits."""

    def __init__(self, model: Any, casts: bool) -> None:
        super().__init__()
        self.model, self.casts = model.cuda(), casts

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cuda", BF16, enabled=self.casts):
            loss: Tensor = self.model(tokens, labels=tokens).loss
        return loss


def head(rows: int, width: int, columns: int, cast: torch.dtype | None) -> Callable[[], Any]:
    def compared() -> Any:
        x = torch.randn(1, rows, width, device="cuda", dtype=torch.float32 if cast else BF16)
        labels = torch.randint(0, columns, (1, rows), device="cuda")
        model = Head(width, columns, cast)
        return fx_fuser.compare(model, x.requires_grad_(), labels, train=True, columns=COLUMNS)

    return compared


def net(model: Any, casts: bool, batch: int, columns: int) -> Any:
    tokens = torch.randint(0, columns, (batch, 1024), device="cuda")
    step = LossOf(model, casts)
    return fx_fuser.compare(step, tokens, train=True, columns=COLUMNS, reference=False)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=6))
    model.loss_type = "ForCausalLM"  # else transformers warns, where Dynamo ends the graph
    return net(model, True, 8, 50257)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=5632, num_hidden_layers=4,
        num_attention_heads=16, use_cache=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return net(model.to(BF16), False, 4, 128256)


CASES = {
    "head of 700 rows": head(700, 768, 50257, BF16),
    "head of GPT-2, 8192 rows": head(8192, 768, 50257, BF16),
    "head of GPT-2, 8192 rows, fp16": head(8192, 768, 50257, torch.float16),
    "head of a Llama, 4096 rows, weights of bf16": head(4096, 2048, 128256, None),
    "head of a Llama, 16384 rows, weights of bf16": head(16384, 2048, 128256, None),
    "head of 8192 columns": head(8192, 512, 8192, BF16),
    "gpt2": gpt2,
    "llama": llama,
}


def main() -> None:
    wanted = sys.argv[1:]
    for name, compared in CASES.items():
        if not wanted or any(part in name for part in wanted):
            torch.manual_seed(0)
            print(f"{name}\n{compared()}\n", flush=True)


if __name__ == "__main__":
    main()
