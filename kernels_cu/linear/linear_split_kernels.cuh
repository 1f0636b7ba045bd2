// The kernels of a split product: its own, with a main loop for the architecture, and those around
// it, which are the same for all.
#pragma once

#include "common/copy_rows.cuh"
#include "linear/linear_split_epilogue.cuh"
#include "linear/linear_split_prepass.cuh"

namespace fx_fuser::linear_split {

// Of a main loop and the arguments of its macro.
template <class Loop, class Epilogue, int kScalars, class Acc, class Out, class X, class... In>
struct Kernels {
  template <bool kNMajor>
  static __device__ __forceinline__ void run(const LinearSplitArgs& args) {
    Loop::template run<kNMajor, Epilogue, kScalars, Acc, Out, X, In...>(args);
  }
  template <bool kNMajor>
  static __device__ __forceinline__ void run_chunk(const LinearSplitArgs& args) {
    ptx::launch_dependents();
    Loop::template run<kNMajor, Partial, 0, float, float, X>(args);
  }
  static __device__ __forceinline__ void run_sum(const LinearSumArgs& args) {
    sum_chunks<Epilogue, kScalars, Out, In...>(args);
  }
  static __device__ __forceinline__ void split_rows(const SplitArgs& args) {
    fx_fuser::split_rows<X>(args);
  }
  static __device__ __forceinline__ void split_columns(const SplitArgs& args) {
    fx_fuser::split_columns<X>(args);
  }
};

}  // namespace fx_fuser::linear_split

// For sm_120 ptxas aims at four to six blocks per SM, and may spill; with three named it does not.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define FX_FUSER_SPLIT_COLUMNS_BOUNDS fx_fuser::kSplitThreads, 3
#else
#define FX_FUSER_SPLIT_COLUMNS_BOUNDS fx_fuser::kSplitThreads
#endif

// Loop, its threads, and Epilogue, scalars, Acc, Out, X, Operands...
#define FX_FUSER_LINEAR_SPLIT_KERNELS(Loop, threads, ...)                                       \
  extern "C" __global__ void __launch_bounds__(threads, 1)                                      \
      fx_fuser_linear_split(const __grid_constant__ fx_fuser::LinearSplitArgs args) {           \
    fx_fuser::linear_split::Kernels<Loop, __VA_ARGS__>::run<false>(args);                       \
  }                                                                                             \
  extern "C" __global__ void __launch_bounds__(threads, 1)                                      \
      fx_fuser_linear_split_n_major(const __grid_constant__ fx_fuser::LinearSplitArgs args) {   \
    fx_fuser::linear_split::Kernels<Loop, __VA_ARGS__>::run<true>(args);                        \
  }                                                                                             \
  extern "C" __global__ void __launch_bounds__(threads, 1)                                      \
      fx_fuser_linear_split_chunk(const __grid_constant__ fx_fuser::LinearSplitArgs args) {     \
    fx_fuser::linear_split::Kernels<Loop, __VA_ARGS__>::run_chunk<false>(args);                 \
  }                                                                                             \
  extern "C" __global__ void __launch_bounds__(threads, 1) fx_fuser_linear_split_chunk_n_major( \
      const __grid_constant__ fx_fuser::LinearSplitArgs args) {                                 \
    fx_fuser::linear_split::Kernels<Loop, __VA_ARGS__>::run_chunk<true>(args);                  \
  }                                                                                             \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kSumThreads)                           \
      fx_fuser_linear_split_sum(const __grid_constant__ fx_fuser::LinearSumArgs args) {         \
    fx_fuser::linear_split::Kernels<Loop, __VA_ARGS__>::run_sum(args);                          \
  }                                                                                             \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kSplitThreads)                         \
      fx_fuser_linear_split_rows(const __grid_constant__ fx_fuser::SplitArgs args) {            \
    fx_fuser::linear_split::Kernels<Loop, __VA_ARGS__>::split_rows(args);                       \
  }                                                                                             \
  extern "C" __global__ void __launch_bounds__(FX_FUSER_SPLIT_COLUMNS_BOUNDS)                   \
      fx_fuser_linear_split_columns(const __grid_constant__ fx_fuser::SplitArgs args) {         \
    fx_fuser::linear_split::Kernels<Loop, __VA_ARGS__>::split_columns(args);                    \
  }                                                                                             \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kCopyThreads)                          \
      fx_fuser_copy_rows(const __grid_constant__ fx_fuser::CopyRowsArgs args) {                 \
    fx_fuser::copy_rows(args);                                                                  \
  }
