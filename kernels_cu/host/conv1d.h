// The grouped convolution along one dimension and the gradient of its weight: how frames are
// divided, which tensors, launch, and both as graphs call them. fx_fuser/ops/conv1d says what the
// arguments mean.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "conv/conv1d_args.h"
#include "host/kernel.h"
#include "host/made.h"
#include "host/split_operands.h"

namespace fx_fuser {
namespace {

// Warps of rows that there are kernels for.
constexpr std::array<int, 3> kConv1dRowWarps{4, 2, 1};

struct Conv1dKernels {
  std::array<Kernel, kConv1dRowWarps.size()> kernel;
  std::array<int, kConv1dRowWarps.size()> resident;  // by registers: blocks a multiprocessor
  int columns;
  ScalarType type;
  int multiprocessors;
  int most_shared;  // bytes that a block may have
};

int64_t load_conv1d(const Sources& from) {
  const Signature types(from, 1);
  types.check_operands(0);
  Library library = load_library(from.cubins.at(0));
  auto kernels = std::make_unique<Conv1dKernels>();
  kernels->columns = types.sizes[0];
  kernels->type = types.x;
  kernels->multiprocessors = multiprocessors_of(from.device);
  kernels->most_shared = attribute_of(from.device, kDeviceMaxShared);
  for (size_t i = 0; i < kConv1dRowWarps.size(); ++i) {
    kernels->kernel[i] = get_kernel(
        library, "fx_fuser_conv1d_" + std::to_string(kConv1dRowWarps[i]), kernels->most_shared);
    kernels->resident[i] = 4 / kConv1dRowWarps[i];  // of __launch_bounds__
  }
  return keep<Conv1dKernels>(from, std::move(kernels));
}
const AddLoader kConv1dLoader("conv1d", load_conv1d);

struct Conv1dWeightKernels {
  Kernel kernel;
  Conv1dWeightShape shape;
  ScalarType type;
};

int64_t load_conv1d_weight(const Sources& from) {
  const Signature types(from, 2);
  types.check_operands(0);
  auto kernels = std::make_unique<Conv1dWeightKernels>();
  kernels->shape = {types.sizes[0], types.sizes[1]};
  kernels->type = types.x;
  kernels->kernel = get_kernel(load_library(from.cubins.at(0)), "fx_fuser_conv1d_weight",
                               kernels->shape.shared_bytes());
  return keep<Conv1dWeightKernels>(from, std::move(kernels));
}
const AddLoader kConv1dWeightLoader("conv1d_weight", load_conv1d_weight);

// ---- which tensors ------------------------------------------------------------------------------

// [batch, frame, channel], of the kernel's type.
void check_frames(const Tensor& tensor, const char* name, ScalarType type) {
  require_cuda(tensor, name);
  STD_TORCH_CHECK(tensor.dim() == 3 && tensor.scalar_type() == type, "fx_fuser: ", name,
                  " of a convolution along one dimension has not three dimensions of ",
                  toString(type));
}

// Are channels adjacent, and rows and batches multiples of 16 bytes?
bool has_rows_of_vectors(const Tensor& tensor) {
  if (!is_aligned(tensor.data_ptr())) return false;
  if (tensor.size(2) > 1 && tensor.stride(2) != 1) return false;
  for (int64_t d = 0; d < 2; ++d) {
    const int64_t stride = tensor.stride(d);
    if (tensor.size(d) > 1 && (stride < 0 || stride % kConv1dChunk != 0)) return false;
  }
  return true;
}

// Of a convolution's tensors.
struct Conv1dSizes {
  int64_t batches;
  int64_t length;
  int64_t out_length;
  int64_t groups;
  int64_t taps;
  int64_t in_channels;  // of a group
  int64_t out_channels;
  int64_t padding;

  void check(const char* name, const Tensor& x, const Tensor& weight_like,
             int64_t x_channels) const {
    STD_TORCH_CHECK(taps > 0 && padding >= 0 && x.size(2) == x_channels && out_length > 0,
                    "fx_fuser: ", name, " of ", to_string(x.sizes()), " and ",
                    to_string(weight_like.sizes()), ", padding ", padding);
  }

