// The depthwise convolution in training: the gradients of x and of the weight, and all of it as
// graphs call it. fx_fuser/ops/depthwise says what the arguments mean.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "conv/depthwise_args.h"
#include "host/depthwise.h"
#include "host/kernel.h"
#include "host/made.h"

namespace fx_fuser {
namespace {

struct DepthwiseInputKernels {
  Kernel kernel;
  ScalarType type;
  int multiprocessors;
  int kernel_h;
  int kernel_w;
};

int64_t load_depthwise_input(const Sources& from) {
  const Signature types(from, 2);
  types.check_operands(0);
  auto kernels = std::make_unique<DepthwiseInputKernels>();
  kernels->kernel = get_kernel(load_library(from.cubins.at(0)), "fx_fuser_depthwise_input");
  kernels->type = types.x;
  kernels->multiprocessors = multiprocessors_of(from.device);
  kernels->kernel_h = types.sizes[0];
  kernels->kernel_w = types.sizes[1];
  return keep<DepthwiseInputKernels>(from, std::move(kernels));
}
const AddLoader kDepthwiseInputLoader("depthwise_input", load_depthwise_input);

struct DepthwiseWeightKernels {
  Kernel kernel;
  Kernel sum;
  ScalarType type;
  int multiprocessors;
  int kernel_h;
  int kernel_w;
  int stride;
};

int64_t load_depthwise_weight(const Sources& from) {
  const Signature types(from, 3);
  types.check_operands(0);
  Library library = load_library(from.cubins.at(0));
  auto kernels = std::make_unique<DepthwiseWeightKernels>();
  kernels->kernel = get_kernel(library, "fx_fuser_depthwise_weight");
  kernels->sum = get_kernel(library, "fx_fuser_depthwise_weight_sum");
  kernels->type = types.x;
  kernels->multiprocessors = multiprocessors_of(from.device);
  kernels->kernel_h = types.sizes[0];
  kernels->kernel_w = types.sizes[1];
  kernels->stride = types.sizes[2];
  return keep<DepthwiseWeightKernels>(from, std::move(kernels));
}
const AddLoader kDepthwiseWeightLoader("depthwise_weight", load_depthwise_weight);

// ---- which tensors ------------------------------------------------------------------------------

// padding: [down, across], alike on both sides. Raises if it is not x that dz is a gradient of.
struct DepthwiseCall {
  ConvShape shape;  // of x and the weight
  DepthwiseOut out;

  DepthwiseCall(ScalarType type, const Tensor& x, const Tensor& weight, const Tensor& dz,
                const std::vector<int64_t>& padding, int64_t stride)
      : out{} {
    STD_TORCH_CHECK(padding.size() == 2, "fx_fuser: padding is [down, across], not ",
                    to_string(padding));
    const std::vector<int64_t> all{padding[1], padding[1], padding[0], padding[0]};
    check_conv(type, x, weight, all, x.dim() == 4 ? x.size(1) : 1);
    check_conv(type, dz, weight, all, dz.dim() == 4 ? dz.size(1) : 1);
    shape = conv_shape_of(x, weight, all);
    const auto found = depthwise_out(shape, stride);
    is_taken_ = found.has_value();
    if (!found) return;
    out = *found;
    STD_TORCH_CHECK(dz.size(0) == shape.samples && dz.size(2) == out.h && dz.size(3) == out.w,
                    "fx_fuser: a gradient of shape ", to_string(dz.sizes()),
                    " of a convolution of ", to_string(x.sizes()), " by ",
                    to_string(weight.sizes()), ", stride ", stride);
  }

  // Of images in channels_last, of pairs of channels.
  bool takes(const Tensor& x, const Tensor& dz) const {
    return is_taken_ && shape.channels % 2 == 0 && are_alike(x, dz, {}, /*planes=*/false) &&
           are_aligned(x, dz, {});
  }

