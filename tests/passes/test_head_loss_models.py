"""Heads with their loss in transformers' models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heads import BF16, check, found
from helpers import Program, compiled
from torch import Tensor

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
VOCABULARY = 131
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "use_cache": False,
}  # fmt: skip
MODELS = {
    "LlamaForCausalLM": "LlamaConfig",
    "GemmaForCausalLM": "GemmaConfig",  # whose embedding is its head
    "BertForMaskedLM": "BertConfig",
    "RobertaForMaskedLM": "RobertaConfig",
}


def made(name: str) -> Any:
    own = {"num_key_value_heads": 2, "head_dim": 16} if name == "GemmaForCausalLM" else {}
    config = getattr(transformers, MODELS[name])(**SIZES, **own)
    return getattr(transformers, name)(config).eval()


def loss_of(model: Any, **named: Any) -> Program:
    """Alone: nothing reads the logits."""

    def body(m: Program, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return m.model(tokens, labels=tokens, **named).loss

    return Program(body, model=model)


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 9))


@pytest.mark.parametrize("name", MODELS)
def test_their_losses(name: str) -> None:
    check(loss_of(made(name)), tokens())


def test_of_items_that_are_counted() -> None:
    check(loss_of(made("LlamaForCausalLM"), num_items_in_batch=torch.tensor(13)), tokens())


def test_gpt2() -> None:
    """transformers warns of a type of loss that it does not know, which ends Dynamo's graph."""
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.loss_type = "ForCausalLM"
    check(loss_of(model), tokens())


def test_with_gradient_checkpointing() -> None:
    """Of the body."""
    model = made("LlamaForCausalLM").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check(loss_of(model), tokens())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("counts", [True, False], ids=["both", "loss"])
def test_logits_that_are_returned(name: str, counts: bool) -> None:
    """Of a model that is compiled itself; a gradient comes for them, or for the loss alone."""

    def body(m: Program, ids: Tensor) -> Any:
        with torch.autocast("cpu", BF16):
            made = m.model(ids, labels=ids)
        return made.loss, made.logits

    program = Program(body, model=made(name))
    check(program, tokens(), taken=lambda results: results if counts else results[0])


def test_a_model_compiled_as_it_is() -> None:
    model, ids = made("LlamaForCausalLM"), tokens()
    with torch.autocast("cpu", BF16):
        given = compiled(model, auto=True)(ids, labels=ids)
        plain = model(ids, labels=ids)
    assert type(given) is type(plain) and found() == 1
    assert given.logits.requires_grad and given.logits.stride() == plain.logits.stride()
    torch.testing.assert_close(given.logits, plain.logits, rtol=2.0**-7, atol=2.0**-7)
