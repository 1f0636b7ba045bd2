// The grouped convolution (grouped.cuh): what a block keeps in shared memory, and the copies of
// patches of x to it.
#pragma once

#include <type_traits>

#include "common/convert.cuh"
#include "common/ptx.cuh"
#include "conv/grouped_args.h"

namespace fx_fuser::grouped {

// X: type of x, weight and c. kTilesOf: products side by side that have one unit's pixels.
// kIsMixed: a unit has several groups.
template <class X_, class Out_, int kTilesOf, bool kIsMixed, int kLeavesOf>
struct Shape {
  using X = X_;
  using Out = Out_;
  static constexpr int kTiles = kTilesOf;
  static constexpr bool kMixed = kIsMixed;
  static constexpr int kLeaves = kLeavesOf;
  static constexpr int kUnits = grouped_units(kTiles);
  static constexpr int kJobTiles = grouped_job_tiles(kTiles);
  static constexpr int kJobChannels = 8 * kJobTiles;
  static constexpr int kStageBytes = grouped_stage_bytes(kTiles);  // of a warp
  static_assert(sizeof(X) == 2 && kIs16BitFloat<X>);
  static_assert(kTiles >= 1 && kTiles <= kGroupedMostTiles);
};

__device__ __forceinline__ bool is_below(int value, int limit) {  // false if negative
  return static_cast<uint32_t>(value) < static_cast<uint32_t>(limit);
}

// The block's part of the channels.
struct Slice {
  int unit;  // the first
  int tile;  // of the unit, the first

  static __device__ __forceinline__ Slice self(const GroupedPatches& args) {
    const auto slice =
        static_cast<int>(blockIdx.x - divide(blockIdx.x, args.slices) * args.slices.size);
    return {slice / args.splits * args.slice_units, slice % args.splits * args.slice_tiles};
  }
};

// The slice's rows of weights are output channels: rows 8 t... of each unit are its tile t, rounded
// up to a job's. Returns the output channel, -1 if there is none.
template <class S>
__device__ __forceinline__ int channel_of(const GroupedPatches& args, const Slice& slice, int row) {
  const int rows = (args.slice_tiles + S::kTiles - 1) / S::kTiles * S::kTiles * 8;  // of a unit
  const int unit = slice.unit + row / rows;
  const int tile = slice.tile + row % rows / 8;
  const bool exists =
      unit < args.units && tile < args.unit_tiles && tile - slice.tile < args.slice_tiles;
  return exists ? (unit * args.unit_tiles + tile) * 8 + row % 8 : -1;
}

template <class S>
__device__ __forceinline__ int rows_of(const GroupedArgs& args) {
  return static_cast<int>(args.jobs.size) * S::kJobChannels;
}

// Copies the slice's weights, [row][tap][input channel of the unit], zeros where channels are of
// different groups. Visible after ptx::copy_async_wait() and a barrier.
template <class S>
__device__ __forceinline__ void keep_weights(const GroupedArgs& args, uint8_t* storage) {
  using X = typename S::X;
  const Slice slice = Slice::self(args);
  const int vectors = (args.k_vectors + 1) / 2 * 2;
  const int count = rows_of<S>(args) * vectors;
  const auto* weight = static_cast<const X*>(args.weight);
  uint8_t* to = storage + args.weights_at;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kGroupedThreads) {
    const int row = i / vectors;
    const int vector = i % vectors;
    const int channel = channel_of<S>(args, slice, row);
    const bool exists = channel >= 0 && vector < args.k_vectors;
    uint8_t* at = to + row * args.weight_pitch + vector * 16;
    if (args.weight_takes_vectors) {
      const int64_t from = exists ? int64_t{channel} * args.k_vectors + vector : 0;
      ptx::copy_async_16(ptx::shared_address(at), reinterpret_cast<const uint4*>(weight) + from,
                         exists ? 16 : 0);
      continue;
    }
    const int tap = vector / args.unit_vectors;
    const int first = vector % args.unit_vectors * kGroupedVector;
    const int group = channel % (args.unit_tiles * 8) / args.group_outputs;
    const int64_t from = channel / args.group_outputs * args.weight_group +
                         channel % args.group_outputs * args.weight_stride[0] +
                         tap / args.kernel_w * args.weight_stride[2] +
                         tap % args.kernel_w * args.weight_stride[3];
    auto* elements = reinterpret_cast<X*>(at);
#pragma unroll
    for (int e = 0; e < kGroupedVector; ++e) {
      const int input = first + e - group * args.group_inputs;
      const bool is_own = exists && is_below(input, args.group_inputs);
      elements[e] = is_own ? weight[from + input * args.weight_stride[1]] : convert<X>(0.0f);
    }
  }
}

