// The direct convolution's backward: the input's gradient. See conv_direct_backward_sm90.cuh.
#pragma once

#include "conv/conv_direct_factors_sm90.cuh"

namespace fx_fuser::conv_direct {

template <class X>
constexpr int kInputProductRegisters = kSplits<X> ? 168 : 176;
template <class X>
constexpr int kInputLoadRegisters = kSplits<X> ? 96 : 80;
constexpr int kGatherRegisters = 80;
constexpr int kGatherBarrier = 4;  // a named barrier
template <class X>
constexpr int kInputRegisters = kInputLoadRegisters<X> + 2 * kInputProductRegisters<X>;
static_assert(kInputRegisters<float> + kGatherRegisters <= 512);
static_assert(kInputRegisters<__half> + kGatherRegisters <= 512);

// A block's pieces, unit by unit.
struct Pieces {
  const ConvBackwardArgs& args;
  int piece;
  int index;  // of the unit; conv.units if there is none left
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

// Starts the convolution at 64 of a slot's positions: sum[4i + 2r + t] is position
// 16 warp + lane / 4 + 8r, channel 8i + 2 (lane % 4) + t.
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

// A tile of dc as wgmma's first operand: [16 channels][word].
struct FactorTile {
  uint32_t hi[4][4];
  uint32_t lo[4][4];
  float unscale[2];  // of the thread's two positions
};

// Loads a tile's gradients, as many in flight as ptxas allows. Unconditional, since predicates
// would cost instructions: a position that is not an element loads the unit's first and ignores it;
// a channel beyond the last output loads the last one's and multiplies it by zero (so an infinity
// there makes dx NaN, not infinite).
template <class X>
__device__ __forceinline__ void load_positions(const Tail& tail, int slot, uint32_t first_position,
                                               const uint8_t* sample, uint32_t limit,
                                               uint32_t first_channel, uint32_t last_output,
                                               uint32_t plane_bytes, Loaded<X> (&dy)[32],
                                               bool (&is_valid)[2]) {
  const uint8_t* from[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t position = first_position + 8 * r;
    const uint32_t word = place_word(tail, slot, position / 2);
    const uint32_t at = position % 2 == 0 ? word & 0xFFFF : word >> 16;
    is_valid[r] = at < limit;
    from[r] = sample + (is_valid[r] ? at >> kPlaceShift<X> : 0);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const uint32_t output = min(first_channel + 8 * i + t, last_output);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        dy[4 * i + 2 * r + t] = ptx::load_global(
            reinterpret_cast<const Stored<X>*>(from[r] + uint64_t{output} * plane_bytes));
      }
    }
  }
}

// Turns a tile of the convolution into dc. largest: per position of the thread.
template <class X>
__device__ __forceinline__ void make_gradients(const Tail& tail, const Coefficients& coefficients,
                                               bool is_training, float pixel_unscale,
                                               uint32_t first_channel, const Loaded<X> (&dy)[32],
                                               const bool (&is_valid)[2], float (&sum)[32],
                                               float (&largest)[2]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto pair_of = [&](const float* values, float (&to)[2]) {
      const auto pair = *reinterpret_cast<const float2*>(values + first_channel + 8 * i);
      to[0] = pair.x;
      to[1] = pair.y;
    };
    float unscale[2];
    float mean[2];
    float of_dy[2];
    float scale[2];
    float slope[2];
    float offset[2];
    pair_of(tail.weight_unscale, unscale);
    pair_of(coefficients.mean, mean);
    pair_of(coefficients.of_dy, of_dy);
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
        // dz without the factor `rest`; in training minus its mean.
        const float dz = fmaf(of_dy[t], t == 0 ? pair.x : pair.y, offset[t]);
        const float whole = is_training ? fmaf(slope[t], d, dz) : dz;
        value = is_valid[r] ? scale[t] * whole : 0.0f;
        largest[r] = fmaxf(largest[r], fabsf(value));
      }
    }
  }
}

template <class X>
__device__ __forceinline__ void make_factors(const float (&dc)[32], const float (&largest)[2],
                                             FactorTile& factors) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    Scale scale{1.0f, 1.0f};
    if constexpr (kScales<X>) scale = scale_of(largest_of_quad(largest[r]));
    factors.unscale[r] = scale.unscale;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const SplitPair pair =
          factors_of<X>(dc[4 * i + 2 * r] * scale.scale, dc[4 * i + 2 * r + 1] * scale.scale);
      factors.hi[i / 2][i % 2 * 2 + r] = pair.hi;
      factors.lo[i / 2][i % 2 * 2 + r] = pair.lo;
    }
  }
}

