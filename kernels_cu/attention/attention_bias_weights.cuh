// Backward of attention with a bias: from a thread's scores to weights and their gradients.
#pragma once

#include "attention/attention_bias_tiles_sm90.cuh"

namespace fx_fuser::attention_bias {

// The queries of a thread's two rows.
struct OfRows {
  AttentionOfQuery row[2];

  static __device__ __forceinline__ OfRows load(const BiasAttentionArgs& args, const Unit& unit) {
    const Place place = Here::place();
    const AttentionOfQuery* from = args.of_query + head_of(args, unit) * args.padded;
    return {{from[place.row_of(unit, 0)], from[place.row_of(unit, 1)]}};
  }
};

// Turns S, which is -inf for a hidden key, and D into P and G. lse is times log2(e). factor: of
// kept weights, by which D is multiplied.
template <class L>
__device__ __forceinline__ void make_one(const AttentionOfQuery& query, float factor, bool dropped,
                                         float& score, float& other) {
  score = ptx::exp2(fmaf(score, kLog2OfE, -query.lse));
  if constexpr (L::kDrops) {
    other = score * (dropped ? -query.delta : fmaf(other, factor, -query.delta));
  } else {
    other = score * (other - query.delta);
  }
}

template <class L>
__device__ __forceinline__ void make_gradients(const BiasAttentionArgs& args,
                                               typename L::Shared& shared, const OfRows& rows,
                                               float (&score)[L::kScores],
                                               float (&other)[L::kScores]) {
  Drops<L> drops{shared};
#pragma unroll
  for (int i = 0; i < L::kScores; ++i) {
    make_one<L>(rows.row[i / 2 % 2], args.dropout.factor, drops.at(i), score[i], other[i]);
  }
}

// The same if columns are queries: `of_queries` has swizzled lines of 16. P becomes the operand of
// dv, so dropped weights are zero.
template <class L>
__device__ __forceinline__ void make_both(const BiasAttentionArgs& args, typename L::Shared& shared,
                                          const Place& place,
                                          const uint8_t (&of_queries)[kBiasOfQueries],
                                          float (&score)[L::kScores], float (&other)[L::kScores]) {
  Drops<L> drops{shared};
  const uint32_t base = ptx::shared_address(of_queries);
#pragma unroll
  for (int i = 0; i < L::kScores / 4; ++i) {  // of eight columns
    const int line = i / 2;
    const uint32_t chunk = (i % 2 * 4 + place.c) ^ (line % 8);
    const float4 both = ptx::load_shared(base + line * kSpan + chunk * 16);
    const AttentionOfQuery query[2] = {{both.x, both.y}, {both.z, both.w}};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = 4 * i + j;
      const bool dropped = drops.at(at);
      make_one<L>(query[j % 2], args.dropout.factor, dropped, score[at], other[at]);
      if (dropped) score[at] = 0;
    }
  }
}

template <class T, int kSums>
__device__ __forceinline__ void store_rows(const BiasAttentionArgs& args, const BiasRows& rows,
                                           const Unit& unit, int count, const float (&sum)[kSums],
                                           float factor) {
  const Place place = Here::place();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = place.row_of(unit, r);
    if (row >= count) continue;
    store_row(row_at<T>(rows, unit.batch, unit.head, row), args.d, place, r, sum, factor);
  }
}

}  // namespace fx_fuser::attention_bias
