// The implicit gemm (implicit.cuh): loads from global to shared memory. The ring of stages and the
// cp.async copies that feed it, and the weights that are kept.
#pragma once

#include <type_traits>

#include "common/convert.cuh"
#include "common/ptx.cuh"
#include "conv/implicit_args.h"

namespace fx_fuser::implicit {

// For epilogues with which the kernel would spill: see fx_fuser/native/jobs.py.
#ifdef FX_FUSER_FEW_REGISTERS
constexpr bool kFewRegisters = true;
#else
constexpr bool kFewRegisters = false;
#endif

constexpr int kThreadRows = 4;  // rows of pixels that a thread copies per stage, one vector of each
constexpr int kRowsApart = kImplicitPixels / kThreadRows;
static_assert(kRowsApart * kImplicitStepVectors == kImplicitThreads);

// X: type of x, weight and c. kIsWindow: there are several taps, or padding. The warps are a grid
// of four by two, each with 32 pixels and half of the columns of each group.
template <class X_, class Out_, int kColumnsOf, bool kIsWindow, int kLeavesOf>
struct Shape {
  using X = X_;
  using Out = Out_;
  static constexpr int kColumns = kColumnsOf;
  static constexpr bool kWindow = kIsWindow;
  static constexpr int kLeaves = kLeavesOf;
  static constexpr int kTiles = kColumns / 16;  // of eight columns, per warp
  static constexpr int kGroups = (kColumns + kImplicitGroupColumns - 1) / kImplicitGroupColumns;
  static constexpr int kWeightBytes = kColumns * kImplicitRow;  // per step
  static_assert(sizeof(X) == 2 && kIs16BitFloat<X>);
  static_assert(kColumns % 32 == 0 && kColumns <= kImplicitMaxColumns);

  // A warp's tiles in a group: half as many in the last group if it has 32 columns.
  static __host__ __device__ constexpr int tiles_of(int group) {
    return kTiles - 4 * group < 4 ? 2 : 4;
  }
};

// A thread's vectors in a stage: rows r, r + 32... Vector v of row r is stored at v ^ r % 8, so
// that eight rows' vectors of one k, as ldmatrix reads them, cover all banks.
struct Part {
  int row;
  int vector;

  static __device__ __forceinline__ Part self() {
    const int thread = static_cast<int>(ptx::thread_index());
    return {thread / kImplicitStepVectors, thread % kImplicitStepVectors};
  }
  __device__ __forceinline__ uint32_t place() const {
    return row * kImplicitRow + (vector ^ row % 8) * 16;
  }
  // For pieces, whose readers load up to eight adjacent vectors of two rows, all or every other
  // one.
  __device__ __forceinline__ uint32_t piece_place() const {
    return row * kImplicitRow + (vector ^ row % 2 * 5) * 16;
  }
};

__device__ __forceinline__ bool is_below(int value, int limit) {  // false if negative
  return static_cast<uint32_t>(value) < static_cast<uint32_t>(limit);
}

// The block's first tile of pixels; its first channel.
__device__ __forceinline__ int first_tile(const ImplicitArgs& args) {
  return static_cast<int>(divide(blockIdx.x, args.parts));
}

// Recomputed where it is used: saves a register across the loop.
template <class S>
__device__ __forceinline__ int first_channel(const ImplicitArgs& args) {
  const auto block = static_cast<uint32_t>(ptx::opaque(static_cast<int>(blockIdx.x)));
  return static_cast<int>(block - divide(block, args.parts) * args.parts.size) * S::kColumns;
}

struct Pixel {
  int sample;
  int row;  // of the result
  int column;

