// One function per PTX instruction that CUDA C++ does not expose, for sm_80 and later; Hopper's own
// are in ptx_sm90.cuh. Sections cited are those of the PTX ISA manual. Shared-memory addresses are
// 32-bit, as the instructions take them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fx_fuser::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier (9.7.13.15) -----------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#else  // this form needs a destination for the phase
  asm volatile("{\n.reg .b64 phase;\nmbarrier.arrive.shared.b64 phase, [%0];\n}" ::"r"(barrier)
               : "memory");
#endif
}

// Arrives once all of this thread's copy_async have completed. .noinc: the arrival is one of those
// that mbarrier_init counts.
__device__ __forceinline__ void mbarrier_arrive_on_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

#if __CUDA_ARCH__ >= 900
#define FX_FUSER_TRY_WAIT "mbarrier.try_wait.parity.shared::cta.b64"  // lets the warp sleep
#else
#define FX_FUSER_TRY_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
// Waits until the phase of this parity is complete.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "again_%=:\n" FX_FUSER_TRY_WAIT
      " complete, [%0], %1;\n"
      "@!complete bra again_%=;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
#undef FX_FUSER_TRY_WAIT

// True if the phase of this parity is complete, with the ordering of mbarrier_wait. Does not block.
__device__ __forceinline__ bool mbarrier_is_complete(uint32_t barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "mbarrier.test_wait.parity.shared.b64 complete, [%1], %2;\n"
      "selp.u32 %0, 1, 0, complete;\n"
      "}\n"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return complete != 0;
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

// Below sm_90 a block is a cluster by itself.
#if __CUDA_ARCH__ >= 900
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

// A cluster barrier in two halves. It also orders the shared-memory accesses of the blocks.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores to the same shared-memory address in block `rank` of the cluster, which must have started.
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
#else
__device__ __forceinline__ uint32_t cluster_rank() { return 0; }
__device__ __forceinline__ uint32_t cluster_size() { return 1; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() { __syncthreads(); }
__device__ __forceinline__ void store_to_block(uint32_t address, uint32_t /*rank*/, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
#endif

// ---- dependent launches (9.7.13.13) -------------------------------------------------------------

// Below sm_90 a kernel starts when the previous one is complete.

// Once every block has called this, the next kernel in the stream may start if it was launched with
// programmatic stream serialization.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous kernel is complete and its writes are visible.
__device__ __forceinline__ void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- registers ----------------------------------------------------------------------------------

// threadIdx.x, read again at each use, so that values derived from it are not kept in registers
// across a loop.
__device__ __forceinline__ uint32_t thread_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Returns the value, hidden from the optimizer.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The value of the warp's first lane, which ptxas then knows to be uniform. If ptxas believes a
// descriptor to be per-lane, each wgmma gets it through R2UR, which waits until the previous wgmma
// has read the same uniform registers.
__device__ __forceinline__ uint32_t uniform(uint32_t value) {
  return __shfl_sync(0xFFFFFFFF, value, 0);
}

// A scheduling barrier for these registers: the compiler computes the values before this point, and
// moves nothing that depends on them ahead of it.
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

// ---- copies and loads (9.7.9) -------------------------------------------------------------------

// Copies 4, 8 or 16 bytes to shared memory, zeros if `reads` is false. Visible after
// copy_async_wait(). (9.7.9.25.3)
template <class T>
__device__ __forceinline__ void copy_async(uint32_t to, const T* from, bool reads) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(sizeof(T)),
               "r"(reads ? static_cast<uint32_t>(sizeof(T)) : 0u)
               : "memory");
}

// Copies 16 bytes, 16-byte aligned, bypassing L1.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}

// The same if `copies`; predicated, no branch.
__device__ __forceinline__ void copy_async_16_if(bool copies, uint32_t to, const void* from) {
  asm volatile(
      "{\n"
      ".reg .pred copies;\n"
      "setp.ne.b32 copies, %2, 0;\n"
      "@copies cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n"
      "}\n" ::"r"(to),
      "l"(from), "r"(static_cast<int>(copies))
      : "memory");
}

// The same, but only the first `bytes` are read and the rest are zeros.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}

// 16 bytes, or as many zeros, bypassing L1 and without the prefetch of the 128-byte line to L2.
__device__ __forceinline__ void copy_async_only_16(uint32_t to, const void* from, bool reads) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(reads ? 16 : 0)
               : "memory");
}

// This thread's copies since the last commit become a group.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all of this thread's groups but the last kPending.
template <int kPending>
__device__ __forceinline__ void copy_async_wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits for all of this thread's copies.
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Brings the line at this address to L2.
__device__ __forceinline__ void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

__device__ __forceinline__ float4 load_shared(uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address));
  return value;
}

__device__ __forceinline__ uint2 load_shared_pair(uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
  return value;
}

