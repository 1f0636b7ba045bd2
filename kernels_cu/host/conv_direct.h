// The direct convolution for few channels, and its batch statistics: geometry and launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "conv/conv_direct_geometry.h"
#include "host/batch_stats.h"
#include "host/conv_call.h"
#include "host/kernel.h"

namespace fx_fuser {
namespace {

struct ConvDirectKernels : ConvKernel, EpilogueTypes {
  Kernel convolution;
  Kernel applied;  // for 16-bit results and operands that are per channel
  Kernel statistics;
  int multiprocessors;

  explicit ConvDirectKernels(const EpilogueTypes& types) : EpilogueTypes(types) {}

  std::optional<Made> run(const Conv& conv, const Norm& norm,
                          const EpilogueArgs& args) const override;
};

int64_t load_conv_direct(const Sources& from) {
  const Signature types(from);
  types.check_operands(kConvMaxOperands);
  const Library own = load_library(from.cubins.at(0));
  const Library shared = load_library(from.cubins.at(1));
  auto kernels = std::make_unique<ConvDirectKernels>(types);
  const auto kernel = [&](Library library, const char* name) {
    return get_kernel(library, name, kConvMaxShared);
  };
  kernels->convolution = kernel(own, "fx_fuser_conv_direct");
  kernels->applied = kernel(own, "fx_fuser_conv_direct_applied");
  kernels->statistics = kernel(shared, "fx_fuser_conv_direct_statistics");
  kernels->multiprocessors = multiprocessors_of(from.device);
  return keep<ConvKernel>(from, std::move(kernels));
}
const AddLoader kConvDirectLoader("conv_direct", load_conv_direct);

// How a convolution is divided into units; empty if the kernels do not support its sizes or so many
// operands. It depends on the number of multiprocessors for statistics (`out_bytes` is 0) and for
// 2-byte results of the `applied` kernel, which applies the epilogue ahead of the stages.
std::vector<int64_t> conv_direct_cut(const std::vector<int64_t>& sizes, int64_t x_bytes,
                                     int64_t out_bytes, int64_t operands, int64_t multiprocessors) {
  STD_TORCH_CHECK(x_bytes == 4 || x_bytes == 2,
                  "fx_fuser: a direct convolution is of 4 or 2 bytes, not ", x_bytes);
  const ConvShape shape = conv_shape_of(sizes);
  auto args = out_bytes > 0
                  ? conv_geometry(shape, static_cast<int>(x_bytes), static_cast<int>(out_bytes))
                  : conv_statistics_geometry(shape, static_cast<int>(x_bytes), multiprocessors);
  if (!args || operands > kConvMaxOperands) return {};
  if (x_bytes == 2 && out_bytes == 2) pair_units(*args, multiprocessors);
  std::vector<int64_t> cut{
      args->strip.size, args->strips.size, args->advance,
      args->overlap,    args->lead,        args->units_per_strip.size,
      args->units,      args->positions,   args->chunks,
      args->paired,     args->slots,       conv_shared_bytes(*args, out_bytes > 0)};
  for (int i = 0; i < args->steps; ++i) {
    for (const uint32_t half : {args->step[i].weight, args->step[i].pixels}) {
      cut.push_back(half & 0xFFFF);
      cut.push_back(half >> 16);
    }
  }
  return cut;
}

// Geometry and operands of the convolution; std::nullopt if the kernels do not support it.
// `out_bytes`: 0 for statistics.
std::optional<ConvDirectArgs> conv_args(const ConvDirectKernels& kernels, const Tensor& x,
                                        const Tensor& weight, const std::vector<int64_t>& padding,
                                        int out_bytes) {
  if (!is_contiguous(x) || !is_contiguous(weight)) return std::nullopt;
  const ConvShape shape = conv_shape_of(x, weight, padding);
  const int x_bytes = static_cast<int>(x.element_size());
  auto args = out_bytes > 0 ? conv_geometry(shape, x_bytes, out_bytes)
                            : conv_statistics_geometry(shape, x_bytes, kernels.multiprocessors);
  if (!args) return std::nullopt;
  args->x = x.data_ptr();
  args->weight = weight.data_ptr();
  return args;
}

// out = epilogue(conv2d(x, weight)), and c = conv2d(x, weight) if given. Returns false, without a
// launch, if the kernel does not support these shapes or strides.
bool run_conv_direct(const ConvDirectKernels& kernels, const Tensor& x, const Tensor& weight,
                     const std::vector<int64_t>& padding, const Tensor& out,
                     const std::optional<Tensor>& c, const EpilogueArgs& epilogue,
                     bool after_statistics = false) {
  check_conv(kernels.x, x, weight, padding);
  const int device = x.get_device_index();
  auto args = conv_args(kernels, x, weight, padding, static_cast<int>(out.element_size()));
  if (!args || !is_contiguous(out) || (c && !is_contiguous(*c))) return false;

  const ImageSize size{args->samples, args->outputs, args->out_h, args->out_w};
  check_result(out, "out", kernels.out, size, x, weight);
  if (c) check_result(*c, "c", kernels.x, size, x, weight);
  check_epilogue(kernels, out, epilogue);
  for (size_t i = 0; i < epilogue.tensors.size(); ++i) {
    const ConvOperand operand = args->operand[i] = conv_operand_of(epilogue.tensors[i]);
    args->any_per_pixel |= operand.per_pixel;
    args->any_per_sample |= operand.stride[0] != 0;
  }
  args->out = out.data_ptr();
  args->c = c ? c->data_ptr() : nullptr;
  const auto elements_into_sector = [](const Tensor& tensor) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 128 /
                                 tensor.element_size());
  };
  args->phase = elements_into_sector(out);
  const bool even_rows = args->strip.size % 2 == 0 && args->kernel_w % 2 == 1;
  args->pairs = even_rows && args->phase % 2 == 0 && args->strips.size == 1;
  args->c_is_like_out = c && (elements_into_sector(*c) - args->phase) % kConvStoreWidth == 0;
  std::copy(epilogue.scalars.begin(), epilogue.scalars.end(), args->scalar);

