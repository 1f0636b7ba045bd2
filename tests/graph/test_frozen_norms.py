"""A frozen BatchNorm that is plain operations is matched as the BatchNorm that it is, or left."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import GROWTH, Program, check, leaf
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

import fx_fuser
from fx_fuser.graph.prepare.bodies import copy_of
from fx_fuser.graph.prepare.prepare import Prepared
from fx_fuser.graph.read.source import called_name

Body = Callable[[Any, Tensor], Any]
CHANNELS = 6
TAKEN, LEFT = {"auto_conv2d_batchnorm": 1}, {"auto_conv2d": 1}


def program(body: Body, **members: Any) -> Program:
    """Vectors as torchvision's FrozenBatchNorm2d calls them, and convolutions."""
    return Program(body, **{
        "conv": nn.Conv2d(4, CHANNELS, 3, padding=1),
        "next": nn.Conv2d(CHANNELS, 3, 1),
        "w": torch.randn(CHANNELS), "b": torch.randn(CHANNELS),
        "rm": torch.randn(CHANNELS), "rv": torch.rand(CHANNELS) + 0.5, **members,
    })  # fmt: skip


def trained(**members: Any) -> dict[str, Any]:
    return {
        "w": nn.Parameter(torch.randn(CHANNELS)), "b": nn.Parameter(torch.randn(CHANNELS)),
        **members,
    }  # fmt: skip


def rows(vector: Tensor) -> Tensor:
    return vector.reshape(1, -1, 1, 1)


def torchvision(m: Any, c: Tensor) -> Tensor:
    w, b, rv, rm = rows(m.w), rows(m.b), rows(m.rv), rows(m.rm)
    scale = w * (rv + 1e-5).rsqrt()
    return c * scale + (b - rm * scale)


def detectron2(m: Any, c: Tensor) -> Tensor:
    scale = m.w * (m.rv + 1e-5).rsqrt()
    shift = m.b - m.rm * scale
    return c * rows(scale).to(c.dtype) + rows(shift).to(c.dtype)


def no_eps(m: Any, c: Tensor) -> Tensor:
    scale = m.w * m.rv.rsqrt()
    return c * rows(scale) + rows(m.b - m.rm * scale)


def by_root(m: Any, c: Tensor) -> Tensor:
    scale = m.w / torch.sqrt(m.rv + 1e-3)
    return scale[:, None, None] * c + (m.b - scale * m.rm)[None, :, None, None]


def unsqueezed(m: Any, c: Tensor) -> Tensor:
    scale = torch.mul(torch.rsqrt(1e-5 + m.rv), m.w).view(1, CHANNELS, 1, 1)
    shift = torch.sub(m.b[:, None, None], m.rm.unsqueeze(-1).unsqueeze(-1) * scale)
    return torch.add(shift, torch.mul(scale, c))


FORMS = {f.__name__: f for f in (torchvision, detectron2, no_eps, by_root, unsqueezed)}


def relu_of(norm: Callable[[Any, Tensor], Tensor]) -> Body:
    return lambda m, x: norm(m, m.conv(x)).relu()


@pytest.mark.each_once
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("norm", FORMS.values(), ids=FORMS)
def test_forms(norm: Callable[[Any, Tensor], Tensor], train: bool) -> None:
    check(program(relu_of(norm)), leaf(2, 4, 5, 7), fuses=TAKEN, train=train, **GROWTH)


@pytest.mark.parametrize("norm", FORMS.values(), ids=FORMS)
def test_trained_vectors(norm: Callable[[Any, Tensor], Tensor]) -> None:
    check(program(relu_of(norm), **trained()), leaf(2, 4, 5, 7), fuses=TAKEN, **GROWTH)


def test_a_bottleneck() -> None:
    """In place, with a residual, as torchvision has it."""

    def body(m: Any, x: Tensor) -> Tensor:
        y = F.relu(torchvision(m, m.conv(x)), inplace=True)
        y = torchvision(m, m.again(y))
        y += x.repeat(1, 2, 1, 1)[:, :CHANNELS]
        return F.relu(y, inplace=True)

    model = program(body, again=nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False))
    check(model, leaf(2, 4, 5, 7), fuses={"auto_conv2d_batchnorm": 2}, **GROWTH)


