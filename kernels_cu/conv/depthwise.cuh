// out[n, c, y, x] = epilogue(z, operands...),
// z = sum over i, j of x[n, c, y * stride + i - top, x * stride + j - left] weight[c, 0, i, j],
// in fp32 arithmetic, for bf16, fp16 and fp32, channels_last or contiguous. For sm_80 and later.
//
// A thread has two channels (one in a contiguous image, and of large windows in 16 bits) and a
// strip of output columns, and walks down the image. Each row of pixels is read once and added to
// every output row that it contributes to: the sums of as many output rows as the window is high
// are kept in registers, and so are the weights. So an output costs its products, its share of a
// row of pixels and its epilogue, and nothing is read twice from memory except the columns at the
// edges of strips, which hit L1.
//
// The window's height, width and stride are compile-time constants: all loops over them are
// unrolled.
//
//   FX_FUSER_DEPTHWISE(/*kernel_h*/ 3, /*kernel_w*/ 3, /*stride*/ 1, Epilogue, /*scalars*/ 1,
//                      /*Acc*/ float, /*Out*/ __half, /*x, weight, c*/ __half,
//                      /*operands*/ float...)
#pragma once

#include <utility>

#include "common/convert.cuh"
#include "common/epilogue_math.cuh"
#include "common/packed.cuh"
#include "common/ptx.cuh"
#include "conv/depthwise_args.h"
#include "conv/depthwise_rows.cuh"

namespace fx_fuser::depthwise {

template <int kHeight, int kWidth, int kStrideOf, bool kIsPlane, class XOf>
struct Geometry {
  using X = XOf;
  static constexpr int kH = kHeight;
  static constexpr int kW = kWidth;
  static constexpr int kStride = kStrideOf;
  static constexpr bool kPlanes = kIsPlane;
  static constexpr int kChannels = depthwise_channels(kH, kW, kStride, sizeof(X), kPlanes);
  static constexpr int kColumns = depthwise_columns(kH, kW, kStride, sizeof(X), kPlanes);
  static constexpr int kTaps = kH * kW;
  static constexpr int kWindow = (kColumns - 1) * kStride + kW;    // pixels per row
  static constexpr int kRing = (kH + kStride - 1) / kStride;       // output rows that a row adds to
  static constexpr int kLanes = kPlanes ? 1 : kDepthwiseMaxLanes;  // at most
  using RowsOf = Rows<X, kWindow, kChannels, kPlanes, kDepthwiseThreads>;

  struct Shared {
    typename RowsOf::Shared rows;
    X weight[kLanes * kChannels * kTaps];
  };
};

template <class G, bool kPixels, class Epilogue, int kScalars, class Out, class Operands,
          class... In>
struct Store;

// The epilogue and the stores. kPixels: an operand varies by pixel; others are loaded once per
// item.
template <class G, bool kPixels, class Epilogue, int kScalars, class Out, size_t... kOperand,
          class... In>
struct Store<G, kPixels, Epilogue, kScalars, Out, std::index_sequence<kOperand...>, In...> {
  static constexpr int kOperands = sizeof...(In);
  static constexpr int kSlots = kOperands > 0 ? kOperands : 1;
  static constexpr int kScalarSlots = kScalars > 0 ? kScalars : 1;
  static_assert(kOperands <= kConvMaxOperands && kScalars <= kMaxScalars);
  using X = typename G::X;

  const DepthwiseArgs& args;
  Item item;
  int channel;
  int columns;  // of the strip that exist
  Out* out;     // where the next row begins
  X* c;         // likewise, or null
  float value[kSlots][G::kChannels];

  __device__ __forceinline__ Store(const DepthwiseArgs& of, const Item& at, int first)
      : args(of), item(at), channel(first) {
    const int64_t plane = static_cast<int64_t>(args.out_h) * args.out_w;
    const int64_t pixel = static_cast<int64_t>(item.y) * args.out_w + item.x;
    columns = min(G::kColumns, args.out_w - item.x);
    const int64_t element =
        item.sample * plane * args.channels +
        (G::kPlanes ? channel * plane + pixel : pixel * args.channels + channel);
    out = static_cast<Out*>(args.out) + element;
    c = args.c == nullptr ? nullptr : static_cast<X*>(args.c) + element;
    if constexpr (!kPixels) load_operands(0, 0);
  }

