// Of the split product: shared memory, and which tile is whose.
#pragma once

#include "common/ptx_sm90.cuh"
#include "common/split_sm90.cuh"
#include "linear/linear_split_args.h"

namespace fx_fuser::linear_split {

constexpr int kConsumers = 2;
constexpr int kWarpgroup = 128;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
constexpr int kTileM = kLinearTileM;
constexpr int kTileN = kLinearTileN;
constexpr int kTileK = kLinearTileK;
constexpr int kWarpN = 16;                  // rows of the weight whose sums a warp holds
constexpr int kHeadRoom = 5;                // of a guessed scale: see Scale::of
constexpr int kBatchM = 32;                 // rows of x that the epilogue handles at once
constexpr int kExchangePitch = kWarpN + 4;  // such that the accumulators' layout has no conflicts
constexpr int kTransposedPitch = kBatchM + 8;  // the same of its pairs
constexpr int kMostAgain = 8;                  // one tile of so many is worth exact scales
static_assert(kLinearThreads == (kConsumers + 1) * kWarpgroup);
// What a block is launched with is all that its warps can give and take: with more, they wait for
// ever.
constexpr int kLaunchRegisters = 64 * 1024 / kLinearThreads / 8 * 8;
static_assert(kConsumerRegisters * kConsumers + kProducerRegisters <=
              kLaunchRegisters * (kConsumers + 1));

// ---- shared memory ------------------------------------------------------------------------------

// 64 of k. Rows are 128 bytes, swizzled: the 16-byte chunk c of row r lies at chunk c ^ (r % 8).
struct WeightSlot {
  union {
    float box[kTileK / kLinearBox][kTileN][kLinearBox];      // [k][n][k]
    float n_major[kTileN / kLinearBox][kTileK][kLinearBox];  // [n][k][n]
  };
};
struct XSlot {
  __half part[2 /*hi, lo*/][kTileM][kTileK];
};
static_assert(sizeof(WeightSlot) + sizeof(XSlot) == kLinearStageBytes);
static_assert(sizeof(WeightSlot) % 1024 == 0 && sizeof(XSlot) % 1024 == 0);

// Two rings: a slot of the weight is free once it is in registers, one of x once its products are
// done, more than a turn later.
struct Barriers {
  uint64_t full[kLinearStages];
  uint64_t empty[kLinearStages];
};

// Of any tile of a warp: has it results to be computed plainly? kImprecise: for what the split
// loses.
enum Doubt : int { kSure, kUnsure, kImprecise };

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

struct Shared {
  WeightSlot weight[kLinearStages];
  XSlot x[kLinearStages];
  Exchange exchange[kConsumers * kWarpgroup / 32];
  Barriers of_weight;
  Barriers of_x;
  int64_t began;                 // the multiprocessor's clock at the kernel's start
  uint64_t ordinary_tiles_done;  // the consumers are through with the ordinary tiles, and any_again
                                 // is final
  uint32_t any_again;            // of this block's tiles
};
static_assert(sizeof(Shared) == kLinearSharedBytes);

// Where in a ring a reader or writer is.
struct PipelineState {
  int slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kLinearStages) {
      slot = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void wait_until_full(Barriers& barriers) const {
    ptx::mbarrier_wait(ptx::shared_address(&barriers.full[slot]), phase);
  }
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

// A block's tiles, in the order in which all of its warps take them: every one, then once more
// those where a consumer's warp saw that the scale of a row was guessed too large.
struct TileScheduler {
  const LinearSplitArgs& args;
  Shared& shared;
  bool again = false;
  int index = static_cast<int>(blockIdx.x - gridDim.x);

  // To the next tile; false where there is none. `uniform` says of a warp's lanes, which all ask
  // the same, what they all know to be the same.
  template <class Uniform>
  __device__ __forceinline__ bool next(const Uniform& uniform) {
    for (;;) {
      index += gridDim.x;
      if (index >= args.tiles) {
        if (again) return false;
        ptx::mbarrier_wait(ptx::shared_address(&shared.ordinary_tiles_done), 0);
        if (!uniform(shared.any_again != 0)) return false;
        again = true;
        index = static_cast<int>(blockIdx.x);
      }
      if (!again || uniform(args.again[index] != 0)) return true;
    }
  }

  // A consumer's warp, of each ordinary tile.
  __device__ __forceinline__ void report(bool failed) const {
    if (threadIdx.x % 32 != 0) return;
    reinterpret_cast<uint8_t*>(args.again + index)[threadIdx.x / 32] = failed;
    if (failed) atomicOr(&shared.any_again, 1);
    if (index + static_cast<int>(gridDim.x) >= args.tiles) {
      ptx::mbarrier_arrive(ptx::shared_address(&shared.ordinary_tiles_done));
    }
  }
};

}  // namespace fx_fuser::linear_split
