// The gemm of unaligned operands (linear_unaligned.cuh): loads from global memory to aligned chunks
// in shared memory.
//
// Beyond the last row garbage is read: results from it are not stored. Beyond the last k there are
// zeros.
#pragma once

#include "common/ptx.cuh"
#include "linear/linear_unaligned_args.h"

namespace fx_fuser::unaligned {

// A run is what a thread reads at once: one chunk of aligned lines, so that neighbouring lanes read
// whole sectors; of other lines two chunks, through the three aligned vectors that contain them.
constexpr int kRunVectors = 3;
constexpr int kRunWords = 4 * kRunVectors;

// An operand's part of a stage: lines of chunks. kAlongK: lines are rows, with adjacent k; else
// lines are k, with adjacent rows.
template <int kRows_, int kStepK_, bool kAlongK_, bool kIsAligned_, int kThreads>
struct Part {
  static constexpr bool kIsAligned = kIsAligned_;
  static constexpr int kRunChunks = kIsAligned ? 1 : 2;
  static constexpr int kRun = kRunChunks * kUnalignedChunk;  // elements
  static constexpr int kRows = kRows_;
  static constexpr int kStepK = kStepK_;
  static constexpr bool kAlongK = kAlongK_;
  static constexpr int kLines = kAlongK ? kRows : kStepK;
  static constexpr int kChunks = (kAlongK ? kStepK : kRows) / kUnalignedChunk;
  static constexpr int kLineBytes = kChunks * 16;
  static constexpr int kBytes = kLines * kLineBytes;
  static constexpr int kRunsOfLine = kChunks / kRunChunks;
  // A thread's runs are kLinesAtOnce lines apart. If there are many threads, some have no run.
  static constexpr bool kHasIdle = kThreads > kLines* kRunsOfLine;
  static constexpr int kLinesAtOnce = kHasIdle ? kLines : kThreads / kRunsOfLine;
  static constexpr int kRuns = kLines / kLinesAtOnce;
  static_assert(kLines % kLinesAtOnce == 0 && kLinesAtOnce % 8 == 0);
  static_assert(kChunks == 4 || kChunks % 8 == 0);

  // Swizzle: one column's chunks of eight lines, as ldmatrix reads them, cover all banks. It
  // repeats every eight lines.
  static __device__ __forceinline__ int turned(int line, int chunk) {
    return kChunks == 4 ? chunk ^ line / 2 % 4 : chunk ^ line % 8;
  }
  static __device__ __forceinline__ uint32_t place(int line, int chunk) {
    return line * kLineBytes + turned(line, chunk) * 16;
  }
};

// Shifts the words so that element `shift` becomes the first.
__device__ __forceinline__ void shift_down(uint32_t (&word)[kRunWords], int shift) {
#pragma unroll
  for (int i = 0; i < kRunWords - 2; ++i) word[i] = shift & 4 ? word[i + 2] : word[i];
#pragma unroll
  for (int i = 0; i < kRunWords - 3; ++i) word[i] = shift & 2 ? word[i + 1] : word[i];
#pragma unroll
  for (int i = 0; i < kRunWords - 4; ++i) {
    word[i] = __funnelshift_r(word[i], word[i + 1], (shift & 1) * 16);
  }
}

// Clears the elements from `count` on.
__device__ __forceinline__ void cut_off(uint32_t (&word)[kRunWords], int count) {
#pragma unroll
  for (int i = 0; i < kUnalignedChunk; ++i) {
    if (2 * i + 1 == count) word[i] &= 0xFFFF;
    if (2 * i >= count) word[i] = 0;
  }
}

__device__ __forceinline__ void load_vector(uint32_t* to, const uint8_t* from) {
  const uint4 vector = *reinterpret_cast<const uint4*>(from);
  to[0] = vector.x;
  to[1] = vector.y;
  to[2] = vector.z;
  to[3] = vector.w;
}

// Loads an aligned vector, of which at least one element is ahead of `end`. Nothing behind `end` is
// read.
__device__ __forceinline__ void load_vector_until(uint32_t* to, const uint8_t* from,
                                                  const uint8_t* end) {
  if (from + 16 <= end) return load_vector(to, from);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[i] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint8_t* element = from + 4 * i + 2 * half;
      if (element < end) {
        to[i] |= static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(element)) << 16 * half;
      }
    }
  }
}

// Loads an operand's part of each stage. kIsAligned: all lines begin at multiples of 16 bytes and
// are copied by cp.async (`copy`). Others are held in registers from `fetch` to `put`. A line's
// offset from a multiple of 16 bytes is the same in all steps.
template <class P>
struct Loader {
  static constexpr bool kIsAligned = P::kIsAligned;
  static constexpr int kRun = P::kRun;

  const uint8_t* from;  // the first run at k = 0
  const uint8_t* end;
  int64_t next_line;  // bytes from a run to the thread's next
  int64_t next_step;
  int64_t furthest;  // end of what the tile reads at k = 0, in bytes from the matrix's beginning
  int64_t bytes;     // of the matrix and what follows, up to `end`
  int k;
  int line;      // of the first run
  int chunk;     // of all runs
  int last_run;  // that exists, if lines are rows
  int width;     // elements of a run that exist, if lines are k
  uint32_t word[kIsAligned ? 1 : P::kRuns][kRunWords];

