"""Facts → findings: what is well, what is not, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fx_fuser import versions
from fx_fuser.doctor.facts import Facts, Gpu
from fx_fuser.native import binaries

OK, NOTE, WARN, FAIL = "ok", "note", "warn", "FAIL"
_CAPABILITY = ".".join(map(str, binaries.LOWEST_CAPABILITY))
_NEED_A_GPU = (
    "none of fx_fuser's kernels run; they need an NVIDIA GPU of compute capability "
    f"{_CAPABILITY} or above and its driver"
)


@dataclass(frozen=True)
class Finding:
    """level: OK, NOTE (good to know), WARN (works, but not as it might) or FAIL."""

    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:5} {self.text}"


def judged(facts: Facts) -> list[Finding]:
    steps: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
        _system, _torch, _switch, _gpus, _compilers, _split_loop, _cache, _precision,
    )  # fmt: skip
    return [finding for step in steps for finding in step(facts)]


def _needed(facts: Facts) -> str:
    """The level if something that kernels need is missing: without a GPU it does not matter."""
    return FAIL if facts.gpus else NOTE


def _system(facts: Facts) -> Iterator[Finding]:
    where = "a checkout" if facts.is_checkout else "installed"
    yield Finding(OK, f"fx_fuser {facts.fx_fuser}, {where} in {facts.folder}")
    text = f"{facts.system}, Python {facts.python}"
    if facts.system.startswith("Linux"):
        yield Finding(OK, text)
    else:
        yield Finding(WARN, f"{text}: kernels need Linux; elsewhere nothing is fused")


def _torch(facts: Facts) -> Iterator[Finding]:
    oldest, newest = versions.OLDEST_TORCH, versions.NEWEST_TESTED_TORCH
    tested = " to ".join(".".join(map(str, release)) for release in (oldest, newest))
    found = versions.release_of(facts.torch)
    if found is None:
        yield Finding(WARN, f"torch {facts.torch}: not understood as a version; tested: {tested}")
    elif found < oldest:
        pin = ".".join(map(str, oldest))
        yield Finding(FAIL, f"torch {facts.torch} is too old: pip install 'torch>={pin}'")
    elif found > newest:
        pin = f"{newest[0]}.{newest[1] + 1}"
        text = f"torch {facts.torch} is untested (tested: {tested}): pin 'torch<{pin}' to be safe"
        yield Finding(WARN, text)
    else:
        yield Finding(OK, f"torch {facts.torch} (tested: {tested})")
    if not facts.is_registered:
        text = 'backend "fx_fuser" is not registered with torch: import fx_fuser, or reinstall it'
        yield Finding(FAIL, text)


def _switch(facts: Facts) -> Iterator[Finding]:
    if facts.switch_fault:
        yield Finding(FAIL, facts.switch_fault)
    elif facts.switch == "off":
        yield Finding(WARN, "FX_FUSER is 'off': nothing is fused until it is unset")
    elif facts.is_installed:
        yield Finding(NOTE, "FX_FUSER is 'install': torch.compile(model) fuses, too")


# ---- GPUs ----------------------------------------------------------------------------------------


def _gpus(facts: Facts) -> Iterator[Finding]:
    if facts.hip:
        text = f"torch {facts.torch} is for ROCm {facts.hip}, and kernels are for CUDA"
        yield Finding(FAIL, f"{text}: everything is left to Inductor; install a torch for CUDA")
        return
    cuda_of_driver = f", for CUDA up to {facts.cuda_of_driver}" if facts.cuda_of_driver else ""
    driver = f"NVIDIA driver {facts.driver}{cuda_of_driver}"
    if facts.cuda is None:
        if facts.driver:
            text = f"torch {facts.torch} has no CUDA, though there is an {driver}"
            yield Finding(FAIL, f"{text}: install a torch for CUDA (https://pytorch.org)")
        else:
            text = f"torch {facts.torch} has no CUDA, and there is no NVIDIA driver"
            yield Finding(NOTE, f"{text}: {_NEED_A_GPU}, and a torch for CUDA")
        return
    if not facts.gpus:
        if facts.driver:
            text = f"torch for CUDA {facts.cuda} sees no GPU, though there is an {driver}"
            remedy = "check CUDA_VISIBLE_DEVICES, and that the driver is new enough for that CUDA"
            yield Finding(FAIL, f"{text}: {remedy}")
        else:
            text = f"torch for CUDA {facts.cuda} sees no GPU, and there is no NVIDIA driver"
            yield Finding(NOTE, f"{text}: {_NEED_A_GPU}")
        return
    yield Finding(OK, f"CUDA of torch {facts.cuda}; {driver if facts.driver else 'driver unknown'}")
    told = (facts.compiler_fault, facts.launcher_fault, facts.split_loop_fault, "")
    fits = any(gpu.capability >= binaries.LOWEST_CAPABILITY for gpu in facts.gpus)
    for gpu in facts.gpus:
        yield _gpu(gpu, WARN if fits else FAIL)
        if gpu.capability >= binaries.LOWEST_CAPABILITY and gpu.unfit not in told:
            yield Finding(FAIL, f"GPU {gpu.index}: no kernel can be built: {gpu.unfit}")


def _gpu(gpu: Gpu, level: str) -> Finding:
    """level: of a GPU that has no kernels."""
    has = ".".join(map(str, gpu.capability))
    text = f"GPU {gpu.index}: {gpu.name}, capability {has}"
    if gpu.capability < binaries.LOWEST_CAPABILITY:
        return Finding(level, f"{text}; kernels need {_CAPABILITY}: everything is left to Inductor")
    size = f"{gpu.multiprocessors} multiprocessors, {gpu.memory_gib:g} GiB"
    return Finding(OK, f"{text} ({gpu.arch}), {size}")


# ---- what kernels need ---------------------------------------------------------------------------


def _compilers(facts: Facts) -> Iterator[Finding]:
    if facts.compiler_fault:
        yield Finding(_needed(facts), f"no kernel compiler: {facts.compiler_fault}")
    else:
        yield Finding(OK, f"kernel compiler: {facts.compiler}")
    if facts.brought:
        counts = ", ".join(f"{count} for {arch}" for arch, count in facts.brought.items())
        yield Finding(OK, f"kernels that came with the package: {counts}")
    elif not facts.is_checkout and facts.gpus:
        yield Finding(
            NOTE, "none of the package's kernels are used: a model's first call compiles all"
        )
    if facts.launcher_fault:
        text = f"the kernel launcher cannot be built: {facts.launcher_fault}"
        yield Finding(_needed(facts), f"{text}; or install the wheel, which has it")
    else:
        yield Finding(OK, f"kernel launcher: {facts.launcher}")


def _split_loop(facts: Facts) -> Iterator[Finding]:
    if facts.split_loop_fault:
        yield Finding(FAIL if facts.gpus else WARN, facts.split_loop_fault)
    elif facts.split_loop:
        text = f"FX_FUSER_SPLIT_LOOP is {facts.split_loop!r}: a switch for tests, slower on Hopper"
        yield Finding(WARN, f"{text}; unset it")


def _cache(facts: Facts) -> Iterator[Finding]:
    cache = facts.cache
    if cache.untrusted:
        remedy = "make sure that you own it and run chmod go-w on it, or set FX_FUSER_CACHE_DIR"
        text = f"cache {cache.folder} is not used, {cache.untrusted}"
        yield Finding(WARN, f"{text}: kernels are compiled again in each process; {remedy}")
    elif cache.unwritable:
        remedy = "set FX_FUSER_CACHE_DIR to a writable folder"
        text = f"cache {cache.folder} keeps nothing, {cache.unwritable}"
        yield Finding(WARN, f"{text}: kernels are compiled again in each process; {remedy}")
    else:
        held = f"{cache.kernels} compiled kernels, {cache.launchers} launcher libraries, "
        held += f"{cache.timings} timings"
        text = f"cache {cache.folder}: {held}, {cache.megabytes:g} of {cache.limit} MB"
        yield Finding(OK, f"{text}, writable by you alone")


def _precision(facts: Facts) -> Iterator[Finding]:
    yield Finding(NOTE, facts.precision)
