// The gemm of unaligned operands (linear_unaligned.cuh): from a warp's sums through the epilogue
// and shared memory to global memory.
//
// A result's rows may begin anywhere. In shared memory they have the same offset from a multiple of
// 16 bytes as in global memory, so that aligned vectors match and nothing has to be shifted.
#pragma once

#include <utility>

#include "common/convert.cuh"
#include "common/epilogue_math.cuh"
#include "common/ptx.cuh"
#include "linear/linear_unaligned_args.h"

namespace fx_fuser::unaligned {

struct Tile {
  int outer;  // batch
  int inner;
  int m;  // first row
  int n;  // first column
};

// d[2r + t] of the instruction (i, j): row 16i + 8r + lane / 4, column 8j + 2 (lane % 4) + t.
template <class S>
using Sums = float[S::kInstructionsM][S::kInstructionsN][4];

// Staging of a tile's elements of one result in shared memory, and their copy to global memory.
template <class S, class T>
struct Staged {
  static constexpr int kPitch = S::kTileN * static_cast<int>(sizeof(T)) + 16;  // bytes

  uint8_t* to;        // the tile's first row, minus `before` bytes
  int64_t row_bytes;  // in global memory
  int before;         // bytes from a multiple of 16 to the first row's first element
  int rows;           // of the tile that exist
  int columns;
  bool is_flat;  // rows have no gaps between them, so all are copied as one

  __device__ __forceinline__ Staged(const UnalignedArgs& args, const UnalignedResult& result,
                                    const Tile& tile) {
    auto* first = static_cast<T*>(result.data) + tile.outer * result.batch_stride[0] +
                  tile.inner * result.batch_stride[1] + tile.m * result.row_stride + tile.n;
    before = static_cast<int>(reinterpret_cast<uintptr_t>(first) % 16);
    to = reinterpret_cast<uint8_t*>(first) - before;
    row_bytes = result.row_stride * static_cast<int64_t>(sizeof(T));
    rows = min(args.m - tile.m, S::kTileM);
    columns = min(args.n - tile.n, S::kTileN);
    is_flat = result.row_stride == columns;
  }

  // Bytes from a multiple of 16 to the row's first element.
  __device__ __forceinline__ int before_row(int row) const {
    return is_flat ? before : static_cast<int>((before + row * row_bytes) & 15);
  }

  // A row's first element in shared memory.
  __device__ __forceinline__ int place(int row) const {
    const int pitch = is_flat ? static_cast<int>(row_bytes) : kPitch;
    return row * pitch + before_row(row);
  }

  // Stores vector `index` of row `line`, or of all rows if they are flat.
  __device__ __forceinline__ void store_vector(const uint8_t* shared, int line, int index) const {
    const int begin = before_row(line);
    const int bytes = (is_flat ? rows * columns : columns) * static_cast<int>(sizeof(T));
    const int first = 16 * index;
    const int last = first + 16;
    if (first >= begin + bytes) return;
    const uint8_t* from = shared + (is_flat ? 0 : line * kPitch) + first;
    uint8_t* at = to + (before + line * row_bytes - begin) + first;
    if (first >= begin && last <= begin + bytes) {
      *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(from);
      return;
    }
    const int from_byte = max(begin - first, 0);
    const int to_byte = min(begin + bytes - first, 16);
#pragma unroll
    for (int e = 0; e < 16; e += static_cast<int>(sizeof(T))) {
      if (e >= from_byte && e < to_byte) {
        *reinterpret_cast<T*>(at + e) = *reinterpret_cast<const T*>(from + e);
      }
    }
  }

  // The block stores everything that is staged.
  __device__ __forceinline__ void store(const uint8_t* shared) const {
    const int thread = static_cast<int>(ptx::thread_index());
    if (is_flat) {
      const int vectors = (before + rows * columns * static_cast<int>(sizeof(T)) + 15) / 16;
      for (int i = thread; i < vectors; i += S::kThreads) store_vector(shared, 0, i);
      return;
    }
    constexpr int kVectors = kPitch / 16;  // of a row
    for (int i = thread; i < rows * kVectors; i += S::kThreads) {
      store_vector(shared, i / kVectors, i % kVectors);
    }
  }
};

// The first of a lane's elements: it has pairs of columns, eight apart.
template <class S>
struct Lane {
  int row;  // of the tile, of the first instruction
  int column;

