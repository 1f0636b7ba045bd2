"""fx_fuser's exceptions. Every message names the fact, the value and the remedy."""

import torch


class FxFuserError(Exception):
    """Base of every error raised by fx_fuser itself."""


class OptionError(FxFuserError, ValueError):
    """An option of the backend, or an argument of a function, has an unknown name or an invalid
    value."""


class PatternError(FxFuserError, ValueError):
    """The source or name cannot be registered as a pattern."""


class BuildError(FxFuserError, RuntimeError):
    """A native source could not be compiled or loaded."""


class VerifyError(FxFuserError, RuntimeError):
    """A fused site is wrong on the user's own values, or cannot be verified."""


class VersionError(FxFuserError, ImportError):
    """fx_fuser does not run with this Python or the installed torch."""


def is_out_of_memory(error: BaseException) -> bool:
    """torch's own error, or the shim's (kernels_cu/host/device.h)."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
