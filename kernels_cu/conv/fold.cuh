// Folds BatchNorms (evaluation) into the weights of the convolutions before them, several layers
// per launch:
//
//   scale = gamma / sqrt(variance + eps)
//   folded = weight * scale                        in channels_last, for any layout of the weight
//   shift = (bias - mean) * scale + beta
//
// in Acc, each result rounded once. A thread computes kFoldWidth neighbouring elements of one
// output channel, which are neighbouring input channels, or one element if C is not a multiple of
// that.
#pragma once

#include "common/convert.cuh"
#include "common/epilogue_math.cuh"
#include "conv/fold_args.h"

namespace fx_fuser {

template <class Acc>
__device__ __forceinline__ Acc number_of(const FoldVector& vector, uint32_t channel, Acc absent) {
  if (vector.data == nullptr) return absent;
  const int64_t at = channel * vector.stride;
  switch (vector.type) {
    case VectorType::kFloat:
      return convert<Acc>(static_cast<const float*>(vector.data)[at]);
    case VectorType::kHalf:
      return convert<Acc>(static_cast<const __half*>(vector.data)[at]);
    default:
      return convert<Acc>(static_cast<const __nv_bfloat16*>(vector.data)[at]);
  }
}

template <class Acc>
__device__ __forceinline__ Acc scale_of(const FoldSite& site, uint32_t channel) {
  const Acc variance = number_of(site.variance, channel, Acc(0));
  const Acc root = math::rsqrt(math::add(variance, Acc(site.eps)));
  return math::mul(root, number_of(site.gamma, channel, Acc(1)));
}

template <class Acc>
__device__ __forceinline__ Acc shift_of(const FoldSite& site, uint32_t channel, Acc scale) {
  const Acc bias = number_of(site.bias, channel, Acc(0));
  const Acc centred = math::sub(bias, number_of(site.mean, channel, Acc(0)));
  return math::fma(centred, scale, number_of(site.beta, channel, Acc(0)));
}

// unit: index over all output channels of the layer, which have site.units.size each.
template <int kWidth, class Acc, class Out, class In>
__device__ __forceinline__ void fold_unit(const FoldSite& site, uint32_t unit) {
  const uint32_t channel = divide(unit, site.units);
  const uint32_t nth = unit - channel * site.units.size;  // of the output channel
  const Acc scale = scale_of<Acc>(site, channel);
  if (nth == 0) {
    static_cast<Out*>(site.shift)[channel] = convert<Out>(shift_of(site, channel, scale));
  }
  const uint32_t place = divide(nth, site.groups);
  const uint32_t row = divide(place, site.columns);
  const uint32_t first = (nth - place * site.groups.size) * kWidth;  // input channel
  const int64_t at = channel * site.strides[0] + first * site.strides[1] + row * site.strides[2] +
                     (place - row * site.columns.size) * site.strides[3];
  const In* weight = static_cast<const In*>(site.weight) + at;
  Vec<In, kWidth> raw;
  if (kWidth > 1 && site.reads_vectors) {
    raw = *reinterpret_cast<const Vec<In, kWidth>*>(weight);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) raw.element[i] = weight[i * site.strides[1]];
  }
  Vec<Out, kWidth> folded;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    folded.element[i] = convert<Out>(math::mul(convert<Acc>(raw.element[i]), scale));
  }
  reinterpret_cast<Vec<Out, kWidth>*>(site.folded)[unit] = folded;
}

template <class Acc, class Out, class In>
__device__ __forceinline__ void fold(const FoldArgs& args) {
  int nth = 0;
  while (nth + 1 < args.sites && args.site[nth + 1].first_block <= blockIdx.x) ++nth;
  const FoldSite& site = args.site[nth];
  const uint32_t unit = (blockIdx.x - site.first_block) * kFoldThreads + threadIdx.x;
  if (unit >= site.all_units) return;
  if (site.is_wide) {
    fold_unit<kFoldWidth, Acc, Out, In>(site, unit);
  } else {
    fold_unit<1, Acc, Out, In>(site, unit);
  }
}

}  // namespace fx_fuser

// There is no epilogue: its macro arguments are unused.
#define FX_FUSER_FOLD(epilogue, scalars, Acc, Out, In)                 \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kFoldThreads) \
      fx_fuser_fold(const __grid_constant__ fx_fuser::FoldArgs args) { \
    static_assert(scalars == 0);                                       \
    fx_fuser::fold<Acc, Out, In>(args);                                \
  }
