// The comb gemm's epilogue (linear_combs_sm90.cuh): from a warp's sums through the epilogue and
// shared memory to global memory, by TMA.
#pragma once

#include <type_traits>

#include "common/convert.cuh"
#include "common/epilogue_math.cuh"
#include "common/ptx_sm90.cuh"
#include "linear/linear_combs_args.h"

namespace fx_fuser::combs {

constexpr int kWarpgroup = 128;
constexpr int kSubtileM = 64;     // rows of one wgmma
constexpr int kFirstBarrier = 1;  // named barriers: this + the consumer's number

struct Tile {
  int comb;  // of its rows, if they belong to one
  int m;     // first row, within the comb
  int n;     // first column, counted from the aligned vector in which a line of the comb begins
};

// How many of a matrix's lines a comb has.
__device__ __forceinline__ int lines_of(int all, int comb) {
  return (all - comb + kCombs - 1) / kCombs;
}

// d[4i + 2r + t] of a subtile: row 16 warp + lane / 4 + 8r, column 8i + 2 (lane % 4) + t.
template <class L>
using Sums = float[L::kSubtiles][L::kSums];

template <class Epilogue, int kScalars, class Out>
__device__ __forceinline__ uint32_t packed(const CombArgs& args, float first, float second) {
  constexpr int kScalarSlots = kScalars > 0 ? kScalars : 1;
  static_assert(sizeof(Out) == 2 && kScalars <= kMaxScalars);
  float scalar[kScalarSlots];
#pragma unroll
  for (int s = 0; s < kScalarSlots; ++s) scalar[s] = args.scalar[s];
  const float in[2][1] = {{first}, {second}};
  const Vec<Out, 2> pair = convert_pair<Out>(static_cast<float>(Epilogue{}(in[0], scalar)),
                                             static_cast<float>(Epilogue{}(in[1], scalar)));
  return reinterpret_cast<const uint32_t&>(pair);
}

// Results whose rows belong to one comb. Each warp stores its own: 16 rows and 64 columns are one
// TMA box, staged in one of the warp's slots, round robin.
template <class L, class Epilogue, int kScalars, class Out>
struct TailOfRows {
  const CombArgs& args;
  uint8_t (&slots)[L::kSlots][kCombSlotBytes];
  int first_row;  // of the warp in the tile
  int slot = 0;

  __device__ __forceinline__ TailOfRows(const CombArgs& of, typename L::Shared& shared)
      : args(of), slots(shared.slot[threadIdx.x / 32]) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    first_row = warp / 4 * L::kSubtiles * kSubtileM + warp % 4 * kCombWarpRows;
  }

  // Applies the epilogue to the sums of 64 columns and stages the results.
  __device__ __forceinline__ void stage(const float* sums) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint8_t* row = slots[slot] + lane / 4 * kCombSpanBytes + lane % 4 * 4;
#pragma unroll
    for (int chunk = 0; chunk < 8; ++chunk) {
      uint8_t* at = row + (chunk ^ lane / 4) * 16;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* pair = sums + 4 * chunk + 2 * r;
        *reinterpret_cast<uint32_t*>(at + r * 8 * kCombSpanBytes) =
            packed<Epilogue, kScalars, Out>(args, pair[0], pair[1]);
      }
    }
  }

  // Stores the columns from `begin` to `end` of one span without TMA.
  __device__ __forceinline__ void store_part(const Tile& tile, int row, int begin, int end) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int rows = min(lines_of(args.m, tile.comb) - row, kCombWarpRows);
    auto* out = static_cast<Out*>(args.out_data) - args.out.offset[tile.comb];
#pragma unroll 1
    for (int vector = begin / 8 * 8; vector < end; vector += 8) {
      const int at = vector + lane % 8;
      const int chunk = vector % kCombSpan / 8;
#pragma unroll 1
      for (int r = lane / 8; r < kCombWarpRows; r += 4) {
        const uint8_t* from = slots[slot] + r * kCombSpanBytes + (chunk ^ r % 8) * 16 + at % 8 * 2;
        if (begin <= at && at < end && r < rows) {
          const int64_t line = int64_t{row + r} * kCombs + tile.comb;
          out[line * args.out_pitch + at] = *reinterpret_cast<const Out*>(from);
        }
      }
    }
    __syncwarp();
  }

  // Stores 64 columns of 16 rows from the slot. TMA writes whole vectors, so the tensor map has
  // only those, and it cannot store to a coordinate ahead of the tensor: both ends go without it.
  __device__ __forceinline__ void store(const Tile& tile, int row, int column) const {
    const int before = args.out.offset[tile.comb];
    const int end = args.n + before;
    const int whole_end = end / 8 * 8;
    const bool is_begin = column == 0 && before > 0;
    if (is_begin) {
      store_part(tile, row, before, min(end, kCombSpan));
    } else {
      if (threadIdx.x % 32 == 0 && column < whole_end) {
        ptx::tensor_store(args.out.map[tile.comb], ptx::shared_address(slots[slot]), column, row);
      }
      if (whole_end < end && end - column <= kCombSpan) {
        store_part(tile, row, whole_end, end);
      }
    }
  }

  __device__ __forceinline__ void finish(const Tile& tile, const Sums<L>& sum) {
    const bool is_first = threadIdx.x % 32 == 0;
    const int before = args.out.offset[tile.comb];
#pragma unroll
    for (int j = 0; j < L::kSubtiles; ++j) {
      const int row = tile.m + first_row + j * kSubtileM;
#pragma unroll
      for (int span = 0; span < L::kSpansN; ++span) {
        const int column = tile.n + span * kCombSpan;
        if (column >= args.n + before) continue;
        if (is_first) ptx::bulk_wait_read<L::kSlots - 1>();
        __syncwarp();  // the slot is free
        stage(&sum[j][span * kCombSpan / 2]);
        ptx::fence_async_proxy();
        __syncwarp();
        store(tile, row, column);
        if (is_first) ptx::bulk_commit();
        slot = slot == L::kSlots - 1 ? 0 : slot + 1;
      }
    }
  }
};

