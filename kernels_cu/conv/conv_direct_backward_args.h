// Arguments of the direct convolution's backward. The shim fills them,
// conv_direct_backward_sm90.cuh reads them.
//
// The input's gradient is computed by positions of the padded image: outputs at 256 positions
// contribute to the input at those positions and in a halo behind them. A block walks through a
// *piece*, some consecutive units of a sample, and keeps incomplete sums in a ring. It recomputes
// the contributions of the units ahead of its piece.
#pragma once

#include <cstdint>

#include "conv/conv_direct_args.h"

namespace fx_fuser {

constexpr int kConvSumWorkers = 3;  // warpgroups that multiply
constexpr int kConvWeightWorkers = 2;
constexpr int kConvInputThreads = 512;
constexpr int kConvBackwardSlots = 4;  // at most; more are untested
constexpr int kConvBackwardTailBytes = kConvTailBytes + kConvBackwardSlots * kConvPlaceBytes;
constexpr int kConvReduceThreads = 512;
constexpr int kConvReduceValues = 32;  // per block
static_assert(kConvMaxTapsOf16Bits >= kConvMaxTaps);
constexpr int kConvBackwardTaps = 9;  // the most per block or product
constexpr int kConvColumns = kConvBackwardTaps * kConvChannels;
// Zeros behind a slot's pixels: dc is zero where products read them, but 0 · NaN is NaN. (In fp32
// the lo of the unit's first pixels is behind the hi halves: finite if x is.)
constexpr int kConvSlotPadBytes = kConvPositions / kConvSparedPart * 16;
constexpr int kConvRing = 1024;  // positions, a power of two
constexpr int kConvCoefficientBytes = 2048;
constexpr int kConvSumBytes = kConvSumWorkers * 128 * 4 * 8;              // four doubles per thread
constexpr int kConvGivenBytes = (kConvPositions + 1) * kConvColumns * 4;  // plus a row of zeros
constexpr int kConvRingBytes = kConvRing * kConvChannels * 4;
static_assert(kConvRing >= kConvMaxChunks * kConvChunk);

constexpr int conv_accumulate_threads(int workers) { return (1 + workers) * 128; }

struct ConvBackwardArgs {
  ConvDirectArgs conv;    // out, c and partial are unused; the operands are the epilogue's
  const void* dy;         // [n, o, out_h, out_w], dense, of x's type
  const float* mean;      // of the convolution; null: no normalisation
  const float* variance;  // likewise
  const float* gamma;     // or null: ones
  const float* bias;      // of the convolution if `mean` includes it, or null
  const float* dgamma;    // in training; else null: mean and variance are constants
  const float* dbeta;
  double* sums;    // [splits, 2, o]: of the gradient, and of the gradient times x̂
  float* dweight;  // [splits, o, c * taps]
  void* dx;        // as x
  float eps;
  float count;            // values per channel
  int32_t tap_groups;     // of the weight's gradient, each with its own blocks
  int32_t group;          // of output channels: dx is accumulated over one launch per group
  int32_t input_slots;    // slots in the kernel of the input's gradient
  int32_t pieces;         // of all samples
  int32_t sample_pieces;  // per sample
  int32_t piece_units;
  int32_t units_ahead;                   // units ahead of a piece that contribute to it
  int32_t offset[kConvMaxTapsOf16Bits];  // of a tap, in positions
  bool pairs;  // positions 2i and 2i + 1 are neighbours in dy, too, and aligned
};

struct ReduceArgs {
  const void* from;  // [splits, values]
  float* to;         // receives the sums of the first `first` values
  float* to_others;  // receives the others'
  int64_t values;
  int64_t first;
  int64_t splits;
  // Null, or receives the first values times gamma / √(variance + eps), a normalisation by
  // constants.
  float* to_scaled;
  const float* variance;  // null: 1
  const float* gamma;     // or null: ones
  float eps;
};

}  // namespace fx_fuser
