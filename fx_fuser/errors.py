"""fx_fuser's exceptions. Every message names the fact, the value and the remedy."""


class FxFuserError(Exception):
    """Base of every error raised by fx_fuser itself."""


class OptionError(FxFuserError, ValueError):
    """An option of the backend has an unknown name or an unfit value."""


class PatternError(FxFuserError, ValueError):
    """A pattern's source cannot be used as a pattern."""


class BuildError(FxFuserError, RuntimeError):
    """A native source could not be compiled or loaded."""


class VerifyError(FxFuserError, RuntimeError):
    """A fused site is wrong on the user's own values, or cannot be verified."""
