// A tensor map as the emulated driver encodes it (driver.h) and TMA reads it (tensor_copies.cpp).
#pragma once

#include <cstdint>

namespace emulator {

// Innermost first; strides in bytes, without the innermost dimension. Swizzled by 128 bytes.
struct EmulatedMap {
  static constexpr uint32_t kMagic = 0x7E4508;
  static constexpr uint32_t kElementBytes = 2;

  uint32_t magic;
  uint32_t rank;
  unsigned char* data;
  uint64_t sizes[4];
  uint64_t strides[3];
  uint32_t box[4];
};

}  // namespace emulator
