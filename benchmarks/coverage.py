"""Which anchors of models that people have are fused, and what is in the way of the others:

python -m benchmarks.coverage [NAME …]   # default: every model whose package is installed

Random small configurations, no downloads, on a CPU with `cpu_ops`, so that every site is taken
that can be. Forward and one training step are judged by the accuracy contract against float64. The
rows go to benchmarks/results/coverage/models.json; `python -m benchmarks.report` puts them into
docs/models.md.
"""

from __future__ import annotations

import copy
import datetime
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fx_fuser
from benchmarks.results import FOLDER
from fx_fuser.graph.grow import AUTO
from fx_fuser.verify.accuracy import PROMISED

PATH = Path("coverage", "models.json")  # in the folder of results
OPTIONS: dict[str, Any] = {"cpu_ops": True, "strict": True, "auto": True, "inner": "aot_eager"}
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """One model. package: what it is from. make: the module, and what it is called with, from
    the imported package."""

    package: str
    make: Callable[[Any], tuple[nn.Module, Inputs]]


@dataclass
class Row:
    """anchors: in the graphs. named, grown: those fused by a named pattern, and others. left: what
    is in the way of the others → how many. error, eager: of the forward and of the training step
    against float64, fx_fuser's and eager's."""

    model: str
    package: str
    torch: str
    date: str
    anchors: int = 0
    named: int = 0
    grown: int = 0

    left: dict[str, int] = field(default_factory=dict)
    breaks: int = 0
    error: list[float] = field(default_factory=list)
    eager: list[float] = field(default_factory=list)
    failed: str = ""


# ---- the models ---------------------------------------------------------------------------------


def _tokens() -> Inputs:
    return {"input_ids": torch.randint(0, 100, (2, 16))}


def _transformer(name: str, **config: Any) -> Model:
    """The class `name` of transformers, with what its configuration is called there."""

    def make(package: Any) -> tuple[nn.Module, Inputs]:
        kind = getattr(package, name)
        made = kind(kind.config_class(vocab_size=100, **config))
        return made, _tokens()

    return Model("transformers", make)


_LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _vit(package: Any) -> tuple[nn.Module, Inputs]:
    config = package.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    return package.ViTModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def _triangle(package: Any) -> tuple[nn.Module, Inputs]:
    esmfold = importlib.import_module("transformers.models.esm.modeling_esmfold")
    config = package.EsmConfig(
        vocab_size=33,
        is_folding_model=True,
        esmfold_config={
            "trunk": {
                "sequence_state_dim": 32,
                "pairwise_state_dim": 16,
                "sequence_head_width": 8,
                "pairwise_head_width": 8,
                "num_blocks": 1,
            }
        },
    )
    block = esmfold.EsmFoldTriangularSelfAttentionBlock(config.esmfold_config.trunk)
    for parameter in block.parameters():  # some begin as zeros, and nothing would be seen
        nn.init.normal_(parameter, std=0.1)
    states = {"sequence_state": torch.randn(1, 6, 32), "pairwise_state": torch.randn(1, 6, 6, 16)}
    return block, states


class AdaLN(nn.Module):
    """Adaptive LayerNorm as Boltz and AlphaFold 3 have it."""

    def __init__(self) -> None:
        super().__init__()
        self.a_norm = nn.LayerNorm(16, elementwise_affine=False)
        self.s_norm = nn.LayerNorm(16, bias=False)
        self.s_scale, self.s_bias = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)

    def forward(self, a: Tensor, s: Tensor) -> Tensor:
        a, s = self.a_norm(a), self.s_norm(s)
        return torch.sigmoid(self.s_scale(s)) * a + self.s_bias(s)


