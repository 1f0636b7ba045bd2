// z[pixel, channel] = sum over k of x[pixel, k] weight[channel, k], and the count, mean and M2 of
// each channel of z: the 1 x 1 convolution of 16-bit tensors in channels_last ahead of a BatchNorm
// in training, for sm_90a.
//
// - Products are computed transposed, weight times xᵀ, so that a thread has few channels of many
//   pixels: its statistics need no shuffles before they are written.
// - Statistics are those of rounded values, which other kernels will read. Each tile's are taken
//   about one of its values (pixels_values_sm90.cuh) and merged with those of the tiles before.
// - Blocks are persistent. The order of all sums depends on sizes and the number of blocks only.
//
// The generated translation unit is that of linear_dense_sm90.cuh; the epilogue is not called.
#pragma once

#include "common/ptx_sm90.cuh"
#include "common/wgmma_sm90.cuh"
#include "conv/pixels_args.h"
#include "conv/pixels_tiles_sm90.cuh"
#include "conv/pixels_values_sm90.cuh"

namespace fx_fuser::pixels {

// ---- consumers ----------------------------------------------------------------------------------

template <class T, class Layout>
struct Consumer {
  static constexpr int kSubtiles = Layout::kSubtiles;
  static constexpr int kPixels = Layout::kPixels;
  using Place = typename Layout::Place;

  const PixelsArgs& args;
  typename Layout::Shared& shared;
  int consumer;

  // Of the channels of the worker's present tiles: 64 subtile + 16 warp + lane / 4 + 8r.
  float count = 0;
  ChannelMoments so_far[kSubtiles][2] = {};

  __device__ __forceinline__ int warp() const { return threadIdx.x % kWarpgroup / 32; }
  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ bool leads() const { return threadIdx.x % kWarpgroup == 0; }

  __device__ __forceinline__ int channel_of(int first, int j, int r) const {
    return first + 64 * j + 16 * warp() + lane() / 4 + 8 * r;
  }

  // Where this lane's row of matrix m = lane / 8 lies in `out`: pixels 8 (i + m / 2) + lane % 8,
  // channels 16 warp + 8 (m % 2) and on.
  __device__ __forceinline__ uint32_t row_address(int j, int i) const {
    const int pixel = 8 * (i + lane() / 16) + lane() % 8;
    const int chunk = 2 * warp() + lane() / 8 % 2;
    return ptx::shared_address(&shared.out[consumer][j][pixel][(chunk ^ pixel % 8) * 16]);
  }

  __device__ __forceinline__ void release(int slot) {
    if (lane() == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[slot]));
  }

  __device__ __forceinline__ void multiply(float (&sum)[kSubtiles][Layout::kSums], Place place,
                                           bool is_last) {
    constexpr int kInstructions = kPixelsStep / 16;
    constexpr int kSubtileStep = 64 * kLine / 16;  // in units of descriptors
    const int first_row = Layout::kInTurns ? 0 : consumer * kSubtiles * 64;
    int previous = 0;
    for (int k = 0; k < args.k; k += kPixelsStep) {
      auto& stage = shared.stage[place.slot];
      const uint64_t weight =
          ptx::matrix_descriptor(ptx::uniform(ptx::shared_address(stage.weight[first_row])));
      const uint64_t x = ptx::matrix_descriptor(ptx::uniform(ptx::shared_address(stage.x)));
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[place.slot]), place.phase);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kInstructions; ++i) {
#pragma unroll
        for (int j = 0; j < kSubtiles; ++j) {
          ptx::Wgmma<T>::run(sum[j], weight + 2 * i + j * kSubtileStep, x + 2 * i, k > 0 || i > 0);
        }
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (k > 0) release(previous);
      previous = place.slot;
      place.advance();
    }
    pass_turn(is_last);
    ptx::wgmma_wait<0>();
    release(previous);
