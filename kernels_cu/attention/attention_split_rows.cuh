// The split attention: a consumer thread's rows. Queries as halves, softmax, results.
//
// With g = lane / 4 and c = lane % 4 a thread has rows g and g + 8 of its warp's 16, and columns 2c
// and 2c + 1 of each eight.
#pragma once

#include "attention/attention_dropout.cuh"
#include "attention/attention_split_sure.cuh"

namespace fx_fuser::attention_split {

// Largest and sum over a row's four lanes.
__device__ __forceinline__ float largest_of_row(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, 2));
}
__device__ __forceinline__ float sum_of_row(float value) {
  value += __shfl_xor_sync(0xFFFFFFFF, value, 1);
  return value + __shfl_xor_sync(0xFFFFFFFF, value, 2);
}

// The position of this thread's rows.
struct Place {
  int consumer;
  int row;  // the first of the two, of the warpgroup's 64
  int g;
  int c;

  static __device__ __forceinline__ Place of(int consumer, int thread) {
    const int lane = thread % 32;
    return {consumer, thread / 32 * 16 + lane / 4, lane / 4, lane % 4};
  }
  // The row's index in its head.
  __device__ __forceinline__ int row_of(const Unit& unit, int r) const {
    return unit.first_row + consumer * kAttentionRows + row + 8 * r;
  }
};

// A consumer thread's indices, recomputed at each use, so that no register holds them in between.
template <int kConsumers>
struct ConsumerThread {
  static __device__ __forceinline__ int consumer() {
    return static_cast<int>(ptx::thread_index()) / kWarpgroup;
  }
  static __device__ __forceinline__ Place place() {
    const int thread = static_cast<int>(ptx::thread_index());
    return Place::of(thread / kWarpgroup, thread % kWarpgroup);
  }
  static __device__ __forceinline__ Turns<kConsumers> turns() { return {consumer()}; }
};

__device__ __forceinline__ float* row_at(const AttentionRows& rows, int batch, int head, int row) {
  return rows.data + batch * rows.batch_stride + head * rows.head_stride + row * rows.row_stride;
}

// A thread's rows in fp32, as loaded.
template <int kD>
struct RowValues {
  float2 of[2][kD / 8];

  // from: null if there is no such row.
  __device__ __forceinline__ void load(const float* const (&from)[2], int d, const Place& place) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < kD / 8; ++i) {
        const bool reads = from[r] != nullptr && 8 * i < d;
        of[r][i] = reads ? *reinterpret_cast<const float2*>(from[r] + 2 * place.c + 8 * i)
                         : make_float2(0, 0);
      }
    }
  }
};

// Rows as the first operand of products: halves in registers, or in shared memory in the same lines
// as tiles. Each row has a power of two as its scale.
template <int kD, bool kKeepsHi, bool kKeepsLo>
struct RowHalves {
  static constexpr int kSteps = kD / kInstructionK;
  static constexpr bool kHasHi = kKeepsHi;
  static constexpr bool kHasLo = kKeepsLo;
  uint32_t hi[kKeepsHi ? kSteps : 1][4];
  uint32_t lo[kKeepsLo ? kSteps : 1][4];
  float unscale[2];