  template <class T>
  __device__ __forceinline__ void load_operand(const ConvOperand& operand, int y, int x,
                                               float (&loaded)[G::kChannels]) const {
    const T* from = static_cast<const T*>(operand.data) + item.sample * operand.stride[0] +
                    channel * operand.stride[1] + y * operand.stride[2] + x * operand.stride[3];
#pragma unroll
    for (int v = 0; v < G::kChannels; ++v) loaded[v] = convert<float>(from[v * operand.stride[1]]);
  }

  __device__ __forceinline__ void load_operands(int y, int x) {
    (load_operand<In>(args.operand[kOperand], y, x, value[kOperand]), ...);
  }

  __device__ __forceinline__ void store_pixel(const float (&sum)[G::kChannels], Out* to,
                                              bool exists) const {
    float scalar[kScalarSlots];
#pragma unroll
    for (int s = 0; s < kScalarSlots; ++s) scalar[s] = args.scalar[s];
    float y[G::kChannels];
#pragma unroll
    for (int v = 0; v < G::kChannels; ++v) {
      const float in[1 + kOperands] = {sum[v], value[kOperand][v]...};
      y[v] = Epilogue{}(in, scalar);
    }
    if (exists) store(to, y);
  }

  template <class T>
  static __device__ __forceinline__ void store(T* to, const float (&value)[G::kChannels]) {
    if constexpr (G::kChannels == 2) {
      *reinterpret_cast<Vec<T, 2>*>(to) = convert_pair<T>(value[0], value[1]);
    } else {
      *to = convert<T>(value[0]);
    }
  }

  // Stores row `nth` of the item and advances to the next.
  __device__ __forceinline__ void store_row(int nth,
                                            const float (&sum)[G::kColumns][G::kChannels]) {
    const int64_t step = G::kPlanes ? 1 : ptx::opaque(args.channels);
    const int64_t row = args.out_w * (G::kPlanes ? 1 : static_cast<int64_t>(args.channels));
    if (c != nullptr) {
#pragma unroll
      for (int o = 0; o < G::kColumns; ++o) {
        if (o < columns) store(c + o * step, sum[o]);
      }
      c += row;
    }
#pragma unroll
    for (int o = 0; o < G::kColumns; ++o) {
      // Unconditional, so that the loads of several columns overlap.
      if constexpr (kPixels) load_operands(item.y + nth, item.x + min(o, columns - 1));
      store_pixel(sum[o], out + o * step, o < columns);
    }
    out += row;
  }
};

// The weights of a thread's channels, in registers if the epilogue leaves enough of them (kKept).
template <class G, bool kKept>
struct Weights {
  float kept[kKept ? G::kTaps : 1][G::kChannels];
  const typename G::X* shared;

  // Called by all threads of a block. first, channel: the block's first channel, the thread's.
  __device__ __forceinline__ Weights(const DepthwiseArgs& args, typename G::Shared& block,
                                     int first, int channel)
      : shared(block.weight + (channel - first) * G::kTaps) {
    copy_weights<G::kTaps, G::kChannels, G::kLanes, kDepthwiseThreads>(block.weight, args.weight,
                                                                       args, first, args.turned);
    if constexpr (kKept) {
#pragma unroll
      for (int tap = 0; tap < G::kTaps; ++tap) {
#pragma unroll
        for (int v = 0; v < G::kChannels; ++v) kept[tap][v] = loaded(tap, v);
      }
    }
  }

  __device__ __forceinline__ float loaded(int tap, int v) const {
    return convert<float>(shared[v * G::kTaps + tap]);
  }

