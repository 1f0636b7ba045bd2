// Of the split product: the main loop, of the warps that feed it and of the warpgroups that
// multiply.
#pragma once

#include "common/wgmma_sm90.cuh"
#include "linear/linear_split_tiles_sm90.cuh"

namespace fx_fuser::linear_split {

// ---- producers ----------------------------------------------------------------------------------

// feed(tile, k) for every stage. A tile done again comes twice: for its scales, for its products.
template <class Feed>
__device__ __forceinline__ void feed_stages(const LinearSplitArgs& args, Shared& shared,
                                            const Feed& feed) {
  TileScheduler scheduler{args, shared};
  while (scheduler.next([](bool value) { return value; })) {
    const Tile tile = tile_at(args, scheduler.index);
    for (int pass = scheduler.again ? 0 : 1; pass < 2; ++pass) {
      for (int k = 0; k < args.planes.k; k += kTileK) feed(tile, k);
    }
  }
}

template <bool kNMajor>
__device__ __forceinline__ void feed_weight(const LinearSplitArgs& args, Shared& shared) {
  // A weight that only one tile of x meets is read once.
  const uint64_t policy = args.m <= kTileM ? ptx::kEvictFirst : ptx::kEvictNormal;
  PipelineState pipeline;
  feed_stages(args, shared, [&](Tile tile, int k) {
    WeightSlot& slot = shared.weight[pipeline.slot];
    const uint32_t full = ptx::shared_address(&shared.of_weight.full[pipeline.slot]);
    const int in_weight = tile.at.chunk * args.planes.k + k;
    const int inner = tile.at.inner * args.weight_inner;
    const int outer = tile.at.outer * args.weight_outer;
    pipeline.wait_until_empty(shared.of_weight);
    ptx::mbarrier_arrive_expect_tx(full, sizeof(WeightSlot));
    if constexpr (kNMajor) {
#pragma unroll 1  // few registers are left to this warp
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
    pipeline.advance();
  });
  if (args.misled == nullptr || shared.any_again == 0) return;
  int tiles = 0;
  int again = 0;
  for (int index = blockIdx.x; index < args.tiles; index += gridDim.x) {
    ++tiles;
    again += args.again[index] != 0;
  }
  // The kernel takes as long as its slowest block.
  if (again * kMostAgain > tiles) *args.misled = static_cast<uint32_t>(again * kMostAgain / tiles);
}

template <class X>
__device__ __forceinline__ void feed_x(const LinearSplitArgs& args, Shared& shared) {
  constexpr int kBytes = kHasLo<X> ? sizeof(XSlot) : sizeof(XSlot::part[0]);
  PipelineState pipeline;
  feed_stages(args, shared, [&](Tile tile, int k) {
    const uint32_t full = ptx::shared_address(&shared.of_x.full[pipeline.slot]);
    pipeline.wait_until_empty(shared.of_x);
    ptx::mbarrier_arrive_expect_tx(full, kBytes);
    ptx::tensor_load(ptx::shared_address(shared.x[pipeline.slot].part), args.x_map, full,
                     ptx::kEvictLast, k, tile.m, 0, tile.plane);
    pipeline.advance();
  });
}

// ---- the weight, from shared memory to wgmma's operand ------------------------------------------

// A thread's part of a stage: rows g and g + 8 of its warp's 16, chunks 2c and 2c + 1 of each 32 of
// k. Chunk 2c + j of box b is its part of the wgmma over k positions 32b + 16j...32b + 16j + 15.
// Of an N-major weight, what wgmma asks for in order: k 2c, 2c + 1, 2c + 8 and 2c + 9 of each 16.
template <bool kNMajor>
struct RawWeight {
  float4 chunk[kTileK / 16][2 /*row*/];

  // Where a thread's loads begin in a slot; `row` is that of g in the tile.
  static __device__ __forceinline__ uint32_t place_of(int row, int g, int c) {
    if constexpr (kNMajor) {
      const int column = row % kLinearBox;
      return row / kLinearBox * (kTileK * kLinearBox * 4) + 2 * c * kLinearBox * 4 +
             ((column / 4 ^ 2 * c) << 4) + column % 4 * 4;
    } else {
      return row * kLinearBox * 4 + ((2 * c ^ g) << 4);
    }
  }

  // Free of bank conflicts: the eight lanes of one phase have eight different swizzled chunks; of a
  // N-major weight the 32 lanes have the words of eight.
  __device__ __forceinline__ void load(uint32_t address) {
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if constexpr (kNMajor) {
          // Row g + 8 is two chunks on, and an odd k swizzles to the neighbour.
          const auto at = [&](int k) {
            return ptx::load_shared_word((address ^ row << 5 ^ (k & 1) << 4) +
                                         (step * 16 + k) * kLinearBox * 4);
          };
          chunk[step][row] = make_float4(at(0), at(1), at(8), at(9));
        } else {
          const uint32_t chunk_address = step % 2 ? address ^ 16 : address;
          chunk[step][row] = ptx::load_shared(chunk_address + step / 2 * sizeof(WeightSlot) / 2 +
                                              row * 8 * kLinearBox * 4);
        }
      }
    }
  }

