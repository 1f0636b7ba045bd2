"""The nets of `benchmarks.nets16`, unmodified, with random weights.

Those that are in benchmarks/big_nets.py come from there, with fewer layers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import big_nets, conv_nets, coverage
from benchmarks.big_nets import Batch, BigNet

STEPS = {"eval": "bf16", "train": "amp"}  # the precision in which nets are served, and trained
Sizes = dict[str, Any]  # of a configuration


@dataclass(frozen=True)
class Net16(BigNet):
    """said: what the name and the input's sizes do not say. package: where it comes from.

    precisions: by step. amp: fp32 weights, forward in autocast; bf16: bf16 weights, too.
    """

    said: str = ""
    package: str = "transformers"
    channels_last: bool = False
    phases: tuple[str, ...] = tuple(STEPS)
    precisions: dict[str, str] = field(default_factory=lambda: STEPS)

    def missing(self) -> str:
        """Why it cannot be measured here; empty if it can."""
        found = importlib.util.find_spec(self.package)
        return "" if found else f"{self.package} is not installed"

    def config(self, step: str, small: bool) -> str:
        layout = "channels_last" if self.channels_last else ""
        said = "small" if small else self.said
        return ", ".join(filter(None, (self.describe(step, small), said, layout)))

    def in_float64(self, model: nn.Module) -> nn.Module:
        twin = super().in_float64(model)
        if hasattr(twin, "set_experts_implementation"):
            take: Any = twin.set_experts_implementation
            take("eager")  # the others do not take float64
        return twin

    def forward(
        self, call: Callable[..., Any], batch: Batch
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """All floating outputs. Without labels, the loss is their mean cube: the mean square of
        a LayerNorm's result is 1, and then all gradients are only roundings.
        """
        found = call(batch["x"]) if "x" in batch else call(**batch)
        tensors = coverage.tensors(found)
        outputs = {str(i): tensor for i, tensor in enumerate(tensors)}
        if not torch.is_grad_enabled():
            return outputs, None
        if not self.labelled:
            return outputs, torch.stack([t.float().pow(3).mean() for t in tensors]).sum()
        loss = F.cross_entropy(found, batch["labels"]) if "x" in batch else found.loss
        return outputs, loss


def without_dropout(model: nn.Module) -> int:
    """Removes random draws, which no two systems draw alike; returns how many."""
    found = 0
    for module in model.modules():
        rates = [name for name, value in vars(module).items() if isinstance(value, float)]
        for name in rates:
            is_one = "drop" in name or (name == "p" and conv_nets.is_random(module))
            if is_one and getattr(module, name) > 0:
                setattr(module, name, 0.0)
                found += 1
    return found


# ---- transformers -------------------------------------------------------------------------------

_SMALL: Sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
_SMALL |= {"num_hidden_layers": 1}
_WORDS = {**_SMALL, "vocab_size": 10}


def _transformer(of_name: str, full: Sizes, tiny: Sizes, small: bool, dropout: bool) -> nn.Module:
    """The transformers class with this configuration; tiny: what differs in a small one."""
    import transformers

    kind = getattr(transformers, of_name)
    made: nn.Module = kind(kind.config_class(**(full | tiny if small else full)))
    return made


def _whisper(small: bool, dropout: bool) -> nn.Module:
    full: Sizes = {"d_model": 768, "encoder_layers": 4, "decoder_layers": 2, "dropout": 0.0}
    full |= {f"{part}_attention_heads": 12 for part in ("encoder", "decoder")}
    full |= {f"{part}_ffn_dim": 3072 for part in ("encoder", "decoder")}
    tiny: Sizes = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "max_source_positions": 32,
    }
    tiny |= {"vocab_size": 60, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    tiny |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0}
    whole: Any = _transformer("WhisperForConditionalGeneration", full, tiny, small, dropout)
    encoder: nn.Module = whole.model.encoder
    return encoder


_T5: Sizes = {"d_model": 768, "d_ff": 3072, "num_layers": 4, "num_heads": 12}
_T5 |= {"feed_forward_proj": "gated-gelu"}
_DEBERTA: Sizes = {"num_hidden_layers": 3, "hidden_size": 768, "num_attention_heads": 12}
_DEBERTA |= {"intermediate_size": 3072, "vocab_size": 30000, "relative_attention": True}
_DEBERTA |= {"pos_att_type": ["p2c", "c2p"]}
_WAV2VEC2: Sizes = {"num_hidden_layers": 4, "mask_time_prob": 0.0, "layerdrop": 0.0}
_CLIP: Sizes = {"num_hidden_layers": 4, "hidden_size": 768, "intermediate_size": 3072}
_CLIP |= {"num_attention_heads": 12, "patch_size": 16}
_SWIN: Sizes = {"num_labels": 1000}  # else as Swin-T
_QWEN2_MOE: Sizes = {"hidden_size": 1024, "intermediate_size": 2816, "moe_intermediate_size": 704}
_QWEN2_MOE |= {"shared_expert_intermediate_size": 2816, "num_hidden_layers": 2}
_QWEN2_MOE |= {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 16}
_QWEN2_MOE |= {"num_experts_per_tok": 4, "vocab_size": 20000, "use_cache": False}
_MAMBA2: Sizes = {"hidden_size": 1024, "num_heads": 32, "head_dim": 64, "num_hidden_layers": 2}
_MAMBA2 |= {"vocab_size": 20000, "n_groups": 1, "state_size": 64, "chunk_size": 128}
_MAMBA2 |= {"use_cache": False}
_IMAGES: Sizes = {"input_name": "pixel_values", "small_shape": (3, 32, 32), "tokens": False}
_NO_DROPOUT: Sizes = {f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")}


def _of_transformers() -> list[Net16]:
    def net(
        name: str, make: Callable[[bool, bool], nn.Module], items: int, shape: tuple[int, ...],
        classes: int = 20000, **more: Any,
    ) -> Net16:  # fmt: skip
        return Net16(name, make, dict.fromkeys(STEPS, items), shape, classes, **more)

    def base(
        name: str, of_name: str, full: Sizes, tiny: Sizes, items: int,
        shape: tuple[int, ...], **more: Any,
    ) -> Net16:  # fmt: skip
        """A model without a head."""
        make = partial(_transformer, of_name, full, tiny)
        layers = full.get("num_hidden_layers", full.get("num_layers"))
        return net(name, make, items, shape, labelled=False, said=f"{layers} layers", **more)

    tiny_t5 = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 1, "num_heads": 2}
    tiny_mamba = {**_WORDS, "num_heads": 2, "head_dim": 32, "state_size": 8, "chunk_size": 4}
    tiny_moe = {**_WORDS, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    tiny_moe |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    tiny_waves: Sizes = {"conv_dim": (32,) * 3, "conv_kernel": (10, 3, 3), "conv_stride": (5, 2, 2)}
    tiny_waves |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
    tiny_image = {"image_size": 32, "patch_size": 16}
    tiny_swin: Sizes = {"image_size": 56, "embed_dim": 16, "depths": [2], "num_heads": [2]}
    tiny_swin |= {"num_labels": 10}
    return [
        net(
            "hf_vit_b", partial(big_nets.vit, num_hidden_layers=6), 64, (3, 224, 224), 1000,
            said="6 layers", **_IMAGES,
        ),
        net(
            "bert",
            partial(big_nets.bert, num_hidden_layers=6, attention_probs_dropout_prob=0.0),
            16, (512,), 30522, said="6 layers, no attention dropout",
        ),
        net(
            "gpt2", partial(big_nets.gpt2, n_layer=6, **_NO_DROPOUT), 8, (1024,), 50257,
            causal=True, said="6 layers and head, no dropout",
        ),
        base("t5_encoder", "T5EncoderModel", _T5, {**tiny_t5, "vocab_size": 10}, 16, (512,)),
        base("deberta_v2", "DebertaV2Model", _DEBERTA, _WORDS, 16, (384,)),
        base(
            "wav2vec2", "Wav2Vec2Model", _WAV2VEC2, {**_SMALL, **tiny_waves}, 8, (80000,),
            input_name="input_values", tokens=False, small_shape=(400,),
        ),
        base(
            "mamba2", "Mamba2Model", _MAMBA2, tiny_mamba, 4, (512,), phases=("eval",),
        ),
        net(
            "whisper_encoder", _whisper, 8, (80, 3000), said="4 layers of 768", labelled=False,
            input_name="x", tokens=False, small_shape=(80, 64),
        ),
        base("clip_vit", "CLIPVisionModel", _CLIP, {**_SMALL, **tiny_image}, 64, (3, 224, 224),
             **_IMAGES),
        net(
            "hf_swin_t", partial(_transformer, "SwinForImageClassification", _SWIN, tiny_swin), 64,
            (3, 224, 224), 1000, **{**_IMAGES, "small_shape": (3, 56, 56)},
        ),
        base("dinov2", "Dinov2Model", {"num_hidden_layers": 6}, {**_SMALL, **tiny_image}, 64,
             (3, 224, 224), **_IMAGES),
        net(
            "llama", partial(big_nets.llama, intermediate_size=5632, num_key_value_heads=8),
            4, (1024,), 32000, causal=True, said="4 layers of 2048/5632 and head",
        ),
        net(
            "qwen2_moe", partial(_transformer, "Qwen2MoeForCausalLM", _QWEN2_MOE, tiny_moe),
            4, (1024,), causal=True, said="2 layers of 16 experts and head",
            precisions=dict.fromkeys(STEPS, "bf16"),  # torch multiplies no groups in autocast
        ),
    ]  # fmt: skip


# ---- torchvision and timm -----------------------------------------------------------------------


def _torchvision(name: str, small: bool, dropout: bool) -> nn.Module:
    import torchvision

    inception = {"aux_logits": False, "init_weights": False}
    more: dict[str, Any] = inception if name == "inception_v3" else {}
    classes = 10 if small else 1000
    made: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes, **more)
    return made


class _FrozenNorm(nn.BatchNorm2d):
    """As backbones are fine-tuned for detection: never trained, always in evaluation."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.requires_grad_(False)

    def train(self, mode: bool = True) -> _FrozenNorm:
        return super().train(False)


