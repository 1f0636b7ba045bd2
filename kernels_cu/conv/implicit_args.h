// Arguments and shared-memory layout of the kernel of implicit.cuh. Host and device both call
// implicit_geometry.
//
// The convolution is a gemm: its rows are the result's pixels (sample, row, column), its columns
// output channels, its k taps × input channels in *vectors* of 8. A block's *tile* is 128 pixels by
// `columns` channels. A *stage* is 64 of k in rows of 128 bytes: the tile's pixels, and the weights
// unless the block keeps all of its weights in shared memory. Epilogue operands that vary by pixel
// may be loaded through the same ring, in *pieces* of 128 bytes per pixel.
#pragma once

#include <cstdint>

#include "common/divisor.h"
#include "common/operands.h"
#include "conv/conv_operand.h"

namespace fx_fuser {

constexpr int kImplicitWarps = 8;
constexpr int kImplicitThreads = 32 * kImplicitWarps;
constexpr int kImplicitPixels = 128;                                 // per tile
constexpr int kImplicitRow = 128;                                    // bytes
constexpr int kImplicitVector = 8;                                   // elements of x or the weight
constexpr int kImplicitStepVectors = 8;                              // per stage
constexpr int kImplicitPixelBytes = kImplicitPixels * kImplicitRow;  // per stage
constexpr int kImplicitMostStages = 8;
constexpr int kImplicitFewestStages = 3;
constexpr int kImplicitBarrierBytes = 2 * 8 * kImplicitMostStages;
constexpr int kImplicitResident = 2;  // blocks per SM, which bounds a thread's registers
constexpr int kImplicitMaxOperands = kMaxInputs - 1;
constexpr int kImplicitMaxOthers =
    kConvMaxOperands;  // operands that are not leaves; more take too long to compile
constexpr int kImplicitMaxColumns = 128;
constexpr int kImplicitGroupColumns = 64;  // per pass of the epilogue
constexpr int kImplicitMaxGroups = kImplicitMaxColumns / kImplicitGroupColumns;
// In addition to one group's pieces, the ring needs a stage that is being loaded and one that
// slower warps still read.
constexpr int kImplicitMaxHeld = kImplicitMostStages - 2;
constexpr int kImplicitMaxPieces = kImplicitMaxGroups * kImplicitMaxHeld;
constexpr int kImplicitReserved =
    1 << 10;  // bytes of shared memory that the driver reserves per block
// Bound of rows, columns, strides and paddings, so that their sums fit in 16 bits.
constexpr int kImplicitHighest = 1 << 14;

struct ImplicitShape {
  int columns;  // per tile
  int steps;    // of k, one stage each
  int leaves;   // operands with one number per channel, kept for all of the block's tiles
  int held;     // pieces per group of columns, which are in the ring at the same time
};

struct ImplicitGeometry {
  int resident;      // blocks per multiprocessor; 0: nothing fits
  bool keeps;        // whether a block keeps all of its weights in shared memory
  int stages;        // in the ring
  int stage_bytes;   // per stage
  int kept_at;       // where kept weights begin, in bytes
  int ring_at;       // where the ring begins
  int shared_bytes;  // per block
};

// shared_bytes: per multiprocessor. resident: blocks for which it has registers.
constexpr ImplicitGeometry implicit_geometry(const ImplicitShape& shape, int shared_bytes,
                                             int resident) {
  const int kept_at =
      kImplicitBarrierBytes + shape.leaves * shape.columns * static_cast<int>(sizeof(float));
  const int weights = shape.columns * kImplicitRow;  // bytes of a step
  const int fewest =
      shape.held + 2 > kImplicitFewestStages ? shape.held + 2 : kImplicitFewestStages;
  for (; resident > 0; --resident) {
    const int room = shared_bytes / resident - kImplicitReserved;
    for (const bool keeps : {true, false}) {
      if (keeps && shape.steps > room / weights) continue;  // also avoids integer overflow below
      const int ring_at = kept_at + (keeps ? shape.steps * weights : 0);
      const int stage_bytes = kImplicitPixelBytes + (keeps ? 0 : weights);
      const int fit = room > ring_at ? (room - ring_at) / stage_bytes : 0;
      const int stages = fit < kImplicitMostStages ? fit : kImplicitMostStages;
      if (stages < fewest) continue;
      return {
          resident, keeps, stages, stage_bytes, kept_at, ring_at, ring_at + stages * stage_bytes};
    }
  }
  return {};
}

// How the epilogue reads an operand that is not a leaf.
enum class ImplicitMode : uint8_t {
  kRing,      // through the ring, in pieces
  kVectors,   // in aligned vectors of four channels
  kElements,  // element by element
};

struct ImplicitOperand {
  ConvOperand of;
  ImplicitMode mode;
};

// A piece of an operand that is dense like the result, [n][out_h][out_w][o]; at least 16 bytes.
struct ImplicitPiece {
  const void* data;
  int32_t first;  // byte offset in a pixel, from the tile's first channel
  int32_t bytes;  // per pixel, at most 128
  int32_t element_bytes;
};

struct ImplicitArgs {
  const void* x;       // [n, c, h, w]: a pixel's channels adjacent, pixels whole vectors apart
  const void* weight;  // [o][kernel_h][kernel_w][c]
  void* out;           // [n][out_h][out_w][o]
  void* c;             // the convolution itself, likewise, of x's type; or null
  ImplicitOperand operand[kImplicitMaxOperands];
  float scalar[kMaxScalars];
  ImplicitPiece piece[kImplicitMaxPieces];  // in the order of the ring
  int32_t held[kImplicitMaxGroups];         // pieces of each group of columns
  int32_t pieces;                           // in total
  int32_t x_stride[3];                      // of samples, rows, columns, in vectors
  int32_t vectors;                          // in all of k
  int32_t steps;
  int32_t outputs;
  int32_t pixels;           // of the result
  int32_t tiles;            // of pixels
  int32_t workers;          // blocks with the same columns, which share the tiles
  Divisor<uint32_t> parts;  // of the output channels, each a tile's columns
  Divisor<uint32_t> out_w;
  Divisor<uint32_t> out_h;
  Divisor<uint32_t> channel_vectors;  // per tap
  Divisor<uint32_t> kernel_w;
  int32_t h;
  int32_t w;
  int32_t top;
  int32_t left;
  int32_t stride[2];  // down and across
  int32_t dilation[2];
  int32_t stages;
  int32_t stage_bytes;
  int32_t kept_at;
  int32_t ring_at;
  bool keeps;
  bool is_flat;  // x's pixels are the result's, evenly spaced
  bool out_takes_vectors;
  bool c_takes_vectors;
};

}  // namespace fx_fuser
