// Arguments of the kernel that folds BatchNorms into weights. host/fold.h fills them, fold.cuh
// reads them.
#pragma once

#include <cstdint>

#include "common/divisor.h"

namespace fx_fuser {

constexpr int kFoldThreads = 256;
constexpr int kFoldWidth = 8;   // elements per thread
constexpr int kFoldSites = 17;  // per launch: kernel arguments are limited to 4 KB

enum class VectorType : int8_t { kFloat, kHalf, kBFloat16 };

// One number per output channel; data is null if the layer has none.
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
  Divisor<uint32_t> units;    // per output channel
  Divisor<uint32_t> groups;   // units per tap of the filter
  Divisor<uint32_t> columns;  // kw
};

struct FoldArgs {
  int sites;
  FoldSite site[kFoldSites];
};

static_assert(sizeof(FoldArgs) <= 4096);

}  // namespace fx_fuser
