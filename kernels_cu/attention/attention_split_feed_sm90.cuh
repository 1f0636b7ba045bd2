// Of the attention by fp16 halves: the warpgroup that brings keys and values as fp32 and makes
// halves of them.
#pragma once

#include "attention/attention_split_tiles_sm90.cuh"
#include "common/split_sm90.cuh"

namespace fx_fuser::attention_split {

// Tiles in the order in which consumers want them: of each unit keys, values, the next keys.
template <class L>
struct Feed {
  const AttentionSplitArgs& args;
  int index = static_cast<int>(blockIdx.x);
  int tile = 0;
  int tiles = 0;
  bool of_values = false;

  __device__ __forceinline__ explicit Feed(const AttentionSplitArgs& given) : args(given) {
    count();
  }
  __device__ __forceinline__ bool has_tile() const { return index < args.units; }
  __device__ __forceinline__ void count() {
    if (has_tile()) tiles = unit_at<L>(args, index).tiles;
  }
  __device__ __forceinline__ void next() {
    of_values = !of_values;
    if (of_values || ++tile < tiles) return;
    tile = 0;
    index += static_cast<int>(gridDim.x);
    count();
  }
};

// By one thread. Beyond the last key and the last element zeros arrive.
template <class L>
__device__ __forceinline__ void bring(const AttentionSplitArgs& args, typename L::Shared& shared,
                                      const Feed<L>& feed, int slot) {
  const Unit unit = unit_at<L>(args, feed.index);
  const TensorMap& map = feed.of_values ? args.v_map : args.k_map;
  const uint32_t arrived = ptx::shared_address(&shared.arrived[slot]);
  ptx::mbarrier_arrive_expect_tx(arrived, sizeof(typename L::StagedTile));
#pragma unroll
  for (int box = 0; box < L::kD / kFloats; ++box) {
    ptx::tensor_load(ptx::shared_address(shared.staged[slot].box[box]), map, arrived,
                     ptx::kEvictNormal, 2 * box * kFloats, feed.tile * L::kKeys,
                     unit.head / args.heads_of_key, unit.batch);
  }
}

// A tile's scale is a guess, which nearly all tiles confirm: they are read from shared memory once,
// and their largest value is found on the way. Where the halves would overflow, or lose more than
// 2^-30 of the largest, the tile is done again with a scale of its own.
struct GuessedScale {
  static constexpr float kFirst = 0x1p10f;  // for tiles whose largest is from 2^-5 to 2^5
  static constexpr int kHeadRoom = 5;       // the largest comes to [2^9, 2^10)
  float scale = kFirst;

  // Is it one for such a tile? Else it becomes one. `keeps_small`: sums of earlier tiles have this
  // scale, so that it does not grow.
  __device__ __forceinline__ bool confirm(float largest, bool keeps_small) {
    const float scaled = largest * scale;
    const bool is_large_enough = keeps_small || scaled >= 0x1p5f || largest == 0;
    // Of an infinity no scale makes halves; what is finite beside it keeps its own.
    const bool is_finite = largest < __uint_as_float(0x7F800000);
    if (!is_finite || (scaled < 0x1p15f && is_large_enough)) return true;
    scale = Scale::of(largest, kHeadRoom).scale;
    return false;
  }
};

// Eight keys by 32 elements, swizzled, as a warp turns them into halves; a lane has the same 16
// bytes of two lines.
template <class L>
struct Part {
  // Lines of a half-warp differ in their third bit: then 8-byte stores meet all banks.
  static __device__ __forceinline__ int line_of(int lane, int i) {
    return (lane >> 3 & 1) * 4 + (lane >> 4) + 2 * i;
  }
  static __device__ __forceinline__ uint32_t from_of(int lane, int i) {
    const int line = line_of(lane, i);
    return line * kSpan + (lane % 8 ^ line) * 16;
  }
  static __device__ __forceinline__ uint32_t to_of(int lane, int i) {
    const int line = line_of(lane, i);
    return line * kSpan + (lane % 8 / 2 ^ line) * 16 + lane % 2 * 8;
  }
};

__device__ __forceinline__ float larger(float largest, const float4& value) {
  return fmaxf(largest, largest_of(value));
}

// This thread's part of the tile, with this scale; its largest magnitude, NaN left out.
template <class L>
__device__ __forceinline__ float make_halves(typename L::Tile& tile,
                                             const typename L::StagedTile& staged, float scale,
                                             int thread) {
  constexpr int kBoxes = L::kD / kFloats;
  constexpr int kWarps = kWarpgroup / 32;
  constexpr int kAtOnce = 2;  // parts, of two lines each
  constexpr int kStep = kWarps / kBoxes * 8 * kSpan;  // to a warp's next eight keys
  constexpr int kParts = L::kKeys / 8 * kBoxes / kWarps;
  static_assert(kWarps % kBoxes == 0 && kParts % kAtOnce == 0);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int box = warp % kBoxes;
  const uint32_t first = warp / kBoxes * 8 * kSpan;
  const uint32_t from = ptx::shared_address(staged.box[box]) + first;
  // The second box of a span has its upper chunks.
  const uint32_t upper = box % 2 * 64;
  const uint32_t to = ptx::shared_address(tile.part[0][box / 2]) + first;
  float largest = 0;
#pragma unroll 1
  for (int part = 0; part < kParts; part += kAtOnce) {
    float4 value[kAtOnce][2];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        value[j][i] = ptx::load_shared(from + (part + j) * kStep + Part<L>::from_of(lane, i));
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4& of = value[j][i];
        largest = larger(largest, of);
        const SplitPair left = split(of.x * scale, of.y * scale);
        const SplitPair right = split(of.z * scale, of.w * scale);
        const uint32_t at = to + (part + j) * kStep + (Part<L>::to_of(lane, i) ^ upper);
        ptx::store_shared_pair(at, make_uint2(left.hi, right.hi));
        ptx::store_shared_pair(at + sizeof(tile.part[0]), make_uint2(left.lo, right.lo));
      }
    }
  }
  return largest;
}