  // What this lane has of one of the two rows.
  __device__ __forceinline__ float largest_in_row(int row) const {
    float largest = largest_of(chunk[0][row]);
#pragma unroll
    for (int step = 1; step < kTileK / 16; ++step) {
      largest = fmaxf(largest, largest_of(chunk[step][row]));
    }
    return largest;
  }
};

// Of a row: the quad's lanes have a part each.
__device__ __forceinline__ float largest_in_quad(float largest) {
  largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
}

struct Fragments {
  uint32_t hi[kTileK / 16][4];
  uint32_t lo[kTileK / 16][4];

  template <class Raw>
  __device__ __forceinline__ void split_of(const Raw& raw, const float (&scale)[2]) {
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float4 v = raw.chunk[step][row];
        const SplitPair front = split(v.x * scale[row], v.y * scale[row]);
        const SplitPair back = split(v.z * scale[row], v.w * scale[row]);
        hi[step][row] = front.hi;
        hi[step][2 + row] = back.hi;
        lo[step][row] = front.lo;
        lo[step][2 + row] = back.lo;
      }
    }
  }

  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      ptx::pin(hi[step]);
      ptx::pin(lo[step]);
    }
  }
};

// ---- consumers ----------------------------------------------------------------------------------

// Ping-pong: the two consumers issue in turn, the first one first.
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
  // The second consumer's last pass is still to be met.
  __device__ __forceinline__ void end() const {
    if (consumer == 0) wait_for(0);
  }
};

// accumulator = the three products with x, or two where that has no lo. The small ones first: what
// the tensor core truncates is relative to the sum so far.
template <class X>
__device__ __forceinline__ void issue_products(float (&accumulator)[64], Fragments& weight,
                                               const XSlot& slot, const PingPong& ping_pong) {
  const uint64_t x_hi = ptx::matrix_descriptor(ptx::shared_address(slot.part[0]));
  const uint64_t x_lo = ptx::matrix_descriptor(ptx::shared_address(slot.part[1]));
  constexpr int kDescriptorStep = 16 * sizeof(__half) / 16;
  constexpr int kSteps = kTileK / 16;
  // Pinned here, else ptxas serialises the products or sinks the splitting behind the barrier.
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

// Sums of more than kLinearChunk of k are sums of such sums, each begun at zero: adding a thousand
// terms to one fp32 would cost more than cuBLAS's own error. What is done waits in memory, as
// [block][16][thread] float4.
constexpr int kChunkTiles = kLinearChunkK / kTileK;

__device__ __forceinline__ float4* spilled_sums(const LinearSplitArgs& args) {
  return static_cast<float4*>(args.spilled) + blockIdx.x * (16 * kConsumers * kWarpgroup) +
         threadIdx.x;
}

__device__ __forceinline__ void spill_sums(const LinearSplitArgs& args, float (&sum)[64],
                                           bool first) {
  float4* place = spilled_sums(args);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float4 before = make_float4(0, 0, 0, 0);
    if (!first) before = place[i * kConsumers * kWarpgroup];
    place[i * kConsumers * kWarpgroup] =
        make_float4(before.x + sum[4 * i], before.y + sum[4 * i + 1], before.z + sum[4 * i + 2],
                    before.w + sum[4 * i + 3]);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[4 * i + e] = 0;
  }
}

