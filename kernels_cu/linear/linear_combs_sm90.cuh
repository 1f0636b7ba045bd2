// out[m, n] = epilogue(z), z = sum over k of x[m, k] weight[n, k], for bf16 or fp16 matrices on
// sm_90a. x or out may have any pitch and may begin at any element. Loads by TMA, multiplies by
// wgmma.
//
// TMA needs pitches that are multiples of 16 bytes, and boxes that begin at one. Eight lines of any
// pitch are such a multiple. So every eighth line is a tensor of its own, a *comb*
// (linear_combs_args.h), whose lines begin `offset` elements behind an aligned vector. No elements
// are shifted: a shift by `offset` in one matrix is made up for by beginning `offset` earlier in
// the other one, along a dimension in which TMA allows any coordinate.
// - k adjacent in x, rows adjacent in the weight (a head's dgrad): a tile's rows belong to one comb
//   of x. Stages begin at x's aligned vectors, and the weight's lines, which are k, begin `offset`
//   earlier. Ahead of x's k = 0 are elements of another line; they are cleared in the first stage.
// - k adjacent in both (forward), out unaligned: a tile's rows belong to one comb of out. Its
//   columns begin at an aligned vector of out, and the weight's lines, which are columns, begin
//   `offset` earlier. Ahead of out's first column is the end of another line, so the vectors at a
//   line's ends are stored without TMA.
// - Rows adjacent in both, so that lines are k (wgrad): the product is out's transpose, with x's
//   rows as columns. All k of one comb are accumulated, then the next comb's, in descending order
//   of offset. After each comb the sums move by as many columns as the offset falls, down to 0
//   after the last: at most seven columns per tile. After that a tile's last 8 columns lack some
//   combs' k; the next tile computes them.
// Tensor maps end where the operand's lines and combs do: beyond that TMA fills in zeros and reads
// nothing.
//
// Blocks are persistent. Two producer warps feed the ring of stages, one with a and one with b; two
// consumer warpgroups multiply. The next tile's stages arrive while this one's epilogue runs. The
// blocks of a cluster have the same b: each loads a part of it and multicasts that to all.
//
//   FX_FUSER_LINEAR_COMBS(/*shape*/ 0, /*are k adjacent in x, weight*/ 1, 0, Epilogue,
//                         /*scalars*/ 1, /*Acc*/ float, /*Out*/ __half, /*x, weight*/ __half)
#pragma once

#include "common/ptx_sm90.cuh"
#include "common/wgmma_sm90.cuh"
#include "linear/linear_combs_args.h"
#include "linear/linear_combs_store.cuh"

namespace fx_fuser::combs {

constexpr int kConsumers = 2;
// Per thread, by setmaxnreg: redistributes the 168 with which 384 threads are launched.
constexpr int kConsumerRegisters = 232;
constexpr int kProducerRegisters = 40;
static_assert(kConsumerRegisters * kConsumers + kProducerRegisters <= 168 * (kConsumers + 1));
constexpr int kInstructionK = 16;
// Bytes of one span (64 elements) of a stage's k lines.
constexpr int kSpanOfK = kCombStepK * kCombSpanBytes;
static_assert(kCombThreads == (kConsumers + 1) * kWarpgroup);

// ---- shared memory and tiles --------------------------------------------------------------------

template <class X_, int kShape, bool kAlongA_, bool kAlongB_>
struct Layout {
  using X = X_;
  static constexpr CombShape kIs = kCombShapes[kShape];
  static constexpr bool kAlongA = kAlongA_;
  static constexpr bool kAlongB = kAlongB_;
  static constexpr int kTileM = kIs.tile_m();
  static constexpr int kTileN = kIs.tile_n;
  static constexpr int kStepN = kIs.step_n(kAlongA);
  static constexpr int kSubtiles = kIs.subtiles;
  static constexpr int kCluster = kIs.cluster;
  static constexpr int kStages = kIs.stages;
  static constexpr int kSlots = kIs.slots;
  static constexpr int kSpansM = kTileM / kCombSpan;
  static constexpr int kSpansN = kIs.spans_n();
  static constexpr int kSums = kTileN / 2;               // per thread and subtile
  static constexpr int kRuns = kAlongA ? 1 : kCombs;     // sequences of stages between moves
  static constexpr int kShareK = kCombStepK / kCluster;  // of b's lines that a block loads
  static constexpr int kShareRows = kTileN / kCluster;

