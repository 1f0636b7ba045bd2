// The split product by mma.sync (linear_split_mma.cuh): the main loop. Each warp feeds its part of
// the ring, splits the weight and multiplies.
#pragma once

#include "linear/linear_split_mma_feed.cuh"

namespace fx_fuser::linear_split {

// ---- products -----------------------------------------------------------------------------------

constexpr int kMmaRowsN = 2;   // per warp: blocks of 16 rows of the weight
constexpr int kMmaRowsM = 8;   // per warp: blocks of eight rows of x
constexpr int kMmaGroupM = 2;  // blocks of x whose accumulators are live at once
constexpr int kMmaGroups = kMmaRowsM / kMmaGroupM;
constexpr int kMmaSteps = kMmaTileK / 16;       // per stage
constexpr int kMmaWarpM = 8 * kMmaRowsM;        // rows of x
constexpr int kMmaPairN = kMmaRowsN * kWarpN;   // rows of the weight
constexpr int kMmaWarpsM = kTileM / kMmaWarpM;  // warps with the same rows of the weight
constexpr int kMmaSumsN = 4 * kMmaRowsM;        // per 16 rows of the weight
static_assert(kMmaWarpsM == 2 && kMmaRowsN * kMmaSumsN == 64);

// The next stage's first operands are loaded after half of a stage's products. Not with two stages,
// when the next one has not arrived yet, and not for sm_80, where ptxas spills.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr bool kReadsEarly = true;
#else
constexpr bool kReadsEarly = false;
#endif

using MmaFragments = Fragments<kMmaTileK>;

// A warp's position in its block.
struct MmaWarp {
  int pair;  // of warps with the same rows of the weight
  int half;  // of the tile's rows of x, and after the last stage of the pair's rows of the weight

  static __device__ __forceinline__ MmaWarp self() {
    const int warp = static_cast<int>(ptx::thread_index()) / 32;
    return {warp / kMmaWarpsM, warp % kMmaWarpsM};
  }
};

// Where a lane's loads begin. Recomputed for each tile: there are no registers to keep it.
struct MmaPlace {
  int row;          // of the weight's tile
  uint32_t weight;  // in a stage
  uint32_t x;       // in a stage: the lane's row of the first eight, and its chunk of k

  template <bool kNMajor>
  static __device__ __forceinline__ MmaPlace of() {
    const MmaWarp warp = MmaWarp::self();
    const int lane = static_cast<int>(ptx::thread_index()) % 32;
    const int row = warp.pair * kMmaPairN + lane / 4;
    const int x_row = warp.half * kMmaWarpM + lane % 8;
    return {row, RawWeight<kNMajor, kMmaTileK>::place_of(row, lane / 4, lane % 4),
            static_cast<uint32_t>(kMmaXOffset + x_row * kMmaTileK * sizeof(__half) +
                                  (lane / 8 ^ lane % 8 / 2) * 16)};
  }
};

// Two times eight rows of x, with all of a stage's k.
template <class X>
struct XFragments {
  uint32_t hi[kMmaGroupM][2 * kMmaSteps];
  uint32_t lo[kMmaGroupM][2 * kMmaSteps];  // unused if X has no lo

  // place: where a lane's matrices of x begin in a stage. Loads nothing unless `reads`.
  __device__ __forceinline__ void load(uint32_t place, int group, bool reads) {
    constexpr int kBytesOfRows = 8 * kMmaTileK * sizeof(__half);
    constexpr int kBytesOfPart = kTileM * kMmaTileK * sizeof(__half);
    place += kMmaGroupM * group * kBytesOfRows;
#pragma unroll
    for (int i = 0; i < kMmaGroupM; ++i) {
      if constexpr (kHasLo<X>) {
        ptx::load_matrices_if(reads, lo[i], place + i * kBytesOfRows + kBytesOfPart);
      }
    }
#pragma unroll
    for (int i = 0; i < kMmaGroupM; ++i) {
      ptx::load_matrices_if(reads, hi[i], place + i * kBytesOfRows);
    }
  }
};

// accumulator[r][i] = the products of 16 rows r of the weight with eight rows i of x. The small
// ones come first: the tensor core's truncation is relative to the sum so far.
template <class X>
__device__ __forceinline__ void multiply_group(float (&accumulator)[kMmaRowsN][kMmaGroupM][4],
                                               const MmaFragments (&weight)[kMmaRowsN],
                                               const XFragments<X>& x) {
  bool begun = false;
  const auto add = [&](bool low_weight, int step, const uint32_t (&x)[kMmaGroupM][2 * kMmaSteps]) {
    constexpr float kNothing[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kMmaGroupM; ++i) {
#pragma unroll
      for (int r = 0; r < kMmaRowsN; ++r) {
        float (&d)[4] = accumulator[r][i];
        const uint32_t (&a)[4] = low_weight ? weight[r].lo[step] : weight[r].hi[step];
        const uint32_t b0 = x[i][2 * step];
        const uint32_t b1 = x[i][2 * step + 1];
        if (begun) {
          ptx::mma_m16n8k16<__half>(d, a, b0, b1);
        } else {
          ptx::mma_m16n8k16<__half>(d, a, b0, b1, kNothing);
        }
      }
    }
    begun = true;
  };
#pragma unroll
  for (int step = 0; step < kMmaSteps; ++step) {
    if constexpr (kHasLo<X>) add(false, step, x.lo);
    add(true, step, x.hi);
  }
#pragma unroll
  for (int step = 0; step < kMmaSteps; ++step) add(false, step, x.hi);
}

// Adds the accumulators of a group to the fp32 sums: sum[32r + 4i + e], with i counted per warp.
__device__ __forceinline__ void promote(float (&sum)[64],
                                        const float (&accumulator)[kMmaRowsN][kMmaGroupM][4],
                                        int group) {
#pragma unroll
  for (int r = 0; r < kMmaRowsN; ++r) {
#pragma unroll
    for (int i = 0; i < kMmaGroupM; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum[kMmaSumsN * r + 4 * (kMmaGroupM * group + i) + e] += accumulator[r][i][e];
      }
    }
  }
}

