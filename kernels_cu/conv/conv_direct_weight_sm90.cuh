// The direct convolution's backward: the sums dbeta and dgamma, and the weight's gradient. See
// conv_direct_backward_sm90.cuh.
#pragma once

#include "conv/conv_direct_factors_sm90.cuh"

namespace fx_fuser::conv_direct {

constexpr int kWeightLoadRegisters = 88;
constexpr int kWeightProductRegisters = 208;
constexpr int kSumLoadRegisters = 104;
constexpr int kSumProductRegisters = 136;
static_assert(kWeightLoadRegisters + 2 * kWeightProductRegisters <= 504);
static_assert(kSumLoadRegisters + 3 * kSumProductRegisters <= 512);

// For 3 x 3 taps: the products of a tile of dc with its pixels, which overlap the next tile's
// convolution. The three taps of a kernel's row are 24 columns of one operand: the next tap's
// pixels are 16 bytes further.
template <class X>
struct RowProducts {
  static constexpr int kRows = 3;
  static constexpr int kSteps = kTile / 16;
  uint32_t hi[kSteps][4];
  uint32_t lo[kSteps][4];
  float sum[kRows][12] = {};
  Scale scale[2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
  float pixel_unscale = 1;

  // dc: in the layout of sums.
  __device__ __forceinline__ void start(const ConvBackwardArgs& args, const Shared& shared,
                                        int slot, int tile, const float (&dc)[32]) {
    find_scales<X>(dc, scale);
    pixel_unscale = shared.tail->unscale[slot];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) make_factors<X>(dc, step, scale, hi[step], lo[step]);
    constexpr uint64_t kStrideOffset = 1;
    constexpr uint64_t kLeadingOffset = 8;
    const uint32_t pixels = ptx::uniform(
        (ptx::shared_address(shared.slot) + slot * args.conv.slot_bytes) / 16 + tile * kTile);
    const auto pitch = static_cast<int>(args.conv.pitch.size);
    const auto pixels_of = [&](bool lo, int step, int row) {
      return kStrideOffset << 32 | kLeadingOffset << 16 |
             (pixels + (lo ? args.conv.chunks * kConvChunk : 0) + step * 16 + row * pitch);
    };
    pin();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto multiply = [&](const uint32_t (&factor)[4], bool lo_pixels, bool accumulate) {
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          ptx::WgmmaOfRegisters<Factor<X>>::run_transposed(
              sum[row], factor, pixels_of(lo_pixels, step, row), accumulate);
        }
      };
      if constexpr (kSplits<X>) {
        multiply(lo[step], false, step > 0);
        multiply(hi[step], true, true);
      }
      multiply(hi[step], false, kSplits<X> || step > 0);
    }
    ptx::wgmma_commit();
  }

  // After a wgmma_wait: total[tap] += the products started last.
  __device__ __forceinline__ void add(float (&total)[kConvBackwardTaps][4]) {
    pin();
#pragma unroll
    for (int tap = 0; tap < kConvBackwardTaps; ++tap) {
      const auto& of_tap = reinterpret_cast<const float (&)[4]>(sum[tap / 3][tap % 3 * 4]);
      add_unscaled<X>(of_tap, scale, pixel_unscale, total[tap]);
    }
  }

 private:
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int row = 0; row < kRows; ++row) ptx::pin(sum[row]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::pin(hi[step]);
      if constexpr (kSplits<X>) ptx::pin(lo[step]);
    }
  }
};

