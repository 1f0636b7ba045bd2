// BatchNorm (evaluation) folded into the weights before it, several layers a launch:
//
//   scale = gamma / sqrt(variance + eps)
//   folded = weight * scale                        channels_last, whatever the weight's layout
//   shift = (bias - mean) * scale + beta
//
// in Acc, each result rounded once. A block takes one output channel of one layer.
#pragma once

#include "common/convert.cuh"
#include "common/epilogue_math.cuh"
#include "conv/fold_args.h"

namespace fx_fuser {

template <class Acc>
__device__ __forceinline__ Acc number_of(const FoldVector& vector, uint32_t channel, Acc absent) {
  if (vector.data == nullptr) return absent;
  switch (vector.type) {
    case VectorType::kFloat:
      return convert<Acc>(static_cast<const float*>(vector.data)[channel]);
    case VectorType::kHalf:
      return convert<Acc>(static_cast<const __half*>(vector.data)[channel]);
    default:
      return convert<Acc>(static_cast<const __nv_bfloat16*>(vector.data)[channel]);
  }
}

template <class Acc, class Out, class In>
__device__ __forceinline__ void fold_channel(const FoldSite& site, uint32_t channel) {
  const Acc variance = number_of(site.variance, channel, Acc(0));
  const Acc root = math::rsqrt(math::add(variance, Acc(site.eps)));
  const Acc scale = math::mul(root, number_of(site.gamma, channel, Acc(1)));
  if (threadIdx.x == 0) {
    const Acc bias = number_of(site.bias, channel, Acc(0));
    const Acc centred = math::sub(bias, number_of(site.mean, channel, Acc(0)));
    const Acc beta = number_of(site.beta, channel, Acc(0));
    static_cast<Out*>(site.shift)[channel] = convert<Out>(math::fma(centred, scale, beta));
  }
  const In* weight = static_cast<const In*>(site.weight) + channel * site.strides[0];
  Out* folded = static_cast<Out*>(site.folded) + static_cast<int64_t>(channel) * site.elements;
  for (uint32_t i = threadIdx.x; i < site.elements; i += kFoldThreads) {
    const uint32_t place = divide(i, site.channels);
    const uint32_t row = divide(place, site.columns);
    const uint32_t in_channel = i - place * site.channels.size;
    const uint32_t column = place - row * site.columns.size;
    const int64_t at =
        in_channel * site.strides[1] + row * site.strides[2] + column * site.strides[3];
    folded[i] = convert<Out>(math::mul(convert<Acc>(weight[at]), scale));
  }
}

template <class Acc, class Out, class In>
__device__ __forceinline__ void fold(const FoldArgs& args) {
  int nth = 0;
  while (nth + 1 < args.sites && args.site[nth + 1].first_block <= blockIdx.x) ++nth;
  const FoldSite& site = args.site[nth];
  fold_channel<Acc, Out, In>(site, blockIdx.x - site.first_block);
}

}  // namespace fx_fuser

// The epilogue is none, and its numbers are 0.
#define FX_FUSER_FOLD(epilogue, scalars, Acc, Out, In)                 \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kFoldThreads) \
      fx_fuser_fold(const __grid_constant__ fx_fuser::FoldArgs args) { \
    static_assert(scalars == 0);                                       \
    fx_fuser::fold<Acc, Out, In>(args);                                \
  }
