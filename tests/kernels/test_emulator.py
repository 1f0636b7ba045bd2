"""The emulator finds faults: each kernel here has one, or none."""

from __future__ import annotations

import ctypes

import emulator
import pytest
import torch
from emulator import Settings

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")

THREADS = 64
SOURCE = """
#include "common/ptx.cuh"
using namespace fx_fuser;
struct Args { float* out; const float* in; };

// The other warp's value: with a barrier, or none.
template <bool kWaits>
__device__ void exchange(const Args& args) {
  __shared__ float value[64];
  value[threadIdx.x] = args.in[threadIdx.x];
  if (kWaits) __syncthreads();
  args.out[threadIdx.x] = value[threadIdx.x ^ 32];
}
extern "C" __global__ void exchanges(const __grid_constant__ Args args) { exchange<true>(args); }
extern "C" __global__ void has_no_barrier(const __grid_constant__ Args args) {
  exchange<false>(args);
}

// What a thread has copied, and waited for, or not.
template <int kPending>
__device__ void copy(const Args& args) {
  __shared__ float value[2][64];
  for (int i = 0; i < 2; ++i) {
    float* to = &value[i][threadIdx.x];
    ptx::copy_async(ptx::shared_address(to), args.in + threadIdx.x, threadIdx.x < 60);
    ptx::copy_async_commit();
  }
  ptx::copy_async_wait_for_groups<kPending>();
  args.out[threadIdx.x] = value[1][threadIdx.x];
}
extern "C" __global__ void copies(const __grid_constant__ Args args) { copy<0>(args); }
extern "C" __global__ void reads_too_early(const __grid_constant__ Args args) { copy<1>(args); }

// One warp copies, both wait at an mbarrier of so many arrivals.
template <int kArrivals>
__device__ void arrive(const Args& args) {
  __shared__ uint64_t full;
  __shared__ float value[32];
  if (threadIdx.x == 0) ptx::mbarrier_init(ptx::shared_address(&full), kArrivals);
  __syncthreads();
  if (threadIdx.x < 32) {
    ptx::copy_async(ptx::shared_address(&value[threadIdx.x]), args.in + threadIdx.x, true);
    ptx::mbarrier_arrive_on_copies(ptx::shared_address(&full));
  }
  ptx::mbarrier_wait(ptx::shared_address(&full), 0);
  args.out[threadIdx.x] = value[threadIdx.x % 32];
}
extern "C" __global__ void arrives(const __grid_constant__ Args args) { arrive<32>(args); }
extern "C" __global__ void waits_forever(const __grid_constant__ Args args) { arrive<33>(args); }
extern "C" __global__ void waits_for_nothing(const __grid_constant__ Args args) {
  __shared__ uint64_t full;
  ptx::mbarrier_wait(ptx::shared_address(&full), 0);
}

extern "C" __global__ void diverges(const __grid_constant__ Args args) {
  float value = args.in[threadIdx.x];
  if (threadIdx.x % 32 < 7) {
    value = __shfl_xor_sync(0xFFFFFFFF, value, 1);
  } else {
    value += __shfl_xor_sync(0xFFFFFFFF, value, 1);
  }
  args.out[threadIdx.x] = value;
}
extern "C" __global__ void leaves_early(const __grid_constant__ Args args) {
  if (threadIdx.x == 40) return;
  args.out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFF, args.in[threadIdx.x], 1);
}
extern "C" __global__ void is_not_aligned(const __grid_constant__ Args args) {
  const float4 four = *reinterpret_cast<const float4*>(args.in + threadIdx.x / 2);
  args.out[threadIdx.x] = four.x;
}
extern "C" __global__ void copies_what_is_not_aligned(const __grid_constant__ Args args) {
  __shared__ float4 value[64];
  ptx::copy_async_16(ptx::shared_address(&value[threadIdx.x]), args.in + threadIdx.x);
}
extern "C" __global__ void reads_behind(const __grid_constant__ Args args) {
  args.out[threadIdx.x] = args.in[threadIdx.x + 1];
}
extern "C" __global__ void reads_ahead(const __grid_constant__ Args args) {
  args.out[threadIdx.x] = args.in[static_cast<int>(threadIdx.x) - 1];
}
extern "C" __global__ void writes_beside_dynamic_memory(const __grid_constant__ Args args) {
  extern __shared__ float dynamic[];
  dynamic[threadIdx.x + 1] = 0;
}
extern "C" __global__ void loads_beside_shared_memory(const __grid_constant__ Args args) {
  __shared__ float value[64];
  args.out[threadIdx.x] = ptx::load_shared_word(ptx::shared_address(value) + 4 * threadIdx.x + 4);
}
extern "C" __global__ void has_no_such_element(const __grid_constant__ Args args) {
  float value[4] = {};
  args.out[threadIdx.x] = value[threadIdx.x % 5];
}
extern "C" __global__ void overflows(const __grid_constant__ Args args) {
  args.out[threadIdx.x] = static_cast<int>(threadIdx.x) + 0x7FFFFFF0;
}
extern "C" __global__ void cluster_exchanges(const __grid_constant__ Args args) {
  __shared__ float value[64];
  ptx::cluster_arrive();
  ptx::cluster_wait();
  const uint32_t other = ptx::cluster_rank() ^ 1;
  ptx::store_to_block(ptx::shared_address(&value[threadIdx.x]), other, args.in[threadIdx.x]);
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (other == 0) args.out[threadIdx.x] = value[threadIdx.x];
}
"""
BYTES = {"writes_beside_dynamic_memory": 4 * THREADS}
SCHEDULES = [
    Settings(order, copies, guard_ahead=ahead)
    for order, copies, ahead in (
        ("forward", "at once", False),
        ("reverse", "late", True),
        ("random", "random", False),
    )
]


