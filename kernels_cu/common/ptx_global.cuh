// Loads and stores of global memory by hand, one function an instruction, for kernels in which the
// compiler would make worse ones.
#pragma once

#include <cstdint>

namespace fx_fuser::ptx {

// ---- loads of what no kernel writes meanwhile ---------------------------------------------------

__device__ __forceinline__ float load_global(const float* from) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}

__device__ __forceinline__ uint32_t load_global(const uint16_t* from) {
  uint32_t value;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}

// *from if place < limit, else 0. By hand, so that a channel has one address, and its loads differ
// by a constant: nvcc makes an address a load, in registers of an earlier one, and ptxas then waits
// for the data of that.
__device__ __forceinline__ float load_global_below(const float* from, uint32_t place,
                                                   uint32_t limit) {
  float value;
  asm volatile(
      "{\n"
      ".reg .pred below;\n"
      "setp.lt.u32 below, %2, %3;\n"
      "mov.f32 %0, 0f00000000;\n"
      "@below ld.global.nc.f32 %0, [%1];\n"
      "}\n"
      : "=f"(value)
      : "l"(from), "r"(place), "r"(limit));
  return value;
}

__device__ __forceinline__ uint32_t load_global_below(const uint16_t* from, uint32_t place,
                                                      uint32_t limit) {
  uint32_t value;
  asm volatile(
      "{\n"
      ".reg .pred below;\n"
      "setp.lt.u32 below, %2, %3;\n"
      "mov.b32 %0, 0;\n"
      "@below ld.global.nc.u16 %0, [%1];\n"
      "}\n"
      : "=r"(value)
      : "l"(from), "r"(place), "r"(limit));
  return value;
}

// *from if `is_there`, else 0; without a branch.
__device__ __forceinline__ float load_global_if(bool is_there, const float* from) {
  float value;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.b32 there, %2, 0;\n"
      "mov.f32 %0, 0f00000000;\n"
      "@there ld.global.nc.f32 %0, [%1];\n"
      "}\n"
      : "=f"(value)
      : "l"(from), "r"(static_cast<int>(is_there)));
  return value;
}

__device__ __forceinline__ float2 load_global_if(bool is_there, const float2* from) {
  float2 value;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.b32 there, %3, 0;\n"
      "mov.f32 %0, 0f00000000;\n"
      "mov.f32 %1, 0f00000000;\n"
      "@there ld.global.nc.v2.f32 {%0, %1}, [%2];\n"
      "}\n"
      : "=f"(value.x), "=f"(value.y)
      : "l"(from), "r"(static_cast<int>(is_there)));
  return value;
}

__device__ __forceinline__ uint32_t load_global_if(bool is_there, const uint16_t* from) {
  uint32_t value;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.b32 there, %2, 0;\n"
      "mov.b32 %0, 0;\n"
      "@there ld.global.nc.u16 %0, [%1];\n"
      "}\n"
      : "=r"(value)
      : "l"(from), "r"(static_cast<int>(is_there)));
  return value;
}

__device__ __forceinline__ uint32_t load_global_if(bool is_there, const uint32_t* from) {
  uint32_t value;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.b32 there, %2, 0;\n"
      "mov.b32 %0, 0;\n"
      "@there ld.global.nc.b32 %0, [%1];\n"
      "}\n"
      : "=r"(value)
      : "l"(from), "r"(static_cast<int>(is_there)));
  return value;
}

// ---- stores -------------------------------------------------------------------------------------

// *to = value if `is_wanted`; without a branch.
__device__ __forceinline__ void store_global_if(bool is_wanted, float* to, float value) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %2, 0;\n"
      "@wanted st.global.f32 [%0], %1;\n"
      "}\n" ::"l"(to),
      "f"(value), "r"(static_cast<int>(is_wanted))
      : "memory");
}

template <class T>
__device__ __forceinline__ void store_global_if(bool is_wanted, T* to, T value) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %2, 0;\n"
      "@wanted st.global.b16 [%0], %1;\n"
      "}\n" ::"l"(to),
      "h"(reinterpret_cast<const uint16_t&>(value)), "r"(static_cast<int>(is_wanted))
      : "memory");
}

// By hand: ptxas puts a branch around each of many such stores.
__device__ __forceinline__ void store_global_if(bool condition, void* to, const uint4& value) {
  asm volatile(
      "{\n"
      ".reg .pred condition;\n"
      "setp.ne.b32 condition, %5, 0;\n"
      "@condition st.global.v4.b32 [%0], {%1, %2, %3, %4};\n"
      "}\n" ::"l"(to),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(static_cast<int>(condition))
      : "memory");
}

}  // namespace fx_fuser::ptx
