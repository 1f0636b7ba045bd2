"""Models sharded over two ranks, for tests/graph/test_tensor_parallel.py.

They run there against the unsharded model in float64.

As a script, it is one rank: python tests/sharded.py RANK STORE BACKEND INNER CASE…
"""

from __future__ import annotations

import copy
import datetime
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fx_fuser  # noqa: F401  (registers the backend when it is not installed)

MUL, ADD, AUTO = "linear_sigmoid_mul_mul", "linear_sigmoid_mul_add", "auto_linear"
WIDTH, HIDDEN, LENGTH = 8, 24, 4
WHOLE = (Replicate(),)
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def _along(placed: Any) -> tuple[Any, ...]:
    """One placement is that of a mesh of one dimension."""
    return placed if isinstance(placed, tuple) else (placed,)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Free(nn.Module):
    """What a user writes of DTensors: `body(model, x, mesh)`; without a mesh on plain tensors.

    placed: the placement of x.
    """

    def __init__(self, body: Callable[..., Any], placed: Any) -> None:
        super().__init__()
        self.body, self.placed = body, placed
        self.mesh: DeviceMesh | None = None
        self.lin = nn.Linear(WIDTH, HIDDEN)
        self.scale = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is None:
            return self.body(self, x)
        d = DTensor.from_local(x, self.mesh, _along(self.placed), run_check=False)
        return self.body(self, d).to_local()


@dataclass
class Case:
    """make: the unsharded model. place: shards it, in place. fuses: sites by pattern. dim: the
    dimension along which x and y are divided among the ranks; None: each has all. columns: the
    same, of y alone."""

    make: Callable[[], nn.Module]
    place: Callable[[nn.Module, DeviceMesh], object]
    fuses: dict[str, int]
    dim: int | None = None
    columns: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = (2, 4, 6)  # from the second on, its size is dynamic


def _planned(**plan: Any) -> Callable[[nn.Module, DeviceMesh], object]:
    return lambda model, mesh: parallelize_module(model, mesh, plan)


