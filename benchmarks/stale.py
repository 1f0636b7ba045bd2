"""Which results were measured before the code that they depend on changed: a line for each file.

    python -m benchmarks.stale [--check] [--names] [--results FOLDER] [--root FOLDER]

Rows name the commit that was measured. The line says how many of the product's files that a
benchmark depends on have other code now: the fewest and the most over the file's rows. Comments and
docstrings are not code. `--names` lists the files. This is information only: old results may still
be right. `--check` fails if rows name no commit, or one that is not in this history. Without git,
in a shallow clone or in another history it compares nothing.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machines, results

ROOT = Path(__file__).parent.parent
# The product's files, as patterns of fnmatch, whose * also takes slashes.
PRODUCT = ("fx_fuser/*.py", "patterns/*.py", "kernels_cu/*")
_KERNELS = ("kernels_cu/common/*", "kernels_cu/nvrtc/*", "fx_fuser/native/*.py")
_LINEAR = (*_KERNELS, "kernels_cu/host/linear*", "kernels_cu/host/gemm_call.h")
# Benchmarks of single kernels depend on these; others, of nets and sites, on all of PRODUCT.
DEPENDS: dict[str, tuple[str, ...]] = {
    "attention/*": (*_KERNELS, "kernels_cu/attention/*", "kernels_cu/host/attention*",
                    "fx_fuser/kernels/attention/*.py", "fx_fuser/ops/attention*.py"),
    "conv1d/*": (*_KERNELS, "kernels_cu/conv/conv1d*", "kernels_cu/host/conv1d.h",
                 "fx_fuser/kernels/conv1d/*.py"),
    "conv_sweep/*": (*_KERNELS, "kernels_cu/conv/*", "kernels_cu/host/conv*",
                     "fx_fuser/kernels/direct.py"),
    "heads/*": (*_KERNELS, "kernels_cu/loss/*", "kernels_cu/host/head_loss.h",
                "fx_fuser/kernels/head_loss.py", "fx_fuser/ops/head_*.py",
                "fx_fuser/passes/head_loss/*.py"),
    "linear_fp32/*": (*_LINEAR, "kernels_cu/linear/linear_split*", "kernels_cu/host/split_*",
                      "fx_fuser/kernels/split.py"),
    "unaligned/*": (*_LINEAR, "kernels_cu/linear/linear_combs*",
                    "kernels_cu/linear/linear_unaligned*", "fx_fuser/kernels/unaligned.py"),
}  # fmt: skip
# Not code: in Python comments and docstrings, in CUDA // and /* */ comments.
_PYTHON = re.compile(r'"""(?:[^"\\]|\\.|"(?!""))*"""|#[^\n]*')
_CUDA = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
FIELDS = ("commit", "new")  # the second: of two trees that took turns the newer one
DIRTY = "-dirty"  # behind a commit: files differed from it


@dataclass
class File:
    """commits: commit → its rows; "" of rows that name none. changed: commit → the files that it
    depends on and whose code has changed; None for a commit that is not in this history. It is
    empty without a history."""

    name: str
    commits: Counter[str]
    changed: dict[str, list[str] | None] = field(default_factory=dict)

    def faults(self) -> list[str]:
        """What is wrong with its rows, whatever their age."""
        found = []
        if nameless := self.commits[""]:
            found.append(f"{nameless} of {self.commits.total()} rows name no commit")
        if unknown := [commit for commit, files in self.changed.items() if files is None]:
            found.append(f"this history has no commit {', '.join(sorted(unknown))}")
        return found

    def names(self) -> list[str]:
        """The files that changed since any of its commits."""
        return sorted({name for files in self.changed.values() for name in files or ()})

    def __str__(self) -> str:
        said = self.faults()
        if counts := sorted(len(files) for files in self.changed.values() if files is not None):
            least, most = counts[0], counts[-1]
            changes = str(most) if least == most else f"{least} to {most}"
            plural = "" if changes == "1" else "s"
            said.append(f"{changes} file{plural} changed since" if most else "the code as it is")
        return f"{self.name}: {'; '.join(said) or 'not compared'}"


def commits_of(text: str) -> Counter[str]:
    """Commit → how many rows name it. A record whose rows name none is one row; a row that names
    none has the record's, if that names one."""
    content = json.loads(text)
    if isinstance(content, list):
        return Counter(map(named, content))
    return Counter(named(row) or named(content) for row in own(content))


def named(row: Mapping[str, Any]) -> str:
    return next((str(row[field]) for field in FIELDS if row.get(field)), "")


def own(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows of its lists in which one names a commit, or itself."""
    lists = [
        [row for row in v if isinstance(row, dict)] for v in record.values() if isinstance(v, list)
    ]
    return [row for rows in lists if any(map(named, rows)) for row in rows] or [record]


def git(root: Path, *command: str) -> str | None:
    """What it prints; None where it fails, or there is no git."""
    try:
        done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def has_history(root: Path) -> bool:
    """Is root a checkout with all of its commits?"""
    return git(root, "rev-parse", "--is-shallow-repository") == "false"


def is_ancestor(root: Path, commit: str) -> bool:
    return git(root, "merge-base", "--is-ancestor", commit, "HEAD") is not None


def code(name: str, text: str) -> str:
    """The text without comments, docstrings and line breaks."""
    bare = (_PYTHON if name.endswith(".py") else _CUDA).sub("", text)
    return " ".join(bare.split())


class History:
    """The product's files at a commit, compared with those of HEAD."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = self._files("HEAD")
        self._code: dict[str, str] = {}  # of a blob

    def _files(self, commit: str) -> dict[str, str]:
        """File → its blob."""
        listed = git(self.root, "ls-tree", "-r", commit) or ""
        split = (line.split("\t", 1) for line in listed.splitlines())
        files = {name: about.split()[2] for about, name in split if not name.endswith(".md")}
        return {name: blob for name, blob in files.items() if matches(name, PRODUCT)}

    def _read(self, name: str, blob: str) -> str:
        if blob not in self._code:
            self._code[blob] = code(name, git(self.root, "cat-file", "blob", blob) or "")
        return self._code[blob]

    def changed_since(self, commit: str) -> list[str]:
        """Files whose code is not what it was; those that are new or gone are among them."""
        then = self._files(commit)
        return sorted(n for n in {*then, *self.now} if self._differs(n, then.get(n)))

    def _differs(self, name: str, then: str | None) -> bool:
        now = self.now.get(name)
        if then is None or now is None:
            return True
        return then != now and self._read(name, then) != self._read(name, now)


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def depends_on(name: str) -> tuple[str, ...]:
    """The patterns of what a file of results depends on."""
    return next((wanted for key, wanted in DEPENDS.items() if matches(name, [key])), PRODUCT)


def examined(folder: Path, root: Path) -> list[File]:
    """Every file of results, with the history of the checkout at root."""
    paths = sorted(path for path in folder.rglob("*.json") if path.parent.name != machines.FOLDER)
    files = [File(str(p.relative_to(folder)), commits_of(p.read_text())) for p in paths]
    if not has_history(root):
        return files
    named = {commit: commit.removesuffix(DIRTY) for f in files for commit in f.commits if commit}
    known = {commit for commit in set(named.values()) if is_ancestor(root, commit)}
    if not known:
        return files  # of another history, say a copy's that begins with one commit
    history = History(root)
    since = {commit: history.changed_since(commit) for commit in sorted(known)}
    for file in files:
        wanted = depends_on(file.name)
        for commit in filter(None, file.commits):
            found = since.get(named[commit])
            file.changed[commit] = found and [name for name in found if matches(name, wanted)]
    return files


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stale")
    parser.add_argument("--check", action="store_true", help="fail if a row names no known commit")
    parser.add_argument("--names", action="store_true", help="the files that changed")
    parser.add_argument("--results", type=Path, default=results.FOLDER, metavar="FOLDER")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="FOLDER", help="of the history")
    args = parser.parse_args(arguments)
    files = examined(args.results, args.root)
    if not has_history(args.root):
        print(f"the git history at {args.root} is not complete: the age of results is unknown")
    for file in files:
        print(file, *(file.names() if args.names else ()), sep="\n    ")
    faults = [f"{file.name}: {fault}" for file in files for fault in file.faults()]
    return results.verdict(faults) if args.check else 0


if __name__ == "__main__":
    sys.exit(main())
