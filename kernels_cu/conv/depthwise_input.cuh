// dx[n, c, y, x] = sum over i, j of dz[n, c, (y + top - i) / 2, (x + left - j) / 2] weight[c, 0, i,
// j], where these divide, of bf16 or fp16 in channels_last: the gradient of x of depthwise.cuh with
// a stride of 2. (With a stride of 1 it is that kernel's, the window reversed.) For sm_80 and
// later.
//
// A thread walks down dz. A row of it is read once and added to every row of dx that depends on it;
// two of these are then complete.
//
//   FX_FUSER_DEPTHWISE_INPUT(/*kernel_h*/ 3, /*kernel_w*/ 3, functor, /*scalars*/ 0, /*Acc*/ float,
//                            /*Out*/ __half, /*dz, weight*/ __half)
#pragma once

#include <cstdint>

#include "common/convert.cuh"
#include "common/packed.cuh"
#include "common/ptx.cuh"
#include "conv/depthwise_args.h"
#include "conv/depthwise_rows.cuh"

namespace fx_fuser::depthwise_input {

using depthwise::Item;
using depthwise::Rows;

template <int kHeight, int kWidth, class XOf>
struct Geometry {
  using X = XOf;
  static constexpr int kH = kHeight;
  static constexpr int kW = kWidth;
  static constexpr int kThreads = kDepthwiseInputThreads;
  static constexpr int kChannels = depthwise_input_channels(kH, kW);
  static constexpr int kColumns = depthwise_input_columns(kH, kW);  // of dz
  static constexpr int kTaps = kH * kW;
  static constexpr int kHaloH = (kH - 1) / 2;  // rows of dz above, columns at the left
  static constexpr int kHaloW = (kW - 1) / 2;
  static constexpr int kWindow = kColumns + kHaloW;
  static constexpr int kRing = 2 * kHaloH + 2;  // rows of dx that a row of dz adds to
  static_assert(sizeof(X) == 2);

  using RowsOf = Rows<X, kWindow, kChannels, false, kThreads>;
  using Sums = float[kRing][2 * kColumns][kChannels];

  struct Shared {
    typename RowsOf::Shared rows;
    X weight[kDepthwiseMaxLanes * kChannels * kTaps];
  };
};

// Stores rows of dx.
template <class G>
struct Store {
  const DepthwiseInputArgs& args;
  typename G::X* to;  // of the next row
  uint32_t columns;   // a bit per column that exists
  int32_t row;

  // y, x: the first row and column, which may be outside.
  __device__ __forceinline__ Store(const DepthwiseInputArgs& of, uint32_t sample, int y, int x,
                                   int channel)
      : args(of), columns(0), row(y) {
    const int64_t pixel = (static_cast<int64_t>(sample) * args.h + y) * args.w + x;
    to = static_cast<typename G::X*>(args.dx) + pixel * args.channels + channel;
#pragma unroll
    for (int c = 0; c < 2 * G::kColumns; ++c) {
      columns |= static_cast<uint32_t>(static_cast<uint32_t>(x + c) < static_cast<uint32_t>(args.w))
                 << c;
    }
    columns = ptx::opaque(columns);
  }

