// What the host tells the gathers along rows (gather_rows.cuh).
#pragma once

#include <cstdint>

namespace fx_fuser {

constexpr int kGatherTile = 32;  // rows and columns of a block's tile
constexpr int kGatherThreads = 256;
constexpr int kGatherChunk = 16;        // batches of a block: the index is read once for all
constexpr int kGatherAtOnce = 4;        // of these, how many are under way
constexpr int kGatherPlaces = 8192;     // of a row of x, at most: they are counted in shared memory
constexpr int kGatherColumns = 0xFFFF;  // at most: they are numbered in 16 bits

// [row, column] of int64.
struct GatherIndex {
  const int64_t* data;
  int64_t row_stride;
  int64_t column_stride;
};

// [batch, row, place], places adjacent.
struct GatherRows {
  void* data;
  int64_t batch_stride;
  int64_t row_stride;
};

struct GatherArgs {
  GatherRows x;  // or its gradient
  void* out;     // [batch, row, column], dense; or [batch, column, row]; or its gradient
  GatherRows d_out;
  GatherIndex index;
  // Columns in the order of the places that they read, and where those of each place begin:
  // [row, column], [row, place + 1].
  uint16_t* order;
  uint16_t* starts;
  int32_t batches;
  int32_t rows;
  int32_t places;
  int32_t columns;
  int32_t tiles;         // of columns, or of places
  int32_t batch_chunks;  // blocks of a tile
};

}  // namespace fx_fuser
