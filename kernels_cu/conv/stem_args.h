// Arguments of the kernels of stem.cuh, and how a stem (a net's first convolution) is divided. Host
// and device both call stem_geometry.
//
// A *tile* is 16 columns by some rows of the result; its *patch* is the part of x that it reads. A
// warp computes some of a tile's rows, 16 positions each, for a *group* of output channels at once,
// by mma of 16 × 8. A patch's rows are in shared memory with their channels innermost, so that a
// filter row is a sequence of adjacent elements, and the products' k runs over filter rows in
// *eights* of elements. The last eight of a row reads on into the next pixel; those elements are
// ignored.
#pragma once

#include <cstdint>

#include "common/operands.h"

namespace fx_fuser {

constexpr int kStemWarps = 4;
constexpr int kStemThreads = 32 * kStemWarps;
constexpr int kStemColumns = 16;  // per tile
constexpr int kStemMaxChannels = 4;
constexpr int kStemMaxKernel = 7;
constexpr int kStemMaxStride = 4;
constexpr int kStemMaxOperands = kMaxInputs - 1;
constexpr int kStemShared = 99 << 10;      // bytes that a block can have on every GPU from sm_80 on
constexpr int kStemPatches = 40 << 10;     // bytes of both patches, unless the tile is minimal
constexpr int64_t kStemHighest = 1 << 30;  // bound of 32-bit indices

// What a kernel is compiled for.
struct StemShape {
  int channels;
  int kernel_h;
  int kernel_w;
  int stride;  // in both directions
  int outputs;
};

struct StemGeometry {
  int vector;  // elements of x per copy
  int eights;  // per filter row
  int steps;   // of k: two eights each in 16 bits, one in fp32
  int tiles;   // of 8 output channels, per group
  int groups;  // per block, which has the weights of all of them
  int parts;   // blocks per tile of the result, with different groups
  int warp_rows;
  int patch_rows;
  int patch_columns;
  int pitch;         // elements between the patch's rows
  int weight_words;  // per group
  int shared_bytes;
  int resident;  // blocks for which a multiprocessor has registers

  constexpr int rows() const { return kStemWarps * warp_rows; }
  constexpr int patch() const { return patch_rows * pitch; }
  constexpr int group_channels() const { return 8 * tiles; }
  constexpr int block_channels() const { return groups * group_channels(); }
};

// Whether there is a kernel for the shape. A lane reads pairs of elements: with an odd number of
// elements between two positions, some pairs would begin in the middle of a word.
constexpr bool stem_takes(const StemShape& shape) {
  return shape.channels >= 1 && shape.channels <= kStemMaxChannels && shape.kernel_h >= 1 &&
         shape.kernel_h <= kStemMaxKernel && shape.kernel_w >= 1 &&
         shape.kernel_w <= kStemMaxKernel && shape.stride >= 2 && shape.stride <= kStemMaxStride &&
         shape.stride * shape.channels % 2 == 0 && shape.outputs >= 1;
}

constexpr int stem_ceil_div(int value, int unit) { return (value + unit - 1) / unit; }

constexpr StemGeometry stem_divided(const StemShape& shape, int x_bytes, int operands, int tiles,
                                    int warp_rows) {
  StemGeometry made{};
  made.tiles = tiles;
  made.warp_rows = warp_rows;
  made.vector = 16 / x_bytes;
  // With an odd number of channels, rows may begin in the middle of a word.
  made.eights = stem_ceil_div(shape.kernel_w * shape.channels + shape.channels % 2, 8);
  const int all_eights = shape.kernel_h * made.eights;
  made.steps = x_bytes == 2 ? stem_ceil_div(all_eights, 2) : all_eights;
  made.patch_rows = (made.rows() - 1) * shape.stride + shape.kernel_h;
  made.patch_columns = (kStemColumns - 1) * shape.stride + shape.kernel_w;
  const int last = (kStemColumns - 1) * shape.stride * shape.channels + 8 * made.eights;
  made.pitch = stem_ceil_div(made.vector - 2 + last, made.vector) * made.vector;
  made.weight_words = made.steps * tiles * 64;
  const int all_groups = stem_ceil_div(shape.outputs, made.group_channels());
  const int patches = 2 * made.patch() * x_bytes;
  const int of_group = 4 * (made.weight_words + operands * made.group_channels());
  const int room = patches + of_group < kStemShared ? (kStemShared - patches) / of_group : 1;
  made.parts = stem_ceil_div(all_groups, room);
  made.groups = stem_ceil_div(all_groups, made.parts);
  made.shared_bytes = patches + made.groups * of_group;
  const int sums = 4 * tiles * warp_rows;  // per thread; its other registers double in fp32
  made.resident = sums > 64 ? 2 : x_bytes == 4 && sums > 32 ? 3 : 4;
  return made;
}

// For a shape that stem_takes.
constexpr StemGeometry stem_geometry(const StemShape& shape, int x_bytes, int operands) {
  int tiles = 8;
  // A group costs its products, plus about two tiles' worth of time to read pixels.
  const auto cost = [&](int n) { return stem_ceil_div(shape.outputs, 8 * n) * (n + 2); };
  for (int n = 6; n >= 2; n -= 2) {
    if (cost(n) < cost(tiles)) tiles = n;
  }
  // In fp32 a thread has twice the pixels and weights, in addition to its sums.
  int warp_rows = x_bytes == 4 && tiles > 2 ? 2 : 4;
  while (warp_rows > 1 &&
         2 * stem_divided(shape, x_bytes, operands, tiles, warp_rows).patch() * x_bytes >
             kStemPatches) {
    warp_rows /= 2;
  }
  while (tiles > 2 &&
         stem_divided(shape, x_bytes, operands, tiles, warp_rows).shared_bytes > kStemShared) {
    tiles -= 2;
  }
  return stem_divided(shape, x_bytes, operands, tiles, warp_rows);
}

struct StemArgs {
  const void* x;       // [n, c, h, w], any strides
  const void* weight;  // [o, c, kernel_h, kernel_w], any strides
  void* out;           // [n, o, out_h, out_w], dense; or null
  void* c;             // the convolution itself, likewise, of x's type; or null
  int64_t x_stride[4];
  int64_t weight_stride[4];
  Strided<1> operand[kStemMaxOperands];  // [o]
  float scalar[kMaxScalars];
  int32_t h;
  int32_t w;
  int32_t out_h;
  int32_t out_w;
  int32_t top;
  int32_t left;
  int32_t tiles_x;
  int32_t tiles_y;
  int32_t tiles;           // of all samples
  int32_t delta;           // elements in a patch's row ahead of its first pixel
  bool copies_vectors;     // x's rows are dense, channels innermost, and whole vectors
  bool out_takes_vectors;  // its rows, or its pixels if channels are innermost
  bool c_takes_vectors;
};

}  // namespace fx_fuser
