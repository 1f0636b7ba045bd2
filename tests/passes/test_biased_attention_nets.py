"""Nets wholly in 16 bits, whose graphs get no other pass: attention with a bias is replaced there.
Inference may have cuDNN's kernel. torch's operations of CUDA are put into a CPU's graphs."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_graphs import graph_of, heads, targets
from test_biased_attention import BATCH, HEADS, KEYS, NAME, ROWS, D, Layers, formula, near, replaced
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.fx import Graph, GraphModule

from fx_fuser.kernels.attention import bias as attention_bias
from fx_fuser.native import load
from fx_fuser.options import EARLY_PASS, JOINT_PASS, LAST_PASS, Options
from fx_fuser.passes import provenance
from fx_fuser.passes.attention_split import ATTENTION, COUNTERS, biased
from fx_fuser.passes.attention_split.biased import CUDNN, AttentionBias, Site
from fx_fuser.passes.attention_split.dropout import AttentionDropout
from fx_fuser.passes.graph_pass import call
from fx_fuser.planning import contest, plan

GPU = torch.device("cuda", 0)
OF_CUDNN = "_scaled_dot_product_cudnn_attention with a bias"
_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@pytest.fixture(autouse=True)
def no_counts() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    counters.clear()
    with fresh_cache():  # on a hit no pass runs
        yield


# ---- cuDNN's kernel in inference ---------------------------------------------------------------


def of_cudnn(
    bias: Tensor | None, items: tuple[int, ...] = (0,), dropout: float = 0.0, q: Any = None,
    causal: bool = False, save: bool = False, device: str = "cpu",
) -> tuple[GraphModule, list[Tensor]]:  # fmt: skip
    of_heads = [heads(BATCH, HEADS, n, D, dtype=torch.bfloat16) for n in (ROWS, KEYS, KEYS)]
    if q is not None:
        of_heads[0] = q
    inputs = (*of_heads, bias, save, dropout, causal)
    gm = graph_of(CUDNN, inputs, items, device, scale=0.3)
    return gm, [t for t in (*of_heads, bias) if t is not None]


def bias_of(*outer: int) -> Tensor:
    return torch.randn(*outer, ROWS, KEYS, dtype=torch.bfloat16)


@pytest.mark.parametrize("outer", [(1, HEADS), (1, 1), (BATCH, 1), (BATCH, HEADS)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("expanded", [False, True])
def test_cudnns_forward(outer: tuple[int, int], causal: bool, expanded: bool) -> None:
    bias = bias_of(*outer)
    if expanded:
        bias = bias.expand(BATCH, HEADS, -1, -1)
    gm, given = of_cudnn(bias, causal=causal, save=expanded)
    before = [*gm.graph.nodes][-1].args[0][0].meta["val"]
    replaced(gm)
    assert CUDNN not in targets(gm)
    (out,) = gm(*given)
    near(out, formula(*(t.double() for t in given), 0.3, causal))
    assert (out.shape, out.stride()) == (before.shape, before.stride())
    assert counters[COUNTERS] == {OF_CUDNN: 1}


LEFT: dict[str, dict[str, Any]] = {
    "its logarithms are read": {"bias": bias_of(1, HEADS), "items": (0, 1), "save": True},
    "dropout": {"bias": bias_of(1, HEADS), "dropout": 0.1},
    "no bias": {"bias": None},
    "two dimensions": {"bias": bias_of()},
    "one row for all queries": {"bias": bias_of(1, HEADS)[:, :, :1]},
    "another layout": {
        "bias": bias_of(1, HEADS),
        "q": torch.randn(BATCH, HEADS, ROWS, D, dtype=torch.bfloat16),
    },
    "fp32 beside it": {"bias": bias_of(1, HEADS).float()},
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_to_cudnn(what: str) -> None:
    gm, _ = of_cudnn(**LEFT[what])
    assert CUDNN in targets(replaced(gm)) and not counters[COUNTERS]


def test_the_rival_is_cudnns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is not that of the memory-efficient kernel."""
    keys: list[Any] = []
    monkeypatch.setattr(contest, "times", lambda key, *_: keys.append(key) or "not timed")
    bias = bias_of(BATCH, HEADS)
    efficient = graph_of(
        ATTENTION,
        (*(heads(BATCH, HEADS, n, D, dtype=torch.bfloat16) for n in (ROWS, KEYS, KEYS)),
         bias, False, 0.0, False), (0,), scale=0.3,
    )  # fmt: skip
    for gm in (of_cudnn(bias)[0], efficient):
        (node,) = (n for n in gm.graph.nodes if n.target in AttentionBias.TARGETS)
        site = Site.of(node, on_cpu=True)
        assert site is not None and not site.gains()
    assert len({*keys}) == 2


