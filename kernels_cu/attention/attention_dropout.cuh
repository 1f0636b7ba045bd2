// Of the attention by fp16 halves: which weights dropout takes. A function of the seed, the head,
// the query and the key alone, so that forward and backward agree, whatever their tiles are.
//
// A call of Philox is for two queries, q and q + 8, and four keys, k, k + 1, k + 8 and k + 9; its
// counter is q, k and the head. Word 2i + j is for query q + 8i and keys k + 8j, in its lower half,
// and k + 8j + 1. Where rows are queries, the eight are those that a thread has of two groups of
// columns. Where they are keys, it has half of those of two calls, of queries that are neighbours:
// it makes one of them, the lane that has the next key makes the other, and they exchange bits.
//
// A weight is dropped where its number, 15 of 16 bits, is below the share that is, of 2^15. Two
// are compared at once, as magnitudes of fp16, whose order is that of their bits; what would be a
// NaN is never dropped, which bounds the share.
#pragma once

#include "attention/attention_split_tiles_sm90.cuh"
#include "common/philox.cuh"

namespace fx_fuser::attention_split {

// All bits of a half that is dropped, else none.
__device__ __forceinline__ uint32_t dropped_of(const AttentionDropout& dropout, uint32_t word) {
  return __hlt2_mask(__habs2(reinterpret_cast<const __half2&>(word)),
                     reinterpret_cast<const __half2&>(dropout.below));
}

__device__ __forceinline__ uint2 seed_of(const AttentionDropout& dropout) {
  return *reinterpret_cast<const uint2*>(dropout.seed);
}

// Of a thread's scores of a tile, a bit each: of score s bit s / 2 % 16 + s % 2 * 16 of word
// s / 32. They lie in shared memory: in registers, which are few, ptxas makes them where they are
// read, in the way of the next products.
template <class L>
struct Dropped {
  static constexpr int kCallsOfWord = 4;
  static constexpr int kWords = L::kScores / 32;

  // head: of all batches' of queries; g, c: as Place's; row: this thread's first; column: the
  // tile's first.
  static __device__ __forceinline__ void find(typename L::Shared& shared,
                                              const AttentionDropout& dropout, int head, int g,
                                              int c, int row, int column) {
    // Read anew each time, so that no register holds it meanwhile.
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

// One weight.
__device__ __forceinline__ bool is_dropped(const AttentionDropout& dropout, int head, int query,
                                           int key) {
  const uint4 made =
      philox(seed_of(dropout), {static_cast<uint32_t>(query & ~8), static_cast<uint32_t>(key & ~9),
                                static_cast<uint32_t>(head), 0});
  const uint2 of_query = (query & 8) == 0 ? make_uint2(made.x, made.y) : make_uint2(made.z, made.w);
  const uint32_t word = (key & 8) == 0 ? of_query.x : of_query.y;
  return (dropped_of(dropout, word) >> (key % 2 * 16) & 1) != 0;
}

// All of a query, which sees so many keys.
__device__ __forceinline__ bool are_all_dropped(const AttentionDropout& dropout, int head,
                                                int query, int keys) {
  int key = 0;
#pragma unroll 1
  while (key < keys && is_dropped(dropout, head, query, key)) ++key;
  return key == keys;
}

}  // namespace fx_fuser::attention_split
