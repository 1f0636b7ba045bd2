"""Models as their authors write them: what fuses in each, and that every number stays as good.

The small modules restate, from memory of their source, the order and the spellings that Llama,
OpenFold, Boltz, Qwen2-MoE, diffusers, timm and torchvision use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
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
    error,
    fresh,  # noqa: F401
    fused_compile,
    images,
    sites,
)
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


def test_llama_training_step() -> None:
    _assert_llama_step(_llama())


def test_llama_with_gradient_checkpointing() -> None:
    model = _llama().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _assert_llama_step(model)


def test_llama_inference() -> None:
    model, tokens = _llama().eval(), torch.randint(0, 64, (2, 12))
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        logits = fused_compile(model)(tokens).logits
        assert sites() == {MUL_MUL: LAYERS}
        assert_close_to_exact(
            {"logits": logits}, {"logits": model(tokens).logits}, {"logits": exact(tokens).logits}
        )


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


@pytest.mark.parametrize(
    ("module", "expected", "inputs"), GATES, ids=[case[0].__name__ for case in GATES]
)
def test_gates(module: Any, expected: dict[str, int], inputs: Any) -> None:
    tensors = tuple(t.requires_grad_() for t in inputs())
    assert_same_as_eager(module(), tensors, expected)


# ---- convolutional networks ---------------------------------------------------------------------


class ConvNormScaleAdd(nn.Module):
    """timm MobileNetV4 hybrid: a per-channel layer scale, then the shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.gamma = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.bn(self.conv(x))
        x = x * self.gamma.view(1, -1, 1, 1)
        return x + shortcut


class StochasticDepth(nn.Module):
    """torchvision's and timm's drop path, per sample, after the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        out = self.bn(self.conv(x))
        return out * keep.div(0.8).view(-1, 1, 1, 1) + x


class StochasticDepthInPlace(StochasticDepth):
    """torchvision makes the noise in place, after the norm."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        out = self.bn(self.conv(x))
        noise = torch.empty(len(x), 1, 1, 1).copy_(keep.view(-1, 1, 1, 1))
        noise.div_(0.8)
        return out * noise + x


class SqueezeExcite(nn.Module):
    """timm ResNet with SE: the normed value feeds its own gate, so it has two users."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.fc1, self.fc2 = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.bn(self.conv(x))
        gate = self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True)), inplace=True))
        x = x * gate.sigmoid()
        x += shortcut
        return F.relu(x, inplace=True)


class ExternalGate(nn.Module):
    """A gate [N, C, 1, 1] from elsewhere, multiplied in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.fc(x.mean((2, 3))).sigmoid()[:, :, None, None]
        out = self.bn(self.conv(x))
        out *= gate
        return out


class ConvBNSiLU(nn.Module):
    """ultralytics: an activation in place, no multiplication by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


CONVS = [
    (ConvNormScaleAdd, {CONV: 1}, lambda: (torch.randn(3, 8, 5, 5),)),
    (StochasticDepth, {CONV: 1}, lambda: (torch.randn(3, 8, 5, 5), torch.ones(3))),
    (StochasticDepthInPlace, {CONV: 1}, lambda: (torch.randn(3, 8, 5, 5), torch.ones(3))),
    (SqueezeExcite, {}, lambda: (torch.randn(3, 8, 5, 5),)),
    (ExternalGate, {CONV: 1}, lambda: (torch.randn(3, 8, 5, 5),)),
]


@pytest.mark.each_once
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("module", "expected", "inputs"), CONVS, ids=[case[0].__name__ for case in CONVS]
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_conv_blocks(
    module: Any, expected: dict[str, int], inputs: Any, training: bool, layout: torch.memory_format
) -> None:
    first, *rest = inputs()
    tensors = (first.contiguous(memory_format=layout).requires_grad_(), *rest)
    model = module().to(memory_format=layout).train(training)
    # A bias in front of a training BatchNorm has gradient zero.
    zero = ("grad conv.bias",) if training and model.conv.bias is not None else ()
    assert_same_as_eager(model, tensors, expected, no_bound=zero)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_conv_bn_silu_stays_right(training: bool) -> None:
    """Whatever of it fuses: conv → bn → x·σ(x) is a scale only if the pattern says so."""
    model = ConvBNSiLU().train(training)
    assert_same_as_eager(model, (torch.randn(3, 8, 5, 5, requires_grad=True),), {})


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        identity = self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


def _resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        BasicBlock(8, 8, 1),
        BasicBlock(8, 12, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 10),
    )


def _assert_untouched(model: nn.Module, x: Tensor) -> None:
    """Bit for bit what stock torch.compile with the same inner compiler computes."""
    stock = copy.deepcopy(model)
    value = fused_compile(model)(x)
    expected = torch.compile(stock, backend="aot_eager")(x)
    assert sites() == {}
    assert torch.equal(value, expected)
    value.sum().backward()
    expected.sum().backward()
    for mine, its in zip(model.parameters(), stock.parameters()):
        assert torch.equal(mine.grad, its.grad)
    for mine, its in zip(model.buffers(), stock.buffers()):
        assert torch.equal(mine, its)


@pytest.mark.each_once
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_resnet_has_no_site_and_is_unchanged(training: bool) -> None:
    _assert_untouched(_resnet().train(training), images())


def test_torchvision_resnet18_is_unchanged() -> None:
    torchvision = pytest.importorskip("torchvision")
    _assert_untouched(torchvision.models.resnet18(), torch.randn(2, 3, 32, 32))


def test_timm_resnet_is_unchanged() -> None:
    timm = pytest.importorskip("timm")
    _assert_untouched(timm.create_model("resnet10t", pretrained=False), torch.randn(2, 3, 32, 32))


def test_torchvision_efficientnet_stays_right() -> None:
    """Stochastic depth in training: [N, 1, 1, 1] after the norm, with eager's random numbers.

    At 64 pixels: the last norms of 32 see two values a channel, whose difference is all rounding.
    """
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.efficientnet_b0().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    reference, exact_model = copy.deepcopy(model), copy.deepcopy(model).double()
    x = torch.randn(2, 3, 64, 64)

    def with_seed(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return run(x)

    value, eager = with_seed(fused_compile(model), x), with_seed(reference, x)
    exact = with_seed(exact_model, x.double())
    assert sites()[CONV] > 0
    assert error(value, exact) < 2 * error(eager, exact)
    for mine, its in zip(model.buffers(), reference.buffers()):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-5)


# ---- one of each through Inductor, as a user runs it --------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.mlp, self.norm = ConvNormScaleAdd(), LlamaMLP(), AdaLN()

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        h = self.mlp(self.block(x).mean((2, 3)))
        return self.norm(h, s)


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
