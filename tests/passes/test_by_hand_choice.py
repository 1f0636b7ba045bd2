"""Attention written by hand: on which GPUs and at which sizes it is rewritten, by measured time,
and what the backend and explain make of it. Forms: test_by_hand.py, test_by_hand_stays.py."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_graphs import AsOnCuda
from by_hand_graphs import ON_CPU, D, H, L, qkv
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import fx_fuser
from fx_fuser.errors import BuildError
from fx_fuser.kernels import attention
from fx_fuser.kernels.split import SPLIT_GEMM
from fx_fuser.native import load
from fx_fuser.outcome import Outcome
from fx_fuser.passes import attention_split
from fx_fuser.passes.by_hand import clock, rewrite
from fx_fuser.passes.by_hand.clock import Race
from fx_fuser.passes.by_hand.plain import Plain
from fx_fuser.passes.masks import Stays
from fx_fuser.planning import contest
from fx_fuser.planning.bench_ops import form_of_value
from fx_fuser.planning.timing import Timing

PLAIN = Plain(0.125, True)
LONG = (4, 8, 1024, 64)


@pytest.fixture(autouse=True)
def no_counts() -> Iterator[None]:
    counters.clear()
    yield


def on_gpu(*shape: int, keys: int = 0) -> list[Tensor]:
    """keys: heads of these."""
    with FakeTensorMode():
        q = torch.empty(shape, device="cuda:0")
        k = torch.empty(shape[0], keys or shape[1], *shape[2:], device="cuda:0")
        return [q, k, k]


def timed(monkeypatch: pytest.MonkeyPatch, *ms: float) -> list[Any]:
    """Puts these times in place of `contest.times`, and returns the keys that it is asked for."""
    keys: list[Any] = []

    def times(key: Any, make: Any, device: torch.device) -> list[Timing] | str:
        keys.append(key)
        return [Timing(one) for one in ms] or "not enough memory to time it"

    monkeypatch.setattr(contest, "times", times)
    return keys


def stays(
    operands: list[Tensor], plain: Plain = PLAIN, trains: bool = False, strict: bool = True
) -> str:
    try:
        clock.check(operands, plain, trains, on_cpu=False, strict=strict)
    except Stays as reason:
        return str(reason)
    return ""


# ---- where the pass over Inductor's graphs would leave it ----------------------------------------


def test_it_is_timed_where_the_pass_would_take_it(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = timed(monkeypatch, 1.0, 1.0, 0.3)
    assert stays(on_gpu(*LONG)) == "" and len(keys) == 1
    assert built == [attention.spec_for(64).name, SPLIT_GEMM.name]  # type: ignore[union-attr]


def test_what_the_pass_would_leave_is_not_timed(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = timed(monkeypatch, 1.0, 1.0, 0.3)
    assert "it is small" in stays(on_gpu(2, 4, 64, 64))
    assert "no kernel supports sizes" in stays(on_gpu(4, 8, 1024, 136))
    monkeypatch.setattr(load, "runs_on", lambda *_: False)
    assert stays(on_gpu(*LONG)) == "this GPU has no kernel for it"
    assert not keys and not built


def test_a_training_step_may_stay(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = timed(monkeypatch, 1.0, 1.0, 0.3)
    monkeypatch.setattr(clock, "_TAKES_TRAINING", False)
    assert "less exact" in stays(on_gpu(*LONG), trains=True)
    assert not keys and not built


def test_a_training_step_is_taken(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = timed(monkeypatch, 1.0, 1.0, 0.3)
    assert stays(on_gpu(*LONG), trains=True) == ""
    specs = [attention.spec_for(64, backward) for backward in (False, True)]
    assert built == [*(spec.name for spec in specs if spec is not None), SPLIT_GEMM.name]
    assert stays(on_gpu(*LONG)) == "" and len({str(key) for key in keys}) == 2
    torch.use_deterministic_algorithms(True)
    try:
        assert "not deterministic" in stays(on_gpu(*LONG), trains=True)
        assert stays(on_gpu(*LONG)) == ""
    finally:
        torch.use_deterministic_algorithms(False)


def test_torchs_own_kernel_is_switched_off(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then torch would compute the call by its formula, which is slower than what was written."""
    keys = timed(monkeypatch, 1.0, 1.0, 0.3)
    monkeypatch.setattr(torch.backends.cuda, "mem_efficient_sdp_enabled", lambda: False)
    assert "switched off" in stays(on_gpu(*LONG)) and not keys


