// How the host divides a convolution into units, which conv_direct_args.h defines.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "conv/conv_direct_args.h"

namespace fx_fuser {

struct ConvShape {
  int64_t samples, channels, h, w, outputs, kernel_h, kernel_w;
  int64_t left, right, top, bottom;

  int64_t out_h() const { return h + top + bottom - kernel_h + 1; }
  int64_t out_w() const { return w + left + right - kernel_w + 1; }
};

// The steps: each multiplies two k-halves. In fp32 the weights' lo, then hi, are tiles of 1 KB that
// follow a tile of zeros; the pixels' hi, then lo, are planes. Small products come before large
// ones, for the accuracy of fp32 sums. In 16 bits there is one product: one tile per tap, one
// plane.
inline std::vector<ConvStep> conv_steps(int kernel_h, int kernel_w, int pitch, int plane,
                                        bool split) {
  struct Half {
    int weight;
    int pixels;
  };
  const int taps = kernel_h * kernel_w;
  const auto half = [&](bool weight_is_lo, bool pixels_are_lo, int tap) {
    const int tile = 1 + (split && !weight_is_lo ? taps : 0) + tap;
    const int pixel = tap / kernel_w * pitch + tap % kernel_w;
    return Half{tile * kConvTileUnits, pixel + (pixels_are_lo ? plane : 0)};
  };
  std::vector<Half> halves;
  if (split) {
    for (int tap = 0; tap < taps; ++tap) halves.push_back(half(true, false, tap));
    // An odd tap goes first, so that hi weights have the same pairs here and below.
    if (taps % 2 == 1) halves.push_back(half(false, true, taps - 1));
    for (int tap = 0; tap < taps / 2 * 2; ++tap) halves.push_back(half(false, true, tap));
  }
  for (int tap = 0; tap < taps; ++tap) halves.push_back(half(false, false, tap));
  if (halves.size() % 2 == 1) {
    // An odd half is paired with weights of zero. In fp32 these multiply pixels that the outputs
    // depend on anyway: if an infinity among them makes a NaN, the sum is recomputed. In 16 bits
    // nothing is recomputed, so if both halves name the same pixels, the kernel reads zeros for the
    // first half's (descriptor_of_pixels).
    const auto neighbour = halves.end() - (split && taps > 1 ? 2 : 1);
    halves.insert(halves.end() - 1, Half{0, neighbour->pixels});
  }
  std::vector<ConvStep> steps;
  for (size_t i = 0; i < halves.size(); i += 2) {
    Half first = halves[i];
    Half second = halves[i + 1];
    if (first.pixels > second.pixels) std::swap(first, second);
    const auto descriptor = [](int begin, int end) {
      return static_cast<uint32_t>(begin) | static_cast<uint32_t>(end - begin) << 16;
    };
    steps.push_back(
        {descriptor(first.weight, second.weight), descriptor(first.pixels, second.pixels)});
  }
  return steps;
}

// ---- units and slots ----------------------------------------------------------------------------

// The most positions that `count` consecutive elements of a strip span.
inline int64_t conv_positions_of(int64_t count, int64_t strip, int64_t gap) {
  return count + gap * ceil_div(count - 1, strip);
}

// Positions from an output's first tap to its last one.
inline int conv_halo(const ConvDirectArgs& args) {
  return (args.kernel_h - 1) * static_cast<int>(args.pitch.size) + args.kernel_w - 1;
}

// Shared memory that does not depend on the number of slots.
inline int conv_fixed_bytes(const ConvDirectArgs& args, bool stages) {
  return args.weight_bytes + (stages ? kConvStageBytes : 0) + args.zero_bytes;
}

inline int64_t conv_slots_beside(int64_t fixed_bytes, int64_t slot_bytes, int64_t units_of_slot) {
  return (kConvMaxShared - kConvTailBytes - fixed_bytes) /
         (slot_bytes + units_of_slot * kConvPlaceBytes);
}

inline void set_slots(ConvDirectArgs& args, int64_t slots) {
  args.slots = static_cast<int32_t>(std::min<int64_t>(slots, kConvMaxSlots));
  args.tail_bytes = kConvTailBytes + args.slots * args.paired * kConvPlaceBytes;
}

// Whether the kernels support the shape at all.
inline bool conv_takes(const ConvShape& shape, bool split) {
  const int64_t taps = shape.kernel_h * shape.kernel_w;
  const bool padded_both_ways = std::min({shape.left, shape.right, shape.top, shape.bottom}) >= 0;
  if (shape.samples < 1 || shape.channels < 1 || shape.channels > kConvChannels ||
      shape.outputs < 1 || taps < 1 || taps > (split ? kConvMaxTaps : kConvMaxTapsOf16Bits) ||
      !padded_both_ways || shape.out_h() < 1 || shape.out_w() < 1) {
    return false;
  }
  // Indices within an image have 32 bits.
  const int64_t padded =
      (shape.h + shape.top + shape.bottom) * (shape.w + shape.left + shape.right);
  return padded <= kConvHighest / kConvChannels && shape.outputs <= kConvHighest / kConvGroup;
}

inline void set_shape(ConvDirectArgs& args, const ConvShape& shape) {
  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  args.samples = narrow(shape.samples);
  args.channels = narrow(shape.channels);
  args.h = narrow(shape.h);
  args.w = narrow(shape.w);
  args.outputs = narrow(shape.outputs);
  args.out_h = narrow(shape.out_h());
  args.out_w = narrow(shape.out_w());
  args.kernel_h = narrow(shape.kernel_h);
  args.kernel_w = narrow(shape.kernel_w);
  args.top = narrow(shape.top);
  args.left = narrow(shape.left);
}

// Divides a convolution into units; std::nullopt if the kernels do not support it. `x_bytes`: size
// of an element of x and weight, 4 or 2. `out_bytes`: of the result, 0 if only sums are computed.
// `positions`: per unit; see conv_statistics_geometry.
inline std::optional<ConvDirectArgs> conv_geometry(const ConvShape& shape, int x_bytes,
                                                   int out_bytes,
                                                   int64_t positions = kConvPositions) {
  const int64_t taps = shape.kernel_h * shape.kernel_w;
  const int64_t gap = shape.kernel_w - 1;
  const bool split = x_bytes == 4;
  const int64_t planes = split ? 2 : 1;
  if (!conv_takes(shape, split)) return std::nullopt;

  ConvDirectArgs args{};
  args.positions = static_cast<int32_t>(positions);
  args.weight_bytes = static_cast<int32_t>((1 + planes * taps) * kConvTileUnits * 16);
  args.zero_bytes = split ? 0 : kConvZeroBytes;
  const int64_t fixed = conv_fixed_bytes(args, out_bytes > 0);
  int64_t chunks = kConvMaxChunks;
  const auto slot_bytes = [&] { return chunks * kConvChunk * 16 * planes; };
  const auto slots_of = [&] { return conv_slots_beside(fixed, slot_bytes(), 1); };
  // One is loaded while another is multiplied. For statistics each of the two product warpgroups
  // holds one while it waits for its next.
  const int64_t least_slots = out_bytes > 0 ? 2 : 3;
  while (chunks > 0 && slots_of() < least_slots) --chunks;
  if (chunks == 0) return std::nullopt;

  // The widest strips whose units' pixels fit, all of the same width.
  const int64_t spared = positions / kConvSparedPart;
  const int64_t room = chunks * kConvChunk - positions + (positions > kConvPositions ? spared : 0);
  int64_t widest = shape.out_w();
  if (room < gap) return std::nullopt;
  if (shape.kernel_h > 1) widest = std::min(widest, (room - gap) / (shape.kernel_h - 1) - gap);
  if (widest < std::min<int64_t>(shape.out_w(), 32)) return std::nullopt;
  const int64_t strips = ceil_div(shape.out_w(), widest);
  const int64_t strip = ceil_div(shape.out_w(), strips);
  const int64_t pitch = strip + gap;
  const int64_t halo = (shape.kernel_h - 1) * pitch + gap;
  const int64_t elements = shape.out_h() * strip;

  // A few positions less if that saves a chunk that few threads would load.
  int64_t used = positions;
  chunks = ceil_div(used + halo, kConvChunk);
  const int64_t excess = used + halo - (chunks - 1) * kConvChunk;
  if (excess <= spared) {
    used -= excess;
    --chunks;
  }
  // Channels' planes may begin anywhere in a sector. So that only whole sectors are written, a unit
  // also computes the elements ahead of its own that may share its first sector.
  const int64_t overlap = out_bytes > 0 && strips == 1 ? kConvSector / out_bytes - 1 : 0;
  const int64_t lead = overlap > 0 ? overlap + 1 : 0;
  // A stage has room for a channel's elements at any offset of the first one within a vector.
  int64_t advance = positions - kConvStoreWidth - lead;
  while (advance > 0 && conv_positions_of(advance + lead, strip, gap) > used) advance -= 2;
  // Units of whole rows have fewer gaps.
  if (overlap == 0) {
    const int64_t rows = std::min((used + gap) / pitch, (positions - kConvStoreWidth) / strip);
    advance = std::max(advance, rows * strip);
  }
  if (advance <= lead) return std::nullopt;
  const int64_t units_per_strip = ceil_div(elements, advance);
  if (overlap > 0) advance = ceil_div(ceil_div(elements, units_per_strip), 2) * 2;
  const int64_t groups = ceil_div(shape.outputs, kConvGroup);
  const int64_t units = shape.samples * strips * units_per_strip;
  if (units > kConvHighest) return std::nullopt;

  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  set_shape(args, shape);
  args.strip = make_divisor(static_cast<uint32_t>(strip));
  args.pitch = make_divisor(static_cast<uint32_t>(pitch));
  args.strips = make_divisor(static_cast<uint32_t>(strips));
  args.linear = strips == 1 && shape.left == 0 && shape.right == 0 && shape.top == 0;
  args.elements = narrow(elements);
  args.advance = narrow(advance);
  args.overlap = narrow(overlap);
  args.lead = narrow(lead);
  args.units_per_strip = make_divisor(static_cast<uint32_t>(units_per_strip));
  args.units = narrow(units);
  args.groups = narrow(groups);
  args.chunks = narrow(chunks);
  args.slot_bytes = narrow(slot_bytes());
  const auto steps =
      conv_steps(args.kernel_h, args.kernel_w, narrow(pitch), narrow(chunks * kConvChunk), split);
  args.steps = narrow(static_cast<int64_t>(steps.size()));
  args.place_bytes = 4;
  args.paired = 1;
  set_slots(args, slots_of());
  std::copy(steps.begin(), steps.end(), args.step);
  return args;
}

// As many blocks as keep all multiprocessors busy, and the same number for each group of channels.
inline int64_t conv_blocks(const ConvDirectArgs& args, int64_t multiprocessors) {
  const int64_t of_group = std::max<int64_t>(multiprocessors / args.groups, 1);
  return std::min<int64_t>(of_group, args.units / args.paired) * args.groups;
}

// Units of the block with most of them.
inline int64_t conv_units_of_block(const ConvDirectArgs& args, int64_t multiprocessors) {
  const int64_t blocks = conv_blocks(args, multiprocessors) / args.groups;
  return ceil_div(args.units / args.paired, blocks) * args.paired;
}

// Lets two consecutive units share a slot if a block then loads fewer pixels and has hardly more
// units. For 16 bits, and the kernel that applies the epilogue ahead of the stages.
inline void pair_units(ConvDirectArgs& args, int64_t multiprocessors) {
  const int64_t strip = args.strip.size;
  const int64_t gap = args.kernel_w - 1;
  const int64_t per_strip = ceil_div(args.units_per_strip.size, 2) * 2;
  const int64_t advance = ceil_div(ceil_div(args.elements, per_strip), 2) * 2;
  const int64_t units = args.samples * per_strip;
  if (args.strips.size != 1 || advance <= args.lead || advance > args.advance ||
      advance * (per_strip - 1) >= args.elements || units > kConvHighest) {
    return;
  }
  const int64_t further = conv_positions_of(advance + 1, strip, gap) - 1;  // the second's first
  // Products may read beyond the pixels, but not beyond the shared memory behind the slots.
  const int64_t positions = std::max(conv_positions_of(advance + args.lead, strip, gap),
                                     int64_t{kConvPositions - kConvPositions / kConvSparedPart});
  const int64_t chunks = ceil_div(further + positions + conv_halo(args), int64_t{kConvChunk});
  if (chunks > kConvMaxChunks) return;
  const int64_t slot_bytes = chunks * kConvChunk * 16;
  const int64_t slots = conv_slots_beside(conv_fixed_bytes(args, true), slot_bytes, 2);
  if (slots < 2) return;
  ConvDirectArgs paired = args;
  paired.paired = 2;
  paired.units_per_strip = make_divisor(static_cast<uint32_t>(per_strip));
  paired.units = static_cast<int32_t>(units);
  paired.advance = static_cast<int32_t>(advance);
  paired.chunks = static_cast<int32_t>(chunks);
  paired.slot_bytes = static_cast<int32_t>(slot_bytes);
  set_slots(paired, slots);

  const int64_t before = conv_units_of_block(args, multiprocessors);
  const int64_t after = conv_units_of_block(paired, multiprocessors);
  if (after / 2 * chunks < before * args.chunks && after - before <= before / 16) args = paired;
}

// For statistics: wide units if the busiest loading warpgroup (a block has two) then loads fewer
// pixels.
inline std::optional<ConvDirectArgs> conv_statistics_geometry(const ConvShape& shape, int x_bytes,
                                                              int64_t multiprocessors) {
  const auto usual = conv_geometry(shape, x_bytes, 0);
  const auto wide = conv_geometry(shape, x_bytes, 0, kConvWidePositions);
  if (!usual || !wide) return usual;
  const auto loaded = [&](const ConvDirectArgs& args) {
    const int64_t loaders = 2 * conv_blocks(args, multiprocessors) / args.groups;
    return ceil_div(args.units, loaders) * args.chunks;
  };
  return loaded(*wide) < loaded(*usual) ? wide : usual;
}

inline int conv_shared_bytes(const ConvDirectArgs& args, bool stages) {
  return conv_fixed_bytes(args, stages) + args.slots * args.slot_bytes + args.tail_bytes;
}

}  // namespace fx_fuser
