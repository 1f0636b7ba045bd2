"""Imports among fx_fuser's rooms go one way, and so do includes among those of kernels_cu. And no
file is long, no function, and no folder of fx_fuser."""

from __future__ import annotations

import ast
import collections
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fx_fuser

ROOT = Path(fx_fuser.__file__).parent
# From the ground up: a room imports from those before it, and from itself.
FLOORS = (
    ("errors", "versions", "arguments", "options"),
    ("native",),
    ("graph.__init__", "graph.read"),
    ("graph.epilogue",),
    ("graph.prepare",),
    ("graph.attention",),
    ("graph.match",),
    ("anchors",),
    ("kernels",),
    ("ops",),
    ("planning",),
    ("passes",),
    ("verify",),
    ("report",),
    (
        "registry",
        "reading",
        "outcome",
        "backend",
        "fallback",
        "installation",
        "__init__",
        "compare",
        "explain",
        "exporting",
        "testing",
        "cache",
        "build",
        "wheel",
        "doctor",
        "__main__",
    ),
)
FLOOR_OF = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
# What the rooms of kernels_cu include: the host, of other rooms, only what both sides share.
CUDA_ROOMS = {
    "common": ("common/",),
    "pointwise": ("pointwise/", "common/"),
    "linear": ("linear/", "common/"),
    "conv": ("conv/", "common/"),
    "attention": ("attention/", "common/"),
    "loss": ("loss/", "common/"),
    "host": ("host/", r"(common|pointwise|linear|conv|attention|loss)/\w+\.h$"),
    "nvrtc": (),
}


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """fx_fuser's own modules, by dotted name below it; patterns are a user's code."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] not in ("patterns", "kernels_cu"):
            yield ".".join(parts), path


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """Modules of fx_fuser that it names in an import anywhere, also for annotations alone."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            package, _, rest = node.module.partition(".")
            if package == "fx_fuser":
                found += (f"{rest}.{alias.name}".strip(".") for alias in node.names)
        elif isinstance(node, ast.Import):
            names = (alias.name.partition(".") for alias in node.names)
            found += (rest for package, _, rest in names if package == "fx_fuser")
    return tuple(found)


def room_of(name: str) -> str:
    """graph.read of graph.read.nodes.Node; "" of what is in no room."""
    while name and name not in FLOOR_OF:
        name = name.rpartition(".")[0]
    return name


def back_edges(root: Path) -> list[str]:
    found = []
    for name, path in modules(root):
        floor = FLOOR_OF[room_of(name)]
        for target in imported(path):
            if FLOOR_OF.get(room_of(target), floor) > floor:
                found.append(f"{name} imports {target}")
    return found


def crowded(root: Path) -> list[str]:
    """Folders of more than 15 modules, their own `__init__` not counted."""
    names = (name for name, _ in modules(root) if not name.endswith("__init__"))
    counts = collections.Counter(name.rpartition(".")[0] for name in names)
    return [folder for folder, count in counts.items() if count > 15]


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The modules on a circle of imports, and those that import them; or none."""
    while ends := {name for name, targets in edges.items() if not targets}:
        edges = {name: targets - ends for name, targets in edges.items() if name not in ends}
    return sorted(edges)


def _module_of(target: str, names: set[str]) -> str:
    """ops.calls of ops.calls.call, and anchors.__init__ of anchors.ANCHORS; "" of none."""
    folder = target.rpartition(".")[0]
    tried = (target, folder, f"{target}.__init__", f"{folder}.__init__")
    return next((name for name in tried if name in names), "")


def module_edges(root: Path) -> dict[str, set[str]]:
    names = {name for name, _ in modules(root)}
    edges: dict[str, set[str]] = {}
    for name, path in modules(root):
        targets = {_module_of(target, names) for target in imported(path)}
        edges[name] = targets - {"", name}
    return edges


def includes(kernels: Path) -> dict[str, set[str]]:
    """What each CUDA source below kernels_cu includes, but for headers of others."""
    sources = (path for path in kernels.rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".cpp"))
    return {
        path.relative_to(kernels).as_posix(): set(
            re.findall(r'^ *# *include *"(.*)"', path.read_text(), re.MULTILINE)
        )
        for path in sources
    }


def back_includes(kernels: Path) -> list[str]:
    return [
        f"{name} includes {target}"
        for name, targets in includes(kernels).items()
        for target in targets
        if not any(re.match(allowed, target) for allowed in CUDA_ROOMS[name.split("/")[0]])
    ]


def files(*suffixes: str) -> Iterator[Path]:
    """Those that this repository's people wrote."""
    for folder in ("fx_fuser", "patterns", "kernels_cu", "benchmarks", "tests", "docs"):
        found = (path for path in (ROOT.parent / folder).rglob("*") if path.suffix in suffixes)
        yield from (path for path in found if "results" not in path.parts)
    yield from (ROOT.parent / name for name in ("README.md", "demo.py") if name.endswith(suffixes))


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and number of lines of each."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, (node.end_lineno or 0) - node.lineno + 1


