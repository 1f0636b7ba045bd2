// Replaces kernels_cu/common/ptx.cuh: the same functions on the emulated machine.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fx_fuser::ptx {

using emulator::Where;

inline uint32_t shared_address(const void* pointer, Where where = Where::here()) {
  return emulator::address_of(pointer, where);
}

// ---- mbarrier -----------------------------------------------------------------------------------

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals, Where where = Where::here()) {
  emulator::init_mbarrier(barrier, arrivals, where);
}
inline void mbarrier_arrive(uint32_t barrier, Where where = Where::here()) {
  emulator::arrive_at_mbarrier(barrier, where);
}
inline void mbarrier_arrive_on_copies(uint32_t barrier, Where where = Where::here()) {
  emulator::arrive_on_copies(barrier, where);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity, Where where = Where::here()) {
  emulator::wait_for_mbarrier(barrier, parity, where);
}
inline bool mbarrier_is_complete(uint32_t barrier, uint32_t parity, Where where = Where::here()) {
  return emulator::is_mbarrier_complete(barrier, parity, where);
}

// ---- named barriers -----------------------------------------------------------------------------

template <int kThreads>
void barrier_sync(int id, Where where = Where::here()) {
  emulator::sync_some(id, kThreads, /*waits=*/true, where);
}
template <int kThreads>
void barrier_arrive(int id, Where where = Where::here()) {
  emulator::sync_some(id, kThreads, /*waits=*/false, where);
}

// ---- clusters -----------------------------------------------------------------------------------

#if __CUDA_ARCH__ >= 900
inline uint32_t cluster_rank() { return emulator::cluster_rank(); }
inline uint32_t cluster_size() { return emulator::cluster_size(); }
inline void cluster_arrive(Where where = Where::here()) { emulator::arrive_in_cluster(where); }
inline void cluster_wait(Where where = Where::here()) { emulator::wait_for_cluster(where); }
#else
inline uint32_t cluster_rank() { return 0; }
inline uint32_t cluster_size() { return 1; }
inline void cluster_arrive() {}
inline void cluster_wait(Where where = Where::here()) { emulator::sync_block(where); }
#endif

inline void store_to_block(uint32_t address, uint32_t rank, float value,
                           Where where = Where::here()) {
  *static_cast<float*>(emulator::in_block_of_cluster(address, rank, sizeof(float), where)) = value;
}

// ---- dependent launches -------------------------------------------------------------------------

inline void launch_dependents() {}  // a launch begins when the previous one has ended
inline void wait_for_prerequisites() {}

// ---- registers ----------------------------------------------------------------------------------

inline uint32_t thread_index() { return threadIdx.x; }
inline int opaque(int value) { return value; }
inline uint32_t uniform(uint32_t value, Where where = Where::here()) {
  return __shfl_sync(0xFFFFFFFF, value, 0, where);
}
template <class T, int kCount>
void pin(T (&)[kCount]) {}

// ---- copies and loads ---------------------------------------------------------------------------

template <class T>
void copy_async(uint32_t to, const T* from, bool reads, Where where = Where::here()) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  emulator::copy_async(to, from, sizeof(T), reads ? sizeof(T) : 0, where);
}
inline void copy_async_16(uint32_t to, const void* from, Where where = Where::here()) {
  emulator::copy_async(to, from, 16, 16, where);
}
inline void copy_async_16_if(bool copies, uint32_t to, const void* from,
                             Where where = Where::here()) {
  if (copies) emulator::copy_async(to, from, 16, 16, where);
}
inline void copy_async_16(uint32_t to, const void* from, uint32_t bytes,
                          Where where = Where::here()) {
  emulator::copy_async(to, from, 16, bytes, where);
}
inline void copy_async_only_16(uint32_t to, const void* from, bool reads,
                               Where where = Where::here()) {
  emulator::copy_async(to, from, 16, reads ? 16 : 0, where);
}
inline void copy_async_commit() { emulator::commit_copies(); }
template <int kPending>
void copy_async_wait_for_groups() {
  emulator::wait_for_copies(kPending);
}
inline void copy_async_wait() { emulator::wait_for_all_copies(); }

inline void prefetch(const void* /*from*/) {}

