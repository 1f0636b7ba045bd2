// The backward of conv_direct_sm90.cuh, where the epilogue is linear in the BatchNorm of the
// convolution (or in the convolution itself): the sums that are dbeta and dgamma, the weight's
// gradient and the input's, from x and dy. Neither the convolution nor its gradient is in memory:
// each kernel makes the convolution again, and from it and dy the gradient dc:
//
//   dz = scale dy          scale: of the epilogue, one number a channel
//   dc = gamma rstd (dz - mean(dz) - x̂ mean(dz x̂))        in training, else gamma rstd dz
//   dweight[o, k] = Σ dc[o, p] X[p, k]         X: for each position p its taps' pixels
//   dx[p + tap] += Σ dc[o, p] weight[o, tap]
//
// dc is a product's sums in registers, which have the layout that another product's first operand
// has: channels by positions for the weight's gradient, positions by channels for the input's.
// There it is split in halves, with a scale a row, as x and the weight are. In 16 bits it is
// rounded to x's type, once: in bf16 as it is, in fp16, whose range is narrow, with a scale a row,
// too. So a gradient too small or too large for fp16 costs nothing before it is stored.
//
// Sums over positions are in fixed order: of 64 in a product's sums, of a warpgroup's units in fp32
// (those of dbeta and dgamma in double), of all in double.
#pragma once

#include "conv_direct_backward_args.h"
#include "conv_direct_sm90.cuh"

namespace fx_fuser::conv_direct {

constexpr int kWeightLoadRegisters = 88;
constexpr int kWeightProductRegisters = 208;
constexpr int kSumLoadRegisters = 104;
constexpr int kSumProductRegisters = 136;
template <class X>
constexpr int kInputProductRegisters = kSplits<X> ? 168 : 176;
template <class X>
constexpr int kInputLoadRegisters = kSplits<X> ? 96 : 80;
constexpr int kGatherRegisters = 80;
constexpr int kTile = 64;          // positions of a product whose rows they are
constexpr int kGatherBarrier = 4;  // named
static_assert(kWeightLoadRegisters + 2 * kWeightProductRegisters <= 504);
static_assert(kSumLoadRegisters + 3 * kSumProductRegisters <= 512);
template <class X>
constexpr int kInputRegisters = kInputLoadRegisters<X> + 2 * kInputProductRegisters<X>;
static_assert(kInputRegisters<float> + kGatherRegisters <= 512);
static_assert(kInputRegisters<__half> + kGatherRegisters <= 512);

// Of a channel, with d = c - mean:  dc = scale dy + slope d + offset. And of an input channel a
// value amid its pixels, which in fp32 is taken from all of them, those of the padding included:
// the convolution of what remains differs by a number, that `mean` lacks then, and dweight by pivot
// Σ dc. The sums that the tensor core truncates are then of either sign.
struct Coefficients {
  float mean[kConvGroup];
  float scale[kConvGroup];
  float slope[kConvGroup];
  float offset[kConvGroup];
  float of_dy[kConvGroup];  // dz / dy
  float rstd[kConvGroup];
  float pivot[kConvChannels];
  float weight_unscale;  // the largest of the group
  uint64_t given_full;
  uint64_t given_empty;
};
static_assert(sizeof(Coefficients) <= kConvCoefficientBytes);

struct BackwardShared : Shared {
  Coefficients* coefficients;
  float* given;  // [position][tap of nine][input channel]: what the outputs there give to the input
  double* sums;  // of the kernel that has no `given`, see accumulate_units
  float* ring;   // [position % kConvRing][input channel]: the input's gradient, not complete yet

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

// Of dy in memory, and in registers as it was loaded: of 16 bits the bits, of one or of two.
template <class X>
using Stored = std::conditional_t<kSplits<X>, float, uint16_t>;
template <class X>
using Loaded = std::conditional_t<kSplits<X>, float, uint32_t>;
template <class X>
constexpr bool kScales = !std::is_same_v<X, __nv_bfloat16>;
// Tables of places count 4 bytes an element.
template <class X>
constexpr int kPlaceShift = kSplits<X> ? 0 : 1;

// Two elements that were loaded by themselves or, in 16 bits, both as the first. Taken apart where
// they are used: loads that are followed by that do not overlap.
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

// Two values as factors of products: halves or, in 16 bits, hi alone.
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

// The convolution of pixels and weights, without their scales, less `mean`.
template <class X>
__device__ __forceinline__ float deviation_of(float sum, float weight_unscale, float pixel_unscale,
                                              float mean) {
  return kSplits<X> ? fmaf(sum * weight_unscale, pixel_unscale, -mean) : sum - mean;
}

// ---- coefficients -------------------------------------------------------------------------------

// The derivative of the epilogue, which is linear: what it makes of one.
template <class Epilogue, int kScalars, class... In, size_t... kOperand>
__device__ __forceinline__ float slope_of_epilogue(const ConvDirectArgs& args, int output,
                                                   std::index_sequence<kOperand...>) {
  constexpr int kOperands = sizeof...(In);
  const float in[1 + kOperands] = {
      1.0f, convert<float>(static_cast<const In*>(
                args.operand[kOperand].data)[output * args.operand[kOperand].stride[1]])...};
  float scalar[kScalars > 0 ? kScalars : 1];
#pragma unroll
  for (int s = 0; s < kScalars; ++s) scalar[s] = args.scalar[s];
  return static_cast<float>(Epilogue{}(in, scalar));
}

// The mean of a few pixels of each input channel, the same ones in every block; a warp has one.
__device__ __forceinline__ void find_pivots(const ConvDirectArgs& args, Coefficients& to) {
  constexpr int kPixels = 4;  // a lane
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
  float scale = 0;
  float slope = 0;
  float offset = 0;
  float of_dy = 0;
  float rstd = 1;
  if (output < args.conv.outputs) {
    of_dy = slope_of_epilogue<Epilogue, kScalars, In...>(args.conv, output,
                                                         std::index_sequence_for<In...>{});
    float factor = 1;
    if (args.variance != nullptr) {
      mean = args.mean[output];
      if (args.bias != nullptr) mean -= static_cast<double>(args.bias[output]);
      rstd = static_cast<float>(
          1.0 / sqrt(static_cast<double>(args.variance[output]) + static_cast<double>(args.eps)));
      factor = rstd * (args.gamma != nullptr ? args.gamma[output] : 1.0f);
    }
    if constexpr (kSplits<X>) mean -= convolved_pivots(args.conv, output, to.pivot);
    scale = factor * of_dy;
    if (args.dgamma != nullptr) {
      slope = -factor * rstd * (args.dgamma[output] / args.count);
      offset = -factor * (args.dbeta[output] / args.count);
    }
  }
  to.mean[channel] = static_cast<float>(mean);
  to.scale[channel] = scale;
  to.slope[channel] = slope;
  to.offset[channel] = offset;
  to.of_dy[channel] = of_dy;
  to.rstd[channel] = rstd;
}

// Barriers, weights and coefficients, by all threads. `users`: warps that release a slot.
template <class X, class Epilogue, int kScalars, class... In>
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
  if constexpr (kSplits<X>) find_pivots(args.conv, *shared.coefficients);
  arrange_weights<X>(args.conv, shared, group);
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

// Asks the L2 cache for what a unit reads of dy; a channel has two threads of a warpgroup.
template <class X>
__device__ __forceinline__ void prefetch_gradients(const ConvBackwardArgs& args, int group,
                                                   int index) {
  constexpr int kLine = 128 / sizeof(X);
  const auto thread = static_cast<int>(ptx::thread_index() % kWarpgroup);
  const int output = group * kConvGroup + thread / 2;
  if (index >= args.conv.units || output >= args.conv.outputs || args.conv.strips.size != 1) return;
  const Unit unit = Unit::at(args.conv, index);
  const Stored<X>* begin = gradients_of<X>(args, unit.sample, unit.first, output);
#pragma unroll
  for (int line = 0; line < kConvPositions / kLine; line += 2) {
    const int element = (line + thread % 2) * kLine;
    if (element < unit.end - unit.first) ptx::prefetch(begin + element);
  }
}

// ---- sums and the weight's gradient -------------------------------------------------------------

// What a loading warpgroup wrote of where positions 2 pair and 2 pair + 1 are among the elements,
// in bytes from the unit's first.
__device__ __forceinline__ uint32_t place_word(const Tail& tail, int slot, int pair) {
  return tail.place[slot][pair / 16 * 16 + pair % 4 * 4 + pair / 4 % 4];
}

// How a thread's pairs of positions are read.
enum class Rows {
  kPairs,   // whole pairs are elements that are neighbours and aligned
  kStrip,   // elements of one strip, so that all are neighbours
  kStrips,  // elements of a strip among others
};

// *from if `is_there`, else 0; without a branch.
__device__ __forceinline__ float load_if(bool is_there, const float* from) {
  float value;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.b32 there, %2, 0;\n"
      "mov.f32 %0, 0f00000000;\n"
      "@there ld.global.nc.f32 %0, [%1];\n"
      "}\n"
      : "=f"(value)
      : "l"(from), "r"(static_cast<int>(is_there)));
  return value;
}

__device__ __forceinline__ float2 load_if(bool is_there, const float2* from) {
  float2 value;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.b32 there, %3, 0;\n"
      "mov.f32 %0, 0f00000000;\n"
      "mov.f32 %1, 0f00000000;\n"
      "@there ld.global.nc.v2.f32 {%0, %1}, [%2];\n"
      "}\n"
      : "=f"(value.x), "=f"(value.y)
      : "l"(from), "r"(static_cast<int>(is_there)));
  return value;
}

