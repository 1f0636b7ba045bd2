// Of the split product: a call's tensors as the kernels see them, and the memory that they share.
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

// What a call's kernels write for each other.
struct SplitWorkspace {
  Tensor memory;
  void* split;
  void* spilled;
  uint32_t* unsure;
  uint64_t* redo;
  SplitRowFactors* factors;
  SplitRowFactors* other_factors;
  float* partial;

  // parts: of a value of the operand that is split first. tiles: of all planes. other_rows: of the
  // other operand, whose scales are found too. partials: elements.
  SplitWorkspace(const Tensor& like, int64_t parts, int64_t rows, int64_t padded_k,
                 int64_t spill_blocks, int64_t tiles, int64_t other_rows, int64_t partials)
      : memory(like) {
    // All are aligned on eight bytes, and what needs more comes first.
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

// Sizes that indices of 32 bits reach, with all that is counted of them.
bool is_in_reach(const SplitSizes& sizes, const SplitPlan& plan) {
  constexpr int64_t kHighest = std::numeric_limits<int32_t>::max() - (1 << 16);
  const int64_t planes = sizes.batches * plan.chunks;
  const int64_t rows = sizes.batches * std::max(sizes.m, sizes.n);
  return sizes.n <= kHighest && sizes.k <= kHighest &&
         planes * sizes.m <= kHighest / kSplitMaxCluster &&
         plan.chunks * sizes.tiles() <= kHighest &&
         (plan.chunks == 1 || rows * partial_pitch(std::min(sizes.m, sizes.n)) + rows <= kHighest);
}

// What a caller may ask for, as tests do. chunks: of k; 0: as many as pay. exact: the scales of the
// operand that is not split first are found ahead, not guessed.
struct SplitWish {
  int64_t chunks = 0;
  std::optional<bool> weight_first;
  bool exact = false;
};

// A product's tensors as the kernels see them, and what is to be made of them.
struct SplitCall {
  MergedRows rows;
  SplitOperand x;
  SplitOperand weight;
  SplitSizes sizes;
  SplitChoice choice;
  double library;  // seconds, of its product

  // tensors: the weight, x and others. Nothing where the kernels do not take these strides.
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

  // Of x as the kernels see it.
  static SplitPlan plan_of(const SplitSizes& sizes, const SplitWish& wish,
                           const SplitRates& rates) {
    if (wish.chunks == 0) return split_plan(sizes, rates);
    const int64_t chunks = std::min(wish.chunks, ceil_div(sizes.k, kLinearTileK));
    return split_in_chunks(sizes, chunks, rates);
  }

  // Is the split product faster than the library's?
  bool is_profitable() const { return choice.seconds < library; }

  // How long repairs may take, as a part of the product's time, until the library is the faster
  // one.
  float bearable() const {
    constexpr double kLeast = 0.05;
    return static_cast<float>(std::max(library / choice.seconds - 1, kLeast));
  }
};

}  // namespace
}  // namespace fx_fuser
