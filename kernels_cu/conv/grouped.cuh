// out = epilogue(conv2d(x, weight, stride, padding, dilation, groups), operands, scalars) in
// channels_last, bf16 and fp16, by `mma.sync`, for sm_80 and later. Meant for groups of few
// channels, where it is bandwidth-bound.
//
// grouped_args.h defines units, slices, tiles and jobs. A block keeps its slice's weights in shared
// memory and walks over the pixels. It copies a tile's patch of x once, by `cp.async`, while the
// tile before is computed, and reads it once for each tap: `ldmatrix` takes the address of each
// pixel, so a tap is an offset, and two taps of 8 channels are one product. A warp's sums go
// through a stage of its own, so that a lane has four neighbouring channels of a pixel, and the
// same channels of all of its pixels.
//
//   FX_FUSER_GROUPED(/*tiles*/ 3, /*is_mixed*/ 0, /*leaves*/ 4, Epilogue, /*scalars*/ 1,
//                    /*Acc*/ float, /*Out*/ __half, /*x, weight, c*/ __half,
//                    /*operands*/ float...)
//
// Layers below this file: grouped_store.cuh, grouped_load.cuh.
#pragma once

#include "conv/grouped_store.cuh"

namespace fx_fuser::grouped {

// A job's products. pixels: where the first unit's patch begins. weights: the job's first row.
template <class S>
__device__ __forceinline__ void multiply(const GroupedArgs& args, const uint8_t* storage,
                                         uint32_t pixels, uint32_t weights, int batch,
                                         Sums<S>& sum) {
  using X = typename S::X;
  constexpr int kPairs = (S::kJobTiles + 1) / 2;
  const auto lane = static_cast<int>(ptx::thread_index() % 32);
  // ldmatrix addresses. Pixels: eight and the next eight, then both for the second vector of k.
  // Weights: both vectors of k for eight rows, then for the next eight.
  const auto* first_tap = reinterpret_cast<const int32_t*>(storage + args.first_taps_at);
  uint32_t pixel[kGroupedRows];
#pragma unroll
  for (int m = 0; m < kGroupedRows; ++m) {
    pixel[m] = pixels + first_tap[(batch * kGroupedRows + m) * kGroupedRow + lane % 16];
  }
  const auto* tap = reinterpret_cast<const int32_t*>(storage + args.taps_at) + lane / 16;
  uint32_t row[2];  // of the last pair, whose second half may be no tile
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool is_whole = i == 0 || S::kJobTiles % 2 == 0;
    const int inside = lane % 8 + (is_whole ? lane / 16 * 8 : 0);
    row[i] = weights + inside * args.weight_pitch + lane / 8 % 2 * 16;
  }
  const int unit_bytes = args.unit_vectors * 16;
  int32_t next = *tap;

  const auto step = [&](auto products) {
    const int32_t from = next;
    tap += 2;
    next = *tap;  // behind the last one is what no product reads
    uint32_t weight[kPairs][4];
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      ptx::load_matrices(weight[p], row[p == kPairs - 1] + p * 16 * args.weight_pitch);
    }
#pragma unroll
    for (int u = 0; u < S::kUnits; ++u) {
#pragma unroll
      for (int m = 0; m < kGroupedRows; ++m) {
        uint32_t vector[4];
        ptx::load_matrices(vector, pixel[m] + from + u * unit_bytes);
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t) {
          const int tile = u * S::kTiles + t;
          products(sum[m][tile], vector, weight[tile / 2][tile % 2 * 2],
                   weight[tile / 2][tile % 2 * 2 + 1]);
        }
      }
    }
    row[0] += 32;
    row[1] += 32;
  };
  const auto whole = [](float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16<X>(d, a, b0, b1);
  };
  int left = args.k_vectors / 2;
#pragma unroll 1
  for (; left > 1; left -= 2) {
    step(whole);
    step(whole);
  }
  if (left > 0) step(whole);
  if (args.k_vectors % 2 != 0) {
    step([](float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t) {
      ptx::mma_m16n8k8<X>(d, a[0], a[1], b0);
    });
  }
}

constexpr int kAtOnce = 4;  // copies

template <class S, class TailOf>
__device__ __forceinline__ void convolve(const GroupedArgs& args) {
  extern __shared__ __align__(128) uint8_t storage[];
  const uint32_t shared = ptx::shared_address(storage);
  const TailOf tail{args, storage};
  const int warp = static_cast<int>(ptx::thread_index()) / 32;
  int tile = static_cast<int>(divide(blockIdx.x, args.slices));
  uint32_t patch = shared + args.patch_at;
  uint32_t other = args.buffers == 2 ? patch + args.patch_bytes : patch;
  keep_sources(args, storage);
  keep_places(args, args.out_stride, storage);
  keep_taps(args, storage);
  keep_channels<S>(args, storage);
  __syncthreads();
  feed<kAtOnce>(args, storage, tile, patch);
  keep_weights<S>(args, storage);
  tail.stage();

  const int jobs = args.batches * static_cast<int>(args.jobs.size);
#pragma unroll 1
  for (; tile < args.tiles; tile += args.workers) {
    ptx::copy_async_wait();
    __syncthreads();
    const int next = tile + args.workers;
    if (args.buffers == 2 && next < args.tiles) feed<kAtOnce>(args, storage, next, other);
    const Target target = Target::of(args, tile);
#pragma unroll 1
    for (int job = warp; job < jobs; job += kGroupedWarps) {
      const auto batch = static_cast<int>(divide(static_cast<uint32_t>(job), args.jobs));
      const int across = job - batch * static_cast<int>(args.jobs.size);
      const int row = across * S::kJobChannels;
      const int unit =
          S::kUnits > 1 ? across * S::kUnits
                        : static_cast<int>(divide(static_cast<uint32_t>(across), args.unit_jobs));
      Sums<S> sum = {};
      multiply<S>(args, storage, patch + unit * args.unit_vectors * 16,
                  shared + args.weights_at + row * args.weight_pitch, batch, sum);
      tail.finish(target, batch, row, sum);
    }
    if (args.buffers == 1 && next < args.tiles) {
      __syncthreads();
      feed<kAtOnce>(args, storage, next, other);
    }
    const uint32_t read = patch;
    patch = other;
    other = read;
  }
}

template <int kTiles, bool kIsMixed, int kLeaves, class Epilogue, int kScalars, class Acc,
          class Out, class X, class... In>
__device__ __forceinline__ void run(const GroupedArgs& args) {
  static_assert(std::is_same_v<Acc, float>);
  static_assert(sizeof(Out) == 2 || sizeof(Out) == 4);
  using S = Shape<X, Out, kTiles, kIsMixed, kLeaves>;
  convolve<S, Tail<S, Epilogue, kScalars, std::index_sequence_for<In...>, In...>>(args);
}

// For epilogues with which the kernel would spill: see fx_fuser/native/jobs.py.
#ifdef FX_FUSER_FEW_REGISTERS
constexpr int kBlocks = 1;
#else
constexpr int kBlocks = 2;
#endif

}  // namespace fx_fuser::grouped

#define FX_FUSER_GROUPED(...)                                                \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kGroupedThreads,    \
                                               fx_fuser::grouped::kBlocks)   \
      fx_fuser_grouped(const __grid_constant__ fx_fuser::GroupedArgs args) { \
    fx_fuser::grouped::run<__VA_ARGS__>(args);                               \
  }
