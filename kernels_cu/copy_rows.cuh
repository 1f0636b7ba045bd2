// Rows of floats to rows that are dense and 16-byte aligned, as the copy engine asks for them.
#pragma once

#include <cstdint>

#include "divisor.h"

namespace fx_fuser {

constexpr int kCopyThreads = 256;
constexpr int kCopyInFlight = 4;

// [outer, inner, rows, columns]; `from` with any strides, rows of `to` `pitch` apart.
struct CopyRowsArgs {
  const float* from;
  float* to;
  int64_t stride_outer;
  int64_t stride_inner;
  int64_t stride_row;
  int64_t stride_column;
  Divisor<uint64_t> pitch;
  Divisor<uint64_t> rows;
  Divisor<uint64_t> inner;
  uint64_t columns;
  uint64_t count;  // elements of `to`
};

#ifdef __CUDACC__
__device__ __forceinline__ void copy_rows(const CopyRowsArgs& args) {
  const uint64_t first = uint64_t{blockIdx.x} * (kCopyThreads * kCopyInFlight) + threadIdx.x;
  float value[kCopyInFlight];
#pragma unroll
  for (int i = 0; i < kCopyInFlight; ++i) {
    const uint64_t element = first + i * kCopyThreads;
    const uint64_t row = divide(element, args.pitch);
    const uint64_t column = element - row * args.pitch.size;
    const uint64_t batch = divide(row, args.rows);
    const uint64_t outer = divide(batch, args.inner);
    const int64_t at =
        outer * args.stride_outer + (batch - outer * args.inner.size) * args.stride_inner +
        (row - batch * args.rows.size) * args.stride_row + column * args.stride_column;
    value[i] = element < args.count && column < args.columns ? args.from[at] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kCopyInFlight; ++i) {
    const uint64_t element = first + i * kCopyThreads;
    if (element < args.count) args.to[element] = value[i];
  }
}
#endif

}  // namespace fx_fuser
