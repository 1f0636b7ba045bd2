"""The native kernels against float64 torch, element for element."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from native_cases import (
    DEVICE,
    FLOATS,
    STATS_SHAPES,
    check_batch_stats,
    check_in_place,
    check_layouts,
    check_weighted_sum,
    guarded_like,
    stats_data,
    weighted_sum,
    whole_numbers,
)

from fx_fuser.kernels.base import example
from fx_fuser.native import launch, load
from fx_fuser.native.kernel_spec import POINTWISE, KernelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@pytest.fixture(scope="module", autouse=True)
def prepared():
    """One parallel build of what the layout tests use."""
    pairs = {(dtype, operand) for dtype in FLOATS for operand in (dtype, torch.float32)}
    pairs |= {(torch.bfloat16, operand) for operand in INTEGERS}
    specs = [weighted_sum(dtype, dtype, operand) for dtype, operand in pairs]
    specs += [weighted_sum(dtype, operand, dtype) for dtype, operand in pairs]
    load.prepare(specs, DEVICE)


# ---- pointwise: which element meets which --------------------------------------------------------

SHAPES = ([1], [13], [4096], [3, 1000], [7, 33], [64, 128], [5, 6, 8], [2, 8, 126, 126])
SHAPES += ([3, 5, 7, 9], [2, 3, 4, 5, 6], [2, 3, 2, 3, 2, 5])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layouts(shape, dtype):
    check_layouts(shape, dtype, torch.float32)
    check_layouts(shape, dtype, dtype)


@pytest.mark.parametrize("operand", INTEGERS, ids=str)
def test_integer_operands(operand):
    check_layouts([6, 7, 16], torch.bfloat16, operand)


@pytest.mark.parametrize("numel", [1, 2, 3, 4, 5, 7, 8, 9, 255, 1023, 1025, 4095, 4097, 100_003])
def test_tails(numel):
    for dtype in FLOATS:
        x = whole_numbers([numel], dtype)
        check_weighted_sum(x, [x, whole_numbers([numel], dtype, 1)])


@pytest.mark.parametrize("offset", range(9))
def test_in_place(offset):
    for dtype in (torch.float32, torch.bfloat16):
        check_in_place([3, 5, 14, 14], dtype, offset)
        check_in_place([3, 5, 7, 7], dtype, offset)


def test_many_operands():
    x = whole_numbers([9, 40], torch.float32)
    check_weighted_sum(x, [x, *(whole_numbers([40], torch.float32, i) for i in range(15))])


def test_more_dimensions_than_the_kernel_walks():
    shape = [2] * 12
    x = whole_numbers(shape, torch.float32)
    every_other = whole_numbers([2 if d % 2 else 1 for d in range(12)], torch.float32, 1)
    check_weighted_sum(x, [x, every_other])


def test_transposed_out():
    x = whole_numbers([40, 24], torch.float32).t()
    check_weighted_sum(x, [x, whole_numbers([24, 40], torch.float32, 1)])


@pytest.mark.parametrize("shape", [[0], [3, 0], [0, 4, 5]])
def test_empty(shape):
    x = whole_numbers(shape, torch.float32)
    check_weighted_sum(x, [x, whole_numbers([], torch.float32)])


def test_side_stream():
    x = whole_numbers([1 << 20], torch.float32)
    spec = weighted_sum(torch.float32, torch.float32, torch.float32)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = x.clone()
        torch.cuda._sleep(20_000_000)
        late.add_(1)  # a launch on another stream would read late before this
        out = torch.empty_like(x)
        launch.pointwise(spec, out, [late, late], [2.0])
    stream.synchronize()
    assert torch.equal(out, 3 * (x + 1) + 2)


def test_cuda_graph():
    x = whole_numbers([4, 8, 7, 7], torch.float32)
    out = torch.empty_like(x)
    spec = weighted_sum(torch.float32, torch.float32, torch.float32)
    launch.batch_stats(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.pointwise(spec, out, [x, x], [2.0])
        mean, variance = launch.batch_stats(out)
    x.copy_(whole_numbers(x.shape, torch.float32, 5))
    graph.replay()
    assert torch.equal(out, 3 * x + 2)
    exact_var, exact_mean = torch.var_mean(out.double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(mean.double(), exact_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(variance.double(), exact_var, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_another_device_than_the_current():
    x = whole_numbers([100], torch.float32).to("cuda:1")
    out = torch.empty_like(x)
    launch.pointwise(weighted_sum(x.dtype, x.dtype, x.dtype), out, [x, x], [2.0])
    assert torch.cuda.current_device() == 0
    assert torch.equal(out, 3 * x + 2)


@pytest.mark.slow
@pytest.mark.parametrize("anchor", ["contiguous", "broadcast row"])
def test_more_than_two_billion_elements(anchor):
    rows, columns = (1 << 31) // 4096 + 3, 4099  # odd rows: no vector is aligned to one
    if torch.cuda.mem_get_info()[0] < 5 * rows * columns:
        pytest.skip("not enough memory")
    pattern = whole_numbers([columns], torch.bfloat16)
    row = (torch.arange(rows, device=DEVICE) % 4).to(torch.bfloat16)[:, None]
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    if anchor == "contiguous":
        out.copy_(pattern.expand_as(out))
        first = out
    else:
        first = pattern
    spec = weighted_sum(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    launch.pointwise(spec, out, [first, row], [2.0])
    for start in range(0, rows, 65536):
        part = slice(start, start + 65536)
        assert torch.equal(out[part], pattern + 2 * row[part] + 2)


# ---- pointwise: values ---------------------------------------------------------------------------


def examples():
    def swish(z, s):
        return z * torch.sigmoid(z) * s

    def batch_norm_mul(z, mean, var, gamma, beta, s, eps):
        return ((z - mean) * torch.rsqrt(var + eps) * gamma + beta) * s

    def every_function(z, y, exponent, beta):
        positive = z.abs() + torch.exp(-y.abs()) + beta
        bounded = F.silu(z) + torch.tanh(y) + (torch.erf(y) + 0.5 * F.relu(z) * beta)
        roots = positive.sqrt() / beta + positive.log() / positive.rsqrt()
        smooth = F.gelu(z) + F.gelu(y, approximate="tanh") + F.softplus(z, beta, 20)
        selected = torch.where(F.relu(z) != 0, torch.minimum(z, y), torch.maximum(z, y))
        powers = positive**2 + 0.25 * positive**exponent
        clamped = (bounded + roots).clamp(-8, 8)
        # The example's two casts; the bound below allows for their rounding.
        rounded = clamped.to(torch.bfloat16).to(z.dtype) + smooth.half().to(z.dtype)
        return rounded + selected + powers + 3 * torch.sigmoid(z)

    return {
        "Swish": (swish, 1, [2.0]),
        "BatchNormMul": (batch_norm_mul, 6, [1e-5]),
        "EveryFunction": (every_function, 2, [1.75, 0.5]),
    }


def values(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    return (x.abs() + 0.1 if seed == 2 else x).to(dtype).to(DEVICE)


@pytest.mark.parametrize("name", examples())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values(name, dtype):
    function, count, scalars = examples()[name]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    spec = example(POINTWISE, name, len(scalars), wide, *[dtype] * (count + 1))
    inputs = [values((64, 1000), dtype, 0), *(values((1000,), dtype, i) for i in range(1, count))]
    out, check_guards = guarded_like(inputs[0])
    launch.pointwise(spec, out, inputs, scalars)
    check_guards()
    # The error of the arithmetic and of the rounding at the end.
    acc_eps = torch.finfo(wide).eps
    if name == "EveryFunction":  # its casts jump: compare with torch in the accumulation dtype
        reference = function(*(x.to(wide) for x in inputs), *scalars).double()
        error = (out.double() - reference).abs()
        bound = (torch.finfo(dtype).eps + 32 * acc_eps) * reference.abs()
        jump = 2.0**-5 + 2.0**-6  # a value between two bfloat16 below 8, two halves below 32
        assert (error <= bound + jump).all()
        assert (error <= bound).double().mean() > 0.99
        return
    reference = function(*(x.double() for x in inputs), *scalars)
    eager = function(*inputs, *scalars).double()
    floor = 8 * acc_eps * reference.abs().max()
    error = (out.double() - reference).abs().max()
    assert error <= 2 * (eager - reference).abs().max() + floor


def of_two(body: str, dtype: torch.dtype = torch.float32) -> KernelSpec:
    """A kernel of this expression of in[0] and in[1], with the number scalar[0] if it reads one."""
    definition = f"""
