// The split attention's backward: from S and D to P and G.
#pragma once

#include "attention/attention_backward_tiles_sm90.cuh"
#include "attention/attention_split_rows.cuh"

namespace fx_fuser::attention_backward {

using namespace attention_split;

// A thread's S and D, then P and G, of its rows and a tile.
template <class L>
struct Scores {
  float score[L::kScores];
  float other[L::kMakesRows ? L::kScores : 1];  // D, then G
  float score_unscale[2];
  float other_unscale[2];

  // query_of(i): the queries of the eight columns from 2i on.
  template <class QueryOf>
  __device__ __forceinline__ void make(typename L::Shared& shared, const QueryOf& query_of,
                                       Weights<L>& weights, float (&largest)[2]) {
#pragma unroll
    for (int i = 0; i < L::kScores; i += 4) {
      const auto of_queries = query_of(i);
      uint32_t dropped = 0;
      if constexpr (L::kDrops) dropped = Dropped<L>::word_of(shared, i / 32);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float weight[2];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const int at = i + 2 * r + t;
          const AttentionOfQuery query = of_queries.at(r, t);
          weight[t] = ptx::exp2(fmaf(score[at], score_unscale[r], -query.lse));
          if constexpr (L::kMakesRows) {
            const float less = fmaf(other[at], other_unscale[r], -query.delta);
            other[at] = weight[t] * (Dropped<L>::has(dropped, at) ? -query.delta : less);
            largest[r] = fmaxf(largest[r], fabsf(other[at]));
          }
          if (Dropped<L>::has(dropped, at)) weight[t] = 0;
        }
        if constexpr (L::kMakesValues) {
          // 2^15 as a factor: added to the exponent, it would cost bits of its fraction.
          constexpr float kScale = 1 / Weights<L>::kUnscale;
          float factor[2] = {kScale, kScale};
          if constexpr (!L::kMakesRows) {  // tell_query stored it there, times the query's factor
            factor[0] = of_queries.at(r, 0).delta;
            factor[1] = of_queries.at(r, 1).delta;
          }
          const SplitPair both = split(weight[0] * factor[0], weight[1] * factor[1]);
          weights.hi[i / 8][i / 4 % 2 * 2 + r] = both.hi;
          weights.lo[i / 8][i / 4 % 2 * 2 + r] = both.lo;
        }
      }
    }
  }

  // Converts G to halves, with one scale per row. unscale: undoes it.
  __device__ __forceinline__ void halve(const float (&largest)[2], Weights<L>& gradient,
                                        float (&unscale)[2]) {
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Scale of_row = Scale::of(largest_of_row(largest[r]));
      scale[r] = of_row.scale;
      unscale[r] = of_row.unscale;
    }
#pragma unroll
    for (int i = 0; i < L::kScores; i += 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = i + 2 * r;
        const SplitPair both = split(other[at] * scale[r], other[at + 1] * scale[r]);
        gradient.hi[i / 8][i / 4 % 2 * 2 + r] = both.hi;
        gradient.lo[i / 8][i / 4 % 2 * 2 + r] = both.lo;
      }
    }
  }
};

}  // namespace fx_fuser::attention_backward
