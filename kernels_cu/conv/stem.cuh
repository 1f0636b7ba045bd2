// out = epilogue(conv2d(x, weight, stride), operands, scalars) for an input of at most four
// channels, as in the first layer of a network, by `mma.sync`: bf16, fp16, and fp32 as TF32.
//
// stem_args.h defines tiles, patches and groups. Such a layer is bandwidth-bound, and nearly all of
// its bytes are the result's. Blocks are persistent and keep the weights and the operands, one
// number per channel, in shared memory. Patches are double-buffered: while one's products run, the
// next tile's is copied. Results are stored straight from registers: tiles' channels are permuted
// so that a lane has whole vectors of a pixel. If the result's columns are innermost, the weights
// are the products' first operand and the pixels their second, so that a lane's sums are neighbours
// in a row.
//
// Elements of an eight that do not belong to the filter are masked to zero ahead of the products,
// as their weights are: else an infinity next to the filter's window would make a NaN.
//
// Layers below this file: stem_store.cuh, stem_load.cuh.
#pragma once

#include <utility>

#include "conv/stem_store.cuh"

namespace fx_fuser::stem {

// d[16 x 8] += a b by one warp. In 16 bits kWhole tells whether there is a second half of k, eight
// more. a: rows lane / 4 and lane / 4 + 8, first for the first half; b: column lane / 4.
template <class X, bool kWhole>
__device__ __forceinline__ void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  const uint32_t a[4] = {a0, a1, a2, a3};
  if constexpr (sizeof(X) == 4) {
    ptx::mma_m16n8k8_tf32(d, a, b0, b1);
  } else if constexpr (kWhole) {
    ptx::mma_m16n8k16<X>(d, a, b0, b1);
  } else {
    ptx::mma_m16n8k8<X>(d, a0, a1, b0);
  }
}

// A lane's two elements of an eight: one word in 16 bits, two in fp32.
template <class S>
struct Pair {
  static constexpr int kWords = S::kIs16Bit ? 1 : 2;
  uint32_t word[kWords];
};

// A mask per eight: all bits of the lane's elements that belong to the filter, none of the others.
template <class S>
struct Masks {
  Pair<S> of[S::kEights];

  __device__ __forceinline__ explicit Masks(int lead) {
#pragma unroll
    for (int q = 0; q < S::kEights; ++q) {
      bool is_filters[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int e = 8 * q + static_cast<int>(threadIdx.x) % 4 * 2 + i - lead;
        is_filters[i] = e >= 0 && e < S::kRow;
      }
      if constexpr (S::kIs16Bit) {
        of[q].word[0] = (is_filters[0] ? 0xFFFFu : 0u) | (is_filters[1] ? 0xFFFF0000u : 0u);
      } else {
        of[q].word[0] = is_filters[0] ? ~0u : 0u;
        of[q].word[1] = is_filters[1] ? ~0u : 0u;
      }
    }
  }
};

// The lane's elements of the `eight`-th eight of a filter, at pixels that begin at `from`.
template <class S>
__device__ __forceinline__ Pair<S> pixels_of(const typename S::X* from, int eight,
                                             const Masks<S>& masks) {
  const int q = eight % S::kEights;
  const void* at = from + eight / S::kEights * S::kPitch + 8 * q;
  Pair<S> pair;
  if constexpr (S::kIs16Bit) {
    pair.word[0] = *static_cast<const uint32_t*>(at);
  } else {
    const uint2 both = *static_cast<const uint2*>(at);
    pair.word[0] = both.x;
    pair.word[1] = both.y;
  }
  if (8 * q < S::kMaxLead || 8 * q + 8 > S::kRow) {
#pragma unroll
    for (int i = 0; i < Pair<S>::kWords; ++i) pair.word[i] &= masks.of[q].word[i];
  }
  return pair;
}

