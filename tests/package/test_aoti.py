"""fuse_exported: the program's graph, its numbers, what is left; and what runs in a new process.

Its ops by themselves are in test_aoti_ops.py.
"""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exported import export
from helpers import ADD, CONV, MUL, Program, conv_program, fused, linear_program
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves

import fx_fuser
from fx_fuser import exporting
from fx_fuser.errors import FxFuserError, OptionError
from fx_fuser.ops import run as run_op

ROOT = Path(fx_fuser.__file__).parent.parent
OPTIONS = {"cpu_ops": True, "strict": True}
aten = torch.ops.aten


def gate(m: Any, x: Tensor) -> Tensor:
    z = m.lin(x)
    return z * torch.sigmoid(z) * 2.0


def fuse(program: ExportedProgram, **options: Any) -> ExportedProgram:
    return fx_fuser.fuse_exported(program, options={**OPTIONS, **options})


def results(program: ExportedProgram, *inputs: Any) -> Any:
    """On copies of the inputs and of the buffers."""
    module = copy.deepcopy(program.module())
    with torch.no_grad():
        return module(*(x.clone() for x in inputs)), dict(module.named_buffers())


def check(
    program: ExportedProgram, *inputs: Any, fuses: dict[str, int], **options: Any
) -> ExportedProgram:
    """What is fused, all numbers, and that a file can hold it. Returns the fused program."""
    before = str(program)
    made = fuse(program, **options)
    assert fused() == fuses
    assert str(program) == before
    found, right = results(made, *inputs), results(program, *inputs)
    torch.testing.assert_close(found, right)
    assert strides(found) == strides(right)
    assert len(sites(made)) == sum(fuses.values())
    for node in made.graph.nodes:
        assert node.op != "call_method" and "example_value" not in node.meta
        assert node.op in ("output", "get_attr") or "val" in node.meta
    torch.testing.assert_close(results(loaded(made), *inputs), results(program, *inputs))
    return made


def strides(values: Any) -> list[tuple[int, ...]]:
    return [value.stride() for value in tree_leaves(values)]


def loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def sites(program: ExportedProgram) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if str(node.target).startswith("fx_fuser.")]


def form_of(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


class Forms(torch.fx.Interpreter):
    """found: shape and dtype of every operation's result, by the node's name."""

    found: dict[str, Any]

    def run(self, *inputs: Any) -> Any:
        self.found = {}
        return super().run(*inputs)

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function" and isinstance(value, Tensor):
            self.found[n.name] = form_of(value)
        return value


# ---- the program ---------------------------------------------------------------------------------


def test_the_program_shares_all_but_its_graph() -> None:
    model, x = linear_program(gate).eval(), torch.randn(4, 8)
    program = export(model, [x])
    made = check(program, x, fuses={MUL: 1})
    (site,) = sites(made)
    assert site.target is run_op.EXPORTED and run_op.called(site)[0] == "linear_exported"
    assert site.meta["val"].shape == (4, 6)
    assert made.graph_signature.user_outputs == (site.name,)
    assert made.graph_signature.input_specs == program.graph_signature.input_specs
    assert made.state_dict is program.state_dict
    with torch.no_grad():
        model.lin.weight.mul_(3)
    torch.testing.assert_close(results(made, x), results(program, x))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 6)

    def forward(self, input: Tensor, *, max: Tensor) -> Tensor:
        return gate(self, input) * max


def test_inputs_keep_their_names() -> None:
    """A copy of a graph changes those that are names of Python's."""
    x, most = torch.randn(4, 8), torch.randn(6)
    program = torch.export.export(Named().eval(), (x,), {"max": most})
    made = fuse(program)
    assert made.graph_signature.user_inputs == ("input", "max")
    for found in (made, loaded(made)):
        with torch.no_grad():
            torch.testing.assert_close(found.module()(x, max=most), program.module()(x, max=most))


