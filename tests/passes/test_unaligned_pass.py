"""16-bit gemms of Inductor's graphs by the kernel for unaligned operands: on a CPU where
they may not be padded (`cpu_ops`). The kernel itself: tests/kernels/unaligned_checks.py."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import emulator
import pytest
import torch
import torch.nn.functional as F
from emulator.device import EmulatedGpu, in_place_of_cuda
from test_padding import BF16, check, compiled, leaf, own_caches, wide  # noqa: F401
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import Graph, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fx_fuser.errors import BuildError
from fx_fuser.kernels import unaligned
from fx_fuser.kernels.unaligned import ALIGNED, ALONG_K
from fx_fuser.native import load
from fx_fuser.passes import graph_pass, padding
from fx_fuser.passes import unaligned as unaligned_pass
from fx_fuser.passes.unaligned import KIND, PRODUCT
from fx_fuser.planning.bench_ops import TensorForm
from fx_fuser.planning.timing import Timing


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def with_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def transposed(x: Tensor, w: Tensor) -> Tensor:
    return (x.mT.contiguous().mT @ w).view(-1, w.shape[1])


@pytest.mark.parametrize(
    "f, sizes, padded, expected",
    [
        # Of a gemm whose result is returned there is no padded one; backward's may be padded where
        # a gradient is returned without gaps.
        (linear, ((16, 24), (41, 24)), {"mm": 2}, {"mm_unaligned": 1}),
        (with_bias, ((16, 24), (41, 24), (41,)), {"mm": 2}, {"addmm_unaligned": 1}),
        (scores, ((6, 27, 16), (6, 27, 16)), {"bmm": 1}, {"bmm_unaligned": 2}),
        (scores, ((2, 3, 9, 7), (2, 3, 11, 7)), {}, {"bmm_unaligned": 3}),
        (transposed, ((16, 13), (13, 11)), {"mm": 1}, {"mm_unaligned": 2}),
    ],
)
@pytest.mark.slow
def test_values_gradients_and_strides(
    f: Callable[..., Tensor], sizes: Any, padded: dict[str, int], expected: dict[str, int]
) -> None:
    torch.manual_seed(0)
    check(f, *(leaf(*size, scale=0.5) for size in sizes))
    assert counters[padding.COUNTERS] == {**padded, **expected}


@pytest.mark.slow
@pytest.mark.parametrize(
    "f, sizes, expected",
    [
        (linear, ((512, 392), (401, 392)), {"mm": 2, "mm_combs": 1}),
        (with_bias, ((512, 392), (401, 392), (401,)), {"mm": 2, "addmm_combs": 1}),
    ],
)
def test_a_large_gemm_whose_result_is_returned(
    monkeypatch: pytest.MonkeyPatch, f: Callable[..., Tensor], sizes: Any, expected: dict[str, int]
) -> None:
    """By combs, with the strides of eager mode; for so few tiles only here."""
    monkeypatch.setattr(unaligned, "_LEAST_SHARE", 0)
    torch.manual_seed(0)
    check(f, *(leaf(*size, scale=0.05) for size in sizes))
    assert counters[padding.COUNTERS] == expected


@pytest.mark.slow
def test_what_it_does_not_take() -> None:
    """A matrix that is added; operands of which neither rows nor k are adjacent."""

    def adds(a: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.addmm(a, x, w)

    def adds_to_batch(a: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.baddbmm(a, x, w)

    def apart(x: Tensor, w: Tensor) -> Tensor:
        return x[:, ::2] @ w

    with torch.no_grad():
        for f, sizes in (
            (adds, ((16, 41), (16, 24), (24, 41))),
            (adds_to_batch, ((11,), (3, 9, 7), (3, 7, 11))),
            (adds, ((41, 1), (41, 24), (24, 41))),
            (apart, ((16, 48), (24, 41))),
        ):
            compiled(f)(*(torch.randn(size, dtype=BF16) for size in sizes))
            assert not counters[padding.COUNTERS], f.__name__


@pytest.mark.parametrize(
    "size, stride, offset, form",
    [
        ((5, 16), (16, 1), 0, ALONG_K | ALIGNED),
        ((5, 13), (13, 1), 0, ALONG_K),
        ((5, 13), (16, 1), 0, ALONG_K | ALIGNED),
        ((5, 16), (16, 1), 3, ALONG_K),
        ((1, 13), (13, 1), 0, ALONG_K | ALIGNED),  # one row begins where the matrix does
        ((16, 5), (1, 16), 0, ALIGNED),
        ((13, 5), (1, 13), 0, 0),
        ((4, 16, 8), (133, 8, 1), 0, ALONG_K),  # batches too
        ((4, 16, 8), (0, 8, 1), 0, ALONG_K | ALIGNED),
        ((5, 1), (7, 7), 0, ALONG_K),
        ((5, 8), (32, 2), 0, None),
    ],
)
def test_forms(size: Sequence[int], stride: Sequence[int], offset: int, form: int | None) -> None:
    assert unaligned.form_of(size, stride, offset) == form


MATRIX = ALONG_K | ALIGNED
UNITS = 132  # multiprocessors


@pytest.mark.parametrize(
    "sizes, forms, expected",
    [
        # A head of 50257 columns and 8192 tokens: the fastest shapes of an H200.
        ((8192, 50257, 768), (MATRIX, MATRIX), (1, 1, 1)),
        ((8192, 50257, 4096), (MATRIX, MATRIX), (2, 1, 1)),
        ((8192, 768, 50257), (ALONG_K, ALIGNED), (2, 1, 0)),
        ((8192, 4096, 50257), (ALONG_K, ALIGNED), (0, 1, 0)),
        ((50257, 768, 8192), (0, ALIGNED), (3, 0, 0)),
        # The offsets of one matrix move along another one, which must be aligned, as its weight is.
        ((8192, 50257, 768), (ALONG_K, MATRIX), None),
        ((8192, 50257, 768), (MATRIX, ALONG_K), None),
        ((8192, 769, 50257), (ALONG_K, ALIGNED), None),
        ((8192, 768, 50257), (ALONG_K, 0), None),
        ((50257, 769, 8192), (0, ALIGNED), None),
        ((50257, 768, 8192), (0, MATRIX), None),
        # Tiles of 128 rows of each eighth line: most of them empty.
        ((64, 50257, 768), (MATRIX, MATRIX), None),
    ],
)
def test_gemms_by_combs(sizes: Any, forms: Any, expected: Sequence[int] | None) -> None:
    family = unaligned.comb_family(UNITS, *sizes, *forms)
    assert (family and family.sizes) == expected
    if family is not None:
        assert unaligned.family_of_sizes(family.sizes) == family


@pytest.mark.parametrize("arch, there", [("sm_90a", True), ("sm_100a", False)])
def test_a_kernel_that_the_gpu_has_not_is_not_there(
    monkeypatch: pytest.MonkeyPatch, arch: str, there: bool
) -> None:
    spec = unaligned.gemm_of(unaligned.combs(0, 1, 1), BF16)
    monkeypatch.setattr(load.binaries, "arch_of", lambda _: arch)
    monkeypatch.setattr(load, "prepare", lambda *_: None)
    assert unaligned_pass.loaded([spec], torch.device("cuda", 0), unaligned_pass.KIND) == (
        {spec} if there else set()
    )


@pytest.mark.parametrize(
    "times, pads, expected",
    [
        ((1.0, 2.0, 0.5), True, padding.UNALIGNED),
        ((1.0, 0.6, 0.5), True, padding.UNALIGNED),
        ((1.0, 0.4, 0.5), True, padding.PADDED),
        ((1.0, 0.4, 0.5), False, None),  # Inductor may pad it
        ((1.0, 0.8, 0.81), True, padding.UNALIGNED),  # padding would gain too little to be done
        ((1.0, 2.0, 0.99), True, None),
        ((1.0, 0.9), True, None),
    ],
)
def test_the_fastest_is_taken(
    monkeypatch: pytest.MonkeyPatch, times: Sequence[float], pads: bool, expected: str | None
) -> None:
    gpu = torch.device("cuda", 0)
    forms = [TensorForm((4096, *size), (size[0] * size[1], size[1], 1), BF16, gpu)
             for size in ((49, 32), (32, 49))]  # fmt: skip
    spec = unaligned.gemm_of(unaligned.unaligned(3, 32, 3, 2), BF16) if len(times) == 3 else None
    (node,) = products(Graph(), 1)
    gemm: Any = padding._Gemm(node, tuple(forms), (0, 0, 7), pads, spec)  # type: ignore[arg-type]
    monkeypatch.setattr(padding, "is_small", lambda *_: False)
    monkeypatch.setattr(padding.contest, "times", lambda *_: [Timing(ms) for ms in times])
    monkeypatch.setattr(padding.limits, "of", lambda _: padding.limits.H200)
    assert padding._fastest(gemm, [False, False]) == expected


def test_an_operand_that_begins_anywhere_has_another_form() -> None:
    """Of a slice rows are whole vectors apart, and none begins at one."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return x[:, 1:33] @ w

    seen: list[list[int]] = []
    original = unaligned_pass.put

    def put(graph: Any, node: Any, spec: Any) -> None:
        seen.append(list(spec.family.sizes))
        original(graph, node, spec)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(unaligned_pass, "put", put)
        compiled(f)(torch.randn(40, 48, dtype=BF16), torch.randn(32, 41, dtype=BF16))
    assert seen == [[3, 32, ALONG_K, 0]]
    form = TensorForm((2, 8), (8, 1), BF16, torch.device("cpu"), 3)
    assert form.random(torch.Generator()).data_ptr() % 16 == 6


