// The operands and scalars that an epilogue reads in addition to z.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "host/device.h"

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
  return cpu_scalar(torch::stable::to(tensor, ScalarType::Double));
}

// In the order of the epilogue's functor.
struct EpilogueArgs {
  std::vector<Tensor> tensors;
  std::vector<double> scalars;
};

// A 0-d CPU tensor, `torch.tensor(2.0)`, is passed as a scalar, after those of s.
EpilogueArgs epilogue_args_of(const std::vector<Tensor>& t, const std::vector<double>& s) {
  EpilogueArgs found;
  found.scalars = s;
  for (const Tensor& tensor : t) {
    if (tensor.dim() == 0 && tensor.is_cpu()) {
      found.scalars.push_back(cpu_scalar(tensor));
    } else {
      found.tensors.push_back(tensor);
    }
  }
  return found;
}

// Without kernels the library's result is returned, so there must be no epilogue and no cast.
void check_is_result(const Tensor& c, ScalarType out_type, const EpilogueArgs& args) {
  STD_TORCH_CHECK(c.scalar_type() == out_type && args.tensors.empty() && args.scalars.empty(),
                  "fx_fuser: the op needs the name of a kernel, unless the epilogue is the "
                  "identity and the result has the product's type");
}

bool broadcasts_to(const Tensor& tensor, const Tensor& out) {
  const int64_t missing = out.dim() - tensor.dim();
  if (missing < 0) return false;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1 && tensor.size(d) != out.size(d + missing)) return false;
  }
  return true;
}

// Raises unless these are the operands and scalars that the kernels' epilogue takes, for a result
// like `out`.
template <class Kernels>
void check_epilogue(const Kernels& kernels, const Tensor& out, const EpilogueArgs& args) {
  const auto& [operands, scalars] = args;
  STD_TORCH_CHECK(operands.size() == kernels.operands.size(), "fx_fuser: the kernel takes ",
                  kernels.operands.size(), " operands, not ", operands.size());
  STD_TORCH_CHECK(static_cast<int>(scalars.size()) == kernels.scalars,
                  "fx_fuser: the kernel takes ", kernels.scalars, " scalars, not ", scalars.size());
  for (size_t i = 0; i < operands.size(); ++i) {
    STD_TORCH_CHECK(operands[i].is_cuda() &&
                        operands[i].get_device_index() == out.get_device_index() &&
                        operands[i].scalar_type() == kernels.operands[i],
                    "fx_fuser: operand ", i, " must be of ", toString(kernels.operands[i]),
                    " on cuda:", out.get_device_index());
    STD_TORCH_CHECK(broadcasts_to(operands[i], out), "fx_fuser: operand ", i, " of shape ",
                    to_string(operands[i].sizes()), " does not broadcast to the shape ",
                    to_string(out.sizes()));
  }
}

}  // namespace
}  // namespace fx_fuser
