// Conversions between tensor element types and the type that arithmetic is done in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fx_fuser {

template <class T>
inline constexpr bool kIs16BitFloat = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

// Half types convert through float in both directions, as PyTorch's do. From double this rounds
// twice: bit-equality with eager is worth more than the last half ulp.
template <class To, class From>
__device__ __forceinline__ To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_same_v<From, __half>) {
    return static_cast<To>(__half2float(value));
  } else if constexpr (std::is_same_v<From, __nv_bfloat16>) {
    return static_cast<To>(__bfloat162float(value));
  } else if constexpr (std::is_same_v<To, __half>) {
    return __float2half_rn(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(value));
  } else if constexpr (std::is_same_v<To, bool>) {
    return value != From{0};
  } else {
    return static_cast<To>(value);
  }
}

template <class T, int kWidth>
struct alignas(kWidth * sizeof(T) < 16 ? kWidth * sizeof(T) : 16) Vec {
  T element[kWidth];
};

// Converts two floats to 16-bit types by one instruction.
template <class To>
__device__ __forceinline__ Vec<To, 2> convert_pair(float first, float second) {
  if constexpr (std::is_same_v<To, __half>) {
    const __half2 both = __floats2half2_rn(first, second);
    return reinterpret_cast<const Vec<To, 2>&>(both);
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
    return reinterpret_cast<const Vec<To, 2>&>(both);
  } else {
    return {convert<To>(first), convert<To>(second)};
  }
}

}  // namespace fx_fuser
