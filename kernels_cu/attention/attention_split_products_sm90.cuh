// The split attention: the products of rows with tiles, by wgmma.
#pragma once

#include "attention/attention_split_rows.cuh"
#include "common/wgmma_sm90.cuh"

namespace fx_fuser::attention_split {

using Product = ptx::WgmmaOfRegisters<__half>;

// score = rows · tileᵀ, still in the scales of both. hi_at, lo_at: shared memory of halves that are
// not in registers.
template <class Rows, int kScores, class Tile>
__device__ __forceinline__ void issue_scores(float (&score)[kScores], const Rows& rows,
                                             const void* hi_at, const void* lo_at,
                                             const Tile& tile) {
  constexpr int kStep = kInstructionK * 2 / 16;  // in units of 16 bytes, as in descriptors
  constexpr int kOfSpan = kHalves / kInstructionK;
  constexpr int kSpanStep = 2 * kScores * kSpan / 16;
  constexpr int kRowsSpanStep = kAttentionRows * kSpan / 16;
  const auto descriptor = [](const void* at) {
    return ptx::matrix_descriptor(ptx::uniform(ptx::shared_address(at)));
  };
  const uint64_t tile_hi = descriptor(tile.part[0]);
  const uint64_t tile_lo = descriptor(tile.part[1]);
  uint64_t hi = 0;
  uint64_t lo = 0;
  if constexpr (!Rows::kHasHi) hi = descriptor(hi_at);
  if constexpr (!Rows::kHasLo) lo = descriptor(lo_at);
  const auto run_hi = [&](int i, uint64_t of_tile, bool accumulate) {
    const int at = i / kOfSpan * kSpanStep + i % kOfSpan * kStep;
    if constexpr (Rows::kHasHi) {
      Product::run(score, rows.hi[i], of_tile + at, accumulate);
    } else {
      ptx::Wgmma<__half>::run(score, hi + i / kOfSpan * kRowsSpanStep + i % kOfSpan * kStep,
                              of_tile + at, accumulate);
    }
  };
#pragma unroll
  for (int i = 0; i < Rows::kSteps; ++i) run_hi(i, tile_lo, i > 0);
#pragma unroll
  for (int i = 0; i < Rows::kSteps; ++i) {
    const int at = i / kOfSpan * kSpanStep + i % kOfSpan * kStep;
    if constexpr (Rows::kHasLo) {
      Product::run(score, rows.lo[i], tile_hi + at, true);
    } else {
      ptx::Wgmma<__half>::run(score, lo + i / kOfSpan * kRowsSpanStep + i % kOfSpan * kStep,
                              tile_hi + at, true);
    }
  }
#pragma unroll
  for (int i = 0; i < Rows::kSteps; ++i) run_hi(i, tile_hi, true);
}

// product = p v for part of a tile's keys: the truncation error grows with a sum's length
// (NOTES.md).
template <class L, int kPart = 0>
__device__ __forceinline__ void issue_results(float (&product)[L::kSums], const Weights<L>& weights,
                                              const typename L::Tile& tile) {
  constexpr int kStep = kInstructionK * kSpan / 16;
  constexpr int kNextSpan = L::kKeys * kSpan;
  const auto descriptor = [](const void* at) {
    return ptx::transposed_descriptor(ptx::uniform(ptx::shared_address(at)), kNextSpan);
  };
  const uint64_t value_hi = descriptor(tile.part[0]);
  const uint64_t value_lo = descriptor(tile.part[1]);
  constexpr int kSteps = kAttentionPromoted / kInstructionK;
  constexpr int kFirst = kPart * kSteps;
#pragma unroll
  for (int i = kFirst; i < kFirst + kSteps; ++i) {
    Product::run_transposed(product, weights.hi[i], value_lo + i * kStep, i > kFirst);
    Product::run_transposed(product, weights.lo[i], value_hi + i * kStep, true);
  }
#pragma unroll
  for (int i = kFirst; i < kFirst + kSteps; ++i) {
    Product::run_transposed(product, weights.hi[i], value_hi + i * kStep, true);
  }
}

}  // namespace fx_fuser::attention_split
