// The split product by mma.sync (linear_split_mma.cuh): the ring of stages, and the cp.async copies
// that feed it.
#pragma once

#include "linear/linear_split_sums.cuh"

namespace fx_fuser::linear_split {

// ---- shared memory ------------------------------------------------------------------------------

// 32 of k. The weight is laid out as RawWeight describes. Rows of x are 64 bytes: the 16-byte chunk
// c of row r is stored at chunk c ^ (r / 2 % 4), so that one chunk of eight rows covers all banks.
struct MmaStage {
  union {
    float box[kTileN][kMmaTileK];                               // [n][k]
    float n_major[kTileN / kLinearBox][kMmaTileK][kLinearBox];  // [n][k][n]
  };
  __half x[2 /*hi, lo*/][kTileM][kMmaTileK];
};
static_assert(sizeof(MmaStage) == kMmaStageBytes && kMmaTileK == kLinearBox);
constexpr int kMmaXOffset = sizeof(MmaStage) - sizeof(MmaStage::x);  // NVRTC has no offsetof

// Followed by LinearSplitArgs::stages stages.
struct MmaShared {
  Shared tiles;
  Barriers<kMmaMostStages> ring;

  __device__ __forceinline__ MmaStage& stage(int slot) {
    return reinterpret_cast<MmaStage*>(this + 1)[slot];
  }
};
static_assert(sizeof(MmaShared) == kMmaBesideStages && kMmaBesideStages % 128 == 0);

// ---- feeding the ring ---------------------------------------------------------------------------

// A thread's share of the copies, ahead of the stage that is multiplied. A warp copies 16 rows of
// the weight's [n][k], four at once by eight lanes each, or four rows of k of an N-major weight;
// and 16 rows of each half of x, eight at once by four lanes each.
template <bool kNMajor, class X>
struct Feeder {
  static constexpr int kWarps = kMmaThreads / 32;
  static constexpr int kWeightCopies = kMmaTileK * kTileN * 4 / 16 / kMmaThreads;
  static constexpr int kXCopies = kMmaTileK * kTileM * 2 / 16 / kMmaThreads;  // per half
  static constexpr int kParts = kHasLo<X> ? 2 : 1;
  static constexpr int kWeightStep = kNMajor ? 1 : 4;  // lines from one copy to the next
  static constexpr int kRowBytes = kLinearBox * 4;
  static constexpr int kXRowBytes = kMmaTileK * static_cast<int>(sizeof(__half));
  static_assert(kWeightCopies == 4 && kXCopies == 2);
  static_assert(sizeof(MmaStage) < 1 << 16);

  const LinearSplitArgs& args;
  MmaShared& shared;
  int index = 0;
  int left = 0;             // of the tile's k
  bool for_scales = false;  // a recomputed tile is fed twice: first for its scales
  const float* weight = nullptr;
  const __half* x = nullptr;

  bool inside = false;  // all lines that this thread copies are inside the operands
  uint32_t places =
      0;  // offsets of the first copies in a stage: the weight's, and x's from bit 16 on

  // Lines and 16-byte chunks of the thread's first copies in a stage.
  struct Part {
    int weight_line;
    int weight_chunk;
    int x_row;
    int x_chunk;

    static __device__ __forceinline__ Part self() {
      const uint32_t thread = ptx::thread_index();
      const uint32_t warp = thread / 32;
      const uint32_t lane = thread % 32;
      return {static_cast<int>(kNMajor ? warp * kWeightCopies : warp * 16 + lane / 8),
              static_cast<int>(kNMajor ? lane : lane % 8), static_cast<int>(warp * 16 + lane / 4),
              static_cast<int>(lane % 4)};
    }
  };

  __device__ __forceinline__ void find_places() {
    const Part me = Part::self();
    const int swizzled = (me.weight_chunk ^ me.weight_line) % 8;
    const int box = kNMajor ? me.weight_chunk / 8 * (kMmaTileK * kRowBytes) : 0;
    const int weight_place = box + me.weight_line * kRowBytes + swizzled * 16;
    const int x_place = me.x_row * kXRowBytes + (me.x_chunk ^ me.x_row / 2 % 4) * 16;
    places = static_cast<uint32_t>(weight_place | x_place << 16);
  }

  // Starts at the block's first tile, or at the first that is marked to be recomputed.
  __device__ __forceinline__ void start(bool redoing) {
    index = static_cast<int>(blockIdx.x - gridDim.x);
    find_places();
    next_tile(redoing);
  }

  __device__ __forceinline__ void next_tile(bool redoing) {
    do {
      index += static_cast<int>(gridDim.x);
    } while (redoing && index < args.tiles && args.redo[index] == 0);
    for_scales = redoing;
    left = 0;
    if (index < args.tiles) find_tile();
  }