// total[tap] += dc's tile times the tap's pixels, for any taps.
template <class X>
__device__ __forceinline__ void multiply_taps(const ConvBackwardArgs& args, const Shared& shared,
                                              int slot, int tile, int first_tap, int taps,
                                              float pixel_unscale, const float (&dc)[32],
                                              float (&total)[kConvBackwardTaps][4]) {
  Scale scale[2];
  find_scales<X>(dc, scale);
  float sum[kConvBackwardTaps][4] = {};
  // No branch: taps beyond the last repeat it.
  uint32_t offset[kConvBackwardTaps];
#pragma unroll
  for (int tap = 0; tap < kConvBackwardTaps; ++tap) {
    offset[tap] = 16 * args.offset[first_tap + min(tap, taps - 1)];
  }
  const int lane = threadIdx.x % 32;
  // The upper half of the lanes addresses the pixels' lo in fp32, else the next tap.
  const bool is_upper = lane / 16 == 1;
  const int pixels = args.conv.chunks * kConvChunk;
  // Positions beyond the unit's pixels are not elements: clamped to pixels that exist.
  const int last = pixels - 1 - args.offset[args.conv.kernel_h * args.conv.kernel_w - 1];
  const uint32_t base = ptx::shared_address(shared.slot) + slot * args.conv.slot_bytes +
                        (kSplits<X> ? lane / 16 * pixels * 16 : 0);
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step) {
    uint32_t hi[4];
    uint32_t lo[4];
    make_factors<X>(dc, step, scale, hi, lo);
    const uint32_t row = base + 16 * min(tile * kTile + 16 * step + lane % 16, last);
    if constexpr (kSplits<X>) {
      constexpr int kAtOnce = 3;  // taps, as many as registers allow
#pragma unroll
      for (int first = 0; first < kConvBackwardTaps; first += kAtOnce) {
        uint32_t pixel[kAtOnce][4];  // hi of 16 positions, lo
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) ptx::load_transposed(pixel[i], row + offset[first + i]);
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
        ptx::load_transposed(word, row + (is_upper ? next : offset[tap]));
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
    add_unscaled<X>(sum[tap], scale, pixel_unscale, total[tap]);
  }
}

// A thread's sums of dz and of dz d, in shared memory: [sum][channel][thread]. In registers they
// would spill.
template <int kWorkers>
struct ThreadSums {
  double* sums;

  __device__ __forceinline__ double& at(int s, int r) const {
    return sums[(2 * s + r) * kWorkers * kWarpgroup];
  }
  __device__ __forceinline__ void clear() const {
    for (int i = 0; i < 4; ++i) at(i / 2, i % 2) = 0;
  }
  __device__ __forceinline__ void add(const float (&of_tile)[2][2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int s = 0; s < 2; ++s) at(s, r) += static_cast<double>(of_tile[s][r]);
    }
  }
};

// Stores the split's sums of dz and of dz x̂ for an output channel, if the thread `stores` them.
// Returns the sum of dc (meaningless in training).
template <class Sums>
__device__ __forceinline__ double store_sums(const ConvBackwardArgs& args,
                                             const Coefficients& coefficients, const Sums& sums,
                                             int r, int channel, bool stores, int split,
                                             int output) {
  double of_dc = 0;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    double all = sums.at(s, r);
    all += __shfl_xor_sync(0xFFFFFFFF, all, 1);
    all += __shfl_xor_sync(0xFFFFFFFF, all, 2);
    if (s == 0) of_dc = all * static_cast<double>(coefficients.scale[channel]);
    all *= static_cast<double>(coefficients.rest[channel]);
    if (s == 1) all *= static_cast<double>(coefficients.rstd[channel]);
    if (stores) {
      args.sums[(static_cast<int64_t>(split) * 2 + s) * args.conv.outputs + output] = all;
    }
  }
  return of_dc;
}

