// The part of CUDA's cuda_fp16.h and cuda_bf16.h that fx_fuser's kernels use.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

namespace emulator {

// Drops the last bits of a magnitude, rounding to the nearest, ties to even.
inline uint32_t rounded_off(uint32_t bits, int dropped) {
  const uint32_t kept = bits >> dropped;
  const uint32_t rest = bits & ((1u << dropped) - 1);
  const uint32_t half = 1u << (dropped - 1);
  return kept + (rest > half || (rest == half && kept % 2 == 1) ? 1 : 0);
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline uint16_t to_half(float value) {
  const uint32_t sign = bits_of(value) >> 16 & 0x8000;
  const uint32_t magnitude = bits_of(value) & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return 0x7FFF;
  if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7C00);
  if (magnitude < 0x38800000) {  // subnormal
    const float scaled = std::nearbyint(std::fabs(value) * 0x1p24f);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(scaled));
  }
  return static_cast<uint16_t>(sign | rounded_off(magnitude - 0x38000000, 13));
}

inline uint16_t to_bfloat16(float value) {
  const uint32_t sign = bits_of(value) >> 16 & 0x8000;
  const uint32_t magnitude = bits_of(value) & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return 0x7FFF;
  return static_cast<uint16_t>(sign | rounded_off(magnitude, 16));
}

// Exact.
inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7FFF) << 13;
  uint32_t bits = sign | (magnitude + (magnitude >= 0x0F800000 ? 0x70000000 : 0x38000000));
  float value;
  if (magnitude < 0x00800000) {  // subnormal
    memcpy(&value, &sign, 4);
    const float least = static_cast<float>(half & 0x7FFF) * 0x1p-24f;
    return sign != 0 ? -least : least;
  }
  memcpy(&value, &bits, 4);
  return value;
}

inline float bfloat16_to_float(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

}  // namespace emulator

inline float __half2float(__half value) { return emulator::half_to_float(value.bits); }
inline __half __float2half_rn(float value) { return {emulator::to_half(value)}; }
inline float __bfloat162float(__nv_bfloat16 value) {
  return emulator::bfloat16_to_float(value.bits);
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return {emulator::to_bfloat16(value)}; }
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
inline __half2 __habs2(__half2 both) {
  return {{static_cast<uint16_t>(both.x.bits & 0x7FFF)},
          {static_cast<uint16_t>(both.y.bits & 0x7FFF)}};
}
inline unsigned __hlt2_mask(__half2 a, __half2 b) {
  const unsigned x = __half2float(a.x) < __half2float(b.x) ? 0xFFFF : 0;
  return x | (__half2float(a.y) < __half2float(b.y) ? 0xFFFF0000 : 0);
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
