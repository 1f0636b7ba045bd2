// The 1 x 1 convolution of pixels_sm90.cuh: how its tiles are laid out in shared memory and divided
// among workers, and the thread that loads them.
#pragma once

#include "common/ptx_sm90.cuh"
#include "conv/pixels_args.h"

namespace fx_fuser::pixels {

constexpr int kConsumers = 2;
constexpr int kWarpgroup = 128;
constexpr int kWarps = kWarpgroup / 32;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kLine = 128;  // bytes of a swizzled row
static_assert(kPixelsThreads == (kConsumers + 1) * kWarpgroup);
// Registers are exchanged within what the block has at launch, 168 a thread: whoever asks for more
// waits forever.
constexpr int kLaunchRegisters = 64 * 1024 / kPixelsThreads / 8 * 8;
static_assert(kConsumerRegisters * kConsumers + kProducerRegisters ==
              kLaunchRegisters * (kConsumers + 1));

template <int kShape>
struct Layout {
  static constexpr PixelsShape kIs = kPixelsShapes[kShape];
  static constexpr int kPixels = kIs.pixels;
  static constexpr int kSubtiles = kIs.subtiles;
  static constexpr int kStages = kIs.stages();
  static constexpr bool kInTurns = kIs.in_turns;
  static constexpr int kTileChannels = kIs.tile_channels();
  static constexpr int kSums = kPixels / 2;  // per thread and subtile

  struct Stage {
    uint8_t weight[kTileChannels][kLine];
    uint8_t x[kPixels][kLine];
  };
  struct Shared {
    Stage stage[kStages];
    uint8_t out[kConsumers][kSubtiles][kPixels][kLine];
    uint64_t full[kStages];
    uint64_t empty[kStages];
  };
  static_assert(sizeof(Stage) == kIs.stage_bytes() && sizeof(Shared) == kIs.shared_bytes());

  struct Place {  // in the ring of stages
    int slot;
    uint32_t phase;

    static __device__ __forceinline__ Place of(int stage) {
      return {stage % kStages, static_cast<uint32_t>(stage / kStages % 2)};
    }
    __device__ __forceinline__ void advance() {
      if (++slot == kStages) {
        slot = 0;
        phase ^= 1;
      }
    }
  };

  static __device__ __forceinline__ int first_worker() { return blockIdx.x * (kInTurns ? 2 : 1); }
  static __device__ __forceinline__ int worker_of(int consumer) {
    return first_worker() + (kInTurns ? consumer : 0);
  }
};

// The tiles of a worker.
struct Range {
  int begin;
  int end;

  static __device__ __forceinline__ Range of(const PixelsCut& cut, int worker) {
    if (worker >= cut.workers) return {0, 0};
    const auto at = [&](int one) {
      return static_cast<int>(int64_t{one} * cut.tiles / cut.workers);
    };
    return {at(worker), at(worker + 1)};
  }
  __device__ __forceinline__ int count() const { return end - begin; }
};

// The worker that has a tile.
__device__ __forceinline__ int owner_of(const PixelsCut& cut, int tile) {
  return static_cast<int>((int64_t{tile + 1} * cut.workers - 1) / cut.tiles);
}

// Calls visit(tile) for the block's tiles in the order in which their stages come.
template <class Layout, class Visit>
__device__ __forceinline__ void for_tiles(const PixelsArgs& args, Visit visit) {
  const Range first = Range::of(args.cut, Layout::worker_of(0));
  if constexpr (!Layout::kInTurns) {
    for (int tile = first.begin; tile < first.end; ++tile) visit(tile);
  } else {
    const Range second = Range::of(args.cut, Layout::worker_of(1));
    for (int i = 0; i < max(first.count(), second.count()); ++i) {
      if (i < first.count()) visit(first.begin + i);
      if (i < second.count()) visit(second.begin + i);
    }
  }
}

// How many tiles of the block come ahead of a consumer's i-th.
template <class Layout>
__device__ __forceinline__ int tiles_ahead(const PixelsArgs& args, int consumer, int i) {
  if constexpr (!Layout::kInTurns) return i;
  const int others = Range::of(args.cut, Layout::worker_of(1 - consumer)).count();
  return i + min(i + consumer, others);
}

// ---- producer -----------------------------------------------------------------------------------

template <class Layout>
__device__ __forceinline__ void feed(const PixelsArgs& args, typename Layout::Shared& shared) {
  auto place = Layout::Place::of(0);
  for_tiles<Layout>(args, [&](int tile) {
    const int channel = tile / args.cut.pixel_tiles * Layout::kTileChannels;
    const int pixel = tile % args.cut.pixel_tiles * Layout::kPixels;
    for (int k = 0; k < args.k; k += kPixelsStep) {
      auto& stage = shared.stage[place.slot];
      const uint32_t full = ptx::shared_address(&shared.full[place.slot]);
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[place.slot]), place.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, sizeof(stage));
      ptx::tensor_load(ptx::shared_address(stage.weight), args.weight_map, full, ptx::kEvictLast, k,
                       channel);
      ptx::tensor_load(ptx::shared_address(stage.x), args.x_map, full, ptx::kEvictNormal, k, pixel);
      place.advance();
    }
  });
}

}  // namespace fx_fuser::pixels