// Stores the split's gradient of the weight for output channel r of the thread's two and the taps
// from `first_tap` on. to: that channel's gradient.
template <class X>
__device__ __forceinline__ void store_weight(const ConvDirectArgs& conv,
                                             const Coefficients& coefficients, int lane,
                                             int first_tap, int taps, int all_taps,
                                             const float (&total)[kConvBackwardTaps][4], int r,
                                             double of_dc, float* to) {
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

// A channel's coefficients, as a thread keeps them in registers.
struct ChannelValues {
  float weight_unscale;
  float mean;
  float of_dy;
  float scale;
  float slope;
  float offset;

  static __device__ __forceinline__ ChannelValues of(const Tail& tail,
                                                     const Coefficients& coefficients,
                                                     int channel) {
    return {tail.weight_unscale[channel], coefficients.mean[channel],
            coefficients.of_dy[channel],  coefficients.scale[channel],
            coefficients.slope[channel],  coefficients.offset[channel]};
  }
};

// Combines a tile of the convolution with its dy: of_tile += dz and dz d for each of the thread's
// channels; `sum` becomes dc.
template <class X, bool kSums, bool kWeight>
__device__ __forceinline__ void meet_gradients(const ConvBackwardArgs& args, uint32_t valid,
                                               const Loaded<X> (&dy)[32],
                                               const ChannelValues (&of)[2], float pixel_unscale,
                                               float (&sum)[32], float (&of_tile)[2][2]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int r = i / 2 % 2;
    const bool is_valid = valid >> (i / 4 * 2 + i % 2) & 1;
    const float d = deviation_of<X>(sum[i], of[r].weight_unscale, pixel_unscale, of[r].mean);
    const float2 pair = values_of<X>(dy[i & ~1], dy[i | 1], args.pairs);
    // dz without the factor `rest`; in training, where another kernel computes the sums, minus its
    // mean.
    const float dy_here = i % 2 == 0 ? pair.x : pair.y;
    const float dz = kWeight ? fmaf(of[r].of_dy, dy_here, of[r].offset) : of[r].of_dy * dy_here;
    if constexpr (kSums) {
      of_tile[0][r] += dz;
      of_tile[1][r] = fmaf(dz, is_valid ? d : 0.0f, of_tile[1][r]);
    }
    if constexpr (kWeight) {
      const float whole = args.dgamma != nullptr ? fmaf(of[r].slope, d, dz) : dz;
      sum[i] = is_valid ? of[r].scale * whole : 0.0f;
    }
  }
}

// Prefetch distance to L2: half a unit. A whole unit ahead, over all blocks, exceeded L2: in fp32
// dy was read from DRAM nearly twice (conv/NOTES.md).
constexpr int kAhead = kConvPositions / 2;

// Waits for a unit's pixels and finds its gradients.
template <class X>
__device__ __forceinline__ void begin_gradients(const ConvBackwardArgs& args, const Tail& tail,
                                                const PipelineState& pipeline, int group, int index,
                                                int channel, bool is_one_strip,
                                                Gradients<X>& gradients) {
  prefetch_gradients<X, kAhead>(args, group, index, kAhead);
  ptx::mbarrier_wait(ptx::shared_address(&tail.full[pipeline.slot]), pipeline.phase);
  const Unit unit = Unit::at(args.conv, index);
  gradients.row = gradients_of<X>(args, unit.sample, is_one_strip ? unit.first : unit.column,
                                  group * kConvGroup + channel);
  gradients.limit = static_cast<uint32_t>(4 * (unit.end - unit.first));
}

// Loads a tile's gradients, with the kind of rows that this convolution has.
template <class X>
__device__ __forceinline__ uint32_t load_gradients(const ConvBackwardArgs& args,
                                                   const Gradients<X>& gradients, int index,
                                                   const bool (&is_output)[2], const uint4* place,
                                                   bool is_one_strip, Loaded<X> (&dy)[32]) {
  if (args.pairs) {
    return load_gradients<X, Rows::kPairs>(args.conv, gradients, index, is_output, place, dy);
  } else if (is_one_strip) {
    return load_gradients<X, Rows::kStrip>(args.conv, gradients, index, is_output, place, dy);
  } else {
    return load_gradients<X, Rows::kStrips>(args.conv, gradients, index, is_output, place, dy);
  }
}

