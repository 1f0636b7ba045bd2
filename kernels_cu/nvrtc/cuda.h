// The driver's own needs headers of the host.
#pragma once

#include <cstdint>

// Aligned as by the cuda.h of this version, from which the shim has it.
struct alignas(__CUDACC_VER_MAJOR__ < 13 ? 64 : 128) CUtensorMap {
  uint64_t opaque[16];
};