  // Lines of 128 bytes, swizzled: the 16-byte chunk c of line r is stored at chunk c ^ (r % 8). If
  // lines are k, those of 64 rows are followed by those of the next 64.
  struct Stage {
    uint8_t a[kTileM * kCombSpanBytes];
    uint8_t b[kSpansN * kCombSpan * kCombSpanBytes];
  };
  struct Shared {
    Stage stage[kStages];
    uint8_t slot[kCombWarps][kSlots][kCombSlotBytes];
    uint64_t full[kStages];
    uint64_t empty[kStages];
  };
  static_assert(sizeof(X) == 2 && kIs16BitFloat<X>);
  static_assert(sizeof(Stage) == kIs.stage_bytes() && sizeof(Shared) == kIs.shared_bytes());
  static_assert(kShareRows % 8 == 0 && kShareK % 8 == 0 && kIs.takes(kAlongA));
  static_assert(kAlongA || !kAlongB, "if lines are k in a, they are k in b");

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

  static __device__ __forceinline__ Tile tile_at(const CombArgs& args, int unit) {
    const int columns = args.all_units / args.units;
    const int group = unit / (args.group * columns);
    const int inside = unit - group * args.group * columns;
    const int width = min(args.group, args.units - group * args.group);
    const int row = group * args.group + inside % width;
    const int comb = row / args.units_of_comb;
    return {comb, ((row - comb * args.units_of_comb) * kCluster + rank()) * kTileM,
            inside / width * kStepN};
  }

  // The comb of a tile's run.
  static __device__ __forceinline__ int comb_of(const CombArgs& args, const Tile& tile, int run) {
    return kAlongA ? tile.comb : args.order[run];
  }
  // A run's k, including those ahead of a line in its first aligned vector; or a comb's lines.
  static __device__ __forceinline__ int length(const CombArgs& args, int comb) {
    return kAlongA ? args.k + args.a.offset[comb] : lines_of(args.k, comb);
  }
  // Calls visit(tile, comb, first k of `length`) for each stage of this block.
  template <class Visit>
  static __device__ __forceinline__ void for_stages(const CombArgs& args, Visit visit) {
    for (int unit = first_unit(); unit < args.all_units; unit += unit_step()) {
      const Tile tile = tile_at(args, unit);
      for (int run = 0; run < kRuns; ++run) {
        const int comb = comb_of(args, tile, run);
        for (int k = 0; k < length(args, comb); k += kCombStepK) visit(tile, comb, k);
      }
    }
  }

