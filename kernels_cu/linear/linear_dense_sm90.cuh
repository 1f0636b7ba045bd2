// out[m, n] = epilogue(z, operands...), z = sum over k of x[m, k] weight[n, k] + bias[n], for
// sm_90a, in bf16, fp16, or fp32 with TF32 products.
//
// - Blocks are persistent: one producer thread feeds the ring of stages by TMA, two consumer
//   warpgroups multiply by wgmma (PTX ISA 9.7.15), and the next tile's stages arrive while this
//   one's epilogue runs.
// - The tile is computed transposed, weight times xᵀ: wgmma takes 64 rows of its first operand,
//   which a weight always has, and any multiple of 8 rows of its second, so that few rows of x
//   waste little. The epilogue transposes it through shared memory, in fp32, which costs one store
//   per element and makes every global access a row of n.
// - Two blocks of a cluster have the same rows of x. Each loads half of them and multicasts it to
//   both, which cuts L2 reads by a third.
//
// The generated translation unit is that of pointwise.cuh with another macro; in[0] is z:
//
//   FX_FUSER_LINEAR_DENSE(Epilogue, /*scalars*/ 1, /*Acc*/ float, /*Out*/ __half,
//                   /*x, weight, bias, z*/ __half, /*operands*/ __half...)
#pragma once

#include <utility>

#include "common/convert.cuh"
#include "common/epilogue_math.cuh"
#include "common/packed.cuh"
#include "common/ptx_sm90.cuh"
#include "common/wgmma_sm90.cuh"
#include "linear/linear_dense_args.h"

namespace fx_fuser::dense {

constexpr int kConsumers = 2;
constexpr int kWarpgroup = 128;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kSubtileN = 64;                  // rows of the weight in one wgmma
constexpr int kExchangePitch = kSubtileN + 4;  // free of bank conflicts in the accumulators' layout
constexpr int kGroupM = 8;  // tiles of x per group: they stay in L2 while a group reads the weight
static_assert(kDenseThreads == (kConsumers + 1) * kWarpgroup);
static_assert((kConsumerRegisters * kConsumers + kProducerRegisters) * kWarpgroup <= 64 * 1024);

// ---- shared memory ------------------------------------------------------------------------------

template <int kShape>
struct Layout {
  static constexpr DenseShape kIs = kDenseShapes[kShape];
  static constexpr int kTileM = kIs.tile_m;
  static constexpr int kTileN = kIs.tile_n();
  static constexpr int kSubtiles = kIs.subtiles;
  static constexpr int kCluster = kIs.cluster;
  static constexpr int kStages = kIs.stages();
  static constexpr int kBatchM = kIs.batch_m();
  static constexpr int kSumsOfSubtile = kTileM / 2;  // per thread

  // Rows of 128 bytes, swizzled: the 16-byte chunk c of row r is stored at chunk c ^ (r % 8).
  struct Stage {
    uint8_t weight[kTileN][kDenseStepBytes];
    uint8_t x[kTileM][kDenseStepBytes];
  };
  struct Shared {
    Stage stage[kStages];
    float exchange[kConsumers][2][kBatchM][kExchangePitch];
    uint64_t full[kStages];
    uint64_t empty[kStages];
  };
  static_assert(sizeof(Stage) == kIs.stage_bytes() && sizeof(Shared) == kIs.shared_bytes());
  static_assert(kTileM / kCluster % 8 == 0, "halves of x must begin where the swizzle does");

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
    int m;  // first row of x
    int n;  // first row of the weight
  };

  // Columns of kGroupM tiles of x; in a group the weight is read once.
  static __device__ __forceinline__ Tile tile_at(const LinearDenseArgs& args, int index) {
    const int m_tiles = (args.m + kTileM - 1) / kTileM;
    const int n_tiles = args.tiles / m_tiles;
    const int group = index / (kGroupM * n_tiles);
    const int inside = index - group * kGroupM * n_tiles;
    const int width = min(kGroupM, m_tiles - group * kGroupM);
    return {(group * kGroupM + inside % width) * kTileM,
            (inside / width * kCluster + rank()) * kTileN};
  }

  static __device__ __forceinline__ int rank() { return blockIdx.x % kCluster; }
  static __device__ __forceinline__ int first_tile() { return blockIdx.x / kCluster; }
  static __device__ __forceinline__ int tile_step() { return gridDim.x / kCluster; }
};

// ---- producer -----------------------------------------------------------------------------------

