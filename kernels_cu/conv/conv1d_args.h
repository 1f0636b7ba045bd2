// What the host tells the grouped convolution along one dimension (conv1d.cuh) and the gradient of
// its weight (conv1d_weight.cuh), and how a block's shared memory is divided.
//
// A *chunk* is 16 bytes of shared memory, 8 channels. A *residue* is what is left of a tap by
// kConv1dResidues. Channels are those of a group.
#pragma once

#include <cstdint>

#include "common/divisor.h"

namespace fx_fuser {

constexpr int kConv1dChunk = 8;       // channels
constexpr int kConv1dResidues = 16;   // as many rows as an instruction has
constexpr int kConv1dWarpRows = 64;   // frames that a warp computes
constexpr int kConv1dHalves = 2;      // warps of the same frames, with every other residue each
constexpr int kConv1dMostStages = 3;  // of weights
constexpr int kConv1dMostColumns = 64;

// From a row of shared memory to the next one: an odd number of chunks, so that eight rows, from
// any one on, lie in different banks. Channels to a multiple of 16.
constexpr int conv1d_pitch(int channels) {
  return ((channels + 2 * kConv1dChunk - 1) / (2 * kConv1dChunk) * 2 + 1) * 16;
}

// A block's tile of the result.
struct Conv1dShape {
  int columns;    // channels of the result, a multiple of 16
  int row_warps;  // kConv1dWarpRows frames each

  constexpr int rows() const { return row_warps * kConv1dWarpRows; }
  constexpr int threads() const { return 32 * row_warps * kConv1dHalves; }
  constexpr int x_bytes(int taps, int channels) const {
    return (rows() + taps - 1) * conv1d_pitch(channels);
  }
  // 16 channels of all taps of a residue a half.
  constexpr int stage_bytes(int taps) const {
    return kConv1dHalves * ((taps + kConv1dResidues - 1) / kConv1dResidues) * columns * 32;
  }
  // Where halves meet.
  constexpr int sums_bytes() const { return rows() * columns * 4; }
  constexpr int shared_bytes(int stages, int taps, int channels) const {
    const int in_loop = x_bytes(taps, channels) + stages * stage_bytes(taps);
    return in_loop > sums_bytes() ? in_loop : sums_bytes();
  }
};

struct Conv1dArgs {
  const void* x;       // [batch, length, groups * in_channels], channels adjacent
  const void* weight;  // [group, tap, out_channels, in_channels], dense
  const void* bias;    // [groups * out_channels], or null
  void* z;             // [batch, out_length, groups * out_channels], dense
  int64_t x_batch;     // strides, in elements
  int64_t x_row;
  int32_t length;
  int32_t out_length;
  int32_t taps;
  int32_t padding;
  int32_t groups;
  int32_t in_channels;
  int32_t out_channels;
  int32_t stages;
  int32_t pitch;  // conv1d_pitch, x_bytes and stage_bytes above
  int32_t x_bytes;
  int32_t stage_bytes;
  Divisor<uint32_t> row_tiles;
  Divisor<uint32_t> batches;
  Divisor<uint32_t> column_tiles;
};

// ---- the weight's gradient ----------------------------------------------------------------------

constexpr int kConv1dWeightWarps = 4;    // with neighbouring taps
constexpr int kConv1dWeightFrames = 64;  // of a stage
constexpr int kConv1dWeightStages = 3;
// Taps that the warps of four blocks have: each warp one and the kConv1dResidues-th behind it.
constexpr int kConv1dWeightWindow = 2 * kConv1dResidues;

// A warp's tile of a tap's gradient, in 16 channels.
struct Conv1dWeightShape {
  int rows;     // of the result
  int columns;  // of x

  static constexpr int x_rows() {
    return kConv1dWeightFrames + kConv1dResidues + kConv1dWeightWarps - 1;
  }
  static constexpr int threads() { return 32 * kConv1dWeightWarps; }
  constexpr int dz_bytes() const { return kConv1dWeightFrames * conv1d_pitch(16 * rows); }
  constexpr int stage_bytes() const { return dz_bytes() + x_rows() * conv1d_pitch(16 * columns); }
  constexpr int shared_bytes() const { return kConv1dWeightStages * stage_bytes(); }
};

struct Conv1dWeightArgs {
  const void* x;    // [batch, length, groups * in_channels], channels adjacent
  const void* dz;   // [batch, out_length, groups * out_channels], channels adjacent
  void* dw;         // [group, tap, out_channels, in_channels], dense
  int64_t x_batch;  // strides, in elements
  int64_t x_row;
  int64_t dz_batch;
  int64_t dz_row;
  int32_t length;
  int32_t out_length;
  int32_t taps;
  int32_t padding;
  int32_t batches;
  int32_t in_channels;
  int32_t out_channels;
  Divisor<uint32_t> frame_tiles;
  Divisor<uint32_t> tap_blocks;
  Divisor<uint32_t> row_tiles;
  Divisor<uint32_t> column_tiles;
};

// Blocks of kConv1dWeightWarps taps, and as many kConv1dResidues behind them.
constexpr int conv1d_tap_blocks(int taps) {
  const int of_window = kConv1dResidues / kConv1dWeightWarps;
  const int rest = (taps % kConv1dWeightWindow + kConv1dWeightWarps - 1) / kConv1dWeightWarps;
  return taps / kConv1dWeightWindow * of_window + (rest < of_window ? rest : of_window);
}

}  // namespace fx_fuser
