// conv2d_backward and conv2d_batchnorm_backward on CUDA: the kernels of
// conv_direct_backward_sm90.cuh.
#pragma once

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "host/conv.h"
#include "host/conv_direct_backward.h"

namespace fx_fuser {
namespace {

// Arguments of both functions, except those of the normalisation.
struct ConvBackward {
  const Tensor& x;
  const Tensor& weight;
  const std::vector<int64_t>& padding;  // left, right, top, bottom
  const std::vector<std::string>& kernels;
  const Tensor& dy;
};

// Avoids a call through the dispatcher if the type is already right: see new_strided.
Tensor as_type(const Tensor& tensor, ScalarType type) {
  return tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
}

Tensor dense(const Tensor& tensor) {
  return is_contiguous(tensor) ? tensor : torch::stable::contiguous(tensor);
}

// Gradients of the operands in `wanted`, in that order; std::nullopt if the kernels do not support
// these tensors.
std::optional<Made> backward_by_kernels(const ConvBackward& call, Norm norm,
                                        const EpilogueArgs& factors,
                                        const std::vector<std::string>& wanted) {
  if (call.kernels.empty()) return {};
  const Tensor& x = call.x;
  const Tensor& weight = call.weight;
  const auto wants = [&](const char* name) {
    return std::find(wanted.begin(), wanted.end(), name) != wanted.end();
  };
  const auto vector = [&] { return new_dense(x, {weight.size(0)}, ScalarType::Float); };
  ConvGradients to{{}, {}, {}, vector(), vector()};
  if (wants("x")) to.dx = new_like(x, x.scalar_type());
  if (wants("weight")) to.dweight = new_like(weight, ScalarType::Float);
  if (wants("bias") && !norm.training) to.dbias = vector();

  const auto type_of = [](const auto& v) { return v ? v->scalar_type() : ScalarType::Float; };
  const ScalarType of_gamma = type_of(norm.gamma);
  const ScalarType of_beta = type_of(norm.beta);
  for (auto* v : {&norm.bias, &norm.mean, &norm.variance, &norm.gamma}) {
    if (*v) *v = dense(as_type(**v, ScalarType::Float));
  }
  const auto& kernels = registry<ConvBackwardKernels>().at(call.kernels[0], x.get_device_index());
  if (!run_conv_direct_backward(kernels, dense(call.dy), x, weight, call.padding, norm, to,
                                factors)) {
    return {};
  }
  const auto gradient_of = [&](const std::string& name) {
    if (name == "x") return *to.dx;
    if (name == "weight") return as_type(*to.dweight, weight.scalar_type());
    if (name == "gamma") return as_type(to.dgamma, of_gamma);
    if (name == "beta") return as_type(to.dbeta, of_beta);
    STD_TORCH_CHECK(name == "bias", "fx_fuser: ", name, " has no gradient");
    return to.dbias ? as_type(*to.dbias, weight.scalar_type())
                    : torch::stable::new_zeros(weight, {weight.size(0)});
  };
  std::vector<Tensor> found;
  std::transform(wanted.begin(), wanted.end(), std::back_inserter(found), gradient_of);
  return Made(found);
}

std::optional<Made> conv2d_backward(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& /*bias*/,
    const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
    const std::vector<int64_t>& dilation, int64_t groups, bool /*tf32*/,
    const std::string& /*product*/, const std::string& /*backward*/, bool /*again*/,
    const std::string& /*epilogue*/, const std::vector<Tensor>& t, const std::vector<double>& s,
    const std::vector<std::string>& kernels, const Tensor& dy,
    const std::vector<Tensor>& /*statistics*/, const std::vector<std::string>& wanted) {
  require_cuda(dy, "dy");
  if (!is_dense_window(stride, dilation, groups)) return {};
  const ConvBackward call{x, weight, padding, kernels, dy};
  return backward_by_kernels(call, Norm{}, epilogue_args_of(t, s), wanted);
}

std::optional<Made> conv2d_batchnorm_backward(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& running_mean, const std::optional<Tensor>& running_variance,
    const std::optional<Tensor>& gamma, const std::optional<Tensor>& beta,
    const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
    const std::vector<int64_t>& dilation, int64_t groups, bool /*tf32*/,
    const std::string& /*product*/, const std::string& /*backward*/, bool /*again*/, bool training,
    double /*momentum*/, double eps, const std::string& /*epilogue*/, const std::vector<Tensor>& t,
    const std::vector<double>& s, const std::vector<std::string>& kernels, const Tensor& dy,
    const std::vector<Tensor>& statistics, const std::vector<std::string>& wanted) {
  require_cuda(dy, "dy");
  if (!is_dense_window(stride, dilation, groups)) return {};
  const ConvBackward call{x, weight, padding, kernels, dy};
  Norm norm{bias, running_mean, running_variance, gamma, beta, eps, training};
  if (training) {
    norm.bias = std::nullopt;
    norm.mean = statistics.at(0);
    norm.variance = statistics.at(1);
  }
  return backward_by_kernels(call, norm, epilogue_args_of(t, s), wanted);
}

}  // namespace
}  // namespace fx_fuser
