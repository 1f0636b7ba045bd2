// The keywords and functions of CUDA C++ that fx_fuser's kernels use without an include. Included
// ahead of a translation unit, whose __shared__ variables tests/emulator/__init__.py then rewrites
// to be per block.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "machine.h"

#define __CUDACC__
#define __host__
#define __device__
#define __global__ __attribute__((visibility("default")))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

#define threadIdx (emulator::self->thread)
#define blockIdx (emulator::self->block)
#define blockDim (emulator::self->threads)
#define gridDim (emulator::self->blocks)

namespace emulator {

template <class Args>
void call(void (*kernel)(Args), const void* args) {
  kernel(*static_cast<const Args*>(args));
}

}  // namespace emulator

// ---- vectors ------------------------------------------------------------------------------------

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- arithmetic ---------------------------------------------------------------------------------

using std::max;
using std::min;
inline unsigned max(unsigned a, int b) { return a > static_cast<unsigned>(b) ? a : b; }
inline unsigned min(unsigned a, int b) { return a < static_cast<unsigned>(b) ? a : b; }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float rsqrt(float x) { return static_cast<float>(1 / std::sqrt(static_cast<double>(x))); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }

inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }

namespace emulator {

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace emulator

inline unsigned __float_as_uint(float x) { return emulator::bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return emulator::bits_as<int>(x); }
inline float __uint_as_float(unsigned x) { return emulator::bits_as<float>(x); }
inline float __int_as_float(int x) { return emulator::bits_as<float>(x); }

// The four of both words' eight bytes that the nibbles of `chosen` select.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned chosen) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned which = chosen >> (4 * i) & 7;
    result |= static_cast<unsigned>(bytes >> (8 * which) & 0xFF) << (8 * i);
  }
  return result;
}

// The low word of `high:low` shifted to the right.
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (bits & 31));
}

template <class T>
T __ldg(const T* from) {
  return *from;
}

// ---- threads ------------------------------------------------------------------------------------

inline void __syncthreads(emulator::Where where = emulator::Where::here()) {
  emulator::sync_block(where);
}

[[noreturn]] inline void __trap(emulator::Where where = emulator::Where::here()) {
  emulator::fail("__trap()", where);
}

inline long long clock64() { return emulator::clock(); }

template <class T, class V>
T atomicOr(T* to, V value) {
  const T before = *to;
  *to = before | static_cast<T>(value);
  return before;
}

namespace emulator {

struct Vote {
  bool value;
  unsigned ballot;
};

inline void vote(void* const (&data)[32], uint32_t mask) {
  unsigned ballot = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1 && static_cast<const Vote*>(data[lane])->value) ballot |= 1u << lane;
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) static_cast<Vote*>(data[lane])->ballot = ballot;
  }
}

inline unsigned ballot_of(const char* what, unsigned mask, bool value, Where where) {
  Vote mine{value, 0};
  collect(what, mask, &mine, vote, where);
  return mine.ballot;
}

template <class T>
struct Shuffle {
  T value;
  int from;
  T got;
};

template <class T>
void shuffle(void* const (&data)[32], uint32_t mask) {
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    auto* mine = static_cast<Shuffle<T>*>(data[lane]);
    // The result is undefined if the source lane does not take part.
    if (mask >> mine->from & 1) {
      mine->got = static_cast<const Shuffle<T>*>(data[mine->from])->value;
    } else {
      memset(&mine->got, 0xFF, sizeof(T));
    }
  }
}

template <class T>
T shuffled(const char* what, unsigned mask, T value, int from, Where where) {
  Shuffle<T> mine{value, from, value};
  collect(what, mask, &mine, shuffle<T>, where);
  return mine.got;
}

template <bool kLargest>
void reduce(void* const (&data)[32], uint32_t mask) {
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    const unsigned mine = *static_cast<const unsigned*>(data[lane]);
    all = kLargest ? std::max(all, mine) : all | mine;
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) *static_cast<unsigned*>(data[lane]) = all;
  }
}

inline int lane() { return static_cast<int>(self->thread.x % 32); }

}  // namespace emulator

inline void __syncwarp(unsigned mask = 0xFFFFFFFF,
                       emulator::Where where = emulator::Where::here()) {
  emulator::ballot_of("__syncwarp", mask, true, where);
}
inline int __any_sync(unsigned mask, bool value, emulator::Where where = emulator::Where::here()) {
  return emulator::ballot_of("__any_sync", mask, value, where) != 0;
}
inline int __all_sync(unsigned mask, bool value, emulator::Where where = emulator::Where::here()) {
  return emulator::ballot_of("__all_sync", mask, value, where) == mask;
}
inline unsigned __ballot_sync(unsigned mask, bool value,
                              emulator::Where where = emulator::Where::here()) {
  return emulator::ballot_of("__ballot_sync", mask, value, where);
}

inline unsigned __reduce_or_sync(unsigned mask, unsigned value,
                                 emulator::Where where = emulator::Where::here()) {
  emulator::collect("__reduce_or_sync", mask, &value, emulator::reduce<false>, where);
  return value;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value,
                                  emulator::Where where = emulator::Where::here()) {
  emulator::collect("__reduce_max_sync", mask, &value, emulator::reduce<true>, where);
  return value;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int from, emulator::Where where = emulator::Where::here()) {
  return emulator::shuffled("__shfl_sync", mask, value, from % 32, where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int with,
                  emulator::Where where = emulator::Where::here()) {
  return emulator::shuffled("__shfl_xor_sync", mask, value, (emulator::lane() ^ with) % 32, where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by,
                   emulator::Where where = emulator::Where::here()) {
  const int from = emulator::lane() + static_cast<int>(by);
  return emulator::shuffled("__shfl_down_sync", mask, value, from < 32 ? from : emulator::lane(),
                            where);
}

// ---- 16 bits ------------------------------------------------------------------------------------

#include "cuda_fp16.h"

inline float2 __half22float2(__half2 both) { return {__half2float(both.x), __half2float(both.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 both) {
  return {__bfloat162float(both.x), __bfloat162float(both.y)};
}