// The largest of all threads. Behind it all have read what was staged, and written their halves.
template <class L>
__device__ __forceinline__ float largest_of_all(typename L::Shared& shared, float largest,
                                                int parity, int thread) {
  const uint32_t of_warp = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(largest));
  if (thread % 32 == 0) shared.largest[parity][thread / 32] = of_warp;
  ptx::fence_async_proxy();
  ptx::barrier_sync<kWarpgroup>(kProducerBarrier);
  uint32_t all = shared.largest[parity][0];
#pragma unroll
  for (int warp = 1; warp < kWarpgroup / 32; ++warp) all = max(all, shared.largest[parity][warp]);
  return __uint_as_float(all);
}

template <class L>
__device__ __forceinline__ void feed_tiles(const AttentionSplitArgs& args,
                                           typename L::Shared& shared, int thread) {
  Feed<L> ahead(args);
  for (int slot = 0; slot < L::kStaged && ahead.has_tile(); ++slot) {
    if (thread == 0) bring<L>(args, shared, ahead, slot);
    ahead.next();
  }
  typename L::PipelineState pipeline;
  int staged = 0;
  uint32_t staged_phase = 0;
  int parity = 0;
  GuessedScale of_keys, of_values;
  for (Feed<L> feed(args); feed.has_tile(); feed.next()) {
    // What came before in this block changes no bit of a unit's result.
    if (feed.tile == 0) (feed.of_values ? of_values : of_keys) = GuessedScale{};
    GuessedScale guess = feed.of_values ? of_values : of_keys;
    ptx::mbarrier_wait(ptx::shared_address(&shared.arrived[staged]), staged_phase);
    ptx::mbarrier_wait(ptx::shared_address(&shared.empty[pipeline.slot]), pipeline.phase ^ 1);
    bool is_done = false;
    while (!is_done) {
      const float mine = make_halves<L>(shared.tile[pipeline.slot], shared.staged[staged],
                                        guess.scale, thread);
      const float largest = largest_of_all<L>(shared, mine, parity, thread);
      parity ^= 1;
      is_done = guess.confirm(largest, feed.of_values && feed.tile > 0);
    }
    (feed.of_values ? of_values : of_keys) = guess;
    if (thread == 0) {
      shared.factor[pipeline.slot] =
          feed.of_values ? guess.scale : Scale::unscale_of(guess.scale);
      ptx::mbarrier_arrive(ptx::shared_address(&shared.full[pipeline.slot]));
      if (ahead.has_tile()) bring<L>(args, shared, ahead, staged);
    }
    if (ahead.has_tile()) ahead.next();
    pipeline.advance();
    if (++staged == L::kStaged) {
      staged = 0;
      staged_phase ^= 1;
    }
  }
}

}  // namespace fx_fuser::attention_split
