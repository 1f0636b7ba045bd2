// What the host tells the kernels of fp32 gemms that the library computes from *planes*: those that
// make them (linear_planes.cuh), and that which repairs a result (linear_planes_repair.cuh).
//
// A plane is an fp32 tensor in fp16, in the same order in memory, times a power of two. A sum runs
// over rows of one product's plane and over columns of another's, so one power of two is for all.
#pragma once

#include <cstdint>

#include "common/divisor.h"

namespace fx_fuser {

constexpr int kPlaneThreads = 256;
constexpr int kPlaneWidth = 8;     // adjacent elements of a thread
constexpr int kPlaneInFlight = 4;  // and how many times as many are under way
constexpr int kPlaneMostBlocks = 2048;
constexpr int kPlaneTop = 14;  // the largest comes to [2^14, 2^15)

// What is known of a plane: it is the tensor times 2^exponent.
struct PlaneFacts {
  int32_t exponent;
  int32_t blocks;  // that made it
  // Of each of these: not 0 if a value that is not zero has fewer bits than TF32 keeps of it.
  uint32_t lost[kPlaneMostBlocks];
  float largest[kPlaneMostBlocks];  // of each block of the kernel that looked for it, if any did
};

struct PlaneArgs {
  const float* from;  // lines, `pitch` elements apart
  void* to;           // fp16, lines of whole vectors behind each other: zeros behind `columns`
  PlaneFacts* facts;
  const float* largest;  // the tensor's largest finite value is the largest of these
  int64_t pitch;
  Divisor<uint32_t> octets;  // of a line
  uint32_t count;            // octets of all lines
  int32_t largest_count;
  int64_t columns;  // of a line
  bool vectors;     // may 16 bytes be loaded at once?
};

// ---- repairs ------------------------------------------------------------------------------------

constexpr int kRepairThreads = 256;
constexpr int kRepairColumns = 16;       // of a row, that a warp computes at once
constexpr int kRepairStrip = 256;        // columns of two rows, that a warp looks at
constexpr float kLeastPlanesSum = 2.0f;  // times the square root of k, with both scales

struct RepairFactor {
  const float* data;
  int64_t batch;  // strides
  int64_t line;   // m, or n
  int64_t k;
};

// sums: [batches, m, n] of a [batches, m, k] and b [batches, k, n], with the scales of both planes.
struct PlanesRepairArgs {
  const PlaneFacts* a_facts;  // none: sums have no scales
  const PlaneFacts* b_facts;
  float* sums;
  float* factors;  // two, whose product takes the scales away
  RepairFactor a;
  RepairFactor b;
  uint32_t batches;
  Divisor<uint32_t> pairs;   // of rows, in a matrix
  Divisor<uint32_t> strips;  // of a row
  int32_t m;
  int32_t n;
  int32_t k;
  float least_sum;
  int32_t bearable;          // repairs of a warp, see `precision_flag`
  uint32_t* precision_flag;  // in the host's memory: how many times more than bearable there were
};

}  // namespace fx_fuser
