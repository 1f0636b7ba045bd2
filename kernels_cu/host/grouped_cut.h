// Grouped convolutions of channels_last images (grouped.cuh, grouped_weight.cuh): how the work is
// divided.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <numeric>
#include <vector>

#include "conv/grouped_args.h"
#include "host/conv_call.h"
#include "host/implicit.h"

namespace fx_fuser {
namespace {

// A convolution and what is known of its groups.
struct GroupedWindow {
  ImplicitWindow window;
  int64_t groups;

  int64_t inputs() const { return window.shape.channels / groups; }  // of a group
  int64_t outputs() const { return window.shape.outputs / groups; }
  int64_t groups_of_unit() const {
    return kGroupedVector / std::gcd(std::gcd(inputs(), outputs()), int64_t{kGroupedVector});
  }
  int64_t units() const { return groups / groups_of_unit(); }
  int64_t unit_vectors() const { return groups_of_unit() * inputs() / kGroupedVector; }
  int64_t unit_tiles() const { return groups_of_unit() * outputs() / 8; }
  int64_t k_vectors() const {
    return window.shape.kernel_h * window.shape.kernel_w * unit_vectors();
  }
};

// True if a kernel supports these sizes.
bool grouped_takes(const GroupedWindow& of) {
  const ConvShape& shape = of.window.shape;
  constexpr int64_t kMostChannels = 128;  // of a unit
  if (of.groups < 2 || shape.channels % of.groups != 0 || shape.outputs % of.groups != 0 ||
      shape.channels % kGroupedVector != 0 || shape.outputs % 8 != 0 ||
      !implicit_takes(of.window)) {
    return false;
  }
  return of.unit_vectors() * kGroupedVector <= kMostChannels &&
         of.unit_tiles() * 8 <= kMostChannels;
}

struct GroupedTile {
  int64_t slice_units;
  int64_t slice_tiles;
  int64_t images;
  int64_t rows;
  int64_t columns;
  int64_t buffers;

