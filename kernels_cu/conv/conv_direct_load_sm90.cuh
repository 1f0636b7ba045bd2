// The direct convolution: the producer warpgroups, which load units of pixels into a ring of slots.
#pragma once

#include "conv/conv_direct_units_sm90.cuh"

namespace fx_fuser::conv_direct {

// A thread's pixels of a unit, one per chunk; zeros outside the image. 16-bit values as raw bits.
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
      // The usual case, with fewer instructions.
      if (args.channels == kConvChannels && args.chunks == kChunks && after <= plane) {
#pragma unroll
        for (int c = 0; c < kConvChannels; ++c) {
          const InMemory* from = sample + (uint64_t{plane} * c + first);
#pragma unroll
          for (int i = 0; i < kChunks; ++i) value[i][c] = ptx::load_global(from + i * kConvChunk);
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
          value[i][c] =
              ptx::load_global_below(from + i * kConvChunk, first + i * kConvChunk, limit);
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

  // Ignores NaN, and infinities unless kInfinities.
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

// A bit per position: whether it is one of the unit's elements. For units without a lead.
__device__ __forceinline__ void mark_valid(const ConvDirectArgs& args, const Unit& unit,
                                           uint32_t (&valid)[kConvWidePositions / 32]) {
  const int in_row = min(static_cast<int>(args.strip.size), args.out_w - unit.column);
  const int count = unit.end + (args.kernel_w - 1) * Unit::row_of(args, unit.end) - unit.position;
#pragma unroll 2
  for (int i = 0; i < args.positions; i += kWarpgroup) {
    const int place = i + static_cast<int>(threadIdx.x) % kWarpgroup;
    const auto position = static_cast<uint32_t>(unit.position + place);
    const uint32_t column = position - divide(position, args.pitch) * args.pitch.size;
    const bool is_valid = column < static_cast<uint32_t>(in_row) && place < count;
    const uint32_t bits = __ballot_sync(0xFFFFFFFF, is_valid);
    if (threadIdx.x % 32 == 0) valid[place / 32] = bits;
  }
}

// Where each position goes in a stage's channels, so that elements are adjacent. One pair per
// thread.
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
    // Positions behind the unit's end may have no pixels.
    const bool is_element = column < static_cast<int>(args.strip.size) && element < unit.end;
    at[t] = static_cast<uint32_t>(args.place_bytes *
                                  (is_element ? element - unit.first : kConvStageUnused));
  }
  place[pair / 16 * 16 + pair % 4 * 4 + pair / 4 % 4] = args.pairs ? at[0] : at[0] | at[1] << 16;
}

// Prefetches a unit's rows to L2, one line per thread, so that the loads do not wait for DRAM. The
// last line of a wide fp32 unit may be missing.
template <class X>
__device__ __forceinline__ void prefetch_unit(const ConvDirectArgs& args, const Unit& unit,
                                              int positions) {
  constexpr int kLine = 128;
  constexpr int kLines = kWarpgroup / kConvChannels;
  static_assert(kConvWidePositions * sizeof(X) <= kLines * kLine);
  const auto thread = static_cast<int>(threadIdx.x % kWarpgroup);
  const int channel = thread / kLines;
  if (channel >= args.channels || args.strips.size != 1) return;
  const int plane = args.h * args.w;
  // The previous unit has prefetched the rows that both need.
  const int last_tap = Unit::row_of(args, unit.begin) - args.top + args.kernel_h - 1;
  const int row = max(last_tap, 0) * args.w;
  const int begin = unit.begin == 0 ? 0 : row;
  const int end = min(row + positions, plane);
  const X* x = static_cast<const X*>(args.x) +
               (static_cast<int64_t>(unit.sample) * args.channels + channel) * plane;
  const auto line = (reinterpret_cast<uintptr_t>(x + begin) & ~uintptr_t{kLine - 1}) +
                    static_cast<uintptr_t>(thread % kLines * kLine);
  if (line < reinterpret_cast<uintptr_t>(x + end)) {
    ptx::prefetch(reinterpret_cast<const void*>(line));
  }
}

// Loading warpgroup `loader` of kLoaders, each with every kLoaders-th slot. `units` iterates over
// its units, which have at most kChunks. kPlaces: writes a table of places, else a mask of
// elements. `pivot`, in fp32: one value per input channel, subtracted from all of its pixels; or
// null.
template <class X, int kLoaders, bool kPlaces, int kChunks, int kPaired = 1, class Units>
__device__ __forceinline__ void load_units(const ConvDirectArgs& args, const Shared& shared,
                                           int loader, Units units, const float* pivot) {
  const int thread = threadIdx.x % kWarpgroup;
  const int plane_bytes = args.chunks * kConvChunk * 16;
  Tail& tail = *shared.tail;
  PipelineState pipeline;
  for (int i = 0; i < loader; ++i) pipeline.advance(args.slots);

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
      // An infinity must not set the scale of pixels that share no sum with it.
      if (largest == INFINITY) {
        largest = largest_of_all(pixels.template largest<false>(), tail.largest_finite[loader]);
      }
      scale = scale_of(largest);
    }

    ptx::mbarrier_wait(ptx::shared_address(&tail.empty[pipeline.slot]), pipeline.phase ^ 1);
    uint8_t* to = shared.slot + pipeline.slot * args.slot_bytes + thread * 16;
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
      tail.unscale[pipeline.slot] = scale.unscale;
      tail.unit[pipeline.slot] = make_int2(unit.sample, unit.first);
    }
    if constexpr (kPlaces) {
      place_positions(args, unit, tail.place[pipeline.slot * kPaired]);
      if constexpr (kPaired == 2) {
        const Unit second = Unit::at(args, units.index + 1);
        place_positions(args, second, tail.place[pipeline.slot * kPaired + 1]);
        if (thread == 0) {
          tail.second[pipeline.slot] = make_int2(second.first, second.position - unit.position);
        }
      }
    } else {
      mark_valid(args, unit, tail.valid[pipeline.slot]);
    }
    ptx::fence_async_proxy();
    ptx::mbarrier_arrive(ptx::shared_address(&tail.full[pipeline.slot]));
    for (int i = 0; i < kLoaders; ++i) pipeline.advance(args.slots);

    units.advance();
    if (units.index >= args.units) break;
    const auto prefetch_next = [&] {
      Units after = units;
      after.advance();
      if (after.index >= args.units) return;
      const int positions = kPlaces ? kPaired * kConvPositions : args.positions;
      prefetch_unit<X>(args, Unit::at(args, after.index), positions);
    };
    unit = Unit::at(args, units.index);
    // With enough registers, prefetch while the loads are in flight.
    constexpr bool kHasRegisters = kChunks <= 4 && std::is_same_v<Units, Stride>;
    if constexpr (!kHasRegisters) prefetch_next();
    pixels.load(args, unit);
    if constexpr (kHasRegisters) prefetch_next();
  }
}

// Most units have few chunks, which need fewer instructions.
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

// The block's units, every kLoaders-th per loading warpgroup.
template <class X, int kLoaders, bool kPlaces>
__device__ __forceinline__ void load_units(const ConvDirectArgs& args, const Shared& shared,
                                           int loader) {
  const TileScheduler scheduler(args);
  load_units<X, kLoaders, kPlaces>(
      args, shared, loader,
      Stride{scheduler.first + loader * scheduler.step, kLoaders * scheduler.step});
}

}  // namespace fx_fuser::conv_direct
