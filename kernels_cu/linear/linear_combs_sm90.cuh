// out[m, n] = epilogue(z), z = sum over k of a[m, k] b[n, k], of bf16 or fp16 matrices, for sm_90a:
// a and out of any pitch, and from any element on; b aligned. By TMA and wgmma.
//
// TMA wants pitches of a multiple of 16 bytes, but its boxes begin at any element. Eight lines of
// any pitch are such a multiple. So each eighth line is a tensor of its own, a *comb*
// (linear_combs_args.h), and TMA does the shifting: of the operand, and of the result.
//
// A tile's combs follow each other in shared memory, so that its lines have another order than in
// the matrix: line 8q + j is the q-th of comb j.
// - Where a's lines are rows, it is a tile's rows that have this order, and a warp's 16 rows are of
//   one comb: it gives them to TMA as they are, as a box of the result's comb.
// - Where a's lines are k, it is a stage's k. b's have the same order, by a tensor map with the
//   dimensions [8][k / 8][n]. It needs k % 8 == 0; else b comes by combs, too.
// Lines end, and combs end, where the operand does: beyond that TMA writes zeros, and reads
// nothing.
//
// Blocks are persistent: two warps feed shared memory, one with a and one with b, two warpgroups
// multiply, and the next tile's stages arrive while the epilogue of this one runs. Blocks of a
// cluster have the same b: each loads a part of it and sends that to all.
//
//   FX_FUSER_LINEAR_COMBS(/*shape*/ 0, /*are k adjacent in a, b*/ 1, 0, Epilogue, /*scalars*/ 1,
//                         /*Acc*/ float, /*Out*/ __half, /*a, b*/ __half)
#pragma once

#include "common/convert.cuh"
#include "common/epilogue_math.cuh"
#include "common/ptx_sm90.cuh"
#include "common/wgmma_sm90.cuh"
#include "linear/linear_combs_args.h"
#include "linear/linear_combs_load.cuh"

namespace fx_fuser::combs {

constexpr int kConsumers = 2;
constexpr int kWarpgroup = 128;

// Registers of a thread, of the warpgroups that multiply and of the one that copies, which has a's
// vectors in registers if it shifts them. Who arrives at a stage: for a and for b.
struct Roles {
  int consumer_registers;
  int producer_registers;
  int arrivals;
};
constexpr Roles roles(bool shifts) {
  return shifts ? Roles{200, 104, kWarpgroup / 32 + 1} : Roles{232, 40, 1 + 1};
}
// A block has what it was launched with: of 384 threads so many each. More would be waited for.
constexpr int kLaunchRegisters = 168;
constexpr bool fits(const Roles& of) {
  return of.consumer_registers * kConsumers + of.producer_registers <=
         kLaunchRegisters * (kConsumers + 1);
}
static_assert(fits(roles(false)) && fits(roles(true)));
constexpr int kSubtileM = 64;  // rows of one wgmma
constexpr int kInstructionK = 16;
constexpr int kCombLines = kCombStepK / kCombs;  // of a stage, where lines are k
// Lines of 64 elements, those of one stage's k.
constexpr int kSpanOfK = kCombStepK * kCombSpanBytes;
static_assert(kCombThreads == (kConsumers + 1) * kWarpgroup);

// ---- shared memory ------------------------------------------------------------------------------

template <class X_, int kShape, bool kAlongA_, bool kAlongB_>
struct Layout {
  using X = X_;
  static constexpr CombShape kIs = kCombShapes[kShape];
  static constexpr Roles kRoles = roles(kIs.shifts);
  static constexpr bool kAlongA = kAlongA_;
  static constexpr bool kAlongB = kAlongB_;
  static constexpr int kTileM = kIs.tile_m();
  static constexpr int kTileN = kIs.tile_n;
  static constexpr int kSubtiles = kIs.subtiles;
  static constexpr int kCluster = kIs.cluster;
  static constexpr int kStages = kIs.stages;
  static constexpr int kSlots = kIs.slots;
  static constexpr int kSpansN = kTileN / kCombSpan;
  static constexpr int kSums = kTileN / 2;               // of a thread and subtile
  static constexpr int kCombRows = kTileM / kCombs;      // of a tile
  static constexpr int kShareCombs = kCombs / kCluster;  // of b's that a block sends to the cluster
  static constexpr int kShareK = kCombStepK / kCluster;  // of b's lines
  static constexpr int kShareRows = kTileN / kCluster;