template <class S, int kStep>
__device__ __forceinline__ void multiply_step(const typename S::X* from, const uint4* weights,
                                              const Masks<S>& masks, Sums<S>& sum) {
  using X = typename S::X;
  constexpr bool kWhole = !S::kIs16Bit || 2 * kStep + 1 < S::kAllEights;
  // Keeps a step's loads ahead of the next one's: all at once would need too many registers.
  asm volatile("" ::: "memory");
  uint4 weight[S::kTiles / 2];  // both halves of k, of two tiles
#pragma unroll
  for (int i = 0; i < S::kTiles / 2; ++i) {
    weight[i] = weights[(kStep * (S::kTiles / 2) + i) * 32];
  }
#pragma unroll
  for (int m = 0; m < S::kWarpRows; ++m) {
    uint32_t lo[2];  // the first half of k, of each segment of eight columns
    uint32_t hi[2] = {};
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const X* of_segment = from + m * S::kStride * S::kPitch + s * 8 * S::kStride * S::kChannels;
      if constexpr (S::kIs16Bit) {
        lo[s] = pixels_of<S>(of_segment, 2 * kStep, masks).word[0];
        if constexpr (kWhole) hi[s] = pixels_of<S>(of_segment, 2 * kStep + 1, masks).word[0];
      } else {
        const Pair<S> pair = pixels_of<S>(of_segment, kStep, masks);
        lo[s] = pair.word[0];
        hi[s] = pair.word[1];
      }
    }
#pragma unroll
    for (int i = 0; i < S::kTiles / 2; ++i) {
      const uint4& w = weight[i];
      if constexpr (S::kLast) {
        multiply<X, kWhole>(sum[m][2 * i], lo[0], lo[1], hi[0], hi[1], w.x, w.y);
        multiply<X, kWhole>(sum[m][2 * i + 1], lo[0], lo[1], hi[0], hi[1], w.z, w.w);
      } else {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          multiply<X, kWhole>(sum[m][s * (S::kTiles / 2) + i], w.x, w.z, w.y, w.w, lo[s], hi[s]);
        }
      }
    }
  }
  if constexpr (kStep + 1 < S::kSteps) {
    multiply_step<S, kStep + 1>(from, weights, masks, sum);
  }
}

// Copies an operand, one number per channel, to shared memory in fp32. Channels beyond the last get
// the last one's value.
template <class S, int kOperand, class T>
__device__ __forceinline__ void stage_operand(const StemArgs& args, int first_output,
                                              float* staged) {
  const Strided<1>& operand = args.operand[kOperand];
  for (int i = threadIdx.x; i < S::kBlockChannels; i += kStemThreads) {
    const int output = min(first_output + i, S::kOutputs - 1);
    staged[kOperand * S::kBlockChannels + i] =
        convert<float>(static_cast<const T*>(operand.data)[output * operand.stride[0]]);
  }
}

template <class S, class Epilogue, int kScalars, class Operands, class... In>
struct Kernel;

template <class S, class Epilogue, int kScalars, size_t... kOperand, class... In>
struct Kernel<S, Epilogue, kScalars, std::index_sequence<kOperand...>, In...> {
  using X = typename S::X;
  using Out = typename S::Out;

  static __device__ __forceinline__ void store_group(const StemArgs& args, int tile, int output,
                                                     const float* staged, const Sums<S>& sum) {
    const Place place = place_of<S>(args, ptx::opaque(tile));
    const int row = place.row + static_cast<int>(threadIdx.x) / 32 * S::kWarpRows;
    if (args.c != nullptr) {
      const Target<X> target{static_cast<X*>(args.c),
                             args.c_takes_vectors,
                             place.sample,
                             row,
                             place.column,
                             output,
                             staged};
      store<S>(args, target, sum, Sum{});
    }
    if (args.out != nullptr) {
      const Target<Out> target{static_cast<Out*>(args.out),
                               args.out_takes_vectors,
                               place.sample,
                               row,
                               place.column,
                               output,
                               staged};
      store<S>(args, target, sum, Tail<Epilogue, kScalars, S::kOperands>{args});
    }
  }