  static __device__ __forceinline__ Lane self() {
    const int thread = static_cast<int>(ptx::thread_index());
    const int warp = thread / 32;
    const int lane = thread % 32;
    return {warp / S::kWarpsN * S::kWarpM + lane / 4, warp % S::kWarpsN * S::kWarpN + lane % 4 * 2};
  }
};

template <class S, class Epilogue, int kScalars, class Out, class Operands, class... In>
struct Tail;

template <class S, class Epilogue, int kScalars, class Out, size_t... kOperand, class... In>
struct Tail<S, Epilogue, kScalars, Out, std::index_sequence<kOperand...>, In...> {
  static constexpr int kOperands = sizeof...(In);
  static constexpr int kScalarSlots = kScalars > 0 ? kScalars : 1;
  using X = typename S::X;
  static_assert(kOperands < kMaxInputs && kScalars <= kMaxScalars);

  const UnalignedArgs& args;
  const Tile& tile;
  uint8_t* shared;

  // Calls visit(i, j, r, row, column) for each of the lane's pairs that has an element.
  template <class Visit>
  __device__ __forceinline__ void for_pairs(Visit visit) const {
    const Lane<S> lane = Lane<S>::self();
#pragma unroll
    for (int i = 0; i < S::kInstructionsM; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = lane.row + 16 * i + 8 * r;
        if (tile.m + row >= args.m) continue;
#pragma unroll
        for (int j = 0; j < S::kInstructionsN; ++j) {
          const int column = lane.column + 8 * j;
          if (tile.n + column < args.n) visit(i, j, r, row, column);
        }
      }
    }
  }

  template <class T>
  __device__ __forceinline__ void stage(const Staged<S, T>& to, int row, int column, T first,
                                        T second) const {
    T* at = reinterpret_cast<T*>(shared + to.place(row)) + column;
    at[0] = first;
    if (column + 1 < to.columns) at[1] = second;
  }

  template <class T>
  __device__ __forceinline__ float load(const Strided<4>& operand, int64_t row, int column) const {
    const T* from = static_cast<const T*>(operand.data) + tile.outer * operand.stride[0] +
                    tile.inner * operand.stride[1] + row * operand.stride[2] +
                    min(column, args.n - 1) * operand.stride[3];
    return convert<float>(*from);
  }

  __device__ __forceinline__ void add_bias(Sums<S>& sum) const {
    const Lane<S> lane = Lane<S>::self();
#pragma unroll
    for (int j = 0; j < S::kInstructionsN; ++j) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int column = min(tile.n + lane.column + 8 * j + t, args.n - 1);
        const float bias = convert<float>(static_cast<const X*>(args.bias)[column]);
#pragma unroll
        for (int i = 0; i < S::kInstructionsM; ++i) {
          sum[i][j][t] += bias;
          sum[i][j][2 + t] += bias;
        }
      }
    }
  }

  // Applies the epilogue and stores the tile. The ring of stages must be free: it is reused.
  __device__ __forceinline__ void finish(Sums<S>& sum) const {
    if (args.bias != nullptr) add_bias(sum);
    if (args.c.data != nullptr) {
      const Staged<S, X> staged(args, args.c, tile);
      for_pairs([&](int i, int j, int r, int row, int column) {
        const auto pair = convert_pair<X>(sum[i][j][2 * r], sum[i][j][2 * r + 1]);
        stage<X>(staged, row, column, pair.element[0], pair.element[1]);
      });
      __syncthreads();
      staged.store(shared);
      __syncthreads();
    }
    float scalar[kScalarSlots];
#pragma unroll
    for (int s = 0; s < kScalarSlots; ++s) scalar[s] = args.scalar[s];
    const Staged<S, Out> staged(args, args.out, tile);
    for_pairs([&](int i, int j, int r, int row, int column) {
      float value[2];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const float in[1 + kOperands] = {
            sum[i][j][2 * r + t],
            load<In>(args.operand[kOperand], tile.m + row, tile.n + column + t)...};
        value[t] = static_cast<float>(Epilogue{}(in, scalar));
      }
      const auto pair = convert_pair<Out>(value[0], value[1]);
      stage<Out>(staged, row, column, pair.element[0], pair.element[1]);
    });
    __syncthreads();
    staged.store(shared);
  }
};

}  // namespace fx_fuser::unaligned