def _frozen_resnet(small: bool, dropout: bool) -> nn.Module:
    import torchvision

    classes = 10 if small else 1000
    made: nn.Module = torchvision.models.resnet50(num_classes=classes, norm_layer=_FrozenNorm)
    return made


def _plain_frozen_resnet(small: bool, dropout: bool) -> nn.Module:
    """With torchvision's own, which is plain operations, and in autocast makes fp32."""
    import torchvision

    classes, norm = 10 if small else 1000, torchvision.ops.FrozenBatchNorm2d
    made: nn.Module = torchvision.models.resnet50(num_classes=classes, norm_layer=norm)
    return made


def _timm_vit(small: bool, dropout: bool) -> nn.Module:
    import timm

    tiny = {"img_size": 32, "depth": 1, "embed_dim": 32, "num_heads": 2, "num_classes": 10}
    sizes: dict[str, Any] = tiny if small else {"depth": 6}
    made: nn.Module = timm.create_model("vit_base_patch16_224", pretrained=False, **sizes)
    return made


def _of_images() -> list[Net16]:
    def net(name: str, items: int, side: int = 224, small_side: int = 64, **more: Any) -> Net16:
        sizes: dict[str, Any] = {"package": "torchvision", "channels_last": True, **more}
        return Net16(
            name, sizes.pop("make", partial(_torchvision, name)), dict.fromkeys(STEPS, items),
            (3, side, side), 1000, input_name="x", tokens=False,
            small_shape=(3, small_side, small_side), **sizes,
        )  # fmt: skip

    return [
        net("swin_t", 64, channels_last=False),
        net("regnet_y_1_6gf", 128),
        net("resnext50_32x4d", 64),
        net("convnext_tiny", 64),
        net("mobilenet_v3_large", 128),
        net("efficientnet_b0", 64),
        net("resnet50", 128),
        net("frozen_resnet50", 128, make=_frozen_resnet, said="BatchNorms frozen"),
        net("plain_frozen_resnet50", 128, make=_plain_frozen_resnet, said="FrozenBatchNorm2d"),
        net("resnet18", 32),
        net("densenet121", 64),
        net("inception_v3", 64, side=299, small_side=96, said="no auxiliary head"),
        net("vgg16_bn", 64),
        net("vit_b_16", 64, small_side=32, make=big_nets.torchvision_vit, channels_last=False),
        net(
            "timm_vit_b", 64, small_side=32, make=_timm_vit, package="timm", said="6 layers",
            channels_last=False,
        ),
    ]  # fmt: skip