  __device__ __forceinline__ float at(int tap, int v) const {
    if constexpr (kKept) {
      return kept[tap][v];
    } else {
      return loaded(tap, v);
    }
  }
};

// sum += one row of the window times one row of pixels.
template <class G, class WeightsOf>
__device__ __forceinline__ void add_row(const float (&pixel)[G::kWindow][G::kChannels],
                                        const WeightsOf& weights, int row,
                                        float (&sum)[G::kColumns][G::kChannels]) {
#pragma unroll
  for (int o = 0; o < G::kColumns; ++o) {
#pragma unroll
    for (int j = 0; j < G::kW; ++j) {
#pragma unroll
      for (int v = 0; v < G::kChannels; ++v) {
        sum[o][v] =
            __fmaf_rn(weights.at(row * G::kW + j, v), pixel[o * G::kStride + j][v], sum[o][v]);
      }
    }
  }
}

template <class G, class StoreOf, class WeightsOf>
__device__ __forceinline__ void convolve_item(const DepthwiseArgs& args, typename G::Shared& shared,
                                              const Item& item, const typename G::RowsOf::At& at,
                                              const WeightsOf& weights) {
  typename G::RowsOf rows(args,
                          {args.x, args.h, args.w, item.sample, item.y * G::kStride - args.top,
                           item.x * G::kStride - args.left, (item.rows - 1) * G::kStride + G::kH},
                          at, shared.rows);
  begin(rows);
  StoreOf store(args, item, at.channel);
  // sum[i] is output row `step - i`.
  float sum[G::kRing][G::kColumns][G::kChannels] = {};
  const int steps = item.rows + G::kRing - 1;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int i = G::kRing - 1; i >= 0; --i) {
#pragma unroll
      for (int o = 0; o < G::kColumns; ++o) {
#pragma unroll
        for (int v = 0; v < G::kChannels; ++v) sum[i][o][v] = i > 0 ? sum[i - 1][o][v] : 0.0f;
      }
    }
#pragma unroll
    for (int d = 0; d < G::kStride; ++d) {
      float pixel[G::kWindow][G::kChannels];
      if (!take(rows, step * G::kStride + d, pixel)) continue;
#pragma unroll
      for (int i = G::kRing - 1; i >= 0; --i) {
        const int row = i * G::kStride + d;
        const bool is_stored = static_cast<uint32_t>(step - i) < static_cast<uint32_t>(item.rows);
        if (row < G::kH && is_stored) add_row<G>(pixel, weights, row, sum[i]);
      }
    }
    if (step >= G::kRing - 1) store.store_row(step - (G::kRing - 1), sum[G::kRing - 1]);
  }
  if constexpr (!G::kPlanes) ptx::copy_async_wait_for_groups<0>();
}

template <class G, class StoreOf, bool kKept>
__device__ __forceinline__ void convolve(const DepthwiseArgs& args) {
  __shared__ typename G::Shared shared;
  const typename G::RowsOf::At at(args);
  const Weights<G, kKept> weights(args, shared, at.first, at.channel);
  for (uint32_t i = at.item; i < args.items; i += at.stride) {
    convolve_item<G, StoreOf>(args, shared, Item::at(args, i, G::kColumns), at, weights);
  }
}

template <int kH, int kW, int kStride, class Epilogue, int kScalars, class Acc, class Out, class X,
          class... In>
struct Kernels {
  static_assert(std::is_same_v<Acc, float>);

  static constexpr int blocks(bool planes, bool pixels) {
    return resident(depthwise_resident(kH, kW, kStride, sizeof(X), planes, pixels));
  }

  template <bool kPlanes, bool kPixels>
  static __device__ __forceinline__ void run(const DepthwiseArgs& args) {
    using G = Geometry<kH, kW, kStride, kPlanes, X>;
    using StoreOf =
        Store<G, kPixels, Epilogue, kScalars, Out, std::index_sequence_for<In...>, In...>;
    constexpr bool kKept = G::kTaps <= 9 || (!kSpilled && !kPixels);
    // Without operands, none varies by pixel.
    if constexpr (!kPixels || sizeof...(In) > 0) convolve<G, StoreOf, kKept>(args);
  }
};

}  // namespace fx_fuser::depthwise

#define FX_FUSER_DEPTHWISE_KERNEL(name, planes, pixels, ...)              \
  extern "C" __global__ void __launch_bounds__(                           \
      fx_fuser::kDepthwiseThreads,                                        \
      fx_fuser::depthwise::Kernels<__VA_ARGS__>::blocks(planes, pixels))  \
      name(const __grid_constant__ fx_fuser::DepthwiseArgs args) {        \
    fx_fuser::depthwise::Kernels<__VA_ARGS__>::run<planes, pixels>(args); \
  }

#define FX_FUSER_DEPTHWISE(...)                                                                \
  FX_FUSER_DEPTHWISE_KERNEL(fx_fuser_depthwise_channels_last, false, false, __VA_ARGS__)       \
  FX_FUSER_DEPTHWISE_KERNEL(fx_fuser_depthwise_channels_last_pixels, false, true, __VA_ARGS__) \
  FX_FUSER_DEPTHWISE_KERNEL(fx_fuser_depthwise_planes, true, false, __VA_ARGS__)               \
  FX_FUSER_DEPTHWISE_KERNEL(fx_fuser_depthwise_planes_pixels, true, true, __VA_ARGS__)
