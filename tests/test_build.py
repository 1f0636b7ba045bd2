"""The build cache. Most tests run a stand-in for nvcc: what is tested is ours, not nvcc."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fx_fuser import build, native
from fx_fuser.errors import BuildError
from fx_fuser.kernel_spec import LINEAR_SPLIT, MAX_NUMBERS, MAX_TENSORS, POINTWISE

# Copies its source to its target, one line into `calls` for each time it is run.
FAKE_NVCC = r"""#!/bin/sh
case "$1" in --version) echo fake 1.0; exit 0;; esac
while [ $# -gt 0 ]; do
  case "$1" in -o) target="$2"; shift;; *.cu) source="$1";; *FEW_REGISTERS) few=1;; esac
  shift
done
echo "$source" >> "{calls}"
grep -q SLOW "$source" && sleep 20
grep -q BROKEN "$source" && {{ echo "error: no such thing"; exit 1; }}
case "$PWD" in */full/*) echo "fatal: No space left on device"; exit 1;; esac
grep -q "SPILLS${{few:+ ALWAYS}}" "$source" && \
  echo "    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads"
grep -q SERIAL "$source" && \
  echo "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async is serialized"
cp "$source" "$target"
echo "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
"""

ARCH = "sm_90a"


class FakeCompiler:
    def __init__(self, folder: Path) -> None:
        self.calls_file = folder / "calls"
        self.nvcc = folder / "bin" / "nvcc"
        self.nvcc.parent.mkdir()
        self.nvcc.write_text(FAKE_NVCC.format(calls=self.calls_file))
        self.nvcc.chmod(0o755)

    @property
    def calls(self) -> int:
        return len(self.calls_file.read_text().splitlines()) if self.calls_file.exists() else 0


@pytest.fixture
def fake(tmp_path, monkeypatch):
    compiler = FakeCompiler(tmp_path)
    monkeypatch.setenv("PATH", str(compiler.nvcc.parent), prepend=os.pathsep)
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / "cache"))
    return compiler


needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None and not (build.DEFAULT_CUDA_HOME / "bin/nvcc").exists(),
    reason="no CUDA toolkit here",
)


def leftovers(folder: Path) -> list[Path]:
    return list(folder.glob("tmp-*"))


# ---- what is cached ------------------------------------------------------------------------------


def test_cold_then_warm(fake):
    cold = build.cubin("// a", ARCH)
    assert cold.read_text() == "// a"
    assert cold.parent == build.cache_dir()
    assert build.cubin("// a", ARCH) == cold
    assert fake.calls == 1
    assert not leftovers(cold.parent)


def test_what_takes_long_says_how_far_it_is(fake, monkeypatch, caplog):
    monkeypatch.setattr(build, "_PROGRESS_S", 0.1)
    target, slow = Path("done"), ["sleep", "0.5"]
    with caplog.at_level(logging.INFO, "fx_fuser.build"), subprocess.Popen(slow) as running:
        build._wait_for(running, [target, Path(__file__)])
    assert "compiled 1 of 2 kernels" in caplog.text
    assert running.returncode == 0


def test_several_sources_and_duplicates_in_one_run(fake):
    texts = ["// a", "// b", "// a"]
    paths = build.cubins(texts, ARCH)
    assert [path.read_text() for path in paths] == texts
    assert fake.calls == 2


def test_a_source_with_shell_characters(fake):
    text = "// $HOME `ls` 'x' \"y\" {source}"
    assert build.cubin(text, ARCH).read_text() == text


def truncate(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:-1])


def corrupt(entry: Path) -> None:
    data = bytearray(entry.read_bytes())
    data[0] ^= 1
    entry.write_bytes(data)


def lose_binary(entry: Path) -> None:
    entry.unlink()


def lose_manifest(entry: Path) -> None:
    entry.with_suffix(".json").unlink()


def garble_manifest(entry: Path) -> None:
    entry.with_suffix(".json").write_text("[1")


def empty_manifest(entry: Path) -> None:
    entry.with_suffix(".json").write_text("[]")


@pytest.mark.parametrize(
    "damage",
    [truncate, corrupt, lose_binary, lose_manifest, garble_manifest, empty_manifest],
    ids=lambda f: f.__name__,
)
def test_a_damaged_entry_is_built_again(fake, damage):
    entry = build.cubin("// a", ARCH)
    damage(entry)
    assert build.cubin("// a", ARCH).read_text() == "// a"
    assert fake.calls == 2
    build.cubin("// a", ARCH)
    assert fake.calls == 2


def test_the_key_holds_text_arch_and_headers(fake, tmp_path, monkeypatch):
    headers = tmp_path / "kernels_cu"
    shutil.copytree(build.KERNELS, headers)
    monkeypatch.setattr(build, "KERNELS", headers)
    paths = {build.cubin("// a", ARCH), build.cubin("// b", ARCH), build.cubin("// a", "sm_80")}
    before = build.fingerprint()
    with (headers / "pointwise.cuh").open("a") as header:
        header.write("// changed\n")
    paths.add(build.cubin("// a", ARCH))
    assert len(paths) == 4
    assert build.fingerprint() != before


def test_the_key_holds_the_compilers_version(fake, tmp_path, monkeypatch):
    before = build.cubin("// a", ARCH)
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "nvcc").write_text(fake.nvcc.read_text().replace("fake 1.0", "fake 1.1"))
    (newer / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(newer), prepend=os.pathsep)
    assert build.cubin("// a", ARCH) != before


# ---- processes -----------------------------------------------------------------------------------


def _build_at_once(barrier, results) -> None:
    barrier.wait()
    paths = build.cubins([f"// {i}" for i in range(4)], ARCH)
    results.put([path.read_text() for path in paths])


def test_eight_processes_build_once(fake):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(8), context.Queue()
    processes = [context.Process(target=_build_at_once, args=(barrier, results)) for _ in range(8)]
    for process in processes:
        process.start()
    texts = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert texts == [[f"// {i}" for i in range(4)]] * 8
    assert fake.calls == 4


def test_a_killed_build_harms_no_later_one(fake):
    code = f"from fx_fuser import build; build.cubins(['// quick', '// SLOW'], {ARCH!r})"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    deadline = time.monotonic() + 60
    while fake.calls < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert fake.calls == 2
    assert leftovers(build.cache_dir())

    assert build.cubin("// quick", ARCH).read_text() == "// quick"
    assert fake.calls == 3
    assert not leftovers(build.cache_dir())


@pytest.mark.parametrize("to_all", [False, True], ids=["to Python", "to all, as by ctrl-C"])
def test_an_interrupted_build_leaves_nothing_behind(fake, to_all):
    code = f"""
from fx_fuser import build
try:
    build.cubins(['// quick', '// SLOW'], {ARCH!r})
except KeyboardInterrupt:
    print("interrupted")
"""
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while fake.calls < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "interrupted\n"
        assert process.returncode == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the compiler's
    assert not leftovers(build.cache_dir())
    assert build.cubin("// quick", ARCH).read_text() == "// quick"
    assert fake.calls == 3


def test_two_threads_build_once(fake):
    barrier, found = threading.Barrier(2), []

    def work():
        barrier.wait()
        found.append(build.cubins([f"// {i}" for i in range(4)], ARCH))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1]
    assert fake.calls == 4


def test_a_build_does_not_wait_for_one_of_something_else(fake):
    """Nor does it take the other's folder for a leftover."""
    ours = build._cubin_job("// ours", ARCH, build.toolchain())
    other = (build._cubin_job(f"// {i}", ARCH, build.toolchain()) for i in range(100))
    other = next(job for job in other if job.shard != ours.shard)
    folder = build.cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    under_way = folder / f"tmp-{other.shard}-under-way"
    with build._locked(folder, [other.shard]):
        under_way.mkdir()
        assert build.cubin("// ours", ARCH).read_text() == "// ours"
        assert under_way.exists()


def test_a_process_forked_during_a_build_does_not_hold_its_lock(tmp_path):
    """Both have it; the other may be a DataLoader's worker, and live as long as the training."""
    context = multiprocessing.get_context("fork")
    done = context.Event()
    child = context.Process(target=done.wait)
    with build._locked(tmp_path, ["2a"]):
        child.start()
    with open(tmp_path / "lock-2a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            done.set()
            child.join()


def test_the_folder_of_an_unusable_cache_outlives_a_forked_child(fake, tmp_path, monkeypatch):
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / "a_file/cache"))
    code = f"""
import os, sys
from fx_fuser import build
path = build.cubin('// a', {ARCH!r})
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
assert path.exists()
print(path)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    )
    assert not Path(done.stdout.strip()).parent.exists()


@pytest.mark.parametrize("folder", ["a_file/cache", "full/cache"])
def test_an_unusable_cache_folder_costs_one_warning(fake, tmp_path, monkeypatch, caplog, folder):
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path / folder))
    with caplog.at_level(logging.WARNING, logger="fx_fuser.build"):
        first = build.cubin(f"// {folder}", ARCH)
        build.cubin(f"// {folder} again", ARCH)
    assert first.read_text() == f"// {folder}"
    assert tmp_path not in first.parents
    assert len(caplog.records) == 1
    assert str(tmp_path / folder) in caplog.text
    assert "FX_FUSER_CACHE_DIR" in caplog.text


UNWRITABLE = {
    "read-only": (os, "mkdir", errno.EROFS),
    "not ours": (build, "open", errno.EACCES),
    "without locks": (build, "open", errno.ENOLCK),
    "full for a source": (Path, "write_text", errno.ENOSPC),
    "full for a binary": (os, "replace", errno.ENOSPC),
}


@pytest.mark.parametrize("everywhere", [False, True], ids=["the cache", "every folder"])
@pytest.mark.parametrize("place, name, error", UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_folder_that_cannot_be_written_to(
    fake, tmp_path, monkeypatch, place, name, error, everywhere
):
    """A temporary one does; if that cannot be written to either, the system's error says why."""
    folder, source = tmp_path / "cache", f"// {name} {error} {everywhere}"
    right = getattr(place, name, open)

    def failing(path, *args, **kwargs):
        if everywhere or folder in (Path(path), *Path(path).parents):
            raise OSError(error, os.strerror(error))
        return right(path, *args, **kwargs)

    monkeypatch.setattr(place, name, failing, raising=False)
    if everywhere:
        with pytest.raises(OSError, match=os.strerror(error)):
            build.cubin(source, ARCH)
    else:
        path = build.cubin(source, ARCH)
        assert path.read_text() == source and folder not in path.parents
    assert not folder.exists() or not leftovers(folder)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says", "calls"),
    [
        ("// BROKEN", "no such thing", 1),
        ("// SPILLS ALWAYS", "spills registers", 2),
        ("// SERIAL", "serialises its wgmma", 1),
    ],
)
def test_a_bad_source_fails_and_stays_out_of_the_cache(fake, text, says, calls):
    for attempt in (1, 2):
        with pytest.raises(BuildError, match=says):
            build.cubin(text, ARCH)
        assert fake.calls == calls * attempt


def test_what_spills_is_compiled_again_with_few_registers(fake):
    paths = build.cubins(["// SPILLS", "// fine"], ARCH)
    assert [path.read_text() for path in paths] == ["// SPILLS", "// fine"]
    assert fake.calls == 3
    assert build.cubins(["// SPILLS", "// fine"], ARCH) == paths
    assert fake.calls == 3


def test_every_bad_source_of_a_run_is_named(fake):
    with pytest.raises(BuildError) as caught:
        build.cubins(["// BROKEN", "// fine", "// SPILLS ALWAYS"], ARCH)
    assert "no such thing" in str(caught.value)
    assert "spills" in str(caught.value)


def test_missing_nvcc_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(build, "DEFAULT_CUDA_HOME", tmp_path)
    with pytest.raises(BuildError, match=r"nvcc was found neither .* set CUDA_HOME"):
        build.toolchain()


def test_missing_gxx_names_the_remedy(fake, monkeypatch):
    monkeypatch.setenv("PATH", str(fake.nvcc.parent))
    with pytest.raises(BuildError, match=r"g\+\+ was not found on PATH"):
        build.toolchain()


def test_cuda_home_is_searched(fake, tmp_path, monkeypatch):
    gxx_only = tmp_path / "gxx"
    gxx_only.mkdir()
    (gxx_only / "g++").symlink_to(shutil.which("g++"))
    monkeypatch.setenv("PATH", str(gxx_only))
    monkeypatch.setenv("CUDA_HOME", str(fake.nvcc.parent.parent))
    assert build.toolchain().nvcc == fake.nvcc


def test_arch_of(monkeypatch):
    names = {(8, 0): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100a"}
    names |= {(10, 3): "sm_103a", (12, 0): "sm_120"}
    for capability, name in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert build.arch_of(0) == name


def test_a_spec_is_its_text_and_its_name():
    types = (torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64)
    spec = build.example(POINTWISE, "Gate", 0, *types)
    arguments = "fx_fuser::examples::Gate, 0, float, __nv_bfloat16, __half, bool, int64_t"
    assert spec.text.splitlines()[-1] == f"FX_FUSER_POINTWISE({arguments})"
    assert ", ".join(spec.signature) == arguments
    assert native.operands_of(spec) == 2
    others = [
        build.example(POINTWISE, "Gate", 1, *types),
        build.example(POINTWISE, "Gate", 0, *types[::-1]),
        build.example(LINEAR_SPLIT, "Gate", 0, *types),
    ]
    assert len({spec.name, *(other.name for other in others)}) == 4


def test_a_family_says_where_it_runs(monkeypatch):
    f32 = torch.float32
    everywhere, hopper = (
        build.example(f, "Swish", 1, f32, f32, f32) for f in (POINTWISE, LINEAR_SPLIT)
    )
    for capability, runs in (((9, 0), True), ((10, 0), False), ((8, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert native.runs_on(everywhere, "cuda:0")
        assert native.runs_on(hopper, "cuda:0") == runs


@pytest.mark.parametrize(
    "constant, limit", [("kMaxInputs", MAX_TENSORS), ("kMaxScalars", MAX_NUMBERS)]
)
def test_the_limits_are_those_of_the_kernels(constant, limit):
    assert (
        f"constexpr int {constant} = {limit};" in (build.KERNELS / "pointwise_args.h").read_text()
    )


def test_available_says_why_not():
    assert native.available("cpu") == "cpu is not a CUDA device"
    if not torch.cuda.is_available():
        assert "is_available() is False" in (native.available("cuda") or "")


def test_cpu_tensors_are_refused_by_name():
    with pytest.raises(BuildError, match="not on cpu"):
        native.batch_stats(torch.ones(2, 3, 4, 4))


def test_missing_ninja_names_the_remedy(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(BuildError, match="pip install ninja"):
        build.cubin("// a", ARCH)


# ---- loading -------------------------------------------------------------------------------------

SPEC = build.example(POINTWISE, "Swish", 1, torch.float32, torch.float32, torch.float32)


@pytest.fixture
def loader(fake, monkeypatch):
    """native on a machine with a GPU: the answers of its loading op, one for each call."""
    answers, calls = [], []

    def load(*arguments):
        calls.append(arguments)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    ops = SimpleNamespace(load_pointwise=SimpleNamespace(default=load))
    monkeypatch.setattr(torch.ops, "fx_fuser_native", ops, raising=False)
    monkeypatch.setattr(native, "_load_shim", lambda: None)
    monkeypatch.setattr(native, "_kernels", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return SimpleNamespace(answers=answers, calls=calls)


def test_a_kernel_that_does_not_load_is_no_kernel(loader):
    """And it is tried again: the next driver, or the next free memory, may take it."""
    loader.answers += [RuntimeError("no kernel image for the device"), 7]
    with pytest.raises(BuildError, match="no kernel image"):
        native.prepare([SPEC], "cuda:0")
    assert native._kernels == {}
    native.prepare([SPEC], "cuda:0")
    assert native._kernels == {(SPEC.name, 0): 7}
    name, cubin, signature, index = loader.calls[-1]
    assert (name, signature, index) == (SPEC.name, SPEC.signature, 0)
    assert Path(cubin).read_text() == SPEC.text


def test_a_kernel_of_another_architecture_is_not_built(loader, fake):
    split = build.example(LINEAR_SPLIT, "Swish", 1, torch.float32, torch.float32, torch.float32)
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device: (8, 0)):
        native.prepare([split], "cuda:0")
    assert native._kernels == {(split.name, 0): native._NO_KERNEL}
    assert fake.calls == 0 and not loader.calls


def test_two_threads_load_once(loader):
    loader.answers += [7]
    barrier = threading.Barrier(2)

    def work():
        barrier.wait()
        native.prepare([SPEC], "cuda:0")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loader.calls) == 1 and native._kernels == {(SPEC.name, 0): 7}


def test_a_shim_that_does_not_load_says_which(tmp_path, monkeypatch):
    shim = tmp_path / "shim.so"
    shim.write_text("no library")
    monkeypatch.setattr(build, "shim", lambda: shim)
    monkeypatch.setattr(torch.ops, "fx_fuser_native", SimpleNamespace(), raising=False)
    with pytest.raises(BuildError, match=r"cannot load .*shim\.so .* does it fit this torch"):
        native._load_shim()


# ---- the real compilers --------------------------------------------------------------------------


@needs_nvcc
def test_the_shim_loads_in_a_fresh_process(tmp_path):
    """Also into a torch without CUDA, where its weak CUDA symbol stays null."""
    code = """
import torch
from fx_fuser import build, native
native._load_shim()
native._load_shim()
try:
    torch.ops.fx_fuser_native.batch_stats(0, torch.ones(2, 3))
except RuntimeError as error:
    assert "x is not a CUDA tensor" in str(error), error
else:
    raise AssertionError("a CPU tensor was accepted")
"""
    environment = {**os.environ, "FX_FUSER_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@needs_nvcc
def test_a_pointwise_source_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    types = (torch.float32, torch.float16, torch.float16, torch.float32)
    spec = build.example(POINTWISE, "EveryFunction", 2, *types)
    code = build.cubin(spec.text, ARCH).read_bytes()
    assert b"fx_fuser_pointwise_u32" in code
    assert b"fx_fuser_pointwise_u64" in code


# 64 live values in the 32 registers that two blocks of 1024 threads leave to each.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) crowded(float* x) {
  float value[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) value[i] = x[threadIdx.x + 1024 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[threadIdx.x + 1024 * (63 - i)] = value[i] * value[(i * 5) % 64];
}
"""


@needs_nvcc
def test_ptxas_spills_fail_the_build(tmp_path, monkeypatch):
    monkeypatch.setenv("FX_FUSER_CACHE_DIR", str(tmp_path))
    with pytest.raises(BuildError, match="spills registers"):
        build.cubin(SPILLING, ARCH)