# ---- written here as people write them ----------------------------------------------------------


class Volumes(nn.Module):
    """A 3-D U-Net of three levels: Conv3d, InstanceNorm3d, LeakyReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def pair(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
            found = nn.Sequential()
            for i, o, s in ((inputs, outputs, stride), (outputs, outputs, 1)):
                found.append(nn.Conv3d(i, o, 3, stride=s, padding=1, bias=False))
                found.append(nn.InstanceNorm3d(o, affine=True))
                found.append(nn.LeakyReLU(0.01, inplace=True))
            return found

        self.first, self.second = pair(1, width), pair(width, 2 * width, 2)
        self.third = pair(2 * width, 4 * width, 2)
        self.up = nn.ConvTranspose3d(4 * width, 2 * width, 2, 2)
        self.last = pair(4 * width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.second(self.first(x))
        return self.last(torch.cat([self.up(self.third(skipped)), skipped], 1))


class Dlrm(nn.Module):
    """Dense features and 26 tables; the pairwise products of their vectors (Naumov et al.)."""

    below: Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.bottom, self.top = self._mlp(13, 512, 256, 64), self._mlp(415, 1024, 512, 1)[:-1]
        self.tables = nn.ModuleList(nn.Embedding(rows, 64) for _ in range(26))
        below = torch.tril_indices(27, 27, -1)
        self.register_buffer("below", below, persistent=False)
        self.rows = rows

    @staticmethod
    def _mlp(*widths: int) -> nn.Sequential:
        pairs = pairwise(widths)
        return nn.Sequential(*(m for i, o in pairs for m in (nn.Linear(i, o), nn.ReLU())))

    def forward(self, x: Tensor) -> Tensor:
        dense = self.bottom(x)
        entry = (x[:, 0] * 100).abs().long() % self.rows
        sparse = [table(entry).to(dense.dtype) for table in self.tables]
        vectors = torch.stack([dense, *sparse], 1)
        products = vectors @ vectors.transpose(1, 2)
        pairs = products[:, self.below[0], self.below[1]]
        return self.top(torch.cat([dense, pairs], 1))


class Residual(nn.Module):
    """A diffusion U-Net's block: GroupNorm, silu, 3 × 3, twice."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(groups, width) for width in (inputs, outputs))
        self.convs = nn.ModuleList(
            nn.Conv2d(i, outputs, 3, padding=1) for i in (inputs, outputs)
        )  # fmt: skip
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for norm, conv in zip(self.norms, self.convs):
            y = conv(F.silu(norm(y)))
        return y + self.skip(x)


