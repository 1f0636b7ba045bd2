// One function an instruction of sm_90a that CUDA C++ has no name for. The sections cited are those
// of the PTX ISA manual. Shared-memory addresses are 32-bit, as the instructions take them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/tensor_map.h"

namespace fx_fuser::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier (9.7.13.15) -----------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Returns once the phase of this parity is complete.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
      "@!complete bra again_%=;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- named barriers (9.7.13.1) ------------------------------------------------------------------

template <int kThreads>
__device__ __forceinline__ void barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

template <int kThreads>
__device__ __forceinline__ void barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// ---- clusters (9.7.13.3) ------------------------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// A barrier of the cluster in two halves, which also orders shared-memory accesses of its blocks.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives at the same barrier of block `rank` of the cluster, this one included. Without .release
// .cluster, which would be a fence of all memory: what is released was read by wgmma, and is.
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

// Stores to the same variable of another block of the cluster, which must have started.
__device__ __forceinline__ void store_to_block(uint32_t address, uint32_t rank, float value) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.f32 [remote], %2;\n"
      "}\n" ::"r"(address),
      "r"(rank), "f"(value)
      : "memory");
}

// ---- dependent launches (9.7.13.13) -------------------------------------------------------------

// The next kernel in the stream, if launched for it, may start once every block has said so.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Returns once the kernel before is complete and its writes are visible.
__device__ __forceinline__ void wait_for_prerequisites() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
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

// threadIdx.x where it is used: what follows from it is not kept in registers across a loop.
__device__ __forceinline__ uint32_t thread_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// The value, of which the compiler knows nothing ahead of this.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The value of the warp's first lane, which ptxas then knows to be uniform. A descriptor that it
// takes for per-lane goes to each wgmma through R2UR, which waits for the wgmma before to have read
// the same uniform registers.
__device__ __forceinline__ uint32_t uniform(uint32_t value) {
  return __shfl_sync(0xFFFFFFFF, value, 0);
}

// Values are in these registers here: what follows cannot be computed before, nor what precedes be
// put off.
template <int kCount>
__device__ __forceinline__ void pin(float (&value)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(value[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&value)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(value[i])::"memory");
}

// ---- TMA (9.7.9.25) -----------------------------------------------------------------------------

// Cache policies as createpolicy encodes them for whole accesses (CUTLASS, TMA::CacheHintSm90).
constexpr uint64_t kEvictNormal = 0x1000000000000000;
constexpr uint64_t kEvictFirst = 0x12F0000000000000;
constexpr uint64_t kEvictLast = 0x14F0000000000000;

// Coordinates are in elements, innermost first. Elements outside the tensor arrive as zeros and
// count as bytes of the barrier all the same.
__device__ __forceinline__ void tensor_load(uint32_t to, const TensorMap& from, uint32_t barrier,
                                            uint64_t policy, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to),
      "l"(&from), "r"(barrier), "l"(policy), "r"(x), "r"(y)
      : "memory");
}

// To the same place in all blocks of the cluster whose bit is set in `blocks`, and counted by the
// barrier of each.
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

// 4 or 8 bytes to shared memory, zeros where `reads` is false; arrived after copy_async_wait()
// (9.7.9.25.3).
template <class T>
__device__ __forceinline__ void copy_async(uint32_t to, const T* from, bool reads) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(sizeof(T)),
               "r"(reads ? static_cast<uint32_t>(sizeof(T)) : 0u)
               : "memory");
}

// For all of this thread's.
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Brings the line that has this address to the L2 cache.
__device__ __forceinline__ void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Brings 16-byte aligned memory, in multiples of 16 bytes, to the L2 cache.
__device__ __forceinline__ void prefetch(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ float4 load_shared(uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address));
  return value;
}

__device__ __forceinline__ float load_shared_word(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

// Four 8 x 8 matrices of 16-bit elements, whose rows of 16 bytes begin where lanes 8i...8i + 7 say
// for matrix i, transposed: of each, a lane gets column lane / 4, rows 2 (lane % 4) and the next.
// (9.7.14.5.15)
__device__ __forceinline__ void load_transposed(uint32_t (&word)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(row)
               : "memory");
}

// ---- mma (9.7.14) -------------------------------------------------------------------------------

// d[16 x 8] += a[16 x 16] * b[16 x 8] of one warp, a and b of T: fp16 or bf16. With g = lane / 4,
// c = lane % 4
//   a[2s + r] holds row g + 8r, columns 8s + 2c and 8s + 2c + 1
//   b[s] holds column g, rows 8s + 2c and 8s + 2c + 1
//   d[2r + t] is row g + 8r, column 2c + t
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
#define FX_FUSER_MMA(type)                                   \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type \
      ".f32 {%0, %1, %2, %3}, {%4, %5, "                     \
      "%6, %7}, {%8, %9}, {%0, %1, %2, %3};"                 \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (std::is_same_v<T, __half>) {
    FX_FUSER_MMA("f16");
  } else {
    FX_FUSER_MMA("bf16");
  }
#undef FX_FUSER_MMA
}

// ---- wgmma (9.7.15) -----------------------------------------------------------------------------

// Descriptor of a K-major operand in rows of 128 bytes with the 128-byte swizzle: 8 rows are 1024
// bytes, on which `address` is aligned (9.7.15.5.1). 16 elements of 16 bits further: + 2.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t kLeadingOffset = 1;  // ignored where a row is one swizzle span
  constexpr uint64_t kStrideOffset = 1024 / 16;
  constexpr uint64_t kSwizzle128 = 1;
  return (address & 0x3FFFF) >> 4 | kLeadingOffset << 16 | kStrideOffset << 32 | kSwizzle128 << 62;
}

// Ahead of the first wgmma, and wherever its registers were touched since the last.
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
