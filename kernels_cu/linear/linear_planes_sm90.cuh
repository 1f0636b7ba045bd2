// out[m, n] = epilogue(z, operands...), z = x weightᵀ + bias in fp32, from planes of x and weight
// in fp16 (linear_planes.cuh), for sm_90a. As exact as one product in TF32.
//
// It is the dense kernel (linear_dense_sm90.cuh) with another loop. Planes lie as their matrices
// do: k are adjacent, or rows. wgmma takes both, of 16 bits. Where rows are adjacent, lines of
// shared memory are k: 64 of 64 rows each, then those of the next 64 rows. The sums lose both
// scales in registers, ahead of the dense kernel's epilogue.
//
// Where tiles are few, as of a small weight's gradient, k is divided: one kernel stores the sums of
// each chunk as its threads have them, a second one adds them up, always in the same order, and has
// the epilogue.
//
// Values below 2^-29 of a plane's largest lose bits. Where there are any in either plane, each
// thread looks at its sums: those that such values may be a part of that shows are small
// (linear/NOTES.md). A kernel behind computes them again in plain fp32 (linear_planes_repair.cuh).
//
//   FX_FUSER_LINEAR_PLANES(/*are k adjacent in x, weight*/ 1, 0, Epilogue, /*scalars*/ 1,
//                          /*Acc*/ float, /*Out*/ float, /*bias, z*/ float, /*operands*/ float...)
#pragma once

#include "linear/linear_dense_sm90.cuh"
#include "linear/linear_planes.cuh"
#include "linear/linear_planes_repair.cuh"

namespace fx_fuser::dense {

// Tiles, or tiles of chunks of k: what a block computes one after the other.
template <bool kChunks>
struct PlanesUnits {
  int tile;
  int first_k;
  int end_k;

  static __device__ __forceinline__ int count(const LinearPlanesArgs& args) {
    return kChunks ? args.tiles * args.chunks : args.tiles;
  }
  static __device__ __forceinline__ PlanesUnits at(const LinearPlanesArgs& args, int unit) {
    if constexpr (!kChunks) return {unit, 0, args.k};
    const int chunk = unit / args.tiles;
    return {unit - chunk * args.tiles, chunk * args.chunk_k,
            min(args.k, (chunk + 1) * args.chunk_k)};
  }
};

// Of a thread: so many vectors of partial sums, kWarpgroup * kConsumers vectors apart.
template <class Layout>
struct PartialSums {
  static constexpr int kVectors = Layout::kSubtiles * Layout::kSumsOfSubtile / 4;
  static constexpr int kStep = kWarpgroup * kConsumers;

  static __device__ __forceinline__ float4* of(const LinearPlanesArgs& args, int64_t unit) {
    const int64_t block = unit * Layout::kCluster + Layout::rank();
    return reinterpret_cast<float4*>(args.partial) + block * (kVectors * kStep) + threadIdx.x;
  }
};

// In place of an epilogue, for a chunk's sums.
template <class Layout>
struct StoreChunk {
  static constexpr int kOperands = 0;

  const LinearPlanesArgs& args;
  int unit = 0;

  template <class Exchange>
  __device__ __forceinline__ StoreChunk(const LinearDenseArgs& given, const Exchange& /*exchange*/,
                                        int /*consumer*/)
      : args(static_cast<const LinearPlanesArgs&>(given)) {}
  __device__ __forceinline__ void begin(int index) { unit = index; }
  __device__ __forceinline__ void load_first() {}
  __device__ __forceinline__ void operator()(
      const float (&sum)[Layout::kSubtiles][Layout::kSumsOfSubtile]) {
    float4* to = PartialSums<Layout>::of(args, unit);
#pragma unroll
    for (int j = 0; j < Layout::kSubtiles; ++j) {
#pragma unroll
      for (int i = 0; i < Layout::kSumsOfSubtile; i += 4) {
        to[(j * Layout::kSumsOfSubtile + i) / 4 * PartialSums<Layout>::kStep] =
            make_float4(sum[j][i], sum[j][i + 1], sum[j][i + 2], sum[j][i + 3]);
      }
    }
  }
};

// From a tile's scaled sums to z less its bias.
template <class Layout>
struct Settle {
  const LinearPlanesArgs& args;
  bool has_doubts;
  PowerOfTwo unscale;

