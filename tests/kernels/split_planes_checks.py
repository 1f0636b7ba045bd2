"""Checks of the split gemm on batches, chunks of K and any strides."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from checks import Sizes, error_of, framed_matrix, is_untouched, misleading
from linear_split_checks import compare, imprecise_neighbours, special_values, wrong_guesses
from torch import Tensor

from benchmarks.linear_sm90 import EXAMPLES, IDENTITY, OPERANDS, SWISH, First, families, run
from benchmarks.sm90 import CUDA, GUESSED, n_major, relative
from benchmarks.split_planes_sm90 import ROLES
from fx_fuser.kernels.split import SPLIT_GEMM, reset_fallback
from fx_fuser.native import load


def gemm(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ, by the op."""
    made: Tensor = torch.ops.fx_fuser.split_product.default(a, b, SPLIT_GEMM.name)
    return made


def scattered(shape: tuple[int, ...], choose: random.Random) -> Tensor:
    """Random values in some order of memory, with gaps, and some not 16-byte aligned."""
    order = list(range(len(shape)))
    if choose.random() < 0.4:
        order[-2:] = order[:-3:-1]
    if len(shape) > 2 and choose.random() < 0.5:  # as attention has them: [B, S, H, D]
        place = choose.randrange(len(shape) - 2)
        order.insert(len(shape) - 2, order.pop(place))
    step = choose.choice((1, 1, 1, 1, 2))
    in_memory = [shape[d] for d in order]
    in_memory[-1] = (in_memory[-1] + choose.choice((0, 0, 1, 3, 4))) * step
    if choose.random() < 0.5:
        in_memory[-1] = -(-in_memory[-1] // 4) * 4
    count = torch.Size(in_memory).numel()
    offset = choose.choice((0, 0, 0, 1, 4))
    values = torch.randn(count + offset, device=CUDA)[offset:].view(in_memory)
    values = values[..., : shape[order[-1]] * step : step]
    return values.permute([order.index(d) for d in range(len(shape))])


def random_operand(shape: tuple[int, ...], dtype: torch.dtype, choose: random.Random) -> Tensor:
    kept = [size if choose.random() < 0.6 else 1 for size in shape]
    kept = kept[choose.choice((0, 0, choose.randrange(len(shape) + 1))) :]
    values = scattered(tuple(kept), choose) if len(kept) > 1 else torch.randn(kept, device=CUDA)
    return values > 0 if dtype == torch.bool else values.to(dtype)


def sizes(choose: random.Random) -> tuple[int, int, int]:
    m, n = choose.choice((1, choose.randint(1, 300))), choose.randint(1, 300)
    return m, n, choose.choice((choose.randint(1, 64), choose.randint(1, 1500)))


def sweep(failures: list[str], cases: int, seed: int, sizes: Sizes = sizes) -> None:
    """Random batches, chunks, strides, operands and outputs."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(cases):
        example = choose.choice(EXAMPLES)
        lead = tuple(choose.choice((1, 2, 3)) for _ in range(choose.choice((0, 0, 1, 2))))
        m, n, k = sizes(choose)
        x, weight = scattered((*lead, m, k), choose), scattered((*lead, n, k), choose)
        if lead and choose.random() < 0.2:
            weight = weight[:1].expand(*lead, n, k)
        bias = torch.randn(n, device=CUDA) if choose.random() < 0.5 else None
        operands = [random_operand((*lead, m, n), dtype, choose) for dtype in example.operands]
        scalars = [choose.uniform(-2, 2) for _ in range(example.scalars)]
        frame, out = framed_matrix((*lead, m, n), example.out)
        z_frame, z = framed_matrix((*lead, m, n), torch.float32)
        chunks = choose.choice((0, 1, 2, 3, 7))
        first = choose.choice(ROLES)
        keeps_z = choose.random() < 0.5
        kept = z if keeps_z else None
        exact_scales = choose.random() < 0.3
        run(example, x, weight, bias, operands, scalars, out, kept, chunks, first, exact_scales)

        exact_z = x.double() @ weight.double().mT
        exact_z = exact_z if bias is None else exact_z + bias.double()
        exact = example.reference(exact_z, operands, scalars)
        bound = 1e-3 if example.out == torch.float16 else 2e-6
        error = error_of(out, exact)
        if keeps_z:
            error = max(error, relative(z, exact_z))
        what = f"case {case}: {lead} {m} x {n} x {k} in {chunks}, first '{first}', x {x.stride()}, "
        what += f"weight {weight.stride()}, {', '.join(example.spec.signature)}"
        if not is_untouched(frame, out) or not is_untouched(z_frame, z):
            failures.append(f"{what}: wrote outside the result")
        if not error <= bound:
            failures.append(f"{what}: error {error:.2e}")


def chunked_values(failures: list[str]) -> None:
    """Infinities, NaN and extremes; data that is repaired or redone; in chunks of K."""
    hard_values(failures, 2, "x")
    hard_values(failures, 3, "x")
    hard_values(failures, 2, "weight")


def hard_values(failures: list[str], chunks: int, first: First) -> None:
    found: list[str] = []
    special_values(found, chunks, first)
    wrong_guesses(found, chunks, first)
    imprecise_neighbours(found, chunks, first)
    failures += [f"{first} first, {chunks or 'some'} chunks: {failure}" for failure in found]


def weight_first(failures: list[str]) -> None:
    """The weight split first: hard values, and an x whose scales are guessed wrong."""
    hard_values(failures, 1, "weight")
    for m, n, k in ((300, 200, 500), (4100, 1000, 576), (130, 140, 65536 + 36)):
        weight = torch.randn(n, k, device=CUDA)
        for what, x in misleading(m, k):
            exact = x.double() @ weight.double().T
            sgemm = x @ weight.T
            for form, values in (("", x), (", n_major", n_major(x))):
                ours = run(IDENTITY, values, weight, first="weight")
                compare(f"x of {m} x {n} x {k}, {what}{form}", ours, sgemm, exact, failures)


def same_bits(failures: list[str]) -> None:
    """What must not depend on the layout of x, on the batch or on the launch."""

    def same(what: str, ours: Tensor, other: Tensor) -> None:
        if not torch.equal(ours, other):
            failures.append(f"{what}: {int((ours != other).sum())} bits differ")

    def check(what: str, x: Tensor, weight: Tensor, chunks: int, first: First) -> None:
        """Of the operand that is split first the layout must not matter."""
        ahead, other = (x, weight) if first == "x" else (weight, x)
        rows, k = ahead.shape
        unaligned = torch.empty(rows * k + 1, device=CUDA)[1:].view(rows, k).copy_(ahead)

        def swish(values: Tensor) -> Tensor:
            pair = (values, other) if first == "x" else (other, values)
            return run(SWISH, *pair, chunks=chunks, first=first)

        once = swish(ahead)
        same(f"{what}, n_major", swish(n_major(ahead)), once)
        same(f"{what}, unaligned", swish(unaligned), once)
        for _ in range(20):
            same(f"{what}, again", swish(ahead), once)
        batch = run(
            SWISH,
            x.expand(3, *x.shape),
            weight.expand(3, *weight.shape),
            chunks=chunks,
            first=first,
        )
        for one in batch:
            same(f"{what}, of a batch", one, once)

    for m, n, k in ((300, 200, 1000), (129, 130, 65), (7, 500, 4100)):
        x, weight = torch.randn(m, k, device=CUDA), torch.randn(n, k, device=CUDA)
        for chunks in (1, 3):
            what = f"{m} x {n} x {k} in {chunks}"
            check(f"{what}, x first", x, weight, chunks, "x")
            check(f"{what}, x first, weight n_major", x, n_major(weight), chunks, "x")
            check(f"{what}, weight first", x, weight, chunks, "weight")
            check(f"{what}, weight first, x n_major", n_major(x), weight, chunks, "weight")


def by_the_op(failures: list[str]) -> None:
    """Layouts of both operands through `split_product`, large enough for its own kernel."""
    load.prepare([SPLIT_GEMM], CUDA)
    for m, n, k in ((768, 3072, 6304), (3072, 768, 6304), (1021, 1027, 1023)):
        a, b = torch.randn(m, k, device=CUDA), torch.randn(n, k, device=CUDA)
        exact = a.double() @ b.double().t()
        for form, x, weight in (
            ("as they lie", a, b),
            ("a n_major", n_major(a), b),
            ("b n_major", a, n_major(b)),
            ("both n_major", n_major(a), n_major(b)),
        ):
            compare(f"op, {m} x {n} x {k}, {form}", gemm(x, weight), a @ b.t(), exact, failures)
    heads = torch.randn(4, 700, 12, 256, device=CUDA).transpose(1, 2)
    keys = torch.randn(4, 650, 12, 256, device=CUDA).transpose(1, 2)
    exact = heads.double() @ keys.double().mT
    error = relative(gemm(heads, keys), exact)
    if not error <= max(1.5 * relative(heads @ keys.mT, exact), 4e-7):
        failures.append(f"op, heads: {error:.2e}")


def split_bytes(a: Tensor, b: Tensor) -> int:
    """What the op allocates beside its result: the split of one operand; nothing by the library."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = gemm(a, b)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - found.nbytes


KNOWN_AFTER = 16  # calls that are a little slow


def fallbacks(failures: list[str]) -> None:
    """The precision fallback: only after data that makes one candidate slow is another taken."""
    load.prepare([SPLIT_GEMM], CUDA)

    def expect(what: str, a: Tensor, b: Tensor, split: Tensor | None) -> None:
        found = split_bytes(a, b)
        least = 0 if split is None else split.nbytes
        if not least <= found < least + (4 << 20):
            failures.append(f"{what}: {found} bytes beside the result, not {least} and a little")

    columns = 10.0 ** (torch.rand(1024, device=CUDA) * 8 - 4)
    a, b = torch.randn(8192, 1024, device=CUDA), torch.randn(2048, 1024, device=CUDA)
    torch.matmul(a, b.t())  # cuBLAS has its workspace now
    reset_fallback([SPLIT_GEMM], CUDA)
    expect("the smaller operand first", a, b, b)
    small, imprecise = a / columns, b.clone()
    imprecise[7] *= columns
    for _ in range(2):
        expect("one imprecise row", small, imprecise, b)
    expect("all rows imprecise", small, b * columns, b)
    for _ in range(KNOWN_AFTER):
        gemm(small, b * columns)
        torch.cuda.synchronize()  # a call must have ended to be known
    expect("after imprecise rows", a, b, None)
    reset_fallback([SPLIT_GEMM], CUDA)
    expect("when reset", a, b, b)
    a[:, :GUESSED] = 0
    slow = milliseconds(lambda: gemm(a, b))
    for _ in range(KNOWN_AFTER):
        gemm(a, b)
        torch.cuda.synchronize()
    found = milliseconds(lambda: gemm(a, b))
    if not found < 0.8 * slow:
        failures.append(f"after guesses that fail a call takes {found:.3f} ms for {slow:.3f}")
    reset_fallback([SPLIT_GEMM], CUDA)


def milliseconds(step: Callable[[], Tensor]) -> float:
    """Milliseconds of one call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def exact_scales(failures: list[str]) -> None:
    """Scales found ahead: of data whose first columns mislead, and of special values."""
    for m, n, k in ((200, 300, 500), (256, 384, 8192)):
        x = torch.randn(m, k, device=CUDA)
        for what, weight in misleading(n, k):
            exact = x.double() @ weight.double().t()
            ways: tuple[tuple[First, int], ...] = (("x", 0), ("weight", 0), ("x", 3))
            for first, chunks in ways:
                a, b = (x, weight) if first == "x" else (weight, x)
                ours = run(IDENTITY, a, b, chunks=chunks, first=first, exact=True)
                truth = exact if first == "x" else exact.t()
                named = f"exact scales, {m} x {n} x {k} in {chunks}, {what}, {first} first"
                compare(named, ours, a @ b.t(), truth, failures)
    special_values(failures, multiply=lambda a, b: run(IDENTITY, a, b, first="x", exact=True))


def by_parts(failures: list[str]) -> None:
    """An operand whose split would be large is split in parts, with all that an epilogue reads."""
    for m, n, k in ((20_000, 260, 2048), (20_001, 131, 2049)):
        x, weight = torch.randn(m, k, device=CUDA), torch.randn(n, k, device=CUDA)
        exact = x.double() @ weight.double().t()
        ways: tuple[tuple[First, Tensor, Tensor], ...]
        ways = (("x", x, weight), ("weight", weight, x))
        for first, a, b in ways:
            bias = torch.randn(b.shape[0], device=CUDA)
            operands = [random_operand((a.shape[0], b.shape[0]), dtype, random.Random(m))
                        for dtype in OPERANDS.operands]  # fmt: skip
            truth = (exact if first == "x" else exact.t()) + bias.double()
            frame, out = framed_matrix((a.shape[0], b.shape[0]), torch.float32)
            z_frame, z = framed_matrix((a.shape[0], b.shape[0]), torch.float32)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(OPERANDS, a, b, bias, operands, [0.5], out, z, 0, first)
            torch.cuda.synchronize()
            held = torch.cuda.max_memory_allocated() - before
            whole = OPERANDS.reference(truth, operands, [0.5])
            what = f"by parts, {m} x {n} x {k}, {first} first"
            for name, value, right in (("z", z, truth), ("result", out, whole)):
                error = relative(value, right)
                if not error <= 1e-6:
                    failures.append(f"{what}: {name} off by {error:.2e}")
            copied = 0 if k % 4 == 0 else b.nbytes + (1 << 20)
            # kMostSplitBytes of kernels_cu/host/split_part.h, and what a part's kernels share.
            if held > (112 << 20) + copied:
                failures.append(f"{what}: {held >> 20} MiB beside the result")
            for name, whole_frame, value in (("out", frame, out), ("z", z_frame, z)):
                if not is_untouched(whole_frame, value):
                    failures.append(f"{what}: writes beside {name}")


LAYOUTS: tuple[tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], ...] = (
    ("rows", lambda x: x, lambda w: w),
    ("x n_major", n_major, lambda w: w),
    ("both n_major", n_major, n_major),
)


# m, n, K, chunks. 524,288: as many as fill the GPU.
PROBLEMS = (
    (256, 384, 1024, 4),
    (250, 381, 8191, 5),
    (256, 256, 65536, 16),
    (256, 256, 524288, 0),
)


def accuracy(failures: list[str]) -> None:
    for m, n, k, chunks in PROBLEMS:
        for i, (name, x, weight) in enumerate(families(m, n, k)):
            exact = x.double() @ weight.double().T
            sgemm = x @ weight.T
            layout, of_x, of_weight = LAYOUTS[i % len(LAYOUTS)]
            what = f"{m} x {n} x {k} in {chunks or 'some'}"
            for first in ROLES[1:]:
                ours = run(IDENTITY, of_x(x), of_weight(weight), chunks=chunks, first=first)
                data = f"{name}, {layout}, {first} first"
                compare(f"{what}, {data}", ours, sgemm, exact, failures)


CHECKS = (
    chunked_values, weight_first, same_bits, by_the_op, fallbacks, exact_scales, by_parts
)  # fmt: skip
