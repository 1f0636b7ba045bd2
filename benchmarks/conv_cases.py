"""What the benchmarks of convolutions share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

Padding = tuple[int, int, int, int]  # left, right, top, bottom
NONE: Padding = (0, 0, 0, 0)
FORMATS = (torch.channels_last, torch.contiguous_format)
COPY = 4.28e12  # bytes/s of a copy on an H200


def tables(times: Sequence[Sequence[object]]) -> list[str]:
    """Rows of layers: what each is, then ms, ratios and an error."""
    heads = ["", "bytes, ms", "library alone", "+ a copy", "ours", "× bytes", "gain", "error"]
    formats = ["", ".4f", ".4f", ".4f", ".4f", ".2f", ".2f", ".1e"]
    return [tabulate(times, heads, floatfmt=formats)]


def convolve(x: Tensor, weight: Tensor, padding: Padding) -> Tensor:
    return F.conv2d(F.pad(x, padding), weight)
