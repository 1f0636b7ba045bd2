"""Every test starts from a fresh Dynamo, a fixed seed and zeroed counters."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import pytest
import torch
from toolchains import bare, fake, fake_libnvrtc, fake_nvrtc  # noqa: F401
from torch._dynamo.utils import counters

# A shell starts background jobs with this, and the processes that the tests start inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.set_num_threads(1)  # tiny tensors, and one process a core
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    random.seed(0)
    yield
    torch._dynamo.reset()
    # torch 2.11 leaves it on where a graph raises within it and nothing compiles that graph.
    torch.set_autocast_enabled("cpu", False)