# Comments, texts and directives with the lines that these go on with: no brace there counts.
_NO_CODE = re.compile(
    r"""//[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*""",
    re.MULTILINE,
)
_HOLDS_FUNCTIONS = re.compile(
    r"(template\s*<.*>\s*)?(namespace|struct|class|union|enum)\b|extern$", re.DOTALL
)


def cuda_functions(text: str) -> Iterator[tuple[str, int]]:
    """Head and number of lines of each function: of a block that only types and namespaces hold."""
    text = _NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    heads: list[tuple[str, int]] = []  # of the blocks that are open, and where each begins
    start = 0  # of the next head
    for found in re.finditer(r"[{};]|\b(public|private|protected):", text):
        if found[0] == "{":
            head = text[start : found.start()]
            heads.append((head.strip(), start + len(head) - len(head.lstrip())))
        elif found[0] == "}":
            head, begin = heads.pop()
            inside = any(not _HOLDS_FUNCTIONS.match(outer) for outer, _ in heads)
            if not inside and not _HOLDS_FUNCTIONS.match(head):
                yield " ".join(head.split()), text.count("\n", begin, found.end()) + 1
        start = found.end()
    assert not heads


# Module → the kernels that it names. What no kernel is, or has no site, is named where it is used.
NAMED = {
    "doctor.facts": {"split"},  # whose loop differs by GPU and environment
    "build": {"split"},  # whose shared memory and registers differ on more architectures
    "installation": {"split"},  # of which the environment may choose the loop
    "ops.calls": {"folded"},  # an op of its own, the library's call
    "ops.folded": {"folded"},
    "ops.conv1d.__init__": {"conv1d"},  # of Inductor's graphs, no site
    "ops.depthwise.__init__": {"depthwise"},
    "ops.grouped.__init__": {"grouped"},
    "ops.head_kept": {"head_loss"},  # a loss is no site
    "ops.head_loss": {"head_loss"},
    "ops.head_wide.__init__": {"exact", "split"},  # its products
    "ops.library": {"attention", "folded", "pixels", "unaligned"},
    "ops.pixels.__init__": {"pixels"},  # of Inductor's graphs, no site
    "ops.attention_dropout": {"attention"},
    "ops.attention_split": {"attention"},
    "ops.attention_bias.window": {"attention"},
    "ops.attention_bias.gathered": {"attention"},
    "ops.usual": {"attention", "folded", "unaligned"},  # the kernel that folds
    "planning.bench_ops": {"folded"},
    "planning.convolutions": {"folded"},
    "planning.launches": {"folded"},
    "planning.plan": {"folded"},
    "verify.rivals": {"folded"},
    "passes.attention_split.__init__": {"attention"},
    "passes.attention_split.biased": {"attention"},
    "passes.attention_split.dropout": {"attention"},
    "passes.by_hand.clock": {"attention", "split"},  # the kernel, and gemms beside it
    "passes.by_hand.rewrite": {"attention"},
    "passes.by_hand.gathers": {"attention"},
    "passes.by_hand.windows": {"attention"},
    "passes.conv1d.site": {"conv1d"},
    "passes.convolution.later": {"depthwise", "grouped", "pixels"},  # for reports
    "passes.depthwise.site": {"depthwise"},
    "passes.grouped.site": {"grouped"},
    "passes.pixels.site": {"pixels"},
    "passes.head_loss.__init__": {"head_loss"},
    "passes.head_loss.wide": {"exact", "split"},
    "passes.padding": {"split"},  # gemms of Inductor's graphs, not sites
    "passes.products": {"split", "exact"},
    "passes.provenance": {"split", "exact"},
    "passes.unaligned": {"unaligned"},
}


