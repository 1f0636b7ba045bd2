"""Mutants of the cache, its keys and the compilers' commands, for tests/mutants/mutate.py."""

from __future__ import annotations

BUILD, COMPILERS = "tests/native/test_build.py", "tests/native/test_compilers.py"
EVICTION, FOLDER = "tests/native/test_eviction.py", "tests/native/test_cache_folder.py"
TIMING = "tests/planning/test_timing.py"
PREBUILT, USUAL = "tests/native/test_prebuilt.py", "tests/package/test_usual.py"
DAMAGED = f"{TIMING}::test_a_damaged_answer_is_measured_again"
PLANTED = f"{TIMING}::test_timings_that_others_may_have_written_are_measured_again"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "cache: a folder of its own", "native/store.py",
        "return Path(chosen).absolute() / OWN", "return Path(chosen).absolute()",
        (f"{FOLDER}::test_the_users_folder_keeps_what_is_in_it",),
    ),
    (
        "cache: names of entries are whole", "native/store.py",
        r'_ENTRY = re.compile(r"[0-9a-f]{32}(\.cubin|\.so|\.json)")',
        r'_ENTRY = re.compile(r".*(\.cubin|\.so|\.json)")',
        (f"{EVICTION}::test_other_files_are_neither_counted_nor_removed",),
    ),
    (
        "cache: names of work folders are whole", "native/store.py",
        r'_WORK = re.compile(r"tmp-([0-3][0-9a-f])-[a-z0-9_]{8}")',
        r'_WORK = re.compile(r"tmp-(..)-.*")',
        (f"{EVICTION}::test_other_files_are_neither_counted_nor_removed",),
    ),
    (
        "cache: files, and no links", "native/store.py",
        "if e.is_file(follow_symlinks=False)]", "if e.is_file()]",
        (f"{EVICTION}::test_other_files_are_neither_counted_nor_removed",),
    ),
    (
        "cache: no folder that is a link is looked into", "native/store.py",
        "if folder.is_symlink() or not folder.is_dir():", "if not folder.is_dir():",
        (f"{EVICTION}::test_no_link_leads_outside[]",
         f"{EVICTION}::test_no_link_leads_outside[plans]"),
    ),
    (
        "cache: no lock is opened through a link", "native/store.py",
        "flags | os.O_NOFOLLOW", "flags",
        (f"{FOLDER}::test_a_lock_that_is_a_link_is_not_opened",),
    ),
    (
        "cache: a new folder is looked at again", "native/store.py",
        "            _check_folder(folder)  # another process may have made it meanwhile\n", "",
        (f"{FOLDER}::test_a_folder_that_somebody_made_meanwhile_is_looked_at_again",),
    ),
    (
        "cache: the folder above is looked at", "native/store.py",
        "_check(Path(os.path.realpath(folder.parent)), folder)", "_check(folder)",
        (f"{FOLDER}::test_the_folder_above_counts_too", f"{PLANTED}[.]"),
    ),
    (
        "cache: no entry is a link", "native/store.py",
        "found = path.lstat()", "found = path.stat()",
        (f"{FOLDER}::test_the_users_folder_may_be_a_link_and_ours_may_not[entry]",
         f"{PLANTED}[link]"),
    ),
    (
        "cache: a user may have no home", "native/store.py",
        "    except RuntimeError:\n        _warn", "    except KeyError:\n        _warn",
        (f"{FOLDER}::test_a_user_without_a_home_gets_a_temporary_folder",),
    ),
    (
        "cache: no build where compilers cannot name the folder", "native/store.py",
        "        jobs.check_folder(folder)\n", "",
        (f'{FOLDER}::test_a_folder_that_compilers_cannot_name_costs_one_warning["]',
         f"{FOLDER}::test_a_folder_that_compilers_cannot_name_costs_one_warning[`]"),
    ),
    (
        "timings: of a folder that is trusted", "native/store.py",
        "if not unused_because(folder):", "if True:",
        (f"{PLANTED}[.]", f"{PLANTED}[fx_fuser-v1]"),
    ),
    (
        "timings: of a file that is trusted", "native/store.py",
        "if any(map(_is_distrusted, (path.parent, path))):", "if _is_distrusted(path.parent):",
        (f"{PLANTED}[file]", f"{PLANTED}[link]"),
    ),
    (
        "timings: of numbers", "planning/timing.py",
        "all(type(part) in (int, float) for part in value)", "True",
        (f"{DAMAGED}[[[true, 0.5]]]", f"{DAMAGED}[[[1.0, false]]]"),
    ),
    (
        "timings: neither negative nor NaN", "planning/timing.py",
        "are_numbers and value[0] >= 0 and 0 <= value[1] < math.inf", "are_numbers",
        (f"{DAMAGED}[[[NaN, 0.5]]]", f"{DAMAGED}[[[-1.0, 0.5]]]", f"{DAMAGED}[[[1.0, Infinity]]]"),
    ),
    (
        "timings: of this GPU", "planning/timing.py",
        "return gpu.name, gpu.multi_processor_count, *versions", "return versions",
        (f"{TIMING}::test_the_key_holds_the_machine",),
    ),
    (
        "timings: of this driver", "planning/timing.py",
        "versions = _driver(), torch.__version__,", "versions = torch.__version__,",
        (f"{TIMING}::test_the_key_holds_the_machine",),
    ),
    (
        "timings: of these settings of cuDNN", "planning/case.py",
        'for flag in ("benchmark", "deterministic", "enabled")', "for flag in ()",
        ("tests/planning/test_plan_conv.py::test_times_are_of_cudnns_settings",),
    ),
    (
        "shim: of this torch", "native/binaries.py",
        "host.version, torch.__version__)", "host.version)",
        (f"{BUILD}::test_the_shims_key_holds_torchs_version",),
    ),
    (
        "prebuilt: of these sources", "native/binaries.py",
        "_hash_texts(source, arch, files)", "_hash_texts(source, arch)",
        (f"{PREBUILT}::test_an_edited_source_is_compiled[kernel]",
         f"{PREBUILT}::test_an_edited_source_is_compiled[arguments]",
         f"{PREBUILT}::test_an_edited_source_is_compiled[launcher]",
         f"{PREBUILT}::test_an_edited_source_is_compiled[NVRTC]",
         f"{PREBUILT}::test_the_doctor_counts_those_that_are_used"),
    ),
    (
        "prebuilt: of these headers for NVRTC", "native/binaries.py",
        "[*_kernel_sources(), *compilers.nvrtc_headers(KERNELS)])\n    return {source",
        "_kernel_sources())\n    return {source",
        (f"{PREBUILT}::test_an_edited_source_is_compiled[NVRTC]",),
    ),
    (
        "prebuilt: not where a compiler is named", "native/binaries.py",
        ' or os.environ.get("FX_FUSER_COMPILER") or', " or",
        (f"{PREBUILT}::test_who_names_a_compiler_gets_its_kernels",),
    ),
    (
        "prebuilt: what is refused is compiled", "native/load.py",
        "if not binaries.refuse_prebuilt(cubins, arch, error):", "if True:",
        (f"{PREBUILT}::test_what_the_driver_refuses_is_compiled",
         f"{PREBUILT}::test_an_error_of_both_is_raised"),
    ),
    (
        "prebuilt: once refused, none is tried", "native/binaries.py",
        "if arch in _refused or", "if",
        (f"{PREBUILT}::test_what_the_driver_refuses_is_compiled",
         f"{PREBUILT}::test_an_error_of_both_is_raised"),
    ),
    (
        "prebuilt: one that was compiled refuses none", "native/binaries.py",
        "if not any(PREBUILT in path.parents for path in cubins):", "if False:",
        (f"{PREBUILT}::test_one_that_was_compiled_and_does_not_load_refuses_no_other",),
    ),
    (
        "prebuilt: GPT-2's tail", "ops/usual.py",
        "    _NEW_GELU,  # GPT-2, Phi\n", "",
        (f"{USUAL}::test_a_language_model_in_fp32_asks_for_usual_kernels[gpt2-training]",),
    ),
    (
        "commands: a path is no format", "native/jobs.py",
        "return [files.get(part, part) for part in command]",
        "return [part.format(source=source, target=target) for part in command]",
        (f"{BUILD}::test_an_argument_reaches_the_compiler_as_it_is[w{{x}}]",
         "tests/native/test_wheel.py::test_a_checkout_may_have_any_name[w{x}]"),
    ),
    (
        "commands: no line break", "native/jobs.py",
        r'''if "\n" in part or "\r" in part:''', "if False:",
        (rf"{BUILD}::test_an_argument_with_a_line_break_is_refused[\n]",
         rf"{BUILD}::test_an_argument_with_a_line_break_is_refused[\r]"),
    ),
    (
        "commands: paths that a compiler cannot take", "native/compilers.py",
        "if found := next((c for c in characters if c in str(path)), None):",
        "if found := next((c for c in characters if c in path.parts), None):",
        (f"{COMPILERS}::test_a_character_that_a_compiler_cannot_take_is_named[nvcc]",
         f"{COMPILERS}::test_a_character_that_a_compiler_cannot_take_is_named[nvrtc]",
         f"{BUILD}::test_available_says_which_folder_the_compiler_cannot_name"),
    ),
    (
        "environment: the loop is checked at its first use", "kernels/__init__.py",
        "        check_split_loop()\n", "        pass\n",
        (f"{BUILD}::test_available_says_what_is_wrong_in_the_environment",),
    ),
)  # fmt: skip
