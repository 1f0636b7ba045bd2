// Behind the library's product of two planes: results that planes do not hold, computed again from
// the fp32 tensors, without tensor cores; and the factors that take the scales away.
//
// Where neither plane has lost anything a block leaves at once. Else each warp looks at its sums:
// those are small that lost values may be a part of that shows (linear/NOTES_PLANES.md). Zeros are
// what lost values leave, or rows of zeros.
#pragma once

#include <cstdint>

#include "linear/linear_planes.cuh"

namespace fx_fuser {

struct PlanesRepair {
  const PlanesRepairArgs& args;
  PowerOfTwo scale;

  // Columns n... of a row, by a warp: those of `wanted`, a bit each.
  __device__ __forceinline__ void compute(int64_t row, int n, uint32_t wanted) const {
    const int lane = threadIdx.x % 32;
    const int64_t batch = row / args.m;
    const float* a = row_of_a(row);
    const float* b = args.b.data + batch * args.b.batch;
    float sum[kRepairColumns] = {};
    for (int k = lane; k < args.k; k += 32) {
      const float value = a[k * args.a.k];
#pragma unroll
      for (int c = 0; c < kRepairColumns; ++c) {
        if (n + c >= args.n) continue;
        sum[c] = fmaf(value, b[(n + c) * args.b.line + k * args.b.k], sum[c]);
      }
    }
    float own = 0;
#pragma unroll
    for (int c = 0; c < kRepairColumns; ++c) {
      for (int distance = 16; distance > 0; distance /= 2) {
        sum[c] += __shfl_xor_sync(0xFFFFFFFF, sum[c], distance);
      }
      if (lane == c) own = sum[c];
    }
    // Lanes beyond the columns have no bit.
    if (wanted >> lane & 1) args.sums[row * args.n + n + lane] = scale.times(own);
    __syncwarp();
  }

  // Is the row of a more than zeros? Zeros times anything finite are what the sums were.
  __device__ __forceinline__ bool has_values(int64_t row) const {
    const float* a = row_of_a(row);
    for (int first = 0; first < args.k; first += 32) {
      const int k = first + static_cast<int>(threadIdx.x) % 32;
      const float value = k < args.k ? a[k * args.a.k] : 0.0f;
      if (__any_sync(0xFFFFFFFF, value != 0)) return true;
    }
    return false;
  }

  // Of two rows, the second if there is one. How many times the warp computed.
  __device__ __forceinline__ int strip(int64_t row, bool has_second, int first) const {
    const Doubts doubts = look(row, has_second, first);
    int computed = 0;
    if (__any_sync(0xFFFFFFFF, doubts.of_row != 0)) {
      computed += compute_doubted(row, first, doubts.of_row);
    }
    if (__any_sync(0xFFFFFFFF, doubts.of_second != 0)) {
      computed += compute_doubted(row + 1, first, doubts.of_second);
    }
    return computed;
  }

 private:
  // Lane i has the bits of columns 32 i...
  struct Doubts {
    uint32_t of_row;
    uint32_t of_second;
  };

  // A sum is doubted that is small beside one that is, in its row or its column: one alone is small
  // by chance. What lies outside of the matrix is as if it were.
  __device__ __forceinline__ Doubts look(int64_t row, bool has_second, int first) const {
    const int lane = threadIdx.x % 32;
    float sum[2][kRepairStrip / 32];
#pragma unroll
    for (int i = 0; i < kRepairStrip / 32; ++i) {
      const int n = first + 32 * i + lane;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool is_there = n < args.n && (r == 0 || has_second);
        sum[r][i] = is_there ? args.sums[(row + r) * args.n + n] : 0.0f;
      }
    }
    Doubts found{};
#pragma unroll
    for (int i = 0; i < kRepairStrip / 32; ++i) {
      const uint32_t inside = __ballot_sync(0xFFFFFFFF, first + 32 * i + lane < args.n);
      const uint32_t a = __ballot_sync(0xFFFFFFFF, fabsf(sum[0][i]) < args.least_sum);
      const uint32_t b = __ballot_sync(0xFFFFFFFF, fabsf(sum[1][i]) < args.least_sum);
      if (lane == i) {
        found.of_row = a & (beside(a) | b) & inside;
        found.of_second = has_second ? b & (beside(b) | a) & inside : 0;
      }
    }
    return found;
  }