// The two warps of a pair swap half of their sums, 16 at once, through both warps' exchanges. From
// then on sum[4i + 2r + t] is the sum of
//   weight row 16 warp + lane / 4 + 8r and x row 8i + 2 (lane % 4) + t
// as in the Hopper kernel.
__device__ __forceinline__ void swap_sums(Shared& shared, float (&sum)[64]) {
  constexpr int kAtOnce = 16;
  static_assert(sizeof(Exchange::z) >= kAtOnce * 32 * sizeof(float));
  const MmaWarp me = MmaWarp::self();
  const int warp = static_cast<int>(ptx::thread_index()) / 32;
  const int lane = static_cast<int>(ptx::thread_index()) % 32;
  auto* mine = reinterpret_cast<float4*>(shared.exchange[warp].z) + lane;
  const auto* others = reinterpret_cast<const float4*>(shared.exchange[warp ^ 1].z) + lane;
  const bool gives_first = me.half == 1;
#pragma unroll
  for (int begin = 0; begin < kMmaSumsN; begin += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; i += 4) {
      const auto given = [&](int e) {
        return gives_first ? sum[begin + i + e] : sum[kMmaSumsN + begin + i + e];
      };
      mine[i / 4 * 32] = make_float4(given(0), given(1), given(2), given(3));
    }
    ptx::barrier_sync<64>(1 + me.pair);
#pragma unroll
    for (int i = 0; i < kAtOnce; i += 4) {
      const float4 got = others[i / 4 * 32];
      const float value[4] = {got.x, got.y, got.z, got.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& first = sum[begin + i + e];
        float& second = sum[kMmaSumsN + begin + i + e];
        if (gives_first) {
          first = value[e];
        } else {
          second = value[e];
        }
      }
    }
    ptx::barrier_sync<64>(1 + me.pair);
  }
}

// A warp's rows of the weight: values, largest values, scales.
template <bool kNMajor>
struct MmaWeight {
  RawWeight<kNMajor, kMmaTileK> raw[kMmaRowsN];
  float largest[kMmaRowsN][2];
  float scale[kMmaRowsN][2];

  __device__ __forceinline__ void load(uint32_t address) {
    raw[0].load(address);
    raw[1].load(RawWeight<kNMajor, kMmaTileK>::next_rows(address));
  }

  // The same if `reads`; predicated, no branch.
  __device__ __forceinline__ void load_if(bool reads, uint32_t address) {
    raw[0].load_if(reads, address);
    raw[1].load_if(reads, RawWeight<kNMajor, kMmaTileK>::next_rows(address));
  }

  // Initialises the largest values: from weight_factors, or zero if scales are guessed.
  __device__ __forceinline__ void begin(const LinearSplitArgs& args, const Tile& tile, int row) {
#pragma unroll
    for (int r = 0; r < kMmaRowsN; ++r) {
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        largest[r][eight] = 0;
        if (args.weight_factors == nullptr) continue;
        const int n = min(tile.n + row + kWarpN * r + 8 * eight, args.n - 1);
        const SplitRowFactors& factors = args.weight_factors[int64_t{tile.plane} * args.n + n];
        largest[r][eight] = Scale::largest_of(factors.unscale);
      }
    }
  }

  __device__ __forceinline__ void look() {
#pragma unroll
    for (int r = 0; r < kMmaRowsN; ++r) {
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        largest[r][eight] = fmaxf(largest[r][eight], raw[r].largest_in_row(eight));
      }
    }
  }

  __device__ __forceinline__ void find_scales(const LinearSplitArgs& args, bool redoing) {
#pragma unroll
    for (int r = 0; r < kMmaRowsN; ++r) {
      float unscale[2];
      linear_split::find_scales(args, redoing, largest[r], scale[r], unscale);
    }
  }
};

