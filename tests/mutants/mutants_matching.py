"""Mutants of the matcher, the epilogue and growth: see `mutate`."""

from __future__ import annotations

EFFECTS = "tests/graph/test_order_of_effects.py"
WRITES = "tests/graph/test_refused_writes.py"
BOUND, TEXT, KEPT = (
    "tests/graph/test_bound.py",
    "tests/graph/test_epilogue_text.py",
    "tests/graph/test_kept.py",
)
APART = f"{BOUND}::test_a_product_that_float32_cannot_make_is_not_opened"
OPS_TEST = "tests/graph/test_epilogue_ops.py"
FAULTS, MATMUL = "tests/graph/test_site_faults.py", "tests/graph/test_matmul.py"
GROW, GROW_FAULTS = "tests/graph/test_grow.py", "tests/graph/test_grow_faults.py"

# What runs is the user's own expression, within bounds; a fault costs one site.
MUTANTS = (
    (
        "fits: tensors", "ops/checks.py",
        '        ("tensors", tensors + len(bound.tensors), MAX_TENSORS),\n', "",
        (f"{BOUND}::test_tensors_that_a_kernel_takes[16-bias]",
         f"{BOUND}::test_what_z_is_made_of_takes_places_too[norm]"),
    ),
    (
        "fits: what z is made of", "ops/checks.py",
        "tensors + len(bound.tensors), MAX_TENSORS", "1 + len(bound.tensors), MAX_TENSORS",
        (f"{BOUND}::test_what_z_is_made_of_takes_places_too[conv]",
         f"{BOUND}::test_what_z_is_made_of_takes_places_too[norm]"),
    ),
    (
        "fits: a Linear's bias takes no place", "anchors/linear.py",
        "return 1, 0  # c, with its bias", "return 2, 0",
        (f"{BOUND}::test_tensors_that_a_kernel_takes[15-bias]",),
    ),
    (
        "fits: numbers", "ops/checks.py",
        '        ("numbers", numbers + len(bound.numbers) + len(bound.items), MAX_NUMBERS),\n', "",
        (f"{BOUND}::test_numbers_that_a_kernel_takes[9]",),
    ),
    (
        "fits: numbers that change", "ops/checks.py",
        "len(bound.numbers) + len(bound.items), MAX", "len(bound.numbers), MAX",
        (f"{BOUND}::test_a_number_that_changes_takes_a_place",),
    ),
    (
        "fits: operations", "ops/checks.py",
        '        ("operations", len(bound.epilogue.steps), MAX_STEPS),\n', "",
        (f"{BOUND}::test_operations_that_a_kernel_takes[2]",),
    ),
    (
        "fits: exactly the limit", "ops/checks.py",
        "        if count > limit:", "        if count >= limit:",
        (f"{BOUND}::test_tensors_that_a_kernel_takes[15-bare]",
         f"{BOUND}::test_numbers_that_a_kernel_takes[8]",
         f"{BOUND}::test_operations_that_a_kernel_takes[1]"),
    ),
    (
        "work: its bound", "graph/match/match.py", "        if self.left < 0:", "        if False:",
        (f"{BOUND}::test_a_graph_that_compares_in_many_ways_is_refused_soon",),
    ),
    (
        "opened: integers", "graph/match/match.py",
        "return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())",
        "return tensor is not None",
        (f"{APART}[integers that wrap around]",),
    ),
    (
        "opened: all others", "graph/match/match.py",
        "return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())",
        "return False",
        (f"{BOUND}::test_other_products_are_opened",),
    ),
    (
        "numbers: integers that are no floats", "graph/read/expr.py",
        "(isinstance(value, int) and abs(value) <= 2**53)", "isinstance(value, int)",
        (f"{BOUND}::test_an_integer_that_is_no_float_is_refused",),
    ),
    (
        "bind: a difference is not turned", "graph/match/bind.py",
        "if op.total is not None and len(made) == 2:",
        'if expr.op in ("add", "mul", "sub") and len(made) == 2:',
        (f"{TEXT}::test_only_sums_and_products_are_turned[sub]",
         f"{TEXT}::test_the_text_is_what_is_written[a difference]"),
    ),
    (
        "bind: a quotient is not turned", "graph/match/bind.py",
        "if op.total is not None and len(made) == 2:",
        'if expr.op in ("add", "mul", "div") and len(made) == 2:',
        (f"{TEXT}::test_only_sums_and_products_are_turned[truediv]",),
    ),
    (
        "bind: a product is turned", "graph/match/bind.py",
        "if op.total is not None and len(made) == 2:", 'if expr.op == "add" and len(made) == 2:',
        (f"{TEXT}::test_the_text_is_what_is_written[turned]",
         f"{TEXT}::test_the_text_is_what_is_written[renamed]"),
    ),
    (
        "bind: a scaled sum is not turned", "graph/match/bind.py",
        "if op.total is not None and len(made) == 2:", "if op.total is not None:",
        (f"{TEXT}::test_a_sum_with_a_factor_is_not_turned",),
    ),
    (
        "bind: as written, not as it means", "graph/match/bind.py",
        "        written = view.written(node)\n", "        written = view.canonical(node)\n",
        (f"{TEXT}::test_the_text_is_what_is_written[product]",
         f"{TEXT}::test_the_text_is_what_is_written[a quotient]",
         f"{BOUND}::test_what_is_finite_stays_so[lowest-torch.float32-cpu_ops]"),
    ),
    (
        "dtypes: a number made in float64", "ops/checks.py",
        "and _is_wider_number(tensor, match):", "and False:",
        ("tests/graph/test_bound.py::test_a_number_in_float64_is_made_in_float64",),
    ),
    (
        "writes: names between underscores", "graph/read/nodes.py",
        'if name.startswith("__i") and name.endswith("__"):', "if False:",
        (f"{EFFECTS}::test_a_write_that_no_name_tells[by_a_dunder_method]",
         f"{EFFECTS}::test_a_write_that_no_name_tells[by_an_unbound_method]"),
    ),
    (
        "writes: an embedding that scales its weight", "graph/read/nodes.py",
        "target in (F.embedding, F.embedding_bag) and _renormalises(node)", "False",
        (f"{EFFECTS}::test_a_write_that_no_name_tells[by_an_embedding]",
         f"{EFFECTS}::test_a_write_that_no_name_tells[by_an_embedding_bag]"),
    ),
    (
        "writes: invert is none", "graph/read/nodes.py",
        '(hasattr(operator, n[1:]) or hasattr(operator, f"{n[1:]}_"))',
        'hasattr(operator, f"__{n}__")',
        (f"{EFFECTS}::test_an_inverted_mask_is_another_mask[eval]",
         f"{EFFECTS}::test_an_inverted_mask_is_another_mask[train]"),
    ),
    (
        "spell: attributes are floats", "graph/read/functions.py",
        "tuple((name, float(value)) for name", "tuple((name, value) for name",
        (f"{TEXT}::test_an_integer_attribute_is_a_float[power]",
         f"{TEXT}::test_an_integer_attribute_is_a_float[square]",
         f"{TEXT}::test_an_integer_attribute_is_a_float[softplus]"),
    ),
    (
        "match: a divisor that is a number", "graph/match/match.py",
        "self._open(target, pattern.op == \"div\")", "self._open(target)",
        (f"{BOUND}::test_a_divisor_is_a_number_or_a_tensor[2-cpu_ops]",
         f"{BOUND}::test_a_quotient_in_the_epilogue_is_one"),
    ),
    (
        "text: values that no step before has made", "graph/epilogue.py",
        "int(value[1] or -1) >= i", "False",
        (f"{TEXT}::test_what_is_no_epilogue_is_an_error[v0 = tanh(v0)]",
         f"{TEXT}::test_what_is_no_epilogue_is_an_error[v0 = mul(z, v1); v1 = tanh(z)]"),
    ),
    (
        "text: a step's arguments", "graph/epilogue.py",
        "        _check_arity(steps[-1])\n", "",
        (f"{TEXT}::test_the_arguments_of_a_step_are_those_of_its_op"
         "[v0 = mul(z)-mul takes 2 values, but 'mul(z)' gives it 1]",),
    ),
    (
        "names: a write is seen under another", "graph/read/view.py",
        "if expr is None or expr.op not in OPS or not OPS[expr.op].returns_input:", "if True:",
        (f"{OPS_TEST}::test_a_write_under_another_name_is_seen[float]",
         f"{OPS_TEST}::test_a_write_under_another_name_is_seen[dropout]"),
    ),
    (
        "names: dropout in eval mode returns its input", "graph/read/nodes.py",
        "for node in _with_undropped(nodes):", "for node in nodes:",
        (f"{OPS_TEST}::test_dropout_in_eval_mode_is_in_its_inputs_memory",),
    ),
    (
        "names: one given after a write", "graph/read/view.py",
        "            written[node] = writes.get(first, 0)\n", "            written[node] = 0\n",
        (f"{OPS_TEST}::test_a_name_given_after_a_write_is_of_what_was_written",),
    ),
    (
        "spell: dropout in training is random", "graph/read/functions.py",
        "if training is not False and not (is_number(p) and p == 0):", "if False:",
        (f"{OPS_TEST}::test_dropout_in_training_is_left",
         f"{OPS_TEST}::test_what_only_may_be_an_op_is_none[dropout]"),
    ),
    (
        "bind: a weight of lerp without dimensions", "graph/match/bind.py",
        "if _has_no_dimensions(expr.args[place]):", "if False:",
        (f"{OPS_TEST}::test_a_weight_of_lerp_without_dimensions_is_refused",),
    ),
    (
        "einsum: a size of one is spread", "graph/read/canonical.py",
        "if not statically_known_true(left.shape[i] == right.shape[j]):", "if False:",
        ("tests/graph/test_einsum.py::test_an_einsum_that_spreads_a_size_of_one_is_none",),
    ),
    (
        "derivative: a product reads its other factor", "graph/read/operations.py",
        "reads=_others", "reads=_none",
        (f"{TEXT}::test_gradients_need_no_more_than_is_said_of_an_op[mul]",
         f"{TEXT}::test_no_more_is_kept_than_is_needed_of_z[v0 = mul(z, t0)]"),
    ),
    (
        "derivative: a sum reads nothing", "graph/read/operations.py",
        '"add", _add, takes=(2, 3), reads=_factor_of(1)', '"add", _add, takes=(2, 3)',
        (f"{TEXT}::test_no_more_is_kept_than_is_needed_of_z[v0 = add(z, t0)]",
         f"{KEPT}::test_what_is_kept[z + r]", f"{KEPT}::test_what_is_not_kept_may_be_written_to"),
    ),
    (
        "derivative: a scaled sum reads the factor", "graph/read/operations.py",
        "(2,) if place == scaled and count == 3 else ()", "()",
        (f"{TEXT}::test_no_more_is_kept_than_is_needed_of_z[v0 = add(t0, z, s0)]",),
    ),
    (
        "derivative: of a value read on the way", "graph/epilogue.py",
        "yield step.op, value, made_of[value]",
        "yield step.op, value, frozenset({value} & epilogue.leaves)",
        (f"{TEXT}::test_no_more_is_kept_than_is_needed_of_z[v0 = sigmoid(t0); v1 = mul(v0, z)]",),
    ),
    (
        "derivative: what autograd saves itself", "graph/epilogue.py",
        "if not OPS[op].saves_arguments or value not in epilogue.leaves", "",
        ("tests/ops/test_saved_operands.py::test_what_eager_mode_saves_too_may_be_written",),
    ),
    (
        "derivative: c is saved if it is read", "ops/library.py",
        'return wanted and "z" in self.reads(needs, needs_t)', "return wanted",
        (f"{KEPT}::test_what_is_kept[z + r]", f"{KEPT}::test_what_is_kept[z * 2]"),
    ),
    (
        "derivative: dz where z is read twice", "graph/epilogue.py",
        "if any(a in chain or a == epilogue.start for a in step.args if a != holding):",
        "if False:",
        (f"{TEXT}::test_dz_of_no_chain_is_not_told[twice-1]",),
    ),
    (
        "derivative: dz below a fraction", "graph/read/operations.py",
        'None if place else emit("div", dy, args[1])', 'emit("div", dy, args[1])',
        (f"{TEXT}::test_dz_of_no_chain_is_not_told[below a fraction-1]",),
    ),
    (
        "derivative: dz of a subtrahend", "graph/read/operations.py",
        'return emit("neg", dy) if is_negative else dy', "return dy",
        (f"{TEXT}::test_dz_of_a_chain_is_autograds_bit_for_bit[5]",
         f"{TEXT}::test_dz_of_a_chain_is_autograds_bit_for_bit[16]"),
    ),
    (
        "faults: matching fails at one site", "reading.py",
        "    except Exception as error:\n            if options.strict:\n",
        "    except ZeroDivisionError as error:\n            if options.strict:\n",
        (f"{FAULTS}::test_the_other_site_fuses[matching-named-eval]",
         f"{FAULTS}::test_the_other_site_fuses[a check-named-train]"),
    ),
    (
        "faults: strict raises where matching fails", "reading.py",
        "            if options.strict:\n                raise\n            found = ",
        "            found = ",
        (f"{FAULTS}::test_strict_raises[matching-named]",),
    ),
    (
        "faults: planning fails at one site", "planning/plan.py",
        "        if options.strict or isinstance(error, OptionError):\n            raise\n",
        "        raise\n",
        (f"{FAULTS}::test_the_other_site_fuses[the candidates-named-eval]",
         f"{FAULTS}::test_the_other_site_fuses[the call-named-eval]"),
    ),
    (
        "faults: strict raises where planning fails", "planning/plan.py",
        "if options.strict or isinstance(error, OptionError):",
        "if isinstance(error, OptionError):",
        (f"{FAULTS}::test_strict_raises[the candidates-named]",
         f"{FAULTS}::test_strict_raises[the call-named]"),
    ),
    (
        "faults: a bad option is the user's", "planning/plan.py",
        "if options.strict or isinstance(error, OptionError):", "if options.strict:",
        (f"{FAULTS}::test_a_bad_option_is_no_fault_of_a_site",),
    ),
    (
        "faults: an anchor without a pattern", "reading.py",
        "if site is None or pattern is None:", "if site is None:",
        (f"{FAULTS}::test_a_node_that_no_pattern_is_for_costs_nothing",),
    ),
    (
        "anchors: the outer comes first", "reading.py",
        "for node in sorted(view.nodes, key=inner.__contains__):", "for node in view.nodes:",
        (f"{MATMUL}::test_the_outer_anchor_comes_first[x @ w + b]",
         f"{MATMUL}::test_the_outer_anchor_comes_first[batch_norm]"),
    ),
    (
        "matmul: the weight's gradient has its layout", "anchors/matmul.py",
        "return multiply(matrix(x).t(), matrix(dz).t())",
        "return multiply(matrix(dz).t(), matrix(x).t()).t()",
        (f"{MATMUL}::test_gradients_have_the_layout_of_their_tensors",),
    ),
    (
        "matmul: a weight of two dimensions", "graph/read/sites.py",
        "if tensor is not None and tensor.ndim != 2:", "if False:",
        (f"{MATMUL}::test_other_products_are_none[a vector]",),
    ),
    (
        "growth: the largest region first", "graph/match/grow.py",
        "for root, nodes in reversed(closed):", "for root, nodes in closed:",
        (f"{GROW}::test_tails[many-eval]", f"{GROW}::test_tails[two diamonds-eval]"),
    ),
    (
        "growth: a site that failed is left alone", "reading.py",
        "if site.node in taken or not failed.isdisjoint(site.nodes):", "if site.node in taken:",
        (f"{FAULTS}::test_the_other_site_fuses[matching-grown-eval]",),
    ),
    (
        "growth: an anchor that cannot be read", "reading.py",
        "with suppress(Exception):  # it raises", "with suppress():  # it raises",
        (f"{GROW_FAULTS}::test_an_anchor_that_cannot_be_read_costs_itself[False]",),
    ),
    (
        "growth: a bad option", "reading.py",
        "if options.strict or isinstance(error, OptionError):", "if options.strict:",
        (f"{GROW_FAULTS}::test_a_bad_option_is_no_fault_of_a_site",),
    ),
    (
        "growth: where a user may differentiate twice", "options.py",
        'return bool(all_patterns) and self.inner != "eager"', "return bool(all_patterns)",
        ("tests/package/test_options.py::test_grows[where it may be differentiated twice]",
         "tests/graph/test_grow_told.py::test_nothing_grows[inner eager]"),
    ),
    (
        "gate: a fault costs its site", "planning/gate.py",
        "plan.guarded(m, options, measure, i, failed)", "measure(i, m)",
        (f"{GROW_FAULTS}::test_the_other_site_is_grown[the measurement-eval]",),
    ),
    (
        "gate: a structure that is compiled is compiled", "planning/gate.py",
        "if structure not in _structures and len(", "if len(",
        (f"{GROW_FAULTS}::test_a_structure_that_is_compiled_costs_no_other",),
    ),
    (
        "near: one operation off goes before a beginning", "graph/match/near_misses.py",
        "min((*off, *begun),", "min((*begun, *off),",
        ("tests/graph/test_near.py::test_one_operation_off[division]",),
    ),
)  # fmt: skip