using namespace fx_fuser;
struct Special {{
  template <class Acc>
  __device__ Acc operator()(const Acc (&in)[2], const Acc (&scalar)[1]) const {{ return {body}; }}
}};"""
    scalars = int("scalar" in body)
    return KernelSpec(POINTWISE, "Special", definition, scalars, *[dtype] * 2, (dtype, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_arithmetic_is_torchs_bit_for_bit(dtype):
    """A kernel per operation, so that nvcc cannot contract a product and a sum to an fma."""
    z = torch.randn(4096, device=DEVICE, dtype=dtype)
    y = torch.randn(4096, device=DEVICE, dtype=dtype) * 3
    z[:4] = torch.finfo(dtype).max * 0.9
    y[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max])
    number = torch.tensor(2.0, device=DEVICE, dtype=dtype)
    bodies = (
        ("sub(math::mul(in[0], Acc(10)), in[1])", lambda: z * 10 - y),
        ("add(math::mul(in[0], in[1]), in[0])", lambda: z * y + z),
        ("mul(math::add(in[0], in[1]), in[1])", lambda: (z + y) * y),
        ("add(in[0], in[1], Acc(0.3))", lambda: torch.add(z, y, alpha=0.3)),
        ("add(in[0], in[1], Acc(10))", lambda: torch.add(z, y, alpha=10)),
        ("sub(in[0], in[1], Acc(0.3))", lambda: torch.sub(z, y, alpha=0.3)),
        ("add(in[1], in[0], Acc(-1))", lambda: torch.add(y, z, alpha=-1)),
        ("div(in[0], in[1])", lambda: z / y),
        ("div_by_number(in[0], Acc(3))", lambda: z / 3),
        ("div_by_number(in[0], scalar[0])", lambda: z / 2),
        ("neg(math::div(in[0], Acc(7)))", lambda: -(z / torch.full_like(z, 7))),
        ("addcmul(in[0], in[1], in[0], Acc(1))", lambda: torch.addcmul(z, y, z)),
        ("addcmul(in[0], in[1], in[0], Acc(0.3))", lambda: torch.addcmul(z, y, z, value=0.3)),
        ("add(math::pow(in[0], Acc(2)), in[1])", lambda: z**2 + y),
        ("add(math::pow(in[0], Acc(3)), in[1])", lambda: z**3 + y),
        ("pow(in[0], Acc(-2))", lambda: z**-2),
        ("mul(in[0], scalar[0])", lambda: z * number),
    )
    specs = [of_two(f"math::{body}", dtype) for body, _ in bodies]
    load.prepare(specs, DEVICE)
    for spec, (body, expected) in zip(specs, bodies):
        out = torch.empty_like(z)
        launch.pointwise(spec, out, [z, y], [2.0] * spec.scalars)
        wrong = (out != expected()) & ~(out.isnan() & expected().isnan())
        assert not wrong.any(), (body, out[wrong][:4], expected()[wrong][:4])


def test_sigmoid_and_silu_of_every_magnitude():
    """A few ulp from torch's, also for subnormal results, where two ulp are 2^-148."""
    z = torch.cat([torch.linspace(-110, 110, 1 << 18), torch.linspace(-89, -87, 1 << 12)])
    z = torch.cat([z, torch.tensor([torch.inf, -torch.inf, torch.nan, -1e30, 1e30, -0.0, 1e-40])])
    z, scale = z.to(DEVICE), torch.full([], 1e38, device=DEVICE)
    for body, function, bound in (("sigmoid", torch.sigmoid, 2), ("silu", F.silu, 3)):
        out, expected = torch.empty_like(z), function(z)
        launch.pointwise(of_two(f"math::{body}(in[0])"), out, [z, scale], [])
        assert torch.equal(out.isnan(), expected.isnan())
        number = ~expected.isnan()
        ulps = (out[number].view(torch.int32) - expected[number].view(torch.int32)).abs()
        assert ulps.max() <= bound, (body, z[number][ulps.argmax()])  # same sign: bits count ulps
        launch.pointwise(of_two(f"math::mul(math::{body}(in[0]), in[1])"), out, [z, scale], [])
        far = {"rtol": 2e-6, "atol": 2**-148 * scale.item()}
        torch.testing.assert_close(out, expected * scale, equal_nan=True, **far)


