// Of the attention by fp16 halves: the warpgroups that bring keys and values as fp32 and make
// halves of them.
#pragma once

#include "attention/attention_split_sure.cuh"

namespace fx_fuser::attention_split {

// Tiles in the order in which consumers want them: of each unit keys, values, the next keys.
template <class L>
struct Feed {
  const typename L::Args& args;
  int index = static_cast<int>(blockIdx.x);
  int tile = 0;
  bool of_values = false;
  // Of the unit; its divisions would take longer than half of a tile's work.
  int first_tile = 0;
  int tiles = 0;
  int head = 0;
  int batch = 0;
  int few_tile;  // the one that has few lines

  __device__ __forceinline__ explicit Feed(const typename L::Args& given) : args(given) {
    // Fewer than 16 lines are one for some threads, whose columns are then single elements.
    constexpr int kFewLines = 16;
    const int lines = L::lines_of(args);
    few_tile = 0 < lines % L::kKeys && lines % L::kKeys < kFewLines ? lines / L::kKeys : -1;
    find_unit();
  }
  __device__ __forceinline__ bool has_tile() const { return index < args.units; }
  // Some units have no tiles: keys that no causal query sees.
  __device__ __forceinline__ void find_unit() {
#pragma unroll 1
    for (; has_tile(); index += static_cast<int>(gridDim.x)) {
      const Unit unit = L::unit_at(args, index);
      tile = first_tile = unit.first_tile;
      tiles = unit.tiles;
      head = unit.head_of_tiles;
      batch = unit.batch;
      if (tile < tiles) break;
    }
  }
  __device__ __forceinline__ bool is_first() const { return tile == first_tile; }
  __device__ __forceinline__ bool has_few() const { return tile == few_tile && !is_first(); }
  __device__ __forceinline__ void next() {
    of_values = !of_values;
    if (of_values || ++tile < tiles) return;
    index += static_cast<int>(gridDim.x);
    find_unit();
  }
  // By one thread. Beyond the last key and the last element zeros arrive.
  __device__ __forceinline__ void bring(typename L::StagedTile& to, uint32_t arrived) const {
    ptx::mbarrier_arrive_expect_tx(arrived, sizeof(typename L::StagedTile));
#pragma unroll 1  // few registers are left to this warp
    for (int box = 0; box < L::kD / kFloats; ++box) {
      ptx::tensor_load(ptx::shared_address(to.box[box]), args.tile_map[of_values], arrived,
                       ptx::kEvictNormal, 2 * box * kFloats, tile * L::kKeys, head, batch);
    }
  }
};

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
    // Of subnormal values no scale makes large ones.
    const float before = scale;
    scale = Scale::of(largest, kHeadRoom).scale;
    return scale == before;
  }
};

// Eight keys by 32 elements, swizzled, as a warp turns them into halves; a lane has the same 16
// bytes of two lines.
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

// This thread's part of the tile, with this scale: keys of four columns. NaN are left out.
struct LargestOfColumns {
  float of[4];

  __device__ __forceinline__ void take(const float4& value) {
    of[0] = fmaxf(of[0], fabsf(value.x));
    of[1] = fmaxf(of[1], fabsf(value.y));
    of[2] = fmaxf(of[2], fabsf(value.z));
    of[3] = fmaxf(of[3], fabsf(value.w));
  }
  __device__ __forceinline__ float largest() const {
    return fmaxf(fmaxf(of[0], of[1]), fmaxf(of[2], of[3]));
  }
  // Do halves keep too little of a column?
  __device__ __forceinline__ bool is_lost(float scale) const {
    bool any = false;
#pragma unroll
    for (const float one : of) any = any || loses(one, scale);
    return any;
  }
  // Has each something beside which a lost one is little?
  __device__ __forceinline__ bool holds_all(float scale) const {
    bool all = true;
#pragma unroll
    for (const float one : of) all = all && one > 0 && !loses(one, scale);
    return all;
  }
};

