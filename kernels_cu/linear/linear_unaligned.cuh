// out[m, n] = epilogue(z, operands...), z = sum over k of a[m, k] b[n, k] + bias[n], for bf16 or
// fp16 matrices, or batches of them, of any alignment: any pitch, pointers aligned to an element, k
// or rows adjacent. By mma.sync, for sm_80 and later.
//
// TMA, cp.async and ldmatrix need multiples of 16 bytes, and cuBLAS has no fast kernel for anything
// else. Here threads read the aligned vectors that contain a line, shift them by funnel shifts and
// store them as aligned chunks, one step of k ahead of the tensor cores; an operand with aligned
// lines is copied by cp.async. Results are staged in shared memory with the same offset from a
// multiple of 16 bytes as in global memory (linear_unaligned_store.cuh).
//
// A block computes one tile of one matrix; small matrices have blocks of two to four warps, many of
// which are resident per multiprocessor.
//
//   FX_FUSER_LINEAR_UNALIGNED(/*shape*/ 4, /*step of k*/ 64, /*forms of a and b*/ 1, 3, Epilogue,
//                             /*scalars*/ 1, /*Acc*/ float, /*Out*/ __half,
//                             /*a, b, bias, c*/ __half, /*operands*/ float...)
#pragma once

#include "linear/linear_unaligned_load.cuh"
#include "linear/linear_unaligned_store.cuh"

namespace fx_fuser::unaligned {

template <class X_, int kShape, int kStepK_, int kFormA, int kFormB>
struct Shape {
  using X = X_;
  static constexpr UnalignedShape kIs = kUnalignedShapes[kShape];
  static constexpr int kStepK = kStepK_;
  static constexpr int kTileM = kIs.tile_m();
  static constexpr int kTileN = kIs.tile_n();
  static constexpr int kThreads = kIs.threads();
  static constexpr int kWarpsN = kIs.warps_n;
  static constexpr int kWarpM = kIs.warp_m;
  static constexpr int kWarpN = kIs.warp_n;
  static constexpr int kInstructionsM = kWarpM / 16;
  static constexpr int kInstructionsN = kWarpN / 8;
  using PartA = Part<kTileM, kStepK, is_along_k(kFormA), has_aligned_lines(kFormA), kThreads>;
  using PartB = Part<kTileN, kStepK, is_along_k(kFormB), has_aligned_lines(kFormB), kThreads>;
  using LoaderA = Loader<PartA>;
  using LoaderB = Loader<PartB>;
  static constexpr int kStageBytes = PartA::kBytes + PartB::kBytes;
  static_assert(sizeof(X) == 2 && kIs16BitFloat<X>);
  static_assert(kStageBytes == kIs.stage_bytes(kStepK));
};

__device__ __forceinline__ Tile tile_at(const UnalignedArgs& args, int tile_m, int tile_n) {
  const uint32_t batch = divide(blockIdx.x, args.tiles);
  const uint32_t index = blockIdx.x - batch * args.tiles.size;
  const uint32_t outer = divide(batch, args.inner);
  // In groups of kUnalignedGroupM tiles of rows, column by column.
  const auto m_tiles = static_cast<uint32_t>(args.m_tiles);
  const uint32_t n_tiles = args.tiles.size / m_tiles;
  const uint32_t group = index / (kUnalignedGroupM * n_tiles);
  const uint32_t inside = index - group * kUnalignedGroupM * n_tiles;
  const uint32_t width = min(kUnalignedGroupM, m_tiles - group * kUnalignedGroupM);
  return {static_cast<int>(outer), static_cast<int>(batch - outer * args.inner.size),
          static_cast<int>(group * kUnalignedGroupM + inside % width) * tile_m,
          static_cast<int>(inside / width) * tile_n};
}

// Where a lane's row of ldmatrix's four 8 x 8 matrices begins in a part. For a: rows r, rows r + 8,
// then both at k + 8. For b: rows r at k and k + 8, then rows r + 8 at both.
template <class P, bool kIsA>
struct Fragments {
  uint32_t lane_at;

  // first_row: the warp's; a multiple of its rows.
  __device__ __forceinline__ explicit Fragments(int first_row) {
    const int lane = static_cast<int>(ptx::thread_index()) % 32;
    const int row = first_row + (kIsA ? lane / 8 % 2 : lane / 16) * 8;
    const int k = (kIsA ? lane / 16 : lane / 8 % 2) * 8;
    lane_at = P::kAlongK ? P::place(row + lane % 8, k / kUnalignedChunk)
                         : P::place(k + lane % 8, row / kUnalignedChunk);
  }