__device__ __forceinline__ uint32_t load_if(bool is_there, const uint16_t* from) {
  uint32_t value;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.b32 there, %2, 0;\n"
      "mov.b32 %0, 0;\n"
      "@there ld.global.nc.u16 %0, [%1];\n"
      "}\n"
      : "=r"(value)
      : "l"(from), "r"(static_cast<int>(is_there)));
  return value;
}

__device__ __forceinline__ uint32_t load_if(bool is_there, const uint32_t* from) {
  uint32_t value;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.b32 there, %2, 0;\n"
      "mov.b32 %0, 0;\n"
      "@there ld.global.nc.b32 %0, [%1];\n"
      "}\n"
      : "=r"(value)
      : "l"(from), "r"(static_cast<int>(is_there)));
  return value;
}

// Where a thread's first channel has a unit's gradients.
template <class X>
struct Gradients {
  const Stored<X>* row;  // the unit's first element or, in strips, the strip's first
  uint32_t limit;        // of its elements in a table of places
};

// A thread's gradients of a tile, laid out as its sums, for `values_of`; zeros where there is no
// element. Returns which of its positions 8i + 2c + t are elements, as bits 2i + t.
template <class X, Rows kRows>
__device__ __forceinline__ uint32_t load_gradients(const ConvDirectArgs& args,
                                                   const Gradients<X>& gradients, int index,
                                                   const bool (&is_output)[2], const uint4* place,
                                                   Loaded<X> (&dy)[32]) {
  Unit unit;  // of index `index`; to keep it would take registers
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
          const float2 both =
              load_if(is_output[r] && is_valid[0], reinterpret_cast<const float2*>(bytes + at[0]));
          to[0] = both.x;
          to[1] = both.y;
        } else if constexpr (kRows == Rows::kPairs) {
          to[0] = load_if(is_output[r] && is_valid[0],
                          reinterpret_cast<const uint32_t*>(bytes + (at[0] >> kPlaceShift<X>)));
          to[1] = 0;
        } else {
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            to[t] = load_if(is_output[r] && is_valid[t],
                            reinterpret_cast<const Stored<X>*>(bytes + (at[t] >> kPlaceShift<X>)));
          }
        }
      }
    }
  }
  return valid;
}

