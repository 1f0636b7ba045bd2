// The CUtensorMap of cuda.h, which neither the kernels nor the shim include: the driver's
// cuTensorMapEncodeTiled fills it and TMA reads it. The alignment is CUDA 13's, 128 bytes, which
// also satisfies CUDA 12's 64.
#pragma once

#include <cstdint>

namespace fx_fuser {

struct alignas(128) TensorMap {
  uint64_t opaque[16];
};

}  // namespace fx_fuser