  // May the kernels count it in 32 bits, and copy its channels in vectors?
  bool is_taken() const {
    constexpr int64_t kHighest = std::numeric_limits<int32_t>::max() / 4;
    constexpr int64_t kMostTaps = 1 << 14;
    constexpr int64_t kMostChannels = 1 << 14;
    return in_channels % kConv1dChunk == 0 && out_channels % kConv1dChunk == 0 &&
           taps <= kMostTaps && padding <= kHighest && in_channels <= kMostChannels &&
           out_channels <= kMostChannels && length <= kHighest && out_length <= kHighest &&
           batches <= kHighest && groups <= kHighest;
  }
};

// ---- the convolution ----------------------------------------------------------------------------

// How the frames are divided.
struct Conv1dCut {
  size_t index;  // of kConv1dRowWarps
  int stages;
  int64_t row_tiles;
};

// The cut with the fewest frames one after the other on a multiprocessor, of equal ones that with
// the largest tiles, which read the weights least often. Two warps leave half of the tensor cores
// idle, and less than one warp for each of them is as slow as one. Nothing where no tile fits.
std::optional<Conv1dCut> conv1d_cut(const Conv1dKernels& kernels, const Conv1dSizes& sizes) {
  constexpr int64_t kShared = 1 << 10;  // of each block, the driver's own
  constexpr int64_t kLeastRows = 2 * kConv1dWarpRows;
  std::optional<Conv1dCut> best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < kConv1dRowWarps.size(); ++i) {
    const Conv1dShape shape{kernels.columns, kConv1dRowWarps[i]};
    const auto bytes = [&](int stages) {
      return shape.shared_bytes(stages, static_cast<int>(sizes.taps),
                                static_cast<int>(sizes.in_channels));
    };
    int stages = kConv1dMostStages;
    while (stages > 1 && bytes(stages) > kernels.most_shared) --stages;
    if (stages < 2) continue;
    const int64_t row_tiles = ceil_div(sizes.out_length, shape.rows());
    const int64_t blocks =
        row_tiles * sizes.batches * sizes.groups * ceil_div(sizes.out_channels, kernels.columns);
    const int64_t by_shared = (kernels.most_shared + kShared) / (bytes(stages) + kShared);
    const int64_t resident =
        std::min({static_cast<int64_t>(kernels.resident[i]), std::max<int64_t>(by_shared, 1),
                  ceil_div(blocks, kernels.multiprocessors)});
    const int64_t rounds = ceil_div(blocks, resident * kernels.multiprocessors);
    const int64_t rows = rounds * std::max<int64_t>(resident * shape.rows(), kLeastRows);
    if (rows < least) {
      least = rows;
      best = Conv1dCut{i, stages, row_tiles};
    }
  }
  return best;
}

// z = the convolution of x [batch, frame, channel] and weight
// [group, tap, out channel, in channel], + bias, one number per channel. z is
// [batch, out frame, channel], dense. Returns false, and launches nothing, if the kernel does not
// take these tensors.
bool run_conv1d(const Conv1dKernels& kernels, const Tensor& x, const Tensor& weight,
                const std::optional<Tensor>& bias, const Tensor& z, int64_t padding) {
  check_frames(x, "x", kernels.type);
  check_frames(z, "z", kernels.type);
  require_cuda(weight, "weight");
  STD_TORCH_CHECK(weight.dim() == 4 && weight.scalar_type() == kernels.type,
                  "fx_fuser: the weight of a convolution along one dimension is ",
                  to_string(weight.sizes()), " of ", toString(weight.scalar_type()));
  const Conv1dSizes sizes{x.size(0),      x.size(1),      z.size(1),      weight.size(0),
                          weight.size(1), weight.size(3), weight.size(2), padding};
  sizes.check("a convolution", x, weight, sizes.groups * sizes.in_channels);
  STD_TORCH_CHECK(z.is_contiguous() && z.size(0) == sizes.batches &&
                      sizes.out_length == sizes.length + 2 * padding - sizes.taps + 1 &&
                      z.size(2) == sizes.groups * sizes.out_channels,
                  "fx_fuser: the result of a convolution is ", to_string(z.sizes()));
  if (bias) {
    require_cuda(*bias, "bias");
    STD_TORCH_CHECK(bias->scalar_type() == kernels.type && bias->numel() == z.size(2),
                    "fx_fuser: the bias is ", to_string(bias->sizes()));
  }
  if (z.numel() == 0) return true;
  const bool is_read = x.numel() > 0 && weight.is_contiguous() && is_aligned(weight.data_ptr());
  if (!is_read || !sizes.is_taken() || !has_rows_of_vectors(x)) return false;
  if (bias && !bias->is_contiguous()) return false;
  const std::optional<Conv1dCut> cut = conv1d_cut(kernels, sizes);
  if (!cut) return false;
  const Conv1dShape shape{kernels.columns, kConv1dRowWarps[cut->index]};
  const int64_t column_tiles = ceil_div(sizes.out_channels, kernels.columns);
  constexpr int64_t kHighest = std::numeric_limits<int32_t>::max();
  if (cut->row_tiles * sizes.batches > kHighest / (column_tiles * sizes.groups)) return false;
  Conv1dArgs args{};
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  args.bias = bias ? bias->data_ptr() : nullptr;
  args.z = z.data_ptr();
  args.x_batch = x.stride(0);
  args.x_row = x.stride(1);
  args.length = static_cast<int32_t>(sizes.length);
  args.out_length = static_cast<int32_t>(sizes.out_length);
  args.taps = static_cast<int32_t>(sizes.taps);
  args.padding = static_cast<int32_t>(padding);
  args.groups = static_cast<int32_t>(sizes.groups);
  args.in_channels = static_cast<int32_t>(sizes.in_channels);
  args.out_channels = static_cast<int32_t>(sizes.out_channels);
  args.stages = cut->stages;
  args.pitch = conv1d_pitch(args.in_channels);
  args.x_bytes = shape.x_bytes(args.taps, args.in_channels);
  args.stage_bytes = shape.stage_bytes(args.taps);
  args.row_tiles = make_divisor(static_cast<uint32_t>(cut->row_tiles));
  args.batches = make_divisor(static_cast<uint32_t>(sizes.batches));
  args.column_tiles = make_divisor(static_cast<uint32_t>(column_tiles));
  LaunchOptions options;
  options.shared_bytes = shape.shared_bytes(cut->stages, args.taps, args.in_channels);
  const int device = z.get_device_index();
  const OnDevice on_device(device);
  launch(kernels.kernel[cut->index], cut->row_tiles * sizes.batches * column_tiles * sizes.groups,
         shape.threads(), current_stream(device), args, options);
  return true;
}

// ---- the weight's gradient ----------------------------------------------------------------------

// dw [group, tap, out channel, in channel], dense, of x and dz as x and z above. Returns false,
// and launches nothing, if the kernel does not take these tensors.
bool run_conv1d_weight(const Conv1dWeightKernels& kernels, const Tensor& x, const Tensor& dz,
                       const Tensor& dw, int64_t padding) {
  check_frames(x, "x", kernels.type);
  check_frames(dz, "dz", kernels.type);
  require_cuda(dw, "dw");
  const Conv1dSizes sizes{x.size(0),  x.size(1),  dz.size(1), dw.size(0),
                          dw.size(1), dw.size(3), dw.size(2), padding};
  sizes.check("a weight's gradient", x, dw, sizes.groups * sizes.in_channels);
  STD_TORCH_CHECK(dw.dim() == 4 && dw.is_contiguous() && dw.scalar_type() == kernels.type &&
                      dz.size(0) == sizes.batches &&
                      sizes.out_length == sizes.length + 2 * padding - sizes.taps + 1 &&
                      dz.size(2) == sizes.groups * sizes.out_channels,
                  "fx_fuser: the gradient of a weight ", to_string(dw.sizes()), " by ",
                  to_string(dz.sizes()));
  if (dw.numel() == 0) return true;
  if (!sizes.is_taken() || !has_rows_of_vectors(x) || !has_rows_of_vectors(dz)) return false;
  const Conv1dWeightShape& shape = kernels.shape;
  const int64_t row_tiles = ceil_div(sizes.out_channels, 16 * shape.rows);
  const int64_t column_tiles = ceil_div(sizes.in_channels, 16 * shape.columns);
  const int64_t frame_tiles = ceil_div(sizes.out_length, kConv1dWeightFrames);
  const int64_t tap_blocks = conv1d_tap_blocks(static_cast<int>(sizes.taps));
  constexpr int64_t kHighest = std::numeric_limits<int32_t>::max() / 2;
  if (sizes.batches > kHighest / frame_tiles ||
      sizes.groups * tap_blocks > kHighest / (row_tiles * column_tiles)) {
    return false;
  }
  Conv1dWeightArgs args{};
  args.x = x.data_ptr();
  args.dz = dz.data_ptr();
  args.dw = dw.data_ptr();
  args.x_batch = x.stride(0);
  args.x_row = x.stride(1);
  args.dz_batch = dz.stride(0);
  args.dz_row = dz.stride(1);
  args.length = static_cast<int32_t>(sizes.length);
  args.out_length = static_cast<int32_t>(sizes.out_length);
  args.taps = static_cast<int32_t>(sizes.taps);
  args.padding = static_cast<int32_t>(padding);
  args.batches = static_cast<int32_t>(sizes.batches);
  args.in_channels = static_cast<int32_t>(sizes.in_channels);
  args.out_channels = static_cast<int32_t>(sizes.out_channels);
  args.frame_tiles = make_divisor(static_cast<uint32_t>(frame_tiles));
  args.tap_blocks = make_divisor(static_cast<uint32_t>(tap_blocks));
  args.row_tiles = make_divisor(static_cast<uint32_t>(row_tiles));
  args.column_tiles = make_divisor(static_cast<uint32_t>(column_tiles));
  LaunchOptions options;
  options.shared_bytes = shape.shared_bytes();
  const int device = dw.get_device_index();
  const OnDevice on_device(device);
  launch(kernels.kernel, sizes.groups * tap_blocks * row_tiles * column_tiles, shape.threads(),
         current_stream(device), args, options);
  return true;
}

// ---- as graphs call them ------------------------------------------------------------------------

std::optional<Made> make_conv1d(const Tensor& x, const Tensor& weight,
                                const std::optional<Tensor>& bias, const std::string& kernel,
                                int64_t padding) {
  const auto* kernels = kernels_named<Conv1dKernels>(kernel, x, "fx_fuser::load_conv1d");
  if (kernels == nullptr) return std::nullopt;
  const int64_t out_length = x.size(1) + 2 * padding - weight.size(1) + 1;
  const Tensor z =
      new_dense(x, {x.size(0), out_length, weight.size(0) * weight.size(2)}, x.scalar_type());
  if (!run_conv1d(*kernels, x, weight, bias, z, padding)) return std::nullopt;
  return Made(z);
}

std::optional<Made> make_conv1d_weight(const Tensor& x, const Tensor& dz, const std::string& kernel,
                                       int64_t groups, int64_t padding) {
  const auto* kernels = kernels_named<Conv1dWeightKernels>(kernel, x, "fx_fuser::load_conv1d");
  if (kernels == nullptr) return std::nullopt;
  STD_TORCH_CHECK(groups > 0, "fx_fuser: a convolution in ", groups, " groups");
  const int64_t taps = x.size(1) + 2 * padding - dz.size(1) + 1;
  const Tensor dw =
      new_dense(x, {groups, taps, dz.size(2) / groups, x.size(2) / groups}, x.scalar_type());
  if (!run_conv1d_weight(*kernels, x, dz, dw, padding)) return std::nullopt;
  return Made(dw);
}

}  // namespace
}  // namespace fx_fuser
