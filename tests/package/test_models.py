"""Models as their authors write them: what fuses in each, and that every number stays as good.

The small modules restate, from memory of their source, the order and the spellings that Llama,
OpenFold, Boltz, Qwen2-MoE, diffusers, timm and torchvision use.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import (
    CONV,
    MUL_ADD,
    MUL_MUL,
    assert_close_to_exact,
    assert_same_as_eager,
    fresh,  # noqa: F401
    fused_compile,
    sites,
)
from test_models_conv import ConvNormScaleAdd
from torch import Tensor, nn

LAYERS = 2


# ---- transformers -------------------------------------------------------------------------------


def _llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _step(model: Any, run: Any, tokens: Tensor) -> dict[str, Tensor | None]:
    out = run(input_ids=tokens, labels=tokens)
    out.loss.backward()
    grads = {f"grad {n}": p.grad for n, p in model.named_parameters()}
    return {"logits": out.logits, "loss": out.loss, **grads}


def _assert_llama_step(model: Any) -> None:
    tokens = torch.randint(0, 64, (2, 12))
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    fused = _step(model, fused_compile(model), tokens)
    assert sites() == {MUL_MUL: LAYERS}
    # Rounding passes through attention, norms and a softmax; the smallest gradients are differences
    # of much larger numbers. Per tensor, eager's own error varies by this factor with the seed.
    assert_close_to_exact(
        fused, _step(eager, eager, tokens), _step(exact, exact, tokens), slack=2.0
    )


@pytest.mark.slow
def test_llama_training_step() -> None:
    _assert_llama_step(_llama())


@pytest.mark.slow
def test_llama_with_gradient_checkpointing() -> None:
    model = _llama().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _assert_llama_step(model)


@pytest.mark.slow
def test_llama_inference() -> None:
    model, tokens = _llama().eval(), torch.randint(0, 64, (2, 12))
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        logits = fused_compile(model)(tokens).logits
        assert sites() == {MUL_MUL: LAYERS}
        assert_close_to_exact(
            {"logits": logits}, {"logits": model(tokens).logits}, {"logits": exact(tokens).logits}
        )


@pytest.mark.slow
def test_llama_generates_the_same_tokens() -> None:
    model = _llama().eval()
    model.config.use_cache = True
    tokens = torch.randint(0, 64, (1, 5))
    expected = model.generate(tokens, max_new_tokens=4, do_sample=False)
    model.forward = fused_compile(model.forward, dynamic=True)
    assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), expected)
    assert sites()[MUL_MUL] >= LAYERS


def _trained(model: Any, folder: Path, backend: str | None = None) -> list[float]:
    """The losses of three steps."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    rows = [{"input_ids": r, "labels": r} for r in torch.randint(0, 64, (8, 12))]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        torch_compile_backend=backend,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        seed=0,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return [h["loss"] for h in trainer.state.log_history if "loss" in h]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["model.compile", "torch_compile_backend"])
