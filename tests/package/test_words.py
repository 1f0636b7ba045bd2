"""Phrases that no native engineer writes stay out of code, messages and pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Phrase, as a regular expression → what to write.
BANNED = {
    r"(bytes|products) (that )?bound\b": "bandwidth-bound, compute-bound",
    r"\bno multiples? of": "not a multiple of, not multiples of",
    r"(?<!there )\bis no (anchor|architecture|attention|backend|case|entry)\b": "is not a …",
    r"(?<!there )\bis no (checkout|file|folder|report|tensor)\b": "is not a …",
    r"\bin the place of\b": "in place of, instead of",
    r"\b(one|a number|a scale|a factor) a (channel|column|row|pixel|sample)\b": "one per channel",
    r"\ba (milli|micro)?second an? \w+": "a millisecond per layer",
    r"\bby the clock\b|on the host's clock": "wall time, measured time",
    r"\bas of `": "as in",
    r"where git cannot tell": "if there is no git",
    r"to be charged for": "must not count for",
    r"bound by bytes|bytes do not bound": "bandwidth-bound",
    r"lies? as (they|it) may": "unaligned, any strides",
    r"hides? nothing": "all true",
    r"takes? the host (less|longer|more)": "cheaper to dispatch, launch-bound",
    r"the clock gains": "wall time improves",
    r"the machine to (itself|themselves)": "ran on an idle machine",
    r"judges? little": "prove little",
    r"taken by faith": "every kernel is timed and checked on your GPU",
    r"of which a kernel takes": "exceed the limit of",
    r"takes forever": "scores infinity",
    r"those see it who": "the planner's view",
    r"of which y alone": "inference",
    r"is told of an operand": "descriptor",
    r"by what else they do": "depending on load",
    r"leaves what it fails at": "running them unfused",
    r"before anybody|than nobody": "name who does it",
    r"(kernel|nothing) of fx_fuser's": "none of fx_fuser's kernels run",
    r"followed by nothing": "not fused, and why",
    r"many an? \w+ casts|for that does not": "many …, because",
    r"backward is the library's": "the library computes backward",
    r"by no branch": "without a branch",
    r"none the worse": "unharmed",
    r"by habit": "by default",
    r"compiles? as meant": "compiles without spills",
    r"that (is|are) none\b|is none that|is no(ne)? at all": "that does not, that is not a",
    r"of which only": "only its … is read",
    r"(the|its|their) clock (decides|judges|knows|says|tells|wins)": "timing decides",
    r"for each sizes\b": "for each combination of sizes and strides",
    r"\bgradients? by (x|z|the weight)\b": "gradient of x",
    r"\bof a stride of": "with stride 2",
    r"turned round": "reversed, flipped",
    r"\bin one order\b": "in a fixed order",
    r"\bwhere faster\b": "if faster, where that is faster",
    r"\bbehind (an?|the) (anchor|convolution|gemm|Linear|loss|transpose)\b": "after a Linear",
    r"\bruns? behind\b": "run after",
    r"\b(gathers?|kernel|operations?|rows|windows) of 16 bits\b": "16-bit rows",
    r"\bsurely\b": "known to, certain to",
    r"nobody reads": "nothing reads",
    r"\bas has\b|\bas have\b": "as … does",
    r"is to be this one of": "index of a result → the node that is to replace it",
}
FOLDERS = ("fx_fuser", "kernels_cu", "patterns", "benchmarks", "docs", "tests")
SUFFIXES = (".py", ".md", ".cuh", ".cu", ".h", ".cpp")


def found(text: str) -> list[str]:
    """What stands in the text, over line breaks and comment marks too, and what to write."""
    flat = re.sub(r"\s*\n\s*(//|#|\*)?\s*", " ", text)
    return [
        f"{match.group()}: write {better}"
        for phrase, better in BANNED.items()
        for match in re.finditer(phrase, flat, re.IGNORECASE)
    ]


def texts() -> Iterator[Path]:
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "demo.py"))
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            # The logs of what was tried are as they were written.
            is_log = path.name.startswith("NOTES")
            if path.suffix in SUFFIXES and not is_log and path != Path(__file__):
                yield path


def test_no_page_or_source_has_one() -> None:
    offences = {}
    for path in texts():
        if phrases := found(path.read_text()):
            offences[str(path.relative_to(ROOT))] = phrases
    assert offences == {}


@pytest.mark.parametrize(
    "text, phrase",
    [
        ("layers that bytes bound, 1 x 1", "bytes bound"),
        ("a mask that\n  // hides\n  // nothing", "hides nothing"),
        ("# It takes the\n# host longer", "takes the host longer"),
        ("On a CPU no kernel\nof fx_fuser's runs", "kernel of fx_fuser's"),
        ("// sums for the gradient\n// by the weight", "gradient by the weight"),
        ("a pass that runs\nbehind all others", "runs behind"),
    ],
)
def test_a_planted_one_is_found(text: str, phrase: str) -> None:
    assert any(said.startswith(f"{phrase}: write ") for said in found(text))
