// out = softmax(scale · q kᵀ + bias) v of 16-bit operands, of at most 64 queries and 64 keys, by
// mma.sync, for sm_80 and later.
//
// So many keys fit in the registers of one warp with its 16 queries, so that softmax is done once,
// by the formula: a row that sees nothing is NaN, or 0 as in torch's fused attention. The bias,
// fp32, lies in shared memory as accumulators do, with -inf beyond the last key. A block has one
// head and one bias, and goes through batches that share it, the next of which is on its way
// meanwhile. NOTES.md has the arithmetic.
//
//   FX_FUSER_ATTENTION_WINDOW(/*shape*/ 0, Epilogue, /*scalars*/ 0, /*Acc*/ float,
//                             /*Out*/ __nv_bfloat16, /*q, k, v*/ __nv_bfloat16)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/attention_window_args.h"
#include "common/convert.cuh"
#include "common/ptx.cuh"

namespace fx_fuser::attention_window {

constexpr float kLog2OfE = 1.44269504088896341f;
constexpr int kBlocks = kWindowRows / 8;  // of eight columns, of a warp's scores
constexpr int kSteps = kWindowRows / 16;  // of a product that sums over a window's rows
constexpr int kScoresD = kWindowRows;     // a matrix of scores is laid out as a tile of this d

template <int kShape>
struct Shape {
  static constexpr WindowShape kIs = kWindowShapes[kShape];
  static constexpr int kD = kIs.d;
  static constexpr int kTile = kIs.tile_bytes();
};

// A warp's accumulators of 16 rows: [8 columns][2r + t], row g + 8r, column 2l + t.
template <int kColumns>
using Sums = float[kColumns / 8][4];

// A tile has 64 rows of kD elements, in chunks of 16 bytes. Rows of eight chunks that ldmatrix
// reads, or that accumulators write to, lie in different banks.
template <int kD>
__device__ __forceinline__ uint32_t place(int row, int chunk) {
  static_assert(kD == 32 || kD == 64);
  const int turn = kD == 32 ? row / 2 % 4 : row % 8;
  return row * (kD * 2) + (chunk ^ turn) * 16;
}

// A thread's place. Made anew for each batch, so that no addresses stay in registers meanwhile.
// Tiles are aligned so far that what is added to a chunk's number carries nowhere.
struct Lane {
  int lane = static_cast<int>(ptx::thread_index()) % 32;
  int warp = static_cast<int>(ptx::thread_index()) / 32;
  int g = lane / 4;
  int l = lane % 4;

  __device__ __forceinline__ int row(int r) const { return 16 * warp + g + 8 * r; }
  // Where ldmatrix begins, of rows first... first + 15 and chunks chunk, chunk + 1 of a tile: four
  // matrices, by rows first, or by chunks first. first: a multiple of 16; chunk: of 2.
  template <int kD>
  __device__ __forceinline__ uint32_t by_rows(uint32_t tile, int first, int chunk) const {
    return ((tile + place<kD>(lane % 16, lane / 16)) ^ 16 * chunk) + first * (2 * kD);
  }
  template <int kD>
  __device__ __forceinline__ uint32_t by_chunks(uint32_t tile, int first, int chunk) const {
    const int row = lane / 16 * 8 + lane % 8;
    return ((tile + place<kD>(row, lane / 8 % 2)) ^ 16 * chunk) + first * (2 * kD);
  }
  // Of the two columns of an accumulator.
  template <int kD>
  __device__ __forceinline__ uint32_t of_sums(uint32_t tile, int r, int block) const {
    return ((tile + place<kD>(row(0), 0) + 4 * l) ^ 16 * block) + r * (8 * 2 * kD);
  }
};

template <class T>
__device__ __forceinline__ uint32_t packed(float first, float second) {
  const auto both = convert_pair<T>(first, second);
  return reinterpret_cast<const uint32_t&>(both);
}

// ---- products -----------------------------------------------------------------------------------

// score = rows of the warp of `left` · all rows of `right`, transposed.
template <class T, int kD>
__device__ __forceinline__ void multiply_rows(Sums<kWindowRows>& score, uint32_t left,
                                              uint32_t right, const Lane& at) {
#pragma unroll
  for (auto& block : score) block[0] = block[1] = block[2] = block[3] = 0;
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    uint32_t a[4];
    ptx::load_matrices(a, at.by_rows<kD>(left, 16 * at.warp, 2 * step));
#pragma unroll
    for (int pair = 0; pair < kSteps; ++pair) {
      uint32_t b[4];
      ptx::load_matrices(b, at.by_chunks<kD>(right, 16 * pair, 2 * step));
      ptx::mma_m16n8k16<T>(score[2 * pair], a, b[0], b[1]);
      ptx::mma_m16n8k16<T>(score[2 * pair + 1], a, b[2], b[3]);
    }
  }
}