// The output channel of each row of weights.
template <class S>
__device__ __forceinline__ void keep_channels(const GroupedArgs& args, uint8_t* storage) {
  auto* to = reinterpret_cast<int32_t*>(storage + args.channels_at);
  const Slice slice = Slice::self(args);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < rows_of<S>(args); i += kGroupedThreads) {
    to[i] = channel_of<S>(args, slice, i);
  }
}

// Where each vector of k is from a product's pixel, in bytes.
__device__ __forceinline__ void keep_taps(const GroupedPatches& args, uint8_t* storage) {
  auto* to = reinterpret_cast<int32_t*>(storage + args.taps_at);
  const int vectors = (args.k_vectors + 1) / 2 * 2;
  const auto stride = static_cast<int>(args.stride_w.size);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < vectors; i += kGroupedThreads) {
    const int vector = min(i, args.k_vectors - 1);
    const int tap = vector / args.unit_vectors;
    const int row = tap / args.kernel_w * args.dilation[0];
    const int column = tap % args.kernel_w * args.dilation[1];
    const int pixel = (row * stride + column % stride) * args.phase_columns + column / stride;
    to[i] = pixel * args.pixel_bytes + vector % args.unit_vectors * 16;
  }
}

// Positions in a tile or a patch are packed: column, row and image, each below a guard bit, so that
// one subtraction compares all three.
constexpr uint32_t kGuards = 1u << (kGroupedLineAt - 1) | 1u << (kGroupedImageAt - 1) | 1u << 31;
constexpr uint32_t kNowhere = ~kGuards;  // beyond every limit

__device__ __forceinline__ uint32_t pack_position(int image, int row, int column) {
  return static_cast<uint32_t>(image << kGroupedImageAt | row << kGroupedLineAt | column);
}

// Is every part of `position` at most that of `limit`?
__device__ __forceinline__ bool is_within(uint32_t position, uint32_t limit) {
  return (((limit | kGuards) - position) & kGuards) == kGuards;
}

// Of a pixel of the result, in a tile: its position, and where it is from the tile's first pixel,
// in elements.
struct Place {
  uint32_t position;
  int32_t to;
};

// Of a pixel of a patch: where it is in x, in vectors, and in shared memory, in bytes, from the
// patch's first pixel; its position.
struct alignas(16) Source {
  int32_t from;
  int32_t to;
  uint32_t position;
};

// out_stride: of samples, rows and columns.
__device__ __forceinline__ void keep_places(const GroupedPatches& args, const int64_t* out_stride,
                                            uint8_t* storage) {
  auto* first_tap = reinterpret_cast<int32_t*>(storage + args.first_taps_at);
  auto* place = reinterpret_cast<Place*>(storage + args.places_at);
  const int plane = args.tile_rows * args.tile_columns;
  const int pitch = args.phase_columns * static_cast<int>(args.stride_w.size);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < args.batches * kGroupedRows * kGroupedRow;
       i += kGroupedThreads) {
    const bool exists = i < plane * args.tile_images;
    const int pixel = exists ? i : 0;
    const int image = pixel / plane;
    const int row = pixel % plane / args.tile_columns;
    const int column = pixel % args.tile_columns;
    const int line = image * static_cast<int>(args.patch_rows.size) + row * args.stride[0];
    first_tap[i] = (line * pitch + column) * args.pixel_bytes;
    place[i] = {
        exists ? pack_position(image, row, column) : kNowhere,
        static_cast<int32_t>(image * out_stride[0] + row * out_stride[1] + column * out_stride[2])};
  }
}

__device__ __forceinline__ int patch_pixels(const GroupedPatches& args) {
  return static_cast<int>(args.patch_columns.size * args.patch_rows.size) * args.tile_images;
}