def test_what_does_not_build_is_left_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    good, bad = (unaligned.gemm_of(unaligned.unaligned(s, 64, 1, 1), BF16) for s in (0, 1))
    tries: list[int] = []

    def prepare(specs: Sequence[Any], _: torch.device) -> None:
        tries.append(len(specs))
        if bad in specs:
            raise BuildError("no room")

    monkeypatch.setattr(load, "prepare", prepare)
    monkeypatch.setattr(graph_pass, "_failed", set())
    with pytest.warns(UserWarning, match="16-bit gemms to the library: no room"):
        assert graph_pass.loaded([good, bad], device, KIND) == {good}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert graph_pass.loaded([bad, good], device, KIND) == {good}
    assert tries == [2, 1, 1, 1]
    monkeypatch.setattr(graph_pass, "_failed", set())
    with pytest.raises(BuildError):
        graph_pass.loaded([bad], device, KIND, strict=True)


@pytest.mark.parametrize("pads", [True, False])
def test_gemms_keep_only_kernels_that_are_there(monkeypatch: Any, pads: bool) -> None:
    gpu = torch.device("cuda", 0)
    forms = [TensorForm(size, (size[1], 1), BF16, gpu) for size in ((490, 32), (32, 491))]
    spec = unaligned.gemm_of(unaligned.unaligned(3, 32, 3, 2), BF16)
    gemm: Any = padding._Gemm(None, tuple(forms), (0, 0, 5), pads, spec)  # type: ignore[arg-type]
    monkeypatch.setattr(padding, "is_small", lambda *_: False)
    for reason, there in ((None, {spec}), (None, set()), ("no compiler", {spec})):
        monkeypatch.setattr(padding.plan, "unavailable", lambda _: reason)  # noqa: B023
        monkeypatch.setattr(padding, "loaded", lambda *_: there)  # noqa: B023
        found = padding._with_kernels([gemm], strict=False)
        if reason is None and there:
            assert found == [gemm]
        else:
            assert [g.spec for g in found] == ([None] if pads else [])


