"""The mutants of the anchor bmm and of what is taken apart for it, for tests/mutants/mutate.py."""

from __future__ import annotations

BMM, EINSUM = "tests/ops/test_bmm.py", "tests/graph/test_bmm_einsum.py"
SUMS = "tests/graph/test_scaled_sums.py"
LEFT = f"{SUMS}::test_what_stays"
AS_WRITTEN = f"{EINSUM}::test_what_is_not_fused_stays_as_it_was_written"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "bmm: the ranks are equal", "anchors/bmm.py",
        "if x.ndim != weight.ndim or x.ndim < 3:", "if False:",
        (f"{BMM}::test_refused[rank 4 by 3]", f"{BMM}::test_refused[rank 2 by 3]",
         f"{BMM}::test_refused[a vector by rank 3]"),
    ),
    (
        "bmm: the leading sizes are equal", "anchors/bmm.py",
        "if not all(statically_known_true(a == b) for a, b in leading):", "if False:",
        (f"{BMM}::test_refused[broadcast]", f"{BMM}::test_refused[broadcast within]"),
    ),
    (
        "bmm: one column is no gate", "anchors/bmm.py",
        "may_be_gate = False", "may_be_gate = True",
        (f"{BMM}::test_a_result_larger_than_the_product",),
    ),
    (
        "bmm: a gradient is dense", "anchors/bmm.py",
        "return multiply(x.mT, dz.mT)", "return multiply(dz.mT, x.mT).mT",
        (f"{BMM}::test_gradients_have_the_layout_of_a_dense_tensor",),
    ),
    (
        "bmm: by matmul", "graph/read/sites.py",
        "if tensor is not None and tensor.ndim > 2:", "if False:",
        (f"{BMM}::test_forms[@-eval-cpu_ops]", f"{BMM}::test_refused[broadcast]"),
    ),
    (
        "bmm: it has no bias", "graph/read/sites.py",
        'if site.kind == "bmm":', "if False:",
        (f"{BMM}::test_a_vector_after_it_is_no_bias",),
    ),
    (
        "sums: a gemm times 0", "graph/prepare/decompose.py",
        "if alpha == 0:", "if False:",
        (f"{LEFT}[alpha 0-baddbmm]", f"{LEFT}[alpha 0-addmm]"),
    ),
    (
        "sums: an addend times 0 is not read", "graph/prepare/decompose.py",
        "if beta != 0:\n        wanted", "if True:\n        wanted",
        (f"{SUMS}::test_an_addend_times_0_is_not_read[baddbmm]",
         f"{SUMS}::test_an_addend_times_0_is_not_read[addmm]"),
    ),
    (
        "sums: an addend times 0 that has a gradient, or is made", "graph/prepare/decompose.py",
        "if beta == 0 and not _is_unread(addend):", "if False:",
        (f"{SUMS}::test_a_gradient_of_zeros_stays[baddbmm]",
         f"{LEFT}[beta 0 of what is made-baddbmm]"),
    ),
    (
        "sums: in place", "graph/prepare/decompose.py",
        "if node.target._schema.is_mutable:", "if False:",
        (f"{SUMS}::test_an_overload_that_writes_stays[baddbmm_]",
         f"{SUMS}::test_an_overload_that_writes_stays[addmm_]"),
    ),
    (
        "sums: in 16 bits", "graph/prepare/decompose.py",
        "if len(dtypes) > 1 or not dtypes <= {None, *_DTYPES}:", "if len(dtypes) > 1:",
        (f"{LEFT}[in bfloat16-baddbmm]", f"{LEFT}[in bfloat16-addmm]"),
    ),
    (
        "sums: a pattern's addmm has a bias", "graph/prepare/decompose.py",
        "if beta == 1 and alpha == 1 and _may_be_bias(input):", "if False:",
        (f"{SUMS}::test_a_patterns_addmm_has_a_bias",),
    ),
    (
        "bmm: what is not fused is put together", "graph/prepare/prepare.py",
        "        recompose(self.graph)\n", "",
        (f"{BMM}::test_what_is_not_fused_stays_as_it_was_written",
         f"{EINSUM}::test_beside_a_site_an_einsum_reads_its_result[bqhd,bkhd->bhqk]",
         f"{EINSUM}::test_beside_a_site_an_einsum_reads_its_result[bhqd,bkhd->bqhk]"),
    ),
    (
        "bmm: put together with the operands of now", "graph/prepare/decompose.py",
        "lambda n: now.get(n, n)", "lambda n: n",
        (f"{BMM}::test_what_is_not_fused_stays_as_it_was_written",
         f"{EINSUM}::test_beside_a_site_an_einsum_reads_its_result[bqhd,bkhd->bhqk]"),
    ),
    (
        "bmm: put together only with its own product", "graph/prepare/decompose.py",
        "if call is None or not call.is_whole:", "if call is None:",
        (f"{BMM}::test_a_product_may_be_fused_without_its_sum",
         f"{EINSUM}::test_a_permuted_result[bik,bkj->ibj-eval-cpu_ops]"),
    ),
    (
        "bmm: an einsum that spreads a size of one", "graph/prepare/decompose.py",
        "if not statically_known_true(left.shape[i] == right.shape[j]) or not all(",
        "if not all(",
        (f"{AS_WRITTEN}[an inner size of one]",),
    ),
    (
        "bmm: an einsum's result in another layout", "graph/prepare/decompose.py",
        "statically_known_true(a == b) or statically_known_true(size == 1) for a, b, size in lies",
        "True for a, b, size in lies",
        (f"{AS_WRITTEN}[a result in another layout]",),
    ),
    (
        "bmm: a baddbmm's product is no traffic", "report/traffic.py",
        "nodes = match.nodes - decompose.inner_of(match.nodes)", "nodes = match.nodes",
        (f"{BMM}::test_its_product_saves_no_traffic",),
    ),
)  # fmt: skip
