// The split product's main loop by TMA and wgmma: the producer threads that feed the two rings, and
// the consumer warpgroups.
#pragma once

#include "common/ptx_sm90.cuh"
#include "common/wgmma_sm90.cuh"
#include "linear/linear_split_sums.cuh"

namespace fx_fuser::linear_split {

constexpr int kConsumers = 2;
constexpr int kWarpgroup = 128;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
static_assert(kLinearThreads == (kConsumers + 1) * kWarpgroup);
static_assert(kLinearConsumerThreads == kConsumers * kWarpgroup);
// setmaxnreg only redistributes the registers that a block is launched with: if the sum is larger,
// warps wait forever.
constexpr int kLaunchRegisters = 64 * 1024 / kLinearThreads / 8 * 8;
static_assert(kConsumerRegisters * kConsumers + kProducerRegisters <=
              kLaunchRegisters * (kConsumers + 1));

// ---- shared memory ------------------------------------------------------------------------------

// A stage of the weight: 64 of k. Rows are 128 bytes, swizzled as RawWeight describes.
struct WeightSlot {
  union {
    float box[kTileK / kLinearBox][kTileN][kLinearBox];      // [k][n][k]
    float n_major[kTileN / kLinearBox][kTileK][kLinearBox];  // [n][k][n]
  };
};
struct XSlot {
  __half part[2 /*hi, lo*/][kTileM][kTileK];
};
static_assert(sizeof(WeightSlot) + sizeof(XSlot) == kLinearStageBytes);
static_assert(sizeof(WeightSlot) % 1024 == 0 && sizeof(XSlot) % 1024 == 0);

// Two rings: a slot of the weight is free once it is in registers, one of x only when its products
// are done, more than a turn later.
struct HopperShared {
  WeightSlot weight[kLinearStages];
  XSlot x[kLinearStages];
  Shared tiles;
  Barriers<kLinearStages> of_weight;
  Barriers<kLinearStages> of_x;
};
static_assert(sizeof(HopperShared) == kLinearSharedBytes);

// ---- producers ----------------------------------------------------------------------------------

// Calls feed(tile, k) for every stage. A recomputed tile is fed twice: for its scales, then for its
// products.
template <class Feed>
__device__ __forceinline__ void feed_stages(const LinearSplitArgs& args, Shared& shared,
                                            const Feed& feed) {
  TileScheduler scheduler{args, shared};
  while (scheduler.next(OfThread{})) {
    const Tile tile = tile_at(args, scheduler.index);
    for (int pass = scheduler.redoing ? 0 : 1; pass < 2; ++pass) {
      for (int k = 0; k < args.planes.k; k += kTileK) feed(tile, k);
    }
  }
}

template <bool kNMajor>
__device__ __forceinline__ void feed_weight(const LinearSplitArgs& args, HopperShared& shared) {
  // With a single tile of x, the weight is read only once.
  const uint64_t policy = args.m <= kTileM ? ptx::kEvictFirst : ptx::kEvictNormal;
  PipelineState pipeline;
  feed_stages(args, shared.tiles, [&](Tile tile, int k) {
    WeightSlot& slot = shared.weight[pipeline.slot];
    const uint32_t full = ptx::shared_address(&shared.of_weight.full[pipeline.slot]);
    const int in_weight = tile.at.chunk * args.planes.k + k;
    const int inner = tile.at.inner * args.weight_inner;
    const int outer = tile.at.outer * args.weight_outer;
    pipeline.wait_until_empty(shared.of_weight);
    ptx::mbarrier_arrive_expect_tx(full, sizeof(WeightSlot));
    if constexpr (kNMajor) {
#pragma unroll 1  // this warp has few registers
      for (int box = 0; box < kTileN / kLinearBox; ++box) {
        ptx::tensor_load(ptx::shared_address(slot.n_major[box]), args.weight_map, full, policy,
                         tile.n + box * kLinearBox, in_weight, inner, outer);
      }
    } else {
#pragma unroll
      for (int box = 0; box < kTileK / kLinearBox; ++box) {
        ptx::tensor_load(ptx::shared_address(slot.box[box]), args.weight_map, full, policy,
                         in_weight + box * kLinearBox, tile.n, inner, outer);
      }
    }
    pipeline.advance(kLinearStages);
  });
  report_guesses(args, shared.tiles);
}

template <class X>
__device__ __forceinline__ void feed_x(const LinearSplitArgs& args, HopperShared& shared) {
  constexpr int kBytes = kHasLo<X> ? sizeof(XSlot) : sizeof(XSlot::part[0]);
  PipelineState pipeline;
  feed_stages(args, shared.tiles, [&](Tile tile, int k) {
    const uint32_t full = ptx::shared_address(&shared.of_x.full[pipeline.slot]);
    pipeline.wait_until_empty(shared.of_x);
    ptx::mbarrier_arrive_expect_tx(full, kBytes);
    ptx::tensor_load(ptx::shared_address(shared.x[pipeline.slot].part), args.x_map, full,
                     ptx::kEvictLast, k, tile.m, 0, tile.plane);
    pipeline.advance(kLinearStages);
  });
}

// ---- consumers ----------------------------------------------------------------------------------

// Ping-pong: the two consumers issue their wgmmas alternately, the first one first.
struct PingPong {
  int consumer;

