// out[b, j, i] = x[b, i, index[i, j]] of 16 bits, where all batches share the index, and the
// gradient of such a gather, transposed or not: as attention reads scores of relative positions.
// For sm_80 and later. What is not transposed Inductor gathers where it is read.
//
// A thread has a row and a column, or a place of x's gradient, and goes through batches: the index
// is read once. The gradient is no scatter: a place adds up the columns that read it, in their
// order, in fp32. gather_rows_order sorts them.
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

// out is transposed, by way of shared memory.
template <class T>
__device__ __forceinline__ void gather(const GatherArgs& args) {
  __shared__ T turned[kGatherAtOnce][kGatherTile][kGatherTile + 2];
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
  T* out = static_cast<T*>(args.out) + static_cast<int64_t>(first_column + down) * args.rows +
           first_row + across;
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
    __syncthreads();  // the batches before have been read
#pragma unroll
    for (int n = 0; n < kGatherAtOnce; ++n) {
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) turned[n][down + i * kThreadRows][across] = value[n][i];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kGatherAtOnce; ++n) {
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) {
        const int column = first_column + down + i * kThreadRows;
        const bool is_there = column < args.columns && first_row + across < args.rows;
        if (!is_there || batch + n >= chunk.end) continue;
        const int64_t row = static_cast<int64_t>(batch + n) * args.columns + i * kThreadRows;
        out[row * args.rows] = turned[n][across][down + i * kThreadRows];
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

// The columns of a place, of one row.
struct Columns {
  const uint16_t* order;
  int first;
  int end;

  __device__ __forceinline__ Columns(const GatherArgs& args, int row, int place, bool is_there) {
    order = args.order + static_cast<int64_t>(row) * args.columns;
    const uint16_t* starts = args.starts + static_cast<int64_t>(row) * (args.places + 1) + place;
    first = is_there ? starts[0] : 0;
    end = is_there ? starts[1] : 0;
  }
};

template <class T>
__device__ __forceinline__ void add_columns(const GatherArgs& args) {
  const Chunk chunk(args);
  const int row = chunk.tile / args.tiles;
  const int place = chunk.tile % args.tiles * kGatherThreads + static_cast<int>(threadIdx.x);
  if (place >= args.places) return;
  const auto [order, first, end] = Columns(args, row, place, true);
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

// Least and largest of a block's values, one of each thread.
struct Range {
  int low;
  int high;

  __device__ __forceinline__ void of_block() {
    __shared__ int of_warp[2][kGatherTile];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      low = min(low, __shfl_xor_sync(0xFFFFFFFF, low, step));
      high = max(high, __shfl_xor_sync(0xFFFFFFFF, high, step));
    }
    of_warp[0][threadIdx.x / 32] = low;
    of_warp[1][threadIdx.x / 32] = high;
    __syncthreads();
    for (int warp = 0; warp < kGatherTile; ++warp) {
      low = min(low, of_warp[0][warp]);
      high = max(high, of_warp[1][warp]);
    }
  }
};

// As add_columns, of a gradient whose rows are adjacent, a row and a place a thread: neighbouring
// places of neighbouring rows read neighbouring columns, most often, and these are staged in shared
// memory.
template <class T>
__device__ __forceinline__ void add_columns_transposed(const GatherArgs& args) {
  __shared__ T staged[kGatherAtOnce][kGatherSpan][kGatherTile + 2];
  const Chunk chunk(args);
  const int across = static_cast<int>(threadIdx.x) % kGatherTile;
  const int down = static_cast<int>(threadIdx.x) / kGatherTile;
  const int first_row = chunk.tile / args.tiles * kGatherTile;
  const int row = first_row + down;
  const int place = chunk.tile % args.tiles * kGatherTile + across;
  const bool is_there = row < args.rows && place < args.places;
  const Columns columns(args, row, place, is_there);
  const int one = columns.first < columns.end ? columns.order[columns.first] : -1;
  Range range{one >= 0 ? one : args.columns, one};
  range.of_block();
  const int span = range.high - range.low + 1;  // not above 0 where nothing reads these places
  const bool is_staged = span <= kGatherSpan;
#pragma unroll 1
  for (int batch = chunk.first; batch < chunk.end; batch += kGatherAtOnce) {
    const int count = min(kGatherAtOnce, chunk.end - batch);
    const T* d_out = static_cast<const T*>(args.d_out.data) + batch * args.d_out.batch_stride;
    float sum[kGatherAtOnce] = {};
    const auto add = [&](int column) {
#pragma unroll
      for (int n = 0; n < kGatherAtOnce; ++n) {
        const int64_t at = n * args.d_out.batch_stride + column * args.d_out.row_stride + row;
        if (n < count) sum[n] += convert<float>(d_out[at]);
      }
    };
    if (is_staged) {
      __syncthreads();  // the batches before have been read
#pragma unroll
      for (int n = 0; n < kGatherAtOnce; ++n) {
#pragma unroll
        for (int i = 0; i < kGatherSpan / kGatherTile; ++i) {
          const int step = down + i * kGatherTile;
          if (n >= count || step >= span || first_row + across >= args.rows) continue;
          staged[n][step][across] =
              d_out[n * args.d_out.batch_stride + (range.low + step) * args.d_out.row_stride +
                    first_row + across];
        }
      }
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kGatherAtOnce; ++n) {
        if (one >= 0 && n < count) sum[n] = convert<float>(staged[n][one - range.low][down]);
      }
    } else if (one >= 0) {
      add(one);
    }
#pragma unroll 1
    for (int other = columns.first + 1; other < columns.end; ++other) add(columns.order[other]);
    if (!is_there) continue;
    T* to = static_cast<T*>(args.x.data) + batch * args.x.batch_stride + row * args.x.row_stride +
            place;
#pragma unroll
    for (int n = 0; n < kGatherAtOnce; ++n) {
      if (n < count) to[n * args.x.batch_stride] = convert<T>(sum[n]);
    }
  }
}

}  // namespace fx_fuser::gather_rows

#define FX_FUSER_GATHER_ROWS(functor, scalars, Acc, Out, In)                             \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kGatherThreads)                 \
      fx_fuser_gather_rows(const __grid_constant__ fx_fuser::GatherArgs args) {          \
    fx_fuser::gather_rows::gather<In>(args);                                             \
  }                                                                                      \
  extern "C" __global__ void __launch_bounds__(32)                                       \
      fx_fuser_gather_rows_order(const __grid_constant__ fx_fuser::GatherArgs args) {    \
    fx_fuser::gather_rows::sort_columns(args);                                           \
  }                                                                                      \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kGatherThreads)                 \
      fx_fuser_gather_rows_backward(const __grid_constant__ fx_fuser::GatherArgs args) { \
    fx_fuser::gather_rows::add_columns<In>(args);                                        \
  }                                                                                      \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kGatherTileThreads)             \
      fx_fuser_gather_rows_backward_transposed(                                          \
          const __grid_constant__ fx_fuser::GatherArgs args) {                           \
    fx_fuser::gather_rows::add_columns_transposed<In>(args);                             \
  }