def test_nan_and_infinity():
    specials = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0])
    z, y = (x.reshape(-1).to(DEVICE) for x in torch.meshgrid(specials, specials, indexing="ij"))
    for body, function in (
        ("math::add(math::relu(in[0]), math::mul(in[1], Acc(0)))", lambda z, y: F.relu(z) + y * 0),
        ("math::minimum(in[0], in[1])", torch.minimum),
        ("math::maximum(in[0], in[1])", torch.maximum),
        ("math::clamp(in[0], Acc(-0.5), Acc(0.5))", lambda z, y: z.clamp(-0.5, 0.5)),
        ("math::mul(math::sigmoid(in[0]), in[1])", lambda z, y: torch.sigmoid(z) * y),
        ("math::mul(math::silu(in[0]), in[1])", lambda z, y: F.silu(z) * y),
        ("math::softplus(in[0], Acc(1), Acc(20))", lambda z, y: F.softplus(z)),
        ("math::add(math::pow(in[0], Acc(3)), math::pow(in[1], Acc(2)))", lambda z, y: z**3 + y**2),
        ("math::where(in[0], in[1], in[0])", lambda z, y: torch.where(z != 0, y, z)),
    ):
        out = torch.empty_like(z)
        launch.pointwise(of_two(body), out, [z, y], [])
        torch.testing.assert_close(out, function(z, y), equal_nan=True, msg=lambda m, b=body: b + m)


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_of_two_zeros(name):
    """-0 is the smaller, on either side, as in torch on CUDA; on a CPU torch may give either."""
    z, y = (torch.tensor(row, device=DEVICE) for row in ([0.0, -0.0, 0.0], [-0.0, 0.0, 0.0]))
    out = torch.full_like(z, torch.nan)
    launch.pointwise(of_two(f"math::{name}(in[0], in[1])"), out, [z, y], [])
    assert (out == 0).all()
    assert out.signbit().tolist() == ([True, True, False] if name == "minimum" else [False] * 3)
    if z.is_cuda:
        assert torch.equal(out.signbit(), getattr(torch, name)(z, y).signbit())


