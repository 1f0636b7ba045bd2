// The split attention's backward: the kernel ahead of its passes, which computes each query's lse,
// delta and error bounds.
#pragma once

#include "attention/attention_backward_args.h"
#include "attention/attention_split_repair.cuh"

namespace fx_fuser::attention_backward {

using namespace attention_split;

// One warp per query, also for the padding beyond the last one. With dropout, D and delta lack the
// factor of kept weights, so that a gradient is multiplied by it only once.
template <bool kDrops>
__device__ __forceinline__ void find_deltas(const AttentionDeltaArgs& args) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t index = int64_t{blockIdx.x} * kAttentionDeltaWarps + threadIdx.x / 32;
  if (index >= args.count) return;
  const int head = static_cast<int>(index / args.padded);
  const int query = static_cast<int>(index - int64_t{head} * args.padded);
  const bool is_there = query < args.queries;
  const int seen = args.is_causal ? min(args.keys, query + 1) : args.keys;
  float sum = 0;
  float terms = 0;
  float largest = 0;
  bool has_out = false;
  if (is_there && 4 * lane < args.d) {
    const int batch = head / args.heads;
    const auto load = [&](const AttentionRows& rows) {
      const float* from = row_at(rows, batch, head - batch * args.heads, query);
      return *reinterpret_cast<const float4*>(from + 4 * lane);
    };
    const float4 a = load(args.out);
    const float4 b = load(args.d_out);
    sum = a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w);
    terms = fabsf(a.x * b.x) + fabsf(a.y * b.y) + (fabsf(a.z * b.z) + fabsf(a.w * b.w));
    largest = largest_of(b);
    has_out = a.x != 0 || a.y != 0 || a.z != 0 || a.w != 0;
  }
  sum = sum_of_warp(sum);
  terms = sum_of_warp(terms);
  largest = largest_of_warp(largest);
  if constexpr (kDrops) {
    sum *= args.dropout.kept;
    terms *= args.dropout.kept;
    // If all keys are dropped, D is zero as well and has no error.
    const bool may_be_nothing = !__any_sync(0xFFFFFFFF, has_out) && is_there;
    if (may_be_nothing && are_all_dropped(args.dropout, head, query, seen)) terms = infinity();
  }
  if (lane != 0) return;
  // lse times log2(e) as two floats, to avoid another rounding.
  constexpr float kLog2OfE = 1.44269504088896341f;
  constexpr float kRestOfLog2OfE = static_cast<float>(1.4426950408889634 - double{kLog2OfE});
  float lse = -minus_infinity();
  float rest = 0;
  if (is_there) {
    const float natural = args.lse[int64_t{head} * args.lse_rows + query];
    lse = natural * kLog2OfE;
    rest = fmaf(natural, kLog2OfE, -lse) + natural * kRestOfLog2OfE;
    // A larger rest has no factor near 1; that of an infinity is NaN.
    if (!(fabsf(rest) < 0x1p-8f)) rest = 0;
  }
  // Adds what truncation took from out, and subtracts what it takes from dO vᵀ, from which delta is
  // subtracted: if values have a mean, the two nearly cancel.
  const auto terms_of_out = static_cast<float>(min(seen, kAttentionPromoted));
  const float change = terms_of_out * args.truncated_by_key - args.d_weights_truncated;
  const float delta = fabsf(sum) < infinity() ? fmaf(sum, change, sum) : sum;
  args.of_queries[index] = {{lse, delta}, terms, pack(largest, RestOfLse::of(rest))};
}

}  // namespace fx_fuser::attention_backward
