"""Do fp16 planes pay where torch's settings ask for TF32? (issue 44)

    python -m benchmarks.high_spike [--only bert] [--no-errors]

The gemms of training steps: forward, and the gradients of input and weight. For each the GPU's time
of cuBLAS in TF32, of our kernel on planes (kernels_cu/linear/linear_planes_sm90.cuh), and of cuBLAS
in fp16 with an fp32 result, as the upper mark; and the time to make each tensor's plane, once a
tensor. Medians, by turns, the L2 cache cleared, in one process. Then errors against float64 beside
TF32's.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import harness, high_accuracy
from benchmarks.linear_dense_sm90 import IDENTITY
from benchmarks.measure import float32_settings, machine
from benchmarks.planes import Plane, make_plane, multiply_planes
from benchmarks.sm90 import CUDA, normal, relative, worst_row
from fx_fuser.kernels.planes import MAKE_PLANE, linear_planes
from fx_fuser.native import load
from fx_fuser.native.kernel_spec import KernelSpec
from fx_fuser.planning import timing
from fx_fuser.planning.timing import Candidate

T = TypeVar("T")
GO = 1.35  # over all gemms of the BERT step, planes included
PART = 256  # rows of a result that are compared
PRODUCTS = ("forward", "dgrad", "wgrad")
SYSTEMS = ("TF32", "ours", "cuBLAS fp16")


@dataclass(frozen=True)
class Linear:
    """x [rows, k] to [rows, n], `count` of them a step; `sharing` of them read one x."""

    rows: int
    k: int
    n: int
    count: int
    sharing: int = 1


@dataclass(frozen=True)
class Step:
    name: str
    linears: Sequence[Linear]


def transformer(rows: int, width: int, layers: int) -> list[Linear]:
    return [
        Linear(rows, width, width, 3 * layers, 3),  # q, k, v
        Linear(rows, width, width, layers),
        Linear(rows, width, 4 * width, layers),
        Linear(rows, 4 * width, width, layers),
    ]


def llama(rows: int, layers: int) -> list[Linear]:
    return [
        Linear(rows, 2048, 2048, 3 * layers, 3),
        Linear(rows, 2048, 2048, layers),
        Linear(rows, 2048, 8192, 2 * layers, 2),  # gate, up
        Linear(rows, 8192, 2048, layers),
        Linear(rows, 2048, 32000, 1),
    ]


# As benchmarks/whole_nets.py trains them, and BERT with fewer and more rows.
STEPS = (
    Step("bert 16 x 512", transformer(8192, 768, 12)),
    Step("vit_b 32 x 197", transformer(6304, 768, 12)),
    Step("llama 4 x 1024, 4 layers", llama(4096, 4)),
    Step("bert, 4096 rows", transformer(4096, 768, 12)),
    Step("bert, 16384 rows", transformer(16384, 768, 12)),
)

# ---- one Linear ----------------------------------------------------------------------------------


@dataclass
class Times:
    """ms: of a product by a system, of a tensor's plane. errors: to the exact result, by system."""

    ms: dict[tuple[str, str], float] = field(default_factory=dict)
    errors: dict[tuple[str, str], float] = field(default_factory=dict)


def made(matrix: Tensor) -> Plane:
    plane = Plane.room(matrix)
    assert make_plane(MAKE_PLANE, plane)
    return plane


def spec_of(along_x: bool, along_weight: bool) -> KernelSpec:
    return IDENTITY.spec(torch.float32, linear_planes(along_x, along_weight))


def multiply(a: Plane, b: Plane, out: Tensor) -> Tensor:
    """a bᵀ in fp32, from planes as they lie."""
    spec = spec_of(*(plane.matrix.stride(1) == 1 for plane in (a, b)))
    assert multiply_planes(spec, a, b, out)
    return out


def factors(tensors: Iterable[T], turned: Callable[[T], T]) -> dict[str, tuple[T, T]]:
    """tensors: x, weight, dz. a and b of each product, a bᵀ."""
    x, weight, dz = tensors
    both = (x, weight), (dz, turned(weight)), (turned(dz), turned(x))
    return dict(zip(PRODUCTS, both))


