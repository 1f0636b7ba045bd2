// The direct convolution's backward: the set-up that all of its kernels share, and helpers to read
// dy.
#pragma once

#include <utility>

#include "common/epilogue_math.cuh"
#include "conv/conv_direct_backward_args.h"
#include "conv/conv_direct_products_sm90.cuh"

namespace fx_fuser::conv_direct {

constexpr int kTile = 64;  // positions per product whose rows they are

// Per output channel, with d = c - mean:
//   dz = rest of_dy dy,  dc = scale (of_dy dy + slope d + offset).
// dy is multiplied first, as in autograd: a sum of large dy, or the product of both factors, can
// overflow when dz does not, and a zero as the other factor then makes NaN. For the same reason
// `scale` comes last (`slope` alone is 1 / √variance times a gradient; with `scale` it would be
// 1 / variance times it), and the epilogue's derivative is two numbers (`Derivative`): sums are
// multiplied by `rest` at the end, dc through `scale`.
//
// Per input channel: `pivot`, a value near the mean of its pixels. In fp32 it is subtracted from
// all pixels, the padding included, so that the sums which the tensor core truncates have either
// sign. That shifts the convolution by a constant, which is subtracted from `mean` too, and dweight
// by pivot Σ dc, which is added at the end.
struct Coefficients {
  float mean[kConvGroup];
  float of_dy[kConvGroup];
  float rest[kConvGroup];
  float scale[kConvGroup];
  float slope[kConvGroup];
  float offset[kConvGroup];
  float rstd[kConvGroup];
  float pivot[kConvChannels];
  float weight_unscale;  // the group's largest
  uint64_t given_full;
  uint64_t given_empty;
};
static_assert(sizeof(Coefficients) <= kConvCoefficientBytes);

struct BackwardShared : Shared {
  Coefficients* coefficients;
  float* given;  // [position][tap of nine][input channel]: contributions to the input's gradient
  double* sums;  // of the kernels without `given`: see ThreadSums
  float* ring;   // [position % kConvRing][input channel]: incomplete sums of the input's gradient

  static __device__ __forceinline__ BackwardShared of(const ConvDirectArgs& args) {
    BackwardShared shared;
    static_cast<Shared&>(shared) = Shared::of<false>(args);
    auto* after = reinterpret_cast<uint8_t*>(shared.tail) + kConvBackwardTailBytes;
    shared.coefficients = reinterpret_cast<Coefficients*>(after);
    after += kConvCoefficientBytes;
    shared.given = reinterpret_cast<float*>(after);
    shared.sums = reinterpret_cast<double*>(after);
    shared.ring = reinterpret_cast<float*>(after + kConvGivenBytes);
    return shared;
  }
};

// ---- 16 bits ------------------------------------------------------------------------------------

// The type of dy in memory, and in registers as loaded: 16-bit values are raw bits, one or two per
// register.
template <class X>
using Stored = std::conditional_t<kSplits<X>, float, uint16_t>;
template <class X>
using Loaded = std::conditional_t<kSplits<X>, float, uint32_t>;
template <class X>
constexpr bool kScales = !std::is_same_v<X, __nv_bfloat16>;
// Tables of places count 4 bytes per element.
template <class X>
constexpr int kPlaceShift = kSplits<X> ? 0 : 1;

// Two elements that were loaded separately or, in 16 bits, `together` in the first. Unpacked where
// they are used: unpacking right after the loads would keep these from overlapping.
template <class X>
__device__ __forceinline__ float2 values_of(Loaded<X> first, Loaded<X> second, bool together) {
  if constexpr (kSplits<X>) {
    return make_float2(first, second);
  } else {
    const uint32_t both = __byte_perm(first, second, together ? 0x3210 : 0x5410);
    if constexpr (std::is_same_v<X, __half>) {
      return __half22float2(reinterpret_cast<const __half2&>(both));
    } else {
      return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(both));
    }
  }
}

// Two values as elements of an operand: hi and lo, or in 16 bits only hi.
template <class X>
__device__ __forceinline__ SplitPair factors_of(float a, float b) {
  if constexpr (kSplits<X>) {
    return split(a, b);
  } else if constexpr (std::is_same_v<X, __half>) {
    const __half2 both = __floats2half2_rn(a, b);
    return {reinterpret_cast<const uint32_t&>(both), 0};
  } else {
    const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
    return {reinterpret_cast<const uint32_t&>(both), 0};
  }
}

// The convolution with its scales undone, minus `mean`.
template <class X>
__device__ __forceinline__ float deviation_of(float sum, float weight_unscale, float pixel_unscale,
                                              float mean) {
  return kSplits<X> ? fmaf(sum * weight_unscale, pixel_unscale, -mean) : sum - mean;
}

