"""Attention whose mask adds numbers gets a form that a fused kernel takes, and keeps its sense."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attending import (
    BF16,
    Attend,
    B,
    D,
    H,
    S,
    by_formula,
    check,
    compiled,
    formed_masks,
    sdpa,
    tensors,
)
from helpers import slow_but
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fx_fuser
from fx_fuser.ops.attention import ATTENTION, Attention, fitted, why_formula

inf = math.inf
QKV = [(B, H, S, D)] * 3


def hides(fill: float) -> Tensor:
    """[L, S]: what adds `fill` to later keys."""
    return torch.zeros(S, S).masked_fill(torch.ones(S, S).triu(1) > 0, fill)


def changed_later(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    m = m * 1
    y = sdpa(q, k, v, m.permute(2, 0, 1)[None])
    m.add_(1)
    return y + m.mean()


# A learned bias, as people hand it to attention.
LEARNED: dict[str, tuple[Attend, list[tuple[int, ...]]]] = {
    "seen from the other side": (
        lambda q, k, v, m: sdpa(q, k, v, m.permute(2, 0, 1)[None]), [*QKV, (S, S, H)],
    ),
    "of three dimensions": (lambda q, k, v, m: sdpa(q, k, v, m), [*QKV, (H, S, S)]),
    "of three dimensions, five of the others": (
        lambda q, k, v, m: sdpa(q, k, v, m), [*[(2, 2, H, S, D)] * 3, (H, S, S)],
    ),
    "of five dimensions": (
        lambda q, k, v, m: sdpa(q, k, v, m), [*[(2, 2, H, S, D)] * 3, (2, 1, H, S, S)],
    ),
    "three dimensions": (lambda q, k, v, m: sdpa(q, k, v, m), [*[(4, S, D)] * 3, (4, S, S)]),
    "of a sample": (lambda q, k, v, m: sdpa(q, k, v, m.mT), [*QKV, (B, 1, S, S)]),
    "of two dimensions": (lambda q, k, v, m: sdpa(q, k, v, m.mT), [*QKV, (S, S)]),
    "expanded over keys": (
        lambda q, k, v, m: sdpa(q, k, v, m.expand(B, 1, S, S)), [*QKV, (B, 1, S, 1)],
    ),
    "heads of 12": (
        lambda q, k, v, m: sdpa(q, k, v, m), [*[(B, H, S, 12)] * 3, (1, H, S, S)],
    ),
    "heads of 12 and a key's number": (
        lambda q, k, v, m: sdpa(q, k, v, m), [*[(B, H, S, 12)] * 3, (B, 1, 1, S)],
    ),
    "scaled": (
        lambda q, k, v, m: sdpa(q, k, v, m.mT, dropout_p=0.0, scale=0.3), [*QKV, (1, H, S, S)],
    ),
    "fewer heads of keys": (
        lambda q, k, v, m: sdpa(q, k, v, m.mT, enable_gqa=True),
        [(B, 4, S, D), (B, 2, S, D), (B, 2, S, D), (1, 4, S, S)],
    ),
    "hiding later keys": (
        lambda q, k, v, m: sdpa(q, k, v, m.mT + hides(-inf).to(m)), [*QKV, (1, H, S, S)],
    ),
    "hiding later keys by the least": (
        lambda q, k, v, m: sdpa(q, k, v, m.mT + hides(torch.finfo(BF16).min).to(m)),
        [*QKV, (1, H, S, S)],
    ),
    "hiding a row": (
        lambda q, k, v, m: sdpa(q, k, v, m.masked_fill(torch.arange(S) == 2, -inf).mT),
        [*QKV, (1, H, S, S)],
    ),
    "read elsewhere": (
        lambda q, k, v, m: sdpa(q, k, v, m.mT) + m.mean(), [*QKV, (1, H, S, S)],
    ),
    "changed later": (changed_later, [*QKV, (S, S, H)]),
    "a slice that is not aligned": (
        lambda q, k, v, m: sdpa(q[..., 4:12], k[..., 4:12], v[..., 4:12], m),
        [*[(B, H, S, 16)] * 3, (1, H, S, S)],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("name", slow_but([*LEARNED][::3], LEARNED))
def test_a_learned_bias(name: str) -> None:
    attend, shapes = LEARNED[name]
    check(by_formula(attend), tensors(*shapes), compiled(attend))
    assert counters["fx_fuser_masks"] == {"form": 1}


@pytest.mark.parametrize("name", slow_but([*LEARNED][1::3], LEARNED))
def test_without_gradients(name: str) -> None:
    attend, shapes = LEARNED[name]
    run = compiled(attend)
    with torch.no_grad():
        check(by_formula(attend), tensors(*shapes), run)
    assert counters["fx_fuser_masks"] == {"form": 1}


class Bias(nn.Module):
    """T5's, of transformers 5.17."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 3 * H * D)
        self.table = nn.Embedding(2 * S, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, H, D).permute(2, 0, 3, 1, 4)
        at = torch.arange(x.shape[1], device=x.device)
        bias = self.table(at - at[:, None] + S).permute(2, 0, 1).unsqueeze(0)
        return sdpa(q, k, v, bias, scale=1.0).transpose(1, 2).reshape(*x.shape[:2], -1)


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("amp", [True, False])
def test_t5s_bias(amp: bool, trains: bool) -> None:
    torch.manual_seed(0)
    net = Bias().to(torch.float32 if amp else BF16)
    x = torch.randn(B, S, 16).to(net.table.weight.dtype)

    def run(of: Any) -> Tensor:
        with torch.autocast("cpu", BF16, enabled=amp), torch.set_grad_enabled(trains):
            made: Tensor = of(x)
        return made

    mine, theirs = run(compiled(net)), run(by_formula(net))
    assert counters["fx_fuser_masks"] == {"form": 1}
    assert (mine.dtype, mine.stride()) == (theirs.dtype, theirs.stride())
    torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    if trains:
        grads = [
            torch.autograd.grad(y.float().sin().sum(), [*net.parameters()]) for y in (mine, theirs)
        ]
        for a, b in zip(*grads, strict=True):
            assert (a - b).norm() <= 2e-2 * b.norm()