  // Lines of 128 bytes, swizzled: the 16-byte chunk c of line r lies at chunk c ^ (r % 8). Where k
  // are lines, those of 64 rows are followed by those of the next 64.
  struct Stage {
    uint8_t a[kTileM * kCombSpanBytes];
    uint8_t b[kTileN * kCombSpanBytes];
  };
  struct Shared {
    Stage stage[kStages];
    uint8_t slot[kCombWarps][kSlots][kCombSlotBytes];
    uint64_t full[kStages];
    uint64_t empty[kStages];
  };
  static_assert(sizeof(X) == 2 && kIs16BitFloat<X>);
  static_assert(sizeof(Stage) == kIs.stage_bytes() && sizeof(Shared) == kIs.shared_bytes());
  static_assert(kTileN % kCombSpan == 0 && kShareRows % 8 == 0 && kShareK % 8 == 0);
  static_assert(kCombRows % kCombWarpRows == 0, "a warp's rows are of one comb");
  static_assert(kAlongA || !kAlongB, "a's order of k is one of lines");

  struct PipelineState {
    int slot = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance() {
      if (++slot == kStages) {
        slot = 0;
        phase ^= 1;
      }
    }
  };

  struct Tile {
    int m;  // first row
    int n;  // first column
  };

  static __device__ __forceinline__ Tile tile_at(const CombArgs& args, int unit) {
    const int columns = args.all_units / args.units;
    const int group = unit / (args.group * columns);
    const int inside = unit - group * args.group * columns;
    const int width = min(args.group, args.units - group * args.group);
    const int row = group * args.group + inside % width;
    return {(row * kCluster + rank()) * kTileM, inside / width * kTileN};
  }

  static __device__ __forceinline__ int rank() { return static_cast<int>(blockIdx.x) % kCluster; }
  static __device__ __forceinline__ int first_unit() {
    return static_cast<int>(blockIdx.x) / kCluster;
  }
  static __device__ __forceinline__ int unit_step() {
    return static_cast<int>(gridDim.x) / kCluster;
  }
};

// Where a comb's box begins. inside: it ends neither lines nor the comb.
struct Place {
  const TensorMap& map;
  int x;
};

template <class L>
__device__ __forceinline__ Place place_of(const Combs& combs, int comb, int x, bool inside) {
  if (L::kIs.is_one && inside) return {combs.all, combs.offset[0] + comb * combs.pitch + x};
  return {combs.map[comb], combs.offset[comb] + x};
}

// ---- producers ----------------------------------------------------------------------------------

// A tile's a of one stage.
template <class L>
__device__ __forceinline__ void load_a(const CombArgs& args, uint32_t to, uint32_t full, int m,
                                       int k) {
  const int lines = L::kAlongA ? args.m : args.k;
  const int length = L::kAlongA ? args.k : args.m;
  const bool inside = (L::kAlongA ? m + L::kTileM : k + kCombStepK) <= lines / kCombs * kCombs &&
                      (L::kAlongA ? k + kCombStepK : m + L::kTileM) <= length;
#pragma unroll
  for (int j = 0; j < kCombs; ++j) {
    if constexpr (L::kAlongA) {
      const Place place = place_of<L>(args.a, j, k, inside);
      ptx::tensor_load(to + j * (L::kCombRows * kCombSpanBytes), place.map, full, ptx::kEvictNormal,
                       place.x, m / kCombs);
    } else {
#pragma unroll
      for (int span = 0; span < L::kTileM / kCombSpan; ++span) {
        const Place place = place_of<L>(args.a, j, m + span * kCombSpan, inside);
        ptx::tensor_load(to + span * kSpanOfK + j * (kCombLines * kCombSpanBytes), place.map, full,
                         ptx::kEvictNormal, place.x, k / kCombs);
      }
    }
  }
}

// This block's share of a cluster's b of one stage, to all blocks.
template <class L>
__device__ __forceinline__ void load_b(const CombArgs& args, uint32_t to, uint32_t full, int n,
                                       int k) {
  constexpr auto kAll = static_cast<uint16_t>((1 << L::kCluster) - 1);
  constexpr uint64_t kPolicy = ptx::kEvictNormal;
  const int rank = L::rank();
  if constexpr (L::kAlongB) {
    const int share = rank * L::kShareRows;
    ptx::tensor_load_multicast(to + share * kCombSpanBytes, args.b.map[0], full, kAll, kPolicy, k,
                               n + share);
    return;
  }
  const int share = rank * L::kShareK;
  const int first_comb = rank * L::kShareCombs;
#pragma unroll
  for (int span = 0; span < L::kSpansN; ++span) {
    const uint32_t at = to + span * kSpanOfK + share * kCombSpanBytes;
    const int column = n + span * kCombSpan;
    if constexpr (L::kAlongA) {
      ptx::tensor_load_multicast(at, args.b.map[0], full, kAll, kPolicy, column, k + share);
    } else if (args.b_is_whole) {
      ptx::tensor_load_multicast(at, args.b.map[0], full, kAll, kPolicy, column, k / kCombs,
                                 first_comb);
    } else {
      for (int j = 0; j < L::kShareCombs; ++j) {
        ptx::tensor_load_multicast(at + j * (kCombLines * kCombSpanBytes),
                                   args.b.map[first_comb + j], full, kAll, kPolicy, column,
                                   k / kCombs);
      }
    }
  }
}

// One thread's part: a's, or b's.
template <class L, bool kIsA>
__device__ __forceinline__ void feed(const CombArgs& args, typename L::Shared& shared) {
  typename L::PipelineState pipeline;
  for (int unit = L::first_unit(); unit < args.all_units; unit += L::unit_step()) {
    const auto tile = L::tile_at(args, unit);
    for (int k = 0; k < args.k; k += kCombStepK) {
      auto& stage = shared.stage[pipeline.slot];
      const uint32_t full = ptx::shared_address(&shared.full[pipeline.slot]);
      // Empty in all blocks of the cluster: each sends to the others.
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[pipeline.slot]), pipeline.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, kIsA ? sizeof(stage.a) : sizeof(stage.b));
      if constexpr (kIsA) {
        load_a<L>(args, ptx::shared_address(stage.a), full, tile.m, k);
      } else {
        load_b<L>(args, ptx::shared_address(stage.b), full, tile.n, k);
      }
      pipeline.advance();
    }
  }
}

