"""Mutants of the rules for DTensors, for tests/mutants/mutate.py."""

from __future__ import annotations

FILE = "tests/graph/test_tensor_parallel.py"
RULES, EDIT = "graph/prepare/sharding.py", "graph/prepare/localize.py"


def _ranks(name: str) -> str:
    return f"{FILE}::test_two_ranks[{name}]"


def _refused(name: str) -> str:
    return f"{FILE}::test_refused[{name}]"


def _alone(name: str) -> str:
    return f"{FILE}::test_alone[{name}]"


# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "tensor parallel: x's gradient has a part on each rank", RULES,
        '("N", "P", "N", "N")', '("N", "R", "N", "N")', (_ranks("gated"),),
    ),
    (
        "tensor parallel: a replicated weight's gradient has a part on each rank", RULES,
        '("M", "M", "P", "P")', '("M", "M", "R", "R")', (_ranks("batch"),),
    ),
    (
        "tensor parallel: so has a broadcast factor's", RULES,
        "                placed.append(partial())\n", "                placed.append(own)\n",
        (_ranks("columns with a broadcast factor"),),
    ),
    (
        "tensor parallel: a replicated z has no rule", RULES,
        '    ("M", "R", "R"): (',
        '    ("R", "R", "R"): ("R", "R", "R", "R"),\n    ("M", "R", "R"): (',
        (_refused("all whole"),),
    ),
    (
        "tensor parallel: each rank adds its share of the bias", RULES,
        "parts *= left.device_mesh.size(i)", "parts *= 1",
        (_ranks("rows with a tail"), f"{FILE}::test_graph[rows with a tail]"),
    ),
    (
        "tensor parallel: the share's gradient is whole", EDIT,
        "        return grad, None\n", "        return grad / 2, None\n",
        (_ranks("rows with a tail"), f"{FILE}::test_graph[rows with a tail]"),
    ),
    (
        "tensor parallel: a factor is broadcast from one element", RULES,
        "type(own) is replicate and (dim < 0 or _is(value.shape[dim] == 1))",
        "type(own) is replicate",
        (_alone("a factor placed otherwise"),),
    ),
    (
        "tensor parallel: shards of one size", RULES,
        "            if not _is_even(own):\n", "            if False:\n", (_refused("uneven"),),
    ),
    (
        "tensor parallel: all operands are DTensors", RULES,
        "            if not is_dtensor(own):\n", "            if False:\n",
        (_alone("a number as a plain tensor"),),
    ),
    (
        "tensor parallel: the strides of a whole", RULES,
        "pairs = zip((*made.shape, *made.stride()), (*value.shape, *value.stride()))",
        "pairs = zip(made.shape, value.shape)",
        (f"{FILE}::test_a_whole_is_remade_with_its_strides",),
    ),
    (
        "tensor parallel: nothing writes to operands", RULES,
        "if called_in_place(node) or storages((*operands, node)) & {None, *self.view.written_at}:",
        "if False:", (_refused("in place"), _refused("x is written")),
    ),
    (
        "tensor parallel: a DTensor's memory is its shard's", "graph/read/nodes.py",
        "is_dtensor(tensor) else tensor", "False else tensor",
        (f"{FILE}::test_a_dtensor_lies_in_the_memory_of_its_shard",),
    ),
    (
        "tensor parallel: only a linear has a rule", RULES,
        'if written is None or written.op != "linear":', "if written is None:",
        (_refused("matmul"), _refused("bmm")),
    ),
    (
        "tensor parallel: a redistribute that moves data stays", RULES,
        "(new.placements, new.dtype) == (old.placements, old.dtype)", "True",
        (_alone("another placement"),),
    ),
    (
        "tensor parallel: a to_local without gradients stays", RULES,
        "if not is_dtensor(old) or self.view.region[node] != self.view.region[source]:",
        "if not is_dtensor(old):", (f"{FILE}::test_to_local_without_gradients",),
    ),
    (
        "tensor parallel: a to_local with a gradient placed otherwise stays", RULES,
"return (placed is None or _same(placed, usual)) and not given",
        "return True", (_refused("x by K, another gradient"),),
    ),
    (
        "tensor parallel: summands that are read", RULES,
        "            self._drop_if_read(node)\n", "            pass\n",
        (_refused("x by K, another gradient"),),
    ),
    (
        "tensor parallel: what is not fused is put back", "graph/prepare/prepare.py",
        "        self._localized.restore(results)\n", "",
        (f"{FILE}::test_what_is_not_fused_is_as_written",),
    ),
    (
        "tensor parallel: what makes shards writes nothing", "graph/read/nodes.py",
        'if getattr(target, "writes_nothing", False) is True:', "if False:",
        (f"{FILE}::test_graph[gated]",),
    ),
    (
        "tensor parallel: the first rank's times", "planning/timing.py",
        "if shared is not None:", "if False:",
        (f"{FILE}::test_ranks_decide_by_the_times_of_the_first[first0]",),
    ),
)  # fmt: skip