  static __device__ __forceinline__ int rank() { return static_cast<int>(blockIdx.x) % kCluster; }
  static __device__ __forceinline__ int first_unit() {
    return static_cast<int>(blockIdx.x) / kCluster;
  }
  static __device__ __forceinline__ int unit_step() {
    return static_cast<int>(gridDim.x) / kCluster;
  }
};

// ---- producers ----------------------------------------------------------------------------------

// Loads a's part of one stage.
template <class L>
__device__ __forceinline__ void load_a(const CombArgs& args, uint32_t to, uint32_t full,
                                       const Tile& tile, int comb, int k) {
  const TensorMap& map = args.a.map[comb];
  if constexpr (L::kAlongA) {
    ptx::tensor_load(to, map, full, ptx::kEvictNormal, k, tile.m);
  } else {
#pragma unroll
    for (int span = 0; span < L::kSpansM; ++span) {
      ptx::tensor_load(to + span * kSpanOfK, map, full, ptx::kEvictNormal,
                       tile.m + span * kCombSpan, k);
    }
  }
}

// Loads this block's share of b's part of one stage, and multicasts it to the cluster.
template <class L>
__device__ __forceinline__ void load_b(const CombArgs& args, uint32_t to, uint32_t full,
                                       const Tile& tile, int comb, int k) {
  constexpr auto kAll = static_cast<uint16_t>((1 << L::kCluster) - 1);
  constexpr uint64_t kPolicy = ptx::kEvictNormal;
  if constexpr (L::kAlongB) {
    const int share = L::rank() * L::kShareRows;
    const int first_row = tile.n - args.out.offset[comb];
    ptx::tensor_load_multicast(to + share * kCombSpanBytes, args.b.map[0], full, kAll, kPolicy, k,
                               first_row + share);
  } else {
    const int share = L::rank() * L::kShareK;
    const TensorMap& map = args.b.map[L::kAlongA ? 0 : comb];
    const int first_k = L::kAlongA ? k - args.a.offset[comb] : k;
#pragma unroll
    for (int span = 0; span < L::kSpansN; ++span) {
      ptx::tensor_load_multicast(to + span * kSpanOfK + share * kCombSpanBytes, map, full, kAll,
                                 kPolicy, tile.n + span * kCombSpan, first_k + share);
    }
  }
}

// A producer, one thread: of a, or of b.
template <class L, bool kIsA>
__device__ __forceinline__ void feed(const CombArgs& args, typename L::Shared& shared) {
  typename L::PipelineState pipeline;
  L::for_stages(args, [&](const Tile& tile, int comb, int k) {
    auto& stage = shared.stage[pipeline.slot];
    const uint32_t full = ptx::shared_address(&shared.full[pipeline.slot]);
    // Waits until the slot is empty in all blocks of the cluster: each multicasts to the others.
    ptx::mbarrier_wait(ptx::shared_address(&shared.empty[pipeline.slot]), pipeline.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, kIsA ? sizeof(stage.a) : sizeof(stage.b));
    if constexpr (kIsA) {
      load_a<L>(args, ptx::shared_address(stage.a), full, tile, comb, k);
    } else {
      load_b<L>(args, ptx::shared_address(stage.b), full, tile, comb, k);
    }
    pipeline.advance();
  });
}

// ---- consumers ----------------------------------------------------------------------------------

template <class L>
__device__ __forceinline__ void multiply_stage(Sums<L>& sum, typename L::Stage& stage, int consumer,
                                               bool accumulate) {
  using Product = ptx::WgmmaOfMajors<typename L::X, !L::kAlongA, !L::kAlongB>;
  // In units of 16 bytes, as in descriptors.
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

// Clears the first `count` elements of each of a warpgroup's lines. They are in the first chunk.
template <class L>
__device__ __forceinline__ void clear_begin(typename L::Stage& stage, int consumer, int count) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  if (thread < L::kSubtiles * kSubtileM) {
    const int line = consumer * L::kSubtiles * kSubtileM + thread;
    auto* word = reinterpret_cast<uint32_t*>(stage.a + line * kCombSpanBytes + line % 8 * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (2 * i + 1 < count) {
        word[i] = 0;
      } else if (2 * i < count) {
        word[i] &= 0xFFFF0000;
      }
    }
  }
  ptx::fence_async_proxy();
  ptx::barrier_sync<kWarpgroup>(kFirstBarrier + consumer);
}

// In all rows, column c gets the value of column c + 1. The last column becomes meaningless.
template <class L>
__device__ __forceinline__ void move_by_one(Sums<L>& sum) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int beside = lane / 4 * 4 + (lane + 1) % 4;
  const bool is_first = lane % 4 == 0;
#pragma unroll
  for (int j = 0; j < L::kSubtiles; ++j) {
#pragma unroll
    for (int i = 0; i < L::kSums; i += 4) {
#pragma unroll
      for (int r = 0; r < 4; r += 2) {
        // Lane 3 of four needs the first of the next eight columns.
        const float next = i + 4 < L::kSums ? sum[j][i + 4 + r] : 0.0f;
        const float given = is_first ? next : sum[j][i + r];
        sum[j][i + r] = sum[j][i + r + 1];
        sum[j][i + r + 1] = __shfl_sync(0xFFFFFFFF, given, beside);
      }
    }
  }
}

// The value, which the compiler then knows to be uniform: for trip counts.
__device__ __forceinline__ int uniform(int value) {
  return static_cast<int>(ptx::uniform(static_cast<uint32_t>(value)));
}

// A consumer's warp is done with a stage: arrives in all blocks of the cluster, which write to it.
template <class L>
__device__ __forceinline__ void release(typename L::Shared& shared, int slot, int lane) {
  const uint32_t empty = ptx::shared_address(&shared.empty[slot]);
  if (lane < L::kCluster) ptx::mbarrier_arrive_in_cluster(empty, lane);
}

