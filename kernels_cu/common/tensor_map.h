// What the driver's cuTensorMapEncodeTiled fills and TMA reads: the CUtensorMap of
// cuda.h, which neither the kernels nor the shim include. Aligned as by CUDA 13's; by CUDA 12's it
// is 64 bytes, which this satisfies.
#pragma once

#include <cstdint>

namespace fx_fuser {

struct alignas(128) TensorMap {
  uint64_t opaque[16];
};

}  // namespace fx_fuser
