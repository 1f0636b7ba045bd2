// The split attention: shared-memory layout, units of work, turns at the tensor core.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "attention/attention_split_args.h"
#include "common/ptx_sm90.cuh"
#include "common/split_sm90.cuh"

namespace fx_fuser::attention_split {

constexpr int kWarpgroup = kAttentionWarpgroup;
constexpr int kSpan = kAttentionSpanBytes;
constexpr int kHalves = 64;  // per span
constexpr int kFloats = 32;  // per span
constexpr int kInstructionK = 16;

// Operands whose largest magnitude is below this may have factors whose products are not normal
// numbers.
constexpr float kLeastOperand = 0x1p-30f;
constexpr float kLeastGradient = 0x1p-70f;  // if the other factor's is at least kLeastOperand

// Named barriers; 0 is __syncthreads'.
constexpr int kTurnBarrier = 1;     // one per consumer
constexpr int kQueriesBarrier = 4;  // likewise
constexpr int kProducerBarrier = 7;

// The producer's bounds over a unit's tiles so far; at the unit's end over all of them. Used by
// attention_split_sure.cuh.
struct alignas(8) TilesSoFar {
  // The split's error in products of rows with the tiles; infinite if a tile fails its test. In the
  // forward: of keys and values.
  float loss;
  float largest;  // magnitude; in the forward: of values
};
// The scale of values that are all zeros so far; its unscale is 0.
constexpr float kScaleOfZeros = 0x1p127f;

// A position in a ring of tiles, slot and phase in one register.
template <int kSlots>
struct Ring {
  uint32_t bits = 0;

  __device__ __forceinline__ int slot() const { return static_cast<int>(bits / 2); }
  __device__ __forceinline__ uint32_t phase() const { return bits % 2; }
  __device__ __forceinline__ void advance() {
    bits += 2;
    if (bits >= 2 * kSlots) bits ^= 2 * kSlots ^ 1;
  }
};

// What forward and backward share. Of::kIs: an AttentionShape.
template <class Of>
struct Tiles {
  static constexpr AttentionShape kIs = Of::kIs;
  static constexpr int kD = kIs.d;
  static constexpr int kKeys = kIs.keys;
  static constexpr int kConsumers = kIs.consumers;
  static constexpr int kProducers = kIs.producers;
  static constexpr int kProducerThreads = kProducers * kWarpgroup;
  static constexpr int kStaged = kIs.staged;
  static constexpr int kSlots = kIs.slots;
  static constexpr int kUnits = kAttentionUnits;
  static_assert(kUnits >= (kStaged + kSlots + 1) / 2 + 2);
  static constexpr int kSums = kD / 2;       // per thread: its rows' results
  static constexpr int kScores = kKeys / 2;  // per thread and tile
  static constexpr int kSpans = kD / kHalves;
  static constexpr float kRootOfD = kD == 64 ? 8 : 11.3137085f;
  static constexpr int kRows = kIs.rows();  // per block
  // Per thread: setmaxnreg redistributes what a block is launched with.
  static constexpr int kLaunchRegisters = 64 * 1024 / kIs.threads() / 8 * 8;
  static constexpr int kConsumerRegisters = kIs.registers;
  static constexpr int kProducerRegisters =
      (kLaunchRegisters * (kConsumers + kProducers) - kConsumerRegisters * kConsumers) /
      kProducers / 8 * 8;

  // Lines of 128 bytes, swizzled: the 16-byte chunk c of line r is stored at chunk c ^ (r % 8). For
  // keys and values alike a line is 64 elements of one key; the lines of all keys are followed by
  // those of the next 64 elements. For q kᵀ the product's k are elements, so this is K-major; for
  // p v they are keys, and this is a transposed operand.
  struct Tile {
    __half part[2 /*hi, lo*/][kSpans][kKeys][kHalves];
  };
  struct StagedTile {
    float box[kD / kFloats][kKeys][kFloats];
  };
  // Halves of a block's rows, hi or lo, in such lines.
  struct Rows {
    __half of[kConsumers][kSpans][kAttentionRows][kHalves];
  };
  // Ahead: what comes first in shared memory. A single base class, at offset 0: for a second one,
  // NVRTC 13.0 keeps a 64-bit pointer and tests it for null, in registers that we lack.
  template <class Ahead>
  struct Pipeline : Ahead {
    Tile tile[kSlots];
    StagedTile staged[kStaged];
    // Read in whole vectors, which must not contain what other threads write.
    uint32_t largest[2][4 * kProducers];  // per producer warp
    uint32_t strain[2][4 * kProducers];   // likewise: OfTile's
    // A ring of units; in the backward for keys and for values. The producer is ahead by at most
    // the tiles in shared memory, and a unit has at least two, so it overwrites none that is in
    // use.
    TilesSoFar so_far[kUnits][2];
    uint64_t full[kSlots];
    uint64_t empty[kSlots];
    uint64_t arrived[kStaged];
    float factor[kSlots];  // per tile: undoes the scale of keys, or is the scale of values
  };
  // With dropout: Dropped's words of the consumers' threads.
  template <class Own>
  struct WithDropped : Own {
    alignas(16) uint32_t dropped[kScores / 32][kConsumers * kWarpgroup];
  };
  template <class Own, bool kDrops>
  using Beside = std::conditional_t<kDrops, WithDropped<Own>, Own>;
  static_assert(sizeof(Tile) == kIs.tile_bytes() && sizeof(StagedTile) == kIs.tile_bytes());
  static_assert(sizeof(Tile) % 1024 == 0 && sizeof(Rows) % 1024 == 0);

