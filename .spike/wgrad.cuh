// Spike: dwT[in channel, out channel] = sum over pixels of load(z[pixel, in]) dz[pixel, out].
#pragma once
#include "spike/pixels_load_sm90.cuh"
#include "common/wgmma_sm90.cuh"

namespace fx_fuser::wgrad {
using pixels::kLine; using pixels::kLoaders; using pixels::kWarps; using pixels::kWarpgroup;
constexpr int kColumns = 256;  // out channels of a tile
constexpr int kStep = 64;      // pixels of a stage

struct Args {
  TensorMap z_map;   // [pixels, in], boxes of 64 x 64
  TensorMap dz_map;  // [pixels, out]
  const PixelsNorm* load;
  float* partial;    // [split, in, out]
  int32_t pixels, in, out, row_tiles, column_tiles, splits, steps, unused;
};
struct ReduceArgs { const float* partial; void* to; int32_t count, splits; };

template <int kRows>
struct Layout {
  static constexpr int kStages = kRows == 128 ? 4 : 5;
  struct Stage {
    uint8_t z[kRows / 64][kStep][kLine];
    uint8_t dz[kColumns / 64][kStep][kLine];
  };
  struct Shared {
    Stage stage[kStages];
    uint64_t full[kStages];
    uint64_t loaded[kStages];
    uint64_t empty[kStages];
  };
};

struct Work { int row, column, begin, end, split; };
template <int kRows>
__device__ __forceinline__ Work work_of(const Args& args) {
  const int tile = blockIdx.x % (args.row_tiles * args.column_tiles);
  const int split = blockIdx.x / (args.row_tiles * args.column_tiles);
  const auto at = [&](int s) { return static_cast<int>(int64_t{s} * args.steps / args.splits); };
  return {tile % args.row_tiles * kRows, tile / args.row_tiles * kColumns, at(split), at(split + 1), split};
}

template <class T, int kRows, bool kLoad>
__device__ __forceinline__ void run(const Args& args) {
  using Layout = wgrad::Layout<kRows>;
  using Shared = typename Layout::Shared;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  auto& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Layout::kStages; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[slot]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.loaded[slot]), kLoaders);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[slot]), 2 * kWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const Work work = work_of<kRows>(args);
  const int lane = threadIdx.x % 32;
  const int warpgroup = threadIdx.x / kWarpgroup;
  const auto advance = [](int& slot, uint32_t& phase) {
    if (++slot == Layout::kStages) { slot = 0; phase ^= 1; }
  };
  int slot = 0;
  uint32_t phase = 0;
  if (warpgroup == 2) {
    ptx::give_registers<72>();
    const int warp = threadIdx.x % kWarpgroup / 32;
    if (warp == 0) {
      if (lane == 0) {
        for (int step = work.begin; step < work.end; ++step) {
          auto& stage = shared.stage[slot];
          const uint32_t full = ptx::shared_address(&shared.full[slot]);
          ptx::mbarrier_wait(ptx::shared_address(&shared.empty[slot]), phase ^ 1);
          ptx::mbarrier_arrive_expect_tx(full, sizeof(stage));
#pragma unroll
          for (int i = 0; i < kRows / 64; ++i) {
            ptx::tensor_load(ptx::shared_address(stage.z[i]), args.z_map, full, ptx::kEvictNormal, work.row + 64 * i, step * kStep);
          }
#pragma unroll
          for (int i = 0; i < kColumns / 64; ++i) {
            ptx::tensor_load(ptx::shared_address(stage.dz[i]), args.dz_map, full, ptx::kEvictNormal, work.column + 64 * i, step * kStep);
          }
          advance(slot, phase);
        }
      }
      __syncwarp();
    } else if constexpr (kLoad) {
      const int chunk = lane % 8;
      for (int step = work.begin; step < work.end; ++step) {
        ptx::mbarrier_wait(ptx::shared_address(&shared.full[slot]), phase);
#pragma unroll
        for (int i = 0; i < kRows / 64; ++i) {
          float scale[8], shift[8];
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const PixelsNorm* norm = args.load + work.row + 64 * i + chunk * 8 + e;
            scale[e] = norm->scale;
            shift[e] = norm->shift;
          }
#pragma unroll 3
          for (int group = warp - 1; group < kStep / 4; group += kLoaders) {
            const int row = group * 4 + lane / 8;
            auto* vector = reinterpret_cast<uint4*>(&shared.stage[slot].z[i][row][(chunk ^ row % 8) * 16]);
            const uint4 raw = *vector;
            uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
              const float2 pair = pixels::unpacked<T>(word[w]);
              word[w] = ptx::relu_pair<T>(pixels::packed<T>(fmaf(pair.x, scale[2 * w], shift[2 * w]), fmaf(pair.y, scale[2 * w + 1], shift[2 * w + 1])));
            }
            *vector = make_uint4(word[0], word[1], word[2], word[3]);
          }
        }
        ptx::fence_async_proxy();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.loaded[slot]));
        advance(slot, phase);
      }
    }
  } else {
    ptx::take_registers<216>();
    constexpr int kWide = kRows == 128 ? kColumns : kColumns / 2;  // columns of a consumer
    const int row_block = kRows == 128 ? warpgroup : 0;
    const int column_block = kRows == 128 ? 0 : warpgroup * 2;
    float sum[kWide / 2];
    int previous = 0;
    for (int step = work.begin; step < work.end; ++step) {
      auto& stage = shared.stage[slot];
      const uint64_t a = ptx::transposed_descriptor(ptx::uniform(ptx::shared_address(stage.z[row_block])), kStep * kLine);
      const uint64_t b = ptx::transposed_descriptor(ptx::uniform(ptx::shared_address(stage.dz[column_block])), kStep * kLine);
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[slot]), phase);
      if constexpr (kLoad) ptx::mbarrier_wait(ptx::shared_address(&shared.loaded[slot]), phase);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kStep / 16; ++i) {
        ptx::WgmmaOfMajors<T, true, true>::run(sum, a + 128 * i, b + 128 * i, step > work.begin || i > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (step > work.begin && lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[previous]));
      previous = slot;
      advance(slot, phase);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
    const int row = work.row + 64 * row_block + threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
    const int column = work.column + 64 * column_block + lane % 4 * 2;
    float* to = args.partial + int64_t{work.split} * args.in * args.out;
#pragma unroll
    for (int i = 0; i < kWide / 8; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (row + 8 * r < args.in && column + 8 * i < args.out) {
          *reinterpret_cast<float2*>(to + int64_t{row + 8 * r} * args.out + column + 8 * i) = make_float2(sum[4 * i + 2 * r], sum[4 * i + 2 * r + 1]);
        }
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void reduce(const ReduceArgs& args) {
  const int i = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  if (i >= args.count) return;
  float sum = 0;
#pragma unroll 8
  for (int s = 0; s < args.splits; ++s) sum += args.partial[int64_t{s} * args.count + i];
  static_cast<T*>(args.to)[i] = convert<T>(sum);
}
}  // namespace fx_fuser::wgrad
