// The direct convolution: from a stage through the epilogue to global memory.
#pragma once

#include <utility>

#include "common/epilogue_math.cuh"
#include "conv/conv_direct_stage_sm90.cuh"

namespace fx_fuser::conv_direct {

// For epilogues with which a kernel would spill, such as divisions by five operands: see
// fx_fuser/native/jobs.py.
#ifdef FX_FUSER_FEW_REGISTERS
constexpr bool kFewRegisters = true;
#else
constexpr bool kFewRegisters = false;
#endif
constexpr int kStoreWarps = 8;
constexpr int kStoreChannels = kConvGroup / kStoreWarps;
constexpr int kStoreGroups = (kConvPositions + kConvStoreWidth + 31) / 32;  // of 32 elements

// The convolution at one output in plain IEEE fp32.
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
    if (isnan(sum)) return sum;  // it stays NaN: this exit makes tensors full of NaN fast
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
  static constexpr int kQuarter = 8;  // lanes per channel
  static constexpr int kRounds = kStoreChannels / (32 / kQuarter);
  // As registers allow: vectors at once, and whether a lane keeps its operands from unit to unit.
  static constexpr int kAtOnce = kOperands < 6 ? 4 : 2;
  static constexpr bool kKeepsOperands = kOperands < 6 && !kFewRegisters;
  static_assert(kOperands <= kConvMaxOperands && kScalars <= kMaxScalars);

  const ConvDirectArgs& args;
  Unit unit;

  // The address of an operand in a channel of the sample, at its first pixel.
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

  // The elements of a channel that the unit writes, between sector boundaries.
  struct Range {
    int first;  // the vector boundary at or ahead of `begin`
    int begin;
    int end;
    int staged;  // index of `first` in the channel's row of the stage
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

  // The same as indices in a channel's row of a stage of results, whose first element is at
  // `shift`.
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