// The larger of the lanes with the same channels or positions, that is of each four.
__device__ __forceinline__ float largest_of_quad(float mine) {
  mine = fmaxf(mine, __shfl_xor_sync(0xFFFFFFFF, mine, 1));
  return fmaxf(mine, __shfl_xor_sync(0xFFFFFFFF, mine, 2));
}

// total[tap] += dc's tile times the tap's pixels: dc as sums are laid out.
template <class X>
__device__ __forceinline__ void multiply_pixels(const ConvBackwardArgs& args, const Shared& shared,
                                                int slot, int tile, int first_tap, int taps,
                                                float pixel_unscale, const float (&dc)[32],
                                                float (&total)[kConvBackwardTaps][4]) {
  Scale scale[2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
  if constexpr (kScales<X>) {
    float largest[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 32; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], fabsf(dc[i]));
#pragma unroll
    for (int r = 0; r < 2; ++r) scale[r] = scale_of(largest_of_quad(largest[r]));
  }

  float sum[kConvBackwardTaps][4] = {};
  // Without a branch: beyond the last tap, that again.
  uint32_t offset[kConvBackwardTaps];
#pragma unroll
  for (int tap = 0; tap < kConvBackwardTaps; ++tap) {
    offset[tap] = 16 * args.offset[first_tap + min(tap, taps - 1)];
  }
  const int lane = threadIdx.x % 32;
  // What the upper half of the lanes addresses: in fp32 the lo of the pixels, else the next tap.
  const bool is_upper = lane / 16 == 1;
  const int pixels = args.conv.chunks * kConvChunk;
  // Positions beyond the unit's pixels are no elements; any pixels do, as long as they are there.
  const int last = pixels - 1 - args.offset[args.conv.kernel_h * args.conv.kernel_w - 1];
  const uint32_t base = ptx::shared_address(shared.slot) + slot * args.conv.slot_bytes +
                        (kSplits<X> ? lane / 16 * pixels * 16 : 0);
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step) {
    uint32_t hi[4];
    uint32_t lo[4];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const float* pair = &dc[8 * step + 2 * word];
      const float s = scale[word % 2].scale;
      const SplitPair factors = factors_of<X>(pair[0] * s, pair[1] * s);
      hi[word] = factors.hi;
      lo[word] = factors.lo;
    }
    const uint32_t row = base + 16 * min(tile * kTile + 16 * step + lane % 16, last);
    if constexpr (kSplits<X>) {
      constexpr int kAtOnce = 3;  // taps, as many as registers allow
#pragma unroll
      for (int first = 0; first < kConvBackwardTaps; first += kAtOnce) {
        uint32_t pixel[kAtOnce][4];  // hi of 16 positions, lo
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) ptx::load_turned(pixel[i], row + offset[first + i]);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          ptx::mma_m16n8k16<__half>(sum[first + i], lo, pixel[i][0], pixel[i][1]);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          ptx::mma_m16n8k16<__half>(sum[first + i], hi, pixel[i][2], pixel[i][3]);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          ptx::mma_m16n8k16<__half>(sum[first + i], hi, pixel[i][0], pixel[i][1]);
        }
      }
    } else {
      uint32_t pixel[(kConvBackwardTaps + 1) / 2][2][2];  // [pair of taps][tap]: 16 positions
#pragma unroll
      for (int tap = 0; tap < kConvBackwardTaps; tap += 2) {
        const uint32_t next = offset[min(tap + 1, kConvBackwardTaps - 1)];
        uint32_t word[4];
        ptx::load_turned(word, row + (is_upper ? next : offset[tap]));
#pragma unroll
        for (int i = 0; i < 4; ++i) pixel[tap / 2][i / 2][i % 2] = word[i];
      }
#pragma unroll
      for (int tap = 0; tap < kConvBackwardTaps; ++tap) {
        const auto& of_tap = pixel[tap / 2][tap % 2];
        ptx::mma_m16n8k16<X>(sum[tap], hi, of_tap[0], of_tap[1]);
      }
    }
  }
#pragma unroll
  for (int tap = 0; tap < kConvBackwardTaps; ++tap) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float unscaled = kScales<X> ? sum[tap][i] * scale[i / 2].unscale : sum[tap][i];
      total[tap][i] += kSplits<X> ? unscaled * pixel_unscale : unscaled;
    }
  }
}

