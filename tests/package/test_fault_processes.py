"""Interrupts, forks and threads while fx_fuser compiles: no fault of it, and the next call runs."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import (
    ALL_THREE,
    ThreePatterns,
    fresh,  # noqa: F401
    images,
    sites,
)
from forked import run_script
from test_faults import (
    Recorder,
    _after,
    _compile,
    _our_warnings,
    recorder,  # noqa: F401
)
from torch import Tensor

from fx_fuser import reading
from fx_fuser.graph.match import rewrite
from fx_fuser.native import binaries
from fx_fuser.planning import gate, plan

GROWN = {**ALL_THREE, "auto_linear": 1}  # the Linear that the gate is multiplied by


@pytest.mark.slow
@pytest.mark.each_once
@pytest.mark.parametrize(
    "owner, name, auto",
    [
        (reading, "find", False),
        pytest.param(reading, "grow", True, marks=pytest.mark.slow),
        pytest.param(gate, "_with_tails", True, marks=pytest.mark.slow),
        pytest.param(plan, "_build_kernels", False, marks=pytest.mark.slow),
        (plan, "_build_kernels", True),
        (rewrite, "_erase", True),
        (binaries, "fingerprint", True),
    ],
    ids=["matching", "growing", "gate", "building", "building all", "rewriting", "compiling"],
)
@pytest.mark.parametrize("strict", [False, True])
def test_an_interrupt_is_no_fault_and_the_next_call_compiles(
    owner: Any,
    name: str,
    auto: bool,
    strict: bool,
    monkeypatch: pytest.MonkeyPatch,
    recorder: Recorder,  # noqa: F811
) -> None:
    """A real SIGINT, at its default: Python raises KeyboardInterrupt at the next line."""
    model, x = ThreePatterns().eval(), images()
    right, run = getattr(owner, name), _compile(model, strict, auto)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return right(*args, **kwargs)

    with monkeypatch.context() as patch, _our_warnings() as messages:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(x)
    assert messages == [] and sites() == {}
    assert torch.equal(run(x), model(x)) and sites() == (GROWN if auto else ALL_THREE)


_FORKED = """
import os, sys
import torch
from compare import ThreePatterns, fused_compile, images, sites

torch.set_num_threads(1)
model, other, x = ThreePatterns().eval(), ThreePatterns().eval(), images()
run = fused_compile(model, {options})
expected = run(x)
child = os.fork()
if child == 0:
    torch.testing.assert_close(run(x), expected, rtol=0, atol=0)
    torch._dynamo.reset()
    torch.testing.assert_close(run(x), expected, rtol=1e-6, atol=1e-6)
    value = fused_compile(other, {options})(x)
    value.sum().backward()
    torch.testing.assert_close(value, other(x), rtol=1e-6, atol=1e-6)
    assert all(count == 2 for count in sites().values()), sites()  # `other` is the same code
    os._exit(0)
status = os.waitpid(child, 0)[1]
assert status == 0, status
torch.testing.assert_close(fused_compile(other, {options})(x), other(x), rtol=1e-6, atol=1e-6)
print("both live")
"""


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="AOTAutograd itself traces no backward in a child then"
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param("", id="aot_eager"),
        pytest.param("inner='inductor'", id="inductor", marks=pytest.mark.slow),
    ],
)
def test_a_fork_after_initialisation(options: str, tmp_path: Path) -> None:
    """Parent and child go on: with what is compiled, and compiling."""
    script = tmp_path / "forks.py"
    script.write_text(_FORKED.format(options=options))
    status, said = run_script(script)
    assert status == 0 and said.endswith("both live\n"), said


@pytest.mark.slow
def test_two_threads_compile_and_one_fails(
    monkeypatch: pytest.MonkeyPatch,
    recorder: Recorder,  # noqa: F811
) -> None:
    """The other's model fuses; both give the right result. (Both right: test_compile.py.)"""
    models, x = [ThreePatterns().eval() for _ in range(2)], images()
    monkeypatch.setattr(rewrite, "_insert", _after(3, rewrite._insert))
    values: dict[int, Tensor] = {}
    barrier = threading.Barrier(2)

    def work(i: int) -> None:
        barrier.wait()
        values[i] = _compile(models[i])(x)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    with _our_warnings() as messages:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(values[i], models[i](x)) for i in range(2))
    assert sites() == ALL_THREE and len(messages) == 1