def products(graph: Graph, count: int) -> list[Node]:
    """Of what a pointwise operation makes, and its argument."""
    x = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.sin.default, (x,))
    return [graph.call_function(torch.ops.aten.mm.default, (made, x)) for _ in range(count)]


def test_readers_that_keep_an_operand_unpadded_make_a_copy_of_it_dear() -> None:
    gemms = products(Graph(), 2)
    made: Any = gemms[0].args[0]
    assert padding._is_free(made, set(gemms))
    assert not padding._is_free(made, {gemms[0]})


@pytest.mark.parametrize("first", [padding.PADDED, padding.UNALIGNED, None])
def test_padding_is_free_only_if_all_readers_are_padded(
    monkeypatch: pytest.MonkeyPatch, first: str | None
) -> None:
    """A head's gradient of the logits would be written twice, for two gemms."""
    one, other = products(Graph(), 2)
    form = TensorForm((490, 491), (491, 1), BF16, torch.device("cpu"))
    gemms = {n: padding._Gemm(n, (form, form), (0, 5, 5), True, None) for n in (one, other)}

    def fastest(gemm: padding._Gemm, free: Sequence[bool]) -> str | None:
        return first if gemm.node is one else padding.PADDED if free[0] else padding.UNALIGNED

    monkeypatch.setattr(padding, "_fastest", fastest)
    chosen = padding._chosen(gemms, on_cpu=False, strict=True)
    both = first == padding.PADDED
    assert chosen == {one: first, other: padding.PADDED if both else padding.UNALIGNED}


