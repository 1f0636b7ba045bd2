"""install(): `torch.compile(model)` fuses, with no backend named.

`install` wraps Inductor's entry, `compile_fx`. For each graph the wrapper adds settings to those
that Inductor is called with, as the backend does. Inductor binds these to the graph and to its
backward, which it compiles later and often in another thread. It does not bind its global settings
to either: since torch 2.13 each thread has its own.

From torch 2.13 on the rewriting itself is one of these settings, Inductor's pass over the graph
before autograd (`Fusion`). It has a `uuid`, so Inductor looks into its caches first, and on a hit
the pass does not run. Inductor passes it only a graph, of the module or of a region in it; this
module gives it everything else that it needs.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import codecache, compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule

from fx_fuser import backend, fallback
from fx_fuser.arguments import refuses_unfit_calls
from fx_fuser.errors import OptionError
from fx_fuser.graph.match.pattern import Pattern
from fx_fuser.graph.prepare.bodies import twin
from fx_fuser.graph.read.heads import has_losses
from fx_fuser.graph.read.subclasses import is_user_class
from fx_fuser.kernels.precision import conv_tf32_allowed, matmul_tf32_requested
from fx_fuser.kernels.split import LINEAR_SPLIT
from fx_fuser.native import binaries
from fx_fuser.options import FIRST_PASS, Options, is_off
from fx_fuser.outcome import Outcome
from fx_fuser.passes import folding, padding, provenance
from fx_fuser.passes.convolution import every
from fx_fuser.planning import plan
from fx_fuser.registry import registered_patterns

_HAS_LATE_PASSES = hasattr(codecache, "resolve_pre_grad_pass_timing")  # torch 2.13

log = logging.getLogger("fx_fuser.installation")

_ONE_DICT = "the options go into one dict: install({'fp32': 'ieee'})"

_lock = threading.Lock()
_everywhere: list[Options] = []  # of `install`: none, or one
_blocks: list[_Block] = []  # of `installed`, the innermost last


class _Block:
    def __init__(self, options: Options) -> None:
        self.options = options


@refuses_unfit_calls(OptionError, _ONE_DICT)
def install(options: Mapping[str, Any] | None = None) -> None:
    """Make `torch.compile(model)` and `backend="inductor"` use fx_fuser from now on, in every
    thread.

    options: as for the backend, except `inner`, `mode` and Inductor's own, which you pass to
    `torch.compile`. A second call replaces the options of the first.

    Models that are already compiled stay as they are; `torch._dynamo.reset()` drops them. Raises
    OptionError for a bad option.
    """
    chosen = _parsed(options)
    if is_off("install() does nothing"):
        return
    with _lock:
        _everywhere[:] = [chosen]
        _stand_in()


@refuses_unfit_calls(OptionError, "it takes no arguments")
def uninstall() -> None:
    """Undo `install`. Models that are already compiled stay as they are."""
    with _lock:
        _everywhere.clear()
        _step_aside()


@refuses_unfit_calls(OptionError, _ONE_DICT)
def installed(options: Mapping[str, Any] | None = None) -> AbstractContextManager[None]:
    """Do what `install` does while the block runs; in nested blocks, the innermost applies.

    A model is compiled at its first call, so call it in the block.
    """
    return _installed(_parsed(options))


@contextmanager
def _installed(options: Options) -> Iterator[None]:
    if is_off("installed() does nothing"):
        yield
        return
    block = _Block(options)
    with _lock:
        _blocks.append(block)
        _stand_in()
    try:
        yield
    finally:
        with _lock:
            _blocks.remove(block)
            _step_aside()


@contextmanager
def suspended() -> Iterator[None]:
    """Inductor alone compiles while the block runs, in every thread, whatever is installed."""
    with _lock:
        before = [*_everywhere], [*_blocks]
        _everywhere.clear()
        _blocks.clear()
        _step_aside()
    try:
        yield
    finally:
        with _lock:
            _everywhere[:], _blocks[:] = before
            if _everywhere or _blocks:
                _stand_in()


def _parsed(options: Mapping[str, Any] | None) -> Options:
    chosen = Options.parse(None, options, [p.name for p in registered_patterns()])
    if chosen.inner != "inductor":
        raise OptionError(
            f"option 'inner' is {chosen.inner!r}, but install() works on Inductor; name the "
            'backend instead: torch.compile(model, backend="fx_fuser")'
        )
    inductors = [*chosen.inductor] if chosen.mode is None else ["mode"]
    if inductors:
        raise OptionError(f"option {inductors[0]!r} is Inductor's; give it to torch.compile")
    return chosen


def _current() -> Options | None:
    with _lock:
        return _blocks[-1].options if _blocks else next(iter(_everywhere), None)


# ---- Inductor's entry --------------------------------------------------------------------------


def _stand_in() -> None:
    if not getattr(compile_fx.compile_fx, "is_fx_fusers", False):
        compile_fx.compile_fx = _around(compile_fx.compile_fx)


def _step_aside() -> None:
    """If another library has wrapped ours, ours stays and passes everything on."""
    if _blocks or _everywhere or not getattr(compile_fx.compile_fx, "is_fx_fusers", False):
        return
    compile_fx.compile_fx = compile_fx.compile_fx.__wrapped__  # type: ignore[attr-defined]


def _around(inductor: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(inductor)

    @functools.wraps(inductor)
    def fused(*args: Any, **kwargs: Any) -> Any:
        options = _current()
        given = signature.bind(*args, **kwargs).arguments
        gm, inputs = given["model_"], given["example_inputs_"]
        # Inductor calls itself, and the backend calls it. An exported program has to run in C++.
        if options is None or fallback.is_compiling() or V.aot_compilation:
            return inductor(*args, **kwargs)
        if not isinstance(gm, GraphModule) or not _has_anchors(gm):
            return inductor(*args, **kwargs)

        def compile_inner(options: Options) -> backend.Compiled:
            made: backend.Compiled = inductor(**{**given, "config_patches": dict(options.inductor)})
            return made

        options = replace(options, inductor=given.get("config_patches") or {})
        attempt = _compile_then_fuse if _can_be_late(gm, options) else backend.fuse_and_compile
        return backend.compile_graph(gm, inputs, options, compile_inner, attempt)

    fused.is_fx_fusers = True  # type: ignore[attr-defined]
    return fused


def _has_anchors(gm: GraphModule) -> bool:
    return provenance.has_gemms(gm) or provenance.has_convolutions(gm)


# ---- the pass ----------------------------------------------------------------------------------


def _can_be_late(gm: GraphModule, options: Options) -> bool:
    """May Inductor run the pass itself, and skip it on a cache hit?

    Not if sites are verified on each start, or if a pattern's check is in no file, which would
    tell its version. And not together with a pass of the user's own: that may edit the graph in
    place, and then the graph could not be restored.
    """

    def setting(name: str) -> Any:
        return options.users_pass(name)

    return (
        _HAS_LATE_PASSES
        and options.verify == "never"
        and not (options.takes_heads and has_losses(gm.graph))
        and not setting(FIRST_PASS)
        and setting("use_pre_grad_passes")
        and setting("pre_grad_pass_timing") != "early"
        # These work on modules other than the one they are given.
        and not (setting("freezing") or setting("cpp_wrapper") or setting("fx_wrapper"))
        and all(_version_of(p) is not None for p in registered_patterns())
    )


def _compile_then_fuse(
    gm: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    compile_inner: backend.CompileInner,
) -> tuple[backend.Compiled | None, Outcome]:
    """Inductor looks into its caches first. On a hit no outcome is known."""
    passes = provenance.Passes.over(gm, options, inputs).load()
    found = every.foreseen(gm, options, inputs)
    passes = every.behind({**passes, **padding.settings(gm, options)}, found, options)
    fusion = Fusion(gm, inputs, options)
    if provenance.has_convolutions(gm):  # which may be folded
        passes = folding.settings(passes, options, fusion.is_converted)
    try:
        settings = options.with_passes({**passes, FIRST_PASS: [fusion]})
        compiled = backend.compile_tagged(compile_inner, settings)
    except _NotForCaches:
        compiled = backend.compile_tagged(compile_inner, options.with_passes(passes))
    finally:
        fusion.gm, fusion.inputs = None, ()  # the pass lives as long as Inductor's settings
    if fusion.outcome is None and any(_is_on_cuda(value) for value in inputs):
        _load_kernels(gm, inputs, options)
    return compiled, fusion.outcome or Outcome(is_known=False)


def _load_kernels(gm: GraphModule, inputs: Sequence[Any], options: Options) -> None:
    """After a hit: load the kernels that the graph names, which the process that fused it had."""
    try:
        backend.fuse(twin(gm), options, inputs=inputs)
    except Exception:
        if options.strict:
            raise
        log.info("some kernels of a graph from Inductor's cache were not found", exc_info=True)


def _is_on_cuda(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


class _NotForCaches(Exception):
    """fx_fuser failed at a site. The rewritten graph is right, but the next start may do better,
    so it must not be kept under the key of the graph as the user wrote it."""


class Fusion(CustomGraphPass):
    """Inductor's pass over one Dynamo graph before autograd, with the regions in it.

    outcome: what was fused; None if it did not run.
    """

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], options: Options) -> None:
        self.gm: GraphModule | None = gm
        self.inputs = inputs
        self.options = options
        self.outcome: Outcome | None = None
        self._uuid = _uuid_of(inputs, options)  # Inductor asks for it later, too

    def __call__(self, graph: Graph) -> None:
        if self.gm is None or graph is not self.gm.graph:
            return  # of a region, which `fuse` finds itself
        # As when Dynamo calls a backend.
        with torch._C._DisablePythonDispatcher():
            outcome = backend.fuse(self.gm, self.options, inputs=self.inputs)
            outcome.tell(self.options.strict)
        self.outcome = outcome
        if outcome.failed:
            raise _NotForCaches

    def uuid(self) -> str:
        return self._uuid

    def is_converted(self) -> bool:
        return self.outcome is not None and self.outcome.is_converted


def _uuid_of(inputs: Sequence[Any], options: Options) -> str:
    """Everything that decides what is fused, except what Inductor's cache keys have: the graph,
    its inputs, and the settings of Inductor and of autocast."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    decides = (
        binaries.fingerprint(),
        replace(options, inductor={}),
        [_version_of(pattern) for pattern in registered_patterns()],
        (matmul_tf32_requested(), conv_tf32_allowed()),
        LINEAR_SPLIT.macro,  # set by the environment
        sorted((str(device), plan.unavailable(device)) for device in devices),
        [type(tensor).__qualname__ for tensor in tensors if is_user_class(tensor)],
        _shared_memory(tensors),
    )
    return hashlib.sha256(repr(decides).encode()).hexdigest()


def _version_of(pattern: Pattern) -> tuple[str, ...] | None:
    """What it searches for, and the text of the file its check is in; None if there is no file."""
    check = ""
    if pattern.check is not None:
        try:
            file = Path(inspect.getfile(pattern.check))
            check = hashlib.sha256(file.read_bytes()).hexdigest()
        except (OSError, TypeError):
            return None
    return pattern.name, pattern.kind, str(pattern.epilogue), str(pattern.wildcards), check


def _shared_memory(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor, the index of the first one in the same memory."""
    places: dict[Any, int] = {}
    return [places.setdefault(_memory_of(t), i) for i, t in enumerate(tensors)]


def _memory_of(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # raised by a subclass that wraps other tensors
        return id(tensor)