// A warp's state in the ring: what it feeds, what it has loaded, what it multiplies.
template <bool kNMajor, class X>
struct MmaRing {
  const LinearSplitArgs& args;
  MmaShared& shared;
  Feeder<kNMajor, X> feeder{args, shared};
  PipelineState stage{};  // to be read next, or whose products are next
  MmaWeight<kNMajor> weight{};
  XFragments<X> x[kMmaGroups / 2];  // of half a stage

  __device__ __forceinline__ uint32_t address() const {
    return ptx::shared_address(&shared.stage(stage.slot));
  }

  __device__ __forceinline__ void load_x(uint32_t place, int half, bool reads) {
#pragma unroll
    for (int i = 0; i < kMmaGroups / 2; ++i) {
      x[i].load(address() + place, kMmaGroups / 2 * half + i, reads);
    }
  }

  __device__ __forceinline__ void read(uint32_t place) {
    stage.wait_until_full(shared.ring);
    weight.load(address() + place);
  }

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    ptx::mbarrier_arrive(ptx::shared_address(&shared.ring.empty[stage.slot]));
  }

  // Fills the ring before a block's first tile, and again before the first recomputed one.
  __device__ __forceinline__ void fill(bool redoing) {
    feeder.start(redoing);
    PipelineState next = stage;
#pragma unroll 1
    for (int i = 1; i < args.stages; ++i) {
      feeder.feed(next.slot, redoing);
      next.advance(args.stages);
    }
  }

  // Refills the previous stage's slot with the next stage that is not in the ring yet.
  __device__ __forceinline__ void feed(bool redoing) { feed(stage.before(args.stages), redoing); }
  __device__ __forceinline__ void feed(const PipelineState& last, bool redoing) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.ring.empty[last.slot]), last.phase);
    feeder.feed(last.slot, redoing);
  }

  // Which of feed() and the next stage's loads can be done early, between a stage's products:
  // whole stages whose barrier is already complete. Uniform across lanes. Tested between products,
  // which hide the 40 cycles of latency of a barrier's test.
  struct Early {
    bool feeds;
    bool loads;
    PipelineState last;  // the slot to refill
  };
  __device__ __forceinline__ bool may_feed(const PipelineState& last) const {
    const uint32_t empty = ptx::shared_address(&shared.ring.empty[last.slot]);
    const bool is_empty = ptx::mbarrier_is_complete(empty, last.phase);
    return __all_sync(0xFFFFFFFF, is_empty && feeder.is_plain());
  }
  __device__ __forceinline__ bool may_load(PipelineState next, bool more) const {
    next.advance(args.stages);
    const uint32_t full = ptx::shared_address(&shared.ring.full[next.slot]);
    return __all_sync(0xFFFFFFFF, ptx::mbarrier_is_complete(full, next.phase) && more);
  }

  // Passes over all of a recomputed tile to find the largest values of its rows.
  __device__ __forceinline__ void look(const MmaPlace& place, int k_tiles) {
#pragma unroll 1
    for (int i = 0; i < k_tiles; ++i) {
      feed(/*redoing=*/true);
      read(place.weight);
      weight.look();
      release();
      stage.advance(args.stages);
    }
  }

  // sum += the products of a stage, whose first operands are loaded already; also loads the next
  // stage's first operands, if there is `more`. With kReadsEarly there is no branch, at which ptxas
  // would wait for all products in flight: what needs one is left to multiply_tile().
  __device__ __forceinline__ Early multiply_stage(float (&sum)[64], const MmaPlace& place,
                                                  bool more, bool redoing) {
    Early early{/*feeds=*/true, /*loads=*/more, stage.before(args.stages)};
    MmaFragments fragments[kMmaRowsN];
#pragma unroll
    for (int r = 0; r < kMmaRowsN; ++r) {
      fragments[r].split_of(weight.raw[r], weight.scale[r]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float accumulator[kMmaGroups / 2][kMmaRowsN][kMmaGroupM][4];
#pragma unroll
      for (int i = 0; i < kMmaGroups / 2; ++i) {
        multiply_group<X>(accumulator[i], fragments, x[i]);
      }
      const auto promote_all = [&] {
#pragma unroll
        for (int i = 0; i < kMmaGroups / 2; ++i) {
          promote(sum, accumulator[i], kMmaGroups / 2 * half + i);
        }
      };
      // sm_80 has too few registers for the second half's accumulators in addition to these.
      if (half == 0 && !kReadsEarly) promote_all();
      if (half == 0) {
        if constexpr (kReadsEarly) early.loads = may_load(stage, more);
        // Reads all of the slot before its products, so that it can be refilled early.
        load_x(place.x, 1, true);
        release();
        stage.advance(args.stages);
        if constexpr (kReadsEarly) {
          early.feeds = may_feed(early.last);
          weight.load_if(early.loads, address() + place.weight);
          feeder.copy_plain(early.last.slot, early.feeds);
        } else {
          feed(early.last, redoing);
        }
      } else {
        if (!kReadsEarly && more) read(place.weight);
        load_x(place.x, 0, early.loads);
      }
      if (half == 1 || kReadsEarly) promote_all();
    }
    return early;
  }

  // The sums of a tile of k_tiles stages; the first stage's operands are loaded already.
  __device__ __forceinline__ void multiply_tile(float (&sum)[64], const MmaPlace& place,
                                                uint32_t k_tiles, bool redoing) {
    constexpr uint32_t kChunkTiles = kLinearChunkK / kMmaTileK;
#pragma unroll
    for (float& one : sum) one = 0;
    uint32_t left = min(k_tiles, kChunkTiles);  // stages left to sum in one fp32
    uint32_t others = k_tiles - left;
    // The usual stage takes the `continue`, the loop's only backward branch.
#pragma unroll 1
    for (;;) {
      --left;
      const Early early = multiply_stage(sum, place, left > 0, redoing);
      if (early.feeds && early.loads) {
        if (kReadsEarly) feeder.arrive(early.last.slot);
        continue;
      }
      if (!early.feeds) {
        feed(early.last, redoing);
      } else if (kReadsEarly) {
        feeder.arrive(early.last.slot);
      }
      if (left + others == 0) break;
      if (!early.loads) {
        read(place.weight);
        load_x(place.x, 0, true);
      }
      if (left == 0) {
        spill_sums(args, sum, others + kChunkTiles == k_tiles);
        left = min(others, kChunkTiles);
        others -= left;
      }
    }
    if (k_tiles > kChunkTiles) restore_sums(args, sum);
  }
};