// ---- coefficients -------------------------------------------------------------------------------

// The derivative of the epilogue, which is linear: of_dy · rest. Autograd multiplies dy by one
// factor after the other; the factors' product may be out of float's range when dz is not. `rest`
// is a power of two, as near to 1 as possible, so that of_dy dy overflows or underflows only if dz
// does.
struct Derivative {
  float of_dy;
  float rest;
};

// The epilogue's value at z = 1, which is its slope, in double: its range holds the product of
// eight floats. Not inlined: with seven operands in double, the tables' registers spilled (fp32).
template <class Epilogue, int kScalars, class... In, size_t... kOperand>
__device__ __noinline__ double slope_of_epilogue(const ConvDirectArgs& args, int output,
                                                 std::index_sequence<kOperand...>) {
  constexpr int kOperands = sizeof...(In);
  const double in[1 + kOperands] = {
      1.0, convert<double>(static_cast<const In*>(
               args.operand[kOperand].data)[output * args.operand[kOperand].stride[1]])...};
  double scalar[kScalars > 0 ? kScalars : 1];
#pragma unroll
  for (int s = 0; s < kScalars; ++s) scalar[s] = args.scalar[s];
  return static_cast<double>(Epilogue{}(in, scalar));
}

template <class Epilogue, int kScalars, class... In>
__device__ __forceinline__ Derivative derivative_of(const ConvDirectArgs& args, int output) {
  constexpr int kLeast = -125;  // exponents of a mantissa of 0.5 to 1
  constexpr int kMost = 128;
  const double whole =
      slope_of_epilogue<Epilogue, kScalars, In...>(args, output, std::index_sequence_for<In...>{});
  if (whole == 0 || !(fabs(whole) < INFINITY)) return {static_cast<float>(whole), 1};
  int exponent;
  const auto mantissa = static_cast<float>(frexp(whole, &exponent));
  const int held = min(max(exponent, kLeast), kMost);
  return {ldexpf(mantissa, held), ldexpf(1, min(exponent - held, 127))};
}

// The mean of a few pixels of each input channel, the same ones in every block. One warp per
// channel.
__device__ __forceinline__ void find_pivots(const ConvDirectArgs& args, Coefficients& to) {
  constexpr int kPixels = 4;  // per lane
  const auto channel = static_cast<int>(threadIdx.x / 32);
  if (channel >= kConvChannels) return;
  float sum = 0;
  if (channel < args.channels) {
    const int64_t plane = static_cast<int64_t>(args.h) * args.w;
    const int64_t pixels = args.samples * plane;
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      const int64_t pixel = pixels * (i * 32 + threadIdx.x % 32) / (32 * kPixels);
      const int64_t sample = pixel / plane;
      sum += static_cast<const float*>(
          args.x)[(sample * args.channels + channel) * plane + (pixel - sample * plane)];
    }
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
  }
  const float mean = sum / (32 * kPixels);
  if (threadIdx.x % 32 == 0) to.pivot[channel] = fabsf(mean) < INFINITY ? mean : 0.0f;
}

// The convolution of the pivots.
__device__ __forceinline__ double convolved_pivots(const ConvDirectArgs& args, int output,
                                                   const float (&pivot)[kConvChannels]) {
  const int taps = args.kernel_h * args.kernel_w;
  const float* weight =
      static_cast<const float*>(args.weight) + static_cast<int64_t>(output) * args.channels * taps;
  double sum = 0;
  for (int c = 0; c < args.channels; ++c) {
    double of_channel = 0;
#pragma unroll 4
    for (int tap = 0; tap < taps; ++tap) of_channel += static_cast<double>(weight[c * taps + tap]);
    sum += of_channel * static_cast<double>(pivot[c]);
  }
  return sum;
}