__device__ __forceinline__ void restore_sums(const LinearSplitArgs& args, float (&sum)[64]) {
  const float4* place = spilled_sums(args);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float4 before = place[i * kConsumers * kWarpgroup];
    sum[4 * i] += before.x;
    sum[4 * i + 1] += before.y;
    sum[4 * i + 2] += before.z;
    sum[4 * i + 3] += before.w;
  }
}

// The rows of x all of whose sums in this warp are small, but not all zero: bit 2i + t of a lane is
// row 8i + 2 (lane % 4) + t. The sums are still scaled, so that of each element at most 2^-25 is
// lost, and of a sum 2^-25.8 times the Euclidean norms of both rows, if errors are random: whatever
// the data, `least` = kLeastSum sqrt(k) is where that can reach 3e-7 of 16 sums. The pre-pass knows
// x's norm, and tile_epilogue.least_sum may be less. How far data of what kind is above it:
// linear/NOTES.md.
template <class TileEpilogue>
__device__ __forceinline__ uint32_t imprecise_rows(const float (&sum)[64], float least,
                                                   const TileEpilogue& tile_epilogue) {
  float smallest = INFINITY;  // of the larger ones of a thread's two sums of a row
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      smallest = fminf(smallest, fmaxf(fabsf(sum[i + t]), fabsf(sum[i + 2 + t])));
    }
  }
  if (!__any_sync(0xFFFFFFFF, smallest < least)) return 0;
  uint32_t large = 0;
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float larger = fmaxf(fabsf(sum[4 * i + t]), fabsf(sum[4 * i + 2 + t]));
      const uint32_t bit = 1u << (2 * i + t);
      const int row = 8 * i + 2 * (threadIdx.x % 4) + t;
      large |= larger >= tile_epilogue.least_sum(row) ? bit : 0;
      any |= larger > 0 ? bit : 0;
    }
  }
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    large |= __shfl_xor_sync(0xFFFFFFFF, large, distance);
    any |= __shfl_xor_sync(0xFFFFFFFF, any, distance);
  }
  return any & ~large;
}

// The same of the rows of the weight, of four sums that are not zero and more, which a quad has:
// bit 4 g + r is row g + 8 r of the warp's 16. The same in all lanes.
__device__ __forceinline__ uint32_t imprecise_weights(const float (&sum)[64], float least) {
  // One sum that is large enough clears a row, and a lane's first ones are, for most data.
  const float first =
      fminf(fmaxf(fabsf(sum[0]), fabsf(sum[1])), fmaxf(fabsf(sum[2]), fabsf(sum[3])));
  if (__all_sync(0xFFFFFFFF, first >= least)) return 0;
  constexpr uint32_t kFirstOfQuads = 0x11111111;
  float largest[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 64; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], fabsf(sum[i]));
  uint32_t rows = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float of_row = largest_in_quad(largest[r]);
    const bool is_imprecise = of_row > 0 && of_row < least;
    rows |= (__ballot_sync(0xFFFFFFFF, is_imprecise) & kFirstOfQuads) << r;
  }
  if (rows == 0) return 0;
  // One sum or two may be small by chance: where most of x is zeros, as gradients can be.
  constexpr int kLeastSums = 4;
  uint32_t supported = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int sums = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) sums += (sum[4 * i + 2 * r] != 0) + (sum[4 * i + 2 * r + 1] != 0);
    sums += __shfl_xor_sync(0xFFFFFFFF, sums, 1);
    sums += __shfl_xor_sync(0xFFFFFFFF, sums, 2);
    supported |= (__ballot_sync(0xFFFFFFFF, sums >= kLeastSums) & kFirstOfQuads) << r;
  }
  return rows & supported;
}

// A scale too large makes an infinity of a weight, and no sum of its row is then finite. Is there
// such a row in this warp? A lane's first sums say that there is none, for most data.
__device__ __forceinline__ bool is_overflowed(const float (&sum)[64]) {
  if (__all_sync(0xFFFFFFFF, isfinite(sum[0]) && isfinite(sum[2]))) return false;
  float least[2] = {INFINITY, INFINITY};
#pragma unroll
  for (int i = 0; i < 64; ++i) least[i / 2 % 2] = fminf(least[i / 2 % 2], fabsf(sum[i]));
  return __any_sync(0xFFFFFFFF, fmaxf(least[0], least[1]) == INFINITY);
}

