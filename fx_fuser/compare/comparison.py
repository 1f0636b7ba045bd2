"""A comparison as text, JSON and a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fx_fuser.arguments import shown
from fx_fuser.compare.column import Column
from fx_fuser.compare.contents import Contents
from fx_fuser.compare.kernels import Cliff
from fx_fuser.compare.page import page_of
from fx_fuser.compare.text import text_of
from fx_fuser.errors import OptionError
from fx_fuser.report.header import Header

SCHEMA = 1  # of the JSON; changes if a key changes its meaning or goes


class Comparison(Contents):
    """Prints as a table with a verdict below it; its fields are those of `Contents`."""

    def __str__(self) -> str:
        return text_of(self)

    def to_json(self) -> str:
        """All of it, with the number of its schema, and the verdict."""
        judged = asdict(self.judged)
        return json.dumps({"schema": SCHEMA, **asdict(self), "verdict": judged}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """Read what `to_json` wrote. Raises OptionError for anything else, or another schema."""
        data = json.loads(text)
        schema = data.pop("schema", None) if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise OptionError(
                f"the comparison's schema is {shown(schema)}; this fx_fuser reads {SCHEMA}: "
                "give what Comparison.to_json of the same version wrote"
            )
        del data["verdict"]  # which follows from the rest
        data["header"] = Header(**data["header"])
        data["columns"] = {name: _column(of) for name, of in data["columns"].items()}
        return cls(**data)

    def to_html(self) -> str:
        """One page that needs no other file."""
        return page_of(self)


def _column(data: Mapping[str, Any]) -> Column:
    return Column(**{**data, "cliffs": [Cliff(**cliff) for cliff in data["cliffs"]]})
