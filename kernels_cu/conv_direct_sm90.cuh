// out = epilogue(conv2d(x, weight), operands, scalars) for an input of few channels, on tensor
// cores: in fp32, with x and weight as two fp16 halves each, three products; in bf16 and fp16, one.
// And the mean and variance of that convolution, without writing it.
//
// How a convolution becomes matrix products: conv_direct_args.h. What is read is little and what is
// written is much, so the stores decide the time; all else has to stay out of their way.
//
//   loading warpgroups   pixels of a unit → registers → one scale → hi and lo, in a ring of slots
//   product warpgroup    all taps' products of a slot → a stage: [64 channels, 256 positions]
//   storing warps        8 channels each: a stage → epilogue → memory
//
// In 16 bits, where operands are a channel's, as a BatchNorm's, storing is only copying:
//
//   loading warpgroup    as above
//   product warpgroups   half of a slot's positions each: products → epilogue → a stage of results
//   copying warps        16 channels each: a stage → memory
//
// And where statistics are made, two product warpgroups with every other unit each keep moments in
// registers, and nothing is stored.
//
// Scales, in fp32, are powers of two, a unit's for its pixels and a channel's for its weights, both
// found from all the values that they serve. Where a product of the halves is not finite, which an
// infinity or a NaN makes it, the sum is done again in plain fp32. One plain product is as IEEE has
// it.
#pragma once

#include <cuda_fp16.h>

#include <cfloat>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "conv_direct_args.h"
#include "convert.cuh"
#include "epilogue_math.cuh"
#include "moments.cuh"
#include "ptx_sm90.cuh"
#include "split_sm90.cuh"
#include "wgmma_sm90.cuh"

namespace fx_fuser::conv_direct {

constexpr int kWarpgroup = 128;
constexpr int kHalf = kConvPositions / 2;  // what an instruction multiplies
constexpr int kStoreWarps = 8;
constexpr int kStoreChannels = kConvGroup / kStoreWarps;
constexpr int kStoreGroups = (kConvPositions + kConvStoreWidth + 31) / 32;  // of 32 elements
// Of 128 a thread at first: what one role gives, another takes.
constexpr int kLoadBarrier = 1;  // and the next: named barriers of the loading warpgroups
constexpr int kLoadRegisters = 96;
constexpr int kProductRegisters = 176;
constexpr int kStoreRegisters = 120;
constexpr int kApplyRegisters = 160;
constexpr int kCopyRegisters = 96;
constexpr int kStatsProductRegisters = 160;
static_assert(kLoadRegisters + kProductRegisters + 2 * kStoreRegisters <= 512);
static_assert(kLoadRegisters + 2 * kApplyRegisters + kCopyRegisters <= 512);
static_assert(2 * kLoadRegisters + 2 * kStatsProductRegisters <= 512);

// Of X, what x and weight are of.
template <class X>
constexpr bool kSplits = std::is_same_v<X, float>;
template <class X>
using Factor = std::conditional_t<kSplits<X>, __half, X>;  // of the products
template <class X>
constexpr int kUsualSteps = kSplits<X> ? 14 : 5;  // of 3 x 3 taps

// Behind the slots: what the products of positions beyond the pixels read instead is this.
struct Tail {
  uint64_t full[kConvMaxSlots];
  uint64_t empty[kConvMaxSlots];
  uint64_t staged[4][kConvMaxStages];  // of each quarter of the channels
  uint64_t stored[4][kConvMaxStages];
  float weight_unscale[kConvGroup];
  uint32_t largest[2][2][4];  // [loading warpgroup][turn][warp]
  uint32_t largest_finite[2][4];
  float unscale[kConvMaxSlots];  // of a slot's pixels
  float stage_unscale[4][kConvMaxStages];
  int2 unit[kConvMaxSlots];  // sample and first element
  union {
    // Where in a stage's channel the positions 8i + 2c and 8i + 2c + 1 go, in bytes, as
    // [i / 4][c][i % 4]: of both, the second in the upper half, or of the first alone.
    alignas(16) uint32_t place[kConvMaxSlots][kConvPositions / 2];
    alignas(16) uint32_t valid[kConvMaxSlots][kConvPositions / 32];
  };
};
static_assert(offsetof(Tail, place) <= kConvTailBytes);
static_assert(sizeof(Tail::place) == kConvMaxSlots * kConvPlaceBytes);

// Of what stages have: floats, or results of 16 bits.
template <class T>
constexpr int kVectorOf = 16 / static_cast<int>(sizeof(T));
template <class T>
constexpr int kStagesOf = kConvStages * 4 / static_cast<int>(sizeof(T));
static_assert(kStagesOf<__half> <= kConvMaxStages);

struct Shared {
  uint8_t* weight;
  uint8_t* stage;
  uint8_t* zeros;
  uint8_t* slot;
  Tail* tail;

  template <bool kStages>
  static __device__ __forceinline__ Shared of(const ConvDirectArgs& args) {
    extern __shared__ __align__(1024) uint8_t dynamic_shared[];
    Shared shared;
    shared.weight = dynamic_shared;
    uint8_t* after = shared.weight + args.weight_bytes;
    shared.stage = after;
    if constexpr (kStages) after += kConvStageBytes;
    shared.zeros = after;
    shared.slot = after + args.zero_bytes;
    shared.tail = reinterpret_cast<Tail*>(shared.slot + args.slots * args.slot_bytes);
    return shared;
  }

  // A channel's row of a stage of T.
  template <class T>
  __device__ __forceinline__ T* staged(int stage_slot, int channel) const {
    return reinterpret_cast<T*>(stage) + (stage_slot * kConvGroup + channel) * kConvStagePitch;
  }
};

// A place in a ring of slots or stages, and the parity of its barriers' phase.
struct Cursor {
  int slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// ---- units --------------------------------------------------------------------------------------

struct Unit {
  int sample;
  int column;  // of the image, where the strip begins
  int begin;   // elements [begin, end) of the strip are this unit's
  int end;
  int first;     // element that it makes
  int position;  // of that

  static __device__ __forceinline__ Unit at(const ConvDirectArgs& args, int index) {
    const auto strip = static_cast<int>(divide(static_cast<uint32_t>(index), args.units_per_strip));
    const int nth = index - strip * static_cast<int>(args.units_per_strip.size);
    Unit unit;
    unit.sample = static_cast<int>(divide(static_cast<uint32_t>(strip), args.strips));
    unit.column = (strip - unit.sample * static_cast<int>(args.strips.size)) *
                  static_cast<int>(args.strip.size);
    unit.begin = nth * args.advance;
    unit.end = min(unit.begin + args.advance, args.elements);
    unit.first = max(unit.begin - args.lead, 0);
    unit.position = unit.first + (args.kernel_w - 1) * row_of(args, unit.first);
    return unit;
  }

  static __device__ __forceinline__ int row_of(const ConvDirectArgs& args, int element) {
    return static_cast<int>(divide(static_cast<uint32_t>(element), args.strip));
  }
};

// Blocks that work on the same units lie side by side, and so do the units of neighbouring blocks.
struct Walk {
  int group;
  int first;
  int step;

  explicit __device__ __forceinline__ Walk(const ConvDirectArgs& args, int parts = 1)
      : group(static_cast<int>(blockIdx.x) % (args.groups * parts)),
        first(static_cast<int>(blockIdx.x) / (args.groups * parts)),
        step(static_cast<int>(gridDim.x) / (args.groups * parts)) {}
};

// Every step-th unit from `index` on.
struct Stride {
  int index;
  int step;

