// Of the attention by fp16 halves: are a warp's results as exact as fp32 arithmetic's? Where they
// are not surely so, the warp makes its rows again in fp32 (attention_split_repair.cuh).
//
// A scaled value's halves keep 22 bits of it, as much as fp32 arithmetic needs, but no less than
// 2^-25: what is small beside the largest that shares its scale loses more. If such errors are
// random, a product of a row and a tile's line is off by 2^-25 times the Euclidean norm of both,
// scaled. Of a logit that is to be little beside 1; of dO vᵀ beside the sum of |out · dO|, of which
// delta has such an error in fp32 too; of a result beside the largest of its row. Columns of tiles
// have a precision of their own where results have them: the producer sees to it, part by part.
//
// Infinities and NaN make results that are not finite, and count as lost. So does all that is too
// large, and what is so small that factors would be subnormal.
#pragma once

#include "attention/attention_split_tiles_sm90.cuh"
#include "common/split_sm90.cuh"

namespace fx_fuser::attention_split {

constexpr float kLost = 0x1p-25f;  // of a scaled value
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kBearable = 0x1p-20f;  // of what is compared: random errors are less by far

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7F800000); }
__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000); }

// Do halves lose too much of values of which this is the largest?
__device__ __forceinline__ bool loses(float largest, float scale) {
  return largest > 0 && largest * scale < kLost / kBearable;
}

// What lse by log2(e) is, beside the float that is nearest to it: a query's weights are this factor
// times exp2(score - lse). Eight bits of what it is beside 1 are more than its float has.
struct RestOfLse {
  float beside_one;

  static __device__ __forceinline__ RestOfLse of(float rest) { return {rest * -kLn2}; }
  __device__ __forceinline__ float factor() const { return 1 + beside_one; }
};

// Both are cut off, the largest not to zero.
__device__ __forceinline__ uint32_t pack(float largest, const RestOfLse& rest) {
  const uint32_t bits = __float_as_uint(largest);
  return max(bits >> 16, min(bits, 1u)) | (__float_as_uint(rest.beside_one) & 0xFFFF0000);
}
__device__ __forceinline__ float largest_d_out(const AttentionQuery& query) {
  return __uint_as_float(query.packed << 16);
}
__device__ __forceinline__ RestOfLse rest_of_lse(const AttentionQuery& query) {
  return {__uint_as_float(query.packed & 0xFFFF0000)};
}

// OfTile's strain, of a query whose dO is in a tile with this scale.
__device__ __forceinline__ float strain_of(const AttentionQuery& query, float scale) {
  const float largest = largest_d_out(query);
  if (largest == 0) return 0;
  const bool fits = !loses(largest, scale) && query.terms > 0;
  return fits ? ptx::reciprocal(query.terms) : infinity();
}

// Of products of a row with tiles. unscale: of the row, times `factor`; squares: of its scaled
// values, summed up; loss: of the tiles.
__device__ __forceinline__ bool is_product_sure(float unscale, float factor, float squares,
                                                float least, float loss, float bearable) {
  if (squares == 0) return true;
  return Scale::largest_of(unscale) >= least * factor &&
         2 * kLost * unscale * sqrtf(squares) * loss <= bearable;
}

// largest: of a row's results, in magnitude, or a NaN.
__device__ __forceinline__ bool is_result_sure(float largest, float lost) {
  return largest * kBearable >= lost && largest < infinity();
}

// Of a row of the forward, whose scaled values' norm is at most root_of_d 2^15: are both tests
// passed in any case? Bounds that cost little say so of nearly all rows. some: of one of its
// results in magnitude; sum: of its weights, of which the largest is 2^15; columns: how many;
// value: the largest one, scaled.
__device__ __forceinline__ bool is_clearly_sure(float unscale, float factor, float root_of_d,
                                                float loss, float some, float sum, float columns,
                                                float value) {
  const float root_of_columns = fmaf(columns, 0x1p-6f, 16);  // or more
  // No branches.
  return (Scale::largest_of(unscale) >= kLeastOperand * factor) &
         (unscale * loss <= kBearable / (2 * kLost * 0x1p15f * root_of_d)) &
         (some * (kBearable / kLost) >= fmaf(root_of_columns, value, sum));
}

}  // namespace fx_fuser::attention_split