template <class In, class Layout, class TileEpilogue>
__device__ __forceinline__ void feed(const LinearDenseArgs& args, typename Layout::Shared& shared) {
  constexpr int kStepK = kDenseStepBytes / sizeof(In);
  constexpr int kShareM = Layout::kTileM / Layout::kCluster;
  // Rows of the operands' tiles that are prefetched with each step.
  const int rows = Layout::kTileM / ((args.k + kStepK - 1) / kStepK) + 1;
  typename Layout::PipelineState pipeline;
  for (int index = Layout::first_tile(); index < args.tiles; index += Layout::tile_step()) {
    const auto tile = Layout::tile_at(args, index);
    int m = tile.m;
    const int end_m = min(args.m, m + Layout::kTileM);
    for (int k = 0; k < args.k; k += kStepK) {
      auto& stage = shared.stage[pipeline.slot];
      const uint32_t full = ptx::shared_address(&shared.full[pipeline.slot]);
      // Waits until the slot is empty in all blocks of the cluster: each multicasts to the others.
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[pipeline.slot]), pipeline.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, sizeof(stage));
      ptx::tensor_load(ptx::shared_address(stage.weight), args.weight_map, full, ptx::kEvictNormal,
                       k, tile.n);
      if constexpr (Layout::kCluster == 1) {
        ptx::tensor_load(ptx::shared_address(stage.x), args.x_map, full, ptx::kEvictLast, k,
                         tile.m);
      } else {
        const int share = Layout::rank() * kShareM;
        ptx::tensor_load_multicast(ptx::shared_address(stage.x[share]), args.x_map, full,
                                   (1 << Layout::kCluster) - 1, ptx::kEvictLast, k, tile.m + share);
      }
      if constexpr (TileEpilogue::kOperands > 0) {
        for (int i = 0; i < rows && m < end_m; ++i) TileEpilogue::bring_near(args, m++, tile.n);
      }
      pipeline.advance();
    }
  }
}

// ---- consumers ----------------------------------------------------------------------------------

// A consumer's warp is done with a stage: arrives in all blocks of the cluster, which write to it.
template <class Layout>
__device__ __forceinline__ void release(typename Layout::Shared& shared, int slot, int lane) {
  const uint32_t empty = ptx::shared_address(&shared.empty[slot]);
  if constexpr (Layout::kCluster == 1) {
    if (lane == 0) ptx::mbarrier_arrive(empty);
  } else {
    if (lane < Layout::kCluster) ptx::mbarrier_arrive_in_cluster(empty, lane);
  }
}

// Calls tile_epilogue.begin(index), .load_first() and tile_epilogue(sum) for every tile, sum[j][4i
// + 2r + t] being that of
//   weight row 64 (kSubtiles consumer + j) + 16 warp + lane / 4 + 8r and x row 8i + 2 (lane % 4) +
//   t
struct Loop {
  template <class In, class Layout, class TileEpilogue>
  static __device__ __forceinline__ void consume(const LinearDenseArgs& args,
                                                 typename Layout::Shared& shared, int consumer,
                                                 TileEpilogue& tile_epilogue);
};

template <class In, class Layout, class TileEpilogue>
__device__ __forceinline__ void Loop::consume(const LinearDenseArgs& args,
                                              typename Layout::Shared& shared, int consumer,
                                              TileEpilogue& tile_epilogue) {
  constexpr int kStepK = kDenseStepBytes / sizeof(In);
  constexpr int kInstructions = kDenseStepBytes / 32;
  constexpr int kUnrolled = 4 / Layout::kSubtiles;                // steps of k
  constexpr int kSubtileStep = kSubtileN * kDenseStepBytes / 16;  // in units of descriptors
  const int lane = threadIdx.x % 32;
  const int k_tiles = (args.k + kStepK - 1) / kStepK;

  typename Layout::PipelineState pipeline;
  for (int index = Layout::first_tile(); index < args.tiles; index += Layout::tile_step()) {
    float sum[Layout::kSubtiles][Layout::kSumsOfSubtile];
    tile_epilogue.begin(index);
    int previous = 0;
    // nvcc's own choice; NVRTC would unroll half as far.
#pragma unroll kUnrolled
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      auto& stage = shared.stage[pipeline.slot];
      const uint64_t weight = ptx::matrix_descriptor(ptx::uniform(
          ptx::shared_address(stage.weight[consumer * Layout::kSubtiles * kSubtileN])));
      const uint64_t x = ptx::matrix_descriptor(ptx::uniform(ptx::shared_address(stage.x)));
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[pipeline.slot]), pipeline.phase);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kInstructions; ++i) {
#pragma unroll
        for (int j = 0; j < Layout::kSubtiles; ++j) {
          ptx::Wgmma<In>::run(sum[j], weight + 2 * i + j * kSubtileStep, x + 2 * i,
                              k_tile > 0 || i > 0);
        }
      }
      ptx::wgmma_commit();
      // Keeps one group in flight, so that the tensor core never runs dry.
      ptx::wgmma_wait<1>();
      if (k_tile > 0) release<Layout>(shared, previous, lane);
      previous = pipeline.slot;
      pipeline.advance();
    }
    tile_epilogue.load_first();
    ptx::wgmma_wait<0>();
    release<Layout>(shared, previous, lane);
