// The split attention: recomputes a warp's rows in fp32. Each lane has one column of a tile of 32,
// then elements of results. Hidden columns are skipped, whatever they contain.
#pragma once

#include "attention/attention_split_rows.cuh"

namespace fx_fuser::attention_split {

constexpr int kRowsOfWarp = 16;
constexpr int kRowsAtOnce = 4;

// A head's lines.
struct Lines {
  const float* first;
  int64_t stride;
  int count;

  static __device__ __forceinline__ Lines of(const AttentionRows& rows, int batch, int head,
                                             int count) {
    return {row_at(rows, batch, head, 0), rows.row_stride, count};
  }
  // Beyond the last line: the last one.
  __device__ __forceinline__ const float* at(int line) const {
    return first + min(line, count - 1) * stride;
  }
};

// The columns that each row sees.
struct Seen {
  int begin[kRowsAtOnce];
  int end[kRowsAtOnce];

  __device__ __forceinline__ bool has(int r, int column) const {
    return begin[r] <= column && column < end[r];
  }
};

// product[r] = row first_row + r · column
__device__ __forceinline__ void multiply_in_fp32(const Lines& rows, int first_row,
                                                 const float* column, int d,
                                                 float (&product)[kRowsAtOnce]) {
#pragma unroll
  for (float& one : product) one = 0;
#pragma unroll 1
  for (int i = 0; i < d; i += 4) {
    const float4 b = *reinterpret_cast<const float4*>(column + i);
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const float4 a = *reinterpret_cast<const float4*>(rows.at(first_row + r) + i);
      product[r] = fmaf(a.x, b.x, product[r]);
      product[r] = fmaf(a.y, b.y, product[r]);
      product[r] = fmaf(a.z, b.z, product[r]);
      product[r] = fmaf(a.w, b.w, product[r]);
    }
  }
}

// Results of rows; a lane has elements lane, lane + 32...
template <int kD>
struct SumsInFp32 {
  static constexpr int kOfLane = kD / 32;
  float of[kRowsAtOnce][kOfLane];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& row : of) {
#pragma unroll
      for (float& one : row) one = 0;
    }
  }
  // sum = sum · rescale + weights · columns, for the 32 columns from `first` on. weight: of this
  // lane's column.
  __device__ __forceinline__ void add(const Lines& columns, int first, const Seen& seen, int d,
                                      const float (&weight)[kRowsAtOnce],
                                      const float (&rescale)[kRowsAtOnce]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    SumsInFp32 of_tile;  // summed per tile: one long sum would have a larger error
    of_tile.clear();
#pragma unroll 1
    for (int i = 0; i < 32 && first + i < columns.count; ++i) {
      const float* column = columns.at(first + i);
      float value[kOfLane];
#pragma unroll
      for (int e = 0; e < kOfLane; ++e) value[e] = lane + 32 * e < d ? column[lane + 32 * e] : 0;
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const float of_column = __shfl_sync(0xFFFFFFFF, weight[r], i);
        if (!seen.has(r, first + i)) continue;
#pragma unroll
        for (int e = 0; e < kOfLane; ++e) {
          of_tile.of[r][e] = fmaf(of_column, value[e], of_tile.of[r][e]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma unroll
      for (int e = 0; e < kOfLane; ++e) {
        of[r][e] = fmaf(of[r][e], rescale[r], of_tile.of[r][e]);
      }
    }
  }
  __device__ __forceinline__ void store(float* row, int d, int r, float factor) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int e = 0; e < kOfLane; ++e) {
      if (lane + 32 * e < d) row[lane + 32 * e] = of[r][e] * factor;
    }
  }
};

__device__ __forceinline__ float largest_of_warp(float value) {
#pragma unroll
  for (int with = 16; with > 0; with /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, with));
  }
  return value;
}
__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int with = 16; with > 0; with /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, with);
  return value;
}

// Recomputes out and lse of kRowsAtOnce queries.
template <class L>
__device__ __forceinline__ void repair_queries(const AttentionSplitArgs& args, const Unit& unit,
                                               int first_query) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Lines q = Lines::of(args.q, unit.batch, unit.head, args.queries);
  const auto lines_of = [&](const AttentionRows& rows) {
    return Lines::of(rows, unit.batch, unit.head_of_tiles, args.keys);
  };
  const Lines k = lines_of(args.k);
  const Lines v = lines_of(args.v);
  Seen seen;
  float largest[kRowsAtOnce];
  float sum[kRowsAtOnce];
  SumsInFp32<L::kD> out;
  out.clear();
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    seen.begin[r] = 0;
    seen.end[r] = args.is_causal ? min(args.keys, first_query + r + 1) : args.keys;
    largest[r] = minus_infinity();
    sum[r] = 0;
  }
#pragma unroll 1
  for (int first = 0; first < seen.end[kRowsAtOnce - 1]; first += 32) {
    float weight[kRowsAtOnce];
    float rescale[kRowsAtOnce];
    multiply_in_fp32(q, first_query, k.at(first + lane), args.d, weight);
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const float logit = seen.has(r, first + lane) ? weight[r] * args.scale : minus_infinity();
      const float high = fmaxf(largest[r], largest_of_warp(logit));
      // If all logits so far are -inf, weights must be zero, not NaN.
      const float offset = high == minus_infinity() ? 0 : high;
      weight[r] = ptx::exp2(logit - offset);
      rescale[r] = ptx::exp2(largest[r] - offset);
      sum[r] = fmaf(sum[r], rescale[r], sum_of_warp(weight[r]));
      largest[r] = high;
      if constexpr (L::kDrops) {
        if (is_dropped(args.dropout, head_of(args, unit), first_query + r, first + lane)) {
          weight[r] = 0;
        }
      }
    }
    out.add(v, first, seen, args.d, weight, rescale);
  }
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const int query = first_query + r;
    if (query >= args.queries) break;
    const float factor = L::kDrops ? args.dropout.factor : 1;
    out.store(row_at(args.out, unit.batch, unit.head, query), args.d, r, factor / sum[r]);
    if (args.lse == nullptr || lane != 0) continue;
    *lse_of(args, unit, query) = logarithm_of(largest[r], sum[r]);
  }
}

// Recomputes the warp's queries of a unit.
template <class L>
__device__ __forceinline__ void repair(const AttentionSplitArgs& args, const Unit& unit,
                                       int first_query) {
  __syncwarp();  // overwrites what other lanes have stored of these rows
#pragma unroll 1
  for (int row = first_query; row < first_query + kRowsOfWarp; row += kRowsAtOnce) {
    if (row < args.queries) repair_queries<L>(args, unit, row);
  }
}

}  // namespace fx_fuser::attention_split
