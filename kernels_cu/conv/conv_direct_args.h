// What the host tells the direct convolution kernels, and what units are. The shim fills it (see
// conv_direct_geometry.h), the kernels of conv_direct_*_sm90.cuh read it.
//
// The outputs of an image are numbered row by row over a *strip*, all of the image's width or a
// part of it: element e = row * strip width + column. A row of the strip needs `pitch` pixels of
// input, kernel width - 1 more than it has outputs. Numbered over that pitch, which is how pixels
// lie in shared memory, element e is at position e + (kernel width - 1) * row, and each tap of the
// kernel is one fixed distance from it. So 256 consecutive positions, wherever they begin, are one
// product: every tap a matrix of 256 rows that begins a few pixels further. Positions beyond the
// end of a row give sums that are thrown away.
//
// A unit is 256 positions. Where only statistics are made it may be 512: nearly half of the pixels
// that 256 positions of few wide rows need, other units need too.
#pragma once

#include <cstdint>

#include "common/divisor.h"
#include "common/operands.h"
#include "conv/conv_operand.h"

namespace fx_fuser {

constexpr int kConvThreads = 512;
constexpr int kConvStagingThreads = 640;  // where operands are any
constexpr int kConvChannels = 8;          // of the input, at most: 16 bytes of 16-bit values
constexpr int kConvGroup = 64;            // output channels of a block
constexpr int kConvPositions = 256;       // of a unit
constexpr int kConvWidePositions = 512;   // of a wide one
// The tensor core truncates each time it adds: with more taps, sums of one sign lose too much for
// fp32.
constexpr int kConvMaxTaps = 20;
constexpr int kConvMaxTapsOf16Bits = 25;  // more have not been run
constexpr int kConvMaxSteps = (3 * kConvMaxTaps + 1) / 2;
static_assert((kConvMaxTapsOf16Bits + 1) / 2 <= kConvMaxSteps);
constexpr int kConvChunk = 128;    // pixels: one a thread of a loading warpgroup
constexpr int kConvMaxChunks = 6;  // of a unit
constexpr int kConvMaxSlots = 8;
constexpr int kConvStagePitch = 264;  // floats between the channels of a staged unit: no conflicts
constexpr int kConvStages = 2;        // of floats; of 16 bits twice as many
constexpr int kConvMaxStages = 4;
constexpr int kConvStageUnused = 260;  // marks positions that are no elements
constexpr int kConvStoreWidth = 4;     // elements that are stored at once
constexpr int kConvSector = 32;        // bytes that memory writes at once
constexpr int kConvTileUnits = 64;     // of 16 bytes: a tap's weights of 64 channels, hi or lo
constexpr int kConvTailBytes = 1024;   // and of each slot
constexpr int kConvPlaceBytes = kConvPositions / 2 * 4;
// The part of its positions that a unit may have too few pixels for, where that saves loads: those
// count nothing, and what products read for them lies behind the pixels.
constexpr int kConvSparedPart = 8;
constexpr int kConvZeroBytes = kConvPositions / 2 * 16;  // pixels that one instruction reads
constexpr int64_t kConvHighest = (int64_t{1} << 31) - (1 << 16);  // of what has 32 bits
constexpr int kConvMaxShared = 232448;                            // that a block of sm_90 can have
constexpr int kConvStageBytes = kConvStages * kConvGroup * kConvStagePitch * 4;

// Two k-halves of 8 channels each: where the first begins and how much further the second is, for
// weights and pixels, in 16 bytes, as the halves of matrix descriptors.
struct ConvStep {
  uint32_t weight;
  uint32_t pixels;
};

struct ConvDirectArgs {
  const void* x;       // [n, c, h, w]
  const void* weight;  // [o, c, kernel_h, kernel_w]
  void* out;           // [n, o, out_h, out_w]; of all, dense
  void* c;             // the convolution by itself, shaped like out, of x's type, or null
  void* partial;       // statistics: [o, splits] moments
  ConvOperand operand[kConvMaxOperands];
  float scalar[kMaxScalars];
  ConvStep step[kConvMaxSteps];
  int32_t steps;
  int32_t samples;
  int32_t channels;
  int32_t h;
  int32_t w;
  int32_t outputs;
  int32_t out_h;
  int32_t out_w;
  int32_t kernel_h;
  int32_t kernel_w;
  int32_t top;
  int32_t left;
  Divisor<uint32_t> strip;  // outputs in a row of a strip
  Divisor<uint32_t> pitch;
  Divisor<uint32_t> strips;
  int32_t elements;  // of a strip
  int32_t advance;   // elements between two units of a strip
  int32_t overlap;   // elements before those, that may be a unit's; a power of two less one
  int32_t lead;      // elements before those, that it makes: enough, and even
  Divisor<uint32_t> units_per_strip;
  int32_t units;   // of all samples
  int32_t groups;  // of output channels
  int32_t chunks;  // pixels that a unit loads, in kConvChunk
  int32_t slots;
  int32_t slot_bytes;
  int32_t weight_bytes;
  int32_t zero_bytes;   // before the slots
  int32_t place_bytes;  // of a stage's element
  uint32_t phase;       // elements of out's type from a multiple of 128 bytes to where out begins
  bool linear;          // pixels lie in memory as in a slot
  bool any_per_pixel;
  bool any_per_sample;
  bool pairs;          // two positions of which the first is even are neighbours in out, too
  bool c_is_like_out;  // where whole vectors can be stored
  int32_t tail_bytes;  // after the slots
  int32_t positions;   // of a unit
  int32_t paired;      // units, one after the other, that share a slot: 1 or 2
};

}  // namespace fx_fuser
