// The split product's plan: how tensors become planes, into how many chunks k is divided, and which
// operand is pre-split.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "host/device.h"
#include "linear/linear_split_args.h"

namespace fx_fuser {
namespace {

// The fewest blocks that finish in the same number of rounds: more would only draw power.
int64_t persistent_blocks(int64_t tiles, int64_t multiprocessors) {
  return ceil_div(tiles, ceil_div(tiles, multiprocessors));
}

// ---- cost model, chunks of k --------------------------------------------------------------------

struct SplitSizes {
  int64_t batches;
  int64_t m;
  int64_t n;
  int64_t k;

  // Identifies a product, independent of how its rows are divided into batches.
  std::array<int64_t, 3> all() const { return {batches * m, n, k}; }
  int64_t tiles() const { return batches * ceil_div(m, kLinearTileM) * ceil_div(n, kLinearTileN); }
  double elements_of_x() const { return product(m, k); }
  double elements_of_weight() const { return product(n, k); }
  double elements_of_result() const { return product(m, n); }
  double operations() const { return 2 * product(m, n) * static_cast<double>(k); }

  // The sizes of weight xᵀ.
  SplitSizes transposed() const { return {batches, n, m, k}; }

 private:
  double product(int64_t rows, int64_t columns) const {
    return static_cast<double>(batches) * static_cast<double>(rows) * static_cast<double>(columns);
  }
};

struct SplitPlan {
  int64_t chunks;
  int64_t k;       // of a chunk: whole tiles of k, or all of it
  double seconds;  // as modelled
};

constexpr double kSplitStart = 5e-6;  // the pre-pass's launch, filling the ring
constexpr double kSumStart = 2e-6;    // the launch of the kernel that adds up the chunks

// How fast a GPU is, in seconds, byte/s and flop/s, as fx_fuser/native/limits.py lists it.
struct SplitRates {
  int64_t multiprocessors;
  double stage;              // a tile's 64 of k
  double tile_overhead;      // its scales, its epilogue
  double work_bandwidth;     // of workspaces, written and read again
  double library_rate;       // of cuBLAS's fp32 product, if large
  double library_bandwidth;  // of its operands and its result

  static SplitRates of(const std::vector<double>& given) {
    STD_TORCH_CHECK(given.size() == 6, "fx_fuser: a GPU has 6 rates, not ", given.size());
    return {static_cast<int64_t>(given[0]), given[1], given[2], given[3], given[4], given[5]};
  }
};

constexpr int64_t kLeastChunkTiles = 4;         // of k: with fewer, a tile is mostly overhead
constexpr int64_t kMostChunks = 128;            // partial sums per element
constexpr int64_t kPartialBytes = 128ll << 20;  // the most memory for partial sums
constexpr int64_t kRoundsWithoutChunks = 16;    // from here on the last round matters little
constexpr int64_t kRoundsTried = 8;
constexpr double kLeastGainOfChunks = 0.05;  // relative: the model is no more accurate than that

SplitPlan split_in_chunks(const SplitSizes& sizes, int64_t wanted, const SplitRates& rates) {
  const int64_t k_tiles = ceil_div(sizes.k, kLinearTileK);
  const int64_t depth = ceil_div(k_tiles, wanted);
  const int64_t chunks = ceil_div(k_tiles, depth);
  const auto rounds = static_cast<double>(ceil_div(sizes.tiles() * chunks, rates.multiprocessors));
  double seconds = kSplitStart + 8 * sizes.elements_of_x() / rates.work_bandwidth +
                   rounds * (static_cast<double>(depth) * rates.stage + rates.tile_overhead);
  if (chunks > 1) {
    const double moved = 8 * static_cast<double>(chunks) * sizes.elements_of_result();
    seconds += kSumStart + moved / rates.work_bandwidth;
  }
  return {chunks, chunks > 1 ? depth * kLinearTileK : sizes.k, seconds};
}

// The number of chunks that fills whole rounds of tiles best; one if more gain little.
SplitPlan split_plan(const SplitSizes& sizes, const SplitRates& rates) {
  const SplitPlan whole = split_in_chunks(sizes, 1, rates);
  const int64_t tiles = sizes.tiles();
  const int64_t first = ceil_div(tiles, rates.multiprocessors);
  if (first >= kRoundsWithoutChunks) return whole;
  const auto held =
      static_cast<int64_t>(static_cast<double>(kPartialBytes) / (4 * sizes.elements_of_result()));
  const int64_t most =
      std::min({ceil_div(sizes.k, kLinearTileK) / kLeastChunkTiles, kMostChunks, held});
  SplitPlan best = whole;
  for (int64_t rounds = first; rounds < first + kRoundsTried; ++rounds) {
    const int64_t chunks = std::min(rounds * rates.multiprocessors / tiles, most);
    if (chunks < 2) continue;
    const SplitPlan plan = split_in_chunks(sizes, chunks, rates);
    if (plan.seconds < best.seconds) best = plan;
  }
  return best.seconds < (1 - kLeastGainOfChunks) * whole.seconds ? best : whole;
}

// The kernel's x is the pre-split operand, and its weight the streamed one.
struct SplitChoice {
  SplitPlan plan;
  bool weight_first;  // the caller's weight is the kernel's x
  double seconds;     // with the copy of the streamed operand
};

// Seconds to copy each operand into aligned lines; 0 if TMA can read it in place.
struct SplitCopies {
  double x = 0;
  double weight = 0;
};

// If both are equally fast, x is pre-split: the streamed operand's scales are guessed, and
// activations have outlier columns more often than weights.
constexpr double kLeastGainOfWeightFirst = 0.02;

SplitChoice x_first(const SplitSizes& sizes, const SplitCopies& copies, const SplitRates& rates) {
  const SplitPlan plan = split_plan(sizes, rates);
  return {plan, false, plan.seconds + copies.weight};
}

SplitChoice weight_first(const SplitSizes& sizes, const SplitCopies& copies,
                         const SplitRates& rates) {
  const SplitPlan plan = split_plan(sizes.transposed(), rates);
  return {plan, true, plan.seconds + copies.x};
}

SplitChoice split_choice(const SplitSizes& sizes, const SplitCopies& copies,
                         const SplitRates& rates) {
  const SplitChoice usual = x_first(sizes, copies, rates);
  const SplitChoice other = weight_first(sizes, copies, rates);
  return other.seconds < (1 - kLeastGainOfWeightFirst) * usual.seconds ? other : usual;
}

// Seconds of cuBLAS's fp32 product, which also splits along k if tiles are few. A sum, not the
// maximum, of compute and memory time: at 32768 x 32768 it takes 1.86, 2.56 and 4.08 ms for k = 16,
// 32 and 64 (model: 1.79, 2.5 and 3.93).
double library_seconds(const SplitSizes& sizes, const SplitRates& rates) {
  const double bytes =
      4 * (sizes.elements_of_weight() + sizes.elements_of_x() + sizes.elements_of_result());
  return sizes.operations() / rates.library_rate + bytes / rates.library_bandwidth;
}

// ---- tensors as planes --------------------------------------------------------------------------

// The dimensions of a result before its last, merged into three if all tensors allow it, and the
// strides of each tensor, 0 where it is broadcast.
struct MergedRows {
  static constexpr int kMost = kMaxInputs + 4;
  struct Strides {
    int64_t outer = 0;
    int64_t inner = 0;
    int64_t row = 0;
  };