def run(name: str, settings: Settings) -> torch.Tensor:
    with emulator.memory():
        settings.use()
        values = torch.arange(THREADS, dtype=torch.float32)
        given, out = emulator.guarded(values), emulator.empty_like(values)
        blocks = 2 if name.startswith("cluster") else 1
        try:
            emulator.run_kernel(
                SOURCE, name, [out, given], THREADS, blocks, BYTES.get(name, 0), cluster=blocks
            )
            return out.clone()
        finally:
            del given, out


@pytest.mark.parametrize("settings", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", ["exchanges", "copies", "arrives", "cluster_exchanges"])
def test_without_a_fault(name: str, settings: Settings) -> None:
    number = torch.arange(THREADS)
    expected = {
        "exchanges": number ^ 32,
        "copies": torch.where(number < 60, number, 0),
        "arrives": number % 32,
        "cluster_exchanges": number,
    }
    assert torch.equal(run(name, settings), expected[name].float())


@pytest.mark.parametrize("name", ["has_no_barrier", "reads_too_early"])
def test_schedules_give_different_results(name: str) -> None:
    found = [run(name, settings).nan_to_num(-1) for settings in SCHEDULES]
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("settings", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("waits_forever", "no thread can run:(.|\n)*warp 1: 32 lanes at an mbarrier"),
        ("waits_for_nothing", "there is no initialised mbarrier"),
        ("diverges", "the warp diverges"),
        ("leaves_early", "31 lanes at __shfl_xor_sync.*; 1 lanes ended"),
        ("is_not_aligned", "an access that is not aligned"),
        ("copies_what_is_not_aligned", "a copy of 16 bytes is not aligned in global memory"),
        ("writes_beside_dynamic_memory", "touches memory|written behind"),
        ("loads_beside_shared_memory", "shared memory is touched where the block has none"),
        ("has_no_such_element", "an index beyond the array"),
        ("overflows", "a signed sum overflows"),
    ],
)
def test_a_fault_is_reported(name: str, says: str, settings: Settings) -> None:
    with pytest.raises(RuntimeError, match=says):
        run(name, settings)
    run("exchanges", settings)  # a fault leaves the next launch unharmed


@pytest.mark.parametrize(("name", "ahead"), [("reads_behind", False), ("reads_ahead", True)])
def test_no_memory_beside_a_tensor(name: str, ahead: bool) -> None:
    where = "ahead of" if ahead else "behind"
    with pytest.raises(RuntimeError, match=f"bytes {where} an allocation of 256 bytes"):
        run(name, Settings(guard_ahead=ahead))


def test_what_is_written_beside_a_tensor_is_found() -> None:
    with (
        pytest.raises(AssertionError, match="written 0 bytes behind an allocation of 256"),
        emulator.memory(),
    ):
        Settings(guard_ahead=True).use()
        values = emulator.guarded(torch.zeros(THREADS))
        ctypes.memset(values.data_ptr() + 4 * THREADS, 1, 1)
        del values
