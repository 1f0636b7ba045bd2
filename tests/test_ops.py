"""The operators by themselves: schema, fakes and gradients, for every kind of operand."""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest
import torch
from helpers import ADD, CONV, MUL
from torch import Tensor
from torch.library import opcheck

from fx_fuser import build, native
from fx_fuser.anchors import ANCHORS
from fx_fuser.ops import _PATTERNS

F64, F32 = torch.float64, torch.float32


def _operand(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    sizes = {
        "0": (),
        "n": (shape[-1],) if len(shape) == 2 else (shape[1], 1, 1),
        "m": (shape[0], *[1] * (len(shape) - 1)),
        "c": (*shape[:2], *[1] * (len(shape) - 2)),
        "f": shape,
    }
    return torch.randn(sizes[kind], dtype=dtype, requires_grad=True)


def _wildcards(
    kinds: str, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[list[Tensor | None], list[float], str]:
    """kinds: z, s, or the shape of a tensor (see `_operand`)."""
    t = [None if k in "zs" else _operand(k, shape, dtype) for k in kinds]
    s = [0.75 if k == "s" else 0.0 for k in kinds]
    return t, s, "".join(k if k in "zs" else "t" for k in kinds)


def linear_args(kinds: str, dtype: torch.dtype, bias: bool = True, native: bool = True) -> tuple:
    x, w = (torch.randn(*s, dtype=dtype, requires_grad=True) for s in ((4, 3), (5, 3)))
    b = torch.randn(5, dtype=dtype, requires_grad=True) if bias else None
    makers = ("library", "library", False)
    return (x, w, b, *makers, *_wildcards(kinds, (4, 5), dtype), dtype, dtype, native)


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
        *_wildcards(kinds, shape, dtype),
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


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kinds", LINEAR_KINDS)
@pytest.mark.parametrize("pattern", [MUL, ADD])
def test_gradcheck_linear(pattern: str, kinds: str, bias: bool) -> None:
    _gradcheck(pattern, linear_args(kinds, F64, bias))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kinds", CONV_KINDS)
def test_gradcheck_conv(kinds: str, training: bool) -> None:
    _gradcheck(CONV, conv_args(kinds, F64, training))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    "settings",
    [{"bias": False}, {"affine": False}, {"padding": (0, 1, 1, 0)}, {"padding": (2, 1, 0, 1)}],
    ids=["no bias", "not affine", "one-sided padding", "uneven padding"],
)
def test_gradcheck_conv_forms(settings: dict[str, Any], training: bool) -> None:
    _gradcheck(CONV, conv_args("n", F64, training, **settings))


@pytest.mark.parametrize("pattern, args", [
    (MUL, linear_args("z0", F64, native=False)),
    (ADD, linear_args("fn", F64, native=False)),
    (CONV, conv_args("n", F64, True, native=False)),
    (CONV, conv_args("n", F64, False, native=False)),
])  # fmt: skip
def test_gradcheck_plain_ops(pattern: str, args: tuple) -> None:
    _gradcheck(pattern, args)


@pytest.mark.parametrize("native", [True, False], ids=["native", "plain"])
@pytest.mark.parametrize("dtype", [F64, F32, torch.bfloat16], ids=["f64", "f32", "bf16"])
@pytest.mark.parametrize("pattern", [MUL, ADD])
def test_opcheck_linear(pattern: str, dtype: torch.dtype, native: bool) -> None:
    opcheck(getattr(torch.ops.fx_fuser, pattern).default, linear_args("zn", dtype, native=native))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kinds", ["s", "f"])
def test_opcheck_conv(kinds: str, training: bool) -> None:
    opcheck(getattr(torch.ops.fx_fuser, CONV).default, conv_args(kinds, F32, training))


def _detached(value: Any) -> Any:
    if isinstance(value, list):
        return [_detached(v) for v in value]
    return value.detach() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("save", [False, True], ids=["inference", "saving"])
@pytest.mark.parametrize("kinds", ["zs", "nf"])
@pytest.mark.parametrize("pattern", [MUL, ADD])
def test_opcheck_linear_kernel(pattern: str, kinds: str, save: bool) -> None:
    *front, t, s, letters, _, out, _ = _detached(list(linear_args(kinds, F32)))
    op = torch.ops.fx_fuser.linear_kernel.default
    opcheck(op, (*front, t, s, letters, pattern, [], out, save))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_cuda_ops_take_what_their_schemas_say() -> None:
    """As far as a CPU can tell: they are reached, and refuse its tensors."""
    native._load_shim()
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    *front, t, s, letters, _, out, _ = _detached(list(linear_args("nf", F32)))
    conv = _detached(list(conv_args("f", F32, True)))
    norm, ct = conv[:18], conv[18:21]
    back = (*ct, CONV, ["a kernel"], conv[0], [conv[5], conv[5]], [0, 1, 2])
    calls = {
        "linear_kernel": (*front, t, s, letters, MUL, ["a kernel"], out, False),
        "split_product": (*front[:2], "a kernel"),
        "conv2d_kernel": (*norm[:3], *norm[7:15], *ct, CONV, ["a kernel"], out, False),
        "conv2d_batchnorm_kernel": (*norm, *ct, CONV, ["a kernel"], out, False),
        "conv2d_backward": (*norm[:3], *norm[7:15], *back),
        "conv2d_batchnorm_backward": (*norm, *back),
    }
    for name, args in calls.items():
        op = getattr(torch.ops.fx_fuser, name).default
        with pytest.raises(RuntimeError, match="is not a CUDA tensor"):
            op.redispatch(cuda, *args)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_the_cuda_op_hands_over_the_leaves_in_their_order(training: bool) -> None:
    """A kernel's text has them in that of `leaves`; it is given them in that of shim_conv.h."""
    text = (build.KERNELS / "shim_conv.h").read_text()
    listed = re.findall(r"&norm\.(\w+)", text)
    anchor = ANCHORS["conv2d_batchnorm"]
    vectors = {n: torch.ones(4) for n in anchor.operands[2:]}
    products = (torch.ones(2, 4, 3, 3), torch.ones(4), torch.ones(4))
    leaves = anchor.leaves(vectors, products, {"training": training, "eps": 1e-5})
    names = ["var" if name == "variance" else name for name in listed]
    in_shim = [name for name in names if name != "bias" or not training]
    assert ["c", *in_shim, "eps"] == [*leaves]  # the only number is eps


def test_the_cuda_backward_knows_the_places_of_the_operands() -> None:
    text = (build.KERNELS / "shim_conv_backward.h").read_text()
    places = {name.lower(): int(place) for name, place in re.findall(r"\bk([A-Z]\w*) = (\d)", text)}
    names = ANCHORS["conv2d_batchnorm"].operands
    assert places == {n: names.index(n) for n in ("x", "weight", "bias", "gamma", "beta")}
    assert names[:3] == ANCHORS["conv2d"].operands


@pytest.mark.parametrize("save", [False, True], ids=["inference", "saving"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_opcheck_conv_kernel(last: bool, training: bool, save: bool) -> None:
    args = _detached(list(conv_args("f", F32, training)))
    if last:
        args[0] = args[0].to(memory_format=torch.channels_last)
    *front, _, out, _ = args
    op = torch.ops.fx_fuser.conv2d_batchnorm_kernel.default
    opcheck(op, (*front, CONV, [], out, save))


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
        y, *_ = torch.ops.fx_fuser.conv2d_batchnorm_mul.default(*arguments)
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
    *front, t, s, kinds, _, _, _ = args
    front[front.index("library") + 1] = "direct"
    y, *_ = torch.ops.fx_fuser.conv2d_batchnorm_mul.default(*args)
    vectors = [torch.rand(4) + 0.5 if training else torch.empty(0) for _ in range(2)]
    wanted = [0, 1, 2, 5, 6]
    op = torch.ops.fx_fuser.conv2d_batchnorm_backward.default
    opcheck(op, (*front, t, s, kinds, CONV, [], torch.randn_like(y), vectors, wanted))


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_opcheck_again(training: bool, last: bool) -> None:
    conv = _detached(list(conv_args("s", F32, training)))
    if last:
        conv[0] = conv[0].to(memory_format=torch.channels_last)
    linear = _detached(list(linear_args("s", F32)))
    for kind, args in (("conv2d_batchnorm", conv[:18]), ("linear", linear[:6])):
        op = getattr(torch.ops.fx_fuser, f"{kind}_again").default
        opcheck(op, (*args, torch.randn(1)))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_fake_keeps_the_memory_format(training: bool) -> None:
    """A wrong stride of a fake is an AssertionError in Inductor; opcheck on 2.11 misses it."""
    for memory_format in (torch.contiguous_format, torch.channels_last):
        args = _detached(list(conv_args("s", F32, training)))
        args[0] = args[0].to(memory_format=memory_format)
        real = torch.ops.fx_fuser.conv2d_batchnorm_mul.default(*args)
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
            fake = torch.ops.fx_fuser.conv2d_batchnorm_mul.default(*fakes)
        assert [(r.shape, r.stride(), r.dtype) for r in real] == [
            (f.shape, f.stride(), f.dtype) for f in fake
        ]


@pytest.mark.parametrize("pattern", [MUL, ADD, CONV])
def test_native_and_plain_agree(pattern: str) -> None:
    for training in (False, True):
        args = conv_args("f", F64, training) if pattern == CONV else linear_args("fz", F64)
        op = getattr(torch.ops.fx_fuser, pattern).default
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
    op = torch.ops.fx_fuser.conv2d_batchnorm_mul.default
    assert len(op(*conv_args("s", F32, True))) == 3
    assert len(op(*conv_args("s", F32, True, tracked=False))) == 1
    assert len(op(*conv_args("s", F32, False))) == 1


def test_every_pattern_has_its_op() -> None:
    assert {MUL, ADD, CONV} <= _PATTERNS.keys()
    assert all(hasattr(torch.ops.fx_fuser, name) for name in _PATTERNS)
