"""Tensor parallel: fused sites of DTensors, right on two ranks, and refused without a rule.

The graphs are looked at in this process, as rank 0 of two of which the other is not there. What the
ranks compute together is compared with the unsharded model in two processes (tests/sharded.py).
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import run_together
from helpers import calls, recorded
from sharded import AUTO, CASES, COLUMNS, HIDDEN, MUL, WIDTH, Free, _placed, mine
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import fx_fuser
from fx_fuser.graph.prepare import sharding
from fx_fuser.graph.read.nodes import storages
from fx_fuser.ops.library import argument_names
from fx_fuser.planning import ranks, timing
from fx_fuser.planning.timing import Timing

TESTS = Path(__file__).parents[1]
OPTIONS = {"inner": "aot_eager", "cpu_ops": True, "auto": True, "strict": True}
FAST = ["gated", "sequence", "columns with a broadcast factor", "rows with a tail"]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def on_two_ranks(folder: Path, inner: str, names: list[str], backend: str = "gloo") -> None:
    scripts = []
    for rank in range(2):
        (scripts := [*scripts, folder / f"rank{rank}.py"])[-1].write_text(
            f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
            f"import sharded; sharded.run({rank}, {str(folder / 'store')!r}, {backend!r}, "
            f"{inner!r}, {names!r})\n"
        )
    done = run_together(scripts)
    assert [status for status, _ in done] == [0, 0], "\n".join(said for _, said in done)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks(tmp_path: Path, name: str) -> None:
    on_two_ranks(tmp_path, "aot_eager", [name])


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["inductor", "eager"])
def test_two_ranks_with_other_inner_compilers(tmp_path: Path, inner: str) -> None:
    on_two_ranks(tmp_path, inner, ["gated", "sequence", "rows with a tail"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus(tmp_path: Path) -> None:
    on_two_ranks(tmp_path, "inductor", ["gated", "sequence", "rows with a tail"], "nccl")


@pytest.mark.parametrize("first", [[Timing(2.0, 0.5), Timing(1.0)], None])
def test_ranks_decide_by_the_times_of_the_first(
    monkeypatch: pytest.MonkeyPatch, first: list[Timing] | None
) -> None:
    shared = dist.HashStore()
    monkeypatch.setattr(ranks, "group_store", lambda: shared)
    for name in ("_machine", "_recall", "_remember"):
        monkeypatch.setattr(timing, name, lambda *_: None)
    for own in (first, [Timing(1.0), Timing(2.0)]):
        monkeypatch.setattr(timing, "_known", {})  # each rank is a process
        monkeypatch.setattr(timing, "_measure", lambda *_, own=own: own)
        assert timing.medians(["a site"], list, torch.device("cuda", 0)) == first
    monkeypatch.setattr(ranks, "group_store", lambda: None)
    assert timing.medians(["a site"], list, torch.device("cuda", 0)) == [Timing(1.0), Timing(2.0)]


def test_a_store_that_cannot_share_leaves_each_rank_its_own() -> None:
    class Poor:
        def compare_set(self, *_: str) -> str:
            raise NotImplementedError

    assert ranks.agreed(Poor(), "a site", [(1.0, 0.0)]) == [(1.0, 0.0)]


def test_a_process_alone_shares_nothing() -> None:
    assert ranks.group_store() is None


def test_two_ranks_share_a_store(mesh: DeviceMesh) -> None:
    assert isinstance(ranks.group_store(), dist.Store)


# ---- the graph ---------------------------------------------------------------------------------


def filled(model: nn.Module) -> nn.Module:
    """With values: what rank 0 sends to itself is not there either."""
    with torch.no_grad():
        for p in model.parameters():
            local(p).normal_()
    return model


def sharded(name: str, mesh: DeviceMesh) -> tuple[nn.Module, Tensor]:
    case = CASES[name]
    model = case.make()
    case.place(model, mesh)
    return filled(model), mine(torch.randn(2, 4, WIDTH), case.dim, 0)


def placed(value: Any) -> Any:
    return value.placements if isinstance(value, DTensor) else None


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def compare(model: nn.Module, x: Tensor, gathers: bool = False, **options: Any) -> None:
    """With stock torch.compile: placements of all gradients, and values unless the other rank's,
    which are not there, come in."""
    seen = []
    for backend, given in (("aot_eager", None), ("fx_fuser", {**OPTIONS, **options})):
        torch._dynamo.reset()
        run, own = copy.deepcopy(model), x.clone().requires_grad_(x.requires_grad)
        y = torch.compile(run, backend=backend, fullgraph=True, options=given)(own)
        if y.requires_grad:
            (local(y) * torch.arange(local(y).numel()).reshape(local(y).shape)).sum().backward()
        seen.append([y.detach(), own.grad, *(p.grad for p in run.parameters())])
    for theirs, ours in zip(*seen):
        assert placed(theirs) == placed(ours)
        assert theirs is None or local(theirs).shape == local(ours).shape
        if not gathers and theirs is not None:
            torch.testing.assert_close(local(ours), local(theirs))


@pytest.mark.each_once
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name, case in CASES.items()
        if case.batches
    ],
)
def test_graph(mesh: DeviceMesh, name: str) -> None:
    model, x = sharded(name, mesh)
    compare(model, x.requires_grad_(), gathers="sequence" in name, **CASES[name].options)
    assert dict(counters["fx_fuser"]) == CASES[name].fuses


@pytest.mark.slow
def test_a_mesh_of_two_dimensions(mesh: DeviceMesh) -> None:
    columns = {name: (Replicate(), Shard(0)) for name in ("weight", "bias", "scale")}
    both = init_device_mesh("cpu", (1, 2))
    model = Free(CASES["batch"].make().body, (Shard(0), Replicate()))  # type: ignore[union-attr, arg-type]
    _placed(**columns)(model, both)
    compare(filled(model), rows_of("").requires_grad_())
    assert dict(counters["fx_fuser"]) == {MUL: 1}


def test_sizes_are_those_of_the_shards(mesh: DeviceMesh) -> None:
    model, x = sharded("gated", mesh)
    report = fx_fuser.explain(model, x, options={"cpu_ops": True})
    weights = [site.shapes["weight"] for site in report.fused]
    assert weights == [f"[{HIDDEN // 2}, {WIDTH}]"] * 2 + [f"[{WIDTH}, {HIDDEN // 2}]"]
    assert report.fused[0].operands["weight"] == "self.w1.weight"


@pytest.mark.slow
def test_what_is_not_fused_is_as_written(mesh: DeviceMesh) -> None:
    """One site is fused, and a factor of it comes from another Linear, which is not."""
    model, x = sharded("gated", mesh)
    options = {**OPTIONS, "auto": False}
    with recorded() as plain:
        torch.compile(model, backend="fx_fuser", options={**options, "patterns": []})(x)
    torch._dynamo.reset()
    with recorded() as graphs:
        torch.compile(model, backend="fx_fuser", options=options)(x)
    assert dict(counters["fx_fuser"]) == {MUL: 1}
    before, after = calls(plain), calls(graphs)
    prefix = "prim_" * ("prim_to_local" in before)  # in torch 2.11
    gone = ["linear", "silu", "mul", f"{prefix}redistribute", f"{prefix}to_local"]
    made = ["to_local"] * 3 + ["fx_fuser::linear", "getitem"]  # of x, weight and bias; the fused op
    assert after == before - Counter(gone) + Counter(made)


def test_a_dtensor_lies_in_the_memory_of_its_shard(mesh: DeviceMesh) -> None:
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in "xyz"]
    whole = DTensor.from_local(shard := torch.ones(2), mesh, (Shard(0),), run_check=False)
    for node, value in zip(nodes, (shard, whole, torch.ones(2))):
        node.meta["example_value"] = value
    x, y, z = (storages((node,)) for node in nodes)
    assert x == y != z


def test_a_whole_is_remade_with_its_strides(mesh: DeviceMesh) -> None:
    shard = torch.ones(2, 3)
    for stride, remade in (((3, 1), True), ((1, 4), False)):
        whole = DTensor.from_local(
            shard, mesh, (Shard(0),), run_check=False, shape=torch.Size((4, 3)), stride=stride
        )
        assert sharding._is_remade(whole) is remade


# ---- refused -----------------------------------------------------------------------------------


def no_grad(m: Any, x: Any) -> Any:
    z = m.lin(x)
    with torch.no_grad():
        fixed = z.to_local()
    return z * DTensor.from_local(torch.relu(fixed), m.mesh, (Shard(2),), run_check=False)


def written(m: Any, x: Any) -> Any:
    z = m.lin(x)
    x.add_(1.0)
    return torch.sigmoid(z) * m.scale * 2.0


def other_gradient(m: Any, x: Any) -> Any:
    z = m.lin(x).to_local(grad_placements=(Partial(),))  # by default replicated
    return DTensor.from_local(torch.relu(z), m.mesh, (Shard(0),), run_check=False)


def uneven(mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 15), nn.ReLU())
    return parallelize_module(model, mesh, {"0": ColwiseParallel()})


def of(body: Callable[..., Any], where: Any = None, **parameters: Any) -> Callable[..., Any]:
    def make(mesh: DeviceMesh) -> nn.Module:
        model = Free(body, where or Replicate())
        _placed(**parameters)(model, mesh)
        return model

    return make


def relu(m: Any, x: Any) -> Any:
    return torch.relu(m.lin(x))


NARROW = "x by K"  # the names of models whose x has half of the columns begin so
# name → model, what `explain` says of its Linear
REFUSED: dict[str, tuple[Callable[[DeviceMesh], nn.Module], str]] = {
    "uneven": (uneven, "is not divided evenly"),
    "x in parts": (of(relu, Partial()), r"x \(Partial\(sum\),\), weight \(Replicate\(\),\)"),
    "weight by K": (of(relu, None, weight=Shard(1)), "no rule for these placements"),
    "x by K, weight whole": (of(relu, Shard(2)), "no rule for these placements"),
    "x by K, another gradient": (
        of(other_gradient, Shard(2), weight=Shard(1)),
        "reads its summands",
    ),
    "all whole": (of(relu), "no rule for these placements"),
    "in place": (of(lambda m, x: m.lin(x).relu_(), None, **COLUMNS), "writes to the memory"),
    "x is written": (of(written, Shard(0)), "writes to the memory"),
    "matmul": (of(lambda m, x: x @ m.lin.weight.t()), "no rule for matmul"),
    "bmm": (of(lambda m, x: torch.bmm(x, x.mT)), "no rule for bmm"),
}


def rows_of(name: str) -> Tensor:
    return torch.randn(2, 4, WIDTH // 2 if name.startswith(NARROW) else WIDTH)


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("name", REFUSED)
def test_refused(mesh: DeviceMesh, name: str) -> None:
    make, reason = REFUSED[name]
    model, x = filled(make(mesh)), rows_of(name)
    with torch.set_grad_enabled(name != "x is written"):  # which is an error in backward
        compare(model, x)
        assert not counters["fx_fuser"]
        torch._dynamo.reset()
        report = fx_fuser.explain(model, x, options={"cpu_ops": True})
    (miss,) = report.refused
    assert "is a DTensor, not a plain tensor, and " in miss.reason
    assert re.search(reason, miss.reason), miss.reason


@pytest.mark.slow
def test_to_local_without_gradients(mesh: DeviceMesh) -> None:
    """z's gradient does not come through it."""
    model = filled(of(no_grad, None, **COLUMNS)(mesh))
    compare(model, rows_of(""))
    assert dict(counters["fx_fuser"]) == {AUTO: 1}


