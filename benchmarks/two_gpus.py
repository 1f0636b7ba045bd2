"""The small nets on two devices of one host against one:  python -m benchmarks.two_gpus

Ten steps of SGD under DistributedDataParallel and under FSDP2 (`fully_shard`), through NCCL; on a
CPU through gloo. It compares how far the parameters moved with the same steps in float64 on one
device: fx_fuser on two devices must be as exact as eager mode is there, with twice its error
allowed. Writes `two_gpus/<gpu>.json`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

import fx_fuser  # noqa: F401  (registers the backend when it is not installed)
from benchmarks import measure, results
from benchmarks.nets import Batch, Net, small_nets
from benchmarks.run import commit_here

WORLD = 2
STEPS = 10
RATE = 0.05
SYSTEMS = ("eager", "fx_fuser")
WAYS = ("one", "ddp", "fsdp")
OPTIONS: dict[str, Any] = {"strict": True, "plan": "always", "cpu_ops": True}


def blocks_of(model: nn.Module) -> nn.Sequential:
    """The blocks that are sharded, and compiled, one by one."""
    found = model.get_submodule("layers" if hasattr(model, "layers") else "blocks")
    assert isinstance(found, nn.Sequential)
    return found


def prepared(model: nn.Module, system: str, way: str) -> Callable[[Tensor], Tensor]:
    """The model as a user would run it. It is changed in place."""
    ours = system == "fx_fuser"
    # On a CPU, where no fused kernel runs, Inductor's C++ would take minutes and show nothing more.
    on_gpu = next(model.parameters()).is_cuda
    options = {**OPTIONS, "inner": "inductor" if on_gpu else "aot_eager"}
    if way == "fsdp":
        for block in blocks_of(model):
            if ours:
                # Blocks of one class share code: sizes that differ would be taken as dynamic.
                block.compile(backend="fx_fuser", dynamic=False, options=options)
            fully_shard(block)
        fully_shard(model)
        return model
    wrapped = DistributedDataParallel(model) if way == "ddp" else model
    if ours:
        wrapped = torch.compile(wrapped, backend="fx_fuser", options=options)  # type: ignore[assignment]
    return wrapped


def shards(batch: Batch, dtype: torch.dtype) -> list[Batch]:
    """Each device's part of a batch."""
    x, wanted = (t.to(dtype) if t.is_floating_point() else t for t in batch)
    return list(zip(x.chunk(WORLD), wanted.chunk(WORLD)))


def moved(
    net: Net, system: str, way: str, rank: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """How far every parameter is from where it began."""
    torch.manual_seed(0)
    model = net.make().to(device, dtype)
    begun = [p.detach().clone() for p in model.parameters()]
    run = prepared(model, system, way)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    generator = torch.Generator(device).manual_seed(0)
    for _ in range(STEPS):
        parts = shards(net.batch(generator), dtype)
        optimiser.zero_grad()
        # One device takes all parts: BatchNorm's statistics are of a part, not of the batch.
        for part in parts if way == "one" else [parts[rank]]:
            loss = net.loss(run, part)
            (loss / WORLD if way == "one" else loss).backward()
        optimiser.step()
    ended = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [(a.detach() - b).double().cpu() for a, b in zip(ended, begun)]


def work(rank: int, small: int, ways: tuple[str, ...], folder: str) -> None:
    """One process: one of two, or the only one."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if ways != ("one",):
        meeting = f"file://{folder}/meeting"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", init_method=meeting, rank=rank, world_size=WORLD
        )
    found: dict[Any, Any] = {}
    with measure.float32_settings("fp32", cudnn_tf32=False):
        for net in small_nets(small):
            if ways == ("one",):
                found[net.name, "exact"] = moved(net, "eager", "one", 0, device, torch.float64), 0
            for way in ways:
                for system in SYSTEMS:
                    torch._dynamo.reset()
                    before = counters["fx_fuser"][net.pattern]
                    delta = moved(net, system, way, rank, device, torch.float32)
                    sites = counters["fx_fuser"][net.pattern] - before
                    found[net.name, way, system] = delta, sites
    if rank == 0:
        torch.save(found, f"{folder}/{'-'.join(ways)}")
    if ways != ("one",):
        dist.destroy_process_group()


def relative(values: list[Tensor], exact: list[Tensor]) -> float:
    difference = tree_map(torch.sub, values, exact)
    norm = [float(torch.cat([t.flatten() for t in v]).norm()) for v in (difference, exact)]
    return norm[0] / norm[1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_gpus")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--results", type=Path, default=results.FOLDER / "two_gpus")
    parser.add_argument("--commit", help="the measured commit, if there is no git")
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and torch.cuda.device_count() < WORLD:
        parser.error(f"this machine has {torch.cuda.device_count()} GPU; two are compared with one")

    small = 4 if args.size == "small" else 1
    found: dict[Any, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count, ways in ((1, ("one",)), (WORLD, ("ddp", "fsdp"))):
            torch.multiprocessing.spawn(work, (small, ways, folder), nprocs=count)
            found |= torch.load(f"{folder}/{'-'.join(ways)}")
    rows, failures = [], []
    for net in small_nets(small):
        exact, _ = found[net.name, "exact"]
        for way in WAYS:
            error = {s: relative(found[net.name, way, s][0], exact) for s in SYSTEMS}
            sites = found[net.name, way, "fx_fuser"][1]
            rows.append({"net": net.name, "way": way, "sites": sites, **error})
            if not error["fx_fuser"] <= 2 * error["eager"]:
                failures.append(f"{net.name} {way}: error {error['fx_fuser']:.1e}")
            # With FSDP only blocks are compiled, and some share their code.
            if sites != net.sites if way != "fsdp" else not sites:
                failures.append(f"{net.name} {way}: {sites} sites were fused")
    print(tabulate(rows, headers="keys", floatfmt=".1e"))
    here = measure.machine(device)
    path = results.path_for(here["gpu"], args.results)
    results.save(path, here, args.commit or commit_here(), rows=rows)
    print(f"wrote {path}")
    return results.verdict(failures)


if __name__ == "__main__":
    sys.exit(main())
