// The direct convolution: shared-memory layout, the unit scheduler, and the weights in shared
// memory.
#pragma once

#include <cuda_fp16.h>

#include <cfloat>
#include <type_traits>

#include "common/convert.cuh"
#include "common/ptx_global.cuh"
#include "common/ptx_sm90.cuh"
#include "common/split_sm90.cuh"
#include "conv/conv_direct_args.h"

namespace fx_fuser::conv_direct {

constexpr int kWarpgroup = 128;
constexpr int kLoadBarrier = 1;  // named barriers of the loading warpgroups: this and the next
constexpr int kWeightBarrier = 3;

// X: the type of x and weight. kSplits: it is split into two fp16.
template <class X>
constexpr bool kSplits = std::is_same_v<X, float>;
template <class X>
using Factor = std::conditional_t<kSplits<X>, __half, X>;  // of the products

// Placed behind the slots, where products of positions beyond the last slot's pixels may read it.
struct Tail {
  uint64_t full[kConvMaxSlots];
  uint64_t empty[kConvMaxSlots];
  uint64_t staged[4][kConvMaxStages];  // per quarter of the channels
  uint64_t stored[4][kConvMaxStages];
  float weight_unscale[kConvGroup];
  uint32_t largest[2][2][4];  // [loading warpgroup][turn][warp]
  uint32_t largest_finite[2][4];
  float unscale[kConvMaxSlots];        // of a slot's pixels
  uint32_t broken[2][4][kConvStages];  // a sum is not finite, per half and quarter of a stage
  int2 unit[kConvMaxSlots];            // sample and first element
  int2 second[kConvMaxSlots];  // if two units share the slot: its first element, pixels further
  union {
    // The byte offsets of positions 8i + 2c and 8i + 2c + 1 in a stage's channel, as
    // [i / 4][c][i % 4]: both, the second in the upper half, or only the first (args.pairs).
    alignas(16) uint32_t place[2 * kConvMaxSlots][kConvPositions / 2];
    alignas(16) uint32_t valid[kConvMaxSlots][kConvWidePositions / 32];
  };
};
static_assert(sizeof(Tail) - sizeof(Tail::place) <= kConvTailBytes);
static_assert(sizeof(Tail::place) == 2 * kConvMaxSlots * kConvPlaceBytes);

// T: the type of a stage's elements, float or 16-bit results.
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

// A position in a ring of slots or stages, and the parity of its barriers' phase.
struct PipelineState {
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
  int begin;   // elements [begin, end) of the strip are this unit's own
  int end;
  int first;     // the first element that it computes
  int position;  // of `first`

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

// Blocks with the same units, for different groups, are neighbours, and neighbouring blocks have
// neighbouring units.
struct TileScheduler {
  int group;
  int first;
  int step;

  explicit __device__ __forceinline__ TileScheduler(const ConvDirectArgs& args, int parts = 1)
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

// Zeros get scale 1: it can be undone together with any other scale.
__device__ __forceinline__ Scale scale_of(float largest) {
  return largest == 0.0f ? Scale{1.0f, 1.0f} : Scale::of(largest);
}

// Writes the group's weights to shared memory, as tiles of [64 channels][8 input channels], and the
// zeros. Called by kThreads threads, of which this is `thread`; ends with a barrier of them. A
// kernel begins by waiting for these loads, so eight threads share a channel, with five loads each
// in flight.
template <class X, int kThreads>
__device__ __forceinline__ void arrange_weights(const ConvDirectArgs& args, const Shared& shared,
                                                int group, int thread) {
  for (int i = thread; i < args.weight_bytes / 16; i += kThreads) {
    reinterpret_cast<uint4*>(shared.weight)[i] = make_uint4(0, 0, 0, 0);
  }
  for (int i = thread; i < args.zero_bytes / 16; i += kThreads) {
    reinterpret_cast<uint4*>(shared.zeros)[i] = make_uint4(0, 0, 0, 0);
  }
  ptx::barrier_sync<kThreads>(kWeightBarrier);
  constexpr int kLanes = 8;
  static_assert(kThreads / kLanes % 4 == 0 && kConvGroup % 4 == 0);  // a warp has four, or none
  const int taps = args.kernel_h * args.kernel_w;
  const int values = args.channels * taps;
  const int lane = thread % kLanes;
  for (int channel = thread / kLanes; channel < kConvGroup; channel += kThreads / kLanes) {
    const int output = group * kConvGroup + channel;
    const X* from = static_cast<const X*>(args.weight) + static_cast<int64_t>(output) * values;
    const int count = output < args.outputs ? values : 0;
    const auto for_each = [&](const auto& use) {
      constexpr int kAtOnce = 5;
      for (int first = lane; first < count; first += kLanes * kAtOnce) {
        X value[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int at = first + i * kLanes;
          value[i] = at < count ? __ldg(from + at) : X{};
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i * kLanes < count) use(first + i * kLanes, value[i]);
        }
      }
    };
    // The element's place in its tap's first, or only, tile.
    const auto place_of = [&](int i) {
      return reinterpret_cast<Factor<X>*>(shared.weight) + (1 + i % taps) * kConvTileUnits * 8 +
             channel * 8 + i / taps;
    };
    if constexpr (kSplits<X>) {
      uint32_t largest = 0;
      for_each([&](int, float value) { largest = max(largest, magnitude_bits(value)); });
      for (int distance = 1; distance < kLanes; distance *= 2) {
        largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, distance));
      }
      const Scale scale = scale_of(__uint_as_float(largest));
      if (lane == 0) shared.tail->weight_unscale[channel] = scale.unscale;
      for_each([&](int i, float value) {
        const float scaled = value * scale.scale;
        const __half hi = __float2half_rn(scaled);
        __half* lo = place_of(i);
        lo[taps * kConvTileUnits * 8] = hi;
        *lo = __float2half_rn(scaled - __half2float(hi));
      });
    } else {
      if (lane == 0) shared.tail->weight_unscale[channel] = 1.0f;
      for_each([&](int i, X value) { *place_of(i) = value; });
    }
  }
  ptx::fence_async_proxy();
  ptx::barrier_sync<kThreads>(kWeightBarrier);
}

}  // namespace fx_fuser::conv_direct
