"""The CUDA text of every op against torch: its formulas compiled for the host, and on a GPU.

The host's library functions differ from the device's, so that on the host only the formula is
tested: what becomes of infinities, NaN, zeros and values near a threshold.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulator
import pytest
import torch
from epilogues import ATTRS, FORMS, every_step
from toolchains import needs_compilers
from torch import Tensor

from fx_fuser.graph.epilogue import Epilogue, Step, evaluate, kernel_spec
from fx_fuser.graph.read.operations import OPS
from fx_fuser.kernels.split import LINEAR_SPLIT
from fx_fuser.native import binaries, launch, load
from fx_fuser.native.kernel_spec import CUDA_TYPES, POINTWISE, Family, KernelSpec

needs_host = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ONLY_ON_GPU = ("gelu",)  # in float32: torch's on a CPU is oneDNN's
# For these, a CPU's vector and scalar code differ in the sign of a zero.
EITHER_ZERO = ("softshrink", "hardshrink", "addcmul")
FLOOR = {torch.float32: 4e-7, torch.float64: 1e-15}  # of the accuracy contract
STEPS = {str(step): step for op in OPS for step in every_step(op)}


def _specials(dtype: torch.dtype) -> Tensor:
    ends, inf = torch.finfo(dtype), float("inf")
    near = [0.5, 0.1, 1.0, 3.0, 6.0, 20.0, 88.0, 89.0, 104.0, 710.0, 745.0, 1.5, 2.0, 1e-3, 1e-8]
    large = [1e4, 1e10, 1e20, ends.max, ends.max / 6, ends.max / 4, ends.tiny, ends.smallest_normal]
    some = [*near, *large, 2 * ends.tiny, 1e38, 0.0, inf]
    return torch.tensor([*some, *(-v for v in some), float("nan")], dtype=dtype)


def _values(step: Step, dtype: torch.dtype) -> dict[str, Any]:
    """The leaves' tensors, in which specials meet specials, then ordinary values; and numbers."""
    generator = torch.Generator().manual_seed(5)
    specials, found = _specials(dtype), dict[str, Any]()
    for place, name in enumerate(a for a in step.args if a is not None):
        if name[0] == "s":
            found[name] = 0.37 * int(name[1:]) - 0.3
            continue
        mixed = specials
        if place:  # z's stay where they are
            mixed = specials[torch.randint(len(specials), specials.shape, generator=generator)]
        plain = torch.randn(1000, generator=generator, dtype=torch.float64) * 3
        found[name] = torch.cat([mixed, plain.to(dtype)])
    return found


def _spec(step: Step, dtype: torch.dtype, family: Family = POINTWISE) -> KernelSpec:
    tensors = {a: dtype for a in dict.fromkeys(step.args) if a is not None and a[0] != "s"}
    numbers = [a for a in step.args if a is not None and a[0] == "s"]
    return kernel_spec(Epilogue((step,)), tensors, numbers, dtype, family, dtype)


def _check(step: Step, found: Tensor, values: dict[str, Any], count: int) -> None:
    """Specials as in eager, all else by the accuracy contract. count: of specials.

    Where eager flushes subnormals or overflows in between, the exact value is right, too.
    """
    epilogue = Epilogue((step,))
    eager = evaluate(epilogue, values)
    # On the CPU: torch's hardswish in float64 multiplies by a sixth in float32 on CUDA.
    wide = {n: v.cpu().double() if n[0] != "s" else v for n, v in values.items()}
    exact = evaluate(epilogue, wide).to(found.device)
    odd = ~eager.isfinite() | ~exact.to(found.dtype).isfinite() | (eager == 0)
    same = (found == eager) | (found.isnan() & eager.isnan())
    if found.is_cuda or step.op not in EITHER_ZERO:
        same &= (found != 0) | (found.signbit() == eager.signbit())
    tiny = torch.finfo(found.dtype).smallest_normal
    near = (found.double() - exact).abs() <= torch.maximum(
        1e-6 * exact.abs(), exact.new_tensor(tiny)
    )
    bad = (odd & ~same & ~(near & exact.isfinite())).nonzero().flatten().tolist()
    shown = {n: v[bad[:3]] if n[0] != "s" else v for n, v in values.items()} if bad else {}
    assert not bad, f"{step} of {shown}: {found[bad[:3]]}, eager {eager[bad[:3]]}"
    for part in (slice(None, count), slice(count, None)):
        kept = ~odd[part] & found[part].isfinite()
        truth = exact[part][kept]
        # Specials one by one: in a norm, one would outweigh the rest.
        size = truth.abs() if part.stop else truth.norm()
        mine, theirs = ((v[part][kept].double() - truth) for v in (found, eager))
        off, of_eager = (v.abs() if part.stop else v.norm() for v in (mine, theirs))
        floor = FLOOR[found.dtype] * size + tiny * 1e-6
        assert (off <= torch.maximum(1.5 * of_eager, floor)).all(), f"{step}: {off}, {of_eager}"


# ---- compiled for the host -----------------------------------------------------------------------

_PRELUDE = '#include "prelude.h"\n#include "common/epilogue_math.cuh"'
_FUNCTION = """
extern "C" void {name}(const {acc}* const* in, const {acc}* scalar, {acc}* out, long count) {{
  for (long i = 0; i < count; ++i) {{
    {acc} values[{inputs}];
    for (int j = 0; j < {inputs}; ++j) values[j] = in[j][i];
    out[i] = fx_fuser::{functor}()(values, *reinterpret_cast<const {acc}(*)[{scalars}]>(scalar));
  }}
}}
"""
DTYPES = (torch.float32, torch.float64)
CASES = [(text, d) for text, s in STEPS.items() for d in DTYPES]


