// fx_fuser::conv2d_kernel and conv2d_batchnorm_kernel on CUDA: a kernel of ours, or the library's
// convolution, its statistics and then the epilogue.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "host/batch_stats.h"
#include "host/conv_direct.h"
#include "host/depthwise.h"
#include "host/implicit.h"
#include "host/linear.h"
#include "host/made.h"
#include "host/pointwise.h"
#include "host/stem.h"

namespace fx_fuser {
namespace {

// Names in Python of the arguments that say what is convolved, and how it is normalised.
constexpr std::string_view kConvNames =
    "x, weight, bias, stride, padding, dilation, groups, tf32, product, backward, again";
constexpr std::string_view kConvBatchNormNames =
    "x, weight, bias, running_mean, running_var, gamma, beta, stride, padding, dilation, groups, "
    "tf32, product, backward, again, training, momentum, eps";

// What both ops are called with; fx_fuser/ops/library.py has their schemas.
struct Conv {
  const Tensor& x;
  const Tensor& weight;
  const std::vector<int64_t>& stride;
  const std::vector<int64_t>& padding;  // left, right, top, bottom
  const std::vector<int64_t>& dilation;
  int64_t groups;
  bool tf32;
  const std::vector<std::string>& kernels;
  ScalarType out_type;
  bool save;
};

Tensor convolution(const Conv& conv) {
  using torch::stable::detail::from;
  const auto& pad = conv.padding;
  const bool is_even = pad[0] == pad[1] && pad[2] == pad[3];
  const Tensor x = is_even ? conv.x : torch::stable::pad(conv.x, pad);
  const std::vector<int64_t> padding =
      is_even ? std::vector{pad[2], pad[0]} : std::vector<int64_t>{0, 0};
  if (x.scalar_type() == ScalarType::Float && !conv.tf32) {
    // The other follows cuDNN's own setting, which allows TF32 by default.
    std::array<StableIValue, 6> stack{from(x),       from(conv.weight),   from(conv.stride),
                                      from(padding), from(conv.dilation), from(conv.groups)};
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("fx_fuser::exact_convolution", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
  }
  std::array<StableIValue, 9> stack{
      from(x),          from(conv.weight),   from(std::nullopt), from(conv.stride),
      from(padding),    from(conv.dilation), from(false),        from(std::vector<int64_t>{0, 0}),
      from(conv.groups)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::convolution", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// [O] as it broadcasts against [N, O, H, W].
Tensor per_channel(const Tensor& vector) {
  STD_TORCH_CHECK(vector.dim() == 1, "fx_fuser: a number a channel is a vector, not of shape ",
                  to_string(vector.sizes()));
  const std::array<int64_t, 3> sizes{vector.size(0), 1, 1};
  const std::array<int64_t, 3> strides{vector.stride(0), 1, 1};
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(vector.get(), sizes.size(), sizes.data(),
                                                        strides.data(), 0, &made));
  return Tensor(made);
}

// What the epilogue reads besides c.
EpilogueArgs leaves_of(const Norm& norm, const EpilogueArgs& wildcards) {
  EpilogueArgs found;
  for (const NormLeaf& leaf : kNormLeaves) {
    const auto& vector = norm.*leaf.vector;
    if (vector) found.tensors.push_back(per_channel(*vector));
  }
  if (norm.eps) found.scalars.push_back(*norm.eps);
  found.tensors.insert(found.tensors.end(), wildcards.tensors.begin(), wildcards.tensors.end());
  found.scalars.insert(found.scalars.end(), wildcards.scalars.begin(), wildcards.scalars.end());
  return found;
}

Made result_of(const Tensor& y, const std::optional<Tensor>& c, const Norm& norm) {
  if (!norm.training) return {y, c, {}, {}};
  return {y, c, norm.mean, norm.variance};
}

// Each nothing where the kernel does not take these tensors.
std::optional<Made> depthwise_in_one_kernel(const DepthwiseKernels& kernels, const Conv& conv,
                                            const Norm& norm, const EpilogueArgs& wildcards) {
  const Tensor& x = conv.x;
  const Tensor& weight = conv.weight;
  const auto are = [](const std::vector<int64_t>& values, int64_t value) {
    return std::all_of(values.begin(), values.end(), [=](int64_t v) { return v == value; });
  };
  if (norm.training || !are(conv.stride, kernels.stride) || !are(conv.dilation, 1) ||
      conv.groups != x.size(1) || conv.groups != weight.size(0)) {
    return {};
  }
  const bool channels_last = suggests_channels_last(x) || suggests_channels_last(weight);
  const auto out = depthwise_out(conv_shape_of(x, weight, conv.padding), kernels.stride);
  if (!out) return {};
  const std::vector<int64_t> shape{x.size(0), x.size(1), out->h, out->w};
  const auto made = [&](ScalarType type) {
    return channels_last
               ? new_strided(x, shape.data(), channels_last_strides(shape).data(), 4, type)
               : new_dense(x, shape, type);
  };
  const Tensor y = made(conv.out_type);
  std::optional<Tensor> c;
  if (conv.save) c = made(x.scalar_type());
  const EpilogueArgs leaves = leaves_of(norm, wildcards);
  if (!run_depthwise(kernels, x, weight, conv.padding, y, c, leaves.tensors, leaves.scalars)) {
    return {};
  }
  return result_of(y, c, norm);
}

std::optional<Made> direct_in_one_kernel(const ConvDirectKernels& kernels, const Conv& conv,
                                         Norm norm, const EpilogueArgs& wildcards) {
  const Tensor& x = conv.x;
  const Tensor& weight = conv.weight;
  const int device = x.get_device_index();
  if (norm.training) {
    norm.mean = new_dense(x, {weight.size(0)}, ScalarType::Float);
    norm.variance = new_dense(x, {weight.size(0)}, ScalarType::Float);
    const auto& statistics = registry<StatsLibrary>().at(kBatchStats, device);
    if (!run_conv_direct_statistics(kernels, statistics, x, weight, conv.padding, *norm.mean,
                                    *norm.variance)) {
      return {};
    }
  }
  const ConvShape sizes = conv_shape_of(x, weight, conv.padding);
  const std::vector<int64_t> shape{sizes.samples, sizes.outputs, sizes.out_h(), sizes.out_w()};
  const Tensor y = new_dense(x, shape, conv.out_type);
  std::optional<Tensor> c;
  if (conv.save) c = new_dense(x, shape, x.scalar_type());
  const EpilogueArgs leaves = leaves_of(norm, wildcards);
  if (!run_conv_direct(kernels, x, weight, conv.padding, y, c, leaves.tensors, leaves.scalars,
                       norm.training)) {
    return {};
  }
  return result_of(y, c, norm);
}

// The epilogue of c in a pass of its own, which overwrites c where nothing else reads it.
Made with_epilogue(const Conv& conv, const Norm& norm, EpilogueArgs leaves, const Tensor& c) {
  const auto& epilogue = registry<PointwiseKernels>().at(conv.kernels[0], c.get_device_index());
  leaves.tensors.insert(leaves.tensors.begin(), c);
  const bool in_place = !conv.save && c.scalar_type() == conv.out_type;
  const Tensor y = in_place ? c : new_like(c, conv.out_type);
  run_pointwise(epilogue, y, leaves.tensors, leaves.scalars);
  return result_of(y, conv.save ? std::optional(c) : std::nullopt, norm);
}

// With operands that are no channel's, the kernel makes c alone.
std::optional<Made> stem_in_one_kernel(const StemKernels& kernels, const Conv& conv,
                                       const Norm& norm, const EpilogueArgs& wildcards) {
  const std::vector<int64_t> none{1, 1};
  if (norm.training || conv.groups != 1 || conv.dilation != none) return {};
  const auto call = stem_call(kernels, conv.x, conv.weight, conv.stride, conv.padding);
  if (!call) return {};
  const EpilogueArgs leaves = leaves_of(norm, wildcards);
  const auto& operands = leaves.tensors;
  const bool applies = std::all_of(operands.begin(), operands.end(), is_per_channel);
  std::optional<Tensor> c;
  if (conv.save || !applies) c = call->new_result(conv.x, conv.x.scalar_type());
  if (!applies) {
    run_stem(kernels, *call, std::nullopt, c, {}, {});
    return with_epilogue(conv, norm, leaves, *c);
  }
  const Tensor y = call->new_result(conv.x, conv.out_type);
  run_stem(kernels, *call, y, c, operands, leaves.scalars);
  return result_of(y, c, norm);
}

std::optional<Made> implicit_in_one_kernel(const ImplicitKernels& kernels, const Conv& conv,
                                           const Norm& norm, const EpilogueArgs& wildcards) {
  const Tensor& x = conv.x;
  // torch's result lies as one of the two.
  const bool channels_last = suggests_channels_last(x) || suggests_channels_last(conv.weight);
  if (norm.training || conv.groups != 1 || !channels_last) return {};
  check_conv(kernels.x, x, conv.weight, conv.padding);
  const ImplicitWindow window =
      implicit_window(x, conv.weight, conv.stride, conv.padding, conv.dilation);
  if (!implicit_takes(window)) return {};
  const std::vector<int64_t> size{x.size(0), conv.weight.size(0), window.out_h(), window.out_w()};
  const auto made = [&](ScalarType type) {
    return new_strided(x, size.data(), channels_last_strides(size).data(), size.size(), type);
  };
  const Tensor y = made(conv.out_type);
  std::optional<Tensor> c;
  if (conv.save) c = made(x.scalar_type());
  const EpilogueArgs leaves = leaves_of(norm, wildcards);
  if (!run_implicit(kernels, x, conv.weight, window, y, c, leaves.tensors, leaves.scalars)) {
    return {};
  }
  return result_of(y, c, norm);
}

std::optional<Made> conv_in_one_kernel(const Conv& conv, const Norm& norm,
                                       const EpilogueArgs& wildcards) {
  const std::string& name = conv.kernels[1];
  const int device = conv.x.get_device_index();
  if (const auto* kernels = registry<DepthwiseKernels>().find(name, device)) {
    return depthwise_in_one_kernel(*kernels, conv, norm, wildcards);
  }
  if (const auto* kernels = registry<StemKernels>().find(name, device)) {
    return stem_in_one_kernel(*kernels, conv, norm, wildcards);
  }
  if (const auto* kernels = registry<ImplicitKernels>().find(name, device)) {
    return implicit_in_one_kernel(*kernels, conv, norm, wildcards);
  }
  return direct_in_one_kernel(registry<ConvDirectKernels>().at(name, device), conv, norm,
                              wildcards);
}

Made fused_convolution(const Conv& conv, Norm norm, const EpilogueArgs& wildcards) {
  require_cuda(conv.x, "x");
  STD_TORCH_CHECK(conv.padding.size() == 4, "fx_fuser: padding is [left, right, top, bottom], not ",
                  to_string(conv.padding));
  if (conv.kernels.size() > 1) {
    auto done = conv_in_one_kernel(conv, norm, wildcards);
    if (done) return *std::move(done);
  }
  const Tensor c = convolution(conv);
  if (norm.training) {
    const auto& statistics = registry<StatsLibrary>().at(kBatchStats, conv.x.get_device_index());
    std::tie(norm.mean, norm.variance) = run_batch_stats(statistics, c);
  }
  const EpilogueArgs leaves = leaves_of(norm, wildcards);
  if (conv.kernels.empty()) {
    check_is_result(c, conv.out_type, leaves);
    return result_of(c, std::nullopt, norm);
  }
  return with_epilogue(conv, norm, leaves, c);
}

Made make_conv2d(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                 const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                 const std::vector<int64_t>& dilation, int64_t groups, bool tf32,
                 const std::string& /*product*/, const std::string& /*backward*/, bool /*again*/,
                 const std::string& /*epilogue*/, const std::vector<Tensor>& t,
                 const std::vector<double>& s, const std::vector<std::string>& kernels,
                 ScalarType out_type, bool save) {
  const Conv conv{x, weight, stride, padding, dilation, groups, tf32, kernels, out_type, save};
  Norm norm;
  norm.bias = bias;
  return fused_convolution(conv, norm, wildcards_of(t, s));
}

Made make_conv2d_batchnorm(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                           const std::optional<Tensor>& running_mean,
                           const std::optional<Tensor>& running_variance,
                           const std::optional<Tensor>& gamma, const std::optional<Tensor>& beta,
                           const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                           const std::vector<int64_t>& dilation, int64_t groups, bool tf32,
                           const std::string& /*product*/, const std::string& /*backward*/,
                           bool /*again*/, bool training, double /*momentum*/, double eps,
                           const std::string& /*epilogue*/, const std::vector<Tensor>& t,
                           const std::vector<double>& s, const std::vector<std::string>& kernels,
                           ScalarType out_type, bool save) {
  const Conv conv{x, weight, stride, padding, dilation, groups, tf32, kernels, out_type, save};
  Norm norm{bias, running_mean, running_variance, gamma, beta, eps, training};
  // The bias only shifts the batch's mean; running statistics are not read.
  if (training) norm.bias = norm.mean = norm.variance = std::nullopt;
  return fused_convolution(conv, norm, wildcards_of(t, s));
}

constexpr auto* conv2d_kernel = PackedResults<&make_conv2d>::two;
constexpr auto* conv2d_batchnorm_kernel = PackedResults<&make_conv2d_batchnorm>::four;

}  // namespace
}  // namespace fx_fuser
