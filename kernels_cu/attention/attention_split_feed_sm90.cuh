// The split attention: the producer warpgroups, which load fp32 tiles by TMA and convert them to
// fp16 halves in the consumers' ring.
#pragma once

#include "attention/attention_split_sure.cuh"

namespace fx_fuser::attention_split {

// What the producer remembers of a staged tile.
struct KindOfTile {
  static constexpr int kBits = 5;
  uint32_t bits;
  __device__ __forceinline__ bool is_first() const { return (bits & 1) != 0; }  // of a unit
  // Whether it has few lines and follows other tiles of its unit.
  __device__ __forceinline__ bool has_few() const { return (bits & 2) != 0; }
  __device__ __forceinline__ int unit() const {
    return static_cast<int>(bits / 4 % kAttentionUnits);
  }
};
static_assert(4 * kAttentionUnits == 1 << KindOfTile::kBits);

// Iterates over tiles in the consumers' order: of each unit keys, values, the next keys.
template <class L>
struct Feed {
  const typename L::Args& args;
  typename L::Shared& shared;
  int thread;
  int index = static_cast<int>(blockIdx.x);
  int number = -1;  // of the unit, among the block's
  int tile = 0;
  bool of_values = false;
  // The unit's fields, cached: its divisions would take more than half of a tile's time.
  int first_tile = 0;
  int tiles = 0;
  int head = 0;
  int batch = 0;
  int few_tile;  // the tile that has few lines, or -1

  __device__ __forceinline__ Feed(const typename L::Args& given, typename L::Shared& shared_memory,
                                  int number_of_thread)
      : args(given), shared(shared_memory), thread(number_of_thread) {
    // With fewer than 16 lines some threads have one line, whose columns are single elements.
    constexpr int kFewLines = 16;
    const int lines = L::lines_of(args);
    few_tile = 0 < lines % L::kKeys && lines % L::kKeys < kFewLines ? lines / L::kKeys : -1;
    find_unit();
  }
  __device__ __forceinline__ bool has_tile() const { return index < args.units; }
  // Skips units without tiles: keys that no causal query sees.
  __device__ __forceinline__ void find_unit() {
#pragma unroll 1
    for (; has_tile(); index += static_cast<int>(gridDim.x)) {
      const Unit unit = L::unit_at(args, index);
      tile = first_tile = unit.first_tile;
      tiles = unit.tiles;
      head = unit.head_of_tiles;
      batch = unit.batch;
      ++number;
      if constexpr (L::kTellsUnits) {
        if (thread == 0) shared.unit[number % L::kUnits] = unit;
      }
      if (tile < tiles) break;
    }
  }
  __device__ __forceinline__ bool is_first() const { return tile == first_tile; }
  __device__ __forceinline__ bool has_few() const { return tile == few_tile && !is_first(); }
  __device__ __forceinline__ KindOfTile kind() const {
    return {(is_first() ? 1u : 0u) | (has_few() ? 2u : 0u) | number % L::kUnits * 4u};
  }
  __device__ __forceinline__ void next() {
    of_values = !of_values;
    if (of_values || ++tile < tiles) return;
    index += static_cast<int>(gridDim.x);
    find_unit();
  }
  // Called by one thread. TMA fills in zeros beyond the last key and the last element.
  __device__ __forceinline__ void bring(typename L::StagedTile& to, uint32_t arrived) const {
    ptx::mbarrier_arrive_expect_tx(arrived, sizeof(typename L::StagedTile));
#pragma unroll 1  // this warp has few registers
    for (int box = 0; box < L::kD / kFloats; ++box) {
      ptx::tensor_load(ptx::shared_address(to.box[box]), args.tile_map[of_values], arrived,
                       ptx::kEvictNormal, 2 * box * kFloats, tile * L::kKeys, head, batch);
    }
  }
};

// A tile's scale is a guess, which nearly all tiles confirm: they are read from shared memory once,
// and their largest value is found during the conversion. If the halves overflow, or lose more than
// 2^-30 of the largest, the tile is converted again with a scale of its own.
struct GuessedScale {
  static constexpr float kFirst = 0x1p10f;  // suits tiles whose largest is from 2^-5 to 2^5
  static constexpr int kHeadRoom = 5;       // maps the largest to [2^9, 2^10)
  float scale = kFirst;

