// The 1 x 1 convolution with the statistics of its result: tensor maps, how tiles are divided,
// launch, and as graphs call it. fx_fuser/ops/pixels says what the arguments mean.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "conv/pixels_args.h"
#include "host/image.h"
#include "host/kernel.h"
#include "host/linear_dense.h"
#include "host/made.h"

namespace fx_fuser {
namespace {

struct PixelsKernels {
  std::array<Kernel, kPixelsShapeCount> kernel;
  Kernel combine;
  ScalarType type;
  int multiprocessors;
};

int64_t load_pixels(const Sources& from) {
  const Signature types(from);
  types.check_operands(0);
  STD_TORCH_CHECK(types.x == ScalarType::Half || types.x == ScalarType::BFloat16,
                  "fx_fuser: FX_FUSER_PIXELS does not support ", toString(types.x));
  Library library = load_library(from.cubins.at(0));
  auto kernels = std::make_unique<PixelsKernels>();
  for (int i = 0; i < kPixelsShapeCount; ++i) {
    kernels->kernel[i] = get_kernel(library, "fx_fuser_pixels_" + std::to_string(i),
                                    kPixelsShapes[i].shared_bytes());
  }
  kernels->combine = get_kernel(library, "fx_fuser_pixels_combine");
  kernels->type = types.x;
  kernels->multiprocessors = multiprocessors_of(from.device);
  return keep<PixelsKernels>(from, std::move(kernels));
}
const AddLoader kPixelsLoader("pixels", load_pixels);

PixelsCut pixels_cut(const PixelsShape& shape, int64_t pixels, int64_t channels,
                     int multiprocessors) {
  const int64_t channel_tiles = ceil_div(channels, shape.tile_channels());
  PixelsCut cut{};
  cut.pixel_tiles = static_cast<int32_t>(ceil_div(pixels, shape.pixels));
  cut.tiles = static_cast<int32_t>(cut.pixel_tiles * channel_tiles);
  cut.workers = std::min<int32_t>(cut.tiles, multiprocessors * (shape.in_turns ? 2 : 1));
  cut.slots = static_cast<int32_t>(ceil_div(cut.workers, channel_tiles)) + 1;
  return cut;
}

// z [N, channels, H, W] = the 1 x 1 convolution of x [N, K, H, W] and weight [channels, K, 1, 1],
// and the mean and biased variance of each channel of z, fp32. Images are in channels_last. Returns
// false, and launches nothing, if the kernel does not take these tensors.
bool run_pixels(const PixelsKernels& kernels, const Tensor& x, const Tensor& weight,
                const Tensor& z, const Tensor& mean, const Tensor& variance, int64_t shape_index) {
  require_cuda(weight, "weight");
  const auto is_image = [&](const Tensor& t) {
    return t.dim() == 4 && t.scalar_type() == kernels.type;
  };
  STD_TORCH_CHECK(is_image(x) && is_image(weight) && is_image(z) && weight.size(2) == 1 &&
                      weight.size(3) == 1 && weight.size(1) == x.size(1) &&
                      z.size(1) == weight.size(0),
                  "fx_fuser: a 1 x 1 convolution of ", to_string(x.sizes()), " and ",
                  to_string(weight.sizes()), " of ", toString(kernels.type));
  STD_TORCH_CHECK(shape_index >= 0 && shape_index < kPixelsShapeCount,
                  "fx_fuser: there is no shape ", shape_index, " of a 1 x 1 convolution's tile");
  const PixelsShape& shape = kPixelsShapes[shape_index];
  const int64_t pixels = x.size(0) * x.size(2) * x.size(3);
  const int64_t k = x.size(1);
  const int64_t channels = weight.size(0);
  constexpr int64_t kWidth = 8;  // elements of a vector
  constexpr int64_t kHighest = std::numeric_limits<int32_t>::max() / 4;
  if (pixels == 0 || k == 0 || channels == 0) return false;
  if (pixels > kHighest || k > kHighest || channels > kHighest) return false;
  if (k % kWidth != 0 || channels % kWidth != 0) return false;
  const int64_t tiles = ceil_div(pixels, shape.pixels) * ceil_div(channels, shape.tile_channels());
  if (tiles > kHighest || !is_dense_channels_last(x) || !is_dense_channels_last(z)) return false;
  if (channels > 1 && weight.stride(0) != k) return false;
  if (k > 1 && weight.stride(1) != 1) return false;
  for (const Tensor* tensor : {&x, &weight, &z}) {
    if (!is_aligned(tensor->data_ptr())) return false;
  }

  const int device = z.get_device_index();
  const OnDevice on_device(device);
  const PixelsCut cut = pixels_cut(shape, pixels, channels, kernels.multiprocessors);
  const Tensor partial = new_dense(z, {channels, cut.slots, 3}, ScalarType::Float);
  const auto map_of = [&](const Tensor& tensor, int64_t rows, int64_t columns, int box_rows) {
    return tensor_map<2>(copied_as(kernels.type), tensor.data_ptr(),
                         {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows)},
                         {static_cast<uint64_t>(columns * x.element_size())},
                         {kPixelsStep, static_cast<uint32_t>(box_rows)});
  };
  PixelsArgs args{};
  args.weight_map = map_of(weight, channels, k, shape.tile_channels());
  args.x_map = map_of(x, pixels, k, shape.pixels);
  args.out_map = map_of(z, pixels, channels, shape.pixels);
  args.partial = partial.data_ptr();
  args.pixels = static_cast<int32_t>(pixels);
  args.channels = static_cast<int32_t>(channels);
  args.k = static_cast<int32_t>(k);
  args.cut = cut;
  LaunchOptions options;
  options.shared_bytes = shape.shared_bytes();
  const Stream stream = current_stream(device);
  launch(kernels.kernel[shape_index], shape.in_turns ? ceil_div(cut.workers, 2) : cut.workers,
         kPixelsThreads, stream, args, options);

  PixelsCombineArgs combine{};
  combine.partial = args.partial;
  combine.mean = static_cast<float*>(mean.data_ptr());
  combine.variance = static_cast<float*>(variance.data_ptr());
  combine.channels = args.channels;
  combine.tile_channels = shape.tile_channels();
  combine.cut = cut;
  LaunchOptions behind;
  behind.dependent = has_clusters(device);
  launch(kernels.combine, ceil_div(channels, kPixelsCombineThreads / 32), kPixelsCombineThreads,
         stream, combine, behind);
  return true;
}

std::optional<Made> make_pixels(const Tensor& x, const Tensor& weight, const std::string& kernel,
                                int64_t shape) {
  const auto* kernels = kernels_named<PixelsKernels>(kernel, x, "fx_fuser::load_pixels");
  if (kernels == nullptr) return std::nullopt;
  const Tensor z = new_image(x, {x.size(0), weight.size(0), x.size(2), x.size(3)}, x.scalar_type(),
                             /*channels_last=*/true);
  const Tensor mean = new_dense(x, {1, weight.size(0), 1, 1}, ScalarType::Float);
  const Tensor variance = new_dense(x, {1, weight.size(0), 1, 1}, ScalarType::Float);
  if (!run_pixels(*kernels, x, weight, z, mean, variance, shape)) return std::nullopt;
  return Made(std::vector<Tensor>{z, mean, variance});
}

}  // namespace
}  // namespace fx_fuser
