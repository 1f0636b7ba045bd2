"""Kernels built by NVRTC and by nvcc, and fx_fuser's share of a first call:

    python -m benchmarks.compilers [--skip-kernels] [--skip-first] [--out docs/compilers.md]

Every kernel runs with the cubins of both compilers in one process, on the same tensors, in turns
with a cleared L2 cache; only the GPU is timed. A first call is that of a model with one Linear
site, in a process that has compiled something else before, with empty caches and then with what
that left. fx_fuser's share is how much longer it takes than `torch.compile(model)`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks import (
    conv_backward_sm90,
    conv_cases,
    conv_sm90,
    harness,
    linear_dense_sm90,
    linear_sm90,
    measure,
    narrow_sm90,
)
from benchmarks.run import commit_here
from benchmarks.sm90 import n_major, relative
from fx_fuser.kernels import base
from fx_fuser.kernels.exact import EXACT_GEMMS
from fx_fuser.kernels.split import MIXED_GEMMS
from fx_fuser.native import compilers, launch, load
from fx_fuser.native.kernel_spec import POINTWISE, KernelSpec
from fx_fuser.planning import timing

CUDA = torch.device("cuda")
COMPILERS = ("nvrtc", "nvcc")
CLOSE = 1.02  # rows beyond it are named


@dataclass(frozen=True)
class Row:
    name: str
    specs: tuple[KernelSpec, ...]
    run: Callable[[], Tensor]  # returns a result that it has just made


def _gemms() -> Iterator[Row]:
    """fp32 gemms, and those with 16-bit operands."""
    for name, example, m, k, n in (
        ("#59 fp32", linear_sm90.SWISH, 128, 32768, 32768),
        ("#70 fp32", linear_sm90.RESIDUAL, 1024, 8192, 8192),
        ("ViT-B up", linear_sm90.IDENTITY, 12608, 768, 3072),
        ("ViT-B down", linear_sm90.SWISH, 12608, 3072, 768),
        ("K = 64", linear_sm90.IDENTITY, 16384, 64, 16384),
    ):
        x, weight = torch.rand(m, k, device=CUDA), torch.randn(n, k, device=CUDA) / k**0.5
        yield Row(name, (example.spec,), partial(linear_sm90.run, example, x, weight))
    x, weight = torch.randn(4096, 2048, device=CUDA), torch.randn(8192, 2048, device=CUDA)
    gemm = partial(linear_sm90.run, linear_sm90.IDENTITY, x, n_major(weight))
    yield Row("N-major weight", (linear_sm90.IDENTITY.spec,), gemm)
    for way in narrow_sm90.WAYS:
        spec = (EXACT_GEMMS if way == "exact" else MIXED_GEMMS)[torch.bfloat16]
        operands = narrow_sm90.cast(way, torch.bfloat16, x, weight)
        gemm = partial(narrow_sm90.by_kernel, way, torch.bfloat16, *operands)
        yield Row(f"{way} bf16", (spec,), gemm)


def _dense() -> Iterator[Row]:
    for name, example, m, k, n, dtype in linear_dense_sm90.TIMED:
        x = torch.rand(m, k, device=CUDA).to(dtype)
        weight = (torch.randn(n, k, device=CUDA) / k**0.5).to(dtype)
        operands = [torch.randn(m, n, device=CUDA, dtype=dtype) for _ in example.operands]
        gemm = partial(linear_dense_sm90.run, example, x, weight, None, operands)
        yield Row(name, (example.spec(dtype),), gemm)


def _convolutions() -> Iterator[Row]:
    """#73, forward and backward, and only the BatchNorm with its tail."""
    for dtype in (torch.float32, torch.bfloat16):
        of_dtype = str(dtype).removeprefix("torch.")
        x = torch.rand(128, 8, 128, 128, device=CUDA).to(dtype)
        weight = (torch.randn(64, 8, 3, 3, device=CUDA) / 8).to(dtype)
        vectors = [torch.rand(64, 1, 1, device=CUDA) + 0.1 for _ in range(4)]
        vectors.append(torch.tensor(2.0, device=CUDA))
        norm = conv_sm90.of_dtype(conv_sm90.NORM, dtype)
        forward = partial(conv_sm90.run, norm, x, weight, conv_cases.NONE, vectors, [1e-5])
        yield Row(f"#73 {of_dtype}", (norm.spec,), forward)
        alone = conv_sm90.of_dtype(conv_sm90.IDENTITY, dtype).spec

        def statistics(x: Tensor = x, weight: Tensor = weight) -> Tensor:
            return conv_sm90.statistics(x, weight)[1]

        yield Row(f"#73 {of_dtype}, statistics", (alone,), statistics)
        dy = torch.randn(128, 64, 126, 126, device=CUDA).to(dtype)
        problem = conv_backward_sm90.Problem(x, weight, dy)
        found, dx = problem.statistics(torch.float32), torch.empty_like(x)
        dweight = torch.empty_like(weight, dtype=torch.float32)

        def backward(
            p: conv_backward_sm90.Problem = problem,
            dx: Tensor = dx,
            dweight: Tensor = dweight,
            found: tuple[Tensor, Tensor] = found,
        ) -> Tensor:
            conv_backward_sm90.run(p, dx, dweight, found)
            return dx

        specs = (conv_backward_sm90.IDENTITY[dtype],)
        yield Row(f"#73 {of_dtype}, backward", specs, backward)

        acc = torch.float32
        spec = base.example(POINTWISE, "BatchNormMul", 1, acc, dtype, dtype, *[acc] * 5)

        def tail(
            spec: KernelSpec = spec, c: Tensor = dy, vectors: list[Tensor] = vectors
        ) -> Tensor:
            out = torch.empty_like(c)
            launch.pointwise(spec, out, [c, *vectors], [1e-5])
            return out

        yield Row(f"#73 {of_dtype}, BatchNorm and mul alone", (spec,), tail)