def _placed(**names: Any) -> Callable[[nn.Module, DeviceMesh], object]:
    """name of a parameter → placement; others are replicated."""

    def place(model: nn.Module, mesh: DeviceMesh) -> None:
        def of_module(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for own, value in list(module.named_parameters(recurse=False)):
                placed = _along(names.get(own, Replicate()))
                shard = torch.distributed.tensor.distribute_tensor(value, mesh, placed)
                module.register_parameter(own, nn.Parameter(shard))

        distribute_module(model, mesh, of_module)
        model.mesh = mesh

    return place


def free(
    body: Callable[..., Any], fuses: dict[str, int], placed: Any = None, **kwargs: Any
) -> Case:
    parameters = kwargs.pop("parameters", {})
    place = _placed(**parameters)
    return Case(lambda: Free(body, placed or Replicate()), place, fuses, **kwargs)


COLUMNS = {"weight": Shard(0), "bias": Shard(0)}


def _broadcast(m: Any, x: Any) -> Any:
    return torch.sigmoid(m.lin(x)) * x.mean(-1, keepdim=True) * 2.0


def _scaled(m: Any, x: Any) -> Any:
    return torch.sigmoid(m.lin(x)) * m.scale * 2.0


GATED = {MUL: 1, AUTO: 2}
CASES = {
    "gated": Case(
        Gated, _planned(w1=ColwiseParallel(), w3=ColwiseParallel(), w2=RowwiseParallel()), GATED
    ),
    "gated, saving memory": Case(
        Gated,
        _planned(w1=ColwiseParallel(), w3=ColwiseParallel(), w2=RowwiseParallel()),
        GATED,
        options={"save": "memory"},
    ),
    "gated, of DTensors": Case(
        Gated,
        _planned(
            w1=ColwiseParallel(use_local_output=False),
            w3=ColwiseParallel(use_local_output=False),
            w2=RowwiseParallel(),
        ),
        GATED,
    ),
    "sequence": Case(
        Block,
        _planned(
            norm=SequenceParallel(),
            up=ColwiseParallel(input_layouts=Shard(1)),
            down=RowwiseParallel(output_layouts=Shard(1)),
        ),
        {AUTO: 2},
        dim=1,
    ),
    "block": Case(Block, _planned(up=ColwiseParallel(), down=RowwiseParallel()), {AUTO: 2}),
    "batch": free(_scaled, {MUL: 1}, Shard(0), dim=0),
    # DTensor itself has no such linear in torch 2.11, nor of a dynamic batch
    "sequence of replicas": free(
        _scaled, {MUL: 1}, Shard(1), dim=1, batches=(2,) if TORCH >= (2, 13) else ()
    ),
    "columns with a broadcast factor": free(_broadcast, {MUL: 1}, parameters=COLUMNS, columns=-1),
    "columns with a vector": free(
        _scaled, {MUL: 1}, parameters={**COLUMNS, "scale": Shard(0)}, columns=-1
    ),
    # z alone; DTensor redistributes the factor
    "columns with a replicated vector": free(_scaled, {AUTO: 1}, parameters=COLUMNS, columns=-1),
    "rows with a tail": free(
        lambda m, x: torch.relu(
            m.lin(x) if m.mesh is None else m.lin(x).redistribute(placements=WHOLE)
        ),
        {AUTO: 1},
        Shard(2),
        parameters={"weight": Shard(1)},
        dim=2,
        columns=None,
    ),
}


def mine(value: Tensor, dim: int | None, rank: int) -> Tensor:
    """This rank's part."""
    return value if dim is None else value.chunk(dist.get_world_size(), dim)[rank]


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def near(found: Tensor, exact: Tensor, what: str) -> None:
    """The sums have at most 2 · 4 · HIDDEN terms, taken in another order."""
    eps = torch.finfo(found.dtype).eps
    bound = 8 * HIDDEN * eps * max(exact.norm().item(), 1e-300)
    distance = (found.double() - exact.double()).norm().item()
    assert found.shape == exact.shape and distance <= bound, f"{what}: {distance} > {bound}"


def check(name: str, mesh: DeviceMesh, inner: str, dtype: torch.dtype) -> None:
    """Two sizes of a batch, each with gradients, against the unsharded model."""
    case, rank, device = CASES[name], dist.get_rank(), mesh.device_type
    # Elsewhere fx_fuser has no gemm, and leaves what no named pattern takes.
    fuses_here = device == "cpu" or torch.cuda.get_device_capability() == (9, 0)
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    alone = case.make().to(device, torch.float64)
    model = copy.deepcopy(alone).to(dtype)
    case.place(model, mesh)
    options = {"inner": inner, "cpu_ops": True, "auto": True, "strict": True, "plan": "always"}
    compiled = torch.compile(model, backend="fx_fuser", options={**options, **case.options})
    y_dim = case.columns if case.columns is not None or name.startswith("rows") else case.dim
    for batch in case.batches:
        x = torch.randn(batch, LENGTH, WIDTH, dtype=torch.float64).to(device).requires_grad_()
        y = alone(x)
        dy = torch.randn_like(y)
        alone.zero_grad()
        y.backward(dy)
        local = mine(x.detach(), case.dim, rank).to(dtype, copy=True).requires_grad_()
        found = compiled(local)
        model.zero_grad()
        found.backward(mine(dy, y_dim, rank).to(dtype))
        if batch == case.batches[0] and fuses_here:
            assert dict(counters["fx_fuser"]) == case.fuses, f"{name}: {counters['fx_fuser']}"
        near(found.detach(), mine(y.detach(), y_dim, rank), f"{name}: y")
        near(local.grad, mine(x.grad, case.dim, rank), f"{name}: dx")
        for (own, p), q in zip(model.named_parameters(), alone.parameters()):
            assert (p.grad is None) == (q.grad is None), own
            if p.grad is not None:
                near(whole(p.grad), q.grad, f"{name}: gradient of {own}")


def run(rank: int, store: str, backend: str, inner: str, names: list[str]) -> None:
    on_gpu = backend == "nccl"
    if on_gpu:
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (2,))
    dtype = torch.float32 if on_gpu else torch.float64
    for name in names or CASES:
        check(name, mesh, inner, dtype)
        print(f"{name}: {dict(counters['fx_fuser'])}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])
