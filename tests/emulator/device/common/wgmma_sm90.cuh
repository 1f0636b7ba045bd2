// Replaces kernels_cu/common/wgmma_sm90.cuh: the same functions on the emulated machine.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/ptx.cuh"

namespace fx_fuser::ptx {

template <class T>
struct Wgmma {
  template <int kRegisters>
  static void run(float (&d)[kRegisters], uint64_t a_tile, uint64_t b_tile, bool accumulate,
                  Where where = Where::here()) {
    emulator::issue_product({kElementOf<T>, 2 * kRegisters, /*transposed_a=*/false,
                             /*transposed=*/false, accumulate, a_tile, b_tile, /*a=*/nullptr, d},
                            where);
  }
};

template <class T, bool kTransposedA, bool kTransposedB>
struct WgmmaOfMajors {
  static_assert(sizeof(T) == 2);

  template <int kRegisters>
  static void run(float (&d)[kRegisters], uint64_t a_tile, uint64_t b_tile, bool accumulate,
                  Where where = Where::here()) {
    emulator::issue_product({kElementOf<T>, 2 * kRegisters, kTransposedA, kTransposedB, accumulate,
                             a_tile, b_tile, /*a=*/nullptr, d},
                            where);
  }
};

template <class T>
struct WgmmaOfRegisters {
  static_assert(sizeof(T) == 2);

  template <int kRegisters>
  static void run(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b_tile, bool accumulate,
                  Where where = Where::here()) {
    start(d, a, b_tile, /*transposed=*/false, accumulate, where);
  }
  template <int kRegisters>
  static void run_transposed(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b_tile,
                             bool accumulate, Where where = Where::here()) {
    start(d, a, b_tile, /*transposed=*/true, accumulate, where);
  }

 private:
  template <int kRegisters>
  static void start(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b_tile,
                    bool transposed, bool accumulate, Where where) {
    emulator::issue_product(
        {kElementOf<T>, 2 * kRegisters, /*transposed_a=*/false, transposed, accumulate,
         /*a_tile=*/0, b_tile, a, d},
        where);
  }
};

}  // namespace fx_fuser::ptx