  // Stores a channel's whole vectors, for elements that are neighbours in memory and have the same
  // operands. A quarter of the warp per channel. No branches, so that the vectors' instructions
  // overlap.
  template <bool kSaves>
  __device__ __forceinline__ void store_vectors(const Range& range, int64_t plane,
                                                const float* staged,
                                                const float (&operand)[kSlots]) const {
    using Vector = Vec<Out, kConvStoreWidth>;
    constexpr int kLastInRow = kConvStagePitch - kConvStoreWidth;
    const int first = threadIdx.x % kQuarter * kConvStoreWidth;
    Out* out = static_cast<Out*>(args.out) + plane;
    X* c = kSaves ? static_cast<X*>(args.c) + plane : nullptr;
#pragma unroll kAtOnce
    for (int v = 0; v < kConvPositions / (kQuarter * kConvStoreWidth); ++v) {
      const int at = first + v * (kQuarter * kConvStoreWidth);
      const int element = range.first + at;
      const bool is_whole = element >= range.begin && element + kConvStoreWidth <= range.end;
      // A sector has so many 16-bit elements that the last vector can be behind the channel's row,
      // where another warp writes.
      const int in_row = sizeof(Out) < 4 ? min(at, kLastInRow - range.staged) : at;
      const auto loaded = *reinterpret_cast<const float4*>(staged + in_row);
      const float value[kConvStoreWidth] = {loaded.x, loaded.y, loaded.z, loaded.w};
      Vector result;
#pragma unroll
      for (int e = 0; e < kConvStoreWidth; ++e) {
        result.element[e] = compute(value[e], operand);
      }
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
  }

  // Stores all elements of a channel, or those that store_vectors leaves: in vectors that are not
  // whole, and those whose convolution is not finite, which is recomputed. Any operands, any
  // strips.
  __device__ __forceinline__ void store_elements(const Range& range, int output,
                                                 const float* staged, bool all) const {
    const int64_t plane = plane_of(output);
#pragma unroll 1
    for (int group = 0; group < kStoreGroups; ++group) {
      const int nth = group * 32 + static_cast<int>(threadIdx.x) % 32;
      const int element = range.first + nth;
      const int row = Unit::row_of(args, element);
      // Unsigned: for an element ahead of the first, which has no row, this may wrap around.
      const auto in_row =
          static_cast<uint32_t>(element) - static_cast<uint32_t>(row) * args.strip.size;
      const int column = static_cast<int>(in_row) + unit.column;
      if (element < range.begin || element >= range.end || column >= args.out_w) continue;
      float value = staged[nth];
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
    const TileScheduler scheduler(args);
    const int warp = static_cast<int>(threadIdx.x / 32) - 3 * kWarpgroup / 32;
    const int lane = threadIdx.x % 32;
    const int producer = warp / 2;  // the product's warp with these channels
    const int first_channel = warp * kStoreChannels;
    const int first_output = scheduler.group * kConvGroup + first_channel;
    const int outputs = min(kStoreChannels, args.outputs - first_output);
    const uint32_t all = outputs > 0 ? (1u << outputs) - 1 : 0;
    Tail& tail = *shared.tail;
    // A lane's channels, one per round.
    int channel[kRounds];
    float operand[kRounds][kSlots] = {};
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      channel[round] = round * (kStoreChannels / kRounds) + lane / kQuarter;
    }
    const auto take_operands = [&](const Store& store, int round) {
      // Opaque: else ptxas computes the addresses ahead of the condition, for every unit.
      Store of_sample = store;
      of_sample.unit.sample = ptx::opaque(of_sample.unit.sample);
      const int output = min(first_output + channel[round], args.outputs - 1);
      ((operand[round][kOperand] =
            convert<float>(*of_sample.template channel_of<kOperand, In>(output))),
       ...);
    };
    PipelineState stage;
    for (int index = scheduler.first; index < args.units; index += scheduler.step) {
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
        }
        if (kKeepsOperands && !args.any_per_pixel &&
            (args.any_per_sample || index == scheduler.first)) {
          take_operands(store, round);
        }
      }
      ptx::mbarrier_wait(ptx::shared_address(&tail.staged[producer][stage.slot]), stage.phase);
      const float* staged = shared.staged<float>(stage.slot, first_channel);
      const bool is_broken = kSplits<X> && (tail.broken[0][producer][stage.slot] != 0 ||
                                            tail.broken[1][producer][stage.slot] != 0);
      const bool by_vectors = !args.any_per_pixel && args.strips.size == 1;
      uint32_t by_elements = 0;  // a bit per channel
#pragma unroll
      for (int round = 0; round < kRounds && by_vectors; ++round) {
        const int64_t plane = store.plane_of(first_output + channel[round]);
        const float* from = staged + channel[round] * kConvStagePitch + range[round].staged;
        if constexpr (!kKeepsOperands) take_operands(store, round);
        if (args.c == nullptr) {
          store.template store_vectors<false>(range[round], plane, from, operand[round]);
        } else {
          store.template store_vectors<true>(range[round], plane, from, operand[round]);
        }
        by_elements |= static_cast<uint32_t>(has_edges[round]) << channel[round];
      }
      // After store_vectors: a recomputed element is stored a second time.
      by_elements = by_vectors && !is_broken ? __reduce_or_sync(0xFFFFFFFF, by_elements) : all;
      __syncwarp();
      for (; by_elements != 0; by_elements &= by_elements - 1) {
        const int i = __ffs(by_elements) - 1;
        const Range of_channel = store.template range_of<kConvStoreWidth>(first_output + i);
        store.store_elements(of_channel, first_output + i,
                             staged + i * kConvStagePitch + of_channel.staged, !by_vectors);
      }
      ptx::mbarrier_arrive(ptx::shared_address(&tail.stored[producer][stage.slot]));
      stage.advance(kStagesOf<float>);
    }
  }

  // ---- with the epilogue applied ahead of the stages --------------------------------------------

