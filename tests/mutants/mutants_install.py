"""Mutants of what `install` guards, for tests/mutants/mutate.py."""

from __future__ import annotations

FILE = "tests/package/test_install.py"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "install: the backend's own graphs are left", "installation.py",
        "if options is None or fallback.is_compiling() or V.aot_compilation:",
        "if options is None or V.aot_compilation:",
        (f"{FILE}::test_the_backend_fuses_once_while_installed",),
    ),
    (
        "install: exported programs are left", "installation.py",
        "if options is None or fallback.is_compiling() or V.aot_compilation:",
        "if options is None or fallback.is_compiling():",
        (f"{FILE}::test_exported_programs_are_left",),
    ),
    (
        "install: the pass leaves regions to their graph", "installation.py",
        "if self.gm is None or graph is not self.gm.graph:", "if self.gm is None:",
        (f"{FILE}::test_a_checkpoint[False]",),
    ),
    (
        "install: a failure at a site is not cached", "installation.py",
        "        if outcome.failed:\n", "        if False:\n",
        (f"{FILE}::test_a_failure_at_one_site_is_not_cached",),
    ),
    (
        "install: the uuid has the sources", "installation.py",
        "        binaries.fingerprint(),\n", "",
        (f"{FILE}::test_the_uuid_has_all_that_decides",),
    ),
    (
        "install: a user's own pass runs once, after ours", "installation.py",
        "        and not setting(FIRST_PASS)\n", "",
        (f"{FILE}::test_the_users_own_pass_runs",
         f"{FILE}::test_a_pass_given_to_torch_compile_runs"),
    ),
    (
        "install: with the last block Inductor is as it was", "installation.py",
        "if _blocks or _everywhere or not getattr(", "if _everywhere or not getattr(",
        (f"{FILE}::test_blocks_nest_and_end_in_any_order",),
    ),
)  # fmt: skip
