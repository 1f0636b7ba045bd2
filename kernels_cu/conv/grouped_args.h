// Arguments of the grouped convolution's kernel (grouped.cuh). The shim fills them
// (host/grouped.h).
//
// A *unit* is the fewest groups whose input channels fill *vectors* of 8 and whose output channels
// fill *columns* of 8, which a product has. Of a unit of several groups the weights are
// block-diagonal. A block's *slice* is some whole units, or some columns of one unit; its *tile* is
// a patch of output pixels: images × rows × columns. A *job* is what a warp computes at once: two
// rows of products, 16 pixels each, by up to 32 channels.
#pragma once

#include <cstdint>

#include "common/divisor.h"
#include "common/operands.h"
#include "conv/conv_operand.h"

namespace fx_fuser {

constexpr int kGroupedWarps = 8;
constexpr int kGroupedThreads = 32 * kGroupedWarps;
constexpr int kGroupedVector = 8;        // elements of x or the weight
constexpr int kGroupedRow = 16;          // pixels of a product
constexpr int kGroupedRows = 2;          // of products, in a job
constexpr int kGroupedMostTiles = 4;     // products side by side in a job
constexpr int kGroupedMostResident = 4;  // blocks per multiprocessor
constexpr int kGroupedMaxOperands = kMaxInputs - 1;
constexpr int kGroupedMaxOthers = kConvMaxOperands;  // operands that are not leaves
constexpr int kGroupedReserved = 1 << 10;            // bytes that the driver reserves per block
constexpr int kGroupedMostPixels = 512;              // per tile

// Where row and image are in a packed position, of a tile or a patch; below each part and at the
// top is a guard bit.
constexpr int kGroupedLineAt = 11;
constexpr int kGroupedImageAt = 22;
constexpr int kGroupedMostLines = 1 << (kGroupedLineAt - 1);  // of a patch
constexpr int kGroupedMostImages = 1 << 8;
static_assert(kGroupedMostPixels < kGroupedMostLines);

// Units in a job, given the products side by side of one.
constexpr int grouped_units(int tiles) { return tiles > 2 ? 1 : kGroupedMostTiles / tiles; }
constexpr int grouped_job_tiles(int tiles) { return tiles * grouped_units(tiles); }

// Floats between a warp's rows in its stage: four rows begin in different quarters of the banks.
constexpr int grouped_stage_pitch(int tiles) { return tiles % 4 == 0 ? 8 * tiles + 8 : 8 * tiles; }
constexpr int grouped_stage_bytes(int tiles) {
  return kGroupedRow * grouped_stage_pitch(grouped_job_tiles(tiles)) *
         static_cast<int>(sizeof(float));
}

struct GroupedOperand {
  ConvOperand of;
  bool takes_vectors;  // every four channels of a pixel are aligned
};

// The pixels of x that a block reads, and how it divides them.
struct GroupedPatches {
  const void* x;        // [n, c, h, w]: a pixel's channels adjacent, pixels whole vectors apart
  int32_t x_stride[3];  // of samples, rows, columns, in vectors
  int32_t samples;
  int32_t h;
  int32_t w;
  int32_t outputs;
  int32_t out_h;
  int32_t out_w;
  int32_t kernel_h;
  int32_t kernel_w;
  int32_t stride[2];  // down and across
  int32_t dilation[2];
  int32_t top;
  int32_t left;
  int32_t group_inputs;   // channels of a group
  int32_t group_outputs;  // of the result
  int32_t units;
  int32_t unit_vectors;  // per pixel
  int32_t unit_tiles;    // of 8 output channels
  int32_t k_vectors;     // taps × unit_vectors
  // Of a slice.
  Divisor<uint32_t> slices;
  int32_t splits;                   // slices per unit, else 1
  int32_t slice_units;              // else 1
  int32_t slice_tiles;              // of each of its units
  Divisor<uint32_t> slice_vectors;  // per pixel
  // Of a tile.
  int32_t tile_rows;
  int32_t tile_columns;
  int32_t tile_images;
  Divisor<uint32_t> tiles_x;
  Divisor<uint32_t> tiles_y;
  int32_t tiles;
  int32_t workers;                  // blocks with the same slice, which share the tiles
  int32_t batches;                  // pairs of rows of products
  Divisor<uint32_t> patch_columns;  // of x
  Divisor<uint32_t> patch_rows;
  // Across, every stride-th pixel of a patch lies side by side, so that a product's pixels do.
  Divisor<uint32_t> stride_w;
  int32_t phase_columns;
  int32_t pixel_bytes;  // an odd number of vectors, so that eight pixels cover all banks
  int32_t buffers;      // of patches: 1 or 2
  // Bytes in shared memory.
  int32_t taps_at;
  int32_t first_taps_at;
  int32_t places_at;
  int32_t sources_at;
  int32_t patch_at;
  int32_t patch_bytes;
};

struct GroupedArgs : GroupedPatches {
  const void* weight;  // [group, o / groups, c / groups, kernel_h, kernel_w], of the first tap
  void* out;           // [n, o, out_h, out_w], a pixel's channels adjacent, 16-byte aligned
  void* c;             // the convolution itself, likewise, of x's type; or null
  GroupedOperand operand[kGroupedMaxOperands];
  float scalar[kMaxScalars];
  int64_t out_stride[3];  // of samples, rows, columns, in elements; also of c
  int64_t weight_stride[4];
  int64_t weight_group;         // stride
  bool weight_takes_vectors;    // [o][kernel_h][kernel_w][c / groups], a tap's channels are vectors
  Divisor<uint32_t> jobs;       // of a slice, for two rows of products
  Divisor<uint32_t> unit_jobs;  // of those, of one unit; else 1
  // Bytes in shared memory. Leaves are first.
  int32_t weight_pitch;  // of output channels, an odd number of vectors
  int32_t channels_at;
  int32_t weights_at;
  int32_t stage_at;
};

// Of the kernels of grouped_weight.cuh. A *role* is some pairs of vectors of k, for all of a
// slice's columns of one unit; `roles` warps have one each, the next ones the same for other
// pixels, their *share*.

// Pairs of a role: as many as leave registers.
constexpr int grouped_weight_steps(int tiles, bool is_mixed) {
  return tiles == 3 || (tiles > 3 && is_mixed) ? 4 : 5;
}
constexpr int kGroupedSumElements = 32;  // of a block that adds up partial sums

struct GroupedWeightArgs : GroupedPatches {
  const void* dz;                    // [n, o, out_h, out_w], as x
  int32_t dz_stride[3];              // of samples, rows, columns, in vectors
  Divisor<uint32_t> unit_divisor;    // by unit_vectors
  Divisor<uint32_t> group_divisor;   // by group_inputs
  Divisor<uint32_t> output_divisor;  // by group_outputs
  float* partial;                    // [worker][share][o][kernel_h][kernel_w][c / groups]
  int32_t roles;
  int32_t roles_of_unit;
  int32_t shares;
  Divisor<uint32_t> dz_vectors;  // of a slice, per pixel
  int32_t dz_pitch;              // of pixels, an odd number of vectors
  int32_t pixels_at;
  int32_t dz_at;
  int32_t dz_bytes;
};

struct GroupedSumArgs {
  const float* partial;  // [count][o][tap][input]
  void* dw;
  int64_t stride[4];  // of dw
  int64_t elements;
  int32_t count;
  int32_t inputs;
  int32_t kernel_h;
  int32_t kernel_w;
};

}  // namespace fx_fuser