# ---- which graphs have the pass ----------------------------------------------------------------


def dynamos_graph(mask: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, list[Tensor]]:
    seen: list[Any] = []

    def look(gm: GraphModule, _: Any) -> Any:
        seen.append(gm)
        return gm.forward

    def attend(q: Tensor, *bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, *bias)

    q = heads(BATCH, HEADS, ROWS, D, dtype=dtype)
    inputs = [q, torch.zeros(ROWS, ROWS, dtype=dtype)] if mask else [q]
    torch.compile(attend, backend=look)(*inputs)
    return seen[0], inputs


def test_a_net_in_16_bits_has_the_pass() -> None:
    gm, inputs = dynamos_graph(mask=True)
    for strict in (False, True):
        options = Options(strict=strict, cpu_ops=True)
        found = provenance.Passes.over(gm, options, inputs)
        given = strict, True
        assert found.kernels == {} and found.load() == {
            JOINT_PASS: AttentionDropout(*given, halves=False), LAST_PASS: AttentionBias(*given)
        }  # fmt: skip
    users = {JOINT_PASS: AttentionBias(), LAST_PASS: AttentionBias(True)}
    options = Options(cpu_ops=True, inductor=users)
    loaded = provenance.Passes.over(gm, options, inputs).load()
    assert {setting: own.before for setting, own in loaded.items()} == users


@pytest.mark.parametrize(
    "options",
    [{}, {"cpu_ops": True, "inner": "aot_eager"}, {"cpu_ops": True, "patterns": ()}],
    ids=["on a CPU", "no Inductor", "nothing is grown"],
)
def test_it_has_none_where_options_say_so(options: dict[str, Any]) -> None:
    gm, inputs = dynamos_graph(mask=True)
    assert provenance.Passes.over(gm, Options(**options), inputs).load() == {}


def test_attention_without_a_bias_has_no_pass() -> None:
    gm, inputs = dynamos_graph(mask=False)
    assert provenance.Passes.over(gm, Options(cpu_ops=True), inputs).kernels is None


def test_fp32_has_the_other_passes_too() -> None:
    gm, inputs = dynamos_graph(mask=True, dtype=torch.float32)
    found = provenance.Passes.over(gm, Options(cpu_ops=True), inputs).load()
    assert len(found) == 2 and found[LAST_PASS].before is not None