// Results that are out's transpose: a warpgroup's 64 rows are 64 of out's columns, the span of TMA
// boxes with 8 of out's rows each. A slot has 64 of out's rows.
template <class L, class Epilogue, int kScalars, class Out>
struct TailOfTransposed {
  static constexpr int kBoxRows = 8;
  static constexpr int kBoxBytes = kBoxRows * kCombSpanBytes;
  static constexpr int kBoxes = kCombSpan / kBoxRows;  // of a slot
  static constexpr int kOfWarp = kBoxes / 4;
  static constexpr int kSlotBytes = 4 * kCombSlotBytes;
  static_assert(kBoxes * kBoxBytes == kSlotBytes && L::kStepN % kBoxRows == 0);

  const CombArgs& args;
  uint8_t* slots;
  int consumer;
  int slot = 0;

  __device__ __forceinline__ TailOfTransposed(const CombArgs& of, typename L::Shared& shared)
      : args(of), consumer(static_cast<int>(threadIdx.x) / kWarpgroup) {
    slots = shared.slot[consumer * 4][0];
  }

  // Applies the epilogue to the sums of `boxes` times eight columns and stages the results.
  __device__ __forceinline__ void stage(uint8_t* to, const float* sums, int boxes) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    const int lane = thread % 32;
    const int column = thread / 32 * 2;  // in chunks of eight; the next chunk for rows 8 to 15
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      if (box >= boxes) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* of = sums + 4 * box + 2 * r;
        const uint32_t pair = packed<Epilogue, kScalars, Out>(args, of[0], of[1]);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const int row = lane % 4 * 2 + t;
          *reinterpret_cast<uint16_t*>(to + box * kBoxBytes + row * kCombSpanBytes +
                                       ((column + r) ^ row) * 16 + lane / 4 * 2) =
              static_cast<uint16_t>(pair >> 16 * t);
        }
      }
    }
  }

  __device__ __forceinline__ void finish(const Tile& tile, const Sums<L>& sum) {
    constexpr int kUsedBoxes = L::kStepN / kBoxRows;  // of a tile
    const bool is_first = threadIdx.x % 32 == 0;
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
#pragma unroll
    for (int j = 0; j < L::kSubtiles; ++j) {
      const int column = tile.m + (consumer * L::kSubtiles + j) * kSubtileM;
      if (column >= args.m) continue;
#pragma unroll
      for (int span = 0; span < L::kSpansN; ++span) {
        const int boxes = min(kUsedBoxes - span * kBoxes, kBoxes);
        uint8_t* at = slots + slot * kSlotBytes;
        if (is_first) ptx::bulk_wait_read<L::kSlots - 1>();
        ptx::barrier_sync<kWarpgroup>(kFirstBarrier + consumer);  // the slot is free
        stage(at, &sum[j][span * kCombSpan / 2], boxes);
        ptx::fence_async_proxy();
        ptx::barrier_sync<kWarpgroup>(kFirstBarrier + consumer);
        if (is_first) {
#pragma unroll 1
          for (int box = warp * kOfWarp; box < min((warp + 1) * kOfWarp, boxes); ++box) {
            ptx::tensor_store(args.out.map[0], ptx::shared_address(at + box * kBoxBytes), column,
                              tile.n + span * kCombSpan + box * kBoxRows);
          }
          ptx::bulk_commit();
        }
        slot = slot == L::kSlots - 1 ? 0 : slot + 1;
      }
    }
  }
};

template <class L, class Epilogue, int kScalars, class Out>
using TailOf = std::conditional_t<L::kAlongA, TailOfRows<L, Epilogue, kScalars, Out>,
                                  TailOfTransposed<L, Epilogue, kScalars, Out>>;

}  // namespace fx_fuser::combs