def rows_of(fill: float, dtype: torch.dtype) -> Tensor:
    """[1, H, L, S], the last two exchanged in memory: a row is `fill`, and so is a part of one, and
    a row is near it."""
    torch.manual_seed(2)
    mask = torch.randn(1, H, S, S)
    mask[:, :, 1] = mask[:, 0, 3, :4] = fill
    mask[:, 1, 4] = fill
    mask[:, 1, 4, ::2] = 2 * fill if abs(fill) < 1e38 else fill
    return mask.to(dtype).mT.contiguous().mT


LEAST = torch.finfo(BF16).min
FILLS = [
    -inf,
    LEAST,
    -1e20,
    -1e13,
    -1e12,
    -1e9,
    -1e4,
    -700.0,
    -30.0,
    3e4,
    1e9,
    -LEAST,
    math.nan,
    inf,
]


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("trains", ["all", "but the mask", "nothing"])
@pytest.mark.parametrize("fill", FILLS)
def test_rows_that_a_kernel_is_not_asked_for(fill: float, trains: str) -> None:
    """Such as hide all keys. Of a mask that is trained the graph says that it is moderate, so here
    the op is called."""
    inputs = [*tensors(*QKV), rows_of(fill, BF16).requires_grad_(trains == "all")]

    def formula(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return sdpa(q, k, v, m)

    def mine(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return ATTENTION(q, k, v, m, 0.0, False, None, False)

    run = mine if trains == "all" else compiled(formula)
    with torch.set_grad_enabled(trains != "nothing"):
        check(by_formula(formula), inputs, run)
    assert trains == "all" or counters["fx_fuser_masks"] == {"form": 1}


@pytest.mark.parametrize("fill", [n for n in FILLS if math.isfinite(n)])
def test_what_kernels_add_is_near_0_and_exact(fill: float) -> None:
    """Of a key that shares the row, the difference to the largest has no rounding."""
    mask = (torch.rand(1, 1, 64, 256, dtype=torch.float64) * fill).to(BF16)
    q, k = torch.zeros(1, 1, 64, D, dtype=BF16), torch.zeros(1, 1, 256, D, dtype=BF16)
    form = fitted(Attention(q, k, k, mask))[0].mask
    largest = mask.amax(-1, keepdim=True)
    far = largest.abs() > 1024
    assert form.amax(-1).abs().max() <= 1024
    moved = mask.double() - largest.double() * far
    near = (mask.double() - largest.double()).abs() < 512
    assert torch.equal(form.double()[near], moved[near])
    assert (form.double() - moved).abs().le(moved.abs() / 256).all()


@pytest.mark.each_once
@pytest.mark.parametrize("fill", [-inf, -65504.0, -1e4, -700.0, 3e4])
@pytest.mark.parametrize("trains", [True, False])
def test_rows_in_fp16(fill: float, trains: bool) -> None:
    """Scores are not lost beside 65504: heads stay as they are."""
    inputs = [*tensors(*QKV, dtype=torch.float16), rows_of(fill, torch.float16)]
    run = compiled(lambda q, k, v, m: sdpa(q, k, v, m))
    with torch.set_grad_enabled(trains):
        check(by_formula(lambda q, k, v, m: sdpa(q, k, v, m)), inputs, run, factor=4)
        query = fitted(Attention(*inputs[:3], mask=inputs[3]))[0].query
    assert query.shape == (B, H, S, D)


@pytest.mark.slow
def test_hidden_keys_and_queries_that_are_no_numbers() -> None:
    """A score that is NaN stays so where the mask hides all keys by the least number."""
    q, k, v = tensors(*QKV)
    with torch.no_grad():
        q[0, 0, 1, 3], q[1, 0, 1, 2], k[0, 1, 2, 3] = math.nan, inf, math.nan

    def formula(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return sdpa(q, k, v, m)

    for trains in (True, False):
        inputs = [*(t.detach().requires_grad_(trains) for t in (q, k, v)), rows_of(LEAST, BF16)]
        mine, theirs = (f(*inputs) for f in (compiled(formula), by_formula(formula)))
        assert theirs.isnan().any() and torch.equal(mine.isnan(), theirs.isnan())


@pytest.mark.each_once
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", LEARNED)
def test_the_form_is_one_that_kernels_take(
    name: str, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, shapes = LEARNED[name]
    calls: list[Attention] = []

    def record(q: Tensor, k: Tensor, v: Tensor, m: Any = None, dropout_p: float = 0.0,
               is_causal: bool = False, **others: Any) -> Tensor:  # fmt: skip
        calls.append(Attention(q, k, v, m, dropout_p, is_causal, others.get("scale"),
                               others.get("enable_gqa", False)))  # fmt: skip
        return q

    monkeypatch.setitem(globals(), "sdpa", record)
    with torch.set_grad_enabled(trains):
        attend(*tensors(*shapes))
        (call,) = calls
        form = fitted(call)[0]
    assert why_formula(call) or not trains
    assert not why_formula(form)
    mask = form.mask
    assert mask.stride(-1) == 1 and not any(n % 8 for n in mask.stride()[:-1])
    assert mask.shape[-1] == call.key.shape[-2] and mask.dtype == BF16


def seen(i: Tensor) -> Tensor:
    return i > 0


UNROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "where": lambda i: torch.where(seen(i), 0.0, -inf),
    "masked_fill": lambda i: torch.zeros(H, S, S).masked_fill(~seen(i), -inf),
    "a cast": lambda i: (1.0 - seen(i).float()) * -9984.0,  # a number of bf16
    "a constant": lambda i: hides(-inf).mT.expand(H, S, S),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but([*UNROUNDED][:1], UNROUNDED))
def test_an_fp32_mask_whose_numbers_bf16_has(name: str) -> None:
    make = UNROUNDED[name]

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor) -> Tensor:
        mask = make(i)
        return sdpa(q, k, v, mask if q.dtype != torch.float64 else mask.double())

    inputs = [*tensors(*QKV), torch.randn(H, S, S)]
    check(by_formula(attend), inputs, compiled(attend), factor=3)  # a kernel rounds its scores
    assert counters["fx_fuser_masks"] == {"form": 1}


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize(
    "make",
    [
        lambda i: i,
        lambda i: torch.where(seen(i), 0.0, torch.finfo(torch.float32).min),
        lambda i: torch.where(seen(i), 0.0, -1e4),
        lambda i: (1.0 - i) * -inf,
    ],
)
def test_an_fp32_mask_that_a_kernel_would_round_stays_with_the_formula(
    make: Callable[[Tensor], Tensor],
) -> None:
    long = 72  # the kernel of windows, which rounds no mask, has at most 64
    inputs = [*tensors(*[(B, H, long, D)] * 3), torch.randn(H, long, long)]

    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor) -> Tensor:
        return sdpa(q, k, v, make(i))

    compiled(attend)(*inputs)
    assert not counters["fx_fuser_masks"]
    report = fx_fuser.explain(attend, *inputs, options={"cpu_ops": True})
    mask = report.masks[-1]
    assert mask.done == "formula" and mask.reason == (
        "its mask has 3 dimensions; its mask has dtype torch.float32, which a kernel would round"
    )


@pytest.mark.slow
def test_autocast_rounds_before() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return sdpa(q, k, v, m)

    inputs = tensors(*QKV, (H, S, S), dtype=torch.float32)
    inputs[-1] = (100 * inputs[-1]).detach()  # of which bf16 loses a tenth
    run = compiled(attend)
    mine, theirs = run(*inputs), by_formula(attend)(*inputs)
    assert counters["fx_fuser_masks"] == {"form": 1} and mine.dtype == BF16
    torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_a_size_that_changes_stays_with_the_formula() -> None:
    torch._dynamo.reset()
    counters.clear()
    attend = LEARNED["seen from the other side"][0]
    options = {"inner": "aot_eager", "strict": True, "cpu_ops": True}
    run = torch.compile(attend, backend="fx_fuser", dynamic=True, options=options)
    for n in (5, 6):
        inputs = tensors(*[(B, H, n, D)] * 3, (n, n, H))
        torch.testing.assert_close(run(*inputs), attend(*inputs), rtol=2e-2, atol=2e-2)
    assert not counters["fx_fuser_masks"]


def shared(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    mask = m.permute(2, 0, 1)[None]
    return sdpa(sdpa(q, k, v, mask), k, v, mask)


def sliced_in_each(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    mask = torch.cat([m, m], 1).permute(2, 0, 1)[None]
    y = sdpa(q, k, v, mask[:, :, :, :S].mul(1).mT.mT[..., : k.shape[-2]])
    return sdpa(sdpa(y, k, v, mask[..., : k.shape[-2]].mT.mT), k, v, mask[..., :S].mT.mT)


def sliced_elsewhere(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    mask = torch.cat([m, m], 1).permute(2, 0, 1)[None]
    return sdpa(sdpa(q, k, v, mask[..., :S]), k, v, mask[..., 1 : S + 1])


def written_between_slices(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    mask, at = (m * 1).permute(2, 0, 1)[None], torch.arange(S)
    y = sdpa(q, k, v, mask[..., at].mT)
    mask.mul_(-2)
    return sdpa(y, k, v, mask[..., at].mT)


def other_keys(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    mask = m[..., :1].permute(2, 0, 1)[..., :1].detach()  # its gradient is 0 but for rounding
    return sdpa(sdpa(q, k, v, mask), k[..., 1:, :], v[..., 1:, :], mask)


def written_between(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    mask = (m * 1).permute(2, 0, 1)[None]
    y = sdpa(q, k, v, mask)
    mask.mul_(-2)
    return sdpa(y, k, v, mask)


def under_another_autocast(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    mask = m.permute(2, 0, 1)[None]
    y = sdpa(q, k, v, mask)
    with torch.autocast("cpu", torch.float16):
        return y + sdpa(q, k, v, mask)


def without_gradients_and_with(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    mask = m.permute(2, 0, 1)[None]
    with torch.no_grad():
        y = sdpa(q, k, v, mask)
    return y + sdpa(q, k, v, mask)


def sliced_without_gradients_and_with(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    with torch.no_grad():
        mask = m.permute(2, 0, 1)
    return sdpa(sdpa(q, k, v, mask), k, v, m.permute(2, 0, 1))


def shared_by_three_of_bool(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    mask = (m.permute(2, 0, 1)[None] > 0).expand(B, H, S, S)
    return sdpa(sdpa(sdpa(q, k, v, mask), k, v, mask), q, v, mask)


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    "attend, formed",
    [
        (shared, 1),
        (shared_by_three_of_bool, 1),
        (sliced_in_each, 2),  # and of a copy
        (sliced_elsewhere, 2),
        (written_between_slices, 2),
        (other_keys, 2),
        (written_between, 2),
        (under_another_autocast, 2),
        (without_gradients_and_with, 2),
        (sliced_without_gradients_and_with, 2),
    ],
)
def test_what_layers_have_in_common_is_formed_once(
    attend: Attend, formed: int, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where it is not the same for all, for each."""
    found = formed_masks(monkeypatch)
    with torch.set_grad_enabled(trains):
        check(by_formula(attend), tensors(*QKV, (S, S, H)), compiled(attend), factor=4)
    if "without_gradients" in attend.__name__ and not trains:
        formed = 1
    assert len(found) == formed


@pytest.mark.parametrize("attend", [shared, shared_by_three_of_bool])
def test_an_exported_program_holds_operations_of_aten(attend: Attend) -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
            return attend(q, k, v, m)

    inputs = [v.detach() for v in tensors(*QKV, (S, S, H))]
    program = torch.export.export(Model(), tuple(inputs))
    fused = fx_fuser.fuse_exported(program, options={"strict": True, "cpu_ops": True})
    assert fused is not program
    calls = [n.target for n in fused.graph.nodes if n.op == "call_function"]
    assert {call.namespace for call in calls} == {"aten"}
    assert calls.count(torch.ops.aten.scaled_dot_product_attention.default) > 1
    torch.testing.assert_close(
        fused.module()(*inputs), by_formula(attend)(*inputs), rtol=2e-2, atol=2e-2
    )


@pytest.mark.slow
def test_by_inductor() -> None:
    """Two attentions read one mask, so their masks are made in one loop."""

    run = compiled(shared, inner="inductor")
    check(by_formula(shared), tensors(*QKV, (S, S, H)), run, factor=4)
    with torch.no_grad():
        check(by_formula(shared), tensors(*QKV, (S, S, H)), run, factor=4)
    assert F.scaled_dot_product_attention is sdpa
