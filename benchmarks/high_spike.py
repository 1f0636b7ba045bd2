"""Do fp16 planes pay where torch's settings ask for TF32? (issue 44)

    python -m benchmarks.high_spike [--only bert] [--no-errors]

The gemms of training steps: forward, and the gradients of input and weight. For each the GPU's time
of cuBLAS in TF32, of cuBLAS in fp16 with an fp32 result, and of fx_fuser's op, which is that with
the kernel for repairs behind it; where a value is lost, so that this kernel looks at all sums; of a
pass over the result, for scales that nothing else takes away; and to make each tensor's plane, in
two passes and in one, where the largest value is known. Medians, by turns, the L2 cache cleared, in
one process. Then errors against float64 beside TF32's, of few tiles, for which cuBLAS divides k,
and of many.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import harness, high_accuracy
from benchmarks.measure import float32_settings, machine
from benchmarks.planes import Plane, fresh, product, scaled_product
from benchmarks.sm90 import CUDA, normal, relative, worst_row
from fx_fuser.kernels.planes import PLANES
from fx_fuser.native import load
from fx_fuser.planning import timing
from fx_fuser.planning.timing import Candidate

T = TypeVar("T")
GO = 1.35  # over all gemms of the BERT step, planes and passes for scales included
PRODUCTS = ("forward", "dgrad", "wgrad")
SYSTEMS = ("TF32", "cuBLAS fp16", "planes", "lost", "rescaled")
TENSORS = ("x", "weight", "dz")
LARGE = 2048  # rows and columns of a result of many tiles
OF_LARGE = ("as nn.Linear", "normal", "all positive", "gelu", "softmax of 8 normal")


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
    """ms: of a product by a system, of a tensor's plane. errors: to TF32's, of a product."""

    ms: dict[tuple[str, str], float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)


def factors(tensors: Iterable[T], turned: Callable[[T], T]) -> dict[str, tuple[T, T]]:
    """tensors: x, weight, dz. a and b of each product, a b."""
    x, weight, dz = tensors
    both = (x, turned(weight)), (dz, weight), (turned(dz), x)
    return dict(zip(PRODUCTS, both))


def with_lost(tensor: Tensor) -> Plane:
    """A plane of which one value was lost."""
    tensor = tensor.clone()
    tensor[1, 1] = 1e-12 * tensor.abs().max()
    plane = Plane.of(tensor)
    assert plane.has_lost
    return plane


def of_planes(a: Plane, b: Plane) -> Tensor:
    return scaled_product(a, b)[0]


def measure(linear: Linear) -> Times:
    x = normal(linear.rows, linear.k)
    weight = normal(linear.n, linear.k) * linear.k**-0.5
    dz = normal(linear.rows, linear.n) * 1e-6
    tensors = dict(zip(TENSORS, (x, weight, dz)))
    planes = {name: Plane.of(tensor) for name, tensor in tensors.items()}
    in_fp32 = factors(tensors.values(), Tensor.t)
    made = factors(planes.values(), lambda plane: plane.mT)
    lossy = factors(map(with_lost, tensors.values()), lambda plane: plane.mT)
    ways: dict[tuple[str, str], Callable[[], object]] = {}
    for name in PRODUCTS:
        (a, b), (a_plane, b_plane) = in_fp32[name], made[name]
        halves = a_plane.values, b_plane.values
        ways[name, "TF32"] = functools.partial(torch.mm, a, b)
        ways[name, "cuBLAS fp16"] = functools.partial(torch.mm, *halves, out_dtype=torch.float32)
        ways[name, "planes"] = functools.partial(of_planes, a_plane, b_plane)
        ways[name, "lost"] = functools.partial(of_planes, *lossy[name])
        sums, (factor, _) = scaled_product(a_plane, b_plane)
        ways[name, "rescaled"] = functools.partial(torch.mul, sums, factor, out=sums.clone())
    for name, tensor in tensors.items():
        largest = tensor.abs().amax(1)
        ways["two passes", name] = functools.partial(Plane.of, tensor)
        ways["one pass", name] = functools.partial(Plane.of, tensor, largest)
    taken = timing.times_of([Candidate(way) for way in ways.values()], CUDA)
    times = Times({key: took.gpu for key, took in zip(ways, taken)})
    for name in PRODUCTS:
        a, b = (t.double() for t in in_fp32[name])
        exact = a[:256] @ b
        ours = relative(product(*made[name])[:256], exact)
        times.errors[name] = ours / relative(torch.mm(*in_fp32[name])[:256], exact)
    return times


def of_step(step: Step, known: dict[Linear, Times]) -> dict[str, float]:
    """ms of all gemms by each system; of all planes: `apart`, as graphs of forward and backward
    make them, with the largest of x and dz known where these are made, and `shared`, if forward's
    served backward, too, all in one pass; of the passes that scales need where nothing else reads
    the result by code of Inductor's: projections for attention, gradients of weights."""
    total = dict.fromkeys((*SYSTEMS, "apart", "shared", "passes"), 0.0)
    for linear in step.linears:
        ms = known[linear].ms
        for system in SYSTEMS:
            total[system] += linear.count * sum(ms[name, system] for name in PRODUCTS)
        of_x = {way: ms[way, "x"] / linear.sharing for way in ("one pass", "two passes")}
        apart = of_x["one pass"] + of_x["two passes"] + 2 * ms["two passes", "weight"]
        total["apart"] += linear.count * (apart + ms["one pass", "dz"])
        shared = of_x["one pass"] + ms["one pass", "weight"] + ms["one pass", "dz"]
        total["shared"] += linear.count * shared
        passes = ms["wgrad", "rescaled"] + (linear.sharing > 1) * ms["forward", "rescaled"]
        total["passes"] += linear.count * passes
    return total


