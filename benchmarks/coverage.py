"""Which anchors of models in use are fused, and what is in the way of the others:

python -m benchmarks.coverage [NAME …] [--commit HASH]   # default: each whose package is installed

Small random configurations, no downloads, on a CPU with `cpu_ops`, so that every site is taken
that can be. Forward and one training step are judged by the accuracy contract against float64. The
rows go to benchmarks/results/coverage/models.json; `python -m benchmarks.report` puts them into
docs/models.md.
"""

from __future__ import annotations

import argparse
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
from benchmarks.run import commit_here
from fx_fuser.graph.match.grow import AUTO
from fx_fuser.verify.accuracy import PROMISED

PATH = Path("coverage", "models.json")  # in the folder of results
OPTIONS: dict[str, Any] = {"cpu_ops": True, "strict": True, "auto": True, "inner": "aot_eager"}
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """One model. package: where it comes from. make: the module and its inputs, from the imported
    package and a scale: 1 for a small one; widths and lengths grow by that factor."""

    package: str
    make: Callable[[Any, int], tuple[nn.Module, Inputs]]


@dataclass
class Row:
    """anchors: in the graphs. named, grown: fused by a named pattern, or otherwise. left: what
    is in the way of the others → how many. error, eager: of the forward and of the training step
    against float64, fx_fuser's and eager's."""

    model: str
    package: str
    torch: str
    date: str
    commit: str = ""
    anchors: int = 0
    named: int = 0
    grown: int = 0

    left: dict[str, int] = field(default_factory=dict)
    breaks: int = 0
    error: list[float] = field(default_factory=list)
    eager: list[float] = field(default_factory=list)
    failed: str = ""


# ---- the models ---------------------------------------------------------------------------------


def _tokens(scale: int) -> Inputs:
    return {"input_ids": torch.randint(0, 100, (2, 16 * scale))}


def _states(scale: int) -> Inputs:
    """Inputs of diffusers' blocks: image and text tokens, and the embedding of time."""
    return {
        "hidden_states": torch.randn(2, 9 * scale, 32 * scale),
        "encoder_hidden_states": torch.randn(2, 5 * scale, 32 * scale),
        "temb": torch.randn(2, 32 * scale),
    }


def _transformer(name: str, **config: Any) -> Model:
    """The class `name` of transformers, with its configuration's own names."""

    def make(package: Any, scale: int) -> tuple[nn.Module, Inputs]:
        kind = getattr(package, name)
        sizes = {n: v * scale if n in _WIDTHS else v for n, v in config.items()}
        made = kind(kind.config_class(vocab_size=100, **sizes))
        return made, _tokens(scale)

    return Model("transformers", make)


_INNER = {f"{part}intermediate_size" for part in ("", "moe_", "shared_expert_")}
_WIDTHS = {"hidden_size", *_INNER, "head_dim", "d_model", "d_ff", "d_kv", "n_embd"}  # they scale
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


def _vit(package: Any, scale: int) -> tuple[nn.Module, Inputs]:
    config = package.ViTConfig(
        hidden_size=32 * scale,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64 * scale,
        image_size=32,
        patch_size=8,
    )
    return package.ViTModel(config), {"pixel_values": torch.randn(2 * scale, 3, 32, 32)}


def _triangle(package: Any, scale: int) -> tuple[nn.Module, Inputs]:
    esmfold = importlib.import_module("transformers.models.esm.modeling_esmfold")
    width, length = min(scale, 8), 6 * scale
    config = package.EsmConfig(
        vocab_size=33,
        is_folding_model=True,
        esmfold_config={
            "trunk": {
                "sequence_state_dim": 32 * scale,
                "pairwise_state_dim": 16 * width,
                "sequence_head_width": 8 * width,
                "pairwise_head_width": 8 * width,
                "num_blocks": 1,
            }
        },
    )
    block = esmfold.EsmFoldTriangularSelfAttentionBlock(config.esmfold_config.trunk)
    for parameter in block.parameters():  # some begin as zeros, which would hide errors
        nn.init.normal_(parameter, std=0.1)
    return block, {
        "sequence_state": torch.randn(1, length, 32 * scale),
        "pairwise_state": torch.randn(1, length, length, 16 * width),
    }