// sum += a · 16 rows of a tile, from `first`.
template <class T, int kD>
__device__ __forceinline__ void add_product(Sums<kD>& sum, const uint32_t (&a)[4], uint32_t tile,
                                            int first, const Lane& at) {
#pragma unroll
  for (int pair = 0; pair < kD / 16; ++pair) {
    uint32_t b[4];
    ptx::load_transposed(b, at.by_rows<kD>(tile, first, 2 * pair));
    ptx::mma_m16n8k16<T>(sum[2 * pair], a, b[0], b[1]);
    ptx::mma_m16n8k16<T>(sum[2 * pair + 1], a, b[2], b[3]);
  }
}

// sum = score, in 16 bits, · tile.
template <class T, int kD>
__device__ __forceinline__ void multiply_scores(Sums<kD>& sum, const Sums<kWindowRows>& score,
                                                uint32_t tile, const Lane& at) {
#pragma unroll
  for (auto& block : sum) block[0] = block[1] = block[2] = block[3] = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* two = &score[2 * step + i / 2][i % 2 * 2];
      a[i] = packed<T>(two[0], two[1]);
    }
    add_product<T, kD>(sum, a, tile, 16 * step, at);
  }
}

// ---- a block's work -----------------------------------------------------------------------------

// What a block has: one head and one bias, and of the batches that share it some.
struct Part {
  int period;
  int head;
  int first;  // of the batches that share the bias
  int end;

  __device__ __forceinline__ explicit Part(const WindowArgs& args) {
    const int slots = args.period * args.heads;
    const int chunk = static_cast<int>(blockIdx.x) / slots;
    const int slot = static_cast<int>(blockIdx.x) - chunk * slots;
    period = slot / args.heads;
    head = slot - period * args.heads;
    first = chunk * args.chunk;
    end = min(first + args.chunk, args.shares);
  }
};

// ---- softmax ------------------------------------------------------------------------------------

// The block's bias as its threads have accumulators: each reads what it has written itself.
struct OwnBias {
  float2* first;

  __device__ __forceinline__ explicit OwnBias(uint8_t* at)
      : first(reinterpret_cast<float2*>(at) + ptx::thread_index()) {}
  __device__ __forceinline__ float2& of(int block, int r) const {
    return first[(2 * block + r) * kWindowThreads];
  }
  __device__ __forceinline__ void load(const WindowArgs& args, const Part& part) const {
    const Lane at;
    const float* from =
        args.bias + part.period * args.bias_stride[0] + part.head * args.bias_stride[1];
    const auto value = [&](int query, int key) {
      if (key >= args.keys) return -__uint_as_float(0x7F800000);
      if (query >= args.queries) return 0.0f;
      return from[query * args.bias_stride[2] + key * args.bias_stride[3]];
    };
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      const int query = at.row(i % 2);
      const int key = 8 * (i / 2) + 2 * at.l;
      of(i / 2, i % 2) = make_float2(value(query, key), value(query, key + 1));
    }
  }
};

// Of a row, whose columns four lanes have.
__device__ __forceinline__ float sum_of_row(float value) {
  value += __shfl_xor_sync(0xFFFFFFFF, value, 1);
  return value + __shfl_xor_sync(0xFFFFFFFF, value, 2);
}
__device__ __forceinline__ float largest_of_row(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, 2));
}

// score = exp(scale · score + bias - the row's largest); sum: of the row. With a finite `least`, a
// row that sees nothing has zeros, and 1 as its sum.
__device__ __forceinline__ void soften(Sums<kWindowRows>& score, const WindowArgs& args,
                                       const OwnBias& bias, float (&sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float high = args.least;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      float* two = &score[block][2 * r];
      const float2 of = bias.of(block, r);
      two[0] = fmaf(two[0], args.scale, of.x);
      two[1] = fmaf(two[1], args.scale, of.y);
      high = fmaxf(high, fmaxf(two[0], two[1]));
    }
    high = largest_of_row(high);
    float total = 0;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      // Not one fma: a mask may be the least number, whose product with log2(e) overflows.
      float* two = &score[block][2 * r];
      two[0] = ptx::exp2((two[0] - high) * kLog2OfE);
      two[1] = ptx::exp2((two[1] - high) * kLog2OfE);
      total += two[0] + two[1];
    }
    total = sum_of_row(total);
    sum[r] = total == 0 ? 1 : total;
  }
}

// ---- memory -------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ T* head_at(const BiasRows& rows, int batch, int head) {
  return static_cast<T*>(rows.data) + (batch * rows.batch_stride + head * rows.head_stride);
}

