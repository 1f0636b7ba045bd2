// Division of an index by a run-time constant as one multiply-high, one add and one shift.
// T. Granlund, P. Montgomery, "Division by Invariant Integers using Multiplication", 1994.
// The host prepares the magic numbers, the device divides. Also the host's ceil_div.
#pragma once

#include <cstdint>

namespace fx_fuser {

template <class Index>
struct Divisor {
  Index size;
  Index magic;
  uint32_t shift;
};

#ifdef __CUDACC__
__device__ __forceinline__ uint32_t multiply_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
__device__ __forceinline__ uint64_t multiply_high(uint64_t a, uint64_t b) {
  return __umul64hi(a, b);
}

template <class Index>
__device__ __forceinline__ Index divide(Index dividend, const Divisor<Index>& by) {
  return (multiply_high(dividend, by.magic) + dividend) >> by.shift;
}
#else
// Correct for every dividend below half of Index's range: there the add cannot overflow.
template <class Index>
inline Divisor<Index> make_divisor(Index size) {
  constexpr int kBits = 8 * sizeof(Index);
  uint32_t shift = 0;
  while ((Index{1} << shift) < size) ++shift;
  const unsigned __int128 excess = (Index{1} << shift) - size;
  return {size, static_cast<Index>((excess << kBits) / size + 1), shift};
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
#endif

}  // namespace fx_fuser
