// Direct convolution for few input channels (at most 8, stride 1), by wgmma on sm_90a:
// out = epilogue(conv2d(x, weight), operands, scalars). In fp32, x and weight are split into two
// fp16 halves each, with three products; in bf16 and fp16 there is one. Also computes the mean and
// variance of that convolution without writing it.
//
// conv_direct_args.h says how a convolution becomes matrix products. The kernel reads little and
// writes much, so it is bound by its stores; everything else must stay out of their way.
//
//   loading warpgroup    pixels of a unit → registers → one scale → hi and lo, in a ring of slots
//   product warpgroups   half of a slot's positions each: all taps' products → scales undone → a
//                        stage: [64 channels, 256 positions]
//   storing warps        8 channels each: a stage → epilogue → memory
//
// In 16 bits with per-channel operands, such as a BatchNorm's, storing is only copying:
//
//   loading warpgroup    as above
//   product warpgroups   as above, but then epilogue → a stage of results
//   copying warps        16 channels each: a stage → memory
//
// For statistics, two product warpgroups take alternate units and keep moments in registers;
// nothing is stored.
//
// Scales, in fp32, are powers of two: one per unit for its pixels and one per channel for its
// weights, from the largest of all values that they apply to. If a sum of the halves' products is
// not finite, because of an infinity or a NaN, it is recomputed in plain fp32. The single product
// in 16 bits has IEEE semantics already.
//
// Layers below this file: conv_direct_store_sm90.cuh, conv_direct_stage_sm90.cuh,
// conv_direct_products_sm90.cuh, conv_direct_load_sm90.cuh, conv_direct_units_sm90.cuh.
#pragma once

#include "common/moments.cuh"
#include "conv/conv_direct_store_sm90.cuh"

namespace fx_fuser::conv_direct {

// Registers per thread and role, by setmaxnreg. 512 threads are launched with 128 each, 640 (with
// storing warps) with 96.
constexpr int kLoadRegisters = 96;
constexpr int kStagingRegistersAtFirst = 96;
constexpr int kStagingLoadRegisters = 80;
constexpr int kStagingRegisters = kFewRegisters ? 96 : 112;
constexpr int kStoreRegisters = kFewRegisters ? 104 : 88;
constexpr int kApplyRegisters = 160;
constexpr int kCopyRegisters = 96;
constexpr int kStatsProductRegisters = 160;
static_assert(kStagingLoadRegisters + 2 * kStagingRegisters + 2 * kStoreRegisters <=
              kConvStagingThreads / kWarpgroup * kStagingRegistersAtFirst);
static_assert(kLoadRegisters + 2 * kApplyRegisters + kCopyRegisters <= 512);
static_assert(2 * kLoadRegisters + 2 * kStatsProductRegisters <= 512);

// ---- product warpgroups that feed the storing warps ---------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void change_registers() {
  if constexpr (kRegisters > kStagingRegistersAtFirst) {
    ptx::take_registers<kRegisters>();
  } else {
    ptx::give_registers<kRegisters>();
  }
}

// Multiplies by both unscale factors: by their product, or one after the other if that is not a
// normal number.
__device__ __forceinline__ void undo_scales(float (&sum)[64], const float (&weight_unscale)[2],
                                            float pixel_unscale) {
  float at_once[2];
  float then[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    at_once[r] = weight_unscale[r] * pixel_unscale;
    const bool is_normal = at_once[r] >= FLT_MIN && at_once[r] < INFINITY;
    then[r] = is_normal ? 1.0f : pixel_unscale;
    if (!is_normal) at_once[r] = weight_unscale[r];
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i] *= at_once[i / 2 % 2];
  if (then[0] == 1.0f && then[1] == 1.0f) return;
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i] *= then[i / 2 % 2];
}

