// The split product, on every architecture: loads and splits the weight in registers, and checks a
// warp's sums for overflow and imprecision.
#pragma once

#include "linear/linear_split_tiles.cuh"

namespace fx_fuser::linear_split {

// ---- the weight, from shared memory to the tensor core's operand --------------------------------

// In shared memory kDepth of k are stored as boxes of 32: [k][n][k], or [n][k][n] for an N-major
// weight. Rows are 128 bytes, swizzled: the 16-byte chunk c of row r is stored at chunk
// c ^ (r % 8).
//
// A thread's part of a stage: rows g and g + 8 of 16, chunks 2c and 2c + 1 of each 32 of k. Chunk
// 2c + j of box b is its fragment for k positions 32b + 16j...32b + 16j + 15: k is permuted, and x
// with it. For an N-major weight k is in the instruction's order: 2c, 2c + 1, 2c + 8 and 2c + 9 of
// each 16.
template <bool kNMajor, int kDepth>
struct RawWeight {
  static constexpr int kBoxBytes = kTileN * kLinearBox * 4;  // of [n][k]

  float4 chunk[kDepth / 16][2 /*row*/];

  // Where a thread's loads begin in a slot; `row` is row g in the tile.
  static __device__ __forceinline__ uint32_t place_of(int row, int g, int c) {
    if constexpr (kNMajor) {
      const int column = row % kLinearBox;
      return row / kLinearBox * (kDepth * kLinearBox * 4) + 2 * c * kLinearBox * 4 +
             ((column / 4 ^ 2 * c) << 4) + column % 4 * 4;
    } else {
      return row * kLinearBox * 4 + ((2 * c ^ g) << 4);
    }
  }

  // The place of the row 16 further on, for a row in the first half of its 32.
  static __device__ __forceinline__ uint32_t next_rows(uint32_t place) {
    return kNMajor ? place ^ 16 * 4 : place + 16 * kLinearBox * 4;
  }

  // Free of bank conflicts: the eight lanes of one phase have eight different swizzled chunks; for
  // an N-major weight the 32 lanes have the words of eight chunks.
  __device__ __forceinline__ void load(uint32_t address) {
    load_by(
        address, [](float4& chunk, uint32_t from) { chunk = ptx::load_shared(from); },
        [](float& word, uint32_t from) { word = ptx::load_shared_word(from); });
  }
  // The same if `reads`; predicated, no branch.
  __device__ __forceinline__ void load_if(bool reads, uint32_t address) {
    const auto load = [=](auto& value, uint32_t from) { ptx::load_shared_if(reads, value, from); };
    load_by(address, load, load);
  }

  template <class LoadChunk, class LoadWord>
  __device__ __forceinline__ void load_by(uint32_t address, const LoadChunk& load_chunk,
                                          const LoadWord& load_word) {
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if constexpr (kNMajor) {
          // Row g + 8 is two chunks on, and an odd k is swizzled to the neighbouring chunk.
          const auto load = [&](float& word, int k) {
            load_word(word, (address ^ row << 5 ^ (k & 1) << 4) + (step * 16 + k) * kLinearBox * 4);
          };
          float4& part = chunk[step][row];
          load(part.x, 0);
          load(part.y, 1);
          load(part.z, 8);
          load(part.w, 9);
        } else {
          const uint32_t chunk_address = step % 2 ? address ^ 16 : address;
          load_chunk(chunk[step][row],
                     chunk_address + step / 2 * kBoxBytes + row * 8 * kLinearBox * 4);
        }
      }
    }
  }

  // The largest of this lane's values of one of the two rows.
  __device__ __forceinline__ float largest_in_row(int row) const {
    float largest = largest_of(chunk[0][row]);
#pragma unroll
    for (int step = 1; step < kDepth / 16; ++step) {
      largest = fmaxf(largest, largest_of(chunk[step][row]));
    }
    return largest;
  }
};

// The largest of a row, of which each lane of the quad has a part.
__device__ __forceinline__ float largest_in_quad(float largest) {
  largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
}

template <int kDepth>
struct Fragments {
  uint32_t hi[kDepth / 16][4];
  uint32_t lo[kDepth / 16][4];

  template <class Raw>
  __device__ __forceinline__ void split_of(const Raw& raw, const float (&scale)[2]) {
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float4 v = raw.chunk[step][row];
        const SplitPair front = split(v.x * scale[row], v.y * scale[row]);
        const SplitPair back = split(v.z * scale[row], v.w * scale[row]);
        hi[step][row] = front.hi;
        hi[step][2 + row] = back.hi;
        lo[step][row] = front.lo;
        lo[step][2 + row] = back.lo;
      }
    }
  }

  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      ptx::pin(hi[step]);
      ptx::pin(lo[step]);
    }
  }
};

// ---- a warp's sums ------------------------------------------------------------------------------

// Sums over more than kLinearChunkK of k are sums of partial sums, each begun at zero: adding a
// thousand terms to one fp32 would have a larger error than cuBLAS's. The sum of finished parts is
// kept in global memory, as [block][16][thread] float4.
constexpr int kChunkTiles = kLinearChunkK / kTileK;

__device__ __forceinline__ float4* spilled_sums(const LinearSplitArgs& args) {
  return static_cast<float4*>(args.spilled) + blockIdx.x * (16 * kLinearConsumerThreads) +
         threadIdx.x;
}

