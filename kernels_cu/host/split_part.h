// The split product: which rows of the pre-split operand one launch processes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "host/split_operands.h"
#include "host/split_plan.h"
#include "linear/linear_split_args.h"

namespace fx_fuser {
namespace {

// Element size in bytes of each place of a LinearResult.
using PlaceSizes = std::array<int64_t, LinearResult::kFirstOperand + kMaxInputs>;

// A product, or the part of it that results from some rows of the pre-split operand: rows of the
// result, or columns if the weight is pre-split.
struct SplitPart {
  SplitOperand first;
  SplitOperand second;
  SplitSizes sizes;
  MergedRows rows;
  LinearResult result;
  bool weight_first;

  // The part from rows [begin, begin + count) of `first`, for a product of one batch.
  SplitPart of_rows(int64_t begin, int64_t count, int64_t first_size,
                    const PlaceSizes& bytes) const {
    SplitPart part = *this;
    part.first.data = static_cast<const char*>(first.data) + begin * first.stride_row * first_size;
    part.first.rows = count;
    (weight_first ? part.sizes.n : part.sizes.m) = count;
    if (!weight_first) part.rows.rows = count;
    for (size_t i = 0; i < bytes.size(); ++i) {
      LinearPlace& place = part.result.place[i];
      if (place.data == nullptr) continue;
      const int64_t step = weight_first ? stride_of_columns(i) : stride_of_rows(i);
      place.data = static_cast<char*>(place.data) + begin * step * bytes[i];
    }
    if (weight_first && result.bias != nullptr) part.result.bias = result.bias + begin;
    return part;
  }

 private:
  int64_t stride_of_rows(size_t i) const {
    if (i == LinearResult::kOut) return result.out_stride;
    if (i == LinearResult::kZ) return result.z_stride;
    return result.operand[i - LinearResult::kFirstOperand].m;
  }
  int64_t stride_of_columns(size_t i) const {
    return i < LinearResult::kFirstOperand ? 1 : result.operand[i - LinearResult::kFirstOperand].n;
  }
};

// The most memory for the split of an operand: a language model's gradient of its logits, split
// whole, would add a tenth to a training step's peak.
constexpr int64_t kMostSplitBytes = 96ll << 20;
constexpr double kPartSeconds = 15e-6;  // overhead of another part, as measured

// How many rows of the pre-split operand a launch processes: whole tiles, in the number of parts
// that the model finds fastest. sizes: with these rows as m. bytes_of_row: of the split.
int64_t rows_at_once(const SplitSizes& sizes, int64_t bytes_of_row, const SplitRates& rates) {
  if (sizes.batches > 1 || sizes.m * bytes_of_row <= kMostSplitBytes) return sizes.m;
  const int64_t tiles = ceil_div(sizes.m, kLinearTileM);
  const int64_t held = std::max<int64_t>(kMostSplitBytes / (bytes_of_row * kLinearTileM), 1);
  const int64_t fewest = ceil_div(tiles, held);
  int64_t best_rows = 0;
  double best = 0;
  for (int64_t parts = fewest; parts <= std::min(2 * fewest, tiles); ++parts) {
    SplitSizes part = sizes;
    part.m = ceil_div(tiles, parts) * kLinearTileM;
    const double of_part = kPartSeconds + split_plan(part, rates).seconds;
    const double seconds = static_cast<double>(ceil_div(sizes.m, part.m)) * of_part;
    if (best_rows == 0 || seconds < best) {
      best_rows = part.m;
      best = seconds;
    }
  }
  return best_rows;
}

}  // namespace
}  // namespace fx_fuser