  // rows, k: offsets, multiples of 16. Parts are aligned, so that the XOR on the chunk is the same
  // as an addition before the swizzle.
  __device__ __forceinline__ void load(uint32_t (&word)[4], uint32_t part, int rows, int k) const {
    if constexpr (P::kAlongK) {
      ptx::load_matrices(word, ((part + lane_at) ^ 2 * k) + rows * P::kLineBytes);
    } else {
      ptx::load_transposed(word, ((part + lane_at) ^ 2 * rows) + k * P::kLineBytes);
    }
  }
};

template <class S, bool kIsWhole>
__device__ __forceinline__ void multiply_stage(Sums<S>& sum, uint32_t stage,
                                               const Fragments<typename S::PartA, true>& of_a,
                                               const Fragments<typename S::PartB, false>& of_b,
                                               int k) {
  using X = typename S::X;
#pragma unroll
  for (int at = 0; at < S::kStepK; at += 16) {
    if (!kIsWhole && at >= k) return;
    uint32_t a[S::kInstructionsM][4];
#pragma unroll
    for (int i = 0; i < S::kInstructionsM; ++i) of_a.load(a[i], stage, 16 * i, at);
#pragma unroll
    for (int pair = 0; pair < S::kInstructionsN / 2; ++pair) {
      uint32_t b[4];
      of_b.load(b, stage + S::PartA::kBytes, 16 * pair, at);
#pragma unroll
      for (int i = 0; i < S::kInstructionsM; ++i) {
        ptx::mma_m16n8k16<X>(sum[i][2 * pair], a[i], b[0], b[1]);
        ptx::mma_m16n8k16<X>(sum[i][2 * pair + 1], a[i], b[2], b[3]);
      }
    }
  }
}

template <class S>
__device__ __forceinline__ void multiply(const UnalignedArgs& args, const Tile& tile,
                                         uint32_t shared, Sums<S>& sum) {
  const auto offset = [&](const UnalignedOperand& operand) {
    return tile.outer * operand.batch_stride[0] + tile.inner * operand.batch_stride[1];
  };
  typename S::LoaderA a(args.a, offset(args.a), tile.m, args.m, args.k);
  typename S::LoaderB b(args.b, offset(args.b), tile.n, args.n, args.k);
  const int warp = static_cast<int>(ptx::thread_index()) / 32;
  const Fragments<typename S::PartA, true> of_a(warp / S::kWarpsN * S::kWarpM);
  const Fragments<typename S::PartB, false> of_b(warp % S::kWarpsN * S::kWarpN);
  const int steps = (args.k + S::kStepK - 1) / S::kStepK;
  const auto stage_of = [&](int slot) { return shared + slot * S::kStageBytes; };
  const auto copy = [&](int step, int slot) {
    if (step < steps) {
      a.copy(step, stage_of(slot));
      b.copy(step, stage_of(slot) + S::PartA::kBytes);
    }
    ptx::copy_async_commit();  // even if empty: groups are counted
  };
  const auto fetch = [&](int step) {
    if (step >= steps) return;
    a.fetch(step);
    b.fetch(step);
  };
  const auto put = [&](int step, int slot) {
    if (step >= steps) return;
    a.put(step, stage_of(slot));
    b.put(step, stage_of(slot) + S::PartA::kBytes);
  };

  copy(0, 0);
  copy(1, 1);
  fetch(0);
  put(0, 0);
  int slot = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int next = slot == kUnalignedStages - 1 ? 0 : slot + 1;
    const int last = slot == 0 ? kUnalignedStages - 1 : slot - 1;
    ptx::copy_async_wait_for_groups<1>();
    __syncthreads();  // the step has arrived, and no warp reads the previous one any more
    copy(step + 2, last);
    fetch(step + 1);
    const int left = args.k - step * S::kStepK;
    if (left >= S::kStepK) {
      multiply_stage<S, true>(sum, stage_of(slot), of_a, of_b, left);
    } else {
      multiply_stage<S, false>(sum, stage_of(slot), of_a, of_b, left);
    }
    put(step + 1, next);
    slot = next;
  }
  ptx::copy_async_wait();  // only empty groups are left
  __syncthreads();
}

template <int kShape, int kStepK, int kFormA, int kFormB, class Epilogue, int kScalars, class Acc,
          class Out, class X, class... In>
__device__ __forceinline__ void run(const UnalignedArgs& args) {
  static_assert(std::is_same_v<Acc, float>);
  static_assert(sizeof(Out) == 2 || sizeof(Out) == 4);
  using S = Shape<X, kShape, kStepK, kFormA, kFormB>;
  extern __shared__ __align__(1024) uint8_t storage[];
  const Tile tile = tile_at(args, S::kTileM, S::kTileN);
  Sums<S> sum = {};
  multiply<S>(args, tile, ptx::shared_address(storage), sum);
  const Tail<S, Epilogue, kScalars, Out, std::index_sequence_for<In...>, In...> tail{args, tile,
                                                                                     storage};
  tail.finish(sum);
}

// For epilogues with which the kernel would spill: see fx_fuser/native/jobs.py.
#ifdef FX_FUSER_FEW_REGISTERS
constexpr bool kFewRegisters = true;
#else
constexpr bool kFewRegisters = false;
#endif

constexpr int threads_of(int shape) { return kUnalignedShapes[shape].threads(); }

// Two unaligned operands are held in registers, which leaves room for fewer blocks.
constexpr int blocks_of(int shape, int form_a, int form_b) {
  const int resident = kUnalignedShapes[shape].resident;
  const bool both_wait = !has_aligned_lines(form_a) && !has_aligned_lines(form_b);
  return kFewRegisters || both_wait ? resident / 2 : resident;
}

}  // namespace fx_fuser::unaligned

#define FX_FUSER_LINEAR_UNALIGNED(shape, step_k, form_a, form_b, ...)            \
  extern "C" __global__ void __launch_bounds__(                                  \
      fx_fuser::unaligned::threads_of(shape),                                    \
      fx_fuser::unaligned::blocks_of(shape, form_a, form_b))                     \
      fx_fuser_unaligned(const __grid_constant__ fx_fuser::UnalignedArgs args) { \
    fx_fuser::unaligned::run<shape, step_k, form_a, form_b, __VA_ARGS__>(args);  \
  }