# ---- the clock -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ms, reason",
    [
        ((1.0, 0.9, 0.3), ""),
        ((1.0, 0.3, 0.9), "0.3 ms as written, 0.9 fused"),
        ((0.3, 1.0, 0.3), "0.3 ms as written, 0.3 fused"),
        ((), "not enough memory to time it"),
    ],
)
def test_the_clock_decides(
    ms: tuple[float, ...], reason: str, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, *ms)
    assert stays(on_gpu(*LONG)) == reason


def test_what_times_depend_on(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = timed(monkeypatch, 1.0, 1.0, 0.3)
    cases = ((on_gpu(*LONG), PLAIN), (on_gpu(*LONG), Plain(0.125, False)),
             (on_gpu(*LONG), Plain(0.2, True)), (on_gpu(4, 8, 1024, 32), PLAIN),
             (on_gpu(*LONG, keys=2), PLAIN), (on_gpu(*LONG), PLAIN))  # fmt: skip
    for operands, plain in cases:
        assert stays(operands, plain) == ""
    assert len({str(key) for key in keys}) == len(cases) - 1


def test_a_kernel_that_does_not_build(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(specs: Any, _: torch.device) -> None:
        if any(spec == attention.spec_for(64) for spec in specs):
            raise BuildError("no such thing")

    keys = timed(monkeypatch, 1.0, 1.0, 0.3)
    monkeypatch.setattr(load, "prepare", broken)
    with pytest.raises(BuildError):
        stays(on_gpu(*LONG))
    with pytest.warns(UserWarning, match="leaves attention to the library: no such thing"):
        assert stays(on_gpu(*LONG), strict=False) == "its kernel does not build"
    assert not keys


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[Tensor]:
    """The result, and the gradients of its sum of squares."""
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out = (leaves[0] @ leaves[1].mT * scale).softmax(-1) @ leaves[2]
    return [out, *torch.autograd.grad(out, leaves, 2 * out.detach())]


@pytest.mark.parametrize("by_split", [False, True])
def test_the_contest_is_of_the_same_work(by_split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand without the scale: on a CPU all run in torch."""
    monkeypatch.setattr(clock, "reset_fallback", lambda *_: None)
    q, k, v = qkv(2, 4, 9, 8, keys=(2, 2, 9, 8))
    forms = dict(zip(("query", "key", "value"), map(form_of_value, (q, k, v))))
    for trains in (False, True):
        race = Race(forms, 1.0, False, trains)  # type: ignore[arg-type]
        made = [[*candidate()] for candidate in race.candidates(by_split)]  # type: ignore[call-overload]
        *by_hand, fused = made
        assert len(by_hand) == (4 if by_split else 1)
        for one in by_hand:
            torch.testing.assert_close(one[0].view(2, 4, 9, 8), fused[0])
            gradients = [t.view(2, 4, 9, 8) for t in one[1:]]
            torch.testing.assert_close(gradients, fused[2:])
        assert [len(one) for one in made] == [4 if trains else 1] * len(by_hand) + [
            5 if trains else 1
        ]


def test_gradients_of_what_is_timed_by_hand() -> None:
    q, k, v = qkv(6, 9, 8)
    out = clock._by_hand(torch.matmul, torch.matmul, q, k, v, None)[0]
    found = clock._by_hand(torch.matmul, torch.matmul, q, k, v, 2 * out)
    for value, right in zip(found, exact(q, k, v, 1.0), strict=True):
        torch.testing.assert_close(value.double(), right, rtol=1e-4, atol=1e-5)


# ---- the backend ---------------------------------------------------------------------------------


NOT_ASKED: dict[str, dict[str, Any]] = {
    "on a CPU": {"cpu_ops": False},
    "no masks": {"masks": False},
    "no passes": {"auto": False},
    "another compiler": {"inner": "aot_eager"},
    "the library's fp32": {"fp32": "ieee"},
    "an exported program": {"exported": True},
}


@pytest.mark.parametrize("name", NOT_ASKED)
def test_it_is_looked_for_where_the_pass_will_run(name: str) -> None:
    assert torch.float32 in rewrite.asked(ON_CPU, [torch.zeros(1)])
    options = dataclasses.replace(ON_CPU, **NOT_ASKED[name])
    assert torch.float32 not in rewrite.asked(options, [torch.zeros(1)])


@pytest.mark.parametrize("name", NOT_ASKED)
def test_16_bits_need_no_pass_over_fp32(name: str) -> None:
    options = dataclasses.replace(ON_CPU, **NOT_ASKED[name])
    found = {torch.bfloat16, torch.float16} & rewrite.asked(options, [torch.zeros(1).bfloat16()])
    assert len(found) == (2 if name == "the library's fp32" else 0)


class Net(nn.Module):
    """Attention by hand between projections; without dropout, a mask that it makes itself."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(24, 72), nn.Linear(24, 24), dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        q, k, v = self.qkv(x).view(batch, rows, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        s = (q @ k.transpose(-2, -1) / math.sqrt(D)).masked_fill(hidden, -math.inf)
        p = F.dropout(s.softmax(-1), self.dropout)
        projected: Tensor = self.out((p @ v).transpose(1, 2).reshape(batch, rows, 24))
        return projected


def explained(model: nn.Module, **options: Any) -> str:
    torch._dynamo.reset()
    given = {"cpu_ops": True, "strict": True, **options}
    return fx_fuser.explain(model, torch.randn(2, L, 24), options=given).attention


@pytest.mark.slow
def test_explain_says_what_runs() -> None:
    said = explained(Net())
    assert "is written by hand, softmax(" in said
    assert said.endswith("it runs as torch's fused attention, or fx_fuser's")
    said = explained(Net(0.1))
    assert said.endswith("it runs as two gemms with a softmax between them: it has dropout")
    said = explained(Net(), fp32="ieee")  # where that was not asked
    assert said.endswith("it runs as two gemms with a softmax between them")


@pytest.mark.slow
def test_explain_says_what_becomes_of_torchs_own() -> None:
    class MultiHead(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.of = nn.MultiheadAttention(24, 3, dropout, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.of(x, x, x)[0]
            return made

    said = explained(MultiHead(0.0))
    assert "is rewritten for a fused kernel: it returns weights that nothing reads" in said
    assert "because no fused kernel accepts it: it has dropout" in explained(MultiHead(0.1))


@pytest.mark.slow
def test_what_fails_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("our own fault")

    monkeypatch.setattr(rewrite, "plain_of", fail)
    assert explained(Net(), strict=False).endswith("RuntimeError: our own fault")
    with pytest.raises(RuntimeError, match="our own fault"):
        explained(Net())
    monkeypatch.setattr(rewrite, "find", fail)
    assert explained(Net(), strict=False) == ""
    with pytest.raises(RuntimeError, match="our own fault"):
        explained(Net())


def test_the_line_of_the_log() -> None:
    found = Outcome(attentions=[rewrite.ByHand(None, True)] * 2)  # type: ignore[arg-type]
    assert found._said(0, {}) == "no site, 2 hand-written attentions"


def compiled(model: Callable[..., Any], **options: Any) -> Any:
    torch._dynamo.reset()
    given = {"cpu_ops": True, "strict": True, "joint_custom_pre_pass": AsOnCuda(), **options}
    return torch.compile(model, backend="fx_fuser", options=given)


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
def test_through_inductor(train: bool) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 41, 24)
    made = []
    for call, one in ((compiled(model), model), (model, model)):
        with torch.set_grad_enabled(train):
            y = call(x)
            grads = torch.autograd.grad(y.sin().sum(), [*one.parameters()]) if train else ()
            made.append([y.detach(), *grads])
    wide = copy.deepcopy(model).double()
    y = wide(x.double())
    right = [y.detach(), *torch.autograd.grad(y.sin().sum(), [*wide.parameters()])]
    for ours, eager, true in zip(*made, right):
        errors = [float((t.double() - true).norm()) for t in (ours, eager)]
        assert ours.stride() == eager.stride()
        assert errors[0] <= max(1.5 * errors[1], 4e-7 * float(true.norm()))
    assert counters[rewrite.COUNTER] == {"attention": 1}
    name = "_scaled_dot_product_efficient_attention"
    expected = {name: 1, f"{name}_backward": 1} if train else {name: 1}
    assert counters[attention_split.COUNTERS] == expected
