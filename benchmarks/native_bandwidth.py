"""GB/s of the pointwise, batch-statistics and loss kernels compared with torch's own copy.

Medians of triton.testing.do_bench, which clears L2 before each run; random data; results are
checked before they are timed. Run as `PYTHONPATH=. python benchmarks/native_bandwidth.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from triton.testing import do_bench

from fx_fuser.kernels.base import example
from fx_fuser.kernels.head_loss import spec_of
from fx_fuser.native import launch
from fx_fuser.native.kernel_spec import POINTWISE
from fx_fuser.ops.head_loss import width_of

rows: list[list[object]] = []


def measure(name: str, moved: int, run: Callable[[], object]) -> None:
    milliseconds = do_bench(run, warmup=100, rep=400, return_mode="median")
    rows.append([name, f"{milliseconds * 1e3:.1f}", f"{moved / milliseconds / 1e6:.0f}"])


def bytes_of(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def swish(dtype: torch.dtype) -> None:
    z = torch.randn(1024, 8192, device="cuda", dtype=dtype)
    out = torch.empty_like(z)
    spec = example(POINTWISE, "Swish", 1, torch.float32, dtype, dtype)
    launch.pointwise(spec, out, [z], [2.0])
    expected = (z.double() * z.double().sigmoid() * 2).to(dtype)
    torch.testing.assert_close(out, expected)
    measure(f"swish {dtype}", bytes_of(z, out), lambda: launch.pointwise(spec, out, [z], [2.0]))
    measure(f"  torch copy of {dtype}", bytes_of(z, out), lambda: out.copy_(z))


def batch_norm_mul(memory_format: torch.memory_format, side: int) -> None:
    z = torch.randn(128, 64, side, side, device="cuda").to(memory_format=memory_format)
    mean, var, gamma, beta = (torch.rand(64, 1, 1, device="cuda") + 0.5 for _ in range(4))
    inputs = [z, mean, var, gamma, beta, torch.full([], 2.0, device="cuda")]
    spec = example(POINTWISE, "BatchNormMul", 1, *[torch.float32] * 8)
    out = torch.empty_like(z)
    launch.pointwise(spec, out, inputs, [1e-5])
    expected = ((z - mean) * torch.rsqrt(var + 1e-5) * gamma + beta) * 2
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    inputs[0] = out
    label = f"batch_norm_mul in place, {side}x{side} {memory_format}"
    measure(label, 2 * bytes_of(z), lambda: launch.pointwise(spec, out, inputs, [1e-5]))
    measure("  torch copy", 2 * bytes_of(z), lambda: out.copy_(z))


def batch_stats(shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format) -> None:
    x = torch.randn(shape, device="cuda", dtype=dtype).to(memory_format=layout)
    mean, variance = launch.batch_stats(x)
    exact = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(variance.double(), exact[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mean.double(), exact[1], rtol=1e-5, atol=1e-6)
    measure(
        f"batch_stats {list(shape)} {dtype} {layout}", bytes_of(x), lambda: launch.batch_stats(x)
    )


def head_loss(count: int, columns: int, trains: bool) -> None:
    """In place: each run reads the gradients of the previous run as logits."""
    logits = torch.randn(count, width_of(columns), device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, columns, (count,), device="cuda")
    losses = torch.empty(count, device="cuda")
    scale = torch.ones((), device="cuda") if trains else None
    expected = F.cross_entropy(logits[:, :columns].float(), labels, reduction="none")
    spec = spec_of(torch.bfloat16)

    def run() -> None:
        launch.head_loss(spec, logits, labels, losses, scale, columns, -100)

    run()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    what = "with gradients" if trains else "alone"
    measure(f"losses {what}, [{count}, {columns}]", (1 + trains) * bytes_of(logits), run)


def head_loss_kept(count: int, columns: int, pitch: int) -> None:
    """The kernels for logits that stay, in rows of this pitch."""
    logits = torch.randn(count, pitch, device="cuda", dtype=torch.bfloat16)[:, :columns]
    labels = torch.randint(0, columns, (count,), device="cuda")
    losses, sums = torch.empty(count, device="cuda"), torch.empty(count, 2, device="cuda")
    gradient = torch.empty(count, width_of(columns), device="cuda", dtype=torch.bfloat16)
    expected = F.cross_entropy(logits.float(), labels, reduction="none")
    spec, scale = spec_of(torch.bfloat16), torch.ones(count, device="cuda")

    def run() -> None:
        launch.head_loss_kept(spec, logits, labels, losses, sums, -100)

    def backward() -> None:
        launch.head_loss_gradient(spec, logits, sums, labels, scale, -scale, gradient, -100)

    run()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    what = f"of logits that stay, [{count}, {columns}], pitch {pitch}"
    measure(f"losses {what}", bytes_of(logits), run)
    measure(f"gradients {what}", 2 * bytes_of(logits), backward)


def main() -> None:
    swish(torch.float32)
    swish(torch.bfloat16)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        batch_norm_mul(memory_format, 126)
        batch_norm_mul(memory_format, 127)
        for dtype in (torch.float32, torch.bfloat16):
            batch_stats((128, 64, 126, 126), dtype, memory_format)
            batch_stats((128, 64, 127, 127), dtype, memory_format)
            batch_stats((32, 256, 14, 14), dtype, memory_format)
        batch_stats((128, 3, 224, 224), torch.float32, memory_format)
    for count, columns in ((2048, 50257), (4096, 128256)):
        head_loss(count, columns, trains=True)
        head_loss(count, columns, trains=False)
        for pitch in sorted({columns, width_of(columns)}):
            head_loss_kept(count, columns, pitch)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda)
    print(tabulate(rows, headers=["kernel", "µs", "GB/s"]))


if __name__ == "__main__":
    main()
