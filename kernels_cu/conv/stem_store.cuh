// The stem kernels (stem.cuh): from a warp's sums through an epilogue with per-channel operands to
// global memory.
#pragma once

#include "common/epilogue_math.cuh"
#include "common/packed.cuh"
#include "conv/stem_load.cuh"

namespace fx_fuser::stem {

// Stores the convolution itself, without an epilogue.
struct Sum {
  static constexpr int kOperands = 0;
  template <int kSlots>
  __device__ __forceinline__ float operator()(float sum, const float (&)[kSlots]) const {
    return sum;
  }
};

template <class Epilogue, int kScalars, int kIn>
struct Tail {
  static constexpr int kOperands = kIn;
  static_assert(kScalars <= kMaxScalars);
  const StemArgs& args;

  template <int kSlots>
  __device__ __forceinline__ float operator()(float sum, const float (&operand)[kSlots]) const {
    float in[1 + kOperands];
    in[0] = sum;
#pragma unroll
    for (int i = 0; i < kOperands; ++i) in[1 + i] = operand[i];
    float scalar[kScalars > 0 ? kScalars : 1];
#pragma unroll
    for (int s = 0; s < (kScalars > 0 ? kScalars : 1); ++s) scalar[s] = args.scalar[s];
    return static_cast<float>(Epilogue{}(in, scalar));
  }
};

// Stores kRun neighbours: in vectors if `whole`, else the `present` ones element by element.
template <class T, int kRun>
__device__ __forceinline__ void store_run(T* to, const float (&value)[kRun], bool whole,
                                          int present) {
  if (!whole) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (i < present) to[i] = convert<T>(value[i]);
    }
  } else {
    const Packed<T, kRun> run = pack<T>(value);
    using Whole = std::conditional_t<sizeof(run) % 16 == 0, uint4, uint2>;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(run) / sizeof(Whole)); ++i) {
      reinterpret_cast<Whole*>(to)[i] = reinterpret_cast<const Whole*>(run.word)[i];
    }
  }
}

// The destination of a warp's sums of one group. `staged`: the group's operands,
// [operand][kBlockChannels].
template <class T>
struct Target {
  T* to;
  bool takes_vectors;
  int sample;
  int row;
  int column;
  int output;  // the group's first
  const float* staged;
};

template <class S>
using Sums = float[S::kWarpRows][S::kTiles][4];

// Stores a result with channels innermost, tiles from kFirst on: sum 2s + i of a tile is pixel
// 8s + lane / 4, channel 2 (lane % 4) + i.
template <class S, int kFirst = 0, class T, class Apply>
__device__ __forceinline__ void store_pixels(const StemArgs& args, const Target<T>& target,
                                             const Sums<S>& sum, const Apply& apply) {
  constexpr int kRun = 2 * (S::kTiles - kFirst < S::kTogether ? S::kTiles - kFirst : S::kTogether);
  constexpr int kSlots = Apply::kOperands > 0 ? Apply::kOperands : 1;
  const int lane = threadIdx.x % 32;
  const int channel = S::channel_of(kFirst, lane % 4 * 2);
  float operand[kRun][kSlots] = {};
#pragma unroll
  for (int i = 0; i < Apply::kOperands; ++i) {
#pragma unroll
    for (int e = 0; e < kRun; e += 4) {
      const float* from = target.staged + i * S::kBlockChannels + channel + e;
      const float4 four = *reinterpret_cast<const float4*>(from);
      operand[e][i] = four.x;
      operand[e + 1][i] = four.y;
      operand[e + 2][i] = four.z;
      operand[e + 3][i] = four.w;
    }
  }
  const int present = S::kOutputs - target.output - channel;
  const bool whole = target.takes_vectors && kRun <= present;
  const int64_t first_row = static_cast<int64_t>(target.sample) * args.out_h + target.row;
  const int first_column = target.column + lane / 4;
  T* first =
      target.to + (first_row * args.out_w + first_column) * S::kOutputs + target.output + channel;
#pragma unroll
  for (int m = 0; m < S::kWarpRows; ++m) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      float value[kRun];
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        value[e] = apply(sum[m][kFirst + e / 2][2 * s + e % 2], operand[e]);
      }
      if (target.row + m < args.out_h && first_column + 8 * s < args.out_w) {
        store_run(first + (static_cast<int64_t>(m) * args.out_w + 8 * s) * S::kOutputs, value,
                  whole, present);
      }
    }
  }
  if constexpr (kFirst + S::kTogether < S::kTiles) {
    store_pixels<S, kFirst + S::kTogether>(args, target, sum, apply);
  }
}

// Stores two columns of each of two segments of eight in one row; `present` of the row's columns
// exist.
template <class T>
__device__ __forceinline__ void store_columns(T* to, const float (&value)[2][2], bool whole,
                                              int present) {
  const int t = threadIdx.x % 4;
  if (!whole) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 8 * s + 2 * t + i;
        if (column < present) to[column] = convert<T>(value[s][i]);
      }
    }
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int column = 8 * s + 2 * t;
      if (column < present) {
        *reinterpret_cast<float2*>(to + column) = make_float2(value[s][0], value[s][1]);
      }
    }
  } else {
    // An even lane stores the first segment's columns of itself and the next lane, an odd one the
    // second segment's.
    const uint32_t word[2] = {pack<T>(value[0]).word[0], pack<T>(value[1]).word[0]};
    const bool is_odd = t % 2;
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, is_odd ? word[0] : word[1], 1);
    const int column = (is_odd ? 8 : 0) + t / 2 * 4;
    if (column < present) {
      *reinterpret_cast<uint2*>(to + column) =
          is_odd ? make_uint2(other, word[1]) : make_uint2(word[0], other);
    }
  }
}

// Stores a result with columns innermost: sum 2r + i of tile s * kTiles / 2 + j is channel
// 16j + 8r + lane / 4, column 8s + 2 (lane % 4) + i.
template <class S, class T, class Apply>
__device__ __forceinline__ void store_rows(const StemArgs& args, const Target<T>& target,
                                           const Sums<S>& sum, const Apply& apply) {
  constexpr int kSlots = Apply::kOperands > 0 ? Apply::kOperands : 1;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < S::kTiles; ++half) {
    const int channel = 8 * half + lane / 4;
    float operand[kSlots] = {};
#pragma unroll
    for (int i = 0; i < Apply::kOperands; ++i) {
      operand[i] = target.staged[i * S::kBlockChannels + channel];
    }
    const int output = target.output + channel;
    const int64_t plane = static_cast<int64_t>(target.sample) * S::kOutputs + output;
    T* first = target.to + (plane * args.out_h + target.row) * args.out_w + target.column;
#pragma unroll
    for (int m = 0; m < S::kWarpRows; ++m) {
      float value[2][2];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          value[s][i] = apply(sum[m][s * (S::kTiles / 2) + half / 2][half % 2 * 2 + i], operand);
        }
      }
      const bool is_present = output < S::kOutputs && target.row + m < args.out_h;
      store_columns(first + static_cast<int64_t>(m) * args.out_w, value, target.takes_vectors,
                    is_present ? args.out_w - target.column : 0);
    }
  }
}

template <class S, class T, class Apply>
__device__ __forceinline__ void store(const StemArgs& args, const Target<T>& target,
                                      const Sums<S>& sum, const Apply& apply) {
  if constexpr (S::kLast) {
    store_pixels<S>(args, target, sum, apply);
  } else {
    store_rows<S>(args, target, sum, apply);
  }
}

}  // namespace fx_fuser::stem