// Stores what a warpgroup has summed: one split.
template <class X, bool kSums, bool kWeight, class Sums>
__device__ __forceinline__ void store_split(const ConvBackwardArgs& args,
                                            const Coefficients& coefficients, int split, int group,
                                            int channel, const bool (&is_output)[2], int lane,
                                            int first_tap, int taps, int all_taps, const Sums& sums,
                                            const float (&total)[kConvBackwardTaps][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int output = group * kConvGroup + channel + 8 * r;
    double of_dc = 0;  // in training it is zero
    if constexpr (kSums) {
      const bool stores = lane % 4 == 0 && is_output[r] && first_tap == 0;
      of_dc = store_sums(args, coefficients, sums, r, channel + 8 * r, stores, split, output);
    }
    if constexpr (kWeight) {
      if (!is_output[r]) continue;
      const int values = args.conv.channels * all_taps;
      float* to =
          args.dweight + (static_cast<int64_t>(split) * args.conv.outputs + output) * values;
      store_weight<X>(args.conv, coefficients, lane, first_tap, taps, all_taps, total, r, of_dc,
                      to);
    }
  }
}

// Product warpgroup `worker` of kWorkers, with every kWorkers-th unit.
template <class X, int kWorkers, int kSteps, bool kSums, bool kWeight>
__device__ __forceinline__ void accumulate_units(const ConvBackwardArgs& args,
                                                 const BackwardShared& shared,
                                                 const TileScheduler& scheduler, int first_tap,
                                                 int worker) {
  const ConvDirectArgs& conv = args.conv;
  const int thread = threadIdx.x % kWarpgroup;
  const int lane = thread % 32;
  const int channel = thread / 32 * 16 + lane / 4;
  const int all_taps = conv.kernel_h * conv.kernel_w;
  const int taps = min(all_taps - first_tap, kConvBackwardTaps);
  const Coefficients& coefficients = *shared.coefficients;
  Tail& tail = *shared.tail;
  const int output = scheduler.group * kConvGroup + channel;
  const bool is_output[2] = {output < conv.outputs, output + 8 < conv.outputs};
  const bool is_one_strip = conv.strips.size == 1;
  const ThreadSums<kWorkers> sums{shared.sums + threadIdx.x - kWarpgroup};
  if constexpr (kSums) sums.clear();
  float total[kConvBackwardTaps][4] = {};
  PipelineState pipeline;
  for (int i = 0; i < worker; ++i) pipeline.advance(conv.slots);
  int index = scheduler.first + worker * scheduler.step;
  Gradients<X> gradients;
  Loaded<X> dy[32];
  uint32_t valid = 0;
  const auto load = [&](int slot, int tile) {
    const auto* place = reinterpret_cast<const uint4*>(tail.place[slot]) + tile * 8 + lane % 4;
    valid = load_gradients<X>(args, gradients, index, is_output, place, is_one_strip, dy);
  };
  const auto begin_unit = [&] {
    begin_gradients<X>(args, tail, pipeline, scheduler.group, index, channel, is_one_strip,
                       gradients);
  };
  if (index < conv.units) {
    begin_unit();
    load(pipeline.slot, 0);
  }
  constexpr bool kIsRows = kWeight && kSteps > 0;
  constexpr bool kOverlaps = kIsRows && !kSums;  // with the sums there are too few registers
  [[maybe_unused]] std::conditional_t<kIsRows, RowProducts<X>, NoWeights> rows;
  [[maybe_unused]] int used = -1;  // the slot whose pixels products in flight may still read
  const auto release = [&](int slot) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&tail.empty[slot]));
  };
  int tile = 0;
  while (index < conv.units) {
    const int slot = pipeline.slot;
    const int of_slot = tile;
    const float pixel_unscale = tail.unscale[slot];
    float sum[32];
    start_products<X, kSteps>(conv, shared, slot, tile, sum);
    // Loaded again for each tile: registers are scarce.
    const ChannelValues of_channel[2] = {ChannelValues::of(tail, coefficients, channel),
                                         ChannelValues::of(tail, coefficients, channel + 8)};
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
    if constexpr (kOverlaps) {
      rows.add(total);
      if (of_slot == 0 && used >= 0) release(used);
    }
    float of_tile[2][2] = {};
    meet_gradients<X, kSums, kWeight>(args, valid, dy, of_channel, pixel_unscale, sum, of_tile);
    // The next tile's gradients are loaded while this one is multiplied.
    if (++tile == kConvPositions / kTile) {
      tile = 0;
      for (int i = 0; i < kWorkers; ++i) pipeline.advance(conv.slots);
      index += kWorkers * scheduler.step;
      if (index < conv.units) begin_unit();
    }
    if (tile == kAhead / kTile) {
      prefetch_gradients<X, kAhead>(args, scheduler.group, index + kWorkers * scheduler.step, 0);
    }
    if (index < conv.units) load(pipeline.slot, tile);
    if constexpr (kSums) sums.add(of_tile);
    if constexpr (kIsRows) {
      rows.start(args, shared, slot, of_slot, sum);
      if constexpr (!kOverlaps) {
        ptx::wgmma_wait<0>();
        rows.add(total);
      }
    } else if constexpr (kWeight) {
      multiply_taps<X>(args, shared, slot, of_slot, first_tap, taps, pixel_unscale, sum, total);
    }
    if constexpr (kOverlaps) {
      used = slot;
    } else if (tile == 0) {
      release(slot);
    }
  }
  if constexpr (kOverlaps) {
    ptx::wgmma_wait<0>();
    rows.add(total);
    if (used >= 0) release(used);
  }
  const int split = kWorkers * scheduler.first + worker;
  store_split<X, kSums, kWeight>(args, coefficients, split, scheduler.group, channel, is_output,
                                 lane, first_tap, taps, all_taps, sums, total);
}