// The next stage of a block's.
template <class L>
struct Cursor {
  const CombArgs& args;
  int unit;
  int k = 0;
  typename L::Tile tile;

  __device__ __forceinline__ explicit Cursor(const CombArgs& of)
      : args(of), unit(L::first_unit()), tile(L::tile_at(of, L::first_unit())) {}

  __device__ __forceinline__ bool is_there() const { return unit < args.all_units; }
  __device__ __forceinline__ void advance() {
    k += kCombStepK;
    if (k < args.k) return;
    k = 0;
    unit += L::unit_step();
    if (is_there()) tile = L::tile_at(args, unit);
  }
};

// A warpgroup's part, where it loads a by itself; its first thread has TMA load b.
template <class L>
__device__ __forceinline__ void feed_shifted(const CombArgs& args, typename L::Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  Loader<L> loader(args);
  typename L::PipelineState pipeline;
  Cursor<L> next(args);
  loader.fetch(next.tile.m, next.k);
  while (next.is_there()) {
    const auto tile = next.tile;
    const int k = next.k;
    next.advance();
    auto& stage = shared.stage[pipeline.slot];
    const uint32_t full = ptx::shared_address(&shared.full[pipeline.slot]);
    ptx::mbarrier_wait(ptx::shared_address(&shared.empty[pipeline.slot]), pipeline.phase ^ 1);
    if (thread == 0) {
      ptx::mbarrier_arrive_expect_tx(full, sizeof(stage.b));
      load_b<L>(args, ptx::shared_address(stage.b), full, tile.n, k);
    }
    loader.put(ptx::shared_address(stage.a), tile.m, k);
    ptx::fence_async_proxy();
    __syncwarp();
    if (thread % 32 == 0) ptx::mbarrier_arrive(full);
    if (next.is_there()) loader.fetch(next.tile.m, next.k);
    pipeline.advance();
  }
}

// ---- consumers ----------------------------------------------------------------------------------

