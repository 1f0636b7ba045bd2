"""What real models ask for is in `fx_fuser.ops.usual`, the list of kernels that wheels bring."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from plan_cases import GPU
from torch import Tensor, nn

from fx_fuser.graph.match.pattern import Fault, Match, Refusal
from fx_fuser.kernels import split
from fx_fuser.kernels.split import SPLIT_GEMM
from fx_fuser.native import binaries, load, store
from fx_fuser.native.kernel_spec import KernelSpec, texts_of
from fx_fuser.ops import usual
from fx_fuser.options import Options
from fx_fuser.passes import products
from fx_fuser.planning import plan

Asked = Callable[[nn.Module, Sequence[Tensor], dict[str, Any], bool], set[str]]


@pytest.fixture
def asked(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The texts that compiling a model asks for, on a Hopper GPU with many idle cores. No site
    gains, and no kernel is compiled."""
    specs: list[KernelSpec] = []

    def leave(matches: Sequence[Match], _: Options) -> list[Refusal]:
        return [Refusal.of(match, Fault(match.root, "not timed")) for match in matches]

    def kernels_for(_: Options, __: Sequence[Any], narrow: Sequence[torch.dtype] = ()) -> Any:
        return {GPU: products._specs(narrow)}

    monkeypatch.setattr(load, "build", lambda wanted, *_: specs.extend(wanted))
    monkeypatch.setattr(load, "_index_of", lambda _: 0)
    monkeypatch.setattr(store, "holds", lambda _: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1000))
    monkeypatch.setattr(split, "is_small", lambda *_: False)  # a model's own sizes are not
    monkeypatch.setattr(plan, "decide", leave)
    monkeypatch.setattr(products, "kernels_for", kernels_for)
    monkeypatch.setattr(products, "pass_for", lambda *_: None)
    monkeypatch.setattr(Options, "inner_compiler", lambda self: lambda gm, inputs: gm.forward)

    def texts_asked(
        model: nn.Module, inputs: Sequence[Tensor], kwargs: dict[str, Any], train: bool
    ) -> set[str]:
        torch._dynamo.reset()
        with torch.set_grad_enabled(train):
            torch.compile(model.train(train), backend="fx_fuser")(*inputs, **kwargs)
        return {text for spec in specs if load.runs_on(spec, GPU) for text in spec.texts}

    return texts_asked


def not_brought(texts: set[str]) -> list[str]:
    return sorted(texts - {*texts_of(usual.specs(binaries.arch_of(GPU)))})


SMALL = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def bert(transformers: Any) -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, intermediate_size=64))


def gpt2(transformers: Any) -> nn.Module:
    config = transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=2)
    config.bos_token_id = config.eos_token_id = None
    return transformers.GPT2LMHeadModel(config)


def llama(transformers: Any) -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, intermediate_size=64)
    return transformers.LlamaForCausalLM(config)


# Of each a tail that only it has here.
TAILS = {bert: "v0 = gelu(c, approximate=none)", gpt2: "v5 = tanh(v4)", llama: "v0 = silu(c)"}


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("make", TAILS, ids=lambda make: make.__name__)
def test_a_language_model_in_fp32_asks_for_usual_kernels(
    asked: Asked, make: Callable[[Any], nn.Module], train: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 100, (2, 8))
    kwargs = {"labels": ids} if train else {}
    texts = asked(make(transformers), [ids], kwargs, train)
    assert {*SPLIT_GEMM.texts} < texts and any(TAILS[make] in text for text in texts)
    assert not_brought(texts) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resnet_asks_for_usual_kernels(asked: Asked, dtype: torch.dtype) -> None:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet50().to(dtype, memory_format=torch.channels_last)
    x = torch.randn(2, 3, 224, 224, dtype=dtype).to(memory_format=torch.channels_last)
    texts = asked(model, [x], {}, False)
    assert any("conv/fold.cuh" in text for text in texts) and not_brought(texts) == []


def test_another_tail_is_not_brought(asked: Asked) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Hardswish(), nn.Linear(8, 8), nn.ReLU())
    missing = not_brought(asked(model, [torch.randn(4, 8)], {}, False))
    assert missing and all("hardswish" in text for text in missing)


@pytest.mark.parametrize("arch", usual.ARCHS)
def test_the_list_is_of_kernels_that_the_architecture_has(arch: str) -> None:
    specs = usual.specs(arch)
    assert len({spec.name for spec in specs}) == len(specs)
    assert {spec.family.arch for spec in specs} == ({None, arch} if arch == "sm_90a" else {None})
    assert {*SPLIT_GEMM.texts} < {*texts_of(specs)}
