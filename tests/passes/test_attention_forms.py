"""Attention in 16 bits gets a form that a fused kernel takes; values, gradients, strides stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attending import BF16, OPTIONS, Attend, B, D, H, S, check, compiled, tensors
from helpers import slow_but
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import fx_fuser
from fx_fuser.ops.attention import ATTENTION, Attention, fitted, why_formula
from fx_fuser.testing import assert_equivalent
from fx_fuser.verify.accuracy import PROMISED

sdpa = F.scaled_dot_product_attention  # which a test replaces


def shown(m: Tensor) -> Tensor:
    """Half of the keys, of a mask that is given."""
    return m > 0


FORMS: dict[str, tuple[Attend, list[tuple[int, ...]]]] = {
    "three dimensions": (lambda q, k, v: sdpa(q, k, v), [(4, S, D)] * 3),
    "two dimensions": (lambda q, k, v: sdpa(q, k, v), [(S, D)] * 3),
    "five dimensions": (lambda q, k, v: sdpa(q, k, v), [(2, 2, H, S, D)] * 3),
    "five dimensions, keys of one": (
        lambda q, k, v: sdpa(q, k, v), [(2, 2, H, S, D), (1, 2, H, S, D), (1, 2, H, S, D)],
    ),
    "five dimensions and a mask": (
        lambda q, k, v, m: sdpa(q, k, v, shown(m)), [*[(2, 2, H, S, D)] * 3, (2, 1, 1, S, S)],
    ),
    "three dimensions and a mask": (
        lambda q, k, v, m: sdpa(q, k, v, shown(m)), [*[(4, S, D)] * 3, (4, S, S)],
    ),
    "a mask of three dimensions": (
        lambda q, k, v, m: sdpa(q, k, v, shown(m)), [*[(B, H, S, D)] * 3, (H, S, S)],
    ),
    "a mask of three dimensions, five of the others": (
        lambda q, k, v, m: sdpa(q, k, v, shown(m)), [*[(2, 2, H, S, D)] * 3, (H, S, S)],
    ),
    "a mask seen from the other side": (
        lambda q, k, v, m: sdpa(q, k, v, shown(m).permute(2, 0, 1)[None]),
        [*[(B, H, S, D)] * 3, (S, S, H)],
    ),
    "heads of 12 and a mask": (
        lambda q, k, v, m: sdpa(q, k, v, shown(m)), [*[(B, H, S, 12)] * 3, (B, 1, S, S)],
    ),
    "heads of 12 and a mask, scaled": (
        lambda q, k, v, m: sdpa(q, k, v, shown(m), scale=0.3), [*[(B, H, S, 12)] * 3, (B, 1, S, S)],
    ),
    "values of another size": (
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        [(B, H, S, 12), (B, H, S, 12), (B, H, S, 20)],
    ),
    "keys of one batch": (
        lambda q, k, v: sdpa(q, k, v), [(B, H, S, D), (1, H, S, D), (1, H, S, D)],
    ),
    "fewer heads of keys": (
        lambda q, k, v, m: sdpa(q, k, v, shown(m), enable_gqa=True),
        [(B, 4, S, 12), (B, 2, S, 12), (B, 2, S, 12), (B, 1, S, S)],
    ),
    "a value with rows that are apart": (
        lambda q, k, v: sdpa(q, k, v.mT), [(B, H, S, D), (B, H, S, D), (B, H, D, S)],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("name", slow_but([*FORMS][::3], FORMS))
def test_values_gradients_and_strides(name: str) -> None:
    """A kernel rounds probabilities to 16 bits, which the formula does not: with few keys that is
    luck, so eager's neighbours count, as for `verify`."""
    attend, shapes = FORMS[name]
    inputs = tuple(tensors(*shapes))
    bound = replace(PROMISED, grad_strides=False)
    assert_equivalent(attend, inputs, train=True, options=OPTIONS, bound=bound)
    compiled(attend)(*inputs)
    assert counters["fx_fuser_masks"] == {"form": 1}


@pytest.mark.parametrize("name", FORMS)
def test_the_form_is_one_that_kernels_take(name: str) -> None:
    attend, shapes = FORMS[name]
    calls: list[Attention] = []

    def record(q: Tensor, k: Tensor, v: Tensor, m: Any = None, p: Any = 0.0, causal: Any = False,
               **others: Any) -> Tensor:  # fmt: skip
        calls.append(Attention(q, k, v, m, p, causal, others.get("scale"),
                               others.get("enable_gqa", False)))  # fmt: skip
        return q

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "sdpa", record)
        attend(*tensors(*shapes))
    (call,) = calls
    assert why_formula(call) and not why_formula(fitted(call)[0])


@pytest.mark.slow
def test_by_inductor_and_as_it_was_expanded() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        seen = (m >= 0)[:, None, :, None].expand(B, 1, S, S)
        return sdpa(q, k, v, seen).transpose(1, 2).reshape(B, S, -1)

    q, k, v = tensors(*[(B, H, S, D)] * 3)
    rows = torch.tensor([[1.0, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]])
    run = compiled(lambda q, k, v: attend(q, k, v, rows), inner="inductor")
    check(lambda q, k, v: attend(q, k, v, rows), [q, k, v], run)
    assert counters["fx_fuser_masks"] == {"form": 1}


def rows_shown() -> Tensor:
    """[B, L]: one row of the second sample hides all keys."""
    shown = torch.ones(B, S, dtype=torch.bool)
    shown[1, 2] = False
    return shown


