"""What becomes of a model's sites while it is compiled, by torch's counters and by warnings."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

from torch._dynamo.utils import counters

from fx_fuser.passes import (
    attention_split,
    contractions,
    conv1d,
    depthwise,
    grouped,
    head_loss,
    padding,
    pixels,
    products,
)
from fx_fuser.passes.by_hand import rewrite as by_hand

# The keys of `Sites` that count changes.
CHANGED = (
    *("fused", "masks", "by_hand", "products", "attention", "padded", "convolutions"),
    *("depthwise", "grouped", "statistics", "contractions", "heads"),
)
_MOST_OF_WARNING = 400  # characters


class Sites(TypedDict, total=False):
    """What became of a model's sites while it was compiled, by counter."""

    fused: dict[str, int]
    left: dict[str, int]  # to the inner compiler
    masks: dict[str, int]  # removed
    by_hand: dict[str, int]  # hand-written attentions, now torch's fused one
    products: dict[str, int]  # gemms replaced in Inductor's graphs
    attention: dict[str, int]  # fp32 attentions replaced there
    padded: dict[str, int]  # 16-bit gemms of odd sizes there, padded or by a kernel
    convolutions: dict[str, int]  # along one dimension, of 16 bits, replaced there
    depthwise: dict[str, int]  # depthwise convolutions of 16 bits, replaced there
    grouped: dict[str, int]  # convolutions of 16 bits in groups, replaced there
    statistics: dict[str, int]  # 1 x 1 convolutions there that compute those of their result
    contractions: dict[str, int]  # sums of products that are gemms now
    heads: dict[str, int]  # Linears that are one op with their loss
    warnings: list[str]  # that name fx_fuser


@contextmanager
def counted(sites: Sites) -> Iterator[None]:
    """Fills `sites` in with what is counted and warned about meanwhile."""
    names = {
        "fused": "fx_fuser",
        "left": "fx_fuser_left",
        "masks": "fx_fuser_masks",
        "by_hand": by_hand.COUNTER,
        "products": products.COUNTERS,
        "attention": attention_split.COUNTERS,
        "padded": padding.COUNTERS,
        "convolutions": conv1d.COUNTERS,
        "depthwise": depthwise.COUNTERS,
        "grouped": grouped.COUNTERS,
        "statistics": pixels.COUNTERS,
        "contractions": contractions.COUNTER,
        "heads": head_loss.COUNTER,
    }
    before = {name: Counter(counters[counter]) for name, counter in names.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            for name, counter in names.items():
                sites[name] = dict(Counter(counters[counter]) - before[name])  # type: ignore[literal-required]
            said = [str(w.message) for w in caught if "fx_fuser" in str(w.message)]
            if said:
                sites["warnings"] = [" ".join(text.split())[:_MOST_OF_WARNING] for text in said]
