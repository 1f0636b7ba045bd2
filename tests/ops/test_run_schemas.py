"""What torch 2.11 to 2.15 make of one family of ops for all calls: `run_ops` has its schemas.

The findings are in docs/ops.md. Each is a test here, and holds on both versions; one of what does
not work shows how it fails. Programs of `run` alone need no compiler of C++, so that these are
quick.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import run_ops
import torch
import torch.distributed as dist
from run_ops import INTO, LINEAR, MANY, OUT, RUN, UNDECLARED
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.export import Dim
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def own_cache_entries() -> Iterator[None]:
    """AOTAutograd's cache knows the composite op by its name alone: an older probe's entry would
    call its ops as they were then."""
    with torch.compiler.config.patch(cache_key_tag=Path(run_ops.__file__).read_text()):
        yield


aten = torch.ops.aten
ROOT = Path(__file__).parents[2]
X = torch.randn(8, 4)
LONG = [torch.randn(3, 4) for _ in range(24)]
SUM = " + ".join(f"t{i}" for i in range(24))


def of_linear() -> list[Tensor]:
    return [torch.randn(*s, requires_grad=True) for s in ((3, 4), (5, 4), (5,), (3, 5))]


# ---- the schemas by themselves -------------------------------------------------------------------

_WIDE = torch.zeros(8, 10)
CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "1 tensor": (RUN, ([X], "t0 * 2"), {}),
    "24 tensors": (RUN, (LONG, SUM), {}),
    "one twice": (RUN, ([X, X], "t0 * t1"), {}),
    "not contiguous": (RUN, ([X.t(), torch.randn(8, 16)[::2, ::2]], "t0 * t1"), {}),
    "0-d and empty": (RUN, ([torch.tensor(2.0), torch.randn(0, 4)], "t0 * t1"), {}),
    "sizes": (RUN, ([X], "t0.sum(1, keepdim=True).expand(n0, n1)", [8, 5]), {}),
    "many": (MANY, ([X, X], "(t0 * t1, t0.sum(0), t1.t())"), {}),
    "many of one": (MANY, ([X], "(t0 * 2,)"), {}),
    "into a slice": (INTO, ([X], "t0 * 2"), {"into": [_WIDE[:, 3:7]]}),
    "into two": (INTO, ([X], "(t0.sum(), t0[:0])"), {"into": [X.new_zeros(()), X[:0]]}),
    "into an operand": (INTO, ([X], "t0 + 2"), {"into": [X]}),
    "into nothing": (INTO, ([X], "()"), {"into": []}),
    "into, without tensors": (INTO, ([], "torch.ones(n0, n1)", [8, 10]), {"into": [_WIDE]}),
    "out": (OUT, ([X, X], "t0 * t1"), {"out": [torch.zeros(8, 4)]}),
    "composite": (LINEAR, tuple(of_linear()), {}),
}
_QUICK = ("0-d and empty", "many", "into a slice")


@pytest.mark.parametrize(
    "name", [c if c in _QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CALLS]
)
def test_opcheck(name: str) -> None:
    op, args, kwargs = CALLS[name]
    torch.library.opcheck(op, args, kwargs)


def test_a_call_without_tensors_reaches_no_kernel() -> None:
    """Nothing says on which device it runs. A buffer does, or any tensor of the program."""
    for op in (RUN, MANY):
        with pytest.raises(NotImplementedError, match="no tensor arguments to this function"):
            op([], "torch.ones(n0, n1)", [2, 3])
    buffer = torch.zeros(2, 3)
    INTO([], "torch.ones(n0, n1)", [2, 3], into=[buffer])
    assert bool((buffer == 1).all())


def test_opcheck_finds_a_write_that_is_not_declared() -> None:
    call = ([X], "t0 * 2")
    with pytest.raises(Exception, match="not defined as mutable but was mutated"):
        torch.library.opcheck(
            UNDECLARED, call, {"into": [torch.zeros(8, 4)]}, test_utils="test_schema"
        )


def test_dynamo_takes_no_slice_for_an_argument_that_is_called_out() -> None:
    """Dynamo knows the name `out`, of any op, and refuses a list with a tensor that is not
    contiguous: a graph break, or an error under `fullgraph`, wherever it traces such a graph again.
    Any other name passes."""

    def call(op: Any, name: str) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            wide = x.new_zeros(8, 10)
            op([x], "t0 * 2", **{name: [wide[:, 3:7]]})
            return wide

        return torch.compile(run, backend="aot_eager", fullgraph=True)

    with pytest.raises(Exception, match="non-contiguous `out=` list of tensors"):
        call(OUT, "out")(X)
    assert torch.equal(call(INTO, "into")(X)[:, 3:7], X * 2)


# ---- caches, sizes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said, graphs", [("size", 1), pytest.param("text", 3, marks=pytest.mark.slow)]
)
def test_a_size_in_the_text_is_a_graph_a_batch(said: str, graphs: int) -> None:
    """Among `sizes` one graph serves all; the text is a constant, by which Dynamo specializes."""

    def run(weight: Tensor, x: Tensor) -> Tensor:
        if said == "size":
            return RUN([weight], "t0.expand(n0, 4)", [x.shape[0]])
        return RUN([weight], f"t0.expand({x.shape[0]}, 4)")

    compiled = torch.compile(run, backend="aot_eager", dynamic=True)
    for batch in (3, 5, 7):
        assert compiled(torch.ones(4), torch.ones(batch, 2)).shape == (batch, 4)
    assert counters["stats"]["unique_graphs"] == graphs


def hits() -> dict[str, int]:
    found = {
        "aot hit": counters["aot_autograd"]["autograd_cache_hit"],
        "aot miss": counters["aot_autograd"]["autograd_cache_miss"],
        "hit": counters["inductor"]["fxgraph_cache_hit"],
        "miss": counters["inductor"]["fxgraph_cache_miss"],
    }
    return {name: count for name, count in found.items() if count}


@pytest.mark.slow
def test_caches_have_the_text_in_their_keys() -> None:
    found = []
    with fresh_cache():
        for program in ("t0 * 2", "t0 * 2", "t0 * 3"):
            torch._dynamo.reset()
            counters.clear()
            y = torch.compile(lambda x, program=program: RUN([x], program))(X)
            torch.testing.assert_close(y, X * int(program[-1]))
            found.append(hits())
    assert found == [
        {"aot miss": 1, "miss": 1},
        {"aot hit": 1, "hit": 1},
        {"aot miss": 1, "miss": 1},
    ]


_TRAINS = """
import torch
from run_ops import LINEAR
from test_run_schemas import hits, of_linear
torch.compile(LINEAR)(*of_linear()).sum().backward()
print(hits())
"""


@pytest.mark.slow
def test_another_process_finds_forward_and_backward_in_the_cache(tmp_path: Path) -> None:
    paths = os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    command = [sys.executable, "-c", _TRAINS]
    said = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert said == ["{'aot miss': 1, 'miss': 2}\n", "{'aot hit': 1, 'hit': 2}\n"]


# ---- training ------------------------------------------------------------------------------------


def in_torch(x: Tensor, weight: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    return (x @ weight.t() + bias).sigmoid() * gate


def trained(f: Callable[..., Tensor], tensors: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    y = f(*tensors)
    return [y.detach(), *torch.autograd.grad(y, tensors, dy)]


def in_checkpoint(*tensors: Tensor) -> Tensor:
    y: Tensor = checkpoint(LINEAR, *tensors, use_reentrant=False)
    return y


SETTINGS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "aot_eager": (LINEAR, {"backend": "aot_eager"}),
    "checkpoint, aot_eager": (in_checkpoint, {"backend": "aot_eager", "fullgraph": True}),
    "default": (LINEAR, {}),
    "reduce-overhead": (LINEAR, {"mode": "reduce-overhead"}),  # on a CPU it compiles, no more
    "dynamic": (LINEAR, {"dynamic": True}),
    "checkpoint": (in_checkpoint, {"fullgraph": True}),
}


@pytest.mark.parametrize(
    "name", [s if "eager" in s else pytest.param(s, marks=pytest.mark.slow) for s in SETTINGS]
)
def test_gradients(name: str) -> None:
    f, options = SETTINGS[name]
    tensors, dy = of_linear(), torch.randn(3, 5)
    found = trained(torch.compile(f, **options), tensors, dy)
    torch.testing.assert_close(found, trained(in_torch, tensors, dy))


def test_without_gradients_no_value_is_saved() -> None:
    seen: list[Any] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(n.target for n in gm.graph.nodes if "probe" in str(n.target))
        return gm.forward

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=keep)
    for grads in (True, False):
        with torch.set_grad_enabled(grads):
            torch.compile(LINEAR, backend=backend)(*of_linear())
    assert seen == [MANY, RUN]


@pytest.mark.slow
def test_gradients_by_compiled_autograd() -> None:
    tensors, dy = of_linear(), torch.randn(3, 5)
    y = torch.compile(LINEAR)(*tensors)
    with compiled_autograd._enable(torch.compile(backend="inductor")):
        y.backward(dy)
    found = [y.detach(), *(v.grad for v in tensors)]
    torch.testing.assert_close(found, trained(in_torch, tensors, dy))
    assert counters["compiled_autograd"]["captures"] == 1


# ---- writes into a buffer ------------------------------------------------------------------------

_CALL = re.compile(r"ops\.fx_fuser_probe\.(\w+\.\w+)\(.*?'(.*?)'")


def compiled(f: Callable[..., Any], *inputs: Tensor) -> tuple[Any, list[str], bool]:
    """What the graph returns, the programs in the order of its calls, and does it copy anything?

    A copy is a kernel of C++, since of what stands here nothing else is.
    """
    with torch.no_grad(), fresh_cache():
        y, (code,) = run_and_get_code(torch.compile(f, fullgraph=True), *inputs)
    body = code.partition("def call(")[2].partition("def benchmark_compiled")[0]
    copies = re.search(r"cpp_fused|\.copy_\(|\.clone\(", body) is not None
    return y, [program for _, program in _CALL.findall(body)], copies


def two_slices(x: Tensor) -> Tensor:
    wide = x.new_empty(8, 8)
    INTO([x], "t0 * 2", into=[wide[:, :4]])
    INTO([wide[:, :4]], "t0 + 1", into=[wide[:, 4:]])
    return wide


def one_call(x: Tensor) -> Tensor:
    wide = x.new_empty(8, 8)
    INTO([x], "(t0 * 2, t0 * 2 + 1)", into=[wide[:, :4], wide[:, 4:]])
    return wide


def overlapping(x: Tensor) -> Tensor:
    wide = RUN([x], "torch.zeros(8, 10)")
    INTO([x], "t0 * 2", into=[wide[:, :4]])
    INTO([x], "t0 * 3", into=[wide[:, 2:6]])
    return RUN([wide], "t0 + 1")


@pytest.mark.parametrize(
    "f", [two_slices, *(pytest.param(f, marks=pytest.mark.slow) for f in (one_call, overlapping))]
)
def test_slices_of_a_new_buffer_are_written_in_place(f: Callable[[Tensor], Tensor]) -> None:
    """In order, by AOTAutograd's functional form and Inductor's way back: no copy."""
    y, _, copies = compiled(f, X)
    torch.testing.assert_close(y, f(X))
    assert not copies


@pytest.mark.slow
def test_slices_of_an_input_are_written_in_place() -> None:
    def run(x: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        before = RUN([buffer], "t0 * 5")
        INTO([before, x], "t1 * 2 + t0[:, :4] * 0", into=[buffer[:, 3:7]])
        return before, RUN([buffer], "t0 * 7")

    buffers = torch.ones(8, 10), torch.ones(8, 10)
    found, _, copies = compiled(run, X, buffers[0])
    torch.testing.assert_close(found, run(X, buffers[1]))
    torch.testing.assert_close(*buffers)
    assert not copies


def reads(write: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        buffer = RUN([x], "t0 + 1")
        before = RUN([buffer], "t0 * 3")
        return write(x, buffer), before, RUN([buffer], "t0 * 5")

    return run


def declared(x: Tensor, buffer: Tensor) -> Tensor:
    INTO([x], "t0 * 2", into=[buffer])
    return x


@pytest.mark.slow
def test_a_read_before_the_write_is_right_and_costs_a_copy() -> None:
    """Inductor moves the read behind the write, next to the use of what it makes
    (`reorder_for_locality`); so it copies the buffer."""
    y, order, copies = compiled(reads(declared), X)
    torch.testing.assert_close(y, reads(declared)(X))
    assert order.index("t0 * 2") < order.index("t0 * 3") and copies


def test_a_write_that_is_not_declared_is_reordered_silently() -> None:
    run = reads(lambda x, buffer: UNDECLARED([x], "t0 * 2", into=[buffer]))
    (_, before, after), order, _ = compiled(run, X)
    assert order == ["t0 + 1", "t0 * 2", "t0 * 3", "t0 * 5"]
    torch.testing.assert_close(before, X * 2 * 3)  # right is (X + 1) * 3
    torch.testing.assert_close(after, X * 2 * 5)


@pytest.mark.slow
def test_a_write_that_is_not_declared_is_dropped_where_nothing_reads_its_result() -> None:
    def run(x: Tensor) -> Tensor:
        buffer = RUN([x], "t0 + 1")
        UNDECLARED([x], "t0 * 2", into=[buffer])
        return RUN([buffer], "t0 * 3")

    y, order, _ = compiled(run, X)
    assert order == ["t0 + 1", "t0 * 3"] and torch.equal(y, (X + 1) * 3)


def concatenated(x: Tensor) -> tuple[Tensor, Tensor]:
    parts = [RUN([x], "t0 * 2"), RUN([x], "t0 * 3")]
    y = torch.cat(parts, 1)
    return y, RUN([y], "t0 * 7")


def into_slices(graph: torch.fx.Graph) -> None:
    """cat of calls → calls that write into its slices."""
    (cat,) = (n for n in graph.nodes if n.target is aten.cat.default)
    parts, value = list(cat.args[0]), cat.meta["val"]
    with graph.inserting_before(parts[0]):
        buffer = graph.call_function(aten.empty.memory_format, (list(value.shape),))
    buffer.meta["val"], start = value, 0
    for part in parts:
        stop = start + part.meta["val"].shape[1]
        with graph.inserting_before(part):
            place = graph.call_function(aten.slice.Tensor, (buffer, 1, start, stop))
            place.meta["val"] = value[:, start:stop]
            graph.call_function(INTO, part.args, {"into": [place]}).meta["val"] = None
        start = stop
    cat.replace_all_uses_with(buffer)
    for node in (cat, *parts):
        graph.erase_node(node)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
def test_a_pass_may_put_a_write_into_inductors_graph(place: str) -> None:
    """Behind AOTAutograd, so the graph is no longer functional: Inductor keeps the order by the
    schema."""
    with config.patch({place: into_slices}):
        y, order, copies = compiled(concatenated, X)
    torch.testing.assert_close(y, concatenated(X))
    assert order == ["t0 * 2", "t0 * 3", "t0 * 7"] and not copies


# ---- exported programs ---------------------------------------------------------------------------

TEXT = "v = torch.where(t0 > 0, -inf, t0); v if '\"é\\n {} %d' else t0"


class Calls(nn.Module):
    """A list that is empty, absent sizes, symbols among sizes, an infinity, a list of results,
    writes."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        batch = x.shape[0]
        wide = x.new_empty(batch, 8)
        INTO([x], "t0 * 2", into=[wide[:, :4]])
        INTO([], "torch.ones(n0, 4)", [batch], into=[wide[:, 4:]])
        spread = RUN([x], "t0.sum(1, keepdim=True).expand(n0, n1)", [batch, 7])
        y, total = MANY([x, x], "(t0 * 2, t1.sum(0))")
        (one,) = MANY([x], "(t0 * 3,)")
        return RUN([x], TEXT), wide, spread, y, total, one


