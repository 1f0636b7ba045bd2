"""$FX_FUSER: off, or installed with the import; anything else is told at the first use.

That an import installs is in `test_doctor.py`, which starts a process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from helpers import MUL, fused, gate, linear_program
from torch._inductor import compile_fx

import fx_fuser
from fx_fuser import options
from fx_fuser.errors import OptionError

OPTIONS = {"inner": "aot_eager", "cpu_ops": True, "strict": True, "auto": False}
INDUCTOR = compile_fx.compile_fx


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, logger="fx_fuser"):
        yield
    fx_fuser.uninstall()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "fx_fuser"]


def test_off_leaves_the_graph_to_the_inner_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = linear_program(gate), torch.randn(4, 8)
    monkeypatch.setenv("FX_FUSER", "off")
    compiled = torch.compile(model, backend="fx_fuser", options=OPTIONS)
    torch.testing.assert_close(compiled(x), model(x))
    assert fused() == {}
    said = "FX_FUSER is 'off': the inner compiler gets a graph as the user wrote it"
    assert lines(caplog) == [said]


def test_off_gives_inductors_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """And fx_fuser's own are still checked."""
    seen = []

    class Wrapper:
        def __init__(self, mode: str | None, options: dict[str, object], dynamic: object) -> None:
            seen.append((mode, options))

        def __call__(self, gm: torch.fx.GraphModule, inputs: object) -> object:
            return gm.forward

    monkeypatch.setenv("FX_FUSER", "off")
    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", Wrapper)
    given = {"fp32": "ieee", "epilogue_fusion": False, "mode": "default"}
    torch.compile(linear_program(gate), backend="fx_fuser", options=given)(torch.randn(4, 8))
    assert seen[-1] == ("default", {"epilogue_fusion": False})
    torch._dynamo.reset()
    with pytest.raises(Exception, match="unknown option 'fp23'"):
        torch.compile(linear_program(gate), backend="fx_fuser", options={"fp23": "ieee"})(
            torch.randn(4, 8)
        )


def test_off_installs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FX_FUSER", "off")
    fx_fuser.install()
    assert compile_fx.compile_fx is INDUCTOR
    with fx_fuser.installed():
        assert compile_fx.compile_fx is INDUCTOR
    assert lines(caplog) == [
        "FX_FUSER is 'off': install() does nothing",
        "FX_FUSER is 'off': installed() does nothing",
    ]
    with pytest.raises(OptionError, match="unknown option"):
        fx_fuser.install({"fp23": "ieee"})


@pytest.mark.parametrize("value", ["Off", "0", "on"])
def test_another_value_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("FX_FUSER", value)
    said = f"FX_FUSER is '{value}'; set it to off or install, or leave it unset"
    model, x = linear_program(gate), torch.randn(4, 8)
    with pytest.raises(Exception, match=said):
        torch.compile(model, backend="fx_fuser", options=OPTIONS)(x)
    for use in (fx_fuser.install, lambda: fx_fuser.installed().__enter__()):
        with pytest.raises(OptionError, match=said):
            use()


@pytest.mark.parametrize("value", ["", "install"])
def test_else_the_backend_fuses(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FX_FUSER", value)
    torch.compile(linear_program(gate), backend="fx_fuser", options=OPTIONS)(torch.randn(4, 8))
    assert fused() == {MUL: 1}


@pytest.mark.parametrize(("value", "installs"), [("install", True), ("off", False), ("no", False)])
def test_an_import_never_fails_by_the_variable(
    monkeypatch: pytest.MonkeyPatch, value: str, installs: bool
) -> None:
    monkeypatch.setenv("FX_FUSER", value)
    assert options.installs_at_import() == installs