def _on_host(dtype: torch.dtype) -> list[str]:
    return [t for t, s in STEPS.items() if s.op not in ONLY_ON_GPU or dtype == torch.float64]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """All functors in one library."""
    folder: Path = tmp_path_factory.mktemp("epilogue_math")
    names: dict[tuple[str, torch.dtype], str] = {}
    lines = [_PRELUDE]
    for dtype in DTYPES:
        for text in _on_host(dtype):
            spec, name = _spec(STEPS[text], dtype), f"op_{len(names)}"
            names[text, dtype] = name
            lines.append(spec.definition.replace("struct Epilogue", f"struct Functor_{name}"))
            lines.append(
                _FUNCTION.format(
                    name=name, acc=CUDA_TYPES[dtype], functor=f"Functor_{name}",
                    inputs=len(spec.inputs), scalars=max(spec.scalars, 1),
                )
            )  # fmt: skip
    (folder / "ops.cpp").write_text("\n".join(lines))
    folders = (emulator.HERE / "device", emulator.HERE, binaries.KERNELS)
    include = [f"-I{path}" for path in folders]
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", *include]
    subprocess.run([*command, "ops.cpp", "-o", "ops.so"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "ops.so"))

    def call(text: str, dtype: torch.dtype, out: Tensor, inputs: list[Tensor], s: Tensor) -> None:
        pointers = (ctypes.c_void_p * len(inputs))(*(t.data_ptr() for t in inputs))
        function = getattr(library, names[text, dtype])
        function(pointers, ctypes.c_void_p(s.data_ptr()), ctypes.c_void_p(out.data_ptr()),
                 ctypes.c_long(out.numel()))  # fmt: skip

    yield call


@needs_host
@pytest.mark.parametrize("text, dtype", [(t, d) for d in DTYPES for t in _on_host(d)], ids=str)
def test_a_formula_is_torchs(text: str, dtype: torch.dtype, host: Callable[..., None]) -> None:
    step, spec = STEPS[text], _spec(STEPS[text], dtype)
    values = _values(step, dtype)
    tensors = [v for v in values.values() if isinstance(v, Tensor)]
    numbers = torch.tensor([v for n, v in values.items() if n[0] == "s"] or [0.0], dtype=dtype)
    assert len(tensors) == len(spec.inputs)
    out = torch.full_like(tensors[0], 7.0)
    host(text, dtype, out, tensors, numbers)
    _check(step, out, values, len(_specials(dtype)))


def test_every_form_of_every_op_is_among_them() -> None:
    assert {s.op for s in STEPS.values()} == OPS.keys()
    for op in OPS:
        lengths = {len(s.args) for s in STEPS.values() if s.op == op}
        assert lengths == {len(form) for form in FORMS[op]}
        for name, options in ATTRS.get(op, {}).items():
            assert {dict(s.attrs)[name] for s in STEPS.values() if s.op == op} == {*options}


# ---- compiled by nvcc ----------------------------------------------------------------------------


def _all_at_once(dtype: torch.dtype) -> KernelSpec:
    """One kernel with a step of each op, and their sum."""
    steps: list[Step] = []
    for op in OPS:
        step = next(every_step(op))
        args = tuple(a if a is None or a[0] == "s" else "z" for a in step.args)
        steps.append(Step(op, args, step.attrs))
    computed = Epilogue(tuple(steps)).as_computed(dtype)
    assert {step.op for step in steps} - {step.op for step in computed.steps} <= {
        "identity",
        "cast",
    }
    made = kernel_spec(computed, {"z": dtype}, ["s0", "s1"], dtype, acc=dtype)
    assert computed.text in made.definition
    count = len(computed.steps)
    total = " + ".join(f"v{i}" for i in range(count))
    definition = made.definition.replace(f"return v{count - 1};", f"return {total};")
    assert total in definition
    return KernelSpec(made.family, made.functor, definition, 2, dtype, dtype, (dtype,))


@pytest.mark.slow
@needs_compilers
@pytest.mark.each_once
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dtype",
    # Compiling it for double precision takes ten seconds.
    [pytest.param(d, marks=[pytest.mark.slow] if d is torch.float64 else []) for d in DTYPES],
    ids=str,
)
def test_all_ops_compile_in_one_kernel(arch: str, dtype: torch.dtype) -> None:
    """Without a spill: `build.cubin` raises on one."""
    assert binaries.cubin(_all_at_once(dtype).text, arch).stat().st_size > 0


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("op", ["sin", "erfc", "mish", "elu", "lerp", "addcdiv", "logsigmoid"])
def test_the_costliest_ops_fit_the_split_products_epilogue(op: str) -> None:
    spec = _spec(next(every_step(op)), torch.float32, LINEAR_SPLIT)
    assert binaries.cubin(spec.text, "sm_90a").stat().st_size > 0


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared() -> None:
    """All kernels, built side by side."""
    load.prepare([_spec(STEPS[text], dtype) for text, dtype in CASES], torch.device("cuda"))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("text, dtype", CASES, ids=str)
def test_an_op_on_the_gpu_is_torchs(text: str, dtype: torch.dtype) -> None:
    step = STEPS[text]
    values = {n: v.cuda() if n[0] != "s" else v for n, v in _values(step, dtype).items()}
    tensors = [v for v in values.values() if isinstance(v, Tensor)]
    out = torch.full_like(tensors[0], 7.0)
    numbers = [v for n, v in values.items() if n[0] == "s"]
    launch.pointwise(_spec(step, dtype), out, tensors, numbers)
    _check(step, out, values, len(_specials(dtype)))
