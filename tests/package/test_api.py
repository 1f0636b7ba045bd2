"""docs/api.md has every public name, with the signature that it has."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fx_fuser
from fx_fuser import testing

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()
NAMED = re.findall(r"^\| `(\w+)(\(.*?\))?` \|", PAGE, re.MULTILINE)
OF_TESTS = ["assert_fused", "assert_equivalent"]


def signature_of(function: Callable[..., Any]) -> str:
    """Without annotations; "…" stands for a default that is no plain constant."""
    signature = inspect.signature(function)
    parameters = []
    for p in signature.parameters.values():
        plain = p.default is None or isinstance(p.default, (bool, int, float, str))
        default = p.default if plain or p.default is p.empty else Ellipsis
        parameters.append(p.replace(annotation=p.empty, default=default))
    shown = signature.replace(parameters=parameters, return_annotation=signature.empty)
    return str(shown).replace("Ellipsis", "…")


def test_every_public_name_is_on_the_page() -> None:
    shown = [name for name, _ in NAMED if name not in OF_TESTS]
    assert sorted([*shown, "__version__"]) == sorted(fx_fuser.__all__)
    assert "`__version__`" in PAGE
    assert set(OF_TESTS) <= {name for name, _ in NAMED}


@pytest.mark.parametrize("name, shown", [pair for pair in NAMED if pair[1]])
def test_signatures_are_those_of_the_code(name: str, shown: str) -> None:
    assert shown == signature_of(getattr(testing if name in OF_TESTS else fx_fuser, name))


@pytest.mark.parametrize("name, shown", NAMED)
def test_functions_have_signatures_and_classes_none(name: str, shown: str) -> None:
    thing = getattr(testing if name in OF_TESTS else fx_fuser, name)
    assert isinstance(thing, type) == (not shown)
    if isinstance(thing, type):
        row = re.findall(rf"^\| `{name}` \| (.*)", PAGE, re.MULTILINE)[0]
        for attribute in re.findall(r"`\.(\w+)", row):
            fields = getattr(thing, "__dataclass_fields__", {})
            assert hasattr(thing, attribute) or attribute in fields


def test_another_default_is_another_signature() -> None:
    def compare(model: object, *, train: bool = True, bound: object = object()) -> None: ...

    assert signature_of(compare) == "(model, *, train=True, bound=…)"