def _by(compiler: str, specs: list[KernelSpec]) -> dict[str, dict[object, int]]:
    """The kernels that this compiler makes, in the tables where `native` looks for them."""
    os.environ["FX_FUSER_COMPILER"] = compiler
    loaded: dict[str, dict[object, int]] = {"_kernels": {}, "_batch_stats": {}}
    vars(load).update(loaded)
    load.prepare(specs, CUDA)
    load.prepare_batch_stats(CUDA)
    return loaded


def kernels(failures: list[str]) -> str:
    """A table of every row's times, ms."""
    specs = [spec for row in every_row() for spec in row.specs]
    done = harness.progress()
    by = {compiler: _by(compiler, specs) for compiler in COMPILERS}
    done("built")
    table, beyond = [], []
    for row in every_row():

        def run(compiler: str, row: Row = row) -> Tensor:
            vars(load).update(by[compiler])
            return row.run()

        first, second = (run(compiler).clone().double() for compiler in COMPILERS)
        apart = relative(first, second)
        if not apart <= (conv_sm90.ROUNDED[row.run().dtype]):
            failures.append(f"{row.name}: the compilers' results are {apart:.1e} apart")
        del first, second
        took = timing.times_of([timing.Candidate(partial(run, c)) for c in COMPILERS * 2], CUDA)
        times = {c: [took[i].gpu, took[i + 2].gpu] for i, c in enumerate(COMPILERS)}
        ratio = sum(times["nvrtc"]) / sum(times["nvcc"])
        spread = max(max(t) / min(t) for t in times.values())
        if ratio > CLOSE:
            beyond.append(row.name)
        done(f"{row.name}: {ratio:.3f}")
        table.append([row.name, *(min(times[c]) for c in COMPILERS), ratio, spread - 1, apart])
        torch.cuda.empty_cache()
    heads = ["", "NVRTC, ms", "nvcc, ms", "NVRTC / nvcc", "spread of two", "results apart"]
    said = f"Beyond {CLOSE}: {', '.join(beyond) or 'none'}."
    formats = ("", ".4f", ".4f", ".3f", ".3f", ".1e")
    return tabulate(table, heads, tablefmt="github", floatfmt=formats) + f"\n\n{said}"


def every_row() -> Iterator[Row]:
    """Makes its tensors each time: all of them at once would fill a smaller GPU."""
    for rows in (_gemms, _dense, _convolutions):
        torch.manual_seed(0)
        yield from rows()


# ---- the first call ------------------------------------------------------------------------------


class Swish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2048, 4096)

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        return z * torch.sigmoid(z) * 2.0


def first_call(backend: str) -> float:
    """Seconds, in this process, after something else has been compiled and the GPU is in use."""
    model, x = Swish().cuda(), torch.randn(4096, 2048, device=CUDA)
    with torch.no_grad():
        torch.compile(lambda v: F.gelu(v) + 1)(x)
        model(x)
        step = torch.compile(model, backend=backend)
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(x)
        torch.cuda.synchronize()
        return time.perf_counter() - start


def _spawn(backend: str, caches: Path) -> subprocess.Popen[str]:
    environment = os.environ | {
        "FX_FUSER_CACHE_DIR": str(caches / "fx_fuser"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / backend),
    }
    command = [sys.executable, "-m", "benchmarks.compilers", "--child", backend]
    root = Path(__file__).parent.parent
    return subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)


def first_calls(warm: int = 3) -> str:
    """A table; in each line both backends' processes run side by side."""
    times: dict[str, list[list[float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(1 + warm):
            children = [_spawn(name, Path(folder)) for name in ("inductor", "fx_fuser")]
            said = [child.communicate()[0].strip().splitlines() for child in children]
            times["warm" if i else "cold"].append([float(lines[-1]) for lines in said])
    table = []
    for state, found in times.items():
        theirs, ours = (median(column) for column in zip(*found))
        share = median(f - i for i, f in found)
        table.append([state, len(found), theirs, ours, share])
    heads = ["caches", "processes", "Inductor, s", "fx_fuser, s", "fx_fuser's share, s"]
    return tabulate(table, heads, tablefmt="github", floatfmt=".2f")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compilers")
    parser.add_argument("--skip-kernels", action="store_true")
    parser.add_argument("--skip-first", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tables there, too")
    parser.add_argument("--commit", help="the measured commit, if there is no git")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(first_call(chosen.child))
        return 0
    failures: list[str] = []
    here = measure.machine(CUDA)
    of = f"NVRTC: {compilers.nvrtc().version}."
    if not chosen.skip_kernels:
        of += f" nvcc: {' '.join(re.findall('V[0-9.]+', compilers.nvcc().version))}."
    date = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    head = (
        f"{here['gpu']}, driver {here['driver']}, torch {here['torch']}, {date}, "
        f"{chosen.commit or commit_here()}, by `python -m benchmarks.compilers`. "
        f"{of}"
    )
    parts = ["# NVRTC and nvcc, and the first call", head]
    if not chosen.skip_first:
        parts += ["## The first call of one Linear site", first_calls()]
    if not chosen.skip_kernels:
        parts += ["## Kernels", kernels(failures)]
    text = "\n\n".join(parts) + "\n"
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(text)
    return harness.report([text], failures)


if __name__ == "__main__":
    sys.exit(main())