  int64_t pixels() const { return images * rows * columns; }
};

// How a convolution is divided; resident is 0 if that fits nowhere.
struct GroupedCut {
  GroupedTile tile;
  int64_t splits;
  int64_t slices;
  int64_t batches;  // pairs of rows of products
  int64_t patch_rows;
  int64_t patch_columns;
  int64_t phase_columns;
  int64_t pixel_bytes;
  int64_t patch_bytes;
  int64_t tiles_x;
  int64_t tiles_y;
  int64_t tiles;
  int64_t workers;
  int64_t resident;
  double cost;  // cycles of a multiprocessor, modelled
  // Bytes in shared memory.
  int64_t taps_at;
  int64_t first_taps_at;
  int64_t places_at;
  int64_t sources_at;
  int64_t patch_at;
  int64_t shared_bytes;
  // Of the convolution.
  int64_t jobs;  // of a slice, for two rows of products
  int64_t weight_pitch;
  int64_t channels_at;
  int64_t weights_at;
  int64_t stage_at;
  // Of the weight's gradient.
  int64_t roles_of_unit;
  int64_t dz_pitch;
  int64_t dz_bytes;
  int64_t pixels_at;
  int64_t dz_at;
};

struct GroupedLimits {
  int64_t tiles;  // the kernel's
  int64_t leaves;
  int64_t out_bytes;
  int64_t resident;
  int64_t multiprocessors;
  int64_t shared_bytes;  // of a multiprocessor
};

// An odd number of vectors.
int64_t odd_vectors(int64_t vectors) { return (vectors | 1) * 16; }

// What a tile and its patch are; without what else is in shared memory.
GroupedCut patches_of(const GroupedWindow& of, const GroupedTile& tile) {
  const ImplicitWindow& window = of.window;
  const ConvShape& shape = window.shape;
  const int64_t stride = window.stride[1];
  GroupedCut cut{};
  cut.tile = tile;
  cut.splits = ceil_div(of.unit_tiles(), tile.slice_tiles);
  cut.slices = ceil_div(of.units(), tile.slice_units) * cut.splits;
  cut.batches = ceil_div(tile.pixels(), kGroupedRow * kGroupedRows);
  cut.patch_rows =
      (tile.rows - 1) * window.stride[0] + window.dilation[0] * (shape.kernel_h - 1) + 1;
  cut.patch_columns = (tile.columns - 1) * stride + window.dilation[1] * (shape.kernel_w - 1) + 1;
  cut.phase_columns = ceil_div(cut.patch_columns, stride);
  cut.pixel_bytes = odd_vectors(tile.slice_units * of.unit_vectors());
  cut.patch_bytes = tile.images * cut.patch_rows * cut.phase_columns * stride * cut.pixel_bytes;
  cut.tiles_x = ceil_div(window.out_w(), tile.columns);
  cut.tiles_y = ceil_div(window.out_h(), tile.rows);
  cut.tiles = ceil_div(shape.samples, tile.images) * cut.tiles_x * cut.tiles_y;
  return cut;
}

// Places parts in shared memory.
struct GroupedShared {
  int64_t bytes = 0;
  int64_t take(int64_t count) {
    const int64_t begin = bytes;
    bytes += ceil_div(count, 16) * 16;
    return begin;
  }
};

// What both kernels keep of a tile's and a patch's pixels.
void place_tables(GroupedCut& cut, int64_t k_vectors, GroupedShared& shared) {
  const int64_t pixels = cut.batches * kGroupedRows * kGroupedRow;
  cut.taps_at = shared.take(k_vectors * 4);
  cut.first_taps_at = shared.take(pixels * 4);
  cut.places_at = shared.take(pixels * 8);
  cut.sources_at = shared.take(cut.tile.images * cut.patch_rows * cut.patch_columns * 16);
}

// Blocks, and the modelled cost, of tiles for which a multiprocessor needs so many cycles of
// products and copies so many bytes. Copies are counted at 12 bytes a cycle; they overlap with
// products if there is another block or another patch.
void finish(GroupedCut& cut, const GroupedLimits& limits, double products, double bytes) {
  cut.resident =
      std::min(limits.resident, limits.shared_bytes / (cut.shared_bytes + kGroupedReserved));
  const bool is_packed = cut.tile.images <= kGroupedMostImages &&
                         cut.patch_rows < kGroupedMostLines &&
                         cut.patch_columns < kGroupedMostLines;
  if (cut.resident == 0 || cut.tile.pixels() > kGroupedMostPixels || !is_packed) {
    cut.resident = 0;
    return;
  }
  cut.workers = implicit_workers(cut.tiles, cut.slices, cut.resident * limits.multiprocessors);
  constexpr double kBytesPerCycle = 12;
  constexpr double kLatency = 1500;  // of a tile
  const double copies = bytes / kBytesPerCycle;
  const auto ways = static_cast<double>(cut.resident * cut.tile.buffers);
  const double of_tile = std::max(products, copies) + std::min(products, copies) / ways +
                         kLatency / static_cast<double>(cut.resident);
  const auto blocks = static_cast<double>(cut.workers * cut.slices);
  const double of_each = std::max(1.0, blocks / static_cast<double>(limits.multiprocessors));
  cut.cost = static_cast<double>(ceil_div(cut.tiles, cut.workers)) * of_each * of_tile;
}

constexpr int64_t kSharedPerCycle = 128;    // bytes
constexpr int64_t kProductBytes = 16 * 32;  // of a product's pixels

// The convolution, divided so.
GroupedCut cut_into(const GroupedWindow& of, const GroupedTile& tile, const GroupedLimits& limits) {
  GroupedCut cut = patches_of(of, tile);
  const int tiles = static_cast<int>(limits.tiles);
  const int64_t units_of_job = grouped_units(tiles);
  cut.jobs = units_of_job > 1 ? tile.slice_units / units_of_job
                              : tile.slice_units * ceil_div(tile.slice_tiles, limits.tiles);
  const int64_t job_tiles = grouped_job_tiles(tiles);
  const int64_t channels = cut.jobs * job_tiles * 8;
  const int64_t k_even = ceil_div(of.k_vectors(), 2) * 2;
  cut.weight_pitch = odd_vectors(k_even);
  GroupedShared shared;
  shared.take(limits.leaves * channels * 4);
  cut.channels_at = shared.take(channels * 4);
  place_tables(cut, k_even, shared);
  cut.weights_at = shared.take(channels * cut.weight_pitch);
  cut.stage_at = shared.take(kGroupedWarps * grouped_stage_bytes(tiles));
  cut.patch_at = shared.take(tile.buffers * cut.patch_bytes);
  cut.shared_bytes = shared.bytes;

  // A product takes 2 cycles, or what its operands take from shared memory. Sums go to a stage and
  // back.
  const int64_t of_step =
      (units_of_job * kGroupedRows + ceil_div(job_tiles, 2)) * kProductBytes / kSharedPerCycle;
  const int64_t of_job = k_even / 2 * std::max(of_step, 2 * job_tiles * kGroupedRows) +
                         kGroupedRows * kGroupedRow * job_tiles * 8 * 8 / kSharedPerCycle + 100;
  const int64_t jobs = ceil_div(cut.batches * cut.jobs, kGroupedWarps) * kGroupedWarps;
  const int64_t vectors = tile.slice_units * of.unit_vectors();
  const int64_t bytes = tile.images * cut.patch_rows * cut.patch_columns * vectors * 16 +
                        tile.pixels() * channels * limits.out_bytes;
  finish(cut, limits, static_cast<double>(jobs * of_job), static_cast<double>(bytes));
  return cut;
}

// The weight's gradient, divided so.
GroupedCut cut_weight_into(const GroupedWindow& of, const GroupedTile& tile,
                           const GroupedLimits& limits) {
  GroupedCut cut = patches_of(of, tile);
  const int64_t steps =
      grouped_weight_steps(static_cast<int>(limits.tiles), of.groups_of_unit() > 1);
  cut.roles_of_unit = ceil_div(ceil_div(of.k_vectors(), 2), steps);
  const int64_t roles = cut.roles_of_unit * tile.slice_units;
  if (roles > kGroupedWarps) return {};
  const int64_t dz_vectors = tile.slice_units * tile.slice_tiles;
  const int64_t rows = cut.batches * kGroupedRows;
  cut.dz_pitch = odd_vectors(dz_vectors);
  cut.dz_bytes = rows * kGroupedRow * cut.dz_pitch;
  GroupedShared shared;
  place_tables(cut, ceil_div(of.k_vectors(), 2) * 2, shared);
  cut.patch_at = shared.take(tile.buffers * cut.patch_bytes);
  cut.pixels_at = shared.take(tile.buffers * rows * kGroupedRow * 4);
  cut.dz_at = shared.take(tile.buffers * cut.dz_bytes);
  cut.shared_bytes = shared.bytes;

  const int64_t shares = kGroupedWarps / roles;
  const int64_t of_row = std::max(
      (steps * kProductBytes + ceil_div(limits.tiles, 2) * kProductBytes) / kSharedPerCycle,
      2 * steps * limits.tiles);
  const int64_t products = ceil_div(rows, shares) * shares * roles * (of_row + 10);
  const int64_t vectors = tile.slice_units * of.unit_vectors();
  const int64_t bytes = tile.images * cut.patch_rows * cut.patch_columns * vectors * 16 +
                        tile.pixels() * dz_vectors * 16;
  finish(cut, limits, static_cast<double>(products), static_cast<double>(bytes));
  return cut;
}

// Sizes into which `whole` is divided evenly, larger first.
std::vector<int64_t> even_parts(int64_t whole, int64_t most) {
  std::vector<int64_t> found;
  for (int64_t parts = ceil_div(whole, most); found.size() < 4; ++parts) {
    const int64_t part = ceil_div(whole, parts);
    if (found.empty() || found.back() != part) found.push_back(part);
    if (part == 1) break;
  }
  return found;
}

// Calls `consider` with tiles of each form.
template <class Consider>
void each_tile(const GroupedWindow& of, int64_t units, int64_t tiles, const Consider& consider) {
  constexpr int64_t kColumns = 64;
  constexpr int64_t kPixels = 400;
  constexpr int64_t kImages = 8;
  const int64_t height = of.window.out_h();
  const int64_t width = of.window.out_w();
  for (const int64_t columns : even_parts(width, kColumns)) {
    for (const int64_t rows : even_parts(height, std::max<int64_t>(1, kPixels / columns))) {
      const bool is_whole = columns == width && rows == height;
      const int64_t most = is_whole ? std::min(kImages, kPixels / (rows * columns)) : 1;
      for (int64_t images = 1; images == 1 || images <= most; ++images) {
        for (const int64_t buffers : {1, 2}) {
          consider({units, tiles, images, rows, columns, buffers});
        }
      }
    }
  }
}

// The cheapest cut by the model.
GroupedCut best_cut(const GroupedWindow& of, const GroupedLimits& limits, bool of_weight) {
  GroupedCut best{};
  const auto consider = [&](const GroupedTile& tile) {
    const GroupedCut cut =
        of_weight ? cut_weight_into(of, tile, limits) : cut_into(of, tile, limits);
    if (cut.resident > 0 && (best.resident == 0 || cut.cost < best.cost)) best = cut;
  };
  constexpr int64_t kMostJobs = 4;
  const int64_t step = of_weight ? 1 : grouped_units(static_cast<int>(limits.tiles));
  const int64_t most = of_weight ? kGroupedWarps : kMostJobs * step;
  const bool is_wide = of.unit_tiles() > limits.tiles;
  for (int64_t units = step; units <= most && !(of_weight && is_wide); units += step) {
    each_tile(of, units, of.unit_tiles(), consider);
    if (units >= of.units()) break;
  }
  if (is_wide) each_tile(of, 1, limits.tiles, consider);
  return best;
}

// [slice's units, slice's tiles, images, rows, columns, buffers, blocks a multiprocessor, slices,
// tiles, workers, bytes of shared memory]; empty if no kernel supports these sizes or operands.
// sizes: as in `conv_shape_of`. tiles: the kernel's. of_weight: of the gradient of the weight.
std::vector<int64_t> grouped_cut(const std::vector<int64_t>& sizes,
                                 const std::vector<int64_t>& stride,
                                 const std::vector<int64_t>& dilation, int64_t groups,
                                 int64_t tiles, int64_t leaves, int64_t operands,
                                 int64_t multiprocessors, int64_t shared_bytes, bool of_weight) {
  const GroupedWindow of{window_of(conv_shape_of(sizes), stride, dilation), groups};
  if (!grouped_takes(of) || operands > kGroupedMaxOperands ||
      operands - leaves > kGroupedMaxOthers) {
    return {};
  }
  const GroupedCut cut = best_cut(
      of, {tiles, leaves, 2, 2, multiprocessors, shared_bytes + kGroupedReserved}, of_weight);
  if (cut.resident == 0) return {};
  const GroupedTile& tile = cut.tile;
  return {tile.slice_units, tile.slice_tiles, tile.images,     tile.rows,
          tile.columns,     tile.buffers,     cut.resident,    cut.slices,
          cut.tiles,        cut.workers,      cut.shared_bytes};
}

// The cuts of the sizes that a kernel has met: finding one takes longer than a launch.
class GroupedMemo {
 public:
  GroupedCut of(const GroupedWindow& window, const GroupedLimits& limits, bool of_weight) {
    const ConvShape& s = window.window.shape;
    const auto& [shape, stride, dilation] = window.window;
    const std::vector<int64_t> key{
        s.samples,  s.channels,  s.h,         s.w,           s.outputs,       s.kernel_h,
        s.kernel_w, s.left,      s.right,     s.top,         s.bottom,        stride[0],
        stride[1],  dilation[0], dilation[1], window.groups, limits.out_bytes};
    const std::lock_guard lock(mutex_);
    const auto known = cuts_.find(key);
    if (known != cuts_.end()) return known->second;
    if (cuts_.size() == kMost) cuts_.clear();
    return cuts_[key] = best_cut(window, limits, of_weight);
  }

 private:
  static constexpr size_t kMost = 256;
  std::mutex mutex_;
  std::map<std::vector<int64_t>, GroupedCut> cuts_;
};

}  // namespace
}  // namespace fx_fuser
