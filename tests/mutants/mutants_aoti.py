"""Mutants of what makes an exported program that a file can hold, for tests/mutants/mutate.py."""

from __future__ import annotations

FILE, OPS = "tests/package/test_aoti.py", "tests/ops/test_aoti_ops.py"
RUN = "tests/ops/test_run.py"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "aoti: the program is copied", "exporting.py",
        "    gm = twin(program.graph_module)\n", "    gm = program.graph_module\n",
        (f"{FILE}::test_the_program_shares_all_but_its_graph",),
    ),
    (
        "aoti: memory that a file does not tell", "exporting.py",
        "values = dict(_computed(module)) if lacks else {}", "values: dict[Node, Any] = {}",
        (f"{FILE}::test_an_operand_is_written_through_a_view[True]",),
    ),
    (
        "aoti: a node's val is that of its value now", "exporting.py",
        '            node.meta["val"] = val\n', '            node.meta.setdefault("val", val)\n',
        (f"{FILE}::test_a_val_is_that_of_the_value",),
    ),
    (
        "aoti: new calls become ATen's", "exporting.py",
        "        elif node.target not in meanings.targets and _is_of_torch(node):",
        "        elif False:",
        (f"{FILE}::test_programs[a bias of a view-static]",),
    ),
    (
        "aoti: outputs have new names", "exporting.py",
        "        return OutputSpec(spec.kind, TensorArgument(result.name), spec.target)",
        "        return spec",
        (f"{FILE}::test_the_program_shares_all_but_its_graph",),
    ),
    (
        "aoti: signatures of modules", "exporting.py",
        "                call.signature = None", "                pass",
        (f"{FILE}::test_a_signature_of_a_module_that_is_fused_with_its_tail",),
    ),
    (
        "aoti: bodies in two places", "exporting.py",
        "            del module.meta[EXPORTED]\n", "",
        (f"{FILE}::test_no_notes_are_left",),
    ),
    (
        "aoti: sites on a CPU are left", "ops/checks.py",
        'if not on_cpu and meta_tensor(match.root).device.type == "cpu":', "if False:",
        (f"{FILE}::test_a_site_on_a_cpu_is_left",),
    ),
    (
        "aoti: numbers are floats", "ops/exported.py",
        "[*map(float, s)]", "[*s]",
        (f"{OPS}::test_a_number_of_the_program_is_a_float",),
    ),
    (
        "aoti: kernels of another GPU", "ops/exported.py",
        '            call.config["product"] = LIBRARY\n', "            pass\n",
        (f"{OPS}::test_a_kernel_of_another_gpu_is_left_for_the_library",),
    ),
    (
        "aoti: without kernels torch computes", "ops/exported.py",
        "    except BuildError as error:", "    except ZeroDivisionError as error:",
        (f"{OPS}::test_without_kernels_torch_computes_and_one_warning_says_why",
         f"{OPS}::test_a_kernel_that_does_not_build"),
    ),
    (
        "aoti: operands are cast under autocast", "ops/exported.py",
        "        library.cast(anchor, operands, compute)\n", "",
        (f"{FILE}::test_an_autocast_around_the_program",),
    ),
    (
        "aoti: no cast at the site", "ops/exported.py",
        "is_cast = torch.is_autocast_enabled(device)", "is_cast = False",
        (f"{FILE}::test_an_autocast_around_the_program",),
    ),
    (
        "aoti: a gradient raises", "ops/exported.py",
        'torch.library.register_autograd("fx_fuser::run.import_fx_fuser", _no_gradient, '
        "lib=run._LIBRARY)\n", "",
        (f"{FILE}::test_a_gradient_raises",
         f"{OPS}::test_a_gradient_of_a_tensor_of_the_epilogue_raises"),
    ),
    (
        "aoti: names of inputs", "exporting.py",
        "        copied.name, copied.target = written.name, written.target\n", "        pass\n",
        (f"{FILE}::test_inputs_keep_their_names",),
    ),
    (
        "aoti: rank 0 is in the key of a kernel", "ops/exported.py",
        "(v.dtype, v.device, v.ndim == 0)", "(v.dtype, v.device)",
        (f"{OPS}::test_a_tensor_without_dimensions_has_a_kernel_of_its_own",),
    ),
    (
        "run: nodes stand for their values", "ops/run.py",
        'given.meta["val"] if isinstance(given, Node) else given', "given",
        (f"{RUN}::test_nodes_stand_for_tensors",),
    ),
    (
        "run: y alone of a call with a size", "ops/run.py",
        "if sizes else functools.partial(ONE, t, program)",
        "if False else functools.partial(ONE, t, program)",
        (f"{RUN}::test_y_alone_of_a_call_with_a_size",),
    ),
    (
        "run: two overloads of the same types", "ops/run.py",
        '_LIBRARY.define("run.in_torch(Tensor[] t, str program, SymInt[] sizes=[]) -> Tensor[]")',
        '_LIBRARY.define(f"run.in_torch{_CALL} -> Tensor[]")',
        (f"{RUN}::test_no_two_overloads_have_the_same_types",),
    ),
)  # fmt: skip
