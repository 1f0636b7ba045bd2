// What the host tells the gemm of unaligned 16-bit operands by TMA and wgmma
// (linear_combs_sm90.cuh), and how a block's shared memory is divided.
//
// A *line* is what is adjacent in memory of a matrix. A *comb* is each eighth line of one. Eight
// lines of any pitch, in 16-bit elements, are a multiple of 16 bytes, so a comb is a tensor that
// TMA takes: it begins at the aligned vector that its first line begins in, `offset` elements
// ahead.
#pragma once

#include <cstdint>

#include "common/operands.h"
#include "common/tensor_map.h"

namespace fx_fuser {

constexpr int kCombs = 8;       // of a matrix
constexpr int kCombStepK = 64;  // k of a stage
constexpr int kCombSpan = 64;   // elements of 128 bytes, one swizzle span: a box is as wide
constexpr int kCombSpanBytes = 128;
constexpr int kCombThreads = 384;  // two warpgroups multiply, warps of the third one copy
constexpr int kCombWarps = 8;      // of the two
constexpr int kCombWarpRows = 16;  // of a warp in one wgmma
constexpr int kCombSlotBytes = kCombWarpRows * kCombSpanBytes;  // results on their way out

// A tile of the result, and how a block computes it: each of two warpgroups has `subtiles` times 64
// of its rows. Blocks of a cluster have tiles below each other, and share b's rows.
struct CombShape {
  int subtiles;
  int tile_n;
  int cluster;
  int stages;
  int slots;    // of each warp
  bool is_one;  // are boxes away from the edges of one map, not of eight?
  bool shifts;  // does a warpgroup load and shift a, not TMA?

  constexpr int tile_m() const { return 2 * 64 * subtiles; }
  constexpr int stage_bytes() const { return (tile_m() + tile_n) * kCombSpanBytes; }
  constexpr int slots_bytes() const { return kCombWarps * slots * kCombSlotBytes; }
  constexpr int shared_bytes() const {
    return stages * (stage_bytes() + 2 * 8 /*barriers*/) + slots_bytes();
  }
};

constexpr CombShape kCombShapes[] = {
    {1, 256, 2, 4, 2, false, false}, {1, 256, 2, 3, 4, false, false},
    {1, 192, 2, 4, 3, false, false}, {1, 192, 4, 4, 3, false, false},
    {2, 192, 2, 3, 2, false, false}, {1, 128, 2, 6, 2, false, false},
    {1, 256, 2, 4, 2, true, false},  {2, 192, 2, 3, 2, true, false},
    {1, 256, 2, 4, 2, false, true},  {1, 192, 2, 4, 3, false, true},
};
constexpr int kCombShapeCount = sizeof(kCombShapes) / sizeof(kCombShapes[0]);

struct Combs {
  TensorMap map[kCombs];
  // Eight lines as one, so many elements apart; without a rest of less than eight. Where a line
  // ends, the next one begins.
  TensorMap all;
  const void* data;
  int32_t offset[kCombs];
  int32_t pitch;
};

struct CombArgs {
  Combs a;    // of [m, k]; lines are rows, or k
  Combs b;    // of [n, k], aligned. Where lines are rows, or those of a are, map[0] is of all lines
  Combs out;  // of [m, n]; where a's lines are k, map[0] is of all rows, which are aligned
  float scalar[kMaxScalars];
  int32_t m;
  int32_t n;
  int32_t k;
  int32_t units;      // tiles of a cluster are a unit: so many below each other
  int32_t all_units;  // of the result
  int32_t group;      // units below each other that are taken before the next column of tiles
  bool b_is_whole;    // map[0] of b is of all lines, as [8][k / 8][n]
};

}  // namespace fx_fuser
