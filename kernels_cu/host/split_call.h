// The split product: a call's tensors as the kernels see them, and the kernels' workspace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "host/device.h"
#include "host/split_operands.h"
#include "host/split_plan.h"
#include "host/split_result.h"
#include "linear/linear_split_args.h"

namespace fx_fuser {
namespace {

// Memory through which a call's kernels pass data to each other.
struct SplitWorkspace {
  Tensor memory;
  void* split;
  void* spilled;
  uint32_t* unsure;
  uint64_t* redo;
  SplitRowFactors* factors;
  SplitRowFactors* other_factors;
  float* partial;

  // parts: fp16 per value of the pre-split operand. tiles: of all planes. other_rows: rows of the
  // other operand if its scales are computed ahead, else 0. partials: elements of partial sums.
  SplitWorkspace(const Tensor& like, int64_t parts, int64_t rows, int64_t padded_k,
                 int64_t spill_blocks, int64_t tiles, int64_t other_rows, int64_t partials)
      : memory(like) {
    // All are aligned to eight bytes; those that need more come first.
    const int64_t at_spilled = parts * rows * padded_k * 2;
    const int64_t at_unsure = at_spilled + spill_blocks * kLinearTileM * kLinearTileN * 4;
    const int64_t at_redo =
        at_unsure + tiles * (kLinearConsumerThreads / 32) * kLinearUnsureWords * 4;
    const int64_t at_factors = at_redo + tiles * 8;
    constexpr auto kFactorBytes = static_cast<int64_t>(sizeof(SplitRowFactors));
    const int64_t at_other = at_factors + rows * kFactorBytes;
    const int64_t at_partial = at_other + other_rows * kFactorBytes;
    memory = new_dense(like, {at_partial + partials * 4}, ScalarType::Byte);
    auto* start = static_cast<uint8_t*>(memory.data_ptr());
    split = start;
    spilled = start + at_spilled;
    unsure = reinterpret_cast<uint32_t*>(start + at_unsure);
    redo = reinterpret_cast<uint64_t*>(start + at_redo);
    factors = reinterpret_cast<SplitRowFactors*>(start + at_factors);
    other_factors = other_rows > 0 ? reinterpret_cast<SplitRowFactors*>(start + at_other) : nullptr;
    partial = reinterpret_cast<float*>(start + at_partial);
  }
};

// True if 32-bit indices suffice for the sizes and for everything that is counted.
bool is_in_reach(const SplitSizes& sizes, const SplitPlan& plan) {
  constexpr int64_t kHighest = std::numeric_limits<int32_t>::max() - (1 << 16);
  const int64_t planes = sizes.batches * plan.chunks;
  const int64_t rows = sizes.batches * std::max(sizes.m, sizes.n);
  return sizes.n <= kHighest && sizes.k <= kHighest &&
         planes * sizes.m <= kHighest / kSplitMaxCluster &&
         plan.chunks * sizes.tiles() <= kHighest &&
         (plan.chunks == 1 || rows * partial_pitch(std::min(sizes.m, sizes.n)) + rows <= kHighest);
}

// Choices that a caller, such as a test, may force. chunks: of k; 0: as the cost model says.
// exact: the scales of the streamed operand (the one that is not pre-split) are computed ahead
// instead of guessed.
struct SplitWish {
  int64_t chunks = 0;
  std::optional<bool> weight_first;
  bool exact = false;
};

// A product's tensors as the kernels see them, and how it is computed.
struct SplitCall {
  MergedRows rows;
  SplitOperand x;
  SplitOperand weight;
  SplitSizes sizes;
  SplitChoice choice;
  double library;  // seconds that the library's product takes, as modelled

  // tensors: the weight, x and others. std::nullopt if the kernels do not support these strides.
  static std::optional<SplitCall> of(const Tensor& like, const std::vector<const Tensor*>& tensors,
                                     const SplitRates& rates, const SplitWish& wish = {}) {
    const auto rows = merge_rows(like, tensors);
    if (!rows) return std::nullopt;
    const SplitOperand weight = SplitOperand::of_weight(*tensors[0], *rows);
    const SplitOperand x = SplitOperand::of_x(*tensors[1], *rows);
    const SplitSizes sizes{rows->batches(), rows->rows, weight.rows, weight.k};
    if (sizes.tiles() == 0) return std::nullopt;
    const SplitCopies copies{x.seconds_to_copy(rates), weight.seconds_to_copy(rates)};
    SplitChoice choice = !wish.weight_first   ? split_choice(sizes, copies, rates)
                         : *wish.weight_first ? weight_first(sizes, copies, rates)
                                              : x_first(sizes, copies, rates);
    if (wish.chunks > 0) choice.plan = plan_of(sizes, wish, rates);
    return SplitCall{*rows, x, weight, sizes, choice, library_seconds(sizes, rates)};
  }

  // sizes: with the kernels' x, the pre-split operand, as m.
  static SplitPlan plan_of(const SplitSizes& sizes, const SplitWish& wish,
                           const SplitRates& rates) {
    if (wish.chunks == 0) return split_plan(sizes, rates);
    const int64_t chunks = std::min(wish.chunks, ceil_div(sizes.k, kLinearTileK));
    return split_in_chunks(sizes, chunks, rates);
  }

  // Whether the split product is faster than the library's.
  bool is_profitable() const { return choice.seconds < library; }

  // The time that repairs may take, relative to the product's, before the library is faster.
  float bearable() const {
    constexpr double kLeast = 0.05;
    return static_cast<float>(std::max(library / choice.seconds - 1, kLeast));
  }
};

}  // namespace
}  // namespace fx_fuser