def test_the_trainer(how: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = _llama()
    expected = _trained(copy.deepcopy(model), tmp_path)
    if how == "model.compile":
        model.compile(backend="fx_fuser")
        losses = _trained(model, tmp_path)
    else:
        from accelerate.utils import DynamoBackend

        if "FX_FUSER" not in DynamoBackend.__members__:
            pytest.skip("accelerate takes the backends of its own list only")
        losses = _trained(model, tmp_path, "fx_fuser")
    assert sites() == {MUL_MUL: LAYERS}
    assert len(expected) == 3
    assert losses == pytest.approx(expected, rel=1e-4)


# ---- gates on Linear ----------------------------------------------------------------------------


class LlamaMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(8, 12, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(12, 8, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class TriangleMultiplication(nn.Module):
    """OpenFold, ESMFold: two gated projections and a gated output of a pair representation."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.linear_a_p, self.linear_a_g = nn.Linear(8, hidden), nn.Linear(8, hidden)
        self.linear_b_p, self.linear_b_g = nn.Linear(8, hidden), nn.Linear(8, hidden)
        self.linear_g, self.linear_z = nn.Linear(8, 8), nn.Linear(hidden, 8)
        self.layer_norm_in, self.layer_norm_out = nn.LayerNorm(8), nn.LayerNorm(hidden)
        self.sigmoid = nn.Sigmoid()

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        mask = mask.unsqueeze(-1)
        z = self.layer_norm_in(z)
        a = mask
        a = a * self.sigmoid(self.linear_a_g(z))
        a = a * self.linear_a_p(z)
        b = mask
        b = b * self.sigmoid(self.linear_b_g(z))
        b = b * self.linear_b_p(z)
        x = torch.einsum("bikc,bjkc->bijc", a, b)
        x = self.linear_z(self.layer_norm_out(x))
        return x * self.sigmoid(self.linear_g(z))


class ProteinaTriangle(nn.Module):
    """diffusers: the same gate in another order, with a method call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_a_p, self.linear_a_g = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, n: Tensor, mask: Tensor) -> Tensor:
        return self.linear_a_p(n) * self.linear_a_g(n).sigmoid() * mask[..., None]


class AdaLN(nn.Module):
    """Boltz, AlphaFold 3."""

    def __init__(self) -> None:
        super().__init__()
        self.a_norm = nn.LayerNorm(8, elementwise_affine=False, bias=False)
        self.s_norm = nn.LayerNorm(6, bias=False)
        self.s_scale, self.s_bias = nn.Linear(6, 8), nn.Linear(6, 8, bias=False)

    def forward(self, a: Tensor, s: Tensor) -> Tensor:
        a = self.a_norm(a)
        s = self.s_norm(s)
        a = torch.sigmoid(self.s_scale(s)) * a + self.s_bias(s)
        return a


class GatedResidual(nn.Module):
    """esmfold2: the residual comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_gate = nn.Linear(6, 8)

    def forward(self, h: Tensor, s: Tensor, attn_out: Tensor) -> Tensor:
        return h + torch.sigmoid(self.attn_gate(s)) * attn_out


class SharedExpert(nn.Module):
    """qwen2_moe: a one-column gate, broadcast along the row."""

    def __init__(self) -> None:
        super().__init__()
        self.shared_expert, self.shared_expert_gate = LlamaMLP(), nn.Linear(8, 1, bias=False)

    def forward(self, hidden_states: Tensor, final_hidden_states: Tensor) -> Tensor:
        shared_expert_output = self.shared_expert(hidden_states)
        shared_expert_output = (
            F.sigmoid(self.shared_expert_gate(hidden_states)) * shared_expert_output
        )
        return final_hidden_states + shared_expert_output


class GatedAttentionOutput(nn.Module):
    """qwen3_next: one multiplier alone is no pattern; the result must be the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.o_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, attn_output: Tensor) -> Tensor:
        return self.o_proj(attn_output * torch.sigmoid(self.gate(x)))


class QuickGELUMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc1(x)
        return self.fc2(z * torch.sigmoid(1.702 * z))


class GluMlp(nn.Module):
    """timm: both halves come from one Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(x1 * F.silu(x2))


class GRUCell(nn.Module):
    """A hand-written GRU: many sigmoids of sums of Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.ir, self.hr, self.iz, self.hz = (nn.Linear(8, 8) for _ in range(4))
        self.i, self.h = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        r = torch.sigmoid(self.ir(x) + self.hr(h))
        u = torch.sigmoid(self.iz(x) + self.hz(h))
        n = torch.tanh(self.i(x) + r * self.h(h))
        return (1 - u) * n + u * h


class Highway(nn.Module):
    """t·h + (1 − t)·x: the gate has two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.t, self.h = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.sigmoid(self.t(x))
        return t * torch.relu(self.h(x)) + (1.0 - t) * x


def _mask() -> Tensor:
    return (torch.rand(2, 4, 4) > 0.3).float()


GATES = [
    (LlamaMLP, {MUL_MUL: 1}, lambda: (torch.randn(2, 3, 8),)),
    (TriangleMultiplication, {MUL_MUL: 2}, lambda: (torch.randn(2, 4, 4, 8), _mask())),
    (ProteinaTriangle, {MUL_MUL: 1}, lambda: (torch.randn(2, 4, 4, 8), _mask())),
    (AdaLN, {MUL_ADD: 1}, lambda: (torch.randn(2, 3, 8), torch.randn(2, 3, 6))),
    (
        GatedResidual,
        {MUL_ADD: 1},
        lambda: (torch.randn(2, 3, 8), torch.randn(2, 3, 6), torch.randn(2, 3, 8)),
    ),
    (SharedExpert, {MUL_MUL: 1, MUL_ADD: 1}, lambda: (torch.randn(6, 8), torch.randn(6, 8))),
    (GatedAttentionOutput, {}, lambda: (torch.randn(2, 3, 8), torch.randn(2, 3, 8))),
    (QuickGELUMLP, {}, lambda: (torch.randn(2, 3, 8),)),
    (GluMlp, {}, lambda: (torch.randn(2, 3, 8),)),
    (GRUCell, {}, lambda: (torch.randn(3, 8), torch.randn(3, 8))),
    (Highway, {}, lambda: (torch.randn(3, 8),)),
]
FAST = ("LlamaMLP", "TriangleMultiplication", "SharedExpert", "GRUCell")  # the others are like one


@pytest.mark.parametrize(
    ("module", "expected", "inputs"),
    [
        pytest.param(*case, id=name, marks=[] if name in FAST else [pytest.mark.slow])
        for case in GATES
        for name in [case[0].__name__]
    ],
)
def test_gates(module: Any, expected: dict[str, int], inputs: Any) -> None:
    tensors = tuple(t.requires_grad_() for t in inputs())
    assert_same_as_eager(module(), tensors, expected)


# ---- one of each through Inductor, as a user runs it --------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.mlp, self.norm = ConvNormScaleAdd(), LlamaMLP(), AdaLN()

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        h = self.mlp(self.block(x).mean((2, 3)))
        return self.norm(h, s)


@pytest.mark.slow
@pytest.mark.parametrize("cpu_ops", [False, True])
def test_through_inductor(cpu_ops: bool) -> None:
    inputs = torch.randn(3, 8, 5, 5, requires_grad=True), torch.randn(3, 6, requires_grad=True)
    model = Mixed().eval()
    assert_same_as_eager(
        model,
        inputs,
        {MUL_MUL: 1, MUL_ADD: 1, CONV: 1},
        inner="inductor",
        cpu_ops=cpu_ops,
        peers=(torch.compile,),
        slack=2.0,  # a bias has eight gradients: their error is a few roundings', seed by seed
    )