// d[4i + 2r + t] of a subtile: row 16 warp + lane / 4 + 8r, column 8i + 2 (lane % 4) + t.
template <class L>
using Sums = float[L::kSubtiles][L::kSums];

template <class L>
__device__ __forceinline__ void multiply_stage(Sums<L>& sum, typename L::Stage& stage, int consumer,
                                               bool accumulate) {
  using Product = ptx::WgmmaOfMajors<typename L::X, !L::kAlongA, !L::kAlongB>;
  // In the unit of descriptors, 16 bytes.
  constexpr int kSubtileStep = kSubtileM * kCombSpanBytes / 16;  // 64 rows, or the k of 64 rows
  constexpr int kAlongStep = kInstructionK * 2 / 16;
  constexpr int kLinesStep = kInstructionK * kCombSpanBytes / 16;
  const auto descriptor = [](const uint8_t* at, bool along) {
    const uint32_t address = ptx::uniform(ptx::shared_address(at));
    return along ? ptx::matrix_descriptor(address) : ptx::transposed_descriptor(address, kSpanOfK);
  };
  const uint64_t a = descriptor(stage.a, L::kAlongA) + consumer * L::kSubtiles * kSubtileStep;
  const uint64_t b = descriptor(stage.b, L::kAlongB);
#pragma unroll
  for (int i = 0; i < kCombStepK / kInstructionK; ++i) {
#pragma unroll
    for (int j = 0; j < L::kSubtiles; ++j) {
      Product::run(sum[j], a + i * (L::kAlongA ? kAlongStep : kLinesStep) + j * kSubtileStep,
                   b + i * (L::kAlongB ? kAlongStep : kLinesStep), accumulate || i > 0);
    }
  }
}

// A consumer's warp is done with a stage: all blocks that send to it hear of it.
template <class L>
__device__ __forceinline__ void release(typename L::Shared& shared, int slot, int lane) {
  const uint32_t empty = ptx::shared_address(&shared.empty[slot]);
  if (lane < L::kCluster) ptx::mbarrier_arrive_in_cluster(empty, lane);
}

// Calls tail.finish(tile, sum) for every tile.
template <class L, class Tail>
__device__ __forceinline__ void consume(const CombArgs& args, typename L::Shared& shared,
                                        int consumer, Tail& tail) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int steps = (args.k + kCombStepK - 1) / kCombStepK;
  typename L::PipelineState pipeline;
  for (int unit = L::first_unit(); unit < args.all_units; unit += L::unit_step()) {
    Sums<L> sum;
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[pipeline.slot]), pipeline.phase);
      ptx::wgmma_fence();
      multiply_stage<L>(sum, shared.stage[pipeline.slot], consumer, step > 0);
      ptx::wgmma_commit();
      // The tensor core always has the next products before it is done with these.
      ptx::wgmma_wait<1>();
      if (step > 0) release<L>(shared, previous, lane);
      previous = pipeline.slot;
      pipeline.advance();
    }
    ptx::wgmma_wait<0>();
    release<L>(shared, previous, lane);
#pragma unroll
    for (int j = 0; j < L::kSubtiles; ++j) ptx::pin(sum[j]);
    tail.finish(L::tile_at(args, unit), sum);
  }
}

// ---- epilogue -----------------------------------------------------------------------------------

// A warp's results go out by themselves: 16 rows and 64 columns are a box of TMA, and wait for it
// in one of the warp's slots, each in turn.
template <class L, class Epilogue, int kScalars, class Out>
struct Tail {
  static constexpr int kScalarSlots = kScalars > 0 ? kScalars : 1;
  static_assert(sizeof(Out) == 2 && kScalars <= kMaxScalars);

  const CombArgs& args;
  uint8_t (&slots)[L::kSlots][kCombSlotBytes];
  int first_row;  // of the warp in the tile's shared memory
  int slot = 0;

  __device__ __forceinline__ Tail(const CombArgs& of, typename L::Shared& shared)
      : args(of), slots(shared.slot[threadIdx.x / 32]) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    first_row = warp / 4 * L::kSubtiles * kSubtileM + warp % 4 * kCombWarpRows;
  }

  __device__ __forceinline__ uint32_t packed(float first, float second) const {
    float scalar[kScalarSlots];
#pragma unroll
    for (int s = 0; s < kScalarSlots; ++s) scalar[s] = args.scalar[s];
    const float in[2][1] = {{first}, {second}};
    const Vec<Out, 2> pair = convert_pair<Out>(static_cast<float>(Epilogue{}(in[0], scalar)),
                                               static_cast<float>(Epilogue{}(in[1], scalar)));
    return reinterpret_cast<const uint32_t&>(pair);
  }

  // sums: of 64 columns.
  __device__ __forceinline__ void stage(const float* sums) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint8_t* row = slots[slot] + lane / 4 * kCombSpanBytes + lane % 4 * 4;
