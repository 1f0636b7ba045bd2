// A tensor that a convolution's epilogue reads in addition to z.
#pragma once

#include "common/operands.h"

namespace fx_fuser {

constexpr int kConvMaxOperands = 7;  // more would spill registers

struct ConvOperand : Strided<4> {  // [N, O, H, W]
  bool per_pixel;                  // varies within a channel of a sample
};

}  // namespace fx_fuser