__device__ __forceinline__ void spill_sums(const LinearSplitArgs& args, float (&sum)[64],
                                           bool first) {
  float4* place = spilled_sums(args);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float4 before = make_float4(0, 0, 0, 0);
    if (!first) before = place[i * kLinearConsumerThreads];
    place[i * kLinearConsumerThreads] =
        make_float4(before.x + sum[4 * i], before.y + sum[4 * i + 1], before.z + sum[4 * i + 2],
                    before.w + sum[4 * i + 3]);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[4 * i + e] = 0;
  }
}

__device__ __forceinline__ void restore_sums(const LinearSplitArgs& args, float (&sum)[64]) {
  const float4* place = spilled_sums(args);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float4 before = place[i * kLinearConsumerThreads];
    sum[4 * i] += before.x;
    sum[4 * i + 1] += before.y;
    sum[4 * i + 2] += before.z;
    sum[4 * i + 3] += before.w;
  }
}

// The rows of x whose sums in this warp are all small, but not all zero: bit 2i + t of a lane is
// row 8i + 2 (lane % 4) + t. The sums are still scaled, so each element has an error of at most
// 2^-25, and a sum one of 2^-25.8 times the Euclidean norms of both rows, if errors are random. For
// any data, `least` = kLeastSum sqrt(k) is where that error can reach 3e-7 of 16 sums. The pre-pass
// knows x's norm, so tile_epilogue.least_sum may be less. linear/NOTES.md says how far above it
// kinds of data are.
template <class TileEpilogue>
__device__ __forceinline__ uint32_t imprecise_rows(const float (&sum)[64], float least,
                                                   const TileEpilogue& tile_epilogue) {
  float smallest = INFINITY;  // over rows, of the larger of a thread's two sums
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      smallest = fminf(smallest, fmaxf(fabsf(sum[i + t]), fabsf(sum[i + 2 + t])));
    }
  }
  if (!__any_sync(0xFFFFFFFF, smallest < least)) return 0;
  uint32_t large = 0;
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float larger = fmaxf(fabsf(sum[4 * i + t]), fabsf(sum[4 * i + 2 + t]));
      const uint32_t bit = 1u << (2 * i + t);
      const int row = 8 * i + 2 * (threadIdx.x % 4) + t;
      large |= larger >= tile_epilogue.least_sum(row) ? bit : 0;
      any |= larger > 0 ? bit : 0;
    }
  }
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    large |= __shfl_xor_sync(0xFFFFFFFF, large, distance);
    any |= __shfl_xor_sync(0xFFFFFFFF, any, distance);
  }
  return any & ~large;
}

// The same for the rows of the weight, if the quad that has a row's sums has at least four that are
// not zero: bit 4 g + r is row g + 8 r of the warp's 16. The same in all lanes.
__device__ __forceinline__ uint32_t imprecise_weights(const float (&sum)[64], float least) {
  // One sum that is large enough clears a row. For most data a lane's first ones are.
  const float first =
      fminf(fmaxf(fabsf(sum[0]), fabsf(sum[1])), fmaxf(fabsf(sum[2]), fabsf(sum[3])));
  if (__all_sync(0xFFFFFFFF, first >= least)) return 0;
  constexpr uint32_t kFirstOfQuads = 0x11111111;
  float largest[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 64; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], fabsf(sum[i]));
  uint32_t rows = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float of_row = largest_in_quad(largest[r]);
    const bool is_imprecise = of_row > 0 && of_row < least;
    rows |= (__ballot_sync(0xFFFFFFFF, is_imprecise) & kFirstOfQuads) << r;
  }
  if (rows == 0) return 0;
  // If most of x is zero, as gradients may be, a few nonzero sums may all be small by chance.
  constexpr int kLeastSums = 4;
  uint32_t supported = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int sums = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) sums += (sum[4 * i + 2 * r] != 0) + (sum[4 * i + 2 * r + 1] != 0);
    sums += __shfl_xor_sync(0xFFFFFFFF, sums, 1);
    sums += __shfl_xor_sync(0xFFFFFFFF, sums, 2);
    supported |= (__ballot_sync(0xFFFFFFFF, sums >= kLeastSums) & kFirstOfQuads) << r;
  }
  return rows & supported;
}

// A scale that is too large makes a weight infinite, and then no sum of its row is finite. True if
// this warp has such a row. For most data a lane's first sums rule it out.
__device__ __forceinline__ bool is_overflowed(const float (&sum)[64]) {
  if (__all_sync(0xFFFFFFFF, isfinite(sum[0]) && isfinite(sum[2]))) return false;
  float least[2] = {INFINITY, INFINITY};
#pragma unroll
  for (int i = 0; i < 64; ++i) least[i / 2 % 2] = fminf(least[i / 2 % 2], fabsf(sum[i]));
  return __any_sync(0xFFFFFFFF, fmaxf(least[0], least[1]) == INFINITY);
}

// The scales of a thread's two rows of the weight, from their largest values. Those are exact if
// the tile is recomputed (`redoing`) or an earlier kernel has computed them; else they are guesses,
// and the scales get head-room.
__device__ __forceinline__ void find_scales(const LinearSplitArgs& args, bool redoing,
                                            const float (&largest)[2], float (&scale)[2],
                                            float (&unscale)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool is_true = redoing || args.weight_factors != nullptr;
    const Scale found = Scale::of(largest_in_quad(largest[r]), is_true ? 0 : kHeadRoom);
    scale[r] = found.scale;
    unscale[r] = found.unscale;
  }
}

}  // namespace fx_fuser::linear_split
