"""Every mutant is one of the sources as they are, and the tests that must fail exist."""

from __future__ import annotations

import pytest
from mutate import ROOT, Mutant, all_mutants, in_share


@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place(mutant: Mutant) -> None:
    text = (ROOT / "fx_fuser" / mutant.file).read_text()
    assert text.count(mutant.old) == 1 and mutant.new != mutant.old


@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda mutant: mutant.name)
def test_its_tests_exist(mutant: Mutant) -> None:
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text()


def test_the_shares_are_all_of_them() -> None:
    whole = all_mutants()
    shares = [in_share(whole, part, 6) for part in range(1, 7)]
    assert sorted(m.name for share in shares for m in share) == sorted(m.name for m in whole)
    assert max(map(len, shares)) < len(whole) / 3
