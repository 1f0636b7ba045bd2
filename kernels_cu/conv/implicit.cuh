// out = epilogue(conv2d(x, weight, stride, padding, dilation), operands, scalars) in channels_last,
// bf16 and fp16, as an implicit gemm by `mma.sync`, for sm_80 and later. Meant for bandwidth-bound
// layers, above all 1 x 1.
//
// implicit_args.h defines tiles, stages and pieces. Blocks are persistent and walk over the pixels;
// neighbouring blocks have different columns of the same pixels, so that x is read from L2 the
// second time. Everything that a tile reads, operands such as residuals included, is loaded through
// a ring of stages by `cp.async`, and the ring runs on across tiles: while one tile's epilogue
// runs, the next one's pixels arrive. Stages have mbarriers of their own, so a block's warps need
// not run in lockstep. Only sums are held in registers: two blocks are resident per SM, and the
// epilogue of one overlaps the main loop of the other.
//
// Results are stored straight from registers: the weights' rows are permuted so that a lane's sums
// are neighbouring channels of a pixel.
//
//   FX_FUSER_IMPLICIT(/*columns*/ 96, /*is_window*/ 0, /*leaves*/ 4, Epilogue, /*scalars*/ 1,
//                     /*Acc*/ float, /*Out*/ __half, /*x, weight, c*/ __half,
//                     /*operands*/ float...)
//
// Layers below this file: implicit_store.cuh, implicit_load.cuh.
#pragma once

#include "conv/implicit_store.cuh"

namespace fx_fuser::implicit {

// sum += the products of a stage: the warp's 32 pixels by its columns, for `count` times 16 k.
// pixels, weights: where the stage's rows begin.
template <class S>
__device__ __forceinline__ void multiply_stage(Sums<S>& sum, uint32_t pixels, uint32_t weights,
                                               int count) {
  const int thread = static_cast<int>(ptx::thread_index());
  const int warp = thread / 32;
  const int lane = thread % 32;
  // ldmatrix addresses. Pixels: eight rows and the next eight, then both for the second half of k.
  // Weights: both halves of k for eight rows, then for the next eight.
  const uint32_t pixel_row =
      pixels + (warp / 2 * 32 + lane % 16) * kImplicitRow + (lane / 16 ^ lane % 8) * 16;
  const uint32_t weight_row =
      weights + (lane / 16 * 8 + lane % 8) * kImplicitRow + (lane / 8 % 2 ^ lane % 8) * 16;
#pragma unroll
  for (int k = 0; k < kImplicitStepVectors / 2; ++k) {
    if (k >= count) return;
    uint32_t pixel[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      ptx::load_matrices(pixel[m], (pixel_row ^ 32 * k) + m * 16 * kImplicitRow);
    }
#pragma unroll
    for (int pair = 0; pair < S::kTiles / 2; ++pair) {
      const int group = pair / 2;
      const int row =
          group * kImplicitGroupColumns + warp % 2 * 8 * S::tiles_of(group) + pair % 2 * 16;
      uint32_t weight[4];
      ptx::load_matrices(weight, (weight_row ^ 32 * k) + row * kImplicitRow);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        using X = typename S::X;
        ptx::mma_m16n8k16<X>(sum[m][2 * pair], pixel[m], weight[0], weight[1]);
        ptx::mma_m16n8k16<X>(sum[m][2 * pair + 1], pixel[m], weight[2], weight[3]);
      }
    }
  }
}

template <class S, class TailOf>
__device__ __forceinline__ void convolve(const ImplicitArgs& args) {
  extern __shared__ __align__(kImplicitRow) uint8_t storage[];
  auto* leaves = reinterpret_cast<float*>(storage + kImplicitBarrierBytes);
  const uint32_t shared = ptx::shared_address(storage);
  Ring<S> ring{args, shared, Feeder<S>(args)};
  const TailOf tail{args, leaves};
  if (threadIdx.x == 0) ring.begin();
  __syncthreads();
  ring.fill();
  if (args.keeps) keep_weights<S>(args, shared);
  tail.stage(leaves);
  ptx::copy_async_wait();
  __syncthreads();

  const bool works = first_channel<S>(args) + Lane<S, 0>::warp_column() < args.outputs;
#pragma unroll 1
  for (int tile = first_tile(args); tile < args.tiles; tile += args.workers) {
    Sums<S> sum = {};
#pragma unroll 1
    for (int step = 0; step < args.steps; ++step) {
      ring.wait(ring.slot, ring.phase);
      const uint32_t pixels = ring.stage(ring.slot);
      const uint32_t weights = args.keeps ? shared + args.kept_at + step * S::kWeightBytes
                                          : pixels + kImplicitPixelBytes;
      const int left = filled_vectors(args) / 2 - step * (kImplicitStepVectors / 2);
      if (works) multiply_stage<S>(sum, pixels, weights, left);
      ring.pass();
    }
    tail.finish(ring, tile, sum);
  }
}

template <int kColumns, bool kIsWindow, int kLeaves, class Epilogue, int kScalars, class Acc,
          class Out, class X, class... In>
__device__ __forceinline__ void run(const ImplicitArgs& args) {
  static_assert(std::is_same_v<Acc, float>);
  static_assert(sizeof(Out) == 2 || sizeof(Out) == 4);
  using S = Shape<X, Out, kColumns, kIsWindow, kLeaves>;
  convolve<S, Tail<S, Epilogue, kScalars, std::index_sequence_for<In...>, In...>>(args);
}

constexpr int kBlocks = kFewRegisters ? 1 : kImplicitResident;

}  // namespace fx_fuser::implicit

#define FX_FUSER_IMPLICIT(...)                                                 \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kImplicitThreads,     \
                                               fx_fuser::implicit::kBlocks)    \
      fx_fuser_implicit(const __grid_constant__ fx_fuser::ImplicitArgs args) { \
    fx_fuser::implicit::run<__VA_ARGS__>(args);                                \
  }
