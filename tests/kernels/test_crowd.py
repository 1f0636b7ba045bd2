"""Kernels on a GPU that processes share."""

from __future__ import annotations

import sys

import crowd
import pytest
from sm90 import gpu


def test_every_check_exists() -> None:
    for place, (module, function, _) in enumerate(crowd.CHECKS):
        assert callable(getattr(__import__(module), function)), crowd.name_of(place)


def test_a_failure_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Of a check that always fails, in this process."""

    class Planted:
        @staticmethod
        def repeats(failures: list[str]) -> None:
            failures.append("planted")

    monkeypatch.setitem(sys.modules, "planted_checks", Planted)
    monkeypatch.setattr(crowd, "CHECKS", [("planted_checks", "repeats", ())])
    assert crowd.run_one(0, 0.01) > 0
    assert "planted_checks.repeats(): planted" in capsys.readouterr().out


@gpu
@pytest.mark.slow
def test_launches_agree() -> None:
    failed = crowd.run_all([*range(len(crowd.CHECKS))], 20)
    assert not failed, failed
