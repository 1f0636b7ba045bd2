"""Every way to write each pattern fuses: in eval and training, with static and dynamic shapes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import ADD, MUL, check, leaf, linear_program
from torch import Tensor

from fx_fuser.graph.read.canonical import rule_of


def _modes(*slow: str) -> Any:
    """Eval and training with static and dynamic shapes, the costliest only when asked for."""
    every = {
        "eval-static": (False, False),
        "eval-dynamic": (False, True),
        "train-static": (True, False),
        "train-dynamic": (True, True),
    }
    marks = {name: [pytest.mark.slow] if name in slow else [] for name in every}
    return pytest.mark.parametrize(
        "train, dynamic", [pytest.param(*every[n], id=n, marks=marks[n]) for n in every]
    )


modes = _modes("eval-dynamic", "train-dynamic")
modes_of_products = _modes("train-dynamic")
static_dynamic = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


def cases(table: dict[str, Any], every: int = 1) -> Any:
    """Of the table one in `every` is fast; oracle/test_generated.py writes the others, too."""
    return pytest.mark.parametrize(
        "spelled",
        [
            pytest.param(spelled, id=name, marks=[pytest.mark.slow] if i % every else [])
            for i, (name, spelled) in enumerate(table.items())
        ],
    )


# ---- Linear → sigmoid → mul → mul -----------------------------------------------------------


def _imul(m: Any, z: Tensor, y: Tensor) -> Tensor:
    r = z * torch.sigmoid(z)
    r *= 2.0
    return r


def _imul_tensor(m: Any, z: Tensor, y: Tensor) -> Tensor:
    r = torch.sigmoid(z) * 2.0
    r *= y
    return r


def _itruediv(m: Any, z: Tensor, y: Tensor) -> Tensor:
    r = torch.sigmoid(z) * y
    r /= 4.0
    return r


def _mul_in_place_under_old_name(m: Any, z: Tensor, y: Tensor) -> Tensor:
    r = torch.sigmoid(z) * 2.0
    r.mul_(y)
    return r


def _sigmoid_in_place_under_old_name(m: Any, z: Tensor, y: Tensor) -> Tensor:
    z.sigmoid_()
    return z * y * 2.0


def _sigmoid_in_place_of_keyword_under_old_name(m: Any, z: Tensor, y: Tensor) -> Tensor:
    torch.sigmoid_(input=z)
    return z * y * 2.0


def _z_scaled_under_old_name(m: Any, z: Tensor, y: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    z.mul_(2.0)
    return z * s


def _silu_in_place_under_old_name(m: Any, z: Tensor, y: Tensor) -> Tensor:
    F.silu(z, inplace=True)
    return z * y


PRODUCTS: dict[str, Callable[..., Tensor]] = {
    # order and nesting
    "z*sig*2": lambda m, z, y: z * torch.sigmoid(z) * 2.0,
    "sig*z*2": lambda m, z, y: torch.sigmoid(z) * z * 2.0,
    "2*sig*z": lambda m, z, y: 2.0 * torch.sigmoid(z) * z,
    "2*(sig*z)": lambda m, z, y: 2.0 * (torch.sigmoid(z) * z),
    "2*(z*sig)": lambda m, z, y: 2.0 * (z * torch.sigmoid(z)),
    "(2*z)*sig": lambda m, z, y: (2.0 * z) * torch.sigmoid(z),
    "sig*(z*2)": lambda m, z, y: torch.sigmoid(z) * (z * 2.0),
    "z*(2*sig)": lambda m, z, y: z * (2.0 * torch.sigmoid(z)),
    "(sig*2)*z": lambda m, z, y: (torch.sigmoid(z) * 2.0) * z,
    "sig*(y*p)": lambda m, z, y: torch.sigmoid(z) * (y * m.p),
    "(p*y)*sig": lambda m, z, y: (m.p * y) * torch.sigmoid(z),
    "y*sig*y": lambda m, z, y: y * torch.sigmoid(z) * y,
    "z*sig*z": lambda m, z, y: z * torch.sigmoid(z) * z,
    "sig*2*3": lambda m, z, y: torch.sigmoid(z) * 2 * 3,
    "z*sig*2*3": lambda m, z, y: z * torch.sigmoid(z) * 2.0 * 3.0,
    "2*z*sig*0.5": lambda m, z, y: 2.0 * z * torch.sigmoid(z) * 0.5,
    # functions
    "torch.mul": lambda m, z, y: torch.mul(torch.mul(z, torch.sigmoid(z)), 2.0),
    "torch.mul keywords": lambda m, z, y: torch.mul(
        input=torch.mul(input=torch.sigmoid(z), other=z), other=2.0
    ),
    "torch.mul swapped keywords": lambda m, z, y: torch.mul(other=y, input=torch.sigmoid(z)) * z,
    "torch.multiply": lambda m, z, y: torch.multiply(torch.multiply(z, torch.sigmoid(z)), 2.0),
    "Tensor.mul": lambda m, z, y: z.mul(torch.sigmoid(z)).mul(2.0),
    "Tensor.mul keyword": lambda m, z, y: z.mul(other=torch.sigmoid(z)).mul(other=y),
    "Tensor.multiply": lambda m, z, y: z.multiply(torch.sigmoid(z)).multiply(2.0),
    "/ number": lambda m, z, y: z * torch.sigmoid(z) / 4.0,
    "/ 3": lambda m, z, y: z * torch.sigmoid(z) / 3,
    "torch.div": lambda m, z, y: torch.div(y * torch.sigmoid(z), 4.0),
    "torch.div keywords": lambda m, z, y: torch.div(input=y * torch.sigmoid(z), other=4.0),
    "torch.true_divide": lambda m, z, y: torch.true_divide(y * torch.sigmoid(z), 4.0),
    "Tensor.div": lambda m, z, y: (y * torch.sigmoid(z)).div(4.0),
    "neg": lambda m, z, y: -(z * torch.sigmoid(z)),
    "torch.neg": lambda m, z, y: torch.neg(z * torch.sigmoid(z)),
    # sigmoid
    "F.sigmoid": lambda m, z, y: z * F.sigmoid(z) * 2.0,
    "Tensor.sigmoid": lambda m, z, y: z * z.sigmoid() * 2.0,
    "torch.sigmoid keyword": lambda m, z, y: z * torch.sigmoid(input=z) * 2.0,
    "special.expit": lambda m, z, y: z * torch.special.expit(z) * 2.0,
    "nn.Sigmoid": lambda m, z, y: z * m.sigmoid(z) * 2.0,
    "F.silu": lambda m, z, y: F.silu(z) * 2.0,
    "2*F.silu": lambda m, z, y: 2.0 * F.silu(z),
    "F.silu*y": lambda m, z, y: F.silu(z) * y,
    "y*F.silu": lambda m, z, y: y * F.silu(z),
    "nn.SiLU": lambda m, z, y: m.silu(z) * 2.0,
    # in place
    "*=": _imul,
    "*= tensor": _imul_tensor,
    "/=": _itruediv,
    "mul_": lambda m, z, y: (z * torch.sigmoid(z)).mul_(2.0),
    "mul_ twice": lambda m, z, y: (torch.sigmoid(z) * 3.0).mul_(2.0).mul_(y),
    "mul_ under old name": _mul_in_place_under_old_name,
    "multiply_": lambda m, z, y: (z * torch.sigmoid(z)).multiply_(2.0),
    "div_": lambda m, z, y: (z * torch.sigmoid(z)).div_(2.0),
    "sigmoid_": lambda m, z, y: z.sigmoid_() * y * 2.0,
    "torch.sigmoid_": lambda m, z, y: torch.sigmoid_(z) * y * 2.0,
    "sigmoid_ under old name": _sigmoid_in_place_under_old_name,
    "sigmoid_ of a keyword under old name": _sigmoid_in_place_of_keyword_under_old_name,
    "mul_ on z under old name": _z_scaled_under_old_name,
    "F.silu in place": lambda m, z, y: F.silu(z, inplace=True) * 2.0,
    "F.silu in place, positional": lambda m, z, y: F.silu(z, True) * y,
    "F.silu in place under old name": _silu_in_place_under_old_name,
    "nn.SiLU in place": lambda m, z, y: m.silu_in_place(z) * y,
    # operators by the names of their methods
    "__mul__": lambda m, z, y: z.__mul__(torch.sigmoid(z)).__mul__(2.0),
    "__imul__": lambda m, z, y: (z * torch.sigmoid(z)).__imul__(2.0),
}


@pytest.mark.one_in(2)
@pytest.mark.each_once
@modes_of_products
@cases(PRODUCTS, every=3)
def test_products(spelled: Callable[..., Tensor], train: bool, dynamic: bool) -> None:
    model = linear_program(lambda m, x, y: spelled(m, m.lin(x), y))
    check(model, leaf(4, 8), leaf(4, 6), fuses={MUL: 1}, train=train, dynamic=dynamic)


def _mul_all_in_place(m: Any, z: Tensor, y: Tensor) -> Tensor:
    s = z.sigmoid()
    s.mul_(y)
    return s * 2.0


def _z_times_sigmoid_in_place(m: Any, z: Tensor, y: Tensor) -> Tensor:
    z.mul_(torch.sigmoid(z))
    return z * 2.0


ONLY_INFERENCE: dict[str, Callable[..., Tensor]] = {  # autograd refuses these in eager too
    "sigmoid().mul_()": _mul_all_in_place,
    "z.mul_(sigmoid(z))": _z_times_sigmoid_in_place,
    "sigmoid_().mul_().mul_()": lambda m, z, y: z.sigmoid_().mul_(y).mul_(2.0),
}


@static_dynamic
@cases(ONLY_INFERENCE)
def test_products_only_inference(spelled: Callable[..., Tensor], dynamic: bool) -> None:
    model = linear_program(lambda m, x, y: spelled(m, m.lin(x), y))
    check(model, leaf(4, 8), leaf(4, 6), fuses={MUL: 1}, train=False, dynamic=dynamic)


# ---- Linear → sigmoid → mul → add -----------------------------------------------------------


def _iadd(m: Any, z: Tensor, y: Tensor) -> Tensor:
    r = 2.0 * torch.sigmoid(z)
    r += z
    return r


def _isub(m: Any, z: Tensor, y: Tensor) -> Tensor:
    z -= 2.0 * torch.sigmoid(z)
    return z


def _add_in_place_to_z_under_old_name(m: Any, z: Tensor, y: Tensor) -> Tensor:
    z.add_(2.0 * torch.sigmoid(z))
    return z


SUMS: dict[str, Callable[..., Tensor]] = {
    # order and nesting
    "z+2*sig": lambda m, z, y: z + 2.0 * torch.sigmoid(z),
    "z+sig*2": lambda m, z, y: z + torch.sigmoid(z) * 2.0,
    "2*sig+z": lambda m, z, y: 2.0 * torch.sigmoid(z) + z,
    "sig*2+z": lambda m, z, y: torch.sigmoid(z) * 2.0 + z,
    "y+p*sig": lambda m, z, y: y + m.p * torch.sigmoid(z),
    "p*sig+y": lambda m, z, y: m.p * torch.sigmoid(z) + y,
    "y+2*sig": lambda m, z, y: y + 2.0 * torch.sigmoid(z),
    "sig*y+3": lambda m, z, y: torch.sigmoid(z) * y + 3,
    "3+sig*y": lambda m, z, y: 3.0 + torch.sigmoid(z) * y,
    "sig*y-3": lambda m, z, y: torch.sigmoid(z) * y - 3.0,
    "3-2*sig": lambda m, z, y: 3.0 - 2.0 * torch.sigmoid(z),
    "z-2*sig": lambda m, z, y: z - 2.0 * torch.sigmoid(z),
    "z-sig*2": lambda m, z, y: z - torch.sigmoid(z) * 2.0,
    "z-sig": lambda m, z, y: z - torch.sigmoid(z),
    "sig*z+y": lambda m, z, y: torch.sigmoid(z) * z + y,
    "y+z*sig": lambda m, z, y: y + z * torch.sigmoid(z),
    "z+z*sig": lambda m, z, y: z + z * torch.sigmoid(z),
    "z+y*sig": lambda m, z, y: z + y * torch.sigmoid(z),
    "y+y*sig": lambda m, z, y: y + y * torch.sigmoid(z),
    "sig*2*3+z": lambda m, z, y: torch.sigmoid(z) * 2.0 * 3.0 + z,
    "sig*y+1+2": lambda m, z, y: torch.sigmoid(z) * y + 1.0 + 2.0,
    "sig*2/4+z": lambda m, z, y: torch.sigmoid(z) / 4.0 + z,
    "-sig+z": lambda m, z, y: -torch.sigmoid(z) + z,
    # functions
    "torch.add": lambda m, z, y: torch.add(z, 2.0 * torch.sigmoid(z)),
    "torch.add keywords": lambda m, z, y: torch.add(input=z, other=torch.sigmoid(z) * 2.0),
    "torch.add alpha": lambda m, z, y: torch.add(z, torch.sigmoid(z), alpha=2),
    "torch.add alpha float": lambda m, z, y: torch.add(y, torch.sigmoid(z), alpha=0.5),
    "torch.add alpha 1": lambda m, z, y: torch.add(y, torch.sigmoid(z) * m.p, alpha=1),
    "Tensor.add": lambda m, z, y: z.add(2.0 * torch.sigmoid(z)),
    "Tensor.add alpha": lambda m, z, y: z.add(torch.sigmoid(z), alpha=2),
    "torch.sub": lambda m, z, y: torch.sub(z, 2.0 * torch.sigmoid(z)),
    "torch.sub alpha": lambda m, z, y: torch.sub(z, torch.sigmoid(z), alpha=2),
    "torch.subtract": lambda m, z, y: torch.subtract(z, torch.sigmoid(z), alpha=2),
    "Tensor.sub": lambda m, z, y: z.sub(torch.sigmoid(z) * 2.0),
    "torch.rsub": lambda m, z, y: torch.rsub(torch.sigmoid(z) * 2.0, z),
    "torch.rsub alpha": lambda m, z, y: torch.rsub(torch.sigmoid(z), z, alpha=2),
    "torch.addcmul": lambda m, z, y: torch.addcmul(z, torch.sigmoid(z), y),
    "torch.addcmul swapped": lambda m, z, y: torch.addcmul(y, m.p, torch.sigmoid(z)),
    "torch.addcmul keywords": lambda m, z, y: torch.addcmul(
        input=z, tensor1=torch.sigmoid(z), tensor2=y, value=1
    ),
    "Tensor.addcmul": lambda m, z, y: z.addcmul(y, torch.sigmoid(z)),
    "chained methods": lambda m, z, y: z.sigmoid().mul(2.0).add(z),
    # sigmoid
    "F.sigmoid": lambda m, z, y: z + 2.0 * F.sigmoid(z),
    "special.expit": lambda m, z, y: z + 2.0 * torch.special.expit(z),
    "nn.Sigmoid": lambda m, z, y: z + 2.0 * m.sigmoid(z),
    "F.silu+y": lambda m, z, y: F.silu(z) + y,
    "y+F.silu": lambda m, z, y: y + F.silu(z),
    "F.silu+z": lambda m, z, y: F.silu(z) + z,
    "F.silu+1.5": lambda m, z, y: F.silu(z) + 1.5,
    "nn.SiLU+y": lambda m, z, y: m.silu(z) + y,
    # in place
    "+=": _iadd,
    "-=": _isub,
    "add_": lambda m, z, y: (2.0 * torch.sigmoid(z)).add_(z),
    "add_ alpha": lambda m, z, y: z.add_(torch.sigmoid(z), alpha=2),
    "add_ on z": lambda m, z, y: z.add_(2.0 * torch.sigmoid(z)),
    "add_ on z under old name": _add_in_place_to_z_under_old_name,
    "sub_": lambda m, z, y: z.sub_(torch.sigmoid(z), alpha=2),
    "addcmul_": lambda m, z, y: z.addcmul_(torch.sigmoid(z), y),
    "sigmoid_": lambda m, z, y: z.sigmoid_() * y + m.p,
    "F.silu in place": lambda m, z, y: F.silu(z, inplace=True) + y,
    "nn.SiLU in place, +=": lambda m, z, y: m.silu_in_place(z).add_(y),
    # operators by the names of their methods
    "__add__": lambda m, z, y: z.__add__(torch.sigmoid(z).__mul__(2.0)),
    "__sub__": lambda m, z, y: z.__sub__(torch.sigmoid(z).__neg__().__mul__(2.0)),
}


@pytest.mark.one_in(2)
@pytest.mark.each_once
@modes
@cases(SUMS, every=3)
def test_sums(spelled: Callable[..., Tensor], train: bool, dynamic: bool) -> None:
    model = linear_program(lambda m, x, y: spelled(m, m.lin(x), y))
    check(model, leaf(4, 8), leaf(4, 6), fuses={ADD: 1}, train=train, dynamic=dynamic)


@pytest.mark.parametrize("name", ["abs", "neg", "add", "mul", "matmul", "iadd", "imul"])
def test_an_operator_recorded_as_its_method(name: str) -> None:
    """`abs(z)` is the method `__abs__` in the graphs of torch 2.11's Dynamo."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    named = rule_of(graph.call_method(f"__{name}__", (x, x)))
    assert named is not None
    assert named is rule_of(graph.call_function(getattr(operator, name), (x, x)))


