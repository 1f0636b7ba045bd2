"""Mutants of how masks of attention are looked at, for tests/mutants/mutate.py."""

from __future__ import annotations

CHOICES = "tests/passes/test_attention_choices.py::test_a_mask_of_one_choice"
WRITTEN = f"{CHOICES.split('::')[0]}::test_a_result_that_is_written_to_keeps_its_attention"
FILE = "tests/passes/test_masks.py"
STAYS = f"{FILE}::test_a_mask_that_is_not_surely_so_stays"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "masks: a result that is written to keeps its attention",
        "passes/masks.py",
        "if _needs_formula(node, scope):",
        "if False:",
        (f"{WRITTEN}[removed-aot_eager]", f"{WRITTEN}[formed-aot_eager]"),
    ),
    (
        "masks: what is taken has no more gradient than the choice",
        "passes/attention.py",
        "mask=spread if fakes.mask.requires_grad else spread.detach()",
        "mask=spread",
        (f"{CHOICES}[without_gradients-None-True]",),
    ),
    (
        "masks: a choice is the same everywhere",
        "passes/bounds.py",
        "if bool(made.all()):",
        "if bool(made.any()):",
        (f"{CHOICES}[one_key_is_hidden-2-True]", f"{CHOICES}[one_key_is_hidden-2-False]"),
    ),
    (
        "masks: what is taken is not written to",
        "passes/bounds.py",
        "if not storages([value, taken, choice]).isdisjoint({None, *known.written}):",
        "if False:",
        (f"{CHOICES}[written_afterwards-2-True]", f"{CHOICES}[chosen_anew-2-True]"),
    ),
    (
        "masks: what depends on the model is not run",
        "passes/masks.py",
        'if node.op in ("placeholder", "get_attr"):',
        "if False:",
        (f"{STAYS}[given]", f"{STAYS}[of what is given]"),
    ),
    (
        "masks: nothing random",
        "passes/masks.py",
        "arange ones zeros full tensor",
        "rand arange ones zeros full tensor",
        (f"{STAYS}[random]",),
    ),
    (
        "masks: all of it is causal",
        "passes/masks.py",
        "not bool((seen == causal).all())",
        "not bool((seen | ~causal).all())",
        (f"{STAYS}[one more]",),
    ),
    (
        "masks: only what hides altogether",
        "passes/masks.py",
        "if not bool((seen | hidden).all()):",
        "if False:",
        (f"{STAYS}[small]", f"{STAYS}[sloped]"),
    ),
    (
        "masks: of all samples and heads",
        "passes/masks.py",
        "while mask.dim() > 2 and mask.stride(0) == 0 and mask.shape[0] > 0:",
        "while mask.dim() > 2 and mask.shape[0] > 0:",
        tuple(
            f"{STAYS}[{what}]"
            for what in ("causal for the first", "open for the first", "causal for the first head")
        ),
    ),
    (
        "masks: as many queries as keys",
        "passes/masks.py",
        "if length[0] != length[1]:",
        "if False:",
        (f"{FILE}::test_lengths_that_differ",),
    ),
    (
        "masks: what writes to it is run too",
        "passes/masks.py",
        "todo.append(node)",
        "pass",
        (
            f"{FILE}::test_a_mask_that_is_changed_between_two_attentions",
            f"{FILE}::test_a_mask_that_is_changed_by_what_is_given",
        ),
    ),
    (
        "masks: writes through views",
        "passes/masks.py",
        "or not memory.isdisjoint(storages(written))",
        "",
        (f"{FILE}::test_a_mask_that_is_changed_by_what_is_given",),
    ),
    (
        "masks: functions of torch's alone",
        "passes/masks.py",
        "is_call = module in _MODULES",
        "is_call = True",
        (f"{FILE}::test_a_function_of_the_users_by_a_known_name_is_not_run",),
    ),
    (
        "masks: laid out as it was traced",
        "passes/masks.py",
        "                if depth == 0:",
        "                if False:",
        (f"{FILE}::test_a_mask_that_something_writes_to_unseen[written_in_other_strides]",),
    ),
    (
        "masks: what numpy writes to",
        "graph/read/nodes.py",
        "if is_numpy or not",
        "if not",
        (
            f"{FILE}::test_a_mask_that_something_writes_to_unseen[written_by_numpy]",
            f"{FILE}::test_a_mask_that_something_writes_to_unseen[added_by_numpy]",
        ),
    ),
    (
        "masks: nothing random is left out",
        "passes/masks.py",
        "if makers.issuperset(like.users):",
        "if False:",
        (f"{FILE}::test_what_is_random_is_still_drawn",),
    ),
    (
        "masks: no fault of the user's program costs the graph",
        "passes/masks.py",
        "    except Exception as error:  # the user's",
        "    except ValueError as error:  # the user's",
        (f"{FILE}::test_a_mask_for_a_device_that_is_not_here",),
    ),
    (
        "masks: no vmap stays open",
        "passes/masks.py",
        "for _ in range(depth):",
        "for _ in range(0):",
        (f"{FILE}::test_what_fails_within_a_vmap_leaves_none_open",),
    ),
)