def kernels_named(root: Path) -> dict[str, set[str]]:
    """Module outside fx_fuser.kernels → the kernels' files that it imports from."""
    found: dict[str, set[str]] = {}
    shared = {"__init__", "base", "precision"}
    kernels = {path.stem for path in (ROOT / "kernels").iterdir()} - shared
    for name, path in modules(root):
        parts = [target.split(".") for target in imported(path)]
        named = {p[1] for p in parts if p[0] == "kernels" and len(p) > 1} & kernels
        if named and not name.startswith("kernels."):
            found[name] = named
    return found


def test_a_kernels_name_stands_in_its_file_and_the_list() -> None:
    assert kernels_named(ROOT) == NAMED


def test_a_kernels_name_elsewhere_is_noticed(tmp_path: Path) -> None:
    room = tmp_path / "planning"
    room.mkdir()
    (room / "plan.py").write_text("from fx_fuser.kernels.stem import stem_cut\n")
    (room / "case.py").write_text("from fx_fuser.kernels import KERNELS, direct\n")
    (room / "gate.py").write_text("from fx_fuser.kernels.base import Kernel\n")
    assert kernels_named(tmp_path) == {"planning.plan": {"stem"}, "planning.case": {"direct"}}


def test_every_module_has_a_floor() -> None:
    assert {room_of(name) for name, _ in modules(ROOT)} == set(FLOOR_OF)


def test_imports_go_down() -> None:
    assert not back_edges(ROOT)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not circle(module_edges(ROOT))


@pytest.mark.parametrize(
    ("name", "line", "target"),
    [
        ("graph.match.grow", "from fx_fuser.planning import plan", "planning.plan"),
        ("graph.match.grow", "from fx_fuser.planning.plan import plan", "planning.plan.plan"),
        ("graph.match.grow", "import fx_fuser.ops.calls", "ops.calls"),
        ("graph.match.grow", "from fx_fuser import backend", "backend"),
        ("graph.prepare.sink", "from fx_fuser.graph.match import grow", "graph.match.grow"),
        ("graph.epilogue", "from fx_fuser.graph import prepare", "graph.prepare"),
        ("graph.read.view", "import fx_fuser.graph.epilogue", "graph.epilogue"),
    ],
)
def test_a_back_edge_is_noticed(tmp_path: Path, name: str, line: str, target: str) -> None:
    path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True)
    path.write_text(f"def late():\n    {line}\n")
    assert back_edges(tmp_path) == [f"{name} imports {target}"]


def test_a_circle_is_noticed() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


def test_a_circle_of_annotations_is_noticed(tmp_path: Path) -> None:
    room = tmp_path / "graph" / "read"
    room.mkdir(parents=True)
    (room / "view.py").write_text(
        "if TYPE_CHECKING:\n    from fx_fuser.graph.read.naming import End\n"
    )
    (room / "naming.py").write_text("from fx_fuser.graph.read.view import View\n")
    assert circle(module_edges(tmp_path)) == ["graph.read.naming", "graph.read.view"]


def test_no_folder_has_more_than_15_modules() -> None:
    assert not crowded(ROOT)


