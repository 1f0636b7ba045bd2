// Copies rows of floats with any strides into dense, 16-byte aligned rows, as TMA requires.
#pragma once

#include <cstdint>

#include "common/copy_rows_args.h"

namespace fx_fuser {

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

}  // namespace fx_fuser
