"""The emulator's wgmma: each form against float64, and kernels with one fault each."""

from __future__ import annotations

import emulator
import pytest
import torch
from emulator import Settings
from test_emulator import SCHEDULES
from torch import Tensor

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=emulator.missing() or "")

SHARED_BYTES = 64 << 10
SOURCE = (
    f"constexpr int kSharedBytes = {SHARED_BYTES};"
    + """
#include "common/ptx_sm90.cuh"
#include "common/wgmma_sm90.cuh"
using namespace fx_fuser;
struct Args { float* out; const void* a; const void* b; };

__device__ uint4* shared() {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  return reinterpret_cast<uint4*>(dynamic);
}
__device__ uint64_t at(const uint4* place) { return ptx::shared_address(place) / 16; }

// `count` vectors of 16 bytes to where place(row, vector) says, of rows of kVectors.
template <int kVectors, class Place>
__device__ void fill(const void* from, int rows, uint4* to, const Place& place) {
  for (int i = threadIdx.x; i < rows * kVectors; i += blockDim.x) {
    to[place(i / kVectors, i % kVectors)] = static_cast<const uint4*>(from)[i];
  }
}

// With gaps, which hold NaN.
struct Tiles {
  uint32_t stride;
  uint32_t leading;

  __device__ uint64_t descriptor(const uint4* begin) const {
    return uint64_t{stride} << 32 | uint64_t{leading} << 16 | at(begin);
  }
};

template <int kRegisters>
__device__ void store(float* out, const float (&d)[kRegisters]) {
  const int thread = threadIdx.x % 128;
  const int row = thread / 32 * 16 + thread % 32 / 4;
  for (int i = 0; i < kRegisters; ++i) {
    const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
    out[(row + i / 2 % 2 * 8) * (2 * kRegisters) + column] = d[i];
  }
}

enum Form { kTiles, kSwizzled, kRegistersByTiles, kRegistersByTransposed };

// out [64, n] = aᵀ b, a [64 of k, 64] or, if not kTransposedA, a [64, 64 of k]; b [64 of k, n]; in
// lines of 64 elements, swizzled, with a gap behind those of the next 64 columns.
template <class T, int n, bool kTransposedA>
__device__ void multiply_transposed(const Args& args) {
  constexpr int kGap = 64;
  constexpr int kSpan = 64 * 8 + kGap;
  uint4* a = shared();
  uint4* b = a + kSpan;
  fill<8>(args.a, 64, a, [](int line, int vector) { return line * 8 + (vector ^ line % 8); });
  fill<n / 8>(args.b, 64, b, [](int k, int vector) {
    return vector / 8 * kSpan + k * 8 + (vector % 8 ^ k % 8);
  });
  ptx::fence_async_proxy();
  __syncthreads();
  float d[n / 2];
  ptx::wgmma_fence();
  for (int step = 0; step < 4; ++step) {
    const uint32_t at_a = ptx::shared_address(a), at_b = ptx::shared_address(b);
    const uint64_t of_a = kTransposedA ? ptx::transposed_descriptor(at_a, 16 * kSpan) + 128 * step
                                       : ptx::matrix_descriptor(at_a) + 2 * step;
    ptx::WgmmaOfMajors<T, kTransposedA, true>::run(
        d, of_a, ptx::transposed_descriptor(at_b, 16 * kSpan) + 128 * step, step > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  store(args.out, d);
}
#define FX_FUSER_MAJORS(name, T, n, transposed_a)                         \\
  extern "C" __global__ void name(const __grid_constant__ Args args) {    \\
    multiply_transposed<T, n, transposed_a>(args);                        \\
  }
FX_FUSER_MAJORS(both_bfloat16_192, __nv_bfloat16, 192, true)
FX_FUSER_MAJORS(second_float16_256, __half, 256, false)

// out [64, n] = a [64, k] b, of 16 or 32 bytes of k a step; b is [n, k], or transposed [k, n].
template <class T, int n, Form kForm>
__device__ void multiply(const Args& args) {
  constexpr bool kIsSwizzled = kForm == kSwizzled;
  constexpr int kSteps = kIsSwizzled ? 4 : 2;
  constexpr int kVectors = 2 * kSteps;
  constexpr int kK = kVectors * 16 / sizeof(T);
  const Tiles of_a{9, 74};
  const Tiles of_b{kForm == kRegistersByTransposed ? 11u : 10u, n / 8 * 11 + 3};
  uint4* a = shared();
  uint4* b = a + 64 * 8 + 128;
  const auto swizzled = [](int row, int vector) { return row * 8 + (vector ^ row % 8); };
  const auto tiled = [](const Tiles& tiles) {
    return [&tiles](int row, int vector) {
      return row / 8 * tiles.stride + row % 8 + vector * tiles.leading;
    };
  };
  if constexpr (kIsSwizzled) {
    b = a + 64 * 8;
    fill<kVectors>(args.a, 64, a, swizzled);
    fill<kVectors>(args.b, n, b, swizzled);
  } else {
    fill<kVectors>(args.a, 64, a, tiled(of_a));
    if constexpr (kForm == kRegistersByTransposed) {
      fill<n / 8>(args.b, kK, b, [&](int k, int vector) {
        return k / 8 * of_b.leading + k % 8 + vector * of_b.stride;
      });
    } else {
      fill<kVectors>(args.b, n, b, tiled(of_b));
    }
  }
  ptx::fence_async_proxy();
  __syncthreads();
  float d[n / 2];
  uint32_t word[kSteps][4];
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  for (int i = 0; i < 4 * kSteps; ++i) {
    const int at_row = row + i % 2 * 8;
    word[i / 4][i % 4] = static_cast<const uint32_t*>(args.a)[at_row * kVectors * 4 + i / 2 * 4 +
                                                             threadIdx.x % 4];
  }
  ptx::wgmma_fence();
  for (int step = 0; step < kSteps; ++step) {
    if constexpr (kIsSwizzled) {
      ptx::Wgmma<T>::run(d, ptx::matrix_descriptor(ptx::shared_address(a)) + 2 * step,
                         ptx::matrix_descriptor(ptx::shared_address(b)) + 2 * step, step > 0);
    } else {
      const uint64_t by = of_b.descriptor(b + 2 * step * of_b.leading);
      if constexpr (kForm == kTiles) {
        ptx::Wgmma<T>::run(d, of_a.descriptor(a + 2 * step * of_a.leading), by, step > 0);
      } else if constexpr (kForm == kRegistersByTiles) {
        ptx::WgmmaOfRegisters<T>::run(d, word[step], by, step > 0);
      } else {
        ptx::WgmmaOfRegisters<T>::run_transposed(d, word[step], by, step > 0);
      }
    }
    if (step % 2 == 1) ptx::wgmma_commit();
  }
  ptx::wgmma_wait<0>();
  store(args.out, d);
}
#define FX_FUSER_FORM(name, T, n, form)                                   \\
  extern "C" __global__ void name(const __grid_constant__ Args args) {    \\
    multiply<T, n, form>(args);                                           \\
  }
FX_FUSER_FORM(tiles_float32_64, float, 64, kTiles)
FX_FUSER_FORM(tiles_bfloat16_128, __nv_bfloat16, 128, kTiles)
FX_FUSER_FORM(tiles_float16_16, __half, 16, kTiles)
FX_FUSER_FORM(swizzled_float32_128, float, 128, kSwizzled)
FX_FUSER_FORM(swizzled_bfloat16_256, __nv_bfloat16, 256, kSwizzled)
FX_FUSER_FORM(swizzled_float16_64, __half, 64, kSwizzled)
FX_FUSER_FORM(registers_float16_128, __half, 128, kRegistersByTiles)
FX_FUSER_FORM(transposed_bfloat16_24, __nv_bfloat16, 24, kRegistersByTransposed)
FX_FUSER_FORM(transposed_float16_72, __half, 72, kRegistersByTransposed)

// ---- faults: a product of ones by warpgroup 0, whose memory warpgroup 1 overwrites --------------

enum Fault {
  kNone, kReadsEarly, kReleasesEarly, kChangesFactors, kChangesSums, kIsMissing, kDiverges,
  kIsElsewhere, kDiffersInWarp, kDiffersInWarpgroup, kIsBeside, kHasNoFence, kHasNoFenceAgain,
  kHasNoCommit, kHasNoWait, kWaitsForFewer, kKeepsRegisters
};

template <Fault kFault>
__device__ void try_product(const Args& args) {
  __shared__ uint64_t empty;
  uint4* b = shared();
  const uint32_t both_ones = 0x3F803F80;
  for (int i = threadIdx.x; i < 32; i += 256) {
    b[i] = make_uint4(both_ones, both_ones, both_ones, both_ones);
  }
  if (threadIdx.x == 0) ptx::mbarrier_init(ptx::shared_address(&empty), 4);
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp >= 4) {
    ptx::take_registers<160>();
    ptx::mbarrier_wait(ptx::shared_address(&empty), 0);
    if (threadIdx.x < 160) b[threadIdx.x % 32] = make_uint4(0, 0, 0, 0);
    return;
  }
  if (kFault != kKeepsRegisters || warp != 2) ptx::give_registers<96>();
  const auto release = [&] {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty));
  };
  uint32_t a[4] = {both_ones, both_ones, both_ones, both_ones};
  float d[12];  // 24 columns
  uint64_t by = Tiles{8, 8}.descriptor(b);
  if (kFault == kDiffersInWarp && threadIdx.x % 32 == 5) ++by;
  if (kFault == kDiffersInWarpgroup && warp == 1) ++by;
  if (kFault == kIsBeside) by += kSharedBytes / 16;
  float out = 0;
  if (kFault != kHasNoFence) ptx::wgmma_fence();
  if (kFault == kIsMissing && warp == 3) {
    release();
    return;
  }
  if (kFault == kDiverges && threadIdx.x % 32 < 7) __syncwarp();
  if (kFault == kIsElsewhere && warp == 1) {
    ptx::WgmmaOfRegisters<__nv_bfloat16>::run_transposed(d, a, by, false);
  } else {
    ptx::WgmmaOfRegisters<__nv_bfloat16>::run_transposed(d, a, by, false);
  }
  if (kFault != kHasNoCommit) ptx::wgmma_commit();
  if (kFault == kReadsEarly) out = d[0];
  if (kFault == kReleasesEarly) release();
  if (kFault == kChangesFactors) a[1] = 0;
  if (kFault == kChangesSums) d[3] = 1;
  if (kFault == kWaitsForFewer) ptx::wgmma_wait<1>();
  if (kFault != kHasNoWait && kFault != kWaitsForFewer) ptx::wgmma_wait<0>();
  if (kFault == kHasNoFenceAgain) {
    ptx::WgmmaOfRegisters<__nv_bfloat16>::run_transposed(d, a, by, false);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }
  if (kFault != kReleasesEarly) release();
  args.out[threadIdx.x] = kFault == kReadsEarly ? out : d[3];
}
#define FX_FUSER_FAULT(name, fault)                                       \\
  extern "C" __global__ void name(const __grid_constant__ Args args) {    \\
    try_product<fault>(args);                                             \\
  }
FX_FUSER_FAULT(has_none, kNone)
FX_FUSER_FAULT(reads_early, kReadsEarly)
FX_FUSER_FAULT(releases_early, kReleasesEarly)
FX_FUSER_FAULT(changes_factors, kChangesFactors)
FX_FUSER_FAULT(changes_sums, kChangesSums)
FX_FUSER_FAULT(is_missing, kIsMissing)
FX_FUSER_FAULT(diverges, kDiverges)
FX_FUSER_FAULT(is_elsewhere, kIsElsewhere)
FX_FUSER_FAULT(differs_in_warp, kDiffersInWarp)
FX_FUSER_FAULT(differs_in_warpgroup, kDiffersInWarpgroup)
FX_FUSER_FAULT(is_beside, kIsBeside)
FX_FUSER_FAULT(has_no_fence, kHasNoFence)
FX_FUSER_FAULT(has_no_fence_again, kHasNoFenceAgain)
FX_FUSER_FAULT(has_no_commit, kHasNoCommit)
FX_FUSER_FAULT(has_no_wait, kHasNoWait)
FX_FUSER_FAULT(waits_for_fewer, kWaitsForFewer)
FX_FUSER_FAULT(keeps_registers, kKeepsRegisters)

// Of 384 threads, which have 168 registers each, 504 in all warpgroups.
template <int kOfOne, int kOfOthers>
__device__ void exchange_registers() {
  if (threadIdx.x < 128) {
    ptx::give_registers<kOfOne>();
  } else {
    ptx::take_registers<kOfOthers>();
  }
}
extern "C" __global__ void exchanges_registers(const __grid_constant__ Args args) {
  exchange_registers<72, 216>();
}
extern "C" __global__ void asks_for_too_many_registers(const __grid_constant__ Args args) {
  exchange_registers<80, 216>();
}
"""
)
every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=str)


