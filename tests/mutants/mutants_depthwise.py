"""Mutants of what puts depthwise convolutions into Inductor's graphs."""

from __future__ import annotations

SITE = "passes/depthwise/site.py"
SHARED = "passes/convolution/site.py"
OPS = "ops/depthwise/__init__.py"
TESTS = "tests/passes/test_depthwise_pass.py"
FORWARD, BACKWARD = f"{TESTS}::test_forward[dtype0-{{}}]", f"{TESTS}::test_backward[{{}}]"
REFUSALS, OTHERS = f"{TESTS}::test_refusals", f"{TESTS}::test_other_convolutions_are_left"
COPIED = f"{TESTS}::test_operands_in_other_layouts_are_copied"

# name, file of fx_fuser, old, new, tests: as in `mutate.Mutant`
MUTANTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "depthwise: the bias is added",
        SHARED,
        'if "bias" not in tensors:',
        "if True:",
        (FORWARD.format("7-3-1-True"),),
    ),
    (
        "depthwise: the gradient of x reads the window reversed",
        SITE,
        "weight, kernel, padding, 1, True)",
        "weight, kernel, padding, 1, False)",
        (BACKWARD.format("7-3-1-asked1"),),
    ),
    (
        "depthwise: the gradient of x has another padding",
        SITE,
        "padding = [k - 1 - p for k, p in zip(self.window, self.padding)]",
        "padding = self.padding",
        (BACKWARD.format("7-0-1-asked1"),),
    ),
    (
        "depthwise: a stride has another gradient",
        SITE,
        "        if self.stride == 1:\n            padding",
        "        if True:\n            padding",
        (BACKWARD.format("5-2-2-asked1"),),
    ),
    (
        "depthwise: images in other layouts are copied",
        SHARED,
        "    return emit(_aten.clone.default, value, memory_format=torch.channels_last)",
        "    return value",
        (f"{COPIED}[True]", f"{COPIED}[False]"),
    ),
    (
        "depthwise: an image that begins in the middle of a vector is copied",
        SHARED,
        " and fake.storage_offset() % _VECTOR == 0:",
        ":",
        (f"{COPIED}[False]",),
    ),
    (
        "depthwise: the weight's gradient has torch's strides",
        SITE,
        "if like.stride() == _contiguous(self):",
        "if True:",
        (BACKWARD.format("7-3-1-asked2"),),
    ),
    (
        "depthwise: no dilation",
        SITE,
        'if [*parts.numbers["dilation"]] != [1, 1]:',
        "if False:",
        (REFUSALS,),
    ),
    (
        "depthwise: strides of 1 and 2",
        SITE,
        "if stride[0] != stride[1] or stride[0] not in training.STRIDES:",
        "if False:",
        (REFUSALS,),
    ),
    (
        "depthwise: strides that are equal",
        SITE,
        "if stride[0] != stride[1] or stride[0]",
        "if stride[0]",
        (OTHERS,),
    ),
    (
        "depthwise: one output channel for each of x",
        SITE,
        "if tuple(weight.shape[:2]) != (channels, 1) or",
        "if",
        (REFUSALS,),
    ),
    (
        "depthwise: padding within the window",
        SITE,
        "if not all(0 <= p < k for",
        "if not all(True for",
        (REFUSALS,),
    ),
    (
        "depthwise: results in channels_last",
        SITE,
        "elif not is_last(value):",
        "elif False:",
        (REFUSALS,),
    ),
    (
        "depthwise: kernels for these windows",
        SITE,
        "if not training.takes(site.window, site.stride, channels, weight.dtype):",
        "if False:",
        (REFUSALS,),
    ),
    (
        "depthwise: results are in channels_last whatever the library has",
        OPS,
        "return last(image, image.shape).copy_(image)",
        "return image.contiguous()",
        (FORWARD.format("7-3-1-False"),),
    ),
)
