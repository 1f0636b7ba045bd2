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

// Of one matrix of a batch, by a warp.
struct PlanesRepair {
  const PlanesRepairArgs& args;
  PowerOfTwo scale;
  const float* a;
  const float* b;
  float* sums;

  // Columns n... of a row: those of `wanted`, a bit each.
  __device__ __forceinline__ void compute(int row, int n, uint32_t wanted) const {
    const int lane = threadIdx.x % 32;
    const float* of_row = a + row * args.a.line;
    const int columns = min(kRepairColumns, args.n - n);
    float sum[kRepairColumns] = {};
#pragma unroll 1
    for (int k = lane; k < args.k; k += 32) {
      const float value = of_row[k * args.a.k];
      const float* of_column = b + n * args.b.line + k * args.b.k;
#pragma unroll
      for (int c = 0; c < kRepairColumns; ++c) {
        if (c < columns) sum[c] = fmaf(value, *of_column, sum[c]);
        of_column += args.b.line;
      }
    }
    float own = 0;
#pragma unroll
    for (int c = 0; c < kRepairColumns; ++c) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        sum[c] += __shfl_xor_sync(0xFFFFFFFF, sum[c], distance);
      }
      if (lane == c) own = sum[c];
    }
    // Lanes beyond the columns have no bit.
    if (wanted >> lane & 1) sums[int64_t{row} * args.n + n + lane] = scale.times(own);
    __syncwarp();
  }

  // Is the row of a more than zeros? Zeros times anything finite are what the sums were.
  __device__ __forceinline__ bool has_values(int row) const {
    const float* of_row = a + row * args.a.line;
#pragma unroll 1
    for (int first = 0; first < args.k; first += 32) {
      const int k = first + static_cast<int>(threadIdx.x) % 32;
      const float value = k < args.k ? of_row[k * args.a.k] : 0.0f;
      if (__any_sync(0xFFFFFFFF, value != 0)) return true;
    }
    return false;
  }

  // Of two rows, the second if there is one. How many times the warp computed.
  __device__ __forceinline__ int strip(int row, int first) const {
    const Doubts doubts = look(row, first);
    int computed = 0;
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
      const uint32_t doubted = r == 0 ? doubts.of_row : doubts.of_second;
      if (!__any_sync(0xFFFFFFFF, doubted != 0)) continue;
      computed += compute_doubted(row + r, first, doubted);
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
  __device__ __forceinline__ Doubts look(int row, int first) const {
    const int lane = threadIdx.x % 32;
    const bool has_second = row + 1 < args.m;
    const float* from = sums + int64_t{row} * args.n + first + lane;
    float sum[2][kRepairStrip / 32];
#pragma unroll
    for (int i = 0; i < kRepairStrip / 32; ++i) {
      const int n = first + 32 * i + lane;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool is_there = n < args.n && (r == 0 || has_second);
        sum[r][i] = is_there ? from[r * args.n + 32 * i] : 0.0f;
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

  __device__ __forceinline__ int compute_doubted(int row, int first, uint32_t doubted) const {
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
  const auto scale = PowerOfTwo::of(min(exponent, kMostExponent));
  constexpr int kWarps = kRepairThreads / 32;
  int64_t repaired = 0;
  // Pairs of rows of each matrix, then strips of these.
  const uint32_t units = args.batches * args.pairs.size * args.strips.size;
  for (uint32_t i = blockIdx.x * kWarps + threadIdx.x / 32; i < units; i += gridDim.x * kWarps) {
    const uint32_t row = divide(i, args.strips);
    const uint32_t batch = divide(row, args.pairs);
    const PlanesRepair repair{args, scale, args.a.data + batch * args.a.batch,
                              args.b.data + batch * args.b.batch,
                              args.sums + int64_t{batch} * args.m * args.n};
    repaired += repair.strip(static_cast<int>(row - batch * args.pairs.size) * 2,
                             static_cast<int>(i - row * args.strips.size) * kRepairStrip);
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
