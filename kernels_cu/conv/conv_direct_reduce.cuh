// The direct convolution's backward: adds up the partial sums of its splits in a fixed order.
#pragma once

#include "conv/conv_direct_gradients_sm90.cuh"

namespace fx_fuser::conv_direct {

// to[i] = Σ from[split, i]. A lane has one value, a warp every kWarps-th split.
template <class T>
__device__ __forceinline__ void reduce_splits(const ReduceArgs& args) {
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();
  constexpr int kWarps = kConvReduceThreads / 32;
  __shared__ double of_warp[kWarps][kConvReduceValues];
  const auto warp = static_cast<int>(threadIdx.x / 32);
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const int64_t value = static_cast<int64_t>(blockIdx.x) * kConvReduceValues + lane;
  double sum = 0;
  if (value < args.values) {
    const T* from = static_cast<const T*>(args.from) + value;
#pragma unroll 4
    for (int64_t split = warp; split < args.splits; split += kWarps) {
      sum += static_cast<double>(from[split * args.values]);
    }
  }
  of_warp[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || value >= args.values) return;
  double all = 0;
  for (int i = 0; i < kWarps; ++i) all += of_warp[i][lane];
  float* to = value < args.first ? args.to + value : args.to_others + (value - args.first);
  *to = static_cast<float>(all);
  if (args.to_scaled == nullptr || value >= args.first) return;
  if (args.variance != nullptr) {
    all /= sqrt(static_cast<double>(args.variance[value]) + static_cast<double>(args.eps));
  }
  args.to_scaled[value] = static_cast<float>(
      args.gamma != nullptr ? all * static_cast<double>(args.gamma[value]) : all);
}

}  // namespace fx_fuser::conv_direct