#pragma unroll
    for (int j = 0; j < kSubtiles; ++j) ptx::pin(sum[j]);
  }

  // A consumer must not wait for a stage that lies more than a round of the ring ahead: mbarriers
  // know phases by parity. So consumers in turns wait for the other's stages to have come.
  __device__ __forceinline__ void take_turn(int i) {
    if constexpr (Layout::kInTurns) {
      if (i > 0 || consumer > 0) ptx::barrier_sync<2 * kWarpgroup>(1 + kConsumers + consumer);
    }
  }
  __device__ __forceinline__ void pass_turn(bool is_last) {
    if constexpr (Layout::kInTurns) {
      if (consumer == 0 || !is_last) {
        ptx::barrier_arrive<2 * kWarpgroup>(1 + kConsumers + 1 - consumer);
      }
    }
  }

  // To shared memory, by pixels, and into the statistics. limit: pixels of the tile that are there.
  __device__ __forceinline__ void finish(const float (&sum)[kSubtiles][Layout::kSums], int limit) {
    if (leads()) ptx::bulk_wait_read<0>();  // the tile before has been read from `out`
    ptx::barrier_sync<kWarpgroup>(1 + consumer);
    const int mine = pixels_below<kPixels>(limit);
#pragma unroll
    for (int j = 0; j < kSubtiles; ++j) {
      // Of channel r, pixels 8i + 2 (lane % 4) and the next.
      const auto word_of = [&](int i, int r) {
        return packed<T>(sum[j][4 * i + 2 * r], sum[j][4 * i + 2 * r + 1]);
      };
      const auto pivot_of = [&](int r) {
        const auto value = [&](int i) { return unpacked<T>(word_of(i, r)).x; };
        const float first = value(0);
        return limit < kPixels ? first : median(first, value(kPixels / 16), value(kPixels / 8 - 1));
      };
      Deviations<T> deviations[2] = {Deviations<T>(pivot_of(0)), Deviations<T>(pivot_of(1))};
#pragma unroll
      for (int i = 0; i < kPixels / 8; i += 2) {
        const uint32_t word[4] = {word_of(i, 0), word_of(i, 1), word_of(i + 1, 0),
                                  word_of(i + 1, 1)};
        ptx::store_transposed(row_address(j, i), word);
        const int left = limit - 8 * i - lane() % 4 * 2;  // from the first of them on
        if (limit >= kPixels) {
#pragma unroll
          for (int m = 0; m < 4; ++m) deviations[m % 2].add(word[m], 2);
        } else {
#pragma unroll
          for (int m = 0; m < 4; ++m) deviations[m % 2].add(word[m], left - m / 2 * 8);
        }
      }
      if (mine == 0) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        Moments<float> all{count, so_far[j][r].mean, so_far[j][r].m2};
        all.merge(deviations[r].moments(static_cast<float>(mine)));
        so_far[j][r] = {all.mean, all.m2};
      }
    }
    count += static_cast<float>(mine);
  }

  __device__ __forceinline__ void store(int channel, int pixel) {
    ptx::fence_async_proxy();
    ptx::barrier_sync<kWarpgroup>(1 + consumer);
    if (!leads()) return;
#pragma unroll
    for (int j = 0; j < kSubtiles; ++j) {
      if (channel + 64 * j < args.channels) {
        ptx::tensor_store(args.out_map, ptx::shared_address(shared.out[consumer][j]),
                          channel + 64 * j, pixel);
      }
    }
    ptx::bulk_commit();
  }

  // What the worker's tiles of these channels add up to.
  __device__ __forceinline__ void flush(int channel, int channel_tile, int worker) {
    const int slot = worker - owner_of(args.cut, channel_tile * args.cut.pixel_tiles);
#pragma unroll
    for (int j = 0; j < kSubtiles; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        Moments<float> all{count, so_far[j][r].mean, so_far[j][r].m2};
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
          all = merged_in_order(all, from_lane(all, distance), (lane() & distance) != 0);
        }
        const int one = channel_of(channel, j, r);
        if (lane() % 4 == 0 && one < args.channels) {
          static_cast<Moments<float>*>(args.partial)[int64_t{one} * args.cut.slots + slot] = all;
        }
        so_far[j][r] = {};
      }
    }
    count = 0;
  }

  __device__ __forceinline__ void run() {
    const int worker = Layout::worker_of(consumer);
    const Range range = Range::of(args.cut, worker);
    const int steps = (args.k + kPixelsStep - 1) / kPixelsStep;
    int entered = -1;
    int channel = 0;
    // In turns, as many as the other consumer.
    const int rounds =
        Layout::kInTurns
            ? max(range.count(), Range::of(args.cut, Layout::worker_of(1 - consumer)).count())
            : range.count();
    for (int i = 0; i < rounds; ++i) {
      if (i >= range.count()) {
        take_turn(i);
        pass_turn(i + 1 == rounds);
        continue;
      }
      const int tile = range.begin + i;
      const int channel_tile = tile / args.cut.pixel_tiles;
      const int pixel = tile % args.cut.pixel_tiles * kPixels;
      if (channel_tile != entered) {
        if (entered >= 0) flush(channel, entered, worker);
        channel = channel_tile * Layout::kTileChannels +
                  (Layout::kInTurns ? 0 : consumer * kSubtiles * 64);
        entered = channel_tile;
      }
      take_turn(i);
      float sum[kSubtiles][Layout::kSums];
      multiply(sum, Place::of(tiles_ahead<Layout>(args, consumer, i) * steps), i + 1 == rounds);
      finish(sum, args.pixels - pixel);
      store(channel, pixel);
    }
    if (entered >= 0) flush(channel, entered, worker);
    if (leads()) ptx::bulk_wait_read<0>();
  }
};

