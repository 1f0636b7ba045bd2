// Of the backward of attention by fp16 halves: are a warp's gradients as exact as fp32
// arithmetic's (attention_split_sure.cuh), and how they are made again, in fp32.
#pragma once

#include "attention/attention_backward_tiles_sm90.cuh"
#include "attention/attention_split_repair.cuh"

namespace fx_fuser::attention_backward {

using namespace attention_split;

// What G k, or Gᵀ q, has lost, of as many terms as there are columns. exponent: of the largest
// factor that undoes a scale of the row's G, 1 where G is nothing at all; loss, largest: of the
// tiles.
__device__ __forceinline__ float lost_of_gradients(uint32_t exponent, float loss, float largest,
                                                   float columns) {
  constexpr float kOfGradient = 0x1p-39f;  // of a row's largest, as halves have it
  constexpr float kSubnormal = 0x1p-112f;  // of sums by two factors
  if (exponent <= 1 || largest == 0) return 0;
  const float above = 2 * Scale::largest_of(__uint_as_float(exponent << 23));
  return above * sqrtf(columns) * (kLost * loss + kOfGradient * largest) + kSubnormal;
}

// What Pᵀ dO has lost; the producer has seen to each dO. Not what weights lose, 2^-40 of 1: a key
// that all queries disregard has a gradient that is nothing beside the others', and is common.
__device__ __forceinline__ float lost_of_values(float loss) {
  return loss < infinity() ? 0 : infinity();
}

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
        const AttentionOfQuery query = queries[L::kHasColumns ? column : first_row + r].of;
        weight[r] = ptx::exp2(fmaf(weight[r], args.log_scale, -query.lse));
        // delta is too small by what the tensor core truncates, which fp32 arithmetic does not.
        const float delta = query.delta * args.undo_truncation;
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

  // The warp's rows.
  __device__ __forceinline__ void run(int first_row) const {
    __syncwarp();  // what its lanes have stored of these rows is written over
#pragma unroll 1
    for (int row = first_row; row < first_row + kRowsOfWarp; row += kRowsAtOnce) {
      if (row < args.row_count) run_rows(row);
    }
  }
};

}  // namespace fx_fuser::attention_backward
