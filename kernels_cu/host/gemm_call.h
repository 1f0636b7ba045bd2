// A Linear's or a batched gemm's kernel, as the ops call it.
#pragma once

#include <optional>

#include "host/device.h"
#include "host/epilogue_args.h"

namespace fx_fuser {
namespace {

struct GemmKernel {
  virtual ~GemmKernel() = default;

  // Is it faster than the library, by the cost model and earlier data? What fx_fuser/planning
  // measured holds for one size, and a graph may be called with others. Ask once a call: the
  // precision fallback counts each asking.
  virtual bool is_profitable(const Tensor& x, const Tensor& weight) const = 0;

  // y = epilogue(c, args) with c = x weightᵀ + bias, which is stored too if asked for. False, and
  // nothing is launched, where it does not take these tensors.
  virtual bool run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                   const Tensor& y, const std::optional<Tensor>& c,
                   const EpilogueArgs& args) const = 0;
};

}  // namespace
}  // namespace fx_fuser