@pytest.mark.parametrize("name", ["__radd__", "__len__", "__no_operator__"])
def test_a_method_that_is_no_operator(name: str) -> None:
    graph = torch.fx.Graph()
    assert rule_of(graph.call_method(name, (graph.placeholder("x"),))) is None


# ---- the Linear itself ----------------------------------------------------------------------


def _bias_in_place(m: Any, x: Tensor) -> Tensor:
    z = x @ m.w.t()
    z += m.b
    return z


LINEARS: dict[str, Callable[..., Tensor]] = {
    "nn.Linear": lambda m, x: m.lin(x),
    "nn.Linear without bias": lambda m, x: m.bare(x),
    "F.linear": lambda m, x: F.linear(x, m.w, m.b),
    "F.linear without bias": lambda m, x: F.linear(x, m.w),
    "F.linear bias=None": lambda m, x: F.linear(x, m.w, bias=None),
    "F.linear bias keyword": lambda m, x: F.linear(x, m.w, bias=m.b),
    "F.linear all keywords": lambda m, x: F.linear(bias=m.b, input=x, weight=m.w),
    "x @ w.t()": lambda m, x: x @ m.w.t(),
    "x @ w.t() + b": lambda m, x: x @ m.w.t() + m.b,
    "b + x @ w.t()": lambda m, x: m.b + x @ m.w.t(),
    "x @ w.t(); += b": _bias_in_place,
    "x @ w.t() .add(b)": lambda m, x: (x @ m.w.t()).add(m.b),
    "x @ w.t() .add_(b)": lambda m, x: (x @ m.w.t()).add_(m.b),
    "torch.add(x @ w.t(), b)": lambda m, x: torch.add(x @ m.w.t(), m.b),
    "x @ w.T + b": lambda m, x: x @ m.w.T + m.b,
    "x @ w.mT + b": lambda m, x: x @ m.w.mT + m.b,
    "x @ torch.t(w)": lambda m, x: x @ torch.t(m.w) + m.b,
    "w.transpose(0, 1)": lambda m, x: x @ m.w.transpose(0, 1) + m.b,
    "w.transpose(1, 0)": lambda m, x: x @ m.w.transpose(1, 0) + m.b,
    "w.transpose(-1, -2)": lambda m, x: x @ m.w.transpose(-1, -2) + m.b,
    "w.transpose(0, -1)": lambda m, x: x @ m.w.transpose(0, -1) + m.b,
    "w.transpose keywords": lambda m, x: x @ m.w.transpose(dim0=0, dim1=1) + m.b,
    "torch.transpose": lambda m, x: x @ torch.transpose(m.w, 0, 1) + m.b,
    "w.swapaxes": lambda m, x: x @ m.w.swapaxes(0, 1) + m.b,
    "w.swapaxes keywords": lambda m, x: x @ m.w.swapaxes(axis0=0, axis1=1) + m.b,
    "w.swapdims": lambda m, x: x @ m.w.swapdims(0, 1) + m.b,
    "w.permute(1, 0)": lambda m, x: x @ m.w.permute(1, 0) + m.b,
    "w.permute((1, 0))": lambda m, x: x @ m.w.permute((1, 0)) + m.b,
    "w.permute(-1, 0)": lambda m, x: x @ m.w.permute(-1, 0) + m.b,
    "torch.permute": lambda m, x: x @ torch.permute(m.w, (1, 0)) + m.b,
    "torch.matmul": lambda m, x: torch.matmul(x, m.w.t()) + m.b,
    "torch.matmul keywords": lambda m, x: torch.matmul(input=x, other=m.w.t()) + m.b,
    "Tensor.matmul": lambda m, x: x.matmul(m.w.t()) + m.b,
    "torch.mm": lambda m, x: torch.mm(x, m.w.t()) + m.b,
    "torch.mm keywords": lambda m, x: torch.mm(input=x, mat2=m.w.t()) + m.b,
    "Tensor.mm": lambda m, x: x.mm(m.w.t()),
    "torch.addmm": lambda m, x: torch.addmm(m.b, x, m.w.t()),
    "torch.addmm keywords": lambda m, x: torch.addmm(input=m.b, mat1=x, mat2=m.w.t()),
    "torch.addmm beta, alpha 1": lambda m, x: torch.addmm(m.b, x, m.w.t(), beta=1, alpha=1),
    "Tensor.addmm": lambda m, x: m.b.addmm(x, m.w.t()),
}


@pytest.mark.one_in(2)
@pytest.mark.each_once
@modes
@pytest.mark.parametrize("pattern", [MUL, ADD])
@cases(LINEARS, every=3)
def test_linears(spelled: Callable[..., Tensor], pattern: str, train: bool, dynamic: bool) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        z = spelled(m, x)
        return z * torch.sigmoid(z) * 2.0 if pattern == MUL else z + 2.0 * torch.sigmoid(z)

    check(linear_program(body), leaf(4, 8), fuses={pattern: 1}, train=train, dynamic=dynamic)