// Starts sum = dc times the weights of the taps from `first_tap` on.
template <class X>
__device__ __forceinline__ void multiply_by_weights(FactorTile& factors, uint32_t weight, int taps,
                                                    int first_tap, float (&sum)[kConvColumns / 2]) {
  ptx::pin(sum);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    ptx::pin(factors.hi[step]);
    if constexpr (kSplits<X>) ptx::pin(factors.lo[step]);
  }
  ptx::wgmma_fence();
  // A tile has 64 rows, one per output channel, of 16 bytes each; a step uses 16 of them.
  const auto weights = [&](bool lo, int step) {
    constexpr uint64_t kStrideOffset = kConvTileUnits;
    constexpr uint64_t kLeadingOffset = 8;
    const int tile = 1 + (kSplits<X> && !lo ? taps : 0) + first_tap;
    return kStrideOffset << 32 | kLeadingOffset << 16 |
           (weight + tile * kConvTileUnits + step * 16);
  };
  const auto multiply = [&](const uint32_t (&dc)[4], uint64_t by, bool accumulate) {
    ptx::WgmmaOfRegisters<Factor<X>>::run_transposed(sum, dc, by, accumulate);
  };
  if constexpr (kSplits<X>) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      multiply(factors.hi[step], weights(true, step), step > 0);
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      multiply(factors.lo[step], weights(false, step), true);
    }
  }
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    multiply(factors.hi[step], weights(false, step), kSplits<X> || step > 0);
  }
  ptx::wgmma_commit();
}

// Stores a position's contributions through each tap, with the scales undone.
template <class X>
__device__ __forceinline__ void store_given(const float (&sum)[kConvColumns / 2], int r,
                                            float unscale, float weight_unscale, float* to) {
#pragma unroll
  for (int tap = 0; tap < kConvBackwardTaps; ++tap) {
    float2 given = make_float2(sum[4 * tap + 2 * r], sum[4 * tap + 2 * r + 1]);
    if constexpr (kSplits<X>) {
      given = make_float2(undo_both(given.x, unscale, weight_unscale),
                          undo_both(given.y, unscale, weight_unscale));
    } else if constexpr (kScales<X>) {
      given = make_float2(given.x * unscale, given.y * unscale);
    }
    *reinterpret_cast<float2*>(to + tap * kConvChannels) = given;
  }
}

// Product warpgroup `worker` of two, with two of each unit's four tiles.
template <class X, int kSteps>
__device__ __forceinline__ void give_units(const ConvBackwardArgs& args,
                                           const BackwardShared& shared, int worker) {
  const ConvDirectArgs& conv = args.conv;
  const int thread = threadIdx.x % kWarpgroup;
  const int lane = thread % 32;
  const int taps = conv.kernel_h * conv.kernel_w;
  const uint32_t plane_bytes = sizeof(X) * static_cast<uint32_t>(conv.out_h * conv.out_w);
  const uint32_t first_position = 2 * worker * kTile + thread / 32 * 16 + lane / 4;
  const uint32_t first_channel = 2 * (lane % 4);
  const uint32_t last_output = min(conv.outputs - args.group * kConvGroup, kConvGroup) - 1;
  const Coefficients& coefficients = *shared.coefficients;
  const float weight_unscale = coefficients.weight_unscale;
  const bool is_training = args.dgamma != nullptr;
  const uint32_t weight = ptx::uniform(ptx::shared_address(shared.weight) >> 4);
  Tail& tail = *shared.tail;
  const uint32_t given_full = ptx::shared_address(&shared.coefficients->given_full);
  const uint32_t given_empty = ptx::shared_address(&shared.coefficients->given_empty);
  uint32_t given_phase = 0;
  PipelineState pipeline;
  for (Pieces units(args); units.index < conv.units; units.advance()) {
    const int slot = pipeline.slot;
    if (worker == 0) {
      Pieces next = units;
      next.advance();
      prefetch_gradients<X, kConvPositions>(args, args.group, next.index, 0);
    }
    ptx::mbarrier_wait(ptx::shared_address(&tail.full[slot]), pipeline.phase);
    const int2 unit = tail.unit[slot];
    const float pixel_unscale = tail.unscale[slot];
    const auto limit = static_cast<uint32_t>(4 * min(conv.advance, conv.elements - unit.y));
    const auto* sample = reinterpret_cast<const uint8_t*>(
        gradients_of<X>(args, unit.x, unit.y, args.group * kConvGroup));
    Loaded<X> dy[2][32];
    bool is_valid[2][2];
    const auto load = [&](int m) {
      load_positions<X>(tail, slot, first_position + m * kTile, sample, limit, first_channel,
                        last_output, plane_bytes, dy[m], is_valid[m]);
    };
    FactorTile factors[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float sum[32];
      start_tile<X, kSteps>(conv, shared, slot, 2 * worker + m, sum);
      if (m == 0) {
        load(0);
        load(1);
      }
      ptx::wgmma_wait<0>();
      ptx::pin(sum);
      float largest[2] = {0, 0};
      make_gradients<X>(tail, coefficients, is_training, pixel_unscale, first_channel, dy[m],
                        is_valid[m], sum, largest);
      make_factors<X>(sum, largest, factors[m]);
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&tail.empty[slot]));
    pipeline.advance(conv.slots);

#pragma unroll 1
    for (int first_tap = 0; first_tap < taps; first_tap += kConvBackwardTaps) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float sum[kConvColumns / 2];
        multiply_by_weights<X>(factors[m], weight, taps, first_tap, sum);
        if (m == 0) ptx::mbarrier_wait(given_empty, given_phase ^ 1);
        ptx::wgmma_wait<0>();
        ptx::pin(sum);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint32_t position = first_position + m * kTile + 8 * r;
          store_given<X>(sum, r, factors[m].unscale[r], weight_unscale,
                         shared.given + position * kConvColumns + first_channel);
        }
      }
      ptx::mbarrier_arrive(given_full);
      given_phase ^= 1;
    }
  }
}

