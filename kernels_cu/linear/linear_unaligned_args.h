// Arguments and shared-memory layout of the gemm of unaligned 16-bit operands
// (linear_unaligned.cuh).
//
// A *chunk* is 16 bytes of shared memory, 8 elements. A *line* is a sequence of adjacent elements
// of an operand: a row's k, or the rows at one k. A *stage* has 64 k of both operands, or 32 if
// there are no more.
#pragma once

#include <cstdint>

#include "common/divisor.h"
#include "common/operands.h"

namespace fx_fuser {

constexpr int kUnalignedStages = 3;
constexpr int kUnalignedChunk = 8;   // elements
constexpr int kUnalignedGroupM = 8;  // tiles of rows per group: they stay in L2 while it runs

// A block's tile: the grid of warps, and what each of them computes.
struct UnalignedShape {
  int warps_m;
  int warps_n;
  int warp_m;    // rows
  int warp_n;    // columns
  int resident;  // blocks per multiprocessor, which bounds a thread's registers

  constexpr int tile_m() const { return warps_m * warp_m; }
  constexpr int tile_n() const { return warps_n * warp_n; }
  constexpr int threads() const { return 32 * warps_m * warps_n; }
  constexpr int stage_bytes(int step_k) const { return (tile_m() + tile_n()) * step_k * 2; }
  // Staged results: rows have the same offset from a multiple of 16 bytes as in global memory.
  constexpr int staged_bytes(int element_bytes) const {
    return tile_m() * (tile_n() * element_bytes + 16);
  }
  // stages: fewer than kUnalignedStages if k has fewer steps.
  constexpr int shared_bytes(int stages, int step_k, int element_bytes) const {
    const int of_stages = stages * stage_bytes(step_k);
    const int staged = staged_bytes(element_bytes);
    return of_stages > staged ? of_stages : staged;
  }
};

constexpr UnalignedShape kUnalignedShapes[] = {
    {2, 1, 16, 32, 12}, {2, 2, 16, 32, 6}, {4, 1, 16, 32, 6}, {2, 2, 32, 32, 4}, {2, 4, 64, 32, 2},
};
constexpr int kUnalignedShapeCount = sizeof(kUnalignedShapes) / sizeof(kUnalignedShapes[0]);

// Bits of an operand's form, for which a kernel is compiled: k, not rows, are adjacent in memory;
// all lines begin at multiples of 16 bytes.
constexpr bool is_along_k(int form) { return form & 1; }
constexpr bool has_aligned_lines(int form) { return form & 2; }

// One matrix of a batch is [lines][line_size]; strides in elements.
struct UnalignedOperand {
  const void* data;
  const void* end;          // behind the last element of the last matrix
  int64_t batch_stride[2];  // outer, inner
  int64_t line_stride;
};

struct UnalignedResult {
  void* data;               // [outer, inner, m, n], columns adjacent; or null
  int64_t batch_stride[2];  // outer, inner
  int64_t row_stride;
};

struct UnalignedArgs {
  UnalignedOperand a;  // [m, k]
  UnalignedOperand b;  // [n, k]
  UnalignedResult out;
  UnalignedResult c;                   // a bᵀ + bias, in a's type
  const void* bias;                    // [n], or null
  Strided<4> operand[kMaxInputs - 1];  // [outer, inner, rows, columns]
  float scalar[kMaxScalars];
  int32_t m;
  int32_t n;
  int32_t k;
  int32_t m_tiles;          // per matrix
  Divisor<uint32_t> inner;  // batches
  Divisor<uint32_t> tiles;  // per matrix
};

}  // namespace fx_fuser