template <class L>
__device__ __forceinline__ LargestOfColumns make_halves(typename L::Tile& tile,
                                                        const typename L::StagedTile& staged,
                                                        float scale, int thread) {
  constexpr int kBoxes = L::kD / kFloats;
  constexpr int kWarps = L::kProducerThreads / 32;
  constexpr int kStep = kWarps / kBoxes * 8 * kSpan;  // to a warp's next eight keys
  constexpr int kParts = L::kKeys / 8 * kBoxes / kWarps;
  static_assert(kWarps % kBoxes == 0 && kParts % 2 == 0);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int box = warp % kBoxes;
  const uint32_t first = warp / kBoxes * 8 * kSpan;
  // Pointers that move, so that all else of an address is in its instruction.
  uint32_t from[2];
  uint32_t to[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    from[i] = ptx::shared_address(staged.box[box]) + first + Part::from_of(lane, i);
    // The second box of a span has its upper chunks.
    to[i] = ptx::shared_address(tile.part[0][box / 2]) + first +
            (Part::to_of(lane, i) ^ static_cast<uint32_t>(box % 2 * 64));
  }
  LargestOfColumns largest{};
  const auto load = [&](float4(&value)[2], int steps) {
#pragma unroll
    for (int i = 0; i < 2; ++i) value[i] = ptx::load_shared(from[i] + steps * kStep);
  };
  const auto halve = [&](const float4(&value)[2], int steps) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest.take(value[i]);
      const SplitPair left = split(value[i].x * scale, value[i].y * scale);
      const SplitPair right = split(value[i].z * scale, value[i].w * scale);
      ptx::store_shared_pair(to[i] + steps * kStep, make_uint2(left.hi, right.hi));
      ptx::store_shared_pair(to[i] + steps * kStep + sizeof(tile.part[0]),
                             make_uint2(left.lo, right.lo));
    }
  };
  // The next part is on its way while one is made halves: two warps a scheduler hide no latency.
  float4 even[2], odd[2];
  load(even, 0);
#pragma unroll 1
  for (int part = 0; part < kParts; part += 2) {
    load(odd, 1);
    halve(even, 0);
    if (part + 2 < kParts) load(even, 2);
    halve(odd, 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      from[i] += 2 * kStep;
      to[i] += 2 * kStep;
    }
  }
  return largest;
}

// What threads know of a tile, and then the largest of all.
struct OfThreads {
  float largest;
  // Infinite where halves lose too much. Else, of tiles of dO, 1 / the smallest of its queries'
  // sums of |out · dO|: what is lost of a row of dO vᵀ is to be little beside that.
  float strain;

  // Behind it all have read what was staged, and written their halves.
  template <class L>
  __device__ __forceinline__ void meet(typename L::Shared& shared, uint32_t parity, int thread) {
    const uint32_t largest_bits = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(largest));
    const uint32_t strain_bits = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(strain));
    if (thread % 32 == 0) {
      shared.largest[parity][thread / 32] = largest_bits;
      shared.strain[parity][thread / 32] = strain_bits;
    }
    ptx::fence_async_proxy();
    ptx::barrier_sync<L::kProducerThreads>(kProducerBarrier);
    largest = of_warps<L>(shared.largest[parity]);
    strain = of_warps<L>(shared.strain[parity]);
  }

 private:
  template <class L, int kWarps>
  static __device__ __forceinline__ float of_warps(const uint32_t (&bits)[kWarps]) {
    uint32_t all = bits[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) all = max(all, bits[warp]);
    return __uint_as_float(all);
  }
};

// By one thread. What consumers are told of a tile, and of the unit's tiles before it.
template <class L>
__device__ __forceinline__ void tell(typename L::Shared& shared, int slot, const OfThreads& tile,
                                     float scale, bool of_values, bool is_first) {
  BesideTile beside = shared.so_far[of_values];
  if (is_first) beside = BesideTile{};
  beside.factor = L::factor_of(of_values, scale);
  if (tile.largest > 0) {
    const float unscale = Scale::unscale_of(scale);
    const bool fits = tile.largest >= L::least_of(of_values) && tile.largest < infinity() &&
                      tile.strain < infinity();
    // Beside a row, whose halves' norm is 2^14 at least.
    float loss = unscale * (1 + L::kRootOfD * 0x1p-14f * tile.largest * scale);
    if (L::kHasColumns && of_values) loss *= tile.strain;
    beside.all.loss = fmaxf(beside.all.loss, fits ? loss : infinity());
    beside.quantum = fmaxf(beside.quantum, fits ? unscale : infinity());
    beside.all.largest = fmaxf(beside.all.largest, tile.largest);
  }
  shared.so_far[of_values] = beside;
  if (!L::kMultipliesBoth && of_values) beside.all.loss = shared.so_far[0].all.loss;
  shared.beside[slot] = beside;
}

