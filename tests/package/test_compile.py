"""However torch.compile is called, in as many threads and processes, the model stays the user's."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from compare import (
    ALL_THREE,
    CPU_OPS,
    MUL_ADD,
    MUL_MUL,
    ThreePatterns,
    assert_close_to_exact,
    assert_same_as_eager,
    copied,
    double,
    error,
    fresh,  # noqa: F401
    fused_compile,
    images,
    observe,
    sites,
)
from test_training import Swish
from torch import Tensor, nn

CHECKOUT = Path(__file__).resolve().parents[2]
needs_inductor = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor on a CPU needs g++, which is not on PATH"
)
in_checkout = pytest.mark.skipif(
    not (CHECKOUT / "fx_fuser").exists(),
    reason="these are the tests alone, of an installed package",
)
NAMED = {name: value for name, value in CPU_OPS.items() if name != "inner"}


# ---- ways to call torch.compile -----------------------------------------------------------------


@pytest.mark.slow
def test_dynamic_shapes_compile_once() -> None:
    model = ThreePatterns().eval()
    compiled = fused_compile(model, dynamic=True)
    for count in (4, 7, 3):
        x = images(count)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-6, atol=1e-6)
    assert sites() == ALL_THREE


@pytest.mark.slow
def test_batch_sizes_turn_dynamic_by_themselves() -> None:
    model = ThreePatterns()
    compiled = fused_compile(model)
    for count in (4, 7, 3, 9, 5):
        compiled(images(count)).sum().backward()
    assert sites() == dict.fromkeys(ALL_THREE, 2)  # the first size, then any size


def test_a_plain_function() -> None:
    def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(x @ gate.t()) * (x @ up.t())

    tensors = [torch.randn(*s, requires_grad=True) for s in ((3, 6), (5, 6), (5, 6))]
    value = fused_compile(swiglu)(*tensors)
    assert sites() == {MUL_MUL: 1}
    expected = swiglu(*(t.double() for t in tensors))
    assert error(value, expected) < 4e-7
    grads = torch.autograd.grad(value.sum(), tensors)
    for grad, true in zip(grads, torch.autograd.grad(expected.sum(), tensors)):
        assert error(grad, true) < 4e-7


class Broken(nn.Module):
    """Two graphs with one pattern each, and one whose anchor and epilogue are torn apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.torn = Swish(6, 6), Swish(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        z = self.torn(self.second(x))
        torch._dynamo.graph_break()
        return z * torch.sigmoid(z) * 2.0


@pytest.mark.slow
def test_graph_breaks() -> None:
    assert_same_as_eager(Broken(), (torch.randn(3, 6, requires_grad=True),), {MUL_MUL: 2})


@pytest.mark.slow
def test_fullgraph() -> None:
    model, x = ThreePatterns(), images()
    expected = copy.deepcopy(model)(x)
    compiled = torch.compile(model, backend="fx_fuser", fullgraph=True, options=CPU_OPS)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-6, atol=1e-6)
    assert sites() == ALL_THREE
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(Broken(), backend="fx_fuser", fullgraph=True, options=CPU_OPS)(torch.ones(6))


