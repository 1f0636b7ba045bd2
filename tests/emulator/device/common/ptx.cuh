// In place of kernels_cu/common/ptx.cuh: the same functions, of the emulated machine.
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

inline void launch_dependents() {}  // a launch begins when the one before has ended
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
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  emulator::copy_async(to, from, sizeof(T), reads ? sizeof(T) : 0, where);
}
inline void copy_async_16(uint32_t to, const void* from, Where where = Where::here()) {
  emulator::copy_async(to, from, 16, 16, where);
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

struct Matrices {
  uint32_t* word;
  const uint16_t* row;
};

template <bool kTransposed>
void load_for_warp(void* const (&data)[32], uint32_t /*mask*/) {
  const auto of = [&](int lane) { return static_cast<const Matrices*>(data[lane]); };
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      uint16_t half[2];
      for (int t = 0; t < 2; ++t) {
        const int row = kTransposed ? 2 * (lane % 4) + t : lane / 4;
        const int column = kTransposed ? lane / 4 : 2 * (lane % 4) + t;
        half[t] = of(8 * i + row)->row[column];
      }
      of(lane)->word[i] = half[0] | static_cast<uint32_t>(half[1]) << 16;
    }
  }
}

template <bool kTransposed>
void load(const char* what, uint32_t (&word)[4], uint32_t row, Where where) {
  Matrices mine{word, static_cast<const uint16_t*>(emulator::at_address(row, 16, where))};
  emulator::collect(what, 0xFFFFFFFF, &mine, load_for_warp<kTransposed>, where);
}

inline void load_matrices(uint32_t (&word)[4], uint32_t row, Where where = Where::here()) {
  load<false>("ldmatrix", word, row, where);
}
inline void load_matrices_if(bool reads, uint32_t (&word)[4], uint32_t row,
                             Where where = Where::here()) {
  if (__any_sync(0xFFFFFFFF, reads, where) != __all_sync(0xFFFFFFFF, reads, where)) {
    emulator::fail("ldmatrix by a part of a warp", where);
  }
  if (reads) load_matrices(word, row, where);
}
inline void load_transposed(uint32_t (&word)[4], uint32_t row, Where where = Where::here()) {
  load<true>("ldmatrix.trans", word, row, where);
}

// ---- mma ----------------------------------------------------------------------------------------

// One lane's part of d = a b + c: a of 16 rows, b of 8 columns.
struct Products {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
  const float* c;
};

struct Tf32 {};

// Element e of a register.
template <class T>
float element_of(uint32_t word, int e) {
  const auto half = static_cast<uint16_t>(word >> (16 * e));
  if constexpr (std::is_same_v<T, Tf32>) {
    return __uint_as_float(word & 0xFFFFE000);  // the tensor core reads no more
  } else if constexpr (std::is_same_v<T, __half>) {
    return emulator::half_to_float(half);
  } else {
    return emulator::bfloat16_to_float(half);
  }
}

// The tensor core truncates its sums.
inline float truncated(double sum) {
  const auto nearest = static_cast<float>(sum);
  if (std::isfinite(nearest) && std::fabs(static_cast<double>(nearest)) > std::fabs(sum)) {
    return std::nextafter(nearest, 0.0f);
  }
  return nearest;
}

// kSteps of k in registers: each is eight of 16 bits, or four of TF32.
template <class T, int kSteps>
void multiply_for_warp(void* const (&data)[32], uint32_t /*mask*/) {
  constexpr int kElements = std::is_same_v<T, Tf32> ? 1 : 2;  // of a register
  constexpr int kK = 4 * kElements * kSteps;
  float a[16][kK];
  float b[kK][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const Products*>(data[lane]);
    for (int s = 0; s < kSteps; ++s) {
      for (int e = 0; e < kElements; ++e) {
        const int k = 4 * kElements * s + kElements * (lane % 4) + e;
        a[lane / 4][k] = element_of<T>(mine.a[2 * s], e);
        a[lane / 4 + 8][k] = element_of<T>(mine.a[2 * s + 1], e);
        b[k][lane / 4] = element_of<T>(mine.b[s], e);
      }
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<const Products*>(data[lane]);
    for (int r = 0; r < 2; ++r) {
      const float* row = a[lane / 4 + 8 * r];
      for (int t = 0; t < 2; ++t) {
        double sum = mine.c[2 * r + t];
        for (int k = 0; k < kK; ++k) {
          sum += static_cast<double>(row[k]) * static_cast<double>(b[k][2 * (lane % 4) + t]);
        }
        mine.d[2 * r + t] = truncated(sum);
      }
    }
  }
}

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  const float (&c)[4], Where where = Where::here()) {
  const uint32_t b[2] = {b0, b1};
  Products mine{d, a, b, c};
  emulator::collect("mma.m16n8k16", 0xFFFFFFFF, &mine, multiply_for_warp<T, 2>, where);
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
  Products mine{d, a, &b0, d};
  emulator::collect("mma.m16n8k8", 0xFFFFFFFF, &mine, multiply_for_warp<T, 1>, where);
}
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             Where where = Where::here()) {
  const uint32_t b[2] = {b0, b1};
  Products mine{d, a, b, d};
  emulator::collect("mma.m16n8k8.tf32", 0xFFFFFFFF, &mine, multiply_for_warp<Tf32, 2>, where);
}

// ---- arithmetic ---------------------------------------------------------------------------------

// Nearest, ties away from zero.
inline uint32_t to_tf32(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFFFFFF;
  if ((bits & 0x7FFFFFFF) == 0x7F800000) return bits;
  return (bits + 0x1000) & 0xFFFFE000;
}

inline float reciprocal(float value) {
  const auto flushed = [](float x) {
    return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
  };
  return flushed(1 / flushed(value));
}

}  // namespace fx_fuser::ptx
