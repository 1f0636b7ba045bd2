"""Every mutant is one of the sources as they are, and the tests that must fail exist."""

from __future__ import annotations

import pytest
from mutate import ROOT, Mutant, all_mutants


@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place(mutant: Mutant) -> None:
    text = (ROOT / "fx_fuser" / mutant.file).read_text()
    assert text.count(mutant.old) == 1 and mutant.new != mutant.old


@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda mutant: mutant.name)
def test_its_tests_exist(mutant: Mutant) -> None:
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text()
