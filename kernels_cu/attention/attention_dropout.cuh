// Attention's dropout: which weights are dropped. This depends only on the seed, the head, the
// query and the key, so that forward and backward agree with any tiles.
//
// One call of Philox serves two queries, q and q + 8, and four keys, k, k + 1, k + 8 and k + 9; its
// counter is q, k and the head. Word 2i + j is for query q + 8i and keys k + 8j, in its lower half,
// and k + 8j + 1. If rows are queries, these eight are a thread's in two groups of columns. If rows
// are keys, a thread has half of the weights of two calls, for neighbouring queries: it makes one
// of the calls, the lane with the next key makes the other, and they exchange bits.
//
// A weight is dropped if its number, 15 of 16 bits, is below the drop probability times 2^15. Two
// are compared at once, as magnitudes of fp16, which order like their bits. Numbers that are NaN as
// fp16 are never dropped, which bounds the probability.
#pragma once

#include "attention/attention_split_tiles_sm90.cuh"
#include "common/philox.cuh"

namespace fx_fuser::attention_split {

// Per 16-bit half: all bits if it is dropped, else none.
__device__ __forceinline__ uint32_t dropped_of(const AttentionDropout& dropout, uint32_t word) {
  return __hlt2_mask(__habs2(reinterpret_cast<const __half2&>(word)),
                     reinterpret_cast<const __half2&>(dropout.below));
}

__device__ __forceinline__ uint2 seed_of(const AttentionDropout& dropout) {
  return *reinterpret_cast<const uint2*>(dropout.seed);
}

// A bit per score of a thread's tile: score s is bit s / 2 % 16 + s % 2 * 16 of word s / 32. The
// words are in shared memory: registers are few, and ptxas would compute them where they are read,
// which delays the next products.
template <class L>
struct Dropped {
  static constexpr int kCallsOfWord = 4;
  static constexpr int kWords = L::kScores / 32;

  // head: among all batches' heads of queries; g, c: Place's; row: this thread's first; column: the
  // tile's first.
  static __device__ __forceinline__ void find(typename L::Shared& shared,
                                              const AttentionDropout& dropout, int head, int g,
                                              int c, int row, int column) {
    // Read each time, so that no register holds it in between.
    const uint2 seed = seed_of(dropout);
    const int odd = L::kHasColumns ? g % 2 : 0;
    const uint32_t of_row = row - odd;
    const uint32_t of_columns = column + 2 * c + odd;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint32_t word = 0;
#pragma unroll
      for (int call = 0; call < kCallsOfWord; ++call) {
        const uint32_t of_column = of_columns + 16 * (kCallsOfWord * i + call);
        const uint32_t query = L::kHasColumns ? of_column : of_row;
        const uint32_t key = L::kHasColumns ? of_row : of_column;
        const uint4 made = philox(seed, {query, key, static_cast<uint32_t>(head), 0});
        const uint32_t numbers[4] = {made.x, made.y, made.z, made.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int pair = 4 * call + (L::kHasColumns ? n : n / 2 + n % 2 * 2);
          word |= dropped_of(dropout, numbers[n]) & 0x10001u << pair;
        }
      }
      if constexpr (L::kHasColumns) {
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, word, 4);
        word = __byte_perm(word, other, odd == 0 ? 0x5410 : 0x3276);
      }
      word_of(shared, i) = word;
    }
  }

  static __device__ __forceinline__ uint32_t& word_of(typename L::Shared& shared, int word) {
    return shared.dropped[word][ptx::thread_index()];
  }
  static __device__ __forceinline__ bool has(uint32_t word, int score) {
    return (word >> (score / 2 % 16 + score % 2 * 16) & 1) != 0;
  }
};

// Whether one weight is dropped.
__device__ __forceinline__ bool is_dropped(const AttentionDropout& dropout, int head, int query,
                                           int key) {
  const uint4 made =
      philox(seed_of(dropout), {static_cast<uint32_t>(query & ~8), static_cast<uint32_t>(key & ~9),
                                static_cast<uint32_t>(head), 0});
  const uint2 of_query = (query & 8) == 0 ? make_uint2(made.x, made.y) : make_uint2(made.z, made.w);
  const uint32_t word = (key & 8) == 0 ? of_query.x : of_query.y;
  return (dropped_of(dropout, word) >> (key % 2 * 16) & 1) != 0;
}

// Whether all weights of a query that sees this many keys are dropped.
__device__ __forceinline__ bool are_all_dropped(const AttentionDropout& dropout, int head,
                                                int query, int keys) {
  int key = 0;
#pragma unroll 1
  while (key < keys && is_dropped(dropout, head, query, key)) ++key;
  return key == keys;
}

}  // namespace fx_fuser::attention_split