  __device__ __forceinline__ void advance() { index += step; }
};

// ---- weights ------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t magnitude_bits(float value) {
  return __float_as_uint(value) & 0x7FFFFFFF;
}

// Zeros have any scale: one that can be undone together with any other.
__device__ __forceinline__ Scale scale_of(float largest) {
  return largest == 0.0f ? Scale{1.0f, 1.0f} : Scale::of(largest);
}

// The group's weights as tiles of [64 channels][8 input channels], and the zeros.
template <class X>
__device__ __forceinline__ void arrange_weights(const ConvDirectArgs& args, const Shared& shared,
                                                int group) {
  const auto threads = static_cast<int>(blockDim.x);
  for (int i = threadIdx.x; i < args.weight_bytes / 16; i += threads) {
    reinterpret_cast<uint4*>(shared.weight)[i] = make_uint4(0, 0, 0, 0);
  }
  for (int i = threadIdx.x; i < args.zero_bytes / 16; i += threads) {
    reinterpret_cast<uint4*>(shared.zeros)[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
  const int taps = args.kernel_h * args.kernel_w;
  const int values = args.channels * taps;
  const int lane = threadIdx.x % 32;
  for (int channel = threadIdx.x / 32; channel < kConvGroup; channel += threads / 32) {
    const int output = group * kConvGroup + channel;
    const X* from = static_cast<const X*>(args.weight) + static_cast<int64_t>(output) * values;
    // Of a tap's first, or only, tile.
    const auto place_of = [&](int i) {
      return reinterpret_cast<Factor<X>*>(shared.weight) + (1 + i % taps) * kConvTileUnits * 8 +
             channel * 8 + i / taps;
    };
    if constexpr (kSplits<X>) {
      uint32_t largest = 0;
      for (int i = lane; output < args.outputs && i < values; i += 32) {
        largest = max(largest, magnitude_bits(from[i]));
      }
      const Scale scale = scale_of(__uint_as_float(__reduce_max_sync(0xFFFFFFFF, largest)));
      if (lane == 0) shared.tail->weight_unscale[channel] = scale.unscale;
      for (int i = lane; output < args.outputs && i < values; i += 32) {
        const float value = from[i] * scale.scale;
        const __half hi = __float2half_rn(value);
        __half* lo = place_of(i);
        lo[taps * kConvTileUnits * 8] = hi;
        *lo = __float2half_rn(value - __half2float(hi));
      }
    } else {
      if (lane == 0) shared.tail->weight_unscale[channel] = 1.0f;
      for (int i = lane; output < args.outputs && i < values; i += 32) *place_of(i) = from[i];
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- loading ------------------------------------------------------------------------------------

__device__ __forceinline__ float load(const float* from) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}

__device__ __forceinline__ uint32_t load(const uint16_t* from) {
  uint32_t value;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}

// *from if place < limit, else 0. By hand, so that a channel has one address, and its loads differ
// by a constant: nvcc makes an address a load, in registers of an earlier one, and ptxas then waits
// for the data of that.
__device__ __forceinline__ float load_below(const float* from, uint32_t place, uint32_t limit) {
  float value;
  asm volatile(
      "{\n"
      ".reg .pred below;\n"
      "setp.lt.u32 below, %2, %3;\n"
      "mov.f32 %0, 0f00000000;\n"
      "@below ld.global.nc.f32 %0, [%1];\n"
      "}\n"
      : "=f"(value)
      : "l"(from), "r"(place), "r"(limit));
  return value;
}

__device__ __forceinline__ uint32_t load_below(const uint16_t* from, uint32_t place,
                                               uint32_t limit) {
  uint32_t value;
  asm volatile(
      "{\n"
      ".reg .pred below;\n"
      "setp.lt.u32 below, %2, %3;\n"
      "mov.b32 %0, 0;\n"
      "@below ld.global.nc.u16 %0, [%1];\n"
      "}\n"
      : "=r"(value)
      : "l"(from), "r"(place), "r"(limit));
  return value;
}

// A thread's pixels of a unit, one of each chunk; zeros outside of the image. Of 16 bits as bits.
template <class X, int kChunks>
struct Pixels {
  using InMemory = std::conditional_t<kSplits<X>, float, uint16_t>;
  using Value = std::conditional_t<kSplits<X>, float, uint32_t>;
  Value value[kChunks][kConvChannels];

  __device__ __forceinline__ void load(const ConvDirectArgs& args, const Unit& unit) {
    const auto plane = static_cast<uint32_t>(args.h * args.w);
    const auto first = static_cast<uint32_t>(unit.position) + threadIdx.x % kWarpgroup;
    const InMemory* sample = static_cast<const InMemory*>(args.x) +
                             static_cast<int64_t>(unit.sample) * args.channels * plane;
    if (args.linear) {
      const auto after = static_cast<uint32_t>(unit.position + args.chunks * kConvChunk);
      // As most: fewer instructions then.
      if (args.channels == kConvChannels && args.chunks == kChunks && after <= plane) {
#pragma unroll
        for (int c = 0; c < kConvChannels; ++c) {
          const InMemory* from = sample + (uint64_t{plane} * c + first);
#pragma unroll
          for (int i = 0; i < kChunks; ++i) value[i][c] = conv_direct::load(from + i * kConvChunk);
        }
        return;
      }
      const uint32_t end = min(plane, after);
#pragma unroll
      for (int c = 0; c < kConvChannels; ++c) {
        const uint32_t limit = c < args.channels ? end : 0;
        const InMemory* from = sample + (uint64_t{plane} * c + first);
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          value[i][c] = load_below(from + i * kConvChunk, first + i * kConvChunk, limit);
        }
      }
      return;
    }
    uint32_t offset[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint32_t place = first + i * kConvChunk;
      const uint32_t row = divide(place, args.pitch);
      const int in_row = static_cast<int>(row) - args.top;
      const int in_column =
          static_cast<int>(place - row * args.pitch.size) + unit.column - args.left;
      const bool inside = static_cast<uint32_t>(in_row) < static_cast<uint32_t>(args.h) &&
                          static_cast<uint32_t>(in_column) < static_cast<uint32_t>(args.w);
      constexpr uint32_t kOutside = 0xFFFFFFFF;
      offset[i] =
          inside && i < args.chunks ? static_cast<uint32_t>(in_row * args.w + in_column) : kOutside;
    }
#pragma unroll
    for (int c = 0; c < kConvChannels; ++c) {
      const uint32_t limit = c < args.channels ? plane : 0;
      const InMemory* from = sample + uint64_t{plane} * c;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        value[i][c] = offset[i] < limit ? Value{__ldg(from + offset[i])} : Value{0};
      }
    }
  }

  __device__ __forceinline__ void subtract(const float* pivot) {
#pragma unroll
    for (auto& pixel : value) {
#pragma unroll
      for (int c = 0; c < kConvChannels; ++c) pixel[c] -= pivot[c];
    }
  }

  // NaN do not count, infinities only where kInfinities.
  template <bool kInfinities>
  __device__ __forceinline__ float largest() const {
    float found = 0;
#pragma unroll
    for (const auto& pixel : value) {
#pragma unroll
      for (const float one : pixel) {
        if (kInfinities || fabsf(one) < INFINITY) found = fmaxf(found, fabsf(one));
      }
    }
    return found;
  }
};

// Which positions of the unit are elements of its own, a bit each.
__device__ __forceinline__ void mark_valid(const ConvDirectArgs& args, const Unit& unit,
                                           uint32_t (&valid)[kConvPositions / 32]) {
#pragma unroll
  for (int i = 0; i < kConvPositions; i += kWarpgroup) {
    const int place = i + static_cast<int>(threadIdx.x) % kWarpgroup;
    const uint32_t position = static_cast<uint32_t>(unit.position + place);
    const int row = static_cast<int>(divide(position, args.pitch));
    const int column = static_cast<int>(position) - row * static_cast<int>(args.pitch.size);
    const int element = row * static_cast<int>(args.strip.size) + column;
    const bool is_valid = column < static_cast<int>(args.strip.size) &&
                          unit.column + column < args.out_w && element >= unit.begin &&
                          element < unit.end;
    const uint32_t bits = __ballot_sync(0xFFFFFFFF, is_valid);
    if (threadIdx.x % 32 == 0) valid[place / 32] = bits;
  }
}

// Where the positions go in a stage's channels: elements next to each other. A thread has a pair.
__device__ __forceinline__ void place_positions(const ConvDirectArgs& args, const Unit& unit,
                                                uint32_t (&place)[kConvPositions / 2]) {
  const int pair = static_cast<int>(threadIdx.x) % kWarpgroup;
  uint32_t at[2];
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const auto position = static_cast<uint32_t>(unit.position + 2 * pair + t);
    const int row = static_cast<int>(divide(position, args.pitch));
    const int column = static_cast<int>(position) - row * static_cast<int>(args.pitch.size);
    const int element = row * static_cast<int>(args.strip.size) + column;
    const bool is_element = column < static_cast<int>(args.strip.size);
    at[t] = static_cast<uint32_t>(args.place_bytes *
                                  (is_element ? element - unit.first : kConvStageUnused));
  }
  place[pair / 16 * 16 + pair % 4 * 4 + pair / 4 % 4] = args.pairs ? at[0] : at[0] | at[1] << 16;
}

// Asks the L2 cache for a unit's rows, which the loads then need not wait for DRAM for: a line a
// thread.
template <class X>
__device__ __forceinline__ void prefetch_unit(const ConvDirectArgs& args, const Unit& unit) {
  constexpr int kLine = 128;
  constexpr int kLines = kWarpgroup / kConvChannels;
  static_assert(kConvPositions * sizeof(X) < (kLines - 1) * kLine);
  const auto thread = static_cast<int>(threadIdx.x % kWarpgroup);
  const int channel = thread / kLines;
  if (channel >= args.channels || args.strips.size != 1) return;
  const int plane = args.h * args.w;
  // The rows that it has in common with the unit before, that has asked for.
  const int last_tap = Unit::row_of(args, unit.begin) - args.top + args.kernel_h - 1;
  const int row = max(last_tap, 0) * args.w;
  const int begin = unit.begin == 0 ? 0 : row;
  const int end = min(row + kConvPositions, plane);
  const X* x = static_cast<const X*>(args.x) +
               (static_cast<int64_t>(unit.sample) * args.channels + channel) * plane;
  const auto line = (reinterpret_cast<uintptr_t>(x + begin) & ~uintptr_t{kLine - 1}) +
                    static_cast<uintptr_t>(thread % kLines * kLine);
  if (line < reinterpret_cast<uintptr_t>(x + end)) {
    ptx::prefetch(reinterpret_cast<const void*>(line));
  }
}

// Loading warpgroup `loader` of kLoaders, each with every kLoaders-th slot. `units` goes through
// the units of this one, of at most kChunks. kPlaces: with a table of places, else a mask of
// elements. `pivot`, in fp32: of each input channel, is taken from all of its pixels; or
// null.
template <class X, int kLoaders, bool kPlaces, int kChunks, class Units>
__device__ __forceinline__ void load_units(const ConvDirectArgs& args, const Shared& shared,
                                           int loader, Units units, const float* pivot) {
  const int thread = threadIdx.x % kWarpgroup;
  const int plane_bytes = args.chunks * kConvChunk * 16;
  Tail& tail = *shared.tail;
  Cursor cursor;
  for (int i = 0; i < loader; ++i) cursor.advance(args.slots);

  Pixels<X, kChunks> pixels;
  if (units.index >= args.units) return;
  Unit unit = Unit::at(args, units.index);
  pixels.load(args, unit);
  for (int turn = 0;; turn ^= 1) {
    Scale scale{1.0f, 1.0f};
    if constexpr (kSplits<X>) {
      const auto largest_of_all = [&](float mine, uint32_t (&of_warp)[4]) {
        const uint32_t bits = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(mine));
        if (thread % 32 == 0) of_warp[thread / 32] = bits;
        ptx::barrier_sync<kWarpgroup>(kLoadBarrier + loader);
        return __uint_as_float(max(max(of_warp[0], of_warp[1]), max(of_warp[2], of_warp[3])));
      };
      if (pivot != nullptr) pixels.subtract(pivot);
      float largest = largest_of_all(pixels.template largest<true>(), tail.largest[loader][turn]);
      // An infinity must not decide the scale of pixels that it does not meet.
      if (largest == INFINITY) {
        largest = largest_of_all(pixels.template largest<false>(), tail.largest_finite[loader]);
      }
      scale = scale_of(largest);
    }

    ptx::mbarrier_wait(ptx::shared_address(&tail.empty[cursor.slot]), cursor.phase ^ 1);
    uint8_t* to = shared.slot + cursor.slot * args.slot_bytes + thread * 16;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if (i >= args.chunks) continue;
      uint8_t* place = to + i * kConvChunk * 16;
      const auto& value = pixels.value[i];
      if constexpr (kSplits<X>) {
        uint32_t hi[kConvChannels / 2];
        uint32_t lo[kConvChannels / 2];
#pragma unroll
        for (int c = 0; c < kConvChannels; c += 2) {
          const SplitPair pair = split(value[c] * scale.scale, value[c + 1] * scale.scale);
          hi[c / 2] = pair.hi;
          lo[c / 2] = pair.lo;
        }
        *reinterpret_cast<uint4*>(place) = make_uint4(hi[0], hi[1], hi[2], hi[3]);
        *reinterpret_cast<uint4*>(place + plane_bytes) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
      } else {
        *reinterpret_cast<uint4*>(place) =
            make_uint4(value[0] | value[1] << 16, value[2] | value[3] << 16,
                       value[4] | value[5] << 16, value[6] | value[7] << 16);
      }
    }
    if (thread == 0) {
      tail.unscale[cursor.slot] = scale.unscale;
      tail.unit[cursor.slot] = make_int2(unit.sample, unit.first);
    }
    if constexpr (kPlaces) {
      place_positions(args, unit, tail.place[cursor.slot]);
    } else {
      mark_valid(args, unit, tail.valid[cursor.slot]);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    ptx::mbarrier_arrive(ptx::shared_address(&tail.full[cursor.slot]));
    for (int i = 0; i < kLoaders; ++i) cursor.advance(args.slots);

    units.advance();
    if (units.index >= args.units) break;
    const auto prefetch_next = [&] {
      Units after = units;
      after.advance();
      if (after.index < args.units) prefetch_unit<X>(args, Unit::at(args, after.index));
    };
    unit = Unit::at(args, units.index);
    // To do that while the loads are under way.
    constexpr bool kHasRegisters = kChunks <= 4 && std::is_same_v<Units, Stride>;
    if constexpr (!kHasRegisters) prefetch_next();
    pixels.load(args, unit);
    if constexpr (kHasRegisters) prefetch_next();
  }
}

// Most have few chunks: fewer instructions then.
template <class X, int kLoaders, bool kPlaces, class Units>
__device__ __forceinline__ void load_units(const ConvDirectArgs& args, const Shared& shared,
                                           int loader, const Units& units,
                                           const float* pivot = nullptr) {
  constexpr int kUsual = 4;
  if (args.chunks <= kUsual) {
    load_units<X, kLoaders, kPlaces, kUsual>(args, shared, loader, units, pivot);
  } else {
    load_units<X, kLoaders, kPlaces, kConvMaxChunks>(args, shared, loader, units, pivot);
  }
}

// Of a block's walk, with every kLoaders-th unit each.
template <class X, int kLoaders, bool kPlaces>
__device__ __forceinline__ void load_units(const ConvDirectArgs& args, const Shared& shared,
                                           int loader) {
  const Walk walk(args);
  load_units<X, kLoaders, kPlaces>(args, shared, loader,
                                   Stride{walk.first + loader * walk.step, kLoaders * walk.step});
}

// ---- products -----------------------------------------------------------------------------------

// Of a K-major operand without swizzle: 8 rows of 16 bytes are 128, eight such blocks follow each
// other, and `begin_and_leading` is one of a ConvStep's.
__device__ __forceinline__ uint64_t descriptor(uint32_t base, uint32_t begin_and_leading) {
  constexpr uint64_t kStrideOffset = 128 / 16;
  return kStrideOffset << 32 | (base + begin_and_leading);
}

// The pixels of a step's products, from the slot's `pixels` on; both addresses in 16 bytes.
template <class X>
__device__ __forceinline__ uint64_t descriptor_of_pixels(const ConvDirectArgs& args, int step,
                                                         int steps, uint32_t pixels,
                                                         uint32_t zeros) {
  const uint32_t of_step = args.step[step].pixels;
  if (!kSplits<X> && step == steps - 1 && of_step <= 0xFFFF) {
    return descriptor(zeros, (pixels + of_step - zeros) << 16);
  }
  return descriptor(pixels, of_step);
}

// Of 3 x 3 taps in fp32, a thread's part of the hi weights that two steps each use, as wgmma's
// first operand: those steps read a third less of shared memory.
struct KeptWeights {
  static constexpr int kCount = 4;
  static constexpr int kFirst = 5;  // of the steps, and kCount later again
  uint32_t word[kCount][4];