template <class L>
__device__ __forceinline__ void feed_tiles(const typename L::Args& args, typename L::Shared& shared,
                                           int thread) {
  Feed<L> feed(args);
  // Of the tiles that are staged two bits each: is it the first of a unit, has it few lines beside
  // those of tiles ahead?
  uint32_t kinds = 0;
  int count = 0;
  const auto bring_next = [&](int slot) {
    if (!feed.has_tile()) return;
    if (thread == 0) {
      if constexpr (L::kHasColumns) shared.first_column[slot] = L::column_of(args, feed);
      feed.bring(shared.staged[slot], ptx::shared_address(&shared.arrived[slot]));
    }
    kinds |= ((feed.is_first() ? 1u : 0u) | (feed.has_few() ? 2u : 0u)) << 2 * count++;
    feed.next();
  };
#pragma unroll 1
  for (int slot = 0; slot < L::kStaged; ++slot) bring_next(slot);
  typename L::PipelineState pipeline;
  int staged = 0;
  uint32_t staged_phase = 0;
  uint32_t parity = 0;
  GuessedScale guess;  // of keys and of values in turn
  GuessedScale other;
  // Of this thread's columns of the tile ahead, of keys and of values: holds_all.
  bool keys_held = false;
  bool values_held = false;
  bool of_values = false;
#pragma unroll 1
  while (count > 0) {
    // What came before in this block changes no bit of a unit's result.
    const bool is_first = (kinds & 1) != 0;
    const bool has_few = (kinds & 2) != 0;
    if (is_first) guess = GuessedScale{};
    kinds >>= 2;
    --count;
    ptx::mbarrier_wait(ptx::shared_address(&shared.arrived[staged]), staged_phase);
    AttentionQuery column{};  // on its way while halves are made
    if constexpr (L::kHasColumns) {
      if (thread < L::kKeys) column = args.of_queries[shared.first_column[staged] + thread];
    }
    ptx::mbarrier_wait(ptx::shared_address(&shared.empty[pipeline.slot]), pipeline.phase ^ 1);
    OfThreads tile;
    // Few lines are taken for the last ones of the tile ahead.
    bool asks = L::has_results(of_values) && !(has_few && (of_values ? values_held : keys_held));
    bool holds = false;
    bool is_done = false;
#pragma unroll 1
    while (!is_done) {
      const float scale = guess.scale;
      const LargestOfColumns mine =
          make_halves<L>(shared.tile[pipeline.slot], shared.staged[staged], scale, thread);
      const bool is_lost = asks && mine.is_lost(scale);
      holds = mine.holds_all(scale);
      tile = {mine.largest(), is_lost ? infinity() : 0};
      if constexpr (L::kHasColumns) {
        if (thread < L::kKeys && !of_values) shared.column[pipeline.slot][thread] = column.of;
        if (thread < L::kKeys && of_values) {
          tile.strain = fmaxf(tile.strain, strain_of(column, scale));
        }
      }
      tile.template meet<L>(shared, parity, thread);
      parity ^= 1;
      is_done = guess.confirm(tile.largest, L::kKeepsScale && of_values && !is_first);
      asks = L::has_results(of_values);  // with a scale that is not that of the tile ahead
    }
    if (of_values) {
      values_held = holds;
    } else {
      keys_held = holds;
    }
    if (thread == 0) {
      tell<L>(shared, pipeline.slot, tile, guess.scale, of_values, is_first);
      ptx::mbarrier_arrive(ptx::shared_address(&shared.full[pipeline.slot]));
    }
    bring_next(staged);
    const GuessedScale used = guess;
    guess = other;
    other = used;
    of_values = !of_values;
    pipeline.advance();
    if (++staged == L::kStaged) {
      staged = 0;
      staged_phase ^= 1;
    }
  }
}

}  // namespace fx_fuser::attention_split
