// Arguments and shared-memory layout of the split attention: fp32 operands by fp16 halves
// (attention_split_sm90.cuh).
#pragma once

#include <cstdint>

#include "common/tensor_map.h"

namespace fx_fuser {

constexpr int kAttentionRows = 64;        // rows (queries, or keys) per consumer warpgroup
constexpr int kAttentionSpanBytes = 128;  // a line of shared memory, one swizzle span
constexpr int kAttentionWarpgroup = 128;
// Keys whose p v the tensor core accumulates before fp32 sums take over.
constexpr int kAttentionPromoted = 64;
constexpr int kAttentionUnits = 8;  // ring of units that the producer publishes to consumers

// A block has `consumers` warpgroups that multiply, and `producers` that convert tiles to halves.
struct AttentionShape {
  int d;          // elements per head, at most
  int keys;       // per tile
  int consumers;  // warpgroups
  int producers;  // warpgroups
  int staged;     // fp32 tiles that TMA is loading or that wait for conversion
  int slots;      // tiles of halves; keys and values alternate
  int registers;  // per consumer thread; producers get the rest

  constexpr int threads() const { return (consumers + producers) * kAttentionWarpgroup; }
  constexpr int rows() const { return consumers * kAttentionRows; }
  constexpr int tile_bytes() const { return keys * d * 4; }  // of fp32, or of hi and lo
  // If registers are too few for both halves of the queries, lo is in shared memory.
  constexpr bool keeps_lo() const { return d <= 64; }
  constexpr int queries_bytes() const { return keeps_lo() ? 0 : rows() * d * 2; }
  // Bytes of barriers, and of data per tile and per unit.
  constexpr int words() const {
    return slots * (2 * 8 /*barriers*/ + 4 /*factor*/) + kAttentionUnits * 2 * 8 /*so far*/ +
           staged * 8 + 2 * 2 * 4 * 4 * producers /*largest, strain*/;
  }
  static constexpr int units_bytes() { return kAttentionUnits * 7 * 4; }
  // A bit per score.
  constexpr int dropped_bytes(bool drops) const { return drops ? rows() * keys / 8 : 0; }
  constexpr int shared_bytes(bool drops) const {
    return (slots + staged) * tile_bytes() + queries_bytes() + (words() + 15) / 16 * 16 +
           units_bytes() + dropped_bytes(drops);
  }
};

constexpr AttentionShape kAttentionShapes[] = {
    {64, 128, 2, 1, 3, 4, 216},
    {128, 64, 2, 1, 3, 3, 216},
};
constexpr int kAttentionShapeCount = sizeof(kAttentionShapes) / sizeof(kAttentionShapes[0]);

// Tensors are [batch, head, row, element] with adjacent elements; strides in elements.
struct AttentionRows {
  float* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
};

// Per query: what the backward needs from the forward.
struct AttentionOfQuery {
  float lse;    // times log2(e); infinity beyond the last query, so that weights are zero
  float delta;  // sum of out · dO
};

// Per query, in global memory.
struct AttentionQuery {
  AttentionOfQuery of;
  float terms;      // sum of |out · dO|
  uint32_t packed;  // upper halves of two floats: the largest of |dO|, and RestOfLse's
};
constexpr int kAttentionQueryFloats = sizeof(AttentionQuery) / sizeof(float);

// Arguments of dropout (attention_dropout.cuh).
struct AttentionDropout {
  const int64_t* seed;
  uint32_t below;    // kDropoutSteps times the drop probability, in both 16-bit halves
  float kept = 1;    // 1 - the drop probability
  float factor = 1;  // of kept weights: 1 / kept
};
constexpr int kDropoutSteps = 1 << 15;
constexpr int kMostDropped = 0x7C00;  // in steps; as fp16 this is infinity

// The tensor core truncates as it accumulates. Measured on an H200 (2026-11-28, NOTES.md): a sum of
// three products of halves over D elements is too small by 1.4e-9 D (random values) to 3.4e-9 D
// (positive values), relative to itself.
inline double truncated_by(int64_t terms) { return 2.4e-9 * static_cast<double>(terms); }
// The same for dO vᵀ, nearer to the loss of positive values: with those, delta cancels nearly all
// of it.
inline double d_weights_truncated_by(int64_t d) { return 3.3e-9 * static_cast<double>(d); }

struct AttentionSplitArgs {
  // k and v as [2 * elements of 16 bits, keys, heads, batches]: TMA only copies bits.
  TensorMap tile_map[2];
  AttentionRows q;
  AttentionRows k;
  AttentionRows v;
  AttentionRows out;
  float* lse;           // [batch, head, lse_rows], infinity beyond the last query; or null
  float scale;          // of the logits, times log2(e)
  float scale_of_sums;  // the same for the tensor core's sums, corrected for truncation
  int32_t d;
  int32_t queries;
  int32_t lse_rows;  // per head, at most as many as its blocks have
  int32_t keys;
  int32_t heads;         // of queries, per batch
  int32_t heads_of_key;  // query heads that share a head of keys
  int32_t all_heads;     // in all batches
  int32_t blocks;        // of queries, per head
  int32_t units;         // one unit: a block of queries of one head
  int32_t group;         // heads whose units come before the next heads'
  int32_t is_causal;
  AttentionDropout dropout;
};

}  // namespace fx_fuser
