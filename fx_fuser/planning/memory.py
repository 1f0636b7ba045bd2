"""How much of a GPU's memory a call takes while it runs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def taken(run: Callable[[], object], device: torch.device) -> int:
    """Bytes of the caching allocator, results and workspaces included; 0 on other devices.

    In a pool of its own, so that the peaks that torch counts for the user stay as they are. Also 0
    where the allocator has no pools.

    Raises:
        RuntimeError: out of memory.
    """
    if device.type != "cuda":
        return 0
    try:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool, device):
            run()
        return sum(segment["total_size"] for segment in pool.snapshot())
    except RuntimeError as error:
        if "out of memory" in str(error):
            raise
        return 0
