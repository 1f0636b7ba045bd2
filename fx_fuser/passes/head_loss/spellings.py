"""Other spellings of a head, as `fx_fuser.graph.read.heads` reads them: in pieces, in place, and
with the classes in the second dimension."""

from __future__ import annotations

import logging

from torch.fx import Graph

from fx_fuser.passes.head_loss import pieces
from fx_fuser.passes.head_loss.edits import Edit

log = logging.getLogger("fx_fuser.passes.head_loss")


def respell(graph: Graph, kind: str, strict: bool) -> list[Edit]:
    """Edits the graph. kind: of the device."""
    return pieces.join(graph, kind)