// Of a thread's two rows of the weight, from their largest values, or what is known of those: where
// a tile is done `again`, or a kernel ahead of this one has found them, it is the truth.
__device__ __forceinline__ void find_scales(const LinearSplitArgs& args, bool again,
                                            const float (&largest)[2], float (&scale)[2],
                                            float (&unscale)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool is_true = again || args.weight_factors != nullptr;
    const Scale found = Scale::of(largest_in_quad(largest[r]), is_true ? 0 : kHeadRoom);
    scale[r] = found.scale;
    unscale[r] = found.unscale;
  }
}

// tile_epilogue(index, sum, imprecise, weights) for every tile of the block, sum[4i + 2r + t] being
// the one of
//   weight row 64 consumer + 16 warp + lane / 4 + 8r and x row 8i + 2 (lane % 4) + t
// still in the scale of x's row, and the imprecise rows of x and of the weight; then
// tile_epilogue.repair().
//
// What decides the speed is the path from one product's end to the next one's issue: promote,
// split, issue. It must be shorter than the other consumer's products. All else stands after the
// issue, where the warp would only wait.
template <bool kNMajor, class X, class TileEpilogue>
__device__ __forceinline__ void consume(const LinearSplitArgs& args, Shared& shared, int consumer,
                                        TileEpilogue& tile_epilogue) {
  const int thread = threadIdx.x % kWarpgroup;
  const int lane = thread % 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const int row = consumer * 64 + thread / 32 * 16 + g;
  const uint32_t place = RawWeight<kNMajor>::place_of(row, g, c);
  const int k_tiles = (args.planes.k + kTileK - 1) / kTileK;

  PipelineState stage;  // that is read next, or whose products are issued next
  RawWeight<kNMajor> raw;
  const auto read = [&](const PipelineState& from) {
    from.wait_until_full(shared.of_weight);
    from.wait_until_full(shared.of_x);
    raw.load(ptx::shared_address(shared.weight[from.slot].box) + place);
  };
  const auto release = [&](Barriers& barriers, int slot) {
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&barriers.empty[slot]));
  };

  const PingPong ping_pong{consumer};
  ping_pong.begin();
  TileScheduler scheduler{args, shared};
  while (scheduler.next([](bool value) { return __any_sync(0xFFFFFFFF, value) != 0; })) {
    tile_epilogue.begin(scheduler.index);
    // A guess looks at the first stage, which is needed in registers anyway; the truth takes a pass
    // of its own, here or, for all tiles, in a kernel ahead of this one.
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
    if (scheduler.again) {
#pragma unroll 1
      for (int i = 0; i < k_tiles; ++i) {
        read(stage);
        look();
        ptx::pin(largest);
        __syncwarp();
        release(shared.of_weight, stage.slot);
        release(shared.of_x, stage.slot);
        stage.advance();
      }
    }
    read(stage);
    look();
    float scale[2];
    float unscale[2];
    find_scales(args, scheduler.again, largest, scale, unscale);

    ptx::pin(scale);
    float sum[64];
#pragma unroll
    for (float& one : sum) one = 0;
    float accumulator[64];
    Fragments weight;
    for (int begin = 0; begin < k_tiles; begin += kChunkTiles) {
      if (begin > 0) spill_sums(args, sum, /*first=*/begin == kChunkTiles);
      const int end = min(begin + kChunkTiles, k_tiles);
      for (int k_tile = begin; k_tile < end; ++k_tile) {
        const int slot = stage.slot;
        weight.split_of(raw, scale);
        issue_products<X>(accumulator, weight, shared.x[slot], ping_pong);
        release(shared.of_weight, slot);
        stage.advance();
        if (k_tile + 1 < k_tiles) read(stage);
        ptx::wgmma_wait<0>();
        release(shared.of_x, slot);
        ptx::pin(accumulator);
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[i] += accumulator[i];
      }
    }
    if (k_tiles > kChunkTiles) restore_sums(args, sum);

    if (!scheduler.again) scheduler.report(is_overflowed(sum));
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