  __device__ __forceinline__ static void wait_for(int consumer) {
    ptx::barrier_sync<kConsumers * kWarpgroup>(1 + consumer);
  }
  __device__ __forceinline__ static void pass_to(int consumer) {
    ptx::barrier_arrive<kConsumers * kWarpgroup>(1 + consumer);
  }
  __device__ __forceinline__ void begin() const {
    if (consumer == 1) pass_to(0);
  }
  __device__ __forceinline__ void take() const { wait_for(consumer); }
  __device__ __forceinline__ void pass() const { pass_to(1 - consumer); }
  // Matches the second consumer's last pass.
  __device__ __forceinline__ void end() const {
    if (consumer == 0) wait_for(0);
  }
};

// accumulator = the three products with x, or two if x has no lo. The small ones come first: the
// tensor core's truncation is relative to the sum so far.
template <class X>
__device__ __forceinline__ void issue_products(float (&accumulator)[64], Fragments<kTileK>& weight,
                                               const XSlot& slot, const PingPong& ping_pong) {
  const uint64_t x_hi = ptx::matrix_descriptor(ptx::shared_address(slot.part[0]));
  const uint64_t x_lo = ptx::matrix_descriptor(ptx::shared_address(slot.part[1]));
  constexpr int kDescriptorStep = 16 * sizeof(__half) / 16;
  constexpr int kSteps = kTileK / 16;
  // Without these pins ptxas serialises the products or sinks the splitting behind the barrier.
  ptx::pin(accumulator);
  weight.pin();
  ping_pong.take();
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if constexpr (kHasLo<X>) {
      ptx::WgmmaOfRegisters<__half>::run(accumulator, weight.hi[step],
                                         x_lo + step * kDescriptorStep, step > 0);
    }
    ptx::WgmmaOfRegisters<__half>::run(accumulator, weight.lo[step], x_hi + step * kDescriptorStep,
                                       kHasLo<X> || step > 0);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::WgmmaOfRegisters<__half>::run(accumulator, weight.hi[step], x_hi + step * kDescriptorStep,
                                       true);
  }
  ptx::wgmma_commit();
  ping_pong.pass();
}