def run(name: str, settings: Settings, like: Tensor, threads: int, *given: Tensor) -> Tensor:
    with emulator.memory():
        settings.use()
        out = emulator.empty_like(like)
        guarded = [emulator.guarded(tensor) for tensor in given]
        try:
            arguments = ([out, *guarded], threads, 1, SHARED_BYTES)
            emulator.run_kernel(SOURCE, name, *arguments)
            return out.clone()
        finally:
            del out, guarded


@pytest.mark.parametrize(
    "name",
    [
        *("tiles_float32_64", "tiles_bfloat16_128", "tiles_float16_16"),
        *("swizzled_float32_128", "swizzled_bfloat16_256", "swizzled_float16_64"),
        *("registers_float16_128", "transposed_bfloat16_24", "transposed_float16_72"),
    ],
)
def test_products(name: str) -> None:
    form, dtype_name, columns = name.split("_")
    dtype, n = getattr(torch, dtype_name), int(columns)
    k = (128 if form == "swizzled" else 64) // dtype.itemsize
    torch.manual_seed(0)
    a = torch.randn(64, k).to(dtype)
    b = torch.randn(*((k, n) if form == "transposed" else (n, k))).to(dtype)
    if dtype == torch.float32:  # 19 bits of each count
        a, b = ((v.view(torch.int32) & -0x2000).view(torch.float32) for v in (a, b))
    exact = a.double() @ (b.double() if form == "transposed" else b.double().T)
    found = [run(name, settings, torch.empty(64, n), 128, a, b) for settings in SCHEDULES]
    assert all(torch.equal(found[0], other) for other in found)
    # Truncated once per instruction, of which there are at most four.
    assert (found[0] - exact).abs().max() <= 4 * 2.0**-23 * exact.abs().max()