__device__ __forceinline__ void keep_sources(const GroupedPatches& args, uint8_t* storage) {
  auto* source = reinterpret_cast<Source*>(storage + args.sources_at);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < patch_pixels(args); i += kGroupedThreads) {
    const uint32_t line = divide(static_cast<uint32_t>(i), args.patch_columns);
    const auto image = static_cast<int>(divide(line, args.patch_rows));
    const auto column = static_cast<int>(i - line * args.patch_columns.size);
    const auto row = static_cast<int>(line - image * args.patch_rows.size);
    const uint32_t across = divide(static_cast<uint32_t>(column), args.stride_w);
    const uint32_t phase = column - across * args.stride_w.size;
    const uint32_t to = (line * args.stride_w.size + phase) * args.phase_columns + across;
    source[i] = {image * args.x_stride[0] + row * args.x_stride[1] + column * args.x_stride[2],
                 static_cast<int32_t>(to) * args.pixel_bytes, pack_position(image, row, column)};
  }
}

// The first pixel of a tile.
struct Corner {
  int image;
  int row;
  int column;

  static __device__ __forceinline__ Corner of(const GroupedPatches& args, int tile) {
    const auto at = static_cast<uint32_t>(tile);
    const uint32_t line = divide(at, args.tiles_x);
    const uint32_t images = divide(line, args.tiles_y);
    return {static_cast<int>(images) * args.tile_images,
            static_cast<int>(line - images * args.tiles_y.size) * args.tile_rows,
            static_cast<int>(at - line * args.tiles_x.size) * args.tile_columns};
  }

  // The tile's last pixel in the result, as a position in the tile.
  __device__ __forceinline__ uint32_t limit(const GroupedPatches& args) const {
    return pack_position(min(args.samples - image, args.tile_images) - 1,
                         min(args.out_h - row, args.tile_rows) - 1,
                         min(args.out_w - column, args.tile_columns) - 1);
  }
};

// The pixels of a patch that are in the image, of one dimension: first to last. `at`: where the
// patch begins.
struct Inside {
  int first;
  int last;

  static __device__ __forceinline__ Inside of(int at, int size, uint32_t length) {
    const Inside found{max(-at, 0), min(size - at, static_cast<int>(length)) - 1};
    return found.first <= found.last ? found : Inside{kGroupedMostLines - 1, 0};
  }
};

// Copies a tile's patch of x, zeros outside of the images, kAtOnce vectors of a thread without a
// branch. Visible after ptx::copy_async_wait() and a barrier.
template <int kAtOnce>
__device__ __forceinline__ void feed(const GroupedPatches& args, const uint8_t* storage, int tile,
                                     uint32_t patch) {
  const Corner corner = Corner::of(args, tile);
  const int top = corner.row * args.stride[0] - args.top;
  const int left = corner.column * args.stride[1] - args.left;
  const int first = Slice::self(args).unit * args.unit_vectors;
  const int behind = args.units * args.unit_vectors - first;
  const auto* source = reinterpret_cast<const Source*>(storage + args.sources_at);
  const Inside rows = Inside::of(top, args.h, args.patch_rows.size);
  const Inside columns = Inside::of(left, args.w, args.patch_columns.size);
  const uint32_t from = pack_position(0, rows.first, columns.first);
  const uint32_t last = pack_position(min(args.samples - corner.image, args.tile_images) - 1,
                                      rows.last, columns.last);
  const auto* x = static_cast<const uint4*>(args.x);
  const int origin =
      corner.image * args.x_stride[0] + top * args.x_stride[1] + left * args.x_stride[2] + first;
  const int count = patch_pixels(args) * static_cast<int>(args.slice_vectors.size);
#pragma unroll kAtOnce
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kGroupedThreads) {
    const uint32_t pixel = divide(static_cast<uint32_t>(i), args.slice_vectors);
    const auto vector = static_cast<int>(i - pixel * args.slice_vectors.size);
    const Source of = source[pixel];
    const bool reads =
        vector < behind && is_within(from, of.position) && is_within(of.position, last);
    ptx::copy_async_16(patch + of.to + vector * 16, x + (reads ? origin + of.from + vector : 0),
                       reads ? 16 : 0);
  }
}

}  // namespace fx_fuser::grouped
