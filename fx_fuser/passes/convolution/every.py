"""The passes over convolutions that Inductor is to run over the graphs that it makes of Dynamo's.

Which, the untouched graph says, before `fuse`: a convolution that becomes a site is none any more,
but the gradients of the site are of a convolution, and a pass may replace that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from fx_fuser.options import LAST_PASS, Options
from fx_fuser.passes import conv1d, depthwise, grouped, pixels
from fx_fuser.passes.graph_pass import GraphPass


def foreseen(gm: GraphModule, options: Options, inputs: Sequence[Any]) -> list[GraphPass]:
    """In the order in which they run. gm: the untouched graph. inputs: its own."""
    found = [kind.foreseen(gm, options, inputs) for kind in (conv1d, depthwise, grouped, pixels)]
    return [one for one in found if one is not None]


def behind(
    passes: Mapping[str, Any], found: Sequence[GraphPass], options: Options
) -> dict[str, Any]:
    """These settings of Inductor, setting → pass, with those that were found behind them."""
    last = passes.get(LAST_PASS, options.users_pass(LAST_PASS))
    for one in found:
        last = replace(one, before=last)
    return {**passes, LAST_PASS: last} if found else {**passes}