@pytest.mark.parametrize("name", ["both_bfloat16_192", "second_float16_256"])
def test_transposed_swizzled_products(name: str) -> None:
    """The two distances of the descriptor differ, so the wrong one would read other columns."""
    which, dtype_name, columns = name.split("_")
    torch.manual_seed(0)
    a, b = (torch.randn(64, n).to(getattr(torch, dtype_name)) for n in (64, int(columns)))
    exact = (a.double().T if which == "both" else a.double()) @ b.double()
    found = [run(name, s, torch.empty(64, int(columns)), 128, a, b) for s in SCHEDULES]
    assert all(torch.equal(found[0], other) for other in found)
    assert (found[0] - exact).abs().max() <= 4 * 2.0**-23 * exact.abs().max()


def run_fault(name: str, settings: Settings) -> Tensor:
    return run(name, settings, torch.empty(128), 256)


@every_schedule
def test_without_a_fault(settings: Settings) -> None:
    assert (run_fault("has_none", settings) == 16).all()


@pytest.mark.parametrize(
    ("name", "late"),
    [("reads_early", float("nan")), ("releases_early", 0.0), ("changes_factors", 8.0)],
)
def test_schedules_give_different_results(name: str, late: float) -> None:
    """Where a product may run late: its registers, the memory that it reads, its A in registers."""
    at_once = run_fault(name, Settings("forward", "at once"))
    assert (at_once == 16).all()
    found = run_fault(name, Settings("forward", "late"))
    assert torch.equal(found.nan_to_num(-1), torch.full((128,), late).nan_to_num(-1))