template <class L>
__device__ __forceinline__ void pin(Sums<L>& sum) {
#pragma unroll
  for (int j = 0; j < L::kSubtiles; ++j) ptx::pin(sum[j]);
}

// Calls tail.finish(tile, sum) for every tile.
template <class L, class Tail>
__device__ __forceinline__ void consume(const CombArgs& args, typename L::Shared& shared,
                                        int consumer, Tail& tail) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  typename L::PipelineState pipeline;
  for (int unit = L::first_unit(); unit < args.all_units; unit += L::unit_step()) {
    const Tile tile = L::tile_at(args, unit);
    Sums<L> sum;
#pragma unroll 1
    for (int run = 0; run < L::kRuns; ++run) {
      const int comb = L::comb_of(args, tile, run);
      const int steps = uniform((L::length(args, comb) + kCombStepK - 1) / kCombStepK);
      if constexpr (L::kAlongA) {
        const int before = args.a.offset[comb];
        if (before > 0) {
          ptx::mbarrier_wait(ptx::shared_address(&shared.full[pipeline.slot]), pipeline.phase);
          clear_begin<L>(shared.stage[pipeline.slot], consumer, before);
        }
      } else {
        // Fenced here, too: with a fence in the loop below only, ptxas waits for each wgmma.
        pin<L>(sum);
        ptx::wgmma_fence();
      }
      int previous = 0;
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        ptx::mbarrier_wait(ptx::shared_address(&shared.full[pipeline.slot]), pipeline.phase);
        ptx::wgmma_fence();
        multiply_stage<L>(sum, shared.stage[pipeline.slot], consumer, run > 0 || step > 0);
        ptx::wgmma_commit();
        // Keeps one group in flight, so that the tensor core never runs dry.
        ptx::wgmma_wait<1>();
        if (step > 0) release<L>(shared, previous, lane);
        previous = pipeline.slot;
        pipeline.advance();
      }
      ptx::wgmma_wait<0>();
      release<L>(shared, previous, lane);
      pin<L>(sum);
      if constexpr (!L::kAlongA) {
        const int next = run + 1 < L::kRuns ? args.b.offset[args.order[run + 1]] : 0;
        const int moves = uniform(args.b.offset[comb] - next);
#pragma unroll 1
        for (int move = 0; move < moves; ++move) move_by_one<L>(sum);
      }
    }
    tail.finish(tile, sum);
  }
}

// ---- the kernel ---------------------------------------------------------------------------------

template <int kShape, int kAlongA, int kAlongB, class Epilogue, int kScalars, class Acc, class Out,
          class X>
__device__ __forceinline__ void run(const CombArgs& args) {
  static_assert(std::is_same_v<Acc, float>);
  using L = Layout<X, kShape, kAlongA != 0, kAlongB != 0>;
  // Declared aligned, so that the compiler knows the low bits of descriptors.
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<typename L::Shared*>(dynamic_shared);
  if (ptx::shared_address(dynamic_shared) % 1024 != 0) __trap();

  if (threadIdx.x == 0) {
    for (int slot = 0; slot < L::kStages; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[slot]), 1 + 1 /*a and b*/);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[slot]), L::kCluster * kCombWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::cluster_arrive();
  ptx::cluster_wait();

  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == kConsumers) {
    ptx::give_registers<kProducerRegisters>();
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    if (thread == 0) feed<L, true>(args, shared);
    if (thread == 32) feed<L, false>(args, shared);
    __syncwarp();
  } else {
    ptx::take_registers<kConsumerRegisters>();
    TailOf<L, Epilogue, kScalars, Out> tail(args, shared);
    consume<L>(args, shared, warpgroup, tail);
    // Shared memory must stay valid until TMA has read it.
    if (threadIdx.x % 32 == 0) ptx::bulk_wait_read<0>();
    __syncwarp();
  }
  // Another block may still arrive at this one's barriers: no block exits before all are done.
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

}  // namespace fx_fuser::combs

#define FX_FUSER_LINEAR_COMBS(...)                                        \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kCombThreads, 1) \
      fx_fuser_combs(const __grid_constant__ fx_fuser::CombArgs args) {   \
    fx_fuser::combs::run<__VA_ARGS__>(args);                              \
  }