  // Returns whether the scale suits a tile with this largest value; if not, changes it.
  // `keeps_small`: sums of earlier tiles have this scale, so it must not grow.
  __device__ __forceinline__ bool confirm(float largest, bool keeps_small) {
    const float scaled = largest * scale;
    const bool is_large_enough = keeps_small || scaled >= 0x1p5f || largest == 0;
    // No scale makes halves of an infinity; the tile's finite values keep the scale.
    const bool is_finite = largest < __uint_as_float(0x7F800000);
    if (!is_finite || (scaled < 0x1p15f && is_large_enough)) return true;
    // No scale makes subnormal values large.
    const float before = scale;
    scale = Scale::of(largest, kHeadRoom).scale;
    return scale == before;
  }
};

// The part of a tile that a warp converts at once: eight keys by 32 elements, swizzled. A lane has
// the same 16 bytes of two lines.
struct Part {
  // Lines of a half-warp differ in their third bit, so that 8-byte stores cover all banks.
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

// A producer thread's share of a tile in shared memory: lines of four columns.
template <class L>
struct PartsOfThread {
  static constexpr int kBoxes = L::kD / kFloats;
  static constexpr int kWarps = L::kProducerThreads / 32;
  static constexpr int kStep = kWarps / kBoxes * 8 * kSpan;  // to a warp's next eight keys
  static constexpr int kCount = L::kKeys / 8 * kBoxes / kWarps;
  static_assert(kWarps % kBoxes == 0 && kCount % 2 == 0);
  int lane;
  int box;
  uint32_t first;

  __device__ __forceinline__ uint32_t first_line() const { return first / kSpan; }
  static __device__ __forceinline__ PartsOfThread of(int thread) {
    const int warp = thread / 32;
    return {thread % 32, warp % kBoxes, warp / kBoxes * 8u * kSpan};
  }
  __device__ __forceinline__ uint32_t from(const typename L::StagedTile& staged, int i) const {
    return ptx::shared_address(staged.box[box]) + first + Part::from_of(lane, i);
  }
  // The first of the thread's four columns.
  __device__ __forceinline__ int first_column() const { return box * kFloats + lane % 8 * 4; }
  // A span's second box goes to its upper chunks.
  __device__ __forceinline__ uint32_t to(const typename L::Tile& tile, int i) const {
    return ptx::shared_address(tile.part[0][box / 2]) + first +
           (Part::to_of(lane, i) ^ static_cast<uint32_t>(box % 2 * 64));
  }
};

// The largest magnitudes of a thread's four columns, from their hi: two instructions for four
// values instead of fp32's four. NaN if one is NaN.
struct LargestHalves {
  static constexpr uint32_t kHeld = 0x2800;   // kLost / kBearable
  static constexpr uint32_t kLarge = 0x5000;  // 2^5
  static constexpr uint32_t kEnd = 0x7800;    // 2^15
  uint32_t of[2];

