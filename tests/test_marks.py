"""What each_once and each_pair leave in the default run."""

from __future__ import annotations

import itertools

import pytest
from conftest import few

TABLES = {
    "digits": list(itertools.product(range(20), range(3), range(2))),
    "many small ones": list(itertools.product(range(2), range(2), range(3), range(2))),
    "one parameter": [(i,) for i in range(5)],
    "not all combinations": [(i, j) for i in range(6) for j in range(4) if i <= j + 2],
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_every_value_occurs(table: list[tuple[int, ...]], size: int) -> None:
    def parts(some: set[tuple[int, ...]]) -> set[tuple[tuple[int, int], ...]]:
        return {part for c in some for part in itertools.combinations(enumerate(c), size)}

    chosen = few(table, size)
    assert chosen <= set(table) and parts(chosen) == parts(set(table))


def test_few_are_chosen() -> None:
    assert [len(few(table, 1)) for table in TABLES.values()] == [20, 3, 5, 6]
    assert len(few(TABLES["many small ones"], 2)) < 12
    # Beside the 20 values all combinations of the others.
    assert len({c[1:] for c in few(TABLES["digits"], 1)}) == 6
