// One function per PTX instruction of sm_90a that CUDA C++ does not expose, in addition to ptx.cuh.
#pragma once

#include <cstdint>

#include "common/matrix_descriptor.cuh"
#include "common/ptx.cuh"
#include "common/tensor_map.h"

namespace fx_fuser::ptx {

// ---- mbarrier (9.7.13.15) -----------------------------------------------------------------------

// Makes initialised barriers visible to TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives at the same barrier in block `rank` of the cluster, which may be this block. Without
// .release.cluster, which would be a fence of all memory: what reads the stage released here must
// have completed. wgmma's reads have after its wait; a load's once its value is used, not once it
// is issued, since the arrival takes another way and may overtake it.
__device__ __forceinline__ void mbarrier_arrive_in_cluster(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Makes this thread's writes to its block's shared memory visible to wgmma and TMA.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- registers (9.7.19.5) -----------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- TMA (9.7.9.25) -----------------------------------------------------------------------------

// Cache policies as createpolicy encodes them for whole accesses (CUTLASS, TMA::CacheHintSm90).
constexpr uint64_t kEvictNormal = 0x1000000000000000;
constexpr uint64_t kEvictFirst = 0x12F0000000000000;
constexpr uint64_t kEvictLast = 0x14F0000000000000;

// Coordinates are in elements, innermost first. Elements outside the tensor arrive as zeros and
// still count towards the barrier's bytes.
__device__ __forceinline__ void tensor_load(uint32_t to, const TensorMap& from, uint32_t barrier,
                                            uint64_t policy, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to),
      "l"(&from), "r"(barrier), "l"(policy), "r"(x), "r"(y)
      : "memory");
}

// To the same address in each block of the cluster whose bit is set in `blocks`; each block's own
// barrier counts the bytes.
__device__ __forceinline__ void tensor_load_multicast(uint32_t to, const TensorMap& from,
                                                      uint32_t barrier, uint16_t blocks,
                                                      uint64_t policy, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6}], [%2], %3, %4;" ::"r"(to),
      "l"(&from), "r"(barrier), "h"(blocks), "l"(policy), "r"(x), "r"(y)
      : "memory");
}

__device__ __forceinline__ void tensor_load(uint32_t to, const TensorMap& from, uint32_t barrier,
                                            uint64_t policy, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(to),
      "l"(&from), "r"(barrier), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

__device__ __forceinline__ void tensor_load_multicast(uint32_t to, const TensorMap& from,
                                                      uint32_t barrier, uint16_t blocks,
                                                      uint64_t policy, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6, %7}], [%2], %3, %4;" ::"r"(to),
      "l"(&from), "r"(barrier), "h"(blocks), "l"(policy), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void tensor_load_multicast(uint32_t to, const TensorMap& from,
                                                      uint32_t barrier, uint16_t blocks,
                                                      uint64_t policy, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6, %7, %8}], [%2], %3, %4;" ::"r"(to),
      "l"(&from), "r"(barrier), "h"(blocks), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Stores the part of the box that lies inside the tensor, as part of this thread's bulk group.
__device__ __forceinline__ void tensor_store(const TensorMap& to, uint32_t from, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&to),
      "r"(from), "r"(x), "r"(y)
      : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most the last kPending of this thread's groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Brings memory to L2; address and size are multiples of 16 bytes.
__device__ __forceinline__ void prefetch(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// ---- stores of matrices (9.7.14.5.16) -----------------------------------------------------------

// Four 8 x 8 matrices of 16-bit elements, each transposed: a lane has row lane / 4, columns
// 2 (lane % 4) and the next, of each. Lanes 8i...8i + 7 give the addresses where matrix i's columns
// go, 16 bytes each.
__device__ __forceinline__ void store_transposed(uint32_t column, const uint32_t (&word)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(column),
      "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
      : "memory");
}

// ---- arithmetic ---------------------------------------------------------------------------------

// The larger of each of two unsigned 16-bit numbers.
__device__ __forceinline__ uint32_t larger_words(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// ---- wgmma (9.7.15) -----------------------------------------------------------------------------

// Needed ahead of the first wgmma, and whenever its registers were accessed since the last one.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

}  // namespace fx_fuser::ptx