class TriangleMultiplication(nn.Module):
    """The outgoing triangle multiplication as Boltz and OpenFold have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.LayerNorm(16), nn.LayerNorm(16)
        self.p_in, self.g_in = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.p_out, self.g_out = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm_in(x)
        x_in = x
        x = self.p_in(x) * self.g_in(x).sigmoid() * mask.unsqueeze(-1)
        a, b = torch.chunk(x, 2, dim=-1)
        x = torch.einsum("bikd,bjkd->bijd", a, b)
        return self.p_out(self.norm_out(x)) * self.g_out(x_in).sigmoid()


def _flux(package: Any) -> tuple[nn.Module, Inputs]:
    flux = importlib.import_module("diffusers.models.transformers.transformer_flux")
    block = flux.FluxTransformerBlock(dim=32, num_attention_heads=2, attention_head_dim=16)
    return block, {
        "hidden_states": torch.randn(2, 9, 32),
        "encoder_hidden_states": torch.randn(2, 5, 32),
        "temb": torch.randn(2, 32),
    }


def _sd3(package: Any) -> tuple[nn.Module, Inputs]:
    attention = importlib.import_module("diffusers.models.attention")
    block = attention.JointTransformerBlock(32, 2, 16)
    return block, {
        "hidden_states": torch.randn(2, 9, 32),
        "encoder_hidden_states": torch.randn(2, 5, 32),
        "temb": torch.randn(2, 32),
    }


def _lumina(package: Any) -> tuple[nn.Module, Inputs]:
    attention = importlib.import_module("diffusers.models.attention")
    return attention.LuminaFeedForward(32, 64), {"x": torch.randn(2, 9, 32)}


def _image_net(package: str, name: str, size: int = 64, **settings: Any) -> Model:
    def make(found: Any) -> tuple[nn.Module, Inputs]:
        build = found.create_model if package == "timm" else getattr(found.models, name)
        made = build(*([name] if package == "timm" else []), num_classes=10, **settings)
        return made, {"x": torch.randn(2, 3, size, size)}

    return Model(package, make)


def _eva02(package: Any) -> tuple[nn.Module, Inputs]:
    eva = importlib.import_module("timm.models.eva")
    made = eva.Eva(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=10,
        mlp_ratio=2, qkv_fused=False, swiglu_mlp=True, use_rot_pos_emb=True,
    )  # fmt: skip
    return made, {"x": torch.randn(2, 3, 32, 32)}


MODELS: dict[str, Model] = {
    "Llama": _transformer("LlamaForCausalLM", **_LLAMA),
    "Mistral": _transformer("MistralForCausalLM", **_LLAMA),
    "Qwen2-MoE": _transformer(
        "Qwen2MoeForCausalLM",
        **_LLAMA,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",  # the others take no float64
    ),
    "Phi-3": _transformer("Phi3ForCausalLM", **_LLAMA),
    "Gemma": _transformer("GemmaForCausalLM", **_LLAMA, head_dim=8),
    "T5 encoder": _transformer(
        "T5EncoderModel", d_model=32, num_layers=2, num_heads=4, d_ff=64, d_kv=8
    ),
    "BERT": _transformer(
        "BertModel",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    ),
    "GPT-2": _transformer(
        "GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "ViT": Model("transformers", _vit),
    "ESMFold's triangle block": Model("transformers", _triangle),
    "AdaLN (as Boltz's)": Model(
        "torch", lambda _: (AdaLN(), {"a": torch.randn(2, 9, 16), "s": torch.randn(2, 9, 16)})
    ),
    "triangle multiplication (as Boltz's)": Model(
        "torch",
        lambda _: (
            TriangleMultiplication(),
            {"x": torch.randn(2, 6, 6, 16), "mask": torch.ones(2, 6, 6)},
        ),
    ),
    "Flux's block": Model("diffusers", _flux),
    "SD3's block": Model("diffusers", _sd3),
    "Lumina's feed-forward": Model("diffusers", _lumina),
    "eva02": Model("timm", _eva02),
    "MobileNetV4": _image_net("timm", "mobilenetv4_conv_small"),
    "EfficientNet-B0": _image_net("timm", "efficientnet_b0"),
    "ResNet-50": _image_net("torchvision", "resnet50"),
}


# ---- what is seen of one ------------------------------------------------------------------------


def _tensors(result: Any) -> list[Tensor]:
    """The floating tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    parts = result.values() if isinstance(result, Mapping) else result
    if not isinstance(result, (Mapping, tuple, list)):
        return []
    return [tensor for part in parts for tensor in _tensors(part)]


def _observed(model: nn.Module, run: Callable[..., Any], inputs: Inputs, train: bool) -> Tensor:
    """All outputs, or in training all gradients, as one vector. Dropout repeats."""
    torch.manual_seed(1)
    with torch.set_grad_enabled(train):
        found = _tensors(run(**inputs))
    if not train:
        return torch.cat([tensor.double().flatten() for tensor in found])
    model.zero_grad()
    sum((t * torch.linspace(-1, 1, t.numel()).to(t).view_as(t)).sum() for t in found).backward()  # type: ignore[union-attr]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([grad.double().flatten() for grad in grads])


