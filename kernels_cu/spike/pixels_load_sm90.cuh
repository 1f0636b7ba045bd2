// The 1 x 1 convolution of pixels_sm90.cuh: what makes relu(x · scale + shift) of x in shared
// memory.
#pragma once

#include "spike/pixels_tiles_sm90.cuh"
#include "spike/pixels_values_sm90.cuh"

namespace fx_fuser::ptx {
template <class T>
__device__ __forceinline__ uint32_t relu_pair(uint32_t pair) {
  uint32_t result;
  if constexpr (std::is_same_v<T, __half>) {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(0));
  } else {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(0));
  }
  return result;
}
}  // namespace fx_fuser::ptx

namespace fx_fuser::pixels {

// x becomes relu(x · scale + shift) in each stage. A lane has eight k, a warp four pixels at once.
template <class T, class Layout>
__device__ __forceinline__ void normalise(const PixelsArgs& args, typename Layout::Shared& shared,
                                          int loader) {
  constexpr int kChunks = 8;  // of a row
  constexpr int kRows = 32 / kChunks;
  constexpr int kGroups = Layout::kPixels / kRows;
  const int lane = threadIdx.x % 32;
  const int chunk = lane % kChunks;
  auto place = Layout::Place::of(0);
  for_tiles<Layout>(args, [&](int) {
    for (int k = chunk * 8; k < args.k + chunk * 8; k += kPixelsStep) {
      float scale[8];
      float shift[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const PixelsNorm* norm = args.load + k + e;
        scale[e] = norm->scale;
        shift[e] = norm->shift;
      }
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[place.slot]), place.phase);
#pragma unroll 4
      for (int group = loader; group < kGroups; group += kLoaders) {
        const int row = group * kRows + lane / kChunks;
        auto* vector =
            reinterpret_cast<uint4*>(&shared.stage[place.slot].x[row][(chunk ^ row % 8) * 16]);
        const uint4 raw = *vector;
        uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 pair = unpacked<T>(word[w]);
          const float first = fmaf(pair.x, scale[2 * w], shift[2 * w]);
          const float second = fmaf(pair.y, scale[2 * w + 1], shift[2 * w + 1]);
          word[w] = ptx::relu_pair<T>(packed<T>(first, second));
        }
        *vector = make_uint4(word[0], word[1], word[2], word[3]);
      }
      ptx::fence_async_proxy();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.loaded[place.slot]));
      place.advance();
    }
  });
}

}  // namespace fx_fuser::pixels
