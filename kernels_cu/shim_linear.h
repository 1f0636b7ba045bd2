// fx_fuser::linear_kernel on CUDA: the library's product, then the epilogue.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "shim_pointwise.h"

namespace fx_fuser {
namespace {

double cpu_scalar(const Tensor& tensor) {
  const void* data = tensor.data_ptr();
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return *static_cast<const double*>(data);
    case ScalarType::Float:
      return *static_cast<const float*>(data);
    case ScalarType::Long:
      return static_cast<double>(*static_cast<const int64_t*>(data));
    case ScalarType::Int:
      return *static_cast<const int32_t*>(data);
    case ScalarType::Bool:
      return *static_cast<const bool*>(data);
    default:
      break;
  }
  std::array<StableIValue, 5> stack{
      torch::stable::detail::from(tensor), torch::stable::detail::from(ScalarType::Double),
      torch::stable::detail::from(false), torch::stable::detail::from(false),
      torch::stable::detail::from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::to", "dtype", stack.data(), TORCH_ABI_VERSION));
  return cpu_scalar(torch::stable::detail::to<Tensor>(stack[0]));
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x),
                                    torch::stable::detail::from(weight),
                                    torch::stable::detail::from(bias)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// fx_fuser::linear_kernel on CUDA; fx_fuser/ops.py has the schema and what its arguments mean.
std::tuple<Tensor, Tensor> linear_kernel(const Tensor& x, const Tensor& weight,
                                         const std::optional<Tensor>& bias,
                                         const std::vector<std::optional<Tensor>>& t,
                                         const std::vector<double>& s, const std::string& kinds,
                                         const std::string& /*pattern*/, const std::string& kernel,
                                         ScalarType out_type, bool save) {
  require_cuda(x, "x");
  const PointwiseKernels& kernels = registry().at(kernel, x.get_device_index());
  const Tensor c = linear(x, weight, bias);

  std::vector<Tensor> inputs{c};
  std::vector<double> scalars;
  const auto c_sizes = c.sizes();
  std::vector<int64_t> shape(c_sizes.begin(), c_sizes.end());
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i] == 's') {
      scalars.push_back(s[i]);
    } else if (kinds[i] == 't' && t[i]->dim() == 0 && t[i]->is_cpu()) {
      scalars.push_back(cpu_scalar(*t[i]));
    } else if (kinds[i] == 't') {
      inputs.push_back(*t[i]);
      // A gate, one column wide, may be spread along that dimension.
      if (!shape.empty() && shape.back() == 1 && t[i]->dim() > 0) {
        shape.back() = t[i]->size(t[i]->dim() - 1);
      }
    }
  }
  const bool same_shape = std::equal(shape.begin(), shape.end(), c_sizes.begin());
  const bool in_place = !save && c.scalar_type() == out_type && same_shape;
  const Tensor y = in_place ? c : torch::stable::new_empty(c, shape, out_type);
  run_pointwise(kernels, y, inputs, scalars);
  return {y, save ? c : torch::stable::new_empty(c, {0})};
}

}  // namespace
}  // namespace fx_fuser