  int64_t outer = 1;
  int64_t inner = 1;
  int64_t rows = 1;
  std::array<Strides, kMost> of;  // in the order of the tensors

  int64_t batches() const { return outer * inner; }
};

// tensors[0] is the weight, [*, N, K]: its stride along the result's rows is 0, and if it has
// batches, rows are not merged with them. std::nullopt if more than three dimensions are left.
std::optional<MergedRows> merge_rows(const Tensor& out, const std::vector<const Tensor*>& tensors) {
  const int rank = static_cast<int>(out.dim());
  const int count = static_cast<int>(tensors.size());
  STD_TORCH_CHECK(count <= MergedRows::kMost, "fx_fuser: ", count, " tensors are too many");
  std::array<std::array<int64_t, MergedRows::kMost>, 3> stride{};
  std::array<int64_t, 3> size{1, 1, 1};
  const auto out_sizes = out.sizes();
  int groups = 0;  // innermost first
  for (int d = rank - 2; d >= 0; --d) {
    if (out_sizes[d] == 1) continue;
    std::array<int64_t, MergedRows::kMost> step{};
    bool merges = groups > 0;
    for (int i = 0; i < count; ++i) {
      const Tensor& tensor = *tensors[i];
      const int own = d - (rank - static_cast<int>(tensor.dim()));
      const bool of_rows_alone = i == 0 && d == rank - 2;
      if (own >= 0 && !of_rows_alone && tensor.size(own) != 1) step[i] = tensor.stride(own);
      merges = merges && step[i] == stride[groups - 1][i] * size[groups - 1];
    }
    if (merges) {
      size[groups - 1] *= out_sizes[d];
      continue;
    }
    if (groups == 0 && step[0] != 0) ++groups;  // a single row of each batch
    if (groups == 3) return std::nullopt;
    stride[groups] = step;
    size[groups++] = out_sizes[d];
  }
  MergedRows merged;
  merged.rows = size[0];
  merged.inner = size[1];
  merged.outer = size[2];
  for (int i = 0; i < count; ++i) merged.of[i] = {stride[2][i], stride[1][i], stride[0][i]};
  return merged;
}

}  // namespace
}  // namespace fx_fuser