// ---- the kernel ---------------------------------------------------------------------------------

template <int kShape, class T>
__device__ __forceinline__ void run(const PixelsArgs& args) {
  using Layout = pixels::Layout<kShape>;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<typename Layout::Shared*>(dynamic_shared);
  if (ptx::shared_address(dynamic_shared) % 1024 != 0) __trap();

  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Layout::kStages; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[slot]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[slot]),
                         (Layout::kInTurns ? 1 : kConsumers) * kWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == kConsumers) {
    ptx::give_registers<kProducerRegisters>();
    if (threadIdx.x % kWarpgroup == 0) feed<Layout>(args, shared);
    __syncwarp();
  } else {
    ptx::take_registers<kConsumerRegisters>();
    Consumer<T, Layout>{args, shared, warpgroup}.run();
  }
}

// A warp for each channel: what its workers have found, in double.
__device__ __forceinline__ void combine(const PixelsCombineArgs& args) {
  ptx::wait_for_prerequisites();
  const int channel = static_cast<int>(blockIdx.x * kPixelsCombineThreads + threadIdx.x) / 32;
  if (channel >= args.channels) return;
  const int first = channel / args.tile_channels * args.cut.pixel_tiles;
  const int last = first + args.cut.pixel_tiles - 1;
  const int workers = owner_of(args.cut, last) - owner_of(args.cut, first) + 1;
  const auto* partial =
      static_cast<const Moments<float>*>(args.partial) + int64_t{channel} * args.cut.slots;
  Moments<double> all{0, 0, 0};
  for (int i = static_cast<int>(threadIdx.x) % 32; i < workers; i += 32) {
    all.merge({partial[i].count, partial[i].mean, partial[i].m2});
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    all.merge({__shfl_down_sync(~0u, all.count, distance),
               __shfl_down_sync(~0u, all.mean, distance), __shfl_down_sync(~0u, all.m2, distance)});
  }
  if (threadIdx.x % 32 != 0) return;
  args.mean[channel] = static_cast<float>(all.mean);
  args.variance[channel] = static_cast<float>(all.m2 / all.count);
}

}  // namespace fx_fuser::pixels

// FX_FUSER_PIXELS_KERNEL(shape, T)
#define FX_FUSER_PIXELS_KERNEL(shape, T)                                           \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kPixelsThreads, 1)        \
      fx_fuser_pixels_##shape(const __grid_constant__ fx_fuser::PixelsArgs args) { \
    fx_fuser::pixels::run<shape, T>(args);                                         \
  }

// FX_FUSER_PIXELS(Epilogue, scalars, Acc, Out, T)
#define FX_FUSER_PIXELS(Epilogue, scalars, Acc, Out, T)                                   \
  FX_FUSER_PIXELS_KERNEL(0, T)                                                            \
  FX_FUSER_PIXELS_KERNEL(1, T)                                                            \
  FX_FUSER_PIXELS_KERNEL(2, T)                                                            \
  FX_FUSER_PIXELS_KERNEL(3, T)                                                            \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kPixelsCombineThreads)           \
      fx_fuser_pixels_combine(const __grid_constant__ fx_fuser::PixelsCombineArgs args) { \
    fx_fuser::pixels::combine(args);                                                      \
  }