  // hi_at, lo_at: the warpgroup's shared memory, for halves that are not kept in registers.
  __device__ __forceinline__ void make(const RowValues<kD>& value, const Place& place,
                                       uint32_t hi_at, uint32_t lo_at) {
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = 0;
#pragma unroll
      for (const float2& both : value.of[r]) {
        largest = fmaxf(largest, fmaxf(fabsf(both.x), fabsf(both.y)));
      }
      const Scale of_row = Scale::of(largest_of_row(largest));
      scale[r] = of_row.scale;
      unscale[r] = of_row.unscale;
    }
#pragma unroll
    for (int i = 0; i < kD / 8; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const SplitPair both = split(value.of[r][i].x * scale[r], value.of[r][i].y * scale[r]);
        const uint32_t at = place_of(place, i, r);
        if constexpr (kKeepsHi) {
          hi[i / 2][i % 2 * 2 + r] = both.hi;
        } else {
          ptx::store_shared_word(hi_at + at, both.hi);
        }
        if constexpr (kKeepsLo) {
          lo[i / 2][i % 2 * 2 + r] = both.lo;
        } else {
          ptx::store_shared_word(lo_at + at, both.lo);
        }
      }
    }
  }
  __device__ __forceinline__ void load(const float* const (&from)[2], int d, const Place& place,
                                       uint32_t hi_at, uint32_t lo_at) {
    RowValues<kD> value;
    value.load(from, d, place);
    make(value, place, hi_at, lo_at);
  }
  // The sum of squares of each row's scaled values, from its hi. The same in a row's lanes.
  __device__ __forceinline__ void squares(const Place& place, uint32_t hi_at,
                                          float (&sum)[2]) const {
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int i = 0; i < kD / 8; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t both;
        if constexpr (kKeepsHi) {
          both = hi[i / 2][i % 2 * 2 + r];
        } else {
          both = __float_as_uint(ptx::load_shared_word(hi_at + place_of(place, i, r)));
        }
        const float2 value = __half22float2(reinterpret_cast<const __half2&>(both));
        sum[r] = fmaf(value.x, value.x, fmaf(value.y, value.y, sum[r]));
      }
    }
#pragma unroll
    for (float& one : sum) one = sum_of_row(one);
  }
  // Where a thread's two of eight columns, from 8i on, are in shared memory.
  static __device__ __forceinline__ uint32_t place_of(const Place& place, int i, int r) {
    const uint32_t line = i / 8 * kAttentionRows + place.row + 8 * r;
    return line * kSpan + (i % 8 ^ place.g) * 16 + place.c * 4;
  }
  // Makes what the warpgroup's threads have stored visible to their wgmma.
  static __device__ __forceinline__ void publish(const Place& place) {
    ptx::fence_async_proxy();
    ptx::barrier_sync<kWarpgroup>(kQueriesBarrier + place.consumer);
  }

  __device__ __forceinline__ void pin() {
    if constexpr (kKeepsHi) {
#pragma unroll
      for (auto& step : hi) ptx::pin(step);
    }
    if constexpr (kKeepsLo) {
#pragma unroll
      for (auto& step : lo) ptx::pin(step);
    }
  }
};

// exp2(score - largest so far) as the first operand of products, times 2^15: fp16 ends at 2^16, and
// the halves' error is then 2^-40 of a row's largest.
template <class L>
struct Weights {
  static constexpr int kSteps = L::kKeys / kInstructionK;
  static constexpr float kExponent = 15;
  static constexpr float kUnscale = 0x1p-15f;
  uint32_t hi[kSteps][4];
  uint32_t lo[kSteps][4];

  __device__ __forceinline__ void pin() {
#pragma unroll
    for (auto& step : hi) ptx::pin(step);
#pragma unroll
    for (auto& step : lo) ptx::pin(step);
  }
};

// Online softmax: a row's state from tile to tile.
struct RowState {
  float largest[2];  // logit, times log2(e)
  float sum[2];      // over this thread's columns
  float rescale[2];  // factor of earlier results

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = minus_infinity();
      sum[r] = 0;
      rescale[r] = 1;
    }
  }

  // Turns a tile's scores into weights. unscale: the factor from score to logit. Dropped weights
  // count in the sum: softmax comes before dropout.
  template <class L>
  __device__ __forceinline__ void take(typename L::Shared& shared, const float (&score)[L::kScores],
                                       const float (&unscale)[2], Weights<L>& weights) {
    float offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float high = score[2 * r];
#pragma unroll
      for (int i = 0; i < L::kScores; i += 4) {
        high = fmaxf(high, fmaxf(score[i + 2 * r], score[i + 2 * r + 1]));
      }
      const float before = largest[r];
      largest[r] = fmaxf(before, largest_of_row(high) * unscale[r]);
      rescale[r] = ptx::exp2(before - largest[r]);
      offset[r] = largest[r] - Weights<L>::kExponent;
    }
    float of_tile[2] = {0, 0};  // summed per tile: one long sum would have a larger error
