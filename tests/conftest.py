"""Every test starts from a fresh Dynamo, a fixed seed and zeroed counters."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import signal
import uuid
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import ledger
import pytest
import torch
import torch._dynamo.guards
from plan_cases import match_of, on_gpu  # noqa: F401
from toolchains import bare, fake, fake_libnvrtc, fake_nvrtc  # noqa: F401
from torch._dynamo.utils import counters
from verify_cases import verified  # noqa: F401

from fx_fuser.native import load
from fx_fuser.passes import graph_pass

# A shell begins background jobs so, and the processes that tests begin inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Neither is of any use to a test, and together they take a fifth of the whole suite's time. pytest
# gives its handlers to every logger that does not propagate; where torch's trace for tlparse has
# one, torch writes all its graphs and guards into it, as text and JSON.
if "TORCH_TRACE" not in os.environ:
    trace = logging.getLogger("torch.__trace")
    trace.handlers.clear()
    trace.propagate = True
# After a compile Dynamo times its guards, with caches that it flushes first.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


@pytest.hookimpl(tryfirst=True)  # before xdist takes "load" for what is not said
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Workers steal tests. In addopts, that would ask for xdist where it is not used."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_collection_finish() -> None:
    """What was imported stays alive: the garbage collector need not walk it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else triton's library says at the exit that its functions leak


@pytest.fixture
def own_caches() -> Iterator[None]:
    """Where Inductor's cache has a graph, from an earlier run, no pass runs."""
    with torch.compiler.config.patch(cache_key_tag=str(uuid.uuid4())):
        yield


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are loaded on a GPU that is there for these tests."""
    names: list[str] = []
    monkeypatch.setattr(load, "prepare", lambda specs, _: names.extend(s.name for s in specs))
    monkeypatch.setattr(load, "runs_on", lambda *_: True)
    monkeypatch.setattr(graph_pass, "_failed", set())
    return names


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.set_num_threads(1)  # tiny tensors, and one process a core
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    random.seed(0)
    yield
    torch._dynamo.reset()
    # Where a graph raises within autocast and nothing compiles that graph, torch stays inside: 2.11
    # leaves it on, and any version keeps the casts of weights that a later step has changed.
    torch.set_autocast_enabled("cpu", False)
    while torch.autocast_decrement_nesting() >= 0:
        pass
    torch.autocast_increment_nesting()
    torch.clear_autocast_cache()


# ---- the marks each_once, each_pair and one_in ---------------------------------------------------


def few(combinations: Sequence[tuple[int, ...]], size: int) -> set[tuple[int, ...]]:
    """Few of them, in which every value of each parameter occurs, or of each `size` parameters.

    The k-th has the k-th value of the parameter with the most, and the others count on as digits
    do: beside 20 values of one all combinations of two others occur, if they are fewer than 20.
    """
    values = [sorted(set(column)) for column in zip(*combinations)]
    longest = max(range(len(values)), key=lambda i: len(values[i]))
    most, whole, strides = len(values[longest]), 1, []
    for i, own in enumerate(values):
        digit = i != longest and whole * len(own) <= most
        strides.append(whole if digit else 1)
        whole *= len(own) if digit else 1
    chosen = {
        tuple(own[k // stride % len(own)] for own, stride in zip(values, strides))
        for k in range(most)
    }
    chosen &= set(combinations)

    parts = {c: set(itertools.combinations(enumerate(c), size)) for c in combinations}
    missing = set().union(*parts.values()).difference(*(parts[c] for c in chosen))
    while missing:
        best = max(combinations, key=lambda c: len(parts[c] & missing))
        chosen.add(best)
        missing -= parts[best]
    return chosen


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        default="1/1",
        metavar="K/N",
        help="of the tests marked `combination` the K-th of N parts",
    )
    parser.addoption(
        "--slow-share",
        default="1/1",
        metavar="K/N",
        help="of the other tests marked `slow` the K-th of N parts",
    )
    parser.addoption(
        "--ledger",
        type=Path,
        metavar="FILE",
        help="write which tests marked `gpu` passed, with commit, GPU and torch",
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("ledger")
    if path is not None and not hasattr(config, "workerinput"):  # reports reach the main process
        config.pluginmanager.register(ledger.Recorder(path), "fx_fuser-ledger")


@pytest.hookimpl(tryfirst=True)  # before -m is obeyed
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What each_once, each_pair and one_in leave out is slow, and is a combination. Of a slow test
    all but the first are.
    """
    for size, name in enumerate(("each_once", "each_pair"), 1):
        tests: dict[str, list[pytest.Function]] = defaultdict(list)
        seen: set[str] = set()
        for item in items:
            test = item.nodeid.partition("[")[0]
            if item.get_closest_marker(name) and item.get_closest_marker("slow"):
                if test in seen:
                    item.add_marker(pytest.mark.combination)
                seen.add(test)
            elif item.get_closest_marker(name):
                assert isinstance(item, pytest.Function)
                tests[test].append(item)
        for own in tests.values():
            combinations = list(zip(*_values(own)))
            chosen = few(combinations, size)
            for item, combination in zip(own, combinations):
                if combination not in chosen:
                    _leave_out(item)
    _thin_out(items)
    _keep_share(config, items)


def _leave_out(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow)
    item.add_marker(pytest.mark.combination)


def _thin_out(items: Sequence[pytest.Item]) -> None:
    """Of the cases that the other marks leave, one_in(n) leaves each n-th."""
    counts: dict[str, int] = defaultdict(int)
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        if counts[test] % mark.args[0]:
            _leave_out(item)
        counts[test] += 1


def _share_of(config: pytest.Config, option: str) -> tuple[int, int]:
    given = config.getoption(option)
    part, _, parts = given.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"{option} {given}: say 1/4, 2/4, 3/4 or 4/4")
    return int(part), int(parts)


def _keep_share(config: pytest.Config, items: list[pytest.Item]) -> None:
    marks = {"combination": "--share", "slow": "--slow-share"}  # the first one counts
    shares = {mark: _share_of(config, option) for mark, option in marks.items()}

    def is_kept(item: pytest.Item) -> bool:
        mark = next((mark for mark in shares if item.get_closest_marker(mark)), None)
        if mark is None:
            return True
        part, parts = shares[mark]
        return zlib.crc32(item.nodeid.encode()) % parts == part - 1

    config.hook.pytest_deselected(items=[item for item in items if not is_kept(item)])
    items[:] = [item for item in items if is_kept(item)]


def _values(tests: Sequence[pytest.Function]) -> Iterator[list[int]]:
    """By parametrization, which of its values each of these tests of one function has."""
    names = set(tests[0].callspec.params)
    together = []
    for mark in tests[0].iter_markers("parametrize"):
        of_mark = mark.args[0]
        together.append(of_mark.replace(",", " ").split() if isinstance(of_mark, str) else of_mark)
        names -= set(together[-1])
    together += [[name] for name in sorted(names)]  # the fixtures'
    for group in together:
        column = [tuple(id(test.callspec.params[name]) for name in group) for test in tests]
        numbers = {value: i for i, value in enumerate(dict.fromkeys(column))}
        yield [numbers[value] for value in column]
