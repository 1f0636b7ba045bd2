"""Conv2d → BatchNorm2d → mul as users write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import CONV, check, conv_program, leaf
from test_spellings import cases, modes
from torch import Tensor, nn

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "1x1": {"kernel_size": 1},
    "1x3": {"kernel_size": (1, 3)},
    "stride 2": {"stride": 2},
    "stride (2, 1)": {"stride": (2, 1)},
    "padding 1": {"padding": 1},
    "padding (2, 1)": {"padding": (2, 1)},
    "padding same": {"padding": "same"},
    "padding same, even kernel": {"padding": "same", "kernel_size": 4},
    "padding same, even by odd": {"padding": "same", "kernel_size": (2, 3)},
    "padding same, dilated": {"padding": "same", "dilation": (2, 1), "kernel_size": 2},
    "padding valid": {"padding": "valid"},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2},
    "depthwise-like": {"groups": 2, "padding": 1, "stride": 2, "bias": False},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "circular": {"padding": (1, 2), "padding_mode": "circular"},
    "replicate": {"padding": 1, "padding_mode": "replicate"},
    "reflect, same": {"padding": "same", "padding_mode": "reflect"},
}
FAST = {
    *("plain", "no bias", "1x3", "stride (2, 1)", "padding (2, 1)", "padding same, even kernel"),
    *("padding valid", "dilation", "depthwise-like", "circular", "reflect, same"),
}


@pytest.mark.one_in(2)
@pytest.mark.each_once
@modes
@pytest.mark.parametrize(
    "settings",
    [
        # Of every two of a kind, the one that has more to it.
        pytest.param(settings, id=name, marks=[] if name in FAST else [pytest.mark.slow])
        for name, settings in CONVOLUTIONS.items()
    ],
)
def test_convolutions(settings: dict[str, Any], train: bool, dynamic: bool) -> None:
    conv = nn.Conv2d(4, 6, **{"kernel_size": 3, **settings})
    model = conv_program(lambda m, x: m.bn(m.conv(x)) * 2.0, conv, nn.BatchNorm2d(6))
    check(model, leaf(3, 4, 8, 9), fuses={CONV: 1}, train=train, dynamic=dynamic)


FUNCTIONAL_CONVOLUTIONS: dict[str, Callable[..., Tensor]] = {
    "F.conv2d": lambda m, x: F.conv2d(x, m.w, m.b),
    "F.conv2d without bias": lambda m, x: F.conv2d(x, m.w),
    "torch.conv2d": lambda m, x: torch.conv2d(x, m.w, m.b),
    "positional": lambda m, x: F.conv2d(x, m.w, m.b, 2, 1, 1, 1),
    "keywords": lambda m, x: F.conv2d(
        input=x, weight=m.w, bias=m.b, stride=(2, 1), padding=(1, 0), dilation=1, groups=1
    ),
    "lists": lambda m, x: F.conv2d(x, m.w, m.b, [2, 1], [1, 0], [1, 1]),
    "one-element tuples": lambda m, x: F.conv2d(x, m.w, m.b, (2,), (1,)),
    "same": lambda m, x: F.conv2d(x, m.w, m.b, padding="same"),
    "valid": lambda m, x: F.conv2d(x, m.w, m.b, padding="valid"),
}


@pytest.mark.one_in(2)
@pytest.mark.each_once
@modes
@cases(FUNCTIONAL_CONVOLUTIONS)
def test_functional_convolutions(
    spelled: Callable[..., Tensor], train: bool, dynamic: bool
) -> None:
    model = conv_program(lambda m, x: m.bn(spelled(m, x)) * 2.0, nn.Identity(), nn.BatchNorm2d(6))
    check(model, leaf(3, 4, 8, 9), fuses={CONV: 1}, train=train, dynamic=dynamic)


NORMS: dict[str, dict[str, Any]] = {
    "not affine": {"affine": False},
    "not tracking": {"track_running_stats": False},
    "neither": {"affine": False, "track_running_stats": False},
    "momentum": {"momentum": 0.3},
    "momentum 0": {"momentum": 0.0},
    "momentum 1": {"momentum": 1.0},
    "eps": {"eps": 0.1},
}


@pytest.mark.each_once
@modes
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("settings", NORMS.values(), ids=NORMS.keys())
def test_norms(settings: dict[str, Any], bias: bool, train: bool, dynamic: bool) -> None:
    conv, norm = nn.Conv2d(4, 6, 3, bias=bias), nn.BatchNorm2d(6, **settings)
    model = conv_program(lambda m, x: m.bn(m.conv(x)) * 2.0, conv, norm)
    check(model, leaf(3, 4, 8, 9), fuses={CONV: 1}, train=train, dynamic=dynamic)


def test_norm_with_cumulative_average_in_eval() -> None:
    model = conv_program(
        lambda m, x: m.bn(m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, momentum=None)
    )
    check(model, leaf(3, 4, 8, 9), fuses={CONV: 1}, train=False)


FUNCTIONAL_NORMS: dict[str, Callable[..., Tensor]] = {
    "F.batch_norm": lambda m, c: F.batch_norm(c, m.mean, m.var, m.gamma, m.beta, m.training),
    "F.batch_norm positional": lambda m, c: F.batch_norm(
        c, m.mean, m.var, m.gamma, m.beta, m.training, 0.2, 1e-3
    ),
    "F.batch_norm keywords": lambda m, c: F.batch_norm(
        c, running_mean=m.mean, running_var=m.var, weight=m.gamma, bias=m.beta,
        training=m.training, momentum=0.2, eps=1e-3,
    ),
    "F.batch_norm default mode": lambda m, c: F.batch_norm(c, m.mean, m.var),
    "F.batch_norm only gamma": lambda m, c: F.batch_norm(
        c, m.mean, m.var, m.gamma, training=m.training
    ),
    "F.batch_norm only beta": lambda m, c: F.batch_norm(
        c, m.mean, m.var, bias=m.beta, training=m.training
    ),
    "F.batch_norm batch statistics": lambda m, c: F.batch_norm(
        c, None, None, m.gamma, m.beta, True
    ),
    "torch.batch_norm": lambda m, c: torch.batch_norm(
        c, m.gamma, m.beta, m.mean, m.var, m.training, 0.1, 1e-5, True
    ),
    "torch.batch_norm bare": lambda m, c: torch.batch_norm(
        c, None, None, None, None, True, 0.1, 1e-5, False
    ),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.each_once
@modes
@cases(FUNCTIONAL_NORMS)
def test_functional_norms(spelled: Callable[..., Tensor], train: bool, dynamic: bool) -> None:
    model = conv_program(
        lambda m, x: spelled(m, m.conv(x)) * 2.0, nn.Conv2d(4, 6, 3), nn.Identity()
    )
    check(model, leaf(3, 4, 8, 9), fuses={CONV: 1}, train=train, dynamic=dynamic)


def _imul_z(m: Any, z: Tensor) -> Tensor:
    z *= 2.0
    return z


def _mul_z_under_old_name(m: Any, z: Tensor) -> Tensor:
    z.mul_(2.0)
    return z


SCALES: dict[str, Callable[..., Tensor]] = {
    "z*2": lambda m, z: z * 2.0,
    "2*z": lambda m, z: 2.0 * z,
    "z*2*3": lambda m, z: z * 2.0 * 3.0,
    "z*p": lambda m, z: z * m.p,
    "p*z": lambda m, z: m.p * z,
    "z*z": lambda m, z: z * z,
    "z/4": lambda m, z: z / 4.0,
    "-z": lambda m, z: -z,
    "torch.mul": lambda m, z: torch.mul(z, 2.0),
    "torch.mul keywords": lambda m, z: torch.mul(input=z, other=m.p),
    "torch.multiply": lambda m, z: torch.multiply(z, 2.0),
    "Tensor.mul": lambda m, z: z.mul(2.0),
    "Tensor.mul_": lambda m, z: z.mul_(2.0),
    "Tensor.div": lambda m, z: z.div(4.0),
    "*=": _imul_z,
    "mul_ under old name": _mul_z_under_old_name,
}


@pytest.mark.one_in(2)
@pytest.mark.each_once
@modes
@cases(SCALES)
def test_scales(spelled: Callable[..., Tensor], train: bool, dynamic: bool) -> None:
    model = conv_program(
        lambda m, x: spelled(m, m.bn(m.conv(x))), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)
    )
    check(model, leaf(3, 4, 8, 9), fuses={CONV: 1}, train=train, dynamic=dynamic)
