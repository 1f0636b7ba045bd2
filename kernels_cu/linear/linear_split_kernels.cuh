// The kernels of the split product, for a given main loop: those with an epilogue, and those that
// are the same for every epilogue. The latter take as long to compile, so they are a translation
// unit of their own, compiled once.
#pragma once

#include "common/copy_rows.cuh"
#include "linear/linear_split_epilogue.cuh"
#include "linear/linear_split_prepass.cuh"

namespace fx_fuser::linear_split {

// The kernels' bodies, for a main loop and the arguments of its macro.
template <class Loop, class Epilogue, int kScalars, class Acc, class Out, class X, class... In>
struct Kernels {
  template <bool kNMajor>
  static __device__ __forceinline__ void run(const LinearSplitArgs& args) {
    Loop::template run<kNMajor, Epilogue, kScalars, Acc, Out, X, In...>(args);
  }
  static __device__ __forceinline__ void run_sum(const LinearSumArgs& args) {
    sum_chunks<Epilogue, kScalars, Out, In...>(args);
  }
};

// Partial sums of one chunk of k, for sum_chunks.
template <class Loop, class X, bool kNMajor>
__device__ __forceinline__ void run_chunk(const LinearSplitArgs& args) {
  ptx::launch_dependents();
  Loop::template run<kNMajor, Partial, 0, float, float, X>(args);
}

}  // namespace fx_fuser::linear_split

// For sm_120 ptxas aims at four to six blocks per SM and may spill; with a minimum of three it does
// not.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define FX_FUSER_SPLIT_COLUMNS_BOUNDS fx_fuser::kSplitThreads, 3
#else
#define FX_FUSER_SPLIT_COLUMNS_BOUNDS fx_fuser::kSplitThreads
#endif

// Loop, its threads, and Epilogue, scalars, Acc, Out, X, Operands...
#define FX_FUSER_LINEAR_SPLIT_KERNELS(Loop, threads, ...)                                     \
  extern "C" __global__ void __launch_bounds__(threads, 1)                                    \
      fx_fuser_linear_split(const __grid_constant__ fx_fuser::LinearSplitArgs args) {         \
    fx_fuser::linear_split::Kernels<Loop, __VA_ARGS__>::run<false>(args);                     \
  }                                                                                           \
  extern "C" __global__ void __launch_bounds__(threads, 1)                                    \
      fx_fuser_linear_split_n_major(const __grid_constant__ fx_fuser::LinearSplitArgs args) { \
    fx_fuser::linear_split::Kernels<Loop, __VA_ARGS__>::run<true>(args);                      \
  }                                                                                           \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kSumThreads)                         \
      fx_fuser_linear_split_sum(const __grid_constant__ fx_fuser::LinearSumArgs args) {       \
    fx_fuser::linear_split::Kernels<Loop, __VA_ARGS__>::run_sum(args);                        \
  }

// Loop, its threads, and X.
#define FX_FUSER_LINEAR_SPLIT_COMMON_KERNELS(Loop, threads, X)                                  \
  extern "C" __global__ void __launch_bounds__(threads, 1)                                      \
      fx_fuser_linear_split_chunk(const __grid_constant__ fx_fuser::LinearSplitArgs args) {     \
    fx_fuser::linear_split::run_chunk<Loop, X, false>(args);                                    \
  }                                                                                             \
  extern "C" __global__ void __launch_bounds__(threads, 1) fx_fuser_linear_split_chunk_n_major( \
      const __grid_constant__ fx_fuser::LinearSplitArgs args) {                                 \
    fx_fuser::linear_split::run_chunk<Loop, X, true>(args);                                     \
  }                                                                                             \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kSplitThreads)                         \
      fx_fuser_linear_split_rows(const __grid_constant__ fx_fuser::SplitArgs args) {            \
    fx_fuser::split_rows<X>(args);                                                              \
  }                                                                                             \
  extern "C" __global__ void __launch_bounds__(FX_FUSER_SPLIT_COLUMNS_BOUNDS)                   \
      fx_fuser_linear_split_columns(const __grid_constant__ fx_fuser::SplitArgs args) {         \
    fx_fuser::split_columns<X>(args);                                                           \
  }                                                                                             \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kCopyThreads)                          \
      fx_fuser_copy_rows(const __grid_constant__ fx_fuser::CopyRowsArgs args) {                 \
    fx_fuser::copy_rows(args);                                                                  \
  }
