"""torch.compile(model, backend="fx_fuser"): matched subgraphs become one fused CUDA kernel each."""

from importlib.metadata import entry_points

from fx_fuser import versions

versions.check()  # before any import that an older Python or torch lacks

from fx_fuser.backend import fx_fuser
from fx_fuser.compare import compare
from fx_fuser.compare.comparison import Comparison
from fx_fuser.errors import BuildError, FxFuserError, OptionError, PatternError, VersionError
from fx_fuser.explain import explain
from fx_fuser.exporting import fuse_exported
from fx_fuser.installation import install, installed, uninstall
from fx_fuser.options import installs_at_import
from fx_fuser.registry import register_pattern, registered_patterns
from fx_fuser.report.contents import SiteReport
from fx_fuser.report.report import Report

__version__ = versions.PACKAGE

if not any(e.name == "fx_fuser" for e in entry_points(group="torch_dynamo_backends")):
    from torch._dynamo import register_backend

    register_backend(fx_fuser, name="fx_fuser")

if installs_at_import():
    install()


def __dir__() -> list[str]:
    """The public names, without the modules that they come from."""
    return [*__all__]


__all__ = [
    "BuildError",
    "Comparison",
    "FxFuserError",
    "OptionError",
    "PatternError",
    "Report",
    "SiteReport",
    "VersionError",
    "__version__",
    "compare",
    "explain",
    "fuse_exported",
    "install",
    "installed",
    "register_pattern",
    "registered_patterns",
    "uninstall",
]
