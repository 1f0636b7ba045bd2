// fx_fuser::conv2d_backward and conv2d_batchnorm_backward on CUDA: the kernels of
// conv_direct_backward_sm90.cuh or, for what they do not take, the ops in torch.
#pragma once

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "host/conv.h"
#include "host/conv_direct_backward.h"

namespace fx_fuser {
namespace {

// What both ops are called with, beside what is normalised.
struct ConvBackward {
  const Tensor& x;
  const Tensor& weight;
  const std::vector<int64_t>& padding;  // left, right, top, bottom
  const std::vector<std::string>& kernels;
  const Tensor& dy;
};

// Without a call through the dispatcher where there is nothing to do: see new_strided.
Tensor as_type(const Tensor& tensor, ScalarType type) {
  return tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
}

Tensor dense(const Tensor& tensor) {
  return is_contiguous(tensor) ? tensor : torch::stable::contiguous(tensor);
}

constexpr int64_t place_of(std::string_view names, std::string_view name) {
  int64_t place = 0;
  while (names.substr(0, names.find(", ")) != name) {
    names.remove_prefix(names.find(", ") + 2);  // no such name: no constant expression
    ++place;
  }
  return place;
}

// Places of the operands in the ops' arguments, by which `wanted` names them.
constexpr int64_t kX = place_of(kConvBatchNormNames, "x");
constexpr int64_t kWeight = place_of(kConvBatchNormNames, "weight");
constexpr int64_t kBias = place_of(kConvBatchNormNames, "bias");
constexpr int64_t kGamma = place_of(kConvBatchNormNames, "gamma");
constexpr int64_t kBeta = place_of(kConvBatchNormNames, "beta");
static_assert(kX == place_of(kConvNames, "x") && kWeight == place_of(kConvNames, "weight") &&
              kBias == place_of(kConvNames, "bias"));

struct Place {
  const char* name;
  int64_t place;
};
constexpr Place kPlaces[] = {
    {"x", kX}, {"weight", kWeight}, {"bias", kBias}, {"gamma", kGamma}, {"beta", kBeta}};

// Of the operands at the places `wanted`, in that order; nothing where the kernels do not take
// these tensors.
std::optional<std::vector<Tensor>> backward_by_kernels(const ConvBackward& call, Norm norm,
                                                       const EpilogueArgs& factors,
                                                       const std::vector<int64_t>& wanted) {
  if (call.kernels.empty()) return {};
  const Tensor& x = call.x;
  const Tensor& weight = call.weight;
  const auto wants = [&](int64_t place) {
    return std::find(wanted.begin(), wanted.end(), place) != wanted.end();
  };
  const auto vector = [&] { return new_dense(x, {weight.size(0)}, ScalarType::Float); };
  ConvGradients to{{}, {}, {}, vector(), vector()};
  if (wants(kX)) to.dx = new_like(x, x.scalar_type());
  if (wants(kWeight)) to.dweight = new_like(weight, ScalarType::Float);
  if (wants(kBias) && !norm.training) to.dbias = vector();

  const auto type_of = [](const auto& v) { return v ? v->scalar_type() : ScalarType::Float; };
  const ScalarType of_gamma = type_of(norm.gamma);
  const ScalarType of_beta = type_of(norm.beta);
  for (auto* v : {&norm.bias, &norm.mean, &norm.variance, &norm.gamma}) {
    if (*v) *v = dense(as_type(**v, ScalarType::Float));
  }
  const auto& kernels = registry<ConvBackwardKernels>().at(call.kernels[0], x.get_device_index());
  if (!run_conv_direct_backward(kernels, dense(call.dy), x, weight, call.padding, norm, to,
                                factors.tensors, factors.scalars)) {
    return {};
  }
  const auto gradient_at = [&](int64_t place) {
    switch (place) {
      case kX:
        return *to.dx;
      case kWeight:
        return as_type(*to.dweight, weight.scalar_type());
      case kBias:
        return to.dbias ? as_type(*to.dbias, weight.scalar_type())
                        : torch::stable::new_zeros(weight, {weight.size(0)});
      case kGamma:
        return as_type(to.dgamma, of_gamma);
      case kBeta:
        return as_type(to.dbeta, of_beta);
      default:
        STD_TORCH_CHECK(false, "fx_fuser: the operand at ", place, " has no gradient");
    }
  };
  std::vector<Tensor> found;
  std::transform(wanted.begin(), wanted.end(), std::back_inserter(found), gradient_at);
  return found;
}

template <class... Arguments>
std::vector<Tensor> call_in_torch(const char* op, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<std::vector<Tensor>>(stack[0]);
}

std::vector<Tensor> conv2d_backward(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
    const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
    const std::vector<int64_t>& dilation, int64_t groups, bool tf32, const std::string& product,
    const std::string& backward, bool again, const std::string& epilogue,
    const std::vector<Tensor>& t, const std::vector<double>& s,
    const std::vector<std::string>& kernels, const Tensor& dy, const std::vector<Tensor>& products,
    const std::vector<int64_t>& wanted) {
  require_cuda(dy, "dy");
  if (is_dense_window(stride, dilation, groups)) {
    const ConvBackward call{x, weight, padding, kernels, dy};
    auto found = backward_by_kernels(call, Norm{}, epilogue_args_of(t, s), wanted);
    if (found) return *std::move(found);
  }
  return call_in_torch("fx_fuser::conv2d_backward_in_torch", x, weight, bias, stride, padding,
                       dilation, groups, tf32, product, backward, again, epilogue, t, s, kernels,
                       dy, products, wanted);
}

std::vector<Tensor> conv2d_batchnorm_backward(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& running_mean, const std::optional<Tensor>& running_variance,
    const std::optional<Tensor>& gamma, const std::optional<Tensor>& beta,
    const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
    const std::vector<int64_t>& dilation, int64_t groups, bool tf32, const std::string& product,
    const std::string& backward, bool again, bool training, double momentum, double eps,
    const std::string& epilogue, const std::vector<Tensor>& t, const std::vector<double>& s,
    const std::vector<std::string>& kernels, const Tensor& dy, const std::vector<Tensor>& products,
    const std::vector<int64_t>& wanted) {
  require_cuda(dy, "dy");
  const ConvBackward call{x, weight, padding, kernels, dy};
  Norm norm{bias, running_mean, running_variance, gamma, beta, eps, training};
  if (training) {
    norm.bias = std::nullopt;
    norm.mean = products[0];
    norm.variance = products[1];
  }
  if (is_dense_window(stride, dilation, groups)) {
    auto found = backward_by_kernels(call, norm, epilogue_args_of(t, s), wanted);
    if (found) return *std::move(found);
  }
  return call_in_torch("fx_fuser::conv2d_batchnorm_backward_in_torch", x, weight, bias,
                       running_mean, running_variance, gamma, beta, stride, padding, dilation,
                       groups, tf32, product, backward, again, training, momentum, eps, epilogue, t,
                       s, kernels, dy, products, wanted);
}

}  // namespace
}  // namespace fx_fuser
