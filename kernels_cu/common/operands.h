// Epilogue operands, as the argument blocks of all kernels hold them.
#pragma once

#include <cstdint>

namespace fx_fuser {

constexpr int kMaxInputs = 16;
constexpr int kMaxScalars = 8;

// Elements per thread and vector: 16 bytes of the wider of the result's and the anchor's type.
constexpr int vector_width(int out_size, int anchor_size) {
  return 16 / (out_size > anchor_size ? out_size : anchor_size);
}

// A tensor that an epilogue reads. Strides in elements, 0 where it is broadcast.
template <int kRank>
struct Strided {
  const void* data;
  int64_t stride[kRank];
};

// How an operand maps to one vector: V consecutive elements of the result's memory.
enum class Mode : uint8_t {
  kVector,   // V consecutive, aligned elements
  kSplat,    // one element, V times
  kStrided,  // V elements, `stride[0]` apart
};

}  // namespace fx_fuser