// Product warpgroup `worker` of kWorkers, with every kWorkers-th unit.
template <class X, int kWorkers, int kSteps, bool kSums, bool kWeight>
__device__ __forceinline__ void accumulate_units(const ConvBackwardArgs& args,
                                                 const BackwardShared& shared, const Walk& walk,
                                                 int first_tap, int worker) {
  const ConvDirectArgs& conv = args.conv;
  const int thread = threadIdx.x % kWarpgroup;
  const int lane = thread % 32;
  const int channel = thread / 32 * 16 + lane / 4;
  const int all_taps = conv.kernel_h * conv.kernel_w;
  const int taps = min(all_taps - first_tap, kConvBackwardTaps);
  const Coefficients& coefficients = *shared.coefficients;
  Tail& tail = *shared.tail;
  bool is_output[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    is_output[r] = walk.group * kConvGroup + channel + 8 * r < conv.outputs;
  }
  const bool is_training = args.dgamma != nullptr;
  const bool is_one_strip = conv.strips.size == 1;
  // [of dy, of dy d][channel][thread]; in registers they would be spilled.
  double* sums = shared.sums + threadIdx.x - kWarpgroup;
  const auto sum_of = [&](int s, int r) -> double& {
    return sums[(2 * s + r) * kWorkers * kWarpgroup];
  };
  if constexpr (kSums) {
    for (int i = 0; i < 4; ++i) sum_of(i / 2, i % 2) = 0;
  }
  float total[kConvBackwardTaps][4] = {};

  Cursor cursor;
  for (int i = 0; i < worker; ++i) cursor.advance(conv.slots);
  int index = walk.first + worker * walk.step;
  Gradients<X> gradients;
  Loaded<X> dy[32];
  uint32_t valid = 0;
  const auto load = [&](int slot, int tile) {
    const auto* place = reinterpret_cast<const uint4*>(tail.place[slot]) + tile * 8 + lane % 4;
    if (args.pairs) {
      valid = load_gradients<X, Rows::kPairs>(conv, gradients, index, is_output, place, dy);
    } else if (is_one_strip) {
      valid = load_gradients<X, Rows::kStrip>(conv, gradients, index, is_output, place, dy);
    } else {
      valid = load_gradients<X, Rows::kStrips>(conv, gradients, index, is_output, place, dy);
    }
  };
  const auto begin_unit = [&] {
    prefetch_gradients<X>(args, walk.group, index + kWorkers * walk.step);
    ptx::mbarrier_wait(ptx::shared_address(&tail.full[cursor.slot]), cursor.phase);
    const Unit unit = Unit::at(conv, index);
    gradients.row = gradients_of<X>(args, unit.sample, is_one_strip ? unit.first : unit.column,
                                    walk.group * kConvGroup + channel);
    gradients.limit = static_cast<uint32_t>(4 * (unit.end - unit.first));
  };
  if (index < conv.units) {
    begin_unit();
    load(cursor.slot, 0);
  }
  int tile = 0;
  while (index < conv.units) {
    const int slot = cursor.slot;
    const int of_slot = tile;
    const float pixel_unscale = tail.unscale[slot];
    float sum[32];
    start_products<X, kSteps>(conv, shared, slot, tile, sum);
    // Read again for each tile: registers are scarce.
    float weight_unscale[2];
    float mean[2];
    float scale[2];
    float slope[2];
    float offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      weight_unscale[r] = tail.weight_unscale[channel + 8 * r];
      mean[r] = coefficients.mean[channel + 8 * r];
      scale[r] = coefficients.scale[channel + 8 * r];
      slope[r] = coefficients.slope[channel + 8 * r];
      offset[r] = coefficients.offset[channel + 8 * r];
    }
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
    float of_tile[2][2] = {};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int r = i / 2 % 2;
      const bool is_valid = valid >> (i / 4 * 2 + i % 2) & 1;
      const float d = deviation_of<X>(sum[i], weight_unscale[r], pixel_unscale, mean[r]);
      const float2 pair = values_of<X>(dy[i & ~1], dy[i | 1], args.pairs);
      const float gradient = i % 2 == 0 ? pair.x : pair.y;
      if constexpr (kSums) {
        of_tile[0][r] += gradient;
        of_tile[1][r] = fmaf(gradient, is_valid ? d : 0.0f, of_tile[1][r]);
      }
      if constexpr (kWeight) {
        const float shift = is_training ? fmaf(slope[r], d, offset[r]) : 0.0f;
        sum[i] = is_valid ? fmaf(scale[r], gradient, shift) : 0.0f;
      }
    }
    // The next tile's gradients are under way while this one is multiplied.
    if (++tile == kConvPositions / kTile) {
      tile = 0;
      for (int i = 0; i < kWorkers; ++i) cursor.advance(conv.slots);
      index += kWorkers * walk.step;
      if (index < conv.units) begin_unit();
    }
    if (index < conv.units) load(cursor.slot, tile);
    if constexpr (kSums) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int s = 0; s < 2; ++s) sum_of(s, r) += static_cast<double>(of_tile[s][r]);
      }
    }
    if constexpr (kWeight) {
      multiply_pixels<X>(args, shared, slot, of_slot, first_tap, taps, pixel_unscale, sum, total);
    }
    if (tile == 0) {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&tail.empty[slot]));
    }
  }

  const int split = kWorkers * walk.first + worker;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int output = walk.group * kConvGroup + channel + 8 * r;
    double of_dc = 0;  // in training it is zero
    if constexpr (kSums) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        double all = sum_of(s, r);
        all += __shfl_xor_sync(0xFFFFFFFF, all, 1);
        all += __shfl_xor_sync(0xFFFFFFFF, all, 2);
        if (s == 0) of_dc = all * static_cast<double>(coefficients.scale[channel + 8 * r]);
        double of_dz = all * static_cast<double>(coefficients.of_dy[channel + 8 * r]);
        if (s == 1) of_dz *= static_cast<double>(coefficients.rstd[channel + 8 * r]);
        if (lane % 4 == 0 && is_output[r] && first_tap == 0) {
          args.sums[(static_cast<int64_t>(split) * 2 + s) * conv.outputs + output] = of_dz;
        }
      }
    }
    if constexpr (kWeight) {
      if (!is_output[r]) continue;
      const int values = conv.channels * all_taps;
      float* to = args.dweight + (static_cast<int64_t>(split) * conv.outputs + output) * values;
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int input = 2 * (lane % 4) + t;
        float of_pivot = 0;
        if constexpr (kSplits<X>) {
          of_pivot = static_cast<float>(of_dc * static_cast<double>(coefficients.pivot[input]));
        }
#pragma unroll
        for (int tap = 0; tap < kConvBackwardTaps; ++tap) {
          if (tap < taps && input < conv.channels) {
            to[input * all_taps + first_tap + tap] = total[tap][2 * r + t] + of_pivot;
          }
        }
      }
    }
  }
}