  __device__ __forceinline__ void load(const ConvDirectArgs& args, const Shared& shared) {
    const int thread = threadIdx.x % kWarpgroup;
    const int row = thread / 32 * 16 + thread % 32 / 4;
    const auto* from = reinterpret_cast<const uint32_t*>(shared.weight) + row * 4 + thread % 4;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t weight = args.step[kFirst + i].weight;
      const uint32_t* half = from + (weight & 0xFFFF) * 4;
      const uint32_t* other = half + (weight >> 16) * 4;
      word[i][0] = half[0];
      word[i][1] = half[8 * 4];
      word[i][2] = other[0];
      word[i][3] = other[8 * 4];
    }
  }

  static __device__ constexpr bool has(int step) {
    return step >= kFirst && step < kFirst + 2 * kCount;
  }
};
struct NoWeights {};

// Starts all taps' products of a part of a slot's positions, twice as many as a thread has sums;
// kSteps: how many there are, if known.
// sum[4i + 2r + t]: channel 16 warp + lane / 4 + 8r, position 8i + 2 (lane % 4) + t.
template <class X, int kSteps, int kSums, class Kept = NoWeights>
__device__ __forceinline__ void start_products(const ConvDirectArgs& args, const Shared& shared,
                                               int slot, int part, float (&sum)[kSums],
                                               [[maybe_unused]] const Kept& kept = {}) {
  const uint32_t weight = ptx::uniform(ptx::shared_address(shared.weight) >> 4);
  const uint32_t pixels = ptx::uniform(
      (ptx::shared_address(shared.slot) + slot * args.slot_bytes) / 16 + part * (2 * kSums));
  const uint32_t zeros = ptx::uniform(ptx::shared_address(shared.zeros) / 16);
  const int steps = kSteps > 0 ? kSteps : args.steps;
  ptx::pin(sum);
  const auto start = [&](int i) {
    const uint64_t of_pixels = descriptor_of_pixels<X>(args, i, steps, pixels, zeros);
    if constexpr (std::is_same_v<Kept, KeptWeights>) {
      if (Kept::has(i)) {
        ptx::wgmma_m64n128k16(sum, kept.word[(i - Kept::kFirst) % Kept::kCount], of_pixels, true);
        return;
      }
    }
    ptx::Wgmma<Factor<X>>::run(sum, descriptor(weight, args.step[i].weight), of_pixels, i > 0);
  };
  if constexpr (kSteps > 0) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) start(i);
    ptx::wgmma_commit();
  } else {
    // Fence and commit in each step: around the loop alone, ptxas adds fences or serialises.
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      ptx::wgmma_fence();
      start(i);
      ptx::wgmma_commit();
    }
  }
}