__device__ __forceinline__ float load_shared_word(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

// The same two if `reads`, else `value` is unchanged; predicated, no branch.
__device__ __forceinline__ void load_shared_if(bool reads, float4& value, uint32_t address) {
  asm volatile(
      "{\n"
      ".reg .pred reads;\n"
      "setp.ne.b32 reads, %5, 0;\n"
      "@reads ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+f"(value.x), "+f"(value.y), "+f"(value.z), "+f"(value.w)
      : "r"(address), "r"(static_cast<int>(reads)));
}
__device__ __forceinline__ void load_shared_if(bool reads, float& value, uint32_t address) {
  asm volatile(
      "{\n"
      ".reg .pred reads;\n"
      "setp.ne.b32 reads, %2, 0;\n"
      "@reads ld.shared.f32 %0, [%1];\n"
      "}\n"
      : "+f"(value)
      : "r"(address), "r"(static_cast<int>(reads)));
}

__device__ __forceinline__ void store_shared(uint32_t address, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void store_shared_pair(uint32_t address, const uint2& value) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(value.x), "r"(value.y)
               : "memory");
}

__device__ __forceinline__ void store_shared_word(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements. Lanes 8i...8i + 7 give the addresses of matrix i's rows
// of 16 bytes. From each matrix a lane gets row lane / 4, columns 2 (lane % 4) and the next.
// (9.7.14.5.15)
__device__ __forceinline__ void load_matrices(uint32_t (&word)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(row)
               : "memory");
}

// The same if `reads`, which must be uniform across the warp; predicated, no branch.
__device__ __forceinline__ void load_matrices_if(bool reads, uint32_t (&word)[4], uint32_t row) {
  asm volatile(
      "{\n"
      ".reg .pred reads;\n"
      "setp.ne.b32 reads, %5, 0;\n"
      "@reads ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3])
      : "r"(row), "r"(static_cast<int>(reads))
      : "memory");
}

// The same with each matrix transposed: column lane / 4, rows 2 (lane % 4) and the next.
__device__ __forceinline__ void load_transposed(uint32_t (&word)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(row)
               : "memory");
}

// ---- mma (9.7.14) -------------------------------------------------------------------------------

// d[16 x 8] = a[16 x 16] * b[16 x 8] + c[16 x 8] by one warp, T is fp16 or bf16. With
// g = lane / 4, l = lane % 4
//   a[2s + r] holds row g + 8r, columns 8s + 2l and 8s + 2l + 1
//   b[s] holds column g, rows 8s + 2l and 8s + 2l + 1
//   c and d[2r + t] are row g + 8r, column 2l + t
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1, const float (&c)[4]) {
#define FX_FUSER_MMA(type)                                                                  \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"            \
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), \
        "f"(c[2]), "f"(c[3]))
  if constexpr (std::is_same_v<T, __half>) {
    FX_FUSER_MMA("f16");
  } else {
    FX_FUSER_MMA("bf16");
  }
#undef FX_FUSER_MMA
}

// d += a * b
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  mma_m16n8k16<T>(d, a, b0, b1, d);
}

// d[16 x 8] += a[16 x 8] * b[8 x 8]: the same layout with s = 0 only.
template <class T>
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
#define FX_FUSER_MMA(type)                                       \
  asm("mma.sync.aligned.m16n8k8.row.col.f32." type "." type      \
      ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])           \
      : "r"(a0), "r"(a1), "r"(b0))
  if constexpr (std::is_same_v<T, __half>) {
    FX_FUSER_MMA("f16");
  } else {
    FX_FUSER_MMA("bf16");
  }
#undef FX_FUSER_MMA
}

// The same in TF32: a[2s + r] is row g + 8r, column 4s + l, and b[s] is column g, row 4s + l.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- arithmetic (9.7.3, 9.7.9.21) ---------------------------------------------------------------

// Rounds to the nearest TF32 number, ties away from zero; returns its bits.
__device__ __forceinline__ uint32_t to_tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// NaN if either argument is NaN; -0 is less than +0.
__device__ __forceinline__ float min_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// For each of two fp16: the larger, or the smaller, of `magnitudes` (not negative) and |halves|.
// NaN counts as the larger one.
__device__ __forceinline__ uint32_t larger_halves(uint32_t magnitudes, uint32_t halves) {
  uint32_t result;
  asm("{\n\t.reg .b32 positive;\n\tabs.f16x2 positive, %2;\n\t"
      "max.NaN.f16x2 %0, %1, positive;\n\t}"
      : "=r"(result)
      : "r"(magnitudes), "r"(halves));
  return result;
}

__device__ __forceinline__ uint32_t smaller_halves(uint32_t magnitudes, uint32_t halves) {
  uint32_t result;
  asm("{\n\t.reg .b32 positive;\n\tabs.f16x2 positive, %2;\n\t"
      "min.f16x2 %0, %1, positive;\n\t}"
      : "=r"(result)
      : "r"(magnitudes), "r"(halves));
  return result;
}

// 1 / value to one ulp. Subnormal results are flushed to zero; subnormal values give infinity.
__device__ __forceinline__ float reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// 2^value with a relative error of 2^-22. Subnormal results are flushed to zero.
__device__ __forceinline__ float exp2(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

}  // namespace fx_fuser::ptx