 private:
  bool is_taken_ = false;
};

// ---- the gradient of x, with stride 2 -----------------------------------------------------------

// dx, in channels_last, of dz and the weight. Returns false, and launches nothing, if the kernel
// does not take these tensors.
bool run_depthwise_input(const DepthwiseInputKernels& kernels, const Tensor& dz,
                         const Tensor& weight, const Tensor& dx,
                         const std::vector<int64_t>& padding) {
  constexpr int64_t kStride = 2;
  const DepthwiseCall call(kernels.type, dx, weight, dz, padding, kStride);
  const ConvShape& shape = call.shape;
  STD_TORCH_CHECK(shape.kernel_h == kernels.kernel_h && shape.kernel_w == kernels.kernel_w,
                  "fx_fuser: a depthwise convolution of weight ", to_string(weight.sizes()));
  if (!call.takes(dx, dz) || !is_contiguous(weight)) return false;
  const int channels = depthwise_input_channels(kernels.kernel_h, kernels.kernel_w);
  const auto pairs = [](int64_t padding, int64_t size) {
    return (padding + size - 1) / 2 - padding / 2 + 1;
  };
  DepthwiseWork work{};
  work.samples = shape.samples;
  work.h = pairs(shape.top, shape.h);
  work.w = pairs(shape.left, shape.w);
  work.units = shape.channels / channels;
  work.columns = depthwise_input_columns(kernels.kernel_h, kernels.kernel_w);
  work.lanes_log2 = depthwise_lanes_log2(work.units, channels == 1);
  work.threads = kDepthwiseInputThreads;
  work.resident = int64_t{kernels.multiprocessors} *
                  depthwise_input_resident(kernels.kernel_h, kernels.kernel_w);
  work.stride = 1;
  work.halo = kernels.kernel_h / 2;
  work.most_rounds = 4;
  const auto cut = depthwise_divided(work);
  if (!cut) return false;
  DepthwiseInputArgs args{};
  set_depthwise_grid(args, shape, call.out, *cut, {dz});
  args.all_rows = static_cast<int32_t>(work.h);
  args.dz = dz.data_ptr();
  args.weight = weight.data_ptr();
  args.dx = dx.data_ptr();
  const int device = dx.get_device_index();
  const OnDevice on_device(device);
  launch(kernels.kernel, cut->blocks, kDepthwiseInputThreads, current_stream(device), args);
  return true;
}

// ---- the gradient of the weight -----------------------------------------------------------------

// dw, contiguous, of x and dz. Returns false, and launches nothing, if the kernels do not take
// these tensors.
bool run_depthwise_weight(const DepthwiseWeightKernels& kernels, const Tensor& x, const Tensor& dz,
                          const Tensor& dw, const std::vector<int64_t>& padding) {
  const DepthwiseCall call(kernels.type, x, dw, dz, padding, kernels.stride);
  const ConvShape& shape = call.shape;
  STD_TORCH_CHECK(
      shape.kernel_h == kernels.kernel_h && shape.kernel_w == kernels.kernel_w && is_contiguous(dw),
      "fx_fuser: the gradient of a depthwise convolution's weight ", to_string(dw.sizes()));
  if (!call.takes(x, dz)) return false;
  const int kernel_h = kernels.kernel_h;
  const int kernel_w = kernels.kernel_w;
  const int bytes = static_cast<int>(x.element_size());
  const int channels = depthwise_channels(kernel_h, kernel_w, kernels.stride, bytes, false);
  DepthwiseWork work{};
  work.samples = shape.samples;
  work.h = call.out.h;
  work.w = call.out.w;
  work.units = shape.channels / channels;
  work.columns = depthwise_columns(kernel_h, kernel_w, kernels.stride, bytes, false);
  work.lanes_log2 = depthwise_lanes_log2(work.units, channels == 1);
  work.threads = kDepthwiseWeightThreads;
  work.resident = int64_t{kernels.multiprocessors} *
                  depthwise_weight_resident(kernel_h, kernel_w, kernels.stride);
  work.stride = kernels.stride;
  work.halo = kernel_h;
  work.most_rounds = 1;  // a block's sums are read again
  const auto cut = depthwise_divided(work);
  if (!cut) return false;
  const int64_t taps = shape.kernel_h * shape.kernel_w;
  const int64_t blocks = cut->blocks / cut->groups;
  const Tensor partial = new_dense(x, {blocks, taps, shape.channels}, ScalarType::Float);
  DepthwiseWeightArgs args{};
  set_depthwise_grid(args, shape, call.out, *cut, {x, dz});
  args.all_rows = args.out_h;
  args.x = x.data_ptr();
  args.dz = dz.data_ptr();
  args.partial = static_cast<float*>(partial.data_ptr());
  DepthwiseSumArgs sum{};
  sum.partial = args.partial;
  sum.dw = dw.data_ptr();
  sum.blocks = static_cast<int32_t>(blocks);
  sum.channels = args.channels;
  sum.groups = static_cast<int32_t>(ceil_div(shape.channels, kDepthwiseSumLanes));
  const int device = dw.get_device_index();
  const OnDevice on_device(device);
  const Stream stream = current_stream(device);
  launch(kernels.kernel, cut->blocks, kDepthwiseWeightThreads, stream, args);
  launch(kernels.sum, taps * sum.groups, kDepthwiseSumLanes * kDepthwiseSumSlices, stream, sum);
  return true;
}

// ---- as graphs call them ------------------------------------------------------------------------

constexpr const char* kLoadDepthwise = "fx_fuser::load_depthwise";

std::optional<Made> make_depthwise(const Tensor& x, const Tensor& weight, const std::string& kernel,
                                   const std::vector<int64_t>& padding, int64_t stride,
                                   bool turned) {
  const auto* kernels = kernels_named<DepthwiseKernels>(kernel, x, kLoadDepthwise);
  if (kernels == nullptr || padding.size() != 2) return std::nullopt;
  const std::vector<int64_t> all{padding[1], padding[1], padding[0], padding[0]};
  check_depthwise(*kernels, x, weight, all);
  const auto out = depthwise_out(conv_shape_of(x, weight, all), stride);
  if (!out || kernels->stride != stride || !is_dense_channels_last(x)) return std::nullopt;
  const Tensor z = new_image(x, {x.size(0), x.size(1), out->h, out->w}, x.scalar_type(), true);
  if (!run_depthwise(*kernels, x, weight, all, z, std::nullopt, {{}, {}}, turned)) {
    return std::nullopt;
  }
  return Made(z);
}

std::optional<Made> make_depthwise_input(const Tensor& dz, const Tensor& weight,
                                         const std::string& kernel,
                                         const std::vector<int64_t>& padding,
                                         const std::vector<int64_t>& size) {
  const auto* kernels = kernels_named<DepthwiseInputKernels>(kernel, dz, kLoadDepthwise);
  if (kernels == nullptr || dz.dim() != 4 || size.size() != 2) return std::nullopt;
  const ImageSize of_x{dz.size(0), dz.size(1), size[0], size[1]};
  const Tensor dx = new_image(dz, of_x, dz.scalar_type(), true);
  if (!run_depthwise_input(*kernels, dz, weight, dx, padding)) return std::nullopt;
  return Made(dx);
}

std::optional<Made> make_depthwise_weight(const Tensor& x, const Tensor& dz,
                                          const std::string& kernel,
                                          const std::vector<int64_t>& padding,
                                          const std::vector<int64_t>& window, int64_t stride) {
  const auto* kernels = kernels_named<DepthwiseWeightKernels>(kernel, x, kLoadDepthwise);
  if (kernels == nullptr || x.dim() != 4 || window.size() != 2) return std::nullopt;
  if (kernels->stride != stride) return std::nullopt;
  const Tensor dw = new_dense(x, {x.size(1), 1, window[0], window[1]}, x.scalar_type());
  if (!run_depthwise_weight(*kernels, x, dz, dw, padding)) return std::nullopt;
  return Made(dw);
}

}  // namespace
}  // namespace fx_fuser
