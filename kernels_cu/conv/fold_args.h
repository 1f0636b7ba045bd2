// What the host tells the kernel that folds BatchNorms into weights. fold.h fills it, fold.cuh
// reads it.
#pragma once

#include <cstdint>

#include "common/divisor.h"

namespace fx_fuser {

constexpr int kFoldThreads = 128;
constexpr int kFoldSites = 20;  // of one launch: an argument block holds 4 KB

enum class VectorType : int8_t { kFloat, kHalf, kBFloat16 };

// A number for each output channel; data is null where the layer has none.
struct FoldVector {
  const void* data;
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
  uint32_t elements;  // of one output channel
  uint32_t first_block;
  int64_t strides[4];
  Divisor<uint32_t> channels;  // C
  Divisor<uint32_t> columns;   // kw
};

struct FoldArgs {
  int sites;
  FoldSite site[kFoldSites];
};

static_assert(sizeof(FoldArgs) <= 4096);

}  // namespace fx_fuser