@pytest.mark.slow
def test_a_dtensor_that_is_returned(mesh: DeviceMesh) -> None:
    plan = ColwiseParallel(use_local_output=False)
    model = filled(parallelize_module(nn.Linear(WIDTH, HIDDEN), mesh, plan))
    x = rows_of("")
    y = torch.compile(model, backend="fx_fuser", options=OPTIONS)(x)
    assert dict(counters["fx_fuser"]) == {AUTO: 1} and y.placements == (Shard(2),)
    y.to_local().sum().backward()
    ours = {name: p.grad.to_local() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.testing.assert_close(y.to_local(), (exact := model(x)).to_local())
    exact.to_local().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(ours[name], p.grad.to_local())


# Of these z alone is fused, and what follows stays as it is.
ALONE: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    "another placement": of(
        lambda m, x: torch.relu(m.lin(x).redistribute(placements=(Replicate(),))), None, **COLUMNS
    ),
    "no gradient asked for": of(lambda m, x: m.lin(x).detach(), None, **COLUMNS),
    "a factor placed otherwise": of(lambda m, x: m.lin(x) * m.scale, None, **COLUMNS),
    "a number as a plain tensor": of(lambda m, x: m.lin(x) * torch.tensor(2.0), None, **COLUMNS),
    "no pointwise operation": of(lambda m, x: m.lin(x).sum(0), None, **COLUMNS),
}


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("name", ALONE)
def test_alone(mesh: DeviceMesh, name: str) -> None:
    model, x = filled(ALONE[name](mesh)), rows_of(name)
    with recorded() as graphs:
        compare(model, x, gathers=name == "another placement")
    assert dict(counters["fx_fuser"]) == {AUTO: 1}
    (op,) = [n for n in graphs[-1].graph.nodes if n.target is torch.ops.fx_fuser.linear.default]
    assert op.args[argument_names("linear").index("again") + 1] == ""  # the epilogue
