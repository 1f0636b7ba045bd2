// The direct convolution: from sums to a stage, [64 channels, 256 positions], in which a channel's
// elements are adjacent.
#pragma once

#include "conv/conv_direct_products_sm90.cuh"

namespace fx_fuser::conv_direct {

// The offset of a channel's first element from the beginning of a sector, in elements.
__device__ __forceinline__ uint32_t phase_of(const ConvDirectArgs& args, int sample, int output) {
  const auto plane = static_cast<uint32_t>(args.out_h) * static_cast<uint32_t>(args.out_w);
  return args.phase + static_cast<uint32_t>(sample * args.outputs + output) * plane;
}

// Where a channel's first element goes in its row of a stage, so that vectors of kWidth in global
// memory are vectors in the stage.
template <int kWidth>
__device__ __forceinline__ uint32_t shift_of(uint32_t phase, int first) {
  return (static_cast<uint32_t>(first) + phase) % kWidth;
}

// Writes a thread's values of 128 positions, [2 * pair + r] for its two channels, to their rows of
// the stage. With kPairs, a pair's elements are neighbours there, too. If kChecks, returns NaN if a
// value is not finite, else 0.
template <class T, bool kPairs, bool kChecks = false>
__device__ __forceinline__ float stage_pairs(const Vec<T, 2> (&pair)[32], const uint4* places,
                                             T* row) {
  float broken = 0;
  constexpr uint32_t kUnused = sizeof(T) * kConvStageUnused;
#pragma unroll
  for (int quad = 0; quad < 4; ++quad) {
    const uint4 loaded = places[quad * 4];
    const uint32_t place[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Vec<T, 2>* of_pair = &pair[(quad * 4 + i) * 2];
#pragma unroll
      for (int t = 0; t < (kPairs ? 1 : 2); ++t) {
        const uint32_t at = kPairs ? place[i] : t == 0 ? place[i] & 0xFFFF : place[i] >> 16;
        if (at == kUnused) continue;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          auto* to = reinterpret_cast<uint8_t*>(row + r * 8 * kConvStagePitch) + at;
          if constexpr (kPairs) {
            *reinterpret_cast<Vec<T, 2>*>(to) = of_pair[r];
          } else {
            *reinterpret_cast<T*>(to) = of_pair[r].element[t];
          }
          if constexpr (kChecks) {
            if (kPairs || t == 0) broken = fmaf(of_pair[r].element[0], 0.0f, broken);
            if (kPairs || t == 1) broken = fmaf(of_pair[r].element[1], 0.0f, broken);
          }
        }
      }
    }
  }
  return broken;
}

}  // namespace fx_fuser::conv_direct