  const OnDevice on_device(device);
  const bool applies = kernels.x != ScalarType::Float && out.element_size() == 2 && !c &&
                       !args->any_per_pixel && args->strips.size == 1;
  if (applies) {
    args->place_bytes = 2;
    pair_units(*args, kernels.multiprocessors);
  }
  LaunchOptions options;
  options.shared_bytes = conv_shared_bytes(*args, /*stages=*/true);
  // Reads x and weight before the kernel that computes the operands has ended.
  options.dependent = after_statistics;
  launch(applies ? kernels.applied : kernels.convolution,
         conv_blocks(*args, kernels.multiprocessors), applies ? kConvThreads : kConvStagingThreads,
         current_stream(device), *args, options);
  return true;
}

// Mean and biased variance of each channel of conv2d(x, weight), which is not written. Returns
// false, without a launch, if the kernel does not support these shapes or strides.
bool run_conv_direct_statistics(const ConvDirectKernels& kernels, const StatsLibrary& statistics,
                                const Tensor& x, const Tensor& weight,
                                const std::vector<int64_t>& padding, const Tensor& mean,
                                const Tensor& variance) {
  check_conv(kernels.x, x, weight, padding);
  const int device = x.get_device_index();
  for (const Tensor& result : {mean, variance}) {
    STD_TORCH_CHECK(result.is_cuda() && result.get_device_index() == device &&
                        result.scalar_type() == ScalarType::Float && result.dim() == 1 &&
                        result.size(0) == weight.size(0) && is_contiguous(result),
                    "fx_fuser: mean and variance are float32 [", weight.size(0),
                    "] on cuda:", device);
  }
  auto args = conv_args(kernels, x, weight, padding, 0);
  if (!args) return false;

  const OnDevice on_device(device);
  const Stream stream = current_stream(device);
  const int64_t blocks = conv_blocks(*args, kernels.multiprocessors);
  const int64_t splits = 2 * blocks / args->groups;
  const Tensor partial = new_dense(x, {args->outputs, splits, 3}, ScalarType::Float);
  args->partial = partial.data_ptr();
  LaunchOptions options;
  options.shared_bytes = conv_shared_bytes(*args, /*stages=*/false);
  launch(kernels.statistics, blocks, kConvThreads, stream, *args, options);
  const CombineArgs moments{partial.data_ptr(), mean.data_ptr(), variance.data_ptr(), splits};
  LaunchOptions dependent;
  dependent.dependent = true;
  launch(statistics.float32.combine, args->outputs, kStatsThreads, stream, moments, dependent);
  return true;
}

std::optional<Made> ConvDirectKernels::run(const Conv& conv, const Norm& given,
                                           const EpilogueArgs& args) const {
  if (!is_dense_window(conv.stride, conv.dilation, conv.groups)) return {};
  const Tensor& image = conv.x;
  const Tensor& weight = conv.weight;
  const int device = image.get_device_index();
  Norm norm = given;
  if (norm.training) {
    norm.mean = new_dense(image, {weight.size(0)}, ScalarType::Float);
    norm.variance = new_dense(image, {weight.size(0)}, ScalarType::Float);
    const auto& batch_stats = registry<StatsLibrary>().at(kBatchStats, device);
    if (!run_conv_direct_statistics(*this, batch_stats, image, weight, conv.padding, *norm.mean,
                                    *norm.variance)) {
      return {};
    }
  }
  const ConvShape sizes = conv_shape_of(image, weight, conv.padding);
  const auto [y, c] =
      new_results(conv, {sizes.samples, sizes.outputs, sizes.out_h(), sizes.out_w()},
                  /*channels_last=*/false);
  const EpilogueArgs leaves = leaves_of(norm, args);
  if (!run_conv_direct(*this, image, weight, conv.padding, y, c, leaves, norm.training)) {
    return {};
  }
  return result_of(y, c, norm);
}

}  // namespace
}  // namespace fx_fuser