// use(slot, half, sum) for both halves of the positions of the units from `first` on, which are
// every `every`-th of the ring; one half's products run while the other's sums are used.
template <class X, int kSteps, class Use, class Kept = NoWeights>
__device__ __forceinline__ void multiply_units(const ConvDirectArgs& args, const Shared& shared,
                                               int first, int step, int every, Cursor cursor,
                                               const Use& use, const Kept& kept = {}) {
  Tail& tail = *shared.tail;
  if (first >= args.units) return;
  float sum[2][64];
  ptx::mbarrier_wait(ptx::shared_address(&tail.full[cursor.slot]), cursor.phase);
  start_products<X, kSteps>(args, shared, cursor.slot, 0, sum[0], kept);
  for (int index = first; index < args.units; index += step) {
    const int slot = cursor.slot;
    ptx::wgmma_wait<0>();
    ptx::pin(sum[0]);
    start_products<X, kSteps>(args, shared, slot, 1, sum[1], kept);
    use(slot, 0, sum[0]);
    ptx::wgmma_wait<0>();
    ptx::pin(sum[1]);
    // After the last unit once more, for nothing: a condition would serialise the products.
    if (index + step < args.units) {
      for (int i = 0; i < every; ++i) cursor.advance(args.slots);
      ptx::mbarrier_wait(ptx::shared_address(&tail.full[cursor.slot]), cursor.phase);
    }
    start_products<X, kSteps>(args, shared, cursor.slot, 0, sum[0], kept);
    use(slot, 1, sum[1]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&tail.empty[slot]));
  }
  ptx::wgmma_wait<0>();
}

// How far from where a sector begins a channel's first element is, in elements.
__device__ __forceinline__ uint32_t phase_of(const ConvDirectArgs& args, int sample, int output) {
  const auto plane = static_cast<uint32_t>(args.out_h) * static_cast<uint32_t>(args.out_w);
  return args.phase + static_cast<uint32_t>(sample * args.outputs + output) * plane;
}

// Where in its row of a stage a channel's first element is, such that vectors in memory, of kWidth,
// are vectors in the stage.
template <int kWidth>
__device__ __forceinline__ uint32_t shift_of(uint32_t phase, int first) {
  return (static_cast<uint32_t>(first) + phase) % kWidth;
}

// What a thread has of 128 positions, [2 * pair + r] of its two channels, to their rows of the
// stage. With kPairs, both of a pair are neighbours there, too.
template <class T, bool kPairs>
__device__ __forceinline__ void stage_pairs(const Vec<T, 2> (&pair)[32], const uint4* places,
                                            T* row) {
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
        }
      }
    }
  }
}

