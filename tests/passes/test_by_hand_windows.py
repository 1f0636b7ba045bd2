"""16-bit attention written by hand with a bias, of windows, becomes one op of fx_fuser: its values,
gradients and refusals beside eager mode and float64."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand_graphs import Seen, rewritten, with_gradients
from torch import Tensor

from benchmarks.sm90 import relative
from fx_fuser.kernels.attention import window
from fx_fuser.ops.attention_bias.window import ATTENTION_WINDOW
from fx_fuser.options import Options
from fx_fuser.passes.by_hand import clock

IMAGES, WINDOWS, HEADS, L, D = 2, 3, 2, 12, 8
MOST = 2  # times eager's error, the contract in 16 bits
Attend = Callable[..., Tensor]


def inputs(
    dtype: torch.dtype = torch.bfloat16, length: int = L, d: int = D, images: int = IMAGES,
    windows: int = WINDOWS, heads: int = HEADS,
) -> list[Tensor]:  # fmt: skip
    """q, k, v as views of one projection, a table [L, L, heads] and masks of windows."""
    torch.manual_seed(0)
    packed = torch.randn(images * windows, length, 3, heads, d).to(dtype).requires_grad_()
    table = torch.randn(length, length, heads).requires_grad_()
    mask = torch.where(torch.rand(windows, length, length) < 0.4, -100.0, 0.0)
    return [packed, table, mask]


def parts(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def bias_of(table: Tensor) -> Tensor:
    return table.permute(2, 0, 1).unsqueeze(0)


def ended(weights: Tensor, v: Tensor) -> Tensor:
    out = weights.to(v.dtype) @ v
    return out.transpose(1, 2).reshape(v.shape[0], v.shape[2], -1)


# ---- forms --------------------------------------------------------------------------------------


def shared(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    """torchvision's and timm's, without a shift."""
    q, k, v = parts(packed)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1) + bias_of(table)
    return ended(scores.softmax(-1), v)


def shifted(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    """Theirs with one: a batch is images x windows."""
    q, k, v = parts(packed)
    scores = q @ k.transpose(-2, -1) * 0.3 + bias_of(table)
    windows, heads, length = mask.shape[0], q.shape[1], q.shape[2]
    scores = scores.view(-1, windows, heads, length, length) + mask[None, :, None]
    scores = scores.view(-1, heads, length, length)
    return ended(F.dropout(F.softmax(scores, dim=-1), p=0.0), v)


def mask_alone(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    q, k, v = parts(packed)
    scores = (q @ k.mT).unflatten(0, (-1, mask.shape[0])) + mask[:, None]
    return ended(scores.flatten(0, 1).softmax(-1), v)


def divided(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    """transformers': BEiT, MPNet."""
    q, k, v = parts(packed)
    scores = torch.matmul(q, k.transpose(-1, -2)) / 2.5
    scores += bias_of(table).to(scores.dtype)
    return ended(F.softmax(scores, dim=-1, dtype=torch.float32), v)


