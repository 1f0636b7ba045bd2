// What the host tells the backward of the direct convolution. The shim fills it,
// conv_direct_backward_sm90.cuh reads it.
//
// The gradient of the input is made position by position of the padded image: what the outputs at
// 256 positions give to the input lies within those and a halo behind them. A block walks through
// a *piece*, some consecutive units of a sample, and keeps in a ring what is not complete yet. What
// the units ahead of a piece give to it the block makes again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "conv_direct_args.h"

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

inline int conv_accumulate_bytes(const ConvDirectArgs& args) {
  return conv_shared_bytes(args, /*stages=*/false) + kConvCoefficientBytes + kConvSumBytes;
}

inline int conv_input_bytes(const ConvDirectArgs& args) {
  return conv_shared_bytes(args, /*stages=*/false) + kConvCoefficientBytes + kConvGivenBytes +
         kConvRingBytes;
}

// As conv_geometry, for the sums and the weight's gradient and, if `with_input`, the input's.
inline std::optional<ConvBackwardArgs> conv_backward_geometry(const ConvShape& shape, int x_bytes,
                                                              bool with_input,
                                                              int64_t multiprocessors) {
  const auto conv = conv_geometry(shape, x_bytes, /*out_bytes=*/0);
  if (!conv) return std::nullopt;
  ConvBackwardArgs args{};
  args.conv = *conv;
  args.conv.slots = std::min(args.conv.slots, kConvBackwardSlots);
  args.conv.slot_bytes += kConvSlotPadBytes;
  args.conv.tail_bytes = kConvBackwardTailBytes;
  while (conv_accumulate_bytes(args.conv) > kConvMaxShared) --args.conv.slots;
  // A product warpgroup has one slot and waits for its next.
  if (args.conv.slots <= kConvSumWorkers) return std::nullopt;
  args.count = static_cast<float>(static_cast<double>(shape.samples) *
                                  static_cast<double>(shape.out_h() * shape.out_w()));
  const int taps = conv->kernel_h * conv->kernel_w;
  args.tap_groups = static_cast<int32_t>(ceil_div(taps, kConvBackwardTaps));
  for (int tap = 0; tap < taps; ++tap) {
    args.offset[tap] =
        tap / conv->kernel_w * static_cast<int>(conv->pitch.size) + tap % conv->kernel_w;
  }
  if (!with_input) return args;

  if (conv->strips.size != 1) return std::nullopt;
  ConvDirectArgs fitting = args.conv;
  while (conv_input_bytes(fitting) > kConvMaxShared) {
    if (--fitting.slots < 2) return std::nullopt;
  }
  args.input_slots = fitting.slots;
  const int64_t sample_units = conv->units_per_strip.size;
  const int64_t gap = conv->kernel_w - 1;
  const auto span = [&](int64_t units) {  // positions, at least
    const int64_t elements = units * conv->advance;
    return elements + gap * (elements / static_cast<int64_t>(conv->strip.size));
  };
  int64_t ahead = 0;
  while (span(ahead) < conv_halo(*conv)) ++ahead;
  int64_t least = -1;
  for (int64_t pieces = 1; pieces <= std::min<int64_t>(sample_units, 64); ++pieces) {
    const int64_t units = ceil_div(sample_units, pieces);
    const int64_t of_sample = ceil_div(sample_units, units);
    const int64_t made = units + (pieces > 1 ? ahead : 0);
    const int64_t cost = ceil_div(shape.samples * of_sample, multiprocessors) * made;
    if (least >= 0 && cost >= least) continue;
    least = cost;
    args.sample_pieces = static_cast<int32_t>(of_sample);
    args.piece_units = static_cast<int32_t>(units);
  }
  args.units_ahead = static_cast<int32_t>(ahead);
  args.pieces = static_cast<int32_t>(shape.samples * args.sample_pieces);
  return args;
}

}  // namespace fx_fuser
