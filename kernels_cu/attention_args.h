// What the host tells the attention kernels that are no products. The shim fills it, attention.cu
// reads it.
#pragma once

#include <cstdint>

#include "divisor.h"

namespace fx_fuser {

constexpr int kAttentionThreads = 256;
constexpr int kAttentionWidth = 4;    // scores that a thread reads at once
constexpr int kAttentionVectors = 8;  // of those, that it keeps at most

// Longest rows that stay in a warp's registers, few or as many as it has, and in a block's.
constexpr int kShortRow = 2 * kAttentionWidth * 32;
constexpr int kWarpRow = kAttentionVectors * kAttentionWidth * 32;
constexpr int kBlockRow = kAttentionVectors * kAttentionWidth * kAttentionThreads;

struct SoftmaxArgs {
  float* scores;  // [planes, rows, pitch], 16-byte aligned; become probabilities
  float* lse;     // [planes, lse_pitch] from the first plane on; null: not wanted
  int64_t pitch;
  int64_t lse_pitch;
  Divisor<uint32_t> rows;
  uint32_t count;     // rows of all planes
  int32_t keys;       // of a row
  int32_t first_row;  // which row of its plane the first one here is
  int32_t last_row;   // of a plane, here or not
  bool causal;        // a row sees the keys up to its own number
};

// dots[row] = sum over columns of a b, both [outer, inner, rows, columns].
struct RowDotsArgs {
  struct Operand {
    const float* data;
    int64_t outer;
    int64_t inner;
    int64_t row;
    int64_t column;
  };

  Operand a;
  Operand b;
  float* dots;
  Divisor<uint32_t> rows;
  Divisor<uint32_t> inner;
  uint32_t count;  // rows of all planes
  int32_t columns;
};

// to[i] = i
struct CountArgs {
  float* to;
  uint32_t count;
};

}  // namespace fx_fuser