  __device__ __forceinline__ void take(uint32_t left, uint32_t right) {
    of[0] = ptx::larger_halves(of[0], left);
    of[1] = ptx::larger_halves(of[1], right);
  }
  __device__ __forceinline__ uint32_t largest() const {
    const uint32_t both = ptx::larger_halves(of[0], of[1]);
    return max(both & 0xFFFF, both >> 16);
  }
  // Whether each column has a value compared with which the split's error is small.
  __device__ __forceinline__ bool holds_all() const {
    const uint32_t both = ptx::smaller_halves(of[0], of[1]);
    return min(both & 0xFFFF, both >> 16) > kHeld;
  }
};

// A lane's two lines of a part.
struct LinesOfPart {
  float4 value[2];
  float scale[2];
};

// Converts this thread's share of a staged tile to halves. factors: one per line, or null.
template <class L, bool kScalesLines = false>
__device__ __forceinline__ LargestHalves make_halves(typename L::Tile& tile,
                                                     const typename L::StagedTile& staged,
                                                     float scale, int thread,
                                                     const float* factors = nullptr) {
  using Parts = PartsOfThread<L>;
  const Parts parts = Parts::of(thread);
  // Addresses that advance, so that all other offsets are immediates.
  uint32_t from[2];
  uint32_t to[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    from[i] = parts.from(staged, i);
    to[i] = parts.to(tile, i);
  }
  uint32_t factors_at = 0;
  if constexpr (kScalesLines) {
    factors_at = ptx::shared_address(&factors[parts.first_line() + Part::line_of(parts.lane, 0)]);
  }
  constexpr int kLineStep = Parts::kStep / kSpan;
  LargestHalves largest{};
  const auto load = [&](LinesOfPart& to_make, int steps) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to_make.value[i] = ptx::load_shared(from[i] + steps * Parts::kStep);
      if constexpr (kScalesLines) {
        const int line = steps * kLineStep + 2 * i;
        to_make.scale[i] = ptx::load_shared_word(factors_at + line * sizeof(float)) * scale;
      } else {
        to_make.scale[i] = scale;
      }
    }
  };
  const auto halve = [&](const LinesOfPart& lines, int steps) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4& value = lines.value[i];
      const SplitPair left = split(value.x * lines.scale[i], value.y * lines.scale[i]);
      const SplitPair right = split(value.z * lines.scale[i], value.w * lines.scale[i]);
      largest.take(left.hi, right.hi);
      ptx::store_shared_pair(to[i] + steps * Parts::kStep, make_uint2(left.hi, right.hi));
      ptx::store_shared_pair(to[i] + steps * Parts::kStep + sizeof(tile.part[0]),
                             make_uint2(left.lo, right.lo));
    }
  };
  // Loads the next part while one is converted: two warps per scheduler cannot hide the latency.
  LinesOfPart even, odd;
  load(even, 0);
#pragma unroll 1
  for (int part = 0; part < Parts::kCount; part += 2) {
    load(odd, 1);
    halve(even, 0);
    if (part + 2 < Parts::kCount) load(even, 2);
    halve(odd, 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      from[i] += 2 * Parts::kStep;
      to[i] += 2 * Parts::kStep;
    }
    factors_at += 2 * kLineStep * sizeof(float);
  }
  return largest;
}

// The same in fp32, if the halves do not tell enough: they may have overflowed, be zero or rounded.
struct LargestOfColumns {
  float of[4];

  template <class L>
  static __device__ __forceinline__ LargestOfColumns find(const typename L::StagedTile& staged,
                                                          int thread) {
    using Parts = PartsOfThread<L>;
    const Parts parts = Parts::of(thread);
    uint32_t from[2] = {parts.from(staged, 0), parts.from(staged, 1)};
    LargestOfColumns largest{};
#pragma unroll 1
    for (int part = 0; part < Parts::kCount; ++part) {
#pragma unroll
      for (uint32_t& at : from) {
        largest.take(ptx::load_shared(at));
        at += Parts::kStep;
      }
    }
    return largest;
  }
  __device__ __forceinline__ void take(const float4& value) {
    of[0] = ptx::max_nan(of[0], fabsf(value.x));
    of[1] = ptx::max_nan(of[1], fabsf(value.y));
    of[2] = ptx::max_nan(of[2], fabsf(value.z));
    of[3] = ptx::max_nan(of[3], fabsf(value.w));
  }
  __device__ __forceinline__ float largest() const {
    return ptx::max_nan(ptx::max_nan(of[0], of[1]), ptx::max_nan(of[2], of[3]));
  }
  // Whether halves lose too much of a column.
  __device__ __forceinline__ bool is_lost(float scale) const {
    bool any = false;
#pragma unroll
    for (const float one : of) any = any || loses(one, scale);
    return any;
  }
};

// A tile's properties, known to all producer threads.
struct OfTile {
  float scaled;  // the largest magnitude, times the scale
  // Infinite if halves lose too much. Else, for tiles of dO, 1 / the smallest of its queries' sums
  // of |out · dO|: the error of a row of dO vᵀ must be small compared with that sum.
  float strain;
};

// Converts tiles to halves, with guessed scales.
template <class L>
struct Halver {
  typename L::Shared& shared;
  int thread;
  bool has_columns;  // whether this thread's four columns exist
  uint32_t parity = 0;
  GuessedScale guess{};  // of keys and of values, alternately
  GuessedScale other{};
  // holds_all of this thread's columns in the previous tile of keys, and of values.
  bool keys_held = false;
  bool values_held = false;

