// A tensor that a convolution's epilogue reads beside z.
#pragma once

#include <cstdint>

namespace fx_fuser {

constexpr int kConvMaxOperands = 7;  // more would spill registers

struct ConvOperand {
  const void* data;
  int64_t stride[4];  // of [N, O, H, W], in elements; 0 where it is broadcast
  bool per_pixel;     // differs within a channel of a sample
};

}  // namespace fx_fuser