#pragma unroll
    for (int j = 0; j < Layout::kSubtiles; ++j) ptx::pin(sum[j]);
    tile_epilogue(sum);
  }
}

// ---- epilogue -----------------------------------------------------------------------------------

template <class Layout, class Epilogue, int kScalars, class Out, class In, class Operands,
          class... Operand>
struct TileEpilogue;

template <class Layout, class Epilogue, int kScalars, class Out, class In, size_t... kOperand,
          class... Operand>
struct TileEpilogue<Layout, Epilogue, kScalars, Out, In, std::index_sequence<kOperand...>,
                    Operand...> {
  static constexpr int kOperands = sizeof...(Operand);
  static constexpr int kScalarSlots = kScalars > 0 ? kScalars : 1;
  static constexpr int kElementBytes = (1 + ... + int{sizeof(Operand)});
  // Register bytes for two groups of the operands' vectors, in use and prefetched, in addition to
  // the sums.
  static constexpr int kRawBytes = 4 * 40;
  static constexpr bool fits(int elements) { return 2 * elements * kElementBytes <= kRawBytes; }
  static constexpr int narrowed(int width) {
    return width > 1 && !fits(width) ? narrowed(width / 2) : width;
  }
  static constexpr int kWidth = narrowed(vector_width(sizeof(Out), sizeof(In)));
  static constexpr int kThreadsOfRow = kSubtileN / kWidth;
  static constexpr int kRowsAtOnce = kWarpgroup / kThreadsOfRow;
  static constexpr int kVectors = Layout::kBatchM / kRowsAtOnce;  // per thread and batch
  static constexpr int grouped(int vectors) {
    return vectors > 1 && !fits(vectors * kWidth) ? grouped(vectors / 2) : vectors;
  }
  static constexpr int kGroup = grouped(kVectors);
  static constexpr int kGroups = kVectors / kGroup;  // per batch
  static constexpr int kBatches = Layout::kTileM / Layout::kBatchM;
  static constexpr int kAllBatches = Layout::kSubtiles * kBatches;
  static constexpr int kSumsOfBatch = Layout::kBatchM / 2;  // per thread
  static_assert(kOperands <= kMaxInputs && kScalars <= kMaxScalars);
  static_assert(Layout::kBatchM % kRowsAtOnce == 0 && kVectors % kGroup == 0);

  using Raw = PackedVectors<std::index_sequence<kOperand...>, kWidth, Operand...>;

  const LinearDenseArgs& args;
  float (&exchange)[2][Layout::kBatchM][kExchangePitch];  // this consumer's
  int consumer;
  int next_buffer = 0;  // alternates, across tiles too, so one barrier per batch is enough
  int first_m = 0;      // of the tile
  int first_n = 0;      // of this thread's vectors in the first subtile
  Vec<In, kWidth> bias[Layout::kSubtiles] = {};
  Raw raw[kGroup];  // of the next group

  static __device__ __forceinline__ int row() { return threadIdx.x % kWarpgroup / kThreadsOfRow; }
  static __device__ __forceinline__ int column() { return threadIdx.x % kThreadsOfRow * kWidth; }

  // The producer prefetches a row of the block's tile of each operand to L2: loads from DRAM would
  // arrive too late.
  static __device__ __forceinline__ void bring_near(const LinearDenseArgs& args, int m, int n) {
    const auto one = [&](int operand, int element_bytes) {
      const Strided<2>& from = args.operand[operand];
      if (args.mode[operand] != Mode::kVector || from.stride[0] == 0) return;
      const int bytes = min(Layout::kTileN, args.n - n) * element_bytes / 16 * 16;
      if (bytes <= 0) return;
      ptx::prefetch(
          static_cast<const uint8_t*>(from.data) + (m * from.stride[0] + n) * element_bytes, bytes);
    };
    (one(kOperand, sizeof(Operand)), ...);
  }

  template <int kOne, class T>
  __device__ __forceinline__ void load_one(Packed<T, kWidth>& vector, int m, int n,
                                           bool whole) const {
    const Strided<2>& operand = args.operand[kOne];
    const T* from =
        static_cast<const T*>(operand.data) + m * operand.stride[0] + n * operand.stride[1];
    if (whole && args.mode[kOne] == Mode::kVector) {
      vector = *reinterpret_cast<const Packed<T, kWidth>*>(from);
    } else if (args.mode[kOne] == Mode::kSplat) {
      const T value = *from;
      vector.assign([&](int) { return value; });
    } else {
      vector.assign([&](int e) { return n + e < args.n ? from[e * operand.stride[1]] : T{}; });
    }
  }

  // Loads the operands of a batch's group of vectors.
  __device__ __forceinline__ void load(int batch, int group) {
    const int n = first_n + batch / kBatches * kSubtileN;
    const int m =
        first_m + batch % kBatches * Layout::kBatchM + row() + group * kGroup * kRowsAtOnce;
#pragma unroll
    for (int v = 0; v < kGroup; ++v) {
      if (m + v * kRowsAtOnce < args.m && n < args.n) {
        (load_one<static_cast<int>(kOperand)>(vector_of<static_cast<int>(kOperand)>(raw[v]),
                                              m + v * kRowsAtOnce, n, n + kWidth <= args.n),
         ...);
      }
    }
  }

  template <class T>
  __device__ __forceinline__ void store(void* to, int64_t offset, const Vec<T, kWidth>& value,
                                        int n, bool aligned) const {
    T* first = static_cast<T*>(to) + offset;
    if (aligned) {
      *reinterpret_cast<Vec<T, kWidth>*>(first) = value;
      return;
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      if (n + e < args.n) first[e] = value.element[e];
    }
  }

  __device__ __forceinline__ void compute_and_store(const float* sums,
                                                    const Vec<In, kWidth>& biases, Raw& operands,
                                                    int m, int n) const {
    float scalar[kScalarSlots];
#pragma unroll
    for (int s = 0; s < kScalarSlots; ++s) scalar[s] = args.scalar[s];
    const auto sum = *reinterpret_cast<const Vec<float, kWidth>*>(sums);
    Vec<Out, kWidth> result;
    Vec<In, kWidth> z;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float in[1 + kOperands] = {sum.element[e] + convert<float>(biases.element[e]),
                                       convert<float>(vector_of<kOperand>(operands)[e])...};
      z.element[e] = convert<In>(in[0]);
      result.element[e] = convert<Out>(static_cast<float>(Epilogue{}(in, scalar)));
    }
    const bool whole = n + kWidth <= args.n;
    if (args.z != nullptr) store(args.z, m * args.z_stride + n, z, n, whole && args.z_is_aligned);
    store(args.out, m * args.out_stride + n, result, n, whole && args.out_is_aligned);
  }

  // At the tile's beginning: the bias loads are hidden by the main loop.
  __device__ __forceinline__ void begin(int index) {
    const auto tile = Layout::tile_at(args, index);
    first_m = tile.m;
    first_n = tile.n + consumer * Layout::kSubtiles * kSubtileN + column();
    if (args.bias == nullptr) return;
#pragma unroll
    for (int j = 0; j < Layout::kSubtiles; ++j) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const int n = first_n + j * kSubtileN + e;
        if (n < args.n) bias[j].element[e] = static_cast<const In*>(args.bias)[n];
      }
    }
  }

  __device__ __forceinline__ void load_first() { load(0, 0); }

  // Batch by batch through shared memory, so that neighbouring threads have neighbouring elements
  // along n.
  __device__ __forceinline__ void operator()(
      const float (&sum)[Layout::kSubtiles][Layout::kSumsOfSubtile]) {
    const int warp = threadIdx.x % kWarpgroup / 32;
    const int lane = threadIdx.x % 32;
    // Batches of this tile with rows of x.
    const int batches = min(kBatches, (args.m - first_m + Layout::kBatchM - 1) / Layout::kBatchM);
    // Not unrolled: the code would not fit in the instruction cache.
#pragma unroll 1
    for (int batch = 0, following; batch < kAllBatches; batch = following) {
      following = batch + 1;
      if (following % kBatches >= batches) following = (batch / kBatches + 1) * kBatches;
      auto& buffer = exchange[next_buffer];
      next_buffer ^= 1;
#pragma unroll
      for (int one = 0; one < kAllBatches; ++one) {
        if (one != batch) continue;
#pragma unroll
        for (int i = 0; i < kSumsOfBatch; ++i) {
          buffer[i / 4 * 8 + lane % 4 * 2 + i % 2][warp * 16 + lane / 4 + i / 2 % 2 * 8] =
              sum[one / kBatches][one % kBatches * kSumsOfBatch + i];
        }
      }
      ptx::barrier_sync<kWarpgroup>(1 + consumer);
      const int n = first_n + batch / kBatches * kSubtileN;
      Vec<In, kWidth> biases = bias[0];
#pragma unroll
      for (int j = 1; j < Layout::kSubtiles; ++j) {
        if (j == batch / kBatches) biases = bias[j];
      }
#pragma unroll 1
      for (int group = 0; group < kGroups; ++group) {
        Raw now[kGroup];
#pragma unroll
        for (int v = 0; v < kGroup; ++v) now[v] = raw[v];
        if (group + 1 < kGroups) {
          load(batch, group + 1);
        } else if (following < kAllBatches) {
          load(following, 0);
        }
#pragma unroll
        for (int v = 0; v < kGroup; ++v) {
          const int batch_row = row() + (group * kGroup + v) * kRowsAtOnce;
          const int m = first_m + batch % kBatches * Layout::kBatchM + batch_row;
          if (m < args.m && n < args.n) {
            compute_and_store(&buffer[batch_row][column()], biases, now[v], m, n);
          }
        }
      }
    }
  }
};