  // Each word becomes the largest of all producer threads'. It is a barrier, too: all have then
  // read the staged tile and written their halves.
  template <bool kBoth>
  __device__ __forceinline__ void meet(uint32_t& word, uint32_t& other_word) {
    word = __reduce_max_sync(0xFFFFFFFF, word);
    if (kBoth) other_word = __reduce_max_sync(0xFFFFFFFF, other_word);
    if (thread % 32 == 0) {
      shared.largest[parity][thread / 32] = word;
      if (kBoth) shared.strain[parity][thread / 32] = other_word;
    }
    ptx::fence_async_proxy();
    ptx::barrier_sync<L::kProducerThreads>(kProducerBarrier);
    word = of_warps(shared.largest[parity]);
    if (kBoth) other_word = of_warps(shared.strain[parity]);
    parity ^= 1;
  }
  template <int kWarps>
  static __device__ __forceinline__ uint32_t of_warps(const uint32_t (&words)[kWarps]) {
    uint32_t all = words[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) all = max(all, words[warp]);
    return all;
  }

  __device__ __forceinline__ LargestHalves halve(typename L::Tile& tile,
                                                 const typename L::StagedTile& staged,
                                                 bool of_values) const {
    if constexpr (L::kScalesLines) {
      // tell_query wrote the factors with the previous tile, which has the same queries.
      if (of_values) {
        return make_halves<L, true>(tile, staged, guess.scale, thread, shared.factor_of_line);
      }
    }
    return make_halves<L>(tile, staged, guess.scale, thread);
  }

  // Converts a staged tile. query: this thread's, if tiles are of queries.
  __device__ __forceinline__ OfTile make(int slot, const typename L::StagedTile& staged,
                                         bool of_values, bool is_first, bool has_few,
                                         const AttentionQuery& query) {
    constexpr uint32_t kAsks = 1u << 16;
    const bool keeps_small = L::kKeepsScale && of_values && !is_first;
    // A few lines count as if they belonged to the previous tile.
    const bool may_ask = has_columns && L::has_results(of_values);
    bool asks = may_ask && !(has_few && (of_values ? values_held : keys_held));
    bool holds;
    OfTile found;
#pragma unroll 1
    while (true) {
      const LargestHalves halves = halve(shared.tile[slot], staged, of_values);
      holds = halves.holds_all();
      uint32_t largest = halves.largest() | (asks && !holds ? kAsks : 0);
      uint32_t strain = 0;
      if constexpr (L::kHasColumns) {
        if (thread < L::kKeys && !of_values) L::tell_query(shared, slot, thread, query);
        if (thread < L::kKeys && of_values) {
          strain = __float_as_uint(strain_of(query, guess.scale));
        }
      }
      meet<L::kHasColumns>(largest, strain);
      if (largest < LargestHalves::kEnd && (keeps_small || largest >= LargestHalves::kLarge)) {
        const float2 scaled = __half22float2(reinterpret_cast<const __half2&>(largest));
        found = {scaled.x, __uint_as_float(strain)};
        break;
      }
      if (look_closer(staged, of_values, asks, keeps_small, strain, found)) break;
      asks = may_ask;  // the scale is no longer the previous tile's
    }
    if (L::has_results(true) && of_values) values_held = holds;
    if (L::has_results(false) && !of_values) keys_held = holds;
    return found;
  }

  // Tests the tile and its scale in fp32. False if the scale has changed.
  __device__ __forceinline__ bool look_closer(const typename L::StagedTile& staged, bool of_values,
                                              bool asks, bool keeps_small, uint32_t strain,
                                              OfTile& found) {
    const float scale = guess.scale;
    const auto mine = LargestOfColumns::template find<L>(staged, thread);
    if (asks && mine.is_lost(scale)) strain = __float_as_uint(infinity());
    uint32_t largest_bits = __float_as_uint(mine.largest());
    meet<true>(largest_bits, strain);
    const float largest = __uint_as_float(largest_bits);
    const bool fits = largest == 0 || (largest >= L::least_of(of_values) && largest < infinity());
    found = {largest * scale, fits ? __uint_as_float(strain) : infinity()};
    return guess.confirm(largest, keeps_small);
  }
};

