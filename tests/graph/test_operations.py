"""An operation of one argument is one entry of `fx_fuser.graph.read.operations.OPS`, and nothing
else names it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import check, leaf, linear_program
from kernel_text import epilogue_of
from toolchains import needs_compilers
from torch import Tensor

from fx_fuser.graph.epilogue import kernel_spec
from fx_fuser.graph.read import canonical
from fx_fuser.graph.read.functions import rules_by_name
from fx_fuser.graph.read.operations import OPS, pointwise
from fx_fuser.native import binaries


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry, and what is read off the entries on import."""
    assert "atan" not in OPS, "it is one now: take another for this test"
    entry = pointwise("atan", cuda=lambda x: f"::atan({x})", aliases=(torch.arctan, "arctan"))
    monkeypatch.setitem(OPS, entry.name, entry)
    rules = {caller: rule for rule, callers in rules_by_name() for caller in callers}
    monkeypatch.setattr(canonical, "_RULE_OF", {**canonical._RULE_OF, **rules})


@pytest.mark.each_once
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    "tail",
    [
        lambda z, t: torch.atan(z) * t,
        lambda z, t: t * z.atan_(),
        lambda z, t: torch.arctan(z) - t,
    ],
    ids=["function", "method in place", "alias"],
)
def test_an_operation_with_an_entry_alone_fuses(
    tail: Callable[[Tensor, Tensor], Tensor], train: bool
) -> None:
    """Its values and gradients are eager's, by the accuracy contract."""
    program = linear_program(lambda m, x, t: tail(m.lin(x), t))
    graphs = check(
        program, leaf(5, 8), leaf(5, 6), fuses={"auto_linear": 1}, train=train, auto=True
    )
    assert {"atan", "arctan"}.isdisjoint(
        str(getattr(n.target, "__name__", n.target)).rstrip("_")
        for graph in graphs
        for n in graph.graph.nodes
    )


@pytest.mark.slow
@needs_compilers
def test_its_text_compiles() -> None:
    epilogue = epilogue_of(lambda x, weight, t: torch.atan(F.linear(x, weight)) + t)
    assert epilogue.text == "v0 = atan(z); v1 = add(v0, t0)"
    dtypes = dict.fromkeys(("z", "t0"), torch.float32)
    text = kernel_spec(epilogue, dtypes, (), torch.float32).text
    assert "const Acc v0 = ::atan(in[0]);" in text
    assert binaries.cubin(text, "sm_80").stat().st_size > 0