  __device__ __forceinline__ void store_row(const float (&sum)[2 * G::kColumns][G::kChannels]) {
    if (static_cast<uint32_t>(row) < static_cast<uint32_t>(args.h)) {
      const int64_t step = ptx::opaque(args.channels);
#pragma unroll
      for (int c = 0; c < 2 * G::kColumns; ++c) {
        using Stored = Packed<typename G::X, G::kChannels>;
        if (columns >> c & 1) {
          *reinterpret_cast<Stored*>(to + c * step) = pack<typename G::X, G::kChannels>(sum[c]);
        }
      }
    }
    ++row;
    to += static_cast<int64_t>(args.w) * args.channels;
  }
};

// sum += a row of dz times a row of the weights.
template <class G>
__device__ __forceinline__ void add_row(const float (&dz)[G::kWindow][G::kChannels],
                                        const float (&weight)[G::kTaps][G::kChannels], int row,
                                        float (&sum)[2 * G::kColumns][G::kChannels]) {
#pragma unroll
  for (int o = 0; o < G::kColumns; ++o) {
#pragma unroll
    for (int j = 0; j < G::kW; ++j) {
#pragma unroll
      for (int v = 0; v < G::kChannels; ++v) {
        float& to = sum[2 * o + j % 2][v];
        to = __fmaf_rn(weight[row * G::kW + j][v], dz[o + G::kHaloW - j / 2][v], to);
      }
    }
  }
}

template <class G>
__device__ __forceinline__ void make_item(const DepthwiseInputArgs& args,
                                          typename G::Shared& shared, const Item& item,
                                          const typename G::RowsOf::At& at,
                                          const float (&weight)[G::kTaps][G::kChannels]) {
  // Of dz, beside which dx's rows and columns 2 y - top and 2 x - left are.
  const int y = item.y + args.top / 2;
  const int x = item.x + args.left / 2;
  typename G::RowsOf rows(args,
                          {args.dz, args.out_h, args.out_w, item.sample, y - G::kHaloH,
                           x - G::kHaloW, item.rows + G::kHaloH},
                          at, shared.rows);
  depthwise::begin(rows);
  Store<G> store(args, item.sample, 2 * y - args.top, 2 * x - args.left, at.channel);
  // sum[i] is the row of dx beside which row i of the window is.
  typename G::Sums sum = {};
  const int steps = item.rows + G::kHaloH;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int i = 0; i < G::kRing; ++i) {
#pragma unroll
      for (int o = 0; o < 2 * G::kColumns; ++o) {
#pragma unroll
        for (int v = 0; v < G::kChannels; ++v) {
          sum[i][o][v] = i + 2 < G::kRing ? sum[i + 2][o][v] : 0.0f;
        }
      }
    }
    float dz[G::kWindow][G::kChannels];
    if (depthwise::take(rows, step, dz)) {
#pragma unroll
      for (int i = 0; i < G::kH; ++i) {
        const int pair = step - G::kHaloH + i / 2;
        const bool is_stored = static_cast<uint32_t>(pair) < static_cast<uint32_t>(item.rows);
        if (is_stored) add_row<G>(dz, weight, i, sum[i]);
      }
    }
    if (step >= G::kHaloH) {
      store.store_row(sum[0]);
      store.store_row(sum[1]);
    }
  }
  ptx::copy_async_wait_for_groups<0>();
}

template <class G>
__device__ __forceinline__ void run(const DepthwiseInputArgs& args) {
  __shared__ typename G::Shared shared;
  const typename G::RowsOf::At at(args);
  depthwise::copy_weights<G::kTaps, G::kThreads>(shared.weight, args.weight, args, at.first,
                                                 G::kChannels, false);
  float weight[G::kTaps][G::kChannels];
#pragma unroll
  for (int tap = 0; tap < G::kTaps; ++tap) {
#pragma unroll
    for (int v = 0; v < G::kChannels; ++v) {
      weight[tap][v] = convert<float>(shared.weight[(at.channel - at.first + v) * G::kTaps + tap]);
    }
  }
  for (uint32_t i = at.item; i < args.items; i += at.stride) {
    make_item<G>(args, shared, Item::at(args, i, G::kColumns), at, weight);
  }
}

}  // namespace fx_fuser::depthwise_input

#define FX_FUSER_DEPTHWISE_INPUT(kernel_h, kernel_w, functor, scalars, Acc, Out, X)             \
  extern "C" __global__ void __launch_bounds__(                                                 \
      fx_fuser::kDepthwiseInputThreads,                                                         \
      fx_fuser::depthwise::resident(fx_fuser::depthwise_input_resident(kernel_h, kernel_w)))    \
      fx_fuser_depthwise_input(const __grid_constant__ fx_fuser::DepthwiseInputArgs args) {     \
    fx_fuser::depthwise_input::run<fx_fuser::depthwise_input::Geometry<kernel_h, kernel_w, X>>( \
        args);                                                                                  \
  }
