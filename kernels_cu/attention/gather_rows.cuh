// out[b, i, j] = x[b, i, index[i, j]] of 16 bits, where all batches share the index, and its
// gradient: as attention reads scores of relative positions. For sm_80 and later.
//
// A thread has a row and a column, or a place of x's gradient, and goes through batches: the index
// is read once. out may be transposed, by way of shared memory. The gradient is no scatter: a place
// adds up the columns that read it, in their order, in fp32. gather_rows_order sorts them.
//
//   FX_FUSER_GATHER_ROWS(Epilogue, /*scalars*/ 0, /*Acc*/ float, /*Out*/ __half, /*x*/ __half)
#pragma once

#include <cstdint>

#include "attention/gather_rows_args.h"
#include "common/convert.cuh"

namespace fx_fuser::gather_rows {

constexpr int kThreadRows = kGatherThreads / kGatherTile;
constexpr int kOfThread = kGatherTile / kThreadRows;  // rows of a thread, in a tile

struct Chunk {
  int tile;
  int first;  // batch
  int end;

  __device__ __forceinline__ explicit Chunk(const GatherArgs& args) {
    tile = static_cast<int>(blockIdx.x) / args.batch_chunks;
    first = (static_cast<int>(blockIdx.x) - tile * args.batch_chunks) * kGatherChunk;
    end = min(first + kGatherChunk, args.batches);
  }
};

__device__ __forceinline__ int place_at(const GatherArgs& args, int row, int column) {
  const int64_t place =
      args.index.data[row * args.index.row_stride + column * args.index.column_stride];
  if (place < 0 || place >= args.places) __trap();
  return static_cast<int>(place);
}

template <class T, bool kTransposed>
__device__ __forceinline__ void gather(const GatherArgs& args) {
  __shared__ T turned[kTransposed ? kGatherAtOnce : 1][kGatherTile][kGatherTile + 2];
  const Chunk chunk(args);
  const int first_row = chunk.tile / args.tiles * kGatherTile;
  const int first_column = chunk.tile % args.tiles * kGatherTile;
  const int across = static_cast<int>(threadIdx.x) % kGatherTile;
  const int down = static_cast<int>(threadIdx.x) / kGatherTile;
  const T* from[kOfThread];
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int row = first_row + down + i * kThreadRows;
    const bool is_there = row < args.rows && first_column + across < args.columns;
    from[i] = is_there ? static_cast<const T*>(args.x.data) + row * args.x.row_stride +
                             place_at(args, row, first_column + across)
                       : nullptr;
  }
  // Of out, as it is stored.
  const int out_rows = kTransposed ? args.columns : args.rows;
  const int out_columns = kTransposed ? args.rows : args.columns;
  const int out_row = (kTransposed ? first_column : first_row) + down;
  const int out_column = (kTransposed ? first_row : first_column) + across;
  T* out = static_cast<T*>(args.out) + static_cast<int64_t>(out_row) * out_columns + out_column;
#pragma unroll 1
  for (int batch = chunk.first; batch < chunk.end; batch += kGatherAtOnce) {
    T value[kGatherAtOnce][kOfThread] = {};
#pragma unroll
    for (int n = 0; n < kGatherAtOnce; ++n) {
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) {
        const bool reads = from[i] != nullptr && batch + n < chunk.end;
        if (reads) value[n][i] = from[i][(batch + n) * args.x.batch_stride];
      }
    }
    if constexpr (kTransposed) {
      __syncthreads();  // the batches before have been read
#pragma unroll
      for (int n = 0; n < kGatherAtOnce; ++n) {
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) turned[n][down + i * kThreadRows][across] = value[n][i];
      }
      __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < kGatherAtOnce; ++n) {
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) {
        const int row = out_row + i * kThreadRows;
        if (row >= out_rows || out_column >= out_columns || batch + n >= chunk.end) continue;
        const int64_t at =
            (static_cast<int64_t>(batch + n) * out_rows + i * kThreadRows) * out_columns;
        out[at] = kTransposed ? turned[n][across][down + i * kThreadRows] : value[n][i];
      }
    }
  }
}