  using PipelineState = Ring<kSlots>;

  // Initialises the barriers. Called by one thread, ahead of __syncthreads.
  template <class Shared>
  static __device__ __forceinline__ void begin(Shared& shared) {
    for (int slot = 0; slot < kSlots; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[slot]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[slot]), 4 /*warps*/ * kConsumers);
    }
    for (int slot = 0; slot < kStaged; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.arrived[slot]), 1);
    }
    ptx::fence_mbarrier_init();
  }
};

// A unit of work: a block's rows of one head, and the tiles that they are multiplied by.
struct Unit {
  int batch;
  int head;  // of queries
  int block;
  int first_row;
  int head_of_tiles;
  int first_tile;
  int tiles;  // end of the tiles
};

// Units are ordered by groups of heads, then by blocks, then by heads: what a group's heads read
// stays in L2 while they are computed.
template <class Args>
__device__ __forceinline__ Unit place_at(const Args& args, int index) {
  const int group = index / (args.group * args.blocks);
  const int inside = index - group * args.group * args.blocks;
  const int width = min(args.group, args.all_heads - group * args.group);
  const int head = group * args.group + inside % width;
  const int batch = head / args.heads;
  return {batch, head - batch * args.heads, inside / width, 0, 0, 0, 0};
}

// The head's index among all batches' heads of queries.
template <class Args>
__device__ __forceinline__ int head_of(const Args& args, const Unit& unit) {
  return unit.batch * args.heads + unit.head;
}

template <int kShape>
struct ForwardShape {
  static constexpr AttentionShape kIs = kAttentionShapes[kShape];
};

template <int kShape, bool kDropsWeights>
struct Layout : Tiles<ForwardShape<kShape>> {
  using Base = Tiles<ForwardShape<kShape>>;
  using Args = AttentionSplitArgs;
  static constexpr bool kKeepsLo = Base::kIs.keeps_lo();
  static constexpr bool kDrops = kDropsWeights;
  static constexpr int kParts = Base::kKeys / kAttentionPromoted;  // of a tile's p v
  static_assert(kParts == 1 || kParts == 2);
  // Load the next unit's queries during the end of this one, if there are registers for both.
  static constexpr bool kBeginsEarly = kKeepsLo;
  static constexpr bool kHasColumns = false;
  static constexpr bool kMultipliesBoth = false;  // rows are multiplied by keys only
  static constexpr bool kTellsUnits = true;
  static constexpr bool kScalesLines = false;

  struct LoOfQueries {
    typename Base::Rows query_lo;
  };
  struct Nothing {};
  // A ring of units as computed by the producer, since divisions are slow.
  struct Own : Base::template Pipeline<std::conditional_t<kKeepsLo, Nothing, LoOfQueries>> {
    Unit unit[Base::kUnits];
  };
  using Shared = typename Base::template Beside<Own, kDrops>;
  static_assert(sizeof(Shared) <= Base::kIs.shared_bytes(kDrops));

  // The longest units come first.
  static __device__ __forceinline__ Unit unit_at(const Args& args, int index) {
    Unit unit = place_at(args, index);
    unit.block = args.blocks - 1 - unit.block;
    unit.first_row = unit.block * Base::kRows;
    unit.head_of_tiles = unit.head / args.heads_of_key;
    const int seen = args.is_causal ? min(args.keys, unit.first_row + Base::kRows) : args.keys;
    unit.tiles = (seen + Base::kKeys - 1) / Base::kKeys;
    return unit;
  }
  static __device__ __forceinline__ int lines_of(const Args& args) { return args.keys; }
  // Whether columns of these tiles are columns of results, which must keep their own precision.
  static __device__ __forceinline__ bool has_results(bool of_values) { return of_values; }
  static __device__ __forceinline__ float least_of(bool /*of_values*/) { return kLeastOperand; }
  // Sums of earlier tiles of values have their scale, so it must not grow.
  static constexpr bool kKeepsScale = true;
  static __device__ __forceinline__ float factor_of(bool of_values, float scale) {
    return of_values ? scale : Scale::unscale_of(scale);
  }
};

// The consumers issue products in turn, the first one first, so that one's softmax overlaps the
// others' products.
template <int kConsumers>
struct Turns {
  int consumer;

  static __device__ __forceinline__ void wait_for(int of) {
    ptx::barrier_sync<2 * kWarpgroup>(kTurnBarrier + of);
  }
  static __device__ __forceinline__ void pass_to(int next) {
    ptx::barrier_arrive<2 * kWarpgroup>(kTurnBarrier + next);
  }
  __device__ __forceinline__ void begin() const {
    if (consumer == kConsumers - 1) pass_to(0);
  }
  __device__ __forceinline__ void take() const { wait_for(consumer); }
  __device__ __forceinline__ void pass() const {
    pass_to(consumer == kConsumers - 1 ? 0 : consumer + 1);
  }
  // Matches the last consumer's last pass.
  __device__ __forceinline__ void end() const {
    if (consumer == 0) wait_for(0);
  }
};

}  // namespace fx_fuser::attention_split
