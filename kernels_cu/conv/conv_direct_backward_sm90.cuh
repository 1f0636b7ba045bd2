// The backward of conv_direct_sm90.cuh, where the epilogue is linear in the BatchNorm of the
// convolution (or in the convolution itself): the sums that are dbeta and dgamma, the weight's
// gradient and the input's, from x and dy. Neither the convolution nor its gradient is in memory:
// each kernel makes the convolution again, and from it and dy the gradient dc:
//
//   dz = of_dy dy          of_dy: of the epilogue, one number a channel
//   dc = gamma rstd (dz - mean(dz) - x̂ mean(dz x̂))        in training, else gamma rstd dz
//   dweight[o, k] = Σ dc[o, p] X[p, k]         X: for each position p its taps' pixels
//   dx[p + tap] += Σ dc[o, p] weight[o, tap]
//
// dc is a product's sums in registers, which have the layout that another product's first operand
// has: channels by positions for the weight's gradient, positions by channels for the input's.
// There it is split in halves, with a scale a row, as x and the weight are. In 16 bits it is
// rounded to x's type, once: in bf16 as it is, in fp16, whose range is narrow, with a scale a row,
// too. So a gradient too small or too large for fp16 costs nothing before it is stored.
//
// Sums over positions are in fixed order: of 64 in a product's sums, of a warpgroup's units in fp32
// (those of dbeta and dgamma in double), of all in double.
#pragma once

#include "conv/conv_direct_input_sm90.cuh"
#include "conv/conv_direct_reduce.cuh"
#include "conv/conv_direct_weight_sm90.cuh"

namespace fx_fuser::conv_direct {

template <class Epilogue, int kScalars, class Acc, class Dy, class X, class... In>
struct Backward {
  static_assert(std::is_same_v<Acc, float> && std::is_same_v<Dy, X>);
  static_assert(std::is_same_v<X, float> || kIs16BitFloat<X>);

  template <bool kSums, bool kWeight>
  static __device__ __forceinline__ void accumulate(const ConvBackwardArgs& args) {
    run_accumulate<X, kSums, kWeight, Epilogue, kScalars, In...>(args);
  }
  static __device__ __forceinline__ void input(const ConvBackwardArgs& args) {
    run_input<X, Epilogue, kScalars, In...>(args);
  }
};

}  // namespace fx_fuser::conv_direct

#define FX_FUSER_CONV_DIRECT_ACCUMULATE(name, workers, sums, weight, ...)                     \
  extern "C" __global__ void __launch_bounds__(fx_fuser::conv_accumulate_threads(workers), 1) \
      fx_fuser_conv_direct_##name(const __grid_constant__ fx_fuser::ConvBackwardArgs args) {  \
    fx_fuser::conv_direct::Backward<__VA_ARGS__>::accumulate<sums, weight>(args);             \
  }
#define FX_FUSER_CONV_DIRECT_REDUCE(name, T)                                           \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kConvReduceThreads)           \
      fx_fuser_conv_direct_##name(const __grid_constant__ fx_fuser::ReduceArgs args) { \
    fx_fuser::conv_direct::reduce_splits<T>(args);                                     \
  }

// FX_FUSER_CONV_DIRECT_BACKWARD(Epilogue, scalars, Acc, type of dy, of x, Operands...)
#define FX_FUSER_CONV_DIRECT_BACKWARD(...)                                                        \
  FX_FUSER_CONV_DIRECT_ACCUMULATE(sums, fx_fuser::kConvSumWorkers, true, false, __VA_ARGS__)      \
  FX_FUSER_CONV_DIRECT_ACCUMULATE(weight, fx_fuser::kConvWeightWorkers, false, true, __VA_ARGS__) \
  FX_FUSER_CONV_DIRECT_ACCUMULATE(sums_and_weight, fx_fuser::kConvWeightWorkers, true, true,      \
                                  __VA_ARGS__)                                                    \
  FX_FUSER_CONV_DIRECT_REDUCE(reduce_sums, double)                                                \
  FX_FUSER_CONV_DIRECT_REDUCE(reduce_weight, float)                                               \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kConvInputThreads, 1)                    \
      fx_fuser_conv_direct_input(const __grid_constant__ fx_fuser::ConvBackwardArgs args) {       \
    fx_fuser::conv_direct::Backward<__VA_ARGS__>::input(args);                                    \
  }
