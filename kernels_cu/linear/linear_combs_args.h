// Arguments and shared-memory layout of the gemm of unaligned 16-bit operands by TMA and wgmma
// (linear_combs_sm90.cuh).
//
// A *line* is a row or column of a matrix whose elements are adjacent in memory. A *comb* is every
// eighth line. Eight lines of any pitch, in 16-bit elements, span a multiple of 16 bytes, so a comb
// is a tensor that TMA supports: it begins at the aligned vector in which its first line begins,
// `offset` elements ahead of that. TMA's boxes begin at aligned vectors, too.
#pragma once

#include <cstdint>

#include "common/operands.h"
#include "common/tensor_map.h"

namespace fx_fuser {

constexpr int kCombs = 8;       // per matrix
constexpr int kCombStepK = 64;  // k per stage
constexpr int kCombSpan = 64;   // elements in 128 bytes, one swizzle span: the width of a box
constexpr int kCombSpanBytes = 128;
constexpr int kCombThreads = 384;  // two warpgroups multiply, two warps of the third one copy
constexpr int kCombWarps = 8;      // that multiply
constexpr int kCombWarpRows = 16;  // of a warp in one wgmma
constexpr int kCombSlotBytes = kCombWarpRows * kCombSpanBytes;  // staged results

// A tile of the result, and how a block computes it: each of two warpgroups has `subtiles` times 64
// of its rows. The blocks of a cluster have tiles below each other and share b's part.
struct CombShape {
  int subtiles;
  int tile_n;
  int cluster;
  int stages;
  int slots;  // for staged results, per warp

  constexpr int tile_m() const { return 2 * 64 * subtiles; }
  constexpr int spans_n() const { return (tile_n + kCombSpan - 1) / kCombSpan; }
  constexpr int stage_bytes() const { return (tile_m() + spans_n() * kCombSpan) * kCombSpanBytes; }
  constexpr int slots_bytes() const { return kCombWarps * slots * kCombSlotBytes; }
  constexpr int shared_bytes() const {
    return stages * (stage_bytes() + 2 * 8 /*barriers*/) + slots_bytes();
  }
  // Columns from one tile to the next. If lines are k, the last 8 columns belong to the next tile.
  constexpr int step_n(bool along_a) const { return along_a ? tile_n : tile_n - 8; }
  // If k are adjacent, results are stored in whole spans. If not, accumulators move between
  // columns, for which two subtiles leave no registers.
  constexpr bool takes(bool along_a) const {
    return along_a ? tile_n % kCombSpan == 0 : subtiles == 1;
  }
};

constexpr CombShape kCombShapes[] = {
    {1, 256, 2, 4, 2},
    {1, 192, 2, 5, 1},
    {2, 192, 2, 3, 2},
    {1, 240, 2, 4, 2},
};
constexpr int kCombShapeCount = sizeof(kCombShapes) / sizeof(kCombShapes[0]);

struct Combs {
  TensorMap map[kCombs];
  int32_t offset[kCombs];
};

// The product of a [m, k] and b [n, k]. If x's lines are k, a is the weight and b is x, and the
// result is out's transpose.
struct CombArgs {
  Combs a;
  Combs b;    // if k are adjacent in a: map[0] has all lines, which are aligned
  Combs out;  // if a's lines are k: map[0] has all rows, which are aligned
  void* out_data;
  int64_t out_pitch;  // elements
  float scalar[kMaxScalars];
  int32_t order[kCombs];  // of combs, if lines are k: b's in descending order of offset
  int32_t m;
  int32_t n;
  int32_t k;
  int32_t units_of_comb;  // units (a cluster's tiles) below each other, in one comb
  int32_t units;          // the same in all combs
  int32_t all_units;      // of the result
  int32_t group;          // units below each other before the next column of tiles
};

}  // namespace fx_fuser