@pytest.mark.parametrize("amp", [False, True])
def test_where_fp32_is_the_librarys(amp: bool) -> None:
    """No pass by halves: that over 16-bit attention alone, if there is any."""
    gm, inputs = dynamos_graph(mask=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        found = provenance.Passes.over(gm, Options(cpu_ops=True, fp32="ieee"), inputs).load()
    assert [*found] == ([JOINT_PASS, LAST_PASS] if amp else [])
    assert not amp or (found[JOINT_PASS].halves, found[LAST_PASS].before) == (False, None)


def test_on_a_gpu_its_kernels_are_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, inputs = dynamos_graph(mask=True)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        there = [torch.empty(t.shape, dtype=t.dtype, device=GPU) for t in inputs]
    spec = attention_bias.spec_for(D, torch.bfloat16)
    monkeypatch.setattr(biased, "foreseen", lambda *_: [spec])
    monkeypatch.setattr(plan, "unavailable", lambda device: None)
    monkeypatch.setattr(load, "runs_on", lambda spec, device: True)
    found = provenance.Passes.over(gm, Options(), there)
    assert found.kernels == {GPU: [spec]}
    assert found.load() == {JOINT_PASS: AttentionDropout(halves=False), LAST_PASS: AttentionBias()}
    monkeypatch.setattr(load, "runs_on", lambda spec, device: False)  # of another GPU
    assert provenance.Passes.over(gm, Options(cpu_ops=True), there).kernels is None
    monkeypatch.setattr(load, "runs_on", lambda spec, device: True)
    monkeypatch.setattr(plan, "unavailable", lambda device: "no compiler")
    assert provenance.Passes.over(gm, Options(), there).kernels is None


# ---- whole nets --------------------------------------------------------------------------------


class AsCudnn(CustomGraphPass):
    """A CPU's attention becomes what a GPU has in inference."""

    def __call__(self, graph: Graph) -> None:
        for node in [n for n in graph.nodes if n.target is _ON_CPU]:
            q, k, v, *rest = node.args
            dropout, causal = (*rest, *(0.0, False)[len(rest) :])
            bias = node.kwargs["attn_mask"]
            scale = node.kwargs.get("scale")
            with graph.inserting_before(node):
                made = call(graph, node, CUDNN, q, k, v, bias, False, dropout, causal, scale=scale)
                out = call(graph, node, operator.getitem, made, 0)
            for user in list(node.users):
                assert user.args[1] == 0
                user.replace_all_uses_with(out)
                graph.erase_node(user)
            graph.erase_node(node)

    def uuid(self) -> Any:
        return None


@pytest.mark.slow
def test_t5_in_bf16() -> None:
    """transformers' encoder, in evaluation: every attention of it. The window kernel takes rows of
    up to 64 keys first."""
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 3, "num_heads": 2}
    config = transformers.T5Config(vocab_size=50, feed_forward_proj="gated-gelu", **sizes)
    model = transformers.T5EncoderModel(config).eval().bfloat16()
    tokens = torch.randint(0, 50, (2, 72))
    options = {"cpu_ops": True, "strict": True, EARLY_PASS: AsCudnn()}
    with torch.no_grad():
        found = torch.compile(model, backend="fx_fuser", options=options)(tokens)[0]
        eager, exact = model(tokens)[0], model.double()(tokens)[0]
    assert counters[COUNTERS] == {OF_CUDNN: 3}
    off, allowed = ((value.double() - exact).norm() for value in (found, eager))
    assert off <= 1.5 * allowed


@pytest.mark.slow
@pytest.mark.parametrize("length", [16, 21])
def test_a_training_step_in_bf16(length: int) -> None:
    """Weights in bf16, no autocast."""
    model: nn.Module = Layers(length).bfloat16()
    x = torch.randn(BATCH, length, HEADS * D, dtype=torch.bfloat16)
    passes = {LAST_PASS: AttentionBias(strict=True, on_cpu=True)}
    y = torch.compile(model, options=passes)(x)
    weight = torch.sin(torch.arange(y.numel())).view_as(y).bfloat16()
    found = [y, *torch.autograd.grad(y, [*model.parameters()], weight)]
    assert counters[COUNTERS] == {f"{NAME} with a bias": 2, f"{NAME}_backward with a bias": 2}
    wide = model.double()
    exact_y = wide(x.double(), lambda *given: formula(*given, 1.0, False))
    exact = [exact_y, *torch.autograd.grad(exact_y, [*wide.parameters()], weight.double())]
    for value, right in zip(found, exact, strict=True):
        assert (value - right).norm() <= 0.03 * right.norm() + 1e-3