template <class X, bool kSums, bool kWeight, class Epilogue, int kScalars, class... In>
__device__ __forceinline__ void run_accumulate(const ConvBackwardArgs& args) {
  constexpr int kWorkers = kWeight ? kConvWeightWorkers : kConvSumWorkers;
  const BackwardShared shared = BackwardShared::of(args.conv);
  // Groups of taps are further groups of blocks.
  Walk walk(args.conv, kWeight ? args.tap_groups : 1);
  const int tap_group = walk.group % (kWeight ? args.tap_groups : 1);
  walk.group /= kWeight ? args.tap_groups : 1;
  prepare_backward<X, Epilogue, kScalars, In...>(args, shared, walk.group, kWarpgroup / 32);
  const auto warpgroup = static_cast<int>(ptx::uniform(threadIdx.x / kWarpgroup));
  if (warpgroup == 0) {
    ptx::give_registers<kWeight ? kWeightLoadRegisters : kSumLoadRegisters>();
    load_units<X, 1, true>(args.conv, shared, 0, Stride{walk.first, walk.step},
                           shared.coefficients->pivot);
  } else {
    ptx::take_registers<kWeight ? kWeightProductRegisters : kSumProductRegisters>();
    const int first_tap = tap_group * kConvBackwardTaps;
    if (args.conv.steps == kUsualSteps<X>) {
      accumulate_units<X, kWorkers, kUsualSteps<X>, kSums, kWeight>(args, shared, walk, first_tap,
                                                                    warpgroup - 1);
    } else {
      accumulate_units<X, kWorkers, 0, kSums, kWeight>(args, shared, walk, first_tap,
                                                       warpgroup - 1);
    }
  }
}

// to[i] = Σ from[split, i]; a lane has a value, a warp every kWarps-th split.
template <class T>
__device__ __forceinline__ void reduce_splits(const ReduceArgs& args) {
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();
  constexpr int kWarps = kConvReduceThreads / 32;
  __shared__ double of_warp[kWarps][kConvReduceValues];
  const auto warp = static_cast<int>(threadIdx.x / 32);
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const int64_t value = static_cast<int64_t>(blockIdx.x) * kConvReduceValues + lane;
  double sum = 0;
  if (value < args.values) {
    const T* from = static_cast<const T*>(args.from) + value;
#pragma unroll 4
    for (int64_t split = warp; split < args.splits; split += kWarps) {
      sum += static_cast<double>(from[split * args.values]);
    }
  }
  of_warp[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || value >= args.values) return;
  double all = 0;
  for (int i = 0; i < kWarps; ++i) all += of_warp[i][lane];
  float* to = value < args.first ? args.to + value : args.to_others + (value - args.first);
  *to = static_cast<float>(all);
  if (args.to_scaled == nullptr || value >= args.first) return;
  if (args.variance != nullptr) {
    all /= sqrt(static_cast<double>(args.variance[value]) + static_cast<double>(args.eps));
  }
  args.to_scaled[value] = static_cast<float>(
      args.gamma != nullptr ? all * static_cast<double>(args.gamma[value]) : all);
}

// ---- the input's gradient -----------------------------------------------------------------------

// A block's pieces, unit by unit.
struct Pieces {
  const ConvBackwardArgs& args;
  int piece;
  int index;  // all units: there is no further one
  int own;    // first unit that is the piece's own
  int end;

  explicit __device__ __forceinline__ Pieces(const ConvBackwardArgs& args) : args(args) {
    begin(static_cast<int>(blockIdx.x));
  }

  __device__ __forceinline__ void begin(int which) {
    piece = which;
    index = args.conv.units;
    if (piece >= args.pieces) return;
    const auto sample_units = static_cast<int>(args.conv.units_per_strip.size);
    const int sample = piece / args.sample_pieces;
    const int first = (piece - sample * args.sample_pieces) * args.piece_units;
    own = sample * sample_units + first;
    index = sample * sample_units + max(first - args.units_ahead, 0);
    end = sample * sample_units + min(first + args.piece_units, sample_units);
  }

  __device__ __forceinline__ bool is_last() const { return index + 1 == end; }

  __device__ __forceinline__ void advance() {
    if (++index == end) begin(piece + static_cast<int>(gridDim.x));
  }
};

// The convolution at 64 of a slot's positions: sum[4i + 2r + t] is of position
// 16 warp + lane / 4 + 8r and channel 8i + 2 (lane % 4) + t.
template <class X, int kSteps>
__device__ __forceinline__ void start_tile(const ConvDirectArgs& args, const Shared& shared,
                                           int slot, int tile, float (&sum)[32]) {
  const uint32_t weight = ptx::uniform(ptx::shared_address(shared.weight) >> 4);
  const uint32_t pixels =
      ptx::uniform((ptx::shared_address(shared.slot) + slot * args.slot_bytes) / 16 + tile * kTile);
  const uint32_t zeros = ptx::uniform(ptx::shared_address(shared.zeros) / 16);
  const int steps = kSteps > 0 ? kSteps : args.steps;
  ptx::pin(sum);
  const auto start = [&](int i) {
    ptx::Wgmma<Factor<X>>::run(sum, descriptor_of_pixels<X>(args, i, steps, pixels, zeros),
                               descriptor(weight, args.step[i].weight), i > 0);
  };
  if constexpr (kSteps > 0) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) start(i);
    ptx::wgmma_commit();
  } else {
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      ptx::wgmma_fence();
      start(i);
      ptx::wgmma_commit();
    }
  }
}