// A warp sorts the columns of a row by their places, stably.
__device__ __forceinline__ void sort_columns(const GatherArgs& args) {
  __shared__ int next[kGatherPlaces + 1];  // column of each place; first how many there are
  const int row = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x);
  uint16_t* starts = args.starts + static_cast<int64_t>(row) * (args.places + 1);
  uint16_t* order = args.order + static_cast<int64_t>(row) * args.columns;
  for (int place = lane; place <= args.places; place += 32) next[place] = 0;
  __syncwarp();
  // For 32 columns at a time: among those of the same place, how many are ahead, and how many all.
  const auto for_columns = [&](const auto& visit) {
    for (int first = 0; first < args.columns; first += 32) {
      const int column = first + lane;
      const int place = column < args.columns ? place_at(args, row, column) : -1 - lane;
      int ahead = 0;
      int all = 0;
      for (int other = 0; other < 32; ++other) {
        const bool is_same = __shfl_sync(0xFFFFFFFF, place, other) == place;
        ahead += is_same && other < lane ? 1 : 0;
        all += is_same ? 1 : 0;
      }
      const int begin = place < 0 ? 0 : next[place];
      __syncwarp();  // all lanes have read
      visit(column, place, begin, ahead, all);
      __syncwarp();
    }
  };
  for_columns([&](int, int place, int begin, int ahead, int all) {
    if (place >= 0 && ahead == 0) next[place] = begin + all;
  });
  int before = 0;
  for (int first = 0; first <= args.places; first += 32) {
    const int place = first + lane;
    const int mine = place < args.places ? next[place] : 0;
    int sum = mine;
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_sync(0xFFFFFFFF, sum, max(lane - step, 0));
      sum += lane >= step ? below : 0;
    }
    if (place <= args.places) {
      next[place] = before + sum - mine;
      starts[place] = static_cast<uint16_t>(before + sum - mine);
    }
    before += __shfl_sync(0xFFFFFFFF, sum, 31);
  }
  __syncwarp();
  for_columns([&](int column, int place, int begin, int ahead, int all) {
    if (place < 0) return;
    order[begin + ahead] = static_cast<uint16_t>(column);
    if (ahead == 0) next[place] = begin + all;
  });
}

template <class T>
__device__ __forceinline__ void add_columns(const GatherArgs& args) {
  const Chunk chunk(args);
  const int row = chunk.tile / args.tiles;
  const int place = chunk.tile % args.tiles * kGatherThreads + static_cast<int>(threadIdx.x);
  if (place >= args.places) return;
  const uint16_t* starts = args.starts + static_cast<int64_t>(row) * (args.places + 1) + place;
  const uint16_t* order = args.order + static_cast<int64_t>(row) * args.columns;
  const int first = starts[0];
  const int end = starts[1];
  const T* from = static_cast<const T*>(args.d_out.data) + row * args.d_out.row_stride;
  T* to = static_cast<T*>(args.x.data) + row * args.x.row_stride + place;
  const T* one = from + (first < end ? order[first] : 0);
#pragma unroll 1
  for (int batch = chunk.first; batch < chunk.end; batch += kGatherAtOnce) {
    float sum[kGatherAtOnce] = {};
    if (first < end) {
#pragma unroll
      for (int n = 0; n < kGatherAtOnce; ++n) {
        const int64_t at = (batch + n) * args.d_out.batch_stride;
        if (batch + n < chunk.end) sum[n] = convert<float>(one[at]);
      }
    }
#pragma unroll 1
    for (int other = first + 1; other < end; ++other) {
      const T* next = from + order[other];
#pragma unroll
      for (int n = 0; n < kGatherAtOnce; ++n) {
        const int64_t at = (batch + n) * args.d_out.batch_stride;
        if (batch + n < chunk.end) sum[n] += convert<float>(next[at]);
      }
    }
#pragma unroll
    for (int n = 0; n < kGatherAtOnce; ++n) {
      const int64_t at = (batch + n) * args.x.batch_stride;
      if (batch + n < chunk.end) to[at] = convert<T>(sum[n]);
    }
  }
}

}  // namespace fx_fuser::gather_rows

#define FX_FUSER_GATHER_ROWS(functor, scalars, Acc, Out, In)                               \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kGatherThreads)                   \
      fx_fuser_gather_rows(const __grid_constant__ fx_fuser::GatherArgs args) {            \
    fx_fuser::gather_rows::gather<In, false>(args);                                        \
  }                                                                                        \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kGatherThreads)                   \
      fx_fuser_gather_rows_transposed(const __grid_constant__ fx_fuser::GatherArgs args) { \
    fx_fuser::gather_rows::gather<In, true>(args);                                         \
  }                                                                                        \
  extern "C" __global__ void __launch_bounds__(32)                                         \
      fx_fuser_gather_rows_order(const __grid_constant__ fx_fuser::GatherArgs args) {      \
    fx_fuser::gather_rows::sort_columns(args);                                             \
  }                                                                                        \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kGatherThreads)                   \
      fx_fuser_gather_rows_backward(const __grid_constant__ fx_fuser::GatherArgs args) {   \
    fx_fuser::gather_rows::add_columns<In>(args);                                          \
  }