template <class X, int kSteps>
__device__ __forceinline__ void stage_units(const ConvDirectArgs& args, const Shared& shared) {
  const Walk walk(args);
  const int thread = threadIdx.x % kWarpgroup;
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int channel = warp * 16 + lane / 4;
  Tail& tail = *shared.tail;
  Cursor stage;
  float* row = nullptr;
  std::conditional_t<kSplits<X> && kSteps == kUsualSteps<X>, KeptWeights, NoWeights> kept;
  if constexpr (std::is_same_v<decltype(kept), KeptWeights>) kept.load(args, shared);
  multiply_units<X, kSteps>(
      args, shared, walk.first, walk.step, 1, Cursor{},
      [&](int slot, int half, const float (&sum)[64]) {
        if (half == 0) {
          // The channel eight rows below has the same shift: eight planes are whole vectors.
          const int2 unit = tail.unit[slot];
          const uint32_t phase = phase_of(args, unit.x, walk.group * kConvGroup + channel);
          row =
              shared.staged<float>(stage.slot, channel) + shift_of<kConvStoreWidth>(phase, unit.y);
          ptx::mbarrier_wait(ptx::shared_address(&tail.stored[warp][stage.slot]), stage.phase ^ 1);
        }
        const auto* places =
            reinterpret_cast<const uint4*>(tail.place[slot]) + half * 16 + lane % 4;
        Vec<float, 2> pair[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) pair[i] = {sum[2 * i], sum[2 * i + 1]};
        if (args.pairs) {
          stage_pairs<float, true>(pair, places, row);
        } else {
          stage_pairs<float, false>(pair, places, row);
        }
        if (half == 1) {
          if (lane == 0) tail.stage_unscale[warp][stage.slot] = tail.unscale[slot];
          ptx::mbarrier_arrive(ptx::shared_address(&tail.staged[warp][stage.slot]));
          stage.advance(kConvStages);
        }
      },
      kept);
}

// ---- statistics ---------------------------------------------------------------------------------

// Product warpgroup `worker` of two. About the pivot, one of the unit's values: batch_stats.cu.
template <class X, int kSteps>
__device__ __forceinline__ void measure_units(const ConvDirectArgs& args, const Shared& shared,
                                              int worker) {
  const Walk walk(args);
  const int thread = threadIdx.x % kWarpgroup;
  const int lane = thread % 32;
  const int channel = thread / 32 * 16 + lane / 4;
  Tail& tail = *shared.tail;
  Moments<float> moments[2] = {};
  float pivot[2];
  float count;
  float total[2][2];  // of each channel two, so that no sum waits for the one before
  float squares[2][2];
  Cursor cursor;
  for (int i = 0; i < worker; ++i) cursor.advance(args.slots);
  const auto measure = [&](int slot, int half, const float (&sum)[64]) {
    if (half == 0) {
      count = 0;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // The unit's first position is always one of its elements.
        pivot[r] = __shfl_sync(0xFFFFFFFF, sum[2 * r], lane & ~3);
#pragma unroll
        for (int t = 0; t < 2; ++t) total[r][t] = squares[r][t] = 0;
      }
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      // Of 32 positions the lane has bits 8b + t.
      const uint32_t valid = tail.valid[slot][half * 4 + word] >> (lane % 4 * 2) & 0x03030303;
      count += static_cast<float>(__popc(valid));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const bool is_valid = valid >> (8 * i + t) & 1;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float deviation = sum[(word * 4 + i) * 4 + 2 * r + t] - pivot[r];
            if (is_valid) {
              total[r][t] += deviation;
              squares[r][t] = fmaf(deviation, deviation, squares[r][t]);
            }
          }
        }
      }
    }
    if (half == 0 || count == 0) return;
    const float pixel_unscale = kSplits<X> ? tail.unscale[slot] : 1.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float deviations = total[r][0] + total[r][1];
      const float shift = deviations / count;
      const float m2 = squares[r][0] + squares[r][1] - deviations * shift;
      // Scales one after the other: their product can leave fp32's range.
      const float unscale = kSplits<X> ? tail.weight_unscale[channel + 8 * r] : 1.0f;
      moments[r].merge({count, (pivot[r] + shift) * unscale * pixel_unscale,
                        fmaxf(m2, 0.0f) * unscale * pixel_unscale * unscale * pixel_unscale});
      if (isnan(m2)) moments[r].m2 = m2;
    }
  };
  multiply_units<X, kSteps>(args, shared, walk.first + worker * walk.step, 2 * walk.step, 2, cursor,
                            measure);
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
    for (auto& mine : moments) {
      mine.merge({__shfl_xor_sync(0xFFFFFFFF, mine.count, distance),
                  __shfl_xor_sync(0xFFFFFFFF, mine.mean, distance),
                  __shfl_xor_sync(0xFFFFFFFF, mine.m2, distance)});
    }
  }
  const int splits = 2 * walk.step;
  const int split = 2 * walk.first + worker;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int output = walk.group * kConvGroup + channel + 8 * r;
    if (lane % 4 == 0 && output < args.outputs) {
      static_cast<Moments<float>*>(args.partial)[static_cast<int64_t>(output) * splits + split] =
          moments[r];
    }
  }
}

// ---- storing ------------------------------------------------------------------------------------

// By hand: ptxas puts a branch around each of many such stores.
__device__ __forceinline__ void store_if(bool condition, void* to, const uint4& value) {
  asm volatile(
      "{\n"
      ".reg .pred condition;\n"
      "setp.ne.b32 condition, %5, 0;\n"
      "@condition st.global.v4.b32 [%0], {%1, %2, %3, %4};\n"
      "}\n" ::"l"(to),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(static_cast<int>(condition))
      : "memory");
}

// The convolution at one place in plain fp32, as IEEE has it.
__device__ __forceinline__ float plain_sum(const ConvDirectArgs& args, int sample, int output,
                                           int row, int column) {
  const int taps = args.kernel_h * args.kernel_w;
  const float* weight =
      static_cast<const float*>(args.weight) + static_cast<int64_t>(output) * args.channels * taps;
  float sum = 0;
#pragma unroll 1
  for (int c = 0; c < args.channels; ++c) {
    const float* plane = static_cast<const float*>(args.x) +
                         (static_cast<int64_t>(sample) * args.channels + c) * (args.h * args.w);
#pragma unroll 1
    for (int tap = 0; tap < taps; ++tap) {
      const int in_row = row + tap / args.kernel_w - args.top;
      const int in_column = column + tap % args.kernel_w - args.left;
      const bool inside = static_cast<uint32_t>(in_row) < static_cast<uint32_t>(args.h) &&
                          static_cast<uint32_t>(in_column) < static_cast<uint32_t>(args.w);
      sum = fmaf(inside ? plane[in_row * args.w + in_column] : 0.0f, weight[c * taps + tap], sum);
    }
    if (isnan(sum)) return sum;  // and stays one: a tensor full of them is soon done
  }
  return sum;
}

template <class Epilogue, int kScalars, class X, class Out, class Operands, class... In>
struct Store;

template <class Epilogue, int kScalars, class X, class Out, size_t... kOperand, class... In>
struct Store<Epilogue, kScalars, X, Out, std::index_sequence<kOperand...>, In...> {
  static constexpr int kOperands = sizeof...(In);
  static constexpr int kSlots = kOperands > 0 ? kOperands : 1;
  static constexpr int kScalarSlots = kScalars > 0 ? kScalars : 1;
  static constexpr int kQuarter = 8;  // lanes that have a channel
  static constexpr int kRounds = kStoreChannels / (32 / kQuarter);
  static constexpr int kAtOnce = kOperands < 6 ? 4 : 2;  // vectors: what registers allow
  static_assert(kOperands <= kConvMaxOperands && kScalars <= kMaxScalars);

