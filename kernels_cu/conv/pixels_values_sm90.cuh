// The 1 x 1 convolution of pixels_sm90.cuh: pairs of rounded values, and a channel's statistics of
// those that a thread has.
#pragma once

#include "common/convert.cuh"
#include "common/moments.cuh"
#include "conv/pixels_args.h"

namespace fx_fuser::pixels {

template <class T>
__device__ __forceinline__ float2 unpacked(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000)};
  }
}

template <class T>
__device__ __forceinline__ uint32_t packed(float first, float second) {
  const Vec<T, 2> pair = convert_pair<T>(first, second);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Of how many of a thread's pixels 8i + 2 (lane % 4) + t lie below `limit`.
template <int kPixels>
__device__ __forceinline__ int pixels_below(int limit) {
  if (limit >= kPixels) return kPixels / 4;
  const int rest = limit % 8 - static_cast<int>(threadIdx.x % 4) * 2;
  return limit / 8 * 2 + max(0, min(rest, 2));
}

// A channel's moments so far, but for the count, which all channels of a thread share.
struct ChannelMoments {
  float mean = 0;
  float m2 = 0;
};

// The median, so that no single outlier is the pivot of others.
__device__ __forceinline__ float median(float a, float b, float c) {
  return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c));
}

// Sums of a channel's values about one of them.
template <class T>
struct Deviations {
  float pivot;
  float sum[2] = {0, 0};
  float squares[2] = {0, 0};

  explicit __device__ __forceinline__ Deviations(float about) : pivot(about) {}

  // The first `counted` of a pair.
  __device__ __forceinline__ void add(uint32_t pair, int counted) {
    const float2 value = unpacked<T>(pair);
    const float deviation[2] = {counted > 0 ? value.x - pivot : 0.0f,
                                counted > 1 ? value.y - pivot : 0.0f};
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      sum[t] += deviation[t];
      squares[t] = fmaf(deviation[t], deviation[t], squares[t]);
    }
  }

  __device__ __forceinline__ Moments<float> moments(float count) const {
    const float whole = sum[0] + sum[1];
    const float shift = whole / count;
    const float m2 = squares[0] + squares[1] - whole * shift;
    return {count, pivot + shift, m2 < 0.0f ? 0.0f : m2};
  }
};

__device__ __forceinline__ Moments<float> from_lane(const Moments<float>& mine, int distance) {
  return {__shfl_xor_sync(~0u, mine.count, distance), __shfl_xor_sync(~0u, mine.mean, distance),
          __shfl_xor_sync(~0u, mine.m2, distance)};
}

// Both lanes of a pair come to the same bits.
__device__ __forceinline__ Moments<float> merged_in_order(const Moments<float>& mine,
                                                          const Moments<float>& other,
                                                          bool is_second) {
  Moments<float> first{is_second ? other.count : mine.count, is_second ? other.mean : mine.mean,
                       is_second ? other.m2 : mine.m2};
  first.merge({is_second ? mine.count : other.count, is_second ? mine.mean : other.mean,
               is_second ? mine.m2 : other.m2});
  return first;
}

}  // namespace fx_fuser::pixels