#pragma unroll
    for (int chunk = 0; chunk < 8; ++chunk) {
      uint8_t* at = row + (chunk ^ lane / 4) * 16;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* pair = sums + 4 * chunk + 2 * r;
        *reinterpret_cast<uint32_t*>(at + r * 8 * kCombSpanBytes) = packed(pair[0], pair[1]);
      }
    }
  }

  __device__ __forceinline__ void store(const typename L::Tile& tile, int row, int column) const {
    const uint32_t from = ptx::shared_address(slots[slot]);
    if constexpr (L::kAlongA) {
      const bool inside =
          column + kCombSpan <= args.n && tile.m + L::kTileM <= args.m / kCombs * kCombs;
      const Place place = place_of<L>(args.out, row / L::kCombRows, column, inside);
      ptx::tensor_store(place.map, from, place.x, tile.m / kCombs + row % L::kCombRows);
    } else {
      ptx::tensor_store(args.out.map[0], from, column, tile.m + row);
    }
  }

  __device__ __forceinline__ void finish(const typename L::Tile& tile, const Sums<L>& sum) {
    const bool is_first = threadIdx.x % 32 == 0;
#pragma unroll
    for (int j = 0; j < L::kSubtiles; ++j) {
#pragma unroll
      for (int span = 0; span < L::kSpansN; ++span) {
        const int column = tile.n + span * kCombSpan;
        if (column >= args.n) continue;
        if (is_first) ptx::bulk_wait_read<L::kSlots - 1>();
        __syncwarp();  // the slot is free
        stage(&sum[j][span * kCombSpan / 2]);
        ptx::fence_async_proxy();
        __syncwarp();
        if (is_first) {
          store(tile, first_row + j * kSubtileM, column);
          ptx::bulk_commit();
        }
        slot = slot == L::kSlots - 1 ? 0 : slot + 1;
      }
    }
  }
};

// ---- the kernel ---------------------------------------------------------------------------------

template <int kShape, int kAlongA, int kAlongB, class Epilogue, int kScalars, class Acc, class Out,
          class X>
__device__ __forceinline__ void run(const CombArgs& args) {
  static_assert(std::is_same_v<Acc, float>);
  using L = Layout<X, kShape, kAlongA != 0, kAlongB != 0>;
  // Declared aligned, so that the compiler knows the low bits of what becomes descriptors.
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<typename L::Shared*>(dynamic_shared);
  if (ptx::shared_address(dynamic_shared) % 1024 != 0) __trap();

  if (threadIdx.x == 0) {
    for (int slot = 0; slot < L::kStages; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[slot]), L::kRoles.arrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[slot]), L::kCluster * kCombWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::cluster_arrive();
  ptx::cluster_wait();

  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == kConsumers) {
    ptx::give_registers<L::kRoles.producer_registers>();
    if constexpr (L::kIs.shifts) {
      feed_shifted<L>(args, shared);
    } else {
      const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
      if (thread == 0) feed<L, true>(args, shared);
      if (thread == 32) feed<L, false>(args, shared);
    }
    __syncwarp();
  } else {
    ptx::take_registers<L::kRoles.consumer_registers>();
    Tail<L, Epilogue, kScalars, Out> tail(args, shared);
    consume<L>(args, shared, warpgroup, tail);
    // Shared memory is there until TMA has read it.
    if (threadIdx.x % 32 == 0) ptx::bulk_wait_read<0>();
    __syncwarp();
  }
  // Until then another block may arrive at this one's barriers.
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

}  // namespace fx_fuser::combs

#define FX_FUSER_LINEAR_COMBS(...)                                        \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kCombThreads, 1) \
      fx_fuser_combs(const __grid_constant__ fx_fuser::CombArgs args) {   \
    fx_fuser::combs::run<__VA_ARGS__>(args);                              \
  }