  static __device__ __forceinline__ void run(const StemArgs& args) {
    extern __shared__ uint4 storage[];
    auto* patches = reinterpret_cast<X*>(storage);
    auto* weights = reinterpret_cast<uint32_t*>(patches + 2 * S::kPatch);
    auto* staged = reinterpret_cast<float*>(weights + S::kGroups * S::kWeightWords);
    const int first_output = blockIdx.x % S::kParts * S::kBlockChannels;
    const int step = gridDim.x / S::kParts;
    const int lead = args.delta % 2;
    const int lane = threadIdx.x % 32;
    // Where the lane's pixels begin in a patch.
    const int begin = static_cast<int>(threadIdx.x) / 32 * S::kWarpRows * S::kStride * S::kPitch +
                      lane / 4 * S::kStride * S::kChannels + args.delta - lead + lane % 4 * 2;

    int tile = blockIdx.x / S::kParts;
    load_patch<S>(args, place_of<S>(args, tile), patches);
    fill_weights<S>(args, first_output, lead, weights);
    if (args.out != nullptr) (stage_operand<S, kOperand, In>(args, first_output, staged), ...);
    const Masks<S> masks(lead);
    for (int buffer = 0;; buffer ^= 1) {
      X* patch = patches + buffer * S::kPatch;
      ptx::copy_async_wait();
      round_patch<S>(args, patch);
      __syncthreads();
      const int next = tile + step;
      if (next < args.tiles) {
        load_patch<S>(args, place_of<S>(args, next), patches + (buffer ^ 1) * S::kPatch);
      }
#pragma unroll 1
      for (int group = 0; group < S::kGroups; ++group) {
        Sums<S> sum = {};
        const auto* of_group = reinterpret_cast<const uint4*>(weights + group * S::kWeightWords);
        multiply_step<S, 0>(patch + begin, of_group + lane, masks, sum);
        const int channel = group * S::kGroupChannels;
        store_group(args, tile, first_output + channel, staged + channel, sum);
      }
      if (next >= args.tiles) return;
      tile = next;
    }
  }
};

template <bool kLast, int kC, int kKernelH, int kKernelW, int kStride, int kOutputs, class Epilogue,
          int kScalars, class Acc, class Out, class X, class... In>
__device__ __forceinline__ void stem(const StemArgs& args) {
  static_assert(std::is_same_v<Acc, float>);
  static_assert(sizeof(Out) == 2 || sizeof(Out) == 4);
  using S = Shape<X, Out, kC, kKernelH, kKernelW, kStride, kOutputs, sizeof...(In), kLast>;
  Kernel<S, Epilogue, kScalars, std::index_sequence_for<In...>, In...>::run(args);
}

template <int kC, int kKernelH, int kKernelW, int kStride, int kOutputs, class Epilogue,
          int kScalars, class Acc, class Out, class X, class... In>
constexpr int resident() {
  constexpr StemShape kShape{kC, kKernelH, kKernelW, kStride, kOutputs};
  return kFewRegisters ? 1 : stem_geometry(kShape, sizeof(X), sizeof...(In)).resident;
}

}  // namespace fx_fuser::stem

#define FX_FUSER_STEM_KERNEL(name, is_last, ...)                                        \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kStemThreads,                  \
                                               fx_fuser::stem::resident<__VA_ARGS__>()) \
      name(const __grid_constant__ fx_fuser::StemArgs args) {                           \
    fx_fuser::stem::stem<is_last, __VA_ARGS__>(args);                                   \
  }

// FX_FUSER_STEM(channels, kernel height, kernel width, stride, output channels, Epilogue, scalars,
// Acc, Out, X, operands...): one kernel for results with channels innermost, one for columns.
#define FX_FUSER_STEM(...)                                             \
  FX_FUSER_STEM_KERNEL(fx_fuser_stem_channels_last, true, __VA_ARGS__) \
  FX_FUSER_STEM_KERNEL(fx_fuser_stem_contiguous, false, __VA_ARGS__)
