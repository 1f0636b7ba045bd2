"""The operators by themselves: schema, fakes and gradients, for every kind of operand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import ADD, CONV, MUL
from toolchains import needs_compilers
from torch import Tensor
from torch.library import opcheck

from fx_fuser.anchors import ANCHORS
from fx_fuser.native import load
from fx_fuser.ops import library, run

F64, F32 = torch.float64, torch.float32
NORM = "conv2d_batchnorm"


def _operand(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    sizes = {
        "0": (),
        "n": (shape[-1],) if len(shape) == 2 else (shape[1], 1, 1),
        "m": (shape[0], *[1] * (len(shape) - 1)),
        "c": (*shape[:2], *[1] * (len(shape) - 2)),
        "f": shape,
    }
    return torch.randn(sizes[kind], dtype=dtype, requires_grad=True)


# An epilogue in which each of its letters stands for an operand: see `_epilogue`.
TAILS = {
    MUL: "v0 = sigmoid(z); v1 = mul(v0, a); v2 = mul(v1, b)",
    ADD: "v0 = sigmoid(z); v1 = mul(v0, a); v2 = add(v1, b)",
    CONV: "v0 = mul(z, a)",
}


def _epilogue(
    tail: str, kinds: str, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[str, list[Tensor], list[float]]:
    """The op's arguments of that name, t and s. kinds: z, s, or the shape of a tensor (see
    `_operand`), of each operand."""
    text, t, s = tail, list[Tensor](), list[float]()
    for letter, kind in zip("ab", kinds, strict=False):
        name = "z"
        if kind == "s":
            name = f"s{len(s)}"
            s.append(0.75)
        elif kind != "z":
            name = f"t{len(t)}"
            t.append(_operand(kind, shape, dtype))
        text = text.replace(f", {letter})", f", {name})")
    return text, t, s


def linear_args(
    kinds: str,
    dtype: torch.dtype,
    bias: bool = True,
    native: bool = True,
    tail: str = MUL,
    kind: str = "linear",
) -> tuple:
    shapes = ((4, 3), (5, 3) if kind == "linear" else (3, 5))
    x, w = (torch.randn(*s, dtype=dtype, requires_grad=True) for s in shapes)
    b = torch.randn(5, dtype=dtype, requires_grad=True) if bias else None
    makers = ("library", "library", False)
    return (x, w, b, *makers, *_epilogue(TAILS[tail], kinds, (4, 5), dtype), dtype, dtype, native)


def conv_args(
    kinds: str,
    dtype: torch.dtype,
    training: bool,
    bias: bool = True,
    affine: bool = True,
    padding: tuple[int, ...] = (1, 1, 1, 1),
    native: bool = True,
    tracked: bool = True,
) -> tuple:
    x, w = (torch.randn(*s, dtype=dtype, requires_grad=True) for s in ((2, 4, 4, 5), (4, 2, 3, 2)))
    vectors = [torch.randn(4, dtype=dtype, requires_grad=True) for _ in range(3)]
    mean, var = torch.randn(4, dtype=dtype), torch.rand(4, dtype=dtype) + 0.5
    left, right, top, bottom = padding
    shape = (2, 4, 4 + top + bottom - 2, 5 + left + right - 1)
    b, gamma, beta = (v if present else None for v, present in zip(vectors, (bias, affine, affine)))
    return (
        *(x, w, b, *((mean, var) if tracked else (None, None)), gamma, beta),
        *([1, 1], list(padding), [1, 1], 2, False, "library", "library", False),
        *(training, 0.1, 1e-5),
        *_epilogue(TAILS[CONV], kinds, shape, dtype),
        *(dtype, dtype, native),
    )


def _tensors(args: Any) -> list[Tensor]:
    flat = [a for arg in args for a in (arg if isinstance(arg, list) else [arg])]
    return [a for a in flat if isinstance(a, Tensor) and a.requires_grad]


def _gradcheck(name: str, args: tuple) -> None:
    op, wanted = getattr(torch.ops.fx_fuser, name).default, _tensors(args)

    def run(*values: Tensor) -> Tensor:
        of = dict(zip(map(id, wanted), values))
        swap = [
            [of.get(id(a), a) for a in arg] if isinstance(arg, list) else of.get(id(arg), arg)
            for arg in args
        ]
        return op(*swap)[0]

    assert torch.autograd.gradcheck(run, wanted, fast_mode=True)


LINEAR_KINDS = ["zs", "sz", "ss", "zz", "0z", "z0", "nz", "zn", "mf", "fm", "ff", "0n", "s0"]
CONV_KINDS = ["z", "s", "0", "n", "m", "c", "f"]


@pytest.mark.each_once
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kinds", LINEAR_KINDS)
@pytest.mark.parametrize("tail", [MUL, ADD])
@pytest.mark.parametrize("kind", ["linear", "matmul"])
def test_gradcheck_linear(kind: str, tail: str, kinds: str, bias: bool) -> None:
    _gradcheck(kind, linear_args(kinds, F64, bias, tail=tail, kind=kind))


@pytest.mark.each_once
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kinds", CONV_KINDS)
def test_gradcheck_conv(kinds: str, training: bool) -> None:
    _gradcheck(NORM, conv_args(kinds, F64, training))


@pytest.mark.each_once
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    "settings",
    [{"bias": False}, {"affine": False}, {"padding": (0, 1, 1, 0)}, {"padding": (2, 1, 0, 1)}],
    ids=["no bias", "not affine", "one-sided padding", "uneven padding"],
)
def test_gradcheck_conv_forms(settings: dict[str, Any], training: bool) -> None:
    _gradcheck(NORM, conv_args("n", F64, training, **settings))


@pytest.mark.parametrize("kind, args", [
    ("linear", linear_args("z0", F64, native=False)),
    ("linear", linear_args("fn", F64, native=False, tail=ADD)),
    ("matmul", linear_args("fn", F64, native=False, tail=ADD, kind="matmul")),
    (NORM, conv_args("n", F64, True, native=False)),
    (NORM, conv_args("n", F64, False, native=False)),
])  # fmt: skip
def test_gradcheck_plain_ops(kind: str, args: tuple) -> None:
    _gradcheck(kind, args)


@pytest.mark.slow
@pytest.mark.each_pair
@pytest.mark.parametrize("native", [True, False], ids=["native", "plain"])
@pytest.mark.parametrize("dtype", [F64, F32, torch.bfloat16], ids=["f64", "f32", "bf16"])
@pytest.mark.parametrize("tail", [MUL, ADD])
@pytest.mark.parametrize("kind", ["linear", "matmul"])
def test_opcheck_linear(kind: str, tail: str, dtype: torch.dtype, native: bool) -> None:
    args = linear_args("zn", dtype, native=native, tail=tail, kind=kind)
    opcheck(getattr(torch.ops.fx_fuser, kind).default, args)


@pytest.mark.slow
@pytest.mark.each_pair
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kinds", ["s", "f"])
def test_opcheck_conv(kinds: str, training: bool) -> None:
    opcheck(torch.ops.fx_fuser.conv2d_batchnorm.default, conv_args(kinds, F32, training))


def _detached(value: Any) -> Any:
    if isinstance(value, list):
        return [_detached(v) for v in value]
    return value.detach() if isinstance(value, Tensor) else value


@pytest.mark.each_pair
@pytest.mark.parametrize("save", [False, True], ids=["inference", "saving"])
@pytest.mark.parametrize("kinds", ["zs", "nf"])
@pytest.mark.parametrize("tail", [MUL, ADD])
@pytest.mark.parametrize("kind", ["linear", "matmul"])
def test_opcheck_linear_kernel(kind: str, tail: str, kinds: str, save: bool) -> None:
    *front, _, out, _ = _detached(list(linear_args(kinds, F32, tail=tail, kind=kind)))
    opcheck(run.MANY, run.arguments(kind, (*front, [], out, save)))


@needs_compilers
def test_the_cuda_ops_take_what_their_schemas_say() -> None:
    """As far as a CPU can tell: they are reached, and refuse its tensors."""
    load.load_shim()
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    *front, _, out, _ = _detached(list(linear_args("nf", F32)))
    *turned, _, _, _ = _detached(list(linear_args("nf", F32, kind="matmul")))
    batched = [turned[0][None], turned[1][None], *turned[3:]]
    conv = _detached(list(conv_args("f", F32, True)))
    norm, ct = conv[:18], conv[18:21]
    back = (*ct, ["a kernel"], conv[0], [conv[5], conv[5]], ["x", "weight", "bias"])
    functions = {
        "linear": (*front, ["a kernel"], out, False),
        "matmul": (*turned, ["a kernel"], out, False),
        "bmm": (*batched, ["a kernel"], out, False),
        "conv2d": (*norm[:3], *norm[7:15], *ct, ["a kernel"], out, False),
        "conv2d_batchnorm": (*norm, *ct, ["a kernel"], out, False),
        "conv2d_folded": (*norm[:3], None, *norm[7:11], True),
        "conv2d_backward": (*norm[:3], *norm[7:15], *back),
        "conv2d_batchnorm_backward": (*norm, *back),
    }
    given = [run.arguments(*call) for call in functions.items()]
    calls: list[tuple[Any, Any]] = [(op, call) for op in (run.ONE, run.MANY) for call in given]
    of_fold = ([norm[1]], norm[3:5], [0], [1e-5], [0, 64, 96], "a kernel", out, norm[0])
    ops = torch.ops.fx_fuser
    calls += [(ops.split_product.default, (*front[:2], "a kernel"))]
    calls += [(ops.exact_product.default, (*front[:2], "a kernel")), (ops.fold.default, of_fold)]
    for op, args in calls:
        with pytest.raises(RuntimeError, match=r"is not a CUDA tensor|is not loaded"):
            op.redispatch(cuda, *args)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_the_shim_is_told_the_leaves_in_their_order(training: bool) -> None:
    """A kernel's text has them in that of `leaves`; the shim compares its own with `contract` when
    it is loaded, and leaves out the bias in training."""
    (line,) = (line for line in library.contract() if line.startswith("leaves "))
    anchor = ANCHORS["conv2d_batchnorm"]
    vectors = {n: torch.ones(4) for n in anchor.operands[2:]}
    products = (torch.ones(2, 4, 3, 3), torch.ones(4), torch.ones(4))
    leaves = anchor.leaves(vectors, products, {"training": training, "eps": 1e-5})
    told = [name for name in line.split()[1:] if name != "bias" or not training]
    assert ["c", *told] == [*leaves]
    assert {n for n, v in leaves.items() if not isinstance(v, Tensor)} == {"eps"}


@pytest.mark.each_pair
@pytest.mark.parametrize("save", [False, True], ids=["inference", "saving"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_opcheck_conv_kernel(last: bool, training: bool, save: bool) -> None:
    args = _detached(list(conv_args("f", F32, training)))
    if last:
        args[0] = args[0].to(memory_format=torch.channels_last)
    *front, _, out, _ = args
    opcheck(run.MANY, run.arguments(NORM, (*front, [], out, save)))


@pytest.mark.each_pair
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, "mixed"], ids=str)
@pytest.mark.parametrize("affine", [False, True], ids=["bare", "affine"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_own_backward_gives_the_gradients_of_the_librarys(
    training: bool, affine: bool, dtype: Any
) -> None:
    """Without a GPU the op goes the library's way; its call and what it saves are its own."""
    of_product = torch.bfloat16 if dtype == "mixed" else dtype
    args = conv_args("s", of_product, training, affine=affine)
    if dtype == "mixed":  # a BatchNorm's vectors stay in float32
        wide = (v if v is None else v.detach().float() for v in args[3:7])
        vectors = [v if v is None else v.requires_grad_(i > 1) for i, v in enumerate(wide)]
        args = (*args[:3], *vectors, *args[7:])
    place = args.index("library") + 1
    own = (*args[:place], "direct", *args[place + 1 :])
    found = []
    for arguments in (args, own):
        y, *_ = torch.ops.fx_fuser.conv2d_batchnorm.default(*arguments)
        weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
        grads = torch.autograd.grad((y * weights).sum(), _tensors(args), retain_graph=True)
        found.append(grads)
    saved = y.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert all(t is None or t.numel() < y.numel() for t in saved)
    eps = torch.finfo(torch.bfloat16).eps  # both round once, in the same place
    close = {"atol": 1e-5, "rtol": 1e-4} if dtype == F32 else {"atol": eps, "rtol": eps}
    for gradient, other, operand in zip(*found, _tensors(args), strict=True):
        assert gradient.dtype == operand.dtype
        torch.testing.assert_close(gradient, other, **close)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_opcheck_own_backward(training: bool, dtype: torch.dtype) -> None:
    args = _detached(list(conv_args("s", dtype, training)))
    *front, _, _, _ = args
    front[front.index("library") + 1] = "direct"
    y, *_ = torch.ops.fx_fuser.conv2d_batchnorm.default(*args)
    statistics = [torch.rand(4) + 0.5 for _ in range(2)] if training else []
    wanted = ["x", "weight", "bias", "gamma", "beta"]
    front[-3:] = ["v0 = mul(z, s0)", [], [0.75]]
    arguments = (*front, [], torch.randn_like(y), statistics, wanted)
    opcheck(run.MANY, run.arguments(f"{NORM}_backward", arguments))


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_opcheck_recompute(training: bool, last: bool) -> None:
    conv = _detached(list(conv_args("s", F32, training)))
    if last:
        conv[0] = conv[0].to(memory_format=torch.channels_last)
    linear, matmul = (
        _detached(list(linear_args("ss", F32, kind=k)))[:6] for k in ("linear", "matmul")
    )
    for kind, args in ((NORM, conv[:18]), ("linear", linear), ("matmul", matmul)):
        opcheck(run.IN_TORCH, run.arguments(f"{kind}_recompute", (*args, torch.randn(1))))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_fake_keeps_the_memory_format(training: bool) -> None:
    """A wrong stride of a fake is an AssertionError in Inductor; opcheck on 2.11 misses it."""
    for memory_format in (torch.contiguous_format, torch.channels_last):
        args = _detached(list(conv_args("s", F32, training)))
        args[0] = args[0].to(memory_format=memory_format)
        real = torch.ops.fx_fuser.conv2d_batchnorm.default(*args)
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
            fake = torch.ops.fx_fuser.conv2d_batchnorm.default(*fakes)
        assert [(r.shape, r.stride(), r.dtype) for r in real] == [
            (f.shape, f.stride(), f.dtype) for f in fake
        ]


@pytest.mark.parametrize(
    "kind, tail", [*itertools.product(["linear", "matmul"], [MUL, ADD]), (NORM, CONV)]
)
def test_native_and_plain_agree(kind: str, tail: str) -> None:
    for training in (False, True):
        args = (
            conv_args("f", F64, training)
            if kind == NORM
            else linear_args("fz", F64, tail=tail, kind=kind)
        )
        op = getattr(torch.ops.fx_fuser, kind).default
        native, plain = op(*args), op(*args[:-1], False)
        for a, b in zip(native, plain, strict=True):
            torch.testing.assert_close(a, b)
        wanted = _tensors(args)
        g = torch.randn_like(native[0])
        for a, b in zip(
            torch.autograd.grad(native[0], wanted, g), torch.autograd.grad(plain[0], wanted, g)
        ):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_untracked_statistics_are_not_returned() -> None:
    op = torch.ops.fx_fuser.conv2d_batchnorm.default
    assert len(op(*conv_args("s", F32, True))) == 3
    assert len(op(*conv_args("s", F32, True, tracked=False))) == 1
    assert len(op(*conv_args("s", F32, False))) == 1
