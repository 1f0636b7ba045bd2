// What the host tells the gemm of unaligned 16-bit operands by TMA and wgmma
// (linear_combs_sm90.cuh), and how a block's shared memory is divided.
//
// A *line* is what is adjacent in memory of a matrix. A *comb* is each eighth line of one. Eight
// lines of any pitch, in 16-bit elements, are a multiple of 16 bytes, so a comb is a tensor that
// TMA takes: it begins at the aligned vector that its first line begins in, `offset` elements
// ahead. TMA's boxes begin at aligned vectors, too.
#pragma once

#include <cstdint>

#include "common/operands.h"
#include "common/tensor_map.h"

namespace fx_fuser {

constexpr int kCombs = 8;       // of a matrix
constexpr int kCombStepK = 64;  // k of a stage
constexpr int kCombSpan = 64;   // elements of 128 bytes, one swizzle span: a box is as wide
constexpr int kCombSpanBytes = 128;
constexpr int kCombThreads = 384;  // two warpgroups multiply, two warps of the third one copy
constexpr int kCombWarps = 8;      // of the two
constexpr int kCombWarpRows = 16;  // of a warp in one wgmma
constexpr int kCombSlotBytes = kCombWarpRows * kCombSpanBytes;  // results on their way out

// A tile of the result, and how a block computes it: each of two warpgroups has `subtiles` times 64
// of its rows. Blocks of a cluster have tiles below each other, and share b's part.
struct CombShape {
  int subtiles;
  int tile_n;
  int cluster;
  int stages;
  int slots;  // of each warp

  constexpr int tile_m() const { return 2 * 64 * subtiles; }
  constexpr int spans_n() const { return (tile_n + kCombSpan - 1) / kCombSpan; }
  constexpr int stage_bytes() const { return (tile_m() + spans_n() * kCombSpan) * kCombSpanBytes; }
  constexpr int slots_bytes() const { return kCombWarps * slots * kCombSlotBytes; }
  constexpr int shared_bytes() const {
    return stages * (stage_bytes() + 2 * 8 /*barriers*/) + slots_bytes();
  }
  // Where k are lines, the last columns of a tile are of the next one, too.
  constexpr int step_n(bool along_a) const { return along_a ? tile_n : tile_n - 8; }
  // Where k are adjacent, results go out in spans. Where they are not, sums move, for which two
  // subtiles leave no registers.
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

// The product is of the factors a [m, k] and b [n, k]. Where x's lines are k, a is the weight and b
// is x, and the result is out's transpose.
struct CombArgs {
  Combs a;
  Combs b;    // where a's k are adjacent, map[0] is of all lines, which are aligned
  Combs out;  // where a's lines are k, map[0] is of all rows, which are aligned
  void* out_data;
  int64_t out_pitch;  // elements
  float scalar[kMaxScalars];
  int32_t order[kCombs];  // of combs, where lines are k: those of b with the highest offset first
  int32_t m;
  int32_t n;
  int32_t k;
  int32_t units_of_comb;  // tiles of a cluster are a unit: so many below each other, of one comb
  int32_t units;          // and of all combs
  int32_t all_units;      // of the result
  int32_t group;          // units below each other that are taken before the next column of tiles
};

}  // namespace fx_fuser
