// What the host tells the backward of the direct convolution. The shim fills it,
// conv_direct_backward_sm90.cuh reads it.
//
// The gradient of the input is made position by position of the padded image: what the outputs at
// 256 positions give to the input lies within those and a halo behind them. A block walks through
// a *piece*, some consecutive units of a sample, and keeps in a ring what is not complete yet. What
// the units ahead of a piece give to it the block makes again.
#pragma once

#include <cstdint>

#include "conv/conv_direct_args.h"

namespace fx_fuser {

constexpr int kConvSumWorkers = 3;  // warpgroups that multiply
constexpr int kConvWeightWorkers = 2;
constexpr int kConvInputThreads = 512;
constexpr int kConvBackwardSlots = 4;  // at most; more have not been run
constexpr int kConvBackwardTailBytes = kConvTailBytes + kConvBackwardSlots * kConvPlaceBytes;
constexpr int kConvReduceThreads = 512;
constexpr int kConvReduceValues = 32;  // of a block
static_assert(kConvMaxTapsOf16Bits >= kConvMaxTaps);
constexpr int kConvBackwardTaps = 9;  // that a block or a product has at most
constexpr int kConvColumns = kConvBackwardTaps * kConvChannels;
// Behind a slot's pixels, zeros: dc is zero where products read them, but 0 · NaN is not. (In fp32
// what is read behind the hi halves is lo, of the unit's first pixels: finite where x is.)
constexpr int kConvSlotPadBytes = kConvPositions / kConvSparedPart * 16;
constexpr int kConvRing = 1024;  // positions, a power of two
constexpr int kConvCoefficientBytes = 2048;
constexpr int kConvSumBytes = kConvSumWorkers * 128 * 4 * 8;              // four doubles a thread
constexpr int kConvGivenBytes = (kConvPositions + 1) * kConvColumns * 4;  // and a row of zeros
constexpr int kConvRingBytes = kConvRing * kConvChannels * 4;
static_assert(kConvRing >= kConvMaxChunks * kConvChunk);

constexpr int conv_accumulate_threads(int workers) { return (1 + workers) * 128; }

struct ConvBackwardArgs {
  ConvDirectArgs conv;    // out, c and partial are unused; the operands are the epilogue's
  const void* dy;         // [n, o, out_h, out_w], dense, of x's type
  const float* mean;      // of the normalised convolution, and its variance; null: there is no
  const float* variance;  // normalisation
  const float* gamma;     // or null: ones
  const float* bias;      // of the convolution where mean counts it, or null
  const float* dgamma;    // in training; else null, and mean and variance are constants
  const float* dbeta;
  double* sums;    // [splits, 2, o]: of the gradient, and of the gradient times x̂
  float* dweight;  // [splits, o, c * taps]
  void* dx;        // as x
  float eps;
  float count;            // values of a channel
  int32_t tap_groups;     // of the weight's gradient, each of other blocks
  int32_t group;          // of output channels: the input's gradient is made of one after the other
  int32_t input_slots;    // of the input's gradient
  int32_t pieces;         // of all samples
  int32_t sample_pieces;  // of one
  int32_t piece_units;
  int32_t units_ahead;                   // of a piece, that give to it
  int32_t offset[kConvMaxTapsOf16Bits];  // of a tap, in positions
  bool pairs;  // two positions of which the first is even are neighbours in dy, too, and aligned
};

struct ReduceArgs {
  const void* from;  // [splits, values]
  float* to;         // receives the first `first` values' sums
  float* to_others;  // and the others'
  int64_t values;
  int64_t first;
  int64_t splits;
  // Or null: receives the first values times what a normalisation by constants gives them.
  float* to_scaled;
  const float* variance;  // null: 1
  const float* gamma;     // or null: ones
  float eps;
};

}  // namespace fx_fuser
