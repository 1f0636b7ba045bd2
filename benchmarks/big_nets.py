"""Published nets at their published sizes, unmodified, with random weights.

ViT-B/16, Llama (four layers), BERT-base and GPT-2 small come from transformers. torchvision's
ViT-B/16 is a different one: its attention is `F.multi_head_attention_forward`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEED = 0
PHASES = ("eval", "train")

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class BigNet:
    """make(small, dropout): small for a CPU; dropout as published, or none.

    counts: items of a batch in each phase. shape: of an item. classes: for labels and tokens.
    phases: those that are measured by default. tokens: items are of tokens; otherwise of
    numbers. labelled: there is something to learn.
    not, of numbers. labelled: there is something to learn.
    """

    name: str
    make: Callable[[bool, bool], nn.Module]
    counts: dict[str, int]
    shape: tuple[int, ...]
    classes: int
    has_dropout: bool = False
    phases: tuple[str, ...] = ("train",)
    small_shape: tuple[int, ...] = (8,)
    small_classes: int = 10
    causal: bool = False  # the tokens are the labels
    input_name: str = "input_ids"
    tokens: bool = True
    labelled: bool = True

    def model(self, device: torch.device, small: bool, dropout: bool) -> nn.Module:
        """The same weights for the same arguments; drawn on the device, which is quicker."""
        torch.manual_seed(SEED)
        with device:
            model = self.make(small, dropout)
        fill_zeros(model)
        return model

    def in_float64(self, model: nn.Module) -> nn.Module:
        return copy.deepcopy(model).double()

    def batch(self, phase: str, device: torch.device, small: bool = False) -> Batch:
        generator = torch.Generator().manual_seed(SEED)
        shape = self.sizes(phase, small)
        classes = self.small_classes if small else self.classes
        x = (
            torch.randint(classes, shape, generator=generator)
            if self.tokens
            else torch.randn(shape, generator=generator)
        )
        found = {self.input_name: x}
        if phase == "train" and self.labelled:
            kinds = 2 if self.tokens else classes
            labels = torch.randint(kinds, shape[:1], generator=generator)
            found["labels"] = x if self.causal else labels
        return {name: tensor.to(device) for name, tensor in found.items()}

    def sizes(self, phase: str, small: bool) -> tuple[int, ...]:
        return (2, *self.small_shape) if small else (self.counts[phase], *self.shape)

    def describe(self, phase: str, small: bool) -> str:
        return " × ".join(map(str, self.sizes(phase, small)))

    def forward(
        self, call: Callable[..., Any], batch: Batch
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Outputs, and the loss if there are labels. transformers' models compute their own."""
        if "x" not in batch:
            output = call(**batch)
            return {"logits": output.logits}, output.loss if "labels" in batch else None
        logits = call(batch["x"])
        loss = F.cross_entropy(logits, batch["labels"]) if "labels" in batch else None
        return {"logits": logits}, loss


def fill_zeros(model: nn.Module) -> None:
    """Some heads, torchvision's among them, begin as zeros: so would results and gradients be."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():
                parameter.normal_(std=0.02)


def vit(small: bool, dropout: bool, **sizes: Any) -> nn.Module:
    """sizes: of the configuration, if not the published ones; likewise below."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes |= {"num_labels": 1000}
    if small:
        sizes |= {"num_labels": 10, "hidden_size": 32, "intermediate_size": 64, "image_size": 32}
        sizes |= {"num_attention_heads": 2, "num_hidden_layers": 1}
    return ViTForImageClassification(ViTConfig(**sizes))


def torchvision_vit(small: bool, dropout: bool) -> nn.Module:
    from torchvision.models import VisionTransformer, vit_b_16

    if small:
        return VisionTransformer(32, 16, 1, 2, hidden_dim=32, mlp_dim=64, num_classes=10)
    return vit_b_16()


def llama(small: bool, dropout: bool, **sizes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    full: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32000}
    full |= {"num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 4}
    sizes = full | sizes
    if small:
        sizes |= {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 10}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))


def bert(small: bool, dropout: bool, **sizes: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    if small:
        sizes |= {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 10}
        sizes |= {"num_attention_heads": 2, "num_hidden_layers": 1}
    if not dropout:
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes))


def gpt2(small: bool, dropout: bool, **sizes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes |= {"use_cache": False}
    if small:
        sizes |= {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 10, "n_positions": 8}
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    if not dropout:
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes))


NETS = {
    net.name: net
    for net in (
        BigNet(
            "vit_b", vit, {"eval": 64, "train": 32}, (3, 224, 224), 1000,
            phases=PHASES, small_shape=(3, 32, 32), input_name="pixel_values", tokens=False,
        ),
        BigNet(
            "torchvision_vit_b", torchvision_vit, {"eval": 64, "train": 32}, (3, 224, 224), 1000,
            phases=PHASES, small_shape=(3, 32, 32), input_name="x", tokens=False,
        ),
        BigNet(
            "llama", llama, {"eval": 4, "train": 4}, (1024,), 32000, phases=PHASES, causal=True
        ),
        BigNet("bert", bert, {"eval": 16, "train": 16}, (512,), 30522, has_dropout=True),
        BigNet(
            "gpt2", gpt2, {"eval": 4, "train": 4}, (1024,), 50257, has_dropout=True, causal=True
        ),
    )
}  # fmt: skip
