"""Which results were measured before the product changed: a line for each file of them.

    python -m benchmarks.stale [--check] [--results FOLDER] [--root FOLDER]

Rows name the commit that was measured. The line says how many commits since then changed what a
benchmark depends on: the least and the most over the file's rows. This is information only: old
results may still be right. `--check` fails if rows name no commit, or one that is not in this
history. Without git, in a shallow clone or in another history it compares nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machines, results

ROOT = Path(__file__).parent.parent
# What every benchmark depends on, as git's pathspecs.
PRODUCT = (
    ":(glob)fx_fuser/**/*.py",
    ":(glob)patterns/*.py",
    "kernels_cu",
    ":(exclude,glob)kernels_cu/**/*.md",
)
FIELDS = ("commit", "new")  # the second: of two trees that took turns the newer one
DIRTY = "-dirty"  # behind a commit: files differed from it


@dataclass
class File:
    """commits: commit → its rows; "" of rows that name none. since: commit → later commits that
    changed the product, None of a commit that this history has not; empty without a history."""

    name: str
    commits: Counter[str]
    since: dict[str, int | None] = field(default_factory=dict)

    def faults(self) -> list[str]:
        """What is wrong with its rows, whatever their age."""
        found = []
        if nameless := self.commits[""]:
            found.append(f"{nameless} of {self.commits.total()} rows name no commit")
        if unknown := [commit for commit, count in self.since.items() if count is None]:
            found.append(f"this history has no commit {', '.join(sorted(unknown))}")
        return found

    def behind(self) -> list[int]:
        """Over its commits, in order."""
        return sorted(count for count in self.since.values() if count is not None)

    def __str__(self) -> str:
        said = self.faults()
        if counts := self.behind():
            least, most = counts[0], counts[-1]
            changes = str(most) if least == most else f"{least} to {most}"
            said.append(f"{changes} commits to the product since" if most else "the product as is")
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


def commits_since(root: Path, commit: str) -> int | None:
    """How many later commits changed the product; None of a commit that is not an ancestor."""
    begin = commit.removesuffix(DIRTY)
    if git(root, "merge-base", "--is-ancestor", begin, "HEAD") is None:
        return None
    count = git(root, "rev-list", "--count", f"{begin}..HEAD", "--", *PRODUCT)
    return None if count is None else int(count)


def examined(folder: Path, root: Path) -> list[File]:
    """Every file of results, with the history of the checkout at root."""
    paths = sorted(path for path in folder.rglob("*.json") if path.parent.name != machines.FOLDER)
    files = [File(str(p.relative_to(folder)), commits_of(p.read_text())) for p in paths]
    if has_history(root):
        named = {commit for file in files for commit in file.commits if commit}
        since = {commit: commits_since(root, commit) for commit in named}
        if all(count is None for count in since.values()):
            return files  # of another history, say a copy's that begins with one commit
        for file in files:
            file.since = {commit: since[commit] for commit in file.commits if commit}
    return files


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stale")
    parser.add_argument("--check", action="store_true", help="fail where a commit lacks")
    parser.add_argument("--results", type=Path, default=results.FOLDER, metavar="FOLDER")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="FOLDER", help="of the history")
    args = parser.parse_args(arguments)
    files = examined(args.results, args.root)
    if not has_history(args.root):
        print(f"no whole git history at {args.root}: how old results are is not known")
    for file in files:
        print(file)
    faults = [f"{file.name}: {fault}" for file in files for fault in file.faults()]
    return results.verdict(faults) if args.check else 0


if __name__ == "__main__":
    sys.exit(main())