class AdaLN(nn.Module):
    """Adaptive LayerNorm as Boltz and AlphaFold 3 have it."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.a_norm = nn.LayerNorm(d, elementwise_affine=False)
        self.s_norm = nn.LayerNorm(d, bias=False)
        self.s_scale, self.s_bias = nn.Linear(d, d), nn.Linear(d, d, bias=False)

    def forward(self, a: Tensor, s: Tensor) -> Tensor:
        a, s = self.a_norm(a), self.s_norm(s)
        return torch.sigmoid(self.s_scale(s)) * a + self.s_bias(s)


class TriangleMultiplication(nn.Module):
    """The outgoing triangle multiplication as Boltz and OpenFold have it."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.LayerNorm(d), nn.LayerNorm(d)
        self.p_in, self.g_in = (nn.Linear(d, 2 * d, bias=False) for _ in range(2))
        self.p_out, self.g_out = (nn.Linear(d, d, bias=False) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm_in(x)
        x_in = x
        x = self.p_in(x) * self.g_in(x).sigmoid() * mask.unsqueeze(-1)
        a, b = torch.chunk(x, 2, dim=-1)
        x = torch.einsum("bikd,bjkd->bijd", a, b)
        return self.p_out(self.norm_out(x)) * self.g_out(x_in).sigmoid()


def _ada_ln(_: Any, scale: int) -> tuple[nn.Module, Inputs]:
    states = (torch.randn(2, 9 * scale, 16 * scale) for _ in range(2))
    return AdaLN(16 * scale), dict(zip("as", states))


def _multiplication(_: Any, scale: int) -> tuple[nn.Module, Inputs]:
    width, length = min(scale, 8), 6 * scale
    x = torch.randn(2, length, length, 16 * width)
    return TriangleMultiplication(16 * width), {"x": x, "mask": torch.ones(2, length, length)}


def _flux(package: Any, scale: int) -> tuple[nn.Module, Inputs]:
    flux = importlib.import_module("diffusers.models.transformers.transformer_flux")
    block = flux.FluxTransformerBlock(
        dim=32 * scale, num_attention_heads=2 * scale, attention_head_dim=16
    )
    return block, _states(scale)


def _sd3(package: Any, scale: int) -> tuple[nn.Module, Inputs]:
    attention = importlib.import_module("diffusers.models.attention")
    return attention.JointTransformerBlock(32 * scale, 2 * scale, 16), _states(scale)


def _lumina(package: Any, scale: int) -> tuple[nn.Module, Inputs]:
    attention = importlib.import_module("diffusers.models.attention")
    block = attention.LuminaFeedForward(32 * scale, 64 * scale)
    return block, {"x": torch.randn(2, 9 * scale, 32 * scale)}


def _image_net(package: str, name: str) -> Model:
    """At its own width: the scale gives more and larger images."""

    def make(found: Any, scale: int) -> tuple[nn.Module, Inputs]:
        build = found.create_model if package == "timm" else getattr(found.models, name)
        made = build(*([name] if package == "timm" else []), num_classes=10)
        size = 64 if scale == 1 else 224
        return made, {"x": torch.randn(2 * scale, 3, size, size)}

    return Model(package, make)


def _eva02(package: Any, scale: int) -> tuple[nn.Module, Inputs]:
    eva = importlib.import_module("timm.models.eva")
    made = eva.Eva(
        img_size=32, patch_size=8, embed_dim=32 * scale, depth=2, num_heads=2, num_classes=10,
        mlp_ratio=2, qkv_fused=False, swiglu_mlp=True, use_rot_pos_emb=True,
    )  # fmt: skip
    return made, {"x": torch.randn(2 * scale, 3, 32, 32)}


def _yolo(package: Any, scale: int) -> tuple[nn.Module, Inputs]:
    tasks = importlib.import_module("ultralytics.nn.tasks")
    images = torch.randn(
        min(2 * scale, 16), 3, 64 if scale == 1 else 640, 64 if scale == 1 else 640
    )
    return tasks.DetectionModel("yolo11n.yaml", verbose=False), {"x": images}


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
        experts_implementation="eager",  # the others do not take float64
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
    "AdaLN (as Boltz's)": Model("torch", _ada_ln),
    "triangle multiplication (as Boltz's)": Model("torch", _multiplication),
    "Flux's block": Model("diffusers", _flux),
    "SD3's block": Model("diffusers", _sd3),
    "Lumina's feed-forward": Model("diffusers", _lumina),
    "eva02": Model("timm", _eva02),
    "MobileNetV4": _image_net("timm", "mobilenetv4_conv_small"),
    "EfficientNet-B0": _image_net("timm", "efficientnet_b0"),
    "ResNet-50": _image_net("torchvision", "resnet50"),
    "YOLO11n": Model("ultralytics", _yolo),
}