// Called by one thread: publishes a tile's factor, and bounds over the unit's tiles so far, to the
// consumers.
template <class L>
__device__ __forceinline__ void tell(typename L::Shared& shared, int slot, const OfTile& tile,
                                     float scale, bool of_values, const KindOfTile& kind) {
  TilesSoFar& told = shared.so_far[kind.unit()][L::kMultipliesBoth && of_values];
  TilesSoFar so_far{};
  if (!kind.is_first() || (!L::kMultipliesBoth && of_values)) so_far = told;
  const float unscale = Scale::unscale_of(scale);
  const bool is_multiplied = L::kMultipliesBoth || !of_values;  // by rows
  float loss = 0;
  if (is_multiplied && tile.scaled != 0) {
    // Relative to a row, whose halves have a norm of at least 2^14.
    loss = unscale * (1 + L::kRootOfD * 0x1p-14f * tile.scaled);
  }
  if (L::kHasColumns && of_values) loss *= tile.strain;
  if (!(tile.strain < infinity())) loss = infinity();
  so_far.loss = fmaxf(so_far.loss, loss);
  if (L::kMultipliesBoth || of_values) {
    so_far.largest = fmaxf(so_far.largest, tile.scaled * unscale);
  }
  float factor = L::factor_of(of_values, scale);
  if (!L::kMultipliesBoth && of_values && so_far.largest == 0) factor = kScaleOfZeros;
  told = so_far;
  shared.factor[slot] = factor;
}

template <class L>
__device__ __forceinline__ void feed_tiles(const typename L::Args& args, typename L::Shared& shared,
                                           int thread) {
  Feed<L> feed(args, shared, thread);
  uint32_t kinds = 0;  // a KindOfTile per staged tile
  static_assert(L::kStaged * KindOfTile::kBits <= 32);
  int count = 0;
  const auto bring_next = [&](int slot) {
    if (!feed.has_tile()) return;
    if (thread == 0) {
      if constexpr (L::kHasColumns) shared.first_column[slot] = L::column_of(args, feed);
      feed.bring(shared.staged[slot], ptx::shared_address(&shared.arrived[slot]));
    }
    kinds |= feed.kind().bits << KindOfTile::kBits * count++;
    feed.next();
  };
#pragma unroll 1
  for (int slot = 0; slot < L::kStaged; ++slot) bring_next(slot);
  typename L::PipelineState pipeline;
  int staged = 0;
  uint32_t staged_phase = 0;
  Halver<L> halver{shared, thread, PartsOfThread<L>::of(thread).first_column() < args.d};
  bool of_values = false;
#pragma unroll 1
  while (count > 0) {
    // Reset, so that a unit's results do not depend on the block's earlier units.
    const KindOfTile kind{kinds};
    if (kind.is_first()) halver.guess = GuessedScale{};
    kinds >>= KindOfTile::kBits;
    --count;
    ptx::mbarrier_wait(ptx::shared_address(&shared.arrived[staged]), staged_phase);
    AttentionQuery column{};  // loaded while halves are made
    if constexpr (L::kHasColumns) {
      if (thread < L::kKeys) column = args.of_queries[shared.first_column[staged] + thread];
    }
    ptx::mbarrier_wait(ptx::shared_address(&shared.empty[pipeline.slot()]), pipeline.phase() ^ 1);
    const OfTile tile = halver.make(pipeline.slot(), shared.staged[staged], of_values,
                                    kind.is_first(), kind.has_few(), column);
    if (thread == 0) {
      tell<L>(shared, pipeline.slot(), tile, halver.guess.scale, of_values, kind);
      ptx::mbarrier_arrive(ptx::shared_address(&shared.full[pipeline.slot()]));
    }
    bring_next(staged);
    const GuessedScale used = halver.guess;
    halver.guess = halver.other;
    halver.other = used;
    of_values = !of_values;
    pipeline.advance();
    if (++staged == L::kStaged) {
      staged = 0;
      staged_phase ^= 1;
    }
  }
}

}  // namespace fx_fuser::attention_split
