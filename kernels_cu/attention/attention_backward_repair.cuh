// The split attention's backward: recomputes a warp's gradients in fp32.
#pragma once

#include "attention/attention_backward_tiles_sm90.cuh"
#include "attention/attention_split_repair.cuh"

namespace fx_fuser::attention_backward {

using namespace attention_split;

template <class L>
struct Repair {
  const AttentionBackwardArgs& args;
  const Unit& unit;

  __device__ __forceinline__ Lines rows(int which) const {
    return Lines::of(args.rows[which], unit.batch, unit.head / args.heads_of_rows, args.row_count);
  }
  __device__ __forceinline__ Lines tiles(int which) const {
    return Lines::of(args.tiles[which], unit.batch, unit.head_of_tiles, args.column_count);
  }
  __device__ __forceinline__ Seen seen_by(int first_row) const {
    Seen seen;
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const bool has_edge = args.is_causal != 0;
      seen.begin[r] = L::kHasColumns && has_edge ? first_row + r : 0;
      seen.end[r] = !L::kHasColumns && has_edge ? min(args.column_count, first_row + r + 1)
                                                : args.column_count;
    }
    return seen;
  }

  __device__ __forceinline__ void run_rows(int first_row) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const AttentionQuery* queries = args.of_queries + int64_t{head_of(args, unit)} * args.padded;
    const Seen seen = seen_by(first_row);
    constexpr float kOnes[kRowsAtOnce] = {1, 1, 1, 1};
    SumsInFp32<L::kD> d_values;
    SumsInFp32<L::kD> d_rows;
    d_values.clear();
    d_rows.clear();
#pragma unroll 1
    for (int first = seen.begin[0] / 32 * 32; first < seen.end[kRowsAtOnce - 1]; first += 32) {
      const int column = first + lane;
      float weight[kRowsAtOnce];
      float gradient[kRowsAtOnce];
      multiply_in_fp32(rows(0), first_row, tiles(0).at(column), args.d, weight);
      if constexpr (L::kMakesRows) {
        multiply_in_fp32(rows(1), first_row, tiles(1).at(column), args.d, gradient);
      }
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const AttentionQuery query = queries[L::kHasColumns ? column : first_row + r];
        weight[r] = ptx::exp2(fmaf(weight[r], args.log_scale, -query.of.lse));
        weight[r] *= rest_of_lse(query).factor();
        // delta is corrected for the tensor core's truncation; fp32 arithmetic needs it undone.
        const float delta = query.of.delta * args.undo_truncation;
        bool drops = false;
        if constexpr (L::kDrops) {
          const int row = first_row + r;
          drops = is_dropped(args.dropout, head_of(args, unit), L::kHasColumns ? column : row,
                             L::kHasColumns ? row : column);
        }
        if constexpr (L::kMakesRows) {
          gradient[r] = weight[r] * ((drops ? 0 : gradient[r]) - delta);
        }
        if (drops) weight[r] = 0;
      }
      if constexpr (L::kMakesValues) d_values.add(tiles(1), first, seen, args.d, weight, kOnes);
      if constexpr (L::kMakesRows) d_rows.add(tiles(0), first, seen, args.d, gradient, kOnes);
    }
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const int row = first_row + r;
      if (row >= args.row_count) break;
      const auto to = [&](const AttentionRows& of) {
        return row_at(of, unit.batch, unit.head, row);
      };
      if constexpr (L::kMakesValues) {
        d_values.store(to(args.d_values), args.d, r, L::kDrops ? args.dropout.factor : 1);
      }
      if constexpr (L::kMakesRows) d_rows.store(to(args.d_rows), args.d, r, args.scale);
    }
  }

  // Recomputes the warp's rows.
  __device__ __forceinline__ void run(int first_row) const {
    __syncwarp();  // overwrites what other lanes have stored of these rows
#pragma unroll 1
    for (int row = first_row; row < first_row + kRowsOfWarp; row += kRowsAtOnce) {
      if (row < args.row_count) run_rows(row);
    }
  }
};

}  // namespace fx_fuser::attention_backward