  const ConvDirectArgs& args;
  Unit unit;

  // What an operand is in a channel of the sample, at its first pixel.
  template <int kOne, class T>
  __device__ __forceinline__ const T* channel_of(int output) const {
    const ConvOperand& operand = args.operand[kOne];
    return static_cast<const T*>(operand.data) + unit.sample * operand.stride[0] +
           output * operand.stride[1];
  }

  template <int kOne, class T>
  __device__ __forceinline__ float pixel_of(int output, int row, int column) const {
    const ConvOperand& operand = args.operand[kOne];
    return convert<float>(
        channel_of<kOne, T>(output)[row * operand.stride[2] + column * operand.stride[3]]);
  }

  static __device__ __forceinline__ float apply(const ConvDirectArgs& args, float c,
                                                const float (&operand)[kSlots]) {
    float in[1 + kOperands];
    in[0] = c;
#pragma unroll
    for (int i = 0; i < kOperands; ++i) in[1 + i] = operand[i];
    float scalar[kScalarSlots];
#pragma unroll
    for (int s = 0; s < kScalarSlots; ++s) scalar[s] = args.scalar[s];
    return static_cast<float>(Epilogue{}(in, scalar));
  }

  __device__ __forceinline__ Out compute(float c, const float (&operand)[kSlots]) const {
    return convert<Out>(apply(args, c, operand));
  }

  // The elements of a channel that the unit writes, from the start of a sector to that of another.
  struct Range {
    int first;  // at or before `begin`, where a vector starts
    int begin;
    int end;
    int staged;  // where `first` is in the channel's row of the stage
  };

  // With vectors of kWidth.
  template <int kWidth>
  __device__ __forceinline__ Range range_of(int output) const {
    const uint32_t phase = phase_of(args, unit.sample, output);
    const auto before = [&](int element) {
      return static_cast<int>((static_cast<uint32_t>(element) + phase) &
                              static_cast<uint32_t>(args.overlap));
    };
    Range range;
    range.begin = max(unit.begin - before(unit.begin), 0);
    range.end = unit.end < args.elements ? unit.end - before(unit.end) : unit.end;
    range.first = range.begin - static_cast<int>(shift_of<kWidth>(phase, range.begin));
    range.staged = range.first - unit.first + static_cast<int>(shift_of<kWidth>(phase, unit.first));
    return range;
  }

  // The same in a channel's row of a stage of results, where its first element is at `shift`.
  struct RowRange {
    int shift;
    int begin;
    int end;
  };

  __device__ __forceinline__ RowRange row_range_of(int output) const {
    const Range range = range_of<kVectorOf<Out>>(output);
    const uint32_t phase = phase_of(args, unit.sample, output);
    const auto shift = static_cast<int>(shift_of<kVectorOf<Out>>(phase, unit.first));
    return {shift, range.begin - unit.first + shift, range.end - unit.first + shift};
  }

  __device__ __forceinline__ int64_t plane_of(int output) const {
    return (static_cast<int64_t>(unit.sample) * args.outputs + output) *
           (static_cast<int64_t>(args.out_h) * args.out_w);
  }

  // The whole vectors of a channel whose elements are neighbours in memory and have the same
  // operands; a quarter of the warp has a channel. Returns whether a convolution among them is not
  // finite. No branches: the vectors' instructions then overlap.
  template <bool kSaves>
  __device__ __forceinline__ bool store_vectors(const Range& range, int64_t plane,
                                                const float* staged, float unscale,
                                                const float (&operand)[kSlots]) const {
    using Vector = Vec<Out, kConvStoreWidth>;
    constexpr int kLastInRow = kConvStagePitch - kConvStoreWidth;
    const int first = threadIdx.x % kQuarter * kConvStoreWidth;
    Out* out = static_cast<Out*>(args.out) + plane;
    X* c = kSaves ? static_cast<X*>(args.c) + plane : nullptr;
    bool any_broken = false;
#pragma unroll kAtOnce
    for (int v = 0; v < kConvPositions / (kQuarter * kConvStoreWidth); ++v) {
      const int at = first + v * (kQuarter * kConvStoreWidth);
      const int element = range.first + at;
      const bool is_whole = element >= range.begin && element + kConvStoreWidth <= range.end;
      // A sector of 16-bit elements is so wide that the last vector can lie behind the channel's
      // row, where another warp writes.
      const int in_row = sizeof(Out) < 4 ? min(at, kLastInRow - range.staged) : at;
      const auto loaded = *reinterpret_cast<const float4*>(staged + in_row);
      const float value[kConvStoreWidth] = {loaded.x * unscale, loaded.y * unscale,
                                            loaded.z * unscale, loaded.w * unscale};
      float broken = 0;  // 0 times all of them: NaN where one is not finite
      Vector result;
#pragma unroll
      for (int e = 0; e < kConvStoreWidth; ++e) {
        broken = fmaf(value[e], 0.0f, broken);
        result.element[e] = compute(value[e], operand);
      }
      any_broken |= kSplits<X> && is_whole && isnan(broken);
      if (is_whole) *reinterpret_cast<Vector*>(out + element) = result;
      if constexpr (kSaves) {
        Vec<X, kConvStoreWidth> saved;
#pragma unroll
        for (int e = 0; e < kConvStoreWidth; ++e) saved.element[e] = convert<X>(value[e]);
        if (is_whole && args.c_is_like_out) {
          *reinterpret_cast<Vec<X, kConvStoreWidth>*>(c + element) = saved;
        } else if (is_whole) {
#pragma unroll
          for (int e = 0; e < kConvStoreWidth; ++e) c[element + e] = saved.element[e];
        }
      }
    }
    return any_broken;
  }

  // All elements of a channel, or those that store_vectors leaves: of vectors that are not whole,
  // and those whose convolution is not finite, which is done again. Any operands, any strips.
  __device__ __forceinline__ void store_elements(const Range& range, int output,
                                                 const float* staged, float weight_unscale,
                                                 float pixel_unscale, bool all) const {
    const int64_t plane = plane_of(output);
#pragma unroll 1
    for (int group = 0; group < kStoreGroups; ++group) {
      const int nth = group * 32 + static_cast<int>(threadIdx.x) % 32;
      const int element = range.first + nth;
      const int row = Unit::row_of(args, element);
      const int column = element - row * static_cast<int>(args.strip.size) + unit.column;
      if (element < range.begin || element >= range.end || column >= args.out_w) continue;
      float value = staged[nth] * weight_unscale * pixel_unscale;
      const bool is_finite = !kSplits<X> || fabsf(value) < INFINITY;
      const int vector = element - nth % kConvStoreWidth;
      const bool is_whole = vector >= range.begin && vector + kConvStoreWidth <= range.end;
      if (!all && is_whole && is_finite) continue;
      if constexpr (kSplits<X>) {
        if (!is_finite) value = plain_sum(args, unit.sample, output, row, column);
      }
      float operand[kSlots];
      ((operand[kOperand] = pixel_of<kOperand, In>(output, row, column)), ...);
      const int64_t offset = plane + (row * args.out_w + column);
      static_cast<Out*>(args.out)[offset] = compute(value, operand);
      if (args.c != nullptr) static_cast<X*>(args.c)[offset] = convert<X>(value);
    }
  }