  static __device__ __forceinline__ Pixel at(const ImplicitArgs& args, int index) {
    const auto line = static_cast<int>(divide(static_cast<uint32_t>(index), args.out_w));
    const auto sample = static_cast<int>(divide(static_cast<uint32_t>(line), args.out_h));
    return {sample, line - sample * static_cast<int>(args.out_h.size),
            index - line * static_cast<int>(args.out_w.size)};
  }
};

// Copies a step's weights to rows of 128 bytes from `to` on; this thread copies vector `vector` of
// all k. Rows are in the order of a warp's tiles, with channels permuted so that a lane's sums are
// neighbours: a warp's row 8t + 2l + i is channel 2 tiles l + 2t + i.
template <class S>
__device__ __forceinline__ void copy_weights(const ImplicitArgs& args, int vector, uint32_t to) {
  const int row = Part::self().row;
  const int first = first_channel<S>(args);
  const auto* weight = static_cast<const uint4*>(args.weight);
#pragma unroll
  for (int i = 0; i < S::kColumns / kRowsApart; ++i) {
    const int tiles = S::tiles_of(i / 2);
    const int slice = row / (8 * tiles);  // in the last group: the warp's part
    const int tile = row / 8 % tiles;
    const int channel =
        kRowsApart * i + slice * 8 * tiles + row % 8 / 2 * (2 * tiles) + 2 * tile + row % 2 + first;
    const bool reads = vector < args.vectors && channel < args.outputs;
    const int64_t at = reads ? static_cast<int64_t>(channel) * args.vectors + vector : 0;
    ptx::copy_async_16(to + i * kRowsApart * kImplicitRow, weight + at, reads ? 16 : 0);
  }
}

// Vectors of k that products read: rounded up to a product's k, with zeros behind the last one.
__device__ __forceinline__ int filled_vectors(const ImplicitArgs& args) {
  return (args.vectors + 1) / 2 * 2;
}

// Copies the weights to where the block keeps them. Visible after ptx::copy_async_wait().
template <class S>
__device__ __forceinline__ void keep_weights(const ImplicitArgs& args, uint32_t shared) {
  const Part me = Part::self();
#pragma unroll 1
  for (int step = 0; step < args.steps; ++step) {
    const int vector = step * kImplicitStepVectors + me.vector;
    if (vector >= filled_vectors(args)) return;
    copy_weights<S>(args, vector, shared + args.kept_at + step * S::kWeightBytes + me.place());
  }
}

// Feeds the ring in the block's order: for each tile its steps of k, then its pieces.
template <class S>
struct Feeder {
  static constexpr int kNowhere = static_cast<int>(0x80008000);  // outside of any image

  const ImplicitArgs& args;
  int tile;
  int item = 0;  // of the tile
  // For each of the thread's rows: the offset of the first tap's pixel in x, in vectors, and its
  // row and column in the image, in 16 bits each.
  int from[kThreadRows];
  int corner[S::kWindow ? kThreadRows : 1];

  __device__ __forceinline__ explicit Feeder(const ImplicitArgs& of)
      : args(of), tile(first_tile(of)) {
    find_rows();
  }

  __device__ __forceinline__ void find_rows() {
    const int first = tile * kImplicitPixels + Part::self().row;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int pixel = first + i * kRowsApart;
      const bool exists = pixel < args.pixels;
      if (!S::kWindow && args.is_flat) {
        from[i] = exists ? pixel * args.x_stride[2] : -1;
        continue;
      }
      const Pixel at = Pixel::at(args, min(pixel, args.pixels - 1));
      const int y = at.row * args.stride[0] - args.top;
      const int x = at.column * args.stride[1] - args.left;
      from[i] = at.sample * args.x_stride[0] + y * args.x_stride[1] + x * args.x_stride[2];
      if constexpr (S::kWindow) {
        corner[i] =
            exists ? static_cast<int>(static_cast<uint32_t>(y) << 16) | (x & 0xFFFF) : kNowhere;
      } else if (!exists) {
        from[i] = -1;
      }
    }
  }

