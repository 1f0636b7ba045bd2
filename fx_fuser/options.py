"""Every option of the backend: its name, type, default and error."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend

from fx_fuser.arguments import check_mapping
from fx_fuser.errors import OptionError

# Inductor's settings for fx_fuser's passes. The first runs on Dynamo's graph; two run on the joint
# graph of forward and backward, before and after Inductor's own passes and before partitioning; the
# last runs on each of the two parts.
FIRST_PASS = "pre_grad_custom_pass"
EARLY_PASS = "joint_custom_pre_pass"
JOINT_PASS = "joint_custom_post_pass"
LAST_PASS = "post_grad_custom_post_pass"
# Inductor may pad a tensor's strides for readers of its views, but not for a custom op that also
# reads it: the views then read other elements, and gradients are wrong (torch 2.11, CUDA).
_WITH_OWN_OPS = {"comprehensive_padding": False}
CHOICES = {
    "inner": ("inductor", "aot_eager", "eager"),
    "fp32": ("follow", "split", "ieee", "tf32"),
    "plan": ("measure", "always"),
    "save": ("auto", "speed", "memory"),
    "verify": ("never", "first_call", "always"),
}
SWITCH = "FX_FUSER"  # in the environment: "off" or "install"

log = logging.getLogger("fx_fuser")


@dataclass(frozen=True)
class Options:
    """`torch.compile(model, backend="fx_fuser", options={...})`.

    inner: compiler of the rewritten graph: "inductor", "aot_eager" or "eager".
    strict: raise where fx_fuser itself fails, instead of a warning and the user's own graph.
    mode: a mode of Inductor ("reduce-overhead", "max-autotune", …), as `torch.compile(mode=)`.
    patterns: names of the patterns to use, or with a leading "-" not to use; None: all; []: none.
    auto: at an anchor where no named pattern fits, fuse whatever pointwise tail follows, or the
        anchor alone, if that is faster; and turn a broadcast product that is summed into a gemm.
        None: yes, unless `patterns` says what to use, or "inner" is "eager", where a user may
        differentiate twice.
    masks: run attention without a mask that the graph itself makes and that is causal or all
        true; it is evaluated once. Not if "inner" is "eager".
    max_structures: how many different grown tails a process compiles kernels for, if it measures
        which are faster; after that a gemm is fused alone.
    cache_size: size of the folder of compiled kernels, in MB; the least recently used go first.
    fp32: how a Linear's fp32 gemm is computed on CUDA, and whether a convolution may use TF32.
        "follow": torch's settings ("split" at `highest`, its default); "split": three gemms of fp16
        halves, as exact as fp32; "ieee": the library's fp32; "tf32".
    plan: "measure" and leave to the inner compiler what is no faster, or "always" fuse.
    save: what a fused site keeps for its backward. "speed": what makes it fastest; "memory": not
        the anchor's output, which backward recomputes; "auto": as "speed", but if two candidates
        are within 2 % of each other, the one that keeps less.
    verify: compare each fused site with the user's own operations and with float64, on the inputs
        of the "first_call" of each compiled graph or of "always" every call; a site that is wrong
        goes back to the user's operations.
    cpu_ops: on CPU too, run kernel ops and their autograd rule (reference implementation).
    inductor: all other keys; they must be options of `torch._inductor.config`.
    exported: not for users; `fuse_exported` sets it.
    """

    inner: str = "inductor"
    strict: bool = False
    mode: str | None = None
    patterns: tuple[str, ...] | None = None
    auto: bool | None = None
    masks: bool = True
    max_structures: int = 64
    cache_size: int = 1024
    fp32: str = "follow"
    plan: str = "measure"
    save: str = "auto"
    verify: str = "never"
    cpu_ops: bool = False
    inductor: Mapping[str, Any] = field(default_factory=dict)
    exported: bool = False

    @classmethod
    def parse(
        cls, mode: str | None, options: Mapping[str, Any] | None, known: Sequence[str]
    ) -> Options:
        """Check what the user gave; `known` are the names of all patterns."""
        if options is not None:
            check_mapping("options", options, "give a dict, say {'fp32': 'ieee'}")
        given = dict(options or {})
        names = {f.name for f in dataclasses.fields(cls)} - {"inductor", "exported"}
        values = {key: given.pop(key) for key in list(given) if key in names}
        if mode is not None and values.setdefault("mode", mode) != mode:
            raise OptionError(
                f"mode is {mode!r}, and option 'mode' is {values['mode']!r}; leave one out"
            )
        if isinstance(values.get("patterns"), list):
            values["patterns"] = tuple(values["patterns"])
        made = cls(**values, inductor=given)
        made._check_types()
        made._check_inductor_keys(sorted(names))
        made._check_patterns(known)
        # Inductor takes both "-" and "_"; below, keys have "_".
        canonical = {name.replace("-", "_"): value for name, value in given.items()}
        if len(canonical) < len(given):
            twice = next(n for n in given if "-" in n and n.replace("-", "_") in given)
            raise OptionError(
                f"option {twice!r} is also given as {twice.replace('-', '_')!r}; leave one out"
            )
        return dataclasses.replace(made, inductor=canonical)

    def _check_types(self) -> None:
        expected: dict[str, tuple[Any, str]] = {
            **{name: (str, f"one of {', '.join(of)}") for name, of in CHOICES.items()},
            "strict": (bool, "True or False"),
            "mode": ((str, type(None)), "the name of an Inductor mode"),
            "patterns": ((tuple, type(None)), "a list of pattern names"),
            "auto": ((bool, type(None)), "True or False"),
            "masks": (bool, "True or False"),
            "max_structures": (int, "a number"),
            "cache_size": (int, "a number of megabytes"),
            "cpu_ops": (bool, "True or False"),
        }
        for name, (types, remedy) in expected.items():
            value = getattr(self, name)
            if not isinstance(value, types) or (types is int and isinstance(value, bool)):
                raise OptionError(f"option {name!r} is {value!r}; give {remedy}")
        for name in ("max_structures", "cache_size"):
            if getattr(self, name) < 0:
                raise OptionError(f"option {name!r} is {getattr(self, name)}; give 0 or more")
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise OptionError(f"option {name!r} is {value!r}; give one of {', '.join(allowed)}")
        if self.mode not in (None, "default"):
            if self.inner != "inductor":
                raise OptionError(
                    f"mode {self.mode!r} is Inductor's, but 'inner' is {self.inner!r}"
                )
            modes = torch._inductor.list_mode_options()
            if self.mode not in modes:
                raise OptionError(f"mode is {self.mode!r}; give one of {', '.join(modes)}")

    def _check_inductor_keys(self, names: Sequence[str]) -> None:
        if not self.inductor:
            return
        stock = torch._inductor.list_options()
        of_inner = stock if self.inner == "inductor" else []
        for key in self.inductor:
            name = key.replace("-", "_") if isinstance(key, str) else ""
            if name in of_inner:
                continue
            if name in stock:
                raise OptionError(
                    f"option {key!r} is Inductor's, but 'inner' is {self.inner!r}; leave one of "
                    "the two out"
                )
            # Inductor has hundreds of options: one is near to any word unless it must be very near.
            of_inner = difflib.get_close_matches(name, of_inner, cutoff=0.8)
            near = difflib.get_close_matches(name, [*names, *of_inner], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"fx_fuser's are {', '.join(names)}"
            raise OptionError(f"unknown option {key!r}; {hint}")

    def _check_patterns(self, known: Sequence[str]) -> None:
        for name in self.patterns or ():
            if not isinstance(name, str) or name.removeprefix("-") not in known:
                raise OptionError(f"option 'patterns' names {name!r}; there are {', '.join(known)}")

    def selects(self, pattern: str) -> bool:
        """Is the pattern to be used?  If only disabled names are given, all others are."""
        if not self.patterns:
            return self.patterns is None
        positive = [n for n in self.patterns if not n.startswith("-")]
        return f"-{pattern}" not in self.patterns and (not positive or pattern in positive)

    @property
    def grows(self) -> bool:
        """Are tails grown where no named pattern fits?"""
        if self.auto is not None:
            return self.auto
        names = self.patterns
        all_patterns = names is None or (names and all(n.startswith("-") for n in names))
        return bool(all_patterns) and self.inner != "eager"

    @property
    def contracts(self) -> bool:
        """Are sums of products rewritten as gemms?  An exported program has only core ATen's ops,
        and einsum is not one."""
        return self.grows and not self.exported

    @property
    def takes_heads(self) -> bool:
        """Is a Linear fused with the cross entropy of its rows?  An exported program has only core
        ATen's ops, and cross entropy is not one."""
        return self.grows and not self.exported

    @property
    def takes_masks(self) -> bool:
        """Not where a user may differentiate twice: fused attention cannot be."""
        return self.masks and self.inner != "eager"

    @property
    def replays_cuda_graphs(self) -> bool:
        """If so, the host's time to call an op does not matter."""
        by_default = torch._inductor.config.triton.cudagraphs
        by_mode = self.mode in ("reduce-overhead", "max-autotune")
        chosen = self.inductor.get("triton.cudagraphs", by_mode or by_default)
        return self.inner == "inductor" and bool(chosen)

    def inner_compiler(self) -> Callable[..., Any]:
        """(graph module, example inputs) → compiled function."""
        if self.inner == "inductor":
            return torch._TorchCompileInductorWrapper(self.mode, dict(self.inductor), None)
        return lookup_backend(self.inner)

    def with_passes(self, passes: Mapping[str, Any], fused: bool = True) -> Options:
        """These options for a graph. passes: Inductor's setting → pass. fused: has it any?"""
        own = _WITH_OWN_OPS if fused or passes.keys() - {EARLY_PASS} else {}
        return dataclasses.replace(self, inductor={**own, **self.inductor, **passes})

    def users_pass(self, setting: str) -> Any:
        """The user's own pass of this Inductor setting, or None."""
        return self.inductor.get(setting, getattr(torch._inductor.config, setting))


# ---- the switch in the environment ---------------------------------------------------------------


def is_off(consequence: str) -> bool:
    """Is fusing switched off?  Then log that, with the consequence here.

    Raises:
        OptionError: the variable has an invalid value.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "off", "install"):
        raise OptionError(f"{SWITCH} is {value!r}; set it to off or install, or leave it unset")
    if value == "off":
        log.info("%s is %r: %s", SWITCH, value, consequence)
    return value == "off"


def installs_at_import() -> bool:
    """A wrong value raises where fx_fuser is used: an import must not stop other programs."""
    return os.environ.get(SWITCH) == "install"
