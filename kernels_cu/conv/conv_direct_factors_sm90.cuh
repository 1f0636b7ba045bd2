// The direct convolution's backward: loads of dy, and dc as an operand of the weight gradient's
// products, scaled and rounded to 16 bits.
#pragma once

#include "conv/conv_direct_gradients_sm90.cuh"

namespace fx_fuser::conv_direct {

// How a thread's pairs of positions are read.
enum class Rows {
  kPairs,   // both elements at once: pairs are neighbours and aligned
  kStrip,   // one strip, so that all elements are neighbours
  kStrips,  // several strips
};

// A unit's gradients of a thread's first channel.
template <class X>
struct Gradients {
  const Stored<X>* row;  // the unit's first element or, with several strips, the strip's first
  uint32_t limit;        // end of its elements in a table of places
};

// Loads a thread's gradients of a tile in the layout of its sums, for `values_of`; zeros where
// there is no element. Returns which of its positions 8i + 2c + t are elements, as bits 2i + t.
template <class X, Rows kRows>
__device__ __forceinline__ uint32_t load_gradients(const ConvDirectArgs& args,
                                                   const Gradients<X>& gradients, int index,
                                                   const bool (&is_output)[2], const uint4* place,
                                                   Loaded<X> (&dy)[32]) {
  Unit unit;  // recomputed: keeping it would cost registers
  if constexpr (kRows == Rows::kStrips) unit = Unit::at(args, index);
  const auto eight_planes =
      8 * static_cast<uint32_t>(args.out_h) * static_cast<uint32_t>(args.out_w);
  uint32_t valid = 0;
#pragma unroll
  for (int quad = 0; quad < 2; ++quad) {
    const uint4 loaded = place[quad * 4];
    const uint32_t word[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = quad * 4 + i;
      uint32_t at[2] = {word[i] & 0xFFFF, word[i] >> 16};
      bool is_valid[2];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        is_valid[t] = at[t] < gradients.limit;
        if constexpr (kRows == Rows::kStrips) {
          const int element = unit.first + static_cast<int>(at[t] / 4);
          const int in_row = Unit::row_of(args, element);
          const int column = element - in_row * static_cast<int>(args.strip.size);
          at[t] = 4 * static_cast<uint32_t>(in_row * args.out_w + column);
          is_valid[t] = is_valid[t] && unit.column + column < args.out_w;
        }
        valid |= static_cast<uint32_t>(is_valid[t]) << (2 * n + t);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto* bytes =
            reinterpret_cast<const uint8_t*>(gradients.row + (r == 1 ? eight_planes : 0));
        Loaded<X>* to = &dy[4 * n + 2 * r];
        if constexpr (kRows == Rows::kPairs && kSplits<X>) {
          const float2 both = ptx::load_global_if(is_output[r] && is_valid[0],
                                                  reinterpret_cast<const float2*>(bytes + at[0]));
          to[0] = both.x;
          to[1] = both.y;
        } else if constexpr (kRows == Rows::kPairs) {
          to[0] = ptx::load_global_if(
              is_output[r] && is_valid[0],
              reinterpret_cast<const uint32_t*>(bytes + (at[0] >> kPlaceShift<X>)));
          to[1] = 0;
        } else {
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            to[t] = ptx::load_global_if(
                is_output[r] && is_valid[t],
                reinterpret_cast<const Stored<X>*>(bytes + (at[t] >> kPlaceShift<X>)));
          }
        }
      }
    }
  }
  return valid;
}

// The largest over the quad of lanes, which have the same channels or positions.
__device__ __forceinline__ float largest_of_quad(float mine) {
  mine = fmaxf(mine, __shfl_xor_sync(0xFFFFFFFF, mine, 1));
  return fmaxf(mine, __shfl_xor_sync(0xFFFFFFFF, mine, 2));
}

// The scales of a tile of dc, for the thread's two channels.
template <class X>
__device__ __forceinline__ void find_scales(const float (&dc)[32], Scale (&scale)[2]) {
  scale[0] = scale[1] = Scale{1.0f, 1.0f};
  if constexpr (kScales<X>) {
    float largest[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 32; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], fabsf(dc[i]));
#pragma unroll
    for (int r = 0; r < 2; ++r) scale[r] = scale_of(largest_of_quad(largest[r]));
  }
}

// 16 positions of a tile of dc, scaled and rounded, as wgmma's first operand.
template <class X>
__device__ __forceinline__ void make_factors(const float (&dc)[32], int step,
                                             const Scale (&scale)[2], uint32_t (&hi)[4],
                                             uint32_t (&lo)[4]) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const float* pair = &dc[8 * step + 2 * word];
    const float s = scale[word % 2].scale;
    const SplitPair factors = factors_of<X>(pair[0] * s, pair[1] * s);
    hi[word] = factors.hi;
    lo[word] = factors.lo;
  }
}

// total += sum with its scales undone. A tap's sums: [2r + t] is channel lane / 4 + 8r of the
// warp's, input channel 2 (lane % 4) + t.
template <class X>
__device__ __forceinline__ void add_unscaled(const float (&sum)[4], const Scale (&scale)[2],
                                             float pixel_unscale, float (&total)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float unscale = scale[i / 2].unscale;
    if constexpr (kSplits<X>) {
      total[i] += undo_both(sum[i], unscale, pixel_unscale);
    } else {
      total[i] += kScales<X> ? sum[i] * unscale : sum[i];
    }
  }
}

}  // namespace fx_fuser::conv_direct