  explicit __device__ __forceinline__ Settle(const LinearPlanesArgs& args)
      : args(args), has_doubts(has_lost(args)), unscale(unscale_of(args)) {}

  __device__ __forceinline__ void operator()(
      int index, float (&sum)[Layout::kSubtiles][Layout::kSumsOfSubtile]) const {
    if (has_doubts) note_doubts<Layout>(args, index, sum);
#pragma unroll
    for (int j = 0; j < Layout::kSubtiles; ++j) {
#pragma unroll
      for (float& one : sum[j]) one = unscale.times(one);
    }
  }

 private:
  static __device__ __forceinline__ PowerOfTwo unscale_of(const LinearPlanesArgs& args) {
    constexpr int kLeastExponent = -252;  // with less, no sum is as large as a float
    const int exponent = args.x_facts->exponent + args.weight_facts->exponent;
    return PowerOfTwo::of(max(-exponent, kLeastExponent));
  }
};

template <bool kAlongX, bool kAlongWeight, bool kChunks = false>
struct PlanesLoop {
  static constexpr int kSpanBytes = kPlaneSpan * kDenseStepBytes;
  static_assert(kDenseStepBytes == kPlaneSpan * sizeof(__half));

  template <class In, class Layout, class TileEpilogue>
  static __device__ __forceinline__ void feed(const LinearDenseArgs& args,
                                              typename Layout::Shared& shared);
  template <class In, class Layout, class TileEpilogue>
  static __device__ __forceinline__ void consume(const LinearDenseArgs& args,
                                                 typename Layout::Shared& shared, int consumer,
                                                 TileEpilogue& tile_epilogue);

 private:
  template <class Layout>
  static __device__ __forceinline__ void load_weight(const LinearDenseArgs& args, uint32_t to,
                                                     uint32_t full, int n, int k) {
    if constexpr (kAlongWeight) {
      ptx::tensor_load(to, args.weight_map, full, ptx::kEvictNormal, k, n);
    } else {
#pragma unroll
      for (int span = 0; span < Layout::kTileN / kPlaneSpan; ++span) {
        ptx::tensor_load(to + span * kSpanBytes, args.weight_map, full, ptx::kEvictNormal,
                         n + span * kPlaneSpan, k);
      }
    }
  }

  // This block's share of a cluster's rows of x, to all of its blocks.
  template <class Layout>
  static __device__ __forceinline__ void load_x(const LinearDenseArgs& args, uint32_t to,
                                                uint32_t full, int m, int k) {
    constexpr int kShareM = Layout::kTileM / Layout::kCluster;
    constexpr auto kAll = static_cast<uint16_t>((1 << Layout::kCluster) - 1);
    const int first = Layout::rank() * kShareM;
    const uint32_t share = to + first * kDenseStepBytes;  // of either order
    if constexpr (kAlongX) {
      ptx::tensor_load_multicast(share, args.x_map, full, kAll, ptx::kEvictLast, k, m + first);
    } else {
      static_assert(kShareM % kPlaneSpan == 0);
#pragma unroll
      for (int span = 0; span < kShareM / kPlaneSpan; ++span) {
        ptx::tensor_load_multicast(share + span * kSpanBytes, args.x_map, full, kAll,
                                   ptx::kEvictLast, m + first + span * kPlaneSpan, k);
      }
    }
  }