def cosine(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    """Swin V2's: a factor of each head, which is learned as well."""
    q, k, v = parts(packed)
    factor = table[0, 0, :, None, None].exp()
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * factor + bias_of(table)
    return ended(scores.softmax(-1), v)


def added_twice(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    q, k, v = parts(packed)
    bias = bias_of(table)
    scores = torch.add(bias, q @ k.mT) + bias.detach() * 0.5 + mask[0]
    return ended(scores.softmax(-1), v) + bias.sum().to(v.dtype)


def one_head(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    """[B, L, D], as `bmm` has it."""
    q, k, v = (one[:, 0] for one in parts(packed))
    weights = (torch.bmm(q, k.mT) + table[None, :, :, 0]).softmax(-1)
    return torch.bmm(weights.to(v.dtype), v)


FORMS = [shared, shifted, mask_alone, divided, cosine, added_twice, one_head]


def check(
    attend: Attend, given: Sequence[Tensor], amp: bool = False, options: Options | None = None
) -> Seen:
    """Errors at most twice eager's against float64."""
    graphs: list[Seen] = []

    def backend(module: Any, example: Sequence[Any]) -> Any:
        graphs.append(rewritten(module, *([options] if options else [])))
        return torch._dynamo.lookup_backend("aot_eager")(module, example)

    def run(call: Attend) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16) if amp else contextlib.nullcontext():
            made = call(*given)
        return with_gradients(made, given)

    torch._dynamo.reset()
    mine, theirs = run(torch.compile(attend, backend=backend)), run(attend)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    exact = with_gradients(attend(*wide), wide)
    for a, b, c in zip(mine, theirs, exact, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.isnan(), b.isnan())
        pair = [relative(t.double().nan_to_num(), c.nan_to_num()) for t in (a, b)]
        assert pair[0] <= MOST * max(pair[1], torch.finfo(torch.bfloat16).eps / 16)
    assert mine[0].stride() == theirs[0].stride()
    return graphs[0]


def windows_in(seen: Seen) -> int:
    return sum(n.target is ATTENTION_WINDOW for graph in seen.graphs for n in graph.nodes)


def is_taken(seen: Seen) -> bool:
    return windows_in(seen) == 1 and not seen.softmaxes and not seen.calls and not seen.reasons


@pytest.mark.parametrize("attend", FORMS)
@pytest.mark.parametrize(
    "amp", [pytest.param(False, id="bf16"), pytest.param(True, id="amp", marks=pytest.mark.slow)]
)
def test_forms(attend: Attend, amp: bool) -> None:
    given = inputs(torch.float32 if amp else torch.bfloat16)
    assert is_taken(check(attend, given, amp))


def test_amp() -> None:
    assert is_taken(check(shifted, inputs(torch.float32), amp=True))


def test_a_mask_of_images_and_windows() -> None:
    """A period of two axes, behind one that shares it."""

    def attend(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        q, k, v = parts(packed)
        scores = (q @ k.mT).view(2, 2, 3, HEADS, L, L) + mask[:, None]
        scores = scores + mask.flip(0)[:2, None, None]
        return ended(scores.view(-1, HEADS, L, L).softmax(-1), v)

    assert is_taken(check(attend, inputs(images=4)))


@pytest.mark.parametrize("attend", [shared, shifted])
def test_fp16(attend: Attend) -> None:
    assert is_taken(check(attend, inputs(torch.float16)))


@pytest.mark.parametrize(
    "scaled",
    [
        lambda q: q * 0.3,
        lambda q: 0.3 * q,
        lambda q: q / 4,
        pytest.param(lambda q: q * torch.tensor(0.3), id="tensor"),
        pytest.param(lambda q: q * q.new_full((1, 1, 1, 1), 0.3), id="broadcast"),
        pytest.param(lambda q: q.clone().mul_(0.3), id="in place"),
        pytest.param(lambda q: 2 / (q.abs() + 1), id="reciprocal"),
    ],
)
def test_a_factor_of_the_queries(scaled: Callable[[Tensor], Tensor]) -> None:
    """A number goes into the op, so that nothing is read in between; all else stays ahead of it."""

    def attend(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        q, k, v = parts(packed)
        return ended((scaled(q) @ k.mT + bias_of(table)).softmax(-1), v)

    assert is_taken(check(attend, inputs()))


def test_queries_that_are_changed_behind_their_factor() -> None:
    def attend(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        q, k, v = parts(packed)
        q = q.clone()
        scaled = q * 0.3
        q.add_(1)
        return ended((scaled @ k.mT + bias_of(table)).softmax(-1), v) + q.transpose(1, 2).flatten(2)

    seen = check(attend, inputs())
    assert is_taken(seen)


def test_a_factor_is_in_the_op() -> None:
    seen = check(shared, inputs())
    (graph,) = seen.graphs
    (call,) = [n for n in graph.nodes if n.target is ATTENTION_WINDOW]
    assert call.args[4] == pytest.approx(D**-0.5)
    assert not any("mul" in str(n.target) for n in graph.nodes)


def test_inference() -> None:
    given = [t.detach() for t in inputs()]
    assert is_taken(check(shifted, given))


def test_rows_that_see_nothing_are_not_numbers() -> None:
    packed, table, mask = inputs()
    mask = mask.clone()
    mask[1, 3] = -torch.inf
    given = [packed.detach(), table.detach(), mask]
    assert is_taken(check(shifted, given))
    assert shifted(*given).isnan().any()


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, 12))]
)
def test_random_sizes(seed: int) -> None:
    choose = random.Random(seed)
    given = inputs(
        choose.choice((torch.bfloat16, torch.float16)), choose.choice((5, 16, 49, 64)),
        choose.choice((8, 24, 32, 64)), choose.choice((2, 3)), choose.choice((1, 2, 4)),
        choose.choice((1, 3)),
    )  # fmt: skip
    assert is_taken(check(choose.choice(FORMS[:4]), given))


def test_few_scores_stay() -> None:
    """On a GPU, where launches take as long."""
    like = [torch.empty(8, 2, 49, 32, dtype=torch.bfloat16) for _ in range(3)]
    one = clock.Windows.of(like, torch.empty(1, 2, 49, 49), like[0].dtype, 1.0, False, True)
    one.check(on_cpu=True, strict=True)
    with pytest.raises(Exception, match="it is small"):
        one.check(on_cpu=False, strict=True)


# ---- what stays ---------------------------------------------------------------------------------


def stays(attend: Attend, given: Sequence[Tensor], why: str) -> None:
    seen = check(attend, given)
    assert windows_in(seen) == 0 and len(seen.softmaxes) == 1
    assert any(why in reason for reason in seen.reasons), seen.reasons


def scaled_behind(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    q, k, v = parts(packed)
    return ended(((q @ k.mT + bias_of(table)) * 0.3).softmax(-1), v)


def windows_first(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    """A batch is windows x images: its number modulo the windows says nothing."""
    q, k, v = parts(packed)
    scores = (q @ k.mT + bias_of(table)).unflatten(0, (mask.shape[0], -1)) + mask[:, None, None]
    return ended(scores.flatten(0, 1).softmax(-1), v)


def dropped(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    q, k, v = parts(packed)
    weights = (q @ k.mT + bias_of(table)).softmax(-1)
    return ended(F.dropout(weights, 1.0), v)


def capped(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    q, k, v = parts(packed)
    return ended((torch.tanh(q @ k.mT) + bias_of(table)).softmax(-1), v)


def a_number(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    q, k, v = parts(packed)
    return ended((q @ k.mT + bias_of(table) + 1.5).softmax(-1), v)


def doubled(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    q, k, v = parts(packed)
    return ended(torch.add(q @ k.mT, bias_of(table), alpha=2).softmax(-1), v)


def a_factor_of_rows(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    q, k, v = parts(packed)
    return ended((q @ k.mT * table[:, :1, 0] + bias_of(table)).softmax(-1), v)


def divided_by_a_tensor(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    q, k, v = parts(packed)
    return ended((q @ k.mT / (table[0, 0, :, None, None] + 9) + bias_of(table)).softmax(-1), v)


def over_queries(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    q, k, v = parts(packed)
    return ended((q @ k.mT + bias_of(table)).softmax(-2), v)


def read_elsewhere(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    q, k, v = parts(packed)
    scores = q @ k.mT + bias_of(table)
    return ended(scores.softmax(-1), v) + scores.amax().to(v.dtype)


def few_keys(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    q, k, v = parts(packed)
    keys, values = (t[:, :1].expand(-1, q.shape[1], -1, -1) for t in (k, v))
    return ended((q @ keys.mT + bias_of(table)).softmax(-1), values)


def written_to(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    q, k, v = parts(packed)
    out = ((q @ k.mT + bias_of(table)).softmax(-1)).to(v.dtype) @ v
    out.mul_(2)
    return out


def bias_written_to(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    q, k, v = parts(packed)
    bias = bias_of(table) * 2
    scores = q @ k.mT + bias
    bias.add_(1)
    return ended(scores.softmax(-1), v) + bias.sum().to(v.dtype)


STAY = [
    (scaled_behind, "scaled after its bias"),
    (windows_first, "too few of its batches share a bias"),
    (capped, "tanh is applied"),
    (a_number, "other than one tensor"),
    (a_factor_of_rows, "not one number of each head"),
    (divided_by_a_tensor, "is not by a number"),
    (over_queries, ""),
    (read_elsewhere, "also used by"),
    (few_keys, "serves several query heads"),
    (written_to, "its result is written to"),
    (bias_written_to, "may be changed in place"),
]


@pytest.mark.parametrize("attend, why", STAY)
def test_what_stays(attend: Attend, why: str) -> None:
    stays(attend, inputs(), why)


def test_a_factor_of_the_bias_stays_outside_or_the_attention_stays() -> None:
    seen = check(doubled, inputs())
    assert windows_in(seen) + len(seen.softmaxes) == 1


def test_dropout_stays() -> None:
    """Of all weights, so that values are known: NaN is nowhere, and out is 0."""
    stays(dropped, inputs(), "it has dropout")


@pytest.mark.parametrize(
    "sizes, why",
    [
        ({"length": window.ROWS + 1}, "no kernel takes sizes"),
        ({"d": 12}, "no kernel takes sizes"),
        ({"d": 72}, "no kernel takes sizes"),
        ({"images": 1, "windows": 1}, "too few of its batches"),
    ],
)
def test_sizes_that_no_kernel_has(sizes: dict[str, int], why: str) -> None:
    stays(shared, inputs(**sizes), why)  # type: ignore[arg-type]


def test_fp32_stays_fp32s() -> None:
    stays(shared, inputs(torch.float32), "its mask depends on")


def test_rows_off_16_bytes() -> None:
    packed, table, mask = inputs(d=9)

    def cut(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        return shared(packed[..., :8], table, mask)

    stays(cut, [packed, table, mask], "rows of whole 16-byte vectors")


def test_the_contest_runs_both() -> None:
    """On a CPU by torch's formula, which is compared with itself."""
    tensors = [torch.randn(4, 2, 9, 8).bfloat16() for _ in range(3)]
    bias = torch.randn(2, 2, 9, 9)
    for trains, count in ((False, 1), (True, 4)):
        one = clock.Windows.of(tensors, bias, torch.bfloat16, 0.3, False, trains)
        by_hand, fused = (candidate.run() for candidate in one.candidates())
        assert len(by_hand) == count and len(fused) == count + trains  # type: ignore[arg-type]
