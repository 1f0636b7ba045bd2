// Arguments of the direct convolution kernels, and what units are. The shim fills them (see
// conv_direct_geometry.h), the kernels of conv_direct_*_sm90.cuh read them.
//
// The outputs of an image are numbered row by row over a *strip*, which is all of the image's width
// or a part of it: element e = row * strip width + column. A row of the strip needs `pitch` pixels
// of input, kernel width - 1 more than it has outputs. Numbered with that pitch, as pixels are laid
// out in shared memory, element e is at position e + (kernel width - 1) * row, and each tap of the
// kernel is at a fixed distance from it. So any 256 consecutive positions are one product: every
// tap is a matrix of 256 rows that begins a few pixels further. Sums of positions beyond the end of
// a row are discarded.
//
// A unit is 256 positions. For statistics it may be 512: if rows are wide and few, nearly half of
// the pixels of a 256-position unit are halo, which other units load too.
#pragma once

#include <cstdint>

#include "common/divisor.h"
#include "common/operands.h"
#include "conv/conv_operand.h"

namespace fx_fuser {

constexpr int kConvThreads = 512;
constexpr int kConvStagingThreads = 640;  // with any operands
constexpr int kConvChannels = 8;          // of the input, at most: 16 bytes of 16-bit values
constexpr int kConvGroup = 64;            // output channels per block
constexpr int kConvPositions = 256;       // per unit
constexpr int kConvWidePositions = 512;   // per wide unit
// The tensor core truncates each time it adds: with more taps, sums of terms with one sign lose too
// much accuracy for fp32.
constexpr int kConvMaxTaps = 20;
constexpr int kConvMaxTapsOf16Bits = 25;  // more are untested
constexpr int kConvMaxSteps = (3 * kConvMaxTaps + 1) / 2;
static_assert((kConvMaxTapsOf16Bits + 1) / 2 <= kConvMaxSteps);
constexpr int kConvChunk = 128;    // pixels: one per thread of a loading warpgroup
constexpr int kConvMaxChunks = 6;  // per unit
constexpr int kConvMaxSlots = 8;
constexpr int kConvStagePitch = 264;  // floats between channels of a stage: no bank conflicts
constexpr int kConvStages = 2;        // of floats; twice as many of 16 bits
constexpr int kConvMaxStages = 4;
constexpr int kConvStageUnused = 260;  // marks positions that are not elements
constexpr int kConvStoreWidth = 4;     // elements per store
constexpr int kConvSector = 32;        // bytes of a memory sector
constexpr int kConvTileUnits = 64;     // of 16 bytes: a tap's weights of 64 channels, hi or lo
constexpr int kConvTailBytes = 1024;   // and, per slot and unit:
constexpr int kConvPlaceBytes = kConvPositions / 2 * 4;
// A unit may lack pixels for up to 1 / kConvSparedPart of its positions if that saves loads: those
// are not elements, and products read for them whatever is behind the pixels.
constexpr int kConvSparedPart = 8;
constexpr int kConvZeroBytes = kConvPositions / 2 * 16;  // pixels that one instruction reads
constexpr int64_t kConvHighest = (int64_t{1} << 31) - (1 << 16);  // bound of 32-bit indices
constexpr int kConvMaxShared = 232448;                            // per block, on sm_90
constexpr int kConvStageBytes = kConvStages * kConvGroup * kConvStagePitch * 4;

// Two k-halves of 8 channels each. For weights and for pixels: where the first begins, and how much
// further the second is, in units of 16 bytes, as the halves of matrix descriptors.
struct ConvStep {
  uint32_t weight;
  uint32_t pixels;
};

struct ConvDirectArgs {
  const void* x;       // [n, c, h, w]
  const void* weight;  // [o, c, kernel_h, kernel_w]
  void* out;           // [n, o, out_h, out_w]; all are dense
  void* c;             // the convolution itself, shaped like out, of x's type, or null
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
  Divisor<uint32_t> strip;  // outputs per row of a strip
  Divisor<uint32_t> pitch;
  Divisor<uint32_t> strips;
  int32_t elements;  // per strip
  int32_t advance;   // elements between two units of a strip
  int32_t overlap;   // elements ahead of its own that a unit may store; a power of two minus one
  int32_t lead;      // elements ahead of its own that it computes: at least that many, and even
  Divisor<uint32_t> units_per_strip;
  int32_t units;   // of all samples
  int32_t groups;  // of output channels
  int32_t chunks;  // of pixels that a unit loads
  int32_t slots;
  int32_t slot_bytes;
  int32_t weight_bytes;
  int32_t zero_bytes;   // before the slots
  int32_t place_bytes;  // per element of a stage
  uint32_t phase;       // of out's address modulo 128 bytes, in elements
  bool linear;          // pixels have the same order in memory as in a slot
  bool any_per_pixel;
  bool any_per_sample;
  bool pairs;          // positions 2i and 2i + 1 are neighbours in out, too
  bool c_is_like_out;  // c can be stored in whole vectors at the same elements as out
  int32_t tail_bytes;  // after the slots
  int32_t positions;   // per unit
  int32_t paired;      // consecutive units that share a slot: 1 or 2
};

}  // namespace fx_fuser