  static __device__ __forceinline__ uint64_t descriptor(const void* at, bool along) {
    const uint32_t address = ptx::uniform(ptx::shared_address(at));
    return along ? ptx::matrix_descriptor(address)
                 : ptx::transposed_descriptor(address, kSpanBytes);
  }
};

template <bool kAlongX, bool kAlongWeight, bool kChunks>
template <class In, class Layout, class TileEpilogue>
__device__ __forceinline__ void PlanesLoop<kAlongX, kAlongWeight, kChunks>::feed(
    const LinearDenseArgs& given, typename Layout::Shared& shared) {
  using Units = PlanesUnits<kChunks>;
  const auto& args = static_cast<const LinearPlanesArgs&>(given);
  // Rows of the operands' tiles that are brought near with each step.
  const int rows = Layout::kTileM / ((args.k + kPlaneSpan - 1) / kPlaneSpan) + 1;
  typename Layout::PipelineState pipeline;
  for (int index = Layout::first_tile(); index < Units::count(args); index += Layout::tile_step()) {
    const Units unit = Units::at(args, index);
    const auto tile = Layout::tile_at(args, unit.tile);
    int m = tile.m;
    const int end_m = min(args.m, m + Layout::kTileM);
    for (int k = unit.first_k; k < unit.end_k; k += kPlaneSpan) {
      auto& stage = shared.stage[pipeline.slot];
      const uint32_t full = ptx::shared_address(&shared.full[pipeline.slot]);
      // Empty in all blocks of the cluster: each sends to the others.
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[pipeline.slot]), pipeline.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, sizeof(stage));
      load_weight<Layout>(args, ptx::shared_address(stage.weight), full, tile.n, k);
      load_x<Layout>(args, ptx::shared_address(stage.x), full, tile.m, k);
      if constexpr (TileEpilogue::kOperands > 0) {
        for (int i = 0; i < rows && m < end_m; ++i) TileEpilogue::bring_near(args, m++, tile.n);
      }
      pipeline.advance();
    }
  }
}

template <bool kAlongX, bool kAlongWeight, bool kChunks>
template <class In, class Layout, class TileEpilogue>
__device__ __forceinline__ void PlanesLoop<kAlongX, kAlongWeight, kChunks>::consume(
    const LinearDenseArgs& given, typename Layout::Shared& shared, int consumer,
    TileEpilogue& tile_epilogue) {
  using Product = ptx::WgmmaOfMajors<__half, !kAlongWeight, !kAlongX>;
  constexpr int kInstructionK = 16;
  constexpr int kUnrolled = 4 / Layout::kSubtiles;  // steps of k
  // In the unit of descriptors, 16 bytes.
  constexpr int kSubtileStep = kSubtileN * kDenseStepBytes / 16;  // 64 rows, or the k of 64 rows
  constexpr int kAlongStep = kInstructionK * 2 / 16;
  constexpr int kLinesStep = kInstructionK * kDenseStepBytes / 16;
  using Units = PlanesUnits<kChunks>;
  const auto& args = static_cast<const LinearPlanesArgs&>(given);
  const int lane = threadIdx.x % 32;
  const Settle<Layout> settle(args);

  typename Layout::PipelineState pipeline;
  for (int index = Layout::first_tile(); index < Units::count(args); index += Layout::tile_step()) {
    const Units unit = Units::at(args, index);
    const int k_tiles = (unit.end_k - unit.first_k + kPlaneSpan - 1) / kPlaneSpan;
    float sum[Layout::kSubtiles][Layout::kSumsOfSubtile];
    tile_epilogue.begin(index);
    int previous = 0;
    // As nvcc does by itself; NVRTC would make half as many.
#pragma unroll kUnrolled
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      auto& stage = shared.stage[pipeline.slot];
      const uint64_t weight =
          descriptor(stage.weight, kAlongWeight) + consumer * Layout::kSubtiles * kSubtileStep;
      const uint64_t x = descriptor(stage.x, kAlongX);
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[pipeline.slot]), pipeline.phase);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kPlaneSpan / kInstructionK; ++i) {
#pragma unroll
        for (int j = 0; j < Layout::kSubtiles; ++j) {
          Product::run(sum[j],
                       weight + i * (kAlongWeight ? kAlongStep : kLinesStep) + j * kSubtileStep,
                       x + i * (kAlongX ? kAlongStep : kLinesStep), k_tile > 0 || i > 0);
        }
      }
      ptx::wgmma_commit();
      // The tensor core always has the next products before it is done with these.
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
    if constexpr (!kChunks) settle(index, sum);
    tile_epilogue(sum);
  }
}

// Adds up what chunks of k are; nothing is fed.
struct SumOfChunks {
  template <class In, class Layout, class TileEpilogue>
  static __device__ __forceinline__ void feed(const LinearDenseArgs& /*args*/,
                                              typename Layout::Shared& /*shared*/) {}

