// Replaces kernels_cu/common/ptx_sm90.cuh: the functions that the direct convolution, the comb gemm
// and attention use, on the emulated machine.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/matrix_descriptor.cuh"
#include "common/ptx.cuh"
#include "common/tensor_map.h"

namespace fx_fuser::ptx {

// Memory is consistent here, for TMA and wgmma too.
inline void fence_mbarrier_init() {}
inline void fence_async_proxy() {}

template <int kRegisters>
void give_registers(Where where = Where::here()) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  emulator::change_registers(kRegisters, where);
}
template <int kRegisters>
void take_registers(Where where = Where::here()) {
  give_registers<kRegisters>(where);
}

// ---- mbarriers and TMA --------------------------------------------------------------------------

inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes,
                                      Where where = Where::here()) {
  emulator::expect_bytes(barrier, bytes, where);
  emulator::arrive_at_mbarrier(barrier, where);
}
inline void mbarrier_arrive_in_cluster(uint32_t barrier, uint32_t rank,
                                       Where where = Where::here()) {
  emulator::arrive_at_mbarrier_of(barrier, rank, where);
}

constexpr uint64_t kEvictNormal = 0;
constexpr uint64_t kEvictFirst = 1;
constexpr uint64_t kEvictLast = 2;

inline void tensor_load(uint32_t to, const TensorMap& from, uint32_t barrier, uint64_t /*policy*/,
                        int x, int y, Where where = Where::here()) {
  emulator::load_tensor(to, &from, barrier, 1u << cluster_rank(), {x, y, 0, 0}, 2, where);
}
inline void tensor_load(uint32_t to, const TensorMap& from, uint32_t barrier, uint64_t /*policy*/,
                        int x, int y, int z, int w, Where where = Where::here()) {
  emulator::load_tensor(to, &from, barrier, 1u << cluster_rank(), {x, y, z, w}, 4, where);
}
inline void tensor_load_multicast(uint32_t to, const TensorMap& from, uint32_t barrier,
                                  uint16_t blocks, uint64_t /*policy*/, int x, int y,
                                  Where where = Where::here()) {
  emulator::load_tensor(to, &from, barrier, blocks, {x, y, 0, 0}, 2, where);
}
inline void tensor_load_multicast(uint32_t to, const TensorMap& from, uint32_t barrier,
                                  uint16_t blocks, uint64_t /*policy*/, int x, int y, int z,
                                  Where where = Where::here()) {
  emulator::load_tensor(to, &from, barrier, blocks, {x, y, z, 0}, 3, where);
}
inline void tensor_load_multicast(uint32_t to, const TensorMap& from, uint32_t barrier,
                                  uint16_t blocks, uint64_t /*policy*/, int x, int y, int z, int w,
                                  Where where = Where::here()) {
  emulator::load_tensor(to, &from, barrier, blocks, {x, y, z, w}, 4, where);
}
inline void tensor_store(const TensorMap& to, uint32_t from, int x, int y,
                         Where where = Where::here()) {
  emulator::store_tensor(&to, from, {x, y, 0, 0}, 2, where);
}
inline void prefetch(const void* /*from*/, uint32_t /*bytes*/) {}
inline void bulk_commit() { emulator::commit_stores(); }
template <int kPending>
void bulk_wait_read() {
  emulator::wait_for_stores(kPending);
}

// ---- stores of matrices -------------------------------------------------------------------------

inline void store_transposed(uint32_t column, const uint32_t (&word)[4],
                             Where where = Where::here()) {
  auto* to = static_cast<uint16_t*>(emulator::at_address(column, 16, where));
  const int lane = emulator::lane();
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int row = 0; row < 8; ++row) {
      const uint32_t pair = __shfl_sync(0xFFFFFFFF, word[matrix], row * 4 + lane % 8 / 2, where);
      if (matrix == lane / 8) to[row] = static_cast<uint16_t>(pair >> (lane % 2 * 16));
    }
  }
}

// ---- arithmetic ---------------------------------------------------------------------------------

inline uint32_t larger_words(uint32_t a, uint32_t b) {
  return std::max(a & 0xFFFF0000, b & 0xFFFF0000) | std::max(a & 0xFFFF, b & 0xFFFF);
}

// ---- wgmma --------------------------------------------------------------------------------------

inline void wgmma_fence(Where where = Where::here()) { emulator::fence_products(where); }
inline void wgmma_commit(Where where = Where::here()) { emulator::commit_products(where); }
template <int kPending>
void wgmma_wait(Where where = Where::here()) {
  emulator::wait_for_products(kPending, where);
}

}  // namespace fx_fuser::ptx
