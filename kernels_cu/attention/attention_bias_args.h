// Arguments and shared-memory layout of attention with 16-bit operands and a bias
// (attention_bias_sm90.cuh and attention_bias_backward_sm90.cuh).
#pragma once

#include <cstdint>

#include "attention/attention_split_args.h"
#include "common/tensor_map.h"

namespace fx_fuser {

// TMA loads boxes of 64 lines of 64 elements; a line is one swizzle span.
constexpr int kBiasBox = 64;
constexpr int kBiasBoxBytes = kBiasBox * kAttentionSpanBytes;
constexpr int kBiasConsumers = 2;  // warpgroups that multiply; one more loads tiles
constexpr int kBiasThreads = (kBiasConsumers + 1) * kAttentionWarpgroup;
constexpr int kBiasRows = kBiasConsumers * kAttentionRows;  // per block
constexpr int kBiasOfQueries = 1024;  // most bytes of AttentionOfQuery per tile

// A block keeps its rows, queries or keys, and iterates over tiles of the others.
struct BiasPass {
  int d;         // elements per head, at most
  int columns;   // per tile: keys or queries
  int slots;     // of the ring of tiles; for the bias's gradient, of rows and tiles
  int biases;    // slots of the ring of the bias's tiles
  int operands;  // tensors whose rows are kept: q, or q and dO, or k and v
  bool drops = false;

  constexpr int rows_bytes() const { return operands * kBiasRows * d * 2; }
  constexpr int tile_bytes() const { return columns * d * 2; }
  constexpr int bias_bytes() const { return kBiasRows * columns * 2; }
  constexpr int dropped_bytes() const { return drops ? kBiasRows * columns / 8 : 0; }
  constexpr int shared_bytes() const {
    const int barriers = (2 * slots + 2 * biases + 2 * kBiasConsumers) * 8;
    return rows_bytes() + slots * tile_bytes() + biases * (bias_bytes() + kBiasOfQueries) +
           barriers + dropped_bytes();
  }
};

struct BiasShape {
  BiasPass forward;
  BiasPass d_queries;
  BiasPass d_keys;  // and values
  BiasPass d_bias;  // each slot has q, dO, k and v
  constexpr bool drops() const { return forward.drops; }
  constexpr int bias_slot_bytes() const {
    return 2 * kBiasRows * d_bias.d * 2 + 2 * d_bias.tile_bytes() + kBiasOfQueries;
  }
  constexpr int bias_shared_bytes() const {
    return d_bias.slots * bias_slot_bytes() + d_bias.bias_bytes() + (2 * d_bias.slots + 2) * 8 +
           d_bias.dropped_bytes();
  }
};
// The last one has dropout.
constexpr BiasShape kBiasShapes[] = {
    {{64, 128, 6, 2, 1}, {64, 128, 6, 2, 2}, {64, 64, 8, 3, 2}, {64, 128, 2, 1, 0}},
    {{128, 128, 4, 2, 1}, {128, 64, 6, 2, 2}, {128, 64, 6, 3, 2}, {128, 64, 2, 1, 0}},
    {{64, 128, 6, 2, 1, true},
     {64, 64, 8, 3, 2, true},
     {64, 64, 8, 3, 2, true},
     {64, 64, 3, 1, 0, true}},
};
constexpr int kBiasShapeCount = sizeof(kBiasShapes) / sizeof(kBiasShapes[0]);

// [batch, head, row, element] of 16 bits with adjacent elements; strides in elements.
struct BiasRows {
  void* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
};

constexpr int kBiasDeltaWarps = 8;       // per block; two queries each
constexpr int kBiasQueriesPadded = 128;  // a head's queries are padded to a multiple of this

struct BiasAttentionArgs {
  // [element, row, head, batch]; the bias is [key, query, head, batch].
  TensorMap q;
  TensorMap k;
  TensorMap v;
  TensorMap d_out;
  TensorMap bias;
  TensorMap of_queries;  // of_query below, 16 per line
  BiasRows out;          // of the forward
  BiasRows d_rows;       // dq, or dk
  BiasRows d_values;
  BiasRows d_bias;
  const AttentionOfQuery* of_query;  // [batch, head, padded]
  float* lse;   // [batch, head, lse_rows], infinity beyond the last query; or null
  float scale;  // of the logits
  int32_t d;
  int32_t queries;
  int32_t keys;
  int32_t lse_rows;
  int32_t padded;  // queries per head in of_queries
  int32_t batches;
  int32_t heads;
  int32_t bias_batches;  // 1 if all batches share the bias
  int32_t bias_heads;
  int32_t d_bias_batches;  // likewise for its gradient: 1 if it is summed over batches
  int32_t d_bias_heads;
  int32_t blocks;  // of rows, per head
  int32_t tiles;   // of keys; only for the bias's gradient
  int32_t units;
  int32_t is_causal;
  int32_t in_pairs;  // two elements of the bias's gradient can be stored at once
  AttentionDropout dropout;
};

struct BiasDeltaArgs {
  BiasRows out;
  BiasRows d_out;
  const float* lse;              // [head of all batches, lse_rows]
  AttentionOfQuery* of_queries;  // [head of all batches, padded]
  int64_t count;                 // of of_queries
  int32_t queries;
  int32_t lse_rows;
  int32_t padded;
  int32_t heads;
  int32_t d;
};

}  // namespace fx_fuser
