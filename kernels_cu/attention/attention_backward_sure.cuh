// The split attention's backward: tests whether a warp's gradients are as accurate as fp32
// arithmetic's. attention_split_sure.cuh explains the criteria.
#pragma once

#include "attention/attention_backward_tiles_sm90.cuh"
#include "attention/attention_split_rows.cuh"

namespace fx_fuser::attention_backward {

using namespace attention_split;

constexpr float kOfGradient = 0x1p-39f;  // error of G's halves, relative to a row's largest
constexpr float kSubnormal = 0x1p-112f;  // error of sums that are multiplied by two factors

// The error of G k, or Gᵀ q, with as many terms as columns. exponent: of the largest factor that
// undoes a scale of the row's G, 1 if G is all zeros; loss, largest: of the tiles.
__device__ __forceinline__ float lost_of_gradients(uint32_t exponent, float loss, float largest,
                                                   float columns) {
  if (exponent <= 1 || largest == 0) return 0;
  const float above = 2 * Scale::largest_of(__uint_as_float(exponent << 23));
  return above * sqrtf(columns) * (kLost * loss + kOfGradient * largest) + kSubnormal;
}

// The error of Pᵀ dO beyond dO's own, which the producer has checked. Ignores that of the weights,
// 2^-40 of 1: keys to which no query attends are common, and their gradients are negligible
// compared with the others'.
__device__ __forceinline__ float lost_of_values(float loss) {
  return loss < infinity() ? 0 : infinity();
}

// Per row of a thread: the largest factor, over all tiles, that undoes a scale of G.
struct LargestScales {
  uint32_t both = 0;  // their upper halves, in one register

  // A row's four lanes have the same.
  __device__ __forceinline__ void take(const float (&unscale)[2]) {
    const uint32_t of_tile =
        __byte_perm(__float_as_uint(unscale[0]), __float_as_uint(unscale[1]), 0x7632);
    both = ptx::larger_words(both, of_tile);
  }
  __device__ __forceinline__ uint32_t exponent(int r) const { return both >> (16 * r + 7) & 0xFF; }
};

// The accuracy test of a warp's gradients, at the end of its unit, from bounds of the unit's tiles.
template <class L>
struct UnitToTest {
  const AttentionBackwardArgs& args;
  const typename L::Shared& shared;
  const Unit& unit;
  Place place;
  LargestScales scales;
  TilesSoFar of_first;
  TilesSoFar of_second;
  float terms[2];   // of rows that are queries; for keys, the producer has tested each query's
  float factor[2];  // of the weights of rows that are queries: RestOfLse's

  static constexpr float kLeastOfSecond = L::kHasColumns ? kLeastOperand : kLeastGradient;

  __device__ __forceinline__ UnitToTest(const AttentionBackwardArgs& given,
                                        const typename L::Shared& shared_memory, const Unit& of,
                                        int number, const Place& here, const LargestScales& largest)
      : args(given), shared(shared_memory), unit(of), place(here), scales(largest) {
    const bool has_tiles = unit.first_tile < unit.tiles;
    const TilesSoFar(&told)[2] = shared.so_far[number % L::kUnits];
    of_first = has_tiles ? told[0] : TilesSoFar{};
    of_second = has_tiles ? told[1] : TilesSoFar{};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      terms[r] = factor[r] = 1;
      if constexpr (!L::kHasColumns) {
        const int64_t of_head = int64_t{unit.batch * args.heads + unit.head} * args.padded;
        const AttentionQuery& query = args.of_queries[of_head + place.row_of(unit, r)];
        terms[r] = query.terms;
        factor[r] = rest_of_lse(query).factor();
      }
    }
  }
  __device__ __forceinline__ bool is_there(int r) const {
    return place.row_of(unit, r) < args.row_count;
  }
  __device__ __forceinline__ float columns() const {
    return static_cast<float>(max(unit.tiles - unit.first_tile, 0) * L::kKeys);
  }
  __device__ __forceinline__ float2 unscale(int r) const {
    return shared.unscale[place.consumer][place.row + 8 * r];
  }

  // A sufficient test from cheap bounds, as the forward's.
  template <int kValues, int kRows>
  __device__ __forceinline__ bool is_clearly_sure(const float (&d_values)[kValues],
                                                  const float (&d_rows)[kRows]) const {
    constexpr float kBearableLoss = kBearable / (2 * kLost * 0x1p15f * L::kRootOfD);
    const float root_of_columns = fmaf(columns(), 0x1p-6f, 16);  // or more
    const float of_tiles =
        2 * 0x1p14f * root_of_columns * (kLost * of_first.loss + kOfGradient * of_first.largest);
    // Sums of values up to this cannot overflow.
    constexpr float kLarge = 0x1p60f;
    bool sure = of_second.loss < infinity();
    if constexpr (L::kMakesValues) sure &= of_second.largest <= kLarge;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 of_row = unscale(r);
      // No branches.
      bool is_row_sure = (Scale::largest_of(of_row.x) >= kLeastOperand) &
                         (of_row.x * args.log_scale * of_first.loss <= kBearableLoss);
      if constexpr (L::kMakesRows) {
        const float of_scales = __uint_as_float(scales.exponent(r) << 23);
        const float lost = fmaf(of_scales, of_tiles, kSubnormal);
        is_row_sure &= (Scale::largest_of(of_row.y) >= kLeastOfSecond) &
                       (of_row.y * of_second.loss <= kBearableLoss * terms[r]) &
                       (largest_of_four(d_rows, r) * kBearable >= lost) & (lost <= kLarge);
      }
      // A weight that is NaN would be in all of a row's sums.
      if constexpr (L::kMakesValues) is_row_sure &= largest_of_four(d_values, r) < infinity();
      sure &= is_row_sure | !is_there(r);
    }
    return __all_sync(0xFFFFFFFF, sure);
  }

  template <class First, class Second, int kValues, int kRows>
  __device__ __forceinline__ bool is_sure(const First& first, const Second& second,
                                          const void* second_hi, const float (&d_values)[kValues],
                                          const float (&d_rows)[kRows]) const {
    float first_squares[2];
    float second_squares[2];
    first.squares(place, 0, first_squares);
    if constexpr (L::kMakesRows) {
      second.squares(place, L::kKeepsSecond ? 0 : ptx::shared_address(second_hi), second_squares);
    }
    bool sure = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 of_row = unscale(r);
      bool is_row_sure = is_product_sure(of_row.x * args.log_scale, args.log_scale,
                                         first_squares[r], kLeastOperand, of_first.loss, kBearable);
      if constexpr (L::kMakesRows) {
        is_row_sure &= is_product_sure(of_row.y, 1, second_squares[r], kLeastOfSecond,
                                       of_second.loss, kBearable * terms[r]);
        is_row_sure &= is_result_sure(
            largest_in_row(d_rows, r),
            lost_of_gradients(scales.exponent(r), of_first.loss, of_first.largest, columns()));
      }
      if constexpr (L::kMakesValues) {
        is_row_sure &= is_result_sure(largest_in_row(d_values, r), lost_of_values(of_second.loss));
      }
      sure &= is_row_sure || !is_there(r);
    }
    return __all_sync(0xFFFFFFFF, sure);
  }
};

}  // namespace fx_fuser::attention_backward