// Calls tile_epilogue(index, sum, imprecise, weights) for every tile of the block, as Hopper's
// `consume` does, then tile_epilogue.repair().
template <bool kNMajor, class X, class TileEpilogue>
__device__ __forceinline__ void multiply(const LinearSplitArgs& args, MmaShared& shared,
                                         TileEpilogue& tile_epilogue) {
  MmaRing<kNMajor, X> ring{args, shared};
  TileScheduler scheduler{args, shared.tiles};
  int filled = 0;  // how often the ring was filled: once per pass over the tiles
  while (scheduler.next(OfWarp{})) {
    if (filled == static_cast<int>(scheduler.redoing)) {
      ring.fill(scheduler.redoing);
      ++filled;
    }
    const MmaPlace place = MmaPlace::of<kNMajor>();
    const Tile tile = tile_at(args, scheduler.index);
    const int k_tiles = (k_of(args.planes, tile.at) + kMmaTileK - 1) / kMmaTileK;
    tile_epilogue.begin(scheduler.index);
    ring.weight.begin(args, tile, place.row);
    if (scheduler.redoing) ring.look(place, k_tiles);
    ring.read(place.weight);
    ring.load_x(place.x, 0, true);
    ring.weight.look();
    ring.weight.find_scales(args, scheduler.redoing);

    float sum[64];
    ring.multiply_tile(sum, place, k_tiles, scheduler.redoing);
    swap_sums(shared.tiles, sum);

    if (!scheduler.redoing) scheduler.report(is_overflowed(sum));
    tile_epilogue.ready();
    const uint32_t imprecise = imprecise_rows(sum, args.least_sum, tile_epilogue);
    const uint32_t weights = imprecise_weights(sum, args.least_sum);
    float unscale[2];
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      unscale[eight] = Scale::unscale_of(ring.weight.scale[0][eight]);
      if (MmaWarp::self().half == 1)
        unscale[eight] = Scale::unscale_of(ring.weight.scale[1][eight]);
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] *= unscale[i / 2 % 2];
    tile_epilogue(scheduler.index, sum, imprecise, weights);
  }
  if (threadIdx.x == 0) report_guesses(args, shared.tiles);
  tile_epilogue.repair();
}

}  // namespace fx_fuser::linear_split