def measure(linear: Linear) -> Times:
    tensors = {
        "x": normal(linear.rows, linear.k),
        "weight": normal(linear.n, linear.k) * linear.k**-0.5,
        "dz": normal(linear.rows, linear.n) * 1e-6,
    }
    planes = {name: made(tensor) for name, tensor in tensors.items()}
    in_fp32 = factors(tensors.values(), Tensor.t)
    in_fp16 = factors((plane.fp16() for plane in planes.values()), Tensor.t)
    of_planes = factors(planes.values(), Plane.turned)
    ways: dict[tuple[str, str], Callable[[], object]] = {}
    outs = {}
    for product in PRODUCTS:
        (a, b), (a16, b16) = in_fp32[product], in_fp16[product]
        of_tf32, of_half, of_ours = (a.new_empty(len(a), len(b)) for _ in range(3))
        outs[product] = {"TF32": of_tf32, "cuBLAS fp16": of_half, "ours": of_ours}
        ways[product, "TF32"] = functools.partial(torch.mm, a, b.t(), out=of_tf32)
        ways[product, "cuBLAS fp16"] = functools.partial(
            torch.mm, a16, b16.t(), out_dtype=torch.float32, out=of_half
        )
        ways[product, "ours"] = functools.partial(multiply, *of_planes[product], of_ours)
    for name, plane in planes.items():
        ways["plane", name] = functools.partial(make_plane, MAKE_PLANE, plane)
        # One pass, with a scale that is known: what a guess or the producer's epilogue would cost.
        ways["one pass", name] = functools.partial(
            Plane.room(plane.matrix).fp16().copy_, plane.matrix
        )
    for key in [key for key in ways if key[1] == "cuBLAS fp16"]:
        try:
            ways[key]()
        except RuntimeError as error:
            print(f"cuBLAS in fp16: {error}")
            del ways[key], outs[key[0]]["cuBLAS fp16"]
    taken = timing.times_of([Candidate(way) for way in ways.values()], CUDA)
    times = Times({key: took.gpu for key, took in zip(ways, taken)})

    for product in PRODUCTS:
        a, b = in_fp32[product]
        exact = a[:PART].double() @ b.double().t()
        exponent = sum(plane.exponent for plane in of_planes[product])
        for system, out in outs[product].items():
            out.fill_(float("nan"))
            ways[product, system]()
            value = out[:PART].double()
            if system == "cuBLAS fp16":
                value = value * 2.0**-exponent
            times.errors[product, system] = relative(value, exact)
    return times


def of_step(step: Step, known: dict[Linear, Times]) -> dict[str, float]:
    """ms of all gemms; of the faster gemm on planes each time; of all planes, by one pass and by
    two, and where forward and backward make their own, as graphs do that are compiled apart."""
    total = dict.fromkeys((*SYSTEMS, "best", "plane", "one pass", "apart"), 0.0)
    for linear in step.linears:
        times = known[linear]
        for product in PRODUCTS:
            ms = {system: times.ms.get((product, system), math.inf) for system in SYSTEMS}
            ms["best"] = min(ms["ours"], ms["cuBLAS fp16"])
            for system, took in ms.items():
                total[system] += linear.count * took
        for way in ("plane", "one pass"):
            of_both = times.ms[way, "weight"] + times.ms[way, "x"] / linear.sharing
            total[way] += linear.count * (of_both + times.ms[way, "dz"])
            if way == "plane":
                total["apart"] += linear.count * (2 * of_both + times.ms[way, "dz"])
    return total


# ---- errors on data that breaks planes -----------------------------------------------------------


def errors(failures: list[str]) -> list[list[object]]:
    """Of cuBLAS in TF32, of TF32 to nearest, and ours."""
    rows: list[list[object]] = []
    for k in (64, 1024, 8192, 65536):
        count = 256 if k <= 8192 else 128
        for name, x, weight in high_accuracy.families(count, count, k):
            exact = x.double() @ weight.double().t()
            library = torch.mm(x, weight.t())
            nearest = high_accuracy.to_tf32(x).double() @ high_accuracy.to_tf32(weight).double().t()
            planes = made(x), made(weight)
            ours = multiply(*planes, torch.full_like(library, float("nan")))
            found = [
                [of(v, exact) for v in (library, nearest, ours)] for of in (relative, worst_row)
            ]
            ratios = [mine / max(*others, 1e-30) for *others, mine in found]
            lost = any(plane.has_lost for plane in planes)
            rows.append([k, name, *found[0], *ratios, "lost" if lost else ""])
            if not max(ratios) <= high_accuracy.ALLOWED:
                failures.append(f"{name}, K = {k}: {max(ratios):.3f} times TF32's error")
    return rows


