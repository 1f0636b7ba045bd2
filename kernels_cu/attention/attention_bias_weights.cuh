// Of the backward of attention with a bias: weights and their gradients, of a thread's scores.
#pragma once

#include "attention/attention_bias_tiles_sm90.cuh"

namespace fx_fuser::attention_bias {

// Of a thread's two rows, where these are queries.
struct OfRows {
  AttentionOfQuery row[2];

  static __device__ __forceinline__ OfRows load(const BiasAttentionArgs& args, const Unit& unit) {
    const Place place = Here::place();
    const AttentionOfQuery* from = args.of_query + head_of(args, unit) * args.padded;
    return {{from[place.row_of(unit, 0)], from[place.row_of(unit, 1)]}};
  }
};

// S, with a hidden key's -inf, and D become P and G. lse is by log2(e).
__device__ __forceinline__ void make_one(const AttentionOfQuery& query, float& score,
                                         float& other) {
  score = ptx::exp2(fmaf(score, kLog2OfE, -query.lse));
  other = score * (other - query.delta);
}

template <int kScores>
__device__ __forceinline__ void make_gradients(const OfRows& rows, float (&score)[kScores],
                                               float (&other)[kScores]) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) make_one(rows.row[i / 2 % 2], score[i], other[i]);
}

// The same of columns that are queries, of which lines of 16, swizzled, lie here.
template <int kScores>
__device__ __forceinline__ void make_both(const Place& place,
                                          const uint8_t (&of_queries)[kBiasOfQueries],
                                          float (&score)[kScores], float (&other)[kScores]) {
  const uint32_t base = ptx::shared_address(of_queries);
#pragma unroll
  for (int i = 0; i < kScores / 4; ++i) {  // of eight columns
    const int line = i / 2;
    const uint32_t chunk = (i % 2 * 4 + place.c) ^ (line % 8);
    const float4 both = ptx::load_shared(base + line * kSpan + chunk * 16);
    const AttentionOfQuery query[2] = {{both.x, both.y}, {both.z, both.w}};
#pragma unroll
    for (int j = 0; j < 4; ++j) make_one(query[j % 2], score[4 * i + j], other[4 * i + j]);
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
