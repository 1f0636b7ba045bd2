// Grouped convolution of channels_last images (grouped.cuh): tiling and launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "conv/grouped_args.h"
#include "host/conv_call.h"
#include "host/image.h"
#include "host/implicit.h"
#include "host/kernel.h"

namespace fx_fuser {
namespace {

// ---- tiling -------------------------------------------------------------------------------------

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
};

// How a convolution is divided; resident is 0 if that fits nowhere.
struct GroupedCut {
  GroupedTile tile;
  int64_t splits;
  int64_t slices;
  int64_t jobs;     // of a slice, for two rows of products
  int64_t batches;  // pairs of rows of products
  int64_t patch_rows;
  int64_t patch_columns;
  int64_t phase_columns;
  int64_t pixel_bytes;
  int64_t patch_bytes;
  int64_t weight_pitch;
  int64_t channels_at;
  int64_t taps_at;
  int64_t places_at;
  int64_t weights_at;
  int64_t stage_at;
  int64_t patch_at;
  int64_t shared_bytes;
  int64_t resident;
  int64_t tiles_x;
  int64_t tiles_y;
  int64_t tiles;
  int64_t workers;
  double cost;  // cycles of a multiprocessor, modelled
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

GroupedCut cut_into(const GroupedWindow& of, const GroupedTile& tile, const GroupedLimits& limits) {
  const ImplicitWindow& window = of.window;
  const ConvShape& shape = window.shape;
  const int64_t stride = window.stride[1];
  GroupedCut cut{};
  cut.tile = tile;
  cut.splits = ceil_div(of.unit_tiles(), tile.slice_tiles);
  cut.slices = ceil_div(of.units(), tile.slice_units) * cut.splits;
  const int64_t units_of_job = grouped_units(static_cast<int>(limits.tiles));
  cut.jobs = units_of_job > 1 ? tile.slice_units / units_of_job
                              : tile.slice_units * ceil_div(tile.slice_tiles, limits.tiles);
  const int64_t job_tiles = grouped_job_tiles(static_cast<int>(limits.tiles));
  const int64_t channels = cut.jobs * job_tiles * 8;
  const int64_t pixels = tile.images * tile.rows * tile.columns;
  cut.batches = ceil_div(pixels, kGroupedRow * kGroupedRows);
  cut.patch_rows =
      (tile.rows - 1) * window.stride[0] + window.dilation[0] * (shape.kernel_h - 1) + 1;
  cut.patch_columns = (tile.columns - 1) * stride + window.dilation[1] * (shape.kernel_w - 1) + 1;
  cut.phase_columns = ceil_div(cut.patch_columns, stride);
  const int64_t vectors = tile.slice_units * of.unit_vectors();
  cut.pixel_bytes = odd_vectors(vectors);
  cut.patch_bytes = tile.images * cut.patch_rows * cut.phase_columns * stride * cut.pixel_bytes;
  const int64_t k_even = ceil_div(of.k_vectors(), 2) * 2;
  cut.weight_pitch = odd_vectors(k_even);

  int64_t at = limits.leaves * channels * 4;
  const auto take = [&](int64_t& begin, int64_t bytes) {
    begin = at;
    at += ceil_div(bytes, 16) * 16;
  };
  take(cut.channels_at, channels * 4);
  take(cut.taps_at, k_even * 4);
  take(cut.places_at, cut.batches * kGroupedRows * kGroupedRow * 8);
  take(cut.weights_at, channels * cut.weight_pitch);
  take(cut.stage_at, kGroupedWarps * grouped_stage_bytes(static_cast<int>(limits.tiles)));
  take(cut.patch_at, tile.buffers * cut.patch_bytes);
  cut.shared_bytes = at;
  cut.resident =
      std::min(limits.resident, limits.shared_bytes / (cut.shared_bytes + kGroupedReserved));
  if (cut.resident == 0 || pixels > kGroupedMostPixels) {
    cut.resident = 0;
    return cut;
  }
  cut.tiles_x = ceil_div(window.out_w(), tile.columns);
  cut.tiles_y = ceil_div(window.out_h(), tile.rows);
  cut.tiles = ceil_div(shape.samples, tile.images) * cut.tiles_x * cut.tiles_y;
  cut.workers = implicit_workers(cut.tiles, cut.slices, cut.resident * limits.multiprocessors);

  // A multiprocessor's cycles for a tile: of its copies and results at 12 bytes a cycle, and of its
  // products, whose operands come from shared memory at 128 bytes a cycle, which takes longer than
  // 2 cycles a product. The two overlap if there is another block or another patch.
  const int64_t rounds = ceil_div(cut.batches * cut.jobs, kGroupedWarps) * kGroupedWarps;
  const double steps = static_cast<double>(ceil_div(of.k_vectors(), 2));
  const double of_step =
      static_cast<double>(units_of_job * kGroupedRows * 512 + ceil_div(job_tiles, 2) * 512) / 128;
  const double of_job =
      steps * std::max(of_step, 2.0 * static_cast<double>(job_tiles * kGroupedRows)) +
      static_cast<double>(kGroupedRows * 16 * job_tiles * 8 * (4 + 4)) / 128 + 100;
  const double products = static_cast<double>(rounds) * of_job;
  const double moved =
      static_cast<double>(tile.images * cut.patch_rows * cut.patch_columns * vectors * 16 +
                          pixels * channels * limits.out_bytes) /
      12;
  const double apart = std::min(products, moved);
  const double ways = static_cast<double>(cut.resident * tile.buffers);
  const double of_tile =
      std::max(products, moved) + apart / ways + 1500.0 / static_cast<double>(cut.resident);
  const int64_t turns = ceil_div(cut.tiles, cut.workers);
  const double at_once = std::max(1.0, static_cast<double>(cut.workers * cut.slices) /
                                           static_cast<double>(limits.multiprocessors));
  cut.cost = static_cast<double>(turns) * at_once * of_tile;
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

// The cheapest cut by the model.
GroupedCut best_cut(const GroupedWindow& of, const GroupedLimits& limits) {
  const ImplicitWindow& window = of.window;
  const int64_t units_of_job = grouped_units(static_cast<int>(limits.tiles));
  GroupedCut best{};
  const auto consider = [&](const GroupedTile& tile) {
    const GroupedCut cut = cut_into(of, tile, limits);
    if (cut.resident > 0 && (best.resident == 0 || cut.cost < best.cost)) best = cut;
  };
  const auto with_channels = [&](int64_t units, int64_t tiles) {
    for (const int64_t columns : even_parts(window.out_w(), 64)) {
      for (const int64_t rows : even_parts(window.out_h(), std::max<int64_t>(1, 400 / columns))) {
        const bool is_whole = columns == window.out_w() && rows == window.out_h();
        for (int64_t images = 1;
             images == 1 || (is_whole && images <= 8 && images * rows * columns <= 400); ++images) {
          for (const int64_t buffers : {1, 2})
            consider({units, tiles, images, rows, columns, buffers});
        }
      }
    }
  };
  for (int64_t units = units_of_job; units <= 4 * units_of_job; units += units_of_job) {
    with_channels(units, of.unit_tiles());
    if (units >= of.units()) break;
  }
  if (of.unit_tiles() > limits.tiles) with_channels(1, limits.tiles);
  return best;
}

// [slice's units, slice's tiles, images, rows, columns, buffers, blocks a multiprocessor, slices,
// tiles, workers, bytes of shared memory]; empty if no kernel supports these sizes or operands.
// sizes: as in `conv_shape_of`. tiles: the kernel's. tile: the first six, or empty for the best.
std::vector<int64_t> grouped_cut(const std::vector<int64_t>& sizes,
                                 const std::vector<int64_t>& stride,
                                 const std::vector<int64_t>& dilation, int64_t groups,
                                 int64_t tiles, int64_t leaves, int64_t operands,
                                 int64_t multiprocessors, int64_t shared_bytes) {
  const GroupedWindow of{window_of(conv_shape_of(sizes), stride, dilation), groups};
  if (!grouped_takes(of) || operands > kGroupedMaxOperands ||
      operands - leaves > kGroupedMaxOthers) {
    return {};
  }
  const GroupedCut cut =
      best_cut(of, {tiles, leaves, 2, 2, multiprocessors, shared_bytes + kGroupedReserved});
  if (cut.resident == 0) return {};
  const GroupedTile& tile = cut.tile;
  return {tile.slice_units, tile.slice_tiles, tile.images,     tile.rows,
          tile.columns,     tile.buffers,     cut.resident,    cut.slices,
          cut.tiles,        cut.workers,      cut.shared_bytes};
}

// The cuts of the sizes that a kernel has met: finding one takes longer than a launch.
class GroupedMemo {
 public:
  GroupedCut of(const GroupedWindow& window, const GroupedLimits& limits) {
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
    return cuts_[key] = best_cut(window, limits);
  }

 private:
  static constexpr size_t kMost = 256;
  std::mutex mutex_;
  std::map<std::vector<int64_t>, GroupedCut> cuts_;
};

// ---- kernels ------------------------------------------------------------------------------------

struct GroupedKernels : ConvKernel, EpilogueTypes {
  Kernel kernel;
  int resident;  // blocks per multiprocessor, as limited by registers
  int multiprocessors;
  int shared_bytes;  // of a multiprocessor
  int tiles;         // products side by side that have one unit's pixels
  bool is_mixed;
  int leaves;
  mutable GroupedMemo memo;

  explicit GroupedKernels(const EpilogueTypes& types) : EpilogueTypes(types) {}

  std::optional<Made> run(const Conv& conv, const Norm& norm,
                          const EpilogueArgs& args) const override;
};

int64_t load_grouped(const Sources& from) {
  const Signature types(from, 3);
  auto kernels = std::make_unique<GroupedKernels>(types);
  kernels->tiles = types.sizes[0];
  kernels->is_mixed = types.sizes[1] != 0;
  kernels->leaves = types.sizes[2];
  kernels->multiprocessors = multiprocessors_of(from.device);
  const int most_of_block = attribute_of(from.device, kDeviceMaxShared);
  kernels->shared_bytes = most_of_block + kGroupedReserved;
  kernels->kernel = get_kernel(load_library(from.cubins.at(0)), "fx_fuser_grouped", most_of_block);
  check(driver().OccupancyMaxActiveBlocksPerMultiprocessor(&kernels->resident, kernels->kernel,
                                                           kGroupedThreads, 0),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  kernels->resident = std::min(kernels->resident, kGroupedMostResident);
  return keep<ConvKernel>(from, std::move(kernels));
}
const AddLoader kGroupedLoader("grouped", load_grouped);

// ---- a call -------------------------------------------------------------------------------------

// The arguments that say what the convolution is.
void describe(const GroupedWindow& of, const Tensor& x, const Tensor& weight, GroupedArgs& args) {
  const ImplicitWindow& window = of.window;
  const ConvShape& shape = window.shape;
  const auto as_int = [](int64_t value) { return static_cast<int32_t>(value); };
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  for (int d = 0; d < 4; ++d) args.weight_stride[d] = weight.stride(d);
  args.weight_takes_vectors =
      of.groups_of_unit() == 1 && of.inputs() % kGroupedVector == 0 && is_weight_taken(weight);
  args.samples = as_int(shape.samples);
  args.h = as_int(shape.h);
  args.w = as_int(shape.w);
  args.outputs = as_int(shape.outputs);
  args.out_h = as_int(window.out_h());
  args.out_w = as_int(window.out_w());
  args.kernel_h = as_int(shape.kernel_h);
  args.kernel_w = as_int(shape.kernel_w);
  for (int d = 0; d < 2; ++d) {
    args.stride[d] = as_int(window.stride[d]);
    args.dilation[d] = as_int(window.dilation[d]);
  }
  args.top = as_int(shape.top);
  args.left = as_int(shape.left);
  args.group_inputs = as_int(of.inputs());
  args.group_outputs = as_int(of.outputs());
  args.units = as_int(of.units());
  args.unit_vectors = as_int(of.unit_vectors());
  args.unit_tiles = as_int(of.unit_tiles());
  args.k_vectors = as_int(of.k_vectors());
}

// The arguments that say how it is divided.
void describe(const GroupedWindow& of, const GroupedCut& cut, GroupedArgs& args) {
  const auto as_int = [](int64_t value) { return static_cast<int32_t>(value); };
  const auto divisor = [](int64_t value) { return make_divisor(static_cast<uint32_t>(value)); };
  const GroupedTile& tile = cut.tile;
  args.slices = divisor(cut.slices);
  args.splits = as_int(cut.splits);
  args.slice_units = as_int(tile.slice_units);
  args.slice_tiles = as_int(tile.slice_tiles);
  args.slice_vectors = divisor(tile.slice_units * of.unit_vectors());
  args.jobs = divisor(cut.jobs);
  args.tile_rows = as_int(tile.rows);
  args.tile_columns = as_int(tile.columns);
  args.tile_images = as_int(tile.images);
  args.tiles_x = divisor(cut.tiles_x);
  args.tiles_y = divisor(cut.tiles_y);
  args.tiles = as_int(cut.tiles);
  args.workers = as_int(cut.workers);
  args.batches = as_int(cut.batches);
  args.patch_columns = divisor(cut.patch_columns);
  args.patch_rows = divisor(cut.patch_rows);
  args.stride_w = divisor(of.window.stride[1]);
  args.phase_columns = as_int(cut.phase_columns);
  args.pixel_bytes = as_int(cut.pixel_bytes);
  args.buffers = as_int(tile.buffers);
  args.weight_pitch = as_int(cut.weight_pitch);
  args.channels_at = as_int(cut.channels_at);
  args.taps_at = as_int(cut.taps_at);
  args.places_at = as_int(cut.places_at);
  args.weights_at = as_int(cut.weights_at);
  args.stage_at = as_int(cut.stage_at);
  args.patch_at = as_int(cut.patch_at);
  args.patch_bytes = as_int(cut.patch_bytes);
}

// Is this the kernel for such groups?
bool is_kernel_of(const GroupedKernels& kernels, const GroupedWindow& of) {
  const int tiles = kernels.tiles;
  const bool is_wide = of.unit_tiles() > 2;
  return kernels.is_mixed == (of.groups_of_unit() > 1) &&
         (is_wide ? tiles > 2 : tiles == of.unit_tiles());
}

// out = epilogue(conv2d(x, weight)), and c = conv2d(x, weight) if given. Returns false, without a
// launch, if the kernel does not support these shapes or strides. wish: a tile for benchmarks.
bool run_grouped(const GroupedKernels& kernels, const Tensor& x, const Tensor& weight,
                 const GroupedWindow& of, const Tensor& out, const std::optional<Tensor>& c,
                 const EpilogueArgs& epilogue, const std::vector<int64_t>& wish = {}) {
  const ImplicitWindow& window = of.window;
  GroupedArgs args{};
  if (!grouped_takes(of) || !is_kernel_of(kernels, of) ||
      !find_x_strides(x, window, args.x_stride)) {
    return false;
  }
  const int device = x.get_device_index();
  const auto is_taken = [&](const Tensor& result, const char* name, ScalarType type) {
    check_result(result, name, type, window.out_size(), x, weight);
    return is_dense_channels_last(result) && takes_vectors(result, /*channels_last=*/true);
  };
  if (!is_taken(out, "out", kernels.out) || (c && !is_taken(*c, "c", kernels.x))) return false;
  check_epilogue(kernels, out, epilogue);
  const GroupedLimits limits{kernels.tiles,    kernels.leaves,          out.element_size(),
                             kernels.resident, kernels.multiprocessors, kernels.shared_bytes};
  const GroupedCut cut =
      wish.size() == 6
          ? cut_into(of, {wish[0], wish[1], wish[2], wish[3], wish[4], wish[5]}, limits)
          : kernels.memo.of(of, limits);
  if (cut.resident == 0) return false;
  // The kernel computes where a patch's pixels behind the image would be.
  const int64_t behind = cut.tile.images * args.x_stride[0] + cut.patch_rows * args.x_stride[1] +
                         cut.patch_columns * args.x_stride[2];
  if (behind > (int64_t{1} << 30)) return false;

  describe(of, x, weight, args);
  describe(of, cut, args);
  args.out = out.data_ptr();
  args.c = c ? c->data_ptr() : nullptr;
  std::copy(epilogue.scalars.begin(), epilogue.scalars.end(), args.scalar);
  for (size_t i = 0; i < epilogue.tensors.size(); ++i) {
    const Tensor& operand = epilogue.tensors[i];
    args.operand[i].of = conv_operand_of(operand);
    if (i < static_cast<size_t>(kernels.leaves)) {
      STD_TORCH_CHECK(is_per_channel(operand), "fx_fuser: operand ", i, " of shape ",
                      to_string(operand.sizes()), " is not one number per channel");
    }
    args.operand[i].takes_vectors =
        takes_quads(args.operand[i].of, operand.element_size(), out.size(1));
  }
  LaunchOptions options;
  options.shared_bytes = static_cast<int>(cut.shared_bytes);
  const OnDevice on_device(device);
  launch(kernels.kernel, cut.workers * cut.slices, kGroupedThreads, current_stream(device), args,
         options);
  return true;
}

std::optional<Made> GroupedKernels::run(const Conv& conv, const Norm& norm,
                                        const EpilogueArgs& args) const {
  const Tensor& image = conv.x;
  const bool channels_last = suggests_channels_last(image) || suggests_channels_last(conv.weight);
  if (norm.training || !channels_last) return {};
  check_conv(x, image, conv.weight, conv.padding, conv.groups);
  const GroupedWindow of{
      implicit_window(image, conv.weight, conv.stride, conv.padding, conv.dilation), conv.groups};
  if (!grouped_takes(of)) return {};
  const auto [y, c] = new_results(conv, of.window.out_size(), channels_last);
  const EpilogueArgs leaves = leaves_of(norm, args);
  if (!run_grouped(*this, image, conv.weight, of, y, c, leaves)) return {};
  return result_of(y, c, norm);
}

}  // namespace
}  // namespace fx_fuser
