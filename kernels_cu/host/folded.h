// conv2d_folded on CUDA: cuDNN's fused convolution, bias, addition and relu, called through torch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "host/device.h"
#include "host/image.h"
#include "host/made.h"

namespace fx_fuser {
namespace {

template <size_t kCount>
Made dispatched(const char* op, std::array<StableIValue, kCount>& stack) {
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
  return Made(torch::stable::detail::to<Tensor>(stack[0]));
}

// torch's fused call does not split tensors that are too large for 32-bit indices.
bool is_small(const Tensor& x, const Tensor& weight, const std::vector<int64_t>& stride,
              const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation) {
  int64_t result = x.size(0) * weight.size(0);
  for (int d = 0; d < 2; ++d) {
    const int64_t window = dilation[d] * (weight.size(2 + d) - 1) + 1;
    result *= (x.size(2 + d) + 2 * padding[d] - window) / stride[d] + 1;
  }
  return x.numel() > 0 && std::max(x.numel(), result) < std::numeric_limits<int32_t>::max();
}

// std::nullopt if cuDNN's fused call does not support the tensors.
std::optional<Made> conv2d_folded(const Tensor& x, const Tensor& weight,
                                  const std::optional<Tensor>& bias,
                                  const std::optional<Tensor>& addend,
                                  const std::vector<int64_t>& stride,
                                  const std::vector<int64_t>& padding,
                                  const std::vector<int64_t>& dilation, int64_t groups, bool relu) {
  using torch::stable::detail::from;
  require_cuda(x, "x");
  // A tensor with both layouts, a 1 x 1 image for example, is excluded: torch chooses the result's
  // strides.
  const bool is_plain = is_dense_channels_last(x) && !x.is_contiguous() &&
                        is_dense_channels_last(weight) &&
                        (!addend || is_dense_channels_last(*addend)) &&
                        is_small(x, weight, stride, padding, dilation);
  if (!is_plain) return {};
  if (!relu) {
    std::array<StableIValue, 9> stack{
        from(x),       from(weight),   from(std::nullopt), from(stride),
        from(padding), from(dilation), from(false),        from(std::vector<int64_t>{0, 0}),
        from(groups)};
    return dispatched("aten::convolution", stack);
  }
  if (!addend) {
    std::array<StableIValue, 7> stack{from(x),       from(weight),   from(bias),  from(stride),
                                      from(padding), from(dilation), from(groups)};
    return dispatched("aten::cudnn_convolution_relu", stack);
  }
  std::array<StableIValue, 9> stack{from(x),     from(weight), from(*addend), from(std::nullopt),
                                    from(bias),  from(stride), from(padding), from(dilation),
                                    from(groups)};
  return dispatched("aten::cudnn_convolution_add_relu", stack);
}

}  // namespace
}  // namespace fx_fuser
