"""fx_fuser's exceptions. Every message names the fact, the value and the remedy."""

import contextlib

import torch


class FxFuserError(Exception):
    """Base of every error raised by fx_fuser itself."""


class OptionError(FxFuserError, ValueError):
    """An option of the backend, or an argument of a function, has an unknown name or an invalid
    value."""


class PatternError(FxFuserError, ValueError):
    """The source or name cannot be registered as a pattern."""


class BuildError(FxFuserError, RuntimeError):
    """A kernel or its launcher could not be compiled or loaded."""


class VerifyError(FxFuserError, RuntimeError):
    """A fused site is wrong on the user's own values, or cannot be verified."""


class VersionError(FxFuserError, ImportError):
    """fx_fuser does not run with this Python or the installed torch."""


def allocations_failed(device: torch.device) -> int:
    """How many allocations have failed on this device; 0 if they are not counted."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return 0
    with contextlib.suppress(RuntimeError):  # raised by a pluggable allocator
        return int(torch.cuda.memory_stats(device).get("num_ooms", 0))
    return 0


def is_out_of_memory(error: BaseException, device: torch.device, failed_before: int) -> bool:
    """Did memory run out, by torch's own error or the shim's?  A torch call of the shim that fails
    passes on no reason: then the allocator's count decides.

    failed_before: `allocations_failed` from before the call.
    """
    said = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in said:
        return True
    return "API call failed" in said and allocations_failed(device) > failed_before
