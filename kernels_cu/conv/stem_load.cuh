// The stem kernels (stem.cuh): loads to shared memory. A tile's patch, with zeros outside x, and
// the weights in the order of the products.
#pragma once

#include <type_traits>

#include "common/convert.cuh"
#include "common/ptx_sm90.cuh"
#include "conv/stem_args.h"

namespace fx_fuser::stem {

// For epilogues with which a kernel would spill: see fx_fuser/native/jobs.py.
#ifdef FX_FUSER_FEW_REGISTERS
constexpr bool kFewRegisters = true;
#else
constexpr bool kFewRegisters = false;
#endif

// X: type of x, weight and c. kLast: the result has its channels innermost.
template <class X_, class Out_, int kC, int kKernelH, int kKernelW, int kS, int kO, int kIn,
          bool kIsLast>
struct Shape {
  using X = X_;
  using Out = Out_;
  static constexpr bool kLast = kIsLast;
  static constexpr bool kIs16Bit = sizeof(X) == 2;
  static constexpr int kOperands = kIn;
  static constexpr int kChannels = kC;
  static constexpr int kOutputs = kO;
  static constexpr int kStride = kS;
  static constexpr int kHeight = kKernelH;
  static constexpr int kRow = kKernelW * kC;  // elements per filter row
  static constexpr int kMaxLead = kC % 2;
  static constexpr StemShape kShape{kC, kKernelH, kKernelW, kS, kO};
  static_assert(stem_takes(kShape) && kIn <= kStemMaxOperands);
  static constexpr StemGeometry kGeometry = stem_geometry(kShape, sizeof(X), kIn);
  static constexpr int kVector = kGeometry.vector;
  static constexpr int kEights = kGeometry.eights;
  static constexpr int kAllEights = kKernelH * kEights;
  static constexpr int kSteps = kGeometry.steps;
  static constexpr int kTiles = kGeometry.tiles;
  static constexpr int kGroups = kGeometry.groups;
  static constexpr int kParts = kGeometry.parts;
  static constexpr int kGroupChannels = kGeometry.group_channels();
  static constexpr int kBlockChannels = kGeometry.block_channels();
  static constexpr int kWeightWords = kGeometry.weight_words;
  static constexpr int kWarpRows = kGeometry.warp_rows;
  static constexpr int kRows = kGeometry.rows();
  static constexpr int kPatchRows = kGeometry.patch_rows;
  static constexpr int kPatchColumns = kGeometry.patch_columns;
  static constexpr int kPitch = kGeometry.pitch;
  static constexpr int kPatch = kGeometry.patch();
  // Tiles in which a lane's channels are neighbours, so that a pixel's fill 16 bytes.
  static constexpr int kTogether = sizeof(Out) == 2 && !kFewRegisters ? 4 : 2;

