"""What each_once and each_pair leave in the default run, and parts of what they leave out."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import _keep_share, few, pytest_collection_modifyitems

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


class Item:
    """A test as far as shares look at it."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid = nodeid
        self.marks = marks

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks += (mark.name,)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


def config_of(share: str, slow: str = "1/1") -> Any:
    ignored = SimpleNamespace(pytest_deselected=lambda items: None)
    shares = {"--share": share, "--slow-share": slow}
    return SimpleNamespace(getoption=shares.__getitem__, hook=ignored)


def kept(share: str, items: list[Item], slow: str = "1/1") -> list[Item]:
    left: Any = list(items)
    _keep_share(config_of(share, slow), left)
    return list(left)


def test_shares_are_all_combinations_once_and_about_as_many() -> None:
    combinations = [Item(f"tests/test_a.py::test[{i}]", "combination") for i in range(400)]
    others = [Item("tests/test_a.py::test", "slow"), Item("tests/test_b.py::test")]
    parts = [kept(f"{k}/4", combinations + others) for k in (1, 2, 3, 4)]
    assert all(one in part for one in others for part in parts)
    of_parts = [[one for one in part if one not in others] for part in parts]
    assert all(70 <= len(part) <= 130 for part in of_parts)
    together = [one for part in of_parts for one in part]
    assert sorted(together, key=combinations.index) == combinations
    assert kept("1/1", combinations + others) == combinations + others


def test_of_slow_tests_parts_are_all_once_and_others_are_in_each() -> None:
    slow = [Item(f"tests/test_a.py::test[{i}]", "slow") for i in range(400)]
    others = [Item("tests/test_b.py::test"), Item("tests/test_c.py::test", "slow", "combination")]
    parts = [kept("1/1", slow + others, f"{k}/2") for k in (1, 2)]
    assert all(one in part for one in others for part in parts)
    assert all(150 <= len(part) <= 250 for part in parts)
    together = [one for part in parts for one in part if one not in others]
    assert sorted(together, key=slow.index) == slow


def test_of_a_slow_test_each_run_has_the_first() -> None:
    items = [Item(f"test_a.py::test[{i}]", "slow", "each_once") for i in range(400)]
    parts: list[list[Item]] = []
    for share in ("1/4", "2/4", "3/4", "4/4"):
        left: Any = [Item(item.nodeid, *item.marks) for item in items]
        pytest_collection_modifyitems(config_of(share), left)
        parts.append(left)
    assert all(part[0].nodeid == items[0].nodeid for part in parts)
    assert sum(map(len, parts)) == len(items) + 3


@pytest.mark.parametrize("share", ["0/4", "5/4", "1", "a/b", "1/0", "-1/4"])
def test_no_such_share(share: str) -> None:
    with pytest.raises(pytest.UsageError, match="say 1/4"):
        kept(share, [])
    with pytest.raises(pytest.UsageError, match=r"--slow-share .*say 1/4"):
        kept("1/1", [], share)