template <class X, class Epilogue, int kScalars, class... In>
__device__ __forceinline__ void make_coefficients(const ConvBackwardArgs& args, int group,
                                                  Coefficients& to) {
  const auto channel = static_cast<int>(threadIdx.x);
  if (channel >= kConvGroup) return;
  const int output = group * kConvGroup + channel;
  double mean = 0;
  Derivative derivative{0, 1};
  float scale = 0;
  float slope = 0;
  float offset = 0;
  float rstd = 1;
  if (output < args.conv.outputs) {
    derivative = derivative_of<Epilogue, kScalars, In...>(args.conv, output);
    scale = 1;
    if (args.variance != nullptr) {
      mean = args.mean[output];
      if (args.bias != nullptr) mean -= static_cast<double>(args.bias[output]);
      rstd = static_cast<float>(
          1.0 / sqrt(static_cast<double>(args.variance[output]) + static_cast<double>(args.eps)));
      scale = rstd * (args.gamma != nullptr ? args.gamma[output] : 1.0f);
    }
    if constexpr (kSplits<X>) mean -= convolved_pivots(args.conv, output, to.pivot);
    if (args.dgamma != nullptr) {
      slope = -rstd * (args.dgamma[output] / args.count / derivative.rest);
      offset = -args.dbeta[output] / args.count / derivative.rest;
    }
  }
  to.mean[channel] = static_cast<float>(mean);
  to.of_dy[channel] = derivative.of_dy;
  to.rest[channel] = derivative.rest;
  // Clamped if finite factors overflow: an infinity times a dy of 0 would be NaN.
  const float whole = scale * derivative.rest;
  to.scale[channel] = fabsf(whole) == INFINITY && fabsf(scale) < INFINITY
                          ? copysignf(0x1.fffffep+127F, scale)
                          : whole;
  to.slope[channel] = slope;
  to.offset[channel] = offset;
  to.rstd[channel] = rstd;
}

// Initialises barriers, weights and coefficients. Called by all kThreads threads. `users`: warps
// that release a slot.
template <class X, int kThreads, class Epilogue, int kScalars, class... In>
__device__ __forceinline__ void prepare_backward(const ConvBackwardArgs& args,
                                                 const BackwardShared& shared, int group,
                                                 int users) {
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    Tail& tail = *shared.tail;
    for (int slot = 0; slot < args.conv.slots; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&tail.full[slot]), kWarpgroup);
      ptx::mbarrier_init(ptx::shared_address(&tail.empty[slot]), users);
    }
    ptx::mbarrier_init(ptx::shared_address(&shared.coefficients->given_full), 2 * kWarpgroup);
    ptx::mbarrier_init(ptx::shared_address(&shared.coefficients->given_empty), kWarpgroup);
    ptx::fence_mbarrier_init();
  }
  constexpr int kPadVectors = kConvSlotPadBytes / 16;
  for (int i = threadIdx.x; i < args.conv.slots * kPadVectors; i += kThreads) {
    auto* end = shared.slot + (i / kPadVectors + 1) * args.conv.slot_bytes;
    reinterpret_cast<uint4*>(end)[i % kPadVectors - kPadVectors] = make_uint4(0, 0, 0, 0);
  }
  if constexpr (kSplits<X>) find_pivots(args.conv, *shared.coefficients);
  arrange_weights<X, kThreads>(args.conv, shared, group, static_cast<int>(threadIdx.x));
  ptx::wait_for_prerequisites();  // dgamma and dbeta
  make_coefficients<X, Epilogue, kScalars, In...>(args, group, *shared.coefficients);
  __syncthreads();
}

// dy of an output channel, from element `first` on.
template <class X>
__device__ __forceinline__ const Stored<X>* gradients_of(const ConvBackwardArgs& args, int sample,
                                                         int first, int output) {
  const int64_t plane = static_cast<int64_t>(args.conv.out_h) * args.conv.out_w;
  return static_cast<const Stored<X>*>(args.dy) +
         (static_cast<int64_t>(sample) * args.conv.outputs + output) * plane + first;
}

// Prefetches to L2 the dy of about kPositions of a unit, from `first` on (positions that are not
// elements are counted as if they were). Two threads of a warpgroup per channel.
template <class X, int kPositions>
__device__ __forceinline__ void prefetch_gradients(const ConvBackwardArgs& args, int group,
                                                   int index, int first) {
  constexpr int kLine = 128 / sizeof(X);
  const auto thread = static_cast<int>(ptx::thread_index() % kWarpgroup);
  const int output = group * kConvGroup + thread / 2;
  if (index >= args.conv.units || output >= args.conv.outputs || args.conv.strips.size != 1) return;
  const Unit unit = Unit::at(args.conv, index);
  const Stored<X>* begin = gradients_of<X>(args, unit.sample, unit.first, output);
#pragma unroll
  for (int line = 0; line < kPositions / kLine; line += 2) {
    const int element = first + (line + thread % 2) * kLine;
    if (element < unit.end - unit.first) ptx::prefetch(begin + element);
  }
}

// ---- reading dy ---------------------------------------------------------------------------------

// The table entry of positions 2 pair and 2 pair + 1, as written by the loading warpgroup: byte
// offsets of their elements from the unit's first.
__device__ __forceinline__ uint32_t place_word(const Tail& tail, int slot, uint32_t pair) {
  return tail.place[slot][pair / 16 * 16 + pair % 4 * 4 + pair / 4 % 4];
}

}  // namespace fx_fuser::conv_direct