// Calls tile_epilogue(index, sum, imprecise, weights) for every tile of the block, then
// tile_epilogue.repair(). sum[4i + 2r + t] is the sum of
//   weight row 64 consumer + 16 warp + lane / 4 + 8r and x row 8i + 2 (lane % 4) + t
// still scaled by x's row; `imprecise` and `weights` are the imprecise rows of x and of the weight.
//
// The critical path is from the end of one stage's products to the issue of the next: promote,
// split, issue. It must be shorter than the other consumer's products. Everything else is placed
// after the issue, where the warp would only wait.
template <bool kNMajor, class X, class TileEpilogue>
__device__ __forceinline__ void consume(const LinearSplitArgs& args, HopperShared& shared,
                                        int consumer, TileEpilogue& tile_epilogue) {
  const int thread = threadIdx.x % kWarpgroup;
  const int lane = thread % 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const int row = consumer * 64 + thread / 32 * 16 + g;
  const uint32_t place = RawWeight<kNMajor, kTileK>::place_of(row, g, c);
  const int k_tiles = (args.planes.k + kTileK - 1) / kTileK;

  PipelineState stage;  // to be read next, or whose products are issued next
  RawWeight<kNMajor, kTileK> raw;
  const auto read = [&](const PipelineState& from) {
    from.wait_until_full(shared.of_weight);
    from.wait_until_full(shared.of_x);
    raw.load(ptx::shared_address(shared.weight[from.slot].box) + place);
  };
  const auto release = [&](Barriers<kLinearStages>& barriers, int slot) {
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&barriers.empty[slot]));
  };

  const PingPong ping_pong{consumer};
  ping_pong.begin();
  TileScheduler scheduler{args, shared.tiles};
  while (scheduler.next(OfWarp{})) {
    tile_epilogue.begin(scheduler.index);
    // A guess uses the first stage only, which is loaded to registers anyway. Exact scales need a
    // pass over the weight: here for a recomputed tile, or for all tiles in an earlier kernel
    // (weight_factors).
    float largest[2] = {0, 0};
    if (args.weight_factors != nullptr) {
      const Tile tile = tile_at(args, scheduler.index);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int n = min(tile.n + row + 8 * r, args.n - 1);
        const SplitRowFactors& factors = args.weight_factors[int64_t{tile.plane} * args.n + n];
        largest[r] = Scale::largest_of(factors.unscale);
      }
    }
    const auto look = [&] {
#pragma unroll
      for (int r = 0; r < 2; ++r) largest[r] = fmaxf(largest[r], raw.largest_in_row(r));
    };
    if (scheduler.redoing) {
#pragma unroll 1
      for (int i = 0; i < k_tiles; ++i) {
        read(stage);
        look();
        ptx::pin(largest);
        __syncwarp();
        release(shared.of_weight, stage.slot);
        release(shared.of_x, stage.slot);
        stage.advance(kLinearStages);
      }
    }
    read(stage);
    look();
    float scale[2];
    float unscale[2];
    find_scales(args, scheduler.redoing, largest, scale, unscale);

    ptx::pin(scale);
    float sum[64];
#pragma unroll
    for (float& one : sum) one = 0;
    float accumulator[64];
    Fragments<kTileK> weight;
    for (int begin = 0; begin < k_tiles; begin += kChunkTiles) {
      if (begin > 0) spill_sums(args, sum, /*first=*/begin == kChunkTiles);
      const int end = min(begin + kChunkTiles, k_tiles);
      for (int k_tile = begin; k_tile < end; ++k_tile) {
        const int slot = stage.slot;
        weight.split_of(raw, scale);
        issue_products<X>(accumulator, weight, shared.x[slot], ping_pong);
        release(shared.of_weight, slot);
        stage.advance(kLinearStages);
        if (k_tile + 1 < k_tiles) read(stage);
        ptx::wgmma_wait<0>();
        release(shared.of_x, slot);
        ptx::pin(accumulator);
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[i] += accumulator[i];
      }
    }
    if (k_tiles > kChunkTiles) restore_sums(args, sum);

    if (!scheduler.redoing) scheduler.report(is_overflowed(sum));
    tile_epilogue.ready();
    const uint32_t imprecise = imprecise_rows(sum, args.least_sum, tile_epilogue);
    const uint32_t weights = imprecise_weights(sum, args.least_sum);
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] *= unscale[i / 2 % 2];
    tile_epilogue(scheduler.index, sum, imprecise, weights);
  }
  ping_pong.end();
  tile_epilogue.repair();
}

}  // namespace fx_fuser::linear_split
