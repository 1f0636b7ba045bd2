"""Attention without its mask has other strides; the user's results keep eager's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import slow_but
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

import fx_fuser

B, H, S, D = 2, 3, 6, 8
Attend = Callable[..., Any]


def qkv() -> list[Tensor]:
    """As layers make them: [B, H, S, D] seen from memory of [B, S, H, D]."""
    torch.manual_seed(0)
    return [torch.randn(B, S, H, D).transpose(1, 2).requires_grad_() for _ in range(3)]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """By the plain formula: no kernel of a CPU's takes a mask of three dimensions."""
    mask = torch.ones(1, S, S, dtype=torch.bool).tril() if mask is None else mask
    return F.scaled_dot_product_attention(q, k, v, mask)


def test_the_formula_and_the_kernel_have_other_strides() -> None:
    inputs = qkv()
    alone = F.scaled_dot_product_attention(*inputs, is_causal=True)
    assert attention(*inputs).stride() != alone.stride()


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As transformers does."""
    return attention(q, k, v).transpose(1, 2).contiguous().reshape(B, S, -1).sin()


def reshaped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sin(attention(q, k, v).permute(0, 2, 1, 3).flatten(2))


def returned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


def returned_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v).transpose(1, 2)


def returned_merged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    y = attention(q, k, v).transpose(1, 2)
    return y.contiguous(), y.reshape(B, S, -1)


def viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Strides of the kernel's result do not allow it."""
    return attention(q, k, v).view(B, H, S * D).sin()


def pointwise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v) * 2


