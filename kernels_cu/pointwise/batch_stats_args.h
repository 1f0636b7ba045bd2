// Arguments of the batch-statistics kernels. The shim fills them, batch_stats.cu reads them.
#pragma once

#include <cstdint>

#include "common/divisor.h"

namespace fx_fuser {

constexpr int kStatsThreads = 256;
constexpr int kStatsInFlight = 4;          // loads a thread has in flight: one round
constexpr int kStatsRounds = 8;            // most rounds per thread before the block's merge
constexpr int64_t kStatsMinBlocks = 1024;  // with fewer blocks than this, fewer rounds

// x is [samples, channels, plane], dense: a channel is `samples` runs of `plane` elements.
struct PlanesArgs {
  const void* x;  // rounded down to 16 bytes
  void* partial;  // [channels, splits] moments
  int64_t channels;
  int64_t plane;
  int64_t skew;               // elements between the rounded pointer and the first element
  Divisor<uint64_t> vectors;  // the most 16-byte vectors that a run touches
  uint64_t units;             // vectors per channel
  uint64_t units_per_block;   // a multiple of a block's round
  int64_t splits;
};

// x is [rows, channels], dense.
struct RowsArgs {
  const void* x;
  void* partial;  // [channels, splits] moments
  int64_t rows;
  int64_t channels;
  int64_t rows_per_block;
  int64_t splits;
};

struct CombineArgs {
  const void* partial;
  void* mean;
  void* variance;
  int64_t splits;
};

}  // namespace fx_fuser
