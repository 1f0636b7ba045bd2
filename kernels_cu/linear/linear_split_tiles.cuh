// The split product: what a block's warps share in addition to the ring, and the tile scheduler.
#pragma once

#include "common/ptx.cuh"
#include "common/split_sm90.cuh"
#include "linear/linear_split_args.h"

namespace fx_fuser::linear_split {

constexpr int kTileM = kLinearTileM;
constexpr int kTileN = kLinearTileN;
constexpr int kTileK = kLinearTileK;
constexpr int kWarpN = 16;                     // rows of the weight whose sums a warp holds
constexpr int kHeadRoom = 5;                   // of a guessed scale: see Scale::of
constexpr int kBatchM = 32;                    // rows of x that the epilogue handles at once
constexpr int kExchangePitch = kWarpN + 4;     // free of bank conflicts in the accumulators' layout
constexpr int kTransposedPitch = kBatchM + 8;  // the same for pairs
constexpr int kMostRedone = 8;  // if more than one tile in this many is redone, exact scales pay

// ---- shared memory ------------------------------------------------------------------------------

// Whether any tile of a warp has results to repair in plain fp32. kUnsure: z is not finite.
// kImprecise: the split's error may be too large.
enum Precision : int { kSure, kUnsure, kImprecise };

// Shared memory of one consumer warp, for the epilogue.
struct Exchange {
  union {
    float z[kBatchM][kExchangePitch];              // [m][n]
    float transposed_z[kWarpN][kTransposedPitch];  // [n][m]
  };
  alignas(16) SplitRowFactors x_factors[kTileM];
  float bias[kTileM];  // for the rows of x if the result is stored transposed, else for kWarpN
  // The addresses of the tile's plane, in the order of LinearResult::place.
  void* place[LinearResult::kFirstOperand + kMaxInputs];
};

// A block's shared memory in addition to its ring of stages.
struct Shared {
  Exchange exchange[kLinearConsumerThreads / 32];
  int64_t began;                 // clock64() at the kernel's start
  uint64_t ordinary_tiles_done;  // mbarrier: the consumers have finished the first pass over the
                                 // tiles, and any_redo is final
  uint32_t any_redo;             // whether any of this block's tiles must be recomputed
};
static_assert(sizeof(Shared) == kLinearTilesBytes);

// A pair of mbarriers per slot of the ring.
template <int kStages>
struct Barriers {
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

// A reader's or writer's position in a ring.
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

// ---- tile scheduler -----------------------------------------------------------------------------

struct Tile {
  int m;      // first row of x
  int n;      // first row of the weight
  int plane;  // of x's split and scales
  Plane at;
};

// Plane by plane. Within a plane, in groups of kLinearGroupM tiles of x, column by column: a group
// reads the weight once.
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

// Makes a value uniform across a warp's lanes, or for a single thread.
struct OfWarp {
  __device__ __forceinline__ bool operator()(bool value) const {
    return __any_sync(0xFFFFFFFF, value) != 0;
  }
};
struct OfThread {
  __device__ __forceinline__ bool operator()(bool value) const { return value; }
};

// A block's tiles, in the same order for all of its warps: all of them, then again those in which a
// consumer warp found that the scale guessed for a row was too large.
struct TileScheduler {
  const LinearSplitArgs& args;
  Shared& shared;
  bool redoing = false;
  int index = static_cast<int>(blockIdx.x - gridDim.x);

  // Advances to the next tile; false if there is none. uniform: OfWarp or OfThread.
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

  // Called by each consumer warp for each tile of the first pass.
  __device__ __forceinline__ void report(bool failed) const {
    if (threadIdx.x % 32 != 0) return;
    reinterpret_cast<uint8_t*>(args.redo + index)[threadIdx.x / 32] = failed;
    if (failed) atomicOr(&shared.any_redo, 1);
    if (index + static_cast<int>(gridDim.x) >= args.tiles) {
      ptx::mbarrier_arrive(ptx::shared_address(&shared.ordinary_tiles_done));
    }
  }
};

// Called by one thread of a block after all tiles: tells the host if many of them were recomputed.
__device__ __forceinline__ void report_guesses(const LinearSplitArgs& args, const Shared& shared) {
  if (args.guesses_flag == nullptr || shared.any_redo == 0) return;
  int tiles = 0;
  int redone = 0;
  for (int index = blockIdx.x; index < args.tiles; index += gridDim.x) {
    ++tiles;
    redone += args.redo[index] != 0;
  }
  // One block is enough to report: the kernel takes as long as its slowest block.
  if (redone * kMostRedone > tiles)
    *args.guesses_flag = static_cast<uint32_t>(redone * kMostRedone / tiles);
}

}  // namespace fx_fuser::linear_split
