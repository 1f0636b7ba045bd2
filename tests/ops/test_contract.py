"""What the compiled shim assumes of Python is compared when it is loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from toolchains import needs_compilers

from fx_fuser.errors import BuildError
from fx_fuser.native import load, store
from fx_fuser.native.kernel_spec import MAX_NUMBERS, MAX_TENSORS

LINES = [
    "limit tensors 16",
    "limit numbers 8",
    "limit shared 101376",
    "leaves bias mean var gamma beta eps",
    "tiles 32x32 32x64 64x32 64x64 128x128",
    "combs 128x256:both 128x192:both 256x192:k 128x240:lines",
    "attention 64:128x128 128:128x64",
    "dropout 31744/32768",
    "backward 64:128x64 128:128x64",
    "biases 64:128x128 128:128x128 64:128x128",
    "windows 32:64 64:64",
    "gathers 8192:65535",
    "pixels 128x256 128x128 256x64 256x128",
]


@pytest.fixture
def says(monkeypatch):
    """A loaded shim whose contract is LINES, and a Python whose is what the test says."""
    ops = {"pointwise": None, "contract": SimpleNamespace(default=lambda: LINES)}
    monkeypatch.setattr(torch.ops, "fx_fuser_native", SimpleNamespace(**ops), raising=False)
    monkeypatch.setattr(load, "_expected", None)
    return lambda lines: load.expect(lambda: lines)


def test_without_an_expectation_nothing_is_compared(says):
    load.load_shim()


def test_the_order_of_lines_has_no_meaning(says):
    says(LINES[::-1])
    load.load_shim()


@pytest.mark.parametrize("line", range(len(LINES)))
def test_a_line_that_differs_is_named_with_both_sides_and_the_remedy(says, line):
    changed = (
        LINES[line]
        .replace("16", "12")
        .replace("8", "4")
        .replace("101", "100")
        .replace("mean var", "var mean")
        .replace("windows 32", "windows 48")
    )
    assert changed != LINES[line]
    says([*LINES[:line], changed, *LINES[line + 1 :]])
    with pytest.raises(BuildError) as caught:
        load.load_shim()
    text = str(caught.value)
    assert f"C++:    {LINES[line]}\n" in text and f"Python: {changed}\n" in text
    assert text.count("C++:") == 1
    assert f"Remove the cache folder {store.cache_dir()}" in text and "reinstall fx_fuser" in text


def test_a_line_that_one_side_lacks_is_named(says):
    more = "one more"
    says([*LINES[1:], more])
    with pytest.raises(BuildError) as caught:
        load.load_shim()
    assert f"C++:    {LINES[0]}\n    Python: (nothing)" in str(caught.value)
    assert f"C++:    (nothing)\n    Python: {more}" in str(caught.value)


@needs_compilers
def test_the_real_shim_says_what_python_says():
    load.load_shim()
    lines = torch.ops.fx_fuser_native.contract.default()
    assert f"limit tensors {MAX_TENSORS}" in lines and f"limit numbers {MAX_NUMBERS}" in lines
    assert lines == LINES
