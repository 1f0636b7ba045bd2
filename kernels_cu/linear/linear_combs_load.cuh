// Of the gemm by combs (linear_combs_sm90.cuh): a's stages by a warpgroup's own loads and shifts,
// in place of TMA's.
//
// A thread has a chunk of 8 elements of one line of each comb. A comb's lines are all as far from a
// multiple of 16 bytes, in all tiles and steps. A chunk lies in two aligned vectors, of which lanes
// side by side read one twice: the second time from the L1 cache. Vectors wait in registers for one
// step; what is far away is asked for some steps ahead, to the L2 cache.
#pragma once

#include "common/ptx_sm90.cuh"
#include "linear/linear_combs_args.h"

namespace fx_fuser::combs {

constexpr int kChunk = 8;          // elements of 16 bytes
constexpr int kPrefetchSteps = 6;  // from DRAM to the L2 cache takes one or two
constexpr int kLoadWords = 8;      // of two vectors

// The first chunk from element `shift` of the words on, in the first four.
__device__ __forceinline__ void shift_down(uint32_t (&word)[kLoadWords], int shift) {
#pragma unroll
  for (int i = 0; i < kLoadWords - 2; ++i) word[i] = shift & 4 ? word[i + 2] : word[i];
#pragma unroll
  for (int i = 0; i < kLoadWords - 3; ++i) word[i] = shift & 2 ? word[i + 1] : word[i];
#pragma unroll
  for (int i = 0; i < kLoadWords - 4; ++i) {
    word[i] = __funnelshift_r(word[i], word[i + 1], (shift & 1) * 16);
  }
}

// Zeros from element `count` on.
__device__ __forceinline__ void cut_off(uint32_t (&word)[kLoadWords], int count) {
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    if (2 * i + 1 == count) word[i] &= 0xFFFF;
    if (2 * i >= count) word[i] = 0;
  }
}

template <class L>
struct Loader {
  static constexpr int kLanes = (L::kAlongA ? kCombStepK : L::kTileM) / kChunk;  // of a line
  static constexpr int kLinesOfComb = kCombThreads / 3 / kLanes;
  static_assert(kLinesOfComb * kCombs == (L::kAlongA ? L::kTileM : kCombStepK));

  const CombArgs& args;
  int line;   // of a comb's
  int chunk;  // of the line
  int lines;  // of the matrix
  int length;
  uint32_t word[kCombs][kLoadWords];

  __device__ __forceinline__ explicit Loader(const CombArgs& of) : args(of) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    line = thread / kLanes;
    chunk = thread % kLanes;
    lines = L::kAlongA ? args.m : args.k;
    length = L::kAlongA ? args.k : args.m;
  }

  // Of a comb's line, at the first element of this thread's chunk.
  __device__ __forceinline__ const uint8_t* at(int comb, int first_line, int first) const {
    const int64_t element =
        (int64_t{first_line} + kCombs * line + comb) * args.a.pitch + first + kChunk * chunk;
    return static_cast<const uint8_t*>(args.a.data) + 2 * element;
  }
  // Elements from a multiple of 16 bytes to a comb's chunks.
  __device__ __forceinline__ int shift_of(int comb) const { return args.a.offset[comb]; }
  // Elements of the chunk that exist.
  __device__ __forceinline__ int count(int comb, int first_line, int first) const {
    const int left = length - first - kChunk * chunk;
    return first_line + kCombs * line + comb < lines ? min(max(left, 0), kChunk) : 0;
  }

  __device__ __forceinline__ void fetch(int m, int k) {
    const int first_line = L::kAlongA ? m : k;
    const int first = L::kAlongA ? k : m;
    const uint8_t* from = at(0, first_line, first);
#pragma unroll
    for (int j = 0; j < kCombs; ++j) {
      const int elements = count(j, first_line, first);
      const int shift = shift_of(j);
      const auto* vector =
          reinterpret_cast<const uint4*>(from + 2 * (int64_t{j} * args.a.pitch - shift));
      if (elements > 0) {
        const uint4 one = vector[0];
        word[j][0] = one.x;
        word[j][1] = one.y;
        word[j][2] = one.z;
        word[j][3] = one.w;
      }
      if (elements + shift > kChunk) {
        const uint4 other = vector[1];
        word[j][4] = other.x;
        word[j][5] = other.y;
        word[j][6] = other.z;
        word[j][7] = other.w;
      }
    }
    bring_near(m, k);
  }

  // What will be fetched some steps later: of 128 bytes of each line a thread.
  __device__ __forceinline__ void bring_near(int m, int k) const {
    constexpr int kPieces = (L::kAlongA ? kCombStepK : L::kTileM) / kCombSpan;  // of a line
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int later = k + kPrefetchSteps * kCombStepK;
    const int64_t of_line = (L::kAlongA ? m : later) + thread / kPieces;
    const int first = (L::kAlongA ? later : m) + thread % kPieces * kCombSpan;
    if (of_line < lines && first < length) {
      ptx::prefetch(static_cast<const uint8_t*>(args.a.data) +
                    2 * (of_line * args.a.pitch + first));
    }
  }

  __device__ __forceinline__ void put(uint32_t stage, int m, int k) {
    const int first_line = L::kAlongA ? m : k;
    const int first = L::kAlongA ? k : m;
    const bool inside = first_line + (L::kAlongA ? L::kTileM : kCombStepK) <= lines &&
                        first + kLanes * kChunk <= length;
    // Of the line's place in a comb, which is a multiple of eight lines, or one of eight.
    const uint32_t to = stage + chunk / 8 * (kCombStepK * kCombSpanBytes) + line * kCombSpanBytes +
                        (chunk % 8 ^ line % 8) * 16;
#pragma unroll
    for (int j = 0; j < kCombs; ++j) {
      shift_down(word[j], shift_of(j));
      if (!inside) cut_off(word[j], count(j, first_line, first));
      ptx::store_shared(to + j * (kLinesOfComb * kCombSpanBytes),
                        make_uint4(word[j][0], word[j][1], word[j][2], word[j][3]));
    }
  }
};

}  // namespace fx_fuser::combs
