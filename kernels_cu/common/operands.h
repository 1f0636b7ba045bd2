// What an epilogue reads, in the argument blocks of all kernels.
#pragma once

#include <cstdint>

namespace fx_fuser {

constexpr int kMaxInputs = 16;
constexpr int kMaxScalars = 8;

// Elements a thread handles at once: what fills 16 bytes of the wider of result and anchor.
constexpr int vector_width(int out_size, int anchor_size) {
  return 16 / (out_size > anchor_size ? out_size : anchor_size);
}

// Where a tensor lies that an epilogue reads; strides in elements, 0 where it is broadcast.
template <int kRank>
struct Strided {
  const void* data;
  int64_t stride[kRank];
};

// How an operand meets one vector, that is V consecutive elements of out's memory.
enum class Mode : uint8_t {
  kVector,   // V consecutive, aligned elements
  kSplat,    // one element, V times
  kStrided,  // V elements, `stride[0]` apart
};

}  // namespace fx_fuser
