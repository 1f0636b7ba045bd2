// What the host tells the attention of fp32 operands by fp16 halves (attention_split_sm90.cuh), and
// how a block's shared memory is divided.
#pragma once

#include <cstdint>

#include "common/tensor_map.h"

namespace fx_fuser {

constexpr int kAttentionRows = 64;        // queries of a consumer warpgroup
constexpr int kAttentionSpanBytes = 128;  // a line of shared memory, one swizzle span
constexpr int kAttentionWarpgroup = 128;
// Keys whose p v the tensor core adds up, ahead of fp32 sums.
constexpr int kAttentionPromoted = 64;
constexpr int kAttentionUnits = 8;  // of a block, of which consumers are told

// A block has `consumers` warpgroups that multiply, and `producers` that make halves of keys and
// values.
struct AttentionShape {
  int d;          // elements of a head, at most
  int keys;       // of a tile
  int consumers;  // warpgroups
  int producers;  // likewise
  int staged;     // fp32 tiles on their way
  int slots;      // tiles of halves; keys and values in turn
  int registers;  // of a consumer's thread; producers have what is left

  constexpr int threads() const { return (consumers + producers) * kAttentionWarpgroup; }
  constexpr int rows() const { return consumers * kAttentionRows; }
  constexpr int tile_bytes() const { return keys * d * 4; }  // fp32, and hi with lo
  // Where registers are too few for both halves of the queries, lo is in shared memory.
  constexpr bool keeps_lo() const { return d <= 64; }
  constexpr int queries_bytes() const { return keeps_lo() ? 0 : rows() * d * 2; }
  // Bytes of barriers, and of what is known of tiles and of units.
  constexpr int words() const {
    return slots * (2 * 8 /*barriers*/ + 4 /*factor*/) + kAttentionUnits * 2 * 8 /*so far*/ +
           staged * 8 + 2 * 2 * 4 * 4 * producers /*largest, strain*/;
  }
  static constexpr int units_bytes() { return kAttentionUnits * 7 * 4; }
  // A bit a score.
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

// Of a query: what the backward needs of the forward.
struct AttentionOfQuery {
  float lse;    // by log2(e); infinity beyond the last query, so that its weights are nothing
  float delta;  // sum of out · dO
};

// Of a query, as memory has it.
struct AttentionQuery {
  AttentionOfQuery of;
  float terms;      // sum of |out · dO|
  uint32_t packed;  // upper halves of two floats: the largest of |dO|, and RestOfLse's
};
constexpr int kAttentionQueryFloats = sizeof(AttentionQuery) / sizeof(float);

// What the kernels that drop weights are told (attention_dropout.cuh).
struct AttentionDropout {
  const int64_t* seed;
  uint32_t below;    // kDropoutSteps times the share that is dropped, as two fp16
  float kept = 1;    // the share that is not
  float factor = 1;  // of those that are kept: 1 / kept
};
constexpr int kDropoutSteps = 1 << 15;
constexpr int kMostDropped = 0x7C00;  // of those: fp16's infinity

// The tensor core truncates as it adds up. Measured on an H200 (2026-11-28, NOTES.md): a sum of
// three products of halves over D elements is too small by 1.4e-9 D to 3.4e-9 D of itself, of
// random and of positive values.
inline double truncated_by(int64_t terms) { return 2.4e-9 * static_cast<double>(terms); }
// Likewise of dO vᵀ, nearer to what positive values lose: there nearly all is subtracted from it.
inline double d_weights_truncated_by(int64_t d) { return 3.3e-9 * static_cast<double>(d); }

struct AttentionSplitArgs {
  // Of k and v as [2 * elements of 16 bits, keys, heads, batches]: TMA copies bits.
  TensorMap tile_map[2];
  AttentionRows q;
  AttentionRows k;
  AttentionRows v;
  AttentionRows out;
  float* lse;           // [batch, head, lse_rows], infinity beyond the last query; or null
  float scale;          // of the logits, by log2(e)
  float scale_of_sums;  // the same, of what the tensor core has added up
  int32_t d;
  int32_t queries;
  int32_t lse_rows;  // of a head, not more than its blocks have
  int32_t keys;
  int32_t heads;         // of a batch's queries
  int32_t heads_of_key;  // that share a head of keys
  int32_t all_heads;     // of all batches
  int32_t blocks;        // of a head's queries
  int32_t units;         // a block's queries of one head
  int32_t group;         // heads whose units are taken before the next heads'
  int32_t is_causal;
  AttentionDropout dropout;
};

}  // namespace fx_fuser