# ---- pointwise: refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda out, x, y: (out.cpu(), [x, y], [2.0]), "not on cpu"),
        (lambda out, x, y: (out, [x, y.cpu()], [2.0]), "input 1 is not on out's device"),
        (lambda out, x, y: (out, [x, y.half()], [2.0]), "input 1 as Float, but it is Half"),
        (lambda out, x, y: (out.half(), [x, y], [2.0]), "writes Float, but out is Half"),
        (lambda out, x, y: (out, [x], [2.0]), "takes 2 inputs, not 1"),
        (lambda out, x, y: (out, [x, y], []), "takes 1 scalars, not 0"),
        (lambda out, x, y: (out, [x, y[:, :3]], [2.0]), r"shape \[8, 3\] does not broadcast"),
        (lambda out, x, y: (out[:, ::2], [x[:, ::2], y[:, ::2]], [2.0]), "out must be dense"),
        (lambda out, x, y: (out, [out.t(), y], [2.0]), "shares memory with out"),
        (lambda out, x, y: (out, [x, out[0]], [2.0]), "shares memory with out"),
    ],
)
def test_refusals(change, says):
    out, x, y = (whole_numbers([8, 8], torch.float32, i) for i in range(3))
    spec = weighted_sum(torch.float32, torch.float32, torch.float32)
    with pytest.raises(RuntimeError, match=says):
        launch.pointwise(spec, *change(out, x, y))


