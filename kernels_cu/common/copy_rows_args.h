// Arguments of the kernel that copies rows. The shim fills them, copy_rows.cuh reads them.
#pragma once

#include <cstdint>

#include "common/divisor.h"

namespace fx_fuser {

constexpr int kCopyThreads = 256;
constexpr int kCopyInFlight = 4;

// [outer, inner, rows, columns]. `from` has any strides; rows of `to` are `pitch` elements apart.
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

}  // namespace fx_fuser