def test_a_file_holds_an_exported_program() -> None:
    program = torch.export.export(Calls(), (X,), dynamic_shapes=({0: Dim("batch", min=2)},))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for x in (X, torch.randn(5, 4)):
        torch.testing.assert_close(loaded(x), Calls()(x))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles with g++")
def test_aotinductor_loses_an_empty_list_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`t` arrives as None where it is empty: so a program that is exported has a tensor. Symbols,
    sizes and none, any text (an infinity in it too), results in a list and writes pass. On 2.11 the
    op's TypeError at that None is logged, not raised, and the results are None.
    """
    absent: list[tuple[str, str]] = []

    def evaluated(t: Any, program: str, sizes: Any = None) -> list[Tensor]:
        absent.extend((n, program) for n, v in (("t", t), ("sizes", sizes)) if v is None)
        return in_python(t or (), program, sizes)

    in_python = run_ops.evaluated
    with torch.no_grad():
        program = torch.export.export(Calls(), (X,), dynamic_shapes=({0: Dim("batch", min=2)},))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2")
        )
        loaded = torch._inductor.aoti_load_package(path)
        monkeypatch.setattr(run_ops, "evaluated", evaluated)
        for x in (X, torch.randn(5, 4)):
            absent.clear()
            found = tuple(loaded(x))
            of = {name: {said for n, said in absent if n == name} for name in ("t", "sizes")}
            assert of["t"] == {"torch.ones(n0, 4)"}
            assert of["sizes"] == {TEXT, "t0 * 2", "(t0 * 2, t1.sum(0))", "(t0 * 3,)"}
            torch.testing.assert_close(found, Calls()(x))


# ---- other tensors -------------------------------------------------------------------------------


def test_vmap_refuses_the_kernel_ops_and_loops_over_the_composite_one() -> None:
    for op, more in ((RUN, {}), (MANY, {}), (INTO, {"into": [torch.empty(4)]})):
        with pytest.raises(RuntimeError, match=r"Batching rule not implemented for fx_fuser_probe"):
            torch.func.vmap(lambda x, op=op, more=more: op([x], "t0 * 2", **more))(X)
    _, *rest = (v.detach() for v in of_linear())
    x = torch.randn(2, 3, 4)
    y = torch.func.vmap(lambda x: LINEAR(x, *rest))(x)
    torch.testing.assert_close(y, in_torch(x, *rest))


def test_functorch_refuses_the_gradient() -> None:
    x, *rest = (v.detach() for v in of_linear())
    with pytest.raises(RuntimeError, match="must override the setup_context staticmethod"):
        torch.func.grad(lambda x: LINEAR(x, *rest).sum())(x)


def test_dtensors_have_no_sharding_rule() -> None:
    """And beside a plain tensor they are refused before that."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        x = distribute_tensor(X, init_device_mesh("cpu", (2,)), [Shard(0)])
        for op in (RUN, MANY):
            with pytest.raises(NotImplementedError, match="does not have a sharding strategy"):
                op([x], "t0 * 2")
            with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
                op([x, X], "t0 * t1")
    finally:
        dist.destroy_process_group()
