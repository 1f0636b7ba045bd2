"""What the pages name in backticks exists: words of code, files, functions of modules, keys of
options. And architecture names every module."""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fx_fuser.options import Options

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FOLDERS = ("fx_fuser", "patterns", "kernels_cu", "benchmarks", "tests", ".ci", ".github")
CODE = {".py", ".cu", ".cuh", ".h", ".cpp", ".yml", ".toml", ""}
# What users or torch name, and no file here.
ELSEWHERE = {
    "graph_breaks",
    "torchcompile",
    "TORCH_COMPILE_BACKEND",
    "loss_type",
    "selective_log_softmax",
}
# Modules whose names are those of other things, too: an op, a result, a user's variable.
SHARED = {"run", "site", "step", "text"}
SUFFIXES = ("py", "md", "cu", "cuh", "h", "cpp", "json", "txt", "toml", "yml")


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in CODE and path != Path(__file__):
                yield path
    yield from (ROOT / name for name in ("demo.py", "pyproject.toml", "constraints.txt"))


def prose(text: str) -> Iterator[str]:
    """Paragraphs, list items and rows of a page, without blocks of code."""
    without = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.split(r"\n\s*\n|\n(?=\s*[-|]|\d+\. )", without)


def quoted(text: str) -> list[str]:
    return [code for part in prose(text) for code in re.findall(r"`([^`]+)`", part)]


def is_name(word: str) -> bool:
    """Does it look like code's, not like a word of English or a letter of algebra?"""
    return "_" in word.strip("_") or re.search(r"[a-z][A-Z]", word) is not None


def unknown_words(text: str, known: set[str]) -> list[str]:
    """`a_b_*` and the like name what begins or ends so."""
    found = []
    for code in quoted(text):
        for word in re.findall(r"[A-Za-z_]\w*\*?", code):
            if not is_name(word) or word in ELSEWHERE:
                continue
            pattern = word.endswith("*") or word.startswith("_")
            part = word.rstrip("*").strip("_") if pattern else ""
            if word not in known and not (pattern and any(part in one for one in known)):
                found.append(word)
    return found


@functools.cache
def modules() -> dict[str, set[str]]:
    """Last part of a module's name → the names that any module so called defines or imports."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "fx_fuser").rglob("*.py"):
        name = path.parent.name if path.stem == "__init__" else path.stem
        of_module = found.setdefault(name, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                of_module.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                of_module.add(node.id)
            elif isinstance(node, ast.alias):
                of_module.add((node.asname or node.name).rpartition(".")[2])
        of_module |= {other.stem for other in path.parent.glob("*.py") if path.stem == "__init__"}
        of_module |= {other.name for other in path.parent.iterdir() if path.stem == "__init__"}
    return found


def dotted(text: str) -> list[tuple[str, str]]:
    pattern = r"(?<![\w./*>])(\w+)\.(\w+)\b(?!\.)"
    return [pair for code in quoted(text) for pair in re.findall(pattern, code)]


def absent_attributes(text: str, of: dict[str, set[str]]) -> list[str]:
    """`module.name` where no module of that name has the name."""
    ours = ((m, a) for m, a in dotted(text) if m in of and m not in SHARED and a not in SUFFIXES)
    return [f"{m}.{a}" for m, a in ours if a not in of[m]]


def absent_files(text: str, known: set[str]) -> list[str]:
    """`name.cuh` where no file has that name. (Paths are `test_readme.py`'s.)"""
    code = ("cu", "cuh", "h", "cpp")
    return [f"{n}.{s}" for n, s in dotted(text) if s in code and f"{n}.{s}" not in known]


def unknown_options(text: str) -> list[str]:
    """Keys of `options={…}` and `{"key": …}` that are neither fx_fuser's nor Inductor's."""
    from torch._inductor import config

    known = {field.name for field in dataclasses.fields(Options)} - {"inductor", "exported"}
    keys = [k for code in quoted(text) for k in re.findall(r"\{[\"'](\w+)[\"']:", code)]
    return [key for key in keys if key not in known | {"mode"} and not hasattr(config, key)]


@pytest.fixture(scope="module")
def known() -> set[str]:
    found = {Path(__file__).stem}
    for path in sources():
        found |= {path.stem, path.name, *re.findall(r"\w+", path.read_text(errors="ignore"))}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_exist(page: Path, known: set[str]) -> None:
    text = page.read_text()
    assert unknown_words(text, known) == []
    assert absent_attributes(text, modules()) == []
    assert absent_files(text, known) == []
    assert unknown_options(text) == []


def test_names_that_do_not_exist_are_found(known: set[str]) -> None:
    page = "`no_such_name(x)`, `fuse_exported`\n```py\nneither_this\n```\n| `attention_split_*` |"
    assert unknown_words(page, known) == ["no_such_name"]
    assert absent_attributes("`gate.decide` → `gate.decided`", modules()) == ["gate.decided"]
    assert absent_files("`stem.cuh`, `stems.cuh`", known) == ["stems.cuh"]
    assert unknown_options('`options={"fp23": 1}`, `{"fp32": "ieee"}`') == ["fp23"]


def unnamed_modules(page: str) -> list[str]:
    """Modules that it does not name. Commands and files without code need not be named."""
    found = []
    for path in sorted((ROOT / "fx_fuser").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        inside = name.startswith(("fx_fuser/patterns/", "fx_fuser/kernels_cu/"))
        trivial = path.name == "__main__.py" or len(path.read_text().splitlines()) < 2
        folder = path.name == "__init__.py" and f"`{name.removesuffix('__init__.py')}`" in page
        if not (inside or trivial or folder or f"`{name}`" in page):
            found.append(name)
    return found


def test_architecture_names_every_module() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    assert unnamed_modules(page) == []
    assert unnamed_modules(page.replace("`fx_fuser/planning/gate.py`", "")) == [
        "fx_fuser/planning/gate.py"
    ]


def unnamed_kernels(page: str) -> list[str]:
    """Device code that its table of files does not name; a `*` stands for any letters."""
    table = page.partition("\n## Files\n")[2]
    patterns = re.findall(r"`([\w*.]+)`", table)
    names = {path.name for path in (ROOT / "kernels_cu").rglob("*.cu*")}
    return sorted(n for n in names if not any(fnmatch.fnmatch(n, one) for one in patterns))


def test_kernels_page_names_every_file() -> None:
    page = (ROOT / "docs/kernels.md").read_text()
    assert unnamed_kernels(page) == []
    assert unnamed_kernels(page.replace("`philox.cuh`", "")) == ["philox.cuh"]