def test_batches_of_any_size() -> None:
    check(program(relu_of(torchvision)), leaf(2, 4, 5, 7), fuses=TAKEN, dynamic=True, **GROWTH)


def test_a_checkpoint() -> None:
    def body(m: Any, x: Tensor) -> Any:
        return checkpoint(lambda x: torchvision(m, m.conv(x)).relu(), x, use_reentrant=False)

    check(program(body), leaf(2, 4, 5, 7), fuses=TAKEN, **GROWTH)


def test_a_scale_that_others_read() -> None:
    def body(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = rows(m.w) * (rows(m.rv) + 1e-5).rsqrt()
        return (m.conv(x) * scale + (rows(m.b) - rows(m.rm) * scale)).relu(), scale * 2

    check(program(body), leaf(2, 4, 5, 7), fuses=TAKEN, **GROWTH)


def test_a_scale_that_two_norms_share() -> None:
    """One is of an image without a batch, and is left. It still reads the scale and the shift."""

    def body(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = rows(m.w) * (rows(m.rv) + 1e-5).rsqrt()
        shift = rows(m.b) - rows(m.rm) * scale
        return (m.conv(x) * scale + shift).relu(), (m.conv(x[0]) * scale + shift).relu()

    check(program(body), leaf(2, 4, 5, 7), fuses=TAKEN, leaves=("conv2d",), **GROWTH)


def test_explain() -> None:
    options = {**GROWTH, "cpu_ops": True}
    report = fx_fuser.explain(program(relu_of(torchvision)), leaf(2, 4, 5, 7), options=options)
    (site,) = report.fused
    assert site.pattern == "auto_conv2d_batchnorm"
    assert {*site.operands} >= {"running_mean", "running_var", "gamma", "beta"}


# ---- what may be no BatchNorm --------------------------------------------------------------------


def product_read(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    scale = rows(m.w) * (rows(m.rv) + 1e-5).rsqrt()
    product = m.conv(x) * scale
    return (product + (rows(m.b) - rows(m.rm) * scale)).relu(), product.sum()


def other_scale(m: Any, x: Tensor) -> Tensor:
    """The shift is by the scale of another eps."""
    scale, other = (rows(m.w) * (rows(m.rv) + eps).rsqrt() for eps in (1e-5, 1e-1))
    return (m.conv(x) * scale + (rows(m.b) - rows(m.rm) * other)).relu()


def swapped(m: Any, x: Tensor) -> Tensor:
    scale = rows(m.w) * (rows(m.rv) + 1e-5).rsqrt()
    return (m.conv(x) * scale + (rows(m.rm) * scale - rows(m.b))).relu()


def along_rows(m: Any, x: Tensor) -> Tensor:
    """The image has as many rows as channels."""
    scale = (m.w * (m.rv + 1e-5).rsqrt())[:, None]
    return (m.conv(x) * scale + (m.b[:, None] - m.rm[:, None] * scale)).relu()


def made_vectors(m: Any, x: Tensor) -> Tensor:
    scale = rows(m.w.abs()) * (rows(m.rv) + 1e-5).rsqrt()
    return (m.conv(x) * scale + (rows(m.b) - rows(m.rm) * scale)).relu()


def in_place(m: Any, x: Tensor) -> Tensor:
    scale = rows(m.w) * (rows(m.rv) + 1e-5).rsqrt()
    return m.conv(x).mul_(scale).add_(rows(m.b) - rows(m.rm) * scale).relu()


def counted(m: Any, x: Tensor) -> Tensor:
    """The statistics change once the scale is computed, and it is that of before."""
    scale = rows(m.w) * (rows(m.rv) + 1e-5).rsqrt()
    m.rv.add_(1)
    return (m.conv(x) * scale + (rows(m.b) - rows(m.rm) * scale)).relu()


def overwritten(m: Any, x: Tensor) -> Tensor:
    scale = rows(m.w) * (rows(m.rv) + 1e-5).rsqrt()
    shift = rows(m.b) - rows(m.rm) * scale
    scale[:, 0] = 2
    return (m.conv(x) * scale + shift).relu()


def ungraded(m: Any, x: Tensor) -> Tensor:
    """w and b are trained, and no gradient goes through the scale."""
    with torch.no_grad():
        scale = rows(m.w) * (rows(m.rv) + 1e-5).rsqrt()
    return (m.conv(x) * scale + (rows(m.b) - rows(m.rm) * scale)).relu()


def in_float64(m: Any, x: Tensor) -> Tensor:
    scale = rows(m.w.double()) * (rows(m.rv.double()) + 1e-5).rsqrt()
    shift = rows(m.b.double()) - rows(m.rm.double()) * scale
    return (m.conv(x) * scale.to(x.dtype) + shift.to(x.dtype)).relu()


TRAPS: dict[str, tuple[Body, dict[str, Any]]] = {
    "its product is read": (product_read, {}),
    "another scale in the shift": (other_scale, {}),
    "the shift's other sign": (swapped, {}),
    "a number for each row": (along_rows, {}),
    "vectors that are computed": (made_vectors, {}),
    "in place": (in_place, {}),
    "statistics that change": (counted, {}),
    "no gradient through the scale": (ungraded, trained()),
    "a scale that is written to": (overwritten, {}),
    "a trained variance": (
        relu_of(torchvision),
        {"rv": nn.Parameter(torch.rand(CHANNELS) + 0.5)},
    ),
    "a scale of float64": (in_float64, {}),
    "a trained mean": (relu_of(torchvision), {"rm": nn.Parameter(torch.randn(CHANNELS))}),
    "a weight of one number": (relu_of(torchvision), {"w": torch.randn(1)}),
}


# Every second trap is run with a gradient: what only a gradient shows stands there in TRAPS.
@pytest.mark.each_once
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("body, members", TRAPS.values(), ids=TRAPS)
def test_traps(body: Body, members: dict[str, Any], train: bool) -> None:
    if train and body is counted:
        pytest.skip("torch computes the scale again in backward, from what is written then")
    # Without gradients it is the same whether there are any.
    fuses = TAKEN if body is ungraded and not train else LEFT
    model = program(body, **copy.deepcopy(members))
    check(model, leaf(2, 4, 6, 7), fuses=fuses, train=train, **GROWTH)


def test_an_alias_that_only_the_caller_knows() -> None:
    """The statistics and an input that is written to may be the same memory."""

    def body(m: Any, x: Tensor, other: Tensor) -> Tensor:
        scale = rows(m.w) * (rows(m.rv) + 1e-5).rsqrt()
        other.add_(1)
        return (m.conv(x) * scale + (rows(m.b) - rows(m.rm) * scale)).relu()

    check(program(body), leaf(2, 4, 6, 7), torch.ones(2), fuses=LEFT, **GROWTH)


def columns(vector: Tensor) -> Tensor:
    return vector[:, None, None]


# An image without a batch; the sum of its norm with a batch of one, or without. It has as many rows
# as channels. And the sum of a batch in five dimensions, with as many images as channels.
RANKS = {
    "no batch": ((4, CHANNELS, 7), columns),
    "no batch before the sum": ((4, CHANNELS, 7), rows),
    "five dimensions": ((CHANNELS, 4, 5, 7), lambda vector: rows(vector)[None]),
}


@pytest.mark.parametrize("size, shaped", RANKS.values(), ids=RANKS)
def test_only_batches_of_images_have_a_batch_norm(
    size: tuple[int, ...], shaped: Callable[[Tensor], Tensor]
) -> None:
    """Refused here, before any site is sought."""

    def body(m: Any, x: Tensor) -> Tensor:
        scale = shaped(m.w) * (shaped(m.rv) + 1e-5).rsqrt()
        return (m.conv(x) * scale + (shaped(m.b) - shaped(m.rm) * scale)).relu()

    names: list[str] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        graph = copy_of(gm.graph)
        Prepared(graph)
        names.extend(map(called_name, graph.nodes))
        return gm.forward

    torch.compile(program(body), backend=backend)(torch.randn(size))
    assert "conv2d" in names and "batch_norm" not in names


# ---- under autocast ------------------------------------------------------------------------------


def autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    """In bf16, but for the run in float64."""

    def run(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype != torch.float64):
            return call(x)

    return run


def into_next(m: Any, x: Tensor) -> Tensor:
    return m.next(torchvision(m, m.conv(x)).relu())


def into_next_twice(m: Any, x: Tensor) -> Tensor:
    y = F.relu(torchvision(m, m.conv(x)), inplace=True)
    return m.next(y) + m.other(y)


def pooled(m: Any, x: Tensor) -> Tensor:
    return m.next(F.max_pool2d(torchvision(m, m.conv(x)).relu(), 2))


def returned(m: Any, x: Tensor) -> Tensor:
    return torchvision(m, m.conv(x)).relu()


def residual(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = torchvision(m, m.conv(x)).relu()
    return m.next(y), y.sum()


def between(m: Any, x: Tensor) -> Tensor:
    """Rounded first, a sigmoid's argument is another."""
    return m.next(torch.sigmoid(torchvision(m, m.conv(x))))


ROUNDED: dict[str, tuple[Body, dict[bool, bool]]] = {
    "a convolution reads it": (into_next, {False: True, True: True}),
    # Their gradients are added in fp32.
    "two convolutions read it": (into_next_twice, {False: True, True: False}),
    # Rounding makes equal maxima; only the first has a gradient.
    "pooled": (pooled, {False: True, True: False}),
    "returned": (returned, {False: False, True: False}),
    "read in fp32, too": (residual, {False: False, True: False}),
    "a sigmoid between": (between, {False: False, True: False}),
    "detectron2's, which is of 16 bits": (relu_of(detectron2), {False: True, True: True}),
}


@pytest.mark.each_pair
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("body, is_taken", ROUNDED.values(), ids=ROUNDED)
def test_autocast(
    body: Body, is_taken: dict[bool, bool], form: torch.memory_format, train: bool
) -> None:
    model = program(body, other=nn.Conv2d(CHANNELS, 3, 1)).to(memory_format=form)
    x = leaf(2, 4, 6, 8).detach().contiguous(memory_format=form).requires_grad_()
    convolutions = {relu_of: 1, into_next: 2, pooled: 2, into_next_twice: 3}
    count = convolutions.get(body, 2 if body in (residual, between) else 1)
    taken = int(is_taken[train])
    fuses = {"auto_conv2d_batchnorm": taken, "auto_conv2d": count - taken}
    fuses = {name: sites for name, sites in fuses.items() if sites}
    check(model, x, fuses=fuses, train=train, wrap=autocast, **GROWTH)


# ---- what is not fused ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize("norm", FORMS.values(), ids=FORMS)
def test_what_is_not_fused_stays_as_it_was(
    norm: Callable[[Any, Tensor], Tensor], is_cast: bool
) -> None:
    """Every operation, and what Dynamo knew of its value."""

    def body(m: Any, x: Tensor) -> Tensor:
        return m.next(F.relu(norm(m, m.conv(x)), inplace=True))

    def told(graph: Graph) -> Counter[Any]:
        return Counter((n.op, called_name(n), id(n.meta.get("example_value"))) for n in graph.nodes)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        graph = copy_of(gm.graph)
        was = told(graph)
        prepared = Prepared(graph)
        assert "batch_norm" in {called_name(n) for n in graph.nodes}
        prepared.restore({})
        graph.lint()
        assert told(graph) == was
        return GraphModule(gm, graph).forward

    model, x = program(body), torch.randn(2, 4, 6, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        assert torch.equal(torch.compile(model, backend=backend)(x), model(x))