// The gathering warpgroup: adds up the positions' contributions and stores complete sums. A thread
// has half of the channels.
template <class X>
__device__ __forceinline__ void gather_units(const ConvBackwardArgs& args,
                                             const BackwardShared& shared) {
  const ConvDirectArgs& conv = args.conv;
  const int thread = threadIdx.x % kWarpgroup;
  const int first_channel = thread % 2 * 4;
  const int taps = conv.kernel_h * conv.kernel_w;
  const auto pitch = static_cast<int>(conv.pitch.size);
  const int span = kConvPositions + args.offset[taps - 1];
  constexpr uint32_t kNoPosition = kConvPositions;
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
  if (thread < kConvColumns) shared.given[kConvPositions * kConvColumns + thread] = 0;
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
      const bool is_pixel = units.index >= units.own &&
                            static_cast<uint32_t>(y) < static_cast<uint32_t>(conv.h) &&
                            static_cast<uint32_t>(x) < static_cast<uint32_t>(conv.w);
      float value[4] = {complete.x, complete.y, complete.z, complete.w};
      X* to = sample + static_cast<int64_t>(first_channel) * plane + (y * conv.w + x);
      if (args.group > 0) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (is_pixel && first_channel + c < conv.channels) {
            value[c] += convert<float>(to[static_cast<int64_t>(c) * plane]);
          }
        }
      }
#pragma unroll
      for (int c = 0; c < 4; ++c, to += plane) {
        ptx::store_global_if(is_pixel && first_channel + c < conv.channels, to,
                             convert<X>(value[c]));
      }
    };
#pragma unroll 1
    for (int first_tap = 0; first_tap < taps; first_tap += kConvBackwardTaps) {
      const int complete = first_tap + kConvBackwardTaps >= taps ? end : unit.position;
      ptx::mbarrier_wait(given_full, given_phase);
      uint32_t offset[kConvBackwardTaps];
#pragma unroll
      for (int tap = 0; tap < kConvBackwardTaps; ++tap) {
        offset[tap] = first_tap + tap < taps ? -args.offset[first_tap + tap] : -kConvRing;
      }
      ptx::pin(offset);  // in per-thread registers: `min` does not accept uniform ones
      for (int i = thread / 2; i < span; i += kWarpgroup / 2) {
        float4* to = ring_at(unit.position + i);
        float4 sum = *to;
#pragma unroll
        for (int tap = 0; tap < kConvBackwardTaps; ++tap) {
          // Without a contributing position, reads the row of zeros behind them.
          const uint32_t position = min(static_cast<uint32_t>(i) + offset[tap], kNoPosition);
          const float4 from =
              ptx::load_shared(given + 4 * (position * kConvColumns + tap * kConvChannels));
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
  prepare_backward<X, kConvInputThreads, Epilogue, kScalars, In...>(args, shared, args.group,
                                                                    2 * kWarpgroup / 32);
  // In fp32 each channel's weights have their own scale: the differences are folded into dc's
  // scale, so that one factor undoes them all.
  Coefficients& coefficients = *shared.coefficients;
  if (kSplits<X> && threadIdx.x < kConvGroup) {
    float largest = 0;
    for (const float unscale : shared.tail->weight_unscale) largest = fmaxf(largest, unscale);
    coefficients.weight_unscale = largest;
    const float fold = shared.tail->weight_unscale[threadIdx.x] / largest;
    coefficients.scale[threadIdx.x] *= fold;
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

}  // namespace fx_fuser::conv_direct