#pragma unroll
    for (int i = 0; i < L::kScores; i += 4) {
      uint32_t dropped = 0;
      if constexpr (L::kDrops) dropped = Dropped<L>::word_of(shared, i / 32);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float left = ptx::exp2(fmaf(score[i + 2 * r], unscale[r], -offset[r]));
        const float right = ptx::exp2(fmaf(score[i + 2 * r + 1], unscale[r], -offset[r]));
        of_tile[r] += left + right;
        const int at = i + 2 * r;
        const SplitPair both = split(Dropped<L>::has(dropped, at) ? 0 : left,
                                     Dropped<L>::has(dropped, at + 1) ? 0 : right);
        weights.hi[i / 8][i / 4 % 2 * 2 + r] = both.hi;
        weights.lo[i / 8][i / 4 % 2 * 2 + r] = both.lo;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = fmaf(sum[r], rescale[r], of_tile[r]);
  }
};

// Hides scores from column `end` on: columns that do not exist, or that a causal row does not see.
template <int kScores>
__device__ __forceinline__ void hide_from(const Place& place, const int (&end)[2],
                                          float (&score)[kScores]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int left = end[r] - 2 * place.c;
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        if (2 * i + t >= left) score[i + 2 * r + t] = minus_infinity();
      }
    }
  }
}

// Likewise if rows are keys: hides columns below `first`, causal queries ahead of a row's own.
template <int kScores>
__device__ __forceinline__ void hide_below(const Place& place, const int (&first)[2],
                                           float (&score)[kScores]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int left = first[r] - 2 * place.c;
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        if (2 * i + t < left) score[i + 2 * r + t] = minus_infinity();
      }
    }
  }
}

template <int kSums>
__device__ __forceinline__ void store_row(float* row, int d, const Place& place, int r,
                                          const float (&sum)[kSums], float factor) {
#pragma unroll
  for (int i = 0; i < kSums; i += 4) {
    if (2 * i < d) {
      *reinterpret_cast<float2*>(row + 2 * place.c + 2 * i) =
          make_float2(sum[i + 2 * r] * factor, sum[i + 2 * r + 1] * factor);
    }
  }
}

// The largest magnitude of four of a thread's results of a row; NaN only if all four are.
template <int kSums>
__device__ __forceinline__ float largest_of_four(const float (&sum)[kSums], int r) {
  return fmaxf(fmaxf(fabsf(sum[2 * r]), fabsf(sum[2 * r + 1])),
               fmaxf(fabsf(sum[2 * r + 4]), fabsf(sum[2 * r + 5])));
}