  __device__ __forceinline__ Loader(const UnalignedOperand& operand, int64_t batch_offset,
                                    int first_row, int rows, int all_k)
      : k(all_k) {
    const int thread = static_cast<int>(ptx::thread_index());
    line = thread / P::kRunsOfLine;
    chunk = thread % P::kRunsOfLine * P::kRunChunks;
    const uint8_t* matrix = static_cast<const uint8_t*>(operand.data) + 2 * batch_offset;
    end = static_cast<const uint8_t*>(operand.end);
    bytes = end - matrix;
    const int64_t line_bytes = 2 * operand.line_stride;
    next_line = P::kLinesAtOnce * line_bytes;
    constexpr int kSlack = kIsAligned ? 0 : 14;  // to a multiple of 16 bytes
    if constexpr (P::kAlongK) {
      const int row = min(first_row + line, rows - 1);
      last_run = (rows - 1 - row) / P::kLinesAtOnce;
      width = kRun;
      from = matrix + row * line_bytes + 16 * chunk;
      next_step = 2 * P::kStepK;
      furthest = min(first_row + P::kRows, rows) * line_bytes - line_bytes + next_step + kSlack;
    } else {
      // Runs beyond the last row read the first run's elements.
      const int row = first_row + chunk * kUnalignedChunk;
      last_run = P::kRuns - 1;
      width = min(rows - row, kRun);
      from = matrix + line * line_bytes + int64_t{2} * (width > 0 ? row : first_row);
      if (width <= 0) width = min(rows - first_row, kRun);
      next_step = P::kStepK * line_bytes;
      furthest = next_step - line_bytes + int64_t{2} * (first_row + P::kRows) + kSlack;
    }
  }

  __device__ __forceinline__ bool is_idle() const { return P::kHasIdle && line >= P::kLines; }
  // How many k of a step exist.
  __device__ __forceinline__ int left(int step) const {
    return min(k - step * P::kStepK, P::kStepK);
  }
  // Whether everything that a step reads is inside the operand.
  __device__ __forceinline__ bool is_inside(int step) const {
    return furthest + step * next_step <= bytes;
  }
  __device__ __forceinline__ const uint8_t* run_at(int step, int index) const {
    return from + step * next_step + min(index, last_run) * next_line;
  }
  // How many elements of a run have a k that exists. of_left: the step's k that exist.
  __device__ __forceinline__ int count(int index, int of_left) const {
    if constexpr (P::kAlongK) {
      return min(max(of_left - chunk * kUnalignedChunk, 0), kRun);
    } else {
      return line + index * P::kLinesAtOnce < of_left ? kRun : 0;
    }
  }
  __device__ __forceinline__ uint32_t place(int index) const {
    return P::place(line, chunk) + index * (P::kLinesAtOnce * P::kLineBytes);
  }

  __device__ __forceinline__ void copy(int step, uint32_t stage) const {
    if constexpr (kIsAligned) {
      if (is_idle()) return;
      const int of_left = left(step);
      if (of_left == P::kStepK && is_inside(step)) {
#pragma unroll
        for (int i = 0; i < P::kRuns; ++i) ptx::copy_async_16(stage + place(i), run_at(step, i));
        return;
      }
#pragma unroll
      for (int i = 0; i < P::kRuns; ++i) {
        const int elements = min(count(i, of_left), width);
        ptx::copy_async_16(stage + place(i), elements > 0 ? run_at(step, i) : from, 2 * elements);
      }
    }
  }

  template <bool kIsInside>
  __device__ __forceinline__ void fetch_runs(int step, int of_left) {
#pragma unroll
    for (int i = 0; i < P::kRuns; ++i) {
      const uint8_t* run = run_at(step, i);
      const int ahead = static_cast<int>(reinterpret_cast<uintptr_t>(run) & 15);
      const int elements = kIsInside ? count(i, of_left) : min(count(i, of_left), width);
      if (elements == 0) continue;
#pragma unroll
      for (int v = 0; v < kRunVectors; ++v) {
        if (16 * v >= ahead + 2 * elements) continue;
        if constexpr (kIsInside) {
          load_vector(&word[i][4 * v], run - ahead + 16 * v);
        } else {
          load_vector_until(&word[i][4 * v], run - ahead + 16 * v, end);
        }
      }
    }
  }

  __device__ __forceinline__ void fetch(int step) {
    if constexpr (!kIsAligned) {
      if (is_idle()) return;
      if (is_inside(step)) {
        fetch_runs<true>(step, left(step));
      } else {
        fetch_runs<false>(step, left(step));
      }
    }
  }

  __device__ __forceinline__ void put(int step, uint32_t stage) {
    if constexpr (!kIsAligned) {
      if (is_idle()) return;
      const int of_left = left(step);
#pragma unroll
      for (int i = 0; i < P::kRuns; ++i) {
        shift_down(word[i], static_cast<int>(reinterpret_cast<uintptr_t>(run_at(0, i)) & 15) / 2);
        if (of_left < P::kStepK) cut_off(word[i], count(i, of_left));
        ptx::store_shared(stage + place(i),
                          make_uint4(word[i][0], word[i][1], word[i][2], word[i][3]));
        ptx::store_shared((stage + place(i)) ^ 16,
                          make_uint4(word[i][4], word[i][5], word[i][6], word[i][7]));
      }
    }
  }
};

}  // namespace fx_fuser::unaligned