  static __device__ __forceinline__ void run(const ConvDirectArgs& args, const Shared& shared) {
    const Walk walk(args);
    const int warp = static_cast<int>(threadIdx.x / 32) - 2 * kWarpgroup / 32;
    const int lane = threadIdx.x % 32;
    const int producer = warp / 2;  // the product's warp with these channels
    const int first_channel = warp * kStoreChannels;
    const int first_output = walk.group * kConvGroup + first_channel;
    const int outputs = min(kStoreChannels, args.outputs - first_output);
    const uint32_t all = outputs > 0 ? (1u << outputs) - 1 : 0;
    Tail& tail = *shared.tail;
    // A lane's channels, one after the other.
    int channel[kRounds];
    float weight_unscale[kRounds];
    float operand[kRounds][kSlots] = {};
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      channel[round] = round * (kStoreChannels / kRounds) + lane / kQuarter;
      weight_unscale[round] = tail.weight_unscale[first_channel + channel[round]];
    }
    Cursor stage;
    for (int index = walk.first; index < args.units; index += walk.step) {
      const Store store{args, Unit::at(args, index)};
      Range range[kRounds];
      bool has_edges[kRounds];
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        const int output = first_output + channel[round];
        range[round] = store.template range_of<kConvStoreWidth>(output);
        has_edges[round] = range[round].begin != range[round].first ||
                           (range[round].end - range[round].first) % kConvStoreWidth != 0;
        if (channel[round] >= outputs) {
          range[round].end = range[round].begin;
          has_edges[round] = false;
        } else if (!args.any_per_pixel && (args.any_per_sample || index == walk.first)) {
          ((operand[round][kOperand] =
                convert<float>(*store.template channel_of<kOperand, In>(output))),
           ...);
        }
      }
      ptx::mbarrier_wait(ptx::shared_address(&tail.staged[producer][stage.slot]), stage.phase);
      const float pixel_unscale = tail.stage_unscale[producer][stage.slot];
      const float* staged = shared.staged<float>(stage.slot, first_channel);
      float unscale[kRounds];
      bool is_normal = true;  // can the scales be undone at once
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        unscale[round] = weight_unscale[round] * pixel_unscale;
        is_normal &= unscale[round] >= FLT_MIN && unscale[round] < INFINITY;
      }
      const bool by_vectors =
          !args.any_per_pixel && args.strips.size == 1 && __all_sync(0xFFFFFFFF, is_normal);
      uint32_t by_elements = 0;  // a bit a channel
#pragma unroll
      for (int round = 0; round < kRounds && by_vectors; ++round) {
        const int64_t plane = store.plane_of(first_output + channel[round]);
        const float* from = staged + channel[round] * kConvStagePitch + range[round].staged;
        const bool is_broken = args.c == nullptr
                                   ? store.template store_vectors<false>(
                                         range[round], plane, from, unscale[round], operand[round])
                                   : store.template store_vectors<true>(
                                         range[round], plane, from, unscale[round], operand[round]);
        by_elements |= static_cast<uint32_t>(is_broken || has_edges[round]) << channel[round];
      }
      // What is stored again is stored after.
      by_elements = by_vectors ? __reduce_or_sync(0xFFFFFFFF, by_elements) : all;
      __syncwarp();
      for (; by_elements != 0; by_elements &= by_elements - 1) {
        const int i = __ffs(by_elements) - 1;
        const Range of_channel = store.template range_of<kConvStoreWidth>(first_output + i);
        store.store_elements(of_channel, first_output + i,
                             staged + i * kConvStagePitch + of_channel.staged,
                             tail.weight_unscale[first_channel + i], pixel_unscale, !by_vectors);
      }
      ptx::mbarrier_arrive(ptx::shared_address(&tail.stored[producer][stage.slot]));
      stage.advance(kStagesOf<float>);
    }
  }

  // ---- with the epilogue applied ahead of the stages --------------------------------------------

  // Product warpgroup `part` of two, which has this half of each unit's positions: while one
  // applies the epilogue, whatever that is made of, the other's products run.
  static __device__ __forceinline__ void apply_units(const ConvDirectArgs& args,
                                                     const Shared& shared, int part) {
    const Walk walk(args);
    const int thread = threadIdx.x % kWarpgroup;
    const int warp = thread / 32;
    const int lane = thread % 32;
    const int channel = warp * 16 + lane / 4;
    const int output = walk.group * kConvGroup + channel;
    Tail& tail = *shared.tail;
    float operand[2][kSlots] = {};
    Cursor slot;
    Cursor stage;
    for (int index = walk.first; index < args.units; index += walk.step) {
      ptx::mbarrier_wait(ptx::shared_address(&tail.full[slot.slot]), slot.phase);
      float sum[64];
      if (args.steps == kUsualSteps<X>) {
        start_products<X, kUsualSteps<X>>(args, shared, slot.slot, part, sum);
      } else {
        start_products<X, 0>(args, shared, slot.slot, part, sum);
      }
      const int2 unit = tail.unit[slot.slot];
      if (args.any_per_sample || index == walk.first) {
        const Store of_sample{args, Unit{unit.x}};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int present = min(output + 8 * r, args.outputs - 1);
          ((operand[r][kOperand] =
                convert<float>(*of_sample.template channel_of<kOperand, In>(present))),
           ...);
        }
      }
      // The channel eight rows below has the same shift: eight planes are whole vectors.
      Out* row = shared.staged<Out>(stage.slot, channel) +
                 shift_of<kVectorOf<Out>>(phase_of(args, unit.x, output), unit.y);
      const auto* places =
          reinterpret_cast<const uint4*>(tail.place[slot.slot]) + part * 16 + lane % 4;
      ptx::mbarrier_wait(ptx::shared_address(&tail.stored[warp][stage.slot]), stage.phase ^ 1);
      ptx::wgmma_wait<0>();
      ptx::pin(sum);
      Vec<Out, 2> pair[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        pair[i] = convert_pair<Out>(apply(args, sum[2 * i], operand[i % 2]),
                                    apply(args, sum[2 * i + 1], operand[i % 2]));
      }
      if (args.pairs) {
        stage_pairs<Out, true>(pair, places, row);
      } else {
        stage_pairs<Out, false>(pair, places, row);
      }
      ptx::mbarrier_arrive(ptx::shared_address(&tail.staged[warp][stage.slot]));
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&tail.empty[slot.slot]));
      slot.advance(args.slots);
      stage.advance(kStagesOf<Out>);
    }
  }

  // Stages to memory, 16 channels a warp. A lane has the same vector of each channel's row.
  static __device__ __forceinline__ void copy_units(const ConvDirectArgs& args,
                                                    const Shared& shared) {
    constexpr int kWidth = kVectorOf<Out>;
    constexpr int kCopyChannels = kConvGroup / 4;
    constexpr int kTogether = 8;
    const Walk walk(args);
    const int warp = static_cast<int>(threadIdx.x % kWarpgroup) / 32;
    const int lane = threadIdx.x % 32;
    const int first_output = walk.group * kConvGroup + warp * kCopyChannels;
    const int outputs = min(args.outputs - first_output, kCopyChannels);
    const uint64_t plane = static_cast<uint64_t>(args.out_h) * static_cast<uint32_t>(args.out_w);
    Tail& tail = *shared.tail;
    Cursor stage;
    for (int index = walk.first; index < args.units; index += walk.step) {
      const Store store{args, Unit::at(args, index)};
      const Unit& unit = store.unit;
      // A row has up to 33 vectors, the first of which is written of a sample's first unit alone:
      // the others make a vector and more ahead of what they write.
      const int skipped = unit.begin > unit.first;
      const int at = (lane + skipped) * kWidth;
      uint32_t lanes = 0;  // that have a whole vector of channel lane % kCopyChannels
      if (lane % kCopyChannels < outputs) {
        const RowRange row = store.row_range_of(first_output + lane % kCopyChannels);
        const int begin = (row.begin + kWidth - 1) / kWidth;
        const int count = max(row.end / kWidth - begin, 0);
        lanes = static_cast<uint32_t>(((uint64_t{1} << count) - 1) << (begin - skipped));
      }
      // A row's vectors are vectors in memory: from a channel's first element down to where one
      // begins.
      auto to = reinterpret_cast<uint64_t>(static_cast<Out*>(args.out) +
                                           store.plane_of(first_output) + unit.first + at);
      const Out* staged = shared.staged<Out>(stage.slot, warp * kCopyChannels);
      ptx::mbarrier_wait(ptx::shared_address(&tail.staged[warp][stage.slot]), stage.phase);
#pragma unroll
      for (int begin = 0; begin < kCopyChannels; begin += kTogether) {
        uint4 value[kTogether];
#pragma unroll
        for (int n = 0; n < kTogether; ++n) {
          value[n] = *reinterpret_cast<const uint4*>(staged + (begin + n) * kConvStagePitch + at);
        }
#pragma unroll
        for (int n = 0; n < kTogether; ++n) {
          const bool is_whole = __shfl_sync(0xFFFFFFFF, lanes, begin + n) >> lane & 1;
          store_if(is_whole, reinterpret_cast<void*>(to & ~uint64_t{15}), value[n]);
          to += plane * sizeof(Out);
        }
      }
      // Where a channel does not begin or end with a vector: of its first and its last.
      const bool has_edges = unit.begin == 0 || unit.end == args.elements;
#pragma unroll 1
      for (int i = 0; i < outputs && has_edges; ++i) {
        const RowRange row = store.row_range_of(first_output + i);
        Out* out = static_cast<Out*>(args.out) + store.plane_of(first_output + i);
        const int vector = (lane < kWidth ? row.begin : row.end) / kWidth * kWidth;
        const int element = vector + lane % kWidth;
        const bool is_whole = vector >= row.begin && vector + kWidth <= row.end;
        if (lane < 2 * kWidth && !is_whole && element >= row.begin && element < row.end) {
          out[unit.first - row.shift + element] = staged[i * kConvStagePitch + element];
        }
      }
      ptx::mbarrier_arrive(ptx::shared_address(&tail.stored[warp][stage.slot]));
      stage.advance(kStagesOf<Out>);
    }
  }
};

