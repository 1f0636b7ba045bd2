// to[c, r] = from[r, c]: for products whose operand has the sum's index along rows.
#pragma once

#include <cstdint>

namespace fx_fuser {

constexpr int kTransposeTile = 64;
constexpr int kTransposeThreads = 256;

struct TransposeArgs {
  const float* from;  // [rows, columns], unit stride along columns
  float* to;          // [columns, rows], dense
  int64_t from_stride;
  int64_t rows;
  int64_t columns;
};

#ifdef __CUDACC__
// A tile through shared memory, so that reads and writes are both of whole lines. The odd pitch
// keeps the column that a warp reads in 32 banks.
__device__ __forceinline__ void transpose(const TransposeArgs& args) {
  __shared__ float tile[kTransposeTile][kTransposeTile + 1];
  constexpr int kWarps = kTransposeThreads / 32;
  const int64_t tiles_across = (args.columns + kTransposeTile - 1) / kTransposeTile;
  const int64_t row0 = blockIdx.x / tiles_across * kTransposeTile;
  const int64_t column0 = blockIdx.x % tiles_across * kTransposeTile;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < kTransposeTile / kWarps; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = warp + i * kWarps;
      const int c = lane + half * 32;
      if (row0 + r < args.rows && column0 + c < args.columns) {
        tile[r][c] = args.from[(row0 + r) * args.from_stride + column0 + c];
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTransposeTile / kWarps; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int c = warp + i * kWarps;
      const int r = lane + half * 32;
      if (row0 + r < args.rows && column0 + c < args.columns) {
        args.to[(column0 + c) * args.rows + row0 + r] = tile[r][c];
      }
    }
  }
}
#endif

}  // namespace fx_fuser
