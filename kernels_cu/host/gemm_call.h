// The interface of gemm kernels, for Linear and batched gemms, as the ops call it.
#pragma once

#include <optional>

#include "host/device.h"
#include "host/epilogue_args.h"

namespace fx_fuser {
namespace {

struct GemmKernel {
  virtual ~GemmKernel() = default;

  // Whether it is faster than the library, by the cost model and by the data of earlier calls:
  // fx_fuser/planning measured one size, and a graph may be called with others. Call this once per
  // product: the precision fallback counts the calls.
  virtual bool is_profitable(const Tensor& x, const Tensor& weight) const = 0;

  // y = epilogue(c, args) with c = x weightᵀ + bias, which is stored too if given. Returns false,
  // without a launch, if it does not support these tensors.
  virtual bool run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                   const Tensor& y, const std::optional<Tensor>& c,
                   const EpilogueArgs& args) const = 0;
};

}  // namespace
}  // namespace fx_fuser