def two_gemms(form: TensorForm) -> list[padding._Gemm]:
    return [padding._Gemm(n, (form, form), (0, 5, 5), True, None) for n in products(Graph(), 2)]


@pytest.mark.parametrize("strict", [True, False])
def test_a_gemm_that_cannot_be_timed_does_not_cost_the_others(
    monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    bad, good = two_gemms(TensorForm((490, 491), (491, 1), BF16, torch.device("cpu")))

    def fastest(gemm: padding._Gemm, _: Sequence[bool]) -> str:
        if gemm is bad:
            raise RuntimeError("no event")
        return padding.PADDED

    monkeypatch.setattr(padding, "_fastest", fastest)
    gemms = {gemm.node: gemm for gemm in (bad, good)}
    if strict:
        with pytest.raises(RuntimeError, match="no event"):
            padding._chosen(gemms, on_cpu=False, strict=True)
        return
    with pytest.warns(UserWarning, match="leaves a gemm to the library: RuntimeError: no event"):
        chosen = padding._chosen(gemms, on_cpu=False, strict=False)
    assert chosen == {bad.node: None, good.node: padding.PADDED}


def test_a_kernel_that_is_wrong_does_not_cost_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, _ = two_gemms(TensorForm((51, 51), (51, 1), BF16, torch.device("cpu")))
    spec = unaligned.gemm_of(unaligned.combs(0, 1, 1), BF16)
    gemm = dataclasses.replace(gemm, spec=spec)
    wrong = torch.zeros(51, 51, dtype=BF16)
    monkeypatch.setattr(unaligned_pass, "candidate", lambda *_: lambda: (wrong,))
    with pytest.warns(UserWarning, match="the combs kernel's"):
        timed = padding._candidates(gemm, [False, False])
    assert [candidate.is_exact for candidate in timed] == [True, True, False]


def test_the_op() -> None:
    a, b = torch.randn(3, 9, 7, dtype=BF16), torch.randn(3, 5, 7, dtype=BF16)
    for arguments in ((a, b, None), (a[0].mT.contiguous().mT, b[0], torch.randn(5, dtype=BF16))):
        torch.library.opcheck(PRODUCT, (*arguments, "", [0, 32, 1, 1]))


@pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
def test_a_kernel_that_nobody_loaded_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Inductor's cache had the graph, no pass has run."""
    gpu = EmulatedGpu(90, multiprocessors=2)
    in_place_of_cuda(gpu, monkeypatch, ())
    a, b = torch.randn(9, 13).bfloat16(), torch.randn(5, 13).bfloat16()
    family = unaligned.family_of(a, b)
    assert family is not None
    asked: list[str] = []

    def prepare(specs: Sequence[Any], device: torch.device) -> None:
        asked.extend(spec.name for spec in specs)
        for spec in specs:
            gpu.handle_of(spec)

    monkeypatch.setattr(load, "prepare", prepare)
    spec = unaligned.gemm_of(family, BF16)
    for _ in range(2):
        launches = emulator.ops.launches.default()
        with emulator.memory():
            made = PRODUCT._op_dk(
                torch._C.DispatchKey.PrivateUse1, a, b, None, spec.name, list(family.sizes)
            ).clone()
        assert emulator.ops.launches.default() == launches + 1
        torch.testing.assert_close(made, F.linear(a, b), rtol=1e-2, atol=1e-2)
    assert asked == [spec.name]


class OnEmulator(Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is PRODUCT:
            return PRODUCT._op_dk(torch._C.DispatchKey.PrivateUse1, *args, **kwargs)
        return super().call_function(target, args, kwargs)


@pytest.mark.slow
@pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
def test_a_heads_gemms_on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward with a bias, dgrad and wgrad: each gemm of the graph is a launch of combs."""
    gpu = EmulatedGpu(90, multiprocessors=2)
    in_place_of_cuda(gpu, monkeypatch, ())
    monkeypatch.setattr(load, "prepare", lambda specs, _: [gpu.handle_of(s) for s in specs])
    monkeypatch.setattr(load, "runs_on", lambda *_: True)
    monkeypatch.setattr(unaligned, "_LEAST_SHARE", 0)
    monkeypatch.setattr(unaligned, "MOST_PER_ELEMENT", 1)
    monkeypatch.setattr(
        padding, "_chosen", lambda gemms, *_: dict.fromkeys(gemms, padding.UNALIGNED)
    )

    def step(x: Tensor, w: Tensor, b: Tensor, dy: Tensor) -> Sequence[Tensor]:
        y = F.linear(x, w, b)
        return y, *torch.autograd.grad(y, (x, w), dy)

    torch.manual_seed(0)
    inputs = leaf(40, 64), leaf(53, 64), leaf(53), leaf(40, 53).detach()
    gm = make_fx(step, tracing_mode="fake")(*inputs)
    counters.clear()
    padding.Padding(strict=True, on_cpu=True)(gm.graph)
    assert counters[padding.COUNTERS] == {"addmm_combs": 1, "mm_combs": 2}
    launches = emulator.ops.launches.default()
    with emulator.memory():
        made = [value.clone() for value in OnEmulator(gm).run(*(v.detach() for v in inputs))]
    assert emulator.ops.launches.default() == launches + 3
    for mine, theirs, exact in zip(made, step(*inputs), step(*map(wide, inputs)), strict=True):
        assert mine.stride() == theirs.stride()
        # Where the bias is added to the rounded product, roundings are two.
        assert (mine.double() - exact).norm() <= 2 * (theirs.double() - exact).norm()


@pytest.mark.slow
@pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
def test_tensors_that_combs_do_not_take_go_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that begins elsewhere than the one that was traced."""
    gpu = EmulatedGpu(90, multiprocessors=2)
    in_place_of_cuda(gpu, monkeypatch, ())
    spec = unaligned.gemm_of(unaligned.combs(0, 1, 1), BF16)
    gpu.handle_of(spec)
    a, storage = torch.randn(40, 64).bfloat16(), torch.randn(53 * 64 + 8).bfloat16()
    for ahead, launched in ((0, 1), (3, 0), (8, 1)):
        b = storage.as_strided((53, 64), (64, 1), ahead)
        launches = emulator.ops.launches.default()
        with emulator.memory():
            key = torch._C.DispatchKey.PrivateUse1
            made = PRODUCT._op_dk(key, a, b, None, spec.name, [0, 1, 1]).clone()
        assert emulator.ops.launches.default() == launches + launched
        torch.testing.assert_close(made, F.linear(a, b))


@pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")
def test_a_kernel_that_does_not_build_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    in_place_of_cuda(EmulatedGpu(90, multiprocessors=2), monkeypatch, ())
    a, b = torch.randn(9, 12).bfloat16(), torch.randn(5, 12).bfloat16()
    asked: list[object] = []

    def prepare(specs: object, _: torch.device) -> None:
        asked.append(specs)
        raise OSError("the disk is full")

    monkeypatch.setattr(load, "prepare", prepare)
    key = torch._C.DispatchKey.PrivateUse1
    with pytest.warns(UserWarning, match="to the library: OSError: the disk is full"):
        for _ in range(3):
            made = PRODUCT._op_dk(key, a, b, None, "no such kernel", [0, 32, 1, 1])
            torch.testing.assert_close(made, F.linear(a, b))
    assert len(asked) == 1
    batch = a.expand(2, 9, 12)
    with pytest.raises(RuntimeError, match="a batched product cannot have a bias"):
        PRODUCT._op_dk(key, batch, b.expand(2, 5, 12), torch.zeros(5), "none", [0, 32, 1, 1])