# ---- the report ----------------------------------------------------------------------------------


def text_of(steps: Sequence[Step], known: dict[Linear, Times]) -> list[str]:
    rows: list[list[object]] = []
    for linear, times in known.items():
        for product in PRODUCTS:
            ms = [1e3 * times.ms.get((product, system), math.inf) for system in SYSTEMS]
            found = [times.errors.get((product, system), math.nan) for system in SYSTEMS]
            operations = 2e-6 * linear.rows * linear.k * linear.n
            name = f"{linear.rows} x {linear.n} x {linear.k} {product}"
            rows.append([name, *ms, operations / ms[0], operations / ms[1], *found])
    heads = ["us", *SYSTEMS, "TF32's TFLOP/s", "ours", "TF32's error", "ours", "cuBLAS's"]
    formats = ["", *[".1f"] * 3, ".0f", ".0f", ".2e", ".2e", ".2e"]
    texts = [tabulate(rows, heads, floatfmt=formats)]
    tensors: list[list[object]] = []
    for linear, times in known.items():
        for name in ("x", "weight", "dz"):
            lines = linear.n if name == "weight" else linear.rows
            size = linear.n if name == "dz" else linear.k
            plane, one = (1e3 * times.ms[way, name] for way in ("plane", "one pass"))
            tensors.append([f"{name} {lines} x {size}", plane, one, 10e-6 * lines * size / plane])
    heads = ["us", "plane", "one pass", "TB/s of the plane's 10 bytes"]
    texts.append(tabulate(tensors, heads, floatfmt=["", ".1f", ".1f", ".2f"]))
    of_steps: list[list[object]] = []
    pairs = [("ours", "plane"), ("ours", "one pass"), ("ours", "apart"), ("best", "plane")]
    for step in steps:
        sums = of_step(step, known)
        ratios = [sums["TF32"] / (sums[gemm] + sums[way]) for gemm, way in pairs]
        of_steps.append([step.name, *sums.values(), *ratios, sums["TF32"] / sums["ours"]])
    heads = ["ms a step", *of_step(steps[0], known)] if steps else []
    heads += [*(f"{gemm} + {way}" for gemm, way in pairs), "ours alone"]
    texts.append(tabulate(of_steps, heads, floatfmt=["", *[".2f"] * 12]))
    return texts


def main() -> int:
    parser = harness.parser("high_spike")
    parser.add_argument("--only", default="", help="steps whose name has this in it")
    parser.add_argument("--no-errors", action="store_true")
    chosen = parser.parse_args()
    done = harness.progress()
    print(machine(CUDA))
    forms = (True, True), (True, False), (False, False)
    load.prepare([MAKE_PLANE, *(spec_of(*form) for form in forms)], CUDA)
    done("built")
    torch.manual_seed(0)
    failures: list[str] = []
    steps = [step for step in STEPS if chosen.only in step.name]
    known: dict[Linear, Times] = {}
    texts: list[str] = []
    with float32_settings("tf32"), torch.no_grad():
        if not chosen.no_errors:
            heads = ["K", "data", "cuBLAS TF32", "to nearest", "planes", "ratio", "worst row", ""]
            formats = ["", "", ".2e", ".2e", ".2e", ".3f", ".3f", ""]
            texts.append(tabulate(errors(failures), heads, floatfmt=formats))
            done("errors")
        for step in steps:
            for linear in step.linears:
                if linear not in known:
                    known[linear] = measure(linear)
            done(step.name)
    texts += text_of(steps, known)
    if steps and steps[0] is STEPS[0]:
        ms = of_step(steps[0], known)
        ratio = ms["TF32"] / (ms["ours"] + ms["plane"])
        texts.append(f"{'go' if ratio >= GO else 'kill'}: {ratio:.2f} of {GO}, ours + plane")
    return harness.report(texts, failures)


if __name__ == "__main__":
    sys.exit(main())