BODIES: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "several outputs": (
        lambda m, x: (gate(m, x), {"x": x + 1, "y": m.bare(x)}),
        {MUL: 1, "auto_linear": 1},
    ),
    "an output twice": (lambda m, x: (lambda y: (y, y, y.view(-1)))(gate(m, x)), {MUL: 1}),
    "one after the other": (lambda m, x: gate(m, F.pad(gate(m, x), (0, 2))), {MUL: 2}),
    "a tail": (lambda m, x: m.lin(x).clamp(min=0.25) * m.p, {"auto_linear": 1}),
    "a number that is infinite": (
        lambda m, x: torch.where(x[:, :6] > 0, m.lin(x), float("-inf")),
        {"auto_linear": 1},
    ),
    "a view in the tail": (
        lambda m, x: m.lin(x).view(-1, 2, 3).transpose(1, 2) * m.w[:3, :2],
        {"auto_linear": 1},
    ),
    "a bias of a view": (
        lambda m, x: m.bare(x).view(-1, 2, 3) + m.b.view(2, 3),
        {"auto_linear": 1},
    ),
    "a sum": (lambda m, x: x[:, :6] + 0.5 * torch.sigmoid(m.lin(x)), {ADD: 1}),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("body, fuses", BODIES.values(), ids=BODIES.keys())
@pytest.mark.each_once
def test_programs(body: Callable[..., Any], fuses: dict[str, int], dynamic: bool) -> None:
    program = export(linear_program(body).eval(), [torch.randn(4, 8)], dynamic)
    check(program, torch.randn(7 if dynamic else 4, 8), fuses=fuses)


def test_a_baddbmm() -> None:
    model = Program(lambda m, r, a, b: torch.sigmoid(torch.baddbmm(r, a, b)))
    inputs = torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    check(export(model, inputs), *inputs, fuses={"auto_bmm": 1})


def test_a_baddbmm_whose_sum_has_another_reader() -> None:
    """The bmm is a call of its own now, and the sum another; each becomes ATen's."""

    def body(m: Any, r: Tensor, a: Tensor, b: Tensor) -> Any:
        y = torch.baddbmm(r, a, b)
        return y, y.relu(), y.sum()

    inputs = torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    check(export(Program(body), inputs), *inputs, fuses={"auto_bmm": 1})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    model, x = linear_program(gate).eval().to(dtype), torch.randn(4, 8, dtype=dtype)
    (site,) = sites(check(export(model, [x]), x, fuses={MUL: 1}))
    assert run_op.called(site)[1][-2:] == [dtype, dtype]


@pytest.mark.slow
def test_after_run_decompositions() -> None:
    model = linear_program(lambda m, x: m.lin(x).view(-1, 2, 3).transpose(1, 2) * m.w[:3, :2])
    x = torch.randn(4, 8)
    program = export(model.eval(), [x], True).run_decompositions()
    made = check(program, x, fuses={"auto_linear": 1})
    torch.testing.assert_close(results(made.run_decompositions(), x), results(program, x))