def _error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


def examined(name: str) -> Row:
    """One model's row; what raises is in `failed`."""
    model = MODELS[name]
    version = importlib.metadata.version(model.package)
    today = datetime.date.today().isoformat()
    row = Row(name, f"{model.package} {version}", torch.__version__, today)
    try:
        _examine(model, row)
    except Exception as error:
        row.failed = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return row


def _examine(model: Model, row: Row) -> None:
    torch.manual_seed(0)
    made, inputs = model.make(importlib.import_module(model.package))
    for module in made.modules():  # its mask is not float64's
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    exact = copy.deepcopy(made).double()
    wide = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    for train in (False, True):
        _set_mode(made, train)
        _set_mode(exact, train)
        state = copy.deepcopy(made.state_dict())
        truth = _observed(exact, exact, wide, train)
        eager = _observed(made, made, inputs, train)
        made.load_state_dict(state)
        torch._dynamo.reset()
        fused = _observed(
            made, torch.compile(made, backend="fx_fuser", options=OPTIONS), inputs, train
        )
        made.load_state_dict(state)
        row.error.append(_error(fused, truth))
        row.eager.append(_error(eager, truth))
    _set_mode(made, False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {n: v for n, v in OPTIONS.items() if n != "inner"}
    report = fx_fuser.explain(made, train=False, options=options, **inputs)
    row.breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    row.grown = sum(site.pattern.startswith(AUTO) for site in report.fused)
    row.named = len(report.fused) - row.grown
    sites = {(r.anchor, r.reason) for r in report.refused}
    row.left = dict(Counter(reason for _, reason in sorted(sites)))
    row.left |= Counter(site.reason or f"followed by {site.follows}" for site in report.left)
    row.anchors = len(report.fused) + sum(row.left.values())


def _set_mode(model: nn.Module, train: bool) -> None:
    """BatchNorms stay in eval mode: the statistics of two images amplify every rounding."""
    model.train(train)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


# ---- the table ----------------------------------------------------------------------------------


def is_right(row: Row) -> bool:
    """Did it run, with errors of at most README's: 1.5 times eager's, or 4e-7?"""
    factor, floor = PROMISED.factor[torch.float32], PROMISED.floor[torch.float32]
    within = [e <= max(factor * own, floor) for e, own in zip(row.error, row.eager)]
    return not row.failed and within == [True, True]


def table(rows: list[Row]) -> str:
    """The rows as Markdown; empty if there are none."""
    if not rows:
        return ""
    cells = [
        [
            row.model,
            row.package,
            row.anchors,
            row.named,
            row.grown,
            row.failed or "; ".join(f"{n} × {why}" for why, n in row.left.items()) or "none",
            *(f"{e:.1e} ({own:.1e})" for e, own in zip(row.error, row.eager)),
            *[""] * (2 - len(row.error)),
        ]
        for row in rows
    ]
    headers = ["model", "from", "anchors", "by name", "grown", "left, and why"]
    headers += ["error forward (eager's)", "of gradients (eager's)"]
    days, versions = ({getattr(row, name) for row in rows} for name in ("date", "torch"))
    said = f"On a CPU, {' and '.join(sorted(days))}, torch {' and '.join(sorted(versions))}."
    return f"{said}\n\n{tabulate(cells, headers, tablefmt='github', disable_numparse=True)}"


def read(folder: Path = FOLDER) -> list[Row]:
    path = folder / PATH
    return [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []


def main(names: list[str]) -> int:
    """Examine these models, and keep the rows of the others."""
    rows = {row.model: row for row in read()}
    for name in names or MODELS:
        if importlib.util.find_spec(MODELS[name].package) is None:
            print(f"{name}: skipped, {MODELS[name].package} is not installed")
            continue
        rows[name] = row = examined(name)
        print(
            f"{name}: {row.failed or f'{row.named + row.grown} of {row.anchors} fused'}", flush=True
        )
    ordered = [rows[name] for name in MODELS if name in rows]
    path = FOLDER / PATH
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in ordered], indent=1) + "\n")
    print(table(ordered))
    return 0 if all(map(is_right, ordered)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