// Product warpgroup `part` of two, with that half of each unit's positions: while one fills the
// stage, the other's products run.
template <class X, int kSteps>
__device__ __forceinline__ void stage_units(const ConvDirectArgs& args, const Shared& shared,
                                            int part) {
  const TileScheduler scheduler(args);
  const int thread = threadIdx.x % kWarpgroup;
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int channel = warp * 16 + lane / 4;
  Tail& tail = *shared.tail;
  std::conditional_t<kSplits<X> && kSteps == kUsualSteps<X> && !kFewRegisters, KeptWeights,
                     NoWeights>
      kept;
  if constexpr (std::is_same_v<decltype(kept), KeptWeights>) kept.load(args, shared);
  const float weight_unscale[2] = {tail.weight_unscale[channel], tail.weight_unscale[channel + 8]};
  PipelineState slot;
  PipelineState stage;
  for (int index = scheduler.first; index < args.units; index += scheduler.step) {
    ptx::mbarrier_wait(ptx::shared_address(&tail.full[slot.slot]), slot.phase);
    float sum[64];
    start_products<X, kSteps>(args, shared, slot.slot, part, sum, kept);
    // The channel eight rows further has the same shift: eight planes are whole vectors.
    const int2 unit = tail.unit[slot.slot];
    const uint32_t phase = phase_of(args, unit.x, scheduler.group * kConvGroup + channel);
    float* row =
        shared.staged<float>(stage.slot, channel) + shift_of<kConvStoreWidth>(phase, unit.y);
    const auto* places =
        reinterpret_cast<const uint4*>(tail.place[slot.slot]) + part * 16 + lane % 4;
    ptx::mbarrier_wait(ptx::shared_address(&tail.stored[warp][stage.slot]), stage.phase ^ 1);
    const float pixel_unscale = kSplits<X> ? tail.unscale[slot.slot] : 1.0f;
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
    if constexpr (kSplits<X>) undo_scales(sum, weight_unscale, pixel_unscale);
    Vec<float, 2> pair[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) pair[i] = {sum[2 * i], sum[2 * i + 1]};
    const float broken = args.pairs ? stage_pairs<float, true, kSplits<X>>(pair, places, row)
                                    : stage_pairs<float, false, kSplits<X>>(pair, places, row);
    if constexpr (kSplits<X>) {
      const bool any_broken = __any_sync(0xFFFFFFFF, isnan(broken));
      if (lane == 0) tail.broken[part][warp][stage.slot] = any_broken;
    }
    ptx::mbarrier_arrive(ptx::shared_address(&tail.staged[warp][stage.slot]));
    stage.advance(kConvStages);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&tail.empty[slot.slot]));
    slot.advance(args.slots);
  }
}

// ---- statistics ---------------------------------------------------------------------------------

// In 16 bits the odd tap's step has 8 unused k. They subtract a pivot from every sum of a channel,
// the mean of the block's first 128 sums, so that no separate subtraction is needed: the pixels'
// elements are ones, the weights' are the pivot as three numbers of X. If k of those 128 values are
// outliers, the variance of a block's n values loses k n / 128² of fp32's precision: the variance
// contains the outliers, too.
template <class X, int kSteps>
__device__ __forceinline__ void place_pivots(const ConvDirectArgs& args, const Shared& shared,
                                             const TileScheduler& scheduler, int worker,
                                             int channel, float (&pivot)[2]) {
  X* const row = reinterpret_cast<X*>(shared.weight) + channel * kConvChannels;
  const int thread = threadIdx.x % kWarpgroup;
  // Both warpgroups meet at every barrier: racecheck reports a race if one of them skips it.
  const auto meet = [] { ptx::barrier_sync<2 * kWarpgroup>(kWeightBarrier); };
  if (worker == 0 && scheduler.first < args.units) {
    constexpr float kLargest = std::is_same_v<X, __half> ? 65504.0f : 3.38953139e38f;
    const X one = convert<X>(1.0f);
    const Vec<X, 8> ones = {{one, one, one}};
    static_assert(kConvZeroBytes == kWarpgroup * sizeof(ones));
    reinterpret_cast<Vec<X, 8>*>(shared.zeros)[thread] = ones;
    ptx::fence_async_proxy();
    meet();
    Tail& tail = *shared.tail;
    ptx::mbarrier_wait(ptx::shared_address(&tail.full[0]), 0);
    float sum[64];
    start_products<X, kSteps>(args, shared, 0, 0, sum);
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
    meet();  // the other warps' products read the weights that are written below
    float count = 0;
    float total[2] = {};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int position = i / 2 * 8 + thread % 4 * 2 + i % 2;
      if ((tail.valid[0][position / 32] >> (position % 32) & 1) == 0) continue;
      count += 1;
#pragma unroll
      for (int r = 0; r < 2; ++r) total[r] += sum[i / 2 * 4 + 2 * r + i % 2];
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      count += __shfl_xor_sync(0xFFFFFFFF, count, distance);
#pragma unroll
      for (float& of_row : total) of_row += __shfl_xor_sync(0xFFFFFFFF, of_row, distance);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float rest = total[r] / count;
      if (!(fabsf(rest) < INFINITY)) rest = 0;
      if (thread % 4 != 0) continue;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const X part = convert<X>(fminf(fmaxf(-rest, -kLargest), kLargest));
        row[8 * r * kConvChannels + i] = part;
        rest += convert<float>(part);
      }
    }
    ptx::fence_async_proxy();
  } else {
    meet();
    meet();
  }
  meet();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    pivot[r] = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) pivot[r] -= convert<float>(row[8 * r * kConvChannels + i]);
  }
}

