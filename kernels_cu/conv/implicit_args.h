// What the host tells the kernel of implicit.cuh, and how its shared memory is divided: both sides
// ask implicit_geometry.
//
// The convolution is a gemm: its rows are the result's pixels (sample, row, column), its columns
// output channels, its k taps × input channels in *vectors* of 8. A block's *tile* is 128 pixels by
// `columns` channels. A *stage* is 64 of k, rows of 128 bytes: of the tile's pixels, and of the
// weights, unless the block keeps all of its weights. What an epilogue reads pixel by pixel may
// come through the same ring, in *pieces* of 128 bytes for each pixel.
#pragma once

#include <cstdint>

#include "common/divisor.h"
#include "common/operands.h"
#include "conv/conv_operand.h"

namespace fx_fuser {

constexpr int kImplicitWarps = 8;
constexpr int kImplicitThreads = 32 * kImplicitWarps;
constexpr int kImplicitPixels = 128;                                 // of a tile
constexpr int kImplicitRow = 128;                                    // bytes
constexpr int kImplicitVector = 8;                                   // elements of x or the weight
constexpr int kImplicitStepVectors = 8;                              // of a stage
constexpr int kImplicitPixelBytes = kImplicitPixels * kImplicitRow;  // of a stage
constexpr int kImplicitMostStages = 8;
constexpr int kImplicitFewestStages = 3;
constexpr int kImplicitBarrierBytes = 2 * 8 * kImplicitMostStages;
constexpr int kImplicitResident = 2;  // blocks a multiprocessor, which bounds a thread's registers
constexpr int kImplicitMaxOperands = kMaxInputs - 1;
constexpr int kImplicitMaxOthers =
    kConvMaxOperands;  // that are no leaves: more compile for too long
constexpr int kImplicitMaxColumns = 128;
constexpr int kImplicitGroupColumns = 64;  // whose epilogue is one pass
constexpr int kImplicitMaxGroups = kImplicitMaxColumns / kImplicitGroupColumns;
// Beside those of one group there is a stage to come, and one that slower warps still read.
constexpr int kImplicitMaxHeld = kImplicitMostStages - 2;
constexpr int kImplicitMaxPieces = kImplicitMaxGroups * kImplicitMaxHeld;
constexpr int kImplicitReserved = 1
                                  << 10;  // bytes of shared memory that a block has without asking
// Of rows, columns, strides, paddings: their sums are to fit into 16 bits.
constexpr int kImplicitHighest = 1 << 14;

struct ImplicitShape {
  int columns;  // of a tile
  int steps;    // of k, a stage each
  int leaves;   // operands of one number a channel, which are kept for all of the block's tiles
  int held;     // pieces of a group of columns, which are in the ring at once
};

struct ImplicitGeometry {
  int resident;      // blocks a multiprocessor; 0: nothing fits
  bool keeps;        // all of the block's weights
  int stages;        // in the ring
  int stage_bytes;   // of one
  int kept_at;       // where the weights begin that are kept, in bytes
  int ring_at;       // where the ring begins
  int shared_bytes;  // of the block
};

// shared_bytes: of a multiprocessor. resident: blocks that it has registers for.
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
      if (keeps && shape.steps > room / weights) continue;  // nor would the product fit an int
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

// How an operand reaches the epilogue, if it is no leaf.
enum class ImplicitMode : uint8_t {
  kRing,      // in pieces
  kVectors,   // by aligned vectors of four channels
  kElements,  // one by one
};

struct ImplicitOperand {
  ConvOperand of;
  ImplicitMode mode;
};

// Of an operand that is as dense as the result, [n][out_h][out_w][o], 16 bytes and more at once.
struct ImplicitPiece {
  const void* data;
  int32_t first;  // byte of a pixel, beside those of the tile's first channel
  int32_t bytes;  // of a pixel, at most 128
  int32_t element_bytes;
};

struct ImplicitArgs {
  const void* x;       // [n, c, h, w]: a pixel's channels adjacent, pixels whole vectors apart
  const void* weight;  // [o][kernel_h][kernel_w][c]
  void* out;           // [n][out_h][out_w][o]
  void* c;             // the convolution by itself, likewise, of x's type; or null
  ImplicitOperand operand[kImplicitMaxOperands];
  float scalar[kMaxScalars];
  ImplicitPiece piece[kImplicitMaxPieces];  // in the order of the ring
  int32_t held[kImplicitMaxGroups];         // pieces of each group of columns
  int32_t pieces;                           // of all
  int32_t x_stride[3];                      // of samples, rows, columns, in vectors
  int32_t vectors;                          // of all k
  int32_t steps;
  int32_t outputs;
  int32_t pixels;           // of the result
  int32_t tiles;            // of pixels
  int32_t workers;          // blocks with the same columns, among which tiles are dealt out
  Divisor<uint32_t> parts;  // of the output channels, of as many columns as a tile has
  Divisor<uint32_t> out_w;
  Divisor<uint32_t> out_h;
  Divisor<uint32_t> channel_vectors;  // of a tap
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
  bool is_flat;  // pixels of x are those of the result, evenly apart
  bool out_takes_vectors;
  bool c_takes_vectors;
};

}  // namespace fx_fuser