  __device__ __forceinline__ void copy_step(uint32_t stage) const {
    const Part me = Part::self();
    const int vector = item * kImplicitStepVectors + me.vector;
    if (vector >= filled_vectors(args)) return;
    int tap_row = 0;
    int tap_column = 0;
    int ahead = vector;
    if constexpr (S::kWindow) {
      const auto tap =
          static_cast<int>(divide(static_cast<uint32_t>(vector), args.channel_vectors));
      const auto row = static_cast<int>(divide(static_cast<uint32_t>(tap), args.kernel_w));
      tap_row = row * args.dilation[0];
      tap_column = (tap - row * static_cast<int>(args.kernel_w.size)) * args.dilation[1];
      ahead += tap_row * args.x_stride[1] + tap_column * args.x_stride[2] -
               tap * static_cast<int>(args.channel_vectors.size);
    }
    const auto* x = static_cast<const uint4*>(args.x);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      bool reads = vector < args.vectors;
      if constexpr (S::kWindow) {
        reads = reads && is_below((corner[i] >> 16) + tap_row, args.h) &&
                is_below(static_cast<int16_t>(corner[i]) + tap_column, args.w);
      } else {
        reads = reads && from[i] >= 0;
      }
      ptx::copy_async_16(stage + me.place() + i * kRowsApart * kImplicitRow,
                         x + (reads ? from[i] + ahead : 0), reads ? 16 : 0);
    }
    if (!args.keeps) {
      copy_weights<S>(args, vector, stage + kImplicitPixelBytes + me.place());
    }
  }

  __device__ __forceinline__ void copy_piece(uint32_t stage) const {
    const Part me = Part::self();
    const ImplicitPiece& piece = args.piece[item - args.steps];
    if (me.vector * 16 >= piece.bytes) return;
    const int pixel_bytes = args.outputs * piece.element_bytes;
    const int byte = first_channel<S>(args) * piece.element_bytes + piece.first + me.vector * 16;
    const int first = tile * kImplicitPixels + me.row;
    const auto* data = static_cast<const uint8_t*>(piece.data);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int pixel = first + i * kRowsApart;
      const bool reads = pixel < args.pixels && byte < pixel_bytes;
      const int64_t at = reads ? static_cast<int64_t>(pixel) * pixel_bytes + byte : 0;
      ptx::copy_async_16(stage + me.piece_place() + i * kRowsApart * kImplicitRow, data + at,
                         reads ? 16 : 0);
    }
  }

  // Copies the next item to a slot that all warps have released, if there is one.
  __device__ __forceinline__ void feed(uint32_t stage, uint32_t full) {
    if (tile >= args.tiles) return;
    if (item < args.steps) {
      copy_step(stage);
    } else {
      copy_piece(stage);
    }
    ptx::mbarrier_arrive_on_copies(full);
    if (++item < args.steps + args.pieces) return;
    item = 0;
    tile += args.workers;
    if (tile < args.tiles) find_rows();
  }
};

// A thread's position in the ring: the slot that its warp reads next.
template <class S>
struct Ring {
  const ImplicitArgs& args;
  uint32_t shared;  // the block's shared memory, which begins with the barriers: full, then empty
  Feeder<S> feeder;
  int slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ uint32_t full(int of) const { return shared + 8 * of; }
  __device__ __forceinline__ uint32_t empty(int of) const { return full(kImplicitMostStages + of); }
  __device__ __forceinline__ uint32_t stage(int of) const {
    return shared + args.ring_at + of * args.stage_bytes;
  }

  // Called by one thread; needs a barrier before the others use the ring.
  __device__ __forceinline__ void begin() const {
    for (int i = 0; i < args.stages; ++i) {
      ptx::mbarrier_init(full(i), kImplicitThreads);
      ptx::mbarrier_init(empty(i), kImplicitWarps);
    }
  }

  __device__ __forceinline__ void fill() {
#pragma unroll 1
    for (int i = 0; i + 1 < args.stages; ++i) feeder.feed(stage(i), full(i));
  }

  __device__ __forceinline__ void wait(int of, uint32_t of_phase) const {
    ptx::mbarrier_wait(full(of), of_phase);
  }

  __device__ __forceinline__ void advance(int& of, uint32_t& of_phase) const {
    if (++of == args.stages) {
      of = 0;
      of_phase ^= 1;
    }
  }

  // The warp has read its slot: releases it, waits until all warps have released the previous one,
  // and refills that.
  __device__ __forceinline__ void pass() {
    __syncwarp();
    if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(empty(slot));
    const int last = slot == 0 ? args.stages - 1 : slot - 1;
    ptx::mbarrier_wait(empty(last), slot == 0 ? phase ^ 1 : phase);
    feeder.feed(stage(last), full(last));
    advance(slot, phase);
  }
};

}  // namespace fx_fuser::implicit