// ---- the kernels --------------------------------------------------------------------------------

// kReaders: product warps that use a slot. kStagers, kStorers: warps that fill and that empty a
// quarter of the channels of a stage.
template <class X, int kReaders, int kStagers = 0, int kStorers = 0>
__device__ __forceinline__ void prepare(const ConvDirectArgs& args, const Shared& shared) {
  if (threadIdx.x == 0) {
    Tail& tail = *shared.tail;
    for (int slot = 0; slot < args.slots; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&tail.full[slot]), kWarpgroup);
      ptx::mbarrier_init(ptx::shared_address(&tail.empty[slot]), kReaders);
    }
    if constexpr (kStagers > 0) {
      for (int warp = 0; warp < 4; ++warp) {
        for (int stage = 0; stage < kConvMaxStages; ++stage) {
          ptx::mbarrier_init(ptx::shared_address(&tail.staged[warp][stage]), kStagers * 32);
          ptx::mbarrier_init(ptx::shared_address(&tail.stored[warp][stage]), kStorers * 32);
        }
      }
    }
    ptx::fence_mbarrier_init();
  }
  arrange_weights<X>(args, shared, Walk(args).group);
  __syncthreads();
}

template <class Epilogue, int kScalars, class Acc, class Out, class X, class... In>
struct Kernels {
  static_assert(std::is_same_v<Acc, float>);
  using Stores = Store<Epilogue, kScalars, X, Out, std::index_sequence_for<In...>, In...>;

  // Any operands, and the convolution itself.
  static __device__ __forceinline__ void run(const ConvDirectArgs& args) {
    const Shared shared = Shared::of<true>(args);
    prepare<X, 4, 1, 2>(args, shared);
    const auto warpgroup = static_cast<int>(ptx::uniform(threadIdx.x / kWarpgroup));
    if (warpgroup == 0) {
      ptx::give_registers<kLoadRegisters>();
      load_units<X, 1, true>(args, shared, 0);
    } else if (warpgroup == 1) {
      ptx::take_registers<kProductRegisters>();
      if (args.steps == kUsualSteps<X>) {
        stage_units<X, kUsualSteps<X>>(args, shared);
      } else {
        stage_units<X, 0>(args, shared);
      }
    } else {
      ptx::give_registers<kStoreRegisters>();
      ptx::wait_for_prerequisites();  // operands: statistics, in training
      Stores::run(args, shared);
    }
  }

  // 16-bit results, and operands that are the same all over a channel of a sample.
  static __device__ __forceinline__ void run_applied(const ConvDirectArgs& args) {
    if constexpr (!kSplits<X> && sizeof(Out) == 2) {
      const Shared shared = Shared::of<true>(args);
      prepare<X, 8, 2, 1>(args, shared);
      const auto warpgroup = static_cast<int>(ptx::uniform(threadIdx.x / kWarpgroup));
      if (warpgroup == 0) {
        ptx::give_registers<kLoadRegisters>();
        load_units<X, 1, true>(args, shared, 0);
      } else if (warpgroup < 3) {
        ptx::take_registers<kApplyRegisters>();
        ptx::wait_for_prerequisites();
        Stores::apply_units(args, shared, warpgroup - 1);
      } else {
        ptx::give_registers<kCopyRegisters>();
        ptx::wait_for_prerequisites();
        Stores::copy_units(args, shared);
      }
    }
  }

  static __device__ __forceinline__ void run_statistics(const ConvDirectArgs& args) {
    ptx::launch_dependents();
    const Shared shared = Shared::of<false>(args);
    prepare<X, 4>(args, shared);
    const auto warpgroup = static_cast<int>(ptx::uniform(threadIdx.x / kWarpgroup));
    if (warpgroup < 2) {
      ptx::give_registers<kLoadRegisters>();
      load_units<X, 2, false>(args, shared, warpgroup);
    } else {
      ptx::take_registers<kStatsProductRegisters>();
      if (args.steps == kUsualSteps<X>) {
        measure_units<X, kUsualSteps<X>>(args, shared, warpgroup - 2);
      } else {
        measure_units<X, 0>(args, shared, warpgroup - 2);
      }
    }
  }
};

}  // namespace fx_fuser::conv_direct

// FX_FUSER_CONV_DIRECT(Epilogue, scalars, Acc, Out, x's type, Operands...)
#define FX_FUSER_CONV_DIRECT(...)                                                              \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kConvThreads, 1)                      \
      fx_fuser_conv_direct(const __grid_constant__ fx_fuser::ConvDirectArgs args) {            \
    fx_fuser::conv_direct::Kernels<__VA_ARGS__>::run(args);                                    \
  }                                                                                            \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kConvThreads, 1)                      \
      fx_fuser_conv_direct_applied(const __grid_constant__ fx_fuser::ConvDirectArgs args) {    \
    fx_fuser::conv_direct::Kernels<__VA_ARGS__>::run_applied(args);                            \
  }                                                                                            \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kConvThreads, 1)                      \
      fx_fuser_conv_direct_statistics(const __grid_constant__ fx_fuser::ConvDirectArgs args) { \
    fx_fuser::conv_direct::Kernels<__VA_ARGS__>::run_statistics(args);                         \
  }