def _unet_blocks(small: bool, dropout: bool) -> nn.Module:
    width, groups = (16, 4) if small else (320, 32)
    found = nn.Sequential(nn.Conv2d(4, width, 3, padding=1))
    found.append(Residual(width, width, groups))
    for times in (1, 2, 4):
        inputs = width * max(times // 2, 1)
        if times > 1:
            found.append(nn.Conv2d(inputs, inputs, 3, stride=2, padding=1))
        found.append(Residual(inputs, width * times, groups))
        found.append(Residual(width * times, width * times, groups))
    return found


def _of_torch() -> list[Net16]:
    def net(
        name: str, make: Callable[[bool, bool], nn.Module], items: int, shape: tuple[int, ...],
        small_shape: tuple[int, ...], **more: Any,
    ) -> Net16:  # fmt: skip
        return Net16(
            name, make, dict.fromkeys(STEPS, items), shape, 0, input_name="x", tokens=False,
            small_shape=small_shape, labelled=False, package="torch", **more,
        )  # fmt: skip

    return [
        net("dlrm", lambda small, _: Dlrm(50 if small else 1000), 32768, (13,), (13,),
            said="26 tables of 1000 × 64"),
        net("unet3d", lambda small, _: Volumes(4 if small else 32), 2, (1, 96, 96, 96),
            (1, 16, 16, 16), said="3 levels from 32 channels"),
        net("unet_blocks", _unet_blocks, 8, (4, 64, 64), (4, 16, 16), channels_last=True,
            said="320, 640, 1280 channels"),
    ]  # fmt: skip


NETS = {net.name: net for net in (*_of_transformers(), *_of_torch(), *_of_images())}
