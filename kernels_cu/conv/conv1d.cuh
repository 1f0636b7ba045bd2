// z[b, t, o] = sum over taps k and channels i of a group of x[b, t + k - padding, i] w[k, o, i],
// + bias[o], of bf16 or fp16: the convolution along one dimension, in groups, of stride 1. By
// mma.sync, for sm_80 and later. Its gradient of x is the same sum of the taps in reverse.
//
// A block has some frames t of one batch and group. The frames of x that they see are brought to
// shared memory once; the left operand of tap k is these rows from row k on, which costs ldmatrix
// nothing. Weights stream through shared memory. Rows 16 i + k of tap k are rows 16 (i - 1) + k +
// 16 of tap k + 16: so a warp goes through the taps of one residue by 16, and each brings it one
// new instruction's rows. Warps come in two halves, with every other residue each, whose sums meet
// at the end: so 64 rows a warp leave two warps to a tensor core.
//
//   FX_FUSER_CONV1D(/*columns*/ 48, functor, /*scalars*/ 0, /*Acc*/ float, /*Out*/ __half,
//                   /*x, weight, bias*/ __half)
#pragma once

#include <cstdint>

#include "common/convert.cuh"
#include "common/ptx.cuh"
#include "conv/conv1d_args.h"

namespace fx_fuser::conv1d {

template <class X_, int kColumns_, int kRowWarps_>
struct Shape {
  using X = X_;
  static constexpr Conv1dShape kIs{kColumns_, kRowWarps_};
  static constexpr int kColumns = kColumns_;
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kRows = kIs.rows();
  static constexpr int kThreads = kIs.threads();
  static constexpr int kInstructionsM = kConv1dWarpRows / 16;
  static constexpr int kInstructionsN = kColumns / 8;
  static_assert(sizeof(X) == 2 && kIs16BitFloat<X>);
  static_assert(kColumns % 16 == 0 && kColumns <= kConv1dMostColumns);
};

template <class S>
using Sums = float[S::kInstructionsM][S::kInstructionsN][4];

struct Tile {
  int frame;   // the first
  int column;  // of the group's channels
  uint32_t batch;
  uint32_t group;
};

template <class S>
__device__ __forceinline__ Tile tile_at(const Conv1dArgs& args) {
  const uint32_t above = divide(blockIdx.x, args.row_tiles);
  const uint32_t row_tile = blockIdx.x - above * args.row_tiles.size;
  const uint32_t columns = divide(above, args.batches);
  const uint32_t group = divide(columns, args.column_tiles);
  return {static_cast<int>(row_tile) * S::kRows,
          static_cast<int>(columns - group * args.column_tiles.size) * S::kColumns,
          above - columns * args.batches.size, group};
}

// The frames that the block's see, zeros beside x. One copy of channels to a multiple of 16.
template <class S>
__device__ __forceinline__ void copy_frames(const Conv1dArgs& args, const Tile& tile,
                                            uint32_t shared) {
  const int pitch = args.pitch;
  const int chunks = pitch / 16 - 1;
  const auto* x = static_cast<const typename S::X*>(args.x) + tile.batch * args.x_batch +
                  static_cast<int64_t>(tile.group) * args.in_channels;
  const int rows = S::kRows + args.taps - 1;
  // Neighbouring threads have the chunks of a row: it is adjacent in memory.
  constexpr int kAcross = 8;
  const int chunk_of_thread = static_cast<int>(threadIdx.x) % kAcross;
  for (int row = static_cast<int>(threadIdx.x) / kAcross; row < rows;
       row += S::kThreads / kAcross) {
    const int frame = tile.frame + row - args.padding;
    const bool is_inside = frame >= 0 && frame < args.length;
    for (int chunk = chunk_of_thread; chunk < chunks; chunk += kAcross) {
      const bool reads = is_inside && chunk * kConv1dChunk < args.in_channels;
      const auto* from = reads ? x + frame * args.x_row + chunk * kConv1dChunk : x;
      ptx::copy_async_only_16(shared + row * pitch + chunk * 16, from, reads);
    }
  }
}

// Where the chunk of a channel of the result is in a tap's part of a stage, whose rows have two:
// eight rows lie in different banks.
__device__ __forceinline__ int weight_at(int column, int chunk) {
  return column * 32 + (chunk ^ (column / 4 % 2)) * 16;
}

// What the taps of two residues have of 16 channels: step / steps_k is the pair of residues.
template <class S>
__device__ __forceinline__ void copy_weights(const Conv1dArgs& args, const Tile& tile,
                                             uint32_t stage, int pair, int step_k) {
  const int taps_of_half = (args.taps + kConv1dResidues - 1) / kConv1dResidues;
  const auto* weight =
      static_cast<const typename S::X*>(args.weight) +
      static_cast<int64_t>(tile.group) * args.taps * args.out_channels * args.in_channels;
  constexpr int kOfTap = S::kColumns * 2;
  const int count = kConv1dHalves * taps_of_half * kOfTap;
  for (int item = static_cast<int>(threadIdx.x); item < count; item += S::kThreads) {
    const int place = item / kOfTap;
    const int column = item % kOfTap / 2;
    const int half = place >= taps_of_half ? 1 : 0;
    const int residue = kConv1dHalves * pair + half;
    const int tap = residue + (place - half * taps_of_half) * kConv1dResidues;
    if (residue >= kConv1dResidues || tap >= args.taps) continue;
    const int channel = step_k * 16 + item % 2 * kConv1dChunk;
    const bool reads = tile.column + column < args.out_channels && channel < args.in_channels;
    const int64_t row = static_cast<int64_t>(tap) * args.out_channels + tile.column + column;
    const auto* from = reads ? weight + row * args.in_channels + channel : weight;
    ptx::copy_async_only_16(stage + place * kOfTap * 16 + weight_at(column, item % 2), from, reads);
  }
}

// Four taps of a residue: of the first one the rows are in a, but for the last instruction's.
template <class S, bool kIsWhole>
__device__ __forceinline__ void multiply_four(Sums<S>& sum, uint32_t (&a)[4][4], uint32_t rows,
                                              uint32_t weights, int pitch, int count) {
  constexpr int kM = S::kInstructionsM;
  static_assert(kM == 4);
#pragma unroll
  for (int tap = 0; tap < 4; ++tap) {
    if (!kIsWhole && tap >= count) return;
    ptx::load_matrices(a[(tap + kM - 1) % kM], rows + 16 * (tap + kM - 1) * pitch);
#pragma unroll
    for (int pair = 0; pair < S::kInstructionsN / 2; ++pair) {
      uint32_t b[4];
      ptx::load_matrices(b, weights + (tap * S::kColumns + 16 * pair) * 32);
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        ptx::mma_m16n8k16<typename S::X>(sum[i][2 * pair], a[(tap + i) % kM], b[0], b[1]);
        ptx::mma_m16n8k16<typename S::X>(sum[i][2 * pair + 1], a[(tap + i) % kM], b[2], b[3]);
      }
    }
  }
}