  // Product warpgroup `part` of two, with that half of each unit's positions: while one applies the
  // epilogue, the other's products run.
  static __device__ __forceinline__ void apply_units(const ConvDirectArgs& args,
                                                     const Shared& shared, int part) {
    const TileScheduler scheduler(args);
    const int thread = threadIdx.x % kWarpgroup;
    const int warp = thread / 32;
    const int lane = thread % 32;
    const int channel = warp * 16 + lane / 4;
    const int output = scheduler.group * kConvGroup + channel;
    Tail& tail = *shared.tail;
    float operand[2][kSlots] = {};
    PipelineState slot;
    PipelineState stage;
    const int begin = scheduler.first * args.paired;
    for (int index = begin; index < args.units; index += scheduler.step * args.paired) {
      ptx::mbarrier_wait(ptx::shared_address(&tail.full[slot.slot]), slot.phase);
#pragma unroll 1
      for (int nth = 0; nth < args.paired; ++nth) {
        int2 unit = tail.unit[slot.slot];
        int further = 0;
        if (nth == 1) {
          const int2 second = tail.second[slot.slot];
          unit.y = second.x;
          further = second.y;
        }
        float sum[64];
        if (args.steps == kUsualSteps<X>) {
          start_products<X, kUsualSteps<X>>(args, shared, slot.slot, part, sum, NoWeights{},
                                            further);
        } else {
          start_products<X, 0>(args, shared, slot.slot, part, sum, NoWeights{}, further);
        }
        if (args.any_per_sample || (index == begin && nth == 0)) {
          const Store of_sample{args, Unit{unit.x}};
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int present = min(output + 8 * r, args.outputs - 1);
            ((operand[r][kOperand] =
                  convert<float>(*of_sample.template channel_of<kOperand, In>(present))),
             ...);
          }
        }
        // The channel eight rows further has the same shift: eight planes are whole vectors.
        Out* row = shared.staged<Out>(stage.slot, channel) +
                   shift_of<kVectorOf<Out>>(phase_of(args, unit.x, output), unit.y);
        const auto* places =
            reinterpret_cast<const uint4*>(tail.place[slot.slot * args.paired + nth]) + part * 16 +
            lane % 4;
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
        stage.advance(kStagesOf<Out>);
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&tail.empty[slot.slot]));
      slot.advance(args.slots);
    }
  }

  // Copies stages to global memory, 16 channels per warp. A lane has the same vector of each
  // channel's row.
  static __device__ __forceinline__ void copy_units(const ConvDirectArgs& args,
                                                    const Shared& shared) {
    constexpr int kWidth = kVectorOf<Out>;
    constexpr int kCopyChannels = kConvGroup / 4;
    constexpr int kTogether = 8;
    const TileScheduler scheduler(args);
    const int warp = static_cast<int>(threadIdx.x % kWarpgroup) / 32;
    const int lane = threadIdx.x % 32;
    const int first_output = scheduler.group * kConvGroup + warp * kCopyChannels;
    const int outputs = min(args.outputs - first_output, kCopyChannels);
    const uint64_t plane = static_cast<uint64_t>(args.out_h) * static_cast<uint32_t>(args.out_w);
    Tail& tail = *shared.tail;
    PipelineState stage;
    // The units of a slot, then those of the block's next slot.
    int index = scheduler.first * args.paired;
    for (int nth = 0; index < args.units;) {
      const Store store{args, Unit::at(args, index)};
      if (++nth == args.paired) {
        nth = 0;
        index += (scheduler.step - 1) * args.paired;
      }
      ++index;
      const Unit& unit = store.unit;
      // A row has up to 33 vectors, but only a sample's first unit writes the first of them: other
      // units compute at least a vector ahead of what they write.
      const int skipped = unit.begin > unit.first;
      const int at = (lane + skipped) * kWidth;
      uint32_t lanes = 0;  // that have a whole vector of channel lane % kCopyChannels
      if (lane % kCopyChannels < outputs) {
        const RowRange row = store.row_range_of(first_output + lane % kCopyChannels);
        const int begin = (row.begin + kWidth - 1) / kWidth;
        const int count = max(row.end / kWidth - begin, 0);
        lanes = static_cast<uint32_t>(((uint64_t{1} << count) - 1) << (begin - skipped));
      }
      // A row's vectors are aligned vectors in memory: the address is rounded down to one below.
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
          ptx::store_global_if(is_whole, reinterpret_cast<void*>(to & ~uint64_t{15}), value[n]);
          to += plane * sizeof(Out);
        }
      }
      // Elements of a channel's first and last vectors, if it does not begin or end with a whole
      // one.
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

}  // namespace fx_fuser::conv_direct
