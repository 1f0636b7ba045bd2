// What the host tells the kernels that multiply fp32 matrices in fp16, with TF32's accuracy: those
// that make planes (linear_planes.cuh), and the gemm (linear_planes_sm90.cuh).
//
// A *plane* is an fp32 matrix in fp16, as it lies in memory, times a power of two. A sum runs over
// rows of one product's plane and over columns of another's, so one power of two is for all.
#pragma once

#include <cstdint>

#include "common/divisor.h"
#include "linear/linear_dense_args.h"

namespace fx_fuser {

constexpr int kPlaneThreads = 256;
constexpr int kPlaneWidth = 8;     // adjacent elements of a thread
constexpr int kPlaneInFlight = 4;  // and how many times as many are under way
constexpr int kPlaneMostBlocks = 2048;
constexpr int kPlaneTop = 14;  // the largest comes to [2^14, 2^15)

// What is known of a plane: it is the matrix times 2^exponent.
struct PlaneFacts {
  int32_t exponent;
  uint32_t lost;  // not 0: a value that is not zero has fewer bits than TF32 keeps of it
};

struct PlaneArgs {
  const float* from;  // lines, `pitch` elements apart
  void* to;           // fp16, lines of whole vectors behind each other: zeros behind `columns`
  PlaneFacts* facts;
  float* largest;  // of each block
  int64_t pitch;
  Divisor<uint32_t> octets;  // of a line
  uint32_t count;            // octets of all lines
  int32_t blocks;
  int64_t columns;  // of a line
  bool vectors;     // may 16 bytes be loaded at once?
};

// ---- the gemm -----------------------------------------------------------------------------------

// It is made for the last kDenseShapes: of x's rows, where they are adjacent, 64 are loaded at
// once.
constexpr int kFirstPlanesShape = 2;
constexpr int kChunksShape = 4;  // of kDenseShapes: for chunks of k
constexpr int kPlaneSpan = 64;   // adjacent elements in shared memory, and k of a stage

// The maps are of planes, and sums have the scales of both in them.
struct LinearPlanesArgs : LinearDenseArgs {
  const PlaneFacts* x_facts;
  const PlaneFacts* weight_facts;
  // Where k is divided: sums of [chunk, tile, block of the cluster], in the order in which threads
  // have them; a sum of chunks is another kernel's.
  float* partial;
  int32_t chunk_k;  // a multiple of kPlaneSpan
  int32_t chunks;
  // Where either plane has lost values: which results are to be computed plainly, of [tile, block
  // of the cluster, warp, subtile, lane of four, kDoubtWords], and from what.
  uint32_t* doubted;
  uint32_t* precision_flag;  // in the host's memory: how many times more than bearable there were
  const float* x;
  const float* weight;
  OperandStride x_stride;  // of [m, k]
  OperandStride weight_stride;
  float least_sum;
  int32_t bearable;  // rows of a warp
};

constexpr int kRepairThreads = 256;
constexpr float kLeastPlanesSum = 0.5f;  // times the square root of k, with both scales

// Of a thread's rows of x in a tile, a bit each, in words.
constexpr int doubt_words(const DenseShape& shape) { return shape.tile_m / 128; }
// Of a tile of a block's.
constexpr int doubts_of_tile(const DenseShape& shape) {
  return 8 /*warps*/ * shape.subtiles * 4 * doubt_words(shape);
}

}  // namespace fx_fuser