# ---- errors on data that breaks planes -----------------------------------------------------------


def cases() -> Iterator[tuple[int, int, str, Tensor, Tensor]]:
    for k in (64, 1024, 8192, 65536):
        small = 256 if k <= 8192 else 128
        for name, x, weight in high_accuracy.families(small, small, k):
            yield k, small, name, x, weight
        for name, x, weight in high_accuracy.families(LARGE, LARGE, k):
            if name in OF_LARGE:
                yield k, LARGE, name, x, weight


def errors(failures: list[str]) -> list[list[object]]:
    """Of cuBLAS in TF32, of TF32 to nearest, of cuBLAS in fp16, and of the op."""
    rows: list[list[object]] = []
    for k, size, name, x, weight in cases():
        rounded = high_accuracy.to_tf32(x).double(), high_accuracy.to_tf32(weight).double()
        exact, nearest = x.double() @ weight.double().t(), rounded[0] @ rounded[1].t()
        planes = Plane.of(x), Plane.of(weight).mT
        halves = torch.mm(planes[0].values, planes[1].values, out_dtype=torch.float32).double()
        alone = halves * 2.0 ** -(planes[0].exponent + planes[1].exponent)
        values = torch.mm(x, weight.t()), nearest, alone, product(*planes, fresh(CUDA))
        found = [[of(v, exact) for v in values] for of in (relative, worst_row)]
        ratios = [ours / max(library, near, 1e-30) for library, near, _, ours in found]
        lost = any(plane.has_lost for plane in planes)
        rows.append([k, size, name, *found[0], *ratios, "lost" if lost else ""])
        if not max(ratios) <= high_accuracy.ALLOWED:
            failures.append(f"{name}, {size} x {size} x {k}: {max(ratios):.3f} times TF32's error")
    return rows


# ---- the report ----------------------------------------------------------------------------------


def text_of(steps: Sequence[Step], known: dict[Linear, Times]) -> list[str]:
    rows: list[list[object]] = []
    for linear, times in known.items():
        for name in PRODUCTS:
            us = [1e3 * times.ms[name, system] for system in SYSTEMS]
            operations = 2e-6 * linear.rows * linear.k * linear.n
            what = f"{linear.rows} x {linear.n} x {linear.k} {name}"
            rates = operations / us[0], operations / us[2]
            rows.append([what, *us, *rates, times.errors[name]])
    heads = ["us", *SYSTEMS, "TF32's TFLOP/s", "planes'", "error to TF32's"]
    formats = ["", *[".1f"] * len(SYSTEMS), ".0f", ".0f", ".3f"]
    texts = [tabulate(rows, heads, floatfmt=formats)]
    tensors: list[list[object]] = []
    for linear, times in known.items():
        for name in TENSORS:
            lines = linear.n if name == "weight" else linear.rows
            size = linear.n if name == "dz" else linear.k
            two, one = (1e3 * times.ms[way, name] for way in ("two passes", "one pass"))
            tensors.append([f"{name} {lines} x {size}", two, one, 6e-6 * lines * size / one])
    heads = ["us", "two passes", "one pass", "TB/s of one pass's 6 bytes"]
    texts.append(tabulate(tensors, heads, floatfmt=["", ".1f", ".1f", ".2f"]))
    of_steps: list[list[object]] = []
    for step in steps:
        sums = of_step(step, known)
        of_steps.append([step.name, *sums.values(), *(gain(sums, way) for way in WAYS)])
    heads = ["ms a step", *of_step(steps[0], known), *WAYS] if steps else []
    texts.append(tabulate(of_steps, heads, floatfmt=["", *[".2f"] * 12]))
    return texts


WAYS = ("gain, apart", "gain, shared")


def gain(sums: dict[str, float], way: str) -> float:
    """TF32's time to ours, with all that planes cost."""
    return sums["TF32"] / (sums["planes"] + sums[way.removeprefix("gain, ")] + sums["passes"])


def main() -> int:
    parser = harness.parser("high_spike")
    parser.add_argument("--only", default="", help="steps whose name has this in it")
    parser.add_argument("--no-errors", action="store_true")
    chosen = parser.parse_args()
    done = harness.progress()
    print(machine(CUDA))
    load.prepare([PLANES], CUDA)
    done("built")
    torch.manual_seed(0)
    failures: list[str] = []
    steps = [step for step in STEPS if chosen.only in step.name]
    known: dict[Linear, Times] = {}
    texts: list[str] = []
    with float32_settings("tf32"), torch.no_grad():
        if not chosen.no_errors:
            heads = ["K", "size", "data", "cuBLAS TF32", "to nearest", "cuBLAS fp16", "planes"]
            formats = ["", "", "", *[".2e"] * 4, ".3f", ".3f", ""]
            found = errors(failures)
            texts.append(tabulate(found, [*heads, "ratio", "worst row", ""], floatfmt=formats))
            done("errors")
        for step in steps:
            for linear in step.linears:
                if linear not in known:
                    known[linear] = measure(linear)
            done(step.name)
    texts += text_of(steps, known)
    if steps and steps[0] is STEPS[0]:
        ratio = gain(of_step(steps[0], known), WAYS[0])
        texts.append(f"{'go' if ratio >= GO else 'kill'}: {ratio:.2f} of {GO}, planes made apart")
    return harness.report(texts, failures)


if __name__ == "__main__":
    sys.exit(main())