def test_registers_that_are_written_before_the_wait() -> None:
    with pytest.raises(RuntimeError, match="registers of a wgmma are written before"):
        run_fault("changes_sums", Settings("forward", "late"))


@every_schedule
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("is_missing", "warp 3 has ended, and another one of its warpgroup comes to wgmma"),
        ("diverges", "the warp diverges: this lane comes to (wgmma|__syncwarp)"),
        ("is_elsewhere", "the warpgroup diverges: this warp comes to wgmma, another one to wgmma"),
        ("differs_in_warp", "operands of wgmma differ in the warp"),
        ("differs_in_warpgroup", "operands of wgmma differ in the warpgroup"),
        ("is_beside", "shared memory is touched where the block has none"),
        ("has_no_fence", "wgmma without wgmma.fence"),
        ("has_no_fence_again", "wgmma without wgmma.fence"),
        ("has_no_commit", "has not waited for this wgmma"),
        ("has_no_wait", "has not waited for this wgmma"),
        ("waits_for_fewer", "has not waited for this wgmma"),
        ("keeps_registers", "the warpgroup diverges: this warp comes to "),
    ],
)
def test_a_fault_is_reported(name: str, says: str, settings: Settings) -> None:
    with pytest.raises(RuntimeError, match=says):
        run_fault(name, settings)
    assert (run_fault("has_none", settings) == 16).all()  # a fault leaves the next launch unharmed


@every_schedule
def test_more_registers_than_the_block_has(settings: Settings) -> None:
    """On a GPU the warpgroup that asks last waits forever."""
    run("exchanges_registers", settings, torch.empty(1), 384)
    with pytest.raises(RuntimeError, match="waits forever: warpgroups ask for 512 registers"):
        run("asks_for_too_many_registers", settings, torch.empty(1), 384)
