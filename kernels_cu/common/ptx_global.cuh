// Global loads and stores in inline assembly, one function per instruction, for kernels where the
// compiler generates worse code.
#pragma once

#include <cstdint>

namespace fx_fuser::ptx {

// ---- read-only loads (.nc) ----------------------------------------------------------------------

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

// A predicated load of one register: the value if `test` sets the predicate, else `zero`.
#define FX_FUSER_LOAD_WHERE(Value, function, test, zero, type, constraint, ...) \
  __device__ __forceinline__ Value function {                                   \
    Value value;                                                                \
    asm volatile(                                                               \
        "{\n"                                                                   \
        ".reg .pred there;\n" test "mov." zero                                  \
        ";\n"                                                                   \
        "@there ld.global.nc." type                                             \
        " %0, [%1];\n"                                                          \
        "}\n"                                                                   \
        : constraint(value)                                                     \
        : "l"(from), __VA_ARGS__);                                              \
    return value;                                                               \
  }

// *from if place < limit, else 0. Inline assembly keeps one address per channel, whose loads differ
// by a constant offset. nvcc would compute an address per load, in registers that an earlier load
// still writes, and ptxas would then wait for that load.
#define FX_FUSER_LOAD_BELOW(Value, InMemory, zero, type, constraint)                  \
  FX_FUSER_LOAD_WHERE(                                                                \
      Value, load_global_below(const InMemory* from, uint32_t place, uint32_t limit), \
      "setp.lt.u32 there, %2, %3;\n", zero, type, constraint, "r"(place), "r"(limit))
FX_FUSER_LOAD_BELOW(float, float, "f32 %0, 0f00000000", "f32", "=f")
FX_FUSER_LOAD_BELOW(uint32_t, uint16_t, "b32 %0, 0", "u16", "=r")
#undef FX_FUSER_LOAD_BELOW

// *from if `is_there`, else 0.
#define FX_FUSER_LOAD_IF(Value, InMemory, zero, type, constraint)                 \
  FX_FUSER_LOAD_WHERE(Value, load_global_if(bool is_there, const InMemory* from), \
                      "setp.ne.b32 there, %2, 0;\n", zero, type, constraint,      \
                      "r"(static_cast<int>(is_there)))
FX_FUSER_LOAD_IF(float, float, "f32 %0, 0f00000000", "f32", "=f")
FX_FUSER_LOAD_IF(uint32_t, uint16_t, "b32 %0, 0", "u16", "=r")
FX_FUSER_LOAD_IF(uint32_t, uint32_t, "b32 %0, 0", "b32", "=r")
#undef FX_FUSER_LOAD_IF
#undef FX_FUSER_LOAD_WHERE

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

// ---- stores -------------------------------------------------------------------------------------

// *to = value if `is_wanted`; predicated, no branch.
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
  static_assert(sizeof(T) == 2);
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %2, 0;\n"
      "@wanted st.global.b16 [%0], %1;\n"
      "}\n" ::"l"(to),
      "h"(reinterpret_cast<const uint16_t&>(value)), "r"(static_cast<int>(is_wanted))
      : "memory");
}

// From C++, ptxas puts a branch around each of many such stores.
__device__ __forceinline__ void store_global_if(bool is_wanted, void* to, const uint4& value) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %5, 0;\n"
      "@wanted st.global.v4.b32 [%0], {%1, %2, %3, %4};\n"
      "}\n" ::"l"(to),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(static_cast<int>(is_wanted))
      : "memory");
}

}  // namespace fx_fuser::ptx
