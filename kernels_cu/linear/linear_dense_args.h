// Arguments of the linear kernels for 16-bit types and TF32. The shim fills them,
// linear_dense_sm90.cuh reads them.
#pragma once

#include <cstdint>

#include "common/operands.h"
#include "common/tensor_map.h"
#include "linear/linear_split_args.h"

namespace fx_fuser {

// A tile of the output, and how a block computes it: each of the two consumers has `subtiles` times
// 64 rows of the weight. The blocks of a cluster have tiles side by side along n and share x's
// rows.
struct DenseShape {
  int tile_m;  // rows of x
  int subtiles;
  int cluster;
  int cycles;  // roughly, per stage (128 bytes of k): the larger of products and loads from L2

  constexpr int tile_n() const { return 2 * 64 * subtiles; }
  constexpr int stage_bytes() const { return (tile_m + tile_n()) * 128; }
  constexpr int stages() const { return (192 * 1024) / stage_bytes(); }
  constexpr int exchange_bytes() const { return 2 * 2 * batch_m() * (64 + 4) * 4; }
  constexpr int shared_bytes() const {
    return stages() * (stage_bytes() + 2 * 8 /*barriers*/) + exchange_bytes();
  }
  // Rows of x that the epilogue handles at once.
  constexpr int batch_m() const { return tile_m < 32 ? tile_m : 32; }
};

// Kernel fx_fuser_linear_<i> has shape kDenseShapes[i].
constexpr int kDenseShapeCount = 5;
constexpr DenseShape kDenseShapes[kDenseShapeCount] = {
    {16, 1, 1, 460}, {64, 1, 1, 620}, {128, 1, 2, 650}, {128, 2, 2, 1100}, {256, 1, 2, 1050},
};
// The first of these shapes, which leave registers for the second accumulators and the sums of
// linear_exact_sm90.cuh.
constexpr int kExactShapeCount = 3;
constexpr int kDenseThreads = 384;
constexpr int kDenseStepBytes = 128;  // of k per stage: one swizzle span

struct LinearDenseArgs {
  TensorMap weight_map;  // [n, k]
  TensorMap x_map;       // [m, k]
  const void* bias;      // [n], or null
  void* out;             // [m, n], row stride out_stride
  void* z;               // [m, n], row stride z_stride, or null: x weightᵀ + bias
  int64_t out_stride;
  int64_t z_stride;
  Strided<2> operand[kMaxInputs];  // [m, n]
  float scalar[kMaxScalars];
  int32_t m;
  int32_t n;
  int32_t k;
  int32_t tiles;  // of the output; a cluster's tiles count as one
  Mode mode[kMaxInputs];
  bool out_is_aligned;  // whole vectors may be stored at once
  bool z_is_aligned;
};

}  // namespace fx_fuser