def test_a_crowded_folder_is_noticed(tmp_path: Path) -> None:
    room = tmp_path / "graph" / "read"
    room.mkdir(parents=True)
    names = ["__init__", *(f"part{i}" for i in range(15))]
    for name in names:
        (room / f"{name}.py").touch()
    assert not crowded(tmp_path)
    (room / "one_more.py").touch()
    assert crowded(tmp_path) == ["graph.read"]


def test_includes_name_a_room_and_go_down() -> None:
    kernels = ROOT / "kernels_cu"
    assert {name.split("/")[0] for name in includes(kernels)} == set(CUDA_ROOMS)
    assert not back_includes(kernels)
    assert not circle(includes(kernels))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("common/split_sm90.cuh", "linear/linear_split_args.h"),
        ("linear/linear_split_args.h", "pointwise/pointwise_args.h"),
        ("conv/conv_direct_args.h", "host/device.h"),
        ("host/split_operands.h", "common/copy_rows.cuh"),
        ("host/linear.h", "split_call.h"),
    ],
)
def test_a_back_include_is_noticed(tmp_path: Path, source: str, target: str) -> None:
    (tmp_path / source).parent.mkdir()
    (tmp_path / source).write_text(f'#pragma once\n\n#include <cstdint>\n#include "{target}"\n')
    assert back_includes(tmp_path) == [f"{source} includes {target}"]


def ops_without_a_caller(shim: str) -> list[str]:
    """Ops of fx_fuser_native that nothing in fx_fuser calls: those belong to benchmarks/kernels.h.

    shim: its text.
    """
    native = shim[: shim.index("STABLE_TORCH_LIBRARY_IMPL")]
    python = "".join(path.read_text() for path in ROOT.rglob("*.py"))
    names = re.findall(r'm\.def\(\s*"(\w+)\(', native)
    return [n for n in names if not re.search(rf'\.{n}\.default\b|_call\("{n}"', python)]


def test_the_shim_has_no_op_that_only_benchmarks_call() -> None:
    shim = (ROOT / "kernels_cu/host/shim.cpp").read_text()
    assert ops_without_a_caller(shim) == []
    first = 'm.def("use_driver('
    assert ops_without_a_caller(shim.replace(first, 'm.def("linear_split(' + first)) == [
        "linear_split"
    ]


def test_no_file_is_longer_than_500_lines() -> None:
    found = files(".py", ".cu", ".cuh", ".h", ".cpp", ".md")
    assert not [str(path) for path in found if len(path.read_text().splitlines()) > 500]


def test_no_function_is_longer_than_100_lines() -> None:
    python = [(path, python_functions(path.read_text())) for path in files(".py")]
    cuda = [(path, cuda_functions(path.read_text())) for path in files(".cu", ".cuh", ".h", ".cpp")]
    found = [(str(path), *one) for path, of_file in python + cuda for one in of_file]
    assert len(found) > 3000
    assert not [(path, name, lines) for path, name, lines in found if lines > 100]


CUDA = r"""
#define TWO(name) \
  void name() {   \
  }
namespace a::b {
constexpr int kThree[] = {1, 2,
                          3};
template <class T>
struct Four : Base<T> {
  int five;
  static void six(int by) {  // {
    for (int i = 0; i < by; ++i) five += '{' + [&] { return 1; }();
  }

 private:
  const char* seven() const { return "}"; }
};
}  // namespace a::b
extern "C" {
extern "C" __global__ void eight(
    float* to) {
  if (to) {
    *to = 8;
  }
}
}
"""


def test_lines_of_functions_are_counted() -> None:
    assert [(head.split("(")[0].split()[-1], lines) for head, lines in cuda_functions(CUDA)] == [
        ("=", 2),
        ("six", 3),
        ("seven", 1),
        ("eight", 6),
    ]
    python = "class A:\n  @cache\n  def b(self):\n    def c():\n      pass\n    return c\n"
    assert list(python_functions(python)) == [("b", 4), ("c", 2)]