template <class X, bool kSums, bool kWeight, class Epilogue, int kScalars, class... In>
__device__ __forceinline__ void run_accumulate(const ConvBackwardArgs& args) {
  constexpr int kWorkers = kWeight ? kConvWeightWorkers : kConvSumWorkers;
  const BackwardShared shared = BackwardShared::of(args.conv);
  // Each group of taps has its own blocks.
  TileScheduler scheduler(args.conv, kWeight ? args.tap_groups : 1);
  const int tap_group = scheduler.group % (kWeight ? args.tap_groups : 1);
  scheduler.group /= kWeight ? args.tap_groups : 1;
  constexpr int kThreads = (1 + kWorkers) * kWarpgroup;
  prepare_backward<X, kThreads, Epilogue, kScalars, In...>(args, shared, scheduler.group,
                                                           kWarpgroup / 32);
  const auto warpgroup = static_cast<int>(ptx::uniform(threadIdx.x / kWarpgroup));
  if (warpgroup == 0) {
    ptx::give_registers<kWeight ? kWeightLoadRegisters : kSumLoadRegisters>();
    load_units<X, 1, true>(args.conv, shared, 0, Stride{scheduler.first, scheduler.step},
                           shared.coefficients->pivot);
  } else {
    ptx::take_registers<kWeight ? kWeightProductRegisters : kSumProductRegisters>();
    const int first_tap = tap_group * kConvBackwardTaps;
    if (args.conv.kernel_h == 3 && args.conv.kernel_w == 3) {
      accumulate_units<X, kWorkers, kUsualSteps<X>, kSums, kWeight>(args, shared, scheduler,
                                                                    first_tap, warpgroup - 1);
    } else {
      accumulate_units<X, kWorkers, 0, kSums, kWeight>(args, shared, scheduler, first_tap,
                                                       warpgroup - 1);
    }
  }
}

}  // namespace fx_fuser::conv_direct
