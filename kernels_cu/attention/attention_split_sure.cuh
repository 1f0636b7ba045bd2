// The split attention: tests whether a warp's results are as accurate as fp32 arithmetic's. If that
// is not certain, the warp recomputes its rows in fp32 (attention_split_repair.cuh).
//
// The halves of a scaled value keep 22 bits, as many as fp32 arithmetic needs, but have an absolute
// error of up to 2^-25: values that are small compared with the largest that shares their scale
// lose more. If such errors are random, the product of a row and a tile's line is off by 2^-25
// times the Euclidean norms of both, scaled. This must be small
// - for a logit, compared with 1;
// - for dO vᵀ, compared with the sum of |out · dO| (in fp32 delta has such an error, too);
// - for a result, compared with the largest of its row.
// If columns of tiles are columns of results, each must keep its own relative precision: the
// producer checks that, part by part.
//
// Infinities and NaN make results that are not finite, which fails the test. So do values that are
// too large, or so small that factors would be subnormal.
#pragma once

#include "attention/attention_split_tiles_sm90.cuh"
#include "common/split_sm90.cuh"

namespace fx_fuser::attention_split {

constexpr float kLost = 0x1p-25f;  // absolute error of a scaled value
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kBearable = 0x1p-20f;  // relative error allowed; random ones are far smaller

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7F800000); }
__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000); }

// Whether halves lose too much of values whose largest is this.
__device__ __forceinline__ bool loses(float largest, float scale) {
  return largest > 0 && largest * scale < kLost / kBearable;
}

// The rounding error of lse log2(e) as a factor near 1: a query's weights are this factor times
// exp2(score - lse). It is stored as factor - 1, of which eight bits are more than the factor as a
// float would keep.
struct RestOfLse {
  float beside_one;

  static __device__ __forceinline__ RestOfLse of(float rest) { return {rest * -kLn2}; }
  __device__ __forceinline__ float factor() const { return 1 + beside_one; }
};

// Both are truncated to 16 bits; a nonzero largest stays nonzero.
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

// OfTile's strain, for a query whose dO is in a tile with this scale.
__device__ __forceinline__ float strain_of(const AttentionQuery& query, float scale) {
  const float largest = largest_d_out(query);
  if (largest == 0) return 0;
  const bool fits = !loses(largest, scale) && query.terms > 0;
  return fits ? ptx::reciprocal(query.terms) : infinity();
}

// Tests products of a row with tiles. unscale: the row's, times `factor`; squares: the sum of
// squares of its scaled values; loss: of the tiles.
__device__ __forceinline__ bool is_product_sure(float unscale, float factor, float squares,
                                                float least, float loss, float bearable) {
  if (squares == 0) return true;
  return Scale::largest_of(unscale) >= least * factor &&
         2 * kLost * unscale * sqrtf(squares) * loss <= bearable;
}

// largest: magnitude of a row's results, or NaN.
__device__ __forceinline__ bool is_result_sure(float largest, float lost) {
  return largest * kBearable >= lost && largest < infinity();
}

// A sufficient test for a row of the forward, from cheap bounds that hold for nearly all rows: true
// if both tests above pass in any case. The norm of the row's scaled values is at most
// root_of_d 2^15. some: magnitude of any of its results; sum: of its weights, the largest of which
// is 2^15; columns: their number; value: the largest value, scaled.
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