  // Of each bit the other one of its pair.
  static __device__ __forceinline__ uint32_t beside(uint32_t bits) {
    return (bits >> 1 & 0x55555555) | (bits << 1 & 0xAAAAAAAA);
  }

  __device__ __forceinline__ int compute_doubted(int64_t row, int first, uint32_t doubted) const {
    constexpr uint32_t kColumns = (1u << kRepairColumns) - 1;
    if (!has_values(row)) return 0;
    int computed = 0;
#pragma unroll 1
    for (int column = 0; column < kRepairStrip; column += kRepairColumns) {
      const uint32_t word = __shfl_sync(0xFFFFFFFF, doubted, column / 32);
      const uint32_t wanted = word >> column % 32 & kColumns;
      if (wanted == 0) continue;
      compute(row, first + column, wanted);
      ++computed;
    }
    return computed;
  }

  __device__ __forceinline__ const float* row_of_a(int64_t row) const {
    const int64_t batch = row / args.m;
    return args.a.data + batch * args.a.batch + (row - batch * args.m) * args.a.line;
  }
};

// Of all threads of a block.
__device__ __forceinline__ bool has_lost(const PlanesRepairArgs& args) {
  static_assert(kRepairThreads == kPlaneThreads);
  bool lost = false;
  const auto look = [&](const PlaneFacts& facts) {
    for (int i = threadIdx.x; i < facts.blocks; i += kRepairThreads) lost |= facts.lost[i] != 0;
  };
  look(*args.a_facts);
  look(*args.b_facts);
  return largest_of_block(lost ? 1.0f : 0.0f) > 0;
}

__device__ __forceinline__ void planes_repair(const PlanesRepairArgs& args) {
  constexpr int kLeastExponent = -252;  // with less, no sum is as large as a float
  constexpr int kMostExponent = 254;
  const bool is_scaled = args.a_facts != nullptr;
  const int exponent = is_scaled ? args.a_facts->exponent + args.b_facts->exponent : 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const auto unscale = PowerOfTwo::of(max(-exponent, kLeastExponent));
    args.factors[0] = unscale.first;
    args.factors[1] = unscale.second;
  }
  if (!is_scaled || !has_lost(args)) return;
  const PlanesRepair repair{args, PowerOfTwo::of(min(exponent, kMostExponent))};
  constexpr int kWarps = kRepairThreads / 32;
  int64_t repaired = 0;
  // Pairs of rows of each matrix, then strips of these.
  const int pairs = (args.m + 1) / 2;
  const int64_t of_batch = int64_t{pairs} * args.strips;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < args.batches * of_batch;
       i += int64_t{gridDim.x} * kWarps) {
    const int64_t batch = i / of_batch;
    const auto inside = static_cast<int>(i - batch * of_batch);
    const int row = inside / args.strips * 2;
    repaired +=
        repair.strip(batch * args.m + row, row + 1 < args.m, inside % args.strips * kRepairStrip);
  }
  if (threadIdx.x % 32 == 0 && repaired > args.bearable) {
    *args.precision_flag = static_cast<uint32_t>(min(repaired / args.bearable, int64_t{1000}));
  }
}

}  // namespace fx_fuser

#define FX_FUSER_PLANE_KERNEL(name, threads, Args)                   \
  extern "C" __global__ void __launch_bounds__(threads)              \
      fx_fuser_##name(const __grid_constant__ fx_fuser::Args args) { \
    fx_fuser::name(args);                                            \
  }

// FX_FUSER_PLANES(Epilogue, scalars, Acc, Out, In): of which none decides anything.
#define FX_FUSER_PLANES(...)                                               \
  FX_FUSER_PLANE_KERNEL(plane_largest, fx_fuser::kPlaneThreads, PlaneArgs) \
  FX_FUSER_PLANE_KERNEL(plane_convert, fx_fuser::kPlaneThreads, PlaneArgs) \
  FX_FUSER_PLANE_KERNEL(planes_repair, fx_fuser::kRepairThreads, PlanesRepairArgs)
