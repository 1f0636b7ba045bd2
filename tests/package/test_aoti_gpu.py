"""A packaged program on a CUDA device, in a process that has compiled nothing."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from helpers import MUL, fused
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.cpp_extension import CUDA_HOME

import fx_fuser

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(fx_fuser.__file__).parent.parent
SCRIPT = """
import sys
import torch
import fx_fuser
from fx_fuser.native import load, store

package, values = sys.argv[1:]
run = {}
assert not load._kernels
for x, right in zip(*torch.load(values)):
    y = run(x.cuda()).cpu()
    error = ((y.double() - right).norm() / right.norm()).item()
    assert error < 2e-6, error
print(len(load._kernels), store.builds())
"""
LOADERS = {
    "AOTInductor": "torch._inductor.aoti_load_package(package)",
    "torch.export": "torch.no_grad()(torch.export.load(package).module())",
}


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(1024, 2048), nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> Tensor:
        z = self.lin(x)
        y: Tensor = self.out(z * torch.sigmoid(z) * 2.0).relu()
        return y


@functools.cache
def plain_packages_run() -> bool:
    """Does torch run a package of its own in a new process, without fx_fuser?

    On an H200's host of 2026-11-24 with torch 2.11.0 that process ended with a segmentation fault.
    """
    program = torch.export.export(nn.Linear(8, 8).cuda(), (torch.randn(4, 8, device="cuda"),))
    with tempfile.TemporaryDirectory() as folder:
        package = f"{folder}/plain.pt2"
        torch._inductor.aoti_compile_and_package(program, package_path=package)
        script = f"import torch; torch._inductor.aoti_load_package({package!r})"
        return subprocess.run([sys.executable, "-c", script], cwd=folder).returncode == 0


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("is_cached", [True, False], ids=["kernels kept", "kernels built anew"])
def test_a_package_in_a_new_process(loader: str, is_cached: bool, tmp_path: Path) -> None:
    if loader == "AOTInductor" and CUDA_HOME is None:
        pytest.skip("AOTInductor needs the CUDA toolkit")
    if loader == "AOTInductor" and not plain_packages_run():
        pytest.skip("torch's own packages do not run in a new process here")
    model = Gate().cuda().eval()
    x = torch.randn(512, 1024, device="cuda")
    batch = Dim("batch", min=2, max=4096)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    made = fx_fuser.fuse_exported(program, options={"plan": "always", "strict": True})
    assert fused()[MUL] == 1
    inputs = [torch.randn(rows, 1024) for rows in (512, 300)]
    exact = Gate().double()
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.save((inputs, [exact(given.double()) for given in inputs]), tmp_path / "values")
    package = tmp_path / "model.pt2"
    if loader == "AOTInductor":
        settings = {"comprehensive_padding": False}  # docs/exported.md
        torch._inductor.aoti_compile_and_package(
            made, package_path=str(package), inductor_configs=settings
        )
    else:
        torch.export.save(made, package)

    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if not is_cached:
        env["FX_FUSER_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "-c", SCRIPT.format(LOADERS[loader])]
    done = subprocess.run(
        [*command, str(package), str(tmp_path / "values")],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    kernels, builds = map(int, done.stdout.split())
    assert kernels > 0
    assert (builds > 0) is not is_cached
