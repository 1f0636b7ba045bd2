"""Ranks that compile one model decide alike: by what the first of them measured.

Collectives of several ranks meet in the order in which each rank's graph has them. A site that is
fused on one rank alone might change that order there. So what is measured is shared through the
store of the process group. No rank waits for another: the first to come sets the answer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

log = logging.getLogger("fx_fuser.planning.ranks")


def group_store() -> Any:
    """The store that the ranks share, or None if this process is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    return dist.distributed_c10d._get_default_store()


def agreed(
    store: Any, name: str, found: Sequence[tuple[float, float]] | None
) -> list[tuple[float, float]] | None:
    """What the first rank found under this name. None: nothing could be measured."""
    own = json.dumps(found)
    try:
        said = store.compare_set(f"fx_fuser/{name}", "", own)
    except (NotImplementedError, RuntimeError):  # a store without it, or one that is gone
        log.info("ranks decide by themselves", exc_info=True)
        said = own
    times = json.loads(said)
    return times and [(float(gpu), float(host)) for gpu, host in times]