def two_readers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = attention(q, k, v)
    return y.transpose(1, 2).reshape(B, S, -1).sin().sum() + y.cos()


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is a copy of the formula's result would be a view of the kernel's."""
    y = attention(q, k, v)
    merged = y.transpose(1, 2).reshape(B, S, -1)
    merged.mul_(2)
    return merged.sin().sum() + y.transpose(1, 2).reshape(-1).sin()


def asked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = attention(q, k, v)
    return y.sin() if y.is_contiguous() else y.cos()


def like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.zeros_like(attention(q, k, v)).transpose(0, 1) + 1


HIDDEN = (merged, reshaped)
SHOWN = (returned, returned_transposed, returned_merged, viewed, pointwise, two_readers, written,
         asked, like)  # fmt: skip


def observed(run: Attend) -> tuple[list[Tensor], list[Tensor]]:
    inputs = qkv()
    results = run(*inputs)
    outputs = list(results) if isinstance(results, tuple) else [results]
    if not outputs[0].requires_grad:
        return outputs, []
    return outputs, list(torch.autograd.grad(sum(y.square().sum() for y in outputs), inputs))  # type: ignore[arg-type]


def compare(attend: Attend, run: Attend) -> None:
    (mine, my_grads), (theirs, their_grads) = observed(run), observed(attend)
    for a, b in zip(mine + my_grads, theirs + their_grads, strict=True):
        # Rows of one key have a gradient of zero, which the kernel computes as a difference.
        assert (a - b).norm() <= 2e-6 * b.norm()
    assert [y.stride() for y in mine] == [y.stride() for y in theirs]


def graphs_of(attend: Attend, inner: str = "aot_eager") -> tuple[Attend, list[str]]:
    torch._dynamo.reset()
    counters.clear()
    texts: list[str] = []
    options = {"inner": inner, "strict": True, "plan": "always"}

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        made = fx_fuser.backend.fx_fuser(gm, inputs, options=options)
        texts.append(str(gm.graph))
        return made

    return torch.compile(attend, backend=backend), texts


@pytest.mark.parametrize(
    "attend", slow_but((merged, reshaped, returned, viewed, written), HIDDEN + SHOWN)
)
def test_results_keep_eagers_strides_and_values(attend: Attend) -> None:
    run, texts = graphs_of(attend)
    compare(attend, run)
    assert counters["fx_fuser_masks"] == {"causal": 1}
    copies = texts[0].count("target=contiguous")
    written_by_the_user = 1 if attend in (merged, returned_merged) else 0
    assert (copies == written_by_the_user) == (attend in HIDDEN), texts[0]


@pytest.mark.slow
@pytest.mark.parametrize("attend", [merged, pytest.param(returned, marks=pytest.mark.slow)])
def test_by_inductor(attend: Attend) -> None:
    run, _ = graphs_of(attend, "inductor")
    compare(attend, run)
    assert counters["fx_fuser_masks"] == {"causal": 1}


@pytest.mark.slow
def test_strides_under_install() -> None:
    torch._dynamo.reset()
    counters.clear()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return returned(q, k, v) @ torch.ones(D, D)

    uncached = inductor_config.patch(force_disable_caches=True)  # on a hit no pass runs
    with uncached, fx_fuser.installed({"strict": True}):
        compare(attend, torch.compile(attend))
    assert counters["fx_fuser_masks"] == {"causal": 1}


class Exported(torch.nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.attend(q, k, v)


@pytest.mark.parametrize("attend", slow_but((returned,), (merged, returned, written)))
def test_in_an_exported_program(attend: Attend, tmp_path: Path) -> None:
    inputs = tuple(qkv())
    with torch.no_grad():
        program = torch.export.export(Exported(attend), inputs)
        counters.clear()
        fused = fx_fuser.fuse_exported(program, options={"strict": True})
        assert counters["fx_fuser_masks"] == {"causal": 1}
        torch.export.save(fused, tmp_path / "program.pt2")
        loaded = torch.export.load(tmp_path / "program.pt2").module()
        made, expected = loaded(*inputs), attend(*inputs)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    assert made.stride() == expected.stride()


def test_a_function_of_the_users_by_a_blind_name_is_not_taken_for_torchs() -> None:
    def reshape(x: Tensor, rows: int) -> Tensor:
        return x.as_strided((rows, 8), (8, 1)) * 1.0  # reads memory in its order

    torch._dynamo.allow_in_graph(reshape)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reshape(attention(q, k, v), B * H * S).sin()

    run, texts = graphs_of(attend)
    compare(attend, run)
    assert counters["fx_fuser_masks"] == {"causal": 1} and "target=contiguous" in texts[0]


def test_in_a_region_of_autocast() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = attention(q, k, v)
        return y.float().sin()

    run, _ = graphs_of(attend)
    inputs = qkv()
    torch.testing.assert_close(run(*inputs), attend(*inputs), rtol=2e-2, atol=2e-2)
    assert run(*inputs).stride() == attend(*inputs).stride()
    assert counters["fx_fuser_masks"] == {"causal": 1}


# ---- nearly causal, nearly open ------------------------------------------------------------------


def causal() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


def but(*place: int) -> Tensor:
    """Causal, but at one place."""
    mask = causal().expand(B, H, S, S).clone()
    mask[place] = ~mask[place]
    return mask


def additive(seen: Tensor, hidden: float) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, hidden)


NEARLY: dict[str, Callable[[], Tensor]] = {
    "causal but for one sample": lambda: but(1, 0, 0, 3),
    "causal but for one head": lambda: but(0, 2, 5, 1),
    "causal for the first sample alone": lambda: torch.stack(
        [causal(), torch.ones(S, S, dtype=torch.bool)]
    )[:, None],
    "causal for the first head alone": lambda: torch.stack([causal(), causal().t(), causal()])[
        None
    ],
    "causal but for its last element": lambda: but(1, 2, 5, 5),
    "causal but for its first element, a row that hides all": lambda: but(0, 0, 0, 0),
    "open but for one element": lambda: but(0, 0, 0, 0) | ~causal(),
    "open but for one row, which hides all": lambda: (torch.arange(S) != 2)[None, :, None].expand(
        1, S, S
    ),
    "open but for one key": lambda: (torch.arange(S) != S - 1)[None, None, :].expand(1, S, S),
    "anti-causal": lambda: causal().t()[None],
    "causal by a large number that is not the least": lambda: additive(causal(), -1e30)[None],
    "causal, and a bias of one": lambda: (additive(causal(), -torch.inf) + torch.eye(S))[None],
}


@pytest.mark.parametrize("name", slow_but([*NEARLY][::3], NEARLY))
def test_a_mask_that_is_nearly_causal_or_open_stays(name: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, NEARLY[name]())

    run, _ = graphs_of(attend)
    inputs = qkv()
    torch.testing.assert_close(run(*inputs), attend(*inputs), equal_nan=True)
    assert not counters["fx_fuser_masks"]


@pytest.mark.parametrize("queries, keys", [(3, S), (S, 4)])
def test_a_rectangular_mask_stays(queries: int, keys: int) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(1, queries, keys, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q[:, :, :queries], k[:, :, :keys], v[:, :, :keys],
                                              mask)  # fmt: skip

    run, _ = graphs_of(attend)
    compare(attend, run)
    assert not counters["fx_fuser_masks"]
