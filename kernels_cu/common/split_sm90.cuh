// fp32 as two fp16: v * scale = hi + lo. `scale` is a power of two that brings the largest value of
// the group that shares it to [2^14, 2^15). The error is at most 2^-22 of v, or 2^-39 of the
// largest.
//
// 16-bit values have no lo: the part that fp16 cannot hold is less than 2^-39 of the largest.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fx_fuser {

template <class X>
constexpr bool kHasLo = std::is_same_v<X, float>;

// Factors for a group, from its largest magnitude. Below 2^(-112 - head_room) the exponent is
// clamped so that both factors stay normal numbers; the split of such values is exact. An infinity
// gives scale 2^-114, which keeps all finite values finite.
struct Scale {
  float scale;
  float unscale;  // 1 / scale

  // With head-room `largest` maps to [2^(14 - head_room), 2^(15 - head_room)): other values may be
  // nearly 2^(head_room + 1) times larger, and the error is up to 2^(head_room - 39) of `largest`.
  static __device__ __forceinline__ Scale of(float largest, int head_room = 0) {
    constexpr uint32_t kExponent = 0x7F800000;
    // Biased exponents add up to 127 + 127; scale * 2^(exponent - 127) is 2^(14 - head_room).
    const uint32_t shift = static_cast<uint32_t>(14 - head_room) << 23;
    const uint32_t exponent = max(__float_as_uint(largest) & kExponent, shift + (1u << 23));
    return {__uint_as_float((254u << 23) + shift - exponent), __uint_as_float(exponent - shift)};
  }

  static __device__ __forceinline__ float unscale_of(float scale) {
    return __uint_as_float((254u << 23) - __float_as_uint(scale));
  }

  // From a row's unscale factor: a power of two that has the same scale as the row's largest value.
  static __device__ __forceinline__ float largest_of(float unscale) { return unscale * 0x1p14f; }
};

// sum * unscale * other, the smaller factor first: the intermediate leaves float's range only if
// the result does.
__device__ __forceinline__ float undo_both(float sum, float unscale, float other) {
  return sum * fminf(unscale, other) * fmaxf(unscale, other);
}

__device__ __forceinline__ float largest_of(const float4& v) {
  return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

struct SplitPair {
  uint32_t hi;  // two fp16 each
  uint32_t lo;
};

// The lo of an infinity or a NaN is a NaN. That needs no guard: the product is then not finite and
// is repaired. It needs the repair anyway: hi * inf + lo * inf is a NaN for most finite hi + lo.
__device__ __forceinline__ SplitPair split(float a, float b) {
  const __half2 hi = __floats2half2_rn(a, b);
  const float2 rounded = __half22float2(hi);
  const __half2 lo = __floats2half2_rn(a - rounded.x, b - rounded.y);
  return {reinterpret_cast<const uint32_t&>(hi), reinterpret_cast<const uint32_t&>(lo)};
}

}  // namespace fx_fuser
