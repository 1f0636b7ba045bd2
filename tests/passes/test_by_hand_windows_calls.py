"""torch's attention with a bias in its mask, of windows, becomes fx_fuser's op: as transformers'
Swin calls it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand_graphs import Seen, rewritten
from test_by_hand_windows import Attend, check, inputs, parts, windows_in
from torch import Tensor, nn

from benchmarks.sm90 import relative
from fx_fuser.graph.attention.find import find
from fx_fuser.graph.attention.site import AttentionSite, Refused
from fx_fuser.graph.read.view import View
from fx_fuser.ops.attention_bias.window import ATTENTION_WINDOW
from fx_fuser.passes.by_hand import clock

Masked = Callable[[Tensor, Tensor], Tensor]


def bias_of(table: Tensor) -> Tensor:
    return table.permute(2, 0, 1).contiguous().unsqueeze(0)


def repeated(mask: Tensor, batches: int) -> Tensor:
    """transformers': for all windows of all images."""
    windows, length = mask.shape[:2]
    whole = mask.unsqueeze(1).unsqueeze(0).expand(batches // windows, -1, -1, -1, -1)
    return whole.reshape(-1, 1, length, length)


def called(packed: Tensor, mask: Tensor, **more: Any) -> Tensor:
    q, k, v = parts(packed)
    out = F.scaled_dot_product_attention(q, k, v, mask, **more)
    return out.transpose(1, 2).flatten(2)


def learned(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    return called(packed, bias_of(table), scale=0.3)


def both(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    return called(packed, bias_of(table) + repeated(mask, packed.shape[0]))


def timms(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    windows, length = mask.shape[:2]
    whole = mask.view(1, windows, 1, length, length)
    whole = whole.expand(packed.shape[0] // windows, -1, packed.shape[3], -1, -1)
    return called(packed, bias_of(table) + whole.reshape(-1, packed.shape[3], length, length))


def mask_first(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    return called(packed, torch.add(repeated(mask, packed.shape[0]), bias_of(table)))


def thrice(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    whole = repeated(mask, packed.shape[0])
    return called(packed, (whole + bias_of(table)) + mask[0] * 0.5)


def mask_alone(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    return called(packed, repeated(mask, packed.shape[0]))


def is_taken(seen: Seen) -> bool:
    reasons = [(one.done, one.reason) for found in seen.found for one in found.of_torch]
    is_told = [done for done, _ in reasons] == ["form"]
    return windows_in(seen) == 1 and not seen.calls and is_told


def period(seen: Seen) -> int:
    (call,) = (n for graph in seen.graphs for n in graph.nodes if n.target is ATTENTION_WINDOW)
    assert call.args[6] is True
    bias: Any = call.args[3]
    return int(bias.meta["example_value"].shape[0])


@pytest.mark.parametrize("attend", [both, timms, mask_first, thrice, mask_alone])
def test_a_mask_of_windows_has_their_period(attend: Attend) -> None:
    given = inputs(torch.float32)
    seen = check(attend, given, amp=True)
    assert is_taken(seen) and period(seen) == given[2].shape[0]


def test_a_learned_bias_is_one_for_all() -> None:
    seen = check(learned, inputs(torch.float32), amp=True)
    assert is_taken(seen) and period(seen) == 1


def test_a_sum_in_16_bits() -> None:
    """It is rounded as before: two least numbers are minus infinity, in fp32 they need not be."""

    def attend(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        mask = mask.to(packed.dtype)
        mask = mask.unsqueeze(1).expand(-1, 1, -1, -1).repeat(2, 1, 1, 1)
        return called(packed, mask + bias_of(table.to(packed.dtype)))

    packed, table, mask = inputs(torch.float16)
    with torch.no_grad():
        table[4] = -6e4
    mask[1, 4] = -6e4
    given = [packed.detach(), table.detach(), mask]
    torch._dynamo.reset()
    made = torch.compile(attend, backend=_edited)(*given)
    assert torch.equal(made[4::3, 4], torch.zeros_like(made[4::3, 4]))
    torch.testing.assert_close(made, attend(*given), rtol=2e-3, atol=2e-3)


def test_a_sum_without_gradients() -> None:
    """Its parts have some."""

    def attend(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        learned = bias_of(table)
        with torch.no_grad():
            whole = learned + mask[0]
        return called(packed, whole)

    given = inputs(torch.float32)
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(attend, backend=_edited)(*given).sum().backward()
    assert given[0].grad is not None and given[1].grad is None


@pytest.mark.parametrize("trains", [False, True])
def test_rows_that_see_nothing_are_zero(trains: bool) -> None:
    packed, table, mask = inputs(torch.float32)
    mask = mask.clone()
    mask[1, 3] = -torch.inf
    given = [packed, table, mask] if trains else [packed.detach(), table.detach(), mask]
    assert is_taken(check(both, given, amp=True))
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.compile(both, backend=_edited)(*given)
    assert not out[1, 3].any() and not out.isnan().any()


def test_a_mask_that_autocast_rounds() -> None:
    """The least number of fp32 is minus infinity in 16 bits."""
    packed, table, mask = inputs(torch.float32)
    mask = mask.clone()
    mask[1, 3] = torch.finfo(torch.float32).min
    given = [packed.detach(), table.detach(), mask]
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        made, eager = torch.compile(both, backend=_edited)(*given), both(*given)
    assert not made[1, 3].any() and not eager[1, 3].any()


def _edited(module: Any, example: Sequence[Any]) -> Any:
    rewritten(module)
    return torch._dynamo.lookup_backend("aot_eager")(module, example)


# ---- what stays ---------------------------------------------------------------------------------


def boolean(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    return called(packed, repeated(mask, packed.shape[0]) == 0)


def of_all_batches(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    return called(packed, repeated(mask, packed.shape[0]) * 2)


def dropped(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    return called(packed, bias_of(table), dropout_p=1.0 - 2**-40)


def long_rows(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    q, k, v = parts(packed)
    k, v = (torch.cat([t] * 6, 2) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, bias_of(table).repeat(1, 1, 1, 6))


def twice(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    return called(packed, torch.add(repeated(mask, packed.shape[0]), bias_of(table), alpha=2))


def changed(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    """A part of the sum is written to behind it."""
    bias = bias_of(table) * 2
    whole = bias + repeated(mask, packed.shape[0])
    bias.add_(1)
    return called(packed, whole) + bias.sum().to(packed.dtype)


def in_place(packed: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    whole = repeated(mask, packed.shape[0]).repeat(1, 2, 1, 1)
    whole += bias_of(table)
    return called(packed, whole)


STAY = [boolean, of_all_batches, dropped, long_rows, twice, changed, in_place]


@pytest.mark.parametrize("attend", STAY)
def test_what_stays(attend: Attend) -> None:
    seen = check(attend, inputs(torch.float32), amp=True)
    assert windows_in(seen) == 0 and len(seen.calls) == 1
    assert not any(found.of_torch for found in seen.found)


def test_a_sum_whose_part_changes_is_described_as_it_is() -> None:
    """It is no reason to refuse the attention."""
    found: list[AttentionSite | Refused] = []

    def backend(module: Any, example: Sequence[Any]) -> Any:
        found.extend(find(View(module.graph)))
        return module.forward

    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(changed, backend=backend)(*inputs(torch.float32))
    (site,) = found
    assert isinstance(site, AttentionSite) and not any(one.parts for one in site.operands)


def test_fp32_stays() -> None:
    seen = check(both, inputs(torch.float32))
    assert windows_in(seen) == 0 and len(seen.calls) == 1


def test_small_ones_stay_on_a_gpu() -> None:
    like = [torch.empty(8, 2, 49, 32, dtype=torch.bfloat16) for _ in range(3)]
    one = clock.Windows.of(like, torch.empty(1, 2, 49, 49), like[0].dtype, 1.0, True, True)
    with pytest.raises(Exception, match="it is small"):
        one.check(on_cpu=False, strict=True)


# ---- nets ---------------------------------------------------------------------------------------


def swin() -> tuple[nn.Module, Tensor, int]:
    transformers = pytest.importorskip("transformers")
    sizes = {"patch_size": 4, "embed_dim": 16, "depths": [2], "num_heads": [2]}
    config = transformers.SwinConfig(image_size=56, window_size=7, drop_path_rate=0.0, **sizes)
    return transformers.SwinModel(config), torch.randn(2, 3, 56, 56), 2


def swin_v2() -> tuple[nn.Module, Tensor, int]:
    transformers = pytest.importorskip("transformers")
    sizes = {"patch_size": 4, "embed_dim": 16, "depths": [2], "num_heads": [2]}
    config = transformers.Swinv2Config(image_size=56, window_size=7, drop_path_rate=0.0, **sizes)
    return transformers.Swinv2Model(config), torch.randn(2, 3, 56, 56), 2


def trained(net: nn.Module, call: Callable[..., Any], x: Tensor, amp: bool) -> list[Tensor]:
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if amp else contextlib.nullcontext():
        y = call(x).last_hidden_state
    y.float().pow(3).mean().backward()
    return [y.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize("make", [swin, swin_v2])
@pytest.mark.parametrize("trains", [False, True])
def test_nets(make: Callable[[], tuple[nn.Module, Tensor, int]], trains: bool) -> None:
    """All attentions of a net are taken, and it is as exact as eager mode."""
    import copy

    torch.manual_seed(0)
    net, x, count = make()
    net.train(trains)
    wide = copy.deepcopy(net).double()
    graphs: list[Seen] = []

    def backend(module: Any, example: Sequence[Any]) -> Any:
        graphs.append(rewritten(module))
        return torch._dynamo.lookup_backend("aot_eager")(module, example)

    torch._dynamo.reset()
    with torch.set_grad_enabled(trains):
        compiled = torch.compile(net, backend=backend)
        if not trains:
            with torch.autocast("cpu", torch.bfloat16):
                mine, theirs = ([f(x).last_hidden_state] for f in (compiled, net))
            exact = [wide(x.double()).last_hidden_state]
        else:
            mine, theirs = (trained(net, f, x, amp=True) for f in (compiled, net))
            exact = trained(wide, wide, x.double(), amp=False)
    assert sum(map(windows_in, graphs)) == count
    for a, b, c in zip(mine, theirs, exact, strict=True):
        if c.numel() < 8:  # a factor of each head: of so few chance decides
            continue
        assert relative(a.double(), c) <= 2 * max(relative(b.double(), c), 1e-4)
