// Backward of conv_direct_sm90.cuh if the epilogue is linear in the convolution's BatchNorm (or in
// the convolution itself): computes the sums dbeta and dgamma, the weight's gradient and the
// input's from x and dy. Neither the convolution nor its gradient is stored: each kernel recomputes
// the convolution, and from it and dy the gradient dc:
//
//   dz = of_dy dy          of_dy: the epilogue's derivative, one number per channel
//   dc = gamma rstd (dz - mean(dz) - x̂ mean(dz x̂))        in training, else gamma rstd dz
//   dweight[o, k] = Σ dc[o, p] X[p, k]         X: the pixels of position p's taps
//   dx[p + tap] += Σ dc[o, p] weight[o, tap]
//
// dc is in the registers of a product's sums, in the layout of another product's first operand:
// channels by positions for the weight's gradient, positions by channels for the input's. In fp32
// it is split into halves, with one scale per row, as x and the weight are. In 16 bits it is
// rounded once to x's type: in bf16 unscaled, in fp16, whose range is narrow, with one scale per
// row. So a gradient beyond fp16's range loses nothing until it is stored.
//
// The order of sums over positions is fixed: 64 in a product's sums, a warpgroup's units in fp32
// (in double for dbeta and dgamma), the splits in double.
//
// Each kernel has one loading warpgroup (load_units) and two or three product warpgroups; that of
// the input's gradient also has a gathering warpgroup, which adds up contributions and stores dx.
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