// A tile of dc as factors: [16 channels][word] as the first operand of products.
struct FactorTile {
  uint32_t hi[4][4];
  uint32_t lo[4][4];
  float unscale[2];  // of the thread's two positions
};

// Product warpgroup `worker` of two, with two tiles of each unit.
template <class X, int kSteps>
__device__ __forceinline__ void give_units(const ConvBackwardArgs& args,
                                           const BackwardShared& shared, int worker) {
  const ConvDirectArgs& conv = args.conv;
  const int thread = threadIdx.x % kWarpgroup;
  const int lane = thread % 32;
  const int taps = conv.kernel_h * conv.kernel_w;
  const int64_t plane = static_cast<int64_t>(conv.out_h) * conv.out_w;
  const int first_channel = 2 * (lane % 4);
  const int outputs = min(conv.outputs - args.group * kConvGroup, kConvGroup);
  const Coefficients& coefficients = *shared.coefficients;
  const float weight_unscale = coefficients.weight_unscale;
  const bool is_training = args.dgamma != nullptr;
  const uint32_t weight = ptx::uniform(ptx::shared_address(shared.weight) >> 4);
  Tail& tail = *shared.tail;
  const uint32_t given_full = ptx::shared_address(&shared.coefficients->given_full);
  const uint32_t given_empty = ptx::shared_address(&shared.coefficients->given_empty);
  uint32_t given_phase = 0;
  Cursor cursor;
  for (Pieces units(args); units.index < conv.units; units.advance()) {
    const int slot = cursor.slot;
    if (worker == 0) {
      Pieces next = units;
      next.advance();
      prefetch_gradients<X>(args, args.group, next.index);
    }
    ptx::mbarrier_wait(ptx::shared_address(&tail.full[slot]), cursor.phase);
    const int2 unit = tail.unit[slot];
    const float pixel_unscale = tail.unscale[slot];
    const auto limit = static_cast<uint32_t>(4 * min(conv.advance, conv.elements - unit.y));
    const auto* sample = reinterpret_cast<const uint8_t*>(
        gradients_of<X>(args, unit.x, unit.y, args.group * kConvGroup + first_channel));
    FactorTile factors[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int tile = 2 * worker + m;
      float sum[32];
      start_tile<X, kSteps>(conv, shared, slot, tile, sum);
      Loaded<X> dy[32];
      bool is_valid[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int position = tile * kTile + thread / 32 * 16 + lane / 4 + 8 * r;
        const uint32_t word = place_word(tail, slot, position / 2);
        const uint32_t at = position % 2 == 0 ? word & 0xFFFF : word >> 16;
        is_valid[r] = at < limit;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            const auto* from = sample + (8 * i + t) * plane * sizeof(X) + (at >> kPlaceShift<X>);
            dy[4 * i + 2 * r + t] = load_if(is_valid[r] && first_channel + 8 * i + t < outputs,
                                            reinterpret_cast<const Stored<X>*>(from));
          }
        }
      }
      ptx::wgmma_wait<0>();
      ptx::pin(sum);
      float largest[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const auto pair_of = [&](const float* values, float (&to)[2]) {
          const auto pair = *reinterpret_cast<const float2*>(values + first_channel + 8 * i);
          to[0] = pair.x;
          to[1] = pair.y;
        };
        float unscale[2];
        float mean[2];
        float scale[2];
        float slope[2];
        float offset[2];
        pair_of(tail.weight_unscale, unscale);
        pair_of(coefficients.mean, mean);
        pair_of(coefficients.scale, scale);
        pair_of(coefficients.slope, slope);
        pair_of(coefficients.offset, offset);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float& value = sum[4 * i + 2 * r + t];
            const float2 pair = values_of<X>(dy[4 * i + 2 * r], dy[4 * i + 2 * r + 1], false);
            const float d = deviation_of<X>(value, unscale[t], pixel_unscale, mean[t]);
            const float shift = is_training ? fmaf(slope[t], d, offset[t]) : 0.0f;
            value = is_valid[r] ? fmaf(scale[t], t == 0 ? pair.x : pair.y, shift) : 0.0f;
            largest[r] = fmaxf(largest[r], fabsf(value));
          }
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        Scale scale{1.0f, 1.0f};
        if constexpr (kScales<X>) scale = scale_of(largest_of_quad(largest[r]));
        factors[m].unscale[r] = scale.unscale;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const SplitPair pair =
              factors_of<X>(sum[4 * i + 2 * r] * scale.scale, sum[4 * i + 2 * r + 1] * scale.scale);
          factors[m].hi[i / 2][i % 2 * 2 + r] = pair.hi;
          factors[m].lo[i / 2][i % 2 * 2 + r] = pair.lo;
        }
      }
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&tail.empty[slot]));
    cursor.advance(conv.slots);