// The largest magnitude of a row's results, or NaN. The same in a row's lanes.
template <int kSums>
__device__ __forceinline__ float largest_in_row(const float (&sum)[kSums], int r) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kSums; i += 4) {
#pragma unroll
    for (int t = 0; t < 2; ++t) largest = ptx::max_nan(largest, fabsf(sum[i + 2 * r + t]));
  }
  largest = ptx::max_nan(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
  return ptx::max_nan(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
}

// The logarithm of 2^offset · sum, rounded once: it is all that the backward recomputes a row's
// weights from.
__device__ __forceinline__ float logarithm_of(float offset, float sum) {
  const uint32_t bits = __float_as_uint(sum);
  const float whole = static_cast<float>(static_cast<int>(bits >> 23) - 127);
  const float fraction = log2f(__uint_as_float((bits & 0x7FFFFF) | 0x3F800000));
  const float most = offset + whole;
  if (!(sum >= 0x1p-126f && sum < infinity() && fabsf(most) < infinity())) {
    return (offset + log2f(sum)) * kLn2;
  }
  const float of_whole = most - offset;
  const float lost = offset - (most - of_whole) + (whole - of_whole);
  const float hi = most + fraction;
  const float of_fraction = hi - most;
  const float lo = most - (hi - of_fraction) + (fraction - of_fraction) + lost;
  constexpr float kRestOfLn2 = static_cast<float>(0.69314718055994531 - double{kLn2});
  return fmaf(hi, kLn2, fmaf(hi, kRestOfLn2, lo * kLn2));
}

__device__ __forceinline__ float* lse_of(const AttentionSplitArgs& args, const Unit& unit,
                                         int query) {
  return args.lse + int64_t{head_of(args, unit)} * args.lse_rows + query;
}

// Stores out and lse. value_scale: the scale of `result`.
template <class L>
__device__ __forceinline__ void store(const AttentionSplitArgs& args, const Unit& unit,
                                      const Place& place, const RowState& state,
                                      const float (&sum)[2], float value_scale,
                                      const float (&result)[L::kSums]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = place.row_of(unit, r);
    const bool is_there = query < args.queries;
    if (is_there) {
      const float factor = Scale::unscale_of(value_scale) / sum[r];
      float* to = row_at(args.out, unit.batch, unit.head, query);
      store_row(to, args.d, place, r, result, L::kDrops ? factor * args.dropout.factor : factor);
    }
    if (args.lse != nullptr && place.c == 0 && query < args.lse_rows) {
      // The same rounding as in `take`, whose error is in the sum.
      const float offset = state.largest[r] - Weights<L>::kExponent;
      const float lse = logarithm_of(offset, sum[r]);
      *lse_of(args, unit, query) = is_there ? lse : -minus_infinity();
    }
  }
}

// The accuracy test of a warp's results, at the end of its unit, from bounds of the unit's tiles.
template <class L>
struct UnitToTest {
  const AttentionSplitArgs& args;
  const Unit& unit;
  const Place& place;
  const float (&sum)[2];  // of a row's weights
  float value_scale;
  const TilesSoFar& tiles;

  __device__ __forceinline__ bool is_there(int r) const {
    return place.row_of(unit, r) < args.queries;
  }
  __device__ __forceinline__ float columns() const {
    return static_cast<float>(unit.tiles * L::kKeys);
  }
  __device__ __forceinline__ bool drops_all(int r) const {
    if constexpr (!L::kDrops) return false;
    const int query = place.row_of(unit, r);
    const int seen = args.is_causal ? min(args.keys, query + 1) : args.keys;
    return are_all_dropped(args.dropout, head_of(args, unit), query, seen);
  }
  // A sufficient test from cheap bounds.
  __device__ __forceinline__ bool is_clearly_sure(const float (&unscale)[2],
                                                  const float (&result)[L::kSums]) const {
    bool all_sure = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float some = largest_of_four(result, r);
      all_sure &=
          attention_split::is_clearly_sure(unscale[r], args.scale, L::kRootOfD, tiles.loss, some,
                                           sum[r], columns(), tiles.largest * value_scale) |
          !is_there(r);
    }
    return __all_sync(0xFFFFFFFF, all_sure);
  }
  // squares: sums of squares of the rows' scaled values.
  __device__ __forceinline__ bool is_sure(const float (&unscale)[2], const float (&squares)[2],
                                          const float (&result)[L::kSums]) const {
    const float quantum = Scale::unscale_of(value_scale);
    bool all_sure = tiles.loss < infinity();  // values may fail even if a query is all zeros
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float largest = largest_in_row(result, r) * (quantum / sum[r]);  // by all lanes
      // Weights add up to 1, and each has the error of a scaled value. Both are compared ahead of
      // dropout's factor.
      const float of_weights = sqrtf(columns()) * tiles.largest / sum[r];
      const bool sure = is_product_sure(unscale[r], args.scale, squares[r], kLeastOperand,
                                        tiles.loss, kBearable) &&
                        (is_result_sure(largest, kLost * (quantum + of_weights)) ||
                         (largest == 0 && drops_all(r)));
      all_sure = all_sure && (sure || !is_there(r));
    }
    return __all_sync(0xFFFFFFFF, all_sure);
  }
};

}  // namespace fx_fuser::attention_split
