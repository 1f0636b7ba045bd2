"""The patterns that compilations look for: those of `fx_fuser.patterns`, and the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fx_fuser import patterns
from fx_fuser.arguments import refuses_unfit_calls
from fx_fuser.errors import PatternError
from fx_fuser.graph.match.grow import AUTO
from fx_fuser.graph.match.pattern import Check, Pattern
from fx_fuser.graph.match.trace import trace

_patterns: list[Pattern] = []


@refuses_unfit_calls(PatternError, "call it as register_pattern(source, check=None, name=None)")
def register_pattern(
    source: Callable[..., Any], check: Check | None = None, name: str | None = None
) -> Pattern:
    """Add a pattern for all later compilations.

    source: a function of an anchor followed by pointwise ops, see `graph.match.trace`; it is traced
    once. check: `check(match)` returns the reason why a match must not be fused, or None.
    name: for counters, options and reports; by default the function's name.

    Raises PatternError if the source is not a pattern, or if another pattern has the name; then
    nothing is added.
    """
    pattern = trace(source, check, name)
    if pattern.name.startswith(AUTO):
        raise PatternError(
            f"pattern {pattern.name}: names that begin with {AUTO!r} are reserved for grown tails; "
            "pass another `name=`"
        )
    for known in _patterns:
        same = (known.kind, known.epilogue, known.wildcards)
        if known.name == pattern.name and same != (
            pattern.kind,
            pattern.epilogue,
            pattern.wildcards,
        ):
            raise PatternError(
                f"a pattern named {pattern.name!r} exists and searches for {known.epilogue}; "
                "give the new one another name"
            )
    _patterns[:] = [p for p in _patterns if p.name != pattern.name] + [pattern]
    _patterns.sort(key=lambda p: (-p.size, p.name))
    return pattern


@refuses_unfit_calls(PatternError, "it takes no arguments")
def registered_patterns() -> list[Pattern]:
    """All patterns, in the order in which they are tried: largest first."""
    return list(_patterns)


_patterns += patterns.discover()