#pragma unroll 1
    for (int first_tap = 0; first_tap < taps; first_tap += kConvBackwardTaps) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float sum[kConvColumns / 2];
        ptx::pin(sum);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          ptx::pin(factors[m].hi[step]);
          if constexpr (kSplits<X>) ptx::pin(factors[m].lo[step]);
        }
        ptx::wgmma_fence();
        // Of a tile's 64 rows of a channel, 16 bytes each, the first of a step's 16.
        const auto weights = [&](bool lo, int step) {
          constexpr uint64_t kStrideOffset = kConvTileUnits;
          constexpr uint64_t kLeadingOffset = 8;
          const int tile = 1 + (kSplits<X> && !lo ? taps : 0) + first_tap;
          return kStrideOffset << 32 | kLeadingOffset << 16 |
                 (weight + tile * kConvTileUnits + step * 16);
        };
        const auto multiply = [&](const uint32_t (&dc)[4], uint64_t by, bool accumulate) {
          ptx::wgmma_m64n72k16_turned<Factor<X>>(sum, dc, by, accumulate);
        };
        if constexpr (kSplits<X>) {
#pragma unroll
          for (int step = 0; step < 4; ++step) {
            multiply(factors[m].hi[step], weights(true, step), step > 0);
          }
#pragma unroll
          for (int step = 0; step < 4; ++step) {
            multiply(factors[m].lo[step], weights(false, step), true);
          }
        }
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          multiply(factors[m].hi[step], weights(false, step), kSplits<X> || step > 0);
        }
        ptx::wgmma_commit();
        if (m == 0) ptx::mbarrier_wait(given_empty, given_phase ^ 1);
        ptx::wgmma_wait<0>();
        ptx::pin(sum);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int position = (2 * worker + m) * kTile + thread / 32 * 16 + lane / 4 + 8 * r;
          float* to = shared.given + position * kConvColumns + first_channel;
          const float unscale = factors[m].unscale[r];
#pragma unroll
          for (int tap = 0; tap < kConvBackwardTaps; ++tap) {
            float2 given = make_float2(sum[4 * tap + 2 * r], sum[4 * tap + 2 * r + 1]);
            if constexpr (kSplits<X>) {
              given = make_float2(given.x * unscale * weight_unscale,
                                  given.y * unscale * weight_unscale);
            } else if constexpr (kScales<X>) {
              given = make_float2(given.x * unscale, given.y * unscale);
            }
            *reinterpret_cast<float2*>(to + tap * kConvChannels) = given;
          }
        }
      }
      ptx::mbarrier_arrive(given_full);
      given_phase ^= 1;
    }
  }
}

// Four values of shared memory if place < limit, else zeros; without a branch.
__device__ __forceinline__ float4 load_below(uint32_t from, uint32_t place, uint32_t limit) {
  float4 value;
  asm volatile(
      "{\n"
      ".reg .pred below;\n"
      "setp.lt.u32 below, %5, %6;\n"
      "mov.f32 %0, 0f00000000;\n"
      "mov.f32 %1, 0f00000000;\n"
      "mov.f32 %2, 0f00000000;\n"
      "mov.f32 %3, 0f00000000;\n"
      "@below ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
      : "r"(from), "r"(place), "r"(limit)
      : "memory");
  return value;
}

// Adds up what the positions give and stores what is complete; a thread has half the channels.
template <class X>
__device__ __forceinline__ void gather_units(const ConvBackwardArgs& args,
                                             const BackwardShared& shared) {
  const ConvDirectArgs& conv = args.conv;
  const int thread = threadIdx.x % kWarpgroup;
  const int first_channel = thread % 2 * 4;
  const int taps = conv.kernel_h * conv.kernel_w;
  const auto pitch = static_cast<int>(conv.pitch.size);
  const int span = kConvPositions + args.offset[taps - 1];
  const int plane = conv.h * conv.w;
  const uint32_t given_full = ptx::shared_address(&shared.coefficients->given_full);
  const uint32_t given_empty = ptx::shared_address(&shared.coefficients->given_empty);
  uint32_t given_phase = 0;
  const auto ring_at = [&](int position) {
    return reinterpret_cast<float4*>(shared.ring + position % kConvRing * kConvChannels +
                                     first_channel);
  };
  const uint32_t given = ptx::shared_address(shared.given + first_channel);
  const float4 zeros = make_float4(0, 0, 0, 0);
  for (int i = thread / 2; i < kConvRing; i += kWarpgroup / 2) *ring_at(i) = zeros;
  ptx::barrier_sync<kWarpgroup>(kGatherBarrier);
  for (Pieces units(args); units.index < conv.units; units.advance()) {
    const Unit unit = Unit::at(conv, units.index);
    X* sample =
        static_cast<X*>(args.dx) + static_cast<int64_t>(unit.sample) * conv.channels * plane;
    // Positions before this one are complete.
    const int end = unit.end < conv.elements
                        ? unit.end + (conv.kernel_w - 1) * Unit::row_of(conv, unit.end)
                        : (conv.out_h + conv.kernel_h - 1) * pitch;
    const auto store = [&](int position, const float4& complete) {
      const auto row = static_cast<int>(divide(static_cast<uint32_t>(position), conv.pitch));
      const int y = row - conv.top;
      const int x = position - row * pitch - conv.left;
      if (units.index < units.own || static_cast<uint32_t>(y) >= static_cast<uint32_t>(conv.h) ||
          static_cast<uint32_t>(x) >= static_cast<uint32_t>(conv.w)) {
        return;
      }
      const float value[4] = {complete.x, complete.y, complete.z, complete.w};
      X* to = sample + static_cast<int64_t>(first_channel) * plane + (y * conv.w + x);
#pragma unroll
      for (int c = 0; c < 4; ++c, to += plane) {
        if (first_channel + c >= conv.channels) continue;
        *to = convert<X>(args.group > 0 ? convert<float>(*to) + value[c] : value[c]);
      }
    };
#pragma unroll 1
    for (int first_tap = 0; first_tap < taps; first_tap += kConvBackwardTaps) {
      const int complete = first_tap + kConvBackwardTaps >= taps ? end : unit.position;
      ptx::mbarrier_wait(given_full, given_phase);
      int offset[kConvBackwardTaps];
#pragma unroll
      for (int tap = 0; tap < kConvBackwardTaps; ++tap) {
        offset[tap] = args.offset[min(first_tap + tap, taps - 1)];
      }
      for (int i = thread / 2; i < span; i += kWarpgroup / 2) {
        float4* to = ring_at(unit.position + i);
        float4 sum = *to;
#pragma unroll
        for (int tap = 0; tap < kConvBackwardTaps; ++tap) {
          const int position = i - offset[tap];
          const float4 from = load_below(
              given + 4 * (position * kConvColumns + tap * kConvChannels),
              static_cast<uint32_t>(position), first_tap + tap < taps ? kConvPositions : 0);
          sum.x += from.x;
          sum.y += from.y;
          sum.z += from.z;
          sum.w += from.w;
        }
        const bool is_complete = unit.position + i < complete;
        *to = is_complete ? zeros : sum;
        if (is_complete) store(unit.position + i, sum);
      }
      ptx::mbarrier_arrive(given_empty);
      given_phase ^= 1;
      ptx::barrier_sync<kWarpgroup>(kGatherBarrier);
    }
    if (units.is_last()) {
      for (int i = thread / 2; i < kConvRing; i += kWarpgroup / 2) *ring_at(i) = zeros;
      ptx::barrier_sync<kWarpgroup>(kGatherBarrier);
    }
  }
}