// Rows and elements beyond the tensor's are zeros.
template <class T, int kD>
__device__ __forceinline__ void copy_tile(uint32_t to, const BiasRows& from, int batch, int head,
                                          int rows, int d) {
  const T* first = head_at<T>(from, batch, head);
  constexpr int kChunks = kD / 8;
#pragma unroll
  for (int i = 0; i < kWindowRows * kChunks / kWindowThreads; ++i) {
    const int index = i * kWindowThreads + static_cast<int>(ptx::thread_index());
    const int row = index / kChunks;
    const int chunk = index % kChunks;
    const bool is_there = row < rows && 8 * chunk < d;
    const T* at = is_there ? first + (row * from.row_stride + 8 * chunk) : first;
    ptx::copy_async_only_16(to + place<kD>(row, chunk), at, is_there);
  }
}

// A warp's rows, by way of the same rows of a tile, which nothing else reads any more.
template <class T, int kD>
__device__ __forceinline__ void store_rows(const BiasRows& to, int batch, int head, int rows, int d,
                                           const Sums<kD>& sum, const float (&factor)[2],
                                           uint32_t tile, const Lane& at) {
  __syncwarp();  // each lane has read these rows for all
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int block = 0; block < kD / 8; ++block) {
      const float* two = &sum[block][2 * r];
      ptx::store_shared_word(at.of_sums<kD>(tile, r, block),
                             packed<T>(two[0] * factor[r], two[1] * factor[r]));
    }
  }
  __syncwarp();
  T* first = head_at<T>(to, batch, head);
  constexpr int kChunks = kD / 8;
#pragma unroll
  for (int i = 0; i < 16 * kChunks / 32; ++i) {
    const int row = 16 * at.warp + (32 * i + at.lane) / kChunks;
    const int chunk = (32 * i + at.lane) % kChunks;
    const float4 value = ptx::load_shared(tile + place<kD>(row, chunk));
    if (row < rows && 8 * chunk < d) {
      *reinterpret_cast<float4*>(first + (row * to.row_stride + 8 * chunk)) = value;
    }
  }
}

// For each batch compute(tiles, batch), once tiles are there, which copy(to, batch) begins to copy.
template <class Copy, class Compute>
__device__ __forceinline__ void for_batches(const WindowArgs& args, const Part& part,
                                            const OwnBias& bias, uint32_t shared, int stage_bytes,
                                            const Copy& copy, const Compute& compute) {
  const auto batch_of = [&](int nth) { return nth * args.period + part.period; };
  copy(shared, batch_of(part.first));
  bias.load(args, part);
  int stage = 0;
#pragma unroll 1
  for (int nth = part.first; nth < part.end; ++nth) {
    ptx::copy_async_wait();
    __syncthreads();  // the tiles are there, and none of the other stage are read any more
    if (nth + 1 < part.end) copy(shared + (1 - stage) * stage_bytes, batch_of(nth + 1));
    compute(shared + stage * stage_bytes, batch_of(nth));
    stage = 1 - stage;
  }
}

// ---- forward ------------------------------------------------------------------------------------

template <class T, int kShape>
__device__ __forceinline__ void run_forward(const WindowArgs& args) {
  constexpr int kD = Shape<kShape>::kD;
  constexpr int kTile = Shape<kShape>::kTile;
  constexpr int kStage = 3 * kTile;
  extern __shared__ __align__(1024) uint8_t storage[];
  const Part part(args);
  const OwnBias bias(storage + kWindowStages * kStage);
  for_batches(
      args, part, bias, ptx::shared_address(storage), kStage,
      [&](uint32_t to, int batch) {
        copy_tile<T, kD>(to, args.q, batch, part.head, args.queries, args.d);
        copy_tile<T, kD>(to + kTile, args.k, batch, part.head, args.keys, args.d);
        copy_tile<T, kD>(to + 2 * kTile, args.v, batch, part.head, args.keys, args.d);
      },
      [&](uint32_t q, int batch) {
        const Lane at;
        Sums<kWindowRows> score;
        Sums<kD> result;
        float sum[2];
        multiply_rows<T, kD>(score, q, q + kTile, at);
        soften(score, args, bias, sum);
        multiply_scores<T, kD>(result, score, q + 2 * kTile, at);
        const float factor[2] = {1 / sum[0], 1 / sum[1]};
        store_rows<T, kD>(args.out, batch, part.head, args.queries, args.d, result, factor, q, at);
      });
}

}  // namespace fx_fuser::attention_window

#define FX_FUSER_ATTENTION_WINDOW(shape, functor, scalars, Acc, Out, In)                        \
  extern "C" __global__ void __launch_bounds__(fx_fuser::kWindowThreads,                        \
                                               fx_fuser::kWindowShapes[shape].forward_resident) \
      fx_fuser_attention_window(const __grid_constant__ fx_fuser::WindowArgs args) {            \
    fx_fuser::attention_window::run_forward<In, shape>(args);                                   \
  }