@pytest.mark.slow
def test_a_convolution_with_norm() -> None:
    model = conv_program(lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    x = torch.randn(2, 4, 8, 9).to(memory_format=torch.channels_last)
    check(export(model.eval(), [x], True), x, fuses={CONV: 1})
    made = fuse(export(model, [x]))
    assert sites(made)[0].meta["val"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
def test_tied_weights_and_buffers_that_are_written() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.s.add_(1)
        return gate(m, x) + gate(m.other, x) * m.s

    other = linear_program(gate)
    model = linear_program(body)
    model.other = other
    other.lin.weight = model.lin.weight
    x = torch.randn(4, 8)
    program = export(model.eval(), [x])
    made = check(program, x, fuses={MUL: 2})
    assert results(made, x)[1]["s"] == 1.75


@pytest.mark.slow
def test_a_region_that_is_compiled_once() -> None:
    region = torch.compiler.nested_compile_region(gate)
    model = linear_program(lambda m, x: region(m, F.pad(region(m, x), (0, 2)))).eval()
    program = torch.export.export(model, (x := torch.randn(4, 8),), strict=True)
    before = str(program)
    made = fuse(program)
    assert fused()[MUL] > 0 and str(program) == before
    torch.testing.assert_close(results(made, x), results(program, x))


def test_a_signature_of_a_module_that_is_fused_with_its_tail() -> None:
    model, x = linear_program(gate).eval(), torch.randn(4, 8)
    program = torch.export.export(model, (x,), preserve_module_call_signature=("lin",))
    made = fuse(program)
    assert [c.fqn for c in program.module_call_graph if c.signature] == ["", "lin"]
    assert [c.fqn for c in made.module_call_graph if c.signature] == [""]


def test_an_autocast_around_the_program() -> None:
    """Which casts what torch's own operations before the site make, and nothing at the site."""
    model = linear_program(lambda m, x: gate(m, x @ x.T @ x))
    x = torch.randn(4, 8)
    program = export(model.eval(), [x])
    module = fuse(program, auto=False).module()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, cast = module(x), x @ x.T @ x
    assert cast.dtype == torch.bfloat16
    torch.testing.assert_close(found, gate(model, cast.float()).detach())


def test_a_val_is_that_of_the_value() -> None:
    """The view moves below the cast, and then has another dtype."""
    model = linear_program(lambda m, x: m.lin(x).relu().view(-1, 2, 3).double() * 2)
    made = fuse(export(model.eval(), [torch.randn(4, 8)]))
    forms = {node.name: form_of(node.meta.get("val")) for node in made.graph.nodes}
    with torch.no_grad():
        seen = Forms(made.module())
        seen.run(torch.randn(4, 8))
    assert len(seen.found) == 2
    assert {name: forms[name] for name in seen.found} == seen.found


def test_no_notes_are_left() -> None:
    program = export(linear_program(gate).eval(), [torch.randn(4, 8)])
    made = fuse(program)
    keys = {*made.graph_module.meta, *(key for node in made.graph.nodes for key in node.meta)}
    keys |= {*program.graph_module.meta, *(k for node in program.graph.nodes for k in node.meta)}
    assert not [key for key in keys if key.startswith("fx_fuser") or key == "example_value"]


# ---- what is left --------------------------------------------------------------------------------


def _written_between(m: Any, x: Tensor) -> Tensor:
    q = x * 2.0
    shown = q.view(-1)
    z = m.lin(q)
    shown.mul_(2.0)
    return z * torch.sigmoid(z) * 2.0 + q.sum()


@pytest.mark.parametrize("from_file", [False, True])
def test_an_operand_is_written_through_a_view(from_file: bool) -> None:
    """A file has each fake tensor apart: nothing there tells that one is a view of another."""
    x = torch.randn(4, 8)
    program = export(linear_program(_written_between).eval(), [x])
    check(loaded(program) if from_file else program, x, fuses={}, auto=False)


def test_a_norm_in_training_is_left() -> None:
    model = conv_program(lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    x = torch.randn(2, 4, 8, 9)
    made = check(export(model.train(), [x]), x, fuses={})
    assert aten.batch_norm.default in {node.target for node in made.graph.nodes}


def test_a_site_on_a_cpu_is_left() -> None:
    program = export(linear_program(gate).eval(), [torch.randn(4, 8)])
    assert fx_fuser.fuse_exported(program) is program
    assert not fused()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"inner": "eager"}, "option 'inner' is for the compiler"),
        ({"mode": "reduce-overhead"}, "option 'mode' is for the compiler"),
        ({"max_autotune": True}, "option 'max_autotune' is for the compiler"),
        ({"verify": "always"}, "option 'verify' is 'always'"),
        ({"cpu_opts": True}, "did you mean 'cpu_ops'"),
    ],
)
def test_options_that_mean_nothing_here(options: dict[str, Any], said: str) -> None:
    program = export(linear_program(gate).eval(), [torch.randn(4, 8)])
    with pytest.raises(OptionError, match=said):
        fx_fuser.fuse_exported(program, options=options)


