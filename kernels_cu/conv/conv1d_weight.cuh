// dw[k, o, i] = sum over batches b and frames t of dz[b, t, o] x[b, t + k - padding, i], of bf16 or
// fp16: the gradient of conv1d.cuh's weight. By mma.sync, for sm_80 and later.
//
// A warp has two taps of a group, kConv1dResidues apart: what the second one multiplies at frames t
// is what the first one multiplies at t + 16, so both take one load. A block goes through all
// frames of all batches by stages of them; what its four warps read of x they share. No sum is
// split, so that the same bits come out of each run.
//
//   FX_FUSER_CONV1D_WEIGHT(/*rows*/ 3, /*columns*/ 3, functor, /*scalars*/ 0, /*Acc*/ float,
//                          /*Out*/ __half, /*x, dz*/ __half)
#pragma once

#include <cstdint>

#include "common/convert.cuh"
#include "common/ptx.cuh"
#include "conv/conv1d_args.h"

namespace fx_fuser::conv1d_weight {

template <class X_, int kRows_, int kColumns_>
struct Shape {
  using X = X_;
  static constexpr Conv1dWeightShape kIs{kRows_, kColumns_};
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kThreads = Conv1dWeightShape::threads();
  static constexpr int kPitchX = conv1d_pitch(16 * kColumns);
  static constexpr int kPitchZ = conv1d_pitch(16 * kRows);
  static constexpr int kRowsX = Conv1dWeightShape::x_rows();
  static constexpr int kBytesZ = kIs.dz_bytes();
  static constexpr int kStageBytes = kIs.stage_bytes();
  static_assert(sizeof(X) == 2 && kIs16BitFloat<X>);
};

template <class S>
using Sums = float[S::kRows][2 * S::kColumns][4];

struct Tile {
  int tap;  // the first warp's first
  int row;  // of the group's channels of the result
  int column;
  uint32_t group;
};

template <class S>
__device__ __forceinline__ Tile tile_at(const Conv1dWeightArgs& args) {
  constexpr uint32_t kOfWindow = kConv1dResidues / kConv1dWeightWarps;
  const uint32_t rows = divide(blockIdx.x, args.tap_blocks);
  const uint32_t taps = blockIdx.x - rows * args.tap_blocks.size;
  const uint32_t columns = divide(rows, args.row_tiles);
  const uint32_t group = divide(columns, args.column_tiles);
  const uint32_t tap =
      taps / kOfWindow * kConv1dWeightWindow + taps % kOfWindow * kConv1dWeightWarps;
  return {static_cast<int>(tap),
          static_cast<int>(rows - columns * args.row_tiles.size) * 16 * S::kRows,
          static_cast<int>(columns - group * args.column_tiles.size) * 16 * S::kColumns, group};
}

// Rows of `kChunks` chunks of neighbouring channels, zeros beside the tensor.
template <int kRows, int kChunks, int kPitch, int kThreads, class X>
__device__ __forceinline__ void copy_rows(uint32_t to, const X* from, int64_t stride, int first,
                                          int length, int channels) {
  for (int item = static_cast<int>(threadIdx.x); item < kRows * kChunks; item += kThreads) {
    const int row = item / kChunks;
    const int chunk = item % kChunks;
    const int frame = first + row;
    const bool reads = frame >= 0 && frame < length && chunk * kConv1dChunk < channels;
    const X* at = reads ? from + frame * stride + chunk * kConv1dChunk : from;
    ptx::copy_async_only_16(to + row * kPitch + chunk * 16, at, reads);
  }
}

template <class S>
__device__ __forceinline__ void copy_stage(const Conv1dWeightArgs& args, const Tile& tile,
                                           uint32_t stage, int step) {
  using X = typename S::X;
  const uint32_t batch = divide(static_cast<uint32_t>(step), args.frame_tiles);
  const int frame = (step - static_cast<int>(batch * args.frame_tiles.size)) * kConv1dWeightFrames;
  const int64_t rows = static_cast<int64_t>(tile.group) * args.out_channels + tile.row;
  const int64_t columns = static_cast<int64_t>(tile.group) * args.in_channels + tile.column;
  copy_rows<kConv1dWeightFrames, 2 * S::kRows, S::kPitchZ, S::kThreads>(
      stage, static_cast<const X*>(args.dz) + batch * args.dz_batch + rows, args.dz_row, frame,
      args.out_length, args.out_channels - tile.row);
  copy_rows<S::kRowsX, 2 * S::kColumns, S::kPitchX, S::kThreads>(
      stage + S::kBytesZ, static_cast<const X*>(args.x) + batch * args.x_batch + columns,
      args.x_row, frame + tile.tap - args.padding, args.length, args.in_channels - tile.column);
}

template <class S>
__device__ __forceinline__ void load_columns(uint32_t (&b)[S::kColumns][4], uint32_t x) {
#pragma unroll
  for (int j = 0; j < S::kColumns; ++j) ptx::load_transposed(b[j], x + 32 * j);
}

template <class S>
__device__ __forceinline__ void multiply_frames(Sums<S>& sum, const uint32_t (&a)[S::kRows][4],
                                                const uint32_t (&b)[S::kColumns][4]) {
#pragma unroll
  for (int j = 0; j < S::kColumns; ++j) {
#pragma unroll
    for (int i = 0; i < S::kRows; ++i) {
      ptx::mma_m16n8k16<typename S::X>(sum[i][2 * j], a[i], b[j][0], b[j][1]);
      ptx::mma_m16n8k16<typename S::X>(sum[i][2 * j + 1], a[i], b[j][2], b[j][3]);
    }
  }
}

// dz, x: as ldmatrix wants them from this lane. of: the two taps'.
template <class S>
__device__ __forceinline__ void multiply_stage(Sums<S> (&of)[2], uint32_t dz, uint32_t x) {
  uint32_t b[2][S::kColumns][4];
  load_columns<S>(b[0], x);
#pragma unroll
  for (int step = 0; step < kConv1dWeightFrames / 16; ++step) {
    uint32_t a[S::kRows][4];
#pragma unroll
    for (int i = 0; i < S::kRows; ++i) {
      ptx::load_transposed(a[i], dz + step * 16 * S::kPitchZ + 32 * i);
    }
    load_columns<S>(b[(step + 1) % 2], x + (step + 1) * 16 * S::kPitchX);
    multiply_frames<S>(of[0], a, b[step % 2]);
    multiply_frames<S>(of[1], a, b[(step + 1) % 2]);
  }
}

template <class S>
__device__ __forceinline__ void multiply(const Conv1dWeightArgs& args, const Tile& tile,
                                         uint32_t shared, Sums<S> (&of)[2]) {
  constexpr int kStages = kConv1dWeightStages;
  const int steps = args.batches * static_cast<int>(args.frame_tiles.size);
  int copied = 0;
  const auto copy = [&] {
    if (copied < steps) {
      copy_stage<S>(args, tile, shared + copied % kStages * S::kStageBytes, copied);
      ++copied;
    }
    ptx::copy_async_commit();  // an empty group too: groups are counted
  };
  for (int i = 1; i < kStages; ++i) copy();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool works = tile.tap + warp < args.taps;
  // Frames and channels of a, 8 by 8: first channels, then frames; of b first frames.
  const uint32_t dz = (lane / 16 * 8 + lane % 8) * S::kPitchZ + lane / 8 % 2 * 16;
  const uint32_t x = S::kBytesZ + (warp + lane % 16) * S::kPitchX + lane / 16 * 16;
  for (int step = 0; step < steps; ++step) {
    ptx::copy_async_wait_for_groups<kStages - 2>();
    __syncthreads();  // the stage is there, and all are done with the one before
    copy();
    const uint32_t stage = shared + step % kStages * S::kStageBytes;
    if (works) multiply_stage<S>(of, stage + dz, stage + x);
  }
  ptx::copy_async_wait();
}

template <class S>
__device__ __forceinline__ void store(const Conv1dWeightArgs& args, const Tile& tile, int tap,
                                      const Sums<S>& sum) {
  using X = typename S::X;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  auto* dw = static_cast<X*>(args.dw) + (static_cast<int64_t>(tile.group) * args.taps + tap) *
                                            args.out_channels * args.in_channels;
#pragma unroll
  for (int i = 0; i < S::kRows; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = tile.row + 16 * i + lane / 4 + 8 * r;
      if (row >= args.out_channels) continue;
#pragma unroll
      for (int j = 0; j < 2 * S::kColumns; ++j) {
        const int column = tile.column + 8 * j + lane % 4 * 2;
        if (column >= args.in_channels) break;
        auto* to = dw + static_cast<int64_t>(row) * args.in_channels + column;
        *reinterpret_cast<Vec<X, 2>*>(to) = convert_pair<X>(sum[i][j][2 * r], sum[i][j][2 * r + 1]);
      }
    }
  }
}

template <class S>
__device__ __forceinline__ void run(const Conv1dWeightArgs& args) {
  extern __shared__ uint4 storage[];
  const Tile tile = tile_at<S>(args);
  Sums<S> of[2] = {};
  multiply<S>(args, tile, ptx::shared_address(storage), of);
  const int tap = tile.tap + static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int its = tap + second * kConv1dResidues;
    if (its < args.taps) store<S>(args, tile, its, of[second]);
  }
}

}  // namespace fx_fuser::conv1d_weight

#define FX_FUSER_CONV1D_WEIGHT(rows, columns, functor, scalars, Acc, Out, X)              \
  extern "C" __global__ void __launch_bounds__(fx_fuser::Conv1dWeightShape::threads(), 2) \
      fx_fuser_conv1d_weight(const __grid_constant__ fx_fuser::Conv1dWeightArgs args) {   \
    fx_fuser::conv1d_weight::run<fx_fuser::conv1d_weight::Shape<X, rows, columns>>(args); \
  }