  template <class In, class Layout, class TileEpilogue>
  static __device__ __forceinline__ void consume(const LinearDenseArgs& given,
                                                 typename Layout::Shared& /*shared*/,
                                                 int /*consumer*/, TileEpilogue& tile_epilogue) {
    const auto& args = static_cast<const LinearPlanesArgs&>(given);
    const Settle<Layout> settle(args);
    for (int index = Layout::first_tile(); index < args.tiles; index += Layout::tile_step()) {
      float sum[Layout::kSubtiles][Layout::kSumsOfSubtile];
      tile_epilogue.begin(index);
#pragma unroll
      for (int j = 0; j < Layout::kSubtiles; ++j) {
#pragma unroll
        for (float& one : sum[j]) one = 0;
      }
#pragma unroll 1
      for (int chunk = 0; chunk < args.chunks; ++chunk) {
        const float4* from = PartialSums<Layout>::of(args, int64_t{chunk} * args.tiles + index);
#pragma unroll
        for (int j = 0; j < Layout::kSubtiles; ++j) {
#pragma unroll
          for (int i = 0; i < Layout::kSumsOfSubtile; i += 4) {
            const float4 part =
                from[(j * Layout::kSumsOfSubtile + i) / 4 * PartialSums<Layout>::kStep];
            sum[j][i] += part.x;
            sum[j][i + 1] += part.y;
            sum[j][i + 2] += part.z;
            sum[j][i + 3] += part.w;
          }
        }
      }
      tile_epilogue.load_first();
      settle(index, sum);
      tile_epilogue(sum);
    }
  }
};

template <bool kAlongX, bool kAlongWeight>
__device__ __forceinline__ void run_chunk(const LinearPlanesArgs& args) {
  using Layout = dense::Layout<kChunksShape>;
  run_loop<Layout, PlanesLoop<kAlongX, kAlongWeight, true>, StoreChunk<Layout>, float>(args);
}

}  // namespace fx_fuser::dense

#define FX_FUSER_LINEAR_PLANES_KERNEL(name, shape, ...)                                 \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kDenseThreads, 1)              \
      fx_fuser_linear_##name(const __grid_constant__ fx_fuser::LinearPlanesArgs args) { \
    fx_fuser::dense::run<shape, __VA_ARGS__>(args);                                     \
  }
#define FX_FUSER_PLANES_LOOP(...) fx_fuser::dense::PlanesLoop<__VA_ARGS__>

#define FX_FUSER_PLANES_REPAIR(shape, ...)                               \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kRepairThreads) \
      fx_fuser_linear_planes_repair_##shape(                             \
          const __grid_constant__ fx_fuser::LinearPlanesArgs args) {     \
    fx_fuser::dense::repair<shape, __VA_ARGS__>(args);                   \
  }

// FX_FUSER_LINEAR_PLANES(along x, along weight, Epilogue, scalars, Acc, Out, In, Operands...)
#define FX_FUSER_LINEAR_PLANES(along_x, along_weight, ...)                                    \
  FX_FUSER_LINEAR_PLANES_KERNEL(                                                              \
      planes_2, 2, FX_FUSER_PLANES_LOOP(along_x != 0, along_weight != 0), __VA_ARGS__)        \
  FX_FUSER_LINEAR_PLANES_KERNEL(                                                              \
      planes_3, 3, FX_FUSER_PLANES_LOOP(along_x != 0, along_weight != 0), __VA_ARGS__)        \
  FX_FUSER_LINEAR_PLANES_KERNEL(                                                              \
      planes_4, 4, FX_FUSER_PLANES_LOOP(along_x != 0, along_weight != 0), __VA_ARGS__)        \
  FX_FUSER_LINEAR_PLANES_KERNEL(planes_sum, 4, fx_fuser::dense::SumOfChunks, __VA_ARGS__)     \
  FX_FUSER_PLANES_REPAIR(2, __VA_ARGS__)                                                      \
  FX_FUSER_PLANES_REPAIR(3, __VA_ARGS__)                                                      \
  FX_FUSER_PLANES_REPAIR(4, __VA_ARGS__)                                                      \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kDenseThreads, 1)                    \
      fx_fuser_linear_planes_chunk(const __grid_constant__ fx_fuser::LinearPlanesArgs args) { \
    fx_fuser::dense::run_chunk<along_x != 0, along_weight != 0>(args);                        \
  }

// Of every epilogue.
#define FX_FUSER_LINEAR_PLANES_COMMON(X) FX_FUSER_PLANES(X)