// ---- the kernel ---------------------------------------------------------------------------------

template <int kShape, class Loop, class Epilogue, int kScalars, class Acc, class Out, class In,
          class... Operand>
__device__ __forceinline__ void run(const LinearDenseArgs& args) {
  static_assert(std::is_same_v<Acc, float>);
  using Layout = dense::Layout<kShape>;
  using TileEpilogue = dense::TileEpilogue<Layout, Epilogue, kScalars, Out, In,
                                           std::index_sequence_for<Operand...>, Operand...>;
  // Declared aligned, so that the compiler knows the low bits of what becomes descriptors.
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<typename Layout::Shared*>(dynamic_shared);
  if (ptx::shared_address(dynamic_shared) % 1024 != 0) __trap();

  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Layout::kStages; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[slot]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[slot]),
                         Layout::kCluster * kConsumers * kWarpgroup / 32);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (Layout::kCluster > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }

  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == kConsumers) {
    ptx::give_registers<kProducerRegisters>();
    if (threadIdx.x % kWarpgroup == 0) feed<In, Layout, TileEpilogue>(args, shared);
    __syncwarp();
  } else {
    ptx::take_registers<kConsumerRegisters>();
    TileEpilogue tile_epilogue{args, shared.exchange[warpgroup], warpgroup};
    Loop::template consume<In, Layout>(args, shared, warpgroup, tile_epilogue);
  }
  if constexpr (Layout::kCluster > 1) {
    // Another block may still arrive at this one's barriers: no block exits before all are done.
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

}  // namespace fx_fuser::dense

// FX_FUSER_LINEAR_KERNEL(shape, Loop, Epilogue, scalars, Acc, Out, In, Operands...)
#define FX_FUSER_LINEAR_KERNEL(shape, ...)                                              \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kDenseThreads, 1)              \
      fx_fuser_linear_##shape(const __grid_constant__ fx_fuser::LinearDenseArgs args) { \
    fx_fuser::dense::run<shape, __VA_ARGS__>(args);                                     \
  }

// FX_FUSER_LINEAR_DENSE(Epilogue, scalars, Acc, Out, In, Operands...)
#define FX_FUSER_LINEAR_DENSE(...)                              \
  FX_FUSER_LINEAR_KERNEL(0, fx_fuser::dense::Loop, __VA_ARGS__) \
  FX_FUSER_LINEAR_KERNEL(1, fx_fuser::dense::Loop, __VA_ARGS__) \
  FX_FUSER_LINEAR_KERNEL(2, fx_fuser::dense::Loop, __VA_ARGS__) \
  FX_FUSER_LINEAR_KERNEL(3, fx_fuser::dense::Loop, __VA_ARGS__) \
  FX_FUSER_LINEAR_KERNEL(4, fx_fuser::dense::Loop, __VA_ARGS__)