  // The channel of row or column `n` of tile `tile`.
  static __device__ __forceinline__ int channel_of(int tile, int n) {
    if constexpr (!kLast) return 8 * tile + n;
    const int first = tile / kTogether * kTogether;
    const int count = kTiles - first < kTogether ? kTiles - first : kTogether;
    return 8 * first + n / 2 * (2 * count) + (tile - first) * 2 + n % 2;
  }
};

struct Place {
  int sample;
  int row;  // of the result
  int column;
};

template <class S>
__device__ __forceinline__ Place place_of(const StemArgs& args, int tile) {
  const int across = tile / args.tiles_x;
  const int sample = across / args.tiles_y;
  return {sample, (across - sample * args.tiles_y) * S::kRows,
          (tile - across * args.tiles_x) * kStemColumns};
}

__device__ __forceinline__ bool is_below(int value, int limit) {  // false if negative
  return static_cast<uint32_t>(value) < static_cast<uint32_t>(limit);
}

// Copying and rounding use the same loop, so that a thread rounds what it has copied itself.
template <class S, class Visit>
__device__ __forceinline__ void for_each_vector(Visit visit) {
  constexpr int kInRow = S::kPitch / S::kVector;
#pragma unroll 4
  for (int i = ptx::thread_index(); i < S::kPatchRows * kInRow; i += kStemThreads) {
    const int row = i / kInRow;
    visit(row, (i - row * kInRow) * S::kVector);
  }
}

template <class S, class Visit>
__device__ __forceinline__ void for_each_pixel(Visit visit) {
  constexpr int kInRow = S::kPatchColumns;
#pragma unroll 4
  for (int i = ptx::thread_index(); i < S::kPatchRows * kInRow; i += kStemThreads) {
    const int row = i / kInRow;
    visit(row, i - row * kInRow);
  }
}

// Copies a tile's patch. Visible after ptx::copy_async_wait().
template <class S>
__device__ __forceinline__ void load_patch(const StemArgs& args, const Place& place,
                                           typename S::X* patch) {
  using X = typename S::X;
  const int first_row = place.row * S::kStride - args.top;
  const int first_column = place.column * S::kStride - args.left;
  const X* x = static_cast<const X*>(args.x) + place.sample * args.x_stride[0];
  if (args.copies_vectors) {
    const int first = first_column * S::kChannels - args.delta;
    for_each_vector<S>([&](int row, int element) {
      const int from = first + element;
      const bool reads = is_below(first_row + row, args.h) && is_below(from, args.w * S::kChannels);
      const int64_t at = reads ? (first_row + row) * args.x_stride[2] + from : 0;
      ptx::copy_async_only_16(ptx::shared_address(patch + row * S::kPitch + element), x + at,
                              reads);
    });
    return;
  }
  for_each_pixel<S>([&](int row, int column) {
    const bool reads = is_below(first_row + row, args.h) && is_below(first_column + column, args.w);
    const X* from = x;
    if (reads) {
      from += (first_row + row) * args.x_stride[2] + (first_column + column) * args.x_stride[3];
    }
    X* to = patch + row * S::kPitch + column * S::kChannels;
    if constexpr (S::kIs16Bit) {
      X value[S::kChannels];
#pragma unroll
      for (int c = 0; c < S::kChannels; ++c) {
        value[c] = reads ? from[c * args.x_stride[1]] : convert<X>(0.0f);
      }
#pragma unroll
      for (int c = 0; c < S::kChannels; ++c) to[c] = value[c];
    } else {
#pragma unroll
      for (int c = 0; c < S::kChannels; ++c) {
        ptx::copy_async(ptx::shared_address(to + c), reads ? from + c * args.x_stride[1] : x,
                        reads);
      }
    }
  });
}

// In fp32: rounds what this thread has copied to TF32.
template <class S>
__device__ __forceinline__ void round_patch(const StemArgs& args, typename S::X* patch) {
  if constexpr (!S::kIs16Bit) {
    if (args.copies_vectors) {
      for_each_vector<S>([&](int row, int element) {
        void* at = patch + row * S::kPitch + element;
        const float4 v = *static_cast<const float4*>(at);
        *static_cast<uint4*>(at) =
            make_uint4(ptx::to_tf32(v.x), ptx::to_tf32(v.y), ptx::to_tf32(v.z), ptx::to_tf32(v.w));
      });
    } else {
      for_each_pixel<S>([&](int row, int column) {
        float* at = patch + row * S::kPitch + column * S::kChannels;
#pragma unroll
        for (int c = 0; c < S::kChannels; ++c) at[c] = __uint_as_float(ptx::to_tf32(at[c]));
      });
    }
  }
}

// Fills in the weights of output channels from `first_output` on, as lanes read them:
// [group][step][pair of tiles][lane] of four words, both halves of the step's k for the first tile,
// then for the second. `lead`: elements in a row's first eight that are ahead of the filter's.
template <class S>
__device__ __forceinline__ void fill_weights(const StemArgs& args, int first_output, int lead,
                                             uint32_t* weights) {
  using X = typename S::X;
  const X* weight = static_cast<const X*>(args.weight);
#pragma unroll 4
  for (int word = threadIdx.x; word < S::kGroups * S::kWeightWords; word += kStemThreads) {
    const int half = word % 2;
    const int lane = word / 4 % 32;
    const int tile = word / 128 % (S::kTiles / 2) * 2 + word / 2 % 2;
    const int step = word / (64 * S::kTiles) % S::kSteps;
    const int group = word / S::kWeightWords;
    const int output = first_output + group * S::kGroupChannels + S::channel_of(tile, lane / 4);
    const int eight = S::kIs16Bit ? 2 * step + half : step;
    const int row = eight / S::kEights;
    const int first = eight % S::kEights * 8 + lane % 4 * 2 + (S::kIs16Bit ? 0 : half) - lead;
    const auto element = [&](int e) {
      const bool is_filters = output < S::kOutputs && row < S::kHeight && e >= 0 && e < S::kRow;
      const int column = e / S::kChannels;
      return is_filters ? weight[output * args.weight_stride[0] +
                                 (e - column * S::kChannels) * args.weight_stride[1] +
                                 row * args.weight_stride[2] + column * args.weight_stride[3]]
                        : convert<X>(0.0f);
    };
    if constexpr (S::kIs16Bit) {
      const Vec<X, 2> pair = {element(first), element(first + 1)};
      weights[word] = reinterpret_cast<const uint32_t&>(pair);
    } else {
      weights[word] = ptx::to_tf32(element(first));
    }
  }
}

}  // namespace fx_fuser::stem
