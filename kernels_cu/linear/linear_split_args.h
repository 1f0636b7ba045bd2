// Arguments of the split-product linear kernels. The shim fills them, linear_split_sm90.cuh and
// linear_split_mma.cuh read them.
#pragma once

#include <cstdint>

#include "common/divisor.h"
#include "common/operands.h"
#include "common/tensor_map.h"

namespace fx_fuser {

// ---- pre-pass: launch shapes --------------------------------------------------------------------

constexpr int kSplitThreads = 256;  // at most
constexpr int kSplitWidth = 8;      // elements per thread and load
constexpr int kSplitKept = 2;       // loads that stay in registers between the search and the split
constexpr int kSplitMaxCluster = 8;

// Blocks per row: enough to keep all of it in registers, up to k = 32,768.
constexpr int split_cluster(int64_t k) {
  int blocks = 1;
  constexpr int kKept = kSplitKept * kSplitThreads * kSplitWidth;
  while (blocks < kSplitMaxCluster && blocks * kKept < k) blocks *= 2;
  return blocks;
}

// Threads per row if at most a warp can keep all of it in registers, else 0. Multiples of eight,
// since a row's part of a plane is padded to 64.
constexpr int split_lanes(int64_t k) {
  int lanes = 8;
  while (lanes < 32 && kSplitKept * lanes * kSplitWidth < k) lanes *= 2;
  return kSplitKept * lanes * kSplitWidth < k ? 0 : lanes;
}

// A block's threads: no more than a short row needs, so that many rows are in flight.
constexpr int split_threads(int64_t k) {
  constexpr int kKeptByWarp = kSplitKept * 32 * kSplitWidth;
  int threads = 32;
  while (threads < kSplitThreads && threads / 32 * kKeptByWarp < k) threads += 32;
  return threads;
}

// ---- planes -------------------------------------------------------------------------------------

// A plane is one chunk of k of one batch: a product of its own, with its own scales. Planes are
// numbered [chunk, outer, inner]; batches have two dimensions, which need not merge into one.
struct Plane {
  int chunk;
  int outer;
  int inner;
};

struct PlaneStride {
  int64_t chunk;
  int64_t outer;
  int64_t inner;
};

struct Planes {
  Divisor<uint32_t> batches;  // per chunk
  Divisor<uint32_t> inner;    // per outer batch
  int32_t chunks;
  int32_t k;       // per chunk
  int32_t last_k;  // of the last chunk
};

#ifdef __CUDACC__
__device__ __forceinline__ Plane plane_at(const Planes& planes, uint32_t index) {
  const uint32_t chunk = divide(index, planes.batches);
  const uint32_t batch = index - chunk * planes.batches.size;
  const uint32_t outer = divide(batch, planes.inner);
  return {static_cast<int>(chunk), static_cast<int>(outer),
          static_cast<int>(batch - outer * planes.inner.size)};
}

__device__ __forceinline__ int64_t offset_of(const Plane& plane, const PlaneStride& stride) {
  return plane.chunk * stride.chunk + plane.outer * stride.outer + plane.inner * stride.inner;
}

__device__ __forceinline__ int k_of(const Planes& planes, const Plane& plane) {
  return plane.chunk + 1 < planes.chunks ? planes.k : planes.last_k;
}
#endif

// ---- pre-pass: arguments ------------------------------------------------------------------------

// Per row of x: the factor that undoes its scale, and the (still scaled) sum below which the split
// may have lost too much accuracy.
struct alignas(8) SplitRowFactors {
  float unscale;
  float least_sum;
};

struct SplitArgs {
  const void* x;  // [plane, rows, k] of any strides
  PlaneStride x_plane;
  int64_t x_stride_m;
  int64_t x_stride_k;
  // [plane, parts, rows, padded_k] fp16: hi and, for an fp32 x, lo. Null: only compute factors.
  void* split;
  SplitRowFactors* factors;  // [plane, rows]
  float least_sum;           // upper bound of the rows' least_sum
  Planes planes;
  Divisor<uint32_t> units;  // of a plane: rows, or strips of columns
  int32_t rows;
  int32_t padded_k;
  int32_t lanes;  // of split_lanes
  bool natural;   // k in order, for an N-major weight; else in the order of a weight's chunks
  bool vectors;   // k is adjacent, and rows are 16-byte aligned
};

// If the rows of x are columns in memory: rows per block (a strip), and k per step through shared
// memory.
constexpr int kSplitStrip = 32;
constexpr int kSplitDepth = 64;

// ---- the product --------------------------------------------------------------------------------

constexpr int kLinearThreads = 384;
constexpr int kLinearConsumerThreads = 256;
constexpr int kLinearTileN = 128;  // rows of the weight
constexpr int kLinearTileM = 128;  // rows of x
constexpr int kLinearTileK = 64;
constexpr int kLinearGroupM = 8;      // tiles of x per group: they stay in L2 while it runs
constexpr int kLinearBox = 32;        // of the weight's tensor map: 128 bytes, one swizzle span
constexpr int kLinearChunkK = 32768;  // of k, that are summed in one fp32
constexpr int kLinearStages = 3;
constexpr int kLinearVector = 4;  // adjacent elements of a result or an operand
constexpr float kLeastSum = 512;  // times sqrt(k): see imprecise_rows
// Per tile and warp: one bit per row of x, then one bit per row of the weight.
constexpr int kLinearUnsureWords = kLinearTileM / 32 + 1;
constexpr int kLinearStageBytes =
    kLinearTileK * (kLinearTileN * 4 /*fp32*/ + kLinearTileM * 2 * 2 /*hi, lo fp16*/);
constexpr int kLinearEpilogueBytes =
    8 * ((32 * 20 + 3 * 128) * 4 + (2 + kMaxInputs) * 8);  // one Exchange per warp
constexpr int kLinearTilesBytes =
    kLinearEpilogueBytes + 8 /*began*/ + 16 /*redo state*/ + 8 /*padding*/;
constexpr int kLinearSharedBytes =
    kLinearStages * (kLinearStageBytes + 4 * 8 /*barriers*/) + kLinearTilesBytes;

// The same for mma.sync, on any architecture (linear_split_mma.cuh). A stage is 32 of k; there are
// as many as fit in shared memory.
constexpr int kMmaThreads = kLinearConsumerThreads;
constexpr int kMmaTileK = 32;
constexpr int kMmaLeastStages = 2;
constexpr int kMmaMostStages = 6;
constexpr int kMmaStageBytes =
    kMmaTileK * (kLinearTileN * 4 /*fp32*/ + kLinearTileM * 2 * 2 /*hi, lo fp16*/);
constexpr int kMmaBesideStages = kLinearTilesBytes + kMmaMostStages * 2 * 8 /*barriers*/;

// The stages that fit in the shared memory of a block. At least kMmaLeastStages on every GPU from
// sm_80 on.
constexpr int mma_stages(int shared_bytes) {
  const int stages = (shared_bytes - kMmaBesideStages) / kMmaStageBytes;
  return stages < kMmaMostStages ? stages : kMmaMostStages;
}
constexpr int mma_shared_bytes(int stages) { return kMmaBesideStages + stages * kMmaStageBytes; }

// The planes of a result or an operand; strides in bytes.
struct LinearPlace {
  void* data;
  PlaneStride plane;
};

// Element [m, n] of a plane is at m * stride.m + n * stride.n.
struct OperandStride {
  int64_t m;
  int64_t n;
};

// Where the results go, and what the epilogue reads.
struct LinearResult {
  static constexpr int kOut = 0;
  static constexpr int kZ = 1;
  static constexpr int kFirstOperand = 2;

