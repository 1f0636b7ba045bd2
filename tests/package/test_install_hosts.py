"""Libraries that call `torch.compile` themselves, with Inductor: fx_fuser installed, they fuse."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import MUL, fused
from torch import Tensor, nn
from torch._inductor import config as inductor_config

import fx_fuser

pytestmark = pytest.mark.slow  # each compiles forward and backward by g++
OPTIONS = {"cpu_ops": True, "strict": True, "auto": False}
STEPS = 3


class Net(nn.Module):
    """As transformers call a model: with labels, to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(8, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        z = self.gate(x)
        scores = self.last(z * torch.sigmoid(z) * 2.0).squeeze(-1)
        return {"loss": (scores - labels).square().mean(), "scores": scores}


def rows() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(8), "labels": torch.randn(())} for _ in range(2 * STEPS)]


def loader() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(rows(), batch_size=2)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    # What an earlier run has left in Inductor's caches would be taken, and nothing counted.
    with inductor_config.patch(force_disable_caches=True), fx_fuser.installed(OPTIONS):
        yield


def assert_same_training(train: Callable[[nn.Module, bool], None]) -> None:
    """train(model, compiles): the weights after it are those without a compiler."""
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    train(plain, False)
    assert fused() == {}
    train(model, True)
    assert fused() == {MUL: 1}
    for name, value in plain.state_dict().items():
        assert not torch.equal(value, before[name])
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def test_hugging_face_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")

    def train(model: nn.Module, compiles: bool) -> None:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            torch_compile=compiles,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
        )
        transformers.Trainer(model, arguments, train_dataset=rows()).train()

    assert_same_training(train)


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(model: nn.Module, compiles: bool) -> None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        backend = "inductor" if compiles else "no"
        accelerator = accelerate.Accelerator(cpu=True, dynamo_backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run, optimizer, batches = accelerator.prepare(model, optimizer, loader())
        for batch in batches:
            optimizer.zero_grad()
            accelerator.backward(run(**batch)["loss"])
            optimizer.step()

    assert_same_training(train)


def test_accelerate_with_a_plugin() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    plugin = accelerate.utils.TorchDynamoPlugin(backend="inductor", dynamic=True)
    model = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin).prepare(Net())
    batch = next(iter(loader()))
    found = model(**batch)["scores"]
    assert fused() == {MUL: 1}
    torch.testing.assert_close(found, model._orig_mod(**batch)["scores"])


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="not installed: the extra `hosts`")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(model: nn.Module, compiles: bool) -> None:
        module = Module(model)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=STEPS,
            default_root_dir=str(tmp_path),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(torch.compile(module) if compiles else module, loader())

    assert_same_training(train)