def test_a_failure_leaves_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    program = export(linear_program(gate).eval(), [torch.randn(4, 8)])
    before = str(program)
    monkeypatch.setattr(exporting, "_rebuilt", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="leaves a graph unfused: ZeroDivisionError"):
        assert fx_fuser.fuse_exported(program, options={"cpu_ops": True}) is program
    assert str(program) == before and not fused()
    with pytest.raises(ZeroDivisionError):
        fuse(program)


def test_a_gradient_raises() -> None:
    model, x = linear_program(gate).eval(), torch.randn(4, 8)
    loss = fuse(export(model, [x])).module()(x).sum()
    with pytest.raises(FxFuserError, match=r"is for inference; run the program under .*no_grad"):
        loss.backward()


# ---- another process -----------------------------------------------------------------------------

AOTI = "torch._inductor.aoti_load_package(path)"
EXPORTED = "torch.export.load(path).module()"


def run(tmp_path: Path, script: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def check_elsewhere(tmp_path: Path, file: Path, load: str, inputs: list[Any], right: Any) -> None:
    """In a process that only imports fx_fuser; and in one that does not."""
    torch.save((inputs, right), tmp_path / "values")
    script = (
        "import sys, torch\n{}\npath, values = sys.argv[1:]\n"
        f"run = {load}\n"
        "with torch.no_grad():\n"
        "    for inputs, right in zip(*torch.load(values)):\n"
        "        torch.testing.assert_close(run(*inputs), right)\n"
    )
    done = run(tmp_path, script.format("import fx_fuser"), file, tmp_path / "values")
    assert done.returncode == 0, done.stderr
    done = run(tmp_path, script.format(""), file, tmp_path / "values")
    assert done.returncode != 0 and "run.import_fx_fuser" in done.stderr


def model_of_all() -> tuple[Program, Tensor, Tensor]:
    def body(m: Any, x: Tensor, image: Tensor) -> Any:
        masked = torch.where(x[:, :6] > 0, m.bare(x), float("-inf"))
        return gate(m, x) * m.s, masked, m.narrow(x.bfloat16()).relu(), m.bn(m.conv(image)) * 2.0

    members = conv_program(body, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))
    model = Program(
        body,
        lin=nn.Linear(8, 6),
        bare=nn.Linear(8, 6, bias=False),
        narrow=nn.Linear(8, 6).bfloat16(),
        conv=members.conv,
        bn=members.bn,
        s=torch.tensor(0.75),
    )
    return model.eval(), torch.randn(4, 8), torch.randn(2, 4, 8, 9)


ALL = {MUL: 1, "auto_linear": 2, CONV: 1}


def exported_model() -> tuple[ExportedProgram, list[Any], list[Any]]:
    """A program with a batch of any size, inputs for two calls, and their results."""
    model, x, image = model_of_all()
    program = torch.export.export(model, (x, image), dynamic_shapes=(({0: Dim("batch")}, None),))
    made = fuse(program)
    assert fused() == ALL
    inputs = [(x, image), (torch.randn(9, 8), image)]
    with torch.no_grad():
        return made, inputs, [model(*given) for given in inputs]


@pytest.mark.slow
def test_a_package_of_aotinductor_in_a_new_process(tmp_path: Path) -> None:
    made, inputs, right = exported_model()
    file = tmp_path / "model.pt2"
    torch._inductor.aoti_compile_and_package(made, package_path=str(file))
    check_elsewhere(tmp_path, file, AOTI, inputs, right)


@pytest.mark.slow
def test_a_file_of_torch_export_in_a_new_process(tmp_path: Path) -> None:
    made, inputs, right = exported_model()
    file = tmp_path / "model.pt2"
    torch.export.save(made, file)
    check_elsewhere(tmp_path, file, EXPORTED, inputs, right)
