// Arguments and shared-memory layout of the split attention's backward
// (attention_backward_sm90.cuh).
#pragma once

#include "attention/attention_split_args.h"

namespace fx_fuser {

// A block keeps the halves of its rows and iterates over pairs of tiles. For dq, rows are queries
// and their dO, and tiles are keys and values; for dk and dv it is the other way round.
struct AttentionBackwardShape {
  AttentionShape tiles;
  bool apart;  // dv has a pass of its own

  // If there are enough registers: the next unit's rows are loaded during the end of this one, and
  // a consumer issues products of two tiles in one turn.
  constexpr bool begins_early() const { return tiles.d <= 64; }
  // If registers are too few, hi of dO or v is in shared memory, like lo of all rows.
  constexpr bool keeps_second(bool drops) const { return tiles.d <= 64 && !drops; }
  constexpr int shared_bytes(bool drops) const {
    const int rows_bytes = tiles.rows() * tiles.d * 2 * (keeps_second(drops) ? 2 : 3);
    const int columns =
        (tiles.words() + 15) / 16 * 16 + (tiles.staged * 4 /*first column*/ + 15) / 16 * 16 +
        (tiles.slots * tiles.keys + tiles.rows()) * 8 + tiles.consumers * 4 * 4 /*a warp's unit*/ +
        (begins_early() ? AttentionShape::units_bytes() + tiles.keys * 4 /*factors*/
                        : 0);
    return rows_bytes + (tiles.slots + tiles.staged) * tiles.tile_bytes() + columns +
           tiles.dropped_bytes(drops);
  }
};

constexpr AttentionBackwardShape kAttentionBackwardShapes[] = {
    {{64, 64, 2, 1, 4, 6, 216}, false},
    {{128, 64, 2, 1, 1, 3, 216}, true},
};
constexpr int kAttentionBackwardShapeCount =
    sizeof(kAttentionBackwardShapes) / sizeof(kAttentionBackwardShapes[0]);

constexpr int kAttentionDeltaWarps = 8;       // per block; one query each
constexpr int kAttentionQueriesPadded = 128;  // a head's queries are padded to a multiple of this

struct AttentionDeltaArgs {
  AttentionRows out;
  AttentionRows d_out;
  const float* lse;            // [head of all batches, lse_rows]
  AttentionQuery* of_queries;  // [head of all batches, padded]
  int64_t count;               // of of_queries
  int32_t queries;
  int32_t lse_rows;
  int32_t padded;
  int32_t heads;
  int32_t d;
  int32_t keys;
  int32_t is_causal;
  float truncated_by_key;  // truncated_by(1)
  float d_weights_truncated;
  AttentionDropout dropout;
};

struct AttentionBackwardArgs {
  // Of k and v, or q and dO, like AttentionSplitArgs'.
  TensorMap tile_map[2];
  AttentionRows tiles[2];  // the same
  AttentionRows rows[2];   // q and dO, or k and v
  AttentionRows d_values;  // dv per query head, if the pass computes it
  AttentionRows d_rows;    // dq, or dk per query head, if the pass computes it
  const AttentionQuery* of_queries;
  float log_scale;      // of the logits, times log2(e)
  float scale_of_sums;  // like AttentionSplitArgs'
  float undo_truncation;
  float scale;            // times dropout's factor, which the passes omit everywhere else
  float scale_of_values;  // of dv: dropout's factor, corrected for truncation
  int32_t d;
  int32_t row_count;
  int32_t column_count;    // rows of tiles
  int32_t padded;          // like AttentionDeltaArgs'
  int32_t heads;           // of queries, per batch
  int32_t heads_of_rows;   // query heads that share a head of rows
  int32_t heads_of_tiles;  // likewise
  int32_t all_heads;
  int32_t blocks;  // like AttentionSplitArgs'
  int32_t units;
  int32_t group;
  int32_t is_causal;
  AttentionDropout dropout;
};

}  // namespace fx_fuser