@pytest.mark.slow
@pytest.mark.each_once
@needs_inductor
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"mode": "reduce-overhead"}, marks=pytest.mark.slow),
        {"options": {"mode": "reduce-overhead", **NAMED}},
        pytest.param({"options": {"epilogue_fusion": False, **NAMED}}, marks=pytest.mark.slow),
        pytest.param({"dynamic": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_inductor_takes_it(how: dict[str, Any]) -> None:
    model, x = ThreePatterns(conv_bias=False), images().requires_grad_()
    reference, exact, others = copy.deepcopy(model), double(model), (copied(x), double(x))
    stock, its_input = copy.deepcopy(model), copied(x)
    seen = observe(model, torch.compile(model, backend="fx_fuser", **how), (x,), True)
    assert sites() == ALL_THREE
    assert_close_to_exact(
        seen,
        observe(reference, reference, others[:1], True),
        observe(exact, exact, others[1:], True),
        peers=[observe(stock, torch.compile(stock), (its_input,), True)],
        slack=2.0,  # tens of values: their error is a few roundings', seed by seed
    )


@pytest.mark.slow
def test_two_threads_compile_at_once() -> None:
    models = [ThreePatterns().eval() for _ in range(2)]
    x = images()
    results: dict[int, Tensor] = {}
    start = threading.Barrier(2)

    def work(i: int) -> None:
        start.wait()
        results[i] = fused_compile(models[i])(x)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, model in enumerate(models):
        torch.testing.assert_close(results[i], model(x), rtol=1e-6, atol=1e-6)
    assert sites() == dict.fromkeys(ALL_THREE, 2)


@pytest.mark.slow
def test_compiled_autograd() -> None:
    model, x = ThreePatterns(conv_bias=False), images()
    reference = copy.deepcopy(model)
    compiled = fused_compile(model)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        compiled(x).square().sum().backward()
    reference(x).square().sum().backward()
    assert sites() == ALL_THREE
    for mine, its in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-5, atol=1e-6)


# ---- the model itself stays the user's ----------------------------------------------------------


def _through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, _through_pickle, pytest.param(_through_a_file, marks=pytest.mark.slow)],
)
def test_the_model_can_be_copied(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model, x = ThreePatterns().eval(), images()
    value = fused_compile(model)(x)
    other = duplicate(model)
    assert torch.equal(other(x), model(x))
    torch.testing.assert_close(fused_compile(other)(x), value, rtol=0, atol=0)
    assert torch.equal(copy.deepcopy(fused_compile(model))(x), value)


@pytest.mark.slow
def test_export_is_unaffected() -> None:
    model, x = ThreePatterns().eval(), images()
    value = fused_compile(model)(x)
    exported = torch.export.export(model, (x,))
    targets = {str(n.target) for n in exported.graph.nodes}
    assert "aten.sigmoid.default" in targets and not any("fx_fuser" in t for t in targets)
    torch.testing.assert_close(exported.module()(x), value, rtol=1e-6, atol=1e-6)


def test_hooks_still_run() -> None:
    model, x = Swish(), torch.randn(3, 6, requires_grad=True)
    seen: list[tuple[int, ...]] = []
    model.linear.weight.register_hook(lambda g: seen.append(tuple(g.shape)))
    model.linear.register_forward_hook(lambda module, args, z: z * 3.0)
    reference = copy.deepcopy(model)
    fused_compile(model)(x).sum().backward()
    reference(copied(x)).sum().backward()
    assert (5, 6) in seen
    torch.testing.assert_close(
        model.linear.weight.grad, reference.linear.weight.grad, rtol=1e-6, atol=1e-6
    )


# ---- several processes --------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _distributed_step(rank: int, port: int, kind: str, out: str) -> None:
    """One optimiser step of ThreePatterns on two ranks, each with its own half of the batch."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    model = ThreePatterns(conv_bias=False).eval()
    x = torch.randn(4, 3, 6, 6).chunk(2)[rank]
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        wrapped = torch.distributed.fsdp.fully_shard(model)
    run = fused_compile(wrapped)
    run(x).square().mean().backward()
    count = {"sites": torch.tensor(sum(sites().values()))}
    grads = {n: p.grad for n, p in model.named_parameters()}
    whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
    if rank == 0:
        torch.save(whole | count, out)
    torch.distributed.barrier()
    # No destructors: DDP's Reducer joins gloo's threads with the GIL held, which they may wait for
    # (seen once, torch 2.13; the process then never ends).
    os._exit(0)


@pytest.mark.slow  # DDP: in one process in tests/verify/test_verify.py and in README
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_on_gloo(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "grads.pt"
    mp.spawn(_distributed_step, args=(_free_port(), kind, str(out)), nprocs=2)
    grads = torch.load(out)
    torch.manual_seed(0)
    model = ThreePatterns(conv_bias=False).eval()
    model(torch.randn(4, 3, 6, 6)).square().mean().backward()
    assert grads.pop("sites") == 3
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-6, msg=name)


# ---- the backend's name -------------------------------------------------------------------------

_USE = """
    import torch
    z = torch.nn.Linear(4, 4)
    f = lambda x: (lambda y: y * torch.sigmoid(y) * 2.0)(z(x))
    with torch.no_grad():
        torch.compile(f, backend="fx_fuser", options={"inner": "eager", "strict": True})(
            torch.ones(2, 4)
        )
    print(torch._dynamo.utils.counters["fx_fuser"]["linear_sigmoid_mul_mul"])
"""


def _run(program: str, cwd: Path, *paths: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@in_checkout
def test_installed_it_needs_no_import(tmp_path: Path) -> None:
    """The metadata of an installation, and nothing else, makes the name known to torch.compile."""
    info = tmp_path / "fx_fuser-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fx_fuser\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[torch_dynamo_backends]\nfx_fuser = fx_fuser.backend:fx_fuser\n"
    )
    os.symlink(CHECKOUT / "fx_fuser", tmp_path / "fx_fuser")
    assert _run(_USE, tmp_path, tmp_path) == "1"


@pytest.mark.slow  # as every test does it
@in_checkout
def test_from_a_checkout_after_the_import(tmp_path: Path) -> None:
    assert _run("import fx_fuser\n" + textwrap.dedent(_USE), tmp_path, CHECKOUT) == "1"


def test_the_entry_point_in_pyproject_is_the_one_tested() -> None:
    text = (CHECKOUT / "pyproject.toml").read_text()
    section = text.partition("[project.entry-points.torch_dynamo_backends]\n")[2]
    assert section.startswith('fx_fuser = "fx_fuser.backend:fx_fuser"\n')


@pytest.mark.slow
@needs_inductor
def test_the_default_path_never_warns() -> None:
    """torch.compile(model, backend="fx_fuser") as a user first types it."""
    model, x = Swish(), torch.randn(3, 6)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fx_fuser")
        value = torch.compile(model, backend="fx_fuser")(x)
    assert sites() == {MUL_MUL: 1}
    torch.testing.assert_close(value, model(x), rtol=1e-6, atol=1e-6)
    assert MUL_ADD not in sites()
