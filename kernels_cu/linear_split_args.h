// What the host tells the split-product linear kernels. The shim fills it, linear_split_sm90.cuh
// reads it.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include <cstdint>

#include "pointwise_args.h"

namespace fx_fuser {

// ---- the rows of x, split -----------------------------------------------------------------------

constexpr int kSplitThreads = 256;  // at most
constexpr int kSplitWidth = 8;      // elements a thread has at once
constexpr int kSplitKept = 2;  // times that many, between the search for the largest and the split
constexpr int kSplitMaxCluster = 8;

// Blocks that share a row: such that they keep all of it, up to k = 32,768.
constexpr int split_cluster(int64_t k) {
  int blocks = 1;
  constexpr int kKept = kSplitKept * kSplitThreads * kSplitWidth;
  while (blocks < kSplitMaxCluster && blocks * kKept < k) blocks *= 2;
  return blocks;
}

// A block's threads: no more than keep a short row, so that many rows are under way.
constexpr int split_threads(int64_t k) {
  constexpr int kKeptByWarp = kSplitKept * 32 * kSplitWidth;
  int threads = 32;
  while (threads < kSplitThreads && threads / 32 * kKeptByWarp < k) threads += 32;
  return threads;
}

struct SplitRowsArgs {
  const float* x;  // [rows, k], 16-byte aligned rows
  int64_t x_stride;
  void* split;     // [2, rows, padded_k] fp16: hi, lo
  float* unscale;  // [rows]
  int32_t rows;
  int32_t k;
  int32_t padded_k;
  bool natural;  // k in order, for a turned weight; else in that of a weight's 16-byte chunks
};

// ---- the product --------------------------------------------------------------------------------

constexpr int kLinearThreads = 384;
constexpr int kLinearConsumerThreads = 256;
constexpr int kLinearTileN = 128;  // rows of the weight
constexpr int kLinearTileM = 128;  // rows of x
constexpr int kLinearTileK = 64;
constexpr int kLinearBox = 32;        // of the weight's tensor map: 128 bytes, one swizzle span
constexpr int kLinearChunkK = 32768;  // of k, that are summed up in one fp32
constexpr int kLinearStages = 3;
constexpr float kLeastSum = 512;  // times sqrt(k): see strained_rows
constexpr int kLinearUnsureWords =
    kLinearConsumerThreads / 32 * (kLinearTileM / 32);  // of a tile: a bit a warp and row of x
constexpr int kLinearStageBytes =
    kLinearTileK * (kLinearTileN * 4 /*fp32*/ + kLinearTileM * 2 * 2 /*hi, lo fp16*/);
constexpr int kLinearEpilogueBytes = 8 * (32 * 20 + 128) * 4;  // an Exchange a warp
constexpr int kLinearSharedBytes = kLinearStages * (kLinearStageBytes + 4 * 8 /*barriers*/) +
                                   kLinearEpilogueBytes + 16 /*when to do what again*/;

// Element [m, n] is data[m * stride_m + n * stride_n].
struct LinearOperand {
  const void* data;
  int64_t stride_m;
  int64_t stride_n;
};

struct LinearSplitArgs {
  CUtensorMap weight_map;  // [n, k] fp32; a turned one [k, n]
  CUtensorMap x_map;       // [2, m, padded k] fp16, as the split wrote it
  const float* x_unscale;  // [m]
  float4* parked;          // [blocks, tile m * tile n] where k > kLinearChunkK, else unused
  uint32_t* unsure;        // [tiles, kLinearUnsureWords]: which rows are to be computed plainly
  uint64_t* again;         // [tiles], a byte a consuming warp: is it to be done again
  uint32_t* was_strained;  // in the host's memory: set to 1 where any row is
  const float* x;          // [m, k], row stride x_stride: only read to repair
  const float* weight;     // [n, k], likewise of any strides
  const float* bias;       // [n], or null
  void* out;               // [m, n], row stride out_stride
  float* z;                // [m, n], row stride z_stride, or null: x weightᵀ + bias
  int64_t x_stride;
  int64_t weight_stride_n;
  int64_t weight_stride_k;
  int64_t out_stride;
  int64_t z_stride;
  LinearOperand operand[kMaxInputs];
  float scalar[kMaxScalars];
  float least_sum;
  int32_t m;
  int32_t n;
  int32_t k;
  int32_t tiles;  // of the output
};

}  // namespace fx_fuser