  LinearPlace place[kFirstOperand + kMaxInputs];  // z's is null if it is not stored
  int64_t out_stride;                             // of rows, whose elements are adjacent
  int64_t z_stride;
  OperandStride operand[kMaxInputs];
  const float* bias;  // [n], or null
  float scalar[kMaxScalars];
  uint32_t vectors;  // bit i: place i can be read or stored in whole, aligned vectors

#ifdef __CUDACC__
  __device__ __forceinline__ bool is_vector(int i) const { return vectors >> i & 1; }
  // Whether both the result and z can be stored in vectors.
  __device__ __forceinline__ bool is_in_vectors() const {
    constexpr uint32_t kBoth = 1 << kOut | 1 << kZ;
    return (vectors & kBoth) == kBoth;
  }
#endif
};

struct LinearSplitArgs {
  TensorMap weight_map;  // [outer, inner, n, k] fp32; an N-major one [outer, inner, k, n]
  TensorMap x_map;       // [plane, parts, m, padded k] fp16, as the split wrote it
  // Instead of both, for mma.sync, which loads by cp.async: the split, and the number of stages.
  const void* split;
  int32_t padded_k;
  int32_t stages;
  const SplitRowFactors* x_factors;       // [plane, m]
  const SplitRowFactors* weight_factors;  // [plane, n], or null: the rows' scales are guessed
  void* spilled;             // [blocks, tile m * tile n] float if k > kLinearChunkK, else unused
  uint32_t* unsure;          // [tiles, warps, kLinearUnsureWords]: rows to repair in plain fp32
  uint64_t* redo;            // [tiles], one byte per consumer warp: the tile must be recomputed
  uint32_t* precision_flag;  // in host memory: repair time as a multiple of what is bearable
  uint32_t* guesses_flag;    // in host memory: eighths of a block's tiles recomputed; or null
  const void* x;             // [plane, m, k] of any strides: only read to repair
  const float* weight;       // [plane, n, k], likewise
  PlaneStride x_plane;
  PlaneStride weight_plane;
  int64_t x_stride_m;
  int64_t x_stride_k;
  int64_t weight_stride_n;
  int64_t weight_stride_k;
  LinearResult result;
  Planes planes;
  Divisor<uint32_t> plane_tiles;  // tiles per plane
  Divisor<uint32_t> group_tiles;  // tiles per group of kLinearGroupM tiles of x
  Divisor<uint32_t> last_width;   // tiles of x in a group that has fewer, after whole_groups
  uint32_t whole_groups;
  float least_sum;
  float bearable;  // time for repairs, relative to the product's
  int32_t m;
  int32_t n;
  int32_t tiles;         // of all planes
  int32_t weight_outer;  // 1 if each outer batch has its own weight, 0 if they share it
  int32_t weight_inner;
  bool transposed;  // the result, as `result` describes it, is [n, m]
  bool pairs;       // if transposed: pairs along m can be stored together
};

// ---- the sum of chunks --------------------------------------------------------------------------

constexpr int kSumThreads = 256;
constexpr int kSumInFlight = 8;

struct LinearSumArgs {
  const float* partial;  // [chunk, outer, inner, m, pitch]
  LinearResult result;
  Divisor<uint32_t> n;
  Divisor<uint32_t> m;
  Divisor<uint32_t> inner;
  uint32_t count;  // elements of the result
  int32_t rows;    // of the result, in all batches
  int32_t pitch;
  int32_t chunks;
};

}  // namespace fx_fuser