def keys_shown() -> Tensor:
    """[H, L, S]: causal, and one row of the second head hides all keys."""
    shown = torch.ones(H, S, S, dtype=torch.bool).tril()
    shown[1, 3] = False
    return shown


HIDDEN: dict[str, Callable[[], Tensor]] = {
    "expanded over keys": lambda: rows_shown()[:, None, :, None].expand(B, 1, S, S),
    "of one key": lambda: rows_shown()[:, None, :, None].expand(B, H, S, 1),
    "bool": keys_shown,
}


@pytest.mark.parametrize("name", HIDDEN)
def test_rows_whose_keys_are_all_hidden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are 0, as are their gradients, and no kernel is asked what it makes of them."""
    inputs = tensors(*[(B, H, S, D)] * 3)
    mask = HIDDEN[name]()

    def by_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return sdpa(q, k, v, mask)

    given: list[Any] = []

    def recorded(
        q: Tensor, k: Tensor, v: Tensor, m: Any = None, *others: Any, **named: Any
    ) -> Tensor:
        given.append(m)
        return sdpa(q, k, v, m, *others, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    check(by_formula, inputs, lambda q, k, v: ATTENTION(q, k, v, mask, 0.0, False, None, False),
          strides=False)  # fmt: skip
    for m in (m for m in given if m is not None):
        assert m.any(-1).all()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_number_that_changes_and_a_size_that_changes_cost_no_compilation(dynamic: bool) -> None:
    """To look at one here would fix it."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return sdpa(q, k, v, scale=scale)

    def compilations(**options: Any) -> int:
        graphs = []

        def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(gm)
            chosen = {"inner": "aot_eager", "strict": True, "cpu_ops": True, **options}
            return fx_fuser.backend.fx_fuser(gm, inputs, options=chosen)

        torch._dynamo.reset()
        run = torch.compile(attend, backend=backend, dynamic=True)
        for scale, rows in ((0.5, 4), (0.25, 5), (0.125, 6)):
            q, k, v = tensors(*[(rows if dynamic else 4, S, D)] * 3)
            torch.testing.assert_close(run(q, k, v, scale), attend(q, k, v, scale))
        return len(graphs)

    assert compilations() == compilations(masks=False)


@pytest.mark.slow
def test_under_autocast() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return sdpa(q, k, v)

    inputs = tensors(*[(4, S, D)] * 3, dtype=torch.float32)
    run = compiled(attend)
    torch.testing.assert_close(run(*inputs), attend(*inputs), rtol=2e-2, atol=2e-2)
    assert run(*inputs).dtype == BF16 and counters["fx_fuser_masks"]["form"]


@pytest.mark.parametrize(
    "dtype, shape, options",
    [
        (torch.float32, (4, S, D), {}),
        (BF16, (B, H, S, D), {}),
        (BF16, (4, S, D), {"masks": False}),
        (BF16, (4, S, D), {"cpu_ops": False}),
        (BF16, (4, S, D), {"inner": "eager"}),
    ],
)
def test_what_stays_as_it_is(dtype: torch.dtype, shape: Any, options: Any) -> None:
    inputs = tensors(*[shape] * 3, dtype=dtype)
    compiled(lambda q, k, v: sdpa(q, k, v), **options)(*inputs)
    assert not counters["fx_fuser_masks"]


def test_explain_names_what_was_in_the_way() -> None:
    inputs = tensors(*[(4, S, D)] * 3)
    report = fx_fuser.explain(lambda q, k, v: sdpa(q, k, v), *inputs, options={"cpu_ops": True})
    (mask,) = report.masks
    assert mask.done == "form" and mask.reason == "its query has 3 dimensions"
    assert "is rewritten for a fused kernel: its query has 3 dimensions" in " ".join(
        str(report).split()
    )


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
@pytest.mark.parametrize("apart", [False, True], ids=["as the result", "with other strides"])
@pytest.mark.parametrize("done", ["form", "causal"])
def test_gradients_reach_the_kernel_with_the_strides_of_its_result(
    inner: str, apart: bool, done: str
) -> None:
    """torch 2.11 keeps cuDNN's backward for the strides of the first gradient, whatever those of
    the next are. Where a mask was formed, and where it was removed."""

    def attend(x: Tensor, m: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (t.view(B, S, H, D).transpose(1, 2) for t in x.chunk(3, -1))
        causal = torch.ones(S, S, dtype=torch.bool).tril()
        all_or_none = (m > 0).expand(B, 1, S, S)  # of the keys, in a row
        out = sdpa(q, k, v, causal if done == "causal" else all_or_none)
        if apart:
            return out.contiguous().view(B, H, S * D) * weight.view(B, H, S * D)
        return out.transpose(1, 2).reshape(B, S, H * D) * weight.view(B, S, H * D)

    class Strides(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if "scaled_dot_product" in str(func) and "backward" in str(func):
                seen.append((args[0].stride(), args[4].stride()))  # of the gradient, the result
            return func(*args, **(kwargs or {}))

    x, m, weight = tensors((B, S, 3 * H * D), (B, 1, S, 1), (B, S, H * D))
    seen: list[tuple[Any, Any]] = []
    y = compiled(attend, inner=inner)(x, m, weight)
    assert counters["fx_fuser_masks"] == {done: 1}
    with Strides():
        y.float().square().sum().backward()
    assert len(seen) == 1 and seen[0][0] == seen[0][1] and seen[0][1][1] == D, seen
