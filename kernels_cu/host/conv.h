// conv2d and conv2d_batchnorm on CUDA: one of our kernels, or the library's convolution followed by
// the batch statistics and the epilogue.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "host/batch_stats.h"
#include "host/conv_call.h"
#include "host/made.h"

namespace fx_fuser {
namespace {

Tensor convolution(const Conv& conv) {
  using torch::stable::detail::from;
  const auto& pad = conv.padding;
  const bool is_even = pad[0] == pad[1] && pad[2] == pad[3];
  const Tensor x = is_even ? conv.x : torch::stable::pad(conv.x, pad);
  const std::vector<int64_t> padding =
      is_even ? std::vector{pad[2], pad[0]} : std::vector<int64_t>{0, 0};
  if (x.scalar_type() == ScalarType::Float && !conv.tf32) {
    // aten::convolution follows cuDNN's own setting, which allows TF32 by default.
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

Made fused_convolution(const Conv& conv, Norm norm, const EpilogueArgs& args) {
  require_cuda(conv.x, "x");
  STD_TORCH_CHECK(conv.padding.size() == 4, "fx_fuser: padding is [left, right, top, bottom], not ",
                  to_string(conv.padding));
  if (conv.kernels.size() > 1) {
    const auto& kernel = registry<ConvKernel>().at(conv.kernels[1], conv.x.get_device_index());
    auto done = kernel.run(conv, norm, args);
    if (done) return *std::move(done);
  }
  const Tensor c = convolution(conv);
  if (norm.training) {
    const auto& statistics = registry<StatsLibrary>().at(kBatchStats, conv.x.get_device_index());
    std::tie(norm.mean, norm.variance) = run_batch_stats(statistics, c);
  }
  const EpilogueArgs leaves = leaves_of(norm, args);
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
  return fused_convolution(conv, norm, epilogue_args_of(t, s));
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
  // In training the bias cancels with the batch's mean, and running statistics are not read.
  if (training) norm.bias = norm.mean = norm.variance = std::nullopt;
  return fused_convolution(conv, norm, epilogue_args_of(t, s));
}

}  // namespace
}  // namespace fx_fuser
