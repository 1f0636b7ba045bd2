"""If fx_fuser fails, the graph stays as the user wrote it, and one warning says why."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError
from torch.fx import GraphModule

from fx_fuser.errors import OptionError
from fx_fuser.graph.prepare.bodies import restorable

log = logging.getLogger("fx_fuser.backend")
T = TypeVar("T")

_is_compiling = ContextVar("fx_fuser_is_compiling", default=False)


def is_compiling() -> bool:
    """Is fx_fuser processing a graph in this thread?  Then that graph is not fused again."""
    return _is_compiling.get()


@contextmanager
def compiling() -> Iterator[None]:
    before = _is_compiling.set(True)
    try:
        yield
    finally:
        _is_compiling.reset(before)


def result_or_none(gm: GraphModule, strict: bool, attempt: Callable[[], T]) -> T | None:
    """What `attempt` returns, or None if it fails: a warning says why, and `gm` is unchanged.

    attempt: replaces graphs of `gm`, never edits one. strict: raise its error instead.
    """
    with restorable(gm) as restore:
        try:
            return attempt()
        except Exception as error:
            # Dynamo's exceptions steer its analysis (restart, skip the frame), and a bad option is
            # the user's error: fx_fuser did not fail. Inductor's are subclasses and steer nothing.
            steers = isinstance(error, TorchDynamoException)
            steers = steers and not isinstance(error, InductorError)
            if strict or steers or isinstance(error, OptionError):
                raise
            restore()
            warnings.warn(
                f"fx_fuser leaves a graph unfused: {type(error).__name__}: {error}", stacklevel=4
            )
            log.info("the graph is compiled as the user wrote it", exc_info=True)
    return None
