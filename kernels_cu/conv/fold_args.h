// What the host tells the kernel that folds BatchNorms into weights. fold.h fills it, fold.cuh
// reads it.
#pragma once

#include <cstdint>

#include "common/divisor.h"

namespace fx_fuser {

constexpr int kFoldThreads = 256;
constexpr int kFoldWidth = 8;   // elements of a thread
constexpr int kFoldSites = 17;  // of one launch: an argument block holds 4 KB

enum class VectorType : int8_t { kFloat, kHalf, kBFloat16 };

// A number for each output channel; data is null where the layer has none.
struct FoldVector {
  const void* data;
  int64_t stride;
  VectorType type;
};

// A weight [O, C, kh, kw] of any strides, and its BatchNorm.
struct FoldSite {
  const void* weight;
  void* folded;  // [O, kh, kw, C] in memory
  void* shift;   // [O]
  FoldVector bias;
  FoldVector mean;
  FoldVector variance;
  FoldVector gamma;
  FoldVector beta;
  float eps;
  bool is_wide;        // C is a multiple of kFoldWidth: a unit has that many elements, else one
  bool reads_vectors;  // a wide unit is one aligned vector of the weight
  uint32_t first_block;
  uint32_t all_units;
  int64_t strides[4];
  Divisor<uint32_t> units;    // of one output channel
  Divisor<uint32_t> groups;   // units of one place of the filter
  Divisor<uint32_t> columns;  // kw
};

struct FoldArgs {
  int sites;
  FoldSite site[kFoldSites];
};

static_assert(sizeof(FoldArgs) <= 4096);

}  // namespace fx_fuser
