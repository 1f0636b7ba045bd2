// How the host divides a convolution's backward into units and pieces.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "conv/conv_direct_backward_args.h"
#include "conv/conv_direct_geometry.h"

namespace fx_fuser {

inline int conv_accumulate_bytes(const ConvDirectArgs& args) {
  return conv_shared_bytes(args, /*stages=*/false) + kConvCoefficientBytes + kConvSumBytes;
}

inline int conv_input_bytes(const ConvDirectArgs& args) {
  return conv_shared_bytes(args, /*stages=*/false) + kConvCoefficientBytes + kConvGivenBytes +
         kConvRingBytes;
}

// Like conv_geometry, for the sums and the weight's gradient and, if `with_input`, the input's.
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
  // Each product warpgroup holds one slot while it waits for its next.
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