// Product warpgroup `worker` of two: moments about a pivot, as in batch_stats.cu. The pivot is one
// of the unit's values or, if kPivots, that of place_pivots, which the sums already lack.
template <class X, int kSteps, bool kPivots>
__device__ __forceinline__ void measure_units(const ConvDirectArgs& args, const Shared& shared,
                                              int worker) {
  const TileScheduler scheduler(args);
  const int thread = threadIdx.x % kWarpgroup;
  const int lane = thread % 32;
  const int channel = thread / 32 * 16 + lane / 4;
  Tail& tail = *shared.tail;
  Moments<float> moments[2] = {};
  float pivot[2];
  if constexpr (kPivots) place_pivots<X, kSteps>(args, shared, scheduler, worker, channel, pivot);
  float count;
  float total[2][2];  // two per channel: shorter dependency chains
  float squares[2][2];
  PipelineState pipeline;
  for (int i = 0; i < worker; ++i) pipeline.advance(args.slots);
  const int parts = args.positions / kPart;
  const auto measure = [&](int slot, int part, const float (&sum)[64]) {
    if (part == 0) {
      count = 0;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // The unit's first position is always one of its elements.
        if constexpr (!kPivots) pivot[r] = __shfl_sync(0xFFFFFFFF, sum[2 * r], lane & ~3);
#pragma unroll
        for (int t = 0; t < 2; ++t) total[r][t] = squares[r][t] = 0;
      }
    }
    const auto add = [&](int word, uint32_t valid, auto all) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const bool is_valid = decltype(all)::value || (valid >> (8 * i + t) & 1);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float value = sum[(word * 4 + i) * 4 + 2 * r + t];
            const float deviation = kPivots ? value : value - pivot[r];
            if (is_valid) {
              total[r][t] += deviation;
              squares[r][t] = fmaf(deviation, deviation, squares[r][t]);
            }
          }
        }
      }
    };
    const uint4 valid = *reinterpret_cast<const uint4*>(&tail.valid[slot][part * 4]);
    const uint32_t words[4] = {valid.x, valid.y, valid.z, valid.w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      // Usually all 32 positions are elements. In 16 bits this branch gives slower code.
      if (kSplits<X> && words[word] == 0xFFFFFFFF) {
        count += 8;
        add(word, 0, std::true_type{});
      } else {
        // The lane's positions are bits 8b + t of the 32.
        const uint32_t of_lane = words[word] >> (lane % 4 * 2) & 0x03030303;
        count += static_cast<float>(__popc(of_lane));
        add(word, of_lane, std::false_type{});
      }
    }
    if (part != parts - 1 || count == 0) return;
    const float pixel_unscale = kSplits<X> ? tail.unscale[slot] : 1.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float deviations = total[r][0] + total[r][1];
      const float shift = ratio(deviations, count);
      const float m2 = squares[r][0] + squares[r][1] - deviations * shift;
      // One scale after the other: their product can leave fp32's range.
      const float unscale = kSplits<X> ? tail.weight_unscale[channel + 8 * r] : 1.0f;
      moments[r].merge({count, (pivot[r] + shift) * unscale * pixel_unscale,
                        fmaxf(m2, 0.0f) * unscale * pixel_unscale * unscale * pixel_unscale});
      if (isnan(m2)) moments[r].m2 = m2;
    }
  };
  multiply_units<X, kSteps>(args, shared, scheduler.first + worker * scheduler.step,
                            2 * scheduler.step, parts, pipeline, measure);
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
    for (auto& mine : moments) {
      mine.merge({__shfl_xor_sync(0xFFFFFFFF, mine.count, distance),
                  __shfl_xor_sync(0xFFFFFFFF, mine.mean, distance),
                  __shfl_xor_sync(0xFFFFFFFF, mine.m2, distance)});
    }
  }
  const int splits = 2 * scheduler.step;
  const int split = 2 * scheduler.first + worker;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int output = scheduler.group * kConvGroup + channel + 8 * r;
    if (lane % 4 == 0 && output < args.outputs) {
      static_cast<Moments<float>*>(args.partial)[static_cast<int64_t>(output) * splits + split] =
          moments[r];
    }
  }
}

// ---- the kernels --------------------------------------------------------------------------------