# ---- batch statistics ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", STATS_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_batch_stats(shape, dtype):
    for kind in ("normal", "large mean", "outlier", "constant"):
        x = stats_data(kind, shape, dtype)
        check_batch_stats(x)
        check_batch_stats(x.to(memory_format=torch.channels_last))


def test_batch_stats_of_other_layouts():
    x = stats_data("normal", (4, 6, 10, 12), torch.float32)
    check_batch_stats(x.transpose(0, 1))
    check_batch_stats(x[..., ::2])
    check_batch_stats(x.reshape(-1)[3 : 3 + 2 * 6 * 9 * 12].view(2, 6, 9, 12))  # odd base pointer
    check_batch_stats(x.flatten(2))
    check_batch_stats(x[:, :, 0, 0])


def test_batch_stats_of_a_constant_are_exact():
    for dtype in FLOATS:
        for shape in ((8, 3, 31, 33), (2, 64, 126, 126)):
            x = stats_data("constant", shape, dtype)
            for layout in (torch.contiguous_format, torch.channels_last):
                mean, variance = launch.batch_stats(x.to(memory_format=layout))
                assert (mean == x[0, 0, 0, 0]).all()
                assert (variance == 0).all()


def test_batch_stats_against_cancellation():
    """A sum of squares in fp32 has an error of eps * mean^2, 12 times the variance of 1 here.

    The kernel has only the rounding of group means, half an ulp of 1e4 = 5e-4 each, at random.
    """
    x = stats_data("large mean", (128, 8, 63, 65), torch.float32)
    _, variance = launch.batch_stats(x)
    exact = x.double().var((0, 2, 3), correction=0)
    torch.testing.assert_close(variance.double(), exact, rtol=5e-5, atol=0)


def test_batch_stats_of_nothing_is_nan():
    mean, variance = launch.batch_stats(torch.empty(0, 3, 4, 4, device=DEVICE))
    assert mean.isnan().all() and variance.isnan().all()


def test_batch_stats_of_nan_and_infinity():
    x = stats_data("normal", (2, 3, 9, 9), torch.float32)
    x[0, 0, 0, 0], x[0, 1, 0, 0] = float("nan"), float("inf")
    mean, variance = launch.batch_stats(x)
    assert mean[0].isnan() and variance[0].isnan()
    assert not mean[1].isfinite() and variance[1].isnan()
    assert mean[2].isfinite() and variance[2].isfinite()


@pytest.mark.slow
def test_batch_stats_of_more_than_two_billion_elements():
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("not enough memory")
    x = torch.ones(3, 1, 32771, 32768, dtype=torch.bfloat16, device=DEVICE)
    x[2, 0, -1] = 5.0
    mean, variance = launch.batch_stats(x)
    share = 1 / (3 * 32771)
    torch.testing.assert_close(mean.item(), 1 + 4 * share, rtol=1e-6, atol=0)
    torch.testing.assert_close(variance.item(), 16 * share * (1 - share), rtol=1e-5, atol=0)