// A stage: 16 channels of the taps of this half's residue. rows: of x, as ldmatrix wants them from
// this lane, of the first tap.
template <class S>
__device__ __forceinline__ void multiply_stage(Sums<S>& sum, uint32_t rows, uint32_t weights,
                                               int pitch, int count) {
  uint32_t a[4][4];
#pragma unroll
  for (int i = 0; i < S::kInstructionsM - 1; ++i) ptx::load_matrices(a[i], rows + 16 * i * pitch);
  for (; count >= 4; count -= 4) {
    multiply_four<S, true>(sum, a, rows, weights, pitch, count);
    rows += 64 * pitch;
    weights += 4 * S::kColumns * 32;
  }
  multiply_four<S, false>(sum, a, rows, weights, pitch, count);
}

template <class S>
__device__ __forceinline__ void multiply(const Conv1dArgs& args, const Tile& tile, uint32_t shared,
                                         Sums<S>& sum) {
  const int pitch = args.pitch;
  const uint32_t stages = shared + args.x_bytes;
  const int stage_bytes = args.stage_bytes;
  const int steps_k = (args.in_channels + 15) / 16;
  const int residues = min(args.taps, kConv1dResidues);
  const int steps = (residues + 1) / kConv1dHalves * steps_k;
  // What is copied next.
  int copied = 0;
  int copied_pair = 0;
  int copied_k = 0;
  uint32_t to = stages;
  const uint32_t end = stages + args.stages * stage_bytes;
  const auto copy = [&] {
    if (copied < steps) {
      copy_weights<S>(args, tile, to, copied_pair, copied_k);
      ++copied;
      if (++copied_k == steps_k) {
        copied_k = 0;
        ++copied_pair;
      }
      to = to + stage_bytes == end ? stages : to + stage_bytes;
    }
    ptx::copy_async_commit();  // an empty group too: groups are counted
  };
  copy_frames<S>(args, tile, shared);
  for (int i = 1; i < args.stages; ++i) copy();

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int half = warp / S::kRowWarps;
  const int first_row = warp % S::kRowWarps * kConv1dWarpRows + lane % 16;
  const uint32_t row_at = shared + first_row * pitch + lane / 16 * 16;
  const int taps_of_half = (args.taps + kConv1dResidues - 1) / kConv1dResidues;
  const uint32_t weight_row =
      half * taps_of_half * S::kColumns * 32 + weight_at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  uint32_t stage = stages;
  for (int pair = 0; pair * kConv1dHalves < residues; ++pair) {
    const int residue = kConv1dHalves * pair + half;
    const int count =
        residue < residues ? (args.taps - residue + kConv1dResidues - 1) / kConv1dResidues : 0;
    for (int step_k = 0; step_k < steps_k; ++step_k) {
      if (args.stages == kConv1dMostStages) {
        ptx::copy_async_wait_for_groups<kConv1dMostStages - 2>();
      } else {
        ptx::copy_async_wait();
      }
      __syncthreads();  // the stage is there, and all are done with the one before
      copy();
      if (count > 0) {
        multiply_stage<S>(sum, row_at + residue * pitch + step_k * 32, stage + weight_row, pitch,
                          count);
      }
      stage = stage + stage_bytes == end ? stages : stage + stage_bytes;
    }
  }
  ptx::copy_async_wait();
  __syncthreads();
}