// Initialises barriers and weights. kLoaders: loading warpgroups, which need not wait for the
// weights. kReaders: product warps that read a slot. kStagers, kStorers: warps that fill and that
// empty a quarter of a stage's channels.
template <class X, int kLoaders, int kReaders, int kStagers = 0, int kStorers = 0,
          int kThreads = kConvThreads>
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
  __syncthreads();
  constexpr int kLoading = kLoaders * kWarpgroup;
  const auto thread = static_cast<int>(threadIdx.x) - kLoading;
  if (thread >= 0) {
    arrange_weights<X, kThreads - kLoading>(args, shared, TileScheduler(args).group, thread);
  }
}

template <class Epilogue, int kScalars, class Acc, class Out, class X, class... In>
struct Kernels {
  static_assert(std::is_same_v<Acc, float>);
  using Stores = Store<Epilogue, kScalars, X, Out, std::index_sequence_for<In...>, In...>;

  // Any operands, and the convolution itself.
  static __device__ __forceinline__ void run(const ConvDirectArgs& args) {
    const Shared shared = Shared::of<true>(args);
    prepare<X, 1, 8, 2, 2, kConvStagingThreads>(args, shared);
    const auto warpgroup = static_cast<int>(ptx::uniform(threadIdx.x / kWarpgroup));
    if (warpgroup == 0) {
      ptx::give_registers<kStagingLoadRegisters>();
      load_units<X, 1, true>(args, shared, 0);
    } else if (warpgroup < 3) {
      change_registers<kStagingRegisters>();
      if (args.steps == kUsualSteps<X>) {
        stage_units<X, kUsualSteps<X>>(args, shared, warpgroup - 1);
      } else {
        stage_units<X, 0>(args, shared, warpgroup - 1);
      }
    } else {
      change_registers<kStoreRegisters>();
      ptx::wait_for_prerequisites();  // operands: the statistics, in training
      Stores::run(args, shared);
    }
  }

  // 16-bit results, and operands that are constant over a channel of a sample.
  static __device__ __forceinline__ void run_applied(const ConvDirectArgs& args) {
    if constexpr (!kSplits<X> && sizeof(Out) == 2) {
      const Shared shared = Shared::of<true>(args);
      prepare<X, 1, 8, 2, 1>(args, shared);
      const auto warpgroup = static_cast<int>(ptx::uniform(threadIdx.x / kWarpgroup));
      if (warpgroup == 0) {
        ptx::give_registers<kLoadRegisters>();
        if (args.paired == 2) {
          const TileScheduler scheduler(args);
          load_units<X, 1, true, kConvMaxChunks, 2>(
              args, shared, 0, Stride{2 * scheduler.first, 2 * scheduler.step}, nullptr);
        } else {
          load_units<X, 1, true>(args, shared, 0);
        }
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
};

// Batch statistics, which have no epilogue.
template <class X>
__device__ __forceinline__ void run_statistics(const ConvDirectArgs& args) {
  ptx::launch_dependents();
  const Shared shared = Shared::of<false>(args);
  prepare<X, 2, 4>(args, shared);
  const auto warpgroup = static_cast<int>(ptx::uniform(threadIdx.x / kWarpgroup));
  if (warpgroup < 2) {
    ptx::give_registers<kLoadRegisters>();
    load_units<X, 2, false>(args, shared, warpgroup);
  } else {
    ptx::take_registers<kStatsProductRegisters>();
    // Tests the taps, not the steps: in 16 bits ten taps have as many steps as nine.
    if (args.kernel_h * args.kernel_w == kUsualTaps) {
      measure_units<X, kUsualSteps<X>, !kSplits<X>>(args, shared, warpgroup - 2);
    } else {
      measure_units<X, 0, false>(args, shared, warpgroup - 2);
    }
  }
}

}  // namespace fx_fuser::conv_direct

// FX_FUSER_CONV_DIRECT(Epilogue, scalars, Acc, Out, x's type, Operands...)
#define FX_FUSER_CONV_DIRECT(...)                                                           \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kConvStagingThreads, 1)            \
      fx_fuser_conv_direct(const __grid_constant__ fx_fuser::ConvDirectArgs args) {         \
    fx_fuser::conv_direct::Kernels<__VA_ARGS__>::run(args);                                 \
  }                                                                                         \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kConvThreads, 1)                   \
      fx_fuser_conv_direct_applied(const __grid_constant__ fx_fuser::ConvDirectArgs args) { \
    fx_fuser::conv_direct::Kernels<__VA_ARGS__>::run_applied(args);                         \
  }

// FX_FUSER_CONV_DIRECT_COMMON(x's type)
#define FX_FUSER_CONV_DIRECT_COMMON(X)                                                         \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kConvThreads, 1)                      \
      fx_fuser_conv_direct_statistics(const __grid_constant__ fx_fuser::ConvDirectArgs args) { \
    fx_fuser::conv_direct::run_statistics<X>(args);                                            \
  }