# ---- one model, examined ------------------------------------------------------------------------


def tensors(result: Any) -> list[Tensor]:
    """The floating tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    parts = result.values() if isinstance(result, Mapping) else result
    if not isinstance(result, (Mapping, tuple, list)):
        return []
    return [tensor for part in parts for tensor in tensors(part)]


def observed(model: nn.Module, run: Callable[..., Any], inputs: Inputs, train: bool) -> Tensor:
    """All outputs, or in training all gradients, as one vector. Dropout repeats."""
    torch.manual_seed(1)
    with torch.set_grad_enabled(train):
        found = tensors(run(**inputs))
    if not train:
        return torch.cat([tensor.double().flatten() for tensor in found])
    model.zero_grad()
    sum((t * torch.linspace(-1, 1, t.numel()).to(t).view_as(t)).sum() for t in found).backward()  # type: ignore[union-attr]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([grad.double().flatten() for grad in grads])


def error(found: Tensor, exact: Tensor) -> float:
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


def made_of(model: Model, scale: int = 1) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    made, inputs = model.make(importlib.import_module(model.package), scale)
    for module in made.modules():  # its mask is not float64
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return made, inputs


def _examine(model: Model, row: Row) -> None:
    made, inputs = made_of(model)
    exact = copy.deepcopy(made).double()
    wide = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    for train in (False, True):
        set_mode(made, train)
        set_mode(exact, train)
        state = copy.deepcopy(made.state_dict())
        truth = observed(exact, exact, wide, train)
        eager = observed(made, made, inputs, train)
        made.load_state_dict(state)
        torch._dynamo.reset()
        fused = observed(
            made, torch.compile(made, backend="fx_fuser", options=OPTIONS), inputs, train
        )
        made.load_state_dict(state)
        row.error.append(error(fused, truth))
        row.eager.append(error(eager, truth))
    set_mode(made, False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {n: v for n, v in OPTIONS.items() if n != "inner"}
    report = fx_fuser.explain(made, train=False, options=options, kwargs=inputs)
    row.breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    row.grown = sum(site.pattern.startswith(AUTO) for site in report.fused)
    row.named = len(report.fused) - row.grown
    sites = {(r.anchor, r.reason) for r in report.refused}
    row.left = dict(Counter(reason for _, reason in sorted(sites)))
    anchors = [site for site in report.left if site.kind in report.others]
    row.left |= Counter(site.reason or f"followed by {site.follows}" for site in anchors)
    row.anchors = len(report.fused) + sum(row.left.values())


def set_mode(model: nn.Module, train: bool) -> None:
    """BatchNorms stay in eval mode: the statistics of two images amplify every rounding."""
    model.train(train)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


# ---- the table ----------------------------------------------------------------------------------


def is_right(row: Row) -> bool:
    """Did it run, with errors of at most README's: 1.5 times eager's, or 4e-7?"""
    return not row.failed and [*map(within, row.error, row.eager)] == [True, True]


def within(found: float, eager: float) -> bool:
    return found <= max(PROMISED.factor[torch.float32] * eager, PROMISED.floor[torch.float32])


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


def main(arguments: list[str]) -> int:
    """Examine these models, and keep the rows of the others."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--commit", default=commit_here() or "", help="if there is no git")
    chosen = parser.parse_args(arguments)
    rows = {row.model: row for row in read()}
    for name in chosen.names or MODELS:
        if importlib.util.find_spec(MODELS[name].package) is None:
            print(f"{name}: skipped, {MODELS[name].package} is not installed")
            continue
        rows[name] = row = examined(name)
        row.commit = chosen.commit
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