// The second half's sums come to the first one's, always in this order.
template <class S>
__device__ __forceinline__ void join_halves(Sums<S>& sum, float* shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float* const place = shared + warp % S::kRowWarps * kConv1dWarpRows * S::kColumns +
                       static_cast<int>(threadIdx.x) % 32;
  const auto each = [&](auto&& act) {
#pragma unroll
    for (int i = 0; i < S::kInstructionsM; ++i) {
#pragma unroll
      for (int j = 0; j < S::kInstructionsN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) act(sum[i][j][e], ((i * S::kInstructionsN + j) * 4 + e) * 32);
      }
    }
  };
  if (warp >= S::kRowWarps) {
    each([&](float& value, int at) { place[at] = value; });
  }
  __syncthreads();
  if (warp < S::kRowWarps) {
    each([&](float& value, int at) { value += place[at]; });
  }
}

template <class S>
__device__ __forceinline__ void store(const Conv1dArgs& args, const Tile& tile,
                                      const Sums<S>& sum) {
  using X = typename S::X;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row_size = static_cast<int64_t>(args.groups) * args.out_channels;
  const int64_t first_column = static_cast<int64_t>(tile.group) * args.out_channels;
  const auto* bias = static_cast<const X*>(args.bias);
  auto* z = static_cast<X*>(args.z) +
            static_cast<int64_t>(tile.batch) * args.out_length * row_size + first_column;
#pragma unroll
  for (int j = 0; j < S::kInstructionsN; ++j) {
    const int column = tile.column + 8 * j + lane % 4 * 2;
    if (column >= args.out_channels) break;
    float added[2] = {};
    if (bias != nullptr) {
#pragma unroll
      for (int e = 0; e < 2; ++e) added[e] = convert<float>(bias[first_column + column + e]);
    }
#pragma unroll
    for (int i = 0; i < S::kInstructionsM; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int frame = tile.frame + warp * kConv1dWarpRows + 16 * i + lane / 4 + 8 * r;
        if (frame >= args.out_length) continue;
        *reinterpret_cast<Vec<X, 2>*>(z + frame * row_size + column) =
            convert_pair<X>(sum[i][j][2 * r] + added[0], sum[i][j][2 * r + 1] + added[1]);
      }
    }
  }
}

template <class S>
__device__ __forceinline__ void run(const Conv1dArgs& args) {
  extern __shared__ uint4 storage[];
  const Tile tile = tile_at<S>(args);
  Sums<S> sum = {};
  multiply<S>(args, tile, ptx::shared_address(storage), sum);
  join_halves<S>(sum, reinterpret_cast<float*>(storage));
  if (threadIdx.x < 32 * S::kRowWarps) store<S>(args, tile, sum);
}

}  // namespace fx_fuser::conv1d

#define FX_FUSER_CONV1D_KERNEL(name, X, columns, row_warps)                      \
  extern "C" __global__ void __launch_bounds__(                                  \
      fx_fuser::Conv1dShape{columns, row_warps}.threads(), 4 / (row_warps))      \
      name(const __grid_constant__ fx_fuser::Conv1dArgs args) {                  \
    fx_fuser::conv1d::run<fx_fuser::conv1d::Shape<X, columns, row_warps>>(args); \
  }

#define FX_FUSER_CONV1D(columns, functor, scalars, Acc, Out, X) \
  FX_FUSER_CONV1D_KERNEL(fx_fuser_conv1d_1, X, columns, 1)      \
  FX_FUSER_CONV1D_KERNEL(fx_fuser_conv1d_2, X, columns, 2)      \
  FX_FUSER_CONV1D_KERNEL(fx_fuser_conv1d_4, X, columns, 4)
