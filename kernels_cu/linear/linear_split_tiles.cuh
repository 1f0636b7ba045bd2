// Of the split product: what a block's warps share beside the ring, and which tile is whose.
#pragma once

#include "common/ptx.cuh"
#include "common/split_sm90.cuh"
#include "linear/linear_split_args.h"

namespace fx_fuser::linear_split {

constexpr int kTileM = kLinearTileM;
constexpr int kTileN = kLinearTileN;
constexpr int kTileK = kLinearTileK;
constexpr int kWarpN = 16;                  // rows of the weight whose sums a warp holds
constexpr int kHeadRoom = 5;                // of a guessed scale: see Scale::of
constexpr int kBatchM = 32;                 // rows of x that the epilogue handles at once
constexpr int kExchangePitch = kWarpN + 4;  // such that the accumulators' layout has no conflicts
constexpr int kTransposedPitch = kBatchM + 8;  // the same of its pairs
constexpr int kMostRedone = 8;                 // one tile of so many is worth exact scales

// ---- shared memory ------------------------------------------------------------------------------

// Of any tile of a warp: has it results to be computed plainly? kImprecise: for what the split
// loses.
enum Precision : int { kSure, kUnsure, kImprecise };

// Of a consumer's warp, for the epilogue.
struct Exchange {
  union {
    float z[kBatchM][kExchangePitch];              // [m][n]
    float transposed_z[kWarpN][kTransposedPitch];  // [n][m]
  };
  alignas(16) SplitRowFactors x_factors[kTileM];
  float bias[kTileM];  // of the rows of x where the result is stored transposed, else of kWarpN
  // Where the tile's plane begins, in the order of LinearResult::place.
  void* place[LinearResult::kFirstOperand + kMaxInputs];
};

// Of a block, beside its ring of stages.
struct Shared {
  Exchange exchange[kLinearConsumerThreads / 32];
  int64_t began;                 // the multiprocessor's clock at the kernel's start
  uint64_t ordinary_tiles_done;  // the consumers are through with the ordinary tiles, and any_redo
                                 // is final
  uint32_t any_redo;             // of this block's tiles
};
static_assert(sizeof(Shared) == kLinearTilesBytes);

// A pair a slot of the ring.
template <int kStages>
struct Barriers {
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

// Where in a ring a reader or writer is.
struct PipelineState {
  int slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++slot == stages) {
      slot = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ PipelineState before(int stages) const {
    return slot > 0 ? PipelineState{slot - 1, phase} : PipelineState{stages - 1, phase ^ 1};
  }
  template <class Barriers>
  __device__ __forceinline__ void wait_until_full(Barriers& barriers) const {
    ptx::mbarrier_wait(ptx::shared_address(&barriers.full[slot]), phase);
  }
  template <class Barriers>
  __device__ __forceinline__ void wait_until_empty(Barriers& barriers) const {
    ptx::mbarrier_wait(ptx::shared_address(&barriers.empty[slot]), phase ^ 1);
  }
};

// ---- which tile ---------------------------------------------------------------------------------

struct Tile {
  int m;      // first row of x
  int n;      // first row of the weight
  int plane;  // of x's split and scales
  Plane at;
};

// Plane by plane. In one: columns of kLinearGroupM tiles of x; in a group the weight is
// read once.
__device__ __forceinline__ Tile tile_at(const LinearSplitArgs& args, int index) {
  const uint32_t plane = divide(static_cast<uint32_t>(index), args.plane_tiles);
  const uint32_t in_plane = index - plane * args.plane_tiles.size;
  const uint32_t group = divide(in_plane, args.group_tiles);
  const uint32_t inside = in_plane - group * args.group_tiles.size;
  const bool is_last = group == args.whole_groups;
  const uint32_t width = is_last ? args.last_width.size : kLinearGroupM;
  const uint32_t column = is_last ? divide(inside, args.last_width) : inside / kLinearGroupM;
  const uint32_t row = group * kLinearGroupM + inside - column * width;
  return {static_cast<int>(row * kTileM), static_cast<int>(column * kTileN),
          static_cast<int>(plane), plane_at(args.planes, plane)};
}

// What all of a warp's lanes, or one thread alone, know to be the same.
struct OfWarp {
  __device__ __forceinline__ bool operator()(bool value) const {
    return __any_sync(0xFFFFFFFF, value) != 0;
  }
};
struct OfThread {
  __device__ __forceinline__ bool operator()(bool value) const { return value; }
};

// A block's tiles, in the order in which all of its warps take them: every one, then once more
// those where a consumer's warp saw that the scale of a row was guessed too large.
struct TileScheduler {
  const LinearSplitArgs& args;
  Shared& shared;
  bool redoing = false;
  int index = static_cast<int>(blockIdx.x - gridDim.x);

  // To the next tile; false where there is none. uniform: OfWarp or OfThread.
  template <class Uniform>
  __device__ __forceinline__ bool next(const Uniform& uniform) {
    for (;;) {
      index += gridDim.x;
      if (index >= args.tiles) {
        if (redoing) return false;
        ptx::mbarrier_wait(ptx::shared_address(&shared.ordinary_tiles_done), 0);
        if (!uniform(shared.any_redo != 0)) return false;
        redoing = true;
        index = static_cast<int>(blockIdx.x);
      }
      if (!redoing || uniform(args.redo[index] != 0)) return true;
    }
  }

  // A consumer's warp, of each ordinary tile.
  __device__ __forceinline__ void report(bool failed) const {
    if (threadIdx.x % 32 != 0) return;
    reinterpret_cast<uint8_t*>(args.redo + index)[threadIdx.x / 32] = failed;
    if (failed) atomicOr(&shared.any_redo, 1);
    if (index + static_cast<int>(gridDim.x) >= args.tiles) {
      ptx::mbarrier_arrive(ptx::shared_address(&shared.ordinary_tiles_done));
    }
  }
};

// One thread of a block, after all tiles: were many of them done again?
__device__ __forceinline__ void report_guesses(const LinearSplitArgs& args, const Shared& shared) {
  if (args.guesses_flag == nullptr || shared.any_redo == 0) return;
  int tiles = 0;
  int redone = 0;
  for (int index = blockIdx.x; index < args.tiles; index += gridDim.x) {
    ++tiles;
    redone += args.redo[index] != 0;
  }
  // The kernel takes as long as its slowest block.
  if (redone * kMostRedone > tiles)
    *args.guesses_flag = static_cast<uint32_t>(redone * kMostRedone / tiles);
}

}  // namespace fx_fuser::linear_split
