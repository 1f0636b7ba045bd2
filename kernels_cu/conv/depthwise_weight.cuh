// dw[c, 0, i, j] = sum over n, y, x of dz[n, c, y, x] x[n, c, y * stride + i - top, x * stride + j
// - left], of bf16 or fp16 in channels_last: the gradient of depthwise.cuh's weight. For sm_80 and
// later.
//
// A thread walks down the image as the convolution does. It keeps the window's sums, and of dz as
// many rows as the window is high, each of which meets every row of x that it depends on: x and dz
// are read once. Blocks go through all items of their channels, then the threads of the same
// channel are added up in a block, and blocks by a second kernel, always in a fixed order.
//
//   FX_FUSER_DEPTHWISE_WEIGHT(/*kernel_h*/ 7, /*kernel_w*/ 7, /*stride*/ 1, functor, /*scalars*/ 0,
//                             /*Acc*/ float, /*Out*/ __half, /*x, dz*/ __half)
#pragma once

#include <cstdint>

#include "common/convert.cuh"
#include "common/ptx.cuh"
#include "conv/depthwise_args.h"
#include "conv/depthwise_rows.cuh"

namespace fx_fuser::depthwise_weight {

using depthwise::Item;
using depthwise::kDepth;
using depthwise::Rows;

constexpr int kRound = 2;  // rows of dz after which they move on in registers

template <int kHeight, int kWidth, int kStrideOf, class XOf>
struct Geometry {
  using X = XOf;
  static constexpr int kH = kHeight;
  static constexpr int kW = kWidth;
  static constexpr int kStride = kStrideOf;
  static constexpr int kThreads = kDepthwiseWeightThreads;
  static constexpr int kChannels = depthwise_channels(kH, kW, kStride, sizeof(X), false);
  static constexpr int kColumns = depthwise_columns(kH, kW, kStride, sizeof(X), false);
  static constexpr int kTaps = kH * kW;
  static constexpr int kWindow = (kColumns - 1) * kStride + kW;  // pixels per row of x
  static constexpr int kRing = (kH + kStride - 1) / kStride;     // rows of dz that a row of x meets
  static_assert(sizeof(X) == 2 && kDepth > kStride);

  using OfX = Rows<X, kWindow, kChannels, false, kThreads>;
  using OfZ = Rows<X, kColumns, kChannels, false, kThreads>;
  using At = typename OfX::At;

  struct Shared {
    typename OfX::Shared x;
    typename OfZ::Shared dz;
    float sum[kW][kThreads * kChannels];
  };
};

// Requests row `row` of x, and with the first of a step that of dz.
template <class G>
__device__ __forceinline__ void ask(typename G::OfX& x, typename G::OfZ& dz, int row) {
  x.ask(row);
  if (row % G::kStride == 0) dz.ask(row / G::kStride);
  ptx::copy_async_commit();
}

template <class G>
__device__ __forceinline__ void add_row(const float (&pixel)[G::kWindow][G::kChannels],
                                        const float (&dz)[G::kColumns][G::kChannels],
                                        float (&sum)[G::kTaps][G::kChannels], int row) {
#pragma unroll
  for (int o = 0; o < G::kColumns; ++o) {
#pragma unroll
    for (int j = 0; j < G::kW; ++j) {
#pragma unroll
      for (int v = 0; v < G::kChannels; ++v) {
        float& to = sum[row * G::kW + j][v];
        to = __fmaf_rn(dz[o][v], pixel[o * G::kStride + j][v], to);
      }
    }
  }
}

template <class G>
__device__ __forceinline__ void clear(float (&row)[G::kColumns][G::kChannels]) {
#pragma unroll
  for (int o = 0; o < G::kColumns; ++o) {
#pragma unroll
    for (int v = 0; v < G::kChannels; ++v) row[o][v] = 0.0f;
  }
}

// sum += an item's.
template <class G>
__device__ __forceinline__ void add_item(const DepthwiseWeightArgs& args,
                                         typename G::Shared& shared, const Item& item,
                                         const typename G::At& at,
                                         float (&sum)[G::kTaps][G::kChannels]) {
  typename G::OfX x(args,
                    {args.x, args.h, args.w, item.sample, item.y * G::kStride - args.top,
                     item.x * G::kStride - args.left, (item.rows - 1) * G::kStride + G::kH},
                    at, shared.x);
  typename G::OfZ dz(args,
                     {args.dz, args.out_h, args.out_w, item.sample, item.y, item.x, item.rows}, at,
                     shared.dz);
#pragma unroll
  for (int row = 0; row < kDepth - 1; ++row) ask<G>(x, dz, row);
  // At the end of a round ring[i] is row `step - i` of dz.
  float ring[G::kRing + kRound - 1][G::kColumns][G::kChannels] = {};
  const int steps = item.rows + G::kRing - 1;
#pragma unroll 1
  for (int first = 0; first < steps; first += kRound) {
#pragma unroll
    for (int i = G::kRing + kRound - 2; i >= kRound; --i) {
#pragma unroll
      for (int o = 0; o < G::kColumns; ++o) {
#pragma unroll
        for (int v = 0; v < G::kChannels; ++v) ring[i][o][v] = ring[i - kRound][o][v];
      }
    }
#pragma unroll
    for (int t = 0; t < kRound * G::kStride; ++t) {
      const int d = t % G::kStride;
      const int step = first + t / G::kStride;
      const int newest = kRound - 1 - t / G::kStride;  // of ring
      const int row = step * G::kStride + d;
      typename G::OfX::Raw raw[G::kWindow];
      typename G::OfZ::Raw raw_dz[G::kColumns];
      const bool found = x.has(row);
      const bool has_dz = dz.has(step);
      depthwise::wait_for_row(x);
      if (found) x.read(row, raw);
      if (d == 0 && has_dz) dz.read(step, raw_dz);
      ask<G>(x, dz, row + kDepth - 1);
      if (d == 0 && has_dz) {
        depthwise::widen(raw_dz, ring[newest]);
      } else if (d == 0) {
        clear<G>(ring[newest]);
      }
      if (!found) continue;
      float pixel[G::kWindow][G::kChannels];
      depthwise::widen(raw, pixel);
#pragma unroll
      for (int i = 0; i < G::kRing; ++i) {
        const bool is_there = static_cast<uint32_t>(step - i) < static_cast<uint32_t>(item.rows);
        if (i * G::kStride + d < G::kH && is_there) {
          add_row<G>(pixel, ring[newest + i], sum, i * G::kStride + d);
        }
      }
    }
  }
  ptx::copy_async_wait_for_groups<0>();
}

// Adds up the block's threads of the same channels, and stores the sums.
template <class G>
__device__ __forceinline__ void store(const DepthwiseWeightArgs& args, typename G::Shared& shared,
                                      const typename G::At& at,
                                      const float (&sum)[G::kTaps][G::kChannels]) {
  const int channels = G::kChannels << args.lanes_log2;
  const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < G::kH; ++i) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < G::kW; ++j) {
#pragma unroll
      for (int v = 0; v < G::kChannels; ++v) {
        shared.sum[j][thread * G::kChannels + v] = sum[i * G::kW + j][v];
      }
    }
    __syncthreads();
    for (int e = thread; e < G::kW * channels; e += G::kThreads) {
      const int j = e / channels;
      const int c = e - j * channels;
      float total = 0.0f;
      for (int from = c; from < G::kThreads * G::kChannels; from += channels) {
        total += shared.sum[j][from];
      }
      if (at.first + c < args.channels) {
        const int64_t tap = static_cast<int64_t>(at.block) * G::kTaps + i * G::kW + j;
        args.partial[tap * args.channels + at.first + c] = total;
      }
    }
  }
}