inline float4 load_shared(uint32_t address, Where where = Where::here()) {
  return *static_cast<const float4*>(emulator::at_address(address, sizeof(float4), where));
}
inline uint2 load_shared_pair(uint32_t address, Where where = Where::here()) {
  return *static_cast<const uint2*>(emulator::at_address(address, sizeof(uint2), where));
}
inline float load_shared_word(uint32_t address, Where where = Where::here()) {
  return *static_cast<const float*>(emulator::at_address(address, sizeof(float), where));
}
inline void load_shared_if(bool reads, float4& value, uint32_t address,
                           Where where = Where::here()) {
  if (reads) value = load_shared(address, where);
}
inline void load_shared_if(bool reads, float& value, uint32_t address,
                           Where where = Where::here()) {
  if (reads) value = load_shared_word(address, where);
}

inline void store_shared(uint32_t address, const uint4& value, Where where = Where::here()) {
  *static_cast<uint4*>(emulator::at_address(address, sizeof(uint4), where)) = value;
}

inline void store_shared_pair(uint32_t address, const uint2& value, Where where = Where::here()) {
  *static_cast<uint2*>(emulator::at_address(address, sizeof(uint2), where)) = value;
}
inline void store_shared_word(uint32_t address, uint32_t value, Where where = Where::here()) {
  *static_cast<uint32_t*>(emulator::at_address(address, sizeof value, where)) = value;
}

inline void load_matrices(uint32_t (&word)[4], uint32_t row, Where where = Where::here()) {
  emulator::load_matrices(/*reads=*/true, /*transposed=*/false, word, row, where);
}
inline void load_matrices_if(bool reads, uint32_t (&word)[4], uint32_t row,
                             Where where = Where::here()) {
  emulator::load_matrices(reads, /*transposed=*/false, word, row, where);
}
inline void load_transposed(uint32_t (&word)[4], uint32_t row, Where where = Where::here()) {
  emulator::load_matrices(/*reads=*/true, /*transposed=*/true, word, row, where);
}

// ---- mma ----------------------------------------------------------------------------------------

template <class T>
constexpr emulator::Element kElementOf = std::is_same_v<T, float>    ? emulator::Element::kTf32
                                         : std::is_same_v<T, __half> ? emulator::Element::kHalf
                                                                     : emulator::Element::kBfloat16;

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  const float (&c)[4], Where where = Where::here()) {
  const uint32_t b[2] = {b0, b1};
  emulator::multiply(kElementOf<T>, 2, d, a, b, c, where);
}
template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  Where where = Where::here()) {
  mma_m16n8k16<T>(d, a, b0, b1, d, where);
}
template <class T>
void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0,
                 Where where = Where::here()) {
  const uint32_t a[2] = {a0, a1};
  emulator::multiply(kElementOf<T>, 1, d, a, &b0, d, where);
}
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             Where where = Where::here()) {
  const uint32_t b[2] = {b0, b1};
  emulator::multiply(kElementOf<float>, 2, d, a, b, d, where);
}

// ---- arithmetic ---------------------------------------------------------------------------------

inline float min_nan(float a, float b) {
  if (a != a || b != b) return NAN;
  return a < b || (a == b && std::signbit(a)) ? a : b;
}

inline float max_nan(float a, float b) { return -min_nan(-a, -b); }

// fp16 magnitudes order like their bits, NaN last.
inline uint32_t larger_halves(uint32_t magnitudes, uint32_t halves) {
  halves &= 0x7FFF7FFF;
  return std::max(magnitudes & 0xFFFF0000, halves & 0xFFFF0000) |
         std::max(magnitudes & 0xFFFF, halves & 0xFFFF);
}
inline uint32_t smaller_halves(uint32_t magnitudes, uint32_t halves) {
  halves &= 0x7FFF7FFF;
  return std::min(magnitudes & 0xFFFF0000, halves & 0xFFFF0000) |
         std::min(magnitudes & 0xFFFF, halves & 0xFFFF);
}

// Rounds to the nearest, ties away from zero.
inline uint32_t to_tf32(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFFFFFF;
  if ((bits & 0x7FFFFFFF) == 0x7F800000) return bits;
  return (bits + 0x1000) & 0xFFFFE000;
}

inline float flushed(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

inline float reciprocal(float value) { return flushed(1 / flushed(value)); }

inline float exp2(float value) { return flushed(std::exp2(value)); }

}  // namespace fx_fuser::ptx