  __device__ __forceinline__ void find_tile() {
    const Part me = Part::self();
    const Tile tile = tile_at(args, index);
    const float* plane = args.weight + offset_of(tile.at, args.weight_plane);
    left = k_of(args.planes, tile.at);
    if constexpr (kNMajor) {
      const int n = tile.n + 4 * me.weight_chunk;
      weight = plane + me.weight_line * args.weight_stride_k + n;
      inside = args.n - n >= 4;
    } else {
      const int n = tile.n + me.weight_line;
      weight = plane + n * args.weight_stride_n + 4 * me.weight_chunk;
      inside = args.n - n > kWeightStep * (kWeightCopies - 1);
    }
    const int m = tile.m + me.x_row;
    const int64_t line = int64_t{tile.plane} * kParts * args.m + m;
    x = static_cast<const __half*>(args.split) + line * args.padded_k + 8 * me.x_chunk;
    inside = inside && args.m - m > 8 * (kXCopies - 1);
  }

  // Copies the next stage, if there is one, to a slot that all warps have released.
  __device__ __forceinline__ void feed(int slot, bool redoing) {
    if (left <= 0) return;
    const uint32_t stage = ptx::shared_address(&shared.stage(slot));
    const uint32_t weight_place = stage + places % (1 << 16);
    const uint32_t x_place = stage + places / (1 << 16) + kMmaXOffset;
    if (inside && left >= kMmaTileK) {
      copy(
          weight_place, x_place,
          [](uint32_t place, const void* from, int) { ptx::copy_async_16(place, from); },
          [](uint32_t place, const void* from, int) { ptx::copy_async_16(place, from); });
    } else {
      copy_what_is_there(weight_place, x_place);
    }
    arrive(slot);
    advance();
    if (left > 0) return;
    if (!for_scales) {
      next_tile(redoing);
    } else {
      for_scales = false;
      find_tile();
    }
  }

  // Whether the next stage is whole and is not the last of its tile.
  __device__ __forceinline__ bool is_plain() const { return inside && left > kMmaTileK; }

  // Copies the next stage, which is plain, to an empty slot if `feeds`; predicated, no branch. The
  // arrival is a separate call: ptxas would turn a predicated one into a branch.
  __device__ __forceinline__ void copy_plain(int slot, bool feeds) {
    const uint32_t stage = ptx::shared_address(&shared.stage(slot));
    const auto copy_one = [=](uint32_t place, const void* from, int) {
      ptx::copy_async_16_if(feeds, place, from);
    };
    copy(stage + places % (1 << 16), stage + places / (1 << 16) + kMmaXOffset, copy_one, copy_one);
    if (feeds) advance();
  }

  __device__ __forceinline__ void arrive(int slot) {
    ptx::mbarrier_arrive_on_copies(ptx::shared_address(&shared.ring.full[slot]));
  }

  __device__ __forceinline__ void advance() {
    weight += kNMajor ? kMmaTileK * args.weight_stride_k : kMmaTileK;
    x += kMmaTileK;
    left -= kMmaTileK;
  }

  // Calls copy_weight and copy_x(place, from, lines after the thread's first) for all of a stage's
  // copies. The swizzle depends only on a row's number modulo 8, or, for x, on half of it modulo 4.
  template <class CopyWeight, class CopyX>
  __device__ __forceinline__ void copy(uint32_t weight_place, uint32_t x_place,
                                       const CopyWeight& copy_weight, const CopyX& copy_x) {
    const int64_t step = kNMajor ? args.weight_stride_k : kWeightStep * args.weight_stride_n;
    const float* from = weight;
#pragma unroll
    for (int i = 0; i < kWeightCopies; ++i) {
      const uint32_t swizzle = kWeightStep * i % 8 * 16;
      copy_weight((weight_place ^ swizzle) + kWeightStep * i * kRowBytes, from, kWeightStep * i);
      from += step;
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const __half* row = x + int64_t{part} * args.m * args.padded_k;
#pragma unroll
      for (int next = 0; next < 8 * kXCopies; next += 8) {
        copy_x(x_place + (part * kTileM + next) * kXRowBytes, row, next);
        row += int64_t{8} * args.padded_k;
      }
    }
  }

  // At edges: fills the rest with zeros. The extents are recomputed: there are no registers to keep
  // them.
  __device__ __forceinline__ void copy_what_is_there(uint32_t weight_place, uint32_t x_place) {
    const Part me = Part::self();
    const Tile tile = tile_at(args, index);
    const int x_rows = args.m - tile.m - me.x_row;
    const int in_k = left - (kNMajor ? me.weight_line : 4 * me.weight_chunk);
    const int in_n = args.n - tile.n - (kNMajor ? 4 * me.weight_chunk : me.weight_line);
    const int elements = kNMajor ? in_n : in_k;
    const int lines = kNMajor ? in_k : in_n;
    copy(
        weight_place, x_place,
        [&](uint32_t place, const float* from, int next) {
          const int bytes = next < lines ? max(0, min(elements, 4)) * 4 : 0;
          ptx::copy_async_16(place, bytes > 0 ? from : args.weight, static_cast<uint32_t>(bytes));
        },
        [&](uint32_t place, const __half* from, int next) {
          const bool reads = next < x_rows;
          ptx::copy_async_16(place, reads ? from : args.split, reads ? 16 : 0);
        });
  }
};

}  // namespace fx_fuser::linear_split