template <class G>
__device__ __forceinline__ void run(const DepthwiseWeightArgs& args) {
  __shared__ typename G::Shared shared;
  typename G::At at(args);
  if (G::OfX::kWarp) at.item = ptx::uniform(at.item);  // so are all conditions
  float sum[G::kTaps][G::kChannels] = {};
  for (uint32_t i = at.item; i < args.items; i += at.stride) {
    add_item<G>(args, shared, Item::at(args, i, G::kColumns), at, sum);
  }
  store<G>(args, shared, at, sum);
}

// dw = the sum of what the blocks have found: a block for a tap and 32 channels.
template <int kTaps, class X>
__device__ __forceinline__ void add_blocks(const DepthwiseSumArgs& args) {
  __shared__ float found[kDepthwiseSumSlices][kDepthwiseSumLanes];
  const int lane = static_cast<int>(threadIdx.x) % kDepthwiseSumLanes;
  const int slice = static_cast<int>(threadIdx.x) / kDepthwiseSumLanes;
  const int tap = static_cast<int>(blockIdx.x) / args.groups;
  const int channel = static_cast<int>(blockIdx.x) % args.groups * kDepthwiseSumLanes + lane;
  float sum = 0.0f;
  if (channel < args.channels) {
    const float* from = args.partial + static_cast<int64_t>(tap) * args.channels + channel;
    const int64_t block = static_cast<int64_t>(kTaps) * args.channels;
#pragma unroll 4
    for (int i = slice; i < args.blocks; i += kDepthwiseSumSlices) sum += from[i * block];
  }
  found[slice][lane] = sum;
  __syncthreads();
  if (slice != 0 || channel >= args.channels) return;
#pragma unroll
  for (int i = 1; i < kDepthwiseSumSlices; ++i) sum += found[i][lane];
  static_cast<X*>(args.dw)[static_cast<int64_t>(channel) * kTaps + tap] = convert<X>(sum);
}

}  // namespace fx_fuser::depthwise_weight

#define FX_FUSER_DEPTHWISE_WEIGHT(kernel_h, kernel_w, stride, functor, scalars, Acc, Out, X)   \
  extern "C" __global__ void __launch_bounds__(                                                \
      fx_fuser::kDepthwiseWeightThreads,                                                       \
      fx_fuser::depthwise::resident(                                                           \
          fx_fuser::depthwise_weight_resident(kernel_h, kernel_w, stride)))                    \
      fx_fuser_depthwise_weight(const __grid_constant__ fx_fuser::DepthwiseWeightArgs args) {  \
    using G = fx_fuser::depthwise_weight::Geometry<kernel_h, kernel_w, stride, X>;             \
    fx_fuser::depthwise_weight::run<G>(args);                                                  \
  }                                                                                            \
  extern "C" __global__ void __launch_bounds__(                                                \
      fx_fuser::kDepthwiseSumLanes* fx_fuser::kDepthwiseSumSlices)                             \
      fx_fuser_depthwise_weight_sum(const __grid_constant__ fx_fuser::DepthwiseSumArgs args) { \
    fx_fuser::depthwise_weight::add_blocks<kernel_h * kernel_w, X>(args);                      \
  }