template <class X, class Epilogue, int kScalars, class... In>
__device__ __forceinline__ void run_input(const ConvBackwardArgs& args) {
  const BackwardShared shared = BackwardShared::of(args.conv);
  prepare_backward<X, Epilogue, kScalars, In...>(args, shared, args.group, 2 * kWarpgroup / 32);
  // In fp32 the weights that dc meets are scaled, each channel's by another factor: dc makes up for
  // what they differ by.
  Coefficients& coefficients = *shared.coefficients;
  if (kSplits<X> && threadIdx.x < kConvGroup) {
    float largest = 0;
    for (const float unscale : shared.tail->weight_unscale) largest = fmaxf(largest, unscale);
    coefficients.weight_unscale = largest;
    const float fold = shared.tail->weight_unscale[threadIdx.x] / largest;
    coefficients.scale[threadIdx.x] *= fold;
    coefficients.slope[threadIdx.x] *= fold;
    coefficients.offset[threadIdx.x] *= fold;
  }
  __syncthreads();
  const auto warpgroup = static_cast<int>(ptx::uniform(threadIdx.x / kWarpgroup));
  if (warpgroup == 0) {
    ptx::give_registers<kInputLoadRegisters<X>>();
    load_units<X, 1, true>(args.conv, shared, 0, Pieces(args), shared.coefficients->pivot);
  } else if (warpgroup == 3) {
    ptx::give_registers<kGatherRegisters>();
    gather_units<X>(args, shared);
  } else {
    ptx::take_registers<kInputProductRegisters<X>>();
    if (args.conv.steps == kUsualSteps<X>) {
      give_units<X, kUsualSteps<X>>(args, shared, warpgroup - 1);
    } else {
      give_units<X, 0>(args, shared, warpgroup - 1);
    }
  }
}

template <class Epilogue, int kScalars, class Acc, class Dy, class X, class... In>
struct Backward {
  static_assert(std::is_same_v<Acc, float> && std::is_same_v<Dy, X>);
  static_assert(std::is_same_v<X, float> || kIs16BitFloat<X>);

  template <bool kSums, bool kWeight>
  static __device__ __forceinline__ void accumulate(const ConvBackwardArgs& args) {
    run_accumulate<X, kSums, kWeight, Epilogue, kScalars, In...>(args);
  }
  static __device__ __forceinline__ void input(const ConvBackwardArgs& args) {
    run_input<X, Epilogue, kScalars, In...>(args);
  }
};

}  // namespace fx_fuser::conv_direct

#define FX_FUSER_CONV_DIRECT_ACCUMULATE(name, workers, sums, weight, ...)                     \
  extern "C" __global__ void __launch_bounds__(fx_fuser::conv_accumulate_threads(workers), 1) \
      fx_fuser_conv_direct_##name(const __grid_constant__ fx_fuser::ConvBackwardArgs args) {  \
    fx_fuser::conv_direct::Backward<__VA_ARGS__>::accumulate<sums, weight>(args);             \
  }
#define FX_FUSER_CONV_DIRECT_REDUCE(name, T)                                           \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kConvReduceThreads)           \
      fx_fuser_conv_direct_##name(const __grid_constant__ fx_fuser::ReduceArgs args) { \
    fx_fuser::conv_direct::reduce_splits<T>(args);                                     \
  }

// FX_FUSER_CONV_DIRECT_BACKWARD(Epilogue, scalars, Acc, type of dy, of x, Operands...)
#define FX_FUSER_CONV_DIRECT_BACKWARD(...)                                                        \
  FX_FUSER_CONV_DIRECT_ACCUMULATE(sums, fx_fuser::kConvSumWorkers, true, false, __VA_ARGS__)      \
  FX_FUSER_CONV_DIRECT_ACCUMULATE(weight, fx_fuser::kConvWeightWorkers, false, true, __VA_ARGS__) \
  FX_FUSER_CONV_DIRECT_ACCUMULATE(sums_and_weight, fx_fuser::kConvWeightWorkers, true, true,      \
                                  __VA_ARGS__)                                                    \
  FX_FUSER_CONV_DIRECT_REDUCE(reduce_sums, double)                                                \
  FX_FUSER_CONV_DIRECT_REDUCE(reduce_weight, float)                                               \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kConvInputThreads, 1)                    \
      fx_fuser_conv_direct_input(const __grid_constant__ fx_fuser::ConvBackwardArgs args) {       \
    fx_fuser::conv_direct::Backward<__VA_ARGS__>::input(args);                                    \
  }
